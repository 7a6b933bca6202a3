"""What is special to the norm in front of a product: one kernel or two, every split, numbers far from 1."""

import re

import pytest
import torch
from helpers import BF16, assert_same
from test_offsets import far_rows, no_plans_kept, use_kernels_without_int64

from rooftile import launching, runtime
from rooftile.cases import find_cases
from rooftile.cases.check import relative_error
from rooftile.cases.rms_norm_linear import traffic
from rooftile.ops import rms_norm_linear as family
from rooftile.ops.matmul import MatmulConfig, linear
from rooftile.ops.matmul.config import Problem
from rooftile.ops.rms_norm import rms_norm
from rooftile.ops.rms_norm_linear import choose, fused_rows, rms_norm_linear, row, skinny
from rooftile.reference import rms_norm_linear as reference

__all__ = ["far_rows", "no_plans_kept"]  # fixtures

TOLERANCES = find_cases(["rms_norm_linear"])[0].tolerances
DTYPES = [torch.float32, torch.float16, BF16]
ROW = (MatmulConfig("row", 1, 8, 32, split_k=3), MatmulConfig("row", 1, 16, 64))
SKINNY = (
    MatmulConfig("skinny", 16, 16, 32, split_k=2),
    MatmulConfig("skinny", 32, 32, 16, split_k=4, num_stages=2),
    MatmulConfig("skinny", 64, 32, 64),
)
APART = MatmulConfig("tiled", 32, 32, 32)


def drawn(*shape, dtype=torch.float32, device=None):
    return torch.randn(shape, device=device).to(dtype)


def inputs(m, k, n, dtype=torch.float32, device=None, bias=True):
    """x, the norm's weight, the weight, the bias."""
    weight = (drawn(n, k, device=device) * k**-0.5).to(dtype)
    found = drawn(m, k, dtype=dtype, device=device), drawn(k, dtype=dtype, device=device), weight
    return (*found, drawn(n, dtype=dtype, device=device) if bias else None)


def truth(*tensors, **options):
    return reference.rms_norm_linear(*(None if t is None else t.double() for t in tensors), **options)


def assert_close(out, ref, direction="forward"):
    assert out.shape == ref.shape
    assert relative_error(out, ref) <= TOLERANCES[out.dtype][direction].ceiling


def named(c):
    return f"{c.kernel} {c.block_m}x{c.block_n}x{c.block_k} split {c.split_k}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [*ROW, *SKINNY], ids=named)
def test_one_kernel_is_the_same_function_as_two(config, dtype, device):
    rows = (1,) if config.kernel == "row" else (1, 13, config.block_m)
    for m, (k, n) in zip(rows, ((77, 33), (64, 48), (130, 7)), strict=False):
        for bias, options in ((True, {}), (False, {"eps": 0.5, "offset": 1.0})):
            given = inputs(m, k, n, dtype, device, bias)
            out = rms_norm_linear(*given, **options, config=config)
            assert_close(out, truth(*given, **options))
            assert_close(rms_norm_linear(*given, **options, config=APART), truth(*given, **options))


def test_the_tiled_configuration_is_the_norm_and_then_the_product(device):
    x, norm_weight, weight, bias = inputs(9, 70, 40, BF16, device)
    normed = rms_norm(x, norm_weight, eps=0.1, offset=1.0, rounding="none")
    out = rms_norm_linear(x, norm_weight, weight, bias, eps=0.1, offset=1.0, config=APART)
    assert torch.equal(out, linear(normed, weight, bias, config=APART))


def test_the_switch_is_where_it_is_said_to_be(device, monkeypatch):
    launched = []
    for file in (row, skinny):
        kept = file.launch
        monkeypatch.setattr(
            file, "launch", lambda *args, name=file.__name__, kept=kept: launched.append(name) or kept(*args)
        )
    most = fused_rows(16, 32, runtime.target(device))
    for m, expected in ((1, "row"), (2, "skinny"), (most, "skinny"), (most + 1, None)):
        launched.clear()
        given = inputs(m, 32, 16, BF16, device)
        assert_close(rms_norm_linear(*given), truth(*given))
        assert [name.rpartition(".")[2] for name in launched] == ([expected] if expected else [])


def test_leading_dimensions_are_rows(device):
    x, *rest = inputs(6, 64, 24, BF16, device)
    out = rms_norm_linear(x.view(2, 3, 64), *rest)
    assert out.shape == (2, 3, 24)
    assert torch.equal(out.view(6, 24), rms_norm_linear(x, *rest))
    assert rms_norm_linear(x[0], *rest).shape == (24,)


@pytest.mark.parametrize("config", [*ROW, *SKINNY, APART, None], ids=lambda c: named(c) if c else "chosen")
def test_rows_of_zeros_give_the_bias(config, device):
    for dtype in DTYPES:
        m = 1 if config in ROW else 3
        _, norm_weight, weight, bias = inputs(m, 64, 24, dtype, device)
        out = rms_norm_linear(torch.zeros(m, 64, dtype=dtype, device=device), norm_weight, weight, bias, config=config)
        assert torch.equal(out, bias.expand(m, 24))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [ROW[0], *SKINNY], ids=named)
def test_numbers_far_from_one_are_normalised_as_any(config, dtype, device):
    """Squares of float16's largest numbers pass its range, as does x times the norm's weight; small ones vanish."""
    m = 1 if config.kernel == "row" else 6
    x, norm_weight, weight, bias = inputs(m, 96, 24, dtype, device)
    sizes = torch.tensor([3e4, 2e3, 1.0, 1e-2, 1e-3, 6e-5], device=device)[:m, None]
    x = (x.float().sign() * (0.5 + x.float().abs() / 8) * sizes).to(dtype)
    norm_weight = norm_weight * 8
    for given in ((x, norm_weight, weight, bias), (x, norm_weight / 1024, weight, None)):
        out, ref = rms_norm_linear(*given, eps=0.0, config=config), truth(*given, eps=0.0)
        assert torch.isfinite(out).all()
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


@pytest.mark.parametrize("config", [ROW[0], *SKINNY[:2]], ids=named)
def test_split_sums_are_equal_to_the_bit_and_leave_the_counters_zero(config, device, monkeypatch):
    made = []
    stock = launching.counters
    monkeypatch.setattr(launching, "counters", lambda *args: made.append(stock(*args)) or made[-1])
    given = inputs(1 if config in ROW else 7, 300, 40, BF16, device)
    results = [rms_norm_linear(*given, config=config) for _ in range(3)]
    assert all(torch.equal(r, results[0]) for r in results)
    assert made
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
        leaf = weight.clone().requires_grad_()
        rms_norm_linear(x, norm_weight, leaf).sum().backward()
    assert out.dtype == torch.float16
    assert leaf.grad.dtype == torch.float32


REFUSED = [
    (MatmulConfig("row", 1, 8, 32), "takes one row of x"),
    (MatmulConfig("skinny", 16, 16, 16), "block_m is 16"),
    (MatmulConfig("skinny", 32, 8, 16), "takes no tile of 32 x 8 x 16"),
    (MatmulConfig("skinny", 64, 16, 512, num_warps=1), "block_m x block_k is 32768 elements for 1 warps"),
    (MatmulConfig("skinny", 32, 64, 4096, num_warps=32, num_stages=8192), "num_stages is 8192"),
    (MatmulConfig("tiled", 8, 16, 16), "block_m is 8, expected at least 16"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[r for _, r in REFUSED])
def test_impossible_configurations_are_refused_before_launch(config, reason, device, monkeypatch):
    given = inputs(20, 32, 16, device=device)
    monkeypatch.setattr(launching, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=rf"rms_norm_linear: config can't be launched: .*{re.escape(reason)}"):
        rms_norm_linear(*given, config=config)


def test_bad_arguments_are_named(device):
    x, g, w, b = inputs(4, 8, 6, device=device)
    wrong = [
        (lambda: rms_norm_linear(x, g[:7], w), ValueError, r"norm_weight has shape \(7,\), expected \(8,\)"),
        (lambda: rms_norm_linear(x, g, w[:, :7]), ValueError, r"weight has shape \(6, 7\), expected \(N, 8\)"),
        (lambda: rms_norm_linear(x, g, b), ValueError, r"weight has shape \(6,\), expected \(N, 8\)"),
        (lambda: rms_norm_linear(x, g, w, b[:5]), ValueError, r"bias has shape \(5,\), expected \(6,\)"),
        (lambda: rms_norm_linear(x[0, 0], g, w), ValueError, r"x has shape \(\), expected at least one"),
        (lambda: rms_norm_linear(x[:, :0], g[:0], w[:, :0]), ValueError, r"x has shape \(4, 0\), expected at least"),
        (lambda: rms_norm_linear(x, g, w.to(BF16)), TypeError, "weight has dtype torch.bfloat16, expected .*autocast"),
        (lambda: rms_norm_linear(x.half(), g, w.half(), b.to(BF16)), TypeError, "bias has dtype torch.bfloat16"),
        (lambda: rms_norm_linear(x, g.double(), w), TypeError, "norm_weight has dtype torch.float64, expected"),
        (lambda: rms_norm_linear(x, g, w, config="row"), TypeError, "config is str, expected"),
        (lambda: rms_norm_linear(x, g, w, eps="0"), TypeError, "eps is a str, expected a number"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=f"rms_norm_linear: {message}"):
            call()


EVERY_TARGET = [*runtime.TARGETS.values(), runtime.INTERPRETER]


@pytest.mark.parametrize("target", EVERY_TARGET, ids=lambda t: t.arch)
def test_every_problem_has_a_configuration_that_its_kernel_takes(target):
    for m in (1, 2, 16, 33, 64, 65, 4096):
        for n, k in ((1, 1), (33, 40), (3584, 3584), (18944, 3584), (3584, 18944)):
            for dtype in (torch.float32, BF16):
                for along_k in (True, False):
                    c = choose(m, n, k, dtype, along_k, target)
                    if m <= fused_rows(n, k, target) and (dtype == BF16 or m == 1):
                        assert c is not None
                    if c is not None:
                        assert family._module(c).refuses(Problem(m, n, k, dtype), c, target) is None


def run_far(lay, device):
    """x and the weight of rows 2^30 + 64 apart, for one row and for several."""
    x, norm_weight, weight, _ = inputs(4, 48, 4, BF16, device)
    results = []
    for place in (torch.clone, lay):
        several = rms_norm_linear(place(x), norm_weight, weight), rms_norm_linear(x, norm_weight, place(weight))
        results.append((*several, rms_norm_linear(x[:1], norm_weight, place(weight))))
    return results


def test_rows_far_apart(far_rows, device):
    near, far = run_far(far_rows, device)
    assert_same(far, near)


@pytest.mark.parametrize("file", [row, skinny], ids=["row", "skinny"])
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
