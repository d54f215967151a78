"""Attention of tiles of queries to stored pages: `split_kernel` and `extend_kernel`.

Parameters are one flat list, as Triton takes them (README.md says why).
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixkv_kernels.gpu.numbers import LN2, LOG2E, MODEL, power_of_two
from radixkv_kernels.gpu.rows import read_queries, read_rows, store_rows
from radixkv_kernels.gpu.tiles import find_run


@triton.jit
def _attend(
    q_low,
    q_high,
    q_factor,  # [BLOCK_M]: softmax scale and what `read_queries` took out
    query_pos,  # [BLOCK_M] int32; -1 sees nothing
    slope,  # [BLOCK_M] float32, read if HAS_SLOPES
    table_ptr,  # page ids from position 0 on
    first,
    last,  # tokens first..last-1 are read
    head,
    num_kv_heads,
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    window,  # read if HAS_WINDOW
    softcap,  # read if HAS_SOFTCAP
    PAGE_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax over tokens first..last-1, in tiles that begin at multiples of BLOCK_N.

    Returns the weighted sums of V (twice [BLOCK_M, V_BLOCK], arranged as in `read_rows`), not yet
    divided by the sum of weights; and m, l: the largest score times log2(e), the sum of
    2^(score - m). [BLOCK_M] each.
    """
    acc = tl.zeros((BLOCK_M, V_BLOCK), tl.float32)
    acc_high = acc
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
        pos = start + tl.arange(0, BLOCK_N)
        stored = (pos >= first) & (pos < last)
        page_id = tl.load(table_ptr + pos // PAGE_SIZE, mask=stored, other=0).to(tl.int64)
        row = (page_id * num_kv_heads + head) * PAGE_SIZE + pos % PAGE_SIZE
        k_low, k_high, k_factor = read_rows(
            k_pages_ptr, k_scale_ptr, row, stored, K_FORMAT, HEAD_DIM, K_GROUP, K_BLOCK, K_DOT
        )
        score = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        if K_FORMAT != MODEL:
            score = tl.dot(q_high, tl.trans(k_high), score, input_precision="ieee")
        score = score * q_factor[:, None]
        if K_FORMAT != MODEL:
            score = score * k_factor[None, :]
        if HAS_SOFTCAP:
            # tanh of the size, so that neither power overflows.
            decay = tl.exp2(tl.abs(score) * (-2.0 * LOG2E / softcap))
            capped = softcap * (1.0 - decay) / (1.0 + decay)
            # 1 - decay has no digits left of scores far below the cap: a series instead.
            part = score / softcap
            square = part * part
            series = square * (62.0 / 2835.0) - 17.0 / 315.0
            series = (series * square + 2.0 / 15.0) * square - 1.0 / 3.0
            near = tl.abs(score) * (series * square + 1.0)
            capped = tl.where(square < 0.0625, near, capped)
            score = tl.where(score < 0, -capped, capped)
        if HAS_SLOPES:
            score += slope[:, None] * (pos[None, :] - query_pos[:, None]).to(tl.float32)
        seen = stored[None, :] & (pos[None, :] <= query_pos[:, None])
        if HAS_WINDOW:
            seen = seen & (pos[None, :] > query_pos[:, None] - window)
        score = tl.where(seen, score * LOG2E, float("-inf"))
        m_new = tl.maximum(m, tl.max(score, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(score - m_safe[:, None])
        decay_m = tl.exp2(m - m_safe)
        l = l * decay_m + tl.sum(p, 1)
        m = m_new
        v_low, v_high, v_factor = read_rows(
            v_pages_ptr, v_scale_ptr, row, stored, V_FORMAT, V_HEAD_DIM, V_GROUP, V_BLOCK, V_DOT
        )
        if V_FORMAT == MODEL:
            acc = tl.dot(p.to(V_DOT), v_low, acc * decay_m[:, None], input_precision="ieee")
        else:
            unit, inverse = power_of_two(tl.max(v_factor, 0))
            weight = (p * (v_factor * inverse)[None, :]).to(V_DOT)
            acc = acc * decay_m[:, None] + tl.dot(weight, v_low, input_precision="ieee") * unit
            part = tl.dot(weight, v_high, input_precision="ieee") * unit
            acc_high = acc_high * decay_m[:, None] + part
    return acc, acc_high, m, l


@triton.jit(do_not_specialize=["num_runs", "num_splits", "stride_table", "window"])
def split_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM], rotated if K is
    out_ptr,  # [num_parts, num_q_heads, V_HEAD_DIM] float32: of each part, normalized
    lse_ptr,  # [num_parts, num_q_heads] float32; -inf for a part without tokens
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,  # [num_runs, max_pages] int32; SHARED: from each run's start on
    starts_ptr,  # [num_runs] int32: first token of each run, read if HAS_STARTS
    ends_ptr,  # [num_runs] int32: the token after its last
    cu_queries_ptr,  # [num_runs + 1] int32
    query_rows_ptr,  # SHARED: [cu_queries[-1]] int32, rows of q
    query_pos_ptr,  # SHARED: [num_tokens] int32, position of each row of q
    slopes_ptr,  # [num_q_heads] float32, read if HAS_SLOPES
    num_runs,
    num_kv_heads,
    num_splits,
    stride_table,
    stride_q_token,
    stride_q_head,
    softmax_scale,
    window,
    softcap,
    SHARED: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # query heads a KV head
    PAGE_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HEADS: tl.constexpr,  # query heads in a tile, at most GROUP_SIZE
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (tiles, KV heads x blocks of HEADS, splits): partial results of single queries.

    Not SHARED (decode): tile i is sequence i with the one query row ``cu_queries[i]``; sequences
    with more or fewer new tokens are passed over. Part: ``i * num_splits + split``.
    SHARED: a tile holds BLOCK_M // HEADS queries of one run. Part: ``pair * num_splits + split``,
    where pair counts ``query_rows``. Splits lie at multiples of SPLIT from position 0.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS if SHARED else 1
    NUM_BLOCKS: tl.constexpr = (GROUP_SIZE + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // NUM_BLOCKS
    offs_m = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % NUM_BLOCKS * HEADS + offs_m % HEADS
    q_head = kv_head * GROUP_SIZE + in_group
    mask_m = (in_group < GROUP_SIZE) & (offs_m < BLOCK_Q * HEADS)
    if SHARED:
        run, local = find_run(cu_queries_ptr, num_runs, tl.program_id(0), BLOCK_Q)
        first_pair = tl.load(cu_queries_ptr + run)
        pair = first_pair + local + offs_m // HEADS
        mask_m = mask_m & (pair < tl.load(cu_queries_ptr + run + 1))
        if first_pair + local >= tl.load(cu_queries_ptr + run + 1):
            return
        query = tl.load(query_rows_ptr + pair, mask=mask_m, other=0)
        query_pos = tl.load(query_pos_ptr + query, mask=mask_m, other=-1)
    else:
        run = tl.program_id(0)
        begin = tl.load(cu_queries_ptr + run)
        if tl.load(cu_queries_ptr + run + 1) - begin != 1:
            return
        pair = run + offs_m * 0
        query = begin + offs_m * 0
        query_pos = tl.load(ends_ptr + run) - 1 + offs_m * 0
    begin, end = 0, tl.load(ends_ptr + run)
    if HAS_STARTS:
        begin = tl.load(starts_ptr + run)
    split = begin // SPLIT + tl.program_id(2)
    first, last = tl.maximum(begin, split * SPLIT), tl.minimum(end, (split + 1) * SPLIT)
    if HAS_WINDOW:
        far = tl.min(tl.where(mask_m, query_pos, 0x7FFFFFFF), 0)
        first = tl.maximum(first, far - window + 1)
    num_q_heads = num_kv_heads * GROUP_SIZE
    part = (pair.to(tl.int64) * num_splits + tl.program_id(2)) * num_q_heads + q_head
    if first >= last:
        tl.store(lse_ptr + part, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=mask_m)
        return
    start = query.to(tl.int64) * stride_q_token + q_head.to(tl.int64) * stride_q_head
    q_low, q_high, q_factor = read_queries(q_ptr, start, mask_m, K_FORMAT, HEAD_DIM, K_BLOCK, K_DOT)
    slope = q_factor
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + q_head, mask=mask_m, other=0.0)
    table = table_ptr + run.to(tl.int64) * stride_table
    if SHARED:
        table -= begin // PAGE_SIZE
    acc, acc_high, m, l = _attend(
        q_low, q_high, q_factor * softmax_scale, tl.where(mask_m, query_pos, -1), slope,
        table, first, last, kv_head, num_kv_heads,
        k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr, window, softcap,
        PAGE_SIZE, K_FORMAT, V_FORMAT, HEAD_DIM, V_HEAD_DIM, K_GROUP, V_GROUP, K_BLOCK, V_BLOCK,
        K_DOT, V_DOT, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    # A row that saw nothing has l = 0 and lse = -inf; a query that is not finite has NaN.
    l_safe = tl.where(l == 0, 1.0, l)
    lse = tl.where(l == 0, float("-inf"), (m + tl.log2(l_safe)) * LN2)
    tl.store(lse_ptr + part, lse, mask=mask_m)
    store_rows(
        out_ptr, part * V_HEAD_DIM, mask_m, acc / l_safe[:, None], acc_high / l_safe[:, None],
        V_FORMAT, V_HEAD_DIM, V_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_splits", "first_tile", "stride_table", "window"])
def extend_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM], rotated if K is
    out_ptr,  # [num_tokens, num_q_heads, V_HEAD_DIM], rotated if V is; PARTS: see below, float32
    lse_ptr,  # PARTS: [tiles * BLOCK_Q, num_splits, num_q_heads] float32; -inf: saw no tokens
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,  # [num_seqs, max_pages] int32
    seq_lens_ptr,  # [num_seqs] int32
    cu_seqlens_q_ptr,  # [num_seqs + 1] int32
    slopes_ptr,  # [num_q_heads] float32, read if HAS_SLOPES
    sinks_ptr,  # [num_q_heads] float32, read if HAS_SINKS
    num_seqs,
    num_kv_heads,
    num_splits,
    first_tile,
    stride_table,
    stride_q_token,
    stride_q_head,
    softmax_scale,
    window,
    softcap,
    GROUP_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_GROUP: tl.constexpr,
    V_GROUP: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_DOT: tl.constexpr,
    V_DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (tiles from ``first_tile`` on, KV heads x blocks of HEADS, splits).

    A tile is BLOCK_Q = BLOCK_M // HEADS tokens of a sequence; sequences with one new token are
    left to `split_kernel`. PARTS: a program reads one split of SPLIT tokens and leaves a partial
    result for `merge_kernel`, [tiles * BLOCK_Q, num_splits, num_q_heads, V_HEAD_DIM]; splits lie
    at multiples of SPLIT from position 0, a tile's first is that of the first token it sees. Else
    it reads all tokens and gives, in every bit, what merging one part would.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    NUM_BLOCKS: tl.constexpr = (GROUP_SIZE + HEADS - 1) // HEADS
    seq, local = find_run(cu_seqlens_q_ptr, num_seqs, first_tile + tl.program_id(0), BLOCK_Q)
    begin = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - begin
    if (local >= query_len) | (query_len == 1):
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    kv_head = tl.program_id(1) // NUM_BLOCKS
    offs_m = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % NUM_BLOCKS * HEADS + offs_m % HEADS
    q_head = kv_head * GROUP_SIZE + in_group
    in_seq = local + offs_m // HEADS
    mask_m = (in_group < GROUP_SIZE) & (offs_m < BLOCK_Q * HEADS) & (in_seq < query_len)
    past = seq_len - query_len
    last = past + tl.minimum(local + BLOCK_Q, query_len)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(past + local - window + 1, 0)
    num_q_heads = num_kv_heads * GROUP_SIZE
    if PARTS:
        # Partial results are few enough for int32, which leaves registers to the loop.
        token = tl.program_id(0) * BLOCK_Q + offs_m // HEADS
        part = (token * num_splits + tl.program_id(2)) * num_q_heads + q_head
        split = first // SPLIT + tl.program_id(2)
        first, last = tl.maximum(first, split * SPLIT), tl.minimum(last, (split + 1) * SPLIT)
        if first >= last:
            tl.store(lse_ptr + part, tl.full((BLOCK_M,), float("-inf"), tl.float32), mask=mask_m)
            return
    query = (begin + in_seq).to(tl.int64)
    start = query * stride_q_token + q_head.to(tl.int64) * stride_q_head
    q_low, q_high, q_factor = read_queries(q_ptr, start, mask_m, K_FORMAT, HEAD_DIM, K_BLOCK, K_DOT)
    slope = q_factor
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + q_head, mask=mask_m, other=0.0)
    acc, acc_high, m, l = _attend(
        q_low, q_high, q_factor * softmax_scale, tl.where(mask_m, past + in_seq, -1), slope,
        table_ptr + seq.to(tl.int64) * stride_table, first, last, kv_head, num_kv_heads,
        k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr, window, softcap,
        PAGE_SIZE, K_FORMAT, V_FORMAT, HEAD_DIM, V_HEAD_DIM, K_GROUP, V_GROUP, K_BLOCK, V_BLOCK,
        K_DOT, V_DOT, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    l_safe = tl.where(l == 0, 1.0, l)
    lse = tl.where(l == 0, float("-inf"), (m + tl.log2(l_safe)) * LN2)
    acc, acc_high = acc / l_safe[:, None], acc_high / l_safe[:, None]
    if PARTS:
        tl.store(lse_ptr + part, lse, mask=mask_m)
        place = part * V_HEAD_DIM
    else:
        place = (query * num_q_heads + q_head) * V_HEAD_DIM
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + q_head, mask=mask_m, other=float("-inf"))
            top = tl.maximum(sink, lse)
            top = tl.where(top == float("-inf"), 0.0, top)
            weight = tl.exp2((lse - top) * LOG2E)
            total = tl.exp2((sink - top) * LOG2E) + weight
            total = tl.where(total == 0, 1.0, total)
            acc = acc * weight[:, None] / total[:, None]
            acc_high = acc_high * weight[:, None] / total[:, None]
    store_rows(out_ptr, place, mask_m, acc, acc_high, V_FORMAT, V_HEAD_DIM, V_BLOCK)
