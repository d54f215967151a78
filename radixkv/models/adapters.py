"""Which of peft's adapters are active in a model, and whether that changes during a step."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn


def is_adapted(module: nn.Module) -> bool:
    """Whether ``module`` is a layer that peft has put around another."""
    return "_active_adapter" in module.__dict__ or hasattr(type(module), "_active_adapter")


def adapter_state(place: dict[str, Any]) -> tuple[Any, ...]:
    """Of an adapted layer's ``__dict__``: which adapters are active, and how much."""
    get = place.get
    active, merged, scaling = get("_active_adapter"), get("merged_adapters"), get("scaling")
    return (
        active if isinstance(active, str) else tuple(active or ()),
        get("_disable_adapters", False),
        tuple(merged) if merged else (),
        tuple(scaling.items()) if isinstance(scaling, dict) else scaling,
    )


class AdapterGuard:
    """The forward of an adapted layer, which notes whether its adapters were switched meanwhile.

    Attributes:
        switches: how often they were when it was called, since it was made.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.switches = 0
        self.begin()

    def begin(self) -> None:
        """A step begins with the adapters that are on now."""
        self._seen = adapter_state(self._layer.__dict__)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """As the layer's own forward."""
        layer = self._layer
        state = adapter_state(layer.__dict__)
        if state != self._seen:
            self.switches += 1
            self._seen = state
        return type(layer).forward(layer, *args, **keywords)

    def __reduce__(self) -> Any:
        return partial, (type(self._layer).forward, self._layer)
