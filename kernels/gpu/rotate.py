"""Rows times their Hadamard matrix: queries before attention, outputs of extend after it."""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.gpu.numbers import rotate_rows


@triton.jit(do_not_specialize=["num_rows"])
def rotate_kernel(
    rows_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    num_rows,
    num_heads,
    stride_token,
    stride_head,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid (tiles of BLOCK_T rows,); a row is one token's vector of one head."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    row = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (row < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    start = row // num_heads * stride_token + row % num_heads * stride_head
    x = tl.load(rows_ptr + start[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    x = rotate_rows(x, BLOCK_T, BLOCK_D, ROTATE)
    place = out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(place, x.to(out_ptr.dtype.element_ty), mask=mask)
