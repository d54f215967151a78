"""float32 rows of whole vectors: fill, scale, cap, softmax, products, merge."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.simd import LANES

_TANH_TERMS = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835)  # of tanh(x) / x, in x * x
_TANH_NEAR = 0.25  # up to here they are all of a float32
TILE_M = 8 if simd.WIDE or LANES == 4 else 4  # rows of one register tile of a matrix product


@intrinsic
def largest_product(typingctx: Any, x: Any, y: Any, num_vectors: Any):
    """The largest of x[:] * y[:], or 0."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x, y = simd.pointer(b, args[0]), simd.pointer(b, args[1])
        best = cgutils.alloca_once_value(b, simd.constant(0.0))
        with simd.each(b, args[2]) as loop:
            at = b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES))
            product = b.fmul(simd.load(b, x, at, simd.VF), simd.load(b, y, at, simd.VF))
            b.store(simd.maximum(b, product, b.load(best)), best)
        return simd.fold(b, b.load(best), simd.maximum)

    return types.float32(*[types.int64] * 3), codegen


@intrinsic
def multiply_by(typingctx: Any, target: Any, source: Any, factor: Any, num_vectors: Any):
    """target[:] *= source[:] * factor."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, source, factor = (
            simd.pointer(b, args[0]),
            simd.pointer(b, args[1]),
            simd.splat(b, args[2]),
        )
        with simd.each(b, args[3]) as loop:
            at = b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES))
            factors = b.fmul(simd.load(b, source, at, simd.VF), factor)
            simd.store(b, b.fmul(simd.load(b, target, at, simd.VF), factors), target, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic
def scale_add(typingctx: Any, target: Any, old: Any, source: Any, new: Any, num_vectors: Any):
    """target[:] = target[:] * old + source[:] * new."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, source = simd.pointer(b, args[0]), simd.pointer(b, args[2])
        old, new = simd.splat(b, args[1]), simd.splat(b, args[3])
        with simd.each(b, args[4]) as loop:
            at = b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES))
            kept = b.fmul(simd.load(b, target, at, simd.VF), old)
            simd.store(b, simd.fma(b, simd.load(b, source, at, simd.VF), new, kept), target, at)
        return context.get_dummy_value()

    i64, f32 = types.int64, types.float32
    return types.void(i64, f32, i64, f32, i64), codegen


@intrinsic
def fill(typingctx: Any, target: Any, value: Any, num_vectors: Any):
    """target[:] = value."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, value = simd.pointer(b, args[0]), simd.splat(b, args[1])
        with simd.each(b, args[2]) as loop:
            simd.store(b, value, target, b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES)))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@intrinsic
def cap_scores(typingctx: Any, target: Any, cap: Any, num_vectors: Any):
    """target[:] = cap * tanh(target[:] / cap)."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, cap = simd.pointer(b, args[0]), simd.splat(b, args[1])
        twice = b.fdiv(simd.constant(-2.0), cap)
        with simd.each(b, args[2]) as loop:
            at = b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES))
            x = simd.load(b, target, at, simd.VF)
            e = simd.exp(b, b.fmul(simd.call(b, "fabs", simd.VF, x), twice))
            tanh = b.fdiv(b.fsub(simd.constant(1.0), e), b.fadd(simd.constant(1.0), e))
            size = b.fmul(tanh, cap)
            signed = b.select(b.fcmp_ordered("<", x, simd.constant(0.0)), b.fneg(size), size)
            # 1 - e has no digits left of scores far below the cap: a series instead.
            part = b.fdiv(x, cap)
            square = b.fmul(part, part)
            series = simd.constant(_TANH_TERMS[-1])
            for term in _TANH_TERMS[-2::-1]:
                series = b.fadd(b.fmul(series, square), simd.constant(term))
            near = b.fcmp_ordered("<", square, simd.constant(_TANH_NEAR**2))
            simd.store(b, b.select(near, b.fmul(x, series), signed), target, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@intrinsic
def find_largest(typingctx: Any, source: Any, num_vectors: Any):
    """The maximum over source[:]."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source = simd.pointer(b, args[0])
        best = cgutils.alloca_once_value(b, simd.constant(-simd.INF))
        with simd.each(b, args[1]) as loop:
            x = simd.load(b, source, b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES)), simd.VF)
            b.store(simd.maximum(b, x, b.load(best)), best)
        return simd.fold(b, b.load(best), simd.maximum)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def exponentiate(typingctx: Any, target: Any, largest: Any, num_vectors: Any):
    """target[:] = exp(target[:] - largest); their sum."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, total = simd.pointer(b, args[0]), cgutils.alloca_once_value(b, simd.constant(0.0))

        def weigh(at: Any, width: int) -> None:
            for p in simd.exponentials(b, target, at, width, args[1]):
                b.store(b.fadd(b.load(total), p), total)

        simd.each_two(b, args[2], weigh)
        return simd.fold(b, b.load(total), simd.add)

    return types.float32(types.int64, types.float32, types.int64), codegen


@intrinsic
def softmax_tile(
    typingctx: Any,
    scores: Any,
    row_bytes: Any,
    num_keys: Any,
    key_pos: Any,
    query_pos: Any,
    window: Any,
    stats: Any,
    stats_bytes: Any,
):
    """Online softmax of LANES queries over a tile of keys; scores [num_keys, queries] in place.

    query_pos: int32 [LANES]. stats: float32 rows m, l, alpha; m and l are updated, alpha is the
    factor on what was summed before.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        scores, row_bytes, num_keys, key_pos, query_pos, window, stats, stats_bytes = args
        scores, stats = simd.pointer(b, scores), simd.pointer(b, stats)
        last = simd.load(b, simd.pointer(b, query_pos), 0, simd.VI)
        first = b.sub(last, simd.splat(b, b.trunc(window, simd.I32)))
        best = cgutils.alloca_once_value(b, simd.constant(-simd.INF))
        with cgutils.for_range(b, num_keys) as loop:
            at = b.mul(loop.index, row_bytes)
            here = simd.splat(b, b.trunc(b.add(key_pos, loop.index), simd.I32))
            seen = b.and_(b.icmp_signed("<=", here, last), b.icmp_signed(">", here, first))
            s = b.select(seen, simd.load(b, scores, at, simd.VF), simd.constant(-simd.INF))
            simd.store(b, s, scores, at)
            b.store(simd.maximum(b, s, b.load(best)), best)
        m_old = simd.load(b, stats, 0, simd.VF)
        m = simd.maximum(b, m_old, b.load(best))
        safe = b.select(b.fcmp_ordered("==", m, simd.constant(-simd.INF)), simd.constant(0.0), m)
        total = cgutils.alloca_once_value(b, simd.constant(0.0))
        with cgutils.for_range(b, num_keys) as loop:
            at = b.mul(loop.index, row_bytes)
            p = simd.exp(b, b.fsub(simd.load(b, scores, at, simd.VF), safe))
            simd.store(b, p, scores, at)
            b.store(b.fadd(b.load(total), p), total)
        alpha = simd.exp(b, b.fsub(m_old, safe))
        simd.store(b, m, stats, 0)
        old = simd.load(b, stats, stats_bytes, simd.VF)
        simd.store(b, simd.fma(b, old, alpha, b.load(total)), stats, stats_bytes)
        simd.store(b, alpha, stats, b.mul(stats_bytes, ir.Constant(simd.I64, 2)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def multiply_matrices(
    typingctx: Any,
    accumulate: Any,
    num_m: Any,
    num_vectors: Any,
    num_k: Any,
    a: Any,
    a_m: Any,
    a_k: Any,
    b_rows: Any,
    b_k: Any,
    c: Any,
    c_m: Any,
):
    """c[m, n] (+)= sum over k of a[m, k] * b_rows[k, n], float32.

    num_m is a multiple of _TILE_M; n runs over num_vectors vectors. a_m, a_k, b_k and c_m are
    the strides in bytes. Each element is one chain of fused multiply-adds over k, so it does
    not depend on where it lies in the tile.
    """
    adds = bool(simd.literal(accumulate))

    def codegen(context: Any, bld: Any, sig: Any, args: Any) -> Any:
        num_m, num_vectors, num_k, a, a_m, a_k, b_rows, b_k, c, c_m = args[1:]
        blocks_m = bld.sdiv(num_m, ir.Constant(simd.I64, TILE_M))

        def tile(column: Any, width: int) -> None:
            offset = bld.mul(column, ir.Constant(simd.I64, 4 * LANES))
            b_base, c_base = bld.add(b_rows, offset), bld.add(c, offset)
            with cgutils.for_range(bld, blocks_m) as block:
                first = bld.mul(block.index, ir.Constant(simd.I64, TILE_M))
                a_rows, c_rows = [], []
                for i in range(TILE_M):
                    m = bld.add(first, ir.Constant(simd.I64, i))
                    a_rows.append(simd.pointer(bld, bld.add(a, bld.mul(m, a_m))))
                    c_rows.append(simd.pointer(bld, bld.add(c_base, bld.mul(m, c_m))))
                places = {
                    (i, n): cgutils.alloca_once(bld, simd.VF)
                    for i in range(TILE_M)
                    for n in range(width)
                }
                for (i, n), place in places.items():
                    old = (
                        simd.load(bld, c_rows[i], 4 * LANES * n, simd.VF)
                        if adds
                        else simd.constant(0.0)
                    )
                    bld.store(old, place)
                with cgutils.for_range(bld, num_k) as loop:
                    b_row = simd.pointer(bld, bld.add(b_base, bld.mul(loop.index, b_k)))
                    values = [simd.load(bld, b_row, 4 * LANES * n, simd.VF) for n in range(width)]
                    a_offset = bld.mul(loop.index, a_k)
                    for i in range(TILE_M):
                        factor = simd.splat(bld, simd.load(bld, a_rows[i], a_offset, simd.F32))
                        for n in range(width):
                            old = bld.load(places[i, n])
                            bld.store(simd.fma(bld, factor, values[n], old), places[i, n])
                for (i, n), place in places.items():
                    simd.store(bld, bld.load(place), c_rows[i], 4 * LANES * n)

        pairs = bld.sdiv(num_vectors, ir.Constant(simd.I64, 2))
        with cgutils.for_range(bld, pairs) as loop:
            tile(bld.mul(loop.index, ir.Constant(simd.I64, 2)), 2)
        done = bld.mul(pairs, ir.Constant(simd.I64, 2))
        with cgutils.for_range(bld, bld.sub(num_vectors, done)) as loop:
            tile(bld.add(done, loop.index), 1)
        return context.get_dummy_value()

    return types.void(accumulate, *[types.int64] * 10), codegen


@intrinsic
def weigh_scores(
    typingctx: Any, target: Any, largest: Any, factors: Any, num_vectors: Any, total: Any
):
    """`exponentiate`, and `largest_product` with ``factors``, in one pass.

    ``total`` is the address that gets the sum of the exponentials.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, factors = simd.pointer(b, args[0]), simd.pointer(b, args[2])
        total = cgutils.alloca_once_value(b, simd.constant(0.0))
        best = cgutils.alloca_once_value(b, simd.constant(-simd.INF))

        def weigh(at: Any, width: int) -> None:
            for i, p in enumerate(simd.exponentials(b, target, at, width, args[1])):
                b.store(b.fadd(b.load(total), p), total)
                place = b.add(at, ir.Constant(simd.I64, 4 * LANES * i))
                product = b.fmul(p, simd.load(b, factors, place, simd.VF))
                b.store(simd.maximum(b, product, b.load(best)), best)

        simd.each_two(b, args[3], weigh)
        simd.store(b, simd.fold(b, b.load(total), simd.add), simd.pointer(b, args[4]), 0)
        return simd.fold(b, b.load(best), simd.maximum)

    i64, f32 = types.int64, types.float32
    return types.float32(i64, f32, i64, i64, i64), codegen
