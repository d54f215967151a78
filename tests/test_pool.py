"""Pages: all or nothing, counted, and copied whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixkv import CapacityError, KVConfig, KVSpec, PrefixCache
from radixkv.attention.layout import KVCodec
from radixkv.cache.pool import PageStorage, capacity_pages
from radixkv.cache.tree import RadixTree, encode_tokens
from radixkv.cache.tree_choice import make_tree


def test_allocation_is_all_or_nothing_and_never_the_reserved_page() -> None:
    pool = make_tree(16, 3).pool
    with pytest.raises(CapacityError, match="asked for 4, 3 of 3"):
        pool.allocate(4)
    pages = pool.allocate(3)
    assert sorted(pages.tolist()) == [1, 2, 3]
    with pytest.raises(CapacityError):
        pool.allocate(1)
    pool.hold(pages[:1])
    pool.drop(pages)
    assert pool.num_free == 2
    pool.drop(pages[:1])
    assert pool.num_free == 3
    assert sorted(pool.free_pages().tolist()) == [1, 2, 3]
    assert pool.allocate(0).size == 0


def tree_of(single_tokens: list[int], num_pages: int, plain: bool) -> RadixTree:
    tree = make_tree(1, num_pages, plain=plain)
    for token in single_tokens:
        tree.insert(encode_tokens([token]), tree.pool.allocate(1))
    return tree


@pytest.mark.parametrize("plain", [False, True])
def test_evictable_is_what_the_tree_alone_owns(plain: bool) -> None:
    tree = tree_of([1, 2, 3], 4, plain)
    pool = tree.pool
    pages = np.array([1, 2, 3])
    assert (pool.num_evictable, pool.num_available) == (0, 1)
    pool.drop(pages[1:])
    assert (pool.num_evictable, pool.num_available) == (2, 3)
    pool.hold(pages[2:])
    assert pool.num_evictable == 1
    assert tree.evict(5) == 1
    assert (pool.num_evictable, pool.num_free) == (0, 2)
    assert tree.clear(None) == 0
    pool.drop(np.array([1, 3]))
    assert pool.num_free == 4


@pytest.mark.parametrize("plain", [False, True])
def test_a_stand_in_holds_until_the_duplicate_is_gone(plain: bool) -> None:
    pool = tree_of([1, 2], 4, plain).pool
    duplicate, third = (pool.allocate(1) for _ in range(2))
    pool.stand_in(int(duplicate[0]), 1)
    pool.drop(np.array([1]))
    assert pool.num_evictable == 0
    pool.stand_in(int(duplicate[0]), 2)  # another page: the one before is let go
    assert pool.stand_ins() == {int(duplicate[0]): 2}
    assert pool.num_evictable == 1
    pool.drop(np.array([2]))
    pool.drop(duplicate)
    assert (pool.num_evictable, pool.num_free) == (2, 1)
    pool.drop(third)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp8_e5m2", "int4", "model"])
@pytest.mark.parametrize("v_dtype", [None, "int8", "model"])
def test_a_page_is_copied_with_its_scales_in_all_layers(dtype: str, v_dtype: str | None) -> None:
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype=torch.bfloat16)
    codec = KVCodec(spec, KVConfig(dtype=dtype, v_dtype=v_dtype, page_size=4))
    storage = PageStorage(codec, 4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for tensor in storage.pages:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
    before = [tensor.view(torch.uint8).clone() for tensor in storage.pages]
    storage.copy_page(2, 3, 3)
    for tensor, old in zip(storage.pages, before, strict=True):
        now = tensor.view(torch.uint8)
        assert torch.equal(now[:, 3, :, :3], old[:, 2, :, :3])
        assert torch.equal(now[:, 3, :, 3:], old[:, 3, :, 3:])
        assert torch.equal(now[:, :3], old[:, :3])
        assert torch.equal(now[:, 4:], old[:, 4:])


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [("int8", 66), ("fp8", 66), ("int4", 36), ("model", 256)]
)
def test_bytes_are_what_the_format_says(dtype: str, row_bytes: int) -> None:
    """QNT-6: pages hold codes of the format, no wider copy lies beside them, hits add none."""
    spec = KVSpec(num_layers=2, num_kv_heads=3, head_dim=64)
    config = KVConfig(dtype=dtype, page_size=16, capacity="1MiB", rotate="none")
    cache = PrefixCache(spec, config, backend="torch")
    stats = cache.stats()
    assert stats.bytes_per_token == 2 * 3 * 2 * row_bytes
    assert stats.pages_total == 2**20 // (16 * stats.bytes_per_token)
    assert stats.capacity_bytes == stats.pages_total * 16 * stats.bytes_per_token
    assert cache.storage.nbytes() == (stats.pages_total + 1) * 16 * stats.bytes_per_token
    expected = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
    assert cache.layer(0).k_pages.dtype == expected.get(dtype, torch.float32)
    rows = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(0))
    q = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(1))
    with cache.acquire(list(range(40))) as lease:
        for layer in range(2):
            lease.write(layer, rows, rows)
        out = lease.attend(0, q)
        lease.commit()
    used = cache.stats().pages_total - cache.stats().pages_free
    with cache.acquire(list(range(40))) as lease:
        assert cache.stats().pages_total - cache.stats().pages_free == used + 1
    causal = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, rows, rows)), is_causal=True
    ).transpose(0, 1)
    error = (out - causal).abs().max()
    assert error < (1e-5 if dtype == "model" else 0.5)
    assert (error > 1e-4) == (dtype != "model")  # quantization happens


def test_too_small_for_one_page_says_what_one_page_needs() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4)
    with pytest.raises(ValueError, match="at least 512 bytes"):
        PrefixCache(spec, KVConfig(dtype="model", capacity=511))
    assert PrefixCache(spec, KVConfig(dtype="model", capacity=512)).pool.num_pages == 1
    assert capacity_pages(1023, 512, "") == 1


def test_fresh_memory_is_poisoned_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_POISON", "1")
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4)
    layer = PrefixCache(spec, KVConfig(dtype="int8", capacity=4096)).layer(0)
    assert bool((layer.k_pages[1:] == -128).all())
    assert bool(layer.k_scale[1:].isnan().all())
    assert not bool(layer.k_pages[0].any())
    assert np.isfinite(layer.k_scale[0].float().numpy()).all()
