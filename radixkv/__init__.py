"""An embedded radix-tree prefix cache with quantized KV pages, and an engine on top of it.

Names load on first use, so that ``import radixkv`` pulls in neither transformers nor any
kernel compiler, and the tree can be used without torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from radixkv.version import __version__ as __version__

# What is said goes to the logger "radixkv"; where nobody listens, nothing is written to stderr.
logging.getLogger("radixkv").addHandler(logging.NullHandler())

_HOME = {
    "BeamParams": "config",
    "KVConfig": "config",
    "KVDtype": "config",
    "SamplingFields": "config",
    "SamplingParams": "config",
    "CacheInvariantError": "errors",
    "CapacityError": "errors",
    "ContextLengthError": "errors",
    "EngineClosedError": "errors",
    "NonFiniteError": "errors",
    "RadixKVError": "errors",
    "SnapshotError": "errors",
    "UnsupportedModelError": "errors",
    "Chat": "text.prompts",
    "Prompt": "text.prompts",
    "TokenIds": "text.prompts",
    "RadixTree": "cache.tree",
    "KVSpec": "attention.layout",
    "CacheStats": "cache.stats",
    "Lease": "cache.lease",
    "Pin": "cache.pin",
    "PrefixCache": "cache.prefix_cache",
    "Branch": "engine.branch",
    "Delta": "engine.results",
    "Engine": "engine.engine",
    "EngineStats": "engine.stats",
    "FinishReason": "engine.results",
    "Request": "engine.request",
    "Result": "engine.results",
    "Sample": "engine.results",
    "Score": "engine.results",
}

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
    from radixkv.attention.layout import KVSpec as KVSpec
    from radixkv.cache.lease import Lease as Lease
    from radixkv.cache.pin import Pin as Pin
    from radixkv.cache.prefix_cache import PrefixCache as PrefixCache
    from radixkv.cache.stats import CacheStats as CacheStats
    from radixkv.cache.tree import RadixTree as RadixTree
    from radixkv.config import BeamParams as BeamParams
    from radixkv.config import KVConfig as KVConfig
    from radixkv.config import KVDtype as KVDtype
    from radixkv.config import SamplingFields as SamplingFields
    from radixkv.config import SamplingParams as SamplingParams
    from radixkv.engine.branch import Branch as Branch
    from radixkv.engine.engine import Engine as Engine
    from radixkv.engine.request import Request as Request
    from radixkv.engine.results import Delta as Delta
    from radixkv.engine.results import FinishReason as FinishReason
    from radixkv.engine.results import Result as Result
    from radixkv.engine.results import Sample as Sample
    from radixkv.engine.results import Score as Score
    from radixkv.engine.stats import EngineStats as EngineStats
    from radixkv.errors import CacheInvariantError as CacheInvariantError
    from radixkv.errors import CapacityError as CapacityError
    from radixkv.errors import ContextLengthError as ContextLengthError
    from radixkv.errors import EngineClosedError as EngineClosedError
    from radixkv.errors import NonFiniteError as NonFiniteError
    from radixkv.errors import RadixKVError as RadixKVError
    from radixkv.errors import SnapshotError as SnapshotError
    from radixkv.errors import UnsupportedModelError as UnsupportedModelError
    from radixkv.text.prompts import Chat as Chat
    from radixkv.text.prompts import Prompt as Prompt
    from radixkv.text.prompts import TokenIds as TokenIds
