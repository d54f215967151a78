"""Linear layers whose rows do not feel their neighbours, for float32 models on a CPU.

A library's matrix product takes other kernels at 1 row than at 40, and these add in another
order. With quantized KV the difference in the last bit becomes a whole step between two codes
now and then, which later layers amplify: a result would depend on what else is in the batch.
The compiled kernel adds every row in one order, whatever their number, and reads the weights
where the checkpoint put them (``radixkv_kernels.linear``).

Activations are here too: torch computes the last elements of a tensor, and of each thread's
part of it, by other code than the rest.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_VECTOR_LOOP = 32  # elements that torch's widest vector loop takes at once
_GRAIN = 32768  # elements below which torch gives a tensor to one thread
_NEEDS = ("numba", "radixkv_kernels")


@cache
def _kernels() -> Any:
    """The compiled kernel's module; None where Numba or the kernels are not installed."""
    if not all(map(importlib.util.find_spec, _NEEDS)):
        return None
    from radixkv_kernels import linear  # here, because it loads Numba

    return linear


def can_multiply(weight: Tensor) -> bool:
    """Whether the kernel can read ``weight``: a float32 matrix on a CPU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() > 0
        and type(weight) in (Tensor, nn.Parameter)
        and _kernels() is not None
    )


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Products of rows with a layer's weights; a row's bits do not feel the other rows.

    Args:
        rows: [num_rows, inputs] float32.
        weight: [outputs, inputs] float32, as `can_multiply` wants it.
        bias: [outputs] float32.
    Returns:
        [num_rows, outputs] float32, without gradients.

    Accuracy: relative error of a sum at most inputs / LANES + log2(LANES) roundings, less than
    that of adding in order.
    """
    num_rows, (num_outputs, num_inputs) = rows.shape[0], weight.shape
    rows, weight = rows.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty(num_rows, num_outputs)
    if num_rows:
        _kernels().multiply(
            rows.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            num_rows,
            num_outputs,
            num_inputs,
            torch.get_num_threads(),
        )
    return out


class SteadyLinear(nn.Module):
    """Stands in a model for an ``nn.Linear`` or a ``Conv1D``, and computes what it computes.

    It has the layer's own parameters; with gradients, or in another dtype or on another device,
    it does what the layer does.

    Args:
        plain: the layer. A ``Conv1D`` has its weights, [inputs, outputs], laid out anew in
            memory, so that an output's lie together; their values and shape stay.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.is_transposed = not isinstance(plain, nn.Linear)
        weight: nn.Parameter = plain.weight  # type: ignore[assignment]
        self.out_features, self.in_features = weight.shape
        if self.is_transposed:
            self.in_features, self.out_features = weight.shape
            weight.data = weight.data.t().contiguous().t()
        object.__setattr__(self, "plain", plain)  # not a child: its parameters are listed once
        self.register_parameter("weight", weight)
        self.register_parameter("bias", plain.bias)  # type: ignore[arg-type]
        self.train(plain.training)

    plain: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None

    def restore(self) -> nn.Module:
        """The plain layer, with the parameters that this one has now."""
        if self.is_transposed:
            self.weight.data = self.weight.data.contiguous()
        return self._plain_now()

    def _plain_now(self) -> nn.Module:
        self.plain.weight, self.plain.bias = self.weight, self.bias  # type: ignore[assignment]
        return self.plain.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """As the plain layer's."""
        parameters = self._parameters
        bias = parameters["bias"]
        weight: Tensor = parameters["weight"]  # type: ignore[assignment]
        if self.is_transposed:
            weight = weight.t()
        if (
            (torch.is_grad_enabled() and self._grows(x))
            or x.dtype is not torch.float32
            or weight.dtype is not torch.float32
            or not (x.is_cpu and weight.is_cpu)
        ):
            return F.linear(x, weight, bias)
        num_outputs, num_inputs = weight.shape
        return multiply(x.reshape(-1, num_inputs), weight, bias).view(*x.shape[:-1], num_outputs)

    def _grows(self, x: Tensor) -> bool:
        return x.requires_grad or any(one.requires_grad for one in self.parameters())

    def extra_repr(self) -> str:
        """Shapes, as ``nn.Linear`` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def __reduce__(self) -> Any:
        # Copies and pickles are plain layers: an engine's hold ends with its process.
        return _identity, (self._plain_now(),)


def _identity(module: nn.Module) -> nn.Module:
    return module


class SteadyActivation(nn.Module):
    """Calls an elementwise activation so that an element's place never changes its bits.

    The tensor is padded where a vector loop, or a thread's part, would end inside a row.

    Args:
        plain: an elementwise module without state.
    """

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "plain", plain)

    plain: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """As the plain activation's."""
        width = x.shape[-1]
        padded_width = -(-width // _VECTOR_LOOP) * _VECTOR_LOOP
        num_rows = x.numel() // width if width else 0
        if not num_rows or x.device.type != "cpu":
            return self.plain(x)  # type: ignore[no-any-return]
        padded_rows = _even_rows(num_rows, padded_width, torch.get_num_threads())
        if (padded_rows, padded_width) == (num_rows, width):
            return self.plain(x.contiguous())  # type: ignore[no-any-return]
        rows = x.reshape(num_rows, width)
        padded = F.pad(rows, (0, padded_width - width, 0, padded_rows - num_rows))
        out: Tensor = self.plain(padded)[:num_rows, :width]
        return out.reshape(x.shape)

    def restore(self) -> nn.Module:
        """The plain activation."""
        return self.plain

    def __reduce__(self) -> Any:
        return _identity, (self.plain,)


def _even_rows(num_rows: int, width: int, num_threads: int) -> int:
    """The least count, from ``num_rows`` on, that threads share in whole vector loops.

    ``width`` is a multiple of the loop. Most activations go to as many threads as there are
    grains; GELU goes to all of them from half a grain on.

    >>> _even_rows(333, 576, 2), _even_rows(333, 576, 4)
    (333, 334)
    """
    while True:
        numel = num_rows * width
        parts = min(num_threads, -(-numel // _GRAIN))
        all_parts = num_threads if numel > _GRAIN // 2 else 1
        if not (numel % (_VECTOR_LOOP * parts) or numel % (_VECTOR_LOOP * all_parts)):
            return num_rows
        num_rows += 1


class SteadyModel:
    """A model's layers replaced by those above, for as long as an engine holds it.

    Attributes:
        holders: how many uses of it have not ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self.holders = 0
        # Parents by weak reference: one of them is the model, which must not be kept alive.
        self._places: list[tuple[weakref.ref[nn.Module], str, SteadyLinear | SteadyActivation]] = []
        made: dict[nn.Module, SteadyLinear | SteadyActivation] = {}
        try:
            for parent, name, plain in list(_children(model)):
                if plain not in made:  # else one module in two places
                    if _is_linear(plain):
                        made[plain] = SteadyLinear(plain)
                    elif _is_activation(plain):
                        made[plain] = SteadyActivation(plain)
                    else:
                        continue
                parent._modules[name] = made[plain]
                self._places.append((weakref.ref(parent), name, made[plain]))
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Put the plain layers back."""
        for reference, name, layer in self._places:
            plain = layer.restore()
            parent = reference()
            if parent is not None and parent._modules.get(name) is layer:
                parent._modules[name] = plain
        self._places.clear()


_lock = threading.RLock()  # reentrant: a dropped engine may be collected while one is made
_models: weakref.WeakKeyDictionary[nn.Module, SteadyModel] = weakref.WeakKeyDictionary()


def steady(model: nn.Module) -> tuple[SteadyModel, Callable[[], None]]:
    """Replace what is in ``model`` by layers whose rows do not feel their neighbours.

    Engines on one model share the replaced layers.

    Returns:
        What was done, and the function that ends this use of it; after the last one the model
        has its own layers and weights again.
    """
    with _lock:
        held = _models.get(model)
        if held is None:
            held = _models[model] = SteadyModel(model)
        held.holders += 1
    released = False
    reference = weakref.ref(model)

    def release() -> None:
        nonlocal released
        with _lock:
            if released:
                return
            released = True
            held.holders -= 1
            if not held.holders:
                held.restore()
                owner = reference()
                if owner is not None:
                    _models.pop(owner, None)

    return held, release


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child


def _is_linear(module: nn.Module) -> bool:
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    kinds = (nn.Linear, getattr(pytorch_utils, "Conv1D", nn.Linear))
    # Subclasses, hooks and replaced forwards may do more than the product.
    return type(module) in kinds and _is_bare(module) and can_multiply(module.weight)  # type: ignore[arg-type]


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    known = home in ("transformers.activations", "torch.nn.modules.activation")
    stateless = not (module._parameters or module._buffers or module._modules)
    return known and stateless and _is_bare(module) and type(module) in _elementwise()


def _is_bare(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return not hooks and "forward" not in module.__dict__


def _elementwise() -> set[type]:
    kinds: set[type] = {nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.ReLU6}
    activations = sys.modules.get("transformers.activations")
    names = (
        "AccurateGELUActivation", "FastGELUActivation", "GELUActivation", "GELUTanh",
        "LaplaceActivation", "MishActivation", "NewGELUActivation", "QuickGELUActivation",
        "ReLUSquaredActivation", "SiLUActivation",
    )  # fmt: skip
    for name in names:
        kind = getattr(activations, name, None)
        if kind is not None:
            kinds.add(kind)
    return kinds
