"""A model is tried before it is served: what its attention asks for, whether its logits stay."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from radixkv.attention.layout import KVCodec, KVSpec
from radixkv.attention.reference import attend_dense
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KVConfig
from radixkv.errors import RadixKVError, UnsupportedModelError
from radixkv.models.attention_interface import AttentionHandler, attending, score_rule
from radixkv.models.batch import Batch, Run, build_batch
from radixkv.models.masks import FAR, MaskFunction, places_around
from radixkv.models.positions import PositionWatch, config_ints, named_limit
from radixkv.models.support import Seen, check_seen, refuse, windows_of

_FIRST, _LOOKED = 3, 5  # the place of the first token that is looked at, and how many are
_LIMIT, _HALF_LIMIT = 1e-4, 5e-2  # of the logits' range; in float32, and in narrower formats
_TRIES = 2
_NOISE_GAIN, _MOST_NOISE = 8, 2e-3  # of a model's own roundings; what a border moves is more


@dataclass
class Recorder(AttentionHandler):
    """Notes each attention call, and answers it with plain dense attention.

    Attributes:
        windows: of layers, where they are known; else as their attention is told.
        takes_masks: whether transformers is to build its masks, so that layers are seen with them.
    """

    windows: Mapping[int, int | None] = field(default_factory=dict)
    takes_masks: bool = False
    seen: dict[int, Seen] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)  # [num_kv_heads, num_tokens, head_dim]
    _modules: dict[int, torch.nn.Module] = field(default_factory=dict)
    _masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)

    def note_mask(self, make: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
        """The mask that transformers would build, whole, and what it is made of noted."""
        if not self.takes_masks:
            return None
        function = keywords.get("mask_function", causal)
        made = make(**{**keywords, "allow_is_causal_skip": False})
        if isinstance(made, Tensor) and keywords.get("attention_mask") is None:
            self._masks.append((made, function))
        return made

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keywords: Mapping[str, Any],
    ) -> Tensor:
        layer_idx = getattr(module, "layer_idx", None)
        name = type(module).__name__
        if not isinstance(layer_idx, int):
            raise UnsupportedModelError(
                f"{name}: expected attention modules that know their layer_idx, got {layer_idx!r}; "
                f"this engine cannot tell which pages are theirs"
            )
        if self._modules.get(layer_idx) is module:
            raise UnsupportedModelError(
                f"{name}: layer {layer_idx} calls its attention more than once in a forward pass "
                f"(layers run in a loop, or an attention in parts); a page holds one K and V of a "
                f"token and layer, so this engine cannot serve it"
            )
        if layer_idx in self._modules:
            raise UnsupportedModelError(
                f"{name}: two attention modules call themselves layer {layer_idx} (also "
                f"{type(self._modules[layer_idx]).__name__}: a second stack of layers, or "
                f"cross-attention); this engine cannot tell which pages are theirs"
            )
        if key.shape[2] != query.shape[2] or query.shape[0] != 1:
            raise UnsupportedModelError(
                f"{name}: layer {layer_idx} attends from {query.shape[2]} places of "
                f"{query.shape[0]} sequences to {key.shape[2]}, in a run of one sequence; expected "
                f"as many keys as tokens (cross-attention, learned keys and blocks are not served)"
            )
        spec = (key.shape[1], key.shape[3], value.shape[3], key.dtype)
        is_causal = keywords.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        seen = Seen(query.shape[1], spec, dict(keywords), bool(is_causal))
        given = keywords.get("attention_mask")
        if self.takes_masks and given is not None:
            seen.mask = next((f for mask, f in self._masks if _is_same(mask, given)), None)
            if seen.mask is None:
                seen.own_mask = _pattern(given)
        self.seen[layer_idx], self._modules[layer_idx] = seen, module
        self.keys[layer_idx] = key[0].float()
        rule = score_rule(keywords, query.shape[3])
        if layer_idx in self.windows:
            rule = replace(rule, sliding_window=self.windows[layer_idx])
        out = attend_dense(query[0].float(), key[0].float(), value[0].float(), rule)
        # As native attention lays it out: models may view it.
        return out.transpose(0, 1)[None].to(query.dtype).contiguous()


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Whether a query sees a key, by places: what transformers builds a causal mask from."""
    return key <= query


def _is_same(mask: Tensor, given: Any) -> bool:
    """Whether ``given`` is ``mask``, or a view that shows all of it."""
    return (
        isinstance(given, Tensor)
        and given.data_ptr() == mask.data_ptr()
        and given.shape[-2:] == mask.shape[-2:]
        and given.stride()[-2:] == mask.stride()[-2:]
        and given.dtype == mask.dtype
    )


def _pattern(mask: Any) -> str:
    """What a mask that the model made shows: "causal", "other", or "numbers" added to scores."""
    if not isinstance(mask, Tensor) or mask.dim() < 2:
        return "other"
    shown = mask
    if mask.dtype != torch.bool:
        low = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else -1
        if not bool(((mask == 0) | (mask <= low)).all()):
            return "numbers"
        shown = mask == 0
    rows, columns = shown.shape[-2:]
    expected = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril(columns - rows)
    return "causal" if bool((shown == expected).all()) else "other"


class Runner(Protocol):
    """What `radixkv.models.runner.ModelRunner` has that a trial needs."""

    model: Any
    spec: KVSpec
    device: torch.device
    max_positions: int | None

    def forward(self, batch: Batch, cache: PrefixCache) -> Tensor: ...


@dataclass(frozen=True)
class Findings:
    """What was found out about a model, as far as serving it needs.

    Attributes:
        windows: the sliding window of each layer, as its mask has it.
        max_positions: positions up to which it is served; None if nothing limits them.
        has_own_masks: whether some layer attends under a mask that the model itself made.
    """

    spec: KVSpec
    windows: dict[int, int | None]
    max_positions: int | None
    has_own_masks: bool


def examine(model: Any) -> Findings:
    """Run ``model``, whose attention is ours, over a few tokens, and read what it asks for.

    Raises:
        UnsupportedModelError: it asks for something that is not served.
    """
    device = next(model.parameters()).device
    named = named_limit(model)
    count = _LOOKED if named is None else max(2, min(_LOOKED, named - _FIRST))
    positions = torch.arange(_FIRST, _FIRST + count, device=device)[None]
    input_ids = torch.tensor([probe_ids(model, count)], device=device)
    recorder, watch = Recorder(takes_masks=True), PositionWatch(positions)
    keywords: dict[str, Any] = {"position_ids": positions}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keywords["logits_to_keep"] = 1  # nobody reads them
    with attending(recorder), watch.watching(model):
        run_model(model, input_ids, **keywords)
    check_seen(model, recorder.seen)
    borders = [*config_ints(model.config).values()]
    limits = [n for n in (named, watch.table_rows) if n is not None]
    limit = min(limits) if limits else None
    limit = watch.felt_from(limit, borders)
    places = places_around(borders, FAR if limit is None else limit)
    windows = windows_of(model, recorder.seen, places)
    num_kv_heads, head_dim, v_head_dim, dtype = recorder.seen[0].spec
    spec = KVSpec(
        num_layers=len(recorder.seen),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
    )
    has_own_masks = any(layer.own_mask for layer in recorder.seen.values())
    return Findings(spec, windows, limit, has_own_masks)


def probe_ids(model: Any, count: int, seed: int = 0) -> list[int]:
    """Token ids of a trial, the same at every load."""
    vocab_size = model.config.get_text_config().vocab_size
    return [(7 + 31 * seed + 13 * i) % vocab_size for i in range(count)]


def run_model(model: Any, input_ids: Tensor, **keywords: Any) -> Tensor:
    """Logits of ``model`` over ``input_ids`` alone. [num_tokens, vocab_size] float32.

    Raises:
        UnsupportedModelError: it does not run so, and why.
    """
    try:
        output = model(input_ids=input_ids, use_cache=False, **keywords)
    except (RadixKVError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        with_what = " and ".join(["input_ids", *keywords])
        raise refuse(
            model,
            f"its forward fails when it is called with {with_what} alone "
            f"({type(error).__name__}: {str(error).strip() or 'no message'})",
            "this engine gives a model nothing else",
        ) from error
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise refuse(
            model,
            "its forward gives no logits of each token",
            "use a causal LM of transformers",
        )
    return logits[0].float()


def _over_pages(
    runner: Runner, token_ids: Sequence[int], others: Sequence[int], cuts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Logits over unquantized pages of a sequence in chunks, beside another that decodes.

    Args:
        others: the other sequence; a token of it runs in each of the first chunks.
        cuts: where the chunks of ``token_ids`` end.
    Returns:
        Of each sequence, [num_tokens, vocab_size].
    """
    config = KVConfig(dtype="model", page_size=4)
    pages = -(-len(token_ids) // config.page_size) + -(-len(others) // config.page_size) + 2
    capacity = pages * KVCodec(runner.spec, config).bytes_per_page
    cache = PrefixCache(
        runner.spec, replace(config, capacity=capacity), device=runner.device, backend="torch"
    )
    parts: list[Tensor] = []
    others_parts: list[Tensor] = []
    with cache.acquire(token_ids) as lease, cache.acquire(others) as other:
        start = 0
        for step, stop in enumerate(cuts):
            runs = [Run(lease, list(token_ids[start:stop]), start, stop, 0, start)]
            if step < len(others):
                runs.insert(0, Run(other, list(others[step : step + 1]), step, step + 1, 0, step))
            logits = runner.forward(build_batch(runs, runner.device), cache)
            if step < len(others):
                others_parts.append(logits[:1])
            parts.append(logits[len(runs) - 1 :])
            start = stop
    return torch.cat(parts), torch.cat(others_parts)


def _off(got: Tensor, expected: Tensor) -> Tensor:
    """How far each row of logits is off, in parts of their range. [num_tokens]."""
    finite = expected.isfinite()
    shown = expected[finite]
    spread = (shown.max() - shown.min()).clamp_min(1e-6)
    off = (got - expected).where(finite, expected.new_zeros(())).abs().amax(dim=-1) / spread
    return off.nan_to_num(torch.inf)


def _first_wrong(
    got: Tensor, expected: Tensor, dtype: torch.dtype, limit: float | None = None
) -> tuple[int, float] | None:
    """The first row that is off by more than it may be, and by how much; None if all are right."""
    if limit is None:
        limit = _LIMIT if dtype == torch.float32 else _HALF_LIMIT
    off = _off(got, expected)
    wrong = (off > limit).nonzero()
    return (int(wrong[0]), float(off.max())) if len(wrong) else None


def self_test(runner: Runner, token_ids: list[int], expected: Tensor) -> None:
    """Compare a few tokens' logits over pages with ``expected``, the model's own.

    Two steps, a second sequence that decodes beside: positions, masks and page reads must all be
    right for this.
    """
    others = token_ids[:-3:-1]
    got, _ = _over_pages(runner, token_ids, others, (len(token_ids) // 2, len(token_ids)))
    wrong = _first_wrong(got, expected, runner.spec.dtype)
    if wrong is not None:
        raise refuse(
            runner.model,
            f"its logits over pages differ from its own by {wrong[1]:.2g} of their range, from "
            f"token {wrong[0]} on",
            _why(runner, token_ids, expected),
        )


def _why(runner: Runner, token_ids: list[int], expected: Tensor) -> str:
    """What is not served rightly, as far as the model's own forward tells it."""
    model = runner.model
    input_ids = torch.tensor([token_ids], device=runner.device)
    places = torch.arange(len(token_ids), device=runner.device)[None]
    counted = run_model(model, input_ids, position_ids=places)
    if _first_wrong(counted, expected, runner.spec.dtype) is not None:
        return (
            "it does not number its tokens 0, 1, 2, ...: with these position_ids its own logits "
            "are others than without, and this engine must give a step its position_ids"
        )
    if torch.equal(run_model(model, input_ids, position_ids=places.flip(-1)), counted):
        return (
            "it takes no heed of position_ids, but numbers each call's tokens by itself, so that "
            "a step cannot begin in the middle of a sequence"
        )
    return "something in its attention is not served rightly"


def try_past_borders(runner: Runner, num_tokens: int, names: Any = None) -> None:
    """Compare ``num_tokens`` tokens' logits over pages with the model's own, beside a short one.

    Args:
        names: config of the model that ``runner``'s is the twin of.
    Raises:
        UnsupportedModelError: they differ; it names the numbers of the config that lie there.
    """
    model, dtype = runner.model, runner.spec.dtype
    cuts = (num_tokens * 2 // 3, num_tokens - 3, num_tokens - 2, num_tokens - 1, num_tokens)
    wrong: tuple[int, float] | None = None
    for seed in range(_TRIES):  # experts may be chosen by the last bit: once is no proof
        token_ids = probe_ids(model, num_tokens, seed)
        others = token_ids[: -len(cuts) - 1 : -1]
        got, got_others = _over_pages(runner, token_ids, others, cuts)
        expected, expected_others = (_alone(runner, ids) for ids in (token_ids, others))
        wrong = _first_wrong(got, expected, dtype)
        wrong_others = _first_wrong(got_others, expected_others, dtype)
        if wrong is None and wrong_others is None:
            return
        # A model that magnifies roundings does so in its own forward too, of another length.
        half = _alone(runner, token_ids[: num_tokens // 2])
        noise = float(_off(half, expected[: num_tokens // 2]).max())
        limit = min(max(_LIMIT, _NOISE_GAIN * noise), _MOST_NOISE)
        wrong = _first_wrong(got, expected, dtype, limit)
        if wrong is None and _first_wrong(got_others, expected_others, dtype, limit) is None:
            return
    if wrong is None:
        raise refuse(
            model,
            f"beside a sequence of {num_tokens} tokens a short one gets other logits than alone",
            "something in it depends on the longest sequence of a batch",
        )
    first, off = wrong
    raise refuse(
        model,
        f"from token {first} of a sequence on its logits over pages differ from its own, by up to "
        f"{off:.2g} of their range{_named(model.config, first, names)}",
        "this engine serves causal attention over all tokens before, or a window of them",
    )


def _alone(runner: Runner, token_ids: list[int]) -> Tensor:
    return run_model(runner.model, torch.tensor([token_ids], device=runner.device))


def _named(config: Any, place: int, names: Any) -> str:
    """The numbers of the config at which token ``place`` is the first to lie beyond."""
    near = range(place - 1, place + 3)  # a step's rows may be counted with another sequence's
    found = {name: n for name, n in config_ints(config).items() if n in near}
    if not found:
        return ""
    if names is None:
        said = [f"{name}={n}" for name, n in found.items()]
    else:
        known = config_ints(names)
        said = [f"{name}={known.get(name)}, {n} in a small twin" for name, n in found.items()]
    return f" ({'; '.join(said)} may be why)"
