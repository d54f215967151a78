"""Compiled attention over pages: float64 over the dequantized rows says what is right."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import numba
import numpy as np
import pytest
import torch

from radixkv.attention import reference
from radixkv.attention.backend import get_backend
from radixkv.attention.batch import AttentionBatch, ScoreRule
from radixkv.attention.cpu import CpuBackend
from radixkv.attention.formats import KVFormat, hadamard
from radixkv.attention.layout import KVCodec, KVSpec, LayerPages
from radixkv.config import KVConfig
from radixkv_kernels.cpu import formats, launch, plan, simd, vectors

FORMATS = ("int8", "fp8", "fp8_e5m2", "int4", "model")
UNIT = 2.0**-24  # largest relative error of one float32 operation


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)


class Case:
    """Sequences in poisoned pages in random order, and queries for their last tokens."""

    def __init__(
        self,
        dtype: str = "int8",
        *,
        head_dim: int = 64,
        group: int = 2,
        num_kv_heads: int = 2,
        page_size: int = 16,
        seq_lens: tuple[int, ...] = (40,),
        query_lens: tuple[int, ...] = (1,),
        rotate: str = "auto",
        v_dtype: str | None = None,
        v_head_dim: int | None = None,
        model_dtype: torch.dtype = torch.float32,
        key_size: float = 1.0,
    ) -> None:
        spec = KVSpec(
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=model_dtype,
        )
        # Whether sharing pays is measured: tests/test_groups.py has it always and never.
        config = KVConfig(
            dtype=dtype,
            v_dtype=v_dtype,
            page_size=page_size,
            rotate=rotate,
            shared_prefix="never",
        )
        self.codec = KVCodec(spec, config)
        num_pages = [-(-n // page_size) for n in seq_lens]
        self.page_table = torch.zeros(len(seq_lens), max(num_pages) + 2, dtype=torch.int32)
        order = torch.randperm(sum(num_pages)) + 1
        for row, used in zip(self.page_table, order.split(num_pages), strict=True):
            row[: len(used)] = used
        self.layer = self._poisoned(1 + sum(num_pages))
        for row, seq_len in zip(self.page_table, seq_lens, strict=True):
            position = torch.arange(seq_len)
            slots = row[position // page_size].long() * page_size + position % page_size
            k = key_size * torch.randn(seq_len, num_kv_heads, head_dim)
            v = torch.randn(seq_len, num_kv_heads, spec.v_head_dim)
            reference.write_kv(self.codec, self.layer, slots, k, v, layer_idx=0)
        self.batch = self.make_batch(seq_lens, query_lens)
        self.q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim).to(model_dtype)
        self.rule = ScoreRule(softmax_scale=head_dim**-0.5)

    def _poisoned(self, num_pages: int) -> LayerPages:
        def make(form: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (num_pages, self.codec.spec.num_kv_heads, self.codec.config.page_size)
            raw = torch.full((*shape, form.code_width * form.code_dtype.itemsize), form.poison)
            scale = torch.full((*shape, form.num_scales), float("nan"), dtype=torch.bfloat16)
            return raw.to(torch.uint8).view(form.code_dtype), scale

        (k_pages, k_scale), (v_pages, v_scale) = map(
            make, (self.codec.k_format, self.codec.v_format)
        )
        return LayerPages(k_pages, v_pages, k_scale, v_scale)

    def make_batch(self, seq_lens, query_lens, rows=None) -> AttentionBatch:
        table = self.page_table if rows is None else self.page_table[rows]
        return AttentionBatch(
            slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
            page_table=table,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
        )

    def run(self, q=None, batch=None) -> torch.Tensor:
        plan = CpuBackend(self.codec).plan(batch or self.batch)
        return plan.attend(self.layer, self.q if q is None else q, self.rule)

    def check(self) -> torch.Tensor:
        """Run, and compare with float64 within what float32 arithmetic can lose.

        A score is a chain of head_dim products (and log2(head_dim) rotation steps): its error
        is at most so many units times |q| |k|. An error of e in all scores moves the output by
        at most 2 e max|v|; the weighted sum adds a unit a token at worst.
        """
        got = self.run()
        codec, batch = self.codec, self.batch
        seq_lens, starts = batch.host_lens
        page_size = codec.config.page_size
        rotation = hadamard(codec.spec.head_dim).double()
        turn_back = hadamard(codec.v_format.head_dim).double()
        for i, seq_len in enumerate(seq_lens):
            page_ids = batch.page_table[i, : -(-seq_len // page_size)].long()
            layer, k_form, v_form = self.layer, codec.k_format, codec.v_format
            k = reference.read_rows(k_form, layer.k_pages, layer.k_scale, page_ids)
            v = reference.read_rows(v_form, layer.v_pages, layer.v_scale, page_ids)
            k, v = k[:, :seq_len].double(), v[:, :seq_len].double()
            q = self.q[starts[i] : starts[i + 1]].double()
            turned = q @ rotation if codec.rotate_k else q
            want = reference.attend_dense(turned.transpose(0, 1), k, v, self.rule).transpose(0, 1)
            want = want @ turn_back if codec.rotate_v else want
            operations = codec.spec.head_dim + 32
            largest = q.norm(dim=-1).max() * k.norm(dim=-1).max() * self.rule.softmax_scale
            if self.rule.alibi_slopes is not None:
                largest += self.rule.alibi_slopes.abs().max() * seq_len
            score_error = operations * UNIT * largest
            v_norm = v.norm(dim=-1).max() if codec.rotate_v else v.abs().max()
            k_codes, v_codes = in_integers(codec.k_format), in_integers(codec.v_format)
            if k_codes:
                away = turned.abs().max() / 65534 * self.rule.softmax_scale
                score_error += away * k.abs().sum(-1).max()
            weight_error = 0.0
            if v_codes:
                eye = torch.eye(seq_len, dtype=torch.float64).expand(k.shape[0], -1, -1)
                weights = reference.attend_dense(turned.transpose(0, 1), k, eye, self.rule)
                for split in weights.split(plan.SPLIT, dim=-1):
                    weight_error += split.shape[-1] * split.amax(-1).max() / 65534
                # An int8 code is worth max|v| at most, an int4 code the span of its group.
                weight_error *= (1.01 if v_codes == "int8" else 2.1) * v.abs().max()
                if codec.rotate_v:
                    weight_error *= v.shape[-1] ** 0.5
            bound = weight_error + v_norm * (2 * score_error + (seq_len + 64) * UNIT)
            if self.q.dtype != torch.float32:
                bound += want.abs().max() * torch.finfo(self.q.dtype).eps
            error = (got[starts[i] : starts[i + 1]].double() - want).abs().max()
            assert error <= bound, f"sequence {i}: error {error:.2e} over the bound {bound:.2e}"
        return got


def in_integers(form: KVFormat) -> str | None:
    fmt = {"int8": formats.INT8, "int4": formats.INT4}.get(form.name)
    is_so = fmt is not None and formats.RowFormat(fmt, form.head_dim).in_pairs
    return form.name if is_so else None


def extend_path(case: Case) -> str:
    names = {case.codec.k_format.name, case.codec.v_format.name}
    return "extend" if names & {"int8", "int4"} else "tiles"


def paths(case: Case) -> dict[str, int]:
    before = launch.runs.copy()
    case.check()
    return {
        name: launch.runs[name] - before[name]
        for name in launch.runs
        if launch.runs[name] != before[name]
    }


# Formats that are read as floats share their code: two head sizes are enough for each.
HEAD_DIMS = [(f, d) for f in ("int8", "int4") for d in (64, 80, 256)]
HEAD_DIMS += [(f, 80) for f in ("fp8", "fp8_e5m2", "model")]
# Each is compiled by itself, some seconds long.
OTHER_DIMS = [(f, d) for f in ("int8", "int4") for d in (96, 112, 128)]
OTHER_DIMS += [(f, 128) for f in ("fp8", "fp8_e5m2", "model")] + [("fp8", 256), ("model", 96)]
HEAD_DIMS += [pytest.param(*one, marks=pytest.mark.nightly) for one in OTHER_DIMS]


@pytest.mark.parametrize(("dtype", "head_dim"), HEAD_DIMS)
def test_decode_and_extend_equal_float64_for_every_format_and_head_dim(dtype, head_dim):
    case = Case(
        dtype,
        head_dim=head_dim,
        group=3,
        seq_lens=(1, 15, 16, 17, 1000, 1, 33, 1000),
        query_lens=(1, 1, 1, 1, 1, 1, 20, 70),
    )
    assert paths(case) == {"decode": 1, extend_path(case): 1}


@pytest.mark.parametrize(
    "group", [1, 4, 7, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 5, 6, 8))]
)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_decode_serves_every_group_of_query_heads(dtype, group):
    case = Case(dtype, group=group, seq_lens=(1, 700, 40), query_lens=(1, 1, 1))
    assert paths(case) == {"decode": 1}


@pytest.mark.parametrize("group", [9, 24, 200])
def test_large_groups_run_as_matrix_products(group):
    case = Case(group=group, num_kv_heads=1, seq_lens=(1, 700, 2500), query_lens=(1, 1, 2))
    assert paths(case) == {"tiles": 1}


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 64, 128, 256])
def test_every_page_size_and_lengths_around_it(page_size):
    around = (max(1, page_size - 1), page_size, page_size + 1, 1000, 1500)
    case = Case(
        page_size=page_size,
        seq_lens=around + around,
        query_lens=(1, 1, 1, 1, 1, *(min(n, 5) for n in around)),
    )
    case.check()
    case.rule = replace(case.rule, sliding_window=page_size + 3)
    case.check()


def test_formats_and_head_dims_of_k_and_v_may_differ():
    for dtype, v_dtype, head_dim, v_head_dim in (
        ("int8", "int4", 96, 64),
        ("int4", "fp8", 64, 112),
        ("model", "int8", 20, 33),
    ):
        case = Case(
            dtype,
            v_dtype=v_dtype,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            seq_lens=(600, 600),
            query_lens=(1, 9),
        )
        assert paths(case) == {"decode": 1, extend_path(case): 1}


@pytest.mark.parametrize("model_dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_served_in_their_dtype(model_dtype):
    for dtype in ("model", "int8"):
        case = Case(dtype, model_dtype=model_dtype, seq_lens=(300, 300), query_lens=(1, 7))
        assert case.check().dtype == model_dtype


RULES = {
    "window": {"sliding_window": 37},
    "wide window": {"sliding_window": 600},
    "soft cap 50": {"softcap": 50.0},
    "soft cap 5": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 3.0, 20.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "all": {
        "sliding_window": 100,
        "softcap": 5.0,
        "sinks": torch.tensor([-1.0, 0.5, 3.0, 20.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    },
}


@pytest.mark.parametrize("fields", RULES.values(), ids=RULES)
def test_score_rules_equal_float64(fields):
    case = Case(
        seq_lens=(1, 30, 700, 1100, 40, 700, 1500),
        query_lens=(1, 1, 1, 1, 40, 200, 4),
        key_size=4.0,
    )
    case.rule = replace(case.rule, **fields)
    assert paths(case) == {"decode": 1, extend_path(case): 1}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("query_len", [1, 5])
def test_the_soft_cap_is_applied_before_the_softmax(dtype, query_len):
    case = Case(dtype, seq_lens=(60,), query_lens=(query_len,))
    case.rule = replace(case.rule, softmax_scale=8.0, softcap=5.0)  # raw scores reach 200
    capped = case.check()
    case.rule = replace(case.rule, softcap=None)
    free = case.run()
    assert torch.cosine_similarity(capped.flatten(), free.flatten(), dim=0) < 0.9


@pytest.mark.parametrize("query_len", [1, 2])
def test_alibi_counts_positions_from_the_start_of_the_sequence(query_len):
    case = Case("model", head_dim=8, group=1, num_kv_heads=1, v_head_dim=4, seq_lens=(4,))
    case.layer.v_pages[case.page_table[0, 0], 0, :4] = torch.eye(4)
    case.batch = case.make_batch((4,), (query_len,))
    case.q = torch.zeros(query_len, 1, 8)
    case.rule = replace(case.rule, alibi_slopes=torch.tensor([0.5]))
    weights = case.run()[-1, 0]
    expected = torch.tensor([0.1015, 0.1674, 0.2760, 0.4551])  # oldest to newest
    assert torch.allclose(weights, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "int4", "model"])
def test_a_sequences_result_does_not_depend_on_the_batch_nor_on_the_threads(dtype):
    seq_lens, query_lens = (1000, 1, 700, 2100, 33, 2500), (1, 1, 1, 1, 33, 3)
    case = Case(dtype, group=3, seq_lens=seq_lens, query_lens=query_lens)
    together = case.run().split(query_lens)
    queries = case.q.split(query_lens)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for i, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
            alone = case.run(queries[i], case.make_batch((seq_len,), (query_len,), [i]))
            assert torch.equal(alone, together[i])


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_query_of_a_prompt_does_not_depend_on_how_the_prompt_is_cut(dtype):
    case = Case(dtype, group=3, seq_lens=(1000,), query_lens=(300,))
    whole = case.run()
    head = case.run(case.q[:170], case.make_batch((870,), (170,)))
    tail = case.run(case.q[170:], case.make_batch((1000,), (130,)))
    assert torch.equal(torch.cat([head, tail]), whole)


@pytest.mark.parametrize("fields", [{}, *RULES.values()], ids=["plain", *RULES])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integer_formats_give_a_token_the_same_bits_in_decode_and_in_any_chunk(dtype, fields):
    case = Case(dtype, seq_lens=(1100, 70), query_lens=(90, 70), page_size=8)
    case.rule = replace(case.rule, **fields)
    first, second = case.run().split((90, 70))
    for i in (0, 1, 17, 89):  # each alone, as decode
        alone = case.run(case.q[i : i + 1], case.make_batch((1011 + i,), (1,), [0]))
        assert torch.equal(alone[0], first[i])
    for i in (0, 1, 17, 69):
        alone = case.run(case.q[90 + i : 91 + i], case.make_batch((1 + i,), (1,), [1]))
        assert torch.equal(alone[0], second[i])
    for chunk in (2, 7, 33):
        parts = [
            case.run(
                case.q[i : min(i + chunk, 90)],
                case.make_batch((min(1010 + i + chunk, 1100),), (min(chunk, 90 - i),), [0]),
            )
            for i in range(0, 90, chunk)
        ]
        assert torch.equal(torch.cat(parts), first)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "model"])
def test_float_formats_differ_between_decode_and_chunks_by_float_rounding_only(dtype):
    case = Case(dtype, seq_lens=(1000,), query_lens=(40,))
    whole = case.run()
    alone = case.run(case.q[-1:], case.make_batch((1000,), (1,)))
    assert (alone[0] - whole[-1]).abs().max() <= 64 * UNIT * 4


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_query_that_is_not_finite_gives_nan_and_never_a_number(dtype, query_len):
    case = Case(dtype, seq_lens=(40, 40), query_lens=(query_len, query_len))
    case.q[query_len - 1, 1, 5] = float("nan")
    out = case.run()
    assert out[query_len - 1, 1].isnan().all()
    assert out[query_len:].isfinite().all()
    assert out[query_len - 1, 0].isfinite().all()


def test_the_exponential_is_right_to_two_units_in_the_last_place():
    """Over all that a softmax can ask for; what is below -87 is 0, a NaN stays one."""
    x = torch.cat([torch.linspace(-90, 0, 2**20), -torch.logspace(-30, 2, 2**16)])
    special = torch.tensor([-torch.inf, -1e30, -87.0, 0.0] + 12 * [torch.nan])
    special[4:].view(torch.int32).add_(torch.arange(12))  # whatever a NaN carries
    x = torch.cat([x, special])
    got = x.clone()

    @numba.njit
    def run(address, num_vectors):
        return vectors.exponentiate(address, np.float32(0.0), num_vectors)

    run(got.data_ptr(), x.numel() // simd.LANES)
    want, normal = x.double().exp(), x >= -87
    unit = 2.0 ** (want.log2().floor() - 23)
    assert float(((got - want).abs() / unit)[normal].max()) < 2
    assert not got[x < -87].any() and got[-12:].isnan().all()


def test_every_format_reads_what_it_wrote_itself():
    for dtype in FORMATS:
        case = Case(dtype, seq_lens=(70,), query_lens=(70,), page_size=8)
        position = torch.arange(70)
        slots = case.page_table[0][position // 8].long() * 8 + position % 8
        k, v = torch.randn(2, 70, 2, 64)
        CpuBackend(case.codec).write_kv(case.layer, slots, k, v, layer_idx=0)
        case.check()


def test_queries_may_be_views_into_a_wider_tensor():
    case = Case(seq_lens=(40, 30), query_lens=(1, 4))
    plain = case.run()
    wide = torch.randn(5, 3, 4, 64)
    wide[:, 1] = case.q
    assert torch.equal(case.run(wide[:, 1]), plain)
    assert torch.equal(case.run(case.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)), plain)


def test_sequences_without_new_tokens_are_passed_over():
    case = Case(seq_lens=(40, 30, 20), query_lens=(1, 0, 2))
    want = case.run()
    batch = case.make_batch((40, 20), (1, 2), [0, 2])
    assert torch.equal(case.run(batch=batch), want)


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("page_id", [-1, 99])
def test_a_page_that_does_not_exist_is_refused(query_len, page_id):
    case = Case(seq_lens=(40,), query_lens=(query_len,))
    case.page_table[0, 1] = page_id
    with pytest.raises(
        ValueError, match=f"page_table: expected page ids from 0 to 3, got {page_id}"
    ):
        case.run()


def test_sizes_that_are_not_supported_are_named_before_anything_runs():
    before = launch.runs.copy()
    case = Case(group=1, num_kv_heads=1)
    case.q = torch.randn(1, 1, 1040)
    with pytest.raises(ValueError, match="head_dim: expected 1 to 1024, got 1040"):
        case.run()
    case = Case(num_kv_heads=2)
    case.q = torch.randn(1, 3, 64)
    with pytest.raises(
        ValueError, match="num_q_heads: expected a multiple of the 2 KV heads, got 3"
    ):
        case.run()
    case = Case(seq_lens=(2,), query_lens=(2,))
    with pytest.raises(ValueError, match="seq_lens: expected at least the 2 new tokens"):
        case.run(batch=case.make_batch((1,), (2,)))
    assert launch.runs == before


def test_callers_on_several_threads_do_not_disturb_one_another():
    case = Case(seq_lens=(700, 60), query_lens=(1, 30))
    want = case.run()
    wrong: list[int] = []

    def caller(number: int) -> None:
        outs = [case.run(batch=case.make_batch((700, 60), (1, 30))) for _ in range(50)]
        wrong.extend(number for out in outs if not torch.equal(out, want))

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_executor_without_openmp_gives_the_same(monkeypatch):
    case = Case(seq_lens=(700, 60), query_lens=(1, 30))
    want = case.run()
    monkeypatch.setattr(launch, "_fork", lambda: None)
    torch.set_num_threads(3)
    assert torch.equal(case.run(), want)


def test_the_backend_is_found_by_name_and_is_what_auto_takes_on_a_cpu():
    for name in ("cpu", "auto"):
        backend = get_backend(name, torch.device("cpu"))
        assert (backend.name, backend) == ("cpu", CpuBackend)
    with pytest.raises(ValueError, match="'cpu' does not run on cuda"):
        get_backend("cpu", torch.device("cuda"))


def test_what_a_step_finds_out_is_hung_into_nothing_that_it_was_given():
    case = Case(seq_lens=(700, 60), query_lens=(1, 30))
    plan = CpuBackend(case.codec).plan(case.batch)
    sinks = replace(case.rule, sinks=torch.zeros(case.q.shape[1]))
    for rule in (case.rule, sinks):
        plan.attend(case.layer, case.q, rule)
    for given in (case.codec, case.batch, case.layer, case.rule, sinks):
        declared = {*dir(type(given)), *getattr(type(given), "__dataclass_fields__", ())}
        assert set(vars(given)) <= declared, type(given)


def test_numba_is_loaded_only_when_the_backend_is_asked_for():
    program = (
        "import sys, torch; from radixkv.attention.backend import get_backend;"
        "get_backend('torch', torch.device('cpu')); assert 'numba' not in sys.modules;"
        "get_backend('cpu', torch.device('cpu')); assert 'numba' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
