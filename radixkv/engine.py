"""The engine: prompts in, text out; one thread that runs steps, any thread that asks."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Hashable
from collections.abc import Sequence as SequenceABC
from contextlib import aclosing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from radixkv.asynchronous import run_all_async, stream_async
from radixkv.batch import Run, build_batch
from radixkv.branch import Branch, take_cached
from radixkv.cache import PrefixCache
from radixkv.checkpoint import (
    ENGINE_OPTIONS,
    named_refusals,
    own_options,
    require_checkpoint,
    require_device,
    require_dtype,
    require_options,
)
from radixkv.config import (
    BACKENDS,
    BeamParams,
    KVConfig,
    SamplingParams,
    require_choice,
    require_int,
    require_namespace,
)
from radixkv.drawing import draw, may_end
from radixkv.errors import (
    EngineClosedError,
    RadixKVError,
)
from radixkv.fingerprint import fingerprint
from radixkv.guided import Guide, compute_ahead, make_guide
from radixkv.limits import Limits
from radixkv.loading import cpu_has_bfloat16, find_eos_token_ids, no_collections
from radixkv.loop import run_steps
from radixkv.many import deliver, outcomes_of, prompt_name, require_on_error, split_prompts
from radixkv.model import ModelRunner
from radixkv.names import SAMPLING_MEANINGS, named_options, require_known
from radixkv.progress import show_progress
from radixkv.request import (
    BeamRequest,
    Delta,
    Request,
    SampleRequest,
    Score,
    ScoreRequest,
)
from radixkv.sampling import Sampled, SamplerRow
from radixkv.scheduler import Output, Policy, Scheduler, longest_prefix_first
from radixkv.stats import EngineStats, Tally
from radixkv.stream import Stream
from radixkv.support import check_model
from radixkv.text import (
    Conversation,
    begin_conversation,
    continue_conversation,
    encode_continuation,
    encode_continuations,
    encode_prompt,
    is_chat,
    require_tokenizer,
)
from radixkv.watch import WeightWatch

if TYPE_CHECKING:
    from torch import Tensor


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


class Engine:
    """Generates with a transformers causal LM on a prefix cache of quantized pages.

    Args:
        model: a transformers causal LM. It is put in eval mode; `close` gives the modes back, and
            so does a constructor that raises. While a step runs, and no longer, its attention
            and its layers' forwards are replaced, it runs in eval mode whatever ``train()``
            says, and uncompiled: in between it is its owner's, to train, copy, compile, adapt or
            resize, and what changes it is noticed (`radixkv.watch.WeightWatch`).
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

    Raises:
        UnsupportedModelError: the model's attention cannot be served rightly.
        ValueError, TypeError: an option is out of range, or of the wrong type.

    Several threads may call it; their calls run as one batch. What is cached never changes a
    result, since attention reads the stored pages for every token.
    """

    @named_options("Engine", ENGINE_OPTIONS)
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
        _require_engine_options(kv, max_batch_tokens, backend, policy)
        require_tokenizer(tokenizer)
        self._closed = True  # until all below has worked
        if device is not None:
            check_model(model)  # or moving it fails, for another reason
            model = model.to(device)
        self._runner = ModelRunner.load(model)
        self.model = model
        self.tokenizer = tokenizer
        self.eos_token_ids = find_eos_token_ids(model, tokenizer, self.vocab_size)
        self.max_positions = self._runner.max_positions
        try:
            self._is_invariant: bool | None = self._runner.is_batch_invariant(kv, backend)
            self.cache = PrefixCache(
                self._runner.spec, kv, device=self._runner.device, backend=backend
            )
        except BaseException:
            self._runner.release()  # the model is its owner's again, as it was
            raise
        if not self._is_invariant:
            logger.info(
                "%s: low bits of a result may depend on what else runs and what is cached "
                "(float32 on a CPU with the compiled kernels has none of that)",
                type(model).__name__,
            )
        self._runner.settle()
        self._watch = WeightWatch(self._runner.model, self._runner.probe)
        self._vocab_size = self._runner.vocab_size  # that running requests count on
        self._has_foreign = False  # writes to buffers, of another thread, during a pass
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
        self._tally = Tally()
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
                (``gguf_file=...``) or of the model alone. ``torch_dtype`` is ``dtype``.

        Raises:
            UnknownOptionError: an option that neither this nor transformers has.
            ValueError, TypeError: an option out of range; a path without a model. All options
                are looked at before the model is loaded.
            UnsupportedModelError: a model that is no causal LM, or that cannot be served rightly.
            OSError: transformers found no model of that hub id.

        Warns (UserWarning) where ``kv`` does not rotate and the model's own K says that its
        format would suffer.
        """
        where, ours = "Engine.from_pretrained", own_options(cls.from_pretrained)
        require_options(where, transformers_kwargs, ours)
        require_checkpoint(name_or_path, transformers_kwargs)
        _require_engine_options(kv, max_batch_tokens, backend, policy)
        older = transformers_kwargs.pop("torch_dtype", None)
        if dtype is None or (dtype == "auto" and older is not None):
            dtype = "auto" if older is None else older
        require_device(device)
        require_dtype(dtype)
        if snapshot is not None:
            Path(snapshot).stat()  # before the model is loaded: raises FileNotFoundError
        with no_collections():
            from transformers import AutoModelForCausalLM, AutoTokenizer

            if device is None or device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            shared = {
                key: transformers_kwargs[key]
                for key in ("gguf_file", "revision", "trust_remote_code", "token", "subfolder")
                if key in transformers_kwargs
            }
            with named_refusals(where, name_or_path, ours):
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

    @property
    def is_batch_invariant(self) -> bool:
        """Whether results are bit for bit the same whatever else runs and whatever is cached.

        Measured when the engine is made (float32 on a CPU with the compiled kernels), and again
        when it is asked for after weights or adapters were changed; False once layers of the
        model were replaced by others.
        """
        if self._is_invariant is None:
            with self._step_lock:
                if self._closed or not self._watch.is_checked:
                    return False
                kv, backend = self.cache.config, self.cache.backend.name
                self._is_invariant = self._runner.is_batch_invariant(kv, backend)
        return self._is_invariant

    @property
    def limits(self) -> Limits:
        """What may be asked of this engine, as its model is now."""
        return Limits(
            self.cache,
            self.vocab_size,
            self.max_positions,
            has_tokenizer=self.tokenizer is not None,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that the model can read and draw, as it is now."""
        return self._runner.vocab_size

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
        on_error: str = "raise",
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
            on_error: what becomes of a prompt that fails, by itself or while it runs.
                ``"raise"``: bad prompts are found before anything runs, and the first is raised;
                of those that fail while they run the first is raised when all have ended.
                ``"return"``: its exception stands in its place, all others are served.
            fields: of `SamplingParams`, instead of ``params``.

        Returns:
            A `Result` for one prompt; a list of them, in the prompts' order, for a list. With
            ``on_error="return"`` an exception in place of each that failed.

        Raises:
            ValueError, TypeError: a prompt or option that cannot be used; nothing was run.
            ContextLengthError: prompt plus new tokens over the model's positions.
            CapacityError: a request that cannot fit the page pool even alone.
            Exception: what a request failed with.

            A prompt's error has ``index``, its place, and ``results``, a list of what the others
            gave, None for what did not finish; all are None if nothing ran.
        """
        single, made = self._make_requests(prompts, params, namespace, fields, on_error)
        requests = [request for request in made if isinstance(request, Request)]
        self._run(requests, progress=progress)
        return deliver(outcomes_of(made), is_one=single, on_error=on_error)

    async def agenerate(
        self,
        prompts: Any,
        params: Any = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: str = "raise",
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio; cancelling the task aborts its requests."""
        single, made = self._make_requests(prompts, params, namespace, fields, on_error)
        requests = [request for request in made if isinstance(request, Request)]
        await run_all_async(self, requests, progress=progress)
        return deliver(outcomes_of(made), is_one=single, on_error=on_error)

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
        async with aclosing(stream_async(self, request)) as deltas:
            async for delta in deltas:
                yield delta

    def open(self, prompt: Any, *, namespace: Hashable = None) -> Branch:
        """A `Branch` that begins with ``prompt``; its pages stay held until it is closed."""
        self.check_open()
        require_namespace(namespace)
        token_ids = self._encode(prompt)
        self.limits.check_length(len(token_ids), 0)
        lease = take_cached(self.cache, token_ids[:-1], namespace)
        cached_tokens = 0 if lease is None else lease.num_cached
        return Branch(
            self,
            token_ids,
            namespace,
            lease=lease,
            cached_tokens=cached_tokens,
            conversation=begin_conversation(prompt, token_ids),
        )

    def score(
        self, prompt: Any, continuations: SequenceABC[Any], *, namespace: Hashable = None
    ) -> list[Score]:
        """Log-likelihood of each continuation after ``prompt``, all in one pass.

        Args:
            continuations: texts, encoded apart from the prompt as they go on after it (no
                special tokens, no space of the tokenizer's own), or token ids.
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
            if self._live and self._watch.has_foreign_buffers():
                self._drop(progressed)
            outputs = self._scheduler.step()
            if outputs:
                if self._is_stale(outputs):  # before anything that was computed is given out
                    self._drop(progressed)
                self._deliver(outputs, progressed)
            self._settle(progressed)
            if not self._live and not self._inbox:
                self._runner.rest()
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
        is done then; `radixkv.fingerprint.WeightWatch` says what is not noticed. Requests that
        run fail, branches compute their tokens anew.

        Raises:
            RadixKVError: called from inside a step.
        """
        self.check_open()
        self.check_outside("call it between requests")
        with self._step_lock:
            self._watch.accept()
            self._reset()

    def _drop_stale(self) -> None:
        self._runner.look()
        if self._watch.changed():
            self._drop({})
        if not self._watch.is_checked:
            self._runner.check()  # raises each time, until what was there is put back
            self._watch.is_checked = True

    def _drop(self, progressed: dict[Request, None]) -> None:
        """Forget all that was computed, since the model is another now."""
        logger.warning("the model was changed: all cached KV is dropped")
        progressed.update(self._live)
        self._watch.accept()
        self._has_foreign = False
        self._reset()

    def _reset(self) -> None:
        for request in list(self._live):
            request.fail(_changed_error())
        vocab_size = self._runner.vocab_size
        for request in list(self._inbox):
            if vocab_size != self._vocab_size:
                request.fail(_changed_error())
            else:
                request.recompute()
        self._vocab_size = vocab_size
        for branch in list(self._branches):
            branch.recompute()
        self.cache.clear()
        self._runner.forget()
        self._is_invariant = False if self._watch.layers_replaced else None
        self._fingerprint = None

    def fingerprint(self) -> dict[str, str]:
        """What of its model the cached KV depends on, name to value; snapshots hold it."""
        self.check_open()
        with self._step_lock:
            self._drop_stale()
            if self._fingerprint is None:
                stored = self._runner.stored_with(self.cache.codec)
                self._fingerprint = fingerprint(self._runner.model, self.tokenizer, extra=stored)
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
        self._tally.count_step(num_tokens, len(outputs))
        if together:
            draw(together, self._look_before_the_end)
        for one in alone:
            draw([one], self._look_before_the_end)

    def _is_stale(self, outputs: list[Output]) -> bool:
        """Whether the model was changed since the last step's outputs were given out."""
        if self._has_foreign or self._watch.changed_in_step():
            return True
        # What is no sample may end before anything is drawn.
        are_samples = all(type(output.sequence.owner) is SampleRequest for output in outputs)
        return not are_samples and self._watch.changed_unseen()

    def _look_before_the_end(self, sampled: list[Sampled], rows: list[SamplerRow]) -> None:
        """Fail what runs if the model was changed, where what was drawn may end a request."""
        if may_end(sampled, rows, self.eos_token_ids) and self._watch.changed_unseen():
            self._drop({})

    def _forward(self, runs: list[Run]) -> Tensor:
        batch = build_batch(runs, self._runner.device)
        logits = self._runner.forward(batch, self.cache)
        if self._watch.after_pass():
            logits = self._runner.forward(batch, self.cache)
            self._has_foreign |= self._watch.judge()
        reads, bytes_per_token = batch.attention.reads, self.cache.codec.bytes_per_token
        self._tally.count_reads(
            reads.tokens * bytes_per_token, reads.tokens_alone * bytes_per_token
        )
        return logits

    def _put(self, requests: list[Request]) -> None:
        for request in requests:
            request.on_end = self._tally.count_request
        vocab_size = self._runner.vocab_size
        with self._wake:
            self.check_open()  # within: what comes after `close` has looked would never end
            if vocab_size != self._vocab_size:  # what waits counts on another
                for request in self._inbox:
                    request.fail(_changed_error())
                self._vocab_size = vocab_size
            self._inbox.extend(requests)
            self._wake.notify_all()

    def _enqueue(self, requests: list[Request]) -> None:
        """Queue ``requests`` and see to it that the engine's thread runs."""
        self._put(requests)
        with self._wake:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=run_steps,
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
        """Run requests to their end and return what each gave; raises the first one's error."""
        self._run(requests, progress=progress)
        results = [request.take_outcome() for request in requests]
        for outcome in results:
            if isinstance(outcome, BaseException):
                results.clear()
                try:
                    raise outcome
                finally:
                    del outcome  # else this frame, which its traceback holds, would hold it
        return results

    def _run(self, requests: list[Any], *, progress: bool = False) -> None:
        """Run requests to their end, whatever it is; those that still run if it raises end."""
        if not requests:
            return
        try:
            self.check_outside()
            self._enqueue(requests)
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
                    if self._closed:
                        raise EngineClosedError("Engine: closed while the request was running")
        finally:
            self._abort([request for request in requests if not request.done])

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

    def sampling_params(self, params: Any, fields_: dict[str, Any]) -> SamplingParams:
        """``params``, or new ones of ``fields_``; raises on both, or on an unknown field."""
        known = [field.name for field in fields(SamplingParams)]
        require_known("SamplingParams", fields_, known, SAMPLING_MEANINGS)
        if params is None:
            return SamplingParams(**fields_)
        if fields_:
            raise TypeError(
                f"params: expected params or fields, got both; use "
                f"dataclasses.replace(params, {', '.join(f'{k}=...' for k in fields_)})"
            )
        if not isinstance(params, SamplingParams):
            mend = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams(...)"
            raise TypeError(
                f"params: expected SamplingParams, got {params!r} of type "
                f"{type(params).__name__}; use {mend}"
            )
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

    def encode_tail(
        self,
        token_ids: list[int],
        tail: Any,
        conversation: Conversation | None,
        *,
        ended: bool,
        shows_special: bool,
    ) -> tuple[list[int], Conversation | None]:
        """All tokens of a branch that goes on with ``tail``, and its chat where that is known.

        Text and ids follow as they are, messages as the chat template has them.

        Args:
            conversation: the branch's chat so far.
            ended: the last token ended a sample, and is no text.
            shows_special: special tokens inside the last answer are part of its text.
        """
        if is_chat(tail):
            return continue_conversation(
                self.tokenizer,
                token_ids,
                tail,
                conversation=conversation,
                ended=ended,
                shows_special=shows_special,
                eos_token_ids=self.eos_token_ids,
                vocab_size=self.vocab_size,
            )
        tail_ids = encode_continuation(
            self.tokenizer, tail, after=token_ids, vocab_size=self.vocab_size
        )
        return token_ids + tail_ids, conversation

    def encode_continuations(
        self, token_ids: list[int], continuations: SequenceABC[Any]
    ) -> list[list[int]]:
        """Token ids of each continuation of a prompt, checked for length and capacity."""
        tails = encode_continuations(
            self.tokenizer, continuations, after=token_ids, vocab_size=self.vocab_size
        )
        longest = max(map(len, tails))
        self.limits.check_length(len(token_ids), longest - 1)  # the last token is scored, not run
        # All write on in a copy of the prompt's last, open page but the last, whose own it is.
        page_size, num_prompt = self.cache.config.page_size, len(token_ids)
        pages = -(-(num_prompt + longest - 1) // page_size)
        if sum(len(tail) > 1 for tail in tails) > 1 and num_prompt % page_size:
            pages += 1
        self.limits.check_pages(pages, f"a prompt of {num_prompt} tokens and {longest} after it")
        return tails

    def _make_request(
        self,
        prompt: Any,
        params: Any,
        namespace: Hashable,
        fields_: dict[str, Any],
        *,
        record: bool = False,
        name: str = "prompt",
    ) -> Request:
        self.check_open()
        require_namespace(namespace)
        if not isinstance(params, BeamParams) or fields_:
            params = self.sampling_params(params, fields_)
        token_ids = encode_prompt(self.tokenizer, prompt, vocab_size=self.vocab_size, name=name)
        self.limits.check_request(token_ids, params, name=name)
        if isinstance(params, BeamParams):
            return BeamRequest(
                token_ids,
                params,
                namespace,
                self.tokenizer,
                self.eos_token_ids,
                self.vocab_size,
                record=record,
            )
        return SampleRequest(
            token_ids,
            params,
            namespace,
            self.tokenizer,
            self.eos_token_ids,
            guide=self.make_guide(params),
            record=record,
        )

    def _make_requests(
        self,
        prompts: Any,
        params: Any,
        namespace: Hashable,
        fields_: dict[str, Any],
        on_error: str,
    ) -> tuple[bool, list[Request | Exception]]:
        """Whether it is one prompt, and a request for each, or why it can't be one.

        Raises:
            Exception: one that is not a single prompt's; or the first prompt's, unless
                ``on_error`` is ``"return"``.
        """
        self.check_open()
        require_on_error(on_error)
        require_namespace(namespace)
        single, each = split_prompts(prompts)
        if isinstance(params, (list, tuple)):
            if len(params) != len(each):
                raise ValueError(
                    f"params: expected one for each of {len(each)} prompts, got {len(params)}"
                )
            if fields_:
                self.sampling_params(params, fields_)  # says that it is one or the other
            chosen = list(params)
        else:
            if not isinstance(params, BeamParams) or fields_:
                params = self.sampling_params(params, fields_)
            chosen = [params] * len(each)
        made: list[Request | Exception] = []
        for i, (prompt, param) in enumerate(zip(each, chosen, strict=True)):
            made.append(self._try_make(prompt, param, namespace, prompt_name(i, single)))
            if on_error == "raise" and isinstance(made[-1], Exception):
                failure = [None] * i + [made.pop()] + [None] * (len(each) - i - 1)
                deliver(failure, is_one=single, on_error=on_error)
        return single, made

    def _try_make(
        self, prompt: Any, params: Any, namespace: Hashable, name: str
    ) -> Request | Exception:
        try:
            return self._make_request(prompt, params, namespace, {}, name=name)
        except Exception as error:
            return error

    # -- statistics, end ---------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """What has been done so far."""
        self.check_open()
        live = sum(not request.done for request in [*self._inbox, *self._live])
        return self._tally.stats(live, self._scheduler.preemptions, self.cache.stats())

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


def _require_engine_options(
    kv: object, max_batch_tokens: object, backend: object, policy: object
) -> None:
    """Raise what is wrong with an engine's options, before a model is loaded or touched."""
    if not isinstance(kv, KVConfig):
        raise TypeError(f"kv: expected a KVConfig, got {kv!r}; use KVConfig(dtype=...)")
    if not callable(policy):
        raise TypeError(
            f"policy: expected a function of a Request and its cached tokens, got {policy!r}; "
            f"leave it out for the longest cached prefix first"
        )
    if max_batch_tokens is not None:
        require_int("max_batch_tokens", max_batch_tokens, 1)
    require_choice("backend", backend, BACKENDS)


def _changed_error() -> RadixKVError:
    return RadixKVError("Engine: the model was changed while the request was running; run it again")


def _identify(engine_ref: weakref.ref[Engine]) -> dict[str, str]:
    engine = engine_ref()
    if engine is None:
        raise EngineClosedError("PrefixCache: expected a cache whose engine is open; keep it")
    return engine.fingerprint()
