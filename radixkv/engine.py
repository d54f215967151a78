"""The engine: prompts in, text out; one thread that runs steps, any thread that asks."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from radixkv.batch import Run, build_batch
from radixkv.branch import Branch
from radixkv.cache import CacheStats, PrefixCache
from radixkv.config import BeamParams, KVConfig, SamplingParams, require_int, require_namespace
from radixkv.errors import (
    CapacityError,
    ContextLengthError,
    EngineClosedError,
    RadixKVError,
)
from radixkv.fingerprint import WeightWatch, fingerprint
from radixkv.guided import Guide, compute_ahead, make_guide
from radixkv.model import ModelRunner
from radixkv.request import (
    BeamRequest,
    Delta,
    Request,
    SampleRequest,
    Score,
    ScoreRequest,
)
from radixkv.sampling import SamplerRow, sample
from radixkv.scheduler import Output, Policy, Scheduler, longest_prefix_first
from radixkv.text import encode_continuation, encode_messages, encode_prompt, is_prompt

if TYPE_CHECKING:
    from torch import Tensor


_PAUSED_S = 0.05  # how often one looks whether a paused request's reader has caught up
_LINGER_S = 2.0  # how long the engine's thread stays when there is nothing to do
_STREAM_DELTAS = 256  # that a stream's reader may lag behind before its request is paused
_HISTORY = 4096  # requests and steps that the percentiles of `EngineStats` look back on
_BATCH_TOKENS, _GPU_BATCH_TOKENS = 512, 1024  # most a step, unless the caller says otherwise

logger = logging.getLogger("radixkv")
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    # A thread inside torch or a kernel when the interpreter goes away would abort the process.
    for engine in list(_open_engines):
        engine.close()


def _leave_engines_behind() -> None:
    # Another thread may have held a lock at the fork: it would never be free in this process.
    for engine in list(_open_engines):
        engine._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_engines_behind)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine has done since it was made.

    Attributes:
        requests_done, requests_failed, requests_aborted: ended requests, by how they ended.
        requests_live: submitted and not ended.
        prompt_tokens: of requests that were started.
        cached_tokens: of those, tokens whose KV came from the cache.
        prefill_tokens, decode_tokens: tokens that the model ran.
        steps: batches that the model ran.
        kv_bytes_read: bytes of K and V that attention read, in all layers; what a sliding
            window hides is counted.
        kv_bytes_alone: the same if no two sequences had read a shared page together.
        preemptions: times that a sequence gave its pages back and waited again.
        ttft_p50_s, ttft_p95_s: time to first token of recent requests; None before any.
        token_p50_s, token_p95_s: time between tokens of recent requests.
        batch_tokens_p50, batch_tokens_max: tokens of recent steps.
        batch_seqs_p50, batch_seqs_max: sequences of recent steps.
        cache: the cache's own statistics.
    """

    requests_done: int
    requests_failed: int
    requests_aborted: int
    requests_live: int
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    decode_tokens: int
    steps: int
    kv_bytes_read: int
    kv_bytes_alone: int
    preemptions: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    token_p50_s: float | None
    token_p95_s: float | None
    batch_tokens_p50: float | None
    batch_tokens_max: int
    batch_seqs_p50: float | None
    batch_seqs_max: int
    cache: CacheStats


class Engine:
    """Generates with a transformers causal LM on a prefix cache of quantized pages.

    Args:
        model: a transformers causal LM. It is put in eval mode and its attention is replaced
            while the engine runs it; called otherwise it computes what it did. `close` puts
            both back, and so does a constructor that raises.
        tokenizer: its tokenizer; None allows token ids only, and texts are empty.
        kv: how pages are stored, and how many.
        device: moves the model; None leaves it where it is.
        max_batch_tokens: most tokens that one step runs; longer prompts go in chunks. None is 512
            on a CPU, where more would be no faster and others would wait longer, else 1024.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"torch"``.
        policy: which request goes first of those that wait, a function of the `Request` and of
            how many of its tokens are cached: the smallest number, of equal ones the oldest. What
            has run or has waited for long goes before it.

    Attributes:
        cache: the `PrefixCache`. After `close` it is empty, and may be used by itself.
        is_batch_invariant: whether results are bit for bit the same whatever else runs and
            whatever is cached; measured when the engine is made (float32 on a CPU with the
            compiled kernels);
            False once layers of the model were replaced by others.

    Raises:
        UnsupportedModelError: the model's attention cannot be served rightly.
        ValueError, TypeError: an option is out of range, or of the wrong type.

    Several threads may call it; their calls run as one batch. What is cached never changes a
    result, since attention reads the stored pages for every token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        kv: KVConfig = KVConfig(),  # noqa: B008 - frozen
        device: str | torch.device | None = None,
        max_batch_tokens: int | None = None,
        backend: str = "auto",
        policy: Policy = longest_prefix_first,
    ) -> None:
        if not isinstance(kv, KVConfig):
            raise TypeError(f"kv: expected a KVConfig, got {kv!r}; use KVConfig(dtype=...)")
        if not callable(policy):
            raise TypeError(
                f"policy: expected a function of a Request and its cached tokens, got {policy!r}; "
                f"leave it out for the longest cached prefix first"
            )
        if max_batch_tokens is not None:
            require_int("max_batch_tokens", max_batch_tokens, 1)
        self._closed = True  # until all below has worked
        if device is not None:
            model = model.to(device)
        self._runner = ModelRunner.load(model)
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = _eos_token_ids(model)
        self.vocab_size = self._runner.vocab_size
        self.max_positions = self._runner.max_positions
        try:
            self.is_batch_invariant = self._runner.is_batch_invariant(kv, backend)
            self.cache = PrefixCache(
                self._runner.spec, kv, device=self._runner.device, backend=backend
            )
        except BaseException:
            self._runner.release()  # the model is its owner's again, as it was
            raise
        if not self.is_batch_invariant:
            logger.info(
                "%s: low bits of a result may depend on what else runs and what is cached "
                "(float32 on a CPU with the compiled kernels has none of that)",
                type(model).__name__,
            )
        self._watch = WeightWatch(model)
        self._fingerprint: dict[str, str] | None = None
        reference = weakref.ref(self)
        self.cache.identify = lambda: _identify(reference)
        if max_batch_tokens is None:
            max_batch_tokens = _BATCH_TOKENS if self.cache.on_host else _GPU_BATCH_TOKENS
        self._scheduler = Scheduler(self.cache, self._forward, max_batch_tokens, policy=policy)
        self._step_lock = threading.RLock()
        self._stepping: int | None = None  # ident of the thread inside a step
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._inbox: deque[Request] = deque()
        self._live: dict[Request, None] = {}
        self._branches: weakref.WeakSet[Branch] = weakref.WeakSet()
        self._pid = os.getpid()
        self._totals: Counter[str] = Counter()
        self._ttfts: deque[float] = deque(maxlen=_HISTORY)
        self._gaps: deque[float] = deque(maxlen=_HISTORY)
        self._batches: deque[tuple[int, int]] = deque(maxlen=_HISTORY)
        self._closed = False
        _open_engines.add(self)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        kv: KVConfig = KVConfig(),  # noqa: B008 - frozen
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_batch_tokens: int | None = None,
        backend: str = "auto",
        policy: Policy = longest_prefix_first,
        snapshot: str | os.PathLike[str] | None = None,
        **transformers_kwargs: Any,
    ) -> Engine:
        """Load a model and its tokenizer as transformers does, and make an engine of them.

        Args:
            name_or_path: folder or hub id.
            device: ``"auto"`` is the GPU if there is one.
            dtype: ``"auto"`` is the checkpoint's own, but float32 on a CPU that has no
                bfloat16 arithmetic (said in the log).
            snapshot: file of `PrefixCache.save` that the cache begins with. It must be there,
                and of this model and ``kv`` (`SnapshotError` says what differs).
            transformers_kwargs: to ``from_pretrained`` of model and tokenizer
                (``gguf_file=...``) or of the model alone.

        Warns (UserWarning) where ``kv`` does not rotate and the model's own K says that its
        format would suffer.
        """
        if snapshot is not None:
            Path(snapshot).stat()  # before the model is loaded: raises FileNotFoundError
        with _no_collections():
            from transformers import AutoModelForCausalLM, AutoTokenizer

            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            shared = {
                key: transformers_kwargs[key]
                for key in ("gguf_file", "revision", "trust_remote_code", "token", "subfolder")
                if key in transformers_kwargs
            }
            model = AutoModelForCausalLM.from_pretrained(
                name_or_path, dtype=dtype, **transformers_kwargs
            )
            if (
                dtype == "auto"
                and torch.device(device).type == "cpu"
                and model.dtype != torch.float32
                and not (model.dtype == torch.bfloat16 and cpu_has_bfloat16())
            ):
                logger.warning(
                    "%s: running in float32, since this CPU has no %s arithmetic; "
                    "pass dtype= to choose",
                    name_or_path,
                    str(model.dtype).removeprefix("torch."),
                )
                model = model.float()
            try:
                tokenizer = AutoTokenizer.from_pretrained(name_or_path, **shared)
            except (OSError, ValueError, KeyError) as error:
                logger.warning(
                    "%s: no tokenizer (%s); prompts must be token ids", name_or_path, error
                )
                tokenizer = None
            engine = cls(
                model,
                tokenizer,
                kv=kv,
                device=device,
                max_batch_tokens=max_batch_tokens,
                backend=backend,
                policy=policy,
            )
        engine._runner.warn_of_outliers(kv)
        if snapshot is not None:
            try:
                engine.cache.load(snapshot)
            except BaseException:
                engine.close()
                raise
        return engine

    # -- asking ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        params: SamplingParams
        | BeamParams
        | SequenceABC[SamplingParams | BeamParams]
        | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        **fields: Any,
    ) -> Any:
        """Run one prompt or a list of prompts as one batch, and wait for the end.

        Args:
            prompts: text, token ids, or a chat (list of ``{"role", "content"}``); or a list
                of these.
            params: for all prompts, or a list with one for each.
            namespace: prompts of different namespaces never share cached KV; anything
                hashable, and those that compare equal are one (``1 == True``).
            progress: show a bar with tokens and cache hits.
            fields: of `SamplingParams`, instead of ``params``.

        Returns:
            A `Result` for one prompt; a list of them, in the prompts' order, for a list.

        Raises:
            ValueError, TypeError: a prompt or option that cannot be used; nothing was run.
            ContextLengthError: prompt plus new tokens over the model's positions.
            CapacityError: a request that cannot fit the page pool even alone.
        """
        single, requests = self._make_requests(prompts, params, namespace, fields)
        results = self.run_all(requests, progress=progress)
        return results[0] if single else results

    async def agenerate(
        self,
        prompts: Any,
        params: Any = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio; cancelling the task aborts its requests."""
        single, requests = self._make_requests(prompts, params, namespace, fields)
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        for request in requests:
            request.listen(lambda: _call_soon(loop, changed.set))
        self._enqueue(requests)
        bar = loop.run_in_executor(None, _show_progress, self, requests) if progress else None
        try:
            while not all(request.done for request in requests):
                await changed.wait()
                changed.clear()
            if bar is not None:
                await bar
        except BaseException:  # cancelled, or the bar's own error
            await asyncio.shield(loop.run_in_executor(None, self._abort, requests))
            raise
        results = self._results(requests)
        return results[0] if single else results

    def stream(
        self,
        prompt: Any,
        params: SamplingParams | BeamParams | None = None,
        *,
        namespace: Hashable = None,
        **fields: Any,
    ) -> Stream:
        """The deltas of one prompt's samples, as they come: an iterator of `Delta`.

        Closing the iterator, breaking out of a loop over it or dropping it aborts the request
        and gives its pages back.
        """
        return Stream(self, self._make_request(prompt, params, namespace, fields, record=True))

    async def astream(
        self,
        prompt: Any,
        params: SamplingParams | BeamParams | None = None,
        *,
        namespace: Hashable = None,
        **fields: Any,
    ) -> AsyncIterator[Delta]:
        """`stream` for asyncio; cancelling the task or closing the iterator aborts it."""
        request = self._make_request(prompt, params, namespace, fields, record=True)
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        request.listen(lambda: _call_soon(loop, changed.set))
        request.max_deltas = _STREAM_DELTAS
        self._enqueue([request])
        try:
            while True:
                done = request.done
                deltas = request.take_deltas()
                with self._wake:
                    self._wake.notify_all()
                for delta in deltas:
                    yield delta
                if done:
                    request.result()
                    return
                await changed.wait()
                changed.clear()
        finally:
            if not request.done:
                await asyncio.shield(loop.run_in_executor(None, self._abort, [request]))

    def open(self, prompt: Any, *, namespace: Hashable = None) -> Branch:
        """A `Branch` that begins with ``prompt``; its pages stay held until it is closed."""
        self.check_open()
        require_namespace(namespace)
        token_ids = self._encode(prompt)
        self.check_length(len(token_ids), 0)
        lease = None
        if len(token_ids) > 1:
            # Only what is cached is taken; the rest gets its pages when it is computed.
            num_cached = self.cache.match(token_ids[:-1], namespace=namespace)
            if num_cached:
                lease = self.cache.acquire(token_ids[:num_cached], namespace=namespace, full=True)
                if not lease.num_cached:  # evicted in between
                    lease.release()
                    lease = None
                elif lease.num_cached < num_cached:
                    lease.truncate(lease.num_cached)
        cached_tokens = 0 if lease is None else lease.num_cached
        return Branch(self, token_ids, namespace, lease=lease, cached_tokens=cached_tokens)

    def score(
        self, prompt: Any, continuations: SequenceABC[Any], *, namespace: Hashable = None
    ) -> list[Score]:
        """Log-likelihood of each continuation after ``prompt``, all in one pass.

        Args:
            continuations: texts (encoded alone, without special tokens) or token ids.
        """
        self.check_open()
        require_namespace(namespace)
        token_ids = self._encode(prompt)
        tails = self.encode_continuations(token_ids, continuations)
        scores: list[Score] = self.run_all([ScoreRequest(token_ids, tails, namespace)])[0]
        return scores

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | BeamParams | None = None,
        *,
        namespace: Hashable = None,
        **fields: Any,
    ) -> Request:
        """Queue one prompt for a caller that runs `step` itself; see `Request`."""
        request = self._make_request(prompt, params, namespace, fields, record=True)
        self._put([request])
        return request

    def abort(self, request: Request) -> None:
        """End a request now, with ``finish_reason="abort"``, and give its pages back."""
        if not isinstance(request, Request):
            raise TypeError(
                f"request: expected a Request, as submit() returns it, got "
                f"{type(request).__name__}; a stream is ended with close()"
            )
        self._abort([request])

    # -- the loop ----------------------------------------------------------------------------

    def step(self) -> list[Request]:
        """Run one batch; returns the requests that made progress or ended."""
        self.check_open()
        self.check_outside()
        with self._step_lock:
            return self._step()

    def _step(self) -> list[Request]:
        self._stepping = threading.get_ident()
        progressed: dict[Request, None] = {}
        try:
            self._settle(progressed)
            compute_ahead([guide for request in self._live for guide in request.guides])
            outputs = self._scheduler.step()
            if outputs:
                self._deliver(outputs, progressed)
            self._settle(progressed)
        except BaseException as error:
            # Not one sequence's fault: none that is live can be trusted to go on.
            failure: Exception
            if isinstance(error, Exception):
                failure = error
            else:
                failure = RadixKVError(f"Engine: the step was ended by {type(error).__name__}")
            for request in list(self._live):
                request.fail(failure)
                progressed[request] = None
            self._settle(progressed)
            if failure is not error:
                raise
        finally:
            self._stepping = None
        return list(progressed)

    def reset_cache(self) -> None:
        """Drop all cached KV, because the model now computes another.

        Changed weights, adapters and layers are mostly noticed when a request comes, and this
        is done then; `radixkv.fingerprint.WeightWatch` says what is not noticed. Requests that
        run fail, branches compute their tokens anew.

        Raises:
            RadixKVError: called from inside a step.
        """
        self.check_open()
        self.check_outside("call it between requests")
        with self._step_lock:
            self._watch.changed()
            self._reset()

    def _drop_stale(self) -> None:
        self._runner.look()
        if self._watch.changed():
            logger.warning("the model was changed: all cached KV is dropped")
            self._reset()

    def _reset(self) -> None:
        error = RadixKVError(
            "Engine: the model was changed while the request was running; run it again"
        )
        for request in list(self._live):
            request.fail(error)
        for request in list(self._inbox):
            request.recompute()
        for branch in list(self._branches):
            branch.recompute()
        self.cache.clear()
        self._runner.forget()
        self.is_batch_invariant &= not self._watch.layers_replaced
        self._fingerprint = None

    def fingerprint(self) -> dict[str, str]:
        """What of its model the cached KV depends on, name to value; snapshots hold it."""
        self.check_open()
        with self._step_lock:
            self._drop_stale()
            if self._fingerprint is None:
                stored = self._runner.stored_with(self.cache.codec)
                self._fingerprint = fingerprint(self.model, self.tokenizer, extra=stored)
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
                    request.start(self._scheduler)
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
        self._totals["steps"] += 1
        self._batches.append((num_tokens, len(outputs)))
        if together:
            self._sample(together)
        for one in alone:
            self._sample([one])

    def _sample(self, drawn: list[tuple[Output, list[SamplerRow]]]) -> None:
        """Draw for all at once; if that fails one by one, so that only the one at fault fails."""
        if len(drawn) == 1 and drawn[0][0].sequence.owner.done:
            return
        try:
            logits, rows = _gather(drawn)
            sampled = sample(logits, rows)
        except Exception as error:
            if len(drawn) == 1:
                drawn[0][0].sequence.owner.fail(error)
            else:
                for one in drawn:
                    self._sample([one])
            return
        now = time.perf_counter()
        place = 0
        for output, rows in drawn:
            seq = output.sequence
            request: Request = seq.owner
            first, place = place, place + len(rows)
            if not request.done:
                try:
                    request.on_sampled(seq, sampled[first:place], now)
                except Exception as error:
                    request.fail(error)

    def _forward(self, runs: list[Run]) -> Tensor:
        batch = build_batch(runs, self._runner.device)
        logits = self._runner.forward(batch, self.cache)
        reads, bytes_per_token = batch.attention.reads, self.cache.codec.bytes_per_token
        self._totals["kv_read"] += reads.tokens * bytes_per_token
        self._totals["kv_alone"] += reads.tokens_alone * bytes_per_token
        return logits

    def _put(self, requests: list[Request]) -> None:
        for request in requests:
            request.on_end = self._count
        with self._wake:
            self.check_open()  # within: what comes after `close` has looked would never end
            self._inbox.extend(requests)
            self._wake.notify_all()

    def _enqueue(self, requests: list[Request]) -> None:
        """Queue ``requests`` and see to it that the engine's thread runs."""
        self._put(requests)
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run_steps,
                    args=(weakref.ref(self), self._wake, torch.get_num_threads()),
                    name="radixkv-engine",
                    daemon=True,
                )
                try:
                    self._thread.start()
                except BaseException:  # the system has no thread left
                    self._thread = None
                    raise

    def run_all(self, requests: list[Any], *, progress: bool = False) -> list[Any]:
        """Run requests to their end; if one fails, the others are aborted and its error raised."""
        try:
            self.check_outside()
            self._enqueue(requests)
        except BaseException as error:
            for request in requests:  # they may have brought leases
                request.fail(error)
            raise
        try:
            if progress:
                _show_progress(self, requests)
            for request in requests:
                while not request.wait(1.0):
                    if self._closed:
                        raise EngineClosedError("Engine: closed while the request was running")
                if request.error is not None:
                    break
            return self._results(requests)
        finally:
            self._abort([request for request in requests if not request.done])

    def _results(self, requests: list[Any]) -> list[Any]:
        for request in requests:
            if request.done and request.error is not None:
                raise request.error
        return [request.result() for request in requests]

    def _abort(self, requests: list[Request]) -> None:
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
        with self._step_lock:
            self._stepping = threading.get_ident()
            try:
                self._settle({})
            finally:
                self._stepping = None

    # -- checks, shared with Branch ----------------------------------------------------------

    def check_open(self) -> None:
        """Raise unless this engine can be used here."""
        self.check_process()
        if self._closed:
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

    def check_length(self, num_prompt: int, max_new_tokens: int) -> None:
        """Raise ContextLengthError if the model has not that many positions."""
        limit = self.max_positions
        if limit is not None and num_prompt + max_new_tokens > limit:
            raise ContextLengthError(
                f"prompt: expected prompt plus max_new_tokens within the model's {limit} "
                f"positions, got {num_prompt} + {max_new_tokens} = "
                f"{num_prompt + max_new_tokens}; shorten the prompt or lower max_new_tokens"
            )

    def check_request(self, token_ids: list[int], params: SamplingParams | BeamParams) -> None:
        """Raise what is wrong with a request before any work is done for it."""
        num_prompt, max_new_tokens = len(token_ids), params.max_new_tokens
        self.check_length(num_prompt, max_new_tokens)
        if isinstance(params, BeamParams):
            self._check_ids("BeamParams.stop_token_ids", params.stop_token_ids)
            # All beams live at once: the prompt's whole pages once, the rest for each.
            page_size = self.cache.config.page_size
            shared = num_prompt // page_size
            tail = -(-(num_prompt + max_new_tokens - 1) // page_size) - shared
            self._check_pages(shared + params.width * tail, f"{params.width} beams")
            return
        self._check_ids("SamplingParams.stop_token_ids", params.stop_token_ids)
        self._check_ids("SamplingParams.logit_bias", params.logit_bias or ())
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None:
                require_int(f"SamplingParams.{name}", value, 0, self.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError(
                "SamplingParams.stop: expected an engine with a tokenizer, got none; "
                "use stop_token_ids"
            )
        self._check_tokens(num_prompt + max_new_tokens - 1, "prompt plus new tokens")

    def _check_tokens(self, num_tokens: int, what: str) -> None:
        page_size = self.cache.config.page_size
        self._check_pages(-(-num_tokens // page_size), f"{num_tokens} tokens ({what})")

    def _check_pages(self, num_pages: int, what: str) -> None:
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

    def sampling_params(self, params: Any, fields_: dict[str, Any]) -> SamplingParams:
        """``params``, or new ones of ``fields_``; raises on both, or on an unknown field."""
        if params is None:
            known = {field.name for field in fields(SamplingParams)}
            unknown = sorted(set(fields_) - known)
            if unknown:
                raise TypeError(
                    f"SamplingParams: expected fields among {', '.join(sorted(known))}, "
                    f"got {', '.join(unknown)}"
                )
            return SamplingParams(**fields_)
        if fields_:
            raise TypeError(
                f"params: expected params or fields, got both; use "
                f"dataclasses.replace(params, {', '.join(f'{k}=...' for k in fields_)})"
            )
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params: expected SamplingParams, got {type(params).__name__}")
        return params

    def make_guide(self, params: SamplingParams) -> Guide | None:
        """What ``params`` constrain a text to; raises what is wrong with it."""
        return make_guide(
            params,
            self.tokenizer,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
        )

    def _encode(self, prompt: Any) -> list[int]:
        return encode_prompt(self.tokenizer, prompt, vocab_size=self.vocab_size)

    def encode_tail(self, token_ids: list[int], tail: Any) -> list[int]:
        """What `Branch.append` adds: text and ids as they are, messages by the chat template."""
        if isinstance(tail, SequenceABC) and len(tail) and isinstance(tail[0], dict):
            return encode_messages(
                self.tokenizer,
                tail,
                last_token_id=token_ids[-1],
                eos_token_ids=self.eos_token_ids,
                vocab_size=self.vocab_size,
            )
        return encode_continuation(self.tokenizer, tail, vocab_size=self.vocab_size)

    def encode_continuations(
        self, token_ids: list[int], continuations: SequenceABC[Any]
    ) -> list[list[int]]:
        """Token ids of each continuation of a prompt, checked for length and capacity."""
        if isinstance(continuations, (str, bytes)) or not isinstance(continuations, SequenceABC):
            raise TypeError(
                f"continuations: expected a list of texts or token id lists, got "
                f"{type(continuations).__name__}; for one, pass a list of one"
            )
        if not continuations:
            raise ValueError("continuations: expected at least one, got none")
        tails = [
            encode_continuation(self.tokenizer, tail, vocab_size=self.vocab_size)
            for tail in continuations
        ]
        longest = max(map(len, tails))
        self.check_length(len(token_ids), longest)
        self._check_tokens(len(token_ids) + longest - 1, "prompt plus continuation")
        return tails

    def _make_request(
        self,
        prompt: Any,
        params: Any,
        namespace: Hashable,
        fields_: dict[str, Any],
        *,
        record: bool = False,
    ) -> Request:
        self.check_open()
        require_namespace(namespace)
        token_ids = self._encode(prompt)
        if isinstance(params, BeamParams) and not fields_:
            self.check_request(token_ids, params)
            return BeamRequest(
                token_ids,
                params,
                namespace,
                self.tokenizer,
                self.eos_token_ids,
                self.vocab_size,
                record=record,
            )
        chosen = self.sampling_params(params, fields_)
        self.check_request(token_ids, chosen)
        return SampleRequest(
            token_ids,
            chosen,
            namespace,
            self.tokenizer,
            self.eos_token_ids,
            guide=self.make_guide(chosen),
            record=record,
        )

    def _make_requests(
        self, prompts: Any, params: Any, namespace: Hashable, fields_: dict[str, Any]
    ) -> tuple[bool, list[Request]]:
        self.check_open()
        single = is_prompt(prompts)
        each = [prompts] if single else list(prompts)
        if isinstance(params, (list, tuple)):
            if len(params) != len(each):
                raise ValueError(
                    f"params: expected one for each of {len(each)} prompts, got {len(params)}"
                )
            chosen = list(params)
        else:
            chosen = [params] * len(each)
        return single, [
            self._make_request(prompt, param, namespace, fields_)
            for prompt, param in zip(each, chosen, strict=True)
        ]

    # -- statistics, end ---------------------------------------------------------------------

    def _count(self, request: Request) -> None:
        how = "failed" if request.error else "aborted" if request.aborted else "done"
        totals = self._totals
        totals[how] += 1
        totals["prompt"] += len(request.prompt_token_ids)
        totals["cached"] += request.cached_tokens
        totals["prefill"] += request.metrics.prefill_tokens
        totals["decode"] += request.metrics.decode_tokens
        if request.num_tokens:
            self._ttfts.append(request.metrics.ttft_s)
        self._gaps.extend(request.token_gaps)

    def stats(self) -> EngineStats:
        """What has been done so far."""
        self.check_open()
        totals = self._totals
        batches = list(self._batches)  # the engine's thread goes on appending
        tokens = [tokens for tokens, _ in batches]
        seqs = [seqs for _, seqs in batches]
        return EngineStats(
            requests_done=totals["done"],
            requests_failed=totals["failed"],
            requests_aborted=totals["aborted"],
            requests_live=sum(not request.done for request in [*self._inbox, *self._live]),
            prompt_tokens=totals["prompt"],
            cached_tokens=totals["cached"],
            prefill_tokens=totals["prefill"],
            decode_tokens=totals["decode"],
            steps=totals["steps"],
            kv_bytes_read=totals["kv_read"],
            kv_bytes_alone=totals["kv_alone"],
            preemptions=self._scheduler.preemptions,
            ttft_p50_s=_percentile(self._ttfts, 0.5),
            ttft_p95_s=_percentile(self._ttfts, 0.95),
            token_p50_s=_percentile(self._gaps, 0.5),
            token_p95_s=_percentile(self._gaps, 0.95),
            batch_tokens_p50=_percentile(tokens, 0.5),
            batch_tokens_max=max(tokens, default=0),
            batch_seqs_p50=_percentile(seqs, 0.5),
            batch_seqs_max=max(seqs, default=0),
            cache=self.cache.stats(),
        )

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def adopt(self, branch: Branch) -> None:
        """Close ``branch`` when this engine is closed."""
        self._branches.add(branch)

    def close(self) -> None:
        """Abort what runs, close the branches, and free every page; may be called again."""
        if self._closed:
            return
        with self._step_lock:
            with self._wake:
                self._closed = True
                self._wake.notify_all()
                thread = self._thread
            for request in [*self._inbox, *self._live]:
                request.aborted = True
            self._settle({})
            for branch in list(self._branches):
                branch.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.cache.clear()
        self._runner.release()

    def _after_fork(self) -> None:
        """Close the copy that fork() made: its thread and what runs are the parent's."""
        self._closed = True
        self._thread = self._stepping = None
        self._step_lock, self._wake = threading.RLock(), threading.Condition()
        self.cache.after_fork()

    def __enter__(self) -> Engine:
        self.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Stream(Iterator[Delta]):
    """An iterator of `Delta`; closing, dropping or leaving it aborts its request.

    Attributes:
        request: what it streams; `Request.result` gives the whole at the end.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self.request = request
        self._changed = threading.Event()
        self._ready: deque[Delta] = deque()
        self._over = False
        request.listen(self._changed.set)
        request.max_deltas = _STREAM_DELTAS
        engine._enqueue([request])

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        while not self._ready:
            done = self.request.done
            self._ready.extend(self.request.take_deltas())
            if self._ready:
                with self._engine._wake:  # it may have been paused for want of this
                    self._engine._wake.notify_all()
                break
            if done:
                if self.request.error is not None and not self._over:
                    self._over = True  # raised once; then the iterator is at its end
                    raise self.request.error
                raise StopIteration
            self._engine.check_process()
            self._engine.check_outside()
            self._changed.wait()
            self._changed.clear()
        return self._ready.popleft()

    def close(self) -> None:
        """Abort the request, if it still runs, and give its pages back."""
        self._engine._abort([self.request])
        self._ready.clear()
        self.request.take_deltas()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # May run at any moment, also inside a call that holds the cache's lock: never wait here.
        # When the interpreter ends, modules are empty, and engines were closed before.
        if hasattr(self, "_ready") and not self.request.done and not _is_ending():
            self.request.aborted = True
            with self._engine._wake:
                self._engine._wake.notify_all()


def _run_steps(
    engine_ref: weakref.ref[Engine], wake: threading.Condition, num_threads: int
) -> None:
    """The engine's thread: steps while there is work, lingers, and ends."""
    torch.set_num_threads(num_threads)  # a new thread starts with the default
    idle_since = time.perf_counter()
    while True:
        engine = engine_ref()
        if engine is None:
            return
        if engine._closed:
            engine._thread = None
            return
        if engine._inbox or engine._live:
            try:
                with engine._step_lock:
                    if not engine._closed:
                        engine._step()
            except BaseException:
                # SystemExit from a callback, say. Its requests have failed with it; the thread
                # goes on for those that come.
                logger.exception("a step was ended from inside")
            idle_since = time.perf_counter()
            if engine._inbox or engine._scheduler.has_work:
                continue
        with wake:
            if not engine._inbox and not engine._closed:
                if not engine._live and time.perf_counter() - idle_since > _LINGER_S:
                    engine._thread = None
                    return
                timeout_s = _PAUSED_S if engine._live else _LINGER_S / 2
                del engine  # an engine that nobody uses must not be kept alive from here
                wake.wait(timeout_s)


def _identify(engine_ref: weakref.ref[Engine]) -> dict[str, str]:
    engine = engine_ref()
    if engine is None:
        raise EngineClosedError("PrefixCache: expected a cache whose engine is open; keep it")
    return engine.fingerprint()


def _gather(
    drawn: list[tuple[Output, list[SamplerRow]]],
) -> tuple[Tensor, list[SamplerRow]]:
    """The rows to draw, and their logits, without a copy where they stand so already."""
    batch_logits = drawn[0][0].batch_logits
    assert batch_logits is not None
    places: list[int] = []
    every: list[SamplerRow] = []
    are_together = True
    for (_, _, stop, logits_from, logits, row, _), rows in drawn:
        are_together &= logits is batch_logits
        places += [row + stop - 1 - logits_from] * len(rows)
        every += rows
    if not are_together:  # they were run one by one
        last = [output.logits[-1:].expand(len(rows), -1) for output, rows in drawn]
        return torch.cat(last), every
    if places != list(range(batch_logits.shape[0])):
        batch_logits = batch_logits[torch.tensor(places, device=batch_logits.device)]
    return batch_logits, every


@contextmanager
def _no_collections() -> Iterator[None]:
    """No cyclic garbage collection within the block, if there was any.

    Half a million objects come with the imports and stay: looking at them again and again takes
    a tenth of the whole.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else what its owner froze would be thawed
                gc.freeze()  # and at once back: all count as old now, without having been looked at
                gc.unfreeze()
            gc.enable()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)


def _show_progress(engine: Engine, requests: list[Request]) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "{task.fields[rate]:.0f} tokens/s, {task.fields[hits]:.0%} of prompts cached, "
            "{task.fields[used]:.0%} of pages in use"
        ),
    )
    started = time.perf_counter()
    with Progress(*columns) as bar:
        task = bar.add_task("requests", total=len(requests), rate=0.0, hits=0.0, used=0.0)
        while True:
            open_ones = [request for request in requests if not request.done]
            tokens = sum(request.num_tokens for request in requests)
            prompts = sum(len(request.prompt_token_ids) for request in requests)
            cached = sum(request.cached_tokens for request in requests)
            bar.update(
                task,
                completed=len(requests) - len(open_ones),
                rate=tokens / max(time.perf_counter() - started, 1e-9),
                hits=cached / prompts,
                used=1 - engine.cache.num_free_pages / engine.cache.pool.num_pages,
            )
            if not open_ones or any(request.error for request in requests):
                return
            open_ones[0].wait(0.1)


def _percentile(values: Collection[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _eos_token_ids(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            if isinstance(eos, torch.Tensor):
                eos = eos.flatten().tolist()
            return frozenset(int(i) for i in (eos if isinstance(eos, (list, tuple)) else [eos]))
    return frozenset()


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX-512 BF16 or AMX on x86, BF16 on Arm)."""
    flags: set[str] = set()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith(("flags", "Features")):
            flags = set(line.split())
            break
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
