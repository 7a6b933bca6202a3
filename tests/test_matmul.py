"""What is special to products: every kernel in every form, layouts, batches, what is refused, sums in a fixed order."""

import dataclasses
import itertools
import re

import pytest
import torch
from helpers import BF16, assert_same
from test_offsets import far_rows, no_plans_kept, use_kernels_without_int64

from rooftile import launching, runtime
from rooftile.cases import find_cases
from rooftile.cases.check import relative_error
from rooftile.ops.gemm import choose, tiled
from rooftile.ops.gemm import column_sum as sums
from rooftile.ops.gemm import gemv as row
from rooftile.ops.gemm.config import KERNELS, GemmConfig, Problem
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.gemm.matmul import matmul
from rooftile.primitives.partials import sum_partials
from rooftile.reference import matmul as reference

__all__ = ["far_rows", "no_plans_kept"]  # fixtures

TOLERANCES = find_cases(["linear"])[0].tolerances
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh")
TILED = GemmConfig("tiled", 32, 32, 16, num_stages=2)
CONFIGS = (
    TILED,
    GemmConfig("tiled", 16, 64, 32, group_m=2, split_k=3),
    GemmConfig("skinny", 16, 16, 32, split_k=2),
    GemmConfig("skinny", 64, 32, 16),
    GemmConfig("gemv", 1, 8, 32),
    GemmConfig("gemv", 1, 16, 64),
)


def truth(function, *tensors, **options):
    double = (None if t is None else t.double() for t in tensors)
    options = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    return getattr(reference, function.__name__)(*double, **options)


def assert_close(out, ref, direction="forward"):
    assert out.shape == ref.shape
    assert relative_error(out, ref) <= TOLERANCES[out.dtype][direction].ceiling


def drawn(*shape, dtype=torch.float32, device=None):
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.each_once
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.nightly), BF16], ids=str
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kernel} {c.block_m}x{c.block_n} split {c.split_k}")
def test_every_kernel_is_the_same_function(config, dtype, device):
    rows = {"gemv": 1, "skinny": 13, "tiled": 37}[config.kernel]
    for k, n in ((64, 48), (77, 33)):
        x, residual = drawn(rows, k, dtype=dtype, device=device), drawn(rows, n, dtype=dtype, device=device)
        weight, bias = drawn(2 * n, k, dtype=dtype, device=device), drawn(2 * n, dtype=dtype, device=device)
        with_or_without = (False, True) if n == 33 else (True,)
        for activation, with_bias, with_residual in itertools.product(ACTIVATIONS, *[with_or_without] * 2):
            given = (x, weight[:n], bias[:n] if with_bias else None)
            options = {"activation": activation, "residual": residual if with_residual else None}
            assert_close(linear(*given, **options, config=config), truth(linear, *given, **options))
        for activation in ACTIVATIONS[1:]:
            gated = gated_linear(x, weight, bias, activation=activation, config=config)
            assert_close(gated, truth(gated_linear, x, weight, bias, activation=activation))


def laid(t, layout):
    """t with its last dimension contiguous ("r"), or the one before ("c"), or neither ("n")."""
    if layout == "c":
        return t.mT.contiguous().mT
    if layout == "n":
        return torch.stack((t, torch.full_like(t, torch.nan)), dim=-1)[..., 0]
    return t


# Batches in layouts in which each operand has each once.
@pytest.mark.parametrize(
    ("layouts", "batch"),
    [
        pytest.param((a, b), batch, id=f"{a}{b}-{batch}", marks=pytest.mark.nightly if batch and skipped else ())
        for (i, a), (j, b), batch in itertools.product(enumerate("rcn"), enumerate("rcn"), ((), (3,)))
        for skipped in [(i + j) % 3 != 0]
    ],
)
def test_layouts_make_no_difference(layouts, batch, device):
    for m, n, k in ((37, 50, 70), (32, 32, 32)):
        a, b = drawn(*batch, m, k, device=device), drawn(*batch, k, n, device=device)
        for config in CONFIGS[:2]:
            out = matmul(laid(a, layouts[0]), laid(b, layouts[1]), config=config)
            assert_close(out, a.double() @ b.double())
            if runtime.MODE is runtime.Mode.INTERPRETER:
                assert torch.equal(out, matmul(a, b, config=config))


SHAPES = [
    *(((5,), (5,)), ((5,), (5, 6)), ((4, 5), (5,)), ((5,), (3, 5, 6)), ((2, 3, 4, 5), (5,))),
    *(((2, 3, 4, 5), (5, 6)), ((4, 5), (3, 5, 6)), ((3, 4, 5), (3, 5, 6)), ((2, 1, 4, 5), (3, 5, 6))),
    *(((2, 3, 4, 5), (2, 1, 5, 6)), ((1, 4, 5), (3, 5, 6)), ((1, 1, 4, 5), (5, 6)), ((3, 4, 5), (1, 5, 6))),
    *(((4, 0), (0, 6)), ((2, 3, 0), (0, 6)), ((0, 3), (3, 4)), ((4, 3), (3, 0)), ((2, 0, 5), (5, 3))),
    *(((0, 4, 5), (0, 5, 6)), ((0, 4, 5), (5, 6)), ((0,), (0,)), ((4, 5), (0, 5, 6))),
]

# So many batches share an operand that the sum over them is of several programs: in the interpreter, and on a GPU.
SHAPES += [((3, 4), (66, 4, 5)), ((66, 2, 3, 4), (2, 4, 5)), ((66, 2, 3, 4), (1, 2, 4, 5)), ((4,), (66, 4, 5))]
MANY = [((3, 4), (600, 4, 5)), ((600, 2, 3, 4), (2, 4, 5)), ((16, 16), (600, 16, 16)), ((600, 33, 9), (1, 9, 40))]
SHAPES += [pytest.param(*shapes, marks=pytest.mark.gpu) for shapes in MANY]


@pytest.mark.parametrize(("a_shape", "b_shape"), SHAPES, ids=str)
def test_shapes_are_those_of_torch(a_shape, b_shape, device):
    a, b = drawn(*a_shape, device=device).requires_grad_(), drawn(*b_shape, device=device).requires_grad_()
    doubles = [t.detach().double().requires_grad_() for t in (a, b)]
    y, ref = matmul(a, b), torch.matmul(*doubles)
    assert y.is_contiguous()
    assert_close(y, ref)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, (a, b), dy)
    for found, expected in zip(grads, torch.autograd.grad(ref, doubles, dy.double()), strict=True):
        assert_close(found, expected, "backward")


def test_sums_of_partials_take_vectors_alone(device):
    x = drawn(65, 12, device=device)
    for out in (x.new_empty(1, 3, 4), x.new_empty(12, 1), x.new_empty(11)):
        with pytest.raises(ValueError, match=r"column_sum: out has shape .*, expected \(12,\)"):
            sums.column_sum(x, out)
    for outs in ((x.new_empty(3, 4),), (x.new_empty(6), x.new_empty(2, 3))):
        with pytest.raises(ValueError, match=r"sum_partials: .* has shape .*, expected one dimension"):
            sum_partials(x, *outs)


def test_a_shared_weight_is_one_product_over_all_rows(device, monkeypatch):
    launched = []
    stock = tiled.prepare
    monkeypatch.setattr(
        tiled, "prepare", lambda o, c: launched.append([t.shape for t in (o.x, o.w, o.out)]) or stock(o, c)
    )
    a, b = drawn(2, 3, 16, device=device), drawn(16, 8, device=device)
    launching.forget()
    matmul(a, b)
    matmul(a.transpose(0, 1), b)  # its rows can't be taken as one
    assert launched == [[(6, 16), (8, 16), (6, 8)], [(3, 2, 16), (3, 8, 16), (3, 2, 8)]]


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.split_k > 1], ids=lambda c: c.kernel)
def test_split_sums_are_equal_to_the_bit_and_leave_the_counters_zero(config, device, monkeypatch):
    made = []
    stock = launching.counters
    monkeypatch.setattr(launching, "counters", lambda *args: made.append(stock(*args)) or made[-1])
    x, w = drawn(7, 300, device=device), drawn(40, 300, device=device)
    results = [linear(x, w, config=config) for _ in range(3)]
    assert all(torch.equal(r, results[0]) for r in results)
    assert made
    assert all(not t.any() for t in made)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_gradients_of_everything(batch, activation, dtype, device):
    k, n = 40, 24
    x, residual = drawn(*batch, 7, k, dtype=dtype, device=device), drawn(*batch, 7, n, dtype=dtype, device=device)
    weight, bias = drawn(n, k, dtype=dtype, device=device) / 8, drawn(n, device=device)  # a bias of float32
    leaves = [t.requires_grad_() for t in (x, weight, bias, residual)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    y = linear(*leaves[:3], residual=leaves[3], activation=activation)
    ref = reference.linear(*doubles[:3], residual=doubles[3], activation=activation)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, dy)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    for found, expected in zip(grads, torch.autograd.grad(ref, doubles, dy.double()), strict=True):
        assert relative_error(found, expected) <= TOLERANCES[dtype]["backward"].ceiling
    assert torch.equal(grads[3], dy)


def test_a_frozen_weight_keeps_no_input(device):
    x, weight = drawn(8, 32, device=device).requires_grad_(), drawn(16, 32, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        linear(x, weight).sum()
        assert kept == [weight.shape]
        kept.clear()
        linear(x.detach(), weight.requires_grad_()).sum()
        assert kept == [x.shape]
        kept.clear()
        matmul(x, weight.detach().mT).sum()
        assert kept == [weight.mT.shape]
        kept.clear()
        matmul(x.detach(), weight.mT).sum()
        assert kept == [x.shape]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_residual_alone_may_ask_for_a_gradient(activation, device):
    x, weight, residual = (drawn(8, 8, device=device) for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = linear(x, weight, activation=activation, residual=residual.requires_grad_())
    assert kept == []
    assert_same((y.detach(),), (linear(x, weight, activation=activation, residual=residual.detach()),))
    dy = torch.randn_like(y)
    assert torch.equal(*torch.autograd.grad(y, residual, dy), dy)


def test_an_activations_argument_is_all_that_is_kept_for_the_backward_beside_the_inputs(device):
    x, weight, residual = drawn(7, 16, device=device), drawn(44, 16, device=device), drawn(7, 44, device=device)
    weight.requires_grad_()
    own = {t.data_ptr() for t in (x, weight, residual)}
    for call in (
        lambda: linear(x, weight, activation="silu"),
        lambda: linear(x, weight, activation="gelu", residual=residual),
        lambda: gated_linear(x, weight),
    ):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            call()
        assert [t.shape for t in kept if t.data_ptr() not in own] == [(7, 44)]


def test_derivatives_of_derivatives_are_refused_where_they_are_not_zero(device):
    x, weight = drawn(4, 16, device=device).requires_grad_(), drawn(8, 16, device=device)
    y = gated_linear(x, weight)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients are not supported"):
        dx.sum().backward()


def test_tf32_has_ten_bits_and_ieee_all(device):
    x, weight = drawn(32, 64, device=device), drawn(48, 64, device=device)
    ref = truth(linear, x, weight)
    assert relative_error(linear(x, weight), ref) <= TOLERANCES[torch.float32]["forward"].ceiling
    assert 1e-5 < relative_error(linear(x, weight, precision="tf32"), ref) < 2**-10
    assert torch.equal(linear(x.to(BF16), weight.to(BF16), precision="tf32"), linear(x.to(BF16), weight.to(BF16)))


def test_autocast_casts_as_it_does_for_torch(device):
    x, weight, bias = drawn(5, 32, device=device), drawn(16, 32, device=device), drawn(16, device=device)
    with torch.autocast(device.type, dtype=BF16):
        out = linear(x, weight, bias)
        assert_same((out,), (linear(x.to(BF16), weight.to(BF16), bias.to(BF16)),))
        assert out.dtype == torch.nn.functional.linear(x, weight, bias).dtype
        assert matmul(x, weight.mT).dtype == gated_linear(x.to(BF16), weight).dtype == BF16
        leaf = weight.clone().requires_grad_()
        linear(x, leaf).sum().backward()
    assert leaf.grad.dtype == torch.float32


def test_a_configuration_is_taken_and_compiled(device):
    x, weight = drawn(9, 40, device=device), drawn(24, 40, device=device)

    def step(x, weight):
        return linear(x, weight, activation="silu", config=TILED)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_same((compiled(x, weight),), (step(x, weight),))


REFUSED = [
    (GemmConfig("gemv", 1, 8, 32), "takes one row of x"),
    (
        GemmConfig("gemv_persistent", 2, 2, 32),
        "kernel is 'gemv_persistent', expected one of gemv, skinny, tiled, hopper",
    ),
    (GemmConfig("skinny", 16, 16, 16), "block_m is 16"),
    (GemmConfig("tiled", 8, 16, 16), "block_m is 8, expected at least 16"),
    (GemmConfig("tiled", 32, 32, 32, num_warps=64), "num_warps is 64, of which"),
    (GemmConfig("tiled", 24, 32, 32), "block_m is 24, expected a power of two"),
    (GemmConfig("tiled", 32, 32, 32, num_warps=3), "num_warps is 3, expected a power of two"),
    (GemmConfig("tiled", 512, 512, 32), "block_m x block_n has 2048 sums for each thread of 4 warps"),
    (GemmConfig("tiled", 32, 32, 32, pingpong=True), "pingpong is True, which kernel 'hopper' alone has"),
    (GemmConfig("skinny", 32, 32, 32, slices=4), "slices is 4, expected 1 for a weight that is not quantized"),
    (GemmConfig("tiled", 32, 32, 32, prefetch=-1), "prefetch is -1, expected None for kernel 'tiled'"),
    (GemmConfig("tiled", 64, 64, 4096, num_stages=8192), "num_stages is 8192"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[r for _, r in REFUSED])
def test_impossible_configurations_are_refused_before_launch(config, reason, device, monkeypatch):
    monkeypatch.setattr(launching, "bind", lambda *_, **__: pytest.fail("bound"))
    x, weight = drawn(20, 32, device=device), drawn(16, 32, device=device)
    for call in (lambda: linear(x, weight, config=config), lambda: matmul(x, weight.mT, config=config)):
        with pytest.raises(ValueError, match=rf"config can't be launched: .*{re.escape(reason)}"):
            call()


def test_bad_arguments_are_named(device):
    x, weight, bias = drawn(4, 8, device=device), drawn(6, 8, device=device), drawn(6, device=device)
    wrong = [
        (lambda: linear(x, weight[:, :7]), ValueError, r"linear: weight has shape \(6, 7\), expected \(N, 8\)"),
        (lambda: linear(x, bias), ValueError, r"linear: weight has shape \(6,\), expected \(N, 8\)"),
        (lambda: linear(x[0, 0], weight), ValueError, r"linear: x has shape \(\)"),
        (lambda: linear(x, weight, bias[:5]), ValueError, r"linear: bias has shape \(5,\), expected \(6,\)"),
        (lambda: linear(x, weight, residual=x), ValueError, r"linear: residual has shape \(4, 8\), expected \(4, 6\)"),
        (lambda: linear(x, weight, activation="relu"), ValueError, "linear: activation is 'relu', expected one of"),
        (lambda: linear(x, weight, precision="fp8"), ValueError, "linear: precision is 'fp8', expected one of"),
        (
            lambda: linear(x, weight.to(BF16)),
            TypeError,
            "linear: weight has dtype torch.bfloat16, expected .*autocast",
        ),
        (lambda: linear(x.to(BF16), weight.to(BF16), bias.half()), TypeError, "linear: bias has dtype torch.float16"),
        (lambda: linear(x, weight, config="tiled"), TypeError, "linear: config is a str, expected"),
        (lambda: gated_linear(x, weight[:5]), ValueError, "gated_linear: weight has 5 rows, expected an even number"),
        (lambda: matmul(x, weight), ValueError, r"matmul: b has shape \(6, 8\), expected 8 as its second to last"),
        (lambda: matmul(x[0, 0], x), ValueError, r"matmul: a has shape \(\)"),
        (lambda: matmul(x.expand(2, 4, 8), weight.mT.expand(3, 8, 6)), ValueError, "matmul: b has shape .* broadcast"),
        (lambda: matmul(x, weight.mT.half()), TypeError, "matmul: b has dtype torch.float16, expected torch.float32"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()
    for bad in ({"kernel": "best"}, {"block_n": 24}, {"split_k": 0}, {"num_stages": 2.0}):
        with pytest.raises(ValueError, match="GemmConfig: "):
            GemmConfig(**{"kernel": "tiled", "block_m": 16, "block_n": 16, "block_k": 16, **bad})


EVERY_TARGET = [*runtime.TARGETS.values(), runtime.INTERPRETER]


@pytest.mark.parametrize("target", EVERY_TARGET, ids=lambda t: t.arch)
def test_every_problem_has_a_configuration_that_its_kernel_takes(target):
    sizes = itertools.product((1, 3, 16, 64, 100, 256, 8192), (1, 33, 4096, 28672), (0, 1, 40, 4096))
    for (m, n, k), dtype, gated in itertools.product(sizes, (torch.float32, BF16), (False, True)):
        for precision, layouts, batch in (("ieee", "kk", 1), ("tf32", "mn", 1), ("ieee", "kn", 5)):
            p = Problem(m, n, k, dtype, batch, gated, "", precision, *layouts)
            c = choose.choose(p, target)
            assert choose.can_implement(p, c, target) is None, (p, c)


def test_products_as_thin_as_a_lora_adapter_have_narrow_tiles_on_every_sm():
    target = runtime.TARGETS["sm_90"]
    for m, n, layouts in ((4096, 8, "kk"), (4096, 16, "kn"), (16, 4096, "mn")):
        c = choose.choose(Problem(m, n, 4096, BF16, 1, False, "", "ieee", *layouts), target)
        assert (c.block_m if m == 16 else c.block_n) == 16
        assert c.split_k * 4096 // 64 == 128  # of 132 SMs
    assert choose.choose(Problem(16, 4096, 4096, BF16), target).kernel == "skinny"  # of decoding


def test_a_tuned_entry_comes_first_unless_it_can_not_be_launched(monkeypatch):
    target = runtime.TARGETS["sm_90"]
    p = Problem(13, 4096, 4096, BF16)
    asked = []
    entry = {"kernel": "tiled", "block_m": 16, "block_n": 32, "block_k": 64}
    monkeypatch.setattr(choose.tuning, "lookup", lambda op, key, on: asked.append((op, key, on)) or entry)
    choose.choose.cache_clear()
    assert choose.choose(p, target) == GemmConfig(**entry)
    assert asked == [("matmul", "m16 n4096 k4096 bfloat16 xk wk", target)]
    untuned = next(c for c in choose.candidates(p, target) if choose.can_implement(p, c, target) is None)
    good, taken = entry, GemmConfig(**entry)
    for change in ({"kernel": "skinny", "block_m": 8}, {"block_m": 15}, {"colour": "red"}):
        entry = {**good, **change}
        choose.choose.cache_clear()
        assert choose.choose(p, target) == untuned != taken
    choose.choose.cache_clear()


def test_rows_far_apart(far_rows, device):
    near, far = run_far(far_rows, device)
    assert_same(far, near)


def test_a_kernel_with_offsets_of_32_bits_is_caught(far_rows, device, monkeypatch, tmp_path, no_plans_kept):
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("on a GPU a wild access ends the process: the interpreter alone can show it")
    from rooftile.interpreter.memory import OutOfBoundsError

    for file in (tiled, sums):
        use_kernels_without_int64(file, monkeypatch, tmp_path)
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        run_far(far_rows, device)


def run_far(lay, device):
    """x, the weight and the gradient of rows 2^30 + 64 apart: each is read along its rows and across them."""
    x, weight, dy = (drawn(4, 48, dtype=BF16, device=device) for _ in range(3))
    dy = dy[:, :4].contiguous()
    results = []
    for place in (torch.clone, lay):
        leaves = [place(x).requires_grad_(), weight.clone().requires_grad_(), drawn(4, device=device).zero_()]
        y = linear(*leaves[:2], leaves[2].requires_grad_())
        grads = torch.autograd.grad(y, leaves, place(dy))
        far_weight = linear(x, place(weight))
        results.append((y.detach(), far_weight, *grads))
    return results


def test_the_kernels_of_configurations_are_those_that_there_are():
    problems = [
        Problem(1, 64, 64, BF16, **more)
        for more in ({}, {"norm": True}, {"weight": "int8"}, {"weight": "int4", "group": 32, "norm": True})
    ]
    assert {name for p in problems for name in choose.kernels(p)} == set(KERNELS)
    missing = {
        name for p in problems for name in choose.kernels(p) if choose._imported(choose.kernels(p)[name]) is None
    }
    assert missing in (set(), {"hopper", "gemv_imma"})


def test_registers_are_held_where_a_few_keep_programs_from_running_at_once():
    block, c, sm_90 = 4096, GemmConfig("gemv", 1, 4, 1024, num_warps=4, num_stages=1), runtime.TARGETS["sm_90"]
    # A multiprocessor has room for six such programs of 80 registers a thread, and for seven of 72.
    for programs, registers in ((1, 0), (132, 0), (792, 0), (793, 72), (896, 72), (924, 72), (925, 0), (10**5, 0)):
        assert row._register_limit(BF16, block, c, programs, sm_90) == registers
    for change in ({"num_stages": 2}, {"num_warps": 8}):
        assert row._register_limit(BF16, block, dataclasses.replace(c, **change), 896, sm_90) == 0
    assert row._register_limit(BF16, 2 * block, c, 896, sm_90) == 0
    assert row._register_limit(BF16, block, c, 896, runtime.TARGETS["sm_80"]) == 0
    # For int8 64, with which there is room for eight.
    for programs, registers in ((924, 0), (925, 64), (1024, 64), (1056, 64), (1057, 0)):
        assert row._register_limit(torch.int8, 2 * block, c, programs, sm_90) == registers
