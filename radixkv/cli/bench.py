"""`radixkv bench`: its options, and which measurement runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import click

from radixkv.cli.common import (
    Choice,
    Command,
    json_option,
    load_engine,
    require_model,
    require_used,
)
from radixkv.config import KV_DTYPES, KVConfig, require_int
from radixkv.errors import RadixKVError
from radixkv.progress import shown_progress


def _run_bench_engine(arguments: SimpleNamespace) -> None:
    from radixkv.bench import workloads as bench_engine

    scale = 0.05 if arguments.quick else 1.0
    require_int("--repeats", arguments.repeats, 1)
    kv_dtype = (arguments.kv_dtype or ["int8"])[-1]
    with load_engine(arguments.model, KVConfig(dtype=kv_dtype)) as engine:
        if arguments.what == "steps":
            require_int("--batch", arguments.batch, 1)
            from radixkv.tools.demo import describe

            result = describe(engine) | bench_engine.bench_steps(engine, batch=arguments.batch)
            if not arguments.json:
                bench_engine.print_steps(result)
            print(json.dumps(result))
            return
        if engine.tokenizer is None:
            raise ValueError("--model: expected a model with a tokenizer, got one without")
        if arguments.what == "online":
            result = bench_engine.bench_online(
                engine,
                rate=arguments.rate,
                num_requests=32 if arguments.requests is None else arguments.requests,
                scale=scale,
                seed=arguments.seed,
            )
        else:
            workloads = bench_engine.agent_workloads(
                engine.tokenizer, scale=scale, seed=arguments.seed
            )
            result = bench_engine.compare(
                engine,
                [w for w in workloads if w.name in (arguments.workload or [w.name])],
                repeats=1 if arguments.quick else arguments.repeats,
                openvino_model=arguments.openvino_model,
                gguf=arguments.gguf,
                against=arguments.against or None,
                progress=lambda text: print(text, file=sys.stderr),
            )
    if not arguments.json:
        (bench_engine.print_online if arguments.what == "online" else bench_engine.print_offline)(
            result
        )
    print(json.dumps(result))


def _run_bench_kernel(arguments: SimpleNamespace) -> None:
    from importlib.util import find_spec

    import torch

    from radixkv.bench import gpu as bench_gpu
    from radixkv.bench.kernel import bench_kernels, compile_report, report

    has_gpu = torch.cuda.is_available()
    num_q_heads, num_kv_heads, head_dim = (require_int("--heads", n, 1) for n in arguments.heads)
    heads = num_q_heads, num_kv_heads, head_dim
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"--heads: expected query heads that are a multiple of the KV heads, got {heads}; the "
            f"model's config names both"
        )
    if arguments.tune:
        if not has_gpu:
            raise RadixKVError(
                "--tune: expected a GPU to measure tiles on, found none; the shipped tiles need "
                "no tuning"
            )
        tuned = bench_gpu.tune_gpu(arguments.kv_dtype or bench_gpu.KV_DTYPES, heads=heads)
        print(json.dumps(tuned))
        return
    if not has_gpu and "heads" in arguments.given:
        raise ValueError(
            f"--heads: expected none without a GPU, where kernels have sizes of their own, got "
            f"{' '.join(map(str, heads))}; leave it out"
        )
    if not has_gpu and arguments.kv_dtype and find_spec("triton") is None:
        raise ValueError(
            f"--kv-dtype: expected none without a GPU or triton, where nothing is compiled, "
            f"got {' '.join(arguments.kv_dtype)}; leave it out, or install triton"
        )
    if has_gpu and not arguments.compile_only:
        measured = bench_gpu.bench_gpu(arguments.kv_dtype or bench_gpu.KV_DTYPES, heads=heads)
        print(json.dumps(measured) if arguments.json else bench_gpu.gpu_report(measured))
        return
    result = {} if arguments.compile_only else bench_kernels()
    if find_spec("triton"):
        result["compiled"] = compile_report(arguments.kv_dtype or ("int8",))
    print(json.dumps(result) if arguments.json else report(result))


def _run_bench_load(arguments: SimpleNamespace) -> None:
    from radixkv.bench.load import bench_load, report
    from radixkv.models.small_model import prepare_small_model

    require_int("--repeats", arguments.repeats, 1)
    if arguments.model is not None:
        require_model(arguments.model)
    model = arguments.model or str(prepare_small_model(progress=True))
    found = bench_load(model, repeats=arguments.repeats)
    if not arguments.json:
        print(report(found))
    print(json.dumps(found))


# Which options have an effect on which measurement.
_USED = {
    "cache": {"trace", "requests", "capacity", "page_size", "ids", "growth"},
    "cache --growth": {"growth", "page_size"},
    "kernel": {"kv_dtype", "heads", "tune", "compile_only"},
    "kernel --tune": {"kv_dtype", "heads", "tune"},
    "kernel --compile-only": {"kv_dtype", "compile_only"},
    "load": {"model", "repeats"},
    "steps": {"model", "kv_dtype", "batch"},
    "online": {"model", "kv_dtype", "requests", "rate", "quick", "seed"},
    "offline": {
        *("model", "kv_dtype", "quick", "seed", "suite", "repeats", "workload", "against"),
        *("openvino_model", "gguf"),
    },
}


def _require_used(arguments: SimpleNamespace) -> None:
    what = str(arguments.what)
    for option in ("growth", "tune", "compile_only"):
        mode = f"{what} --{option.replace('_', '-')}"
        if option in arguments.given and mode in _USED:
            require_used(arguments, _USED[mode], mode, mend="leave one out")
    require_used(arguments, _USED[what], what, mend="leave it out")
    if what in ("steps", "online", "offline") and len(arguments.kv_dtype or ()) > 1:
        raise ValueError(
            f"--kv-dtype: expected one with {what}, got {' and '.join(arguments.kv_dtype)}; "
            f"run it once for each"
        )
    if arguments.quick and "repeats" in arguments.given:
        raise ValueError(
            f"--repeats: expected none with --quick, which runs once, got {arguments.repeats}; "
            f"leave one out"
        )
    for option, program in (("openvino_model", "openvino-genai"), ("gguf", "llama-cpp-python")):
        if option in arguments.given and program not in (arguments.against or [program]):
            raise ValueError(
                f"--{option.replace('_', '-')}: expected none without --against {program}, got "
                f"{getattr(arguments, option)}; add --against {program}"
            )


@click.command("bench", cls=Command)
@click.argument("what", type=Choice(("cache", "kernel", "load", "steps", "offline", "online")))
@click.option(
    "--trace",
    type=Choice(("rag", "agent", "samples")),
    multiple=True,
    help="may be given several times (default: all three)",
)
@click.option(
    "--requests", type=int, help="of each trace (default: its own number), or online (32)"
)
@click.option("--capacity", type=int, default=200_000, help="tokens (200000)")
@click.option("--page-size", type=int, default=16, help="tokens a page (16)")
@click.option(
    "--compile-only",
    is_flag=True,
    help="kernel: only compile those for GPUs and read their machine code (no GPU needed)",
)
@click.option(
    "--kv-dtype",
    type=Choice(KV_DTYPES),
    multiple=True,
    help="kernel: formats that are compiled, or timed on a GPU, may be given several times; "
    "offline and online: of the pages (int8)",
)
@click.option(
    "--tune",
    is_flag=True,
    help="kernel: measure every tile on the GPU and keep the fastest for this machine",
)
@click.option(
    "--heads",
    type=int,
    nargs=3,
    default=(32, 8, 128),
    metavar="QUERY KV DIM",
    help="kernel, on a GPU: query heads, KV heads, head_dim (32 8 128, Llama-3-8B)",
)
@click.option("--ids", type=Choice(("list", "array")), default="list", help="as given (list)")
@click.option(
    "--growth",
    is_flag=True,
    help="a match and an eviction at 10,000 and 1,000,000 nodes; 500 turns of an agent",
)
@click.option("--batch", type=int, default=16, help="samples in a step (16)")
@click.option("--model", help="as of generate")
@click.option("--quick", is_flag=True, help="a twentieth of each length, once")
@click.option("--seed", type=int, default=0, help="of prompts and arrivals (0)")
@click.option("--rate", type=float, default=1.0, help="requests a second (1)")
@click.option("--suite", type=Choice(("agents",)), default="agents", help="of workloads")
@click.option("--repeats", type=int, default=3, help="runs of each program (3)")
@click.option(
    "--workload",
    multiple=True,
    type=Choice(("rag", "samples", "beams", "mixed", "tree")),
    help="may be given several times (default: all five)",
)
@click.option(
    "--against",
    multiple=True,
    type=Choice(("transformers", "openvino-genai", "llama-cpp-python")),
    help="may be given several times (default: all that are installed)",
)
@click.option(
    "--openvino-model", type=click.Path(path_type=Path), help="the same model, exported to OpenVINO"
)
@click.option(
    "--gguf", type=click.Path(path_type=Path), help="the same model, as llama.cpp reads it"
)
@json_option
def command(arguments: SimpleNamespace) -> None:
    """Time the cache, the kernels, or whole workloads beside other programs.

    \b
    cache            the cache by itself
    kernel           the kernels
    load, steps      the parts of loading a model, of a step
    offline, online  whole workloads beside other programs, requests that arrive at random
    """
    _require_used(arguments)
    if arguments.what == "load":
        _run_bench_load(arguments)
        return
    if arguments.what in ("steps", "offline", "online"):
        _run_bench_engine(arguments)
        return
    if arguments.what == "kernel":
        _run_bench_kernel(arguments)
        return
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from radixkv.bench.cache import growth, hardware, run_trace

    if arguments.growth:
        record = {"hardware": hardware(), **growth(arguments.page_size)}
        if not arguments.json:
            for name, value in record.items():
                print(f"{name}: {value}")
        print(json.dumps(record))
        return

    results = []
    for trace in arguments.trace or ("rag", "agent", "samples"):
        with shown_progress(trace, not arguments.json) as show:
            results.append(
                run_trace(
                    trace,
                    num_requests=arguments.requests,
                    capacity_tokens=arguments.capacity,
                    page_size=arguments.page_size,
                    ids=arguments.ids,
                    tell=show,
                )
            )
    record = {"hardware": hardware(), "capacity_tokens": arguments.capacity}
    record |= {"page_size": arguments.page_size, "traces": [asdict(r) for r in results]}
    if not arguments.json:
        table = Table("trace", "requests", "tokens", "p50 us", "p99 us", "mean us", "brute us")
        table.add_column("hits")
        table.add_column("host B a token")
        for column in table.columns[1:]:
            column.justify = "right"
        for r in results:
            brute = "" if r.baseline_us_mean is None else f"{r.baseline_us_mean:,.0f}"
            memory = "" if r.host_bytes_per_token is None else f"{r.host_bytes_per_token:.1f}"
            table.add_row(
                r.trace,
                f"{r.num_requests:,}",
                f"{r.mean_tokens:,.0f}",
                f"{r.us_p50:.0f}",
                f"{r.us_p99:.0f}",
                f"{r.us_mean:.0f}",
                brute,
                f"{r.hit_rate:.1%}",
                memory,
            )
        Console().print(table)
    print(json.dumps(record))
