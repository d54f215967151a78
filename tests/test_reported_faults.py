"""The faults that users of other systems reported: each case with the tests that hold it off.

`CASES` names a test for every case; those of this file come below. What a case tells is in the
docstring or the name of its test.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import BeamParams, Engine, KVConfig, KVSpec, PrefixCache
from radixkv.attention.formats import make_format

ROOT = Path(__file__).resolve().parent.parent
HERE = "test_reported_faults.py"

CASES: dict[str, list[str]] = {
    "KEY-2 token ids shortened before hashing": [
        "test_radix.py::test_ids_that_differ_in_high_bits_never_match",
        "test_radix.py::test_what_is_no_token_id_is_refused",
        "test_engine.py::test_prompts_in_any_container_are_one_prompt",
    ],
    "KEY-3 same adapter name, different weights": [
        "test_radix.py::test_namespaces_never_share",
        "test_engine.py::test_namespaces_never_share",
        "test_fingerprint.py::test_two_versions_of_an_adapter_and_none_are_three_entries",
    ],
    "HIT-1 whole prompt already cached": [
        "test_cache.py::test_a_whole_prompt_that_is_cached_leaves_one_token_to_run",
        "test_engine.py::test_whole_prompt_cached_still_runs_one_token",
    ],
    "HIT-4 prompt log-probabilities with a cached prefix": [
        "test_engine.py::test_prompt_logprobs_do_not_depend_on_the_cache",
    ],
    "HIT-6 how many tokens of a finished request have KV": [
        "test_engine.py::test_kv_of_the_last_token_is_not_claimed",
        "test_cache.py::test_only_what_was_written_is_published",
    ],
    "POOL-2 lock walks up from the parent": [
        "test_cache.py::test_held_pages_outlive_any_pressure",
    ],
    "POOL-3 accounting off after splits or sharing": [
        "test_cache.py::test_counters_equal_a_recount_through_2000_operations",
    ],
    "POOL-6 recursion limit in the tree": [
        "test_radix.py::test_five_thousand_prompts_that_each_extend_the_last_need_no_recursion",
        "test_view.py::test_render_of_a_deep_and_a_wide_tree_does_not_recurse",
    ],
    "QNT-3 all-zero row gives inf or NaN scale": [
        f"{HERE}::test_qnt_3_odd_rows_stay_finite_and_leave_neighbours_alone",
        (
            "test_cpu_write.py::"
            "test_zero_constant_tiny_and_huge_rows_stay_finite_and_leave_neighbours_alone"
        ),
    ],
    "QNT-5 reorder and crop touch only the full-precision part": [
        f"{HERE}::test_qnt_5_beams_and_cuts_inside_quantized_pages",
        "test_engine.py::test_each_beam_equals_a_run_of_its_own_history",
    ],
    "QNT-6 quantization that is not happening": [
        "test_pool.py::test_bytes_are_what_the_format_says",
        "test_engine.py::test_quantization_really_happens",
    ],
    "KRN-1 head_dim not a power of two": [
        f"{HERE}::test_krn_1_any_head_dim_with_a_cached_prefix",
        "test_cpu_attention.py::test_decode_and_extend_equal_float64_for_every_format_and_head_dim",
        "test_cpu_attention.py::test_sizes_that_are_not_supported_are_named_before_anything_runs",
    ],
    "KRN-4 attention soft cap dropped": [
        "test_cpu_attention.py::test_the_soft_cap_is_applied_before_the_softmax",
        "test_engine.py::test_greedy_tokens_are_those_of_transformers",
    ],
    "KRN-6 ALiBi built over the query length": [
        f"{HERE}::test_krn_6_alibi_counts_from_the_start_of_the_sequence",
        "test_cpu_attention.py::test_alibi_counts_positions_from_the_start_of_the_sequence",
        "test_engine.py::test_models_that_cannot_be_served_are_refused_by_name",
    ],
    "BEAM-2 several EOS ids": [
        f"{HERE}::test_beam_2_end_ids_as_a_number_a_list_and_a_tensor",
        "test_beam.py::test_end_ids_that_are_the_best_of_all_beams_leave_the_width_alive",
        "test_beam.py::test_an_end_id_as_the_first_token",
        "test_beam.py::test_width_one_is_greedy_whatever_the_penalty",
    ],
    "BEAM-3 n samples with one seed are the same sample": [
        "test_sampling.py::test_samples_of_one_seed_differ_and_repeat_whatever_n_is",
        "test_sampling.py::test_no_global_random_state_is_touched",
        "test_engine.py::test_samples_depend_on_seed_and_index_alone",
    ],
    "BEAM-5 divergence inside a shared page": [
        "test_cache.py::test_branches_that_part_inside_a_page_equal_their_own_runs",
    ],
    "SCH-1 request that can never fit": [
        "test_engine.py::test_request_that_can_never_fit_is_refused_at_once",
    ],
    "SCH-4 client stops reading half way": [
        "test_stream.py::test_abandoned_streams_give_their_pages_back",
        "test_stream.py::test_a_stream_that_nobody_reads_is_paused",
    ],
    "TXT-2 characters split over tokens": [
        "test_text.py::test_a_character_comes_whole_and_only_when_its_last_byte_is_there",
        "test_text.py::test_a_character_cut_by_the_end_is_one_replacement_character_at_finish",
        "test_text.py::test_streams_of_one_tokenizer_keep_apart",
    ],
    "TXT-4 stop string over several tokens": [
        "test_text.py::test_stop_strings_over_tokens_are_cut_and_never_shown",
        "test_text.py::test_what_may_become_a_stop_string_is_held_and_released",
    ],
    "PER-1 saved KV loads into another model": [
        "test_snapshot.py::test_another_geometry_format_or_model_is_named",
        "test_fingerprint.py::test_another_model_of_equal_shapes_is_named",
    ],
    "THR-1 shared tokenizer from threads": [
        "test_text.py::test_threads_with_one_tokenizer_get_their_single_thread_results",
        "test_stream.py::test_async_and_threads_give_what_one_call_gives",
    ],
    "MOD-1 learned positions restart at zero": [
        f"{HERE}::test_mod_1_positions_go_on_after_a_cached_prefix",
        "test_engine.py::test_learned_positions_up_to_the_end_of_the_table",
    ],
    "MOD-4 prefix reuse on a rotated sliding-window buffer": [
        "test_engine.py::test_sliding_windows_reuse_any_prefix",
    ],
}


def names_in(file: str) -> set[str]:
    """Names of the tests in a file that are neither skipped nor expected to fail."""
    module = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    names = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            if "skip" not in marks and "xfail" not in marks:
                names.add(node.name)
    return names


@pytest.mark.parametrize("case", CASES)
def test_each_reported_fault_has_a_test_that_runs(
    case: str, request: pytest.FixtureRequest
) -> None:
    assert CASES[case]
    whole = {item.nodeid.split("/")[-1].partition("[")[0] for item in request.session.items}
    files = {name.split("::")[0] for name in whole}
    for test in CASES[case]:
        file, name = test.split("::")
        assert name in names_in(file), test
        if file in files and not request.config.option.keyword and not only_some(request):
            assert test in whole, f"{test} is not collected"


def only_some(request: pytest.FixtureRequest) -> bool:
    """Whether pytest was asked for single tests."""
    return any("::" in argument for argument in request.config.args)


def test_all_25_reports_are_listed() -> None:
    assert len(CASES) == 25
    assert len({case.split()[0] for case in CASES}) == 25


def ids_of(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=num_tokens)


def kv(dtype: str) -> KVConfig:
    return KVConfig(dtype=dtype, page_size=4, capacity="4MiB")


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp8_e5m2", "int4", "model"])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_qnt_3_odd_rows_stay_finite_and_leave_neighbours_alone(
    dtype: str, model_dtype: torch.dtype
) -> None:
    kv_format = make_format(dtype, 16, model_dtype)
    normal = torch.linspace(-2, 3, 16)
    tiny = torch.zeros(16)
    tiny[3] = 1e-8
    odd = [torch.zeros(16), torch.full((16,), 0.37), tiny, torch.full((16,), 65504.0)]
    odd.append(torch.full((16,), 6e-8))  # subnormal in float16
    rows = torch.stack([*odd, normal]).to(model_dtype).float()
    codes, scales = kv_format.quantize(rows)
    real = kv_format.dequantize(codes, scales)
    assert torch.isfinite(real).all() and torch.isfinite(scales.float()).all()
    if dtype not in ("int4", "model"):
        assert (scales.float() > 0).all()
    assert torch.equal(real[0], torch.zeros(16))
    step = {"int8": 0.37 / 127, "fp8": 0.37 / 16, "fp8_e5m2": 0.37 / 8, "int4": 0.37 / 15}
    assert (real[1] - rows[1]).abs().max() <= step.get(dtype, 0)
    alone = kv_format.dequantize(*kv_format.quantize(rows[-1:]))
    assert torch.equal(real[-1:], alone)


def test_qnt_5_beams_and_cuts_inside_quantized_pages(tiny_model: Any) -> None:
    config = kv("int8")
    before = repr(config)
    prompt = ids_of(3 * 4 + 2)  # three whole pages and a tail
    for seed in (2, 3):  # one config, two engines on different models
        with Engine(tiny_model("llama", seed=seed), kv=config, backend="torch") as engine:
            beams = engine.generate(prompt, BeamParams(width=3, max_new_tokens=8, ignore_eos=True))
            for beam in beams.samples:
                engine.cache.clear()
                (score,) = engine.score(prompt, [beam.token_ids])
                assert score.logprob == pytest.approx(beam.cumulative_logprob, abs=1e-3)
            greedy = dict(temperature=0, max_new_tokens=5, ignore_eos=True)
            for cut in (13, 8, 5):
                with engine.open(prompt) as branch:
                    branch.generate(**greedy)
                    branch.truncate(cut)
                    got = branch.generate(**greedy, keep=False)
                engine.cache.clear()
                cold = engine.generate(prompt[:cut], **greedy)
                assert got.samples[0].token_ids == cold.samples[0].token_ids
    assert repr(config) == before


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_krn_1_any_head_dim_with_a_cached_prefix(head_dim: int) -> None:
    # RADIXKV_POISON (conftest) fills what is not written with NaN. The compiled kernels have
    # tests of their own (see CASES).
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=torch.float16)
    cache = PrefixCache(spec, kv("model"), backend="torch")
    torch.manual_seed(head_dim)
    q, k, v = (torch.randn(11, heads, head_dim).half() for heads in (4, 2, 2))
    tokens = list(range(11))
    with cache.acquire(tokens[:6]) as lease:
        lease.write(0, k[:6], v[:6])
        lease.commit()
    with cache.acquire(tokens[:10]) as lease:
        assert lease.num_cached == 6
        lease.write(0, k[6:10], v[6:10])
        parts = [lease.attend(0, q[6:10])]
        lease.extend(tokens[10:])
        lease.write(0, k[10:], v[10:])
        parts.append(lease.attend(0, q[10:]))
    got = torch.cat(parts).float()
    dense = [t.float().transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        dense[0], dense[1], dense[2].repeat_interleave(2, 0), is_causal=True
    ).transpose(0, 1)[6:]
    assert (got - expected).abs().max() < 2e-3


def test_krn_6_alibi_counts_from_the_start_of_the_sequence() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4)
    cache = PrefixCache(spec, kv("model"), backend="torch")
    zeros, one_hot = torch.zeros(4, 1, 4), torch.eye(4)[:, None]
    slopes = torch.tensor([0.5])
    expected = torch.tensor([0.1015, 0.1674, 0.2760, 0.4551])  # oldest to newest
    with cache.acquire([1, 2, 3, 4]) as lease:
        lease.write(0, zeros, one_hot)
        whole = lease.attend(0, zeros, alibi_slopes=slopes)
        decode = lease.attend(0, zeros[:1], alibi_slopes=slopes)
    assert torch.allclose(decode[0, 0], expected, atol=1e-4)
    assert torch.allclose(whole[3, 0], expected, atol=1e-4)


def test_beam_2_end_ids_as_a_number_a_list_and_a_tensor(tiny_model: Any) -> None:
    model = tiny_model("llama", fresh=True, seed=4)
    prompt = ids_of(6)
    free = BeamParams(width=2, max_new_tokens=3, ignore_eos=True)
    with Engine(model, kv=kv("model"), backend="torch") as engine:
        best = engine.generate(prompt, free).samples[0].token_ids
    seen = []
    for end_ids in (best[1], [best[1]], torch.tensor([best[1]])):
        model.generation_config.eos_token_id = end_ids
        with Engine(model, kv=kv("model"), backend="torch") as engine:
            assert engine.eos_token_ids == {best[1]}
            params = BeamParams(width=2, max_new_tokens=6, num_return=2)
            result = engine.generate(prompt, params)
            one = engine.generate(prompt, BeamParams(width=1, max_new_tokens=6)).samples[0]
            greedy = engine.generate(prompt, temperature=0, max_new_tokens=6).samples[0]
            first = engine.generate(prompt, BeamParams(width=2, max_new_tokens=1))
        assert len(result.samples) == len(first.samples) == 2
        for sample in result.samples:
            assert best[1] not in sample.token_ids[:-1]
            assert (sample.finish_reason == "stop") == (sample.token_ids[-1] == best[1])
        assert one.token_ids == greedy.token_ids
        seen.append([sample.token_ids for sample in result.samples])
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_mod_1_positions_go_on_after_a_cached_prefix(tiny_model: Any, name: str) -> None:
    prefix = ids_of(8)
    greedy = dict(temperature=0, max_new_tokens=4, logprobs=3, ignore_eos=True)
    with Engine(tiny_model(name), kv=kv("model"), backend="torch") as engine:
        for num_more in (1, 5):
            prompt = prefix + ids_of(num_more, seed=num_more)
            engine.cache.clear()
            cold = engine.generate(prompt, **greedy)
            engine.cache.clear()
            engine.generate([*prefix, 3], temperature=0, max_new_tokens=1)
            warm = engine.generate(prompt, **greedy)
            assert warm.cached_tokens == 8
            assert warm.samples[0].token_ids == cold.samples[0].token_ids
            pairs = zip(warm.samples[0].logprobs, cold.samples[0].logprobs, strict=True)
            for got, expected in pairs:
                assert got == pytest.approx(expected, abs=1e-4)
