"""The radix tree as one would draw it: every page is a node, children hang in sorted tables.

    a namespace's root
     ├─ 1 1 2 3  page 7
     │   ├─ 5 8 9 1  page 9
     │   └─ 5 8 9 9  page 2
     │       └─ 3 1  page 4
     └─ 8 8 8 8  page 5

A node holds the tokens of one page, up to ``page_size``, which follow those of its parent. Only
full pages have children, and no sibling's tokens are the beginning of another's: so among siblings
in the order of their tokens, the one that shares the most with a query stands next to the place
where the query would stand.

Who owns a page is counted: the tree, if it is a node, and every lease, pin and stand-in. Whoever
holds a page holds those before it, and whatever uses a page uses those before it. So what the
tree alone owns can be evicted from its tails on: nodes without children. They are kept in the
order of the policy, and the first is evicted; then its parent may be a tail.

It runs where Numba is not installed, or where RADIXKV_PLAIN_TREE=1 asks for it. Everywhere else
`radixkv.compiled_tree` does the same several times as fast, and is held to this one in tests
(``fuzz/twins.py``): same calls, same answers, same evictions, same page ids. Nothing recurses.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict, SortedKeyList

from radixkv.pool import NULL_PAGE, PagePool
from radixkv.radix import (
    EXPIRED,
    Match,
    NamespaceStats,
    Node,
    PageIds,
    RadixTree,
    Root,
    Tokens,
    namespace_key,
    require,
)

_POLICIES = {  # what of a tail is looked at, and then what decides between equals; smallest first
    "lru": attrgetter("last_access", "last_access"),
    "lfu": attrgetter("num_hits", "last_access"),
    "priority": attrgetter("priority", "last_access"),
}
_TOKEN = np.dtype(">i4")  # as bytes, tokens sort as they do as numbers: the highest byte is first
_TOKEN_BYTES = 4
_NUM_REMEMBERED = 4096  # evicted runs, for explanations


@dataclass(slots=True, eq=False)
class RootNode:
    """Where a namespace begins: has children alone, and counts what lies below.

    Attributes:
        row: a negative number, in the place of a page id.
        key: of `RadixTree.roots`.
    """

    row: int
    key: Hashable
    children: dict[bytes, PageNode] = field(default_factory=dict)
    num_pages: int = 0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class PageNode:
    """A page of the tree.

    Attributes:
        key: its tokens, as bytes of `_TOKEN`.
        depth: pages before it in its sequence.
        children: by their keys, and in their order.
        last_access, num_hits: clock of the last use; how many there were.
        priority, expires: and when it falls to `EXPIRED`; None is never.
        is_tail: whether it stands among `PlainPool.tails`.
    """

    key: bytes
    page_id: int
    parent: PageNode | RootNode
    root: RootNode
    depth: int
    children: dict[bytes, PageNode] = field(default_factory=dict)
    last_access: int = 0
    num_hits: int = 0
    priority: int = 0
    expires: float | None = None
    is_tail: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds."""
        return len(self.key) // _TOKEN_BYTES


def num_shared(a: bytes, b: bytes) -> int:
    """How many tokens two keys share from their beginning. Complexity: O(len(a)), in bulk.

    >>> num_shared(keys_of([1, 2, 3]), keys_of([1, 2, 4, 5]))
    2
    """
    size = min(len(a), len(b))
    differ = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return (size - (differ.bit_length() + 7) // 8) // _TOKEN_BYTES


def keys_of(tokens: Any) -> bytes:
    """The keys of a sequence's pages, one after another."""
    return np.asarray(tokens).astype(_TOKEN).tobytes()


def add_child(parent: PageNode | RootNode, node: PageNode) -> None:
    """Hang a node below another. Complexity: O(log(siblings)).

    A single child, as most are, needs no order: a plain dict takes a tenth of the room.
    """
    if len(parent.children) == 1 and type(parent.children) is dict:
        parent.children = SortedDict(parent.children)
    parent.children[node.key] = node


def closest_child(parent: PageNode | RootNode, key: bytes) -> tuple[PageNode | None, int]:
    """The child that shares the most tokens with ``key``, and how many; or None, 0.

    Of two that share as many it is the one before the place where ``key`` would stand.

    Complexity: O(1) for a child with that very key; else O(log(children)).
    """
    children = parent.children
    node = children.get(key)
    if node is not None:
        return node, len(key) // _TOKEN_BYTES
    near: Iterable[PageNode] = children.values()
    if isinstance(children, SortedDict):
        after = children.bisect_left(key)
        keys = children.keys()[max(0, after - 1) : after + 1]
        near = [children[name] for name in keys]
    best, most = None, 0
    for node in near:
        shared = num_shared(node.key, key)
        if shared > most:
            best, most = node, shared
    return best, most


class PlainPool(PagePool):
    """Owners, free pages and tails, in tables that are as large as what is in use.

    Attributes:
        nodes: the pages of the tree, by id.
        tails: nodes that the tree alone owns and that have no children, next to go first. No two
            were last used at the same time: those that are used at one time lie on one path.
        policy_key: of a node: what ``tails`` are sorted by.
    """

    def __init__(self, num_pages: int, eviction: str = "lru") -> None:
        super().__init__(num_pages)
        self.policy_key = _POLICIES[eviction]
        self.tails: Any = SortedKeyList(key=self.policy_key)
        self.nodes: dict[int, PageNode] = {}
        self._owners: dict[int, int] = {}
        self._given_back: list[int] = []  # a stack: the last one goes first
        self._fresh = 1  # pages from here on were never used
        self._stands_for: dict[int, int] = {}
        self._num_evictable = 0

    @property
    def num_free(self) -> int:
        return len(self._given_back) + self.num_pages + 1 - self._fresh

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    def _take(self, count: int) -> PageIds:
        first = max(0, len(self._given_back) - count)
        page_ids = self._given_back[first:]
        del self._given_back[first:]
        page_ids.reverse()
        missing = count - len(page_ids)
        page_ids.extend(range(self._fresh, self._fresh + missing))
        self._fresh += missing
        self._owners.update(dict.fromkeys(page_ids, 1))
        return np.array(page_ids, dtype=np.int64)

    def hold(self, page_ids: PageIds) -> None:
        for page_id in page_ids.tolist():
            self.hold_one(page_id)

    def hold_one(self, page_id: int) -> None:
        """Add an owner to a page that has one. Complexity: O(log(tails)) for a tail, else O(1)."""
        owners = self._owners[page_id]
        self._owners[page_id] = owners + 1
        if owners == 1 and page_id in self.nodes:
            self._num_evictable -= 1
            self.take_out(self.nodes[page_id])

    def drop(self, page_ids: PageIds) -> None:
        for page_id in reversed(page_ids.tolist()):
            self.drop_one(page_id)

    def drop_one(self, page_id: int) -> None:
        """Take an owner from a page, and from what it stood in for if it is free now."""
        while page_id:
            owners = self._owners[page_id] - 1
            if owners:
                self._owners[page_id] = owners
                if owners == 1 and page_id in self.nodes:
                    self._num_evictable += 1
                    self.put_in(self.nodes[page_id])
                return
            page_id = self._free(page_id)

    def _free(self, page_id: int) -> int:
        """Make a page free; returns the one that it stood in for, if it did, or 0."""
        del self._owners[page_id]
        self._given_back.append(page_id)
        return self.stands_no_more(page_id)

    def put_in(self, node: PageNode) -> None:
        """Put a node that the tree alone owns among the tails, if it is one. O(log(tails))."""
        if not node.children:
            node.is_tail = True
            self.tails.add(node)

    def take_out(self, node: PageNode) -> bool:
        """Take a node from among the tails, before what they are sorted by changes.

        Returns:
            whether it was there.

        Complexity: O(log(tails)).
        """
        if not node.is_tail:
            return False
        node.is_tail = False
        self.tails.remove(node)
        return True

    def first_tail(self) -> PageNode | None:
        """What is evicted next, or None. O(1)."""
        return self.tails[0] if self.tails else None

    def adopt(self, node: PageNode) -> None:
        """Make the tree an owner of a page, which somebody holds. O(1)."""
        self._owners[node.page_id] += 1
        self.nodes[node.page_id] = node

    def leave(self, node: PageNode) -> None:
        """Take the tree from a page's owners; without another it is free. O(log(tails))."""
        del self.nodes[node.page_id]
        owners = self._owners[node.page_id] - 1
        if owners:
            self._owners[node.page_id] = owners
        else:
            self._num_evictable -= 1
            self.take_out(node)
            self._free(node.page_id)

    def count(self, page_id: int) -> int:
        return self._owners.get(page_id, 0)

    def counts_of(self, page_ids: PageIds) -> NDArray[np.int32]:
        owners = self._owners
        return np.array([owners.get(page_id, 0) for page_id in page_ids.tolist()], dtype=np.int32)

    @property
    def ref_count(self) -> NDArray[np.int32]:
        out = np.zeros(self.num_pages + 1, dtype=np.int32)
        out[list(self._owners)] = list(self._owners.values())
        return out

    @property
    def in_tree(self) -> NDArray[np.bool_]:
        out = np.zeros(self.num_pages + 1, dtype=np.bool_)
        out[list(self.nodes)] = True
        return out

    def stand_in(self, page_id: int, tree_page: int) -> None:
        before = self.stands_no_more(page_id)
        self._stands_for[page_id] = tree_page
        self.hold_one(tree_page)
        self.drop_one(before)

    def stands_no_more(self, page_id: int) -> int:
        """Returns the page that ``page_id`` stood in for, which is the caller's to drop, or 0."""
        return self._stands_for.pop(page_id, NULL_PAGE)

    def stand_ins(self) -> dict[int, int]:
        return dict(sorted(self._stands_for.items()))

    def free_pages(self) -> PageIds:
        fresh = range(self._fresh, self.num_pages + 1)
        return np.array([*self._given_back, *fresh], dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Host bytes of nodes, keys and tables, without integers. Complexity: O(pages)."""
        tables = (self.nodes, self._owners, self._given_back, self._stands_for)
        nodes = ((node, node.key, node.children) for node in self.nodes.values())
        return sum(map(sys.getsizeof, itertools.chain(tables, *nodes)))


class PlainTree(RadixTree):
    """The tree over a `PlainPool`.

    A page that matches is one lookup in a table, whatever its size; a page in which a match ends
    takes O(log(siblings)). A page is evicted, held or given back in O(log(tails)) if it is a
    tail, else in O(1). A page of 16 tokens takes 600 to 750
    bytes of memory.
    """

    pool: PlainPool

    def __init__(self, page_size: int, pool: PlainPool) -> None:
        super().__init__(page_size, pool)
        self._page_bytes = page_size * _TOKEN_BYTES
        self._root_nodes: dict[int, RootNode] = {}  # by row
        self._rows = itertools.count(-1, -1)
        self._num_tokens = self._num_evicted = self._clock = 0
        self._room = (0, 0)
        self._end_page = NULL_PAGE
        self._evicted: deque[tuple[int, bytes]] = deque(maxlen=_NUM_REMEMBERED)

    # --- totals ------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def evicted_pages(self) -> int:
        return self._num_evicted

    @property
    def clock(self) -> int:
        return self._clock

    @property
    def room(self) -> tuple[int, int]:
        return self._room

    @property
    def end_page(self) -> int:
        return self._end_page

    # --- finding -----------------------------------------------------------------------

    def _walk(
        self, tokens: Tokens, namespace: Hashable
    ) -> tuple[list[PageNode], PageNode | None, int]:
        """Follow pages from a namespace's root as far as they match.

        Returns:
            the nodes that match wholly; the one in which the match ends, or None; how many of
            its tokens match.

        Complexity: O(pages), and O(log(siblings)) where the match ends.
        """
        path: list[PageNode] = []
        root = self.roots.get(namespace_key(namespace))
        if root is None:
            return path, None, 0
        node: PageNode | RootNode = self._root_nodes[root.last_page]
        keys, size = keys_of(tokens), self._page_bytes
        for start in range(0, len(keys), size):
            key = keys[start : start + size]
            child = node.children.get(key)
            if child is None or len(key) < size:
                return path, *closest_child(node, key)
            path.append(child)
            node = child
        return path, None, 0

    def match(self, tokens: Tokens, namespace: Hashable = None) -> Match:
        path, last, shared = self._walk(tokens, namespace)
        nodes = path if last is None else [*path, last]
        page_ids = np.array([node.page_id for node in nodes], dtype=np.int64)
        return Match(len(path) * self.page_size + shared, page_ids, last is not None)

    def acquire(
        self, tokens: Tokens, num_lookup: int, namespace: Hashable = None
    ) -> tuple[PageIds, int, int]:
        pool = self.pool
        path, last, shared = self._walk(tokens[:num_lookup], namespace)
        need = -(-tokens.size // self.page_size) - len(path)
        # What is found cannot be evicted for the rest; the page in which the match ends can be.
        room = pool.num_available - sum(pool.count(node.page_id) == 1 for node in path)
        if need > room:
            self._room = (need, room)
            return np.empty(0, dtype=np.int64), -1, 0
        if path or last:
            self._clock += 1
        for node in path:
            pool.hold_one(node.page_id)
            self._use(node)
        if last:
            self._use(last)
        self._evict(need - pool.num_free)
        page_ids = np.array([node.page_id for node in path], dtype=np.int64)
        page_ids = np.concatenate([page_ids, pool._take(need)])
        return page_ids, len(path) * self.page_size + shared, last.page_id if last else NULL_PAGE

    # --- using -------------------------------------------------------------------------

    def _use(
        self, node: PageNode, priority: int | None = None, expires: float | None = None
    ) -> None:
        """Count a use of a node now; raise its priority to a higher one."""
        was_tail = self.pool.take_out(node)
        node.last_access = self._clock
        node.num_hits += 1
        if priority is not None and priority >= node.priority:
            node.priority, node.expires = priority, expires
        if was_tail:
            self.pool.put_in(node)

    def touch(self, page_ids: PageIds) -> None:
        if page_ids.size:
            self._clock += 1
        for page_id in page_ids.tolist():
            self._use(self.pool.nodes[page_id])

    def credit(self, page_id: int, num_hits: int) -> None:
        node: PageNode | RootNode = self.pool.nodes[page_id]
        while isinstance(node, PageNode):
            was_tail = self.pool.take_out(node)
            node.num_hits += num_hits
            if was_tail:
                self.pool.put_in(node)
            node = node.parent

    def _expire(self, page_ids: PageIds, expires: float) -> None:
        for page_id in page_ids.tolist():
            node = self.pool.nodes.get(page_id)
            if node is not None and node.expires == expires:
                was_tail = self.pool.take_out(node)
                node.priority, node.expires = EXPIRED, None
                if was_tail:
                    self.pool.put_in(node)

    # --- growing -----------------------------------------------------------------------

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
        pool, nodes, size = self.pool, self.pool.nodes, self._page_bytes
        keys = keys_of(tokens[:num_tokens])
        node: PageNode | RootNode = self._root_of(namespace)
        self._clock += 1
        num_changed = 0
        mine = page_ids[: -(-len(keys) // size)].tolist()
        for depth, page_id in enumerate(mine):
            key = keys[depth * size : (depth + 1) * size]
            child, shared = closest_child(node, key)
            if child is None or shared * _TOKEN_BYTES < len(key):
                child = self._publish(node, key, page_id, child, shared)
            elif (
                child.page_id != page_id and page_id not in nodes and (len(key) == size or own_last)
            ):
                pool.hold_one(child.page_id)
                if pool.count(page_id) > 1:
                    pool.stand_in(page_id, child.page_id)
                pool.drop_one(page_id)
                page_ids[depth] = child.page_id
                num_changed += 1
            self._use(child, priority, expires)
            node = child
        assert isinstance(node, PageNode)
        self._end_page = node.page_id
        if expires is not None and priority is not None:
            self._schedule(expires, np.array([*page_ids[: len(mine) - 1], node.page_id]))
        return num_changed

    def _root_of(self, namespace: Hashable) -> RootNode:
        """The root of a namespace, made if it has none."""
        key = namespace_key(namespace)
        root = self.roots.get(key)
        if root is None:
            root = self.roots[key] = Root(namespace, next(self._rows))
            self._root_nodes[root.last_page] = RootNode(root.last_page, key)
        return self._root_nodes[root.last_page]

    def _publish(
        self,
        parent: PageNode | RootNode,
        key: bytes,
        page_id: int,
        near: PageNode | None,
        shared: int,
    ) -> PageNode:
        """Make a held page with tokens that are new below ``parent`` a node there.

        Args:
            near: the child that shares the most with it: ``shared`` tokens, not all of ``key``.

        If all that ``near`` has is the beginning of ``key``, the new node takes its place, with its
        uses: it is the same page, of which more is there now, or another one, whose holders keep
        what they hold findable by holding the new node's.
        """
        root = parent if isinstance(parent, RootNode) else parent.root
        depth = 0 if isinstance(parent, RootNode) else parent.depth + 1
        node = PageNode(key, page_id, parent, root, depth)
        replaced = near if near is not None and near.num_tokens == shared else None
        if replaced is not None:
            node.last_access, node.num_hits = replaced.last_access, replaced.num_hits
            node.priority, node.expires = replaced.priority, replaced.expires
            self._unlink(replaced)
            if node.expires is not None and page_id != replaced.page_id:
                self._schedule(node.expires, np.array([page_id], dtype=np.int64))
        stood_for = self.pool.stands_no_more(page_id)  # or two pages hold each other for ever
        self._link(node)
        self.pool.drop_one(stood_for)
        if (
            replaced is not None
            and replaced.page_id != page_id
            and self.pool.count(replaced.page_id)
        ):
            self.pool.stand_in(replaced.page_id, page_id)
        return node

    def _link(self, node: PageNode) -> None:
        """Hang a node into the tree, which becomes an owner of its page."""
        add_child(node.parent, node)
        self.pool.adopt(node)
        node.root.num_pages += 1
        node.root.num_tokens += node.num_tokens
        self._num_tokens += node.num_tokens

    def _unlink(self, node: PageNode) -> None:
        """Take a node without children out of the tree, and the tree from its page's owners."""
        del node.parent.children[node.key]
        self.pool.leave(node)
        node.root.num_pages -= 1
        node.root.num_tokens -= node.num_tokens
        self._num_tokens -= node.num_tokens

    # --- shrinking ---------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        return self._evict(num_pages)

    def _evict(self, num_pages: int) -> int:
        pool, num_freed = self.pool, 0
        node = pool.first_tail() if num_pages > 0 else None
        while node is not None:
            self._unlink(node)
            num_freed += 1
            parent = node.parent
            after = pool.first_tail()
            if not parent.children:
                if isinstance(parent, RootNode):
                    self._remove_root(parent)
                elif pool.count(parent.page_id) == 1:  # a tail now, and mostly the first
                    if after is None or pool.policy_key(parent) < pool.policy_key(after):
                        after = parent
                    if after is not parent or num_freed == num_pages:
                        pool.put_in(parent)
            if after is not parent or num_freed == num_pages:  # here a run began
                self._evicted.append((node.depth, node.key))
            node = after if num_freed < num_pages else None
        self._num_evicted += num_freed
        return num_freed

    def clear(self, namespace: Hashable) -> int:
        root = self.roots.get(namespace_key(namespace))
        if root is None:
            return 0
        before = self.pool.num_free
        root_node = self._root_nodes[root.last_page]
        stack = list(root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.children = {}
            self.pool.leave(node)
        self._num_tokens -= root_node.num_tokens
        self._remove_root(root_node)
        return self.pool.num_free - before

    def _remove_root(self, root: RootNode) -> None:
        del self.roots[root.key], self._root_nodes[root.row]

    # --- looking -----------------------------------------------------------------------

    def held_below(self, root: Root) -> NamespaceStats:
        node = self._root_nodes[root.last_page]
        return NamespaceStats(
            namespace=root.namespace, pages=node.num_pages, tokens=node.num_tokens
        )

    def was_evicted(self, tokens: Tokens, depth: int) -> bool:
        """As `RadixTree.was_evicted`. Complexity: O(runs that are remembered)."""
        start = depth * self.page_size
        return (depth, keys_of(tokens[start : start + self.page_size])) in self._evicted

    def child_pages(self, row: int) -> list[int]:
        node = self._root_nodes[row] if row < 0 else self.pool.nodes[row]
        return [child.page_id for child in node.children.values()]

    def tokens_of(self, page_id: int) -> Tokens:
        return np.frombuffer(self.pool.nodes[page_id].key, dtype=_TOKEN).astype(np.int32)

    def expires_of(self, page_id: int) -> float | None:
        return self.pool.nodes[page_id].expires

    def policy_key(self, page_id: int) -> tuple[int, int]:
        first, last_access = self.pool.policy_key(self.pool.nodes[page_id])
        return first, last_access

    @property
    def num_nodes(self) -> int:
        goes_on = sum(
            isinstance(node.parent, PageNode) and self._goes_on(node.parent) is node
            for node in self.pool.nodes.values()
        )
        return len(self.pool.nodes) - goes_on

    def _goes_on(self, node: PageNode) -> PageNode | None:
        """The node after ``node`` that belongs to the same run, or None. O(1)."""
        if len(node.children) != 1:
            return None
        (after,) = node.children.values()
        key = self.pool.policy_key
        same = key(after) == key(node)
        if same and key is _POLICIES["priority"]:
            same = after.expires == node.expires
        return after if same else None

    def _run_from(self, page_id: int) -> Node:
        first = self.pool.nodes[page_id]
        run, after = [first], self._goes_on(first)
        while after is not None:
            run.append(after)
            after = self._goes_on(after)
        tokens = np.frombuffer(b"".join(node.key for node in run), dtype=_TOKEN)
        return Node(
            tokens=tokens.astype(np.int32),
            page_ids=np.array([node.page_id for node in run], dtype=np.int64),
            end=first.depth * self.page_size + tokens.size,
            last_access=first.last_access,
            num_hits=first.num_hits,
            priority=first.priority,
            expires=first.expires,
            last_page=run[-1].page_id,
        )

    # --- proof -------------------------------------------------------------------------

    def check(self) -> None:
        pool = self.pool
        found: dict[int, PageNode] = {}
        totals = []
        for root in self.roots.values():
            root_node = self._root_nodes[root.last_page]
            require(bool(root_node.children), "a namespace without pages")
            before, num_tokens = len(found), 0
            stack: list[PageNode | RootNode] = [root_node]
            while stack:
                parent = stack.pop()
                self._check_children(parent)
                for node in parent.children.values():
                    require(node.root is root_node, "whose a page is")
                    require(node.page_id not in found, "a page that is in two places")
                    require(pool.nodes.get(node.page_id) is node, "a page that the pool lacks")
                    found[node.page_id] = node
                    num_tokens += node.num_tokens
                    stack.append(node)
            totals.append(num_tokens)
            require(root_node.num_pages == len(found) - before, "pages of a namespace")
            require(root_node.num_tokens == num_tokens, "tokens of a namespace")
        require(len(self._root_nodes) == len(self.roots), "a root without its namespace")
        require(len(found) == len(pool.nodes), "the pages of the tree")
        require(sum(totals) == self.num_tokens, f"{sum(totals)} tokens, counted {self.num_tokens}")
        require(not found.keys() & pool.stand_ins().keys(), "a tree page that stands in")
        alone = [node for node in found.values() if pool.count(node.page_id) == 1]
        require(len(alone) == pool.num_evictable, "the count of evictable pages")
        tails = sorted((node for node in alone if not node.children), key=pool.policy_key)
        require(list(pool.tails) == tails, "the tails, in the order of eviction")
        told = [node for node in found.values() if node.is_tail]
        require(len(told) == len(tails) and {*told} == {*tails}, "nodes that believe to be tails")

    def _check_children(self, parent: PageNode | RootNode) -> None:
        """The keys of siblings and where they say that they hang."""
        depth = parent.depth + 1 if isinstance(parent, PageNode) else 0
        keys = list(parent.children)
        for left, right in itertools.pairwise(keys):
            require(left < right, "the order of children")
            require(not right.startswith(left), "a key that is a prefix of another")
        if keys and isinstance(parent, PageNode):
            require(parent.num_tokens == self.page_size, "an inner part-filled page")
        for key, node in parent.children.items():
            require(node.key == key and node.parent is parent, "a parent link")
            require(node.depth == depth, "where a page lies")
            require(1 <= node.num_tokens <= self.page_size, "how full a page is")
