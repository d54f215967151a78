"""Time of the CPU kernels against torch, and what compilers make of those for GPUs.

Behind `radixkv bench kernel`. The rival is torch over dense float32 K and V.

Every ratio is taken in one run: the rivals take turns, call by call, so that other work on the
machine meets all alike. With one thread the clock is the process's CPU time, else the wall's.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from radixkv import kv_formats
from radixkv.attention.backend import get_backend
from radixkv.attention.batch import AttentionBatch, ScoreRule
from radixkv.attention.formats import KVFormat
from radixkv.attention.layout import KVCodec, KVSpec, LayerPages
from radixkv.attention.plan import StepPlan
from radixkv.attention.reference import attend_dense, paged_attention, read_rows, rotate_rows
from radixkv.attention.shared_runs import find_runs
from radixkv.config import KVConfig
from radixkv.machine import processor_name

DECODE_SHAPES = ((1, 32, 8, 128, 8192), (8, 32, 8, 128, 4096), (16, 9, 3, 64, 4096))
EXTEND_SHAPES = ((1, 32, 8, 128, 4096), (1, 9, 3, 64, 4096))
EXTEND_QUERIES = 512
# Levels of a tree of sequences, from its root: (branches of each node above, tokens of each).
SHARED_TREES = (
    ((1, 4096), (32, 64)),
    ((1, 16384), (64, 64)),
    ((1, 2048), (4, 1024), (8, 64)),
)
SHARED_GRID = tuple(
    ((1, shared), (num_seqs, 64)) for num_seqs in (1, 4, 16, 64) for shared in (0, 512, 2048, 8192)
)
SHARED_HEADS = (32, 8, 128)
PAGE_SIZE = 16
_CPU = torch.device("cpu")
KV_DTYPES = tuple(
    one.name for one in kv_formats.FORMATS.values() if one.is_timed and one.bits is not None
)


@dataclass(frozen=True)
class KernelTiming:
    """One kernel on one shape.

    Attributes:
        kernel: "decode", "extend", "write", or "shared": decode of sequences that begin alike.
        kv_dtype: storage format of the pages.
        shape: (batch, query heads, KV heads, head_dim, KV length); of "shared" the levels of
            the tree (branches, tokens), with SHARED_HEADS.
        seconds: median of one call.
        rival: what ``ratio`` compares with.
        ratio: the rival's median time over ours; above 1 is faster.
        gigabytes_per_s: stored bytes (scales included) that a call must move, over its time.
        read_share: of "shared": bytes read, over those that each sequence alone would read.
    """

    kernel: str
    kv_dtype: str
    shape: tuple[Any, ...]
    seconds: float
    rival: str
    ratio: float
    gigabytes_per_s: float
    read_share: float | None = None


def _clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _medians(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            begin = _clock()
            call()
            taken.append(_clock() - begin)
    return [median(taken) for taken in times]


def _empty_pages(codec: KVCodec, num_pages: int, device: str | torch.device = "cpu") -> LayerPages:
    def make(form: KVFormat) -> tuple[Tensor, Tensor]:
        shape = (num_pages, codec.spec.num_kv_heads, PAGE_SIZE)
        num_bytes = form.code_width * form.code_dtype.itemsize
        codes = torch.zeros(*shape, num_bytes, dtype=torch.uint8, device=device)
        scale = torch.zeros(*shape, form.num_scales, dtype=torch.bfloat16, device=device)
        return codes.view(form.code_dtype), scale

    (k_pages, k_scale), (v_pages, v_scale) = make(codec.k_format), make(codec.v_format)
    return LayerPages(k_pages, v_pages, k_scale, v_scale)


class PagedLoad:
    """Dense K and V of a batch, and the same in pages in random order."""

    def __init__(
        self,
        kv_dtype: str,
        shape: tuple[int, ...],
        backend: str = "cpu",
        *,
        device: torch.device = _CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        batch, _, num_kv_heads, head_dim, seq_len = shape
        generator = torch.Generator(device).manual_seed(0)
        dense = (batch, num_kv_heads, seq_len, head_dim)
        self.k = torch.randn(dense, generator=generator, device=device).to(dtype)
        self.v = torch.randn(dense, generator=generator, device=device).to(dtype)
        spec = KVSpec(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        self.codec = KVCodec(spec, KVConfig(dtype=kv_dtype, page_size=PAGE_SIZE))  # type: ignore[arg-type]
        self.backend = get_backend(backend, device)(self.codec)
        pages = -(-seq_len // PAGE_SIZE)
        order = torch.randperm(batch * pages, generator=generator, device=device) + 1
        self.page_table = order.int().reshape(batch, pages)
        self.layer = _empty_pages(self.codec, 1 + batch * pages, device)
        position = torch.arange(seq_len, device=device)
        first = self.page_table[:, position // PAGE_SIZE].long() * PAGE_SIZE
        self.slots = first + position % PAGE_SIZE
        # Rows as a model gives them: [num_tokens, num_kv_heads, head_dim].
        self.k_rows = self.k.transpose(1, 2).contiguous()
        self.v_rows = self.v.transpose(1, 2).contiguous()
        for i in range(batch):
            self.write(i)
        self.rule = ScoreRule(softmax_scale=head_dim**-0.5)
        self.bytes_read = self.codec.bytes_per_token * batch * seq_len

    def write(self, seq: int) -> None:
        k, v = self.k_rows[seq], self.v_rows[seq]
        self.backend.write_kv(self.layer, self.slots[seq], k, v, layer_idx=0)

    def plan(self, query_len: int) -> StepPlan:
        """For the last ``query_len`` tokens of each sequence."""
        return self.backend.plan(self.batch(query_len))

    def batch(self, query_len: int) -> AttentionBatch:
        num_seqs, seq_len = self.page_table.shape[0], self.slots.shape[1]
        device = self.page_table.device
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
        return AttentionBatch(
            slot_mapping=self.slots[:, -query_len:].flatten(),
            page_table=self.page_table,
            seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device=device),
            cu_seqlens_q=starts,
            known_lens=([seq_len] * num_seqs, starts.tolist()),
        )

    def attend(self, q: Tensor, plan: StepPlan) -> Tensor:
        return plan.attend(self.layer, q, self.rule)

    def stored(self, seq: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence as its pages hold them: [num_kv_heads, seq_len, head_dim] each."""
        codec, layer, seq_len = self.codec, self.layer, self.slots.shape[1]
        page_ids = self.page_table[seq].long()
        k = read_rows(codec.k_format, layer.k_pages, layer.k_scale, page_ids)[:, :seq_len]
        v = read_rows(codec.v_format, layer.v_pages, layer.v_scale, page_ids)[:, :seq_len]
        return rotate_rows(k) if codec.rotate_k else k, rotate_rows(v) if codec.rotate_v else v

    def attend_stored(self, q: Tensor, query_len: int) -> Tensor:
        """What `attend` has to give, in float32 and without a kernel. [tokens, heads, dim]."""
        outs = []
        for seq, rows in enumerate(q.float().split(query_len)):
            k, v = self.stored(seq)
            outs.append(attend_dense(rows.transpose(0, 1), k, v, self.rule).transpose(0, 1))
        return torch.cat(outs)


def _queries(shape: tuple[int, ...], query_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape[0], shape[1], query_len, shape[3], generator=generator)


# As `StoredFormat.output_error`, of what the model's own dtype rounds. Zeros are off by 1, another
# head's output by 1.4.
_ROUNDED = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def _require_near(kernel: str, what: str, got: Tensor, want: Tensor, allowed: float) -> None:
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        raise ArithmeticError(
            f"{kernel}: result is of shape {list(got.shape)}, {what} of {list(want.shape)}; not "
            f"timed"
        )
    error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
    if not error <= allowed:
        raise ArithmeticError(
            f"{kernel}: result is {error:.3g} of its size from {what}, allowed {allowed:.3g}; not "
            f"timed"
        )


def require_close(kernel: str, load: PagedLoad, got: Tensor, want: Tensor) -> None:
    """Raise unless each output is as near to torch's over dense rows as the format allows.

    Args:
        got, want: [tokens, num_q_heads, v_head_dim].
    Raises:
        ArithmeticError: the result is wrong; no figure for that.
    """
    allowed = (
        kv_formats.FORMATS[load.codec.config.dtype].output_error + _ROUNDED[load.codec.spec.dtype]
    )
    _require_near(kernel, "torch's", got, want, allowed)


def require_as_stored(kernel: str, load: PagedLoad, q: Tensor, query_len: int, got: Tensor) -> None:
    """Raise unless each output is what the stored pages give: one page of hundreds shows.

    Args:
        q: what was attended, [tokens, num_q_heads, head_dim], ``query_len`` a sequence.
    Raises:
        ArithmeticError: the result is wrong; no figure for that.
    """
    want = load.attend_stored(q, query_len)
    _require_near(kernel, "that of its pages", got, want, _ROUNDED[load.codec.spec.dtype])


def require_written(load: PagedLoad, seq: int) -> None:
    """Raise unless the pages of a sequence hold its rows as exactly as the formats promise.

    Raises:
        ArithmeticError: a row is off by more.
    """
    codec, stored = load.codec, load.stored(seq)
    for form, rotate, rows, real in (
        (codec.k_format, codec.rotate_k, load.k_rows[seq], stored[0]),
        (codec.v_format, codec.rotate_v, load.v_rows[seq], stored[1]),
    ):
        rows = rows.float().transpose(0, 1)
        bound = form.norm_bound(rotate_rows(rows) if rotate else rows) + 1e-5 * rows.norm(dim=-1)
        error = float(((real - rows).norm(dim=-1) / bound).max())
        if not error <= 1:
            raise ArithmeticError(
                f"write: a row is {error:.3g} times as far from its own as the format allows; not "
                f"timed"
            )


def time_decode(kv_dtype: str, shape: tuple[int, ...], repeats: int = 15) -> list[KernelTiming]:
    """Decode against SDPA, given one query a head and given the heads of a group as rows."""
    load = PagedLoad(kv_dtype, shape)
    q = _queries(shape, 1)
    batch_size, _, num_kv_heads, head_dim, _ = shape
    grouped = q.reshape(batch_size, num_kv_heads, -1, head_dim)
    rows, plan = q[:, :, 0].contiguous(), load.plan(1)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, load.k, load.v, enable_gqa=True)

    def sdpa_grouped() -> Tensor:
        return F.scaled_dot_product_attention(grouped, load.k, load.v)

    out = load.attend(rows, plan)
    require_close("decode", load, out, sdpa()[:, :, 0])
    require_as_stored("decode", load, rows, 1, out)
    plain, packed, ours = _medians([sdpa, sdpa_grouped, lambda: load.attend(rows, plan)], repeats)
    rate = load.bytes_read / ours / 1e9
    return [
        KernelTiming("decode", kv_dtype, shape, ours, rival, taken / ours, rate)
        for rival, taken in (("sdpa", plain), ("sdpa, grouped heads as rows", packed))
    ]


class _Tree:
    """Sequences that share the levels of a tree, in pages in random order."""

    def __init__(self, kv_dtype: str, levels: Sequence[tuple[int, int]]) -> None:
        num_q_heads, num_kv_heads, head_dim = SHARED_HEADS
        generator = torch.Generator().manual_seed(0)
        spec = KVSpec(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim)
        self.codecs = {
            mode: KVCodec(spec, KVConfig(dtype=kv_dtype, page_size=PAGE_SIZE, shared_prefix=mode))  # type: ignore[arg-type]
            for mode in ("never", "auto")
        }
        make = get_backend("cpu", torch.device("cpu"))
        backends = {mode: make(codec) for mode, codec in self.codecs.items()}
        codec = self.codecs["auto"]
        nodes, num_pages = [np.zeros(0, np.int32)], 1
        for branches, num_tokens in levels:
            pages = -(-num_tokens // PAGE_SIZE)
            grown = []
            for node in nodes:
                for _ in range(branches):
                    own = np.arange(num_pages, num_pages + pages, dtype=np.int32)
                    grown.append(np.concatenate([node, own]))
                    num_pages += pages
            nodes = grown
        order = torch.randperm(num_pages - 1, generator=generator).numpy() + 1
        table = np.concatenate([[0], order]).astype(np.int32)[np.stack(nodes)]
        self.layer = _empty_pages(codec, num_pages)
        for page in range(1, num_pages, 64):  # some at a time: their floats are four times as large
            slots = torch.arange(page * PAGE_SIZE, min(num_pages, page + 64) * PAGE_SIZE)
            rows = torch.randn(2, len(slots), num_kv_heads, head_dim, generator=generator)
            backends["auto"].write_kv(self.layer, slots, rows[0], rows[1], layer_idx=0)
        self.num_seqs, seq_len = len(nodes), sum(num_tokens for _, num_tokens in levels)
        seq_lens = np.full(self.num_seqs, seq_len, np.int32)
        self.batch = AttentionBatch(
            slot_mapping=torch.zeros(self.num_seqs, dtype=torch.int64),
            page_table=torch.from_numpy(table),
            seq_lens=torch.from_numpy(seq_lens),
            cu_seqlens_q=torch.arange(self.num_seqs + 1, dtype=torch.int32),
            runs=find_runs(table, (seq_lens - 1) // PAGE_SIZE),
        )
        self.plans = {mode: backend.plan(self.batch) for mode, backend in backends.items()}
        self.rule = ScoreRule(softmax_scale=head_dim**-0.5)
        self.q = torch.randn(self.num_seqs, num_q_heads, head_dim, generator=generator)

    def attend(self, mode: str) -> Tensor:
        return self.plans[mode].attend(self.layer, self.q, self.rule)

    def attend_plainly(self, seq: int) -> Tensor:
        """What one sequence's row has to be, without a kernel. [num_q_heads, head_dim]."""
        batch = AttentionBatch(
            slot_mapping=self.batch.slot_mapping[seq : seq + 1],
            page_table=self.batch.page_table[seq : seq + 1],
            seq_lens=self.batch.seq_lens[seq : seq + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        )
        q, codec = self.q[seq : seq + 1], self.codecs["never"]
        return paged_attention(codec, self.layer, q, batch, self.rule)[0]


def time_shared(
    kv_dtype: str, levels: Sequence[tuple[int, int]], repeats: int = 7
) -> list[KernelTiming]:
    """Decode of sequences that begin alike, against the same without shared runs."""
    tree = _Tree(kv_dtype, levels)
    together = tree.attend("auto")
    if not torch.equal(tree.attend("never"), together):
        raise ArithmeticError("shared: the result is not that of each sequence alone; not timed")
    for seq in sorted({0, tree.num_seqs - 1}):
        want, allowed = tree.attend_plainly(seq), _ROUNDED[torch.float32]
        _require_near("shared", "that of its pages", together[seq], want, allowed)
    alone, ours = _medians([lambda: tree.attend("never"), lambda: tree.attend("auto")], repeats)
    reads, token_bytes = tree.plans["auto"].reads, tree.codecs["auto"].bytes_per_token
    rate = token_bytes * reads.tokens / ours / 1e9
    share = reads.tokens / reads.tokens_alone
    rival = "each sequence alone"
    shape = tuple(levels)
    return [KernelTiming("shared", kv_dtype, shape, ours, rival, alone / ours, rate, share)]


def time_extend(kv_dtype: str, shape: tuple[int, ...], repeats: int = 7) -> list[KernelTiming]:
    """Extend of EXTEND_QUERIES tokens against SDPA with a causal mask."""
    load = PagedLoad(kv_dtype, shape)
    q = _queries(shape, EXTEND_QUERIES)
    rows, plan = q.transpose(1, 2).flatten(0, 1).contiguous(), load.plan(EXTEND_QUERIES)
    seq_len = shape[4]
    mask = torch.ones(EXTEND_QUERIES, seq_len, dtype=torch.bool).tril(seq_len - EXTEND_QUERIES)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, load.k, load.v, attn_mask=mask, enable_gqa=True)

    out = load.attend(rows, plan)
    require_close("extend", load, out, sdpa().transpose(1, 2).flatten(0, 1))
    require_as_stored("extend", load, rows, EXTEND_QUERIES, out)
    rival, ours = _medians([sdpa, lambda: load.attend(rows, plan)], repeats)
    rate = load.bytes_read / ours / 1e9
    return [KernelTiming("extend", kv_dtype, shape, ours, "sdpa, masked", rival / ours, rate)]


def time_write(kv_dtype: str, shape: tuple[int, ...], repeats: int = 15) -> list[KernelTiming]:
    """Quantize and scatter one sequence's rows against a plain copy of them."""
    load = PagedLoad(kv_dtype, (1, *shape[1:]))
    k, v = torch.empty_like(load.k_rows[0]), torch.empty_like(load.v_rows[0])

    def copy() -> None:
        k.copy_(load.k_rows[0])
        v.copy_(load.v_rows[0])

    require_written(load, 0)
    rival, ours = _medians([copy, lambda: load.write(0)], repeats)
    rate = load.bytes_read / ours / 1e9
    return [KernelTiming("write", kv_dtype, (1, *shape[1:]), ours, "copy", rival / ours, rate)]


def read_bandwidth(num_bytes: int = 2**28) -> float:
    """Bytes a second that summing a large float32 tensor reads, on torch's threads."""
    data = torch.ones(num_bytes // 4)
    (taken,) = _medians([data.sum], 5)
    return num_bytes / taken


def bench_kernels(
    kv_dtypes: Sequence[str] = KV_DTYPES, *, num_threads: int | None = None
) -> dict[str, object]:
    """Run every kernel on every shape (shared runs: the first format); a dict that JSON can hold.

    Sets torch's number of threads while it runs.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        timings: list[KernelTiming] = []
        for kv_dtype in kv_dtypes:
            for shape in DECODE_SHAPES:
                timings += time_decode(kv_dtype, shape)
            for shape in EXTEND_SHAPES:
                timings += time_extend(kv_dtype, shape) + time_write(kv_dtype, shape)
        for levels in SHARED_TREES + SHARED_GRID:
            timings += time_shared(kv_dtypes[0], levels)
        return {
            "bench": "kernel",
            "device": "cpu",
            "processor": processor_name(),
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "page_size": PAGE_SIZE,
            "read_gigabytes_per_s": read_bandwidth() / 1e9,
            "timings": [asdict(timing) for timing in timings],
        }
    finally:
        torch.set_num_threads(before)


def compile_report(
    formats: Sequence[str] = ("int8",), head_dims: Sequence[int] = (128,)
) -> list[dict[str, object]]:
    """Compile every GPU kernel for every target with the shipped tiles; needs no GPU.

    Returns:
        per kernel, format and target: registers and spilled bytes a thread, shared bytes a
        program, the width of its loads and how many of each, what is wrong with it.
    """
    from radixkv.bench.gpu_compile import compile_kernel, faults_of, jobs

    rows: list[dict[str, object]] = []
    for job in jobs(formats=formats, head_dims=head_dims):
        made = compile_kernel(job)
        rows.append(
            {
                "kernel": job.kernel,
                "kv_dtype": job.kv_dtype,
                "head_dim": job.head_dim,
                "target": job.target,
                "registers": made.registers,
                "spill_bytes": made.spill_bytes,
                "shared_bytes": made.shared_bytes,
                "loads": {str(width): n for width, n in Counter(made.load_bytes).items()},
                "faults": faults_of(job, made),
            }
        )
    return rows


def compiled_lines(rows: Sequence[dict[str, object]]) -> list[str]:
    """The compile report for people: a line a kernel."""
    lines = [
        "GPU kernels, as the compilers make them"
        + ("." if torch.cuda.is_available() else " (there is no GPU here to time them on)."),
        (
            f"{'kernel':13}{'format':10}{'target':12}{'registers':>10}{'spilled':>9}{'shared':>9}"
            "  loads (bytes x count)"
        ),
    ]
    for row in rows:
        loads = row["loads"]
        assert isinstance(loads, dict)  # as compile_report makes it
        widths = ", ".join(f"{width} x {count}" for width, count in loads.items())
        lines.append(
            f"{row['kernel']!s:13}{row['kv_dtype']!s:10}{row['target']!s:12}"
            f"{row['registers']!s:>10}{row['spill_bytes']!s:>7} B{row['shared_bytes']!s:>7} B"
            f"  {widths}"
        )
    return lines


def report(result: dict[str, object]) -> str:
    """Lines for people, and as the last line the result as JSON."""
    timings, lines = result.get("timings"), []
    if isinstance(timings, list):
        lines = [f"{result['processor']}, {result['num_threads']} threads"]
        lines += _timing_lines(timings)
    compiled = result.get("compiled")
    if isinstance(compiled, list):
        lines += compiled_lines(compiled)
    return "\n".join([*lines, json.dumps(result)])


def _timing_lines(timings: list[dict[str, Any]]) -> list[str]:
    return [
        f"{row['kernel']:7} {row['kv_dtype']:9} {row['shape']!s:37} "
        f"{1e3 * row['seconds']:9.3f} ms {row['gigabytes_per_s']:6.1f} GB/s "
        f"{row['ratio']:6.2f}x of {row['rival']}"
        for row in timings
    ]


if __name__ == "__main__":
    sys.stdout.write(report(bench_kernels()) + "\n")
