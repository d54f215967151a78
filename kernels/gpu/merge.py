"""Partial results of a query into one."""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.gpu.numbers import LOG2E, rotate_rows
from radixkv_kernels.gpu.tiles import find_run


@triton.jit(do_not_specialize=["num_columns", "num_seqs", "first_tile"])
def merge_kernel(
    parts_out_ptr,  # [num_parts, num_q_heads, HEAD_DIM] float32
    parts_lse_ptr,  # [num_parts, num_q_heads] float32
    table_ptr,  # HAS_TABLE: [num_rows, num_columns] int32, parts of each row; -1 is none
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    cu_seqlens_q_ptr,  # not HAS_TABLE: [num_seqs + 1] int32
    sinks_ptr,  # [num_q_heads] float32, read if HAS_SINKS
    num_columns,
    num_q_heads,
    num_seqs,  # read if BLOCK_Q
    first_tile,  # read if BLOCK_Q
    HAS_TABLE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # tokens of a tile of `extend_kernel`; 0 for other parts
):
    """Grid (rows, tiles of BLOCK_H query heads): the weighted mean of a row's parts.

    HAS_TABLE: output row i. Else the parts of row i are the ``num_columns`` from
    ``i * num_columns`` on. Without BLOCK_Q row i is sequence i, and its output row is
    ``cu_seqlens_q[i]``; sequences without exactly one new token are passed over. With BLOCK_Q
    it is a token of `extend_kernel`'s tiles from ``first_tile`` on.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    row = tl.program_id(0)
    out_row = row
    if BLOCK_Q > 0:
        tile = first_tile + row // BLOCK_Q
        seq, local = find_run(cu_seqlens_q_ptr, num_seqs, tile, BLOCK_Q)
        local += row % BLOCK_Q
        begin = tl.load(cu_seqlens_q_ptr + seq)
        query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
        if (local >= query_len) | (query_len == 1):
            return
        out_row = begin + local
    elif not HAS_TABLE:
        out_row = tl.load(cu_seqlens_q_ptr + row)
        if tl.load(cu_seqlens_q_ptr + row + 1) - out_row != 1:
            return
    q_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = q_head < num_q_heads
    offs_d = tl.arange(0, BLOCK_D)
    m = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    sink = m
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head, mask=mask_h, other=float("-inf"))
        m = sink
    for column in range(num_columns):
        part = row.to(tl.int64) * num_columns + column
        if HAS_TABLE:
            part = tl.load(table_ptr + part).to(tl.int64)
        place = part * num_q_heads + q_head  # below 0 for a part of -1
        mask = mask_h & (place >= 0)
        m = tl.maximum(m, tl.load(parts_lse_ptr + place, mask=mask, other=float("-inf")))
    m = tl.where(m == float("-inf"), 0.0, m)
    total = tl.exp2((sink - m) * LOG2E)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    # One part after another: those without tokens add zeros, however many there are.
    for column in range(num_columns):
        part = row.to(tl.int64) * num_columns + column
        if HAS_TABLE:
            part = tl.load(table_ptr + part).to(tl.int64)
        place = part * num_q_heads + q_head
        mask = mask_h & (place >= 0)
        lse = tl.load(parts_lse_ptr + place, mask=mask, other=float("-inf"))
        weight = tl.exp2((lse - m) * LOG2E)
        mask_d = (mask & (lse != float("-inf")))[:, None] & (offs_d < HEAD_DIM)[None, :]
        place_d = parts_out_ptr + place[:, None] * HEAD_DIM + offs_d[None, :]
        acc += weight[:, None] * tl.load(place_d, mask=mask_d, other=0.0)
        total += weight
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    if ROTATE > 0:
        acc = rotate_rows(acc, BLOCK_H, BLOCK_D, ROTATE)
    place = (out_row.to(tl.int64) * num_q_heads + q_head) * HEAD_DIM
    mask_d = mask_h[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(
        out_ptr + place[:, None] + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_d
    )
