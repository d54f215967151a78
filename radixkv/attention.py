"""Which code runs attention over pages, and how a transformers model is made to call it.

Backends share two functions, `write_kv` and `paged_attention`, with the signatures of
`radixkv.reference`, their plain twin.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv import reference
from radixkv.config import BACKENDS, require_choice
from radixkv.quant import KVCodec, LayerPages
from radixkv.reference import AttentionBatch, ScoreRule


@dataclass(frozen=True)
class Backend:
    """One implementation of paged attention.

    Attributes:
        name: ``"torch"``, ``"cpu"`` or ``"triton"``: which path runs.
        write_kv: as `radixkv.reference.write_kv`.
        paged_attention: as `radixkv.reference.paged_attention`.
    """

    name: str
    write_kv: Callable[..., None]
    paged_attention: Callable[[KVCodec, LayerPages, Tensor, AttentionBatch, ScoreRule], Tensor]


_TORCH = Backend("torch", reference.write_kv, reference.paged_attention)
_CPU_NEEDS = ("numba", "radixkv_kernels")


def get_backend(name: str, device: torch.device) -> Backend:
    """The backend that ``name`` asks for on ``device``; ``"auto"`` takes the fastest there is.

    On a CPU that is ``"cpu"`` where Numba and the kernels are installed, else ``"torch"``.

    Raises:
        ValueError: an unknown name, or a backend that this version or device does not have.
    """
    require_choice("backend", name, BACKENDS)
    if name == "auto":
        compiled = device.type == "cpu" and all(map(importlib.util.find_spec, _CPU_NEEDS))
        name = "cpu" if compiled else "torch"
    if name == "torch":
        return _TORCH
    if name == "cpu" and device.type == "cpu":
        from radixkv import cpu_backend  # here, because it loads Numba

        return Backend("cpu", cpu_backend.write_kv, cpu_backend.paged_attention)
    raise ValueError(
        f'backend: {name!r} does not run on {device} in this version; use "torch" or "auto"'
    )
