"""The first tokens of pages onto others, scales included, in all layers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _copy_rows(
    ptr, source, target, num_rows, ROW_BYTES: tl.constexpr, MAX_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    for start in tl.static_range(0, MAX_ROWS * ROW_BYTES, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < num_rows * ROW_BYTES
        taken = tl.load(ptr + source * ROW_BYTES + offs, mask=mask, other=0)
        tl.store(ptr + target * ROW_BYTES + offs, taken, mask=mask)


@triton.jit(do_not_specialize=["num_pages"])
def copy_kernel(
    k_pages_ptr,  # bytes of all layers
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    copies_ptr,  # [num_copies, 3] int32: source page, target page, tokens
    num_pages,
    num_kv_heads,
    PAGE_SIZE: tl.constexpr,
    K_BYTES: tl.constexpr,  # of a row
    V_BYTES: tl.constexpr,
    K_SCALE_BYTES: tl.constexpr,
    V_SCALE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (copies, layers, KV heads): the first tokens of a page onto another."""
    copy = copies_ptr + tl.program_id(0) * 3
    layer = tl.program_id(1).to(tl.int64) * num_pages
    head = tl.program_id(2)
    source = ((layer + tl.load(copy)) * num_kv_heads + head) * PAGE_SIZE
    target = ((layer + tl.load(copy + 1)) * num_kv_heads + head) * PAGE_SIZE
    num_tokens = tl.load(copy + 2)
    _copy_rows(k_pages_ptr, source, target, num_tokens, K_BYTES, PAGE_SIZE, BLOCK)
    _copy_rows(v_pages_ptr, source, target, num_tokens, V_BYTES, PAGE_SIZE, BLOCK)
    if K_SCALE_BYTES > 0:
        _copy_rows(k_scale_ptr, source, target, num_tokens, K_SCALE_BYTES, PAGE_SIZE, BLOCK)
    if V_SCALE_BYTES > 0:
        _copy_rows(v_scale_ptr, source, target, num_tokens, V_SCALE_BYTES, PAGE_SIZE, BLOCK)
