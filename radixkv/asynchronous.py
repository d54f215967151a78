"""Requests that a task of asyncio waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

from radixkv.progress import show_progress
from radixkv.request import Delta, Request
from radixkv.stream import STREAM_DELTAS

if TYPE_CHECKING:
    from radixkv.engine import Engine


async def run_all_async(engine: Engine, requests: list[Request], *, progress: bool = False) -> None:
    """Run requests to their end, whatever it is; cancelling the task ends them."""
    if not requests:
        return
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    for request in requests:
        request.listen(lambda: _call_soon(loop, changed.set))
    engine._enqueue(requests)
    bar = loop.run_in_executor(None, show_progress, engine.cache, requests) if progress else None
    try:
        while not all(request.done for request in requests):
            await changed.wait()
            changed.clear()
        if bar is not None:
            await bar
    except BaseException:  # cancelled, or the bar's own error
        await asyncio.shield(loop.run_in_executor(None, engine._abort, requests))
        raise


async def stream_async(engine: Engine, request: Request) -> AsyncGenerator[Delta, None]:
    """The request's deltas as they come; cancelling the task or closing it aborts the request."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    request.listen(lambda: _call_soon(loop, changed.set))
    request.max_deltas = STREAM_DELTAS
    engine._enqueue([request])
    try:
        while True:
            done = request.done
            deltas = request.take_deltas()
            with engine._wake:  # it may have been paused for want of this
                engine._wake.notify_all()
            for delta in deltas:
                yield delta
            if done:
                request.result()
                return
            await changed.wait()
            changed.clear()
    finally:
        if not request.done:
            await asyncio.shield(loop.run_in_executor(None, engine._abort, [request]))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
