"""From logits to tokens: what is processed in which order, and why a sample repeats.

Each row of logits is one sample of one request. Nothing in a row depends on another row.

Order, each step skipped where its option is off:

1. ``logits_processors``, given prompt and output ``[1, n]`` int64 and logits ``[1, vocab]``;
2. repetition penalty, tokens of prompt and output: logits above 0 divided, the others multiplied;
3. presence and frequency penalty, tokens of the output alone: subtracted;
4. ``logit_bias``: added;
5. ``json_schema``, ``regex``, ``grammar``: tokens that cannot follow are barred;
6. temperature: divides; 0 takes the largest logit, of equal ones the lowest id, and ends here;
7. ``top_k``: the k largest, and those equal to the k-th;
8. ``top_p``: of what is left, the fewest of the largest whose probabilities reach it, of equal
   ones the lowest ids first; the one that reaches it is kept;
9. ``min_p``: of what is left, those at least this share as likely as the best.

The token is drawn with one uniform number, a hash of (seed, sample index, step) with 53 bits,
by the inverse of the cumulative distribution in the order of token ids. That order is fixed:
float noise in the logits moves a border by its own size and no more, while an order by
probability would swap neighbours. No global random state is read or set.

Log-probabilities are of the model's own distribution, before step 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from radixkv.config import SamplingParams
from radixkv.engine.guided import Guide, allowed_tokens
from radixkv.errors import NonFiniteError

# Rows are processed so many logits at a time: bounds the copies, and suits a CPU's caches.
_CHUNK_LOGITS = {"cpu": 1 << 20, "other": 1 << 25}
# Factors and biases are held within float32, so that 0 / 0 and inf - inf cannot come up.
_TINY, _HUGE = 1e-30, 1e30


@dataclass(slots=True)
class SamplerRow:
    """What one row of logits needs.

    Attributes:
        params: options of the request.
        seed: of the request: ``params.seed``, or one from ``fresh_seed``.
        index: which sample of the request.
        prompt_token_ids: ids of the prompt; not changed while the row lives.
        token_ids: ids generated so far; the next one is drawn for step ``len(token_ids)``.
        guide: which tokens may come next, after all of ``token_ids``; None is all.
        is_processed: whether any of steps 1 to 5 of the order above changes its logits.
    """

    params: SamplingParams
    seed: int
    index: int
    prompt_token_ids: Sequence[int]
    token_ids: list[int]
    guide: Guide | None = None
    is_processed: bool = field(init=False)
    _prompt: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Note whether any of steps 1 to 5 does something."""
        self.is_processed = self.guide is not None or self.params.changes_logits

    def prompt(self) -> Tensor:
        """Return the prompt's ids. Shape [n] int64, CPU; made once."""
        if self._prompt is None:
            self._prompt = torch.tensor(list(self.prompt_token_ids), dtype=torch.int64)
        return self._prompt


class Sampled(NamedTuple):
    """One drawn token.

    Attributes:
        token_id: the token.
        logprob: its log-probability (natural log, the model's own distribution).
        top: ``params.logprobs`` best ids and the token itself to their log-probabilities, best
            first; None where not asked.
    """

    token_id: int
    logprob: float
    top: dict[int, float] | None


def fresh_seed() -> int:
    """Return a seed of 64 random bits from the system; no global random state is touched."""
    return secrets.randbits(64)


def uniform(seed: int, index: int, step: int) -> float:
    """Return the number in [0, 1) that sample ``index`` of ``seed`` draws with at ``step``.

    >>> uniform(7, 0, 0) == uniform(7, 0, 0) != uniform(7, 1, 0)
    True
    """
    key = seed.to_bytes(9, "little", signed=True)
    key += index.to_bytes(8, "little") + step.to_bytes(8, "little")
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Draw one token a row. Neither ``logits`` nor ``rows`` are changed.

    Args:
        logits: Shape [num_rows, vocab], a float dtype, any device. -inf bars a token.
        rows: one a row of logits.
    Returns:
        One drawn token a row, in order.
    Raises:
        ValueError: another number of rows, or logits of another shape.
        NonFiniteError: a row with NaN or +inf, or with nothing but -inf, in the model's logits
            or after processing; the message names it. What a logits processor raises passes.

    Complexity: O(num_rows * vocab); top_k and top_p sort the few tokens near their border.
    """
    _require_rows(logits, len(rows))
    out: list[Sampled] = []
    per_chunk = _rows_a_chunk(logits)
    for start in range(0, len(rows), per_chunk):
        stop = start + per_chunk
        out += _sample_chunk(logits[start:stop].float(), rows[start:stop], start)
    return out


def top_logprobs(logits: Tensor, token_ids: Sequence[int], k: int) -> list[dict[int, float]]:
    """Return, a row, the k best ids and the row's own to their log-probabilities, best first.

    Args:
        logits: Shape [num_rows, vocab], a float dtype, any device.
        token_ids: the row's own id, one a row.
        k: how many best; 0 gives the row's own alone.
    Raises:
        ValueError: another number of rows, or logits of another shape.
        NonFiniteError: a row with NaN or +inf, or with nothing but -inf.
    """
    _require_rows(logits, len(token_ids))
    out: list[dict[int, float]] = []
    per_chunk = _rows_a_chunk(logits)
    for start in range(0, len(token_ids), per_chunk):
        chunk = logits[start : start + per_chunk].float()
        own_ids = list(token_ids[start : start + per_chunk])
        normalizer = log_normalizer(chunk)
        _require_finite(normalizer, start, "the model's logits")
        own = torch.tensor(own_ids, device=chunk.device)
        own_logprobs = (chunk.gather(1, own[:, None])[:, 0] - normalizer).tolist()
        out += _top_dicts(chunk, normalizer, own_ids, own_logprobs, [k] * len(own_ids))
    return out


def log_normalizer(logits: Tensor) -> Tensor:
    """The log-sum-exp of each row, [num_rows]; its bits do not depend on the other rows.

    (``torch.logsumexp`` adds wide rows in another order when there is only one.)
    """
    return logits.amax(dim=-1) - logits.log_softmax(dim=-1).amax(dim=-1)


def _require_rows(logits: Tensor, num_rows: int) -> None:
    if logits.ndim != 2 or logits.shape[0] != num_rows or logits.shape[1] == 0:
        raise ValueError(
            f"logits: expected shape [{num_rows}, vocab], got {list(logits.shape)}; give one row "
            f"of logits a sampled row"
        )


def _rows_a_chunk(logits: Tensor) -> int:
    kind = "cpu" if logits.device.type == "cpu" else "other"
    return max(1, _CHUNK_LOGITS[kind] // logits.shape[1])


def _require_finite(per_row: Tensor, start: int, where: str) -> None:
    """Raise unless each row's maximum or log-sum-exp is finite. Shape [num_rows]."""
    if not per_row.isfinite().all():
        bad = [start + row for row in (~per_row.isfinite()).nonzero()[:, 0].tolist()]
        raise NonFiniteError(
            f"logits: expected finite numbers or -inf, got NaN, +inf or nothing but -inf in "
            f"{where}, row {', '.join(map(str, bad))}; check the model's weights and dtype, "
            f"and logits_processors"
        )


def _sample_chunk(logits: Tensor, rows: Sequence[SamplerRow], start: int) -> list[Sampled]:
    """Sample rows ``start`` and on of the batch. ``logits``: [len(rows), vocab] float32."""
    normalizer = log_normalizer(logits)
    _require_finite(normalizer, start, "the model's logits")
    processed = [i for i, row in enumerate(rows) if row.is_processed]
    scores = logits
    if processed:
        scores = logits.clone()
        scores[processed] = _process(logits[processed], [rows[i] for i in processed])
        _require_finite(scores.amax(dim=-1), start, "the processed logits")

    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if len(drawn) < len(rows):
        token_ids = scores.argmax(dim=-1)
        if drawn:
            token_ids[drawn] = _draw(scores[drawn], [rows[i] for i in drawn])
    else:
        token_ids = _draw(scores, rows)
    logprobs = (logits.gather(1, token_ids[:, None])[:, 0] - normalizer).tolist()
    ids: list[int] = token_ids.tolist()

    tops: list[dict[int, float] | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if asked:
        dicts = _top_dicts(
            logits[asked],
            normalizer[asked],
            [ids[i] for i in asked],
            [logprobs[i] for i in asked],
            [rows[i].params.logprobs or 0 for i in asked],
        )
        for i, top in zip(asked, dicts, strict=True):
            tops[i] = top
    return list(map(Sampled, ids, logprobs, tops))


def _top_dicts(
    logits: Tensor,
    normalizer: Tensor,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    ks: Sequence[int],
) -> list[dict[int, float]]:
    best, best_ids = logits.topk(min(max(ks), logits.shape[1]), dim=-1)
    values = (best - normalizer[:, None]).tolist()
    out = []
    for row_ids, row_values, token_id, logprob, k in zip(
        best_ids.tolist(), values, token_ids, logprobs, ks, strict=True
    ):
        top = dict(zip(row_ids[:k], row_values[:k], strict=True))
        top.setdefault(token_id, logprob)
        out.append(top)
    return out


def _process(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return steps 1 to 5 of the order above. ``scores``: [len(rows), vocab], a copy of ours."""
    vocab = scores.shape[1]
    device = scores.device
    outputs = [torch.tensor(row.token_ids, dtype=torch.int64) for row in rows]
    for i, row in enumerate(rows):
        if row.params.logits_processors:
            input_ids = torch.cat([row.prompt(), outputs[i]])[None].to(device)
            one = scores[i : i + 1].clone()
            for processor in row.params.logits_processors:
                one = processor(input_ids, one)
                if not isinstance(one, Tensor) or one.shape != (1, vocab):
                    got = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
                    raise ValueError(
                        f"logits_processors: expected {processor!r} to return logits "
                        f"[1, {vocab}], got {got}"
                    )
            scores[i] = one[0]

    # Flat (row, id) places, so that rows of any lengths are changed in one go.
    flat = scores.view(-1)
    repeated = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if repeated:
        places = torch.cat(
            [torch.cat([rows[i].prompt(), outputs[i]]) + i * vocab for i in repeated]
        )
        places = _unique(places)[0].to(device)
        factor = torch.tensor([row.params.repetition_penalty for row in rows], dtype=torch.float64)
        by = factor.clamp(_TINY, _HUGE).float().to(device)[places // vocab]
        old = flat[places]
        flat[places] = torch.where(old < 0, old * by, old / by)
    counted = [
        i
        for i, row in enumerate(rows)
        if row.token_ids and (row.params.presence_penalty or row.params.frequency_penalty)
    ]
    if counted:
        places, counts = _unique(torch.cat([outputs[i] + i * vocab for i in counted]))
        presence = torch.tensor([row.params.presence_penalty for row in rows])[places // vocab]
        frequency = torch.tensor([row.params.frequency_penalty for row in rows])[places // vocab]
        flat[places.to(device)] -= (presence + frequency * counts).to(device)
    biases = [
        (i * vocab + token_id, min(max(bias, -_HUGE), _HUGE))
        for i, row in enumerate(rows)
        for token_id, bias in (row.params.logit_bias or {}).items()
    ]
    if biases:
        at, add = zip(*biases, strict=True)
        flat[torch.tensor(at, device=device)] += torch.tensor(add, device=device)
    guides = {i: row.guide for i, row in enumerate(rows) if row.guide is not None}
    if guides:
        allowed = allowed_tokens(list(guides.values()), vocab, device)
        for i, row in zip(guides, allowed.logical_not_(), strict=True):
            scores[i].masked_fill_(row, -torch.inf)
    return scores


def _unique(places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct values and how often each comes."""
    values, counts = torch.unique(places, return_counts=True)
    return values, counts


def _draw(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Return steps 6 to 9 and the draw. ``scores``: [len(rows), vocab] -> [len(rows)] int64."""
    device = scores.device
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    temperature = temperature.clamp(_TINY, _HUGE).float().to(device)
    # The best is at 0 before it is divided, so that no temperature overflows.
    scores = (scores - scores.amax(dim=-1, keepdim=True)).div_(temperature[:, None])

    top_k = [row.params.top_k for row in rows]
    if any(top_k):
        at = _places(top_k)
        scores[at] = _keep_top_k(scores[at], [k for k in top_k if k])
    weights = scores.exp()
    left_out = [1.0 - row.params.top_p for row in rows]
    if any(left_out):
        at = _places(left_out)
        weights[at] = _keep_top_p(weights[at], [share for share in left_out if share])
    if any(row.params.min_p for row in rows):
        # The best weighs exactly 1, so a weight is its share of the best.
        min_p = torch.tensor([row.params.min_p for row in rows], device=device)
        weights[weights < min_p[:, None]] = 0.0

    numbers = [uniform(row.seed, row.index, len(row.token_ids)) for row in rows]
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    goal = torch.tensor(numbers, dtype=torch.float64, device=device) * cumulative[:, -1]
    # The first token whose cumulative weight is above the goal, hence one with a weight. A number
    # of 53 bits below 1 times the total stays below the total.
    return torch.searchsorted(cumulative, goal[:, None], right=True)[:, 0]


def _places(values: Sequence[float]) -> slice | list[int]:
    """Return the places that are not 0; all of them as a slice, which copies nothing."""
    return slice(None) if all(values) else [i for i, value in enumerate(values) if value]


def _keep_top_k(scores: Tensor, ks: Sequence[int]) -> Tensor:
    """Return scores with -inf below the k-th largest of each row."""
    limited = torch.tensor([min(k, scores.shape[1]) for k in ks], device=scores.device)
    best = scores.topk(min(max(ks), scores.shape[1]), dim=-1).values
    kth = best.gather(1, limited[:, None] - 1)
    return scores.masked_fill(scores < kth, -torch.inf)


def _keep_top_p(weights: Tensor, left_out: Sequence[float]) -> Tensor:
    """Return weights with 0 outside the fewest largest that leave out at most a share.

    Tokens below ``left_out / vocab`` of the total are together less than what may be left out, so
    they are out; only the others are sorted.

    Args:
        weights: of any total a row. Shape [num_rows, vocab].
        left_out: 1 - top_p, one a row.
    """
    share = torch.tensor(left_out, dtype=torch.float64, device=weights.device)[:, None]
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    # A little lower, so that rounding leaves out none that belongs.
    bound = (0.999 * share * total / weights.shape[1]).float()
    ids, values = _members(weights, weights >= bound)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    before = values.cumsum(dim=-1, dtype=torch.float64) - values
    kept = before < (1 - share) * total
    kept[:, 0] = True  # also where top_p is lost in rounding
    # Places that only fill a short row have weight 0, so adding them changes nothing.
    return torch.zeros_like(weights).scatter_add_(1, ids.gather(1, order), values * kept)


def _members(weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns where ``mask`` holds, ascending, and the weights there.

    Shapes [num_rows, most in a row]; shorter rows end in column 0 with weight 0.
    """
    rows, columns = mask.nonzero(as_tuple=True)
    counts = mask.sum(dim=-1)
    places = torch.arange(len(rows), device=mask.device) - (counts.cumsum(0) - counts)[rows]
    shape = (mask.shape[0], int(counts.max()))
    out_columns = columns.new_zeros(shape)
    out_columns[rows, places] = columns
    out_weights = weights.new_zeros(shape)
    out_weights[rows, places] = weights[rows, columns]
    return out_columns, out_weights
