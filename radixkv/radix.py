"""The radix tree: which runs of tokens are cached, and in which pages; no torch here.

Every page is a node of the tree, a row in the arrays of `radixkv.pool.PagePool`; the work on
them is in ``kernels/tree.py``, compiled where Numba is installed. Here is what surrounds it:
token ids in, namespaces, expiry times, and runs of pages for whoever looks.
"""

from __future__ import annotations

import array
import itertools
import struct
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import CacheInvariantError

if TYPE_CHECKING:
    from radixkv.pool import PagePool

Tokens = NDArray[np.int32]
PageIds = NDArray[np.int64]  # as wide as an index: NumPy gathers by it three times as fast

MAX_TOKEN_ID = 2**31 - 1
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
_FEW = 64


def encode_tokens(token_ids: Any, *, name: str = "token_ids") -> Tokens:
    """Turn token ids into the tree's own form, an array that nobody else has.

    Args:
        token_ids: a list or tuple of integers (Python, NumPy or torch), or a NumPy or torch
            integer array of one dimension.
    Returns:
        [len(token_ids)] int32.
    Raises:
        TypeError: not a sequence of integers (bool is none).
        ValueError: an id below 0 or above 2**31 - 1.

    Complexity: O(len(token_ids)), without a Python loop.

    >>> encode_tokens([1, 258])
    array([  1, 258], dtype=int32)
    """
    if not isinstance(token_ids, (list, tuple)):
        return _from_array(token_ids, name)
    try:
        native = array.array("I", token_ids)  # the fastest there is: a third of np.array's time
    except (TypeError, OverflowError):
        _refuse(token_ids, name)
        raise
    if not native:
        return _NO_TOKENS
    tokens = np.frombuffer(native, dtype=np.int32)
    # Too large ones are negative now. A bool passes for 0 or 1, so those are looked at.
    # (A few are sooner seen as Python integers than NumPy's reductions have begun.)
    if (min(tokens.tolist()) if len(native) <= _FEW else np.minimum.reduce(tokens)) <= 1:
        low = (tokens <= 1).nonzero()[0].tolist()
        if any(native[i] > MAX_TOKEN_ID or not _is_integer(token_ids[i]) for i in low):
            _refuse(token_ids, name)
    return tokens


def decode_tokens(tokens: Tokens) -> NDArray[np.int64]:
    """The token ids that `encode_tokens` made the array from.

    >>> decode_tokens(encode_tokens([7, 1])).tolist()
    [7, 1]
    """
    return tokens.astype(np.int64)


def _from_array(token_ids: Any, name: str) -> Tokens:
    values = token_ids
    if type(values) is not np.ndarray:
        expected = f"{name}: expected a one-dimensional sequence of integer token ids"
        if isinstance(values, (str, bytes, bytearray)) or not (
            hasattr(values, "__array__") or hasattr(values, "__len__")
        ):
            raise TypeError(f"{expected}, got {type(values).__name__}")
        if getattr(values, "is_cuda", False):
            values = values.cpu()
        values = np.asarray(values)
    dtype = values.dtype
    if values.ndim != 1 or (values.size and dtype.kind not in "iu"):
        expected = f"{name}: expected a one-dimensional sequence of integer token ids"
        if values.ndim != 1:
            raise TypeError(f"{expected}, got {values.ndim} dimensions; flatten it first")
        raise TypeError(f"{expected}, got dtype {dtype}; convert it to integers first")
    if not values.size:
        return _NO_TOKENS
    # One pass for both limits: as unsigned numbers, negative ones are the largest.
    unsigned = values.view(_UNSIGNED[dtype.itemsize])
    if np.maximum.reduce(unsigned) > (MAX_TOKEN_ID if dtype.itemsize > 2 else np.iinfo(dtype).max):
        low, high = int(values.min()), int(values.max())
        raise ValueError(
            f"{name}: expected ids from 0 to {MAX_TOKEN_ID}, got {low if low < 0 else high}"
        )
    tokens: Tokens = values.astype(np.int32)
    return tokens


_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def _is_integer(value: Any) -> bool:
    if type(value) is int:
        return True
    if isinstance(value, (bool, np.bool_)):
        return False
    return "bool" not in str(getattr(value, "dtype", ""))  # a torch scalar


def _refuse(token_ids: Any, name: str) -> None:
    """Raise the error that names the first bad id of a list or tuple, if there is one."""
    for i, value in enumerate(token_ids):
        if not _is_integer(value) or not hasattr(value, "__index__"):
            raise TypeError(
                f"{name}[{i}]: expected an integer token id, got {value!r} of type "
                f"{type(value).__name__}"
            )
        try:
            token_id = value.__index__()
        except TypeError as error:
            raise TypeError(f"{name}[{i}]: expected an integer token id, got {value!r}") from error
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise ValueError(
                f"{name}[{i}]: expected an id from 0 to {MAX_TOKEN_ID}, got {token_id}"
            )


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences share from their beginning.

    Complexity: O(min(len(a), len(b))), one vectorized compare.

    >>> common_prefix(encode_tokens([1, 2, 3]), encode_tokens([1, 2, 4, 5]))
    2
    """
    length = min(a.size, b.size)
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length


def namespace_key(namespace: Hashable) -> Hashable:
    """What a namespace is looked up by: 1, True and 1.0 are equal but are three namespaces.

    >>> namespace_key(1) == namespace_key(True), namespace_key("a") == namespace_key("a")
    (False, True)
    """
    if namespace is None or type(namespace) is str:  # as most are
        return namespace
    if type(namespace) is tuple:
        return (tuple, *map(namespace_key, namespace))
    return (type(namespace), namespace)


class Root(NamedTuple):
    """The beginning of a namespace's tree.

    Attributes:
        namespace: as it was first given.
        last_page: the row whose children are the namespace's first pages.
    """

    namespace: Hashable
    last_page: int


@dataclass(frozen=True, kw_only=True)
class NamespaceStats:
    """What a namespace holds.

    Attributes:
        namespace: as it was first given.
        pages, tokens: in the tree.
    """

    namespace: Hashable
    pages: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A run of pages that are used, and evicted, as one; made anew whenever one looks.

    Attributes:
        tokens: the run. [n] int32.
        page_ids: its pages. [ceil(n / page_size)] int64; the last may be part-filled.
        end: where it ends: tokens from the beginning of the sequence.
        last_access: logical clock of the last match or commit that passed here.
        num_hits: how many did.
        priority, expires: for the "priority" policy; ``expires`` is a time in seconds or None.
        last_page: the page whose children come next.
    """

    tokens: Tokens
    page_ids: PageIds
    end: int
    last_access: int
    num_hits: int
    priority: int
    expires: float | None
    last_page: int


class Match(NamedTuple):
    """The longest prefix of a query that the tree holds.

    Attributes:
        num_tokens: its length.
        page_ids: its pages; with ``in_part`` the last one holds more, or less than a page.
        in_part: whether the match ends inside a page.
    """

    num_tokens: int
    page_ids: PageIds
    in_part: bool


def _bits(seconds: float) -> int:
    return int(struct.unpack("q", struct.pack("d", seconds))[0])


def _seconds(bits: int) -> float:
    return float(struct.unpack("d", struct.pack("q", bits))[0])


class RadixTree:
    """Runs of tokens and their pages, exact to the token, with eviction tail first.

    The tree is one owner of its pages in the pool; whoever else holds a page keeps it from
    eviction, and holds all pages before it in the tree too.

    >>> from radixkv.pool import PagePool
    >>> pool = PagePool(8)
    >>> tree = RadixTree(4, pool)
    >>> pages = pool.allocate(2)
    >>> tokens = encode_tokens([1, 2, 3, 4, 5, 6])
    >>> tree.insert(tokens, pages)
    0
    >>> pool.drop(pages)
    >>> tree.match(encode_tokens([1, 2, 3, 4, 5, 9])).num_tokens
    5
    >>> tree.evict(1), tree.match(tokens).num_tokens
    (1, 4)
    """

    def __init__(self, page_size: int, pool: PagePool, eviction: str = "lru") -> None:
        self.page_size = page_size
        self.pool = pool
        self.kernel = kernel = pool.kernel
        self.roots: dict[Hashable, Root] = {}  # by `namespace_key`
        self._keys: dict[int, Hashable] = {}  # the same by row
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
        self.expiries: list[tuple[float, int, PageIds]] = []  # heap; stale entries are skipped
        self._ties = itertools.count()  # arrays of pages have no order
        # Looked up once: what every request calls.
        self._acquire, self._commit = kernel.acquire, kernel.commit

    # --- totals ------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens that are cached."""
        return int(self.pool.counts[self.kernel.NUM_TOKENS])

    @property
    def evicted_pages(self) -> int:
        """Pages evicted so far."""
        return int(self.pool.counts[self.kernel.NUM_EVICTED])

    @property
    def clock(self) -> int:
        """Counts every use; pages remember when theirs was."""
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
            and self.kernel.COMPILED
        ):
            tokens: Tokens = np.empty(token_ids.size, _INT32)
            if self.kernel.narrow(token_ids, tokens):
                return tokens
        return encode_tokens(token_ids, name=name)

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        """Find the longest prefix of ``tokens`` that the namespace holds; changes nothing.

        Complexity: O(len(tokens) + pages * log(siblings)).
        """
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
        """Match, hold what matched and take pages for the rest, evicting; all or nothing.

        What matched counts as used, to the page.

        Args:
            num_lookup: leading tokens that are looked up; pages are taken for all.
        Returns:
            its pages [ceil(len(tokens) / page_size)] int64, each held by the caller now; how
            many tokens were found; the page whose tokens are to be copied to the first new one,
            or 0. That page may have been evicted, even for this call, but holds what it held
            until somebody writes. Or -1 tokens: `room` says what was missing.

        Complexity: O(len(tokens) + pages * log(siblings) + evicted * log(evictable)).
        """
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
        """After an `acquire` that failed: pages that it needed, pages that could be had."""
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
        """Make ``tokens`` findable; what is there already stays as it is, and counts as used.

        The tree becomes an owner of the pages that are new to it. Of what it has already, the
        caller is made a holder in place of its duplicates, which are given back.

        Args:
            tokens: the sequence from its beginning; not empty.
            page_ids: its pages, all held by the caller; changed to the tree's.
            num_tokens: how many of the tokens; None is all.
            own_last: whether the last page, too, may be changed for the tree's.
            priority, expires: for the pages of the whole sequence, where they have no higher.
        Returns:
            how many of ``page_ids`` were changed.

        Complexity: O(len(tokens) + pages * log(siblings)).
        """
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

    def touch(self, page_ids: PageIds) -> None:
        """Count the pages of a match as used now. Complexity: O(pages * log(evictable))."""
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
        """Forget a namespace; pages that others hold stay theirs. Returns the pages freed."""
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

    def _schedule(self, expires: float, page_ids: PageIds) -> None:
        heappush(self.expiries, (expires, next(self._ties), page_ids))

    def expire(self, now: float) -> None:
        """Let the priorities whose time is over fall to the smallest.

        Complexity: O(log(scheduled)) a commit, O(log(evictable)) a page.
        """
        pool = self.pool
        while self.expiries and self.expiries[0][0] <= now:
            expires, _, page_ids = heappop(self.expiries)
            self.kernel.expire(*pool.arrays, page_ids, page_ids.size, _bits(expires))

    # --- looking -----------------------------------------------------------------------

    def held_below(self, root: Root) -> NamespaceStats:
        """What one namespace holds. O(1)."""
        row, kernel = self.pool.keys[root.last_page], self.kernel
        return NamespaceStats(
            namespace=root.namespace,
            pages=int(row[kernel.BELOW_PAGES]),
            tokens=int(row[kernel.BELOW_TOKENS]),
        )

    def namespaces(self) -> tuple[NamespaceStats, ...]:
        """What every namespace holds that holds something. Complexity: O(namespaces)."""
        return tuple(map(self.held_below, self.roots.values()))

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
        """The pages that follow a page or a root, in the order of their tokens."""
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

    def children(self, parent: Node | Root) -> list[Node]:
        """The nodes that follow a node or a root, in the order of their tokens."""
        return [self._run_from(page) for page in self.child_pages(parent.last_page)]

    def nodes(self, root: Root) -> Iterator[Node]:
        """Every node below a root, each before those that follow it."""
        stack = self.child_pages(root.last_page)
        while stack:
            node = self._run_from(stack.pop())
            yield node
            stack.extend(self.child_pages(node.last_page))

    def tokens_of(self, page_id: int) -> Tokens:
        """What a page of the tree holds."""
        start = page_id * self.page_size
        return self.pool.tokens[start : start + self.pool.links.item(page_id, self.kernel.FILL)]

    def expires_of(self, page_id: int) -> float | None:
        """When the priority of a page of the tree falls; None is never."""
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
        """Walk every page; raise CacheInvariantError at the first thing that is wrong."""

        def require(ok: bool, what: str) -> None:
            if not ok:
                raise CacheInvariantError(f"tree: {what}; this is a bug in radixkv")

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
        self._check_queues(require, tails)

    def _check_queues(self, require: Callable[[bool, str], None], tails: list[int]) -> None:
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
        """What says when a page is evicted: the smallest goes first."""
        keys, kernel = self.pool.keys, self.kernel
        policy = self.pool.counts.item(kernel.POLICY)
        return keys.item(page, policy), keys.item(page, kernel.LAST_ACCESS)

    # --- restoring what was saved ------------------------------------------------------

    @property
    def end_page(self) -> int:
        """After an `insert`: the tree's page in which the sequence ends."""
        return int(self.pool.counts[self.kernel.END])

    def credit(self, page_id: int, num_hits: int) -> None:
        """Count that many more uses of a page of the tree and of all before it. O(depth)."""
        path = []
        while page_id <= self.pool.num_pages:
            path.append(page_id)
            page_id = self.pool.links.item(page_id, self.kernel.PARENT)
        pages = np.array(path[::-1], dtype=np.int64)
        self.pool.hold(pages)  # out of the order of eviction while their keys change
        self.pool.keys[pages, self.kernel.NUM_HITS] += num_hits
        self.pool.drop(pages)
