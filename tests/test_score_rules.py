"""Score rules that can't be, and rows that pages can't hold: refused by name on every backend."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import KVConfig, KVSpec, NonFiniteError, PrefixCache
from radixkv.attention.batch import ScoreRule
from radixkv.attention.formats import row_limit
from radixkv.attention.layout import KVCodec
from radixkv.attention.reference import attend_dense, rotate_rows
from radixkv.cache.lease import attention_batch

HERE = Path(__file__).resolve().parent
BACKENDS = ("torch", "cpu")  # and "triton", in a process of its own
HEADS, KV_HEADS, DIM = 4, 2, 16
NAN, INF = math.nan, math.inf

BAD_FIELDS: list[tuple[str, object, type[Exception]]] = [
    ("sliding_window", 0, ValueError),
    ("sliding_window", -1, ValueError),
    ("sliding_window", -(2**70), ValueError),
    ("sliding_window", 2.5, TypeError),
    ("sliding_window", 4.0, TypeError),
    ("sliding_window", True, TypeError),
    ("sliding_window", "4", TypeError),
    ("sliding_window", NAN, TypeError),
    ("softcap", 0.0, ValueError),
    ("softcap", 0, ValueError),
    ("softcap", -1.0, ValueError),
    ("softcap", 1e-60, ValueError),
    ("softcap", 1e60, ValueError),
    ("softcap", NAN, ValueError),
    ("softcap", INF, ValueError),
    ("softcap", True, TypeError),
    ("softcap", "30", TypeError),
    ("softmax_scale", NAN, ValueError),
    ("softmax_scale", INF, ValueError),
    ("softmax_scale", -INF, ValueError),
    ("softmax_scale", 1e300, ValueError),
    ("softmax_scale", 10**400, ValueError),
    ("softmax_scale", "1", TypeError),
    ("softmax_scale", True, TypeError),
    ("softmax_scale", 1j, TypeError),
]
for _name in ("sinks", "alibi_slopes"):
    BAD_FIELDS += [
        (_name, torch.zeros(1), ValueError),
        (_name, torch.zeros(HEADS - 1), ValueError),
        (_name, torch.zeros(HEADS + 1), ValueError),
        (_name, torch.zeros(KV_HEADS), ValueError),
        (_name, torch.zeros(0), ValueError),
        (_name, torch.tensor(1.0), ValueError),
        (_name, torch.zeros(1, HEADS), ValueError),
        (_name, torch.zeros(HEADS, 1), ValueError),
        (_name, torch.zeros(HEADS, dtype=torch.int64), TypeError),
        (_name, torch.zeros(HEADS, dtype=torch.bool), TypeError),
        (_name, torch.zeros(HEADS, dtype=torch.complex64), TypeError),
        (_name, torch.zeros(HEADS, device="meta"), ValueError),
        (_name, torch.tensor([0.0, NAN, 0.0, 0.0]), ValueError),
        (_name, torch.tensor([0.0, 0.0, 0.0, INF]), ValueError),
        (_name, torch.tensor([0.0, 1e300, 0.0, 0.0], dtype=torch.float64), ValueError),
        (_name, [0.0] * HEADS, TypeError),
        (_name, np.zeros(HEADS, np.float32), TypeError),
        (_name, 0.5, TypeError),
    ]
BAD_FIELDS.append(("alibi_slopes", torch.tensor([0.0, -INF, 0.0, 0.0]), ValueError))


def make_cache(backend: str, **kv: object) -> PrefixCache:
    spec = KVSpec(
        num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=kv.pop("model", torch.float32)
    )
    config = KVConfig(page_size=4, capacity="1MiB", **{"dtype": "model", **kv})
    return PrefixCache(spec, config, device="cpu", backend=backend)


def rows(num_tokens: int, heads: int = KV_HEADS, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, heads, DIM, generator=torch.Generator().manual_seed(seed))


def refused(backend: str) -> Iterator[str]:
    """Every rule that can't be, by every way in; yields what was not refused as it should."""
    cache = make_cache(backend)
    with cache.acquire(range(1, 10)) as lease:
        for layer in (0, 1):
            lease.write(layer, rows(9), rows(9, seed=1))
        q = rows(9, HEADS, 2)
        before = lease.attend(0, q)
        with lease.fork() as fork:
            fork.extend([50])
            for layer in (0, 1):
                fork.write(layer, rows(1), rows(1))
            ways = {
                "attend": lambda **rule: lease.attend(0, q, **rule),
                "attend of a fork": lambda **rule: fork.attend(1, q[:1], **rule),
                "attend_batch": lambda **rule: cache.attend_batch(
                    0, torch.cat([q, q[:1]]), [lease, fork], query_lens=[9, 1], **rule
                ),
            }
            for name, value, kind in BAD_FIELDS:
                for way, attend in ways.items():
                    try:
                        attend(**{name: value})
                    except kind as error:
                        if not str(error).startswith(f"{name}: expected") or "got" not in str(
                            error
                        ):
                            yield f"{way} {name}={value!r}: {error}"
                    except Exception as error:
                        yield f"{way} {name}={value!r}: {type(error).__name__} {error}"
                    else:
                        yield f"{way} {name}={value!r}: not refused"
            for way, attend in ways.items():
                try:
                    attend(softcaps=3.0)
                    yield f"{way}: takes a field of no such name"
                except TypeError as error:
                    if "softcaps" not in str(error):
                        yield f"{way}: {error}"
        if not torch.equal(lease.attend(0, q), before):
            yield "what was refused left something behind"
        cache.check()


def served(backend: str) -> Iterator[str]:
    """Rules at the edges of what can be: as float64 has it."""
    cache = make_cache(backend)
    k, v, q = rows(9), rows(9, seed=1), rows(9, HEADS, 2)
    rules: list[dict[str, object]] = [
        {"sliding_window": 1},
        {"sliding_window": 9},
        {"sliding_window": 10},
        {"sliding_window": 2**31},
        {"sliding_window": 2**80},
        {"sliding_window": np.int64(3)},
        {"softcap": 1e-3},
        {"softcap": 1e30},
        *({"softcap": 10.0**n} for n in (-1, 0, 1, 2, 3, 4, 6, 9, 38)),
        {"softcap": 5},
        {"softcap": np.float32(2.5)},
        {"softmax_scale": 0.0},
        {"softmax_scale": -0.5},
        {"softmax_scale": 1},
        {"softmax_scale": 1e-40},
        {"sinks": torch.tensor([1.0, -INF, 1e30, -1e30])},
        {"sinks": torch.ones(HEADS, dtype=torch.float64)},
        {"sinks": torch.ones(HEADS, dtype=torch.bfloat16)},
        {"sinks": torch.ones(HEADS, 2)[:, 0]},
        {"sinks": torch.nn.Parameter(torch.ones(HEADS))},
        {"alibi_slopes": torch.tensor([0.5, -0.5, 0.0, 3.0], dtype=torch.float16)},
        {"alibi_slopes": torch.ones(2 * HEADS)[::2], "sinks": torch.ones(HEADS)},
    ]
    with cache.acquire(range(1, 10)) as lease:
        lease.write(0, k, v)
        for rule in rules:
            got = lease.attend(0, q, **rule)
            scored = ScoreRule(**{"softmax_scale": DIM**-0.5, **rule})
            heads = (t.double().transpose(0, 1) for t in (q, k, v))
            want = attend_dense(*heads, scored).transpose(0, 1)
            error = float((got.double() - want).detach().abs().max())
            if not error < 1e-5 or got.requires_grad:
                yield f"{rule}: off by {error}"


def kept_finite(backend: str) -> Iterator[str]:
    """Rows at the edges of what pages hold: refused, or finite as they are read again."""
    formats = [(d, torch.float32) for d in ("int8", "fp8", "fp8_e5m2", "int4")]
    formats += [("model", d) for d in (torch.float32, torch.float16, torch.bfloat16)]
    edges = (
        6.5e4, 65504.0, 65519.0, 65519.996, 65520.0, 7e4, -7e4, 1e6, 1e36, 1e37, 1.7e38,
        1.70141183e38, 1.7014119e38, 3e38, 3.38e38, 3.3895e38, 3.396e38, 3.397e38, -3.4028e38,
        16384.0, 30000.0, 32768.0, 40000.0,
    )  # fmt: skip
    for dtype, model in formats:
        for rotate in ("none", "hadamard"):
            cache = make_cache(backend, dtype=dtype, model=model, rotate=rotate)
            form = cache.codec.k_format
            turned = rotate == "hadamard"
            for edge in edges:
                near = {form.limit, row_limit(form, turned)} - {INF}
                if near and all(not limit / 8 < abs(edge) < 8 * limit for limit in near):
                    continue
                for whole in (False, True)[: 1 + turned]:
                    for which in ("K", "V"):
                        k, v = rows(3), rows(3, seed=1)
                        bad = k if which == "K" else v
                        bad[1, 1, 3 if not whole else slice(None)] = edge
                        holds = bool((bad.abs() < row_limit(form, turned)).all())
                        if turned and holds:
                            most = float(rotate_rows(bad).abs().max())
                            if abs(most - form.limit) < 1e-4 * form.limit:
                                continue  # another order of the same sum may decide
                            holds = most < form.limit
                        label = f"{dtype} {model} {rotate} {edge} {whole} {which}"
                        with cache.acquire([1, 2, 3]) as lease:
                            try:
                                lease.write(0, k, v)
                            except NonFiniteError as error:
                                if holds:
                                    yield f"{label}: refused: {error}"
                                if f"{which} of layer 0, KV head 1:" not in str(error):
                                    yield f"{label}: {error}"
                                if lease._written[0] or cache.match([1, 2, 3]):
                                    yield f"{label}: counts as written"
                                continue
                            if not holds:
                                yield f"{label}: not refused"
                            pages = cache.layer(0)
                            at = lease.slots()
                            for form_, codes, scale in (
                                (cache.codec.k_format, pages.k_pages, pages.k_scale),
                                (cache.codec.v_format, pages.v_pages, pages.v_scale),
                            ):
                                page, offset = at // 4, at % 4
                                real = form_.dequantize(
                                    codes[page, :, offset], scale[page, :, offset]
                                )
                                if not torch.isfinite(real).all():
                                    yield f"{label}: not finite as stored"


def wider_than_pages(backend: str) -> Iterator[str]:
    """Rows of a wider dtype than the pages, whose numbers it does not hold."""
    for dtype in ("model", "int8"):
        cache = make_cache(backend, dtype=dtype)
        wide = rows(2).double()
        wide[1, 0, 2] = 1e200
        with cache.acquire([1, 2]) as lease:
            try:
                lease.write(0, rows(2), wide)
                yield f"{dtype}: 1e200 not refused"
            except NonFiniteError as error:
                if "V of layer 0, KV head 0" not in str(error):
                    yield str(error)


def wrong_calls(backend: str) -> Iterator[str]:
    """Every other argument of `write`, `attend` and `attend_batch` that can't be."""
    cache, other = make_cache(backend), make_cache(backend)
    with cache.acquire(range(1, 6)) as lease, other.acquire([1]) as foreign:
        k, q = rows(5), rows(5, HEADS)
        foreign.write(0, k[:1], k[:1])
        meta = torch.zeros(5, KV_HEADS, DIM, device="meta")
        calls = [
            ("layer", lambda n: lease.write(n, k, k), (-1, 2, 1.0, True, "0", None)),
            ("layer", lambda n: lease.attend(n, q), (-1, 2, 0.0, False, "0", None)),
            ("k", lambda x: lease.write(0, x, k), (k[:4], k[:, :1], k[..., :8], k[0], k.long(), 3,
                                                   k.numpy(), None, meta, k[None])),
            ("v", lambda x: lease.write(0, k, x), (k[:4], k[:, :1], k[..., :8], k[0], k.bool(), 3,
                                                   k.tolist(), None, meta)),
        ]  # fmt: skip
        after = [
            ("q", lambda x: lease.attend(0, x), (q[:, :3], q[:, :0], q[..., :8], q[0], q.long(), 1,
                                                 None, q.numpy(), q[:0], torch.cat([q, q]),
                                                 torch.zeros_like(q, device="meta"))),
            ("leases", lambda x: cache.attend_batch(0, q[:1], [x]), (foreign, None, 3, cache)),
            ("query_lens", lambda x: cache.attend_batch(0, q, [lease], query_lens=[x]),
             (5.0, True, -5, "5", None)),
            ("q", lambda x: cache.attend_batch(0, q, x[0], query_lens=x[1]),
             (([], None), ([lease], [4]), ([lease], [5, 0]), ([lease, lease], [5, 0]),
              ([lease], [6]), ([lease], []))),
        ]  # fmt: skip
        for step in (calls, after):
            for name, call, values in step:
                for value in values:
                    try:
                        call(value)
                        yield f"{name}={value!r}: taken"
                    except (ValueError, TypeError) as error:
                        if not str(error).startswith(name):
                            yield f"{name}={value!r}: {error}"
                    except Exception as error:
                        yield f"{name}={value!r}: {type(error).__name__} {error}"
            if step is calls:
                lease.write(0, k, k)
        if not torch.isfinite(lease.attend(0, q)).all():
            yield "what was refused left something behind"
        cache.check()


CHECKS = {f.__name__: f for f in (refused, served, kept_finite, wider_than_pages, wrong_calls)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rules_that_cannot_be_are_refused_by_name_before_anything_runs(backend):
    assert list(refused(backend)) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_rules_at_the_edges_are_served_as_float64_has_it(backend):
    assert list(served(backend)) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_refused_exactly_where_they_would_not_be_finite_as_stored(backend):
    assert list(kept_finite(backend)) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_beyond_float32_are_refused(backend):
    assert list(wider_than_pages(backend)) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_other_wrong_argument_is_named(backend):
    assert list(wrong_calls(backend)) == []


@pytest.mark.nightly
def test_the_interpreted_gpu_kernels_refuse_and_serve_the_same():
    """In a process of its own: the interpreter is chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), "triton"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [] for name in CHECKS}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_that_is_called_by_itself_reads_past_no_end(backend):
    cache = make_cache(backend)
    with cache.acquire([1, 2, 3]) as lease:
        lease.write(0, rows(3), rows(3))
        plan = cache.backend.plan(attention_batch(cache.core, [lease], [3]))
        for field in ("sinks", "alibi_slopes"):
            rule = ScoreRule(softmax_scale=1.0, **{field: torch.zeros(HEADS)})
            plan.attend(cache.layer(0), rows(3, HEADS), rule)
            # The rule is of these heads, and another q has others.
            with pytest.raises(ValueError, match=rf"{field}: expected shape \[2\].*got \[4\]"):
                plan.attend(cache.layer(0), rows(3, KV_HEADS), rule)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(["int8", "fp8", "fp8_e5m2", "int4"]),
    rotate=st.sampled_from(["none", "hadamard"]),
    row=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=20, max_size=20
    ),
)
def test_any_row_is_finite_as_stored_or_refused(dtype, rotate, row):
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=20)
    codec = KVCodec(spec, KVConfig(dtype=dtype, rotate=rotate))
    form, real = codec.k_format, torch.tensor(row)[None, None]
    cache = PrefixCache(spec, KVConfig(dtype=dtype, rotate=rotate, capacity="64KiB"), backend="cpu")
    with cache.acquire([1]) as lease:
        if (real.abs() < row_limit(form, codec.rotate_k)).all():
            lease.write(0, real, real)
            pages, (slot,) = cache.layer(0), lease.slots().tolist()
            at = slot // 16, slice(None), slot % 16
            assert torch.isfinite(form.dequantize(pages.k_pages[at], pages.k_scale[at])).all()
        else:
            with pytest.raises(NonFiniteError):
                lease.write(0, real, real)


if __name__ == "__main__":
    print(json.dumps({name: list(check(sys.argv[1])) for name, check in CHECKS.items()}))


def test_dense_attention_refuses_a_rule_of_other_heads() -> None:
    q, k = torch.zeros(HEADS, 2, DIM), torch.zeros(KV_HEADS, 2, DIM)
    rule = ScoreRule(softmax_scale=1.0, sinks=torch.zeros(HEADS + 1))
    with pytest.raises(ValueError, match=rf"sinks: expected shape \[{HEADS}\]"):
        attend_dense(q, k, k, rule)
