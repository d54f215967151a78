"""Names and values of options: what is not ours is named with what is, what is clear is taken."""

from __future__ import annotations

import dataclasses
import inspect
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixkv import BeamParams, Engine, KVConfig, SamplingParams, UnsupportedModelError
from radixkv.config import parse_bytes
from radixkv.errors import UnknownOptionError
from radixkv.models import checkpoint as checkpoints
from radixkv.names import (
    BEAM_MEANINGS,
    ENGINE_MEANINGS,
    KV_MEANINGS,
    SAMPLING_MEANINGS,
    snake_case,
)

KV = KVConfig(dtype="model", page_size=4, capacity="1MiB")
KINDS = {SamplingParams: SAMPLING_MEANINGS, BeamParams: BEAM_MEANINGS, KVConfig: KV_MEANINGS}


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Iterator[Engine]:
    with Engine(tiny_model(), kv=KV) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tiny_model: Any, tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(path)
    return path


def names_of(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


# Names


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (SamplingParams, "max_tokens", "max_new_tokens"),
        (SamplingParams, "max_completion_tokens", "max_new_tokens"),
        (SamplingParams, "n_predict", "max_new_tokens"),
        (SamplingParams, "max_length", "max_new_tokens"),
        (SamplingParams, "maxNewTokens", "max_new_tokens"),
        (SamplingParams, "num_return_sequences", "is n"),
        (SamplingParams, "best_of", "is n"),
        (SamplingParams, "num_beams", "BeamParams(width=...)"),
        (SamplingParams, "do_sample", "temperature=0"),
        (SamplingParams, "stop_strings", "is stop"),
        (SamplingParams, "until", "is stop"),
        (SamplingParams, "eos_token_id", "stop_token_ids"),
        (SamplingParams, "repeat_penalty", "repetition_penalty"),
        (SamplingParams, "random_seed", "is seed"),
        (SamplingParams, "guided_json", "json_schema"),
        (SamplingParams, "top_logprobs", "logprobs"),
        (SamplingParams, "timeout", "timeout_s"),
        (SamplingParams, "temprature", "did you mean temperature?"),
        (SamplingParams, "topP", "did you mean top_p?"),
        (SamplingParams, "stops", "did you mean stop?"),
        (BeamParams, "num_beams", "is width"),
        (BeamParams, "num_return_sequences", "num_return"),
        (BeamParams, "temperature", "SamplingParams"),
        (BeamParams, "lenght_penalty", "did you mean length_penalty?"),
        (KVConfig, "block_size", "page_size"),
        (KVConfig, "gpu_memory_utilization", "capacity"),
        (KVConfig, "kv_cache_dtype", "is dtype"),
        (KVConfig, "num_gpu_blocks_override", "capacity"),
        (KVConfig, "eviction_policy", "eviction"),
        (KVConfig, "capcity", "did you mean capacity?"),
    ],
)
def test_an_unknown_field_is_refused_with_the_one_that_is_meant(
    kind: type, name: str, meant: str
) -> None:
    with pytest.raises(UnknownOptionError) as refused:
        kind(**{name: 1})
    said = str(refused.value)
    assert said.startswith(f"{kind.__name__}: expected options among {names_of(kind)[0]}, ")
    assert f"got {name!r}; " in said
    assert meant in said.partition("; ")[2]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_field_with_a_slip_of_the_pen_is_recognized(kind: type, data: st.DataObject) -> None:
    ours = names_of(kind)
    name = data.draw(st.sampled_from([name for name in ours if len(name) > 5]))
    at = data.draw(st.integers(0, len(name) - 2))
    letter = data.draw(st.sampled_from(string.ascii_lowercase))
    slips = [name[:at] + name[at + 1 :], name[:at] + letter + name[at:]]
    slips += [name[:at] + name[at + 1] + name[at] + name[at + 2 :]]
    slip = data.draw(st.sampled_from(slips))
    if slip in ours:
        return
    with pytest.raises(UnknownOptionError) as refused:
        kind(**{slip: 1})
    near = [other for other in ours if other in str(refused.value).partition("; ")[2]]
    assert name in near or near, refused.value


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_in_a_table_is_a_field_and_each_is_said_whole(kind: type) -> None:
    for name in KINDS[kind]:
        assert name not in names_of(kind)
        assert name == snake_case(name)
        with pytest.raises(UnknownOptionError, match=name):
            kind(**{name: None})


def test_a_refusal_is_a_type_error_and_a_value_error_and_names_every_name() -> None:
    for error in (TypeError, ValueError):
        with pytest.raises(error, match=r"'max_tokens', 'foo'; max_tokens is max_new"):
            SamplingParams(max_tokens=1, foo=2)
    with pytest.raises(TypeError, match=r"KVConfig: expected options by their names .*'int8'"):
        KVConfig("int8")
    signature = inspect.signature(SamplingParams)
    assert list(signature.parameters) == names_of(SamplingParams)


@pytest.mark.parametrize("call", ["generate", "stream", "submit"])
def test_every_call_refuses_an_unknown_option_with_what_is_meant(engine: Engine, call: str) -> None:
    with pytest.raises(UnknownOptionError, match="max_tokens is max_new_tokens here"):
        getattr(engine, call)([5, 6], max_tokens=3)
    with pytest.raises(UnknownOptionError, match="max_tokens is max_new_tokens here"):
        getattr(engine, call)([5, 6], SamplingParams(), max_tokens=3)
    with engine.open([5, 6]) as branch, pytest.raises(UnknownOptionError, match="BeamParams"):
        branch.generate(num_beams=2)
    with pytest.raises(TypeError, match=r"got \{'n': 2\} of type dict; use SamplingParams\(\*\*"):
        getattr(engine, call)([5, 6], {"n": 2})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("capacity", "kv=KVConfig(capacity=...)"),
        ("page_size", "kv=KVConfig(page_size=...)"),
        ("gpu_memory_utilization", "capacity, in bytes, of kv=KVConfig(...)"),
        ("max_new_tokens", "generate(prompt, max_new_tokens=...)"),
        ("kv_config", "kv=KVConfig(...)"),
        ("max_num_batched_tokens", "max_batch_tokens"),
        ("bakend", "did you mean backend?"),
    ],
)
def test_an_engine_refuses_an_option_with_where_it_belongs(
    tiny_model: Any, folder: Path, name: str, meant: str
) -> None:
    with pytest.raises(UnknownOptionError) as refused:
        Engine(tiny_model(), **{name: 1})
    assert meant in str(refused.value)
    with pytest.raises(UnknownOptionError) as refused:
        Engine.from_pretrained(folder, kv=KV, **{name: 1})
    assert meant in str(refused.value)
    assert "Engine.from_pretrained: expected options" in str(refused.value)


def test_what_transformers_takes_goes_there(folder: Path) -> None:
    with Engine.from_pretrained(folder, kv=KV, num_hidden_layers=1) as engine:
        assert engine.model.config.num_hidden_layers == 1
    with Engine.from_pretrained(folder, kv=KV, torch_dtype=torch.bfloat16, device="cpu") as engine:
        assert engine.model.dtype == torch.bfloat16
    with pytest.raises(UnknownOptionError, match="'nonsense'; leave it out"):
        Engine.from_pretrained(folder, kv=KV, nonsense=1)


def test_no_field_of_a_causal_lms_config_is_kept_from_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kept = set(checkpoints.ENGINE_OPTIONS) - checkpoints.SHARED_NAMES
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if name in CONFIG_MAPPING:
            assert not kept & set(inspect.signature(CONFIG_MAPPING[name].__init__).parameters), name


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"name_or_path": "/none"}, ValueError, "'/none'; there is no such folder"),
        ({"name_or_path": "./none"}, ValueError, "there is no such folder"),
        ({"name_or_path": "~/none"}, ValueError, "write the home folder out"),
        ({"name_or_path": ""}, ValueError, "expected the folder of a transformers causal LM"),
        ({"name_or_path": None}, TypeError, "got NoneType"),
        ({"name_or_path": b"x"}, TypeError, "got bytes"),
        ({"kv": "int8"}, TypeError, r"use KVConfig\(dtype="),
        ({"dtype": "fp8"}, ValueError, r"of pages: kv=KVConfig\(dtype='fp8'\)"),
        ({"dtype": "int8"}, ValueError, "expected .* floating dtype"),
        ({"dtype": 3}, TypeError, "dtype: expected"),
        ({"device": "cudaa"}, ValueError, "device: expected .* got 'cudaa'"),
        ({"device": "cuda:99"}, ValueError, "torch sees"),
        ({"device": 0}, TypeError, "device: expected"),
        ({"backend": "cuda"}, ValueError, "did you mean 'triton'"),
        ({"max_batch_tokens": 0}, ValueError, "max_batch_tokens: expected an integer >= 1"),
        ({"policy": 3}, TypeError, "policy: expected a function"),
        ({"output_loading_info": True}, UnknownOptionError, "load the model with transformers"),
    ],
)
def test_a_bad_argument_is_named_before_any_model_is_loaded(
    folder: Path, monkeypatch: Any, arguments: dict[str, Any], error: type, says: str
) -> None:
    import transformers

    def load(*args: Any, **keywords: Any) -> Any:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(error, match=says):
        Engine.from_pretrained(**{"name_or_path": folder, **arguments})


def test_a_folder_or_file_without_a_model_is_named_with_the_mend(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"no config\.json; save a model there"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"got the file .*; pass {str(folder)!r}"):
        Engine.from_pretrained(folder / "config.json")
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=r"add gguf_file='m\.gguf'"):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"with gguf_file='m\.gguf'"):
        Engine.from_pretrained(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"no config\.json"):
        Engine.from_pretrained(folder, subfolder="none")


def test_a_model_that_is_no_causal_lm_is_unsupported_by_name(tmp_path: Path) -> None:
    import transformers

    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="expected a causal LM, got a model of T5Conf"):
        Engine.from_pretrained(tmp_path)


# Values


@pytest.mark.parametrize(
    ("field", "values", "taken"),
    [
        ("n", [None, np.int64(1), np.array(1)], 1),
        ("temperature", [None, 1, np.float32(1), torch.tensor(1.0)], 1.0),
        ("top_p", [None, 1, np.float64(1.0)], 1.0),
        ("top_k", [None, -1, 0, np.int32(-1)], 0),
        ("min_p", [None, 0], 0.0),
        ("repetition_penalty", [None, 1], 1.0),
        ("presence_penalty", [None], 0.0),
        ("frequency_penalty", [None, 0], 0.0),
        ("stop", [None, [], ()], ()),
        ("stop", ["a", ["a"], ("a",), np.str_("a")], ("a",)),
        ("stop_token_ids", [None, [], np.array([], int)], ()),
        (
            "stop_token_ids",
            [[3, 4], {4, 3}, frozenset((3, 4)), np.array([3, 4]), torch.tensor([3, 4])],
            (3, 4),
        ),
        ("stop_token_ids", [5, np.int64(5), torch.tensor(5)], (5,)),
        ("logits_processors", [None, []], ()),
        ("logit_bias", [None], None),
        ("logit_bias", [{5: 1}, {"5": 1.0}, {np.int64(5): np.float32(1)}], {5: 1.0}),
        ("seed", [None], None),
        ("max_new_tokens", [7, np.int64(7), torch.tensor(7)], 7),
        ("timeout_s", [None], None),
        ("logprobs", [None], None),
    ],
)
def test_values_with_a_clear_meaning_are_taken_as_pythons_own(
    field: str, values: list[Any], taken: Any
) -> None:
    for value in values:
        found = getattr(SamplingParams(**{field: value}), field)
        assert found == taken
        assert type(found) is type(taken)
        if isinstance(taken, tuple):
            assert [type(item) for item in found] == [type(item) for item in taken]


def test_none_is_taken_by_a_beam_search_where_it_is_clear() -> None:
    none = BeamParams(length_penalty=None, early_stopping=None, stop_token_ids=None)
    assert none == BeamParams()


UNCLEAR = [None, -1, -2, "", "x", "1", 1.5, True, np.bool_(True), [], {}, b"x", object(), 1j]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", UNCLEAR, ids=lambda value: repr(value).split(" at ")[0])
def test_every_field_takes_a_value_or_names_field_value_and_range(kind: type, value: Any) -> None:
    for name in names_of(kind):
        try:
            made = kind(**{name: value})
        except (ValueError, TypeError) as error:
            said = str(error)
            assert said.startswith(f"{kind.__name__}.{name}"), said
            assert "expected " in said
            assert ", got " in said
        else:
            assert made == dataclasses.replace(made)


def test_a_choice_of_another_spelling_is_refused_with_ours() -> None:
    for given_, meant in (
        ("INT8", "int8"),
        ("fp8_e4m3", "fp8"),
        ("q4_0", "int4"),
        ("bf16", "model"),
    ):
        with pytest.raises(ValueError, match=f"got {given_!r}; did you mean {meant!r}"):
            KVConfig(dtype=given_)
    with pytest.raises(ValueError, match="did you mean 'lru'"):
        KVConfig(eviction="LRU")
    assert parse_bytes(np.int64(5)) == parse_bytes(torch.tensor(5)) == 5


def test_the_tables_speak_of_options_that_there_are() -> None:
    ours = {*names_of(SamplingParams), *names_of(BeamParams), *names_of(KVConfig)}
    ours |= {*checkpoints.own_options(Engine.__init__), *checkpoints.own_options(Engine.generate)}
    words = {"a", "always", "an", "beam", "engine", "no", "params", "the", "what"}
    for table in (SAMPLING_MEANINGS, BEAM_MEANINGS, KV_MEANINGS, ENGINE_MEANINGS):
        for said in table.values():
            first = re.match(r"is ([a-z_]+)", said)
            assert first is None or first[1] in ours | words, said
