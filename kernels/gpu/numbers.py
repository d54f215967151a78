"""Numbers on the GPU: formats, powers of two, rounding, the Hadamard rotation."""

from __future__ import annotations

import triton
import triton.language as tl

INT8: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(1)
FP8_E5M2: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)
MODEL: tl.constexpr = tl.constexpr(4)

MIN_SCALE: tl.constexpr = tl.constexpr(2.0**-100)  # as radixkv.attention.formats
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def power_of_two(x):
    """The power of two at or below each float32 of ``x`` (2^-100 to 2^126), and its inverse."""
    bits = tl.minimum(tl.maximum(x, MIN_SCALE), 2.0**126).to(tl.int32, bitcast=True)
    bits = bits & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def rounded(x):
    """Each |x| < 2^22 to the nearest integer, halves to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def as_scale(x):
    """Positive float32 to the nearest bfloat16, halves to even (the interpreter cuts off)."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr):
    """Rows times the Hadamard matrices of blocks of 2^LOG2 elements. [ROWS, BLOCK] float32."""
    SIZE: tl.constexpr = 2**LOG2
    for _ in tl.static_range(LOG2):
        # A butterfly of neighbours whose results go to the two halves: every bit of the index
        # is in the last place once, and after LOG2 turns all are where they were.
        a, b = tl.split(tl.reshape(x, (ROWS * BLOCK // SIZE, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, BLOCK))
    return x * (SIZE**-0.5)


@triton.jit
def sum_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, LOG2: tl.constexpr):
    """Sum of each row in `radixkv.attention.formats`' order: the halves, then theirs. [ROWS]."""
    for i in tl.static_range(LOG2):
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, WIDTH // 2 ** (i + 1))), (0, 2, 1)))
        x = a + b
    return tl.reshape(x, (ROWS,))
