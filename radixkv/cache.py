"""The prefix cache: leases over the tree's pages, all or nothing.

A lease is one sequence's use of the cache: the pages of its tokens, of which the tree and
other leases may be owners too. A page with more than one owner is never written: it is
copied first. What is committed becomes findable; what is not is freed on release.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv import snapshot, view
from radixkv.attention import Backend, get_backend
from radixkv.config import KVConfig, parse_bytes, require_int, require_namespace, require_real
from radixkv.errors import CacheInvariantError, CapacityError
from radixkv.groups import PageTables
from radixkv.pool import (
    PageIds,
    PagePool,
    PageStorage,
    capacity_pages,
    free_device_bytes,
    total_device_bytes,
)
from radixkv.quant import KVCodec, KVSpec, LayerPages
from radixkv.radix import NamespaceStats, RadixTree, Tokens, decode_tokens, namespace_key
from radixkv.reference import AttentionBatch, ScoreRule

_DEFAULT_CAPACITY_SHARE = 4  # capacity=None: a quarter of the free memory


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """One moment of a cache; pages_free + cached + pinned + private = total.

    Attributes:
        capacity_bytes: bytes of all usable pages.
        bytes_per_token: bytes that a token takes in all layers, scales included.
        pages_total, pages_free: usable pages; those without an owner.
        pages_cached: in the tree alone, hence evictable.
        pages_pinned: in the tree and held by a lease or pin.
        pages_private: held by leases alone.
        lookups, lookup_tokens, hit_tokens: acquires so far, their tokens, those found.
        hit_rate: hit_tokens / lookup_tokens; 0 before the first lookup.
        evicted_pages: pages evicted so far.
        cow_copies: pages copied so far because they were shared or matched in part.
        shared_bytes_saved: bytes that owners of shared pages would need for own copies, now.
        nodes: nodes of the tree.
        utilization: tokens stored / token slots in used pages; 0 when none is used.
        namespaces: pages and tokens of each namespace that has some cached.
    """

    capacity_bytes: int
    bytes_per_token: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_pinned: int
    pages_private: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    hit_rate: float
    evicted_pages: int
    cow_copies: int
    shared_bytes_saved: int
    nodes: int
    utilization: float
    namespaces: tuple[NamespaceStats, ...]


class Lease:
    """One sequence's pages; made by `PrefixCache.acquire` and `Lease.fork`.

    Release it, or use it as a context manager. One thread at a time may use a lease.
    """

    __slots__ = (
        "__weakref__",
        "_batch",
        "_cache",
        "_chunk_start",
        "_namespace",
        "_num_cached",
        "_num_pages",
        "_num_tokens",
        "_pages",
        "_released",
        "_tokens",
        "_written",
    )

    def __init__(
        self,
        cache: PrefixCache,
        tokens: Tokens,
        page_ids: PageIds,
        num_cached: int,
        namespace: Hashable,
        written: list[int],
    ) -> None:
        self._cache = cache
        self._tokens = tokens  # room for more than are used
        self._num_tokens = tokens.size
        self._pages = page_ids  # as above
        self._num_pages = page_ids.size
        self._num_cached = num_cached
        self._namespace = namespace
        self._written = written  # tokens with KV, by layer
        self._chunk_start = written[0]  # tokens from here on came last: the queries of attend
        self._batch: tuple[int, AttentionBatch] | None = None
        self._released = False
        cache._leases[id(self)] = weakref.ref(self)

    # --- what it is --------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return self._num_tokens

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """The sequence. [num_tokens] int64, a copy."""
        return decode_tokens(self._tokens[: self._num_tokens])

    @property
    def num_cached(self) -> int:
        """Tokens whose KV was found when the lease was acquired."""
        return self._num_cached

    @property
    def num_written(self) -> int:
        """Tokens from the beginning whose KV is known to be there in every layer."""
        return min(self._written)

    @property
    def namespace(self) -> Hashable:
        """The namespace that it was acquired in."""
        return self._namespace

    @property
    def is_released(self) -> bool:
        """Whether it was released."""
        return self._released

    @property
    def cache(self) -> PrefixCache:
        """The cache whose pages these are."""
        return self._cache

    @property
    def page_ids(self) -> NDArray[np.int32]:
        """Page ids of the sequence, a copy. [ceil(num_tokens / page_size)] int32.

        `commit`, `extend`, `write` and `slot_mapping` may change them.
        """
        self._require_open()
        return self._pages[: self._num_pages].astype(np.int32)

    def slots(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Slots (page_id * page_size + offset) of tokens start to stop. [stop - start] int64."""
        self._require_open()
        num_tokens = self._num_tokens
        stop = num_tokens if stop is None else stop
        if not 0 <= start <= stop <= num_tokens:
            raise ValueError(
                f"slots: expected 0 <= start <= stop <= {num_tokens}, got {start}, {stop}"
            )
        page_size = self._cache.page_size
        if stop - start == 1:
            page = self._pages.item(start // page_size)
            return np.array([page * page_size + start % page_size], dtype=np.int64)
        positions = np.arange(start, stop, dtype=np.int64)
        pages = self._pages[positions // page_size]
        return pages * page_size + positions % page_size

    @property
    def slot_mapping(self) -> Tensor:
        """Slots of the tokens that have no KV yet, free to be written. [n] int64, on the device.

        Shared pages among them are copied first. Valid until the next call on the lease.
        """
        self._require_open()
        cache = self._cache
        start = self.num_written
        self._make_own(start)
        return torch.from_numpy(self.slots(start)).to(cache.device)

    # --- KV ----------------------------------------------------------------------------

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Quantize and store K and V of the tokens that have none yet in this layer.

        Args:
            k: [pending tokens, num_kv_heads, head_dim]; v: the same with v_head_dim.
        Raises:
            ValueError: another shape, or a layer that is not there.
            NonFiniteError: NaN or Inf in k or v; nothing is stored.
            CapacityError: a shared page had to be copied and no page is left.
        """
        self._require_open()
        cache = self._cache
        layer_idx = cache._require_layer(layer)
        start, stop = self._written[layer_idx], self.num_tokens
        spec = cache.spec
        for name, rows, width in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
            shape = (stop - start, spec.num_kv_heads, width)
            _require_floats(name, rows, cache.device)
            if tuple(rows.shape) != shape:
                raise ValueError(
                    f"{name}: expected shape {list(shape)} (tokens {start} to {stop} have no KV "
                    f"in layer {layer_idx}), got {list(rows.shape)}"
                )
        if start == stop:
            return
        self._make_own(start)
        with cache._guard:
            slots = torch.from_numpy(self.slots(start)).to(cache.device)
            pages = cache.storage.layer(layer_idx)
            cache.backend.write_kv(cache.codec, pages, slots, k, v, layer_idx=layer_idx)
            cache.backend.settle(cache.codec)
            self._written[layer_idx] = stop

    def mark_written(self, num_tokens: int | None = None) -> None:
        """Say that the KV of the first ``num_tokens`` (default: all) is there in every layer."""
        self._require_open()
        count = self.num_tokens if num_tokens is None else num_tokens
        count = require_int("num_tokens", count, 0, self.num_tokens)
        self._written = [max(count, written) for written in self._written]

    def attend(
        self, layer: int, q: Tensor, *, softmax_scale: float | None = None, **rule: Any
    ) -> Tensor:
        """Attend the sequence's last tokens to its pages, causally.

        Args:
            q: [new tokens, num_q_heads, head_dim]; the sequence's last ones.
            softmax_scale: factor on q.k; None is head_dim ** -0.5.
            rule: other fields of `radixkv.reference.ScoreRule`.
        Returns:
            [new tokens, num_q_heads, v_head_dim], q's dtype.
        """
        return self._cache.attend_batch(layer, q, [self], softmax_scale=softmax_scale, **rule)

    # --- growing, sharing, shrinking ---------------------------------------------------

    def extend(self, token_ids: Any) -> None:
        """Append tokens and take pages for them; all or nothing.

        A part-filled last page that others own too is copied, so that it can be written.

        Raises:
            CapacityError: no pages are left, even after eviction; the lease is as it was.

        Complexity: O(new tokens).
        """
        self._require_open()
        tokens = self._cache.tree.encode(token_ids)
        if tokens.size:
            try:
                self.extend_encoded(tokens)
                return
            except CapacityError:
                if not self._cache.collect_garbage():
                    raise
            self.extend_encoded(tokens)

    def extend_encoded(self, tokens: NDArray[np.int32]) -> None:
        """As `extend`, of at least one id that is known to be valid. [num_tokens] int32.

        For a caller who can wait: want of pages is said at once, without a look for garbage.
        """
        self._require_open()
        cache = self._cache
        old = self._num_tokens
        new = old + len(tokens)
        page_size = cache.page_size
        more = -(-new // page_size) - self._num_pages
        if new > self._tokens.size:
            grown = np.empty(max(new, 2 * self._tokens.size), dtype=np.int32)
            grown[:old] = self._tokens[:old]
            self._tokens = grown
        self._tokens[old:new] = tokens
        # A page that this lease alone owns stays so whatever other threads do: no lock for it.
        if more or (old % page_size and cache.pool.count(self._pages[self._num_pages - 1]) > 1):
            cache._guard.enter()
            try:
                self._make_room(old, more)
                self._num_tokens = new  # here: other threads count pages and tokens
            finally:
                cache._guard.leave()
        else:
            self._num_tokens = new
        if self.num_written == old:
            self._chunk_start = old
        self._batch = None

    def _make_room(self, old: int, more: int) -> None:
        """Append ``more`` pages; copy a part-filled last page of ``old`` tokens that is shared."""
        cache = self._cache
        tail = self._num_pages - 1
        in_part = old - tail * cache.page_size
        copies = int(
            tail >= 0 and in_part < cache.page_size and cache.pool.count(self._pages[tail]) > 1
        )
        pages = cache._allocate(more + copies, "extend")
        try:
            if copies:
                self._replace(tail, int(pages[-1]), in_part)
                pages = pages[:more]
            if more:
                self._append(pages)
        except BaseException:
            cache.pool.drop(pages)  # those that are not the lease's yet
            raise

    def fork(self) -> Lease:
        """A second lease on the same pages; nothing is copied until one of them writes."""
        self._require_open()
        cache = self._cache
        with cache._guard:
            pages = self._pages[: self._num_pages].copy()
            tokens, written = self._tokens[: self._num_tokens].copy(), list(self._written)
            cache.pool.hold(pages)
            other = Lease(cache, tokens, pages, self._num_cached, self._namespace, written)
            other._chunk_start = self._chunk_start
            return other

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens; pages past them are given back."""
        self._require_open()
        num_tokens = require_int("num_tokens", num_tokens, 0, self.num_tokens)
        cache = self._cache
        with cache._guard:
            keep = -(-num_tokens // cache.page_size)
            gone = self._pages[keep : self._num_pages].copy()
            self._num_pages = keep
            self._num_tokens = num_tokens
            self._written = [min(num_tokens, written) for written in self._written]
            self._num_cached = min(num_tokens, self._num_cached)
            self._chunk_start = min(num_tokens, self._chunk_start)
            self._batch = None
            if gone.size:
                cache.pool.drop(gone)

    def commit(
        self,
        num_tokens: int | None = None,
        *,
        priority: int | None = None,
        ttl: float | None = None,
    ) -> None:
        """Make the first tokens findable; call it again as the sequence grows.

        Pages that the tree has already are given back in favour of the tree's.

        Args:
            num_tokens: tokens whose KV is there, said by a caller who wrote the slots; None is
                all that `write` has stored in every layer.
            priority: for ``eviction="priority"``: smaller goes first.
            ttl: seconds after which the priority falls to the smallest.
        """
        self._require_open()
        if num_tokens is None:
            num_tokens = self.num_written
        else:
            if type(num_tokens) is not int or not 0 <= num_tokens <= self._num_tokens:
                num_tokens = require_int("num_tokens", num_tokens, 0, self._num_tokens)
            if num_tokens > min(self._written):
                self._written = [max(num_tokens, written) for written in self._written]
        cache = self._cache
        cache._guard.enter()
        try:
            if not num_tokens:
                return
            changed = cache.tree.insert(
                self._tokens,
                self._pages,
                self._namespace,
                num_tokens=num_tokens,
                # Its last page may hold tokens that the tree's page has not.
                own_last=num_tokens == self._num_tokens,
                priority=priority,
                expires=None if ttl is None else cache._now() + ttl,
            )
            if changed:
                self._batch = None
        finally:
            cache._guard.leave()

    def release(self) -> None:
        """Give the pages back; committed ones stay cached. Calling it again does nothing."""
        if self._released:
            return
        self._released = True
        self._cache._give_back(self._pages[: self._num_pages], id(self))

    def abandon(self) -> None:
        """As `release`, from a destructor: it waits for no other thread.

        While another call on the cache runs, the pages go back with the next one.
        """
        if self._released:
            return
        self._released = True
        cache = self._cache
        cache._leases.pop(id(self), None)
        cache._returned.append(self._pages[: self._num_pages])
        cache._reclaim_if_idle()

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # May run at any moment, also inside another cache call: never wait.
        if not getattr(self, "_released", True):
            self.abandon()
            warnings.warn(
                f"a lease of {self.num_tokens} tokens was dropped without release(); "
                f"release it or use it as a context manager",
                ResourceWarning,
                stacklevel=2,
            )

    # --- inside ------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._released:
            raise ValueError("lease: was released; acquire a new one")

    def _append(self, pages: PageIds) -> None:
        need = self._num_pages + pages.size
        if need > self._pages.size:
            grown = np.zeros(max(need, 2 * self._pages.size), dtype=np.int64)
            grown[: self._num_pages] = self._pages[: self._num_pages]
            self._pages = grown
        self._pages[self._num_pages : need] = pages
        self._num_pages = need

    def _replace(self, index: int, page_id: int, num_tokens: int) -> None:
        """Copy the page at ``index`` to ``page_id``, which takes its place."""
        cache = self._cache
        old = self._pages[index : index + 1].copy()
        cache.storage.copy_page(int(old[0]), page_id, num_tokens)
        cache.cow_copies += 1
        self._pages[index] = page_id
        cache.pool.drop(old)
        self._batch = None

    def _make_own(self, start: int) -> None:
        """As `_own`, outside of the lock; for want of pages once more after collecting garbage."""
        cache = self._cache
        try:
            with cache._guard:
                self._own(start)
            return
        except CapacityError:
            if not cache.collect_garbage():
                raise
        with cache._guard:
            self._own(start)

    def _own(self, start: int) -> None:
        """Make the pages of tokens from ``start`` on this lease's alone."""
        cache = self._cache
        page_size = cache.page_size
        first = start // page_size
        if start >= self.num_tokens:
            return
        pages = self._pages[first : self._num_pages]
        shared = np.flatnonzero(cache.pool.counts_of(pages) > 1)
        if not shared.size:
            return
        fresh = cache._allocate(shared.size, "write")
        for n, i in enumerate((shared + first).tolist()):
            try:
                self._replace(i, int(fresh[n]), min(page_size, self.num_tokens - i * page_size))
            except BaseException:
                cache.pool.drop(fresh[n:])
                raise


class Pin:
    """A cached prefix that is not evicted until `unpin`, or until its ttl has passed.

    Attributes:
        num_tokens: tokens that it holds.
    """

    def __init__(
        self,
        cache: PrefixCache,
        page_ids: PageIds,
        num_tokens: int,
        namespace: Hashable,
    ) -> None:
        self._cache = cache
        self._pages = page_ids
        self.num_tokens = num_tokens
        self.namespace = namespace
        self._active = True

    @property
    def is_active(self) -> bool:
        """Whether it still holds its pages."""
        with self._cache._guard:
            return self._active

    def unpin(self) -> None:
        """Let the pages be evicted again. Calling it again does nothing."""
        self._cache._give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unpin()


class _Guard:
    """The lock around a public call; takes back first what was dropped since the last one.

    Garbage collection can run a destructor in the middle of a call, on the same thread: what
    that gives back waits for the next call, and anything else that it asks is refused.

    What every request calls says `enter` and `leave` itself, which takes half as long as ``with``.
    """

    __slots__ = ("_pending", "_reclaim", "inside", "lock")

    def __init__(self, pending: tuple[Sized, ...], reclaim: Callable[[], None]) -> None:
        self._pending = pending  # what is not empty when there is something to take back
        self.lock = threading.RLock()
        self._reclaim = reclaim
        self.inside = False

    def enter(self) -> None:
        self.lock.acquire()
        if self.inside:
            self.lock.release()
            raise RuntimeError(
                "PrefixCache: called from a destructor in the middle of another call; only "
                "release() and unpin() may be"
            )
        self.inside = True
        returned, pins, expiries = self._pending
        if returned or pins or expiries:
            try:
                self._reclaim()
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        self.inside = False
        self.lock.release()

    __enter__ = enter

    def __exit__(self, *_: object) -> None:
        self.leave()


def _require_floats(name: str, rows: object, device: torch.device) -> None:
    """Raise unless ``rows`` is a float tensor on the cache's device."""
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"{name}: expected a floating-point tensor, got {got}; convert it first")
    if rows.device.type != device.type:
        raise ValueError(
            f"{name}: expected a tensor on {device}, where the cache is, got one on {rows.device}"
        )


class _AllNamespaces:
    def __repr__(self) -> str:
        return "all namespaces"


_ALL = _AllNamespaces()


class PrefixCache:
    """Longest cached prefixes, pages for the rest, and attention over both.

    Thread-safe: one lock around every call.

    Attributes:
        spec, config, codec: geometry, options, formats.
        device, backend: where pages lie and which code reads them.
        pool, tree, storage: owners of pages; what is cached; the tensors.
        identify: says which model the KV is of, name to digest; snapshots of another are
            refused. `Engine` sets it (`radixkv.fingerprint`); by itself it says nothing.
    """

    def __init__(
        self,
        spec: KVSpec,
        kv: KVConfig | None = None,
        *,
        device: torch.device | str = "cpu",
        backend: str = "auto",
    ) -> None:
        if not isinstance(spec, KVSpec):
            raise TypeError(f"spec: expected a KVSpec, got {spec!r}; use KVSpec(num_layers=...)")
        if kv is not None and not isinstance(kv, KVConfig):
            raise TypeError(f"kv: expected a KVConfig, got {kv!r}; use KVConfig(dtype=...)")
        self.spec = spec
        self.config = KVConfig() if kv is None else kv
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        self.codec = KVCodec(spec, self.config)
        self.backend: Backend = get_backend(backend, self.device)
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
            self.pool = PagePool(num_pages)
            self.tree = RadixTree(self.page_size, self.pool, self.config.eviction)
            self.storage = PageStorage(self.codec, num_pages, self.device)
        except (MemoryError, RuntimeError) as error:  # of NumPy, of torch
            raise too_much from error
        self.storage.copier = self.backend.copy_pages
        self.lookups = self.lookup_tokens = self.hit_tokens = self.cow_copies = 0
        self._returned: deque[PageIds | Pin] = deque()
        self._leases: dict[int, weakref.ref[Lease]] = {}  # for check() and stats()
        self._pins: set[Pin] = set()
        self._timed_pins: list[tuple[float, int, Pin]] = []  # heap by time of expiry
        self._guard = _Guard((self._returned, self._timed_pins, self.tree.expiries), self._reclaim)
        self._ties = itertools.count()  # pins have no order
        self._pin_count = np.zeros(num_pages + 1, dtype=np.int32)
        self._num_pinned = 0
        self._now = time.monotonic
        self.identify: Callable[[], Mapping[str, str]] = dict

    def after_fork(self) -> None:
        """Free the lock, in a process whose fork() may have copied it held by another thread."""
        self._guard.lock = threading.RLock()
        self._guard.inside = False

    # --- leases ------------------------------------------------------------------------

    def acquire(self, token_ids: Any, *, namespace: Hashable = None, full: bool = False) -> Lease:
        """Take the longest cached prefix and pages for the rest; all or nothing.

        Args:
            token_ids: the sequence; a list or tuple of integers, or an integer array.
            namespace: what it is looked up and committed in.
            full: match the last token too; else at most ``len(token_ids) - 1`` are cached, so
                that there is one to run.
        Raises:
            ValueError, TypeError: no tokens, or some that are no ids.
            CapacityError: the rest does not fit, even after eviction, and after collecting
                Python's garbage, which may hold leases that nobody can reach.
        """
        try:
            return self.try_acquire(token_ids, namespace=namespace, full=full)
        except CapacityError:
            if not self.collect_garbage():
                raise
        return self.try_acquire(token_ids, namespace=namespace, full=full)

    def try_acquire(
        self, token_ids: Any, *, namespace: Hashable = None, full: bool = False
    ) -> Lease:
        """As `acquire`, for a caller who can wait: want of pages is said at once.

        Raises:
            ValueError, TypeError: no tokens, or some that are no ids.
            CapacityError: the rest does not fit, even after eviction.
        """
        if namespace is not None:
            require_namespace(namespace)
        tree = self.tree
        tokens = tree.encode(token_ids)
        num_tokens = tokens.size
        if not num_tokens:
            raise ValueError("token_ids: expected at least one token, got none")
        self._guard.enter()
        try:
            lookup = num_tokens if full else num_tokens - 1
            pages, num_cached, source = tree.acquire(tokens, lookup, namespace)
            if num_cached < 0:
                self._refuse_room("acquire", *tree.room)
            if source:
                fresh = pages.item(num_cached // self.page_size)
                if source != fresh:
                    try:
                        self.storage.copy_page(source, fresh, num_cached % self.page_size)
                    except BaseException:
                        self.pool.drop(pages)
                        raise
                    self.cow_copies += 1
            self.lookups += 1
            self.lookup_tokens += num_tokens
            self.hit_tokens += num_cached
            written = [num_cached] * self.spec.num_layers
            return Lease(self, tokens, pages, num_cached, namespace, written)
        finally:
            self._guard.leave()

    def collect_garbage(self) -> bool:
        """Collect Python's garbage, if leases are held; whether pages came free by it.

        A lease in a cycle that nobody can reach holds its pages until then. Takes as long as
        `gc.collect`, a tenth of a second beside a large library: for the moment before a caller
        is refused. Who asks again and again uses `try_acquire`.
        """
        before = self.num_available_pages
        if not self._leases:
            return False
        gc.collect()
        return self.num_available_pages > before

    def match(self, token_ids: Any, namespace: Hashable = None) -> int:
        """How many leading tokens are cached; changes nothing, not even the eviction order."""
        require_namespace(namespace)
        tokens = self.tree.encode(token_ids)
        with self._guard:
            return self.tree.match(tokens, namespace).num_tokens

    def pin(self, token_ids: Any, namespace: Hashable = None, *, ttl: float | None = None) -> Pin:
        """Keep what is cached of a prefix from eviction.

        Args:
            ttl: seconds after which it ends by itself; None is never.
        Raises:
            CapacityError: pins would hold more than ``KVConfig.pin_share`` of the pages.
        """
        require_namespace(namespace)
        tokens = self.tree.encode(token_ids)
        if ttl is not None:
            ttl = require_real("ttl", ttl, 0.0)
        with self._guard:
            found = self.tree.match(tokens, namespace)
            pages = found.page_ids
            more = int(np.count_nonzero(self._pin_count[pages] == 0))
            budget = int(self.config.pin_share * self.pool.num_pages)
            if self._num_pinned + more > budget:
                raise CapacityError(
                    f"pin: needs {more} more pages, {self._num_pinned} of {budget} are pinned "
                    f"(KVConfig.pin_share={self.config.pin_share}); unpin others or raise it"
                )
            self.pool.hold(pages)
            self._pin_count[pages] += 1
            self._num_pinned += more
            self.tree.touch(pages)
            expires = None if ttl is None else self._now() + ttl
            pin = Pin(self, pages, found.num_tokens, namespace)
            self._pins.add(pin)
            if expires is not None:
                heappush(self._timed_pins, (expires, next(self._ties), pin))
            return pin

    def evict(self, num_tokens: int) -> int:
        """Evict at least so many cached tokens, if there are; returns how many were."""
        num_tokens = require_int("num_tokens", num_tokens, 0)
        with self._guard:
            before = self.tree.num_tokens
            while before - self.tree.num_tokens < num_tokens:
                left = num_tokens - (before - self.tree.num_tokens)
                if not self.tree.evict(-(-left // self.page_size)):
                    break
            return before - self.tree.num_tokens

    def clear(self, namespace: Hashable = _ALL) -> None:
        """Forget a namespace, or everything; its pins end, leases keep their pages."""
        require_namespace(namespace)
        with self._guard:
            every = namespace is _ALL
            key = None if every else namespace_key(namespace)
            for pin in [p for p in self._pins if every or namespace_key(p.namespace) == key]:
                self._unpin(pin)
            roots = [root.namespace for root in self.tree.roots.values()]
            for name in roots if every else [namespace]:
                self.tree.clear(name)

    # --- KV ----------------------------------------------------------------------------

    def layer(self, layer: int) -> LayerPages:
        """The page and scale tensors of a layer; shapes as in `radixkv.quant`."""
        return self.storage.layer(self._require_layer(layer))

    def attend_batch(
        self,
        layer: int,
        q: Tensor,
        leases: Sequence[Lease],
        *,
        query_lens: Sequence[int] | None = None,
        softmax_scale: float | None = None,
        **rule: Any,
    ) -> Tensor:
        """Attend the last tokens of many sequences to their pages, in one call.

        Args:
            q: [tokens of all leases, num_q_heads, head_dim], in the order of ``leases``.
            query_lens: how many rows are each lease's; None is those that it last wrote.
        Returns:
            [same, num_q_heads, v_head_dim], q's dtype.
        Raises:
            ValueError: rows that do not add up, or tokens without KV in this layer.
        """
        layer_idx = self._require_layer(layer)
        _require_floats("q", q, self.device)
        spec = self.spec
        if (
            q.ndim != 3
            or q.shape[2] != spec.head_dim
            or q.shape[1] % spec.num_kv_heads
            or (not q.shape[1])
        ):
            raise ValueError(
                f"q: expected shape [tokens, a multiple of {spec.num_kv_heads} heads, "
                f"{spec.head_dim}], got {list(q.shape)}"
            )
        if query_lens is None:
            if len(leases) == 1:
                query_lens = [q.shape[0]]
            else:
                query_lens = [lease.num_tokens - lease._chunk_start for lease in leases]
        if not leases or len(query_lens) != len(leases) or sum(query_lens) != q.shape[0]:
            raise ValueError(
                f"q: expected {list(query_lens)} rows for {len(leases)} leases, got {q.shape[0]}; "
                f"say how many are whose with query_lens"
            )
        scale = self.spec.head_dim**-0.5
        if softmax_scale is not None:
            scale = require_real("softmax_scale", softmax_scale, -math.inf)
        with self._guard:
            for lease, rows in zip(leases, query_lens, strict=True):
                lease._require_open()
                if lease._cache is not self:
                    raise ValueError("leases: expected leases of this cache, got another's")
                if lease._written[layer_idx] < lease.num_tokens:
                    raise ValueError(
                        f"attend: {lease._written[layer_idx]} of {lease.num_tokens} tokens have "
                        f"KV in layer {layer_idx}; write() the rest, or mark_written() if "
                        f"they are there"
                    )
                if not 1 <= rows <= lease.num_tokens:
                    raise ValueError(
                        f"q: expected 1 to {lease.num_tokens} rows of a lease, got {rows}"
                    )
            if len(leases) == 1:
                known = leases[0]._batch
                if known is None or known[0] != query_lens[0]:
                    batch = self._attention_batch(leases, query_lens)
                    known = leases[0]._batch = (query_lens[0], batch)
                batch = known[1]
            else:
                batch = self._attention_batch(leases, query_lens)
            pages = self.storage.layer(layer_idx)
        return self.backend.paged_attention(
            self.codec, pages, q, batch, ScoreRule(softmax_scale=scale, **rule)
        )

    def _attention_batch(
        self, leases: Sequence[Lease], query_lens: Sequence[int]
    ) -> AttentionBatch:
        slots = [
            lease.slots(lease.num_tokens - rows)
            for lease, rows in zip(leases, query_lens, strict=True)
        ]
        seq_lens = np.array([lease.num_tokens for lease in leases], dtype=np.int64)
        starts = np.cumsum([0, *query_lens], dtype=np.int32)

        def on_device(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(self.device)

        page_ids = [lease.page_ids for lease in leases]
        table, runs = self.page_tables.lay_out(page_ids, (seq_lens - query_lens) // self.page_size)
        return AttentionBatch(
            slot_mapping=on_device(np.concatenate(slots)),
            page_table=on_device(table),
            seq_lens=on_device(seq_lens.astype(np.int32)),
            cu_seqlens_q=on_device(starts),
            runs=runs,
        )

    # --- snapshots ---------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        prefixes: Sequence[Any] | None = None,
        *,
        namespace: Hashable = _ALL,
        progress: bool = False,
    ) -> None:
        """Write what is cached to one file, which takes the place of ``path`` when it is whole.

        A crash at any moment leaves the old file or the new one. Other calls on the cache wait
        while pages are copied, not while the disk is waited for. The file holds the tokens as
        they are: whoever can read it can read the prompts.

        Args:
            path: docs/snapshot-format.md says what is in the file.
            prefixes: token id sequences: save only what begins with one of them, and what is
                cached of these themselves; None is everything.
            namespace: save only this one; None is a namespace too.
            progress: show a bar on standard error.
        Raises:
            SnapshotError: a namespace that is not None, a str, bytes, an int or a tuple of these.
            OSError: the file cannot be written; ``path`` is as it was.
        """
        wanted = None
        if prefixes is not None:
            wanted = [self.tree.encode(prefix, name="prefixes") for prefix in prefixes]
            if not all(tokens.size for tokens in wanted):
                raise ValueError("prefixes: expected at least one token in each, got none")
        if namespace is not _ALL:
            require_namespace(namespace)
        rows = snapshot.PageBytes(self.storage.pages)
        with snapshot.shown_progress("saving", progress) as tell, snapshot.replacing(path) as file:
            fingerprint = self.identify()
            with self._guard:
                every = snapshot.tree_namespaces(self.tree)
                names = every if namespace is _ALL else [namespace]
                saved, page_ids = snapshot.collect(
                    self.tree, namespaces=names, prefixes=wanted, now=self._now()
                )
                fills = saved.fills()
                snapshot.write(
                    file,
                    snapshot.layout_of(self.codec),
                    fingerprint,
                    saved,
                    lambda piece, out: rows.read(page_ids[piece], fills[piece], out),
                    tell,
                )

    def load(
        self, path: str | os.PathLike[str], *, salvage: bool = False, progress: bool = False
    ) -> snapshot.Loaded:
        """Add what a snapshot holds to what is cached, as far as pages are free.

        Nothing is evicted for it: what does not fit is left out, the least recently used first.
        What is loaded counts as used now, in the order in which it was. Other calls on the
        cache wait.

        Args:
            path: what `save` wrote; other processes may load it at the same time.
            salvage: of a damaged or shortened file, load what is whole, instead of raising. Its
                tree must be whole.
            progress: show a bar on standard error.
        Raises:
            SnapshotError: damaged, of another format version, of another model, geometry or KV
                format; the message names the difference, and the cache is as it was.
            FileNotFoundError, OSError: the file is not there, or cannot be read.
        """
        with (
            snapshot.shown_progress("loading", progress) as tell,
            snapshot.Snapshot(path, salvage=salvage) as file,
        ):
            where = str(file.path)
            layout = snapshot.layout_of(self.codec)
            snapshot.require_equal(where, "geometry or KV format", file.layout, layout)
            snapshot.require_equal(where, "model", file.fingerprint, self.identify())
            with self._guard:
                return snapshot.graft(
                    file,
                    self.tree,
                    self.pool,
                    snapshot.PageBytes(self.storage.pages).write,
                    eviction=self.config.eviction,
                    now=self._now(),
                    salvage=salvage,
                    tell=tell,
                )

    # --- looking -----------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        """Pages without an owner. O(1)."""
        with self._guard:
            return self.pool.num_free

    @property
    def num_available_pages(self) -> int:
        """Free pages and those that eviction can free. O(1)."""
        with self._guard:
            return self.pool.num_available

    def stats(self) -> CacheStats:
        """Counts of this moment. Complexity: O(pages), vectorized."""
        with self._guard:
            pool, total = self.pool, self.pool.num_pages
            owners, in_tree = pool.ref_count, pool.in_tree
            in_use = owners > 0
            pinned = int(np.count_nonzero(in_tree & (owners > 1)))
            private = in_use & ~in_tree
            num_private = int(np.count_nonzero(private))
            used = int(np.count_nonzero(in_use))
            stored = self.tree.num_tokens
            if num_private:
                stored += self._private_tokens(private)
            return CacheStats(
                capacity_bytes=total * self.codec.bytes_per_page,
                bytes_per_token=self.codec.bytes_per_token,
                pages_total=total,
                pages_free=total - used,
                pages_cached=used - pinned - num_private,
                pages_pinned=pinned,
                pages_private=num_private,
                lookups=self.lookups,
                lookup_tokens=self.lookup_tokens,
                hit_tokens=self.hit_tokens,
                hit_rate=self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0,
                evicted_pages=self.tree.evicted_pages,
                cow_copies=self.cow_copies,
                shared_bytes_saved=int((owners[in_use] - 1).sum()) * self.codec.bytes_per_page,
                nodes=self.tree.num_nodes,
                utilization=stored / (used * self.page_size) if used else 0.0,
                namespaces=self.tree.namespaces(),
            )

    def render(self, max_depth: int | None = None, tokenizer: Any = None) -> str:
        """The tree as text, a line a node: tokens, pages, uses, age, what holds it, content.

        Args:
            max_depth: edges below a namespace that are shown; None is all.
            tokenizer: shows text instead of token ids.
        """
        if max_depth is not None:
            max_depth = require_int("max_depth", max_depth, 1)
        with self._guard:
            return view.render(self.tree, max_depth, tokenizer, self._pin_count > 0, self._head())

    def to_html(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write the tree as one self-contained page for a browser.

        Args:
            path: the file; it is overwritten.
            tokenizer: shows text instead of token ids.
        """
        stats = asdict(self.stats())
        del stats["namespaces"]  # shown where their trees are
        with self._guard:
            page = view.to_html(self.tree, tokenizer, self._pin_count > 0, self._head(), stats)
        Path(path).write_text(page, encoding="utf-8")

    def explain(self, token_ids: Any, namespace: Hashable = None) -> view.Explanation:
        """Where and why the match of ``token_ids`` ends; changes nothing."""
        require_namespace(namespace)
        tokens = self.tree.encode(token_ids)
        with self._guard:
            return view.explain(self.tree, tokens, namespace)

    def _head(self) -> str:
        tree, pool = self.tree, self.pool
        used = pool.num_pages - pool.num_free
        return (
            f"{self.codec.k_format.name} cache: {tree.num_nodes:,} nodes, {tree.num_tokens:,} "
            f"tokens, {used:,} of {pool.num_pages:,} pages of {self.page_size} tokens in use"
        )

    def check(self) -> None:
        """Recount every page and node; raise CacheInvariantError if anything is wrong.

        Complexity: O(pages + tokens of leases).
        """
        with self._guard:
            self.tree.check()
            pool = self.pool
            owners = pool.in_tree.astype(np.int32)
            for lease in self._live_leases():
                size = -(-lease.num_tokens // self.page_size)
                if lease._num_pages != size:
                    self._broken(f"a lease of {size} pages lists {lease._num_pages}")
                np.add.at(owners, lease._pages[: lease._num_pages], 1)
            pins = np.zeros_like(owners)
            for pin in self._pins:
                np.add.at(pins, pin._pages, 1)
            owners += pins
            for page_id in pool.stand_ins().values():
                owners[page_id] += 1
            wrong = np.flatnonzero(owners != pool.ref_count)
            if wrong.size:
                page_id = int(wrong[0])
                self._broken(
                    f"page {page_id} has {owners[page_id]} owners, "
                    f"counted {pool.ref_count[page_id]}"
                )
            if (pins != self._pin_count).any() or np.count_nonzero(pins) != self._num_pinned:
                self._broken("the count of pinned pages")
            free = np.sort(pool.free_pages())
            if not (0 <= pool.num_free <= pool.num_pages):
                self._broken("the count of free pages")
            if not np.array_equal(free, np.flatnonzero(owners[1:] == 0) + 1):
                self._broken("the free list is not the pages without an owner")
            lone = int(np.count_nonzero(pool.in_tree & (owners == 1)))
            if lone != pool.num_evictable:
                self._broken(f"{lone} pages are evictable, counted {pool.num_evictable}")

    # --- inside ------------------------------------------------------------------------

    @staticmethod
    def _broken(what: str) -> None:
        raise CacheInvariantError(f"cache: {what}; this is a bug in radixkv")

    def _require_layer(self, layer: int) -> int:
        return require_int("layer", layer, 0, self.spec.num_layers - 1)

    def _require_room(self, count: int, name: str) -> None:
        """Raise CapacityError unless ``count`` pages are free or evictable."""
        if count > self.pool.num_available:
            self._refuse_room(name, count, self.pool.num_available)

    def _refuse_room(self, name: str, count: int, available: int) -> NoReturn:
        total = self.pool.num_pages
        raise CapacityError(
            f"{name}: needs {count} pages of {self.page_size} tokens, {available} of {total} are "
            f"free or evictable ({total - available} are held); release leases or pins, or raise "
            f"KVConfig.capacity"
        )

    def _allocate(self, count: int, name: str) -> PageIds:
        """Take pages, evicting if needed; nothing changes if they cannot be had."""
        missing = count - self.pool.num_free
        if missing > 0:
            self._require_room(count, name)
            self.tree.evict(missing)
        return self.pool.allocate(count)

    def _live_leases(self) -> list[Lease]:
        found = [reference() for reference in list(self._leases.values())]
        return [lease for lease in found if lease is not None]

    def _private_tokens(self, private: NDArray[np.bool_]) -> int:
        """Tokens in pages that leases alone own. Complexity: O(pages of leases)."""
        fill = np.zeros(self.pool.num_pages + 1, dtype=np.int64)
        for lease in self._live_leases():
            if lease._num_pages:
                last = lease._num_pages - 1
                tail = lease._pages[last]
                fill[lease._pages[:last]] = self.page_size
                fill[tail] = max(fill[tail], lease.num_tokens - last * self.page_size)
        for pin in self._pins:  # of a page that was superseded
            fill[pin._pages] = self.page_size
        return int(fill[private].sum())

    def _unpin(self, pin: Pin) -> None:
        if not pin._active:
            return
        pin._active = False
        self._pins.discard(pin)
        self._pin_count[pin._pages] -= 1
        self._num_pinned -= int(np.count_nonzero(self._pin_count[pin._pages] == 0))
        self.pool.drop(pin._pages)

    def _give_back(self, what: PageIds | Pin, lease_id: int = 0) -> None:
        """Take a pin or a lease's pages back, now or, inside a call of this thread, after it."""
        guard = self._guard
        guard.lock.acquire()
        try:
            self._leases.pop(lease_id, None)
            self._returned.append(what)
            if not guard.inside:
                guard.inside = True
                try:
                    self._reclaim()
                finally:
                    guard.inside = False
        finally:
            guard.lock.release()

    def _reclaim_if_idle(self) -> None:
        """`_reclaim`, unless another thread or a call of this one is in the middle of something."""
        guard = self._guard
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
                self._unpin(what)
            else:
                self.pool.drop(what)
        if self._timed_pins:
            now = self._now()
            while self._timed_pins and self._timed_pins[0][0] <= now:
                self._unpin(heappop(self._timed_pins)[2])
        if self.tree.expiries:
            self.tree.expire(self._now())
