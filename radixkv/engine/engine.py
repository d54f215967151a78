"""The engine: prompts in, text out; one thread that runs steps, any thread that asks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Hashable
from collections.abc import Sequence as SequenceABC
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack, overload

import numpy as np
import torch

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import (
    BACKENDS,
    BackendName,
    BeamParams,
    KVConfig,
    OnError,
    SamplingFields,
    SamplingParams,
    require_choice,
    require_int,
    require_namespace,
)
from radixkv.engine.asynchronous import run_all_async, stream_async
from radixkv.engine.branch import Branch, take_cached
from radixkv.engine.core import EngineCore
from radixkv.engine.description import Description, describe
from radixkv.engine.loading import load_checkpoint, no_bars_in_a_pipe, no_collections
from radixkv.engine.many import deliver, outcomes_of
from radixkv.engine.request import Request
from radixkv.engine.results import Delta, Result, Score
from radixkv.engine.scheduler import Policy, longest_prefix_first
from radixkv.engine.score_request import ScoreRequest
from radixkv.engine.stats import EngineStats
from radixkv.engine.stream import Stream
from radixkv.models.checkpoint import (
    ENGINE_OPTIONS,
    own_options,
    require_checkpoint,
    require_device,
    require_dtype,
    require_options,
)
from radixkv.models.support import check_model
from radixkv.names import named_options, safe_repr
from radixkv.text import (
    Chat,
    IdArray,
    Prompt,
    TokenIds,
    begin_conversation,
    require_tokenizer,
)

Params: TypeAlias = SamplingParams | BeamParams
# A prompt whose type says that it is one: an array's does not say how many dimensions it has.
_One: TypeAlias = str | SequenceABC[int] | SequenceABC[np.integer[Any]] | Chat


class Engine:
    """Generates with a transformers causal LM on a prefix cache of quantized pages.

    Args:
        model: a transformers causal LM. It is put in eval mode; `close` gives the modes back, and
            so does a constructor that raises. While a step runs, and no longer, its attention
            and its layers' forwards are replaced, it runs in eval mode whatever ``train()``
            says, and uncompiled: in between it is its owner's, to train, copy, compile, adapt or
            resize, and what changes it is noticed (`radixkv.models.weight_watch.WeightWatch`).
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
        model, tokenizer: what was loaded.
        cache: the `PrefixCache`. After `close` it is empty, and may be used by itself.
        core: what runs behind it, for what is built on an engine.

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
        backend: BackendName = "auto",
        policy: Policy = longest_prefix_first,
    ) -> None:
        _require_engine_options(kv, max_batch_tokens, backend, policy)
        require_tokenizer(tokenizer)
        if device is not None:
            check_model(model)  # or moving it fails, for another reason
            model = model.to(device)
        self.core = EngineCore(model, tokenizer, kv, backend, max_batch_tokens, policy)
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.cache: PrefixCache = self.core.cache

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        kv: KVConfig = KVConfig(),  # noqa: B008 - frozen
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        max_batch_tokens: int | None = None,
        backend: BackendName = "auto",
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
        if device is None or device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        with no_collections(), no_bars_in_a_pipe():
            model, tokenizer = load_checkpoint(
                where, name_or_path, device, dtype, transformers_kwargs, ours
            )
            engine = cls(
                model,
                tokenizer,
                kv=kv,
                device=device,
                max_batch_tokens=max_batch_tokens,
                backend=backend,
                policy=policy,
            )
        engine.core.runner.warn_of_outliers(kv)
        if snapshot is not None:
            try:
                engine.cache.load(snapshot)
            except BaseException:
                engine.close()
                raise
        return engine

    @safe_repr
    def __repr__(self) -> str:
        core = self.core
        state = "closed" if core.is_closed else "open"
        return f"of {core.name}: {self.cache.usage}, {state}"

    def describe(self) -> Description:
        """What runs here and how: a dict that JSON can write, whose ``str`` is a table.

        Its keys: ``radixkv`` (the version), ``model``, ``name_or_path``, ``dtype``, ``device``,
        ``weights`` (bytes by format), ``backend``, ``threads``, ``fused_layers`` (numbers of the
        layers that run as two compiled calls), ``unfused_layers`` (the others, each group with
        the reason why), ``is_batch_invariant``, ``kv`` (the options of its pages, bytes a token),
        ``pool`` (bytes), ``pages`` (as in `CacheStats`), ``tiers`` (where pages lie, fastest
        first), ``max_batch_tokens``, ``max_positions``, ``vocab_size``.

        Raises:
            EngineClosedError: after `close`.
        """
        return describe(self.core)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether results are bit for bit the same whatever else runs and whatever is cached.

        Measured when the engine is made (float32 on a CPU with the compiled kernels), and again
        when it is asked for after weights or adapters were changed; False once layers of the
        model were replaced by others.
        """
        return self.core.is_batch_invariant

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sample."""
        return self.core.intake.eos_token_ids

    @property
    def max_positions(self) -> int | None:
        """Tokens that the model has positions for; None is without end."""
        return self.core.runner.max_positions

    @property
    def vocab_size(self) -> int:
        """Tokens that the model can read and draw, as it is now."""
        return self.core.runner.vocab_size

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.core.is_closed

    # -- asking ------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: _One,
        params: Params | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        **fields: Unpack[SamplingFields],
    ) -> Result: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: _One,
        params: Params | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["return"],
        **fields: Unpack[SamplingFields],
    ) -> Result | Exception: ...

    @overload
    def generate(
        self,
        prompts: SequenceABC[Prompt],
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        **fields: Unpack[SamplingFields],
    ) -> list[Result]: ...

    @overload
    def generate(
        self,
        prompts: SequenceABC[Prompt],
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["return"],
        **fields: Unpack[SamplingFields],
    ) -> list[Result | Exception]: ...

    @overload
    def generate(
        self,
        prompts: IdArray,
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: OnError = "raise",
        **fields: Unpack[SamplingFields],
    ) -> Any: ...

    def generate(
        self,
        prompts: Any,
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: OnError = "raise",
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
        core = self.core
        core.check_open()
        single, made = core.intake.make_requests(prompts, params, namespace, fields, on_error)
        requests = [request for request in made if isinstance(request, Request)]
        core.run(requests, progress=progress)
        return deliver(outcomes_of(made), is_one=single, on_error=on_error)

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompts: _One,
        params: Params | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        **fields: Unpack[SamplingFields],
    ) -> Result: ...

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompts: _One,
        params: Params | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["return"],
        **fields: Unpack[SamplingFields],
    ) -> Result | Exception: ...

    @overload
    async def agenerate(
        self,
        prompts: SequenceABC[Prompt],
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        **fields: Unpack[SamplingFields],
    ) -> list[Result]: ...

    @overload
    async def agenerate(
        self,
        prompts: SequenceABC[Prompt],
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: Literal["return"],
        **fields: Unpack[SamplingFields],
    ) -> list[Result | Exception]: ...

    @overload
    async def agenerate(
        self,
        prompts: IdArray,
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: OnError = "raise",
        **fields: Unpack[SamplingFields],
    ) -> Any: ...

    async def agenerate(
        self,
        prompts: Any,
        params: Params | SequenceABC[Params] | None = None,
        *,
        namespace: Hashable = None,
        progress: bool = False,
        on_error: OnError = "raise",
        **fields: Any,
    ) -> Any:
        """`generate` for asyncio; cancelling the task aborts its requests."""
        core = self.core
        core.check_open()
        single, made = core.intake.make_requests(prompts, params, namespace, fields, on_error)
        requests = [request for request in made if isinstance(request, Request)]
        await run_all_async(core, requests, progress=progress)
        return deliver(outcomes_of(made), is_one=single, on_error=on_error)

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        namespace: Hashable = None,
        **fields: Unpack[SamplingFields],
    ) -> Stream:
        """The deltas of one prompt's samples, as they come: an iterator of `Delta`.

        Closing the iterator, breaking out of a loop over it or dropping it aborts the request
        and gives its pages back.
        """
        return Stream(self.core, self._recorded(prompt, params, namespace, dict(fields)))

    async def astream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        namespace: Hashable = None,
        **fields: Unpack[SamplingFields],
    ) -> AsyncIterator[Delta]:
        """`stream` for asyncio; cancelling the task or closing the iterator aborts it."""
        request = self._recorded(prompt, params, namespace, dict(fields))
        async with aclosing(stream_async(self.core, request)) as deltas:
            async for delta in deltas:
                yield delta

    def open(self, prompt: Prompt, *, namespace: Hashable = None) -> Branch:
        """A `Branch` that begins with ``prompt``; its pages stay held until it is closed."""
        self.core.check_open()
        require_namespace(namespace)
        intake = self.core.intake
        token_ids = intake.encode(prompt)
        intake.limits.check_length(len(token_ids), 0)
        lease = take_cached(self.cache, token_ids[:-1], namespace)
        cached_tokens = 0 if lease is None else lease.num_cached
        return Branch(
            self.core,
            token_ids,
            namespace,
            lease=lease,
            cached_tokens=cached_tokens,
            conversation=begin_conversation(prompt, token_ids),
        )

    def score(
        self,
        prompt: Prompt,
        continuations: SequenceABC[str | TokenIds],
        *,
        namespace: Hashable = None,
    ) -> list[Score]:
        """Log-likelihood of each continuation after ``prompt``, all in one pass.

        Args:
            continuations: texts, encoded apart from the prompt as they go on after it (no
                special tokens, no space of the tokenizer's own), or token ids.
        """
        core = self.core
        core.check_open()
        require_namespace(namespace)
        token_ids = core.intake.encode(prompt)
        tails = core.intake.encode_continuations(token_ids, continuations)
        scores: list[Score] = core.run_all([ScoreRequest(token_ids, tails, namespace)])[0]
        return scores

    def submit(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        namespace: Hashable = None,
        **fields: Unpack[SamplingFields],
    ) -> Request:
        """Queue one prompt for a caller that runs `step` itself; see `Request`."""
        request = self._recorded(prompt, params, namespace, dict(fields))
        self.core.put([request])
        return request

    def abort(self, request: Request) -> None:
        """End a request now, with ``finish_reason="abort"``, and give its pages back."""
        if not isinstance(request, Request):
            raise TypeError(
                f"request: expected a Request, as submit() returns it, got "
                f"{type(request).__name__}; a stream is ended with close()"
            )
        self.core.abort([request])

    def _recorded(
        self, prompt: Any, params: Any, namespace: Hashable, fields: dict[str, Any]
    ) -> Request:
        """A request whose deltas somebody reads."""
        self.core.check_open()
        return self.core.intake.make_request(prompt, params, namespace, fields, record=True)

    # -- the loop, the model, the end --------------------------------------------------------

    def step(self) -> list[Request]:
        """Run one batch; returns the requests that made progress or ended."""
        self.core.check_open()
        self.core.check_outside()
        return self.core.step()

    def reset_cache(self) -> None:
        """Drop all cached KV, because the model now computes another.

        Changed weights, adapters and layers are mostly noticed when a request comes, and this
        is done then; `radixkv.models.fingerprint.WeightWatch` says what is not noticed. Requests
        that run fail, branches compute their tokens anew.

        Raises:
            RadixKVError: called from inside a step.
        """
        self.core.reset_cache()

    def stats(self) -> EngineStats:
        """What has been done so far."""
        return self.core.stats()

    def close(self) -> None:
        """Abort what runs, close the branches, and free every page; may be called again."""
        self.core.close()

    def __enter__(self) -> Engine:
        self.core.check_open()
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
