"""bias_gelu and bias_silu: how exact the activations are, far arguments, the bias and its gradient, errors."""

import functools
import math

import pytest
import torch
from helpers import BF16, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.ops import bias_activation
from rooftile.ops.bias_activation import bias_gelu, bias_silu
from rooftile.reference import bias_activation as reference

TANH = {"activation": "gelu_tanh"}
FUNCTIONS = {
    "silu": (bias_silu, reference.bias_silu),
    "gelu": (bias_gelu, reference.bias_gelu),
    "gelu tanh": (functools.partial(bias_gelu, **TANH), functools.partial(reference.bias_gelu, **TANH)),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def slope(function, x):
    """y and dy/dx for each element of x."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y.sum(), leaf)[0]


def both(name, x):
    """The same, of the op in float32 and of the reference in float64."""
    function, truth = FUNCTIONS[name]
    return slope(function, x), slope(truth, x.double())


# How exact the activations are


@every_function
def test_float32_results_are_good_to_a_rounding_or_two(name, device):
    x = torch.randn(8, 4096, device=device)
    (y, dx), (expected, dexpected) = both(name, x)
    assert relative_error(y, expected) < 1.5e-7
    assert relative_error(dx, dexpected) < 2e-7


def test_the_tail_of_gelu_is_as_close_as_its_comment_says(device):
    """Below zero gelu is x times the tail: the error of one is that of the other."""
    x = torch.linspace(-15, 0, 16384, device=device)[None]
    y, _ = slope(bias_gelu, x)
    expected = reference.bias_gelu(x.double())
    error = (y.double() - expected).abs()
    assert float(error.max()) < 1e-7
    assert float(error[x < -6].max()) < 1e-11
    for least, bound in ((-5.5, 4e-4), (-6.0, 2e-3)):
        inside = (x >= least) & (x < 0)
        assert float((error / expected.abs())[inside].max()) < bound
    assert (y[x < -12] == 0).all()


@pytest.mark.parametrize(("name", "bound"), [("gelu", 4e-4), ("gelu tanh", 1e-5), ("silu", 1e-5)])
def test_small_values_below_zero_keep_their_digits(name, bound, device):
    """Also the derivative's, where 1 + erf(x) and 1 + tanh(x) would have lost them."""
    x = torch.linspace(-5.5, -2, 4096, device=device)[None]
    for found, expected in zip(*both(name, x), strict=True):
        assert float((found.double() / expected - 1).abs().max()) < bound


@every_function
def test_the_function_of_minus_x(name, device):
    """act(x) - act(-x) = x, and the derivatives of the two add up to 1."""
    x = torch.linspace(0, 20, 2048, device=device)[None]
    (above, slope_above), (below, slope_below) = (slope(FUNCTIONS[name][0], s * x) for s in (1, -1))
    torch.testing.assert_close(above - below, x, rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(slope_above + slope_below, torch.ones_like(x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@every_function
def test_far_arguments_neither_overflow_nor_become_nan(name, dtype, device):
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, -1e4, -200.0, -0.0, 0.0, 100.0, 1e4, largest], device=device).to(dtype)[None]
    y, dx = slope(FUNCTIONS[name][0], x)
    assert torch.equal(y, torch.where(x > 0, x, torch.zeros_like(x)))
    assert torch.equal(dx, torch.tensor([[0.0, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0]], device=device).to(dtype))
    with_bias = FUNCTIONS[name][0](x, torch.full_like(x[0], 0.25))
    assert torch.isfinite(with_bias).all()


@every_function
def test_nan_and_infinity(name, device):
    y, dx = slope(FUNCTIONS[name][0], torch.tensor([[math.nan, 1.0, math.inf]], device=device))
    assert y.isnan().tolist() == [[True, False, False]]
    assert y[0, 2] == math.inf
    assert dx.isnan()[0, :2].tolist() == [True, False]
    bias = torch.tensor([0.0, math.nan, 0.0], device=device)
    assert FUNCTIONS[name][0](torch.ones(2, 3, device=device), bias).isnan().any(0).tolist() == [False, True, False]


# The bias


@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    cols=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
    bias=st.sampled_from(["own", "fp32", "none"]),
    name=st.sampled_from(list(FUNCTIONS)),
)
@settings(max_examples=25)
def test_any_leading_shape(leading, cols, dtype, bias, name):
    device = runtime.default_device()
    function, truth = FUNCTIONS[name]
    x, dy = (torch.randn(*leading, cols, device=device).to(dtype).requires_grad_() for _ in range(2))
    b = None
    if bias != "none":
        b = torch.randn(cols, device=device).to(torch.float32 if bias == "fp32" else dtype).requires_grad_()
    leaves = (x,) if b is None else (x, b)
    wide = tuple(t.detach().double().requires_grad_() for t in leaves)
    y, expected = function(*leaves), truth(*wide)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    grads = torch.autograd.grad(y, leaves, dy.detach())
    wanted = torch.autograd.grad(expected, wide, dy.detach().double())
    for found, want, leaf in zip((y, *grads), (expected, *wanted), (x, *leaves), strict=True):
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
        # The bias's is a sum, which may be far smaller than what is added up: float32 loses bits of the latter.
        lost = wanted[0].abs().sum_to_size(leaf.shape).norm() * torch.finfo(torch.float32).eps if leaf is b else 0.0
        assert (found.double() - want).norm() <= 4 * torch.finfo(leaf.dtype).eps * want.norm() + 4 * lost


@every_function
def test_no_bias_is_a_bias_of_zero(name, device):
    x = torch.randn(5, 96, device=device)
    function = FUNCTIONS[name][0]
    zeros = torch.zeros(96, device=device)
    assert_same(slope(function, x), slope(lambda t: function(t, zeros), x))


def test_the_sum_with_the_bias_is_not_rounded(device):
    """4 - 2^-7 is no bfloat16: rounded before the activation, the bias would vanish."""
    x, bias = torch.full((3, 64), -4.0, device=device).to(BF16), torch.full((64,), 2.0**-7, device=device).to(BF16)
    assert torch.equal(x + bias, x)
    y, exact = bias_silu(x, bias), reference.bias_silu(x.double(), bias.double()).to(BF16)
    assert torch.equal(y, exact)
    assert not torch.equal(y, reference.bias_silu_eager(x, bias))


@every_function
def test_the_gradient_of_the_bias_is_summed_in_float32(name, device):
    """A thousand ones: in bfloat16 the sum would stay at 256."""
    x, bias = torch.full((1024, 48), 20.0, device=device).to(BF16), torch.zeros(48, device=device).to(BF16)
    bias.requires_grad_()
    y = FUNCTIONS[name][0](x, bias)
    (dbias,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert (dbias == 1024).all()


def test_the_sum_is_of_gradients_that_were_not_rounded(device):
    x, dy = torch.randn(257, 40, device=device).to(BF16), torch.randn(257, 40, device=device).to(BF16)
    bias = torch.randn(40, device=device, requires_grad=True)
    (dbias,) = torch.autograd.grad(bias_silu(x, bias), bias, dy)
    wide = bias.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference.bias_silu(x.double(), wide), wide, dy.double())
    assert relative_error(dbias, expected) < 1e-6  # rounded to bfloat16 first, they would leave 1e-3


def test_partial_sums_are_made_only_for_a_bias_that_wants_a_gradient(device, monkeypatch):
    x, bias = torch.randn(5, 64, device=device, requires_grad=True), torch.randn(64, device=device)

    def no_sum(*args):
        raise AssertionError("the bias's gradient was computed")

    monkeypatch.setattr(bias_activation, "prepare_sum", no_sum)
    y, without = bias_gelu(x, bias), bias_gelu(x)
    for result in (y, without):
        torch.autograd.grad(result.sum(), x)
    y = bias_gelu(x.detach(), bias.requires_grad_())
    with pytest.raises(AssertionError, match="the bias's gradient was computed"):
        y.sum().backward()


def test_a_bias_with_a_stride(device):
    x = torch.randn(3, 32, device=device)
    bias = torch.randn(32, 2, device=device)[:, 0]
    assert_same((bias_silu(x, bias),), (bias_silu(x, bias.contiguous()),))


def test_empty_rows_give_a_bias_gradient_of_zero(device):
    x, bias = torch.empty(0, 16, device=device), torch.randn(16, device=device, requires_grad=True)
    y = bias_gelu(x, bias)
    (dbias,) = torch.autograd.grad(y, bias, torch.empty_like(y))
    assert torch.equal(dbias, torch.zeros(16, device=device))


# Errors


@pytest.mark.parametrize("device_type", ["here", "meta"])
@pytest.mark.parametrize(("op", "function"), [("bias_gelu", bias_gelu), ("bias_silu", bias_silu)])
def test_wrong_arguments(op, function, device_type, device):
    device = device if device_type == "here" else torch.device("meta")
    x = torch.randn(4, 8, device=device)
    for shape in ((7,), (1, 8), (), (4, 8), (1,)):
        with pytest.raises(ValueError, match=rf"{op}: bias has shape .*, expected \(8,\) to match x's last dimension"):
            function(x, torch.randn(shape, device=device))
    with pytest.raises(ValueError, match=rf"{op}: x has shape \(\), expected at least one dimension"):
        function(x[0, 0])
    with pytest.raises(TypeError, match=rf"{op}: x has dtype torch.int64, expected float32, float16 or bfloat16"):
        function(x.long())
    expected = rf"{op}: bias has dtype torch.float16, expected torch.bfloat16 to match x, or torch.float32"
    with pytest.raises(TypeError, match=expected):
        function(x.to(BF16), x[0].half())
    with pytest.raises(TypeError, match=rf"{op}: bias has dtype torch.bfloat16, expected torch.float32"):
        function(x, x[0].to(BF16))


@pytest.mark.parametrize("device_type", ["here", "meta"])
def test_an_activation_of_another_name(device_type, device):
    x = torch.randn(4, 8, device=device if device_type == "here" else "meta")
    for activation in ("fast", "silu", "", None):
        with pytest.raises((ValueError, RuntimeError, TypeError), match="activation"):
            bias_gelu(x, activation=activation)


def test_the_backward_op_refuses_what_does_not_match(device):
    x, bias = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    backward = torch.ops.rooftile.bias_activation_backward
    for dy, error in ((x[:3], ValueError), (x.to(BF16), TypeError)):
        with pytest.raises(error, match="bias_activation_backward: dy has"):
            backward(dy, x, bias, "gelu", True, True)
    with pytest.raises(ValueError, match="activation is 'relu', expected one of silu, gelu, gelu_tanh"):
        backward(x, x, bias, "relu", True, True)
    with pytest.raises(ValueError, match="needs_dbias is True, expected False where bias is None"):
        backward(x, x, None, "silu", True, True)


def test_an_infinite_gradient_of_a_row_is_infinite_in_dbias(device):
    """Kahan's sum would make NaN of inf less inf."""
    x, dy = torch.randn(2, 80, 8, device=device)
    dy[0, 0] = torch.inf
    bias = torch.zeros(8, device=device, requires_grad=True)
    (dbias,) = torch.autograd.grad(bias_gelu(x.abs(), bias), bias, dy)
    assert dbias[0] == torch.inf
    assert dbias[1:].isfinite().all()
