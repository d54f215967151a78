"""The Triton kernels where they can run: on a GPU, or in Triton's interpreter on a CPU.

`tests/test_triton.py` runs this folder in a process of its own with TRITON_INTERPRET=1, which
must be set before the kernels are imported. Elsewhere, and without a GPU, it is not collected.
"""

from __future__ import annotations

import os

import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
