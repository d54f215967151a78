"""Triton attention over pages: float64 over the dequantized rows says what is right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import reference
from radixkv.attention import triton as triton_backend
from radixkv.attention.batch import AttentionBatch, ScoreRule
from radixkv.attention.formats import KVFormat, hadamard
from radixkv.attention.layout import KVCodec, KVSpec, LayerPages
from radixkv.attention.shared_runs import SharedRun
from radixkv.attention.triton import TritonBackend
from radixkv.config import KVConfig

# The interpreter computes with NumPy, which warns where a GPU goes on in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cpu" if triton_backend.INTERPRETED else "cuda")
FORMATS = ("int8", "fp8", "fp8_e5m2", "int4", "model")
UNIT = 2.0**-24  # largest relative error of one float32 operation
SPLIT = 64  # small, so that short sequences have several


@pytest.fixture(autouse=True)
def small_splits(monkeypatch) -> None:
    monkeypatch.setattr(triton_backend, "SPLIT", SPLIT)
    monkeypatch.setattr(triton_backend, "EXTEND_SPLIT", SPLIT)
    torch.manual_seed(0)


@pytest.fixture
def row_by_row(monkeypatch):
    """Make the interpreter's products add up every row in one order, as tensor cores do."""
    if triton_backend.INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
            products = a.data.astype(np.float32)[:, :, None] * b.data.astype(np.float32)
            return TensorHandle(np.add.reduce(products, axis=1) + d.data, d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


class Case:
    """Sequences in poisoned pages in random order, and queries for their last tokens."""

    def __init__(
        self,
        dtype: str = "int8",
        *,
        head_dim: int = 64,
        group: int = 2,
        num_kv_heads: int = 1,
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
        config = KVConfig(dtype=dtype, v_dtype=v_dtype, page_size=page_size, rotate=rotate)
        self.codec = KVCodec(spec, config)
        num_pages = [-(-n // page_size) for n in seq_lens]
        self.page_table = torch.zeros(len(seq_lens), max(num_pages) + 2, dtype=torch.int32)
        order = torch.randperm(sum(num_pages)) + 1
        for row, used in zip(self.page_table, order.split(num_pages), strict=True):
            row[: len(used)] = used
        layer = self._poisoned(1 + sum(num_pages))
        for row, seq_len in zip(self.page_table, seq_lens, strict=True):
            position = torch.arange(seq_len)
            slots = row[position // page_size].long() * page_size + position % page_size
            k = key_size * torch.randn(seq_len, num_kv_heads, head_dim)
            v = torch.randn(seq_len, num_kv_heads, spec.v_head_dim)
            reference.write_kv(self.codec, layer, slots, k, v, layer_idx=0)
        self.layer = LayerPages(*(tensor.to(DEVICE) for tensor in layer))
        self.batch = self.make_batch(seq_lens, query_lens)
        self.q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim)
        self.q = self.q.to(model_dtype).to(DEVICE)
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
            slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
            page_table=table.to(DEVICE),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE),
        )

    def run(self, q=None, batch=None) -> torch.Tensor:
        plan = TritonBackend(self.codec).plan(batch or self.batch)
        return plan.attend(self.layer, self.q if q is None else q, self.rule)

    def run_shared(self, runs) -> torch.Tensor:
        plan = TritonBackend(self.codec).plan(self.batch)
        return plan.attend_shared(self.layer, self.q, runs, self.rule)

    def check(self, got: torch.Tensor | None = None) -> torch.Tensor:
        """Run, and compare with float64 within what the arithmetic can lose.

        A score is a chain of head_dim products (and log2(head_dim) rotation steps): its error
        is at most so many units times |q| |k|. An error of e in all scores moves the output by
        at most 2 e max|v|; the weighted sum adds a unit a token at worst. With half floats each
        element of q, k and p is off by half an epsilon at most.
        """
        out = self.run() if got is None else got
        codec, batch = self.codec, self.batch
        seq_lens, starts = batch.host_lens
        page_size = codec.config.page_size
        rotation = hadamard(codec.spec.head_dim).double()
        turn_back = hadamard(codec.v_format.head_dim).double()
        layer = LayerPages(*(tensor.cpu() for tensor in self.layer))
        half = self.q.dtype != torch.float32
        unit = torch.finfo(self.q.dtype).eps if half else 0.0
        rule = replace(
            self.rule,
            sinks=None if self.rule.sinks is None else self.rule.sinks.cpu(),
            alibi_slopes=None if self.rule.alibi_slopes is None else self.rule.alibi_slopes.cpu(),
        )
        for i, seq_len in enumerate(seq_lens):
            page_ids = batch.page_table[i, : -(-seq_len // page_size)].long().cpu()
            k_form, v_form = codec.k_format, codec.v_format
            k = reference.read_rows(k_form, layer.k_pages, layer.k_scale, page_ids)
            v = reference.read_rows(v_form, layer.v_pages, layer.v_scale, page_ids)
            k, v = k[:, :seq_len].double(), v[:, :seq_len].double()
            q = self.q[starts[i] : starts[i + 1]].double().cpu()
            if not q.shape[0]:
                continue
            turned = q @ rotation if codec.rotate_k else q
            want = reference.attend_dense(turned.transpose(0, 1), k, v, rule).transpose(0, 1)
            want = want @ turn_back if codec.rotate_v else want
            operations = codec.spec.head_dim + 32
            largest = q.norm(dim=-1).max() * k.norm(dim=-1).max() * rule.softmax_scale
            if rule.alibi_slopes is not None:
                largest += rule.alibi_slopes.abs().max() * seq_len
            score_error = (operations * UNIT + unit) * largest
            v_norm = v.norm(dim=-1).max() if codec.rotate_v else v.abs().max()
            bound = v_norm * (2 * score_error + (seq_len + 64) * UNIT + unit)
            bound += want.abs().max() * unit
            error = (out[starts[i] : starts[i + 1]].double().cpu() - want).abs().max()
            assert error <= bound, f"sequence {i}: error {error:.2e} over the bound {bound:.2e}"
        return out


def launches(case: Case) -> dict[str, int]:
    before = triton_backend.runs.copy()
    case.check()
    return dict(triton_backend.runs - before)


MIXED = dict(seq_lens=(1, 15, 16, 17, 130, 30), query_lens=(1, 1, 1, 1, 1, 20))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_decode_and_extend_equal_float64_for_every_format_and_head_dim(dtype, head_dim):
    case = Case(dtype, head_dim=head_dim, group=3, **MIXED)
    assert launches(case) == {"decode": 1, "merge": 1, "extend": 1}


@pytest.mark.parametrize("head_dim", [16, 32, 96, 112, 256])
def test_other_head_dims(head_dim):
    for dtype in ("int8", "int4"):
        Case(dtype, head_dim=head_dim, seq_lens=(20, 33), query_lens=(1, 2)).check()


@pytest.mark.parametrize("group", [1, 4, 7, 20, 70])
def test_every_group_of_query_heads(group):
    Case("int8", group=group, num_kv_heads=2, seq_lens=(20, 20), query_lens=(1, 2)).check()


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_sizes_and_lengths_around_a_page_and_a_split(page_size):
    around = (page_size, page_size + 1, SPLIT - 1, SPLIT, SPLIT + 1)
    Case(page_size=page_size, seq_lens=around, query_lens=(1,) * len(around)).check()
    Case(page_size=page_size, seq_lens=around[-2:], query_lens=(SPLIT, 5)).check()


def test_formats_and_head_dims_of_k_and_v_may_differ():
    for dtype, v_dtype, head_dim, v_head_dim in (
        ("int8", "int4", 96, 64),
        ("int4", "fp8", 64, 112),
        ("model", "int8", 20, 36),
    ):
        Case(
            dtype,
            v_dtype=v_dtype,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            seq_lens=(70, 20),
            query_lens=(1, 9),
        ).check()


@pytest.mark.parametrize(
    ("dtype", "model_dtype"),
    [*((dtype, torch.float16) for dtype in FORMATS), ("int8", torch.bfloat16),
     ("model", torch.bfloat16)],
)  # fmt: skip
def test_half_precision_models_are_served_in_their_dtype(dtype, model_dtype):
    case = Case(dtype, model_dtype=model_dtype, seq_lens=(70, 20), query_lens=(1, 7))
    assert case.check().dtype == model_dtype


HEADS = torch.tensor([0.5, 0.25, 0.125, 0.0625])
RULES = {
    "window": {"sliding_window": 37},
    "soft cap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 3.0, 20.0])},
    "alibi": {"alibi_slopes": HEADS},
    "all": {
        "sliding_window": 50,
        "softcap": 5.0,
        "sinks": torch.tensor([-1.0, 0.5, 3.0, 20.0]),
        "alibi_slopes": HEADS,
    },
}


def on_device(fields):
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in fields.items()}


@pytest.mark.parametrize("fields", RULES.values(), ids=RULES)
def test_score_rules_equal_float64(fields):
    case = Case(
        num_kv_heads=2,
        seq_lens=(1, 140, 90),
        query_lens=(1, 1, 4),
        key_size=4.0,
    )
    case.rule = replace(case.rule, **on_device(fields))
    case.check()


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_soft_cap_is_applied_before_the_softmax(dtype):
    case = Case(dtype, seq_lens=(60, 60), query_lens=(1, 5))
    for cap, most in ((50.0, 0.999), (5.0, 0.9)):
        case.rule = replace(case.rule, softmax_scale=8.0, softcap=cap)  # raw scores reach 200
        capped = case.check()
        case.rule = replace(case.rule, softcap=None)
        free = case.run()
        for start, stop in ((0, 1), (1, 6)):  # decode and extend
            rows = capped[start:stop].flatten(), free[start:stop].flatten()
            assert torch.cosine_similarity(*rows, dim=0) < most


@pytest.mark.parametrize("query_len", [1, 2])
def test_alibi_counts_positions_from_the_start_of_the_sequence(query_len):
    case = Case("model", head_dim=8, group=1, v_head_dim=4, seq_lens=(4,))
    case.layer.v_pages[case.page_table[0, 0], 0, :4] = torch.eye(4, device=DEVICE)
    case.batch = case.make_batch((4,), (query_len,))
    case.q = torch.zeros(query_len, 1, 8, device=DEVICE)
    case.rule = replace(case.rule, alibi_slopes=torch.tensor([0.5], device=DEVICE))
    weights = case.run()[-1, 0].cpu()
    expected = torch.tensor([0.1015, 0.1674, 0.2760, 0.4551])  # oldest to newest
    assert torch.allclose(weights, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int8", "int4", "model"])
def test_a_sequences_result_does_not_depend_on_the_batch(dtype, row_by_row):
    seq_lens, query_lens = (1, 70, 33, 140), (1, 1, 12, 3)
    case = Case(dtype, group=3, seq_lens=seq_lens, query_lens=query_lens)
    together = case.run().split(query_lens)
    queries = case.q.split(query_lens)
    for i, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        alone = case.run(queries[i], case.make_batch((seq_len,), (query_len,), [i]))
        assert torch.equal(alone, together[i])


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        ("int8", {}),
        ("int8", {"sinks": torch.tensor([0.5, -1.0, 9.0])}),
        ("int4", {"sliding_window": 70}),
        ("model", {}),
    ],
)
def test_a_query_of_a_prompt_does_not_depend_on_how_the_prompt_is_cut(dtype, fields, row_by_row):
    # Up to a split's length a chunk is read in one go, beyond it in parts that are merged.
    case = Case(dtype, group=3, head_dim=32, seq_lens=(90,), query_lens=(40,))
    case.rule = replace(case.rule, **on_device(fields))
    whole = case.run()
    parts = []
    for start, stop in pairwise((0, 10, 14, 17, 40)):
        before = triton_backend.runs.copy()
        batch = case.make_batch((50 + stop,), (stop - start,))
        parts.append(case.run(case.q[start:stop], batch))
        assert ("merge" in triton_backend.runs - before) == (50 + stop > SPLIT)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_few_queries_after_a_long_prefix_read_it_in_splits(dtype):
    case = Case(dtype, seq_lens=(200, 40, 65, 9), query_lens=(3, 3, 2, 1), group=3)
    # Four splits, one (no parts), two; the last sequence is decode's.
    assert launches(case) == {"extend": 3, "decode": 1, "merge": 3}


@pytest.mark.parametrize(
    "fields",
    [
        RULES["all"] | {"sliding_window": None},
        RULES["all"] | {"sliding_window": 100},
        {"sliding_window": SPLIT + 1},
    ],
)
def test_score_rules_over_a_long_prefix_equal_float64(fields):
    case = Case(num_kv_heads=2, seq_lens=(200,), query_lens=(3,), key_size=4.0)
    case.rule = replace(case.rule, **on_device(fields))
    assert launches(case) == {"extend": 1, "merge": 1}


def test_extend_gives_the_same_bits_in_however_many_launches(monkeypatch):
    lens = (140, 30), (25, 10)
    case = Case(seq_lens=lens[0], query_lens=lens[1], group=3)
    want = case.run()
    monkeypatch.setattr(triton_backend, "PARTS_BYTES", 1 << 14)
    case.batch = case.make_batch(*lens)
    before = triton_backend.runs["extend"]
    assert torch.equal(case.run(), want)
    assert triton_backend.runs["extend"] == before + 4  # three tiles by themselves, one without


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rounds_take_every_tile_once_and_bound_the_partial_results(data):
    lens = data.draw(
        st.lists(
            st.tuples(st.integers(0, 2000), st.integers(0, 300)).filter(sum), min_size=1, max_size=6
        )
    )
    query_lens = [new for _, new in lens]
    seq_lens = [past + new for past, new in lens]
    block_q, row_bytes = data.draw(st.sampled_from([1, 8, 32])), data.draw(st.integers(4, 1 << 18))
    window = data.draw(st.sampled_from([None, 1, SPLIT, SPLIT + 1, 500]))
    known = data.draw(st.booleans())
    batch = AttentionBatch(
        slot_mapping=torch.zeros(0),
        page_table=torch.zeros(len(lens), -(-max(seq_lens) // 16)),
        seq_lens=torch.tensor(seq_lens),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0),
    )
    if not known:  # as on a GPU, whose values nobody waits for
        batch = replace(batch, seq_lens=batch.seq_lens.to("meta"))
    rounds = triton_backend.extend_rounds(
        batch, sum(query_lens), block_q=block_q, row_bytes=row_bytes, page_size=16, window=window
    )
    assert all(a.stop <= b.first for a, b in pairwise(rounds))
    for first, stop, splits in rounds:
        needed = (stop - first) * block_q * row_bytes * splits
        assert splits == 1 or stop - first == 1 or needed <= triton_backend.PARTS_BYTES
    owned = [next((r for r in rounds if r.first <= tile < r.stop), None) for tile in range(4000)]
    start = 0
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for local in range(0, query_len if query_len > 1 else 0, block_q):
            mine = owned[start // block_q + i + local // block_q]
            last = min(seq_len - query_len + local + block_q, seq_len) - 1
            seen = 0 if window is None else max(0, seq_len - query_len + local - window + 1)
            narrow = window is not None and window <= SPLIT
            assert mine.num_splits >= (1 if narrow else last // SPLIT - seen // SPLIT + 1)
        start += query_len


def test_a_small_chunk_after_a_long_prefix_fills_a_gpu(monkeypatch):
    # Llama-3-8B: 8 KV heads, tiles of 8 tokens; 132 processors are to have work.
    monkeypatch.setattr(triton_backend, "EXTEND_SPLIT", 1024)
    batch = AttentionBatch(
        slot_mapping=torch.zeros(0),
        page_table=torch.zeros(1, 512),
        seq_lens=torch.tensor([8192]),
        cu_seqlens_q=torch.tensor([0, 16]),
    )
    (found,) = triton_backend.extend_rounds(
        batch, 16, block_q=8, row_bytes=32 * 129 * 4, page_size=16, window=None
    )
    assert (found.stop - found.first, found.num_splits) == (3, 8)  # two tiles have tokens


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_query_that_is_not_finite_gives_nan_and_never_a_number(query_len, bad):
    for dtype in ("int8", "model"):
        case = Case(dtype, seq_lens=(40, 40), query_lens=(query_len, query_len))
        case.q[query_len - 1, 1, 5] = bad
        out = case.run()
        assert out[query_len - 1, 1].isnan().all()
        assert out[query_len:].isfinite().all()
        assert out[query_len - 1, 0].isfinite().all()


def test_padding_with_the_null_page_changes_no_bit():
    # As a captured graph runs it: more rows than sequences, a wider table.
    case = Case(group=3, seq_lens=(70, 20), query_lens=(1, 1))
    want = case.run()
    padded = case.make_batch((70, 20, 1, 1), (1, 1, 1, 1), [0, 1, 0, 0])
    table = torch.zeros(4, 16, dtype=torch.int32, device=DEVICE)
    table[:2, : case.page_table.shape[1]] = case.page_table
    padded = replace(padded, page_table=table)
    for tensor in case.layer:  # page 0 holds finite values, as `PageStorage` leaves it
        tensor.view(torch.uint8)[0] = 0
    q = torch.cat([case.q, torch.zeros_like(case.q)])
    assert torch.equal(case.run(q, padded)[:2], want)


def test_queries_may_be_views_into_a_wider_tensor():
    case = Case(seq_lens=(40, 30), query_lens=(1, 4), rotate="none")
    plain = case.run()
    wide = torch.randn(5, 3, 2, 64, device=DEVICE)
    wide[:, 1] = case.q
    assert torch.equal(case.run(wide[:, 1]), plain)
    assert torch.equal(case.run(case.q.permute(2, 0, 1).contiguous().permute(1, 2, 0)), plain)


def test_sequences_without_new_tokens_are_passed_over():
    case = Case(seq_lens=(40, 30, 20), query_lens=(1, 0, 2))
    want = case.run()
    batch = case.make_batch((40, 20), (1, 2), [0, 2])
    assert torch.equal(case.run(batch=batch), want)


def test_sizes_that_are_not_supported_are_named_before_anything_runs():
    before = triton_backend.runs.copy()
    case = Case("model", head_dim=258, group=1)
    with pytest.raises(ValueError, match=r"head_dim: expected 1 to 256.* got 258"):
        case.run()
    case = Case("int8", head_dim=33, group=1)
    with pytest.raises(ValueError, match=r"head_dim: .*even for quantized pages, got 33"):
        case.run()
    case = Case(num_kv_heads=2)
    case.q = torch.randn(1, 3, 64, device=DEVICE)
    with pytest.raises(ValueError, match="num_q_heads: expected a multiple of the 2 KV heads"):
        case.run()
    assert triton_backend.runs == before


# Shared pages


def shared_case(dtype: str = "int8", **fields) -> tuple[Case, list]:
    """Five sequences: four share 4 pages, three of them 3 more; and the runs."""
    case = Case(dtype, seq_lens=(150, 130, 113, 65, 20), query_lens=(1,) * 5, group=3, **fields)
    table = case.page_table
    table[1:4, :4] = table[0, :4]
    table[1:3, 4:7] = table[0, 4:7]
    case.batch = case.make_batch((150, 130, 113, 65, 20), (1,) * 5)
    return case, [(0, 4, [0, 1, 2, 3]), (4, 7, [2, 0, 1])]


@pytest.mark.parametrize("dtype", FORMATS)
def test_shared_pages_give_what_every_sequence_gets_alone(dtype):
    case, runs = shared_case(dtype)
    before = triton_backend.runs.copy()
    got = case.run_shared(runs)
    assert triton_backend.runs - before == {"shared": 1, "decode": 1, "merge": 1}
    case.check(got)


@pytest.mark.parametrize("fields", RULES.values(), ids=RULES)
def test_shared_pages_under_score_rules(fields):
    case, runs = shared_case()
    fields = {k: v[:3] if isinstance(v, torch.Tensor) else v for k, v in on_device(fields).items()}
    case.rule = replace(case.rule, **fields)
    case.check(case.run_shared(runs))


@pytest.mark.parametrize("asked", ["always", "auto"])
def test_shared_runs_of_a_batch_are_read_once_where_asked_for(asked):
    case, runs = shared_case()
    case.batch = replace(
        case.batch, runs=tuple(SharedRun(a, b, np.array(seqs)) for a, b, seqs in runs)
    )
    codec = KVCodec(case.codec.spec, replace(case.codec.config, shared_prefix=asked))
    before = triton_backend.runs.copy()
    got = TritonBackend(codec).plan(case.batch).attend(case.layer, case.q, case.rule)
    made = triton_backend.runs - before
    assert made == ({"shared": 1} if asked == "always" else {}) | {"decode": 1, "merge": 1}
    case.check(got)


def test_more_queries_than_a_tile_holds_share_a_run():
    # 23 sequences of 3 heads: two tiles of 64 rows; private tails of one token.
    case = Case(seq_lens=(33,) * 23, query_lens=(1,) * 23, group=3)
    case.page_table[1:, :2] = case.page_table[0, :2]
    case.batch = case.make_batch((33,) * 23, (1,) * 23)
    runs = [(0, 2, list(range(23)))]
    case.check(case.run_shared(runs))


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_ragged_batch_equals_float64(data):
    seq_lens = tuple(data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=3)))
    query_lens = tuple(data.draw(st.integers(1, min(n, 12))) for n in seq_lens)
    Case(
        data.draw(st.sampled_from(FORMATS)),
        head_dim=data.draw(st.sampled_from([8, 48, 64])),
        group=data.draw(st.integers(1, 7)),
        page_size=data.draw(st.sampled_from([1, 8, 16])),
        rotate=data.draw(st.sampled_from(["none", "hadamard"])),
        seq_lens=seq_lens,
        query_lens=query_lens,
    ).check()


@pytest.mark.parametrize(("head_dim", "rotate"), [(64, "hadamard"), (80, "none")])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_is_within_the_formats_bounds_of_float64(check_bounds, name, head_dim, rotate):
    check_bounds(
        name,
        backend="triton",
        head_dim=head_dim,
        group=3,
        page_size=4,
        seq_len=SPLIT + 1,
        query_len=3,
        rotate=rotate,
        device=DEVICE,
    )
