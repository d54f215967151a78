"""What a decoder layer computes besides its attention, compiled by Numba: products, norms, RoPE.

The weights are read where they lie, ``[outputs, inputs]`` (a ``Conv1D``'s: ``[inputs, outputs]``)
as the checkpoint has them: they are held once, and a step that decodes one sequence takes the
time that memory needs to give them.
An output element is summed lane by lane over the inputs, then over the lanes (a ``Conv1D``'s
input by input), whatever the number of rows, the tile or the thread: a row's bits do not depend
on its neighbours.

A kernel runs a short program: operations in stages, each cut into tasks that threads take in
turn. A stage begins when all tasks before it are done. A thread that comes late finds fewer
tasks left; none waits for it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.compile_cache import compile_callback, compile_helper
from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.launch import kernel_address, run_kernel
from radixkv_kernels.cpu.memory import fetch_add
from radixkv_kernels.cpu.simd import LANES

_I1, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_F64 = ir.DoubleType()
_VF = ir.VectorType(_F32, LANES)
_V4 = ir.VectorType(_F32, 4)

_TILE = (4, 6) if LANES == 16 else (3, 4)  # rows, outputs: their sums fill the registers
_UNROLL = 64 // (4 * LANES)  # vectors of a cache line
_TASK_BYTES = 2**18  # of weights: they stay in the second-level cache while the rows pass by
_MAX_TASK = 64  # outputs
_ROW_BLOCK_BYTES = 2**17  # of input rows that stay in that cache, too
_AHEAD = 8  # inputs: the weights of so many later ones are asked for from memory
_NORM_ROWS = 8  # rows of a task
_SMALL = 2**20  # weights times rows (+ 8): below, waking a second thread takes longer
_SPINS = 1000  # looks at a counter before a thread offers its place to another

_CHUNK_INPUTS = 256  # of weights that lie across: so many memory pages are read again and again

PRODUCT, GATED, NORM, ROPE, ACROSS = range(5)
"""Operations. All matrices are float32, rows contiguous; ``_row`` is a row's length in bytes.

PRODUCT: out = x weight^T (+ bias) (+ more).
ACROSS: out = x weight (+ bias), where weight is [num_inputs, num_outputs].
GATED: out = silu(x weight^T (+ bias)) * (x weight2^T (+ bias2)); out2 is its scratch.
NORM: out = weight * (x / sqrt(mean(x^2) + eps)); weight 0: none.
ROPE: out [num_rows, num_outputs] is heads of num_inputs; each is normed as by NORM if weight is
not 0, then turned in place by cos (x) and sin (more), [num_rows, num_inputs].
"""

_FIELDS = ("kind", "first_task", "needs", "num_tasks", "step", "num_rows", "num_outputs",
           "num_inputs", "x", "x_row", "weight", "bias", "out", "out_row", "more", "more_row",
           "weight2", "bias2", "out2")  # fmt: skip
_OP = np.dtype([(name, "i8") for name in _FIELDS] + [("eps", "f8")])
_NAMES = (*_FIELDS, "eps")
_WORDS = len(_NAMES)
_MAX_OPS = 15
_MAX_WORDS = _WORDS * (_MAX_OPS + 1)
_HEAD_NUM_OPS, _HEAD_COUNTERS = _FIELDS.index("num_rows"), _FIELDS.index("x")
_SIGNATURE = types.void(types.CPointer(numba.from_dtype(_OP)))


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _at(b: Any, address: Any, index: Any, size: Any) -> Any:
    """The pointer ``index`` times ``size`` bytes behind an address."""
    size = _number(size) if isinstance(size, int) else size
    index = _number(index) if isinstance(index, int) else index
    return simd.pointer(b, b.add(address, b.mul(index, size)))


# -- intrinsics ----------------------------------------------------------------------------------


@intrinsic
def _wait_for(typingctx: Any, counter: Any, number: Any):
    """Wait until other threads have brought the int64 at ``counter`` to ``number``."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        place = b.inttoptr(args[0], _I64.as_pointer())
        look, wait, done = (b.append_basic_block(name) for name in ("look", "wait", "done"))
        spins = cgutils.alloca_once_value(b, _number(0))
        b.branch(look)
        b.position_at_end(look)
        seen = b.load_atomic(place, "seq_cst", 8)
        b.cbranch(b.icmp_signed(">=", seen, args[1]), done, wait)
        b.position_at_end(wait)
        tried = b.add(b.load(spins), _number(1))
        b.store(tried, spins)
        if simd.CPU.get("sse2"):
            kind = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.sse2.pause"), [])
        if sys.platform != "win32":
            with b.if_then(b.icmp_signed(">", tried, _number(_SPINS)), likely=False):
                kind = ir.FunctionType(_I32, [])
                b.call(cgutils.get_or_insert_function(b.module, kind, "sched_yield"), [])
        b.branch(look)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _tail(b: Any, pointer: Any, offset: Any, count: Any) -> Any:
    """The first ``count`` floats at ``pointer`` plus ``offset`` bytes; the other lanes are 0."""
    lanes = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    mask = b.icmp_signed("<", lanes, simd.splat(b, b.trunc(count, _I32)))
    place = b.bitcast(b.gep(pointer, [offset]), _VF.as_pointer())
    kind = ir.FunctionType(_VF, [_VF.as_pointer(), _I32, ir.VectorType(_I1, LANES), _VF])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return b.call(function, [place, ir.Constant(_I32, 4), mask, simd.constant(0.0)])


@intrinsic
def _multiply_block(
    typingctx: Any,
    num_inputs: Any,
    num_rows: Any,
    num_outputs: Any,
    x: Any,
    x_row: Any,
    weight: Any,
    bias: Any,
    out: Any,
    out_row: Any,
    more: Any,
    more_row: Any,
):
    """out[r, n] = x[r, :] . weight[n, :] (+ bias[n]) (+ more[r, n]); address 0: there is none."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        num_inputs, num_rows, num_outputs, x, x_row, weight, bias, out, out_row, more, more_row = (
            args
        )
        line = b.mul(num_inputs, _number(4))
        num_whole = b.sdiv(num_inputs, _number(LANES))
        num_left = b.srem(num_inputs, _number(LANES))
        has_tail = b.icmp_signed("!=", num_left, _number(0))
        has_bias = b.icmp_signed("!=", bias, _number(0))
        has_more = b.icmp_signed("!=", more, _number(0))

        def lines(address: Any, first: Any, count: int, line: Any) -> list[Any]:
            return [_at(b, address, b.add(first, _number(i)), line) for i in range(count)]

        def tile(row: Any, output: Any, rows: int, outputs: int) -> None:
            x_rows = lines(x, row, rows, x_row)
            w_rows = lines(weight, output, outputs, line)
            cells = [(r, n) for r in range(rows) for n in range(outputs)]
            sums = {cell: cgutils.alloca_once(b, _VF) for cell in cells}
            for place in sums.values():
                b.store(simd.constant(0.0), place)

            def add(read: Callable[[Any], Any]) -> None:
                factors = [read(x_rows[r]) for r in range(rows)]
                for n in range(outputs):
                    value = read(w_rows[n])
                    for r in range(rows):
                        place = sums[r, n]
                        b.store(simd.fma(b, factors[r], value, b.load(place)), place)

            if rows > 1:
                # While these outputs' weights serve the rows, those of the next come from memory:
                # each tile of rows asks for one output's, or for two where there are few tiles.
                after, half = b.add(output, _number(outputs)), (outputs + 1) // 2
                turn = b.srem(b.sdiv(row, _number(rows)), _number(outputs))
                following = _at(b, weight, b.add(after, turn), line)
                turn = b.srem(b.add(turn, _number(half)), _number(outputs))
                another = _at(b, weight, b.add(after, turn), line)
                are_few = b.icmp_signed("<", num_rows, _number(rows * outputs))
            with cgutils.for_range(b, b.sdiv(num_whole, _number(_UNROLL))) as loop:
                begin = b.mul(loop.index, _number(4 * LANES * _UNROLL))
                if rows > 1:
                    simd.prefetch(b, following, begin)
                    with b.if_then(are_few):
                        simd.prefetch(b, another, begin)
                for i in range(_UNROLL):
                    offset = b.add(begin, _number(4 * LANES * i))
                    add(lambda pointer, offset=offset: simd.load(b, pointer, offset, _VF))
            rest = b.srem(num_whole, _number(_UNROLL))
            with cgutils.for_range(b, rest) as loop:
                number = b.add(b.sub(num_whole, rest), loop.index)
                offset = b.mul(number, _number(4 * LANES))
                add(lambda pointer: simd.load(b, pointer, offset, _VF))
            with b.if_then(has_tail):
                end = b.mul(num_whole, _number(4 * LANES))
                add(lambda pointer: _tail(b, pointer, end, num_left))
            column = b.mul(output, _number(4))
            kind = ir.VectorType(_F32, outputs)
            for r in range(rows):
                total = cgutils.alloca_once(b, kind)
                folded = simd.fold_each(b, [b.load(sums[r, n]) for n in range(outputs)], simd.add)
                b.store(simd.narrow(b, folded, outputs), total)
                with b.if_then(has_bias):
                    value = simd.load(b, simd.pointer(b, b.add(bias, column)), 0, kind)
                    b.store(b.fadd(b.load(total), value), total)
                with b.if_then(has_more):
                    other = b.add(b.add(more, column), b.mul(more_row, b.add(row, _number(r))))
                    value = simd.load(b, simd.pointer(b, other), 0, kind)
                    b.store(b.fadd(b.load(total), value), total)
                target = b.add(b.add(out, column), b.mul(out_row, b.add(row, _number(r))))
                simd.store(b, b.load(total), simd.pointer(b, target), 0)

        def cover(count: Any, sizes: tuple[int, ...], body: Callable[[Any, int], None]) -> None:
            """Call body(first, how many) for whole pieces of each size, the largest first."""
            done: Any = _number(0)
            for size in sizes:
                num_pieces = b.sdiv(b.sub(count, done), _number(size))
                if size == 3:  # 4 are better served as 2 and 2 than as 3 and 1
                    has_one = b.icmp_signed("==", b.srem(count, _number(size)), _number(1))
                    has_four = b.icmp_signed(">", count, _number(size))
                    spared = b.zext(b.and_(has_one, has_four), _I64)
                    num_pieces = b.sub(num_pieces, spared)
                with cgutils.for_range(b, num_pieces) as loop:
                    body(b.add(done, b.mul(loop.index, _number(size))), size)
                done = b.add(done, b.mul(num_pieces, _number(size)))

        def multiply(output: Any, outputs: int) -> None:
            sizes = (_TILE[0], 2, 1) if outputs > 1 else (_TILE[0], 1)
            cover(num_rows, sizes, lambda row, rows: tile(row, output, rows, outputs))

        cover(num_outputs, (_TILE[1], 1), multiply)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


@intrinsic
def _multiply_across(
    typingctx: Any,
    num_inputs: Any,
    num_rows: Any,
    num_outputs: Any,
    x: Any,
    x_row: Any,
    weight: Any,
    weight_row: Any,
    bias: Any,
    out: Any,
    out_row: Any,
    more: Any,
):
    """out[r, n] = x[r, :] . weight[:, n] (+ bias[n]) (+ more[r, n]); address 0: there is none.

    ``more`` has the rows of ``out``. An output is summed input by input.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        (
            num_inputs,
            num_rows,
            num_outputs,
            x,
            x_row,
            weight,
            weight_row,
            bias,
            out,
            out_row,
            more,
        ) = args
        has_bias = b.icmp_signed("!=", bias, _number(0))
        has_more = b.icmp_signed("!=", more, _number(0))
        left = b.srem(num_outputs, _number(LANES))
        mask = _masked(b, left)
        bits, align = ir.VectorType(_I1, LANES), ir.Constant(_I32, 4)
        name, vectors_at = f"v{LANES}f32.p0", _VF.as_pointer()
        load_kind = ir.FunctionType(_VF, [vectors_at, _I32, bits, _VF])
        store_kind = ir.FunctionType(ir.VoidType(), [_VF, vectors_at, _I32, bits])

        def read(address: Any, is_whole: bool) -> Any:
            if is_whole:
                return simd.load(b, simd.pointer(b, address), 0, _VF)
            load = cgutils.get_or_insert_function(b.module, load_kind, f"llvm.masked.load.{name}")
            return b.call(load, [b.inttoptr(address, vectors_at), align, mask, simd.constant(0.0)])

        def write(value: Any, address: Any, is_whole: bool) -> None:
            if is_whole:
                simd.store(b, value, simd.pointer(b, address), 0)
                return
            store = cgutils.get_or_insert_function(
                b.module, store_kind, f"llvm.masked.store.{name}"
            )
            b.call(store, [value, b.inttoptr(address, vectors_at), align, mask])

        def tile(row: Any, column: Any, rows: int, vectors: int, is_whole: bool = True) -> None:
            x_rows = [_at(b, x, b.add(row, _number(r)), x_row) for r in range(rows)]
            places = [b.add(column, _number(4 * LANES * v)) for v in range(vectors)]
            cells = [(r, v) for r in range(rows) for v in range(vectors)]
            sums = {cell: cgutils.alloca_once(b, _VF) for cell in cells}
            for place in sums.values():
                b.store(simd.constant(0.0), place)
            with cgutils.for_range(b, num_inputs) as loop:
                line = b.add(weight, b.mul(loop.index, weight_row))
                ahead = simd.pointer(b, b.add(line, b.mul(weight_row, _number(_AHEAD))))
                for v in range(0, vectors, _UNROLL):
                    simd.prefetch(b, ahead, places[v])
                offset = b.mul(loop.index, _number(4))
                factors = [simd.splat(b, simd.load(b, one, offset, _F32)) for one in x_rows]
                for v in range(vectors):
                    value = read(b.add(line, places[v]), is_whole)
                    for r in range(rows):
                        place = sums[r, v]
                        b.store(simd.fma(b, factors[r], value, b.load(place)), place)
            for r in range(rows):
                begin = b.mul(out_row, b.add(row, _number(r)))
                for v in range(vectors):
                    total = sums[r, v]
                    with b.if_then(has_bias):
                        value = read(b.add(bias, places[v]), is_whole)
                        b.store(b.fadd(b.load(total), value), total)
                    offset = b.add(begin, places[v])
                    with b.if_then(has_more):
                        value = read(b.add(more, offset), is_whole)
                        b.store(b.fadd(b.load(total), value), total)
                    write(b.load(total), b.add(out, offset), is_whole)

        def rows_of(column: Any, vectors: int, most: int, is_whole: bool = True) -> None:
            done: Any = _number(0)
            for size in (most, 1):
                num_pieces = b.sdiv(b.sub(num_rows, done), _number(size))
                with cgutils.for_range(b, num_pieces) as loop:
                    row = b.add(done, b.mul(loop.index, _number(size)))
                    tile(row, column, size, vectors, is_whole)
                done = b.add(done, b.mul(num_pieces, _number(size)))

        whole, done = b.sdiv(num_outputs, _number(LANES)), _number(0)
        for size in (4, 1):
            num_pieces = b.sdiv(b.sub(whole, done), _number(size))
            with cgutils.for_range(b, num_pieces) as loop:
                first = b.add(done, b.mul(loop.index, _number(size)))
                rows_of(b.mul(first, _number(4 * LANES)), size, _TILE[0])
            done = b.add(done, b.mul(num_pieces, _number(size)))
        with b.if_then(b.icmp_signed("!=", left, _number(0))):
            rows_of(b.mul(whole, _number(4 * LANES)), 1, _TILE[0], False)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


def _masked(b: Any, count: Any) -> Any:
    lanes = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    return b.icmp_signed("<", lanes, simd.splat(b, b.trunc(count, _I32)))


def _elementwise(
    b: Any,
    count: Any,
    sources: Sequence[Any],
    compute: Callable[..., Sequence[Any]],
    targets: Sequence[Any] = (),
) -> None:
    """Vector by vector: read from all sources (addresses), compute, write to the targets."""
    whole, left = b.sdiv(count, _number(LANES)), b.srem(count, _number(LANES))
    with cgutils.for_range(b, whole) as loop:
        offset = b.mul(loop.index, _number(4 * LANES))
        values = compute(*[simd.load(b, simd.pointer(b, a), offset, _VF) for a in sources])
        for address, value in zip(targets, values, strict=True):
            simd.store(b, value, simd.pointer(b, address), offset)
    with b.if_then(b.icmp_signed("!=", left, _number(0))):
        mask, offset = _masked(b, left), b.mul(whole, _number(4 * LANES))
        align, pointer = ir.Constant(_I32, 4), _VF.as_pointer()
        bits = ir.VectorType(_I1, LANES)
        kind = ir.FunctionType(_VF, [pointer, _I32, bits, _VF])
        name = f"v{LANES}f32.p0"
        load = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.load.{name}")
        kind = ir.FunctionType(ir.VoidType(), [_VF, pointer, _I32, bits])
        store = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.store.{name}")

        def place(address: Any) -> Any:
            return b.inttoptr(b.add(address, offset), pointer)

        values = compute(
            *[b.call(load, [place(a), align, mask, simd.constant(0.0)]) for a in sources]
        )
        for address, value in zip(targets, values, strict=True):
            b.call(store, [value, place(address), align, mask])


@intrinsic
def _norm_row(typingctx: Any, count: Any, x: Any, weight: Any, eps: Any, out: Any):
    """Out = weight * (x / sqrt(mean(x^2) + eps)); in place if out is x."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        count, x, weight, eps, out = args
        total = cgutils.alloca_once_value(b, simd.constant(0.0))

        def square(value: Any) -> list[Any]:
            b.store(simd.fma(b, value, value, b.load(total)), total)
            return []

        _elementwise(b, count, [x], square)
        mean = b.fdiv(simd.fold(b, b.load(total), simd.add), b.sitofp(count, _F32))
        root = simd.call(b, "sqrt", _F32, b.fadd(mean, b.fptrunc(eps, _F32)))
        factor = simd.splat(b, b.fdiv(ir.Constant(_F32, 1.0), root))
        _elementwise(
            b, count, [x, weight], lambda value, w: [b.fmul(w, b.fmul(value, factor))], [out]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float64, types.int64), codegen


@intrinsic
def _turn_head(typingctx: Any, half: Any, head: Any, cos: Any, sin: Any):
    """RoPE in place: the first half of the dimensions pairs with the second."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        half, head, cos, sin = args
        step = b.mul(half, _number(4))
        second = b.add(head, step)

        def turn(x: Any, y: Any, cos1: Any, cos2: Any, sin1: Any, sin2: Any) -> list[Any]:
            # Rounded as transformers does: two products, then their sum.
            return [
                b.fsub(b.fmul(x, cos1), b.fmul(y, sin1)),
                b.fadd(b.fmul(y, cos2), b.fmul(x, sin2)),
            ]

        sources = [head, second, cos, b.add(cos, step), sin, b.add(sin, step)]
        _elementwise(b, half, sources, turn, [head, second])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def _gate_row(typingctx: Any, count: Any, gate: Any, up: Any):
    """Gate = silu(gate) * up."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        count, gate, up = args

        def compute(x: Any, y: Any) -> list[Any]:
            small = simd.exp(b, simd.minimum(b, x, b.fneg(x)))
            one, zero = simd.constant(1.0), simd.constant(0.0)
            above = b.select(b.fcmp_ordered(">", x, zero), one, small)
            return [b.fmul(b.fmul(x, b.fdiv(above, b.fadd(one, small))), y)]

        _elementwise(b, count, [gate, up], compute, [gate])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


# -- tasks ---------------------------------------------------------------------------------------


@compile_helper
def _offset(address, num_bytes):  # type: ignore[no-untyped-def]
    return address + num_bytes if address != 0 else 0


@compile_helper
def _product(op, first, num_outputs):  # type: ignore[no-untyped-def]
    """One task's outputs, for all rows; block by block, so that its rows stay in the cache."""
    line, place = 4 * op.num_inputs, 4 * first
    row_block = max(12, _ROW_BLOCK_BYTES // line // 12 * 12)
    for row in range(0, op.num_rows, row_block):
        num_rows = min(row_block, op.num_rows - row)
        x, out = op.x + row * op.x_row, op.out + row * op.out_row + place
        _multiply_block(
            op.num_inputs, num_rows, num_outputs, x, op.x_row, op.weight + first * line,
            _offset(op.bias, place), out, op.out_row,
            _offset(op.more, row * op.more_row + place), op.more_row,
        )  # fmt: skip
        if op.kind == GATED:
            out2 = op.out2 + row * op.out_row + place
            _multiply_block(
                op.num_inputs, num_rows, num_outputs, x, op.x_row, op.weight2 + first * line,
                _offset(op.bias2, place), out2, op.out_row, 0, 0,
            )  # fmt: skip
            for i in range(num_rows):
                _gate_row(num_outputs, out + i * op.out_row, out2 + i * op.out_row)


@compile_helper
def _product_across(op, first, num_outputs):  # type: ignore[no-untyped-def]
    """One task's outputs, for all rows; by chunks of inputs, whose sums are added in order."""
    weight_row, place = 4 * op.num_outputs, 4 * first
    out = op.out + place
    for begin in range(0, op.num_inputs, _CHUNK_INPUTS):
        is_first = begin == 0
        _multiply_across(
            min(_CHUNK_INPUTS, op.num_inputs - begin), op.num_rows, num_outputs,
            op.x + 4 * begin, op.x_row, op.weight + begin * weight_row + place, weight_row,
            _offset(op.bias, place) if is_first else 0, out, op.out_row, 0 if is_first else out,
        )  # fmt: skip


def make_program() -> Any:
    """The kernel: runs a program; see the module."""

    def program(pointer):  # type: ignore[no-untyped-def]
        head = carray(pointer, 1)[0]
        num_ops, counters = head.num_rows, head.x
        ops = carray(pointer, num_ops + 1)
        number = 1
        while True:
            task = fetch_add(counters, 0)
            while number <= num_ops and task >= ops[number].first_task + ops[number].num_tasks:
                number += 1
            if number > num_ops:
                break
            op = ops[number]
            if op.needs > 0:
                _wait_for(counters + 8, op.needs)
            first = (task - op.first_task) * op.step
            if op.kind == PRODUCT or op.kind == GATED:
                _product(op, first, min(op.step, op.num_outputs - first))
            elif op.kind == ACROSS:
                _product_across(op, first, min(op.step, op.num_outputs - first))
            else:
                for row in range(first, min(first + op.step, op.num_rows)):
                    if op.kind == NORM:
                        _norm_row(
                            op.num_inputs, op.x + row * op.x_row, op.weight, op.eps,
                            op.out + row * op.out_row,
                        )  # fmt: skip
                    else:
                        for n in range(0, op.num_outputs, op.num_inputs):
                            place = op.out + row * op.out_row + 4 * n
                            if op.weight != 0:
                                _norm_row(op.num_inputs, place, op.weight, op.eps, place)
                            _turn_head(
                                op.num_inputs // 2, place, op.x + row * op.x_row,
                                op.more + row * op.more_row,
                            )  # fmt: skip
            fetch_add(counters, 1)

    return compile_callback(_SIGNATURE)(program)


# -- host side -----------------------------------------------------------------------------------


class _Local(threading.local):
    """Memory of a program that runs, a thread's own."""

    def __init__(self) -> None:
        self.words = (ctypes.c_int64 * (_MAX_WORDS + 2))()
        self.address = ctypes.addressof(self.words)
        self.counters = self.address + 8 * _MAX_WORDS  # next task, tasks that are done


_local = _Local()
Address = int | tuple[str, int]
"""An address, or the name of one that is given when a program runs and bytes to add to it."""


class Program:
    """Operations to run as one parallel region, as often as wanted.

    Operations that are added one after another run at the same time, until `then`.

    Args:
        num_rows: of all matrices.
        num_threads: of them the caller's is one.
    """

    def __init__(self, num_rows: int, num_threads: int) -> None:
        self.num_rows, self.num_threads = num_rows, num_threads
        self._words = [0] * _WORDS
        self._given: list[tuple[int, str, int]] = []  # word, name, bytes to add
        self._image: Any = None  # the words, once it has run
        self._num_tasks = self._needs = self._work = 0

    def then(self) -> None:
        """What is added from here on needs what was added before."""
        self._needs = self._num_tasks

    def _add(self, kind: int, size: int, step: int, **values: Address) -> None:
        """Add an operation of ``size`` in tasks of ``step``; fields without a value are 0."""
        self._image = None
        num_tasks = -(-size // step)
        begin = len(self._words)
        values |= {
            "kind": kind, "first_task": self._num_tasks, "needs": self._needs,
            "num_tasks": num_tasks, "step": step, "num_rows": self.num_rows,
        }  # fmt: skip
        words = [values.pop(name, 0) for name in _NAMES]
        assert not values, values
        for number, word in enumerate(words, begin):
            if isinstance(word, tuple):
                self._given.append((number, *word))
        self._words += [0 if isinstance(word, tuple) else word for word in words]
        self._num_tasks += num_tasks
        if len(self._words) > _MAX_WORDS:
            raise ValueError(f"Program: expected at most {_MAX_OPS} operations")

    def product(
        self, num_outputs: int, num_inputs: int, x: Address, x_row: int, weight: Address,
        bias: Address, out: Address, out_row: int, more: Address = 0, more_row: int = 0,
    ) -> None:  # fmt: skip
        """PRODUCT; row lengths in bytes; weight is contiguous."""
        step = self._step(num_outputs, num_inputs)
        self._add(PRODUCT, num_outputs, step, num_outputs=num_outputs, num_inputs=num_inputs,
                  x=x, x_row=x_row, weight=weight, bias=bias, out=out, out_row=out_row,
                  more=more, more_row=more_row)  # fmt: skip

    def across(
        self, num_outputs: int, num_inputs: int, x: Address, x_row: int, weight: Address,
        bias: Address, out: Address, out_row: int,
    ) -> None:  # fmt: skip
        """ACROSS; row lengths in bytes; weight is contiguous."""
        self._work += num_outputs * num_inputs
        even = -(-num_outputs // self.num_threads)
        step = 4 * LANES * max(1, min(_MAX_TASK, even) // (4 * LANES))
        self._add(ACROSS, num_outputs, step, num_outputs=num_outputs, num_inputs=num_inputs,
                  x=x, x_row=x_row, weight=weight, bias=bias, out=out, out_row=out_row)  # fmt: skip

    def gated(
        self, num_outputs: int, num_inputs: int, x: Address, x_row: int, weight: Address,
        bias: Address, weight2: Address, bias2: Address, out: Address, out2: Address,
        out_row: int,
    ) -> None:  # fmt: skip
        """GATED."""
        step = self._step(num_outputs, num_inputs)
        self._work += num_outputs * num_inputs
        self._add(GATED, num_outputs, step, num_outputs=num_outputs, num_inputs=num_inputs,
                  x=x, x_row=x_row, weight=weight, bias=bias, out=out, out_row=out_row,
                  weight2=weight2, bias2=bias2, out2=out2)  # fmt: skip

    def _step(self, num_outputs: int, num_inputs: int) -> int:
        """Outputs of a task: as many as the cache holds, less where threads then end together."""
        self._work += num_outputs * num_inputs
        tile = _TILE[1]
        even = -(-num_outputs // self.num_threads)
        most = max(1, min(_MAX_TASK, _TASK_BYTES // (4 * num_inputs), even) // tile)

        def longest(tiles: int) -> int:
            num_tasks = -(-num_outputs // (tiles * tile))
            return -(-num_tasks // self.num_threads) * tiles

        return tile * min(range(most, most // 2, -1), key=longest)

    def norm(
        self, size: int, x: Address, x_row: int, weight: Address, eps: int, out: Address,
        out_row: int,
    ) -> None:  # fmt: skip
        """NORM; ``eps`` as `bits_of` gives it."""
        self._add(NORM, self.num_rows, _NORM_ROWS, num_outputs=size, num_inputs=size, x=x,
                  x_row=x_row, weight=weight, out=out, out_row=out_row, eps=eps)  # fmt: skip

    def rope(
        self, num_heads: int, head_dim: int, out: Address, out_row: int, cos: Address,
        sin: Address, turn_row: int, weight: Address = 0, eps: int = 0,
    ) -> None:  # fmt: skip
        """ROPE."""
        self._add(ROPE, self.num_rows, _NORM_ROWS, num_outputs=num_heads * head_dim,
                  num_inputs=head_dim, x=cos, x_row=turn_row, weight=weight, out=out,
                  out_row=out_row, more=sin, more_row=turn_row, eps=eps)  # fmt: skip

    def run(self, **addresses: int) -> None:
        """Run it; the memory at all addresses must stay until it has run."""
        local = _local
        words, num_threads = local.words, self._threads()
        if self._image is None:
            self._image = (ctypes.c_int64 * len(self._words))(*self._words)
        ctypes.memmove(local.address, self._image, 8 * len(self._words))
        for number, name, num_bytes in self._given:
            words[number] = addresses[name] + num_bytes
        words[_HEAD_NUM_OPS] = len(self._words) // _WORDS - 1
        words[_HEAD_COUNTERS] = local.counters
        words[_MAX_WORDS] = words[_MAX_WORDS + 1] = 0
        run_kernel(kernel_address(make_program), local.address, num_threads)

    def place(self, *names: str, **addresses: int) -> PlacedProgram:
        """The program as it is now, with all addresses but those of ``names`` filled in."""
        return PlacedProgram(self._words, self._given, names, addresses, self._threads())

    def _threads(self) -> int:
        return 1 if self._work * (8 + self.num_rows) < _SMALL else self.num_threads


class PlacedProgram:
    """A program whose memory stays where it is; made by `Program.place`.

    One thread may run it at a time.
    """

    def __init__(
        self,
        words: list[int],
        given: list[tuple[int, str, int]],
        names: tuple[str, ...],
        addresses: dict[str, int],
        num_threads: int,
    ) -> None:
        size = len(words)
        self._words = (ctypes.c_int64 * (size + 2))(*words)
        self._address = ctypes.addressof(self._words)
        self._words[_HEAD_NUM_OPS] = size // _WORDS - 1
        self._words[_HEAD_COUNTERS] = self._address + 8 * size
        self._counters = slice(size, size + 2)
        self._open = []  # (word, which of the addresses, bytes to add)
        for number, name, num_bytes in given:
            if name in names:
                self._open.append((number, names.index(name), num_bytes))
            else:
                self._words[number] = addresses[name] + num_bytes
        self._num_threads = num_threads
        self._kernel = kernel_address(make_program)

    def run(self, *addresses: int) -> None:
        """Run it; ``addresses`` in the order of the names that were left open."""
        words = self._words
        for number, which, num_bytes in self._open:
            words[number] = addresses[which] + num_bytes
        words[self._counters] = 0, 0
        run_kernel(self._kernel, self._address, self._num_threads)


def bits_of(value: float) -> int:
    """A float64's bits, as a program's words hold them."""
    return int(np.float64(value).view(np.int64))


@lru_cache(256)
def _one_product(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
    lies_across: bool,
    num_threads: int,
) -> Program:
    program = Program(num_rows, num_threads)
    add = program.across if lies_across else program.product
    add(
        num_outputs, num_inputs, ("x", 0), 4 * num_inputs, ("weight", 0),
        ("bias", 0) if has_bias else 0, ("out", 0), 4 * num_outputs,
    )  # fmt: skip
    return program


def multiply(
    x: int,
    weight: int,
    bias: int,
    out: int,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    num_threads: int,
    *,
    lies_across: bool = False,
) -> None:
    """Set ``out`` to x weight^T (+ bias).

    Args:
        x, weight, bias, out: addresses of contiguous float32 [num_rows, num_inputs],
            [num_outputs, num_inputs], [num_outputs] (0: none) and [num_rows, num_outputs].
        num_threads: of them the caller's is one.
        lies_across: the weights lie as [num_inputs, num_outputs] instead.
    """
    program = _one_product(num_rows, num_outputs, num_inputs, bias != 0, lies_across, num_threads)
    program.run(x=x, weight=weight, bias=bias, out=out)
