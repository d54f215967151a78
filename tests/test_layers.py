"""Fused decoder layers compute what the model's own do, and give way where anything differs."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import radixkv.models.runner as model_module
from radixkv import Engine, KVConfig
from radixkv.models.attention_interface import AttentionHandler
from radixkv.models.decoder_layer import FusedLayer
from radixkv.models.hold import hold
from radixkv.models.linear import BatchInvariantLinear
from radixkv_kernels.cpu import linear as kernels

FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3")


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, keywords: Any) -> Tensor:
    """Stands in for attention; its result depends on q, k, v and all that a layer asks for."""
    group = query.shape[1] // key.shape[1]
    window = keywords["sliding_window"] or 0
    scores = (query * key.repeat_interleave(group, 1)).sum(-1, keepdim=True)
    scores = torch.tanh(scores * keywords["scaling"] + window / 100)
    return (value.repeat_interleave(group, 1) * scores).transpose(1, 2)


class Attend(AttentionHandler):
    def __call__(self, *call: Any) -> Tensor:
        return attend(*call)


class Counted:
    """Counts the calls that a fused layer computes itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        run = FusedLayer._run

        def counted(layer: FusedLayer, *args: Any) -> Tensor:
            self.calls += 1
            return run(layer, *args)

        monkeypatch.setattr(FusedLayer, "_run", counted)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture
def fused(
    tiny_model: Callable[..., Any], request: pytest.FixtureRequest
) -> Iterator[tuple[Any, nn.Module, Callable[[], None], list[Any]]]:
    """A model, its first layer, what has it looked at again, and who serves its attention."""
    from transformers import AttentionInterface

    def function(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **keywords: Any) -> Any:
        return attend(module, q, k, v, {"sliding_window": None} | keywords), None

    AttentionInterface.register("stand_in", function)
    model = tiny_model(getattr(request, "param", "llama"), fresh=True)
    model.set_attn_implementation("stand_in")
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms that are more than zeros and ones
            nn.init.normal_(
                parameter, mean=0.5, std=0.3, generator=torch.Generator().manual_seed(1)
            )
    handlers: list[Any] = [Attend()]
    held, release = hold(model, lambda: handlers[0], lambda native: native)
    with held.step():
        yield model, model.model.layers[0], held.look, handlers
    release()
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    assert not any(isinstance(forward, FusedLayer) for forward in forwards)


def inputs(layer: Any, num_rows: int) -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(1, num_rows, layer.hidden_size, generator=generator)
    angles = 6 * torch.rand(1, num_rows, layer.self_attn.head_dim // 2, generator=generator)
    angles = torch.cat([angles, angles], 2)
    return x, {"position_embeddings": (angles.cos(), angles.sin())}


def run(layer: Any, num_rows: int = 7) -> tuple[Tensor, Tensor]:
    """What the layer gives, and what its own forward gives."""
    x, keywords = inputs(layer, num_rows)
    with torch.inference_mode():
        got = layer(x, **keywords)
        with layer.__dict__["forward"].standing():
            return got, type(layer).forward(layer, x, **keywords)


class Server(AttentionHandler):
    """Serves `attend` to layers whose rows lie in one place, as an engine does."""

    def __init__(self, rows: Tensor | None = None) -> None:
        self.rows, self.prepared, self.served = rows, 0, 0

    def __call__(self, *args: Any) -> Tensor:
        return attend(*args)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Callable[..., None]:
        self.prepared += 1

        def serve(module: Any, keywords: Any, more: Any) -> None:
            self.served += 1
            heads = [rows.transpose(0, 1)[None] for rows in (q, k, v)]
            out.copy_(attend(module, *heads, {**keywords, **more})[0])

        return serve

    def wanted(self, module: Any) -> Tensor | None:
        return self.rows


def through(model: Any, num_rows: int, between: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """What comes out of all layers, one after another."""
    layers = model.model.layers
    x, keywords = inputs(layers[0], num_rows)
    with torch.inference_mode():
        for layer in layers:
            x = layer(between(x), **keywords)
    return x


@pytest.mark.parametrize("fused", FAMILIES, indirect=True)
def test_layers_that_run_from_one_workspace_give_the_same_bits(fused: Any) -> None:
    model, _, look, handlers = fused
    for num_rows in (1, 5, 64, 5, 65):
        handlers[0] = Attend()
        expected = through(model, num_rows)
        for _ in range(2):
            handlers[0] = server = Server()
            assert torch.equal(through(model, num_rows), expected)
            few = num_rows <= 64
            assert (server.prepared, server.served) == (
                (1, len(model.model.layers)) if few else (0, 0)
            )
        look()


def test_a_workspace_serves_a_tensor_that_is_not_the_last_ones(fused: Any) -> None:
    model, _, _, handlers = fused
    expected = through(model, 6, lambda x: x * 2)
    handlers[0] = server = Server()
    assert torch.equal(through(model, 6, lambda x: x * 2), expected)
    assert server.served == len(model.model.layers)


def test_a_workspace_does_not_serve_what_compiled_calls_cannot_read(fused: Any) -> None:
    model, _, _, handlers = fused

    def spread(x: Tensor) -> Tensor:
        return torch.stack([x, -x], -1)[..., 0]  # every other element

    expected = through(model, 6, spread)
    handlers[0] = Server()
    plain = through(model, 6)
    handlers[0].fused_pass = None
    first = iter([False, True])
    got = through(model, 6, lambda x: spread(x) if next(first) else x)
    assert torch.allclose(got, plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(through(model, 6, spread), expected)


def test_a_layer_that_was_changed_leaves_the_workspace(fused: Any) -> None:
    model, _, look, handlers = fused
    handlers[0] = Server()
    through(model, 3)
    last = model.model.layers[-1]
    seen: list[Tensor] = []
    hook = last.mlp.register_forward_hook(lambda module, args, out: seen.append(out))
    look()
    handlers[0] = Attend()
    expected = through(model, 3)
    handlers[0] = server = Server()
    assert torch.equal(through(model, 3), expected)
    assert len(seen) == 2
    assert server.served == len(model.model.layers) - 1
    hook.remove()


def test_two_threads_have_a_workspace_each(fused: Any) -> None:
    model, _, _, handlers = fused
    expected = {rows: through(model, rows) for rows in (2, 9)}
    handlers[0] = Server()
    own = threading.local()

    def serve(rows: int) -> bool:
        own.server = Server()
        return all(torch.equal(through(model, rows), expected[rows]) for _ in range(20))

    class Chosen:
        """The server of the thread that asks."""

        def __getattr__(self, name: str) -> Any:
            return getattr(own.server, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(own.server, name, value)

        def __call__(self, *args: Any) -> Tensor:
            return attend(*args)

    handlers[0] = Chosen()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(serve, (2, 9))) == [True, True]


@pytest.mark.parametrize("rows", [[], [0], [3, 99], list(range(100))])
def test_rows_that_nobody_reads_are_zeros(fused: Any, rows: list[int]) -> None:
    _, layer, _, handlers = fused
    expected = run(layer, 100)[0]
    handlers[0] = Server(torch.tensor(rows, dtype=torch.int64))
    got = run(layer, 100)[0]
    assert torch.equal(got[:, rows], expected[:, rows])
    others = sorted(set(range(100)) - set(rows))
    assert not got[:, others].any()


@pytest.mark.parametrize("fused", FAMILIES, indirect=True)
def test_a_fused_layer_computes_what_its_own_forward_does(fused: Any, counted: Counted) -> None:
    layer = fused[1]
    for num_rows in (1, 2, 3, 16, 100, 600):
        got, expected = run(layer, num_rows)
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert counted.calls == 6


def test_no_rows_bits_feel_the_threads(fused: Any) -> None:
    layer, before = fused[1], torch.get_num_threads()
    expected = run(layer, 70)[0]
    try:
        for num_threads in (1, 3, 4):
            torch.set_num_threads(num_threads)
            assert torch.equal(run(layer, 70)[0], expected)
    finally:
        torch.set_num_threads(before)


def test_new_weights_are_followed(fused: Any, counted: Counted) -> None:
    layer = fused[1]
    before = run(layer)[0]
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)
        layer.input_layernorm.weight = nn.Parameter(3 * layer.input_layernorm.weight)
        layer.self_attn.v_proj.weight.data = 2 * layer.self_attn.v_proj.weight.data
    fused[2]()
    got, expected = run(layer)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(got, before, rtol=1e-2)
    assert counted.calls == 2


def change_hook(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda module, args, out: out + 1)


def change_pre_hook(layer: Any) -> None:
    layer.post_attention_layernorm.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def change_module(layer: Any) -> None:
    plain = layer.self_attn.k_proj

    class Adapted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * plain(x)  # type: ignore[no-any-return]

    layer.self_attn.k_proj = Adapted()


def change_forward(layer: Any) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: own(x) + 1


def change_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def change_layout(layer: Any) -> None:
    weight = layer.self_attn.o_proj.weight
    weight.data = weight.data.t().contiguous().t()


def change_norm(layer: Any) -> None:
    layer.input_layernorm = nn.LayerNorm(layer.hidden_size)


CHANGES = (
    change_hook,
    change_pre_hook,
    change_module,
    change_forward,
    change_activation,
    change_layout,
    change_norm,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_changed_layer_runs_its_own_forward(
    fused: Any, counted: Counted, change: Callable[[Any], None], ran_before: bool
) -> None:
    layer = fused[1]
    if ran_before:
        run(layer)
    change(layer)
    fused[2]()
    got, expected = run(layer)
    assert torch.equal(got, expected)
    assert counted.calls == ran_before


def test_an_engine_sees_a_hook_when_the_next_request_starts(
    tiny_model: Callable[..., Any], counted: Counted
) -> None:
    model = tiny_model("llama", fresh=True)
    kv = KVConfig(dtype="model", page_size=4, capacity="4MiB")
    prompt = list(range(5, 25))
    with Engine(model, kv=kv) as engine:
        before = engine.score(prompt, [[7, 8]])
        hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: 0 * out)
        engine.reset_cache()
        changed = engine.score(prompt, [[7, 8]])
        hook.remove()
        engine.reset_cache()
        assert engine.score(prompt, [[7, 8]]) == before != changed


def test_other_inputs_run_the_layers_own_forward(fused: Any, counted: Counted) -> None:
    layer = fused[1]
    x, keywords = inputs(layer, 4)
    cos, sin = keywords["position_embeddings"]
    two = {"position_embeddings": (cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))}
    for rows, given_ in ((x.requires_grad_(), keywords), (x.repeat(2, 1, 1).detach(), two)):
        out = layer(rows, **given_)
        with layer.__dict__["forward"].standing():
            assert torch.equal(out, type(layer).forward(layer, rows, **given_))
    with torch.no_grad():
        layer.double()
        fused[2]()
        double = {"position_embeddings": (cos.double(), sin.double())}
        assert layer(x.double(), **double).dtype == torch.float64
        layer.float()
        fused[2]()
        layer(x, **keywords)
    assert counted.calls == 1


def test_without_a_handler_a_layer_runs_its_own_forward(
    tiny_model: Callable[..., Any], counted: Counted
) -> None:
    model = tiny_model("llama", fresh=True)
    input_ids = torch.arange(2, 12)[None]
    with torch.inference_mode():
        expected = model(input_ids=input_ids).logits
        held, release = hold(model, lambda: None, lambda native: native)
        with held.step():
            assert torch.allclose(model(input_ids=input_ids).logits, expected, atol=1e-4)
        release()
        assert torch.equal(model(input_ids=input_ids).logits, expected)
    assert counted.calls == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_run_their_own_weights_and_forwards(
    fused: Any, counted: Counted, copied: Callable[[Any], Any]
) -> None:
    layer = fused[1]
    other = copied(fused[0]).model.layers[0]
    with torch.no_grad():
        other.mlp.up_proj.weight.mul_(2)
        x, keywords = inputs(layer, 5)
        got = other(x, **keywords)
        layer.mlp.up_proj.weight.mul_(2)
        fused[2]()
        assert torch.allclose(got, layer(x, **keywords), rtol=1e-4, atol=1e-4)
    assert counted.calls == 1  # that of the original
    assert not isinstance(other.mlp.up_proj.forward, BatchInvariantLinear)


def address(tensor: Tensor) -> int:
    return tensor.data_ptr()


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    size=st.integers(1, 70),
    inner=st.integers(1, 70),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_gated_products_equal_float64(
    num_rows: int, size: int, inner: int, num_threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, more = torch.randn(2, num_rows, size, generator=generator)
    gate, up = torch.randn(2, inner, size, generator=generator)
    gate_bias, up_bias = torch.randn(2, inner, generator=generator)
    down = torch.randn(size, inner, generator=generator)
    one, two = torch.full((2, num_rows, inner), torch.nan)
    out = torch.full((num_rows, size), torch.nan)
    program = kernels.Program(num_rows, num_threads)
    row, inner_row = 4 * size, 4 * inner
    program._work = 1 << 40  # all threads, small as it is
    program.gated(
        inner, size, address(x), row, address(gate), address(gate_bias), address(up),
        address(up_bias), address(one), address(two), inner_row,
    )  # fmt: skip
    program.then()
    program.product(
        size, inner, address(one), inner_row, address(down), 0, ("out", 0), row, address(more), row
    )
    program.run(out=address(out))
    x64, up64 = x.double(), up.double()
    hidden = F.silu(x64 @ gate.double().T + gate_bias) * (x64 @ up64.T + up_bias)
    expected = hidden @ down.double().T + more
    bound = 1e-6 * (hidden.abs() @ down.double().T.abs() + more.abs()).max() + 1e-6
    assert (out - expected).abs().max() < bound * (4 + size)


@settings(max_examples=30, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    num_heads=st.integers(1, 3),
    half=st.integers(1, 35),
    normed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rope_and_norms_equal_float64(
    num_rows: int, num_heads: int, half: int, normed: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head_dim, eps = 2 * half, 1e-5
    wide = torch.randn(num_rows, num_heads * head_dim + 3, generator=generator)
    cos, sin = torch.randn(2, num_rows, head_dim, generator=generator)
    weight = torch.randn(head_dim, generator=generator)
    before = wide.clone()
    program = kernels.Program(num_rows, 2)
    norm = (address(weight), kernels.bits_of(eps)) if normed else (0, 0)
    row, turn_row = 4 * wide.shape[1], 4 * head_dim
    program.rope(
        num_heads, head_dim, address(wide), row, address(cos), address(sin), turn_row, *norm
    )
    program.run()
    x = before[:, :-3].double().view(num_rows, num_heads, head_dim)
    if normed:
        x = weight * F.rms_norm(x, (head_dim,), eps=eps)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    expected = (x * cos[:, None] + turned * sin[:, None]).flatten(1)
    assert torch.allclose(wide[:, :-3].double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(wide[:, -3:], before[:, -3:])


@pytest.mark.parametrize("gate", [0.0, 1e30, -1e30, 88.5, -88.5, 300.0, -300.0, torch.nan])
def test_gates_of_any_size_are_those_of_silu(gate: float) -> None:
    one, weight = torch.ones(1, 1), torch.full((1, 1), gate)
    out, scratch = torch.zeros(2, 1, 1)
    program = kernels.Program(1, 1)
    program.gated(
        1, 1, address(one), 4, address(weight), 0, address(one), 0, address(out),
        address(scratch), 4,
    )  # fmt: skip
    program.run()
    expected = F.silu(torch.tensor(gate).double()).float()
    assert torch.allclose(out[0], expected, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.fixture
def other_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_torchs_default_dtype_is_nothing_to_a_workspace(
    tiny_model: Callable[..., Any], other_default: None
) -> None:
    prompts = [list(range(5, 90)), list(range(3, 20))]
    with Engine(tiny_model("llama"), kv=KVConfig(capacity="4MiB")) as engine:
        got = engine.generate(prompts, temperature=0, max_new_tokens=8)
    torch.set_default_dtype(torch.float32)
    with Engine(tiny_model("llama"), kv=KVConfig(capacity="4MiB")) as engine:
        expected = engine.generate(prompts, temperature=0, max_new_tokens=8)
    assert [r.samples[0].token_ids for r in got] == [r.samples[0].token_ids for r in expected]


def test_the_last_layer_is_the_one_that_runs_last(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama", fresh=True)
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    prompt = torch.arange(5, 105)[None]
    expected = model.generate(prompt, do_sample=False, max_new_tokens=6, eos_token_id=None)
    with Engine(model, kv=KVConfig(dtype="model", capacity="4MiB")) as engine:
        got = engine.generate(prompt[0].tolist(), temperature=0, max_new_tokens=6, ignore_eos=True)
    assert got.samples[0].token_ids == expected[0, 100:].tolist()


@pytest.mark.parametrize("where", ["model.norm", "model.layers.1", "model", "lm_head"])
def test_a_hook_sees_every_row_of_the_last_layer(
    tiny_model: Callable[..., Any], where: str
) -> None:
    model = tiny_model("llama", fresh=True)
    seen: list[Tensor] = []
    with Engine(model, kv=KVConfig(capacity="4MiB")) as engine:
        hook = model.get_submodule(where).register_forward_hook(
            lambda module, args, out: seen.append(out[0] if where != "lm_head" else out)
        )
        engine.generate(list(range(5, 105)), temperature=0, max_new_tokens=1)
        hook.remove()
    rows = seen[0].reshape(-1, seen[0].shape[-1])
    assert len(rows) == (100 if where != "lm_head" else 1)
    assert rows.abs().amax(dim=1).min() > 0


def test_a_step_leaves_nothing_to_the_garbage_collector(tiny_model: Callable[..., Any]) -> None:
    kept: list[weakref.ref[Any]] = []
    prepare = model_module._Paged.prepare

    def watched(paged: Any, *args: Any) -> Any:
        kept.append(weakref.ref(paged))
        return prepare(paged, *args)

    gc.collect()
    gc.disable()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            Engine(tiny_model("llama"), kv=KVConfig(capacity="4MiB")) as engine,
        ):
            patch.setattr(model_module._Paged, "prepare", watched)
            engine.generate(list(range(5, 20)), temperature=0, max_new_tokens=9)
        alive = [paged for paged in kept if paged() is not None]
    finally:
        gc.enable()
    assert len(kept) >= 8
    assert not alive
