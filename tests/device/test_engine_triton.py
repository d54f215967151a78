"""The whole engine on Triton kernels gives the tokens that the plain backend gives."""

from __future__ import annotations

import pytest
import torch

from radixkv import Engine, KVConfig, triton_backend
from radixkv.attention import get_backend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cpu" if triton_backend.INTERPRETED else "cuda"


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("llama", "int8"), ("gemma2", "int4"), ("gpt-oss", "fp8")]
)
def test_triton_gives_the_tokens_that_torch_gives(tiny_model, name, kv_dtype):
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
