"""Masks, RoPE, twins, and every kind of model: served rightly or refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils

from fuzz import models
from radixkv import Engine, KVConfig
from radixkv.models.borders import borders_of
from radixkv.models.masks import NotAWindowError, places_around, window_of
from radixkv.models.positions import PositionWatch, config_ints, named_limit
from radixkv.models.twin import twin_of

# Masks


@settings(max_examples=150)
@given(limit=st.integers(2, 5000), window=st.integers(1, 6000), near=st.booleans())
def test_a_window_is_found_wherever_it_begins(limit, window, near):
    places = places_around([window] if near else [], limit)
    found = window_of(masking_utils.sliding_window_causal_mask_function(window), places)
    assert found == (None if window >= limit else window)
    assert window_of(masking_utils.causal_mask_function, places) is None


@settings(max_examples=100)
@given(limit=st.integers(20, 5000), chunk=st.integers(2, 4999))
def test_chunks_are_told_from_windows_wherever_they_end(limit, chunk):
    left = torch.zeros(1, dtype=torch.int64)
    sees = masking_utils.chunked_causal_mask_function(chunk, left)
    places = places_around([], limit)
    if chunk >= limit:
        assert window_of(sees, places) is None
    else:
        with pytest.raises(NotAWindowError, match=r"chunk|window"):
            window_of(sees, places)


@settings(max_examples=150)
@given(data=st.data(), size=st.integers(2, 40))
def test_a_mask_is_a_window_if_and_only_if_every_pair_says_so(data, size):
    """Every place is asked where the limit is small: any single pair that is off is seen."""
    window = data.draw(st.integers(1, size))
    rows = torch.arange(size)
    back = rows[:, None] - rows[None]
    shown = (back >= 0) & (back < window)
    query, key = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    is_whole = data.draw(st.booleans())
    if not is_whole:
        shown[query, key] ^= True
    places = torch.arange(size)

    def ask() -> int | None:
        return window_of(lambda batch, head, q, k: shown[q, k], places)

    fits = [w for w in range(1, size + 1) if torch.equal(shown, (back >= 0) & (back < w))]
    if fits:
        assert (ask() or size) == fits[0]
    else:
        with pytest.raises(NotAWindowError):
            ask()


def test_a_mask_that_cannot_be_asked_is_no_window():
    sees = masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.padding_mask_function(torch.ones(1, 8, dtype=torch.bool)),
    )
    with pytest.raises(NotAWindowError, match="far places"):
        window_of(sees, places_around([], 100))


# Positions


class Turning(torch.nn.Module):
    """RoPE whose numbers change beyond a length, also for the places before it."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self.turn = turn
        self.register_buffer("kept", torch.zeros(1), persistent=False)

    def forward(self, x, position_ids):
        self.kept.copy_(position_ids.max()[None].float())  # as longrope does
        longest = int(position_ids.max()) + 1
        angles = position_ids[..., None] * torch.tensor([1.0, 0.1, 0.01])
        angles = angles * (1.5 if longest > self.turn else 1.0)
        return angles.cos(), angles.sin()


class Turned(torch.nn.Module):
    def __init__(self, turn: int) -> None:
        super().__init__()
        self.rope = Turning(turn)

    def forward(self, position_ids):
        return self.rope(torch.zeros(1), position_ids)


@settings(max_examples=60)
@given(turn=st.integers(4, 3000), limit=st.integers(16, 3000), known=st.booleans())
def test_the_length_at_which_rope_turns_is_found(turn, limit, known):
    model, positions = Turned(turn), torch.arange(3, 11)[None]
    if turn < 11:  # the run itself lies beyond it; what is asked afterwards does not
        turn = model.rope.turn = 11
    watch = PositionWatch(positions)
    with watch.watching(model):
        model(positions)
    kept = model.rope.kept.clone()
    assert watch.felt_from(limit, [turn] if known else []) == min(turn, limit)
    assert torch.equal(model.rope.kept, kept)
    assert not model.rope._forward_hooks


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("look", ["embedding", "getitem", "tuple", "index_select", "gather"])
def test_a_table_of_positions_ends_them(look, offset):
    table = torch.randn(77, 4)

    def forward(ids: torch.Tensor) -> Any:
        ids = ids + offset
        if look == "embedding":
            return torch.nn.functional.embedding(ids, table)
        if look == "getitem":
            return table[ids]
        if look == "tuple":
            return table[ids, :]
        if look == "index_select":
            return table.index_select(0, ids[0])
        return torch.gather(table[None], 1, ids[..., None].expand(-1, -1, 4))

    positions = torch.arange(3, 11)[None]
    watch = PositionWatch(positions)
    with watch.watching(torch.nn.Module()):
        forward(positions)
        table[torch.tensor([5, 1, 7, 3, 2, 4, 6, 0])]  # ids of something else
        table[torch.arange(8)]
    assert watch.table_rows == 77 - offset


def test_every_whole_number_of_a_config_is_read():
    config = tf.LlamaConfig(vocab_size=100, hidden_size=64, num_attention_heads=4)
    config.reach = [3, 40, [7]]
    config.rope_parameters = {"kind": {"rope_theta": 1e4, "deep": {"far": 31.0}}, "half": 0.5}
    config.nothing = (True, 1, 0, -5, math.inf, math.nan, None, "9")
    found = config_ints(config)
    expected = {
        "reach[1]": 40,
        "reach[2][0]": 7,
        "rope_parameters.kind.deep.far": 31,
        "rope_parameters.kind.rope_theta": 10000,
        "hidden_size": 64,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert not [name for name in found if name.startswith("nothing")]
    assert borders_of(config, 41).get("reach[1]") == 40
    assert "reach[1]" not in borders_of(config, 40)


def test_the_smallest_limit_of_any_kind_of_layer_is_named():
    longrope = models._rope("longrope", {}, 8)
    config = tf.LlamaConfig(max_position_embeddings=256)

    def limit(rope: Any) -> int | None:
        config.rope_parameters = rope
        holder = torch.nn.Module()
        holder.config = config  # type: ignore[assignment]
        return named_limit(holder)

    assert limit({"rope_type": "default"}) == 256
    assert limit(longrope) == 32
    assert limit({"type": "dynamic", "original_max_position_embeddings": 40}) == 40
    assert limit({"full": {"rope_type": "default"}, "sliding": longrope}) == 32
    assert limit({"a": {**longrope, "original_max_position_embeddings": 48}, "b": longrope}) == 32


# Twins


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Llama", {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}),
        ("Mistral", {"sliding_window": 4096}),
        ("Gemma3Text", {}),
        ("Qwen3Moe", {}),
        ("GptOss", {}),
        ("Phi3", {}),
    ],
)
def test_a_twin_of_a_large_model_is_small_and_has_its_borders_near(name, fields):
    config = getattr(tf, f"{name}Config")(**fields)
    kind = getattr(tf, f"{name}ForCausalLM".replace("Gemma3Text", "Gemma3"))
    state = torch.get_rng_state()
    twin = twin_of(kind, config, config.max_position_embeddings, "eager")
    assert torch.equal(torch.get_rng_state(), state)
    assert type(twin) is kind
    assert sum(p.numel() for p in twin.parameters()) < 3e7
    window = getattr(config, "sliding_window", None)
    if window:
        assert 4 <= twin.config.sliding_window <= 256
    assert set(getattr(twin.config, "layer_types", None) or ()) == set(
        getattr(config, "layer_types", None) or ()
    )
    # Factors of norms are near those of a new model: with others logits would say nothing.
    new = dict(kind(twin.config).named_parameters())
    for name, parameter in twin.named_parameters():
        if parameter.dim() == 1 and "norm" in name:
            assert (parameter - new[name]).abs().max() < 0.5, name


# Models of every kind; all types in all variants: python -m fuzz.models

SERVED = [
    ("afmoe", "past"),
    ("cohere2", "layers"),
    ("ctrl", "plain"),
    ("deepseek_v3", "plain"),
    ("deepseek_v3", "yarn"),
    ("exaone4", "past"),
    ("gemma2", "small"),
    ("gemma2", "past"),
    ("gemma3_text", "layers"),
    ("gemma3_text", "dynamic"),
    ("gemma3_text", "past"),
    ("gpt2", "plain"),
    ("gpt_oss", "past"),
    ("gptj", "plain"),
    ("llama", "plain"),
    ("llama", "dynamic"),
    ("llama", "longrope"),
    ("llama", "yarn"),
    ("ministral3", "plain"),
    ("mistral", "small"),
    ("mistral", "past"),
    ("modernbert-decoder", "past"),
    ("bert", "decoder"),
    ("opt", "plain"),
    ("phi3", "longrope"),
    ("phimoe", "past"),
    ("qwen3", "layers"),
    ("whisper", "plain"),
]
REFUSED = [
    ("bart", "plain", "takes no heed of position_ids"),
    ("bert", "plain", "not causal"),
    ("bloom", "plain", "ALiBi"),
    ("deepseek_v32", "past", "indexed or sparse"),
    ("diffllama", "plain", "more than once"),
    ("doge", "past", "makes itself"),
    ("hrm_text", "plain", "more than once"),
    ("llama4_text", "past", "chunked attention, in chunks of"),
    ("lfm3", "plain", "keep a state"),
    ("roberta", "decoder", "does not number its tokens"),
]


@pytest.mark.parametrize(("model_type", "variant"), SERVED)
def test_a_model_of_each_kind_gives_its_own_log_probabilities(model_type, variant):
    outcome = models.try_type(model_type, variant)
    assert outcome is not None
    assert outcome.kind == "served", outcome.why


@pytest.mark.parametrize(("model_type", "variant", "why"), REFUSED)
def test_a_model_of_each_kind_that_is_not_served_is_refused_for_what_it_is(
    model_type, variant, why
):
    outcome = models.try_type(model_type, variant)
    assert outcome is not None
    assert outcome.kind == "refused"
    assert why in outcome.why


def test_the_sweep_sees_a_model_that_is_served_wrongly(monkeypatch):
    """A mask's window not served, as before: the sweep must say so."""
    from radixkv.models import probe

    monkeypatch.setattr(probe, "windows_of", lambda model, seen, places: dict.fromkeys(seen, None))
    monkeypatch.setattr("radixkv.models.runner.try_borders", lambda *args: None)
    outcome = models.try_type("phimoe", "past")
    assert outcome is not None
    assert outcome.kind == "fault"
    assert "log-probability off" in outcome.why


def test_a_state_that_was_tried_is_not_tried_again(monkeypatch):
    from radixkv.models import borders

    runs: list[int] = []
    real = borders.try_past_borders
    monkeypatch.setattr(
        borders, "try_past_borders", lambda *args: (runs.append(args[1]), real(*args))
    )
    model = models.tiny_model(models.tiny_config("llama"))
    kv = KVConfig(dtype="model", page_size=4, capacity="1MiB")
    for _ in range(2):
        Engine(model, kv=kv).close()
    assert len(runs) == 1
    model.config.rms_norm_eps = 1e-4
    Engine(model, kv=kv).close()
    assert len(runs) == 2
