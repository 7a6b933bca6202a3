"""Arithmetic, reductions and matrix products as a GPU does them, against PyTorch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from rooftile import runtime  # noqa: E402, F401  # installs the interpreter


@triton.jit
def _binary(x_ptr, y_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = x / y
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "minimum":
        z = tl.minimum(x, y)
    elif OP == "where":
        z = tl.where(x < y, x, y)
    elif OP == "lt":
        z = x < y
    elif OP == "eq":
        z = x == y
    elif OP == "ne":
        z = x != y
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "fma":
        z = tl.fma(x, y, x)
    elif OP == "clamp":
        z = tl.clamp(x, -y, y)
    tl.store(out_ptr + i, z)


TORCH = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "where": lambda x, y: torch.where(x < y, x, y),
    "lt": torch.lt,
    "eq": torch.eq,
    "ne": torch.ne,
    "abs": lambda x, y: x.abs(),
    "fma": lambda x, y: (x.double() * y.double() + x.double()).to(x.dtype),
    "clamp": lambda x, y: torch.fmin(torch.fmax(x, -y), y),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", TORCH)
def test_elementwise_equals_torch_bit_for_bit(op, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(2, 4096).mul(3).to(dtype)
    x[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    y[3:6] = torch.tensor([torch.nan, torch.inf, 0.0])
    y[100:120] = x[100:120]
    if op == "clamp":
        y = y.abs()
    expected = TORCH[op](x, y)
    out = torch.empty_like(expected)
    _binary[(1,)](x, y, out, N=4096, OP=op)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


@triton.jit
def _sum(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if AXIS is None:
        tl.store(out_ptr, tl.sum(x, axis=None))
    elif AXIS == 0:
        tl.store(out_ptr + tl.arange(0, N), tl.sum(x, axis=0))
    else:
        tl.store(out_ptr + tl.arange(0, M), tl.sum(x, axis=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int8])
@pytest.mark.parametrize("axis", [0, 1, None])
def test_sum_of_ones_is_their_number(axis, dtype):
    """One after the other, bfloat16 stops at 256 and float16 at 2048."""
    x = torch.ones(64, 64, dtype=dtype)
    out = torch.zeros(64 if axis is not None else 1, dtype=torch.int32 if dtype == torch.int8 else dtype)
    _sum[(1,)](x, out, M=64, N=64, AXIS=axis)
    assert (out == (64 if axis is not None else 4096)).all()


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_sum_errs_by_its_depth_in_roundings_at_most(seed, dtype):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = torch.empty(32, dtype=dtype)
    _sum[(1,)](x, out, M=32, N=128, AXIS=1)
    bound = math.log2(128) * torch.finfo(dtype).eps / 2 * x.double().abs().sum(1) * 1.01
    assert ((out.double() - x.double().sum(1)).abs() <= bound).all()


def test_integer_sum_wraps():
    x = torch.full((64, 64), 2**30, dtype=torch.int32)
    out = torch.empty(1, dtype=torch.int32)
    _sum[(1,)](x, out, M=64, N=64, AXIS=None)
    assert out.item() == (4096 * 2**30) % 2**32


@triton.jit
def _cumsum(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    sums = tl.cumsum(tl.load(x_ptr + at), AXIS, reverse=REVERSE)
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_cumsum_errs_by_its_depth_in_roundings_at_most(dtype, axis, reverse):
    x = (torch.rand(128, 128, generator=torch.Generator().manual_seed(0)) * 8).to(dtype)
    out = torch.empty(128, 128, dtype=dtype)
    _cumsum[(1,)](x, out, M=128, N=128, AXIS=axis, REVERSE=reverse)
    exact = x.double().flip(axis).cumsum(axis).flip(axis) if reverse else x.double().cumsum(axis)
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    assert ((out.double() - exact).abs() <= math.log2(128) * eps / 2 * exact * 1.01).all()


@triton.jit
def _scalar_condition(out_ptr, limit, N: tl.constexpr):
    i = tl.arange(0, N)
    mask = (limit > 3.5) & (i < 5)
    tl.store(out_ptr + i, 1, mask=mask)
    tl.store(out_ptr + i, 2, mask=~mask)
    tl.store(out_ptr + i, 3, mask=~tl.broadcast_to(limit > 3.5, (N,)))


def test_a_scalar_condition_stays_boolean_when_broadcast():
    out = torch.zeros(8, dtype=torch.int32)
    _scalar_condition[(1,)](out, 4.0, N=8)
    assert out.tolist() == [1] * 5 + [2] * 3
    _scalar_condition[(1,)](out, 3.0, N=8)
    assert out.tolist() == [3] * 8


@triton.jit
def _extrema(x_ptr, max_ptr, min_ptr, argmax_ptr, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    i = tl.arange(0, M)
    tl.store(max_ptr + i, tl.max(x, axis=1))
    tl.store(min_ptr + i, tl.min(x, axis=1))
    tl.store(argmax_ptr + i, tl.argmax(x, axis=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_max_min_argmax_equal_torch(dtype):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).mul(1000).to(dtype)
    largest, smallest, where = torch.empty(16, dtype=dtype), torch.empty(16, dtype=dtype), torch.empty(16).int()
    _extrema[(1,)](x, largest, smallest, where, M=16, N=64)
    assert torch.equal(largest, x.amax(1))
    assert torch.equal(smallest, x.amin(1))
    assert torch.equal(x.gather(1, where[:, None].long())[:, 0], x.amax(1))


@pytest.mark.filterwarnings("error")
def test_max_drops_nan_and_is_silent_where_all_is_nan():
    x = torch.full((16, 64), torch.nan)
    x[1:, 3] = 7
    largest = torch.empty(16)
    _max_only[(1,)](x, largest, M=16, N=64)
    assert largest[0].isnan()
    assert (largest[1:] == 7).all()


@triton.jit
def _max_only(x_ptr, max_ptr, M: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(max_ptr + tl.arange(0, M), tl.max(x, axis=1))


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    c = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision=PRECISION)
    tl.store(c_ptr + at, c.to(c_ptr.dtype.element_ty))


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz],
)
def test_dot_is_rounded_once(dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64).to(dtype) for _ in range(2))
    c = torch.empty(64, 64)
    _dot[(1,)](a, b, c, N=64, PRECISION=None)
    exact = a.double() @ b.double()
    # Half a unit of float32, and what 64 additions in float64 lose in any order: so it is the same on every processor.
    bound = 2.0**-24 * exact.abs() + 64 * 2.0**-53 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - exact).abs() <= bound).all()


def test_dot_in_int8_is_exact():
    a, b = torch.randint(-128, 128, (2, 64, 64), dtype=torch.int8)
    c = torch.empty(64, 64, dtype=torch.int32)
    _dot[(1,)](a, b, c, N=64, PRECISION=None)
    assert torch.equal(c, (a.long() @ b.long()).int())


def test_dot_in_float32_is_tf32_unless_asked_otherwise():
    torch.manual_seed(0)
    a, b = torch.randn(2, 64, 64)
    default, ieee = torch.empty(2, 64, 64)
    _dot[(1,)](a, b, default, N=64, PRECISION=None)
    _dot[(1,)](a, b, ieee, N=64, PRECISION="ieee")
    exact = a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs()
    assert ((ieee.double() - exact).abs() <= 64 * 2.0**-24 * scale).all()
    error = ((default.double() - exact).abs() / scale).max()
    assert 2.0**-14 < error < 2.0**-9  # ten bits of each operand are kept


@triton.jit
def _dot_scaled(a_ptr, b_ptr, scale_ptr, c_ptr, N: tl.constexpr, FORMAT: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    scale = tl.load(scale_ptr + i[:, None] * (N // 32) + tl.arange(0, N // 32)[None, :])
    c = tl.dot_scaled(tl.load(a_ptr + at), scale, FORMAT, tl.load(b_ptr + at), scale, FORMAT)
    tl.store(c_ptr + at, c)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")])
def test_dot_scaled_multiplies_by_powers_of_two(dtype, name):
    from triton.runtime.interpreter import InterpreterBuilder

    if not hasattr(InterpreterBuilder, "create_dot_scaled"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} has no dot_scaled")
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64).to(dtype) for _ in range(2))
    a[0, 0] = torch.nan
    scale, c = torch.full((64, 2), 128, dtype=torch.uint8), torch.empty(64, 64)  # 128 stands for 2
    _dot_scaled[(1,)](a, b, scale, c, N=64, FORMAT=name)
    torch.testing.assert_close(c, 4 * a.float() @ b.float(), equal_nan=True)


@triton.jit
def _math(x_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i).to(tl.float32)
    if OP == "exp":
        y = tl.exp(x)
    elif OP == "exp2":
        y = tl.exp2(x)
    elif OP == "log":
        y = tl.log(x)
    elif OP == "sigmoid":
        y = tl.sigmoid(x)
    elif OP == "rsqrt":
        y = tl.rsqrt(x)
    elif OP == "sqrt":
        y = tl.sqrt(x)
    elif OP == "erf":
        y = tl.erf(x)
    elif OP == "sin":
        y = tl.sin(x)
    elif OP == "cos":
        y = tl.cos(x)
    elif OP == "floor":
        y = tl.floor(x)
    tl.store(out_ptr + i, y.to(out_ptr.dtype.element_ty))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("op", ["exp", "exp2", "log", "sigmoid", "rsqrt", "sqrt", "erf", "sin", "cos", "floor"])
def test_math_follows_torch_without_a_warning(op, dtype):
    x = torch.cat([torch.linspace(-200, 200, 1021), torch.tensor([0.0, torch.inf, -torch.inf])]).to(dtype)
    out = torch.empty_like(x)
    _math[(1,)](x, out, N=1024, OP=op)
    reference = getattr(torch, op)(x.double())
    # Two float32 ulps for NumPy's functions, then the rounding to the output's type; PyTorch's own overflow to inf.
    expected = reference.float().to(dtype)
    torch.testing.assert_close(out, expected, rtol=2.0**-22 + torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
