"""Row formats: their numbers, the sizes of a row, and the order in which it is read."""

from __future__ import annotations

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.simd import LANES

INT8, FP8, FP8_E5M2, INT4, FLOAT32, FLOAT16, BFLOAT16 = range(7)
CODE_BITS = (8, 8, 8, 4, 32, 16, 16)
FORMAT_NAMES = ("int8", "fp8", "fp8_e5m2", "int4", "float32", "float16", "bfloat16")
LARGEST_CODE = {INT8: 127.0, FP8: 448.0, FP8_E5M2: 57344.0}
MIN_SCALE = 2.0**-100  # as radixkv.quant
INT4_GROUP = 32  # elements that share an int4 scale, at most; as radixkv.quant
INT4_SEARCH = (1.0, 0.93, 0.86, 0.8)  # as radixkv.quant
MAX_HEAD_DIM = 1024
_MAX_PAIR_DIM = 512  # 127 * 32767 * 512 just fits into int32; SPLIT rests on it as well


def int4_group_size(head_dim: int) -> int:
    """Elements of a row that share a scale (as radixkv.quant)."""
    return next(size for size in range(INT4_GROUP, 1, -2) if head_dim % size == 0)


def num_scales(fmt: int, head_dim: int) -> int:
    """bfloat16 factors that a row of this format has."""
    if fmt == INT4:
        return head_dim // int4_group_size(head_dim)
    return 0 if fmt >= FLOAT32 else 1


def bytes_of_row(fmt: int, head_dim: int) -> int:
    return head_dim * CODE_BITS[fmt] // 8


def row_spans(fmt: int, head_dim: int) -> list[tuple[int, int]]:
    """(first element, count) of the vectors of a row, in the order in which they are read.

    int4 gives its low and its high halves by turns, as one load yields both.
    """
    if fmt != INT4:
        return simd.pieces(head_dim)
    half = head_dim // 2
    return [(first + part, count) for first, count in simd.pieces(half) for part in (0, half)]


def padded(fmt: int, head_dim: int) -> int:
    """Floats that a row takes as whole vectors in the order of ``row_spans``."""
    return LANES * len(row_spans(fmt, head_dim))


def code_factor(fmt: int) -> float:
    """What `read_codes`'s floats lack besides the row's scale."""
    return 256.0 if fmt == FP8 else 1.0


def num_reads(fmt: int, head_dim: int) -> int:
    return len(simd.pieces(head_dim // 2 if fmt == INT4 else head_dim))


def pair_pieces(num: int) -> list[tuple[int, int]]:
    """(first, count) of the int16 vectors that cover ``num`` elements."""
    return [(i, min(2 * LANES, num - i)) for i in range(0, num, 2 * LANES)]


def word_spans(fmt: int, head_dim: int) -> list[tuple[int, int, int]]:
    """(first element, count, scale group) of the int16 vectors of a row, in reading order."""
    if fmt != INT4:
        return [(first, count, 0) for first, count in pair_pieces(head_dim)]
    half, size = head_dim // 2, int4_group_size(head_dim)
    return [
        (first + part, count, (first + part) // size)
        for first, count in pair_pieces(half)
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
    if not simd.PAIRS or fmt not in (INT8, INT4) or head_dim > _MAX_PAIR_DIM:
        return False
    if fmt == INT8:
        return True
    size = int4_group_size(head_dim)
    return all(
        (first + count - 1) // size == group for first, count, group in word_spans(fmt, head_dim)
    )


def num_halves_of(fmt: int) -> int:
    """Vectors of `word_spans` that one load of stored bytes yields."""
    return 2 if fmt == INT4 else 1


def unpacked_bytes(head_dim: int) -> int:
    """Bytes of an int4 row as `unpack_rows` lays it out: int8 in the order of `word_spans`."""
    return 2 * LANES * len(word_spans(INT4, head_dim))


def shares_in_pairs(formats: tuple[int, int], head_dim: int, v_head_dim: int) -> bool:
    """Whether rows of these formats can be read once for several queries, bit for bit."""
    return in_pairs(formats[0], head_dim) and in_pairs(formats[1], v_head_dim)


def shares(formats: tuple[int, int], head_dim: int, v_head_dim: int) -> bool:
    """Whether rows of these formats can be read once for several queries.

    Formats that decode reads as floats are: to float rounding, and single new tokens alone.
    """
    in_floats = not extends_in_rows(formats)
    return in_floats or shares_in_pairs(formats, head_dim, v_head_dim)


def num_pairs_of(fmt: int, head_dim: int) -> int:
    """Pairs of neighbouring elements of a row; those of int4's halves apart."""
    return 2 * -(-(head_dim // 2) // 2) if fmt == INT4 else -(-head_dim // 2)


def pair_groups(fmt: int, head_dim: int) -> list[tuple[int, int]]:
    """(first pair, pairs) of each scale group."""
    pairs = num_pairs_of(fmt, head_dim)
    if fmt != INT4:
        return [(0, pairs)]
    half, size = head_dim // 2, int4_group_size(head_dim)
    starts = [part * half + e for part in range(2) for e in range(0, half, 2)]
    group_of = [first // size for first in starts]
    return [(group_of.index(g), group_of.count(g)) for g in range(num_groups(fmt, head_dim))]


def require_sizes(formats: tuple[int, int], dims: tuple[int, int]) -> None:
    """Refuse head sizes (of K and V) that the kernels do not have."""
    _require_head_dim("head_dim", dims[0], formats[0])
    _require_head_dim("v_head_dim", dims[1], formats[1])


def _require_head_dim(name: str, head_dim: int, fmt: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f'{name}: expected 1 to {MAX_HEAD_DIM}, got {head_dim}; use backend="torch"'
        )
    if fmt in (FP8, FP8_E5M2, FLOAT16) and simd.CPU.get("sse2") and not simd.CPU.get("f16c"):
        raise ValueError(
            f"kv_dtype: expected a format that this processor can read, got {FORMAT_NAMES[fmt]}, "
            f'which needs F16C; use "int8" or backend="torch"'
        )
    if fmt == INT4 and head_dim % 2:
        raise ValueError(f'{name}: expected an even number for int4, got {head_dim}; use "int8"')
