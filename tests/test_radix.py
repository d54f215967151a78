"""The tree by itself: exact to the token, fair to the old, no deeper in Python than a loop."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache.compiled_tree import CompiledPool, CompiledTree
from radixkv.cache.plain_pool import PlainPool
from radixkv.cache.plain_tree import PlainTree
from radixkv.cache.tree import (
    MAX_TOKEN_ID,
    common_prefix,
    decode_tokens,
    encode_tokens,
)
from radixkv.cache.tree_choice import make_tree

runs = st.lists(st.integers(0, 3), max_size=300)


class Owner:
    """Inserts as a lease does: holds what it matched, gives its pages back after."""

    plain = False
    checked = True

    def __init__(self, page_size: int, num_pages: int, eviction: str = "lru") -> None:
        self.tree = make_tree(page_size, num_pages, eviction, plain=self.plain)
        self.pool = self.tree.pool

    def insert(self, token_ids: list[int], namespace: Hashable = None) -> list[int]:
        tokens = encode_tokens(token_ids)
        page_ids, _, _ = self.tree.acquire(tokens, tokens.size, namespace)
        self.tree.insert(tokens, page_ids, namespace)
        self.pool.drop(page_ids)
        if self.checked:
            self.tree.check()
        return page_ids.tolist()

    def match(self, token_ids: list[int], namespace: Hashable = None) -> int:
        return self.tree.match(encode_tokens(token_ids), namespace).num_tokens


@pytest.fixture(autouse=True, params=["compiled", "plain"])
def each_tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs on the compiled tree and on the plain one."""
    monkeypatch.setattr(Owner, "plain", request.param == "plain")


def test_the_tree_is_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PlainTree if Owner.plain else CompiledTree
    assert type(Owner(4, 8).tree) is kind
    monkeypatch.setenv("RADIXKV_PLAIN_TREE", str(int(Owner.plain)))
    assert type(make_tree(4, 8)) is kind


@given(runs, runs)
def test_common_prefix_is_the_first_difference(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    assert common_prefix(encode_tokens(a), encode_tokens(b)) == expected


@given(st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=20))
def test_every_container_gives_the_same_tokens(ids: list[int]) -> None:
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
    encode = Owner(4, 8).tree.encode
    for value in given_ids:
        tokens = encode(value)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == ids
        assert not np.shares_memory(tokens, value) if isinstance(value, np.ndarray) else True


@pytest.mark.parametrize(
    ("bad", "kind", "says"),
    [
        ([1, -1], ValueError, "-1"),
        ([2**31], ValueError, "2147483648"),
        ([2**40], ValueError, "1099511627776"),
        (np.array([3, -7]), ValueError, "-7"),
        (np.array([3, 2**31]), ValueError, "2147483648"),
        (np.array([3, 2**32]), ValueError, "4294967296"),
        (np.array([3, -(2**63)]), ValueError, "-9223372036854775808"),
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
        Owner(4, 8).tree.encode(bad)
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
    tree = make_tree(1, 30_000, plain=Owner.plain)
    pool = tree.pool
    ids = list(range(1, 5001))

    def put(token_ids: list[int]) -> None:
        tokens = encode_tokens(token_ids)
        pages, _, _ = tree.acquire(tokens, tokens.size)
        tree.insert(tokens, pages)
        pool.drop(pages)

    for i in range(100, 5001, 100):
        put(ids[:i])
    assert tree.num_nodes == 1
    for i in range(10, 1501, 10):  # a sibling every ten levels, one below the other
        put([*ids[:i], 7_000_000])
    tree.check()
    assert tree.match(encode_tokens(ids)).num_tokens == 5000
    assert len(list(tree.nodes(tree.roots[None]))) == tree.num_nodes
    assert tree.evict(30_000) == 5150
    assert tree.num_nodes == 0
    assert not tree.roots


def test_the_least_recently_used_tail_goes_first_and_prefixes_outlive_suffixes() -> None:
    owner = Owner(2, 16)
    owner.insert([1, 1, 2, 2, 3, 3])
    owner.insert([5, 5, 6, 6])
    owner.tree.touch(owner.tree.match(encode_tokens([1, 1, 2, 2, 3, 3])).page_ids)
    assert owner.tree.evict(1) == 1
    assert owner.match([5, 5, 6, 6]) == 2
    assert owner.tree.evict(2) == 2
    assert owner.match([5, 5, 6, 6]) == 0
    assert owner.match([1, 1, 2, 2, 3, 3]) == 4


def test_a_partial_hit_keeps_what_it_used_and_no_more() -> None:
    owner = Owner(1, 16)
    owner.insert([1, 2, 3, 4, 5, 6])
    owner.insert([9, 9, 9])
    owner.tree.touch(owner.tree.match(encode_tokens([1, 2])).page_ids)
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
    lfu.insert([4])
    lfu.insert([4, 5])
    lfu.insert([6])
    lfu.tree.insert(encode_tokens([4, 5]), lfu.tree.acquire(encode_tokens([4, 5]), 2)[0])
    lfu.pool.drop(lfu.tree.match(encode_tokens([4, 5])).page_ids)
    lfu.tree.credit(lfu.tree.end_page, 9)  # as many uses more, of 5 and of 4 before it
    lfu.tree.check()
    assert sorted(n.num_hits > 9 for n in lfu.tree.nodes(lfu.tree.roots[None]))[-2:] == [True] * 2
    lfu.tree.evict(2)
    assert (lfu.match([1]), lfu.match([6]), lfu.match([4, 5])) == (0, 0, 2)
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


def num_queued(owner: Owner) -> int:
    """Pages among which an eviction chooses."""
    if isinstance(owner.pool, CompiledPool):
        return int(owner.pool.counts[owner.pool.kernel.NUM_QUEUED])
    assert isinstance(owner.pool, PlainPool)
    return len(owner.pool.tails)


def test_eviction_looks_at_no_held_leaf() -> None:
    """Held leaves are not in the queue at all, and come back to it as they are given back."""
    owner = Owner(1, 3000, "lfu")
    held = [owner.pool.allocate(1) for _ in range(1000)]
    for i, page in enumerate(held):
        owner.tree.insert(encode_tokens([10 + i]), page)
    for i in range(1000):
        page = owner.pool.allocate(1)
        owner.tree.insert(encode_tokens([100_000 + i]), page)
        owner.pool.drop(page)
    assert num_queued(owner) == 1000
    assert owner.tree.evict(1) == 1
    assert owner.tree.evict(5000) == 999
    assert owner.tree.evict(1) == 0
    for page in held:
        owner.pool.drop(page)
    owner.tree.check()
    assert owner.tree.evict(5000) == 1000


def test_what_is_given_back_late_goes_in_the_turn_of_its_last_use() -> None:
    owner = Owner(1, 16)
    held = owner.pool.allocate(3)
    owner.tree.insert(encode_tokens([1, 2, 3]), held)
    newer = np.array(owner.insert([7, 8]), dtype=np.int64)
    owner.pool.drop(held[1:])
    owner.tree.check()
    owner.pool.hold(newer)
    owner.pool.drop(held[:1])
    owner.tree.check()
    owner.pool.drop(newer)
    for left in (2, 1, 0):
        assert owner.tree.evict(1) == 1
        owner.tree.check()
        assert (owner.match([1, 2, 3]), owner.match([7, 8])) == (left, 2)
    assert owner.tree.evict(9) == 2


def test_pages_are_handed_out_again_in_the_order_in_which_they_were_given_back() -> None:
    owner = Owner(2, 12)
    first, second = (owner.insert([i] * 6) for i in (1, 2))
    third = owner.insert([1, 1, 3, 3, 3])
    assert [first, second, third] == [[1, 2, 3], [4, 5, 6], [1, 7, 8]]
    assert owner.tree.clear(None) == 8  # the last sibling first, then what follows it
    assert owner.pool.allocate(12).tolist() == [3, 2, 8, 7, 1, 6, 5, 4, 9, 10, 11, 12]


def test_namespaces_that_are_equal_but_of_different_types_are_apart() -> None:
    owner = Owner(2, 64)
    names = [1, True, 1.0, ("a", 1), ("a", True), "1", b"1", None, (None,), ()]
    for i, name in enumerate(names):
        assert owner.match([1, 2, 3], name) == 0
        owner.insert([1, 2, 3], name)
        assert owner.match([1, 2, 3], name) == 3
        assert len(owner.tree.roots) == i + 1
    assert owner.tree.clear(1) == 2
    assert [owner.match([1, 2, 3], n) for n in names] == [0] + [3] * (len(names) - 1)


def test_namespaces_come_and_go_in_any_number() -> None:
    owner = Owner(1, 300)
    owner.checked = False
    for i in range(200):  # more than there are rows for at first
        owner.insert([i, i + 1], f"tenant {i}")
    assert sorted(owner.tree.roots) == sorted(f"tenant {i}" for i in range(50, 200))
    owner.tree.evict(120)
    assert sorted(owner.tree.roots) == sorted(f"tenant {i}" for i in range(110, 200))
    owner.tree.check()
    for i in range(500):
        owner.insert([i], f"another {i}")
    owner.tree.check()


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
