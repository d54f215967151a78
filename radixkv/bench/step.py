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

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KVConfig
from radixkv.models.batch import Run, build_batch
from radixkv.models.linear import linear_kernels
from radixkv.models.runner import ModelRunner
from radixkv.models.small_model import prepare_small_model
from radixkv.tools.demo import hardware


def _clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def profile_step(
    model: Any, *, kv_dtype: str = "int8", batch: int = 16, length: int = 1000, repeats: int = 15
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
    taken: dict[str, float] = defaultdict(float)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **keywords: Any) -> Any:
            begin = _clock()
            try:
                return call(*args, **keywords)
            finally:
                taken[name] += _clock() - begin

        return run

    with ExitStack() as held:
        held.callback(runner.release)
        kernels = linear_kernels()
        layers = [m for m in runner.model.modules() if type(m) is nn.Linear]
        rows = {m.in_features: torch.randn(batch, m.in_features) for m in layers}
        products = []
        outs = []
        for first in range(0, len(layers), 7):  # as many as a decoder layer has
            product = kernels.Program(batch, torch.get_num_threads())
            for module in layers[first : first + 7]:
                outs.append(torch.empty(batch, module.out_features))
                x, out = rows[module.in_features].data_ptr(), outs[-1].data_ptr()
                sizes = module.out_features, module.in_features
                weight = module.weight.data_ptr()
                product.product(*sizes, x, 4 * sizes[1], weight, 0, out, 4 * sizes[0])
            products.append(product)

        def multiply_all() -> float:
            begin = _clock()
            for product in products:
                product.run()
            return _clock() - begin

        config = KVConfig(dtype=kv_dtype, capacity=f"{2 * batch * length * 50}KiB")  # type: ignore[arg-type]
        cache = PrefixCache(runner.spec, config, backend="auto")
        generator = torch.Generator().manual_seed(0)
        shape = (2, length, runner.spec.num_kv_heads, runner.spec.head_dim)
        k, v = torch.randn(shape, generator=generator)
        leases = []
        for number in range(batch):
            token_ids = [10 + number] * length
            lease = held.enter_context(cache.acquire(token_ids))
            for layer in range(runner.spec.num_layers):
                lease.write(layer, k, v)
            leases.append(lease)
        parts: dict[str, list[float]] = defaultdict(list)
        watched = (
            (kernels.Program, "programs"),
            (kernels.PlacedProgram, "programs"),
            (kernels.cpu.Write, "write"),
            (kernels.cpu.AttentionCall, "attention"),
        )
        for _ in range(repeats):
            parts["products"].append(multiply_all())
            for lease in leases:
                lease.extend([5])
            taken.clear()
            begin = _clock()
            runs = [Run(lease, [5], n := lease.num_tokens - 1, n + 1, n, n) for lease in leases]
            with ExitStack() as watch:
                for kind, name in watched:
                    watch.enter_context(patch.object(kind, "run", timed(name, kind.run)))
                runner.forward(build_batch(runs, runner.device), cache)
            step = _clock() - begin
            for name, part in (*taken.items(), ("step", step)):
                parts[name].append(part)
            parts["rest"].append(step - sum(taken.values()))
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
