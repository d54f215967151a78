"""The step loop's bookkeeping: who runs next, with which pages. No model, no text.

A `Sequence` is a run of tokens that wants its KV computed and the logits of its last token
(or of more). It is *waiting* (no pages reserved) or *running* (a lease on pages). Each step
runs, in this order: one token of every decoding sequence, then chunks of prompts until the
token budget is spent. When pages run out, the youngest running sequence goes back to
waiting; what it computed stays in the tree, so that going on is mostly a hit.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import CapacityError
from radixkv.models.batch import Run

_age = attrgetter("arrival")
_new: Any = tuple.__new__  # of a named tuple: half the time of its own, and there are two a token
_AGING_STEPS = 32  # a sequence passed over this often goes before any that policy prefers


def longest_prefix_first(owner: Any, num_cached: int) -> float:
    """The policy of admission unless another is given: the best hit goes first.

    A policy sees what waits and has not run yet: its owner (in an engine, the `Request`) and how
    many of its tokens are cached. The smallest number goes first, of equal ones the oldest. What
    has run before, or was passed over often, goes before all these, so that no policy can
    starve a request.
    """
    return -num_cached


Policy = Callable[[Any, int], float]


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of one request that are run together.

    Attributes:
        owner: the request; opaque here.
        token_ids: all tokens known so far; the owner appends to them.
        namespace: whose tree they are matched in.
        logits_from: logits are wanted from this position on; None is the last token's,
            ``len(token_ids)`` none at all.
        lease: pages; None while waiting, unless the owner brought a lease.
        page_ids: the lease's, kept here as long as they do not change. [pages] int32.
        room: this many tokens have pages, and the lease alone owns the page of the last ones.
            Up to there a step asks nothing of the lease: it learns of its new tokens at the
            next page border, at the latest when it is forked, committed or released.
        num_computed: tokens whose KV is written, in this stay on the pages.
        write_from: below this position KV was there already (see `batch.Run`).
        num_cached: tokens found in the cache when it was first admitted; None before.
        arrival: order of age, lower is older; a fork is as old as its request.
        passed_over: admissions of younger ones while this one waited.
        admitted_at: `time.perf_counter` when it first got its pages.
        paused: its owner wants no more for now; it keeps its pages unless others need them.
        furthest: the most tokens that were ever computed; going beyond it is progress.
    """

    owner: Any
    token_ids: list[int]
    namespace: Hashable = None
    logits_from: int | None = None
    lease: Lease | None = None
    page_ids: NDArray[np.int32] | None = None
    room: int = 0
    num_computed: int = 0
    write_from: int = 0
    num_cached: int | None = None
    arrival: tuple[int, int] = (0, 0)
    passed_over: int = 0
    admitted_at: float | None = None
    paused: bool = False
    furthest: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens still to be run."""
        return len(self.token_ids) - self.num_computed

    def tell_lease(self) -> None:
        """Let the lease know of all tokens that are computed; they are on its pages already."""
        assert self.lease is not None
        known = self.lease.num_tokens
        if known < self.num_computed:
            self.lease.extend_encoded(np.array(self.token_ids[known : self.num_computed], np.int32))

    def read_pages(self) -> None:
        """Take the lease's page ids over, after a call that may have changed them."""
        assert self.lease is not None
        self.page_ids = self.lease.page_ids


class Output(NamedTuple):
    """What one step did for one sequence.

    Attributes:
        sequence: which one.
        start, stop: the positions that were run.
        logits_from: position of the first row of `logits`.
        batch_logits: of the whole batch; None if nothing was run.
        row: where its own rows begin in them.
        error: why this sequence's tokens could not be run; then nothing was.
    """

    sequence: Sequence
    start: int
    stop: int
    logits_from: int = 0
    batch_logits: Tensor | None = None
    row: int = 0
    error: Exception | None = None

    @property
    def logits(self) -> Tensor:
        """Its own rows: [stop - logits_from, vocab_size] float32, a view."""
        assert self.batch_logits is not None
        return self.batch_logits[self.row : self.row + self.stop - self.logits_from]


@dataclass(eq=False)
class Scheduler:
    """Chooses each step's batch and keeps every sequence's pages.

    Attributes:
        cache: where the pages come from.
        forward: runs a batch; returns the wanted logits, [num_logits, vocab_size] float32.
        max_batch_tokens: most tokens a step.
        max_seqs: sequences that run at once; none is admitted beyond.
        policy: who of those that wait goes first; see `longest_prefix_first`.
    """

    cache: PrefixCache
    forward: Callable[[list[Run]], Tensor]
    max_batch_tokens: int
    max_seqs: int = 256
    policy: Policy = longest_prefix_first
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)  # oldest first
    preemptions: int = 0
    _stalls: int = 0
    _clock: count[int] = field(default_factory=count)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        everyone = [*self.waiting, *self.running]
        return any(seq.num_pending and not seq.paused for seq in everyone)

    @property
    def _num_busy(self) -> int:
        # One that waits for its siblings must not keep them out.
        return sum(seq.num_pending > 0 and not seq.paused for seq in self.running)

    def add(self, seq: Sequence) -> None:
        """Let ``seq`` wait for its turn."""
        seq.arrival = (next(self._clock), 0)
        self.waiting.append(seq)

    def fork(self, seq: Sequence) -> Sequence:
        """A sequence with the same tokens that shares all pages of ``seq``; runs at once."""
        twin = Sequence(seq.owner, list(seq.token_ids), seq.namespace, num_cached=seq.num_cached)
        twin.arrival = (seq.arrival[0], next(self._clock))
        if seq.lease is not None and self._num_busy < self.max_seqs:
            seq.tell_lease()
            twin.lease = seq.lease.fork()
            twin.num_computed = seq.num_computed
            twin.page_ids = seq.page_ids
            seq.room = 0  # the last page is shared now: who writes it first copies it
            insort(self.running, twin, key=_age)
        else:
            self.waiting.append(twin)
        return twin

    def remove(self, seq: Sequence, *, commit: int = 0, keep_lease: bool = False) -> Lease | None:
        """Forget ``seq``, make its first ``commit`` tokens findable, and free its pages.

        Returns:
            Its lease, still held, if ``keep_lease``; None otherwise.
        """
        (self.running if seq in self.running else self.waiting).remove(seq)
        lease = seq.lease
        if lease is None:
            return None
        try:
            commit = min(commit, seq.num_computed)
            if commit > 0 or keep_lease:
                seq.tell_lease()
            if commit > 0:
                lease.commit(commit)
        except BaseException:
            lease.release()
            raise
        finally:
            seq.lease, seq.page_ids, seq.room = None, None, 0
        if keep_lease:
            return lease
        lease.release()
        return None

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Make the first ``num_tokens`` of ``seq``, which runs on, findable.

        Whole pages alone: the tree's share of a part-filled page would cost its writer a copy.
        The rest becomes findable with the sequence's end.
        """
        page_size = self.cache.config.page_size
        if seq.lease is not None and num_tokens >= page_size:
            seq.tell_lease()
            seq.lease.commit(num_tokens // page_size * page_size)
            seq.read_pages()

    def step(self) -> list[Output]:
        """Admit, choose a batch, run it; one `Output` for each sequence that took part."""
        outputs = self._admit()
        runs, seqs = self._plan(outputs)
        if not runs:
            return outputs
        logits = self._try_forward(runs)
        if not isinstance(logits, Exception):
            self._note(outputs, seqs, runs, logits)
            return outputs
        # One sequence's bad numbers must not take its neighbours along: run each alone.
        for seq, run in zip(seqs, runs, strict=True):
            result = logits if len(runs) == 1 else self._try_forward([run])
            if isinstance(result, Exception):
                outputs.append(Output(seq, run.start, run.stop, error=result))
            else:
                self._note(outputs, [seq], [run], result)
        return outputs

    def _note(
        self, outputs: list[Output], seqs: list[Sequence], runs: list[Run], logits: Tensor
    ) -> None:
        row = 0
        for seq, (_, _, start, stop, _, logits_from, _) in zip(seqs, runs, strict=True):
            seq.num_computed = stop
            if stop > seq.furthest:
                seq.furthest = stop
                self._stalls = 0
            if logits_from < start:
                logits_from = start
            outputs.append(_new(Output, (seq, start, stop, logits_from, logits, row, None)))
            row += stop - logits_from

    # An error's traceback holds the frame that caught it, with its locals. So errors are caught
    # where no local holds them afterwards (`_try_*`): else each would be a cycle that keeps alive
    # all that its traceback passes, its user's frames too, until garbage is collected.

    def _try_forward(self, runs: list[Run]) -> Tensor | Exception:
        try:
            return self.forward(runs)
        except Exception as error:
            return error

    # -- admission ---------------------------------------------------------------------------

    def _admit(self) -> list[Output]:
        outputs: list[Output] = []
        if not self.waiting:
            return outputs
        for seq in self._admission_order(outputs):
            if self._num_busy >= self.max_seqs:
                break
            if seq.paused:
                continue
            admitted = self._try_reserve(seq)
            if isinstance(admitted, Exception):
                if isinstance(admitted, CapacityError) and self.running:
                    break
                # Of its own; or nothing will give pages back, held from outside this engine.
                outputs.append(Output(seq, 0, 0, error=admitted))
                continue
            if not admitted:
                continue
            self.waiting.remove(seq)
            insort(self.running, seq, key=_age)
            if seq.admitted_at is None:
                seq.admitted_at = time.perf_counter()
            for other in self.waiting:
                other.passed_over += other.arrival < seq.arrival
            if not seq.num_pending:  # all of it was cached, and its owner wants no logits
                stop = seq.num_computed
                outputs.append(Output(seq, stop, stop, stop))
        return outputs

    def _try_reserve(self, seq: Sequence) -> bool | Exception:
        """Whether ``seq`` has got its pages; False if it is to wait; or why it can't have them."""
        try:
            if self._shares_with_running(seq):
                return False  # its neighbour is computing that prefix; wait for those pages
            try:
                self._reserve(seq)
                return True
            except CapacityError:
                if self.running or not self.cache.core.collect_garbage():
                    raise
            self._reserve(seq)
            return True
        except Exception as error:
            return error

    def _admission_order(self, outputs: list[Output]) -> list[Sequence]:
        """Those that ran before or have waited long, oldest first; then as `policy` says.

        What gave its pages up comes back in order of age, so that the oldest request always
        gets all that it needs: it fits alone, hence it ends, hence so do all.
        """
        first: list[Sequence] = []
        rest: list[Sequence] = []
        for seq in self.waiting:
            ran = seq.num_cached is not None
            (first if ran or seq.passed_over >= _AGING_STEPS else rest).append(seq)
        if len(rest) > 1:
            places: dict[int, float] = {}
            for seq in list(rest):
                place = self._try_rank(seq)
                if isinstance(place, Exception):
                    outputs.append(Output(seq, 0, 0, error=place))
                    rest.remove(seq)
                else:
                    places[id(seq)] = place
            rest.sort(key=lambda s: (places[id(s)], s.arrival))
        return sorted(first, key=lambda s: s.arrival) + rest

    def _try_rank(self, seq: Sequence) -> float | Exception:
        try:
            num_cached = self.cache.match(seq.token_ids, namespace=seq.namespace)
            return float(self.policy(seq.owner, num_cached))
        except Exception as error:
            return error

    def _shares_with_running(self, seq: Sequence) -> bool:
        """Whether a running sequence is computing a prefix of ``seq`` that is not cached yet."""
        page_size = self.cache.config.page_size
        num_held = 0 if seq.lease is None else seq.lease.num_tokens
        next_page = (num_held // page_size + 1) * page_size  # it must share more than it has
        ids = None
        cached = -1
        for other in self.running:
            if other.num_pending < 2 or other.paused or other.namespace != seq.namespace:
                continue
            if other.token_ids[:next_page] != seq.token_ids[:next_page]:
                continue
            if ids is None:
                ids = np.asarray(seq.token_ids)
                cached = self.cache.match(seq.token_ids, namespace=seq.namespace)
                cached = max(cached, num_held)
            common = _common_prefix(ids, np.asarray(other.token_ids))
            if common // page_size * page_size > cached:
                return True
        return False

    def _reserve(self, seq: Sequence) -> None:
        """Give ``seq`` pages for all its tokens.

        A page for each sequence that runs on stays unreserved, so that admitting a newcomer
        does not at once preempt it again.
        """
        if seq.lease is not None:  # brought by its owner, with KV for all of its tokens
            lease = self._find_more(seq, seq.lease)
            if lease is None:
                self._extend_brought(seq, seq.lease)
                return
            seq.lease.release()
        else:
            lease = self._acquire(seq)
            if self.cache.num_available_pages < self._num_busy:
                lease.release()
                raise CapacityError("no page left for those who run")
        seq.lease = lease
        seq.read_pages()
        seq.write_from = lease.num_cached
        if seq.num_cached is None:
            seq.num_cached = lease.num_cached
        wanted = len(seq.token_ids) if seq.logits_from is None else seq.logits_from
        seq.num_computed = min(lease.num_cached, wanted)

    def _acquire(self, seq: Sequence) -> Lease:
        wants_none = seq.logits_from == len(seq.token_ids)
        return self.cache.try_acquire(seq.token_ids, namespace=seq.namespace, full=wants_none)

    def _extend_brought(self, seq: Sequence, lease: Lease) -> None:
        num_cached = lease.num_tokens
        if num_cached < len(seq.token_ids):
            lease.extend_encoded(np.array(seq.token_ids[num_cached:], np.int32))
        seq.read_pages()
        if seq.num_cached is None:
            seq.num_cached = num_cached
        seq.write_from = num_cached
        seq.num_computed = min(num_cached, seq.logits_from or num_cached)
        if seq.logits_from == 0:
            seq.num_computed = 0

    def _find_more(self, seq: Sequence, brought: Lease) -> Lease | None:
        """Pages for ``seq`` with more KV than it brought, if the cache has that by now."""
        num_held = brought.num_tokens
        lookup = len(seq.token_ids) - (seq.logits_from != len(seq.token_ids))
        if num_held >= lookup:
            return None
        if self.cache.match(seq.token_ids[:lookup], namespace=seq.namespace) <= num_held:
            return None
        try:
            lease = self._acquire(seq)
        except CapacityError:  # with pages of its own it may need fewer
            return None
        if lease.num_cached > num_held:
            return lease
        lease.release()  # evicted in between
        return None

    def _preempt(self, seq: Sequence, outputs: list[Output]) -> None:
        self.preemptions += 1
        error = self._try_remove(seq)
        if error is not None:  # its fault, not that of the one who wants its pages
            outputs.append(Output(seq, 0, 0, error=error))
        seq.num_computed = 0
        self.waiting.append(seq)

    def _try_remove(self, seq: Sequence) -> Exception | None:
        try:
            self.remove(seq, commit=seq.num_computed if seq.lease is not None else 0)
            return None
        except Exception as error:
            return error

    # -- planning ----------------------------------------------------------------------------

    def _plan(self, outputs: list[Output]) -> tuple[list[Run], list[Sequence]]:
        budget, preemptions = self.max_batch_tokens, self.preemptions
        runs: list[Run] = []
        seqs: list[Sequence] = []
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for seq in self.running:
            num_pending = len(seq.token_ids) - seq.num_computed
            if num_pending and not seq.paused:
                (decoding if num_pending == 1 else prefilling).append(seq)
        for seq in decoding + prefilling:
            if budget <= 0:
                break
            start, num_tokens = seq.num_computed, len(seq.token_ids)
            if num_tokens > seq.room or seq.lease is None:
                if seq.lease is None:
                    continue  # preempted by an older one
                error = self._cover(seq, outputs)
                if error is not None:  # CapacityError: pages are held from outside this engine
                    outputs.append(Output(seq, start, start, error=error))
                    continue
                if seq.lease is None:
                    continue  # gave way itself
            stop = num_tokens if num_tokens - start <= budget else start + budget
            logits_from = num_tokens - 1 if seq.logits_from is None else seq.logits_from
            if logits_from > stop:
                logits_from = stop
            ids, write_from, page_ids = seq.token_ids[start:stop], seq.write_from, seq.page_ids
            run = (seq.lease, ids, start, stop, write_from, logits_from, page_ids)
            runs.append(_new(Run, run))
            seqs.append(seq)
            budget -= stop - start
        if runs and self.preemptions == preemptions:
            return runs, seqs
        kept = [i for i, seq in enumerate(seqs) if seq.lease is not None]
        if not kept and self.running and not all(seq.paused for seq in self.waiting):
            # All who run wait, for a sibling that waits for pages or for their reader: the
            # youngest gives way, one that is paused first.
            youngest = max(self.running, key=lambda seq: (seq.paused, seq.arrival))
            self._stalls += not youngest.paused
            if self._stalls > 2 * (len(self.running) + len(self.waiting)):
                self._stalls = 0
                if self.cache.core.collect_garbage():
                    return [], []  # the next step has more room
                full = CapacityError(
                    f"{self.cache.pool.num_pages} pages: expected room for all sequences of a "
                    f"request at once, but other leases or pins hold it; release them, or make "
                    f"the engine with a larger KVConfig.capacity"
                )
                outputs.append(Output(youngest, 0, 0, error=full))
            else:
                self._preempt(youngest, outputs)
        return [runs[i] for i in kept], [seqs[i] for i in kept]

    def _cover(self, seq: Sequence, outputs: list[Output]) -> Exception | None:
        """Extend the lease over all tokens of ``seq``; for want of pages the youngest gives way.

        Returns:
            Why it cannot be: a CapacityError if ``seq`` runs alone and there are still not
            enough pages, also after collecting garbage.
        """
        while seq.lease is not None and seq.lease.num_tokens < len(seq.token_ids):
            error = self._try_extend(seq, seq.lease)
            if isinstance(error, CapacityError):
                if len(self.running) > 1:
                    youngest = max(self.running, key=lambda other: (other.paused, other.arrival))
                    self._preempt(youngest, outputs)
                    continue
                if self.cache.core.collect_garbage():
                    continue
            if error is not None:
                return error
            seq.read_pages()
            assert seq.page_ids is not None
            seq.room = len(seq.page_ids) * self.cache.config.page_size
        return None

    def _try_extend(self, seq: Sequence, lease: Lease) -> Exception | None:
        try:
            lease.extend_encoded(np.array(seq.token_ids[lease.num_tokens :], np.int32))
            return None
        except Exception as error:
            return error


def _common_prefix(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(differ.argmax()) if differ.any() else size
