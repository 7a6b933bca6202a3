"""linear_jsd and linear_kl: every option against float64, chunks, ignored tokens, which gradients, errors."""

import itertools
import math

import pytest
import torch
from helpers import BF16, Calls, assert_same, interpreted, offset, padded_allocations, transposed

from rooftile.cases.check import relative_error
from rooftile.cases.linear_jsd import TOLERANCES
from rooftile.ops.divergence import jsd, kl_div
from rooftile.ops.fused_head.linear_jsd import REDUCTIONS, linear_jsd, linear_kl
from rooftile.ops.gemm import dispatch
from rooftile.reference import linear_jsd as reference

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
CLASSES, HIDDEN, TEACHER = 37, 24, 40
ROW = 2 * 48 * 4  # bytes of a token's logits in float32, of student and teacher: classes rounded up to 16


def drawn(*leading, device, dtype=torch.float32, teacher_dtype=None, ignored=0.3, bias=True, classes=CLASSES):
    """Hidden states and weights of both, labels (some of them ignored) and biases."""

    def head(size, dtype):
        weight = (torch.randn(classes, size, device=device) * size**-0.5).to(dtype)
        b = torch.randn(classes, device=device).to(dtype) if bias else None
        return torch.randn(*leading, size, device=device).to(dtype), weight, b

    target = torch.randint(classes, leading, device=device)
    target = torch.where(torch.rand(leading, device=device) < ignored, -100, target)
    hidden, weight, b = head(HIDDEN, dtype)
    teacher_hidden, teacher_weight, teacher_bias = head(TEACHER, teacher_dtype or dtype)
    return hidden, weight, teacher_hidden, teacher_weight, target, b, teacher_bias


def with_gradients(function, tensors, needs=(True, True, True), factor=1.0, **options):
    """The loss and the gradients of hidden, weight and bias that are needed."""
    given = [None if t is None else t.detach() for t in tensors]
    leaves = []
    for place, need in zip((0, 1, 5), needs, strict=True):
        if given[place] is not None and need:
            given[place].requires_grad_()
            leaves.append(given[place])
    loss = function(*given, **options)
    steps = torch.linspace(factor, 2 * factor, max(1, loss.numel()), dtype=torch.float64, device=loss.device)
    dloss = steps[: loss.numel()].view(loss.shape).to(loss.dtype)
    return loss.detach(), *torch.autograd.grad(loss, leaves, dloss)


def wide(tensors):
    return tuple(t.double() if t is not None and t.is_floating_point() else t for t in tensors)


def assert_right(tensors, function=linear_jsd, needs=(True, True, True), factor=1.0, **options):
    found = with_gradients(function, tensors, needs, factor, **options)
    truth_options = {"beta": 0.0, **options} if function is linear_kl else options
    truth = with_gradients(reference.linear_jsd, wide(tensors), needs, factor, **truth_options)
    assert (found[0].dtype, found[0].shape) == (torch.float32, truth[0].shape)
    for i, (a, e) in enumerate(zip(found, truth, strict=True)):
        assert a.shape == e.shape
        ceiling = TOLERANCES[tensors[0].dtype]["backward" if i else "forward"].ceiling
        assert relative_error(a, e) <= ceiling, (i, options)
    return found


@pytest.mark.each_once
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_every_combination_of_options(beta, bias, device):
    tensors = drawn(2, 5, device=device, bias=bias)
    for reduction, temperature in itertools.product(REDUCTIONS, (1.0, 2.5)):
        options = {"reduction": reduction, "temperature": temperature, "chunk_bytes": 4 * ROW}
        assert_right(tensors, beta=beta, factor=1.5, **options)
        if beta == 0:
            assert_right(tensors, linear_kl, factor=1.5, **options)


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_dtypes_of_student_and_teacher(dtype, reduction, device):
    for teacher_dtype in (dtype, torch.float32):
        tensors = drawn(3, 4, device=device, dtype=dtype, teacher_dtype=teacher_dtype)
        found = assert_right(tensors, reduction=reduction)
        assert [t.dtype for t in found[1:]] == [dtype] * 3


def test_they_are_the_divergences_of_the_log_probabilities(device):
    hidden, weight, teacher_hidden, teacher_weight, *_ = drawn(6, device=device)
    x = ((hidden @ weight.T) / 2).log_softmax(-1)
    t = ((teacher_hidden @ teacher_weight.T) / 2).log_softmax(-1)
    four = hidden, weight, teacher_hidden, teacher_weight
    for beta in (0.0, 0.3, 1.0):
        expected = jsd(x, t, beta=beta)  # "batchmean" is over tokens
        torch.testing.assert_close(linear_jsd(*four, beta=beta, temperature=2.0), expected, rtol=1e-5, atol=1e-6)
    expected = kl_div(x, t, reduction="sum", log_target=True)
    torch.testing.assert_close(linear_kl(*four, temperature=2.0, reduction="sum"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_like_its_teacher_has_nothing_to_learn(beta, device):
    hidden, weight, _, _, target, bias, _ = drawn(5, device=device)
    for value in with_gradients(linear_jsd, (hidden, weight, hidden, weight, target, bias, bias), beta=beta):
        assert value.abs().max() < 1e-6


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_logits_of_any_size(beta, device):
    """Far apart, probabilities underflow; the logarithms do not. Those of a certain student cancel in its gradient."""
    tensors = drawn(5, device=device, ignored=0.0)
    tensors[1].mul_(60.0)
    tensors[3].mul_(60.0)
    found = with_gradients(linear_jsd, tensors, beta=beta)
    truth = with_gradients(reference.linear_jsd, wide(tensors), beta=beta)
    assert relative_error(found[0], truth[0]) < TOLERANCES[torch.float32]["forward"].ceiling
    for a, e in zip(found[1:], truth[1:], strict=True):
        assert (a - e).norm() < 1e-7 * 60 * max(1.0, truth[0])


# Chunks, memory, gradients that are asked for


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_chunks_of_any_size_give_the_same(rows, reduction, device):
    tensors = drawn(13, device=device)
    whole = with_gradients(linear_jsd, tensors, reduction=reduction)
    found = with_gradients(linear_jsd, tensors, reduction=reduction, chunk_bytes=rows * ROW)
    for a, e in zip(found, whole, strict=True):
        assert relative_error(a, e) < 1e-6


@interpreted
def test_beside_results_there_is_one_chunk_of_logits_of_each(device, monkeypatch):
    rows, classes, chunk = 64, 512, 8
    tensors = drawn(rows, device=device, classes=classes, bias=False)
    with padded_allocations(monkeypatch) as made:
        with_gradients(linear_jsd, tensors, chunk_bytes=2 * chunk * classes * 4)
    assert [numel for _, numel in made].count(chunk * classes) == 2
    results = rows * HIDDEN + classes * HIDDEN
    assert sum(numel for _, numel in made) <= results + 2 * chunk * classes + 8 * rows


@every_reduction
def test_only_the_gradients_that_are_asked_for(reduction, device, monkeypatch):
    tensors = drawn(7, device=device)
    every = with_gradients(linear_jsd, tensors, reduction=reduction)
    gemms = []
    stock = dispatch.gemm
    monkeypatch.setattr(dispatch, "gemm", lambda *args, **given: gemms.append(args) or stock(*args, **given))
    for needs in itertools.product((False, True), repeat=3):
        if not any(needs):
            continue
        gemms.clear()
        found = with_gradients(linear_jsd, tensors, needs, reduction=reduction)
        assert_same(found[1:], tuple(g for g, need in zip(every[1:], needs, strict=True) if need))
        assert len(gemms) == (4 if reduction == "none" else 2) + sum(needs[:2])
    gemms.clear()
    assert not linear_jsd(*tensors).requires_grad
    assert len(gemms) == 2


def test_a_loss_scaler_keeps_small_gradients_of_float16(device):
    tensors = drawn(16, device=device, dtype=torch.float16, ignored=0)
    options = {"reduction": "sum", "temperature": 50.0}  # gradients of 1e-4 and less, of 16 bits
    found = with_gradients(linear_jsd, tensors, factor=2.0**14, **options)
    truth = with_gradients(reference.linear_jsd, wide(tensors), factor=2.0**14, **options)
    for a, e in zip(found[1:], truth[1:], strict=True):
        assert relative_error(a, e) < 5e-3


# Tokens that count


@every_reduction
def test_all_labels_ignored(reduction, device):
    tensors = drawn(6, device=device, ignored=1.0)
    for options in ({}, {"valid_rows": 0}, {"valid_rows": 2}, {"beta": 0.0}):
        for found in with_gradients(linear_jsd, tensors, reduction=reduction, **options):
            assert (found == 0).all()


@every_reduction
def test_ignored_rows_can_be_dropped_and_may_then_hold_anything(reduction, device):
    tensors = drawn(3, 7, device=device, ignored=0.5)
    target = tensors[4]
    expected = with_gradients(linear_jsd, tensors, reduction=reduction)
    for hidden in (tensors[0], tensors[2]):
        hidden[target == -100] = math.nan
    valid = int((target != -100).sum())
    found = with_gradients(linear_jsd, tensors, reduction=reduction, valid_rows=valid, chunk_bytes=4 * ROW)
    for a, e in zip(found, expected, strict=True):
        assert relative_error(a, e) < 1e-6
    for few in (0, valid - 1):  # more tokens count than the host said
        loss, dhidden, *rest = with_gradients(linear_jsd, tensors, reduction=reduction, valid_rows=few)
        assert loss.isnan().sum() == (valid - few if reduction == "none" else 1)
        assert dhidden.isnan().all(-1).sum() == dhidden.isnan().any(-1).sum() == valid - few
        assert all(t.isnan().all() for t in rest)


def test_the_least_temperature_gives_finite_numbers(device):
    tensors = drawn(4, device=device)
    for beta in (0.0, 0.5):
        for reduction in REDUCTIONS:
            options = {"temperature": 1e-30, "reduction": reduction, "beta": beta}
            for found in with_gradients(linear_jsd, tensors, **options):
                assert torch.isfinite(found).all()
    with pytest.raises(ValueError, match=r"^linear_jsd: temperature is 1e-320, expected a finite number"):
        linear_jsd(*tensors, temperature=1e-320)


def test_without_labels_no_token_is_ignored(device):
    tensors = drawn(2, 5, device=device, ignored=0.0)
    expected = with_gradients(linear_jsd, tensors)
    for ignore_index in (-100, 0):
        found = with_gradients(linear_jsd, (*tensors[:4], None, *tensors[5:]), ignore_index=ignore_index)
        assert_same(found, expected)


def test_labels_need_not_be_classes(device):
    *tensors, target, bias, teacher_bias = drawn(2, 5, device=device, ignored=0.3)
    expected = with_gradients(linear_jsd, (*tensors, target, bias, teacher_bias))
    for value in (CLASSES, 2**40, -1):
        other = torch.where(target == -100, -100, value)
        assert_same(with_gradients(linear_jsd, (*tensors, other, bias, teacher_bias)), expected)


def test_no_rows(device):
    for shape, reduction in itertools.product(((0,), (2, 0)), REDUCTIONS):
        loss, *grads = with_gradients(linear_jsd, drawn(*shape, device=device), reduction=reduction)
        assert loss.shape == (shape if reduction == "none" else ())
        assert (loss == 0).all()
        assert [g.shape for g in grads] == [(*shape, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)]
        assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("lay", [offset, transposed])
def test_layouts(lay, device):
    tensors = drawn(3, 6, device=device)
    expected = with_gradients(linear_jsd, tensors)
    laid = [lay(t) if t.is_floating_point() else t.T.contiguous().T for t in tensors]
    for a, e in zip(with_gradients(linear_jsd, laid), expected, strict=True):
        torch.testing.assert_close(a, e)


def test_autocast(device):
    tensors = drawn(5, device=device)
    leaf = tensors[1].requires_grad_()
    with torch.autocast(device.type, torch.bfloat16), Calls() as record:
        loss = linear_jsd(*tensors)
    (args,) = [args for op, args, _ in record.calls if op._schema.name == "rooftile::linear_jsd"]
    assert [args[i].dtype for i in (0, 1, 2, 3, 5, 6)] == [BF16] * 6
    loss.backward()
    assert leaf.grad.dtype is torch.float32


# Errors


@every_reduction
def test_a_second_derivative_is_an_error(reduction, device):
    tensors = drawn(7, device=device)
    leaf = tensors[0].requires_grad_()
    (grad,) = torch.autograd.grad(linear_jsd(*tensors, reduction=reduction).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        grad.square().sum().backward()


def test_a_teacher_that_requires_grad(device):
    for place, name in ((2, "teacher_hidden"), (3, "teacher_weight"), (6, "teacher_bias")):
        for function, op in ((linear_jsd, "linear_jsd"), (linear_kl, "linear_kl")):
            tensors = list(drawn(4, device=device))
            tensors[place].requires_grad_()
            with pytest.raises(ValueError, match=f"^{op}: {name} requires grad, but gets no gradient; pass {name}.det"):
                function(*tensors)
            with torch.no_grad():
                function(*tensors)


def test_wrong_shapes_and_dtypes(device):
    h, w, th, tw, y, b, tb = drawn(4, 3, device=device)
    wrong = [
        ((h, w[:, 1:], th, tw), ValueError, r"weight has shape \(37, 23\), expected \(V, 24\)"),
        ((h, w, th, tw[:, 1:]), ValueError, r"teacher_weight has shape \(37, 39\), expected \(V, 40\)"),
        (
            (h, w, th[:2], tw),
            ValueError,
            r"teacher_hidden has shape \(2, 3, 40\), expected \(4, 3, H\) to match hidden",
        ),
        ((h, w, th, tw[:36]), ValueError, "teacher_weight has 36 rows, expected 37 to match weight's"),
        ((h, w, th, tw, y[:2]), ValueError, r"target has shape \(2, 3\), expected \(4, 3\) to match hidden's"),
        ((h, w, th, tw, y.float()), TypeError, r"target has dtype torch\.float32, expected int64 or int32"),
        ((h, w, th, tw, y, b[1:]), ValueError, r"bias has shape \(36,\), expected \(37,\) to match weight's rows"),
        ((h, w, th, tw, y, b, tb[1:]), ValueError, r"teacher_bias has shape \(36,\), expected \(37,\)"),
        ((h, w, th, tw.bfloat16()), TypeError, r"teacher_weight has dtype torch\.bfloat16, expected torch\.float32"),
        ((h, w, th, tw, y, b, tb.half()), TypeError, r"teacher_bias has dtype torch\.float16, expected torch\.float32"),
    ]
    for args, error, message in wrong:
        for function, op in ((linear_jsd, "linear_jsd"), (linear_kl, "linear_kl")):
            with pytest.raises(error, match=f"^{op}: {message}"):
                function(*args)


def test_wrong_options(device):
    tensors = drawn(4, device=device)
    wrong = {
        "beta": [(1.5, ValueError, "1.5, expected a number from 0 to 1"), (None, TypeError, "None, expected a number")],
        "temperature": [(0.0, ValueError, "0.0, expected a finite number of 1e-30 or more"), ("1", TypeError, "a str")],
        "ignore_index": [
            (0.5, TypeError, "a float, expected an int"),
            (-(2**70), ValueError, f"-{2**70}, expected an int of 64 bits"),
        ],
        "reduction": [("batchmean", ValueError, "'batchmean', expected one of mean, sum, none")],
        "precision": [("half", ValueError, "'half', expected one of ieee, tf32")],
        "chunk_bytes": [(0, ValueError, "0, expected 1 or more")],
        "valid_rows": [(True, TypeError, "a bool, expected an int")],
        "float32_weight_gradient": [(1, TypeError, "an int, expected a bool")],
    }
    for name, cases in wrong.items():
        for value, error, message in cases:
            with pytest.raises(error, match=f"^linear_jsd: {name} is {message}"):
                linear_jsd(*tensors, **{name: value})
            if name != "beta":
                with pytest.raises(error, match=f"^linear_kl: {name} is {message}"):
                    linear_kl(*tensors, **{name: value})
    with pytest.raises(TypeError, match="linear_kl: hidden is None, expected a tensor"):
        linear_kl(None, *tensors[1:])
