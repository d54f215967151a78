"""The command `radixkv`: the demo, text from a prompt, what KV pages take and what they cost.

A sub-command is an entry of `_COMMANDS`: it adds its arguments and says which function runs.
Nothing heavy is imported before a sub-command needs it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.cli.bench import add_bench_arguments, run_bench
from radixkv.cli.common import (
    CommandParser,
    load_engine,
    one_line,
    require_model,
    require_used,
)
from radixkv.config import KV_DTYPES, BeamParams, KVConfig, SamplingParams, require_int
from radixkv.errors import RadixKVError
from radixkv.version import __version__

if TYPE_CHECKING:
    import torch

    from radixkv.engine.engine import Engine
    from radixkv.engine.results import Result
    from radixkv.tools.kv_memory import LayerKV

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
_QUALITY_TOKENS = _QUALITY_CONTEXT = 2048


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, 2 for bad input, 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], None] = arguments.run
    logging.basicConfig(format="%(message)s")  # a program shows its library's warnings
    try:
        run(arguments)
        sys.stdout.flush()
    except (RadixKVError, ValueError, TypeError) as error:
        print(f"radixkv {arguments.command}: error: {one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="radixkv", description="A radix-tree prefix cache with quantized KV pages."
    )
    parser.add_argument("--version", action="version", version=f"radixkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run) in _COMMANDS.items():
        text = (run.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON, for machines")
        command.set_defaults(run=run)
    return parser


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="folder or hub id of a transformers causal LM (default: a small chat model, "
        "prepared at the first use)",
    )
    parser.add_argument(
        "--kv-dtype", default="int8", metavar="DTYPE", help=f"one of {', '.join(KV_DTYPES)}"
    )
    parser.add_argument("--capacity", help='bytes for KV pages, such as "512MiB"')


# demo


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    _add_engine_arguments(parser)


def _run_demo(arguments: argparse.Namespace) -> None:
    """Ask a real model about one document, sample and beam search, all from one cache."""
    from rich.console import Console

    from radixkv.tools.demo import PAGE_SIZE, run_demo

    config = KVConfig(dtype=arguments.kv_dtype, capacity=arguments.capacity, page_size=PAGE_SIZE)
    with load_engine(arguments.model, config) as engine:
        figures = run_demo(engine, Console(quiet=arguments.json, highlight=False))
    if arguments.json:
        print(json.dumps(figures, indent=2))


# generate


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; '-' or none: standard input")
    parser.add_argument("--file", type=Path, help="read the prompt from this file")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    parser.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    _add_engine_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--n", type=int, default=1, help="samples (default 1)")
    parser.add_argument("--beams", type=int, metavar="N", help="beam search of this width")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the best token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="a string that ends the text")


def _read_text(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: expected a readable UTF-8 text file; {error}") from error


def _read_prompt(arguments: argparse.Namespace) -> str | list[dict[str, str]]:
    if arguments.file is not None:
        if arguments.prompt is not None:
            raise ValueError("prompt: expected a prompt or --file, got both; leave one out")
        text = _read_text("--file", arguments.file)
    elif arguments.prompt in (None, "-"):
        text = sys.stdin.read()
    else:
        text = arguments.prompt
    text = text.removesuffix("\n")  # as `echo` and editors end a text
    if not text:
        raise ValueError("prompt: expected some text, got none; give it as an argument or a file")
    if not arguments.chat and arguments.system is None:
        return str(text)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": text}]


# Options that have an effect beside --beams.
_OF_BEAMS = {
    *("prompt", "file", "chat", "system", "model", "kv_dtype", "capacity"),
    *("max_new_tokens", "n", "beams"),
}


def _read_params(arguments: argparse.Namespace) -> SamplingParams | BeamParams:
    if arguments.beams is not None:
        if arguments.n != 1:
            raise ValueError(f"--n: expected 1 with --beams, got {arguments.n}; leave one out")
        require_used(
            arguments,
            _OF_BEAMS,
            "--beams",
            mend="leave it out, or --beams: a beam search takes the best tokens up to the end",
        )
        return BeamParams(width=arguments.beams, max_new_tokens=arguments.max_new_tokens)
    return SamplingParams(
        n=arguments.n,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=arguments.stop,
    )


def _run_generate(arguments: argparse.Namespace) -> None:
    """Print what a model says after a prompt: one text as it comes, samples, or beams."""
    params = _read_params(arguments)
    config = KVConfig(dtype=arguments.kv_dtype, capacity=arguments.capacity)
    prompt = _read_prompt(arguments)
    with load_engine(arguments.model, config) as engine:
        if isinstance(params, SamplingParams) and params.n == 1 and not arguments.json:
            _print_stream(engine, prompt, params)
            return
        result = engine.generate(prompt, params)
    if arguments.json:
        print(json.dumps(_as_json(result), indent=2))
        return
    for number, sample in enumerate(result.samples, start=1):
        score = "" if sample.score is None else f", score {sample.score:.4f}"
        print(f"--- {number} of {len(result.samples)} ({sample.finish_reason}{score})")
        print(sample.text)


def _print_stream(engine: Engine, prompt: Any, params: SamplingParams) -> None:
    start = time.perf_counter()
    first_s, num_tokens, before = None, 0, engine.cache.stats()
    for delta in engine.stream(prompt, params):
        first_s = time.perf_counter() - start if first_s is None else first_s
        num_tokens += len(delta.token_ids)
        print(delta.text, end="", flush=True)
    print(flush=True)
    total_s, after = time.perf_counter() - start, engine.cache.stats()
    print(
        f"[{after.lookup_tokens - before.lookup_tokens} prompt tokens, "
        f"{after.hit_tokens - before.hit_tokens} of them cached; {num_tokens} new tokens; "
        f"first after {first_s or total_s:.2f} s, all after {total_s:.2f} s]",
        file=sys.stderr,
    )


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.cached_tokens,
        "ttft_s": result.metrics.ttft_s,
        "total_s": result.metrics.total_s,
        "samples": [
            {
                "text": sample.text,
                "token_ids": list(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "cumulative_logprob": sample.cumulative_logprob,
                "score": sample.score,
            }
            for sample in result.samples
        ],
    }


# calc


def _add_calc_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder, config.json or hub id: takes the geometry of it")
    parser.add_argument("--layers", type=int, help="attention layers, without --model")
    parser.add_argument("--kv-heads", type=int, help="KV heads a layer, without --model")
    parser.add_argument("--head-dim", type=int, help="elements of a K row, without --model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="the model's own dtype (default: as its config says, else bfloat16)",
    )
    parser.add_argument(
        "--kv-dtype", metavar="DTYPE", help=f"one of {', '.join(KV_DTYPES)} (default: all)"
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens a sequence (4096)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (8)")
    parser.add_argument(
        "--shared", type=int, default=0, help="leading tokens that all sequences share (0)"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        help="tokens that a preallocated cache reserves a sequence "
        "(default: the model's positions, else --length)",
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (16)")


def _read_geometry(
    arguments: argparse.Namespace,
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


def _run_calc(arguments: argparse.Namespace) -> None:
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


# quality


def _add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help="folder or hub id of a transformers causal LM (default: a small chat model, "
        "prepared at the first use)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text to measure on (default: Python's own language reference)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"predictions to measure ({_QUALITY_TOKENS}, 3 minutes with the small model on 2 "
        "cores; figures to publish need 30,000 or more)",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens a window ({_QUALITY_CONTEXT}, or the model's positions if fewer)",
    )
    parser.add_argument(
        "--kv-dtype",
        metavar="DTYPE[,DTYPE]",
        help=f"of {', '.join(KV_DTYPES)}, or two of them for K and V, such as int8/int4 "
        "(default: int8,fp8,fp8_e5m2,int8/int4,int4)",
    )
    parser.add_argument(
        "--rotate",
        choices=("none", "hadamard"),
        help="measure the formats only so (default: both ways)",
    )


def _run_quality(arguments: argparse.Namespace) -> None:
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
        text, text_name = _read_text("--text", arguments.text), arguments.text.name
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
            context = min(_QUALITY_CONTEXT, engine.max_positions or _QUALITY_CONTEXT)
        if tokens is None:
            tokens = min(_QUALITY_TOKENS, len(token_ids) - len(first_ids) - 1)
        with _show_passes() as tell:
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


@contextlib.contextmanager
def _show_passes() -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows passes done and to be done, where standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = (TextColumn("measuring"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


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


# snapshot


def _add_snapshot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("info", "verify", "merge"),
        help="say what is in a file; read every page of it; write one file of several",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="merge: the new file comes first")


def _run_snapshot(arguments: argparse.Namespace) -> None:
    """Look into, verify or merge the files that PrefixCache.save writes; no model is loaded."""
    from radixkv.cache import snapshot

    files = arguments.files
    shown = sys.stderr.isatty() and not arguments.json
    try:
        if arguments.what == "merge":
            if len(files) < 3:
                raise ValueError(
                    f"FILE: expected a new file and at least two snapshots, got {len(files)} in all"
                )
            snapshot.merge(files[0], files[1:], progress=shown)
            files = files[:1]
        reports = [_snapshot_report(file, arguments.what, shown) for file in files]
    except OSError as error:
        raise RadixKVError(f"FILE: expected a readable snapshot; {error}") from error
    if arguments.json:
        print(json.dumps(reports, indent=2))
    else:
        for report in reports:
            for name, value in report.items():
                print(f"{name:15} {value:,}" if isinstance(value, int) else f"{name:15} {value}")
    damaged = [report["file"] for report in reports if report.get("damaged_pages")]
    if damaged:
        raise RadixKVError(
            f"{', '.join(damaged)}: has damaged pages; PrefixCache.load(..., salvage=True) loads "
            f"the rest"
        )


def _snapshot_report(file: str, what: str, shown: bool) -> dict[str, Any]:
    from radixkv.cache import snapshot

    with snapshot.Snapshot(file) as found:
        tree = found.tree
        report = {
            "file": file,
            "bytes": found.num_bytes,
            "format_version": found.version,
            "written_by": f"radixkv {found.writer}",
            "namespaces": len(tree.namespaces),
            "nodes": len(tree),
            "tokens": int(tree.length.sum()),
            "pages": found.num_pages,
            **found.layout,
            "model": found.fingerprint.get("class", "none: a cache by itself"),
            "model_weights": found.fingerprint.get("weights", ""),
        }
        if what == "verify":
            with snapshot.shown_progress("verifying", shown) as tell:
                report["damaged_pages"] = len(found.damaged_pages(tell))
        return report


_COMMANDS: dict[
    str,
    tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]],
] = {
    "demo": (_add_demo_arguments, _run_demo),
    "generate": (_add_generate_arguments, _run_generate),
    "calc": (_add_calc_arguments, _run_calc),
    "quality": (_add_quality_arguments, _run_quality),
    "bench": (add_bench_arguments, run_bench),
    "snapshot": (_add_snapshot_arguments, _run_snapshot),
}
