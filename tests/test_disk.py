"""The cache folder, and files that are whole or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv.disk import cache_dir, write_whole

KILLED = """
import os, sys
from pathlib import Path
from radixkv.disk import write_whole
os.replace = lambda *paths: os._exit(9)  # the power goes while the file is written
write_whole(Path(sys.argv[1]), b"half of it")
"""


def test_the_cache_folder_is_the_users_own(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("RADIXKV_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("RADIXKV_CACHE_DIR")
    assert cache_dir() == tmp_path / "xdg" / "radixkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "radixkv"


def test_a_cache_folder_may_be_named_by_the_home(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RADIXKV_CACHE_DIR", "~/mine")
    assert cache_dir() == tmp_path / "mine"


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "file.json"
    write_whole(file, b"old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False)
    assert done.returncode == 9
    assert file.read_bytes() == b"old"
    assert len(list(file.parent.iterdir())) == 2
    write_whole(file, b"new")
    assert [path.read_bytes() for path in file.parent.iterdir()] == [b"new"]


def test_a_file_that_cannot_be_written_is_as_it_was(monkeypatch: Any, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    write_whole(file, b"old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
