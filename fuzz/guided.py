"""Coverage-guided fuzzing of tree, pool and cache with atheris: bytes are operations.

The plain tree runs, whose lines the fuzzer can follow.

python -m fuzz.guided [corpus folder] [libFuzzer options, such as -runs=2000]
"""

from __future__ import annotations

import sys


def main() -> None:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    sys.modules["numba"] = None  # type: ignore[assignment]
    include = [
        "radixkv.cache.tree",
        "radixkv.cache.pool",
        "radixkv.cache.prefix_cache",
        "radixkv.cache.plain_pool",
        "radixkv.cache.plain_tree",
    ]
    with atheris.instrument_imports(include=include):
        from fuzz.driver import run_bytes
        from radixkv.cache.pool import load_kernel
    assert load_kernel() is None
    import torch

    torch.set_num_threads(1)
    atheris.Setup(sys.argv, lambda data: run_bytes(bytes(data[:400])))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
