"""An embedded radix-tree prefix cache with quantized KV pages, and an engine on top of it.

Names load on first use, so that ``import radixkv`` pulls in neither transformers nor any
kernel compiler, and the tree can be used without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "BeamParams": "config",
    "KVConfig": "config",
    "SamplingParams": "config",
    "CacheInvariantError": "errors",
    "CapacityError": "errors",
    "ContextLengthError": "errors",
    "EngineClosedError": "errors",
    "NonFiniteError": "errors",
    "RadixKVError": "errors",
    "SnapshotError": "errors",
    "UnsupportedModelError": "errors",
    "RadixTree": "radix",
    "KVSpec": "quant",
    "CacheStats": "cache",
    "Lease": "cache",
    "Pin": "cache",
    "PrefixCache": "cache",
    "Branch": "branch",
    "Delta": "request",
    "Engine": "engine",
    "EngineStats": "stats",
    "Request": "request",
    "Result": "request",
    "Sample": "request",
    "Score": "request",
}

__version__ = "0.1.0"
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"radixkv.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if TYPE_CHECKING:
    from radixkv.branch import Branch as Branch
    from radixkv.cache import CacheStats as CacheStats
    from radixkv.cache import Lease as Lease
    from radixkv.cache import Pin as Pin
    from radixkv.cache import PrefixCache as PrefixCache
    from radixkv.config import BeamParams as BeamParams
    from radixkv.config import KVConfig as KVConfig
    from radixkv.config import SamplingParams as SamplingParams
    from radixkv.engine import Engine as Engine
    from radixkv.errors import CacheInvariantError as CacheInvariantError
    from radixkv.errors import CapacityError as CapacityError
    from radixkv.errors import ContextLengthError as ContextLengthError
    from radixkv.errors import EngineClosedError as EngineClosedError
    from radixkv.errors import NonFiniteError as NonFiniteError
    from radixkv.errors import RadixKVError as RadixKVError
    from radixkv.errors import SnapshotError as SnapshotError
    from radixkv.errors import UnsupportedModelError as UnsupportedModelError
    from radixkv.quant import KVSpec as KVSpec
    from radixkv.radix import RadixTree as RadixTree
    from radixkv.request import Delta as Delta
    from radixkv.request import Request as Request
    from radixkv.request import Result as Result
    from radixkv.request import Sample as Sample
    from radixkv.request import Score as Score
    from radixkv.stats import EngineStats as EngineStats
