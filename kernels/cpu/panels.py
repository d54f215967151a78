"""Many query rows over one split, in integers.

Rows of K and V are unpacked once, into panels whose vectors hold what a product needs next, and
every row is a chain of `simd.multiply_pairs` over them. The sums are exact integers, hence those
of `score_pairs` and `add_pairs`, and what follows them is the same arithmetic: a row's bits do
not tell whether its split was shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.formats import INT4, INT8, RowFormat, int4_group_size, pair_pieces
from radixkv_kernels.cpu.pairs import as_words, load_bytes
from radixkv_kernels.cpu.plan import SPLIT
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import TILE_M

# Many query rows over one split: rows of K and V are unpacked once, into panels whose vectors hold
# what a product needs next, and every row is a chain of `multiply_pairs` over them. The sums are
# exact integers, hence those of `score_pairs` and `add_pairs`, and what follows them is the
# same arithmetic: a row's bits do not tell whether its split was shared.

PANEL = 2 * LANES  # keys (of K) or columns (of V) of a panel
HALF_M = TILE_M // 2  # rows come in tiles of _TILE_M, and a last one of half as many


@intrinsic(prefer_literal=True)
def pair_query(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """Copy a row of `quantize_query` into the order of `RowFormat.pair_groups`."""
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = (simd.pointer(b, a) for a in args[2:])
        half = dim // 2
        for i, (first, count, _) in enumerate(form.word_spans):
            words = simd.load(b, source, 4 * LANES * i, ir.VectorType(simd.I16, 2 * LANES))
            place = first + (half % 2 if f == INT4 and first >= half else 0)
            simd.store(b, simd.narrow(b, words, count), target, 2 * place)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def pack_keys(
    typingctx: Any, fmt: Any, head_dim: Any, rows: Any, num_blocks: Any, ahead: Any, target: Any
):
    """Unpack 8 * ``num_blocks`` rows into panels: int16 [panel, pair, key, 2].

    rows: int64 addresses, [8 * num_blocks + ahead]; those ``ahead`` further on are asked for.
    """
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        rows, num_blocks, ahead, target = args[2:]
        rows, target = simd.pointer(b, rows), simd.pointer(b, target)
        row_bytes, pairs = form.num_bytes, form.num_pairs
        words = ir.VectorType(simd.I16, 16)

        def emit(pointers: list[Any], offset: Any, count: int, place: Any) -> None:
            # Eight rows of eight pairs become eight pairs of eight rows, by three perfect shuffles.
            vectors = []
            for pointer in pointers:
                codes = simd.load(b, pointer, offset, ir.VectorType(simd.I8, count))
                if count < 16:
                    zeros = ir.Constant(codes.type, [0] * count)
                    codes = simd.shuffle(b, codes, zeros, [min(i, count) for i in range(16)])
                vectors.append(b.bitcast(codes, ir.VectorType(simd.I16, 8)))
            for _ in range(3):
                turned = []
                for x, y in zip(vectors[:4], vectors[4:], strict=True):
                    for begin in (0, 4):
                        lanes = [lane + 8 * s for lane in range(begin, begin + 4) for s in (0, 1)]
                        turned.append(simd.shuffle(b, x, y, lanes))
                vectors = turned
            for unit in range(-(-count // 2)):
                codes = b.bitcast(vectors[unit], ir.VectorType(simd.I8, 16))
                if f == INT8:
                    values = [b.sext(codes, words)]
                else:
                    wide = b.zext(codes, words)
                    values = [
                        b.and_(wide, simd.constant(15, words)),
                        b.lshr(wide, simd.constant(4, words)),
                    ]
                    values = [b.sub(value, simd.constant(8, words)) for value in values]
                for part, value in enumerate(values):
                    simd.store(b, value, place, 4 * PANEL * (unit + part * (pairs // 2)))

        with cgutils.for_range(b, num_blocks) as loop:
            first = b.mul(loop.index, ir.Constant(simd.I64, 8))
            panel = b.udiv(first, ir.Constant(simd.I64, PANEL))
            inside = b.urem(first, ir.Constant(simd.I64, PANEL))
            offset = b.add(
                b.mul(panel, ir.Constant(simd.I64, 4 * PANEL * pairs)),
                b.mul(inside, ir.Constant(simd.I64, 4)),
            )
            base = b.gep(target, [offset])
            pointers = []
            for i in range(8):
                number = b.add(first, ir.Constant(simd.I64, i))
                address = simd.load(b, rows, b.mul(number, ir.Constant(simd.I64, 8)), simd.I64)
                pointers.append(simd.pointer(b, address))
                later = b.mul(b.add(number, ahead), ir.Constant(simd.I64, 8))
                next_row = simd.pointer(b, simd.load(b, rows, later, simd.I64))
                for line in range(-(-row_bytes // 64)):
                    simd.prefetch(b, next_row, 64 * line)
            whole = row_bytes // 16
            with cgutils.for_range(b, ir.Constant(simd.I64, whole)) as chunk:
                at = b.mul(chunk.index, ir.Constant(simd.I64, 16))
                step = b.mul(chunk.index, ir.Constant(simd.I64, 32 * PANEL))
                emit(pointers, at, 16, b.gep(base, [step]))
            if row_bytes % 16:
                step = ir.Constant(simd.I64, 32 * PANEL * whole)
                emit(pointers, 16 * whole, row_bytes % 16, b.gep(base, [step]))
        return context.get_dummy_value()

    return types.void(fmt, head_dim, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def pack_values(
    typingctx: Any, fmt: Any, head_dim: Any, rows: Any, num_pairs: Any, ahead: Any, target: Any
):
    """Unpack 2 * ``num_pairs`` rows into panels: int16 [span, pair of rows, column, 2].

    rows: as in `pack_keys`.
    """
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        rows, num_pairs, ahead, target = args[2:]
        rows, target = simd.pointer(b, rows), simd.pointer(b, target)
        row_bytes, halves = form.num_bytes, 2 if f == INT4 else 1
        panel_bytes = 2 * SPLIT * PANEL
        with cgutils.for_range(b, num_pairs) as loop:
            pointers = []
            for i in range(2):
                number = b.add(
                    b.mul(loop.index, ir.Constant(simd.I64, 2)), ir.Constant(simd.I64, i)
                )
                address = simd.load(b, rows, b.mul(number, ir.Constant(simd.I64, 8)), simd.I64)
                pointers.append(simd.pointer(b, address))
                later = b.mul(b.add(number, ahead), ir.Constant(simd.I64, 8))
                next_row = simd.pointer(b, simd.load(b, rows, later, simd.I64))
                for line in range(-(-row_bytes // 64)):
                    simd.prefetch(b, next_row, 64 * line)
            place = b.gep(target, [b.mul(loop.index, ir.Constant(simd.I64, 4 * PANEL))])
            for n, (first, size) in enumerate(pair_pieces(row_bytes)):
                x, y = (load_bytes(b, pointer, first, size) for pointer in pointers)
                for part in range(2):
                    lanes = [LANES * part + i + s for i in range(LANES) for s in (0, 2 * LANES)]
                    for half, value in enumerate(as_words(b, f, simd.shuffle(b, x, y, lanes))):
                        value = b.sub(value, simd.constant(8, value.type)) if f == INT4 else value
                        offset = panel_bytes * (halves * n + half) + 4 * LANES * part
                        simd.store(b, value, place, offset)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, *[types.int64] * 4), codegen


def _tile_of_pairs(b: Any, num_rows: int, a: Any, a_bytes: int, panel: Any, steps: Any) -> Any:
    """Exact sums over ``steps`` pairs: int32, for each row a list of two vectors.

    a: int16 rows, ``a_bytes`` apart, of which a pair at a time is multiplied with a panel's step.
    """
    words = ir.VectorType(simd.I16, 2 * LANES)
    rows = [b.gep(a, [ir.Constant(simd.I64, i * a_bytes)]) for i in range(num_rows)]
    places = [[cgutils.alloca_once(b, simd.VI) for _ in range(2)] for _ in rows]
    for place in (place for row in places for place in row):
        b.store(simd.constant(0, simd.VI), place)
    with cgutils.for_range(b, steps) as loop:
        at = b.mul(loop.index, ir.Constant(simd.I64, 4 * PANEL))
        step = b.gep(panel, [at])
        values = [simd.load(b, step, 4 * LANES * n, words) for n in range(2)]
        offset = b.mul(loop.index, ir.Constant(simd.I64, 4))
        for row, mine in zip(rows, places, strict=True):
            pair = b.bitcast(simd.splat(b, simd.load(b, row, offset, simd.I32)), words)
            for value, place in zip(values, mine, strict=True):
                b.store(simd.multiply_pairs(b, b.load(place), pair, value), place)
    return [[b.load(place) for place in mine] for mine in places]


def _each_tile(b: Any, num_halves: Any, emit: Callable[[int, Any], None]) -> None:
    """Call ``emit(rows, first row)`` for tiles that cover ``num_halves`` half tiles of rows."""
    whole = b.udiv(num_halves, ir.Constant(simd.I64, 2))
    with cgutils.for_range(b, whole) as loop:
        emit(TILE_M, b.mul(loop.index, ir.Constant(simd.I64, TILE_M)))
    with b.if_then(b.icmp_signed("!=", b.and_(num_halves, ir.Constant(simd.I64, 1)), simd.ZERO)):
        emit(HALF_M, b.mul(whole, ir.Constant(simd.I64, TILE_M)))


@intrinsic(prefer_literal=True)
def score_panels(
    typingctx: Any,
    fmt: Any,
    head_dim: Any,
    q_bytes: Any,
    out_bytes: Any,
    q: Any,
    q_scales: Any,
    num_halves: Any,
    panels: Any,
    num_panels: Any,
    factors: Any,
    out: Any,
):
    """Dot products of query rows with the keys of ``num_panels`` panels, as floats.

    int8: times the key's factor and the row's scale. int4: the sums of the scale groups times
    their scales, as `score_pairs` adds them. ``factors``: a row of ``out_bytes`` for each group.
    """
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)
    q_line, out_line = simd.literal(q_bytes), simd.literal(out_bytes)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, q_scales, num_halves, panels, num_panels, factors, out = args[4:]
        groups = form.pair_groups
        panel_bytes = 4 * PANEL * form.num_pairs
        with cgutils.for_range(b, num_panels) as loop:
            panel = b.add(panels, b.mul(loop.index, ir.Constant(simd.I64, panel_bytes)))
            column = b.mul(loop.index, ir.Constant(simd.I64, 4 * PANEL))
            mine = simd.pointer(b, b.add(factors, column))

            def emit(num_rows: int, first: Any, panel: Any = panel, column: Any = column) -> None:
                rows = simd.pointer(b, b.add(q, b.mul(first, ir.Constant(simd.I64, q_line))))
                scales = simd.pointer(b, b.add(q_scales, b.mul(first, ir.Constant(simd.I64, 4))))
                line = b.mul(first, ir.Constant(simd.I64, out_line))
                target = simd.pointer(b, b.add(b.add(out, line), column))
                scores: dict[tuple[int, int], Any] = {}
                for n, (start, pairs) in enumerate(groups):
                    sums = _tile_of_pairs(
                        b,
                        num_rows,
                        b.gep(rows, [ir.Constant(simd.I64, 4 * start)]),
                        q_line,
                        b.gep(simd.pointer(b, panel), [ir.Constant(simd.I64, 4 * PANEL * start)]),
                        ir.Constant(simd.I64, pairs),
                    )
                    for i, row in enumerate(sums):
                        for v, total in enumerate(row):
                            factor = simd.load(b, mine, out_line * n + 4 * LANES * v, simd.VF)
                            if f == INT8:
                                factor = b.fmul(
                                    factor, simd.splat(b, simd.load(b, scales, 4 * i, simd.F32))
                                )
                            scores[i, v] = simd.add_scaled(
                                b, scores.get((i, v)), b.sitofp(total, simd.VF), factor
                            )
                for (i, v), score in scores.items():
                    simd.store(b, score, target, out_line * i + 4 * LANES * v)

            _each_tile(b, num_halves, emit)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, q_bytes, out_bytes, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def sum_panels(
    typingctx: Any,
    fmt: Any,
    head_dim: Any,
    weights_bytes: Any,
    weights: Any,
    num_halves: Any,
    panels: Any,
    num_pairs: Any,
    worth: Any,
    targets: Any,
):
    """Weighted sums of the panels' rows, finished as `finish_pairs` does it.

    weights: int16, a row for each query and scale group. targets: addresses of float32 rows.
    """
    f, dim, w_line = simd.literal(fmt), simd.literal(head_dim), simd.literal(weights_bytes)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        weights, num_halves, panels, num_pairs, worth, targets = args[3:]
        groups, halves = form.num_groups, 2 if f == INT4 else 1
        size = int4_group_size(dim) if f == INT4 else dim
        targets = simd.pointer(b, targets)

        def add_span(number: Any, first: Any, group: Any, count: int) -> None:
            panel = b.add(panels, b.mul(number, ir.Constant(simd.I64, 2 * SPLIT * PANEL)))

            def emit(num_rows: int, row: Any) -> None:
                line = b.add(b.mul(row, ir.Constant(simd.I64, groups)), group)
                sums = _tile_of_pairs(
                    b,
                    num_rows,
                    simd.pointer(b, b.add(weights, b.mul(line, ir.Constant(simd.I64, w_line)))),
                    w_line * groups,
                    simd.pointer(b, panel),
                    num_pairs,
                )
                place = b.mul(line, ir.Constant(simd.I64, 4))
                factors = simd.pointer(b, b.add(worth, place))
                for i, mine in enumerate(sums):
                    at = b.mul(b.add(row, ir.Constant(simd.I64, i)), ir.Constant(simd.I64, 8))
                    target = simd.pointer(b, simd.load(b, targets, at, simd.I64))
                    factor = simd.splat(b, simd.load(b, factors, 4 * groups * i, simd.F32))
                    for v, total in enumerate(mine):
                        length = min(LANES, count - v * LANES)
                        if length > 0:
                            whole = b.sitofp(total, simd.VF)
                            real = b.fmul(whole, factor)
                            begin = b.add(first, ir.Constant(simd.I64, v * LANES))
                            begin = b.mul(begin, ir.Constant(simd.I64, 4))
                            simd.store(b, simd.narrow(b, real, length), target, begin)

            _each_tile(b, num_halves, emit)

        row_bytes = form.num_bytes
        with cgutils.for_range(b, ir.Constant(simd.I64, halves * (row_bytes // PANEL))) as loop:
            piece = b.udiv(loop.index, ir.Constant(simd.I64, halves))
            part = b.urem(loop.index, ir.Constant(simd.I64, halves))
            first = b.add(
                b.mul(piece, ir.Constant(simd.I64, PANEL)),
                b.mul(part, ir.Constant(simd.I64, dim // 2)),
            )
            add_span(loop.index, first, b.udiv(first, ir.Constant(simd.I64, size)), PANEL)
        for n, (first, count, group) in enumerate(form.word_spans):
            if count < PANEL:
                add_span(*(ir.Constant(simd.I64, i) for i in (n, first, group)), count)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, weights_bytes, *[types.int64] * 6), codegen
