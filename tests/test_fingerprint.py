"""Which model KV is of: named in snapshots, and looked at before every batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from radixkv import Engine, KVConfig, RadixKVError, SnapshotError
from radixkv.models.fingerprint import fingerprint
from radixkv.models.weight_watch import WeightWatch

ROOT = Path(__file__).resolve().parent.parent
KV = KVConfig(dtype="int8", page_size=4, capacity="2MiB")
PROMPT = [5, 9, 14, 200, 31, 77, 8, 3, 19, 500, 2, 44]


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, kv=KV, backend="torch", **options)


def ask(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> tuple[list[int], int, Any]:
    result = engine.generate(prompt, temperature=0, max_new_tokens=5, logprobs=3, **options)
    return result.samples[0].token_ids, result.cached_tokens, result.samples[0].logprobs


def cold(model: Any) -> tuple[list[int], Any]:
    with engine_of(model) as engine:
        ids, cached, logprobs = ask(engine)
    assert cached == 0
    return ids, logprobs


# --- snapshots ---------------------------------------------------------------------------------


@pytest.fixture
def saved(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    path = tmp_path / "cache.rkv"
    with engine_of(tiny_model(fresh=True)) as engine:
        ask(engine)
        engine.cache.save(path)
    return path


def test_the_same_model_loads_and_equals_cold_bit_for_bit(
    tiny_model: Callable[..., Any], saved: Path
) -> None:
    """PER-1, first part."""
    model = tiny_model(fresh=True)
    expected = cold(model)
    with engine_of(model) as engine:
        assert engine.is_batch_invariant
        engine.cache.load(saved)
        ids, cached, logprobs = ask(engine)
        assert cached == len(PROMPT) - 1
        assert (ids, logprobs) == expected
        engine.cache.check()


def test_an_engine_begins_with_a_snapshot_or_says_why_not(
    tiny_model: Callable[..., Any], saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tiny_model(fresh=True).save_pretrained(folder)
    options: dict[str, Any] = dict(dtype=torch.float32, backend="torch")
    with pytest.raises(FileNotFoundError):
        Engine.from_pretrained("no/such-model", snapshot=tmp_path / "no", **options)
    with Engine.from_pretrained(folder, kv=KV, snapshot=saved, **options) as engine:
        assert ask(engine)[1] == len(PROMPT) - 1
    with pytest.raises(SnapshotError, match="k_format"):
        Engine.from_pretrained(folder, kv=KVConfig(dtype="fp8"), snapshot=saved, **options)


def one_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[17, 30] += 1e-3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(change=one_weight), "weights"),
        (dict(seed=1), "weights"),
        (dict(name="qwen2"), "class"),
        (dict(rms_norm_eps=1e-4), "config.rms_norm_eps"),
        (dict(max_position_embeddings=128), "config.max_position_embeddings"),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": 5e3}), "config.rope"),
        (dict(change=lambda model: model.to(torch.bfloat16)), "dtype"),
    ],
)
def test_another_model_of_equal_shapes_is_named(
    tiny_model: Callable[..., Any], saved: Path, change: dict[str, Any], named: str
) -> None:
    """PER-1, second part."""
    apply = change.pop("change", lambda model: None)
    model = tiny_model(change.pop("name", "llama"), fresh=True, **change)
    apply(model)
    with engine_of(model) as engine:
        before = engine.cache.render()
        with pytest.raises(SnapshotError, match=f"{named}.*expected"):
            engine.cache.load(saved)
        assert engine.cache.render() == before
        ask(engine)
        engine.cache.check()


def test_another_tokenizer_or_library_is_named(
    tiny_model: Callable[..., Any], saved: Path, byte_tokenizer: Any, monkeypatch: Any
) -> None:
    model = tiny_model(fresh=True)
    with (
        Engine(model, byte_tokenizer, kv=KV) as engine,
        pytest.raises(SnapshotError, match="tokenizer"),
    ):
        engine.cache.load(saved)
    for name in (
        "torch.__version__",
        "transformers.__version__",
        "radixkv.models.fingerprint.__version__",
    ):
        with monkeypatch.context() as patch, engine_of(model) as engine:
            patch.setattr(name, "0.0.1")
            with pytest.raises(SnapshotError, match=r"got .*0\.0\.1|expected '0\.0\.1'"):
                engine.cache.load(saved)


def test_a_fingerprint_is_the_same_while_layers_are_packed_and_in_another_process(
    tiny_model: Callable[..., Any],
) -> None:
    model = tiny_model("gpt2", fresh=True)
    plain = fingerprint(model)
    with engine_of(model):
        assert fingerprint(model) == plain
    assert fingerprint(model) == plain
    assert fingerprint(model, extra=b"x")["extra"] != plain["extra"]
    import transformers as tf

    config = dict(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        here = fingerprint(tf.LlamaForCausalLM(tf.LlamaConfig(**config)))
    code = (
        "import transformers as tf, torch\n"
        "from radixkv.models.fingerprint import fingerprint\n"
        "torch.manual_seed(0)\n"
        f"print(repr(fingerprint(tf.LlamaForCausalLM(tf.LlamaConfig(**{config!r})))))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == repr(here)


# --- changes in place ----------------------------------------------------------------------------


class LoRA(nn.Module):
    """An adapter layer as peft makes them: the same names, nothing else of it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self._active_adapter = ["a"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        generator = torch.Generator().manual_seed(3)
        size = base.weight.shape
        self.deltas = nn.ParameterDict(
            {n: nn.Parameter(torch.randn(size, generator=generator)) for n in "ab"}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        if not self._disable_adapters:
            out = out + x @ self.deltas[self._active_adapter[0]].T
        return out


def adapted(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.k_proj = LoRA(layer.self_attn.k_proj)
    return model


def through_torch(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)


def through_data(model: Any) -> None:
    model.model.embed_tokens.weight.data.mul_(1.1)


def another_tensor(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight.data = norm.weight.data * 1.7


def another_parameter(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach() * 1.7)


def another_module(model: Any) -> None:
    model.model.layers[0].mlp = type(model.model.layers[0].mlp)(model.config)


def a_state_dict(model: Any) -> None:
    state = {name: tensor * 1.25 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def rope(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def another_adapter(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj._active_adapter = ["b"]


def adapter_off(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj._disable_adapters = True


CHANGES = [
    through_torch, through_data, another_tensor, another_parameter, another_module, a_state_dict,
    rope, another_adapter, adapter_off,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_place_is_noticed_before_the_next_request(
    tiny_model: Callable[..., Any], change: Callable[[Any], None], caplog: Any
) -> None:
    model = adapted(tiny_model(fresh=True))
    with engine_of(model) as engine:
        first = ask(engine)
        assert ask(engine) == (first[0], len(PROMPT) - 1, first[2])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            change(model)
        after = ask(engine)
        assert after[1] == 0
        assert "the model was changed" in caplog.text
        assert after[2] != first[2]
        warm = ask(engine)
        assert warm[:2] == (after[0], len(PROMPT) - 1)
        # A new layer is not among those whose rows were made independent of each other.
        assert engine.is_batch_invariant == (change is not another_module)
        assert warm[2] == after[2] or not engine.is_batch_invariant
        engine.cache.check()
    assert cold(model)[0] == after[0]


def test_two_versions_of_an_adapter_and_none_are_three_entries(
    tiny_model: Callable[..., Any],
) -> None:
    """KEY-3: under names of their own, under one name, and without."""
    model = adapted(tiny_model(fresh=True))
    with engine_of(model) as engine:
        found = []
        for number, namespace in enumerate([("a", 1), ("a", 2), None, None]):
            with torch.no_grad():
                for layer in model.model.layers:
                    if number:
                        layer.self_attn.k_proj.deltas["a"].add_(0.25)
            ids, cached, logprobs = ask(engine, namespace=namespace)
            assert cached == 0
            assert ask(engine, namespace=namespace) == (ids, len(PROMPT) - 1, logprobs)
            found.append(logprobs)
            with engine_of(model) as other:
                assert ask(other)[2] == logprobs
        assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_branches_and_running_requests_survive_or_are_told(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(fresh=True)
    with engine_of(model) as engine:
        branch = engine.open(PROMPT)
        branch.generate(temperature=0, max_new_tokens=3)
        tokens = list(branch.token_ids)
        running = engine.submit(PROMPT, max_new_tokens=50, temperature=0, ignore_eos=True)
        for _ in range(3):
            engine.step()
        assert not running.done
        through_torch(model)
        result = branch.generate(temperature=0, max_new_tokens=4)
        assert running.done
        with pytest.raises(RadixKVError, match="changed while the request was running"):
            running.result()
        with engine_of(model) as other:
            expected = other.generate(tokens, temperature=0, max_new_tokens=4)
        assert result.samples[0].token_ids == expected.samples[0].token_ids
        branch.close()
        engine.cache.check()
        stats = engine.cache.stats()
        assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_reset_cache_drops_what_cannot_be_noticed(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(fresh=True)
    with engine_of(model) as engine:
        first = ask(engine)
        weight = model.model.embed_tokens.weight.detach().numpy()
        weight[PROMPT[1:-1]] *= 1.5  # past torch's counters, beside the samples
        engine.reset_cache()
        after = ask(engine)
        assert after[1] == 0 and after[2] != first[2]
        assert cold(model) == (after[0], after[2])

        def reset(input_ids: Any, logits: Any) -> Any:
            engine.reset_cache()
            return logits

        with pytest.raises(RadixKVError, match="inside one of its own steps"):
            engine.generate(PROMPT, logits_processors=[reset])
    with pytest.raises(RadixKVError, match="open engine"):
        engine.reset_cache()


def test_a_save_after_a_change_holds_nothing_of_before(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "cache.rkv"
    model = tiny_model(fresh=True)
    with engine_of(model) as engine:
        ask(engine)
        through_torch(model)
        engine.cache.save(path)
    with engine_of(model) as engine:
        assert engine.cache.load(path).tokens == 0


def test_a_dropped_engine_is_not_kept_alive_by_its_cache(tiny_model: Callable[..., Any]) -> None:
    engine = engine_of(tiny_model(fresh=True))
    cache = engine.cache
    engine.close()
    del engine
    with pytest.raises(RadixKVError, match="engine"):
        cache.identify()


def test_a_look_does_the_same_work_whatever_the_weights_hold(
    tiny_model: Callable[..., Any],
) -> None:
    """A few calls a tensor and module, as many for weights that are sixteen times as large."""

    def num_calls(model: Any) -> int:
        watch = WeightWatch(model)
        assert not watch.changed()
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            changed = watch.changed()
        finally:
            sys.setprofile(before)
        assert not changed
        return calls

    small = tiny_model(fresh=True)
    places = len(list(small.parameters())) + len(list(small.modules()))
    calls = num_calls(small)
    assert 0 < calls <= 20 * places
    assert num_calls(tiny_model(fresh=True, hidden_size=256, intermediate_size=512)) == calls
