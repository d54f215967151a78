"""Who owns each page of the plain tree, which pages are free, and which goes next.

Tables that are as large as what is in use; see `radixkv.cache.plain_tree`.
"""

from __future__ import annotations

import itertools
import sys
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedKeyList

from radixkv.cache.plain_node import PageNode
from radixkv.cache.pool import NULL_PAGE, PagePool
from radixkv.cache.tree import PageIds

# What of a tail is looked at, and then what decides between equals: the smallest is evicted.
POLICIES = {
    "lru": attrgetter("last_access", "last_access"),
    "lfu": attrgetter("num_hits", "last_access"),
    "priority": attrgetter("priority", "last_access"),
}


class PlainPool(PagePool):
    """Owners, free pages and tails.

    Attributes:
        nodes: the pages of the tree, by id.
        tails: nodes without children that the tree alone owns, in the order of eviction. No two
            were last used at the same time: what is used at one time lies on one path.
        policy_key: of a node: what ``tails`` are sorted by.
    """

    num_evictable: int = 0

    def __init__(self, num_pages: int, eviction: str = "lru") -> None:
        super().__init__(num_pages)
        self.policy_key = POLICIES[eviction]
        self.tails: Any = SortedKeyList(key=self.policy_key)
        self.nodes: dict[int, PageNode] = {}
        self._owners: dict[int, int] = {}
        self._given_back: list[int] = []  # a stack: the last one goes first
        self._fresh = 1  # pages from here on were never used
        self._stands_for: dict[int, int] = {}

    # --- free pages --------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._given_back) + self.num_pages + 1 - self._fresh

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

    def free_pages(self) -> PageIds:
        fresh = range(self._fresh, self.num_pages + 1)
        return np.array([*self._given_back, *fresh], dtype=np.int64)

    # --- owners ------------------------------------------------------------------------

    def hold(self, page_ids: PageIds) -> None:
        for page_id in page_ids.tolist():
            self.hold_one(page_id)

    def hold_one(self, page_id: int) -> None:
        """Add an owner to a page that has one. O(1), for a tail O(log(tails))."""
        owners = self._owners[page_id]
        self._owners[page_id] = owners + 1
        if owners == 1 and page_id in self.nodes:
            self.num_evictable -= 1
            self.take_out(self.nodes[page_id])

    def drop(self, page_ids: PageIds) -> None:
        for page_id in reversed(page_ids.tolist()):
            self.drop_one(page_id)

    def drop_one(self, page_id: int) -> None:
        """Take an owner from a page, and from what it stood in for if it is free now.

        Complexity: O(1), O(log(tails)) for what is a tail now; NULL_PAGE has nothing to lose.
        """
        while page_id:
            owners = self._owners[page_id] - 1
            if owners:
                self._owners[page_id] = owners
                if owners == 1 and page_id in self.nodes:
                    self.num_evictable += 1
                    self.put_in(self.nodes[page_id])
                return
            page_id = self._free(page_id)

    def _free(self, page_id: int) -> int:
        """Make a page free; returns the one that it stood in for, or NULL_PAGE."""
        del self._owners[page_id]
        self._given_back.append(page_id)
        return self.stands_no_more(page_id)

    def adopt(self, node: PageNode) -> None:
        """Make the tree an owner of a page, which somebody holds. O(1)."""
        self._owners[node.page_id] += 1
        self.nodes[node.page_id] = node

    def leave(self, node: PageNode) -> None:
        """Take the tree from a page's owners; without another it is free. O(log(tails))."""
        del self.nodes[node.page_id]
        self._owners[node.page_id] -= 1
        if not self._owners[node.page_id]:
            self.num_evictable -= 1
            self.take_out(node)
            self._free(node.page_id)

    def stand_in(self, page_id: int, tree_page: int) -> None:
        before = self.stands_no_more(page_id)
        self._stands_for[page_id] = tree_page
        self.hold_one(tree_page)
        self.drop_one(before)

    def stands_no_more(self, page_id: int) -> int:
        """What ``page_id`` stood in for, which is the caller's to drop, or NULL_PAGE. O(1)."""
        return self._stands_for.pop(page_id, NULL_PAGE)

    # --- the order of eviction ---------------------------------------------------------

    def first_tail(self) -> PageNode | None:
        """What is evicted next, or None. O(1)."""
        return self.tails[0] if self.tails else None

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

    # --- looking -----------------------------------------------------------------------

    def count(self, page_id: int) -> int:
        return self._owners.get(page_id, 0)

    def counts_of(self, page_ids: PageIds) -> NDArray[np.int32]:
        return np.array([self.count(page_id) for page_id in page_ids.tolist()], dtype=np.int32)

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

    def stand_ins(self) -> dict[int, int]:
        return dict(sorted(self._stands_for.items()))

    @property
    def nbytes(self) -> int:
        """Host bytes of nodes, keys and tables, without integers. Complexity: O(pages)."""
        tables = (self.nodes, self._owners, self._given_back, self._stands_for)
        nodes = ((node, node.key, node.children) for node in self.nodes.values())
        return sum(map(sys.getsizeof, itertools.chain(tables, *nodes)))
