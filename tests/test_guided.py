"""Constrained output: whatever the model wants, the text follows the schema, regex or grammar."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv import BeamParams, KVConfig, RadixKVError, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.engine.guided import Guide, allowed_tokens, compute_ahead, make_guide
from radixkv.engine.sampling import SamplerRow, sample

PROMPT = list(range(10, 58))


@pytest.fixture(scope="module")
def engine(tiny_model, byte_tokenizer):
    model = tiny_model(max_position_embeddings=2048)
    with Engine(model, byte_tokenizer, kv=KVConfig(capacity="16MiB")) as engine:
        yield engine
        engine.cache.check()
        stats = engine.cache.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total


# any schema gives JSON that it allows

letters = st.text('abcdé☃"\\\n ', max_size=4)
numbers = st.one_of(
    st.integers(-(2**53), 2**53), st.integers(-(10**6), 10**6).map(lambda number: number / 128)
)
leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 0}]),
    st.tuples(st.integers(-500, 500), st.integers(0, 800)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 2), st.integers(0, 3)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    ),
    st.lists(st.one_of(letters, numbers, st.booleans(), st.none()), min_size=1, max_size=3)
    .map(lambda values: {"enum": values}),
    letters.map(lambda value: {"const": value}),
)  # fmt: skip


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def to_object(parts: tuple[dict[str, Any], int]) -> dict[str, Any]:
        properties, num_required = parts
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        }

    return st.one_of(
        st.tuples(st.dictionaries(letters, inner, max_size=3), st.integers(0, 3)).map(to_object),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 1)).map(
            lambda parts: {
                "type": "array",
                "items": parts[0],
                "minItems": parts[1],
                "maxItems": parts[1] + parts[2],
            }
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    )


schemas = st.recursive(leaves, _larger, max_leaves=4)


def same(a: Any, b: Any) -> bool:
    """JSON's equality, in which 1.0 is 1 but true is not."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def allows(schema: dict[str, Any], value: Any) -> bool:
    """Whether ``value`` is valid: a checker of its own for the schemas drawn here."""
    if "anyOf" in schema:
        return any(allows(option, value) for option in schema["anyOf"])
    if "const" in schema:
        return same(schema["const"], value)
    if "enum" in schema:
        return any(same(option, value) for option in schema["enum"])
    kind = schema["type"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "null":
        return value is None
    if kind == "integer":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        low, high = schema.get("minLength", 0), schema["maxLength"]
        return isinstance(value, str) and low <= len(value) <= high
    if kind == "array":
        fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(allows(schema["items"], item) for item in value)
    assert kind == "object"
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= value.keys() <= schema["properties"].keys()
        and all(allows(schema["properties"][name], item) for name, item in value.items())
    )


def test_the_checker_of_these_tests_can_say_no():
    assert not allows({"type": "integer", "minimum": 0, "maximum": 3}, True)
    assert not allows({"enum": [1]}, True) and allows({"enum": [1.0]}, 1)
    assert not allows({"anyOf": [{"const": "a"}, {"type": "null"}]}, "b")
    assert not allows({"type": "array", "items": {"const": "a"}, "minItems": 1, "maxItems": 2}, [])
    closed = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    assert allows(closed, {"a": None})
    assert not allows(closed, {}) and not allows(closed, {"a": None, "b": None})


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=st.lists(schemas, min_size=10, max_size=10), seed=st.integers(0, 2**32))
def test_any_schema_gives_json_that_it_allows(engine, drawn, seed):
    """200 schemas: one sample and several, with nothing cached and with a cached prefix."""
    engine.cache.clear()
    shared = random.Random(seed).sample(range(3, 1000), 40)
    prompts = [[*shared, 100 + i] for i in range(len(drawn))]
    params = [
        SamplingParams(json_schema=schema, n=1 + i % 2, seed=seed + i, max_new_tokens=1000)
        for i, schema in enumerate(drawn)
    ]
    cold = engine.generate(prompts[:5], params[:5])
    warm = engine.generate(prompts[5:], params[5:])
    assert all(result.cached_tokens >= 40 for result in warm)
    for schema, param, result in zip(drawn, params, cold + warm):
        assert len(result.samples) == param.n
        for one in result.samples:
            assert one.finish_reason == "stop"
            assert allows(schema, json.loads(one.text)), (schema, one.text)


def test_true_allows_any_json_and_the_schema_may_be_text(engine):
    for schema in (True, "true", {}):
        for seed in range(3):
            result = engine.generate(PROMPT, json_schema=schema, seed=seed, max_new_tokens=60)
            if result.samples[0].finish_reason == "stop":
                json.loads(result.text)
    text = json.dumps({"enum": ["yes", "no"]})
    assert engine.generate(PROMPT, json_schema=text).text in ('"yes"', '"no"')


def test_a_pydantic_model_is_a_schema(engine):
    import pydantic

    class Answer(pydantic.BaseModel):
        known: bool
        year: int = pydantic.Field(ge=1000, le=2100)

    for seed in range(3):
        text = engine.generate(PROMPT, json_schema=Answer, seed=seed).text
        assert 1000 <= Answer.model_validate_json(text).year <= 2100


def test_any_run_of_white_space_is_a_schemas_own_choice(engine):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    texts = {engine.generate(PROMPT, json_schema=schema, seed=seed).text for seed in range(20)}
    assert texts <= {
        f'{{{a}"a"{b}:{c}null{d}}}' for a in ("", " ") for b in ("", " ")
        for c in ("", " ") for d in ("", " ")
    }  # fmt: skip
    assert len(texts) > 1
    schema["x-guidance"] = {"whitespace_pattern": ""}
    assert engine.generate(PROMPT, json_schema=schema).text == '{"a":null}'


# regex and grammar

REGEXES = [
    r"[a-c]{3,9}",
    r"\d{4}-\d{2}-\d{2}",
    r"(yes|no)( (really|maybe)){0,2}",
    r"[^\x00-\x7f]{1,4}",
    r"(the|then|other)+x",
    r"x?",
    r"",
    r"(?s:.){5}",
]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_whole_text_matches_the_regex(engine, regex, temperature):
    result = engine.generate(
        PROMPT, regex=regex, n=4, seed=5, temperature=temperature, max_new_tokens=200
    )
    for one in result.samples:
        if one.finish_reason == "stop":
            assert re.fullmatch(regex, one.text), one.text
        else:
            assert "+" in regex  # only a text without bound may be cut
    assert any(one.finish_reason == "stop" for one in result.samples)


def test_an_end_token_comes_only_where_the_text_is_whole(engine):
    """The model is pushed towards its end token, and away from it."""
    eager = engine.generate(PROMPT, regex="ab{2,5}", logit_bias={2: 100.0})
    assert (eager.text, eager.samples[0].stop_reason) == ("abb", 2)
    late = engine.generate(PROMPT, regex="ab{2,5}", logit_bias={2: -100.0})
    assert (late.text, late.samples[0].stop_reason) == ("abbbbb", None)
    assert late.samples[0].finish_reason == "stop"
    cut = engine.generate(PROMPT, regex="ab{2,5}", logit_bias={2: -100.0}, max_new_tokens=3)
    assert (cut.text, cut.samples[0].finish_reason) == ("abb", "length")
    even = engine.generate(PROMPT, regex="abc", max_new_tokens=3).samples[0]
    assert (even.text, even.finish_reason) == ("abc", "stop")
    stopped = engine.generate(PROMPT, regex="abc", stop="b").samples[0]
    assert (stopped.text, stopped.stop_reason) == ("a", "b")


def test_a_grammar_is_followed(engine):
    grammar = """
        start: sum
        sum: number (" + " number)~1..3
        number: /[1-9][0-9]?/ | "(" sum ")"
    """
    for seed in range(5):
        one = engine.generate(PROMPT, grammar=grammar, seed=seed, max_new_tokens=300).samples[0]
        if one.finish_reason == "stop":
            assert re.fullmatch(r"[0-9()+ ]+", one.text)
            assert one.text.count("(") == one.text.count(")")
            eval(compile(one.text, "sum", "eval"), {})  # noqa: S307 - digits, + and () alone
    assert engine.generate(PROMPT, grammar='start: "yes" | "no"').text in ("yes", "no")


def test_constraints_come_after_all_that_changes_logits(engine):
    def want_x(input_ids, logits):
        logits = torch.full_like(logits, -1e6)
        logits[:, engine.tokenizer.convert_tokens_to_ids("x")] = 1e6
        return logits

    result = engine.generate(PROMPT, regex="[a-z]{2}y", logits_processors=[want_x], temperature=0)
    assert result.text == "xxy"


def test_logprobs_are_of_the_models_own_distribution(engine):
    plain = engine.generate(PROMPT, temperature=0, max_new_tokens=1, logprobs=5).samples[0]
    guided = engine.generate(PROMPT, temperature=0, regex="q", logprobs=5).samples[0]
    own = guided.token_ids[0]
    shared = {key: value for key, value in guided.logprobs[0].items() if key != own}
    assert shared == pytest.approx(plain.logprobs[0])
    assert guided.logprobs[0][own] == pytest.approx(guided.cumulative_logprob)


# what else runs

SCHEMA = {"type": "array", "items": {"enum": ["a", "bc", 12]}, "minItems": 5, "maxItems": 9}


def tokens_of(result):
    return [one.token_ids for one in result.samples]


def test_a_batch_changes_neither_constrained_samples_nor_their_neighbours(engine):
    params = [
        SamplingParams(seed=1, max_new_tokens=40, ignore_eos=True),
        SamplingParams(seed=2, n=3, json_schema=SCHEMA),
        SamplingParams(temperature=0, max_new_tokens=40),
        SamplingParams(seed=3, n=2, regex=r"\w{20}"),
        SamplingParams(seed=4, n=2, max_new_tokens=40, top_p=0.9, repetition_penalty=1.2),
    ]
    prompts = [[*PROMPT[:20], 300 + i] for i in range(len(params))]
    alone = [tokens_of(engine.generate(p, q)) for p, q in zip(prompts, params)]
    assert [tokens_of(r) for r in engine.generate(prompts, params)] == alone
    engine.cache.clear()
    assert [tokens_of(r) for r in engine.generate(prompts, params)] == alone
    assert len({tuple(ids) for ids in alone[1]}) == 3


def test_neighbours_in_a_batch_of_logits_are_not_touched(byte_tokenizer):
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(regex="[a-f]{4}")
    guide = make_guide(params, byte_tokenizer, vocab_size=1000, eos_token_ids=[2])
    plain = [SamplerRow(SamplingParams(seed=7), 7, i, [5], []) for i in range(6)]
    mixed = [
        dataclasses.replace(row, params=params, guide=guide) if i % 2 else row
        for i, row in enumerate(plain)
    ]
    before = logits.clone()
    expected, got = sample(logits, plain), sample(logits, mixed)
    assert torch.equal(logits, before)
    assert got[::2] == expected[::2]
    letters = set(byte_tokenizer.convert_tokens_to_ids(list("abcdef")))
    assert {one.token_id for one in got[1::2]} <= letters


def test_preemption_does_not_disturb_it(tiny_model, byte_tokenizer, engine):
    model = tiny_model(max_position_embeddings=2048)
    params = [SamplingParams(seed=i, json_schema=SCHEMA) for i in range(6)]
    prompts = [[*PROMPT, 300 + i] for i in range(6)]
    expected = [tokens_of(r) for r in engine.generate(prompts, params)]
    page_bytes = 16 * engine.cache.stats().bytes_per_token
    with Engine(model, byte_tokenizer, kv=KVConfig(capacity=14 * page_bytes)) as small:
        assert [tokens_of(r) for r in small.generate(prompts, params)] == expected
        assert small.stats().preemptions > 0


def test_masks_are_ready_before_the_logits_are(engine, monkeypatch):
    """The model waits here until the mask of its step is computed: by another thread."""
    params = SamplingParams(regex="[a-f]{6}", seed=4)
    expected = tokens_of(engine.generate(PROMPT, params))
    computed, threads = threading.Event(), []
    compute, forward = Guide._compute, engine.core.runner.forward

    def note(guide, mask):
        compute(guide, mask)
        threads.append(threading.current_thread().name)
        computed.set()

    def run(batch, cache):
        assert computed.wait(60)
        computed.clear()
        return forward(batch, cache)

    monkeypatch.setattr(Guide, "_compute", note)
    monkeypatch.setattr(engine.core.runner, "forward", run)
    assert tokens_of(engine.generate(PROMPT, params)) == expected
    assert len(threads) == len(expected[0])
    assert all(name.startswith("radixkv-guides") for name in threads)


def test_what_fails_ahead_fails_the_request_that_it_is_of(engine, monkeypatch):
    compute = Guide._compute

    def fail(guide, mask):
        if guide._matcher.is_accepting():
            raise RuntimeError("out of memory")
        compute(guide, mask)

    params = [SamplingParams(regex=regex, seed=4, ignore_eos=False) for regex in ("ab?", "[cd]{3}")]
    expected = tokens_of(engine.generate(PROMPT, params[1]))
    monkeypatch.setattr(Guide, "_compute", fail)
    requests = [engine.submit(PROMPT, one) for one in params]
    while not all(request.done for request in requests):
        engine.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        requests[0].result()
    monkeypatch.undo()
    assert tokens_of(requests[1].result()) == expected


def test_streams_and_branches_follow_it(engine):
    deltas = list(engine.stream(PROMPT, json_schema=SCHEMA, seed=9))
    assert allows(SCHEMA, json.loads("".join(delta.text for delta in deltas)))
    with engine.open(PROMPT) as branch:
        first = branch.generate(regex="[0-9]{3}", seed=1)
        second = branch.generate(regex="[a-c]{3}", seed=1)
        assert re.fullmatch("[0-9]{3}", first.text) and re.fullmatch("[a-c]{3}", second.text)
        new_ids = first.samples[0].token_ids + second.samples[0].token_ids
        assert branch.token_ids == PROMPT + new_ids
        with pytest.raises(ValueError, match="regex: expected one that can be followed"):
            branch.generate(regex="a(")
        assert branch.generate(regex="z").text == "z"


# guides by themselves


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_forks_go_on_apart(byte_tokenizer, head, tail):
    """Oracle: one guide that saw the same letters from the beginning."""

    def fresh():
        params = SamplingParams(regex="[ab]*c?[bc]*")
        return make_guide(params, byte_tokenizer, vocab_size=1000, eos_token_ids=[2])

    def push(guide, letters):
        taken = []
        for token_id in byte_tokenizer.convert_tokens_to_ids(letters):
            if allowed_tokens([guide], 1000, torch.device("cpu"))[0, token_id]:
                guide.advance(token_id)
                taken.append(token_id)
        return taken

    def state(guide):
        return allowed_tokens([guide], 1000, torch.device("cpu"))[0].nonzero()[:, 0].tolist()

    guide = fresh()
    taken = push(guide, head)
    compute_ahead([guide])
    other = guide.fork()
    before = state(guide)
    more = push(other, tail)
    assert state(guide) == before
    again = fresh()
    for token_id in taken + more:
        again.advance(token_id)
    assert state(again) == state(other)
    assert again.finished == other.finished


def test_a_mask_covers_just_the_row_of_logits(byte_tokenizer):
    """Whatever the size, with no entry past it, and none beyond the tokenizer's own."""
    for vocab_size in (264, 265, 288, 289, 1000):
        params = SamplingParams(regex=r"(?s:.)*")
        guide = make_guide(params, byte_tokenizer, vocab_size=vocab_size, eos_token_ids=[2])
        mask = allowed_tokens([guide, guide.fork()], vocab_size, torch.device("cpu"))
        assert mask.shape == (2, vocab_size)
        assert torch.equal(mask[0], mask[1])
        assert mask[0, 2] and not mask[0, :2].any()
        assert not mask[0, 264:].any()


def test_a_token_that_cannot_follow_is_an_error(byte_tokenizer):
    params = SamplingParams(regex="ab")
    guide = make_guide(params, byte_tokenizer, vocab_size=1000, eos_token_ids=[2])
    with pytest.raises(RadixKVError, match=r"^constrained output: token 50 cannot follow"):
        guide.advance(50)
    again = make_guide(params, byte_tokenizer, vocab_size=1000, eos_token_ids=[2])
    again.advance(byte_tokenizer.convert_tokens_to_ids("a"))


# bad input


@pytest.mark.parametrize(
    ("fields", "kind", "says"),
    [
        (dict(regex=3), TypeError, "SamplingParams.regex: expected a str, got 3 of type int"),
        (dict(grammar=b"x"), TypeError, "SamplingParams.grammar: expected a str"),
        (dict(json_schema=3), TypeError, "SamplingParams.json_schema: expected a JSON schema: "),
        (dict(json_schema=[]), TypeError, "SamplingParams.json_schema: expected a JSON schema: "),
        (dict(json_schema=False), ValueError, "SamplingParams.json_schema: expected a JSON schema"),
        (
            dict(json_schema={"properties": {"a": {"enum": [2**53 + 1]}}}),
            ValueError,
            "SamplingParams.json_schema: expected a JSON schema",
        ),
        (dict(json_schema="[]"), ValueError, "SamplingParams.json_schema: expected a JSON schema"),
        (dict(json_schema="{no"), ValueError, "SamplingParams.json_schema: expected a JSON schema"),
        (dict(json_schema={"a": {1}}), TypeError, "SamplingParams.json_schema: expected a JSON"),
        (
            dict(regex="a", grammar="b"),
            ValueError,
            "SamplingParams: expected at most one of json_schema, regex, grammar, got regex and",
        ),
        (dict(regex="a", ignore_eos=True), ValueError, "SamplingParams.ignore_eos: expected False"),
    ],
)
def test_params_refuse_what_is_no_constraint(fields, kind, says):
    with pytest.raises(kind, match=f"^{re.escape(says)}"):
        SamplingParams(**fields)


def test_params_take_a_copy_of_the_schema():
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    params = SamplingParams(json_schema=schema)
    schema["properties"]["a"]["type"] = "string"
    assert params.json_schema["properties"]["a"]["type"] == "null"
    assert dataclasses.replace(params, seed=1).json_schema == params.json_schema
    assert SamplingParams(json_schema=True).constraint == "json_schema"
    assert SamplingParams().constraint is None


def test_beams_have_no_constraints():
    with pytest.raises(TypeError):
        BeamParams(regex="a")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(regex="a("), "SamplingParams.regex: expected one that can be followed, got 'a('"),
        (dict(regex="(?=a)b"), "SamplingParams.regex: expected one that can be followed"),
        (dict(grammar="start: foo"), "SamplingParams.grammar: expected one that can be followed"),
        (dict(json_schema={"type": "strin"}), "llguidance says: Invalid type: strin"),
        (dict(json_schema={"not": {"type": "null"}}), "llguidance says: Unimplemented keys"),
        (dict(regex="[a&&b]x"), "llguidance says: no text follows it"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_any_work(engine, fields, says):
    before = engine.stats()
    for call in (engine.generate, engine.stream, engine.submit):
        with pytest.raises(ValueError, match=re.escape(says)):
            call(PROMPT, **fields)
    with pytest.raises(ValueError, match=re.escape(says)):
        engine.generate([PROMPT, PROMPT], [SamplingParams(), SamplingParams(**fields)])
    after = engine.stats()
    assert (after.steps, after.requests_live) == (before.steps, 0)
    assert after.cache == before.cache


def test_an_engine_that_cannot_constrain_says_why(tiny_model, byte_tokenizer, monkeypatch):
    model = tiny_model()
    capacity = KVConfig(capacity="1MiB")
    with (
        Engine(model, kv=capacity) as bare,
        pytest.raises(ValueError, match="regex: expected an engine with a tokenizer, got none"),
    ):
        bare.generate(PROMPT, regex="a")
    small = tiny_model(vocab_size=200)
    with (
        Engine(small, byte_tokenizer, kv=capacity) as engine,
        pytest.raises(ValueError, match=r"expected a fast tokenizer whose vocabulary fits the mod"),
    ):
        engine.generate([5, 6], regex="a")
    endless = tiny_model(fresh=True)
    endless.generation_config.eos_token_id = endless.config.eos_token_id = None
    without_end = copy.deepcopy(byte_tokenizer)
    without_end.eos_token = None
    with (
        Engine(endless, without_end, kv=capacity) as engine,
        pytest.raises(ValueError, match="expected a model with an end token, got none"),
    ):
        engine.generate(PROMPT, regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with (
        Engine(model, byte_tokenizer, kv=capacity) as engine,
        pytest.raises(RadixKVError, match=r"run: pip install 'radixkv\[guided\]'"),
    ):
        engine.generate(PROMPT, regex="a")
