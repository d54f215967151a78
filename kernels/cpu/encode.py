"""New rows of K and V: checked, centered, rotated, quantized into their slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.formats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FORMATS,
    FP8,
    INT4,
    INT4_GROUP,
    INT4_SEARCH,
    INT8,
    MIN_SCALE,
    int4_group_size,
)
from radixkv_kernels.cpu.rows import rotate_vectors
from radixkv_kernels.cpu.simd import LANES


@intrinsic(prefer_literal=True)
def count_non_finite(
    typingctx: Any,
    head_dim: Any,
    centered: Any,
    row: Any,
    row_bytes: Any,
    center: Any,
    center_bytes: Any,
    num_rows: Any,
    factor: Any,
):
    """1 if any element of ``num_rows`` float32 rows (less a center each) is NaN or Inf, else 0.

    Once it is multiplied with ``factor``, float32: a power of two, so that one overflows exactly
    if it is too large.
    """
    dim, is_centered = simd.literal(head_dim), simd.literal(centered)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        # x - x is 0 for finite x, NaN for NaN and Inf; lanes are folded once, at the end.
        sums = [cgutils.alloca_once_value(b, simd.constant(0.0)) for _ in range(2)]
        with cgutils.for_range(b, args[6]) as loop:
            row = simd.pointer(b, b.add(args[2], b.mul(loop.index, args[3])))
            center = simd.pointer(b, b.add(args[4], b.mul(loop.index, args[5])))
            for i, x in enumerate(_load_centered(b, dim, row, center if is_centered else None)):
                place = sums[i % 2]
                x = b.fmul(x, simd.splat(b, args[7], x.type.count))
                b.store(b.fadd(b.load(place), b.fsub(x, x)), place)
        zeros = simd.fold(b, b.fadd(*(b.load(place) for place in sums)), simd.add)
        return b.zext(b.fcmp_unordered("uno", zeros, ir.Constant(simd.F32, 0.0)), simd.I64)

    return types.int64(head_dim, centered, *[types.int64] * 5, types.float32), codegen


def _load_centered(b: Any, dim: int, row: Any, center: Any) -> list[Any]:
    """The vectors of a float32 row, less those of its center if there is one."""
    vectors = [simd.load_floats(b, row, 4 * first, count) for first, count in simd.pieces(dim)]
    if center is None:
        return vectors
    middle = [simd.load_floats(b, center, 4 * first, count) for first, count in simd.pieces(dim)]
    return [b.fsub(x, y) for x, y in zip(vectors, middle, strict=True)]


def _encode_fp8(b: Any, fmt: int, x: Any) -> Any:
    """float32 (clamped to the format's range) to 8-bit floats, half to even."""
    bias, mantissa = (7, 3) if fmt == FP8 else (15, 2)
    bits = b.bitcast(x, simd.VI)
    sign = b.and_(bits, simd.constant(-(2**31), simd.VI))
    size = b.xor(bits, sign)
    # Adding a power of two whose last place is the smallest subnormal rounds to it.
    magic = (127 - bias + 23 - mantissa + 1) << 23
    tiny = b.fadd(b.bitcast(size, simd.VF), b.bitcast(simd.constant(magic, simd.VI), simd.VF))
    tiny = b.sub(b.bitcast(tiny, simd.VI), simd.constant(magic, simd.VI))
    cut = 23 - mantissa
    odd = b.and_(b.lshr(size, simd.constant(cut, simd.VI)), simd.constant(1, simd.VI))
    shift = ((bias - 127) << 23) + (1 << (cut - 1)) - 1
    normal = b.lshr(
        b.add(b.add(size, simd.constant(shift, simd.VI)), odd), simd.constant(cut, simd.VI)
    )
    small = b.icmp_unsigned("<", size, simd.constant((127 - bias + 1) << 23, simd.VI))
    code = b.select(small, tiny, normal)
    return b.trunc(
        b.or_(code, b.lshr(sign, simd.constant(24, simd.VI))), ir.VectorType(simd.I8, LANES)
    )


def _scalar_bf16(b: Any, value: Any) -> tuple[Any, Any]:
    """A float rounded to bfloat16: its bits (i16) and its value (float)."""
    bits = simd.round_to_bf16(b, b.bitcast(value, simd.I32))
    return b.trunc(bits, simd.I16), b.bitcast(b.shl(bits, ir.Constant(simd.I32, 16)), simd.F32)


def _scale_of(b: Any, span: Any, largest: float) -> tuple[Any, Any]:
    scale = b.fdiv(span, ir.Constant(simd.F32, largest))
    least = ir.Constant(simd.F32, MIN_SCALE)
    return _scalar_bf16(b, b.select(b.fcmp_ordered(">", scale, least), scale, least))


@intrinsic(prefer_literal=True)
def encode_row(
    typingctx: Any,
    fmt: Any,
    head_dim: Any,
    centered: Any,
    source: Any,
    center: Any,
    rotate: Any,
    codes: Any,
    scales: Any,
):
    """Center and rotate (if asked) and quantize one finite float32 row into its slot."""
    f, dim, is_centered = simd.literal(fmt), simd.literal(head_dim), simd.literal(centered)

    def emit(b: Any, vectors: list[Any], codes: Any, scales: Any) -> None:
        pieces = simd.pieces(dim)
        if f == INT4:
            _encode_int4(b, dim, vectors, codes, scales)
            return
        if f in (FLOAT32, FLOAT16, BFLOAT16):
            for (first, count), x in zip(pieces, vectors, strict=True):
                if f == FLOAT16:
                    x = b.fptrunc(x, ir.VectorType(simd.F16, LANES))
                elif f == BFLOAT16:
                    x = simd.round_to_bf16(b, b.bitcast(x, simd.VI))
                    x = b.trunc(x, ir.VectorType(simd.I16, LANES))
                simd.store(b, simd.narrow(b, x, count), codes, first * FORMATS[f].bits // 8)
            return
        largest = FORMATS[f].largest
        amax = None
        for x in vectors:
            size = simd.call(b, "fabs", simd.VF, x)
            amax = size if amax is None else simd.maximum(b, size, amax)
        bits, scale = _scale_of(b, simd.fold(b, amax, simd.maximum), largest)
        simd.store(b, bits, scales, 0)
        divisor = simd.splat(b, scale)
        for (first, count), x in zip(pieces, vectors, strict=True):
            y = b.fdiv(x, divisor)
            if f == INT8:
                y = simd.call(b, "rint", simd.VF, y)
            y = simd.maximum(b, simd.minimum(b, y, simd.constant(largest)), simd.constant(-largest))
            if f == INT8:
                code = b.trunc(b.fptosi(y, simd.VI), ir.VectorType(simd.I8, LANES))
            else:
                code = _encode_fp8(b, f, y)
            simd.store(b, simd.narrow(b, code, count), codes, first)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, center, codes, scales = (simd.pointer(b, args[i]) for i in (3, 4, 6, 7))
        vectors = _load_centered(b, dim, source, center if is_centered else None)
        with b.if_else(b.icmp_signed("!=", args[5], ir.Constant(simd.I64, 0))) as (then, otherwise):
            with then:
                emit(b, rotate_vectors(b, vectors, dim), codes, scales)
            with otherwise:
                emit(b, vectors, codes, scales)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, centered, *[types.int64] * 5), codegen


def _encode_int4(b: Any, dim: int, vectors: list[Any], codes: Any, scales: Any) -> None:
    """Quantize a row of int4, its groups side by side; see radixkv.attention.formats.Int4Format."""
    size, half = int4_group_size(dim), dim // 2
    row = b.bitcast(
        cgutils.alloca_once(b, ir.ArrayType(simd.F32, dim + LANES)), simd.I8.as_pointer()
    )
    out = b.bitcast(
        cgutils.alloca_once(b, ir.ArrayType(simd.I8, dim + LANES)), simd.I8.as_pointer()
    )
    for (first, _), x in zip(simd.pieces(dim), vectors, strict=True):
        simd.store(b, x, row, 4 * first)
    for begin in range(0, dim // size, LANES):
        groups = range(begin, min(begin + LANES, dim // size))
        parts = [
            [simd.load_floats(b, row, 4 * (size * group + i), n) for i, n in simd.pieces(size)]
            for group in groups
        ]

        def of_all(
            vectors: list[list[Any]], combine: Callable[[Any, Any, Any], Any]
        ) -> Any:  # lane n: of the n-th group
            return simd.fold_each(b, [_combine_halves(b, v, combine) for v in vectors], combine)

        def split(lanes: Any, count: int = len(parts)) -> list[Any]:
            return [simd.shuffle(b, lanes, lanes, [n] * LANES) for n in range(count)]

        def code(vector: Any, inverse: Any) -> Any:
            y = simd.call(b, "rint", simd.VF, b.fmul(vector, inverse))
            return simd.maximum(b, simd.minimum(b, y, simd.constant(7.0)), simd.constant(-8.0))

        top, low = of_all(parts, simd.maximum), of_all(parts, simd.minimum)
        amax = simd.maximum(b, top, b.fneg(low))
        above = b.fcmp_ordered(">=", top, amax)
        best = best_scale = best_inverse = None
        for share in INT4_SEARCH:
            scale = simd.maximum(
                b, b.fmul(amax, simd.constant(share / 7.5)), simd.constant(MIN_SCALE)
            )
            bits = simd.round_to_bf16(b, b.bitcast(scale, simd.VI))
            scale = b.bitcast(b.shl(bits, simd.constant(16, simd.VI)), simd.VF)
            scale = b.select(above, b.fneg(scale), scale)
            inverse = b.fdiv(simd.constant(1.0), scale)
            losses = []
            for vectors, step, turned in zip(parts, split(scale), split(inverse), strict=True):
                off = [b.fsub(x, b.fmul(code(x, turned), step)) for x in vectors]
                losses.append([b.fmul(x, x) for x in off])
            loss = of_all(losses, simd.add)
            if best is None:
                best, best_scale, best_inverse = loss, scale, inverse
            else:
                better = b.fcmp_ordered("<", loss, best)
                best = b.select(better, loss, best)
                best_scale = b.select(better, scale, best_scale)
                best_inverse = b.select(better, inverse, best_inverse)
        bits = b.lshr(b.bitcast(best_scale, simd.VI), simd.constant(16, simd.VI))
        bits = simd.narrow(b, b.trunc(bits, ir.VectorType(simd.I16, LANES)), len(parts))
        simd.store(b, bits, scales, 2 * begin)
        for group, vectors, inverse in zip(groups, parts, split(best_inverse), strict=True):
            for (i, n), x in zip(simd.pieces(size), vectors, strict=True):
                y = b.add(b.fptosi(code(x, inverse), simd.VI), simd.constant(8, simd.VI))
                y = simd.narrow(b, b.trunc(y, ir.VectorType(simd.I8, LANES)), n)
                simd.store(b, y, out, size * group + i)
    for first, count in simd.pieces(half):
        kind = ir.VectorType(simd.I8, count)
        low, high = simd.load(b, out, first, kind), simd.load(b, out, half + first, kind)
        simd.store(b, b.or_(low, b.shl(high, simd.constant(4, kind))), codes, first)


def _combine_halves(b: Any, vectors: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the vectors of an int4 group, the first half with the second, down to one.

    Missing ones (of a group below 32 elements) are zeros, as radixkv.attention.formats adds them.
    """
    vectors = vectors + [simd.constant(0.0)] * (INT4_GROUP // LANES - len(vectors))
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [combine(b, x, y) for x, y in zip(vectors[:half], vectors[half:], strict=True)]
    return vectors[0]
