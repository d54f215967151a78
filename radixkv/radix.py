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
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict, SortedList  # type: ignore[import-untyped]

from radixkv.errors import CacheInvariantError

PageIds = NDArray[np.int32]

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**31 - 1
_NO_PAGES: PageIds = np.empty(0, dtype=np.int32)
EXPIRED = -(2**63)  # the priority of what has outlived its time
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
    if isinstance(token_ids, (list, tuple)):
        try:
            native = np.frombuffer(array.array("I", token_ids), dtype=np.uint32)
        except (TypeError, OverflowError):
            _refuse(token_ids, name)
            raise
        if native.size:
            # A bool passes for 0 or 1, so only those need a look at their type.
            low = np.flatnonzero(native <= 1)
            if low.size and any(not _is_integer(token_ids[i]) for i in low.tolist()):
                _refuse(token_ids, name)
            if int(native.max()) > MAX_TOKEN_ID:
                _refuse(token_ids, name)
    else:
        native = _as_array(token_ids, name)
    return native.byteswap().tobytes() if sys.byteorder == "little" else native.tobytes()


def decode_tokens(tokens: bytes | bytearray | memoryview) -> NDArray[np.int64]:
    """The token ids that `encode_tokens` made the bytes from.

    >>> decode_tokens(encode_tokens([7, 1])).tolist()
    [7, 1]
    """
    return np.frombuffer(tokens, dtype=">u4").astype(np.int64)


def _as_array(token_ids: Any, name: str) -> NDArray[np.uint32]:
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
    if values.size and values.dtype.kind not in "iu":
        raise TypeError(f"{expected}, got dtype {values.dtype}; convert it to integers first")
    if values.size:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high > MAX_TOKEN_ID:
            raise ValueError(
                f"{name}: expected ids from 0 to {MAX_TOKEN_ID}, got {low if low < 0 else high}"
            )
    return values.astype(np.uint32)


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
        differ = int.from_bytes(a[low:high], "big") ^ int.from_bytes(
            b[start + low : start + high], "big"
        )
        return high - (differ.bit_length() + 7) // 8
    return end


class PageLedger(Protocol):
    """What the tree asks of the pool; `radixkv.pool.PagePool` says what each does."""

    ref_count: NDArray[np.int32]
    in_tree: NDArray[np.bool_]
    watched: NDArray[np.bool_]
    on_release: Callable[[list[int]], None] | None

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
        """The child that shares the most bytes with ``key``, if any are shared, and how many."""
        order = self.order
        at = bisect_left(order, key) if isinstance(order, list) else order.bisect_left(key)
        best, shared = b"", 0
        for i in (at - 1, at):
            if 0 <= i < len(order):
                length = common_prefix(order[i], key, 0)
                if length > shared:
                    best, shared = order[i], length
        return (self.by_key[best], shared) if shared else None


class Node:
    """An edge of the tree: a run of tokens and its pages.

    Attributes:
        tokens: the run, four bytes a token; begins on a page border.
        page_ids: one page per ``page_size`` tokens, int32 as bytes.
        parent, children: None for a root; None for a leaf.
        last_access: logical clock of the last match or insert that passed here.
        num_hits: how many did.
        priority, expires: for the "priority" policy; ``expires`` is a time in seconds or None.
        key: its key among the evictable leaves, or None if it is not one.
        blocked_by: its last page, while somebody else holds that; else 0.
    """

    __slots__ = (
        "blocked_by",
        "children",
        "expires",
        "key",
        "last_access",
        "num_hits",
        "page_ids",
        "parent",
        "priority",
        "tokens",
    )

    def __init__(self, tokens: bytearray, page_ids: bytearray, parent: Node | None) -> None:
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


@dataclass(frozen=True)
class Match:
    """The longest prefix of a query that the tree holds.

    Attributes:
        num_tokens: its length.
        page_ids: its full pages. [num_tokens // page_size] int32.
        partial_page: the page that holds the tokens after those, or 0 if there are none.
        node: the node in which it ends; None if nothing matched. For `touch` and `settle`.
    """

    num_tokens: int
    page_ids: PageIds
    partial_page: int
    node: Node | None


class RadixTree:
    """Runs of tokens and their pages, exact to the token, with eviction tail first.

    >>> from radixkv.pool import PagePool
    >>> pool = PagePool(8)
    >>> tree = RadixTree(4, pool)
    >>> pages = pool.allocate(2)
    >>> tokens = encode_tokens([1, 2, 3, 4, 5, 6])
    >>> tree.insert(tokens, pages)[0].tolist()
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
        self.roots: dict[Hashable, Node] = {}
        self.num_nodes = 0
        self.num_tokens = 0
        self.evicted_pages = 0
        self.clock = 0
        self._policy = POLICIES[eviction]
        self._evictable: Any = SortedDict()  # policy key -> leaf
        self._blocked: dict[int, Node] = {}  # tail page held by others -> leaf
        self._expiries: list[tuple[float, int, Node]] = []  # heap; stale entries are skipped
        self._num_scheduled = 0
        pool.on_release = self._on_release

    # --- reading -----------------------------------------------------------------------

    def match(self, tokens: bytes, namespace: Hashable = None) -> Match:
        """Find the longest prefix of ``tokens`` that the namespace holds; changes nothing.

        A caller that wants to keep the pages holds them, then calls `settle` and `touch`.

        Complexity: O(len(tokens) / memcmp + edges * log(children)).
        """
        root = self.roots.get(namespace)
        if root is None or root.children is None:
            return Match(0, _NO_PAGES, 0, None)
        node, child, shared, passed, parts = self._walk(root, tokens)
        page_id = 0
        if child is not None:
            full = shared // self.page_bytes
            parts.append(child.page_ids[: 4 * full])
            if shared % self.page_bytes:
                page_id = int.from_bytes(child.page_ids[4 * full : 4 * full + 4], sys.byteorder)
        page_ids = np.frombuffer(b"".join(parts), dtype=np.int32)
        end = node if child is None else child
        return Match(
            (passed + shared) // TOKEN_BYTES, page_ids, page_id, end if end.parent else None
        )

    def _walk(
        self, root: Node, tokens: bytes
    ) -> tuple[Node, Node | None, int, int, list[bytes | bytearray]]:
        """Descend while whole edges match.

        Returns:
            the last node whose whole edge matched (or the root); the child in which the match
            ends, if it ends inside an edge or in its part-filled last page; how many bytes of
            the child's edge match, whole tokens; bytes before the child; their page ids.
        """
        node, passed, page_bytes = root, 0, self.page_bytes
        parts: list[bytes | bytearray] = []
        while passed < len(tokens) and node.children is not None:
            key = tokens[passed : passed + page_bytes]
            child = node.children.by_key.get(key)
            if child is None:
                closest = node.children.closest(key)
                if closest is not None and closest[1] >= TOKEN_BYTES:
                    shared = closest[1] // TOKEN_BYTES * TOKEN_BYTES
                    return node, closest[0], shared, passed, parts
                return node, None, 0, passed, parts
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
        priority: int | None = None,
        expires: float | None = None,
    ) -> tuple[PageIds, Node | None]:
        """Make ``tokens`` findable; what is there already stays as it is.

        The tree becomes an owner of the pages that are new to it. The caller, who owns every
        one of ``page_ids``, holds the returned pages in place of its duplicates, then calls
        `settle` with the returned node.

        Args:
            tokens: the whole sequence from its beginning.
            page_ids: its pages, the last part-filled or not. [ceil(tokens / page_size)] int32.
        Returns:
            The tree's page of each page of the sequence, its own where they were new, [same];
            the node in which the sequence ends (None if it is empty).

        Complexity: as `match`, plus O(new tokens) and the bytes of an edge that is split.
        """
        page_bytes = self.page_bytes
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(bytearray(), bytearray(), None)
        node, child, shared, passed, parts = self._walk(root, tokens)
        cut = shared // page_bytes * page_bytes
        cut_pages = 4 * (cut // page_bytes)
        border = passed + cut
        rest = tokens[border:]
        fresh = page_ids[border // page_bytes :]
        if child is not None:
            parts.append(child.page_ids[:cut_pages])
        if not rest:
            end = node if child is None else child
        elif child is not None and shared - cut == len(rest):
            end = child  # all of it lies inside a page of the tree
            parts.append(child.page_ids[cut_pages : cut_pages + 4])
        else:
            parts.append(fresh.tobytes())
            parts = [b"".join(parts)]  # now: a part may be an edge that is about to grow
            if child is not None and shared == len(child.tokens):
                self._grow(child, cut, rest, fresh)
                end = child
            elif child is None and node.children is None and node is not root:
                self._grow(node, len(node.tokens), rest, fresh)
                end = node
            else:
                parent = self._split(child, cut) if child is not None and cut else node
                end = self._add_leaf(parent, rest, fresh)
        if end is root:
            return _NO_PAGES, None
        self.touch(end, priority, expires)
        if end.children is None and end.key is None and not end.blocked_by:
            self._place(end)
        return np.frombuffer(b"".join(parts), dtype=np.int32), end

    def _add_leaf(self, parent: Node, tokens: bytes, page_ids: PageIds) -> Node:
        leaf = Node(bytearray(tokens), bytearray(page_ids.tobytes()), parent)
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
        old = leaf.tokens[cut:]
        superseded = np.frombuffer(
            bytes(leaf.page_ids[4 * (cut // self.page_bytes) :]), dtype=np.int32
        )
        if cut == 0:
            assert leaf.parent is not None and leaf.parent.children is not None
            leaf.parent.children.remove(bytes(old))
            leaf.parent.children.add(tokens[: self.page_bytes], leaf)
        leaf.tokens[cut:] = tokens
        leaf.page_ids[4 * (cut // self.page_bytes) :] = page_ids.tobytes()
        self.num_tokens += (len(tokens) - len(old)) // TOKEN_BYTES
        if superseded.size and superseded[0] == page_ids[0]:
            self.pool.enter_tree(page_ids[1:])  # the same page, of which more is published now
            return
        self.pool.enter_tree(page_ids)
        if superseded.size:
            freed = self.pool.leave_tree(superseded)
            if not freed:  # its holders (a pin) keep what they hold findable
                self.pool.stand_in(int(superseded[0]), int(page_ids[0]))

    def _split(self, lower: Node, cut: int) -> Node:
        """Give the first ``cut`` bytes of an edge to a new node above it; returns that node."""
        parent = lower.parent
        assert parent is not None and parent.children is not None
        cut_pages = 4 * (cut // self.page_bytes)
        upper = Node(lower.tokens[:cut], lower.page_ids[:cut_pages], parent)
        upper.last_access, upper.num_hits = lower.last_access, lower.num_hits
        upper.priority, upper.expires = lower.priority, lower.expires
        if upper.expires is not None:
            self._schedule(upper)
        parent.children.by_key[bytes(upper.tokens[: self.page_bytes])] = upper
        del lower.tokens[:cut]
        del lower.page_ids[:cut_pages]
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
        node.tokens += child.tokens
        node.page_ids += child.page_ids
        child.tokens, child.page_ids, child.parent = node.tokens, node.page_ids, node.parent
        child.num_hits = max(child.num_hits, node.num_hits)
        node.parent.children.by_key[bytes(node.tokens[: self.page_bytes])] = child
        node.parent = None
        self.num_nodes -= 1
        return True

    # --- who may go --------------------------------------------------------------------

    def touch(self, node: Node, priority: int | None = None, expires: float | None = None) -> None:
        """Count the path to ``node`` as used now; raise its priority if one is given.

        Complexity: O(depth + log(leaves)), and the bytes of edges that are joined.
        """
        self.clock += 1
        self._unkey(node)
        walk: Node | None = node
        while walk is not None and walk.parent is not None:
            walk.last_access = self.clock
            walk.num_hits += 1
            if priority is not None and priority >= walk.priority:
                walk.priority, walk.expires = priority, expires
                if expires is not None:
                    self._schedule(walk)
            walk = walk.parent
        self._rekey(node)
        walk = node
        while walk.parent is not None and walk.parent.parent is not None:
            walk = walk if self._join(walk.parent) else walk.parent

    def _unkey(self, node: Node) -> None:
        if node.key is not None:
            del self._evictable[node.key]

    def _rekey(self, node: Node) -> None:
        if node.key is not None:
            node.key = self._policy(node)
            self._evictable[node.key] = node

    def _schedule(self, node: Node) -> None:
        self._num_scheduled += 1
        heappush(self._expiries, (node.expires, self._num_scheduled, node))

    @property
    def has_expiries(self) -> bool:
        """Whether `expire` may have something to do."""
        return bool(self._expiries)

    def expire(self, now: float) -> None:
        """Let the priorities whose time is over fall to the smallest.

        Complexity: O(log(scheduled)) an expiry.
        """
        while self._expiries and self._expiries[0][0] <= now:
            expires, _, node = heappop(self._expiries)
            if node.expires != expires or node.parent is None:
                continue  # it was given another time, or is gone
            self._unkey(node)
            node.priority, node.expires = EXPIRED, None
            self._rekey(node)
            if node.children is not None:
                self._join(node)
            elif node.parent.parent is not None:
                self._join(node.parent)

    def settle(self, node: Node | None) -> None:
        """Look again whether a leaf is evictable, after its last page got another holder."""
        if node is not None and node.key is not None and self._is_held(node):
            self._unplace(node)
            self._place(node)

    def _is_held(self, leaf: Node) -> bool:
        return bool(self.pool.ref_count[self._tail_page(leaf)] > 1)

    def _tail_page(self, leaf: Node) -> int:
        return int.from_bytes(leaf.page_ids[-4:], sys.byteorder)

    def _place(self, leaf: Node) -> None:
        """Put a leaf among the evictable ones, or the blocked ones if its last page is held."""
        tail = self._tail_page(leaf)
        if self.pool.ref_count[tail] > 1:
            leaf.blocked_by = tail
            self._blocked[tail] = leaf
            self.pool.watched[tail] = True
        else:
            leaf.key = self._policy(leaf)
            self._evictable[leaf.key] = leaf

    def _unplace(self, leaf: Node) -> None:
        if leaf.key is not None:
            del self._evictable[leaf.key]
            leaf.key = None
        elif leaf.blocked_by:
            del self._blocked[leaf.blocked_by]
            self.pool.watched[leaf.blocked_by] = False
            leaf.blocked_by = 0

    def _on_release(self, page_ids: list[int]) -> None:
        for page_id in page_ids:
            leaf = self._blocked[page_id]
            self._unplace(leaf)
            self._place(leaf)

    def evict(self, num_pages: int) -> int:
        """Free at least ``num_pages`` pages if so many are evictable; tail pages, oldest first.

        Returns:
            how many were freed.

        Complexity: O(log(leaves)) a leaf, plus O(pages freed).
        """
        freed = 0
        while freed < num_pages and self._evictable:
            _, leaf = self._evictable.peekitem(0)
            freed += self._trim(leaf, num_pages - freed)
        self.evicted_pages += freed
        return freed

    def _trim(self, leaf: Node, most: int) -> int:
        """Free up to ``most`` pages from the end of an edge, up to the first that is held."""
        self._unplace(leaf)
        pages = np.frombuffer(bytes(leaf.page_ids[-4 * most :]), dtype=np.int32)
        held = np.flatnonzero(self.pool.ref_count[pages] > 1)
        if held.size:
            pages = pages[held[-1] + 1 :]
        if not pages.size:
            self._place(leaf)
            return 0
        keep = len(leaf.page_ids) // 4 - pages.size
        key = bytes(leaf.tokens[: self.page_bytes])
        cut = keep * self.page_bytes
        self.num_tokens -= (len(leaf.tokens) - cut) // TOKEN_BYTES
        del leaf.tokens[cut:]
        del leaf.page_ids[4 * keep :]
        freed = self.pool.leave_tree(pages)
        if keep:
            self._place(leaf)
        else:
            self._remove(leaf, key)
        return freed

    def _remove(self, leaf: Node, key: bytes) -> None:
        parent = leaf.parent
        assert parent is not None and parent.children is not None
        parent.children.remove(key)
        self.num_nodes -= 1
        leaf.parent = None
        if parent.parent is None:
            if not parent.children:
                self._forget_root(parent)
        elif not parent.children:
            parent.children = None
            self._place(parent)
        else:
            self._join(parent)

    def _forget_root(self, root: Node) -> None:
        for namespace, known in self.roots.items():
            if known is root:
                del self.roots[namespace]
                return

    def clear(self, namespace: Hashable) -> int:
        """Forget a namespace; pages that others hold stay theirs. Returns the pages freed."""
        root = self.roots.pop(namespace, None)
        if root is None:
            return 0
        freed = 0
        for node in list(self._nodes(root)):
            if node.children is None:
                self._unplace(node)
            freed += self.pool.leave_tree(np.frombuffer(bytes(node.page_ids), dtype=np.int32))
            self.num_nodes -= 1
            self.num_tokens -= len(node.tokens) // TOKEN_BYTES
        return freed

    def _nodes(self, root: Node) -> Iterator[Node]:
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
            for node in self._nodes(root):
                num_nodes += 1
                num_tokens += len(node.tokens) // TOKEN_BYTES
                pages = np.frombuffer(bytes(node.page_ids), dtype=np.int32)
                owned.extend(pages.tolist())
                require(len(node.tokens) > 0, "an empty edge")
                require(pages.size == -(-len(node.tokens) // self.page_bytes), "pages of an edge")
                if node.children is None:
                    num_leaves += 1
                    tail = self._tail_page(node)
                    if self.pool.ref_count[tail] > 1:
                        require(node.blocked_by == tail, "a held tail that is not blocked")
                        require(self._blocked.get(tail) is node, "a blocked leaf is not listed")
                        require(bool(self.pool.watched[tail]), "a blocked tail is not watched")
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
            for node in [root, *self._nodes(root)]:
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
