"""What a kernel is told: one record of addresses, strides and sizes, and its counters.

Addresses and strides of pages are in bytes, strides of rows (q, out, new K and V) in elements.
A record's fields are those of the named groups that it is made of, one after another.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, get_type_hints

import numba
import numpy as np
import torch
from numba import types


class PagePlaces(NamedTuple):
    """Where a layer's pages lie; right as long as their tensors live. A head's page is contiguous.

    Strides: ``k_page`` from page to page of K, ``k_head`` from head to head, ``ks_...`` of K's
    scales; as of V.
    """

    k_pages: int
    v_pages: int
    k_scale: int
    v_scale: int
    k_page: int
    k_head: int
    v_page: int
    v_head: int
    ks_page: int
    ks_head: int
    vs_page: int
    vs_head: int
    num_pages: int
    page_size: int
    num_kv_heads: int


def page_places(
    k_pages: torch.Tensor, v_pages: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> PagePlaces:
    """Where these pages lie: [num_pages, num_kv_heads, page_size, row] each."""
    num_pages, num_kv_heads, page_size, _ = k_pages.shape
    addresses = [t.data_ptr() for t in (k_pages, v_pages, k_scale, v_scale)]
    strides = [
        stride * t.element_size()
        for t in (k_pages, v_pages, k_scale, v_scale)
        for stride in t.stride()[:2]
    ]
    return PagePlaces(*addresses, *strides, num_pages, page_size, num_kv_heads)


class RowPlaces(NamedTuple):
    """Where a call's queries and outputs lie."""

    q: int
    out: int
    q_token: int
    q_head: int
    out_token: int
    out_head: int


class RuleTerms(NamedTuple):
    """How scores become weights; addresses and numbers that are 0 are not there."""

    sinks: int  # [num_q_heads] float32
    slopes: int  # [num_q_heads] float32
    window: int
    scale: float
    softcap: float


class CallMemory(NamedTuple):
    """What a call works in.

    ``counters`` is int64: [0] threads begun, [1] next task, [2] a bad page (+ 1 if not negative),
    [4] tokens read (of each KV head), then from COUNTERS on one a (partial result, KV head) for
    the merge.
    """

    scratch: int
    partials: int
    counters: int


class StepTables(NamedTuple):
    """What a step's layers have in common.

    ``tasks`` is [num_tasks, 5] int32: sequence, first query, split, number of splits, number of
    its first split among all partial results (-1: the task takes all splits by itself; below -1:
    but for those that are shared, from partial result -2 - this on).

    For shared splits ``tasks`` is [num_tasks, 5]: sequence whose pages are read, first split,
    split after the last, first query, number of queries (``most_rows`` query rows at most);
    ``queries`` is [num_queries, 3] int32: row in q, position, number of its first split among all
    partial results; a task's positions ascend.
    """

    page_table: int  # [num_seqs, max_pages] int32, ``table_row`` elements from row to row
    table_row: int
    seq_lens: int
    cu_seqlens_q: int
    group: int
    rotate_k: int
    rotate_v: int
    tasks: int = 0
    num_tasks: int = 0
    scratch_bytes: int = 0  # of each thread
    num_partials: int = 0  # of a query head
    tile_queries: int = 0
    partials_offset: int = 0  # in a thread's scratch: a tile's own partial results
    queries: int = 0
    most_rows: int = 0


class NewRows(NamedTuple):
    """Rows that are written: where they lie, and to which slots they go."""

    k_rows: int
    k_rows_token: int
    k_rows_head: int
    v_rows: int
    v_rows_token: int
    v_rows_head: int
    slots: int  # [num_tokens] int64
    num_tokens: int
    num_tasks: int
    rotate_k: int
    rotate_v: int


class Center(NamedTuple):
    """What is taken off K: float32 rows of the heads, ``k_center_head`` bytes apart."""

    k_center: int
    k_center_head: int


class WriteTurn(NamedTuple):
    """Which halves of the write kernel run.

    ``counters`` is int64: [0] next task to check, [1] next task to write, [2] a bad slot (+ 1 if
    not negative), [3] whether a row is not finite.
    """

    checks: int
    writes: int
    counters: int


def _fields(*groups: type[NamedTuple]) -> list[tuple[str, str]]:
    kinds = {int: "i8", float: "f4"}
    return [(name, kinds[kind]) for g in groups for name, kind in get_type_hints(g).items()]


def _packer(*groups: type[NamedTuple]) -> struct.Struct:
    return struct.Struct(
        "=" + "".join("q" if kind == "i8" else "f" for _, kind in _fields(*groups))
    )


def _signature(record: np.dtype) -> object:
    return types.void(types.CPointer(numba.from_dtype(record)))


LAYER = _packer(RowPlaces, PagePlaces, RuleTerms, CallMemory)
"""The first part of `ARGS`: what differs from layer to layer."""
STEP = _packer(StepTables)
"""The second part."""
ARGS = np.dtype(_fields(RowPlaces, PagePlaces, RuleTerms, CallMemory, StepTables))
"""What attention is told."""
SIGNATURE = _signature(ARGS)
COUNTERS = 8  # the merge counters begin here
COUNTED = struct.Struct("=3q")  # a bad page, nothing, tokens read

WRITE_ARGS = np.dtype(_fields(NewRows, Center, PagePlaces, WriteTurn))
"""What the write kernel is told."""
WRITE_SIGNATURE = _signature(WRITE_ARGS)


def bad_number(counter: int) -> int:
    """The number that a kernel noted: 0 is none, so those from 0 on are noted as 1 more."""
    return counter - 1 if counter > 0 else counter
