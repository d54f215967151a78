"""The engine on small random models: transformers' own results, whatever is cached."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

import radixkv
from radixkv import (
    BeamParams,
    CapacityError,
    ContextLengthError,
    Engine,
    EngineClosedError,
    KVConfig,
    KVSpec,
    SamplingParams,
    UnsupportedModelError,
)
from radixkv.attention.layout import KVCodec

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral-window",
    "gemma2",
    "gpt2",
    "opt",
    "gpt-oss",
)


def kv(dtype: str = "model", **changes: Any) -> KVConfig:
    return KVConfig(**{"dtype": dtype, "page_size": 4, "capacity": "8MiB"} | changes)


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=num_tokens)


def check_idle(engine: Engine) -> None:
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert stats.pages_pinned == stats.pages_private == 0


def transformers_greedy(model: Any, token_ids: list[int], max_new_tokens: int) -> list[int]:
    out = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    return out[0, len(token_ids) :].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(tiny_model: Any, name: str) -> None:
    model = tiny_model(name)
    prompts = [random_ids(n, seed=n) for n in (1, 2, 3, 4, 5, 13, 37)]
    expected = [transformers_greedy(model, prompt, 20) for prompt in prompts]
    with Engine(model, kv=kv()) as engine:
        for max_batch_tokens in (7, 1024):
            engine.cache.clear()
            engine.core.scheduler.max_batch_tokens = max_batch_tokens
            cold = engine.generate(prompts, temperature=0, max_new_tokens=20)
            warm = [engine.generate(p, temperature=0, max_new_tokens=20) for p in prompts]
            assert [r.samples[0].token_ids for r in cold] == expected
            assert [r.samples[0].token_ids for r in warm] == expected
            assert [r.cached_tokens for r in warm] == [len(p) - 1 for p in prompts]
        check_idle(engine)
    # The model outside the engine still computes what it did.
    assert transformers_greedy(model, prompts[-1], 20) == expected[-1]


@pytest.mark.parametrize("dtype", ["model", "int8", "fp8", "fp8_e5m2", "int4"])
def test_warm_equals_cold_batched_or_alone_in_any_order(tiny_model: Any, dtype: str) -> None:
    model = tiny_model("llama")
    base = random_ids(30)
    prompts = [base[:n] + random_ids(5, seed=n) for n in (0, 3, 4, 11, 12, 29, 30)]
    options = dict(temperature=0, max_new_tokens=12, logprobs=5)
    with Engine(model, kv=kv(dtype)) as engine:
        cold = []
        for prompt in prompts:
            engine.cache.clear()
            cold.append(engine.generate(prompt, **options))
        order = list(range(len(prompts)))
        random.Random(1).shuffle(order)
        batched = engine.generate([prompts[i] for i in order], **options)
        alone = [engine.generate(prompts[i], **options) for i in reversed(order)]
        check_idle(engine)
    for results in (
        dict(zip(order, batched, strict=True)),
        dict(zip(reversed(order), alone, strict=True)),
    ):
        for i, result in results.items():
            assert result.samples[0].token_ids == cold[i].samples[0].token_ids
            for warm_top, cold_top in zip(
                result.samples[0].logprobs, cold[i].samples[0].logprobs, strict=True
            ):
                assert warm_top.keys() == cold_top.keys()
                assert all(abs(warm_top[t] - cold_top[t]) < 1e-3 for t in warm_top)


def test_quantization_really_happens(tiny_model: Any) -> None:
    model = tiny_model("llama")
    prompt = random_ids(40)
    tops = {}
    for dtype in ("model", "int8", "fp8", "int4"):
        with Engine(model, kv=kv(dtype)) as engine:
            result = engine.generate(prompt, temperature=0, max_new_tokens=1, logprobs=3)
            tops[dtype] = result.samples[0].logprobs[0]
            spec = engine.cache.codec.spec
            rows = 2 * spec.num_layers * spec.num_kv_heads
            expected = {"model": 16 * 4, "int8": 16 + 2, "fp8": 16 + 2, "int4": 8 + 2}
            assert engine.cache.stats().bytes_per_token == rows * expected[dtype]
    assert tops["int8"] != tops["model"] != tops["fp8"] != tops["int8"] != tops["int4"]


def test_samples_share_the_prompts_pages(tiny_model: Any) -> None:
    model = tiny_model("llama")
    prompt = random_ids(101)
    with Engine(model, kv=kv("int8")) as engine:
        request = engine.submit(prompt, n=8, seed=3, max_new_tokens=9, ignore_eos=True)
        most = 0
        while not request.done:
            engine.step()
            stats = engine.cache.stats()
            most = max(most, stats.pages_total - stats.pages_free)
        tail = -(-(101 + 9 - 1) // 4) - 101 // 4
        assert most <= 101 // 4 + 8 * tail
        result = request.result()
        assert len({tuple(s.token_ids) for s in result.samples}) == 8
        check_idle(engine)


def test_sixteen_samples_hold_at_most_35_megabytes_of_the_real_models_size(
    tiny_model: Any,
) -> None:
    """16 samples of 64 tokens of a 1,024-token prompt; 16 copies would be 207 MB in int8."""
    real = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64)
    bytes_per_page = KVCodec(real, KVConfig()).bytes_per_page
    model = tiny_model("llama", max_position_embeddings=2048)
    with Engine(model, kv=KVConfig(capacity="8MiB")) as engine:
        request = engine.submit(random_ids(1024), n=16, max_new_tokens=64, ignore_eos=True)
        most = 0
        while not request.done:
            engine.step()
            most = max(most, engine.cache.pool.num_pages - engine.cache.num_free_pages)
        assert most * bytes_per_page <= 35e6
        check_idle(engine)


def test_samples_depend_on_seed_and_index_alone(tiny_model: Any) -> None:
    model = tiny_model("llama")
    prompt = random_ids(10)
    with Engine(model, kv=kv()) as engine:
        rng = torch.random.get_rng_state()

        def draw(**fields: Any) -> list[list[int]]:
            result = engine.generate(prompt, max_new_tokens=16, ignore_eos=True, **fields)
            return [s.token_ids for s in result.samples]

        four = draw(n=4, seed=7)
        assert len({tuple(ids) for ids in four}) == 4
        assert draw(n=4, seed=7) == four
        assert draw(n=1, seed=7) == four[:1]
        assert draw(n=8, seed=7)[:4] == four
        beside = engine.generate(
            [random_ids(20, seed=1), prompt],
            [SamplingParams(n=3), SamplingParams(n=4, seed=7, max_new_tokens=16, ignore_eos=True)],
        )
        assert [s.token_ids for s in beside[1].samples] == four
        assert draw(n=2) != draw(n=2)
        greedy = draw(n=3, temperature=0)
        assert greedy[0] == greedy[1] == greedy[2]
        assert torch.equal(rng, torch.random.get_rng_state())
        check_idle(engine)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_are_those_of_transformers(
    tiny_model: Any, early_stopping: Any, length_penalty: float
) -> None:
    model = tiny_model("llama", seed=5)
    with Engine(model, kv=kv()) as engine:
        for num_prompt in (1, 6, 14):
            prompt = random_ids(num_prompt, seed=num_prompt)
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, num_prompt, dtype=torch.long),
                do_sample=False,
                num_beams=3,
                num_return_sequences=3,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                max_new_tokens=12,
                return_dict_in_generate=True,
                output_scores=True,
            )
            result = engine.generate(
                prompt,
                BeamParams(
                    width=3,
                    max_new_tokens=12,
                    length_penalty=length_penalty,
                    early_stopping=early_stopping,
                ),
            )
            for i, beam in enumerate(result.samples):
                row = expected.sequences[i, num_prompt:].tolist()
                assert beam.token_ids == row[: len(beam.token_ids)]
                assert all(token_id == 0 for token_id in row[len(beam.token_ids) :])
                assert beam.score == pytest.approx(float(expected.sequences_scores[i]), abs=1e-4)
            check_idle(engine)


@pytest.mark.parametrize("dtype", ["int8", "model"])
def test_each_beam_equals_a_run_of_its_own_history(tiny_model: Any, dtype: str) -> None:
    model = tiny_model("llama", seed=2)
    prompt = random_ids(14)  # three whole pages and a part
    with Engine(model, kv=kv(dtype)) as engine:
        result = engine.generate(prompt, BeamParams(width=3, max_new_tokens=10, ignore_eos=True))
        engine.cache.clear()
        for beam in result.samples:
            (score,) = engine.score(prompt, [beam.token_ids])
            assert score.logprob == pytest.approx(beam.cumulative_logprob, abs=1e-3)
        check_idle(engine)


@pytest.mark.parametrize("ending", ["length", "eos", "stop"])
def test_kv_of_the_last_token_is_not_claimed(
    tiny_model: Any, byte_tokenizer: Any, ending: str
) -> None:
    model = tiny_model("llama")
    prompt = random_ids(5)
    for page_size in (1, 4):
        with Engine(model, byte_tokenizer, kv=kv(page_size=page_size)) as engine:
            free_run = engine.generate(prompt, temperature=0, max_new_tokens=4, ignore_eos=True)
            generated = free_run.samples[0].token_ids
            engine.cache.clear()
            fields: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
            if ending == "eos":
                fields = {"max_new_tokens": 30, "stop_token_ids": [generated[3]]}
            if ending == "stop" and free_run.text:
                fields["stop"] = [free_run.text[-1]]
            engine.generate(prompt, temperature=0, **fields)
            longer = prompt + generated + random_ids(3, seed=9)
            stored = engine.cache.match(longer)
            assert stored <= 5 + 3
            if ending == "length":
                assert stored == 5 + 3
            warm = engine.generate(longer, temperature=0, max_new_tokens=5)
            assert warm.cached_tokens == stored
            engine.cache.clear()
            cold = engine.generate(longer, temperature=0, max_new_tokens=5)
            assert warm.samples[0].token_ids == cold.samples[0].token_ids
            check_idle(engine)


def test_whole_prompt_cached_still_runs_one_token(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with Engine(model, kv=kv()) as engine:
        for num_prompt in range(1, 14):
            engine.cache.clear()
            prompt = random_ids(num_prompt, seed=num_prompt)
            first = engine.generate(prompt, temperature=0, max_new_tokens=5)
            second = engine.generate(prompt, temperature=0, max_new_tokens=5)
            third = engine.generate(prompt, temperature=0, max_new_tokens=1)
            assert second.samples[0].token_ids == first.samples[0].token_ids
            assert third.samples[0].token_ids == first.samples[0].token_ids[:1]
            for result in (second, third):
                assert result.cached_tokens == num_prompt - 1
                assert result.metrics.prefill_tokens == 1
            check_idle(engine)


def test_prompt_logprobs_do_not_depend_on_the_cache(tiny_model: Any) -> None:
    model = tiny_model("llama")
    base = random_ids(8)
    prompts = [base + random_ids(n, seed=n) for n in (3, 6, 9)]
    with torch.inference_mode():
        dense = [model(input_ids=torch.tensor([p])).logits[0].log_softmax(-1) for p in prompts]
    import itertools

    for max_batch_tokens in (5, 1024):
        with Engine(model, kv=kv(), max_batch_tokens=max_batch_tokens) as engine:
            for order in itertools.permutations(range(3)):
                for i in order:
                    result = engine.generate(prompts[i], prompt_logprobs=2, max_new_tokens=1)
                    assert result.prompt_logprobs[0] is None
                    assert len(result.prompt_logprobs) == len(prompts[i])
                    for j, top in enumerate(result.prompt_logprobs[1:], start=1):
                        own = float(dense[i][j - 1, prompts[i][j]])
                        assert top[prompts[i][j]] == pytest.approx(own, abs=1e-4)
                        best = dense[i][j - 1].topk(2)
                        assert set(best.indices.tolist()) <= set(top)
            check_idle(engine)


def test_score_is_the_models_own_likelihood(tiny_model: Any) -> None:
    model = tiny_model("llama")
    prompt = random_ids(9)
    tails = [random_ids(n, seed=40 + n) for n in (1, 2, 5, 11)]
    for max_batch_tokens in (4, 1024):
        with Engine(model, kv=kv(), max_batch_tokens=max_batch_tokens) as engine:
            for _ in range(2):  # cold, then warm
                scores = engine.score(prompt, tails)
                for tail, score in zip(tails, scores, strict=True):
                    with torch.inference_mode():
                        logits = model(input_ids=torch.tensor([prompt + tail])).logits[0]
                    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
                    own = logprobs.gather(1, torch.tensor(tail)[:, None])[:, 0].tolist()
                    assert score.token_logprobs == pytest.approx(own, abs=1e-4)
                    assert score.logprob == pytest.approx(sum(own), abs=1e-3)
                    assert score.is_greedy == (logprobs.argmax(-1).tolist() == tail)
                check_idle(engine)
            best = engine.generate(prompt, temperature=0, max_new_tokens=4, ignore_eos=True)
            assert engine.score(prompt, [best.samples[0].token_ids])[0].is_greedy
            steps, ran = engine.stats().steps, engine.stats().prefill_tokens
            engine.cache.clear()
            engine.score(prompt, tails)
            if max_batch_tokens == 1024:
                assert engine.stats().steps == steps + 2  # the prompt, then all that follows it
            assert engine.stats().prefill_tokens == ran + len(prompt)


def test_small_pool_serves_many_requests_by_preemption(tiny_model: Any) -> None:
    model = tiny_model("llama")
    prompts = [random_ids(10, seed=i) for i in range(6)]
    with Engine(model, kv=kv()) as engine:
        expected = engine.generate(prompts, n=2, seed=1, max_new_tokens=22, ignore_eos=True)
        page_bytes = engine.cache.codec.bytes_per_page
    with Engine(model, kv=kv(capacity=page_bytes * 8)) as engine:  # 32 tokens; 31 needed each
        got = engine.generate(prompts, n=2, seed=1, max_new_tokens=22, ignore_eos=True)
        for a, b in zip(got, expected, strict=True):
            assert [s.token_ids for s in a.samples] == [s.token_ids for s in b.samples]
        assert engine.stats().preemptions > 0
        check_idle(engine)


def test_beams_in_a_pool_that_just_holds_them(tiny_model: Any) -> None:
    model = tiny_model("llama", seed=5)
    prompt = random_ids(10)
    params = BeamParams(width=3, max_new_tokens=9, ignore_eos=True)
    with Engine(model, kv=kv()) as engine:
        expected = engine.generate(prompt, params)
        page_bytes = engine.cache.codec.bytes_per_page
    pages = 2 + 3 * 3  # two whole prompt pages, and three more for each beam
    with Engine(model, kv=kv(capacity=page_bytes * pages)) as engine:
        others = [random_ids(12, seed=s) for s in (1, 2)]
        got = engine.generate(
            [*others, prompt], [SamplingParams(max_new_tokens=20, seed=1)] * 2 + [params]
        )[2]
        assert [s.token_ids for s in got.samples] == [s.token_ids for s in expected.samples]
        check_idle(engine)
        with pytest.raises(CapacityError, match="beams"):
            engine.generate(prompt, BeamParams(width=4, max_new_tokens=9))


def test_requests_that_share_an_uncached_prefix_compute_it_once(tiny_model: Any) -> None:
    model = tiny_model("llama")
    base = random_ids(64)
    prompts = [base + random_ids(3, seed=i) for i in range(5)]
    with Engine(model, kv=kv(), max_batch_tokens=2048) as engine:
        results = engine.generate(prompts, temperature=0, max_new_tokens=2)
        assert sum(r.metrics.prefill_tokens for r in results) == 67 + 4 * 3
        assert sorted(r.cached_tokens for r in results) == [0, 64, 64, 64, 64]


def test_request_that_can_never_fit_is_refused_at_once(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with Engine(model, kv=kv()) as probe:
        page_bytes = probe.cache.codec.bytes_per_page
    with Engine(model, kv=kv(capacity=4 * page_bytes)) as engine:
        small = random_ids(3)
        with pytest.raises(CapacityError, match=r"17 tokens.*16 tokens"):
            engine.generate(random_ids(17), max_new_tokens=1)
        assert engine.generate(small, max_new_tokens=2).samples[0].finish_reason
        with pytest.raises(CapacityError):
            engine.generate(random_ids(10), max_new_tokens=20)
        assert engine.generate(small, max_new_tokens=2).samples[0].finish_reason
        exact = engine.generate(random_ids(16), max_new_tokens=1)
        assert len(exact.samples[0].token_ids) == 1
        both = engine.generate([random_ids(9, 1), random_ids(9, 2)], max_new_tokens=6)
        assert len(both) == 2
        assert engine.generate(small, max_new_tokens=2).samples[0].finish_reason
        check_idle(engine)


def test_bad_input_names_the_fault_and_changes_nothing(
    tiny_model: Any, byte_tokenizer: Any
) -> None:
    model = tiny_model("llama")
    with Engine(model, byte_tokenizer, kv=kv()) as engine:
        engine.generate("the engine", max_new_tokens=3)
        before = engine.cache.stats()
        bad: list[tuple[type[Exception], Any, dict[str, Any]]] = [
            (ValueError, "", {}),
            (ValueError, [], {}),
            (ValueError, [5, 1000], {}),
            (ValueError, [5, -1], {}),
            (TypeError, [5, 1.5], {}),
            (TypeError, [True, False], {}),
            (ContextLengthError, random_ids(250), {"max_new_tokens": 7}),
            (TypeError, "the", {"tempratur": 1}),
            (ValueError, "the", {"temperature": -1}),
            (ValueError, "the", {"top_p": 0}),
            (ValueError, "the", {"n": 0}),
            (ValueError, "the", {"stop_token_ids": [1000]}),
            (ValueError, "the", {"logit_bias": {1000: 1.0}}),
            (ValueError, [{"role": "user"}], {}),
            (TypeError, "the", {"namespace": ["a list"]}),
        ]
        for error, prompt, fields in bad:
            with pytest.raises(error) as caught:
                engine.generate(prompt, **fields)
            assert str(caught.value)
            with pytest.raises(error):
                engine.stream(prompt, **fields)
            # One bad prompt in a list: nothing is run for the others.
            with pytest.raises(error):
                engine.generate(["the", prompt], **fields)
        after = engine.cache.stats()
        assert after == before
        check_idle(engine)
        byte_tokenizer.chat_template, template = None, byte_tokenizer.chat_template
        try:
            with pytest.raises(ValueError, match="template"):
                engine.generate([{"role": "user", "content": "hi"}])
        finally:
            byte_tokenizer.chat_template = template
        assert engine.generate("the", max_new_tokens=1).samples[0].token_ids
    with pytest.raises(ValueError, match=r"int8.*fp8.*int4"):
        KVConfig(dtype="int3")
    with pytest.raises(ValueError, match="bytes"):
        Engine(model, kv=kv(capacity=100))
    for call in (
        lambda: engine.generate("the"),
        lambda: engine.stream("the"),
        lambda: engine.open("the"),
        lambda: engine.score("the", ["a"]),
        lambda: engine.submit("the"),
        engine.step,
        engine.stats,
        lambda: asyncio.run(engine.agenerate("the")),
    ):
        with pytest.raises(EngineClosedError):
            call()
    engine.close()


def test_prompts_in_any_container_are_one_prompt(tiny_model: Any) -> None:
    model = tiny_model("llama")
    ids = random_ids(7)
    with Engine(model, kv=kv()) as engine:
        engine.generate(ids, max_new_tokens=1)
        for same in (tuple(ids), np.array(ids), np.array(ids, np.int32), torch.tensor(ids)):
            assert engine.generate(same, max_new_tokens=1).cached_tokens == 6
        assert len(engine.generate([ids, tuple(ids), torch.tensor(ids)], max_new_tokens=1)) == 3


class Clock:
    """Stands in for the module `time`: each look is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


def test_timeout_ends_with_abort(tiny_model: Any, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    clock = Clock()
    for module in ("core", "request", "beam_request", "drawing", "scheduler"):
        monkeypatch.setattr(f"radixkv.engine.{module}.time", clock)
    with Engine(model, kv=kv()) as engine:
        fields: dict[str, Any] = dict(max_new_tokens=250, ignore_eos=True, timeout_s=60.0)
        result = engine.generate(random_ids(5), **fields)
        assert result.samples[0].finish_reason == "abort"
        assert 5 < len(result.samples[0].token_ids) <= 60
        check_idle(engine)
        beams = engine.generate(random_ids(5), BeamParams(width=3, **fields))
        assert {sample.finish_reason for sample in beams.samples} == {"abort"}
        assert 5 < len(beams.samples[0].token_ids) <= 60
        never = engine.generate(random_ids(5), max_new_tokens=4, ignore_eos=True, timeout_s=1e-9)
        assert (never.samples[0].finish_reason, never.samples[0].token_ids) == ("abort", [])
        check_idle(engine)


def test_namespaces_never_share(tiny_model: Any) -> None:
    model = tiny_model("llama")
    prompt = random_ids(20)
    with Engine(model, kv=kv()) as engine:
        for namespace in (None, "a", ("a", 1), ("a", 2)):
            first = engine.generate(prompt, namespace=namespace, max_new_tokens=1)
            again = engine.generate(prompt, namespace=namespace, max_new_tokens=1)
            assert (first.cached_tokens, again.cached_tokens) == (0, 19)


def test_branches_fork_truncate_and_score(tiny_model: Any, byte_tokenizer: Any) -> None:
    model = tiny_model("llama")
    with Engine(model, byte_tokenizer, kv=kv("int8")) as engine:
        prompt = random_ids(21)
        with engine.open(prompt) as branch:
            assert branch.cached_tokens == 0
            first = branch.generate(temperature=0, max_new_tokens=6, ignore_eos=True)
            assert branch.token_ids == prompt + first.samples[0].token_ids
            branch.append(random_ids(5, seed=2))
            so_far = list(branch.token_ids)
            private = engine.cache.stats().pages_private
            twins = branch.fork(3)
            assert engine.cache.stats().pages_private - private <= 2
            texts = [
                t.generate(seed=i, max_new_tokens=5, ignore_eos=True) for i, t in enumerate(twins)
            ]
            for i, (twin, result) in enumerate(zip(twins, texts, strict=True)):
                assert result.cached_tokens == len(so_far) - 1
                engine.cache.clear()
                cold = engine.generate(so_far, seed=i, max_new_tokens=5, ignore_eos=True)
                assert result.samples[0].token_ids == cold.samples[0].token_ids
                assert twin.token_ids == so_far + cold.samples[0].token_ids
            kept = branch.generate(keep=False, temperature=0, max_new_tokens=3)
            assert branch.token_ids == so_far and kept.samples
            scores = branch.score([[5, 6], [7]])
            plain = engine.score(so_far, [[5, 6], [7]])
            for a, b in zip(scores, plain, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            branch.truncate(21)
            assert branch.token_ids == prompt
            again = branch.generate(temperature=0, max_new_tokens=6, ignore_eos=True)
            assert again.samples[0].token_ids == first.samples[0].token_ids
            for twin in twins:
                twin.close()
                with pytest.raises(EngineClosedError):
                    twin.generate(max_new_tokens=1)
        check_idle(engine)


def test_one_bad_request_does_not_take_others_along(tiny_model: Any) -> None:
    model = tiny_model("llama")

    def explode(input_ids: Any, scores: Any) -> Any:
        raise RuntimeError("user code")

    with Engine(model, kv=kv()) as engine:
        good = [engine.submit(random_ids(6, i), seed=i, max_new_tokens=5) for i in range(3)]
        bad = engine.submit(random_ids(6, 9), max_new_tokens=5, logits_processors=[explode])
        while not all(r.done for r in [*good, bad]):
            engine.step()
        with pytest.raises(RuntimeError, match="user code"):
            bad.result()
        for i, request in enumerate(good):
            same = engine.generate(random_ids(6, i), seed=i, max_new_tokens=5)
            assert request.result().samples[0].token_ids == same.samples[0].token_ids
        check_idle(engine)


def test_non_finite_kv_is_a_named_error(tiny_model: Any) -> None:
    model = tiny_model("llama", fresh=True)
    with Engine(model, kv=kv("int8")) as engine:
        good = random_ids(6)
        expected = engine.generate(good, temperature=0, max_new_tokens=3)
        with torch.no_grad():
            model.model.embed_tokens.weight[7] = float("nan")
        requests = [engine.submit(p, temperature=0, max_new_tokens=3) for p in ([7, 8], good)]
        while not all(r.done for r in requests):
            engine.step()
        with pytest.raises(radixkv.NonFiniteError, match=r"K of layer 0, KV head 0, 1"):
            requests[0].result()
        assert requests[1].result().samples[0].token_ids == expected.samples[0].token_ids
        assert engine.cache.match([7, 8, 9]) == 0
        check_idle(engine)


def test_models_that_cannot_be_served_are_refused_by_name() -> None:
    import transformers as tf

    common = dict(vocab_size=100, hidden_size=32)
    bloom = tf.BloomForCausalLM(tf.BloomConfig(**common, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        Engine(bloom)
    mamba = tf.MambaForCausalLM(tf.MambaConfig(**common, num_hidden_layers=2, state_size=4))
    with pytest.raises(UnsupportedModelError, match="Mamba"):
        Engine(mamba)
    t5 = tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        Engine(t5)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_up_to_the_end_of_the_table(tiny_model: Any, name: str) -> None:
    model = tiny_model(name)
    prompt = random_ids(240)
    with Engine(model, kv=kv()) as engine:
        cold = engine.generate(prompt, temperature=0, max_new_tokens=16, ignore_eos=True)
        warm = engine.generate(prompt, temperature=0, max_new_tokens=16, ignore_eos=True)
        assert len(warm.samples[0].token_ids) == 16
        assert warm.samples[0].token_ids == cold.samples[0].token_ids
        with pytest.raises(ContextLengthError, match="256"):
            engine.generate(prompt, max_new_tokens=17)
        check_idle(engine)


def test_sliding_windows_reuse_any_prefix(tiny_model: Any) -> None:
    model = tiny_model("gemma2")
    talk = random_ids(20)
    with Engine(model, kv=kv("int8")) as engine:
        prompts = [talk, talk[:12], talk[:6], talk, talk[:4] + random_ids(15, seed=3)]
        warm = [engine.generate(p, temperature=0, max_new_tokens=8) for p in prompts]
        for prompt, result in zip(prompts, warm, strict=True):
            engine.cache.clear()
            cold = engine.generate(prompt, temperature=0, max_new_tokens=8)
            assert result.samples[0].token_ids == cold.samples[0].token_ids


def test_statistics_for_prometheus(tiny_model: Any) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from radixkv.integrations.prometheus import EngineCollector

    model = tiny_model("llama")
    with Engine(model, kv=kv()) as engine:
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine, name="mine"))
        engine.generate(random_ids(9), max_new_tokens=4, ignore_eos=True)
        text = generate_latest(registry).decode()
        assert 'radixkv_requests_done_total{engine="mine"} 1.0' in text
        assert 'radixkv_prefill_tokens_total{engine="mine"} 9.0' in text
        total = engine.cache.stats().pages_total
        assert f'radixkv_cache_pages_total{{engine="mine"}} {float(total)}' in text
    assert generate_latest(registry) == b""


def test_an_engine_does_not_survive_fork(tiny_model: Any, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    with Engine(model, kv=kv()) as engine:
        here = engine.core._pid
        monkeypatch.setattr(engine.core, "_pid", here + 1)
        with pytest.raises(radixkv.RadixKVError, match=r"process.*fork"):
            engine.generate(random_ids(3))
        monkeypatch.setattr(engine.core, "_pid", here)
        assert engine.generate(random_ids(3), max_new_tokens=1).samples


@pytest.mark.parametrize(
    ("messages", "joint"),
    [
        ([{"role": "user", "content": "and then"}], "\n<s>user\nand then</s>\n<s>assistant\n"),
        (
            [{"role": "tool", "content": "42"}, {"role": "user", "content": "so"}],
            "\n<s>tool\n42</s>\n<s>user\nso</s>\n<s>assistant\n",
        ),
    ],
)
def test_messages_continue_a_branch_as_the_template_does(
    tiny_model: Any, byte_tokenizer: Any, messages: Any, joint: str
) -> None:
    model = tiny_model("llama")
    with (
        Engine(model, byte_tokenizer, kv=kv()) as engine,
        engine.open([{"role": "user", "content": "the one"}]) as branch,
    ):
        opened = list(branch.token_ids)
        branch.append(byte_tokenizer("an answer", add_special_tokens=False)["input_ids"])
        length = len(branch.token_ids)
        branch.append(messages)  # the answer was cut short: its turn is closed first
        assert byte_tokenizer.decode(branch.token_ids[length:]) == "</s>" + joint
        branch.truncate(length)
        branch.append([byte_tokenizer.eos_token_id])
        branch.append(messages)  # the turn is closed already
        assert byte_tokenizer.decode(branch.token_ids[length + 1 :]) == joint
        branch.append("the ")
        assert byte_tokenizer.decode(branch.token_ids[-2:]).endswith("the ")
        whole = [
            {"role": "user", "content": "the one"},
            {"role": "assistant", "content": "an answer"},
        ]
        again = engine.submit([*whole, *messages], max_new_tokens=1)
        assert again.prompt_token_ids[: len(opened)] == opened
        branch.truncate(length)
        branch.append(messages)
        assert branch.token_ids == again.prompt_token_ids
        engine.abort(again)


def test_half_a_score_is_no_score(tiny_model: Any, monkeypatch: Any) -> None:
    """The engine is closed between the third step and the fourth, of fifty and more."""
    engine = Engine(tiny_model("llama"), kv=kv(), max_batch_tokens=4)
    begun, closed = threading.Event(), threading.Event()
    looks = iter(range(3))

    def has_work(scheduler: Any) -> bool:  # asked by the engine's thread after each step
        if next(looks, None) is None:
            begun.set()
            assert closed.wait(60)
        return True

    monkeypatch.setattr(type(engine.core.scheduler), "has_work", property(has_work))
    got: list[Any] = []

    def ask() -> None:
        try:
            got.append(engine.score(random_ids(200), [random_ids(30)] * 3))
        except EngineClosedError as error:
            got.append(error)
        finally:
            closed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(60)
    assert 0 < engine.core._tally._totals["steps"] < 50
    engine.close()
    thread.join()
    assert isinstance(got[0], EngineClosedError)


def test_a_branch_gives_prompt_logprobs_of_every_token(tiny_model: Any) -> None:
    model = tiny_model("llama")
    prompt = random_ids(10)
    with Engine(model, kv=kv()) as engine:
        plain = engine.generate(prompt, max_new_tokens=1, prompt_logprobs=1).prompt_logprobs
        with engine.open(prompt) as branch:
            params = SamplingParams(max_new_tokens=1, prompt_logprobs=1)
            held = branch.generate(params, keep=False).prompt_logprobs
        assert len(held) == len(plain) == 10
        for a, b in zip(held[1:], plain[1:], strict=True):
            assert a == pytest.approx(b, abs=1e-4)
        check_idle(engine)


def test_opening_a_branch_evicts_nothing(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with Engine(model, kv=kv()) as probe:
        page_bytes = probe.cache.codec.bytes_per_page
    with Engine(model, kv=kv(capacity=4 * page_bytes)) as engine:
        engine.generate(random_ids(12), max_new_tokens=1)
        with engine.open(random_ids(16, seed=5)):
            assert engine.cache.match(random_ids(12)) == 12


def test_a_callback_that_exits_fails_its_requests_and_no_others_later(tiny_model: Any) -> None:
    model = tiny_model("llama")

    def leave(input_ids: Any, scores: Any) -> Any:
        raise SystemExit(1)

    with Engine(model, kv=kv()) as engine:
        with pytest.raises(radixkv.RadixKVError, match="SystemExit"):
            engine.generate(random_ids(5), max_new_tokens=2, logits_processors=[leave])
        assert engine.generate(random_ids(5), max_new_tokens=2).samples

        def again(input_ids: Any, scores: Any) -> Any:
            engine.generate([5], max_new_tokens=1)

        with pytest.raises(radixkv.RadixKVError, match="inside one of its own steps"):
            engine.generate(random_ids(5), max_new_tokens=2, logits_processors=[again])
        check_idle(engine)


def test_beams_aborted_before_they_start_are_one_empty_sample(tiny_model: Any) -> None:
    model = tiny_model("llama")
    with Engine(model, kv=kv()) as engine:
        request = engine.submit(random_ids(5), BeamParams(width=3))
        engine.abort(request)
        (sample,) = request.result().samples
        assert (sample.token_ids, sample.finish_reason) == ([], "abort")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_tensors_that_do_not_fit_are_refused(backend: str) -> None:
    spec = radixkv.KVSpec(num_layers=2, num_kv_heads=2, head_dim=16)
    config = KVConfig(capacity="64KiB", page_size=4)
    cache = radixkv.PrefixCache(spec, config, backend=backend)
    rows = torch.randn(10, 2, 16)
    with cache.acquire(range(10)) as lease:
        for bad in (rows.int(), rows.numpy(), None, rows.to("meta")):
            with pytest.raises((TypeError, ValueError)):
                lease.write(0, bad, bad)
        grad = rows.clone().requires_grad_() * 2
        lease.write(0, grad, grad)
        lease.write(1, rows, rows)
        assert not cache.layer(0).k_pages.requires_grad
        for shape in ((10, 4, 15), (10, 4, 32), (10, 3, 16), (10, 0, 16), (10, 64)):
            with pytest.raises(ValueError, match="q: expected"):
                lease.attend(0, torch.randn(shape))
        with pytest.raises(TypeError, match="q: expected"):
            lease.attend(0, torch.ones(10, 4, 16, dtype=torch.int32))
        assert lease.attend(0, torch.randn(10, 4, 16)).shape == (10, 4, 16)
    for wrong in ((spec, {"dtype": "int8"}), (None, config)):
        with pytest.raises(TypeError, match="expected a KV"):
            radixkv.PrefixCache(*wrong)
    with pytest.raises(TypeError, match="causal LM"):
        Engine(None)
