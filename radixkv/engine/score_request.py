"""Log-likelihood of continuations of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from radixkv.cache.lease import Lease
from radixkv.engine.request import Request, aborted_error
from radixkv.engine.results import Score
from radixkv.engine.sampling import SamplerRow
from radixkv.engine.scheduler import Output, Scheduler, Sequence

if TYPE_CHECKING:
    from torch import Tensor


class ScoreRequest(Request):
    """Log-likelihoods of continuations; the prompt is run once, then all of them together.

    Args:
        on_lease: gets a lease on the prompt and more, instead of its release; then the
            continuations become findable, too.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        continuations: list[list[int]],
        namespace: Hashable,
        *,
        lease: Lease | None = None,
        on_lease: Callable[[Lease], None] | None = None,
    ) -> None:
        super().__init__(prompt_token_ids, None, namespace, lease=lease)
        self._on_lease = on_lease
        self._keeps_all = on_lease is not None
        self._continuations = continuations
        self._logprobs: list[list[float]] = [[] for _ in continuations]
        self._greedy = [True] * len(continuations)
        self._index: dict[Sequence, int] = {}  # which continuation a sequence is

    def start(self, scheduler: Scheduler) -> None:
        seq = self._first_sequence(scheduler)
        self._add(seq)

    def on_output(self, output: Output) -> list[SamplerRow]:
        self._count(output)
        seq, num_prompt = output.sequence, len(self.prompt_token_ids)
        assert self._scheduler is not None
        if seq not in self._index:
            if output.stop < num_prompt:
                return []
            self.cached_tokens = seq.num_cached or 0
            self._score_first(output.logits[-1])
            self._scheduler.commit(seq, num_prompt)
            for i, continuation in enumerate(self._continuations):
                if len(continuation) > 1:
                    twin = self._scheduler.fork(seq)
                    twin.token_ids += continuation[:-1]
                    twin.logits_from = num_prompt
                    self._sequences.append(twin)
                    self._index[twin] = i
            if self._index:  # they write the last page first: nobody else is to own it
                self._remove(seq, commit=0)
            else:
                self._close(seq)
        else:
            self._score_rest(self._index[seq], output)
            if output.stop == len(seq.token_ids):
                self._close(seq)
        if not self._sequences:
            self.finish(self.partial_result())
        return []

    def _close(self, seq: Sequence) -> None:
        """Remove ``seq``, and make findable to the token what others may ask for."""
        on_lease, self._on_lease = self._on_lease, None
        if on_lease is not None:
            self._hand_over(seq, on_lease)
        else:
            # What a branch scored may well be what it goes on with.
            num_prompt = len(self.prompt_token_ids)
            self._remove(seq, commit=seq.num_computed if self._keeps_all else num_prompt)

    def _score_first(self, logits: Tensor) -> None:
        logprobs = logits.log_softmax(dim=-1)
        best = int(logprobs.argmax())
        for i, continuation in enumerate(self._continuations):
            self._logprobs[i] = [float(logprobs[continuation[0]])]
            self._greedy[i] = best == continuation[0]

    def _score_rest(self, index: int, output: Output) -> None:
        num_prompt = len(self.prompt_token_ids)
        if output.logits_from == num_prompt:  # the first chunk, perhaps again after a preemption
            del self._logprobs[index][1:]
        begin = output.logits_from - num_prompt + 1
        targets = self._continuations[index][begin : output.stop - num_prompt + 1]
        if not targets:
            return
        logprobs = output.logits.log_softmax(dim=-1)
        ids = torch.tensor(targets, device=logprobs.device)
        self._logprobs[index] += logprobs.gather(1, ids[:, None])[:, 0].tolist()
        self._greedy[index] &= bool((logprobs.argmax(dim=-1) == ids).all())

    def _let_go(self) -> None:
        super()._let_go()
        self._index.clear()
        self._on_lease = None

    def abort(self) -> None:
        """End with an error: half a score is none."""
        self.fail(aborted_error())

    def partial_result(self) -> list[Score]:
        return [
            Score(sum(logprobs), logprobs, greedy)
            for logprobs, greedy in zip(self._logprobs, self._greedy, strict=True)
        ]
