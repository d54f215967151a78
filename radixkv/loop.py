"""The thread that runs an engine's steps while there are any."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from radixkv.engine import Engine

_PAUSED_S = 0.05  # how often one looks whether a paused request's reader has caught up
_LINGER_S = 2.0  # how long the engine's thread stays when there is nothing to do

logger = logging.getLogger("radixkv")


def run_steps(engine_ref: weakref.ref[Engine], wake: threading.Condition, num_threads: int) -> None:
    """The engine's thread: steps while there is work, lingers, and ends."""
    torch.set_num_threads(num_threads)  # a new thread starts with the default
    idle_since = time.perf_counter()
    while True:
        engine = engine_ref()
        if engine is None:
            return
        if engine._closed:
            engine._thread = None
            return
        if engine._inbox or engine._live:
            try:
                with engine._step_lock:
                    if not engine._closed:
                        engine._step()
            except BaseException:
                # SystemExit from a callback, say. Its requests have failed with it; the thread
                # goes on for those that come.
                logger.exception("a step was ended from inside")
            idle_since = time.perf_counter()
            if engine._inbox or engine._scheduler.has_work:
                continue
        with wake:
            if not engine._inbox and not engine._closed:
                if not engine._live and time.perf_counter() - idle_since > _LINGER_S:
                    engine._thread = None
                    return
                timeout_s = _PAUSED_S if engine._live else _LINGER_S / 2
                del engine  # an engine that nobody uses must not be kept alive from here
                wake.wait(timeout_s)
