"""Under lm-evaluation-harness: the figures of its own `hf` model, to the rounding of float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv import Engine, KVConfig
from radixkv.errors import UnknownOptionError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from radixkv.integrations.lm_eval import RadixKVLM

ROOT = Path(__file__).resolve().parent.parent
KV = KVConfig(dtype="model", page_size=4, capacity="4MiB")
NUM_POSITIONS = 32


def make_tokenizer(merges: Any = (), *, bos: bool = False, meta: str | None = None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    letters = ["▁", *map(chr, range(10, 127))]
    for symbol in letters if meta else sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(symbol, len(vocab))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    if meta:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=meta, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=meta)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


WORDS = [("i", "n"), ("t", "h"), ("th", "e"), ("Ġ", "a")]
TOKENIZERS = {
    "bytes": lambda: make_tokenizer(WORDS),
    "bytes with a beginning token": lambda: make_tokenizer(WORDS, bos=True),
    "prefix space": lambda: make_tokenizer([("t", "h"), ("▁", "t")], meta="first", bos=True),
    "no prefix space": lambda: make_tokenizer(meta="never"),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def pair(request: Any, tiny_model: Any) -> Iterator[tuple[Any, Any]]:
    """The harness's own model and ours, of the same weights and tokenizer."""
    tokenizer = TOKENIZERS[request.param]()
    options = dict(vocab_size=len(tokenizer), max_position_embeddings=NUM_POSITIONS, fresh=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = HFLM(pretrained=tiny_model(**options), tokenizer=tokenizer, batch_size=3)
    with Engine(tiny_model(**options), TOKENIZERS[request.param](), kv=KV) as engine:
        yield own, RadixKVLM(engine)
        engine.cache.check()


def ask(lm: Any, kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    requests = [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generate's own settings
        answers: list[Any] = getattr(lm, kind)(requests, disable_tqdm=True)
    return answers


def require_equal(ours: list[Any], own: list[Any]) -> None:
    for (logprob, is_greedy), (expected, was_greedy) in zip(ours, own, strict=True):
        assert logprob == pytest.approx(expected, abs=2e-4)
        assert is_greedy == was_greedy
        assert logprob < 0


PAIRS = [
    ("The answer is", " yes"),
    ("The answer is ", "yes"),  # the space goes to the continuation
    ("The answer is\n", "no"),
    ("", "alone"),
    ("a", "b"),
    ("<s>begins", " itself"),
    ("x" * 40, " is longer than the model"),
    ("The answer", " is" + "o" * 12),
    ("Q: what?\nA:", " that\n"),
]


def test_log_likelihoods_are_those_of_hf(pair: Any) -> None:
    own, ours = pair
    require_equal(ask(ours, "loglikelihood", PAIRS), ask(own, "loglikelihood", PAIRS))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_pair_whose_border_is_between_tokens_is_as_hf_has_it(
    pair: Any, data: st.DataObject
) -> None:
    own, ours = pair
    texts = st.text(st.sampled_from("athein .\n:"), min_size=1, max_size=40)
    pairs = []
    for _ in range(4):
        context, tail = data.draw(texts), data.draw(texts)
        if not context.rstrip() or len(own.tok_encode(tail)) >= NUM_POSITIONS:
            continue
        bare = context.rstrip()
        head, whole = own.tok_encode(bare), own.tok_encode(context + tail)
        if whole[: len(head)] == head and len(whole) > len(head):
            pairs.append((context, tail))
    if pairs:
        require_equal(ask(ours, "loglikelihood", pairs), ask(own, "loglikelihood", pairs))


@pytest.mark.parametrize("length", [1, 2, 30, 31, 32, 33, 34, 62, 63, 64, 65, 66, 100])
def test_rolling_windows_are_those_of_hf(pair: Any, length: int) -> None:
    own, ours = pair
    assert ours.max_length == own.max_length == NUM_POSITIONS
    text = ("the inn at the end. " * 6)[:length]
    (expected,) = ask(own, "loglikelihood_rolling", [(text,)])
    assert ask(ours, "loglikelihood_rolling", [(text,)]) == [pytest.approx(expected, abs=1e-3)]


def test_generated_texts_are_those_of_hf(pair: Any) -> None:
    own, ours = pair
    (whole,) = ask(own, "generate_until", [("The inn", {"until": [], "max_gen_toks": 12})])
    assert len(whole) > 4
    asked: list[tuple[str, dict[str, Any]]] = [
        ("The inn", {"until": [], "max_gen_toks": 12}),
        ("The inn", {"until": [whole[3:5], "\0"], "max_gen_toks": 12}),
        ("The inn ", {"until": whole[2], "max_gen_toks": 12, "do_sample": False}),
        ("<s>The end", {"max_gen_toks": 9}),
        ("long " * 30, {"max_gen_toks": 5, "until": ["\n\n"]}),
    ]
    for one in asked:  # one at a time: `hf` pads a batch, and decides by its first text
        assert ask(ours, "generate_until", [one]) == ask(own, "generate_until", [one]), one


# What the harness gets wrong or ends on


@pytest.fixture(scope="module")
def merging(tiny_model: Any) -> Iterator[Any]:
    tokenizer = make_tokenizer([(":", "Ġ"), (":Ġ", "C"), ("t", "h"), ("th", "e")])
    with Engine(tiny_model(vocab_size=len(tokenizer)), tokenizer, kv=KV) as engine:
        yield RadixKVLM(engine)


@pytest.mark.parametrize(
    ("context", "choices"),
    [("q:", [" A", " B", " C"]), ("th", ["e", "ey"]), ("t", ["h", "he", "hey", "x"])],
)
def test_a_choice_that_merges_with_the_context_is_scored_whole(
    merging: Any, context: str, choices: list[str]
) -> None:
    tokenizer, engine = merging.tokenizer, merging.engine
    answers = ask(merging, "loglikelihood", [(context, choice) for choice in choices])
    head = tokenizer(context)["input_ids"]
    for choice, (logprob, _) in zip(choices, answers, strict=True):
        tail = tokenizer(choice)["input_ids"]
        assert tokenizer.decode(head + tail) == context + choice
        (expected,) = engine.score(head, [tail])
        assert logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert logprob < 0


@pytest.mark.parametrize(
    "pair_", [("a", ""), ("", ""), ("", "<s>")], ids=["no text", "nothing", "the prefix alone"]
)
def test_an_empty_continuation_is_refused_and_not_certain(merging: Any, pair_: Any) -> None:
    with pytest.raises(ValueError, match=r"continuation: expected .* in request 1, after"):
        ask(merging, "loglikelihood", [("a", "b"), pair_])
    with pytest.raises(ValueError, match="continuation: expected at least one token"):
        merging._loglikelihood_tokens([(None, [5], [])])


def test_a_context_of_spaces_is_none(merging: Any) -> None:
    spaces, none = ask(merging, "loglikelihood", [("  ", "x"), ("", "  x")])
    assert spaces == none
    assert spaces[0] < 0


# Options


def test_options_without_effect_are_refused(merging: Any) -> None:
    for name in ("kv_dtype", "capacity", "dtype", "device"):
        with pytest.raises(TypeError, match=f"got an engine and {name}; make the engine with"):
            RadixKVLM(merging.engine, **{name: "x"})
    lm = RadixKVLM(merging.engine, batch_size=1, max_batch_size=None, device=None)
    assert lm.max_length == lm.engine.max_positions
    with pytest.raises(ValueError, match="max_length: expected an integer from 1 to 256, got 300"):
        RadixKVLM(merging.engine, max_length=300)
    for options, says in (
        ({"num_beams": 2}, "got num_beams; num_beams is beam search"),
        ({"topp": 1}, "topp: did you mean top_p"),
    ):
        with pytest.raises(ValueError, match=f"generation_kwargs: expected .* {says}"):
            ask(merging, "generate_until", [("x", options)])


def test_a_pool_smaller_than_the_model_is_said(tiny_model: Any, caplog: Any) -> None:
    tokenizer = make_tokenizer()
    kv = KVConfig(dtype="model", page_size=4, capacity="16KiB")
    with Engine(tiny_model(vocab_size=len(tokenizer)), tokenizer, kv=kv) as engine:
        lm = RadixKVLM(engine)
        pool_tokens = (engine.cache.pool.num_pages - 1) * 4
        assert lm.max_length == pool_tokens < engine.max_positions
        assert f"cut to {pool_tokens} tokens" in caplog.text
        ask(lm, "loglikelihood_rolling", [("a" * 100,)])  # the longest windows fit


# The command line


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Any, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run_harness(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """The harness as a user starts it, with radixkv as installed by its own metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / "radixkv_probe-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: radixkv-probe\nVersion: 0\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {where}" for name, where in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_harnesss_command_line_finds_the_model(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"is {i}", "a": " no"}) + "\n" for i in range(3))
    )
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": [" no", " yes"],
        "doc_to_target": "a",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))
    code = (  # as its command does, but without reading the 10,000 files of its own tasks
        "import lm_eval.tasks; made = lm_eval.tasks.TaskManager.__init__; "
        "lm_eval.tasks.TaskManager.__init__ = lambda self, *args, **options: made("
        "self, *args, **{**options, 'include_defaults': False}); "
        "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    )
    done = run_harness(
        tmp_path,
        *("-c", code, "--model", "radixkv", "--tasks", str(tmp_path / "tiny.yaml")),
        *("--model_args", f"pretrained={checkpoint},capacity=1MiB,dtype=float32"),
        *("--batch_size", "2"),
    )
    assert done.returncode == 0, done.stderr
    assert "radixkv ({" in done.stdout
    assert "|tiny |" in done.stdout


def test_our_own_road_to_it_needs_no_hook(tmp_path: Path) -> None:
    code = (
        "import os, runpy; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; "
        "import lm_eval.__main__ as harness; from lm_eval.api.registry import get_model; "
        "harness.cli_evaluate = lambda: print(get_model('radixkv')); "
        "runpy.run_module('radixkv.integrations.lm_eval', run_name='__main__', alter_sys=True)"
    )
    done = run_harness(tmp_path, "-c", code)
    assert done.stdout == "<class 'radixkv.integrations.lm_eval.RadixKVLM'>\n", done.stderr


def test_the_hook_does_nothing_elsewhere_and_breaks_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, torch; assert 'radixkv.autoload' in sys.modules; "
        "assert not [m for m in sys.modules if m.startswith(('radixkv.e', 'lm_eval'))]; "
        "import types; sys.modules['lm_eval'] = types.ModuleType('lm_eval'); "
        "import logging; logging.basicConfig(); "
        "from radixkv.autoload import register_models; register_models()"
    )
    done = run_harness(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert "is not registered" in done.stderr


def test_an_unknown_argument_of_the_model_is_named(checkpoint: Path) -> None:
    with pytest.raises(UnknownOptionError, match=r"'page_size'; .*kv=KVConfig\(page_size=\.\.\.\)"):
        RadixKVLM(pretrained=str(checkpoint), page_size=4)
