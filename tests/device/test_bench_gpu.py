"""The GPU benchmark where its kernels can run: real kernels, a clock that the test holds."""

from __future__ import annotations

import pytest
import torch

from radixkv.attention import tiles
from radixkv.attention import triton as triton_backend
from radixkv.attention.tiles import Tile
from radixkv.bench import gpu as bench_gpu
from radixkv.bench.gpu import GpuBench

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cpu" if triton_backend.INTERPRETED else "cuda")
HEADS = (4, 2, 16)


def test_every_kernel_is_run_checked_and_set_against_the_bytes_that_it_must_move():
    calls = []

    def measure(call) -> float:
        calls.append(call())
        return 2e-3

    before = triton_backend.runs.copy()
    result = bench_gpu.bench_gpu(
        ("int8",),
        device=DEVICE,
        heads=HEADS,
        batches=(1, 2),
        seq_len=48,
        query_lens=(3,),
        measure=measure,
        copied_bytes=1 << 20,
    )
    assert set(triton_backend.runs - before) == {
        "write", "decode", "extend", "merge", "copy", "shared"
    }  # fmt: skip
    bandwidth = 2 * (1 << 20) / 2e-3
    assert result["copy_gigabytes_per_s"] == bandwidth / 1e9
    rows = {(t["kernel"], t["shape"][0], t["shape"][5]): t for t in result["timings"]}
    # A row of 16 elements is 16 bytes and a scale of 2: K and V of 2 heads are 72 bytes.
    queries = 2 * 4 * 16 * 2  # in and out, bfloat16
    expected = {
        ("decode", 1, 1): 72 * 48 + queries,
        ("decode", 2, 1): 2 * (72 * 48 + queries),
        ("extend", 1, 3): 72 * 48 + 3 * queries,
        ("write", 1, 48): 72 * 48 + 2 * 2 * 16 * 2 * 48,
        ("copy", 2, 0): 2 * 72 * 48,
        ("shared", 2, 1): 72 * (32 + 2 * 16) + 2 * queries,
    }
    assert {key: row["floor_bytes"] for key, row in rows.items()} == expected
    for (kernel, _, _), row in rows.items():
        assert row["floor_s"] == row["floor_bytes"] / bandwidth
        assert row["seconds"] == 2e-3
        assert (row["sdpa_s"] is None) == (kernel not in ("decode", "extend"))
        assert row["flashinfer_s"] is None  # it reads no int8 pages
    assert len(calls) == 1 + len(rows) + 3  # the copy, each kernel, torch where it has the same


def test_a_wrong_result_gets_no_figure(monkeypatch):
    attend = triton_backend.TritonPlan.attend
    monkeypatch.setattr(triton_backend.TritonPlan, "attend", lambda *a: attend(*a) + 1)
    bench = GpuBench(DEVICE, lambda call: 1.0, 1.0, HEADS)
    with pytest.raises(ArithmeticError, match=r"decode: result is .* from torch's, .* not timed"):
        bench.attention(bench.load("int8", 1, 20), 1)


def test_tuning_runs_every_tile_of_every_kernel_and_keeps_the_fastest(tmp_path, monkeypatch):
    from triton.runtime.errors import OutOfResources

    monkeypatch.setenv("RADIXKV_TILES", str(tmp_path / "tiles.json"))
    asked: list[Tile] = []

    def measure(call) -> float:
        call()
        tile = next(iter(tiles._forced.values()))
        asked.append(tile)
        if tile.block_n == 32:
            raise OutOfResources(1, 0, "shared memory")
        return 1.0 / tile.num_warps

    bench = GpuBench(DEVICE, measure, 1.0, (2, 1, 16))
    best = bench.tune("int8", seq_len=17, batch=2)
    assert set(best) == set(tiles.TILED_KERNELS)
    for kernel, tile in best.items():
        choices = tiles.candidates(kernel, "int8", 16)
        assert set(choices) <= set(asked)
        assert tile.num_warps == max(t.num_warps for t in choices if t.block_n != 32)
        codec = bench.load("int8", 1, 16).codec
        assert tiles.find_tile(kernel, codec, 2, DEVICE) == tile
    assert not tiles._forced
