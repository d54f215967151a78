"""New rows of K and V into pages: checked, rotated, quantized, scattered.

Parameters are one flat list, as Triton takes them (README.md says why).
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.gpu.numbers import (
    FP8,
    INT4,
    INT8,
    MIN_SCALE,
    MODEL,
    as_scale,
    rotate_rows,
    rounded,
    sum_halves,
)

FAULT_KINDS = 3  # of the faults that `write` notes: K not finite, V not finite, no such slot


@triton.jit
def _fp8_byte(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Bytes of the nearest 8-bit floats, halves to even; |x| is at most the largest of them."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA
    up = size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)
    normal = (up >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Below the least normal number codes count steps: the sum's last digit is one of them.
    BASE: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    steps = size.to(tl.float32, bitcast=True) + BASE
    small = steps.to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(size < ((128 - BIAS) << 23), small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_int4(
    x,  # [BLOCK_T, BLOCK_D] float32, rotated
    pages_ptr,
    scale_ptr,
    row,
    ok,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    SEARCH: tl.constexpr,  # shares of the largest scale, a tuple
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    NUM: tl.constexpr = HEAD_DIM // GROUP
    NUM_P: tl.constexpr = triton.next_power_of_2(NUM)
    PLAIN: tl.constexpr = (HEAD_DIM == BLOCK_D) and (GROUP == 32)
    if PLAIN:
        groups = tl.reshape(x, (BLOCK_T * NUM_P, 32))
    else:
        # Groups of another size are spread over 32 columns each, with zeros behind.
        offs = tl.arange(0, NUM_P * 32)
        element = offs // 32 * GROUP + offs % 32
        real = (offs % 32 < GROUP) & (element < HEAD_DIM)
        index = tl.where(real, element, 0)[None, :] + tl.zeros((BLOCK_T, 1), tl.int32)
        spread = tl.where(real[None, :], tl.gather(x, index, 1), 0.0)
        groups = tl.reshape(spread, (BLOCK_T * NUM_P, 32))
    amax = tl.max(tl.abs(groups), 1)
    above = tl.max(groups, 1) >= amax
    best = tl.full((BLOCK_T * NUM_P,), float("inf"), tl.float32)
    scale = tl.zeros((BLOCK_T * NUM_P,), tl.float32)
    for i in tl.static_range(len(SEARCH)):
        size = as_scale(tl.maximum(amax * (SEARCH[i] / 7.5), MIN_SCALE))
        tried = tl.where(above, -size, size)
        inverse = tl.div_rn(tl.full((BLOCK_T * NUM_P,), 1.0, tl.float32), tried)
        coded = rounded(groups * inverse[:, None])
        coded = tl.minimum(tl.maximum(coded, -8.0), 7.0)
        away = groups - coded * tried[:, None]
        error = sum_halves(away * away, BLOCK_T * NUM_P, 32, 5)
        better = (error < best) | (i == 0)
        best = tl.where(better, error, best)
        scale = tl.where(better, tried, scale)
    inverse = tl.div_rn(tl.full((BLOCK_T * NUM_P,), 1.0, tl.float32), scale)
    codes = rounded(groups * inverse[:, None])
    codes = (tl.minimum(tl.maximum(codes, -8.0), 7.0) + 8.0).to(tl.int32)
    codes = tl.reshape(codes, (BLOCK_T, NUM_P * 32))
    BLOCK_H: tl.constexpr = triton.next_power_of_2(HALF)
    offs_h = tl.arange(0, BLOCK_H)
    if PLAIN:
        low, high = tl.split(tl.permute(tl.reshape(codes, (BLOCK_T, 2, HALF)), (0, 2, 1)))
    else:
        at = tl.minimum(offs_h, HALF - 1)
        at_low = (at // GROUP * 32 + at % GROUP)[None, :] + tl.zeros((BLOCK_T, 1), tl.int32)
        at += HALF
        at_high = (at // GROUP * 32 + at % GROUP)[None, :] + tl.zeros((BLOCK_T, 1), tl.int32)
        low, high = tl.gather(codes, at_low, 1), tl.gather(codes, at_high, 1)
    packed = (low | (high << 4)).to(tl.uint8)
    mask = ok[:, None] & (offs_h < HALF)[None, :]
    tl.store(pages_ptr + row[:, None] * HALF + offs_h[None, :], packed, mask=mask)
    offs_g = tl.arange(0, NUM_P)
    scales = tl.reshape(scale, (BLOCK_T, NUM_P)).to(tl.bfloat16)
    mask = ok[:, None] & (offs_g < NUM)[None, :]
    tl.store(scale_ptr + row[:, None] * NUM + offs_g[None, :], scales, mask=mask)


@triton.jit
def _write_rows(
    rows_ptr,
    stride_token,
    stride_head,
    pages_ptr,
    scale_ptr,
    fault_ptr,
    token,
    head,
    row,
    ok,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    SEARCH: tl.constexpr,
    ROTATE: tl.constexpr,
    LIMIT: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    offs_d = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (offs_d < HEAD_DIM)[None, :]
    start = token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    x = tl.load(rows_ptr + start[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    bad = tl.max((~(tl.abs(x) < LIMIT)).to(tl.int32), 1)
    tl.store(fault_ptr, 1, mask=tl.max(bad, 0) > 0)
    ok = ok & (bad == 0)
    x = tl.where(ok[:, None], x, 0.0)
    if ROTATE > 0:
        x = rotate_rows(x, BLOCK_T, BLOCK_D, ROTATE)
        if STORED < LIMIT:
            bad = tl.max((~(tl.abs(x) < STORED)).to(tl.int32), 1)
            tl.store(fault_ptr, 1, mask=tl.max(bad, 0) > 0)
            ok = ok & (bad == 0)
    mask = ok[:, None] & (offs_d < HEAD_DIM)[None, :]
    place = pages_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
    if FORMAT == INT4:
        _write_int4(x, pages_ptr, scale_ptr, row, ok, HEAD_DIM, GROUP, SEARCH, BLOCK_T, BLOCK_D)
    elif FORMAT == MODEL:
        tl.store(place, x.to(pages_ptr.dtype.element_ty), mask=mask)
    else:
        LARGEST: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0 if FORMAT == FP8 else 57344.0
        amax = tl.max(tl.abs(x), 1)
        scale = tl.div_rn(amax, tl.full((BLOCK_T,), LARGEST, tl.float32))
        scale = as_scale(tl.maximum(scale, MIN_SCALE))
        codes = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
        if FORMAT == INT8:
            codes = rounded(codes)
        codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
        if FORMAT == INT8:
            tl.store(place, codes.to(tl.int8), mask=mask)
        elif FORMAT == FP8:
            tl.store(place, _fp8_byte(codes, 3, 7), mask=mask)
        else:
            tl.store(place, _fp8_byte(codes, 2, 15), mask=mask)
        tl.store(scale_ptr + row, scale.to(tl.bfloat16), mask=ok)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM], any float dtype
    v_ptr,  # [num_tokens, num_kv_heads, V_HEAD_DIM]
    slots_ptr,  # [num_tokens] int64
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    faults_ptr,  # [FAULT_KINDS, num_kv_heads] int32 of this layer; set to 1, never to 0
    num_tokens,
    num_slots,
    num_kv_heads,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    PAGE_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    SEARCH: tl.constexpr,
    K_ROTATE: tl.constexpr,
    V_ROTATE: tl.constexpr,
    K_LIMIT: tl.constexpr,  # of rows as they come, in size
    V_LIMIT: tl.constexpr,
    K_STORED: tl.constexpr,  # of rows as they are stored
    V_STORED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Grid (tiles of BLOCK_T tokens, KV heads).

    A row that is not finite, or would not be as stored, is not written.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=ok, other=0)
    exists = (slot >= 0) & (slot < num_slots)
    missing = tl.max((~exists).to(tl.int32), 0)
    tl.store(faults_ptr + 2 * num_kv_heads + head, 1, mask=missing > 0)
    ok = ok & exists
    row = (slot // PAGE_SIZE * num_kv_heads + head) * PAGE_SIZE + slot % PAGE_SIZE
    _write_rows(
        k_ptr, stride_k_token, stride_k_head, k_pages_ptr, k_scale_ptr, faults_ptr + head,
        token, head, row, ok, K_FORMAT, HEAD_DIM, K_GROUP, SEARCH, K_ROTATE,
        K_LIMIT, K_STORED, BLOCK_T,
    )  # fmt: skip
    _write_rows(
        v_ptr, stride_v_token, stride_v_head, v_pages_ptr, v_scale_ptr,
        faults_ptr + num_kv_heads + head,
        token, head, row, ok, V_FORMAT, V_HEAD_DIM, V_GROUP, SEARCH, V_ROTATE,
        V_LIMIT, V_STORED, BLOCK_T,
    )  # fmt: skip
