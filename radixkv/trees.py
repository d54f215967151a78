"""Which of the two trees a cache has: the choice is made here alone."""

from __future__ import annotations

from radixkv.compiled_tree import CompiledPool, CompiledTree
from radixkv.plain_tree import PlainPool, PlainTree
from radixkv.pool import load_kernel, plain_is_wanted
from radixkv.radix import RadixTree


def make_tree(
    page_size: int, num_pages: int, eviction: str = "lru", *, plain: bool | None = None
) -> RadixTree:
    """An empty tree over pages of its own, which are its ``pool``.

    Args:
        page_size: tokens of a page.
        num_pages: pages that can be used.
        eviction: which tail goes first: ``"lru"``, ``"lfu"`` or ``"priority"``.
        plain: the plain tree. None takes it where RADIXKV_PLAIN_TREE=1 is in the environment.
    """
    if plain_is_wanted() if plain is None else plain:
        return PlainTree(page_size, PlainPool(num_pages, eviction))
    kernel = load_kernel()
    return CompiledTree(page_size, CompiledPool(num_pages, kernel), eviction)
