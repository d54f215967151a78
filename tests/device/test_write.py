"""The Triton write, its faults and page copies: the reference's bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv import KVConfig, KVSpec, NonFiniteError, PrefixCache
from radixkv.attention import reference
from radixkv.attention import triton as triton_backend
from radixkv.attention.formats import KVFormat
from radixkv.attention.layout import KVCodec, LayerPages
from radixkv.attention.triton import TritonBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cpu" if triton_backend.INTERPRETED else "cuda")
QUANTIZED = ("int8", "fp8", "fp8_e5m2", "int4")
NUM_PAGES = 20


def make_codec(kv_dtype: str, head_dim: int, *, rotate: str = "none", **fields) -> KVCodec:
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=head_dim, **fields)
    return KVCodec(spec, KVConfig(dtype=kv_dtype, page_size=4, rotate=rotate))


def poisoned(codec: KVCodec) -> LayerPages:
    """Fresh pages full of codes that are never written and of NaN scales."""

    def make(form: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (NUM_PAGES, codec.spec.num_kv_heads, codec.config.page_size)
        raw = torch.full((*shape, form.code_width * form.code_dtype.itemsize), form.poison)
        pages = raw.to(torch.uint8).view(form.code_dtype)
        return pages, torch.full((*shape, form.num_scales), float("nan"), dtype=torch.bfloat16)

    (k_pages, k_scale), (v_pages, v_scale) = make(codec.k_format), make(codec.v_format)
    return LayerPages(*(t.to(DEVICE) for t in (k_pages, v_pages, k_scale, v_scale)))


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bytes(one: LayerPages, other: LayerPages) -> None:
    for name, a, b in zip(LayerPages._fields, one, other, strict=True):
        assert torch.equal(raw_bytes(a), raw_bytes(b)), name


def write_both(codec: KVCodec, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    expected, got = poisoned(codec), poisoned(codec)
    slots, k, v = slots.to(DEVICE), k.to(DEVICE), v.to(DEVICE)
    before = triton_backend.runs["write"]
    reference.write_kv(codec, expected, slots, k, v, layer_idx=0)
    backend = TritonBackend(codec)
    backend.write_kv(got, slots, k, v, layer_idx=0)
    backend.settle()
    assert triton_backend.runs["write"] == before + 1
    return expected, got


@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 112, 128, 256])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_codes_and_scales_are_the_references_bit_for_bit(dtype, head_dim):
    codec = make_codec(dtype, head_dim)
    generator = torch.Generator().manual_seed(head_dim)
    k, v = torch.randn(2, 70, 2, head_dim, generator=generator)  # more than a program takes
    k = k * 10 ** torch.linspace(-12, 12, 70)[:, None, None]  # rows of every size
    k[3:5], k[5, :, 3:] = 0.0, 0.0
    slots = torch.randperm(NUM_PAGES * 4, generator=generator)[:70]
    assert_same_bytes(*write_both(codec, slots, k, v))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_every_byte_of_a_float8_is_written_and_so_are_the_halves_between_them(dtype):
    codec = make_codec(dtype, 256)
    form = codec.k_format
    every = torch.arange(256, dtype=torch.uint8).view(form.code_dtype).float()
    every = torch.where(every.abs() <= form.largest, every, 0.0)  # NaN and Inf are not written
    between = (every.sort().values[1:] + every.sort().values[:-1]) / 2
    rows = torch.stack([every, torch.cat([between, every.max()[None]])])[:, None]
    rows = rows.expand(2, 2, 256).contiguous()
    rows[:, :, 0] = form.largest  # so that the scale is 1
    assert_same_bytes(*write_both(codec, torch.tensor([5, 9]), rows, -rows))


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_model_pages_hold_the_rows_in_the_models_own_dtype(model_dtype):
    codec = make_codec("model", 20, dtype=model_dtype)
    k, v = torch.randn(2, 7, 2, 20).to(model_dtype)
    assert_same_bytes(*write_both(codec, torch.arange(7), k, v))


@settings(max_examples=15, deadline=None)
@given(
    dtype=st.sampled_from(QUANTIZED),
    row=st.lists(
        st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100), min_size=20, max_size=20
    ),
)
def test_any_finite_row_is_coded_as_the_reference_does(dtype, row):
    codec = make_codec(dtype, 20)
    rows = torch.tensor(row).expand(1, 2, 20)
    assert_same_bytes(*write_both(codec, torch.tensor([3]), rows, -rows))


@pytest.mark.parametrize("head_dim", [8, 33, 80, 128])
def test_the_rotation_is_the_hadamard_matrix(head_dim):
    codec = make_codec("model", head_dim, rotate="hadamard")
    k, v = torch.randn(2, 5, 2, head_dim)
    expected, got = write_both(codec, torch.arange(5), k, v)
    size = (head_dim & -head_dim).bit_length()
    bound = 2 * (size + 1) * 2.0**-24 * k.norm(dim=-1).max() * size
    at = torch.arange(5) // 4, slice(None), torch.arange(5) % 4
    assert (got.k_pages[at] - expected.k_pages[at]).abs().max() <= bound


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_rotated_rows_are_within_one_code_of_the_reference(dtype):
    codec = make_codec(dtype, 128, rotate="hadamard")
    k, v = torch.randn(2, 20, 2, 128)
    expected, got = write_both(codec, torch.arange(20), k, v)
    page_ids = torch.arange(5, device=DEVICE)
    form = codec.k_format
    a = reference.read_rows(form, expected.k_pages, expected.k_scale, page_ids)
    b = reference.read_rows(form, got.k_pages, got.k_scale, page_ids)
    scale = expected.k_scale[:5].float().abs().max()
    step = {"int8": 1.0, "int4": 1.01, "fp8": 32.0, "fp8_e5m2": 8192.0}[dtype] * scale
    assert (a - b).abs().max() <= step
    assert ((a - b).abs() > 0).float().mean() < 1e-2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["K", "V"])
def test_a_row_that_is_not_finite_is_not_written_and_named_when_the_step_settles(which, bad):
    codec = make_codec("int8", 64, rotate="hadamard")
    k, v = torch.randn(2, 7, 2, 64, device=DEVICE)
    (k if which == "K" else v)[6, 1, 63] = bad
    pages = poisoned(codec)
    slots = torch.arange(7, device=DEVICE)
    backend = TritonBackend(codec)
    backend.write_kv(pages, slots, k, v, layer_idx=0)
    with pytest.raises(NonFiniteError, match=f"{which} of layer 0, KV head 1:"):
        backend.settle()
    backend.settle()  # said once
    written = pages.k_scale if which == "K" else pages.v_scale
    assert written[1, 1, 2].isnan().all()
    assert written[1, 0, 2].isfinite().all()


@pytest.mark.parametrize("slot", [-1, NUM_PAGES * 4, 2**40])
def test_a_slot_that_does_not_exist_is_not_written_and_named_when_the_step_settles(slot):
    codec = make_codec("int8", 64)
    pages = poisoned(codec)
    slots = torch.tensor([slot], device=DEVICE)
    k = torch.randn(1, 2, 64, device=DEVICE)
    backend = TritonBackend(codec)
    backend.write_kv(pages, slots, k, k, layer_idx=0)
    with pytest.raises(ValueError, match="slot_mapping: expected slots of the pages"):
        backend.settle()
    assert_same_bytes(pages, poisoned(codec))


def test_rows_may_be_views_into_a_wider_tensor():
    codec = make_codec("int8", 64)
    fused = torch.randn(6, 3, 2, 64)  # as a fused projection gives it
    assert_same_bytes(*write_both(codec, torch.arange(6), fused[:, 1], fused[:, 2]))
    transposed = torch.randn(2, 64, 6).permute(2, 0, 1)
    assert_same_bytes(*write_both(codec, torch.arange(6), transposed, transposed))


def test_writing_nothing_changes_nothing():
    codec = make_codec("int8", 64)
    pages = poisoned(codec)
    empty = torch.zeros(0, 2, 64, device=DEVICE)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    TritonBackend(codec).write_kv(pages, slots, empty, empty, layer_idx=0)
    assert_same_bytes(pages, poisoned(codec))


@pytest.mark.parametrize("dtype", [*QUANTIZED, "model"])
def test_copied_pages_have_the_first_tokens_and_keep_the_rest(dtype):
    codec = make_codec(dtype, 20)
    torch.manual_seed(0)

    def noise(form: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (3, 6, 2, 4)  # layers, pages, heads, tokens
        raw = torch.randint(0, 100, (*shape, form.code_width * form.code_dtype.itemsize))
        scale = torch.randn(*shape, form.num_scales).bfloat16()
        return raw.to(torch.uint8).view(form.code_dtype).to(DEVICE), scale.to(DEVICE)

    (k, k_scale), (v, v_scale) = noise(codec.k_format), noise(codec.v_format)
    pages = LayerPages(k, v, k_scale, v_scale)
    expected = [tensor.view(torch.uint8).clone() for tensor in pages]
    copies = [(1, 2, 4), (3, 5, 1), (1, 4, 3)]
    for tensor in expected:
        for source, target, num_tokens in copies:
            tensor[:, target, :, :num_tokens] = tensor[:, source, :, :num_tokens]
    before = triton_backend.runs["copy"]
    TritonBackend(codec).copy_pages(pages, copies)
    assert triton_backend.runs["copy"] == before + 1  # one launch
    for tensor, want in zip(pages, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8), want)


def test_the_cache_by_itself_writes_copies_and_refuses_through_triton():
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16)
    config = KVConfig(page_size=4, capacity="64KiB")
    caches = [PrefixCache(spec, config, device=DEVICE, backend=b) for b in ("triton", "torch")]
    torch.manual_seed(0)
    rows = torch.randn(10, 1, 16, device=DEVICE)
    q = torch.randn(4, 2, 16, device=DEVICE)
    outs = []
    for cache in caches:
        with cache.acquire(list(range(10))) as lease:
            lease.write(0, rows, rows)
            lease.commit()
        with cache.acquire([*range(7), 50, 51, 52, 53]) as lease:  # ends inside a page
            assert lease.num_cached == 7
            with pytest.raises(NonFiniteError, match="K of layer 0, KV head 0"):
                lease.write(0, rows[:4] * float("nan"), rows[:4])
            lease.write(0, rows[:4], rows[:4])
            outs.append(lease.attend(0, q))
        assert cache.core.cow_copies == 1
        cache.check()
    assert torch.allclose(*outs, atol=1e-4)
