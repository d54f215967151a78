"""Tile sizes of the GPU kernels: a shipped table, and entries that were tuned on this machine.

A tile changes in which order a sum is taken, so it must not depend on the batch: it is chosen by
kernel, format, head size, query group and device alone. Nothing is tuned unless asked for
(`tune`, on a GPU): results stay the same from run to run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from radixkv.quant import KVCodec

TILED_KERNELS = ("decode", "shared", "extend")
WARP_SIZE = 64 if torch.version.hip else 32
"""Of the GPUs that this build of torch is for."""
_forced: dict[str, Tile] = {}


@dataclass(frozen=True)
class Tile:
    """How a program is cut.

    Attributes:
        block_m: query rows (tokens times query heads of one KV head), at least 16.
        block_n: tokens read at a time; divides the split.
        num_warps, num_stages: threads (in 32, or 64 on AMD), and loads under way.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def shipped_tile(kernel: str, kv_dtype: str, head_dim: int, warp_size: int = WARP_SIZE) -> Tile:
    """What is used where nothing was tuned: chosen to compile without spills on every target.

    Args:
        warp_size: threads that run as one: 32, or 64 on AMD.
    """
    # Padded columns and wide rows take more registers: half the tokens at a time.
    wide = (64,) if kernel == "shared" and kv_dtype != "int4" else (64, 128)
    block_n = 64 if head_dim in wide else 32
    if kernel == "decode":
        # Rows of 32 bytes: more threads than 128 would read fewer than 16 bytes each.
        num_warps = 128 // warp_size if kv_dtype == "int4" and head_dim == 64 else 4
        return Tile(16, block_n, num_warps, 3 if head_dim <= 128 else 2)
    # More threads than 256 would have too few registers each.
    num_warps = 256 // warp_size if kernel != "shared" and head_dim > 128 else 4
    return Tile(32, block_n, num_warps, 2)


def candidates(
    kernel: str, kv_dtype: str, head_dim: int, warp_size: int = WARP_SIZE
) -> tuple[Tile, ...]:
    """Every tile that the tuner may choose, the shipped one first: few, so that tuning ends."""
    shipped = shipped_tile(kernel, kv_dtype, head_dim, warp_size)
    block_m = shipped.block_m
    others = (
        Tile(block_m, 32, 4, 3),
        Tile(block_m, 64, 4, 4),
        Tile(16 if kernel == "decode" else 64, 64, 8, 2),
    )
    return (shipped, *(tile for tile in others if tile != shipped))


def _key(kernel: str, codec: KVCodec, group: int, device_name: str) -> str:
    k, v = codec.k_format, codec.v_format
    parts = (device_name, kernel, k.name, v.name, k.head_dim, v.head_dim, codec.spec.dtype, group)
    return " ".join(map(str, (*parts, codec.config.page_size)))


def table_path() -> Path:
    """Where tuned entries are kept: RADIXKV_TILES, or a file of the user's cache folder."""
    named = os.environ.get("RADIXKV_TILES")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "radixkv" / "tiles-v1.json"


@cache
def _read_table(path: Path) -> dict[str, Tile]:
    """Tuned entries; a file that is not there or not ours counts as empty."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {key: Tile(**fields) for key, fields in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def find_tile(kernel: str, codec: KVCodec, group: int, device: torch.device) -> Tile:
    """The tuned tile where there is one, else the shipped one.

    Complexity: O(1); the table is read once a process.
    """
    if kernel in _forced:
        return _forced[kernel]
    table = _read_table(table_path())
    found = table.get(_key(kernel, codec, group, _device_name(device))) if table else None
    return found or shipped_tile(kernel, codec.k_format.name, codec.k_format.head_dim)


@contextmanager
def forced(kernel: str, tile: Tile) -> Iterator[None]:
    """Within this block `find_tile` gives ``tile`` for ``kernel``, so that it can be measured."""
    _forced[kernel] = tile
    try:
        yield
    finally:
        del _forced[kernel]


def tune(
    kernel: str,
    codec: KVCodec,
    group: int,
    device: torch.device,
    measure: Callable[[Tile], float],
) -> Tile:
    """Measure every candidate, keep the fastest on disk and use it from now on.

    Args:
        measure: seconds that a tile takes; a tile that raises is passed over.

    Complexity: one call of ``measure`` a candidate.
    """
    times: dict[Tile, float] = {}
    refused: list[Exception] = []
    for tile in candidates(kernel, codec.k_format.name, codec.k_format.head_dim):
        try:
            times[tile] = measure(tile)
        except RuntimeError as error:  # it does not fit this device
            refused.append(error)
    if not times:
        raise RuntimeError(f"tune: no tile of {kernel} runs on {device}") from refused[0]
    best = min(times, key=lambda tile: times[tile])
    path = table_path()
    table = _read_table(path) | {_key(kernel, codec, group, _device_name(device)): best}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    text = json.dumps({key: asdict(tile) for key, tile in table.items()}, indent=1)
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    _read_table.cache_clear()
    return best
