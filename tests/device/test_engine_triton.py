"""The whole engine on Triton kernels gives the tokens that the plain backend gives."""

from __future__ import annotations

import pytest
import torch

from radixkv import Engine, KVConfig, NonFiniteError
from radixkv.attention import triton as triton_backend
from radixkv.attention.backend import get_backend
from radixkv.models.graphs import DecodeGraphs, capture_cuda
from radixkv.models.runner import ModelRunner

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if triton_backend.INTERPRETED else "cuda"


@pytest.fixture
def unprobed(monkeypatch):
    """Engines that do not measure whether batches change bits: that takes many steps."""
    monkeypatch.setattr(ModelRunner, "is_batch_invariant", lambda *_: False)


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("llama", "int8"), ("gemma2", "int4"), ("gpt-oss", "fp8")]
)
def test_triton_gives_the_tokens_that_torch_gives(tiny_model, name, kv_dtype, unprobed):
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 1000, (21,), generator=generator).tolist()
    prompts = [prompt, [*prompt[:9], *prompt[3:12]]]
    tokens = {}
    for backend in ("torch", "triton"):
        model = tiny_model(name, fresh=True, max_position_embeddings=32).to(DEVICE)
        kv = KVConfig(dtype=kv_dtype, page_size=4, capacity="1MiB")
        before = triton_backend.runs.copy()
        with Engine(model, kv=kv, backend=backend) as engine:
            cold = engine.generate(prompts, max_new_tokens=4, temperature=0, ignore_eos=True)
            warm = engine.generate(prompt, max_new_tokens=4, temperature=0, ignore_eos=True)
            engine.cache.check()
        tokens[backend] = [r.samples[0].token_ids for r in (*cold, warm)]
        assert warm.cached_tokens == len(prompt) - 1
        ran = triton_backend.runs - before
        assert set(ran) == (
            set() if backend == "torch" else {"write", "extend", "decode", "merge", "copy"}
        )
    assert tokens["triton"] == tokens["torch"]
    assert tokens["triton"][2] == tokens["triton"][0]  # warm = cold


def test_the_backend_is_found_by_name():
    backend = get_backend("triton", torch.device(DEVICE))
    assert (backend.name, backend) == ("triton", triton_backend.TritonBackend)


def decode_graphs(engine: Engine) -> DecodeGraphs:
    return engine.core.runner._graphs[1]


def generate(engine: Engine):
    prompts = [list(range(5, 10)), [40, 41], [90, 91, 92]]
    results = engine.generate(prompts, max_new_tokens=2, temperature=0, ignore_eos=True, logprobs=1)
    return [(r.samples[0].token_ids, r.samples[0].logprobs) for r in results]


class Frozen:
    """A capture that keeps what a graph keeps: the weights there were, wherever they lay."""

    def __init__(self, model):
        self.model = model
        self.count = 0

    def __call__(self, compute):
        self.count += 1
        held = {name: tensor.clone() for name, tensor in self.model.named_parameters()}

        def replay():
            now = {name: tensor.clone() for name, tensor in self.model.named_parameters()}
            try:
                self.put(held)
                return compute()
            finally:
                self.put(now)

        return replay

    def put(self, values):
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                tensor.data.copy_(values[name])


def test_decode_in_padded_buckets_gives_every_bit_of_the_plain_step(tiny_model, unprobed):
    # Also after weights were changed, which graphs of the old ones do not see.
    kv = KVConfig(page_size=4, capacity="1MiB")
    outs = []
    for frozen in (False, True):
        model = tiny_model(fresh=True, max_position_embeddings=32).to(DEVICE)
        with Engine(model, kv=kv, backend="triton") as engine:
            capture = engine.core.runner._capture = Frozen(model) if frozen else None
            first = generate(engine)
            if capture:
                assert len(decode_graphs(engine)) == 1  # three sequences, a bucket of four
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.self_attn.v_proj.weight *= -2
            outs.append([first, generate(engine)])
            assert capture is None or capture.count == 2
    assert outs[0] == outs[1]
    assert outs[0][0] != outs[0][1]


@pytest.mark.gpu
def test_a_captured_step_gives_every_bit_of_the_plain_step(tiny_model, unprobed):
    kv = KVConfig(page_size=4, capacity="1MiB")
    outs = []
    for capture in (None, capture_cuda):
        model = tiny_model(fresh=True, max_position_embeddings=32).to(DEVICE)
        with Engine(model, kv=kv, backend="triton") as engine:
            engine.core.runner._capture = capture
            outs.append([generate(engine), generate(engine)])
    assert outs[0] == outs[1]


# Numbers that are not finite

BAD = 7  # the token whose numbers go wrong
GREEDY = dict(max_new_tokens=2, temperature=0, ignore_eos=True)


def spoil(model, value: float, *, then=None) -> None:
    """K of layer 1, head 1, of the token BAD becomes ``value``; ``then`` is called after it."""
    seen = {"bad": torch.zeros(0)}

    def note(_module, _args, keywords):
        seen["bad"] = keywords["input_ids"][0] == BAD

    def change(_module, _args, out):
        rows = seen["bad"]
        if out.shape[1] == rows.shape[0] and rows.any():
            out = out.clone()
            out[0, rows, 16:] = value
        return out

    def after(_module, _args, out):
        if then and seen["bad"].any():
            then()

    attention = model.model.layers[1].self_attn
    model.register_forward_pre_hook(note, with_kwargs=True)
    attention.k_proj.register_forward_hook(change)
    attention.register_forward_hook(after)


def run_together(engine: Engine, prompts) -> list:
    requests = [engine.submit(prompt, **GREEDY) for prompt in prompts]
    while not all(request.done for request in requests):
        engine.step()
    return requests


def stored(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """K and V of a prompt's tokens that are cached, in steps of their rows' codes."""
    rows = []
    with engine.cache.acquire(prompt, full=True) as lease:
        assert lease.num_cached == len(prompt)
        slots = torch.from_numpy(lease.slots(0, lease.num_cached))
        for layer in map(engine.cache.layer, range(2)):
            for codes, scale in ((layer.k_pages, layer.k_scale), (layer.v_pages, layer.v_scale)):
                at = slots // 4, slice(None), slots % 4
                largest = scale.cpu()[at].float().amax()
                rows.append(codes.cpu()[at].float() * scale.cpu()[at].float() / largest)
    return torch.stack(rows)


def test_a_request_that_is_not_finite_leaves_nothing_behind_and_harms_no_other(
    tiny_model, unprobed
):
    # The kernel writes the finite rows of a step that fails: their pages are given back, the
    # rows of others are written again, and what is cached is what a sound model stores.
    good = [[5, 9, 12, 40, 41, 8], [90, 91, 92, 93, 94]]
    bad = [*good[0][:4], 33, BAD, 50, 51, 52]  # begins as the first does
    kv = KVConfig(page_size=4, capacity="256KiB")
    tokens, pages = [], []
    for fault in (None, float("nan")):
        model = tiny_model(fresh=True, max_position_embeddings=32).to(DEVICE)
        with Engine(model, kv=kv, backend="triton") as engine:
            assert engine.core.runner.k_center.isfinite().all()  # measured while the model is sound
            if fault is not None:
                spoil(model, fault)
            requests = [*run_together(engine, good[:1]), *run_together(engine, [bad, good[1]])]
            if fault is not None:
                with pytest.raises(NonFiniteError, match="K of layer 1, KV head 1"):
                    requests[1].result()
                assert engine.cache.match(bad) == 4  # the sound prefix of the other prompt
            del requests[1]
            tokens.append([request.result().samples[0].token_ids for request in requests])
            pages.append([stored(engine, prompt) for prompt in good])
            engine.cache.check()
            stats = engine.cache.stats()
            assert stats.pages_free + stats.pages_cached == stats.pages_total
    assert tokens[0] == tokens[1]
    for sound, other in zip(*pages, strict=True):
        assert (sound - other).abs().max() < 1.5  # of 127: NumPy's products round by their shape


def test_what_a_step_noted_before_it_failed_is_no_fault_of_the_next(tiny_model, unprobed):
    model = tiny_model(fresh=True, max_position_embeddings=32).to(DEVICE)

    def fail():
        raise RuntimeError("out of memory")

    with Engine(model, kv=KVConfig(page_size=4, capacity="256KiB"), backend="triton") as engine:
        assert engine.core.runner.k_center.isfinite().all()
        spoil(model, float("nan"), then=fail)  # before the step's end, where faults are read
        bad, good = run_together(engine, [[5, BAD, 6], [90, 91, 92]])
        with pytest.raises(RuntimeError, match="out of memory"):
            bad.result()
        assert good.result().samples[0].token_ids
