"""Beam search over pages: beams are forked, and given up, as `BeamSearch` chooses."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING, Any

import torch

from radixkv.cache.lease import Lease
from radixkv.config import BeamParams
from radixkv.engine.beam import BeamSearch
from radixkv.engine.request import Request
from radixkv.engine.results import Delta, Result, Sample
from radixkv.engine.sampling import SamplerRow
from radixkv.engine.scheduler import Output, Scheduler, Sequence
from radixkv.text import TextStream

if TYPE_CHECKING:
    from torch import Tensor


class BeamRequest(Request):
    """Beam search; live beams share pages, and reordering moves references, never pages."""

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: BeamParams,
        namespace: Hashable,
        tokenizer: Any,
        eos_token_ids: Collection[int],
        vocab_size: int,
        *,
        record: bool = False,
        lease: Lease | None = None,
    ) -> None:
        super().__init__(prompt_token_ids, params, namespace, record=record, lease=lease)
        self._tokenizer = tokenizer
        self._search = BeamSearch(
            params,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            decoder_prompt_len=len(prompt_token_ids),
        )
        self._last_token: float | None = None
        self._beams: list[Sequence] = []
        self._logits: dict[Sequence, Tensor] = {}  # of each beam's last token, as they come

    def start(self, scheduler: Scheduler) -> None:
        seq = self._first_sequence(scheduler)
        self._beams = [seq]
        self._add(seq)

    def on_output(self, output: Output) -> list[SamplerRow]:
        self._count(output)
        seq, num_prompt = output.sequence, len(self.prompt_token_ids)
        self.cached_tokens = self.cached_tokens or seq.num_cached or 0
        if output.stop < len(seq.token_ids):
            return []
        assert self._scheduler is not None
        if len(seq.token_ids) == num_prompt:
            self._scheduler.commit(seq, num_prompt)
        self._logits[seq] = output.logits[-1]
        if len(self._logits) == len(self._beams):
            self._advance()
        return []

    def _advance(self) -> None:
        assert self._scheduler is not None
        logits = torch.stack([self._logits[seq] for seq in self._beams])
        self._logits.clear()
        chosen = self._search.advance(logits)
        now = time.perf_counter()
        self._note_token(now, self._last_token)
        self._last_token = now
        if self._search.done:
            self._close()
            return
        # The last child of a beam takes its sequence over; the others fork it first.
        last_child = {parent: i for i, (parent, _) in enumerate(chosen)}
        beams = []
        for i, (parent, _) in enumerate(chosen):
            seq = self._beams[parent]
            if last_child[parent] != i:
                seq = self._scheduler.fork(seq)
                self._sequences.append(seq)
            beams.append(seq)
        for parent, seq in enumerate(self._beams):
            if parent not in last_child:
                self._remove(seq, commit=0)
        for seq, (_, token_id) in zip(beams, chosen, strict=True):
            seq.token_ids.append(token_id)
        self._beams = beams

    def _close(self) -> None:
        # Every beam begins with the prompt: keep that findable, to its last token.
        num_prompt = len(self.prompt_token_ids)
        result = self.partial_result()
        for seq in list(self._sequences):
            self._remove(seq, commit=num_prompt)
        self.finish(result)

    def _free(self) -> None:
        for seq in list(self._sequences):
            self._remove(seq, commit=len(self.prompt_token_ids))

    def _let_go(self) -> None:
        super()._let_go()
        self._beams = []
        self._logits.clear()

    def partial_result(self) -> Result:
        num_prompt = len(self.prompt_token_ids)
        if self._search.done:
            samples = [
                Sample(
                    token_ids=beam.token_ids,
                    text=self._text(beam.token_ids, ended=beam.finish_reason == "stop"),
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                    cumulative_logprob=beam.cumulative_logprob,
                    score=beam.score,
                )
                for beam in self._search.results()
            ]
        else:  # aborted: the live beams as they stand
            tails = [seq.token_ids[num_prompt:] for seq in self._beams] or [[]]
            del tails[self.params.num_return or self.params.width :]
            samples = [Sample(ids, self._text(ids, ended=False), "abort") for ids in tails]
        if self._record:
            for i, sample in enumerate(samples):
                self._deltas.append(Delta(i, sample.text, sample.token_ids, sample.finish_reason))
            self._notify()
        return Result(self.prompt_token_ids, samples, self.cached_tokens, None, self.metrics)

    def _text(self, token_ids: list[int], *, ended: bool) -> str:
        stream = TextStream(
            self._tokenizer,
            skip_special_tokens=self.params.skip_special_tokens,
            after=self.prompt_token_ids,
        )
        return stream.push(token_ids[:-1] if ended else token_ids) + stream.finish()
