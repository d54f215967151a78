"""The radix tree: which runs of tokens are cached, and in which pages; no torch here.

Here is what both trees have in common: tokens, namespaces, matches, and `RadixTree`, the calls
that each of them answers. To see how a tree works, read `radixkv.cache.plain_tree`.
"""

from __future__ import annotations

import array
import itertools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import CacheInvariantError

if TYPE_CHECKING:
    from radixkv.cache.pool import PagePool

Tokens = NDArray[np.int32]
PageIds = NDArray[np.int64]  # as wide as an index: NumPy gathers by it three times as fast

MAX_TOKEN_ID = 2**31 - 1
EXPIRED = -(2**61)  # the priority of what has outlived its time
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


class RadixTree(ABC):
    """Runs of tokens and their pages, exact to the token, with eviction tail first.

    The tree is one owner of its pages in the pool; whoever else holds a page keeps it from
    eviction, and holds all pages before it in the tree too.

    What is the same however pages are kept stands here: namespaces, times of expiry, runs of
    pages for whoever looks. Two trees fill in the rest, and answer alike to the page id: the one
    of `radixkv.cache.compiled_tree`, and that of `radixkv.cache.plain_tree`, where the structure is
    to be read. `radixkv.cache.tree_choice.make_tree` makes the one or the other.

    Attributes:
        page_size: tokens of a full page.
        pool: whose pages these are.
        roots: where each namespace begins, by `namespace_key`, in the order in which they came.
        expiries: heap of (time, tie, pages) whose priority is to fall; stale entries are skipped.

    >>> from radixkv.cache.tree_choice import make_tree
    >>> tree = make_tree(page_size=4, num_pages=8)
    >>> pages = tree.pool.allocate(2)
    >>> tokens = encode_tokens([1, 2, 3, 4, 5, 6])
    >>> tree.insert(tokens, pages)
    0
    >>> tree.pool.drop(pages)
    >>> tree.match(encode_tokens([1, 2, 3, 4, 5, 9])).num_tokens
    5
    >>> tree.evict(1), tree.match(tokens).num_tokens
    (1, 4)
    """

    def __init__(self, page_size: int, pool: PagePool) -> None:
        self.page_size = page_size
        self.pool = pool
        self.roots: dict[Hashable, Root] = {}
        self.expiries: list[tuple[float, int, PageIds]] = []
        self._ties = itertools.count()  # arrays of pages have no order

    # --- totals ------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens that are cached. O(1)."""

    @property
    @abstractmethod
    def evicted_pages(self) -> int:
        """Pages evicted so far. O(1)."""

    @property
    @abstractmethod
    def clock(self) -> int:
        """Counts every use; pages remember when theirs was. O(1)."""

    @property
    @abstractmethod
    def num_nodes(self) -> int:
        """Runs of pages that are used as one. Complexity: O(pages)."""

    # --- work --------------------------------------------------------------------------

    def encode(self, token_ids: Any, *, name: str = "token_ids") -> Tokens:
        """As `encode_tokens`."""
        return encode_tokens(token_ids, name=name)

    @abstractmethod
    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        """Find the longest prefix of ``tokens`` that the namespace holds; changes nothing.

        Complexity: O(len(tokens) + pages * log(siblings)).
        """

    @abstractmethod
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

    @property
    @abstractmethod
    def room(self) -> tuple[int, int]:
        """After an `acquire` that failed: pages that it needed, pages that could be had."""

    @abstractmethod
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

    @property
    @abstractmethod
    def end_page(self) -> int:
        """After an `insert`: the tree's page in which the sequence ends."""

    @abstractmethod
    def touch(self, page_ids: PageIds) -> None:
        """Count the pages of a match as used now. Complexity: O(pages * log(evictable))."""

    @abstractmethod
    def credit(self, page_id: int, num_hits: int) -> None:
        """Count that many more uses of a page of the tree and of all before it. O(depth)."""

    @abstractmethod
    def evict(self, num_pages: int) -> int:
        """Free ``num_pages`` pages if so many are evictable; tail pages, in the policy's order.

        Returns:
            how many were freed.

        Complexity: O(log(evictable)) a page.
        """

    @abstractmethod
    def clear(self, namespace: Hashable) -> int:
        """Forget a namespace; pages that others hold stay theirs. Returns the pages freed.

        Complexity: O(pages of the namespace * log(evictable)).
        """

    def expire(self, now: float) -> None:
        """Let the priorities whose time is over fall to the smallest.

        Complexity: O(log(scheduled)) a commit, O(log(evictable)) a page.
        """
        while self.expiries and self.expiries[0][0] <= now:
            expires, _, page_ids = heappop(self.expiries)
            self._expire(page_ids, expires)

    @abstractmethod
    def _expire(self, page_ids: PageIds, expires: float) -> None:
        """Let the priority fall of those pages that still expire at that time."""

    def _schedule(self, expires: float, page_ids: PageIds) -> None:
        heappush(self.expiries, (expires, next(self._ties), page_ids))

    # --- looking -----------------------------------------------------------------------

    @abstractmethod
    def held_below(self, root: Root) -> NamespaceStats:
        """What one namespace holds. O(1)."""

    def namespaces(self) -> tuple[NamespaceStats, ...]:
        """What every namespace holds that holds something. Complexity: O(namespaces)."""
        return tuple(map(self.held_below, self.roots.values()))

    @abstractmethod
    def was_evicted(self, tokens: Tokens, depth: int) -> bool:
        """Whether a run that began with ``tokens``' page number ``depth`` was evicted.

        Told among the last evicted runs, whatever came before the page: for explanations, never
        for a hit.
        """

    @abstractmethod
    def child_pages(self, row: int) -> list[int]:
        """The pages that follow a page or a root, in the order of their tokens."""

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

    @abstractmethod
    def _run_from(self, page_id: int) -> Node:
        """The node that begins with a page."""

    @abstractmethod
    def tokens_of(self, page_id: int) -> Tokens:
        """What a page of the tree holds."""

    @abstractmethod
    def expires_of(self, page_id: int) -> float | None:
        """When the priority of a page of the tree falls; None is never."""

    @abstractmethod
    def policy_key(self, page_id: int) -> tuple[int, int]:
        """A page's place in the order of eviction: the smallest goes first."""

    @abstractmethod
    def check(self) -> None:
        """Walk every page; raise CacheInvariantError at the first thing that is wrong."""


def require(ok: bool, what: str) -> None:
    """Raise CacheInvariantError with ``what`` unless ``ok``; for `RadixTree.check`."""
    if not ok:
        raise CacheInvariantError(f"tree: {what}; this is a bug in radixkv")
