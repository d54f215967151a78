"""One registry of KV formats: a new entry is in every list, and no backend takes it for another."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from radixkv import kv_formats
from radixkv.attention import formats
from radixkv.config import KV_DTYPES, KVConfig

# A format like int8, known to the registry and to torch, of which no kernel knows. In a process of
# its own: lists are made when modules are imported.
WITH_A_DUMMY = """
import json, sys
import torch
from radixkv import kv_formats

kv_formats.FORMATS["dummy"] = kv_formats.StoredFormat(
    name="dummy", bits=2, other_names=("dumb",), output_error=0.05
)

from radixkv import KVConfig, KVSpec, PrefixCache
from radixkv.attention import formats
from radixkv.bench import gpu, gpu_compile, kernel
from radixkv.config import KV_DTYPES
from radixkv.tools import quality


def told(call, *args):
    try:
        return type(call(*args)).__name__
    except (KeyError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def make(backend):
    return PrefixCache(KVSpec(num_layers=1, num_kv_heads=2, head_dim=64), KVConfig(
        dtype="dummy", capacity="1MiB"), backend=backend)


class DummyFormat(formats.Int8Format):
    name = "dummy"


without_a_class = told(formats.make_format, "dummy", 64, torch.float32)
formats.MAKERS["dummy"] = lambda head_dim, dtype: DummyFormat(head_dim)
lease = make("torch").acquire(range(9))
lease.write(0, torch.ones(9, 2, 64), torch.ones(9, 2, 64))
print(json.dumps({
    "lists": {
        "config": KV_DTYPES,
        "quality": quality.FORMATS,
        "gpu": gpu.KV_DTYPES,
        "kernel": kernel.KV_DTYPES,
        "gpu_compile": sorted({job.kv_dtype for job in gpu_compile.jobs()}),
    },
    "other name": told(lambda: KVConfig(dtype="dumb")),
    "without a class": without_a_class,
    "torch": float(lease.attend(0, torch.ones(1, 2, 64)).mean()),
    "cpu": told(make, "cpu"),
    "triton": told(make, "triton"),
}))
"""


@pytest.fixture(scope="module")
def dummy() -> dict:
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_DUMMY],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_new_entry_is_in_every_list(dummy):
    assert {name for name, listed in dummy["lists"].items() if "dummy" not in listed} == set()
    assert dummy["other name"].endswith("did you mean 'dummy'?")


def test_a_format_without_a_class_is_refused_by_name(dummy):
    assert dummy["without a class"].startswith("ValueError: KVConfig.dtype: expected one of 'int8'")
    assert "got 'dummy'" in dummy["without a class"]
    with pytest.raises(ValueError, match="got 'int9'"):
        formats.make_format("int9", 64, torch.float32)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_format_that_kernels_lack_is_refused_by_name_and_torch_serves_it(dummy, backend):
    assert "got 'dummy'; use backend=\"torch\"" in dummy[backend]
    assert dummy["torch"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", KV_DTYPES)
def test_every_entry_has_what_serves_it(name):
    made = formats.make_format(name, 64, torch.bfloat16)
    known = kv_formats.FORMATS[name]
    assert made.name == known.name == KVConfig(dtype=name).dtype
    bits = made.code_width * made.code_dtype.itemsize * 8 / made.head_dim
    assert bits == (known.bits or 16)


def test_names_of_other_libraries_name_one_format_and_are_none_of_ours():
    others = [other for one in kv_formats.FORMATS.values() for other in one.other_names]
    assert len(others) == len(set(others))
    assert not set(others) & set(KV_DTYPES)
