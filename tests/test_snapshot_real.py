"""A snapshot of a real chat model: a restart that costs no answer and no second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv import Engine, KVConfig
from radixkv.models.small_model import prepare_small_model

pytestmark = pytest.mark.slow

KV = KVConfig(dtype="int8", capacity="192MiB")
NUM_DOCUMENTS, NUM_QUESTIONS = 2, 100
ASK: dict[str, Any] = dict(temperature=0, max_new_tokens=2)


def load(**options: Any) -> Engine:
    folder = prepare_small_model(progress=False)
    return Engine.from_pretrained(folder, kv=KV, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def first() -> Iterator[Engine]:
    with load() as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(first: Engine) -> list[list[int]]:
    """200 questions about two documents of 500 tokens."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:40_000]
    ids = first.tokenizer(text)["input_ids"]
    documents = [ids[2000 * i :][:500] for i in range(NUM_DOCUMENTS)]
    questions = [[*ids[300 + 11 * i :][:4], i + 1000] for i in range(NUM_QUESTIONS)]
    return [document + question for document in documents for question in questions]


def test_warm_answers_after_a_restart_equal_those_before_and_come_8_times_sooner(
    first: Engine, prompts: list[list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "cache.rkv"
    first.generate("Good morning", **ASK)  # compiles and loads what a process needs once
    first.cache.clear()
    cold = [first.generate(prompt, logprobs=1, **ASK) for prompt in prompts[::NUM_QUESTIONS]]
    assert all(result.cached_tokens < 16 for result in cold)
    before = first.generate(prompts, **ASK)
    first.cache.save(path)
    pages = first.cache.stats().pages_cached
    assert path.stat().st_size <= 1.02 * pages * first.cache.codec.bytes_per_page
    with load(snapshot=path) as again:
        assert again.is_batch_invariant
        assert again.cache.stats().pages_cached == pages
        again.generate("Good morning", **ASK)
        warm = [again.generate(prompt, logprobs=1, **ASK) for prompt in prompts[::NUM_QUESTIONS]]
        after = again.generate(prompts, **ASK)
        for a, b in zip(before, after, strict=True):
            assert a.samples[0].token_ids == b.samples[0].token_ids
            assert b.cached_tokens == len(b.prompt_token_ids) - 1
        for a, b in zip(cold, warm, strict=True):
            assert b.cached_tokens == len(b.prompt_token_ids) - 1
            # The very same bits: what was computed cold, and what was read from the file.
            assert a.samples[0].logprobs == b.samples[0].logprobs
        sooner = [a.metrics.ttft_s / b.metrics.ttft_s for a, b in zip(cold, warm, strict=True)]
        assert sorted(sooner)[len(sooner) // 2] >= 8, sooner
        again.cache.check()
        stats = again.cache.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total
