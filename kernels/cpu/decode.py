"""The kernel for sequences with one new token, or a few that take turns over each split."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from radixkv_kernels.compile_cache import compile_callback
from radixkv_kernels.cpu import simd
from radixkv_kernels.cpu.floats import add_values, score_keys
from radixkv_kernels.cpu.formats import (
    INT4,
    LARGEST_CODE,
    bytes_of_row,
    code_factor,
    in_pairs,
    num_groups,
    num_scales,
    padded,
    unpacked_bytes,
    word_spans,
)
from radixkv_kernels.cpu.memory import (
    add_to,
    ask_for,
    clear_around,
    copy_words,
    fetch_add,
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    put_i32,
    put_i64,
    put_steps,
)
from radixkv_kernels.cpu.pairs import (
    add_pairs,
    finish_pairs,
    largest_scales,
    quantize_query,
    quantize_weights,
    score_pairs,
    split_scales,
    unpack_rows,
)
from radixkv_kernels.cpu.plan import SPLIT
from radixkv_kernels.cpu.records import COUNTERS, SIGNATURE
from radixkv_kernels.cpu.rows import (
    load_query,
    store_row,
    to_natural_order,
    to_read_order,
    widen_scales,
)
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import (
    cap_scores,
    exponentiate,
    fill,
    find_largest,
    largest_product,
    merge_partials,
    multiply_by,
    scale_add,
)
from radixkv_kernels.cpu.walk import MAX_CHUNK, chunk_tokens, keys_per_block

SCORE_LINE = 4 * (SPLIT + 4 * LANES)  # a row of scores: a block may end beyond the split


def _decode_layout(
    k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int
) -> tuple[dict[str, int], int]:
    """Byte offsets of the parts of a decode thread's scratch, and its size."""
    v_groups = num_groups(v_fmt, v_dim) if in_pairs(v_fmt, v_dim) else 1
    k_split, v_split = (f == INT4 and in_pairs(f, d) for f, d in ((k_fmt, k_dim), (v_fmt, v_dim)))
    line = SCORE_LINE
    sizes = {
        "row": 4 * LANES * len(simd.pieces(max(k_dim, v_dim))),
        "q": 4 * group * max(padded(k_fmt, k_dim), LANES * len(word_spans(k_fmt, k_dim))),
        "acc": 4 * group * max(padded(v_fmt, v_dim), 2 * LANES * len(word_spans(v_fmt, v_dim))),
        "scores": group * line,
        "k_factors": max(1, num_scales(k_fmt, k_dim)) * line,
        "v_factors": max(1, num_scales(v_fmt, v_dim)) * line,
        "v_largest": line if v_split else 0,
        "weights": group * v_groups * line // 2,
        # After a split's rows stand those that the last block, or the last pair, reads beyond it.
        "k_places": 8 * (SPLIT + 4 * LANES + MAX_CHUNK),
        "v_places": 8 * (SPLIT + 4 * LANES + MAX_CHUNK),
        "q_scales": 4 * group,
        "worth": 4 * group * v_groups,
        "offsets": 4 * group * v_groups,
        "k_rows": SPLIT * unpacked_bytes(k_dim) if k_split else 0,
        "v_rows": SPLIT * unpacked_bytes(v_dim) if v_split else 0,
    }
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // 64) * 64
    return offsets, total


def decode_scratch_bytes(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int) -> int:
    """Bytes of scratch that each thread of the decode kernel needs."""
    return _decode_layout(k_fmt, v_fmt, k_dim, v_dim, group)[1]


def make_decode(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int, group: int) -> Any:
    """The kernel for sequences with one new token and ``group`` query heads a KV head."""
    k_pairs, v_pairs = in_pairs(k_fmt, k_dim), in_pairs(v_fmt, v_dim)
    v_groups = num_groups(v_fmt, v_dim) if v_pairs else 1
    block = keys_per_block(group)
    k_scales, v_scales = num_scales(k_fmt, k_dim), num_scales(v_fmt, v_dim)
    k_split, v_split = k_pairs and k_fmt == INT4, v_pairs and v_fmt == INT4
    k_row, v_row = bytes_of_row(k_fmt, k_dim), bytes_of_row(v_fmt, v_dim)
    k_wide, v_wide = (
        unpacked_bytes(dim) if is_split else row
        for is_split, dim, row in ((k_split, k_dim, k_row), (v_split, v_dim, v_row))
    )
    q_width = 4 * (LANES * len(word_spans(k_fmt, k_dim)) if k_pairs else padded(k_fmt, k_dim))
    acc_width = 4 * (2 * LANES * len(word_spans(v_fmt, v_dim)) if v_pairs else padded(v_fmt, v_dim))
    out_vectors = len(simd.pieces(v_dim))
    partial_bytes = 4 * LANES * (1 + out_vectors)
    line = SCORE_LINE
    k_factor, v_factor = code_factor(k_fmt), code_factor(v_fmt)
    k_one, v_one = k_fmt in LARGEST_CODE, v_fmt in LARGEST_CODE
    lanes, split_tokens, first_counter = LANES, SPLIT, COUNTERS
    chunk = chunk_tokens(k_row, v_row)
    at, _ = _decode_layout(k_fmt, v_fmt, k_dim, v_dim, group)
    at_row, at_q, at_acc, at_scores, at_v_largest = (
        at[n] for n in ("row", "q", "acc", "scores", "v_largest")
    )
    at_k_factors, at_v_factors, at_weights = at["k_factors"], at["v_factors"], at["weights"]
    at_k_places, at_v_places = at["k_places"], at["v_places"]
    at_q_scales, at_worth, at_offsets = at["q_scales"], at["worth"], at["offsets"]
    at_k_rows, at_v_rows = at["k_rows"], at["v_rows"]

    def decode(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + fetch_add(args.counters, 0) * args.scratch_bytes
        row, q, acc, scores = memory + at_row, memory + at_q, memory + at_acc, memory + at_scores
        k_factors, v_factors = memory + at_k_factors, memory + at_v_factors
        k_places, v_places = memory + at_k_places, memory + at_v_places
        weights, worth, offsets = memory + at_weights, memory + at_worth, memory + at_offsets
        q_scales, v_largest = memory + at_q_scales, memory + at_v_largest
        k_rows, v_rows = memory + at_k_rows, memory + at_v_rows
        page_size = args.page_size
        while True:
            number = fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            # The last tiles of a prompt read most: taken first, they leave no thread behind.
            task = args.num_tasks - 1 - number // args.num_kv_heads
            head = number % args.num_kv_heads
            seq = np.int64(get_i32(args.tasks, 5 * task))
            first_query = np.int64(get_i32(args.tasks, 5 * task + 1))
            first_split = np.int64(get_i32(args.tasks, 5 * task + 2))
            num_splits = np.int64(get_i32(args.tasks, 5 * task + 3))
            first_partial = np.int64(get_i32(args.tasks, 5 * task + 4))
            seq_len = np.int64(get_i32(args.seq_lens, seq))
            begin = np.int64(get_i32(args.cu_seqlens_q, seq))
            query_len = np.int64(get_i32(args.cu_seqlens_q, seq + 1)) - begin
            num_queries = min(args.tile_queries, query_len - first_query)
            first_pos = seq_len - query_len + first_query
            # One split of one query: partial results are shared, and the last task merges them.
            # A tile of queries: this task takes all splits, its partial results are its own.
            partials, partial_rows = args.partials, args.num_partials
            after_split = first_split + 1
            # Then int4 rows are unpacked once for all queries.
            is_tile = first_partial < 0
            if is_tile:
                partials, partial_rows = memory + args.partials_offset, num_splits
                after_split = num_splits
            for split in range(first_split, after_split):
                origin = split * split_tokens
                low, high = origin, min(origin + split_tokens, first_pos + num_queries)
                if args.window > 0:
                    low = max(low, first_pos + 1 - args.window)
                add_to(args.counters, 4, max(np.int64(0), high - low))
                # All lines of scales are asked for at once, and read below.
                first_page = low // page_size
                first_offset = low - first_page * page_size
                for turn in range(2):
                    t, number_of_page, offset = low, first_page, first_offset
                    while t < high:
                        page = np.int64(
                            get_i32(args.page_table, seq * args.table_row + number_of_page)
                        )
                        if page < 0 or page >= args.num_pages:
                            # Read as page 0; the call fails in the end.
                            put_i64(args.counters, 2, page + (1 if page >= 0 else 0))
                            page = 0
                        length = min(page_size - offset, high - t)
                        k_source = (
                            args.k_scale
                            + page * args.ks_page
                            + head * args.ks_head
                            + 2 * k_scales * offset
                        )
                        v_source = (
                            args.v_scale
                            + page * args.vs_page
                            + head * args.vs_head
                            + 2 * v_scales * offset
                        )
                        place = t - origin
                        if turn == 0:
                            if k_scales > 0:
                                ask_for(k_source)
                            if v_scales > 0:
                                ask_for(v_source)
                        else:
                            if k_split:
                                split_scales(
                                    k_scales, k_source, k_factors + 4 * place, line, length
                                )
                            elif k_scales > 0:
                                widen_scales(
                                    k_source,
                                    k_factors + 4 * k_scales * place,
                                    length * k_scales,
                                    np.float32(k_factor),
                                )
                            if v_split:
                                split_scales(
                                    v_scales, v_source, v_factors + 4 * place, line, length
                                )
                            elif v_scales > 0:
                                widen_scales(
                                    v_source,
                                    v_factors + 4 * v_scales * place,
                                    length * v_scales,
                                    np.float32(v_factor),
                                )
                            k_from = args.k_pages + page * args.k_page + head * args.k_head
                            v_from = args.v_pages + page * args.v_page + head * args.v_head
                            k_from, v_from = k_from + offset * k_row, v_from + offset * v_row
                            k_step, v_step = k_row, v_row
                            if k_split and is_tile:
                                k_unpacked = k_rows + place * k_wide
                                unpack_rows(k_dim, k_from, k_unpacked, length)
                                k_from, k_step = k_unpacked, k_wide
                            if v_split and is_tile:
                                v_unpacked = v_rows + place * v_wide
                                unpack_rows(v_dim, v_from, v_unpacked, length)
                                v_from, v_step = v_unpacked, v_wide
                            put_steps(k_places + 8 * place, k_from, k_step, length)
                            put_steps(v_places + 8 * place, v_from, v_step, length)
                        t += length
                        number_of_page += 1
                        offset = np.int64(0)
                # A block of keys may go beyond the last, a pair of values may begin before the
                # first. What is asked for ahead of the last keys are the first values.
                place, last = high - origin, high - 1 - origin
                if low < high:
                    for i in range(block - 1):
                        put_i64(k_places, place + i, get_i64(k_places, last))
                    for i in range(block - 1, block - 1 + chunk):
                        value = min(low - origin + i - (block - 1), last)
                        put_i64(k_places, place + i, get_i64(v_places, value))
                    for i in range(chunk + 1):
                        put_i64(v_places, place + i, get_i64(v_places, last))
                    if (low - origin) % 2 == 1:
                        put_i64(v_places, low - origin - 1, get_i64(v_places, low - origin))
                if k_one:
                    for n in range(k_scales):
                        clear_around(k_factors + n * line, low - origin, high - origin)
                if v_one or v_split:
                    for n in range(v_scales):
                        clear_around(v_factors + n * line, low - origin, high - origin)
                if v_split:
                    vectors = (high - origin + lanes - 1) // lanes
                    largest_scales(v_scales, v_factors, line, v_largest, vectors)
                for query in range(num_queries):
                    pos = first_pos + query
                    start, end = origin, min(origin + split_tokens, pos + 1)
                    if args.window > 0:
                        start = max(start, pos + 1 - args.window)
                    for g in range(group):
                        q_head = head * group + g
                        load_query(
                            k_dim,
                            args.q
                            + 4
                            * ((begin + first_query + query) * args.q_token + q_head * args.q_head),
                            row,
                            args.scale,
                            args.rotate_k,
                        )
                        if k_pairs:
                            scale = quantize_query(k_fmt, k_dim, row, q + g * q_width)
                            put_f32(q_scales, g, scale)
                        else:
                            put_f32(q_scales, g, np.float32(1.0))
                            to_read_order(k_fmt, k_dim, row, q + g * q_width)
                    # A token's place is counted from the split's first, seen or not, so that
                    # sums over vectors are the same whatever else is seen.
                    skipped = max(np.int64(0), start - origin)
                    num = max(end - origin, 0)
                    if end <= start:
                        num = np.int64(0)
                    if num > 0:
                        if k_split and is_tile:
                            score_pairs(
                                k_fmt,
                                k_dim,
                                group,
                                1,
                                chunk,
                                q,
                                k_places + 8 * skipped,
                                num - skipped,
                                k_factors + 4 * skipped,
                                line,
                                scores + 4 * skipped,
                            )
                        elif k_pairs:
                            score_pairs(
                                k_fmt,
                                k_dim,
                                group,
                                0,
                                chunk,
                                q,
                                k_places + 8 * skipped,
                                num - skipped,
                                k_factors + 4 * skipped,
                                line,
                                scores + 4 * skipped,
                            )
                        else:
                            score_keys(
                                k_fmt,
                                k_dim,
                                group,
                                chunk,
                                q,
                                k_places + 8 * skipped,
                                num - skipped,
                                k_factors + 4 * k_scales * skipped,
                                4 * k_scales,
                                scores + 4 * skipped,
                                line,
                            )
                    num_vectors = (num + lanes - 1) // lanes
                    fill(acc, np.float32(0.0), group * acc_width // (4 * lanes))
                    for g in range(group):
                        q_head = head * group + g
                        mine = scores + g * line
                        if k_split:
                            scale_add(
                                mine, get_f32(q_scales, g), mine, np.float32(0.0), num_vectors
                            )
                        elif k_one:
                            multiply_by(mine, k_factors, get_f32(q_scales, g), num_vectors)
                        if args.softcap > 0:
                            cap_scores(mine, args.softcap, num_vectors)
                        if args.slopes != 0:
                            slope = get_f32(args.slopes, q_head)
                            for i in range(skipped, num):
                                bias = slope * np.float32(origin + i - pos)
                                put_f32(mine, i, get_f32(mine, i) + bias)
                        if num > 0:
                            for i in range(skipped):
                                put_f32(mine, i, np.float32(-np.inf))
                        for i in range(num, num_vectors * lanes):
                            put_f32(mine, i, np.float32(-np.inf))
                        largest = find_largest(mine, num_vectors)
                        total = np.float32(0.0)
                        if num > 0:
                            total = exponentiate(mine, largest, num_vectors)
                        if v_pairs:
                            heaviest = largest_product(
                                mine, v_largest if v_split else v_factors, num_vectors
                            )
                            factor = np.float32(0.0)
                            if heaviest > 0:
                                factor = np.float32(32767.0) / heaviest
                            for n in range(v_groups):
                                number_of_row = g * v_groups + n
                                whole = quantize_weights(
                                    mine,
                                    v_factors + n * line,
                                    factor,
                                    weights + number_of_row * (line // 2),
                                    num_vectors,
                                )
                                put_f32(worth, number_of_row, heaviest / np.float32(32767.0))
                                # Stored int4 codes lie 8 above the ones that count.
                                if is_tile:
                                    whole = np.int32(0)
                                put_i32(offsets, number_of_row, np.int32(8) * whole)
                        elif v_one:
                            multiply_by(mine, v_factors, np.float32(1.0), num_vectors)
                        partial = partials + partial_bytes * (
                            q_head * partial_rows + first_partial + split
                        )
                        if first_partial < 0:
                            partial = partials + partial_bytes * (
                                (query * group + g) * partial_rows + split
                            )
                        put_f32(partial, 0, largest)
                        put_f32(partial, 1, total)
                    # Chunk by chunk, so that the passes over the columns find it in cache.
                    # Pairs begin at even places: what lies before the first or after the last
                    # has no weight.
                    done = skipped // 2 * 2 if v_pairs else skipped
                    while done < num:
                        count = min(chunk, num - done)
                        if v_split and is_tile:
                            add_pairs(
                                v_fmt,
                                v_dim,
                                group,
                                1,
                                chunk,
                                acc,
                                weights + 2 * done,
                                line // 2,
                                v_places + 8 * done,
                                count,
                            )
                        elif v_pairs:
                            add_pairs(
                                v_fmt,
                                v_dim,
                                group,
                                0,
                                chunk,
                                acc,
                                weights + 2 * done,
                                line // 2,
                                v_places + 8 * done,
                                count,
                            )
                        else:
                            add_values(
                                v_fmt,
                                v_dim,
                                group,
                                chunk,
                                acc,
                                scores + 4 * done,
                                line,
                                v_places + 8 * done,
                                count,
                                v_factors + 4 * v_scales * done,
                                4 * v_scales,
                            )
                        done += count
                    for g in range(group):
                        partial = partials + partial_bytes * (
                            (head * group + g) * partial_rows + first_partial + split
                        )
                        if first_partial < 0:
                            partial = partials + partial_bytes * (
                                (query * group + g) * partial_rows + split
                            )
                        if v_pairs:
                            finish_pairs(
                                v_fmt,
                                v_dim,
                                acc + g * acc_width,
                                partial + 4 * lanes,
                                worth + 4 * g * v_groups,
                                offsets + 4 * g * v_groups,
                            )
                        else:
                            to_natural_order(v_fmt, v_dim, acc + g * acc_width, partial + 4 * lanes)
            merges = first_partial < 0
            if first_partial < -1:
                # What `make_shared` found for the splits before this task's.
                for query in range(num_queries):
                    base = -2 - first_partial + query * first_split
                    for g in range(group):
                        copy_words(
                            args.partials
                            + partial_bytes * ((head * group + g) * args.num_partials + base),
                            partials + partial_bytes * ((query * group + g) * partial_rows),
                            first_split * (partial_bytes // 8),
                        )
            if first_partial >= 0:
                counter = first_counter + first_partial * args.num_kv_heads + head
                merges = fetch_add(args.counters, counter) == num_splits - 1
            if merges:
                for query in range(num_queries):
                    for g in range(group):
                        q_head = head * group + g
                        sink = np.float32(-np.inf)
                        if args.sinks != 0:
                            sink = get_f32(args.sinks, q_head)
                        partial = partials + partial_bytes * (q_head * partial_rows + first_partial)
                        if first_partial < 0:
                            partial = partials + partial_bytes * (
                                (query * group + g) * partial_rows
                            )
                        # A tile's splits may begin after this query.
                        seen = min(num_splits, (first_pos + query) // split_tokens + 1)
                        factor = merge_partials(
                            partial, partial_bytes, seen, out_vectors, sink, row
                        )
                        store_row(
                            v_dim,
                            row,
                            args.out
                            + 4
                            * (
                                (begin + first_query + query) * args.out_token
                                + q_head * args.out_head
                            ),
                            factor,
                            args.rotate_v,
                        )

    return compile_callback(SIGNATURE)(decode)


def partial_floats(v_dim: int) -> int:
    """Floats of one partial result: largest score, sum of exp, the weighted sum of rows."""
    return LANES * (1 + len(simd.pieces(v_dim)))
