"""`radixkv demo`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import click

from radixkv.cli.common import Command, engine_options, json_option, load_engine
from radixkv.config import KVConfig


@click.command("demo", cls=Command)
@engine_options
@json_option
def command(arguments: SimpleNamespace) -> None:
    """Ask a real model about one document, sample and beam search, all from one cache."""
    from rich.console import Console

    from radixkv.tools.demo import PAGE_SIZE, run_demo

    config = KVConfig(dtype=arguments.kv_dtype, capacity=arguments.capacity, page_size=PAGE_SIZE)
    with load_engine(arguments.model, config) as engine:
        figures = run_demo(engine, Console(quiet=arguments.json, highlight=False))
    if arguments.json:
        print(json.dumps(figures, indent=2))
