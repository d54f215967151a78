"""Kernels run: compiled or found, on as many threads as asked, in memory of the thread."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("radixkv")

runs: Counter[str] = Counter()
"""How often each path ran in this process; tests assert on it.

"write"; "decode": one query a sequence; "extend": several, through the same kernel; "shared":
splits that several queries read at once; "tiles": matrix products over dequantized tiles.
"""

tokens_read: Counter[str] = Counter()
"""Tokens whose K and V attention has read in this process, by path, each of one KV head.

A split that several queries take turns over is read once.
"""


SMALL = 2**19
"""Products of numbers that one thread has done before a second would have begun."""

# Scratch memory, kept from call to call. A thread's own: kernels run on several at once, and what
# a prepared call has put the address of into its record must stay where it is.
_local = threading.local()


@cache
def kernel_address(maker: Callable[..., Any], *sizes: int) -> int:
    """Compile a kernel or load it from disk; its address."""
    begin = time.perf_counter()
    kernel = maker(*sizes)
    if not kernel.cache_hits:
        logger.info(
            "compiled a CPU kernel (%s) in %.1f s; later runs load it from disk",
            maker.__name__[5:],
            time.perf_counter() - begin,
        )
    _keep.append(kernel)
    return int(kernel.address)


_keep: list[Any] = []  # compiled code lives as long as its Python object


@cache
def _fork() -> Any:
    """Find torch's own OpenMP entry point; None where torch has none, or its threads sleep.

    Kernels run as a parallel region of the very OpenMP library that torch uses: one pool of
    threads for both. A second pool would compete with torch's workers, which spin for a while
    after each product (docs/log/cpu-kernels.md says what that costs). With OMP_WAIT_POLICY=PASSIVE
    they sleep: there is nothing to compete with, and `_executor`, whose late threads need not
    be waited for, is faster on a busy machine.
    """
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return None
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            function = ctypes.CDLL(str(folder / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return function
    return None


@cache
def _executor(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="radixkv-cpu")


_c_kernel = cache(ctypes.CFUNCTYPE(None, ctypes.c_void_p))


def run_kernel(address: int, pointer: int, num_threads: int) -> None:
    if num_threads == 1:
        _c_kernel(address)(pointer)
    elif (fork := _fork()) is not None:
        fork(address, pointer, num_threads, 0)
    else:
        function = _c_kernel(address)
        pool = _executor(num_threads - 1)
        others = [pool.submit(function, pointer) for _ in range(num_threads - 1)]
        try:
            function(pointer)
        finally:
            for other in others:
                # The tasks are done: who has not begun by now need not be waited for.
                if not other.cancel():
                    other.result()


def thread_memory(name: str, num_bytes: int) -> tuple[int, np.ndarray]:
    """A buffer of this thread, not cleared: its address, and its owner.

    It has at least ``num_bytes``; when more is asked for, the thread gets another one.
    """
    kept: tuple[int, int, np.ndarray] | None = getattr(_local, name, None)
    if kept is None or kept[1] < num_bytes:
        buffer = np.empty(num_bytes + 64, np.uint8)  # NumPy asks for huge pages
        kept = -(-buffer.ctypes.data // 64) * 64, num_bytes, buffer
        setattr(_local, name, kept)
    return kept[0], kept[2]
