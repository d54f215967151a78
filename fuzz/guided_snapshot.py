"""Coverage-guided fuzzing of the snapshot parser with atheris: bytes are a file.

python -m fuzz.guided_snapshot FOLDER [libFuzzer options, such as -runs=20000]

An empty folder is filled with whole snapshots to begin from. Checksums are made anew before a
file is loaded, so that what lies behind them is reached.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with atheris.instrument_imports(include=["radixkv.cache.snapshot"]):
        from fuzz.snapshot import SETTINGS, Target, forge, scratch
    import torch

    torch.set_num_threads(1)
    targets = [Target(config, number) for number, config in enumerate(SETTINGS)]
    for folder in sys.argv[1:2]:
        if Path(folder).is_dir() and not any(Path(folder).iterdir()):
            for number, target in enumerate(targets):
                (Path(folder) / f"seed{number}").write_bytes(bytes([number]) + target.data)
    path = scratch() / "mutant"

    def run(data: bytes) -> None:
        if data:
            target = targets[data[0] % len(targets)]
            path.write_bytes(forge(data[1:], target.original.codec.bytes_per_page))
            warm, salvage = bool(data[0] & 64), bool(data[0] & 128)
            target.run(path, salvage=salvage, forged=True, warm=warm)

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
