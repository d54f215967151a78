"""`radixkv generate`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from radixkv.cli.common import (
    Command,
    engine_options,
    json_option,
    load_engine,
    read_text,
    require_used,
)
from radixkv.config import BeamParams, KVConfig, SamplingParams

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine
    from radixkv.engine.results import Result


def _read_prompt(arguments: SimpleNamespace) -> str | list[dict[str, str]]:
    if arguments.file is not None:
        if arguments.prompt is not None:
            raise ValueError("prompt: expected a prompt or --file, got both; leave one out")
        text = read_text("--file", arguments.file)
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


def _read_params(arguments: SimpleNamespace) -> SamplingParams | BeamParams:
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


@click.command("generate", cls=Command)
@click.argument("prompt", required=False)
@click.option("--file", type=click.Path(path_type=Path), help="read the prompt from this file")
@click.option("--chat", is_flag=True, help="send the prompt as a chat message")
@click.option("--system", metavar="TEXT", help="system message; implies --chat")
@engine_options
@click.option("--max-new-tokens", type=int, default=128, metavar="N", help="at most (128)")
@click.option("--n", type=int, default=1, help="samples (1)")
@click.option("--beams", type=int, metavar="N", help="beam search of this width")
@click.option("--temperature", type=float, default=1.0, help="0 takes the best token (1.0)")
@click.option("--top-p", type=float, default=1.0, metavar="P", help="of this probability (1.0)")
@click.option("--top-k", type=int, default=0, metavar="K", help="of so many tokens (0: of all)")
@click.option("--seed", type=int, help="same seed, same samples")
@click.option("--stop", multiple=True, help="a string that ends the text; may be given again")
@json_option
def command(arguments: SimpleNamespace) -> None:
    """Print what a model says after a prompt: one text as it comes, samples, or beams.

    Without PROMPT, or with '-', the prompt is read from standard input.
    """
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
