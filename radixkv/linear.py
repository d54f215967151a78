"""Linear layers whose rows do not feel their neighbours, for float32 models on a CPU.

A library's matrix product takes other kernels at 1 row than at 40, and these add in another
order. With quantized KV the difference in the last bit becomes a whole step between two codes
now and then, which later layers amplify: a result would depend on what else is in the batch.
The compiled kernel adds every row in one order, whatever their number, and reads the weights
where the checkpoint put them (``radixkv_kernels.cpu.linear``).

Activations are here too: torch computes the last elements of a tensor, and of each thread's
part of it, by other code than the rest.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_VECTOR_LOOP = 32  # elements that torch's widest vector loop takes at once
_GRAIN = 32768  # elements below which torch gives a tensor to one thread
_NEEDS = ("numba", "radixkv_kernels")


@cache
def linear_kernels() -> Any:
    """The compiled kernels' module; None where Numba or the kernels are not installed."""
    if not all(map(importlib.util.find_spec, _NEEDS)):
        return None
    from radixkv_kernels.cpu import linear  # here, because it loads Numba

    return linear


def can_multiply(weight: Tensor) -> bool:
    """Whether the kernel can read ``weight``: a float32 matrix on a CPU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() > 0
        and type(weight) in (Tensor, nn.Parameter)
        and linear_kernels() is not None
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
    out = torch.empty(num_rows, num_outputs, dtype=torch.float32, device="cpu")
    if num_rows:
        linear_kernels().multiply(
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
