"""The kernel for sequences with one new token, or a few that take turns over each split."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from radixkv_kernels.compile_cache import compile_callback, compile_helper
from radixkv_kernels.cpu.floats import add_values, score_keys
from radixkv_kernels.cpu.formats import RowFormat
from radixkv_kernels.cpu.gather import is_unpacked, layout, make_gather
from radixkv_kernels.cpu.memory import (
    add_to,
    clear_around,
    copy_words,
    fetch_add,
    get_f32,
    get_i32,
    get_i64,
    put_f32,
    put_i64,
)
from radixkv_kernels.cpu.pairs import (
    add_pairs,
    finish_pairs,
    largest_scales,
    quantize_query,
    score_pairs,
)
from radixkv_kernels.cpu.partials import merge_partials, partial_at, partial_bytes, sink_of
from radixkv_kernels.cpu.plan import SPLIT
from radixkv_kernels.cpu.records import COUNTERS, SIGNATURE
from radixkv_kernels.cpu.rows import load_query, store_row, to_natural_order, to_read_order
from radixkv_kernels.cpu.scores import SCORE_LINE, apply_rule, make_quantize
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import (
    exponentiate,
    fill,
    find_largest,
    largest_product,
    multiply_by,
    scale_add,
)
from radixkv_kernels.cpu.walk import MAX_CHUNK, chunk_tokens, keys_per_block


def _query_bytes(k: RowFormat) -> int:
    return 4 * (LANES * len(k.word_spans) if k.in_pairs else k.padded)


def _sum_bytes(v: RowFormat) -> int:
    return 4 * (2 * LANES * len(v.word_spans) if v.in_pairs else v.padded)


def _groups(v: RowFormat) -> int:
    """Rows of weights of a query: one for each scale group, where they are integers."""
    return v.num_groups if v.in_pairs else 1


def _layout(k: RowFormat, v: RowFormat, group: int) -> tuple[dict[str, int], int]:
    """Byte offsets of the parts of a decode thread's scratch, and its size."""
    line, v_groups = SCORE_LINE, _groups(v)
    # After a split's rows stand those that the last block, or the last pair, reads beyond it.
    places = 8 * (SPLIT + 4 * LANES + MAX_CHUNK)
    sizes = {
        "row": 4 * max(k.num_vectors, v.num_vectors) * LANES,
        "q": group * _query_bytes(k),
        "acc": group * _sum_bytes(v),
        "scores": group * line,
        "k_factors": max(1, k.num_scales) * line,
        "v_factors": max(1, v.num_scales) * line,
        "v_largest": line if is_unpacked(v) else 0,
        "weights": group * v_groups * line // 2,
        "k_places": places,
        "v_places": places,
        "q_scales": 4 * group,
        "worth": 4 * group * v_groups,
        "offsets": 4 * group * v_groups,
        "k_rows": SPLIT * k.unpacked_bytes if is_unpacked(k) else 0,
        "v_rows": SPLIT * v.unpacked_bytes if is_unpacked(v) else 0,
    }
    return layout(sizes)


def decode_scratch_bytes(k: RowFormat, v: RowFormat, group: int) -> int:
    """Bytes of scratch that each thread of the decode kernel needs."""
    return _layout(k, v, group)[1]


class _Task(NamedTuple):
    """A task of one KV head.

    One split of one query: partial results are shared, and the last task merges them.
    A tile of queries (``first_partial`` < 0): this task takes all splits from its first on, its
    partial results are its own, and int4 rows are unpacked once for all queries.
    """

    head: int
    seq: int
    first_row: int  # row of q and out of the first query
    first_pos: int  # its position
    num_queries: int
    first_split: int
    num_splits: int
    first_partial: int


@compile_helper
def _read_task(args, number):  # type: ignore[no-untyped-def]
    # The last tiles of a prompt read most: taken first, they leave no thread behind.
    record = 5 * (args.num_tasks - 1 - number // args.num_kv_heads)
    seq = np.int64(get_i32(args.tasks, record))
    first_query = np.int64(get_i32(args.tasks, record + 1))
    begin = np.int64(get_i32(args.cu_seqlens_q, seq))
    query_len = np.int64(get_i32(args.cu_seqlens_q, seq + 1)) - begin
    return _Task(
        number % args.num_kv_heads,
        seq,
        begin + first_query,
        np.int64(get_i32(args.seq_lens, seq)) - query_len + first_query,
        min(args.tile_queries, query_len - first_query),
        np.int64(get_i32(args.tasks, record + 2)),
        np.int64(get_i32(args.tasks, record + 3)),
        np.int64(get_i32(args.tasks, record + 4)),
    )


def _make_load_queries(k: RowFormat, group: int, at: dict[str, int]) -> Any:
    """A helper that makes a query token's heads ready to be multiplied with rows of K."""
    fmt, head_dim, in_pairs, q_bytes = k.fmt, k.head_dim, k.in_pairs, _query_bytes(k)
    at_row, at_q, at_scales = at["row"], at["q"], at["q_scales"]

    @compile_helper
    def load_queries(args, memory, head, token):  # type: ignore[no-untyped-def]
        row = memory + at_row
        for g in range(group):
            source = args.q + 4 * (token * args.q_token + (head * group + g) * args.q_head)
            load_query(head_dim, source, row, args.scale, args.rotate_k)
            target, scale = memory + at_q + g * q_bytes, np.float32(1.0)
            if in_pairs:
                scale = quantize_query(fmt, head_dim, row, target)
            else:
                to_read_order(fmt, head_dim, row, target)
            put_f32(memory + at_scales, g, scale)

    return load_queries


def _make_fill_beyond(k: RowFormat, v: RowFormat, group: int, at: dict[str, int]) -> Any:
    """A helper that makes what is read around the gathered rows of a split sound."""
    block, chunk, line = keys_per_block(group), chunk_tokens(k.num_bytes, v.num_bytes), SCORE_LINE
    at_k_places, at_v_places = at["k_places"], at["v_places"]
    at_k_factors, at_v_factors, at_v_largest = at["k_factors"], at["v_factors"], at["v_largest"]
    v_scales, k_one, v_one, v_unpacks = (
        v.num_scales,
        k.has_one_scale,
        v.has_one_scale,
        is_unpacked(v),
    )

    @compile_helper
    def fill_beyond(memory, low, high):  # type: ignore[no-untyped-def]
        """The places ``low`` to ``high - 1`` of the split are gathered.

        A block of keys may go beyond the last, a pair of values begin before the first. What is
        asked for ahead of the last keys are the first values.
        """
        k_places, v_places, last = memory + at_k_places, memory + at_v_places, high - 1
        if low < high:
            for i in range(block - 1):
                put_i64(k_places, high + i, get_i64(k_places, last))
            for i in range(chunk):
                place = high + block - 1 + i
                put_i64(k_places, place, get_i64(v_places, min(low + i, last)))
            for i in range(chunk + 1):
                put_i64(v_places, high + i, get_i64(v_places, last))
            if low % 2 == 1:
                put_i64(v_places, low - 1, get_i64(v_places, low))
        if k_one:
            clear_around(memory + at_k_factors, low, high)
        v_factors = memory + at_v_factors
        if v_one or v_unpacks:
            for n in range(v_scales):
                clear_around(v_factors + n * line, low, high)
        if v_unpacks:
            num_vectors = (high + LANES - 1) // LANES
            largest_scales(v_scales, v_factors, line, memory + at_v_largest, num_vectors)

    return fill_beyond


def _make_score(k: RowFormat, v: RowFormat, group: int, at: dict[str, int]) -> Any:
    """A helper that multiplies a query token's heads with gathered rows of K."""
    fmt, head_dim, in_pairs, unpacks = k.fmt, k.head_dim, k.in_pairs, is_unpacked(k)
    factor_bytes, line, chunk = 4 * k.num_scales, SCORE_LINE, chunk_tokens(k.num_bytes, v.num_bytes)
    at_q, at_scores, at_places, at_factors = at["q"], at["scores"], at["k_places"], at["k_factors"]

    @compile_helper
    def score(memory, first, num, unpacked):  # type: ignore[no-untyped-def]
        """The ``num`` tokens of the split from ``first`` on."""
        q, places = memory + at_q, memory + at_places + 8 * first
        factors, scores = memory + at_factors, memory + at_scores + 4 * first
        if unpacks and unpacked:
            factors += 4 * first
            score_pairs(fmt, head_dim, group, 1, chunk, q, places, num, factors, line, scores)
        elif in_pairs:
            factors += 4 * first
            score_pairs(fmt, head_dim, group, 0, chunk, q, places, num, factors, line, scores)
        else:
            factors += factor_bytes * first
            score_keys(
                fmt, head_dim, group, chunk, q, places, num, factors, factor_bytes, scores, line
            )

    return score


def _make_weigh(k: RowFormat, v: RowFormat, at: dict[str, int]) -> Any:
    """A helper that makes weights of a query row's scores: the softmax of one split."""
    k_unpacks, k_one = is_unpacked(k), k.has_one_scale
    v_unpacks, v_one, v_pairs, v_groups = is_unpacked(v), v.has_one_scale, v.in_pairs, _groups(v)
    line = SCORE_LINE
    at_scores, at_q_scales, at_k_factors = at["scores"], at["q_scales"], at["k_factors"]
    at_v_factors, at_weights, at_worth = at["v_factors"], at["weights"], at["worth"]
    at_offsets, at_v_sizes = at["offsets"], at["v_largest"] if v_unpacks else at["v_factors"]
    # Stored int4 codes lie 8 above the ones that count.
    quantize = make_quantize(v, 8 if v_unpacks else 0)

    @compile_helper
    def weigh(args, memory, g, q_head, distance, skipped, num, partial, unpacked):  # type: ignore[no-untyped-def]
        """See `apply_rule`; leaves the largest score and the sum of exp in ``partial``."""
        mine, num_vectors = memory + at_scores + g * line, (num + LANES - 1) // LANES
        scale = get_f32(memory + at_q_scales, g)
        if k_unpacks:
            scale_add(mine, scale, mine, np.float32(0.0), num_vectors)
        elif k_one:
            multiply_by(mine, memory + at_k_factors, scale, num_vectors)
        apply_rule(args, mine, q_head, distance, min(skipped, num), num, num_vectors)
        largest, total = find_largest(mine, num_vectors), np.float32(0.0)
        if num > 0:
            total = exponentiate(mine, largest, num_vectors)
        if v_pairs:
            heaviest = largest_product(mine, memory + at_v_sizes, num_vectors)
            quantize(
                mine,
                heaviest,
                memory + at_v_factors,
                memory + at_weights + g * v_groups * (line // 2),
                memory + at_worth + 4 * g * v_groups,
                memory + at_offsets + 4 * g * v_groups,
                num_vectors,
                not unpacked,
            )
        elif v_one:
            multiply_by(mine, memory + at_v_factors, np.float32(1.0), num_vectors)
        put_f32(partial, 0, largest)
        put_f32(partial, 1, total)

    return weigh


def _make_add_rows(k: RowFormat, v: RowFormat, group: int, at: dict[str, int]) -> Any:
    """A helper that adds up gathered rows of V by the weights of a query token's heads."""
    fmt, head_dim, in_pairs, unpacks = v.fmt, v.head_dim, v.in_pairs, is_unpacked(v)
    factor_bytes, line, chunk = 4 * v.num_scales, SCORE_LINE, chunk_tokens(k.num_bytes, v.num_bytes)
    num_sums = group * _sum_bytes(v) // (4 * LANES)
    at_acc, at_scores, at_weights = at["acc"], at["scores"], at["weights"]
    at_places, at_factors = at["v_places"], at["v_factors"]

    @compile_helper
    def add_rows(memory, first, num, unpacked):  # type: ignore[no-untyped-def]
        """The tokens ``first`` to ``num - 1`` of the split.

        Chunk by chunk, so that the passes over the columns find it in cache. Pairs begin at even
        places: what lies before the first or after the last has no weight.
        """
        acc = memory + at_acc
        fill(acc, np.float32(0.0), num_sums)
        done = first // 2 * 2 if in_pairs else first
        while done < num:
            count, places = min(chunk, num - done), memory + at_places + 8 * done
            weights = memory + at_weights + 2 * done
            if unpacks and unpacked:
                add_pairs(fmt, head_dim, group, 1, chunk, acc, weights, line // 2, places, count)
            elif in_pairs:
                add_pairs(fmt, head_dim, group, 0, chunk, acc, weights, line // 2, places, count)
            else:
                weights = memory + at_scores + 4 * done
                factors = memory + at_factors + factor_bytes * done
                add_values(
                    fmt, head_dim, group, chunk, acc, weights, line, places, count, factors,
                    factor_bytes,
                )  # fmt: skip
            done += count

    return add_rows


def _make_finish_sum(v: RowFormat, at: dict[str, int]) -> Any:
    """A helper that turns a query row's sums into those of a partial result."""
    fmt, head_dim, in_pairs, acc_bytes = v.fmt, v.head_dim, v.in_pairs, _sum_bytes(v)
    group_bytes, at_acc, at_worth, at_offsets = (
        4 * _groups(v),
        at["acc"],
        at["worth"],
        at["offsets"],
    )

    @compile_helper
    def finish_sum(memory, g, target):  # type: ignore[no-untyped-def]
        acc = memory + at_acc + g * acc_bytes
        if in_pairs:
            worth, offsets = memory + at_worth, memory + at_offsets
            place = g * group_bytes
            finish_pairs(fmt, head_dim, acc, target, worth + place, offsets + place)
        else:
            to_natural_order(fmt, head_dim, acc, target)

    return finish_sum


def _make_own_partials(v: RowFormat, group: int) -> Any:
    """A helper that says where the partial results of a query's first head lie, split 0 first."""
    num_bytes = partial_bytes(v)

    @compile_helper
    def own_partials(args, memory, task, query):  # type: ignore[no-untyped-def]
        partials = memory + args.partials_offset + num_bytes * (query * group * task.num_splits)
        if task.first_partial >= 0:
            partials = partial_at(args, num_bytes, task.head * group, task.first_partial)
        return partials

    return own_partials


@compile_helper
def _partials_step(args, task):  # type: ignore[no-untyped-def]
    """Partial results from a query head's to the next one's."""
    return task.num_splits if task.first_partial < 0 else args.num_partials


def _make_merge(v: RowFormat, group: int, own_partials: Any, at_row: int) -> Any:
    """A helper that merges a task's partial results into the output, if it is the last."""
    num_bytes, num_vectors, v_dim = partial_bytes(v), v.num_vectors, v.head_dim
    first_counter, split_tokens = COUNTERS, SPLIT

    @compile_helper
    def merge(args, memory, task):  # type: ignore[no-untyped-def]
        is_last = True
        if task.first_partial >= 0:
            counter = first_counter + task.first_partial * args.num_kv_heads + task.head
            is_last = fetch_add(args.counters, counter) == task.num_splits - 1
        for query in range(task.num_queries if is_last else 0):
            # A tile's splits may begin after this query.
            seen = min(task.num_splits, (task.first_pos + query) // split_tokens + 1)
            first = own_partials(args, memory, task, query)
            step = _partials_step(args, task) * num_bytes
            # What `shared` found for the splits before a tile's own.
            number = -2 - task.first_partial + query * task.first_split
            found = partial_at(args, num_bytes, task.head * group, number)
            for g in range(group):
                partials, q_head = first + g * step, task.head * group + g
                if task.first_partial < -1:
                    source = found + g * args.num_partials * num_bytes
                    copy_words(source, partials, task.first_split * (num_bytes // 8))
                sink, row = sink_of(args, q_head), memory + at_row
                factor = merge_partials(partials, num_bytes, seen, num_vectors, sink, row)
                place = (task.first_row + query) * args.out_token + q_head * args.out_head
                store_row(v_dim, row, args.out + 4 * place, factor, args.rotate_v)

    return merge


def make_decode(k: RowFormat, v: RowFormat, group: int) -> Any:
    """The kernel for sequences with one new token and ``group`` query heads a KV head."""
    at, _ = _layout(k, v, group)
    num_bytes, split_tokens = partial_bytes(v), SPLIT
    gather = make_gather(k, v, at, asks=True)
    fill_beyond = _make_fill_beyond(k, v, group, at)
    load_queries = _make_load_queries(k, group, at)
    score = _make_score(k, v, group, at)
    weigh = _make_weigh(k, v, at)
    add_rows = _make_add_rows(k, v, group, at)
    finish_sum = _make_finish_sum(v, at)
    own_partials = _make_own_partials(v, group)
    merge = _make_merge(v, group, own_partials, at["row"])

    def decode(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + fetch_add(args.counters, 0) * args.scratch_bytes
        while True:
            number = fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            task = _read_task(args, number)
            is_tile = task.first_partial < 0
            after_split = task.num_splits if is_tile else task.first_split + 1
            for split in range(task.first_split, after_split):
                origin = split * split_tokens
                low, high = origin, min(origin + split_tokens, task.first_pos + task.num_queries)
                if args.window > 0:
                    low = max(low, task.first_pos + 1 - args.window)
                add_to(args.counters, 4, max(np.int64(0), high - low))
                gather(args, memory, task.seq, task.head, origin, low, high, is_tile)
                fill_beyond(memory, low - origin, high - origin)
                for query in range(task.num_queries):
                    pos = task.first_pos + query
                    start, end = origin, min(origin + split_tokens, pos + 1)
                    if args.window > 0:
                        start = max(start, pos + 1 - args.window)
                    # A token's place is counted from the split's first, seen or not, so that
                    # sums over vectors are the same whatever else is seen.
                    skipped = max(np.int64(0), start - origin)
                    num = end - origin if end > start else np.int64(0)
                    load_queries(args, memory, task.head, task.first_row + query)
                    if num > 0:
                        score(memory, skipped, num - skipped, is_tile)
                    first = own_partials(args, memory, task, query) + split * num_bytes
                    step = _partials_step(args, task) * num_bytes
                    for g in range(group):
                        q_head, partial = task.head * group + g, first + g * step
                        weigh(args, memory, g, q_head, origin - pos, skipped, num, partial, is_tile)
                    add_rows(memory, skipped, num, is_tile)
                    for g in range(group):
                        finish_sum(memory, g, first + g * step + 4 * LANES)
            merge(args, memory, task)

    return compile_callback(SIGNATURE)(decode)
