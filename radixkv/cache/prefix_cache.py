"""The prefix cache: leases over the tree's pages, all or nothing.

A lease is one sequence's use of the cache: the pages of its tokens, of which the tree and
other leases may be owners too. A page with more than one owner is never written: it is
copied first. What is committed becomes findable; what is not is freed on release.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, fields
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.backend import get_backend
from radixkv.attention.batch import AttentionBatch, ScoreRule
from radixkv.attention.layout import KVCodec, KVSpec, LayerPages
from radixkv.attention.plan import Backend, StepPlan
from radixkv.attention.shared_runs import PageTables
from radixkv.cache import snapshot, view
from radixkv.cache.guard import Guard
from radixkv.cache.lease import Lease, Pin, require_floats
from radixkv.cache.pool import (
    PageIds,
    PageStorage,
    capacity_pages,
    free_device_bytes,
    total_device_bytes,
)
from radixkv.cache.stats import CacheStats
from radixkv.cache.tree import namespace_key
from radixkv.cache.tree_choice import make_tree
from radixkv.config import KVConfig, parse_bytes, require_int, require_namespace, require_real
from radixkv.errors import CacheInvariantError, CapacityError

_RULE_FIELDS = {field.name for field in fields(ScoreRule)} - {"softmax_scale"}
_DEFAULT_CAPACITY_SHARE = 4  # capacity=None: a quarter of the free memory


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
            refused. An engine's cache has `radixkv.models.fingerprint`; by itself it says
            nothing.
    """

    def __init__(
        self,
        spec: KVSpec,
        kv: KVConfig | None = None,
        *,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        identify: Callable[[], Mapping[str, str]] = dict,
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
        self._leases: dict[int, weakref.ref[Lease]] = {}  # for check() and stats()
        self._pins: set[Pin] = set()
        self._timed_pins: list[tuple[float, int, Pin]] = []  # heap by time of expiry
        self._guard = Guard((self._returned, self._timed_pins, self.tree.expiries), self._reclaim)
        self._ties = itertools.count()  # pins have no order
        self._pin_count = np.zeros(num_pages + 1, dtype=np.int32)
        self._num_pinned = 0
        self._now = time.monotonic
        self.identify = identify

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
        """The page and scale tensors of a layer; shapes as in `radixkv.attention.layout`."""
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
            ValueError, TypeError: rows that do not add up, tokens without KV in this layer, a
                field of the rule that can't be; nothing has run.
        """
        layer_idx = self._require_layer(layer)
        if softmax_scale is None:
            softmax_scale = self.spec.head_dim**-0.5
        unknown = rule.keys() - _RULE_FIELDS
        if unknown:
            raise TypeError(
                f"attend: expected fields of ScoreRule ({', '.join(sorted(_RULE_FIELDS))}), got "
                f"{', '.join(sorted(unknown))}; remove or rename them"
            )
        score_rule = ScoreRule(softmax_scale=softmax_scale, **rule)
        require_floats("q", q, self.device)
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
        score_rule.require_heads(q.shape[1], q.device)
        for lease in leases:
            if not isinstance(lease, Lease):
                raise TypeError(f"leases: expected leases, got {lease!r}; use cache.acquire()")
        if query_lens is not None:
            query_lens = [require_int("query_lens", rows, 0) for rows in query_lens]
        elif len(leases) == 1:
            query_lens = [q.shape[0]]
        else:
            query_lens = [lease.num_tokens - lease._chunk_start for lease in leases]
        if not leases or len(query_lens) != len(leases) or sum(query_lens) != q.shape[0]:
            raise ValueError(
                f"q: expected {list(query_lens)} rows for {len(leases)} leases, got {q.shape[0]}; "
                f"say how many are whose with query_lens"
            )
        with self._guard:
            self._require_readable(layer_idx, leases, query_lens)
            plan = self._plan_of(leases, query_lens)
            pages = self.storage.layer(layer_idx)
        return plan.attend(pages, q, score_rule)

    def _require_readable(
        self, layer_idx: int, leases: Sequence[Lease], query_lens: Sequence[int]
    ) -> None:
        """Raise unless the last so many tokens of each lease can attend in this layer."""
        for lease, rows in zip(leases, query_lens, strict=True):
            lease._require_open()
            if lease._cache is not self:
                raise ValueError("leases: expected leases of this cache, got another's")
            if lease._written[layer_idx] < lease.num_tokens:
                raise ValueError(
                    f"attend: {lease._written[layer_idx]} of {lease.num_tokens} tokens have KV in "
                    f"layer {layer_idx}; write() the rest, or mark_written() if they are there"
                )
            if not 1 <= rows <= lease.num_tokens:
                raise ValueError(f"q: expected 1 to {lease.num_tokens} rows of a lease, got {rows}")

    def _plan_of(self, leases: Sequence[Lease], query_lens: Sequence[int]) -> StepPlan:
        """One plan for all layers of a step; a single lease keeps its own until it changes."""
        if len(leases) > 1:
            return self.backend.plan(self._attention_batch(leases, query_lens))
        lease, rows = leases[0], query_lens[0]
        known = lease._plan
        if known is None or known[0] != rows:
            plan = self.backend.plan(self._attention_batch(leases, query_lens))
            known = lease._plan = (rows, plan)
        return known[1]

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
            known_lens=(seq_lens.tolist(), starts.tolist()),
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


__all__ = ["CacheStats", "Lease", "Pin", "PrefixCache"]
