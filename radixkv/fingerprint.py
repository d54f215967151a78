"""Which model a cache's K and V are of, and whether that model is still the same.

`fingerprint` names a model for snapshots: its configuration, every byte of its weights, what
adapts it. `WeightWatch` is the cheap look at the start of a batch: whether any of that was
changed since the last look, so that what was cached before must go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from radixkv import __version__

# Entries of a config that do not change what K and V are.
_NO_MATTER = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",  # of the checkpoint; the model's own is a part by itself
    "eos_token_id",
    "id2label",
    "is_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_HASH_BYTES = 1 << 26  # of weights that are copied at a time to be hashed
_SAMPLES = 4  # elements of each tensor that `WeightWatch` compares, spread over it
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADAPTER_FIELDS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def fingerprint(model: Any, tokenizer: Any = None, *, extra: bytes = b"") -> dict[str, str]:
    """What two models must have in common for one to read the other's KV, name to value.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer; None if token ids alone are used.
        extra: anything else that stored pages depend on.

    Complexity: reads all weights once.
    """
    import transformers

    parts = {
        "class": type(model).__name__,
        "radixkv": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "adapters": json.dumps(_adapters(model), sort_keys=True, default=str),
        "weights": _digest(model, buffers=False),
        "buffers": _digest(model, buffers=True),  # the frequencies of RoPE are among these
        "tokenizer": "" if tokenizer is None else _digest_tokenizer(tokenizer),
        "extra": xxhash.xxh3_128_hexdigest(extra) if extra else "",
    }
    for name, value in model.config.to_dict().items():
        if name not in _NO_MATTER:
            text = json.dumps(value, sort_keys=True, default=str)
            short = text if len(text) <= 200 else xxhash.xxh3_128_hexdigest(text.encode())
            parts[f"config.{name}"] = short
    return parts


def _own_tensors(model: nn.Module, *, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    """Every parameter or buffer by its name, a shared one once for each name."""
    for prefix, module in model.named_modules():
        own = module._buffers if buffers else module._parameters
        for name, tensor in own.items():
            if tensor is not None:
                yield f"{prefix}.{name}", tensor


def _digest(model: nn.Module, *, buffers: bool) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(_own_tensors(model, buffers=buffers), key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, _HASH_BYTES // flat.element_size())
        for part in flat.split(step):
            digest.update(part.contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _digest_tokenizer(tokenizer: Any) -> str:
    vocabulary = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    return xxhash.xxh3_128_hexdigest(json.dumps(vocabulary).encode())


def _adapters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Which adapters are on in each layer that has some, as peft's layers say it."""
    found = {}
    for name, module in model.named_modules():
        state = {field: getattr(module, field, None) for field in _ADAPTER_FIELDS[:3]}
        if state["_active_adapter"] is not None:
            found[name] = {**state, "scaling": getattr(module, "scaling", None)}
    return found


_Place = tuple[dict[str, Any], str, Any]  # where a module holds something, and what


class WeightWatch:
    """Notices that a model's weights, adapters or layers were changed since the last look.

    It sees: writes through torch (version counters), tensors, parameters and modules that were
    put in place of others, other active adapters, and, on a CPU, writes past torch's counters
    (``.data``, NumPy) where they touch one of the spread elements that it compares. It does
    not see a write past the counters that touches none of these, or that is on a GPU: after
    such a one, call `Engine.reset_cache`.

    Attributes:
        layers_replaced: whether modules were put in place of others since it was made: what
            was measured of the model then may not hold of them.

    Complexity: O(tensors + modules) a look; docs/snapshot-format.md has what that takes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.layers_replaced = False
        self._note()

    def changed(self) -> bool:
        """Whether anything was changed since this was made or last said so."""
        replaced = not _in_place(self._children)
        if not replaced and _in_place(self._places) and self._look() == self._seen:
            return False
        self.layers_replaced |= replaced
        self._note()
        return True

    def _note(self) -> None:
        modules = list(self._model.modules())
        self._children: list[_Place] = [
            (module._modules, name, child)
            for module in modules
            for name, child in module._modules.items()
        ]
        self._places: list[_Place] = [
            (place, name, value)
            for module in modules
            for place in (module._parameters, module._buffers)
            for name, value in place.items()
        ]
        self._tensors = [
            value for _, _, value in self._places if isinstance(value, Tensor) and value.numel()
        ]
        self._adapted = [module for module in modules if hasattr(module, "_active_adapter")]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        samples = [_spread(tensor) for tensor in self._tensors if _readable(tensor)]
        widths = sorted({sample.dtype.itemsize for sample in samples})
        self._samples = [[s for s in samples if s.dtype.itemsize == width] for width in widths]
        self._seen = self._look()

    def _look(self) -> list[Any]:
        return [
            [tensor._version for tensor in self._counted],
            [tensor.data_ptr() for tensor in self._tensors],
            [repr([getattr(m, field, None) for field in _ADAPTER_FIELDS]) for m in self._adapted],
            [np.concatenate(samples).tobytes() for samples in self._samples],
        ]


def _in_place(places: list[_Place]) -> bool:
    return all(place.get(name) is value for place, name, value in places)


def _readable(tensor: Tensor) -> bool:
    """Whether NumPy can look at the tensor's own memory."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.element_size() in _INTEGERS
    )


def _spread(tensor: Tensor) -> NDArray[Any]:
    """Some elements over the whole of a tensor, as integers of their bits: a view."""
    flat = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    picked: NDArray[Any] = flat.numpy()[:: max(1, flat.numel() // _SAMPLES)]
    return picked
