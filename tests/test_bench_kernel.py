"""`radixkv bench kernel` gives no figure for a wrong result, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from radixkv.attention.cpu import CpuBackend, CpuPlan
from radixkv.bench import kernel as bench_kernel
from radixkv.bench.kernel import PagedLoad, require_close, time_decode, time_shared, time_write

FORMATS = ("int8", "fp8", "fp8_e5m2", "int4", "model")
HEADS = (6, 2, 128)  # as tests/test_quant.py has them: these kernels are compiled for it, too
SHAPE = (1, *HEADS, 2048)  # of 128 pages
TREE = ((1, 1024), (3, 64))


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """Each call once: what is asked here is whether it comes to that."""
    monkeypatch.setattr(bench_kernel, "_medians", lambda calls, repeats: [1.0 for _ in calls])
    monkeypatch.setattr(bench_kernel, "EXTEND_QUERIES", 8)


def zeros(attend: Callable[..., Any], *call: Any) -> torch.Tensor:
    return torch.zeros_like(attend(*call))


def negated(attend: Callable[..., Any], *call: Any) -> torch.Tensor:
    return -attend(*call)


def heads_swapped(attend: Callable[..., Any], *call: Any) -> torch.Tensor:
    out = attend(*call).clone()
    out[:, :2] = out[:, :2].flip(1)
    return out


def last_token_wrong(attend: Callable[..., Any], *call: Any) -> torch.Tensor:
    out = attend(*call).clone()
    out[-1, -1] = out[-1, 0]
    return out


def one_element_wrong(attend: Callable[..., Any], *call: Any) -> torch.Tensor:
    out = attend(*call).clone()
    out[0, 0, 5] = float("nan")
    return out


def means_of_v(attend: Callable[..., Any], codec: Any, layer: Any, q: Any, *rest: Any) -> Any:
    return attend(codec, layer, q * 0, *rest)


def one_wrong_page(
    attend: Callable[..., Any], codec: Any, layer: Any, q: Any, batch: Any, rule: Any
) -> Any:
    table = batch.page_table.clone()
    table[-1, 3] = table[-1, 7]
    wrong = replace(batch, page_table=table, runs=())
    return attend(codec, layer, q, wrong, rule)


def scales_ignored(which: str) -> Callable[..., Any]:
    def broken(attend: Callable[..., Any], codec: Any, layer: Any, *rest: Any) -> Any:
        scale = torch.ones_like(getattr(layer, which))
        return attend(codec, layer._replace(**{which: scale}), *rest)

    return broken


def without_a_factor(attend: Callable[..., Any], *call: Any) -> Any:
    return attend(*call[:-1], replace(call[-1], softmax_scale=call[-1].softmax_scale * 0.9))


FAULTS = {
    "zeros": zeros,
    "negated": negated,
    "heads swapped": heads_swapped,
    "last token": last_token_wrong,
    "one element": one_element_wrong,
    "means of V": means_of_v,
    "one wrong page": one_wrong_page,
    "K scales ignored": scales_ignored("k_scale"),
    "V scales ignored": scales_ignored("v_scale"),
    "another softmax scale": without_a_factor,
}


def breaking(monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any]) -> None:
    """From here on every backend of a load attends so."""
    own = CpuPlan.attend

    def attend(plan: CpuPlan, *call: Any) -> torch.Tensor:
        def again(codec: Any, layer: Any, q: Any, batch: Any, rule: Any) -> torch.Tensor:
            return own(CpuBackend(codec).plan(batch), layer, q, rule)

        layer, q, rule = call
        return broken(again, plan.backend.codec, layer, q, plan.batch, rule)

    monkeypatch.setattr(CpuPlan, "attend", attend)


def runs(kv_dtype: str) -> list[Callable[[], object]]:
    return [
        lambda: time_decode(kv_dtype, SHAPE),
        lambda: bench_kernel.time_extend(kv_dtype, SHAPE),
        lambda: time_shared(kv_dtype, TREE),
        lambda: time_write(kv_dtype, SHAPE),
    ]


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_right_results_are_timed(kv_dtype, monkeypatch):
    monkeypatch.setattr(bench_kernel, "SHARED_HEADS", HEADS)
    for run in runs(kv_dtype):
        run()


@pytest.mark.parametrize(
    ("fault", "kv_dtype"),
    # Unquantized pages have no scales.
    [(f, d) for f in FAULTS for d in FORMATS if d != "model" or "scales" not in f],
)
def test_wrong_results_are_not_timed(fault, kv_dtype, monkeypatch):
    monkeypatch.setattr(bench_kernel, "SHARED_HEADS", HEADS)
    breaking(monkeypatch, FAULTS[fault])
    for run in runs(kv_dtype)[:3]:
        with pytest.raises(ArithmeticError, match="not timed"):
            run()


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_rows_that_are_written_wrong_are_not_timed(kv_dtype, monkeypatch):
    own = PagedLoad.write

    def shifted(self: PagedLoad, seq: int) -> None:
        self.slots[seq] = self.slots[seq].roll(1)
        own(self, seq)
        self.slots[seq] = self.slots[seq].roll(-1)

    def scaled(self: PagedLoad, seq: int) -> None:
        own(self, seq)
        form = self.codec.v_format
        (self.layer.v_scale if form.num_scales else self.layer.v_pages).mul_(2)

    for wrong in (shifted, scaled, lambda self, seq: None):
        monkeypatch.setattr(PagedLoad, "write", wrong)
        with pytest.raises(ArithmeticError, match=r"write: .* not timed"):
            time_write(kv_dtype, (1, *HEADS, 50))


def test_close_is_close_for_the_size_of_what_is_compared_with():
    """What attention gives is far smaller than 1: a fixed bound would allow anything."""
    load = PagedLoad("int8", (1, 2, 1, 64, 16))
    want = torch.randn(3, 2, 64) * 1e-3
    for got in (torch.zeros_like(want), -want, want.flip(1), want * 1.2, want + 1e-3):
        with pytest.raises(ArithmeticError, match=r"decode: result is .* from torch's"):
            require_close("decode", load, got, want)
    with pytest.raises(ArithmeticError, match="shape"):
        require_close("decode", load, want[:2], want)
    require_close("decode", load, want * 1.01, want)
