"""The Triton kernels where they can run: on a GPU, or in Triton's interpreter on a CPU.

`tests/test_triton.py` runs this folder in a process of its own with TRITON_INTERPRET=1, which
must be set before the kernels are imported. Elsewhere, and without a GPU, it is not collected.
"""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a GPU can run where there is none."""
    if not torch.cuda.is_available():
        needing = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
