"""What is said of the processor, from files as several kinds of machines write them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import machine

INTEL = """processor\t: 0
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu vme amx_bf16
power management:

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
ARM = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd bf16\nCPU part\t: 0xd4f\n"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: Any) -> Iterator[Any]:
    """Put a text in the place of what the system says of its processors; None: no such file."""

    def put(text: str | None) -> None:
        file = tmp_path / "cpuinfo"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(machine, "_CPU_INFO", file)
        machine._cpu_fields.cache_clear()

    yield put
    machine._cpu_fields.cache_clear()


def test_the_first_processor_is_named_with_its_features(says: Any) -> None:
    says(INTEL)
    assert machine.processor_name() == "Intel(R) Xeon(R) Processor"
    assert machine.processor_parts() == [
        "model name: Intel(R) Xeon(R) Processor",
        "flags: fpu vme amx_bf16",
    ]
    assert machine.cpu_has_bfloat16()


def test_arm_has_other_names_for_the_same(says: Any) -> None:
    says(ARM)
    assert machine.processor_parts() == ["Features: fp asimd bf16", "CPU part: 0xd4f"]
    assert machine.cpu_has_bfloat16()
    assert machine.processor_name() == (platform.processor() or platform.machine())


@pytest.mark.parametrize("text", [None, "", "flags\t: fpu avx512f\n"])
def test_a_processor_that_is_not_said_to_have_bfloat16_has_none(says: Any, text: Any) -> None:
    says(text)
    assert not machine.cpu_has_bfloat16()
    assert machine.processor_name()
    assert machine.processor_parts()


def test_memory_and_processors_are_counted() -> None:
    assert machine.num_cpus() >= 1
    assert 0 < machine.free_memory_bytes() <= machine.total_memory_bytes()
