"""A plan made ready for its batch, and the calls that attend a layer's queries to pages."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from radixkv_kernels.cpu.decode import decode_scratch_bytes, make_decode
from radixkv_kernels.cpu.extend import extend_scratch_bytes, make_extend
from radixkv_kernels.cpu.formats import RowFormat, extends_in_rows, require_sizes
from radixkv_kernels.cpu.launch import (
    SMALL,
    kernel_address,
    run_kernel,
    runs,
    thread_memory,
    tokens_read,
)
from radixkv_kernels.cpu.partials import partial_bytes
from radixkv_kernels.cpu.plan import ROW_QUERIES, Pass, Plan
from radixkv_kernels.cpu.records import (
    ARGS,
    COUNTED,
    COUNTERS,
    LAYER,
    STEP,
    CallMemory,
    PagePlaces,
    RowPlaces,
    StepTables,
    bad_number,
)
from radixkv_kernels.cpu.shared import make_shared, shared_scratch_bytes


@dataclass(frozen=True)
class _Launch:
    """One kernel call of a step.

    Attributes:
        name: under which `tokens_read` counts it.
        paths: under which `runs` does.
        kernel: address.
        record: `ARGS`, whose first part is filled in for each layer, and the counters as they
            are when the kernel begins.
        scratch_bytes: of each thread.
    """

    name: str
    paths: tuple[str, ...]
    kernel: int
    record: bytes
    scratch_bytes: int


class Rule(NamedTuple):
    """How one layer turns q.k into attention weights.

    Attributes:
        window, softcap: 0 is none.
        sinks, alibi_slopes: [num_q_heads] float32, contiguous.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None


class Step:
    """A plan made ready for its batch: what the layers of a step have in common.

    Args:
        plan: of `make_plan`, for this batch and this group of query heads. If it has shared
            splits: `shares` holds for the formats.
        k, v: how rows of K and V are stored.
        num_q_heads, num_kv_heads: of each layer.
        rotate: whether K (and so q), and V (and so the output) are stored rotated.
        page_table: [num_seqs, max_pages] int32, rows contiguous.
        seq_lens, cu_seqlens_q: int32, contiguous.
    Raises:
        ValueError: a size that is not supported.
    """

    def __init__(
        self,
        plan: Plan,
        k: RowFormat,
        v: RowFormat,
        num_q_heads: int,
        num_kv_heads: int,
        rotate: tuple[bool, bool],
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> None:
        require_sizes(k, v)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of the {num_kv_heads} KV heads, got "
                f"{num_q_heads}"
            )
        self.plan, self._num_q_heads, self._v_head_dim = plan, num_q_heads, v.head_dim
        self._tables = (page_table, seq_lens, cu_seqlens_q)  # their addresses are in the records
        group = num_q_heads // num_kv_heads
        self._tables_at = StepTables(
            page_table=page_table.data_ptr(),
            table_row=page_table.stride(0),
            seq_lens=seq_lens.data_ptr(),
            cu_seqlens_q=cu_seqlens_q.data_ptr(),
            group=group,
            rotate_k=rotate[0],
            rotate_v=rotate[1],
        )
        self.launches: list[_Launch] = []
        for step in plan.passes:
            self._add_pass(step, k, v, num_kv_heads)
        if len(plan.tiles):
            scratch, kernel = extend_scratch_bytes(k, v, group), kernel_address(make_extend, k, v)
            self._add("tiles", ("tiles",), kernel, plan.tiles, scratch)
        most_partials = max((step.num_partials for step in plan.passes), default=0)
        self.partials_bytes = num_q_heads * most_partials * partial_bytes(v)
        self.is_small = plan.tokens_alone * num_q_heads * (k.head_dim + v.head_dim) < SMALL

    def _add_pass(self, step: Pass, k: RowFormat, v: RowFormat, num_kv_heads: int) -> None:
        group, num_partials = self._tables_at.group, step.num_partials
        counters = np.zeros(COUNTERS + num_partials * num_kv_heads, np.int64)
        if len(step.shared):
            if extends_in_rows(k, v):
                kernel = kernel_address(make_shared, k, v)
                scratch = shared_scratch_bytes(k, v, step.most_rows)
            else:
                kernel = kernel_address(make_extend, k, v, 1)
                scratch = extend_scratch_bytes(k, v, group)
            self._add(
                "shared",
                ("shared",),
                kernel,
                step.shared,
                scratch,
                queries=step.queries.ctypes.data,
                most_rows=step.most_rows,
                num_partials=num_partials,
            )
            # The splits that are done count for the merge.
            merged = counters[COUNTERS:].reshape(-1, num_kv_heads)
            merged[step.done[:, 0]] = step.done[:, 1:]
        offset = decode_scratch_bytes(k, v, group)
        self._add(
            "rows",
            step.names,
            kernel_address(make_decode, k, v, group),
            step.rows,
            offset + ROW_QUERIES * group * self.plan.most_splits * partial_bytes(v),
            counters,
            num_partials=num_partials,
            partials_offset=offset,
            tile_queries=ROW_QUERIES,
        )

    def _add(
        self,
        name: str,
        paths: tuple[str, ...],
        kernel: int,
        tasks: np.ndarray,
        scratch_bytes: int,
        counters: np.ndarray | None = None,
        **values: int,
    ) -> None:
        scratch_bytes = -(-scratch_bytes // 64) * 64
        tables = self._tables_at._replace(
            tasks=tasks.ctypes.data, num_tasks=len(tasks), scratch_bytes=scratch_bytes, **values
        )
        if counters is None:
            counters = np.zeros(COUNTERS, np.int64)
        record = bytes(LAYER.size) + STEP.pack(*tables) + counters.tobytes()
        self.launches.append(_Launch(name, paths, kernel, record, scratch_bytes))

    def attend(
        self,
        places: PagePlaces,
        q: torch.Tensor,
        rule: Rule,
        *,
        num_threads: int | None = None,
    ) -> torch.Tensor:
        """Attend the batch's new tokens to one layer's pages.

        Any number of threads may call it at once.

        Args:
            places: of the layer.
            q: [num_tokens, num_q_heads, head_dim] float32, last dimension contiguous.
            num_threads: None is torch's.
        Returns:
            [num_tokens, num_q_heads, v_head_dim] float32.
        Raises:
            ValueError: a page id that the pool does not have.
        """
        shape = (q.shape[0], self._num_q_heads, self._v_head_dim)
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        AttentionCall(self, q, out, num_threads).run(places, rule)
        return out


class AttentionCall:
    """A step whose q, and what it is attended to, lie in the same memory for many layers.

    It belongs to the thread that made it.

    Args:
        q: [num_tokens, num_q_heads, head_dim] float32, last dimension contiguous.
        out: [num_tokens, num_q_heads, v_head_dim] float32, contiguous; `run` fills it.
        num_threads: None is torch's.
    """

    def __init__(
        self, step: Step, q: torch.Tensor, out: torch.Tensor, num_threads: int | None = None
    ) -> None:
        q_token, q_head, _ = q.stride()
        out_token, out_head, _ = out.stride()
        self._rows = RowPlaces(q.data_ptr(), out.data_ptr(), q_token, q_head, out_token, out_head)
        self._num_threads = num_threads or (1 if step.is_small else torch.get_num_threads())
        scratch_bytes = max((launch.scratch_bytes for launch in step.launches), default=0)
        partials, partials_owner = thread_memory("partials", step.partials_bytes)
        scratch, scratch_owner = thread_memory("scratch", self._num_threads * scratch_bytes)
        # Their addresses are in the records.
        self._kept = step, q, out, partials_owner, scratch_owner
        self._launches = []
        for launch in step.launches:
            record = bytearray(launch.record)
            address = ctypes.addressof(ctypes.c_char.from_buffer(record))
            memory = CallMemory(scratch, partials, address + ARGS.itemsize)
            self._launches.append((launch, record, address, memory))

    def run(
        self,
        places: PagePlaces,
        rule: Rule,
    ) -> None:
        """Attend; see `Step.attend`."""
        scale, window, softcap, sinks, slopes = rule
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        slopes_at = 0 if slopes is None else slopes.data_ptr()
        for launch, record, address, memory in self._launches:
            record[:] = launch.record  # the counters, too
            # As `RuleTerms`, which takes longer to make than all to pack.
            terms = sinks_at, slopes_at, window, scale, softcap
            LAYER.pack_into(record, 0, *self._rows, *places, *terms, *memory)
            run_kernel(launch.kernel, address, self._num_threads)
            bad_page, _, num_read = COUNTED.unpack_from(record, ARGS.itemsize + 2 * 8)
            for path in launch.paths:
                runs[path] += 1
            tokens_read[launch.name] += num_read
            if bad_page:
                raise ValueError(
                    f"page_table: expected page ids from 0 to {places.num_pages - 1}, got "
                    f"{bad_number(bad_page)}"
                )
