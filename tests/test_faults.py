"""Anything may fail at any call: that request fails, the rest goes on, nothing leaks."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuzz.faults import Harness, require_idle
from fuzz.soak import STEPS, Soak
from fuzz.tiny import make_model
from radixkv import Engine, KVConfig
from radixkv.engine.scheduler import Scheduler


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Harness().ready() as harness:
        yield harness
    torch.set_num_threads(before)


def test_the_loads_reach_every_point_and_preempt(harness: Harness) -> None:
    named = {name for name, _, _ in harness.places} | {
        "kernel: write_kv",
        "kernel: attend",
        "kernel: prepare",
        "kernel: prepared layer",
        "callback: logits processor",
        "callback: listener",
    }
    assert named == {name for name, calls in harness.calls.items() if calls}
    assert len(harness.all_points()) >= 2000
    assert harness.preemptions > 0


def test_a_fault_at_any_call_is_one_requests_own(harness: Harness) -> None:
    """A fair sample of what `python -m fuzz.faults` runs in full."""
    points = random.Random(0).sample(harness.all_points(), 150)
    raised = sum(len(harness.run(*point)) for point in points)
    assert raised >= 150


def test_the_harness_sees_a_leak(harness: Harness, monkeypatch: Any) -> None:
    remove = Scheduler.remove

    def forget(self: Scheduler, seq: Any, *, commit: int = 0, keep_lease: bool = False) -> Any:
        lease = remove(self, seq, commit=commit, keep_lease=True)
        if lease is not None and not keep_lease and commit:
            lease.release()  # but not the lease of one that failed
        return lease if keep_lease else None

    load = harness.loads["prompts"]
    held: list[Any] = []

    def keep(self: Scheduler, seq: Any, **how: Any) -> Any:
        held.append(seq.lease)
        return forget(self, seq, **how)

    monkeypatch.setattr(Scheduler, "remove", keep)
    engine = harness.engines["prompts"]
    engine.cache.clear()
    raised = harness.faults.raised
    harness.faults.arm()
    # The batch's draw, and that of one of its requests: that one fails, with pages.
    harness.faults.decide = lambda name, _: name == "sampler: sample" and len(raised) < 2
    load.run(engine)
    assert len(raised) == 2
    with pytest.raises(AssertionError, match="a lease that nobody released"):
        require_idle(engine)
    for lease in held:
        if lease is not None:
            lease.release()
    require_idle(engine)


def test_no_thread_left_fails_the_call_and_not_the_engine(monkeypatch: Any) -> None:
    config = KVConfig(page_size=4, capacity="256KiB")
    with Engine(make_model(), kv=config, backend="torch") as engine:

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with engine.open([5, 6, 7]) as branch:
                for call in (
                    lambda: engine.generate([5, 6, 7], max_new_tokens=2),
                    lambda: branch.generate(max_new_tokens=2),
                    lambda: branch.fork(2),
                ):
                    with pytest.raises(RuntimeError, match="new thread"):
                        call()
        assert engine.generate([5, 6, 7], max_new_tokens=2).samples[0].token_ids
        require_idle(engine)


def test_a_soak_of_one_engine(one_thread: None) -> None:
    """`python -m fuzz.soak --minutes 60` in small; docs/log/hardening.md has its figures."""
    figures = Soak(seed=1).run(math.inf, most_engines=1)
    assert figures["checks"] >= STEPS
    assert figures["compared requests"] >= 10
