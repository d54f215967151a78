"""Models tried past every border: what a mask or RoPE does far away, and refusals that say why."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as tf

from radixkv import ContextLengthError, Engine, KVConfig, UnsupportedModelError

C: dict[str, Any] = dict(
    vocab_size=1000,
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
KV = KVConfig(dtype="model", page_size=4, capacity="4MiB")
IDS = list(range(100, 140))


def spread(model: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.float().eval()


def build(config: Any) -> Any:
    return spread(tf.AutoModelForCausalLM.from_config(config))


def llama(**changes: Any) -> Any:
    return build(tf.LlamaConfig(**{**C, **changes}))


def own_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def error(own: torch.Tensor, token_ids: list[int], result: Any) -> float:
    """How far prompt log-probabilities are from the model's own."""
    pairs = list(zip(token_ids, result.prompt_logprobs, strict=True))
    return max(abs(got[t] - float(own[i, t])) for i, (t, got) in enumerate(pairs[1:]))


def is_served(model: Any, token_ids: list[int] = IDS) -> bool:
    """Whether it is served as its own forward; False if it is refused by name."""
    own = own_logprobs(model, token_ids)
    try:
        engine = Engine(model, kv=KV)
    except UnsupportedModelError:
        return False
    with engine:
        result = engine.generate(token_ids, prompt_logprobs=0, max_new_tokens=1)
        assert error(own, token_ids, result) < 1e-3
    return True


# M1: what a mask says beyond the self test


def test_a_window_that_the_mask_alone_knows_is_served():
    model = build(
        tf.PhimoeConfig(**C, sliding_window=16, num_local_experts=2, num_experts_per_tok=1)
    )
    assert is_served(model)


@pytest.mark.parametrize("window", [2, 11, 12, 13, 37, 255])
def test_windows_of_any_length_in_a_mask_alone_are_served(window):
    model = build(
        tf.PhimoeConfig(**C, sliding_window=window, num_local_experts=2, num_experts_per_tok=1)
    )
    assert is_served(model, [(7 * i) % 900 + 5 for i in range(90)])


@pytest.mark.parametrize("width", [8, 16, 40])
def test_a_mask_that_a_model_makes_from_what_it_reads_is_refused(width):
    with pytest.raises(UnsupportedModelError, match="mask that the model makes itself"):
        Engine(build(tf.DogeConfig(**C, keep_window_size=width)), kv=KV)


class MaskedLlama(tf.LlamaForCausalLM):
    """A Llama whose attention is told nothing of what its mask shows."""

    def forward(self, input_ids=None, **keywords):
        window, chunk = getattr(self.config, "reach", None), getattr(self.config, "block", None)
        made = tf.masking_utils.create_causal_mask

        def masked(*args, **given):
            def sees(batch, head, query, key):
                shown = key >= 0
                if window is not None:
                    shown = shown & (key > query - window)
                if chunk is not None:
                    shown = shown & (key // chunk == query // chunk)
                return shown

            return made(*args, **{**given, "and_mask_function": sees})

        home = tf.models.llama.modeling_llama
        home.create_causal_mask = masked
        try:
            return super().forward(input_ids=input_ids, **keywords)
        finally:
            home.create_causal_mask = made


def masked_llama(**fields: Any) -> Any:
    config = tf.LlamaConfig(**C)
    for name, value in fields.items():
        setattr(config, name, value)
    return spread(MaskedLlama(config))


def test_a_window_under_a_name_that_nobody_knows_is_served():
    assert is_served(masked_llama(reach=19))


def test_quantized_pages_have_the_masks_window_too():
    model = masked_llama(reach=19)
    with Engine(model, kv=KVConfig(dtype="int8", page_size=16, capacity="4MiB")) as engine:
        result = engine.generate(IDS * 2, prompt_logprobs=0, max_new_tokens=1)
    whole = masked_llama()
    assert error(own_logprobs(model, IDS * 2), IDS * 2, result) < 0.1
    assert error(own_logprobs(whole, IDS * 2), IDS * 2, result) > 0.5


class SelfMaskedLlama(tf.LlamaForCausalLM):
    """A Llama that gives its attention a mask that transformers did not make."""

    width = 1000

    def forward(self, input_ids=None, **keywords):
        place = torch.arange(input_ids.shape[1])
        back = place[:, None] - place
        mask = (back >= 0) & (back < self.width)
        return super().forward(input_ids=input_ids, attention_mask=mask[None, None], **keywords)


class NarrowLlama(SelfMaskedLlama):
    width = 200  # which no config names


def test_a_mask_of_its_own_is_run_to_the_end():
    assert is_served(spread(SelfMaskedLlama(tf.LlamaConfig(**C))))
    with pytest.raises(UnsupportedModelError, match="from token 200 of a sequence"):
        Engine(spread(NarrowLlama(tf.LlamaConfig(**C))), kv=KV)


@pytest.mark.parametrize("chunk", [16, 40, 100])
def test_chunked_attention_is_refused_as_such_however_far_it_shows(chunk):
    with pytest.raises(UnsupportedModelError, match=rf"chunked attention, in chunks of {chunk}"):
        Engine(masked_llama(block=chunk), kv=KV)
    with pytest.raises(UnsupportedModelError, match="chunked attention"):
        Engine(
            build(
                tf.Llama4TextConfig(
                    **C,
                    attention_chunk_size=chunk,
                    head_dim=16,
                    num_local_experts=2,
                    intermediate_size_mlp=64,
                )
            ),
            kv=KV,
        )


class OddLlama(tf.LlamaForCausalLM):
    """A Llama that changes what it computes beyond a length of its own, with no mask for it."""

    def forward(self, input_ids=None, **keywords):
        output = super().forward(input_ids=input_ids, **keywords)
        rows = torch.arange(output.logits.shape[1]) >= self.config.turning
        output.logits = output.logits * (1 + 0.1 * rows[None, :, None])
        return output


@pytest.mark.parametrize("turning", [14, 60, 250, 700])
def test_what_only_a_run_past_the_border_shows_is_refused_and_names_it(turning):
    config = tf.LlamaConfig(**{**C, "max_position_embeddings": 1024})
    config.turning = turning  # the last lies past what is run: a twin has it nearer
    model = spread(OddLlama(config))
    with pytest.raises(UnsupportedModelError, match=r"from token \d+ of a sequence.*turning="):
        Engine(model, kv=KV)


def test_a_large_model_is_tried_as_a_small_twin():
    """The border lies nowhere near what a load may run, and the model itself is never run to it."""
    config = tf.LlamaConfig(
        **{**C, "hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 8192}
    )
    config.turning = 4096
    model = spread(OddLlama(config))
    runs: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, given: runs.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with pytest.raises(UnsupportedModelError, match=r"turning=4096, \d+ in a small twin"):
        Engine(model, kv=KV)
    assert max(runs) <= 12


def test_positions_that_are_counted_by_rows_are_refused():
    """Llama 4 scales queries by their row in the call, which shows beyond ``floor_scale``."""
    config = tf.Llama4TextConfig(
        **{**C, "num_hidden_layers": 4},
        head_dim=16,
        num_local_experts=2,
        intermediate_size_mlp=64,
        layer_types=["full_attention"] * 4,
        floor_scale=16,
    )
    with pytest.raises(UnsupportedModelError, match="floor_scale=16"):
        Engine(build(config), kv=KV)


# M2: RoPE that depends on the longest sequence

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


def gemma3(full: dict[str, Any], sliding: dict[str, Any], **changes: Any) -> Any:
    return build(
        tf.Gemma3TextConfig(
            **{**C, **changes},
            head_dim=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"full_attention": full, "sliding_attention": sliding},
        )
    )


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda: gemma3(LONGROPE, PLAIN), 32),
        (lambda: gemma3(PLAIN, LONGROPE), 32),
        (lambda: gemma3(LONGROPE, DYNAMIC, max_position_embeddings=24), 24),
        (lambda: gemma3(DYNAMIC, PLAIN, max_position_embeddings=64), 64),
        (lambda: gemma3(PLAIN, PLAIN), 256),
        (lambda: build(tf.LlamaConfig(**C, rope_parameters=LONGROPE)), 32),
        (lambda: build(tf.LlamaConfig(**C, rope_parameters=PLAIN)), 256),
    ],
)
def test_lengths_stop_where_rope_begins_to_feel_the_longest(make, limit):
    model = make()
    long, short = [(7 * i) % 900 + 5 for i in range(limit - 1)], IDS[:20]
    own = [own_logprobs(model, ids) for ids in (long, short)]
    with Engine(model, kv=KV) as engine:
        assert engine.max_positions == limit
        with pytest.raises(ContextLengthError):
            engine.generate([*long, 5, 6], max_new_tokens=1)
        fields = {"prompt_logprobs": 0, "max_new_tokens": 1}
        results = engine.generate([long, short], **fields)
        for ids, expected, result in zip((long, short), own, results, strict=True):
            assert error(expected, ids, result) < 1e-3


def test_rope_of_an_unknown_kind_is_measured_not_named():
    model = llama()
    rotary = model.model.rotary_emb
    inner = type(rotary).forward

    class Stretched(type(rotary)):  # type: ignore[misc]
        def forward(self, x, position_ids):
            longest = int(position_ids.max()) + 1
            cos, sin = inner(self, x, position_ids)
            return (cos, sin) if longest <= 47 else (cos * 0.5, sin * 0.5)

    rotary.__class__ = Stretched
    with Engine(model, kv=KV) as engine:
        assert engine.max_positions == 47


# C5: attention that is viewed as it lies


def test_a_model_that_views_what_attention_gives_is_served():
    config = tf.AfmoeConfig(
        **{**C, "num_hidden_layers": 4},
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_dense_layers=1,
        head_dim=16,
        sliding_window=16,
    )
    assert is_served(build(config))


def dory() -> Any:
    config = tf.DoryConfig(
        **{**C, "num_hidden_layers": 4, "num_key_value_heads": 4},
        n_input_layers=1,
        n_recurrent_layers=2,
        n_output_layers=1,
        head_dim=16,
    )
    return build(config)


# C10: refusals that name the cause


def on_meta() -> Any:
    with torch.device("meta"):
        return tf.LlamaForCausalLM(tf.LlamaConfig(**C))


def with_adapter(kind: str) -> Any:
    import peft

    given = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    config: Any = {
        "prompt tuning": lambda: peft.PromptTuningConfig(**given),
        "p-tuning": lambda: peft.PromptEncoderConfig(**given, encoder_hidden_size=16),
        "prefix tuning": lambda: peft.PrefixTuningConfig(**given),
    }[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers in an older way
        return peft.get_peft_model(llama(), config)


def bart() -> Any:
    return build(
        tf.BartConfig(
            vocab_size=1000,
            d_model=64,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
        )
    )


def bert_like(kind: str, is_decoder: bool = True) -> Any:
    return build(
        getattr(tf, f"{kind}Config")(
            vocab_size=1000,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=130,
            is_decoder=is_decoder,
        )
    )


def indexed() -> Any:
    from fuzz.models import tiny_config

    return build(tiny_config("hy_v4"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: llama().model, "LlamaModel: expected a causal LM with a head.*LlamaForCausalLM"),
        (
            lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**C)),
            "LlamaForSequenceClassification: expected a causal LM with a head.*LlamaForCausalLM",
        ),
        (lambda: tf.LlamaForTokenClassification(tf.LlamaConfig(**C)), "causal LM with a head"),
        (on_meta, r"embed_tokens\.weight is on the meta device"),
        (lambda: llama().double(), r"float64.*model\.float\(\)"),
        (lambda: with_adapter("prompt tuning"), "prompt learning.*LoRA"),
        (lambda: with_adapter("p-tuning"), "prompt learning.*LoRA"),
        (lambda: with_adapter("prefix tuning"), "prompt learning.*LoRA"),
        (bart, "takes no heed of position_ids"),
        (lambda: bert_like("Roberta"), "does not number its tokens 0, 1, 2"),
        (lambda: bert_like("Bert", is_decoder=False), "not causal.*is_decoder=True"),
        (indexed, "indexed or sparse attention"),
        (dory, "calls its attention more than once"),  # it views what attention gives, too
        (lambda: build(tf.DiffLlamaConfig(**C)), "calls its attention more than once"),
        (
            lambda: build(tf.MambaConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2)),
            "keep a state",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_true_reason(make, match):
    model = make()
    with pytest.raises(UnsupportedModelError, match=f"(?s){match}"):
        Engine(model, kv=KV)


def test_what_cannot_be_moved_is_refused_for_what_it_is():
    with pytest.raises(UnsupportedModelError, match="meta device"):
        Engine(on_meta(), kv=KV, device="cpu")
    with pytest.raises(TypeError, match="expected a transformers causal LM, got str"):
        Engine("a name", kv=KV, device="cpu")


def test_what_is_refused_is_left_as_it_was():
    model = bart()
    own = own_logprobs(model, IDS)
    with pytest.raises(UnsupportedModelError):
        Engine(model, kv=KV)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(own_logprobs(model, IDS), own)


def test_positions_of_a_table_that_no_config_names_are_the_limit():
    """Whisper's decoder: prompts beyond its table are refused, not an IndexError."""
    model = build(
        tf.WhisperConfig(
            vocab_size=1000,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            encoder_ffn_dim=64,
            max_target_positions=77,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    assert is_served(model)
    with Engine(model, kv=KV) as engine:
        assert engine.max_positions == 77
        with pytest.raises(ContextLengthError, match="77 positions"):
            engine.generate(list(range(5, 85)), max_new_tokens=1)


def test_loading_leaves_the_random_state_alone():
    config = tf.LlamaConfig(**{**C, "max_position_embeddings": 8192, "intermediate_size": 1500})
    model = build(config)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with Engine(model, kv=KV):
        assert torch.equal(torch.rand(3), expected)
