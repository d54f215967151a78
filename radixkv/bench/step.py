"""Where a decode step's time goes, on the small real model: `python -m radixkv.bench.step`.

Pages are filled with rows of random numbers, since only their size matters. With one thread
the clock is the process's CPU time, so that other work on the machine counts less.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KVConfig, KVDtype
from radixkv.models.batch import Run, build_batch
from radixkv.models.runner import ModelRunner
from radixkv.models.small_model import prepare_small_model
from radixkv.tools.demo import hardware
from radixkv_kernels.cpu.attention import AttentionCall
from radixkv_kernels.cpu.linear import PlacedProgram, Program
from radixkv_kernels.cpu.write import Write


def _clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def profile_step(
    model: Any,
    *,
    kv_dtype: KVDtype = "int8",
    batch: int = 16,
    length: int = 1000,
    repeats: int = 15,
) -> dict[str, Any]:
    """Time decode steps of ``batch`` sequences of ``length`` tokens, and their parts.

    Args:
        model: a transformers causal LM; its layers are put back afterwards.
    Returns:
        medians in seconds: ``step``; of it ``programs`` (compiled calls: matrix products, the
        logits' too, with norms, RoPE and gates), ``attention`` (over pages), ``write``
        (quantize and scatter) and ``rest``; ``products``, the same matrix products
        alone; and ``share_outside_products``.
    """
    runner = ModelRunner.load(model)
    parts: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as held:
        held.callback(runner.release)
        products = _Products(runner.model, batch)
        config = KVConfig(dtype=kv_dtype, capacity=2 * batch * length * 50 * 1024)
        cache = PrefixCache(runner.spec, config, backend="auto")
        leases = [held.enter_context(lease) for lease in _filled(cache, batch, length)]
        for _ in range(repeats):
            parts["products"].append(products.run())
            for lease in leases:
                lease.extend([5])
            for name, part in _time_step(runner, cache, leases).items():
                parts[name].append(part)
            for lease in leases:
                lease.mark_written()
    found: dict[str, Any] = {name: median(times) for name, times in parts.items()}
    found["share_outside_products"] = 1 - found["products"] / found["step"]
    return {
        "bench": "step",
        "hardware": hardware(runner.device),
        "kv_dtype": kv_dtype,
        "batch": batch,
        "length": length,
        **found,
    }


class _Products:
    """The matrix products of a model's step and nothing else, in programs of a layer's length."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        layers = [module for module in model.modules() if type(module) is nn.Linear]
        self._rows = {m.in_features: torch.randn(batch, m.in_features) for m in layers}
        self._outs = [torch.empty(batch, module.out_features) for module in layers]
        self._programs = []
        pairs = list(zip(layers, self._outs, strict=True))
        for first in range(0, len(pairs), 7):  # as many as a decoder layer has
            program = Program(batch, torch.get_num_threads())
            for module, out in pairs[first : first + 7]:
                x = self._rows[module.in_features].data_ptr()
                sizes = module.out_features, module.in_features
                weight = module.weight.data_ptr()
                program.product(*sizes, x, 4 * sizes[1], weight, 0, out.data_ptr(), 4 * sizes[0])
            self._programs.append(program)

    def run(self) -> float:
        """Multiply all; seconds that it took."""
        begin = _clock()
        for program in self._programs:
            program.run()
        return _clock() - begin


def _filled(cache: PrefixCache, batch: int, length: int) -> list[Lease]:
    """Leases of ``batch`` sequences that share nothing, their pages full of random rows."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, length, cache.spec.num_kv_heads, cache.spec.head_dim)
    k, v = torch.randn(shape, generator=generator)
    leases = []
    for number in range(batch):
        lease = cache.acquire([10 + number] * length)
        for layer in range(cache.spec.num_layers):
            lease.write(layer, k, v)
        leases.append(lease)
    return leases


def _time_step(runner: ModelRunner, cache: PrefixCache, leases: list[Lease]) -> dict[str, float]:
    """Seconds of one step of all ``leases``, of its parts, and the rest of it."""
    taken: dict[str, float] = defaultdict(float)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            begin = _clock()
            try:
                return call(*args, **keywords)
            finally:
                taken[name] += _clock() - begin

        return run

    watched = (
        (Program, "programs"),
        (PlacedProgram, "programs"),
        (Write, "write"),
        (AttentionCall, "attention"),
    )
    begin = _clock()
    runs = [Run(lease, [5], n := lease.num_tokens - 1, n + 1, n, n) for lease in leases]
    with ExitStack() as watch:
        for kind, name in watched:
            watch.enter_context(patch.object(kind, "run", timed(name, kind.run)))
        runner.forward(build_batch(runs, runner.device), cache)
    step = _clock() - begin
    return {**taken, "step": step, "rest": step - sum(taken.values())}


def main() -> None:
    """Print the parts of a step on the small real model; the last line is JSON."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prepare_small_model(progress=True))
    found = profile_step(model)
    for name in ("programs", "attention", "write", "rest", "step", "products"):
        share = found[name] / found["step"]
        sys.stdout.write(f"{name:10} {1e3 * found[name]:8.1f} ms {100 * share:6.1f} %\n")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
