"""Options and prompts: any value gives an object that works, or an error that is documented."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import inputs
from fuzz.tiny import make_model, make_tokenizer
from radixkv import (
    BeamParams,
    CapacityError,
    ContextLengthError,
    Engine,
    EngineClosedError,
    KVConfig,
    KVSpec,
    PrefixCache,
    SamplingParams,
    UnsupportedModelError,
)

KV = KVConfig(page_size=4, capacity="1MiB")
often = settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def engine(tokenizer: Any) -> Iterator[Engine]:
    with Engine(make_model(), tokenizer, kv=KV, backend="torch") as engine:
        yield engine


@pytest.mark.parametrize("kind", [SamplingParams, BeamParams, KVConfig])
@often
@given(data=st.data())
def test_any_options_work_or_are_refused_by_name(kind: type, data: st.DataObject) -> None:
    inputs.make(kind, data.draw(inputs.fields_of(kind)))


@often
@given(prompt=inputs.prompts)
def test_any_prompt_is_token_ids_or_refused(tokenizer: Any, prompt: Any) -> None:
    inputs.encode(tokenizer, prompt)


@settings(often, max_examples=60)
@given(fields=inputs.fields_of(SamplingParams), prompt=inputs.prompts)
def test_any_request_ends(engine: Engine, fields: dict[str, Any], prompt: Any) -> None:
    inputs.run(engine, fields, prompt, SamplingParams)


@settings(often, max_examples=60)
@given(fields=inputs.sound, prompt=inputs.sound_prompts)
def test_options_in_range_run(engine: Engine, fields: dict[str, Any], prompt: Any) -> None:
    assert inputs.run(engine, fields, prompt, SamplingParams)


@settings(often, max_examples=30)
@given(fields=inputs.fields_of(BeamParams))
def test_any_search_ends(engine: Engine, fields: dict[str, Any]) -> None:
    inputs.run(engine, fields, [5, 6, 7], BeamParams)


@pytest.mark.parametrize("kind", [SamplingParams, BeamParams])
@pytest.mark.parametrize("name", ["ignore_eos", "skip_special_tokens"])
@pytest.mark.parametrize("value", ["no", None, 0, 1, np.bool_(True)])
def test_switches_are_true_or_false(kind: type, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__}\.{name}: expected True or False"):
        kind(**{name: value})


def test_params_are_keys_of_a_dict() -> None:
    given_ = {"logit_bias": {5: 1.5}, "stop": ["a"], "logits_processors": [lambda i, s: s]}
    params = SamplingParams(**given_)
    assert {params: 1}[SamplingParams(**given_)] == 1
    assert SamplingParams(logit_bias={5: 1.5}) != SamplingParams(logit_bias={5: 2.5})
    schema = {"type": "object"}
    assert hash(SamplingParams(json_schema=schema)) == hash(SamplingParams(json_schema=schema))


def test_numbers_of_numpy_become_pythons() -> None:
    params = SamplingParams(n=np.int64(2), seed=np.uint8(3), temperature=np.float32(0.5))
    assert [type(v) for v in (params.n, params.seed, params.temperature)] == [int, int, float]


@pytest.mark.parametrize("capacity", ["900TB", 10**30, "9" * 40])
def test_a_capacity_beyond_the_memory_is_named(engine: Engine, capacity: Any) -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4)
    with pytest.raises(CapacityError, match=r"KVConfig.capacity: expected at most .* bytes"):
        PrefixCache(spec, KVConfig(capacity=capacity))
    with pytest.raises(CapacityError, match=r"KVConfig.capacity"):
        Engine(engine.model, kv=KVConfig(capacity=capacity), backend="torch")
    assert engine.generate([5, 6], max_new_tokens=1).samples  # its model is still in use


def test_an_allocation_that_fails_is_a_capacity_error(monkeypatch: Any) -> None:
    def refuse(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=4)
    with pytest.raises(CapacityError, match=r"KVConfig.capacity"):
        PrefixCache(spec, KVConfig(capacity=4096), backend="torch")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1"])
def test_a_scale_that_is_no_number_is_refused(value: Any) -> None:
    cache = PrefixCache(KVSpec(num_layers=1, num_kv_heads=1, head_dim=4), KV, backend="torch")
    rows = torch.ones(2, 1, 4)
    with cache.acquire([1, 2]) as lease:
        lease.write(0, rows, rows)
        with pytest.raises((ValueError, TypeError), match="softmax_scale: expected a finite"):
            lease.attend(0, rows, softmax_scale=value)


def test_namespaces_that_cannot_be_looked_up_are_named(engine: Engine) -> None:
    for call in (
        lambda: engine.cache.clear([]),
        lambda: engine.cache.match([1], []),
        lambda: engine.generate([5], namespace=[]),
        lambda: engine.open([5], namespace={}),
    ):
        with pytest.raises(TypeError, match="namespace: expected something hashable"):
            call()


def test_lone_surrogates_are_named(engine: Engine) -> None:
    bad = "in \ud800"
    chat = [{"role": "user", "content": bad}]
    deep = [{"role": "user", "content": [{"type": "text", "text": bad}]}]
    with engine.open("the") as branch:
        for name, call in (
            ("prompt", lambda: engine.generate(bad, max_new_tokens=1)),
            ("prompt", lambda: engine.generate(chat, max_new_tokens=1)),
            ("prompt", lambda: engine.generate(deep, max_new_tokens=1)),
            (r"continuations\[0\]", lambda: engine.score("in", [bad])),
            ("continuation", lambda: branch.append(bad)),
            ("messages", lambda: branch.append(chat)),
            (r"SamplingParams\.stop", lambda: SamplingParams(stop=bad)),
            (r"SamplingParams\.regex", lambda: SamplingParams(regex=bad)),
            (r"SamplingParams\.json_schema", lambda: SamplingParams(json_schema={"enum": [bad]})),
        ):
            with pytest.raises(ValueError, match=rf"{name}: expected .*lone surrogate"):
                call()


def test_schemas_nested_too_deeply_are_named() -> None:
    schema: dict[str, Any] = {"type": "boolean"}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match=r"json_schema: expected .*nested too deeply"):
        SamplingParams(json_schema=schema)
    text = '{"not":' * 100_000 + "{}" + "}" * 100_000
    with pytest.raises(ValueError, match=r"json_schema: expected .*nested too deeply"):
        SamplingParams(json_schema=text)
    while schema.get("not"):  # taken apart here: a destructor would recurse
        schema = schema["not"]


def test_errors_about_continuations_name_them(engine: Engine) -> None:
    for tail, says in (
        ([], "at least one"),
        ("", "got an empty str"),
        ([1.5], "integer token id"),
        ([9999], "token ids from 0 to"),
        (np.array([0.5]), "array of integers"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"^continuations\[1\]: .*{says}"):
            engine.score([5, 6], [[5], tail])
        with engine.open([5, 6]) as branch:
            with pytest.raises((ValueError, TypeError), match=rf"^continuation: .*{says}"):
                branch.append(tail)
            assert branch.token_ids == [5, 6]


def test_a_branch_past_the_models_positions_is_refused_at_once(engine: Engine) -> None:
    with engine.open([5] * 250) as branch:
        branch.append([6] * 6)
        with pytest.raises(ContextLengthError, match="256"):
            branch.append([7])
        assert len(branch) == 256


def test_only_a_request_can_be_aborted(engine: Engine) -> None:
    for wrong in (None, 5, "request"):
        with pytest.raises(TypeError, match=r"request: expected a Request"):
            engine.abort(wrong)
    with engine.stream([5, 6], max_new_tokens=2) as stream:
        with pytest.raises(TypeError, match=r"close\(\)"):
            engine.abort(stream)
        engine.abort(stream.request)


def test_agenerate_shows_its_progress(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal: a pipe gets no bar
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    prompts = [[5, 6, 7], [8, 9]]
    expected = engine.generate(prompts, temperature=0, max_new_tokens=3)
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        task = engine.agenerate(prompts, temperature=0, max_new_tokens=3, progress=True)
        results = asyncio.run(task)
    said = " ".join(re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown.getvalue()).split())
    for what in ("2/2", "tokens/s", "of prompts cached", "of pages in use"):
        assert what in said
    assert [r.text for r in results] == [r.text for r in expected]


def test_a_processor_is_called_once_a_token_whatever_its_neighbours_do(engine: Engine) -> None:
    calls: list[int] = []

    def note(input_ids: Any, scores: Any) -> Any:
        calls.append(input_ids.shape[1])
        return scores

    def explode(input_ids: Any, scores: Any) -> Any:
        raise RuntimeError("user code")

    requests = [
        engine.submit([5, 6], max_new_tokens=3, ignore_eos=True, logits_processors=[note]),
        engine.submit([7, 8], max_new_tokens=3, logits_processors=[explode]),
        engine.submit([9], max_new_tokens=3, logit_bias={5: 1.0}),
    ]
    while not all(request.done for request in requests):
        engine.step()
    assert calls == [2, 3, 4]
    with pytest.raises(RuntimeError, match="user code"):
        requests[1].result()
    assert requests[2].result().samples


def state_of(model: Any) -> Any:
    weights = {name: (w.data_ptr(), tuple(w.shape)) for name, w in model.named_parameters()}
    modules = {name: (type(m), m.training) for name, m in model.named_modules()}
    return model.config._attn_implementation, modules, weights


def test_a_closed_or_failed_engine_gives_the_model_back(tokenizer: Any) -> None:
    model = make_model(seed=3)
    model.train()
    model.model.layers[0].eval()  # a mix of modes comes back as a mix
    before = state_of(model)

    def unchanged() -> bool:
        now = state_of(model)
        return now[0] == before[0] and now[1] == before[1] and now[2].keys() == before[2].keys()

    for wrong, kind in (
        (dict(backend="nothing"), ValueError),
        (dict(kv=KVConfig(capacity=1)), ValueError),
        (dict(kv=KVConfig(capacity="900TB")), CapacityError),
        (dict(max_batch_tokens=0), ValueError),
    ):
        with pytest.raises(kind):
            Engine(model, tokenizer, **({"kv": KV, "backend": "torch"} | wrong))
        assert unchanged(), wrong
    with Engine(model, tokenizer, kv=KV, backend="torch") as first:
        text = first.generate([5, 6], temperature=0, max_new_tokens=3).text
        assert not model.training and model.config._attn_implementation == before[0]
        second = Engine(model, tokenizer, kv=KV, backend="torch")
        second.close()
        assert first.generate([5, 6], temperature=0, max_new_tokens=3).text == text
    assert unchanged()


def test_a_refused_model_is_as_it_was(monkeypatch: Any) -> None:
    model = make_model(seed=3)
    before = state_of(model)
    attention = model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "is_causal", False)
    with pytest.raises(UnsupportedModelError, match="not causal"):
        Engine(model, kv=KV, backend="torch")
    assert state_of(model)[:2] == before[:2]


def test_the_cache_of_a_closed_engine_is_empty_and_its_own(tokenizer: Any) -> None:
    engine = Engine(make_model(), tokenizer, kv=KV, backend="torch")
    engine.generate([5, 6, 7, 8, 9], max_new_tokens=2)
    engine.close()
    cache = engine.cache
    assert cache.match([5, 6, 7, 8, 9]) == 0
    assert cache.num_free_pages == cache.pool.num_pages
    with pytest.raises(EngineClosedError):
        engine.generate([5], max_new_tokens=1)
    with cache.acquire([1, 2, 3]) as lease:  # a PrefixCache like any other
        lease.commit(2)
    assert cache.match([1, 2, 3]) == 2
    cache.check()
