"""Models whose layers a quantizer has replaced: which layers, and how such a model runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Packages whose layers multiply by something else than a tensor of floats.
_QUANTIZERS = (
    "aqlm.", "auto_gptq.", "awq.", "bitsandbytes.", "compressed_tensors.", "eetq.", "gptqmodel.",
    "hqq.", "optimum.", "torch.ao.", "torchao.", "transformers.integrations.",
)  # fmt: skip


def quantized_kinds(model: nn.Module) -> list[str]:
    """Names of the kinds of layers and weights that a quantizer has put into ``model``.

    >>> quantized_kinds(nn.Linear(2, 2))
    []
    """
    kinds: set[type] = set()
    for module in model.modules():
        if f"{type(module).__module__}.".startswith(_QUANTIZERS):
            kinds.add(type(module))
        weights = (one for one in module._parameters.values() if one is not None)
        kinds.update(type(one) for one in weights if type(one) not in (Tensor, nn.Parameter))
    return sorted(f"{_home(kind)}'s {kind.__qualname__}" for kind in kinds)


def _home(kind: type) -> str:
    parts = kind.__module__.split(".")
    return ".".join(parts[: 2 if parts[0] in ("torch", "transformers") else 1])


def makes_views(model: nn.Module) -> bool:
    """Whether weights are tensors of a quantizer's own, which make views of themselves."""
    return any(map(is_traceable_wrapper_subclass, model.parameters()))


def quiet(*, has_views: bool) -> AbstractContextManager[object]:
    """Within this block passes of a model record nothing for gradients.

    Inference mode is the fastest way to that; what `makes_views` finds does not go with it.
    """
    if not has_views:
        return torch.inference_mode()
    both = ExitStack()
    both.enter_context(torch.inference_mode(False))
    both.enter_context(torch.no_grad())
    return both
