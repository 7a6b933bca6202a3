"""What is special to the norm before a product, plain or gated: one kernel or two, every split, numbers far from 1."""

import functools

import pytest
import torch
from helpers import BF16, assert_same
from test_offsets import far_rows, no_plans_kept, use_kernels_without_int64

from rooftile import launching, runtime
from rooftile.cases import find_cases
from rooftile.cases.check import relative_error
from rooftile.cases.rms_norm_linear import traffic
from rooftile.ops.gemm import choose, choose_norm, gemv, skinny
from rooftile.ops.gemm import gemv_persistent as held
from rooftile.ops.gemm.config import GemmConfig, Problem
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear, rms_norm_linear
from rooftile.ops.rms_norm import rms_norm
from rooftile.reference import rms_norm_linear as reference

__all__ = ["far_rows", "no_plans_kept"]  # fixtures

TOLERANCES = find_cases(["rms_norm_linear"])[0].tolerances
DTYPES = [torch.float32, torch.float16, BF16]
ROW = (GemmConfig("gemv", 1, 8, 32), GemmConfig("gemv", 1, 16, 64))
HELD = (GemmConfig("gemv_persistent", 1, 4, 256, 1, 1, 4, 2), GemmConfig("gemv_persistent", 2, 2, 256, 1, 1, 4, 1))
SKINNY = (
    GemmConfig("skinny", 16, 16, 32, split_k=2),
    GemmConfig("skinny", 32, 32, 16, split_k=4, num_stages=2),
    GemmConfig("skinny", 64, 32, 64),
)
APART = GemmConfig("tiled", 32, 32, 32)


def drawn(*shape, dtype=torch.float32, device=None):
    return torch.randn(shape, device=device).to(dtype)


def inputs(m, k, n, dtype=torch.float32, device=None, bias=True):
    """x, the norm's weight, the weight, the bias."""
    weight = (drawn(n, k, device=device) * k**-0.5).to(dtype)
    found = drawn(m, k, dtype=dtype, device=device), drawn(k, dtype=dtype, device=device), weight
    return (*found, drawn(n, dtype=dtype, device=device) if bias else None)


def truth(*tensors, **options):
    return reference.rms_norm_linear(*(None if t is None else t.double() for t in tensors), **options)


def gated_inputs(m, k, n, dtype=torch.float32, device=None, bias=True):
    """The same for n columns of the result: as many rows of the gate, and of up."""
    return inputs(m, k, 2 * n, dtype, device, bias)


def gated_truth(*tensors, **options):
    return reference.rms_norm_gated_linear(*(None if t is None else t.double() for t in tensors), **options)


def assert_close(out, ref, direction="forward"):
    assert out.shape == ref.shape
    assert relative_error(out, ref) <= TOLERANCES[out.dtype][direction].ceiling


def named(c):
    return f"{c.kernel} {c.block_m}x{c.block_n}x{c.block_k} split {c.split_k}"


def few(c):
    """The numbers of rows that it takes, where they are one or two; () where it takes others."""
    return () if c is None else {"gemv": (1,), "gemv_persistent": (1, 2)[: c.block_m]}.get(c.kernel, ())


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [*ROW, *HELD, *SKINNY], ids=named)
def test_one_kernel_is_the_same_function_as_two(config, dtype, device):
    rows = few(config) or (1, 13, config.block_m)
    for m, (k, n) in zip(rows, ((77, 33), (64, 48), (130, 7)), strict=False):
        for bias, options in ((True, {}), (False, {"eps": 0.5, "offset": 1.0})):
            given = inputs(m, k, n, dtype, device, bias)
            out = rms_norm_linear(*given, **options, config=config)
            assert_close(out, truth(*given, **options))
            assert_close(rms_norm_linear(*given, **options, config=APART), truth(*given, **options))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [*ROW, *HELD, *SKINNY[:2]], ids=named)
def test_one_gated_kernel_is_the_same_function_as_two(config, dtype, device):
    rows = few(config) or (1, 13)
    for m, (k, n), activation in zip(rows, ((77, 33), (64, 7)), ("gelu", "gelu_tanh"), strict=False):
        for bias, options in ((True, {}), (False, {"eps": 0.5, "offset": 1.0, "activation": activation})):
            given = gated_inputs(m, k, n, dtype, device, bias)
            out = rms_norm_gated_linear(*given, **options, config=config)
            assert_close(out, gated_truth(*given, **options))


def test_gate_and_up_do_not_change_places(device):
    """Each is told from the other by its bias alone."""
    x, norm_weight, weight, _ = gated_inputs(2, 32, 5, device=device)
    weight.zero_()
    bias = torch.cat((torch.full((5,), 2.0), torch.arange(5.0))).to(device)
    expected = torch.nn.functional.silu(bias[:5]) * bias[5:]
    for m, configs in ((1, (*ROW, *HELD, None)), (2, (HELD[1], *SKINNY, APART, None))):
        for config in configs:
            out = rms_norm_gated_linear(x[:m], norm_weight, weight, bias, config=config)
            torch.testing.assert_close(out, expected.expand(m, 5), rtol=1e-5, atol=0)


def test_the_tiled_configuration_of_a_gate_is_the_norm_and_then_the_product(device):
    x, norm_weight, weight, bias = gated_inputs(9, 70, 40, BF16, device)
    normed = rms_norm(x, norm_weight, eps=0.1, offset=1.0, rounding="none")
    given = {"activation": "gelu", "config": APART}
    out = rms_norm_gated_linear(x, norm_weight, weight, bias, eps=0.1, offset=1.0, **given)
    assert torch.equal(out, gated_linear(normed, weight, bias, **given))


def test_the_tiled_configuration_is_the_norm_and_then_the_product(device):
    x, norm_weight, weight, bias = inputs(9, 70, 40, BF16, device)
    normed = rms_norm(x, norm_weight, eps=0.1, offset=1.0, rounding="none")
    out = rms_norm_linear(x, norm_weight, weight, bias, eps=0.1, offset=1.0, config=APART)
    assert torch.equal(out, linear(normed, weight, bias, config=APART))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_switch_is_where_it_is_said_to_be(gated, device, monkeypatch):
    launched = []
    for file in (gemv, held, skinny):
        start = "prepare" if hasattr(file, "prepare") else "launch"
        kept = getattr(file, start)

        def noted(o, *args, name=file.__name__, kept=kept):
            if o.norm_weight is not None:
                launched.append(name)
            return kept(o, *args)

        monkeypatch.setattr(file, start, functools.wraps(kept)(noted))
    launching.forget()
    function, expect, draw = (rms_norm_linear, truth, inputs)
    if gated:
        function, expect, draw = (rms_norm_gated_linear, gated_truth, gated_inputs)
    most = choose_norm.fused_rows(16, runtime.target(device), gated)
    held_rows = 0 if runtime.MODE is runtime.Mode.INTERPRETER else 1 + gated
    for m, otherwise in ((1, "gemv"), (2, "skinny"), (most, "skinny"), (most + 1, None)):
        expected = "gemv_persistent" if m <= held_rows else otherwise
        launched.clear()
        given = draw(m, 32, 16, BF16, device)
        assert_close(function(*given), expect(*given))
        assert [name.rpartition(".")[2] for name in launched] == ([expected] if expected else [])


def test_leading_dimensions_are_rows(device):
    x, *rest = inputs(6, 64, 24, BF16, device)
    out = rms_norm_linear(x.view(2, 3, 64), *rest)
    assert out.shape == (2, 3, 24)
    assert torch.equal(out.view(6, 24), rms_norm_linear(x, *rest))
    assert rms_norm_linear(x[0], *rest).shape == (24,)


@pytest.mark.parametrize("config", [*ROW, *HELD, *SKINNY, APART, None], ids=lambda c: named(c) if c else "chosen")
def test_rows_of_zeros_give_the_bias(config, device):
    for dtype in DTYPES:
        m = (few(config) or (3,))[-1]
        _, norm_weight, weight, bias = inputs(m, 64, 24, dtype, device)
        out = rms_norm_linear(torch.zeros(m, 64, dtype=dtype, device=device), norm_weight, weight, bias, config=config)
        assert torch.equal(out, bias.expand(m, 24))


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [ROW[0], *HELD, *SKINNY], ids=named)
def test_numbers_far_from_one_are_normalised_as_any(config, dtype, device):
    """Squares of float16's largest numbers pass its range, as does x times the norm's weight; small ones vanish."""
    m = (few(config) or (6,))[-1]
    x, norm_weight, weight, bias = inputs(m, 96, 24, dtype, device)
    sizes = torch.tensor([3e4, 2e3, 1.0, 1e-2, 1e-3, 6e-5], device=device)[:m, None]
    x = (x.float().sign() * (0.5 + x.float().abs() / 8) * sizes).to(dtype)
    norm_weight = norm_weight * 8
    for given in ((x, norm_weight, weight, bias), (x, norm_weight / 1024, weight, None)):
        out, ref = rms_norm_linear(*given, eps=0.0, config=config), truth(*given, eps=0.0)
        assert torch.isfinite(out).all()
        for i in range(m):
            assert_close(out[i], ref[i])


@pytest.mark.parametrize("config", [ROW[0], *HELD, SKINNY[0]], ids=named)
def test_numbers_far_from_one_are_normalised_before_a_gate(config, device):
    """In float16, whose range x times the norm's weight passes: up is scaled back as the gate is."""
    m = (few(config) or (3,))[-1]
    x, norm_weight, weight, bias = gated_inputs(m, 96, 24, torch.float16, device)
    x = (
        x.float().sign() * (0.5 + x.float().abs() / 8) * torch.tensor([3e4, 1.0, 6e-5], device=device)[:m, None]
    ).half()
    given = x, norm_weight * 8, weight / 8, bias
    out, ref = rms_norm_gated_linear(*given, eps=0.0, config=config), gated_truth(*given, eps=0.0)
    for i in range(m):
        assert_close(out[i], ref[i])


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_a_number_that_stands_out_leaves_the_others_their_digits(dtype, device):
    """One of a row that is a thousand times the rest, as the residual stream of a model has them."""
    x, norm_weight, weight, _ = inputs(4, 128, 24, dtype, device)
    x[1, 5] = 4000.0
    weight[:, 5] = 0
    for config in SKINNY:
        out, ref = (
            f(x, norm_weight, weight, None, **o) for f, o in ((rms_norm_linear, {"config": config}), (truth, {}))
        )
        assert_close(out[1], ref[1])


@pytest.mark.parametrize("config", SKINNY[:2], ids=named)
def test_split_sums_are_equal_to_the_bit_and_leave_the_counters_zero(config, device, monkeypatch):
    made = []
    stock = launching.counters
    monkeypatch.setattr(launching, "counters", lambda *args: made.append(stock(*args)) or made[-1])
    given = inputs((few(config) or (7,))[-1], 200, 40, BF16, device)
    for function in (rms_norm_linear, rms_norm_gated_linear):
        results = [function(*given, config=config) for _ in range(2)]
        assert torch.equal(*results)
    assert len(made) == 4
    assert all(not t.any() for t in made)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("m", [1, 7, 70])
def test_gradients_are_those_of_the_reference(m, dtype, device):
    x, norm_weight, weight, bias = inputs(m, 40, 24, dtype, device)
    leaves = [x, norm_weight.float(), weight, bias.float()]  # vectors of float32
    leaves = [t.requires_grad_() for t in leaves]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    y = rms_norm_linear(*leaves, eps=0.1, offset=1.0)
    assert_same((y.detach(),), (rms_norm_linear(*(t.detach() for t in leaves), eps=0.1, offset=1.0),))
    ref = reference.rms_norm_linear(*doubles, eps=0.1, offset=1.0)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, dy)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    for found, expected in zip(grads, torch.autograd.grad(ref, doubles, dy.double()), strict=True):
        assert_close(found.to(dtype), expected, "backward")


@pytest.mark.parametrize(("m", "activation"), [(1, "silu"), (7, "gelu"), (70, "gelu_tanh")])
def test_gradients_behind_a_gate_are_those_of_the_reference(m, activation, device):
    leaves = [t.requires_grad_() for t in gated_inputs(m, 40, 24, device=device)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    options = {"eps": 0.1, "offset": 1.0, "activation": activation}
    y = rms_norm_gated_linear(*leaves, **options)
    assert_close(y.detach(), gated_truth(*(t.detach() for t in leaves), **options))
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, dy)
    expected = torch.autograd.grad(reference.rms_norm_gated_linear(*doubles, **options), doubles, dy.double())
    for found, wanted in zip(grads, expected, strict=True):
        assert_close(found, wanted, "backward")


def test_a_gate_keeps_its_argument_or_is_not_differentiated(device):
    x, norm_weight, weight, _ = gated_inputs(8, 32, 16, device=device)
    kept = []
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm_gated_linear(x, norm_weight, weight).sum()
    own = {t.data_ptr() for t in (x, norm_weight, weight)}
    assert [t.shape for t in kept if t.data_ptr() not in own] == [(8, 32)]
    op = torch.ops.rooftile.rms_norm_gated_linear
    with pytest.raises(
        ValueError,
        match="rms_norm_gated_linear: x requires grad, but rms_norm_gated_linear has no",
    ):
        op(x, norm_weight, weight, None, None, 1e-6, 0.0, "silu", [])


def test_beside_the_inputs_nothing_is_kept(device):
    x, norm_weight, weight, _ = inputs(8, 32, 16, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rms_norm_linear(x.requires_grad_(), norm_weight, weight.requires_grad_()).sum()
    assert set(kept) <= {t.data_ptr() for t in (x, norm_weight, weight)}


def test_autocast_takes_the_norm_of_x_as_it_is(device):
    x, norm_weight, weight, bias = inputs(5, 32, 16, device=device)
    x *= 1e5
    with torch.autocast(device.type, dtype=torch.float16):
        out = rms_norm_linear(x, norm_weight, weight, bias)
        normed = rms_norm(x, norm_weight, rounding="none").half()
        assert_same((out,), (linear(normed, weight.half(), bias.half()),))
        half = rms_norm(x).half()
        assert_same(
            (rms_norm_linear(half, norm_weight, weight, bias),),
            (rms_norm_linear(half, norm_weight, weight.half(), bias.half()),),
        )
        gated = rms_norm_gated_linear(x, norm_weight, weight, bias)
        assert_same((gated,), (gated_linear(normed, weight.half(), bias.half()),))
        gated = rms_norm_gated_linear(half, norm_weight, weight, bias)
        assert_same((gated,), (rms_norm_gated_linear(half, norm_weight, weight.half(), bias.half()),))
        leaf = weight.clone().requires_grad_()
        rms_norm_linear(x, norm_weight, leaf).sum().backward()
    assert out.dtype == torch.float16
    assert leaf.grad.dtype == torch.float32


EVERY_TARGET = [*runtime.TARGETS.values(), runtime.INTERPRETER]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("target", EVERY_TARGET, ids=lambda t: t.arch)
def test_every_problem_has_a_configuration_that_its_kernel_takes(target, gated):
    for m in (1, 2, 16, 33, 64, 65, 4096):
        for n, k in ((1, 1), (33, 40), (3584, 3584), (18944, 3584), (3584, 18944)):
            for dtype in (torch.float32, BF16):
                for along_k in (True, False):
                    p = Problem(m, n, k, dtype, gated=gated, norm=True, w_layout="k" if along_k else "n")
                    c = choose.choose(p, target)
                    if m <= choose_norm.fused_rows(n, target, gated) and (dtype == BF16 or m == 1):
                        assert c is not None
                    if c is not None:
                        assert choose.can_implement(p, c, target) is None


def run_far(lay, device):
    """x and the weight of rows 2^30 + 64 apart, for one row and for several."""
    x, norm_weight, weight, _ = inputs(4, 48, 4, BF16, device)
    results = []
    for place in (torch.clone, lay):
        several = rms_norm_linear(place(x), norm_weight, weight), rms_norm_linear(x, norm_weight, place(weight))
        one = rms_norm_linear(x[:1], norm_weight, place(weight))
        gated = (rms_norm_gated_linear(x[:m], norm_weight, place(weight)) for m in (1, 4))
        options = {"config": HELD[1]}
        two = rms_norm_linear(place(x[:2]), norm_weight, place(weight), **options)
        two_gated = rms_norm_gated_linear(place(x[:2]), norm_weight, place(weight), **options)
        results.append((*several, one, *gated, two, two_gated))
    return results


def test_rows_far_apart(far_rows, device):
    near, far = run_far(far_rows, device)
    assert_same(far, near)


@pytest.mark.parametrize("file", [gemv, skinny, held], ids=["gemv", "skinny", "gemv_persistent"])
def test_a_kernel_with_offsets_of_32_bits_is_caught(file, far_rows, device, monkeypatch, tmp_path, no_plans_kept):
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("on a GPU a wild access ends the process: the interpreter alone can show it")
    from rooftile.interpreter.memory import OutOfBoundsError

    use_kernels_without_int64(file, monkeypatch, tmp_path)
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        run_far(far_rows, device)


def test_the_traffic_is_that_of_the_formula():
    rest = 3584 + 18944 * 3584 + 64 * 18944
    assert traffic(64, 18944, 3584) == tuple(r * 64 * 3584 + rest for r in (3, 2, 1))
