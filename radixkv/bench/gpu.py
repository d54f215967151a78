"""Time of the GPU kernels against their floors, torch over dense K and V, and FlashInfer.

Behind `radixkv bench kernel` where there is a GPU. The floor of a kernel is the time that a copy
of as many bytes takes as the kernel must move at least: stored K and V once, queries or rows in,
results out. Merging and rotating queries are timed within the kernel that needs them. A call is
timed by events on the device, after the second-level cache was cleared.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from radixkv import kv_formats
from radixkv.attention import tiles
from radixkv.attention.backend import get_backend
from radixkv.attention.layout import KVCodec
from radixkv.attention.shared_runs import find_runs
from radixkv.attention.tiles import Tile
from radixkv.bench.kernel import (
    PAGE_SIZE,
    PagedLoad,
    require_as_stored,
    require_close,
    require_written,
)

Measure = Callable[[Callable[[], object]], float]
"""Seconds of a call: `gpu_seconds`, or what a test passes."""

HEADS = (32, 8, 128)  # query heads, KV heads, head_dim: Llama-3-8B
BATCHES = (1, 8, 64)
SEQ_LEN = 8192
EXTEND_QUERIES = (8, 512)
KV_DTYPES = tuple(one.name for one in kv_formats.FORMATS.values() if one.is_timed)
_COPY_BYTES = 1 << 30
_WORKSPACE_BYTES = 128 << 20  # that FlashInfer asks for


@dataclass(frozen=True)
class GpuTiming:
    """One kernel on one shape.

    Attributes:
        kernel: "write", "decode", "extend", "shared" or "copy".
        kv_dtype: storage format of the pages; "model" is the model's own.
        shape: (batch, query heads, KV heads, head_dim, KV length, new tokens a sequence).
        seconds: median of one call.
        floor_bytes: that must move at least.
        floor_s: what copying as many takes.
        sdpa_s: torch's attention over dense K and V of the model's dtype; None for what is none.
        flashinfer_s: FlashInfer over the same pages; None where it is not installed, for formats
            that it does not read, and for kernels that it does not have.
    """

    kernel: str
    kv_dtype: str
    shape: tuple[int, ...]
    seconds: float
    floor_bytes: int
    floor_s: float
    sdpa_s: float | None = None
    flashinfer_s: float | None = None


def gpu_seconds(call: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    from triton.testing import do_bench

    milliseconds: float = do_bench(call, return_mode="median")
    return milliseconds / 1e3


def copy_bandwidth(device: torch.device, measure: Measure, num_bytes: int = _COPY_BYTES) -> float:
    """Bytes a second that copying moves, those read and those written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / measure(lambda: target.copy_(source))


def _flashinfer(load: PagedLoad, q: Tensor) -> Callable[[], Tensor] | None:
    """Decode of the same pages by FlashInfer, whose layout "HND" is ours; None if it cannot."""
    if load.codec.config.dtype != "model" or importlib.util.find_spec("flashinfer") is None:
        return None
    flashinfer = importlib.import_module("flashinfer")
    batch, pages = load.page_table.shape
    device = q.device
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device=device) * pages,
        load.page_table.flatten(),
        torch.full((batch,), PAGE_SIZE, dtype=torch.int32, device=device),
        q.shape[1],
        load.codec.spec.num_kv_heads,
        q.shape[2],
        PAGE_SIZE,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    run: Callable[..., Tensor] = wrapper.run
    return lambda: run(q, (load.layer.k_pages, load.layer.v_pages))


class GpuBench:
    """Times kernels on one device.

    Args:
        device: where they run; a CPU serves tests in Triton's interpreter.
        measure: how a call is timed.
        bandwidth: bytes a second of a copy.
        heads: query heads, KV heads, head_dim.
        dtype: of the model.
    """

    def __init__(
        self,
        device: torch.device,
        measure: Measure,
        bandwidth: float,
        heads: tuple[int, int, int] = HEADS,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device = device
        self.measure = measure
        self.bandwidth = bandwidth
        self.heads = heads
        self.dtype = dtype

    def load(self, kv_dtype: str, batch: int, seq_len: int) -> PagedLoad:
        """Dense K and V of ``batch`` sequences, and the same in pages."""
        shape = (batch, *self.heads, seq_len)
        return PagedLoad(kv_dtype, shape, "triton", device=self.device, dtype=self.dtype)

    def queries(self, batch: int, query_len: int) -> Tensor:
        """[batch, num_q_heads, query_len, head_dim]."""
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (batch, self.heads[0], query_len, self.heads[2])
        made = torch.randn(shape, generator=generator, device=self.device)
        return made.to(self.dtype)

    def attention(self, load: PagedLoad, query_len: int) -> list[GpuTiming]:
        """Decode (one new token a sequence) or extend; and nothing for a wrong result.

        Raises:
            ArithmeticError: the result is not that of torch.
        """
        batch, seq_len = load.k.shape[0], load.k.shape[2]
        q = self.queries(batch, query_len)
        rows = q.transpose(1, 2).flatten(0, 1).contiguous()
        mask = None
        if query_len > 1:
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=self.device)
            mask = mask.tril(seq_len - query_len)

        def sdpa() -> Tensor:
            return F.scaled_dot_product_attention(
                q, load.k, load.v, attn_mask=mask, enable_gqa=True
            )

        kernel = "decode" if query_len == 1 else "extend"
        plan = load.plan(query_len)
        want = sdpa().transpose(1, 2).flatten(0, 1)
        out = load.attend(rows, plan)
        require_close(kernel, load, out, want)
        require_as_stored(kernel, load, rows, query_len, out)
        rival = _flashinfer(load, rows) if query_len == 1 else None
        moved = load.bytes_read + 2 * rows.numel() * rows.element_size()
        return [
            self._timing(
                kernel,
                load,
                query_len,
                lambda: load.attend(rows, plan),
                moved,
                sdpa_s=self.measure(sdpa),
                flashinfer_s=None if rival is None else self.measure(rival),
            )
        ]

    def shared(self, load: PagedLoad) -> list[GpuTiming]:
        """Decode of sequences that all begin with the first one's pages, but for the last."""
        load.page_table[:, :-1] = load.page_table[0, :-1]
        codec = load.codec
        batch = load.batch(1)
        num_seqs, pages = load.page_table.shape
        lens = batch.seq_lens.cpu().numpy()
        runs = find_runs(load.page_table.cpu().numpy(), (lens - 1) // PAGE_SIZE)
        batch = replace(batch, runs=runs)
        alone, together = (
            type(load.backend)(KVCodec(codec.spec, replace(codec.config, shared_prefix=mode))).plan(
                batch
            )
            for mode in ("never", "always")
        )
        rows = self.queries(num_seqs, 1)[:, :, 0].contiguous()
        want, out = load.attend(rows, alone), load.attend(rows, together)
        require_close("shared", load, out, want)
        require_as_stored("shared", load, rows, 1, out)
        tokens = (pages - 1 + num_seqs) * PAGE_SIZE
        moved = codec.bytes_per_token * tokens + 2 * rows.numel() * rows.element_size()
        return [self._timing("shared", load, 1, lambda: load.attend(rows, together), moved)]

    def write(self, load: PagedLoad) -> list[GpuTiming]:
        """Quantize and scatter one sequence's rows."""
        require_written(load, 0)
        rows = load.k_rows[0].numel() + load.v_rows[0].numel()
        moved = rows * self.dtype.itemsize + load.bytes_read // load.k.shape[0]
        return [self._timing("write", load, load.k.shape[2], lambda: load.write(0), moved)]

    def copy(self, load: PagedLoad) -> list[GpuTiming]:
        """Copy a sequence's pages onto another's."""
        source, target = load.page_table[:2].tolist()
        copies = [(a, b, PAGE_SIZE) for a, b in zip(source, target, strict=True)]
        pages = type(load.layer)(*(tensor[None] for tensor in load.layer))
        copy_pages = load.backend.copy_pages
        assert copy_pages is not None  # the triton backend has it
        moved = 2 * load.codec.bytes_per_token * len(copies) * PAGE_SIZE
        return [self._timing("copy", load, 0, lambda: copy_pages(pages, copies), moved)]

    def _timing(
        self,
        kernel: str,
        load: PagedLoad,
        query_len: int,
        call: Callable[[], object],
        moved: int,
        **rivals: float | None,
    ) -> GpuTiming:
        shape = (load.k.shape[0], *self.heads, load.k.shape[2], query_len)
        seconds = self.measure(call)
        kv_dtype = load.codec.config.dtype
        return GpuTiming(kernel, kv_dtype, shape, seconds, moved, moved / self.bandwidth, **rivals)

    def tune(self, kv_dtype: str, *, seq_len: int = SEQ_LEN, batch: int = 8) -> dict[str, Tile]:
        """Measure every tile that each kernel may take; the fastest is kept on disk.

        Raises:
            ArithmeticError: with some tile a result is wrong.
        """
        from triton.errors import TritonError

        group = self.heads[0] // self.heads[1]
        query_lens = {"decode": 1, "extend": min(64, seq_len)}
        best = {}
        for kernel in tiles.TILED_KERNELS:
            load = self.load(kv_dtype, batch, seq_len)

            def seconds(tile: Tile, kernel: str = kernel, load: PagedLoad = load) -> float:
                try:
                    with tiles.forced(kernel, tile):
                        if kernel == "shared":
                            (timing,) = self.shared(load)
                        else:
                            (timing,) = self.attention(load, query_lens[kernel])
                except TritonError as error:  # it asks for more than this GPU has
                    raise RuntimeError(f"{tile}: {error}") from error
                return timing.seconds

            best[kernel] = tiles.tune(kernel, load.codec, group, self.device, seconds)
        return best


def bench_gpu(
    kv_dtypes: Sequence[str] = KV_DTYPES,
    *,
    device: torch.device | None = None,
    heads: tuple[int, int, int] = HEADS,
    batches: Sequence[int] = BATCHES,
    seq_len: int = SEQ_LEN,
    query_lens: Sequence[int] = EXTEND_QUERIES,
    measure: Measure = gpu_seconds,
    copied_bytes: int = _COPY_BYTES,
) -> dict[str, Any]:
    """Time every kernel in every format; a dict that JSON can hold.

    Raises:
        ValueError: there is no GPU (and no ``device`` was given).
        ArithmeticError: a kernel's result is not that of torch: no figure for a wrong result.
    """
    device = device or torch.device("cuda")
    get_backend("triton", device)
    bandwidth = copy_bandwidth(device, measure, copied_bytes)
    bench = GpuBench(device, measure, bandwidth, heads)
    timings: list[GpuTiming] = []
    for kv_dtype in kv_dtypes:
        for batch in batches:
            load = bench.load(kv_dtype, batch, seq_len)
            timings += bench.attention(load, 1)
            if batch == batches[0]:
                for query_len in query_lens:
                    timings += bench.attention(load, query_len)
                timings += bench.write(load)
        load = bench.load(kv_dtype, max(2, batches[-1]), seq_len)
        timings += bench.copy(load) + bench.shared(load)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {
        "bench": "kernel",
        "device": name,
        "torch": torch.__version__,
        "page_size": PAGE_SIZE,
        "copy_gigabytes_per_s": bandwidth / 1e9,
        "timings": [asdict(timing) for timing in timings],
    }


def tune_gpu(
    kv_dtypes: Sequence[str], *, heads: tuple[int, int, int] = HEADS
) -> dict[str, dict[str, dict[str, int]]]:
    """Tune every kernel for every format on the GPU that there is: format, kernel, tile.

    Raises:
        ValueError: there is no GPU.
    """
    device = torch.device("cuda")
    bench = GpuBench(device, gpu_seconds, 1.0, heads)
    return {
        kv_dtype: {kernel: asdict(tile) for kernel, tile in bench.tune(kv_dtype).items()}
        for kv_dtype in kv_dtypes
    }


def _milliseconds(seconds: float | None) -> str:
    return f"{'-':>10}" if seconds is None else f"{1e3 * seconds:10.4f}"


def gpu_report(result: dict[str, Any]) -> str:
    """A table for people, and as the last line the result as JSON."""
    bandwidth = f"{result['copy_gigabytes_per_s']:.0f} GB/s"
    lines = [
        f"{result['device']}, torch {result['torch']}: a copy moves {bandwidth}; times in ms",
        (
            f"{'kernel':8}{'format':10}{'batch, heads, KV heads, head_dim, tokens, new':>46}"
            f"{'time':>10}{'floor':>10}{'of floor':>10}{'sdpa':>10}{'flashinfer':>12}"
        ),
    ]
    for row in result["timings"]:
        share = row["floor_s"] / row["seconds"]
        shape = ", ".join(map(str, row["shape"]))
        lines.append(
            f"{row['kernel']:8}{row['kv_dtype']:10}{shape:>46}{_milliseconds(row['seconds'])}"
            f"{_milliseconds(row['floor_s'])}{share:>9.0%} {_milliseconds(row['sdpa_s'])}  "
            f"{_milliseconds(row['flashinfer_s'])}"
        )
    return "\n".join([*lines, json.dumps(result)])
