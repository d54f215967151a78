"""The "triton" backend: what `radixkv.attention.reference` does, in GPU kernels.

Importing it loads Triton; `radixkv.attention.backend` does so only when the backend is asked for.
With TRITON_INTERPRET=1 in the environment before that, the same kernels run on a CPU, slowly.

Nothing here waits for the GPU. What can only be known there (a value that is not finite, a slot
that does not exist) is noted on the device; `TritonBackend.settle` raises it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv.attention.batch import AttentionBatch, ScoreRule
from radixkv.attention.formats import INT4_SEARCH, SCALE_DTYPE, Int4Format, KVFormat, row_limit
from radixkv.attention.layout import KVCodec, LayerPages
from radixkv.attention.plan import Backend, CopyPages, StepPlan
from radixkv.attention.reference import non_finite
from radixkv.attention.tiles import Tile, find_tile
from radixkv_kernels.gpu import numbers
from radixkv_kernels.gpu.attention import extend_kernel, split_kernel
from radixkv_kernels.gpu.copy import copy_kernel
from radixkv_kernels.gpu.merge import merge_kernel
from radixkv_kernels.gpu.rotate import rotate_kernel
from radixkv_kernels.gpu.write import FAULT_KINDS, write_kernel

SPLIT = 512
"""Tokens of a split: a power of two, the same for every batch, so that results are too."""

EXTEND_SPLIT = 1024
"""As `SPLIT`, of extend: its tiles have more work of their own, and more results to merge."""

PARTS_BYTES = 32 << 20
"""Of partial results of extend at a time: they stay in a second-level cache of 40 MB or more."""

EXTEND_REGISTERS = 255
"""That a thread of extend may take on CUDA: by itself ptxas spills some to stay below 168."""

MAX_HEAD_DIM = 256
INTERPRETED = not isinstance(write_kernel, triton.runtime.JITFunction)

runs: Counter[str] = Counter()
"""How often each kernel was launched in this process; tests assert which path ran."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# The interpreter pays for programs, whatever their size.
_WRITE_TOKENS = 64 if INTERPRETED else 4
_MERGE_HEADS = 64 if INTERPRETED else 4
_MAX_HEADS = 64  # query heads of a KV head in one tile; more take several


class Partials(NamedTuple):
    """Attention over a part of each query's tokens.

    Attributes:
        out: normalized within the part, rotated if V is. [num_parts, num_q_heads, v_head_dim]
            float32; anything where ``lse`` is -inf.
        lse: log-sum-exp of the part's scores, -inf if it has no tokens.
            [num_parts, num_q_heads] float32.
        num_splits: part ``i * num_splits + j`` is the j-th of the i-th query.
    """

    out: Tensor
    lse: Tensor
    num_splits: int


@dataclass(frozen=True)
class SharedRuns:
    """Runs of pages that several queries share, each lying wholly before its queries' tokens.

    Attributes:
        page_table: page ids of each run, from its start on. [num_runs, max_pages] int32.
        starts: position of each run's first token, a multiple of the page size.
            [num_runs] int32.
        ends: position after its last token. [num_runs] int32.
        cu_queries: cumulative queries of the runs, first 0. [num_runs + 1] int32.
        query_rows: rows of q, run after run; a row may be in several runs. [num_pairs] int32.
        query_pos: position of each row of q in its sequence. [num_tokens] int32.
    """

    page_table: Tensor
    starts: Tensor
    ends: Tensor
    cu_queries: Tensor
    query_rows: Tensor
    query_pos: Tensor


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _written(pages: Tensor) -> Tensor:
    """Pages as `write_kernel` takes them: float8 as bytes."""
    return pages.view(torch.uint8) if "float8" in str(pages.dtype) else pages


def _read(kv_format: KVFormat, pages: Tensor) -> Tensor:
    """Pages as attention takes them: codes of a byte in pairs, so that 16 bytes are 8 elements."""
    return pages if kv_format.name in ("model", "int4") else pages.view(torch.int16)


def _unit_stride(rows: Tensor) -> Tensor:
    rows = rows.detach()
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def rotation_log2(head_dim: int, rotate: bool) -> int:
    """log2 of the Hadamard blocks of `radixkv.attention.formats.hadamard`; 0 is no rotation."""
    return (head_dim & -head_dim).bit_length() - 1 if rotate else 0


def _number(kv_format: KVFormat) -> int:
    """By which the kernels know a format."""
    number = getattr(numbers, kv_format.name.upper(), None)
    if number is None:
        raise ValueError(
            f"KVConfig.dtype: expected a format that the GPU kernels have, got "
            f'{kv_format.name!r}; use backend="torch"'
        )
    value: int = number.value
    return value


def _group(kv_format: KVFormat) -> int:
    return kv_format.group_size if isinstance(kv_format, Int4Format) else 1


def _require_head_dim(codec: KVCodec) -> None:
    for kv_format in (codec.k_format, codec.v_format):
        odd = kv_format.head_dim % 2 and kv_format.name != "model"
        if odd or not 1 <= kv_format.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim: expected 1 to {MAX_HEAD_DIM} for the triton backend, even for "
                f"quantized pages, got {kv_format.head_dim}; "
                f'use backend="cpu" or "torch"'
            )


def _dot_dtype(kv_format: KVFormat, q_dtype: torch.dtype) -> Any:
    """In which numbers codes are multiplied; float32 where the model asks for it."""
    if q_dtype == torch.float32:
        return tl.float32
    if kv_format.name != "model":
        return tl.float16  # holds every code exactly
    # The interpreter keeps bfloat16 as integers, which NumPy would multiply as such.
    return tl.float32 if INTERPRETED else _DTYPES[kv_format.code_dtype]


def _block(kv_format: KVFormat) -> int:
    """Columns of a tile of codes: at least what a tensor core takes."""
    width = kv_format.head_dim // (1 if kv_format.name == "model" else 2)
    columns: int = triton.next_power_of_2(width)
    return max(16, columns)


def write_constants(codec: KVCodec) -> dict[str, Any]:
    """Compile-time arguments of `write_kernel` for one cache."""
    k, v = codec.k_format, codec.v_format
    return {
        "PAGE_SIZE": codec.config.page_size,
        "K_FORMAT": _number(k),
        "V_FORMAT": _number(v),
        "HEAD_DIM": k.head_dim,
        "V_HEAD_DIM": v.head_dim,
        "K_GROUP": _group(k),
        "V_GROUP": _group(v),
        "SEARCH": INT4_SEARCH,
        "K_ROTATE": rotation_log2(k.head_dim, codec.rotate_k),
        "V_ROTATE": rotation_log2(v.head_dim, codec.rotate_v),
        "K_LIMIT": row_limit(k, codec.rotate_k),
        "V_LIMIT": row_limit(v, codec.rotate_v),
        "K_STORED": k.limit,
        "V_STORED": v.limit,
        "BLOCK_T": _WRITE_TOKENS,
    }


def attention_constants(
    codec: KVCodec, q_dtype: torch.dtype, group: int, rule: ScoreRule, tile: Tile
) -> dict[str, Any]:
    """Compile-time arguments that `split_kernel` and `extend_kernel` have in common."""
    k, v = codec.k_format, codec.v_format
    heads = min(group, _MAX_HEADS)
    return {
        "GROUP_SIZE": group,
        "PAGE_SIZE": codec.config.page_size,
        "K_FORMAT": _number(k),
        "V_FORMAT": _number(v),
        "HEAD_DIM": k.head_dim,
        "V_HEAD_DIM": v.head_dim,
        "K_GROUP": _group(k),
        "V_GROUP": _group(v),
        "K_BLOCK": _block(k),
        "V_BLOCK": _block(v),
        "K_DOT": _dot_dtype(k, q_dtype),
        "V_DOT": _dot_dtype(v, q_dtype),
        "HAS_WINDOW": rule.sliding_window is not None,
        "HAS_SOFTCAP": rule.softcap is not None,
        "HAS_SLOPES": rule.alibi_slopes is not None,
        "HEADS": heads,
        "BLOCK_M": max(tile.block_m, triton.next_power_of_2(heads)),
        "BLOCK_N": tile.block_n,
    }


def merge_constants(codec: KVCodec, *, has_table: bool, block_q: int = 0) -> dict[str, Any]:
    """Compile-time arguments of `merge_kernel` but for sinks; ``block_q``: of extend's parts."""
    head_dim = codec.v_format.head_dim
    return {
        "HAS_TABLE": has_table,
        "HEAD_DIM": head_dim,
        # What extend leaves is rotated back all at once, with or without parts.
        "ROTATE": rotation_log2(head_dim, codec.rotate_v and not block_q),
        "BLOCK_H": _MERGE_HEADS,
        "BLOCK_Q": block_q,
    }


def rotate_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate the vectors of each token and head: [num_tokens, num_heads, head_dim], ``dtype``."""
    num_tokens, num_heads, head_dim = rows.shape
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    num_rows = num_tokens * num_heads
    with _on(rows.device):
        rotate_kernel[(triton.cdiv(num_rows, _WRITE_TOKENS),)](
            rows,
            out,
            num_rows,
            num_heads,
            *rows.stride()[:2],
            HEAD_DIM=head_dim,
            ROTATE=rotation_log2(head_dim, True),
            BLOCK_T=_WRITE_TOKENS,
            enable_fp_fusion=True,
        )
    return out


def _queries(codec: KVCodec, q: Tensor) -> Tensor:
    """Queries as the kernels take them: rotated if K is."""
    _require_head_dim(codec)
    num_kv_heads = codec.spec.num_kv_heads
    if q.shape[1] % num_kv_heads or not q.shape[1]:
        raise ValueError(
            f"num_q_heads: expected a multiple of the {num_kv_heads} KV heads, got "
            f"{q.shape[1]}; pass q as [num_tokens, num_q_heads, head_dim]"
        )
    q = _unit_stride(q)
    return rotate_rows(q, torch.float32) if codec.rotate_k else q


def _optional(values: Tensor | None, like: Tensor) -> Tensor:
    """Values of the query heads as float32, or any tensor for a kernel that will not read it."""
    return like if values is None else values.detach().float().contiguous()


def _split(
    codec: KVCodec,
    layer: LayerPages,
    q: Tensor,
    rule: ScoreRule,
    *,
    dtype: torch.dtype,
    table: Tensor,
    starts: Tensor | None,
    ends: Tensor,
    cu_queries: Tensor,
    num_pairs: int,
    shared: SharedRuns | None,
) -> Partials:
    group = q.shape[1] // codec.spec.num_kv_heads
    tile = find_tile("shared" if shared else "decode", codec, group, q.device)
    constants = attention_constants(codec, dtype, group, rule, tile)
    num_runs, page_size = ends.shape[0], codec.config.page_size
    num_splits = triton.cdiv(table.shape[1] * page_size, SPLIT)
    if shared:
        num_splits += 1  # a run may begin and end inside a split
        num_tiles = num_pairs // (constants["BLOCK_M"] // constants["HEADS"]) + num_runs
    else:
        num_tiles = num_runs
    head_blocks = triton.cdiv(group, constants["HEADS"])
    num_parts = num_pairs * num_splits
    out_shape = (num_parts, q.shape[1], codec.v_format.head_dim)
    out = torch.empty(out_shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(out_shape[:2], dtype=torch.float32, device=q.device)
    with _on(q.device):
        split_kernel[(num_tiles, codec.spec.num_kv_heads * head_blocks, num_splits)](
            q,
            out,
            lse,
            _read(codec.k_format, layer.k_pages),
            _read(codec.v_format, layer.v_pages),
            layer.k_scale,
            layer.v_scale,
            table,
            ends if starts is None else starts,
            ends,
            cu_queries,
            shared.query_rows if shared else cu_queries,
            shared.query_pos if shared else cu_queries,
            _optional(rule.alibi_slopes, lse),
            num_runs,
            codec.spec.num_kv_heads,
            num_splits,
            table.stride(0),
            *q.stride()[:2],
            rule.softmax_scale,
            rule.sliding_window or 0,
            rule.softcap or 1.0,
            SHARED=shared is not None,
            HAS_STARTS=starts is not None,
            SPLIT=SPLIT,
            **constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
        )
    runs["shared" if shared else "decode"] += 1
    return Partials(out, lse, num_splits)


def decode_tails(
    codec: KVCodec,
    layer: LayerPages,
    q: Tensor,
    batch: AttentionBatch,
    starts: Tensor | None,
    rule: ScoreRule,
) -> Partials:
    """Attend each sequence's one query token to its tokens from ``starts`` on.

    Args:
        q: [num_tokens, num_q_heads, head_dim]. Sequences with another number of new tokens than
            one are passed over; nothing is written for them.
        starts: first token that is read. [num_seqs] int32; None is 0.
    Returns:
        ``num_splits`` parts a sequence, for `merge`.
    """
    return _split(
        codec,
        layer,
        _queries(codec, q),
        rule,
        dtype=q.dtype,
        table=batch.page_table,
        starts=starts,
        ends=batch.seq_lens,
        cu_queries=batch.cu_seqlens_q,
        num_pairs=batch.seq_lens.shape[0],
        shared=None,
    )


def shared_decode(
    codec: KVCodec, layer: LayerPages, q: Tensor, shared: SharedRuns, rule: ScoreRule
) -> Partials:
    """Attend many queries to runs of pages that they share, reading each page once a tile.

    Returns:
        ``num_splits`` parts for each entry of ``shared.query_rows``, in order, for `merge`.
    """
    return _split(
        codec,
        layer,
        _queries(codec, q),
        rule,
        dtype=q.dtype,
        table=shared.page_table,
        starts=shared.starts,
        ends=shared.ends,
        cu_queries=shared.cu_queries,
        num_pairs=shared.query_rows.shape[0],
        shared=shared,
    )


def _merge(
    codec: KVCodec,
    parts: tuple[Tensor, Tensor],
    rule: ScoreRule,
    out: Tensor,
    *,
    table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    num_rows: int,
    num_columns: int,
    first_tile: int = 0,
    block_q: int = 0,
) -> None:
    like, num_q_heads = parts[1], out.shape[1]
    with _on(out.device):
        merge_kernel[(num_rows, triton.cdiv(num_q_heads, _MERGE_HEADS))](
            *parts,
            like if table is None else table,
            out,
            like if cu_seqlens_q is None else cu_seqlens_q,
            _optional(rule.sinks, like),
            num_columns,
            num_q_heads,
            0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
            first_tile,
            HAS_SINKS=rule.sinks is not None,
            **merge_constants(codec, has_table=table is not None, block_q=block_q),
            enable_fp_fusion=True,
        )
    runs["merge"] += 1


def merge(
    codec: KVCodec,
    partials: Sequence[Partials],
    owners: Sequence[Tensor],
    rule: ScoreRule,
    *,
    num_rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """Merge partial results of the same queries over different tokens.

    Args:
        partials: from `shared_decode` and `decode_tails`; together they hold every token that a
            query sees, each once.
        owners: per entry of ``partials``, which entry (a pair or a sequence, not a part) belongs
            to each row of the output, -1 for none. [num_rows, any] int32 each.
    Returns:
        [num_rows, num_q_heads, v_head_dim], ``dtype``: sinks counted once, rotated back.
    """
    columns, base = [], 0
    for parts, owner in zip(partials, owners, strict=True):
        splits = torch.arange(parts.num_splits, dtype=torch.int32, device=owner.device)
        first = base + owner[..., None] * parts.num_splits
        columns.append(torch.where(owner[..., None] < 0, -1, first + splits).flatten(1))
        base += parts.lse.shape[0]
    table = torch.cat(columns, dim=1).int().contiguous()
    joined = (torch.cat([p.out for p in partials]), torch.cat([p.lse for p in partials]))
    shape = (num_rows, joined[1].shape[1], codec.v_format.head_dim)
    out = torch.empty(shape, dtype=dtype, device=table.device)
    _merge(
        codec,
        joined,
        rule,
        out,
        table=table,
        cu_seqlens_q=None,
        num_rows=num_rows,
        num_columns=table.shape[1],
    )
    return out


def share(
    batch: AttentionBatch, runs: Sequence[tuple[int, int, Any]], page_size: int
) -> tuple[SharedRuns, Tensor, Tensor]:
    """What `shared_decode`, `decode_tails` and `merge` need to read shared pages once.

    Args:
        batch: of sequences with one new token each.
        runs: first column of the page table, the column after the last, and the sequences that
            have the same pages there; a sequence's runs follow one another from column 0.
    Returns:
        the runs; the first token of each sequence that is in none, [num_seqs] int32; which pairs
        of query and run belong to each sequence, [num_seqs, most runs of one] int32.

    Complexity: O(pairs) on the host; nothing waits for the device.
    """
    num_seqs, device = batch.seq_lens.shape[0], batch.seq_lens.device
    width = max(stop - start for start, stop, _ in runs)
    tails = [0] * num_seqs
    owned: list[list[int]] = [[] for _ in range(num_seqs)]
    rows: list[int] = []
    cumulative = [0]
    for _, stop, seqs in runs:
        for seq in seqs:
            owned[int(seq)].append(len(rows))
            rows.append(int(seq))
            tails[int(seq)] = max(tails[int(seq)], stop * page_size)
        cumulative.append(len(rows))
    most = max(map(len, owned))
    owners = [pairs + [-1] * (most - len(pairs)) for pairs in owned]

    def on_device(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    firsts = torch.tensor([int(seqs[0]) for _, _, seqs in runs]).to(device, non_blocking=True)
    columns = on_device([start for start, _, _ in runs]).long()[:, None]
    columns = columns + torch.arange(width, device=device)
    table = batch.page_table[firsts[:, None], columns.clamp_max(batch.page_table.shape[1] - 1)]
    shared = SharedRuns(
        page_table=table.contiguous(),
        starts=on_device([start * page_size for start, _, _ in runs]),
        ends=on_device([stop * page_size for _, stop, _ in runs]),
        cu_queries=on_device(cumulative),
        query_rows=on_device(rows),
        query_pos=batch.seq_lens - 1,
    )
    return shared, on_device(tails), on_device(owners)


class Round(NamedTuple):
    """Tiles of extend that one launch takes, ``first`` to ``stop - 1``, over so many splits."""

    first: int
    stop: int
    num_splits: int


def _known_lens(batch: AttentionBatch) -> tuple[list[int], list[int]] | None:
    """``host_lens`` where nothing has to wait for them."""
    known = batch.seq_lens.device.type == "cpu" or batch.known_lens is not None
    return batch.host_lens if known else None


def extend_rounds(
    batch: AttentionBatch,
    num_tokens: int,
    *,
    block_q: int,
    row_bytes: int,
    page_size: int,
    window: int | None,
) -> list[Round]:
    """In which launches the tiles of `extend_kernel` run, so that partial results stay bounded.

    A sequence of up to EXTEND_SPLIT tokens needs no parts, nor does a layer that sees no more.
    Where the rounds are cut changes no result.

    Args:
        num_tokens: rows of q.
        block_q: tokens of a tile.
        row_bytes: of one token's partial result over one split.
        window: the layer's sliding window.
    """
    longest = batch.page_table.shape[1] * page_size
    most = triton.cdiv(longest, EXTEND_SPLIT)
    if window is not None:  # that of a tile may begin and end inside splits
        few = window <= EXTEND_SPLIT
        most = 1 if few else min(most, (window + block_q - 2) // EXTEND_SPLIT + 2)
    lens = _known_lens(batch)
    if lens is None:
        runs = [(0, num_tokens // block_q + batch.seq_lens.shape[0], longest)]
    else:
        runs = [
            (start // block_q + i, stop // block_q + i + 1, seq_len)
            for i, (seq_len, (start, stop)) in enumerate(
                zip(lens[0], pairwise(lens[1]), strict=True)
            )
            if stop - start > 1
        ]
    rounds: list[Round] = []
    for first, stop, seq_len in runs:
        splits = min(most, triton.cdiv(seq_len, EXTEND_SPLIT))
        room = max(1, PARTS_BYTES // (block_q * row_bytes * splits)) if splits > 1 else stop
        for begin in range(first, stop, room):
            end = min(begin + room, stop)
            if rounds:
                before, widest = rounds[-1], max(rounds[-1].num_splits, splits)
                needed = (end - before.first) * block_q * row_bytes * widest
                if widest == 1 or (min(before.num_splits, splits) > 1 and needed <= PARTS_BYTES):
                    rounds[-1] = Round(before.first, end, widest)
                    continue
            rounds.append(Round(begin, end, splits))
    return rounds


def _run_round(
    codec: KVCodec,
    layer: LayerPages,
    q: Tensor,
    batch: AttentionBatch,
    rule: ScoreRule,
    one: Round,
    parts: tuple[Tensor, Tensor],
    tile: Tile,
    constants: dict[str, Any],
) -> None:
    """Launch `extend_kernel` for one round; ``parts``: its partial results, or twice the output."""
    num_kv_heads, (first, stop, num_splits) = codec.spec.num_kv_heads, one
    programs = num_kv_heads * triton.cdiv(constants["GROUP_SIZE"], constants["HEADS"])
    with _on(q.device):
        extend_kernel[(stop - first, programs, num_splits)](
            q,
            *parts,
            _read(codec.k_format, layer.k_pages),
            _read(codec.v_format, layer.v_pages),
            layer.k_scale,
            layer.v_scale,
            batch.page_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            _optional(rule.alibi_slopes, parts[0]),
            _optional(rule.sinks, parts[0]),
            batch.seq_lens.shape[0],
            num_kv_heads,
            num_splits,
            first,
            batch.page_table.stride(0),
            *q.stride()[:2],
            rule.softmax_scale,
            rule.sliding_window or 0,
            rule.softcap or 1.0,
            HAS_SINKS=rule.sinks is not None,
            PARTS=num_splits > 1,
            SPLIT=EXTEND_SPLIT,
            **constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
            **({} if torch.version.hip else {"maxnreg": EXTEND_REGISTERS}),
        )
    runs["extend"] += 1


def copy_constants(codec: KVCodec) -> dict[str, Any]:
    """Compile-time arguments of `copy_kernel`."""
    k, v = codec.k_format, codec.v_format
    return {
        "PAGE_SIZE": codec.config.page_size,
        "K_BYTES": k.code_width * k.code_dtype.itemsize,
        "V_BYTES": v.code_width * v.code_dtype.itemsize,
        "K_SCALE_BYTES": k.num_scales * SCALE_DTYPE.itemsize,
        "V_SCALE_BYTES": v.num_scales * SCALE_DTYPE.itemsize,
        "BLOCK": 2048,
    }


class TritonBackend(Backend):
    """Triton kernels on a GPU, or in Triton's interpreter."""

    name = "triton"

    def __init__(self, codec: KVCodec) -> None:
        super().__init__(codec)
        for kv_format in (codec.k_format, codec.v_format):
            _number(kv_format)  # refuses what the kernels lack
        self._faults: dict[torch.device, Tensor] = {}

    def _faults_on(self, device: torch.device) -> Tensor:
        """What this cache's writes noted: [num_layers, FAULT_KINDS, num_kv_heads] int32."""
        if device not in self._faults:
            spec = self.codec.spec
            shape = (spec.num_layers, FAULT_KINDS, spec.num_kv_heads)
            with torch.inference_mode(False):  # `settle` clears it outside of that mode
                self._faults[device] = torch.zeros(shape, dtype=torch.int32, device=device)
        return self._faults[device]

    def settle(self) -> None:
        """Raise what writes to this cache noted since the last call; waits for the GPU.

        Raises:
            NonFiniteError: NaN or Inf in K or V, or what is not finite as stored; names the layer
                and the heads.
            ValueError: a slot that the pages do not have.
        """
        for faults in self._faults.values():
            found = faults.nonzero().tolist()
            if not found:
                continue
            faults.zero_()
            layer_idx, kind, _ = found[0]
            if kind == 2:
                raise ValueError(
                    "slot_mapping: expected slots of the pages that there are, got others (not "
                    "written); use the slots that a lease gives"
                )
            heads = [h for i, what, h in found if (i, what) == (layer_idx, kind)]
            kv_format = self.codec.v_format if kind else self.codec.k_format
            raise non_finite("KV"[kind], layer_idx, heads, kv_format)

    def write_kv(
        self,
        layer: LayerPages,
        slot_mapping: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer_idx: int,
        k_center: Tensor | None = None,
    ) -> None:
        """Quantize and scatter new tokens' K and V; see `Backend.write_kv`.

        Rows that are not finite are not written; `settle` raises the error.

        Accuracy: without rotation, the reference's codes and scales; with it, within one code (the
        rotation adds in another order).
        """
        codec = self.codec
        _require_head_dim(codec)
        if k_center is not None:
            k = k.float() - k_center
        k, v = _unit_stride(k), _unit_stride(v)
        num_tokens, num_kv_heads, _ = k.shape
        if not num_tokens:
            return
        num_pages, _, page_size, _ = layer.k_pages.shape
        grid = (triton.cdiv(num_tokens, _WRITE_TOKENS), num_kv_heads)
        with _on(k.device):
            write_kernel[grid](
                k,
                v,
                slot_mapping,
                _written(layer.k_pages),
                _written(layer.v_pages),
                layer.k_scale,
                layer.v_scale,
                self._faults_on(k.device)[layer_idx],
                num_tokens,
                num_pages * page_size,
                num_kv_heads,
                *k.stride()[:2],
                *v.stride()[:2],
                **write_constants(codec),
                enable_fp_fusion=False,  # a fused product would round otherwise than the reference
            )
        runs["write"] += 1

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        return TritonPlan(self, batch)

    @property
    def copy_pages(self) -> CopyPages:
        return self._copy_pages

    def _copy_pages(self, pages: LayerPages, copies: Sequence[tuple[int, int, int]]) -> None:
        """As `CopyPages` says, in one launch."""
        num_layers, num_pages, num_kv_heads = pages.k_pages.shape[:3]
        device = pages.k_pages.device
        raw = [t.view(torch.uint8) if t.numel() else pages.k_pages.view(torch.uint8) for t in pages]
        table = torch.tensor(copies, dtype=torch.int32).to(device, non_blocking=True)
        with _on(device):
            copy_kernel[(len(copies), num_layers, num_kv_heads)](
                *raw,
                table,
                num_pages,
                num_kv_heads,
                **copy_constants(self.codec),
                enable_fp_fusion=True,
            )
        runs["copy"] += 1


class TritonPlan(StepPlan):
    """Launches of a step, laid out once for all layers that are alike.

    Accuracy: float32 sums; products in float32 for a float32 model, else of half floats. A
    sequence's result does not depend on the rest of the batch, unless
    ``KVConfig(shared_prefix="always")`` asks for shared pages to be read once (not by "auto",
    as long as no GPU has been measured).
    """

    def __init__(self, backend: TritonBackend, batch: AttentionBatch) -> None:
        super().__init__(backend, batch)
        # By tokens of a tile, query heads, sliding window.
        self._rounds: dict[tuple[int, int, int | None], list[Round]] = {}
        self._shared: dict[tuple[Any, ...], tuple[SharedRuns, Tensor, Tensor]] = {}  # by runs

    def attend(self, layer: LayerPages, q: Tensor, rule: ScoreRule) -> Tensor:
        codec, batch = self.backend.codec, self.batch
        rule.require_heads(q.shape[1], q.device)
        every_one_new = q.shape[0] == batch.seq_lens.shape[0]
        if batch.runs and every_one_new and codec.config.shared_prefix == "always":
            return self.attend_shared(layer, q, batch.runs, rule)
        queries = _queries(codec, q)
        decodes = extends = True
        lens = _known_lens(batch)
        if lens is not None:
            query_lens = [b - a for a, b in pairwise(lens[1])]
            decodes, extends = 1 in query_lens, any(n > 1 for n in query_lens)
        if extends:
            out = self._extend(layer, queries, rule, q.dtype)
        else:
            out = q.new_empty((*q.shape[:2], codec.v_format.head_dim))
        if decodes:
            parts = _split(
                codec,
                layer,
                queries,
                rule,
                dtype=q.dtype,
                table=batch.page_table,
                starts=None,
                ends=batch.seq_lens,
                cu_queries=batch.cu_seqlens_q,
                num_pairs=batch.seq_lens.shape[0],
                shared=None,
            )
            _merge(
                codec,
                parts[:2],
                rule,
                out,
                table=None,
                cu_seqlens_q=batch.cu_seqlens_q,
                num_rows=batch.seq_lens.shape[0],
                num_columns=parts.num_splits,
            )
        return out

    def attend_shared(
        self, layer: LayerPages, q: Tensor, runs: Sequence[tuple[int, int, Any]], rule: ScoreRule
    ) -> Tensor:
        """As `attend` for sequences with one new token each; ``runs`` are read once.

        Args:
            runs: as `share` takes them.
        """
        codec, batch = self.backend.codec, self.batch
        key = tuple((start, stop, tuple(map(int, seqs))) for start, stop, seqs in runs)
        if key not in self._shared:
            self._shared[key] = share(batch, runs, codec.config.page_size)
        shared, tails, owners = self._shared[key]
        num_seqs = batch.seq_lens.shape[0]
        own = torch.arange(num_seqs, dtype=torch.int32, device=q.device)[:, None]
        return merge(
            codec,
            [
                shared_decode(codec, layer, q, shared, rule),
                decode_tails(codec, layer, q, batch, tails, rule),
            ],
            [owners, own],
            rule,
            num_rows=num_seqs,
            dtype=q.dtype,
        )

    def _extend(self, layer: LayerPages, q: Tensor, rule: ScoreRule, dtype: torch.dtype) -> Tensor:
        """Outputs of sequences with several new tokens; the rows of others are anything."""
        codec, batch = self.backend.codec, self.batch
        num_tokens, num_q_heads, _ = q.shape
        head_dim = codec.v_format.head_dim
        group = num_q_heads // codec.spec.num_kv_heads
        tile = find_tile("extend", codec, group, q.device)
        constants = attention_constants(codec, dtype, group, rule, tile)
        block_q = constants["BLOCK_M"] // constants["HEADS"]
        raw_dtype = torch.float32 if codec.rotate_v else dtype
        out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=raw_dtype, device=q.device)
        key = (block_q, num_q_heads, rule.sliding_window)
        if key not in self._rounds:
            self._rounds[key] = extend_rounds(
                batch,
                num_tokens,
                block_q=block_q,
                row_bytes=num_q_heads * (head_dim + 1) * 4,
                page_size=codec.config.page_size,
                window=rule.sliding_window,
            )
        for one in self._rounds[key]:
            parts = (out, out)
            num_rows = (one.stop - one.first) * block_q
            if one.num_splits > 1:
                shape = (num_rows * one.num_splits, num_q_heads)
                parts_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
                parts = parts_lse.new_empty(*shape, head_dim), parts_lse
            _run_round(codec, layer, q, batch, rule, one, parts, tile, constants)
            if one.num_splits > 1:
                _merge(
                    codec,
                    parts,
                    rule,
                    out,
                    table=None,
                    cu_seqlens_q=batch.cu_seqlens_q,
                    num_rows=num_rows,
                    num_columns=one.num_splits,
                    first_tile=one.first,
                    block_q=block_q,
                )
        return rotate_rows(out, dtype) if codec.rotate_v else out
