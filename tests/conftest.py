"""Small models with random weights, and a tokenizer, for tests that need no real text."""

from __future__ import annotations

import os

os.environ.setdefault("RADIXKV_POISON", "1")  # fresh pages hold what no writer writes
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch

# The same examples at every run, so that a change is judged by what it changes; with
# RADIXKV_RANDOM=1 they are new ones each time (fuzz/ searches for hours).
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("random" if os.environ.get("RADIXKV_RANDOM") else "same")

VOCAB_SIZE = 1000
_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def _config(name: str) -> Any:
    import transformers as tf

    if name == "llama":
        return tf.LlamaConfig(**_COMMON)
    if name == "qwen2":
        return tf.Qwen2Config(**_COMMON)
    if name == "qwen3":
        return tf.Qwen3Config(**_COMMON, head_dim=16)
    if name == "mistral-window":
        return tf.MistralConfig(**_COMMON, sliding_window=8)
    if name == "gemma2":
        return tf.Gemma2Config(
            **_COMMON,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
        )
    if name == "gpt2":
        return tf.GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=256,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    if name == "opt":
        return tf.OPTConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, ffn_dim=128, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=256, word_embed_proj_dim=64,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
    if name == "gpt-oss":
        return tf.GptOssConfig(
            **_COMMON, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
        )
    raise ValueError(name)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """``tiny_model(name, seed=0)``: a causal LM with random weights, two layers, float32.

    Weights are spread wider than transformers' own initialization, so that logits differ
    clearly and greedy continuations do not repeat one token.
    """
    import transformers as tf

    made: dict[Any, Any] = {}

    def make(name: str = "llama", *, seed: int = 0, fresh: bool = False, **changes: Any) -> Any:
        key = (name, seed, tuple(sorted(changes.items())))
        if fresh or key not in made:
            config = _config(name)
            for field, value in changes.items():
                setattr(config, field, value)
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = tf.AutoModelForCausalLM.from_config(config).float()
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        torch.nn.init.normal_(parameter, std=0.15)
            model.eval()
            if fresh:
                return model
            made[key] = model
        return made[key]

    return make


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A byte-level tokenizer with a few merges, special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for symbol in alphabet:
        vocab[symbol] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("o", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    return fast
