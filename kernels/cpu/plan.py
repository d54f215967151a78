"""Which tasks a batch is split into; no kernel is known here, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MAX_DECODE_GROUP = 8  # more query heads a KV head than this pay as matrix products
SPLIT = 512  # tokens a decode task reads
ROW_QUERIES = 16  # query tokens that take turns over a split while it is in cache
TILE_ROWS = 128  # query rows (tokens x heads) an extend task holds at most
SHARED_ROWS = 32  # query rows (tokens x heads) that are scored at once, to stay in cache
MOST_SHARED_ROWS = 512  # of a task: unpacking is cheap beside them, and threads end together


@dataclass(frozen=True)
class Pass:
    """Tasks whose partial results are kept at the same time; see `ARGS`.

    Attributes:
        rows: tasks of the decode kernel. [n, 5] int32.
        num_partials: partial results of a query head.
        names: which of "decode" and "extend" the rows are.
        shared: tasks of whole splits that several queries read. [n, 5] int32.
        most_rows: query rows of the largest of those.
        queries: the queries of those, task by task. [m, 3] int32.
        done: first partial result and number of shared splits of each decode row that has
            some. [n, 2] int64.
    """

    rows: np.ndarray
    num_partials: int
    names: tuple[str, ...]
    shared: np.ndarray
    most_rows: int
    queries: np.ndarray
    done: np.ndarray


@dataclass(frozen=True)
class Plan:
    """The tasks of one batch. One a step, whatever the number of layers.

    Attributes:
        passes: in any order, one after another.
        most_splits: of a task that takes all splits by itself.
        tiles: tasks of the extend kernel. [n, 5] int32.
        tokens: tokens that the tasks read, windows aside, of each KV head.
        tokens_alone: the same without shared splits.
    """

    passes: tuple[Pass, ...]
    most_splits: int
    tiles: np.ndarray
    tokens: int
    tokens_alone: int


MAX_KEPT = 2048
"""Partial results of shared splits that a pass keeps for new tokens of chunks, a query head."""


def make_plan(
    seq_lens: Sequence[int],
    cu_seqlens_q: Sequence[int],
    group: int,
    *,
    in_rows: bool,
    shared: Sequence[tuple[np.ndarray, int, int]] = (),
    num_kv_heads: int = 1,
) -> Plan:
    """Split a batch into tasks; each sequence by its own lengths alone.

    Args:
        seq_lens: KV length of each sequence after this step.
        cu_seqlens_q: cumulative new tokens, first 0.
        group: query heads a KV head.
        in_rows: several new tokens run through the decode kernel too (see `extends_in_rows`).
        shared: (sequences, first split, split after the last) of runs of splits that are the same
            pages for all of these sequences. A sequence's runs begin at split 0 and leave no gap.
            All new tokens of several sequences see a run whole (but for a sliding window); a
            sequence's own run may hold those tokens, if ``in_rows``.
        num_kv_heads: with few shared splits of few heads, every thread still gets some work.
    Raises:
        ValueError: more new tokens than the sequence has; runs of a sequence with a gap.
    """
    queries_per_task = max(1, TILE_ROWS // group)
    num_shared = np.zeros(len(seq_lens), np.int64)
    for seqs, start, stop in shared:
        if (num_shared[seqs] != start).any():
            raise ValueError(f"shared: expected runs without a gap, got one that begins at {start}")
        num_shared[seqs] = stop
    tiles: list[tuple[int, ...]] = []
    passes: list[Pass] = []
    rows: list[tuple[int, ...]] = []
    queries: list[tuple[int, int, int, int]] = []  # row in q, position, first partial, sequence
    done: list[tuple[int, int]] = []
    names: set[str] = set()
    num_partials = num_kept = most_splits = tokens = tokens_alone = 0

    def end_pass() -> None:
        nonlocal num_partials, num_kept, tokens
        if rows:
            members = np.array(queries, np.int32).reshape(-1, 4)
            most = 1 << 30 if in_rows else max(1, TILE_ROWS // group)
            tasks, members = _shared_tasks(shared, members, group, num_kv_heads, most)
            if len(tasks):
                last = members[tasks[:, 3] + tasks[:, 4] - 1, 1]
                read_to = np.minimum(tasks[:, 2] * SPLIT, last + 1)
                tokens += int((read_to - tasks[:, 1] * SPLIT).sum())
            passes.append(
                Pass(
                    np.array(rows, np.int32).reshape(-1, 5),
                    num_partials,
                    tuple(sorted(names)),
                    tasks,
                    group * int(tasks[:, 4].max(initial=0)),
                    members,
                    np.array(done, np.int64).reshape(-1, 2),
                )
            )
        for kept in (rows, queries, done, names):
            kept.clear()
        num_partials = num_kept = 0

    for seq, seq_len in enumerate(seq_lens):
        begin = cu_seqlens_q[seq]
        query_len = cu_seqlens_q[seq + 1] - begin
        if not 0 <= query_len <= seq_len:
            raise ValueError(
                f"seq_lens: expected at least the {query_len} new tokens of sequence {seq}, "
                f"got {seq_len}; seq_lens counts them too"
            )
        if query_len == 0:
            continue
        kept = int(num_shared[seq])
        if group > MAX_DECODE_GROUP or (query_len > 1 and not in_rows):
            # Every query alike, so that it does not matter how a prompt is cut.
            for first_query in range(0, query_len, queries_per_task):
                tiles.append((seq, first_query, 0, 1, 0))
                read = min(seq_len, seq_len - query_len + first_query + queries_per_task)
                tokens, tokens_alone = tokens + read, tokens_alone + read
        elif query_len == 1:
            splits = -(-seq_len // SPLIT)
            tokens, tokens_alone = tokens + seq_len - kept * SPLIT, tokens_alone + seq_len
            rows.extend((seq, 0, split, splits, num_partials) for split in range(kept, splits))
            if kept:
                queries.append((begin, seq_len - 1, num_partials, seq))
                done.append((num_partials, kept))
            num_partials += splits
            names.add("decode")
        else:
            for first_query in range(0, query_len, ROW_QUERIES):
                first_pos = seq_len - query_len + first_query
                read = min(seq_len, first_pos + ROW_QUERIES)
                splits = -(-read // SPLIT)
                kept = min(int(num_shared[seq]), splits)
                tokens += max(0, read - kept * SPLIT)
                tokens_alone += read
                most_splits = max(most_splits, splits)
                base = -1
                if kept:
                    if num_kept >= MAX_KEPT:
                        end_pass()
                    base = -2 - num_partials
                    for query in range(min(ROW_QUERIES, query_len - first_query)):
                        token = begin + first_query + query
                        queries.append((token, first_pos + query, num_partials, seq))
                        num_partials += kept
                        num_kept += kept
                rows.append((seq, first_query, kept, splits, base))
                names.add("extend")
    end_pass()
    starts = np.array(tiles, np.int32).reshape(-1, 5)
    return Plan(tuple(passes), most_splits, starts, tokens, tokens_alone)


def _shared_tasks(
    shared: Sequence[tuple[np.ndarray, int, int]],
    queries: np.ndarray,
    group: int,
    num_kv_heads: int,
    most_queries: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The tasks of shared splits for these queries, and the queries in the order of the tasks.

    A split is read once, unless that leaves threads without work, or there are more queries than
    a task can hold.
    """
    tasks: list[tuple[int, int, int, int, int]] = []
    members: list[np.ndarray] = []
    num_members = 0
    num_threads = torch.get_num_threads()
    num_splits = num_kv_heads * sum(stop - start for _, start, stop in shared)
    parts = -(-3 * num_threads // max(1, num_splits))
    for seqs, start, stop in shared:
        mine = queries[np.isin(queries[:, 3], seqs)]
        if not len(mine):
            continue
        mine = mine[np.argsort(mine[:, 1], kind="stable")]
        num_rows = len(mine) * group
        num_pieces = max(
            1,
            min(parts, num_rows // SHARED_ROWS),
            -(-num_rows // MOST_SHARED_ROWS),
            -(-len(mine) // most_queries),
        )
        # A task quantizes its queries once for all of its splits.
        most_splits = max(1, min(8, num_pieces * num_splits // (8 * num_threads)))
        # The last pieces see most: taken first, they leave no thread behind.
        for piece in reversed(np.array_split(mine, num_pieces)):
            # Splits that all of these queries see, then one by one those that the later ones do.
            seen = piece[[0, -1], 1] // SPLIT + 1
            whole, after = (max(start, min(stop, int(count))) for count in seen)
            for first in (*range(start, whole, most_splits), *range(whole, after)):
                part = piece[np.searchsorted(piece[:, 1], first * SPLIT) :]
                last = min(first + most_splits, whole) if first < whole else first + 1
                tasks.append((seqs[0], first, last, num_members, len(part)))
                members.append(part[:, :3])
                num_members += len(part)
    if not tasks:
        return np.zeros((0, 5), np.int32), np.zeros((0, 3), np.int32)
    return (
        np.array(tasks, np.int32),
        np.ascontiguousarray(np.concatenate(members), np.int32),
    )
