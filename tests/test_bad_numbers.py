"""A model that gives NaN or Inf: a named error for that request, nothing poisoned, no one else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from radixkv import BeamParams, Engine, KVConfig, NonFiniteError

BAD = 7  # the token whose numbers go wrong
GREEDY = dict(temperature=0, max_new_tokens=3, ignore_eos=True)


def ids_of(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(10, 1000), k=num_tokens)


@contextmanager
def spoiled(model: Any, module: torch.nn.Module, spoil: Callable[[Any], Any]) -> Iterator[None]:
    """Within this block ``spoil`` changes the module's rows of the token `BAD`."""
    seen: dict[str, Any] = {}

    def note(_module: Any, _args: Any, keywords: Any) -> None:
        seen["bad"] = keywords["input_ids"][0] == BAD

    def change(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        rows = seen["bad"]
        if out.shape[1] != rows.shape[0] or not rows.any():
            return out
        out = out.clone()
        out[0, rows] = spoil(out[0, rows])
        return out

    hooks = [
        model.register_forward_pre_hook(note, with_kwargs=True),
        module.register_forward_hook(change),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def second_head(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(rows: torch.Tensor) -> torch.Tensor:
        rows[:, 16:] = value
        return rows

    return spoil


def check_harm(engine: Engine, says: str) -> None:
    """The bad prompt fails by name, those beside it and after it are as ever, no page is bad."""
    model = engine.model
    good = [ids_of(6), ids_of(9, 1)]
    bad = [*ids_of(4, 2), BAD, *ids_of(3, 3)]
    where = model.model.layers[1].self_attn
    module, spoil = {
        "K of layer 1, KV head 1": (where.k_proj, second_head(float("nan"))),
        "V of layer 1, KV head 1": (where.v_proj, second_head(float("-inf"))),
        # A norm of rows that are not finite makes NaN of them; no layer reads those rows.
        "logits": (model.model.norm, lambda rows: rows * float("nan")),
    }[says]
    engine.cache.clear()
    expected = [engine.generate(p, **GREEDY).samples[0].token_ids for p in good]
    engine.cache.clear()
    with spoiled(model, module, spoil):
        requests = [engine.submit(p, **GREEDY) for p in (good[0], bad[:5], good[1], bad)]
        while not all(request.done for request in requests):
            engine.step()
        for request, tokens in zip(requests[::2], expected, strict=True):
            assert request.result().samples[0].token_ids == tokens
        with pytest.raises(NonFiniteError, match=says):
            requests[1].result()
        if says != "logits":  # of bad[4], whose logits nobody wants in the longer prompt
            with pytest.raises(NonFiniteError, match=says):
                requests[3].result()
        if says == "logits":
            with pytest.raises(NonFiniteError, match=says):
                engine.score(bad[:4], [[BAD, 11]])
    # Nothing of it is found, and nobody reads it.
    if says != "logits":
        assert engine.cache.match(bad) <= 4
    engine.cache.check()
    stats = engine.cache.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    for prompt, tokens in zip(good, expected, strict=True):
        assert engine.generate(prompt, **GREEDY).samples[0].token_ids == tokens
    warm = engine.generate(bad, **GREEDY).samples[0].token_ids
    engine.cache.clear()
    assert engine.generate(bad, **GREEDY).samples[0].token_ids == warm


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "fp8_e5m2", "int4", "model"])
def test_nan_and_inf_are_named_and_harm_no_one(tiny_model: Any, dtype: str, backend: str) -> None:
    config = KVConfig(dtype=dtype, page_size=4, capacity="1MiB")
    with Engine(tiny_model("llama"), kv=config, backend=backend) as engine:
        for says in ("K of layer 1, KV head 1", "V of layer 1, KV head 1", "logits"):
            check_harm(engine, says)


@pytest.mark.parametrize("dtype", ["int8", "model"])
def test_float16_that_overflows_is_named(tiny_model: Any, dtype: str) -> None:
    model = tiny_model("llama", fresh=True).half()
    config = KVConfig(dtype=dtype, page_size=4, capacity="1MiB")
    with Engine(model, kv=config, backend="torch") as engine:
        good, bad = ids_of(6), [*ids_of(4, 2), BAD]
        expected = engine.generate(good, **GREEDY).samples[0].token_ids
        where = model.model.layers[0].self_attn.v_proj
        with spoiled(model, where, lambda rows: rows * 60000 * 60000):
            requests = [engine.submit(p, **GREEDY) for p in (bad, good)]
            while not all(request.done for request in requests):
                engine.step()
        pages = "float16" if dtype == "model" else dtype
        says = rf"V of layer 0.*{pages} pages hold.*float16 overflows above 65504"
        with pytest.raises(NonFiniteError, match=says):
            requests[0].result()
        assert requests[1].result().samples[0].token_ids == expected
        assert engine.cache.match(bad) <= 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_lie_are_no_scores(tiny_model: Any, value: float) -> None:
    model = tiny_model("llama")
    with Engine(model, kv=KVConfig(page_size=4, capacity="1MiB"), backend="torch") as engine:
        prompt = [*ids_of(4), BAD]

        def spoil(rows: torch.Tensor) -> torch.Tensor:
            if value < 0:
                rows[:] = value  # all of a row barred
            else:
                rows[..., 500] = value
            return rows

        def change(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
            return spoil(out.clone())

        hook = model.lm_head.register_forward_hook(change)
        try:
            for ask in (
                lambda: engine.score(prompt, [[5], [6, 7]]),
                lambda: engine.generate(prompt, max_new_tokens=2),
                lambda: engine.generate(prompt, max_new_tokens=1, prompt_logprobs=1),
                lambda: engine.generate(prompt, BeamParams(width=2, max_new_tokens=2)),
            ):
                with pytest.raises(NonFiniteError, match="logits"):
                    ask()
        finally:
            hook.remove()
        scores = engine.score(prompt, [[5], [6, 7]])
        assert all(score.logprob > float("-inf") for score in scores)
        engine.cache.check()
