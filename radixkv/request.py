"""What is asked of the engine, how each kind of request goes on step by step, what it gives.

    Request            state and delivery, common to all
    ├── SampleRequest  n samples of one prompt, forked after its prefill
    ├── BeamRequest    beams on forked pages; which ones live is `BeamSearch`'s choice
    ├── ScoreRequest   log-likelihood of continuations of one prompt
    └── PrefillRequest only the KV of some tokens, for a `Branch`

A request owns its sequences in the scheduler. The engine hands it each `Output`; those of
samples come back as rows to draw from, so that one call samples for the whole batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from radixkv.beam import BeamSearch
from radixkv.cache import Lease
from radixkv.config import BeamParams, SamplingParams
from radixkv.errors import EngineClosedError, RadixKVError
from radixkv.failures import copy_of
from radixkv.guided import Guide
from radixkv.sampling import Sampled, SamplerRow, fresh_seed, top_logprobs
from radixkv.scheduler import Output, Scheduler, Sequence
from radixkv.text import TextEnd, TextStream

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("radixkv")


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
    finish_reason: str | None = None


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
    finish_reason: str
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


class Request:
    """A prompt on its way through the engine; `Engine.submit` makes it.

    ``lease``, if given, holds the KV of a prefix of the prompt; the request takes it over.

    Attributes:
        prompt_token_ids: the prompt as tokens.
        params: as given.
        namespace: whose cache it uses.
        cached_tokens: prompt tokens found in the cache; 0 until it is admitted.
        done: whether it has ended, by whatever road.
        error: why it failed; None otherwise.
        num_tokens: generated so far, over all samples.
        token_gaps: seconds between the tokens of one sample, over all samples.
        guides: those of its samples that go on; empty where nothing is constrained.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: Any,
        namespace: Hashable,
        *,
        record: bool = False,
        lease: Lease | None = None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.namespace = namespace
        self.cached_tokens = 0
        self.error: BaseException | None = None
        self.aborted = False
        self.metrics = Metrics()
        self.num_tokens = 0
        self.token_gaps: list[float] = []
        self.guides: list[Guide] = []
        self._queued = True
        self._record = record
        self._lease = lease
        self._deltas: deque[Delta] = deque()
        self.max_deltas: int | None = None  # that wait for a reader; more, and it is paused
        self.done = False
        self._ended = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        self.on_end: Callable[[Request], None] | None = None  # the engine's own book-keeping
        self._submitted = time.perf_counter()
        timeout_s = getattr(params, "timeout_s", None)
        self.deadline = None if timeout_s is None else self._submitted + timeout_s
        self._scheduler: Scheduler | None = None
        self._sequences: list[Sequence] = []
        self._result: Any = None

    def result(self) -> Any:
        """The `Result` (or list of `Score`).

        Raises:
            RadixKVError: it has not ended yet.
            Exception: what it failed with.
        """
        if not self.done:
            raise RadixKVError(
                "Request.result: expected a request that has ended, got one that runs; "
                "call Engine.step() until request.done"
            )
        self.raise_error()
        return self._result

    def raise_error(self) -> None:
        """Raise what it failed with, if it did; at every call."""
        error = self.error
        if error is None:
            return
        # The traceback holds frames that hold this request. So the catcher gets the error, and a
        # copy without it stays here: no cycle, which would keep the catcher's frames alive too.
        twin = copy_of(error)
        if twin is not error:
            self.error = twin.with_traceback(None)
        try:
            raise error
        finally:
            del error, twin

    def take_outcome(self) -> Any:
        """Its result, or the error that it failed with, which it forgets: it is the caller's."""
        error, self.error = self.error, None
        return self._result if error is None else error

    def take_deltas(self) -> list[Delta]:
        """The deltas that came since the last call."""
        taken = []
        while self._deltas:
            taken.append(self._deltas.popleft())
        return taken

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended; False on time-out."""
        return self._ended.wait(timeout_s)

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at each delta and at the end, in the engine's thread."""
        self._listeners.append(callback)

    # -- called by the engine ----------------------------------------------------------------

    def start(self, scheduler: Scheduler) -> None:
        """Put the first sequence into the scheduler."""
        raise NotImplementedError

    def recompute(self) -> None:
        """Give up the KV that it was given, before it is started; it is computed anew."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def on_output(self, output: Output) -> list[SamplerRow]:
        """Take (and `_count`) one step's output; returns rows to draw from its last logits."""
        raise NotImplementedError

    def on_sampled(self, seq: Sequence, sampled: list[Sampled], now: float) -> None:
        """Take what was drawn at ``now`` (`time.perf_counter`) for the rows of `on_output`."""
        raise NotImplementedError

    def partial_result(self) -> Any:
        """What there is when the request is aborted."""
        raise NotImplementedError

    def pause_or_go_on(self) -> None:
        """Stop its sequences while its reader lags behind, and let them go on after."""
        paused = self.max_deltas is not None and len(self._deltas) >= self.max_deltas
        for seq in self._sequences:
            seq.paused = paused

    def _first_sequence(self, scheduler: Scheduler) -> Sequence:
        self._scheduler = scheduler
        lease, self._lease = self._lease, None
        return Sequence(self, list(self.prompt_token_ids), self.namespace, lease=lease)

    def _add(self, seq: Sequence) -> None:
        assert self._scheduler is not None
        self._sequences.append(seq)
        self._scheduler.add(seq)

    def _remove(self, seq: Sequence, *, commit: int, keep_lease: bool = False) -> Lease | None:
        assert self._scheduler is not None
        self._sequences.remove(seq)
        return self._scheduler.remove(seq, commit=commit, keep_lease=keep_lease)

    def _count(self, output: Output) -> None:
        """Keep the times and token counts of `metrics`; to be called for each output."""
        seq, start, stop = output.sequence, output.start, output.stop
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            self.metrics.decode_tokens += stop - start
            return
        if self._queued and seq.admitted_at is not None:
            self._queued = False
            self.metrics.queue_s = seq.admitted_at - self._submitted
        prefill = min(stop, num_prompt) - start
        self.metrics.prefill_tokens += prefill
        self.metrics.decode_tokens += stop - start - prefill

    def _hand_over(self, seq: Sequence, on_lease: Callable[[Lease], None]) -> None:
        """Remove ``seq`` as `_remove`, committed, and give its lease away with the KV it has."""
        num_computed = seq.num_computed
        lease = self._remove(seq, commit=num_computed, keep_lease=True)
        if lease is not None:
            lease.truncate(min(num_computed, lease.num_tokens))
            on_lease(lease)

    def _note_token(self, now: float, last: float | None) -> None:
        """Count a token that came at ``now``; ``last`` is when its sample's last one did."""
        self.num_tokens += 1
        if last is not None:
            self.token_gaps.append(now - last)
        elif self.num_tokens == 1:
            self.metrics.ttft_s = now - self._submitted

    def _notify(self) -> None:
        _call_all(self._listeners)

    def _free(self) -> None:
        for seq in list(self._sequences):
            self._remove(seq, commit=seq.num_computed)

    def finish(self, result: Any) -> None:
        """End with ``result``; frees every page that it still held."""
        if self.done:
            return
        self._free()
        self._end(result)

    def fail(self, error: BaseException) -> None:
        """End with an error; frees every page."""
        if self.done:
            return
        self.error = error
        for seq in list(self._sequences):
            self._remove(seq, commit=0)
        self._end(None)

    def abort(self) -> None:
        """End with what there is; frees every page."""
        if self.done:
            return
        result = self.partial_result()
        self._free()
        self._end(result)

    def _end(self, result: Any) -> None:
        self.recompute()  # if it ended before it was started
        self._result = result
        self.metrics.total_s = time.perf_counter() - self._submitted
        if self.on_end is not None:
            self.on_end(self)
        listeners = list(self._listeners)
        self._let_go()
        self.done = True
        self._ended.set()
        _call_all(listeners)

    def _let_go(self) -> None:
        """Drop what refers back to this request: it goes with its last reference, leases too."""
        self._sequences.clear()
        self._scheduler = None
        self.on_end = None
        self._listeners.clear()


def _call_all(listeners: list[Callable[[], None]]) -> None:
    for callback in listeners:
        try:
            callback()
        except Exception:  # not this request's fault, and it may have ended already
            logger.exception("a listener of a request raised")


def _aborted() -> EngineClosedError:
    return EngineClosedError(
        "Engine: expected to run this request to its end, but it was aborted or the engine "
        "closed; make it again on an open engine"
    )


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
    finish_reason: str | None = None
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
        text, reason, guide = "", None, row.guide
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
        self.fail(_aborted())

    def partial_result(self) -> list[Score]:
        return [
            Score(sum(logprobs), logprobs, greedy)
            for logprobs, greedy in zip(self._logprobs, self._greedy, strict=True)
        ]


class PrefillRequest(Request):
    """Computes the KV of ``prompt_token_ids`` and hands over the lease that holds it."""

    def __init__(
        self, prompt_token_ids: list[int], namespace: Hashable, *, lease: Lease | None = None
    ) -> None:
        super().__init__(prompt_token_ids, None, namespace, lease=lease)

    def start(self, scheduler: Scheduler) -> None:
        seq = self._first_sequence(scheduler)
        seq.logits_from = len(seq.token_ids)
        self._add(seq)

    def on_output(self, output: Output) -> list[SamplerRow]:
        self._count(output)
        seq = output.sequence
        if output.stop == len(seq.token_ids):
            self.cached_tokens = seq.num_cached or 0
            self.finish(self._remove(seq, commit=seq.num_computed, keep_lease=True))
        return []

    def abort(self) -> None:
        """End with an error: there is nothing to hand over."""
        self.fail(_aborted())
