"""The end-to-end benchmark, small: what is compared is the same work, and its figures add up."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv import Engine, KVConfig, RadixKVError
from radixkv.bench import workloads as bench_engine
from radixkv.bench.load import bench_load
from radixkv.cli.main import main


@pytest.fixture(scope="module")
def folder(tiny_model: Any, byte_tokenizer: Any, tmp_path_factory: Any) -> Path:
    """A checkpoint of a tiny model with a tokenizer."""
    path: Path = tmp_path_factory.mktemp("tiny")
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=3)
    model.save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


def test_a_workload_has_the_sizes_and_the_shared_prefixes_that_it_claims(
    byte_tokenizer: Any,
) -> None:
    workloads = {w.name: w for w in bench_engine.agent_workloads(byte_tokenizer)}
    rag, tree = workloads["rag"].asks, workloads["tree"].asks
    assert [len(ask.token_ids) for ask in rag] == [1540] * 8
    assert len(workloads["rag"].rounds) == 8
    assert len({tuple(ask.token_ids[:1500]) for ask in rag}) == 1
    assert len({tuple(ask.token_ids) for ask in rag}) == 8
    (samples,) = workloads["samples"].asks
    assert (len(samples.token_ids), samples.n, samples.num_new_tokens) == (1024, 16, 1024)
    (beams,) = workloads["beams"].asks
    assert (len(beams.token_ids), beams.beams, beams.max_new_tokens) == (512, 4, 32)
    assert len(workloads["mixed"].rounds[0]) == 24
    assert len({tuple(ask.token_ids[:600]) for ask in tree}) == 1
    assert len({tuple(ask.token_ids[:700]) for ask in tree}) == 4
    assert [len(ask.token_ids) for ask in tree] == [750] * 12
    again = bench_engine.agent_workloads(byte_tokenizer)
    assert again == list(workloads.values())
    assert bench_engine.agent_workloads(byte_tokenizer, seed=1) != again


def test_offline_runs_all_five_and_compares_with_transformers(folder: Path, capsys: Any) -> None:
    main(["bench", "offline", "--quick", "--model", str(folder), "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [w["name"] for w in result["workloads"]] == ["rag", "samples", "beams", "mixed", "tree"]
    assert {"hardware", "model", "kv_dtype"} <= result.keys()
    assert len(result["missing"]) + len(result["programs"]) == 4
    rows = {(row["workload"], row["program"]): row for row in result["results"]}
    for workload in result["workloads"]:
        for program in ("radixkv", "transformers"):
            row = rows[workload["name"], program]
            assert row["new_tokens"] == workload["new_tokens"]
            assert 0 < row["first_median_s"] <= row["median_s"]
        ratio = rows[workload["name"], "radixkv"]["median_s"] / row["median_s"]
        assert row["ours_over_theirs"] == pytest.approx(ratio)


def test_only_the_programs_that_are_named_are_run(folder: Path, capsys: Any) -> None:
    chosen = ["--workload", "beams", "--against", "llama-cpp-python"]
    main(["bench", "offline", "--quick", "--model", str(folder), *chosen, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "transformers" not in result["programs"]
    assert [w["name"] for w in result["workloads"]] == ["beams"]


def test_prefixes_that_prompts_share_are_found_at_every_fork(byte_tokenizer: Any) -> None:
    workloads = {w.name: w for w in bench_engine.agent_workloads(byte_tokenizer)}
    leaves = [ask.token_ids for ask in workloads["tree"].asks]
    prefixes = bench_engine.common_prefixes(leaves)
    assert [len(prefix) for prefix in prefixes] == [600, 700, 700, 700, 700]
    assert all(any(leaf[: len(prefix)] == prefix for leaf in leaves) for prefix in prefixes)
    assert bench_engine.common_prefixes([a.token_ids for a in workloads["mixed"].asks]) == []


def test_both_programs_say_the_same_greedy_tokens(tiny_model: Any, byte_tokenizer: Any) -> None:
    model = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=3)
    rival = bench_engine.Transformers(copy.deepcopy(model))
    ask = bench_engine.Ask(list(range(3, 23)), 12)
    kv = KVConfig(dtype="model", page_size=4, capacity="4MiB")
    with Engine(model, byte_tokenizer, kv=kv) as engine:
        result = engine.generate(ask.token_ids, bench_engine._params(ask))
        import torch

        ids = torch.tensor([ask.token_ids])
        theirs = rival.model.generate(ids, attention_mask=ids**0, max_new_tokens=12)
        assert theirs[0, 20:].tolist() == result.samples[0].token_ids
        wrong = bench_engine.Workload("wrong", "", [[ask]])
        rival.run = lambda asks: (11, 0.0)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="expected 12 new tokens, got 11"):
            bench_engine.bench_offline(engine, [rival], [wrong], repeats=1)


def test_online_serves_all_that_arrive_and_finds_documents_again(folder: Path, capsys: Any) -> None:
    command = ["bench", "online", "--quick", "--model", str(folder), "--requests", "12"]
    main([*command, "--rate", "50"])
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert "time to first token" in out
    assert result["requests"] == 12
    assert 0.3 < result["hit_rate"] < 1
    assert 0 < result["ttft_p50_s"] <= result["ttft_p95_s"] < result["total_s"]
    assert result["new_tokens_per_s"] == pytest.approx(result["new_tokens"] / result["total_s"])


def test_the_parts_of_loading_a_model_add_up_in_a_process_of_its_own(
    folder: Path, capsys: Any
) -> None:
    main(["bench", "load", "--repeats", "1", "--model", str(folder)])
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert sum(result["parts_s"].values()) == pytest.approx(result["load_s"])
    assert all(seconds > 0 for seconds in result["parts_s"].values())
    assert "the tokenizer from its files" in out


def test_a_model_that_does_not_load_is_named_with_what_was_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RadixKVError, match=r"expected a model that Engine\.from_pretrained loads"):
        bench_load(tmp_path, repeats=1)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_loading_leaves_the_garbage_collector_as_it_was(folder: Path, was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        Engine.from_pretrained(folder, kv=KVConfig(capacity="1MiB")).close()
        assert gc.isenabled() == was_enabled
        with pytest.raises((OSError, ValueError)):
            Engine.from_pretrained(folder / "nothing")
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
