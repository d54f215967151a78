"""The faults of the second collection that kernels, cache and snapshots had: the right values."""

from __future__ import annotations

import pytest
import torch

from radixkv import KVConfig, KVSpec, NonFiniteError, PrefixCache

SPEC = KVSpec(num_layers=1, num_kv_heads=2, head_dim=16)
BACKENDS = ("torch", "cpu")


def make_lease(backend: str, spec: KVSpec = SPEC):
    cache = PrefixCache(
        spec, KVConfig(dtype="model", page_size=4, capacity="1MiB"), backend=backend
    )
    return cache, cache.acquire([1, 2, 3])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", ["sinks", "alibi_slopes"])
def test_k1_sinks_and_slopes_of_a_wrong_length_are_refused(backend, field):
    _, lease = make_lease(backend)
    with lease:
        lease.write(0, *torch.randn(2, 3, 2, 16))
        with pytest.raises(ValueError, match=rf"{field}: expected shape \[4\].*got \[1\]"):
            lease.attend(0, torch.randn(3, 4, 16), **{field: torch.zeros(1)})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("field", "value"), [("sliding_window", 0), ("sliding_window", -1), ("softcap", 0.0)]
)
def test_k2_rules_that_cannot_be_are_refused(backend, field, value):
    _, lease = make_lease(backend)
    with lease:
        lease.write(0, *torch.randn(2, 3, 2, 16))
        with pytest.raises(ValueError, match=rf"{field}: expected .*, got {value}"):
            lease.attend(0, torch.randn(3, 4, 16), **{field: value})


@pytest.mark.parametrize("backend", BACKENDS)
def test_k3_rows_that_float16_pages_cannot_hold_are_refused(backend):
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    cache, lease = make_lease(backend, spec)
    with lease:
        with pytest.raises(NonFiniteError, match=r"K of layer 0, KV head 0, 1: .*float16"):
            lease.write(0, torch.full((3, 2, 16), 7e4), torch.zeros(3, 2, 16))
        lease.commit()
    assert cache.match([1, 2, 3]) == 0
