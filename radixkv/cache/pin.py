"""Prefixes that are kept from eviction: one of them, and all of a cache."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from contextlib import AbstractContextManager
from heapq import heappop, heappush
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from radixkv.cache.pool import PageIds, PagePool
from radixkv.errors import CapacityError
from radixkv.names import safe_repr


class PinKeeper(Protocol):
    """Whose pages a pin holds: `radixkv.cache.core.CacheCore`."""

    @property
    def guard(self) -> AbstractContextManager[Any]: ...

    def give_back(self, what: Pin) -> None: ...


class Pin:
    """A cached prefix that is not evicted until `unpin`, or until its ttl has passed.

    Attributes:
        num_tokens: tokens that it holds.
        page_ids: in which pages.
    """

    def __init__(
        self, keeper: PinKeeper, page_ids: PageIds, num_tokens: int, namespace: Hashable
    ) -> None:
        self._keeper = keeper
        self.page_ids = page_ids
        self.num_tokens = num_tokens
        self.namespace = namespace
        self._active = True

    @safe_repr
    def __repr__(self) -> str:
        state = "active" if self._active else "ended"
        return f"of {self.num_tokens:,} tokens on {self.page_ids.size:,} pages, {state}"

    @property
    def is_active(self) -> bool:
        """Whether it still holds its pages."""
        with self._keeper.guard:  # ends what has outlived its time
            return self._active

    def end(self) -> bool:
        """Note that its pages were given back; False if they were before."""
        was_active, self._active = self._active, False
        return was_active

    def unpin(self) -> None:
        """Let the pages be evicted again. Calling it again does nothing."""
        self._keeper.give_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unpin()


class Pins:
    """All pins of a cache that are active.

    Attributes:
        counts: by how many each page is held. [num_pages + 1] int32.
        timed: heap of those that end by themselves, by time.
    """

    def __init__(self, pool: PagePool, budget: int) -> None:
        self._pool = pool
        self._budget = budget  # most pages
        self._active: set[Pin] = set()
        self.timed: list[tuple[float, int, Pin]] = []
        self._ties = itertools.count()  # pins have no order
        self.counts = np.zeros(pool.num_pages + 1, dtype=np.int32)
        self.num_pages = 0

    def __iter__(self) -> Any:
        return iter(list(self._active))

    def add(self, pin: Pin, expires: float | None) -> None:
        """Hold the pin's pages.

        Raises:
            CapacityError: pins would hold more than ``KVConfig.pin_share`` of the pages.
        """
        more = int(np.count_nonzero(self.counts[pin.page_ids] == 0))
        if self.num_pages + more > self._budget:
            raise CapacityError(
                f"pin: needs {more} more pages, {self.num_pages} of {self._budget} are pinned "
                f"(the share of KVConfig.pin_share); unpin others or raise it"
            )
        self._pool.hold(pin.page_ids)
        self.counts[pin.page_ids] += 1
        self.num_pages += more
        self._active.add(pin)
        if expires is not None:
            heappush(self.timed, (expires, next(self._ties), pin))

    def end(self, pin: Pin) -> None:
        """Give the pin's pages back, unless they were."""
        if not pin.end():
            return
        self._active.discard(pin)
        self.counts[pin.page_ids] -= 1
        self.num_pages -= int(np.count_nonzero(self.counts[pin.page_ids] == 0))
        self._pool.drop(pin.page_ids)

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        while self.timed and self.timed[0][0] <= now:
            self.end(heappop(self.timed)[2])
