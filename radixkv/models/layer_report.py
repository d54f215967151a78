"""Which of a model's layers run as two compiled calls, and why the others do not."""

from __future__ import annotations

from typing import Any

from torch import nn

from radixkv.models.decoder_layer import why_not_fused


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that hold attention, in their order: what a step could run fused."""
    modules = dict(model.named_modules())
    found: dict[int, nn.Module] = {}
    for name, module in modules.items():
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or layer_idx in found:
            continue
        parent = modules[name.rpartition(".")[0]]
        # Some families number the layer itself, most the attention in it.
        found[layer_idx] = module if isinstance(parent, nn.ModuleList) else parent
    return [found[layer_idx] for layer_idx in sorted(found)]


def unfused_layers(model: nn.Module) -> tuple[int, list[dict[str, Any]]]:
    """How many layers there are; those that run as transformers runs them, by the reason.

    Call it between steps. Each group is ``{"layers": [numbers], "why": reason}``.
    """
    layers = decoder_layers(model)
    groups: dict[str, list[int]] = {}
    for number, layer in enumerate(layers):
        why = why_not_fused(layer)
        if why:
            groups.setdefault(why, []).append(number)
    return len(layers), [{"layers": numbers, "why": why} for why, numbers in groups.items()]
