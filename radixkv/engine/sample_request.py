"""Samples of one prompt: they share its pages, and each goes on by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any

from radixkv.cache.lease import Lease
from radixkv.config import SamplingParams
from radixkv.engine.guided import Guide
from radixkv.engine.request import Request
from radixkv.engine.results import Delta, FinishReason, Result, Sample
from radixkv.engine.sampling import Sampled, SamplerRow, fresh_seed, top_logprobs
from radixkv.engine.scheduler import Output, Scheduler, Sequence
from radixkv.text import TextEnd, TextStream


@dataclass(slots=True)
class _SampleState:
    """One sample as it grows.

    Attributes:
        row: what is drawn from next; holds the tokens.
        stream: the text of those tokens that were shown to it.
        num_shown: how many those are.
        last_token: `time.perf_counter` when the last one came.
    """

    row: SamplerRow
    stream: TextStream
    num_shown: int = 0
    last_token: float | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class SampleRequest(Request):
    """``n`` samples of one prompt; all share the prompt's pages.

    Args:
        eos_token_ids: ends a sample, unless ``params.ignore_eos``.
        guide: what ``params`` constrain the text to, at its beginning; each sample forks it.
        on_lease: gets a sample's lease at its end, with the KV of what was run of it, instead of
            its release; nothing where it has no pages then.
        kept_index: whose.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        namespace: Hashable,
        tokenizer: Any,
        eos_token_ids: Collection[int],
        *,
        guide: Guide | None = None,
        record: bool = False,
        lease: Lease | None = None,
        on_lease: Callable[[Lease], None] | None = None,
        kept_index: int = 0,
    ) -> None:
        super().__init__(prompt_token_ids, params, namespace, record=record, lease=lease)
        seed = fresh_seed() if params.seed is None else params.seed
        self._stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= set(eos_token_ids)
        after: list[int] | TextEnd = prompt_token_ids
        if tokenizer is not None:
            skip = params.skip_special_tokens
            after = TextEnd(tokenizer, prompt_token_ids, skip_special_tokens=skip)
        self._samples = [
            _SampleState(
                SamplerRow(
                    params, seed, i, prompt_token_ids, [], None if guide is None else guide.fork()
                ),
                TextStream(
                    tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=params.stop if tokenizer is not None else (),
                    after=after,
                ),
            )
            for i in range(params.n)
        ]
        self._index: dict[Sequence, int] = {}  # which sample a sequence is
        self._num_open = params.n
        self.guides = [s.row.guide for s in self._samples if s.row.guide is not None]
        # Where nobody reads along and no text can end a sample, all of it is decoded at the end.
        self._needs_text = tokenizer is not None and (record or bool(params.stop))
        self._on_lease = on_lease
        self._kept_index = kept_index
        self._prompt_logprobs: list[dict[int, float] | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    def start(self, scheduler: Scheduler) -> None:
        seq = self._first_sequence(scheduler)
        if self._prompt_logprobs is not None:
            seq.logits_from = 0
        self._add(seq)

    def on_output(self, output: Output) -> list[SamplerRow]:
        seq, start, stop, _, _, _, _ = output
        index = self._index.get(seq)
        if index is not None and start >= len(self.prompt_token_ids):
            self.metrics.decode_tokens += stop - start
        else:
            self._count(output)
        if index is not None:
            return [] if stop < len(seq.token_ids) else [self._samples[index].row]
        self.cached_tokens = seq.num_cached or 0
        if self._prompt_logprobs is not None:
            self._note_prompt_logprobs(output)
        if output.stop < len(seq.token_ids):
            return []
        assert self._scheduler is not None
        seq.logits_from = None
        self._scheduler.commit(seq, len(self.prompt_token_ids))
        return [state.row for state in self._samples]

    def _note_prompt_logprobs(self, output: Output) -> None:
        assert self._prompt_logprobs is not None
        if output.logits_from == 0:
            self._prompt_logprobs = [None]  # from the start again after a preemption
        targets = self.prompt_token_ids[output.logits_from + 1 : output.stop + 1]
        if targets:
            rows = output.logits[: len(targets)]
            self._prompt_logprobs += top_logprobs(rows, targets, self.params.prompt_logprobs)

    def on_sampled(self, seq: Sequence, sampled: list[Sampled], now: float) -> None:
        index = self._index.get(seq)
        if index is not None:
            self._accept(seq, self._samples[index], sampled[0], now)
        else:
            assert self._scheduler is not None
            # Fork before any of them goes on: all share the prompt's pages.
            twins = [seq]
            for _ in self._samples[1:]:
                twins.append(self._scheduler.fork(seq))
                self._sequences.append(twins[-1])
            self._index = {twin: i for i, twin in enumerate(twins)}
            for i, token in enumerate(sampled):
                self._accept(twins[i], self._samples[i], token, now)
        if not self._num_open:
            self.finish(self.partial_result())

    def _accept(self, seq: Sequence, state: _SampleState, token: Sampled, now: float) -> None:
        row = state.row
        token_id, logprob, top = token
        token_ids = row.token_ids
        token_ids.append(token_id)
        state.cumulative_logprob += logprob
        if top is not None:
            state.logprobs.append(top)
        last, state.last_token = state.last_token, now
        if last is None:
            self._note_token(now, None)
        else:
            self.num_tokens += 1
            self.token_gaps.append(now - last)
        text, guide = "", row.guide
        reason: FinishReason | None = None
        if token_id in self._stop_ids:
            reason, state.stop_reason = "stop", token_id
        else:
            if guide is not None:
                guide.advance(token_id)
                reason = "stop" if guide.finished else None
            if self._needs_text:
                text = self._show(state)
                if state.stream.stopped is not None:
                    reason, state.stop_reason = "stop", state.stream.stopped
            if reason is None and len(token_ids) == self.params.max_new_tokens:
                reason = "length"
        if reason is None:
            seq.token_ids.append(token_id)
        else:
            state.finish_reason = reason
            text += self._show(state)
            text += state.stream.finish(end_token_id=token_id if reason == "stop" else None)
            if state.stream.stopped is not None:  # by the last characters, which were held back
                reason = state.finish_reason = "stop"
                state.stop_reason = state.stream.stopped
            self._num_open -= 1
            if guide is not None:
                self.guides.remove(guide)
            self._close(seq, row.index)
        if self._record:
            self._deltas.append(Delta(row.index, text, [token_id], reason))
            if self._listeners:
                self._notify()

    def _show(self, state: _SampleState) -> str:
        """The text of the tokens that came since the last call; a stop token is none."""
        token_ids = state.row.token_ids
        stop = len(token_ids)
        if state.finish_reason == "stop" and state.stop_reason == token_ids[-1]:
            stop -= 1
        fresh = token_ids[state.num_shown : stop]
        state.num_shown = stop
        return state.stream.push(fresh)

    def _close(self, seq: Sequence, index: int) -> None:
        if index == self._kept_index and self._on_lease is not None:
            self._hand_over(seq, self._on_lease)
        else:
            self._remove(seq, commit=seq.num_computed)

    def _free(self) -> None:
        # Before its first token all samples are the one sequence that has no index.
        for seq in list(self._sequences):
            self._close(seq, self._index.get(seq, self._kept_index))

    def _let_go(self) -> None:
        super()._let_go()
        self._index.clear()
        self._on_lease = None

    def partial_result(self) -> Result:
        samples = []
        for i, state in enumerate(self._samples):
            if state.finish_reason is None:
                tail = self._show(state) + state.stream.finish()
                state.finish_reason = "abort"
                if state.stream.stopped is not None:  # by the last characters, held back till now
                    state.finish_reason, state.stop_reason = "stop", state.stream.stopped
                if self._record:
                    self._deltas.append(Delta(i, tail, [], state.finish_reason))
                    self._notify()
            samples.append(
                Sample(
                    token_ids=state.row.token_ids,
                    text=state.stream.text,
                    finish_reason=state.finish_reason,
                    stop_reason=state.stop_reason,
                    logprobs=state.logprobs if self.params.logprobs is not None else None,
                    cumulative_logprob=state.cumulative_logprob,
                )
            )
        return Result(
            self.prompt_token_ids, samples, self.cached_tokens, self._prompt_logprobs, self.metrics
        )
