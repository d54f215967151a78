"""The step loop under random loads: a fake model that reads back every page it attends to.

Its K rows hold (token, position); the next token is a hash of all tokens so far, as read from
the pages. A wrong, stale or freed page changes what it says, or fails its own check.
"""

from __future__ import annotations

import random
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import (
    BeamParams,
    CapacityError,
    Engine,
    KVConfig,
    KVSpec,
    RadixKVError,
    SamplingParams,
)
from radixkv.attention.reference import read_rows
from radixkv.bench.workloads import bench_steps
from radixkv.cache.guard import Guard
from radixkv.engine.scheduler import longest_prefix_first
from radixkv.models.batch import Run, build_batch
from radixkv.models.runner import ModelRunner

VOCAB_SIZE = 7
EOS = 6


class FakeRunner:
    """What `ModelRunner` is to the engine, without a model."""

    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2)
    device = torch.device("cpu")
    vocab_size = VOCAB_SIZE
    max_positions = None

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.generation_config = None
        self.model.config = types.SimpleNamespace(eos_token_id=EOS)
        self.checks = True

    def is_batch_invariant(self, kv: KVConfig, backend: str) -> bool:
        return True

    def release(self) -> None:
        pass

    def look(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def probe(self) -> None:
        pass

    def forward(self, batch: Any, cache: Any) -> torch.Tensor:
        attention, layer = batch.attention, cache.layer(0)
        rows = torch.stack([batch.input_ids[0], batch.positions[0]], dim=1).float()[:, None]
        cache.backend.write_kv(layer, attention.slot_mapping, rows, rows, layer_idx=0)
        if not self.checks:
            return torch.zeros(len(batch.logit_rows), self.vocab_size)
        page_size = cache.config.page_size
        logits = torch.zeros(batch.input_ids.shape[1], VOCAB_SIZE)
        wanted = set(batch.logit_rows.tolist())
        begins = attention.cu_seqlens_q.tolist()
        for i, seq_len in enumerate(attention.seq_lens.tolist()):
            pages = attention.page_table[i, : -(-seq_len // page_size)].long()
            stored = read_rows(cache.codec.k_format, layer.k_pages, layer.k_scale, pages)
            tokens, positions = stored[0, :seq_len].T
            assert positions.tolist() == list(range(seq_len))
            num_new = begins[i + 1] - begins[i]
            assert torch.equal(tokens[-num_new:], batch.input_ids[0, begins[i] : begins[i + 1]])
            for j in range(begins[i], begins[i + 1]):
                if j in wanted:
                    seen = tuple(tokens[: seq_len - begins[i + 1] + j + 1].int().tolist())
                    logits[j] = next_logits(seen)
        return logits[batch.logit_rows]


def next_logits(token_ids: tuple[int, ...]) -> torch.Tensor:
    rng = np.random.default_rng(hash(token_ids) % 2**32)
    return torch.from_numpy(rng.normal(size=VOCAB_SIZE) * 3).float()


def fake_engine(num_pages: int, page_size: int, **options: Any) -> Engine:
    runner = FakeRunner()
    config = KVConfig(dtype="model", page_size=page_size, capacity=num_pages * page_size * 16)
    options.setdefault("backend", "torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "load", lambda model: runner)
        return Engine(runner.model, kv=config, **options)


def check_idle(engine: Engine) -> None:
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def outcome(result: Any) -> list[tuple[list[int], str]]:
    return [(sample.token_ids, sample.finish_reason) for sample in result.samples]


ids = st.lists(st.integers(0, 2), min_size=1, max_size=12)
sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 3),
    max_new_tokens=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 5),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, 0]),
)
beams = st.builds(
    BeamParams, width=st.integers(1, 3), max_new_tokens=st.integers(1, 5), ignore_eos=st.booleans()
)
arrival = st.tuples(
    st.integers(0, 12),  # the step before which it is submitted
    ids,
    sampling | beams,
    st.none() | st.integers(0, 6),  # aborted after so many further steps
    st.sampled_from([None, "a"]),
)


@settings(max_examples=150, deadline=None)
@given(
    load=st.lists(arrival, min_size=1, max_size=9),
    page_size=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(20, 48),
    max_batch_tokens=st.integers(1, 40),
    max_seqs=st.integers(1, 12),
)
def test_every_request_ends_as_it_does_alone(
    load: list[Any], page_size: int, num_tokens: int, max_batch_tokens: int, max_seqs: int
) -> None:
    alone = fake_engine(4096 // page_size, page_size)
    engine = fake_engine(-(-num_tokens // page_size), page_size, max_batch_tokens=max_batch_tokens)
    engine.core.scheduler.max_seqs = max_seqs
    with alone, engine:
        live: list[tuple[Any, Any, int | None]] = []
        step = 0
        todo = sorted(load, key=lambda one: one[0])
        while todo or live:
            while todo and todo[0][0] <= step:
                _, prompt, params, abort_after, namespace = todo.pop(0)
                try:
                    request = engine.submit(prompt, params, namespace=namespace)
                except CapacityError:
                    continue  # said at once, since it could not fit alone
                alone.cache.clear()
                expected = outcome(alone.generate(prompt, params))
                end = None if abort_after is None else step + abort_after
                live.append((request, expected, end))
            for request, _, end in live:
                if end is not None and step >= end:
                    engine.abort(request)
            engine.step()
            engine.cache.check()
            for request, expected, _ in live:
                if request.done:
                    got = outcome(request.result())
                    if not request.aborted:
                        assert got == expected
            live = [one for one in live if not one[0].done]
            step += 1
            assert step < 3000, "no progress"
        check_idle(engine)


@settings(max_examples=40, deadline=None)
@given(
    prompt=ids,
    tails=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 2, 4]),
    num_tokens=st.integers(20, 30),
    max_batch_tokens=st.integers(1, 40),
)
def test_scores_in_a_small_pool(
    prompt: list[int],
    tails: list[list[int]],
    page_size: int,
    num_tokens: int,
    max_batch_tokens: int,
) -> None:
    pages = -(-num_tokens // page_size)
    with fake_engine(pages, page_size, max_batch_tokens=max_batch_tokens) as engine:
        scores = engine.score(prompt, tails)
        for tail, score in zip(tails, scores, strict=True):
            seen, expected = tuple(prompt), []
            for token_id in tail:
                expected.append(float(next_logits(seen).log_softmax(-1)[token_id]))
                seen += (token_id,)
            assert score.token_logprobs == pytest.approx(expected, abs=1e-5)
        check_idle(engine)


@pytest.mark.parametrize(
    "policy", [longest_prefix_first, lambda request, _: len(request.prompt_token_ids) == 9]
)
def test_nobody_starves_behind_those_that_a_policy_prefers(policy: Any) -> None:
    with fake_engine(12, 4, max_batch_tokens=64, policy=policy) as engine:
        engine.core.scheduler.max_seqs = 1
        engine.generate([0, 1] * 8, max_new_tokens=1, ignore_eos=True)
        lonely = engine.submit([2] * 9, max_new_tokens=2, ignore_eos=True)
        favoured = []
        while not lonely.done:
            favoured.append(engine.submit([0, 1] * 8, max_new_tokens=1, ignore_eos=True))
            engine.step()
            assert len(favoured) < 100
        while not all(request.done for request in favoured):
            engine.step()
        check_idle(engine)


def test_a_policy_says_who_goes_first_and_fails_by_itself() -> None:
    def shortest_first(request: Any, num_cached: int) -> int:
        if 5 in request.prompt_token_ids:
            raise KeyError("no such tenant")
        return len(request.prompt_token_ids)

    with fake_engine(64, 4, policy=shortest_first) as engine:
        engine.core.scheduler.max_seqs = 1
        lengths = (9, 3, 6, 1, 3)
        live = [engine.submit([i] * size, max_new_tokens=2) for i, size in enumerate(lengths)]
        broken = engine.submit([5, 5], max_new_tokens=2)
        ended: list[Any] = []
        while len(ended) < 6:
            ended += [request for request in engine.step() if request.done]
        assert ended == [broken, live[3], live[1], live[4], live[2], live[0]]
        with pytest.raises(KeyError, match="no such tenant"):
            broken.result()
        check_idle(engine)
    with pytest.raises(TypeError, match=r"policy: expected a function"):
        fake_engine(64, 4, policy="fcfs")


def test_decode_goes_first_and_prompts_fill_what_is_left_of_the_budget() -> None:
    with fake_engine(256, 4, max_batch_tokens=8) as engine:
        decoding = [engine.submit([i], max_new_tokens=40, ignore_eos=True) for i in range(3)]
        engine.step()
        prompt = engine.submit([0, 1] * 30, max_new_tokens=1, ignore_eos=True)
        steps = 0
        while not prompt.done:
            before = [request.num_tokens for request in decoding]
            engine.step()
            steps += 1
            assert [request.num_tokens for request in decoding] == [n + 1 for n in before]
        assert steps == 12  # chunks of 5: what three decoding sequences leave of 8
        assert engine.stats().batch_tokens_max == 8


def test_a_paused_request_does_not_hold_up_those_that_share_its_prefix() -> None:
    prompt = [0, 1] * 10
    with fake_engine(64, 4, max_batch_tokens=4) as engine:
        first = engine.submit(prompt, max_new_tokens=2, ignore_eos=True)
        engine.step()
        (seq,) = engine.core.scheduler.running
        assert seq.num_pending > 1
        seq.paused = True  # as when its reader lags behind
        second = engine.submit([*prompt, 2], max_new_tokens=2, ignore_eos=True)
        for _ in range(20):
            engine.step()
        assert second.done and not first.done
        seq.paused = False
        while not first.done:
            engine.step()
        check_idle(engine)


def test_what_other_threads_may_see_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the cache's lock is given up another thread may take it: then `check` holds."""
    leave, looking = Guard.leave, False
    load = [([0, 1, 2, 0, 1], SamplingParams(n=2, seed=i, max_new_tokens=9)) for i in range(3)]
    load.append(([0, 1, 2, 2], BeamParams(width=3, max_new_tokens=4)))  # type: ignore[arg-type]
    with fake_engine(14, 2) as engine:

        def leave_and_look(guard: Guard) -> None:
            nonlocal looking
            leave(guard)
            if not looking:
                looking = True
                try:
                    engine.cache.check()
                    stats = engine.cache.stats()
                    kinds = stats.pages_cached + stats.pages_pinned + stats.pages_private
                    assert stats.pages_free + kinds == stats.pages_total
                finally:
                    looking = False

        monkeypatch.setattr(Guard, "leave", leave_and_look)
        engine.generate(*zip(*load, strict=True))
        assert engine.stats().preemptions > 0
        check_idle(engine)


@pytest.mark.parametrize("page_size", [1, 4])
def test_reordering_beams_moves_references_and_no_whole_page(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_engine(256 // page_size, page_size) as engine:
        forks = []
        fork = engine.core.scheduler.fork
        monkeypatch.setattr(engine.core.scheduler, "fork", lambda seq: forks.append(1) or fork(seq))
        params = BeamParams(width=4, max_new_tokens=16, ignore_eos=True)
        assert len(engine.generate([0, 1, 2, 0, 1, 2], params).samples) == 4
        assert len(forks) > 8
        # What a fork may cost is a copy of the last page, and none where that is full.
        assert engine.cache.stats().cow_copies <= (0 if page_size == 1 else len(forks))
        check_idle(engine)


def test_a_step_inside_a_step_is_refused() -> None:
    with fake_engine(64, 4) as engine:
        beside = engine.stream([1, 2], max_new_tokens=30, ignore_eos=True)
        for call in (engine.step, lambda: next(engine.stream([3], max_new_tokens=1))):

            def call_it(input_ids: Any, scores: Any, call: Any = call) -> Any:
                call()
                return scores

            with pytest.raises(RadixKVError, match="inside one of its own steps"):
                engine.generate([4, 5], max_new_tokens=2, logits_processors=[call_it])
        assert sum(len(delta.token_ids) for delta in beside) == 30
        engine.generate([4], max_new_tokens=1)  # its steps end the stream that nobody has
        check_idle(engine)


def test_a_flood_of_alike_requests_keeps_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few prompts, asked again and again in a pool of 24 pages, samples of them, and aborts."""
    monkeypatch.setitem(globals(), "VOCAB_SIZE", 200)
    monkeypatch.setattr(FakeRunner, "vocab_size", 200)
    rng = random.Random(2)

    def ids(count: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(7, 200), k=count)

    base = ids(16, 0)
    jobs = []
    for i in range(24):
        prompt = base[: rng.randint(1, 16)] + ids(rng.randint(1, 9), i)
        n, num_new = rng.choice((1, 1, 2)), rng.randint(2, 7)
        jobs.append((prompt, SamplingParams(n=n, seed=i, max_new_tokens=num_new)))
    with fake_engine(24, 4) as engine:
        live = [engine.submit(*jobs[i % 24]) for i in range(120)]
        for request in live[::3]:
            request.dies_at = rng.randint(0, 200)  # type: ignore[attr-defined]
        step = 0
        while live:
            for request in live:
                if getattr(request, "dies_at", None) == step:
                    engine.abort(request)
            engine.step()
            engine.cache.check()
            live = [request for request in live if not request.done]
            step += 1
        check_idle(engine)


def test_bookkeeping_of_a_step_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a timed test of the machine: a bound far above what is seen, to catch a blow-up."""
    monkeypatch.setattr(FakeRunner, "vocab_size", 1000)
    with fake_engine(4096, 16) as engine:
        engine.core.runner.checks = False  # type: ignore[attr-defined]
        times = bench_steps(engine, batch=64, num_steps=40)
        print(f"batch 64 without a model: {times}")
        assert times["bookkeeping_ms"] < 50
        assert times["bookkeeping_ms"] < times["step_ms"]
        check_idle(engine)


def test_a_model_that_cannot_be_looked_at_fails_its_requests_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise ValueError("no such layer")

    with fake_engine(64, 4) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(engine.core.runner, "look", broken)
            for _ in range(2):
                with pytest.raises(ValueError, match="no such layer"):
                    engine.generate([1, 2, 3], max_new_tokens=3)
        assert engine.generate([1, 2, 3], max_new_tokens=3).samples
        check_idle(engine)


def test_tokens_that_have_their_kv_are_run_without_being_written() -> None:
    with fake_engine(16, 4) as engine, engine.cache.acquire([1, 2, 3, 4, 5]) as lease:
        batch = build_batch([Run(lease, [4, 5], 3, 5, 4, 4)], torch.device("cpu"))
        assert batch.attention.slot_mapping.tolist() == [0, *lease.slots(4, 5).tolist()]
        batch = build_batch([Run(lease, [5], 4, 5, 5, 4)], torch.device("cpu"))  # as in decode
        assert batch.attention.slot_mapping.tolist() == [0]


def test_under_pressure_the_oldest_run_first_and_what_is_run_again_is_counted() -> None:
    prefill = decode = 0
    with fake_engine(14, 4, max_batch_tokens=6) as engine:
        live = [
            engine.submit([i % 3, 1, 2, i % 5, 3], max_new_tokens=16, seed=i, ignore_eos=True, n=2)
            for i in range(5)
        ]
        whole = engine.core.scheduler.step

        def counted() -> list[Any]:
            nonlocal prefill, decode
            outputs = whole()
            for output in outputs:
                num_prompt = len(output.sequence.owner.prompt_token_ids)
                below = max(0, min(output.stop, num_prompt) - output.start)
                prefill += below
                decode += output.stop - output.start - below
            return outputs

        engine.core.scheduler.step = counted  # type: ignore[method-assign]
        while not all(request.done for request in live):
            engine.step()
            ages = [seq.arrival for seq in engine.core.scheduler.running]
            assert ages == sorted(ages)
        metrics = [request.result().metrics for request in live]
        assert engine.core.scheduler.preemptions
        assert prefill == sum(one.prefill_tokens for one in metrics)
        assert decode == sum(one.decode_tokens for one in metrics)
