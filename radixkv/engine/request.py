"""What is asked of the engine: the state and delivery that every kind of request has.

    Request            here
    ├── SampleRequest  n samples of one prompt, forked after its prefill (`sample_request`)
    ├── BeamRequest    beams on forked pages; which ones live is `BeamSearch`'s choice
    │                  (`beam_request`)
    ├── ScoreRequest   log-likelihood of continuations of one prompt (`score_request`)
    └── PrefillRequest only the KV of some tokens, for a `Branch` (`prefill_request`)

A request owns its sequences in the scheduler. The engine hands it each `Output`; those of
samples come back as rows to draw from, so that one call samples for the whole batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from radixkv.cache.lease import Lease
from radixkv.engine.guided import Guide
from radixkv.engine.results import Delta, Metrics
from radixkv.engine.sampling import Sampled, SamplerRow
from radixkv.engine.scheduler import Output, Scheduler, Sequence
from radixkv.errors import EngineClosedError, RadixKVError
from radixkv.failures import copy_of
from radixkv.names import safe_repr

logger = logging.getLogger("radixkv")


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
        self._on_end: Callable[[Request], None] | None = None  # the engine's own book-keeping
        self._submitted = time.perf_counter()
        timeout_s = getattr(params, "timeout_s", None)
        self.deadline = None if timeout_s is None else self._submitted + timeout_s
        self._scheduler: Scheduler | None = None
        self._sequences: list[Sequence] = []
        self._result: Any = None

    @safe_repr
    def __repr__(self) -> str:
        if self.error is not None:
            state = f"failed: {type(self.error).__name__}"
        elif self.aborted:
            state = "aborted"
        elif self.done:
            state = "done"
        else:
            state = "waiting" if self._queued else "running"
        return (
            f"of {len(self.prompt_token_ids):,} prompt tokens, {self.num_tokens:,} generated, "
            f"{state}"
        )

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

    @property
    def num_deltas(self) -> int:
        """Deltas that wait for `take_deltas`."""
        return len(self._deltas)

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

    def queue(self, on_end: Callable[[Request], None]) -> None:
        """Note that an engine has it now, which ``on_end`` tells of its end."""
        self._on_end = on_end

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
        if self._on_end is not None:
            self._on_end(self)
        listeners = list(self._listeners)
        self._let_go()
        self.done = True
        self._ended.set()
        _call_all(listeners)

    def _let_go(self) -> None:
        """Drop what refers back to this request: it goes with its last reference, leases too."""
        self._sequences.clear()
        self._scheduler = None
        self._on_end = None
        self._listeners.clear()


def _call_all(listeners: list[Callable[[], None]]) -> None:
    for callback in listeners:
        try:
            callback()
        except Exception:  # not this request's fault, and it may have ended already
            logger.exception("a listener of a request raised")


def aborted_error() -> EngineClosedError:
    return EngineClosedError(
        "Engine: expected to run this request to its end, but it was aborted or the engine "
        "closed; make it again on an open engine"
    )
