"""The "cpu" backend: compiled kernels with the signatures of `radixkv.reference`.

Importing it loads Numba; `radixkv.attention` does so only when the backend is asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixkv import reference
from radixkv.quant import KVCodec, KVFormat, LayerPages
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


def paged_attention(
    codec: KVCodec, layer: LayerPages, q: Tensor, batch: AttentionBatch, rule: ScoreRule
) -> Tensor:
    """Attend new tokens to stored pages; see `radixkv.reference.paged_attention`.

    Accuracy: float32 arithmetic; a sequence's result does not depend on the rest of the batch.
    """
    formats = (_format(codec.k_format), _format(codec.v_format))
    group = max(1, q.shape[1] // codec.spec.num_kv_heads)
    in_rows = cpu.extends_in_rows(formats)
    plans = batch.__dict__.setdefault("_cpu_plans", {})  # one batch serves every layer of a step
    if (group, in_rows) not in plans:
        plans[group, in_rows] = cpu.make_plan(*batch.host_lens, group, in_rows=in_rows)
    out: Tensor = cpu.attend(
        layer,
        formats,
        _rows(q),
        _packed("page_table", batch.page_table, torch.int32),
        _packed("seq_lens", batch.seq_lens, torch.int32),
        _packed("cu_seqlens_q", batch.cu_seqlens_q, torch.int32),
        plans[group, in_rows],
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
