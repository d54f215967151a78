"""Scores and weighted sums over stored rows, read as floats."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.formats import INT4, RowFormat
from radixkv_kernels.cpu.rows import read_codes
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.walk import ask_share, each_block, keys_per_block, query_chunks, row_at


@intrinsic(prefer_literal=True)
def score_keys(
    typingctx: Any,
    fmt: Any,
    head_dim: Any,
    group: Any,
    ahead: Any,
    q: Any,
    places: Any,
    num: Any,
    scales: Any,
    scales_bytes: Any,
    out: Any,
    out_bytes: Any,
):
    """Dot products of ``group`` queries with ``num`` stored rows, a block at a time.

    q: float32 [group, padded], in read order. places: the rows' addresses, see `each_block`.
    out[g] gets the floats, out_bytes apart; those of the last block may go beyond ``num``.
    """
    f, dim, num_queries = simd.literal(fmt), simd.literal(head_dim), simd.literal(group)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, places, num, scales, scales_bytes, out, out_bytes = args[4:]
        q, keys, q_bytes = simd.pointer(b, q), keys_per_block(num_queries), 4 * form.padded

        def score(first: Any, pointers: list[Any]) -> None:
            factors = [
                simd.pointer(
                    b, b.add(scales, b.mul(b.add(first, ir.Constant(simd.I64, i)), scales_bytes))
                )
                for i in range(keys)
            ]
            target = simd.pointer(b, b.add(out, b.mul(first, ir.Constant(simd.I64, 4))))
            for start, count in query_chunks(num_queries):
                score_chunk(start, count, pointers, factors, target)

        def score_chunk(
            start: int, count: int, pointers: list[Any], factors: list[Any], out: Any
        ) -> None:
            sums: list[Any] = [None] * (count * keys)
            for step in range(form.num_reads):
                read = [read_codes(b, form, pointers[i], factors[i], step) for i in range(keys)]
                for part in range(len(read[0])):
                    vector = read[0][part][0]
                    for g in range(count):
                        offset = (start + g) * q_bytes + 4 * LANES * vector
                        query = simd.load_floats(b, q, offset)
                        for i in range(keys):
                            n, key = g * keys + i, read[i][part][1]
                            sums[n] = (
                                b.fmul(key, query)
                                if sums[n] is None
                                else simd.fma(b, key, query, sums[n])
                            )
            per_batch = max(1, LANES // keys)
            for first in range(0, count, per_batch):
                batch = sums[first * keys : (first + per_batch) * keys]
                totals = simd.fold_each(b, batch, simd.add)
                for g in range(len(batch) // keys):
                    lanes = range(g * keys, (g + 1) * keys)
                    block = simd.shuffle(b, totals, totals, lanes)
                    offset = b.mul(ir.Constant(simd.I64, start + first + g), out_bytes)
                    simd.store(b, block, out, offset)

        each_block(b, places, num, keys, form.num_bytes, simd.literal(ahead), score)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(fmt, head_dim, group, ahead, *[i64] * 7), codegen


@intrinsic(prefer_literal=True)
def add_values(
    typingctx: Any,
    fmt: Any,
    head_dim: Any,
    group: Any,
    ahead: Any,
    acc: Any,
    weights: Any,
    weights_bytes: Any,
    places: Any,
    num: Any,
    scales: Any,
    scales_bytes: Any,
):
    """acc[g] += sum over ``num`` tokens of weights[g, token] * row(token).

    acc: float32 [group, padded], in read order. places: the rows' addresses, and after them
    ``ahead`` that are only asked for, as they will be read soon.
    """
    f, dim, num_queries = simd.literal(fmt), simd.literal(head_dim), simd.literal(group)
    form = RowFormat(f, dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, weights, weights_bytes, places, num, scales, scales_bytes = args[4:]
        acc, places = simd.pointer(b, acc), simd.pointer(b, places)
        acc_bytes, width = 4 * form.padded, 2 if f == INT4 else 1
        row_bytes, reads, passes = form.num_bytes, form.num_reads, []
        for start, count in query_chunks(num_queries):
            block = max(1, simd.ACCUMULATORS // (width * (1 << (count - 1).bit_length())))
            passes += [
                (start, count, range(begin, min(begin + block, reads)))
                for begin in range(0, reads, block)
            ]
        for share, (start, count, steps) in enumerate(passes):
            vectors = [width * s + part for s in steps for part in range(width)]
            sums = {(g, v): cgutils.alloca_once(b, simd.VF) for g in range(count) for v in vectors}
            for (g, v), place in sums.items():
                offset = (start + g) * acc_bytes + 4 * LANES * v
                b.store(simd.load_floats(b, acc, offset), place)
            with cgutils.for_range(b, num) as loop:
                number = loop.index
                row = row_at(b, places, number)
                ask_share(b, places, [number], row_bytes, simd.literal(ahead), (share, len(passes)))
                scale = simd.pointer(b, b.add(scales, b.mul(number, scales_bytes)))
                weight = []
                for g in range(count):
                    line = b.mul(ir.Constant(simd.I64, start + g), weights_bytes)
                    place = b.add(line, b.mul(number, ir.Constant(simd.I64, 4)))
                    w = simd.load(b, simd.pointer(b, b.add(weights, place)), 0, simd.F32)
                    weight.append(simd.splat(b, w))
                for s in steps:
                    for v, value in read_codes(b, form, row, scale, s):
                        for g in range(count):
                            old = b.load(sums[g, v])
                            b.store(simd.fma(b, weight[g], value, old), sums[g, v])
            for (g, v), place in sums.items():
                offset = (start + g) * acc_bytes + 4 * LANES * v
                simd.store(b, b.load(place), acc, offset)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(fmt, head_dim, group, ahead, *[i64] * 7), codegen
