"""Which models are served: what their attention asks for, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixkv.errors import UnsupportedModelError
from radixkv.models.masks import MaskFunction, NotAWindowError, window_of

# Kinds of layers that no trial needs to tell apart, and why they are not served.
_NOT_SERVED = (
    (
        {"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"},
        "which keep a state that is not KV pages",
    ),
    (
        {
            "indexed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "minimax_m3_sparse",
        },
        "whose indexed or sparse attention chooses by content which tokens it reads",
    ),
)
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
    mask: MaskFunction | None = None  # what the mask that it was given was made of
    own_mask: str = ""  # what one shows that is not as transformers made it; empty if it is


def refuse(model: torch.nn.Module, what: str, mend: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__}: {what}; {mend}")


def check_model(model: Any) -> None:
    """Refuse what is seen not to be served before anything of it is run, moved or changed.

    Raises:
        TypeError: it is no model of transformers.
        UnsupportedModelError: it is none that is served; it names what and why.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise TypeError(
            f"model: expected a transformers causal LM, got {type(model).__name__}; load one "
            f"with AutoModelForCausalLM.from_pretrained, or use Engine.from_pretrained"
        )
    check_weights(model)
    check_kind(model)
    check_config(model)


def check_kind(model: Any) -> None:
    """Refuse what is no causal LM with its weights in memory."""
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        if getattr(adapter, "is_prompt_learning", False):
            kind = getattr(adapter.peft_type, "value", adapter.peft_type)
            raise refuse(
                model,
                f"its adapter {name!r} is of prompt learning ({kind}), which puts vectors before "
                f"the prompt that no token ids stand for",
                "merge or drop the adapter; LoRA is served",
            )
        if getattr(adapter, "alora_invocation_tokens", None):
            raise refuse(
                model,
                f"its adapter {name!r} is an activated LoRA (alora_invocation_tokens), which looks "
                f"for its tokens in the whole prompt",
                "this engine runs a prompt in parts; use a LoRA without them",
            )
    if model.get_output_embeddings() is None:
        raise refuse(
            model,
            "expected a causal LM with a head that gives logits over the vocabulary, got a model "
            "without one",
            f"load the checkpoint with {_with_head(model)}",
        )
    held = _without_weights(model)
    if held is not None:
        raise refuse(
            model,
            f"{held} is on the meta device: it has a shape, but no weights",
            "load it with from_pretrained, or model.to_empty(device=...) and load_state_dict",
        )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.float64 in dtypes:
        raise refuse(
            model, "has weights in float64, which no page format keeps", "use model.float()"
        )


def _with_head(model: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    known = NAMES.get(getattr(model.config, "model_type", ""))
    if known is None or known == type(model).__name__:
        return "AutoModelForCausalLM"
    return f"{known} or AutoModelForCausalLM"


def _without_weights(model: torch.nn.Module) -> str | None:
    """A parameter on the meta device that nothing brings in when it is used; None if none is."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            continue
        parts = name.split(".")[:-1]
        owners = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
        # accelerate's offloading keeps weights elsewhere, and hooks a module to fetch them.
        if not any(hasattr(owner, "_hf_hook") for owner in owners):
            return name
    return None


def check_config(model: Any) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise refuse(model, "is an encoder-decoder model", "use a decoder-only causal LM")
    text_config = config.get_text_config()
    types = set(getattr(text_config, "layer_types", None) or ())
    for kinds, what in _NOT_SERVED:
        found = sorted(types & kinds)
        if found:
            raise refuse(
                model,
                f"has layers of type {', '.join(found)}, {what}",
                "use a model whose layers attend to all tokens before, or to a window of them",
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
        if layer.own_mask in ("numbers", "other"):
            shows = "adds numbers to scores" if layer.own_mask == "numbers" else "is not causal"
            raise refuse(
                model,
                f"layer {layer_idx} attends under a mask that the model makes itself (a dynamic "
                f"mask, an index or a bias), which {shows}",
                "this engine serves causal attention over all tokens before, or a window of them",
            )
        if not layer.is_causal:
            mend = "use a causal LM"
            if getattr(model.config, "is_decoder", None) is False:
                mend += ", or load it with is_decoder=True if it was trained as one"
            raise refuse(model, f"layer {layer_idx} is not causal", mend)
        if layer.num_q_heads % layer.spec[0]:
            raise refuse(
                model,
                f"layer {layer_idx} has {layer.num_q_heads} query heads over "
                f"{layer.spec[0]} KV heads",
                "the first must be a multiple of the second",
            )
    text_config = model.config.get_text_config()
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    if softcap and any(not layer.keywords.get("softcap") for layer in seen.values()):
        raise refuse(
            model, f"attn_logit_softcapping={softcap} does not reach its attention", "cannot serve"
        )


def windows_of(model: Any, seen: Mapping[int, Seen], places: Tensor) -> dict[int, int | None]:
    """The window of each layer, as its mask says; where it has none, as its attention is told.

    Args:
        places: at which masks are asked (`radixkv.models.masks.places_around`).
    Raises:
        UnsupportedModelError: a mask shows other tokens than all before, or a window of them.
    """
    known: dict[int, int | NotAWindowError | None] = {}
    windows: dict[int, int | None] = {}
    types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for layer_idx, layer in sorted(seen.items()):
        told = layer.keywords.get("sliding_window")
        windows[layer_idx] = told
        if layer.mask is None:
            kind = types[layer_idx] if layer_idx < len(types) else ""
            if kind == "sliding_attention" and not told:
                raise refuse(
                    model,
                    f"layer {layer_idx} is of type {kind}, but neither its attention nor a mask "
                    f"tells its sliding window",
                    "this engine would attend to too much",
                )
            continue
        name = id(layer.mask)
        if name not in known:
            try:
                known[name] = window_of(layer.mask, places)
            except NotAWindowError as error:
                known[name] = error
        found = known[name]
        if isinstance(found, NotAWindowError):
            raise refuse(
                model,
                f"the mask of layer {layer_idx} {found}",
                "this engine serves causal attention over all tokens before, or a window of them",
            ) from found
        windows[layer_idx] = found
    return windows


def check_weights(model: Any) -> None:
    """Refuse weights that are not where the model is: accelerate brings them for each call."""
    if not isinstance(model, torch.nn.Module):
        return  # refused elsewhere
    for name, module in model.named_modules():
        hook = module.__dict__.get("_hf_hook")
        for one in getattr(hook, "hooks", [hook]):
            if getattr(one, "offload", False) or type(one).__name__ == "CpuOffload":
                raise refuse(
                    model,
                    f"the weights of {name or 'the model'} are offloaded to memory or disk (by "
                    f"accelerate), and are brought anew for each call",
                    "load it whole: without offload_folder, and with a device_map of one device",
                )
