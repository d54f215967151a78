"""Move tensors that are read again and again into huge pages, where they lie.

A decode step reads every weight once. With pages of 4 KiB the processor walks its page tables
for each of them; with pages of 2 MiB it reads a third faster here (docs/log/end-to-end.md). Only
Linux, and only as far as the system allows (`transparent_hugepage`: "always" or "madvise").
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIZE = 2 << 20  # of a huge page; where it is another, the system refuses or does less
SWITCH = "RADIXKV_HUGE_PAGES"
_CHUNK = 8 * SIZE  # that a thread copies at once: so much more memory is held for a moment
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    (_GROUP / "memory.max", _GROUP / "memory.current"),
    (_GROUP / "memory/memory.limit_in_bytes", _GROUP / "memory/memory.usage_in_bytes"),
)
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_READ_WRITE, _PRIVATE_ANONYMOUS, _MOVE_TO = 3, 0x22, 3
_FAILED = ctypes.c_void_p(-1).value

logger = logging.getLogger("radixkv")


class _Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    stop: int
    is_private: bool
    is_file: bool


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Put the memory of ``tensors`` into huge pages; their addresses and contents stay.

    Memory that is a private mapping of a file (safetensors) becomes a copy of it, page by page:
    it is held once, but no longer shared with the file cache. Other threads may read meanwhile,
    not write.

    Returns:
        bytes that were moved or asked for; 0 if the system has no such pages, if it is short of
        memory, or with RADIXKV_HUGE_PAGES=0.
    """
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0" or not _are_allowed():
        return 0
    try:
        return _move_all([(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.is_cpu])
    except (OSError, ValueError, RuntimeError) as error:  # no /proc, no thread: it stays as it is
        logger.debug("huge pages: %s", error)
        return 0


def _move_all(places: list[tuple[int, int]]) -> int:
    stretches = [
        (mapping, -(-start // SIZE) * SIZE, stop // SIZE * SIZE)
        for mapping, start, stop in _within(places, _mappings())
        if mapping.is_private
    ]
    needed = sum(max(0, stop - start) for _, start, stop in stretches)
    if 2 * needed > _available():
        logger.debug("huge pages: %d bytes would not leave enough memory", needed)
        return 0
    work = [
        (mapping.is_file, begin, min(begin + _CHUNK, stop))
        for mapping, start, stop in stretches
        for begin in range(start, stop, _CHUNK)
    ]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return sum(pool.map(_move, work))


def _move(piece: tuple[bool, int, int]) -> int:
    """Bytes that were moved: all of a piece, or, if the system refuses, none."""
    is_file, start, stop = piece
    try:
        (_replace if is_file else _collapse)(start, stop)
    except OSError as error:
        logger.debug("huge pages: %s", error)
        return 0
    return stop - start


def _are_allowed() -> bool:
    try:
        return "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def _available() -> int:
    """Bytes that this process may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
            break
    else:
        return 0
    for limit, used in _LIMITS:  # a container's
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # another version of the interface, or "max"
            continue
    return free


def _mappings() -> list[_Mapping]:
    found = []
    for line in Path("/proc/self/maps").read_bytes().split(b"\n")[:-1]:  # any file name
        place, rights, _, _, inode = line.split()[:5]
        start, stop = (int(end, 16) for end in place.split(b"-"))
        found.append(_Mapping(start, stop, rights == b"rw-p", inode != b"0"))
    return found


def _within(
    places: list[tuple[int, int]], mappings: list[_Mapping]
) -> Iterator[tuple[_Mapping, int, int]]:
    """Of each mapping, the stretch from the first to the last of ``places`` in it."""
    for mapping in mappings:
        mine = [p for p in places if p[0] < mapping.stop and p[1] > mapping.start]
        if mine:
            start = max(mapping.start, min(start for start, _ in mine))
            yield mapping, start, min(mapping.stop, max(stop for _, stop in mine))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    libc.mremap.argtypes = [address, size, size, number, address]
    libc.madvise.argtypes = [address, size, number]
    libc.munmap.argtypes = [address, size]
    libc.mmap.restype = libc.mremap.restype = address
    return libc


def _check(succeeded: bool) -> None:
    if not succeeded:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _collapse(start: int, stop: int) -> None:
    """Ask for huge pages from now on, and for what is there."""
    libc = _libc()
    _check(libc.madvise(start, stop - start, _MADV_HUGEPAGE) == 0)
    _check(libc.madvise(start, stop - start, _MADV_COLLAPSE) == 0)


def _replace(start: int, stop: int) -> None:
    """Put huge pages with the same contents in the place of a file's pages.

    The system swaps them under one lock: who reads meanwhile waits, and reads the same.
    """
    libc, size = _libc(), stop - start
    whole = size + SIZE  # so that an aligned part of it is that large
    memory = libc.mmap(None, whole, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    _check(memory != _FAILED)
    copy = -(-memory // SIZE) * SIZE
    try:
        _check(libc.madvise(copy, size, _MADV_HUGEPAGE) == 0)
        ctypes.memmove(copy, start, size)
        _check(libc.mremap(copy, size, size, _MOVE_TO, start) == start)
    except OSError:
        libc.munmap(memory, whole)
        raise
    libc.munmap(memory, copy - memory)
    libc.munmap(copy + size, memory + whole - copy - size)
