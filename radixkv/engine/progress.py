"""The bar that is shown while requests run."""

from __future__ import annotations

import time

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.request import Request


def show_progress(cache: PrefixCache, requests: list[Request]) -> None:
    """Show a bar on standard error until all ``requests`` have ended; nothing in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "{task.fields[rate]:.0f} tokens/s, {task.fields[hits]:.0%} of prompts cached, "
            "{task.fields[used]:.0%} of pages in use"
        ),
    )
    started = time.perf_counter()
    console = Console(stderr=True)
    is_seen = console.is_terminal or console.is_jupyter
    with Progress(*columns, console=console, disable=not is_seen) as bar:
        task = bar.add_task("requests", total=len(requests), rate=0.0, hits=0.0, used=0.0)
        while True:
            open_ones = [request for request in requests if not request.done]
            tokens = sum(request.num_tokens for request in requests)
            prompts = sum(len(request.prompt_token_ids) for request in requests)
            cached = sum(request.cached_tokens for request in requests)
            bar.update(
                task,
                completed=len(requests) - len(open_ones),
                rate=tokens / max(time.perf_counter() - started, 1e-9),
                hits=cached / prompts,
                used=1 - cache.num_free_pages / cache.pool.num_pages,
            )
            if not open_ones:
                return
            open_ones[0].wait(0.1)
