"""The main job on a real model: questions about one document, samples, beams; one store of pages.

Everything shown is measured while it runs, from the engine's own streams and counters.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from radixkv.config import BeamParams, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.machine import processor_name

QUESTIONS = (
    "When was the house built, and by whom?",
    "What is the inn in the village called?",
    "When did otters come back to the creek?",
    "How often are the stones dressed?",
    "What did the sea carry as far as the church?",
)
STORY = "Describe the mill in one sentence."
NUM_SAMPLES = 8
BEAM_WIDTH = 4
ANSWER_TOKENS = 32
# Nineteen short branches end in a part-filled page each: with pages of 16 that is 5 % of all slots.
PAGE_SIZE = 8
SENTENCE_ENDS = (". ", ".\n")  # a small model's second sentence is seldom as true as its first

Chat = list[dict[str, str]]


def document() -> str:
    """Return the handbook that the demo asks about."""
    return resources.files("radixkv.tools").joinpath("demo_document.md").read_text(encoding="utf-8")


def run_demo(engine: Engine, console: Console) -> dict[str, Any]:
    """Ask, sample and search on one document, show it on the console, and return the figures."""
    start = time.perf_counter()
    setting = describe(engine)
    console.print("[bold]radixkv demo[/bold]", f"on {setting['hardware']}")
    console.print(
        f"{setting['model']} in {setting['dtype']}, KV pages in {setting['kv_dtype']}: "
        f"{setting['bytes_per_token']:,} bytes a token"
    )
    if setting["dtype"] == "float32" and engine.model.device.type == "cpu":
        console.print("float32, because most CPUs have to emulate the products of bfloat16")
    # The first pass of a process also pays for compiling and for memory never touched before.
    engine.generate("Good morning", max_new_tokens=2)
    engine.cache.clear()
    figures = {
        **setting,
        "document_tokens": len(_encode(engine, document())),
        **ask_questions(engine, console),
        "samples": draw_samples(engine, console),
        "beams": search_beams(engine, console),
    }
    show_cache(engine, console)
    figures["cache"] = _fields(engine.cache.stats())
    figures["total_s"] = time.perf_counter() - start
    console.print(f"\nDone in {figures['total_s']:.0f} s.")
    return figures


def describe(engine: Engine) -> dict[str, Any]:
    """Return what the figures were measured with: model, formats, hardware, versions."""
    config = engine.model.config
    return {
        "model": Path(config.name_or_path).name or config.model_type,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "kv_dtype": engine.cache.config.dtype,
        "bytes_per_token": engine.cache.stats().bytes_per_token,
        "hardware": hardware(engine.model.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def hardware(device: torch.device) -> str:
    """Name the device that the model runs on, with the threads that a CPU gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def ask_questions(engine: Engine, console: Console) -> dict[str, Any]:
    """Stream an answer to each question; the document before it is computed once."""
    console.rule("1. Five questions about one document")
    params = SamplingParams(temperature=0, max_new_tokens=ANSWER_TOKENS, stop=SENTENCE_ENDS)
    rows: list[dict[str, Any]] = []
    for question in QUESTIONS:
        prompt = _encode(engine, _chat(question))
        console.print(f"\n[bold]{question}[/bold]")
        before, start, ttft_s, answer = engine.cache.stats(), time.perf_counter(), None, ""
        for delta in engine.stream(prompt, params):
            ttft_s = time.perf_counter() - start if ttft_s is None else ttft_s
            answer += delta.text
            console.print(delta.text, end="", markup=False, soft_wrap=True)
        row = {
            "question": question,
            "answer": answer,
            "prompt_tokens": len(prompt),
            "cached_tokens": engine.cache.stats().hit_tokens - before.hit_tokens,
            "ttft_s": ttft_s,
            "total_s": time.perf_counter() - start,
        }
        console.print(
            f"\n  {row['prompt_tokens']:,} prompt tokens, {row['cached_tokens']:,} of them cached; "
            f"first token after {ttft_s:.3f} s",
            style="dim",
        )
        rows.append(row)
    ratio = rows[0]["ttft_s"] / rows[1]["ttft_s"]
    console.print(f"\nThe second question had its first token {ratio:.1f}x sooner than the first.")
    return {"questions": rows, "second_question_sooner": ratio}


def draw_samples(engine: Engine, console: Console) -> dict[str, Any]:
    """Draw samples of one prompt together; count the pages that they hold at the most."""
    console.rule(f"2. {NUM_SAMPLES} samples of one prompt")
    prompt = _encode(engine, _chat(STORY))
    params = SamplingParams(n=NUM_SAMPLES, temperature=0.8, seed=1, max_new_tokens=ANSWER_TOKENS)
    texts = [""] * NUM_SAMPLES
    token_counts = [0] * NUM_SAMPLES
    pages_held = 0
    start = time.perf_counter()
    for delta in engine.stream(prompt, params):
        texts[delta.index] += delta.text
        token_counts[delta.index] += len(delta.token_ids)
        stats = engine.cache.stats()
        pages_held = max(pages_held, stats.pages_private + stats.pages_pinned)
    total_s = time.perf_counter() - start
    page_size = engine.cache.config.page_size
    pages_separate = sum(-(-(len(prompt) + count) // page_size) for count in token_counts)
    for number, text in enumerate(texts, start=1):
        console.print(f"{number}. {' '.join(text.split())}", markup=False)
    console.print(
        f"\n{len(prompt):,} prompt tokens and {sum(token_counts)} new ones in {total_s:.1f} s: "
        f"{pages_held} pages held at the most, {pages_separate} in {NUM_SAMPLES} separate copies "
        f"({pages_separate / pages_held:.1f}x)."
    )
    return {
        "n": NUM_SAMPLES,
        "prompt_tokens": len(prompt),
        "new_tokens": token_counts,
        "pages_held": pages_held,
        "pages_separate": pages_separate,
        "total_s": total_s,
        "texts": texts,
    }


def search_beams(engine: Engine, console: Console) -> dict[str, Any]:
    """Run a beam search after the same document and show every beam with its score."""
    console.rule(f"3. A beam search of width {BEAM_WIDTH}")
    result = engine.generate(
        _encode(engine, _chat(STORY)), BeamParams(width=BEAM_WIDTH, max_new_tokens=ANSWER_TOKENS)
    )
    table = Table("score", "text")
    for sample in result.samples:
        table.add_row(f"{sample.score:.4f}", " ".join(sample.text.split()))
    console.print(table, markup=False)
    console.print(
        f"{len(result.prompt_token_ids):,} prompt tokens, {result.cached_tokens:,} of them cached; "
        f"{result.metrics.total_s:.1f} s in all."
    )
    return {
        "width": BEAM_WIDTH,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.cached_tokens,
        "total_s": result.metrics.total_s,
        "beams": [{"score": sample.score, "text": sample.text} for sample in result.samples],
    }


def show_cache(engine: Engine, console: Console) -> None:
    """Draw the cache tree and the counters of the cache."""
    console.rule("4. What the cache holds now")
    tree = engine.cache.render(max_depth=3, tokenizer=engine.tokenizer)
    console.print(tree, markup=False, no_wrap=True, overflow="ellipsis")
    table = Table("counter", "value")
    table.columns[1].justify = "right"
    for name, value in _fields(engine.cache.stats()).items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else f"{value:,}")
    console.print(table)


def _chat(question: str) -> Chat:
    return [
        {"role": "system", "content": f"Answer from this handbook.\n\n{document()}"},
        {"role": "user", "content": question},
    ]


def _encode(engine: Engine, prompt: str | Chat) -> list[int]:
    """Token ids of a text, or of a chat if the model has a template for one, else of its text."""
    tokenizer = engine.tokenizer
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        return _encode(engine, "\n\n".join(turn["content"] for turn in prompt) + "\n")
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _fields(stats: Any) -> dict[str, Any]:
    values = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}
