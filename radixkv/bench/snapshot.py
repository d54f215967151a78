"""What saving and loading a cache costs, against reading the file.

Run it as `python -m radixkv.bench.snapshot`. The file lies in the file cache, so loads and
reads are counted in CPU time, which other work on the machine changes little; they take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from radixkv.attention.layout import KVSpec
from radixkv.bench.cache import hardware
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KVConfig, parse_bytes, require_int

_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SnapshotFigures:
    """One run; times are medians, in seconds: of CPU, but ``save_s`` by the clock.

    Attributes:
        file_bytes: of the snapshot; pages_bytes: of the pages in it.
        save_s: to a file, the disk included.
        load_s: into fresh pages; load_again_s: into pages that were in use before.
        read_s: of the file into fresh memory; read_again_s: into one buffer, piece by piece.
        save_growth_bytes, load_growth_bytes: most memory that either took beyond the pool.
    """

    file_bytes: int
    pages_bytes: int
    save_s: float
    load_s: float
    load_again_s: float
    read_s: float
    read_again_s: float
    save_growth_bytes: int
    load_growth_bytes: int


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def _peak_growth(work: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # begin a new peak
    before = _memory("VmRSS")
    work()
    return _memory("VmHWM") - before


def bench_snapshot(num_bytes: int, rounds: int, folder: Path) -> SnapshotFigures:
    """Save and load a cache of ``num_bytes`` of pages with the geometry of SmolLM2-135M."""
    spec = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64)
    config = KVConfig(capacity=num_bytes)

    def make() -> PrefixCache:
        return PrefixCache(spec, config, backend="torch")

    cache = make()
    for tensor in cache.storage.pages:
        tensor.view(torch.uint8).fill_(7)
    pages_each = min(64, cache.pool.num_pages)
    for start in range(cache.pool.num_pages // pages_each):
        token_ids = np.arange(pages_each * cache.page_size) + 1_000_000 * start
        with cache.acquire(token_ids) as lease:
            lease.commit(len(token_ids))
    pages_bytes = cache.stats().pages_cached * cache.codec.bytes_per_page
    path = folder / "cache.rkv"
    saves = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        cache.save(path)
        saves.append(time.perf_counter() - start_s)
    save_growth = _peak_growth(lambda: cache.save(path))
    cache.clear()
    load_growth = _peak_growth(lambda: cache.load(path))
    times: dict[str, list[float]] = {"load": [], "again": [], "read": [], "read_again": []}
    buffer = bytearray(_READ_BYTES)

    def read_again() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    for _ in range(rounds):
        times["read_again"].append(_timed(read_again))
        times["read"].append(_timed(path.read_bytes))
        fresh = make()
        for name in ("load", "again"):
            fresh.clear()
            start_s = time.process_time()
            fresh.load(path)
            times[name].append(time.process_time() - start_s)
        fresh.check()
        del fresh
    return SnapshotFigures(
        file_bytes=path.stat().st_size,
        pages_bytes=pages_bytes,
        save_s=statistics.median(saves),
        load_s=statistics.median(times["load"]),
        load_again_s=statistics.median(times["again"]),
        read_s=statistics.median(times["read"]),
        read_again_s=statistics.median(times["read_again"]),
        save_growth_bytes=save_growth,
        load_growth_bytes=load_growth,
    )


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m radixkv.bench.snapshot", description=__doc__)
    parser.add_argument("--bytes", default="1GB", help="of pages (1GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the file is written (a temporary one)")
    arguments = parser.parse_args()
    num_bytes = parse_bytes(arguments.bytes, name="--bytes")
    rounds = require_int("--rounds", arguments.rounds, 1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = bench_snapshot(num_bytes, rounds, Path(folder))
    ratios = {
        "load_to_read": figures.load_s / figures.read_s,
        "load_again_to_read_again": figures.load_again_s / figures.read_again_s,
        "file_to_pages": figures.file_bytes / figures.pages_bytes,
    }
    report = {"hardware": hardware(), **asdict(figures), **ratios}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
