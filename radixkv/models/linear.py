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
from functools import cache, partial
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


def can_multiply(weight: Any) -> bool:
    """Whether the kernel can read ``weight``: a float32 matrix on a CPU."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() > 0
        and linear_kernels() is not None
    )


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Products of rows with a layer's weights; a row's bits do not feel the other rows.

    Args:
        rows: [num_rows, inputs] float32.
        weight: [outputs, inputs] float32, as `can_multiply` wants it; read where it lies if it
            is contiguous, or the transpose of what is (a ``Conv1D``'s).
        bias: [outputs] float32.
    Returns:
        [num_rows, outputs] float32, without gradients.

    Accuracy: relative error of a sum at most inputs / LANES + log2(LANES) roundings, of a
    transpose's 256 + inputs / 256: less than that of adding in order.
    """
    num_rows, (num_outputs, num_inputs) = rows.shape[0], weight.shape
    lies_across = not weight.is_contiguous() and weight.t().is_contiguous()
    rows, weight = rows.contiguous(), weight if lies_across else weight.contiguous()
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
            lies_across=lies_across,
        )
    return out


class BatchInvariantLinear:
    """The forward of an ``nn.Linear`` or a ``Conv1D`` whose rows do not feel their neighbours.

    The layer stays the model's own: this stands in it for its forward, while an engine runs a
    step (`radixkv.models.hold`). With gradients, in another dtype, on another device, or with
    weights that are no plain tensors (a parametrization's, a quantizer's) the layer's own runs.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._is_transposed = not isinstance(layer, nn.Linear)

    def __call__(self, x: Tensor) -> Tensor:
        """As the layer's own forward."""
        parameters = self._layer._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (
            type(weight) is not nn.Parameter
            or x.dtype is not torch.float32
            or weight.dtype is not torch.float32
            or not (x.is_cpu and weight.is_cpu)
            or "bias" not in parameters  # it is computed, by pruning or a parametrization
            or torch.compiler.is_compiling()
            or (torch.is_grad_enabled() and self._grows(x))
        ):
            own: Tensor = type(self._layer).forward(self._layer, x)
            return own
        if self._is_transposed:
            weight = weight.t()  # type: ignore[assignment]
        num_outputs, num_inputs = weight.shape
        if x.shape[-1] != num_inputs:
            raise RuntimeError(
                f"{type(self._layer).__name__}: expected rows of {num_inputs}, got {x.shape[-1]}; "
                f"was a layer of another width put into the model?"
            )
        return multiply(x.reshape(-1, num_inputs), weight, bias).view(*x.shape[:-1], num_outputs)

    def _grows(self, x: Tensor) -> bool:
        return x.requires_grad or any(one.requires_grad for one in self._layer.parameters())

    def __reduce__(self) -> Any:
        # A copy's layer runs its own forward: an engine's hold ends with its process.
        return partial, (type(self._layer).forward, self._layer)


class BatchInvariantActivation:
    """The forward of an elementwise activation where an element's place never changes its bits.

    The tensor is padded where a vector loop, or a thread's part, would end inside a row.

    Args:
        plain: an elementwise module without state.
    """

    def __init__(self, plain: nn.Module) -> None:
        self._plain = plain

    def __call__(self, x: Tensor) -> Tensor:
        """As the plain activation's."""
        width = x.shape[-1]
        padded_width = -(-width // _VECTOR_LOOP) * _VECTOR_LOOP
        num_rows = x.numel() // width if width else 0
        if not num_rows or x.device.type != "cpu" or torch.compiler.is_compiling():
            return self._own(x)
        padded_rows = _even_rows(num_rows, padded_width, torch.get_num_threads())
        if (padded_rows, padded_width) == (num_rows, width):
            return self._own(x.contiguous())
        rows = x.reshape(num_rows, width)
        padded = F.pad(rows, (0, padded_width - width, 0, padded_rows - num_rows))
        return self._own(padded)[:num_rows, :width].reshape(x.shape)

    def _own(self, x: Tensor) -> Tensor:
        own: Tensor = type(self._plain).forward(self._plain, x)
        return own

    def __reduce__(self) -> Any:
        return partial, (type(self._plain).forward, self._plain)


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
