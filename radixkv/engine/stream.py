"""A request's deltas as they come, for a caller that waits for them."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator

from radixkv.engine.core import EngineCore
from radixkv.engine.request import Request
from radixkv.engine.results import Delta
from radixkv.names import safe_repr

STREAM_DELTAS = 256  # that a stream's reader may lag behind before its request is paused


class Stream(Iterator[Delta]):
    """An iterator of `Delta`; closing, dropping or leaving it aborts its request.

    Attributes:
        request: what it streams; `Request.result` gives the whole at the end.
    """

    def __init__(self, core: EngineCore, request: Request) -> None:
        self._core = core
        self.request = request
        self._changed = threading.Event()
        self._ready: deque[Delta] = deque()
        self._over = False
        request.listen(self._changed.set)
        request.max_deltas = STREAM_DELTAS
        core.enqueue([request])

    @safe_repr
    def __repr__(self) -> str:
        num_ready = len(self._ready) + self.request.num_deltas
        state = "closed" if self.request.done and not num_ready else "open"
        return f"of {self.request!r}, {num_ready:,} deltas ready, {state}"

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        while not self._ready:
            done = self.request.done
            self._ready.extend(self.request.take_deltas())
            if self._ready:
                self._core.wake()  # it may have been paused for want of this
                break
            if done:
                if self.request.error is not None and not self._over:
                    self._over = True  # raised once; then the iterator is at its end
                    self.request.raise_error()
                raise StopIteration
            self._core.check_process()
            self._core.check_outside()
            self._changed.wait()
            self._changed.clear()
        return self._ready.popleft()

    def close(self) -> None:
        """Abort the request, if it still runs, and give its pages back."""
        self._core.abort([self.request])
        self._ready.clear()
        self.request.take_deltas()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # May run at any moment, also inside a call that holds the cache's lock: never wait here.
        # When the interpreter ends, modules are empty, and engines were closed before.
        if hasattr(self, "_ready") and not self.request.done and not _is_ending():
            self.request.aborted = True
            self._core.wake()
