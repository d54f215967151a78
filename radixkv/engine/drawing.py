"""From a step's logits to its tokens: one draw for all requests of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from radixkv.engine.request import Request
from radixkv.engine.sampling import Sampled, SamplerRow, sample
from radixkv.engine.scheduler import Output

if TYPE_CHECKING:
    from torch import Tensor


def draw(
    drawn: list[tuple[Output, list[SamplerRow]]],
    before: Callable[[list[Sampled], list[SamplerRow]], None],
) -> None:
    """Draw for all at once; if that fails, one by one, so that only the one at fault fails.

    Args:
        before: told what was drawn for which rows, before any request gets its tokens.
    """
    if len(drawn) == 1 and drawn[0][0].sequence.owner.done:
        return
    try:
        logits, rows = gather(drawn)
        sampled = sample(logits, rows)
    except Exception as error:
        if len(drawn) == 1:
            drawn[0][0].sequence.owner.fail(error)
        else:
            for one in drawn:
                draw([one], before)
        return
    before(sampled, rows)
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


def may_end(
    sampled: Sequence[Sampled], rows: Sequence[SamplerRow], eos_token_ids: Collection[int]
) -> bool:
    """Whether what was drawn may end a request."""
    return any(
        row.params.stop
        or row.guide is not None
        or len(row.token_ids) + 1 >= row.params.max_new_tokens
        or token.token_id in row.params.stop_token_ids
        or (token.token_id in eos_token_ids and not row.params.ignore_eos)
        for token, row in zip(sampled, rows, strict=True)
    )


def gather(
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
