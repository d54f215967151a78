"""Decode steps as CUDA graphs: one a bucket of batch size and page-table width.

A captured step runs with the shapes and addresses that it was captured with. So a batch is copied
into the bucket's own tensors, and padded: sequences of one token that write to and read from
`NULL_PAGE`. Kernels give a sequence the same bits whatever is beside it, so padding changes none.

Graphs hold the addresses of weights: their owner makes new ones when weights were changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from radixkv.attention.batch import AttentionBatch
from radixkv.attention.plan import Backend
from radixkv.cache.pool import NULL_PAGE
from radixkv.models.batch import Batch

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a step into one that replays it: `capture_cuda`, or what a test on a CPU passes."""

MAX_SEQS = 256  # larger batches are held by arithmetic, not by launches

logger = logging.getLogger("radixkv")


def is_decode(batch: Batch) -> bool:
    """Whether each sequence has one new token and its logits are wanted. Waits for nothing."""
    num_seqs = batch.attention.seq_lens.shape[0]
    return batch.input_ids.shape[1] == batch.logit_rows.shape[0] == num_seqs <= MAX_SEQS


def bucket_of(num_seqs: int, max_pages: int) -> tuple[int, int]:
    """Rows and page-table columns of the bucket that a decode batch runs in: powers of two.

    >>> bucket_of(5, 40), bucket_of(1, 3)
    ((8, 64), (1, 16))
    """
    return 1 << (num_seqs - 1).bit_length(), max(16, 1 << (max_pages - 1).bit_length())


def empty_bucket(rows: int, max_pages: int, device: torch.device, backend: Backend) -> Batch:
    """A batch of ``rows`` padding sequences, with a plan of its own by ``backend``."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    attention = AttentionBatch(
        slot_mapping=zeros(rows),  # slots of NULL_PAGE
        page_table=zeros(rows, max_pages, dtype=torch.int32),
        seq_lens=zeros(rows, dtype=torch.int32) + 1,
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
        # One new token each, for ever: known without asking the device.
        known_lens=([1] * rows, list(range(rows + 1))),
    )
    plan = backend.plan(attention)
    return Batch(zeros(1, rows), zeros(1, rows), torch.arange(rows, device=device), plan)


def fill_bucket(bucket: Batch, batch: Batch) -> None:
    """Copy a decode batch over the first rows of ``bucket``; the rest becomes padding."""
    num_seqs, max_pages = batch.attention.page_table.shape
    ours, theirs = bucket.attention, batch.attention
    # Padding begins with a token of the batch: what no one asked for may give NaN.
    for target, source, padding in (
        (bucket.input_ids[0], batch.input_ids[0], batch.input_ids[0, 0]),
        (bucket.positions[0], batch.positions[0], 0),
        (ours.slot_mapping, theirs.slot_mapping, 0),
        (ours.seq_lens, theirs.seq_lens, 1),
    ):
        target[num_seqs:] = padding
        target[:num_seqs].copy_(source)
    ours.page_table.fill_(NULL_PAGE)
    ours.page_table[:num_seqs, :max_pages].copy_(theirs.page_table)


def capture_cuda(compute: Callable[[], Tensor], pool: Any = None) -> Callable[[], Tensor]:
    """Capture ``compute`` as a CUDA graph; the result replays it and gives the same tensor.

    Args:
        pool: memory that graphs share, as ``torch.cuda.graph_pool_handle`` gives it; right where
            none is replayed before the last one's tensor was copied.
    Raises:
        RuntimeError: ``compute`` cannot be captured; the current stream is as it was.
    """
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # kernels compile and libraries allocate before the capture
        for _ in range(2):
            compute()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads of the process may go on using the GPU.
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            out = compute()
    finally:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DecodeGraphs:
    """Runs decode batches through captured steps; plainly once a capture has failed.

    Args:
        compute: a step without host synchronisation: logits of a batch, [num_seqs, vocab_size].
        capture: how a step is captured; tests on a CPU pass one that only calls it.
    """

    def __init__(
        self,
        compute: Callable[[Batch], Tensor],
        capture: Capture = capture_cuda,
    ) -> None:
        self._compute = compute
        self._capture = capture
        self._captured: dict[tuple[int, int], tuple[Batch, Callable[[], Tensor]]] = {}
        self._can_capture = True

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, batch: Batch) -> Tensor:
        """Logits of a decode batch, [num_seqs, vocab_size]; captures its bucket on first use."""
        num_seqs, max_pages = batch.attention.page_table.shape
        key, device = bucket_of(num_seqs, max_pages), batch.input_ids.device
        with _on(device):
            if key not in self._captured and self._can_capture:
                bucket = empty_bucket(*key, device, batch.plan.backend)
                # Captured over padding alone: warming up writes to no page of a sequence.
                bucket.input_ids.copy_(batch.input_ids[:, :1])
                try:
                    self._captured[key] = bucket, self._capture(lambda: self._compute(bucket))
                except RuntimeError as error:  # torch's, for all that cannot be captured
                    self._can_capture = False
                    logger.warning(
                        "RADIXKV_CUDA_GRAPHS: a decode step could not be captured (%s); new "
                        "sizes run without graphs",
                        error,
                    )
            if key not in self._captured:
                return self._compute(batch)
            bucket, replay = self._captured[key]
            fill_bucket(bucket, batch)
            return replay()[:num_seqs].clone()
