"""A cache and its twin on the other tree: what is asked of one is asked of both, in one call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from radixkv.attention.layout import KVSpec, LayerPages
from radixkv.cache.core import CacheCore
from radixkv.cache.lease import Lease
from radixkv.cache.pin import Pin
from radixkv.cache.pool import PagePool, PageStorage, load_kernel
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tree import RadixTree
from radixkv.config import KVConfig
from radixkv.errors import CapacityError


def cache_on(plain: bool, spec: KVSpec, config: KVConfig) -> PrefixCache:
    """A cache on the plain tree, or on the compiled one where Numba is installed."""
    before = os.environ.get("RADIXKV_PLAIN_TREE", "0")
    os.environ["RADIXKV_PLAIN_TREE"] = str(int(plain))
    try:
        return PrefixCache(spec, config, backend="torch")
    finally:
        os.environ["RADIXKV_PLAIN_TREE"] = before


def mirrored_cache(spec: KVSpec, config: KVConfig) -> Any:
    """A cache on the plain tree beside one on the compiled tree; alone where there is no Numba."""
    plain = cache_on(True, spec, config)
    return plain if load_kernel() is None else Mirror(plain, cache_on(False, spec, config))


class Mirror:
    """An object and its twin. They answer alike, or AssertionError; one answer is returned.

    Leases and pins come as mirrors themselves. Of tensors, pools and trees the first one's are
    given: `compare` looks into the others.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self.__dict__["pair"] = (first, second)

    def __getattr__(self, name: str) -> Any:
        if callable(getattr(type(self.pair[0]), name, None)):
            return functools.partial(self._call, name)
        return self.ask(lambda one: getattr(one, name))

    def __setattr__(self, name: str, value: Any) -> None:
        for one in self.pair:
            setattr(one, name, value)

    def _call(self, name: str, *args: Any, **keywords: Any) -> Any:
        return self.ask(lambda one: getattr(one, name)(*args, **keywords))

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """The call's answer, or its CapacityError, of both."""
        answers, errors = [], []
        for one in self.pair:
            try:
                answers.append(call(one))
            except CapacityError as error:
                errors.append(error)
        if errors:
            texts = [str(error) for error in errors]
            assert len(texts) == 2 and texts[0] == texts[1], (texts, answers)
            raise errors[0]
        first, second = answers
        if isinstance(first, (CacheCore, Lease, Pin)):
            return Mirror(first, second)
        if not isinstance(first, (PagePool, RadixTree, PageStorage, LayerPages)):
            assert _plain(first) == _plain(second), f"{first!r:.2000}\n{second!r:.2000}"
        return first


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def compare(cache: Any) -> None:
    """Everything that both caches of a mirror say of themselves; each is checked first."""
    if not isinstance(cache, Mirror):
        cache.check()
        return
    cache.check()
    cache.stats()

    def state(one: PrefixCache) -> tuple[object, ...]:
        pool, tree = one.pool, one.tree
        counts = (pool.num_free, pool.num_evictable, tree.clock, tree.room, tree.end_page)
        pages = (pool.ref_count.tolist(), pool.in_tree.tolist(), pool.stand_ins())
        return counts, pages, dump(tree)

    cache.ask(state)


def dump(tree: RadixTree) -> list[tuple[object, ...]]:
    """Every page of a tree: where it hangs, what it holds, and when it goes."""
    out: list[tuple[object, ...]] = []
    for root in tree.roots.values():
        out.append((root.namespace, tree.held_below(root)))
        stack = [(0, page) for page in tree.child_pages(root.last_page)]
        while stack:
            parent, page = stack.pop()
            below = tree.child_pages(page)
            tokens = tree.tokens_of(page)
            assert tokens.dtype == np.int32
            out.append(
                (parent, page, tokens.tolist(), tree.policy_key(page), tree.expires_of(page), below)
            )
            stack += [(page, child) for child in below]
    return out
