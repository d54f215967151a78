"""The kernel for splits that several query rows attend to, in integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from radixkv_kernels.compile_cache import compile_callback, compile_helper
from radixkv_kernels.cpu.formats import RowFormat
from radixkv_kernels.cpu.gather import layout, make_gather
from radixkv_kernels.cpu.memory import (
    add_to,
    fetch_add,
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    put_i64,
)
from radixkv_kernels.cpu.pairs import largest_scales, quantize_query
from radixkv_kernels.cpu.panels import (
    HALF_M,
    PANEL,
    pack_keys,
    pack_values,
    pair_query,
    score_panels,
    sum_panels,
)
from radixkv_kernels.cpu.partials import partial_at, partial_bytes
from radixkv_kernels.cpu.plan import SHARED_ROWS, SPLIT
from radixkv_kernels.cpu.records import SIGNATURE
from radixkv_kernels.cpu.rows import load_query
from radixkv_kernels.cpu.scores import SCORE_LINE, apply_rule, make_quantize
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import TILE_M, fill, find_largest, scale_add, weigh_scores
from radixkv_kernels.cpu.walk import PREFETCH_TOKENS


def _query_bytes(k: RowFormat) -> int:
    return -(-4 * k.num_pairs // 64) * 64


def _layout(k: RowFormat, v: RowFormat) -> tuple[dict[str, int], int]:
    """Byte offsets of the parts of a thread's scratch, and its size; then come the queries."""
    rows, line = SHARED_ROWS + TILE_M, SCORE_LINE
    sizes = {
        "row": 4 * LANES * max(k.num_vectors, v.num_vectors),
        "words": 4 * LANES * max(len(k.word_spans), 1),
        "k_places": 8 * (SPLIT + PREFETCH_TOKENS),
        "v_places": 8 * (SPLIT + PREFETCH_TOKENS),
        "k_factors": max(1, k.num_scales) * line,
        "v_factors": max(1, v.num_scales) * line,
        "v_largest": line,
        "scores": rows * line,
        "weights": rows * v.num_groups * line // 2,
        "worth": 4 * rows * v.num_groups,
        "targets": 8 * rows,
        "nowhere": 4 * LANES * (2 + v.num_vectors),
        "k_panels": SPLIT * 4 * k.num_pairs,
        "v_panels": 2 * SPLIT * PANEL * len(v.word_spans),
    }
    return layout(sizes)


def shared_scratch_bytes(k: RowFormat, v: RowFormat, most_rows: int) -> int:
    """Bytes of scratch that each thread needs for tasks of ``most_rows`` query rows."""
    return _layout(k, v)[1] + (_query_bytes(k) + 4) * (most_rows + TILE_M)


class _Task(NamedTuple):
    """A task of one KV head: ``split`` to ``after_split - 1``, for some of the queries."""

    head: int
    seq: int  # whose pages are read
    split: int
    after_split: int
    query: int
    after_query: int


@compile_helper
def _read_task(args, number):  # type: ignore[no-untyped-def]
    record = 5 * (number // args.num_kv_heads)
    query = np.int64(get_i32(args.tasks, record + 3))
    return _Task(
        number % args.num_kv_heads,
        np.int64(get_i32(args.tasks, record)),
        np.int64(get_i32(args.tasks, record + 1)),
        np.int64(get_i32(args.tasks, record + 2)),
        query,
        query + np.int64(get_i32(args.tasks, record + 4)),
    )


@compile_helper
def query_row(args, query):  # type: ignore[no-untyped-def]
    """The row of q that a query is."""
    return np.int64(get_i32(args.queries, 3 * query))


@compile_helper
def query_pos(args, query):  # type: ignore[no-untyped-def]
    """A query's position in its sequence."""
    return np.int64(get_i32(args.queries, 3 * query + 1))


@compile_helper
def query_partial(args, num_bytes, query, q_head, split):  # type: ignore[no-untyped-def]
    """Where the partial result of a query's head over a split belongs."""
    return partial_at(args, num_bytes, q_head, get_i32(args.queries, 3 * query + 2) + split)


def _make_load_queries(k: RowFormat, at: dict[str, int], at_q: int) -> Any:
    """A helper that quantizes a task's queries, once for all of its splits."""
    fmt, head_dim, q_bytes = k.fmt, k.head_dim, _query_bytes(k)
    at_row, at_words, tile_m = at["row"], at["words"], TILE_M

    @compile_helper
    def load_queries(args, memory, task):  # type: ignore[no-untyped-def]
        row, words, q = memory + at_row, memory + at_words, memory + at_q
        q_scales = q + (args.most_rows + tile_m) * q_bytes
        for r in range((task.after_query - task.query) * args.group):
            token = query_row(args, task.query + r // args.group)
            q_head = task.head * args.group + r % args.group
            source = args.q + 4 * (token * args.q_token + q_head * args.q_head)
            load_query(head_dim, source, row, args.scale, args.rotate_k)
            scale = quantize_query(fmt, head_dim, row, words)
            pair_query(fmt, head_dim, words, q + r * q_bytes)
            put_f32(q_scales, r, scale)

    return load_queries


def _make_pack(k: RowFormat, v: RowFormat, at: dict[str, int]) -> Any:
    """A helper that unpacks the gathered first tokens of a split into panels."""
    k_fmt, k_dim, v_fmt, v_dim = k.fmt, k.head_dim, v.fmt, v.head_dim
    v_scales, v_int4, line, ahead, panel = (
        v.num_scales,
        v.is_int4,
        SCORE_LINE,
        PREFETCH_TOKENS,
        PANEL,
    )
    at_k_places, at_v_places = at["k_places"], at["v_places"]
    at_v_factors, at_v_largest = at["v_factors"], at["v_largest"]
    at_k_panels, at_v_panels = at["k_panels"], at["v_panels"]

    @compile_helper
    def pack(memory, num_tokens):  # type: ignore[no-untyped-def]
        k_places, v_places = memory + at_k_places, memory + at_v_places
        v_factors, last = memory + at_v_factors, num_tokens - 1
        # What fills the last panel is multiplied, by weights of 0.
        packed = (num_tokens + panel - 1) // panel * panel
        for i in range(num_tokens, packed):
            put_i64(k_places, i, get_i64(k_places, last))
            put_i64(v_places, i, get_i64(v_places, last))
            for n in range(v_scales):
                put_f32(v_factors + n * line, i, np.float32(0.0))
        if v_int4:
            largest_scales(v_scales, v_factors, line, memory + at_v_largest, packed // LANES)
        for i in range(ahead):
            put_i64(k_places, packed + i, get_i64(v_places, min(i, last)))
            put_i64(v_places, packed + i, get_i64(v_places, last))
        pack_keys(k_fmt, k_dim, k_places, packed // 8, ahead, memory + at_k_panels)
        pack_values(v_fmt, v_dim, v_places, packed // 2, ahead, memory + at_v_panels)

    return pack


def _make_weigh(k: RowFormat, v: RowFormat, at: dict[str, int]) -> Any:
    """A helper that makes int16 weights of a query row's scores: the softmax of one split."""
    k_int4, v_groups, line, split_tokens = k.is_int4, v.num_groups, SCORE_LINE, SPLIT
    at_targets = at["targets"]
    at_scores, at_v_factors, at_weights = at["scores"], at["v_factors"], at["weights"]
    at_worth, at_v_sizes = at["worth"], at["v_largest"] if v.is_int4 else at["v_factors"]
    quantize = make_quantize(v, 0)

    @compile_helper
    def weigh(args, memory, r, q_head, scale, distance, num_vectors):  # type: ignore[no-untyped-def]
        """Of row ``r``; the split begins ``distance`` from the query (<= 0: before it).

        Leaves the largest score and the sum of exp in its partial result.
        """
        seen, skipped = min(split_tokens, max(np.int64(0), 1 - distance)), np.int64(0)
        if args.window > 0:
            skipped = min(seen, max(np.int64(0), 1 - distance - args.window))
        mine = memory + at_scores + r * line
        partial = get_i64(memory + at_targets, r) - 4 * LANES
        if k_int4:
            scale_add(mine, scale, mine, np.float32(0.0), num_vectors)
        apply_rule(args, mine, q_head, distance, skipped, seen, num_vectors)
        largest, heaviest = np.float32(-np.inf), np.float32(0.0)
        if skipped == seen:
            fill(mine, np.float32(0.0), num_vectors)
            put_f32(partial, 1, np.float32(0.0))
        else:
            largest = find_largest(mine, num_vectors)
            heaviest = weigh_scores(mine, largest, memory + at_v_sizes, num_vectors, partial + 4)
        put_f32(partial, 0, largest)
        first = r * v_groups
        weights, worth = memory + at_weights + first * (line // 2), memory + at_worth + 4 * first
        quantize(
            mine, heaviest, memory + at_v_factors, weights, worth, np.int64(0), num_vectors, False
        )

    return weigh


def make_shared(k: RowFormat, v: RowFormat) -> Any:
    """The kernel for splits that several query rows attend to: their partial results.

    The queries of a task stand in the order of their positions; the last one sees all that is
    read of a split, each one what lies up to its own token.
    """
    num_bytes, split_tokens, most_rows = partial_bytes(v), SPLIT, SHARED_ROWS
    half_tile, panel, line, half_line = HALF_M, PANEL, SCORE_LINE, SCORE_LINE // 2
    q_bytes = _query_bytes(k)
    k_fmt, k_dim, v_fmt, v_dim = k.fmt, k.head_dim, v.fmt, v.head_dim
    at, at_q = _layout(k, v)
    at_targets, at_nowhere, at_scores = at["targets"], at["nowhere"], at["scores"]
    at_k_panels, at_k_factors, at_v_panels = at["k_panels"], at["k_factors"], at["v_panels"]
    at_weights, at_worth, tile_m = at["weights"], at["worth"], TILE_M
    load_queries = _make_load_queries(k, at, at_q)
    gather = make_gather(k, v, at, asks=False)
    pack = _make_pack(k, v, at)
    weigh = _make_weigh(k, v, at)

    @compile_helper
    def leave_nothing(args, task, split):  # type: ignore[no-untyped-def]
        """Partial results of a split that no query of the task sees."""
        for query in range(task.query, task.after_query):
            for g in range(args.group):
                q_head = task.head * args.group + g
                partial = query_partial(args, num_bytes, query, q_head, split)
                put_f32(partial, 0, np.float32(-np.inf))
                put_f32(partial, 1, np.float32(0.0))

    @compile_helper
    def set_targets(args, memory, task, split, first_query, num_rows):  # type: ignore[no-untyped-def]
        """Where the sums of a tile's rows go; what fills it is multiplied, and dropped."""
        targets = memory + at_targets
        for r in range(num_rows):
            query, q_head = first_query + r // args.group, task.head * args.group + r % args.group
            partial = query_partial(args, num_bytes, query, q_head, split)
            put_i64(targets, r, partial + 4 * LANES)
        for r in range(num_rows, num_rows + half_tile - 1):
            put_i64(targets, r, memory + at_nowhere)

    def shared(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + fetch_add(args.counters, 0) * args.scratch_bytes
        most_queries = max(np.int64(1), most_rows // args.group)
        while True:
            number = fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            task = _read_task(args, number)
            load_queries(args, memory, task)
            first_pos = query_pos(args, task.query)
            last_pos = query_pos(args, task.after_query - 1)
            for split in range(task.split, task.after_split):
                origin = split * split_tokens
                # What the first does not see, none sees.
                if args.window > 0 and first_pos + 1 - args.window >= origin + split_tokens:
                    leave_nothing(args, task, split)
                    continue
                num_tokens = min(split_tokens, last_pos + 1 - origin)
                add_to(args.counters, 4, num_tokens)
                end = origin + num_tokens
                gather(args, memory, task.seq, task.head, origin, origin, end, False)
                pack(memory, num_tokens)
                query = task.query
                while query < task.after_query:
                    num_queries = min(most_queries, task.after_query - query)
                    first_row, num_rows = (
                        (query - task.query) * args.group,
                        num_queries * args.group,
                    )
                    num_halves = (num_rows + half_tile - 1) // half_tile
                    q = memory + at_q + first_row * q_bytes
                    q_scales = memory + at_q + (args.most_rows + tile_m) * q_bytes + 4 * first_row
                    pos = query_pos(args, query + num_queries - 1)
                    most_seen = min(split_tokens, max(np.int64(0), pos + 1 - origin))
                    num_panels = (most_seen + panel - 1) // panel
                    num_vectors = num_panels * panel // LANES
                    set_targets(args, memory, task, split, query, num_rows)
                    score_panels(
                        k_fmt, k_dim, q_bytes, line, q, q_scales, num_halves,
                        memory + at_k_panels, num_panels, memory + at_k_factors,
                        memory + at_scores,
                    )  # fmt: skip
                    for r in range(num_rows):
                        q_head = task.head * args.group + r % args.group
                        distance = origin - query_pos(args, query + r // args.group)
                        weigh(args, memory, r, q_head, get_f32(q_scales, r), distance, num_vectors)
                    sum_panels(
                        v_fmt, v_dim, half_line, memory + at_weights, num_halves,
                        memory + at_v_panels, num_vectors * LANES // 2, memory + at_worth,
                        memory + at_targets,
                    )  # fmt: skip
                    query += num_queries

    return compile_callback(SIGNATURE)(shared)
