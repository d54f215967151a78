"""What a KV format costs in accuracy, measured on a model and a text through the pages themselves.

Every figure compares the model on pages of one format with the same model, in the same chunks,
on unquantized pages: what is left is the format alone. Both write and read real pages, as an
engine does; nothing is simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixkv import kv_formats
from radixkv.attention.layout import KVCodec
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import KV_DTYPES, ROTATIONS, KVConfig, KVDtype, require_choice, require_int
from radixkv.models.batch import Run, build_batch
from radixkv.models.runner import ModelRunner
from radixkv.tools.demo import hardware

# K's format, or K's and V's: those that quantize, widest first.
_BITS = {one.name: float(one.bits) for one in kv_formats.FORMATS.values() if one.bits}
_BITS["int8/int4"] = 6.0
FORMATS = tuple(sorted(_BITS, key=lambda name: -_BITS[name]))
# Logits of one chunk of tokens: the baseline's and one format's are all that is held at a time.
_CHUNK_LOGITS = 1 << 24
_CHUNK_TOKENS = 512
_ROWS = 64  # logits compared in float64 at a time
_MIN_CONTEXT = 16
_NUM_PROMPTS = 4
_PROMPT_TOKENS = 128
_GREEDY_TOKENS = 64
# Mean KL divergence and perplexity change up to which a format counts as lossless, and as good.
_LOSSLESS = (1e-3, 1e-3)
_GOOD = (2e-2, 1e-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatQuality:
    """One format's figures; those of "model" pages are 0 and 1 by definition.

    Attributes:
        kv_dtype: K's format, or "K's/V's".
        rotate: "hadamard" or "none".
        bytes_per_token: in all layers, scales included.
        perplexity: of the text.
        perplexity_change: relative to the baseline's.
        perplexity_change_stderr: its standard error over the tokens, taken as independent.
        kl_mean, kl_p99: KL divergence from the baseline's distribution, a token, in nats.
        top1_agreement: share of tokens where both have the same most likely next token.
        greedy_match: new tokens until the first that differs from the baseline's greedy
            continuation, mean over the prompts; at most `Quality.greedy_tokens`.
    """

    kv_dtype: str
    rotate: str
    bytes_per_token: int
    perplexity: float
    perplexity_change: float
    perplexity_change_stderr: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    greedy_match: float

    @property
    def config(self) -> str:
        """How to ask for it."""
        k_dtype, _, v_dtype = self.kv_dtype.partition("/")
        parts = [f'dtype="{k_dtype}"']
        if v_dtype:
            parts.append(f'v_dtype="{v_dtype}"')
        if self.rotate == "none" and k_dtype != "model":
            parts.append('rotate="none"')
        return f"KVConfig({', '.join(parts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What `measure_quality` found.

    Attributes:
        num_tokens: tokens whose prediction was measured.
        context: most tokens that one of them could see.
        greedy_prompts, greedy_tokens: greedy continuations and the length of each.
        model_dtype: the model's own, which the baseline's pages have.
        perplexity, bytes_per_token: of the baseline.
        formats: in the order asked for, without rotation first.
    """

    num_tokens: int
    context: int
    greedy_prompts: int
    greedy_tokens: int
    model_dtype: str
    perplexity: float
    bytes_per_token: int
    formats: list[FormatQuality]


@dataclass(slots=True)
class _Candidate:
    """One format while it is measured."""

    kv_dtype: str
    rotate: str
    cache: PrefixCache
    nlls: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    num_agreed: int = 0
    greedy_match: float = 0.0


@dataclass(frozen=True, slots=True)
class _Cut:
    """What a text is cut into.

    Attributes:
        windows: tokens that are read, and the one that follows each of the text's own.
        prompts: beginnings that are continued, ``greedy_tokens`` each.
        most_tokens: that a cache holds at once.
    """

    windows: list[tuple[list[int], list[int]]]
    prompts: list[list[int]]
    greedy_tokens: int
    most_tokens: int

    @classmethod
    def of(cls, token_ids: Sequence[int], first: list[int], context: int) -> _Cut:
        """Cut all but the last token, which is predicted only."""
        text, num_tokens = list(token_ids), len(token_ids) - 1
        stride = context - len(first)
        windows = []
        for start in range(0, num_tokens, stride):
            stop = min(start + stride, num_tokens)
            windows.append((first + text[start:stop], text[start + 1 : stop + 1]))
        prompt_len = min(_PROMPT_TOKENS, stride // 2, num_tokens)
        greedy_tokens = min(_GREEDY_TOKENS, stride - prompt_len)
        starts = [i * (num_tokens - prompt_len) // _NUM_PROMPTS for i in range(_NUM_PROMPTS)]
        prompts = [first + text[start : start + prompt_len] for start in starts]
        most = max(context, _NUM_PROMPTS * (len(first) + prompt_len + greedy_tokens))
        return cls(windows, prompts, greedy_tokens, most)


def parse_format(name: str) -> tuple[KVDtype, KVDtype | None]:
    """Split a format's name into ``KVConfig``'s ``dtype`` and ``v_dtype``.

    Raises:
        ValueError: no such format.

    >>> parse_format("int8"), parse_format("int8/int4")
    (('int8', None), ('int8', 'int4'))
    """
    k_dtype, slash, v_dtype = name.partition("/")
    of_k = require_choice("kv_dtype", k_dtype, KV_DTYPES)
    if not slash:
        return of_k, None
    return of_k, require_choice(f"kv_dtype {name!r}, V", v_dtype, KV_DTYPES)


def default_text() -> str:
    """Return a long English text that ships with Python: its language reference, 700 kB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def measure_quality(
    model: Any,
    token_ids: Sequence[int],
    *,
    num_tokens: int,
    context: int = 2048,
    formats: Sequence[str] = FORMATS,
    rotations: Sequence[str] = ("none", "hadamard"),
    first_ids: Sequence[int] = (),
    backend: str = "auto",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Compare each format, with and without rotation, with unquantized pages.

    The text is cut into windows of ``context`` tokens; every token but the first of all is
    predicted once, from the tokens of its window before it. The model is put in eval mode and
    its attention replaced, as by an engine.

    Args:
        model: a transformers causal LM.
        token_ids: the text; at least ``num_tokens + 1``.
        num_tokens: predictions to measure.
        context: tokens a window.
        formats: names as in `FORMATS`; "model" is allowed too, and differs by nothing.
        rotations: of "none" and "hadamard".
        first_ids: tokens that the model expects before any text; each window begins with them.
        tell: is called with the passes done and to be done.
    Raises:
        ValueError, TypeError: an option that is out of range, or not enough text.
        UnsupportedModelError: a model that the engine cannot serve.
    """
    runner = ModelRunner.load(model)
    require_int("context", context, _MIN_CONTEXT, runner.max_positions)
    require_int("num_tokens", num_tokens, 1)
    if len(token_ids) <= num_tokens:
        raise ValueError(
            f"num_tokens: expected at most {len(token_ids) - 1}, one less than the text has "
            f"tokens, got {num_tokens}; lower it or give a longer text"
        )
    for name in formats:
        parse_format(name)
    for rotation in rotations:
        require_choice("rotate", rotation, ("none", "hadamard"))
    cut = _Cut.of(token_ids[: num_tokens + 1], list(first_ids), context)
    pairs = [
        (name, rotate)
        for name in dict.fromkeys(formats)
        for rotate in (("none",) if name == "model" else rotations)
    ]
    baseline, *candidates = (
        _Candidate(name, rotate, _make_cache(runner, name, rotate, cut.most_tokens, backend))
        for name, rotate in [("model", "none"), *pairs]
    )
    num_chunks = sum(len(_chunks(runner, len(window))) for window, _ in cut.windows)
    total = (num_chunks + 1) * (len(candidates) + 1)
    passes = itertools.count(1)

    def step() -> None:
        tell(next(passes), total)

    for window, targets in cut.windows:
        _measure_window(runner, baseline, candidates, window, targets, len(first_ids), step)
    continuations = _greedy(runner, baseline.cache, cut.prompts, cut.greedy_tokens)
    step()
    for candidate in candidates:
        candidate.greedy_match = _greedy_match(runner, candidate.cache, cut.prompts, continuations)
        step()
    base_nll = torch.cat(baseline.nlls)
    return Quality(
        num_tokens=num_tokens,
        context=context,
        greedy_prompts=_NUM_PROMPTS,
        greedy_tokens=cut.greedy_tokens,
        model_dtype=str(runner.spec.dtype).removeprefix("torch."),
        perplexity=math.exp(base_nll.mean()),
        bytes_per_token=baseline.cache.codec.bytes_per_token,
        formats=[_figures(candidate, base_nll) for candidate in candidates],
    )


def _make_cache(
    runner: ModelRunner, kv_dtype: str, rotate: str, most_tokens: int, backend: str
) -> PrefixCache:
    """A cache in one format that holds ``most_tokens``, or the prompts with what follows them."""
    k_dtype, v_dtype = parse_format(kv_dtype)
    config = KVConfig(
        dtype=k_dtype, v_dtype=v_dtype, rotate=require_choice("rotate", rotate, ROTATIONS)
    )
    num_pages = most_tokens // config.page_size + _NUM_PROMPTS + 1
    capacity = num_pages * KVCodec(runner.spec, config).bytes_per_page
    config = dataclasses.replace(config, capacity=capacity)
    return PrefixCache(runner.spec, config, device=runner.device, backend=backend)


def _chunks(runner: ModelRunner, num_tokens: int) -> list[tuple[int, int]]:
    size = max(1, min(_CHUNK_TOKENS, _CHUNK_LOGITS // runner.vocab_size))
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _measure_window(
    runner: ModelRunner,
    baseline: _Candidate,
    candidates: Sequence[_Candidate],
    window: list[int],
    targets: list[int],
    num_first: int,
    step: Callable[[], None],
) -> None:
    """Run ``window`` chunk by chunk on every cache; ``targets`` follow its tokens in turn."""
    with ExitStack() as held:
        own = held.enter_context(baseline.cache.acquire(window))
        leases = [held.enter_context(each.cache.acquire(window)) for each in candidates]
        for start, stop in _chunks(runner, len(window)):

            def logits_of(cache: PrefixCache, lease: Lease, start: int, stop: int) -> Tensor:
                run = Run(lease, window[start:stop], start, stop, start, num_first)
                return runner.forward(build_batch([run], runner.device), cache)

            begin = max(0, start - num_first)
            wanted = torch.tensor(targets[begin : stop - num_first], device=runner.device)
            base_logits = logits_of(baseline.cache, own, start, stop)
            baseline.nlls.append(_nlls(base_logits, wanted))
            step()
            for candidate, lease in zip(candidates, leases, strict=True):
                logits = logits_of(candidate.cache, lease, start, stop)
                _compare(candidate, base_logits, logits, wanted)
                step()


def _nlls(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target. [num_targets] float64, on the CPU."""
    parts = [
        torch.nn.functional.cross_entropy(rows.double(), ids, reduction="none")
        for rows, ids in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
    ]
    return torch.cat(parts).cpu()


def _compare(candidate: _Candidate, base_logits: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Note how the rows of ``logits`` differ from the baseline's."""
    candidate.nlls.append(_nlls(logits, targets))
    for base_rows, rows in zip(base_logits.split(_ROWS), logits.split(_ROWS), strict=True):
        base = base_rows.double().log_softmax(dim=-1)
        terms = base - rows.double().log_softmax(dim=-1)
        weights = base.exp_()
        # A token that the baseline bars (-inf) adds nothing, whatever the other says.
        terms[weights == 0] = 0.0
        candidate.divergences.append((terms.mul_(weights)).sum(dim=-1).cpu())
        agreed = base_rows.argmax(dim=-1) == rows.argmax(dim=-1)
        candidate.num_agreed += int(agreed.sum())


def _greedy(
    runner: ModelRunner, cache: PrefixCache, prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """The ``num_tokens`` most likely tokens after each prompt, one by one; no token ends it."""
    out: list[list[int]] = [[] for _ in prompts]
    with ExitStack() as held:
        leases = [held.enter_context(cache.acquire(prompt)) for prompt in prompts]
        pending = [list(prompt) for prompt in prompts]
        while True:
            runs = []
            for lease, ids in zip(leases, pending, strict=True):
                stop = lease.num_tokens
                runs.append(Run(lease, ids, stop - len(ids), stop, stop - len(ids), stop - 1))
            logits = runner.forward(build_batch(runs, runner.device), cache)
            pending = [[token_id] for token_id in logits.argmax(dim=-1).tolist()]
            for tail, ids in zip(out, pending, strict=True):
                tail += ids
            if len(out[0]) == num_tokens:
                return out
            for lease, ids in zip(leases, pending, strict=True):
                lease.extend(ids)


def _greedy_match(
    runner: ModelRunner,
    cache: PrefixCache,
    prompts: Sequence[list[int]],
    continuations: Sequence[list[int]],
) -> float:
    """Mean number of tokens that greedy decoding would share with ``continuations``.

    One pass over each prompt with its continuation tells: up to the first difference greedy
    decoding sees just these tokens, and reads the same pages.
    """
    with ExitStack() as held:
        runs = []
        for prompt, tail in zip(prompts, continuations, strict=True):
            ids = prompt + tail[:-1]
            lease = held.enter_context(cache.acquire(ids))
            runs.append(Run(lease, ids, 0, len(ids), 0, len(prompt) - 1))
        best = runner.forward(build_batch(runs, runner.device), cache).argmax(dim=-1).cpu()
    wanted = torch.tensor(list(continuations))
    same = (best.view_as(wanted) == wanted).long()
    return float(same.cumprod(dim=1).sum(dim=1).double().mean())


def _figures(candidate: _Candidate, base_nll: Tensor) -> FormatQuality:
    nll, divergence = torch.cat(candidate.nlls), torch.cat(candidate.divergences)
    difference = nll - base_nll
    change = math.expm1(difference.mean())
    spread = float(difference.std(correction=0)) / math.sqrt(max(1, len(difference) - 1))
    return FormatQuality(
        kv_dtype=candidate.kv_dtype,
        rotate=candidate.rotate,
        bytes_per_token=candidate.cache.codec.bytes_per_token,
        perplexity=math.exp(nll.mean()),
        perplexity_change=change,
        perplexity_change_stderr=(1 + change) * spread,
        kl_mean=float(divergence.mean()),
        kl_p99=float(divergence.quantile(0.99)),
        top1_agreement=candidate.num_agreed / len(nll),
        greedy_match=candidate.greedy_match,
    )


def recommend(quality: Quality) -> str:
    """Say in words which format to take, by mean KL divergence and perplexity.

    A format passes if its mean KL is within the limit and its perplexity is not shown (by two
    standard errors) to be above it; of those that pass, the one with the fewest bytes is named.
    """

    def passes(row: FormatQuality, limits: tuple[float, float]) -> bool:
        surely = row.perplexity_change - 2 * row.perplexity_change_stderr
        return row.kl_mean <= limits[0] and surely <= limits[1]

    def smallest(limits: tuple[float, float]) -> FormatQuality | None:
        fit = [row for row in rows if passes(row, limits)]
        return min(fit, key=lambda row: (row.bytes_per_token, row.kl_mean), default=None)

    def figures(row: FormatQuality) -> str:
        saved = quality.bytes_per_token / row.bytes_per_token
        return (
            f"perplexity {100 * row.perplexity_change:+.2f} % "
            f"(± {100 * row.perplexity_change_stderr:.2f}), mean KL {row.kl_mean:.1e}, "
            f"{saved:.1f}x fewer bytes than {quality.model_dtype}"
        )

    rows = [row for row in quality.formats if row.kv_dtype != "model"]
    lossless, good = smallest(_LOSSLESS), smallest(_GOOD)
    said = []
    if lossless is not None:
        said.append(f"Nearly lossless: {lossless.config}: {figures(lossless)}.")
    if good is not None and (lossless is None or good.bytes_per_token < lossless.bytes_per_token):
        said.append(f"Smaller, at a small loss: {good.config}: {figures(good)}.")
    if not said:
        said.append(
            f"None of the formats tried stays within a mean KL of {_GOOD[0]:g} and "
            f"{100 * _GOOD[1]:g} % of perplexity: keep unquantized pages, "
            f'KVConfig(dtype="model").'
        )
    pairs = [
        (plain.kl_mean / max(rotated.kl_mean, 1e-12), plain.kv_dtype)
        for plain in rows
        for rotated in rows
        if (plain.kv_dtype, plain.rotate, rotated.rotate) == (rotated.kv_dtype, "none", "hadamard")
    ]
    if pairs:
        most, least = max(pairs), min(pairs)
        if least[0] >= 1.0:
            said.append(
                f"Rotation helps every format tried, {most[1]} most ({most[0]:.1f}x less KL)."
            )
        else:
            said.append(
                f"Rotation takes {most[0]:.1f}x off the KL of {most[1]}, but "
                f"{least[1]} is better without ({1 / max(least[0], 1e-12):.1f}x less KL)."
            )
    return " ".join(said)


def describe(model: Any) -> dict[str, Any]:
    """Return what figures of ``model`` were measured with."""
    import transformers

    return {
        "model": Path(model.config.name_or_path).name or model.config.model_type,
        "hardware": hardware(model.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
