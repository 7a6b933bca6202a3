"""bfloat16 and fp8: every rounding as PyTorch's, or as the PTX conversion where PyTorch's differs."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from rooftile import runtime  # noqa: E402, F401  # installs the interpreter

FP8 = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
N = 1 << 16


@triton.jit
def _cast(x_ptr, y_ptr, n, BLOCK: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if ROUNDING is None:
        tl.store(y_ptr + i, x.to(y_ptr.dtype.element_ty), mask=i < n)
    else:
        tl.store(y_ptr + i, x.to(y_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING), mask=i < n)


def cast(x: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    _cast[(1,)](x, y, x.numel(), BLOCK=triton.next_power_of_2(x.numel()), ROUNDING=rounding)
    return y


def random_bits(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    return torch.randint(0, 256, (n * size,), dtype=torch.uint8, generator=generator).view(dtype)


def every_16_bits(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, any NaN being as good as another."""
    assert actual.dtype == expected.dtype
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[expected.element_size()]
    assert torch.equal(actual.view(integer)[~nan], expected.view(integer)[~nan])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_rounds_to_nearest_even_on_random_bit_patterns(dtype, seed):
    x = random_bits(N, torch.float32, seed)
    assert_same(cast(x, dtype), x.to(dtype))


def test_float32_to_bfloat16_rounds_every_tie_to_even():
    high = torch.arange(1 << 16, dtype=torch.int64)
    x = ((high << 16) | 0x8000).to(torch.uint32).view(torch.float32)
    assert_same(cast(x, torch.bfloat16), x.to(torch.bfloat16))


def test_every_bfloat16_widens_exactly():
    x = every_16_bits(torch.bfloat16)
    assert_same(cast(x, torch.float32), x.float())
    assert_same(cast(x, torch.float16), x.to(torch.float16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_toward_zero_never_grows(dtype):
    x = random_bits(N, torch.float32, 5)
    x = x[x.isfinite()]
    y = cast(x, dtype, "rtz")
    assert y.isfinite().all()
    assert (y.float().abs() <= x.abs()).all()
    up = torch.nextafter(y.abs(), torch.full_like(y, torch.inf))
    assert (up.float() > x.abs()).all()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_rounds_as_torch_inside_its_range_and_saturates_outside(dtype, source):
    x = every_16_bits(source) if source.itemsize == 2 else random_bits(N, source)
    # Both the halfway points and what is near them are dense in the values' own range.
    inside = torch.linspace(-FP8[dtype], FP8[dtype], N).to(source)
    x = torch.cat([x, inside, inside / 1024, torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=source)])
    clipped = x.float().clamp(-FP8[dtype], FP8[dtype])
    assert_same(cast(x, dtype), clipped.to(dtype))


@pytest.mark.parametrize("dtype", FP8)
def test_every_fp8_widens_exactly(dtype):
    x = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    for wide in (torch.float32, torch.float16, torch.bfloat16):
        assert_same(cast(x, wide), x.to(wide))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_nan_is_the_canonical_one(dtype):
    x = torch.tensor([torch.nan, -torch.nan])
    assert cast(x, dtype).view(torch.uint8).tolist() == [0x7F, 0x7F]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8, torch.int8])
def test_float_to_integer_truncates(dtype):
    x = torch.linspace(-100.9, 100.9, 1000)
    x = x.abs() if dtype == torch.uint8 else x
    assert torch.equal(cast(x, dtype), x.to(dtype))


def test_float_to_integer_clamps_as_ptx_does():
    x = torch.tensor([torch.inf, -torch.inf, 3e9, -3e9, torch.nan])
    top, bottom = 2**31 - 1, -(2**31)
    assert cast(x, torch.int32).tolist() == [top, bottom, top, bottom, 0]
    assert cast(x, torch.int64).tolist() == [2**63 - 1, -(2**63), 3 * 10**9, -3 * 10**9, -(2**63)]


def test_fp8_survives_a_masked_load_and_store_bit_for_bit():
    x = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for dtype in FP8:
        assert torch.equal(cast(x.view(dtype), dtype).view(torch.uint8), x)
