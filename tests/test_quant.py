"""Formats of rows: bounds that follow from each, int4's search, centred K, attention over them."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import KVConfig, KVSpec, PrefixCache
from radixkv.attention.formats import (
    INT4_SEARCH,
    Int4Format,
    KVFormat,
    int4_group_size,
    make_format,
)
from radixkv.attention.layout import KVCodec
from radixkv.attention.reference import read_rows
from radixkv.engine.engine import Engine
from radixkv.models.batch import Run, build_batch
from radixkv.models.runner import ModelRunner
from radixkv.tools import demo
from radixkv.tools.quality import measure_quality
from radixkv_kernels.cpu import formats

QUANTIZED = ("int8", "fp8", "fp8_e5m2", "int4")
HEAD_DIMS = (64, 80, 96, 112, 128, 256)


def stored(form: KVFormat, rows: torch.Tensor) -> torch.Tensor:
    return form.dequantize(*form.quantize(rows))


# bounds


@settings(max_examples=200)
@given(
    name=st.sampled_from(QUANTIZED),
    head_dim=st.sampled_from((2, 10, 20, 34, 64)),
    data=st.data(),
)
def test_no_finite_row_is_stored_further_away_than_its_format_says(name, head_dim, data):
    value = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60)
    alike = st.sampled_from((0.0, 0.37, -0.37, 1e-8, 65504.0, 6e-8, 1.0, -1.0))
    row = data.draw(
        st.lists(st.one_of(value, alike), min_size=head_dim, max_size=head_dim), label="row"
    )
    rows = torch.tensor([row])
    form = make_format(name, head_dim, torch.float32)
    got = stored(form, rows)
    error = (got.double() - rows.double()).abs()
    assert (error <= form.error_bound(rows).double()).all()
    assert (error.norm(dim=-1) <= form.norm_bound(rows).double() * (1 + 1e-6)).all()
    assert got[rows == 0].count_nonzero() == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("name", "reached"), [("int8", 0.95), ("fp8", 0.9), ("fp8_e5m2", 0.85)])
def test_bounds_are_reached(name, reached, head_dim):
    """A bound that nothing comes near would prove nothing."""
    rows = torch.randn(2000, head_dim, generator=torch.Generator().manual_seed(head_dim))
    form = make_format(name, head_dim, torch.float32)
    assert ((stored(form, rows) - rows).abs() / form.error_bound(rows)).max() > reached
    off = (stored(form, rows) - rows).norm(dim=-1) / form.norm_bound(rows)
    assert 0.4 < off.max() < 1


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unquantized_rows_are_exact_or_rounded_once(model_dtype):
    rows = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    form = make_format("model", 20, model_dtype)
    assert torch.equal(stored(form, rows.to(model_dtype).float()), rows.to(model_dtype).float())
    assert ((stored(form, rows) - rows).abs() <= form.error_bound(rows)).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_hard_rows_have_finite_scales_and_exact_zeros(name):
    """QNT-3: zero, constant, tiny, subnormal and huge rows beside normal ones."""
    form = make_format(name, 64, torch.float32)
    normal = torch.randn(64, generator=torch.Generator().manual_seed(0))
    one_tiny, half_zero = torch.zeros(64), normal.clone()
    one_tiny[5], half_zero[32:] = 1e-8, 0.0
    hard = [torch.zeros(64), torch.full((64,), 0.37), one_tiny, half_zero]
    hard += [torch.full((64,), 65504.0), torch.full((64,), 6e-8), torch.full((64,), 1e-45)]
    rows = torch.stack([normal, *hard, normal])
    codes, scales = form.quantize(rows)
    assert scales.isfinite().all()
    assert (scales.float().abs() > 0).all()
    got = form.dequantize(codes, scales)
    assert got.isfinite().all()
    assert got[rows == 0].count_nonzero() == 0
    assert ((got - rows).abs() <= form.error_bound(rows)).all()
    assert torch.equal(got[0], stored(form, normal[None])[0])
    assert torch.equal(got[-1], got[0])


# int4


def test_int4_groups_are_the_largest_even_divisor_up_to_32():
    for head_dim in range(2, 1025, 2):
        size = max(n for n in range(2, 33, 2) if head_dim % n == 0)
        assert int4_group_size(head_dim) == size == formats.int4_group_size(head_dim)
    assert INT4_SEARCH == formats.INT4_SEARCH


@settings(max_examples=100)
@given(
    head_dim=st.sampled_from((8, 20, 28, 64)),
    seed=st.integers(0, 2**32 - 1),
    tail=st.sampled_from((0.0, 1.0, 3.0)),
)
def test_int4_takes_the_scale_that_leaves_least_error(head_dim, seed, tail):
    """Oracle: every candidate of every group in float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, head_dim, generator=generator)
    rows *= torch.rand(3, head_dim, generator=generator) ** -tail  # outliers
    form = Int4Format(head_dim)
    codes, scales = form.quantize(rows)
    got = form.dequantize(codes, scales).unflatten(-1, (-1, form.group_size)).double()
    groups = rows.unflatten(-1, (-1, form.group_size)).double()
    x = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
    losses = []
    for share in INT4_SEARCH:
        scale = (-x.sign() * x.abs().float() * (share / 7.5)).bfloat16().double()
        off = (groups / scale).round().clamp(-8, 7) * scale - groups
        losses.append(off.square().sum(dim=-1))
    least = torch.stack(losses).amin(dim=0)
    loss = (got - groups).square().sum(dim=-1)
    assert torch.allclose(loss, least, rtol=1e-4)
    # The side of the largest element has the eighth code.
    assert torch.equal(scales.float().sign(), -x.squeeze(-1).sign().float())


def test_the_search_takes_a_tenth_off_int4s_error(monkeypatch):
    rows = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    form = Int4Format(64)
    searched = (stored(form, rows) - rows).norm(dim=-1)
    monkeypatch.setattr("radixkv.attention.formats.INT4_SEARCH", (1.0,))
    plain = (stored(form, rows) - rows).norm(dim=-1)
    assert searched.mean() < 0.9 * plain.mean()
    assert (plain < form.norm_bound(rows)).all()
    assert plain.max() > 0.5 * form.norm_bound(rows).mean()


# capacity


@pytest.mark.parametrize(("name", "times"), [("int8", 1.94), ("fp8", 1.94), ("int4", 3.5)])
def test_pages_hold_so_many_times_the_tokens_of_bfloat16(name, times):
    spec = KVSpec(num_layers=1, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    plain = KVCodec(spec, KVConfig(dtype="model")).bytes_per_token
    assert plain / KVCodec(spec, KVConfig(dtype=name)).bytes_per_token >= times


def test_used_pages_are_full_on_the_demos_load():
    """Five questions with answers, samples and beams after one document, by token counts."""
    config = KVConfig(page_size=demo.PAGE_SIZE, capacity="4MiB")
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8)
    cache = PrefixCache(spec, config, backend="torch")
    fresh = iter(range(10_000, 100_000))

    def put(prefix: list[int], num_new: int) -> list[int]:
        ids = [*prefix, *(next(fresh) for _ in range(num_new))]
        with cache.acquire(ids) as lease:
            lease.mark_written()
            lease.commit()
        return ids

    document = list(range(1484))
    for num_new in (29, 28, 28, 27, 30):
        put(document, num_new)
    prompt = put(document, 13)
    for num_new in (20, 25, 28, 29, 30, 30, 31, 31, *[31] * demo.BEAM_WIDTH):
        put(prompt, num_new)
    assert cache.stats().utilization >= 0.96


# attention over pages against float64 over the rows themselves


@settings(max_examples=60)
@given(
    name=st.sampled_from((*QUANTIZED, "model")),
    head_dim=st.sampled_from(HEAD_DIMS),
    group=st.sampled_from((1, 3, 4, 7, 8, 24)),
    page_size=st.sampled_from((1, 2, 4, 16, 64, 128)),
    around=st.sampled_from((None, -1, 0, 1, 1000)),
    rotate=st.sampled_from(("none", "hadamard")),
    data=st.data(),
)
def test_attention_is_within_the_formats_bounds_of_float64(
    check_bounds, name, head_dim, group, page_size, around, rotate, data
):
    seq_len = 1 if around is None else 1000 if around == 1000 else max(1, page_size + around)
    check_bounds(
        name,
        backend="torch",
        head_dim=head_dim,
        group=group,
        page_size=page_size,
        seq_len=seq_len,
        query_len=data.draw(st.sampled_from((1, min(seq_len, 5)))),
        rotate=rotate,
    )


@pytest.mark.parametrize("rotate", ["none", "hadamard"])
@pytest.mark.parametrize(
    ("name", "head_dim"),
    [(name, dim) for name in ("int8", "int4") for dim in (64, 80, 256)]
    + [(name, 80) for name in ("fp8", "fp8_e5m2")]
    # Each size of a head is compiled by itself.
    + [
        pytest.param(n, d, marks=pytest.mark.nightly)
        for n in ("int8", "int4")
        for d in (96, 112, 128)
    ]
    + [pytest.param(name, 128, marks=pytest.mark.nightly) for name in ("fp8", "fp8_e5m2")],
)
def test_compiled_attention_is_within_the_formats_bounds_of_float64(
    check_bounds, name, head_dim, rotate
):
    shape = {"head_dim": head_dim, "group": 3, "page_size": 16, "rotate": rotate}
    for seq_len, query_len in ((1, 1), (17, 1), (600, 1), (17, 5), (600, 40)):
        lengths = {"seq_len": seq_len, "query_len": query_len}
        check_bounds(name, backend="cpu", **shape, **lengths)


# outliers: rotated away, centred away, warned of


@pytest.fixture(scope="module")
def outlier_model(tiny_model):
    """One K channel of every head offset by +100 before RoPE, as the biases of some models do."""

    def make(channel: int):
        fields = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = tiny_model("qwen2", fresh=True, seed=3, **fields)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 0.1
            layer.self_attn.k_proj.bias.data[channel] += 100.0
        return model

    return make


@pytest.mark.parametrize("channel", [3, 20, 31])  # RoPE turns these fast, slowly, hardly at all
def test_an_offset_k_channel_costs_int8_with_rotation_nothing(outlier_model, channel, monkeypatch):
    ids = torch.randint(3, 1000, (201,), generator=torch.Generator().manual_seed(5)).tolist()
    model = outlier_model(channel)

    def measure():
        return measure_quality(
            model, ids, num_tokens=200, context=100, formats=("int8",), backend="torch"
        ).formats

    plain, rotated = (row.kl_mean for row in measure())
    assert rotated < 1e-2
    # A mean that RoPE leaves is taken off; what it turns is for the rotation.
    if channel == 31:
        monkeypatch.setattr(ModelRunner, "k_center", torch.zeros(2, 1, 64))
        assert measure()[0].kl_mean > 5 * plain
    else:
        assert plain > 2 * rotated


def test_a_format_that_outliers_hurt_is_warned_of(outlier_model, tiny_model, tmp_path):
    outlier_model(3).save_pretrained(tmp_path / "outliers")
    tiny_model().save_pretrained(tmp_path / "plain")
    unrotated = KVConfig(dtype="int8", rotate="none", capacity="1MiB")

    def load(name: str, kv: KVConfig) -> None:
        Engine.from_pretrained(tmp_path / name, kv=kv, backend="torch").close()

    with pytest.warns(UserWarning, match=r'K of layer \d has outliers .*; use rotate="auto"'):
        load("outliers", unrotated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("outliers", replace(unrotated, rotate="auto"))
        load("outliers", replace(unrotated, dtype="model"))
        load("plain", unrotated)


# K less its mean


def test_what_is_stored_is_k_less_its_mean_and_attention_does_not_feel_it(tiny_model):
    runner = ModelRunner.load(tiny_model())
    assert runner.k_center.shape == (2, 2, 16)
    assert runner.k_center.abs().max() > 0
    ids = list(range(5, 45))
    logits, keys = {}, {}
    for center in (runner.k_center, torch.zeros(2, 2, 16)):
        runner.k_center = center
        config = KVConfig(dtype="int8", capacity="1MiB", rotate="none")
        cache = PrefixCache(runner.spec, config, backend="torch")
        with cache.acquire(ids) as lease:
            run = Run(lease, ids, 0, 40, 0, 0)
            logits[center] = runner.forward(build_batch([run], runner.device), cache)
            layer = cache.layer(0)
            pages = torch.as_tensor(lease.page_ids)
            rows = read_rows(cache.codec.k_format, layer.k_pages, layer.k_scale, pages)
            keys[center] = rows[:, :40]
    (center, moved), (_, plain) = keys.items()
    assert (plain - center[0][:, None] - moved).abs().max() < 0.02 * plain.abs().max()
    with_center, without = logits.values()
    assert (with_center - without).abs().max() < 0.05 * (without.max() - without.min())


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_softmax_that_would_feel_it_keeps_its_k(tiny_model, name):
    """Soft caps and sinks are no longer the same when a constant joins every score."""
    runner = ModelRunner.load(tiny_model(name))
    assert runner.k_center.count_nonzero() == 0


def test_the_mean_is_the_same_at_every_load_and_survives_broken_rows(tiny_model):
    model = tiny_model(fresh=True)
    first = ModelRunner.load(model).k_center.clone()
    assert torch.equal(ModelRunner.load(model).k_center, first)
    with torch.no_grad():
        model.get_input_embeddings().weight[7 + 13 * 100 - 1000] = float("nan")
    runner = ModelRunner.load(model)
    assert runner.k_center.isfinite().all()
    assert runner.k_center.count_nonzero() > 0


# forks and cuts of quantized sequences


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_reordered_and_cut_beams_read_their_own_history(name):
    """QNT-5: beams that swap parents twice, over whole pages and a tail, then are cut back.

    Oracle: each beam's history written alone, by the same quantizer; equal in every bit.
    """
    spec = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16)
    config = KVConfig(dtype=name, page_size=4, capacity="1MiB")
    cache, alone = (PrefixCache(spec, config, backend="torch") for _ in range(2))
    before = replace(config)

    def rows_of(ids):
        """K and V of a token follow from the tokens up to it."""
        seeds = [hash(tuple(ids[: i + 1])) % 2**31 for i in range(len(ids))]
        return torch.stack(
            [torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(s)) for s in seeds]
        )

    def write(lease, ids, start):
        rows = rows_of(ids)[start:]
        for layer in range(2):
            lease.write(layer, rows[:, 0] + layer, rows[:, 1] - layer)

    def attend(lease, ids):
        q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(len(ids)))
        return torch.cat([lease.attend(layer, q) for layer in range(2)])

    prompt = list(range(10, 10 + 3 * 4 + 2))
    root = cache.acquire(prompt)
    write(root, prompt, 0)
    beams = [(root, prompt), *((root.fork(), prompt) for _ in range(2))]
    for step, parents in enumerate(([0, 1, 2], [2, 0, 0], [0, 1, 2], [2, 0, 0])):
        old = beams
        beams = [(old[parent][0].fork(), old[parent][1]) for parent in parents]
        for lease, _ in old:
            lease.release()
        for number, (lease, ids) in enumerate(beams):
            grown = [*ids, 100 * step + number]
            lease.extend(grown[-1:])
            write(lease, grown, len(ids))
            beams[number] = (lease, grown)
        cache.check()
    assert len({tuple(ids) for _, ids in beams}) == 3
    for cut in (None, 15, 9):  # inside the tail, inside whole pages
        for number, (lease, ids) in enumerate(beams):
            if cut is not None:
                ids = [*ids[:cut], 900 + number]
                lease.truncate(cut)
                lease.extend(ids[-1:])
                write(lease, ids, cut)
            with alone.acquire(ids) as other:
                write(other, ids, other.num_cached)
                assert torch.equal(attend(lease, ids), attend(other, ids))
    for lease, _ in beams:
        lease.release()
    cache.check()
    assert cache.stats().pages_free + cache.stats().pages_cached == cache.stats().pages_total
    assert cache.config == before
