"""One step's tokens as tensors: all new tokens of all sequences in one row, nothing padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.cache import Lease
from radixkv.groups import SharedRun, shared_runs
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

    Complexity: O(tokens + pages) of the runs; per token, lists are only copied.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    cu_seqlens_q = [0]
    tables = [run.lease.page_ids for run in runs]
    page_table = np.zeros((len(runs), max(map(len, tables))), dtype=np.int32)
    for i, run in enumerate(runs):
        begin, end = len(input_ids), len(input_ids) + run.stop - run.start
        input_ids += run.token_ids
        positions += range(run.start, run.stop)
        write_from = min(max(run.write_from, run.start), run.stop)
        # Slot 0 is NULL_PAGE's: what is written there is dropped.
        slots += [0] * (write_from - run.start)
        slots += run.lease.slots(write_from, run.stop).tolist()
        logit_rows += range(begin + max(run.logits_from, run.start) - run.start, end)
        page_table[i, : len(tables[i])] = tables[i]
        cu_seqlens_q.append(end)

    seq_lens = [run.stop for run in runs]
    config = runs[0].lease.cache.config
    groups: tuple[SharedRun, ...] = ()
    if config.shared_prefix != "never":
        groups = shared_runs(page_table, seq_lens, np.diff(cu_seqlens_q), config.page_size)

    def on_device(values: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

    return Batch(
        input_ids=on_device(input_ids, torch.int64)[None],
        positions=on_device(positions, torch.int64)[None],
        logit_rows=on_device(logit_rows, torch.int64),
        attention=AttentionBatch(
            slot_mapping=on_device(slots, torch.int64),
            page_table=on_device(page_table, torch.int32),
            seq_lens=on_device(seq_lens, torch.int32),
            cu_seqlens_q=on_device(cu_seqlens_q, torch.int32),
            runs=groups,
        ),
    )
