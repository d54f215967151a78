"""Sampling draws from the right distribution, and the same tokens whatever runs beside."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixkv.config import SamplingParams
from radixkv.engine import sampling
from radixkv.engine.sampling import SamplerRow, fresh_seed, sample, top_logprobs, uniform
from radixkv.errors import NonFiniteError

INF = math.inf


def row(seed=0, index=0, prompt=(1, 2), output=(), **fields):
    return SamplerRow(SamplingParams(**fields), seed, index, prompt, list(output))


def random_logits(num_rows, vocab, seed=0, scale=3.0):
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def oracle(logits, one):
    """Probabilities of one row, float64, by transformers' own processors and the definitions."""
    params = one.params
    scores = logits.double()[None].clone()
    seen = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
    for processor in params.logits_processors:
        scores = processor(seen, scores)
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(seen, scores)
    for token_id in set(one.token_ids):
        count = one.token_ids.count(token_id)
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id, bias in (params.logit_bias or {}).items():
        scores[0, token_id] += bias
    if params.temperature == 0:
        return torch.nn.functional.one_hot(scores[0].argmax(), scores.shape[1]).double()
    scores = TemperatureLogitsWarper(params.temperature)(seen, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(seen, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(seen, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(seen, scores)
    return scores.softmax(-1)[0]


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([1, 2, 5, 40, 10_000]),
        "top_p": st.sampled_from([0.01, 0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.2, 0.9]),
        "repetition_penalty": st.sampled_from([0.5, 1.3, 5.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.4, 1.5]),
        "logit_bias": st.just({0: 3.5, 3: -100.0, 6: 1.0}),
        "logprobs": st.sampled_from([0, 1, 3]),
        "logits_processors": st.just([lambda ids, scores: scores - 0.07 * ids.shape[1] * scores]),
    },
)


def draw_rows(data, vocab, num_rows):
    ids = st.lists(st.integers(0, vocab - 1), max_size=12)
    return [
        row(
            seed=data.draw(st.integers(0, 2**64 - 1)),
            index=data.draw(st.integers(0, 3)),
            prompt=tuple(data.draw(ids)) or (0,),
            output=data.draw(ids),
            **data.draw(OPTIONS),
        )
        for _ in range(num_rows)
    ]


def expected_token(logits, one):
    """The token by inverse of the oracle's cumulative distribution, and how near a border."""
    cumulative = oracle(logits, one).cumsum(0)
    number = uniform(one.seed, one.index, len(one.token_ids))
    token_id = int(torch.searchsorted(cumulative, number * cumulative[-1].item(), right=True))
    return token_id, (cumulative - number).abs().min().item()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_each_token_is_the_oracles(data):
    vocab = data.draw(st.sampled_from([7, 300, 1500]))
    rows = draw_rows(data, vocab, data.draw(st.integers(1, 5)))
    logits = random_logits(len(rows), vocab, data.draw(st.integers(0, 10**6)))
    before = logits.clone()
    for i, found in enumerate(sample(logits, rows)):
        expected, distance = expected_token(logits[i], rows[i])
        if distance > 1e-5:
            assert found.token_id == expected
        own = logits[i].double().log_softmax(-1)
        assert found.logprob == pytest.approx(own[found.token_id].item(), abs=1e-5)
        k = rows[i].params.logprobs
        if k is None:
            assert found.top is None
        else:
            best = own.topk(min(k, vocab)).indices.tolist()
            assert list(found.top) == list(dict.fromkeys([*best, found.token_id]))
            for token_id, logprob in found.top.items():
                assert logprob == pytest.approx(own[token_id].item(), abs=1e-5)
    assert torch.equal(logits, before)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tokens_are_the_same_alone_and_in_any_batch_order_and_chunk(data):
    vocab = data.draw(st.sampled_from([7, 300]))
    rows = draw_rows(data, vocab, data.draw(st.integers(2, 8)))
    logits = random_logits(len(rows), vocab, data.draw(st.integers(0, 10**6)))
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    order = data.draw(st.permutations(range(len(rows))))
    together = sample(logits[order], [rows[i] for i in order])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sampling._CHUNK_LOGITS, "cpu", 2 * vocab)
        chunked = sample(logits, rows)
    for place, i in enumerate(order):
        assert together[place].token_id == alone[i].token_id == chunked[i].token_id
        assert together[place].logprob == pytest.approx(alone[i].logprob, abs=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
        {"presence_penalty": 1.0, "logit_bias": {2: 1.5}},
    ],
    ids=str,
)
def test_frequencies_are_the_distribution_over_steps_and_over_samples(fields):
    vocab, num = 12, 6000
    logits = random_logits(1, vocab, seed=3, scale=1.5)
    one = row(seed=9, prompt=(1,), output=[4], **fields)
    chances = oracle(logits[0], one)
    by_sample = [row(seed=9, index=i, prompt=(1,), output=[4], **fields) for i in range(num)]
    # Seeds that follow each other, as users choose them, must not be related either.
    by_seed = [row(seed=i, prompt=(1,), output=[4], **fields) for i in range(num)]
    for rows in (by_sample, by_seed):
        found = sample(logits.expand(num, vocab), rows)
        counts = torch.bincount(torch.tensor([s.token_id for s in found]), minlength=vocab)
        assert counts[chances == 0].sum() == 0
        kept = chances > 0
        chi2 = ((counts[kept] - num * chances[kept]) ** 2 / (num * chances[kept])).sum().item()
        freedom = max(1, int(kept.sum()) - 1)
        assert chi2 < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_numbers_of_steps_samples_and_seeds_are_uniform_and_unrelated():
    numbers = np.array(
        [[uniform(s, i, t) for t in range(50)] for s in range(20) for i in range(20)]
    )
    flat = np.sort(numbers.ravel())
    assert 0 <= flat[0] and flat[-1] < 1
    assert np.abs(flat - np.arange(len(flat)) / len(flat)).max() < 0.015  # Kolmogorov-Smirnov
    assert np.abs(np.corrcoef(numbers.T) - np.eye(50)).max() < 0.25
    assert len(np.unique(flat)) == len(flat)
    assert uniform(-1, 0, 0) != uniform(2**64 - 1, 0, 0)


def generate(logits, num_samples, num_tokens, seed, **fields):
    rows = [row(seed=seed, index=i, n=num_samples, **fields) for i in range(num_samples)]
    for _ in range(num_tokens):
        for one, found in zip(rows, sample(logits.expand(num_samples, -1), rows), strict=True):
            one.token_ids.append(found.token_id)
    return [one.token_ids for one in rows]


def test_samples_of_one_seed_differ_and_repeat_whatever_n_is():
    flat = torch.zeros(1, 1000)
    four = generate(flat, 4, 16, seed=7)
    assert len({tuple(ids) for ids in four}) == 4
    assert all(len(set(ids)) > 10 for ids in four)
    assert generate(flat, 4, 16, seed=7) == four
    assert generate(flat, 1, 16, seed=7) == four[:1]
    assert generate(flat, 8, 16, seed=7)[:4] == four
    assert generate(flat, 4, 16, seed=8) != four
    assert len({tuple(ids) for ids in generate(flat, 4, 16, seed=7, temperature=0)}) == 1


def test_no_global_random_state_is_touched():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = (torch.get_rng_state(), str(np.random.get_state()), random.getstate())
    seeds = {fresh_seed() for _ in range(50)}
    sample(torch.zeros(3, 9), [row(seed=s, top_p=0.5, top_k=3) for s in list(seeds)[:3]])
    assert torch.equal(before[0], torch.get_rng_state())
    assert (str(np.random.get_state()), random.getstate()) == before[1:]
    # And the state of the caller does not fix what is fresh.
    torch.manual_seed(5)
    random.seed(5)
    assert len(seeds | {fresh_seed() for _ in range(50)}) == 100


def test_greedy_takes_the_lowest_id_of_equal_bests_without_and_with_processing():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, -INF, 3.0, 3.0]])
    rows = [row(temperature=0), row(temperature=0, logit_bias={3: 1e-3, 0: 0.0})]
    assert [s.token_id for s in sample(logits, rows)] == [1, 3]
    assert [s.token_id for s in sample(logits, [row(temperature=0)] * 2)] == [1, 0]


@pytest.mark.parametrize(
    "top_p, kept", [(0.5, [0, 1]), (0.51, [0, 1, 2]), (1e-9, [0]), (1e-30, [0]), (1.0, 4)]
)
def test_of_equal_probabilities_top_p_keeps_the_lowest_ids(top_p, kept):
    rows = [row(seed=i, top_p=top_p) for i in range(300)]
    found = {s.token_id for s in sample(torch.zeros(300, 4), rows)}
    assert found == set(range(kept) if isinstance(kept, int) else kept)


def test_top_p_over_many_tokens_keeps_what_a_full_sort_keeps():
    logits = (random_logits(6, 5000, seed=1, scale=0.5) * 4).round() / 4
    for i, top_p in enumerate([0.001, 0.05, 0.3, 0.6, 0.95, 0.9999]):
        weights = (logits[i] - logits[i].max()).exp()[None]
        found = sampling._keep_top_p(weights.clone(), [1 - top_p])[0]
        order = weights[0].sort(descending=True, stable=True).indices
        sorted_weights = weights[0, order].double()
        before = sorted_weights.cumsum(0) - sorted_weights
        keep = before < top_p * sorted_weights.sum()
        expected = torch.zeros_like(found)
        expected[order[keep]] = weights[0, order[keep]]
        assert torch.equal(found, expected)


def test_barred_tokens_are_never_drawn():
    logits = torch.full((1, 50), -INF)
    logits[0, [7, 31]] = torch.tensor([0.0, 0.5])
    for fields in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}, {"temperature": 9e9}):
        rows = [row(seed=i, **fields) for i in range(200)]
        assert {s.token_id for s in sample(logits.expand(200, 50), rows)} == {7, 31}


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_are_greedy_or_flat(temperature):
    logits = torch.tensor([[1.0, 5.0, -INF, 4.0]])
    rows = [row(seed=i, temperature=temperature) for i in range(200)]
    found = {s.token_id for s in sample(logits.expand(200, 4), rows)}
    assert found == ({1} if temperature < 1 else {0, 1, 3})


def test_a_number_next_to_one_draws_a_possible_token(monkeypatch):
    monkeypatch.setattr(sampling, "uniform", lambda *key: 1 - 2.0**-53)
    logits = torch.tensor([[0.0, 1.0, -INF, -INF], [0.0, 0.0, 0.0, -80.0]])
    assert [s.token_id for s in sample(logits, [row(), row(top_k=3)])] == [1, 2]
    monkeypatch.setattr(sampling, "uniform", lambda *key: 0.0)
    assert sample(torch.tensor([[-INF, -INF, 1.0]]), [row()])[0].token_id == 2


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_that_is_not_finite_is_named(bad, temperature):
    logits = random_logits(4, 20)
    logits[2, 5] = bad
    rows = [row(temperature=temperature) for _ in range(4)]
    with pytest.raises(NonFiniteError, match="model's logits, row 2;"):
        sample(logits, rows)
    with pytest.raises(NonFiniteError, match="row 2;"):
        top_logprobs(logits, [0] * 4, 2)
    logits[2] = -INF
    with pytest.raises(NonFiniteError, match="row 2;"):
        sample(logits, rows)


def test_a_processor_that_leaves_nothing_or_another_shape_is_refused():
    logits = random_logits(2, 5)
    rows = [row(), row(logits_processors=[lambda ids, scores: scores - INF])]
    with pytest.raises(NonFiniteError, match="processed logits, row 1;"):
        sample(logits, rows)
    for wrong in (lambda ids, scores: scores[0], lambda ids, scores: None):
        with pytest.raises(ValueError, match=r"to return logits \[1, 5\]"):
            sample(logits, [row(), row(logits_processors=[wrong])])


def test_processors_get_prompt_and_output_and_a_copy_and_run_before_the_rest():
    seen = []

    def spoil(input_ids, scores):
        seen.append((input_ids.tolist(), input_ids.dtype, scores.shape))
        scores[:] = 0.0
        scores[0, 3] = 2.0
        return scores

    logits = random_logits(2, 5)
    before = logits.clone()
    one = row(prompt=(1, 2), output=[3], temperature=0, logits_processors=[spoil])
    one.params = SamplingParams(
        temperature=0, logits_processors=[spoil], repetition_penalty=4.0, logit_bias={4: 0.6}
    )
    found = sample(logits, [row(temperature=0), one])
    assert seen == [([[1, 2, 3]], torch.int64, (1, 5))]
    assert found[1].token_id == 4  # 2 / 4 is below the bias: the penalty came after
    assert torch.equal(logits, before)
    assert found[1].logprob == pytest.approx(before[1].log_softmax(-1)[4].item(), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_give_the_tokens_of_their_float32_values(dtype):
    logits = random_logits(3, 100).to(dtype)
    rows = [row(seed=1), row(seed=2, top_p=0.7), row(temperature=0)]
    found, expected = sample(logits, rows), sample(logits.float(), rows)
    assert found == expected


def test_noise_of_the_size_of_float32_does_not_change_tokens():
    logits = random_logits(200, 3000)
    noisy = logits * (1 + 2e-7 * torch.sign(random_logits(200, 3000, seed=4)))
    rows = [row(seed=i, temperature=0.8, top_p=0.95) for i in range(200)]
    same = [a.token_id == b.token_id for a, b in zip(sample(logits, rows), sample(noisy, rows))]
    assert sum(same) >= 199


def test_top_logprobs_are_the_best_and_the_own_token():
    logits = random_logits(5, 30)
    own = [29, 0, 3, 4, 5]
    truth = logits.double().log_softmax(-1)
    for k in (0, 1, 4, 30, 99):
        found = top_logprobs(logits, own, k)
        for i, top in enumerate(found):
            best = truth[i].topk(min(k, 30)).indices.tolist()
            assert list(top) == list(dict.fromkeys([*best, own[i]]))
            for token_id, logprob in top.items():
                assert logprob == pytest.approx(truth[i, token_id].item(), abs=1e-5)
    assert top_logprobs(logits[:0], [], 3) == []


def test_logits_of_another_shape_are_refused():
    for logits in (torch.zeros(3), torch.zeros(2, 4), torch.zeros(1, 1, 4), torch.zeros(1, 0)):
        with pytest.raises(ValueError, match=r"expected shape \[1, vocab\]"):
            sample(logits, [row()])
    assert sample(torch.zeros(0, 4), []) == []
