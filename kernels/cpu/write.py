"""New rows of K and V into pages: the kernel, and the call that runs it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from radixkv_kernels.compile_cache import compile_callback, compile_helper
from radixkv_kernels.cpu.encode import count_non_finite, encode_row
from radixkv_kernels.cpu.formats import FLOAT16, FLOAT32, MAX_HEAD_DIM, RowFormat, require_sizes
from radixkv_kernels.cpu.gather import make_rows_at
from radixkv_kernels.cpu.launch import kernel_address, run_kernel, runs
from radixkv_kernels.cpu.memory import fetch_add, get_i64, put_i64
from radixkv_kernels.cpu.records import (
    WRITE_ARGS,
    WRITE_SIGNATURE,
    Center,
    NewRows,
    PagePlaces,
    WriteTurn,
    bad_number,
)

WRITE_TOKENS = 64  # of a task


def _overflow_factor(form: RowFormat, rotate: bool) -> float:
    """With what rows are multiplied so that those overflow that may not be finite as stored.

    Exact but for FLOAT16 and BFLOAT16 pages, whose limits are no powers of two: rows that come
    near them overflow as well. As `radixkv.attention.formats.row_limit`.
    """
    block = form.head_dim & -form.head_dim
    exponent = 127 if form.fmt != FLOAT32 or rotate else 128  # of the limit
    if rotate:
        exponent -= block.bit_length() - 1  # a rotation adds up so many before it scales them
    if form.fmt == FLOAT16:
        exponent = 15 - (block.bit_length() // 2 if rotate else 0)
    return 2.0 ** (128 - exponent)


def _make_check(k: RowFormat, v: RowFormat) -> Any:
    """A helper that looks for slots that do not exist, and for NaN and Inf in a task's rows."""
    k_dim, v_dim = k.head_dim, v.head_dim
    k_plain, v_plain = _overflow_factor(k, False), _overflow_factor(v, False)
    k_turned, v_turned = _overflow_factor(k, True), _overflow_factor(v, True)

    @compile_helper
    def check(args, first, after):  # type: ignore[no-untyped-def]
        num_slots, num_heads, bad = args.num_pages * args.page_size, args.num_kv_heads, np.int64(0)
        k_factor = np.float32(k_turned if args.rotate_k else k_plain)
        v_factor = np.float32(v_turned if args.rotate_v else v_plain)
        for token in range(first, after):
            slot = get_i64(args.slots, token)
            if slot < 0 or slot >= num_slots:
                put_i64(args.counters, 2, slot + (1 if slot >= 0 else 0))
            rows, step = args.k_rows + 4 * token * args.k_rows_token, 4 * args.k_rows_head
            center, center_step = args.k_center, args.k_center_head
            bad += count_non_finite(k_dim, 1, rows, step, center, center_step, num_heads, k_factor)
            rows, step = args.v_rows + 4 * token * args.v_rows_token, 4 * args.v_rows_head
            bad += count_non_finite(v_dim, 0, rows, step, 0, 0, num_heads, v_factor)
        if bad > 0:
            put_i64(args.counters, 3, bad)

    return check


def _make_store(k: RowFormat, v: RowFormat) -> Any:
    """A helper that quantizes a task's rows into their slots."""
    rows_at = make_rows_at(k, v)
    k_fmt, k_dim, v_fmt, v_dim = k.fmt, k.head_dim, v.fmt, v.head_dim

    @compile_helper
    def store(args, first, after):  # type: ignore[no-untyped-def]
        for token in range(first, after):
            slot = get_i64(args.slots, token)
            place = rows_at(args, slot // args.page_size, 0, slot % args.page_size)
            for head in range(args.num_kv_heads):
                row = args.k_rows + 4 * (token * args.k_rows_token + head * args.k_rows_head)
                center = args.k_center + head * args.k_center_head
                codes = place.k_row + head * args.k_head
                scales = place.k_scales + head * args.ks_head
                encode_row(k_fmt, k_dim, 1, row, center, args.rotate_k, codes, scales)
            for head in range(args.num_kv_heads):
                row = args.v_rows + 4 * (token * args.v_rows_token + head * args.v_rows_head)
                codes = place.v_row + head * args.v_head
                scales = place.v_scales + head * args.vs_head
                encode_row(v_fmt, v_dim, 0, row, 0, args.rotate_v, codes, scales)

    return store


def make_write(k: RowFormat, v: RowFormat) -> Any:
    """The kernel that checks rows of K and V, and rotates, quantizes and scatters them.

    K is stored less its center. Nothing is written where ``bad_slot`` or ``not_finite`` is set,
    so that one thread may run both halves in one call; with several the checks are a call of
    their own.
    """
    check, store, tokens_of_task = _make_check(k, v), _make_store(k, v), WRITE_TOKENS

    def write(pointer):  # type: ignore[no-untyped-def]
        args = carray(pointer, 1)[0]
        while args.checks:
            task = fetch_add(args.counters, 0)
            if task >= args.num_tasks:
                break
            first = tokens_of_task * task
            check(args, first, min(first + tokens_of_task, args.num_tokens))
        if get_i64(args.counters, 2) != 0 or get_i64(args.counters, 3) != 0:
            return
        while args.writes:
            task = fetch_add(args.counters, 1)
            if task >= args.num_tasks:
                break
            first = tokens_of_task * task
            store(args, first, min(first + tokens_of_task, args.num_tokens))

    return compile_callback(WRITE_SIGNATURE)(write)


class Write:
    """New rows of K and V, made ready to be quantized and scattered into many layers' pages.

    It belongs to the thread that made it.

    Args:
        k_form, v_form: how rows of K and V are stored.
        slot_mapping: [num_tokens] int64, contiguous.
        k, v: [num_tokens, num_kv_heads, head_dim] float32, last dimension contiguous.
        rotate: whether K and V are stored rotated.
    Raises:
        ValueError: a size that is not supported.
    """

    def __init__(
        self,
        k_form: RowFormat,
        v_form: RowFormat,
        slot_mapping: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rotate: tuple[bool, bool],
    ) -> None:
        self._kept = slot_mapping, k, v  # their addresses are in the record
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        num_tokens = k.shape[0]
        self._kernel = _write_kernel(k_form, v_form)
        num_tasks = -(-num_tokens // WRITE_TOKENS)
        self._num_threads = torch.get_num_threads() if num_tasks > 1 else 1
        rows = NewRows(
            k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head, slot_mapping.data_ptr(),
            num_tokens, num_tasks, *rotate,
        )  # fmt: skip
        self._record = (ctypes.c_int64 * (_NUM_WORDS + _NUM_COUNTERS))(*rows)
        self._address = ctypes.addressof(self._record)
        alone, counters = self._num_threads == 1, self._address + 8 * _NUM_WORDS
        self._turn = WriteTurn(1, alone, counters)

    def run(self, places: PagePlaces, k_center: torch.Tensor | None = None) -> bool:
        """Write; False (nothing written) if not all rows are finite, or may not be as stored.

        Args:
            places: of the layer, whose pages are mutated.
            k_center: taken off each row of K. [num_kv_heads, head_dim] float32, as k.
        Raises:
            ValueError: a slot that the pool does not have.
        """
        record, alone = self._record, self._num_threads == 1
        center: tuple[int, int] = _NO_CENTER
        if k_center is not None:
            center = k_center.data_ptr(), 4 * k_center.stride(0)
        record[_LAYER] = (*center, *places, *self._turn, *_COUNTERS_AT_FIRST)
        run_kernel(self._kernel, self._address, self._num_threads)
        bad_slot, not_finite = record[_NUM_WORDS + 2 :]
        if bad_slot:
            raise ValueError(
                f"slot_mapping: expected slots from 0 to "
                f"{places.num_pages * places.page_size - 1}, got {bad_number(bad_slot)}"
            )
        if not_finite:
            return False
        if not alone:
            record[_TURN] = self._turn._replace(checks=0, writes=1)
            run_kernel(self._kernel, self._address, self._num_threads)
        runs["write"] += 1
        return True


_zeros = torch.zeros(MAX_HEAD_DIM, dtype=torch.float32, device="cpu")
_NO_CENTER = Center(_zeros.data_ptr(), 0)
_NUM_WORDS = len(WRITE_ARGS)
_LAYER = slice(len(NewRows._fields), None)
_TURN = slice(_NUM_WORDS - len(WriteTurn._fields), _NUM_WORDS)
_COUNTERS_AT_FIRST = (0, 0, 0, 0)
_NUM_COUNTERS = len(_COUNTERS_AT_FIRST)


@cache
def _write_kernel(k: RowFormat, v: RowFormat) -> int:
    require_sizes(k, v)
    return kernel_address(make_write, k, v)
