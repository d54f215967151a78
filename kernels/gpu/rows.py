"""Rows of queries, K, V and outputs, in the arrangement that attention multiplies."""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.gpu.numbers import FP8, INT4, INT8, MODEL, power_of_two


@triton.jit
def _half_minus(bits, BASE: tl.constexpr):
    """Small integers in the low bits of uint16, less BASE, as half floats: exact, no conversion."""
    return (bits | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + BASE)


@triton.jit
def read_rows(
    pages_ptr,
    scale_ptr,
    row,  # [BLOCK_N] int64
    mask,  # [BLOCK_N]: rows to read; the others are zeros, whatever is stored there
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Stored rows as numbers of DOT, and a float32 factor a row that makes them real.

    Two tiles [BLOCK_N, BLOCK]: the two elements of each column, j and j + HEAD_DIM / 2 for int4,
    2 j and 2 j + 1 for the formats of a byte, which are read in pairs (for MODEL twice the one
    tile that there is); and [BLOCK_N].
    """
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == MODEL else HEAD_DIM // 2
    offs = tl.arange(0, BLOCK)
    place = pages_ptr + row[:, None] * WIDTH + offs[None, :]
    mask_d = mask[:, None]
    if WIDTH != BLOCK:
        mask_d = mask_d & (offs < WIDTH)[None, :]
    if FORMAT == MODEL:
        codes = tl.load(place, mask=mask_d, other=0.0).to(DOT)
        return codes, codes, mask.to(tl.float32)
    elif FORMAT == INT4:
        raw = tl.load(place, mask=mask_d, other=0).to(tl.uint16)
        low, high = _half_minus(raw & 15, 8).to(DOT), _half_minus(raw >> 4, 8).to(DOT)
        NUM: tl.constexpr = HEAD_DIM // GROUP
        if (WIDTH == BLOCK) and (WIDTH % GROUP == 0) and (GROUP == 32):
            offs_g = tl.arange(0, NUM // 2)
            place_g = scale_ptr + row[:, None] * NUM + offs_g[None, :]
            scale_low = tl.load(place_g, mask=mask[:, None], other=0.0).to(tl.float32)
            place_g += NUM // 2
            scale_high = tl.load(place_g, mask=mask[:, None], other=0.0).to(tl.float32)
            size = tl.maximum(tl.max(tl.abs(scale_low), 1), tl.max(tl.abs(scale_high), 1))
            factor, inverse = power_of_two(size)
            scale_low = (scale_low * inverse[:, None]).to(DOT)
            scale_high = (scale_high * inverse[:, None]).to(DOT)
            ROWS: tl.constexpr = low.shape[0]
            low = tl.reshape(low, (ROWS, NUM // 2, GROUP)) * scale_low[:, :, None]
            high = tl.reshape(high, (ROWS, NUM // 2, GROUP)) * scale_high[:, :, None]
            return tl.reshape(low, (ROWS, BLOCK)), tl.reshape(high, (ROWS, BLOCK)), factor
        else:
            place_g = scale_ptr + row[:, None] * NUM + (offs // GROUP)[None, :]
            scale_low = tl.load(place_g, mask=mask_d, other=0.0).to(tl.float32)
            place_g = scale_ptr + row[:, None] * NUM + ((offs + WIDTH) // GROUP)[None, :]
            scale_high = tl.load(place_g, mask=mask_d, other=0.0).to(tl.float32)
            size = tl.maximum(tl.max(tl.abs(scale_low), 1), tl.max(tl.abs(scale_high), 1))
            factor, inverse = power_of_two(size)
            low = low * (scale_low * inverse[:, None]).to(DOT)
            high = high * (scale_high * inverse[:, None]).to(DOT)
            return low, high, factor
    else:
        raw = tl.load(place, mask=mask_d, other=0).to(tl.uint16, bitcast=True)
        factor = tl.load(scale_ptr + row, mask=mask, other=0.0).to(tl.float32)
        if FORMAT == INT8:
            raw = raw ^ 0x8080
            low, high = _half_minus(raw & 0xFF, 128), _half_minus(raw >> 8, 128)
        elif FORMAT == FP8:
            # The bits of half floats whose exponents are 8 too low: mended in the factor.
            low = (((raw & 0x80) << 8) | ((raw & 0x7F) << 7)).to(tl.float16, bitcast=True)
            high = ((raw & 0x8000) | ((raw & 0x7F00) >> 1)).to(tl.float16, bitcast=True)
            factor = factor * 256.0
        else:
            low = (raw << 8).to(tl.float16, bitcast=True)
            high = (raw & 0xFF00).to(tl.float16, bitcast=True)
        return low.to(DOT), high.to(DOT), factor


@triton.jit
def read_queries(
    q_ptr,
    start,  # [BLOCK_M] int64: where each row's query begins
    mask,  # [BLOCK_M]
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Queries in the arrangement of `read_rows`, and a float32 factor a row: [BLOCK_M]."""
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == MODEL else HEAD_DIM // 2
    STEP: tl.constexpr = 1 if (FORMAT == MODEL) | (FORMAT == INT4) else 2
    offs = tl.arange(0, BLOCK)
    place = q_ptr + start[:, None] + offs[None, :] * STEP
    mask_d = mask[:, None] & (offs < WIDTH)[None, :]
    low = tl.load(place, mask=mask_d, other=0.0).to(tl.float32)
    # One value that is not finite makes the whole result NaN, never a number.
    low = tl.where(tl.abs(low) < float("inf"), low, float("nan"))
    factor = tl.full((low.shape[0],), 1.0, tl.float32)
    if FORMAT == MODEL:
        low = low.to(DOT)
        return low, low, factor
    SECOND: tl.constexpr = WIDTH if FORMAT == INT4 else 1
    high = tl.load(place + SECOND, mask=mask_d, other=0.0).to(tl.float32)
    high = tl.where(tl.abs(high) < float("inf"), high, float("nan"))
    if tl.float16 == DOT:
        size = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
        factor, inverse = power_of_two(size)
        low, high = low * inverse[:, None], high * inverse[:, None]
    return low.to(DOT), high.to(DOT), factor


@triton.jit
def store_rows(
    out_ptr,
    start,  # [BLOCK_M] int64: where each row begins
    mask,  # [BLOCK_M]
    acc,
    acc_high,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store rows that lie in the arrangement of `read_rows`."""
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == MODEL else HEAD_DIM // 2
    STEP: tl.constexpr = 1 if (FORMAT == MODEL) | (FORMAT == INT4) else 2
    SECOND: tl.constexpr = WIDTH if FORMAT == INT4 else 1
    offs = tl.arange(0, BLOCK)
    place = out_ptr + start[:, None] + offs[None, :] * STEP
    mask_d = mask[:, None] & (offs < WIDTH)[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=mask_d)
    if FORMAT != MODEL:
        tl.store(place + SECOND, acc_high.to(out_ptr.dtype.element_ty), mask=mask_d)
