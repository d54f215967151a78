"""An engine under lm-evaluation-harness: `RadixKVLM`; needs `lm-eval` (extra `lm-eval`).

Log-likelihoods of continuations that share a context are one pass over it; contexts that share
a few-shot prefix find it in the cache. Importing this module registers the model ``radixkv``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from radixkv.config import KVConfig, SamplingParams
from radixkv.engine import Engine
from radixkv.request import ScoreRequest
from radixkv.text import tokenizer_lock

_BATCH = 64  # contexts that wait in the engine at once
_FIELDS = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")  # of generation, as they are

logger = logging.getLogger("radixkv")


@register_model("radixkv")
class RadixKVLM(TemplateLM):
    """What the harness asks of a model, on an `Engine`.

    Args:
        engine: what runs the requests; it needs a tokenizer. None makes one.
        pretrained: folder or hub id of the model, without an engine.
        kv_dtype, capacity: of its pages, as `KVConfig`.
        add_bos_token: begin every text with the tokenizer's special tokens.
        max_gen_toks: most new tokens where a task does not say.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        pretrained: str | None = None,
        kv_dtype: str = "int8",
        capacity: int | str | None = None,
        add_bos_token: bool = False,
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if (engine is None) == (pretrained is None):
            raise ValueError(
                f"RadixKVLM: expected an engine or pretrained=, got {engine!r}, {pretrained!r}"
            )
        if engine is None:
            engine = Engine.from_pretrained(
                str(pretrained),
                kv=KVConfig(dtype=kv_dtype, capacity=capacity),
                device=device or "auto",
            )
        if engine.tokenizer is None:
            raise ValueError("engine: expected one with a tokenizer, got none; give it one")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.add_bos_token = add_bos_token
        self.max_gen_toks = max_gen_toks
        pool_tokens = engine.cache.pool.num_pages * engine.cache.config.page_size
        # The last token of a continuation is scored, not run; the engine counts it all the same.
        self.max_length = min(engine.max_positions or pool_tokens, pool_tokens) - 1

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """What tells this model's tokenizer from others."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text; a beginning-of-text token that is there already is not doubled."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            special = False
        with tokenizer_lock(self.tokenizer):
            return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

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
            tails.append(tail)
        out = [(0.0, True)] * len(requests)  # of an empty continuation
        engine = self.engine
        # In the order of their tokens: those that share a prefix come one after another.
        for contexts in _batches(sorted(by_context)):
            scored: list[list[int]] = []
            asked: list[ScoreRequest] = []
            for ids in contexts:
                places = [place for place in by_context[ids] if tails[place]]
                if places:
                    ours = engine.encode_continuations(list(ids), [tails[p] for p in places])
                    asked.append(ScoreRequest(list(ids), ours, None))
                    scored.append(places)
            for places, scores in zip(scored, engine.run_all(asked), strict=True):
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
            for request, result in zip(batch, self.engine.generate(prompts, params), strict=True):
                out.append(result.text)
                self.cache_hook.add_partial("generate_until", request.args, result.text)
        return out

    def _sampling(self, options: dict[str, Any]) -> SamplingParams:
        fields = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        samples = fields.pop("do_sample", False)
        known = {name: fields.pop(name) for name in _FIELDS if name in fields}
        until, max_new_tokens = fields.pop("until", []), fields.pop("max_gen_toks")
        temperature = fields.pop("temperature", 1.0 if samples else 0.0)
        if fields:
            raise ValueError(
                f"generation_kwargs: expected until, max_gen_toks, do_sample, temperature, "
                f"{', '.join(_FIELDS)}, got {', '.join(sorted(fields))}; leave those out"
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
