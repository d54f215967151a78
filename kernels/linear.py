"""Products of activations with the plain weights of a linear layer, compiled by Numba.

The weights are read where they lie, ``[outputs, inputs]`` as the checkpoint has them: they are
held once, and a step that decodes one sequence takes the time that memory needs to give them.
An output element is summed lane by lane over the inputs, then over the lanes, whatever the
number of rows, the tile or the thread: a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels import cpu
from radixkv_kernels.cpu import LANES, _fetch_add

_I1, _I32, _I64, _F32 = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VF = ir.VectorType(_F32, LANES)
_TILE = (4, 6) if LANES == 16 else (2, 4)  # rows, outputs: their sums fill the registers
_TASK_BYTES = 2**18  # of weights: they stay in the second-level cache while the rows pass by
_MAX_TASK = 64  # outputs
_SMALL = 2**20  # weights times rows (+ 8): below, waking a second thread takes longer
_ROW_BLOCK_BYTES = 2**17  # of input rows that stay in that cache, too

_FIELDS = ("x", "weight", "bias", "out", "num_rows", "num_outputs", "num_inputs", "task_outputs",
           "counter")  # fmt: skip
_ARGS = np.dtype([(name, "i8") for name in _FIELDS])
_SIGNATURE = types.void(types.CPointer(numba.from_dtype(_ARGS)))


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _tail(b: Any, pointer: Any, offset: Any, count: Any) -> Any:
    """The first ``count`` floats at ``pointer`` plus ``offset`` bytes; the other lanes are 0."""
    lanes = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
    mask = b.icmp_signed("<", lanes, cpu._splat(b, b.trunc(count, _I32)))
    place = b.bitcast(b.gep(pointer, [offset]), _VF.as_pointer())
    kind = ir.FunctionType(_VF, [_VF.as_pointer(), _I32, ir.VectorType(_I1, LANES), _VF])
    function = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return b.call(function, [place, ir.Constant(_I32, 4), mask, cpu._const(0.0)])


@intrinsic
def _multiply_block(
    typingctx: Any,
    num_inputs: Any,
    num_rows: Any,
    num_outputs: Any,
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    out_row: Any,
):
    """out[r, n] = x[r, :] . weight[n, :] (+ bias[n] unless its address is 0)."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        num_inputs, num_rows, num_outputs, x, weight, bias, out, out_row = args
        line = b.mul(num_inputs, _number(4))
        num_whole = b.sdiv(num_inputs, _number(LANES))
        num_left = b.srem(num_inputs, _number(LANES))
        has_tail = b.icmp_signed("!=", num_left, _number(0))
        has_bias = b.icmp_signed("!=", bias, _number(0))

        def lines(address: Any, first: Any, count: int) -> list[Any]:
            places = [b.mul(b.add(first, _number(i)), line) for i in range(count)]
            return [cpu._pointer(b, b.add(address, place)) for place in places]

        def tile(row: Any, output: Any, rows: int, outputs: int) -> None:
            x_rows, w_rows = lines(x, row, rows), lines(weight, output, outputs)
            cells = [(r, n) for r in range(rows) for n in range(outputs)]
            sums = {cell: cgutils.alloca_once(b, _VF) for cell in cells}
            for place in sums.values():
                b.store(cpu._const(0.0), place)

            def add(read: Callable[[Any], Any]) -> None:
                values = [read(w_rows[n]) for n in range(outputs)]
                for r in range(rows):
                    factor = read(x_rows[r])
                    for n in range(outputs):
                        place = sums[r, n]
                        b.store(cpu._fma(b, factor, values[n], b.load(place)), place)

            with cgutils.for_range(b, num_whole) as loop:
                offset = b.mul(loop.index, _number(4 * LANES))
                add(lambda pointer: cpu._load(b, pointer, offset, _VF))
            with b.if_then(has_tail):
                end = b.mul(num_whole, _number(4 * LANES))
                add(lambda pointer: _tail(b, pointer, end, num_left))
            column = b.mul(output, _number(4))
            for (r, n), place in sums.items():
                total = cgutils.alloca_once(b, _F32)
                b.store(cpu._fold(b, b.load(place), cpu._add), total)
                with b.if_then(has_bias):
                    value = cpu._load(b, cpu._pointer(b, b.add(bias, column)), 4 * n, _F32)
                    b.store(b.fadd(b.load(total), value), total)
                target = b.add(b.add(out, column), b.mul(out_row, b.add(row, _number(r))))
                cpu._store(b, b.load(total), cpu._pointer(b, target), 4 * n)

        def cover(count: Any, size: int, body: Callable[[Any, int], None]) -> None:
            """Call body(first, how many) for whole pieces of ``size``, then one by one."""
            done = b.mul(b.sdiv(count, _number(size)), _number(size))
            with cgutils.for_range(b, b.sdiv(count, _number(size))) as loop:
                body(b.mul(loop.index, _number(size)), size)
            with cgutils.for_range(b, b.sub(count, done)) as loop:
                body(b.add(done, loop.index), 1)

        def multiply(output: Any, outputs: int) -> None:
            cover(num_rows, _TILE[0], lambda row, rows: tile(row, output, rows, outputs))

        cover(num_outputs, _TILE[1], multiply)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def make_linear() -> Any:
    """The kernel: threads take blocks of outputs, and multiply all rows with each."""

    def linear(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        line, out_row = 4 * args.num_inputs, 4 * args.num_outputs
        row_block = max(8, _ROW_BLOCK_BYTES // line // 8 * 8)
        while True:
            output = _fetch_add(args.counter, 0) * args.task_outputs
            if output >= args.num_outputs:
                break
            for row in range(0, args.num_rows, row_block):
                _multiply_block(
                    args.num_inputs,
                    min(row_block, args.num_rows - row),
                    min(args.task_outputs, args.num_outputs - output),
                    args.x + row * line,
                    args.weight + output * line,
                    args.bias + 4 * output if args.bias != 0 else 0,
                    args.out + row * out_row + 4 * output,
                    out_row,
                )

    return cfunc(_SIGNATURE, cache=True, error_model="numpy")(linear)


class _Local(threading.local):
    def __init__(self) -> None:
        self.arguments = (ctypes.c_int64 * (len(_FIELDS) + 1))()
        self.address = ctypes.addressof(self.arguments)
        self.counter = self.address + 8 * len(_FIELDS)


_local = _Local()


def multiply(
    x: int,
    weight: int,
    bias: int,
    out: int,
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    num_threads: int,
) -> None:
    """Set ``out`` to x weight^T (+ bias).

    Args:
        x, weight, bias, out: addresses of contiguous float32 [num_rows, num_inputs],
            [num_outputs, num_inputs], [num_outputs] (0: none) and [num_rows, num_outputs].
        num_threads: of them the caller's is one.
    """
    if num_outputs * num_inputs * (8 + num_rows) < _SMALL:
        num_threads = 1
    fits = min(_MAX_TASK, _TASK_BYTES // (4 * num_inputs), -(-num_outputs // num_threads))
    task = max(1, fits // _TILE[1]) * _TILE[1]
    local = _local
    local.arguments[:] = [
        x, weight, bias, out, num_rows, num_outputs, num_inputs, task, local.counter, 0
    ]  # fmt: skip
    cpu._run_at(cpu._kernel(make_linear), local.address, num_threads)
