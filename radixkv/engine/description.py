"""What an engine says of itself: what runs, on what, and why no faster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from radixkv.engine.core import EngineCore
from radixkv.models.layer_report import unfused_layers
from radixkv.version import __version__


class Description(dict[str, Any]):
    """A dict of plain values; as text, a table of two columns.

    >>> print(Description(model="Llama", pages={"total": 4096, "free": 4000}, fused_layers=[0, 1]))
    model         Llama
    pages         total 4,096, free 4,000
    fused_layers  0 to 1
    """

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        rows = []
        for name, value in self.items():
            lines = _lines(name, value)
            rows.append(f"{name:<{width}}  {lines[0]}".rstrip())
            rows += [" " * (width + 2) + line for line in lines[1:]]
        return "\n".join(rows)


def _lines(name: str, value: Any) -> list[str]:
    if name == "fused_layers":
        return [_ranges(value) or "none"]
    if name == "unfused_layers":
        return [f"{_ranges(one['layers'])}: {one['why']}" for one in value] or ["none"]
    if isinstance(value, dict):
        return [", ".join(f"{key} {_plain(one)}" for key, one in value.items())]
    if isinstance(value, list):
        return [line for one in value for line in _lines("", one)] or ["none"]
    return [_plain(value)]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " + ".join(f"{key} {_plain(one)}" for key, one in value.items())
    return f"{value:,}" if type(value) is int else str(value)


def _ranges(numbers: list[int]) -> str:
    """Numbers in order, in words.

    >>> _ranges([0, 1, 2, 4])
    '0 to 2, 4'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def describe(core: EngineCore) -> Description:
    """See `radixkv.Engine.describe`."""
    core.check_open()
    is_batch_invariant = core.is_batch_invariant
    cache, runner = core.cache, core.runner
    stats = cache.stats()
    kv = asdict(cache.config)
    del kv["capacity"]  # below, in bytes
    with core.step_lock:  # no step: the model is as its owner has it
        num_layers, unfused = unfused_layers(runner.model)
    others = {number for one in unfused for number in one["layers"]}
    weights: dict[str, int] = {}
    for weight in runner.model.parameters():
        form = _dtype_name(weight.dtype)
        weights[form] = weights.get(form, 0) + weight.numel() * weight.element_size()
    return Description(
        radixkv=__version__,
        model=type(runner.model).__name__,
        name_or_path=str(getattr(runner.model.config, "_name_or_path", "") or ""),
        dtype=_dtype_name(runner.spec.dtype),
        device=str(runner.device),
        weights=weights,
        backend=cache.backend.name,
        threads=torch.get_num_threads(),
        fused_layers=[number for number in range(num_layers) if number not in others],
        unfused_layers=unfused,
        is_batch_invariant=is_batch_invariant,
        kv={**kv, "bytes_per_token": stats.bytes_per_token},
        pool={"capacity_bytes": stats.capacity_bytes, "device": str(cache.device)},
        pages={
            name: getattr(stats, f"pages_{name}")
            for name in ("total", "free", "cached", "pinned", "private")
        },
        tiers=[{"name": "memory", "device": str(cache.device), "bytes": stats.capacity_bytes}],
        max_batch_tokens=core.scheduler.max_batch_tokens,
        max_positions=runner.max_positions,
        vocab_size=runner.vocab_size,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
