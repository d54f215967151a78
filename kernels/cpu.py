"""CPU kernels over quantized KV pages, compiled by Numba: write, decode, extend.

Page layout: ``radixkv.quant``. Nothing here knows torch modules or radixkv: the callers pass
addresses and sizes in one `ARGS` record, and a kernel is one C function ``void(ARGS*)`` that
any number of threads may run at once: each takes the next task from an atomic counter.

How it is built. Row formats and head sizes are compile-time numbers, so one kernel is compiled
per (formats, head sizes, query group) and cached on disk. The inner loops are small *intrinsics*
that emit vector code themselves (`_read` turns 16 stored codes into 16 floats in registers); the
walk over sequences, splits and pages around them is plain Numba. Vectors are ``LANES`` floats:
16 with AVX-512, 8 with AVX2, 4 elsewhere (NEON).

    write    check all rows for NaN and Inf; rotate, quantize and scatter each row in registers
    decode   one query token a sequence: a task is (sequence, KV head, split of SPLIT tokens);
             scores of the whole split, one softmax, weighted sum; the last task to finish merges
    extend   several query tokens, or many query heads a KV head: a task is (sequence, KV head,
             tile of queries); K and V tiles are dequantized once, matrix products, online softmax

Splits and tiles lie at fixed token positions, so that a sequence's result does not depend on
what else is in the batch, nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.compile_cache import compile_callback

INT8, FP8, FP8_E5M2, INT4, FLOAT32, FLOAT16, BFLOAT16 = range(7)
CODE_BITS = (8, 8, 8, 4, 32, 16, 16)
FORMAT_NAMES = ("int8", "fp8", "fp8_e5m2", "int4", "float32", "float16", "bfloat16")
LARGEST_CODE = {INT8: 127.0, FP8: 448.0, FP8_E5M2: 57344.0}
MIN_SCALE = 2.0**-100  # as radixkv.quant
INT4_GROUP = 32  # elements that share an int4 scale, at most; as radixkv.quant
INT4_SEARCH = (1.0, 0.93, 0.86, 0.8)  # as radixkv.quant
MAX_HEAD_DIM = 1024
MAX_DECODE_GROUP = 8  # more query heads a KV head than this pay as matrix products
SPLIT = 512  # tokens a decode task reads
CHUNK_BYTES = 8192  # of rows that passes over the columns find in the first-level cache
MAX_CHUNK = 128  # tokens
PREFETCH_TOKENS = 32  # how far ahead of the arithmetic shared pages are asked for
ROW_QUERIES = 16  # query tokens that take turns over a split while it is in cache
TILE = 64  # tokens dequantized at a time in extend
TILE_ROWS = 128  # query rows (tokens x heads) an extend task holds at most

_CPU = llvmlite.binding.get_host_cpu_features()
_WIDE = bool(_CPU.get("avx512f"))
LANES = 16 if _WIDE else 8 if _CPU.get("avx") else 4
_SUMS = 4 if LANES == 8 else LANES  # sums over lanes that are found at once
_ACCUMULATORS = 16 if _WIDE or LANES == 4 else 8
_PAIRS = bool(_CPU.get("avx512bw") if _WIDE else _CPU.get("avx2"))
"""Whether there is an instruction that multiplies pairs of int16 and adds them up in int32."""
_MAX_PAIR_DIM = 512  # 127 * 32767 * 512 just fits into int32; SPLIT rests on it as well
_DECODE_LINE = 4 * (SPLIT + 4 * LANES)  # a row of scores: a block may end beyond the split
_TILE_M = 8 if _WIDE or LANES == 4 else 4  # rows of one register tile of a matrix product

_TANH_TERMS = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835)  # of tanh(x) / x, in x * x
_TANH_NEAR = 0.25  # up to here they are all of a float32
_EXP_TERMS = (0.49999994, 0.16666521, 0.041668389, 0.0083687166, 0.0013814599)

_I1, _I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
_F16, _F32 = ir.HalfType(), ir.FloatType()
_VF = ir.VectorType(_F32, LANES)
_VI = ir.VectorType(_I32, LANES)
_INF = float("inf")

_PAGE_FIELDS = (
    "k_pages",
    "v_pages",
    "k_scale",
    "v_scale",
    "k_page",
    "k_head",
    "v_page",
    "v_head",
    "ks_page",
    "ks_head",
    "vs_page",
    "vs_head",
    "num_pages",
    "page_size",
    "num_kv_heads",
)
_CALL_FIELDS = (
    "q",
    "out",
    "q_token",
    "q_head",
    "out_token",
    "out_head",
    *_PAGE_FIELDS,
    "sinks",
    "slopes",
    "window",
    "scratch",
    "partials",
    "counters",
)
_STEP_FIELDS = (
    "page_table",
    "table_row",
    "seq_lens",
    "cu_seqlens_q",
    "tasks",
    "num_tasks",
    "num_partials",
    "group",
    "scratch_bytes",
    "rotate_k",
    "rotate_v",
    "tile_queries",
    "partials_offset",
    "queries",
    "most_rows",
)
_CALL = struct.Struct(f"={len(_CALL_FIELDS)}q2f")
ARGS = np.dtype(
    [(name, "i8") for name in _CALL_FIELDS]
    + [("scale", "f4"), ("softcap", "f4")]
    + [(name, "i8") for name in _STEP_FIELDS]
)
"""What attention is told: addresses (bytes), strides (q, out, rows: elements; pages: bytes), sizes.

First (`_CALL`) what differs from layer to layer, then what a step's layers have in common.

``tasks`` is [num_tasks, 5] int32: sequence, first query, split, number of splits, number of
its first split among all partial results (-1: the task takes all splits by itself).

``counters`` is int64: [0] threads begun, [1] next task, [2] a bad page or slot (+ 1 if not
negative), [4] tokens read (of each KV head), then from COUNTERS on one a (partial result, KV head)
for the merge.

For shared splits ``tasks`` is [num_tasks, 5]: sequence whose pages are read, first split, split
after the last, first query, number of queries (``most_rows`` query rows at most); ``queries`` is
[num_queries, 3] int32: row in q, position, number of its first split among all partial results;
a task's positions ascend.
"""
_ARGS_TYPE = numba.from_dtype(ARGS)
_SIGNATURE = types.void(types.CPointer(_ARGS_TYPE))
COUNTERS = 8  # the merge counters begin here

_WRITE_FIELDS = (
    "k_rows",
    "k_rows_token",
    "k_rows_head",
    "v_rows",
    "v_rows_token",
    "v_rows_head",
    "slots",
    "num_tokens",
    "num_tasks",
    "rotate_k",
    "rotate_v",
    "k_center",
    "k_center_head",
    *_PAGE_FIELDS,
    "checks",
    "writes",
    "counters",
)
WRITE_ARGS = np.dtype([(name, "i8") for name in _WRITE_FIELDS])
"""What the write kernel is told, as `ARGS`; ``k_center`` is float32, its stride in bytes.

``checks`` and ``writes``: which of its two halves run. ``counters`` is int64: [0] next task to
check, [1] next task to write, [2] a bad slot (+ 1 if not negative), [3] whether a row is not
finite.
"""
_WRITE_SIGNATURE = types.void(types.CPointer(numba.from_dtype(WRITE_ARGS)))
WRITE_TOKENS = 64  # of a task


# ---------------------------------------------------------------- emitting vector code


def _splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    kind = ir.VectorType(value.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _const(value: float, kind: Any = _VF) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _shuffle(b: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))


def _call(b: Any, name: str, kind: Any, *operands: Any) -> Any:
    """Call an LLVM intrinsic whose operands and result are of one type."""
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    bits = {_F32: "f32", _I32: "i32", _F16: "f16"}[scalar]
    suffix = f"v{kind.count}{bits}" if isinstance(kind, ir.VectorType) else bits
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(kind, [kind] * len(operands)), f"llvm.{name}.{suffix}"
    )
    return b.call(function, operands)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(b, "fmuladd", x.type, x, y, z)


def _max(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _min(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _I8.as_pointer())


def _load(b: Any, pointer: Any, offset: Any, kind: Any) -> Any:
    """Load ``kind`` from ``pointer`` plus ``offset`` bytes (an int or an i64 value)."""
    offset = ir.Constant(_I64, offset) if isinstance(offset, int) else offset
    place = b.gep(pointer, [offset])
    return b.load(b.bitcast(place, kind.as_pointer()), align=1)


def _store(b: Any, value: Any, pointer: Any, offset: Any) -> None:
    offset = ir.Constant(_I64, offset) if isinstance(offset, int) else offset
    place = b.gep(pointer, [offset])
    b.store(value, b.bitcast(place, value.type.as_pointer()), align=1)


def _prefetch(b: Any, pointer: Any, offset: Any) -> None:
    """Ask for a cache line that will be read soon; any address is allowed."""
    offset = ir.Constant(_I64, offset) if isinstance(offset, int) else offset
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(_I32, n) for n in (0, 3, 1))
    b.call(function, [b.gep(pointer, [offset]), read, keep, data])


def _widen(b: Any, vector: Any) -> Any:
    """Pad a short vector with zeros to LANES."""
    count = vector.type.count
    if count == LANES:
        return vector
    zeros = ir.Constant(vector.type, [0] * count)
    return _shuffle(b, vector, zeros, [min(i, count) for i in range(LANES)])


def _narrow(b: Any, vector: Any, count: int) -> Any:
    if count == vector.type.count:
        return vector
    return _shuffle(b, vector, ir.Constant(vector.type, ir.Undefined), range(count))


def _load_floats(b: Any, pointer: Any, offset: Any, count: int = LANES) -> Any:
    return _widen(b, _load(b, pointer, offset, ir.VectorType(_F32, count)))


def _pieces(num: int) -> list[tuple[int, int]]:
    """(first, count) of the vectors that cover ``num`` elements."""
    return [(i, min(LANES, num - i)) for i in range(0, num, LANES)]


def int4_group_size(head_dim: int) -> int:
    """Elements of a row that share a scale (as radixkv.quant)."""
    return next(size for size in range(INT4_GROUP, 1, -2) if head_dim % size == 0)


def num_scales(fmt: int, head_dim: int) -> int:
    """bfloat16 factors that a row of this format has."""
    if fmt == INT4:
        return head_dim // int4_group_size(head_dim)
    return 0 if fmt >= FLOAT32 else 1


def _row_bytes(fmt: int, head_dim: int) -> int:
    return head_dim * CODE_BITS[fmt] // 8


def _spans(fmt: int, head_dim: int) -> list[tuple[int, int]]:
    """(first element, count) of the vectors of a row, in the order in which they are read.

    int4 gives its low and its high halves by turns, as one load yields both.
    """
    if fmt != INT4:
        return _pieces(head_dim)
    half = head_dim // 2
    return [(first + part, count) for first, count in _pieces(half) for part in (0, half)]


def padded(fmt: int, head_dim: int) -> int:
    """Floats that a row takes as whole vectors in the order of ``_spans``."""
    return LANES * len(_spans(fmt, head_dim))


def _by_group(b: Any, first: int, count: int, group_size: int, values: Callable[[int], Any]) -> Any:
    """The vector whose lane i is ``values(group of element first + i)``."""
    groups = [min(first + i, first + count - 1) // group_size for i in range(LANES)]
    out = _splat(b, values(groups[0]))
    for group in sorted(set(groups[1:]) - {groups[0]}):
        lanes = ir.Constant(ir.VectorType(_I1, LANES), [int(g >= group) for g in groups])
        out = b.select(lanes, _splat(b, values(group)), out)
    return out


def _read(
    b: Any, fmt: int, head_dim: int, pointer: Any, scales: Any, index: int
) -> list[tuple[int, Any]]:
    """Load the codes of one vector (int4: two) of a row as floats, padded lanes zero.

    int8, fp8 and fp8_e5m2 are not yet multiplied by the row's scale (fp8 by `_factor` neither);
    int4 is (``scales``: pointer to the row's float32 scales).
    """
    if fmt == INT4:
        first, count = _pieces(head_dim // 2)[index]
        codes = _load(b, pointer, first, ir.VectorType(_I8, count))
        wide = b.zext(_widen(b, codes), _VI)
        size, out = int4_group_size(head_dim), []
        for part, bits in ((0, b.and_(wide, _const(15, _VI))), (1, b.lshr(wide, _const(4, _VI)))):
            start = first + part * (head_dim // 2)
            scale = _by_group(b, start, count, size, lambda g: _load(b, scales, 4 * g, _F32))
            real = b.fmul(b.sitofp(b.sub(bits, _const(8, _VI)), _VF), scale)
            if count < LANES:
                lanes = ir.Constant(
                    ir.VectorType(_I1, LANES), [int(i < count) for i in range(LANES)]
                )
                real = b.select(lanes, real, _const(0.0))
            out.append((2 * index + part, real))
        return out
    first, count = _pieces(head_dim)[index]
    if fmt == FLOAT32:
        return [(index, _load_floats(b, pointer, 4 * first, count))]
    if fmt in (FLOAT16, BFLOAT16):
        codes = _widen(b, _load(b, pointer, 2 * first, ir.VectorType(_I16, count)))
        if fmt == FLOAT16:
            return [(index, b.fpext(b.bitcast(codes, ir.VectorType(_F16, LANES)), _VF))]
        return [(index, b.bitcast(b.shl(b.zext(codes, _VI), _const(16, _VI)), _VF))]
    codes = _widen(b, _load(b, pointer, first, ir.VectorType(_I8, count)))
    if fmt == INT8:
        return [(index, b.sitofp(b.sext(codes, _VI), _VF))]
    # An 8-bit float becomes a float16 by a shift (e4m3 as value * 2^-8: see `_factor`), which
    # the hardware widens, subnormals too.
    kind = ir.VectorType(_I16, LANES)
    if fmt == FP8_E5M2:
        half = b.shl(b.zext(codes, kind), _const(8, kind))
    else:
        half = b.and_(b.shl(b.sext(codes, kind), _const(7, kind)), _const(-16385, kind))
    return [(index, b.fpext(b.bitcast(half, ir.VectorType(_F16, LANES)), _VF))]


def _factor(fmt: int) -> float:
    """What `_read`'s floats lack besides the row's scale."""
    return 256.0 if fmt == FP8 else 1.0


def _num_reads(fmt: int, head_dim: int) -> int:
    return len(_pieces(head_dim // 2 if fmt == INT4 else head_dim))


def _fold_each(b: Any, vectors: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """One vector whose lane n combines the lanes of ``vectors[n]`` (at most LANES), by halves."""
    count = 1 << (len(vectors) - 1).bit_length()
    vectors = vectors + [vectors[-1]] * (count - len(vectors))
    width = LANES
    while len(vectors) > 1:
        half, pairs, width = len(vectors) // 2, [], width // 2
        starts = range(0, LANES, 2 * width)
        low = [base + s + i for s in starts for base in (0, LANES) for i in range(width)]
        for n in range(half):
            x, y = vectors[n], vectors[n + half]
            high = [lane + width for lane in low]
            pairs.append(combine(b, _shuffle(b, x, y, low), _shuffle(b, x, y, high)))
        vectors = pairs
    total = vectors[0]
    stride = width
    while width > 1:
        width //= 2
        turned = [lane ^ width for lane in range(LANES)]
        total = combine(b, total, _shuffle(b, total, total, turned))
    return _shuffle(b, total, total, [min(n * stride, LANES - 1) for n in range(LANES)])


def _add_lanes(b: Any, vectors: list[Any]) -> Any:
    """One int32 vector of _SUMS lanes, lane n the sum of all lanes of ``vectors[n]``."""
    if LANES != 8:
        return _fold_each(b, vectors, _add_integers)
    # Not across the halves of a register, which takes some processors of 256 bits eight steps.
    halves = []
    for vector in vectors:
        low, high = (_shuffle(b, vector, vector, range(n, n + 4)) for n in (0, 4))
        halves.append(b.add(low, high))
    halves += [halves[-1]] * (_SUMS - len(halves))
    pairs = [
        b.add(_shuffle(b, x, y, (0, 4, 1, 5)), _shuffle(b, x, y, (2, 6, 3, 7)))
        for x, y in (halves[:2], halves[2:])
    ]
    return b.add(_shuffle(b, *pairs, (0, 1, 4, 5)), _shuffle(b, *pairs, (2, 3, 6, 7)))


def _fold(b: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine all lanes into a scalar."""
    width = LANES
    while width > 1:
        width //= 2
        vector = combine(b, vector, _shuffle(b, vector, vector, [i ^ width for i in range(LANES)]))
    return b.extract_element(vector, ir.Constant(_I32, 0))


def _add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y)


def _add_integers(b: Any, x: Any, y: Any) -> Any:
    return b.add(x, y)


def _round_to_integers(b: Any, x: Any) -> Any:
    """int32 lanes, half to even; in range."""
    if LANES != 8:
        return b.fptosi(_call(b, "rint", _VF, x), _VI)
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(_VI, [_VF]), "llvm.x86.avx.cvt.ps2dq.256"
    )
    return b.call(function, [x])


def _exp(b: Any, x: Any) -> Any:
    """Raise e to x <= 0, within 2 units in the last place; exactly 0 below -87; NaN stays NaN.

    e**x = 2**n * e**r with |r| <= log(2) / 2, and e**r = 1 + r + r**2 * q(r): the q of degree 4
    whose relative error is least (3e-9), its terms in a tree, since a chain of them is slower.
    """
    kind, whole = x.type, ir.VectorType(_I32, x.type.count)
    clamped = _max(b, _const(-87.0, kind), x)  # in this order a NaN passes
    # Adding 1.5 * 2**23 rounds to an integer, which then stands in the lowest bits.
    shift = _const(1.5 * 2**23, kind)
    shifted = _fma(b, clamped, _const(math.log2(math.e), kind), shift)
    n = b.fsub(shifted, shift)
    r = _fma(b, n, _const(-0.693359375, kind), clamped)
    r = _fma(b, n, _const(2.12194440e-4, kind), r)
    q0, q1, q2, q3, q4 = (_const(c, kind) for c in _EXP_TERMS)
    square = b.fmul(r, r)
    high = _fma(b, q4, square, _fma(b, q3, r, q2))
    q = _fma(b, high, square, _fma(b, q1, r, q0))
    root = _fma(b, q, square, b.fadd(r, _const(1.0, kind)))
    bits = b.shl(b.bitcast(shifted, whole), _const(23, whole))
    power = b.bitcast(b.add(bits, _const(127 << 23, whole)), kind)
    real = b.fmul(root, power)
    return b.select(b.fcmp_ordered("<", x, _const(-87.0, kind)), _const(0.0, kind), real)


def _rotate_vectors(b: Any, vectors: list[Any], head_dim: int) -> list[Any]:
    """Multiply a row by radixkv.quant.hadamard(head_dim), as butterflies in registers."""
    size = head_dim & -head_dim
    stride = 1
    while stride < min(size, LANES):
        turned = [lane ^ stride for lane in range(LANES)]
        signs = ir.Constant(_VF, [-1.0 if lane & stride else 1.0 for lane in range(LANES)])
        vectors = [_fma(b, v, signs, _shuffle(b, v, v, turned)) for v in vectors]
        stride *= 2
    while stride < size:
        step, turned_vectors = stride // LANES, list(vectors)
        for i in range(len(vectors)):
            if not i & step:
                turned_vectors[i] = b.fadd(vectors[i], vectors[i + step])
                turned_vectors[i + step] = b.fsub(vectors[i], vectors[i + step])
        vectors, stride = turned_vectors, stride * 2
    return [b.fmul(v, _const(size**-0.5)) for v in vectors]


def _literal(value: Any) -> int:
    return int(value.literal_value)


def _round_to_bf16(b: Any, bits: Any) -> Any:
    """Round float32 bits (i32, scalar or vector) to bfloat16 bits, half to even."""
    one, kind = (1, bits.type) if not isinstance(bits.type, ir.VectorType) else (None, bits.type)

    def c(value: int) -> Any:
        return ir.Constant(kind, value) if one else _const(value, kind)

    odd = b.and_(b.lshr(bits, c(16)), c(1))
    return b.lshr(b.add(b.add(bits, c(0x7FFF)), odd), c(16))


# ---------------------------------------------------------------- intrinsics: scalars


def _scalar_reader(kind: Any, numba_type: Any, size: int) -> Any:
    @intrinsic
    def read(typingctx: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            offset = b.mul(args[1], ir.Constant(_I64, size))
            return _load(b, _pointer(b, args[0]), offset, kind)

        return numba_type(types.int64, types.int64), codegen

    return read


def _scalar_writer(numba_type: Any, size: int) -> Any:
    @intrinsic
    def write(typingctx: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            offset = b.mul(args[1], ir.Constant(_I64, size))
            _store(b, args[2], _pointer(b, args[0]), offset)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, numba_type), codegen

    return write


_get_i32 = _scalar_reader(_I32, types.int32, 4)
_get_i64 = _scalar_reader(_I64, types.int64, 8)
_get_f32 = _scalar_reader(_F32, types.float32, 4)
_put_i32 = _scalar_writer(types.int32, 4)
_put_i64 = _scalar_writer(types.int64, 8)
_put_f32 = _scalar_writer(types.float32, 4)


@intrinsic
def _fetch_add(typingctx: Any, address: Any, index: Any) -> Any:
    """Add 1 to the int64 at address[index] atomically; what it was before."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        place = b.inttoptr(b.add(args[0], b.mul(args[1], ir.Constant(_I64, 8))), _I64.as_pointer())
        return b.atomic_rmw("add", place, ir.Constant(_I64, 1), "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _count(typingctx: Any, address: Any, index: Any, number: Any) -> Any:
    """Add a number to the int64 at address[index] atomically."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        place = b.inttoptr(b.add(args[0], b.mul(args[1], ir.Constant(_I64, 8))), _I64.as_pointer())
        b.atomic_rmw("add", place, args[2], "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


# ---------------------------------------------------------------- intrinsics: vectors


@intrinsic(prefer_literal=True)
def _load_query(typingctx: Any, head_dim: Any, source: Any, target: Any, scale: Any, rotate: Any):
    """target[:] = source[:] * scale, rotated if asked; float32, target padded with zeros."""
    dim = _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = _pointer(b, args[1]), _pointer(b, args[2])
        scale = _splat(b, args[3])
        plain = [b.fmul(_load_floats(b, source, 4 * first, n), scale) for first, n in _pieces(dim)]
        with b.if_else(b.icmp_signed("!=", args[4], ir.Constant(_I64, 0))) as (then, otherwise):
            with then:
                for i, vector in enumerate(_rotate_vectors(b, plain, dim)):
                    _store(b, vector, target, 4 * LANES * i)
            with otherwise:
                for i, vector in enumerate(plain):
                    _store(b, vector, target, 4 * LANES * i)
        return context.get_dummy_value()

    return types.void(head_dim, types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic(prefer_literal=True)
def _store_row(typingctx: Any, head_dim: Any, source: Any, target: Any, scale: Any, rotate: Any):
    """target[:head_dim] = source[:] * scale, rotated if asked; source is padded with zeros."""
    dim = _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = _pointer(b, args[1]), _pointer(b, args[2])
        scale = _splat(b, args[3])
        plain = [b.fmul(_load_floats(b, source, 4 * first, n), scale) for first, n in _pieces(dim)]
        with b.if_else(b.icmp_signed("!=", args[4], ir.Constant(_I64, 0))) as (then, otherwise):
            with then:
                rows = _rotate_vectors(b, plain, dim)
                for (first, n), vector in zip(_pieces(dim), rows, strict=True):
                    _store(b, _narrow(b, vector, n), target, 4 * first)
            with otherwise:
                for (first, n), vector in zip(_pieces(dim), plain, strict=True):
                    _store(b, _narrow(b, vector, n), target, 4 * first)
        return context.get_dummy_value()

    return types.void(head_dim, types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic(prefer_literal=True)
def _to_read_order(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """Copy a float32 row from its natural order to that of `_spans`, padded with zeros."""
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = _pointer(b, args[2]), _pointer(b, args[3])
        for i, (first, count) in enumerate(_spans(f, dim)):
            _store(b, _load_floats(b, source, 4 * first, count), target, 4 * LANES * i)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def _to_natural_order(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """The inverse of `_to_read_order`; writes head_dim floats."""
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = _pointer(b, args[2]), _pointer(b, args[3])
        for i, (first, count) in enumerate(_spans(f, dim)):
            vector = _load_floats(b, source, 4 * LANES * i)
            _store(b, _narrow(b, vector, count), target, 4 * first)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64), codegen


def _query_chunks(group: int) -> list[tuple[int, int]]:
    """(first, count) of the query heads that share one pass over K or V."""
    most = _ACCUMULATORS // 2  # each needs sums for two keys at least
    return [(i, min(most, group - i)) for i in range(0, group, most)]


def _keys_per_block(group: int) -> int:
    """Keys scored at once for ``group`` query heads."""
    most = max(count for _, count in _query_chunks(group))
    return max(2, min(8, LANES // 2, _ACCUMULATORS // (1 << (most - 1).bit_length())))


def _row_at(b: Any, places: Any, index: Any, ahead: int = 0) -> Any:
    """The row whose address stands ``ahead`` places after ``index``."""
    at = b.mul(index, ir.Constant(_I64, 8))
    return _pointer(b, _load(b, places, b.add(at, ir.Constant(_I64, 8 * ahead)), _I64))


def _chunk(k_row_bytes: int, v_row_bytes: int) -> int:
    """Tokens whose rows stay in the first-level cache together, and how far rows are asked for."""
    return max(2, min(MAX_CHUNK, CHUNK_BYTES // max(k_row_bytes, v_row_bytes) // 2 * 2))


def _ask_share(
    b: Any, places: Any, rows: list[Any], row_bytes: int, ahead: int, share: tuple[int, int]
) -> None:
    """Ask for a share (its number, how many there are) of what lies ``ahead`` of ``rows``."""
    lines = [(row, line) for line in range(-(-row_bytes // 64)) for row in rows]
    number, size = share[0], -(-len(lines) // share[1])
    for row, line in lines[number * size : (number + 1) * size]:
        _prefetch(b, _row_at(b, places, row, ahead), 64 * line)


def _each_block(
    b: Any,
    places: Any,
    num: Any,
    keys: int,
    row_bytes: int,
    ahead: int,
    emit: Callable[[Any, list[Any]], None],
) -> None:
    """Emit a loop over ``num`` rows, ``keys`` at a time: emit(number of the first, pointers).

    Rows ``ahead`` places further on are asked for, as they will be read soon. After the last
    address come ``keys`` - 1 more that can be read, and then ``ahead`` for this.
    """
    places = _pointer(b, places)
    blocks = b.sdiv(b.add(num, ir.Constant(_I64, keys - 1)), ir.Constant(_I64, keys))
    with cgutils.for_range(b, blocks) as loop:
        first = b.mul(loop.index, ir.Constant(_I64, keys))
        for i in range(keys):
            row = _row_at(b, places, first, ahead + i)
            for line in range(-(-row_bytes // 64)):
                _prefetch(b, row, 64 * line)
        emit(first, [_row_at(b, places, first, i) for i in range(keys)])


@intrinsic(prefer_literal=True)
def _score_keys(
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

    q: float32 [group, padded], in read order. places: the rows' addresses, see `_each_block`.
    out[g] gets the floats, out_bytes apart; those of the last block may go beyond ``num``.
    """
    f, dim, num_queries = _literal(fmt), _literal(head_dim), _literal(group)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, places, num, scales, scales_bytes, out, out_bytes = args[4:]
        q, keys, q_bytes = _pointer(b, q), _keys_per_block(num_queries), 4 * padded(f, dim)

        def score(first: Any, pointers: list[Any]) -> None:
            factors = [
                _pointer(b, b.add(scales, b.mul(b.add(first, ir.Constant(_I64, i)), scales_bytes)))
                for i in range(keys)
            ]
            target = _pointer(b, b.add(out, b.mul(first, ir.Constant(_I64, 4))))
            for start, count in _query_chunks(num_queries):
                score_chunk(start, count, pointers, factors, target)

        def score_chunk(
            start: int, count: int, pointers: list[Any], factors: list[Any], out: Any
        ) -> None:
            sums: list[Any] = [None] * (count * keys)
            for step in range(_num_reads(f, dim)):
                read = [_read(b, f, dim, pointers[i], factors[i], step) for i in range(keys)]
                for part in range(len(read[0])):
                    vector = read[0][part][0]
                    for g in range(count):
                        offset = (start + g) * q_bytes + 4 * LANES * vector
                        query = _load_floats(b, q, offset)
                        for i in range(keys):
                            n, key = g * keys + i, read[i][part][1]
                            sums[n] = (
                                b.fmul(key, query)
                                if sums[n] is None
                                else _fma(b, key, query, sums[n])
                            )
            per_batch = max(1, LANES // keys)
            for first in range(0, count, per_batch):
                batch = sums[first * keys : (first + per_batch) * keys]
                totals = _fold_each(b, batch, _add)
                for g in range(len(batch) // keys):
                    lanes = range(g * keys, (g + 1) * keys)
                    block = _shuffle(b, totals, totals, lanes)
                    offset = b.mul(ir.Constant(_I64, start + first + g), out_bytes)
                    _store(b, block, out, offset)

        _each_block(b, places, num, keys, _row_bytes(f, dim), _literal(ahead), score)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(fmt, head_dim, group, ahead, *[i64] * 7), codegen


@intrinsic(prefer_literal=True)
def _add_values(
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
    f, dim, num_queries = _literal(fmt), _literal(head_dim), _literal(group)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, weights, weights_bytes, places, num, scales, scales_bytes = args[4:]
        acc, places = _pointer(b, acc), _pointer(b, places)
        acc_bytes, width = 4 * padded(f, dim), 2 if f == INT4 else 1
        row_bytes, reads, passes = _row_bytes(f, dim), _num_reads(f, dim), []
        for start, count in _query_chunks(num_queries):
            block = max(1, _ACCUMULATORS // (width * (1 << (count - 1).bit_length())))
            passes += [
                (start, count, range(begin, min(begin + block, reads)))
                for begin in range(0, reads, block)
            ]
        for share, (start, count, steps) in enumerate(passes):
            vectors = [width * s + part for s in steps for part in range(width)]
            sums = {(g, v): cgutils.alloca_once(b, _VF) for g in range(count) for v in vectors}
            for (g, v), place in sums.items():
                offset = (start + g) * acc_bytes + 4 * LANES * v
                b.store(_load_floats(b, acc, offset), place)
            with cgutils.for_range(b, num) as loop:
                number = loop.index
                row = _row_at(b, places, number)
                _ask_share(b, places, [number], row_bytes, _literal(ahead), (share, len(passes)))
                scale = _pointer(b, b.add(scales, b.mul(number, scales_bytes)))
                weight = []
                for g in range(count):
                    line = b.mul(ir.Constant(_I64, start + g), weights_bytes)
                    place = b.add(line, b.mul(number, ir.Constant(_I64, 4)))
                    w = _load(b, _pointer(b, b.add(weights, place)), 0, _F32)
                    weight.append(_splat(b, w))
                for s in steps:
                    for v, value in _read(b, f, dim, row, scale, s):
                        for g in range(count):
                            old = b.load(sums[g, v])
                            b.store(_fma(b, weight[g], value, old), sums[g, v])
            for (g, v), place in sums.items():
                offset = (start + g) * acc_bytes + 4 * LANES * v
                _store(b, b.load(place), acc, offset)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(fmt, head_dim, group, ahead, *[i64] * 7), codegen


def _pair_pieces(num: int) -> list[tuple[int, int]]:
    """(first, count) of the int16 vectors that cover ``num`` elements."""
    return [(i, min(2 * LANES, num - i)) for i in range(0, num, 2 * LANES)]


def _word_spans(fmt: int, head_dim: int) -> list[tuple[int, int, int]]:
    """(first element, count, scale group) of the int16 vectors of a row, in reading order."""
    if fmt != INT4:
        return [(first, count, 0) for first, count in _pair_pieces(head_dim)]
    half, size = head_dim // 2, int4_group_size(head_dim)
    return [
        (first + part, count, (first + part) // size)
        for first, count in _pair_pieces(half)
        for part in (0, half)
    ]


def extends_in_rows(formats: tuple[int, int]) -> bool:
    """Whether several new tokens run through the decode kernel, bit for bit as single ones do.

    So it is where decode computes in integers, whose rounding of queries and weights matrix
    products in floats would not repeat: what is cached must not change a result.
    """
    return INT8 in formats or INT4 in formats


def num_groups(fmt: int, head_dim: int) -> int:
    """Scale groups of a row that is read in integers."""
    return head_dim // int4_group_size(head_dim) if fmt == INT4 else 1


def in_pairs(fmt: int, head_dim: int) -> bool:
    """Whether decode reads rows of this format in integers, without making floats of them.

    The query row (and the weights of a split) become int16 with one scale, 2**-16 of the largest
    at most away from the real ones: far below int8's own 2**-8.
    """
    if not _PAIRS or fmt not in (INT8, INT4) or head_dim > _MAX_PAIR_DIM:
        return False
    if fmt == INT8:
        return True
    size = int4_group_size(head_dim)
    return all(
        (first + count - 1) // size == group for first, count, group in _word_spans(fmt, head_dim)
    )


def _halves(fmt: int) -> int:
    """Vectors of `_word_spans` that one load of stored bytes yields."""
    return 2 if fmt == INT4 else 1


def unpacked_bytes(head_dim: int) -> int:
    """Bytes of an int4 row as `_unpack_rows` lays it out: int8 in the order of `_word_spans`."""
    return 2 * LANES * len(_word_spans(INT4, head_dim))


def _words(b: Any, fmt: int, codes: Any) -> list[Any]:
    """2 * LANES stored bytes as int16 vectors: one, or for int4 its low and its high halves.

    int4 codes are as stored, 0 to 15, not yet less 8.
    """
    kind = ir.VectorType(_I16, 2 * LANES)
    if fmt == INT8:
        return [b.sext(codes, kind)]
    wide = b.zext(codes, kind)
    return [b.and_(wide, _const(15, kind)), b.lshr(wide, _const(4, kind))]


def _multiply_pairs(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """acc[i] + x[2i] * y[2i] + x[2i + 1] * y[2i + 1]; x, y int16, acc int32."""
    pairs = ir.VectorType(_I16, 2 * LANES)
    name = "llvm.x86.avx512.pmaddw.d.512" if _WIDE else "llvm.x86.avx2.pmadd.wd"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VI, [pairs, pairs]), name)
    product = b.call(function, [x, y])
    return product if acc is None else b.add(acc, product)


def _load_bytes(b: Any, pointer: Any, offset: Any, count: int) -> Any:
    """2 * LANES bytes, of which ``count`` are loaded and the rest are 0."""
    codes = _load(b, pointer, offset, ir.VectorType(_I8, count))
    if count < 2 * LANES:
        zeros = ir.Constant(codes.type, [0] * count)
        codes = _shuffle(b, codes, zeros, [min(i, count) for i in range(2 * LANES)])
    return codes


@intrinsic(prefer_literal=True)
def _quantize_query(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """Turn a float32 row into int16 in the order of `_word_spans`; its scale.

    The largest element becomes 32767. A row with NaN or Inf has the scale NaN.
    """
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = (_pointer(b, a) for a in args[2:])
        amax, nothing = _const(0.0), _const(0.0)
        for first, count in _pieces(dim):
            x = _load_floats(b, source, 4 * first, count)
            amax = _max(b, _call(b, "fabs", _VF, x), amax)
            nothing = b.fadd(nothing, b.fsub(x, x))
        largest = b.fadd(_fold(b, amax, _max), _fold(b, nothing, _add))
        most = ir.Constant(_F32, 32767.0)
        tiny = b.fcmp_ordered("<", largest, ir.Constant(_F32, MIN_SCALE))
        factor = _splat(b, b.select(tiny, ir.Constant(_F32, 0.0), b.fdiv(most, largest)))
        scale = b.fdiv(largest, most)
        for i, (start, size, _) in enumerate(_word_spans(f, dim)):
            for part in range(2):
                count = min(LANES, size - part * LANES)
                codes = ir.Constant(ir.VectorType(_I16, LANES), [0] * LANES)
                if count > 0:
                    x = _load_floats(b, source, 4 * (start + part * LANES), count)
                    rounded = _call(b, "rint", _VF, b.fmul(x, factor))
                    codes = b.trunc(b.fptosi(rounded, _VI), codes.type)
                _store(b, codes, target, 2 * LANES * (2 * i + part))
        return scale

    return types.float32(fmt, head_dim, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def _unpack_rows(typingctx: Any, head_dim: Any, rows: Any, target: Any, num_rows: Any):
    """Turn int4 rows that lie one after another into int8 ones; see `unpacked_bytes`."""
    dim = _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(_I8, 2 * LANES)
        with cgutils.for_range(b, args[3]) as loop:
            old = b.mul(loop.index, ir.Constant(_I64, _row_bytes(INT4, dim)))
            new = b.mul(loop.index, ir.Constant(_I64, unpacked_bytes(dim)))
            row, place = _pointer(b, b.add(args[1], old)), _pointer(b, b.add(args[2], new))
            for n, (first, size) in enumerate(_pair_pieces(dim // 2)):
                codes = _load_bytes(b, row, first, size)
                low, high = b.and_(codes, _const(15, kind)), b.lshr(codes, _const(4, kind))
                for half, part in enumerate((low, high)):
                    real = b.sub(part, _const(8, kind))
                    _store(b, real, place, 2 * LANES * (2 * n + half))
        return context.get_dummy_value()

    return types.void(head_dim, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def _score_pairs(
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
    """`_score_keys` in integers: exact dot products of codes with int16 queries, as floats.

    int4 adds up the sums of its scale groups times their scales: float32, a row of ``line``
    bytes for each group. ``unpacked``: its rows are `_unpack_rows`'s.
    """
    f, dim, num_queries = _literal(fmt), _literal(head_dim), _literal(group)
    is_unpacked = bool(_literal(unpacked))

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, places, num, scales, line, out = args[5:]
        q = _pointer(b, q)
        spans, halves = _word_spans(f, dim), _halves(f)
        row_bytes = unpacked_bytes(dim) if is_unpacked else _row_bytes(f, dim)
        keys, vector = _keys_per_block(num_queries), ir.VectorType(_I8, 2 * LANES)
        words = ir.VectorType(_I16, 2 * LANES)

        def read(pointer: Any, n: int) -> list[Any]:
            if is_unpacked:
                places = [2 * LANES * (halves * n + half) for half in range(halves)]
                return [b.sext(_load(b, pointer, place, vector), words) for place in places]
            first, size = _pair_pieces(_row_bytes(f, dim))[n]
            stored = _words(b, f, _load_bytes(b, pointer, first, size))
            return [b.sub(word, _const(8, words)) for word in stored] if f == INT4 else stored

        per_batch = max(1, _SUMS // keys)  # queries whose sums are found at once
        lanes = [lane % keys for lane in range(_SUMS)]
        num_spans = len(spans)

        def score(first: Any, pointers: list[Any]) -> None:
            offset = b.mul(first, ir.Constant(_I64, 4))
            target, factors = _pointer(b, b.add(out, offset)), b.add(scales, offset)
            for start, count in _query_chunks(num_queries):
                score_chunk(start, count, pointers, factors, target)

        def score_chunk(start: int, count: int, pointers: list[Any], scales: Any, out: Any) -> None:
            batches = range(0, count, per_batch)
            blocks: list[Any] = [None] * len(batches)
            for group in range(num_groups(f, dim)):
                # The group's exact sums, over all lanes, before they meet floats.
                sums: list[Any] = [None] * (count * keys)
                for span in (n for n in range(num_spans) if spans[n][2] == group):
                    stored = [read(p, span // halves)[span % halves] for p in pointers]
                    for g in range(count):
                        query = _load(b, q, 4 * LANES * ((start + g) * num_spans + span), words)
                        for i in range(keys):
                            at = g * keys + i
                            sums[at] = _multiply_pairs(b, sums[at], stored[i], query)
                scale = None
                if f == INT4:
                    at_group = b.add(scales, b.mul(line, ir.Constant(_I64, group)))
                    scale = _load(b, _pointer(b, at_group), 0, ir.VectorType(_F32, keys))
                    scale = _shuffle(b, scale, scale, lanes)
                for k, first in enumerate(batches):
                    batch = sums[first * keys : (first + per_batch) * keys]
                    real = b.sitofp(_add_lanes(b, batch), ir.VectorType(_F32, _SUMS))
                    blocks[k] = _add_scaled(b, blocks[k], real, scale)
            for block, first in zip(blocks, batches, strict=True):
                for g in range(min(per_batch, count - first)):
                    number = ir.Constant(_I64, start + first + g)
                    mine = _shuffle(b, block, block, range(g * keys, (g + 1) * keys))
                    _store(b, mine, out, b.mul(number, line))

        _each_block(b, places, num, keys, row_bytes, _literal(ahead), score)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, group, unpacked, ahead, *[types.int64] * 6), codegen


def _add_scaled(b: Any, total: Any, values: Any, scale: Any) -> Any:
    """``total`` (None: nothing yet) plus values * scale (None: 1)."""
    if scale is None:
        return values
    return b.fmul(values, scale) if total is None else _fma(b, values, scale, total)


@intrinsic
def _largest_product(typingctx: Any, x: Any, y: Any, num_vectors: Any):
    """The largest of x[:] * y[:], or 0."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x, y = _pointer(b, args[0]), _pointer(b, args[1])
        best = cgutils.alloca_once_value(b, _const(0.0))
        with _each(b, args[2]) as loop:
            at = b.mul(loop.index, ir.Constant(_I64, 4 * LANES))
            product = b.fmul(_load(b, x, at, _VF), _load(b, y, at, _VF))
            b.store(_max(b, product, b.load(best)), best)
        return _fold(b, b.load(best), _max)

    return types.float32(*[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def _largest_scales(typingctx: Any, count: Any, source: Any, line: Any, target: Any, num: Any):
    """target[:] = the largest size in ``count`` rows, ``line`` bytes apart, of ``num`` vectors."""
    height = _literal(count)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = _pointer(b, args[1]), _pointer(b, args[3])
        with _each(b, args[4]) as loop:
            at = b.mul(loop.index, ir.Constant(_I64, 4 * LANES))
            best = _const(0.0)
            for i in range(height):
                place = b.add(at, b.mul(args[2], ir.Constant(_I64, i)))
                best = _max(b, _call(b, "fabs", _VF, _load(b, source, place, _VF)), best)
            _store(b, best, target, at)
        return context.get_dummy_value()

    return types.void(count, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def _split_scales(typingctx: Any, count: Any, source: Any, target: Any, line: Any, num: Any):
    """target[i, :num] (float32, rows ``line`` bytes apart) = source[:num, i] (bfloat16)."""
    width = _literal(count)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target, line, num = args[1:]
        source, target = _pointer(b, source), _pointer(b, target)

        def columns(place: Any) -> list[Any]:
            if width % 2:
                codes = _load(b, source, place, ir.VectorType(_I16, LANES * width))
                parts = [
                    _shuffle(b, codes, codes, range(i, LANES * width, width)) for i in range(width)
                ]
                return [b.bitcast(b.shl(b.zext(p, _VI), _const(16, _VI)), _VF) for p in parts]
            # Two by two, as the halves of int32: a shuffle of those is one instruction.
            half = width // 2
            codes = _load(b, source, place, ir.VectorType(_I32, LANES * half))
            pairs = [_shuffle(b, codes, codes, range(i, LANES * half, half)) for i in range(half)]
            high, low = _const(-(1 << 16), _VI), _const(16, _VI)
            bits = [half for pair in pairs for half in (b.shl(pair, low), b.and_(pair, high))]
            return [b.bitcast(each, _VF) for each in bits]

        whole = b.sdiv(num, ir.Constant(_I64, LANES))
        with cgutils.for_range(b, whole) as loop:
            place = b.mul(loop.index, ir.Constant(_I64, 2 * LANES * width))
            for i, real in enumerate(columns(place)):
                at = b.mul(loop.index, ir.Constant(_I64, 4 * LANES))
                _store(b, real, target, b.add(at, b.mul(line, ir.Constant(_I64, i))))
        start = b.mul(whole, ir.Constant(_I64, LANES))
        with cgutils.for_range(b, b.sub(num, start)) as loop:
            token = b.add(start, loop.index)
            for i in range(width):
                place = b.add(b.mul(token, ir.Constant(_I64, 2 * width)), ir.Constant(_I64, 2 * i))
                code = b.zext(_load(b, source, place, _I16), _I32)
                real = b.bitcast(b.shl(code, ir.Constant(_I32, 16)), _F32)
                at = b.mul(token, ir.Constant(_I64, 4))
                _store(b, real, target, b.add(at, b.mul(line, ir.Constant(_I64, i))))
        return context.get_dummy_value()

    return types.void(count, *[types.int64] * 4), codegen


@intrinsic
def _ask_for(typingctx: Any, address: Any):
    """Prefetch the cache line at an address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _prefetch(b, _pointer(b, args[0]), 0)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _quantize_weights(
    typingctx: Any, source: Any, scales: Any, factor: Any, target: Any, num_vectors: Any
):
    """target[:] (int16) = round(source[:] * factor * scales[:]); their sum."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, scales, target = (_pointer(b, args[i]) for i in (0, 1, 3))
        factor = _splat(b, args[2])
        total = cgutils.alloca_once_value(b, _const(0, _VI))
        with _each(b, args[4]) as loop:
            at = b.mul(loop.index, ir.Constant(_I64, 4 * LANES))
            x = b.fmul(b.fmul(_load(b, source, at, _VF), factor), _load(b, scales, at, _VF))
            codes = _round_to_integers(b, x)
            b.store(b.add(b.load(total), codes), total)
            codes = b.trunc(codes, ir.VectorType(_I16, LANES))
            _store(b, codes, target, b.mul(loop.index, ir.Constant(_I64, 2 * LANES)))
        return _fold(b, b.load(total), _add_integers)

    i64, f32 = types.int64, types.float32
    return types.int32(i64, i64, f32, i64, i64), codegen


@intrinsic(prefer_literal=True)
def _add_pairs(
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
    """`_add_values` with int16 weights in integers, two tokens at a time.

    Of an odd ``num`` one row more is read; its weight is 0. weights has a row for each query and
    scale group. acc: int32 [group, spans, 2, LANES], the columns of a span in the order of
    `_interleave`. int4 codes count as stored, 0 to 15, or as `_unpack_rows` leaves them, -8 to 7,
    if ``unpacked``.
    """
    f, dim, num_queries = _literal(fmt), _literal(head_dim), _literal(group)
    is_unpacked = bool(_literal(unpacked))

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, weights, weights_bytes, places, num = args[5:]
        acc, places = _pointer(b, acc), _pointer(b, places)
        groups, spans, halves = num_groups(f, dim), _word_spans(f, dim), _halves(f)
        row_bytes = unpacked_bytes(dim) if is_unpacked else _row_bytes(f, dim)
        pieces = _pair_pieces(row_bytes)
        acc_bytes = 8 * LANES * len(spans)
        words = ir.VectorType(_I16, 2 * LANES)
        one, two = (ir.Constant(_I64, n) for n in (1, 2))

        def read(row: Any, other: Any, n: int, part: int) -> list[Any]:
            if is_unpacked:
                both = [
                    [_load_bytes(b, r, *pieces[halves * n + half]) for r in (row, other)]
                    for half in (0, 1)
                ]
                return [b.sext(_interleave(b, x, y, part), words) for x, y in both]
            x, y = (_load_bytes(b, r, *pieces[n]) for r in (row, other))
            return _words(b, f, _interleave(b, x, y, part))

        def add_tokens(
            number: Any, row: Any, other: Any, queries: range, mine: Any, sums: Any
        ) -> None:
            used = sorted({spans[halves * n + half][2] for n, _ in mine for half in range(halves)})
            weight = {}
            for g in queries:
                for scale_group in used:
                    line = ir.Constant(_I64, g * groups + scale_group)
                    place = b.add(b.mul(line, weights_bytes), b.mul(number, two))
                    w = _load(b, _pointer(b, b.add(weights, place)), 0, _I32)
                    weight[g, scale_group] = b.bitcast(_splat(b, w), words)
            for n, part in mine:
                for half, both in enumerate(read(row, other, n, part)):
                    span = halves * n + half
                    for g in queries:
                        place, w = sums[g, span, part], weight[g, spans[span][2]]
                        b.store(_multiply_pairs(b, b.load(place), both, w), place)

        # A pass serves as many (load, part of it) as have their sums in registers.
        units = [(n, part) for n in range(len(spans) // halves) for part in range(2)]
        passes = []
        for start, count in _query_chunks(num_queries):
            most = max(1, (24 if _WIDE else 8) // (halves * count))
            block = -(-len(units) // -(-len(units) // most))
            passes += [
                (range(start, start + count), units[begin : begin + block])
                for begin in range(0, len(units), block)
            ]
        for share, (queries, mine) in enumerate(passes):
            sums = {
                (g, halves * n + half, part): cgutils.alloca_once(b, _VI)
                for g in queries
                for n, part in mine
                for half in range(halves)
            }
            for (g, span, part), place in sums.items():
                offset = g * acc_bytes + 4 * LANES * (2 * span + part)
                b.store(_load(b, acc, offset, _VI), place)
            with cgutils.for_range(b, b.ashr(b.add(num, one), one)) as loop:
                i = b.mul(loop.index, two)
                both = [i, b.add(i, one)]
                _ask_share(b, places, both, row_bytes, _literal(ahead), (share, len(passes)))
                row, other = _row_at(b, places, i), _row_at(b, places, i, 1)
                add_tokens(i, row, other, queries, mine, sums)
            for (g, span, part), place in sums.items():
                offset = g * acc_bytes + 4 * LANES * (2 * span + part)
                _store(b, b.load(place), acc, offset)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, group, unpacked, ahead, *[types.int64] * 5), codegen


def _interleave(b: Any, x: Any, y: Any, part: int) -> Any:
    """Take x and y by turns; ``part`` 0 or 1 of each run of 16 bytes, as the hardware does it."""
    count = x.type.count
    lanes = [run + 8 * part + i for run in range(0, count, 16) for i in range(8)]
    return _shuffle(b, x, y, [lane + side for lane in lanes for side in (0, count)])


@intrinsic(prefer_literal=True)
def _finish_pairs(
    typingctx: Any, fmt: Any, head_dim: Any, acc: Any, target: Any, factors: Any, offsets: Any
):
    """target[:head_dim] = (acc[:] - offset) * factor of its scale group, in natural order."""
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        acc, target, factors, offsets = (_pointer(b, a) for a in args[2:])
        # The inverse of `_interleave`: runs of 8 columns, in turn from either part.
        lanes = [
            LANES * part + run + i
            for run in range(0, LANES, 8)
            for part in range(2)
            for i in range(8)
        ]
        for n, (start, size, group) in enumerate(_word_spans(f, dim)):
            factor = _splat(b, _load(b, factors, 4 * group, _F32))
            parts = [_load(b, acc, 4 * LANES * (2 * n + part), _VI) for part in range(2)]
            if f == INT4:
                offset = _splat(b, _load(b, offsets, 4 * group, _I32))
                parts = [b.sub(part, offset) for part in parts]
            for half in range(2):
                first = half * LANES
                count = min(LANES, size - first)
                if count > 0:
                    whole = b.sitofp(_shuffle(b, *parts, lanes[first : first + LANES]), _VF)
                    real = b.fmul(whole, factor)
                    _store(b, _narrow(b, real, count), target, 4 * (start + first))
        return context.get_dummy_value()

    return types.void(fmt, head_dim, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def _dequantize_row(typingctx: Any, fmt: Any, head_dim: Any, row: Any, scales: Any, target: Any):
    """target[:] = the real values of one stored row, natural order; scales: its float32 ones."""
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        row, scales, target = (_pointer(b, a) for a in args[2:])
        factor = None if f in (INT4, FLOAT32, FLOAT16, BFLOAT16) else _load(b, scales, 0, _F32)
        spans = _spans(f, dim)
        for step in range(_num_reads(f, dim)):
            for v, value in _read(b, f, dim, row, scales, step):
                real = value if factor is None else b.fmul(value, _splat(b, factor))
                first, count = spans[v]
                _store(b, _narrow(b, real, count), target, 4 * first)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64, types.int64), codegen


@intrinsic
def _widen_scales(typingctx: Any, source: Any, target: Any, num: Any, factor: Any):
    """target[:num] (float32) = source[:num] (bfloat16) * factor."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target, num, factor = args
        source, target = _pointer(b, source), _pointer(b, target)
        whole = b.sdiv(num, ir.Constant(_I64, LANES))
        wide = _splat(b, factor)
        with cgutils.for_range(b, whole) as loop:
            place = b.mul(loop.index, ir.Constant(_I64, 2 * LANES))
            codes = b.zext(_load(b, source, place, ir.VectorType(_I16, LANES)), _VI)
            real = b.bitcast(b.shl(codes, _const(16, _VI)), _VF)
            _store(b, b.fmul(real, wide), target, b.mul(place, ir.Constant(_I64, 2)))
        start = b.mul(whole, ir.Constant(_I64, LANES))
        with cgutils.for_range(b, b.sub(num, start)) as loop:
            place = b.mul(b.add(start, loop.index), ir.Constant(_I64, 2))
            code = b.zext(_load(b, source, place, _I16), _I32)
            real = b.bitcast(b.shl(code, ir.Constant(_I32, 16)), _F32)
            _store(b, b.fmul(real, factor), target, b.mul(place, ir.Constant(_I64, 2)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), codegen


def _each_two(b: Any, num_vectors: Any, emit: Callable[[Any, int], None]) -> None:
    """Loop over vectors, two at a time while there are: emit(byte offset, how many).

    So that a processor that looks a few instructions ahead finds two chains of them.
    """
    one = ir.Constant(_I64, 1)
    pairs = b.ashr(num_vectors, one)
    with cgutils.for_range(b, pairs) as loop:
        emit(b.mul(loop.index, ir.Constant(_I64, 8 * LANES)), 2)
    with b.if_then(b.icmp_signed("!=", b.and_(num_vectors, one), ir.Constant(_I64, 0))):
        emit(b.mul(pairs, ir.Constant(_I64, 8 * LANES)), 1)


def _weights(b: Any, target: Any, at: Any, width: int, largest: Any) -> list[Any]:
    """``width`` vectors at a place of ``target`` become exp(themselves - largest); these."""
    count = width * LANES
    scores = _load(b, target, at, ir.VectorType(_F32, count))
    p = _exp(b, b.fsub(scores, _splat(b, largest, count)))
    _store(b, p, target, at)
    return [_shuffle(b, p, p, range(n, n + LANES)) for n in range(0, count, LANES)]


def _each(b: Any, num_vectors: Any) -> Any:
    """Loop over vectors; yields the byte offset of each."""
    return cgutils.for_range(b, num_vectors)


@intrinsic
def _multiply(typingctx: Any, target: Any, source: Any, factor: Any, num_vectors: Any):
    """target[:] *= source[:] * factor."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, source, factor = _pointer(b, args[0]), _pointer(b, args[1]), _splat(b, args[2])
        with _each(b, args[3]) as loop:
            at = b.mul(loop.index, ir.Constant(_I64, 4 * LANES))
            factors = b.fmul(_load(b, source, at, _VF), factor)
            _store(b, b.fmul(_load(b, target, at, _VF), factors), target, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic
def _scale_add(typingctx: Any, target: Any, old: Any, source: Any, new: Any, num_vectors: Any):
    """target[:] = target[:] * old + source[:] * new."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, source = _pointer(b, args[0]), _pointer(b, args[2])
        old, new = _splat(b, args[1]), _splat(b, args[3])
        with _each(b, args[4]) as loop:
            at = b.mul(loop.index, ir.Constant(_I64, 4 * LANES))
            kept = b.fmul(_load(b, target, at, _VF), old)
            _store(b, _fma(b, _load(b, source, at, _VF), new, kept), target, at)
        return context.get_dummy_value()

    i64, f32 = types.int64, types.float32
    return types.void(i64, f32, i64, f32, i64), codegen


@intrinsic
def _fill(typingctx: Any, target: Any, value: Any, num_vectors: Any):
    """target[:] = value."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, value = _pointer(b, args[0]), _splat(b, args[1])
        with _each(b, args[2]) as loop:
            _store(b, value, target, b.mul(loop.index, ir.Constant(_I64, 4 * LANES)))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@intrinsic
def _cap(typingctx: Any, target: Any, cap: Any, num_vectors: Any):
    """target[:] = cap * tanh(target[:] / cap)."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, cap = _pointer(b, args[0]), _splat(b, args[1])
        twice = b.fdiv(_const(-2.0), cap)
        with _each(b, args[2]) as loop:
            at = b.mul(loop.index, ir.Constant(_I64, 4 * LANES))
            x = _load(b, target, at, _VF)
            e = _exp(b, b.fmul(_call(b, "fabs", _VF, x), twice))
            tanh = b.fdiv(b.fsub(_const(1.0), e), b.fadd(_const(1.0), e))
            size = b.fmul(tanh, cap)
            signed = b.select(b.fcmp_ordered("<", x, _const(0.0)), b.fneg(size), size)
            # 1 - e has no digits left of scores far below the cap: a series instead.
            part = b.fdiv(x, cap)
            square = b.fmul(part, part)
            series = _const(_TANH_TERMS[-1])
            for term in _TANH_TERMS[-2::-1]:
                series = b.fadd(b.fmul(series, square), _const(term))
            near = b.fcmp_ordered("<", square, _const(_TANH_NEAR**2))
            _store(b, b.select(near, b.fmul(x, series), signed), target, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), codegen


@intrinsic
def _largest(typingctx: Any, source: Any, num_vectors: Any):
    """The maximum over source[:]."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source = _pointer(b, args[0])
        best = cgutils.alloca_once_value(b, _const(-_INF))
        with _each(b, args[1]) as loop:
            x = _load(b, source, b.mul(loop.index, ir.Constant(_I64, 4 * LANES)), _VF)
            b.store(_max(b, x, b.load(best)), best)
        return _fold(b, b.load(best), _max)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def _exponentiate(typingctx: Any, target: Any, largest: Any, num_vectors: Any):
    """target[:] = exp(target[:] - largest); their sum."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, total = _pointer(b, args[0]), cgutils.alloca_once_value(b, _const(0.0))

        def weigh(at: Any, width: int) -> None:
            for p in _weights(b, target, at, width, args[1]):
                b.store(b.fadd(b.load(total), p), total)

        _each_two(b, args[2], weigh)
        return _fold(b, b.load(total), _add)

    return types.float32(types.int64, types.float32, types.int64), codegen


@intrinsic
def _softmax_tile(
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
        scores, stats = _pointer(b, scores), _pointer(b, stats)
        last = _load(b, _pointer(b, query_pos), 0, _VI)
        first = b.sub(last, _splat(b, b.trunc(window, _I32)))
        best = cgutils.alloca_once_value(b, _const(-_INF))
        with cgutils.for_range(b, num_keys) as loop:
            at = b.mul(loop.index, row_bytes)
            here = _splat(b, b.trunc(b.add(key_pos, loop.index), _I32))
            seen = b.and_(b.icmp_signed("<=", here, last), b.icmp_signed(">", here, first))
            s = b.select(seen, _load(b, scores, at, _VF), _const(-_INF))
            _store(b, s, scores, at)
            b.store(_max(b, s, b.load(best)), best)
        m_old = _load(b, stats, 0, _VF)
        m = _max(b, m_old, b.load(best))
        safe = b.select(b.fcmp_ordered("==", m, _const(-_INF)), _const(0.0), m)
        total = cgutils.alloca_once_value(b, _const(0.0))
        with cgutils.for_range(b, num_keys) as loop:
            at = b.mul(loop.index, row_bytes)
            p = _exp(b, b.fsub(_load(b, scores, at, _VF), safe))
            _store(b, p, scores, at)
            b.store(b.fadd(b.load(total), p), total)
        alpha = _exp(b, b.fsub(m_old, safe))
        _store(b, m, stats, 0)
        old = _load(b, stats, stats_bytes, _VF)
        _store(b, _fma(b, old, alpha, b.load(total)), stats, stats_bytes)
        _store(b, alpha, stats, b.mul(stats_bytes, ir.Constant(_I64, 2)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def _product(
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
    adds = bool(_literal(accumulate))

    def codegen(context: Any, bld: Any, sig: Any, args: Any) -> Any:
        num_m, num_vectors, num_k, a, a_m, a_k, b_rows, b_k, c, c_m = args[1:]
        blocks_m = bld.sdiv(num_m, ir.Constant(_I64, _TILE_M))

        def tile(column: Any, width: int) -> None:
            offset = bld.mul(column, ir.Constant(_I64, 4 * LANES))
            b_base, c_base = bld.add(b_rows, offset), bld.add(c, offset)
            with cgutils.for_range(bld, blocks_m) as block:
                first = bld.mul(block.index, ir.Constant(_I64, _TILE_M))
                a_rows, c_rows = [], []
                for i in range(_TILE_M):
                    m = bld.add(first, ir.Constant(_I64, i))
                    a_rows.append(_pointer(bld, bld.add(a, bld.mul(m, a_m))))
                    c_rows.append(_pointer(bld, bld.add(c_base, bld.mul(m, c_m))))
                places = {
                    (i, n): cgutils.alloca_once(bld, _VF)
                    for i in range(_TILE_M)
                    for n in range(width)
                }
                for (i, n), place in places.items():
                    old = _load(bld, c_rows[i], 4 * LANES * n, _VF) if adds else _const(0.0)
                    bld.store(old, place)
                with cgutils.for_range(bld, num_k) as loop:
                    b_row = _pointer(bld, bld.add(b_base, bld.mul(loop.index, b_k)))
                    values = [_load(bld, b_row, 4 * LANES * n, _VF) for n in range(width)]
                    a_offset = bld.mul(loop.index, a_k)
                    for i in range(_TILE_M):
                        factor = _splat(bld, _load(bld, a_rows[i], a_offset, _F32))
                        for n in range(width):
                            old = bld.load(places[i, n])
                            bld.store(_fma(bld, factor, values[n], old), places[i, n])
                for (i, n), place in places.items():
                    _store(bld, bld.load(place), c_rows[i], 4 * LANES * n)

        pairs = bld.sdiv(num_vectors, ir.Constant(_I64, 2))
        with cgutils.for_range(bld, pairs) as loop:
            tile(bld.mul(loop.index, ir.Constant(_I64, 2)), 2)
        done = bld.mul(pairs, ir.Constant(_I64, 2))
        with cgutils.for_range(bld, bld.sub(num_vectors, done)) as loop:
            tile(bld.add(done, loop.index), 1)
        return context.get_dummy_value()

    return types.void(accumulate, *[types.int64] * 10), codegen


@intrinsic(prefer_literal=True)
def _count_non_finite(
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
    dim, is_centered = _literal(head_dim), _literal(centered)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        # x - x is 0 for finite x, NaN for NaN and Inf; lanes are folded once, at the end.
        sums = [cgutils.alloca_once_value(b, _const(0.0)) for _ in range(2)]
        with cgutils.for_range(b, args[6]) as loop:
            row = _pointer(b, b.add(args[2], b.mul(loop.index, args[3])))
            center = _pointer(b, b.add(args[4], b.mul(loop.index, args[5])))
            for i, x in enumerate(_load_centered(b, dim, row, center if is_centered else None)):
                place = sums[i % 2]
                x = b.fmul(x, _splat(b, args[7], x.type.count))
                b.store(b.fadd(b.load(place), b.fsub(x, x)), place)
        zeros = _fold(b, b.fadd(*(b.load(place) for place in sums)), _add)
        return b.zext(b.fcmp_unordered("uno", zeros, ir.Constant(_F32, 0.0)), _I64)

    return types.int64(head_dim, centered, *[types.int64] * 5, types.float32), codegen


def _load_centered(b: Any, dim: int, row: Any, center: Any) -> list[Any]:
    """The vectors of a float32 row, less those of its center if there is one."""
    vectors = [_load_floats(b, row, 4 * first, count) for first, count in _pieces(dim)]
    if center is None:
        return vectors
    middle = [_load_floats(b, center, 4 * first, count) for first, count in _pieces(dim)]
    return [b.fsub(x, y) for x, y in zip(vectors, middle, strict=True)]


def _encode_fp8(b: Any, fmt: int, x: Any) -> Any:
    """float32 (clamped to the format's range) to 8-bit floats, half to even."""
    bias, mantissa = (7, 3) if fmt == FP8 else (15, 2)
    bits = b.bitcast(x, _VI)
    sign = b.and_(bits, _const(-(2**31), _VI))
    size = b.xor(bits, sign)
    # Adding a power of two whose last place is the smallest subnormal rounds to it.
    magic = (127 - bias + 23 - mantissa + 1) << 23
    tiny = b.fadd(b.bitcast(size, _VF), b.bitcast(_const(magic, _VI), _VF))
    tiny = b.sub(b.bitcast(tiny, _VI), _const(magic, _VI))
    cut = 23 - mantissa
    odd = b.and_(b.lshr(size, _const(cut, _VI)), _const(1, _VI))
    shift = ((bias - 127) << 23) + (1 << (cut - 1)) - 1
    normal = b.lshr(b.add(b.add(size, _const(shift, _VI)), odd), _const(cut, _VI))
    small = b.icmp_unsigned("<", size, _const((127 - bias + 1) << 23, _VI))
    code = b.select(small, tiny, normal)
    return b.trunc(b.or_(code, b.lshr(sign, _const(24, _VI))), ir.VectorType(_I8, LANES))


def _scalar_bf16(b: Any, value: Any) -> tuple[Any, Any]:
    """A float rounded to bfloat16: its bits (i16) and its value (float)."""
    bits = _round_to_bf16(b, b.bitcast(value, _I32))
    return b.trunc(bits, _I16), b.bitcast(b.shl(bits, ir.Constant(_I32, 16)), _F32)


def _scale_of(b: Any, span: Any, largest: float) -> tuple[Any, Any]:
    scale = b.fdiv(span, ir.Constant(_F32, largest))
    least = ir.Constant(_F32, MIN_SCALE)
    return _scalar_bf16(b, b.select(b.fcmp_ordered(">", scale, least), scale, least))


@intrinsic(prefer_literal=True)
def _encode_row(
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
    f, dim, is_centered = _literal(fmt), _literal(head_dim), _literal(centered)

    def emit(b: Any, vectors: list[Any], codes: Any, scales: Any) -> None:
        pieces = _pieces(dim)
        if f == INT4:
            _encode_int4(b, dim, vectors, codes, scales)
            return
        if f in (FLOAT32, FLOAT16, BFLOAT16):
            for (first, count), x in zip(pieces, vectors, strict=True):
                if f == FLOAT16:
                    x = b.fptrunc(x, ir.VectorType(_F16, LANES))
                elif f == BFLOAT16:
                    x = _round_to_bf16(b, b.bitcast(x, _VI))
                    x = b.trunc(x, ir.VectorType(_I16, LANES))
                _store(b, _narrow(b, x, count), codes, first * CODE_BITS[f] // 8)
            return
        largest = LARGEST_CODE[f]
        amax = None
        for x in vectors:
            size = _call(b, "fabs", _VF, x)
            amax = size if amax is None else _max(b, size, amax)
        bits, scale = _scale_of(b, _fold(b, amax, _max), largest)
        _store(b, bits, scales, 0)
        divisor = _splat(b, scale)
        for (first, count), x in zip(pieces, vectors, strict=True):
            y = b.fdiv(x, divisor)
            if f == INT8:
                y = _call(b, "rint", _VF, y)
            y = _max(b, _min(b, y, _const(largest)), _const(-largest))
            if f == INT8:
                code = b.trunc(b.fptosi(y, _VI), ir.VectorType(_I8, LANES))
            else:
                code = _encode_fp8(b, f, y)
            _store(b, _narrow(b, code, count), codes, first)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, center, codes, scales = (_pointer(b, args[i]) for i in (3, 4, 6, 7))
        vectors = _load_centered(b, dim, source, center if is_centered else None)
        with b.if_else(b.icmp_signed("!=", args[5], ir.Constant(_I64, 0))) as (then, otherwise):
            with then:
                emit(b, _rotate_vectors(b, vectors, dim), codes, scales)
            with otherwise:
                emit(b, vectors, codes, scales)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, centered, *[types.int64] * 5), codegen


def _encode_int4(b: Any, dim: int, vectors: list[Any], codes: Any, scales: Any) -> None:
    """Quantize a row of int4, its groups side by side; see radixkv.quant.Int4Format."""
    size, half = int4_group_size(dim), dim // 2
    row = b.bitcast(cgutils.alloca_once(b, ir.ArrayType(_F32, dim + LANES)), _I8.as_pointer())
    out = b.bitcast(cgutils.alloca_once(b, ir.ArrayType(_I8, dim + LANES)), _I8.as_pointer())
    for (first, _), x in zip(_pieces(dim), vectors, strict=True):
        _store(b, x, row, 4 * first)
    for begin in range(0, dim // size, LANES):
        groups = range(begin, min(begin + LANES, dim // size))
        parts = [
            [_load_floats(b, row, 4 * (size * group + i), n) for i, n in _pieces(size)]
            for group in groups
        ]

        def of_all(
            vectors: list[list[Any]], combine: Callable[[Any, Any, Any], Any]
        ) -> Any:  # lane n: of the n-th group
            return _fold_each(b, [_combine_halves(b, v, combine) for v in vectors], combine)

        def split(lanes: Any, count: int = len(parts)) -> list[Any]:
            return [_shuffle(b, lanes, lanes, [n] * LANES) for n in range(count)]

        def code(vector: Any, inverse: Any) -> Any:
            y = _call(b, "rint", _VF, b.fmul(vector, inverse))
            return _max(b, _min(b, y, _const(7.0)), _const(-8.0))

        top, low = of_all(parts, _max), of_all(parts, _min)
        amax = _max(b, top, b.fneg(low))
        above = b.fcmp_ordered(">=", top, amax)
        best = best_scale = best_inverse = None
        for share in INT4_SEARCH:
            scale = _max(b, b.fmul(amax, _const(share / 7.5)), _const(MIN_SCALE))
            bits = _round_to_bf16(b, b.bitcast(scale, _VI))
            scale = b.bitcast(b.shl(bits, _const(16, _VI)), _VF)
            scale = b.select(above, b.fneg(scale), scale)
            inverse = b.fdiv(_const(1.0), scale)
            losses = []
            for vectors, step, turned in zip(parts, split(scale), split(inverse), strict=True):
                off = [b.fsub(x, b.fmul(code(x, turned), step)) for x in vectors]
                losses.append([b.fmul(x, x) for x in off])
            loss = of_all(losses, _add)
            if best is None:
                best, best_scale, best_inverse = loss, scale, inverse
            else:
                better = b.fcmp_ordered("<", loss, best)
                best = b.select(better, loss, best)
                best_scale = b.select(better, scale, best_scale)
                best_inverse = b.select(better, inverse, best_inverse)
        bits = b.lshr(b.bitcast(best_scale, _VI), _const(16, _VI))
        bits = _narrow(b, b.trunc(bits, ir.VectorType(_I16, LANES)), len(parts))
        _store(b, bits, scales, 2 * begin)
        for group, vectors, inverse in zip(groups, parts, split(best_inverse), strict=True):
            for (i, n), x in zip(_pieces(size), vectors, strict=True):
                y = b.add(b.fptosi(code(x, inverse), _VI), _const(8, _VI))
                y = _narrow(b, b.trunc(y, ir.VectorType(_I8, LANES)), n)
                _store(b, y, out, size * group + i)
    for first, count in _pieces(half):
        kind = ir.VectorType(_I8, count)
        low, high = _load(b, out, first, kind), _load(b, out, half + first, kind)
        _store(b, b.or_(low, b.shl(high, _const(4, kind))), codes, first)


def _combine_halves(b: Any, vectors: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the vectors of an int4 group, the first half with the second, down to one.

    Missing ones (of a group below 32 elements) are zeros, as radixkv.quant adds them.
    """
    vectors = vectors + [_const(0.0)] * (INT4_GROUP // LANES - len(vectors))
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [combine(b, x, y) for x, y in zip(vectors[:half], vectors[half:], strict=True)]
    return vectors[0]


# ---------------------------------------------------------------- shared splits
# Many query rows over one split: rows of K and V are unpacked once, into panels whose vectors hold
# what a product needs next, and every row is a chain of `_multiply_pairs` over them. The sums are
# exact integers, hence those of `_score_pairs` and `_add_pairs`, and what follows them is the
# same arithmetic: a row's bits do not tell whether its split was shared.

_PANEL = 2 * LANES  # keys (of K) or columns (of V) of a panel
_HALF_M = _TILE_M // 2  # rows come in tiles of _TILE_M, and a last one of half as many
SHARED_ROWS = 32  # query rows (tokens x heads) that are scored at once, to stay in cache
MOST_SHARED_ROWS = 512  # of a task: unpacking is cheap beside them, and threads end together


def shares_in_pairs(formats: tuple[int, int], head_dim: int, v_head_dim: int) -> bool:
    """Whether rows of these formats can be read once for several queries, bit for bit."""
    return in_pairs(formats[0], head_dim) and in_pairs(formats[1], v_head_dim)


def shares(formats: tuple[int, int], head_dim: int, v_head_dim: int) -> bool:
    """Whether rows of these formats can be read once for several queries.

    Formats that decode reads as floats are: to float rounding, and single new tokens alone.
    """
    in_floats = not extends_in_rows(formats)
    return in_floats or shares_in_pairs(formats, head_dim, v_head_dim)


def _num_pairs(fmt: int, head_dim: int) -> int:
    """Pairs of neighbouring elements of a row; those of int4's halves apart."""
    return 2 * -(-(head_dim // 2) // 2) if fmt == INT4 else -(-head_dim // 2)


def _pair_groups(fmt: int, head_dim: int) -> list[tuple[int, int]]:
    """(first pair, pairs) of each scale group."""
    pairs = _num_pairs(fmt, head_dim)
    if fmt != INT4:
        return [(0, pairs)]
    half, size = head_dim // 2, int4_group_size(head_dim)
    starts = [part * half + e for part in range(2) for e in range(0, half, 2)]
    group_of = [first // size for first in starts]
    return [(group_of.index(g), group_of.count(g)) for g in range(num_groups(fmt, head_dim))]


@intrinsic(prefer_literal=True)
def _pair_query(typingctx: Any, fmt: Any, head_dim: Any, source: Any, target: Any):
    """Copy a row of `_quantize_query` into the order of `_pair_groups`."""
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target = (_pointer(b, a) for a in args[2:])
        half = dim // 2
        for i, (first, count, _) in enumerate(_word_spans(f, dim)):
            words = _load(b, source, 4 * LANES * i, ir.VectorType(_I16, 2 * LANES))
            place = first + (half % 2 if f == INT4 and first >= half else 0)
            _store(b, _narrow(b, words, count), target, 2 * place)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def _pack_keys(
    typingctx: Any, fmt: Any, head_dim: Any, rows: Any, num_blocks: Any, ahead: Any, target: Any
):
    """Unpack 8 * ``num_blocks`` rows into panels: int16 [panel, pair, key, 2].

    rows: int64 addresses, [8 * num_blocks + ahead]; those ``ahead`` further on are asked for.
    """
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        rows, num_blocks, ahead, target = args[2:]
        rows, target = _pointer(b, rows), _pointer(b, target)
        row_bytes, pairs = _row_bytes(f, dim), _num_pairs(f, dim)
        words = ir.VectorType(_I16, 16)

        def emit(pointers: list[Any], offset: Any, count: int, place: Any) -> None:
            # Eight rows of eight pairs become eight pairs of eight rows, by three perfect shuffles.
            vectors = []
            for pointer in pointers:
                codes = _load(b, pointer, offset, ir.VectorType(_I8, count))
                if count < 16:
                    zeros = ir.Constant(codes.type, [0] * count)
                    codes = _shuffle(b, codes, zeros, [min(i, count) for i in range(16)])
                vectors.append(b.bitcast(codes, ir.VectorType(_I16, 8)))
            for _ in range(3):
                turned = []
                for x, y in zip(vectors[:4], vectors[4:], strict=True):
                    for begin in (0, 4):
                        lanes = [lane + 8 * s for lane in range(begin, begin + 4) for s in (0, 1)]
                        turned.append(_shuffle(b, x, y, lanes))
                vectors = turned
            for unit in range(-(-count // 2)):
                codes = b.bitcast(vectors[unit], ir.VectorType(_I8, 16))
                if f == INT8:
                    values = [b.sext(codes, words)]
                else:
                    wide = b.zext(codes, words)
                    values = [b.and_(wide, _const(15, words)), b.lshr(wide, _const(4, words))]
                    values = [b.sub(value, _const(8, words)) for value in values]
                for part, value in enumerate(values):
                    _store(b, value, place, 4 * _PANEL * (unit + part * (pairs // 2)))

        with cgutils.for_range(b, num_blocks) as loop:
            first = b.mul(loop.index, ir.Constant(_I64, 8))
            panel = b.udiv(first, ir.Constant(_I64, _PANEL))
            inside = b.urem(first, ir.Constant(_I64, _PANEL))
            offset = b.add(
                b.mul(panel, ir.Constant(_I64, 4 * _PANEL * pairs)),
                b.mul(inside, ir.Constant(_I64, 4)),
            )
            base = b.gep(target, [offset])
            pointers = []
            for i in range(8):
                number = b.add(first, ir.Constant(_I64, i))
                address = _load(b, rows, b.mul(number, ir.Constant(_I64, 8)), _I64)
                pointers.append(_pointer(b, address))
                later = b.mul(b.add(number, ahead), ir.Constant(_I64, 8))
                next_row = _pointer(b, _load(b, rows, later, _I64))
                for line in range(-(-row_bytes // 64)):
                    _prefetch(b, next_row, 64 * line)
            whole = row_bytes // 16
            with cgutils.for_range(b, ir.Constant(_I64, whole)) as chunk:
                at = b.mul(chunk.index, ir.Constant(_I64, 16))
                step = b.mul(chunk.index, ir.Constant(_I64, 32 * _PANEL))
                emit(pointers, at, 16, b.gep(base, [step]))
            if row_bytes % 16:
                step = ir.Constant(_I64, 32 * _PANEL * whole)
                emit(pointers, 16 * whole, row_bytes % 16, b.gep(base, [step]))
        return context.get_dummy_value()

    return types.void(fmt, head_dim, *[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def _pack_values(
    typingctx: Any, fmt: Any, head_dim: Any, rows: Any, num_pairs: Any, ahead: Any, target: Any
):
    """Unpack 2 * ``num_pairs`` rows into panels: int16 [span, pair of rows, column, 2].

    rows: as in `_pack_keys`.
    """
    f, dim = _literal(fmt), _literal(head_dim)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        rows, num_pairs, ahead, target = args[2:]
        rows, target = _pointer(b, rows), _pointer(b, target)
        row_bytes, halves = _row_bytes(f, dim), 2 if f == INT4 else 1
        panel_bytes = 2 * SPLIT * _PANEL
        with cgutils.for_range(b, num_pairs) as loop:
            pointers = []
            for i in range(2):
                number = b.add(b.mul(loop.index, ir.Constant(_I64, 2)), ir.Constant(_I64, i))
                address = _load(b, rows, b.mul(number, ir.Constant(_I64, 8)), _I64)
                pointers.append(_pointer(b, address))
                later = b.mul(b.add(number, ahead), ir.Constant(_I64, 8))
                next_row = _pointer(b, _load(b, rows, later, _I64))
                for line in range(-(-row_bytes // 64)):
                    _prefetch(b, next_row, 64 * line)
            place = b.gep(target, [b.mul(loop.index, ir.Constant(_I64, 4 * _PANEL))])
            for n, (first, size) in enumerate(_pair_pieces(row_bytes)):
                x, y = (_load_bytes(b, pointer, first, size) for pointer in pointers)
                for part in range(2):
                    lanes = [LANES * part + i + s for i in range(LANES) for s in (0, 2 * LANES)]
                    for half, value in enumerate(_words(b, f, _shuffle(b, x, y, lanes))):
                        value = b.sub(value, _const(8, value.type)) if f == INT4 else value
                        offset = panel_bytes * (halves * n + half) + 4 * LANES * part
                        _store(b, value, place, offset)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, *[types.int64] * 4), codegen


def _tile_of_pairs(b: Any, num_rows: int, a: Any, a_bytes: int, panel: Any, steps: Any) -> Any:
    """Exact sums over ``steps`` pairs: int32, for each row a list of two vectors.

    a: int16 rows, ``a_bytes`` apart, of which a pair at a time is multiplied with a panel's step.
    """
    words = ir.VectorType(_I16, 2 * LANES)
    rows = [b.gep(a, [ir.Constant(_I64, i * a_bytes)]) for i in range(num_rows)]
    places = [[cgutils.alloca_once(b, _VI) for _ in range(2)] for _ in rows]
    for place in (place for row in places for place in row):
        b.store(_const(0, _VI), place)
    with cgutils.for_range(b, steps) as loop:
        at = b.mul(loop.index, ir.Constant(_I64, 4 * _PANEL))
        step = b.gep(panel, [at])
        values = [_load(b, step, 4 * LANES * n, words) for n in range(2)]
        offset = b.mul(loop.index, ir.Constant(_I64, 4))
        for row, mine in zip(rows, places, strict=True):
            pair = b.bitcast(_splat(b, _load(b, row, offset, _I32)), words)
            for value, place in zip(values, mine, strict=True):
                b.store(_multiply_pairs(b, b.load(place), pair, value), place)
    return [[b.load(place) for place in mine] for mine in places]


def _each_tile(b: Any, num_halves: Any, emit: Callable[[int, Any], None]) -> None:
    """Call ``emit(rows, first row)`` for tiles that cover ``num_halves`` half tiles of rows."""
    whole = b.udiv(num_halves, ir.Constant(_I64, 2))
    with cgutils.for_range(b, whole) as loop:
        emit(_TILE_M, b.mul(loop.index, ir.Constant(_I64, _TILE_M)))
    with b.if_then(b.icmp_signed("!=", b.and_(num_halves, ir.Constant(_I64, 1)), _ZERO)):
        emit(_HALF_M, b.mul(whole, ir.Constant(_I64, _TILE_M)))


_ZERO = ir.Constant(_I64, 0)


@intrinsic(prefer_literal=True)
def _score_panels(
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
    their scales, as `_score_pairs` adds them. ``factors``: a row of ``out_bytes`` for each group.
    """
    f, dim = _literal(fmt), _literal(head_dim)
    q_line, out_line = _literal(q_bytes), _literal(out_bytes)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, q_scales, num_halves, panels, num_panels, factors, out = args[4:]
        groups = _pair_groups(f, dim)
        panel_bytes = 4 * _PANEL * _num_pairs(f, dim)
        with cgutils.for_range(b, num_panels) as loop:
            panel = b.add(panels, b.mul(loop.index, ir.Constant(_I64, panel_bytes)))
            column = b.mul(loop.index, ir.Constant(_I64, 4 * _PANEL))
            mine = _pointer(b, b.add(factors, column))

            def emit(num_rows: int, first: Any, panel: Any = panel, column: Any = column) -> None:
                rows = _pointer(b, b.add(q, b.mul(first, ir.Constant(_I64, q_line))))
                scales = _pointer(b, b.add(q_scales, b.mul(first, ir.Constant(_I64, 4))))
                line = b.mul(first, ir.Constant(_I64, out_line))
                target = _pointer(b, b.add(b.add(out, line), column))
                scores: dict[tuple[int, int], Any] = {}
                for n, (start, pairs) in enumerate(groups):
                    sums = _tile_of_pairs(
                        b,
                        num_rows,
                        b.gep(rows, [ir.Constant(_I64, 4 * start)]),
                        q_line,
                        b.gep(_pointer(b, panel), [ir.Constant(_I64, 4 * _PANEL * start)]),
                        ir.Constant(_I64, pairs),
                    )
                    for i, row in enumerate(sums):
                        for v, total in enumerate(row):
                            factor = _load(b, mine, out_line * n + 4 * LANES * v, _VF)
                            if f == INT8:
                                factor = b.fmul(factor, _splat(b, _load(b, scales, 4 * i, _F32)))
                            scores[i, v] = _add_scaled(
                                b, scores.get((i, v)), b.sitofp(total, _VF), factor
                            )
                for (i, v), score in scores.items():
                    _store(b, score, target, out_line * i + 4 * LANES * v)

            _each_tile(b, num_halves, emit)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, q_bytes, out_bytes, *[types.int64] * 7), codegen


@intrinsic(prefer_literal=True)
def _sum_panels(
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
    """Weighted sums of the panels' rows, finished as `_finish_pairs` does it.

    weights: int16, a row for each query and scale group. targets: addresses of float32 rows.
    """
    f, dim, w_line = _literal(fmt), _literal(head_dim), _literal(weights_bytes)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        weights, num_halves, panels, num_pairs, worth, targets = args[3:]
        groups, halves = num_groups(f, dim), 2 if f == INT4 else 1
        size = int4_group_size(dim) if f == INT4 else dim
        targets = _pointer(b, targets)

        def add_span(number: Any, first: Any, group: Any, count: int) -> None:
            panel = b.add(panels, b.mul(number, ir.Constant(_I64, 2 * SPLIT * _PANEL)))

            def emit(num_rows: int, row: Any) -> None:
                line = b.add(b.mul(row, ir.Constant(_I64, groups)), group)
                sums = _tile_of_pairs(
                    b,
                    num_rows,
                    _pointer(b, b.add(weights, b.mul(line, ir.Constant(_I64, w_line)))),
                    w_line * groups,
                    _pointer(b, panel),
                    num_pairs,
                )
                place = b.mul(line, ir.Constant(_I64, 4))
                factors = _pointer(b, b.add(worth, place))
                for i, mine in enumerate(sums):
                    at = b.mul(b.add(row, ir.Constant(_I64, i)), ir.Constant(_I64, 8))
                    target = _pointer(b, _load(b, targets, at, _I64))
                    factor = _splat(b, _load(b, factors, 4 * groups * i, _F32))
                    for v, total in enumerate(mine):
                        length = min(LANES, count - v * LANES)
                        if length > 0:
                            whole = b.sitofp(total, _VF)
                            real = b.fmul(whole, factor)
                            begin = b.add(first, ir.Constant(_I64, v * LANES))
                            begin = b.mul(begin, ir.Constant(_I64, 4))
                            _store(b, _narrow(b, real, length), target, begin)

            _each_tile(b, num_halves, emit)

        row_bytes = _row_bytes(f, dim)
        with cgutils.for_range(b, ir.Constant(_I64, halves * (row_bytes // _PANEL))) as loop:
            piece = b.udiv(loop.index, ir.Constant(_I64, halves))
            part = b.urem(loop.index, ir.Constant(_I64, halves))
            first = b.add(
                b.mul(piece, ir.Constant(_I64, _PANEL)), b.mul(part, ir.Constant(_I64, dim // 2))
            )
            add_span(loop.index, first, b.udiv(first, ir.Constant(_I64, size)), _PANEL)
        for n, (first, count, group) in enumerate(_word_spans(f, dim)):
            if count < _PANEL:
                add_span(*(ir.Constant(_I64, i) for i in (n, first, group)), count)
        return context.get_dummy_value()

    return types.void(fmt, head_dim, weights_bytes, *[types.int64] * 6), codegen


@intrinsic
def _weigh(typingctx: Any, target: Any, largest: Any, factors: Any, num_vectors: Any, total: Any):
    """`_exponentiate`, and `_largest_product` with ``factors``, in one pass.

    ``total`` is the address that gets the sum of the exponentials.
    """

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        target, factors = _pointer(b, args[0]), _pointer(b, args[2])
        total = cgutils.alloca_once_value(b, _const(0.0))
        best = cgutils.alloca_once_value(b, _const(-_INF))

        def weigh(at: Any, width: int) -> None:
            for i, p in enumerate(_weights(b, target, at, width, args[1])):
                b.store(b.fadd(b.load(total), p), total)
                place = b.add(at, ir.Constant(_I64, 4 * LANES * i))
                product = b.fmul(p, _load(b, factors, place, _VF))
                b.store(_max(b, product, b.load(best)), best)

        _each_two(b, args[3], weigh)
        _store(b, _fold(b, b.load(total), _add), _pointer(b, args[4]), 0)
        return _fold(b, b.load(best), _max)

    i64, f32 = types.int64, types.float32
    return types.float32(i64, f32, i64, i64, i64), codegen


# ---------------------------------------------------------------- kernels


@njit(error_model="numpy")
def _merge(partials, row_bytes, num, dim_vectors, sink, target):  # type: ignore[no-untyped-def]
    """Merge the partial results of one query row into target[:]; 1 / sum of weights.

    A partial is float32 [LANES + padded]: the largest score, the sum of exp, then the sums.
    """
    largest = sink
    for i in range(num):
        largest = max(largest, _get_f32(partials + i * row_bytes, 0))
    total = np.float32(0.0)
    if sink > -np.inf:
        total = np.float32(math.exp(sink - largest))
    _fill(target, np.float32(0.0), dim_vectors)
    for i in range(num):
        row = partials + i * row_bytes
        m = _get_f32(row, 0)
        if m > -np.inf:
            w = np.float32(math.exp(m - largest))
            total += w * _get_f32(row, 1)
            _scale_add(target, np.float32(1.0), row + 4 * LANES, w, dim_vectors)
    return np.float32(1.0) / total


@njit(error_model="numpy")
def _copy_words(source, target, num):  # type: ignore[no-untyped-def]
    """target[:num] = source[:num], 8 bytes each."""
    for i in range(num):
        _put_i64(target, i, _get_i64(source, i))


@njit(error_model="numpy")
def _clear_around(row, low, high):  # type: ignore[no-untyped-def]
    """Zero what lies before ``low`` and after ``high`` in the vectors that hold row[:high].

    Old scratch may hold NaN, which not even a weight of 0 would undo.
    """
    for i in range(min(low, high)):
        _put_f32(row, i, np.float32(0.0))
    for i in range(max(high, 0), (high + LANES - 1) // LANES * LANES):
        _put_f32(row, i, np.float32(0.0))


@njit(error_model="numpy")
def _put_steps(target, first, step, num):  # type: ignore[no-untyped-def]
    """target[:num] = first, first + step, ...; 8 bytes each."""
    for i in range(num):
        _put_i64(target, i, first + i * step)


def _decode_layout(
    k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int
) -> tuple[dict[str, int], int]:
    """Byte offsets of the parts of a decode thread's scratch, and its size."""
    v_groups = num_groups(v_fmt, v_dim) if in_pairs(v_fmt, v_dim) else 1
    k_split, v_split = (f == INT4 and in_pairs(f, d) for f, d in ((k_fmt, k_dim), (v_fmt, v_dim)))
    line = _DECODE_LINE
    sizes = {
        "row": 4 * LANES * len(_pieces(max(k_dim, v_dim))),
        "q": 4 * group * max(padded(k_fmt, k_dim), LANES * len(_word_spans(k_fmt, k_dim))),
        "acc": 4 * group * max(padded(v_fmt, v_dim), 2 * LANES * len(_word_spans(v_fmt, v_dim))),
        "scores": group * line,
        "k_factors": max(1, num_scales(k_fmt, k_dim)) * line,
        "v_factors": max(1, num_scales(v_fmt, v_dim)) * line,
        "v_largest": line if v_split else 0,
        "weights": group * v_groups * line // 2,
        # After a split's rows stand those that the last block, or the last pair, reads beyond it.
        "k_places": 8 * (SPLIT + 4 * LANES + MAX_CHUNK),
        "v_places": 8 * (SPLIT + 4 * LANES + MAX_CHUNK),
        "q_scales": 4 * group,
        "worth": 4 * group * v_groups,
        "offsets": 4 * group * v_groups,
        "k_rows": SPLIT * unpacked_bytes(k_dim) if k_split else 0,
        "v_rows": SPLIT * unpacked_bytes(v_dim) if v_split else 0,
    }
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // 64) * 64
    return offsets, total


def decode_scratch_bytes(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int) -> int:
    """Bytes of scratch that each thread of the decode kernel needs."""
    return _decode_layout(k_fmt, v_fmt, k_dim, v_dim, group)[1]


def make_decode(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int) -> Any:
    """The kernel for sequences with one new token and ``group`` query heads a KV head."""
    k_pairs, v_pairs = in_pairs(k_fmt, k_dim), in_pairs(v_fmt, v_dim)
    v_groups = num_groups(v_fmt, v_dim) if v_pairs else 1
    block = _keys_per_block(group)
    k_scales, v_scales = num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim)
    k_split, v_split = k_pairs and k_fmt == INT4, v_pairs and v_fmt == INT4
    k_row, v_row = _row_bytes(k_fmt, k_dim), _row_bytes(v_fmt, v_dim)
    k_wide, v_wide = (
        unpacked_bytes(dim) if is_split else row
        for is_split, dim, row in ((k_split, k_dim, k_row), (v_split, v_dim, v_row))
    )
    q_width = 4 * (LANES * len(_word_spans(k_fmt, k_dim)) if k_pairs else padded(k_fmt, k_dim))
    acc_width = 4 * (
        2 * LANES * len(_word_spans(v_fmt, v_dim)) if v_pairs else padded(v_fmt, v_dim)
    )
    out_vectors = len(_pieces(v_dim))
    partial_bytes = 4 * LANES * (1 + out_vectors)
    line = _DECODE_LINE
    k_factor, v_factor = _factor(k_fmt), _factor(v_fmt)
    k_one, v_one = k_fmt in LARGEST_CODE, v_fmt in LARGEST_CODE
    lanes, split_tokens, first_counter = LANES, SPLIT, COUNTERS
    chunk = _chunk(k_row, v_row)
    at, _ = _decode_layout(k_fmt, v_fmt, k_dim, v_dim, group)
    at_row, at_q, at_acc, at_scores, at_v_largest = (
        at[n] for n in ("row", "q", "acc", "scores", "v_largest")
    )
    at_k_factors, at_v_factors, at_weights = at["k_factors"], at["v_factors"], at["weights"]
    at_k_places, at_v_places = at["k_places"], at["v_places"]
    at_q_scales, at_worth, at_offsets = at["q_scales"], at["worth"], at["offsets"]
    at_k_rows, at_v_rows = at["k_rows"], at["v_rows"]

    def decode(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + _fetch_add(args.counters, 0) * args.scratch_bytes
        row, q, acc, scores = memory + at_row, memory + at_q, memory + at_acc, memory + at_scores
        k_factors, v_factors = memory + at_k_factors, memory + at_v_factors
        k_places, v_places = memory + at_k_places, memory + at_v_places
        weights, worth, offsets = memory + at_weights, memory + at_worth, memory + at_offsets
        q_scales, v_largest = memory + at_q_scales, memory + at_v_largest
        k_rows, v_rows = memory + at_k_rows, memory + at_v_rows
        page_size = args.page_size
        while True:
            number = _fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            # The last tiles of a prompt read most: taken first, they leave no thread behind.
            task = args.num_tasks - 1 - number // args.num_kv_heads
            head = number % args.num_kv_heads
            seq = np.int64(_get_i32(args.tasks, 5 * task))
            first_query = np.int64(_get_i32(args.tasks, 5 * task + 1))
            first_split = np.int64(_get_i32(args.tasks, 5 * task + 2))
            num_splits = np.int64(_get_i32(args.tasks, 5 * task + 3))
            first_partial = np.int64(_get_i32(args.tasks, 5 * task + 4))
            seq_len = np.int64(_get_i32(args.seq_lens, seq))
            begin = np.int64(_get_i32(args.cu_seqlens_q, seq))
            query_len = np.int64(_get_i32(args.cu_seqlens_q, seq + 1)) - begin
            num_queries = min(args.tile_queries, query_len - first_query)
            first_pos = seq_len - query_len + first_query
            # One split of one query: partial results are shared, and the last task merges them.
            # A tile of queries: this task takes all splits, its partial results are its own.
            partials, partial_rows = args.partials, args.num_partials
            after_split = first_split + 1
            # Then int4 rows are unpacked once for all queries.
            is_tile = first_partial < 0
            if is_tile:
                partials, partial_rows = memory + args.partials_offset, num_splits
                after_split = num_splits
            for split in range(first_split, after_split):
                origin = split * split_tokens
                low, high = origin, min(origin + split_tokens, first_pos + num_queries)
                if args.window > 0:
                    low = max(low, first_pos + 1 - args.window)
                _count(args.counters, 4, max(np.int64(0), high - low))
                # All lines of scales are asked for at once, and read below.
                first_page = low // page_size
                first_offset = low - first_page * page_size
                for turn in range(2):
                    t, number_of_page, offset = low, first_page, first_offset
                    while t < high:
                        page = np.int64(
                            _get_i32(args.page_table, seq * args.table_row + number_of_page)
                        )
                        if page < 0 or page >= args.num_pages:
                            # Read as page 0; the call fails in the end.
                            _put_i64(args.counters, 2, page + (1 if page >= 0 else 0))
                            page = 0
                        length = min(page_size - offset, high - t)
                        k_source = (
                            args.k_scale
                            + page * args.ks_page
                            + head * args.ks_head
                            + 2 * k_scales * offset
                        )
                        v_source = (
                            args.v_scale
                            + page * args.vs_page
                            + head * args.vs_head
                            + 2 * v_scales * offset
                        )
                        place = t - origin
                        if turn == 0:
                            if k_scales > 0:
                                _ask_for(k_source)
                            if v_scales > 0:
                                _ask_for(v_source)
                        else:
                            if k_split:
                                _split_scales(
                                    k_scales, k_source, k_factors + 4 * place, line, length
                                )
                            elif k_scales > 0:
                                _widen_scales(
                                    k_source,
                                    k_factors + 4 * k_scales * place,
                                    length * k_scales,
                                    np.float32(k_factor),
                                )
                            if v_split:
                                _split_scales(
                                    v_scales, v_source, v_factors + 4 * place, line, length
                                )
                            elif v_scales > 0:
                                _widen_scales(
                                    v_source,
                                    v_factors + 4 * v_scales * place,
                                    length * v_scales,
                                    np.float32(v_factor),
                                )
                            k_from = args.k_pages + page * args.k_page + head * args.k_head
                            v_from = args.v_pages + page * args.v_page + head * args.v_head
                            k_from, v_from = k_from + offset * k_row, v_from + offset * v_row
                            k_step, v_step = k_row, v_row
                            if k_split and is_tile:
                                k_unpacked = k_rows + place * k_wide
                                _unpack_rows(k_dim, k_from, k_unpacked, length)
                                k_from, k_step = k_unpacked, k_wide
                            if v_split and is_tile:
                                v_unpacked = v_rows + place * v_wide
                                _unpack_rows(v_dim, v_from, v_unpacked, length)
                                v_from, v_step = v_unpacked, v_wide
                            _put_steps(k_places + 8 * place, k_from, k_step, length)
                            _put_steps(v_places + 8 * place, v_from, v_step, length)
                        t += length
                        number_of_page += 1
                        offset = np.int64(0)
                # A block of keys may go beyond the last, a pair of values may begin before the
                # first. What is asked for ahead of the last keys are the first values.
                place, last = high - origin, high - 1 - origin
                if low < high:
                    for i in range(block - 1):
                        _put_i64(k_places, place + i, _get_i64(k_places, last))
                    for i in range(block - 1, block - 1 + chunk):
                        value = min(low - origin + i - (block - 1), last)
                        _put_i64(k_places, place + i, _get_i64(v_places, value))
                    for i in range(chunk + 1):
                        _put_i64(v_places, place + i, _get_i64(v_places, last))
                    if (low - origin) % 2 == 1:
                        _put_i64(v_places, low - origin - 1, _get_i64(v_places, low - origin))
                if k_one:
                    for n in range(k_scales):
                        _clear_around(k_factors + n * line, low - origin, high - origin)
                if v_one or v_split:
                    for n in range(v_scales):
                        _clear_around(v_factors + n * line, low - origin, high - origin)
                if v_split:
                    vectors = (high - origin + lanes - 1) // lanes
                    _largest_scales(v_scales, v_factors, line, v_largest, vectors)
                for query in range(num_queries):
                    pos = first_pos + query
                    start, end = origin, min(origin + split_tokens, pos + 1)
                    if args.window > 0:
                        start = max(start, pos + 1 - args.window)
                    for g in range(group):
                        q_head = head * group + g
                        _load_query(
                            k_dim,
                            args.q
                            + 4
                            * ((begin + first_query + query) * args.q_token + q_head * args.q_head),
                            row,
                            args.scale,
                            args.rotate_k,
                        )
                        if k_pairs:
                            scale = _quantize_query(k_fmt, k_dim, row, q + g * q_width)
                            _put_f32(q_scales, g, scale)
                        else:
                            _put_f32(q_scales, g, np.float32(1.0))
                            _to_read_order(k_fmt, k_dim, row, q + g * q_width)
                    # A token's place is counted from the split's first, seen or not, so that
                    # sums over vectors are the same whatever else is seen.
                    skipped = max(np.int64(0), start - origin)
                    num = max(end - origin, 0)
                    if end <= start:
                        num = np.int64(0)
                    if num > 0:
                        if k_split and is_tile:
                            _score_pairs(
                                k_fmt,
                                k_dim,
                                group,
                                1,
                                chunk,
                                q,
                                k_places + 8 * skipped,
                                num - skipped,
                                k_factors + 4 * skipped,
                                line,
                                scores + 4 * skipped,
                            )
                        elif k_pairs:
                            _score_pairs(
                                k_fmt,
                                k_dim,
                                group,
                                0,
                                chunk,
                                q,
                                k_places + 8 * skipped,
                                num - skipped,
                                k_factors + 4 * skipped,
                                line,
                                scores + 4 * skipped,
                            )
                        else:
                            _score_keys(
                                k_fmt,
                                k_dim,
                                group,
                                chunk,
                                q,
                                k_places + 8 * skipped,
                                num - skipped,
                                k_factors + 4 * k_scales * skipped,
                                4 * k_scales,
                                scores + 4 * skipped,
                                line,
                            )
                    num_vectors = (num + lanes - 1) // lanes
                    _fill(acc, np.float32(0.0), group * acc_width // (4 * lanes))
                    for g in range(group):
                        q_head = head * group + g
                        mine = scores + g * line
                        if k_split:
                            _scale_add(
                                mine, _get_f32(q_scales, g), mine, np.float32(0.0), num_vectors
                            )
                        elif k_one:
                            _multiply(mine, k_factors, _get_f32(q_scales, g), num_vectors)
                        if args.softcap > 0:
                            _cap(mine, args.softcap, num_vectors)
                        if args.slopes != 0:
                            slope = _get_f32(args.slopes, q_head)
                            for i in range(skipped, num):
                                bias = slope * np.float32(origin + i - pos)
                                _put_f32(mine, i, _get_f32(mine, i) + bias)
                        if num > 0:
                            for i in range(skipped):
                                _put_f32(mine, i, np.float32(-np.inf))
                        for i in range(num, num_vectors * lanes):
                            _put_f32(mine, i, np.float32(-np.inf))
                        largest = _largest(mine, num_vectors)
                        total = np.float32(0.0)
                        if num > 0:
                            total = _exponentiate(mine, largest, num_vectors)
                        if v_pairs:
                            heaviest = _largest_product(
                                mine, v_largest if v_split else v_factors, num_vectors
                            )
                            factor = np.float32(0.0)
                            if heaviest > 0:
                                factor = np.float32(32767.0) / heaviest
                            for n in range(v_groups):
                                number_of_row = g * v_groups + n
                                whole = _quantize_weights(
                                    mine,
                                    v_factors + n * line,
                                    factor,
                                    weights + number_of_row * (line // 2),
                                    num_vectors,
                                )
                                _put_f32(worth, number_of_row, heaviest / np.float32(32767.0))
                                # Stored int4 codes lie 8 above the ones that count.
                                if is_tile:
                                    whole = np.int32(0)
                                _put_i32(offsets, number_of_row, np.int32(8) * whole)
                        elif v_one:
                            _multiply(mine, v_factors, np.float32(1.0), num_vectors)
                        partial = partials + partial_bytes * (
                            q_head * partial_rows + first_partial + split
                        )
                        if first_partial < 0:
                            partial = partials + partial_bytes * (
                                (query * group + g) * partial_rows + split
                            )
                        _put_f32(partial, 0, largest)
                        _put_f32(partial, 1, total)
                    # Chunk by chunk, so that the passes over the columns find it in cache.
                    # Pairs begin at even places: what lies before the first or after the last
                    # has no weight.
                    done = skipped // 2 * 2 if v_pairs else skipped
                    while done < num:
                        count = min(chunk, num - done)
                        if v_split and is_tile:
                            _add_pairs(
                                v_fmt,
                                v_dim,
                                group,
                                1,
                                chunk,
                                acc,
                                weights + 2 * done,
                                line // 2,
                                v_places + 8 * done,
                                count,
                            )
                        elif v_pairs:
                            _add_pairs(
                                v_fmt,
                                v_dim,
                                group,
                                0,
                                chunk,
                                acc,
                                weights + 2 * done,
                                line // 2,
                                v_places + 8 * done,
                                count,
                            )
                        else:
                            _add_values(
                                v_fmt,
                                v_dim,
                                group,
                                chunk,
                                acc,
                                scores + 4 * done,
                                line,
                                v_places + 8 * done,
                                count,
                                v_factors + 4 * v_scales * done,
                                4 * v_scales,
                            )
                        done += count
                    for g in range(group):
                        partial = partials + partial_bytes * (
                            (head * group + g) * partial_rows + first_partial + split
                        )
                        if first_partial < 0:
                            partial = partials + partial_bytes * (
                                (query * group + g) * partial_rows + split
                            )
                        if v_pairs:
                            _finish_pairs(
                                v_fmt,
                                v_dim,
                                acc + g * acc_width,
                                partial + 4 * lanes,
                                worth + 4 * g * v_groups,
                                offsets + 4 * g * v_groups,
                            )
                        else:
                            _to_natural_order(
                                v_fmt, v_dim, acc + g * acc_width, partial + 4 * lanes
                            )
            merges = first_partial < 0
            if first_partial < -1:
                # What `make_shared` found for the splits before this task's.
                for query in range(num_queries):
                    base = -2 - first_partial + query * first_split
                    for g in range(group):
                        _copy_words(
                            args.partials
                            + partial_bytes * ((head * group + g) * args.num_partials + base),
                            partials + partial_bytes * ((query * group + g) * partial_rows),
                            first_split * (partial_bytes // 8),
                        )
            if first_partial >= 0:
                counter = first_counter + first_partial * args.num_kv_heads + head
                merges = _fetch_add(args.counters, counter) == num_splits - 1
            if merges:
                for query in range(num_queries):
                    for g in range(group):
                        q_head = head * group + g
                        sink = np.float32(-np.inf)
                        if args.sinks != 0:
                            sink = _get_f32(args.sinks, q_head)
                        partial = partials + partial_bytes * (q_head * partial_rows + first_partial)
                        if first_partial < 0:
                            partial = partials + partial_bytes * (
                                (query * group + g) * partial_rows
                            )
                        # A tile's splits may begin after this query.
                        seen = min(num_splits, (first_pos + query) // split_tokens + 1)
                        factor = _merge(partial, partial_bytes, seen, out_vectors, sink, row)
                        _store_row(
                            v_dim,
                            row,
                            args.out
                            + 4
                            * (
                                (begin + first_query + query) * args.out_token
                                + q_head * args.out_head
                            ),
                            factor,
                            args.rotate_v,
                        )

    return compile_callback(_SIGNATURE)(decode)


def _shared_layout(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> tuple[dict[str, int], int]:
    """Byte offsets of the parts of a thread's scratch for shared splits, and its size."""
    rows, line = SHARED_ROWS + _TILE_M, _DECODE_LINE
    v_groups = num_groups(v_fmt, v_dim)
    words = 4 * LANES * max(len(_word_spans(k_fmt, k_dim)), 1)
    sizes = {
        "row": 4 * LANES * len(_pieces(max(k_dim, v_dim))),
        "words": words,
        "k_rows": 8 * (SPLIT + PREFETCH_TOKENS),
        "v_rows": 8 * (SPLIT + PREFETCH_TOKENS),
        "k_factors": max(1, num_scales(k_fmt, k_dim)) * line,
        "v_factors": max(1, num_scales(v_fmt, v_dim)) * line,
        "v_largest": line,
        "scores": rows * line,
        "weights": rows * v_groups * line // 2,
        "worth": 4 * rows * v_groups,
        "targets": 8 * rows,
        "nowhere": 4 * LANES * (2 + len(_pieces(v_dim))),
        "k_panels": SPLIT * 4 * _num_pairs(k_fmt, k_dim),
        "v_panels": 2 * SPLIT * _PANEL * len(_word_spans(v_fmt, v_dim)),
    }
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // 64) * 64
    return offsets, total


def shared_scratch_bytes(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, most_rows: int) -> int:
    """Bytes of scratch that each thread needs for tasks of ``most_rows`` query rows."""
    kept = -(-4 * _num_pairs(k_fmt, k_dim) // 64) * 64 + 4
    return _shared_layout(k_fmt, v_fmt, k_dim, v_dim)[1] + kept * (most_rows + _TILE_M)


def make_shared(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> Any:
    """The kernel for splits that several query rows attend to: their partial results.

    The queries of a task stand in the order of their positions; the last one sees all that is
    read of a split, each one what lies up to its own token.
    """
    k_scales, v_scales = num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim)
    v_groups = num_groups(v_fmt, v_dim)
    k_row, v_row = _row_bytes(k_fmt, k_dim), _row_bytes(v_fmt, v_dim)
    k_split, v_split = k_fmt == INT4, v_fmt == INT4
    q_width = -(-4 * _num_pairs(k_fmt, k_dim) // 64) * 64
    partial_bytes = 4 * LANES * (1 + len(_pieces(v_dim)))
    line, half_line = _DECODE_LINE, _DECODE_LINE // 2
    lanes, split_tokens, half_tile, ahead = LANES, SPLIT, _HALF_M, PREFETCH_TOKENS
    panel = _PANEL
    at, at_q = _shared_layout(k_fmt, v_fmt, k_dim, v_dim)
    at_row, at_words, at_k_rows, at_v_rows = (at[n] for n in ("row", "words", "k_rows", "v_rows"))
    at_k_factors, at_v_factors, at_v_largest, at_scores, at_weights, at_worth = (
        at[n] for n in ("k_factors", "v_factors", "v_largest", "scores", "weights", "worth")
    )
    at_targets, at_nowhere = at["targets"], at["nowhere"]
    at_k_panels, at_v_panels, most_rows = at["k_panels"], at["v_panels"], SHARED_ROWS
    tile_m = _TILE_M

    def shared(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + _fetch_add(args.counters, 0) * args.scratch_bytes
        row, words, q = memory + at_row, memory + at_words, memory + at_q
        q_scales = q + (args.most_rows + tile_m) * q_width
        k_rows, v_rows = memory + at_k_rows, memory + at_v_rows
        k_factors, v_factors = memory + at_k_factors, memory + at_v_factors
        v_largest, scores, weights = memory + at_v_largest, memory + at_scores, memory + at_weights
        worth, targets = memory + at_worth, memory + at_targets
        nowhere, k_panels, v_panels = (
            memory + at_nowhere,
            memory + at_k_panels,
            memory + at_v_panels,
        )
        group, page_size = args.group, args.page_size
        most_queries = max(np.int64(1), most_rows // group)
        while True:
            number = _fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            task, head = number // args.num_kv_heads, number % args.num_kv_heads
            seq = np.int64(_get_i32(args.tasks, 5 * task))
            split = np.int64(_get_i32(args.tasks, 5 * task + 1))
            after_split = np.int64(_get_i32(args.tasks, 5 * task + 2))
            task_query = np.int64(_get_i32(args.tasks, 5 * task + 3))
            after_query = task_query + np.int64(_get_i32(args.tasks, 5 * task + 4))
            for r in range((after_query - task_query) * group):
                token = np.int64(_get_i32(args.queries, 3 * (task_query + r // group)))
                _load_query(
                    k_dim,
                    args.q + 4 * (token * args.q_token + (head * group + r % group) * args.q_head),
                    row,
                    args.scale,
                    args.rotate_k,
                )
                scale = _quantize_query(k_fmt, k_dim, row, words)
                _pair_query(k_fmt, k_dim, words, q + r * q_width)
                _put_f32(q_scales, r, scale)
            last_pos = np.int64(_get_i32(args.queries, 3 * (after_query - 1) + 1))
            while split < after_split:
                origin = split * split_tokens
                num_tokens = min(split_tokens, last_pos + 1 - origin)
                if args.window > 0:
                    # What the first does not see, none sees.
                    pos = np.int64(_get_i32(args.queries, 3 * task_query + 1))
                    if pos + 1 - args.window >= origin + split_tokens:
                        for query in range(task_query, after_query):
                            base = np.int64(_get_i32(args.queries, 3 * query + 2))
                            for g in range(group):
                                partial = args.partials + partial_bytes * (
                                    (head * group + g) * args.num_partials + base + split
                                )
                                _put_f32(partial, 0, np.float32(-np.inf))
                                _put_f32(partial, 1, np.float32(0.0))
                        split += 1
                        continue
                _count(args.counters, 4, num_tokens)
                t = 0
                while t < num_tokens:
                    page = np.int64(
                        _get_i32(args.page_table, seq * args.table_row + (origin + t) // page_size)
                    )
                    if page < 0 or page >= args.num_pages:
                        # Read as page 0; the call fails in the end.
                        _put_i64(args.counters, 2, page + (1 if page >= 0 else 0))
                        page = 0
                    k_source = args.k_scale + page * args.ks_page + head * args.ks_head
                    v_source = args.v_scale + page * args.vs_page + head * args.vs_head
                    if k_split:
                        _split_scales(k_scales, k_source, k_factors + 4 * t, line, page_size)
                    else:
                        _widen_scales(k_source, k_factors + 4 * t, page_size, np.float32(1.0))
                    if v_split:
                        _split_scales(v_scales, v_source, v_factors + 4 * t, line, page_size)
                    else:
                        _widen_scales(v_source, v_factors + 4 * t, page_size, np.float32(1.0))
                    k_page = args.k_pages + page * args.k_page + head * args.k_head
                    v_page = args.v_pages + page * args.v_page + head * args.v_head
                    for i in range(page_size):
                        _put_i64(k_rows, t + i, k_page + i * k_row)
                        _put_i64(v_rows, t + i, v_page + i * v_row)
                    t += page_size
                # What fills the last panel is multiplied, by weights of 0.
                packed = (num_tokens + panel - 1) // panel * panel
                for i in range(num_tokens, packed):
                    _put_i64(k_rows, i, _get_i64(k_rows, num_tokens - 1))
                    _put_i64(v_rows, i, _get_i64(v_rows, num_tokens - 1))
                    for n in range(v_scales):
                        _put_f32(v_factors + n * line, i, np.float32(0.0))
                if v_split:
                    _largest_scales(v_scales, v_factors, line, v_largest, packed // lanes)
                for i in range(ahead):
                    _put_i64(k_rows, packed + i, _get_i64(v_rows, min(i, num_tokens - 1)))
                    _put_i64(v_rows, packed + i, _get_i64(v_rows, num_tokens - 1))
                _pack_keys(k_fmt, k_dim, k_rows, packed // 8, ahead, k_panels)
                _pack_values(v_fmt, v_dim, v_rows, packed // 2, ahead, v_panels)
                next_query = task_query
                while next_query < after_query:
                    first_query = next_query
                    first_row = (first_query - task_query) * group
                    num_queries = min(most_queries, after_query - first_query)
                    next_query += num_queries
                    num_rows = num_queries * group
                    num_halves = (num_rows + half_tile - 1) // half_tile
                    pos = np.int64(_get_i32(args.queries, 3 * (next_query - 1) + 1))
                    most_seen = min(split_tokens, max(np.int64(0), pos + 1 - origin))
                    num_panels = (most_seen + panel - 1) // panel
                    vectors = num_panels * panel // lanes
                    for r in range(num_rows):
                        base = np.int64(_get_i32(args.queries, 3 * (first_query + r // group) + 2))
                        partial = args.partials + partial_bytes * (
                            (head * group + r % group) * args.num_partials + base + split
                        )
                        _put_i64(targets, r, partial + 4 * lanes)
                    for r in range(num_rows, num_halves * half_tile):
                        # What these rows hold is multiplied, and dropped.
                        _put_i64(targets, r, nowhere)
                    _score_panels(
                        k_fmt,
                        k_dim,
                        q_width,
                        line,
                        q + first_row * q_width,
                        q_scales + 4 * first_row,
                        num_halves,
                        k_panels,
                        num_panels,
                        k_factors,
                        scores,
                    )
                    for r in range(num_rows):
                        query = first_query + r // group
                        pos = np.int64(_get_i32(args.queries, 3 * query + 1))
                        seen = min(split_tokens, max(np.int64(0), pos + 1 - origin))
                        skipped = np.int64(0)
                        if args.window > 0:
                            skipped = min(seen, max(np.int64(0), pos + 1 - args.window - origin))
                        mine = scores + r * line
                        if k_split:
                            scale = _get_f32(q_scales, first_row + r)
                            _scale_add(mine, scale, mine, np.float32(0.0), vectors)
                        if args.softcap > 0:
                            _cap(mine, args.softcap, vectors)
                        if args.slopes != 0:
                            slope = _get_f32(args.slopes, head * group + r % group)
                            for i in range(seen):
                                bias = slope * np.float32(origin + i - pos)
                                _put_f32(mine, i, _get_f32(mine, i) + bias)
                        for i in range(skipped):
                            _put_f32(mine, i, np.float32(-np.inf))
                        for i in range(seen, vectors * lanes):
                            _put_f32(mine, i, np.float32(-np.inf))
                        largest, heaviest = np.float32(-np.inf), np.float32(0.0)
                        if skipped < seen:
                            largest = _largest(mine, vectors)
                        partial = _get_i64(targets, r) - 4 * lanes
                        if skipped == seen:
                            _fill(mine, np.float32(0.0), vectors)
                        else:
                            factors = v_largest if v_split else v_factors
                            heaviest = _weigh(mine, largest, factors, vectors, partial + 4)
                        factor = np.float32(0.0)
                        if heaviest > 0:
                            factor = np.float32(32767.0) / heaviest
                        for n in range(v_groups):
                            weight_row = r * v_groups + n
                            _quantize_weights(
                                mine,
                                v_factors + n * line,
                                factor,
                                weights + weight_row * half_line,
                                vectors,
                            )
                            _put_f32(worth, weight_row, heaviest / np.float32(32767.0))
                        _put_f32(partial, 0, largest)
                        if skipped == seen:
                            _put_f32(partial, 1, np.float32(0.0))
                    _sum_panels(
                        v_fmt,
                        v_dim,
                        half_line,
                        weights,
                        num_halves,
                        v_panels,
                        vectors * lanes // 2,
                        worth,
                        targets,
                    )
                split += 1

    return compile_callback(_SIGNATURE)(shared)


def make_extend(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, shared: int = 0) -> Any:
    """The kernel for sequences with several new tokens, or with many query heads a KV head.

    With ``shared``: for whole splits that queries of several sequences attend to, as
    `make_shared`, in floats; all splits of a task become one partial result, at its first.
    """
    k_scales, v_scales = num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim)
    k_row, v_row = _row_bytes(k_fmt, k_dim), _row_bytes(v_fmt, v_dim)
    k_vectors, v_vectors = len(_pieces(k_dim)), len(_pieces(v_dim))
    k_width, v_width = 4 * LANES * k_vectors, 4 * LANES * v_vectors
    k_factor, v_factor = _factor(k_fmt), _factor(v_fmt)
    lanes, tile_m, tile = LANES, _TILE_M, TILE
    tile_rows, split_tokens = TILE_ROWS, SPLIT
    partial_bytes = 4 * partial_floats(v_dim)

    def extend(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + _fetch_add(args.counters, 0) * args.scratch_bytes
        group, page_size = args.group, args.page_size
        queries = max(1, tile_rows // group)
        most_rows = (queries * group + lanes - 1) // lanes * lanes
        q = memory
        acc = q + 4 * k_dim * most_rows
        scores = acc + v_width * most_rows
        stats = scores + 4 * tile * most_rows
        query_pos = stats + 12 * most_rows
        k_tile = query_pos + 4 * most_rows
        v_tile = k_tile + tile * k_width
        factors = v_tile + tile * v_width
        row_floats = factors + 4 * 2 * (tile + 64) * max(1, k_scales, v_scales)
        while True:
            number = _fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            # The last tiles read most: taken first, they leave no thread behind at the end.
            task = args.num_tasks - 1 - number // args.num_kv_heads
            head = number % args.num_kv_heads
            seq = np.int64(_get_i32(args.tasks, 5 * task))
            first_query = np.int64(_get_i32(args.tasks, 5 * task + 1))
            seq_len = np.int64(_get_i32(args.seq_lens, seq))
            begin = np.int64(_get_i32(args.cu_seqlens_q, seq))
            query_len = np.int64(_get_i32(args.cu_seqlens_q, seq + 1)) - begin
            num_queries = min(queries, query_len - first_query)
            split, after_split = first_query, np.int64(_get_i32(args.tasks, 5 * task + 2))
            if shared:
                first_query = np.int64(_get_i32(args.tasks, 5 * task + 3))
                num_queries = np.int64(_get_i32(args.tasks, 5 * task + 4))
            num_rows = num_queries * group
            row_vectors = (num_rows + lanes - 1) // lanes
            rows = row_vectors * lanes
            first_pos = seq_len - query_len + first_query
            # Queries lie transposed, [head_dim, rows]: a score tile is K times that.
            for r in range(num_rows):
                query, g = r // group, r % group
                token, pos = begin + first_query + query, first_pos + query
                if shared:
                    token = np.int64(_get_i32(args.queries, 3 * (first_query + query)))
                    pos = np.int64(_get_i32(args.queries, 3 * (first_query + query) + 1))
                _load_query(
                    k_dim,
                    args.q + 4 * (token * args.q_token + (head * group + g) * args.q_head),
                    row_floats,
                    args.scale,
                    args.rotate_k,
                )
                for e in range(k_dim):
                    _put_f32(q, e * rows + r, _get_f32(row_floats, e))
                _put_i32(query_pos, r, np.int32(pos))
            for r in range(num_rows, rows):
                for e in range(k_dim):
                    _put_f32(q, e * rows + r, np.float32(0.0))
                _put_i32(query_pos, r, np.int32(-1))
            _fill(stats, np.float32(-np.inf), row_vectors)
            _fill(stats + 4 * rows, np.float32(0.0), row_vectors)
            _fill(acc, np.float32(0.0), rows * v_vectors)
            window = args.window if args.window > 0 else np.int64(1 << 30)
            end = first_pos + num_queries
            start = max(np.int64(0), first_pos + 1 - window) // tile * tile
            if shared:
                start, end = split * split_tokens, after_split * split_tokens
            t = start
            while t < end:
                num = min(tile, end - t)
                _count(args.counters, 4, num)
                i = np.int64(0)
                while i < num:
                    page = np.int64(
                        _get_i32(args.page_table, seq * args.table_row + (t + i) // page_size)
                    )
                    if page < 0 or page >= args.num_pages:
                        _put_i64(args.counters, 2, page + (1 if page >= 0 else 0))
                        page = 0
                    offset = (t + i) % page_size
                    length = min(page_size - offset, num - i)
                    if k_scales > 0:
                        _widen_scales(
                            args.k_scale
                            + page * args.ks_page
                            + head * args.ks_head
                            + 2 * k_scales * offset,
                            factors,
                            length * k_scales,
                            np.float32(k_factor),
                        )
                    from_row = (
                        args.k_pages + page * args.k_page + head * args.k_head + offset * k_row
                    )
                    for j in range(length):
                        _dequantize_row(
                            k_fmt,
                            k_dim,
                            from_row + j * k_row,
                            factors + 4 * k_scales * j,
                            k_tile + (i + j) * k_width,
                        )
                    if v_scales > 0:
                        _widen_scales(
                            args.v_scale
                            + page * args.vs_page
                            + head * args.vs_head
                            + 2 * v_scales * offset,
                            factors,
                            length * v_scales,
                            np.float32(v_factor),
                        )
                    from_row = (
                        args.v_pages + page * args.v_page + head * args.v_head + offset * v_row
                    )
                    for j in range(length):
                        _dequantize_row(
                            v_fmt,
                            v_dim,
                            from_row + j * v_row,
                            factors + 4 * v_scales * j,
                            v_tile + (i + j) * v_width,
                        )
                    i += length
                keys = (num + tile_m - 1) // tile_m * tile_m
                _product(
                    0, keys, row_vectors, k_dim, k_tile, k_width, 4, q, 4 * rows, scores, 4 * rows
                )
                if args.softcap > 0:
                    _cap(scores, args.softcap, num * row_vectors)
                if args.slopes != 0:
                    for i in range(num):
                        for r in range(num_rows):
                            bias = _get_f32(args.slopes, head * group + r % group) * np.float32(
                                t + i - _get_i32(query_pos, r)
                            )
                            at = i * rows + r
                            _put_f32(scores, at, _get_f32(scores, at) + bias)
                for v in range(row_vectors):
                    _softmax_tile(
                        scores + 4 * lanes * v,
                        4 * rows,
                        num,
                        t,
                        query_pos + 4 * lanes * v,
                        window,
                        stats + 4 * lanes * v,
                        4 * rows,
                    )
                for r in range(num_rows):
                    alpha = _get_f32(stats, 2 * rows + r)
                    if alpha != np.float32(1.0):
                        mine = acc + r * v_width
                        _scale_add(mine, alpha, mine, np.float32(0.0), v_vectors)
                _product(
                    1,
                    (num_rows + tile_m - 1) // tile_m * tile_m,
                    v_vectors,
                    num,
                    scores,
                    4,
                    4 * rows,
                    v_tile,
                    v_width,
                    acc,
                    v_width,
                )
                t += tile
            for r in range(num_rows):
                query, q_head = r // group, head * group + r % group
                partial = acc + r * v_width
                m, total = _get_f32(stats, r), _get_f32(stats, rows + r)
                if shared:
                    base = np.int64(_get_i32(args.queries, 3 * (first_query + query) + 2))
                    place = args.partials + partial_bytes * (
                        q_head * args.num_partials + base + split
                    )
                    for i in range(1, after_split - split):
                        _put_f32(place + i * partial_bytes, 0, np.float32(-np.inf))
                    _put_f32(place, 0, m)
                    _put_f32(place, 1, total)
                    _copy_words(partial, place + 4 * lanes, v_width // 8)
                    continue
                sink = np.float32(-np.inf)
                if args.sinks != 0:
                    sink = _get_f32(args.sinks, q_head)
                largest = max(m, sink)
                w = np.float32(math.exp(m - largest))
                total = total * w
                if args.sinks != 0:
                    total += np.float32(math.exp(sink - largest))
                _store_row(
                    v_dim,
                    partial,
                    args.out
                    + 4 * ((begin + first_query + query) * args.out_token + q_head * args.out_head),
                    w / total,
                    args.rotate_v,
                )

    return compile_callback(_SIGNATURE)(extend)


def extend_rows(group: int) -> int:
    """Query rows of an extend task, padded to whole vectors."""
    return -(-max(1, TILE_ROWS // group) * group // LANES) * LANES


def extend_scratch_bytes(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int) -> int:
    """Bytes of scratch that each thread of the extend kernel needs."""
    rows = extend_rows(group)
    k_width, v_width = (4 * LANES * len(_pieces(d)) for d in (k_dim, v_dim))
    scales = max(1, num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim))
    total = rows * (4 * k_dim + v_width + 4 * TILE + 16) + TILE * (k_width + v_width)
    total += 8 * (TILE + 64) * scales + max(k_width, v_width)
    return -(-total // 64) * 64


def partial_floats(v_dim: int) -> int:
    """Floats of one partial result: largest score, sum of exp, the weighted sum of rows."""
    return LANES * (1 + len(_pieces(v_dim)))


def _overflow_factor(fmt: int, dim: int, rotate: bool) -> float:
    """With what rows are multiplied so that those overflow that may not be finite as stored.

    Exact but for FLOAT16 and BFLOAT16 pages, whose limits are no powers of two: rows that come
    near them overflow as well. As `radixkv.quant.row_limit`.
    """
    block = dim & -dim
    exponent = 127 if fmt != FLOAT32 or rotate else 128  # of the limit
    if rotate:
        exponent -= block.bit_length() - 1  # a rotation adds up so many before it scales them
    if fmt == FLOAT16:
        exponent = 15 - (block.bit_length() // 2 if rotate else 0)
    return 2.0 ** (128 - exponent)


def make_write(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> Any:
    """The kernel that checks rows of K and V, and rotates, quantizes and scatters them.

    K is stored less its center. Nothing is written where ``bad_slot`` or ``not_finite`` is set,
    so that one thread may run both halves in one call; with several the checks are a call of
    their own.
    """
    k_scales, k_row = num_scales(k_fmt, k_dim), _row_bytes(k_fmt, k_dim)
    v_scales, v_row = num_scales(v_fmt, v_dim), _row_bytes(v_fmt, v_dim)
    tokens_of_task = WRITE_TOKENS
    k_plain, v_plain = (_overflow_factor(*form, False) for form in ((k_fmt, k_dim), (v_fmt, v_dim)))
    k_turned, v_turned = (_overflow_factor(*f, True) for f in ((k_fmt, k_dim), (v_fmt, v_dim)))

    def write(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        num_slots = args.num_pages * args.page_size
        k_factor = np.float32(k_turned if args.rotate_k else k_plain)
        v_factor = np.float32(v_turned if args.rotate_v else v_plain)
        while args.checks:
            task = _fetch_add(args.counters, 0)
            if task >= args.num_tasks:
                break
            bad = np.int64(0)
            first = tokens_of_task * task
            for token in range(first, min(first + tokens_of_task, args.num_tokens)):
                slot = _get_i64(args.slots, token)
                if slot < 0 or slot >= num_slots:
                    _put_i64(args.counters, 2, slot + (1 if slot >= 0 else 0))
                bad += _count_non_finite(
                    k_dim,
                    1,
                    args.k_rows + 4 * token * args.k_rows_token,
                    4 * args.k_rows_head,
                    args.k_center,
                    args.k_center_head,
                    args.num_kv_heads,
                    k_factor,
                )
                bad += _count_non_finite(
                    v_dim,
                    0,
                    args.v_rows + 4 * token * args.v_rows_token,
                    4 * args.v_rows_head,
                    0,
                    0,
                    args.num_kv_heads,
                    v_factor,
                )
            if bad > 0:
                _put_i64(args.counters, 3, bad)
        if _get_i64(args.counters, 2) != 0 or _get_i64(args.counters, 3) != 0:
            return
        while args.writes:
            task = _fetch_add(args.counters, 1)
            if task >= args.num_tasks:
                break
            first = tokens_of_task * task
            for token in range(first, min(first + tokens_of_task, args.num_tokens)):
                slot = _get_i64(args.slots, token)
                page, offset = slot // args.page_size, slot % args.page_size
                k_codes = args.k_pages + page * args.k_page + offset * k_row
                v_codes = args.v_pages + page * args.v_page + offset * v_row
                k_factors = args.k_scale + page * args.ks_page + offset * 2 * k_scales
                v_factors = args.v_scale + page * args.vs_page + offset * 2 * v_scales
                for head in range(args.num_kv_heads):
                    _encode_row(
                        k_fmt,
                        k_dim,
                        1,
                        args.k_rows + 4 * (token * args.k_rows_token + head * args.k_rows_head),
                        args.k_center + head * args.k_center_head,
                        args.rotate_k,
                        k_codes + head * args.k_head,
                        k_factors + head * args.ks_head,
                    )
                for head in range(args.num_kv_heads):
                    _encode_row(
                        v_fmt,
                        v_dim,
                        0,
                        args.v_rows + 4 * (token * args.v_rows_token + head * args.v_rows_head),
                        0,
                        args.rotate_v,
                        v_codes + head * args.v_head,
                        v_factors + head * args.vs_head,
                    )

    return compile_callback(_WRITE_SIGNATURE)(write)


# ---------------------------------------------------------------- host side

runs: Counter[str] = Counter()
"""How often each path ran in this process; tests assert on it.

"write"; "decode": one query a sequence; "extend": several, through the same kernel; "shared":
splits that several queries read at once; "tiles": matrix products over dequantized tiles.
"""

tokens_read: Counter[str] = Counter()
"""Tokens whose K and V attention has read in this process, by path, each of one KV head.

A split that several queries take turns over is read once.
"""


def processor() -> str:
    """The processor that kernels are compiled for, and how."""
    name = llvmlite.binding.get_host_cpu_name()
    return f"{name} ({LANES} lanes, {'pairs' if _PAIRS else 'floats'})"


SMALL = 2**19
"""Products of numbers that one thread has done before a second would have begun."""

_local = threading.local()  # scratch memory, kept from call to call


@cache
def _kernel(maker: Callable[..., Any], *sizes: int) -> int:
    """Compile a kernel or load it from disk; its address."""
    begin = time.perf_counter()
    kernel = maker(*sizes)
    if not kernel.cache_hits:
        sys.stderr.write(
            f"radixkv: compiled a CPU kernel ({maker.__name__[5:]}) in "
            f"{time.perf_counter() - begin:.1f} s; later runs load it from disk\n"
        )
    _keep.append(kernel)
    return int(kernel.address)


_keep: list[Any] = []  # compiled code lives as long as its Python object


@cache
def _fork() -> Any:
    """Find torch's own OpenMP entry point; None where torch has none, or its threads sleep.

    Kernels run as a parallel region of the very OpenMP library that torch uses: one pool of
    threads for both. A second pool would compete with torch's workers, which spin for a while
    after each product (docs/cpu-kernels.md says what that costs). With OMP_WAIT_POLICY=PASSIVE
    they sleep: there is nothing to compete with, and `_executor`, whose late threads need not
    be waited for, is faster on a busy machine.
    """
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return None
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            function = ctypes.CDLL(str(folder / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return function
    return None


@cache
def _executor(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="radixkv-cpu")


_c_kernel = cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))


def _run_at(address: int, pointer: int, num_threads: int) -> None:
    fork = _fork()
    if num_threads == 1:
        _c_kernel(address)(pointer)
    elif fork is not None:
        fork(address, pointer, num_threads, 0)
    else:
        function = _c_kernel(address)
        pool = _executor(num_threads - 1)
        others = [pool.submit(function, pointer) for _ in range(num_threads - 1)]
        try:
            function(pointer)
        finally:
            for other in others:
                # The tasks are done: who has not begun by now need not be waited for.
                if not other.cancel():
                    other.result()


def _memory(name: str, num_bytes: int) -> tuple[int, np.ndarray]:
    """A buffer of this thread, not cleared: its address, and its owner.

    It has at least ``num_bytes``; when more is asked for, the thread gets another one.
    """
    kept: tuple[int, int, np.ndarray] | None = getattr(_local, name, None)
    if kept is None or kept[1] < num_bytes:
        buffer = np.empty(num_bytes + 64, np.uint8)  # NumPy asks for huge pages
        kept = -(-buffer.ctypes.data // 64) * 64, num_bytes, buffer
        setattr(_local, name, kept)
    return kept[0], kept[2]


def require_sizes(formats: tuple[int, int], dims: tuple[int, int]) -> None:
    """Refuse head sizes (of K and V) that the kernels do not have."""
    _require_head_dim("head_dim", dims[0], formats[0])
    _require_head_dim("v_head_dim", dims[1], formats[1])


def _require_head_dim(name: str, head_dim: int, fmt: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f'{name}: expected 1 to {MAX_HEAD_DIM}, got {head_dim}; use backend="torch"'
        )
    if fmt in (FP8, FP8_E5M2, FLOAT16) and _CPU.get("sse2") and not _CPU.get("f16c"):
        raise ValueError(
            f"kv_dtype: expected a format that this processor can read, got {FORMAT_NAMES[fmt]}, "
            f'which needs F16C; use "int8" or backend="torch"'
        )
    if fmt == INT4 and head_dim % 2:
        raise ValueError(f'{name}: expected an even number for int4, got {head_dim}; use "int8"')


@dataclass(frozen=True)
class Pass:
    """Tasks whose partial results are kept at the same time; see `ARGS`.

    Attributes:
        rows: tasks of the decode kernel. [n, 5] int32.
        num_partials: partial results of a query head.
        names: which of "decode" and "extend" the rows are.
        shared: tasks of whole splits that several queries read. [n, 5] int32.
        most_rows: query rows of the largest of those.
        queries: the queries of those, task by task. [m, 3] int32.
        done: first partial result and number of shared splits of each decode row that has
            some. [n, 2] int64.
    """

    rows: np.ndarray
    num_partials: int
    names: tuple[str, ...]
    shared: np.ndarray
    most_rows: int
    queries: np.ndarray
    done: np.ndarray


@dataclass(frozen=True)
class Plan:
    """The tasks of one batch. One a step, whatever the number of layers.

    Attributes:
        passes: in any order, one after another.
        most_splits: of a task that takes all splits by itself.
        tiles: tasks of the extend kernel. [n, 5] int32.
        tokens: tokens that the tasks read, windows aside, of each KV head.
        tokens_alone: the same without shared splits.
    """

    passes: tuple[Pass, ...]
    most_splits: int
    tiles: np.ndarray
    tokens: int
    tokens_alone: int


MAX_KEPT = 2048
"""Partial results of shared splits that a pass keeps for new tokens of chunks, a query head."""


def make_plan(
    seq_lens: Sequence[int],
    cu_seqlens_q: Sequence[int],
    group: int,
    *,
    in_rows: bool,
    shared: Sequence[tuple[np.ndarray, int, int]] = (),
    num_kv_heads: int = 1,
) -> Plan:
    """Split a batch into tasks; each sequence by its own lengths alone.

    Args:
        seq_lens: KV length of each sequence after this step.
        cu_seqlens_q: cumulative new tokens, first 0.
        group: query heads a KV head.
        in_rows: several new tokens run through the decode kernel too (see `extends_in_rows`).
        shared: (sequences, first split, split after the last) of runs of splits that are the same
            pages for all of these sequences. A sequence's runs begin at split 0 and leave no gap.
            All new tokens of several sequences see a run whole (but for a sliding window); a
            sequence's own run may hold those tokens, if ``in_rows``.
        num_kv_heads: with few shared splits of few heads, every thread still gets some work.
    Raises:
        ValueError: more new tokens than the sequence has; runs of a sequence with a gap.
    """
    queries_per_task = max(1, TILE_ROWS // group)
    num_shared = np.zeros(len(seq_lens), np.int64)
    for seqs, start, stop in shared:
        if (num_shared[seqs] != start).any():
            raise ValueError(f"shared: expected runs without a gap, got one that begins at {start}")
        num_shared[seqs] = stop
    tiles: list[tuple[int, ...]] = []
    passes: list[Pass] = []
    rows: list[tuple[int, ...]] = []
    queries: list[tuple[int, int, int, int]] = []  # row in q, position, first partial, sequence
    done: list[tuple[int, int]] = []
    names: set[str] = set()
    num_partials = num_kept = most_splits = tokens = tokens_alone = 0

    def end_pass() -> None:
        nonlocal num_partials, num_kept, tokens
        if rows:
            members = np.array(queries, np.int32).reshape(-1, 4)
            most = 1 << 30 if in_rows else max(1, TILE_ROWS // group)
            tasks, members = _shared_tasks(shared, members, group, num_kv_heads, most)
            if len(tasks):
                last = members[tasks[:, 3] + tasks[:, 4] - 1, 1]
                read_to = np.minimum(tasks[:, 2] * SPLIT, last + 1)
                tokens += int((read_to - tasks[:, 1] * SPLIT).sum())
            passes.append(
                Pass(
                    np.array(rows, np.int32).reshape(-1, 5),
                    num_partials,
                    tuple(sorted(names)),
                    tasks,
                    group * int(tasks[:, 4].max(initial=0)),
                    members,
                    np.array(done, np.int64).reshape(-1, 2),
                )
            )
        for kept in (rows, queries, done, names):
            kept.clear()
        num_partials = num_kept = 0

    for seq, seq_len in enumerate(seq_lens):
        begin = cu_seqlens_q[seq]
        query_len = cu_seqlens_q[seq + 1] - begin
        if not 0 <= query_len <= seq_len:
            raise ValueError(
                f"seq_lens: expected at least the {query_len} new tokens of sequence {seq}, "
                f"got {seq_len}; seq_lens counts them too"
            )
        if query_len == 0:
            continue
        kept = int(num_shared[seq])
        if group > MAX_DECODE_GROUP or (query_len > 1 and not in_rows):
            # Every query alike, so that it does not matter how a prompt is cut.
            for first_query in range(0, query_len, queries_per_task):
                tiles.append((seq, first_query, 0, 1, 0))
                read = min(seq_len, seq_len - query_len + first_query + queries_per_task)
                tokens, tokens_alone = tokens + read, tokens_alone + read
        elif query_len == 1:
            splits = -(-seq_len // SPLIT)
            tokens, tokens_alone = tokens + seq_len - kept * SPLIT, tokens_alone + seq_len
            rows.extend((seq, 0, split, splits, num_partials) for split in range(kept, splits))
            if kept:
                queries.append((begin, seq_len - 1, num_partials, seq))
                done.append((num_partials, kept))
            num_partials += splits
            names.add("decode")
        else:
            for first_query in range(0, query_len, ROW_QUERIES):
                first_pos = seq_len - query_len + first_query
                read = min(seq_len, first_pos + ROW_QUERIES)
                splits = -(-read // SPLIT)
                kept = min(int(num_shared[seq]), splits)
                tokens += max(0, read - kept * SPLIT)
                tokens_alone += read
                most_splits = max(most_splits, splits)
                base = -1
                if kept:
                    if num_kept >= MAX_KEPT:
                        end_pass()
                    base = -2 - num_partials
                    for query in range(min(ROW_QUERIES, query_len - first_query)):
                        token = begin + first_query + query
                        queries.append((token, first_pos + query, num_partials, seq))
                        num_partials += kept
                        num_kept += kept
                rows.append((seq, first_query, kept, splits, base))
                names.add("extend")
    end_pass()
    starts = np.array(tiles, np.int32).reshape(-1, 5)
    return Plan(tuple(passes), most_splits, starts, tokens, tokens_alone)


def _shared_tasks(
    shared: Sequence[tuple[np.ndarray, int, int]],
    queries: np.ndarray,
    group: int,
    num_kv_heads: int,
    most_queries: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The tasks of shared splits for these queries, and the queries in the order of the tasks.

    A split is read once, unless that leaves threads without work, or there are more queries than
    a task can hold.
    """
    tasks: list[tuple[int, int, int, int, int]] = []
    members: list[np.ndarray] = []
    num_members = 0
    num_threads = torch.get_num_threads()
    num_splits = num_kv_heads * sum(stop - start for _, start, stop in shared)
    parts = -(-3 * num_threads // max(1, num_splits))
    for seqs, start, stop in shared:
        mine = queries[np.isin(queries[:, 3], seqs)]
        if not len(mine):
            continue
        mine = mine[np.argsort(mine[:, 1], kind="stable")]
        num_rows = len(mine) * group
        num_pieces = max(
            1,
            min(parts, num_rows // SHARED_ROWS),
            -(-num_rows // MOST_SHARED_ROWS),
            -(-len(mine) // most_queries),
        )
        # A task quantizes its queries once for all of its splits.
        most_splits = max(1, min(8, num_pieces * num_splits // (8 * num_threads)))
        # The last pieces see most: taken first, they leave no thread behind.
        for piece in reversed(np.array_split(mine, num_pieces)):
            # Splits that all of these queries see, then one by one those that the later ones do.
            seen = piece[[0, -1], 1] // SPLIT + 1
            whole, after = (max(start, min(stop, int(count))) for count in seen)
            for first in (*range(start, whole, most_splits), *range(whole, after)):
                part = piece[np.searchsorted(piece[:, 1], first * SPLIT) :]
                last = min(first + most_splits, whole) if first < whole else first + 1
                tasks.append((seqs[0], first, last, num_members, len(part)))
                members.append(part[:, :3])
                num_members += len(part)
    if not tasks:
        return np.zeros((0, 5), np.int32), np.zeros((0, 3), np.int32)
    return (
        np.array(tasks, np.int32),
        np.ascontiguousarray(np.concatenate(members), np.int32),
    )


def page_arguments(
    k_pages: torch.Tensor, v_pages: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> tuple[int, ...]:
    """Where a layer's pages lie: the values of `_PAGE_FIELDS`, right as long as the tensors live.

    A head's page is contiguous.
    """
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    k_size, v_size = k_pages.element_size(), v_pages.element_size()
    k_page, k_head, _, _ = k_pages.stride()
    v_page, v_head, _, _ = v_pages.stride()
    ks_page, ks_head, _, _ = k_scale.stride()
    vs_page, vs_head, _, _ = v_scale.stride()
    return (
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        k_scale.data_ptr(),
        v_scale.data_ptr(),
        k_page * k_size,
        k_head * k_size,
        v_page * v_size,
        v_head * v_size,
        ks_page * 2,
        ks_head * 2,
        vs_page * 2,
        vs_head * 2,
        num_pages,
        page_size,
        num_kv_heads,
    )


def _bad_number(counter: int) -> int:
    return counter - 1 if counter > 0 else counter


@dataclass(frozen=True)
class _Launch:
    """One kernel call of a step.

    Attributes:
        name: under which `tokens_read` counts it.
        paths: under which `runs` does.
        kernel: address.
        record: `ARGS`, whose first part is filled in for each layer, and the counters as they
            are when the kernel begins.
        scratch_bytes: of each thread.
    """

    name: str
    paths: tuple[str, ...]
    kernel: int
    record: bytes
    scratch_bytes: int


class Step:
    """A plan made ready for its batch: what the layers of a step have in common.

    Args:
        plan: of `make_plan`, for this batch and this group of query heads. If it has shared
            splits: `shares` holds for the formats.
        formats: of K and of V.
        dims: head_dim of K and of V.
        num_q_heads, num_kv_heads: of each layer.
        rotate: whether K (and so q), and V (and so the output) are stored rotated.
        page_table: [num_seqs, max_pages] int32, rows contiguous.
        seq_lens, cu_seqlens_q: int32, contiguous.
    Raises:
        ValueError: a size that is not supported.
    """

    def __init__(
        self,
        plan: Plan,
        formats: tuple[int, int],
        dims: tuple[int, int],
        num_q_heads: int,
        num_kv_heads: int,
        rotate: tuple[bool, bool],
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> None:
        require_sizes(formats, dims)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of the {num_kv_heads} KV heads, got "
                f"{num_q_heads}"
            )
        self.plan, self._num_q_heads, self._v_head_dim = plan, num_q_heads, dims[1]
        self._tables = (page_table, seq_lens, cu_seqlens_q)  # their addresses are in the records
        self._common = {
            "page_table": page_table.data_ptr(),
            "table_row": page_table.stride(0),
            "seq_lens": seq_lens.data_ptr(),
            "cu_seqlens_q": cu_seqlens_q.data_ptr(),
            "group": num_q_heads // num_kv_heads,
            "rotate_k": rotate[0],
            "rotate_v": rotate[1],
        }
        group, sizes = num_q_heads // num_kv_heads, (*formats, *dims)
        partial_bytes = 4 * partial_floats(dims[1])
        self.launches: list[_Launch] = []
        for step in plan.passes:
            kept = {"num_partials": step.num_partials}
            counters = np.zeros(COUNTERS + step.num_partials * num_kv_heads, np.int64)
            if len(step.shared):
                if extends_in_rows(formats):
                    kernel = _kernel(make_shared, *sizes)
                    scratch = shared_scratch_bytes(*sizes, step.most_rows)
                else:
                    kernel = _kernel(make_extend, *sizes, 1)
                    scratch = extend_scratch_bytes(*sizes, group)
                members = {"queries": step.queries.ctypes.data, "most_rows": step.most_rows}
                self._add("shared", ("shared",), kernel, step.shared, scratch, **members, **kept)
                # The splits that are done count for the merge.
                merged = counters[COUNTERS:].reshape(-1, num_kv_heads)
                merged[step.done[:, 0]] = step.done[:, 1:]
            kernel = _kernel(make_decode, *sizes, group)
            offset = decode_scratch_bytes(*sizes, group)
            scratch = offset + ROW_QUERIES * group * plan.most_splits * partial_bytes
            kept |= {"partials_offset": offset, "tile_queries": ROW_QUERIES}
            self._add("rows", step.names, kernel, step.rows, scratch, counters, **kept)
        if len(plan.tiles):
            scratch = extend_scratch_bytes(*sizes, group)
            self._add("tiles", ("tiles",), _kernel(make_extend, *sizes), plan.tiles, scratch)
        most_partials = max((step.num_partials for step in plan.passes), default=0)
        self.partials_bytes = num_q_heads * most_partials * partial_bytes
        self.is_small = plan.tokens_alone * num_q_heads * sum(dims) < SMALL

    def _add(
        self,
        name: str,
        paths: tuple[str, ...],
        kernel: int,
        tasks: np.ndarray,
        scratch_bytes: int,
        counters: np.ndarray | None = None,
        **values: int,
    ) -> None:
        scratch_bytes = -(-scratch_bytes // 64) * 64
        record = np.zeros((), ARGS)
        values |= self._common | {
            "tasks": tasks.ctypes.data,
            "num_tasks": len(tasks),
            "scratch_bytes": scratch_bytes,
        }
        for field, value in values.items():
            record[field] = value
        if counters is None:
            counters = np.zeros(COUNTERS, np.int64)
        kept = record.tobytes() + counters.tobytes()
        self.launches.append(_Launch(name, paths, kernel, kept, scratch_bytes))

    def attend(
        self,
        places: tuple[int, ...],
        q: torch.Tensor,
        softmax_scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        *,
        num_threads: int | None = None,
    ) -> torch.Tensor:
        """Attend the batch's new tokens to one layer's pages.

        Any number of threads may call it at once.

        Args:
            places: `page_arguments` of the layer.
            q: [num_tokens, num_q_heads, head_dim] float32, last dimension contiguous.
            window, softcap: 0 is none.
            sinks, alibi_slopes: [num_q_heads] float32, contiguous.
            num_threads: None is torch's.
        Returns:
            [num_tokens, num_q_heads, v_head_dim] float32.
        Raises:
            ValueError: a page id that the pool does not have.
        """
        shape = (q.shape[0], self._num_q_heads, self._v_head_dim)
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        AttentionCall(self, q, out, num_threads).run(
            places, softmax_scale, window, softcap, sinks, alibi_slopes
        )
        return out


class AttentionCall:
    """A step whose q, and what it is attended to, lie in the same memory for many layers.

    It belongs to the thread that made it.

    Args:
        q: [num_tokens, num_q_heads, head_dim] float32, last dimension contiguous.
        out: [num_tokens, num_q_heads, v_head_dim] float32, contiguous; `run` fills it.
        num_threads: None is torch's.
    """

    def __init__(
        self, step: Step, q: torch.Tensor, out: torch.Tensor, num_threads: int | None = None
    ) -> None:
        q_token, q_head, _ = q.stride()
        out_token, out_head, _ = out.stride()
        self._head = (q.data_ptr(), out.data_ptr(), q_token, q_head, out_token, out_head)
        self._num_threads = num_threads or (1 if step.is_small else torch.get_num_threads())
        scratch_bytes = max((launch.scratch_bytes for launch in step.launches), default=0)
        partials, partials_owner = _memory("partials", step.partials_bytes)
        scratch, scratch_owner = _memory("scratch", self._num_threads * scratch_bytes)
        # Their addresses are in the records.
        self._kept = step, q, out, partials_owner, scratch_owner
        self._launches = []
        for launch in step.launches:
            record = bytearray(launch.record)
            address = ctypes.addressof(ctypes.c_char.from_buffer(record))
            places = scratch, partials, address + ARGS.itemsize
            self._launches.append((launch, record, address, places))

    def run(
        self,
        places: tuple[int, ...],
        softmax_scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        """Attend; see `Step.attend`."""
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        slopes_at = 0 if alibi_slopes is None else alibi_slopes.data_ptr()
        for launch, record, address, memory in self._launches:
            record[:] = launch.record  # the counters, too
            _CALL.pack_into(
                record, 0, *self._head, *places, sinks_at, slopes_at, window, *memory,
                softmax_scale, softcap,
            )  # fmt: skip
            _run_at(launch.kernel, address, self._num_threads)
            bad_page, _, num_read = _COUNTED.unpack_from(record, ARGS.itemsize + 2 * 8)
            for path in launch.paths:
                runs[path] += 1
            tokens_read[launch.name] += num_read
            if bad_page:
                raise ValueError(
                    f"page_table: expected page ids from 0 to "
                    f"{places[_PAGE_FIELDS.index('num_pages')] - 1}, got {_bad_number(bad_page)}"
                )


_COUNTED = struct.Struct("=3q")
_NO_CENTER = torch.zeros(MAX_HEAD_DIM, dtype=torch.float32, device="cpu")


class Write:
    """New rows of K and V, made ready to be quantized and scattered into many layers' pages.

    It belongs to the thread that made it.

    Args:
        formats: of K and of V.
        slot_mapping: [num_tokens] int64, contiguous.
        k, v: [num_tokens, num_kv_heads, head_dim] float32, last dimension contiguous.
        rotate: whether K and V are stored rotated.
    Raises:
        ValueError: a size that is not supported.
    """

    def __init__(
        self,
        formats: tuple[int, int],
        slot_mapping: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rotate: tuple[bool, bool],
    ) -> None:
        self._kept = slot_mapping, k, v  # their addresses are in the record
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        num_tokens, _, k_dim = k.shape
        self._kernel = _write_kernel(*formats, k_dim, v.shape[2])
        num_tasks = -(-num_tokens // WRITE_TOKENS)
        self._num_threads = torch.get_num_threads() if num_tasks > 1 else 1
        self._record = (ctypes.c_int64 * _WRITE_WORDS)(
            k.data_ptr(),
            k_token,
            k_head,
            v.data_ptr(),
            v_token,
            v_head,
            slot_mapping.data_ptr(),
            num_tokens,
            num_tasks,
            *rotate,
        )
        self._address = ctypes.addressof(self._record)

    def run(self, places: tuple[int, ...], k_center: torch.Tensor | None = None) -> bool:
        """Write; False (nothing written) if not all rows are finite, or may not be as stored.

        Args:
            places: `page_arguments` of the layer, whose pages are mutated.
            k_center: taken off each row of K. [num_kv_heads, head_dim] float32, as k.
        Raises:
            ValueError: a slot that the pool does not have.
        """
        record, counters = self._record, self._address + 8 * _WRITE_COUNTERS
        alone = self._num_threads == 1
        center = (_NO_CENTER, 0) if k_center is None else (k_center, 4 * k_center.stride(0))
        record[_WRITE_LAYER:] = (
            center[0].data_ptr(), center[1], *places, 1, alone, counters, 0, 0, 0, 0
        )  # fmt: skip
        _run_at(self._kernel, self._address, self._num_threads)
        bad_slot, not_finite = record[_WRITE_COUNTERS + 2 :]
        if bad_slot:
            num_pages, page_size, _ = places[-3:]
            raise ValueError(
                f"slot_mapping: expected slots from 0 to {num_pages * page_size - 1}, got "
                f"{_bad_number(bad_slot)}"
            )
        if not_finite:
            return False
        if not alone:
            record[_WRITE_COUNTERS - 3 : _WRITE_COUNTERS - 1] = 0, 1
            _run_at(self._kernel, self._address, self._num_threads)
        runs["write"] += 1
        return True


def write(
    places: tuple[int, ...],
    formats: tuple[int, int],
    slot_mapping: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rotate: tuple[bool, bool],
    k_center: torch.Tensor | None = None,
) -> bool:
    """`Write` into one layer's pages."""
    return Write(formats, slot_mapping, k, v, rotate=rotate).run(places, k_center)


_WRITE_LAYER = _WRITE_FIELDS.index("k_center")
_WRITE_COUNTERS = len(_WRITE_FIELDS)
_WRITE_WORDS = _WRITE_COUNTERS + 4


@cache
def _write_kernel(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> int:
    require_sizes((k_fmt, v_fmt), (k_dim, v_dim))
    return _kernel(make_write, k_fmt, v_fmt, k_dim, v_dim)
