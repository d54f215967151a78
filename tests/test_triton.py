"""The Triton kernels on any machine: in the interpreter, and compiled ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from radixkv.attention import tiles
from radixkv.attention.backend import get_backend
from radixkv.attention.batch import AttentionBatch
from radixkv.attention.layout import KVCodec, KVSpec
from radixkv.attention.reference import TorchBackend
from radixkv.attention.tiles import Tile
from radixkv.bench import gpu as bench_gpu
from radixkv.bench import gpu_compile as compiled
from radixkv.bench.gpu_compile import CompileJob, compile_kernel, faults_of
from radixkv.cli.main import main
from radixkv.config import KVConfig
from radixkv.disk import cache_dir
from radixkv.errors import UnsupportedModelError
from radixkv.models import graphs
from radixkv.models.batch import Batch
from radixkv.models.graphs import DecodeGraphs

HERE = Path(__file__).resolve().parent
CPU = torch.device("cpu")


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(HERE.parent), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_WAIT_POLICY": "PASSIVE", **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=HERE.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("file", sorted(path.name for path in (HERE / "device").glob("test_*.py")))
def test_every_kernel_is_right_in_the_interpreter(file):
    # In a process of its own: the variable must be set before the kernels are imported.
    file = f"tests/device/{file}"
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_without_a_gpu_the_backend_says_how_to_have_it():
    code = (
        "import torch\nfrom radixkv.attention.backend import get_backend\n"
        "try:\n    get_backend('triton', torch.device('cpu'))\n"
        "except ValueError as error:\n    print(error)\n"
        "import sys\nassert 'triton' not in sys.modules\n"
        "import radixkv_kernels.gpu.write, os\nos.environ['TRITON_INTERPRET'] = '1'\n"
        "try:\n    get_backend('triton', torch.device('cpu'))\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert 'set TRITON_INTERPRET=1 before Python starts, or use "cpu"' in first
    assert "the Triton kernels were imported before TRITON_INTERPRET=1 was set" in second


def test_a_gpu_gets_triton_by_itself_and_an_unknown_device_the_plain_backend():
    assert get_backend("auto", torch.device("meta")).name == "torch"
    code = (
        "import torch\nfrom radixkv.attention.backend import get_backend\n"
        "print(get_backend('auto', torch.device('cuda')).name)"
    )
    assert run_python("-c", code).stdout == "triton\n"


# Ahead of time. A sample of the product, so that CI has time for it; `python -m fuzz.aot` has all.

SAMPLE = [
    CompileJob("decode", "cuda 90", "int8"),
    CompileJob("decode", "cuda 90", "int4"),
    CompileJob("decode", "cuda 90", "model"),
    CompileJob("decode", "cuda 80", "fp8"),
    CompileJob("decode", "cuda 80", "fp8_e5m2", 80),
    CompileJob("decode", "hip gfx942", "int8"),
    CompileJob("shared", "cuda 90", "int4"),
    CompileJob("extend", "cuda 80", "int8"),
    CompileJob(
        "extend", "cuda 90", "int8", 64, rule=frozenset(["window", "softcap", "sinks", "slopes"])
    ),
    CompileJob("extend parts", "cuda 90", "int4"),
    CompileJob("write", "cuda 80", "int4"),
    CompileJob("write", "cuda 90", "fp8"),
    CompileJob("rotate", "hip gfx942"),
    CompileJob("merge", "cuda 90"),
    CompileJob("merge extend", "cuda 80", "int4"),
    CompileJob("copy", "cuda 80"),
]


@pytest.mark.parametrize(
    "job", SAMPLE, ids=lambda job: f"{job.kernel} {job.target} {job.kv_dtype} {job.head_dim}"
)
def test_kernels_compile_without_spills_and_read_pages_in_loads_of_16_bytes(job):
    report = compile_kernel(job)
    assert faults_of(job, report) == []
    assert report.registers > 0
    if job.kernel == "copy":
        assert 16 in report.load_bytes


def test_a_job_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"expected a kernel of .* got 'decode', 'cuda 10'"):
        compile_kernel(CompileJob("decode", "cuda 10"))


def test_the_product_holds_every_tile_that_the_tuner_may_choose():
    made = list(compiled.jobs(kernels=("decode", "rotate"), formats=("int8", "int4"), tuned=True))
    choices = tiles.candidates("decode", "int8", 128)
    assert [job.tile for job in made if (job.target, job.kv_dtype) == ("cuda 80", "int8")] == [
        *choices,
        None,  # rotate has no tile
    ]
    assert 2 <= len(choices) <= 6  # bounded
    assert {job.target for job in made} == set(compiled.TARGETS)


# Tiles


@pytest.fixture
def codec(tmp_path, monkeypatch) -> KVCodec:
    monkeypatch.setenv("RADIXKV_TILES", str(tmp_path / "a" / "tiles.json"))
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=64)
    return KVCodec(spec, KVConfig(dtype="int8"))


def test_the_fastest_tile_is_kept_on_disk_and_used_from_then_on(codec):
    shipped, *others = tiles.candidates("decode", "int8", 64)
    assert tiles.find_tile("decode", codec, 4, CPU) == shipped
    asked = []

    def measure(tile: Tile) -> float:
        asked.append(tile)
        if tile == shipped:
            raise RuntimeError("out of resources")
        return 2.0 if tile == others[0] else 1.0

    assert tiles.tune("decode", codec, 4, CPU, measure) == others[1]
    assert asked == [shipped, *others]  # each once
    tiles._read_table.cache_clear()  # as a new process
    assert tiles.find_tile("decode", codec, 4, CPU) == others[1]
    assert tiles.find_tile("decode", codec, 2, CPU) == shipped  # another query group
    assert tiles.find_tile("extend", codec, 4, CPU) == tiles.shipped_tile("extend", "int8", 64)
    tiles.tune("extend", codec, 4, CPU, lambda tile: float(tile.num_warps))
    tiles._read_table.cache_clear()
    assert tiles.find_tile("decode", codec, 4, CPU) == others[1]  # entries are added


GOOD = '{"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 2}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"a": 1}',
        '{"a": {"block_m": 1}}',
        "\0",
        '{"a": ' + GOOD,
        *(
            '{"a": ' + GOOD.replace(*change) + "}"
            for change in (
                ("16", "24"), ("16", "0"), ("16", "8"), ("64", "64.0"), ("64", '"64"'),
                ("64", "-64"), ("64", "1048576"), ("4,", "true,"), ("2}", "0}"), ("2}", "NaN}"),
                ("block_n", "block_k"),
            )
        ),
    ],
)  # fmt: skip
def test_a_table_that_is_not_ours_counts_as_empty_and_is_named_once(codec, text, caplog):
    path = tiles.table_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    tiles._read_table.cache_clear()
    for _ in range(2):
        found = tiles.find_tile("decode", codec, 4, CPU)
        assert found == tiles.shipped_tile("decode", "int8", 64)
    (told,) = caplog.messages
    assert told.startswith(f"{path}: cannot be read")


def test_a_table_that_is_not_there_is_nothing_to_tell(codec, caplog):
    tiles._read_table.cache_clear()
    assert tiles.find_tile("decode", codec, 4, CPU) == tiles.shipped_tile("decode", "int8", 64)
    assert not caplog.messages


def test_tuned_tiles_are_kept_in_the_cache_folder(codec, tmp_path, monkeypatch):
    monkeypatch.delenv("RADIXKV_TILES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "own"))
    tiles.tune("decode", codec, 4, CPU, lambda tile: float(tile.num_warps))
    assert [path.parent for path in tmp_path.rglob("*.json")] == [cache_dir()]
    assert tiles.table_path() == tmp_path / "own" / tiles.FILE_NAME
    monkeypatch.delenv("RADIXKV_CACHE_DIR")
    assert tiles.table_path() == tmp_path / "user" / "radixkv" / tiles.FILE_NAME


def test_a_tile_that_was_tuned_for_other_kernels_counts_no_more(codec, monkeypatch):
    shipped, other, *_ = tiles.candidates("decode", "int8", 64)
    assert tiles.tune("decode", codec, 4, CPU, lambda tile: float(tile != other)) == other
    assert tiles.find_tile("decode", codec, 4, CPU) == other
    monkeypatch.setattr(tiles.sources, "digest", lambda: "of other sources")
    assert tiles.find_tile("decode", codec, 4, CPU) == shipped


def test_a_device_that_no_tile_fits_is_named(codec):
    def measure(tile: Tile) -> float:
        raise RuntimeError("out of resources")

    with pytest.raises(RuntimeError, match="no tile of decode runs on cpu"):
        tiles.tune("decode", codec, 4, CPU, measure)


# Decode graphs, with captures that stand in for CUDA's


def decode_batch(num_seqs: int, max_pages: int) -> Batch:
    """Sequences of other ids, positions, lengths, slots and pages than padding has."""
    attention = AttentionBatch(
        slot_mapping=torch.arange(num_seqs) + 100,
        page_table=torch.arange(num_seqs * max_pages, dtype=torch.int32).reshape(num_seqs, -1) + 5,
        seq_lens=torch.arange(num_seqs, dtype=torch.int32) + 30,
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
    )
    ids = torch.arange(num_seqs)[None]
    codec = KVCodec(KVSpec(num_layers=1, num_kv_heads=1, head_dim=8), KVConfig())
    plan = TorchBackend(codec).plan(attention)
    return Batch(ids + 50, ids + 29, torch.arange(num_seqs), plan)


def stand_in(batch: Batch) -> torch.Tensor:
    """A step: what becomes of a sequence depends on all that is given for it, and on no other."""
    attention = batch.attention
    rows = batch.input_ids[0] + 1000 * batch.positions[0] + attention.slot_mapping
    rows = rows + attention.seq_lens + attention.page_table.sum(1)
    return torch.stack([rows.float(), rows.float() / 7], dim=1)


def test_a_bucket_serves_every_batch_that_fits_and_keeps_nothing_of_the_last_one():
    made = []

    def capture(compute):
        (bucket,) = (cell.cell_contents for cell in compute.__closure__ if is_batch(cell))
        assert (bucket.attention.slot_mapping == 0).all()  # of the null page alone
        assert (bucket.attention.page_table == 0).all()
        assert (bucket.input_ids == 50).all()
        out = compute()
        addresses = [id(t) for t in (bucket.input_ids, bucket.positions, bucket.attention)]

        def replay():
            assert addresses == [
                id(t) for t in (bucket.input_ids, bucket.positions, bucket.attention)
            ]
            return out.copy_(compute())  # into the tensor that the capture gave

        made.append(bucket)
        return replay

    run = DecodeGraphs(stand_in, capture).run
    first = run(decode_batch(4, 20))
    want = stand_in(decode_batch(4, 20))
    for num_seqs, max_pages in ((3, 17), (4, 32), (3, 20)):
        batch = decode_batch(num_seqs, max_pages)
        assert torch.equal(run(batch), stand_in(batch))
    assert torch.equal(first, want)  # not the graph's own tensor
    (bucket,) = made
    assert bucket.attention.page_table[3:].count_nonzero() == 0  # padding has no pages
    assert bucket.attention.seq_lens[3] == 1
    assert bucket.input_ids[0, 3] == 50  # a token of the batch
    run(decode_batch(5, 20))
    assert len(made) == 2


def is_batch(cell) -> bool:
    return isinstance(cell.cell_contents, Batch)


def test_a_capture_that_fails_is_logged_once_and_steps_run_without(caplog):
    asked = []

    def capture(compute):
        asked.append(compute)
        if len(asked) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute

    runner = DecodeGraphs(stand_in, capture)
    for num_seqs in (2, 3, 9, 3, 2):
        batch = decode_batch(num_seqs, 20)
        assert torch.equal(runner.run(batch), stand_in(batch))
    assert (len(asked), len(runner)) == (2, 1)  # what was captured is still used
    (said,) = [r.message for r in caplog.records if "could not be captured" in r.message]
    assert "(operation not permitted when stream is capturing); new sizes run without" in said


def test_a_model_that_cannot_be_served_is_not_taken_for_a_failed_capture():
    def capture(compute):
        raise UnsupportedModelError("its attention was changed")

    with pytest.raises(UnsupportedModelError):
        DecodeGraphs(stand_in, capture).run(decode_batch(2, 20))


def test_only_steps_of_one_wanted_token_a_sequence_run_as_graphs():
    assert graphs.is_decode(decode_batch(3, 20))
    assert not graphs.is_decode(decode_batch(graphs.MAX_SEQS + 1, 20))
    two = decode_batch(3, 20)
    assert not graphs.is_decode(Batch(two.input_ids, two.positions, two.logit_rows[:2], two.plan))


# The command line


def test_tuning_without_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernel", "--tune"]) != 0
    assert "--tune: expected a GPU to measure tiles on, found none" in capsys.readouterr().err


def test_the_command_line_times_and_tunes_on_a_gpu(capsys, monkeypatch):
    asked = []
    timing = bench_gpu.GpuTiming(
        "decode", "int8", (8, 32, 8, 128, 8192, 1), 5e-5, 1 << 27, 4e-5, 1e-4
    )
    result = {
        "device": "a GPU",
        "torch": "2",
        "copy_gigabytes_per_s": 4300.0,
        "timings": [asdict(timing), asdict(replace(timing, kernel="copy", sdpa_s=None))],
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_gpu, "bench_gpu", lambda *a, **k: asked.append((a, k)) or result)
    monkeypatch.setattr(bench_gpu, "tune_gpu", lambda *a, **k: asked.append((a, k)) or {"int8": {}})
    assert main(["bench", "kernel", "--kv-dtype", "int8", "--heads", "8", "2", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a GPU, torch 2: a copy moves 4300 GB/s; times in ms"
    assert lines[2].split() == [
        "decode", "int8", "8,", "32,", "8,", "128,", "8192,", "1", "0.0500", "0.0400", "80%",
        "0.1000", "-",
    ]  # fmt: skip
    assert len({len(line) for line in lines[1:-1]}) == 1  # columns stand below each other
    assert json.loads(lines[-1]) == json.loads(json.dumps(result))
    assert main(["bench", "kernel", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "a GPU"
    assert main(["bench", "kernel", "--tune"]) == 0
    assert asked == [
        ((("int8",),), {"heads": (8, 2, 64)}),
        ((bench_gpu.KV_DTYPES,), {"heads": bench_gpu.HEADS}),
        ((bench_gpu.KV_DTYPES,), {"heads": bench_gpu.HEADS}),
    ]
    assert main(["bench", "kernel", "--heads", "8", "3", "64"]) != 0
    assert "--heads: expected query heads that are a multiple" in capsys.readouterr().err
