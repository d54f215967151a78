"""What a request may ask of an engine; checked before any work is done for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import BeamParams, SamplingParams, require_int
from radixkv.errors import CapacityError, ContextLengthError


@dataclass(frozen=True)
class Limits:
    """The bounds of one engine.

    Attributes:
        cache: whose pages a request must fit into.
        vocab_size: ids are below it.
        max_positions: of the model; None is without end.
        has_tokenizer: whether there is text.
    """

    cache: PrefixCache
    vocab_size: int
    max_positions: int | None
    has_tokenizer: bool

    def check_length(self, num_prompt: int, max_new_tokens: int, name: str = "prompt") -> None:
        """Raise ContextLengthError if the model has not that many positions."""
        limit = self.max_positions
        if limit is not None and num_prompt + max_new_tokens > limit:
            raise ContextLengthError(
                f"{name}: expected prompt plus max_new_tokens within the model's {limit} "
                f"positions, got {num_prompt} + {max_new_tokens} = "
                f"{num_prompt + max_new_tokens}; shorten the prompt or lower max_new_tokens"
            )

    def check_request(
        self, token_ids: list[int], params: SamplingParams | BeamParams, name: str = "prompt"
    ) -> None:
        """Raise if a request asks for what can't be served: length, pages, ids, options."""
        num_prompt, max_new_tokens = len(token_ids), params.max_new_tokens
        self.check_length(num_prompt, max_new_tokens, name)
        if isinstance(params, BeamParams):
            self._check_ids("BeamParams.stop_token_ids", params.stop_token_ids)
            # All beams live at once: the prompt's whole pages once, the rest for each.
            page_size = self.cache.config.page_size
            shared = num_prompt // page_size
            tail = -(-(num_prompt + max_new_tokens - 1) // page_size) - shared
            self.check_pages(shared + params.width * tail, f"{params.width} beams")
            return
        self._check_ids("SamplingParams.stop_token_ids", params.stop_token_ids)
        self._check_ids("SamplingParams.logit_bias", params.logit_bias or ())
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None:
                require_int(f"SamplingParams.{name}", value, 0, self.vocab_size)
        if params.stop and not self.has_tokenizer:
            raise ValueError(
                "SamplingParams.stop: expected an engine with a tokenizer, got none; "
                "use stop_token_ids"
            )
        self.check_tokens(num_prompt + max_new_tokens - 1, "prompt plus new tokens")

    def check_tokens(self, num_tokens: int, what: str) -> None:
        """Raise CapacityError unless one sequence of so many tokens fits the pool."""
        page_size = self.cache.config.page_size
        self.check_pages(-(-num_tokens // page_size), f"{num_tokens} tokens ({what})")

    def check_pages(self, num_pages: int, what: str) -> None:
        """Raise CapacityError unless the pool has so many pages."""
        total = self.cache.pool.num_pages
        if num_pages > total:
            page_size = self.cache.config.page_size
            raise CapacityError(
                f"{what}: needs {num_pages} pages of {page_size} tokens, but the pool has {total} "
                f"({total * page_size} tokens); shorten the request or raise KVConfig.capacity "
                f"to at least {num_pages * self.cache.codec.bytes_per_page} bytes"
            )

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        for token_id in token_ids:
            if token_id >= self.vocab_size:
                raise ValueError(
                    f"{name}: expected ids below the vocabulary's {self.vocab_size}, got {token_id}"
                )
