"""What only the arrays of the compiled tree have: a list and a heap, treaps, rows for roots."""

from __future__ import annotations

from typing import Any

import numpy as np

from radixkv.cache.compiled_tree import CompiledPool, CompiledTree
from radixkv.cache.pool import load_kernel
from radixkv.cache.tree import EXPIRED, Root, encode_tokens

kernel: Any = load_kernel()


def make(page_size: int, num_pages: int, eviction: str = "lru") -> CompiledTree:
    return CompiledTree(page_size, CompiledPool(num_pages, kernel), eviction)


def put(tree: CompiledTree, token_ids: list[int], namespace: str | None = None) -> np.ndarray:
    tokens = encode_tokens(token_ids)
    pages, _, _ = tree.acquire(tokens, tokens.size, namespace)
    tree.insert(tokens, pages, namespace)
    tree.pool.drop(pages)
    return pages


def test_the_kernel_and_the_face_agree_on_what_has_expired() -> None:
    assert kernel.EXPIRED == EXPIRED


def test_what_is_given_back_late_stands_in_the_heap() -> None:
    """Given back after newer pages it stands in the heap; those before it may be in the list."""
    tree = make(1, 16)
    pool = tree.pool
    held = pool.allocate(3)
    tree.insert(encode_tokens([1, 2, 3]), held)
    newer = put(tree, [7, 8])
    pool.drop(held[1:])  # the leaf goes to the heap; the page before it is in neither
    tree.check()
    assert pool.counts[kernel.NUM_QUEUED] == 1
    assert pool.links[held, kernel.QUEUED].tolist() == [0, 0, 1]
    pool.hold(newer)  # the list is empty
    pool.drop(held[:1])  # and takes the first page, which is as old as those after it
    tree.check()
    assert pool.links[held, kernel.QUEUED].tolist() == [kernel.IN_LIST, 0, 1]


def test_siblings_are_found_in_a_tree_of_logarithmic_depth() -> None:
    """Thousands of siblings that begin alike: the way down to any of them is short."""
    count = 20_000
    tree = make(4, count + 1)
    links = tree.pool.links
    order = np.random.default_rng(0).permutation(count).tolist()
    half = count // 2
    for i in sorted(order[:half]) + order[half:]:  # ascending ones are the worst for a tree
        put(tree, [1, 2, i, 3])
    root: Root = tree.roots[None]
    depth = {root.last_page: 0}
    stack = [links.item(root.last_page, kernel.CHILDREN)]
    depth[stack[0]] = 1
    while stack:
        page = stack.pop()
        for side in (kernel.LEFT, kernel.RIGHT):
            below = links.item(page, side)
            if below:
                depth[below] = depth[page] + 1
                stack.append(below)
    assert len(depth) == count + 1
    assert max(depth.values()) <= 50  # a random search tree of so many: 34 or so
    assert tree.match(encode_tokens([1, 2, order[5], 9])).num_tokens == 3


def test_rows_of_namespaces_that_are_gone_are_used_again() -> None:
    tree = make(1, 300)
    for i in range(200):  # more than there are rows for at first
        put(tree, [i, i + 1], f"tenant {i}")
    tree.evict(120)
    rows = len(tree.pool.links)
    for i in range(500):
        put(tree, [i], f"another {i}")
    assert len(tree.pool.links) <= 2 * rows
    tree.check()
