"""The "cpu" backend: compiled kernels with the signatures of `radixkv.reference`.

Importing it loads Numba; `radixkv.attention` does so only when the backend is asked for.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv import costs, reference
from radixkv.quant import SCALE_DTYPE, KVCodec, KVFormat, LayerPages
from radixkv.reference import AttentionBatch, ScoreRule
from radixkv_kernels import cpu

_FORMATS = {
    "int8": cpu.INT8,
    "fp8": cpu.FP8,
    "fp8_e5m2": cpu.FP8_E5M2,
    "int4": cpu.INT4,
    torch.float32: cpu.FLOAT32,
    torch.float16: cpu.FLOAT16,
    torch.bfloat16: cpu.BFLOAT16,
}


def _format(kv_format: KVFormat) -> int:
    fmt: int = _FORMATS[kv_format.code_dtype if kv_format.name == "model" else kv_format.name]
    return fmt


def _rows(rows: Tensor) -> Tensor:
    """float32 rows whose elements lie one after another."""
    rows = rows.detach().float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _packed(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def write_kv(
    codec: KVCodec, layer: LayerPages, slot_mapping: Tensor, k: Tensor, v: Tensor, *, layer_idx: int
) -> None:
    """Quantize and scatter new tokens' K and V; see `radixkv.reference.write_kv`.

    Accuracy: without rotation, bit for bit that of the reference; with it, within one code
    (the rotation adds in another order).
    """
    formats = (_format(codec.k_format), _format(codec.v_format))
    rotate = (codec.rotate_k, codec.rotate_v)
    slots = _packed("slot_mapping", slot_mapping, torch.int64)
    if not cpu.write(layer, formats, slots, _rows(k), _rows(v), rotate=rotate):
        # The plain twin names the heads: it raises before it writes, too.
        reference.encode_rows(codec.k_format, False, k, name="K", layer_idx=layer_idx)
        reference.encode_rows(codec.v_format, False, v, name="V", layer_idx=layer_idx)


def _plan(codec: KVCodec, formats: tuple[int, int], batch: AttentionBatch, group: int) -> cpu.Plan:
    shared = []
    spec, mode = codec.spec, codec.config.shared_prefix
    can = cpu.shares(formats, codec.k_format.head_dim, codec.v_format.head_dim)
    if mode != "never" and can and group <= cpu.MAX_DECODE_GROUP:
        shared = _shared_splits(batch, codec.config.page_size)
    if shared and mode == "auto":
        cost = costs.sharing_cost(_cost_key(codec, group), lambda: _measure(codec, formats, group))
        shared = _worthwhile(shared, batch.query_lens, cost, spec.num_kv_heads)
    return cpu.make_plan(
        *batch.host_lens,
        group,
        in_rows=cpu.extends_in_rows(formats),
        shared=shared,
        num_kv_heads=spec.num_kv_heads,
    )


_Splits = list[tuple[NDArray[np.int64], int, int]]


def _shared_splits(batch: AttentionBatch, page_size: int) -> _Splits:
    """The runs of whole splits that several new tokens see: sequences, first split, and after.

    A split belongs to the run in which it ends: that run's sequences share all before it, too.
    """
    query_lens = batch.query_lens
    shared: _Splits = []
    ends = np.zeros(len(query_lens), np.int64)
    for run in batch.runs:
        start, stop = run.start * page_size // cpu.SPLIT, run.stop * page_size // cpu.SPLIT
        if stop > start:
            shared.append((run.seqs, start, stop))
            ends[run.seqs] = stop
    # The tokens of one chunk share what lies before it.
    for seq in np.flatnonzero(query_lens > 1).tolist():
        after = (batch.host_lens[0][seq] - int(query_lens[seq])) // cpu.SPLIT
        if after > ends[seq]:
            shared.append((np.array([seq]), int(ends[seq]), after))
    return shared


def _worthwhile(
    shared: _Splits, query_lens: NDArray[np.int64], cost: costs.SharingCost, num_kv_heads: int
) -> _Splits:
    """Those that save time; all of a sequence's splits before one of them do, too."""
    kept, gain_s = [], 0.0
    for seqs, start, stop in shared:
        gain = cost.gain_s(int(query_lens[seqs].sum()))
        if gain > 0:
            kept.append((seqs, start, stop))
            gain_s += gain * (stop - start) * num_kv_heads
    return kept if gain_s > cost.step_s * torch.get_num_threads() else []


def _cost_key(codec: KVCodec, group: int) -> str:
    spec, config = codec.spec, codec.config
    build = zlib.crc32(Path(cpu.__file__).read_bytes())
    return (
        f"cpu {cpu.processor()} {build:08x}: K {codec.k_format.name} {spec.head_dim}, "
        f"V {codec.v_format.name} {spec.v_head_dim}, {group} heads, pages of {config.page_size}, "
        f"rotated {codec.rotate_k:d}{codec.rotate_v:d}"
    )


def _measure(codec: KVCodec, formats: tuple[int, int], group: int) -> costs.SharingCost:
    """Time a few small steps, shared and not, on pages of zeros. Takes a tenth of a second."""
    num_heads, page_size = 2, codec.config.page_size
    pages_a_split = cpu.SPLIT // page_size
    queries, rounds = (2, 24), 7

    def pages(form: KVFormat) -> tuple[Tensor, Tensor]:
        shape = (2 * pages_a_split + 1, num_heads, page_size)
        codes = torch.zeros(*shape, form.code_width, dtype=form.code_dtype)
        return codes, torch.ones(*shape, form.num_scales, dtype=SCALE_DTYPE)

    (k_pages, k_scale), (v_pages, v_scale) = pages(codec.k_format), pages(codec.v_format)
    layer = LayerPages(k_pages, v_pages, k_scale, v_scale)
    table = torch.arange(2 * pages_a_split + 1, dtype=torch.int32).repeat(max(queries), 1)

    def step(num_seqs: int, num_splits: int, share: bool, num_threads: int) -> Callable[[], object]:
        seq_lens = [num_splits * cpu.SPLIT + 1] * num_seqs
        starts = list(range(num_seqs + 1))
        shared = [(np.arange(num_seqs), 0, num_splits)] if share else []
        return partial(
            cpu.attend,
            layer,
            formats,
            torch.ones(num_seqs, num_heads * group, codec.k_format.head_dim),
            table[:num_seqs],
            torch.tensor(seq_lens, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            cpu.make_plan(seq_lens, starts, group, in_rows=True, shared=shared),
            softmax_scale=1.0,
            v_head_dim=codec.v_format.head_dim,
            rotate=(codec.rotate_k, codec.rotate_v),
            num_threads=num_threads,
        )

    steps = [step(n, 2, share, 1) for n in queries for share in (False, True)]
    for call in steps:
        call()
    taken = np.empty((rounds, len(steps)))
    for row in taken:
        for i, call in enumerate(steps):
            begin = time.thread_time()
            call()
            row[i] = time.thread_time() - begin
    # Waking the threads once more is what a step that shares pays; this does little else.
    wake, waits = step(1, 0, False, torch.get_num_threads()), []
    for _ in range(rounds):
        begin = time.perf_counter()
        wake()
        waits.append(time.perf_counter() - begin)
    best = taken.min(axis=0) / (2 * num_heads)
    few, many = ((n, float(best[2 * i] - best[2 * i + 1])) for i, n in enumerate(queries))
    return costs.SharingCost.fit(few, many, float(np.median(waits)))


def paged_attention(
    codec: KVCodec, layer: LayerPages, q: Tensor, batch: AttentionBatch, rule: ScoreRule
) -> Tensor:
    """Attend new tokens to stored pages; see `radixkv.reference.paged_attention`.

    Runs of ``batch.runs`` are read once where `KVConfig.shared_prefix` says so; that changes no
    bit of the result.

    Accuracy: float32 arithmetic; a sequence's result does not depend on the rest of the batch.
    """
    formats = (_format(codec.k_format), _format(codec.v_format))
    group = max(1, q.shape[1] // codec.spec.num_kv_heads)
    plans = batch.__dict__.setdefault("_cpu_plans", {})  # one batch serves every layer of a step
    key = (codec.config, codec.spec, group)
    if key not in plans:
        plans[key] = _plan(codec, formats, batch, group)
    plan = plans[key]
    batch.reads.tokens, batch.reads.tokens_alone = plan.tokens, plan.tokens_alone
    out: Tensor = cpu.attend(
        layer,
        formats,
        _rows(q),
        _packed("page_table", batch.page_table, torch.int32),
        _packed("seq_lens", batch.seq_lens, torch.int32),
        _packed("cu_seqlens_q", batch.cu_seqlens_q, torch.int32),
        plan,
        softmax_scale=rule.softmax_scale,
        v_head_dim=codec.v_format.head_dim,
        rotate=(codec.rotate_k, codec.rotate_v),
        window=rule.sliding_window,
        softcap=rule.softcap,
        sinks=None if rule.sinks is None else rule.sinks.detach().float().contiguous(),
        alibi_slopes=(
            None if rule.alibi_slopes is None else rule.alibi_slopes.detach().float().contiguous()
        ),
    )
    return out.to(q.dtype)
