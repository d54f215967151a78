"""A small twin of a model: the same classes, small numbers in its config, random weights.

Where a number of the config changes something (a window, a length), that lies thousands of tokens
away in a large model and a few in its twin. So a trial past it takes a tenth of a second.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from torch import nn

from radixkv.errors import RadixKVError

MAX_PARAMETERS = 30_000_000
_VOCAB = 997
_POSITIONS = 1024  # of a twin; more than its longest run
_LAYERS = 6  # kept at least: what comes every so many layers, or after the first few
_EXPERTS = (8, 32, None)  # at most; groups of them must not become too small
_NEAR, _FAR = 24, 64  # where numbers are brought that lie beyond the second
_SCALES = (16, 32, 64, 8, 4, 2, 1)
_SMALL = 32  # numbers below this stay: heads, groups, kernels, intervals
# Names tell what makes no sense when it is divided; what could be a border is told by none.
_COUNTS = re.compile(r"heads|n_head|(layers?|groups?|interval|pattern|blocks)$|^n_layer")
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
    large = 0
    for scale in _SCALES:
        if scale < large:
            continue
        for experts in _EXPERTS:
            for layers in (_LAYERS, None):
                with suppress(Exception):  # a config that does not work is not the twin
                    small = shrunk(config, limit, scale, experts, layers)
                    if sum(map(math.prod, _shapes(kind, small).values())) > MAX_PARAMETERS:
                        large = max(large, scale if experts is not None else 0)
                        continue
                    for chosen in (_nearer(kind, small, config, limit), small):
                        with suppress(Exception):
                            chosen._attn_implementation = attention
                            return _made(kind, chosen)
    return None


def _shapes(kind: type[nn.Module], config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a model of ``config``, without making it."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in kind(config).named_parameters()}


def _nearer(kind: type[nn.Module], config: Any, original: Any, limit: int | None) -> Any:
    """``config`` with numbers that are no sizes brought near: what does not change any shape.

    Those that lie beyond the last position in ``original`` are put there again.
    """
    whole, shapes = _as_dict(config), _shapes(kind, config)
    known = {path: n for path, _, _, n in _numbers(_as_dict(original), ())}
    near = count(_NEAR)
    for path, holder, name, n in list(_numbers(whole, ())):
        is_beyond = limit is not None and known.get(path, 0) >= limit
        if _PLACES.search(name) or _COUNTS.search(name) or _is_name(name):
            continue
        if n <= _FAR and not is_beyond:
            continue
        holder[name] = _POSITIONS if is_beyond else next(near)
        try:
            fits = _shapes(kind, type(config).from_dict(copy.deepcopy(whole))) == shapes
        except Exception:  # a number that goes with another
            fits = False
        if not fits:
            holder[name] = n
    return type(config).from_dict(whole)


def _is_name(name: str) -> bool:
    return "vocab" in name or IDS.search(name) is not None


def _numbers(
    values: dict[str, Any], outer: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], str, int]]:
    """Every whole number of nested dicts: its path, the dict that has it, the key, the number."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, (*outer, str(name)))
        elif type(value) is int and value > 1:
            yield (*outer, str(name)), values, name, value


def _as_dict(config: Any) -> dict[str, Any]:
    whole: dict[str, Any] = copy.deepcopy(config.to_dict())
    for name in _DROPPED:
        whole.pop(name, None)
    return whole


def shrunk(
    config: Any, limit: int | None, scale: int, experts: int | None, layers: int | None
) -> Any:
    """``config`` with widths divided by ``scale``, at most so many experts and layers."""
    return type(config).from_dict(_shrunk(_as_dict(config), limit, scale, experts, layers))


def _shrunk(
    values: Mapping[str, Any],
    limit: int | None,
    scale: int,
    experts: int | None,
    layers: int | None,
) -> dict[str, Any]:
    total = next((values[k] for k in _layer_counts(values)), None)
    kept = _kept_layers(values, total, layers) if isinstance(total, int) else None

    def number(name: str, n: int) -> int:
        if isinstance(n, bool) or (n < _SMALL and not IDS.search(name)):
            if kept is not None and name in _LAYER_COUNTS and n == total:
                return kept
            return n
        if IDS.search(name):
            return n if n < _VOCAB else n % 89 + 3
        if "vocab" in name:
            return min(n, _VOCAB)
        if kept is not None and name in _LAYER_COUNTS and n == total:
            return kept
        if "expert" in name and "size" not in name and "dim" not in name:
            return n if experts is None else min(n, experts)
        if _COUNTS.search(name):
            return n
        if _PLACES.search(name) and (limit is None or n >= limit):
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
            if kept is not None and len(cut) == total:
                cut = cut[:kept]
            if cut and all(type(n) is int and n % scale == 0 for n in cut) and max(cut) >= 16:
                kept_so = IDS.search(name) or _COUNTS.search(name)
                return cut if kept_so else [n // scale for n in cut]
            return [anything(name, inner) for inner in cut]
        if isinstance(value, float) and value.is_integer() and _PLACES.search(name):
            return float(number(name, int(value)))
        return value

    return {name: anything(name, value) for name, value in values.items()}


_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


def _layer_counts(values: Mapping[str, Any]) -> Iterator[str]:
    return (name for name in _LAYER_COUNTS if isinstance(values.get(name), int))


def _kept_layers(values: Mapping[str, Any], total: int, layers: int | None) -> int:
    """How many of the first layers have every kind that the lists by layer name."""
    if layers is None:
        return total
    kept = min(total, layers)
    for value in values.values():
        if isinstance(value, list | tuple) and len(value) == total:
            names = [repr(kind) for kind in value]
            kept = max(kept, *(names.index(kind) + 1 for kind in set(names)))
    return kept


def _made(kind: type[nn.Module], config: Any) -> Any:
    """A model of ``config`` with spread weights, which has run."""
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
