"""What callers pass (prompts, parameters, continuations) is checked and becomes requests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import BeamParams, SamplingParams, require_namespace
from radixkv.engine.beam_request import BeamRequest
from radixkv.engine.guided import Guide, make_guide
from radixkv.engine.limits import Limits
from radixkv.engine.many import deliver, prompt_name, require_on_error, split_prompts
from radixkv.engine.request import Request
from radixkv.engine.sample_request import SampleRequest
from radixkv.models.runner import ModelRunner
from radixkv.names import SAMPLING_MEANINGS, require_known
from radixkv.text import (
    Conversation,
    continue_conversation,
    encode_continuation,
    encode_continuations,
    encode_prompt,
    is_chat,
)


@dataclass(frozen=True)
class Intake:
    """Makes token ids and requests of what callers pass, or says what is wrong with it.

    Nothing here runs anything, or takes a page.

    Attributes:
        tokenizer: None allows token ids only.
        eos_token_ids: end a sample.
    """

    runner: ModelRunner
    cache: PrefixCache
    tokenizer: Any
    eos_token_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        """Tokens that the model can read and draw, as it is now."""
        return self.runner.vocab_size

    @property
    def limits(self) -> Limits:
        """What may be asked, as the model is now."""
        return Limits(
            self.cache,
            self.vocab_size,
            self.runner.max_positions,
            has_tokenizer=self.tokenizer is not None,
        )

    def encode(self, prompt: Any, *, name: str = "prompt") -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(self.tokenizer, prompt, vocab_size=self.vocab_size, name=name)

    def sampling_params(self, params: Any, fields_: dict[str, Any]) -> SamplingParams:
        """``params``, or new ones of ``fields_``; raises on both, or on an unknown field."""
        known = [field.name for field in fields(SamplingParams)]
        require_known("SamplingParams", fields_, known, SAMPLING_MEANINGS)
        if params is None:
            return SamplingParams(**fields_)
        if fields_:
            raise TypeError(
                f"params: expected params or fields, got both; use "
                f"dataclasses.replace(params, {', '.join(f'{k}=...' for k in fields_)})"
            )
        if not isinstance(params, SamplingParams):
            mend = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams(...)"
            raise TypeError(
                f"params: expected SamplingParams, got {params!r} of type "
                f"{type(params).__name__}; use {mend}"
            )
        return params

    def make_guide(self, params: SamplingParams) -> Guide | None:
        """What ``params`` constrain a text to; raises what is wrong with it."""
        return make_guide(
            params,
            self.tokenizer,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )

    def encode_tail(
        self,
        token_ids: list[int],
        tail: Any,
        conversation: Conversation | None,
        *,
        ended: bool,
        shows_special: bool,
    ) -> tuple[list[int], Conversation | None]:
        """All tokens of a branch that goes on with ``tail``, and its chat where that is known.

        Text and ids follow as they are, messages as the chat template has them.

        Args:
            conversation: the branch's chat so far.
            ended: the last token ended a sample, and is no text.
            shows_special: special tokens inside the last answer are part of its text.
        """
        if is_chat(tail):
            return continue_conversation(
                self.tokenizer,
                token_ids,
                tail,
                conversation=conversation,
                ended=ended,
                shows_special=shows_special,
                eos_token_ids=self.eos_token_ids,
                vocab_size=self.vocab_size,
            )
        tail_ids = encode_continuation(
            self.tokenizer, tail, after=token_ids, vocab_size=self.vocab_size
        )
        return token_ids + tail_ids, conversation

    def encode_continuations(
        self, token_ids: list[int], continuations: Sequence[Any]
    ) -> list[list[int]]:
        """Token ids of each continuation of a prompt, checked for length and capacity."""
        tails = encode_continuations(
            self.tokenizer, continuations, after=token_ids, vocab_size=self.vocab_size
        )
        longest = max(map(len, tails))
        limits = self.limits
        limits.check_length(len(token_ids), longest - 1)  # the last token is scored, not run
        # All write on in a copy of the prompt's last, open page but the last, whose own it is.
        page_size, num_prompt = self.cache.config.page_size, len(token_ids)
        pages = -(-(num_prompt + longest - 1) // page_size)
        if sum(len(tail) > 1 for tail in tails) > 1 and num_prompt % page_size:
            pages += 1
        limits.check_pages(pages, f"a prompt of {num_prompt} tokens and {longest} after it")
        return tails

    def make_request(
        self,
        prompt: Any,
        params: Any,
        namespace: Hashable,
        fields_: dict[str, Any],
        *,
        record: bool = False,
        name: str = "prompt",
    ) -> Request:
        """One prompt as a request.

        Args:
            record: keep its deltas for a reader.
            name: what errors call the prompt.
        """
        require_namespace(namespace)
        if not isinstance(params, BeamParams) or fields_:
            params = self.sampling_params(params, fields_)
        token_ids = self.encode(prompt, name=name)
        self.limits.check_request(token_ids, params, name=name)
        if isinstance(params, BeamParams):
            return BeamRequest(
                token_ids,
                params,
                namespace,
                self.tokenizer,
                self.eos_token_ids,
                self.vocab_size,
                record=record,
            )
        return SampleRequest(
            token_ids,
            params,
            namespace,
            self.tokenizer,
            self.eos_token_ids,
            guide=self.make_guide(params),
            record=record,
        )

    def make_requests(
        self,
        prompts: Any,
        params: Any,
        namespace: Hashable,
        fields_: dict[str, Any],
        on_error: str,
    ) -> tuple[bool, list[Request | Exception]]:
        """Whether it is one prompt, and a request for each, or why it can't be one.

        Raises:
            Exception: one that is not a single prompt's; or the first prompt's, unless
                ``on_error`` is ``"return"``.
        """
        require_on_error(on_error)
        require_namespace(namespace)
        single, each = split_prompts(prompts)
        chosen = self._params_of_each(params, fields_, len(each))
        made: list[Request | Exception] = []
        for i, (prompt, param) in enumerate(zip(each, chosen, strict=True)):
            made.append(self._try_make(prompt, param, namespace, prompt_name(i, single)))
            if on_error == "raise" and isinstance(made[-1], Exception):
                failure = [None] * i + [made.pop()] + [None] * (len(each) - i - 1)
                deliver(failure, is_one=single, on_error=on_error)
        return single, made

    def _params_of_each(self, params: Any, fields_: dict[str, Any], count: int) -> list[Any]:
        if not isinstance(params, (list, tuple)):
            if not isinstance(params, BeamParams) or fields_:
                params = self.sampling_params(params, fields_)
            return [params] * count
        if len(params) != count:
            raise ValueError(f"params: expected one for each of {count} prompts, got {len(params)}")
        if fields_:
            self.sampling_params(params, fields_)  # says that it is one or the other
        return list(params)

    def _try_make(
        self, prompt: Any, params: Any, namespace: Hashable, name: str
    ) -> Request | Exception:
        try:
            return self.make_request(prompt, params, namespace, {}, name=name)
        except Exception as error:
            return error
