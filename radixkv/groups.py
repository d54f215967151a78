"""Which pages of a batch are shared by which sequences: the forest of shared runs.

Sequences that begin with the same pages (samples, beams, forks, agents with one system prompt)
form a tree over the columns of the page table. Each of its edges is a `SharedRun`: attention
reads its pages once for all of its sequences. Only NumPy; a backend may ignore it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class SharedRun(NamedTuple):
    """Columns ``start : stop`` of the page table, which hold the same pages for ``seqs``.

    Every new token of these sequences sees all of these pages (but for a sliding window).

    Attributes:
        start, stop: columns of the page table, in pages from position 0.
        seqs: rows of the page table, at least two, in no order. [num_seqs] int64.
    """

    start: int
    stop: int
    seqs: NDArray[np.int64]


def shared_runs(
    page_table: NDArray[np.int32],
    seq_lens: NDArray[Any] | Sequence[int],
    query_lens: NDArray[Any] | Sequence[int],
    page_size: int,
) -> tuple[SharedRun, ...]:
    """`find_runs` over the pages that lie wholly before each sequence's new tokens.

    Args:
        page_table: page ids of each sequence. [num_seqs, max_pages].
        seq_lens: tokens of each sequence after this step; query_lens: new ones. [num_seqs].
    """
    return find_runs(page_table, (np.asarray(seq_lens) - np.asarray(query_lens)) // page_size)


class _Found(NamedTuple):
    """Runs, and what they were found in."""

    page_table: NDArray[np.int32]
    num_pages: NDArray[np.int64]
    shared_pages: NDArray[np.int64]
    runs: tuple[SharedRun, ...]

    def hold(self, page_table: NDArray[np.int32], num_pages: NDArray[np.int64]) -> bool:
        """Whether these are the runs of ``page_table`` as well."""
        num_seqs, widest = self.page_table.shape
        if len(page_table) != num_seqs or page_table.shape[1] < widest:
            return False
        grown = num_pages - self.num_pages
        # What a sequence gets may be shared if all that it had was.
        if grown.min() < 0 or ((grown > 0) & (self.shared_pages == self.num_pages)).any():
            return False
        changed = np.flatnonzero(page_table[:, :widest] != self.page_table)
        seqs, columns = changed // max(1, widest), changed % max(1, widest)
        return bool((columns >= self.num_pages[seqs]).all())


class RunFinder:
    """`shared_runs` of one step after another, found anew only where that may change them.

    A step in which sequences only grew has the runs of the one before. Any number of threads
    may share a finder.
    """

    def __init__(self) -> None:
        self._last: _Found | None = None

    def shared_runs(
        self,
        page_table: NDArray[np.int32],
        seq_lens: NDArray[Any] | Sequence[int],
        query_lens: NDArray[Any] | Sequence[int],
        page_size: int,
    ) -> tuple[SharedRun, ...]:
        """As the function of this name."""
        num_pages = (np.asarray(seq_lens) - np.asarray(query_lens)) // page_size
        last = self._last
        if last is not None and last.hold(page_table, num_pages):
            return last.runs
        runs = find_runs(page_table, num_pages)
        shared_pages = np.zeros(len(num_pages), np.int64)
        for run in runs:  # parents first
            shared_pages[run.seqs] = run.stop
        table = page_table[:, : num_pages.max(initial=0)].copy()
        self._last = _Found(table, num_pages, shared_pages, runs)
        return runs


def find_runs(
    page_table: NDArray[np.int32],
    num_pages: NDArray[Any] | Sequence[int],
    *,
    min_pages: int = 1,
    min_seqs: int = 2,
) -> tuple[SharedRun, ...]:
    """The forest of runs that at least ``min_seqs`` sequences share, parents first.

    The runs are disjoint: a page of a sequence lies in at most one. They cover: a page lies in
    none only if fewer than ``min_seqs`` sequences share it and all before it, or if it is one
    of the last fewer than ``min_pages`` that its sequences share. A sequence's runs follow one
    another from column 0 without a gap, each with fewer sequences than the one before. Where a
    run would have fewer than ``min_pages``, its pages count to the runs that follow it.

    Args:
        page_table: page ids of each sequence. [num_seqs, max_pages].
        num_pages: leading pages of each sequence that all of its new tokens see. [num_seqs].

    Complexity: O(num_seqs * max_pages) in NumPy, and O(num_seqs) steps where neighbours differ
    in how much they share.

    >>> table = np.array([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 0], [7, 0, 0, 0]], np.int32)
    >>> for run in find_runs(table, [3, 3, 3, 1]):
    ...     print(run.start, run.stop, sorted(run.seqs.tolist()))
    0 2 [0, 1, 2]
    2 3 [0, 1]
    """
    counts = np.asarray(num_pages, dtype=np.int64)
    num_seqs = len(page_table)
    widest = int(counts.max(initial=0))
    if num_seqs < max(2, min_seqs) or widest < min_pages:
        return ()
    table = np.ascontiguousarray(page_table[:, :widest], dtype=np.int32)
    order, table, shared = _sort(table)
    limits = counts[order]
    limits = np.minimum(limits[1:], limits[:-1])
    if (shared > limits).any():
        # A sequence that ends early must not stand between two that share more: it goes last.
        table = np.where(np.arange(widest) < counts[order][:, None], table, np.int32(-1))
        again, _, shared = _sort(np.ascontiguousarray(table))
        order = order[again]
        limits = counts[order]
        limits = np.minimum(limits[1:], limits[:-1])
        shared = np.minimum(shared, limits)
    return _runs(order, shared, min_pages, min_seqs)


def _sort(
    table: NDArray[np.int32],
) -> tuple[NDArray[np.intp], NDArray[np.int32], NDArray[np.int64]]:
    """Rows that begin alike made neighbours: their order, the rows, what neighbours share."""
    rows = table.view(f"V{table.itemsize * table.shape[1]}").ravel()
    order = np.argsort(rows, kind="stable")
    table = table[order]
    same = table[1:] == table[:-1]
    shared = same.argmin(axis=1)
    shared[same[np.arange(len(same)), shared]] = table.shape[1]  # no column differs
    return order, table, shared.astype(np.int64)


def _runs(
    order: NDArray[np.intp], shared: NDArray[np.int64], min_pages: int, min_seqs: int
) -> tuple[SharedRun, ...]:
    """The runs of sorted rows, of which neighbours share ``shared`` leading columns."""
    # Intervals of rows that share at least `depth` columns, as (first row, -after the last, depth):
    # in ascending order an interval comes before those inside it.
    intervals: list[tuple[int, int, int]] = []
    depths, firsts = [0], [0]  # of the intervals that are open, deeper and deeper
    changes = np.concatenate([[0], np.flatnonzero(shared[1:] != shared[:-1]) + 1])
    ends = zip(changes.tolist(), shared[changes].tolist(), strict=True)
    for place, depth in (*ends, (len(shared), 0)):
        first = place
        while depths[-1] > depth:
            first = firsts.pop()
            intervals.append((first, -place - 1, depths.pop()))
        if depths[-1] < depth:
            depths.append(depth)
            firsts.append(first)
    intervals.sort()
    runs: list[SharedRun] = []
    around = [(len(order), 0)]  # (after the last row, column after the last) of runs around a row
    for first, minus_after, depth in intervals:
        while around[-1][0] <= first:
            around.pop()
        start, after = around[-1][1], -minus_after
        if after - first >= min_seqs and depth - start >= min_pages:
            runs.append(SharedRun(start, depth, order[first:after]))
            around.append((after, depth))
    return tuple(runs)


__all__ = ["RunFinder", "SharedRun", "find_runs", "shared_runs"]
