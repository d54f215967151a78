"""Shared runs: the forest of pages that sequences share, and attention that reads them once."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.groups import SharedRun, find_runs


def random_forest(rng: np.random.Generator, num_seqs: int, depth: int, fan_out: int):
    """Page tables of sequences that fork and fork again, in random order; pages seen by each."""
    next_page = 1
    tables: list[list[int]] = []

    def fresh(count: int) -> list[int]:
        nonlocal next_page
        next_page += count
        return list(range(next_page - count, next_page))

    def grow(prefix: list[int], level: int, leaves: int) -> None:
        prefix = prefix + fresh(int(rng.integers(0, 5)))
        if level == depth or leaves == 1:
            tables.extend(prefix + fresh(int(rng.integers(0, 4))) for _ in range(leaves))
            return
        children = int(rng.integers(1, min(fan_out, leaves) + 1))
        cuts = np.sort(rng.integers(0, leaves + 1, children - 1)).tolist()
        for low, high in zip([0, *cuts], [*cuts, leaves], strict=True):
            if high > low:
                grow(prefix, level + 1, high - low)

    left = num_seqs
    while left:
        leaves = int(rng.integers(1, left + 1))
        grow([], 0, leaves)
        left -= leaves
    rng.shuffle(tables)
    width = max(1, *map(len, tables))
    page_table = np.zeros((num_seqs, width), np.int32)
    num_pages = np.zeros(num_seqs, np.int64)
    for i, table in enumerate(tables):
        page_table[i, : len(table)] = table
        num_pages[i] = rng.integers(0, len(table) + 1) if rng.random() < 0.3 else len(table)
    return page_table, num_pages


def sharers(page_table: np.ndarray, num_pages: np.ndarray, seq: int, column: int) -> list[int]:
    """By brute force: who begins with the same pages, up to this one."""
    mine = page_table[seq, : column + 1].tolist()
    return [
        other
        for other in range(len(page_table))
        if num_pages[other] > column and page_table[other, : column + 1].tolist() == mine
    ]


@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(0, 5), st.integers(1, 8))
def test_runs_are_what_brute_force_finds(seed, num_seqs, depth, fan_out) -> None:
    page_table, num_pages = random_forest(np.random.default_rng(seed), num_seqs, depth, fan_out)
    owner: dict[tuple[int, int], SharedRun] = {}
    for run in find_runs(page_table, num_pages):
        for seq in run.seqs.tolist():
            for column in range(run.start, run.stop):
                assert (seq, column) not in owner, "runs are disjoint"
                owner[seq, column] = run
    for seq in range(num_seqs):
        for column in range(num_pages[seq]):
            expected = sharers(page_table, num_pages, seq, column)
            run = owner.get((seq, column))
            if len(expected) < 2:
                assert run is None
            else:
                assert run is not None, "runs cover what is shared"
                assert sorted(run.seqs.tolist()) == expected
    assert all(column < num_pages[seq] for seq, column in owner)


@given(
    st.integers(0, 2**32),
    st.integers(1, 24),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(2, 5),
)
def test_thresholds_leave_runs_nested_and_without_gaps(
    seed, num_seqs, depth, min_pages, min_seqs
) -> None:
    page_table, num_pages = random_forest(np.random.default_rng(seed), num_seqs, depth, 6)
    runs = find_runs(page_table, num_pages, min_pages=min_pages, min_seqs=min_seqs)
    for run in runs:
        assert len(run.seqs) >= min_seqs
        assert run.stop - run.start >= min_pages
        columns = page_table[run.seqs, : run.stop]
        assert (columns == columns[0]).all()
        assert (num_pages[run.seqs] >= run.stop).all()
    for seq in range(num_seqs):
        mine = [run for run in runs if seq in run.seqs]
        assert [run.start for run in mine] == [0, *(run.stop for run in mine)][: len(mine)]
        for outer, inner in pairwise(mine):
            assert set(inner.seqs.tolist()) < set(outer.seqs.tolist())
        end = mine[-1].stop if mine else 0
        for column in range(end + min_pages - 1, num_pages[seq]):
            assert len(sharers(page_table, num_pages, seq, column)) < min_seqs


@pytest.mark.parametrize("num_prompts", [1, 16, 64, 256])
def test_a_step_of_256_sequences_costs_microseconds(num_prompts) -> None:
    page_table = np.zeros((256, 264), np.int32)
    prompt = np.arange(256) * num_prompts // 256
    page_table[:, :256] = 1 + np.arange(256) + 256 * prompt[:, None]
    page_table[:, 256:] = 100_000 + np.arange(256 * 8).reshape(256, 8)
    page_table = np.random.default_rng(0).permutation(page_table)
    taken = []
    for _ in range(20):
        begin = time.perf_counter()
        runs = find_runs(page_table, np.full(256, 260))
        taken.append(time.perf_counter() - begin)
    assert len(runs) == (0 if num_prompts == 256 else num_prompts)
    assert min(taken) < 1e-3  # 0.1 to 0.2 ms where nothing else runs
