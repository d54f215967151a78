"""The prefix cache: leases over the tree's pages, all or nothing.

A lease is one sequence's use of the cache: the pages of its tokens, of which the tree and
other leases may be owners too. A page with more than one owner is never written: it is
copied first. What is committed becomes findable; what is not is freed on release.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.layout import KVSpec, LayerPages
from radixkv.attention.plan import Backend
from radixkv.attention.shared_runs import PageTables
from radixkv.cache import snapshot, view
from radixkv.cache.core import CacheCore
from radixkv.cache.lease import Lease, attend_batch, require_layer
from radixkv.cache.pin import Pin
from radixkv.cache.stats import CacheStats
from radixkv.cache.tree import namespace_key
from radixkv.config import KVConfig, require_int, require_namespace, require_real
from radixkv.errors import CacheInvariantError, CapacityError
from radixkv.names import safe_repr


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
        self.core = core = CacheCore(spec, kv, device, backend)
        self.spec, self.config, self.codec = core.spec, core.config, core.codec
        self.device, self.on_host, self.page_size = core.device, core.on_host, core.page_size
        self.pool, self.tree, self.storage = core.pool, core.tree, core.storage
        self.identify = identify

    @property
    def backend(self) -> Backend:
        """Which code reads and writes the pages."""
        return self.core.backend

    @property
    def page_tables(self) -> PageTables:
        """The rows of page ids that batches are made of."""
        return self.core.page_tables

    @safe_repr
    def __repr__(self) -> str:
        # No lock: numbers of two moments may stand beside each other while another call runs.
        return (
            f"of {self.formats} KV on {self.device}, backend {self.backend.name}: "
            f"{self.usage}, {self.tree.num_tokens:,} tokens cached"
        )

    @property
    def formats(self) -> str:
        """The storage format of K, and of V if it has another: "int8", "int8/int4"."""
        names = self.codec.k_format.name, self.codec.v_format.name
        return "/".join(dict.fromkeys(names))

    @property
    def usage(self) -> str:
        """Pages in use of all there are, in words; takes no lock."""
        total = self.pool.num_pages
        return f"{total - self.pool.num_free:,} of {total:,} pages of {self.page_size} tokens used"

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
            if not self.core.collect_garbage():
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
        core, tree = self.core, self.tree
        tokens = tree.encode(token_ids)
        num_tokens = tokens.size
        if not num_tokens:
            raise ValueError("token_ids: expected at least one token, got none")
        self.core.guard.enter()
        try:
            lookup = num_tokens if full else num_tokens - 1
            pages, num_cached, source = tree.acquire(tokens, lookup, namespace)
            if num_cached < 0:
                self.core.refuse_room("acquire", *tree.room)
            if source:
                fresh = pages.item(num_cached // self.page_size)
                if source != fresh:
                    try:
                        self.storage.copy_page(source, fresh, num_cached % self.page_size)
                    except BaseException:
                        self.pool.drop(pages)
                        raise
                    self.core.cow_copies += 1
            self.core.lookups += 1
            self.core.lookup_tokens += num_tokens
            self.core.hit_tokens += num_cached
            written = [num_cached] * self.spec.num_layers
            return Lease(core, tokens, pages, num_cached, namespace, written)
        finally:
            self.core.guard.leave()

    def match(self, token_ids: Any, namespace: Hashable = None) -> int:
        """How many leading tokens are cached; changes nothing, not even the eviction order."""
        require_namespace(namespace)
        tokens = self.tree.encode(token_ids)
        with self.core.guard:
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
        with self.core.guard:
            found = self.tree.match(tokens, namespace)
            pin = Pin(self.core, found.page_ids, found.num_tokens, namespace)
            self.core.pins.add(pin, None if ttl is None else self.core.now() + ttl)
            self.tree.touch(found.page_ids)
            return pin

    def evict(self, num_tokens: int) -> int:
        """Evict at least so many cached tokens, if there are; returns how many were."""
        num_tokens = require_int("num_tokens", num_tokens, 0)
        with self.core.guard:
            before = self.tree.num_tokens
            while before - self.tree.num_tokens < num_tokens:
                left = num_tokens - (before - self.tree.num_tokens)
                if not self.tree.evict(-(-left // self.page_size)):
                    break
            return before - self.tree.num_tokens

    def clear(self, namespace: Hashable = _ALL) -> None:
        """Forget a namespace, or everything; its pins end, leases keep their pages."""
        require_namespace(namespace)
        with self.core.guard:
            every = namespace is _ALL
            key = None if every else namespace_key(namespace)
            for pin in [p for p in self.core.pins if every or namespace_key(p.namespace) == key]:
                self.core.pins.end(pin)
            roots = [root.namespace for root in self.tree.roots.values()]
            for name in roots if every else [namespace]:
                self.tree.clear(name)

    # --- KV ----------------------------------------------------------------------------

    def layer(self, layer: int) -> LayerPages:
        """The page and scale tensors of a layer; shapes as in `radixkv.attention.layout`."""
        return self.storage.layer(require_layer(self.core, layer))

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
        return attend_batch(
            self.core, layer, q, leases, query_lens=query_lens, softmax_scale=softmax_scale, **rule
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
            with self.core.guard:
                every = snapshot.tree_namespaces(self.tree)
                names = every if namespace is _ALL else [namespace]
                saved, page_ids = snapshot.collect(
                    self.tree, namespaces=names, prefixes=wanted, now=self.core.now()
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
            with self.core.guard:
                return snapshot.graft(
                    file,
                    self.tree,
                    self.pool,
                    snapshot.PageBytes(self.storage.pages).write,
                    eviction=self.config.eviction,
                    now=self.core.now(),
                    salvage=salvage,
                    tell=tell,
                )

    # --- looking -----------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        """Pages without an owner. O(1)."""
        with self.core.guard:
            return self.pool.num_free

    @property
    def num_available_pages(self) -> int:
        """Free pages and those that eviction can free. O(1)."""
        return self.core.num_available_pages

    def stats(self) -> CacheStats:
        """Counts of this moment. Complexity: O(pages), vectorized."""
        core = self.core
        with core.guard:
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
                lookups=core.lookups,
                lookup_tokens=core.lookup_tokens,
                hit_tokens=core.hit_tokens,
                hit_rate=core.hit_tokens / core.lookup_tokens if core.lookup_tokens else 0.0,
                evicted_pages=self.tree.evicted_pages,
                cow_copies=core.cow_copies,
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
        with self.core.guard:
            return view.render(
                self.tree, max_depth, tokenizer, self.core.pins.counts > 0, self._head()
            )

    def to_html(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write the tree as one self-contained page for a browser.

        Args:
            path: the file; it is overwritten.
            tokenizer: shows text instead of token ids.
        """
        stats = asdict(self.stats())
        del stats["namespaces"]  # shown where their trees are
        with self.core.guard:
            page = view.to_html(
                self.tree, tokenizer, self.core.pins.counts > 0, self._head(), stats
            )
        Path(path).write_text(page, encoding="utf-8")

    def explain(self, token_ids: Any, namespace: Hashable = None) -> view.Explanation:
        """Where and why the match of ``token_ids`` ends; changes nothing."""
        require_namespace(namespace)
        tokens = self.tree.encode(token_ids)
        with self.core.guard:
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
        known = self.core.pins
        with self.core.guard:
            self.tree.check()
            pool = self.pool
            owners = pool.in_tree.astype(np.int32)
            for lease in self._live_leases():
                size = -(-lease.num_tokens // self.page_size)
                if lease._num_pages != size:
                    self._broken(f"a lease of {size} pages lists {lease._num_pages}")
                np.add.at(owners, lease._pages[: lease._num_pages], 1)
            pins = np.zeros_like(owners)
            for pin in known:
                np.add.at(pins, pin.page_ids, 1)
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
            if (pins != known.counts).any() or np.count_nonzero(pins) != known.num_pages:
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

    def _live_leases(self) -> list[Lease]:
        found = [reference() for reference in list(self.core.leases.values())]
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
        for pin in self.core.pins:  # of a page that was superseded
            fill[pin.page_ids] = self.page_size
        return int(fill[private].sum())


__all__ = ["CacheStats", "Lease", "Pin", "PrefixCache"]
