"""Pages that two sequences publish in turn: each found leaked once, here with the right value."""

from __future__ import annotations

from radixkv import KVConfig, KVSpec, PrefixCache


def test_a_duplicate_that_becomes_the_trees_page_frees_the_one_it_stood_in_for() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2)
    cache = PrefixCache(spec, KVConfig(dtype="model", page_size=2, capacity=320), backend="torch")
    token_ids = [0, 1, 1, 0, 2, 2, 1, 1, 2]
    with cache.acquire(token_ids) as first:
        first.commit(9)
    second = cache.acquire(token_ids)
    twin = second.fork()
    second.commit(9)  # its part-filled last page is a duplicate, which `twin` still holds
    second.release()
    twin.extend([5])  # the duplicate grows past the tree's page ...
    twin.commit(10)  # ... and takes its place
    cache.check()
    twin.release()
    stats = cache.stats()
    assert stats.pages_free == 5
    assert stats.pages_cached == 5
    cache.check()
