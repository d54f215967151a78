"""What reading shared pages together saves on this machine: measured once, kept on disk.

One small JSON file in `radixkv.disk.cache_dir`, at most `MAX_ENTRIES` entries,
replaced in one rename. A file that cannot be read, or is not what was written, is measured anew.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from radixkv.disk import cache_dir, write_whole

FILE_NAME = "sharing-costs.json"
VERSION = 1  # of the file; raise it when what the numbers mean changes
MAX_ENTRIES = 64

logger = logging.getLogger("radixkv")
_known: dict[str, SharingCost] = {}
_guard = threading.Lock()


@dataclass(frozen=True)
class SharingCost:
    """Times of one kernel on one device.

    For a stretch of pages (the kernel says how long), one KV head and ``n`` queries, reading it
    once saves ``saved_s * n - fixed_s``; a step that shares anything costs ``step_s`` more.
    """

    saved_s: float
    fixed_s: float
    step_s: float

    def gain_s(self, num_queries: int) -> float:
        """Seconds saved on one stretch and KV head; below 0, sharing loses."""
        return self.saved_s * num_queries - self.fixed_s

    @classmethod
    def fit(cls, few: tuple[int, float], many: tuple[int, float], step_s: float) -> SharingCost:
        """The line through two measurements: (queries, seconds saved) each."""
        saved_s = (many[1] - few[1]) / (many[0] - few[0])
        return cls(saved_s, saved_s * few[0] - few[1], step_s)


def sharing_cost(key: str, measure: Callable[[], SharingCost]) -> SharingCost:
    """The cost known under ``key``, from memory, from disk, or by measuring it now.

    Args:
        key: names the device, the kernel and its build.
    """
    with _guard:
        if key not in _known:
            entries = _read()
            if key not in entries:
                entries[key] = measure()
                _write(entries)
            _known[key] = entries[key]
        return _known[key]


def path() -> Path:
    """The file that keeps what was measured; it need not exist."""
    return cache_dir() / FILE_NAME


def _read() -> dict[str, SharingCost]:
    try:
        content = json.loads(path().read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            return {}
        entries = {str(key): SharingCost(**entry) for key, entry in content["entries"].items()}
        for entry in entries.values():
            if not all(isinstance(n, float) and math.isfinite(n) for n in asdict(entry).values()):
                return {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s: cannot be read (%s); measuring again", path(), error)
        return {}
    return entries


def _write(entries: dict[str, SharingCost]) -> None:
    newest = dict(list(entries.items())[-MAX_ENTRIES:])
    content = {"version": VERSION, "entries": {k: asdict(v) for k, v in newest.items()}}
    try:
        write_whole(path(), json.dumps(content, indent=1).encode())
    except OSError as error:  # a read-only home: measured once a process, then
        logger.warning("%s: cannot be written (%s); measured for this process only", path(), error)


__all__ = ["FILE_NAME", "MAX_ENTRIES", "VERSION", "SharingCost", "path", "sharing_cost"]
