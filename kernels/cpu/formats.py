"""Row formats: their numbers, the sizes of a row, and the order in which it is read."""

from __future__ import annotations

from typing import NamedTuple

from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.simd import LANES

MIN_SCALE = 2.0**-100  # as radixkv.attention.formats
INT4_GROUP = 32  # elements that share an int4 scale, at most; as radixkv.attention.formats
INT4_SEARCH = (1.0, 0.93, 0.86, 0.8)  # as radixkv.attention.formats
MAX_HEAD_DIM = 1024
_MAX_PAIR_DIM = 512  # 127 * 32767 * 512 just fits into int32; SPLIT rests on it as well


class Format(NamedTuple):
    """A storage format of single elements.

    Attributes:
        name: as a user gives it, or the dtype of a model.
        bits: of an element.
        largest: what the largest code stands for, where a row has one scale; else None.
    """

    name: str
    bits: int
    largest: float | None = None


INT8, FP8, FP8_E5M2, INT4, FLOAT32, FLOAT16, BFLOAT16 = range(7)
FORMATS = (
    Format("int8", 8, 127.0),
    Format("fp8", 8, 448.0),
    Format("fp8_e5m2", 8, 57344.0),
    Format("int4", 4),
    Format("float32", 32),
    Format("float16", 16),
    Format("bfloat16", 16),
)
"""By their numbers, which is what compiled code knows them by."""


def int4_group_size(head_dim: int) -> int:
    """Elements of a row that share a scale (as radixkv.attention.formats)."""
    return next(size for size in range(INT4_GROUP, 1, -2) if head_dim % size == 0)


def pair_pieces(num: int) -> list[tuple[int, int]]:
    """(first, count) of the int16 vectors that cover ``num`` elements."""
    return [(i, min(2 * LANES, num - i)) for i in range(0, num, 2 * LANES)]


class RowFormat(NamedTuple):
    """How rows of K, or of V, are stored.

    Attributes:
        fmt: one of the numbers of `FORMATS`.
        head_dim: elements of a row.
    """

    fmt: int
    head_dim: int

    @property
    def is_int4(self) -> bool:
        return self.fmt == INT4

    @property
    def has_one_scale(self) -> bool:
        """Whether a row's codes are real values but for one factor."""
        return FORMATS[self.fmt].largest is not None

    @property
    def num_scales(self) -> int:
        """bfloat16 factors of a row."""
        if self.is_int4:
            return self.head_dim // int4_group_size(self.head_dim)
        return int(self.has_one_scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.head_dim * FORMATS[self.fmt].bits // 8

    @property
    def factor(self) -> float:
        """What the floats of `rows.read_codes` lack besides the row's scale."""
        return 256.0 if self.fmt == FP8 else 1.0

    # As floats.

    @property
    def num_vectors(self) -> int:
        """Vectors of a float32 row in its natural order."""
        return len(simd.pieces(self.head_dim))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first element, count) of the vectors of a row, in the order in which they are read.

        int4 gives its low and its high halves by turns, as one load yields both.
        """
        if not self.is_int4:
            return simd.pieces(self.head_dim)
        half = self.head_dim // 2
        return [(first + part, count) for first, count in simd.pieces(half) for part in (0, half)]

    @property
    def padded(self) -> int:
        """Floats that a row takes as whole vectors in the order of ``spans``."""
        return LANES * len(self.spans)

    @property
    def num_reads(self) -> int:
        """Loads of codes that give a row."""
        return len(simd.pieces(self.head_dim // 2 if self.is_int4 else self.head_dim))

    # In integers.

    @property
    def in_pairs(self) -> bool:
        """Whether decode reads these rows in integers, without making floats of them.

        The query row (and the weights of a split) become int16 with one scale, 2**-16 of the
        largest at most away from the real ones: far below int8's own 2**-8.
        """
        if not simd.PAIRS or self.fmt not in (INT8, INT4) or self.head_dim > _MAX_PAIR_DIM:
            return False
        if self.fmt == INT8:
            return True
        size = int4_group_size(self.head_dim)
        return all((first + count - 1) // size == group for first, count, group in self.word_spans)

    @property
    def num_groups(self) -> int:
        """Scale groups of a row that is read in integers."""
        return self.num_scales if self.is_int4 else 1

    @property
    def word_spans(self) -> list[tuple[int, int, int]]:
        """(first element, count, scale group) of the int16 vectors of a row, in reading order."""
        if not self.is_int4:
            return [(first, count, 0) for first, count in pair_pieces(self.head_dim)]
        half, size = self.head_dim // 2, int4_group_size(self.head_dim)
        return [
            (first + part, count, (first + part) // size)
            for first, count in pair_pieces(half)
            for part in (0, half)
        ]

    @property
    def num_halves(self) -> int:
        """Vectors of ``word_spans`` that one load of stored bytes yields."""
        return 2 if self.is_int4 else 1

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of an int4 row as `pairs.unpack_rows` lays it out: int8, as ``word_spans``."""
        return 2 * LANES * len(self.word_spans)

    @property
    def num_pairs(self) -> int:
        """Pairs of neighbouring elements of a row; those of int4's halves apart."""
        return 2 * -(-(self.head_dim // 2) // 2) if self.is_int4 else -(-self.head_dim // 2)

    @property
    def pair_groups(self) -> list[tuple[int, int]]:
        """(first pair, pairs) of each scale group."""
        if not self.is_int4:
            return [(0, self.num_pairs)]
        half, size = self.head_dim // 2, int4_group_size(self.head_dim)
        starts = [part * half + e for part in range(2) for e in range(0, half, 2)]
        group_of = [first // size for first in starts]
        return [(group_of.index(g), group_of.count(g)) for g in range(self.num_groups)]

    def require_supported(self, name: str) -> None:
        """Refuse what the kernels do not have; ``name`` is that of the head size."""
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f'{name}: expected 1 to {MAX_HEAD_DIM}, got {self.head_dim}; use backend="torch"'
            )
        needs_f16c = self.fmt in (FP8, FP8_E5M2, FLOAT16)
        if needs_f16c and simd.CPU.get("sse2") and not simd.CPU.get("f16c"):
            raise ValueError(
                f"kv_dtype: expected a format that this processor can read, got "
                f'{FORMATS[self.fmt].name}, which needs F16C; use "int8" or backend="torch"'
            )
        if self.is_int4 and self.head_dim % 2:
            raise ValueError(
                f'{name}: expected an even number for int4, got {self.head_dim}; use "int8"'
            )


def require_sizes(k: RowFormat, v: RowFormat) -> None:
    """Refuse rows of K and V that the kernels do not have."""
    k.require_supported("head_dim")
    v.require_supported("v_head_dim")


def extends_in_rows(k: RowFormat, v: RowFormat) -> bool:
    """Whether several new tokens run through the decode kernel, bit for bit as single ones do.

    So it is where decode computes in integers, whose rounding of queries and weights matrix
    products in floats would not repeat: what is cached must not change a result.
    """
    return not {INT8, INT4}.isdisjoint((k.fmt, v.fmt))


def shares(k: RowFormat, v: RowFormat) -> bool:
    """Whether these rows can be read once for several queries.

    In integers bit for bit; formats that decode reads as floats to float rounding, and single new
    tokens alone.
    """
    return not extends_in_rows(k, v) or (k.in_pairs and v.in_pairs)
