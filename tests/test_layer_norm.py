"""layer_norm: large means, constant rows, infinities, shapes, every kernel, errors."""

import pytest
import torch
from helpers import BF16, Calls, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.ops import layer_norm as family
from rooftile.ops.layer_norm import layer_norm
from rooftile.primitives.rows import RowConfig
from rooftile.reference import layer_norm as reference

FEW = settings(max_examples=15)
ERROR_SHAPES = [(4,), (), (8, 2), (2, 8), (1, 8), (9,)]
INTERPRETED = runtime.MODE is runtime.Mode.INTERPRETER


@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    cols=st.integers(3, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
    with_weight=st.booleans(),
    with_bias=st.booleans(),
)
@FEW
def test_any_leading_shape_with_and_without_weight_and_bias(leading, cols, dtype, with_weight, with_bias):
    device = runtime.default_device()
    x = torch.randn(*leading, cols, device=device).to(dtype)
    weight = torch.randn(cols, device=device).to(dtype) if with_weight else None
    bias = torch.randn(cols, device=device).to(dtype) if with_bias else None
    y = layer_norm(x, weight, bias)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    expected = reference.layer_norm(x.double(), *(None if v is None else v.double() for v in (weight, bias)))
    assert relative_error(y, expected) <= 2 * torch.finfo(dtype).eps


# Statistics


def forced(monkeypatch, kernel, block, rows=1):
    """Every length goes to that kernel, "held" to a loop that holds blocks, and backward to the split kernel.

    The interpreter runs one program at a time, so there a split row has one split.
    """
    one = RowConfig("tile", 512, num_warps=4, rows=rows)
    if kernel != "tile":
        one = RowConfig("loop", block, num_warps=4, held=2 if kernel == "held" else 0)
    monkeypatch.setattr(family, "config", lambda *_: one)
    two = RowConfig("tile", 512, 4, rows)
    if kernel == "held":
        two = RowConfig("split", 512 if INTERPRETED else block, 4, 1)
    monkeypatch.setattr(family, "backward_config", lambda *_: two)


every_kernel = pytest.mark.parametrize("kernel", ["tile", "loop", "held"])


@every_kernel
@pytest.mark.parametrize("scale", [1.0, 1e-2])
def test_a_mean_that_is_large_against_the_spread(kernel, scale, device, monkeypatch):
    """E[x^2] - E[x]^2 would be all noise here. The means of a row's parts are rounded to float32: by 3e-5 at 1000."""
    forced(monkeypatch, kernel, 128)
    limit = 1e-5 if kernel == "tile" else 3.1e-5 / scale
    x = (1e3 + scale * torch.randn(9, 500, device=device)).requires_grad_()
    dy = torch.randn_like(x)
    wide = x.detach().double().requires_grad_()
    y, expected = layer_norm(x), reference.layer_norm(wide)
    assert relative_error(y, expected) < limit
    (dx,), (expected,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, wide, dy.double())
    assert relative_error(dx, expected) < limit


@pytest.mark.each_once
@every_kernel
@pytest.mark.parametrize("value", [0.0, 1000.1, -3e4])
def test_a_constant_row_is_the_bias(kernel, value, device, monkeypatch):
    """A mean off by one rounding would be 0.2 of a deviation of sqrt(eps) at 1000."""
    forced(monkeypatch, kernel, 128)
    weight, bias, dy = torch.randn(3, 500, device=device)
    for dtype in (torch.float32, torch.float16, BF16):
        x = torch.full((9, 500), value, device=device).to(dtype).requires_grad_()
        y = layer_norm(x, weight, bias)
        torch.testing.assert_close(y, bias.to(dtype).expand(9, -1), rtol=1e-5, atol=1e-5)
        (dx,) = torch.autograd.grad(y, x, dy.expand(9, -1).to(dtype))
        g = dy.to(dtype) * weight
        torch.testing.assert_close(dx.float(), ((g - g.mean()) * 1e-5**-0.5).expand(9, -1), rtol=1e-2, atol=1e-2)


@every_kernel
@pytest.mark.parametrize("what", [float("inf"), float("-inf"), float("nan")])
def test_an_infinity_makes_nan_of_its_row_alone(kernel, what, device, monkeypatch):
    forced(monkeypatch, kernel, 128, rows=4 if kernel == "tile" else 1)
    clean = torch.randn(9, 100, device=device)
    x, dy = clean.clone(), torch.randn_like(clean)
    x[3, 7] = what
    others = torch.arange(9, device=device) != 3
    results = []
    for t in (clean, x):
        leaf = t.requires_grad_()
        y = layer_norm(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    for good, found in zip(*results, strict=True):
        assert found[3].isnan().all()
        assert_same((found[others],), (good[others],))


def test_large_and_small_rows_in_half_precision(device):
    """Squares of 6e4 overflow float16, squares of 1e-5 vanish in it: statistics are float32."""
    x = torch.randn(4, 64, device=device)
    for scale in (1e4, 1e-4):
        half = (x * scale).half()
        expected = reference.layer_norm(half.double(), eps=1e-12)
        assert relative_error(layer_norm(half, eps=1e-12), expected) < 1e-3


def test_rows_past_the_last_add_nothing_even_without_eps(device):
    """A tile of the backward may reach past the last row, where the variance is zero."""
    x, dy = torch.randn(2, 5, 64, device=device)
    leaves = [x.requires_grad_(), torch.ones(64, device=device, requires_grad=True)]
    grads = torch.autograd.grad(layer_norm(*leaves, eps=0.0), leaves, dy)
    assert all(g.isfinite().all() for g in grads)


# Weight and bias


def test_parameters_of_another_dtype(device):
    x = torch.randn(8, 64, device=device).to(BF16).requires_grad_()
    weight, bias = torch.randn(64, device=device).requires_grad_(), torch.randn(64, device=device).half()
    y = layer_norm(x, weight, bias.requires_grad_())
    grads = torch.autograd.grad(y, (x, weight, bias), torch.randn_like(y))
    assert (y.dtype, *(g.dtype for g in grads)) == (BF16, BF16, torch.float32, torch.float16)


def test_parameters_with_strides(device):
    x, vectors = torch.randn(4, 32, device=device), torch.randn(32, 3, device=device)
    weight, bias = vectors[:, 1], vectors[:, 2]
    assert_same((layer_norm(x, weight, bias),), (layer_norm(x, weight.contiguous(), bias.contiguous()),))


def test_gradients_of_many_rows_are_summed_in_float32(device):
    """A sum in bfloat16 would stop growing at 256 times its terms."""
    x = torch.tensor([-1.0, 1.0] * 4, device=device, dtype=BF16).expand(1024, 8)
    weight, bias = (torch.ones(8, device=device, dtype=BF16, requires_grad=True) for _ in range(2))
    layer_norm(x, weight, bias, eps=0.0).sum().backward()
    assert torch.equal(weight.grad, 1024 * x[0])
    assert torch.equal(bias.grad, torch.full((8,), 1024.0, device=device, dtype=BF16))


def test_frozen_parts_cost_nothing(device):
    x, weight, bias = torch.randn(8, 64, device=device), *torch.randn(2, 64, device=device)
    everything = None
    for asks in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        y = layer_norm(*(t.clone().requires_grad_(a) for t, a in zip((x, weight, bias), asks, strict=True)))
        with Calls() as record:
            y.square().sum().backward()
        ((op, _, grads),) = record.calls
        assert op._schema.name == "rooftile::layer_norm_backward"
        assert tuple(g.numel() > 0 for g in grads) == asks
        everything = everything or grads
        for a, found, expected in zip(asks, grads, everything, strict=True):
            assert_same((found,), (expected if a else expected[:0].view(-1),))


# Kernels


@pytest.mark.each_once
@every_kernel
@pytest.mark.parametrize("columns", [64, 100, 257])
def test_every_kernel_gives_the_formula_and_its_gradients(kernel, columns, device, monkeypatch):
    """The lengths that the long-row kernels are for cost the interpreter too much: they are given short rows here."""
    forced(monkeypatch, kernel, 128)
    x, dy = torch.randn(2, 9, columns, device=device)
    weight, bias = torch.randn(2, columns, device=device)
    check_against_float64((x, weight, bias), dy)
    check_against_float64((x,), dy)


def check_against_float64(given, dy):
    leaves = [t.clone().requires_grad_() for t in given]
    wide = [t.double().requires_grad_() for t in given]
    y, expected = layer_norm(*leaves), reference.layer_norm(*wide)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    ours, theirs = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, wide, dy.double())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def as_words(a, b):
    """What `publish_pair` writes for two tensors of float32."""
    low, high = (t.float().view(torch.int32).long() for t in (a, b))
    return ~((high << 32) | (low & 0xFFFFFFFF))


@pytest.mark.parametrize("columns", [300, 384, 385])
def test_rows_that_several_programs_share(columns, device, monkeypatch):
    """In the interpreter, which runs one program after the other, the words of all stand there from the beginning."""
    block = 128
    x, dy = torch.randn(2, 9, columns, device=device)
    x += 10 * torch.randn(9, 1, device=device)
    weight, bias = torch.randn(2, columns, device=device)
    published = []

    def words(*size, dtype, device):
        """The sums of g and of g * xhat over each program's columns, row by row."""
        xhat = torch.nn.functional.layer_norm(x.double(), (columns,), eps=1e-5)
        g = (dy * weight).double()
        parts = list(zip(g.split(block, 1), xhat.split(block, 1), strict=True))
        sums = as_words(
            torch.stack([p.sum(1) for p, _ in parts], 1), torch.stack([(p * h).sum(1) for p, h in parts], 1)
        )
        assert (sums.numel(), dtype) == (*size, torch.int64)
        sums = sums.flatten() ^ 3  # the last bits are off, so that a word which nobody wrote over shows
        published.append((sums, sums.clone()))
        return published[-1][0]

    monkeypatch.setattr(family, "backward_config", lambda *_: RowConfig("split", block, 4, per_sm=4))
    with monkeypatch.context() as patch:
        if INTERPRETED:
            patch.setattr(torch, "zeros", words)
        check_against_float64((x, weight, bias), dy)
    for found, expected in published:  # each program wrote over its own
        assert (found != expected).float().mean() > 0.7  # its sum may by chance have just those bits
        for a, b in zip(*((~w).view(torch.int32).view(torch.float32) for w in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_statistics_are_kept_where_gradients_will_be_asked_for(device):
    x, weight = torch.randn(4, 8, device=device), torch.ones(8, device=device, requires_grad=True)
    for learns in (True, False):
        with torch.set_grad_enabled(learns), Calls() as record:
            layer_norm(x, weight)
        ((_, _, (_, stats)),) = record.calls
        assert stats.shape == (4 if learns else 0, 3)
    assert not torch.ops.rooftile.layer_norm(x, weight, None, 1e-5, True)[1].requires_grad
    with pytest.raises(ValueError, match="layer_norm: keeps_stats is False, expected True"):
        torch.ops.rooftile.layer_norm(x, weight, None, 1e-5, False)


# Errors


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("shape", ERROR_SHAPES, ids=str)
def test_a_parameter_that_does_not_match(name, shape, device):
    x, vector = torch.randn(4, 8, device=device), torch.randn(shape, device=device)
    expected = rf"layer_norm: {name} has shape \({', ?'.join(map(str, shape))},?\), expected \(8,\) to match x's last"
    with pytest.raises(ValueError, match=expected):
        layer_norm(x, **{name: vector})


def test_other_wrong_arguments(device):
    x = torch.randn(4, 8, device=device)
    for shape in ((), (4, 0)):
        with pytest.raises(ValueError, match=r"layer_norm: x has shape .*, expected at least one dimension"):
            layer_norm(torch.empty(shape, device=device))
    for name in ("x", "weight", "bias"):
        with pytest.raises(TypeError, match=f"layer_norm: {name} has dtype torch.float64, expected float32"):
            layer_norm(**{"x": x, name: torch.randn(8, device=device, dtype=torch.float64)})
    with pytest.raises(TypeError, match="layer_norm: eps is None, expected a number"):
        layer_norm(x, eps=None)
    with pytest.raises(TypeError, match="positional"):
        layer_norm(x, None, None, 1e-5)


def test_an_input_that_is_negated_lazily(device):
    """The imaginary part of a conjugate is a view whose negative sign stands in a bit of the tensor."""
    x = torch.randn(4, 64, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(layer_norm(x), reference.layer_norm(x.clone()))


def test_meta_tensors_give_a_shape_through_the_public_function():
    y = layer_norm(torch.empty(2, 64, device="meta", dtype=BF16))
    assert (y.shape, y.dtype, y.device.type) == ((2, 64), BF16, "meta")


def test_forward_mode_derivatives_are_refused(device):
    x = torch.randn(4, 64, device=device)
    with pytest.raises(RuntimeError, match="layer_norm has no forward-mode derivative"):
        torch.func.jvp(layer_norm, (x,), (torch.ones_like(x),))


def test_the_backward_op_refuses_gradients_that_do_not_match(device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    for dy, error in ((torch.randn(3, 8, device=device), ValueError), (x.to(BF16), TypeError)):
        with pytest.raises(error, match="layer_norm_backward: dy has"):
            torch.ops.rooftile.layer_norm_backward(dy, x, weight, weight, torch.randn(4, 3, device=device), *3 * [True])
    with pytest.raises(ValueError, match=r"layer_norm_backward: stats has shape \(3, 3\), expected \(4, 3\)"):
        torch.ops.rooftile.layer_norm_backward(x, x, weight, weight, torch.randn(3, 3, device=device), *3 * [True])
