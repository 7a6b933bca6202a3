"""jsd: the formula and its ends, both gradients, small probabilities, the gradient that the forward writes, errors."""

import math

import pytest
import torch
from helpers import BF16
from test_kl_div import drawn

from rooftile.cases.check import relative_error
from rooftile.ops import divergence as ops
from rooftile.ops.divergence import REDUCTIONS, jsd, kl_div
from rooftile.primitives.rows import RowConfig
from rooftile.reference import divergence as reference

INF = math.inf
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_beta = pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])


def with_gradients(function, x, t, learn=(True, True), factor=1.5, **options):
    """The loss and the gradients of those that learn."""
    leaves = [a.detach().requires_grad_(learns) for a, learns in zip((x, t), learn, strict=True)]
    loss = function(*leaves, **options)
    steps = torch.linspace(factor, 2 * factor, max(1, loss.numel()), dtype=torch.float64, device=x.device)
    dloss = steps[: loss.numel()].to(loss.dtype).view(loss.shape)
    return loss.detach(), *torch.autograd.grad(loss, [a for a in leaves if a.requires_grad], dloss)


def assert_right(x, t, **options):
    for learn in ((True, False), (False, True), (True, True)):
        found = with_gradients(jsd, x, t, learn, **options)
        expected = with_gradients(reference.jsd, x.double(), t.double(), learn, **options)
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=2e-5, atol=2e-6)


@pytest.mark.each_once
@every_reduction
@every_beta
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 5)], ids=str)
def test_the_formula_and_its_gradients(shape, beta, reduction, device):
    assert_right(*drawn(*shape, device=device, log_target=True), beta=beta, reduction=reduction)


@every_reduction
def test_programs_that_add_several_tiles(reduction, device, monkeypatch):
    monkeypatch.setattr(ops, "config", lambda *_: RowConfig("tile", 64, 4, per_sm=1))
    monkeypatch.setattr(ops, "_SHARE", 5)
    x, t = drawn(7, 150, device=device, log_target=True)
    assert_right(x, t, reduction=reduction)
    wide = torch.full((7, 200), math.nan, device=device)
    wide[:, :150] = x
    assert_right(wide[:, :150], t, reduction=reduction)


def test_its_ends_are_the_two_divergences(device):
    x, t = drawn(9, 100, device=device, log_target=True)
    for beta, expected in (
        (0.0, kl_div(x, t, reduction="sum", log_target=True)),
        (1.0, kl_div(t, x, reduction="sum", log_target=True)),
    ):
        torch.testing.assert_close(jsd(x, t, beta=beta, reduction="sum"), expected)


def test_a_half_is_symmetric_and_at_most_log_2(device):
    x, t = drawn(9, 100, device=device, log_target=True)
    torch.testing.assert_close(jsd(x, t), jsd(t, x))
    disjoint = torch.full((2, 8), -INF, device=device)
    disjoint[0, :4] = disjoint[1, 4:] = math.log(0.25)
    torch.testing.assert_close(jsd(disjoint[:1], disjoint[1:]).item(), math.log(2))
    assert jsd(x, x).abs() < 1e-6


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_probabilities_of_zero_and_nearly_zero(beta, device):
    """exp(-200) is 0 in float32; a mixture of such has a logarithm all the same."""
    x, t = drawn(6, 64, device=device, log_target=True)
    x[0, ::2], t[1, ::2] = -INF, -INF
    x[2, ::2] = t[2, ::2] = -INF
    x[3], t[4] = x[3] - 200, t[4] - 200
    x[5], t[5] = x[5] - 300, t[5] - 200
    for reduction in ("sum", "none"):
        found = with_gradients(jsd, x, t, beta=beta, reduction=reduction)
        assert all(torch.isfinite(a).all() for a in found)
    expected = reference.jsd(x.double(), t.double(), beta=beta, reduction="none")
    torch.testing.assert_close(jsd(x, t, beta=beta, reduction="none").double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_forward_writes_the_gradient_where_only_input_needs_one(dtype, device):
    x, t = drawn(5, 64, device=device, log_target=True, dtype=dtype)
    leaf = x.requires_grad_()
    loss = jsd(leaf, t)
    (written,) = loss.grad_fn.saved_tensors
    expected, address = written.clone(), written.data_ptr()
    (grad,) = torch.autograd.grad(loss, leaf)
    assert grad.data_ptr() == address
    assert torch.equal(grad, expected)
    for options in ({"reduction": "none"}, {"t": t.clone().requires_grad_()}):
        loss = jsd(leaf, options.pop("t", t), **options)  # PyTorch 2.11 frees what it saved with it
        assert loss.grad_fn.saved_tensors[0].data_ptr() == leaf.data_ptr()


def test_a_graph_that_is_kept_can_be_walked_again(device):
    x, t = drawn(5, 64, device=device, log_target=True)
    leaf = x.requires_grad_()
    loss = jsd(leaf, t)
    grads = [torch.autograd.grad(f * loss, leaf, retain_graph=f < 4)[0] for f in (1.0, 3.0, 4.0)]
    for grad, factor in zip(grads, (1, 3, 4), strict=True):
        torch.testing.assert_close(grad, factor * grads[0])


@pytest.mark.parametrize("learn", [(True, False), (False, True), (True, True)], ids=str)
def test_a_second_derivative_is_an_error(learn, device):
    leaves = [a.requires_grad_(on) for a, on in zip(drawn(5, 64, device=device, log_target=True), learn, strict=True)]
    learned = [a for a in leaves if a.requires_grad]
    grads = torch.autograd.grad(jsd(*leaves), learned, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        sum(g.square().sum() for g in grads).backward()


def test_a_loss_scaler_keeps_small_gradients_of_float16(device):
    x, t = drawn(8, 64, device=device, log_target=True, dtype=torch.float16)
    x, t = x - 6, t - 6
    options = {"learn": (True, False), "factor": 2.0**12}
    truth = with_gradients(reference.jsd, x.double(), t.double(), **options)[1]
    assert relative_error(with_gradients(jsd, x, t, **options)[1], truth) < 2e-3


@every_reduction
def test_no_elements(reduction, device):
    for shape in ((0, 5), (5, 0)):
        x = torch.randn(shape, device=device)
        loss, dx = with_gradients(jsd, x, x, (True, False), reduction=reduction)
        expected = kl_div(x, x, reduction=reduction, log_target=True)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        assert dx.shape == x.shape


def test_wrong_arguments(device):
    x, t = drawn(4, 8, device=device, log_target=True)
    with pytest.raises(ValueError, match=r"jsd: target has shape \(8,\), expected \(4, 8\) to match input"):
        jsd(x, t[0])
    with pytest.raises(TypeError, match=r"jsd: target has dtype torch.bfloat16, expected torch.float32"):
        jsd(x, t.to(BF16))
    for beta in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"jsd: beta is {beta}, expected a number from 0 to 1"):
            jsd(x, t, beta=beta)
    with pytest.raises(TypeError, match="jsd: beta is a Tensor, expected a number"):
        jsd(x, t, beta=torch.tensor(0.5))
    with pytest.raises(ValueError, match="jsd: reduction is 'avg', expected one of mean, none, sum, batchmean"):
        jsd(x, t, reduction="avg")
    with pytest.raises(ValueError, match=r"jsd: gradient is 'now', expected .*, not 'now' with 'none'"):
        torch.ops.rooftile.jsd(x, t, 0.5, "none", "now")
    with pytest.raises(ValueError, match="jsd: gradient is 'none', expected 'now' or 'later'"):
        torch.ops.rooftile.jsd(x.requires_grad_(), t, 0.5, "sum", "none")
    with pytest.raises(ValueError, match="jsd: gradient is 'now', expected 'later', as target needs a gradient"):
        torch.ops.rooftile.jsd(x, t.requires_grad_(), 0.5, "sum", "now")
