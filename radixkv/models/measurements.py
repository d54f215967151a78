"""What was measured of a model when it was loaded before, kept on disk for the next time.

A file for each model in `radixkv.disk.cache_dir`, named by all that a measurement
depends on: every byte of the weights, the configuration, the code that runs (this library's, and
the versions of the others), the processor. What is not as it was has another name, and is measured
anew. A file that cannot be read, or is not what was written, counts as none.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgpack
import torch
import xxhash
from torch import nn

from radixkv import machine
from radixkv.disk import cache_dir, write_whole
from radixkv.models.fingerprint import fingerprint
from radixkv_kernels import sources

FOLDER_NAME = "measured"
MAX_FILES = 32
_WORTH_BYTES = 1 << 26  # of weights: less is measured as soon as it is read
_HOMES = ("torch.", "transformers.", "radixkv.")  # whose code is known by its version or bytes
_LIBRARY = Path(__file__).resolve().parent.parent
_PACKAGES = ("transformers", "numba", "llvmlite", "numpy", "triton")
_SETTINGS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_OPT")

logger = logging.getLogger("radixkv")


class Measures:
    """Names and values, kept where ``path`` says; kept nowhere if that is None."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._values: dict[str, bytes] = {} if path is None else _read(path)

    @classmethod
    def of(cls, model: nn.Module) -> Measures:
        """The measurements of ``model`` as it is now; not kept if it is small or runs others' code.

        Complexity: reads all weights once.
        """
        if sum(p.nbytes for p in model.parameters()) < _WORTH_BYTES or not _is_plain(model):
            return cls()
        return cls(cache_dir() / FOLDER_NAME / f"{_name(model)}.msgpack")

    def get(self, name: str) -> bytes | None:
        """What was put under ``name``."""
        return self._values.get(name)

    def put(self, name: str, value: bytes) -> None:
        """Keep ``value``; where the disk does not take it, for this process only."""
        self._values[name] = value
        if self._path is None:
            return
        content = msgpack.packb(self._values)
        try:
            write_whole(self._path, xxhash.xxh3_128_digest(content) + content)
            _drop_oldest(self._path.parent)
        except OSError as error:
            logger.warning(
                "%s: cannot be written (%s); measured again next time", self._path, error
            )


def _is_plain(model: nn.Module) -> bool:
    """Whether all modules run code of torch and transformers as it came, nothing hooked in."""
    return all(
        type(module).__module__.startswith(_HOMES)
        and type(module).forward.__module__.startswith(_HOMES)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and "forward" not in _put_by_others(module)
        for module in model.modules()
    )


def _put_by_others(module: nn.Module) -> dict[str, Any]:
    # This library puts a forward of its own into layers that it knows.
    return {
        name: value
        for name, value in module.__dict__.items()
        if not getattr(value, "__module__", "").startswith("radixkv")
    }


def _name(model: nn.Module) -> str:
    """One name for all that a measurement of ``model`` depends on."""
    digest = xxhash.xxh3_128(json.dumps(fingerprint(model), sort_keys=True).encode())
    digest.update(sources.digest_of(_LIBRARY, sources.FOLDER).encode())
    digest.update(repr(_surroundings(model)).encode())
    return digest.hexdigest()


def _surroundings(model: Any) -> list[Any]:
    return [
        model.config._attn_implementation,
        sys.version,
        platform.platform(),
        machine.processor_parts(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        [os.environ.get(setting) for setting in _SETTINGS],
        [_version(package) for package in _PACKAGES],
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read(path: Path) -> dict[str, bytes]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("%s: cannot be read (%s); measuring again", path, error)
        return {}
    if xxhash.xxh3_128_digest(content[16:]) != content[:16]:
        logger.warning("%s: is damaged; measuring again", path)
        return {}
    values: dict[str, bytes] = msgpack.unpackb(content[16:])
    return values


def _drop_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.msgpack"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MAX_FILES]:
        with suppress(OSError):  # another process was sooner
            file.unlink()
