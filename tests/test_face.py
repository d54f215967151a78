"""What the library shows of itself: repr, describe, the log; and that it is quiet else."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv import (
    Branch,
    Engine,
    EngineClosedError,
    KVConfig,
    Lease,
    Pin,
    PrefixCache,
    Request,
)
from radixkv.engine.stream import Stream
from radixkv.models.small_model import hidden_progress_bars

KV = KVConfig(page_size=4, capacity="64KiB", v_dtype="fp8")
PROMPT = list(range(3, 20))


@pytest.fixture
def engine(tiny_model: Callable[..., Any], byte_tokenizer: Any) -> Any:
    with Engine(tiny_model("llama"), byte_tokenizer, kv=KV, backend="torch") as made:
        yield made


def test_repr_says_model_backend_device_formats_pages_and_whether_it_is_open(engine):
    total = engine.cache.stats().pages_total
    engine.generate(PROMPT, max_new_tokens=1, temperature=0)
    used = total - engine.cache.stats().pages_free
    assert used > 0
    pages = f"{used:,} of {total:,} pages of 4 tokens used"
    said = repr(engine)
    where = "LlamaForCausalLM in float32 on cpu, backend torch, int8/fp8 KV"
    assert said == f"<Engine of {where}: {pages}, open>"
    cached = engine.cache.match(PROMPT)
    of_cache = (
        f"<PrefixCache of int8/fp8 KV on cpu, backend torch: {pages}, {cached} tokens cached>"
    )
    assert repr(engine.cache) == of_cache
    branch = engine.open(PROMPT)
    assert repr(branch) == f"<Branch of 17 tokens, KV of 16 held, open, on {where}>"
    stream = engine.stream(PROMPT, max_new_tokens=3, ignore_eos=True)
    next(stream)
    assert "17 prompt tokens" in repr(stream)
    assert stream.request.wait(60)
    assert repr(stream).endswith("3 generated, done>, 2 deltas ready, open>")
    list(stream)
    assert repr(stream).endswith("3 generated, done>, 0 deltas ready, closed>")
    engine.close()
    assert repr(engine).endswith(", closed>")
    assert "closed" in repr(branch)


def test_repr_of_requests_leases_and_pins_says_how_they_stand(engine):
    request = engine.submit(PROMPT, max_new_tokens=2, ignore_eos=True)
    assert repr(request) == "<SampleRequest of 17 prompt tokens, 0 generated, waiting>"
    engine.step()
    assert repr(request) == "<SampleRequest of 17 prompt tokens, 1 generated, running>"
    engine.step()
    assert repr(request) == "<SampleRequest of 17 prompt tokens, 2 generated, done>"
    aborted = engine.submit(PROMPT)
    engine.abort(aborted)
    assert repr(aborted).endswith("aborted>")
    with engine.cache.acquire(PROMPT) as lease:
        assert repr(lease) == "<Lease of 17 tokens on 5 pages, 16 were cached, 16 have KV>"
    assert repr(lease) == "<Lease of 17 tokens, released>"
    with engine.cache.pin(PROMPT) as pin:
        assert repr(pin) == "<Pin of 17 tokens on 5 pages, active>"
    assert repr(pin).endswith("ended>")


@pytest.mark.parametrize("kind", [Engine, PrefixCache, Branch, Stream, Lease, Pin, Request])
def test_repr_of_a_half_made_object_says_so(kind):
    assert repr(kind.__new__(kind)) == f"<{kind.__name__} not whole: AttributeError>"


def test_repr_waits_for_no_lock(engine):
    branch, stream = engine.open(PROMPT), engine.stream(PROMPT, max_new_tokens=1)
    list(stream)
    said: list[str] = []
    with engine.cache.acquire(PROMPT) as lease, engine.cache.pin(PROMPT[:8]) as pin:
        shown = [engine, engine.cache, branch, stream, stream.request, lease, pin]
        asker = threading.Thread(target=lambda: said.extend(map(repr, shown)), daemon=True)
        with engine.core.step_lock, engine.core.changed, engine.cache.core.guard.lock:
            asker.start()
            asker.join(60)
            assert len(said) == len(shown)
    assert not any("not whole" in one for one in said)


def test_repr_answers_inside_a_step_and_inside_a_call_on_the_cache(engine):
    said: list[str] = []

    def processor(input_ids: Any, logits: Any) -> Any:
        said.append(repr(engine))
        return logits

    engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True, logits_processors=[processor])
    with engine.cache.core.guard:
        said += [repr(engine), repr(engine.cache)]
    assert len(said) == 4
    assert all(one.startswith(("<Engine of Llama", "<PrefixCache of int8")) for one in said)


def test_describe_is_json_and_reads_as_a_table(engine):
    engine.generate(PROMPT, max_new_tokens=1, temperature=0)
    found = engine.describe()
    assert isinstance(found, dict)
    assert json.loads(json.dumps(found)) == found
    stats = engine.cache.stats()
    assert found["model"] == "LlamaForCausalLM"
    assert (found["dtype"], found["device"], found["backend"]) == ("float32", "cpu", "torch")
    assert sum(found["weights"].values()) == sum(
        weight.numel() * weight.element_size() for weight in engine.model.parameters()
    )
    assert found["is_batch_invariant"] is engine.is_batch_invariant
    assert found["pages"]["total"] == stats.pages_total
    assert found["pages"]["free"] == stats.pages_free
    assert found["pool"]["capacity_bytes"] == stats.capacity_bytes
    assert found["kv"]["v_dtype"] == "fp8"
    assert [tier["name"] for tier in found["tiers"]] == ["memory"]
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == list(found)
    assert all(len(line) < 160 for line in lines)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.describe()


def test_describe_says_which_layers_are_not_fused_and_why(tiny_model):
    model = tiny_model("llama", fresh=True, num_hidden_layers=4)
    with Engine(model, kv=KV) as engine:
        assert engine.describe()["fused_layers"] == [0, 1, 2, 3]
        assert engine.describe()["unfused_layers"] == []
        handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args: None)
        found = engine.describe()
        assert found["fused_layers"] == [0, 2, 3]
        (group,) = found["unfused_layers"]
        assert group["layers"] == [1]
        assert "up_proj" in group["why"]
        assert "hook" in group["why"]
        assert "1: its up_proj" in str(found)
        handle.remove()
        assert engine.describe()["fused_layers"] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "opt"])
def test_describe_says_that_a_family_is_not_fused(tiny_model, name):
    with Engine(tiny_model(name), kv=KVConfig(capacity="64KiB"), backend="torch") as engine:
        found = engine.describe()
    assert found["fused_layers"] == []
    (group,) = found["unfused_layers"]
    assert group["layers"] == [0, 1]
    assert "of no family that is fused (llama, mistral, qwen2, qwen3)" in group["why"]


def test_describe_names_as_fused_what_the_compiled_calls_have_run(tiny_model):
    from radixkv.models.decoder_layer import FusedLayer

    model = tiny_model("qwen3", fresh=True)
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *args: None)
    ready: list[list[bool]] = []

    def processor(input_ids: Any, logits: Any) -> Any:
        fused = [layer.__dict__.get("forward") for layer in model.model.layers]
        ready.append([isinstance(own, FusedLayer) and own.is_ready for own in layers or fused])
        return logits

    with Engine(model, kv=KV) as engine:
        stand_ins = engine.core.runner._held._stand_ins
        layers = [stand_ins.get(layer) for layer in model.model.layers]
        engine.generate(PROMPT, max_new_tokens=1, logits_processors=[processor])
        assert engine.describe()["fused_layers"] == [1]
    assert ready == [[False, True]]


def test_an_engine_says_one_line_when_it_is_made_and_one_a_step_where_asked(
    tiny_model, byte_tokenizer, caplog
):
    model = tiny_model("llama")
    with Engine(model, byte_tokenizer, kv=KV, backend="torch"):
        pass
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, logger="radixkv"),
        Engine(model, byte_tokenizer, kv=KV, backend="torch") as engine,
    ):
        engine.generate(PROMPT, max_new_tokens=3, ignore_eos=True)
        (line,) = [one for one in caplog.records if one.name == "radixkv"]
    assert line.levelno == logging.INFO
    said = line.getMessage()
    total = engine.cache.pool.num_pages
    for part in ("LlamaForCausalLM", "float32 on cpu", "backend torch", "int8/fp8", "threads"):
        assert part in said
    assert f"{total} pages of 4 tokens" in said
    caplog.clear()
    with (
        caplog.at_level(logging.DEBUG, logger="radixkv"),
        Engine(model, byte_tokenizer, kv=KV, backend="torch") as engine,
    ):
        engine.generate([PROMPT, PROMPT[:5]], max_new_tokens=3, ignore_eos=True)
        num_steps = engine.stats().steps
        steps = [one.getMessage() for one in caplog.records if one.levelno == logging.DEBUG]
    assert len(steps) == num_steps > 0
    assert all(" sequences, " in one and " ms" in one for one in steps)


def test_a_compiled_kernel_is_said_in_the_log_and_not_on_stderr(caplog, capfd):
    from radixkv_kernels.cpu import launch

    class Kernel:
        cache_hits = 0
        address = 7

    def make_nothing() -> Kernel:
        return Kernel()

    with caplog.at_level(logging.INFO, logger="radixkv"):
        assert launch.kernel_address.__wrapped__(make_nothing) == 7
    launch._keep.pop()
    assert "compiled a CPU kernel (nothing) in " in caplog.text
    assert capfd.readouterr() == ("", "")


def test_our_bars_do_not_reach_a_pipe(engine, capfd, tmp_path):
    engine.generate([PROMPT, PROMPT[:5]], max_new_tokens=2, progress=True)
    engine.cache.save(tmp_path / "kv", progress=True)
    engine.cache.clear()
    engine.cache.load(tmp_path / "kv", progress=True)
    assert capfd.readouterr() == ("", "")


QUIET = """
import sys
import radixkv
kv = radixkv.KVConfig(capacity="1MiB")
with radixkv.Engine.from_pretrained(sys.argv[1], kv=kv, backend="torch") as engine:
    print(len(engine.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True, progress=True)
              .samples[0].token_ids))
"""


def test_from_pretrained_and_generate_write_nothing_to_a_pipe(tiny_model, tmp_path):
    # No tokenizer there: that is a warning, for the log alone.
    tiny_model("llama").save_pretrained(tmp_path / "model")
    env = {**os.environ, "PYTHONPATH": str(Path(radixkv.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", QUIET, str(tmp_path / "model")],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_bars_of_other_libraries_are_as_before_after_a_model_was_loaded(tiny_model, tmp_path):
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging as theirs

    tiny_model("llama").save_pretrained(tmp_path)
    before = theirs.is_progress_bar_enabled(), are_progress_bars_disabled(), gguf.tqdm
    kv = KVConfig(capacity="1MiB")
    Engine.from_pretrained(tmp_path, kv=kv, backend="torch").close()
    after = theirs.is_progress_bar_enabled(), are_progress_bars_disabled(), gguf.tqdm
    assert after == before


def test_the_bar_of_the_gguf_reader_does_not_reach_a_pipe(capfd):
    from transformers import modeling_gguf_pytorch_utils as gguf

    with hidden_progress_bars():
        assert list(gguf.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert capfd.readouterr() == ("", "")
