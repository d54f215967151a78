"""A model is tried past every border at which it could change, in itself or in a small twin.

Any whole number of a config may be a window, a chunk, a top k, or a length at which RoPE
changes. Masks and RoPE are asked directly, at any distance
(`radixkv.models.probe.examine`); what a model does besides shows only when it runs past the number.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from radixkv.models.measurements import Measures
from radixkv.models.positions import config_ints
from radixkv.models.probe import Findings, Runner, try_past_borders
from radixkv.models.support import refuse
from radixkv.models.twin import IDS, twin_of

SELF_TEST_TOKENS = 12  # windows up to this length less one are exercised by the self test
_BEYOND = 8  # tokens that a run goes past the last border
_NEAR = 400  # tokens of a model's own run at most
_NEAR_PRODUCTS = 3e8  # parameters times tokens of it: it must not be felt in a load
_TWIN_PRODUCTS = 1e9
_TWIN_TOKENS = 140  # at least: what is no size of a twin lies within

logger = logging.getLogger("radixkv")

# What has passed: of a model the state it was in, of twins the config.
_tried: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_tried_twins: set[str] = set()


def borders_of(config: Any, limit: int | None) -> dict[str, int]:
    """Numbers of ``config`` that could be borders below ``limit`` and beyond the self test."""
    return {
        name: n
        for name, n in config_ints(config).items()
        if n >= SELF_TEST_TOKENS
        and (limit is None or n < limit)
        and "vocab" not in name
        and not IDS.search(name)
    }


def try_borders(
    runner: Runner,
    findings: Findings,
    serve: Callable[[Any], tuple[Runner, Findings]],
    measures: Callable[[], Measures] | None,
) -> None:
    """Try ``runner``'s model past its borders, once for each state that it is in.

    Args:
        serve: makes a runner of a twin.
        measures: where the outcome is kept; None keeps it in this process alone.
    Raises:
        UnsupportedModelError: beyond a border it is not served rightly, or that cannot be shown.
    """
    model, limit = runner.model, findings.max_positions
    borders = borders_of(model.config, limit)
    state = _state(model)
    if not (borders or findings.has_own_masks) or _tried.get(model) == state:
        return
    near = _run_length(runner, findings, borders)
    if near:
        try_past_borders(runner, near)
    far = {name: n for name, n in borders.items() if n >= near}
    if far:
        _try_twin(runner, findings, far, serve, measures)
    _tried[model] = state


def _run_length(runner: Runner, findings: Findings, borders: dict[str, int]) -> int:
    """Tokens of a run of the model itself; 0 if even the nearest border is too far."""
    if runner.device.type != "cpu" or runner.spec.dtype != torch.float32:
        return 0
    limit = findings.max_positions
    parameters = sum(p.numel() for p in runner.model.parameters())
    most = min(_NEAR, int(_NEAR_PRODUCTS / max(parameters, 1)))
    if findings.has_own_masks:  # whose border the config need not name
        most = most if limit is None else min(most, limit)
        return most if most > SELF_TEST_TOKENS else 0
    return _past(borders, limit, most)


def _past(borders: dict[str, int], limit: int | None, most: int) -> int:
    """How many tokens go past as many of ``borders`` as ``most`` tokens can."""
    reached = [n for n in borders.values() if n < most]
    if not reached:
        return 0
    return min(max(reached) + _BEYOND, most, most if limit is None else limit)


def _try_twin(
    runner: Runner,
    findings: Findings,
    far: dict[str, int],
    serve: Callable[[Any], tuple[Runner, Findings]],
    measures: Callable[[], Measures] | None,
) -> None:
    model, limit = runner.model, findings.max_positions
    whole = getattr(model, "get_base_model", lambda: model)()
    attention = whole.config._attn_implementation.removeprefix("radixkv_")
    name = f"{type(whole).__module__}.{type(whole).__qualname__} {attention} {limit} " + _as_text(
        whole.config
    )
    if name in _tried_twins:
        return
    kept = measures() if measures is not None else Measures()
    if kept.get("borders") is None:
        twin = twin_of(type(whole), whole.config, limit, attention)
        if twin is not None:
            _run_twin(*serve(twin), whole.config)
        elif findings.has_own_masks:
            raise refuse(
                model,
                f"its layers attend under masks that it makes itself, and what they show beyond "
                f"{', '.join(f'{path}={n}' for path, n in far.items())} cannot be tried",
                "this engine serves causal attention over all tokens before, or a window of them",
            )
        else:
            logger.info("%s: no small twin could be made of it", type(model).__name__)
        kept.put("borders", b"tried")
    _tried_twins.add(name)


def _run_twin(runner: Runner, findings: Findings, names: Any = None) -> None:
    limit = findings.max_positions
    borders = borders_of(runner.model.config, limit)
    parameters = sum(p.numel() for p in runner.model.parameters())
    most = max(_TWIN_TOKENS, int(_TWIN_PRODUCTS / max(parameters, 1)))
    num_tokens = _past(borders, limit, most)
    if num_tokens:
        try_past_borders(runner, num_tokens, names)


def _state(model: Any) -> str:
    """What decides how ``model`` runs, but for its weights."""
    code = [(id(type(module).forward), _own_forward(module)) for module in model.modules()]
    return f"{hash(tuple(code))} {_as_text(model.config)}"


def _own_forward(module: torch.nn.Module) -> int:
    """A forward that somebody put into ``module``; what this library puts there is none."""
    forward = module.__dict__.get("forward")
    return 0 if getattr(forward, "__module__", "").startswith("radixkv") else id(forward)


def _as_text(config: Any) -> str:
    return json.dumps(config.to_dict(), default=str, sort_keys=True)
