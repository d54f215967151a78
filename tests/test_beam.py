"""Beams are those of transformers' generate, and make sense where it has no answer."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv.config import BeamParams
from radixkv.engine.beam import BeamSearch
from radixkv.errors import NonFiniteError


def tiny_model(vocab, sharpness, seed):
    """A random Llama; ``sharpness`` makes its distributions peaked, so that beams disagree."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def search_with(model, prompt, params, eos=()):
    """Drive a search with a full forward pass of each live beam."""
    search = BeamSearch(
        params,
        eos_token_ids=eos,
        vocab_size=model.config.vocab_size,
        decoder_prompt_len=len(prompt),
    )
    beams = [list(prompt)]
    while not search.done:
        assert len(beams) == search.num_live
        with torch.no_grad():
            logits = model(torch.tensor(beams)).logits[:, -1]
        beams = [[*beams[parent], token_id] for parent, token_id in search.advance(logits)]
    return search.results()


def generate(model, prompt, params, eos):
    """The same by transformers: (new tokens, score) of each sequence, best first."""
    options = {}
    if params.width > 1:
        options = {
            "length_penalty": params.length_penalty,
            "early_stopping": params.early_stopping,
        }
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.width,
        num_return_sequences=params.num_return or params.width,
        do_sample=False,
        max_new_tokens=params.max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for i, sequence in enumerate(out.sequences[:, len(prompt) :].tolist()):
        end = next((at + 1 for at, one in enumerate(sequence) if one in eos), len(sequence))
        score = None if params.width == 1 else out.sequences_scores[i].item()
        found.append((sequence[:end], score))
    return found


def require_same(model, prompt, params, eos):
    found = search_with(model, prompt, params, eos)
    expected = generate(model, prompt, params, eos)
    assert [h.token_ids for h in found] == [token_ids for token_ids, _ in expected]
    for hypothesis, (_, score) in zip(found, expected, strict=True):
        if score is not None:
            assert hypothesis.score == pytest.approx(score, rel=1e-5, abs=1e-4)
        length = len(hypothesis.token_ids)
        assert hypothesis.score == pytest.approx(
            hypothesis.cumulative_logprob / length**params.length_penalty, rel=1e-5
        )
        ended = hypothesis.token_ids[-1] in eos
        assert hypothesis.finish_reason == ("stop" if ended else "length")
        assert hypothesis.stop_reason == (hypothesis.token_ids[-1] if ended else None)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("vocab, sharpness", [(50, 8), (50, 30), (300, 30), (1000, 12)])
def test_beams_are_those_of_transformers(vocab, sharpness, early_stopping):
    rng = random.Random(f"{vocab} {sharpness} {early_stopping}")
    model = tiny_model(vocab, sharpness, seed=vocab)
    reasons = set()
    num_eos = [1, vocab // 5, 2, vocab // 4, 6]
    for i, length_penalty in enumerate([-1.5, 0.0, 0.6, 1.0, 2.0]):
        width = rng.randint(2, 6)
        params = BeamParams(
            width=width,
            max_new_tokens=rng.choice([2, 6, 12]),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_return=rng.choice([None, 1, width]),
        )
        eos = rng.sample(range(vocab), num_eos[i])
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 8))]
        found = require_same(model, prompt, params, eos)
        reasons |= {h.finish_reason for h in found}
    assert reasons == {"stop", "length"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eos", [(), (3,), tuple(range(10))])
def test_width_one_is_greedy_whatever_the_penalty(eos):
    model = tiny_model(50, 30, seed=1)
    for start, penalty, stopping in itertools.product([1, 9], [0.0, 3.0], [True, False, "never"]):
        params = BeamParams(
            width=1, max_new_tokens=10, length_penalty=penalty, early_stopping=stopping
        )
        require_same(model, [start, 4], params, eos)


@pytest.mark.filterwarnings("ignore")
def test_one_new_token_and_no_end_id():
    model = tiny_model(50, 30, seed=2)
    for eos, width in itertools.product([(), (4, 7), tuple(range(25))], [2, 5]):
        params = BeamParams(width=width, max_new_tokens=1)
        assert len(require_same(model, [8, 3], params, eos)) == width


def logits_of(*chances):
    return torch.tensor(chances).log()


def start(width, eos=(), vocab=6, **fields):
    params = BeamParams(width=width, **fields)
    return BeamSearch(params, eos_token_ids=eos, vocab_size=vocab, decoder_prompt_len=4)


def test_end_ids_that_are_the_best_of_all_beams_leave_the_width_alive():
    search = start(2, eos={0, 1, 2}, early_stopping="never", length_penalty=2.0)
    assert search.advance(logits_of([0.01, 0.01, 0.01, 0.5, 0.4, 0.07])) == [(0, 3), (0, 4)]
    best_ends = [0.3, 0.25, 0.2, 0.12, 0.08, 0.05]
    # All six of the best continuations end; the two best that do not end live on.
    assert search.advance(logits_of(best_ends, best_ends)) == [(0, 3), (1, 3)]
    assert search.num_live == 2
    # A finished beam is there once, with its own end id, and gets no further tokens.
    assert search.advance(logits_of(best_ends, best_ends)) == [(0, 3), (1, 3)]
    finished = [tuple(h.token_ids) for h in search._finished]
    assert len(set(finished)) == len(finished) == 2
    assert all(ids[-1] in {0, 1, 2} and not {0, 1, 2} & set(ids[:-1]) for ids in finished)


def test_an_end_id_as_the_first_token():
    search = start(2, eos=[5], max_new_tokens=3)
    assert search.advance(logits_of([0.1, 0.2, 0.01, 0.01, 0.01, 0.67])) == [(0, 1), (0, 0)]
    while not search.done:
        search.advance(logits_of(*[[0.2, 0.2, 0.2, 0.2, 0.1, 0.1]] * search.num_live))
    best = search.results()[0]
    assert best.token_ids == [5] and best.stop_reason == 5 and best.finish_reason == "stop"
    assert best.score == best.cumulative_logprob == pytest.approx(math.log(0.67), abs=1e-6)


def test_ignore_eos_and_stop_token_ids():
    chances = [0.9, 0.06, 0.04]
    search = start(1, eos=[0], vocab=3, ignore_eos=True, max_new_tokens=3, stop_token_ids=(2,))
    for _ in range(3):
        search.advance(logits_of(chances))
    assert search.results()[0].token_ids == [0, 0, 0]
    search = start(1, eos=[1], vocab=3, max_new_tokens=3, stop_token_ids=(0,))
    assert search.advance(logits_of(chances)) == [] and search.done
    assert search.results()[0].stop_reason == 0


def test_width_one_ends_at_its_first_end_id_even_where_a_longer_beam_would_score_more():
    fields = {"early_stopping": "never", "length_penalty": 3.0, "max_new_tokens": 3}
    search = start(1, eos=[0], vocab=3, **fields)
    assert search.advance(logits_of([0.5, 0.4, 0.1])) == [] and search.done
    assert [h.token_ids for h in search.results()] == [[0]]


def brute_force(first, then, width, eos, steps):
    """All finished sequences of a chain where each token's distribution is ``then``."""
    done, live = [], [((), 0.0)]
    for step in range(steps):
        grown = [
            ((*ids, token_id), total + math.log(chance))
            for ids, total in live
            for token_id, chance in enumerate(then if ids else first)
        ]
        done += [one for one in grown if one[0][-1] in eos or step == steps - 1]
        live = [one for one in grown if one[0][-1] not in eos]
    return sorted(done, key=lambda one: -one[1])[:width]


@pytest.mark.parametrize("eos", [(), (0,), (0, 1)])
def test_a_width_above_the_vocabulary_finds_the_best_of_all_sequences(eos):
    first, then, width, steps = [0.5, 0.2, 0.3], [0.15, 0.26, 0.59], 60, 3
    search = start(width, eos, 3, max_new_tokens=steps, length_penalty=0.0, early_stopping="never")
    num_live = 1
    while not search.done:
        assert search.num_live == num_live
        logits = logits_of(*[then if search.num_new_tokens else first] * num_live)
        num_live = len(search.advance(logits))
    expected = brute_force(first, then, width, eos, steps)
    found = search.results()
    assert {tuple(h.token_ids) for h in found} == {ids for ids, _ in expected}
    assert [h.score for h in found] == pytest.approx([total for _, total in expected], abs=1e-5)


def test_barred_tokens_are_no_continuations():
    search = start(3, vocab=4, max_new_tokens=2)
    assert search.advance(logits_of([0.0, 0.75, 0.25, 0.0])) == [(0, 1), (0, 2)]
    assert search.advance(logits_of([0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0])) == []
    assert [h.token_ids for h in search.results()] == [[1, 1], [2, 3]]
    search = start(2, eos=[1], vocab=4)
    assert search.advance(logits_of([0.0, 1.0, 0.0, 0.0])) == [] and search.done
    assert [h.token_ids for h in search.results()] == [[1]]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_search_ends_and_ranks_what_it_found(data):
    vocab = data.draw(st.integers(1, 9))
    width = data.draw(st.integers(1, 7))
    eos = data.draw(st.sets(st.integers(0, vocab - 1), max_size=3))
    params = BeamParams(
        width=width,
        max_new_tokens=data.draw(st.integers(1, 6)),
        length_penalty=data.draw(st.sampled_from([-1.0, 0.0, 0.7, 2.0])),
        early_stopping=data.draw(st.sampled_from([True, False, "never"])),
        num_return=data.draw(st.integers(1, width)),
    )
    search = BeamSearch(params, eos_token_ids=eos, vocab_size=vocab, decoder_prompt_len=3)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    beams, totals = [[]], [0.0]
    while not search.done:
        logits = torch.randn(len(beams), vocab, generator=generator) * 2
        logprobs = logits.double().log_softmax(-1)
        step = search.advance(logits)
        assert len(step) == search.num_live <= width
        assert not {token_id for _, token_id in step} & eos
        totals = [totals[parent] + logprobs[parent, token_id].item() for parent, token_id in step]
        beams = [[*beams[parent], token_id] for parent, token_id in step]
        assert totals == sorted(totals, reverse=True)
        assert len({tuple(beam) for beam in beams}) == len(beams)
        assert search.num_new_tokens <= params.max_new_tokens
    found = search.results()
    assert 1 <= len(found) <= params.num_return
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
    assert len({tuple(h.token_ids) for h in found}) == len(found)
    for hypothesis in found:
        assert not eos & set(hypothesis.token_ids[:-1])
        if hypothesis.finish_reason == "length":
            assert len(hypothesis.token_ids) == params.max_new_tokens


def test_a_wrong_call_is_refused_and_changes_nothing():
    search = start(2, max_new_tokens=1)
    good = logits_of([0.1, 0.1, 0.1, 0.1, 0.2, 0.4])
    for wrong in (good[0], good.expand(2, 6), good[:, :5]):
        with pytest.raises(ValueError, match=r"\[1, 6\], got"):
            search.advance(wrong)
    for bad in (math.nan, math.inf):
        spoiled = good.clone()
        spoiled[0, 2] = bad
        with pytest.raises(NonFiniteError, match=r"beams \[0\]"):
            search.advance(spoiled)
    with pytest.raises(NonFiniteError):
        search.advance(torch.full((1, 6), -math.inf))
    with pytest.raises(ValueError, match="not done"):
        search.results()
    assert search.num_new_tokens == 0 and search.num_live == 1
    assert search.advance(good) == []
    assert [h.token_ids for h in search.results()] == [[5], [4]]
    with pytest.raises(ValueError, match="done"):
        search.advance(good)
    with pytest.raises(ValueError, match="length_penalty"):
        start(2, max_new_tokens=128, length_penalty=-100.0)
