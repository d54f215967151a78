"""What a request gives: results, samples, scores, and deltas as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why a sample ended: end token, stop string or whole text; its length; abort or time-out."""


@dataclass(slots=True)  # one a token: to make a frozen one takes three times as long
class Delta:
    """A piece of one sample, as it comes.

    Attributes:
        index: which sample.
        text: what can be shown now; never part of a character or of a stop string.
        token_ids: tokens generated since the last delta of this sample.
        finish_reason: on the last delta: "stop", "length" or "abort".
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Sample:
    """One generated continuation.

    Attributes:
        token_ids: all generated tokens, the one that ended it included.
        text: their text, without the stop string or the token that ended it. If the last
            character was cut short by ``max_new_tokens``, it shows as the tokenizer decodes it.
        finish_reason: "stop", "length" or "abort".
        stop_reason: the stop string or token id that ended it; None where a schema, regex or
            grammar did.
        logprobs: per token, id to log-probability (natural log, of the model's own
            distribution); None unless asked for.
        cumulative_logprob: sum of the tokens' log-probabilities.
        score: of a beam: cumulative_logprob / len(token_ids) ** length_penalty.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float = 0.0
    score: float | None = None


@dataclass(slots=True)
class Metrics:
    """Where one request's time and tokens went.

    Attributes:
        queue_s: from submission until pages were reserved.
        ttft_s: from submission until the first token.
        total_s: from submission until the end.
        prefill_tokens: prompt tokens that the model ran.
        decode_tokens: other tokens that the model ran.
    """

    queue_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(slots=True)
class Result:
    """What a prompt gave.

    Attributes:
        prompt_token_ids: the prompt as tokens.
        samples: best first for beams, else by index.
        cached_tokens: prompt tokens whose KV came from the cache; at most one less than all.
        prompt_logprobs: per prompt token; the first has None. None unless asked for.
        metrics: times and token counts.
    """

    prompt_token_ids: list[int]
    samples: list[Sample]
    cached_tokens: int
    prompt_logprobs: list[dict[int, float] | None] | None
    metrics: Metrics

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation is after its prompt.

    Attributes:
        logprob: sum of ``token_logprobs``, natural log.
        token_logprobs: of each token of the continuation, given all before it.
        is_greedy: every token was the most likely one.
    """

    logprob: float
    token_logprobs: list[float]
    is_greedy: bool
