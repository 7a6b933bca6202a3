"""rms_norm: rounding modes, shapes, errors."""

import numpy
import pytest
import torch
from helpers import BF16, Calls, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.ops.rms_norm import backward, forward
from rooftile.primitives.cta_exchange import split
from rooftile.primitives.rows import RowConfig
from rooftile.reference import rms_norm as reference

FEW = settings(max_examples=15)
ERROR_SHAPES = [(4,), (), (8, 2), (2, 8), (1, 8), (9,)]


@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    cols=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
    rounding=st.sampled_from(["llama", "gemma", "none"]),
    offset=st.sampled_from([0.0, 1.0, -0.25]),
    with_weight=st.booleans(),
)
@FEW
def test_any_leading_shape(leading, cols, dtype, rounding, offset, with_weight):
    device = rooftile_device()
    x = torch.randn(*leading, cols, device=device).to(dtype)
    weight = torch.randn(cols, device=device).to(dtype) if with_weight else None
    offset = offset if with_weight else 0.0
    y = rooftile.rms_norm(x, weight, offset=offset, rounding=rounding)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    expected = reference.rms_norm(x.double(), None if weight is None else weight.double(), offset=offset)
    assert relative_error(y, expected) <= 2 * torch.finfo(dtype).eps


def rooftile_device():
    from rooftile import runtime

    return runtime.default_device()


def test_rounding_modes_differ_where_the_models_do(device):
    """In bfloat16, bit-identical: Llama rounds the row before the weight, Gemma and PyTorch only at the end."""
    x, weight = torch.randn(64, 128, device=device).to(BF16), torch.randn(128, device=device).to(BF16)
    llama, gemma, none = (rooftile.rms_norm(x, weight, rounding=r) for r in ("llama", "gemma", "none"))
    assert torch.equal(gemma, none)
    assert not torch.equal(llama, gemma)
    for rounding, y in (("llama", llama), ("gemma", gemma)):
        expected = reference.eager(x, weight, rounding=rounding)
        assert (y == expected).float().mean() > 0.995  # a row's statistics may differ in the last bit


def test_gemma_offset_is_added_in_float32(device):
    """1 + 2^-10 is 1 in bfloat16: added there, the weight would be lost."""
    x = torch.randn(8, 64, device=device).to(BF16)
    weight = torch.full((64,), 2.0**-10, device=device, dtype=BF16)
    y = rooftile.rms_norm(x, weight, offset=1.0, rounding="gemma")
    assert (y == reference.eager(x, weight, offset=1.0, rounding="gemma")).float().mean() > 0.995


def test_a_weight_of_another_dtype(device):
    x = torch.randn(8, 64, device=device).to(BF16).requires_grad_()
    weight = torch.randn(64, device=device).requires_grad_()
    y = rooftile.rms_norm(x, weight)
    assert y.dtype == BF16
    dx, dw = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert (dx.dtype, dw.dtype) == (BF16, torch.float32)


def test_a_weight_with_strides(device):
    x, weights = torch.randn(4, 32, device=device), torch.randn(32, 3, device=device)
    assert_same((rooftile.rms_norm(x, weights[:, 1]),), (rooftile.rms_norm(x, weights[:, 1].contiguous()),))


def test_large_and_small_rows_in_half_precision(device):
    """Squares of 6e4 overflow float16, squares of 1e-5 vanish in it: statistics are float32."""
    x = torch.randn(4, 64, device=device)
    for scale in (1e4, 1e-4):
        half = (x * scale).half()
        expected = reference.rms_norm(half.double(), eps=1e-12)
        assert relative_error(rooftile.rms_norm(half, eps=1e-12), expected) < 1e-3


def test_dweight_of_many_rows_is_summed_in_float32(device):
    """A sum in bfloat16 would stop growing at 256 times its terms."""
    x = torch.ones(4096, 8, device=device, dtype=BF16)
    weight = torch.ones(8, device=device, dtype=BF16, requires_grad=True)
    rooftile.rms_norm(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((8,), 4096.0, device=device, dtype=BF16))


def test_frozen_parts_cost_nothing(device):
    x, weight = torch.randn(8, 64, device=device), torch.randn(64, device=device)
    for x_asks, weight_asks in ((True, False), (False, True)):
        y = rooftile.rms_norm(x.clone().requires_grad_(x_asks), weight.clone().requires_grad_(weight_asks))
        with Calls() as record:
            y.sum().backward()
        ((op, _, (dx, dw)),) = record.calls
        assert op._schema.name == "rooftile::rms_norm_backward"
        assert (dx.numel() > 0, dw.numel() > 0) == (x_asks, weight_asks)


@pytest.mark.parametrize("shape", ERROR_SHAPES, ids=str)
def test_a_weight_that_does_not_match(shape, device):
    x, weight = torch.randn(4, 8, device=device), torch.randn(shape, device=device)
    expected = rf"rms_norm: weight has shape \({', ?'.join(map(str, shape))},?\), expected \(8,\) to match x's last"
    with pytest.raises(ValueError, match=expected):
        rooftile.rms_norm(x, weight)


def test_other_wrong_arguments(device):
    x = torch.randn(4, 8, device=device)
    for shape in ((), (4, 0)):
        with pytest.raises(ValueError, match=r"rms_norm: x has shape .*, expected at least one dimension"):
            rooftile.rms_norm(torch.empty(shape, device=device))
    with pytest.raises(ValueError, match="rms_norm: rounding is 'lama', expected one of llama, gemma, none"):
        rooftile.rms_norm(x, rounding="lama")
    for call in (
        lambda: rooftile.rms_norm(x, offset=1.0),
        lambda: rooftile.add_rms_norm(x, x, offset=1.0),
        lambda: rooftile.rms_norm(x, offset=1.0, quantize=rooftile.Quantize()),
    ):
        with pytest.raises(ValueError, match=r"rms_norm\w*: offset is 1.0, expected 0 without a weight"):
            call()
    with pytest.raises(TypeError, match="positional"):
        rooftile.rms_norm(x, None, 1e-6)


@pytest.mark.parametrize(("kernel", "held"), [("tile", 0), ("loop", 0), ("loop", 1), ("loop", 3)])
@pytest.mark.parametrize("columns", [64, 100, 257])
def test_every_forward_kernel_gives_the_formula(kernel, held, columns, device, monkeypatch):
    """The lengths that the loop is for cost the interpreter too much: it is given short rows here."""
    forced = RowConfig(kernel, 512 if kernel == "tile" else 128, num_warps=4, held=held)
    monkeypatch.setattr(forward, "config", lambda *_: forced)
    x, residual = torch.randn(2, 9, columns, device=device)
    weight = torch.randn(columns, device=device)
    torch.testing.assert_close(rooftile.rms_norm(x, weight), reference.rms_norm(x, weight))
    y, u = rooftile.add_rms_norm(x, residual, weight, offset=1.0, rounding="gemma")
    torch.testing.assert_close(u, x + residual)
    torch.testing.assert_close(y, reference.rms_norm(x + residual, weight, offset=1.0))


@pytest.mark.parametrize("kernel", ["tile", "split"])
@pytest.mark.parametrize("columns", [64, 100, 257])
def test_every_backward_kernel_gives_the_gradients(kernel, columns, device, monkeypatch):
    block = 512 if kernel == "tile" or runtime.MODE is runtime.Mode.INTERPRETER else 128
    monkeypatch.setattr(backward, "config", lambda *_: RowConfig(kernel, block, 4, 1))
    x, residual, dy, du = torch.randn(4, 9, columns, device=device)
    weight = torch.randn(columns, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    y, u = rooftile.add_rms_norm(*leaves)
    ours = torch.autograd.grad((y, u), leaves, (dy, du))
    leaves = [t.double().requires_grad_() for t in (x, residual, weight)]
    u = leaves[0] + leaves[1]
    theirs = torch.autograd.grad((reference.rms_norm(u, leaves[2]), u), leaves, (dy.double(), du.double()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_splits_cover_the_row_and_stay_resident():
    for rows, columns in ((1, 16385), (2048, 65536), (7, 65537), (1024, 131072)):
        splits, lanes = split("rms_norm", rows, columns, 2048, 528)
        assert (splits - 1) * 2048 < columns <= splits * 2048
        assert 1 <= lanes <= rows
        assert splits * lanes <= 528
    with pytest.raises(ValueError, match="last dimension of 5000, expected at most 4096"):
        split("rms_norm", 3, 5000, 2048, 2)


def test_eps_and_offset_must_be_numbers(device):
    x = torch.randn(4, 8, device=device)
    with pytest.raises(TypeError, match="rms_norm: eps is a bool, expected a number"):
        rooftile.rms_norm(x, eps=True)
    with pytest.raises(TypeError, match="rms_norm: eps is None, expected a number"):
        rooftile.rms_norm(x, eps=None)
    with pytest.raises(TypeError, match="add_rms_norm: offset is a Tensor, expected a number"):
        rooftile.add_rms_norm(x, x, offset=torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"rms_norm: eps is a numpy.float32, expected .*Python's, such as float\(eps\)"):
        rooftile.rms_norm(x, eps=numpy.float32(1e-6))
    expected = rooftile.rms_norm(x, eps=1e-6)
    assert torch.equal(rooftile.rms_norm(x, eps=numpy.float64(1e-6)), expected)


def test_an_input_that_is_negated_lazily(device):
    """The imaginary part of a conjugate is a view whose negative sign stands in a bit of the tensor."""
    x = torch.randn(4, 64, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(rooftile.rms_norm(x), reference.rms_norm(x.clone()))


def test_meta_tensors_give_a_shape_through_the_public_function():
    y = rooftile.rms_norm(torch.empty(2, 64, device="meta", dtype=BF16))
    assert (y.shape, y.dtype, y.device.type) == ((2, 64), BF16, "meta")


def test_forward_mode_derivatives_are_refused(device):
    x = torch.randn(4, 64, device=device)
    with pytest.raises(RuntimeError, match="rms_norm has no forward-mode derivative"):
        torch.func.jvp(rooftile.rms_norm, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match="rms_norm has no forward-mode derivative"):
            rooftile.rms_norm(dual)


def test_the_backward_op_refuses_gradients_that_do_not_match(device):
    u, weight = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    for dy, error in ((torch.randn(3, 8, device=device), ValueError), (u.to(BF16), TypeError)):
        with pytest.raises(error, match="rms_norm_backward: dy has"):
            torch.ops.rooftile.rms_norm_backward(dy, None, u, weight, 1e-6, 0.0, "llama", True, True)


def test_rows_past_the_last_add_nothing_even_without_eps(device):
    """A tile of the backward may reach past the last row, where the sum of squares is zero."""
    x, dy = torch.randn(2, 5, 64, device=device)
    leaves = [x.requires_grad_(), torch.ones(64, device=device, requires_grad=True)]
    grads = torch.autograd.grad(rooftile.rms_norm(*leaves, eps=0.0), leaves, dy)
    assert all(g.isfinite().all() for g in grads)
