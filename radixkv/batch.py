"""One step's tokens as tensors: all new tokens of all sequences in one row, nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.cache import Lease
from radixkv.reference import AttentionBatch


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens ``start : stop`` of one sequence, to be run in this step.

    Attributes:
        lease: covers at least ``stop`` tokens; those below ``start`` have their KV.
        token_ids: of the tokens ``start : stop``.
        start, stop: positions in the sequence.
        write_from: tokens below this position have their KV already and are run only for
            their logits: their K and V are computed and dropped.
        logits_from: logits are wanted from this position on; ``stop`` for none.
    """

    lease: Lease
    token_ids: Sequence[int]
    start: int
    stop: int
    write_from: int
    logits_from: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model is called with.

    Attributes:
        input_ids: [1, num_tokens] int64.
        positions: position of each token in its own sequence. [1, num_tokens] int64.
        logit_rows: the tokens whose logits are wanted. [num_logits] int64.
        attention: which pages each token writes and reads.
    """

    input_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    attention: AttentionBatch


def build_batch(runs: Sequence[Run], device: torch.device) -> Batch:
    """Lay ``runs`` out in one row, in order; the logits come in the same order.

    Complexity: O(tokens + pages) of the runs, no Python per token beyond copying the ids.
    """
    num_seqs = len(runs)
    lens = np.array([run.stop - run.start for run in runs], dtype=np.int32)
    cu_seqlens_q = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(lens, out=cu_seqlens_q[1:])
    input_ids = np.empty(cu_seqlens_q[-1], dtype=np.int64)
    positions = np.empty_like(input_ids)
    slots = np.zeros_like(input_ids)  # slot 0 is NULL_PAGE's: what is written there is dropped
    logit_rows: list[NDArray[np.int64]] = []
    tables = [run.lease.page_ids for run in runs]
    page_table = np.zeros((num_seqs, max(map(len, tables))), dtype=np.int32)
    for i, run in enumerate(runs):
        begin, end = int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1])
        input_ids[begin:end] = run.token_ids
        positions[begin:end] = np.arange(run.start, run.stop)
        write_from = min(max(run.write_from, run.start), run.stop)
        slots[begin + write_from - run.start : end] = run.lease.slots(write_from, run.stop)
        page_table[i, : len(tables[i])] = tables[i]
        logits_from = max(run.logits_from, run.start)
        logit_rows.append(np.arange(begin + logits_from - run.start, end))

    def on_device(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        input_ids=on_device(input_ids)[None],
        positions=on_device(positions)[None],
        logit_rows=on_device(np.concatenate(logit_rows)),
        attention=AttentionBatch(
            slot_mapping=on_device(slots),
            page_table=on_device(page_table),
            seq_lens=on_device(np.array([run.stop for run in runs], dtype=np.int32)),
            cu_seqlens_q=on_device(cu_seqlens_q),
        ),
    )
