"""A transformers model, run on pages: what its attention asks for is read, checked and served.

The model keeps its own code. An attention function registered with transformers under the
name ``radixkv_<native>`` serves the calls that are made inside `attending`, on that thread;
any other call of the model goes on to its native attention, so the model stays usable.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from radixkv.batch import Batch, Run, build_batch
from radixkv.cache import PrefixCache
from radixkv.config import KVConfig
from radixkv.errors import NonFiniteError, UnsupportedModelError
from radixkv.graphs import Capture, DecodeGraphs, capture_cuda, is_decode
from radixkv.layers import steady
from radixkv.measures import Measures
from radixkv.quant import KVCodec, KVSpec
from radixkv.reference import ScoreRule, attend_dense, rotate_rows

_PROBE_TOKENS = 12  # of the self test; windows up to this length less one are exercised by it
# Where the probe of `is_batch_invariant` is cut into steps. Each step reads all weights: they are
# few, of 14, 1, 3 and 27 tokens, so that every remainder of a tile's rows occurs.
_PROBE_CUTS = (14, 15, 18, 45)
_K_TOKENS = 128  # of the run that measures K
_K_POSITIONS = 2048  # over which it spreads them: what RoPE turns has no mean worth taking off
_OUTLIER_GAIN = 2.0  # how much larger K's error may be for want of a rotation, unsaid
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
# Keywords that reach attention functions and do not change what a causal layer computes.
_HARMLESS = {
    "attention_mask",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "is_causal",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


class AttentionHandler(Protocol):
    """Serves one layer's attention inside `attending`; shapes as transformers gives them."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,  # [1, num_q_heads, num_tokens, head_dim]
        key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        value: Tensor,  # [1, num_kv_heads, num_tokens, v_head_dim]
        keywords: Mapping[str, Any],
    ) -> Tensor: ...  # [1, num_tokens, num_q_heads, v_head_dim]


class _Active(threading.local):
    handler: AttentionHandler | None = None


_active = _Active()


@contextmanager
def attending(handler: AttentionHandler) -> Iterator[None]:
    """Within this block, on this thread, ``handler`` computes every layer's attention."""
    _active.handler = handler
    try:
        yield
    finally:
        _active.handler = None


def _native_attention(module: torch.nn.Module, native: str) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if native == "eager":
        # Eager attention lives in each model's own file, under one name.
        home: Any = sys.modules[type(module).__module__]
        return home.eager_attention_forward  # type: ignore[no-any-return]
    return ALL_ATTENTION_FUNCTIONS[native]  # type: ignore[no-any-return]


def _register(native: str) -> str:
    """Register our attention, falling back to ``native`` outside `attending`; gives its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        handler = _active.handler
        if handler is None:
            run = _native_attention(module, native)
            return run(module, query, key, value, attention_mask, **keywords)  # type: ignore[no-any-return]
        return handler(module, query, key, value, keywords), None

    def mask(*args: Any, **keywords: Any) -> Any:
        if _active.handler is not None:
            return None
        return ALL_MASK_ATTENTION_FUNCTIONS[native](*args, **keywords)

    name = f"radixkv_{native}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


class _Held:
    """What a model was before the first engine on it: attention and training modes."""

    def __init__(self, model: Any) -> None:
        self.attention: str = model.config._attn_implementation
        self.modes = [(weakref.ref(m), m.training) for m in model.modules()]
        self.holders = 0

    def restore(self, model: Any) -> None:
        if model.config._attn_implementation != self.attention:
            model.set_attn_implementation(self.attention)
        for reference, training in self.modes:
            module = reference()
            if module is not None:
                module.training = training


_held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()
_held_lock = threading.RLock()  # reentrant: a dropped engine may be collected while one is made


def _hold(model: Any) -> Callable[[], None]:
    """Note what ``model`` is; the function that comes back makes it so again.

    Of several engines on one model the last that ends does it.
    """
    with _held_lock:
        held = _held.get(model)
        if held is None:
            held = _held[model] = _Held(model)
        held.holders += 1
    released = False
    reference = weakref.ref(model)

    def release() -> None:
        nonlocal released
        with _held_lock:
            if released:
                return
            released = True
            held.holders -= 1
            owner = reference()
            if not held.holders and owner is not None:
                _held.pop(owner, None)
                held.restore(owner)

    return release


@dataclass
class _Seen:
    """What one layer's attention was called with."""

    num_q_heads: int
    spec: tuple[int, int, int, torch.dtype]  # num_kv_heads, head_dim, v_head_dim, dtype
    keywords: dict[str, Any]
    is_causal: bool


@dataclass
class _Recorder:
    """Notes each attention call, and answers it with plain dense attention."""

    seen: dict[int, _Seen] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)  # [num_kv_heads, num_tokens, head_dim]

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keywords: Mapping[str, Any],
    ) -> Tensor:
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or layer_idx in self.seen:
            raise UnsupportedModelError(
                f"{type(module).__name__}: expected attention modules that are each called once "
                f"and know their layer_idx, got {layer_idx!r}; this engine cannot tell which "
                f"pages are theirs"
            )
        spec = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
        is_causal = keywords.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        self.seen[layer_idx] = _Seen(query.shape[1], spec, dict(keywords), bool(is_causal))
        self.keys[layer_idx] = key[0].float()
        rule = score_rule(keywords, query.shape[3])
        out = attend_dense(query[0].float(), key[0].float(), value[0].float(), rule)
        return out.transpose(0, 1)[None].to(query.dtype)


def score_rule(keywords: Mapping[str, Any], head_dim: int) -> ScoreRule:
    """What transformers' attention keywords ask for, as a `ScoreRule`.

    Raises:
        UnsupportedModelError: what no rule can be.
    """
    scaling = keywords.get("scaling")
    sinks = keywords.get("s_aux")
    try:
        return ScoreRule(
            softmax_scale=head_dim**-0.5 if scaling is None else float(scaling),
            sliding_window=keywords.get("sliding_window"),
            softcap=keywords.get("softcap"),
            sinks=None if sinks is None else sinks.detach(),
        )
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"attention: a layer asks for what no score rule is ({error}); mend its config"
        ) from error


def _refuse(model: torch.nn.Module, what: str, mend: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__}: {what}; {mend}")


def _check_config(model: Any) -> None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(model, "is an encoder-decoder model", "use a decoder-only causal LM")
    text_config = config.get_text_config()
    types = set(getattr(text_config, "layer_types", None) or ())
    if types - _LAYER_TYPES:
        raise _refuse(
            model,
            f"has layers of type {', '.join(sorted(types - _LAYER_TYPES))}, "
            f"which keep a state that is not KV pages",
            f"layers must be of {', '.join(sorted(_LAYER_TYPES))}",
        )
    if getattr(text_config, "alibi", False) or text_config.model_type in ("bloom", "mpt"):
        raise _refuse(
            model, "uses ALiBi, whose bias transformers builds into a mask", "use a RoPE model"
        )


def _check_seen(model: Any, seen: Mapping[int, _Seen]) -> None:
    if not seen:
        raise _refuse(
            model,
            "its attention does not go through transformers' AttentionInterface",
            "this engine cannot serve it",
        )
    if sorted(seen) != list(range(len(seen))):
        raise _refuse(model, f"attention layers are {sorted(seen)}", "expected 0, 1, 2, ...")
    specs = {layer.spec for layer in seen.values()}
    if len(specs) > 1:
        raise _refuse(
            model,
            f"its layers differ in (KV heads, head_dim, v_head_dim, dtype): "
            f"{', '.join(sorted(map(str, specs)))}",
            "one page layout must fit all layers",
        )
    known = {"scaling", "sliding_window", "softcap", "s_aux"} | _HARMLESS
    for layer_idx, layer in sorted(seen.items()):
        unknown = [k for k, v in layer.keywords.items() if k not in known and v is not None]
        if unknown:
            raise _refuse(
                model,
                f"layer {layer_idx} asks its attention for {', '.join(sorted(unknown))}",
                "this engine does not know these",
            )
        if not layer.is_causal:
            raise _refuse(model, f"layer {layer_idx} is not causal", "use a causal LM")
        if layer.num_q_heads % layer.spec[0]:
            raise _refuse(
                model,
                f"layer {layer_idx} has {layer.num_q_heads} query heads over "
                f"{layer.spec[0]} KV heads",
                "the first must be a multiple of the second",
            )
    text_config = model.config.get_text_config()
    for layer_idx, layer_type in enumerate(getattr(text_config, "layer_types", None) or ()):
        told = layer_idx in seen and seen[layer_idx].keywords.get("sliding_window")
        if layer_type == "sliding_attention" and not told:
            raise _refuse(
                model,
                f"layer {layer_idx} is of type {layer_type}, but its attention is not told its "
                f"sliding_window",
                "this engine would attend to too much",
            )
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    if softcap and any(not layer.keywords.get("softcap") for layer in seen.values()):
        raise _refuse(
            model, f"attn_logit_softcapping={softcap} does not reach its attention", "cannot serve"
        )


def max_positions(model: Any) -> int | None:
    """Positions that the model has; None if its config names no limit.

    RoPE variants whose factors depend on the longest sequence of a batch are served only
    below the length at which they start to, where they are constant: elsewhere a sequence's
    result would depend on its neighbours.
    """
    text_config = model.config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limit = (
            rope.get("original_max_position_embeddings")
            or getattr(text_config, "original_max_position_embeddings", None)
            or limit
        )
    return limit


class _Paged:
    """The attention of one forward pass, served from a cache's pages.

    Attributes:
        num_served: layers that it has attended.
        is_watched: whether somebody looks at what the last layer gives.
        relay: what `radixkv.layers` passes from layer to layer.
    """

    def __init__(
        self,
        rules: dict[int, ScoreRule],
        batch: Batch,
        cache: PrefixCache,
        centers: Sequence[Tensor] | None,
    ) -> None:
        self._rules, self._cache, self._centers = rules, cache, centers
        self._batch, self._logit_rows = batch.attention, batch.logit_rows
        self.num_served = 0
        self.is_watched = False
        self.relay: Any = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keywords: Mapping[str, Any],
    ) -> Tensor:
        codec, backend, batch = self._cache.codec, self._cache.backend, self._batch
        layer_idx: int = module.layer_idx  # type: ignore[assignment]
        rule, center = self._rule(layer_idx, query.shape[3], keywords), self._center(layer_idx)
        pages = self._cache.layer(layer_idx)
        q, k, v = (rows.select(0, 0).transpose(0, 1) for rows in (query, key, value))
        backend.write_kv(
            codec, pages, batch.slot_mapping, k, v, layer_idx=layer_idx, k_center=center
        )
        self.num_served += 1
        return backend.paged_attention(codec, pages, q, batch, rule)[None]

    def prepare(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> Callable[[torch.nn.Module, Mapping[str, Any], Mapping[str, Any]], None] | None:
        """The same for layers whose rows lie in the same memory; see `radixkv.layers.Handler`."""
        cache = self._cache
        if cache.backend.prepare is None:
            return None
        run, head_dim = cache.backend.prepare(cache.codec, self._batch, q, k, v, out), q.shape[2]
        if run is None:
            return None

        def serve(
            module: torch.nn.Module, keywords: Mapping[str, Any], more: Mapping[str, Any]
        ) -> None:
            layer_idx: int = module.layer_idx  # type: ignore[assignment]
            rule = self._rule(layer_idx, head_dim, keywords, more)
            run(cache.storage.layer(layer_idx), layer_idx, self._center(layer_idx), rule)
            self.num_served += 1

        return serve

    def wanted(self, module: torch.nn.Module) -> Tensor | None:
        """The rows of a layer that are read: of the last layer those that logits are made of."""
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
            rule = self._rules[layer_idx] = score_rule({**keywords, **more}, head_dim)
        return rule


class ModelRunner:
    """Runs batches of a model on a cache's pages.

    Made by `ModelRunner.load`, which refuses what cannot be served rightly.
    """

    def __init__(self, model: Any, spec: KVSpec) -> None:
        self.model = model
        self.spec = spec
        self.device: torch.device = next(model.parameters()).device
        head = model.get_output_embeddings()
        self.vocab_size: int = getattr(head, "out_features", None) or head.weight.shape[0]
        self.release: Callable[[], Any] = lambda: None
        self.look: Callable[[], None] = lambda: None  # after this, changed layers are noticed
        self.max_positions = max_positions(model)
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
        if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
            raise TypeError(
                f"model: expected a transformers causal LM, got {type(model).__name__}; load one "
                f"with AutoModelForCausalLM.from_pretrained, or use Engine.from_pretrained"
            )
        _check_config(model)
        let_go = _hold(model)
        native = model.config._attn_implementation.removeprefix("radixkv_")
        if native not in ("sdpa", "eager"):
            native = "sdpa"
        device = next(model.parameters()).device
        vocab_size = model.config.get_text_config().vocab_size
        token_ids = [(7 + 13 * i) % vocab_size for i in range(_PROBE_TOKENS)]
        input_ids = torch.tensor([token_ids], device=device)
        recorder = _Recorder()
        runner = None
        with torch.inference_mode():
            try:
                model.eval()
                expected = model(input_ids=input_ids, use_cache=False).logits[0].float()
                name = _register(native)
                model.set_attn_implementation(name)
                if model.config._attn_implementation != name:
                    raise _refuse(
                        model, "its attention cannot be replaced", "this engine cannot serve it"
                    )
                with attending(recorder):  # what it asks for is the same for any number of tokens
                    model(input_ids=input_ids[:, :2], use_cache=False)
                _check_seen(model, recorder.seen)
                num_kv_heads, head_dim, v_head_dim, dtype = recorder.seen[0].spec
                runner = cls(
                    model,
                    KVSpec(
                        num_layers=len(recorder.seen),
                        num_kv_heads=num_kv_heads,
                        head_dim=head_dim,
                        v_head_dim=v_head_dim,
                        dtype=dtype,
                    ),
                )
                held, unpack = steady(model, lambda: _active.handler)
                runner.look = held.look

                def release() -> None:
                    unpack()
                    let_go()

                # Called by `release`, or when the runner is dropped without it.
                runner.release = weakref.finalize(runner, release)
                runner._self_test(token_ids, expected)
            except BaseException:
                if runner is not None:
                    runner.release()
                let_go()
                raise
        return runner

    def _self_test(self, token_ids: list[int], expected: Tensor) -> None:
        # Two steps over unquantized pages, a second sequence that decodes beside: positions, masks
        # and page reads must all be right for this to give the model's own logits.
        config = KVConfig(dtype="model", page_size=4)
        capacity = 4 * len(token_ids) * KVCodec(self.spec, config).bytes_per_token
        cache = PrefixCache(
            self.spec, replace(config, capacity=capacity), device=self.device, backend="torch"
        )
        half, others = len(token_ids) // 2, token_ids[:-3:-1]
        with cache.acquire(token_ids) as lease, cache.acquire(others) as other:
            parts = []
            for step, (start, stop) in enumerate(((0, half), (half, len(token_ids)))):
                runs = [
                    Run(other, others[step : step + 1], step, step + 1, 0, step + 1),
                    Run(lease, token_ids[start:stop], start, stop, 0, 0),
                ]
                parts.append(self.forward(build_batch(runs, self.device), cache))
            got = torch.cat(parts)
        spread = (expected.max() - expected.min()).clamp_min(1e-6)
        error = float((got - expected).abs().max() / spread)
        limit = 1e-4 if self.spec.dtype == torch.float32 else 5e-2
        if not error <= limit:
            raise _refuse(
                self.model,
                f"its logits over pages differ from its own by {error:.2g} of their range "
                f"(limit {limit:g})",
                "something in its attention or positions is not served rightly",
            )

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
        recorder = _Recorder()
        keywords: dict[str, Any] = {"position_ids": (places * (limit // num_tokens))[None]}
        if self._keeps_logits:
            keywords["logits_to_keep"] = 1
        with torch.inference_mode(), attending(recorder):
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
        with the same: what keeps them must keep it (`radixkv.quant.KVCodec.centers_k`).
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

    def forget(self) -> None:
        """Ask the model's attention anew what it wants: its weights were changed."""
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
        centers = self.k_center.unbind() if codec.centers_k else None

        def compute(batch: Batch) -> Tensor:
            paged = _Paged(self._rules, batch, cache, centers)
            paged.is_watched = self._is_watched()
            keywords: dict[str, Any] = {"position_ids": batch.positions, "use_cache": False}
            if self._keeps_logits:
                keywords["logits_to_keep"] = batch.logit_rows
            try:
                with torch.inference_mode(), attending(paged):
                    logits: Tensor = self.model(input_ids=batch.input_ids, **keywords).logits[0]
            finally:
                paged.relay = None  # which leads back to it
            if paged.num_served != self.spec.num_layers:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: {paged.num_served} of {self.spec.num_layers} "
                    f"layers attended over pages; was its attention implementation changed since "
                    f"the engine was made? Make the engine again"
                )
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
                backend.settle(codec)
            raise
        logits = logits.float()
        backend.settle(codec)  # waits for the GPU, as what follows does
        # A row's largest is NaN or +inf if any is; -inf only if all are (some may be barred).
        if logits.shape[0] and not bool(logits.amax(dim=-1).isfinite().all()):
            raise NonFiniteError(
                "logits: expected finite numbers or -inf, got NaN, +inf or nothing but -inf; "
                "check the model's weights and dtype (float16 overflows above 65504: try "
                "bfloat16 or float32)"
            )
        return logits
