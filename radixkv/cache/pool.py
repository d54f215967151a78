"""Pages: who owns each one, and the tensors that they live in.

`PagePool` is bookkeeping alone (NumPy, no torch), so that the tree is tested and fuzzed
without a tensor. `PageStorage` holds the bytes.

Owners of a page: the tree (at most once, ``in_tree``), each lease and pin that lists it, and
each *stand-in* for it (see `PagePool.stand_in`). ``ref_count`` is their sum, and the truth:
a page is free at 0 and evictable when the tree alone owns it.
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import CapacityError
from radixkv.machine import free_memory_bytes, total_memory_bytes

if TYPE_CHECKING:
    import torch

    from radixkv.attention.layout import KVCodec, LayerPages

logger = logging.getLogger("radixkv")

NULL_PAGE = 0  # padding reads and writes land here; never handed out, outside the capacity

PageIds = NDArray[np.int64]  # as wide as an index: NumPy gathers by it three times as fast


@functools.cache
def load_kernel() -> ModuleType | None:
    """The compiled functions over pages, ``kernels/tree.py``; None where Numba is not installed.

    Imported here, because it loads Numba.
    """
    try:
        from radixkv_kernels import tree
    except ImportError as error:
        logger.info("the tree runs as plain Python, without its compiled functions: %s", error)
        return None
    compiled: ModuleType = tree
    return compiled


def plain_is_wanted() -> bool:
    """Whether RADIXKV_PLAIN_TREE=1 asks for the plain tree."""
    return os.environ.get("RADIXKV_PLAIN_TREE") == "1"


def _copy_tokens(every: tuple[Any, ...], source: int, target: int, num_tokens: int) -> None:
    """As the compiled kernel; of arrays and tensors."""
    for stored in every:
        stored[:, target, :, :num_tokens] = stored[:, source, :, :num_tokens]


class PagePool(ABC):
    """Reference counts and the free list of pages 1 to ``num_pages``.

    As of the tree over its pages there are two: of `radixkv.cache.compiled_tree` and of
    `radixkv.cache.plain_pool`. Both hand out the same pages: those that were given back last go
    first, a run in its order, then those never used, the lowest id first.

    Attributes:
        num_pages: usable pages; page 0 (`NULL_PAGE`) comes on top.

    >>> from radixkv.cache.tree_choice import make_tree
    >>> pool = make_tree(page_size=16, num_pages=4).pool
    >>> pages = pool.allocate(3)
    >>> pages.tolist(), pool.num_free
    ([1, 2, 3], 1)
    >>> pool.drop(pages)
    >>> pool.num_free
    4
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Pages without an owner. O(1)."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages that the tree alone owns. O(1)."""

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can serve once the tree gives up all that it alone owns."""
        return self.num_free + self.num_evictable

    def allocate(self, count: int) -> PageIds:
        """Take ``count`` free pages, each with one owner, the caller; all or nothing.

        Raises:
            CapacityError: fewer are free; nothing was taken.

        Complexity: O(count).
        """
        if count > self.num_free:
            raise CapacityError(
                f"pages: asked for {count}, {self.num_free} of {self.num_pages} are free; "
                f"release leases or pins, or raise KVConfig.capacity"
            )
        return self._take(count)

    @abstractmethod
    def _take(self, count: int) -> PageIds:
        """As `allocate`, where so many are free."""

    @abstractmethod
    def hold(self, page_ids: PageIds) -> None:
        """Add an owner to pages that have one already."""

    @abstractmethod
    def drop(self, page_ids: PageIds) -> None:
        """Take an owner other than the tree from pages; those left without one are free.

        From the last to the first, so that a run given back is handed out again in its order.
        """

    @abstractmethod
    def count(self, page_id: int) -> int:
        """Owners of one page, the tree among them."""

    @abstractmethod
    def counts_of(self, page_ids: PageIds) -> NDArray[np.int32]:
        """Owners of each page given, the tree among them."""

    @property
    @abstractmethod
    def ref_count(self) -> NDArray[np.int32]:
        """Owners of each page, the tree among them. [num_pages + 1] int32, a copy."""

    @property
    @abstractmethod
    def in_tree(self) -> NDArray[np.bool_]:
        """Whether the tree is an owner. [num_pages + 1] bool, a copy."""

    @abstractmethod
    def stand_in(self, page_id: int, tree_page: int) -> None:
        """Keep ``tree_page`` held for as long as ``page_id`` has an owner.

        A lease whose page was found to be a duplicate of the tree's is pointed at the tree's;
        but another holder of the duplicate (a fork, a pin) is not. Its later pages may be the
        tree's own, and must never be held while the page before them in the tree is not: so
        the duplicate, while it lives, holds the tree's page in its holders' stead.
        """

    @abstractmethod
    def stand_ins(self) -> dict[int, int]:
        """Duplicates that still have holders, and the tree pages that they hold."""

    @abstractmethod
    def free_pages(self) -> PageIds:
        """The free pages, in no order."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Host bytes of the bookkeeping, the tree's among it."""


def free_device_bytes(device: torch.device) -> int:
    """Bytes of memory that ``device`` has free now: that can be taken without swapping."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


def total_device_bytes(device: torch.device) -> int:
    """Bytes of memory that ``device`` has."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return total_memory_bytes()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Float8 tensors lack indexing on some devices; their bytes do not.
    import torch

    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


class PageStorage:
    """The page and scale tensors of all layers: [num_layers, num_pages + 1, ...] each.

    Memory is not touched before pages are written, so the operating system commits it only
    as the cache fills. With RADIXKV_POISON=1 in the environment, fresh memory is filled with
    bytes that are never written as codes, and NaN scales: tests read no stale page unseen.

    Attributes:
        pages: k_pages, v_pages, k_scale, v_scale of all layers; per layer as in
            `radixkv.attention.layout`.
        copier: a backend's `copy_pages`, if it has one.
    """

    def __init__(self, codec: KVCodec, num_pages: int, device: torch.device) -> None:
        import torch

        from radixkv.attention.formats import SCALE_DTYPE
        from radixkv.attention.layout import LayerPages

        spec, page_size = codec.spec, codec.config.page_size
        outer = (spec.num_layers, num_pages + 1, spec.num_kv_heads, page_size)
        poison = os.environ.get("RADIXKV_POISON") == "1"

        def fresh(width: int, dtype: torch.dtype, poison_byte: int | None) -> torch.Tensor:
            tensor = torch.empty((*outer, width), dtype=dtype, device=device)
            if poison and poison_byte is not None:
                tensor.view(torch.uint8).fill_(poison_byte)
            elif poison:
                tensor.fill_(float("nan"))
            return tensor

        k, v = codec.k_format, codec.v_format
        self.pages = LayerPages(
            fresh(k.code_width, k.code_dtype, k.poison),
            fresh(v.code_width, v.code_dtype, v.poison),
            fresh(k.num_scales, SCALE_DTYPE, None),
            fresh(v.num_scales, SCALE_DTYPE, None),
        )
        for tensor in self.pages:
            _as_bytes(tensor)[:, NULL_PAGE] = 0  # padding reads finite values
        self._layers = [LayerPages(*(t[i] for t in self.pages)) for i in range(spec.num_layers)]
        self.copier: Callable[..., None] | None = None
        copied = [t.view(torch.uint8) for t in self.pages]
        # On a CPU the copies go through NumPy, whose calls cost a tenth of torch's.
        on_host = device.type == "cpu"
        self._copied: tuple[Any, ...] = tuple(t.numpy() if on_host else t for t in copied)
        kernel = load_kernel() if on_host and not plain_is_wanted() else None
        self._copy_tokens = _copy_tokens if kernel is None else kernel.copy_tokens

    def layer(self, layer_idx: int) -> LayerPages:
        """Views of one layer's tensors."""
        return self._layers[layer_idx]

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of a page, scales included, in all layers."""
        if self.copier is not None:
            self.copier(self.pages, [(source, target, num_tokens)])
            return
        self._copy_tokens(self._copied, source, target, num_tokens)

    def nbytes(self) -> int:
        """Bytes of all tensors, the reserved page included."""
        return sum(t.nbytes for t in self.pages)


def capacity_pages(capacity: int, bytes_per_page: int, detail: str) -> int:
    """How many pages fit ``capacity`` bytes.

    Raises:
        ValueError: not even one; says the bytes that one page needs.
    """
    num_pages = capacity // bytes_per_page
    if num_pages < 1:
        raise ValueError(
            f"KVConfig.capacity: expected at least {bytes_per_page} bytes, which one page needs "
            f"({detail}), got {capacity}; raise it or make page_size smaller"
        )
    return num_pages


__all__ = [
    "NULL_PAGE",
    "PageIds",
    "PagePool",
    "PageStorage",
    "capacity_pages",
    "free_device_bytes",
    "load_kernel",
    "total_device_bytes",
]
