"""Pages: who owns each one, and the tensors that they live in.

`PagePool` is bookkeeping alone (NumPy, no torch), so that the tree is tested and fuzzed
without a tensor. `PageStorage` holds the bytes.

Owners of a page: the tree (at most once, ``in_tree``), each lease and pin that lists it, and
each *stand-in* for it (see `PagePool.stand_in`). ``ref_count`` is their sum, and the truth:
a page is free at 0 and evictable when the tree alone owns it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import CapacityError

if TYPE_CHECKING:
    import torch

    from radixkv.quant import KVCodec, LayerPages

# A page's state: how many owners it has, whether the tree is one, whether it is watched.
OWNERS = (1 << 20) - 1
IN_TREE = 1 << 28
WATCHED = 1 << 29
LONE = IN_TREE + 1  # the tree alone owns it: evictable

NULL_PAGE = 0  # padding reads and writes land here; never handed out, outside the capacity

PageIds = NDArray[np.int64]  # as wide as an index: NumPy gathers by it three times as fast


class PagePool:
    """Reference counts and the free list of pages 1 to ``num_pages``.

    Attributes:
        num_pages: usable pages; page 0 (`NULL_PAGE`) comes on top.
        state: owners, `IN_TREE` and `WATCHED` of each page, 0 if free. [num_pages + 1] int32.
        num_evictable: pages that the tree alone owns.
        on_release: called with the watched pages whose only owner is now the tree.

    >>> pool = PagePool(4)
    >>> pages = pool.allocate(3)
    >>> pages.tolist(), pool.num_free
    ([1, 2, 3], 1)
    >>> pool.drop(pages)
    >>> pool.num_free
    4
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.state = np.zeros(num_pages + 1, dtype=np.int32)
        self.num_evictable = 0
        self.on_release: Callable[[list[int]], None] | None = None
        # A stack with the lowest id on top, so that memory is touched only as pages are used.
        self._free = np.arange(num_pages, 0, -1, dtype=np.int64)
        self._num_free = num_pages
        self._stand_ins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return self._num_free

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can serve once the tree gives up all that it alone owns."""
        return self._num_free + self.num_evictable

    def allocate(self, count: int) -> PageIds:
        """Take ``count`` free pages, each with one owner, the caller; all or nothing.

        Raises:
            CapacityError: fewer are free; nothing was taken.

        Complexity: O(count).
        """
        if count > self._num_free:
            raise CapacityError(
                f"pages: asked for {count}, {self._num_free} of {self.num_pages} are free; "
                f"release leases or pins, or raise KVConfig.capacity"
            )
        top = self._num_free - count
        page_ids = self._free[top : self._num_free][::-1].copy()
        self._num_free = top
        self.state[page_ids] = 1
        return page_ids

    def hold(self, page_ids: PageIds) -> None:
        """Add an owner to pages that have one already; each id at most once in the call."""
        state = self.state[page_ids]
        self.num_evictable -= int(np.count_nonzero(state == LONE))
        self.state[page_ids] = state + 1

    def drop(self, page_ids: PageIds) -> None:
        """Take an owner other than the tree from pages; those left without one are free."""
        if not page_ids.size:
            return
        state = self.state[page_ids] - 1
        self.state[page_ids] = state
        self.num_evictable += int(np.count_nonzero(state == LONE))
        if np.count_nonzero(state) != state.size:
            self._push(page_ids[state == 0])
        lone = state == LONE + WATCHED
        if np.count_nonzero(lone):
            watched = page_ids[lone].tolist()
            self.num_evictable += len(watched)
            if self.on_release is not None:
                self.on_release(watched)

    def watch(self, page_id: int, watched: bool) -> None:
        """Whether ``on_release`` is told when only the tree is left as the page's owner."""
        state = self.state.item(page_id)
        self.state[page_id] = state | WATCHED if watched else state & ~WATCHED

    def enter_tree(self, page_ids: PageIds) -> None:
        """Make the tree an owner of pages that others own and the tree does not.

        A duplicate that enters stands in for no other page any more: its holders hold the
        tree's own page now. (Kept, two pages could come to hold each other for ever.)
        """
        self.state[page_ids] += LONE
        if self._stand_ins:
            for page_id in [p for p in page_ids.tolist() if p in self._stand_ins]:
                self.drop(np.array([self._stand_ins.pop(page_id)]))

    def leave_tree(self, page_ids: PageIds) -> int:
        """Take pages from the tree; those without another owner are free. Returns how many."""
        state = self.state.take(page_ids)
        state &= OWNERS
        state -= 1
        self.state[page_ids] = state
        freed = page_ids[state == 0]
        self.num_evictable -= freed.size
        if freed.size:
            self._push(freed)
        return int(freed.size)

    def free_lone(self, page_ids: PageIds) -> None:
        """Free pages that the tree alone owns."""
        self.state[page_ids] = 0
        self.num_evictable -= page_ids.size
        self._push(page_ids)

    def count(self, page_id: int) -> int:
        """Owners of one page, the tree among them."""
        return self.state.item(page_id) & OWNERS

    @property
    def ref_count(self) -> NDArray[np.int32]:
        """Owners of each page, the tree among them. [num_pages + 1] int32, a copy."""
        return self.state & OWNERS

    @property
    def in_tree(self) -> NDArray[np.bool_]:
        """Whether the tree is an owner. [num_pages + 1] bool, a copy."""
        return np.asarray((self.state & IN_TREE) != 0, dtype=np.bool_)

    def stand_in(self, page_id: int, tree_page: int) -> None:
        """Keep ``tree_page`` held for as long as ``page_id`` has an owner.

        A lease whose page was found to be a duplicate of the tree's is pointed at the tree's;
        but another holder of the duplicate (a fork, a pin) is not. Its later pages may be the
        tree's own, and must never be held while the page before them in the tree is not: so
        the duplicate, while it lives, holds the tree's page in its holders' stead.
        """
        previous = self._stand_ins.get(page_id)
        self._stand_ins[page_id] = tree_page
        self.hold(np.array([tree_page]))
        if previous is not None:
            self.drop(np.array([previous]))

    def stand_ins(self) -> dict[int, int]:
        """Duplicates that still have holders, and the tree pages that they hold."""
        return dict(self._stand_ins)

    def _push(self, freed: PageIds) -> None:
        # Reversed, so that a run freed together is handed out again in its order.
        self._free[self._num_free : self._num_free + freed.size] = freed[::-1]
        self._num_free += int(freed.size)
        if self._stand_ins:
            held = [self._stand_ins.pop(p) for p in freed.tolist() if p in self._stand_ins]
            for page_id in held:  # one at a time: two duplicates may hold one page
                self.drop(np.array([page_id]))

    @property
    def nbytes(self) -> int:
        """Host bytes of the bookkeeping arrays."""
        return self.state.nbytes + self._free.nbytes

    def free_pages(self) -> PageIds:
        """The free pages, in no order."""
        return self._free[: self._num_free].copy()


def free_device_bytes(device: torch.device) -> int:
    """Bytes of memory that ``device`` has free now."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def total_device_bytes(device: torch.device) -> int:
    """Bytes of memory that ``device`` has."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
            `radixkv.quant`.
        copier: a backend's `copy_pages`, if it has one.
    """

    def __init__(self, codec: KVCodec, num_pages: int, device: torch.device) -> None:
        import torch

        from radixkv.quant import SCALE_DTYPE, LayerPages

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
        self._codec = codec
        self.copier: Callable[..., None] | None = None
        copied = [t.view(torch.uint8) for t in self.pages if t.numel()]
        # On a CPU the copies go through NumPy, whose calls cost a tenth of torch's.
        self._copied: list[Any] = [t.numpy() if device.type == "cpu" else t for t in copied]

    def layer(self, layer_idx: int) -> LayerPages:
        """Views of one layer's tensors."""
        return self._layers[layer_idx]

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of a page, scales included, in all layers."""
        if self.copier is not None:
            self.copier(self._codec, self.pages, [(source, target, num_tokens)])
            return
        for tensor in self._copied:
            tensor[:, target, :, :num_tokens] = tensor[:, source, :, :num_tokens]

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
    "total_device_bytes",
]
