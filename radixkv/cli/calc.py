"""`radixkv calc`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from radixkv.cli.common import Choice, Command, json_option, one_line, require_model
from radixkv.config import KV_DTYPES, require_int
from radixkv.errors import RadixKVError

if TYPE_CHECKING:
    import torch

    from radixkv.tools.kv_memory import LayerKV


def _read_geometry(
    arguments: SimpleNamespace,
) -> tuple[list[LayerKV], torch.dtype, int | None]:
    """The layers asked about, the model's dtype, and its positions if it says so."""
    import torch

    from radixkv.tools.kv_memory import LayerKV, read_layers

    own = {
        "--layers": arguments.layers,
        "--kv-heads": arguments.kv_heads,
        "--head-dim": arguments.head_dim,
    }
    given = [name for name, value in own.items() if value is not None]
    if arguments.model is None:
        if len(given) < len(own):
            raise ValueError(
                f"calc: expected --model, or all of {', '.join(own)}, got "
                f"{', '.join(given) or 'none of them'}"
            )
        num_layers, num_kv_heads, head_dim = (require_int(n, v, 1) for n, v in own.items())
        layer = LayerKV(num_kv_heads=num_kv_heads, head_dim=head_dim)
        return [layer] * num_layers, getattr(torch, arguments.dtype or "bfloat16"), None
    if given:
        raise ValueError(f"calc: expected --model or {', '.join(given)}, got both; leave one out")

    from transformers import AutoConfig

    require_model(arguments.model)
    try:
        config = AutoConfig.from_pretrained(arguments.model).get_text_config()
    except OSError as error:
        raise RadixKVError(
            f"--model: expected a folder, a config.json or a hub id, got {arguments.model!r}; "
            f"{one_line(error)}"
        ) from error
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    if arguments.dtype:
        dtype = getattr(torch, arguments.dtype)
    return read_layers(config), dtype, getattr(config, "max_position_embeddings", None)


@click.command("calc", cls=Command)
@click.option("--model", help="folder, config.json or hub id: takes the geometry of it")
@click.option("--layers", type=int, help="attention layers, without --model")
@click.option("--kv-heads", type=int, help="KV heads a layer, without --model")
@click.option("--head-dim", type=int, help="elements of a K row, without --model")
@click.option(
    "--dtype",
    type=Choice(("float32", "float16", "bfloat16")),
    help="the model's own dtype (default: as its config says, else bfloat16)",
)
@click.option("--kv-dtype", metavar="DTYPE", help=f"one of {', '.join(KV_DTYPES)} (default: all)")
@click.option("--length", type=int, default=4096, help="tokens a sequence (4096)")
@click.option("--batch", type=int, default=8, help="sequences (8)")
@click.option("--shared", type=int, default=0, help="leading tokens that all sequences share (0)")
@click.option(
    "--max-length",
    type=int,
    help="tokens that a preallocated cache reserves a sequence "
    "(default: the model's positions, else --length)",
)
@click.option("--page-size", type=int, default=16, help="tokens a page (16)")
@json_option
def command(arguments: SimpleNamespace) -> None:
    """Say how much memory the KV of a model takes, for a format, a length and a batch."""
    length = require_int("--length", arguments.length, 1)
    batch = require_int("--batch", arguments.batch, 1)
    shared = require_int("--shared", arguments.shared, 0, length)
    layers, dtype, positions = _read_geometry(arguments)
    from radixkv.tools.kv_memory import kv_memory

    max_length = arguments.max_length
    if max_length is None:
        max_length = max(length, positions or 0)
    require_int("--max-length", max_length, length)
    rows = [
        kv_memory(
            layers,
            dtype,
            kv_dtype=kv_dtype,
            page_size=arguments.page_size,
            length=length,
            batch=batch,
            shared=shared,
            max_length=max_length,
        )
        for kv_dtype in ([arguments.kv_dtype] if arguments.kv_dtype else KV_DTYPES)
    ]
    setting = {
        "layers": [
            {"num_layers": count, **dataclasses.asdict(layer)}
            for layer, count in Counter(layers).items()
        ],
        "dtype": str(dtype).removeprefix("torch."),
        "page_size": arguments.page_size,
        "length": length,
        "batch": batch,
        "shared": shared,
        "max_length": max_length,
    }
    if arguments.json:
        print(json.dumps({**setting, "formats": rows}, indent=2))
        return
    _print_calc(setting, rows)


def _print_calc(setting: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Say what is reckoned, then the figures as a Markdown table, to be pasted anywhere."""
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    shared = f", the first {setting['shared']:,} shared" if setting["shared"] else ""
    kinds = [
        f"{kind['num_layers']} layers of {kind['num_kv_heads']} KV heads x {kind['head_dim']}"
        + (f" with a window of {kind['window']:,}" if kind["window"] else "")
        for kind in setting["layers"]
    ]
    console = Console(highlight=False, width=160)
    console.print(
        f"KV memory of {setting['batch']} sequences of {setting['length']:,} tokens{shared}: "
        f"{' and '.join(kinds)}, {setting['dtype']}; pages of {setting['page_size']} tokens, "
        f"scales included.\nCopies: nothing shared. Reserved: {setting['max_length']:,} tokens a "
        f"sequence in {setting['dtype']} (a layer's window if less). Saved: reserved / in pages.\n",
        soft_wrap=True,
    )
    table = Table("KV format", box=MARKDOWN)
    for heading in ("bytes/token", "pages", "in pages", "copies", "reserved", "saved"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["kv_dtype"],
            f"{row['bytes_per_token']:,}",
            f"{row['pages']:,}",
            format_bytes(row["pages_bytes"]),
            format_bytes(row["copies_bytes"]),
            format_bytes(row["preallocated_bytes"]),
            f"{row['preallocated_bytes'] / row['pages_bytes']:.1f}x",
        )
    console.print(table)


def format_bytes(num_bytes: float) -> str:
    """Write a byte count with a binary unit.

    >>> format_bytes(1023), format_bytes(1536), format_bytes(3 * 1024**3)
    ('1023 B', '1.5 KiB', '3.0 GiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"
