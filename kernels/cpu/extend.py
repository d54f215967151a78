"""The kernel for sequences with several new tokens, or with many query heads a KV head."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from radixkv_kernels.compile_cache import compile_callback, compile_helper
from radixkv_kernels.cpu.formats import RowFormat
from radixkv_kernels.cpu.gather import make_rows_at, page_of
from radixkv_kernels.cpu.memory import (
    add_to,
    copy_words,
    fetch_add,
    get_f32,
    get_i32,
    put_f32,
    put_i32,
)
from radixkv_kernels.cpu.partials import partial_bytes, sink_of
from radixkv_kernels.cpu.plan import SPLIT, TILE_ROWS
from radixkv_kernels.cpu.records import SIGNATURE
from radixkv_kernels.cpu.rows import dequantize_row, load_query, store_row, widen_scales
from radixkv_kernels.cpu.shared import query_partial, query_pos, query_row
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import (
    TILE_M,
    cap_scores,
    fill,
    multiply_matrices,
    scale_add,
    softmax_tile,
)

TILE = 64  # tokens dequantized at a time


def extend_rows(group: int) -> int:
    """Query rows of an extend task, padded to whole vectors."""
    return -(-max(1, TILE_ROWS // group) * group // LANES) * LANES


def extend_scratch_bytes(k: RowFormat, v: RowFormat, group: int) -> int:
    """Bytes of scratch that each thread of the extend kernel needs."""
    rows = extend_rows(group)
    k_width, v_width = (4 * LANES * form.num_vectors for form in (k, v))
    scales = max(1, k.num_scales, v.num_scales)
    total = rows * (4 * k.head_dim + v_width + 4 * TILE + 16) + TILE * (k_width + v_width)
    total += 8 * (TILE + 64) * scales + max(k_width, v_width)
    return -(-total // 64) * 64


class _Workspace(NamedTuple):
    """Where the parts of a thread's scratch begin."""

    q: int  # transposed, [head_dim, rows]: a score tile is K times that
    acc: int  # [rows, v_head_dim]
    scores: int  # [TILE, rows]
    stats: int  # largest score, sum of exp, factor on what was summed before: [3, rows]
    query_pos: int  # [rows] int32
    k_tile: int  # [TILE, head_dim]
    v_tile: int
    factors: int
    row: int


class _Task(NamedTuple):
    """A tile of queries of one KV head, and the tokens ``start`` to ``end - 1`` that it reads.

    Not shared: ``first_query`` counts in the sequence, ``first_row`` is its row of q.
    Shared: ``first_query`` counts in the record's queries, what is read are whole splits, of which
    ``split`` is the first.
    """

    head: int
    seq: int
    first_query: int
    num_queries: int
    first_row: int
    first_pos: int
    split: int
    start: int
    end: int


def _make_read_task(shared: int) -> Any:
    tile, tile_rows, split_tokens = TILE, TILE_ROWS, SPLIT

    @compile_helper
    def read_task(args, number, window):  # type: ignore[no-untyped-def]
        # The last tiles read most: taken first, they leave no thread behind at the end.
        record = 5 * (args.num_tasks - 1 - number // args.num_kv_heads)
        head, seq = number % args.num_kv_heads, np.int64(get_i32(args.tasks, record))
        if shared:
            split = np.int64(get_i32(args.tasks, record + 1))
            after_split = np.int64(get_i32(args.tasks, record + 2))
            first_query = np.int64(get_i32(args.tasks, record + 3))
            num_queries = np.int64(get_i32(args.tasks, record + 4))
            start, end = split * split_tokens, after_split * split_tokens
            first_row = first_pos = np.int64(0)
        else:
            first_query = np.int64(get_i32(args.tasks, record + 1))
            begin = np.int64(get_i32(args.cu_seqlens_q, seq))
            query_len = np.int64(get_i32(args.cu_seqlens_q, seq + 1)) - begin
            num_queries = min(max(1, tile_rows // args.group), query_len - first_query)
            first_row = begin + first_query
            first_pos = np.int64(get_i32(args.seq_lens, seq)) - query_len + first_query
            split = np.int64(0)
            start = max(np.int64(0), first_pos + 1 - window) // tile * tile
            end = first_pos + num_queries
        return _Task(head, seq, first_query, num_queries, first_row, first_pos, split, start, end)

    return read_task


def _make_load_queries(k: RowFormat, v: RowFormat, shared: int) -> Any:
    """A helper that lays out a tile's queries, and begins its sums."""
    k_dim, v_vectors = k.head_dim, v.num_vectors

    @compile_helper
    def load_queries(args, work, task, rows):  # type: ignore[no-untyped-def]
        group, num_rows = args.group, task.num_queries * args.group
        for r in range(num_rows):
            query = r // group
            token, pos = task.first_row + query, task.first_pos + query
            if shared:
                token = query_row(args, task.first_query + query)
                pos = query_pos(args, task.first_query + query)
            q_head = task.head * group + r % group
            source = args.q + 4 * (token * args.q_token + q_head * args.q_head)
            load_query(k_dim, source, work.row, args.scale, args.rotate_k)
            for e in range(k_dim):
                put_f32(work.q, e * rows + r, get_f32(work.row, e))
            put_i32(work.query_pos, r, np.int32(pos))
        for r in range(num_rows, rows):
            for e in range(k_dim):
                put_f32(work.q, e * rows + r, np.float32(0.0))
            put_i32(work.query_pos, r, np.int32(-1))
        fill(work.stats, np.float32(-np.inf), rows // LANES)
        fill(work.stats + 4 * rows, np.float32(0.0), rows // LANES)
        fill(work.acc, np.float32(0.0), rows * v_vectors)

    return load_queries


def _make_dequantize(form: RowFormat) -> Any:
    """A helper that makes floats of ``num`` rows of one page."""
    fmt, head_dim, num_scales, factor = form.fmt, form.head_dim, form.num_scales, form.factor
    row_bytes, width = form.num_bytes, 4 * LANES * form.num_vectors

    @compile_helper
    def dequantize(row, scales, num, factors, target):  # type: ignore[no-untyped-def]
        if num_scales > 0:
            widen_scales(scales, factors, num * num_scales, np.float32(factor))
        for j in range(num):
            mine = factors + 4 * num_scales * j
            dequantize_row(fmt, head_dim, row + j * row_bytes, mine, target + j * width)

    return dequantize


def _make_fill_tiles(k: RowFormat, v: RowFormat) -> Any:
    """A helper that makes float tiles of ``num`` tokens' K and V."""
    rows_at, dequantize_k, dequantize_v = (
        make_rows_at(k, v),
        _make_dequantize(k),
        _make_dequantize(v),
    )
    k_width, v_width = (4 * LANES * form.num_vectors for form in (k, v))

    @compile_helper
    def fill_tiles(args, work, task, t, num):  # type: ignore[no-untyped-def]
        i = np.int64(0)
        while i < num:
            number, offset = (t + i) // args.page_size, (t + i) % args.page_size
            page = page_of(args, task.seq, number)
            place = rows_at(args, page, task.head, offset)
            length = min(args.page_size - offset, num - i)
            k_target, v_target = work.k_tile + i * k_width, work.v_tile + i * v_width
            dequantize_k(place.k_row, place.k_scales, length, work.factors, k_target)
            dequantize_v(place.v_row, place.v_scales, length, work.factors, v_target)
            i += length

    return fill_tiles


def _make_attend(k: RowFormat, v: RowFormat) -> Any:
    """A helper for a tile of queries and a tile of ``num`` tokens from ``t`` on."""
    k_dim, v_vectors, tile_m = k.head_dim, v.num_vectors, TILE_M
    k_width, v_width = (4 * LANES * form.num_vectors for form in (k, v))

    @compile_helper
    def add_bias(args, work, task, t, num, rows):  # type: ignore[no-untyped-def]
        for i in range(num):
            for r in range(task.num_queries * args.group):
                slope = get_f32(args.slopes, task.head * args.group + r % args.group)
                bias = slope * np.float32(t + i - get_i32(work.query_pos, r))
                at = i * rows + r
                put_f32(work.scores, at, get_f32(work.scores, at) + bias)

    @compile_helper
    def attend(args, work, task, t, num, window, rows):  # type: ignore[no-untyped-def]
        num_rows, line, num_vectors = task.num_queries * args.group, 4 * rows, rows // LANES
        keys = (num + tile_m - 1) // tile_m * tile_m
        multiply_matrices(
            0,
            keys,
            num_vectors,
            k_dim,
            work.k_tile,
            k_width,
            4,
            work.q,
            line,
            work.scores,
            line,
        )
        if args.softcap > 0:
            cap_scores(work.scores, args.softcap, num * num_vectors)
        if args.slopes != 0:
            add_bias(args, work, task, t, num, rows)
        for n in range(num_vectors):
            place = 4 * LANES * n
            scores, stats = work.scores + place, work.stats + place
            softmax_tile(scores, line, num, t, work.query_pos + place, window, stats, line)
        for r in range(num_rows):
            alpha = get_f32(work.stats, 2 * rows + r)
            if alpha != np.float32(1.0):
                mine = work.acc + r * v_width
                scale_add(mine, alpha, mine, np.float32(0.0), v_vectors)
        tiled = (num_rows + tile_m - 1) // tile_m * tile_m
        multiply_matrices(
            1,
            tiled,
            v_vectors,
            num,
            work.scores,
            4,
            line,
            work.v_tile,
            v_width,
            work.acc,
            v_width,
        )

    return attend


def _make_store(v: RowFormat) -> Any:
    """A helper that gives a tile's results: divided, its sinks counted, rotated back."""
    v_dim, v_width = v.head_dim, 4 * LANES * v.num_vectors

    @compile_helper
    def store(args, work, task, rows):  # type: ignore[no-untyped-def]
        for r in range(task.num_queries * args.group):
            query, q_head = r // args.group, task.head * args.group + r % args.group
            m, total = get_f32(work.stats, r), get_f32(work.stats, rows + r)
            sink = sink_of(args, q_head)
            largest = max(m, sink)
            w = np.float32(math.exp(m - largest))
            total = total * w
            if args.sinks != 0:
                total += np.float32(math.exp(sink - largest))
            place = (task.first_row + query) * args.out_token + q_head * args.out_head
            acc = work.acc + r * v_width
            store_row(v_dim, acc, args.out + 4 * place, w / total, args.rotate_v)

    return store


def _make_keep(v: RowFormat) -> Any:
    """A helper that leaves a shared task's partial results, at the first of its splits."""
    num_bytes, v_width, split_tokens = partial_bytes(v), 4 * LANES * v.num_vectors, SPLIT

    @compile_helper
    def keep(args, work, task, rows):  # type: ignore[no-untyped-def]
        num_splits = (task.end - task.start) // split_tokens
        for r in range(task.num_queries * args.group):
            query, q_head = task.first_query + r // args.group, r % args.group
            q_head += task.head * args.group
            place = query_partial(args, num_bytes, query, q_head, task.split)
            for i in range(1, num_splits):
                put_f32(place + i * num_bytes, 0, np.float32(-np.inf))
            put_f32(place, 0, get_f32(work.stats, r))
            put_f32(place, 1, get_f32(work.stats, rows + r))
            copy_words(work.acc + r * v_width, place + 4 * LANES, v_width // 8)

    return keep


def make_extend(k: RowFormat, v: RowFormat, shared: int = 0) -> Any:
    """The kernel for sequences with several new tokens, or with many query heads a KV head.

    With ``shared``: for whole splits that queries of several sequences attend to, as
    `make_shared`, in floats; all splits of a task become one partial result, at its first.
    """
    k_dim, most_scales = k.head_dim, max(1, k.num_scales, v.num_scales)
    k_width, v_width = (4 * LANES * form.num_vectors for form in (k, v))
    tile, tile_rows = TILE, TILE_ROWS
    read_task = _make_read_task(shared)
    load_queries = _make_load_queries(k, v, shared)
    fill_tiles = _make_fill_tiles(k, v)
    attend = _make_attend(k, v)
    finish = _make_keep(v) if shared else _make_store(v)

    @compile_helper
    def workspace_of(memory, most_rows):  # type: ignore[no-untyped-def]
        acc = memory + 4 * k_dim * most_rows
        scores = acc + v_width * most_rows
        stats = scores + 4 * tile * most_rows
        positions = stats + 12 * most_rows
        k_tile = positions + 4 * most_rows
        v_tile = k_tile + tile * k_width
        factors = v_tile + tile * v_width
        row = factors + 4 * 2 * (tile + 64) * most_scales
        return _Workspace(memory, acc, scores, stats, positions, k_tile, v_tile, factors, row)

    def extend(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        memory = args.scratch + fetch_add(args.counters, 0) * args.scratch_bytes
        most_rows = max(1, tile_rows // args.group) * args.group
        work = workspace_of(memory, (most_rows + LANES - 1) // LANES * LANES)
        window = args.window if args.window > 0 else np.int64(1 << 30)
        while True:
            number = fetch_add(args.counters, 1)
            if number >= args.num_tasks * args.num_kv_heads:
                break
            task = read_task(args, number, window)
            rows = (task.num_queries * args.group + LANES - 1) // LANES * LANES
            load_queries(args, work, task, rows)
            t = task.start
            while t < task.end:
                num = min(tile, task.end - t)
                add_to(args.counters, 4, num)
                fill_tiles(args, work, task, t, num)
                attend(args, work, task, t, num, window, rows)
                t += tile
            finish(args, work, task, rows)

    return compile_callback(SIGNATURE)(extend)
