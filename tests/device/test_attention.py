"""Triton attention over pages: float64 over the dequantized rows says what is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import reference, triton_backend
from radixkv.attention import get_backend
from radixkv.config import KVConfig
from radixkv.quant import KVCodec, KVFormat, KVSpec, LayerPages, hadamard
from radixkv.reference import AttentionBatch, ScoreRule
from radixkv.triton_backend import SharedRuns, decode_tails, merge, shared_decode

DEVICE = torch.device("cpu" if triton_backend.INTERPRETED else "cuda")
FORMATS = ("int8", "fp8", "fp8_e5m2", "int4", "model")
UNIT = 2.0**-24  # largest relative error of one float32 operation
SPLIT = 64  # small, so that short sequences have several


@pytest.fixture(autouse=True)
def small_splits(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(triton_backend, "SPLIT", SPLIT)
    torch.manual_seed(0)
    yield


class Case:
    """Sequences in poisoned pages in random order, and queries for their last tokens."""

    def __init__(
        self,
        dtype: str = "int8",
        *,
        head_dim: int = 64,
        group: int = 2,
        num_kv_heads: int = 1,
        page_size: int = 16,
        seq_lens: tuple[int, ...] = (40,),
        query_lens: tuple[int, ...] = (1,),
        rotate: str = "auto",
        v_dtype: str | None = None,
        v_head_dim: int | None = None,
        model_dtype: torch.dtype = torch.float32,
        key_size: float = 1.0,
    ) -> None:
        spec = KVSpec(
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=model_dtype,
        )
        config = KVConfig(dtype=dtype, v_dtype=v_dtype, page_size=page_size, rotate=rotate)
        self.codec = KVCodec(spec, config)
        num_pages = [-(-n // page_size) for n in seq_lens]
        self.page_table = torch.zeros(len(seq_lens), max(num_pages) + 2, dtype=torch.int32)
        order = torch.randperm(sum(num_pages)) + 1
        for row, used in zip(self.page_table, order.split(num_pages), strict=True):
            row[: len(used)] = used
        layer = self._poisoned(1 + sum(num_pages))
        for row, seq_len in zip(self.page_table, seq_lens, strict=True):
            position = torch.arange(seq_len)
            slots = row[position // page_size].long() * page_size + position % page_size
            k = key_size * torch.randn(seq_len, num_kv_heads, head_dim)
            v = torch.randn(seq_len, num_kv_heads, spec.v_head_dim)
            reference.write_kv(self.codec, layer, slots, k, v, layer_idx=0)
        self.layer = LayerPages(*(tensor.to(DEVICE) for tensor in layer))
        self.batch = self.make_batch(seq_lens, query_lens)
        self.q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim)
        self.q = self.q.to(model_dtype).to(DEVICE)
        self.rule = ScoreRule(softmax_scale=head_dim**-0.5)

    def _poisoned(self, num_pages: int) -> LayerPages:
        def make(form: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
            shape = (num_pages, self.codec.spec.num_kv_heads, self.codec.config.page_size)
            raw = torch.full((*shape, form.code_width * form.code_dtype.itemsize), form.poison)
            scale = torch.full((*shape, form.num_scales), float("nan"), dtype=torch.bfloat16)
            return raw.to(torch.uint8).view(form.code_dtype), scale

        (k_pages, k_scale), (v_pages, v_scale) = map(
            make, (self.codec.k_format, self.codec.v_format)
        )
        return LayerPages(k_pages, v_pages, k_scale, v_scale)

    def make_batch(self, seq_lens, query_lens, rows=None) -> AttentionBatch:
        table = self.page_table if rows is None else self.page_table[rows]
        return AttentionBatch(
            slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
            page_table=table.to(DEVICE),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE),
        )

    def run(self, q=None, batch=None) -> torch.Tensor:
        return triton_backend.paged_attention(
            self.codec, self.layer, self.q if q is None else q, batch or self.batch, self.rule
        )

    def check(self, got: torch.Tensor | None = None) -> torch.Tensor:
        """Run, and compare with float64 within what the arithmetic can lose.

        A score is a chain of head_dim products (and log2(head_dim) rotation steps): its error
        is at most so many units times |q| |k|. An error of e in all scores moves the output by
        at most 2 e max|v|; the weighted sum adds a unit a token at worst. With half floats each
        element of q, k and p is off by half an epsilon at most.
        """
        out = self.run() if got is None else got
        codec, batch = self.codec, self.batch
        seq_lens, starts = batch.host_lens
        page_size = codec.config.page_size
        rotation = hadamard(codec.spec.head_dim).double()
        turn_back = hadamard(codec.v_format.head_dim).double()
        layer = LayerPages(*(tensor.cpu() for tensor in self.layer))
        half = self.q.dtype != torch.float32
        unit = torch.finfo(self.q.dtype).eps if half else 0.0
        rule = replace(
            self.rule,
            sinks=None if self.rule.sinks is None else self.rule.sinks.cpu(),
            alibi_slopes=None if self.rule.alibi_slopes is None else self.rule.alibi_slopes.cpu(),
        )
        for i, seq_len in enumerate(seq_lens):
            page_ids = batch.page_table[i, : -(-seq_len // page_size)].long().cpu()
            k_form, v_form = codec.k_format, codec.v_format
            k = reference.read_rows(k_form, layer.k_pages, layer.k_scale, page_ids)
            v = reference.read_rows(v_form, layer.v_pages, layer.v_scale, page_ids)
            k, v = k[:, :seq_len].double(), v[:, :seq_len].double()
            q = self.q[starts[i] : starts[i + 1]].double().cpu()
            if not q.shape[0]:
                continue
            turned = q @ rotation if codec.rotate_k else q
            want = reference.attend_dense(turned.transpose(0, 1), k, v, rule).transpose(0, 1)
            want = want @ turn_back if codec.rotate_v else want
            operations = codec.spec.head_dim + 32
            largest = q.norm(dim=-1).max() * k.norm(dim=-1).max() * rule.softmax_scale
            if rule.alibi_slopes is not None:
                largest += rule.alibi_slopes.abs().max() * seq_len
            score_error = (operations * UNIT + unit) * largest
            v_norm = v.norm(dim=-1).max() if codec.rotate_v else v.abs().max()
            bound = v_norm * (2 * score_error + (seq_len + 64) * UNIT + unit)
            bound += want.abs().max() * unit
            error = (out[starts[i] : starts[i + 1]].double().cpu() - want).abs().max()
            assert error <= bound, f"sequence {i}: error {error:.2e} over the bound {bound:.2e}"
        return out


def launches(case: Case) -> dict[str, int]:
    before = triton_backend.runs.copy()
    case.check()
    return dict(triton_backend.runs - before)


MIXED = dict(seq_lens=(1, 15, 16, 17, 130, 1, 33), query_lens=(1, 1, 1, 1, 1, 1, 20))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_decode_and_extend_equal_float64_for_every_format_and_head_dim(dtype, head_dim):
    case = Case(dtype, head_dim=head_dim, group=3, **MIXED)
    assert launches(case) == {"decode": 1, "merge": 1, "extend": 1}
