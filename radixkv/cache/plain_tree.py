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
`radixkv.cache.compiled_tree` does the same twenty times as fast, and is held to this one in tests
(``fuzz/twins.py``): same calls, same answers, same evictions, same page ids. Nothing recurses.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterator

import numpy as np

from radixkv.cache.plain_node import (
    TOKEN,
    TOKEN_BYTES,
    PageNode,
    add_child,
    closest_child,
)
from radixkv.cache.plain_pool import POLICIES, PlainPool
from radixkv.cache.pool import NULL_PAGE
from radixkv.cache.tree import (
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

_NUM_REMEMBERED = 4096  # evicted runs, for explanations


class PlainTree(RadixTree):
    """The tree over a `PlainPool`.

    A page that matches is one lookup in a table, whatever its size; a page in which a match ends
    takes O(log(siblings)). A page is evicted, held or given back in O(log(tails)) if it is a tail,
    else in O(1). A page of 16 tokens takes 600 to 750 bytes of memory.
    """

    pool: PlainPool
    num_tokens: int = 0
    evicted_pages: int = 0
    clock: int = 0
    room: tuple[int, int] = (0, 0)
    end_page: int = NULL_PAGE

    def __init__(self, page_size: int, pool: PlainPool) -> None:
        super().__init__(page_size, pool)
        self._page_bytes = page_size * TOKEN_BYTES
        self._rows = itertools.count(-1, -1)
        self._root_nodes: dict[int, PageNode] = {}  # by row
        self._keys: dict[int, Hashable] = {}  # of `roots`, by row
        self._evicted: deque[tuple[int, bytes]] = deque(maxlen=_NUM_REMEMBERED)

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
        node = self._root_nodes[root.last_page]
        for key in self._split(tokens):
            child = node.children.get(key)
            if child is None or len(key) < self._page_bytes:
                return path, *closest_child(node, key)
            path.append(child)
            node = child
        return path, None, 0

    def _split(self, tokens: Tokens) -> list[bytes]:
        """The keys of a sequence's pages."""
        whole, size = tokens.astype(TOKEN).tobytes(), self._page_bytes
        return [whole[start : start + size] for start in range(0, len(whole), size)]

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
            self.room = (need, room)
            return np.empty(0, dtype=np.int64), -1, NULL_PAGE
        self.clock += bool(path or last)
        for node in path:
            pool.hold_one(node.page_id)
            self._use(node)
        if last is not None:
            self._use(last)
        self.evict(need - pool.num_free)
        held = np.array([node.page_id for node in path], dtype=np.int64)
        source = NULL_PAGE if last is None else last.page_id
        return (
            np.concatenate([held, pool.allocate(need)]),
            len(path) * self.page_size + shared,
            source,
        )

    # --- using -------------------------------------------------------------------------

    def _use(
        self, node: PageNode, priority: int | None = None, expires: float | None = None
    ) -> None:
        """Count a use of a node now; raise its priority to a higher one. O(1), or O(log(tails))."""
        was_tail = self.pool.take_out(node)
        node.last_access = self.clock
        node.num_hits += 1
        if priority is not None and priority >= node.priority:
            node.priority, node.expires = priority, expires
        if was_tail:
            self.pool.put_in(node)

    def touch(self, page_ids: PageIds) -> None:
        self.clock += bool(page_ids.size)
        for page_id in page_ids.tolist():
            self._use(self.pool.nodes[page_id])

    def credit(self, page_id: int, num_hits: int) -> None:
        node = self.pool.nodes[page_id]
        while node.parent is not None:
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
        pool, num_changed = self.pool, 0
        node = self._root_of(namespace)
        self.clock += 1
        keys = self._split(tokens[:num_tokens])
        for depth, (key, page_id) in enumerate(zip(keys, page_ids.tolist(), strict=False)):
            child, shared = closest_child(node, key)
            if child is None or shared * TOKEN_BYTES < len(key):
                child = self._publish(node, key, page_id, child, shared)
            elif page_id not in pool.nodes and (len(key) == self._page_bytes or own_last):
                # A duplicate: the caller is made a holder of the tree's page in its place.
                pool.hold_one(child.page_id)
                if pool.count(page_id) > 1:
                    pool.stand_in(page_id, child.page_id)
                pool.drop_one(page_id)
                page_ids[depth] = child.page_id
                num_changed += 1
            self._use(child, priority, expires)
            node = child
        self.end_page = node.page_id
        if expires is not None and priority is not None:
            self._schedule(expires, np.array([*page_ids[: len(keys) - 1], self.end_page]))
        return num_changed

    def _root_of(self, namespace: Hashable) -> PageNode:
        """The root of a namespace, made if it has none."""
        key = namespace_key(namespace)
        root = self.roots.get(key)
        if root is None:
            row = next(self._rows)
            root = self.roots[key] = Root(namespace, row)
            self._keys[row] = key
            self._root_nodes[row] = PageNode(b"", row, None, -1)
        return self._root_nodes[root.last_page]

    def _publish(
        self, parent: PageNode, key: bytes, page_id: int, near: PageNode | None, shared: int
    ) -> PageNode:
        """Make a held page with tokens that are new below ``parent`` a node there.

        If all that ``near`` has is the beginning of ``key``, the new node takes its place, with its
        uses: it is the same page, of which more is there now, or another one, whose holders keep
        what they hold findable by holding the new node's.

        Args:
            near: the child that shares the most with it: ``shared`` tokens, not all of ``key``.

        Complexity: O(log(siblings)).
        """
        node = PageNode(key, page_id, parent, parent.depth + 1)
        old = near if near is not None and near.num_tokens == shared else None
        if old is not None:
            node.last_access, node.num_hits = old.last_access, old.num_hits
            node.priority, node.expires = old.priority, old.expires
            self._unlink(old)
        stood_for = self.pool.stands_no_more(page_id)  # or two pages hold each other for ever
        add_child(parent, node)
        self.pool.adopt(node)
        self.num_tokens += node.num_tokens
        self.pool.drop_one(stood_for)
        if old is not None and old.page_id != page_id:
            if node.expires is not None:
                self._schedule(node.expires, np.array([page_id], dtype=np.int64))
            if self.pool.count(old.page_id):
                self.pool.stand_in(old.page_id, page_id)
        return node

    # --- shrinking ---------------------------------------------------------------------

    def _unlink(self, node: PageNode) -> PageNode:
        """Take a node without children out of the tree; returns its parent. O(log(tails))."""
        assert node.parent is not None
        del node.parent.children[node.key]
        self.pool.leave(node)
        self.num_tokens -= node.num_tokens
        return node.parent

    def evict(self, num_pages: int) -> int:
        pool, num_freed = self.pool, 0
        node = pool.first_tail() if num_pages > 0 else None
        while node is not None:
            parent = self._unlink(node)
            num_freed += 1
            after = pool.first_tail()
            if not parent.children:
                if parent.parent is None:
                    self._remove_root(parent)
                elif pool.count(parent.page_id) == 1:  # a tail now, and mostly the first
                    if after is None or pool.policy_key(parent) < pool.policy_key(after):
                        after = parent
                    if after is not parent or num_freed == num_pages:
                        pool.put_in(parent)
            if after is not parent or num_freed == num_pages:  # here a run began
                self._evicted.append((node.depth, node.key))
            node = after if num_freed < num_pages else None
        self.evicted_pages += num_freed
        return num_freed

    def clear(self, namespace: Hashable) -> int:
        root = self.roots.get(namespace_key(namespace))
        if root is None:
            return 0
        before = self.pool.num_free
        for node in list(self._below(self._root_nodes[root.last_page])):
            node.children = {}
            self.pool.leave(node)
            self.num_tokens -= node.num_tokens
        self._remove_root(self._root_nodes[root.last_page])
        return self.pool.num_free - before

    def _remove_root(self, root: PageNode) -> None:
        del self._root_nodes[root.page_id], self.roots[self._keys.pop(root.page_id)]

    # --- looking -----------------------------------------------------------------------

    def _below(self, node: PageNode) -> Iterator[PageNode]:
        """The pages below a node, each before those that follow it; the last siblings first."""
        stack = [*node.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def held_below(self, root: Root) -> NamespaceStats:
        """What one namespace holds. Complexity: O(its pages)."""
        sizes = [node.num_tokens for node in self._below(self._root_nodes[root.last_page])]
        return NamespaceStats(namespace=root.namespace, pages=len(sizes), tokens=sum(sizes))

    def was_evicted(self, tokens: Tokens, depth: int) -> bool:
        """As `RadixTree.was_evicted`. Complexity: O(runs that are remembered)."""
        start = depth * self.page_size
        key = tokens[start : start + self.page_size].astype(TOKEN).tobytes()
        return (depth, key) in self._evicted

    def child_pages(self, row: int) -> list[int]:
        node = self._root_nodes[row] if row < 0 else self.pool.nodes[row]
        return [child.page_id for child in node.children.values()]

    def tokens_of(self, page_id: int) -> Tokens:
        return np.frombuffer(self.pool.nodes[page_id].key, dtype=TOKEN).astype(np.int32)

    def expires_of(self, page_id: int) -> float | None:
        return self.pool.nodes[page_id].expires

    def policy_key(self, page_id: int) -> tuple[int, int]:
        first, last_access = self.pool.policy_key(self.pool.nodes[page_id])
        return first, last_access

    @property
    def num_nodes(self) -> int:
        nodes = self.pool.nodes.values()
        return len(nodes) - sum(self._after(node) is not None for node in nodes)

    def _after(self, node: PageNode) -> PageNode | None:
        """The node after ``node`` that belongs to the same run: used as one with it. O(1)."""
        if len(node.children) != 1:
            return None
        (after,) = node.children.values()
        key = self.pool.policy_key
        if key(after) != key(node):
            return None
        return None if key is POLICIES["priority"] and after.expires != node.expires else after

    def _run_from(self, page_id: int) -> Node:
        first = self.pool.nodes[page_id]
        run, after = [first], self._after(first)
        while after is not None:
            run.append(after)
            after = self._after(after)
        tokens = np.frombuffer(b"".join(node.key for node in run), dtype=TOKEN)
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
        pool, found = self.pool, list[PageNode]()
        require(len(self._root_nodes) == len(self.roots), "a root without its namespace")
        for root in self.roots.values():
            root_node = self._root_nodes[root.last_page]
            require(bool(root_node.children), "a namespace without pages")
            self._check_children(root_node)
            for node in self._below(root_node):
                self._check_children(node)
                found.append(node)
        own = {node.page_id: node for node in found}
        require(len(own) == len(found), "a page that is in two places")
        require(own == pool.nodes, "the pages of the tree")
        num_tokens = sum(node.num_tokens for node in found)
        require(num_tokens == self.num_tokens, f"{num_tokens} tokens, counted {self.num_tokens}")
        require(not own.keys() & pool.stand_ins().keys(), "a tree page that stands in")
        alone = [node for node in found if pool.count(node.page_id) == 1]
        require(len(alone) == pool.num_evictable, "the count of evictable pages")
        tails = sorted((node for node in alone if not node.children), key=pool.policy_key)
        require(list(pool.tails) == tails, "the tails, in the order of eviction")
        told = sum(node.is_tail for node in found)
        require(told == len(tails) == sum(n.is_tail for n in tails), "nodes that think to be tails")

    def _check_children(self, parent: PageNode) -> None:
        """The keys of siblings, and where they say that they hang."""
        if parent.children and parent.parent is not None:
            require(parent.num_tokens == self.page_size, "an inner part-filled page")
        for left, right in itertools.pairwise(parent.children):
            require(left < right, "the order of children")
            require(not right.startswith(left), "a key that is a prefix of another")
        for key, node in parent.children.items():
            require(node.key == key and node.parent is parent, "a parent link")
            require(node.depth == parent.depth + 1, "where a page lies")
            require(1 <= node.num_tokens <= self.page_size, "how full a page is")
