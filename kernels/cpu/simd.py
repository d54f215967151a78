"""Vector code, as LLVM instructions: what the processor has, and how to emit it.

The functions take an LLVM builder ``b`` and values, and give values; they are called while a
kernel is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

CPU = llvmlite.binding.get_host_cpu_features()
WIDE = bool(CPU.get("avx512f"))
LANES = 16 if WIDE else 8 if CPU.get("avx") else 4
SUMS = 4 if LANES == 8 else LANES  # sums over lanes that are found at once
ACCUMULATORS = 16 if WIDE or LANES == 4 else 8
PAIRS = bool(CPU.get("avx512bw") if WIDE else CPU.get("avx2"))
"""Whether there is an instruction that multiplies pairs of int16 and adds them up in int32."""

_EXP_TERMS = (0.49999994, 0.16666521, 0.041668389, 0.0083687166, 0.0013814599)

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
INF = float("inf")


def splat(b: Any, value: Any, lanes: int = LANES) -> Any:
    kind = ir.VectorType(value.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def constant(value: float, kind: Any = VF) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def shuffle(b: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def call(b: Any, name: str, kind: Any, *operands: Any) -> Any:
    """Call an LLVM intrinsic whose operands and result are of one type."""
    scalar = kind.element if isinstance(kind, ir.VectorType) else kind
    bits = {F32: "f32", I32: "i32", F16: "f16"}[scalar]
    suffix = f"v{kind.count}{bits}" if isinstance(kind, ir.VectorType) else bits
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(kind, [kind] * len(operands)), f"llvm.{name}.{suffix}"
    )
    return b.call(function, operands)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, "fmuladd", x.type, x, y, z)


def maximum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def minimum(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, I8.as_pointer())


def load(b: Any, pointer: Any, offset: Any, kind: Any) -> Any:
    """Load ``kind`` from ``pointer`` plus ``offset`` bytes (an int or an i64 value)."""
    offset = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    place = b.gep(pointer, [offset])
    return b.load(b.bitcast(place, kind.as_pointer()), align=1)


def store(b: Any, value: Any, pointer: Any, offset: Any) -> None:
    offset = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    place = b.gep(pointer, [offset])
    b.store(value, b.bitcast(place, value.type.as_pointer()), align=1)


def prefetch(b: Any, pointer: Any, offset: Any) -> None:
    """Ask for a cache line that will be read soon; any address is allowed."""
    offset = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    read, keep, data = (ir.Constant(I32, n) for n in (0, 3, 1))
    b.call(function, [b.gep(pointer, [offset]), read, keep, data])


def widen(b: Any, vector: Any) -> Any:
    """Pad a short vector with zeros to LANES."""
    count = vector.type.count
    if count == LANES:
        return vector
    zeros = ir.Constant(vector.type, [0] * count)
    return shuffle(b, vector, zeros, [min(i, count) for i in range(LANES)])


def narrow(b: Any, vector: Any, count: int) -> Any:
    if count == vector.type.count:
        return vector
    return shuffle(b, vector, ir.Constant(vector.type, ir.Undefined), range(count))


def load_floats(b: Any, pointer: Any, offset: Any, count: int = LANES) -> Any:
    return widen(b, load(b, pointer, offset, ir.VectorType(F32, count)))


def pieces(num: int) -> list[tuple[int, int]]:
    """(first, count) of the vectors that cover ``num`` elements."""
    return [(i, min(LANES, num - i)) for i in range(0, num, LANES)]


def fold_each(b: Any, vectors: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
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
            pairs.append(combine(b, shuffle(b, x, y, low), shuffle(b, x, y, high)))
        vectors = pairs
    total = vectors[0]
    stride = width
    while width > 1:
        width //= 2
        turned = [lane ^ width for lane in range(LANES)]
        total = combine(b, total, shuffle(b, total, total, turned))
    return shuffle(b, total, total, [min(n * stride, LANES - 1) for n in range(LANES)])


def add_lanes(b: Any, vectors: list[Any]) -> Any:
    """One int32 vector of _SUMS lanes, lane n the sum of all lanes of ``vectors[n]``."""
    if LANES != 8:
        return fold_each(b, vectors, add_integers)
    # Not across the halves of a register, which takes some processors of 256 bits eight steps.
    halves = []
    for vector in vectors:
        low, high = (shuffle(b, vector, vector, range(n, n + 4)) for n in (0, 4))
        halves.append(b.add(low, high))
    halves += [halves[-1]] * (SUMS - len(halves))
    pairs = [
        b.add(shuffle(b, x, y, (0, 4, 1, 5)), shuffle(b, x, y, (2, 6, 3, 7)))
        for x, y in (halves[:2], halves[2:])
    ]
    return b.add(shuffle(b, *pairs, (0, 1, 4, 5)), shuffle(b, *pairs, (2, 3, 6, 7)))


def fold(b: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine all lanes into a scalar."""
    width = LANES
    while width > 1:
        width //= 2
        vector = combine(b, vector, shuffle(b, vector, vector, [i ^ width for i in range(LANES)]))
    return b.extract_element(vector, ir.Constant(I32, 0))


def add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y)


def add_integers(b: Any, x: Any, y: Any) -> Any:
    return b.add(x, y)


def round_to_integers(b: Any, x: Any) -> Any:
    """int32 lanes, half to even; in range."""
    if LANES != 8:
        return b.fptosi(call(b, "rint", VF, x), VI)
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(VI, [VF]), "llvm.x86.avx.cvt.ps2dq.256"
    )
    return b.call(function, [x])


def exp(b: Any, x: Any) -> Any:
    """Raise e to x <= 0, within 2 units in the last place; exactly 0 below -87; NaN stays NaN.

    e**x = 2**n * e**r with |r| <= log(2) / 2, and e**r = 1 + r + r**2 * q(r): the q of degree 4
    whose relative error is least (3e-9), its terms in a tree, since a chain of them is slower.
    """
    kind, whole = x.type, ir.VectorType(I32, x.type.count)
    clamped = maximum(b, constant(-87.0, kind), x)  # in this order a NaN passes
    # Adding 1.5 * 2**23 rounds to an integer, which then stands in the lowest bits.
    shift = constant(1.5 * 2**23, kind)
    shifted = fma(b, clamped, constant(math.log2(math.e), kind), shift)
    n = b.fsub(shifted, shift)
    r = fma(b, n, constant(-0.693359375, kind), clamped)
    r = fma(b, n, constant(2.12194440e-4, kind), r)
    q0, q1, q2, q3, q4 = (constant(c, kind) for c in _EXP_TERMS)
    square = b.fmul(r, r)
    high = fma(b, q4, square, fma(b, q3, r, q2))
    q = fma(b, high, square, fma(b, q1, r, q0))
    root = fma(b, q, square, b.fadd(r, constant(1.0, kind)))
    bits = b.shl(b.bitcast(shifted, whole), constant(23, whole))
    power = b.bitcast(b.add(bits, constant(127 << 23, whole)), kind)
    real = b.fmul(root, power)
    return b.select(b.fcmp_ordered("<", x, constant(-87.0, kind)), constant(0.0, kind), real)


def literal(value: Any) -> int:
    return int(value.literal_value)


def round_to_bf16(b: Any, bits: Any) -> Any:
    """Round float32 bits (i32, scalar or vector) to bfloat16 bits, half to even."""
    one, kind = (1, bits.type) if not isinstance(bits.type, ir.VectorType) else (None, bits.type)

    def c(value: int) -> Any:
        return ir.Constant(kind, value) if one else constant(value, kind)

    odd = b.and_(b.lshr(bits, c(16)), c(1))
    return b.lshr(b.add(b.add(bits, c(0x7FFF)), odd), c(16))


def multiply_pairs(b: Any, acc: Any, x: Any, y: Any) -> Any:
    """acc[i] + x[2i] * y[2i] + x[2i + 1] * y[2i + 1]; x, y int16, acc int32."""
    pairs = ir.VectorType(I16, 2 * LANES)
    name = "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(VI, [pairs, pairs]), name)
    product = b.call(function, [x, y])
    return product if acc is None else b.add(acc, product)


def add_scaled(b: Any, total: Any, values: Any, scale: Any) -> Any:
    """``total`` (None: nothing yet) plus values * scale (None: 1)."""
    if scale is None:
        return values
    return b.fmul(values, scale) if total is None else fma(b, values, scale, total)


def each_two(b: Any, num_vectors: Any, emit: Callable[[Any, int], None]) -> None:
    """Loop over vectors, two at a time while there are: emit(byte offset, how many).

    So that a processor that looks a few instructions ahead finds two chains of them.
    """
    one = ir.Constant(I64, 1)
    pairs = b.ashr(num_vectors, one)
    with cgutils.for_range(b, pairs) as loop:
        emit(b.mul(loop.index, ir.Constant(I64, 8 * LANES)), 2)
    with b.if_then(b.icmp_signed("!=", b.and_(num_vectors, one), ir.Constant(I64, 0))):
        emit(b.mul(pairs, ir.Constant(I64, 8 * LANES)), 1)


def exponentials(b: Any, target: Any, at: Any, width: int, largest: Any) -> list[Any]:
    """``width`` vectors at a place of ``target`` become exp(themselves - largest); these."""
    count = width * LANES
    scores = load(b, target, at, ir.VectorType(F32, count))
    p = exp(b, b.fsub(scores, splat(b, largest, count)))
    store(b, p, target, at)
    return [shuffle(b, p, p, range(n, n + LANES)) for n in range(0, count, LANES)]


def each(b: Any, num_vectors: Any) -> Any:
    """Loop over vectors; yields the byte offset of each."""
    return cgutils.for_range(b, num_vectors)


ZERO = ir.Constant(I64, 0)


def processor() -> str:
    """The processor that kernels are compiled for, and how."""
    name = llvmlite.binding.get_host_cpu_name()
    return f"{name} ({LANES} lanes, {'pairs' if PAIRS else 'floats'})"
