"""The cache against its brute-force model; the same machine that fuzz/ runs for hours."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from fuzz.driver import run_bytes, run_seed
from fuzz.machine import CacheMachine


@pytest.mark.parametrize("seeds", [60, pytest.param(250, marks=pytest.mark.nightly)])
def test_seeded_steps_equal_the_model(seeds: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        compared = sum(run_seed(seed, 60) for seed in range(seeds))
    finally:
        torch.set_num_threads(threads)
    assert compared >= 80 * seeds


def test_state_machine_equals_the_model() -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_guided_fuzzer_finds_nothing_in_a_short_run(tmp_path: Path) -> None:
    """As far as its wheels go; the seed corpus is replayed everywhere (tests/test_cache.py)."""
    here = (sys.version_info[:2], sys.platform, platform.machine())
    if here != ((3, 11), "linux", "x86_64"):
        assert importlib.util.find_spec("atheris") is None, "it runs here too: say so"
        return
    root = Path(__file__).parent.parent
    shutil.copytree(root / "fuzz" / "corpus", tmp_path / "corpus")
    # No limit: a child begins with the peak of the process that it was forked from.
    options = ["-runs=300", "-seed=1", "-rss_limit_mb=0"]
    command = [sys.executable, "-m", "fuzz.guided", "corpus", *options]
    env = {**os.environ, "PYTHONPATH": str(root), "RADIXKV_POISON": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done 300" in done.stderr
    found = re.findall(r"cov: (\d+)", done.stderr)
    assert int(found[-1]) > 500, "the fuzzer does not see the code that it runs"


def test_bytes_that_a_fuzzer_would_mutate_are_operations() -> None:
    for data in (b"", b"\x00", bytes(range(256)), b"\xff" * 64, bytes(range(255, 0, -1)) * 3):
        run_bytes(data)
