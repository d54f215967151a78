"""The tree by itself: exact to the token, fair to the old, no deeper in Python than a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.pool import PagePool
from radixkv.radix import (
    MAX_TOKEN_ID,
    RadixTree,
    common_prefix,
    decode_tokens,
    encode_tokens,
)

runs = st.lists(st.integers(0, 3), max_size=300)


class Owner:
    """Inserts as a lease does: holds what it matched, gives its pages back after."""

    def __init__(self, page_size: int, num_pages: int, eviction: str = "lru") -> None:
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size, self.pool, eviction)

    def insert(self, token_ids: list[int], namespace: str | None = None) -> list[int]:
        tokens = encode_tokens(token_ids)
        found = self.tree.match(tokens, namespace)
        self.pool.hold(found.page_ids)
        fresh = self.pool.allocate(-(-len(token_ids) // self.page_size) - found.page_ids.size)
        page_ids = np.concatenate([found.page_ids, fresh])
        self.tree.settle(found.node if found.child is None else found.child)
        placed = self.tree.insert(tokens, page_ids, namespace)
        self.pool.drop(page_ids)
        self.tree.check()
        return placed.page_ids.tolist()

    def match(self, token_ids: list[int], namespace: str | None = None) -> int:
        return self.tree.match(encode_tokens(token_ids), namespace).num_tokens


@given(runs, runs, st.integers(0, 3))
def test_common_prefix_is_the_first_difference(a: list[int], b: list[int], offset: int) -> None:
    offset = min(offset, len(b))
    expected = next(
        (i for i, (x, y) in enumerate(zip(a, b[offset:], strict=False)) if x != y),
        min(len(a), len(b) - offset),
    )
    found = common_prefix(encode_tokens(a), encode_tokens(b), 4 * offset)
    assert found // 4 == expected


@given(st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=20))
def test_every_container_gives_the_same_bytes_and_they_sort_as_tokens(ids: list[int]) -> None:
    expected = encode_tokens(ids)
    assert decode_tokens(expected).tolist() == ids
    given_ids = [
        tuple(ids),
        np.array(ids, dtype=np.int32),
        np.array(ids, dtype=np.int64),
        np.array(ids, dtype=np.uint64)[::1],
        np.array([0, *ids, 0])[1:-1],
        np.repeat(np.array(ids), 2)[::2],
        [np.int64(i) for i in ids],
        torch.tensor(ids),
        [torch.tensor(i) for i in ids],
    ]
    assert [encode_tokens(value) for value in given_ids] == [expected] * len(given_ids)
    other = [*ids[:-1], ids[-1] // 2]
    assert (encode_tokens(other) < expected) == (other < ids)


@pytest.mark.parametrize(
    ("bad", "kind", "says"),
    [
        ([1, -1], ValueError, "-1"),
        ([2**31], ValueError, "2147483648"),
        ([2**40], ValueError, "1099511627776"),
        (np.array([3, -7]), ValueError, "-7"),
        (np.array([-7], dtype=np.int8), ValueError, "-7"),
        (np.array([2**31], dtype=np.uint32), ValueError, "2147483648"),
        (torch.tensor([2**33]), ValueError, "8589934592"),
        ([1, True], TypeError, "True"),
        ([False], TypeError, "False"),
        ([torch.tensor(True)], TypeError, "True"),
        (np.array([True]), TypeError, "bool"),
        ([1.0], TypeError, "1.0"),
        (np.array([1.5]), TypeError, "float64"),
        (torch.tensor([0.5]), TypeError, "float32"),
        (["7"], TypeError, "'7'"),
        ([None], TypeError, "None"),
        ("text", TypeError, "str"),
        (7, TypeError, "int"),
        (np.zeros((2, 2), dtype=int), TypeError, "2 dimensions"),
    ],
)
def test_what_is_no_token_id_is_refused(bad: object, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match="token_ids") as caught:
        encode_tokens(bad)
    assert says in str(caught.value)


@pytest.mark.parametrize("shift", [2**8, 2**16, 2**24, 2**30])
def test_ids_that_differ_in_high_bits_never_match(shift: int) -> None:
    """KEY-2."""
    owner = Owner(4, 16)
    ids = [65, 66, 67, 68, 69]
    owner.insert(ids)
    assert owner.match(ids) == 5
    assert owner.match([i + shift for i in ids]) == 0
    assert owner.match([*ids[:3], ids[3] + shift]) == 3


def test_namespaces_never_share() -> None:
    """KEY-3."""
    owner = Owner(2, 32)
    for namespace in ("a", "b", None):
        assert owner.match([1, 2, 3], namespace) == 0
        owner.insert([1, 2, 3], namespace)
        assert owner.match([1, 2, 3], namespace) == 3
    assert owner.tree.clear("a") == 2
    assert [owner.match([1, 2, 3], n) for n in ("a", "b", None)] == [0, 3, 3]


def test_a_match_ends_inside_a_page_at_the_child_that_shares_most() -> None:
    owner = Owner(4, 64)
    for tail in ([1, 1, 1, 1], [1, 2, 2, 2], [1, 2, 3, 1], [3, 3, 3, 3]):
        owner.insert([9, 9, 9, 9, *tail])
    assert owner.match([9, 9, 9, 9, 1, 2, 3, 9]) == 7
    assert owner.match([9, 9, 9, 9, 1, 2]) == 6
    assert owner.match([9, 9, 9, 9, 2, 2]) == 4


def test_five_thousand_prompts_that_each_extend_the_last_need_no_recursion() -> None:
    """POOL-6: page size 1, prompt i is 1..i; an edge grows in place, branches nest."""
    pool = PagePool(30_000)
    tree = RadixTree(1, pool)
    ids = list(range(1, 5001))
    for i in range(100, 5001, 100):
        tokens = encode_tokens(ids[:i])
        found = tree.match(tokens)
        pool.hold(found.page_ids)
        pages = np.concatenate([found.page_ids, pool.allocate(i - found.page_ids.size)])
        tree.insert(tokens, pages)
        pool.drop(pages)
    assert tree.num_nodes == 1
    for i in range(1, 1501):  # a sibling at every level: 1,500 nodes, one below the other
        tokens = encode_tokens([*ids[:i], 7_000_000])
        found = tree.match(tokens)
        pool.hold(found.page_ids)
        pages = np.concatenate([found.page_ids, pool.allocate(1)])
        tree.insert(tokens, pages)
        pool.drop(pages)
    tree.check()
    assert tree.match(encode_tokens(ids)).num_tokens == 5000
    assert tree.evict(30_000) == 6500
    assert tree.num_nodes == 0
    assert not tree.roots


def test_the_least_recently_used_tail_goes_first_and_prefixes_outlive_suffixes() -> None:
    owner = Owner(2, 16)
    owner.insert([1, 1, 2, 2, 3, 3])
    owner.insert([5, 5, 6, 6])
    owner.tree.touch(owner.tree.match(encode_tokens([1, 1, 2, 2, 3, 3])))
    assert owner.tree.evict(1) == 1
    assert owner.match([5, 5, 6, 6]) == 2
    assert owner.tree.evict(2) == 2
    assert owner.match([5, 5, 6, 6]) == 0
    assert owner.match([1, 1, 2, 2, 3, 3]) == 4


def test_a_partial_hit_keeps_what_it_used_and_no_more() -> None:
    owner = Owner(1, 16)
    owner.insert([1, 2, 3, 4, 5, 6])
    owner.insert([9, 9, 9])
    owner.tree.touch(owner.tree.match(encode_tokens([1, 2])))
    owner.tree.check()
    owner.tree.evict(4)  # the tail of the first is older than the second
    assert owner.match([1, 2, 3, 4, 5, 6]) == 2
    assert owner.match([9, 9, 9]) == 3
    owner.tree.evict(3)
    assert owner.match([9, 9, 9]) == 0
    assert owner.match([1, 2]) == 2


def test_lfu_keeps_what_is_used_often_and_priority_what_is_dear() -> None:
    lfu = Owner(1, 8, "lfu")
    lfu.insert([1])
    lfu.insert([1])
    lfu.insert([2])
    lfu.tree.evict(1)
    assert (lfu.match([1]), lfu.match([2])) == (1, 0)
    dear = Owner(1, 8, "priority")
    for token, priority, expires in ((1, 5, None), (2, 1, None), (3, 9, 10.0)):
        page = dear.pool.allocate(1)
        dear.tree.insert(encode_tokens([token]), page, priority=priority, expires=expires)
        dear.pool.drop(page)
    dear.tree.expire(5.0)
    dear.tree.evict(1)
    assert [dear.match([t]) for t in (1, 2, 3)] == [1, 0, 1]
    dear.tree.expire(10.0)
    dear.tree.evict(1)
    assert [dear.match([t]) for t in (1, 2, 3)] == [1, 0, 0]


def test_eviction_looks_at_no_held_leaf() -> None:
    """Its steps are counted, not timed: held leaves are not in the ordered set at all."""
    owner = Owner(1, 3000)
    held = [owner.pool.allocate(1) for _ in range(1000)]
    for i, page in enumerate(held):
        owner.tree.insert(encode_tokens([10 + i]), page)
    for i in range(1000):
        page = owner.pool.allocate(1)
        owner.tree.insert(encode_tokens([100_000 + i]), page)
        owner.pool.drop(page)
    looks = 0
    count = owner.pool.count

    def counted(page_id: int) -> int:
        nonlocal looks
        looks += 1
        return count(page_id)

    owner.pool.count = counted  # type: ignore[method-assign]
    assert owner.tree.evict(1) == 1
    assert looks <= 2
    owner.pool.count = count  # type: ignore[method-assign]
    assert owner.tree.evict(5000) == 999
    assert owner.tree.evict(1) == 0
    for page in held:
        owner.pool.drop(page)
    owner.tree.check()
    assert owner.tree.evict(5000) == 1000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=14), st.data())
def test_the_match_is_the_longest_common_prefix(seqs: list[list[int]], data: st.DataObject) -> None:
    owner = Owner(data.draw(st.sampled_from([1, 2, 4])), 400)
    for seq in seqs:
        owner.insert(seq)
    query = data.draw(st.lists(st.integers(0, 2), max_size=16))
    expected = max(
        (
            next(
                (i for i, (x, y) in enumerate(zip(s, query, strict=False)) if x != y),
                min(len(s), len(query)),
            )
            for s in seqs
        ),
        default=0,
    )
    assert owner.match(query) == expected
