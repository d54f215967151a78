"""`python -m radixkv.bench.linear`: linear layers of the small model, for some numbers of rows.

All layers of a model in turn, so that the weights come from memory and not from a cache. In one
run: the kernel of `radixkv.models.linear`, ``torch.nn.functional.linear``, and oneDNN over packed
weights, in milliseconds (medians); beside them the time that reading the weights takes at the
bandwidth measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from radixkv.models.linear import multiply

SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
"""(outputs, inputs) of one layer of SmolLM2-135M."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)


def _medians(rivals: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for repeat in range(repeats + 1):
        for name, run in rivals.items():
            begin = time.perf_counter()
            run()
            if repeat:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return {name: round(statistics.median(values), 2) for name, values in taken.items()}


def measure(num_layers: int = 30, repeats: int = 5, rows: tuple[int, ...] = ROWS) -> dict[str, Any]:
    """Time the products of ``num_layers`` layers.

    Returns:
        per number of rows the median milliseconds of each way; and the machine.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES * num_layers
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    packed = [torch.ops.mkldnn._reorder_linear_weight.default(weight) for weight in weights]
    num_bytes = sum(4 * weight.numel() for weight in weights)
    results = {}
    with torch.inference_mode():
        for num_rows in rows:
            inputs = {n: torch.randn(num_rows, n, generator=generator) for _, n in SHAPES}

            def ours() -> None:
                for weight in weights:
                    multiply(inputs[weight.shape[1]], weight, None)  # noqa: B023

            def plain() -> None:
                for weight in weights:
                    F.linear(inputs[weight.shape[1]], weight)  # noqa: B023

            def onednn() -> None:
                for weight, one in zip(weights, packed, strict=True):
                    x = inputs[weight.shape[1]]  # noqa: B023
                    torch.ops.mkldnn._linear_pointwise.default(x, one, None, "none", [], "")

            def read() -> None:
                for weight in weights:
                    weight.sum()

            ways = {"radixkv": ours, "F.linear": plain, "oneDNN packed": onednn, "read": read}
            results[num_rows] = _medians(ways, repeats)
    return {
        "ms_by_rows": results,
        "weight_bytes": num_bytes,
        "num_layers": num_layers,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print one line a number of rows, then everything as JSON."""
    parser = argparse.ArgumentParser(prog="python -m radixkv.bench.linear")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report = measure(options.layers, options.repeats)
    for num_rows, taken in report["ms_by_rows"].items():
        parts = ", ".join(f"{name} {ms}" for name, ms in taken.items())
        sys.stdout.write(f"{num_rows} rows, ms: {parts}\n")
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
