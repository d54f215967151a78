"""Every causal-LM type of the installed transformers, tiny: served as its own forward, or refused.

    python -m fuzz.models                      all types in all variants
    python -m fuzz.models phimoe doge          these
    python -m fuzz.models --variant past llama

A type counts as served if prompt log-probabilities and greedy tokens equal the model's own forward,
alone, beside a longer and a shorter prompt, and warm; as refused if the error is a
`UnsupportedModelError`, or a ValueError of the model's own. Anything else is a fault, and the
process ends with 1. Types whose tiny config does not build or run by itself are listed with why.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

VOCAB_SIZE = 200
LONG, SHORT, NEW = 70, 21, 3  # tokens of the prompts, and after them
TOLERANCE = 2e-3  # of a log-probability; what a mask hides moves it by far more

# Sizes, by what numbers are called: the first that matches. A number is never raised.
_SIZES = (
    (r"vocab_size|^n_vocab$|vocab_size_per_layer_input$", VOCAB_SIZE),
    (r"key_value_heads$|kv_heads$|query_groups$", 2),
    (r"heads$|n_head$", 4),
    (r"experts_per_tok(en)?$|^moe_(top)?k$", 2),
    (r"experts$|moe_num_experts$", 4),
    (r"^n_groups?$|^topk_group$|^num_expert_group$", 1),
    (r"^(num_hidden_layers|n_layers?|num_layers|num_blocks|depth|num_layers_per_stack)$", 4),
    (r"^(en|de)coder_layers$|^num_(en|de)coder_layers$", 4),
    (r"^first_k_dense_replace$|^num_dense_layers$|^n_(in|out)put_layers$", 1),
    (r"^n_recurrent_layers$", 2),
    (r"^(hidden_size|d_model|n_embd|emb_dim|dim|embedding_size|word_embed_proj_dim)$", 64),
    (r"^(embedding_dim|hidden_size_global|attention_hidden_size|lru_width)$", 64),
    (r"^((in|out)put_embedding_size|backbone_hidden_size)$", 64),
    (r"(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|d_inner|size_mlp)$", 64),
    (r"^(feed_forward_size)$", 64),
    (r"^(d_kv|kv_channels|dim_head|attention_head_size)$|head_dim$", 16),
    (r"^(kv_lora_rank|q_lora_rank)$", 32),
    (r"^rotary_dim$", 8),
    (r"^query_pre_attn_scalar$", 16),
    (r"position_embeddings$|^n_positions$|^max_seq_len$|^n_ctx$|^model_max_length$", 256),
    (r"^context_length$|^max_(target|source)_positions$", 256),
)
# Numbers that may be borders, as far as names tell; the library goes by none.
_WINDOWS = re.compile(
    r"window|chunk_size|topk$|top_k$|keep_|local_attention|block_size|rel_extent|_floor$"
    r"|floor_scale|^original_max_position|max_distance|attention_len|compress"
)
_NO_WINDOWS = re.compile(
    r"layers|pattern|^use_|moe|expert|mamba|router|^patch|image|vision|audio|feed_forward"
)
_MLA = {"head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 24, "num_key_value_heads": 4}
_PLAIN = {"rope_type": "default", "rope_theta": 1e4}
# What a type needs beside sizes.
_NEEDS: dict[str, dict[str, Any]] = {
    "beam": {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
    },
    "dots1": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "minimax": {"head_dim": 16},
    "mixtral": {"head_dim": 16},
    "ministral": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16],
    },
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba2": {"num_hidden_layers": 54},
}  # fmt: skip
VARIANTS = ("plain", "small", "past", "layers", "dynamic", "longrope", "yarn", "decoder")


def tiny_config(
    model_type: str, variant: str = "plain", *, factors: int = 8, **changes: Any
) -> Any:
    """A tiny config of a type; None if it has nothing that ``variant`` could change.

    Args:
        factors: how many each list of longrope has: half of what RoPE turns of a head.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    whole = kind(**_NEEDS.get(model_type, {})).to_dict()
    fields = {**_sizes(whole), **_NEEDS.get(model_type, {})}
    more = _varied(whole, variant, factors)
    if not more and variant != "plain":
        return None
    return kind(**_merged(_merged(fields, more), changes))


def _sizes(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            inner = _sizes(value)
            if inner:
                found[name] = {**inner, "model_type": value["model_type"]}
        elif isinstance(value, list) and name == "eos_token_id":
            found[name] = 2
        elif isinstance(value, list) and name == "intermediate_size":
            found[name] = 64
        elif type(value) is int:
            if re.search(r"token_(id|index)s?$|_id$", name):
                if value >= VOCAB_SIZE:
                    found[name] = 3
                continue
            size = next((n for pattern, n in _SIZES if re.search(pattern, name)), value)
            if value > size:
                found[name] = size
    if "qk_rope_head_dim" in values:
        found.update({name: n for name, n in _MLA.items() if name in values})
    return found


def _varied(values: dict[str, Any], variant: str, factors: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value and name == "text_config":
            inner = _varied(value, variant, factors)
            if inner:
                found[name] = {**inner, "model_type": value["model_type"]}
    if variant in ("small", "past"):
        sizes = iter((5, 6, 4) if variant == "small" else (16, 40, 24))
        for name, value in values.items():
            if name == "use_sliding_window":
                found[name] = True
            is_window = _WINDOWS.search(name) and not _NO_WINDOWS.search(name)
            if is_window and (value is None or type(value) is int):
                found[name] = next(sizes, 33 if variant == "past" else 7)
        if set(found) <= {"use_sliding_window"}:
            return {}
    if variant == "layers" and "layer_types" in values and "sliding_window" in values:
        known = set(values["layer_types"] or ()) <= {"full_attention", "sliding_attention"}
        if known:
            found["layer_types"] = ["sliding_attention", "full_attention"] * 2
            found["sliding_window"] = 16
            if "use_sliding_window" in values:
                found["use_sliding_window"] = True
    rope = values.get("rope_parameters")
    kinds = [name for name, kind in (rope or {}).items() if isinstance(kind, dict)]
    if variant == "layers" and kinds:
        found["rope_parameters"] = {
            name: _rope("longrope" if "full" in name else "default", rope[name], factors)
            for name in kinds
        }
    if variant in ("dynamic", "longrope", "yarn") and isinstance(rope, dict):
        found["rope_parameters"] = (
            {name: _rope(variant, rope[name], factors) for name in kinds}
            if kinds
            else _rope(variant, rope, factors)
        )
        if "original_max_position_embeddings" in values:
            found["original_max_position_embeddings"] = 32
    if variant == "decoder" and values.get("is_decoder") is False:
        found["is_decoder"] = True
    return found


def _rope(kind: str, plain: dict[str, Any], factors: int) -> dict[str, Any]:
    rope = {"rope_theta": 1e4, **{k: v for k, v in plain.items() if v is not None}}
    rope["rope_type"] = kind
    if kind == "dynamic":
        rope |= {"factor": 4.0}
    elif kind == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": 32}
    elif kind == "longrope":
        rope |= {"factor": 8.0, "original_max_position_embeddings": 32}
        rope |= {"short_factor": [1.0] * factors, "short_mscale": 1.0, "long_mscale": 1.1}
        rope |= {"long_factor": [1.0 + i for i in range(factors)]}
    return rope


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in more.items():
        old = merged.get(name)
        is_config = isinstance(old, dict) and isinstance(value, dict) and "model_type" in value
        merged[name] = _merged(old, value) if is_config else value  # type: ignore[arg-type]
    return merged


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A model of ``config`` in float32 with weights that spread, so that every token counts."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
            elif parameter.is_floating_point():
                parameter.data += 0.05 * torch.randn(parameter.shape)
    return model.eval()


@dataclass(frozen=True)
class Outcome:
    """What became of one type in one variant.

    Attributes:
        kind: "served", "refused", "fault"; "unbuilt" where the tiny model fails by itself.
        why: the error, or what differs.
    """

    kind: str
    why: str = ""


def _own(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def try_config(config: Any, *, backend: str = "auto") -> Outcome:
    """Build a tiny model, make an engine of it, and compare what it gives with its own forward."""
    from radixkv import ContextLengthError, Engine, KVConfig, UnsupportedModelError

    ids = [(7 + 13 * i) % (VOCAB_SIZE - 60) + 5 for i in range(LONG)]
    prompts = [ids, ids[::-1][:SHORT]]
    try:
        model = tiny_model(config)
        own = [_own(model, prompt) for prompt in prompts]
    except Exception as error:
        return Outcome("unbuilt", _said(error)[:300])
    kv = KVConfig(dtype="model", page_size=4, capacity="4MiB")
    try:
        engine = Engine(model, kv=kv, backend=backend)
    except UnsupportedModelError as error:
        return Outcome("refused", _said(error))
    except Exception as error:
        return Outcome("fault", f"Engine(): {_said(error)}")
    with engine:
        try:
            limit = engine.max_positions
            if limit is not None and limit < LONG + NEW:
                try:
                    engine.generate(ids, max_new_tokens=NEW)
                    return Outcome("fault", f"over {limit} positions, and it ran")
                except ContextLengthError:
                    pass
                prompts = [prompt[: limit - NEW] for prompt in prompts]
                own = [_own(model, prompt) for prompt in prompts]
            for how, ask in _ways(engine, prompts):
                for prompt, logits, result in zip(prompts, own, ask(), strict=True):
                    wrong = _differs(model, prompt, logits, result)
                    if wrong:
                        return Outcome("fault", f"{how}: {wrong}")
        except Exception as error:
            return Outcome("fault", f"generate(): {_said(error)}")
    return Outcome("served", f"up to {limit}")


def _ways(engine: Any, prompts: list[list[int]]) -> Iterator[tuple[str, Any]]:
    fields = {"prompt_logprobs": 0, "max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    yield "alone", lambda: [engine.generate(p, namespace="alone", **fields) for p in prompts]
    yield "beside", lambda: engine.generate(prompts, namespace="beside", **fields)
    yield "warm", lambda: engine.generate(prompts[::-1], namespace="beside", **fields)[::-1]


def _differs(model: Any, prompt: list[int], logits: torch.Tensor, result: Any) -> str:
    """How a result differs from the model's own forward; empty if it does not."""
    own = logits.log_softmax(-1)
    off = [
        abs(got[token] - float(own[place - 1, token]))
        for place, (token, got) in enumerate(zip(prompt, result.prompt_logprobs, strict=True))
        if place
    ]
    if not max(off) <= TOLERANCE:
        first = next(place for place, gap in enumerate(off, 1) if not gap <= TOLERANCE)
        return f"log-probability off by {max(off):.3g}, first at token {first} of {len(prompt)}"
    token_ids = list(prompt)
    for token in result.samples[0].token_ids:
        last = _own(model, token_ids)[-1]
        if float(last.max() - last[token]) > TOLERANCE:
            return f"token {token} after {len(token_ids)}, own {int(last.argmax())}"
        token_ids.append(token)
    return ""


def try_type(model_type: str, variant: str = "plain") -> Outcome | None:
    """One type in one variant; None if it has nothing to vary."""
    outcome = None
    for factors in (8, 4, 2, 6, 3, 16) if variant in ("longrope", "layers") else (8,):
        try:
            config = tiny_config(model_type, variant, factors=factors)
        except Exception as error:
            return Outcome("unbuilt", _said(error)[:300])
        if config is None:
            return None
        outcome = try_config(config)
        if outcome.kind != "unbuilt" or "size of tensor" not in outcome.why:
            break
    return outcome


def model_types() -> list[str]:
    """Every causal-LM type of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main() -> int:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for model_type in options.types or model_types():
        for variant in options.variant or VARIANTS:
            outcome = try_type(model_type, variant)
            if outcome is None:
                continue
            counts[outcome.kind] += 1
            print(f"{outcome.kind:8} {model_type:24} {variant:9} {outcome.why[:400]}", flush=True)
    print(f"{dict(counts)} in {time.monotonic() - begin:.0f} s, transformers", end=" ")
    print(transformers.__version__)
    return 1 if counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
