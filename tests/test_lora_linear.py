"""What is special to lora_linear: the kernels that continue a sum and those that don't, ranks, what is kept."""

import itertools

import pytest
import torch
from helpers import BF16, assert_same
from test_matmul import TILED
from test_matmul_hopper import HOPPER, apart
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from rooftile import runtime
from rooftile.cases import find_cases
from rooftile.cases.check import relative_error
from rooftile.ops.gemm import dispatch
from rooftile.ops.gemm.config import GemmConfig, Operands
from rooftile.ops.gemm.linear import linear
from rooftile.ops.gemm.lora_linear import _scaled, lora_linear
from rooftile.reference import lora_linear as reference

TOLERANCES = find_cases(["lora_linear"])[0].tolerances


def drawn(m, k, n, rank, dtype=torch.float32, device=None):
    """x, the weight, both factors and the bias; the adapter's result is as large as the layer's."""
    shapes = ((m, k, 1), (n, k, k), (rank, k, k), (n, rank, rank), (1, n, 1))
    x, weight, a, b, bias = ((torch.randn(p, q, device=device) * s**-0.5).to(dtype) for p, q, s in shapes)
    return x, weight, a, b, bias[0]


def truth(*tensors, **options):
    return reference.lora_linear(*(None if t is None else t.double() for t in tensors), **options)


def assert_close(out, ref, direction="forward"):
    assert out.shape == ref.shape
    assert relative_error(out, ref) <= TOLERANCES[out.dtype][direction].ceiling


CONFIGS = (
    TILED,
    GemmConfig("tiled", 16, 64, 32, group_m=2, split_k=3),
    GemmConfig("skinny", 64, 32, 16),
    GemmConfig("skinny", 64, 16, 32, split_k=2),
)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel} {c.block_m}x{c.block_n} split {c.split_k}")
def test_every_kernel_and_rank_is_the_same_function(config, dtype, device):
    for (k, n), rank in itertools.product(((96, 48), (77, 33)), (1, 5, 16, 40)):
        given = drawn(37, k, n, rank, dtype, device)
        assert_close(lora_linear(*given, scale=0.3, config=config), truth(*given, scale=0.3))
        assert_close(lora_linear(*given[:4], config=config), truth(*given[:4]))


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["kk", "kn", "mk", "mn"])
@pytest.mark.parametrize("config", HOPPER, ids=str)
def test_hopper_is_the_same_function(config, layouts, device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernel is for sm_90, and the GPU is {runtime.target(device).arch}")
    for (m, n, k), rank in itertools.product(((1, 8, 136), (77, 200, 336), (2100, 2056, 336)), (4, 16, 100)):
        x, weight, a, b, bias = drawn(m, k, n, rank, BF16, device)
        x, weight = apart(x, layouts[0]), apart(weight, "k" if layouts[1] == "k" else "m")
        out = lora_linear(x, weight, a, b, bias, scale=0.3, config=config)
        assert_close(out, truth(x, weight, a, b, bias, scale=0.3))
        assert torch.equal(out, lora_linear(x, weight, a, b, bias, scale=0.3, config=config))


def test_an_adapter_below_the_results_rounding_is_not_lost(device):
    """Its result is added before the layer's is rounded: on the average over elements, all of it arrives."""
    x, weight, a, b, _ = drawn(64, 512, 256, 16, BF16, device)
    b = b * 2.0**-11  # a quarter of the unit in the last place of most results
    change = (x.double() @ a.double().mT) @ b.double().mT

    def kept(out):
        return ((out.double() - linear(x, weight).double()) * change).sum() / change.square().sum()

    assert abs(kept(lora_linear(x, weight, a, b)) - 1) < 0.1
    assert kept(linear(x, weight) + linear(linear(x, a), b)) < 0.5  # of the layers apart, most is lost


def test_the_scaled_factor_keeps_its_strides_in_a_functional_graph():
    """Strides are compiled into the kernel, and a graph without mutations has results with strides of their own."""
    graph = make_fx(functionalize(lambda b: _scaled(b, 2.0)), tracing_mode="fake")(torch.randn(40, 5))
    (result,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    assert result.meta["val"].stride() == _scaled(torch.randn(40, 5), 2.0).stride() == (8, 1)


def test_an_adapter_of_zeros_leaves_the_layers_bits(device):
    x, weight, a, b, bias = drawn(40, 96, 64, 16, BF16, device)
    assert_same((lora_linear(x, weight, a, torch.zeros_like(b), bias),), (linear(x, weight, bias),))


def test_strides_and_dimensions_are_taken_as_they_are(device):
    x, weight, a, b, bias = drawn(24, 96, 64, 16, device=device)
    expected = lora_linear(x, weight, a, b, bias, scale=2.0)
    laid = [t.mT.contiguous().mT for t in (x, weight, a, b)]
    assert_same((lora_linear(*laid, bias, scale=2.0),), (expected,))
    cube = x.view(2, 3, 4, 96).transpose(0, 2)
    found = lora_linear(cube, weight, a, b, bias, scale=2.0)
    assert_same((found,), (expected.view(2, 3, 4, 64).transpose(0, 2).contiguous(),))


def test_hopper_continues_a_sum_of_operands_in_the_same_tiles():
    def of(rows, cols, layout="k", pad=0):
        t = torch.empty((rows, cols + pad) if layout == "k" else (cols, rows + pad), dtype=BF16)
        return t[:, :cols] if layout == "k" else t[:, :rows].mT

    hopper = GemmConfig("hopper", 128, 128, 64, num_warps=8, num_stages=4)
    for x_layout, w_layout in itertools.product("km", "kn"):
        o = Operands(of(256, 64, x_layout), of(128, 64, w_layout), of(256, 128))
        for rank, aligned in ((16, True), (20, False)):
            # Transposed, a factor's rows are of x's length.
            more_x, more_w = of(256, rank, x_layout), of(128, rank, w_layout)
            along_k = "k" in (x_layout, w_layout)
            assert dispatch.continues(o, more_x, more_w, hopper) == (aligned or not along_k)
            assert dispatch.continues(o, more_x, more_w, TILED)
        assert dispatch.continues(
            o, of(256, 20, x_layout, pad=4), of(128, 20, w_layout, pad=4 * (w_layout == "k")), hopper
        ) == (x_layout == "k")
        assert not dispatch.continues(o, of(256, 16, "m" if x_layout == "k" else "k"), of(128, 16, w_layout), hopper)
    assert not dispatch.continues(o, of(256, 16), of(128, 16), GemmConfig("skinny", 64, 32, 16))


def test_many_rows_continue_the_sum_and_few_do_not(device, monkeypatch):
    """By the kernel that is chosen for the layer alone."""
    seen = []
    stock = dispatch.starter
    monkeypatch.setattr(
        dispatch, "starter", lambda p, o, c: seen.append((o.more_x is None, o.residual)) or stock(p, o, c)
    )
    x, weight, a, b, _ = drawn(48, 96, 64, 16, device=device)
    lora_linear(x, weight, a, b, config=TILED)
    assert [alone for alone, _ in seen] == [True, False]  # u, and the rest
    seen.clear()
    lora_linear(x, weight, a, b, config=GemmConfig("skinny", 64, 32, 16))
    assert [(alone, residual is None) for alone, residual in seen] == [(True, True), (True, True), (True, False)]


def test_a_frozen_layer_keeps_x_and_u_alone(device):
    x, weight, a, b, bias = drawn(7, 24, 40, 8, device=device)
    for asking, shapes in (
        ((a, b), [(7, 24), (40, 8), (7, 8)]),
        ((b,), [(7, 8)]),
        ((x,), [(40, 24), (8, 24), (40, 8)]),
        ((bias,), [(40,)]),
    ):
        kept = []
        for t in asking:
            t.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            lora_linear(x, weight, a, b, bias)
        for t in asking:
            t.requires_grad_(False)
        assert [tuple(t.shape) for t in kept] == shapes


def test_each_gradient_alone_is_that_of_all(device):
    leaves = [t.requires_grad_() for t in drawn(13, 24, 40, 8, device=device)]
    dropped = torch.randn(13, 24, device=device, requires_grad=True)
    for lora_input in (None, dropped):
        every = [*leaves, *([] if lora_input is None else [dropped])]
        out = lora_linear(*leaves, scale=0.5, lora_input=lora_input)
        dy = torch.randn_like(out)
        expected = torch.autograd.grad(out, every, dy, retain_graph=True)
        doubles = [t.detach().double().requires_grad_() for t in every]
        exact = reference.lora_linear(*doubles[:5], scale=0.5, lora_input=doubles[5] if len(doubles) > 5 else None)
        for found, ref in zip(expected, torch.autograd.grad(exact, doubles, dy.double()), strict=True):
            assert_close(found, ref, "backward")
        for i, leaf in enumerate(every):
            given = [t if t is leaf else t.detach() for t in every]
            one = lora_linear(*given[:5], scale=0.5, lora_input=given[5] if len(given) > 5 else None)
            assert_same(torch.autograd.grad(one, leaf, dy), (expected[i],))


def test_autocast_casts_all_and_gives_gradients_in_their_dtypes(device):
    given = drawn(9, 32, 24, 8, device=device)
    with torch.autocast(device.type, dtype=BF16):
        leaves = [t.clone().requires_grad_() for t in given]
        out = lora_linear(*leaves, scale=0.5)
        assert_same((out,), (lora_linear(*(t.to(BF16) for t in given), scale=0.5),))
        out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)


def test_bad_arguments_are_named(device):
    x, weight, a, b, bias = drawn(4, 8, 6, 2, device=device)
    wrong = [
        (lambda: lora_linear(x, weight[:, :7], a, b), ValueError, r"weight has shape \(6, 7\), expected \(N, 8\)"),
        (lambda: lora_linear(x, weight, a[:, :7], b), ValueError, r"lora_a has shape \(2, 7\), expected \(R, 8\)"),
        (lambda: lora_linear(x, weight, a[:0], b[:, :0]), ValueError, r"lora_a has shape \(0, 8\), expected \(R, 8\)"),
        (lambda: lora_linear(x, weight, a, b.mT), ValueError, r"lora_b has shape \(2, 6\), expected \(6, 2\)"),
        (lambda: lora_linear(x, weight, a, b, bias[:5]), ValueError, r"bias has shape \(5,\), expected \(6,\)"),
        (lambda: lora_linear(x, weight, a, b, lora_input=x[:3]), ValueError, r"lora_input has shape \(3, 8\)"),
        (lambda: lora_linear(x, weight, a.half(), b), TypeError, "lora_a has dtype torch.float16, expected .*autocast"),
        (lambda: lora_linear(x, weight, a, b, scale="1"), TypeError, "scale is a str, expected a number"),
        (lambda: lora_linear(x, weight, a, b, scale=torch.ones(1)), TypeError, "scale is a Tensor, expected a number"),
        (lambda: lora_linear(x, weight, a, b, precision="fp8"), ValueError, "precision is 'fp8', expected one of"),
        (lambda: lora_linear(x[0, 0], weight, a, b), ValueError, r"x has shape \(\)"),
        (lambda: lora_linear(x, weight, a, b, config="tiled"), TypeError, "config is a str, expected"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=f"lora_linear: {message}"):
            call()
