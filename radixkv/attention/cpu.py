"""The "cpu" backend: what `radixkv.attention.reference` does, in compiled kernels.

Importing it loads Numba; `radixkv.attention.backend` does so only when the backend is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention import reference
from radixkv.attention import sharing_cost as costs
from radixkv.attention.batch import AttentionBatch, KVReads, ScoreRule
from radixkv.attention.formats import SCALE_DTYPE, KVFormat
from radixkv.attention.layout import KVCodec, LayerPages
from radixkv.attention.plan import Backend, PreparedLayer, StepPlan
from radixkv_kernels import compile_cache
from radixkv_kernels.cpu.attention import AttentionCall, Rule, Step
from radixkv_kernels.cpu.formats import (
    FORMATS,
    RowFormat,
    extends_in_rows,
    shares,
)
from radixkv_kernels.cpu.plan import MAX_DECODE_GROUP, SPLIT, Plan, make_plan
from radixkv_kernels.cpu.simd import processor
from radixkv_kernels.cpu.write import Write

_NUMBERS = {one.name: number for number, one in enumerate(FORMATS)}  # "model" by its dtype


class _Stored(NamedTuple):
    """How a codec's pages are stored, in the kernels' words; of K and of V."""

    k: RowFormat
    v: RowFormat
    rotate: tuple[bool, bool]


def _row_format(kv_format: KVFormat) -> RowFormat:
    name = kv_format.name
    if name == "model":
        name = str(kv_format.code_dtype).removeprefix("torch.")
    if name not in _NUMBERS:
        raise ValueError(
            f"KVConfig.dtype: expected a format that the CPU kernels have "
            f'({", ".join(_NUMBERS)}), got {name!r}; use backend="torch"'
        )
    return RowFormat(_NUMBERS[name], kv_format.head_dim)


def _stored(codec: KVCodec) -> _Stored:
    k, v = _row_format(codec.k_format), _row_format(codec.v_format)
    return _Stored(k, v, (codec.rotate_k, codec.rotate_v))


def _rows(rows: Tensor) -> Tensor:
    """float32 rows whose elements lie one after another."""
    if rows.dtype is not torch.float32 or rows.requires_grad:
        rows = rows.detach().float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _packed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class CpuBackend(Backend):
    """Compiled kernels, on torch's number of threads."""

    name = "cpu"

    def __init__(self, codec: KVCodec) -> None:
        super().__init__(codec)
        self.stored = _stored(codec)

    def write_kv(
        self,
        layer: LayerPages,
        slot_mapping: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_idx: int,
        k_center: Tensor | None = None,
    ) -> None:
        """Quantize and scatter new tokens' K and V; see `Backend.write_kv`.

        Accuracy: without rotation, bit for bit that of the reference; with it, within one code
        (the rotation adds in another order).
        """
        k_form, v_form, rotate = self.stored
        slots = _packed("slot_mapping", slot_mapping, torch.int64)
        center = None if k_center is None else _rows(k_center)
        rows = (_rows(k), _rows(v))
        if not Write(k_form, v_form, slots, *rows, rotate=rotate).run(layer.places, center):
            # Its plain twin names the heads of rows that are refused, before it writes, too; and
            # it writes rows that are only near what the kernel takes for too large.
            codec = self.codec
            reference.write_kv(codec, layer, slots, k, v, layer_idx=layer_idx, k_center=k_center)

    def plan(self, batch: AttentionBatch) -> CpuPlan:
        return CpuPlan(self, batch)


class CpuPlan(StepPlan):
    """The tasks of a step, laid out once for each geometry of q: for most models, one.

    Runs of ``batch.runs`` are read once where `KVConfig.shared_prefix` says so; that changes no
    bit of the result (formats that are read as floats: what float rounding does).

    Accuracy: float32 arithmetic; a sequence's result does not depend on the rest of the batch.
    """

    backend: CpuBackend

    def __init__(self, backend: CpuBackend, batch: AttentionBatch) -> None:
        super().__init__(backend, batch)
        self._steps: dict[tuple[int, int], Step] = {}  # by num_q_heads, head_dim

    def attend(self, layer: LayerPages, q: Tensor, rule: ScoreRule) -> Tensor:
        _, num_q_heads, head_dim = q.shape
        step = self._step(num_q_heads, head_dim)
        terms = rule.terms(num_q_heads, q.device)
        out: Tensor = step.attend(layer.places, _rows(q), terms)
        return out if out.dtype is q.dtype else out.to(q.dtype)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> PreparedLayer:
        codec, (k_form, v_form, rotate) = self.backend.codec, self.backend.stored
        slots = _packed("slot_mapping", self.batch.slot_mapping, torch.int64)
        write = Write(k_form, v_form, slots, k, v, rotate=rotate).run
        _, num_q_heads, head_dim = q.shape
        attend, device = AttentionCall(self._step(num_q_heads, head_dim), q, out).run, q.device

        def run(
            layer: LayerPages, layer_idx: int, k_center: Tensor | None, rule: ScoreRule
        ) -> None:
            places = layer.places
            if not write(places, k_center):
                reference.write_kv(
                    codec, layer, slots, k, v, layer_idx=layer_idx, k_center=k_center
                )
            attend(places, rule.terms(num_q_heads, device))

        return run

    @property
    def reads(self) -> KVReads:
        if not self._steps:  # no layer has attended
            return KVReads(0, 0)
        plan = next(reversed(self._steps.values())).plan
        return KVReads(plan.tokens, plan.tokens_alone)

    def _step(self, num_q_heads: int, head_dim: int) -> Step:
        key = num_q_heads, head_dim
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._make_step(num_q_heads, head_dim)
        return step

    def _make_step(self, num_q_heads: int, head_dim: int) -> Step:
        codec, stored, batch = self.backend.codec, self.backend.stored, self.batch
        num_kv_heads = codec.spec.num_kv_heads
        return Step(
            _plan(codec, stored, batch, max(1, num_q_heads // num_kv_heads)),
            stored.k._replace(head_dim=head_dim),
            stored.v,
            num_q_heads,
            num_kv_heads,
            stored.rotate,
            _packed("page_table", batch.page_table, torch.int32),
            _packed("seq_lens", batch.seq_lens, torch.int32),
            _packed("cu_seqlens_q", batch.cu_seqlens_q, torch.int32),
        )


def _plan(codec: KVCodec, stored: _Stored, batch: AttentionBatch, group: int) -> Plan:
    shared = []
    spec, mode = codec.spec, codec.config.shared_prefix
    in_rows = extends_in_rows(stored.k, stored.v)
    can = shares(stored.k, stored.v)
    if mode != "never" and can and group <= MAX_DECODE_GROUP:
        shared = _shared_splits(batch, codec.config.page_size, in_rows)
    if shared and mode == "auto":
        cost = costs.sharing_cost(_cost_key(codec, group), lambda: _measure(codec, group))
        shared = _worthwhile(shared, batch, cost, spec.num_kv_heads)
    return make_plan(
        *batch.host_lens,
        group,
        in_rows=in_rows,
        shared=shared,
        num_kv_heads=spec.num_kv_heads,
    )


_Splits = list[tuple[NDArray[np.int64], int, int]]


def _shared_splits(batch: AttentionBatch, page_size: int, chunks: bool) -> _Splits:
    """The runs of splits that several new tokens see: sequences, first split, and after.

    A split belongs to the run in which it ends: that run's sequences share all before it, too.
    What follows a sequence's runs its own new tokens share, themselves among it. Without
    ``chunks``, sequences with several new tokens have no part in it.
    """
    query_lens = batch.query_lens
    shared: _Splits = []
    ends = np.zeros(len(query_lens), np.int64)
    for run in batch.runs:
        start, stop = run.start * page_size // SPLIT, run.stop * page_size // SPLIT
        seqs = run.seqs if chunks else run.seqs[query_lens[run.seqs] == 1]
        if stop > start and len(seqs) > 1:
            shared.append((seqs, start, stop))
            ends[seqs] = stop
    for seq in np.flatnonzero(query_lens > 1).tolist() if chunks else ():
        after = -(-batch.host_lens[0][seq] // SPLIT)
        shared.append((np.array([seq]), int(ends[seq]), after))
    return shared


def _worthwhile(
    shared: _Splits, batch: AttentionBatch, cost: costs.SharingCost, num_kv_heads: int
) -> _Splits:
    """Those that save time; all of a sequence's splits before one of them do, too."""
    kept, gain_s = [], 0.0
    ends = np.zeros(len(batch.query_lens), np.int64)
    for seqs, start, stop in shared:
        gain = cost.gain_s(int(batch.query_lens[seqs].sum()))
        if gain > 0 and (ends[seqs] == start).all():
            kept.append((seqs, start, stop))
            ends[seqs] = stop
            gain_s += gain * (stop - start) * num_kv_heads
    return kept if gain_s > cost.step_s * torch.get_num_threads() else []


def _cost_key(codec: KVCodec, group: int) -> str:
    spec, config = codec.spec, codec.config
    return (
        f"cpu {processor()} {compile_cache.build()}: K {codec.k_format.name} {spec.head_dim}, "
        f"V {codec.v_format.name} {spec.v_head_dim}, {group} heads, pages of {config.page_size}, "
        f"rotated {codec.rotate_k:d}{codec.rotate_v:d}"
    )


def _measure(codec: KVCodec, group: int) -> costs.SharingCost:
    """Time a few small steps, shared and not, on pages of zeros; about 0.2 s."""
    stored = _stored(codec)
    # So many heads that the pages do not stay in the nearest cache from query to query.
    num_heads, num_splits, page_size = 8, 2, codec.config.page_size
    pages_a_split = SPLIT // page_size
    queries, rounds = (2, 16), 3

    def pages(form: KVFormat) -> tuple[Tensor, Tensor]:
        shape = (num_splits * pages_a_split + 1, num_heads, page_size)
        codes = torch.zeros(*shape, form.code_width, dtype=form.code_dtype)
        return codes, torch.ones(*shape, form.num_scales, dtype=SCALE_DTYPE)

    (k_pages, k_scale), (v_pages, v_scale) = pages(codec.k_format), pages(codec.v_format)
    layer = LayerPages(k_pages, v_pages, k_scale, v_scale)
    table = torch.arange(len(k_pages), dtype=torch.int32).repeat(max(queries), 1)

    def step(num_seqs: int, splits: int, share: bool, num_threads: int) -> Callable[[], object]:
        seq_lens = [splits * SPLIT + 1] * num_seqs
        starts = list(range(num_seqs + 1))
        shared = [(np.arange(num_seqs), 0, splits)] if share else []
        # As with many heads, whose splits are not cut further to give every thread some work.
        plan = make_plan(
            seq_lens,
            starts,
            group,
            in_rows=extends_in_rows(stored.k, stored.v),
            shared=shared,
            num_kv_heads=1 << 10,
        )
        tables = (
            table[:num_seqs],
            torch.tensor(seq_lens, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
        )
        call = Step(plan, stored.k, stored.v, num_heads * group, num_heads, stored.rotate, *tables)
        q = torch.ones(num_seqs, num_heads * group, stored.k.head_dim, dtype=torch.float32)
        return partial(call.attend, layer.places, q, Rule(1.0), num_threads=num_threads)

    def least(calls: list[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
        taken = np.empty((rounds + 1, len(calls)))  # the first round is for the caches
        for row in taken:
            for i, call in enumerate(calls):
                begin = clock()
                call()
                row[i] = clock() - begin
        return [float(seconds) for seconds in taken[1:].min(axis=0)]

    # What a call costs that does next to nothing: a step that shares makes one more.
    (call_s,) = least([step(1, 0, False, 1)], time.thread_time)
    (step_s,) = least([step(1, 0, False, torch.get_num_threads())], time.perf_counter)
    steps = [step(n, num_splits, share, 1) for n in queries for share in (False, True)]
    alone_few, few, alone_many, many = least(steps, time.thread_time)
    stretches = num_splits * num_heads
    return costs.SharingCost.fit(
        (queries[0], (alone_few - few + call_s) / stretches),
        (queries[1], (alone_many - many + call_s) / stretches),
        step_s,
    )
