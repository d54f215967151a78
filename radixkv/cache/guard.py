"""The lock around every public call of a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized


class Guard:
    """The lock around a public call; first takes back pages of leases that were dropped meanwhile.

    Garbage collection can run a destructor in the middle of a call, on the same thread: what
    that gives back waits for the next call, and anything else that it asks is refused.

    What every request calls says `enter` and `leave` itself, which takes half as long as ``with``.
    """

    __slots__ = ("_pending", "_reclaim", "inside", "lock")

    def __init__(self, pending: tuple[Sized, ...], reclaim: Callable[[], None]) -> None:
        self._pending = pending  # what is not empty when there is something to take back
        self.lock = threading.RLock()
        self._reclaim = reclaim
        self.inside = False

    def enter(self) -> None:
        self.lock.acquire()
        if self.inside:
            self.lock.release()
            raise RuntimeError(
                "PrefixCache: called from a destructor in the middle of another call; only "
                "release() and unpin() may be"
            )
        self.inside = True
        returned, pins, expiries = self._pending
        if returned or pins or expiries:
            try:
                self._reclaim()
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        self.inside = False
        self.lock.release()

    __enter__ = enter

    def __exit__(self, *_: object) -> None:
        self.leave()
