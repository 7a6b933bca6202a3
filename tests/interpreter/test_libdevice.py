"""libdevice on the CPU: the values of float64 rounded once, and NVIDIA's own table of accepted types."""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.language.extra.cuda import libdevice as nvidia  # noqa: E402
from triton.language.extra.libdevice import tanh as imported_tanh  # noqa: E402

from rooftile import runtime  # noqa: E402, F401  # installs the interpreter

UNARY = {
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "rint": torch.round,
    "nearbyint": torch.round,
    "round": lambda x: torch.where((x - x.trunc()).abs() >= 0.5, x.trunc() + x.sign(), x.trunc()),
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "exp10": lambda x: 10.0**x,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "cosh": torch.cosh,
    "lgamma": torch.lgamma,
    "normcdf": lambda x: torch.erfc(-x / 2**0.5) / 2,
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "rcp_rn": torch.reciprocal,
    "abs": torch.abs,
}
BINARY = {
    "pow": torch.pow,
    "fmod": torch.fmod,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "copysign": torch.copysign,
    "div_rn": torch.div,
    "fast_dividef": torch.div,
    "fdim": lambda x, y: (x - y).clamp_min(0),
}


@triton.jit
def _unary(x_ptr, out_ptr, N: tl.constexpr, FUNCTION: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, FUNCTION(tl.load(x_ptr + i)))


@triton.jit
def _binary(x_ptr, y_ptr, out_ptr, N: tl.constexpr, FUNCTION: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, FUNCTION(tl.load(x_ptr + i), tl.load(y_ptr + i)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", UNARY)
def test_unary_functions_are_float64s_rounded(name):
    x = torch.cat([torch.linspace(-120, 120, 1019), torch.tensor([0.0, 0.5, 2.5, torch.inf, -torch.inf])])
    out = torch.empty_like(x)
    _unary[(1,)](x, out, N=1024, FUNCTION=getattr(libdevice, name))
    # One float32 ulp: PyTorch's float64 and NumPy's may round to neighbours.
    torch.testing.assert_close(out, UNARY[name](x.double()).float(), rtol=2.0**-23, atol=1e-45, equal_nan=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_are_float64s_rounded(name):
    torch.manual_seed(0)
    x, y = torch.randn(2, 1024) * 3
    out = torch.empty_like(x)
    _binary[(1,)](x, y, out, N=1024, FUNCTION=getattr(libdevice, name))
    expected = BINARY[name](x.double(), y.double()).float()
    torch.testing.assert_close(out, expected, rtol=2.0**-23, atol=1e-45, equal_nan=True)


@pytest.mark.parametrize("name", ["isnan", "isinf", "finitef", "signbit"])
def test_predicates(name):
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.nan, torch.inf, -torch.inf, 3.0])
    out = torch.empty(8, dtype=torch.int32)
    _unary[(1,)](x, out, N=8, FUNCTION=getattr(libdevice, name))
    expected = {"isnan": x.isnan(), "isinf": x.isinf(), "finitef": x.isfinite(), "signbit": x.signbit()}[name]
    assert torch.equal(out.bool(), expected)


def test_integer_functions():
    x = torch.tensor([0, 1, 2, 255, -1, -(2**31), 12, 2**30], dtype=torch.int32)
    expected = {
        "popc": [0, 1, 1, 8, 32, 1, 2, 1],
        "clz": [32, 31, 30, 24, 0, 0, 28, 1],
        "ffs": [0, 1, 2, 1, 1, 32, 3, 31],
    }
    for name, values in expected.items():
        out = torch.empty(8, dtype=torch.int32)
        _unary[(1,)](x, out, N=8, FUNCTION=getattr(libdevice, name))
        assert out.tolist() == values, name


def test_bits_of_floats_go_there_and_back():
    x = torch.randn(64)
    raw, back = torch.empty(64, dtype=torch.int32), torch.empty(64)
    _unary[(1,)](x, raw, N=64, FUNCTION=libdevice.float_as_int)
    assert torch.equal(raw, x.view(torch.int32))
    _unary[(1,)](raw, back, N=64, FUNCTION=libdevice.int_as_float)
    assert torch.equal(back, x)


def test_other_ways_to_import_reach_the_same_function():
    x = torch.randn(64)
    for function in (imported_tanh, nvidia.tanh):
        out = torch.empty(64)
        _unary[(1,)](x, out, N=64, FUNCTION=function)
        torch.testing.assert_close(out, x.tanh())


def test_types_that_a_gpu_refuses_are_refused():
    x = torch.randn(64).bfloat16()
    with pytest.raises(Exception, match="bfloat16"):
        _unary[(1,)](x, torch.empty(64), N=64, FUNCTION=libdevice.tanh)


def test_a_function_without_a_stand_in_says_so():
    with pytest.raises(Exception, match="no stand-in for libdevice's __nv_j0f"):
        _unary[(1,)](torch.randn(64), torch.empty(64), N=64, FUNCTION=libdevice.j0)
