"""kl_div: PyTorch's values and gradients, targets of 0, what is kept in memory, reductions over many tiles, errors."""

import math

import pytest
import torch
from helpers import BF16
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from rooftile import launching, runtime
from rooftile.cases.check import relative_error
from rooftile.cases.divergence import KL_TOLERANCES as TOLERANCES
from rooftile.ops import divergence as ops
from rooftile.ops.divergence import REDUCTIONS, kl_div
from rooftile.primitives.rows import RowConfig
from rooftile.reference import divergence as reference

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
both_targets = pytest.mark.parametrize("log_target", [False, True], ids=["target", "log target"])


def drawn(*shape, device, log_target=False, dtype=torch.float32):
    """The logarithm of a distribution over the last dimension, and another distribution."""
    x, t = torch.randn(2, *shape, device=device).unbind()
    target = t.log_softmax(-1) if log_target else t.softmax(-1)
    return x.log_softmax(-1).to(dtype), target.to(dtype)


def with_gradients(function, x, t, **options):
    """The loss and both gradients, for a gradient of the loss that is not 1."""
    leaves = x.detach().requires_grad_(), t.detach().requires_grad_()
    loss = function(*leaves, **options)
    weights = torch.linspace(0.5, 2, max(loss.numel(), 1), dtype=torch.float64, device=x.device)
    dloss = weights[: loss.numel()].to(loss.dtype).view(loss.shape)
    return loss.detach(), *torch.autograd.grad(loss, leaves, dloss)


def assert_right(x, t, **options):
    found = with_gradients(kl_div, x, t, **options)
    expected = with_gradients(reference.kl_div, x.double(), t.double(), **options)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=2e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:reduction. 'mean':UserWarning")
@every_reduction
@both_targets
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 5)], ids=str)
def test_it_is_pytorchs(shape, reduction, log_target, device):
    x, t = drawn(*(shape or (1,)), device=device, log_target=log_target)
    x, t = x.view(shape), t.view(shape)
    options = {"reduction": reduction, "log_target": log_target}
    found = with_gradients(kl_div, x, t, **options)
    expected = with_gradients(torch.nn.functional.kl_div, x, t, **options)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e)


@given(
    shape=st.lists(st.integers(1, 9), max_size=3),
    cols=st.integers(1, 300),
    dtype=st.sampled_from(list(TOLERANCES)),
    reduction=st.sampled_from(REDUCTIONS),
    log_target=st.booleans(),
)
@settings(max_examples=15)
def test_any_shape(shape, cols, dtype, reduction, log_target):
    options = {"reduction": reduction, "log_target": log_target}
    x, t = drawn(*shape, cols, device=runtime.default_device(), log_target=log_target, dtype=dtype)
    loss = kl_div(x, t, **options)
    assert (loss.dtype, loss.is_contiguous()) == (dtype, True)
    assert loss.shape == (x.shape if reduction == "none" else ())
    expected = reference.kl_div(x.double(), t.double(), **options)
    # Terms of both signs may cancel: the error is then relative to what is added.
    size = reference.kl_div(x.double(), t.double(), log_target=log_target, reduction="none").abs().sum()
    scale = max(float(size), 1e-3) if reduction == "sum" else max(float(expected.norm()), float(size) / x.numel(), 1e-3)
    assert relative_error(loss, expected) * float(expected.norm()) <= 2 * TOLERANCES[dtype]["forward"].ceiling * scale


@every_reduction
@both_targets
def test_programs_that_add_several_tiles(reduction, log_target, device, monkeypatch):
    """Rows that end within a tile, and one long row; more tiles than programs."""
    monkeypatch.setattr(ops, "config", lambda *_: RowConfig("tile", 64, 4, per_sm=1))
    monkeypatch.setattr(ops, "_SHARE", 5)
    x, t = drawn(7, 150, device=device, log_target=log_target)
    assert_right(x, t, reduction=reduction, log_target=log_target)
    wide = torch.full((7, 200), math.nan, device=device)
    wide[:, :150] = x
    assert_right(wide[:, :150], t, reduction=reduction, log_target=log_target)


def test_many_numbers_are_added_without_loss(device):
    """Element by element in one float32 they would be 1e-4 off."""
    x, t = drawn(64, 4096, device=device)
    assert (
        relative_error(kl_div(x, t, reduction="sum"), reference.kl_div(x.double(), t.double(), reduction="sum")) < 1e-6
    )


@every_reduction
def test_a_target_of_zero_adds_nothing_and_has_no_gradient(reduction, device):
    x, t = drawn(5, 64, device=device)
    t[:, ::3] = 0
    assert_right(x, t, reduction=reduction)
    loss, dx, dt = with_gradients(kl_div, x, t, reduction=reduction)
    assert torch.isfinite(loss).all()
    assert (dx[:, ::3] == 0).all()
    assert (dt[:, ::3] == 0).all()


@pytest.mark.parametrize("bad", ["input", "target"])
def test_infinite_logarithms_are_nan_as_pytorchs(bad, device):
    x, t = drawn(3, 8, device=device, log_target=bad == "target")
    (x if bad == "input" else t)[1, 2] = -math.inf
    if bad == "input":
        t[1, 2] = 0
    options = {"log_target": bad == "target", "reduction": "none"}
    torch.testing.assert_close(kl_div(x, t, **options), torch.nn.functional.kl_div(x, t, **options), equal_nan=True)
    assert kl_div(x, t, **options).isnan().sum() == 1


def test_the_same_distribution_has_no_divergence(device):
    x, _ = drawn(9, 100, device=device)
    assert kl_div(x, x.exp(), reduction="batchmean").abs() < 1e-6
    assert kl_div(x, x, reduction="batchmean", log_target=True) == 0


@every_reduction
def test_no_elements(reduction, device):
    for shape in ((0, 5), (5, 0), (0,)):
        x = torch.randn(shape, device=device)
        loss, dx, dt = with_gradients(kl_div, x, x, reduction=reduction)
        expected = reference.kl_div(x, x, reduction=reduction) if reduction != "batchmean" or shape[0] else x.sum() / 0
        torch.testing.assert_close(loss, expected, equal_nan=True)
        assert dx.shape == dt.shape == x.shape


def test_only_what_the_backward_reads_is_kept(device):
    """A student's log-probabilities are as large as all its logits: not kept where the teacher learns nothing."""
    x, t = drawn(4, 64, device=device)
    for learns, kept in ((False, [t]), (True, [x, t])):
        loss = kl_div(x.requires_grad_(), t.requires_grad_(learns))  # PyTorch 2.11 frees what it saved with it
        assert [s.data_ptr() for s in loss.grad_fn.saved_tensors if s is not None] == [k.data_ptr() for k in kept]


def test_an_expanded_gradient_of_each_element(device):
    x, t = drawn(4, 33, device=device)
    leaf = x.clone().requires_grad_()
    kl_div(leaf, t, reduction="none").sum().backward()
    torch.testing.assert_close(leaf.grad, -t)


def test_a_symbolic_shape_leaves_the_op_whole(device):
    """A mean divides by the number of elements, which a launch in a graph would fix."""
    shapes = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = shapes.from_tensor(torch.randn(4, 64, device=device), symbolic_context=sizes)
    with shapes:
        for launch in (
            lambda: ops.prepare_kl(x, x, "mean", False),
            lambda: ops.prepare_kl_backward(x[0, 0], None, x, "mean", False, True, False),
        ):
            with pytest.raises(launching.Untraceable, match="symbolic shape"):
                launch()


def test_wrong_arguments(device):
    x, t = drawn(4, 8, device=device)
    with pytest.raises(ValueError, match=r"kl_div: target has shape \(8,\), expected \(4, 8\) to match input"):
        kl_div(x, t[0])
    with pytest.raises(ValueError, match=r"kl_div: target has shape \(1, 8\), expected \(4, 8\) to match input"):
        kl_div(x, t[:1])
    with pytest.raises(TypeError, match=r"kl_div: target has dtype torch.bfloat16, expected torch.float32"):
        kl_div(x, t.to(BF16))
    with pytest.raises(TypeError, match=r"kl_div: input has dtype torch.int64, expected float32, float16 or bfloat16"):
        kl_div(x.long(), t.long())
    with pytest.raises(ValueError, match="kl_div: reduction is 'avg', expected one of mean, none, sum, batchmean"):
        kl_div(x, t, reduction="avg")
    with pytest.raises(TypeError, match="kl_div: log_target is an int, expected a bool"):
        kl_div(x, t, log_target=1)
    with pytest.raises(TypeError, match="positional"):
        kl_div(x, t, "sum")
    with pytest.raises(ValueError, match=r"kl_div_backward: dloss has shape \(4,\), expected \(\)"):
        torch.ops.rooftile.kl_div_backward(x[:, 0], None, t, "sum", False, True, False)
    with pytest.raises(ValueError, match="kl_div_backward: input is None, expected a tensor, as needs_dtarget is set"):
        torch.ops.rooftile.kl_div_backward(x[0, 0], None, t, "sum", False, True, True)
