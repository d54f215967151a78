"""A row's result does not feel the other rows of its batch, and the model stays the user's."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from radixkv import Engine, KVConfig
from radixkv.models.attention_interface import AttentionHandler
from radixkv.models.batch import Run
from radixkv.models.hold import hold
from radixkv.models.linear import BatchInvariantActivation, BatchInvariantLinear, multiply
from radixkv.models.runner import ModelRunner, attending
from radixkv.models.small_model import prepare_small_model

NAMES = ("llama", "qwen2", "qwen3", "mistral-window", "gemma2", "gpt2", "opt")


class PerRow(AttentionHandler):
    """Stands in for attention: each token's output depends on its own q, k and v alone."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, keywords: Any
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(group, 1).amax(-1, keepdim=True)
        values = value.repeat_interleave(group, 1)
        pull = (query.amin(-1, keepdim=True) - keys).clamp(-2, 2)
        return (values * pull).transpose(1, 2)


def run_rows(runner: ModelRunner, input_ids: Tensor, positions: Tensor) -> Tensor:
    with torch.inference_mode(), runner._held.step(), attending(PerRow()):
        logits: Tensor = runner.model(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False
        ).logits[0]
    return logits


def is_its_owners(model: Any) -> bool:
    """Whether nothing of an engine's is in the model."""
    return "radixkv" not in model.config._attn_implementation and not any(
        {"forward", "train"} & set(module.__dict__) for module in model.modules()
    )


def check_rows(
    runner: ModelRunner, num_rows: int, counts: tuple[int, ...], vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocab_size, (num_rows,), generator=generator)
    positions = torch.randint(200, (num_rows,), generator=generator)
    expected = run_rows(runner, input_ids, positions)
    assert expected.std() > 0.1
    for count in counts:
        for start in sorted({0, 1, (num_rows - count) // 2, num_rows - count}):
            picked = slice(start, start + count)
            got = run_rows(runner, input_ids[picked], positions[picked])
            assert torch.equal(got, expected[picked]), (count, start)
    order = torch.randperm(num_rows, generator=generator)
    assert torch.equal(run_rows(runner, input_ids[order], positions[order]), expected[order])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_whole_model_do_not_feel_their_number_or_place(
    tiny_model: Callable[..., Any], name: str
) -> None:
    model = tiny_model(name, fresh=True)
    runner = ModelRunner.load(model)
    check_rows(runner, 702, (1, 2, 3, 5, 16, 17, 100, 700), runner.vocab_size)
    runner.release()


@pytest.mark.parametrize("num_threads", [1, 3, 4])
def test_rows_stay_steady_with_other_numbers_of_threads(
    tiny_model: Callable[..., Any], num_threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for name, intermediate_size in (("llama", 100), ("gemma2", 128)):
            model = tiny_model(name, fresh=True, intermediate_size=intermediate_size)
            runner = ModelRunner.load(model)
            check_rows(runner, 400, (1, 2, 7, 33, 333), runner.vocab_size)
            runner.release()
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 300),
    bias=st.booleans(),
    data=st.data(),
)
def test_any_shape_is_close_to_the_plain_one_and_steady(
    in_features: int, out_features: int, bias: bool, data: st.DataObject
) -> None:
    model = nn.Sequential(nn.Linear(in_features, out_features, bias=bias))
    rows = torch.randn(130, in_features)
    with torch.no_grad():
        expected = model.double()(rows.double())
        model.float()
        plain = model(rows)
        held, release = hold(model, lambda: None, str)
        with held.step():
            assert isinstance(model[0].forward, BatchInvariantLinear)
            got = model(rows)
        bound = 1e-6 * (in_features + 2) * max(1.0, float(expected.abs().max()))
        assert (got - expected).abs().max() <= bound
        for _ in range(6):
            start = data.draw(st.integers(0, 129))
            stop = data.draw(st.integers(start + 1, 130))
            with held.step():
                assert torch.equal(model(rows[start:stop]), got[start:stop])
        release()
        assert "forward" not in model[0].__dict__
        assert torch.equal(model(rows), plain)


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    num_inputs=st.integers(1, 600),
    num_outputs=st.integers(1, 200),
    num_threads=st.integers(1, 4),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_with_weights_that_lie_across_equal_float64_and_feel_no_neighbours(
    num_rows: int, num_inputs: int, num_outputs: int, num_threads: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    weight = torch.randn(num_inputs, num_outputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        got = multiply(x, weight.t(), bias)
        alone = torch.cat([multiply(row[None], weight.t(), bias) for row in x])
    finally:
        torch.set_num_threads(before)
    expected = x.double() @ weight.double() + (0.0 if bias is None else bias.double())
    sizes = x.double().abs() @ weight.double().abs() + (0.0 if bias is None else bias.abs())
    # A rounding for each input of a chunk, each chunk, the bias and the two operands.
    roundings = min(num_inputs, 256) + num_inputs // 256 + 4
    assert ((got - expected).abs() <= roundings * 2**-24 * sizes).all()
    assert torch.equal(got, alone)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 200),
    num_rows=st.integers(1, 700),
    num_threads=st.integers(1, 5),
    kind=st.sampled_from([nn.SiLU(), nn.GELU(), nn.GELU("tanh")]),
    data=st.data(),
)
def test_activations_do_not_feel_an_elements_place(
    width: int, num_rows: int, num_threads: int, kind: nn.Module, data: st.DataObject
) -> None:
    x = 3 * torch.randn(num_rows, width)
    activation = BatchInvariantActivation(kind)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        expected = activation(x)
        assert torch.allclose(expected, kind(x), rtol=1e-5, atol=1e-6)
        start = data.draw(st.integers(0, num_rows - 1))
        stop = data.draw(st.integers(start + 1, num_rows))
        assert torch.equal(activation(x[start:stop].clone()), expected[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_a_held_model_stays_usable_and_comes_back_whole(
    tiny_model: Callable[..., Any], name: str, tmp_path: Path
) -> None:
    import transformers as tf

    model = tiny_model(name, fresh=True)
    input_ids = torch.arange(5, 25)[None]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    with torch.no_grad():
        logits = model(input_ids).logits
    tokens = model.generate(input_ids, do_sample=False, max_new_tokens=5)
    runner, other = ModelRunner.load(model), ModelRunner.load(model)
    assert is_its_owners(model)

    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, logits)
    assert torch.equal(model.generate(input_ids, do_sample=False, max_new_tokens=5), tokens)
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[key], before[key]) for key in before)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_its_owners(twin)
        with torch.no_grad():
            assert torch.equal(twin(input_ids).logits, logits)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)

    runner.release()
    runner.release()  # once is enough
    other.release()
    assert dict(model.named_modules()) == modules
    assert {key: id(p) for key, p in model.named_parameters()} == {
        key: id(p) for key, p in parameters.items()
    }
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, logits)


def test_weights_are_held_once(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", fresh=True, tie_word_embeddings=True)
    model.tie_weights()
    addresses = {key: p.data_ptr() for key, p in model.named_parameters()}
    runner = ModelRunner.load(model)
    assert {key: p.data_ptr() for key, p in model.named_parameters()} == addresses
    assert model.lm_head.weight is model.get_input_embeddings().weight
    runner.release()
    assert {key: p.data_ptr() for key, p in model.named_parameters()} == addresses
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_dropped_runner_gives_the_model_back(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", fresh=True)
    runner = ModelRunner.load(model)
    del runner
    gc.collect()
    assert is_its_owners(model)
    gone = [False]
    weakref.finalize(model, gone.__setitem__, 0, True)
    del model
    gc.collect()
    assert gone == [True]


def test_other_weights_and_training_are_followed() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.SiLU(), nn.Linear(30, 20))
    x = torch.randn(7, 40)
    model(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    held, release = hold(model, lambda: None, str)
    with held.step():
        model(x).sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients):
        assert torch.allclose(parameter.grad, gradient, atol=1e-5)
    fresh = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    model.load_state_dict(fresh)
    model[2].weight = nn.Parameter(2 * fresh["2.weight"])
    fresh["2.weight"] = 2 * fresh["2.weight"]
    hidden = F.silu(F.linear(x, fresh["0.weight"], fresh["0.bias"]))
    expected = F.linear(hidden, fresh["2.weight"], fresh["2.bias"])
    with torch.no_grad(), held.step():
        assert torch.allclose(model(x), expected, atol=1e-4)
        assert model(x[:0]).shape == (0, 20)
        model.double()
        assert model(x.double()).dtype == torch.float64
        model.float()
        assert torch.allclose(model(x), expected, atol=1e-4)
    release()
    assert all(torch.equal(value, fresh[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.allclose(model(x), expected, atol=1e-4)


def check_warm_equals_cold(engine: Engine, prompts: list[list[int]], max_new_tokens: int) -> None:
    """Cold alone, warm alone, batched and shuffled: the same tokens and bits of every logit."""
    forward = engine.core.scheduler.forward
    seen: dict[tuple[int, ...], Tensor] = {}
    written: dict[Any, list[int]] = {}  # a lease's own ids lag: it is extended page by page
    compared = 0

    def compare(runs: list[Run]) -> Tensor:
        nonlocal compared
        logits = forward(runs)
        rows = iter(logits)
        for run in runs:
            before = written.get(run.lease, run.lease.token_ids.tolist())
            token_ids = written[run.lease] = before[: run.start] + list(run.token_ids)
            for position in range(max(run.logits_from, run.start), run.stop):
                row = next(rows)
                expected = seen.setdefault(tuple(token_ids[: position + 1]), row)
                assert torch.equal(row, expected), (position, len(runs))
                compared += row is not expected
        assert next(rows, None) is None
        return logits

    engine.core.scheduler.forward = compare
    options: dict[str, Any] = dict(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
    cold = []
    for prompt in prompts:
        engine.cache.clear()
        cold.append(engine.generate(prompt, **options))
        assert cold[-1].cached_tokens == 0
    engine.cache.clear()
    for prompt in prompts:  # all of the prompt's logits, in one chunk and in several
        engine.generate(prompt, prompt_logprobs=1, **options)
        engine.cache.clear()
    order = list(range(len(prompts)))
    random.Random(0).shuffle(order)
    compared = 0
    batched = engine.generate([prompts[i] for i in order], prompt_logprobs=1, **options)
    warm = [engine.generate(prompts[i], **options) for i in order]
    assert all(r.cached_tokens == len(r.prompt_token_ids) - 1 for r in warm)
    again = engine.generate([prompts[i] for i in order], **options)
    assert compared >= 3 * len(prompts) * max_new_tokens
    for results in (batched, warm, again):
        for i, result in zip(order, results, strict=True):
            assert result.samples[0].token_ids == cold[i].samples[0].token_ids


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4", "model"])
@pytest.mark.parametrize("name", NAMES)
def test_warm_cold_batched_and_chunked_give_equal_bits(
    tiny_model: Callable[..., Any], name: str, dtype: str
) -> None:
    model = tiny_model(name, fresh=True)
    kv = KVConfig(dtype=dtype, capacity="4MiB")
    generator = random.Random(1)
    shared = [generator.randrange(3, 1000) for _ in range(150)]
    prompts = [
        shared[: 20 * i + 3] + [generator.randrange(3, 1000) for _ in range(5)] for i in range(7)
    ]
    with Engine(model, kv=kv, backend="torch", max_batch_tokens=64) as engine:
        assert engine.is_batch_invariant
        check_warm_equals_cold(engine, prompts, 6)


@pytest.mark.slow
def test_warm_cold_batched_and_chunked_give_equal_bits_on_the_real_model() -> None:
    from pydoc_data.topics import topics

    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_small_model(progress=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text_ids = tokenizer(topics["assignment"])["input_ids"]
    prompts = [text_ids[: 45 * i + 5] + text_ids[100 * i :][:20] for i in range(8)]
    kv = KVConfig(dtype="int8", capacity="64MiB")
    with Engine(model, kv=kv, backend="torch", max_batch_tokens=128) as engine:
        assert engine.is_batch_invariant
        check_warm_equals_cold(engine, prompts, 6)


@pytest.mark.slow
def test_rows_of_the_real_model_do_not_feel_their_number_or_place() -> None:
    from transformers import AutoModelForCausalLM

    folder = prepare_small_model(progress=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    runner = ModelRunner.load(model)
    check_rows(runner, 170, (1, 2, 3, 5, 16, 17, 100), runner.vocab_size)
    runner.release()
