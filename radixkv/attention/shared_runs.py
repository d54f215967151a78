"""Which pages of a batch are shared by which sequences: its shared-prefix groups.

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


class _Step(NamedTuple):
    """One step's pages, how many of them are whole pages before the new tokens, and the runs.

    ``shared_pages``: how many of a sequence's pages lie in a run.
    """

    page_ids: Sequence[NDArray[np.int32]]
    page_table: NDArray[np.int32]
    num_pages: list[int]
    shared_pages: list[int]
    runs: tuple[SharedRun, ...]

    def hold(
        self, page_ids: Sequence[NDArray[np.int32]], num_pages: list[int], changed: list[int]
    ) -> bool:
        """Whether these are the runs of ``page_ids`` as well, of which those at ``changed`` differ.

        They are if sequences only grew, each by pages after a page of its own: what follows a
        shared page may be shared.
        """
        for i in changed:
            count = self.num_pages[i]
            if page_ids[i][:count].tobytes() != self.page_ids[i][:count].tobytes():
                return False
        return not any(
            new < old or (new > old and shared == old)
            for new, old, shared in zip(num_pages, self.num_pages, self.shared_pages, strict=True)
        )


class PageTables:
    """The page tables of one step after another, and their runs; what did not change is kept.

    A step in which no sequence got a page has the table of the one before, and one in which
    sequences only grew has its runs. Any number of threads may share this.

    Args:
        with_runs: whether runs are looked for.
    """

    def __init__(self, *, with_runs: bool = True) -> None:
        self._with_runs = with_runs
        self._last: _Step | None = None

    def lay_out(
        self, page_ids: Sequence[NDArray[np.int32]], num_pages: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], tuple[SharedRun, ...]]:
        """The page table of a step, padded with page 0 (`NULL_PAGE`), and its `find_runs`.

        Args:
            page_ids: of each sequence, at least one. An array that was passed may not be written
                afterwards: passed again it stands for the same pages.
            num_pages: whole pages of each sequence before its new tokens. [num_seqs].

        Returns:
            The table, [num_seqs, max_pages], not to be written; and the runs.
        """
        last, counts = self._last, num_pages.tolist()
        page_table: NDArray[np.int32] | None = None
        changed = list(range(len(page_ids)))
        if last is not None and len(last.page_ids) == len(page_ids):
            both = enumerate(zip(page_ids, last.page_ids, strict=True))
            changed = [i for i, (new, old) in both if new is not old]
            if not changed:
                page_table = last.page_table
                if counts == last.num_pages:
                    return page_table, last.runs
        else:
            last = None
        if page_table is None:
            page_table = np.zeros((len(page_ids), max(map(len, page_ids))), dtype=np.int32)
            if last is not None and len(changed) < len(page_ids):
                width = min(page_table.shape[1], last.page_table.shape[1])
                page_table[:, :width] = last.page_table[:, :width]
            for i in changed:
                page_table[i, : len(page_ids[i])] = page_ids[i]
                page_table[i, len(page_ids[i]) :] = 0
        if last is not None and last.hold(page_ids, counts, changed):
            runs, shared_pages = last.runs, last.shared_pages
        else:
            runs = find_runs(page_table, num_pages) if self._with_runs else ()
            shared_pages = [0] * len(page_ids)
            for run in runs:  # parents first
                for seq in run.seqs.tolist():
                    shared_pages[seq] = run.stop
        self._last = _Step(page_ids, page_table, counts, shared_pages, runs)
        return page_table, runs


def find_runs(
    page_table: NDArray[np.int32],
    num_pages: NDArray[Any] | Sequence[int],
    *,
    min_pages: int = 1,
    min_seqs: int = 2,
) -> tuple[SharedRun, ...]:
    """The groups that at least ``min_seqs`` sequences share, parents first.

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


__all__ = ["PageTables", "SharedRun", "find_runs"]
