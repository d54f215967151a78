"""A small twin of a model: the same classes and config with every number small, random weights.

What a config's numbers could change lies far away in a large model, and near in its twin: a run
that no load could afford takes a tenth of a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from radixkv.errors import RadixKVError

MAX_PARAMETERS = 20_000_000
_VOCAB = 997
_POSITIONS = 1024  # of a twin; more than its longest run
_LAYERS = 6  # kept at least: what comes every so many layers, or after the first few
_EXPERTS = 8
_SCALES = (16, 8, 4, 2, 1)
_SMALL = 32  # numbers below this stay: heads, groups, kernels, intervals
# Names tell what makes no sense when it is divided; what could be a border is told by none.
_COUNTS = re.compile(r"(heads|head|layers?|groups?|interval|pattern|blocks)$|^n_layer|_head_kv$")
IDS = re.compile(r"token_id|_ids?$|_index(es)?$|_idxs?$|_indices$")
_PLACES = re.compile(r"position|max_seq|seq_len|context_len|n_ctx|model_max")
_DROPPED = (
    "quantization_config",
    "torch_dtype",
    "dtype",
    "architectures",
    "transformers_version",
    "_name_or_path",
    "_attn_implementation",
)


def twin_of(kind: type[nn.Module], config: Any, limit: int | None, attention: str) -> Any:
    """A twin of a model of class ``kind`` with ``config``, in float32 on the CPU.

    Args:
        limit: positions at which the model is served; numbers from there on are no borders.
        attention: its native attention implementation.
    Returns:
        The twin in eval mode; None if no smaller config of the class works.

    The random state of torch is as it was.
    """
    for scale in _SCALES:
        for experts in (_EXPERTS, None):
            for layers in (_LAYERS, None):
                with suppress(Exception):  # a config that does not work is not the twin
                    small = shrunk(config, limit, scale, experts, layers)
                    small._attn_implementation = attention
                    twin = _made(kind, small)
                    if twin is not None:
                        return twin
    return None


def shrunk(
    config: Any, limit: int | None, scale: int, experts: int | None, layers: int | None
) -> Any:
    """``config`` with widths divided by ``scale``, at most so many experts and layers."""
    whole = config.to_dict()
    for name in _DROPPED:
        whole.pop(name, None)
    return type(config).from_dict(_shrunk(whole, limit, scale, experts, layers))


def _shrunk(
    values: Mapping[str, Any],
    limit: int | None,
    scale: int,
    experts: int | None,
    layers: int | None,
) -> dict[str, Any]:
    count = next((values[k] for k in _layer_counts(values)), None)
    kept = _kept_layers(values, count, layers) if isinstance(count, int) else None

    def number(name: str, n: int) -> int:
        if isinstance(n, bool) or (n < _SMALL and not IDS.search(name)):
            if kept is not None and name in _LAYER_COUNTS and n == count:
                return kept
            return n
        if IDS.search(name):
            return n if n < _VOCAB else n % 89 + 3
        if "vocab" in name:
            return min(n, _VOCAB)
        if kept is not None and name in _LAYER_COUNTS and n == count:
            return kept
        if "expert" in name and "size" not in name and "dim" not in name:
            return n if experts is None else min(n, experts)
        if _COUNTS.search(name):
            return n
        if _PLACES.search(name) and (limit is None or n >= limit):
            return _POSITIONS
        if limit is not None and n == limit:
            return _POSITIONS
        return n // scale if n % scale == 0 else n

    def anything(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _shrunk(value, limit, scale, experts, layers)
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return number(name, value)
        if isinstance(value, list | tuple):
            cut = list(value)
            if kept is not None and len(cut) == count:
                cut = cut[:kept]
            if cut and all(type(n) is int and n % scale == 0 for n in cut) and max(cut) >= 16:
                return cut if IDS.search(name) else [n // scale for n in cut]
            return [anything(name, inner) for inner in cut]
        if isinstance(value, float) and value.is_integer() and _PLACES.search(name):
            return float(number(name, int(value)))
        return value

    return {name: anything(name, value) for name, value in values.items()}


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def _layer_counts(values: Mapping[str, Any]) -> Iterator[str]:
    return (name for name in _LAYER_COUNTS if isinstance(values.get(name), int))


def _kept_layers(values: Mapping[str, Any], count: int, layers: int | None) -> int:
    """How many of the first layers have every kind that the lists by layer name."""
    if layers is None:
        return count
    kept = min(count, layers)
    for value in values.values():
        if isinstance(value, list | tuple) and len(value) == count:
            names = [repr(kind) for kind in value]
            kept = max(kept, *(names.index(kind) + 1 for kind in set(names)))
    return kept


def _made(kind: type[nn.Module], config: Any) -> Any:
    """A model of ``config`` with spread weights that runs; None if it is large."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > MAX_PARAMETERS:
        return None
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(0)
        twin: Any = kind(config).float().eval()
        for parameter in twin.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=min(0.15, 1.5 / parameter.shape[-1] ** 0.5))
            elif parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape), alpha=0.05)
        logits = twin(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False).logits
        if not bool(logits.isfinite().any()):
            raise RadixKVError("twin: expected finite logits")
    return twin
