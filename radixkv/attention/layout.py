"""How one cache's K and V lie in pages: their geometry, their tensors, their formats.

Page layout, defined here and used everywhere (heads before tokens, so that one head's page
is contiguous), per layer:

    k_pages  [num_pages, num_kv_heads, page_size, code_width]   codes, `KVFormat.code_dtype`
    k_scale  [num_pages, num_kv_heads, page_size, num_scales]   bfloat16; num_scales 0 for "model"
    v_pages, v_scale likewise, with V's own format and head_dim
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from radixkv.attention.formats import KVFormat, make_format
from radixkv.config import KVConfig, require_int

if TYPE_CHECKING:
    from radixkv_kernels.cpu.records import PagePlaces


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """The geometry of one model's K and V.

    Attributes:
        num_layers: attention layers.
        num_kv_heads: KV heads a layer.
        head_dim: elements of a K row.
        v_head_dim: elements of a V row; None is ``head_dim``.
        dtype: the model's own dtype: float32, float16 or bfloat16.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        require_int("KVSpec.num_layers", self.num_layers, 1)
        require_int("KVSpec.num_kv_heads", self.num_kv_heads, 1)
        require_int("KVSpec.head_dim", self.head_dim, 1)
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        require_int("KVSpec.v_head_dim", self.v_head_dim, 1)
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"KVSpec.dtype: expected torch.float32, torch.float16 or torch.bfloat16, "
                f"got {self.dtype!r}"
            )


class _LayerTensors(NamedTuple):
    k_pages: Tensor
    v_pages: Tensor
    k_scale: Tensor
    v_scale: Tensor


class LayerPages(_LayerTensors):
    """One layer's page and scale tensors; shapes as at the top of this module."""

    @cached_property
    def places(self) -> PagePlaces:
        """Their addresses and strides, as the compiled CPU kernels take them; found once."""
        from radixkv_kernels.cpu.records import page_places  # here, because it loads Numba

        return page_places(*self)


@dataclass(frozen=True)
class KVCodec:
    """The formats of K and V of one cache, and whether rows are rotated before they are stored."""

    spec: KVSpec
    config: KVConfig

    @cached_property
    def k_format(self) -> KVFormat:
        return make_format(self.config.dtype, self.spec.head_dim, self.spec.dtype)

    @cached_property
    def v_format(self) -> KVFormat:
        name = self.config.v_dtype or self.config.dtype
        assert self.spec.v_head_dim is not None  # set by KVSpec
        return make_format(name, self.spec.v_head_dim, self.spec.dtype)

    def _rotates(self, kv_format: KVFormat) -> bool:
        if self.config.rotate == "auto":
            return kv_format.name != "model"
        return self.config.rotate == "hadamard"

    @cached_property
    def rotate_k(self) -> bool:
        """Whether K (and so Q) is rotated."""
        return self._rotates(self.k_format)

    @cached_property
    def rotate_v(self) -> bool:
        """Whether V is rotated on write and the attention's output rotated back."""
        return self._rotates(self.v_format)

    @property
    def centers_k(self) -> bool:
        """Whether a model's K is stored less its mean (`ModelRunner.k_center`)."""
        return self.k_format.name != "model"

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, scales included."""
        rows = self.spec.num_layers * self.spec.num_kv_heads
        return rows * (self.k_format.row_bytes + self.v_format.row_bytes)

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers."""
        return self.bytes_per_token * self.config.page_size
