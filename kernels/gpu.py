"""GPU kernels over quantized KV pages, in Triton: write, rotate, split, extend, merge, copy.

Page layout: ``radixkv.quant``. Nothing here knows radixkv: the callers pass tensors and sizes.
The pages of a layer are contiguous, so a stored row (one token of one KV head) has one number,

    row = (page_id * num_kv_heads + head) * PAGE_SIZE + offset                (int64)

its codes begin at ``row * width``, its scales at ``row * num_scales``.

    write    a program takes a few tokens of one head, K and V: rotate, quantize, scatter
    rotate   rows by their Hadamard matrix: queries before attention, outputs of extend after it
    split    one query token a sequence (decode), or many sequences' queries over a run of pages
             that they share: a program reads SPLIT tokens once for all query heads of a KV head
             (and all queries of its tile) and leaves a partial result and its log-sum-exp
    merge    partial results of a query into one; sinks; output rotated back
    extend   several query tokens of a sequence, causal: a tile of them, over a split or over all
    copy     the first tokens of pages, scales included, in all layers

Codes never become real values: K is multiplied as stored and its scales are folded into the
scores, V's into the weights. Half floats hold every int8, fp8 and int4 code exactly; queries,
and weights times V's scales, are first divided by a power of two, which changes no digit.

Splits and tiles lie at fixed token positions, so that a sequence's result does not depend on
what else is in the batch. float8 bytes are read and written by bit operations, alike on GPUs
with and without such types.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT8: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
FP8_E5M2: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)
MODEL: tl.constexpr = tl.constexpr(4)

FAULT_KINDS = 3  # of the faults that `write` notes: K not finite, V not finite, no such slot

_MIN_SCALE: tl.constexpr = tl.constexpr(2.0**-100)  # as radixkv.quant
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _power_of_two(x):
    """The power of two at or below each float32 of ``x`` (2^-100 to 2^126), and its inverse."""
    bits = tl.minimum(tl.maximum(x, _MIN_SCALE), 2.0**126).to(tl.int32, bitcast=True)
    bits = bits & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """Each |x| < 2^22 to the nearest integer, halves to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _as_scale(x):
    """Positive float32 to the nearest bfloat16, halves to even (the interpreter cuts off)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rotate(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr):
    """Rows times the Hadamard matrices of blocks of 2^LOG2 elements. [ROWS, BLOCK] float32."""
    SIZE: tl.constexpr = 2**LOG2
    for _ in tl.static_range(LOG2):
        # A butterfly of neighbours whose results go to the two halves: every bit of the index
        # is in the last place once, and after LOG2 turns all are where they were.
        a, b = tl.split(tl.reshape(x, (ROWS * BLOCK // SIZE, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, BLOCK))
    return x * (SIZE**-0.5)


@triton.jit
def _sum_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr):
    """Sum of each row in the order of `radixkv.quant`: the halves, then theirs. [ROWS]."""
    for i in tl.static_range(LOG2):
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2 ** (i + 1))), (0, 2, 1)))
        x = a + b
    return tl.reshape(x, (ROWS,))


# ---------------------------------------------------------------- writing


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
        size = _as_scale(tl.maximum(amax * (SEARCH[i] / 7.5), _MIN_SCALE))
        tried = tl.where(above, -size, size)
        inverse = tl.div_rn(tl.full((BLOCK_T * NUM_P,), 1.0, tl.float32), tried)
        coded = _rounded(groups * inverse[:, None])
        coded = tl.minimum(tl.maximum(coded, -8.0), 7.0)
        away = groups - coded * tried[:, None]
        error = _sum_halves(away * away, BLOCK_T * NUM_P, 32, 5)
        better = (error < best) | (i == 0)
        best = tl.where(better, error, best)
        scale = tl.where(better, tried, scale)
    inverse = tl.div_rn(tl.full((BLOCK_T * NUM_P,), 1.0, tl.float32), scale)
    codes = _rounded(groups * inverse[:, None])
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
        x = _rotate(x, BLOCK_T, BLOCK_D, ROTATE)
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
        scale = _as_scale(tl.maximum(scale, _MIN_SCALE))
        codes = tl.div_rn(x, scale[:, None] + tl.zeros_like(x))
        if FORMAT == INT8:
            codes = _rounded(codes)
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
    x = _rotate(x, BLOCK_T, BLOCK_D, ROTATE)
    place = out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(place, x.to(out_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- reading


@triton.jit
def _half_minus(bits, BASE: tl.constexpr):
    """Small integers in the low bits of uint16, less BASE, as half floats: exact, no conversion."""
    return (bits | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + BASE)


@triton.jit
def _read(
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
            factor, inverse = _power_of_two(size)
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
            factor, inverse = _power_of_two(size)
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
def _read_queries(
    q_ptr,
    start,  # [BLOCK_M] int64: where each row's query begins
    mask,  # [BLOCK_M]
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Queries in the arrangement of `_read`, and a float32 factor a row: [BLOCK_M]."""
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
        factor, inverse = _power_of_two(size)
        low, high = low * inverse[:, None], high * inverse[:, None]
    return low.to(DOT), high.to(DOT), factor


@triton.jit
def _store_rows(
    out_ptr,
    start,  # [BLOCK_M] int64: where each row begins
    mask,  # [BLOCK_M]
    acc,
    acc_high,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store rows that lie in the arrangement of `_read`."""
    WIDTH: tl.constexpr = HEAD_DIM if FORMAT == MODEL else HEAD_DIM // 2
    STEP: tl.constexpr = 1 if (FORMAT == MODEL) | (FORMAT == INT4) else 2
    SECOND: tl.constexpr = WIDTH if FORMAT == INT4 else 1
    offs = tl.arange(0, BLOCK)
    place = out_ptr + start[:, None] + offs[None, :] * STEP
    mask_d = mask[:, None] & (offs < WIDTH)[None, :]
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=mask_d)
    if FORMAT != MODEL:
        tl.store(place + SECOND, acc_high.to(out_ptr.dtype.element_ty), mask=mask_d)


@triton.jit
def _attend(
    q_low,
    q_high,
    q_factor,  # [BLOCK_M]: softmax scale and what `_read_queries` took out
    query_pos,  # [BLOCK_M] int32; -1 sees nothing
    slope,  # [BLOCK_M] float32, read if HAS_SLOPES
    table_ptr,  # page ids from position 0 on
    first,
    last,  # tokens first..last-1 are read
    head,
    num_kv_heads,
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    window,  # read if HAS_WINDOW
    softcap,  # read if HAS_SOFTCAP
    PAGE_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over tokens first..last-1, in tiles that begin at multiples of BLOCK_N.

    Returns the weighted sums of V (twice [BLOCK_M, V_BLOCK], arranged as in `_read`), not yet
    divided by the sum of weights; and m, l: the largest score times log2(e), the sum of
    2^(score - m). [BLOCK_M] each.
    """
    acc = tl.zeros((BLOCK_M, V_BLOCK), tl.float32)
    acc_high = acc
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
        pos = start + tl.arange(0, BLOCK_N)
        stored = (pos >= first) & (pos < last)
        page_id = tl.load(table_ptr + pos // PAGE_SIZE, mask=stored, other=0).to(tl.int64)
        row = (page_id * num_kv_heads + head) * PAGE_SIZE + pos % PAGE_SIZE
        k_low, k_high, k_factor = _read(
            k_pages_ptr, k_scale_ptr, row, stored, K_FORMAT, HEAD_DIM, K_GROUP, K_BLOCK, K_DOT
        )
        score = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        if K_FORMAT != MODEL:
            score = tl.dot(q_high, tl.trans(k_high), score, input_precision="ieee")
        score = score * q_factor[:, None]
        if K_FORMAT != MODEL:
            score = score * k_factor[None, :]
        if HAS_SOFTCAP:
            # tanh of the size, so that neither power overflows.
            decay = tl.exp2(tl.abs(score) * (-2.0 * _LOG2E / softcap))
            capped = softcap * (1.0 - decay) / (1.0 + decay)
            # 1 - decay has no digits left of scores far below the cap: a series instead.
            part = score / softcap
            square = part * part
            series = square * (62.0 / 2835.0) - 17.0 / 315.0
            series = (series * square + 2.0 / 15.0) * square - 1.0 / 3.0
            near = tl.abs(score) * (series * square + 1.0)
            capped = tl.where(square < 0.0625, near, capped)
            score = tl.where(score < 0, -capped, capped)
        if HAS_SLOPES:
            score += slope[:, None] * (pos[None, :] - query_pos[:, None]).to(tl.float32)
        seen = stored[None, :] & (pos[None, :] <= query_pos[:, None])
        if HAS_WINDOW:
            seen = seen & (pos[None, :] > query_pos[:, None] - window)
        score = tl.where(seen, score * _LOG2E, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(score - m_safe[:, None])
        decay_m = tl.exp2(m - m_safe)
        l = l * decay_m + tl.sum(p, 1)
        m = m_new
        v_low, v_high, v_factor = _read(
            v_pages_ptr, v_scale_ptr, row, stored, V_FORMAT, V_HEAD_DIM, V_GROUP, V_BLOCK, V_DOT
        )
        if V_FORMAT == MODEL:
            acc = tl.dot(p.to(V_DOT), v_low, acc * decay_m[:, None], input_precision="ieee")
        else:
            unit, inverse = _power_of_two(tl.max(v_factor, 0))
            weight = (p * (v_factor * inverse)[None, :]).to(V_DOT)
            acc = acc * decay_m[:, None] + tl.dot(weight, v_low, input_precision="ieee") * unit
            part = tl.dot(weight, v_high, input_precision="ieee") * unit
            acc_high = acc_high * decay_m[:, None] + part
    return acc, acc_high, m, l


@triton.jit
def _find(cumulative_ptr, num, tile, BLOCK_Q: tl.constexpr):
    """Which of ``num`` runs of rows a tile of BLOCK_Q rows belongs to, and its first row there.

    Run i owns the tiles from ``cumulative[i] // BLOCK_Q + i`` on: as many as it needs or more.
    """
    low, high = tile * 0, num  # tile * 0: of one type with what the loop makes of it
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cumulative_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    first_tile = tl.load(cumulative_ptr + low) // BLOCK_Q + low
    return low, (tile - first_tile) * BLOCK_Q


@triton.jit(do_not_specialize=["num_runs", "num_splits", "stride_table", "window"])
def split_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM], rotated if K is
    out_ptr,  # [num_parts, num_q_heads, V_HEAD_DIM] float32: of each part, normalized
    lse_ptr,  # [num_parts, num_q_heads] float32; -inf for a part without tokens
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,  # [num_runs, max_pages] int32; SHARED: from each run's start on
    starts_ptr,  # [num_runs] int32: first token of each run, read if HAS_STARTS
    ends_ptr,  # [num_runs] int32: the token after its last
    cu_queries_ptr,  # [num_runs + 1] int32
    query_rows_ptr,  # SHARED: [cu_queries[-1]] int32, rows of q
    query_pos_ptr,  # SHARED: [num_tokens] int32, position of each row of q
    slopes_ptr,  # [num_q_heads] float32, read if HAS_SLOPES
    num_runs,
    num_kv_heads,
    num_splits,
    stride_table,
    stride_q_token,
    stride_q_head,
    softmax_scale,
    window,
    softcap,
    SHARED: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # query heads a KV head
    PAGE_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HEADS: tl.constexpr,  # query heads in a tile, at most GROUP_SIZE
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (tiles, KV heads x blocks of HEADS, splits): partial results of single queries.

    Not SHARED (decode): tile i is sequence i with the one query row ``cu_queries[i]``; sequences
    with more or fewer new tokens are passed over. Part: ``i * num_splits + split``.
    SHARED: a tile holds BLOCK_M // HEADS queries of one run. Part: ``pair * num_splits + split``,
    where pair counts ``query_rows``. Splits lie at multiples of SPLIT from position 0.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS if SHARED else 1
    NUM_BLOCKS: tl.constexpr = (GROUP_SIZE + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // NUM_BLOCKS
    offs_m = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % NUM_BLOCKS * HEADS + offs_m % HEADS
    q_head = kv_head * GROUP_SIZE + in_group
    mask_m = (in_group < GROUP_SIZE) & (offs_m < BLOCK_Q * HEADS)
    if SHARED:
        run, local = _find(cu_queries_ptr, num_runs, tl.program_id(0), BLOCK_Q)
        first_pair = tl.load(cu_queries_ptr + run)
        pair = first_pair + local + offs_m // HEADS
        mask_m = mask_m & (pair < tl.load(cu_queries_ptr + run + 1))
        if first_pair + local >= tl.load(cu_queries_ptr + run + 1):
            return
        query = tl.load(query_rows_ptr + pair, mask=mask_m, other=0)
        query_pos = tl.load(query_pos_ptr + query, mask=mask_m, other=-1)
    else:
        run = tl.program_id(0)
        begin = tl.load(cu_queries_ptr + run)
        if tl.load(cu_queries_ptr + run + 1) - begin != 1:
            return
        pair = run + offs_m * 0
        query = begin + offs_m * 0
        query_pos = tl.load(ends_ptr + run) - 1 + offs_m * 0
    begin, end = 0, tl.load(ends_ptr + run)
    if HAS_STARTS:
        begin = tl.load(starts_ptr + run)
    split = begin // SPLIT + tl.program_id(2)
    first, last = tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT)
    if HAS_WINDOW:
        far = tl.min(tl.where(mask_m, query_pos, 0x7FFFFFFF), 0)
        first = tl.maximum(first, far - window + 1)
    num_q_heads = num_kv_heads * GROUP_SIZE
    part = (pair.to(tl.int64) * num_splits + tl.program_id(2)) * num_q_heads + q_head
    if first >= last:
        tl.store(lse_ptr + part, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=mask_m)
        return
    start = query.to(tl.int64) * stride_q_token + q_head.to(tl.int64) * stride_q_head
    q_low, q_high, q_factor = _read_queries(
        q_ptr, start, mask_m, K_FORMAT, HEAD_DIM, K_BLOCK, K_DOT
    )
    slope = q_factor
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + q_head, mask=mask_m, other=0.0)
    table = table_ptr + run.to(tl.int64) * stride_table
    if SHARED:
        table -= begin // PAGE_SIZE
    acc, acc_high, m, l = _attend(
        q_low, q_high, q_factor * softmax_scale, tl.where(mask_m, query_pos, -1), slope,
        table, first, last, kv_head, num_kv_heads,
        k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr, window, softcap,
        PAGE_SIZE, K_FORMAT, V_FORMAT, HEAD_DIM, V_HEAD_DIM, K_GROUP, V_GROUP, K_BLOCK, V_BLOCK,
        K_DOT, V_DOT, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    # A row that saw nothing has l = 0 and lse = -inf; a query that is not finite has NaN.
    l_safe = tl.where(l == 0, 1.0, l)
    lse = tl.where(l == 0, float("-inf"), (m + tl.log2(l_safe)) * _LN2)
    tl.store(lse_ptr + part, lse, mask=mask_m)
    _store_rows(
        out_ptr, part * V_HEAD_DIM, mask_m, acc / l_safe[:, None], acc_high / l_safe[:, None],
        V_FORMAT, V_HEAD_DIM, V_BLOCK,
    )  # fmt: skip


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
        seq, local = _find(cu_seqlens_q_ptr, num_seqs, tile, BLOCK_Q)
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
    total = tl.exp2((sink - m) * _LOG2E)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    # One part after another: those without tokens add zeros, however many there are.
    for column in range(num_columns):
        part = row.to(tl.int64) * num_columns + column
        if HAS_TABLE:
            part = tl.load(table_ptr + part).to(tl.int64)
        place = part * num_q_heads + q_head
        mask = mask_h & (place >= 0)
        lse = tl.load(parts_lse_ptr + place, mask=mask, other=float("-inf"))
        weight = tl.exp2((lse - m) * _LOG2E)
        mask_d = (mask & (lse != float("-inf")))[:, None] & (offs_d < HEAD_DIM)[None, :]
        place_d = parts_out_ptr + place[:, None] * HEAD_DIM + offs_d[None, :]
        acc += weight[:, None] * tl.load(place_d, mask=mask_d, other=0.0)
        total += weight
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    if ROTATE > 0:
        acc = _rotate(acc, BLOCK_H, BLOCK_D, ROTATE)
    place = (out_row.to(tl.int64) * num_q_heads + q_head) * HEAD_DIM
    mask_d = mask_h[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(
        out_ptr + place[:, None] + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask_d
    )


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "first_tile", "stride_table", "window"])
def extend_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM], rotated if K is
    out_ptr,  # [num_tokens, num_q_heads, V_HEAD_DIM], rotated if V is; PARTS: see below, float32
    lse_ptr,  # PARTS: [tiles * BLOCK_Q, num_splits, num_q_heads] float32; -inf: saw no tokens
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,  # [num_seqs, max_pages] int32
    seq_lens_ptr,  # [num_seqs] int32
    cu_seqlens_q_ptr,  # [num_seqs + 1] int32
    slopes_ptr,  # [num_q_heads] float32, read if HAS_SLOPES
    sinks_ptr,  # [num_q_heads] float32, read if HAS_SINKS
    num_seqs,
    num_kv_heads,
    num_splits,
    first_tile,
    stride_table,
    stride_q_token,
    stride_q_head,
    softmax_scale,
    window,
    softcap,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (tiles from ``first_tile`` on, KV heads x blocks of HEADS, splits).

    A tile is BLOCK_Q = BLOCK_M // HEADS tokens of a sequence; sequences with one new token are
    left to `split_kernel`. PARTS: a program reads one split of SPLIT tokens and leaves a partial
    result for `merge_kernel`, [tiles * BLOCK_Q, num_splits, num_q_heads, V_HEAD_DIM]; splits lie
    at multiples of SPLIT from position 0, a tile's first is that of the first token it sees. Else
    it reads all tokens and gives, in every bit, what merging one part would.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    NUM_BLOCKS: tl.constexpr = (GROUP_SIZE + HEADS - 1) // HEADS
    seq, local = _find(cu_seqlens_q_ptr, num_seqs, first_tile + tl.program_id(0), BLOCK_Q)
    begin = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    if (local >= query_len) | (query_len == 1):
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    kv_head = tl.program_id(1) // NUM_BLOCKS
    offs_m = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % NUM_BLOCKS * HEADS + offs_m % HEADS
    q_head = kv_head * GROUP_SIZE + in_group
    in_seq = local + offs_m // HEADS
    mask_m = (in_group < GROUP_SIZE) & (offs_m < BLOCK_Q * HEADS) & (in_seq < query_len)
    past = seq_len - query_len
    last = past + tl.minimum(local + BLOCK_Q, query_len)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(past + local - window + 1, 0)
    num_q_heads = num_kv_heads * GROUP_SIZE
    if PARTS:
        # Partial results are few enough for int32, which leaves registers to the loop.
        token = tl.program_id(0) * BLOCK_Q + offs_m // HEADS
        part = (token * num_splits + tl.program_id(2)) * num_q_heads + q_head
        split = first // SPLIT + tl.program_id(2)
        first, last = tl.maximum(first, split * SPLIT), tl.minimum(last, (split + 1) * SPLIT)
        if first >= last:
            tl.store(lse_ptr + part, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=mask_m)
            return
    query = (begin + in_seq).to(tl.int64)
    start = query * stride_q_token + q_head.to(tl.int64) * stride_q_head
    q_low, q_high, q_factor = _read_queries(
        q_ptr, start, mask_m, K_FORMAT, HEAD_DIM, K_BLOCK, K_DOT
    )
    slope = q_factor
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + q_head, mask=mask_m, other=0.0)
    acc, acc_high, m, l = _attend(
        q_low, q_high, q_factor * softmax_scale, tl.where(mask_m, past + in_seq, -1), slope,
        table_ptr + seq.to(tl.int64) * stride_table, first, last, kv_head, num_kv_heads,
        k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr, window, softcap,
        PAGE_SIZE, K_FORMAT, V_FORMAT, HEAD_DIM, V_HEAD_DIM, K_GROUP, V_GROUP, K_BLOCK, V_BLOCK,
        K_DOT, V_DOT, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    l_safe = tl.where(l == 0, 1.0, l)
    lse = tl.where(l == 0, float("-inf"), (m + tl.log2(l_safe)) * _LN2)
    acc, acc_high = acc / l_safe[:, None], acc_high / l_safe[:, None]
    if PARTS:
        tl.store(lse_ptr + part, lse, mask=mask_m)
        place = part * V_HEAD_DIM
    else:
        place = (query * num_q_heads + q_head) * V_HEAD_DIM
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + q_head, mask=mask_m, other=float("-inf"))
            top = tl.maximum(sink, lse)
            top = tl.where(top == float("-inf"), 0.0, top)
            weight = tl.exp2((lse - top) * _LOG2E)
            total = tl.exp2((sink - top) * _LOG2E) + weight
            total = tl.where(total == 0, 1.0, total)
            acc = acc * weight[:, None] / total[:, None]
            acc_high = acc_high * weight[:, None] / total[:, None]
    _store_rows(out_ptr, place, mask_m, acc, acc_high, V_FORMAT, V_HEAD_DIM, V_BLOCK)


# ---------------------------------------------------------------- copying


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
