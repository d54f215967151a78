"""Which run of rows a tile belongs to."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_run(cumulative_ptr, num, tile, BLOCK_Q: tl.constexpr):
    """Which of ``num`` runs of rows a tile of BLOCK_Q rows belongs to, and its first row there.

    Run i owns the tiles from ``cumulative[i] // BLOCK_Q + i`` on: as many as it needs or more.
    """
    low, high = tile * 0, num  # tile * 0: of one type with what the loop makes of it
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cumulative_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    first_tile = tl.load(cumulative_ptr + low) // BLOCK_Q + low
    return low, (tile - first_tile) * BLOCK_Q
