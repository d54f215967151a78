"""Which model a cache's K and V are of.

`fingerprint` names a model for snapshots: its configuration, every byte of its weights, what
adapts it. `radixkv.models.weight_watch.WeightWatch` is the cheap look at the start of a batch:
whether any of that was changed since the last look, so that what was cached before must go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from radixkv.models.weight_watch import WeightWatch, feed
from radixkv.version import __version__

__all__ = ["WeightWatch", "fingerprint"]

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
        digest.update(f"{name} ".encode())
        feed(digest, tensor)
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
