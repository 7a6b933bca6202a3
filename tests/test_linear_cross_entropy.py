"""linear_cross_entropy: every option against float64 logits, chunks, memory, ignored rows, asked gradients, errors."""

import itertools
import math
import sys
import types

import pytest
import torch
from helpers import BF16, Calls, assert_same, in_pairs, interpreted, nightly_but, offset, padded_allocations, transposed

from rooftile import runtime
from rooftile.cases.case import Unsupported
from rooftile.cases.check import relative_error
from rooftile.cases.linear_cross_entropy import TOLERANCES
from rooftile.ops.cross_entropy import TokenStats, cross_entropy
from rooftile.ops.fused_head import linear_cross_entropy as module
from rooftile.ops.fused_head.head import chunk_rows
from rooftile.ops.fused_head.linear_cross_entropy import linear_cross_entropy
from rooftile.reference import linear_cross_entropy as reference

REDUCTIONS = ("mean", "sum", "none")
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
CLASSES, HIDDEN = 37, 24
ROW = 48 * 4  # bytes of a token's logits in float32: classes rounded up to 16


def drawn(*leading, device, dtype=torch.float32, ignored=0.3, bias=True, classes=CLASSES):
    """Hidden states, weight, targets (some of them ignored) and bias."""
    hidden = torch.randn(*leading, HIDDEN, device=device).to(dtype)
    weight = (torch.randn(classes, HIDDEN, device=device) * HIDDEN**-0.5).to(dtype)
    target = torch.randint(classes, leading, device=device)
    target = torch.where(torch.rand(leading, device=device) < ignored, -100, target)
    return hidden, weight, target, torch.randn(classes, device=device).to(dtype) if bias else None


def with_gradients(function, tensors, needs=(True, True, True), factor=1.0, **options):
    """The loss and the gradients of hidden, weight and bias that are needed."""
    hidden, weight, target, bias = tensors
    leaves = [
        None if t is None else t.detach().requires_grad_(n) for t, n in zip((hidden, weight, bias), needs, strict=True)
    ]
    loss = function(leaves[0], leaves[1], target, leaves[2], **options)
    asked = [t for t in leaves if t is not None and t.requires_grad]
    steps = torch.linspace(factor, 2 * factor, max(1, loss.numel()), dtype=torch.float64, device=hidden.device)
    dloss = steps[: loss.numel()].view(loss.shape).to(loss.dtype)
    return loss.detach(), *torch.autograd.grad(loss, asked, dloss)


def in_float64(*tensors, **options):
    wide = tuple(t.double() if t is not None and t.is_floating_point() else t for t in tensors)
    return wide, {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in options.items()}


def assert_right(tensors, needs=(True, True, True), factor=1.0, **options):
    found = with_gradients(linear_cross_entropy, tensors, needs, factor, **options)
    wide, wide_options = in_float64(*tensors, **options)
    truth = with_gradients(reference.linear_cross_entropy, wide, needs, factor, **wide_options)
    dtype = tensors[0].dtype
    assert len(found) == len(truth)
    assert (found[0].dtype, found[0].shape) == (torch.float32, truth[0].shape)
    for i, (a, e) in enumerate(zip(found, truth, strict=True)):
        assert a.shape == e.shape
        ceiling = TOLERANCES[dtype]["backward" if i else "forward"].ceiling
        assert relative_error(a, e) <= ceiling, (i, options)
    return found


OPTIONS = {
    "label_smoothing": (0.0, 0.2),
    "z_loss": (0.0, 1e-2),
    "softcap": (None, 3.0),
    "temperature": (1.0, 0.6),
    "reduction": REDUCTIONS,
}


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("weights", nightly_but(("both",), ("", "class", "token", "both")))
def test_every_combination_of_options(weights, half, device):
    """Each pair of them is in the first half."""
    tensors = drawn(2, 5, device=device)
    given = {}
    if weights in ("class", "both"):
        given["class_weight"] = torch.rand(CLASSES, device=device)
    if weights in ("token", "both"):
        given["token_weights"] = torch.randn(2, 5, device=device)  # of either sign, as advantages are
    for chosen in itertools.product(*map(enumerate, OPTIONS.values())):
        if sum(i for i, _ in chosen) % 2 == half:
            options = {name: value for name, (_, value) in zip(OPTIONS, chosen, strict=True)}
            assert_right(tensors, factor=1.5, chunk_bytes=4 * ROW, **options, **given)


@pytest.mark.parametrize(
    ("dtype", "bias", "reduction"), in_pairs(list(TOLERANCES), ("", "own", "float32"), REDUCTIONS), ids=str
)
def test_dtypes(dtype, bias, reduction, device):
    hidden, weight, target, b = drawn(3, 4, device=device, dtype=dtype, bias=bool(bias))
    b = b.float() if bias == "float32" else b
    for to in (target, target.int()):
        found = assert_right((hidden, weight, to, b), reduction=reduction, class_weight=torch.rand(CLASSES).to(device))
        assert [t.dtype for t in found[1:]] == [dtype, dtype] + ([b.dtype] if bias else [])


# Chunks


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("rows", [1, 5, 12, 13])
def test_chunks_of_any_size_give_the_same(rows, reduction, device):
    """A chunk a token, chunks of which the last is smaller, one chunk."""
    tensors = drawn(13, device=device)
    whole = assert_right(tensors, reduction=reduction)
    for a, e in zip(assert_right(tensors, reduction=reduction, chunk_bytes=rows * ROW), whole, strict=True):
        assert relative_error(a, e) < 1e-6


def test_rows_of_a_chunk():
    mib = 1 << 20
    row = 128256 * 2
    assert chunk_rows(8192, row, 0, True) == 2048  # a quarter: 501 MiB
    assert 2048 * row < 512 * mib
    assert chunk_rows(8192, row, 0, False) == 2048
    assert chunk_rows(16384, 64000, 0, True) == 8192
    assert chunk_rows(100_000, 64000, 0, True) <= 25_088
    assert -(-100_000 // chunk_rows(100_000, 64000, 0, True)) == 4
    assert chunk_rows(1000, row, 0, True) == 1000
    assert chunk_rows(8192, row, 1, True) == 1
    assert chunk_rows(8192, row, 100 * row, True) == 100  # never over the budget
    assert chunk_rows(1000, row, 600 * row, True) == 512  # of even size, in whole tiles
    assert chunk_rows(1000, row, 501 * row, True) == 384
    assert chunk_rows(4097, row, 0, True) == 2176
    assert chunk_rows(0, row, 0, True) == 0
    for n, rows in itertools.product((1, 7, 130, 1000), (1, 3, 127, 128, 129, 999)):
        assert 1 <= chunk_rows(n, 10, 10 * rows, True) <= rows
    for n in range(1, 40_000, 317):
        rows = chunk_rows(n, row, 0, True)
        assert rows == n or rows % 128 == 0
        assert -(-n // rows) <= 4


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_beside_results_there_is_one_chunk_of_logits(reduction, device, monkeypatch):
    """All memory that is allocated, freed or not."""
    rows, classes, chunk = 64, 512, 8
    hidden, weight, target, bias = drawn(rows, device=device, classes=classes)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    results = 2 * rows * HIDDEN + classes * HIDDEN + classes  # a copy of hidden for as_rows is none
    with padded_allocations(monkeypatch) as made:
        loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, chunk_bytes=chunk * classes * 4)
        torch.autograd.grad(loss.sum(), leaves)
    walks = 2 if reduction == "none" else 1
    logits = [numel for _, numel in made if numel == chunk * classes and numel != classes * HIDDEN]
    bias_sums = classes * rows // chunk
    assert logits.count(chunk * classes) == walks + (bias_sums == chunk * classes)
    assert sum(numel for _, numel in made) <= results + walks * chunk * classes + bias_sums + 8 * rows


@interpreted
def test_the_weight_gradient_has_no_second_buffer(device, monkeypatch):
    """Each chunk is added in place; only float32 accumulation of a 16-bit weight needs its own memory."""
    tensors = drawn(16, device=device, dtype=BF16, bias=False, classes=128)
    for wide, expected in ((False, [BF16]), (True, [BF16, torch.float32])):
        with padded_allocations(monkeypatch) as made:
            with_gradients(
                linear_cross_entropy, tensors, (False, True, False), chunk_bytes=1024, float32_weight_gradient=wide
            )
        found = [buffer.dtype for buffer, numel in made if numel == 128 * HIDDEN]
        assert sorted(found, key=str) == sorted(expected, key=str)


def test_float32_accumulation_rounds_the_weight_gradient_once(device):
    tensors = drawn(128, device=device, dtype=BF16, bias=False)
    wide, _ = in_float64(*tensors)
    needs = (False, True, False)
    truth = with_gradients(reference.linear_cross_entropy, wide, needs)[1]
    errors = [
        relative_error(
            with_gradients(
                linear_cross_entropy, tensors, needs, chunk_bytes=2 * 48 * 2, float32_weight_gradient=accumulate
            )[1],
            truth,
        )
        for accumulate in (True, False)
    ]
    assert errors[0] < TOLERANCES[BF16]["backward"].ceiling
    assert errors[0] < errors[1] / 2


# Adapters of the head


def adapted(function, tensors, low, up, needs, **options):
    """The loss, and the gradients of hidden, low and up, and of weight and bias, that are needed."""
    hidden, weight, target, bias = tensors
    leaves = [t.detach().requires_grad_(n) for t, n in zip((hidden, low, up, weight, bias), needs, strict=True)]
    loss = function(leaves[0], leaves[3], target, leaves[4], adapter=(leaves[1], leaves[2]), **options)
    dloss = torch.linspace(1, 2, loss.numel(), dtype=torch.float64, device=hidden.device).view(loss.shape)
    asked = [t for t in leaves if t.requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, asked, dloss.to(loss.dtype))


LEARNED = (True, True, True, False, False)  # of LoRA: the head is frozen


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_an_adapter_is_added_to_the_logits_and_learns(dtype, reduction, device):
    rank = 3
    tensors = drawn(3, 4, device=device, dtype=dtype)
    low, up = (torch.randn(*shape, rank, device=device).to(dtype) for shape in ((3, 4), (CLASSES,)))
    for needs, options in (
        (LEARNED, {"chunk_bytes": 5 * ROW}),
        ((True,) * 5, {"chunk_bytes": 5 * ROW, "softcap": 3.0, "temperature": 0.7}),
        ((False, False, True, False, True), {"valid_rows": int((tensors[2] != -100).sum()), "z_loss": 1e-2}),
    ):
        found = adapted(linear_cross_entropy, tensors, low, up, needs, reduction=reduction, **options)
        wide, _ = in_float64(*tensors)
        truth = adapted(
            reference.linear_cross_entropy, wide, low.double(), up.double(), needs, reduction=reduction, **options
        )
        for i, (a, e) in enumerate(zip(found, truth, strict=True)):
            assert a.shape == e.shape
            ceiling = TOLERANCES[dtype]["backward" if i else "forward"].ceiling
            assert relative_error(a, e) <= ceiling, (i, options)


def test_an_adapters_gradients_are_nan_where_tokens_are_lost_and_0_where_none_counts(device):
    tensors = drawn(5, device=device, ignored=0)
    low, up = torch.randn(5, 2, device=device), torch.randn(CLASSES, 2, device=device)
    loss, _, dlow, dup = adapted(linear_cross_entropy, tensors, low, up, LEARNED, valid_rows=3)
    assert loss.isnan()
    assert dup.isnan().all()
    assert dlow.isnan().all(1).tolist() == [False] * 3 + [True] * 2
    tensors[2].fill_(-100)
    for grad in adapted(linear_cross_entropy, tensors, low, up, LEARNED, valid_rows=0):
        assert (grad == 0).all()


@interpreted
def test_beside_an_adapters_results_there_is_one_chunk_of_logits(device, monkeypatch):
    rows, classes, chunk, rank = 64, 512, 8, 4
    hidden, weight, target, bias = drawn(rows, device=device, classes=classes)
    low, up = torch.randn(rows, rank, device=device), torch.randn(classes, rank, device=device)
    tensors, budget = (hidden, weight, target, bias), chunk * classes * 4
    with padded_allocations(monkeypatch) as made:
        adapted(linear_cross_entropy, tensors, low, up, LEARNED, chunk_bytes=budget)
    results = hidden.numel() + low.numel() + up.numel()
    assert sum(numel for _, numel in made) <= results + chunk * classes + 8 * rows


def test_the_op_with_an_adapter_is_registered_right(device):
    hidden, weight, target, bias = drawn(5, device=device)
    low, up = torch.randn(5, 2, device=device, requires_grad=True), torch.randn(CLASSES, 2, device=device)
    rest = -100, 0.0, 0.0, 0.0, "sum", "now", False, 1.0, [False, False, False, True, False], False, 0, -1, "ieee"
    args = (hidden, weight, target, bias, None, None, low, up, *rest)
    torch.library.opcheck(torch.ops.rooftile.linear_cross_entropy.default, args)


def test_wrong_adapters(device):
    hidden, weight, target, _ = drawn(4, 3, device=device)
    low, up = torch.randn(4, 3, 2, device=device), torch.randn(CLASSES, 2, device=device)
    op = "linear_cross_entropy: adapter"
    for bad, error, message in (
        (low, TypeError, " is a Tensor, expected a tuple of two tensors or None"),
        ((low, None), TypeError, "'s up is None, expected a tensor"),
        ((low[:2], up), ValueError, r"'s low has shape \(2, 3, 2\), expected \(4, 3, R\)"),
        ((low, up[1:]), ValueError, r"'s up has shape \(36, 2\), expected \(37, 2\)"),
        ((low.bfloat16(), up), TypeError, "'s low has dtype torch.bfloat16, expected torch.float32"),
    ):
        with pytest.raises(error, match=op + message):
            linear_cross_entropy(hidden, weight, target, adapter=bad)


# Which gradients


@every_reduction
def test_only_the_gradients_that_are_asked_for(reduction, device, monkeypatch):
    tensors = drawn(7, device=device)
    every = with_gradients(linear_cross_entropy, tensors, reduction=reduction)
    gemms = []
    stock = module.dispatch.gemm
    monkeypatch.setattr(module.dispatch, "gemm", lambda *args, **given: gemms.append(args) or stock(*args, **given))
    for needs in itertools.product((False, True), repeat=3):
        if not any(needs):
            continue
        gemms.clear()
        found = with_gradients(linear_cross_entropy, tensors, needs, reduction=reduction)
        assert_same(found[1:], tuple(g for g, need in zip(every[1:], needs, strict=True) if need))
        assert len(gemms) == 1 + sum(needs[:2]) + (reduction == "none")
    gemms.clear()
    with torch.no_grad():
        loss = linear_cross_entropy(*(t.requires_grad_() if t.is_floating_point() else t for t in tensors))
    assert len(gemms) == 1
    assert not loss.requires_grad


def test_a_factor_of_one_leaves_the_gradients_as_the_forward_wrote_them(device):
    hidden, weight, target, _ = drawn(7, device=device, dtype=BF16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, target)
    dhidden, dweight, *_ = loss.grad_fn.saved_tensors
    expected, addresses = (dhidden.clone(), dweight.clone()), [dhidden.data_ptr(), dweight.data_ptr()]
    grads = torch.autograd.grad(loss, leaves)
    assert [g.data_ptr() for g in grads] == addresses
    assert_same(grads, expected)


def test_a_graph_that_is_kept_can_be_walked_again(device):
    hidden, weight, target, _ = drawn(7, device=device)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(*leaves, target)
    grads = [torch.autograd.grad(f * loss, leaves, retain_graph=f < 4) for f in (1.0, 3.0, 4.0)]
    for found, factor in zip(grads, (1, 3, 4), strict=True):
        for grad, first in zip(found, grads[0], strict=True):
            torch.testing.assert_close(grad, factor * first)


@every_reduction
def test_a_second_derivative_is_an_error(reduction, device):
    hidden, weight, target, _ = drawn(7, device=device)
    leaf = hidden.requires_grad_()
    loss = linear_cross_entropy(leaf, weight, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        grad.square().sum().backward()


def test_a_loss_scaler_keeps_small_gradients_of_float16(device):
    tensors = drawn(16, device=device, dtype=torch.float16, ignored=0)
    weights = torch.full((16,), 1e-5, device=device)
    options = {"reduction": "sum", "token_weights": weights}
    found = with_gradients(linear_cross_entropy, tensors, factor=2.0**14, **options)
    wide, wide_options = in_float64(*tensors, **options)
    truth = with_gradients(reference.linear_cross_entropy, wide, factor=2.0**14, **wide_options)
    for a, e in zip(found[1:], truth[1:], strict=True):
        assert relative_error(a, e) < 5e-3


def test_tied_weights_and_a_head_that_is_a_product(device):
    """Gradients of one tensor that is embedding and head, and of the factors of a low-rank update."""
    hidden, weight, target, _ = drawn(7, device=device)
    a, b = torch.randn(4, HIDDEN, device=device), torch.randn(CLASSES, 4, device=device)

    def grads(loss_of, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (weight, a, b)]
        w, a_, b_ = leaves
        x = hidden.to(dtype) + w[target.clamp(min=0)]
        return torch.autograd.grad(loss_of(x, w + b_ @ a_, target), leaves)

    truth = grads(reference.linear_cross_entropy, torch.float64)
    for found, expected in zip(grads(linear_cross_entropy, torch.float32), truth, strict=True):
        assert relative_error(found, expected) < 1e-5


# Which rows count


@every_reduction
def test_all_targets_ignored(reduction, device):
    tensors = drawn(6, device=device, ignored=1.0)
    for options in ({}, {"valid_rows": 0}, {"valid_rows": 2}, {"label_smoothing": 0.1, "z_loss": 0.1}):
        for found in with_gradients(linear_cross_entropy, tensors, reduction=reduction, **options):
            assert (found == 0).all()


@pytest.mark.each_once
@every_reduction
@pytest.mark.parametrize("spare", [0, 2])
def test_ignored_rows_can_be_dropped(reduction, spare, device):
    hidden, weight, target, bias = drawn(3, 7, device=device, ignored=0.5)
    valid = int((target != -100).sum())
    options = {"reduction": reduction, "token_weights": torch.rand(3, 7, device=device), "chunk_bytes": 4 * ROW}
    found = assert_right((hidden, weight, target, bias), valid_rows=valid + spare, **options)
    expected = with_gradients(linear_cross_entropy, (hidden, weight, target, bias), **options)
    for a, e in zip(found, expected, strict=True):
        assert relative_error(a, e) < 1e-6
    _, stats = linear_cross_entropy(hidden, weight, target, bias, valid_rows=valid, return_stats=True)
    _, plain = linear_cross_entropy(hidden, weight, target, bias, return_stats=True)
    for a, e in zip(stats, plain, strict=True):
        torch.testing.assert_close(a, e)


def test_rows_are_dropped_whatever_the_default_dtype(device):
    hidden, weight, target, _ = drawn(6, device=device, ignored=0)
    target[2:] = -100
    expected = linear_cross_entropy(hidden, weight, target)
    torch.set_default_dtype(torch.float64)
    try:
        found = linear_cross_entropy(hidden, weight, target, valid_rows=2)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected)


def test_dropped_rows_are_not_multiplied(device, monkeypatch):
    tensors = drawn(8, device=device, ignored=0)
    tensors[2][3:] = -100
    rows = []
    stock = module.dispatch.gemm
    monkeypatch.setattr(
        module.dispatch, "gemm", lambda op, x, *args, **given: rows.append(x.shape) or stock(op, x, *args, **given)
    )
    with_gradients(linear_cross_entropy, tensors, valid_rows=3)
    assert rows == [(3, HIDDEN), (3, CLASSES), (CLASSES, 3)]


@every_reduction
@pytest.mark.parametrize("valid", [0, 3])
def test_more_targets_than_valid_rows_make_the_loss_and_gradients_nan(valid, reduction, device):
    hidden, weight, target, bias = drawn(6, device=device, ignored=0)
    target[0] = -100
    lost = [0 < i > valid for i in range(6)]
    tensors = hidden, weight, target, bias
    for options in ({}, {"chunk_bytes": 2 * ROW}):
        options = {"reduction": reduction, "valid_rows": valid, **options}
        loss, dhidden, dweight, dbias = with_gradients(linear_cross_entropy, tensors, **options)
        assert loss.isnan().tolist() == (lost if reduction == "none" else True)
        for of_tokens in (dhidden.isnan().all(1), dhidden.isnan().any(1)):
            assert of_tokens.tolist() == lost
        assert (dhidden[0] == 0).all()
        assert dweight.isnan().all()
        assert dbias.isnan().all()


@every_reduction
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_ignored_rows_spoil_no_other(bad, reduction, device):
    """Dropped, they may hold anything. Multiplied, 0 * NaN would be in the gradient of the weight."""
    hidden, weight, target, bias = drawn(6, device=device, ignored=0)
    target[[1, 4]] = -100
    expected = with_gradients(linear_cross_entropy, (hidden, weight, target, bias), reduction=reduction, valid_rows=4)
    hidden[[1, 4]] = bad
    found = with_gradients(linear_cross_entropy, (hidden, weight, target, bias), reduction=reduction, valid_rows=4)
    assert_same(found, expected)


@every_reduction
def test_a_target_out_of_range_is_nan(reduction, device):
    hidden, weight, target, bias = drawn(6, device=device, ignored=0)
    for value in (CLASSES, 2**31 - 1, -1):
        target[3] = value
        loss, dhidden, *_ = with_gradients(linear_cross_entropy, (hidden, weight, target, bias), reduction=reduction)
        assert dhidden[3].isnan().all()
        assert loss.isnan().tolist() == ([i == 3 for i in range(6)] if reduction == "none" else True)


def test_no_rows(device):
    for shape, reduction in itertools.product(((0,), (2, 0)), REDUCTIONS):
        loss, *grads = with_gradients(linear_cross_entropy, drawn(*shape, device=device), reduction=reduction)
        assert loss.shape == (shape if reduction == "none" else ())
        assert (loss == 0).all()
        assert [g.shape for g in grads] == [(*shape, HIDDEN), (CLASSES, HIDDEN), (CLASSES,)]
        assert all((g == 0).all() for g in grads)


# Statistics, strides


@pytest.mark.parametrize("chunk", [None, 4 * ROW])
def test_statistics_are_those_of_the_logits(chunk, device):
    hidden, weight, target, bias = drawn(3, 7, device=device)
    _, expected = cross_entropy(hidden @ weight.T + bias, target, softcap=3.0, return_stats=True)
    for leaf in (hidden, hidden.clone().requires_grad_()):
        loss, stats = linear_cross_entropy(
            leaf, weight, target, bias, softcap=3.0, return_stats=True, chunk_bytes=chunk
        )
        assert isinstance(stats, TokenStats)
        assert loss.requires_grad == leaf.requires_grad
        assert not any(t.requires_grad for t in stats)
        for a, e in zip(stats, expected, strict=True):
            torch.testing.assert_close(a, e)


@every_reduction
@pytest.mark.parametrize("lay", [offset, transposed])
def test_layouts(lay, reduction, device):
    hidden, weight, target, bias = drawn(3, 6, device=device)
    expected = with_gradients(linear_cross_entropy, (hidden, weight, target, bias), reduction=reduction)
    laid = lay(hidden), lay(weight), target.T.contiguous().T, lay(bias)
    for a, e in zip(with_gradients(linear_cross_entropy, laid, reduction=reduction), expected, strict=True):
        torch.testing.assert_close(a, e)


def test_the_hidden_states_of_all_but_the_last_token(device):
    hidden, weight, target, bias = drawn(2, 6, device=device)
    assert_right((hidden[:, :-1], weight, target[:, 1:], bias))


def test_autocast(device):
    hidden, weight, target, bias = drawn(5, device=device)
    leaf = weight.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16), Calls() as record:
        loss = linear_cross_entropy(hidden, leaf, target, bias)
    (args,) = [args for op, args, _ in record.calls if op._schema.name == "rooftile::linear_cross_entropy"]
    assert [t.dtype for t in (args[0], args[1], args[3])] == [BF16] * 3
    loss.backward()
    assert leaf.grad.dtype is torch.float32


def test_quack_is_a_peer_where_it_is_installed_and_can_compute_the_same(device, monkeypatch):
    """A stand-in for quack with its signature, as of version 0.6."""
    from rooftile.cases import linear_cross_entropy as cases

    (peer,) = (peer for case in cases.CASES for peer in case.peers if peer.name == "quack")
    point = cases._point(16, 24, 40, reduction="sum", chunk_bytes=512)
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(ImportError):
        peer.build(point)

    def chunked_linear_cross_entropy(
        x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True, use_scaled_exp=None
    ):
        return torch.nn.functional.cross_entropy(x @ weight.mT, target, ignore_index=ignore_index, reduction=reduction)

    stub = types.ModuleType("quack.linear_cross_entropy")
    stub.chunked_linear_cross_entropy = chunked_linear_cross_entropy
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", stub)
    hidden, weight, target, _ = drawn(16, device=device, bias=False, classes=40)
    found = peer.build(point)(hidden, weight, target, **point.options)
    torch.testing.assert_close(found, linear_cross_entropy(hidden, weight, target, **point.options))
    for other in (
        cases._point(16, 24, 40, bias=True),
        cases._point(16, 24, 40, softcap=2.0),
        cases._point(16, 24, 40, reduction="none"),
        cases._point(15, 24, 40),
    ):
        with pytest.raises(Unsupported):
            peer.build(other)


# Errors


def test_wrong_shapes_and_dtypes(device):
    hidden, weight, target, bias = drawn(4, 3, device=device)
    op = "linear_cross_entropy: "
    for bad in (weight[:, 1:], weight[None], weight[:0]):
        with pytest.raises(ValueError, match=op + r"weight has shape .*, expected \(V, 24\)"):
            linear_cross_entropy(hidden, bad, target)
    for bad in (target[:2], target[0]):
        with pytest.raises(ValueError, match=op + r"target has shape .*, expected \(4, 3\) to match hidden's"):
            linear_cross_entropy(hidden, weight, bad)
    with pytest.raises(TypeError, match=op + "target has dtype torch.float32, expected int64 or int32"):
        linear_cross_entropy(hidden, weight, target.float())
    with pytest.raises(TypeError, match=op + "weight has dtype torch.bfloat16, expected torch.float32 to match hidden"):
        linear_cross_entropy(hidden, weight.bfloat16(), target)
    with pytest.raises(TypeError, match=op + "hidden has dtype torch.float64"):
        linear_cross_entropy(hidden.double(), weight, target)
    with pytest.raises(TypeError, match=op + "bias has dtype torch.bfloat16, expected torch.float32"):
        linear_cross_entropy(hidden, weight, target, bias.bfloat16())
    for name in ("bias", "class_weight"):
        with pytest.raises(
            ValueError, match=op + rf"{name} has shape \(36,\), expected \(37,\) to match weight's rows"
        ):
            linear_cross_entropy(hidden, weight, target, **{name: bias[1:]})
    with pytest.raises(ValueError, match=op + r"token_weights has shape \(4,\), expected \(4, 3\)"):
        linear_cross_entropy(hidden, weight, target, token_weights=hidden[:, 0, 0])
    with pytest.raises(ValueError, match=op + "hidden has shape"):
        linear_cross_entropy(hidden[0, 0, 0], weight, target)


def test_wrong_options(device):
    hidden, weight, target, _ = drawn(4, device=device)
    wrong = {
        "reduction": [("batchmean", ValueError, "'batchmean', expected one of mean, sum, none")],
        "label_smoothing": [(1.5, ValueError, "1.5, expected a number from 0 to 1")],
        "softcap": [(-3.0, ValueError, "-3.0, expected a finite")],
        "temperature": [(1e-320, ValueError, "1e-320, expected a finite number of 1e-30 or more")],
        "ignore_index": [
            (2**70, ValueError, f"{2**70}, expected an int of 64 bits"),
            (True, TypeError, "a bool, expected an int"),
        ],
        "precision": [("half", ValueError, "'half', expected one of ieee, tf32")],
        "chunk_bytes": [(0, ValueError, "0, expected 1 or more"), (1.5, TypeError, "a float, expected an int")],
        "valid_rows": [(-1, ValueError, "-1, expected 0 or more"), (True, TypeError, "a bool, expected an int")],
        "float32_weight_gradient": [(1, TypeError, "an int, expected a bool")],
        "return_stats": [(1, TypeError, "an int, expected a bool")],
    }
    for name, cases in wrong.items():
        for value, error, message in cases:
            with pytest.raises(error, match=f"linear_cross_entropy: {name} is {message}"):
                linear_cross_entropy(hidden, weight, target, **{name: value})


def test_weights_that_require_grad(device):
    hidden, weight, target, _ = drawn(4, device=device)
    for name, size in (("class_weight", CLASSES), ("token_weights", 4)):
        learned = torch.ones(size, device=device, requires_grad=True)
        with pytest.raises(ValueError, match=f"linear_cross_entropy: {name} requires grad, but gets no gradient"):
            linear_cross_entropy(hidden, weight, target, **{name: learned})


def test_the_ops_refuse_what_does_not_match(device):
    hidden, weight, target, _ = drawn(4, device=device)
    rest = 1.0, [False] * 5, False, 0, -1, "ieee"
    args = (hidden, weight, target, *[None] * 5, -100, 0.0, 0.0, 0.0, "sum")
    with pytest.raises(ValueError, match=r"linear_cross_entropy_backward: dloss has shape \(4,\), expected \(\)"):
        torch.ops.rooftile.linear_cross_entropy_backward(hidden[:, 0], *args, "later", False, *rest)
    hidden.requires_grad_()
    with pytest.raises(ValueError, match="gradient is 'none', expected 'now' or 'later' for inputs that need one"):
        torch.ops.rooftile.linear_cross_entropy(*args, "none", False, *rest)
    with pytest.raises(ValueError, match=r"needs is \[False, False, .*\], expected \[True, False, "):
        torch.ops.rooftile.linear_cross_entropy(*args, "now", False, *rest)


@pytest.mark.gpu
def test_the_default_stays_under_its_memory_on_a_gpu(device):
    """1.1 GiB above inputs and results at 8192 tokens and 128256 classes."""
    assert runtime.MODE is runtime.Mode.GPU
    hidden = torch.randn(8192, 4096, device=device, dtype=BF16).requires_grad_()
    weight = (torch.randn(128256, 4096, device=device, dtype=BF16) * 0.02).requires_grad_()
    target = torch.randint(128256, (8192,), device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
    results = 2 * (hidden.numel() + weight.numel())
    assert torch.cuda.max_memory_allocated() - before - results < 1.1 * 2**30
