"""Linear layers whose rows do not feel their neighbours, for float32 models on a CPU.

A plain matrix product takes other kernels at 1 row than at 40, and these add in another
order. With quantized KV the difference in the last bit becomes a whole step between two
codes now and then, which later layers amplify: a result would depend on what else is in the
batch. oneDNN's products over weights packed once add every row in one order, whatever their
number; this is measured for each shape of a model when it is packed, never assumed.

Packing replaces a layer's weights, so they are held once (a matrix that an embedding shares
stays as well). Activations are here too: torch computes the last elements of a tensor, and of
each thread's part of it, by other code than the rest.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

logger = logging.getLogger("radixkv")

# Row counts that are compared with each other when a shape is first packed.
_PROBE_ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 129, 256)
_PROBE_FLOPS = 2.0**33  # largest count of the above is cut to this many for large matrices
_VECTOR_LOOP = 32  # elements that torch's widest vector loop takes at once
_GRAIN = 32768  # elements below which torch gives a tensor to one thread


def can_pack(weight: Tensor) -> bool:
    """Whether products with ``weight`` can be packed here: float32, a CPU, oneDNN built in."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() > 0
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _product(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    return out


class _PackedProduct(torch.autograd.Function):
    """The product for callers outside of an engine who run with gradients on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parameter: Tensor, layer: PackedLinear) -> Tensor:
        # `parameter`, emptied, is an argument so that autograd comes by and hears of it.
        ctx.layer = layer
        return layer.product(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        layer = ctx.layer
        if layer.trains:
            raise RuntimeError(
                "gradients: this layer's weights are packed by an open radixkv.Engine; close the "
                "engine before training, or freeze the model before making the engine"
            )
        weight = layer.weight.t() if layer.is_transposed else layer.weight
        return grads[0] @ weight, None, None


class PackedLinear(nn.Module):
    """Stands in a model for an ``nn.Linear`` or a ``Conv1D``, and computes what it computes.

    The weights are held packed; ``weight`` makes a dense copy of them at each access.

    Args:
        plain: the layer. Its weights are taken away until `unpack`, unless ``keep_weight``.
        keep_weight: the weights are used elsewhere too, so they stay where they are.
    """

    def __init__(self, plain: nn.Module, *, keep_weight: bool) -> None:
        super().__init__()
        weight: Tensor = plain.weight  # type: ignore[assignment]
        self.is_transposed = not isinstance(plain, nn.Linear)
        given: Tensor | None = plain.bias  # type: ignore[assignment]
        self.trains = weight.requires_grad or (given is not None and given.requires_grad)
        self.keeps_weight = keep_weight
        self.pads_one_row = False
        rows, columns = weight.shape
        self.out_features, self.in_features = (
            (columns, rows) if self.is_transposed else (rows, columns)
        )
        # Not a submodule: its emptied weights are nobody's parameters.
        object.__setattr__(self, "plain", plain)
        self.register_parameter("bias", plain.bias)  # type: ignore[arg-type]
        self._packed: Tensor | None = None
        self.num_packs = 0  # times that weights were taken: it changes when they may have
        self.train(plain.training)
        self.pack()

    plain: nn.Module
    bias: Tensor | None

    def pack(self) -> None:
        """Take the plain layer's weights."""
        self.num_packs += 1
        parameter: nn.Parameter = self.plain.weight  # type: ignore[assignment]
        weight = parameter.detach()
        if self.is_transposed:
            weight = weight.t()
        self._packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous())
        if not self.keeps_weight:
            parameter.data = parameter.data.new_empty(0)

    def unpack(self) -> nn.Module:
        """Give the weights back to the plain layer, and return it; this layer then calls it."""
        packed, self._packed = self._packed, None
        if packed is not None and not self.keeps_weight:
            self.plain.weight.data = self._dense(packed)
        return self.plain

    def _dense(self, packed: Tensor) -> Tensor:
        dense = packed.to_dense()
        return dense.t().contiguous() if self.is_transposed else dense

    @property
    def weight(self) -> Tensor:
        """The weights as the plain layer has them; a copy unless they are kept."""
        packed = self._packed
        if packed is None or self.keeps_weight:
            return self.plain.weight  # type: ignore[return-value]
        return self._dense(packed)

    def product(self, rows: Tensor) -> Tensor:
        """[num_rows, in_features] to [num_rows, out_features]; num_rows is not 0."""
        packed = self._packed
        if packed is None:
            out: Tensor = self.plain(rows)
            return out
        if rows.shape[0] == 1 and self.pads_one_row:
            return _product(rows.expand(2, -1), packed, self.bias)[:1]
        return _product(rows, packed, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """As the plain layer's."""
        packed = self._packed
        if packed is None:
            return self.plain(x)  # type: ignore[no-any-return]
        if x.dtype != torch.float32 or x.device.type != "cpu":
            weight = self.weight.t() if self.is_transposed else self.weight
            return F.linear(x, weight, self.bias)
        rows = x.reshape(-1, self.in_features)
        if not rows.shape[0]:
            return x.new_empty((*x.shape[:-1], self.out_features))
        if torch.is_grad_enabled() and (x.requires_grad or self.trains):
            out: Tensor = _PackedProduct.apply(rows, self.plain.weight, self)  # type: ignore[no-untyped-call]
        else:
            out = self.product(rows)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shapes, as ``nn.Linear`` shows them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    # -- the model stays usable --------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                "weight: is packed by an open radixkv.Engine; close the engine before giving the "
                "model other weights"
            )
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weight = self.weight
        destination[prefix + "weight"] = weight if keep_vars else weight.detach()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.unpack()
        try:
            self.plain._load_from_state_dict(*args)
        finally:
            self._parameters["bias"] = self.plain.bias  # type: ignore[assignment]
            self.pack()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        # To another device or dtype: packed weights cannot follow, so the layer is plain again.
        probe = fn(torch.empty(0))
        if self._packed is None or probe.dtype != torch.float32 or probe.device.type != "cpu":
            self.unpack()
            self.plain._apply(fn, recurse)
            self._parameters["bias"] = self.plain.bias  # type: ignore[assignment]
        return self

    def __reduce__(self) -> Any:
        # Copies and pickles are plain layers: packed weights belong to this process and engine.
        return _identity, (self._plain_copy(),)

    def _plain_copy(self) -> nn.Module:
        if self._packed is None or self.keeps_weight:
            return self.plain
        parameter: nn.Parameter = self.plain.weight  # type: ignore[assignment]
        twin = self.plain.__class__.__new__(self.plain.__class__)
        twin.__dict__.update(self.plain.__dict__)
        twin._parameters = dict(self.plain._parameters)
        twin._parameters["weight"] = nn.Parameter(
            self.weight, requires_grad=parameter.requires_grad
        )
        return twin


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
        odd_shapes: (in_features, out_features) whose rows do depend on their number here; they
            were left plain.
    """

    def __init__(self, model: nn.Module) -> None:
        self.odd_shapes: set[tuple[int, int]] = set()
        self.holders = 0
        # Parents by weak reference: one of them is the model, which must not be kept alive.
        self._places: list[tuple[weakref.ref[nn.Module], str, nn.Module]] = []
        self._pads: dict[tuple[int, int, bool], bool | None] = {}
        uses = Counter(
            id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
        )
        made: dict[nn.Module, nn.Module] = {}
        try:
            for parent, name, plain in list(_children(model)):
                if plain in made:  # one module in two places
                    self._put(parent, name, made[plain])
                elif _is_linear(plain):
                    layer = self._pack(plain, keep=uses[id(plain.weight)] > 1)
                    if layer is not None:
                        self._put(parent, name, layer)
                        made[plain] = layer
                elif _is_activation(plain):
                    made[plain] = SteadyActivation(plain)
                    self._put(parent, name, made[plain])
        except BaseException:
            self.restore()
            raise
        if self.odd_shapes:
            logger.warning(
                "matrix products of shape %s give a row other bits when their number of rows "
                "changes on this machine: results may differ slightly with what else runs",
                ", ".join(f"{rows} -> {columns}" for rows, columns in sorted(self.odd_shapes)),
            )

    def _pack(self, plain: nn.Module, *, keep: bool) -> PackedLinear | None:
        weight: Tensor = plain.weight  # type: ignore[assignment]
        key = (weight.shape[0], weight.shape[1], isinstance(plain, nn.Linear))
        if key in self._pads and self._pads[key] is None:
            return None
        layer = PackedLinear(plain, keep_weight=keep)
        if key not in self._pads:
            self._pads[key] = _probe(layer)
        padding = self._pads[key]
        if padding is None:
            self.odd_shapes.add((layer.in_features, layer.out_features))
            layer.unpack()
            return None
        layer.pads_one_row = padding
        return layer

    def _put(self, parent: nn.Module, name: str, layer: nn.Module) -> None:
        parent._modules[name] = layer
        self._places.append((weakref.ref(parent), name, layer))

    def restore(self) -> None:
        """Put the plain layers and their weights back."""
        for reference, name, layer in self._places:
            plain = layer.unpack() if isinstance(layer, PackedLinear) else layer.plain
            parent = reference()
            if parent is not None and parent._modules.get(name) is layer:
                parent._modules[name] = plain  # type: ignore[assignment]
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
    return type(module) in kinds and _is_bare(module) and can_pack(module.weight)  # type: ignore[arg-type]


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


def _probe(layer: PackedLinear) -> bool | None:
    """Whether one row must be padded to two for equal bits; None if that is not enough."""
    flops = 2.0 * layer.in_features * layer.out_features
    counts = [count for count in _PROBE_ROWS if count <= 17 or count * flops <= _PROBE_FLOPS]
    generator = torch.Generator().manual_seed(len(counts))
    rows = torch.randn(counts[-1], layer.in_features, generator=generator)
    pads = False
    with torch.inference_mode():
        expected = layer.product(rows)
        for count in counts:
            for start in {0, (counts[-1] - count) // 2, counts[-1] - count}:
                stop = start + count
                if torch.equal(layer.product(rows[start:stop]), expected[start:stop]):
                    continue
                if count > 1:
                    return None
                pads = layer.pads_one_row = True
                if not torch.equal(layer.product(rows[start:stop]), expected[start:stop]):
                    return None
    return pads
