"""Scores and weighted sums over stored rows, in integers: pairs of int16 into int32."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.formats import INT4, INT8, MIN_SCALE, RowFormat, pair_pieces
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.walk import ask_share, each_block, keys_per_block, query_chunks, row_at


def as_words(b: Any, fmt: int, codes: Any) -> list[Any]:
    """2 * LANES stored bytes as int16 vectors: one, or for int4 its low and its high halves.

    int4 codes are as stored, 0 to 15, not yet less 8.
    """
    kind = ir.VectorType(simd.I16, 2 * LANES)
    if fmt == INT8:
        return [b.sext(codes, kind)]
    wide = b.zext(codes, kind)
    return [b.and_(wide, simd.constant(15, kind)), b.lshr(wide, simd.constant(4, kind))]


def load_bytes(b: Any, pointer: Any, offset: Any, count: int) -> Any:
    """2 * LANES bytes, of which ``count`` are loaded and the rest are 0."""
    codes = simd.load(b, pointer, offset, ir.VectorType(simd.I8, count))
    if count < 2 * LANES:
        zeros = ir.Constant(codes.type, [0] * count)
        codes = simd.shuffle(b, codes, zeros, [min(i, count) for i in range(2 * LANES)])
    return codes


@intrinsic(prefer_literal=True)
def quantize_query(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """Turn a float32 row into int16 in the order of `RowFormat.word_spans`; its scale.

    The largest element becomes 32767. A row with NaN or Inf has the scale NaN.
    """
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = (simd.pointer(b, a) for a in args[2:])
        amax, nothing = simd.constant(0.0), simd.constant(0.0)
        for first, count in simd.pieces(dim):
            x = simd.load_floats(b, source, 4 * first, count)
            amax = simd.maximum(b, simd.call(b, "fabs", simd.VF, x), amax)
            nothing = b.fadd(nothing, b.fsub(x, x))
        largest = b.fadd(simd.fold(b, amax, simd.maximum), simd.fold(b, nothing, simd.add))
        most = ir.Constant(simd.F32, 32767.0)
        tiny = b.fcmp_ordered("<", largest, ir.Constant(simd.F32, MIN_SCALE))
        factor = simd.splat(b, b.select(tiny, ir.Constant(simd.F32, 0.0), b.fdiv(most, largest)))
        scale = b.fdiv(largest, most)
        for i, (start, size, _) in enumerate(form.word_spans):
            for part in range(2):
                count = min(LANES, size - part * LANES)
                codes = ir.Constant(ir.VectorType(simd.I16, LANES), [0] * LANES)
                if count > 0:
                    x = simd.load_floats(b, source, 4 * (start + part * LANES), count)
                    rounded = simd.call(b, "rint", simd.VF, b.fmul(x, factor))
                    codes = b.trunc(b.fptosi(rounded, simd.VI), codes.type)
                simd.store(b, codes, target, 2 * LANES * (2 * i + part))
        return scale

    return types.float32(fmt, head_dim, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def unpack_rows(typingctx: Any, head_dim: Any, rows: Any, target: Any, num_rows: Any):
    """Turn int4 rows that lie one after another into int8 ones; see `RowFormat.unpacked_bytes`."""
    form = RowFormat(INT4, simd.literal(head_dim))
    dim = form.head_dim

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(simd.I8, 2 * LANES)
        with cgutils.for_range(b, args[3]) as loop:
            old = b.mul(loop.index, ir.Constant(simd.I64, form.num_bytes))
            new = b.mul(loop.index, ir.Constant(simd.I64, form.unpacked_bytes))
            row, place = simd.pointer(b, b.add(args[1], old)), simd.pointer(b, b.add(args[2], new))
            for n, (first, size) in enumerate(pair_pieces(dim // 2)):
                codes = load_bytes(b, row, first, size)
                low, high = (
                    b.and_(codes, simd.constant(15, kind)),
                    b.lshr(codes, simd.constant(4, kind)),
                )
                for half, part in enumerate((low, high)):
                    real = b.sub(part, simd.constant(8, kind))
                    simd.store(b, real, place, 2 * LANES * (2 * n + half))
        return context.get_dummy_value()

    return types.void(head_dim, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def score_pairs(
    typingctx: Any,
    fmt: Any,
    head_dim: Any,
    group: Any,
    unpacked: Any,
    ahead: Any,
    q: Any,
    places: Any,
    num: Any,
    scales: Any,
    line: Any,
    out: Any,
):
    """`score_keys` in integers: exact dot products of codes with int16 queries, as floats.

    int4 adds up the sums of its scale groups times their scales: float32, a row of ``line``
    bytes for each group. ``unpacked``: its rows are `unpack_rows`'s.
    """
    f, dim, num_queries = simd.literal(fmt), simd.literal(head_dim), simd.literal(group)
    form = RowFormat(f, dim)
    is_unpacked = bool(simd.literal(unpacked))

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, places, num, scales, line, out = args[5:]
        q = simd.pointer(b, q)
        spans, halves = form.word_spans, form.num_halves
        row_bytes = form.unpacked_bytes if is_unpacked else form.num_bytes
        keys, vector = keys_per_block(num_queries), ir.VectorType(simd.I8, 2 * LANES)
        words = ir.VectorType(simd.I16, 2 * LANES)

        def read(pointer: Any, n: int) -> list[Any]:
            if is_unpacked:
                places = [2 * LANES * (halves * n + half) for half in range(halves)]
                return [b.sext(simd.load(b, pointer, place, vector), words) for place in places]
            first, size = pair_pieces(form.num_bytes)[n]
            stored = as_words(b, f, load_bytes(b, pointer, first, size))
            return (
                [b.sub(word, simd.constant(8, words)) for word in stored] if f == INT4 else stored
            )

        per_batch = max(1, simd.SUMS // keys)  # queries whose sums are found at once
        lanes = [lane % keys for lane in range(simd.SUMS)]
        num_spans = len(spans)

        def score(first: Any, pointers: list[Any]) -> None:
            offset = b.mul(first, ir.Constant(simd.I64, 4))
            target, factors = simd.pointer(b, b.add(out, offset)), b.add(scales, offset)
            for start, count in query_chunks(num_queries):
                score_chunk(start, count, pointers, factors, target)

        def score_chunk(start: int, count: int, pointers: list[Any], scales: Any, out: Any) -> None:
            batches = range(0, count, per_batch)
            blocks: list[Any] = [None] * len(batches)
            for group in range(form.num_groups):
                # The group's exact sums, over all lanes, before they meet floats.
                sums: list[Any] = [None] * (count * keys)
                for span in (n for n in range(num_spans) if spans[n][2] == group):
                    stored = [read(p, span // halves)[span % halves] for p in pointers]
                    for g in range(count):
                        query = simd.load(b, q, 4 * LANES * ((start + g) * num_spans + span), words)
                        for i in range(keys):
                            at = g * keys + i
                            sums[at] = simd.multiply_pairs(b, sums[at], stored[i], query)
                scale = None
                if f == INT4:
                    at_group = b.add(scales, b.mul(line, ir.Constant(simd.I64, group)))
                    scale = simd.load(
                        b, simd.pointer(b, at_group), 0, ir.VectorType(simd.F32, keys)
                    )
                    scale = simd.shuffle(b, scale, scale, lanes)
                for k, first in enumerate(batches):
                    batch = sums[first * keys : (first + per_batch) * keys]
                    real = b.sitofp(simd.add_lanes(b, batch), ir.VectorType(simd.F32, simd.SUMS))
                    blocks[k] = simd.add_scaled(b, blocks[k], real, scale)
            for block, first in zip(blocks, batches, strict=True):
                for g in range(min(per_batch, count - first)):
                    number = ir.Constant(simd.I64, start + first + g)
                    mine = simd.shuffle(b, block, block, range(g * keys, (g + 1) * keys))
                    simd.store(b, mine, out, b.mul(number, line))

        each_block(b, places, num, keys, row_bytes, simd.literal(ahead), score)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, group, unpacked, ahead, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def largest_scales(typingctx: Any, count: Any, source: Any, line: Any, target: Any, num: Any):
    """target[:] = the largest size in ``count`` rows, ``line`` bytes apart, of ``num`` vectors."""
    height = simd.literal(count)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = simd.pointer(b, args[1]), simd.pointer(b, args[3])
        with simd.each(b, args[4]) as loop:
            at = b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES))
            best = simd.constant(0.0)
            for i in range(height):
                place = b.add(at, b.mul(args[2], ir.Constant(simd.I64, i)))
                best = simd.maximum(
                    b, simd.call(b, "fabs", simd.VF, simd.load(b, source, place, simd.VF)), best
                )
            simd.store(b, best, target, at)
        return context.get_dummy_value()

    return types.void(count, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def split_scales(typingctx: Any, count: Any, source: Any, target: Any, line: Any, num: Any):
    """target[i, :num] (float32, rows ``line`` bytes apart) = source[:num, i] (bfloat16)."""
    width = simd.literal(count)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target, line, num = args[1:]
        source, target = simd.pointer(b, source), simd.pointer(b, target)

        def columns(place: Any) -> list[Any]:
            if width % 2:
                codes = simd.load(b, source, place, ir.VectorType(simd.I16, LANES * width))
                parts = [
                    simd.shuffle(b, codes, codes, range(i, LANES * width, width))
                    for i in range(width)
                ]
                return [
                    b.bitcast(b.shl(b.zext(p, simd.VI), simd.constant(16, simd.VI)), simd.VF)
                    for p in parts
                ]
            # Two by two, as the halves of int32: a shuffle of those is one instruction.
            half = width // 2
            codes = simd.load(b, source, place, ir.VectorType(simd.I32, LANES * half))
            pairs = [
                simd.shuffle(b, codes, codes, range(i, LANES * half, half)) for i in range(half)
            ]
            high, low = simd.constant(-(1 << 16), simd.VI), simd.constant(16, simd.VI)
            bits = [half for pair in pairs for half in (b.shl(pair, low), b.and_(pair, high))]
            return [b.bitcast(each, simd.VF) for each in bits]

        whole = b.sdiv(num, ir.Constant(simd.I64, LANES))
        with cgutils.for_range(b, whole) as loop:
            place = b.mul(loop.index, ir.Constant(simd.I64, 2 * LANES * width))
            for i, real in enumerate(columns(place)):
                at = b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES))
                simd.store(b, real, target, b.add(at, b.mul(line, ir.Constant(simd.I64, i))))
        start = b.mul(whole, ir.Constant(simd.I64, LANES))
        with cgutils.for_range(b, b.sub(num, start)) as loop:
            token = b.add(start, loop.index)
            for i in range(width):
                place = b.add(
                    b.mul(token, ir.Constant(simd.I64, 2 * width)), ir.Constant(simd.I64, 2 * i)
                )
                code = b.zext(simd.load(b, source, place, simd.I16), simd.I32)
                real = b.bitcast(b.shl(code, ir.Constant(simd.I32, 16)), simd.F32)
                at = b.mul(token, ir.Constant(simd.I64, 4))
                simd.store(b, real, target, b.add(at, b.mul(line, ir.Constant(simd.I64, i))))
        return context.get_dummy_value()

    return types.void(count, *[types.int64] * 4), codegen


@intrinsic
def quantize_weights(
    typingctx: Any, source: Any, scales: Any, factor: Any, target: Any, num_vectors: Any
):
    """target[:] (int16) = round(source[:] * factor * scales[:]); their sum."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, scales, target = (simd.pointer(b, args[i]) for i in (0, 1, 3))
        factor = simd.splat(b, args[2])
        total = cgutils.alloca_once_value(b, simd.constant(0, simd.VI))
        with simd.each(b, args[4]) as loop:
            at = b.mul(loop.index, ir.Constant(simd.I64, 4 * LANES))
            x = b.fmul(
                b.fmul(simd.load(b, source, at, simd.VF), factor), simd.load(b, scales, at, simd.VF)
            )
            codes = simd.round_to_integers(b, x)
            b.store(b.add(b.load(total), codes), total)
            codes = b.trunc(codes, ir.VectorType(simd.I16, LANES))
            simd.store(b, codes, target, b.mul(loop.index, ir.Constant(simd.I64, 2 * LANES)))
        return simd.fold(b, b.load(total), simd.add_integers)

    i64, f32 = types.int64, types.float32
    return types.int32(i64, i64, f32, i64, i64), codegen


@intrinsic(prefer_literal=True)
def add_pairs(
    typingctx: Any,
    fmt: Any,
    head_dim: Any,
    group: Any,
    unpacked: Any,
    ahead: Any,
    acc: Any,
    weights: Any,
    weights_bytes: Any,
    places: Any,
    num: Any,
):
    """`add_values` with int16 weights in integers, two tokens at a time.

    Of an odd ``num`` one row more is read; its weight is 0. weights has a row for each query and
    scale group. acc: int32 [group, spans, 2, LANES], the columns of a span in the order of
    `_interleave`. int4 codes count as stored, 0 to 15, or as `unpack_rows` leaves them, -8 to 7,
    if ``unpacked``.
    """
    f, dim, num_queries = simd.literal(fmt), simd.literal(head_dim), simd.literal(group)
    form = RowFormat(f, dim)
    is_unpacked = bool(simd.literal(unpacked))

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, weights, weights_bytes, places, num = args[5:]
        acc, places = simd.pointer(b, acc), simd.pointer(b, places)
        groups, spans, halves = form.num_groups, form.word_spans, form.num_halves
        row_bytes = form.unpacked_bytes if is_unpacked else form.num_bytes
        pieces = pair_pieces(row_bytes)
        acc_bytes = 8 * LANES * len(spans)
        words = ir.VectorType(simd.I16, 2 * LANES)
        one, two = (ir.Constant(simd.I64, n) for n in (1, 2))

        def read(row: Any, other: Any, n: int, part: int) -> list[Any]:
            if is_unpacked:
                both = [
                    [load_bytes(b, r, *pieces[halves * n + half]) for r in (row, other)]
                    for half in (0, 1)
                ]
                return [b.sext(_interleave(b, x, y, part), words) for x, y in both]
            x, y = (load_bytes(b, r, *pieces[n]) for r in (row, other))
            return as_words(b, f, _interleave(b, x, y, part))

        def add_tokens(
            number: Any, row: Any, other: Any, queries: range, mine: Any, sums: Any
        ) -> None:
            used = sorted({spans[halves * n + half][2] for n, _ in mine for half in range(halves)})
            weight = {}
            for g in queries:
                for scale_group in used:
                    line = ir.Constant(simd.I64, g * groups + scale_group)
                    place = b.add(b.mul(line, weights_bytes), b.mul(number, two))
                    w = simd.load(b, simd.pointer(b, b.add(weights, place)), 0, simd.I32)
                    weight[g, scale_group] = b.bitcast(simd.splat(b, w), words)
            for n, part in mine:
                for half, both in enumerate(read(row, other, n, part)):
                    span = halves * n + half
                    for g in queries:
                        place, w = sums[g, span, part], weight[g, spans[span][2]]
                        b.store(simd.multiply_pairs(b, b.load(place), both, w), place)

        # A pass serves as many (load, part of it) as have their sums in registers.
        units = [(n, part) for n in range(len(spans) // halves) for part in range(2)]
        passes = []
        for start, count in query_chunks(num_queries):
            most = max(1, (24 if simd.WIDE else 8) // (halves * count))
            block = -(-len(units) // -(-len(units) // most))
            passes += [
                (range(start, start + count), units[begin : begin + block])
                for begin in range(0, len(units), block)
            ]
        for share, (queries, mine) in enumerate(passes):
            sums = {
                (g, halves * n + half, part): cgutils.alloca_once(b, simd.VI)
                for g in queries
                for n, part in mine
                for half in range(halves)
            }
            for (g, span, part), place in sums.items():
                offset = g * acc_bytes + 4 * LANES * (2 * span + part)
                b.store(simd.load(b, acc, offset, simd.VI), place)
            with cgutils.for_range(b, b.ashr(b.add(num, one), one)) as loop:
                i = b.mul(loop.index, two)
                both = [i, b.add(i, one)]
                ask_share(b, places, both, row_bytes, simd.literal(ahead), (share, len(passes)))
                row, other = row_at(b, places, i), row_at(b, places, i, 1)
                add_tokens(i, row, other, queries, mine, sums)
            for (g, span, part), place in sums.items():
                offset = g * acc_bytes + 4 * LANES * (2 * span + part)
                simd.store(b, b.load(place), acc, offset)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, group, unpacked, ahead, *[types.int64] * 5), codegen


def _interleave(b: Any, x: Any, y: Any, part: int) -> Any:
    """Take x and y by turns; ``part`` 0 or 1 of each run of 16 bytes, as the hardware does it."""
    count = x.type.count
    lanes = [run + 8 * part + i for run in range(0, count, 16) for i in range(8)]
    return simd.shuffle(b, x, y, [lane + side for lane in lanes for side in (0, count)])


@intrinsic(prefer_literal=True)
def finish_pairs(
    typingctx: Any, fmt: Any, head_dim: Any, acc: Any, target: Any, factors: Any, offsets: Any
):
    """target[:head_dim] = (acc[:] - offset) * factor of its scale group, in natural order."""
    f, dim = simd.literal(fmt), simd.literal(head_dim)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, target, factors, offsets = (simd.pointer(b, a) for a in args[2:])
        # The inverse of `_interleave`: runs of 8 columns, in turn from either part.
        lanes = [
            LANES * part + run + i
            for run in range(0, LANES, 8)
            for part in range(2)
            for i in range(8)
        ]
        for n, (start, size, group) in enumerate(form.word_spans):
            factor = simd.splat(b, simd.load(b, factors, 4 * group, simd.F32))
            parts = [simd.load(b, acc, 4 * LANES * (2 * n + part), simd.VI) for part in range(2)]
            if f == INT4:
                offset = simd.splat(b, simd.load(b, offsets, 4 * group, simd.I32))
                parts = [b.sub(part, offset) for part in parts]
            for half in range(2):
                first = half * LANES
                count = min(LANES, size - first)
                if count > 0:
                    whole = b.sitofp(simd.shuffle(b, *parts, lanes[first : first + LANES]), simd.VF)
                    real = b.fmul(whole, factor)
                    simd.store(b, simd.narrow(b, real, count), target, 4 * (start + first))
        return context.get_dummy_value()

    return types.void(fmt, head_dim, *[types.int64] * 4), codegen
