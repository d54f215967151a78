"""Compiled kernels on disk: what they are named by, where they lie, what spoils them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import types

from radixkv.disk import cache_dir
from radixkv_kernels import compile_cache

ROOT = Path(__file__).resolve().parent.parent

SIGNATURE = types.void(types.CPointer(types.int64))

GATE = """
import numpy as np
from numba import types
from radixkv_kernels.cpu import linear
from radixkv_kernels.compile_cache import compile_callback

def gate(x, up):
    linear._gate_row(16, x, up)

kernel = compile_callback(types.void(types.int64, types.int64))(gate)
x, up = np.arange(16, dtype=np.float32), np.ones(16, dtype=np.float32)
kernel.ctypes(x.ctypes.data, up.ctypes.data)
print(kernel.cache_hits, x[1:4].tolist())
"""

SQUARE = """
import numpy as np
from radixkv_kernels import compile_cache
from numba import types

def make(k):
    def square(pointer):
        pointer[0] = pointer[0] * pointer[0] + k
    return compile_cache.compile_callback(types.void(types.CPointer(types.int64)))(square)

values = []
hits = 0
for k in (1, 2):
    square = make(k)
    x = np.array([5])
    square.ctypes(x.ctypes.data_as(square.ctypes.argtypes[0]))
    values.append(int(x[0]))
    hits += square.cache_hits
print(hits, values)
"""


@pytest.fixture
def kernels(tmp_path):
    """A copy of the kernels that a new process imports instead of ours."""
    folder = tmp_path / "path" / "radixkv_kernels"
    shutil.copytree(ROOT / "kernels", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def environment(kernels: Path, **changes: str) -> dict[str, str]:
    names = ("NUMBA_CACHE_DIR", "RADIXKV_CACHE_DIR", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"PYTHONPATH": str(kernels.parent), "OMP_NUM_THREADS": "1"} | changes


def run(kernels: Path, code: str, **changes: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(kernels, **changes),
        cwd=kernels.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_kernel_is_compiled_anew_when_a_helper_in_another_file_changes(kernels):
    first = run(kernels, GATE)
    assert first.startswith("0 ")
    assert run(kernels, GATE) == first.replace("0 ", "1 ", 1)
    file = kernels / "cpu" / "simd.py"
    source = file.read_text()
    changed = source.replace("_EXP_TERMS = (0.49999994,", "_EXP_TERMS = (0.75,")
    assert changed != source
    file.write_text(changed)
    second = run(kernels, GATE)
    assert second.startswith("0 ")
    assert second[2:] != first[2:]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Folders of the test's own for kernels that are compiled in this process."""
    for name in ("RADIXKV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(compile_cache.config, "CACHE_DIR", "")
    monkeypatch.setattr(compile_cache.sources, "FOLDER", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    compile_cache._folder.cache_clear()
    yield tmp_path
    compile_cache._folder.cache_clear()


def squares(*added: int) -> tuple[int, list[int]]:
    """Kernels found on disk, and 25 + each number as they compute it."""
    hits, values = 0, []
    for k in added:

        def make(k):
            def square(pointer):
                pointer[0] = pointer[0] * pointer[0] + k

            return compile_cache.compile_callback(SIGNATURE)(square)

        kernel, number = make(k), np.array([5])
        kernel.ctypes(number.ctypes.data_as(kernel.ctypes.argtypes[0]))
        values.append(int(number[0]))
        hits += kernel.cache_hits
    return hits, values


def test_what_a_helper_closes_over_names_the_kernels_that_it_is_part_of(places):
    def raised(k: int) -> tuple[int, int]:
        add = compile_cache.compile_helper(lambda number: number + k)

        def raise_it(pointer):
            pointer[0] = add(pointer[0])

        kernel, number = compile_cache.compile_callback(SIGNATURE)(raise_it), np.array([5])
        kernel.ctypes(number.ctypes.data_as(kernel.ctypes.argtypes[0]))
        return kernel.cache_hits, int(number[0])

    assert [raised(k) for k in (1, 2, 1, 2)] == [(0, 6), (0, 7), (1, 6), (1, 7)]


def test_a_compiler_leaves_the_garbage_collector_as_it_was(places):
    was_enabled = gc.isenabled()
    try:
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            squares(100 + enabled)
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("radixkv-*/*.kernel"))


def test_what_a_kernel_closes_over_names_it(places):
    assert squares(1, 2) == (0, [26, 27])
    assert squares(1, 2) == (2, [26, 27])
    assert squares(2, 3) == (1, [27, 28])


def test_kernels_are_kept_where_the_environment_says(places, monkeypatch):
    """Beside the sources by itself; our variable goes before that, and Numba's before ours."""
    assert squares(1) == (0, [26])
    assert len(kept(places / "package" / "__pycache__")) == 1
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(places / "own"))
    assert squares(1) == (0, [26])
    assert len(kept(cache_dir() / "kernels")) == 1
    monkeypatch.setattr(compile_cache.config, "CACHE_DIR", str(places / "numba"))
    assert squares(1) == (0, [26])
    assert len(kept(places / "numba")) == 1


def test_kernels_of_a_folder_that_cannot_be_written_are_kept_in_the_users_cache(places):
    (places / "package").write_text("a file, so that no folder can be in it")
    assert squares(1, 2) == (0, [26, 27])
    assert len(kept(cache_dir() / "kernels")) == 2
    assert squares(1, 2) == (2, [26, 27])


def test_kernels_run_where_no_folder_can_be_written(places, caplog):
    (places / "package").write_text("")
    (places / "user").write_text("")
    assert squares(1, 2) == (0, [26, 27])
    assert squares(1, 2) == (0, [26, 27])
    (told,) = caplog.messages
    assert told.startswith("kernels: no folder to keep them in")


def test_kernels_run_where_there_are_no_sources_to_name_them_by(places, monkeypatch, caplog):
    monkeypatch.setattr(compile_cache, "build", lambda: "")
    assert squares(1) == (0, [26])
    assert squares(1) == (0, [26])
    assert "no source files" in caplog.text
    assert not kept(places / "package" / "__pycache__")


def test_kernels_run_where_the_disk_becomes_full(places, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    compile_cache.folder()
    monkeypatch.setattr(compile_cache.tempfile, "mkstemp", full)
    assert squares(1) == (0, [26])
    assert "cannot be written" in caplog.text


def test_a_damaged_file_is_compiled_anew_and_said(places, caplog):
    squares(1, 2)
    cut, turned = kept(places / "package" / "__pycache__")
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(turned.read_bytes())
    content[len(content) // 2] ^= 1
    turned.write_bytes(content)
    assert squares(1, 2) == (0, [26, 27])
    assert sorted(caplog.messages) == [f"{f}: is damaged; compiled anew" for f in (cut, turned)]
    assert squares(1, 2) == (2, [26, 27])


def test_kernels_of_sources_long_gone_are_removed(places):
    base = places / "package" / "__pycache__"
    old = [base / f"radixkv-{i}" for i in range(6)]
    for i, folder in enumerate(old):
        folder.mkdir(parents=True)
        (folder / "a.kernel").write_text("")
        os.utime(folder, (1000 + i, 1000 + i))
    (base / "others").mkdir()
    squares(1)
    left = set(base.iterdir())
    assert len(left) == 5
    assert left > {*old[3:], base / "others"}


def test_a_build_is_another_for_another_processor_version_or_setting(monkeypatch):
    seen = set()

    def look() -> None:
        compile_cache.build.cache_clear()
        seen.add(compile_cache.build())

    with monkeypatch.context() as patch:
        look()
        patch.setattr(compile_cache.numba, "__version__", "0")
        look()
        patch.setattr(compile_cache.config, "OPT", 0)
        look()
        patch.setattr(compile_cache.llvmlite.binding, "get_host_cpu_name", lambda: "other")
        look()
        patch.setattr(compile_cache.sources, "digest", lambda: "other")
        look()
    compile_cache.build.cache_clear()
    assert len(seen) == 5


def test_processes_that_compile_at_once_each_get_their_own_kernels(kernels, tmp_path):
    """Numba numbers its files: two processes may take one number for two kernels."""
    given = environment(kernels, RADIXKV_CACHE_DIR=str(tmp_path))
    codes = [SQUARE.replace("(1, 2)", f"({k}, {k + 1})") for k in (1, 2, 3)]
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=given, stdout=subprocess.PIPE, text=True)
        for code in codes
    ]
    answers = [process.communicate()[0].strip() for process in started]
    assert [answer[2:] for answer in answers] == [f"[{25 + k}, {26 + k}]" for k in (1, 2, 3)]
    every = SQUARE.replace("(1, 2)", "(1, 2, 3, 4)")
    assert run(kernels, every, RADIXKV_CACHE_DIR=str(tmp_path)) == "4 [26, 27, 28, 29]"


def test_every_compiled_kernel_is_kept_by_our_cache_alone():
    """Numba's own ``cache=True`` looks at one file."""
    for file in (ROOT / "kernels").rglob("*.py"):
        assert "cache=True" not in file.read_text(encoding="utf-8"), file


def test_the_digest_names_every_file_by_place_and_content(tmp_path):
    from radixkv_kernels.sources import digest, digest_of

    (tmp_path / "deep").mkdir()
    (tmp_path / "a.py").write_text("x = 1")
    seen = {digest_of(tmp_path)}
    (tmp_path / "deep" / "b.py").write_text("y = 1")
    seen.add(digest_of(tmp_path))
    (tmp_path / "deep" / "b.py").rename(tmp_path / "b.py")
    seen.add(digest_of(tmp_path))
    (tmp_path / "b.py").write_text("y = 2")
    seen.add(digest_of(tmp_path))
    assert len(seen) == 4
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "b.py").write_text("z")
    (tmp_path / "notes.txt").write_text("z")
    assert digest_of(tmp_path) in seen
    assert digest_of(tmp_path / "none") == ""
    assert digest_of(ROOT / "kernels") == digest()
