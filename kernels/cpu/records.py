"""What a kernel is told: one record of addresses, strides and sizes, and its counters."""

from __future__ import annotations

import struct

import numba
import numpy as np
import torch
from numba import types

PAGE_FIELDS = (
    "k_pages",
    "v_pages",
    "k_scale",
    "v_scale",
    "k_page",
    "k_head",
    "v_page",
    "v_head",
    "ks_page",
    "ks_head",
    "vs_page",
    "vs_head",
    "num_pages",
    "page_size",
    "num_kv_heads",
)
_CALL_FIELDS = (
    "q",
    "out",
    "q_token",
    "q_head",
    "out_token",
    "out_head",
    *PAGE_FIELDS,
    "sinks",
    "slopes",
    "window",
    "scratch",
    "partials",
    "counters",
)
_STEP_FIELDS = (
    "page_table",
    "table_row",
    "seq_lens",
    "cu_seqlens_q",
    "tasks",
    "num_tasks",
    "num_partials",
    "group",
    "scratch_bytes",
    "rotate_k",
    "rotate_v",
    "tile_queries",
    "partials_offset",
    "queries",
    "most_rows",
)
CALL = struct.Struct(f"={len(_CALL_FIELDS)}q2f")
ARGS = np.dtype(
    [(name, "i8") for name in _CALL_FIELDS]
    + [("scale", "f4"), ("softcap", "f4")]
    + [(name, "i8") for name in _STEP_FIELDS]
)
"""What attention is told: addresses (bytes), strides (q, out, rows: elements; pages: bytes), sizes.

First (`CALL`) what differs from layer to layer, then what a step's layers have in common.

``tasks`` is [num_tasks, 5] int32: sequence, first query, split, number of splits, number of
its first split among all partial results (-1: the task takes all splits by itself).

``counters`` is int64: [0] threads begun, [1] next task, [2] a bad page or slot (+ 1 if not
negative), [4] tokens read (of each KV head), then from COUNTERS on one a (partial result, KV head)
for the merge.

For shared splits ``tasks`` is [num_tasks, 5]: sequence whose pages are read, first split, split
after the last, first query, number of queries (``most_rows`` query rows at most); ``queries`` is
[num_queries, 3] int32: row in q, position, number of its first split among all partial results;
a task's positions ascend.
"""
_ARGS_TYPE = numba.from_dtype(ARGS)
SIGNATURE = types.void(types.CPointer(_ARGS_TYPE))
COUNTERS = 8  # the merge counters begin here

WRITE_FIELDS = (
    "k_rows",
    "k_rows_token",
    "k_rows_head",
    "v_rows",
    "v_rows_token",
    "v_rows_head",
    "slots",
    "num_tokens",
    "num_tasks",
    "rotate_k",
    "rotate_v",
    "k_center",
    "k_center_head",
    *PAGE_FIELDS,
    "checks",
    "writes",
    "counters",
)
WRITE_ARGS = np.dtype([(name, "i8") for name in WRITE_FIELDS])
"""What the write kernel is told, as `ARGS`; ``k_center`` is float32, its stride in bytes.

``checks`` and ``writes``: which of its two halves run. ``counters`` is int64: [0] next task to
check, [1] next task to write, [2] a bad slot (+ 1 if not negative), [3] whether a row is not
finite.
"""
WRITE_SIGNATURE = types.void(types.CPointer(numba.from_dtype(WRITE_ARGS)))


def page_arguments(
    k_pages: torch.Tensor, v_pages: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> tuple[int, ...]:
    """Where a layer's pages lie: the values of `PAGE_FIELDS`, right as long as the tensors live.

    A head's page is contiguous.
    """
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    k_size, v_size = k_pages.element_size(), v_pages.element_size()
    k_page, k_head, _, _ = k_pages.stride()
    v_page, v_head, _, _ = v_pages.stride()
    ks_page, ks_head, _, _ = k_scale.stride()
    vs_page, vs_head, _, _ = v_scale.stride()
    return (
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        k_scale.data_ptr(),
        v_scale.data_ptr(),
        k_page * k_size,
        k_head * k_size,
        v_page * v_size,
        v_head * v_size,
        ks_page * 2,
        ks_head * 2,
        vs_page * 2,
        vs_head * 2,
        num_pages,
        page_size,
        num_kv_heads,
    )


def bad_number(counter: int) -> int:
    return counter - 1 if counter > 0 else counter


COUNTED = struct.Struct("=3q")
