"""Names of options: an unknown one is refused, with the one of ours that was meant."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from radixkv.errors import UnknownOptionError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_LIKE = 0.75  # of difflib's ratio: below it names have letters in common and nothing else

_NEW_TOKENS = "is max_new_tokens here"
_BEAMS = "is beam search: params=BeamParams(width=...)"
_CALLS = "is an argument of generate, stream, submit and open, beside the params"

# A name that other libraries use (lower case, with underscores), and what is said of it.
SAMPLING_MEANINGS: dict[str, str] = {
    **dict.fromkeys(
        (
            "max_tokens",
            "max_completion_tokens",
            "max_output_tokens",
            "max_gen_toks",
            "max_gen_len",
            "max_tokens_to_sample",
            "n_predict",
            "num_predict",
            "new_tokens",
        ),
        _NEW_TOKENS,
    ),
    "max_length": "counts the prompt too; give the new tokens alone as max_new_tokens",
    **dict.fromkeys(
        ("min_tokens", "min_new_tokens", "min_length"),
        "has no counterpart; ignore_eos=True with max_new_tokens gives an exact length",
    ),
    **dict.fromkeys(("num_return_sequences", "num_samples", "best_of", "num_generations"), "is n"),
    "do_sample": "is temperature=0 for False, a temperature above 0 for True",
    "greedy": "is temperature=0",
    **dict.fromkeys(
        (
            "num_beams",
            "beam_width",
            "beam_size",
            "beams",
            "use_beam_search",
            "width",
            "num_beam_groups",
            "length_penalty",
            "early_stopping",
        ),
        _BEAMS,
    ),
    **dict.fromkeys(
        ("stop_strings", "stop_sequences", "stop_sequence", "stop_words", "stop_list", "until"),
        "is stop",
    ),
    **dict.fromkeys(
        ("eos_token_id", "eos_token_ids", "end_id", "stop_ids", "stop_tokens"),
        "is stop_token_ids, which come beside the model's own end tokens",
    ),
    **dict.fromkeys(("repeat_penalty", "penalty_repeat", "rep_pen"), "is repetition_penalty"),
    "penalty_alpha": "has no counterpart",
    **dict.fromkeys(("random_seed", "manual_seed", "rng_seed", "generator"), "is seed"),
    **dict.fromkeys(("temp", "t"), "is temperature"),
    "nucleus": "is top_p",
    **dict.fromkeys(("k", "topk"), "is top_k"),
    "minp": "is min_p",
    **dict.fromkeys(
        ("guided_json", "response_format", "json", "schema", "structured_outputs"),
        "is json_schema=, a JSON schema",
    ),
    "guided_regex": "is regex",
    **dict.fromkeys(("guided_grammar", "ebnf", "lark", "gbnf"), "is grammar"),
    **dict.fromkeys(("guided_choice", "choices"), 'is regex="one|other"'),
    **dict.fromkeys(
        ("top_logprobs", "return_logprobs", "output_scores", "num_logprobs"),
        "is logprobs=k, the k best of each token",
    ),
    "echo": "is prompt_logprobs=k; Result.prompt_token_ids has the prompt",
    **dict.fromkeys(("timeout", "max_time", "timeout_seconds"), "is timeout_s"),
    "logits_processor": "is logits_processors, a list",
    **dict.fromkeys(
        ("bad_words", "bad_words_ids", "suppress_tokens", "sequence_bias"),
        "is logit_bias={token_id: -100}",
    ),
    "use_cache": "is always so",
    "stream": "is engine.stream(prompt, ...)",
    **dict.fromkeys(("use_tqdm", "verbose"), "is progress=True, of generate"),
    **dict.fromkeys(("prompt", "inputs", "input_ids", "messages"), "is the first argument"),
    **dict.fromkeys(("sampling_params", "generation_config"), "is params=SamplingParams(...)"),
    **dict.fromkeys(("cache_salt", "tenant", "user"), "is namespace"),
    "namespace": _CALLS,
    "progress": _CALLS,
}

BEAM_MEANINGS: dict[str, str] = {
    **{name: said for name, said in SAMPLING_MEANINGS.items() if said == _NEW_TOKENS},
    "max_length": SAMPLING_MEANINGS["max_length"],
    **dict.fromkeys(("num_beams", "beam_width", "beam_size", "beams", "k"), "is width"),
    **dict.fromkeys(
        ("n", "num_return_sequences", "best_of", "num_samples", "num_returns"), "is num_return"
    ),
    **dict.fromkeys(
        ("eos_token_id", "eos_token_ids", "stop_tokens"),
        SAMPLING_MEANINGS["eos_token_id"],
    ),
    **dict.fromkeys(
        ("stop", "stop_strings", "stop_sequences", "until"),
        "has no counterpart in a beam search; stop_token_ids end a beam",
    ),
    **dict.fromkeys(("alpha", "length_norm", "len_penalty"), "is length_penalty"),
    **dict.fromkeys(("timeout", "max_time"), "is timeout_s"),
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "do_sample",
            "logprobs",
            "prompt_logprobs",
            "logits_processors",
            "json_schema",
            "regex",
            "grammar",
        ),
        "is no part of a beam search, which takes the best; see SamplingParams",
    ),
    "namespace": _CALLS,
    "progress": _CALLS,
}

KV_MEANINGS: dict[str, str] = {
    **dict.fromkeys(("block_size", "tokens_per_block", "page_len"), "is page_size"),
    **dict.fromkeys(
        (
            "gpu_memory_utilization",
            "mem_fraction_static",
            "free_gpu_memory_fraction",
            "memory_fraction",
        ),
        "is capacity, in bytes",
    ),
    **dict.fromkeys(
        (
            "kv_cache_memory_bytes",
            "cache_size",
            "max_bytes",
            "num_bytes",
            "memory",
            "size",
            "max_memory",
            "kv_cache_size",
            "kvcache_space",
            "pool_size",
        ),
        "is capacity",
    ),
    **dict.fromkeys(
        ("num_pages", "num_blocks", "num_gpu_blocks_override", "max_tokens", "max_total_tokens"),
        "is capacity, in bytes; `radixkv calc` says how many bytes a token takes",
    ),
    **dict.fromkeys(
        ("kv_cache_dtype", "kv_dtype", "cache_dtype", "quantization", "format", "k_dtype"),
        "is dtype",
    ),
    **dict.fromkeys(("nbits", "bits"), 'is dtype: "int8" or "int4"'),
    **dict.fromkeys(("value_dtype", "dtype_v"), "is v_dtype"),
    **dict.fromkeys(
        ("eviction_policy", "radix_eviction_policy", "policy", "replacement"), "is eviction"
    ),
    **dict.fromkeys(("hadamard", "rotation", "use_hadamard"), 'is rotate="hadamard"'),
    **dict.fromkeys(("enable_prefix_caching", "prefix_caching", "cache_prompt"), "is always so"),
    **dict.fromkeys(
        ("backend", "device", "max_batch_tokens"), "is an argument of Engine, beside kv"
    ),
}

# Of the engine itself; what belongs into a KVConfig or to a request is added below.
ENGINE_MEANINGS: dict[str, str] = {
    **dict.fromkeys(("kv_config", "cache_config", "kv_cache"), "is kv=KVConfig(...)"),
    **dict.fromkeys(
        ("max_num_batched_tokens", "chunked_prefill_size", "n_batch", "prefill_chunk_size"),
        "is max_batch_tokens",
    ),
    **dict.fromkeys(("attention_backend", "attn_backend"), "is backend"),
    **dict.fromkeys(("schedule_policy", "scheduling_policy", "scheduler_policy"), "is policy"),
    **dict.fromkeys(
        ("model_name", "model_id", "model_path", "pretrained"), "is the first argument"
    ),
    **dict.fromkeys(
        ("max_model_len", "n_ctx", "context_length"), "is what the model's config says"
    ),
    **dict.fromkeys(("namespace", "progress"), "is an argument of generate, not of the engine"),
}


def snake_case(name: str) -> str:
    """The name in lower case, with underscores.

    >>> snake_case("maxNewTokens"), snake_case("top-P")
    ('max_new_tokens', 'top_p')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).replace("-", "_").lower()


def meaning(name: str, ours: Iterable[str], meanings: Mapping[str, str]) -> str:
    """What is meant by a name that is not ours, as the end of a sentence; empty if nobody knows.

    >>> meaning("max_tokens", ["max_new_tokens"], SAMPLING_MEANINGS)
    'max_tokens is max_new_tokens here'
    >>> meaning("temprature", ["temperature"], {})
    'temprature: did you mean temperature?'
    """
    ours = list(ours)
    plain = snake_case(str(name))
    if plain in ours:
        return f"{name}: did you mean {plain}?"
    if plain in meanings:
        return f"{name} {meanings[plain]}"
    like = difflib.get_close_matches(plain, [*ours, *meanings], n=1, cutoff=_LIKE)
    if not like:
        return ""
    if like[0] in ours:
        return f"{name}: did you mean {like[0]}?"
    return f"{name}: did you mean {like[0]}? It {meanings[like[0]]}"


def require_known(
    where: str, given: Iterable[str], ours: Collection[str], meanings: Mapping[str, str]
) -> None:
    """Raise UnknownOptionError, with what is meant, if one of ``given`` is not among ``ours``."""
    unknown = [name for name in given if name not in ours]
    if not unknown:
        return
    said = [text for name in unknown if (text := meaning(name, ours, meanings))]
    raise UnknownOptionError(
        f"{where}: expected options among {', '.join(ours)}, got "
        f"{', '.join(map(repr, unknown))}; {'; '.join(said) or 'leave it out'}"
    )


def named_options(
    where: str, meanings: Mapping[str, str]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: an unknown keyword of the function is refused with what is meant."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = list(inspect.signature(function).parameters.values())
        positional = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        ours = [p.name for p in parameters if p.name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            require_known(where, options, ours, meanings)
            if len(args) > positional:
                raise UnknownOptionError(
                    f"{where}: expected options by their names ({', '.join(ours)}), got "
                    f"{args[positional]!r} without one; write {where}(name=value)"
                )
            return function(*args, **options)

        return checked

    return decorate


def safe_repr(describe: Callable[[T], str]) -> Callable[[T], str]:
    """A decorator for ``__repr__``: it never raises, so that any message or debugger may ask.

    ``describe`` gives what stands after the class's name. It may run at any moment, also inside a
    step or of an object whose constructor raised: it must take no lock.
    """

    @functools.wraps(describe)
    def checked(self: T) -> str:
        try:
            said = describe(self)
        except Exception as error:  # half made, or half gone
            said = f"not whole: {type(error).__name__}"
        return f"<{type(self).__name__} {said}>"

    return checked


def named_fields(meanings: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """The same for the fields of a dataclass of options."""

    def decorate(kind: type[T]) -> type[T]:
        made: Any = kind
        made.__init__ = named_options(kind.__name__, meanings)(made.__init__)
        return kind

    return decorate
