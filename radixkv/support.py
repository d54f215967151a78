"""Which models are served: what their attention asks for, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.errors import UnsupportedModelError

_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# Keywords that reach attention functions and do not change what a causal layer computes.
_HARMLESS = {
    "attention_mask",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


@dataclass
class Seen:
    """What one layer's attention was called with."""

    num_q_heads: int
    spec: tuple[int, int, int, torch.dtype]  # num_kv_heads, head_dim, v_head_dim, dtype
    keywords: dict[str, Any]
    is_causal: bool


def refuse(model: torch.nn.Module, what: str, mend: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__}: {what}; {mend}")


def check_config(model: Any) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(model, "is an encoder-decoder model", "use a decoder-only causal LM")
    text_config = config.get_text_config()
    types = set(getattr(text_config, "layer_types", None) or ())
    if types - _LAYER_TYPES:
        raise refuse(
            model,
            f"has layers of type {', '.join(sorted(types - _LAYER_TYPES))}, "
            f"which keep a state that is not KV pages",
            f"layers must be of {', '.join(sorted(_LAYER_TYPES))}",
        )
    if getattr(text_config, "alibi", False) or text_config.model_type in ("bloom", "mpt"):
        raise refuse(
            model, "uses ALiBi, whose bias transformers builds into a mask", "use a RoPE model"
        )


def check_seen(model: Any, seen: Mapping[int, Seen]) -> None:
    if not seen:
        raise refuse(
            model,
            "its attention does not go through transformers' AttentionInterface",
            "this engine cannot serve it",
        )
    if sorted(seen) != list(range(len(seen))):
        raise refuse(model, f"attention layers are {sorted(seen)}", "expected 0, 1, 2, ...")
    specs = {layer.spec for layer in seen.values()}
    if len(specs) > 1:
        raise refuse(
            model,
            f"its layers differ in (KV heads, head_dim, v_head_dim, dtype): "
            f"{', '.join(sorted(map(str, specs)))}",
            "one page layout must fit all layers",
        )
    known = {"scaling", "sliding_window", "softcap", "s_aux"} | _HARMLESS
    for layer_idx, layer in sorted(seen.items()):
        unknown = [k for k, v in layer.keywords.items() if k not in known and v is not None]
        if unknown:
            raise refuse(
                model,
                f"layer {layer_idx} asks its attention for {', '.join(sorted(unknown))}",
                "this engine does not know these",
            )
        if not layer.is_causal:
            raise refuse(model, f"layer {layer_idx} is not causal", "use a causal LM")
        if layer.num_q_heads % layer.spec[0]:
            raise refuse(
                model,
                f"layer {layer_idx} has {layer.num_q_heads} query heads over "
                f"{layer.spec[0]} KV heads",
                "the first must be a multiple of the second",
            )
    text_config = model.config.get_text_config()
    for layer_idx, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
        told = layer_idx in seen and seen[layer_idx].keywords.get("sliding_window")
        if layer_type == "sliding_attention" and not told:
            raise refuse(
                model,
                f"layer {layer_idx} is of type {layer_type}, but its attention is not told its "
                f"sliding_window",
                "this engine would attend to too much",
            )
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    if softcap and any(not layer.keywords.get("softcap") for layer in seen.values()):
        raise refuse(
            model, f"attn_logit_softcapping={softcap} does not reach its attention", "cannot serve"
        )


def max_positions(model: Any) -> int | None:
    """Positions that the model has; None if its config names no limit.

    RoPE variants whose factors depend on the longest sequence of a batch are served only
    below the length at which they start to, where they are constant: elsewhere a sequence's
    result would depend on its neighbours.
    """
    text_config = model.config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limit = (
            rope.get("original_max_position_embeddings")
            or getattr(text_config, "original_max_position_embeddings", None)
            or limit
        )
    return limit
