"""A prefix cache and a brute-force model of it, driven side by side.

The model knows nothing of edges, bytes, heaps or free lists: it is a table of cached pages by
the tokens that lead to them, searched from end to end for every question. It predicts every
match, every page that a lease shares, every reference count, which page an eviction takes and
when a call must fail; `World.verify` compares all of it, and what is stored in the pages.

K of a token is (token, position), V is a number made from namespace and all tokens up to it:
a wrong page, a stale page or a page of another namespace is seen at once.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from fuzz.mirror import compare, mirrored_cache
from radixkv.attention.layout import KVSpec
from radixkv.cache.lease import Lease
from radixkv.cache.pin import Pin
from radixkv.cache.prefix_cache import _ALL, PrefixCache
from radixkv.cache.tree import EXPIRED
from radixkv.config import KVConfig
from radixkv.errors import CapacityError

NUM_LAYERS = 2
SPEC = KVSpec(num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=2, v_head_dim=1)
Tokens = tuple[int, ...]


def value_of(namespace: object, prefix: Tokens) -> tuple[float, float, float]:
    """K and V of the last token of ``prefix``: token, position, digest of all of it."""
    digest = zlib.crc32(repr((namespace, prefix)).encode()) % 2**20
    return float(prefix[-1]), float(len(prefix) - 1), float(digest)


@dataclass(eq=False)
class Page:
    """A page of the model: its id in the real cache and what each slot and layer holds."""

    page_id: int
    content: list[list[tuple[float, float, float] | None]]
    stands_for: Page | None = None


@dataclass(eq=False)
class Cached:
    """A page of the model's tree, with what the eviction policies look at."""

    page: Page
    last_access: int = 0
    num_hits: int = 0
    priority: int = 0
    expires: float | None = None

    def like(self, page: Page) -> Cached:
        return Cached(page, self.last_access, self.num_hits, self.priority, self.expires)


@dataclass(eq=False)
class Held:
    """A lease of the model, beside the real one."""

    lease: Lease
    namespace: object
    tokens: Tokens
    pages: list[Page]
    num_cached: int
    written: list[int]


@dataclass(eq=False)
class Pinned:
    """A pin of the model, beside the real one."""

    pin: Pin
    namespace: object
    pages: list[Page]
    expires: float | None


@dataclass(frozen=True)
class Found:
    """A match of the model: keys of whole pages, the key of the page it ends in, tokens."""

    path: list[Tokens]
    partial: Tokens | None
    num_tokens: int


@dataclass
class World:
    """The real cache, its model, and the operations on both."""

    page_size: int = 4
    num_pages: int = 8
    eviction: str = "lru"
    pin_share: float = 0.5
    twins: bool = False  # the plain tree beside the compiled one
    now: float = 0.0
    leases: list[Held] = field(default_factory=list)
    pins: list[Pinned] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        page_bytes = 4 * 3 * NUM_LAYERS * self.page_size
        config = KVConfig(
            dtype="model",
            page_size=self.page_size,
            capacity=page_bytes * self.num_pages + page_bytes // 2,
            eviction=self.eviction,
            pin_share=self.pin_share,
        )
        # With a twin every call is made on both, and they answer alike to the page id.
        self.cache = (
            mirrored_cache(SPEC, config)
            if self.twins
            else PrefixCache(SPEC, config, backend="torch")
        )
        self.cache.core.now = lambda: self.now
        # A collection takes as long as a thousand steps, and many steps are refused.
        collect, num_refused = self.cache.core.collect_garbage, itertools.count(1)
        self.cache.core.collect_garbage = lambda: next(num_refused) % 1000 == 0 and collect()  # type: ignore[method-assign]
        self.tree: dict[object, dict[Tokens, Cached]] = {}
        self.clock = 0
        self.counts = dict.fromkeys(("lookups", "lookup_tokens", "hit_tokens", "evicted", "cow"), 0)

    # --- the model's questions ---------------------------------------------------------

    def _children(self, namespace: object, border: Tokens) -> list[Tokens]:
        low, high = len(border), len(border) + self.page_size
        return [
            key
            for key in self.tree.get(namespace, {})
            if low < len(key) <= high and key[:low] == border
        ]

    def _find(self, namespace: object, query: Tokens) -> Found:
        border: Tokens = ()
        path: list[Tokens] = []
        while len(border) < len(query):
            want = query[: len(border) + self.page_size]
            children = self._children(namespace, border)
            if want in children and len(want) == len(border) + self.page_size:
                path.append(want)
                border = want
                continue
            best = max((_shared(key, want) for key in children), default=0)
            if best <= len(border):
                break
            close = sorted(key for key in children if _shared(key, want) == best)
            below = [key for key in close if key < want]
            return Found(path, below[-1] if below else close[0], best)
        return Found(path, None, len(border))

    def longest(self, namespace: object, query: Tokens) -> int:
        """The longest common prefix with anything cached: what every match must equal."""
        return max((_shared(key, query) for key in self.tree.get(namespace, {})), default=0)

    def _owners(self, extra: list[Page] | None = None) -> dict[Page, int]:
        owners: dict[Page, int] = {}
        every = [held.pages for held in self.leases] + [pin.pages for pin in self.pins]
        every.append([cached.page for table in self.tree.values() for cached in table.values()])
        every.append(extra or [])
        for page in itertools.chain.from_iterable(every):
            owners[page] = owners.get(page, 0) + 1
        todo = list(owners)
        while todo:
            page = todo.pop()
            if page.stands_for is not None:
                if page.stands_for not in owners:
                    todo.append(page.stands_for)
                owners[page.stands_for] = owners.get(page.stands_for, 0) + 1
        return owners

    def _key(self, cached: Cached) -> tuple[int, int]:
        first = {
            "lru": cached.last_access,
            "lfu": cached.num_hits,
            "priority": cached.priority,
        }[self.eviction]
        return (first, cached.last_access)

    def _evictable(self, owners: dict[Page, int]) -> int:
        pages = [cached.page for table in self.tree.values() for cached in table.values()]
        return sum(owners[page] == 1 for page in pages)

    # --- the model's changes -----------------------------------------------------------

    def _evict(self, num_pages: int, extra: list[Page] | None = None) -> int:
        freed = 0
        while freed < num_pages:
            owners = self._owners(extra)
            tails = [
                (self._key(cached), namespace, key)
                for namespace, table in self.tree.items()
                for key, cached in table.items()
                if owners[cached.page] == 1 and not self._children(namespace, key)
            ]
            if not tails:
                break
            _, namespace, key = min(tails, key=lambda tail: tail[0])
            del self.tree[namespace][key]
            freed += 1
        self.counts["evicted"] += freed
        return freed

    def _room(self, need: int, extra: list[Page] | None = None) -> bool:
        """Whether ``need`` pages can be had; evicts for them if so."""
        owners = self._owners(extra)
        free = self.num_pages - len(owners)
        if need > free + self._evictable(owners):
            return False
        self._evict(need - free, extra)
        return True

    def _new_page(self, page_id: int, source: Page | None = None, num_tokens: int = 0) -> Page:
        content: list[list[tuple[float, float, float] | None]] = [
            [None] * self.page_size for _ in range(NUM_LAYERS)
        ]
        if source is not None:
            self.counts["cow"] += source.page_id != page_id
            for mine, theirs in zip(content, source.content, strict=True):
                mine[:num_tokens] = theirs[:num_tokens]
        return Page(page_id, content)

    def _touch(
        self,
        namespace: object,
        query: Tokens,
        priority: int | None = None,
        expires: float | None = None,
    ) -> None:
        found = self._find(namespace, query)
        keys = found.path + ([found.partial] if found.partial is not None else [])
        if not keys:
            return
        self.clock += 1
        for key in keys:
            cached = self.tree[namespace][key]
            cached.last_access = self.clock
            cached.num_hits += 1
            if priority is not None and priority >= cached.priority:
                cached.priority, cached.expires = priority, expires

    # --- operations --------------------------------------------------------------------

    def acquire(self, namespace: object, tokens: Tokens, full: bool = False) -> Held | None:
        query = tokens if full else tokens[:-1]
        found = self._find(namespace, query)
        table = self.tree.get(namespace, {})
        shared = [table[key].page for key in found.path]
        source = table[found.partial].page if found.partial is not None else None
        num_pages = -(-len(tokens) // self.page_size)
        need = num_pages - len(shared)
        owners = self._owners(shared)
        if need > self.num_pages - len(owners) + self._evictable(owners):
            self._must_fail(lambda: self.cache.acquire(tokens, namespace=namespace, full=full))
            return None
        lease = self.cache.acquire(list(tokens), namespace=namespace, full=full)
        self._touch(namespace, query)
        assert self._room(need, shared)
        page_ids = lease.page_ids.tolist()
        pages = list(shared)
        for i in range(len(shared), num_pages):
            first = i == len(shared)
            pages.append(
                self._new_page(
                    page_ids[i], source if first else None, found.num_tokens % self.page_size
                )
            )
        self.counts["lookups"] += 1
        self.counts["lookup_tokens"] += len(tokens)
        self.counts["hit_tokens"] += found.num_tokens
        written = [found.num_tokens] * NUM_LAYERS
        held = Held(lease, namespace, tokens, pages, found.num_tokens, written)
        self.leases.append(held)
        return held

    def _own(self, held: Held, start: int) -> list[int] | None:
        """Indices of pages that must be copied before tokens from ``start`` are written."""
        owners = self._owners()
        first = start // self.page_size if start < len(held.tokens) else len(held.pages)
        shared = [i for i in range(first, len(held.pages)) if owners[held.pages[i]] > 1]
        return shared if self._room(len(shared)) else None

    def _copied(self, held: Held, indices: list[int]) -> None:
        page_ids = held.lease.page_ids.tolist()
        for i in indices:
            count = min(self.page_size, len(held.tokens) - i * self.page_size)
            held.pages[i] = self._new_page(page_ids[i], held.pages[i], count)

    def _store(self, held: Held, layer: int) -> None:
        for position in range(held.written[layer], len(held.tokens)):
            page = held.pages[position // self.page_size]
            page.content[layer][position % self.page_size] = value_of(
                held.namespace, held.tokens[: position + 1]
            )
        held.written[layer] = len(held.tokens)

    def _rows(self, held: Held, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [
            value_of(held.namespace, held.tokens[: i + 1])
            for i in range(held.written[layer], len(held.tokens))
        ]
        values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 1, 3)
        return values[..., :2], values[..., 2:]

    def write(self, held: Held, layer: int) -> None:
        """Write what has no KV in one layer."""
        if held.written[layer] == len(held.tokens):
            return
        shared = self._own(held, held.written[layer])
        k, v = self._rows(held, layer)
        if shared is None:
            self._must_fail(lambda: held.lease.write(layer, k, v))
            return
        held.lease.write(layer, k, v)
        self._copied(held, shared)
        self._store(held, layer)

    def write_slots(self, held: Held) -> None:
        """Write what has no KV as a caller with kernels of its own does."""
        start = min(held.written)
        shared = self._own(held, start)
        if shared is None:
            self._must_fail(lambda: held.lease.slot_mapping)
            return
        slots = held.lease.slot_mapping
        self._copied(held, shared)
        for layer in range(NUM_LAYERS):
            held.written[layer] = start
            k, v = self._rows(held, layer)
            pages = self.cache.layer(layer)
            pages.k_pages[slots // self.page_size, :, slots % self.page_size] = k
            pages.v_pages[slots // self.page_size, :, slots % self.page_size] = v
            self._store(held, layer)
        held.lease.mark_written()

    def extend(self, held: Held, tokens: Tokens) -> None:
        old, new = len(held.tokens), len(held.tokens) + len(tokens)
        more = -(-new // self.page_size) - len(held.pages)
        copies = bool(tokens and old % self.page_size and self._owners()[held.pages[-1]] > 1)
        if not self._room(more + copies):
            self._must_fail(lambda: held.lease.extend(tokens))
            return
        held.lease.extend(np.array(tokens, dtype=np.int64))
        if copies:
            self._copied(held, [len(held.pages) - 1])
        held.tokens += tokens
        page_ids = held.lease.page_ids.tolist()
        held.pages += [self._new_page(page_id) for page_id in page_ids[len(held.pages) :]]

    def fork(self, held: Held) -> None:
        self.leases.append(
            Held(
                held.lease.fork(),
                held.namespace,
                held.tokens,
                list(held.pages),
                held.num_cached,
                list(held.written),
            )
        )

    def truncate(self, held: Held, num_tokens: int) -> None:
        held.lease.truncate(num_tokens)
        held.tokens = held.tokens[:num_tokens]
        held.pages = held.pages[: -(-num_tokens // self.page_size)]
        held.num_cached = min(num_tokens, held.num_cached)
        held.written = [min(num_tokens, written) for written in held.written]

    def commit(
        self,
        held: Held,
        num_tokens: int | None = None,
        priority: int | None = None,
        ttl: float | None = None,
    ) -> None:
        """Commit what is written, or its first ``num_tokens``."""
        if num_tokens is not None:
            num_tokens = min(num_tokens, min(held.written))
        held.lease.commit(num_tokens, priority=priority, ttl=ttl)
        count = min(held.written) if num_tokens is None else num_tokens
        if not count:
            return
        table = self.tree.setdefault(held.namespace, {})
        sequence = held.tokens[:count]
        for i in range(-(-count // self.page_size)):
            border = sequence[: i * self.page_size]
            key = sequence[: (i + 1) * self.page_size]
            mine = held.pages[i]
            found = self._find(held.namespace, key)
            if found.num_tokens == len(key):
                last = found.path[-1] if found.partial is None else found.partial
                theirs = table[last].page
                in_part = count < len(held.tokens) and len(key) % self.page_size
                cached = any(mine is other.page for other in table.values())
                if theirs is not mine and not in_part and not cached:
                    if self._owners()[mine] > 1:
                        mine.stands_for = theirs
                    held.pages[i] = theirs
                continue
            mine.stands_for = None  # it becomes the tree's own page
            prefixes = [k for k in self._children(held.namespace, border) if key[: len(k)] == k]
            if prefixes:
                old = table.pop(prefixes[0])
                table[key] = old.like(mine)
                if old.page is not mine and old.page in self._owners():
                    old.page.stands_for = mine
            else:
                table[key] = Cached(mine)
        self._touch(held.namespace, sequence, priority, None if ttl is None else self.now + ttl)

    def release(self, held: Held) -> None:
        held.lease.release()
        held.lease.release()
        self.leases.remove(held)

    def abandon(self, held: Held) -> None:
        """Drop a lease without releasing it; it must warn, and its pages come back."""
        self.leases.remove(held)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del held.lease
            if not caught:
                gc.collect()
        assert {w.category for w in caught} == {ResourceWarning}, caught

    def pin(self, namespace: object, tokens: Tokens, ttl: float | None = None) -> None:
        found = self._find(namespace, tokens)
        keys = found.path + ([found.partial] if found.partial is not None else [])
        pages = [self.tree[namespace][key].page for key in keys]
        pinned = {page for pin in self.pins for page in pin.pages}
        if len(pinned | set(pages)) > int(self.pin_share * self.num_pages) and set(pages) - pinned:
            self._must_fail(lambda: self.cache.pin(tokens, namespace, ttl=ttl))
            return
        pin = self.cache.pin(tokens, namespace, ttl=ttl)
        assert pin.num_tokens == found.num_tokens
        self._touch(namespace, tokens)
        expires = None if ttl is None else self.now + ttl
        self.pins.append(Pinned(pin, namespace, pages, expires))

    def unpin(self, pinned: Pinned) -> None:
        pinned.pin.unpin()
        pinned.pin.unpin()
        self.pins.remove(pinned)

    def advance(self, seconds: float) -> None:
        """Let time pass: pins end, priorities fall."""
        self.now += seconds
        self.pins = [p for p in self.pins if p.expires is None or p.expires > self.now]
        for table in self.tree.values():
            for cached in table.values():
                if cached.expires is not None and cached.expires <= self.now:
                    cached.priority, cached.expires = EXPIRED, None

    def evict(self, num_tokens: int) -> None:
        before = left = sum(self._fills())
        while before - left < num_tokens:
            if not self._evict(-(-(num_tokens - before + left) // self.page_size)):
                break
            left = sum(self._fills())
        assert self.cache.evict(num_tokens) == before - left

    def _fills(self) -> list[int]:
        return [
            (len(key) - 1) % self.page_size + 1 for table in self.tree.values() for key in table
        ]

    def clear(self, namespace: object = _ALL) -> None:
        self.cache.clear(namespace)
        every = namespace is _ALL
        self.pins = [p for p in self.pins if not (every or p.namespace == namespace)]
        for name in [n for n in self.tree if every or n == namespace]:
            del self.tree[name]

    def match(self, namespace: object, tokens: Tokens) -> None:
        found, expected = self.cache.match(tokens, namespace), self.longest(namespace, tokens)
        assert found == expected, f"match: {found}, longest common prefix: {expected}"

    def _must_fail(self, call: object) -> None:
        assert callable(call)
        evicted = self.cache.stats().evicted_pages
        try:
            call()
        except CapacityError:
            assert self.cache.stats().evicted_pages == evicted
            return
        raise AssertionError("expected CapacityError")

    # --- the comparison ----------------------------------------------------------------

    def verify(self) -> None:
        """Compare everything that the cache holds with the model."""
        self.steps += 1
        cache, pool = self.cache, self.cache.pool
        compare(cache)
        assert self._dump() == {
            (namespace, key): (cached.page.page_id, self._key(cached), cached.expires)
            for namespace, table in self.tree.items()
            for key, cached in table.items()
        }
        owners = self._owners()
        real = {i: n for i, n in enumerate(pool.ref_count.tolist()) if n}
        assert real == {page.page_id: n for page, n in owners.items()}
        in_tree = {cached.page for table in self.tree.values() for cached in table.values()}
        ids: list[int] = []
        expected: list[tuple[float, ...]] = []

        def expect(page: Page, values: list[tuple[float, float, float]], layer: int) -> None:
            base = (layer * (self.num_pages + 1) + page.page_id) * self.page_size
            ids.extend(range(base, base + len(values)))
            expected.extend(values)
            assert page.content[layer][: len(values)] == values

        for namespace, table in self.tree.items():
            for key, cached in table.items():
                start = (len(key) - 1) // self.page_size * self.page_size
                values = [value_of(namespace, key[: i + 1]) for i in range(start, len(key))]
                for layer in range(NUM_LAYERS):
                    expect(cached.page, values, layer)
        for held in self.leases:
            lease = held.lease
            assert tuple(lease.token_ids.tolist()) == held.tokens
            assert lease.num_tokens == len(held.tokens)
            assert lease.num_cached == held.num_cached
            assert lease.page_ids.tolist() == [page.page_id for page in held.pages]
            assert lease.num_written == min(held.written)
            slots = [
                held.pages[i // self.page_size].page_id * self.page_size + i % self.page_size
                for i in range(len(held.tokens))
            ]
            assert lease.slots().tolist() == slots
            for layer, written in enumerate(held.written):
                for i in range(-(-written // self.page_size)):
                    low, high = i * self.page_size, min(written, (i + 1) * self.page_size)
                    values = [
                        value_of(held.namespace, held.tokens[: j + 1]) for j in range(low, high)
                    ]
                    expect(held.pages[i], values, layer)
        if ids:
            k = cache.storage.pages.k_pages.reshape(-1, 2)[ids]
            v = cache.storage.pages.v_pages.reshape(-1, 1)[ids]
            stored = torch.cat([k, v], dim=1)
            assert torch.equal(stored, torch.tensor(expected, dtype=torch.float32))
        self._verify_stats(owners, in_tree)

    def _verify_stats(self, owners: dict[Page, int], in_tree: set[Page]) -> None:
        """Compare what the cache counts with the model."""
        cache = self.cache
        stats = cache.stats()
        pinned = sum(owners[page] > 1 for page in in_tree)
        assert stats.pages_total == self.num_pages
        assert stats.pages_free == self.num_pages - len(owners) == cache.num_free_pages
        assert stats.pages_pinned == pinned
        assert stats.pages_cached == len(in_tree) - pinned
        assert stats.pages_private == len(owners) - len(in_tree)
        assert cache.num_available_pages == stats.pages_free + stats.pages_cached
        fills = sum(self._fills())
        for page in owners.keys() - in_tree:
            tails = [
                min(self.page_size, len(held.tokens) - held.pages.index(page) * self.page_size)
                for held in self.leases
                if page in held.pages
            ]
            if any(page in pinned.pages for pinned in self.pins):
                tails.append(self.page_size)
            fills += max(tails, default=0)
        assert stats.utilization == (fills / (len(owners) * self.page_size) if owners else 0.0)
        assert sorted((repr(n.namespace), n.pages, n.tokens) for n in stats.namespaces) == sorted(
            (repr(name), len(table), sum((len(key) - 1) % self.page_size + 1 for key in table))
            for name, table in self.tree.items()
            if table
        )
        assert stats.lookups == self.counts["lookups"]
        assert stats.lookup_tokens == self.counts["lookup_tokens"]
        assert stats.hit_tokens == self.counts["hit_tokens"]
        assert stats.evicted_pages == self.counts["evicted"]
        assert stats.cow_copies == self.counts["cow"]
        assert [p.pin.is_active for p in self.pins] == [True] * len(self.pins)

    def _dump(self) -> dict[tuple[object, Tokens], tuple[int, tuple[int, int], float | None]]:
        """The real tree, page by page."""
        out: dict[tuple[object, Tokens], tuple[int, tuple[int, int], float | None]] = {}
        tree = self.cache.tree
        for root in tree.roots.values():
            stack: list[tuple[int, Tokens]] = [(root.last_page, ())]
            while stack:
                row, before = stack.pop()
                for page_id in tree.child_pages(row):
                    prefix = before + tuple(tree.tokens_of(page_id).tolist())
                    out[root.namespace, prefix] = (
                        page_id,
                        tree.policy_key(page_id),
                        tree.expires_of(page_id),
                    )
                    stack.append((page_id, prefix))
        return out

    def close(self) -> None:
        """Give everything back; nothing may be left."""
        for held in list(self.leases):
            self.release(held)
        for pinned in list(self.pins):
            self.unpin(pinned)
        self.verify()
        self.evict(10**6)
        self.verify()
        assert self.cache.num_free_pages == self.num_pages
        self.clear()


def _shared(a: Tokens, b: Tokens) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
