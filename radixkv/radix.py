"""The radix tree: which runs of tokens are cached, and in which pages; no torch here.

Tokens are held as bytes, four a token, big-endian, so that bytes sort as tokens do and runs
are compared by memcmp. A node is an edge: a run of tokens that begins on a page border, and
its pages. Only the last page of a leaf may be part-filled. The children of a node are keyed
by their first page's tokens; no key is a prefix of another, so the child that shares the most
tokens of a page with a query is a neighbour of the query's page in their order.

The tree owns its pages in a `PageLedger` (`radixkv.pool.PagePool`); whoever else holds a page
keeps it from eviction. A holder of a page holds all pages before it in the tree too.
"""

from __future__ import annotations

import array
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict, SortedList

from radixkv.errors import CacheInvariantError

Run = bytes | bytearray  # bytes until it grows or shrinks: half the memory of a bytearray
PageIds = NDArray[np.int64]  # as wide as an index: NumPy gathers by it three times as fast

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1
ID_BYTES = 8
_BIG_ENDIAN = np.dtype(">u4")
_NO_PAGES: PageIds = np.empty(0, dtype=np.int64)
EXPIRED = -(2**63)  # the priority of what has outlived its time
_REMEMBERED = 4096  # evicted runs whose digest is kept, to explain misses
_WIDE = 256  # children from which on their order is a SortedList, not a list


def encode_tokens(token_ids: Any, *, name: str = "token_ids") -> bytes:
    """Turn token ids into the tree's bytes.

    Args:
        token_ids: a list or tuple of integers (Python, NumPy or torch), or a NumPy or torch
            integer array of one dimension.
    Raises:
        TypeError: not a sequence of integers (bool is none).
        ValueError: an id below 0 or above 2**31 - 1.

    Complexity: O(len(token_ids)), without a Python loop.

    >>> encode_tokens([1, 258])
    b'\\x00\\x00\\x00\\x01\\x00\\x00\\x01\\x02'
    """
    if not isinstance(token_ids, (list, tuple)):
        return _as_array(token_ids, name).astype(_BIG_ENDIAN).tobytes()
    if len(token_ids) == 1 and type(token_ids[0]) is int and 0 <= token_ids[0] <= MAX_TOKEN_ID:
        return token_ids[0].to_bytes(TOKEN_BYTES, "big")  # a decode step: no array for one token
    try:
        native = array.array("I", token_ids)
    except (TypeError, OverflowError):
        _refuse(token_ids, name)
        raise
    if not native:
        return b""
    # As signed numbers: too large ones are negative. A bool passes for 0 or 1, so only those
    # need a look at their type.
    if np.minimum.reduce(np.frombuffer(native, dtype=np.int32)) <= 1:
        low = [i for i, token_id in enumerate(native) if token_id <= 1 or token_id > MAX_TOKEN_ID]
        if any(native[i] > MAX_TOKEN_ID or not _is_integer(token_ids[i]) for i in low):
            _refuse(token_ids, name)
    if sys.byteorder == "little":
        native.byteswap()
    return native.tobytes()


def decode_tokens(tokens: bytes | bytearray | memoryview) -> NDArray[np.int64]:
    """The token ids that `encode_tokens` made the bytes from.

    >>> decode_tokens(encode_tokens([7, 1])).tolist()
    [7, 1]
    """
    return np.frombuffer(tokens, dtype=">u4").astype(np.int64)


def _as_array(token_ids: Any, name: str) -> NDArray[Any]:
    expected = f"{name}: expected a one-dimensional sequence of integer token ids"
    if isinstance(token_ids, (str, bytes, bytearray)) or not (
        hasattr(token_ids, "__array__") or hasattr(token_ids, "__len__")
    ):
        raise TypeError(f"{expected}, got {type(token_ids).__name__}")
    if getattr(token_ids, "is_cuda", False):
        token_ids = token_ids.cpu()
    values = np.asarray(token_ids)
    if values.ndim != 1:
        raise TypeError(f"{expected}, got {values.ndim} dimensions; flatten it first")
    if not values.size:
        return values
    if values.dtype.kind not in "iu":
        raise TypeError(f"{expected}, got dtype {values.dtype}; convert it to integers first")
    # One pass for both limits: as unsigned numbers, negative ones are the largest.
    unsigned = values.view(f"u{values.dtype.itemsize}")
    if np.maximum.reduce(unsigned) > min(MAX_TOKEN_ID, np.iinfo(values.dtype).max):
        low, high = int(values.min()), int(values.max())
        raise ValueError(
            f"{name}: expected ids from 0 to {MAX_TOKEN_ID}, got {low if low < 0 else high}"
        )
    return values


def _is_integer(value: Any) -> bool:
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


def common_prefix(a: bytes | bytearray, b: bytes, start: int) -> int:
    """How many bytes ``a`` and ``b[start:]`` share from their beginning.

    Galloping: runs that double, then halves of the one that differs; bulk compares only.

    Complexity: O(result) byte compares by memcmp.
    """
    end = min(len(a), len(b) - start)
    low, step = 0, 64
    while low < end:
        high = min(low + step, end)
        left, right = a[low:high], b[start + low : start + high]
        if left == right:
            low, step = high, step * 2
            continue
        while high - low > 64:
            middle = (low + high) // 2
            if a[low:middle] == b[start + low : start + middle]:
                low = middle
            else:
                high = middle
        return low + _bytes_shared(a[low:high], b[start + low : start + high])
    return end


def _bytes_shared(a: bytes | bytearray, b: bytes) -> int:
    """How many bytes two short runs share from their beginning: the first set bit of a xor."""
    length = min(len(a), len(b))
    differ = int.from_bytes(a[:length], "big") ^ int.from_bytes(b[:length], "big")
    return length - (differ.bit_length() + 7) // 8


class PageLedger(Protocol):
    """What the tree asks of the pool; `radixkv.pool.PagePool` says what each does."""

    on_release: Callable[[list[int]], None] | None

    @property
    def in_tree(self) -> NDArray[np.bool_]: ...
    def count(self, page_id: int) -> int: ...
    def watch(self, page_id: int, watched: bool) -> None: ...
    def free_lone(self, page_ids: PageIds) -> None: ...
    def enter_tree(self, page_ids: PageIds) -> None: ...
    def leave_tree(self, page_ids: PageIds) -> int: ...
    def stand_in(self, page_id: int, tree_page: int) -> None: ...


class Children:
    """A node's children by their first page's tokens, in the order of those tokens."""

    __slots__ = ("by_key", "order")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Node] = {}
        self.order: Any = []  # list while there are few, then SortedList; both of bytes

    def __len__(self) -> int:
        return len(self.by_key)

    def add(self, key: bytes, node: Node) -> None:
        """Complexity: O(log(children))."""
        self.by_key[key] = node
        if isinstance(self.order, list):
            insort(self.order, key)
            if len(self.order) > _WIDE:
                self.order = SortedList(self.order)
        else:
            self.order.add(key)

    def remove(self, key: bytes) -> None:
        del self.by_key[key]
        if isinstance(self.order, list):
            del self.order[bisect_left(self.order, key)]
        else:
            self.order.remove(key)

    def closest(self, key: bytes) -> tuple[Node, int] | None:
        """The child that shares the most bytes with ``key``, and how many; None below a token."""
        order = self.order
        at = bisect_left(order, key) if isinstance(order, list) else order.bisect_left(key)
        begin = key[:TOKEN_BYTES]
        best, shared = b"", 0
        if at and order[at - 1].startswith(begin):
            best = order[at - 1]
            shared = _bytes_shared(best, key)
        if at < len(order) and order[at].startswith(begin):
            length = _bytes_shared(order[at], key)
            if length > shared:
                best, shared = order[at], length
        return (self.by_key[best], shared) if shared else None


class Node:
    """An edge of the tree: a run of tokens and its pages.

    Attributes:
        tokens: the run, four bytes a token; begins on a page border.
        page_ids: one page per ``page_size`` tokens, int64 as bytes.
        parent, children: None for a root; None for a leaf.
        last_access: logical clock of the last match or insert that passed here.
        num_hits: how many did.
        priority, expires: for the "priority" policy; ``expires`` is a time in seconds or None.
        end: where it ends: bytes from the beginning of the sequence.
        key: its key among the evictable leaves, or None if it is not one.
        blocked_by: its last page, while somebody else holds that; else 0.
    """

    __slots__ = (
        "blocked_by",
        "children",
        "end",
        "expires",
        "key",
        "last_access",
        "num_hits",
        "page_ids",
        "parent",
        "priority",
        "tokens",
    )

    def __init__(self, tokens: Run, page_ids: Run, parent: Node | None, end: int) -> None:
        self.end = end
        self.tokens = tokens
        self.page_ids = page_ids
        self.parent = parent
        self.children: Children | None = None
        self.last_access = 0
        self.num_hits = 0
        self.priority = 0
        self.expires: float | None = None
        self.key: Any = None
        self.blocked_by = 0

    def make_mutable(self) -> tuple[bytearray, bytearray]:
        """The run and its pages in a form that grows and shrinks in place."""
        if not isinstance(self.tokens, bytearray):
            self.tokens, self.page_ids = bytearray(self.tokens), bytearray(self.page_ids)
        assert isinstance(self.page_ids, bytearray)
        return self.tokens, self.page_ids


def _without_front(run: Run, count: int) -> Run:
    if isinstance(run, bytes):
        return run[count:]
    del run[:count]
    return run


class Root(Node):
    """The empty node above a namespace's tree."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(b"", b"", None, 0)
        self.namespace = namespace


def _page_at(node: Node, index: int) -> int:
    at = ID_BYTES * index
    return int.from_bytes(node.page_ids[at : at + ID_BYTES], sys.byteorder)


def _lru_key(node: Node) -> Any:
    return node.last_access


def _lfu_key(node: Node) -> Any:
    return (node.num_hits, node.last_access)


def _priority_key(node: Node) -> Any:
    return (node.priority, node.last_access)


#: An eviction policy is a key: the evictable leaf with the smallest goes first. Keys must
#: be unique, hence end in ``last_access``, and may change only where the tree re-keys.
POLICIES: dict[str, Callable[[Node], Any]] = {
    "lru": _lru_key,
    "lfu": _lfu_key,
    "priority": _priority_key,
}


class Match(NamedTuple):
    """The longest prefix of a query that the tree holds.

    Attributes:
        num_tokens: its length.
        page_ids: its full pages. [num_tokens // page_size] int64.
        partial_page: the page that holds the tokens after those, or 0 if there are none.
        node: the last node whose whole edge matched (or a root); child: the one in whose edge
            the match ends; cut: bytes of the child's edge that are whole pages of the match.
    """

    num_tokens: int
    page_ids: PageIds
    partial_page: int
    node: Node | None
    child: Node | None
    cut: int


class Inserted(NamedTuple):
    """Where a sequence lies in the tree.

    Attributes:
        first: index of the first page that ``page_ids`` tells; those before it are the
            caller's own already.
        page_ids: the tree's pages from there on. int64.
        node: the node in which it ends, for `RadixTree.settle`.
        start: a node and its end from which the next insert of this sequence may begin.
    """

    first: int
    page_ids: PageIds
    node: Node
    start: tuple[Node, int]


class RadixTree:
    """Runs of tokens and their pages, exact to the token, with eviction tail first.

    >>> from radixkv.pool import PagePool
    >>> pool = PagePool(8)
    >>> tree = RadixTree(4, pool)
    >>> pages = pool.allocate(2)
    >>> tokens = encode_tokens([1, 2, 3, 4, 5, 6])
    >>> tree.insert(tokens, pages).page_ids.tolist()
    [1, 2]
    >>> pool.drop(pages)
    >>> tree.match(encode_tokens([1, 2, 3, 4, 5, 9])).num_tokens
    5
    >>> tree.evict(1), tree.match(tokens).num_tokens
    (1, 4)
    """

    def __init__(self, page_size: int, pool: PageLedger, eviction: str = "lru") -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.pool = pool
        self.roots: dict[Hashable, Root] = {}
        self.num_nodes = 0
        self.num_tokens = 0
        self.evicted_pages = 0
        self.clock = 0
        self._policy = POLICIES[eviction]
        self._evictable: Any = SortedDict()  # policy key -> leaf
        self._blocked: dict[int, Node] = {}  # tail page held by others -> leaf
        self.expiries: list[tuple[float, int, Node]] = []  # heap; stale entries are skipped
        self._num_scheduled = 0
        self._evicted_runs: dict[int, None] = {}  # digests, oldest first
        pool.on_release = self._on_release

    # --- reading -----------------------------------------------------------------------

    def match(self, tokens: bytes, namespace: Hashable = None) -> Match:
        """Find the longest prefix of ``tokens`` that the namespace holds; changes nothing.

        A caller that wants to keep the pages holds them, then calls `settle`; `touch` counts
        the match as a use. In between, the tree must not change.

        Complexity: O(len(tokens) / memcmp + edges * log(children)).
        """
        root = self.roots.get(namespace)
        if root is None or root.children is None:
            return Match(0, _NO_PAGES, 0, None, None, 0)
        node, child, shared, passed, parts = self._walk(root, 0, tokens)
        page_id = cut = 0
        if child is not None:
            full = shared // self.page_bytes
            cut = full * self.page_bytes
            if full:
                parts.append(child.page_ids[: ID_BYTES * full])
            if shared != cut:
                page_id = _page_at(child, full)
        page_ids = np.frombuffer(b"".join(parts), dtype=np.int64)
        return Match((passed + shared) // TOKEN_BYTES, page_ids, page_id, node, child, cut)

    def _walk(
        self, node: Node, passed: int, tokens: bytes
    ) -> tuple[Node, Node | None, int, int, list[Run]]:
        """Descend from ``node``, where ``passed`` bytes have matched, while whole edges match.

        Returns:
            the last node whose whole edge matched (or the root); the child in which the match
            ends, if it ends inside an edge or in its part-filled last page; how many bytes of
            the child's edge match, whole tokens; bytes before the child; page ids on the way.
        """
        page_bytes = self.page_bytes
        parts: list[Run] = []
        while passed < len(tokens) and node.children is not None:
            key = tokens[passed : passed + page_bytes]
            child = node.children.by_key.get(key)
            if child is None:
                closest = node.children.closest(key)
                if closest is None:
                    return node, None, 0, passed, parts
                shared = closest[1] // TOKEN_BYTES * TOKEN_BYTES
                return node, closest[0], shared, passed, parts
            edge = child.tokens
            if len(edge) % page_bytes == 0 and tokens.startswith(edge, passed):
                passed += len(edge)
                parts.append(child.page_ids)
                node = child
                continue
            shared = common_prefix(edge, tokens, passed) // TOKEN_BYTES * TOKEN_BYTES
            return node, child, shared, passed, parts
        return node, None, 0, passed, parts

    # --- writing -----------------------------------------------------------------------

    def insert(
        self,
        tokens: bytes,
        page_ids: PageIds,
        namespace: Hashable = None,
        *,
        start: tuple[Node, int] | None = None,
        priority: int | None = None,
        expires: float | None = None,
    ) -> Inserted:
        """Make ``tokens`` findable; what is there already stays as it is.

        The tree becomes an owner of the pages that are new to it. The caller, who owns every
        one of ``page_ids``, holds the returned pages in place of its duplicates, then calls
        `settle` with the returned node.

        Args:
            tokens: the whole sequence from its beginning; not empty.
            page_ids: its pages, the last part-filled or not. [ceil(tokens / page_size)] int64.
            start: what `touch` or an earlier insert returned for the beginning of this
                sequence, while the caller has held all its pages since: saves the way there.

        Complexity: as `match`, plus O(new tokens) and the bytes of an edge that is split.
        """
        page_bytes = self.page_bytes
        node: Node | None = None
        if (
            start is not None
            and start[0].parent is not None
            and start[0].end == start[1] <= len(tokens)
        ):
            node, passed = start
        else:
            node, passed = self.roots.get(namespace), 0
            if node is None:
                node = self.roots[namespace] = Root(namespace)
        first = passed // page_bytes
        node, child, shared, passed, parts = self._walk(node, passed, tokens)
        cut = shared // page_bytes * page_bytes
        border = passed + cut
        rest = tokens[border:] if border else tokens
        end = node if child is None else child
        inside = True
        if child is not None:
            parts.append(child.page_ids[: ID_BYTES * (cut // page_bytes)])
        if not rest:
            pass
        elif child is not None and shared - cut == len(rest):
            at = ID_BYTES * (cut // page_bytes)  # all of the rest lies in a page of the tree
            parts.append(child.page_ids[at : at + ID_BYTES])
        else:
            inside = False
            fresh = page_ids[border // page_bytes :]
            parts.append(fresh.tobytes())
            parts = [b"".join(parts)]  # now: a part may be an edge that is about to grow
            if child is not None and shared == len(child.tokens):
                self._grow(child, cut, rest, fresh)
            elif child is None and node.children is None and node.parent is not None:
                self._grow(node, len(node.tokens), rest, fresh)
            else:
                parent = self._split(child, cut) if child is not None and cut else node
                end = self._add_leaf(parent, rest, fresh)
        if inside:
            parts = [b"".join(parts)]  # now: a split may merge an edge into the one above it
            next_start = self._touch_end(node, child, cut, priority, expires)
        else:
            self._touch_path(end, priority, expires)
            if end.key is None and not end.blocked_by:
                self._place(end)
            if end.end % page_bytes == 0:
                next_start = end, end.end
            else:
                assert end.parent is not None
                next_start = end.parent, end.parent.end
        return Inserted(first, np.frombuffer(b"".join(parts), dtype=np.int64), end, next_start)

    def _add_leaf(self, parent: Node, tokens: bytes, page_ids: PageIds) -> Node:
        end = parent.end + len(tokens)
        leaf = Node(tokens, page_ids.tobytes(), parent, end)
        if parent.children is None:
            parent.children = Children()
        parent.children.add(tokens[: self.page_bytes], leaf)
        self.num_nodes += 1
        self.num_tokens += len(tokens) // TOKEN_BYTES
        self.pool.enter_tree(page_ids)
        return leaf

    def _grow(self, leaf: Node, cut: int, tokens: bytes, page_ids: PageIds) -> None:
        """Put ``tokens`` in place of what follows byte ``cut``: nothing, or a prefix of them."""
        self._unplace(leaf)
        cut_pages = cut // self.page_bytes
        superseded = 0
        if cut < len(leaf.tokens):
            superseded = _page_at(leaf, cut_pages)
            if cut == 0:
                assert leaf.parent is not None and leaf.parent.children is not None
                leaf.parent.children.remove(bytes(leaf.tokens))
                leaf.parent.children.add(tokens[: self.page_bytes], leaf)
        grown = cut + len(tokens) - len(leaf.tokens)
        edge, pages = leaf.make_mutable()
        edge[cut:] = tokens
        pages[ID_BYTES * cut_pages :] = page_ids.tobytes()
        leaf.end += grown
        self.num_tokens += grown // TOKEN_BYTES
        if not superseded:
            self.pool.enter_tree(page_ids)
        elif superseded == page_ids[0]:
            self.pool.enter_tree(page_ids[1:])  # the same page, of which more is published now
        else:
            self.pool.enter_tree(page_ids)
            if not self.pool.leave_tree(np.array([superseded])):
                # Its holders (a pin) keep what they hold findable.
                self.pool.stand_in(superseded, int(page_ids[0]))

    def _split(self, lower: Node, cut: int) -> Node:
        """Give the first ``cut`` bytes of an edge to a new node above it; returns that node."""
        parent = lower.parent
        assert parent is not None and parent.children is not None
        cut_pages = ID_BYTES * (cut // self.page_bytes)
        end = lower.end - len(lower.tokens) + cut
        upper = Node(lower.tokens[:cut], lower.page_ids[:cut_pages], parent, end)
        upper.last_access, upper.num_hits = lower.last_access, lower.num_hits
        upper.priority, upper.expires = lower.priority, lower.expires
        if upper.expires is not None:
            self._schedule(upper)
        parent.children.by_key[bytes(upper.tokens[: self.page_bytes])] = upper
        lower.tokens = _without_front(lower.tokens, cut)
        lower.page_ids = _without_front(lower.page_ids, cut_pages)
        lower.parent = upper
        upper.children = Children()
        upper.children.add(bytes(lower.tokens[: self.page_bytes]), lower)
        self.num_nodes += 1
        return upper

    def _join(self, node: Node) -> bool:
        """Join an inner node with its only child, if the two would be evicted as one.

        The child stays, so that its own children keep their parent.
        """
        assert node.children is not None and node.parent is not None
        if len(node.children) != 1:
            return False
        (child,) = node.children.by_key.values()
        if self._policy(node) != self._policy(child) or node.expires != child.expires:
            return False
        assert node.parent.children is not None
        edge, pages = node.make_mutable()
        edge += child.tokens
        pages += child.page_ids
        child.tokens, child.page_ids, child.parent = edge, pages, node.parent
        child.num_hits = max(child.num_hits, node.num_hits)
        node.parent.children.by_key[bytes(edge[: self.page_bytes])] = child
        node.parent = None
        self.num_nodes -= 1
        return True

    # --- who may go --------------------------------------------------------------------

    def touch(self, found: Match) -> tuple[Node, int] | None:
        """Count what ``found`` matched as used now, to the page.

        An edge of which only a part matched is split there, so that its rest keeps its age;
        but a single page that is left over counts as used too: it is mostly the last page of
        a sequence that is asked for again, of which one token is always run anew.

        Returns:
            what `insert` takes as ``start`` for a sequence that begins with this match.

        Complexity: O(depth + log(leaves)), and the bytes of edges that are split or joined.
        """
        if found.node is None:
            return None
        return self._touch_end(found.node, found.child, found.cut, None, None)

    def _touch_end(
        self,
        node: Node,
        child: Node | None,
        cut: int,
        priority: int | None,
        expires: float | None,
    ) -> tuple[Node, int]:
        start = node
        if child is not None:
            if len(child.tokens) <= cut + self.page_bytes:
                node = child
            elif cut:
                start = node = self._split(child, cut)
        if node.parent is not None:
            self._touch_path(node, priority, expires)
        return start, start.end

    def _touch_path(self, node: Node, priority: int | None, expires: float | None) -> None:
        clock = self.clock = self.clock + 1
        keyed = node.key is not None
        if keyed:
            del self._evictable[node.key]
        walk, parent = node, node.parent
        in_two = False
        while parent is not None:
            walk.last_access = clock
            walk.num_hits += 1
            if priority is not None and priority >= walk.priority:
                walk.priority, walk.expires = priority, expires
                if expires is not None:
                    self._schedule(walk)
            walk, parent = parent, parent.parent
            if parent is not None and len(walk.children.by_key) == 1:  # type: ignore[union-attr]
                in_two = True
        if keyed:
            node.key = self._policy(node)
            self._evictable[node.key] = node
        while in_two and node.parent is not None and node.parent.parent is not None:
            if not self._join(node.parent):
                node = node.parent

    def _unkey(self, node: Node) -> None:
        if node.key is not None:
            del self._evictable[node.key]

    def _rekey(self, node: Node) -> None:
        if node.key is not None:
            node.key = self._policy(node)
            self._evictable[node.key] = node

    def _schedule(self, node: Node) -> None:
        assert node.expires is not None
        self._num_scheduled += 1
        heappush(self.expiries, (node.expires, self._num_scheduled, node))

    def expire(self, now: float) -> None:
        """Let the priorities whose time is over fall to the smallest.

        Complexity: O(log(scheduled)) an expiry.
        """
        while self.expiries and self.expiries[0][0] <= now:
            expires, _, node = heappop(self.expiries)
            if node.expires != expires or node.parent is None:
                continue  # it was given another time, or is gone
            self._unkey(node)
            node.priority, node.expires = EXPIRED, None
            self._rekey(node)
            if node.children is not None:
                self._join(node)
            elif node.parent.parent is not None:
                self._join(node.parent)

    def credit(self, node: Node, num_hits: int) -> None:
        """Count that many more uses of a node and of all above it. Complexity: O(depth)."""
        self._unkey(node)
        walk: Node | None = node
        while walk is not None:
            walk.num_hits += num_hits
            walk = walk.parent
        self._rekey(node)

    def settle(self, node: Node | None) -> None:
        """Look again whether a leaf is evictable, after its last page got another holder."""
        if node is not None and node.key is not None and self._is_held(node):
            self._unplace(node)
            self._place(node)

    def _is_held(self, leaf: Node) -> bool:
        return self.pool.count(self._tail_page(leaf)) > 1

    def _tail_page(self, leaf: Node) -> int:
        return int.from_bytes(leaf.page_ids[-ID_BYTES:], sys.byteorder)

    def _place(self, leaf: Node) -> None:
        """Put a leaf among the evictable ones, or the blocked ones if its last page is held."""
        tail = self._tail_page(leaf)
        if self.pool.count(tail) > 1:
            leaf.blocked_by = tail
            self._blocked[tail] = leaf
            self.pool.watch(tail, True)
        else:
            leaf.key = self._policy(leaf)
            self._evictable[leaf.key] = leaf

    def _unplace(self, leaf: Node) -> None:
        if leaf.key is not None:
            del self._evictable[leaf.key]
            leaf.key = None
        elif leaf.blocked_by:
            del self._blocked[leaf.blocked_by]
            self.pool.watch(leaf.blocked_by, False)
            leaf.blocked_by = 0

    def _on_release(self, page_ids: list[int]) -> None:
        for page_id in page_ids:
            leaf = self._blocked.pop(page_id)
            self.pool.watch(page_id, False)
            leaf.blocked_by = 0
            leaf.key = self._policy(leaf)
            self._evictable[leaf.key] = leaf

    def evict(self, num_pages: int) -> int:
        """Free at least ``num_pages`` pages if so many are evictable; tail pages, oldest first.

        Returns:
            how many were freed.

        Complexity: O(log(leaves)) a leaf, plus O(pages freed).
        """
        left, gone = num_pages, []
        while left > 0 and self._evictable:
            _, leaf = self._evictable.popitem(0)
            leaf.key = None
            gone.append(self._trim(leaf, left))
            left -= len(gone[-1]) // ID_BYTES
        freed = num_pages - left
        if freed:
            self.pool.free_lone(np.frombuffer(b"".join(gone), dtype=np.int64))
        self.evicted_pages += freed
        return freed

    def _trim(self, leaf: Node, most: int) -> Run:
        """Cut up to ``most`` pages off the end of an edge, up to the first that is held.

        Returns:
            their ids, as bytes; they are still to be freed.
        """
        count = len(leaf.page_ids) // ID_BYTES
        keep = max(0, count - most)
        # Who holds a page holds those before it: if the first is free to go, all are.
        if self.pool.count(_page_at(leaf, keep)) > 1:
            low, high = keep, count - 1  # the last one is nobody's, or it would be blocked
            while high - low > 1:
                middle = (low + high) // 2
                if self.pool.count(_page_at(leaf, middle)) > 1:
                    low = middle
                else:
                    high = middle
            keep = high
        gone = leaf.page_ids[ID_BYTES * keep :]
        self._note_evicted(leaf, keep * self.page_bytes)
        if not keep:
            self.num_tokens -= len(leaf.tokens) // TOKEN_BYTES
            self._remove(leaf)
            return gone
        cut = keep * self.page_bytes
        lost = len(leaf.tokens) - cut
        self.num_tokens -= lost // TOKEN_BYTES
        leaf.end -= lost
        edge, pages = leaf.make_mutable()
        del edge[cut:]
        del pages[ID_BYTES * keep :]
        self._place(leaf)
        return gone

    def _note_evicted(self, leaf: Node, cut: int) -> None:
        first = bytes(leaf.tokens[cut : cut + self.page_bytes])
        start = leaf.end - len(leaf.tokens) + cut
        self._evicted_runs[hash((start, first))] = None
        if len(self._evicted_runs) > _REMEMBERED:
            del self._evicted_runs[next(iter(self._evicted_runs))]

    def was_evicted(self, start: int, tokens: bytes) -> bool:
        """Whether a run that began with the page of ``tokens`` at byte ``start`` was evicted.

        Told by a digest among the last evicted runs: for explanations, never for a hit.
        """
        return hash((start, tokens[start : start + self.page_bytes])) in self._evicted_runs

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None and parent.children is not None
        parent.children.remove(bytes(leaf.tokens[: self.page_bytes]))
        self.num_nodes -= 1
        leaf.parent = None
        if isinstance(parent, Root):
            if not parent.children:
                del self.roots[parent.namespace]
        elif not parent.children:
            parent.children = None
            self._place(parent)
        else:
            self._join(parent)

    def clear(self, namespace: Hashable) -> int:
        """Forget a namespace; pages that others hold stay theirs. Returns the pages freed."""
        root = self.roots.pop(namespace, None)
        if root is None:
            return 0
        freed = 0
        for node in list(self.nodes(root)):
            if node.children is None:
                self._unplace(node)
            freed += self.pool.leave_tree(np.frombuffer(bytes(node.page_ids), dtype=np.int64))
            node.parent = None
            self.num_nodes -= 1
            self.num_tokens -= len(node.tokens) // TOKEN_BYTES
        return freed

    def nodes(self, root: Node) -> Iterator[Node]:
        """Every node below ``root``, in no order."""
        stack = [root]
        while stack:
            node = stack.pop()
            if node is not root:
                yield node
            if node.children is not None:
                stack.extend(node.children.by_key.values())

    # --- proof -------------------------------------------------------------------------

    def check(self) -> None:
        """Walk every node; raise CacheInvariantError at the first thing that is wrong."""

        def require(ok: bool, what: str) -> None:
            if not ok:
                raise CacheInvariantError(f"tree: {what}; this is a bug in radixkv")

        num_nodes = num_tokens = num_leaves = 0
        owned: list[int] = []
        for root in self.roots.values():
            require(not root.tokens and not root.page_ids, "a root holds tokens")
            for node in self.nodes(root):
                num_nodes += 1
                num_tokens += len(node.tokens) // TOKEN_BYTES
                pages = np.frombuffer(bytes(node.page_ids), dtype=np.int64)
                owned.extend(pages.tolist())
                require(len(node.tokens) > 0, "an empty edge")
                assert node.parent is not None
                require(node.end == node.parent.end + len(node.tokens), "where an edge ends")
                require(pages.size == -(-len(node.tokens) // self.page_bytes), "pages of an edge")
                if node.children is None:
                    num_leaves += 1
                    tail = self._tail_page(node)
                    if self.pool.count(tail) > 1:
                        require(node.blocked_by == tail, "a held tail that is not blocked")
                        require(self._blocked.get(tail) is node, "a blocked leaf is not listed")
                        require(node.key is None, "a held leaf among the evictable")
                    else:
                        require(node.key == self._policy(node), "a leaf under an old key")
                        require(self._evictable.get(node.key) is node, "an unlisted leaf")
                        require(node.blocked_by == 0, "a free leaf among the blocked")
                else:
                    require(len(node.children) > 0, "an inner node without children")
                    if len(node.children) == 1:
                        (child,) = node.children.by_key.values()
                        same = self._policy(node) == self._policy(child)
                        require(not same or node.expires != child.expires, "an edge in two pieces")
                    require(len(node.tokens) % self.page_bytes == 0, "an inner part-filled page")
                    require(node.key is None and not node.blocked_by, "an inner node to evict")
            for node in [root, *self.nodes(root)]:
                if node.children is None:
                    continue
                keys = list(node.children.order)
                require(keys == sorted(node.children.by_key), "the order of children")
                for key, child in node.children.by_key.items():
                    require(child.parent is node, "a parent link")
                    require(key == bytes(child.tokens[: self.page_bytes]), "a child's key")
                for left, right in pairwise(keys):
                    require(not right.startswith(left), "a key that is a prefix of another")
        require(num_nodes == self.num_nodes, f"{num_nodes} nodes, counted {self.num_nodes}")
        require(num_tokens == self.num_tokens, f"{num_tokens} tokens, counted {self.num_tokens}")
        require(
            num_leaves == len(self._evictable) + len(self._blocked), "leaves that are not placed"
        )
        require(len(set(owned)) == len(owned), "a page that two nodes own")
        require(
            sorted(owned) == np.flatnonzero(self.pool.in_tree).tolist(), "the pages of the tree"
        )
