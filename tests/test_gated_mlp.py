"""What is special to gated_mlp: the kernels with a gate's epilogue, what is kept, gradients that are not asked for."""

import itertools

import pytest
import torch
from helpers import BF16
from test_matmul import drawn

from rooftile import runtime
from rooftile.cases import find_cases
from rooftile.cases.check import relative_error
from rooftile.ops.gemm import gated_mlp as module
from rooftile.ops.gemm import hopper_gates
from rooftile.ops.gemm.config import Problem
from rooftile.ops.gemm.gated_mlp import gated_mlp
from rooftile.reference import gated_mlp as reference

CASE = find_cases(["gated_mlp"])[0]
NAMES = ("x", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias")


def make(m, k, n, out, device, dtype=torch.float32):
    shapes = (m, k), (2 * n, k), (out, n), (2 * n,), (out,)
    scales = 1, k**-0.5, n**-0.5, 1, 1
    return [(drawn(*s, device=device) * scale).to(dtype) for s, scale in zip(shapes, scales, strict=True)]


def gradients(tensors, dy, asked=NAMES, function=gated_mlp, **options):
    leaves = [t.detach().requires_grad_(name in asked) for name, t in zip(NAMES, tensors, strict=True)]
    y = function(*leaves, **options)
    return y, torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_subset_of_gradients_equals_those_of_the_whole_backward(count, device):
    tensors = make(5, 24, 16, 8, device)
    dy = drawn(5, 8, device=device)
    everything = dict(zip(NAMES, gradients(tensors, dy)[1], strict=True))
    for asked in itertools.combinations(NAMES, count):
        found = gradients(tensors, dy, asked)[1]
        for name, grad in zip(asked, found, strict=True):
            assert relative_error(grad, everything[name]) <= CASE.tolerances[torch.float32]["backward"].ceiling


def test_gate_and_up_are_kept_for_the_backward_and_h_is_not(device):
    m, k, n = 64, 32, 96
    tensors = [t.requires_grad_() for t in make(m, k, n, 16, device)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_mlp(*tensors)
    own = {t.data_ptr() for t in tensors}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in own] == [(m, 2 * n)]


def test_without_gradients_gate_and_up_are_not_written(device, monkeypatch):
    shapes = []
    stock = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: (shapes.append(size), stock(*size, **kw))[1])
    gated_mlp(*make(6, 24, 20, 8, device))
    assert ((6, 40),) not in shapes


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_weight", lambda t: t[:-1], r"gate_up_weight has shape \(31, 24\), expected \(2N, 24\)"),
        ("gate_up_weight", lambda t: t[:, :-1], r"gate_up_weight has shape \(32, 23\), expected \(2N, 24\)"),
        ("down_weight", lambda t: t[:, :-1], r"down_weight has shape \(8, 15\), expected \(R, 16\)"),
        ("gate_up_bias", lambda t: t[:-1], r"gate_up_bias has shape \(31,\), expected \(32,\)"),
        ("down_bias", lambda t: t[:-1], r"down_bias has shape \(7,\), expected \(8,\)"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_shapes_that_do_not_fit_are_named(name, change, message, grad, device):
    tensors = dict(zip(NAMES, make(5, 24, 16, 8, device), strict=True))
    tensors[name] = change(tensors[name])
    tensors["x"].requires_grad_(grad)
    with pytest.raises(ValueError, match=f"gated_mlp: {message}"):
        gated_mlp(**tensors)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("x", lambda t: t[:-1], ValueError, r"x has shape \(4, 24\), expected \(5, 24\)"),
        ("x", lambda t: t.half(), TypeError, r"x has dtype torch.float16, expected torch.float32"),
        ("gate_up_weight", lambda t: t[:-2], ValueError, r"gate_up_weight has shape \(30, 24\), expected \(32, 24\)"),
        ("down_weight", lambda t: t[:, 1:], ValueError, r"down_weight has shape \(8, 15\), expected \(8, 16\)"),
        ("gate_up", lambda t: t[1:], ValueError, r"gate_up has shape \(4, 32\), expected \(5, 32\)"),
        ("activation", lambda t: "relu", ValueError, "activation is 'relu'"),
    ],
)
def test_backward_checks_what_it_reads(name, change, error, message, device):
    x, gate_up_weight, down_weight, *_ = make(5, 24, 16, 8, device)
    given = {"dy": drawn(5, 8, device=device), "x": x, "gate_up_weight": gate_up_weight, "down_weight": down_weight}
    given |= {"gate_up": drawn(5, 32, device=device), "gate_up_bias": None, "down_bias": None, "activation": "silu"}
    given[name] = change(given[name])
    with pytest.raises(error, match=f"gated_mlp_backward: {message}"):
        torch.ops.rooftile.gated_mlp_backward(**given, precision="ieee", needs=[True, True, True, False, False])


def test_backward_with_the_gates_epilogue_is_for_many_aligned_rows():
    target = runtime.TARGETS["sm_90"]
    problem = Problem(16384, 8192, 2048, BF16, w_layout="n")
    assert hopper_gates.backward_config(problem, target) is not None
    for other in (
        Problem(512, 4096, 2048, BF16, w_layout="n"),  # 88 tiles
        Problem(16384, 8196, 2048, BF16, w_layout="n"),  # rows that TMA can't take
        Problem(16384, 8192, 2048, torch.float32, w_layout="n"),
    ):
        assert hopper_gates.backward_config(other, target) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.half])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", [(2104, 136, 1608, 72), (4096, 256, 1536, 256), (1032, 64, 3208, 24)])
def test_gates_in_epilogues_are_the_same_function(sizes, activation, dtype, device, monkeypatch):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernels are for sm_90, and the GPU is {runtime.target(device).arch}")
    used = []
    for name in ("prepare_forward", "prepare_backward"):
        prepare = getattr(module.hopper_gates, name)
        monkeypatch.setattr(module.hopper_gates, name, lambda *a, f=prepare, n=name: (used.append(n), f(*a))[1])
    stock = torch.empty

    def unwritten(*size, **options):
        t = stock(*size, **options)
        return t.fill_(torch.nan) if t.is_floating_point() else t

    m, k, n, out = sizes
    tensors, dy = make(m, k, n, out, device, dtype), drawn(m, out, dtype=dtype, device=device)
    if activation == "gelu":  # other layouts and a bias in float32
        tensors[1], dy = tensors[1].mT.contiguous().mT, dy.mT.contiguous().mT
        tensors[3] = tensors[3].float()
    y64, expected = gradients(
        [t.double() for t in tensors], dy.double(), function=reference.gated_mlp, activation=activation
    )
    monkeypatch.setattr(torch, "empty", unwritten)
    y, found = gradients(tensors, dy, activation=activation)
    assert used == ["prepare_forward", "prepare_backward"]
    assert relative_error(y, y64) <= CASE.tolerances[dtype]["forward"].ceiling
    for grad, truth in zip(found, expected, strict=True):
        assert relative_error(grad, truth) <= CASE.tolerances[dtype]["backward"].ceiling
    for asked in (NAMES[:1], NAMES[1:2], NAMES[3:4], NAMES[:2]):  # without h
        for grad, name in zip(gradients(tensors, dy, asked, activation=activation)[1], asked, strict=True):
            assert torch.equal(grad, found[NAMES.index(name)])
