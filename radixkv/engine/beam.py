"""Beam search: which continuations live, which are finished, when to stop. No model, no cache.

The rule is that of ``transformers`` ``generate(num_beams=width, do_sample=False)``: at each
step the best ``max(2, 1 + number of end ids) * width`` continuations of all live beams are
ranked by their sum of log-probabilities. Those among the first ``width`` that end (at an end id,
or because ``max_new_tokens`` is reached) become finished hypotheses; the best ``width`` that do
not end live on. The best ``width`` finished hypotheses by score are kept.

    score = (sum of log-probabilities) / (new tokens, the end id included) ** length_penalty

The search is done when ``max_new_tokens`` is reached, or when ``width`` hypotheses are finished
and, by ``early_stopping``: ``True``, at once; ``False``, when the best live beam, scored at its
length so far, is no better than the worst finished one; ``"never"``, the same with the live beam
scored at ``max_new_tokens`` where ``length_penalty`` is above 0. ``width=1`` is greedy search.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from radixkv.config import BeamParams
from radixkv.engine.results import FinishReason
from radixkv.engine.sampling import log_normalizer
from radixkv.errors import NonFiniteError


class Hypothesis(NamedTuple):
    """One finished beam.

    Attributes:
        token_ids: the new tokens, the end id included.
        score: cumulative_logprob / len(token_ids) ** length_penalty, what ranks it.
        cumulative_logprob: sum of the tokens' log-probabilities (natural log).
        finish_reason: ``"stop"`` at an end id, ``"length"`` at ``max_new_tokens``.
        stop_reason: the end id, or None.
    """

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None


class _Step(NamedTuple):
    """A token and the beam before it; beams share their past through these links."""

    token_id: int
    before: _Step | None


class BeamSearch:
    """The state of one search; ``advance`` it with the logits of its live beams until ``done``.

    Args:
        params: width, lengths, penalty, early stopping.
        eos_token_ids: the model's end ids; unused if ``params.ignore_eos``.
            ``params.stop_token_ids`` end a beam too.
        vocab_size: columns of the logits.
        decoder_prompt_len: prompt tokens; scores count new tokens alone, so it is only kept.
    Raises:
        ValueError: ``max_new_tokens ** length_penalty`` is not a float32.

    >>> search = BeamSearch(
    ...     BeamParams(width=2, max_new_tokens=2),
    ...     eos_token_ids=[0],
    ...     vocab_size=3,
    ...     decoder_prompt_len=5,
    ... )
    >>> search.advance(torch.tensor([[0.1, 0.2, 0.7]]).log())
    [(0, 2), (0, 1)]
    >>> search.advance(torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.3, 0.4]]).log())
    []
    >>> [(h.token_ids, h.finish_reason) for h in search.results()]
    [([2, 0], 'stop'), ([2, 1], 'length')]
    """

    def __init__(
        self,
        params: BeamParams,
        *,
        eos_token_ids: Collection[int],
        vocab_size: int,
        decoder_prompt_len: int,
    ) -> None:
        longest = params.max_new_tokens
        limit = float(torch.finfo(torch.float32).max)
        if abs(params.length_penalty) * math.log(longest) >= math.log(limit):
            raise ValueError(
                f"BeamParams.length_penalty: expected max_new_tokens ** length_penalty within "
                f"float32, got {longest} ** {params.length_penalty}; use one nearer to 0"
            )
        end_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids.update(eos_token_ids)
        self.params = params
        self.end_ids = frozenset(end_ids)
        self.vocab_size = vocab_size
        self.decoder_prompt_len = decoder_prompt_len
        self.num_live = 1
        self.num_new_tokens = 0
        self.done = False
        self._live: list[_Step | None] = [None]
        # Sums of log-probabilities of the live beams, best first. [num_live] float32, CPU.
        self._live_scores = torch.zeros(1)
        self._finished: list[Hypothesis] = []

    def advance(self, logits: Tensor) -> list[tuple[int, int]]:
        """Take one step and return the new live beams.

        On an error nothing changes. With fewer possible continuations than ``width`` (a small
        vocabulary, or -inf logits), fewer beams live.

        Args:
            logits: of the live beams' last tokens, in row order. Shape [num_live, vocab_size],
                a float dtype, any device.
        Returns:
            (parent row, token id) of each new live beam, best first: beam i of the next step
            continues row ``parent`` of this one. Empty when the search is done.
        Raises:
            ValueError: logits of another shape, or the search is done.
            NonFiniteError: a row with NaN, with +inf, or with nothing but -inf.

        Complexity: O(num_live * vocab_size); one copy of O(width ** 2) numbers to the host.
        """
        if self.done:
            raise ValueError("advance: the search is done; read results()")
        if logits.shape != (self.num_live, self.vocab_size):
            raise ValueError(
                f"logits: expected shape [num_live, vocab_size] = "
                f"[{self.num_live}, {self.vocab_size}], got {list(logits.shape)}"
            )
        width = self.params.width
        num_kept = max(2, 1 + len(self.end_ids)) * width
        scores, tokens = self._candidates(logits, num_kept)
        self.num_new_tokens += 1
        last_step = self.num_new_tokens == self.params.max_new_tokens
        penalty = self.num_new_tokens**self.params.length_penalty

        # A stable sort: of equal sums, the better parent goes first.
        scores, order = scores.flatten().sort(descending=True, stable=True)
        order = order[:num_kept]
        scores = scores[:num_kept]
        ranked = scores > -torch.inf
        parents = (order // tokens.shape[1])[ranked].tolist()
        token_ids = tokens.flatten()[order][ranked].tolist()
        scores = scores[ranked]
        sums: list[float] = scores.tolist()
        penalized: list[float] = (scores / penalty).tolist()

        live: list[int] = []
        for rank, (parent, token_id) in enumerate(zip(parents, token_ids, strict=True)):
            ended = token_id in self.end_ids
            if not (ended or last_step):
                if len(live) < width:
                    live.append(rank)
            elif rank < width:
                self._finished.append(
                    Hypothesis(
                        token_ids=_path(_Step(token_id, self._live[parent])),
                        score=penalized[rank],
                        cumulative_logprob=sums[rank],
                        finish_reason="stop" if ended else "length",
                        stop_reason=token_id if ended else None,
                    )
                )
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[width:]

        self._live = [_Step(token_ids[rank], self._live[parents[rank]]) for rank in live]
        self._live_scores = scores[live]
        if not live or self._cannot_improve():
            self.done = True
            self.num_live = 0
            self._live = []
            return []
        self.num_live = len(live)
        return [(parents[rank], token_ids[rank]) for rank in live]

    def results(self) -> list[Hypothesis]:
        """Return the best ``num_return`` finished hypotheses, best first.

        Fewer when there never were as many (a vocabulary smaller than ``num_return``).

        Raises:
            ValueError: the search is not done.
        """
        if not self.done:
            raise ValueError("results: the search is not done; advance() it until done")
        num_return = self.params.num_return
        return self._finished[: self.params.width if num_return is None else num_return]

    def _candidates(self, logits: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
        """Return the sums and ids of each row's best tokens. Shapes [num_live, k], on the CPU.

        The best ``num_kept`` of all rows are among the best ``num_kept`` of each row.
        """
        logits = logits.float()
        normalizer = log_normalizer(logits)[:, None]
        bad = (~normalizer.isfinite()).flatten().nonzero().flatten().tolist()
        if bad:
            raise NonFiniteError(
                f"logits: expected finite numbers or -inf, got NaN, +inf or nothing but -inf in "
                f"the rows of beams {bad}; check the model's weights and dtype"
            )
        best, tokens = logits.topk(min(num_kept, self.vocab_size), dim=-1)
        return (best - normalizer).cpu() + self._live_scores[:, None], tokens.cpu()

    def _cannot_improve(self) -> bool:
        params = self.params
        if len(self._finished) < params.width:
            return False
        if params.early_stopping is True or params.width == 1:
            return True
        length = self.num_new_tokens
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_new_tokens
        best_possible = self._live_scores[0] / length**params.length_penalty
        return not bool(best_possible > self._finished[-1].score)


def _path(step: _Step | None) -> list[int]:
    """Return the token ids that lead to ``step``, first token first."""
    token_ids: list[int] = []
    while step is not None:
        token_ids.append(step.token_id)
        step = step.before
    token_ids.reverse()
    return token_ids
