"""Small models with random weights, and a tokenizer, for tests that need no real text."""

from __future__ import annotations

import os

os.environ.setdefault("RADIXKV_POISON", "1")  # fresh pages hold what no writer writes
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch

from radixkv import KVConfig, KVSpec, PrefixCache
from radixkv.attention.batch import ScoreRule
from radixkv.attention.reference import attend_dense, rotate_rows

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
def check_bounds() -> Callable[..., None]:
    """``check_bounds(format, ...)``: attention over pages against float64 over the rows."""

    def check(
        name: str,
        *,
        backend: str,
        head_dim: int,
        group: int,
        page_size: int,
        seq_len: int,
        query_len: int,
        rotate: str,
        device: torch.device | str = "cpu",
    ) -> None:
        """Written and read through a cache; the error is what the format's bounds allow.

        Scores are off by at most |q| * norm_bound, so weights by a factor of exp(2 * that), and
        the output by what this moves it plus V's own error. Small queries keep the factor small.
        """
        generator = torch.Generator().manual_seed(seq_len * head_dim + page_size)
        spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim)
        config = KVConfig(dtype=name, page_size=page_size, rotate=rotate, capacity="8MiB")
        cache = PrefixCache(spec, config, device=device, backend=backend)
        k, v = torch.randn(2, seq_len, 2, head_dim, generator=generator)
        q = torch.randn(query_len, 2 * group, head_dim, generator=generator)
        scale = 0.5 / head_dim
        ids = [7 + i for i in range(seq_len)]
        with cache.acquire(ids) as lease:
            lease.write(0, k.to(device), v.to(device))
            padded = torch.zeros(seq_len, 2 * group, head_dim)
            padded[-query_len:] = q
            got = lease.attend(0, padded.to(device), softmax_scale=scale)[-query_len:].cpu()
        heads = (t.double().transpose(0, 1) for t in (q, k, v))
        want = attend_dense(*heads, ScoreRule(softmax_scale=scale)).transpose(0, 1)
        k_form, v_form = cache.codec.k_format, cache.codec.v_format
        k_error = k_form.norm_bound(rotate_rows(k) if cache.codec.rotate_k else k).max()
        if cache.codec.rotate_v:
            v_error = v_form.norm_bound(rotate_rows(v)).max()
        else:
            v_error = v_form.error_bound(v).max()
        score_error = float(q.norm(dim=-1).max() * scale * k_error)
        allowed = math.expm1(2 * score_error) * float(v.abs().max()) + float(v_error)
        error = (got.double() - want).abs().max()
        assert error <= allowed + 1e-4  # and float32's own, far below every format's
        assert allowed < 2 * v.abs().max()  # more than that could not be

    return check


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
