"""What runs behind an engine: the queue, the steps, and the end of both."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KVConfig
from radixkv.engine.drawing import draw, may_end
from radixkv.engine.guided import compute_ahead
from radixkv.engine.intake import Intake
from radixkv.engine.loading import find_eos_token_ids
from radixkv.engine.loop import run_steps
from radixkv.engine.progress import show_progress
from radixkv.engine.request import Request
from radixkv.engine.sample_request import SampleRequest
from radixkv.engine.sampling import Sampled, SamplerRow
from radixkv.engine.scheduler import Output, Policy, Scheduler
from radixkv.engine.stats import EngineStats, Tally
from radixkv.errors import EngineClosedError, RadixKVError
from radixkv.models.batch import Run, build_batch
from radixkv.models.fingerprint import fingerprint
from radixkv.models.runner import ModelRunner
from radixkv.models.weight_watch import WeightWatch

if TYPE_CHECKING:
    from torch import Tensor

_BATCH_TOKENS, _GPU_BATCH_TOKENS = 512, 1024  # most a step, unless the caller says otherwise

logger = logging.getLogger("radixkv")
_open_cores: weakref.WeakSet[EngineCore] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread inside torch or a kernel when the interpreter goes away would abort the process.
    for core in list(_open_cores):
        core.close()


def _leave_all_behind() -> None:
    # Another thread may have held a lock at the fork: it would never be free in this process.
    for core in list(_open_cores):
        core.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_behind)


class Keeper(Protocol):
    """Who holds pages between requests, as a `radixkv.engine.branch.Branch` does."""

    def recompute(self) -> None:
        """Give up what was computed: the model is another now."""

    def close(self) -> None:
        """Give the pages back: the engine closes."""


class EngineCore:
    """One model on one cache, and the requests that run on them.

    A request is queued (`put`), started and ended (`_settle`) and served (`step`); whoever runs
    a step holds the step lock. `Engine`, branches, streams and adapters of other libraries all
    stand on this; it knows none of them.

    Args:
        As `radixkv.Engine`, checked.

    Attributes:
        runner, cache, tokenizer: the model on pages; the pages; None without text.
        intake: makes requests of what callers pass.
        changed: notified when something was queued, or a reader has caught up.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        kv: KVConfig,
        backend: str,
        max_batch_tokens: int | None,
        policy: Policy,
    ) -> None:
        self.runner = runner = ModelRunner.load(model)
        self.tokenizer = tokenizer
        reference = weakref.ref(self)
        try:
            self._is_invariant: bool | None = runner.is_batch_invariant(kv, backend)
            self.cache = PrefixCache(
                runner.spec,
                kv,
                device=runner.device,
                backend=backend,
                identify=lambda: _identify(reference),
            )
        except BaseException:
            runner.release()  # the model is its owner's again, as it was
            raise
        runner.settle()
        eos_token_ids = find_eos_token_ids(model, tokenizer, runner.vocab_size)
        self.intake = Intake(runner, self.cache, tokenizer, eos_token_ids)
        self.watch = WeightWatch(runner.model, runner.probe)
        self._vocab_size = runner.vocab_size  # that running requests count on
        self._has_foreign = False  # writes to buffers, of another thread, during a pass
        self._fingerprint: dict[str, str] | None = None
        if max_batch_tokens is None:
            max_batch_tokens = _BATCH_TOKENS if self.cache.on_host else _GPU_BATCH_TOKENS
        self.scheduler = Scheduler(self.cache, self._forward, max_batch_tokens, policy=policy)
        self.step_lock = threading.RLock()
        self._stepping: int | None = None  # ident of the thread inside a step
        self.changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._inbox: deque[Request] = deque()
        self._live: dict[Request, None] = {}
        self._keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
        self._pid = os.getpid()
        self._tally = Tally()
        self.is_closed = False
        _open_cores.add(self)
        self._log_opening(kv)

    def _log_opening(self, kv: KVConfig) -> None:
        if logger.isEnabledFor(logging.INFO):
            cache = self.cache
            capacity = cache.pool.num_pages * cache.codec.bytes_per_page
            logger.info(
                "engine on %s: %d pages of %d tokens (%.1f MiB), rotate %s, eviction %s, %d "
                "threads; %s",
                self.name,
                cache.pool.num_pages,
                cache.page_size,
                capacity / 2**20,
                kv.rotate,
                kv.eviction,
                torch.get_num_threads(),
                "results are the same bits in any batch"
                if self._is_invariant
                else "low bits of a result may depend on what else runs and what is cached "
                "(float32 on a CPU with the compiled kernels has none of that)",
            )

    @property
    def name(self) -> str:
        """The model and where it runs, in words; takes no lock."""
        cache, model = self.cache, self.runner.model
        dtype = str(self.runner.spec.dtype).removeprefix("torch.")
        return (
            f"{type(model).__name__} in {dtype} on {self.runner.device}, backend "
            f"{cache.backend.name}, {cache.formats} KV"
        )

    @property
    def is_batch_invariant(self) -> bool:
        """See `radixkv.Engine.is_batch_invariant`."""
        if self._is_invariant is None:
            with self.step_lock:
                if self.is_closed or not self.watch.is_checked:
                    return False
                kv, backend = self.cache.config, self.cache.backend.name
                self._is_invariant = self.runner.is_batch_invariant(kv, backend)
        return self._is_invariant

    # -- checks ------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise unless this engine can be used here."""
        self.check_process()
        if self.is_closed:
            raise EngineClosedError("Engine: expected an open engine, got a closed one; make anew")

    def check_process(self) -> None:
        """Raise in a process that a fork() made after this engine was."""
        if os.getpid() != self._pid:
            raise RadixKVError(
                f"Engine: expected process {self._pid}, which made it, got process "
                f"{os.getpid()}; an engine does not survive fork(): make one in each process"
            )

    def check_outside(self, instead: str = "use submit() there") -> None:
        """Raise inside one of the engine's own steps, which would wait for itself."""
        if self._stepping == threading.get_ident():
            raise RadixKVError(
                f"Engine: expected a call between steps, got one from inside one of its own steps "
                f"(a logits processor or callback), which would wait for itself; {instead}"
            )

    # -- requests ----------------------------------------------------------------------------

    def put(self, requests: list[Request]) -> None:
        """Queue ``requests`` for whoever runs steps."""
        for request in requests:
            request.queue(self._tally.count_request)
        vocab_size = self.runner.vocab_size
        with self.changed:
            self.check_open()  # within: what comes after `close` has looked would never end
            if vocab_size != self._vocab_size:  # what waits counts on another
                for request in self._inbox:
                    request.fail(_changed_error())
                self._vocab_size = vocab_size
            self._inbox.extend(requests)
            self.changed.notify_all()

    def enqueue(self, requests: list[Request]) -> None:
        """Queue ``requests`` and see to it that the engine's thread runs."""
        self.put(requests)
        with self.changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=run_steps,
                    args=(weakref.ref(self), self.changed, torch.get_num_threads()),
                    name="radixkv-engine",
                    daemon=True,
                )
                try:
                    self._thread.start()
                except BaseException:  # the system has no thread left
                    self._thread = None
                    raise

    def run_all(self, requests: list[Any], *, progress: bool = False) -> list[Any]:
        """Run requests to their end and return what each gave; raises the first one's error."""
        self.run(requests, progress=progress)
        results = [request.take_outcome() for request in requests]
        for outcome in results:
            if isinstance(outcome, BaseException):
                results.clear()
                try:
                    raise outcome
                finally:
                    del outcome  # else this frame, which its traceback holds, would hold it
        return results

    def run(self, requests: list[Any], *, progress: bool = False) -> None:
        """Run requests to their end, whatever it is; those that still run if it raises end."""
        if not requests:
            return
        try:
            self.check_outside()
            self.enqueue(requests)
        except BaseException as error:
            for request in requests:  # they may have brought leases
                request.fail(error)
                request.error = None  # no cycle: it is raised
            raise
        try:
            if progress:
                show_progress(self.cache, requests)
            for request in requests:
                while not request.wait(1.0):
                    if self.is_closed:
                        raise EngineClosedError("Engine: closed while the request was running")
        finally:
            self.abort([request for request in requests if not request.done])

    def abort(self, requests: list[Request]) -> None:
        """End ``requests`` and free their pages before this returns.

        Called from inside a step (a stream that the garbage collector drops there), they end
        with that step.
        """
        if not requests or all(request.done for request in requests):
            return
        for request in requests:
            request.aborted = True
        if self._stepping == threading.get_ident() or os.getpid() != self._pid:
            return
        with self.step_lock:
            self._stepping = threading.get_ident()
            try:
                self._settle({})
            finally:
                self._stepping = None

    def wake(self) -> None:
        """Have the engine's thread look again: a reader has caught up, or has left."""
        with self.changed:
            self.changed.notify_all()

    # -- steps -------------------------------------------------------------------------------

    @property
    def has_queued(self) -> bool:
        """Whether some wait for a step to start them."""
        return bool(self._inbox)

    @property
    def has_requests(self) -> bool:
        """Whether some are queued or live, paused ones too."""
        return bool(self._inbox or self._live)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._inbox) or self.scheduler.has_work

    def step(self) -> list[Request]:
        """Run one batch, unless it was closed; the requests that made progress or ended."""
        with self.step_lock:
            return [] if self.is_closed else self._step()

    def forget_thread(self) -> None:
        """The engine's thread ends; what comes next needs another."""
        self._thread = None

    def _step(self) -> list[Request]:
        self._stepping = threading.get_ident()
        progressed: dict[Request, None] = {}
        began = time.perf_counter() if logger.isEnabledFor(logging.DEBUG) else None
        try:
            self._settle(progressed)
            compute_ahead([guide for request in self._live for guide in request.guides])
            if self._live and self.watch.has_foreign_buffers():
                self._drop(progressed)
            outputs = self.scheduler.step()
            if outputs:
                if began is not None:
                    logger.debug(
                        "step: %d sequences, %d tokens, %.1f ms; %d wait",
                        len(outputs),
                        sum(output.stop - output.start for output in outputs),
                        1000 * (time.perf_counter() - began),
                        len(self.scheduler.waiting) + len(self._inbox),
                    )
                if self._is_stale(outputs):  # before anything that was computed is given out
                    self._drop(progressed)
                self._deliver(outputs, progressed)
            self._settle(progressed)
            if not self._live and not self._inbox:
                self.runner.rest()
        except BaseException as error:
            self._fail_all(error, progressed)
            if not isinstance(error, Exception):
                raise
        finally:
            self._stepping = None
        return list(progressed)

    def _fail_all(self, error: BaseException, progressed: dict[Request, None]) -> None:
        """End all that is live: what ended a step is not one sequence's fault."""
        if not isinstance(error, Exception):
            error = RadixKVError(f"Engine: the step was ended by {type(error).__name__}")
        for request in list(self._live):
            request.fail(error)
            progressed[request] = None
        self._settle(progressed)

    def reset_cache(self) -> None:
        """Drop all cached KV, because the model now computes another.

        Changed weights, adapters and layers are mostly noticed when a request comes, and this
        is done then; `radixkv.models.weight_watch.WeightWatch` says what is not noticed. Requests
        that run fail, branches compute their tokens anew.

        Raises:
            RadixKVError: called from inside a step.
        """
        self.check_open()
        self.check_outside("call it between requests")
        with self.step_lock:
            self.watch.accept()
            self._reset()

    def _drop_stale(self) -> None:
        self.runner.look()
        if self.watch.changed():
            self._drop({})
        if not self.watch.is_checked:
            self.runner.check()  # raises each time, until what was there is put back
            self.watch.is_checked = True

    def _drop(self, progressed: dict[Request, None]) -> None:
        """Forget all that was computed, since the model is another now."""
        logger.warning("the model was changed: all cached KV is dropped")
        progressed.update(self._live)
        self.watch.accept()
        self._has_foreign = False
        self._reset()

    def _reset(self) -> None:
        for request in list(self._live):
            request.fail(_changed_error())
        vocab_size = self.runner.vocab_size
        for request in list(self._inbox):
            if vocab_size != self._vocab_size:
                request.fail(_changed_error())
            else:
                request.recompute()
        self._vocab_size = vocab_size
        for keeper in list(self._keepers):
            keeper.recompute()
        self.cache.clear()
        self.runner.forget()
        self._is_invariant = False if self.watch.layers_replaced else None
        self._fingerprint = None

    def fingerprint(self) -> dict[str, str]:
        """What of its model the cached KV depends on, name to value; snapshots hold it."""
        self.check_open()
        with self.step_lock:
            self._drop_stale()
            if self._fingerprint is None:
                stored = self.runner.stored_with(self.cache.codec)
                self._fingerprint = fingerprint(self.runner.model, self.tokenizer, extra=stored)
            return dict(self._fingerprint)

    def _settle(self, progressed: dict[Request, None]) -> None:
        """Start what was submitted, end what was aborted or timed out, forget what has ended."""
        if self._inbox:
            try:
                self._drop_stale()
            except Exception as error:
                # Whether what is cached still fits the model is not known: nothing may start.
                while self._inbox:
                    request = self._inbox.popleft()
                    self._live[request] = progressed[request] = None
                    request.fail(error)
        while self._inbox:
            request = self._inbox.popleft()
            self._live[request] = None
            if not request.aborted and not request.done:
                try:
                    request.start(self.scheduler)
                except Exception as error:
                    request.fail(error)
        now = time.perf_counter()
        for request in [
            r
            for r in self._live
            if r.done or r.aborted or r.deadline is not None or r.max_deltas is not None
        ]:
            late = request.deadline is not None and now > request.deadline
            if (request.aborted or late) and not request.done:
                request.aborted = True
                try:
                    request.abort()
                except Exception as error:
                    request.fail(error)
                progressed[request] = None
            if request.done:
                del self._live[request]
            elif request.max_deltas is not None:
                request.pause_or_go_on()

    def _deliver(self, outputs: list[Output], progressed: dict[Request, None]) -> None:
        # A users' callable is called once for a token, whatever becomes of its neighbours.
        alone: list[tuple[Output, list[SamplerRow]]] = []
        together: list[tuple[Output, list[SamplerRow]]] = []
        num_tokens = 0
        for output in outputs:
            request: Request = output.sequence.owner
            num_tokens += output.stop - output.start
            if request.done:
                continue
            progressed[request] = None
            if output.error is not None:
                request.fail(output.error)
                continue
            try:
                wanted = request.on_output(output)
            except Exception as error:
                request.fail(error)
                continue
            if wanted:
                one = output, wanted
                (alone if wanted[0].params.logits_processors else together).append(one)
        self._tally.count_step(num_tokens, len(outputs))
        if together:
            draw(together, self._look_before_the_end)
        for one in alone:
            draw([one], self._look_before_the_end)

    def _is_stale(self, outputs: list[Output]) -> bool:
        """Whether the model was changed since the last step's outputs were given out."""
        if self._has_foreign or self.watch.changed_in_step():
            return True
        # What is no sample may end before anything is drawn.
        are_samples = all(type(output.sequence.owner) is SampleRequest for output in outputs)
        return not are_samples and self.watch.changed_unseen()

    def _look_before_the_end(self, sampled: list[Sampled], rows: list[SamplerRow]) -> None:
        """Fail what runs if the model was changed, where what was drawn may end a request."""
        if may_end(sampled, rows, self.intake.eos_token_ids) and self.watch.changed_unseen():
            self._drop({})

    def _forward(self, runs: list[Run]) -> Tensor:
        batch = build_batch(runs, self.runner.device)
        logits = self.runner.forward(batch, self.cache)
        if self.watch.after_pass():
            logits = self.runner.forward(batch, self.cache)
            self._has_foreign |= self.watch.judge()
        reads, bytes_per_token = batch.plan.reads, self.cache.codec.bytes_per_token
        self._tally.count_reads(
            reads.tokens * bytes_per_token, reads.tokens_alone * bytes_per_token
        )
        return logits

    # -- statistics, end ---------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What has been done so far."""
        self.check_open()
        live = sum(not request.done for request in [*self._inbox, *self._live])
        return self._tally.stats(live, self.scheduler.preemptions, self.cache.stats())

    def adopt(self, keeper: Keeper) -> None:
        """Close ``keeper`` when this engine is closed."""
        self._keepers.add(keeper)

    def close(self) -> None:
        """Abort what runs, close who keeps pages, and free every page; may be called again."""
        if self.is_closed:
            return
        with self.step_lock:
            with self.changed:
                self.is_closed = True
                self.changed.notify_all()
                thread = self._thread
            for request in [*self._inbox, *self._live]:
                request.aborted = True
            self._settle({})
            for keeper in list(self._keepers):
                keeper.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.cache.clear()
        self.runner.release()

    def after_fork(self) -> None:
        """Close the copy that fork() made: its thread and what runs are the parent's."""
        self.is_closed = True
        self._thread = self._stepping = None
        self.step_lock, self.changed = threading.RLock(), threading.Condition()
        self.cache.core.after_fork()


def _changed_error() -> RadixKVError:
    return RadixKVError("Engine: the model was changed while the request was running; run it again")


def _identify(core_ref: weakref.ref[EngineCore]) -> dict[str, str]:
    core = core_ref()
    if core is None:
        raise EngineClosedError("PrefixCache: expected a cache whose engine is open; keep it")
    return core.fingerprint()
