"""Partial results: what attention over some splits of a query row leaves, and their merge.

A partial result is float32 [LANES + v_head_dim in whole vectors]: the largest score, the sum of
exp(score - largest), then from LANES on the weighted sum of rows of V.
"""

from __future__ import annotations

import math

import numpy as np

from radixkv_kernels.compile_cache import compile_helper
from radixkv_kernels.cpu.formats import RowFormat
from radixkv_kernels.cpu.memory import get_f32
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import fill, scale_add


def partial_bytes(v: RowFormat) -> int:
    """Bytes of one partial result."""
    return 4 * LANES * (1 + v.num_vectors)


@compile_helper
def partial_at(args, num_bytes, q_head, number):  # type: ignore[no-untyped-def]
    """The address of the ``number``-th of the step's partial results of a query head."""
    return args.partials + num_bytes * (q_head * args.num_partials + number)


@compile_helper
def merge_partials(partials, num_bytes, num, dim_vectors, sink, target):  # type: ignore[no-untyped-def]
    """Merge ``num`` partial results of one query row into target[:]; 1 / sum of weights."""
    largest = sink
    for i in range(num):
        largest = max(largest, get_f32(partials + i * num_bytes, 0))
    total = np.float32(0.0)
    if sink > -np.inf:
        total = np.float32(math.exp(sink - largest))
    fill(target, np.float32(0.0), dim_vectors)
    for i in range(num):
        row = partials + i * num_bytes
        m = get_f32(row, 0)
        if m > -np.inf:
            w = np.float32(math.exp(m - largest))
            total += w * get_f32(row, 1)
            scale_add(target, np.float32(1.0), row + 4 * LANES, w, dim_vectors)
    return np.float32(1.0) / total


@compile_helper
def sink_of(args, q_head):  # type: ignore[no-untyped-def]
    """The logit of a query head that takes part in its softmax alone; -inf: none."""
    sink = np.float32(-np.inf)
    if args.sinks != 0:
        sink = get_f32(args.sinks, q_head)
    return sink
