"""Which of the two trees a cache has: the choice is made here alone."""

from __future__ import annotations

from radixkv.cache.compiled_tree import CompiledPool, CompiledTree
from radixkv.cache.plain_pool import PlainPool
from radixkv.cache.plain_tree import PlainTree
from radixkv.cache.pool import load_kernel, plain_is_wanted
from radixkv.cache.tree import RadixTree


def make_tree(
    page_size: int, num_pages: int, eviction: str = "lru", *, plain: bool | None = None
) -> RadixTree:
    """An empty tree over pages of its own, which are its ``pool``.

    Args:
        page_size: tokens of a page.
        num_pages: pages that can be used.
        eviction: which tail goes first: ``"lru"``, ``"lfu"`` or ``"priority"``.
        plain: the one that is to be read, not the compiled one. None is where there is no Numba, or
            where RADIXKV_PLAIN_TREE=1 is in the environment.
    Raises:
        ImportError: the compiled one was asked for, and Numba is not installed.
    """
    kernel = None if plain or (plain is None and plain_is_wanted()) else load_kernel()
    if kernel is not None:
        return CompiledTree(page_size, CompiledPool(num_pages, kernel), eviction)
    if plain is False:
        raise ImportError("plain: expected Numba for the compiled tree, found none; install numba")
    return PlainTree(page_size, PlainPool(num_pages, eviction))
