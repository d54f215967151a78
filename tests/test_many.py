"""Many prompts in one call: a bad one is found first and named, and harms no other."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import (
    BeamParams,
    CapacityError,
    ContextLengthError,
    Engine,
    EngineClosedError,
    KVConfig,
    NonFiniteError,
    RadixKVError,
    SamplingParams,
)
from radixkv.failures import blame, copy_of


def kv(**changes: Any) -> KVConfig:
    return KVConfig(**{"dtype": "model", "page_size": 4, "capacity": "4MiB"} | changes)


def random_ids(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=num_tokens)


def check_idle(engine: Engine) -> None:
    with engine.core.step_lock:  # the last step is over
        assert not engine.core._live and not engine.core._inbox
        assert not engine.cache.core.leases
        engine.cache.check()
        stats = engine.cache.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Any], byte_tokenizer: Any) -> Any:
    model = tiny_model("llama", fresh=True)
    with Engine(model, byte_tokenizer, kv=kv(capacity="40KiB")) as made:
        with torch.no_grad():
            model.model.embed_tokens.weight[7] = float("nan")
        yield made


def tokens(result: Any) -> list[list[int]]:
    return [sample.token_ids for sample in result.samples]


class RefusedError(Exception):
    """With arguments that it does not keep, so that no copy is made by calling it."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


ONE = RefusedError(5, why="the same object each time")


def raising(error: Exception) -> Any:
    def processor(input_ids: Any, scores: Any) -> Any:
        raise error

    return processor


def through(processor: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=4, logits_processors=[processor])


def not_finite(input_ids: Any, scores: Any) -> Any:
    return torch.full_like(scores, math.nan)


FINE = SamplingParams(seed=3, max_new_tokens=4)
# (prompt, params, the error; None is a result, and a class what it is of)
GOOD = [
    (random_ids(5, seed=1), FINE, None),
    (random_ids(17, seed=2), SamplingParams(temperature=0, n=2, max_new_tokens=3), None),
    ("the onion", SamplingParams(seed=1, max_new_tokens=5, stop=["q"]), None),
    ([{"role": "user", "content": "in"}], SamplingParams(seed=2, max_new_tokens=2), None),
    (random_ids(5, seed=3), BeamParams(width=2, max_new_tokens=3), None),
    (random_ids(6, seed=4), SamplingParams(max_new_tokens=9, timeout_s=1e-9), None),
]
EARLY = [
    ([5, -1], FINE, ValueError),
    ([5, 1000], FINE, ValueError),
    ([5, 1.5], FINE, TypeError),
    ("", FINE, ValueError),
    ([], FINE, ValueError),
    (5, FINE, TypeError),
    (None, FINE, TypeError),
    (b"the", FINE, TypeError),
    ({"role": "user", "content": "in"}, FINE, TypeError),
    ([{"role": "user"}], FINE, ValueError),
    ([["the"], "on"], FINE, TypeError),
    (random_ids(254, seed=5), FINE, ContextLengthError),
    (random_ids(120, seed=6), FINE, CapacityError),
    (random_ids(5, seed=7), SamplingParams(max_new_tokens=4, stop_token_ids=[1000]), ValueError),
    (random_ids(5, seed=7), SamplingParams(max_new_tokens=4, logprobs=5000), ValueError),
    (random_ids(5, seed=7), 3, TypeError),
    (random_ids(5, seed=7), BeamParams(width=60, max_new_tokens=9), CapacityError),
]
LATE = [
    ([7, 8, 9], FINE, NonFiniteError),
    (
        random_ids(5, seed=8),
        through(not_finite),
        NonFiniteError,
    ),
    (
        random_ids(5, seed=8),
        through(raising(ONE)),
        RefusedError,
    ),
    (
        random_ids(5, seed=9),
        through(raising(ONE)),
        RefusedError,
    ),
    (
        random_ids(5, seed=9),
        through(raising(KeyError("x"))),
        KeyError,
    ),
]
ITEMS = [*GOOD, *EARLY, *LATE]


@pytest.fixture(scope="module")
def solo(engine: Engine) -> dict[int, Any]:
    """What each good item gives alone."""
    return {
        i: tokens(engine.generate(prompt, params)) for i, (prompt, params, _) in enumerate(GOOD)
    }


def ask(engine: Engine, road: str, prompts: Any, params: Any, **options: Any) -> Any:
    if road == "sync":
        return engine.generate(prompts, params, **options)
    return asyncio.run(engine.agenerate(prompts, params, **options))


@settings(max_examples=60)
@given(
    places=st.lists(st.integers(0, len(ITEMS) - 1), min_size=1, max_size=7),
    road=st.sampled_from(["sync", "async"]),
    on_error=st.sampled_from(["raise", "return"]),
)
def test_a_bad_item_harms_no_other_whatever_it_is(
    engine: Engine, solo: dict[int, Any], places: list[int], road: str, on_error: str
) -> None:
    places = [*places, 0]  # one prompt at least, so that it is a list of prompts
    asked = [ITEMS[place] for place in places]
    prompts, params = [item[0] for item in asked], [item[1] for item in asked]
    errors = [item[2] for item in asked]
    early = [i for i, place in enumerate(places) if len(GOOD) <= place < len(GOOD) + len(EARLY)]
    failed = [i for i, error in enumerate(errors) if error is not None]
    done_before = engine.stats().steps

    def check_results(results: list[Any]) -> None:
        assert len(results) == len(places)
        for i, (place, result) in enumerate(zip(places, results, strict=True)):
            if i in failed:
                assert result is None
            elif place == 5:
                assert result.samples[0].finish_reason == "abort"
            else:
                assert tokens(result) == solo[place]

    if on_error == "return" or not failed:
        results = ask(engine, road, prompts, params, on_error=on_error)
        returned = [results[i] for i in failed]
        for i, error in zip(failed, returned, strict=True):
            assert isinstance(error, errors[i])
            assert error.index == i
            check_results(error.results)
        assert len({id(error) for error in returned}) == len(failed)
        check_results([None if i in failed else r for i, r in enumerate(results)])
    else:
        first = min(early or failed)
        with pytest.raises(errors[first]) as caught:
            ask(engine, road, prompts, params, on_error=on_error)
        error: Any = caught.value
        assert error.index == first
        if early:
            assert error.results == [None] * len(places)
            assert engine.stats().steps == done_before
        else:
            check_results(error.results)
        if isinstance(error, (ValueError, TypeError, RadixKVError)):
            assert str(error).startswith(f"prompts[{first}]: ")
        else:
            assert f"of prompts[{first}]" in error.__notes__
    check_idle(engine)


def test_of_one_prompt_the_message_is_as_it_was(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"^prompt: expected token ids") as caught:
        engine.generate([5, -1])
    assert (caught.value.index, caught.value.results) == (0, [None])  # type: ignore[attr-defined]
    error = engine.generate([5, -1], on_error="return")
    assert isinstance(error, ValueError)
    assert error.index == 0  # type: ignore[attr-defined]
    result = engine.generate(random_ids(5, seed=1), FINE, on_error="return")
    assert result.samples


def test_what_is_no_prompts_fault_is_raised_in_any_case(engine: Engine) -> None:
    good = [random_ids(5, seed=1), "the"]
    for error, prompts, options in (
        (ValueError, good, {"on_error": "ignore"}),
        (ValueError, good, {"on_error": None}),
        (TypeError, good, {"namespace": []}),
        (TypeError, good, {"tempratur": 1}),
        (ValueError, good, {"temperature": -1}),
        (ValueError, good, {"params": [FINE]}),
        (TypeError, good, {"params": FINE, "n": 2}),
        (TypeError, good, {"params": [FINE, FINE], "n": 2}),
        (TypeError, good, {"params": 3}),
        (TypeError, None, {}),
        (ValueError, [], {}),
        (TypeError, {1, 2}, {}),
        (TypeError, torch.zeros(2, 2, 2, dtype=torch.long), {}),
    ):
        for on_error in ("raise", "return"):
            with pytest.raises(error):
                engine.generate(prompts, **{"on_error": on_error, **options})
    check_idle(engine)


def test_rows_of_an_array_are_prompts_and_named_as_such(engine: Engine) -> None:
    rows = np.array([random_ids(5, seed=1), [5, 6, 2000, 8, 9], random_ids(5, seed=2)])
    for prompts in (rows, torch.from_numpy(rows), list(rows), tuple(map(tuple, rows.tolist()))):
        first, bad, last = engine.generate(prompts, FINE, on_error="return")
        assert first.samples and last.samples
        assert "prompts[1]" in str(bad) and "2000" in str(bad)


def test_a_list_that_holds_a_prompt_is_a_list_of_prompts(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"prompts\[1\]") as caught:
        engine.generate(["the", 5], FINE)
    assert caught.value.index == 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"prompts\[0\]"):
        engine.generate([{"role": "user", "content": "in"}, "the"], FINE)
    with pytest.raises(TypeError, match="mix"):  # no prompt among them
        engine.generate([{"role": "user", "content": "in"}, 5], FINE)


def test_a_call_that_is_cancelled_ends_all_its_requests(engine: Engine) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(input_ids: Any, scores: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return scores

    async def call() -> None:
        held = SamplingParams(max_new_tokens=50, logits_processors=[hold])
        long = SamplingParams(max_new_tokens=60, ignore_eos=True)
        prompts = [random_ids(5, seed=i) for i in range(3)]
        task = asyncio.create_task(engine.agenerate(prompts, [held, long, long], on_error="return"))
        assert await asyncio.get_running_loop().run_in_executor(None, reached.wait, 60)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(call())
    check_idle(engine)


def test_what_ends_the_waiting_ends_all_requests(engine: Engine, monkeypatch: Any) -> None:
    """KeyboardInterrupt, say."""
    from radixkv.engine.request import Request

    def wait(request: Request, timeout_s: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Request, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([random_ids(5, seed=1), "the"], max_new_tokens=60, on_error="return")
    check_idle(engine)


def test_errors_of_two_calls_at_once_are_their_own(engine: Engine) -> None:
    """A processor raises one object for both: neither call sees the other's place."""
    both = threading.Barrier(2, timeout=60)
    caught: dict[int, Any] = {}

    def call(place: int) -> None:
        prompts = [random_ids(5, seed=i) for i in range(3)]
        params = [FINE] * 3
        params[place] = through(raising(ONE))
        both.wait()
        try:
            engine.generate(prompts, params)
        except RefusedError as error:
            caught[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in (1, 2):
        error = caught[place]
        assert (error.index, error.code, str(error)) == (place, 5, str(ONE))
        assert [result is None for result in error.results] == [i == place for i in range(3)]
    check_idle(engine)


def test_a_step_that_fails_for_all_gives_each_an_error_of_its_own(
    engine: Engine, monkeypatch: Any
) -> None:
    shared = RuntimeError("no step")

    def step() -> Any:
        raise shared

    with monkeypatch.context() as patch:
        patch.setattr(engine.core.scheduler, "step", step)
        errors = engine.generate([random_ids(5, seed=1), "the", "on"], FINE, on_error="return")
    assert [error.index for error in errors] == [0, 1, 2]
    assert {type(error) for error in errors} == {RuntimeError}
    assert len({id(error) for error in errors}) == 3
    check_idle(engine)


def test_a_progress_bar_goes_to_the_end_and_takes_a_call_with_bad_prompts_alone(
    engine: Engine, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal: a pipe gets no bar
    bad = through(raising(KeyError("x")))
    results = engine.generate(
        ["the", [5, -1], "on"], [bad, FINE, FINE], progress=True, on_error="return"
    )
    assert [type(r).__name__ for r in results] == ["KeyError", "ValueError", "Result"]
    assert "2/2" in capsys.readouterr().err
    errors = engine.generate([[5, -1], ""], progress=True, on_error="return")
    assert all(isinstance(error, ValueError) for error in errors)


def test_an_engine_that_is_closed_says_so_for_the_whole_call(tiny_model: Any) -> None:
    engine = Engine(tiny_model("llama"), kv=kv())
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.generate([[5], [6]], on_error="return")
    with pytest.raises(EngineClosedError):
        asyncio.run(engine.agenerate([[5], [6]], on_error="return"))


def test_a_bad_continuation_is_named_by_its_place(engine: Engine) -> None:
    for bad, error in (([5, -1], ValueError), ("", ValueError), (5, TypeError), (None, TypeError)):
        with pytest.raises(error, match=r"continuations\[1\]") as caught:
            engine.score("the", ["on", bad, "in"])
        assert caught.value.index == 1
        with engine.open("the") as branch, pytest.raises(error, match=r"continuations\[1\]"):
            branch.score(["on", bad])
    check_idle(engine)


# -- the parts ---------------------------------------------------------------------------------


class TwinError(Exception):
    """Copied by its arguments."""


class FixedError(Exception):
    """Has an index already, which nobody may set."""

    @property
    def index(self) -> int:
        return 9


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a"),
        TwinError("a", 2),
        RefusedError(3, why="b"),
        OSError(2, "no file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        KeyError("k"),
        ContextLengthError("long"),
        ExceptionGroup("both", [ValueError("a"), TypeError("b")]),
        Exception(),
    ],
)
def test_a_copy_of_an_error_is_the_same_error(error: Exception) -> None:
    error.add_note("said before")
    error.__cause__ = TypeError("why")
    twin = copy_of(error)
    assert twin is not error
    assert type(twin) is type(error)
    assert (str(twin), twin.args) == (str(error), error.args)
    assert vars(twin) == vars(error)
    assert twin.__cause__ is error.__cause__
    twin.add_note("said to one")
    assert error.__notes__ == ["said before"]


def test_an_error_that_takes_no_index_is_told_of_in_one_that_does() -> None:
    told: Any = blame(FixedError("a"), 2, [None] * 3, name="prompts[2]")
    assert isinstance(told, RadixKVError)
    assert (told.index, told.results) == (2, [None] * 3)
    assert isinstance(told.__cause__, FixedError)
    assert str(told) == "prompts[2]: FixedError: a"
