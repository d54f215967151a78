"""Where files are kept from run to run, and how one is written: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from platformdirs import user_cache_dir

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NEW_FILE |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_LEFT_S = 86400.0  # without locks: what was not written to for so long has no writer


def cache_dir() -> Path:
    """The folder of all that is kept from run to run; it need not exist yet.

    ``RADIXKV_CACHE_DIR`` if set, else ``radixkv`` where this system keeps a user's caches: on
    Linux in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    own = os.environ.get("RADIXKV_CACHE_DIR")
    # Where there is no home, platformdirs leaves a "~" in the path: expanding it again says so.
    return Path(own or user_cache_dir("radixkv", appauthor=False)).expanduser().absolute()


def write_whole(path: Path, content: bytes) -> None:
    """Make ``content`` that of a file, as `replacing` does it; makes the file's folder.

    Raises:
        OSError: it could not be written; what was there is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file that takes the place of ``path`` in one step when the block has ended well.

    Written beside it, flushed to the disk, renamed, and the folder flushed where the system has
    a way to. If the block or the disk fails, ``path`` is as it was; what a killed process left
    beside it is removed by the next writer (on Windows a day later).

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    _remove_leftovers(target)
    while True:
        beside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.saving")
        number = os.open(beside, _NEW_FILE, 0o666)
        if fcntl is None:
            break
        fcntl.flock(number, fcntl.LOCK_EX)  # says that its writer lives
        if os.fstat(number).st_nlink:
            break
        os.close(number)  # taken for a leftover before it was locked
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(number)
            if fcntl is not None:
                beside.replace(target)
        if fcntl is None:  # an open file has no other name there
            beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_leftovers(target: Path) -> None:
    """Remove unfinished files beside ``target`` whose writers are gone."""
    begin = f".{target.name}."
    for path in list(target.parent.iterdir()):
        if not (path.name.startswith(begin) and path.name.endswith(".saving")):
            continue
        if fcntl is None:
            with contextlib.suppress(OSError):  # gone in the meantime, or open
                if time.time() - path.stat().st_mtime > _LEFT_S:
                    path.unlink()
            continue
        try:
            number = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except OSError:  # gone in the meantime, or another user's
            continue
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:  # being written
            pass
        finally:
            os.close(number)
