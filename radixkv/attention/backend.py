"""Which code runs attention over pages, and how a transformers model is made to call it.

Backends share two functions, `write_kv` and `paged_attention`, with the signatures of
`radixkv.attention.reference`, their plain twin.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv.attention import reference
from radixkv.attention.batch import AttentionBatch, ScoreRule
from radixkv.attention.layout import KVCodec, LayerPages
from radixkv.config import BACKENDS, require_choice


@dataclass(frozen=True)
class Backend:
    """One implementation of paged attention.

    Attributes:
        name: ``"torch"``, ``"cpu"`` or ``"triton"``: which path runs.
        write_kv: as `radixkv.attention.reference.write_kv`.
        paged_attention: as `radixkv.attention.reference.paged_attention`.
        settle: called at the end of a step: raises what `write_kv` could not know without
            waiting for the device (only on a GPU; the others raise at once).
        copy_pages: copies the first tokens of pages in all layers; None leaves it to torch.
        prepare: makes the first two ready for many layers, as `radixkv.attention.cpu.prepare`, or
            gives None for a batch that gains nothing; None if none does.
    """

    name: str
    write_kv: Callable[..., None]
    paged_attention: Callable[[KVCodec, LayerPages, Tensor, AttentionBatch, ScoreRule], Tensor]
    settle: Callable[[KVCodec], None] = lambda codec: None
    copy_pages: Callable[[KVCodec, LayerPages, Sequence[tuple[int, int, int]]], None] | None = None
    prepare: Callable[..., Callable[..., None] | None] | None = None


_TORCH = Backend("torch", reference.write_kv, reference.paged_attention)
_CPU_NEEDS = ("numba", "radixkv_kernels")
_GPU_NEEDS = ("triton", "radixkv_kernels")


def get_backend(name: str, device: torch.device) -> Backend:
    """The backend that ``name`` asks for on ``device``; ``"auto"`` takes the fastest there is.

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
        return _TORCH
    if name == "cpu" and device.type == "cpu":
        from radixkv.attention import cpu as cpu_backend  # here, because it loads Numba

        write_kv, attention = cpu_backend.write_kv, cpu_backend.paged_attention
        return Backend("cpu", write_kv, attention, prepare=cpu_backend.prepare)
    if name == "triton" and device.type in ("cpu", "cuda"):
        return _triton_backend(device)
    raise ValueError(
        f'backend: {name!r} does not run on {device} in this version; use "torch" or "auto"'
    )


def _triton_backend(device: torch.device) -> Backend:
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
    return Backend(
        "triton",
        triton_backend.write_kv,
        triton_backend.paged_attention,
        triton_backend.settle,
        triton_backend.copy_pages,
    )
