"""Reported faults, second collection: what is a change of a model's weights, and what is not.

M3 to M6, C2 to C4, C8 and disk offload of C10, each with other members of its kind.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from radixkv import BeamParams, Engine, KVConfig, RadixKVError, UnsupportedModelError

COMMON = dict(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip
KV = KVConfig(dtype="model", page_size=4, capacity="4MiB")
IDS = list(range(100, 140))
CHANGED = "the model was changed while the request was running"


def build(config: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.15)
    return model.eval()


def llama(seed: int = 0, **changes: Any) -> Any:
    return build(tf.LlamaConfig(**{**COMMON, **changes}), seed)


def gpt2(dropout: float = 0.0) -> Any:
    return build(
        tf.GPT2Config(
            vocab_size=1000, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1,
            eos_token_id=2, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            loss_type="ForCausalLM",
        )
    )  # fmt: skip


def phi3() -> Any:
    rope = dict(
        rope_type="longrope", rope_theta=1e4, long_factor=[2.0] * 8, short_factor=[1.0] * 8,
        factor=2.0, original_max_position_embeddings=128,
    )  # fmt: skip
    return build(tf.Phi3Config(**COMMON, rope_parameters=rope))


def dynamic() -> Any:
    return llama(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))


def ask(engine: Engine, prompt: list[int] = IDS, max_new_tokens: int = 6) -> tuple[list[int], int]:
    result = engine.generate(prompt, max_new_tokens=max_new_tokens, temperature=0, ignore_eos=True)
    return result.samples[0].token_ids, result.cached_tokens


def own(model: Any, prompt: list[int] = IDS, max_new_tokens: int = 6) -> list[int]:
    """The greedy tokens of the model's own forward."""
    input_ids = torch.tensor([prompt])
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        for _ in range(max_new_tokens):
            token = model(input_ids, use_cache=False).logits[0, -1].argmax()
            input_ids = torch.cat([input_ids, token[None, None]], 1)
    for module, mode in modes:
        module.training = mode
    return input_ids[0, len(prompt) :].tolist()


def in_the_middle(engine: Engine, change: Callable[[], Any], *, after: int = 4) -> list[int]:
    """The tokens of a request; after some of its nine something is changed."""
    count = 0

    def process(input_ids: Any, logits: Any) -> Any:
        nonlocal count
        count += 1
        if count == after:
            change()
        return logits

    result = engine.generate(
        IDS, max_new_tokens=9, temperature=0, ignore_eos=True, logits_processors=[process]
    )
    return result.samples[0].token_ids  # type: ignore[no-any-return]


def state_of(model: Any) -> Any:
    """All that an engine must leave as it is."""
    modules = [
        (name, id(module), type(module), module.training, sorted(module.__dict__))
        for name, module in model.named_modules()
    ]
    weights = [
        (name, id(one), one.data_ptr(), one.stride(), one.is_inference(), one.requires_grad)
        for name, one in (*model.named_parameters(), *model.named_buffers())
    ]
    return modules, weights, model.config._attn_implementation


# -- M3: what a forward writes --------------------------------------------------------------------


def test_longrope_hits_and_runs_beside_others() -> None:
    with Engine(phi3(), kv=KV) as engine:
        assert [ask(engine, max_new_tokens=4)[1] for _ in range(3)] == [0, 39, 39]
        first = engine.submit(IDS, max_new_tokens=8, temperature=0)
        for _ in range(3):
            engine.step()
        ask(engine, [7, 8, 9])
        while not first.done:
            engine.step()
        assert first.result().samples


class Writing(nn.Module):
    """RoPE that writes something of its own in each forward, and reads ``bonus`` besides."""

    def __init__(self, rope: nn.Module, kind: str) -> None:
        super().__init__()
        self.rope, self.kind = rope, kind
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("bonus", torch.ones(1))
        self.register_buffer("wide", torch.ones(2**21), persistent=False)  # too much to be copied
        self.seen = torch.zeros(1)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        longest = int(position_ids.max()) + 1
        match self.kind:
            case "counts":
                self.count += 1
            case "counts anew":
                self.count = self.count + 1
            case "counts as an attribute":
                self.seen = self.seen + 1
            case "grows" if len(self.table) < longest:
                self.table = torch.arange(longest).float()
            case "grows in place" if float(self.count) < longest:
                self.count.fill_(longest)
            case "makes anew":
                self.register_buffer("table", torch.arange(10.0), persistent=False)
            case "makes lazily" if not hasattr(self, "late"):
                self.late = torch.arange(longest)
        cos, sin = self.rope(x, position_ids)
        factor = self.bonus * self.wide[7]
        return cos * factor, sin * factor


WRITING = (
    "counts", "counts anew", "counts as an attribute", "grows", "grows in place", "makes anew",
    "makes lazily",
)  # fmt: skip


@pytest.mark.parametrize("kind", WRITING)
def test_what_a_forward_writes_is_no_change_and_what_others_write_is_one(kind: str) -> None:
    model = llama()
    rope = model.model.rotary_emb = Writing(model.model.rotary_emb, kind)
    with Engine(model, kv=KV) as engine:
        first, cached = ask(engine)
        assert cached == 0
        assert [ask(engine)[1] for _ in range(2)] == [39, 39]
        assert ask(engine, IDS * 5, 20)[1] == 40  # in one request, longer than ever
        assert ask(engine) == (first, 39)
        if kind != "grows in place":  # nobody could tell that from its owner's writing
            model(torch.tensor([IDS * 6]))
            assert ask(engine) == (first, 39)
            with Engine(model, kv=KV) as other:
                ask(other, IDS * 6)
            assert ask(engine) == (first, 39)

        rope.bonus.mul_(1.5)
        changed = ask(engine)
        assert changed == (own(model), 0)
        rope.rope.inv_freq = rope.rope.inv_freq / 2
        assert ask(engine)[1] == 0
        for part in (rope.bonus, rope.wide):
            with pytest.raises(RadixKVError, match=CHANGED):
                in_the_middle(engine, lambda part=part: part.div_(1.5))  # type: ignore[misc]
        assert ask(engine) == (own(model), 0)
    left = [
        name
        for module in model.modules()
        for place in (module._buffers, module.__dict__)
        for name, one in place.items()
        if isinstance(one, Tensor) and one.is_inference()
    ]
    assert not left  # what cannot be trained with


def test_a_buffer_that_another_thread_writes_during_a_step_is_a_change() -> None:
    model = llama()
    rope = model.model.rotary_emb = Writing(model.model.rotary_emb, "nothing")
    calls = []

    def write(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 4:  # of the steps of this request; not when that one is run again
            thread = threading.Thread(target=rope.bonus.mul_, args=(1.5,))
            thread.start()
            thread.join()

    with Engine(model, kv=KV) as engine:
        ask(engine)
        hook = model.model.layers[0].register_forward_pre_hook(write)
        with pytest.raises(RadixKVError, match=CHANGED):
            ask(engine)
        hook.remove()
        assert float(rope.bonus) == 1.5
        assert ask(engine) == (own(model), 0)


@pytest.mark.parametrize("make", [dynamic, phi3])
def test_rope_that_a_long_native_call_has_turned_comes_back(make: Callable[[], Any]) -> None:
    model = make()
    with Engine(model, kv=KV) as engine:
        first = ask(engine)
        with torch.no_grad():
            model(torch.tensor([IDS * 8]), use_cache=False)
        assert ask(engine) == (first[0], 39)
        model.model.rotary_emb.original_inv_freq.mul_(0.5)
        model.model.rotary_emb.inv_freq.mul_(0.5)
        assert ask(engine)[1] == 0


# -- M4: weights stay what they are ---------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_model_trains_beside_and_after_an_engine(make: Callable[[], Any]) -> None:
    model = make()
    before = state_of(model)
    batch = torch.tensor([IDS])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Engine(model, kv=KV) as engine:
        ask(engine)
        assert state_of(model) == before
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        assert ask(engine) == (own(model), 0)
    assert state_of(model) == before
    model(batch, labels=batch).loss.backward()
    assert all(one.grad is not None for one in model.parameters())


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda weight: weight.add_(0.1),
    "one": lambda weight: weight[3].__setitem__(5, 9.0),
    "copy": lambda weight: weight.copy_(2 * weight),
    "data": lambda weight: weight.data.mul_(1.1),
    "other data": lambda weight: setattr(weight, "data", weight.data * 1.1),
}


@pytest.mark.parametrize("loaded_in", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_edits_are_noticed_in_every_mode(
    make: Callable[[], Any], mode: Callable[[], Any], loaded_in: Callable[[], Any]
) -> None:
    if loaded_in is torch.inference_mode:
        mode = torch.inference_mode  # where alone such tensors can be written to
    with loaded_in():
        model = make()
    layer = (model.model.layers if make is llama else model.transformer.h)[0].mlp
    weight = (layer.down_proj if make is llama else layer.c_fc).weight
    with Engine(model, kv=KV) as engine:
        ask(engine)
        for name, edit in EDITS.items():
            assert ask(engine)[1] == 39
            with mode():
                edit(weight)
            assert ask(engine) == (own(model), 0), name
        with mode():
            model.load_state_dict({key: 1.01 * one for key, one in model.state_dict().items()})
        assert ask(engine) == (own(model), 0)


@pytest.mark.parametrize("after", [4, 8])
@pytest.mark.parametrize("edit", [*EDITS, "other parameter", "other module"])
def test_weights_that_change_in_the_middle_end_the_request(edit: str, after: int) -> None:
    model = llama()
    mlp = model.model.layers[1].mlp

    def change() -> None:
        with torch.no_grad():
            if edit == "other parameter":
                mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight * 2)
            elif edit == "other module":
                model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)
            else:
                EDITS[edit](mlp.up_proj.weight)

    with Engine(model, kv=KV) as engine:
        with pytest.raises(RadixKVError, match=CHANGED):
            in_the_middle(engine, change, after=after)
        assert ask(engine) == (own(model), 0)
        engine.cache.check()


def test_scores_and_beams_end_when_weights_change_past_the_counters() -> None:
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    with Engine(model, kv=KV, max_batch_tokens=16) as engine:
        for run in (
            lambda: engine.score(IDS, [[5, 6]]),
            lambda: engine.generate(IDS, BeamParams(width=2, max_new_tokens=2)),
        ):
            expected = run()
            engine.cache.clear()
            calls: list[int] = []

            def change(*args: Any, calls: list[int] = calls) -> None:
                calls.append(0)
                if len(calls) == 3:  # of the prompt's chunks the last
                    weight.data.mul_(1.5)

            hook = model.model.layers[1].register_forward_pre_hook(change)
            with pytest.raises(RadixKVError, match=CHANGED):
                run()
            hook.remove()
            assert run() != expected


# -- M5: modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: gpt2(dropout=0.5), lambda: llama(attention_dropout=0.5)], ids=["gpt2", "llama"]
)
def test_requests_compute_as_in_eval_whatever_the_modes(make: Callable[[], Any]) -> None:
    model = make()
    expected = own(model)
    with Engine(model, kv=KV) as engine:
        for part in (model, model.get_submodule("lm_head"), next(model.children())):
            part.train()
            modes = [module.training for module in model.modules()]
            for _ in range(2):
                engine.reset_cache()
                assert ask(engine)[0] == expected
                assert [module.training for module in model.modules()] == modes
            model.eval()
        assert in_the_middle(engine, model.train)[:6] == expected
        assert model.training
    assert all(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_dropout_of_adapters_does_not_run_in_requests(peft: Any) -> None:
    model = llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    wrapped = peft.get_peft_model(model, config)
    spread_adapters(model)
    expected = own(model)
    with Engine(wrapped, kv=KV) as engine:
        assert ask(engine)[0] == expected
        wrapped.train()
        for _ in range(2):
            engine.reset_cache()
            assert ask(engine)[0] == expected


def test_modes_that_change_during_a_step_are_their_owners() -> None:
    model = gpt2(dropout=0.5)
    expected = own(model)
    wishes: list[bool] = []

    def choose(*args: Any) -> None:
        if wishes:
            thread = threading.Thread(target=model.train, args=(wishes.pop(),))
            thread.start()
            thread.join()

    with Engine(model, kv=KV) as engine:
        hook = model.transformer.h[0].register_forward_pre_hook(choose)
        for mode in (True, False, True, True, False):
            engine.cache.clear()
            wishes.append(mode)
            assert ask(engine)[0] == expected
            assert not wishes
            assert {module.training for module in model.modules()} == {mode}
        hook.remove()


# -- M6, C2: adapters -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft() -> Any:
    import peft

    return peft


def lora(peft: Any, target: Any = "all-linear") -> Any:
    return peft.LoraConfig(r=4, target_modules=target, task_type="CAUSAL_LM")


def spread_adapters(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, one in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(one, std=0.2, generator=generator)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_an_adapter_is_made_switched_and_taken_off_while_an_engine_is_open(peft: Any) -> None:
    model = llama()
    with Engine(model, kv=KV) as engine:
        base = ask(engine)[0]
        wrapped = peft.get_peft_model(model, lora(peft))
        assert any("q_proj.lora_A" in name for name, _ in model.named_modules())
        wrapped.add_adapter("other", lora(peft, ["q_proj", "v_proj"]))
        spread_adapters(model)
        found = {}
        for name in ("default", "other", "default"):
            wrapped.set_adapter(name)
            found[name] = ask(engine)
            assert found[name] == (own(model), 0)
            assert ask(engine)[1] == 39
        with wrapped.disable_adapter():
            assert ask(engine) == (base, 0)
        assert found["default"] != found["other"]
        wrapped.merge_adapter()
        assert ask(engine) == (own(model), 0)
        wrapped.unmerge_adapter()
        with Engine(wrapped, kv=KV) as other:
            assert ask(other) == (own(model), 0)
        assert wrapped.unload() is model
        assert ask(engine) == (base, 0)
        assert not engine.is_batch_invariant  # layers were replaced since that was measured


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_no_request_ends_with_two_sets_of_adapters(peft: Any) -> None:
    model = llama()
    wrapped = peft.get_peft_model(model, lora(peft, ["q_proj", "down_proj"]))
    wrapped.add_adapter("other", lora(peft, ["q_proj", "v_proj"]))
    spread_adapters(model)
    layer = model.model.layers[1].self_attn.q_proj
    tuner = wrapped.base_model

    changes: list[Callable[[], Any]] = [
        lambda: wrapped.set_adapter("other"),
        lambda: wrapped.set_adapter("default"),
        lambda: layer.scaling.update(default=3.0),
        lambda: layer.lora_A["default"].weight.data.mul_(2),
        lambda: layer.set_scale("default", 0.5),
        tuner.disable_adapter_layers,
        tuner.enable_adapter_layers,
        wrapped.merge_adapter,
        wrapped.unmerge_adapter,
        lambda: wrapped.delete_adapter("default"),
    ]
    with Engine(wrapped, kv=KV) as engine:
        for number, change in enumerate(changes):
            ask(engine)
            with pytest.raises(RadixKVError, match=CHANGED):
                in_the_middle(engine, change)
            assert ask(engine) == (own(model), 0), number
        engine.cache.check()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adapters_that_are_off_for_a_part_of_a_step_are_not_felt(peft: Any) -> None:
    model = llama()
    wrapped = peft.get_peft_model(model, lora(peft))
    spread_adapters(model)
    tuner, steps = wrapped.base_model, []

    def turn(switch: Callable[[], Any], steps: tuple[int, ...]) -> Callable[..., None]:
        calls: list[int] = []

        def hook(*args: Any) -> None:
            calls.append(0)
            if len(calls) in steps:
                thread = threading.Thread(target=switch)
                thread.start()
                thread.join()

        return hook

    expected = own(model)
    with Engine(wrapped, kv=KV) as engine:
        assert ask(engine)[0] == expected
        engine.cache.clear()
        for layer, switch in zip(
            model.model.layers, (tuner.disable_adapter_layers, tuner.enable_adapter_layers)
        ):
            steps.append(layer.register_forward_pre_hook(turn(switch, (1, 3, 4))))
        assert ask(engine)[0] == expected
        for hook in steps:
            hook.remove()
        assert ask(engine) == (expected, 39)


# -- C2: what its owner does with a model ---------------------------------------------------------


def test_layers_are_what_they_were_while_an_engine_is_open(tmp_path: Path) -> None:
    for make in (llama, gpt2):
        model = make()
        before = state_of(model)
        logits = model(torch.tensor([IDS])).logits
        weights = {key: one.clone() for key, one in model.state_dict().items()}
        with Engine(model, kv=KV) as engine:
            ask(engine)
            assert state_of(model) == before
            assert isinstance(model.lm_head, nn.Linear)
            assert torch.equal(model(torch.tensor([IDS])).logits, logits)
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert twin.config._attn_implementation == model.config._attn_implementation
                assert torch.equal(twin(torch.tensor([IDS])).logits, logits)
                assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
            model.save_pretrained(tmp_path)
            assert model.state_dict().keys() == weights.keys()
        assert state_of(model) == before
        loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(loaded[key], one) for key, one in weights.items())


@pytest.mark.parametrize("tied", [False, True])
def test_new_ids_are_read_as_soon_as_they_are_drawn(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    with Engine(model, kv=KV) as engine:
        ask(engine)
        with pytest.raises(ValueError, match="1050"):
            ask(engine, [*IDS, 1050])
        model.resize_token_embeddings(1100, mean_resizing=False)
        assert engine.vocab_size == 1100
        with torch.no_grad():
            model.lm_head.weight[1050] = 3 * model.lm_head.weight[7]
        drawn = ask(engine)
        assert drawn == (own(model), 0)
        assert ask(engine, [*IDS, 1050]) == (own(model, [*IDS, 1050]), 40)
        biased = engine.generate(IDS, max_new_tokens=2, temperature=0, logit_bias={1099: 1e4})
        assert ask(engine, biased.samples[0].token_ids * 3)[0]
        model.resize_token_embeddings(900)
        assert engine.vocab_size == 900
        with pytest.raises(ValueError, match="1050"):
            ask(engine, [*IDS, 1050])
        assert ask(engine) == (own(model), 0)


@pytest.mark.parametrize("another_comes", [False, True])
def test_what_waits_for_another_vocabulary_ends(another_comes: bool) -> None:
    model = llama()
    with Engine(model, kv=KV) as engine:
        options: dict[str, Any] = dict(temperature=0, max_new_tokens=3, ignore_eos=True)
        waiting = engine.submit(IDS, **options)
        model.resize_token_embeddings(1100, mean_resizing=False)
        later = [engine.submit(IDS, **options)] if another_comes else []
        while not all(request.done for request in (waiting, *later)):
            engine.step()
        with pytest.raises(RadixKVError, match=CHANGED):
            waiting.result()
        for request in later:
            assert request.result().samples[0].token_ids == own(model, max_new_tokens=3)


def test_a_head_that_is_wider_than_the_embeddings_says_so_when_that_is_felt() -> None:
    model = llama()
    with Engine(model, kv=KV) as engine:
        head, first = model.lm_head, ask(engine)[0]
        model.lm_head = nn.Linear(64, 1200, bias=False)
        with torch.no_grad():
            model.lm_head.weight.zero_()[:1000] = head.weight
        assert ask(engine) == (first, 0)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"below the 1000 .*got 1150.*resize both"):
                engine.generate(IDS, max_new_tokens=3, temperature=0, logit_bias={1150: 1e4})
            assert ask(engine)[0] == first
        model.lm_head = head
        assert ask(engine) == (first, 0)


def test_pruned_and_parametrized_layers_are_served() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = llama()
    before = state_of(model)
    layer = model.model.layers[0].mlp.up_proj
    with Engine(model, kv=KV) as engine:
        base = ask(engine)[0]
        prune.l1_unstructured(layer, "weight", amount=0.5)
        assert ask(engine) == (own(model), 0)
        prune.remove(layer, "weight")
        pruned = own(model)
        assert ask(engine) == (pruned, 0)
        parametrize.register_parametrization(layer, "weight", Doubled())
        assert ask(engine) == (own(model), 0)
        assert own(model) not in (base, pruned)
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert [one[:4] for one in state_of(model)[0]] == [one[:4] for one in before[0]]


def test_a_forward_that_was_put_in_and_other_types_are_noticed() -> None:
    model = llama()
    with Engine(model, kv=KV) as engine:
        base = ask(engine)[0]
        mlp = model.model.layers[0].mlp
        forward = mlp.forward
        mlp.forward = lambda x: 2 * forward(x)
        assert ask(engine) == (own(model), 0)
        del mlp.forward
        assert ask(engine) == (base, 0)
        model.half()
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="make the engine again"):
                ask(engine)
        model.float()
        assert ask(engine) == (own(model), 0)


# -- C3: compiled models --------------------------------------------------------------------------

COMPILED: dict[str, Callable[[Any], Any]] = {
    "whole": lambda model: torch.compile(model, backend="eager"),
    "in place": lambda model: model.compile(backend="eager"),
    "forward": lambda model: setattr(
        model, "forward", torch.compile(model.forward, backend="eager")
    ),
    "inner": lambda model: setattr(
        model, "model", torch.compile(model.model, backend="eager", fullgraph=True)
    ),
    "a layer": lambda model: model.model.layers.__setitem__(
        1, torch.compile(model.model.layers[1], backend="eager")
    ),
    "a layer in place": lambda model: model.model.layers[1].compile(backend="eager"),
}


def compile_(how: str, model: Any) -> Any:
    made = COMPILED[how](model)
    return model if made is None else made


@pytest.mark.parametrize(
    ("how", "is_open"),
    [
        *((how, False) for how in COMPILED if how != "whole"),
        *((how, True) for how in ("whole", "in place", "a layer")),
    ],
)
def test_compiled_models_are_served_and_compute_what_they_did(how: str, is_open: bool) -> None:
    torch._dynamo.reset()
    model = llama()
    expected = own(model)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits
    compiled = model if is_open else compile_(how, model)
    with Engine(compiled, kv=KV) as engine:
        assert ask(engine) == (expected, 0)
        if is_open:
            compiled = compile_(how, model)
            assert ask(engine)[0] == expected
        assert ask(engine) == (expected, 39)
        with torch.no_grad():
            assert torch.allclose(compiled(torch.tensor([IDS])).logits, logits, atol=1e-5)
        assert ask(engine) == (expected, 39)
    torch._dynamo.reset()


# -- C4: quantized models -------------------------------------------------------------------------


class Coded(Tensor):
    """A weight as quantizers have it: codes and a factor, which torch sees as one tensor."""

    codes: Tensor
    factor: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, factor: Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=factor.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, factor: Tensor) -> None:
        self.codes, self.factor = codes, factor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "factor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: None, *sizes: Any) -> Coded:
        return cls(inner["codes"], inner["factor"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].factor)
        wide = [a.codes * a.factor if isinstance(a, Coded) else a for a in args]
        return function(*wide, **(kwargs or {}))


def quantize(model: Any) -> None:
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.mlp.down_proj):
            weight = module.weight.detach()
            factor = weight.abs().amax(1, keepdim=True) / 127
            codes = (weight / factor).round().to(torch.int8)
            module.weight = nn.Parameter(Coded(codes, factor), requires_grad=False)


def test_weights_of_a_quantizers_own_are_served_and_watched() -> None:
    model = llama()
    quantize(model)
    weight = model.model.layers[0].mlp.down_proj.weight
    with Engine(model, kv=KV) as engine:
        assert ask(engine) == (own(model), 0)
        assert ask(engine)[1] == 39
        name = engine.core.fingerprint()["weights"]
        weight.factor.mul_(1.5)
        assert ask(engine) == (own(model), 0)
        assert engine.core.fingerprint()["weights"] != name
        with pytest.raises(RadixKVError, match=CHANGED):
            in_the_middle(engine, lambda: weight.codes.mul_(-1))
    plain = llama()
    with Engine(plain, kv=KV) as engine:
        ask(engine)
        quantize(plain)
        assert ask(engine) == (own(plain), 0)


class OfAKind(nn.Linear):
    """A subclass with codes in its weight, as bitsandbytes has it."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) / 100)


def test_linear_layers_of_other_kinds_run_as_they_are() -> None:
    model = llama()
    for layer in model.model.layers:
        codes = (layer.mlp.up_proj.weight.detach() * 100).round().to(torch.int8)
        layer.mlp.up_proj = OfAKind(64, 128, bias=False)
        layer.mlp.up_proj.weight = nn.Parameter(codes, requires_grad=False)
    with Engine(model, kv=KV) as engine:
        assert ask(engine) == (own(model), 0)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(-1)
        assert ask(engine) == (own(model), 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_activations_are_refused_by_name() -> None:
    model = llama()
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModelError, match=r"quantized \(torch.ao's Linear"):
        Engine(quantized, kv=KV)


# -- C8: layers of other models -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "model"])
@pytest.mark.parametrize("other_is_open", [False, True])
def test_a_layer_of_another_model_is_served_or_named(dtype: str, other_is_open: bool) -> None:
    kv = KVConfig(dtype=dtype, page_size=4, capacity="4MiB")
    model, other = llama(), llama(1)
    layers = model.model.layers
    with Engine(other, kv=kv) if other_is_open else nullcontext(), Engine(model, kv=kv) as engine:
        first, mine = ask(engine)[0], layers[0]
        layers[0] = other.model.layers[0]
        assert ask(engine) == (own(model), 0)
        assert ask(engine)[1] == 39
        layers[0] = other.model.layers[1]  # whose pages would be those of the second
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="layer"):
                ask(engine)
        layers[0] = mine
        assert ask(engine)[0] == first
        layers[0], layers[1] = layers[1], layers[0]
        assert ask(engine) == (own(model), 0)
        layers[0], layers[1] = layers[1], layers[0]
        for wrong in (llama(1, num_key_value_heads=4).model.layers[0], layers[1]):
            layers[0] = wrong
            for _ in range(2):
                with pytest.raises(UnsupportedModelError):
                    ask(engine)
            layers[0] = mine
            assert ask(engine)[0] == first
        del layers[1]
        for _ in range(2):
            with pytest.raises(UnsupportedModelError):
                ask(engine)


# -- C10: offloaded weights -----------------------------------------------------------------------

SPLIT = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


def offload_to_cpu(model: Any, folder: str) -> None:
    import accelerate

    accelerate.cpu_offload(model, execution_device="cpu")


def offload_to_disk(model: Any, folder: str) -> None:
    import accelerate

    accelerate.disk_offload(model, folder, execution_device="cpu")


def offload_parts(model: Any, folder: str) -> None:
    import accelerate

    accelerate.dispatch_model(model, SPLIT, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("offload", [offload_to_cpu, offload_to_disk, offload_parts])
def test_offloaded_weights_are_refused_by_name(offload: Callable[[Any, str], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = llama()
        offload(model, folder)
        with pytest.raises(UnsupportedModelError, match=r"model\..* offloaded"):
            Engine(model, kv=KV)
        model = llama()
        with Engine(model, kv=KV) as engine:
            ask(engine)
            offload(model, folder)
            for _ in range(2):
                with pytest.raises(UnsupportedModelError, match="offloaded"):
                    ask(engine)


def test_a_checkpoint_that_is_loaded_to_disk_is_refused_by_name(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        Engine.from_pretrained(
            tmp_path / "model", kv=KV, device_map=SPLIT, offload_folder=str(tmp_path / "disk")
        )


def test_hooks_that_bring_no_weights_are_no_offload() -> None:
    import accelerate

    model = llama()
    expected = own(model)
    places = dict.fromkeys(SPLIT, "cpu")
    accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    with Engine(model, kv=KV) as engine:
        assert [ask(engine) for _ in range(2)] == [(expected, 0), (expected, 39)]


def test_weights_that_a_forward_puts_in_place_are_refused() -> None:
    class Brought(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(self.weight.detach().clone())
            return super().forward(x)

    model = llama()
    layer = Brought(64, 128, bias=False)
    layer.weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj = layer
    with pytest.raises(UnsupportedModelError, match="whenever it runs"):
        Engine(model, kv=KV)


@pytest.mark.parametrize(
    ("make", "place", "name", "value"),
    [
        (llama, "model.layers.0.input_layernorm", "variance_epsilon", 1.0),
        (llama, "model.layers.0.self_attn", "scaling", 0.01),
        (llama, "model.rotary_emb", "attention_scaling", 2.0),
        (gpt2, "transformer.h.0.ln_1", "eps", 1.0),
    ],
)
def test_a_factor_that_a_module_holds_is_noticed(
    make: Callable[[], Any], place: str, name: str, value: float
) -> None:
    """No tensors, but what K, V and logits depend on."""
    model = make()
    options: dict[str, Any] = dict(temperature=0, max_new_tokens=1, ignore_eos=True, logprobs=0)

    def ask(engine: Engine) -> tuple[float, int]:
        result = engine.generate(IDS, **options)
        sample = result.samples[0]
        with torch.no_grad():
            own_logprobs = model(torch.tensor([IDS])).logits[0, -1].float().log_softmax(-1)
        token_id = sample.token_ids[0]
        assert sample.logprobs is not None
        off = abs(sample.logprobs[0][token_id] - float(own_logprobs[token_id]))
        return off, result.cached_tokens

    with Engine(model, kv=KV) as engine:
        assert ask(engine)[0] < 1e-4
        assert ask(engine)[1] == len(IDS) - 1
        setattr(model.get_submodule(place), name, value)
        off, cached = ask(engine)
        assert off < 1e-4
        assert cached == 0
        assert ask(engine)[1] == len(IDS) - 1


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by an old name
def test_an_activated_lora_is_refused_by_name() -> None:
    import peft

    config = peft.LoraConfig(
        target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]
    )
    with pytest.raises(UnsupportedModelError, match="alora_invocation_tokens"):
        Engine(peft.get_peft_model(llama(), config).eval(), kv=KV)
