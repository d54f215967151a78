"""What the kernels are made of: one digest of their sources, for whatever is kept from run to run.

A compiled kernel holds functions of several files, and a measurement depends on all of them: what
is kept on disk is named by all, so that a change in any of them is never overlooked.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def digest_of(*folders: Path) -> str:
    """A digest of every source file below the folders, names included: 32 hexadecimal digits.

    Empty if there are none (an archive that Python imports from): nothing can be named by it.

    Complexity: reads them all.
    """
    total, found = hashlib.sha256(), False
    for folder in folders:
        # Of a distribution without sources, the files that are imported in their place.
        files = (f for f in folder.rglob("*") if f.suffix in (".py", ".pyc"))
        for file in sorted(f for f in files if "__pycache__" not in f.parts):
            content = file.read_bytes()
            total.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode())
            total.update(content)
            found = True
    return total.hexdigest()[:32] if found else ""


@cache
def digest() -> str:
    """That of the kernels; read once a process, when the first of them is imported."""
    return digest_of(FOLDER)


digest()
