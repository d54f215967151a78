"""The processor and the memory that this process runs on.

The one reader of ``/proc/cpuinfo``: it takes a tenth of a millisecond, where py-cpuinfo takes a
second and starts several programs, and an engine asks while it loads.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

_CPU_INFO = "/proc/cpuinfo"
_FEATURES = ("flags", "Features")  # what x86 and Arm call them
_PARTS = ("model name", *_FEATURES, "CPU part")
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


@cache
def _cpu_fields() -> dict[str, str]:
    """What Linux says of the first processor, by the names that it uses; elsewhere nothing."""
    try:
        with Path(_CPU_INFO).open(encoding="utf-8") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return {}
    parts = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in parts}


def processor_name() -> str:
    """Name the processor: its model, or where the system does not say that, its architecture."""
    name = _cpu_fields().get("model name")
    return name or platform.processor() or platform.machine()


def processor_parts() -> list[str]:
    """What tells this processor from others that would compute in another way: name, features."""
    parts = [f"{name}: {value}" for name, value in _cpu_fields().items() if name in _PARTS]
    return parts or [platform.processor()]


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself (AVX-512 BF16 or AMX on x86, BF16 on Arm)."""
    fields = _cpu_fields()
    return any(_BFLOAT16 & set(fields.get(name, "").split()) for name in _FEATURES)


def num_cpus() -> int:
    """Processors that the system has, each thread of a core counted."""
    return os.cpu_count() or 1


def free_memory_bytes() -> int:
    """Bytes of memory that can be taken now without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def total_memory_bytes() -> int:
    """Bytes of memory that the machine has."""
    import psutil

    return int(psutil.virtual_memory().total)
