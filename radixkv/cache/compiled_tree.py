"""The tree and its pages as rows of integer arrays, on which compiled functions work.

Every page is a row in the arrays of a `CompiledPool`; the work on them is in
``kernels/tree.py``, compiled by Numba. Here is what surrounds it: ids of namespaces, times as
bits, and what a caller wants to know of the arrays. The same structure, to be read, is
`radixkv.cache.plain_tree`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Hashable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.pool import PagePool
from radixkv.cache.tree import (
    Match,
    NamespaceStats,
    Node,
    PageIds,
    RadixTree,
    Root,
    Tokens,
    encode_tokens,
    namespace_key,
    require,
)

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_FIRST_ROOTS = 16  # rows for roots of namespaces; they double as more are needed


def _bits(seconds: float) -> int:
    return int(struct.unpack("q", struct.pack("d", seconds))[0])


def _seconds(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


class CompiledPool(PagePool):
    """Reference counts, the free list and the order of eviction, as arrays.

    The arrays, and what their columns mean, are those of ``kernels/tree.py``: a row for each
    page, then rows for the roots of the tree's namespaces.

    Attributes:
        kernel: the functions that work on the arrays.
        counts, links, keys, tokens, queues: the arrays; ``tokens`` is the tree's.
        arrays: the same, as the kernel takes them.
    """

    def __init__(self, num_pages: int, kernel: ModuleType) -> None:
        super().__init__(num_pages)
        self.kernel = kernel
        # Fresh zeros: the operating system commits memory only as pages are used.
        self.counts = np.zeros(kernel.NOTED + kernel.NUM_NOTED, dtype=np.int64)
        self.links = np.zeros((num_pages + 1 + _FIRST_ROOTS, kernel.NUM_LINKS), dtype=np.int32)
        self.keys = np.zeros((num_pages + 1 + _FIRST_ROOTS, kernel.NUM_KEYS), dtype=np.int64)
        self.tokens = np.zeros(0, dtype=np.int32)
        self.queues = np.zeros((2, num_pages + 2), dtype=np.int32)
        self.counts[kernel.NUM_PAGES] = self.counts[kernel.NUM_FREE] = num_pages
        # A stack with the lowest id on top, so that memory is touched only as pages are used.
        self.queues[kernel.FREE, :num_pages] = np.arange(num_pages, 0, -1)
        self._free_roots = list(range(num_pages + _FIRST_ROOTS, num_pages, -1))
        self.hand_over()

    def hand_over(self) -> None:
        """Give the kernel the arrays, after one was replaced."""
        self.arrays = (self.counts, self.links, self.keys, self.tokens, self.queues)

    @property
    def num_free(self) -> int:
        return int(self.counts[self.kernel.NUM_FREE])

    @property
    def num_evictable(self) -> int:
        return int(self.counts[self.kernel.NUM_EVICTABLE])

    def _take(self, count: int) -> PageIds:
        page_ids = np.empty(count, dtype=np.int64)
        self.kernel.allocate(*self.arrays, page_ids, count)
        return page_ids

    def hold(self, page_ids: PageIds) -> None:
        self.kernel.hold(*self.arrays, page_ids, page_ids.size)

    def drop(self, page_ids: PageIds) -> None:
        self.kernel.drop(*self.arrays, page_ids, page_ids.size)

    def count(self, page_id: int) -> int:
        kernel = self.kernel
        return int(self.links.item(page_id, kernel.STATE) & kernel.OWNERS)

    def counts_of(self, page_ids: PageIds) -> NDArray[np.int32]:
        owners: NDArray[np.int32] = self.links[page_ids, self.kernel.STATE] & self.kernel.OWNERS
        return owners

    @property
    def ref_count(self) -> NDArray[np.int32]:
        state = self.links[: self.num_pages + 1, self.kernel.STATE]
        return np.asarray(state & self.kernel.OWNERS)

    @property
    def in_tree(self) -> NDArray[np.bool_]:
        return np.asarray(self.links[: self.num_pages + 1, self.kernel.STATE] >= self.kernel.LONE)

    def stand_in(self, page_id: int, tree_page: int) -> None:
        self.kernel.stand_in(*self.arrays, page_id, tree_page)

    def stand_ins(self) -> dict[int, int]:
        held = self.links[: self.num_pages + 1, self.kernel.STANDS_FOR]
        return {page_id: int(held[page_id]) for page_id in np.flatnonzero(held).tolist()}

    def add_root(self) -> int:
        """A row for the root of a namespace's tree."""
        if not self._free_roots:
            rows = len(self.links)
            more = rows - self.num_pages - 1
            self.links = np.concatenate([self.links, np.zeros_like(self.links[:more])])
            self.keys = np.concatenate([self.keys, np.zeros_like(self.keys[:more])])
            self._free_roots = list(range(rows + more - 1, rows - 1, -1))
            self.hand_over()
        return self._free_roots.pop()

    def remove_root(self, row: int) -> None:
        """Give a row back."""
        self._free_roots.append(row)

    @property
    def nbytes(self) -> int:
        """Host bytes of the bookkeeping arrays."""
        return sum(array.nbytes for array in self.arrays)

    def free_pages(self) -> PageIds:
        return self.queues[self.kernel.FREE, : self.num_free].astype(np.int64)


class CompiledTree(RadixTree):
    """The tree over a `CompiledPool`: every call is one of a compiled function.

    160 bytes a page of 16 tokens, whatever the tree's shape; under LRU a page is evicted, held
    or given back in constant time (``kernels/tree.py`` says how).
    """

    pool: CompiledPool

    def __init__(self, page_size: int, pool: CompiledPool, eviction: str = "lru") -> None:
        super().__init__(page_size, pool)
        self.kernel = kernel = pool.kernel
        self._keys: dict[int, Hashable] = {}  # of `roots`, by row
        pool.tokens = np.zeros((pool.num_pages + 1) * page_size, dtype=np.int32)
        pool.hand_over()
        # An eviction policy is the column of `keys` that is looked at first: the smallest goes.
        columns = {
            "lru": kernel.LAST_ACCESS,
            "lfu": kernel.NUM_HITS,
            "priority": kernel.PRIORITY,
        }
        pool.counts[kernel.PAGE_SIZE] = page_size
        pool.counts[kernel.POLICY] = columns[eviction]
        # Looked up once: what every request calls.
        self._acquire, self._commit = kernel.acquire, kernel.commit

    # --- totals ------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return int(self.pool.counts[self.kernel.NUM_TOKENS])

    @property
    def evicted_pages(self) -> int:
        return int(self.pool.counts[self.kernel.NUM_EVICTED])

    @property
    def clock(self) -> int:
        return int(self.pool.counts[self.kernel.CLOCK])

    @property
    def num_nodes(self) -> int:
        """Runs of pages that are used as one. Complexity: O(pages), vectorized."""
        kernel, pool = self.kernel, self.pool
        pages = np.flatnonzero(pool.in_tree)
        parents = pool.links[pages, kernel.PARENT]
        top = pool.links[parents, kernel.CHILDREN]
        alone = (top == pages) & (pool.links[pages, kernel.LEFT] == 0)
        alone &= (pool.links[pages, kernel.RIGHT] == 0) & (parents <= pool.num_pages)
        for column in self._deciding():
            alone &= pool.keys[pages, column] == pool.keys[parents, column]
        return int(pages.size - np.count_nonzero(alone))

    def _deciding(self) -> tuple[int, ...]:
        """The columns in which pages of one run agree."""
        kernel = self.kernel
        policy = self.pool.counts.item(kernel.POLICY)
        extra = (kernel.EXPIRES,) if policy == kernel.PRIORITY else ()
        return (policy, kernel.LAST_ACCESS, *extra)

    # --- work --------------------------------------------------------------------------

    def encode(self, token_ids: Any, *, name: str = "token_ids") -> Tokens:
        """As `encode_tokens`; arrays of int64 in one pass of the kernel."""
        if (
            type(token_ids) is np.ndarray
            and token_ids.dtype is _INT64
            and token_ids.ndim == 1
            and token_ids.flags.carray
        ):
            tokens: Tokens = np.empty(token_ids.size, _INT32)
            if self.kernel.narrow(token_ids, tokens):
                return tokens
        return encode_tokens(token_ids, name=name)

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        pool = self.pool
        pages = np.empty(tokens.size // self.page_size + 1, dtype=np.int64)
        root = self.roots.get(namespace_key(namespace))
        if root is None or not tokens.size:
            return Match(0, pages[:0], False)
        found, source = self.kernel.match(*pool.arrays, root.last_page, tokens, tokens.size, pages)
        whole = found // self.page_size
        if not source:
            return Match(found, pages[:whole], False)
        pages[whole] = source
        return Match(found, pages[: whole + 1], True)

    def acquire(
        self, tokens: Tokens, num_lookup: int, namespace: Hashable = None
    ) -> tuple[PageIds, int, int]:
        pool = self.pool
        root = self.roots.get(namespace_key(namespace))
        num_pages = -(-tokens.size // self.page_size)
        pages = np.empty(num_pages, _INT64)
        found, source, emptied = self._acquire(
            *pool.arrays,
            0 if root is None else root.last_page,
            tokens,
            num_lookup,
            num_pages,
            pages,
        )
        if emptied:
            self._remove_empty_roots()
        return pages, found, source

    @property
    def room(self) -> tuple[int, int]:
        counts = self.pool.counts
        return counts.item(self.kernel.NEED), counts.item(self.kernel.ROOM)

    def insert(
        self,
        tokens: Tokens,
        page_ids: PageIds,
        namespace: Hashable = None,
        *,
        num_tokens: int | None = None,
        own_last: bool = True,
        priority: int | None = None,
        expires: float | None = None,
    ) -> int:
        pool, kernel = self.pool, self.kernel
        key = namespace_key(namespace)
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Root(namespace, pool.add_root())
            self._keys[root.last_page] = key
        num_tokens = tokens.size if num_tokens is None else num_tokens
        changed: int = self._commit(
            *pool.arrays,
            root.last_page,
            tokens,
            num_tokens,
            own_last,
            page_ids,
            kernel.NO_PRIORITY if priority is None else priority,
            kernel.NEVER if expires is None else _bits(expires),
        )
        if expires is not None and priority is not None:
            pages = page_ids[: -(-num_tokens // self.page_size)].copy()
            pages[-1] = pool.counts.item(kernel.END)
            self._schedule(expires, pages)
        if self.expiries:
            inherited = pool.counts.item(kernel.INHERITED)
            until = self.expires_of(inherited)
            if inherited and until is not None:
                self._schedule(until, np.array([inherited], dtype=np.int64))
        return changed

    @property
    def end_page(self) -> int:
        return int(self.pool.counts[self.kernel.END])

    def credit(self, page_id: int, num_hits: int) -> None:
        path = []
        while page_id <= self.pool.num_pages:
            path.append(page_id)
            page_id = self.pool.links.item(page_id, self.kernel.PARENT)
        pages = np.array(path[::-1], dtype=np.int64)
        self.pool.hold(pages)  # out of the order of eviction while their keys change
        self.pool.keys[pages, self.kernel.NUM_HITS] += num_hits
        self.pool.drop(pages)

    def touch(self, page_ids: PageIds) -> None:
        pool = self.pool
        if page_ids.size:
            self.kernel.touch(*pool.arrays, page_ids, page_ids.size)

    def evict(self, num_pages: int) -> int:
        """Free ``num_pages`` pages if so many are evictable; tail pages, oldest first.

        Returns:
            how many were freed.

        Complexity: O(1) a page under LRU as nearly always; else O(log(evictable)).
        """
        pool = self.pool
        freed: int = self.kernel.evict(*pool.arrays, num_pages)
        self._remove_empty_roots()
        return freed

    def clear(self, namespace: Hashable) -> int:
        pool = self.pool
        root = self.roots.pop(namespace_key(namespace), None)
        if root is None:
            return 0
        freed: int = self.kernel.clear(*pool.arrays, root.last_page)
        del self._keys[root.last_page]
        pool.remove_root(root.last_page)
        return freed

    def _remove_empty_roots(self) -> None:
        """Forget the namespaces of whose pages the last is gone. Complexity: O(those)."""
        pool, kernel = self.pool, self.kernel
        row = pool.counts.item(kernel.EMPTIED)
        pool.counts[kernel.EMPTIED] = 0
        while row:
            after = pool.links.item(row, kernel.LEFT)
            pool.links[row, kernel.LEFT] = 0
            if not pool.links[row, kernel.CHILDREN]:
                del self.roots[self._keys.pop(row)]
                pool.remove_root(row)
            row = after

    def _expire(self, page_ids: PageIds, expires: float) -> None:
        self.kernel.expire(*self.pool.arrays, page_ids, page_ids.size, _bits(expires))

    # --- looking -----------------------------------------------------------------------

    def held_below(self, root: Root) -> NamespaceStats:
        row, kernel = self.pool.keys[root.last_page], self.kernel
        return NamespaceStats(
            namespace=root.namespace,
            pages=int(row[kernel.BELOW_PAGES]),
            tokens=int(row[kernel.BELOW_TOKENS]),
        )

    def was_evicted(self, tokens: Tokens, depth: int) -> bool:
        """Whether a run that began with ``tokens``' page number ``depth`` was evicted.

        Told by a digest among the last evicted runs: for explanations, never for a hit.
        """
        kernel = self.kernel
        start = depth * self.page_size
        count = min(self.page_size, tokens.size - start)
        wanted = kernel.digest(tokens, start, count, depth)
        return bool((self.pool.counts[kernel.NOTED :] == wanted).any())

    def child_pages(self, row: int) -> list[int]:
        links, kernel = self.pool.links, self.kernel
        out: list[int] = []
        above: list[int] = []
        page = links.item(row, kernel.CHILDREN)
        while page or above:
            while page:
                above.append(page)
                page = links.item(page, kernel.LEFT)
            page = above.pop()
            out.append(page)
            page = links.item(page, kernel.RIGHT)
        return out

    def tokens_of(self, page_id: int) -> Tokens:
        start = page_id * self.page_size
        return self.pool.tokens[start : start + self.pool.links.item(page_id, self.kernel.FILL)]

    def expires_of(self, page_id: int) -> float | None:
        bits = self.pool.keys.item(page_id, self.kernel.EXPIRES)
        return None if bits == self.kernel.NEVER else _seconds(bits)

    def _run_from(self, page: int) -> Node:
        links, keys, kernel = self.pool.links, self.pool.keys, self.kernel
        deciding = self._deciding()
        run, depth = [page], links.item(page, kernel.DEPTH)
        while True:
            after = links.item(run[-1], kernel.CHILDREN)
            if not after or links[after, kernel.LEFT] or links[after, kernel.RIGHT]:
                break
            if any(keys[after, column] != keys[page, column] for column in deciding):
                break
            run.append(after)
        tokens = np.concatenate([self.tokens_of(page_id) for page_id in run])
        return Node(
            tokens=tokens,
            page_ids=np.array(run, dtype=np.int64),
            end=depth * self.page_size + tokens.size,
            last_access=keys.item(page, kernel.LAST_ACCESS),
            num_hits=keys.item(page, kernel.NUM_HITS),
            priority=keys.item(page, kernel.PRIORITY),
            expires=self.expires_of(page),
            last_page=run[-1],
        )

    # --- proof -------------------------------------------------------------------------

    def check(self) -> None:
        kernel, pool = self.kernel, self.pool
        links, counts = pool.links, pool.counts
        owned: list[int] = []
        num_tokens = 0
        counted: list[tuple[int, int]] = []
        tails: list[int] = []
        require(counts[kernel.EMPTIED] == 0, "roots that wait to be removed")
        for root in self.roots.values():
            first = self.child_pages(root.last_page)
            require(bool(first), "a namespace without pages")
            before = len(owned), num_tokens
            stack = [(root.last_page, -1, first)]
            while stack:
                parent, depth, pages = stack.pop()
                top = links.item(parent, kernel.CHILDREN)
                require(links[top, kernel.ABOVE] == parent, "the way up from the first sibling")
                runs = [self.tokens_of(page).tolist() for page in pages]
                for left, right in itertools.pairwise(runs):
                    require(left < right, "the order of children")
                    require(right[: len(left)] != left, "a key that is a prefix of another")
                for page in pages:
                    owned.append(page)
                    fill = links.item(page, kernel.FILL)
                    num_tokens += fill
                    require(links[page, kernel.PARENT] == parent, "a parent link")
                    require(links[page, kernel.ROOT] == root.last_page, "whose a page is")
                    require(links[page, kernel.DEPTH] == depth + 1, "where a page lies")
                    require(1 <= fill <= self.page_size, "how full a page is")
                    require(links[page, kernel.STANDS_FOR] == 0, "a tree page that stands in")
                    for side in (kernel.LEFT, kernel.RIGHT):
                        other = links.item(page, side)
                        require(
                            not other or kernel.rank(other) <= kernel.rank(page),
                            "ranks of siblings",
                        )
                        require(
                            not other or links[other, kernel.ABOVE] == page,
                            "the way up from a sibling",
                        )
                    below = self.child_pages(page)
                    if below:
                        require(fill == self.page_size, "an inner part-filled page")
                        stack.append((page, depth + 1, below))
                    elif pool.count(page) == 1:
                        tails.append(page)
            counted.append((len(owned) - before[0], num_tokens - before[1]))
        require(counted == [(n.pages, n.tokens) for n in self.namespaces()], "what namespaces hold")
        require(num_tokens == self.num_tokens, f"{num_tokens} tokens, counted {self.num_tokens}")
        require(len(set(owned)) == len(owned), "a page that is in two places")
        require(sorted(owned) == np.flatnonzero(pool.in_tree).tolist(), "the pages of the tree")
        self._check_queues(tails)

    def _check_queues(self, tails: list[int]) -> None:
        """List and heap: together they hold the tails, and give them in the order of eviction."""
        kernel, pool = self.kernel, self.pool
        links = pool.links
        size = pool.counts.item(kernel.NUM_QUEUED)
        queued = pool.queues[kernel.HEAP, 1 : size + 1].tolist()
        listed: list[int] = []
        page = links.item(0, kernel.NEWER)
        while page and len(listed) <= pool.num_pages:
            require(links[page, kernel.OLDER] == (listed[-1] if listed else 0), "the list, back")
            listed.append(page)
            page = links.item(page, kernel.NEWER)
        require(links[0, kernel.OLDER] == (listed[-1] if listed else 0), "the end of the list")
        either = sorted(queued + listed)
        require(set(tails) <= set(either), "pages that may be evicted and are not queued")
        require(set(queued) <= set(tails), "pages of the heap that may not be evicted")
        told = np.flatnonzero(links[: pool.num_pages + 1, kernel.QUEUED])
        require(told.tolist() == either, "pages that believe to be queued")
        for at, page in enumerate(queued, 1):
            require(links[page, kernel.QUEUED] == at, "where a page is queued")
            above = queued[at // 2 - 1] if at > 1 else page
            require(self.policy_key(above) <= self.policy_key(page), "the order of eviction")
        place = {page: at for at, page in enumerate(listed)}
        for older, newer in itertools.pairwise(listed):
            require(self.policy_key(older) <= self.policy_key(newer), "the order of the list")
        for page in listed:
            require(links[page, kernel.STATE] == kernel.LONE, "a held page in the list")
            parent = links.item(page, kernel.PARENT)
            require(place[page] < place.get(parent, len(place)), "a parent before its child")

    def policy_key(self, page: int) -> tuple[int, int]:
        keys, kernel = self.pool.keys, self.kernel
        policy = self.pool.counts.item(kernel.POLICY)
        return keys.item(page, policy), keys.item(page, kernel.LAST_ACCESS)
