"""Which code runs attention over pages, and how a transformers model is made to call it.

What a backend is says `radixkv.attention.plan`; `radixkv.attention.reference` is the plain twin
that all are compared with.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from radixkv.attention import reference
from radixkv.attention.plan import Backend
from radixkv.config import BACKENDS, require_choice

_CPU_NEEDS = ("numba", "radixkv_kernels")
_GPU_NEEDS = ("triton", "radixkv_kernels")


def get_backend(name: str, device: torch.device) -> type[Backend]:
    """The backend that ``name`` asks for on ``device``, to be made for a cache's `KVCodec`.

    ``"auto"`` takes the fastest there is.

    On a CPU that is ``"cpu"`` where Numba and the kernels are installed, on a GPU ``"triton"``
    where Triton and the kernels are, else ``"torch"``. ``"triton"`` also runs on a CPU, slowly,
    where TRITON_INTERPRET=1 was set before.

    Raises:
        ValueError: an unknown name, or a backend that this version or device does not have.
    """
    require_choice("backend", name, BACKENDS)
    if name == "auto":
        needs = {"cpu": ("cpu", _CPU_NEEDS), "cuda": ("triton", _GPU_NEEDS)}
        name, modules = needs.get(device.type, ("torch", ()))
        if not all(map(importlib.util.find_spec, modules)):
            name = "torch"
    if name == "torch":
        return reference.TorchBackend
    if name == "cpu" and device.type == "cpu":
        from radixkv.attention import cpu as cpu_backend  # here, because it loads Numba

        return cpu_backend.CpuBackend
    if name == "triton" and device.type in ("cpu", "cuda"):
        return _triton_backend(device)
    raise ValueError(
        f'backend: {name!r} does not run on {device} in this version; use "torch" or "auto"'
    )


def _triton_backend(device: torch.device) -> type[Backend]:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'backend: "triton" runs on {device} in Triton\'s interpreter alone; set '
            f'TRITON_INTERPRET=1 before Python starts, or use "cpu", "torch" or "auto"'
        )
    if not importlib.util.find_spec("triton"):
        raise ValueError(
            'backend: "triton" needs the package triton, which is not installed; '
            'pip install "radixkv[gpu]", or use "torch" or "auto"'
        )
    from radixkv.attention import triton as triton_backend  # here, because it loads Triton

    if device.type == "cpu" and not triton_backend.INTERPRETED:
        raise ValueError(
            "backend: the Triton kernels were imported before TRITON_INTERPRET=1 was set; set it "
            "before Python starts"
        )
    return triton_backend.TritonBackend
