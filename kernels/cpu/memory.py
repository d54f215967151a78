"""Numbers in memory, by address: what compiled functions read, write and count with."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from radixkv_kernels.compile_cache import compile_helper
from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.simd import LANES


def _scalar_reader(kind: Any, numba_type: Any, size: int) -> Any:
    @intrinsic
    def read(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            offset = b.mul(args[1], ir.Constant(simd.I64, size))
            return simd.load(b, simd.pointer(b, args[0]), offset, kind)

        return numba_type(types.int64, types.int64), codegen

    return read


def _scalar_writer(numba_type: Any, size: int) -> Any:
    @intrinsic
    def write(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            offset = b.mul(args[1], ir.Constant(simd.I64, size))
            simd.store(b, args[2], simd.pointer(b, args[0]), offset)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return write


get_i32 = _scalar_reader(simd.I32, types.int32, 4)
get_i64 = _scalar_reader(simd.I64, types.int64, 8)
get_f32 = _scalar_reader(simd.F32, types.float32, 4)
put_i32 = _scalar_writer(types.int32, 4)
put_i64 = _scalar_writer(types.int64, 8)
put_f32 = _scalar_writer(types.float32, 4)


@intrinsic
def fetch_add(typingctx: Any, address: Any, index: Any) -> Any:
    """Add 1 to the int64 at address[index] atomically; what it was before."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        place = b.inttoptr(
            b.add(args[0], b.mul(args[1], ir.Constant(simd.I64, 8))), simd.I64.as_pointer()
        )
        return b.atomic_rmw("add", place, ir.Constant(simd.I64, 1), "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def add_to(typingctx: Any, address: Any, index: Any, number: Any) -> Any:
    """Add a number to the int64 at address[index] atomically."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        place = b.inttoptr(
            b.add(args[0], b.mul(args[1], ir.Constant(simd.I64, 8))), simd.I64.as_pointer()
        )
        b.atomic_rmw("add", place, args[2], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def ask_for(typingctx: Any, address: Any):
    """Prefetch the cache line at an address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        simd.prefetch(b, simd.pointer(b, args[0]), 0)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@compile_helper
def copy_words(source, target, num):  # type: ignore[no-untyped-def]
    """target[:num] = source[:num], 8 bytes each."""
    for i in range(num):
        put_i64(target, i, get_i64(source, i))


@compile_helper
def clear_around(row, low, high):  # type: ignore[no-untyped-def]
    """Zero what lies before ``low`` and after ``high`` in the vectors that hold row[:high].

    Old scratch may hold NaN, which not even a weight of 0 would undo.
    """
    for i in range(min(low, high)):
        put_f32(row, i, np.float32(0.0))
    for i in range(max(high, 0), (high + LANES - 1) // LANES * LANES):
        put_f32(row, i, np.float32(0.0))


@compile_helper
def put_steps(target, first, step, num):  # type: ignore[no-untyped-def]
    """target[:num] = first, first + step, ...; 8 bytes each."""
    for i in range(num):
        put_i64(target, i, first + i * step)
