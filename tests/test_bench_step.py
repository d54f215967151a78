"""Where a step's time goes: the parts are all there, and the sum of them is the step."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.bench.step import profile_step


def test_the_parts_of_a_step_add_up_to_it(tiny_model: Any) -> None:
    found = profile_step(tiny_model("llama"), batch=2, length=20, repeats=1)
    parts = [found[name] for name in ("programs", "attention", "write", "rest")]
    assert min(parts) >= 0
    assert found["attention"] > 0
    assert found["write"] > 0
    assert sum(parts) == pytest.approx(found["step"])
    assert found["share_outside_products"] == 1 - found["products"] / found["step"]
