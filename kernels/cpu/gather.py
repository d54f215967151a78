"""Where the rows of a sequence's tokens lie, page by page, and what their codes are worth."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from radixkv_kernels.compile_cache import compile_helper
from radixkv_kernels.cpu.formats import RowFormat
from radixkv_kernels.cpu.memory import ask_for, get_i32, put_i64, put_steps
from radixkv_kernels.cpu.pairs import split_scales, unpack_rows
from radixkv_kernels.cpu.rows import widen_scales
from radixkv_kernels.cpu.scores import SCORE_LINE


class Place(NamedTuple):
    """Addresses of one token's rows of a KV head, and of their scales."""

    k_row: int
    v_row: int
    k_scales: int
    v_scales: int


def make_rows_at(k: RowFormat, v: RowFormat) -> Any:
    """A helper that says where rows of a page lie; the only one that knows how pages lie."""
    k_bytes, v_bytes = k.num_bytes, v.num_bytes
    k_scale_bytes, v_scale_bytes = 2 * k.num_scales, 2 * v.num_scales

    @compile_helper
    def rows_at(args, page, head, offset):  # type: ignore[no-untyped-def]
        return Place(
            args.k_pages + page * args.k_page + head * args.k_head + offset * k_bytes,
            args.v_pages + page * args.v_page + head * args.v_head + offset * v_bytes,
            args.k_scale + page * args.ks_page + head * args.ks_head + offset * k_scale_bytes,
            args.v_scale + page * args.vs_page + head * args.vs_head + offset * v_scale_bytes,
        )

    return rows_at


@compile_helper
def page_of(args, seq, number):  # type: ignore[no-untyped-def]
    """The id of a sequence's page ``number``."""
    page = np.int64(get_i32(args.page_table, seq * args.table_row + number))
    if page < 0 or page >= args.num_pages:
        # Read as page 0; the call fails in the end.
        put_i64(args.counters, 2, page + (1 if page >= 0 else 0))
        page = 0
    return page


def is_unpacked(form: RowFormat) -> bool:
    """Whether rows of this format are unpacked where several queries take turns over them."""
    return form.is_int4 and form.in_pairs


def make_take(form: RowFormat, at_factors: int, at_places: int, at_unpacked: int) -> Any:
    """A helper that notes the addresses of rows in a split, and makes floats of their scales.

    ``at_...``: where in a thread's scratch these are kept. ``at_unpacked`` < 0: never unpacked.
    """
    num_scales, factor, line = form.num_scales, form.factor, SCORE_LINE
    row_bytes, wide_bytes, head_dim = form.num_bytes, form.unpacked_bytes, form.head_dim
    splits = form.is_int4 and form.in_pairs
    unpacks = splits and at_unpacked >= 0

    @compile_helper
    def take(memory, row, scales, at, num, unpacked):  # type: ignore[no-untyped-def]
        """``num`` rows of one page, from token ``at`` of the split on."""
        if splits:
            split_scales(num_scales, scales, memory + at_factors + 4 * at, line, num)
        elif num_scales > 0:
            target = memory + at_factors + 4 * num_scales * at
            widen_scales(scales, target, num * num_scales, np.float32(factor))
        step = row_bytes
        if unpacks and unpacked:
            target = memory + at_unpacked + at * wide_bytes
            unpack_rows(head_dim, row, target, num)
            row, step = target, wide_bytes
        put_steps(memory + at_places + 8 * at, row, step, num)

    return take


def make_gather(k: RowFormat, v: RowFormat, at: dict[str, int], *, asks: bool) -> Any:
    """A helper that takes the rows of K and V of a part of a split.

    ``at``: offsets in a thread's scratch of "k_factors", "k_places" and, where rows may be
    unpacked, "k_rows"; as of V. ``asks``: all lines of scales are asked for before they are read.
    """
    rows_at = make_rows_at(k, v)
    take_k = make_take(k, at["k_factors"], at["k_places"], at.get("k_rows", -1))
    take_v = make_take(v, at["v_factors"], at["v_places"], at.get("v_rows", -1))
    k_scales, v_scales = k.num_scales, v.num_scales
    first_turn = 0 if asks else 1

    @compile_helper
    def gather(args, memory, seq, head, origin, low, high, unpacked):  # type: ignore[no-untyped-def]
        """The tokens ``low`` to ``high - 1`` of the split that begins at ``origin``."""
        page_size = args.page_size
        first_page = low // page_size
        first_offset = low - first_page * page_size
        for turn in range(first_turn, 2):
            t, number, offset = low, first_page, first_offset
            while t < high:
                place = rows_at(args, page_of(args, seq, number), head, offset)
                length = min(page_size - offset, high - t)
                if turn == 0:
                    if k_scales > 0:
                        ask_for(place.k_scales)
                    if v_scales > 0:
                        ask_for(place.v_scales)
                else:
                    take_k(memory, place.k_row, place.k_scales, t - origin, length, unpacked)
                    take_v(memory, place.v_row, place.v_scales, t - origin, length, unpacked)
                t += length
                number += 1
                offset = np.int64(0)

    return gather


def layout(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Byte offsets of the parts of a thread's scratch, each of whole cache lines, and its size."""
    offsets, total = {}, 0
    for name, size in sizes.items():
        offsets[name] = total
        total += -(-size // 64) * 64
    return offsets, total
