"""The kernel for sequences with several new tokens, or with many query heads a KV head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray

from radixkv_kernels.compile_cache import compile_callback
from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.decode import partial_floats
from radixkv_kernels.cpu.formats import bytes_of_row, code_factor, num_scales
from radixkv_kernels.cpu.memory import (
    add_to,
    copy_words,
    fetch_add,
    get_f32,
    get_i32,
    put_f32,
    put_i32,
    put_i64,
)
from radixkv_kernels.cpu.plan import SPLIT, TILE_ROWS
from radixkv_kernels.cpu.records import SIGNATURE
from radixkv_kernels.cpu.rows import dequantize_row, load_query, store_row, widen_scales
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import (
    TILE_M,
    cap_scores,
    fill,
    multiply_matrices,
    scale_add,
    softmax_tile,
)

TILE = 64  # tokens dequantized at a time in extend


def make_extend(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, shared: int = 0) -> Any:
    """The kernel for sequences with several new tokens, or with many query heads a KV head.

    With ``shared``: for whole splits that queries of several sequences attend to, as
    `make_shared`, in floats; all splits of a task become one partial result, at its first.
    """
    k_scales, v_scales = num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim)
    k_row, v_row = bytes_of_row(k_fmt, k_dim), bytes_of_row(v_fmt, v_dim)
    k_vectors, v_vectors = len(simd.pieces(k_dim)), len(simd.pieces(v_dim))
    k_width, v_width = 4 * LANES * k_vectors, 4 * LANES * v_vectors
    k_factor, v_factor = code_factor(k_fmt), code_factor(v_fmt)
    lanes, tile_m, tile = LANES, TILE_M, TILE
    tile_rows, split_tokens = TILE_ROWS, SPLIT
    partial_bytes = 4 * partial_floats(v_dim)

    def extend(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + fetch_add(args.counters, 0) * args.scratch_bytes
        group, page_size = args.group, args.page_size
        queries = max(1, tile_rows // group)
        most_rows = (queries * group + lanes - 1) // lanes * lanes
        q = memory
        acc = q + 4 * k_dim * most_rows
        scores = acc + v_width * most_rows
        stats = scores + 4 * tile * most_rows
        query_pos = stats + 12 * most_rows
        k_tile = query_pos + 4 * most_rows
        v_tile = k_tile + tile * k_width
        factors = v_tile + tile * v_width
        row_floats = factors + 4 * 2 * (tile + 64) * max(1, k_scales, v_scales)
        while True:
            number = fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            # The last tiles read most: taken first, they leave no thread behind at the end.
            task = args.num_tasks - 1 - number // args.num_kv_heads
            head = number % args.num_kv_heads
            seq = np.int64(get_i32(args.tasks, 5 * task))
            first_query = np.int64(get_i32(args.tasks, 5 * task + 1))
            seq_len = np.int64(get_i32(args.seq_lens, seq))
            begin = np.int64(get_i32(args.cu_seqlens_q, seq))
            query_len = np.int64(get_i32(args.cu_seqlens_q, seq + 1)) - begin
            num_queries = min(queries, query_len - first_query)
            split, after_split = first_query, np.int64(get_i32(args.tasks, 5 * task + 2))
            if shared:
                first_query = np.int64(get_i32(args.tasks, 5 * task + 3))
                num_queries = np.int64(get_i32(args.tasks, 5 * task + 4))
            num_rows = num_queries * group
            row_vectors = (num_rows + lanes - 1) // lanes
            rows = row_vectors * lanes
            first_pos = seq_len - query_len + first_query
            # Queries lie transposed, [head_dim, rows]: a score tile is K times that.
            for r in range(num_rows):
                query, g = r // group, r % group
                token, pos = begin + first_query + query, first_pos + query
                if shared:
                    token = np.int64(get_i32(args.queries, 3 * (first_query + query)))
                    pos = np.int64(get_i32(args.queries, 3 * (first_query + query) + 1))
                load_query(
                    k_dim,
                    args.q + 4 * (token * args.q_token + (head * group + g) * args.q_head),
                    row_floats,
                    args.scale,
                    args.rotate_k,
                )
                for e in range(k_dim):
                    put_f32(q, e * rows + r, get_f32(row_floats, e))
                put_i32(query_pos, r, np.int32(pos))
            for r in range(num_rows, rows):
                for e in range(k_dim):
                    put_f32(q, e * rows + r, np.float32(0.0))
                put_i32(query_pos, r, np.int32(-1))
            fill(stats, np.float32(-np.inf), row_vectors)
            fill(stats + 4 * rows, np.float32(0.0), row_vectors)
            fill(acc, np.float32(0.0), rows * v_vectors)
            window = args.window if args.window > 0 else np.int64(1 << 30)
            end = first_pos + num_queries
            start = max(np.int64(0), first_pos + 1 - window) // tile * tile
            if shared:
                start, end = split * split_tokens, after_split * split_tokens
            t = start
            while t < end:
                num = min(tile, end - t)
                add_to(args.counters, 4, num)
                i = np.int64(0)
                while i < num:
                    page = np.int64(
                        get_i32(args.page_table, seq * args.table_row + (t + i) // page_size)
                    )
                    if page < 0 or page >= args.num_pages:
                        put_i64(args.counters, 2, page + (1 if page >= 0 else 0))
                        page = 0
                    offset = (t + i) % page_size
                    length = min(page_size - offset, num - i)
                    if k_scales > 0:
                        widen_scales(
                            args.k_scale
                            + page * args.ks_page
                            + head * args.ks_head
                            + 2 * k_scales * offset,
                            factors,
                            length * k_scales,
                            np.float32(k_factor),
                        )
                    from_row = (
                        args.k_pages + page * args.k_page + head * args.k_head + offset * k_row
                    )
                    for j in range(length):
                        dequantize_row(
                            k_fmt,
                            k_dim,
                            from_row + j * k_row,
                            factors + 4 * k_scales * j,
                            k_tile + (i + j) * k_width,
                        )
                    if v_scales > 0:
                        widen_scales(
                            args.v_scale
                            + page * args.vs_page
                            + head * args.vs_head
                            + 2 * v_scales * offset,
                            factors,
                            length * v_scales,
                            np.float32(v_factor),
                        )
                    from_row = (
                        args.v_pages + page * args.v_page + head * args.v_head + offset * v_row
                    )
                    for j in range(length):
                        dequantize_row(
                            v_fmt,
                            v_dim,
                            from_row + j * v_row,
                            factors + 4 * v_scales * j,
                            v_tile + (i + j) * v_width,
                        )
                    i += length
                keys = (num + tile_m - 1) // tile_m * tile_m
                multiply_matrices(
                    0, keys, row_vectors, k_dim, k_tile, k_width, 4, q, 4 * rows, scores, 4 * rows
                )
                if args.softcap > 0:
                    cap_scores(scores, args.softcap, num * row_vectors)
                if args.slopes != 0:
                    for i in range(num):
                        for r in range(num_rows):
                            bias = get_f32(args.slopes, head * group + r % group) * np.float32(
                                t + i - get_i32(query_pos, r)
                            )
                            at = i * rows + r
                            put_f32(scores, at, get_f32(scores, at) + bias)
                for v in range(row_vectors):
                    softmax_tile(
                        scores + 4 * lanes * v,
                        4 * rows,
                        num,
                        t,
                        query_pos + 4 * lanes * v,
                        window,
                        stats + 4 * lanes * v,
                        4 * rows,
                    )
                for r in range(num_rows):
                    alpha = get_f32(stats, 2 * rows + r)
                    if alpha != np.float32(1.0):
                        mine = acc + r * v_width
                        scale_add(mine, alpha, mine, np.float32(0.0), v_vectors)
                multiply_matrices(
                    1,
                    (num_rows + tile_m - 1) // tile_m * tile_m,
                    v_vectors,
                    num,
                    scores,
                    4,
                    4 * rows,
                    v_tile,
                    v_width,
                    acc,
                    v_width,
                )
                t += tile
            for r in range(num_rows):
                query, q_head = r // group, head * group + r % group
                partial = acc + r * v_width
                m, total = get_f32(stats, r), get_f32(stats, rows + r)
                if shared:
                    base = np.int64(get_i32(args.queries, 3 * (first_query + query) + 2))
                    place = args.partials + partial_bytes * (
                        q_head * args.num_partials + base + split
                    )
                    for i in range(1, after_split - split):
                        put_f32(place + i * partial_bytes, 0, np.float32(-np.inf))
                    put_f32(place, 0, m)
                    put_f32(place, 1, total)
                    copy_words(partial, place + 4 * lanes, v_width // 8)
                    continue
                sink = np.float32(-np.inf)
                if args.sinks != 0:
                    sink = get_f32(args.sinks, q_head)
                largest = max(m, sink)
                w = np.float32(math.exp(m - largest))
                total = total * w
                if args.sinks != 0:
                    total += np.float32(math.exp(sink - largest))
                store_row(
                    v_dim,
                    partial,
                    args.out
                    + 4 * ((begin + first_query + query) * args.out_token + q_head * args.out_head),
                    w / total,
                    args.rotate_v,
                )

    return compile_callback(SIGNATURE)(extend)


def extend_rows(group: int) -> int:
    """Query rows of an extend task, padded to whole vectors."""
    return -(-max(1, TILE_ROWS // group) * group // LANES) * LANES


def extend_scratch_bytes(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int) -> int:
    """Bytes of scratch that each thread of the extend kernel needs."""
    rows = extend_rows(group)
    k_width, v_width = (4 * LANES * len(simd.pieces(d)) for d in (k_dim, v_dim))
    scales = max(1, num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim))
    total = rows * (4 * k_dim + v_width + 4 * TILE + 16) + TILE * (k_width + v_width)
    total += 8 * (TILE + 64) * scales + max(k_width, v_width)
    return -(-total // 64) * 64
