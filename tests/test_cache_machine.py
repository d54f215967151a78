"""The cache against its brute-force model; the same machine that fuzz/ runs for hours."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from fuzz.driver import run_bytes, run_seed
from fuzz.machine import CacheMachine


def test_20000_seeded_steps_equal_the_model() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        compared = sum(run_seed(seed, 60) for seed in range(250))
    finally:
        torch.set_num_threads(threads)
    assert compared >= 20_000


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


def test_bytes_that_a_fuzzer_would_mutate_are_operations() -> None:
    for data in (b"", b"\x00", bytes(range(256)), b"\xff" * 64, bytes(range(255, 0, -1)) * 3):
        run_bytes(data)
