"""The plain tree answers as the compiled one, to the page id, whatever is asked of both."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import mirror, twins
from radixkv.cache.plain_node import PageNode, add_child, closest_child, num_shared
from radixkv.cache.plain_pool import PlainPool
from radixkv.cache.plain_tree import PlainTree
from radixkv.cache.tree import encode_tokens
from radixkv.config import EVICTIONS


@pytest.mark.parametrize("page_size", twins.PAGE_SIZES)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_both_trees_give_the_same_answers_after_each_step(eviction: str, page_size: int) -> None:
    """`python -m fuzz.twins` runs 20,000 steps of each."""
    twins.run_seed(page_size, page_size, eviction, 300)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600))
def test_both_trees_give_the_same_answers_to_any_calls(data: bytes) -> None:
    twins.run_bytes(data)


few_tokens = st.lists(st.integers(0, 3) | st.sampled_from([255, 256, 2**31 - 1]), max_size=4)


def key_of(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=">i4").tobytes()


@given(few_tokens, few_tokens)
def test_keys_sort_as_their_tokens_and_share_as_many(a: list[int], b: list[int]) -> None:
    assert (key_of(a) < key_of(b)) == (a < b)
    same = [x == y for x, y in zip(a, b)]
    assert num_shared(key_of(a), key_of(b)) == [*same, False].index(False)


@given(st.lists(few_tokens.filter(len)), few_tokens.filter(len))
def test_the_closest_child_is_the_one_that_a_search_through_all_finds(
    siblings: list[list[int]], query: list[int]
) -> None:
    root = PageNode(b"", -1, None, -1)
    for tokens in siblings:
        key = key_of(tokens)
        if not any(key.startswith(k) or k.startswith(key) for k in root.children):
            add_child(root, PageNode(key, 1, root, 0))
    assert list(root.children) == sorted(root.children)
    key = key_of(query)
    found, shared = closest_child(root, key)
    best = max((num_shared(k, key) for k in root.children), default=0)
    assert shared == best
    if not best:
        assert found is None
        return
    close = sorted(k for k in root.children if num_shared(k, key) == best)
    before = [k for k in close if k <= key]
    assert found is not None
    assert found.key == (before[-1] if before else close[0])


def test_a_mirror_sees_where_its_two_differ() -> None:
    twin = twins.Twins(twins.Seeded(1), 4, "lru")
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6]):
        lease = twin.cache.acquire(tokens)
        lease.commit(5)
        lease.release()
    mirror.compare(twin.cache)
    plain, compiled = twin.cache.pair
    assert isinstance(plain.tree, PlainTree)
    compiled.evict(1)
    with pytest.raises(AssertionError):
        mirror.compare(twin.cache)
    with pytest.raises(AssertionError):
        twin.cache.match([1, 2, 3, 4, 5])


def test_a_chain_of_20000_pages_is_made_shown_forgotten_and_dropped_without_recursion() -> None:
    count = 20_000
    tree = PlainTree(1, PlainPool(count))
    tokens = encode_tokens(np.arange(count))
    tree.insert(tokens, tree.pool.allocate(count))
    assert tree.num_nodes == 1
    assert "depth=19999" in repr(tree.pool.nodes[count])
    assert [node.end for node in tree.nodes(tree.roots[None])] == [count]
    tree.pool.drop(np.arange(1, count + 1))
    tree.check()
    assert tree.evict(10) == 10
    assert tree.clear(None) == count - 10
    tree.insert(tokens, tree.pool.allocate(count))
    del tree
    gc.collect()
