"""How many bytes the K and V of a model take: read from its config, without its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.attention.layout import KVCodec, KVSpec
from radixkv.config import KVConfig
from radixkv.errors import UnsupportedModelError

_FULL = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """What one attention layer keeps of a token.

    Attributes:
        num_kv_heads: KV heads.
        head_dim: elements of a K row; ``v_head_dim`` of a V row, None if the same.
        window: tokens that a query of this layer sees; None is all.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    window: int | None = None


def read_layers(config: Any) -> list[LayerKV]:
    """Read from a transformers config what each of its layers keeps; those that keep none are out.

    Layers that keep a state of fixed size instead (linear attention, convolutions) and layers
    that read another layer's K and V take no pages.

    Raises:
        UnsupportedModelError: its layers keep something else than K and V.
    """
    config = config.get_text_config()
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"{config.model_type}: stores compressed latents instead of K and V, which radixkv "
            f"does not serve; use a model with plain attention"
        )
    num_layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:  # a window without types is every layer's
        windowed = getattr(config, "sliding_window", None) is not None
        types = ["sliding_attention" if windowed else "full_attention"] * num_layers
    each = list(getattr(config, "per_layer_config", None) or [config] * num_layers)
    num_own = num_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    layers = []
    for layer_type, layer in zip(types[:num_own], each, strict=False):
        if layer_type not in _FULL and layer_type not in _WINDOWED:
            continue
        num_heads = layer.num_attention_heads
        layers.append(
            LayerKV(
                num_kv_heads=getattr(layer, "num_key_value_heads", None) or num_heads,
                head_dim=getattr(layer, "head_dim", None) or layer.hidden_size // num_heads,
                window=getattr(config, _WINDOWED.get(layer_type, ""), None),
            )
        )
    if not layers:
        raise UnsupportedModelError(
            f"{config.model_type}: none of its layers keeps K and V; expected attention layers"
        )
    return layers


def kv_memory(
    layers: Sequence[LayerKV],
    dtype: torch.dtype,
    *,
    kv_dtype: str,
    page_size: int,
    length: int,
    batch: int,
    shared: int,
    max_length: int,
) -> dict[str, Any]:
    """Count the bytes of K and V that a batch takes, stored in three ways.

    Args:
        layers: of `read_layers`, or of one's own.
        dtype: the model's own.
        length: tokens a sequence.
        batch: sequences.
        shared: leading tokens that all of them have in common; at most ``length``.
        max_length: tokens that a preallocated cache reserves a sequence; in layers with a
            window not more than that. Pages keep all tokens in every layer.

    Returns:
        ``bytes_per_token``; ``pages`` and ``pages_bytes`` (whole shared pages once, the rest
        for each sequence), ``copies_bytes`` (the same format, nothing shared),
        ``preallocated_bytes`` (``max_length`` tokens each, in the model's own dtype).
    """
    bytes_per_token = preallocated = 0
    for layer, count in Counter(layers).items():
        spec = KVSpec(
            num_layers=count,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=layer.v_head_dim,
            dtype=dtype,
        )
        config = KVConfig(dtype=kv_dtype, page_size=page_size)  # type: ignore[arg-type]
        bytes_per_token += KVCodec(spec, config).bytes_per_token
        reserved = max_length if layer.window is None else min(layer.window, max_length)
        plain = KVCodec(spec, KVConfig(dtype="model")).bytes_per_token
        preallocated += batch * reserved * plain
    pages_each = -(-length // page_size)
    pages_shared = shared // page_size if batch > 1 else 0
    pages = pages_shared + batch * (pages_each - pages_shared)
    return {
        "kv_dtype": kv_dtype,
        "bytes_per_token": bytes_per_token,
        "pages": pages,
        "pages_bytes": pages * page_size * bytes_per_token,
        "copies_bytes": batch * pages_each * page_size * bytes_per_token,
        "preallocated_bytes": preallocated,
    }
