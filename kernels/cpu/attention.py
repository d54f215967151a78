"""A plan made ready for its batch, and the calls that attend a layer's queries to pages."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from radixkv_kernels.cpu.decode import decode_scratch_bytes, make_decode, partial_floats
from radixkv_kernels.cpu.extend import extend_scratch_bytes, make_extend
from radixkv_kernels.cpu.formats import extends_in_rows, require_sizes
from radixkv_kernels.cpu.launch import (
    SMALL,
    kernel_address,
    run_kernel,
    runs,
    thread_memory,
    tokens_read,
)
from radixkv_kernels.cpu.plan import ROW_QUERIES, Plan
from radixkv_kernels.cpu.records import ARGS, CALL, COUNTED, COUNTERS, PAGE_FIELDS, bad_number
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


class Step:
    """A plan made ready for its batch: what the layers of a step have in common.

    Args:
        plan: of `make_plan`, for this batch and this group of query heads. If it has shared
            splits: `shares` holds for the formats.
        formats: of K and of V.
        dims: head_dim of K and of V.
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
        formats: tuple[int, int],
        dims: tuple[int, int],
        num_q_heads: int,
        num_kv_heads: int,
        rotate: tuple[bool, bool],
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
    ) -> None:
        require_sizes(formats, dims)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of the {num_kv_heads} KV heads, got "
                f"{num_q_heads}"
            )
        self.plan, self._num_q_heads, self._v_head_dim = plan, num_q_heads, dims[1]
        self._tables = (page_table, seq_lens, cu_seqlens_q)  # their addresses are in the records
        self._common = {
            "page_table": page_table.data_ptr(),
            "table_row": page_table.stride(0),
            "seq_lens": seq_lens.data_ptr(),
            "cu_seqlens_q": cu_seqlens_q.data_ptr(),
            "group": num_q_heads // num_kv_heads,
            "rotate_k": rotate[0],
            "rotate_v": rotate[1],
        }
        group, sizes = num_q_heads // num_kv_heads, (*formats, *dims)
        partial_bytes = 4 * partial_floats(dims[1])
        self.launches: list[_Launch] = []
        for step in plan.passes:
            kept = {"num_partials": step.num_partials}
            counters = np.zeros(COUNTERS + step.num_partials * num_kv_heads, np.int64)
            if len(step.shared):
                if extends_in_rows(formats):
                    kernel = kernel_address(make_shared, *sizes)
                    scratch = shared_scratch_bytes(*sizes, step.most_rows)
                else:
                    kernel = kernel_address(make_extend, *sizes, 1)
                    scratch = extend_scratch_bytes(*sizes, group)
                members = {"queries": step.queries.ctypes.data, "most_rows": step.most_rows}
                self._add("shared", ("shared",), kernel, step.shared, scratch, **members, **kept)
                # The splits that are done count for the merge.
                merged = counters[COUNTERS:].reshape(-1, num_kv_heads)
                merged[step.done[:, 0]] = step.done[:, 1:]
            kernel = kernel_address(make_decode, *sizes, group)
            offset = decode_scratch_bytes(*sizes, group)
            scratch = offset + ROW_QUERIES * group * plan.most_splits * partial_bytes
            kept |= {"partials_offset": offset, "tile_queries": ROW_QUERIES}
            self._add("rows", step.names, kernel, step.rows, scratch, counters, **kept)
        if len(plan.tiles):
            scratch = extend_scratch_bytes(*sizes, group)
            self._add("tiles", ("tiles",), kernel_address(make_extend, *sizes), plan.tiles, scratch)
        most_partials = max((step.num_partials for step in plan.passes), default=0)
        self.partials_bytes = num_q_heads * most_partials * partial_bytes
        self.is_small = plan.tokens_alone * num_q_heads * sum(dims) < SMALL

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
        record = np.zeros((), ARGS)
        values |= self._common | {
            "tasks": tasks.ctypes.data,
            "num_tasks": len(tasks),
            "scratch_bytes": scratch_bytes,
        }
        for field, value in values.items():
            record[field] = value
        if counters is None:
            counters = np.zeros(COUNTERS, np.int64)
        kept = record.tobytes() + counters.tobytes()
        self.launches.append(_Launch(name, paths, kernel, kept, scratch_bytes))

    def attend(
        self,
        places: tuple[int, ...],
        q: torch.Tensor,
        softmax_scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        *,
        num_threads: int | None = None,
    ) -> torch.Tensor:
        """Attend the batch's new tokens to one layer's pages.

        Any number of threads may call it at once.

        Args:
            places: `page_arguments` of the layer.
            q: [num_tokens, num_q_heads, head_dim] float32, last dimension contiguous.
            window, softcap: 0 is none.
            sinks, alibi_slopes: [num_q_heads] float32, contiguous.
            num_threads: None is torch's.
        Returns:
            [num_tokens, num_q_heads, v_head_dim] float32.
        Raises:
            ValueError: a page id that the pool does not have.
        """
        shape = (q.shape[0], self._num_q_heads, self._v_head_dim)
        out = torch.empty(shape, dtype=torch.float32, device="cpu")
        AttentionCall(self, q, out, num_threads).run(
            places, softmax_scale, window, softcap, sinks, alibi_slopes
        )
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
        self._head = (q.data_ptr(), out.data_ptr(), q_token, q_head, out_token, out_head)
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
            places = scratch, partials, address + ARGS.itemsize
            self._launches.append((launch, record, address, places))

    def run(
        self,
        places: tuple[int, ...],
        softmax_scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        """Attend; see `Step.attend`."""
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        slopes_at = 0 if alibi_slopes is None else alibi_slopes.data_ptr()
        for launch, record, address, memory in self._launches:
            record[:] = launch.record  # the counters, too
            CALL.pack_into(
                record, 0, *self._head, *places, sinks_at, slopes_at, window, *memory,
                softmax_scale, softcap,
            )  # fmt: skip
            run_kernel(launch.kernel, address, self._num_threads)
            bad_page, _, num_read = COUNTED.unpack_from(record, ARGS.itemsize + 2 * 8)
            for path in launch.paths:
                runs[path] += 1
            tokens_read[launch.name] += num_read
            if bad_page:
                raise ValueError(
                    f"page_table: expected page ids from 0 to "
                    f"{places[PAGE_FIELDS.index('num_pages')] - 1}, got {bad_number(bad_page)}"
                )
