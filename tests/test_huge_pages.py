"""Weights in huge pages: the same bytes at the same addresses, or left alone."""

import mmap
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from radixkv.models import huge_pages
from radixkv.models.huge_pages import SIZE, use_huge_pages

COUNT = 3 * SIZE  # int32 elements: twelve megabytes, not aligned to anything


def bytes_in_huge_pages(tensor: torch.Tensor) -> int:
    """Of the mappings that hold ``tensor``."""
    found = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        place = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if place:
            start, stop = (int(end, 16) for end in place.groups())
            inside = start < tensor.data_ptr() + tensor.nbytes and stop > tensor.data_ptr()
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.fixture
def numbers(tmp_path):
    """A file of numbers that are all different."""
    file = tmp_path / "numbers"
    torch.arange(COUNT, dtype=torch.int32).numpy().tofile(file)
    return file


def mapped(file: Path, *, shared: bool) -> torch.Tensor:
    return torch.from_file(str(file), shared=shared, size=COUNT, dtype=torch.int32)


def test_a_mapped_file_keeps_its_address_and_every_byte(numbers):
    tensor = mapped(numbers, shared=False)
    address, part = tensor.data_ptr(), tensor[100 : COUNT - 100]
    moved = use_huge_pages([part[: COUNT // 2], part[COUNT // 2 :]])
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.arange(COUNT, dtype=torch.int32))
    if moved:  # what this system grants
        assert moved % SIZE == 0
        assert moved >= tensor.nbytes - 3 * SIZE
    tensor += 1  # as private as before
    assert torch.equal(mapped(numbers, shared=False), torch.arange(COUNT, dtype=torch.int32))


def test_where_the_system_grants_them_they_are_huge(numbers):
    tensor, plain = mapped(numbers, shared=False), torch.zeros(COUNT, dtype=torch.int32)
    moved = use_huge_pages([tensor, plain])
    assert bytes_in_huge_pages(tensor) + bytes_in_huge_pages(plain) >= moved * 9 // 10
    assert not plain.any()


def test_memory_that_others_share_is_left_alone(numbers):
    shared = mapped(numbers, shared=True)
    assert use_huge_pages([shared]) == 0
    shared[0] = 7
    assert mapped(numbers, shared=False)[0] == 7  # what is written still reaches the file


def test_it_can_be_switched_off_and_asks_for_room(numbers, monkeypatch):
    tensor = mapped(numbers, shared=False)
    with monkeypatch.context() as patch:
        patch.setenv(huge_pages.SWITCH, "0")
        assert use_huge_pages([tensor]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(huge_pages, "_available", lambda: tensor.nbytes)
        assert use_huge_pages([tensor]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert use_huge_pages([tensor]) == 0
    assert bytes_in_huge_pages(tensor) == 0


def test_other_mappings_may_have_any_name(numbers, tmp_path):
    moved = use_huge_pages([mapped(numbers, shared=False)])
    odd = tmp_path / os.fsdecode(b"\xff\xfe \xe2\x80\xa8\x0c\r.bin")
    with odd.open("wb+") as file:
        file.write(b"x" * 4096)
        file.flush()
        with mmap.mmap(file.fileno(), 4096):
            assert use_huge_pages([mapped(numbers, shared=False)]) == moved


def test_what_cannot_be_looked_at_stays_as_it_is(numbers, monkeypatch):
    def barred() -> None:
        raise PermissionError(13, "/proc")

    monkeypatch.setattr(huge_pages, "_mappings", barred)
    assert use_huge_pages([mapped(numbers, shared=False)]) == 0


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(huge_pages, "_LIMITS", ((limit, used),))
    free = huge_pages._available()
    assert free > 1 << 20  # there are no such files
    used.write_text("4096\n")
    limit.write_text("max\n")
    assert huge_pages._available() > 1 << 20
    limit.write_text("1052672\n")
    assert huge_pages._available() == 1 << 20


def test_what_the_system_refuses_stays_as_it_was(numbers, monkeypatch):
    tensor = mapped(numbers, shared=False)

    def refuse(succeeded: bool) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(huge_pages, "_check", refuse)
    assert use_huge_pages([tensor]) == 0
    assert torch.equal(tensor, torch.arange(COUNT, dtype=torch.int32))


def test_nothing_is_asked_of_no_tensors():
    assert use_huge_pages([]) == 0
    assert use_huge_pages([torch.empty(0), torch.zeros(4)]) == 0
