"""One step's tokens as tensors: all new tokens of all sequences in one row, nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.attention.batch import AttentionBatch
from radixkv.attention.plan import StepPlan
from radixkv.cache.lease import Lease


class Run(NamedTuple):  # one a sequence and step: a frozen dataclass takes five times as long
    """The tokens ``start : stop`` of one sequence, to be run in this step.

    Attributes:
        lease: covers at least ``stop`` tokens; those below ``start`` have their KV.
        token_ids: of the tokens ``start : stop``, at least one.
        start, stop: positions in the sequence.
        write_from: tokens below this position have their KV already and are run only for
            their logits: their K and V are computed and dropped.
        logits_from: logits are wanted from this position on; ``stop`` for none.
        page_ids: of the lease, at least up to ``stop``, as they are now; None asks the lease.
    """

    lease: Lease
    token_ids: Sequence[int]
    start: int
    stop: int
    write_from: int
    logits_from: int
    page_ids: NDArray[np.int32] | None = None


@dataclass(slots=True)  # one a step
class Batch:
    """What the model is called with.

    Attributes:
        input_ids: [1, num_tokens] int64.
        positions: position of each token in its own sequence. [1, num_tokens] int64.
        logit_rows: the tokens whose logits are wanted. [num_logits] int64.
        plan: how each layer writes and reads pages.
    """

    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    plan: StepPlan

    @property
    def attention(self) -> AttentionBatch:
        """Which pages each token writes and reads."""
        return self.plan.batch


def build_batch(runs: Sequence[Run], device: torch.device) -> Batch:
    """Lay ``runs`` out in one row, in order; the logits come in the same order.

    Complexity: O(tokens + pages) of the runs, O(1) Python operations a run.
    """
    leases, token_ids, *places, page_ids = zip(*runs, strict=True)
    input_ids: list[int] = []
    for ids in token_ids:
        input_ids += ids
    start, seq_lens, write_from, logits_from = (
        np.fromiter(place, np.int64, len(runs)) for place in places
    )
    seqs = np.arange(len(runs))  # whose token each one is
    if len(input_ids) == len(runs):  # a decode step, as most are: one token each
        positions, cu_seqlens_q = start, np.arange(len(runs) + 1)
    else:
        query_lens = seq_lens - start
        cu_seqlens_q = np.concatenate(([0], query_lens.cumsum()))
        seqs = seqs.repeat(query_lens)
        positions = np.arange(len(seqs)) + (start - cu_seqlens_q[:-1])[seqs]
        write_from, logits_from = write_from[seqs], logits_from[seqs]

    cache = leases[0].core
    page_size = cache.page_size
    each = [
        lease.page_ids if known is None else known
        for lease, known in zip(leases, page_ids, strict=True)
    ]
    page_table, groups = cache.page_tables.lay_out(each, start // page_size)
    pages, offsets = np.divmod(positions, page_size)
    slots = page_table[seqs, pages].astype(np.int64) * page_size + offsets
    slots[positions < write_from] = 0  # of NULL_PAGE: what is written there is dropped
    logit_rows = (positions >= logits_from).nonzero()[0]
    on_host = cache.on_host

    def on_device(values: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if on_host else tensor.to(device, non_blocking=True)

    attention = AttentionBatch(
        slot_mapping=on_device(slots),
        page_table=on_device(page_table),
        seq_lens=on_device(seq_lens.astype(np.int32)),
        cu_seqlens_q=on_device(cu_seqlens_q.astype(np.int32)),
        runs=groups,
        known_lens=(seq_lens.tolist(), cu_seqlens_q.tolist()),
    )
    return Batch(
        input_ids=on_device(np.array([input_ids], dtype=np.int64)),
        positions=on_device(positions[None]),
        logit_rows=on_device(logit_rows),
        plan=cache.backend.plan(attention),
    )
