"""Faults that were reported of branches and of calls with many prompts, each with its right value.

Wider tests of the same kinds are in test_branch.py and test_many.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from radixkv import Engine, KVConfig, SamplingParams

A, B = list(range(10, 90)), list(range(100, 300))


def kv(**changes: Any) -> KVConfig:
    return KVConfig(**{"dtype": "model", "page_size": 4, "capacity": "4MiB"} | changes)


@pytest.fixture
def engine(tiny_model: Callable[..., Any]) -> Iterator[Engine]:
    with Engine(tiny_model("llama", max_position_embeddings=512), kv=kv()) as made:
        yield made


def say(num_prompt: int, token_ids: list[int]) -> Callable[[Any, Any], Any]:
    """A logits processor that makes a model say ``token_ids``, the last one for ever."""

    def processor(input_ids: Any, scores: Any) -> Any:
        forced = torch.full_like(scores, -1e9)
        forced[:, token_ids[min(input_ids.shape[1] - num_prompt, len(token_ids) - 1)]] = 0
        return forced

    return processor


def test_s1_append_looks_in_the_cache(engine: Engine) -> None:
    engine.generate(A + B, max_new_tokens=1)
    with engine.open(A) as branch:
        branch.append(B)
        assert branch.generate(max_new_tokens=2).metrics.prefill_tokens == 1
    with engine.open(A + B) as branch:
        assert branch.generate(max_new_tokens=2).metrics.prefill_tokens == 1


def test_s1_forks_that_append_the_same_run_it_once(engine: Engine) -> None:
    with engine.open(A) as trunk:
        first, second = trunk.fork(2)
        first.append(B)
        second.append(B)
        before = engine.stats().prefill_tokens
        assert first.generate(max_new_tokens=2).metrics.prefill_tokens == len(B) + 1
        assert second.generate(max_new_tokens=2).metrics.prefill_tokens == 1
        assert engine.stats().prefill_tokens - before == len(B) + 2
        first.close()
        second.close()


def test_b1_a_branch_holds_what_its_text_says(
    tiny_model: Callable[..., Any], byte_tokenizer: Any
) -> None:
    prompt, answer = "The capital of France is", " Paris"
    ids = byte_tokenizer(answer)["input_ids"]
    with (
        Engine(tiny_model("llama"), byte_tokenizer, kv=kv()) as engine,
        engine.open(prompt) as branch,
    ):
        processors = [say(len(branch), ids)]
        result = branch.generate(
            stop=["Paris"], max_new_tokens=9, temperature=0, logits_processors=processors
        )
        assert result.text == " "
        assert byte_tokenizer.decode(branch.token_ids) == prompt + " "


def test_c1_forgotten_branches_give_their_pages_back(tiny_model: Callable[..., Any]) -> None:
    gc.disable()
    try:
        with Engine(tiny_model("llama"), kv=kv(capacity="64KiB")) as small:
            for i in range(400):
                small.open([5 + i % 7, 6, 7, 8 + i]).generate(max_new_tokens=2)
            stats = small.cache.stats()
            assert stats.pages_pinned == stats.pages_private == 0
    finally:
        gc.enable()


def test_c11_the_error_of_a_bad_prompt_says_which(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]") as caught:
        engine.generate([A, [5, -1], B], max_new_tokens=2)
    assert (caught.value.index, caught.value.results) == (1, [None, None, None])
    assert engine.stats().requests_done == 0


def test_c11_one_request_that_fails_loses_no_other_result(engine: Engine) -> None:
    def broken(input_ids: Any, scores: Any) -> Any:
        raise RuntimeError("user code")

    fine = SamplingParams(max_new_tokens=3, temperature=0)
    bad = SamplingParams(max_new_tokens=3, logits_processors=[broken])
    solo = [engine.generate(prompt, fine).samples[0].token_ids for prompt in (A, B)]
    with pytest.raises(RuntimeError, match="user code") as caught:
        engine.generate([A, A, B], [fine, bad, fine])
    assert caught.value.index == 1
    first, failed, last = caught.value.results
    assert failed is None
    assert [first.samples[0].token_ids, last.samples[0].token_ids] == solo
    first, failed, last = engine.generate([A, A, B], [fine, bad, fine], on_error="return")
    assert isinstance(failed, RuntimeError)
    assert [first.samples[0].token_ids, last.samples[0].token_ids] == solo
