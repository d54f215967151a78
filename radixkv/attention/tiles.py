"""Tile sizes of the GPU kernels: a shipped table, and entries that were tuned on this machine.

A tile changes in which order a sum is taken, so it must not depend on the batch: it is chosen by
kernel, format, head size, query group and device alone. Nothing is tuned unless asked for
(`tune`, on a GPU): results stay the same from run to run. An entry is of the kernels that it was
measured with: once their sources change it counts no more.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from radixkv.attention.layout import KVCodec
from radixkv.disk import cache_dir, write_whole
from radixkv_kernels import sources

FILE_NAME = "tiles-v2.json"
MAX_ENTRIES = 512
TILED_KERNELS = ("decode", "shared", "extend")
WARP_SIZE = 64 if torch.version.hip else 32
"""Of the GPUs that this build of torch is for."""
_forced: dict[str, Tile] = {}
_LEAST_ROWS = 16  # what a tensor core takes
_MOST_ROWS, _MOST_WARPS, _MOST_STAGES = 1024, 32, 16  # far beyond any candidate

logger = logging.getLogger("radixkv")


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
    return " ".join(map(str, (*parts, codec.config.page_size, sources.digest())))


def table_path() -> Path:
    """Where tuned entries are kept: RADIXKV_TILES, or a file in the cache folder."""
    named, *folders = map(os.environ.get, ("RADIXKV_TILES", "RADIXKV_CACHE_DIR", "XDG_CACHE_HOME"))
    return _table_path(named, *folders)


@cache  # looked up at each attention
def _table_path(named: str | None, *_folders: str | None) -> Path:
    return Path(named) if named else cache_dir() / FILE_NAME


def _parse_tile(fields: object) -> Tile:
    """The tile of one entry.

    Raises:
        ValueError, TypeError: it is none.
    """
    tile = Tile(**fields)  # type: ignore[arg-type]
    most = {
        "block_m": _MOST_ROWS,
        "block_n": _MOST_ROWS,
        "num_warps": _MOST_WARPS,
        "num_stages": _MOST_STAGES,
    }
    for name, value in asdict(tile).items():
        if type(value) is not int or not 1 <= value <= most[name]:
            raise ValueError(f"{name}: expected 1 to {most[name]}, got {value!r}")
        if name != "num_stages" and value & (value - 1):
            raise ValueError(f"{name}: expected a power of two, got {value}")
    if min(tile.block_m, tile.block_n) < _LEAST_ROWS:
        raise ValueError(f"block_m, block_n: expected at least {_LEAST_ROWS}, got {tile}")
    return tile


@cache
def _read_table(path: Path) -> dict[str, Tile]:
    """Tuned entries; what is damaged counts as none, and the log says so once."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): _parse_tile(fields) for key, fields in entries.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning(
            "%s: cannot be read (%s: %s); the shipped tiles are used. Tune again, or remove it",
            path,
            type(error).__name__,
            error,
        )
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

    Raises:
        RuntimeError: no tile runs on the device.
        OSError: the table cannot be written.

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
    path, key = table_path(), _key(kernel, codec, group, _device_name(device))
    _read_table.cache_clear()  # another process may have added to it
    entries = {**_read_table(path), key: best}
    newest = dict(list(entries.items())[-MAX_ENTRIES:])
    text = json.dumps({key: asdict(tile) for key, tile in newest.items()}, indent=1)
    write_whole(path, text.encode())
    _read_table.cache_clear()
    return best
