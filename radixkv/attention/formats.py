"""How rows of K and V become stored codes and back, and how many bytes that takes.

A *row* is one token's vector of one KV head. A row is quantized alone, once, when it is
written; its scales lie beside its codes, so copying some tokens of a page stays exact.

| format     | code                       | scales of a row           | real value               |
| ---------- | -------------------------- | ------------------------- | ------------------------ |
| int8       | int8, -127..127            | 1: amax / 127             | code * scale             |
| fp8        | float8_e4m3fn              | 1: amax / 448             | code * scale             |
| fp8_e5m2   | float8_e5m2                | 1: amax / 57344           | code * scale             |
| int4       | uint8, two codes a byte    | 1 a group, of either sign | (code - 8) * scale       |
| model      | the model's own dtype      | none                      | code                     |

An int4 byte j holds element j in its low half and element j + head_dim / 2 in its high half;
a group is a run of `int4_group_size` elements of the row, at most 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

SCALE_DTYPE = torch.bfloat16  # float32's range, so that neither tiny nor huge rows lose their scale
_MIN_SCALE = 2.0**-100  # keeps 1 / scale finite; far below any value that attention can feel
_MOST = 2.0**127  # rows below it stay finite when codes are multiplied with a rounded scale again


class KVFormat:
    """One storage format of rows; subclasses say how codes and scales are made.

    Attributes:
        name: as in ``KVConfig.dtype``.
        head_dim: elements of a row.
        code_dtype: dtype of the pages.
        code_width: elements of ``code_dtype`` a row.
        num_scales: bfloat16 factors a row.
        poison: a byte that fills fresh pages in tests; as a code it is never written.
        version: goes up when stored bytes come to mean something else; snapshots hold it.
        limit: rows whose elements are below it, in size, are finite as stored and read again.
    """

    name: str
    code_dtype: torch.dtype
    num_scales: int = 1
    poison: int = 0xFF
    version: int = 1
    limit: float = _MOST

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self.code_width = head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes, scales included."""
        return self.code_width * self.code_dtype.itemsize + self.num_scales * SCALE_DTYPE.itemsize

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Turn real rows into codes and scales.

        Args:
            rows: shape [..., head_dim], float32, finite (the caller checks).
        Returns:
            codes, shape [..., code_width], ``code_dtype``; scales, shape [..., num_scales],
            bfloat16. A row of zeros comes back as exact zeros.
        """
        raise NotImplementedError

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Turn codes and scales back into real rows, shape [..., head_dim], float32."""
        raise NotImplementedError

    def error_bound(self, rows: Tensor) -> Tensor:
        """How far the stored value of each element may lie from the real one at most.

        Args:
            rows: shape [..., head_dim], float32, finite, as they are quantized (rotated).
        Returns:
            shape [..., head_dim], float32: a bound on ``|dequantize(quantize(rows)) - rows|``
            that follows from the format; the class says how.
        """
        raise NotImplementedError

    def norm_bound(self, rows: Tensor) -> Tensor:
        """As `error_bound`, but of a whole row's error: its Euclidean norm, shape [...].

        Rotation keeps it, and it bounds scores: ``|q @ error| <= |q| * norm_bound``.
        """
        norm: Tensor = self.error_bound(rows).norm(dim=-1)
        return norm


_ROUNDED = 1 + 2.0**-7  # a bfloat16 scale may be 2^-9 off, a float32 quotient far less


def _row_scale(rows: Tensor, largest_code: float) -> Tensor:
    amax = rows.abs().amax(dim=-1, keepdim=True)
    return (amax / largest_code).clamp_min(_MIN_SCALE).to(SCALE_DTYPE)


def _float_error(rows: Tensor, dtype: torch.dtype, scale: Tensor | float) -> Tensor:
    """Bound on rounding ``rows / scale`` to a float format: half a unit in the last place."""
    info = torch.finfo(dtype)
    least = info.tiny * info.eps / 2 * scale  # of what is below the smallest normal number
    return torch.maximum(rows.abs() * (info.eps / 2), torch.as_tensor(least))


class Int8Format(KVFormat):
    """Symmetric int8.

    Accuracy: half a step, amax / 254 of the row, plus the rounding of the scale.
    """

    name = "int8"
    code_dtype = torch.int8
    poison = 0x80  # -128

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = _row_scale(rows, 127.0)
        codes = (rows / scale.float()).round_().clamp_(-127, 127)
        return codes.to(torch.int8), scale

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * scales.float()

    def error_bound(self, rows: Tensor) -> Tensor:
        half_step: Tensor = _row_scale(rows, 127.0).float() / 2
        return (half_step * _ROUNDED).expand_as(rows)


class Fp8Format(KVFormat):
    """8-bit floats with a scale a row.

    Accuracy: 1/16 (e4m3) or 1/8 (e5m2) of the element; for small ones half the smallest code,
    amax of the row / 4.6e5 or / 7.5e9.
    """

    def __init__(self, head_dim: int, name: str = "fp8") -> None:
        super().__init__(head_dim)
        self.name = name
        self.code_dtype = torch.float8_e4m3fn if name == "fp8" else torch.float8_e5m2
        self.largest = torch.finfo(self.code_dtype).max
        self.poison = 0x7F  # NaN in both kinds

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = _row_scale(rows, self.largest)
        codes = (rows / scale.float()).clamp_(-self.largest, self.largest)
        return codes.to(self.code_dtype), scale

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * scales.float()

    def error_bound(self, rows: Tensor) -> Tensor:
        scale = _row_scale(rows, self.largest).float()
        return _float_error(rows, self.code_dtype, scale) * _ROUNDED


INT4_SEARCH = (1.0, 0.93, 0.86, 0.8)
"""Scales that an int4 group may take, as shares of the largest: the one with least error wins."""


def int4_group_size(head_dim: int) -> int:
    """Elements of an int4 row that share a scale: its largest even divisor that is at most 32.

    >>> [int4_group_size(head_dim) for head_dim in (64, 80, 96, 112, 128)]
    [32, 20, 32, 28, 32]
    """
    return next(size for size in range(32, 1, -2) if head_dim % size == 0)


class Int4Format(KVFormat):
    """Packed 4-bit codes -8..7, a signed scale a group.

    There is one more code on one side of zero than on the other: the sign of the scale puts it
    on the side of the group's largest element. A scale below the largest that fits clips few
    elements and serves the others better; of `INT4_SEARCH` the one is taken that leaves the
    least squared error.

    Accuracy: at the full scale no element is off by more than half a step, amax / 15 of its
    group, and the whole group by sqrt(group_size) times that. A scale that wins is better for
    the whole group, though one element, clipped at 7 steps, may be off by more.
    """

    name = "int4"
    version = 2  # 1 had a scale and a zero a group
    code_dtype = torch.uint8
    poison = 0xFF  # with NaN scales, as every fresh page gets

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim)
        if head_dim % 2:
            raise ValueError(
                f'KVConfig.dtype: "int4" needs an even head_dim, got {head_dim}; use "int8"'
            )
        self.code_width = head_dim // 2
        self.group_size = int4_group_size(head_dim)
        self.num_scales = head_dim // self.group_size

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = rows.unflatten(-1, (-1, self.group_size))
        amax = groups.abs().amax(dim=-1, keepdim=True)
        above = groups.amax(dim=-1, keepdim=True) >= amax
        best, scale, codes = torch.full_like(amax, torch.inf), amax, groups
        for i, share in enumerate(INT4_SEARCH):
            size = (amax * (share / 7.5)).clamp_min(_MIN_SCALE).to(SCALE_DTYPE).float()
            tried = torch.where(above, -size, size)
            coded = (groups * tried.reciprocal()).round_().clamp_(-8, 7)
            error = _sum_halves((groups - coded * tried).square_())
            better = (error < best) | (i == 0)
            best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
            codes = torch.where(better, coded, codes)
        low_half, high_half = (codes + 8).to(torch.uint8).flatten(-2).chunk(2, dim=-1)
        return low_half | (high_half << 4), scale.to(SCALE_DTYPE).flatten(-2)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        real = torch.cat([codes & 15, codes >> 4], dim=-1).float() - 8
        rows: Tensor = real.unflatten(-1, (-1, self.group_size)) * scales.float()[..., None]
        return rows.flatten(-2)

    def _half_steps(self, rows: Tensor) -> Tensor:
        """Half a step at the full scale, of each group: [..., num_scales, 1]."""
        groups = rows.unflatten(-1, (-1, self.group_size))
        amax: Tensor = groups.abs().amax(dim=-1, keepdim=True)
        # At 7 steps (of 7.5 in amax) the rounding of the scale counts 14 times.
        return (amax / 15).clamp_min(_MIN_SCALE) * (1 + 14 * 2.0**-8)

    def error_bound(self, rows: Tensor) -> Tensor:
        clipped = 15 - 14 * min(INT4_SEARCH)  # half steps between amax and its code
        most = max(1.0, min(clipped, self.group_size**0.5))
        bound: Tensor = self._half_steps(rows) * most
        return bound.expand(*bound.shape[:-1], self.group_size).flatten(-2)

    def norm_bound(self, rows: Tensor) -> Tensor:
        groups: Tensor = self._half_steps(rows) * self.group_size**0.5
        norm: Tensor = groups.flatten(-2).norm(dim=-1)
        return norm


def _sum_halves(groups: Tensor) -> Tensor:
    """Sum over the last dimension (at most 32), keeping it, in the one order that kernels have."""
    groups = F.pad(groups, (0, 32 - groups.shape[-1]))
    while groups.shape[-1] > 1:
        half = groups.shape[-1] // 2
        groups = groups[..., :half] + groups[..., half:]
    return groups


class ModelFormat(KVFormat):
    """The model's own dtype, not quantized: the baseline.

    Accuracy: exact for rows of that dtype; rotated, or wider, half a unit in the last place.
    """

    name = "model"
    num_scales = 0

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(head_dim)
        self.code_dtype = dtype  # poison 0xFF bytes are NaN in every float dtype
        info = torch.finfo(dtype)
        # Half a unit beyond the largest number rounds to infinity.
        half = info.max * info.eps / (2 - info.eps) / 2
        self.limit = math.inf if dtype == torch.float32 else info.max + half

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.to(self.code_dtype), rows.new_empty((*rows.shape[:-1], 0), dtype=SCALE_DTYPE)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float()

    def error_bound(self, rows: Tensor) -> Tensor:
        return _float_error(rows, self.code_dtype, 1.0)


MAKERS: dict[str, Callable[[int, torch.dtype], KVFormat]] = {
    "int8": lambda head_dim, model_dtype: Int8Format(head_dim),
    "fp8": lambda head_dim, model_dtype: Fp8Format(head_dim, "fp8"),
    "fp8_e5m2": lambda head_dim, model_dtype: Fp8Format(head_dim, "fp8_e5m2"),
    "int4": lambda head_dim, model_dtype: Int4Format(head_dim),
    "model": ModelFormat,
}
"""How each format of `radixkv.kv_formats` is made, for a head size and a model's dtype."""


def make_format(name: str, head_dim: int, model_dtype: torch.dtype) -> KVFormat:
    """The format that ``KVConfig.dtype`` names, for rows of ``head_dim`` elements.

    Raises:
        ValueError: no such format, or one that does not take such a row.
    """
    make = MAKERS.get(name)
    if make is None:
        raise ValueError(
            f"KVConfig.dtype: expected one of {', '.join(map(repr, MAKERS))}, got {name!r}; a new "
            f"format needs a class in radixkv.attention.formats, too"
        )
    return make(head_dim, model_dtype)


def row_limit(kv_format: KVFormat, rotate: bool) -> float:
    """What the elements of a row, before it is rotated, have to be below, in size.

    A rotation adds up as many elements as its blocks have before it scales them: no sum of theirs
    may overflow. What is then above ``kv_format.limit`` shows only once it is rotated.
    """
    if not rotate:
        return kv_format.limit
    return _MOST / (kv_format.head_dim & -kv_format.head_dim)


@cache
def hadamard(head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """An orthonormal, symmetric rotation of rows: shape [head_dim, head_dim], float32.

    Block-diagonal of Sylvester's Hadamard matrices of the largest power of two that divides
    ``head_dim``, so that it is its own inverse.

    >>> rotation = hadamard(80)
    >>> bool(torch.allclose(rotation @ rotation, torch.eye(80), atol=1e-6))
    True
    """
    size = head_dim & -head_dim
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block = block / size**0.5
    rotation: Tensor = torch.block_diag(*[block] * (head_dim // size)).float().to(device)
    return rotation
