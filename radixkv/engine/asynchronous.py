"""Requests for asyncio: a task waits for them, and cancelling it aborts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from radixkv.engine.core import EngineCore
from radixkv.engine.progress import show_progress
from radixkv.engine.request import Request
from radixkv.engine.results import Delta
from radixkv.engine.stream import STREAM_DELTAS


async def run_all_async(
    core: EngineCore, requests: list[Request], *, progress: bool = False
) -> None:
    """Run requests to their end, whatever it is; cancelling the task ends them."""
    if not requests:
        return
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    for request in requests:
        request.listen(lambda: _call_soon(loop, changed.set))
    core.enqueue(requests)
    bar = loop.run_in_executor(None, show_progress, core.cache, requests) if progress else None
    try:
        while not all(request.done for request in requests):
            await changed.wait()
            changed.clear()
        if bar is not None:
            await bar
    except BaseException:  # cancelled, or the bar's own error
        await asyncio.shield(loop.run_in_executor(None, core.abort, requests))
        raise


async def stream_async(core: EngineCore, request: Request) -> AsyncGenerator[Delta, None]:
    """The request's deltas as they come; cancelling the task or closing it aborts the request."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    request.listen(lambda: _call_soon(loop, changed.set))
    request.max_deltas = STREAM_DELTAS
    core.enqueue([request])
    try:
        while True:
            done = request.done
            deltas = request.take_deltas()
            core.wake()  # it may have been paused for want of this
            for delta in deltas:
                yield delta
            if done:
                request.result()
                return
            await changed.wait()
            changed.clear()
    finally:
        if not request.done:
            await asyncio.shield(loop.run_in_executor(None, core.abort, [request]))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
