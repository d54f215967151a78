"""`radixkv quality`: figures that follow from what they are defined as, and clear refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import KVConfig
from radixkv.cli import main as cli
from radixkv.engine.engine import Engine
from radixkv.tools.quality import (
    FORMATS,
    FormatQuality,
    Quality,
    default_text,
    measure_quality,
    parse_format,
    recommend,
)

TEXT = torch.randint(3, 1000, (400,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def measured(tiny_model) -> Quality:
    formats = (*FORMATS, "model")
    return measure_quality(tiny_model(), TEXT, num_tokens=150, context=64, formats=formats)


def rows_of(quality: Quality) -> dict[tuple[str, str], FormatQuality]:
    return {(row.kv_dtype, row.rotate): row for row in quality.formats}


def test_unquantized_pages_differ_by_exactly_nothing(measured):
    row = rows_of(measured)["model", "none"]
    assert (row.kl_mean, row.kl_p99, row.perplexity_change) == (0.0, 0.0, 0.0)
    assert (row.perplexity_change_stderr, row.top1_agreement) == (0.0, 1.0)
    assert row.perplexity == measured.perplexity
    assert row.greedy_match == measured.greedy_tokens
    assert row.bytes_per_token == measured.bytes_per_token


def test_every_format_is_measured_with_and_without_rotation(measured):
    rows = rows_of(measured)
    pairs = [(name, rotate) for name in FORMATS for rotate in ("none", "hadamard")]
    assert list(rows) == [*pairs, ("model", "none")]
    for key in pairs:
        row = rows[key]
        assert 0 < row.kl_mean < row.kl_p99, key  # it is quantized
        assert 0 <= row.greedy_match <= measured.greedy_tokens
        assert row.bytes_per_token < measured.bytes_per_token
    for rotate in ("none", "hadamard"):
        assert rows["int8", rotate].kl_mean < 1e-3
        kls = [rows[name, rotate].kl_mean for name in ("int8", "fp8", "fp8_e5m2", "int4")]
        assert kls == sorted(kls)
        mixed = rows["int8/int4", rotate]
        assert rows["int8", rotate].kl_mean < mixed.kl_mean < rows["int4", rotate].kl_mean


def test_the_perplexity_is_the_models_own(tiny_model, measured):
    """Oracle: the model itself, window by window, without pages."""
    model, context, num_tokens = tiny_model(), 64, 150
    total = 0.0
    for start in range(0, num_tokens, context):
        stop = min(start + context, num_tokens)
        with torch.inference_mode():
            logits = model(torch.tensor([TEXT[start:stop]]), use_cache=False).logits[0].double()
        targets = torch.tensor(TEXT[start + 1 : stop + 1])
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    assert measured.perplexity == pytest.approx(math.exp(total / num_tokens), rel=1e-5)


def test_figures_do_not_depend_on_the_chunks(tiny_model, measured, monkeypatch):
    """Attention reads the stored pages, its own chunk's too: the cut into chunks is free."""
    monkeypatch.setattr("radixkv.tools.quality._CHUNK_TOKENS", 7)
    again = measure_quality(tiny_model(), TEXT, num_tokens=150, context=64, formats=("int4",))
    for row in again.formats:
        before = rows_of(measured)[row.kv_dtype, row.rotate]
        assert row.perplexity == pytest.approx(before.perplexity, rel=1e-3)
        assert row.kl_mean == pytest.approx(before.kl_mean, rel=2e-2)


@pytest.mark.parametrize("name", ["int4", "fp8_e5m2"])
def test_the_greedy_match_is_what_an_engine_generates(tiny_model, name):
    """Oracle: two engines that generate, one token at a time."""
    num_tokens, context = 100, 48
    found = measure_quality(
        tiny_model(), TEXT, num_tokens=num_tokens, context=context, formats=(name,)
    )
    prompt_len, new_tokens = 24, found.greedy_tokens
    starts = [i * (num_tokens - prompt_len) // found.greedy_prompts for i in range(4)]
    prompts = [TEXT[start : start + prompt_len] for start in starts]
    tokens = {}
    for rotate in ("model", "none", "hadamard"):
        config = KVConfig(dtype="model", capacity="4MiB")
        if rotate != "model":
            config = replace(config, dtype=name, rotate=rotate)
        with Engine(tiny_model(), kv=config) as engine:
            results = engine.generate(
                prompts, temperature=0, max_new_tokens=new_tokens, ignore_eos=True
            )
        tokens[rotate] = [result.samples[0].token_ids for result in results]
    for row in found.formats:
        lengths = []
        for ours, theirs in zip(tokens[row.rotate], tokens["model"]):
            pairs = zip(ours, theirs)
            differ = (i for i, (a, b) in enumerate(pairs) if a != b)
            lengths.append(next(differ, new_tokens))
        assert row.greedy_match == sum(lengths) / len(lengths)


def test_every_window_begins_with_the_tokens_that_the_model_expects_first(tiny_model):
    found = measure_quality(
        tiny_model(), TEXT, num_tokens=40, context=21, formats=("model",), first_ids=[1]
    )
    total = 0.0
    for start in range(0, 40, 20):
        with torch.inference_mode():
            ids = torch.tensor([[1, *TEXT[start : start + 20]]])
            logits = tiny_model()(ids, use_cache=False).logits[0, 1:].double()
        targets = torch.tensor(TEXT[start + 1 : start + 21])
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    assert found.perplexity == pytest.approx(math.exp(total / 40), rel=1e-5)


@settings(max_examples=8, deadline=None)
@given(num_tokens=st.integers(1, 70), context=st.integers(16, 40))
def test_any_size_is_measured_whole(tiny_model, num_tokens, context):
    told = []
    found = measure_quality(
        tiny_model(),
        TEXT[: num_tokens + 1],
        num_tokens=num_tokens,
        context=context,
        formats=("int8",),
        tell=lambda done, total: told.append((done, total)),
    )
    assert found.num_tokens == num_tokens
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total in told} == {len(told)}
    assert all(0 <= row.kl_mean <= row.kl_p99 for row in found.formats)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(context=15), "context: expected an integer from 16 to 256, got 15"),
        (dict(context=257), "context: expected an integer from 16 to 256, got 257"),
        (dict(num_tokens=0), "num_tokens: expected an integer >= 1, got 0"),
        (dict(num_tokens=400), "num_tokens: expected at most 399, one less than the text has"),
        (dict(formats=("int9",)), "kv_dtype: expected one of 'int8', "),
        (dict(formats=("int8/int9",)), "kv_dtype 'int8/int9', V: expected one of"),
    ],
)
def test_bad_options_are_refused(tiny_model, change, says):
    options = dict(num_tokens=50, context=64) | change
    with pytest.raises(ValueError, match=f"^{says}"):
        measure_quality(tiny_model(), TEXT, **options)


# the recommendation

ROW = FormatQuality(
    kv_dtype="int8",
    rotate="hadamard",
    bytes_per_token=100,
    perplexity=10.0,
    perplexity_change=0.0,
    perplexity_change_stderr=0.0,
    kl_mean=2e-4,
    kl_p99=1e-3,
    top1_agreement=0.99,
    greedy_match=60.0,
)
INT4 = replace(ROW, kv_dtype="int4", bytes_per_token=60)


def say(*rows: FormatQuality) -> str:
    return recommend(
        Quality(
            num_tokens=1000,
            context=64,
            greedy_prompts=4,
            greedy_tokens=64,
            model_dtype="float32",
            perplexity=10.0,
            bytes_per_token=400,
            formats=list(rows),
        )
    )


def test_the_smallest_format_within_the_limits_is_recommended():
    assert 'Nearly lossless: KVConfig(dtype="int8"): ' in say(ROW, replace(INT4, kl_mean=1e-1))
    assert "4.0x fewer bytes than float32" in say(ROW)
    assert 'Nearly lossless: KVConfig(dtype="int4"): ' in say(ROW, INT4)
    both = say(ROW, replace(INT4, kv_dtype="int8/int4", kl_mean=1e-2))
    assert 'at a small loss: KVConfig(dtype="int8", v_dtype="int4"): ' in both
    assert 'rotate="none"' in say(replace(ROW, rotate="none"))


def test_a_loss_of_perplexity_counts_once_it_is_certain():
    unsure = replace(ROW, perplexity_change=0.02, perplexity_change_stderr=0.01)
    assert "Nearly lossless" in say(unsure)
    sure = replace(ROW, perplexity_change=0.02, perplexity_change_stderr=0.001)
    assert 'keep unquantized pages, KVConfig(dtype="model")' in say(sure)


def test_what_rotation_does_is_said():
    plain = replace(ROW, rotate="none", kl_mean=8e-4)
    assert "int8 most (4.0x less KL)" in say(plain, ROW)
    worse = replace(INT4, rotate="none", kl_mean=1e-4)
    assert "int4 is better without (2.0x less KL)" in say(plain, ROW, worse, INT4)


# the command


@pytest.fixture(scope="module")
def folder(tiny_model, byte_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    text = path / "text.txt"
    text.write_text(default_text()[:1000], encoding="utf-8")
    return path


def run(capsys, folder, *arguments: str) -> str:
    model = ["--model", str(folder), "--text", str(folder / "text.txt")]
    assert cli.main(["quality", *model, *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_gives_json_that_names_what_was_measured(capsys, folder):
    arguments = ["--tokens", "80", "--context", "32", "--kv-dtype", "int8,int8/int4", "--json"]
    found = json.loads(run(capsys, folder, *arguments))
    assert {"model", "hardware", "versions", "recommendation", "total_s"} <= found.keys()
    assert (found["num_tokens"], found["context"], found["text"]) == (80, 32, "text.txt")
    assert (found["model_dtype"], found["bytes_per_token"]) == ("float32", 2 * 2 * 2 * 16 * 4)
    assert [(row["kv_dtype"], row["rotate"]) for row in found["formats"]] == [
        ("int8", "none"), ("int8", "hadamard"), ("int8/int4", "none"), ("int8/int4", "hadamard"),
    ]  # fmt: skip
    for row in found["formats"]:
        assert set(FormatQuality.__dataclass_fields__) == row.keys()


def test_the_command_prints_a_table_and_a_recommendation(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    text = run(capsys, folder, "--tokens", "40", "--context", "32", "--kv-dtype", "int8,model")
    lines = text.splitlines()
    assert sum("hadamard" in line for line in lines) == 1
    assert sum(line.startswith("│ int8 ") for line in lines) == 2
    assert "Nearly lossless: KVConfig(" in text
    assert "Measured in " in text


def test_the_whole_of_a_short_text_is_measured(capsys, folder):
    found = json.loads(run(capsys, folder, "--context", "200", "--kv-dtype", "model", "--json"))
    assert 500 < found["num_tokens"] < 1000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "0"], "--tokens: expected an integer >= 1, got 0"),
        (["--context", "3"], "--context: expected an integer >= 16, got 3"),
        (["--kv-dtype", "int9"], "kv_dtype: expected one of"),
        (["--text", "no-such-file.txt"], "--text: expected a readable UTF-8 text file"),
        (["--model", "./no/such/folder"], "there is no such folder"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, arguments, says):
    assert cli.main(["quality", *arguments]) == cli.EXIT_BAD_INPUT
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("radixkv quality: error: ") and says in line


def test_the_command_refuses_more_tokens_than_the_text_has(capsys, folder):
    model = ["--model", str(folder), "--text", str(folder / "text.txt")]
    assert cli.main(["quality", *model, "--tokens", "5000"]) == cli.EXIT_BAD_INPUT
    assert "tokens, got 5000; lower it or give a longer text" in capsys.readouterr().err


def test_format_names():
    assert parse_format("model") == ("model", None)
    assert parse_format("fp8/int4") == ("fp8", "int4")
    for name in ("", "/int8", "int8/", "int8/int8/int8"):
        with pytest.raises(ValueError, match="expected one of"):
            parse_format(name)
