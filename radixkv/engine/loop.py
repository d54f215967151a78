"""The thread that runs an engine's steps while there are any."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

import torch

_PAUSED_S = 0.05  # how often one looks whether a paused request's reader has caught up
_LINGER_S = 2.0  # how long the engine's thread stays when there is nothing to do

logger = logging.getLogger("radixkv")


class Steps(Protocol):
    """What has steps to run: `radixkv.engine.core.EngineCore`."""

    is_closed: bool

    @property
    def has_queued(self) -> bool: ...

    @property
    def has_requests(self) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    def step(self) -> object: ...

    def forget_thread(self) -> None: ...


def run_steps(
    steps_ref: weakref.ref[Steps], changed: threading.Condition, num_threads: int
) -> None:
    """The engine's thread: steps while there is work, lingers, and ends."""
    torch.set_num_threads(num_threads)  # a new thread starts with the default
    idle_since = time.perf_counter()
    while True:
        steps = steps_ref()
        if steps is None:
            return
        if steps.is_closed:
            steps.forget_thread()
            return
        if steps.has_requests:
            try:
                steps.step()
            except BaseException:
                # SystemExit from a callback, say. Its requests have failed with it; the thread
                # goes on for those that come.
                logger.exception("a step was ended from inside")
            idle_since = time.perf_counter()
            if steps.has_work:
                continue
        with changed:
            if not steps.has_queued and not steps.is_closed:
                if not steps.has_requests and time.perf_counter() - idle_since > _LINGER_S:
                    steps.forget_thread()
                    return
                timeout_s = _PAUSED_S if steps.has_requests else _LINGER_S / 2
                del steps  # an engine that nobody uses must not be kept alive from here
                changed.wait(timeout_s)
