"""A walk over stored rows by their addresses: blocks of keys, passes over columns, prefetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.simd import LANES

CHUNK_BYTES = 8192  # of rows that passes over the columns find in the first-level cache
MAX_CHUNK = 128  # tokens
PREFETCH_TOKENS = 32  # how far ahead of the arithmetic shared pages are asked for


def query_chunks(group: int) -> list[tuple[int, int]]:
    """(first, count) of the query heads that share one pass over K or V."""
    most = simd.ACCUMULATORS // 2  # each needs sums for two keys at least
    return [(i, min(most, group - i)) for i in range(0, group, most)]


def keys_per_block(group: int) -> int:
    """Keys scored at once for ``group`` query heads."""
    most = max(count for _, count in query_chunks(group))
    return max(2, min(8, LANES // 2, simd.ACCUMULATORS // (1 << (most - 1).bit_length())))


def row_at(b: Any, places: Any, index: Any, ahead: int = 0) -> Any:
    """The row whose address stands ``ahead`` places after ``index``."""
    at = b.mul(index, ir.Constant(simd.I64, 8))
    return simd.pointer(
        b, simd.load(b, places, b.add(at, ir.Constant(simd.I64, 8 * ahead)), simd.I64)
    )


def chunk_tokens(k_row_bytes: int, v_row_bytes: int) -> int:
    """Tokens whose rows stay in the first-level cache together, and how far rows are asked for."""
    return max(2, min(MAX_CHUNK, CHUNK_BYTES // max(k_row_bytes, v_row_bytes) // 2 * 2))


def ask_share(
    b: Any, places: Any, rows: list[Any], row_bytes: int, ahead: int, share: tuple[int, int]
) -> None:
    """Ask for a share (its number, how many there are) of what lies ``ahead`` of ``rows``."""
    lines = [(row, line) for line in range(-(-row_bytes // 64)) for row in rows]
    number, size = share[0], -(-len(lines) // share[1])
    for row, line in lines[number * size : (number + 1) * size]:
        simd.prefetch(b, row_at(b, places, row, ahead), 64 * line)


def each_block(
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
    places = simd.pointer(b, places)
    blocks = b.sdiv(b.add(num, ir.Constant(simd.I64, keys - 1)), ir.Constant(simd.I64, keys))
    with cgutils.for_range(b, blocks) as loop:
        first = b.mul(loop.index, ir.Constant(simd.I64, keys))
        for i in range(keys):
            row = row_at(b, places, first, ahead + i)
            for line in range(-(-row_bytes // 64)):
                simd.prefetch(b, row, 64 * line)
        emit(first, [row_at(b, places, first, i) for i in range(keys)])
