"""cross_entropy: PyTorch's values and gradients, every option, its kernels, ignored and wrong targets, statistics."""

import itertools
import math

import pytest
import torch
from helpers import BF16, Calls, assert_same, in_pairs, nightly_but
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.cases.cross_entropy import TOLERANCES
from rooftile.ops.cross_entropy import TokenStats, cross_entropy, forward
from rooftile.primitives.rows import RowConfig
from rooftile.reference import cross_entropy as reference

INF, NAN = math.inf, math.nan
REDUCTIONS = ("mean", "sum", "none")
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


def drawn(*leading, classes, device, dtype=torch.float32, ignored=0.2, ignore_index=-100):
    """Logits and targets, some of them ignored."""
    logits = 2 * torch.randn(*leading, classes, device=device)
    target = torch.randint(classes, leading, device=device)
    target = torch.where(torch.rand(leading, device=device) < ignored, ignore_index, target)
    return logits.to(dtype), target


def with_gradient(function, logits, target, factor=1.0, **options):
    """The loss and the gradient of logits; `factor` is the gradient of the loss, or of the first row's."""
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, target, **options)
    steps = torch.linspace(factor, 2 * factor, max(1, loss.numel()), dtype=torch.float64, device=logits.device)
    dloss = steps[: loss.numel()].view(loss.shape).to(loss.dtype)
    return loss.detach(), torch.autograd.grad(loss, leaf, dloss)[0]


def in_float64(options):
    return {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in options.items()}


def assert_right(logits, target, factor=1.0, **options):
    """The loss and the gradient against the formula in float64."""
    loss, grad = with_gradient(cross_entropy, logits, target, factor, **options)
    truth = with_gradient(reference.cross_entropy, logits.double(), target, factor, **in_float64(options))
    assert (loss.dtype, loss.shape) == (torch.float32, truth[0].shape)
    assert (grad.dtype, grad.shape, grad.is_contiguous()) == (logits.dtype, logits.shape, True)
    torch.testing.assert_close(loss.double(), truth[0], rtol=2e-6, atol=2e-6)
    ceiling = TOLERANCES[logits.dtype]["backward"].ceiling
    assert relative_error(grad, truth[1]) <= ceiling, options


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class weights"])
def test_it_is_pytorchs(reduction, smoothing, weighted, device):
    logits, target = drawn(23, classes=37, device=device, ignore_index=5)
    weight = torch.rand(37, device=device) if weighted else None
    options = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction, "ignore_index": 5}
    found = with_gradient(cross_entropy, logits, target, 0.5, **options)
    expected = with_gradient(torch.nn.functional.cross_entropy, logits, target, 0.5, **options)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e)


OPTIONS = {
    "label_smoothing": (0.0, 0.2),
    "z_loss": (0.0, 1e-2),
    "softcap": (None, 3.0),
    "reduction": REDUCTIONS,
}


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("weights", nightly_but(("", "both"), ("", "class", "token", "both")))
def test_every_combination_of_options(weights, half, device):
    """Each pair of them is in the first half."""
    logits, target = drawn(2, 5, classes=33, device=device)
    given = {}
    if weights in ("class", "both"):
        given["weight"] = torch.rand(33, device=device)
    if weights in ("token", "both"):
        given["token_weights"] = torch.randn(2, 5, device=device)  # of either sign, as advantages are
    for chosen in itertools.product(*map(enumerate, OPTIONS.values())):
        if sum(i for i, _ in chosen) % 2 == half:
            options = {name: value for name, (_, value) in zip(OPTIONS, chosen, strict=True)}
            assert_right(logits, target, 1.5, **options, **given)


@given(
    leading=st.lists(st.integers(1, 5), max_size=3),
    classes=st.integers(1, 70),
    dtype=st.sampled_from(list(TOLERANCES)),
    int32=st.booleans(),
    reduction=st.sampled_from(REDUCTIONS),
    weighted=st.booleans(),
    factor=st.sampled_from([1.0, 3.0]),
)
@settings(max_examples=20)
def test_any_shape(leading, classes, dtype, int32, reduction, weighted, factor):
    device = runtime.default_device()
    logits, target = drawn(*leading, classes=classes, device=device, dtype=dtype)
    weight = 0.5 + torch.rand(classes, device=device) if weighted else None
    target = target.int() if int32 else target
    if classes == 1:  # its gradient is 0, to which no error is relative
        assert (with_gradient(cross_entropy, logits, target)[1] == 0).all()
    else:
        assert_right(logits, target, factor, reduction=reduction, weight=weight)


@pytest.mark.parametrize(("held", "classes", "pack"), in_pairs((0, 1, 3), (64, 130, 192), (1, 4)))
def test_rows_of_several_blocks(held, classes, pack, device, monkeypatch):
    """In registers, in part, and not at all."""
    held = min(held, -(-classes // 64))
    monkeypatch.setattr(forward, "config", lambda *_: RowConfig("loop", 64, 2, held=held))
    monkeypatch.setattr(forward, "elements_at_once", lambda *_: pack)
    logits, target = drawn(7, classes=classes, device=device)
    weight = torch.rand(classes, device=device)
    for dtype in (torch.float32, BF16):
        assert_right(logits.to(dtype), target)
        assert_right(logits.to(dtype), target, weight=weight, label_smoothing=0.1, z_loss=1e-2, softcap=4.0)
    assert_statistics(logits, target)
    assert_statistics(logits.round(), target, softcap=4.0)


# The gradient that the forward writes


def test_a_factor_of_one_leaves_the_gradient_as_the_forward_wrote_it(device):
    """In bfloat16 a product would round it again, and memory is written once."""
    logits, target = drawn(5, classes=64, device=device, dtype=BF16)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target)
    (written,) = loss.grad_fn.saved_tensors
    expected, address = written.clone(), written.data_ptr()
    (grad,) = torch.autograd.grad(loss, leaf)
    assert grad.data_ptr() == address
    assert_same((grad,), (expected,))


def test_a_graph_that_is_kept_can_be_walked_again(device):
    logits, target = drawn(5, classes=64, device=device)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target)
    grads = [torch.autograd.grad(f * loss, leaf, retain_graph=f < 4)[0] for f in (1.0, 3.0, 1.0, 4.0)]
    for grad, factor in zip(grads, (1, 3, 1, 4), strict=True):
        torch.testing.assert_close(grad, factor * grads[0])


def test_a_graph_that_is_not_kept_can_not(device):
    logits, target = drawn(5, classes=64, device=device)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target)
    torch.autograd.grad(loss, leaf)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaf)


def test_logits_are_kept_only_where_the_backward_reads_them(device):
    logits, target = drawn(5, classes=64, device=device)
    leaf = logits.requires_grad_()
    for reduction, kept in (("mean", False), ("sum", False), ("none", True)):
        loss = cross_entropy(leaf, target, reduction=reduction)  # PyTorch 2.11 frees what it saved with it
        saved = loss.grad_fn.saved_tensors
        assert any(t is not None and t.data_ptr() == leaf.data_ptr() for t in saved) == kept
    half = leaf.detach().half().requires_grad_()
    loss = cross_entropy(half, target)
    assert any(t is not None and t.data_ptr() == half.data_ptr() for t in loss.grad_fn.saved_tensors)


def test_without_a_gradient_none_is_written(device):
    logits, target = drawn(5, classes=64, device=device)
    for leaf, grad in ((logits, True), (logits.clone().requires_grad_(), False)):
        with torch.set_grad_enabled(grad), Calls() as record:
            cross_entropy(leaf, target)
        ((_, _, (_, saved)),) = record.calls
        assert saved.numel() == 0


def test_a_loss_scaler_keeps_small_gradients_of_float16(device):
    """Before the scaler's factor they are subnormal numbers, as those of a mean over thousands of tokens."""
    logits, target = drawn(16, classes=16, device=device, dtype=torch.float16, ignored=0)
    options = {"reduction": "sum", "token_weights": torch.full((16,), 1e-5, device=device)}
    truth = with_gradient(reference.cross_entropy, logits.double(), target, 2.0**14, **in_float64(options))[1]
    assert relative_error(with_gradient(cross_entropy, logits, target, 2.0**14, **options)[1], truth) < 1e-3


@every_reduction
def test_a_second_derivative_is_an_error(reduction, device):
    logits, target = drawn(5, classes=64, device=device)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        torch.autograd.grad(grad.square().sum(), leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        grad.square().sum().backward()


def test_a_soft_cap_of_0_is_none_as_in_attention(device):
    logits, target = torch.randn(3, 8, device=device), torch.tensor([1, 5, 0], device=device)
    plain = cross_entropy(logits, target)
    assert torch.equal(cross_entropy(logits, target, softcap=0.0), plain)
    assert not torch.equal(cross_entropy(logits, target, softcap=1.0), plain)


# Which rows count


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.1}, {"softcap": 2.0}], ids=str)
def test_ignored_rows_may_hold_anything(reduction, options, device):
    logits, target = drawn(6, classes=65, device=device, ignored=0)
    target[[1, 4]] = -100
    expected = with_gradient(cross_entropy, logits, target, reduction=reduction, **options)
    for filling in (NAN, INF, -INF):
        logits[[1, 4]] = filling
        found = with_gradient(cross_entropy, logits, target, reduction=reduction, **options)
        assert_same(found, expected)
        assert (found[1][[1, 4]] == 0).all()


@every_reduction
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_all_targets_ignored(reduction, weighted, device):
    logits, target = drawn(6, classes=65, device=device, ignored=1.0)
    weights = {"weight": torch.rand(65, device=device), "token_weights": torch.rand(6, device=device)}
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1, **(weights if weighted else {})}
    loss, grad = with_gradient(cross_entropy, logits, target, **options)
    assert (loss == 0).all()
    assert (grad == 0).all()


def test_weights_that_are_all_zero(device):
    logits, target = drawn(6, classes=65, device=device)
    for weights in ({"weight": torch.zeros(65, device=device)}, {"token_weights": torch.zeros(6, device=device)}):
        loss, grad = with_gradient(cross_entropy, logits, target, **weights)
        assert loss == 0
        assert (grad == 0).all()


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("bad", [65, 2**31 - 1, 2**40, -1, -99])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
def test_a_target_out_of_range_makes_its_row_nan_and_reads_nothing(bad, reduction, weighted, device):
    logits, target = drawn(6, classes=65, device=device, ignored=0)
    weight = torch.rand(65, device=device) if weighted else None
    options = {"reduction": reduction, "weight": weight, "label_smoothing": 0.1}
    clean = with_gradient(cross_entropy, logits, target, **options)
    target[3] = bad
    loss, grad = with_gradient(cross_entropy, logits, target, **options)
    assert grad[3].isnan().all()
    if reduction == "none":
        assert loss.isnan().tolist() == [i == 3 for i in range(6)]
    else:
        assert loss.isnan()
    if reduction != "mean":
        others = [0, 1, 2, 4, 5]
        assert_same((grad[others],), (clean[1][others],))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_or_infinity_spoils_its_row_alone(bad, device):
    logits, target = drawn(6, classes=65, device=device, ignored=0)
    clean = with_gradient(cross_entropy, logits, target, reduction="sum")[1]
    logits[2, 64] = bad
    loss, grad = with_gradient(cross_entropy, logits, target, reduction="sum")
    assert loss.isnan()
    assert grad.isnan().any(-1).tolist() == [i == 2 for i in range(6)]
    others = [0, 1, 3, 4, 5]
    assert_same((grad[others],), (clean[others],))


def test_classes_that_are_masked_with_minus_infinity(device):
    logits, target = drawn(6, classes=64, device=device)
    logits[:, 1::2] = -INF
    target = torch.where(target == -100, target, target // 2 * 2)
    loss, grad = with_gradient(cross_entropy, logits, target)
    expected = with_gradient(
        cross_entropy, logits[:, ::2].contiguous(), target.div(2, rounding_mode="floor").where(target >= 0, target)
    )
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grad[:, ::2], expected[1])
    assert (grad[:, 1::2] == 0).all()


def test_vocabularies_past_262144(device):
    for classes in (262_144, 300_007):
        logits, target = drawn(3, classes=classes, device=device, ignored=0.0)
        target[0] = classes - 1
        assert_right(logits, target)
        assert_right(logits, target, reduction="none", label_smoothing=0.1)


def test_large_logits(device):
    """Differences from the maximum are taken first."""
    logits, target = drawn(6, classes=64, device=device)
    exact = (logits * 64).round() / 64
    for moved in (exact + 1e4, exact - 1e4):
        assert_same(with_gradient(cross_entropy, moved, target)[1:], with_gradient(cross_entropy, exact, target)[1:])
    assert_right(1e30 * exact.sign() * torch.rand_like(exact), target)


def test_small_losses_of_large_logits_keep_their_digits(device):
    """Of tokens that are nearly certain, as most are to a trained model: no worse than PyTorch's own."""
    logits, target = drawn(64, classes=500, device=device, ignored=0.0)
    logits = (logits + 18).scatter_(1, target[:, None], torch.rand(64, 1, device=device) * 6 + 32)
    truth = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    assert truth.median() < 1e-3
    eager = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    loss, stats = cross_entropy(logits, target, reduction="none", return_stats=True)
    for found in (loss, -stats.logprobs):
        assert relative_error(found, truth) <= 2 * relative_error(eager, truth)


def test_no_rows(device):
    for shape in ((0,), (2, 0)):
        logits, target = drawn(*shape, classes=8, device=device)
        for reduction in REDUCTIONS:
            loss, grad = with_gradient(cross_entropy, logits, target, reduction=reduction)
            assert loss.shape == (shape if reduction == "none" else ())
            assert (loss == 0).all()
            assert grad.shape == logits.shape


# Strides


def test_logits_of_all_but_the_last_token_are_read_in_place(device):
    logits, target = drawn(3, 6, classes=64, device=device)
    sliced, shifted = logits[:, :-1], target[:, 1:]
    copies = {}
    assert forward.rows_layout(sliced, copies, 0) == forward.Rows(15, 5, 6 * 64, 64)
    assert not copies
    for reduction in REDUCTIONS:
        found = with_gradient(cross_entropy, sliced, shifted, reduction=reduction)
        assert_same(found, with_gradient(cross_entropy, sliced.contiguous(), shifted.contiguous(), reduction=reduction))


def test_layouts_of_rows():
    def layout(x):
        copies = {}
        return forward.rows_layout(x, copies, 0), bool(copies)

    x = torch.empty(2, 3, 4, 8)
    assert layout(x) == (forward.Rows(24, 24, 0, 8), False)
    assert layout(x[:, :, 1:]) == (forward.Rows(18, 3, 32, 8), False)
    assert layout(x[:, 1:]) == (forward.Rows(16, 8, 96, 8), False)
    assert layout(x[:, 1:, 1:]) == (forward.Rows(12, 12, 0, 8), True)
    assert layout(x[:, 1:2, 1:]) == (forward.Rows(6, 3, 96, 8), False)
    assert layout(x[..., ::2]) == (forward.Rows(24, 24, 0, 4), True)
    assert layout(x[0, 0, 0]) == (forward.Rows(1, 1, 0, 0), False)


def test_rows_of_any_strides(device):
    logits, target = drawn(3, 4, 5, classes=24, device=device)
    expected = with_gradient(cross_entropy, logits, target)
    for order in ((0, 1, 2, 3), (2, 1, 0, 3), (3, 2, 1, 0), (1, 0, 2, 3)):
        laid = logits.permute(order).contiguous().permute([order.index(i) for i in range(4)])
        turned = target.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        assert_same(with_gradient(cross_entropy, laid, turned), expected)


# Statistics


def assert_statistics(logits, target, **options):
    loss, stats = cross_entropy(logits, target, **options, return_stats=True)
    assert_same((loss,), (cross_entropy(logits, target, **options),))
    assert isinstance(stats, TokenStats)
    x, cap = logits.double(), options.get("softcap")
    x = cap * torch.tanh(x / cap) if cap else x
    log_p, counts = x.log_softmax(-1), target != -100
    expected = log_p.gather(-1, torch.where(counts, target, 0)[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).nan_to_num().sum(-1)
    torch.testing.assert_close(stats.logprobs.double(), torch.where(counts, expected, 0), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(stats.entropy.double(), torch.where(counts, entropy, 0), rtol=2e-6, atol=2e-6)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(stats.argmax, torch.where(counts, first, -1))
    return stats


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_statistics(dtype, device):
    logits, target = drawn(3, 7, classes=65, device=device, dtype=dtype)
    assert_statistics(logits, target)
    assert_statistics(logits, target, softcap=3.0, label_smoothing=0.2, z_loss=0.1, reduction="none")
    assert_statistics(logits.round(), target)  # equal maxima: the first of them
    assert_statistics(logits * 1e3, target)  # entropy 0
    logits[..., ::3] = -INF
    target = torch.where(target % 3 == 0, 1, target)
    assert_statistics(logits, target)


def test_statistics_have_no_gradient_and_leave_the_loss_its_own(device):
    logits, target = drawn(3, 7, classes=65, device=device)
    expected = with_gradient(cross_entropy, logits, target, 2.0)
    leaf = logits.requires_grad_()
    loss, stats = cross_entropy(leaf, target, return_stats=True)
    assert not any(t.requires_grad for t in stats)
    assert_same((loss.detach(), torch.autograd.grad(2 * loss, leaf)[0]), expected)


# Errors


def test_wrong_shapes_and_dtypes(device):
    logits, target = drawn(4, 3, classes=8, device=device)
    for bad in (target[:2], target[None], target[0], torch.zeros(4, 3, 8, dtype=torch.int64, device=device)):
        with pytest.raises(ValueError, match=r"cross_entropy: target has shape .*, expected \(4, 3\) to match logits'"):
            cross_entropy(logits, bad)
    for bad in (target.float(), target.bool(), target.to(torch.uint8)):
        with pytest.raises(TypeError, match=r"cross_entropy: target has dtype .*, expected int64 or int32"):
            cross_entropy(logits, bad)
    with pytest.raises(ValueError, match=r"cross_entropy: token_weights has shape \(4,\), expected \(4, 3\)"):
        cross_entropy(logits, target, token_weights=torch.ones(4, device=device))
    with pytest.raises(ValueError, match=r"cross_entropy: weight has shape \(9,\), expected \(8,\)"):
        cross_entropy(logits, target, weight=torch.ones(9, device=device))
    with pytest.raises(TypeError, match=r"cross_entropy: weight has dtype torch.float64"):
        cross_entropy(logits, target, weight=torch.ones(8, device=device).double())
    with pytest.raises(TypeError, match=r"cross_entropy: logits has dtype torch.float64"):
        cross_entropy(logits.double(), target)
    for bad in (logits[..., :0], logits[0, 0, 0]):
        with pytest.raises(ValueError, match=r"cross_entropy: logits has shape .*, expected at least one dimension"):
            cross_entropy(bad, target)
    with pytest.raises(ValueError, match="cross_entropy: target is on meta, expected"):
        cross_entropy(logits, target.to("meta"))
    with pytest.raises(TypeError, match="positional"):
        cross_entropy(logits, target, None)


def test_wrong_options(device):
    logits, target = drawn(4, classes=8, device=device)
    wrong = {
        "reduction": [("batchmean", ValueError, "'batchmean', expected one of mean, sum, none")],
        "label_smoothing": [
            (1.5, ValueError, "1.5, expected a number from 0 to 1"),
            (-0.1, ValueError, "-0.1, expected a number from 0 to 1"),
            (NAN, ValueError, "nan, expected a number from 0 to 1"),
            ("x", TypeError, "a str, expected a number"),
        ],
        "z_loss": [(-1.0, ValueError, "-1.0, expected a finite"), (torch.ones(1), TypeError, "a Tensor, expected a n")],
        "softcap": [(INF, ValueError, "inf, expected a finite"), (-3.0, ValueError, "-3.0, expected a finite")],
        "ignore_index": [
            (1.5, TypeError, "a float, expected an int"),
            (None, TypeError, "None, expected an int"),
            (2**70, ValueError, f"{2**70}, expected an int of 64 bits"),
        ],
        "return_stats": [(1, TypeError, "an int, expected a bool")],
    }
    for name, cases in wrong.items():
        for value, error, message in cases:
            with pytest.raises(error, match=f"cross_entropy: {name} is {message}"):
                cross_entropy(logits, target, **{name: value})


def test_weights_that_require_grad(device):
    logits, target = drawn(4, classes=8, device=device)
    for name, size in (("weight", 8), ("token_weights", 4)):
        learned = torch.ones(size, device=device, requires_grad=True)
        with pytest.raises(ValueError, match=f"cross_entropy: {name} requires grad, but gets no gradient"):
            cross_entropy(logits, target, **{name: learned})
        with torch.no_grad():
            cross_entropy(logits, target, **{name: learned})


def test_the_backward_ops_refuse_what_does_not_match(device):
    logits, target = drawn(4, classes=8, device=device)
    factors, loss = torch.ones(4, 4, device=device), logits[0, 0]
    rows = torch.ops.rooftile.cross_entropy_backward
    with pytest.raises(ValueError, match=r"cross_entropy_backward: dloss has shape \(3,\), expected \(\) or \(4,\)"):
        rows(logits[:3, 0], logits, target, None, factors, 0.0, False)
    with pytest.raises(ValueError, match=r"cross_entropy_backward: factors has shape \(3, 4\), expected \(4, 4\)"):
        rows(loss, logits, target, None, factors[:3], 0.0, False)
    with pytest.raises(ValueError, match="scale_gradient_backward: gradient is not contiguous"):
        torch.ops.rooftile.scale_gradient_backward(logits.T, loss)
    with pytest.raises(ValueError, match=r"scale_gradient_backward: dloss has shape \(4,\), expected \(\)"):
        torch.ops.rooftile.scale_gradient_backward(logits, logits[:, 0])
    with pytest.raises(ValueError, match="cross_entropy: gradient is 'none', expected 'now' or 'later'"):
        torch.ops.rooftile.cross_entropy(
            logits.requires_grad_(), target, None, None, -100, 0.0, 0.0, 0.0, "sum", "none"
        )
    with pytest.raises(ValueError, match="cross_entropy: gradient is 'now', expected 'later', as reduction is 'none'"):
        torch.ops.rooftile.cross_entropy(logits, target, None, None, -100, 0.0, 0.0, 0.0, "none", "now")
