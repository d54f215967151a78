"""What a cache and its leases stand on: tree, pages and tensors under one lock."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from typing import Any, NoReturn

import torch

from radixkv.attention.backend import get_backend
from radixkv.attention.layout import KVCodec, KVSpec
from radixkv.attention.plan import Backend
from radixkv.attention.shared_runs import PageTables
from radixkv.cache.guard import Guard
from radixkv.cache.pin import Pin, Pins
from radixkv.cache.pool import (
    PageIds,
    PageStorage,
    capacity_pages,
    free_device_bytes,
    total_device_bytes,
)
from radixkv.cache.tree_choice import make_tree
from radixkv.config import KVConfig, parse_bytes
from radixkv.errors import CapacityError

_DEFAULT_CAPACITY_SHARE = 4  # capacity=None: a quarter of the free memory


class CacheCore:
    """The parts of one cache, and what both `PrefixCache` and its leases do with them.

    Whoever touches tree, pool, pins or counters holds ``guard``.

    Args:
        As `radixkv.PrefixCache`.

    Attributes:
        spec, config, codec: geometry, options, formats.
        device, on_host, backend: where pages lie and which code reads them.
        pool, tree, storage: owners of pages; what is cached; the tensors.
        page_tables: the rows of page ids that batches are made of.
        leases: those that are not released, by identity.
        pins: prefixes that are kept.
        lookups, lookup_tokens, hit_tokens, cow_copies: counted as `CacheStats` says.
        now: the clock that priorities and pins expire by, in seconds.
    """

    def __init__(self, spec: KVSpec, kv: KVConfig | None, device: torch.device | str, backend: str):
        if not isinstance(spec, KVSpec):
            raise TypeError(f"spec: expected a KVSpec, got {spec!r}; use KVSpec(num_layers=...)")
        if kv is not None and not isinstance(kv, KVConfig):
            raise TypeError(f"kv: expected a KVConfig, got {kv!r}; use KVConfig(dtype=...)")
        self.spec = spec
        self.config = KVConfig() if kv is None else kv
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        self.codec = KVCodec(spec, self.config)
        self.backend: Backend = get_backend(backend, self.device)(self.codec)
        self.page_tables = PageTables(with_runs=self.config.shared_prefix != "never")
        self.page_size = self.config.page_size
        if self.config.capacity is None:
            capacity = free_device_bytes(self.device) // _DEFAULT_CAPACITY_SHARE
        else:
            capacity = parse_bytes(self.config.capacity, name="KVConfig.capacity")
        num_pages = capacity_pages(
            capacity,
            self.codec.bytes_per_page,
            f"{self.page_size} tokens of {self.codec.bytes_per_token} bytes",
        )
        too_much = CapacityError(
            f"KVConfig.capacity: expected at most the {total_device_bytes(self.device):,} bytes of "
            f"memory of {self.device}, got {self.config.capacity!r}; "
            f"{free_device_bytes(self.device):,} bytes are free now"
        )
        # Memory is taken as pages are used, so an allocation may succeed that can never be.
        if capacity > total_device_bytes(self.device):
            raise too_much
        try:
            self.tree = make_tree(self.page_size, num_pages, self.config.eviction)
            self.pool = self.tree.pool
            self.storage = PageStorage(self.codec, num_pages, self.device)
        except (MemoryError, RuntimeError) as error:  # of NumPy, of torch
            raise too_much from error
        self.storage.copier = self.backend.copy_pages
        self.lookups = self.lookup_tokens = self.hit_tokens = self.cow_copies = 0
        self._returned: deque[PageIds | Pin] = deque()
        self.leases: dict[int, weakref.ref[Any]] = {}
        self.pins = Pins(self.pool, int(self.config.pin_share * num_pages))
        self.guard = Guard((self._returned, self.pins.timed, self.tree.expiries), self._reclaim)
        self.now = time.monotonic

    def after_fork(self) -> None:
        """Free the lock, in a process whose fork() may have copied it held by another thread."""
        self.guard.lock = threading.RLock()
        self.guard.inside = False

    # --- pages -------------------------------------------------------------------------

    def require_room(self, count: int, name: str) -> None:
        """Raise CapacityError unless ``count`` pages are free or evictable."""
        if count > self.pool.num_available:
            self.refuse_room(name, count, self.pool.num_available)

    def refuse_room(self, name: str, count: int, available: int) -> NoReturn:
        total = self.pool.num_pages
        raise CapacityError(
            f"{name}: needs {count} pages of {self.page_size} tokens, {available} of {total} are "
            f"free or evictable ({total - available} are held); release leases or pins, or raise "
            f"KVConfig.capacity"
        )

    def allocate(self, count: int, name: str) -> PageIds:
        """Take pages, evicting if needed; nothing changes if they cannot be had."""
        missing = count - self.pool.num_free
        if missing > 0:
            self.require_room(count, name)
            self.tree.evict(missing)
        return self.pool.allocate(count)

    @property
    def num_available_pages(self) -> int:
        """Free pages and those that eviction can free. O(1)."""
        with self.guard:
            return self.pool.num_available

    def collect_garbage(self) -> bool:
        """Collect Python's garbage, if leases are held; whether pages came free by it.

        A lease in a cycle that nobody can reach holds its pages until then. Takes as long as
        `gc.collect`, a tenth of a second beside a large library: for the moment before a caller
        is refused. Who asks again and again uses `try_acquire`.
        """
        before = self.num_available_pages
        if not self.leases:
            return False
        gc.collect()
        return self.num_available_pages > before

    def give_back(self, what: PageIds | Pin, lease_id: int = 0) -> None:
        """Take a pin or a lease's pages back, now or, inside a call of this thread, after it."""
        guard = self.guard
        guard.lock.acquire()
        try:
            self.leases.pop(lease_id, None)
            self._returned.append(what)
            if not guard.inside:
                guard.inside = True
                try:
                    self._reclaim()
                finally:
                    guard.inside = False
        finally:
            guard.lock.release()

    def give_back_unwaiting(self, pages: PageIds, lease_id: int) -> None:
        """As `give_back`, from a destructor: with the next call, where another one is under way."""
        self.leases.pop(lease_id, None)
        self._returned.append(pages)
        self._reclaim_if_idle()

    def _reclaim_if_idle(self) -> None:
        """`_reclaim`, unless another thread or a call of this one is in the middle of something."""
        guard = self.guard
        if guard.lock.acquire(blocking=False):
            try:
                if not guard.inside:
                    guard.inside = True
                    try:
                        self._reclaim()
                    finally:
                        guard.inside = False
            finally:
                guard.lock.release()

    def _reclaim(self) -> None:
        """Take back what was given back or dropped, and what has outlived its time."""
        while self._returned:
            what = self._returned.popleft()
            if isinstance(what, Pin):
                self.pins.end(what)
            else:
                self.pool.drop(what)
        if self.pins.timed:
            self.pins.expire(self.now())
        if self.tree.expiries:
            self.tree.expire(self.now())
