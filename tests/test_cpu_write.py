"""The compiled write: the reference's codes and scales, nothing written when it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import reference
from radixkv.attention.cpu import CpuBackend
from radixkv.attention.formats import KVFormat
from radixkv.attention.layout import KVCodec, KVSpec, LayerPages
from radixkv.config import KVConfig
from radixkv.errors import NonFiniteError
from radixkv_kernels.cpu import launch

QUANTIZED = ("int8", "fp8", "fp8_e5m2", "int4")
NUM_PAGES = 5


def make_codec(kv_dtype: str, head_dim: int, *, rotate: str = "none", **fields) -> KVCodec:
    page_size = fields.pop("page_size", 4)
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, **fields)
    return KVCodec(spec, KVConfig(dtype=kv_dtype, page_size=page_size, rotate=rotate))


def poisoned(codec: KVCodec, num_pages: int = NUM_PAGES) -> LayerPages:
    """Fresh pages full of codes that are never written and of NaN scales."""

    def make(form: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (num_pages, codec.spec.num_kv_heads, codec.config.page_size)
        raw = torch.full((*shape, form.code_width * form.code_dtype.itemsize), form.poison)
        pages = raw.to(torch.uint8).view(form.code_dtype)
        return pages, torch.full((*shape, form.num_scales), float("nan"), dtype=torch.bfloat16)

    (k_pages, k_scale), (v_pages, v_scale) = make(codec.k_format), make(codec.v_format)
    return LayerPages(k_pages, v_pages, k_scale, v_scale)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bytes(one: LayerPages, other: LayerPages) -> None:
    for name, a, b in zip(LayerPages._fields, one, other, strict=True):
        assert torch.equal(raw_bytes(a), raw_bytes(b)), name


def write_both(codec: KVCodec, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    expected, got = poisoned(codec), poisoned(codec)
    before = launch.runs["write"]
    reference.write_kv(codec, expected, slots, k, v, layer_idx=0)
    CpuBackend(codec).write_kv(got, slots, k, v, layer_idx=0)
    assert launch.runs["write"] == before + 1
    return expected, got


@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_codes_and_scales_are_the_references_bit_for_bit(dtype, head_dim):
    codec = make_codec(dtype, head_dim)
    generator = torch.Generator().manual_seed(head_dim)
    k, v = torch.randn(2, 11, 2, head_dim, generator=generator)
    k = k * 10 ** torch.linspace(-12, 12, 11)[:, None, None]  # rows of every size
    slots = torch.randperm(NUM_PAGES * 4, generator=generator)[:11]
    assert_same_bytes(*write_both(codec, slots, k, v))


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_model_pages_hold_the_rows_in_the_models_own_dtype(model_dtype):
    codec = make_codec("model", 20, dtype=model_dtype)
    k, v = torch.randn(2, 7, 2, 20).to(model_dtype)
    assert_same_bytes(*write_both(codec, torch.arange(7), k, v))


@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(QUANTIZED),
    row=st.lists(
        st.floats(
            width=32,
            allow_nan=False,
            allow_infinity=False,
            min_value=-(2.0**100),
            max_value=2.0**100,
        ),
        min_size=20,
        max_size=20,
    ),
)
def test_any_finite_row_is_coded_as_the_reference_does(dtype, row):
    codec = make_codec(dtype, 20)
    rows = torch.tensor(row).expand(1, 2, 20)
    assert_same_bytes(*write_both(codec, torch.tensor([3]), rows, -rows))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_zero_constant_tiny_and_huge_rows_stay_finite_and_leave_neighbours_alone(dtype):
    codec = make_codec(dtype, 64, page_size=8)
    normal = torch.randn(64)
    one_tiny = torch.zeros(64)
    one_tiny[5] = 1e-8
    huge = torch.full((64,), 65504.0) * normal.sign()
    subnormal = torch.full((64,), 6e-8)
    rows = [torch.zeros(64), torch.full((64,), 0.37), one_tiny, huge, subnormal, normal]
    rows = torch.stack(rows)[:, None].expand(6, 2, 64)
    expected, got = write_both(codec, torch.arange(8, 14), rows, rows)
    assert_same_bytes(expected, got)
    form = codec.k_format
    real = reference.read_rows(form, got.k_pages, got.k_scale, torch.tensor([1]))[0, :6]
    assert torch.isfinite(real).all()
    assert (got.k_scale[1, :, :6].float().abs() < float("inf")).all()
    assert torch.equal(real[0], torch.zeros(64))
    step = {"int8": 0.37 / 127, "fp8": 0.37 / 16, "fp8_e5m2": 0.37 / 8, "int4": 0.37 / 15}[dtype]
    assert (real[1] - 0.37).abs().max() <= step
    relative = {"int8": 1 / 250, "fp8": 1 / 16, "fp8_e5m2": 1 / 8, "int4": 1 / 14}[dtype]
    span = normal.max() - normal.min()
    assert (real[5] - normal).abs().max() <= relative * span


@pytest.mark.parametrize("head_dim", [8, 20, 33, 64, 80, 96, 128, 256])
def test_the_rotation_is_the_hadamard_matrix(head_dim):
    # Unquantized and rotated: what is stored shows the rotation itself.
    codec = make_codec("model", head_dim, rotate="hadamard")
    k, v = torch.randn(2, 5, 2, head_dim)
    expected, got = write_both(codec, torch.arange(5), k, v)
    size = (head_dim & -head_dim).bit_length()
    bound = 2 * (size + 1) * 2.0**-24 * k.norm(dim=-1).max()
    real = got.k_pages.flatten(0, 0)[torch.arange(5) // 4, :, torch.arange(5) % 4]
    want = expected.k_pages[torch.arange(5) // 4, :, torch.arange(5) % 4]
    assert (real - want).abs().max() <= bound * size


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_rotated_rows_are_within_one_code_of_the_reference(dtype):
    codec = make_codec(dtype, 128, rotate="hadamard")
    k, v = torch.randn(2, 20, 2, 128)
    expected, got = write_both(codec, torch.arange(20), k, v)

    def codes(pages):
        raw = pages.view(torch.uint8).int()
        if dtype == "int4":
            return torch.cat([raw & 15, raw >> 4], -1)
        if dtype == "int8":
            return pages.int()
        return torch.where(raw >= 128, 128 - raw, raw)  # floats of one sign sort as their bits

    for a, b in ((expected.k_pages, got.k_pages), (expected.v_pages, got.v_pages)):
        difference = (codes(a) - codes(b)).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 1e-2
    for a, b in ((expected.k_scale, got.k_scale), (expected.v_scale, got.v_scale)):
        assert ((a.float() - b.float()).abs() <= 2.0**-7 * a.float().abs()).all()


@pytest.mark.parametrize("backend", [reference.TorchBackend, CpuBackend])
@pytest.mark.parametrize("rotate", ["none", "hadamard"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "model"])
def test_k_less_its_center_is_what_taking_it_off_first_gives_bit_for_bit(dtype, rotate, backend):
    codec = make_codec(dtype, 64, rotate=rotate)
    write = backend(codec).write_kv
    k, v = torch.randn(2, 2, 70, 64, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    center = torch.linspace(-30, 30, 128).view(2, 64)
    slots = torch.arange(70)
    expected, got = poisoned(codec, 18), poisoned(codec, 18)
    write(expected, slots, k - center, v, layer_idx=0)
    write(got, slots, k, v, layer_idx=0, k_center=center)
    assert_same_bytes(expected, got)


def test_k_that_overflows_less_its_center_is_refused_and_nothing_is_written():
    codec = make_codec("int8", 64)
    k, v = torch.zeros(2, 3, 2, 64)
    k[2, 1, 5] = 3e38
    center = torch.zeros(2, 64)
    center[1, 5] = -3e38
    pages = poisoned(codec)
    with pytest.raises(NonFiniteError, match="K of layer 4, KV head 1:"):
        CpuBackend(codec).write_kv(pages, torch.arange(3), k, v, layer_idx=4, k_center=center)
    assert_same_bytes(pages, poisoned(codec))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["K", "V"])
def test_a_non_finite_value_is_refused_by_layer_and_head_and_nothing_is_written(which, bad):
    codec = make_codec("int8", 64, rotate="hadamard")
    k, v = torch.randn(2, 100, 2, 64)
    (k if which == "K" else v)[99, 1, 63] = bad
    pages = poisoned(codec, 30)
    with pytest.raises(NonFiniteError, match=f"{which} of layer 7, KV head 1:"):
        CpuBackend(codec).write_kv(pages, torch.arange(100), k, v, layer_idx=7)
    assert_same_bytes(pages, poisoned(codec, 30))


@pytest.mark.parametrize("slot", [-1, NUM_PAGES * 4, 2**40])
def test_a_slot_that_does_not_exist_is_refused_and_nothing_is_written(slot):
    codec = make_codec("int8", 64)
    pages = poisoned(codec)
    with pytest.raises(ValueError, match=f"slot_mapping: expected slots from 0 to 19, got {slot}"):
        CpuBackend(codec).write_kv(
            pages, torch.tensor([1, slot]), *torch.randn(2, 2, 2, 64), layer_idx=0
        )
    assert_same_bytes(pages, poisoned(codec))


def test_rows_may_be_views_into_a_wider_tensor():
    codec = make_codec("int8", 64)
    fused = torch.randn(6, 3, 2, 64)  # as a fused projection gives it
    k, v = fused[:, 1], fused[:, 2]
    assert_same_bytes(*write_both(codec, torch.arange(6), k, v))
    transposed = torch.randn(2, 64, 6).permute(2, 0, 1)
    assert_same_bytes(*write_both(codec, torch.arange(6), transposed, transposed))


def test_a_size_that_is_not_supported_is_named():
    codec = make_codec("int8", 1040)
    pages = poisoned(codec)
    rows = torch.randn(1, 2, 1040)
    with pytest.raises(ValueError, match="head_dim: expected 1 to 1024, got 1040"):
        CpuBackend(codec).write_kv(pages, torch.tensor([0]), rows, rows, layer_idx=0)


def test_writing_nothing_changes_nothing():
    codec = make_codec("int8", 64)
    pages = poisoned(codec)
    empty = torch.zeros(0, 2, 64)
    CpuBackend(codec).write_kv(pages, torch.zeros(0, dtype=torch.int64), empty, empty, layer_idx=0)
    assert_same_bytes(pages, poisoned(codec))
