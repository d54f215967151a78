"""Scores of a query row over a split become weights: what the rule does to them, int16 weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from radixkv_kernels.compile_cache import compile_helper
from radixkv_kernels.cpu.formats import RowFormat
from radixkv_kernels.cpu.memory import get_f32, put_f32, put_i32
from radixkv_kernels.cpu.pairs import quantize_weights
from radixkv_kernels.cpu.plan import SPLIT
from radixkv_kernels.cpu.simd import LANES
from radixkv_kernels.cpu.vectors import cap_scores

SCORE_LINE = 4 * (SPLIT + 4 * LANES)
"""Bytes of a row of scores, or of factors: a block may end beyond the split."""


@compile_helper
def apply_rule(args, scores, q_head, distance, skipped, seen, num_vectors):  # type: ignore[no-untyped-def]
    """Cap the scores, add ALiBi's bias, mask what is not seen; in place.

    The query sees the tokens ``skipped`` to ``seen - 1`` of the split, whose first lies
    ``distance`` before or behind it (<= 0: before).
    """
    if args.softcap > 0:
        cap_scores(scores, args.softcap, num_vectors)
    if args.slopes != 0:
        slope = get_f32(args.slopes, q_head)
        for i in range(skipped, seen):
            put_f32(scores, i, get_f32(scores, i) + slope * np.float32(distance + i))
    for i in range(skipped):
        put_f32(scores, i, np.float32(-np.inf))
    for i in range(seen, num_vectors * LANES):
        put_f32(scores, i, np.float32(-np.inf))


def make_quantize(v: RowFormat, code_offset: int) -> Any:
    """A helper that makes int16 weights for V of a row's weights, a row for each scale group.

    ``code_offset``: how far stored codes may lie above the ones that count. With it what the
    sums are too high by goes to ``offsets``.
    """
    num_groups = v.num_groups
    factor_line, weight_line = SCORE_LINE, SCORE_LINE // 2

    @compile_helper
    def quantize(weights, heaviest, factors, target, worth, offsets, num_vectors, is_offset):  # type: ignore[no-untyped-def]
        """The largest weight, ``heaviest``, becomes 32767: what each then is ``worth``."""
        factor = np.float32(0.0)
        if heaviest > 0:
            factor = np.float32(32767.0) / heaviest
        for n in range(num_groups):
            whole = quantize_weights(
                weights, factors + n * factor_line, factor, target + n * weight_line, num_vectors
            )
            put_f32(worth, n, heaviest / np.float32(32767.0))
            if code_offset > 0:
                put_i32(offsets, n, np.int32(code_offset) * whole if is_offset else np.int32(0))

    return quantize
