"""An engine under lm-evaluation-harness: `RadixKVLM`; needs `lm-eval` (extra `lm-eval`).

Log-likelihoods of continuations that share a context are one pass over it; contexts that share
a few-shot prefix find it in the cache. With pages in the model's own dtype (``kv_dtype="model"``)
the figures are those of the harness's own ``hf`` model.

Importing this module registers the model ``radixkv``. From the command line,
``lm_eval --model radixkv --model_args pretrained=...`` finds it where radixkv is installed
(`radixkv.autoload`), and ``python -m radixkv.integrations.lm_eval --model radixkv
...`` in any case.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from radixkv.config import KVConfig, SamplingParams, require_int
from radixkv.engine.engine import Engine
from radixkv.engine.score_request import ScoreRequest
from radixkv.names import SAMPLING_MEANINGS, meaning
from radixkv.text import encode_continuation, tokenizer_lock

_BATCH = 64  # contexts that wait in the engine at once
# Of generation, as they are.
_FIELDS = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
    "seed",
)
_DEFAULT_LENGTH = 2048  # the harness's own, of models that name none
_NO_LENGTH = 10**12  # tokenizers that know no length name one beyond this

logger = logging.getLogger("radixkv")


class RadixKVLM(TemplateLM):
    """What the harness asks of a model, on an `Engine`.

    Args:
        engine: what runs the requests; it needs a tokenizer. None makes one.
        pretrained: folder or hub id of the model, without an engine.
        kv_dtype, capacity: of its pages, as `KVConfig`; without an engine.
        add_bos_token: begin every text with the tokenizer's special tokens, or with none; None
            does what the tokenizer does by itself, as ``hf`` does.
        prefix_token_id: stands before a text without a context; None is the beginning token,
            or the end token where there is none.
        max_length: tokens that the model sees at once; None is what its config says, or what
            the pool of pages holds if that is less.
        max_gen_toks: most new tokens where a task does not say.
        batch_size, max_batch_size: taken because the harness gives them, and without effect:
            the engine makes its own batches.
        options: of `Engine.from_pretrained`, without an engine: device, dtype, backend, ...
    Raises:
        TypeError, ValueError: an engine and what would make another, or neither; an option that
            is out of range or unknown.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        pretrained: str | None = None,
        kv_dtype: str | None = None,
        capacity: int | str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if (engine is None) == (pretrained is None):
            raise ValueError(
                f"RadixKVLM: expected an engine or pretrained=, got {engine!r}, {pretrained!r}"
            )
        if engine is None:
            kv = KVConfig(dtype=kv_dtype or "int8", capacity=capacity)  # type: ignore[arg-type]
            options = {name: value for name, value in options.items() if value is not None}
            if str(options.get("device", "")).startswith("cuda") and not torch.cuda.is_available():
                # The harness asks for "cuda:0" by itself; `hf` takes what there is then, too.
                logger.info("lm_eval: no GPU; device %r is left out", options.pop("device"))
            engine = Engine.from_pretrained(str(pretrained), kv=kv, **options)
        else:
            made = {"kv_dtype": kv_dtype, "capacity": capacity, **options}
            given = [name for name, value in made.items() if value is not None]
            if given:
                raise TypeError(
                    f"RadixKVLM: expected an engine, or pretrained= with options, got an engine "
                    f"and {', '.join(given)}; make the engine with these"
                )
        if engine.tokenizer is None:
            raise ValueError("engine: expected one with a tokenizer, got none; give it one")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.add_bos_token = add_bos_token
        self.custom_prefix_token_id = prefix_token_id
        self.max_gen_toks = require_int("max_gen_toks", max_gen_toks, 1)
        # A page of the context is copied where a continuation begins inside it.
        pool_tokens = (engine.cache.pool.num_pages - 1) * engine.cache.config.page_size
        own = _own_length(engine)
        most = min(own, pool_tokens)
        self.max_length = (
            most if max_length is None else require_int("max_length", max_length, 1, most)
        )
        if max_length is None and pool_tokens < own:
            logger.warning(
                "lm_eval: texts are cut to %d tokens, which is what the pages hold, and not to the "
                "model's %d; give more capacity",
                pool_tokens,
                own,
            )

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """What tells this model's tokenizer from others."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a text; a beginning-of-text token that is there already is not doubled."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        with tokenizer_lock(self.tokenizer):
            prefix = self.tokenizer.decode([self.prefix_token_id])
            if add_special_tokens is None and string.startswith(prefix):
                special = False
            options = {} if special is None else {"add_special_tokens": special}
            ids = list(self.tokenizer(string, **options)["input_ids"])
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and of what goes on after it.

        As the harness does it: spaces at the end of the context belong to the continuation, which
        is what is left of the whole text's tokens. Where these do not begin with the context's,
        because a token spans the border, that would lose some or all of the continuation: there
        it is encoded apart, as it goes on after the context's tokens.
        """
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:
            continuation = context[-num_spaces:] + continuation
            context = context[:-num_spaces]
        head, whole = self.tok_encode(context), self.tok_encode(context + continuation)
        if not head:
            return [self.prefix_token_id], whole
        if whole[: len(head)] == head and len(whole) > len(head):
            return head, whole[len(head) :]
        tail = encode_continuation(
            self.tokenizer, continuation, after=head, vocab_size=self.engine.vocab_size
        )
        return head, tail

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood and greediness of each continuation; see `TemplateLM.loglikelihood`.

        Raises:
            ValueError: a continuation without text, which every model would find certain.
        """
        for place, request in enumerate(requests):
            context, continuation = request.args
            if not continuation:
                raise ValueError(
                    f"continuation: expected some text, got {continuation!r} in request {place}, "
                    f"after {context[-40:]!r}; leave the request out"
                )
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return answers

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat by the model's own template."""
        with tokenizer_lock(self.tokenizer):
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood and greediness of each ``(key, context, continuation)`` of token ids."""
        by_context: dict[tuple[int, ...], list[int]] = {}
        tails: list[list[int]] = []
        for place, (_, context, tail) in enumerate(requests):
            num_over = len(context) + len(tail) - self.max_length - 1
            if num_over > 0:  # as the harness does: the oldest tokens go
                logger.warning("lm_eval: a context lost its first %d tokens", num_over)
            if num_over >= len(context):
                raise ValueError(
                    f"continuation: expected at most {self.max_length} tokens beside a context, "
                    f"got {len(tail)}; score long texts with loglikelihood_rolling"
                )
            by_context.setdefault(tuple(context[max(0, num_over) :]), []).append(place)
            if not tail:
                raise ValueError(
                    f"continuation: expected at least one token, got none in request {place}, "
                    f"after {self.tokenizer.decode(context[-9:])!r}; leave the request out"
                )
            tails.append(tail)
        out: list[Any] = [None] * len(requests)
        engine = self.engine
        # In the order of their tokens: those that share a prefix come one after another.
        for contexts in _batches(sorted(by_context)):
            scored: list[list[int]] = []
            asked: list[ScoreRequest] = []
            for ids in contexts:
                places = by_context[ids]
                ours = engine.core.intake.encode_continuations(
                    list(ids), [tails[p] for p in places]
                )
                asked.append(ScoreRequest(list(ids), ours, None))
                scored.append(places)
            for places, scores in zip(scored, engine.core.run_all(asked), strict=True):
                for place, score in zip(places, scores, strict=True):
                    out[place] = (score.logprob, score.is_greedy)
        for (key, _, _), answer in zip(requests, out, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return out

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text, in windows of the model's length."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            (text,) = request.args
            mine = [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            windows += mine
            counts.append(len(mine))
        scores = iter(self._loglikelihood_tokens(windows))
        out = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, out, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return out

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to its first stop string; greedy unless it samples."""
        out: list[str] = []
        for batch in _batches(requests):
            prompts, params = [], []
            for request in batch:
                context, options = request.args
                chosen = self._sampling(options)
                room = self.max_length - chosen.max_new_tokens
                if room < 1:
                    raise ValueError(
                        f"max_gen_toks: expected below {self.max_length}, got "
                        f"{chosen.max_new_tokens}; ask for fewer"
                    )
                prompts.append(self.tok_encode(context)[-room:] or [self.prefix_token_id])
                params.append(chosen)
            results = self.engine.generate(prompts, params)
            for request, chosen, result in zip(batch, params, results, strict=True):
                text = self._text(result.samples[0].token_ids, chosen.stop)
                out.append(text)
                self.cache_hook.add_partial("generate_until", request.args, text)
        return out

    def _text(self, token_ids: list[int], stop: Sequence[str]) -> str:
        """The text of what was generated, decoded by itself and cut as the harness does it."""
        with tokenizer_lock(self.tokenizer):
            text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
            end = self.tokenizer.decode([self.eot_token_id])
        return str(postprocess_generated_text(text, [*stop, end], None))

    def _sampling(self, options: dict[str, Any]) -> SamplingParams:
        fields = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        samples = fields.pop("do_sample", False)
        known = {name: fields.pop(name) for name in _FIELDS if name in fields}
        until, max_new_tokens = fields.pop("until", []), fields.pop("max_gen_toks")
        temperature = fields.pop("temperature", 1.0 if samples else 0.0)
        if fields:
            ours = ["until", "max_gen_toks", "do_sample", "temperature", *_FIELDS]
            said = [text for name in fields if (text := meaning(name, ours, SAMPLING_MEANINGS))]
            raise ValueError(
                f"generation_kwargs: expected {', '.join(ours)}, got {', '.join(sorted(fields))}; "
                f"{'; '.join([*said, 'leave those out'])}"
            )
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop=tuple(dict.fromkeys(text for text in until if text)),
            **known,
        )


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    items = list(items)
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def _own_length(engine: Engine) -> int:
    """Tokens that the model sees at once, by the rule of the harness."""
    config = engine.model.config
    config = getattr(config, "text_config", None) or config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if (length := getattr(config, name, None)) is not None:
            break
    else:
        length = getattr(engine.tokenizer, "model_max_length", None)
        if length is None or length > _NO_LENGTH:
            length = _DEFAULT_LENGTH
    return int(length if engine.max_positions is None else min(length, engine.max_positions))


def main() -> None:
    """The harness's command line, with this module registered in its own name."""
    from lm_eval.__main__ import cli_evaluate

    importlib.import_module("radixkv.integrations.lm_eval")
    cli_evaluate()


if __name__ == "__main__":
    main()
else:
    register_model("radixkv")(RadixKVLM)
