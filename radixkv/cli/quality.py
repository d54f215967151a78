"""`radixkv quality`."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from radixkv.cli.common import (
    Choice,
    Command,
    json_option,
    load_engine,
    model_option,
    read_text,
)
from radixkv.config import KV_DTYPES, KVConfig, require_int
from radixkv.errors import RadixKVError
from radixkv.progress import shown_progress

_TOKENS = _CONTEXT = 2048


@click.command("quality", cls=Command)
@model_option
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="UTF-8 text to measure on (default: Python's own language reference)",
)
@click.option(
    "--tokens",
    type=int,
    metavar="N",
    help=f"predictions to measure ({_TOKENS}, 3 minutes with the small model on 2 "
    "cores; figures to publish need 30,000 or more)",
)
@click.option(
    "--context",
    type=int,
    metavar="N",
    help=f"tokens a window ({_CONTEXT}, or the model's positions if fewer)",
)
@click.option(
    "--kv-dtype",
    metavar="DTYPE[,DTYPE]",
    help=f"of {', '.join(KV_DTYPES)}, or two of them for K and V, such as int8/int4 "
    "(default: int8,fp8,fp8_e5m2,int8/int4,int4)",
)
@click.option(
    "--rotate",
    type=Choice(("none", "hadamard")),
    help="measure the formats only so (default: both ways)",
)
@json_option
def command(arguments: SimpleNamespace) -> None:
    """Measure what each KV format costs a model in accuracy, with and without rotation."""
    for option, value, least in (
        ("--context", arguments.context, 16),
        ("--tokens", arguments.tokens, 1),
    ):
        if value is not None:
            require_int(option, value, least)
    from radixkv.text import encode_prompt
    from radixkv.tools import quality

    names = list(quality.FORMATS)
    if arguments.kv_dtype is not None:
        names = arguments.kv_dtype.split(",")
        for name in names:
            quality.parse_format(name)
    if arguments.text is None:
        text, text_name = quality.default_text(), "pydoc_data.topics"
    else:
        text, text_name = read_text("--text", arguments.text), arguments.text.name
        if not text:
            raise ValueError(f"--text: expected some text, got none in {arguments.text}")
    start = time.perf_counter()
    # This engine only loads: what is measured lies in caches of its own.
    config = KVConfig(dtype="model", capacity="64MiB")
    with load_engine(arguments.model, config) as engine:
        if engine.tokenizer is None:
            raise RadixKVError(
                f"--model: expected a model with a tokenizer, got {arguments.model!r} without; "
                f"save the tokenizer to the same folder"
            )
        token_ids = encode_prompt(engine.tokenizer, text, vocab_size=engine.vocab_size)
        bos = engine.tokenizer.bos_token_id
        first_ids = [bos] if bos is not None and token_ids[0] == bos else []
        tokens, context = arguments.tokens, arguments.context
        if context is None:
            context = min(_CONTEXT, engine.max_positions or _CONTEXT)
        if tokens is None:
            tokens = min(_TOKENS, len(token_ids) - len(first_ids) - 1)
        with shown_progress("measuring") as tell:
            found = quality.measure_quality(
                engine.model,
                token_ids[len(first_ids) :],
                num_tokens=tokens,
                context=context,
                formats=names,
                rotations=("none", "hadamard") if arguments.rotate is None else (arguments.rotate,),
                first_ids=first_ids,
                tell=tell,
            )
        setting = {**quality.describe(engine.model), "text": text_name}
    report = {**setting, **dataclasses.asdict(found)}
    report["recommendation"] = quality.recommend(found)
    report["total_s"] = time.perf_counter() - start
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    _print_quality(report)


def _print_quality(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"Accuracy of KV formats: {report['model']}, {report['num_tokens']:,} tokens of "
        f"{report['text']}, {report['context']:,} a window",
        caption=f"against unquantized pages ({report['model_dtype']}, "
        f"{report['bytes_per_token']:,} bytes/token, perplexity {report['perplexity']:.4f}); "
        f"±: standard error; KL: divergence a token in nats; greedy: tokens until the first that "
        f"differs, of {report['greedy_tokens']}, mean of {report['greedy_prompts']} prompts",
    )
    table.add_column("KV format", no_wrap=True)
    table.add_column("rotation")
    for heading in ("bytes/token", "perplexity", "change", "mean KL", "p99 KL", "top-1", "greedy"):
        table.add_column(heading, justify="right")
    for row in report["formats"]:
        table.add_row(
            row["kv_dtype"],
            row["rotate"],
            f"{row['bytes_per_token']:,}",
            f"{row['perplexity']:.4f}",
            f"{100 * row['perplexity_change']:+.2f} ± "
            f"{100 * row['perplexity_change_stderr']:.2f} %",
            f"{row['kl_mean']:.1e}",
            f"{row['kl_p99']:.1e}",
            f"{100 * row['top1_agreement']:.1f} %",
            f"{row['greedy_match']:.1f}",
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(report["recommendation"])
    console.print(f"Measured in {report['total_s']:.0f} s on {report['hardware']}.", style="dim")
