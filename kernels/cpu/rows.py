"""Stored rows of K and V: read, rotated, dequantized, in the order of `formats`."""

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
    FP8_E5M2,
    INT4,
    INT8,
    RowFormat,
    int4_group_size,
)
from radixkv_kernels.cpu.simd import LANES


def _by_group(b: Any, first: int, count: int, group_size: int, values: Callable[[int], Any]) -> Any:
    """The vector whose lane i is ``values(group of element first + i)``."""
    groups = [min(first + i, first + count - 1) // group_size for i in range(LANES)]
    out = simd.splat(b, values(groups[0]))
    for group in sorted(set(groups[1:]) - {groups[0]}):
        lanes = ir.Constant(ir.VectorType(simd.I1, LANES), [int(g >= group) for g in groups])
        out = b.select(lanes, simd.splat(b, values(group)), out)
    return out


def read_codes(
    b: Any, form: RowFormat, pointer: Any, scales: Any, index: int
) -> list[tuple[int, Any]]:
    """Load the codes of one vector (int4: two) of a row as floats, padded lanes zero.

    int8, fp8 and fp8_e5m2 are not yet multiplied by the row's scale (fp8: by its
    `RowFormat.factor` neither);
    int4 is (``scales``: pointer to the row's float32 scales).
    """
    fmt, head_dim = form.fmt, form.head_dim
    if fmt == INT4:
        first, count = simd.pieces(head_dim // 2)[index]
        codes = simd.load(b, pointer, first, ir.VectorType(simd.I8, count))
        wide = b.zext(simd.widen(b, codes), simd.VI)
        size, out = int4_group_size(head_dim), []
        for part, bits in (
            (0, b.and_(wide, simd.constant(15, simd.VI))),
            (1, b.lshr(wide, simd.constant(4, simd.VI))),
        ):
            start = first + part * (head_dim // 2)
            scale = _by_group(
                b, start, count, size, lambda g: simd.load(b, scales, 4 * g, simd.F32)
            )
            real = b.fmul(b.sitofp(b.sub(bits, simd.constant(8, simd.VI)), simd.VF), scale)
            if count < LANES:
                lanes = ir.Constant(
                    ir.VectorType(simd.I1, LANES), [int(i < count) for i in range(LANES)]
                )
                real = b.select(lanes, real, simd.constant(0.0))
            out.append((2 * index + part, real))
        return out
    first, count = simd.pieces(head_dim)[index]
    if fmt == FLOAT32:
        return [(index, simd.load_floats(b, pointer, 4 * first, count))]
    if fmt in (FLOAT16, BFLOAT16):
        codes = simd.widen(b, simd.load(b, pointer, 2 * first, ir.VectorType(simd.I16, count)))
        if fmt == FLOAT16:
            return [(index, b.fpext(b.bitcast(codes, ir.VectorType(simd.F16, LANES)), simd.VF))]
        return [
            (index, b.bitcast(b.shl(b.zext(codes, simd.VI), simd.constant(16, simd.VI)), simd.VF))
        ]
    codes = simd.widen(b, simd.load(b, pointer, first, ir.VectorType(simd.I8, count)))
    if fmt == INT8:
        return [(index, b.sitofp(b.sext(codes, simd.VI), simd.VF))]
    # An 8-bit float becomes a float16 by a shift (e4m3 as value * 2^-8: see
    # `RowFormat.factor`), which
    # the hardware widens, subnormals too.
    kind = ir.VectorType(simd.I16, LANES)
    if fmt == FP8_E5M2:
        half = b.shl(b.zext(codes, kind), simd.constant(8, kind))
    else:
        half = b.and_(
            b.shl(b.sext(codes, kind), simd.constant(7, kind)), simd.constant(-16385, kind)
        )
    return [(index, b.fpext(b.bitcast(half, ir.VectorType(simd.F16, LANES)), simd.VF))]


def rotate_vectors(b: Any, vectors: list[Any], head_dim: int) -> list[Any]:
    """Multiply a row by attention.formats.hadamard(head_dim), as butterflies in registers."""
    size = head_dim & -head_dim
    stride = 1
    while stride < min(size, LANES):
        turned = [lane ^ stride for lane in range(LANES)]
        signs = ir.Constant(simd.VF, [-1.0 if lane & stride else 1.0 for lane in range(LANES)])
        vectors = [simd.fma(b, v, signs, simd.shuffle(b, v, v, turned)) for v in vectors]
        stride *= 2
    while stride < size:
        step, turned_vectors = stride // LANES, list(vectors)
        for i in range(len(vectors)):
            if not i & step:
                turned_vectors[i] = b.fadd(vectors[i], vectors[i + step])
                turned_vectors[i + step] = b.fsub(vectors[i], vectors[i + step])
        vectors, stride = turned_vectors, stride * 2
    return [b.fmul(v, simd.constant(size**-0.5)) for v in vectors]


@intrinsic(prefer_literal=True)
def load_query(typingctx: Any, head_dim: Any, source: Any, target: Any, scale: Any, rotate: Any):
    """target[:] = source[:] * scale, rotated if asked; float32, target padded with zeros."""
    dim = simd.literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = simd.pointer(b, args[1]), simd.pointer(b, args[2])
        scale = simd.splat(b, args[3])
        plain = [
            b.fmul(simd.load_floats(b, source, 4 * first, n), scale)
            for first, n in simd.pieces(dim)
        ]
        with b.if_else(b.icmp_signed("!=", args[4], ir.Constant(simd.I64, 0))) as (then, otherwise):
            with then:
                for i, vector in enumerate(rotate_vectors(b, plain, dim)):
                    simd.store(b, vector, target, 4 * LANES * i)
            with otherwise:
                for i, vector in enumerate(plain):
                    simd.store(b, vector, target, 4 * LANES * i)
        return context.get_dummy_value()

    return types.void(head_dim, types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic(prefer_literal=True)
def store_row(typingctx: Any, head_dim: Any, source: Any, target: Any, scale: Any, rotate: Any):
    """target[:head_dim] = source[:] * scale, rotated if asked; source is padded with zeros."""
    dim = simd.literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = simd.pointer(b, args[1]), simd.pointer(b, args[2])
        scale = simd.splat(b, args[3])
        plain = [
            b.fmul(simd.load_floats(b, source, 4 * first, n), scale)
            for first, n in simd.pieces(dim)
        ]
        with b.if_else(b.icmp_signed("!=", args[4], ir.Constant(simd.I64, 0))) as (then, otherwise):
            with then:
                rows = rotate_vectors(b, plain, dim)
                for (first, n), vector in zip(simd.pieces(dim), rows, strict=True):
                    simd.store(b, simd.narrow(b, vector, n), target, 4 * first)
            with otherwise:
                for (first, n), vector in zip(simd.pieces(dim), plain, strict=True):
                    simd.store(b, simd.narrow(b, vector, n), target, 4 * first)
        return context.get_dummy_value()

    return types.void(head_dim, types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic(prefer_literal=True)
def to_read_order(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """Copy a float32 row from its natural order to that of `RowFormat.spans`, padded with zeros."""
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = simd.pointer(b, args[2]), simd.pointer(b, args[3])
        for i, (first, count) in enumerate(form.spans):
            simd.store(b, simd.load_floats(b, source, 4 * first, count), target, 4 * LANES * i)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def to_natural_order(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """The inverse of `to_read_order`; writes head_dim floats."""
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = simd.pointer(b, args[2]), simd.pointer(b, args[3])
        for i, (first, count) in enumerate(form.spans):
            vector = simd.load_floats(b, source, 4 * LANES * i)
            simd.store(b, simd.narrow(b, vector, count), target, 4 * first)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def dequantize_row(typingctx: Any, fmt: Any, head_dim: Any, row: Any, scales: Any, target: Any):
    """target[:] = the real values of one stored row, natural order; scales: its float32 ones."""
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        row, scales, target = (simd.pointer(b, a) for a in args[2:])
        factor = (
            None if f in (INT4, FLOAT32, FLOAT16, BFLOAT16) else simd.load(b, scales, 0, simd.F32)
        )
        spans = form.spans
        for step in range(form.num_reads):
            for v, value in read_codes(b, form, row, scales, step):
                real = value if factor is None else b.fmul(value, simd.splat(b, factor))
                first, count = spans[v]
                simd.store(b, simd.narrow(b, real, count), target, 4 * first)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64, types.int64), codegen


@intrinsic
def widen_scales(typingctx: Any, source: Any, target: Any, num: Any, factor: Any):
    """target[:num] (float32) = source[:num] (bfloat16) * factor."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target, num, factor = args
        source, target = simd.pointer(b, source), simd.pointer(b, target)
        whole = b.sdiv(num, ir.Constant(simd.I64, LANES))
        wide = simd.splat(b, factor)
        with cgutils.for_range(b, whole) as loop:
            place = b.mul(loop.index, ir.Constant(simd.I64, 2 * LANES))
            codes = b.zext(simd.load(b, source, place, ir.VectorType(simd.I16, LANES)), simd.VI)
            real = b.bitcast(b.shl(codes, simd.constant(16, simd.VI)), simd.VF)
            simd.store(b, b.fmul(real, wide), target, b.mul(place, ir.Constant(simd.I64, 2)))
        start = b.mul(whole, ir.Constant(simd.I64, LANES))
        with cgutils.for_range(b, b.sub(num, start)) as loop:
            place = b.mul(b.add(start, loop.index), ir.Constant(simd.I64, 2))
            code = b.zext(simd.load(b, source, place, simd.I16), simd.I32)
            real = b.bitcast(b.shl(code, ir.Constant(simd.I32, 16)), simd.F32)
            simd.store(b, b.fmul(real, factor), target, b.mul(place, ir.Constant(simd.I64, 2)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), codegen
