"""Options and prompts of any kind: `python -m fuzz.inputs --minutes N`.

Whatever is given, what comes back is an object that works (it can be hashed, compared, copied,
and run) or an error that is documented: ValueError, TypeError or RadixKVError, never another.
"""

from __future__ import annotations

import argparse
import dataclasses
import fractions
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.tiny import VOCAB_SIZE
from radixkv import BeamParams, Engine, KVConfig, RadixKVError, SamplingParams
from radixkv.text import encode_continuation, encode_prompt

DOCUMENTED = (ValueError, TypeError, RadixKVError)

texts = st.text(st.characters(), max_size=8)  # lone surrogates too
numbers = st.one_of(
    st.integers(-3, 70000),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, float("nan"), float("inf")]),
    st.fractions(-3, 3),
    st.sampled_from([fractions.Fraction(10**400), 1j]),
    st.integers(0, 9).map(np.int64),
    st.floats(0, 1).map(np.float32),
    st.integers(0, 9).map(torch.tensor),
    st.booleans(),
    st.booleans().map(np.bool_),
)
arrays = st.sampled_from(
    [
        np.array([1, 2]),
        np.array([1.5]),
        np.array(["int8", "b"]),
        np.zeros((2, 2), dtype=np.int32),
        torch.tensor([3, 4]),
        torch.tensor([]),
        torch.tensor(True),
    ]
)
plain = st.one_of(st.none(), numbers, texts, st.binary(max_size=4), arrays)
junk = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(texts, st.integers(-1, 300), st.none()), inner, max_size=3),
        st.just(range(3)),
        st.just({1, 2}),
        st.just(object()),
        st.just(len),
        st.just(int),
    ),
    max_leaves=6,
)
# What a field may well be, so that more than the first check is reached.
likely = st.one_of(
    st.integers(0, 5),
    st.floats(0, 2),
    st.sampled_from(["int8", "fp8", "model", "lru", "auto", "never", "1MiB", "900TB", "9" * 400]),
    st.lists(st.integers(0, 300), max_size=3),
    st.lists(texts, max_size=2),
    st.dictionaries(st.integers(0, 300), st.floats(-5, 5), max_size=3),
    st.sampled_from([True, False, None, (), {"type": "boolean"}, "a+", "{}"]),
)
roles = st.one_of(st.sampled_from(["user", "assistant", "system", ""]), plain)
messages = st.one_of(
    st.fixed_dictionaries({"role": roles}, optional={"content": junk, "tool_calls": junk}), junk
)
prompts = st.one_of(
    junk,
    texts,
    st.lists(messages, min_size=1, max_size=3),
    st.lists(st.integers(-1, VOCAB_SIZE), min_size=1, max_size=5),
)
# Options that are in range, at its ends too: these must run.
ids = st.integers(0, VOCAB_SIZE - 1)
SOUND = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 1e308),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**70),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 1e308, exclude_min=True),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(ids, st.floats(allow_nan=False, allow_infinity=False)),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=2),
    "stop_token_ids": st.lists(ids, max_size=3),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, VOCAB_SIZE),
    "prompt_logprobs": st.integers(0, VOCAB_SIZE),
    "skip_special_tokens": st.booleans(),
    "timeout_s": st.floats(0, exclude_min=True, allow_infinity=False),
}
# Each field is above or here (a test says so): what each is fuzzed by instead.
ELSEWHERE = {
    "max_new_tokens": "given below in any case, or what runs would be long",
    "logits_processors": "fuzz.faults",
    "json_schema": "fuzz.guided",
    "regex": "fuzz.guided",
    "grammar": "fuzz.guided",
}
sound = st.fixed_dictionaries({"max_new_tokens": st.integers(1, 3)}, optional=SOUND)
sound_prompts = st.one_of(
    st.lists(ids, min_size=1, max_size=9),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=9),
    st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "assistant"]),
                "content": st.text(st.characters(codec="utf-8"), max_size=4),
            }
        ),
        min_size=1,
        max_size=3,
    ),
)


def fields_of(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields of a dataclass of options, with values of any kind."""
    names = [field.name for field in dataclasses.fields(kind)]
    value = st.one_of(likely, likely, junk)
    return st.dictionaries(st.sampled_from(names), value, max_size=4)


def make(kind: type, fields: dict[str, Any]) -> Any:
    """The options, checked to be whole; None where an error that is documented was raised."""
    try:
        made = kind(**fields)
    except DOCUMENTED as error:
        said = str(error)
    else:
        said = None
    if said is not None:
        assert kind.__name__ in said, f"not named: {said}"
        return None
    assert hash(made) == hash(dataclasses.replace(made))
    assert made == dataclasses.replace(made)
    assert isinstance(repr(made), str)
    return made


def encode(tokenizer: Any, prompt: Any) -> None:
    """A prompt and a continuation: ids of the vocabulary, or a documented error."""
    ways = (encode_prompt, partial(encode_continuation, after=[7, 9]))
    for how in ways:
        try:
            ids = how(tokenizer, prompt, vocab_size=VOCAB_SIZE)
        except DOCUMENTED:
            continue
        assert ids and all(type(i) is int and 0 <= i < VOCAB_SIZE for i in ids)


def run(engine: Engine, fields: dict[str, Any], prompt: Any, kind: type) -> bool:
    """A request with such options ends, and leaves nothing; whether it gave a result."""
    made = make(kind, {"max_new_tokens": 2} | fields)
    if made is not None and made.max_new_tokens > 3:
        made = dataclasses.replace(made, max_new_tokens=3)
    if made is None or getattr(made, "n", 1) > 8 or getattr(made, "width", 1) > 8:
        return False
    if getattr(made, "logits_processors", ()):
        return False  # any callable: what it raises is its own
    try:
        request = engine.submit(prompt, made)
    except DOCUMENTED:
        return False
    for _ in range(200):
        if request.done:
            break
        engine.step()
    assert request.done
    assert request.error is None or isinstance(request.error, DOCUMENTED), request.error
    assert not engine.cache.core.leases
    return request.error is None


def main() -> int:
    from fuzz.tiny import make_model, make_tokenizer

    parser = argparse.ArgumentParser(prog="python -m fuzz.inputs", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None, help="first seed; default: the time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    first = number = int(time.time()) if args.seed is None else args.seed
    tokenizer = make_tokenizer()
    kv = KVConfig(page_size=4, capacity="256KiB")
    end, examples = time.monotonic() + 60 * args.minutes, 0
    often = settings(
        max_examples=300,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    ran = 0
    with Engine(make_model(), tokenizer, kv=kv, backend="torch") as engine:

        def count(fields: dict[str, Any], prompt: Any) -> None:
            nonlocal ran
            ran += run(engine, fields, prompt, SamplingParams)

        def must_run(fields: dict[str, Any], prompt: Any) -> None:
            nonlocal ran
            assert run(engine, fields, prompt, SamplingParams)
            ran += 1

        def check(kind: type) -> Callable[[dict[str, Any]], None]:
            def one(fields: dict[str, Any]) -> None:
                make(kind, fields)

            return often(given(fields_of(kind))(one))

        properties: list[Callable[..., Any]] = [
            *(check(kind) for kind in (SamplingParams, BeamParams, KVConfig)),
            often(given(prompts)(lambda prompt: encode(tokenizer, prompt))),
            often(given(fields_of(SamplingParams), prompts)(count)),
            often(given(sound, sound_prompts)(must_run)),
        ]
        while time.monotonic() < end:
            for one in properties:
                seed(number)(one)()
                examples += often.max_examples
            number += 1
    print(f"seeds {first} to {number - 1}: {examples} examples, {ran} of them gave a result")
    return 0


if __name__ == "__main__":
    sys.exit(main())
