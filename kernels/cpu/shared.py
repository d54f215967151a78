"""The kernel for splits that several query rows attend to, in integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from radixkv_kernels.compile_cache import compile_callback
from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.decode import SCORE_LINE
from radixkv_kernels.cpu.formats import (
    INT4,
    bytes_of_row,
    num_groups,
    num_pairs_of,
    num_scales,
    word_spans,
)
from radixkv_kernels.cpu.memory import (
    add_to,
    fetch_add,
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    put_i64,
)
from radixkv_kernels.cpu.pairs import largest_scales, quantize_query, quantize_weights, split_scales
from radixkv_kernels.cpu.panels import (
    HALF_M,
    PANEL,
    pack_keys,
    pack_values,
    pair_query,
    score_panels,
    sum_panels,
)
from radixkv_kernels.cpu.plan import SHARED_ROWS, SPLIT
from radixkv_kernels.cpu.records import SIGNATURE
from radixkv_kernels.cpu.rows import load_query, widen_scales
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import (
    TILE_M,
    cap_scores,
    fill,
    find_largest,
    scale_add,
    weigh_scores,
)
from radixkv_kernels.cpu.walk import PREFETCH_TOKENS


def _shared_layout(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> tuple[dict[str, int], int]:
    """Byte offsets of the parts of a thread's scratch for shared splits, and its size."""
    rows, line = SHARED_ROWS + TILE_M, SCORE_LINE
    v_groups = num_groups(v_fmt, v_dim)
    words = 4 * LANES * max(len(word_spans(k_fmt, k_dim)), 1)
    sizes = {
        "row": 4 * LANES * len(simd.pieces(max(k_dim, v_dim))),
        "words": words,
        "k_rows": 8 * (SPLIT + PREFETCH_TOKENS),
        "v_rows": 8 * (SPLIT + PREFETCH_TOKENS),
        "k_factors": max(1, num_scales(k_fmt, k_dim)) * line,
        "v_factors": max(1, num_scales(v_fmt, v_dim)) * line,
        "v_largest": line,
        "scores": rows * line,
        "weights": rows * v_groups * line // 2,
        "worth": 4 * rows * v_groups,
        "targets": 8 * rows,
        "nowhere": 4 * LANES * (2 + len(simd.pieces(v_dim))),
        "k_panels": SPLIT * 4 * num_pairs_of(k_fmt, k_dim),
        "v_panels": 2 * SPLIT * PANEL * len(word_spans(v_fmt, v_dim)),
    }
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // 64) * 64
    return offsets, total


def shared_scratch_bytes(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, most_rows: int) -> int:
    """Bytes of scratch that each thread needs for tasks of ``most_rows`` query rows."""
    kept = -(-4 * num_pairs_of(k_fmt, k_dim) // 64) * 64 + 4
    return _shared_layout(k_fmt, v_fmt, k_dim, v_dim)[1] + kept * (most_rows + TILE_M)


def make_shared(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> Any:
    """The kernel for splits that several query rows attend to: their partial results.

    The queries of a task stand in the order of their positions; the last one sees all that is
    read of a split, each one what lies up to its own token.
    """
    k_scales, v_scales = num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim)
    v_groups = num_groups(v_fmt, v_dim)
    k_row, v_row = bytes_of_row(k_fmt, k_dim), bytes_of_row(v_fmt, v_dim)
    k_split, v_split = k_fmt == INT4, v_fmt == INT4
    q_width = -(-4 * num_pairs_of(k_fmt, k_dim) // 64) * 64
    partial_bytes = 4 * LANES * (1 + len(simd.pieces(v_dim)))
    line, half_line = SCORE_LINE, SCORE_LINE // 2
    lanes, split_tokens, half_tile, ahead = LANES, SPLIT, HALF_M, PREFETCH_TOKENS
    panel = PANEL
    at, at_q = _shared_layout(k_fmt, v_fmt, k_dim, v_dim)
    at_row, at_words, at_k_rows, at_v_rows = (at[n] for n in ("row", "words", "k_rows", "v_rows"))
    at_k_factors, at_v_factors, at_v_largest, at_scores, at_weights, at_worth = (
        at[n] for n in ("k_factors", "v_factors", "v_largest", "scores", "weights", "worth")
    )
    at_targets, at_nowhere = at["targets"], at["nowhere"]
    at_k_panels, at_v_panels, most_rows = at["k_panels"], at["v_panels"], SHARED_ROWS
    tile_m = TILE_M

    def shared(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + fetch_add(args.counters, 0) * args.scratch_bytes
        row, words, q = memory + at_row, memory + at_words, memory + at_q
        q_scales = q + (args.most_rows + tile_m) * q_width
        k_rows, v_rows = memory + at_k_rows, memory + at_v_rows
        k_factors, v_factors = memory + at_k_factors, memory + at_v_factors
        v_largest, scores, weights = memory + at_v_largest, memory + at_scores, memory + at_weights
        worth, targets = memory + at_worth, memory + at_targets
        nowhere, k_panels, v_panels = (
            memory + at_nowhere,
            memory + at_k_panels,
            memory + at_v_panels,
        )
        group, page_size = args.group, args.page_size
        most_queries = max(np.int64(1), most_rows // group)
        while True:
            number = fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            task, head = number // args.num_kv_heads, number % args.num_kv_heads
            seq = np.int64(get_i32(args.tasks, 5 * task))
            split = np.int64(get_i32(args.tasks, 5 * task + 1))
            after_split = np.int64(get_i32(args.tasks, 5 * task + 2))
            task_query = np.int64(get_i32(args.tasks, 5 * task + 3))
            after_query = task_query + np.int64(get_i32(args.tasks, 5 * task + 4))
            for r in range((after_query - task_query) * group):
                token = np.int64(get_i32(args.queries, 3 * (task_query + r // group)))
                load_query(
                    k_dim,
                    args.q + 4 * (token * args.q_token + (head * group + r % group) * args.q_head),
                    row,
                    args.scale,
                    args.rotate_k,
                )
                scale = quantize_query(k_fmt, k_dim, row, words)
                pair_query(k_fmt, k_dim, words, q + r * q_width)
                put_f32(q_scales, r, scale)
            last_pos = np.int64(get_i32(args.queries, 3 * (after_query - 1) + 1))
            while split < after_split:
                origin = split * split_tokens
                num_tokens = min(split_tokens, last_pos + 1 - origin)
                if args.window > 0:
                    # What the first does not see, none sees.
                    pos = np.int64(get_i32(args.queries, 3 * task_query + 1))
                    if pos + 1 - args.window >= origin + split_tokens:
                        for query in range(task_query, after_query):
                            base = np.int64(get_i32(args.queries, 3 * query + 2))
                            for g in range(group):
                                partial = args.partials + partial_bytes * (
                                    (head * group + g) * args.num_partials + base + split
                                )
                                put_f32(partial, 0, np.float32(-np.inf))
                                put_f32(partial, 1, np.float32(0.0))
                        split += 1
                        continue
                add_to(args.counters, 4, num_tokens)
                t = 0
                while t < num_tokens:
                    page = np.int64(
                        get_i32(args.page_table, seq * args.table_row + (origin + t) // page_size)
                    )
                    if page < 0 or page >= args.num_pages:
                        # Read as page 0; the call fails in the end.
                        put_i64(args.counters, 2, page + (1 if page >= 0 else 0))
                        page = 0
                    k_source = args.k_scale + page * args.ks_page + head * args.ks_head
                    v_source = args.v_scale + page * args.vs_page + head * args.vs_head
                    if k_split:
                        split_scales(k_scales, k_source, k_factors + 4 * t, line, page_size)
                    else:
                        widen_scales(k_source, k_factors + 4 * t, page_size, np.float32(1.0))
                    if v_split:
                        split_scales(v_scales, v_source, v_factors + 4 * t, line, page_size)
                    else:
                        widen_scales(v_source, v_factors + 4 * t, page_size, np.float32(1.0))
                    k_page = args.k_pages + page * args.k_page + head * args.k_head
                    v_page = args.v_pages + page * args.v_page + head * args.v_head
                    for i in range(page_size):
                        put_i64(k_rows, t + i, k_page + i * k_row)
                        put_i64(v_rows, t + i, v_page + i * v_row)
                    t += page_size
                # What fills the last panel is multiplied, by weights of 0.
                packed = (num_tokens + panel - 1) // panel * panel
                for i in range(num_tokens, packed):
                    put_i64(k_rows, i, get_i64(k_rows, num_tokens - 1))
                    put_i64(v_rows, i, get_i64(v_rows, num_tokens - 1))
                    for n in range(v_scales):
                        put_f32(v_factors + n * line, i, np.float32(0.0))
                if v_split:
                    largest_scales(v_scales, v_factors, line, v_largest, packed // lanes)
                for i in range(ahead):
                    put_i64(k_rows, packed + i, get_i64(v_rows, min(i, num_tokens - 1)))
                    put_i64(v_rows, packed + i, get_i64(v_rows, num_tokens - 1))
                pack_keys(k_fmt, k_dim, k_rows, packed // 8, ahead, k_panels)
                pack_values(v_fmt, v_dim, v_rows, packed // 2, ahead, v_panels)
                next_query = task_query
                while next_query < after_query:
                    first_query = next_query
                    first_row = (first_query - task_query) * group
                    num_queries = min(most_queries, after_query - first_query)
                    next_query += num_queries
                    num_rows = num_queries * group
                    num_halves = (num_rows + half_tile - 1) // half_tile
                    pos = np.int64(get_i32(args.queries, 3 * (next_query - 1) + 1))
                    most_seen = min(split_tokens, max(np.int64(0), pos + 1 - origin))
                    num_panels = (most_seen + panel - 1) // panel
                    vectors = num_panels * panel // lanes
                    for r in range(num_rows):
                        base = np.int64(get_i32(args.queries, 3 * (first_query + r // group) + 2))
                        partial = args.partials + partial_bytes * (
                            (head * group + r % group) * args.num_partials + base + split
                        )
                        put_i64(targets, r, partial + 4 * lanes)
                    for r in range(num_rows, num_halves * half_tile):
                        # What these rows hold is multiplied, and dropped.
                        put_i64(targets, r, nowhere)
                    score_panels(
                        k_fmt,
                        k_dim,
                        q_width,
                        line,
                        q + first_row * q_width,
                        q_scales + 4 * first_row,
                        num_halves,
                        k_panels,
                        num_panels,
                        k_factors,
                        scores,
                    )
                    for r in range(num_rows):
                        query = first_query + r // group
                        pos = np.int64(get_i32(args.queries, 3 * query + 1))
                        seen = min(split_tokens, max(np.int64(0), pos + 1 - origin))
                        skipped = np.int64(0)
                        if args.window > 0:
                            skipped = min(seen, max(np.int64(0), pos + 1 - args.window - origin))
                        mine = scores + r * line
                        if k_split:
                            scale = get_f32(q_scales, first_row + r)
                            scale_add(mine, scale, mine, np.float32(0.0), vectors)
                        if args.softcap > 0:
                            cap_scores(mine, args.softcap, vectors)
                        if args.slopes != 0:
                            slope = get_f32(args.slopes, head * group + r % group)
                            for i in range(seen):
                                bias = slope * np.float32(origin + i - pos)
                                put_f32(mine, i, get_f32(mine, i) + bias)
                        for i in range(skipped):
                            put_f32(mine, i, np.float32(-np.inf))
                        for i in range(seen, vectors * lanes):
                            put_f32(mine, i, np.float32(-np.inf))
                        largest, heaviest = np.float32(-np.inf), np.float32(0.0)
                        if skipped < seen:
                            largest = find_largest(mine, vectors)
                        partial = get_i64(targets, r) - 4 * lanes
                        if skipped == seen:
                            fill(mine, np.float32(0.0), vectors)
                        else:
                            factors = v_largest if v_split else v_factors
                            heaviest = weigh_scores(mine, largest, factors, vectors, partial + 4)
                        factor = np.float32(0.0)
                        if heaviest > 0:
                            factor = np.float32(32767.0) / heaviest
                        for n in range(v_groups):
                            weight_row = r * v_groups + n
                            quantize_weights(
                                mine,
                                v_factors + n * line,
                                factor,
                                weights + weight_row * half_line,
                                vectors,
                            )
                            put_f32(worth, weight_row, heaviest / np.float32(32767.0))
                        put_f32(partial, 0, largest)
                        if skipped == seen:
                            put_f32(partial, 1, np.float32(0.0))
                    sum_panels(
                        v_fmt,
                        v_dim,
                        half_line,
                        weights,
                        num_halves,
                        v_panels,
                        vectors * lanes // 2,
                        worth,
                        targets,
                    )
                split += 1

    return compile_callback(SIGNATURE)(shared)
