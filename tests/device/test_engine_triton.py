"""The whole engine on Triton kernels gives the tokens that the plain backend gives."""

from __future__ import annotations

import pytest
import torch

from radixkv import Engine, KVConfig, triton_backend
from radixkv.attention import get_backend
from radixkv.graphs import DecodeGraphs, capture_cuda
from radixkv.model import ModelRunner

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
    assert (backend.name, backend.write_kv) == ("triton", triton_backend.write_kv)


def decode_graphs(engine: Engine) -> DecodeGraphs:
    (graphs,) = engine.cache.__dict__["_decode_graphs"].values()
    return graphs


def generate(engine: Engine):
    prompts = [list(range(5, 10)), [40, 41], [90, 91, 92]]
    results = engine.generate(prompts, max_new_tokens=2, temperature=0, ignore_eos=True, logprobs=1)
    return [(r.samples[0].token_ids, r.samples[0].logprobs) for r in results]


def test_decode_in_padded_buckets_gives_every_bit_of_the_plain_step(tiny_model, unprobed):
    kv = KVConfig(page_size=4, capacity="1MiB")
    outs = []
    for capture in (None, lambda compute: compute):
        model = tiny_model(fresh=True, max_position_embeddings=32).to(DEVICE)
        with Engine(model, kv=kv, backend="triton") as engine:
            engine._runner._capture = capture
            outs.append(generate(engine))
            if capture:
                assert len(decode_graphs(engine)) == 1  # three sequences, a bucket of four
    assert outs[0] == outs[1]


@pytest.mark.gpu
def test_a_captured_step_gives_every_bit_of_the_plain_step(tiny_model, unprobed):
    kv = KVConfig(page_size=4, capacity="1MiB")
    outs = []
    for capture in (None, capture_cuda):
        model = tiny_model(fresh=True, max_position_embeddings=32).to(DEVICE)
        with Engine(model, kv=kv, backend="triton") as engine:
            engine._runner._capture = capture
            outs.append([generate(engine), generate(engine)])
    assert outs[0] == outs[1]
