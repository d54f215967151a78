"""New rows of K and V into pages: the kernel, and the call that runs it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from radixkv_kernels.compile_cache import compile_callback
from radixkv_kernels.cpu.encode import count_non_finite, encode_row
from radixkv_kernels.cpu.formats import MAX_HEAD_DIM, bytes_of_row, num_scales, require_sizes
from radixkv_kernels.cpu.launch import kernel_address, run_kernel, runs
from radixkv_kernels.cpu.memory import fetch_add, get_i64, put_i64
from radixkv_kernels.cpu.records import WRITE_FIELDS, WRITE_SIGNATURE, bad_number

WRITE_TOKENS = 64  # of a task


def make_write(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> Any:
    """The kernel that checks rows of K and V, and rotates, quantizes and scatters them.

    K is stored less its center. Nothing is written where ``bad_slot`` or ``not_finite`` is set,
    so that one thread may run both halves in one call; with several the checks are a call of
    their own.
    """
    k_scales, k_row = num_scales(k_fmt, k_dim), bytes_of_row(k_fmt, k_dim)
    v_scales, v_row = num_scales(v_fmt, v_dim), bytes_of_row(v_fmt, v_dim)
    tokens_of_task = WRITE_TOKENS

    def write(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        num_slots = args.num_pages * args.page_size
        while args.checks:
            task = fetch_add(args.counters, 0)
            if task >= args.num_tasks:
                break
            bad = np.int64(0)
            first = tokens_of_task * task
            for token in range(first, min(first + tokens_of_task, args.num_tokens)):
                slot = get_i64(args.slots, token)
                if slot < 0 or slot >= num_slots:
                    put_i64(args.counters, 2, slot + (1 if slot >= 0 else 0))
                bad += count_non_finite(
                    k_dim,
                    1,
                    args.k_rows + 4 * token * args.k_rows_token,
                    4 * args.k_rows_head,
                    args.k_center,
                    args.k_center_head,
                    args.num_kv_heads,
                )
                bad += count_non_finite(
                    v_dim,
                    0,
                    args.v_rows + 4 * token * args.v_rows_token,
                    4 * args.v_rows_head,
                    0,
                    0,
                    args.num_kv_heads,
                )
            if bad > 0:
                put_i64(args.counters, 3, bad)
        if get_i64(args.counters, 2) != 0 or get_i64(args.counters, 3) != 0:
            return
        while args.writes:
            task = fetch_add(args.counters, 1)
            if task >= args.num_tasks:
                break
            first = tokens_of_task * task
            for token in range(first, min(first + tokens_of_task, args.num_tokens)):
                slot = get_i64(args.slots, token)
                page, offset = slot // args.page_size, slot % args.page_size
                k_codes = args.k_pages + page * args.k_page + offset * k_row
                v_codes = args.v_pages + page * args.v_page + offset * v_row
                k_factors = args.k_scale + page * args.ks_page + offset * 2 * k_scales
                v_factors = args.v_scale + page * args.vs_page + offset * 2 * v_scales
                for head in range(args.num_kv_heads):
                    encode_row(
                        k_fmt,
                        k_dim,
                        1,
                        args.k_rows + 4 * (token * args.k_rows_token + head * args.k_rows_head),
                        args.k_center + head * args.k_center_head,
                        args.rotate_k,
                        k_codes + head * args.k_head,
                        k_factors + head * args.ks_head,
                    )
                for head in range(args.num_kv_heads):
                    encode_row(
                        v_fmt,
                        v_dim,
                        0,
                        args.v_rows + 4 * (token * args.v_rows_token + head * args.v_rows_head),
                        0,
                        args.rotate_v,
                        v_codes + head * args.v_head,
                        v_factors + head * args.vs_head,
                    )

    return compile_callback(WRITE_SIGNATURE)(write)


_NO_CENTER = torch.zeros(MAX_HEAD_DIM, dtype=torch.float32, device="cpu")


class Write:
    """New rows of K and V, made ready to be quantized and scattered into many layers' pages.

    It belongs to the thread that made it.

    Args:
        formats: of K and of V.
        slot_mapping: [num_tokens] int64, contiguous.
        k, v: [num_tokens, num_kv_heads, head_dim] float32, last dimension contiguous.
        rotate: whether K and V are stored rotated.
    Raises:
        ValueError: a size that is not supported.
    """

    def __init__(
        self,
        formats: tuple[int, int],
        slot_mapping: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rotate: tuple[bool, bool],
    ) -> None:
        self._kept = slot_mapping, k, v  # their addresses are in the record
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        num_tokens, _, k_dim = k.shape
        self._kernel = _write_kernel(*formats, k_dim, v.shape[2])
        num_tasks = -(-num_tokens // WRITE_TOKENS)
        self._num_threads = torch.get_num_threads() if num_tasks > 1 else 1
        self._record = (ctypes.c_int64 * _WRITE_WORDS)(
            k.data_ptr(),
            k_token,
            k_head,
            v.data_ptr(),
            v_token,
            v_head,
            slot_mapping.data_ptr(),
            num_tokens,
            num_tasks,
            *rotate,
        )
        self._address = ctypes.addressof(self._record)

    def run(self, places: tuple[int, ...], k_center: torch.Tensor | None = None) -> bool:
        """Write; False (nothing written) if not all rows are finite.

        Args:
            places: `page_arguments` of the layer, whose pages are mutated.
            k_center: taken off each row of K. [num_kv_heads, head_dim] float32, as k.
        Raises:
            ValueError: a slot that the pool does not have.
        """
        record, counters = self._record, self._address + 8 * _WRITE_COUNTERS
        alone = self._num_threads == 1
        center = (_NO_CENTER, 0) if k_center is None else (k_center, 4 * k_center.stride(0))
        record[_WRITE_LAYER:] = (
            center[0].data_ptr(), center[1], *places, 1, alone, counters, 0, 0, 0, 0
        )  # fmt: skip
        run_kernel(self._kernel, self._address, self._num_threads)
        bad_slot, not_finite = record[_WRITE_COUNTERS + 2 :]
        if bad_slot:
            num_pages, page_size, _ = places[-3:]
            raise ValueError(
                f"slot_mapping: expected slots from 0 to {num_pages * page_size - 1}, got "
                f"{bad_number(bad_slot)}"
            )
        if not_finite:
            return False
        if not alone:
            record[_WRITE_COUNTERS - 3 : _WRITE_COUNTERS - 1] = 0, 1
            run_kernel(self._kernel, self._address, self._num_threads)
        runs["write"] += 1
        return True


_WRITE_LAYER = WRITE_FIELDS.index("k_center")
_WRITE_COUNTERS = len(WRITE_FIELDS)
_WRITE_WORDS = _WRITE_COUNTERS + 4


@cache
def _write_kernel(k_fmt: int, v_fmt: int, k_dim: int, v_dim: int) -> int:
    require_sizes((k_fmt, v_fmt), (k_dim, v_dim))
    return kernel_address(make_write, k_fmt, v_fmt, k_dim, v_dim)
