"""A transformers model, run on pages: what its attention asks for is read, checked and served.

The model keeps its own code; its attention reaches us through `radixkv.models.attention_interface`.
"""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from radixkv.attention.batch import ScoreRule
from radixkv.attention.layout import KVCodec, KVSpec
from radixkv.attention.reference import rotate_rows
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KVConfig
from radixkv.errors import NonFiniteError, RadixKVError, UnsupportedModelError
from radixkv.models.attention_interface import (
    AttentionHandler,
    Served,
    active,
    attending,
    register,
    score_rule,
)
from radixkv.models.batch import Batch, Run, build_batch
from radixkv.models.borders import SELF_TEST_TOKENS, try_borders
from radixkv.models.graphs import Capture, DecodeGraphs, capture_cuda, is_decode
from radixkv.models.hold import Hold, hold, uncompiled
from radixkv.models.measurements import Measures
from radixkv.models.probe import Findings, Recorder, examine, probe_ids, run_model, self_test
from radixkv.models.quantized import makes_views, quantized_kinds, quiet
from radixkv.models.support import check_model, refuse
from radixkv.models.weight_watch import inference_places, make_normal, plain_tensors

# Where the probe of `is_batch_invariant` is cut into steps. Each step reads all weights: they are
# few, of 14, 1, 3 and 27 tokens, so that every remainder of a tile's rows occurs.
_PROBE_CUTS = (14, 15, 18, 45)
_K_TOKENS = 128  # of the run that measures K
_K_POSITIONS = 2048  # over which it spreads them: what RoPE turns has no mean worth taking off
_TRIES = 8  # of a step while another thread calls train() or switches adapters
_OUTLIER_GAIN = 2.0  # how much larger K's error may be for want of a rotation, unsaid


def _places_of(model: torch.nn.Module) -> list[tuple[int, ...]]:
    """Where each weight lies."""
    return [
        (id(weight), *(one.data_ptr() for one in plain_tensors(weight)))
        for weight in model.parameters()
    ]


class _Paged(AttentionHandler):
    """The attention of one forward pass, served from a cache's pages.

    Attributes:
        num_served: layers that it has attended.
        is_watched: whether somebody looks at what the last layer gives.
    """

    def __init__(
        self,
        rules: dict[int, ScoreRule],
        windows: Mapping[int, int | None],
        batch: Batch,
        cache: PrefixCache,
        centers: Sequence[Tensor] | None,
    ) -> None:
        self._rules, self._cache, self._centers = rules, cache, centers
        self._windows = windows
        self._plan, self._logit_rows = batch.plan, batch.logit_rows
        self.num_served = 0
        self._served = 0  # a bit for each layer
        self.is_watched = False

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keywords: Mapping[str, Any],
    ) -> Tensor:
        layer_idx: int = module.layer_idx  # type: ignore[assignment]
        rule, center = self._rule(layer_idx, query.shape[3], keywords), self._center(layer_idx)
        pages = self._cache.layer(layer_idx)
        q, k, v = (rows.select(0, 0).transpose(0, 1) for rows in (query, key, value))
        self._plan.write(pages, k, v, layer_idx=layer_idx, k_center=center)
        self._note(layer_idx)
        return self._plan.attend(pages, q, rule)[None]

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Served | None:
        run, storage, head_dim = self._plan.prepare(q, k, v, out), self._cache.storage, q.shape[2]
        if run is None:
            return None

        def serve(
            module: torch.nn.Module, keywords: Mapping[str, Any], more: Mapping[str, Any]
        ) -> None:
            layer_idx: int = module.layer_idx  # type: ignore[assignment]
            rule = self._rule(layer_idx, head_dim, keywords, more)
            run(storage.layer(layer_idx), layer_idx, self._center(layer_idx), rule)
            self._note(layer_idx)

        return serve

    def _note(self, layer_idx: int) -> None:
        self.num_served += 1
        self._served |= 1 << layer_idx

    def check_served(self, model: torch.nn.Module) -> None:
        """Raise unless each layer attended over its own pages, once."""
        num_layers = self._cache.spec.num_layers
        if self._served != (1 << num_layers) - 1 or self.num_served != num_layers:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected {num_layers} layers that each attend once over "
                f"their own pages, got {self.num_served} calls of "
                f"{self._served.bit_count()} layers; were its layers or its attention changed "
                f"since the engine was made? Put back what was there, or make the engine again"
            )

    def wanted(self, module: torch.nn.Module) -> Tensor | None:
        """Of the last layer the rows that logits are made of; see `AttentionHandler.wanted`."""
        is_last = self.num_served == self._cache.spec.num_layers
        return self._logit_rows if is_last and not self.is_watched else None

    def _center(self, layer_idx: int) -> Tensor | None:
        return None if self._centers is None else self._centers[layer_idx]

    def _rule(
        self,
        layer_idx: int,
        head_dim: int,
        keywords: Mapping[str, Any],
        more: Mapping[str, Any] = {},
    ) -> ScoreRule:
        rule = self._rules.get(layer_idx)
        if rule is None:
            rule = score_rule({**keywords, **more}, head_dim)
            rule = replace(rule, sliding_window=self._windows[layer_idx])  # as the masks have it
            self._rules[layer_idx] = rule
        return rule


def _end(let_go: Callable[[], None], model: weakref.ref[Any], owners: set[tuple[int, str]]) -> None:
    """Give a model back."""
    let_go()
    owner = model()
    if owner is not None:
        make_normal(owner, owners)


class ModelRunner:
    """Runs batches of a model on a cache's pages.

    Made by `ModelRunner.load`, which refuses what cannot be served rightly.
    """

    def __init__(self, model: Any, spec: KVSpec) -> None:
        self.model = model
        self.spec = spec
        self.device: torch.device = next(model.parameters()).device
        self.release: Callable[[], Any] = lambda: None
        self._held: Hold
        self._has_views = makes_views(model)
        self._owners: set[tuple[int, str]] = set()  # inference tensors that are not of our passes
        self._num_readable = self._count_readable()
        self.max_positions: int | None = None
        self._windows: dict[int, int | None] = {}
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._rules: dict[int, ScoreRule] = {}
        # Not the default before it has been measured on a GPU.
        wanted = self.device.type == "cuda" and os.environ.get("RADIXKV_CUDA_GRAPHS") == "1"
        self._capture: Capture | None = None
        if wanted:
            self._capture = partial(capture_cuda, pool=torch.cuda.graph_pool_handle())
        self._graphs: tuple[PrefixCache, DecodeGraphs] | None = None

    @classmethod
    def load(cls, model: Any) -> ModelRunner:
        """Make ``model`` attend over pages, after testing that this gives its own logits.

        ``model`` is put in eval mode and its attention implementation is set; outside of
        an engine's steps it computes what it did. `release` and a refusal put both back.

        Raises:
            UnsupportedModelError: names what of the model's attention cannot be served.
        """
        model = uncompiled(model)
        check_model(model)
        runner, findings = cls._serve(model)
        in_bits = runner.device.type == "cpu" and runner.spec.dtype == torch.float32
        try:
            with quiet(has_views=runner._has_views), runner._held.as_written():
                # Elsewhere naming the weights would take longer than a twin's run.
                measures = (lambda: runner._measures) if in_bits else None
                try_borders(runner, findings, cls._serve, measures)
        except BaseException:
            runner.release()
            raise
        return runner

    @classmethod
    def _serve(cls, model: Any) -> tuple[ModelRunner, Findings]:
        """A runner whose logits of a few tokens are the model's own."""
        held, let_go = hold(model, lambda: active.handler, register)
        device = next(model.parameters()).device
        token_ids = probe_ids(model, SELF_TEST_TOKENS)
        weights, owners = _places_of(model), inference_places(model)
        with quiet(has_views=makes_views(model)):
            try:
                with held.as_written():
                    expected = run_model(model, torch.tensor([token_ids], device=device))
                can_set = getattr(model, "_can_set_attn_implementation", None)
                if can_set is not None and not can_set():
                    raise refuse(
                        model, "its attention cannot be replaced", "this engine cannot serve it"
                    )
                with held.step():
                    findings = examine(model)
                if _places_of(model) != weights:
                    raise refuse(
                        model,
                        "puts other weights in the place of its own whenever it runs",
                        "this engine could not tell when they were changed",
                    )
                runner = cls(model, findings.spec)
                runner.max_positions, runner._windows = findings.max_positions, findings.windows
                runner._held, runner._owners = held, owners
                # Called by `release`, or when the runner is dropped without it.
                runner.release = weakref.finalize(runner, _end, let_go, weakref.ref(model), owners)
                self_test(runner, token_ids, expected)
            except BaseException as error:
                _end(let_go, weakref.ref(model), owners)
                kinds = ", ".join(quantized_kinds(model))
                if kinds and isinstance(error, Exception):
                    raise refuse(
                        model,
                        f"is quantized ({kinds}), in a way that fails here or depends on what "
                        f"else is in a batch: {error}",
                        "quantize weights alone, or load it without quantization",
                    ) from error
                raise
        return runner, findings

    def is_batch_invariant(self, kv: KVConfig, backend: str) -> bool:
        """Whether a token's logits are bit for bit the same in any batch and chunk; measured.

        A sequence is run in one chunk, and again in pieces down to one token, beside another that
        decodes.
        """
        if self.device.type != "cpu" or self.spec.dtype != torch.float32:
            return False  # products of a library, whose order follows the number of rows
        name = f"invariant: {replace(kv, capacity=None)!r} {backend}"
        known = self._measures.get(name)
        if known is None:
            known = b"yes" if self._measure_invariance(kv, backend) else b"no"
            self._measures.put(name, known)
        return known == b"yes"

    @property
    def vocab_size(self) -> int:
        """Tokens that the model has logits for, as it is now."""
        head = self.model.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor):  # a quantizer's may be a method
            return int(weight.shape[0])
        return int(head.out_features)

    def _count_readable(self) -> int | None:
        """Ids that the model can read, if these are fewer than it has logits for."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        if not isinstance(weight, Tensor) or weight.shape[0] >= self.vocab_size:
            return None
        return int(weight.shape[0])

    @cached_property
    def _measures(self) -> Measures:
        """What was measured of this model before; of changed weights, nothing."""
        return Measures.of(self.model)

    def _measure_invariance(self, kv: KVConfig, backend: str) -> bool:
        num_tokens = min(_PROBE_CUTS[-1], self.max_positions or _PROBE_CUTS[-1])
        token_ids = [(7 + 13 * i) % self.vocab_size for i in range(num_tokens)]
        pages = 4 * -(-num_tokens // kv.page_size)
        capacity = (pages + 1) * KVCodec(self.spec, kv).bytes_per_page
        cache = PrefixCache(
            self.spec, replace(kv, capacity=capacity), device=self.device, backend=backend
        )
        with cache.acquire(token_ids) as lease:
            whole = Run(lease, token_ids, 0, num_tokens, 0, 0)
            expected = self.forward(build_batch([whole], self.device), cache)
        others = token_ids[: -len(_PROBE_CUTS) - 1 : -1]
        with cache.acquire(token_ids) as lease, cache.acquire(others) as other:
            cuts = sorted({min(cut, num_tokens) for cut in (0, *_PROBE_CUTS)})
            for step, (start, stop) in enumerate(pairwise(cuts)):
                runs = [
                    Run(other, others[step : step + 1], step, step + 1, 0, step + 1),
                    Run(lease, token_ids[start:stop], start, stop, 0, start),
                ]
                got = self.forward(build_batch(runs, self.device), cache)
                if not torch.equal(got, expected[start:stop]):
                    return False
        return True

    @cached_property
    def _k_sample(self) -> tuple[Tensor, list[bool]]:
        """K of a fixed run, [num_layers, num_kv_heads, num_tokens, head_dim]; whether it may move.

        It may not where a soft cap or sinks would feel a constant added to all scores.
        """
        limit = min(_K_POSITIONS, self.max_positions or _K_POSITIONS)
        num_tokens = min(_K_TOKENS, limit)
        places = torch.arange(num_tokens, device=self.device)
        recorder = Recorder(self._windows)
        keywords: dict[str, Any] = {"position_ids": (places * (limit // num_tokens))[None]}
        if self._keeps_logits:
            keywords["logits_to_keep"] = 1
        with quiet(has_views=self._has_views), self._held.step(), attending(recorder):
            ids = (7 + 13 * places) % self.model.config.get_text_config().vocab_size
            self.model(input_ids=ids[None], use_cache=False, **keywords)
        layers = range(self.spec.num_layers)
        rules = [score_rule(recorder.seen[i].keywords, self.spec.head_dim) for i in layers]
        k = torch.stack([recorder.keys[i] for i in layers])
        return k, [rule.softcap is None and rule.sinks is None for rule in rules]

    @cached_property
    def k_center(self) -> Tensor:
        """K's mean, which quantized pages store K without: [num_layers, num_kv_heads, head_dim].

        A constant taken off every key moves all scores of a query alike, which softmax does not
        feel; what is left is smaller, and so are its quantization steps. Measured once on fixed
        tokens; zero where it would be felt. float32. Pages written with one are only right
        with the same: what keeps them must keep it (`radixkv.attention.layout.KVCodec.centers_k`).
        """
        if self.device.type != "cpu":
            return self._mean_of_k()
        known = self._measures.get("k_center")
        if known is None:
            known = self._mean_of_k().numpy().tobytes()
            self._measures.put("k_center", known)
        shape = (self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim)
        return torch.frombuffer(bytearray(known), dtype=torch.float32).view(shape)

    def _mean_of_k(self) -> Tensor:
        k, may_move = self._k_sample
        finite = k.isfinite().all(dim=-1, keepdim=True)
        count = finite.sum(dim=2).clamp_min(1)
        center = k.where(finite, k.new_zeros(())).sum(dim=2) / count
        return center * torch.tensor(may_move, device=self.device)[:, None, None]

    def warn_of_outliers(self, kv: KVConfig) -> None:
        """Warn where ``kv`` stores K unrotated and its error would be far smaller rotated.

        The error is measured: root mean square over a layer's sample of K, as it would be
        stored; of the layer where rotation gains most.
        """
        codec = KVCodec(self.spec, kv)
        if codec.rotate_k or codec.k_format.name == "model":
            return
        form, (k, _) = codec.k_format, self._k_sample
        k = (k - self.k_center[:, :, None]).nan_to_num(0.0, 0.0, 0.0)

        def error(rows: Tensor) -> Tensor:
            off = form.dequantize(*form.quantize(rows)) - rows
            return off.square().mean(dim=(1, 2, 3)).sqrt()

        rotated = error(rotate_rows(k)).clamp_min(torch.finfo(torch.float32).tiny)
        gain, layer_idx = (error(k) / rotated).max(dim=0)
        if gain > _OUTLIER_GAIN:
            ratio = k.abs().amax(dim=-1) / k.square().mean(dim=-1).sqrt().clamp_min(1e-30)
            warnings.warn(
                f'KVConfig.rotate: K of layer {int(layer_idx)} has outliers ("{form.name}" rows '
                f"reach {ratio[layer_idx].mean():.1f} times their root mean square): without "
                f"rotation its error is {gain:.1f} times as large as with it; use "
                f'rotate="auto", and see radixkv quality',
                stacklevel=3,
            )

    def look(self) -> None:
        """See anew whether layers are what they were: they may have been changed."""
        self._held.look()

    def settle(self) -> None:
        """Turn what passes have left in the model into tensors that can be trained with."""
        make_normal(self.model, self._owners)

    def rest(self) -> None:
        """Let go of weights that were replaced; nothing runs for now."""
        self._held.rest()

    def check(self) -> None:
        """See that the model, whose layers were replaced or changed their type, is served rightly.

        Raises:
            UnsupportedModelError: it is not; it may be again, once they are put back.
        """
        fresh = ModelRunner.load(self.model)
        try:
            for name in ("spec", "device"):
                now, before = getattr(fresh, name), getattr(self, name)
                if now != before:
                    raise refuse(
                        self.model,
                        f"was changed: expected {name} {before!r}, as when this engine was made, "
                        f"got {now!r}",
                        "put back what was there, or make the engine again",
                    )
        finally:
            fresh.release()

    def probe(self) -> None:
        """Run the model as a step does, for what that leaves in it; nothing is written."""
        with quiet(has_views=self._has_views), self._held.step(), attending(Recorder()):
            input_ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
            self.model(input_ids=input_ids, use_cache=False)

    def forget(self) -> None:
        """See the model anew, and ask its attention what it wants: it was changed."""
        self._held.find()
        self._has_views = makes_views(self.model)
        self._num_readable = self._count_readable()
        self._rules.clear()
        self._graphs = None  # they hold the addresses of the old ones
        self._measures = Measures()
        for name in ("_k_sample", "k_center"):
            self.__dict__.pop(name, None)

    def stored_with(self, codec: KVCodec) -> bytes:
        """What of this runner's own measures pages of ``codec`` depend on."""
        return self.k_center.cpu().numpy().tobytes() if codec.centers_k else b""

    def _is_watched(self) -> bool:
        """Whether hooks would see what the last layer gives."""
        base = getattr(self.model, "base_model", self.model)
        around = (self.model, base, *base.children())
        return any(module._forward_hooks or module._forward_pre_hooks for module in around)

    def forward(self, batch: Batch, cache: PrefixCache) -> Tensor:
        """Run ``batch``: write its tokens' KV into ``cache`` and return the wanted logits.

        Returns:
            [num_logits, vocab_size] float32, in the order of ``batch.logit_rows``.
        Raises:
            NonFiniteError: NaN or Inf in K, V (names layer and head) or in the logits.
        """
        codec, backend = cache.codec, cache.backend
        if self._num_readable is not None and int(batch.input_ids.max()) >= self._num_readable:
            raise ValueError(
                f"token_ids: expected ids below the {self._num_readable} of the model's input "
                f"embeddings, got {int(batch.input_ids.max())}; it has logits for "
                f"{self.vocab_size}: resize both"
            )
        centers = self.k_center.unbind() if codec.centers_k else None

        def compute(batch: Batch) -> Tensor:
            keywords: dict[str, Any] = {"position_ids": batch.positions, "use_cache": False}
            if self._keeps_logits:
                keywords["logits_to_keep"] = batch.logit_rows
            for _ in range(_TRIES):
                paged = _Paged(self._rules, self._windows, batch, cache, centers)
                paged.is_watched = self._is_watched()
                try:
                    with (
                        quiet(has_views=self._has_views),
                        self._held.step() as step,
                        attending(paged),
                    ):
                        logits: Tensor = self.model(input_ids=batch.input_ids, **keywords).logits[0]
                        if step.is_calm:
                            break
                finally:
                    paged.fused_pass = None  # which leads back to it
            else:
                raise RadixKVError(
                    f"{type(self.model).__name__}: expected a model whose modes and adapters stay "
                    f"for a step, got others from another thread in each of {_TRIES}; train it, or "
                    f"switch its adapters, between requests"
                )
            paged.check_served(self.model)
            return logits if self._keeps_logits else logits[batch.logit_rows]

        # Shared runs are another for every batch; a graph would read them sequence by sequence.
        reads_runs = batch.attention.runs and codec.config.shared_prefix == "always"
        try:
            if (
                self._capture is None
                or backend.name != "triton"
                or reads_runs
                or not is_decode(batch)
            ):
                logits = compute(batch)
            else:
                if self._graphs is None or self._graphs[0] is not cache:
                    self._graphs = cache, DecodeGraphs(compute, self._capture)
                with torch.inference_mode():
                    logits = self._graphs[1].run(batch)
        except BaseException:
            with suppress(Exception):  # what this step noted is not the next one's fault
                backend.settle()
            raise
        logits = logits.float()
        backend.settle()  # waits for the GPU, as what follows does
        # A row's largest is NaN or +inf if any is; -inf only if all are (some may be barred).
        if logits.shape[0] and not bool(logits.amax(dim=-1).isfinite().all()):
            raise NonFiniteError(
                "logits: expected finite numbers or -inf, got NaN, +inf or nothing but -inf; "
                "check the model's weights and dtype (float16 overflows above 65504: try "
                "bfloat16 or float32)"
            )
        return logits
