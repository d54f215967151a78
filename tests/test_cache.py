"""Leases, pins and the reported faults, each with the right value."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fuzz.driver import run_bytes
from radixkv import (
    CacheInvariantError,
    CapacityError,
    KVConfig,
    KVSpec,
    NonFiniteError,
    Pin,
    PrefixCache,
)
from radixkv.bench.cache import TRACES, run_growth, run_trace, run_turns

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=4)


def make(
    page_size: int = 4, num_pages: int = 8, dtype: str = "model", **options: Any
) -> PrefixCache:
    probe = PrefixCache(SPEC, KVConfig(dtype=dtype, page_size=page_size, capacity="1MiB"))
    capacity = probe.codec.bytes_per_page * num_pages
    config = KVConfig(dtype=dtype, page_size=page_size, capacity=capacity, **options)
    return PrefixCache(SPEC, config, backend="torch")


def rows(token_ids: list[int], start: int = 0) -> torch.Tensor:
    """K and V that identify tokens and positions."""
    values = [[t, i, t * i % 7, 1] for i, t in enumerate(token_ids)][start:]
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 4)


def fill(lease: Any, commit: bool = True) -> None:
    ids = lease.token_ids.tolist()
    for layer in range(2):
        part = rows(ids, lease._written[layer])
        lease.write(layer, part, part)
    if commit:
        lease.commit()


def put(cache: PrefixCache, token_ids: list[int], **options: Any) -> None:
    with cache.acquire(token_ids, **options) as lease:
        fill(lease)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_whole_prompt_that_is_cached_leaves_one_token_to_run(page_size: int) -> None:
    """HIT-1, for every length from 1 to 3 pages and 1."""
    for length in range(1, 3 * page_size + 2):
        cache = make(page_size, 16)
        ids = list(range(10, 10 + length))
        put(cache, ids)
        used = cache.stats().pages_cached
        for _ in range(3):
            with cache.acquire(ids) as lease:
                assert lease.num_cached == length - 1
                assert lease.slot_mapping.numel() == 1
                fill(lease)
            cache.check()
            assert cache.stats().pages_cached == used  # no second copy of the last page
        with cache.acquire(ids, full=True) as lease:
            assert lease.num_cached == length
            assert lease.slot_mapping.numel() == 0
        cache.evict(1000)
        assert cache.stats().pages_free == 16


@pytest.mark.parametrize("page_size", [1, 4])
def test_only_what_was_written_is_published(page_size: int) -> None:
    """HIT-6: prompt of 5, 4 sampled; the last sampled token has no KV, so 8 are stored."""
    cache = make(page_size, 20)
    with cache.acquire([1, 2, 3, 4, 5]) as lease:
        fill(lease, commit=False)
        for token in (6, 7, 8):
            lease.extend([token])
            fill(lease, commit=False)
        lease.extend([9])
        lease.commit()
        assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) == 8
    with cache.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]) as lease:
        assert lease.num_cached == 8
    cache.check()
    stats = cache.stats()
    assert stats.pages_free + stats.pages_cached == 20


@pytest.mark.parametrize("where", ["leaf", "inner", "split while held"])
def test_held_pages_outlive_any_pressure(where: str) -> None:
    """POOL-2."""
    cache = make(2, 12)
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    put(cache, ids)
    if where == "inner":
        put(cache, [*ids, 9, 9])
        put(cache, [*ids, 5, 5])
    lease = cache.acquire(ids, full=True)
    kept = [cache.layer(i).k_pages[lease.page_ids].clone() for i in range(2)]
    if where == "split while held":
        put(cache, [1, 2, 3, 4, 9, 9])
    for i in range(40):
        put(cache, [100 + i, 7, 8, 9])
    cache.check()
    for layer in range(2):
        assert torch.equal(cache.layer(layer).k_pages[lease.page_ids], kept[layer])
    lease.release()
    cache.check()
    cache.evict(1000)
    assert cache.stats().pages_free == 12
    assert not cache.pool.ref_count.any()


def test_counters_equal_a_recount_through_2000_operations() -> None:
    """POOL-3."""
    cache, rand = make(2, 32, pin_share=0.5), random.Random(3)
    held: list[Any] = []
    for _ in range(2000):
        ids = [rand.randrange(4) for _ in range(rand.randint(1, 20))]
        action = rand.randrange(5)
        if action < 2:
            try:
                put(cache, ids)
            except CapacityError:
                assert held
        elif action == 2 and len(held) < 4:
            take = cache.pin if rand.random() < 0.5 else cache.acquire
            try:
                held.append(take(ids[:6]))
            except CapacityError:
                assert held
        elif action == 3 and held:
            done = held.pop(rand.randrange(len(held)))
            done.unpin() if isinstance(done, Pin) else done.release()
        else:
            want, evictable = rand.randrange(12), cache.tree.num_tokens
            pages, evicted = cache.stats().pages_cached, cache.evict(want)
            assert evicted >= want or cache.stats().pages_cached == 0
            assert evicted <= evictable
            assert pages >= cache.stats().pages_cached
        cache.check()
        stats = cache.stats()
        parts = (stats.pages_free, stats.pages_cached, stats.pages_pinned, stats.pages_private)
        assert sum(parts) == 32
        assert min(parts) >= 0
    for left in held:
        left.unpin() if isinstance(left, Pin) else left.release()


@pytest.mark.parametrize("dtype", ["model", "int8"])
def test_branches_that_part_inside_a_page_equal_their_own_runs(dtype: str) -> None:
    """BEAM-5: prompt of 6 at page size 4, three branches, one dropped, one forked twice."""
    cache = make(4, 16, dtype)
    prompt = [1, 2, 3, 4, 5, 6]
    query = torch.randn(1, 1, 4, generator=torch.Generator().manual_seed(2))

    def alone(token_ids: list[int]) -> torch.Tensor:
        other = make(4, 16, dtype)
        with other.acquire(token_ids) as lease:
            fill(lease, commit=False)
            return lease.attend(1, query)

    first = cache.acquire(prompt)
    fill(first, commit=False)
    branches = [first, first.fork(), first.fork()]
    shared = first.page_ids.tolist()
    assert cache.pool.ref_count[shared].tolist() == [3, 3]
    for i, branch in enumerate(branches):
        branch.extend([50 + i])
        fill(branch, commit=False)
    pages = [branch.page_ids.tolist() for branch in branches]
    assert cache.pool.ref_count[shared].tolist() == [3, 1]  # the last writer kept the original
    assert [p[0] for p in pages] == [shared[0]] * 3
    assert len({p[1] for p in pages}) == 3
    assert cache.stats().cow_copies == 2
    branches.pop(1).release()
    branches += [branches[0].fork(), branches[0].fork()]
    for i, branch in enumerate(branches):
        branch.extend([70 + i])
        fill(branch, commit=False)
        assert torch.equal(branch.attend(1, query), alone(branch.token_ids.tolist()))
    outs = cache.attend_batch(1, query.expand(4, 1, 4), branches)
    for out, branch in zip(outs, branches, strict=True):
        assert torch.allclose(out[None], alone(branch.token_ids.tolist()), atol=1e-6)
    for branch in branches:
        branch.release()
    cache.check()
    assert cache.stats().pages_free == 16


def test_a_failed_call_changes_nothing() -> None:
    cache = make(2, 4, pin_share=0.3)
    put(cache, [1, 2, 3, 4])
    lease = cache.acquire([1, 2, 9])
    before = (cache.render(), cache.pool.ref_count.tobytes(), cache.tree.clock, cache.stats())
    with pytest.raises(CapacityError, match="acquire: needs 4 pages"):
        cache.acquire([5, 6, 7, 8, 9, 10, 11])
    with pytest.raises(CapacityError, match="extend: needs 3 pages"):
        lease.extend([1, 2, 3, 4, 5, 6])
    with pytest.raises(CapacityError, match="needs 2 more pages"):
        cache.pin([1, 2, 3, 4])
    bad = rows([1, 2, 9], 2)
    bad[0, 0, 1] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 1, KV head 0"):
        lease.write(1, bad, bad)
    with pytest.raises(ValueError, match=r"expected shape \[1, 1, 4\]"):
        lease.write(0, rows([1, 2]), rows([1, 2]))
    with pytest.raises(ValueError, match="have KV in layer 0"):
        lease.attend(0, bad)
    for wrong in ([], [-1], [True], [1.5], [2**31], "text"):
        with pytest.raises((ValueError, TypeError), match="token_ids"):
            cache.acquire(wrong)
    with pytest.raises(TypeError, match="hash"):
        cache.acquire([1], namespace=[])
    assert lease.token_ids.tolist() == [1, 2, 9]
    after = (cache.render(), cache.pool.ref_count.tobytes(), cache.tree.clock, cache.stats())
    assert after == before
    lease.release()
    cache.check()


@pytest.mark.parametrize(
    ("count", "kind"), [(-1, ValueError), (4, ValueError), (True, TypeError), (1.0, TypeError)]
)
def test_a_commit_of_more_than_there_is_or_of_no_number_is_refused(
    count: int, kind: type[Exception]
) -> None:
    cache = make(2, 4)
    with cache.acquire([1, 2, 3]) as lease:
        with pytest.raises(kind, match="num_tokens: expected an integer from 0 to 3"):
            lease.commit(count)
        assert (lease.num_written, cache.match([1, 2, 3])) == (0, 0)
        lease.commit(np.int64(2))  # an integer of another type is one
        assert (lease.num_written, cache.match([1, 2, 3])) == (2, 2)


@pytest.mark.parametrize("bad", [-1, 4, True, 1.0])
def test_how_much_is_written_or_kept_is_from_none_to_all(bad: int) -> None:
    cache = make(2, 4)
    with cache.acquire([1, 2, 3]) as lease:
        for call in (lease.mark_written, lease.truncate):
            with pytest.raises((ValueError, TypeError), match="num_tokens: expected an integer"):
                call(bad)
            assert (lease.num_written, lease.num_tokens) == (0, 3)
        lease.mark_written(2)
        lease.mark_written(0)  # what is there stays
        assert lease.num_written == 2
        lease.mark_written()
        assert lease.num_written == 3
        lease.truncate(1)
        assert (lease.num_written, lease.num_tokens) == (1, 1)
        lease.truncate(0)
        assert (lease.num_written, lease.num_tokens) == (0, 0)
        assert lease.page_ids.size == 0


def test_use_after_release_is_refused() -> None:
    cache = make()
    with cache.acquire([1, 2, 3]) as lease:
        fill(lease)
    lease.release()
    for use in (
        lambda: lease.page_ids,
        lambda: lease.slot_mapping,
        lambda: lease.slots(0, 1),
        lambda: lease.extend([1]),
        lease.fork,
        lease.commit,
        lambda: lease.truncate(1),
        lambda: lease.write(0, rows([1]), rows([1])),
        lambda: lease.attend(0, rows([1])),
        lease.__enter__,
    ):
        with pytest.raises(ValueError, match="released"):
            use()


def test_pins_hold_to_their_budget_and_end_with_their_time() -> None:
    cache = make(2, 8, pin_share=0.5)
    now = 100.0
    cache.core.now = lambda: now
    put(cache, [1, 2, 3, 4])
    put(cache, [5, 6, 7, 8, 9, 10])
    pin = cache.pin([1, 2, 3, 4], ttl=5)
    assert pin.num_tokens == 4
    cache.pin([1, 2]).unpin()
    with pytest.raises(CapacityError, match="2 of 4 are pinned"):
        cache.pin([5, 6, 7, 8, 9, 10])
    cache.evict(1000)
    assert (cache.match([1, 2, 3, 4]), cache.match([5, 6])) == (4, 0)
    now = 105.0
    assert not pin.is_active
    cache.evict(1000)
    assert cache.stats().pages_free == 8


def test_a_pinned_part_page_stays_findable_when_a_longer_one_takes_its_place() -> None:
    cache = make(4, 8, pin_share=1.0)
    put(cache, [1, 2, 3, 4, 5])
    with cache.pin([1, 2, 3, 4, 5]):
        put(cache, [1, 2, 3, 4, 5, 6, 7])
        cache.evict(1000)
        assert cache.match([1, 2, 3, 4, 5]) == 5
        cache.check()
    cache.evict(1000)
    assert cache.stats().pages_free == 8


def test_a_dropped_lease_warns_and_gives_back_also_in_the_middle_of_a_call() -> None:
    cache = make()
    lease = cache.acquire([1, 2, 3])
    dropped = [lease]
    del lease
    with pytest.warns(ResourceWarning, match="3 tokens was dropped"):
        dropped.clear()
    gc.collect()
    assert cache.stats().pages_free == 8
    inner = cache.acquire([4, 5, 6])
    evict = cache.tree.evict

    def evict_and_collect(count: int) -> int:
        inner.release()  # as a destructor run by the collector would
        with pytest.raises(RuntimeError, match="destructor"):
            cache.stats()
        return evict(count)

    cache.tree.evict = evict_and_collect  # type: ignore[method-assign]
    cache.evict(4)
    cache.tree.evict = evict  # type: ignore[method-assign]
    cache.check()
    assert cache.stats().pages_free == 8


def test_threads_share_a_cache() -> None:
    cache = make(4, 64)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rand = random.Random(seed)
        try:
            for _ in range(150):
                ids = [rand.randrange(3) for _ in range(rand.randint(1, 30))]
                with cache.acquire(ids) as lease:
                    fill(lease)
                    lease.extend([seed])
                    fill(lease)
        except BaseException as error:  # handed to the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    cache.check()
    assert cache.stats().pages_private == cache.stats().pages_pinned == 0


def test_clear_forgets_one_namespace_or_all_and_ends_their_pins() -> None:
    cache = make(2, 16)
    for namespace in (None, "a", ("b", 1)):
        put(cache, [1, 2, 3], namespace=namespace)
    pin = cache.pin([1, 2, 3], "a")
    cache.clear("a")
    assert not pin.is_active
    assert [cache.match([1, 2, 3], n) for n in (None, "a", ("b", 1))] == [3, 0, 3]
    cache.clear(None)
    assert [cache.match([1, 2, 3], n) for n in (None, ("b", 1))] == [0, 3]
    cache.clear()
    assert cache.stats().pages_free == 16


def test_namespaces_are_shown_in_stats_and_equal_ones_of_other_types_are_apart() -> None:
    cache = make(2, 32, pin_share=1.0)
    for name, length in ((None, 5), (1, 3), (True, 2), (1.0, 7)):
        put(cache, list(range(length)), namespace=name)
    pins = [cache.pin([0, 1], name) for name in (1, True)]
    shown = [(n.namespace, n.pages, n.tokens) for n in cache.stats().namespaces]
    assert [repr(n) for n, _, _ in shown] == ["None", "1", "True", "1.0"]
    assert [rest for _, *rest in shown] == [[3, 5], [2, 3], [1, 2], [4, 7]]
    assert cache.explain([0, 1, 2, 3, 4, 5, 6], True).namespace == 1.0
    cache.clear(True)
    assert [pin.is_active for pin in pins] == [True, False]
    assert [repr(n.namespace) for n in cache.stats().namespaces] == ["None", "1", "1.0"]
    assert [cache.match([0, 1, 2], name) for name in (1, True, 1.0)] == [3, 0, 3]
    cache.check()


def test_a_turn_of_an_agent_writes_into_the_edge_in_place() -> None:
    """500 turns: the tree is one node all along, and its work is the new pages'."""
    cache = make(4, 1300)
    history: list[int] = []
    for turn in range(500):
        history += [turn, turn + 1, 7, 8, 9, 3, 2, 1, 0, turn]
        with cache.acquire(history) as lease:
            assert lease.num_cached >= len(history) - 10
            before = lease.page_ids
            lease.commit(len(history))
            assert np.array_equal(lease.page_ids, before)  # nothing is a duplicate
        assert cache.tree.num_nodes == 1
    assert cache.stats().cow_copies <= 500
    cache.check()


COMPILED_DAMAGE: dict[str, Callable[[Any], None]] = {
    "an owner too many": lambda c: c.pool.links.__setitem__((1, 0), c.pool.links[1, 0] + 1),
    "tokens": lambda c: c.pool.counts.__setitem__(c.tree.kernel.NUM_TOKENS, 0),
    "evictable": lambda c: c.pool.counts.__setitem__(c.tree.kernel.NUM_EVICTABLE, 5),
    "free": lambda c: c.pool.queues.__setitem__((c.tree.kernel.FREE, 0), 1),
}
PLAIN_DAMAGE: dict[str, Callable[[Any], None]] = {
    "an owner too many": lambda c: c.pool.hold(np.array([1])),
    "an owner too few": lambda c: c.pool._owners.__setitem__(1, 0),
    "tokens": lambda c: setattr(c.tree, "num_tokens", 0),
    "evictable": lambda c: setattr(c.pool, "num_evictable", 5),
    "free": lambda c: c.pool._given_back.append(1),
    "tail": lambda c: setattr(c.pool.tails[0], "is_tail", False),
    "no tail": lambda c: c.pool.tails.clear(),
    "order": lambda c: setattr(c.pool.tails[0], "last_access", 99),
    "key": lambda c: setattr(c.pool.nodes[1], "key", b"1234"),
    "depth": lambda c: setattr(c.pool.nodes[2], "depth", 0),
    "parent": lambda c: setattr(c.pool.nodes[2], "parent", c.pool.nodes[2]),
    "stand-in": lambda c: c.pool.stand_in(1, 2),
    "children": lambda c: c.pool.nodes[1].parent.children.clear(),
    "namespace": lambda c: c.tree.roots.clear(),
    "node": lambda c: c.pool.nodes.pop(2),
}


@pytest.mark.parametrize(
    ("plain", "what"),
    [*((False, what) for what in COMPILED_DAMAGE), *((True, what) for what in PLAIN_DAMAGE)],
)
def test_check_finds_damage(plain: bool, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_PLAIN_TREE", str(int(plain)))
    cache = make()
    put(cache, [1, 2, 3, 4, 5])
    put(cache, [8, 8])
    cache.check()
    (PLAIN_DAMAGE if plain else COMPILED_DAMAGE)[what](cache)
    with pytest.raises(CacheInvariantError, match="bug in radixkv"):
        cache.check()


@pytest.mark.parametrize("trace", list(TRACES))
def test_traces_match_no_less_than_brute_force(trace: str) -> None:
    result = run_trace(trace, num_requests=60, measure_memory=False)
    assert result.baseline_tokens_matched is not None
    assert result.tokens_matched >= result.baseline_tokens_matched
    assert result.us_p50 > 0
    full = run_trace(trace, num_requests=60, capacity_tokens=8_000, baseline=False, ids="array")
    assert full.evicted_pages > 0
    assert full.host_bytes_per_token is not None


@pytest.mark.parametrize(("plain", "most"), [(False, 16), (True, 64)])
def test_a_cached_token_takes_few_bytes_of_the_host(
    plain: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RADIXKV_PLAIN_TREE", str(int(plain)))
    for trace in TRACES:
        full = run_trace(trace, num_requests=60, capacity_tokens=8_000, baseline=False, ids="array")
        assert full.host_bytes_per_token is not None
        assert full.host_bytes_per_token < most


@pytest.mark.parametrize(("plain", "most"), [(False, 16), (True, 32)])
def test_what_a_step_costs_does_not_grow_with_the_tree(
    plain: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processor time, with wide margins; `radixkv bench cache --growth` prints the figures."""
    monkeypatch.setenv("RADIXKV_PLAIN_TREE", str(int(plain)))
    small, large = run_growth(1_000), run_growth(40_000)
    assert large.nodes > 30 * small.nodes
    assert large.match_us < 3 * small.match_us
    assert large.evict_us < 3 * small.evict_us
    assert large.host_bytes_per_token < most  # with leaves of one page, too


def test_what_a_turn_costs_does_not_grow_with_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIXKV_PLAIN_TREE", "0")  # the plain one walks along the conversation
    turns = run_turns(400)
    assert np.median(turns[-100:]) < 3 * np.median(turns[:100])


def test_the_seed_corpus_runs() -> None:
    corpus = sorted((Path(__file__).parent.parent / "fuzz" / "corpus").iterdir())
    assert corpus
    for path in corpus:
        run_bytes(path.read_bytes())


def test_slots_and_tokens_agree_for_every_range() -> None:
    cache = make(4, 8)
    with cache.acquire(np.arange(10)) as lease:
        every = lease.slots().tolist()
        assert lease.slot_mapping.tolist() == every
        for start, stop in itertools.combinations_with_replacement(range(11), 2):
            assert lease.slots(start, stop).tolist() == every[start:stop]
        with pytest.raises(ValueError, match="0 <= start <= stop <= 10"):
            lease.slots(3, 11)


def test_no_thread_can_look_while_a_lease_is_half_released() -> None:
    """Its pages and itself are given up under one lock: between them `check` would not add up."""
    cache = make()
    lease = cache.acquire([1, 2, 3])
    was_free = []

    def look() -> None:
        was_free.append(cache.core.guard.lock.acquire(blocking=False))
        if was_free[-1]:
            cache.core.guard.lock.release()

    class Watched(dict[int, Any]):
        def pop(self, *args: Any) -> Any:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            return super().pop(*args)

    cache.core.leases = Watched(cache.core.leases)
    lease.release()
    assert was_free == [False]
    cache.check()
    assert cache.stats().pages_free == 8
