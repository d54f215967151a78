"""Whole workloads, end to end: behind `radixkv bench offline`, `online` and `steps`.

Offline: five workloads that reuse prefixes, on this engine and on what else is installed, in
turn, so that other work on the machine meets all alike. Every program gets the same token ids
and makes the same number of new tokens (end tokens are ignored), each from an empty cache.

Online: requests that arrive at random times, at a rate, over four documents and their questions.

Steps: where the time of one decode step goes: the model, drawing tokens, bookkeeping.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import radixkv.engine.drawing
from radixkv.config import BeamParams, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.tools.demo import describe

Progress = Callable[[str], None]
_drawing: Any = radixkv.engine.drawing


@dataclass(frozen=True)
class Ask:
    """One prompt and what is wanted of it: greedy, ``n`` samples, or ``beams``.

    Attributes:
        token_ids: the prompt.
        max_new_tokens: of each sample; none ends before.
        n: samples, drawn at temperature 1; 1 is greedy.
        beams: width of a beam search; 0 is none.
    """

    token_ids: list[int]
    max_new_tokens: int
    n: int = 1
    beams: int = 0

    @property
    def num_new_tokens(self) -> int:
        """New tokens that have to come back."""
        return self.max_new_tokens * self.n


@dataclass(frozen=True)
class Workload:
    """Rounds of prompts: those of a round come together, the next round after their answers."""

    name: str
    text: str
    rounds: list[list[Ask]]

    @property
    def asks(self) -> list[Ask]:
        """All prompts, in order."""
        return [ask for each in self.rounds for ask in each]


@dataclass
class Timing:
    """One program on one workload.

    Attributes:
        seconds: of each run, wall time.
        first_s: of each run, until the first round's first token; empty where it cannot be seen.
        new_tokens: of one run.
        note: why there are no times, or what is not the same.
    """

    program: str
    workload: str
    seconds: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    new_tokens: int = 0
    note: str = ""


# -- the workloads -------------------------------------------------------------------------------


def agent_workloads(tokenizer: Any, *, scale: float = 1.0, seed: int = 0) -> list[Workload]:
    """Five ways in which agents reuse prefixes; texts from Python's own documentation.

    Args:
        tokenizer: of the model.
        scale: factor on all lengths, for a short run.
    """
    take = _text_source(tokenizer, seed)
    rng = random.Random(seed)

    def size(num_tokens: int) -> int:
        return max(2, round(num_tokens * scale))

    document = take(size(1500))
    questions = [[Ask(document + take(size(40)), size(32))] for _ in range(8)]
    mixed = [Ask(take(size(rng.randint(50, 600))), size(rng.randint(8, 96))) for _ in range(24)]
    root = take(size(600))
    branches = [root + take(size(100)) for _ in range(4)]
    leaves = [Ask(branch + take(size(50)), size(24)) for branch in branches for _ in range(3)]
    return [
        Workload("rag", "8 questions about one document, one after another", questions),
        Workload("samples", "16 samples of one prompt", [[Ask(take(size(1024)), size(64), n=16)]]),
        Workload("beams", "a beam search of width 4", [[Ask(take(size(512)), size(32), beams=4)]]),
        Workload("mixed", "24 prompts of mixed lengths at once", [mixed]),
        Workload("tree", "a root, 4 branches, 3 leaves each, at once", [leaves]),
    ]


def _text_source(tokenizer: Any, seed: int) -> Callable[[int], list[int]]:
    """``take(n)``: the next n tokens of Python's help texts, in an order that the seed gives."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    random.Random(seed).shuffle(texts)
    pool: list[int] = []

    def take(num_tokens: int) -> list[int]:
        while len(pool) < num_tokens:
            if not texts:
                raise ValueError(f"scale: expected prompts that fit the texts, got {num_tokens}")
            pool.extend(tokenizer(texts.pop(), add_special_tokens=False)["input_ids"])
        taken = pool[:num_tokens]
        del pool[:num_tokens]
        return taken

    return take


def common_prefixes(prompts: Sequence[list[int]], shortest: int = 64) -> list[list[int]]:
    """Prefixes of at least ``shortest`` tokens that two prompts or more part at; short ones first.

    >>> common_prefixes([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [6]], shortest=2)
    [[1, 2], [1, 2, 3]]
    """
    found = set()
    for one, other in itertools.pairwise(sorted(prompts)):
        same = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        length = next(same, min(len(one), len(other)))
        if length >= shortest:
            found.add(tuple(one[:length]))
    return [list(prefix) for prefix in sorted(found, key=lambda prefix: (len(prefix), prefix))]


# -- the programs --------------------------------------------------------------------------------


class Program(ABC):
    """Something that generates; `run` answers one round and counts its new tokens."""

    name: str
    settings: str = ""

    def refuses(self, workload: Workload) -> str:
        """Why it cannot run a workload; empty if it can."""
        return ""

    @abstractmethod
    def reset(self) -> None:
        """Forget what is cached."""

    @abstractmethod
    def run(self, asks: Sequence[Ask]) -> tuple[int, float]:
        """Answer ``asks``; returns new tokens, and the `time.perf_counter` of the first."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what it holds."""


class OurEngine(Program):
    """radixkv."""

    name = "radixkv"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.settings = f"{engine.cache.config.dtype} KV, {engine.cache.backend.name}"

    def reset(self) -> None:
        self.engine.cache.clear()

    def run(self, asks: Sequence[Ask]) -> tuple[int, float]:
        params = [_params(ask) for ask in asks]
        start = time.perf_counter()
        results = self.engine.generate([ask.token_ids for ask in asks], params)
        first = start + min(result.metrics.ttft_s for result in results)
        tokens = 0
        for ask, result in zip(asks, results, strict=True):
            best = result.samples[:1] if ask.beams else result.samples
            tokens += sum(len(sample.token_ids) for sample in best)
        return tokens, first


def _params(ask: Ask) -> SamplingParams | BeamParams:
    if ask.beams:
        return BeamParams(
            width=ask.beams, max_new_tokens=ask.max_new_tokens, num_return=1, ignore_eos=True
        )
    return SamplingParams(
        n=ask.n,
        temperature=0.0 if ask.n == 1 else 1.0,
        seed=0,
        max_new_tokens=ask.max_new_tokens,
        ignore_eos=True,
    )


class Transformers(Program):
    """``generate`` of transformers, prompt by prompt, on a model of its own."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.settings = f"{str(model.dtype).removeprefix('torch.')}, one by one"
        self.model.generation_config = copy.deepcopy(model.generation_config)
        self.model.generation_config.eos_token_id = None  # ends are ignored, by all alike
        self.model.generation_config.pad_token_id = 0

    def reset(self) -> None:
        pass  # it keeps nothing between calls

    def run(self, asks: Sequence[Ask]) -> tuple[int, float]:
        clock = _FirstCall()
        tokens = 0
        for ask in asks:
            ids = torch.tensor([ask.token_ids], device=self.model.device)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ask.max_new_tokens,
                do_sample=ask.n > 1,
                top_k=0 if ask.n > 1 else None,
                num_return_sequences=ask.n,
                num_beams=ask.beams or 1,
                logits_processor=[clock],
            )
            tokens += out.shape[0] * (out.shape[1] - ids.shape[1])
        return tokens, clock.at


class _FirstCall:
    """A logits processor that notes when it is called first: the first token is known then."""

    def __init__(self) -> None:
        self.at = math.inf

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.at = min(self.at, time.perf_counter())
        return scores


class OpenVino(Program):
    """`openvino-genai` with continuous batching and its prefix cache, on an exported model."""

    name = "openvino-genai"

    def __init__(self, folder: Path, *, threads: int, cache_gb: int = 1) -> None:
        import openvino
        import openvino_genai

        self._genai, self._tensor = openvino_genai, openvino.Tensor
        self._folder, self._threads, self._cache_gb = folder, threads, cache_gb
        self.settings = f"{openvino_genai.__version__}, its default KV format"
        self._pipeline: Any = None

    def reset(self) -> None:
        config = self._genai.SchedulerConfig()
        config.cache_size = self._cache_gb
        config.enable_prefix_caching = True
        config.max_num_batched_tokens = 1024
        self._pipeline = None  # its cache goes with it
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            str(self._folder),
            scheduler_config=config,
            device="CPU",
            properties={"INFERENCE_NUM_THREADS": self._threads},
        )

    def run(self, asks: Sequence[Ask]) -> tuple[int, float]:
        import numpy as np

        first = math.inf
        handles: list[Any] = []
        numbers = itertools.count()

        def ask_all(asks: Sequence[Ask]) -> None:
            nonlocal first
            for ask in asks:
                ids = self._tensor(np.array([ask.token_ids], dtype=np.int64))
                handles.append(self._pipeline.add_request(next(numbers), ids, self._config(ask)))
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
                if math.isinf(first) and any(handle.can_read() for handle in handles):
                    first = time.perf_counter()

        # It computes a prefix that is not cached yet for each prompt anew: so it is asked first.
        prefixes = common_prefixes([ask.token_ids for ask in asks])
        for prefix in prefixes:
            ask_all([Ask(prefix, 1)])
        handles, first = [], math.inf
        ask_all(asks)
        tokens = 0
        for ask, handle in zip(asks, handles, strict=True):
            outputs = handle.read_all()
            best = outputs[:1] if ask.beams else outputs
            tokens += sum(len(output.generated_ids) for output in best)
        return tokens, first

    def _config(self, ask: Ask) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = ask.max_new_tokens
        config.ignore_eos = True
        if ask.beams:
            config.num_beams = ask.beams
            config.num_return_sequences = 1
        elif ask.n > 1:
            config.do_sample = True
            config.temperature = 1.0
            config.num_return_sequences = ask.n
        return config

    def close(self) -> None:
        self._pipeline = None


class LlamaCpp(Program):
    """`llama-cpp-python`: one sequence at a time, which keeps the last prompt's prefix."""

    name = "llama-cpp-python"

    def __init__(self, file: Path, *, threads: int, max_tokens: int) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            str(file),
            n_ctx=max_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )
        self.settings = f"{llama_cpp.__version__}, {file.name}, f16 KV"

    def refuses(self, workload: Workload) -> str:
        return "no beam search" if any(ask.beams for ask in workload.asks) else ""

    def reset(self) -> None:
        self._llama.reset()
        self._llama._ctx.kv_cache_clear()

    def run(self, asks: Sequence[Ask]) -> tuple[int, float]:
        first, tokens = math.inf, 0
        for ask in asks:
            for _ in range(ask.n):
                made = self._llama.generate(
                    ask.token_ids, temp=0.0 if ask.n == 1 else 1.0, top_k=0, top_p=1.0, min_p=0.0
                )
                for _, _token in zip(range(ask.max_new_tokens), made, strict=False):
                    first = min(first, time.perf_counter())
                    tokens += 1
        return tokens, first

    def close(self) -> None:
        self._llama.close()


def installed_rivals(
    model: Any, *, openvino_model: Path | None, gguf: Path | None, max_tokens: int
) -> tuple[list[Program], list[str]]:
    """The programs that are here to compare with, and a line on each that is not.

    Args:
        model: a transformers model that no engine uses.
        openvino_model: folder of the same model as OpenVINO keeps it.
        gguf: file of the same model as llama.cpp keeps it.
        max_tokens: of the longest prompt with its answer.
    """
    programs: list[Program] = [Transformers(model)]
    missing: list[str] = []
    threads = torch.get_num_threads()
    if importlib.util.find_spec("openvino_genai") is None:
        missing.append("openvino-genai: not installed")
    elif openvino_model is None:
        missing.append("openvino-genai: no exported model (--openvino-model)")
    else:
        programs.append(OpenVino(openvino_model, threads=threads))
    if importlib.util.find_spec("llama_cpp") is None:
        missing.append("llama-cpp-python: not installed")
    elif gguf is None:
        missing.append("llama-cpp-python: no model file (--gguf)")
    else:
        programs.append(LlamaCpp(gguf, threads=threads, max_tokens=max_tokens))
    return programs, missing


# -- offline -------------------------------------------------------------------------------------


def compare(
    engine: Engine,
    workloads: Sequence[Workload],
    *,
    repeats: int = 3,
    openvino_model: Path | None = None,
    gguf: Path | None = None,
    against: Sequence[str] | None = None,
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """`bench_offline` on the engine's own checkpoint.

    Args:
        against: names of programs; None: all that are installed.
    """
    from transformers import AutoModelForCausalLM

    # A second copy: the engine's keeps its weights as the engine likes them.
    model = AutoModelForCausalLM.from_pretrained(
        engine.model.config.name_or_path, dtype=engine.model.dtype
    ).to(engine.model.device)
    longest = max(
        len(ask.token_ids) + ask.max_new_tokens for each in workloads for ask in each.asks
    )
    rivals, missing = installed_rivals(
        model, openvino_model=openvino_model, gguf=gguf, max_tokens=longest
    )
    wanted = [rival for rival in rivals if against is None or rival.name in against]
    try:
        return bench_offline(
            engine, wanted, workloads, repeats=repeats, missing=missing, progress=progress
        )
    finally:
        for rival in rivals:
            rival.close()


def bench_offline(
    engine: Engine,
    rivals: Sequence[Program],
    workloads: Sequence[Workload],
    *,
    repeats: int = 3,
    missing: Sequence[str] = (),
    progress: Progress = lambda text: None,
) -> dict[str, Any]:
    """Time every program on every workload, in turn, and compare medians.

    Raises:
        RuntimeError: a program made another number of tokens than was asked for.
    """
    programs = [OurEngine(engine), *rivals]
    rows = []
    for workload in workloads:
        timings = [Timing(program.name, workload.name) for program in programs]
        for repeat in range(repeats):
            for program, timing in zip(programs, timings, strict=True):
                timing.note = program.refuses(workload)
                if not timing.note:
                    progress(f"{workload.name} {repeat + 1}/{repeats}: {program.name}")
                    _time(program, workload, timing)
        ours = timings[0]
        for timing in timings:
            pairs = list(zip(ours.seconds, timing.seconds, strict=False))
            rows.append(
                asdict(timing)
                | {
                    "median_s": median(timing.seconds) if timing.seconds else None,
                    "first_median_s": median(timing.first_s) if timing.first_s else None,
                    "ours_over_theirs": median(a / b for a, b in pairs) if pairs else None,
                }
            )
    return {
        **describe(engine),
        "suite": "agents",
        "repeats": repeats,
        "programs": {program.name: program.settings for program in programs},
        "missing": list(missing),
        "workloads": [
            {
                "name": workload.name,
                "text": workload.text,
                "prompt_tokens": sum(len(ask.token_ids) for ask in workload.asks),
                "new_tokens": sum(ask.num_new_tokens for ask in workload.asks),
            }
            for workload in workloads
        ],
        "results": rows,
    }


def _time(program: Program, workload: Workload, timing: Timing) -> None:
    program.reset()
    # What only the first pass pays (compiling, memory never touched before) is not timed; the
    # prompt is one that none of the workload's begins with.
    start_ids = workload.asks[0].token_ids
    program.run([Ask([start_ids[-1], *start_ids[:7]], 2)])
    gc.collect()
    tokens, first_s = 0, 0.0
    start = time.perf_counter()
    for number, asks in enumerate(workload.rounds):
        made, first = program.run(asks)
        tokens += made
        if not number:
            first_s = first - start
    timing.seconds.append(time.perf_counter() - start)
    timing.first_s.append(first_s)
    timing.new_tokens = tokens
    expected = sum(ask.num_new_tokens for ask in workload.asks)
    if tokens != expected:
        raise RuntimeError(
            f"{program.name}, {workload.name}: expected {expected} new tokens, got {tokens}; "
            f"times of different work cannot be compared"
        )


# -- online --------------------------------------------------------------------------------------


def bench_online(
    engine: Engine,
    *,
    rate: float = 1.0,
    num_requests: int = 32,
    scale: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Serve requests as they arrive, with exponential gaps, and report what they waited.

    The prompts are questions about four documents, as `agent_workloads` makes them.

    Args:
        rate: requests a second, on average.
        scale: factor on all lengths.

    Returns:
        Percentiles over requests of ``ttft`` (from arrival to the first token) and over tokens of
        ``token`` (from one to the next of a request), throughput and cache hits. Seconds.
    """
    take, rng = _text_source(engine.tokenizer, seed), random.Random(seed)
    documents = [take(max(2, round(600 * scale))) for _ in range(4)]
    arrivals: list[tuple[float, list[int], int]] = []
    at = 0.0
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        prompt = rng.choice(documents) + take(max(2, round(rng.randint(20, 60) * scale)))
        arrivals.append((at, prompt, max(2, round(rng.randint(16, 64) * scale))))
    engine.cache.clear()
    before = engine.stats()
    live: list[tuple[Any, float]] = []
    waited: list[float] = []
    gaps: list[float] = []
    new_tokens = 0
    start = time.perf_counter()
    while arrivals or live:
        now = time.perf_counter() - start
        while arrivals and arrivals[0][0] <= now:
            due, prompt, num_new = arrivals.pop(0)
            request = engine.submit(
                prompt, temperature=0.0, max_new_tokens=num_new, ignore_eos=True
            )
            live.append((request, now - due))  # a step that runs delays what arrives meanwhile
        if not live:
            time.sleep(max(0.0, arrivals[0][0] - now))
            continue
        engine.step()
        for request, late in live:
            if request.done:
                request.result()
                waited.append(late + request.metrics.ttft_s)
                gaps += request.token_gaps
                new_tokens += request.num_tokens
        live = [one for one in live if not one[0].done]
    total_s = time.perf_counter() - start
    after = engine.stats()
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    return {
        **describe(engine),
        "rate": rate,
        "seed": seed,
        "requests": num_requests,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "total_s": total_s,
        "new_tokens_per_s": new_tokens / total_s,
        "hit_rate": (after.cached_tokens - before.cached_tokens) / prompt_tokens,
        **_percentiles("ttft", waited),
        **_percentiles("token", gaps),
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"{name}_p{share}_s": ordered[min(len(ordered) - 1, len(ordered) * share // 100)]
        for share in (50, 95)
    }


# -- steps ---------------------------------------------------------------------------------------


def bench_steps(engine: Engine, *, batch: int = 16, num_steps: int = 64) -> dict[str, Any]:
    """Time decode steps of ``batch`` samples of as many prompts, and what is inside them.

    Returns:
        Medians of a step in milliseconds: ``step_ms``, ``model_ms`` (the forward pass),
        ``sampling_ms``, ``bookkeeping_ms`` (all else: scheduling, pages, building the batch,
        delivery; in CPU time of the thread that steps, so that other work on the machine does not
        count), and ``bookkeeping_share`` of the step.
    """
    rng = random.Random(0)
    for i in range(batch):
        ids = rng.choices(range(min(1000, engine.vocab_size)), k=64 + i % 16)
        engine.submit(ids, max_new_tokens=num_steps + 8, seed=i, ignore_eos=True)
    while engine.core.has_queued or any(
        seq.num_pending > 1 for seq in engine.core.scheduler.running
    ):
        engine.step()
    inside = {"model": 0.0, "sampling": 0.0, "cpu": 0.0}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args)
            finally:
                inside["cpu"] += time.thread_time() - cpu
                inside[name] += time.perf_counter() - start

        return run

    forward, draw = engine.core.runner.forward, _drawing.sample
    engine.core.runner.forward = timed("model", forward)  # type: ignore[method-assign]
    _drawing.sample = timed("sampling", draw)
    rows: list[tuple[float, ...]] = []
    try:
        for _ in range(num_steps):
            inside.update(model=0.0, sampling=0.0, cpu=0.0)
            start, cpu = time.perf_counter(), time.thread_time()
            engine.step()
            rest = time.thread_time() - cpu - inside["cpu"]
            step = time.perf_counter() - start
            rows.append((step, inside["model"], inside["sampling"], rest, rest / step))
    finally:
        engine.core.runner.forward = forward  # type: ignore[method-assign]
        _drawing.sample = draw
    while engine.core.has_requests:
        engine.step()
    step, model, sampling, rest, share = (median(column) for column in zip(*rows, strict=True))
    return {
        "batch": batch,
        "step_ms": 1e3 * step,
        "model_ms": 1e3 * model,
        "sampling_ms": 1e3 * sampling,
        "bookkeeping_ms": 1e3 * rest,
        "bookkeeping_share": share,
    }


# -- for people ----------------------------------------------------------------------------------


def print_offline(result: dict[str, Any]) -> None:
    """Show a result of `bench_offline` as a table."""
    from rich.console import Console
    from rich.table import Table

    sizes = {workload["name"]: workload for workload in result["workloads"]}
    table = Table(
        title=f"{result['model']} in {result['dtype']} on {result['hardware']}, "
        f"medians of {result['repeats']}",
        caption="ratio: radixkv's time over the program's, pair by pair; below 1 is faster",
    )
    for name in ("workload", "tokens in, out", "program"):
        table.add_column(name)
    for name in ("seconds", "first token", "ratio"):
        table.add_column(name, justify="right")
    for row in result["results"]:
        of = sizes[row["workload"]]
        cells = [row["workload"], f"{of['prompt_tokens']:,}, {of['new_tokens']:,}", row["program"]]
        if row["note"]:
            table.add_row(*cells, row["note"], "", "")
            continue
        table.add_row(
            *cells,
            f"{row['median_s']:.2f}",
            f"{row['first_median_s']:.2f}",
            f"{row['ours_over_theirs']:.2f}",
        )
    console = Console(highlight=False)
    console.print(table)
    for name, settings in result["programs"].items():
        console.print(f"{name}: {settings}", style="dim")
    for line in result["missing"]:
        console.print(line, style="dim")


def print_online(result: dict[str, Any]) -> None:
    """Show a result of `bench_online` as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{result['model']} in {result['dtype']} on {result['hardware']}: "
        f"{result['requests']} requests, {result['rate']:g} a second"
    )
    table.add_column("what")
    table.add_column("p50", justify="right")
    table.add_column("p95", justify="right")
    for name, text in (("ttft", "time to first token, ms"), ("token", "time per token, ms")):
        cells = [f"{1e3 * result[f'{name}_p{share}_s']:,.1f}" for share in (50, 95)]
        table.add_row(text, *cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{result['new_tokens']:,} new tokens in {result['total_s']:.1f} s: "
        f"{result['new_tokens_per_s']:.1f} a second; {result['hit_rate']:.1%} of "
        f"{result['prompt_tokens']:,} prompt tokens from the cache"
    )


def print_steps(result: dict[str, Any]) -> None:
    """Show a result of `bench_steps` as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"A decode step of {result['batch']} samples, {result['hardware']}")
    table.add_column("part")
    table.add_column("ms, median", justify="right")
    for name in ("step", "model", "sampling", "bookkeeping"):
        table.add_row(name, f"{result[f'{name}_ms']:.2f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"bookkeeping: {result['bookkeeping_share']:.1%} of a step")
