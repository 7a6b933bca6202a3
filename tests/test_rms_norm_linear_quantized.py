"""Weights of 8 and 4 bits and one row of x: one kernel, which rounds nothing but its result; and what more rows are."""

import dataclasses
import re

import pytest
import torch
from helpers import BF16, assert_same

from rooftile import Quantize, launching, pack_int4, quantize_int4, quantize_int8, quantize_tensor, runtime, unpack_int4
from rooftile.cases import find_cases
from rooftile.cases.check import relative_error
from rooftile.ops.gemm import choose
from rooftile.ops.gemm import dequantize as dense
from rooftile.ops.gemm.config import GemmConfig, Problem
from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear, rms_norm_linear
from rooftile.ops.gemm.weight_only import fp8_weight_linear, int4_linear, int8_linear
from rooftile.ops.rms_norm import rms_norm
from rooftile.primitives import dequantize, quantize, weights
from rooftile.reference import rms_norm_linear as reference

import triton  # isort: skip
import triton.language as tl  # isort: skip

TOLERANCES = find_cases(["rms_norm_linear_quantized"])[0].tolerances
E4M3 = torch.float8_e4m3fn
both_formats = pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
PRODUCTS = {"int8": int8_linear, "fp8": fp8_weight_linear, "int4": int4_linear}
every_format = pytest.mark.parametrize("form", PRODUCTS)
ROW = (GemmConfig("gemv", 1, 8, 32), GemmConfig("gemv", 1, 16, 64), GemmConfig("gemv", 1, 4, 8))


def quantised(weight, form):
    if form == "int4":
        return quantize_int4(weight, next(g for g in (128, 64, 32) if weight.shape[1] % g == 0))
    return quantize_tensor(weight, Quantize()) if form == "fp8" else quantize_int8(weight)


def inputs(m, k, n, form, device, dtype=BF16):
    """x, the norm's weight, the weight, its scale, the bias."""
    x, norm_weight, bias = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k,), (n,)))
    return x, norm_weight, *quantised(torch.randn(n, k, device=device) * k**-0.5, form), bias


def truth(formula, x, norm_weight, weight, scale, bias, **options):
    return formula(x.double(), norm_weight.double(), weight, bias.double(), scale.double(), **options)


def assert_close(out, ref):
    assert out.shape == ref.shape
    assert relative_error(out, ref) <= TOLERANCES[out.dtype]["forward"].ceiling


def every_number(fp8, device):
    """A weight with a row for each number of 8 bits, and their values."""
    numbers = torch.arange(256, device=device).to(torch.uint8)
    numbers = numbers.view(E4M3) if fp8 else numbers.view(torch.int8)
    weight = torch.zeros(256, 32, dtype=torch.uint8, device=device).view(numbers.dtype)
    weight[:, 5] = numbers
    return weight, numbers.float()


@pytest.mark.parametrize("instruction", [True, False], ids=["", "bytes"])
@both_formats
def test_every_number_is_exact(fp8, instruction, device, monkeypatch):
    """Also where the chip can't convert fp8: its bytes are read."""
    if not instruction:
        monkeypatch.setattr(quantize, "_has_instruction", lambda target: False)
    weight, values = every_number(fp8, device)
    x, one = torch.zeros(3, 32, device=device), torch.ones(256, device=device)
    x[:, 5] = 1
    product = fp8_weight_linear if fp8 else int8_linear
    for rows in (1, 3):
        torch.testing.assert_close(
            product(x[:rows], weight, one), values.expand(rows, 256), rtol=0, atol=0, equal_nan=True
        )
    out = rms_norm_linear(x[:1], one[:32], weight, weight_scale=one, eps=1 - 1 / 32)  # of which rstd is 1
    torch.testing.assert_close(out, values[None], rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("config", ROW, ids=lambda c: f"{c.block_n}x{c.block_k}")
@every_format
def test_every_configuration_is_the_same_function(form, config, dtype, device):
    k = 77
    if form == "int4":  # groups of 32, of which the last is a block of its own
        k, config = 96 + 64, dataclasses.replace(config, block_k=max(32, config.block_k))
    x, norm_weight, weight, scale, bias = given = inputs(1, k, 34, form, device, dtype)
    options = {"eps": 0.5, "offset": 1.0}
    out = rms_norm_linear(x, norm_weight, weight, bias, weight_scale=scale, **options, config=config)
    assert_close(out, truth(reference.rms_norm_linear, *given, **options))
    options |= {"activation": "gelu"}
    out = rms_norm_gated_linear(x, norm_weight, weight, bias, weight_scale=scale, **options, config=config)
    assert_close(out, truth(reference.rms_norm_gated_linear, *given, **options))
    if config.block_k >= 16:
        own = GemmConfig("gemv", 1, config.block_n, config.block_k, num_stages=1)
        residual = torch.randn(1, 34, device=device).to(dtype)
        out = PRODUCTS[form](x, weight, scale, bias, residual=residual, config=own)
        wide = reference._wide(weight, scale, torch.float64)
        assert_close(out, x.double() @ wide.T + bias.double() + residual.double())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("k", [1024, 3584, 14336])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_one_row_by_digits(form, k, dtype, device, monkeypatch):
    """Of every tile that is chosen: for few rows of the weight, for more, for many, and for so many that two warps
    share rows; behind a norm, and with a gate."""
    names = []
    real = launching.bind
    monkeypatch.setattr(launching, "bind", lambda p, *a, **k: names.append(p.kernel.__name__) or real(p, *a, **k))
    launching.forget()
    for n in (40, 3000, 6000, 10000, 66000):
        x, norm_weight, weight, scale, bias = given = inputs(1, k, n, form, device, dtype)
        options = {"eps": 0.5, "offset": 1.0}
        out = rms_norm_linear(x, norm_weight, weight, bias, weight_scale=scale, **options)
        assert_close(out, truth(reference.rms_norm_linear, *given, **options))
        out = rms_norm_gated_linear(x, norm_weight, weight, bias, weight_scale=scale, **options, activation="gelu")
        assert_close(out, truth(reference.rms_norm_gated_linear, *given, **options, activation="gelu"))
    by_digits = runtime.target(device).arch == "sm_90" and (form == "int4" or k < 8192)
    assert set(names) == {"gemv_imma_kernel" if by_digits else "gemv_kernel"}


USED = []  # the tiles that came too large


@triton.jit
def too_large(w, FAST_CONVERSIONS: tl.constexpr):
    USED.append(w.shape)
    low, high = dequantize.int4_as(w, tl.float32, False)
    return low + 136, high + 136, 136


@pytest.mark.skipif(
    runtime.MODE is not runtime.Mode.INTERPRETER,
    reason="puts a GPU's conversion in the interpreter's place; on a GPU every test of int4 has it",
)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_numbers_of_4_bits_may_come_too_large(dtype, device, monkeypatch):
    """As the GPU's instructions give them: sums of them less what that makes are those of the numbers themselves."""
    monkeypatch.setattr(weights, "int4_as_float32", too_large)
    monkeypatch.setattr(dense, "int4_as_float32", too_large)
    for k in (128, 160):
        x, norm_weight, weight, scale, bias = given = inputs(1, k, 34, "int4", device, dtype)
        out = rms_norm_linear(x, norm_weight, weight, bias, weight_scale=scale, eps=0.5)
        assert_close(out, truth(reference.rms_norm_linear, *given, eps=0.5))
        assert USED
        USED.clear()
        config = GemmConfig("dequantize", 1, 16, 64, num_stages=1)
        wide = reference._wide(weight, scale, torch.float64).to(dtype)
        assert_same((dense.dequantized(weight, scale, dtype, k, config),), (wide,))
        assert USED
        USED.clear()


def test_sums_of_numbers_that_are_too_large_are_for_16_bits_alone(monkeypatch):
    """In float32 what is taken off again would cost four of its bits."""
    packed, scale = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2)
    for arch, dtype, fast_conversions in (
        ("sm_90", BF16, True),
        ("sm_80", torch.float16, True),
        ("sm_90", torch.float32, False),
        ("gfx942", BF16, False),
    ):
        monkeypatch.setattr(runtime, "target", lambda _, arch=arch: runtime.TARGETS[arch])
        _, _, form = weights.Format.of(packed, scale, 128, dtype)
        assert form == (False, 64, 2, "", False, fast_conversions)
        _, _, form = weights.Format.of(packed.view(torch.int8), scale[:, 0], 64, dtype)
        assert form == (True, 0, 0, "", False, arch != "gfx942")


@pytest.mark.parametrize(("group", "groups"), [(32, 3), (64, 2)])
@pytest.mark.parametrize(("dtype", "scales"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float16)])
def test_offsets_of_groups(group, groups, dtype, scales, device):
    """Of one row and of several, with a norm, a gate, and alone; scales in float16, whatever dtype x has."""
    k, n = group * groups, 48
    packed = torch.randint(256, (n, k // 2), dtype=torch.uint8, device=device)
    offsets = torch.randint(-8, 9, (n, groups), device=device)
    scale = torch.stack((torch.rand(n, groups, device=device) / 16, offsets), -1).to(scales)
    by_group = scale.double().repeat_interleave(group, 1)
    w = (unpack_int4(packed, group) + by_group[..., 1]) * by_group[..., 0]
    for rows in (1, 3):
        x, norm = torch.randn(rows, k, device=device, dtype=dtype), torch.rand(k, device=device, dtype=dtype)
        y = torch.nn.functional.rms_norm(x.double(), (k,), norm.double(), 1e-5)
        gate, up = (y @ w.T).chunk(2, -1)
        found = {
            "linear": (int4_linear(x, packed, scale), x.double() @ w.T),
            "norm": (rms_norm_linear(x, norm, packed, weight_scale=scale, eps=1e-5), y @ w.T),
            "gate": (
                rms_norm_gated_linear(x, norm, packed, weight_scale=scale, eps=1e-5),
                torch.nn.functional.silu(gate) * up,
            ),
        }
        for name, (out, expected) in found.items():
            most = 1e-5 if dtype == torch.float32 else 1.5e-2  # norm, sum and gate are rounded to bfloat16 between
            assert float((out.double() - expected).norm() / expected.norm()) < most, (name, rows)


def test_a_kernel_without_offsets_is_not_chosen_for_them():
    p = Problem(1, 4096, 4096, torch.bfloat16, weight="int4", group=128)
    target = runtime.TARGETS["sm_90"]
    without = choose.choose(p, target)
    assert without.kernel == "gemv_imma"
    for norm in (False, True):
        with_offsets = dataclasses.replace(p, offsets=True, norm=norm)
        assert choose.choose(with_offsets, target).kernel == "gemv"
        assert "no offsets" in choose.can_implement(with_offsets, without, target)


def test_every_group_has_its_own_part_of_x(device):
    """Also the last of an odd number, whose halves are a byte's two nibbles."""
    for group, groups in ((32, 3), (32, 4), (64, 1), (128, 2)):
        k = group * groups
        packed, scale = quantize_int4(torch.eye(k, device=device), group)
        x, one = torch.arange(1.0, k + 1, device=device)[None], torch.ones(k, device=device)
        out = rms_norm_linear(x, one, packed, weight_scale=scale, eps=0.0)
        torch.testing.assert_close(out, x / x.square().mean().sqrt(), rtol=1e-5, atol=0)
        torch.testing.assert_close(int4_linear(x, packed, scale), x, rtol=1e-6, atol=0)


def test_gate_and_up_have_scales_of_their_own(device):
    weight = torch.ones(10, 32, dtype=torch.int8, device=device)
    x, norm_weight = torch.ones(1, 32, device=device), torch.ones(32, device=device)
    scale = torch.cat((torch.full((5,), 2.0), torch.arange(5.0))).to(device) / 32
    out = rms_norm_gated_linear(x, norm_weight, weight, weight_scale=scale, eps=0.0)
    expected = torch.nn.functional.silu(32 * scale[:5]) * 32 * scale[5:]
    torch.testing.assert_close(out, expected[None], rtol=1e-5, atol=0)
    packed = pack_int4(weight, 32)
    out = rms_norm_gated_linear(x, norm_weight, packed, weight_scale=scale[:, None], eps=0.0)
    torch.testing.assert_close(out, expected[None], rtol=1e-5, atol=0)


@every_format
def test_more_rows_are_the_norm_and_the_product(form, device):
    x, norm_weight, weight, scale, bias = inputs(3, 96, 32, form, device)
    if form == "fp8":
        y, x_scale = rms_norm(x, norm_weight, eps=0.1, rounding="none", quantize=Quantize())
        expected = fp8_linear(y, weight, scale, x_scale=x_scale, bias=bias, out_dtype=BF16)
    else:
        expected = PRODUCTS[form](rms_norm(x, norm_weight, eps=0.1, rounding="none"), weight, scale, bias)
    assert_same((rms_norm_linear(x, norm_weight, weight, bias, weight_scale=scale, eps=0.1),), (expected,))
    out = rms_norm_gated_linear(x, norm_weight, weight, bias, weight_scale=scale, eps=0.1)
    gate, up = expected.double().chunk(2, -1)
    assert_close(out, torch.nn.functional.silu(gate) * up)


@every_format
def test_scales_may_be_a_column_and_weights_lie_anyhow(form, device):
    x, norm_weight, weight, scale, bias = inputs(1, 64, 24, form, device)  # one group of int4
    expected = (rms_norm_linear(x, norm_weight, weight, bias, weight_scale=scale),)
    spread = torch.stack((scale.reshape(-1), torch.full((24,), torch.nan, device=device)), 1)[:, :1]
    columns = weight.shape[1]
    wide = torch.zeros(24, 80, dtype=torch.uint8, device=device)
    wide[:, 3 : 3 + columns] = weight.view(torch.uint8)
    for laid in (weight, wide[:, 3 : 3 + columns].view(weight.dtype), weight.T.contiguous().T):
        for s in (scale.reshape(-1, 1), spread, *([] if form == "int4" else [spread[:, 0]])):
            assert_same((rms_norm_linear(x, norm_weight, laid, bias, weight_scale=s),), expected)


@every_format
def test_a_split_sum_is_refused(form, device):
    x, norm_weight, weight, scale, bias = inputs(1, 320, 40, form, device)
    config = GemmConfig("gemv", 1, 8, 32, split_k=2)
    for op in (rms_norm_linear, rms_norm_gated_linear):
        with pytest.raises(ValueError, match="split_k is 2, expected 1: kernel 'gemv' sums whole rows"):
            op(x, norm_weight, weight, bias, weight_scale=scale, config=config)
    own = GemmConfig("gemv", 1, 8, 32, split_k=2, num_stages=1)
    with pytest.raises(ValueError, match="split_k is 2, expected 1: kernel 'gemv' sums whole rows"):
        PRODUCTS[form](x, weight, scale, bias, config=own)


@pytest.mark.parametrize("op", [rms_norm_linear, rms_norm_gated_linear])
def test_bad_arguments_are_named(op, device):
    x, g, w, s, b = inputs(2, 8, 6, "int8", device, torch.float32)
    skinny = GemmConfig("skinny", 16, 16, 16)

    def call(x=x, w=w, bias=None, scale=s, config=None):
        op(x, g, w, bias, weight_scale=scale, config=config)

    for given, kind, message in (
        (
            {"w": w.float()},
            TypeError,
            "weight has dtype torch.float32, expected torch.int8, torch.float8_e4m3fn or",
        ),
        ({"scale": None}, TypeError, "weight has dtype torch.int8 and no scale, expected weight_scale= for it"),
        ({"scale": s.half()}, TypeError, "weight_scale has dtype torch.float16, expected torch.float32"),
        ({"scale": s[:5]}, ValueError, r"weight_scale has shape \(5,\), expected \(6,\) or \(6, 1\) to match"),
        ({"scale": s[None]}, ValueError, r"weight_scale has shape \(1, 6\), expected"),
        ({"scale": s.to("meta")}, ValueError, "weight_scale is on meta, expected .* to match x"),
        ({"w": w[:, :7]}, ValueError, r"weight has shape \(6, 7\), expected"),
        ({"bias": b[:5]}, ValueError, r"bias has shape \(5,\), expected \(6,\)"),
        (
            {"x": x.clone().requires_grad_()},
            ValueError,
            "x requires grad, but rms_norm_(gated_)?linear with a quantized weight has no derivative",
        ),
        ({"config": ROW[0]}, ValueError, "config can't be launched: kernel 'gemv' takes one row of x, not 1 x "),
        (
            {"config": skinny},
            ValueError,
            "config can't be launched: kernel is 'skinny', expected one of gemv, gemv_imma",
        ),
    ):
        with pytest.raises(kind, match=rf"{op.__name__}: {message}"):
            call(**given)


@pytest.mark.parametrize("op", [rms_norm_linear, rms_norm_gated_linear])
def test_bad_arguments_of_4_bits_are_named(op, device):
    x, g, w, s, b = inputs(1, 96, 6, "int4", device)

    def call(x=x, g=g, w=w, scale=s, config=None):
        op(x, g, w, b, weight_scale=scale, config=config)

    for given, kind, message in (
        ({"scale": None}, TypeError, "weight has dtype torch.uint8 and no scale, expected weight_scale= for it"),
        (
            {"scale": s.double()},
            TypeError,
            "weight_scale has dtype torch.float64, expected",
        ),
        ({"scale": s[:, :2]}, ValueError, r"weight_scale has shape \(6, 2\), expected \(6, 3\) for groups of 32"),
        ({"scale": s[:5]}, ValueError, r"weight_scale has shape \(5, 3\), expected \(6, 3\)"),
        ({"scale": s[:, 0]}, ValueError, r"weight_scale has shape \(6,\), expected \(6, 3\)"),
        ({"w": w[:, :40]}, ValueError, r"weight has shape \(6, 40\), expected \(N, 48\): two elements a byte"),
        ({"x": x[:, :80], "g": g[:80]}, ValueError, "x's last dimension is 80, expected a multiple of the group"),
        (
            {"x": x.clone().requires_grad_()},
            ValueError,
            "x requires grad, but rms_norm_(gated_)?linear with a quantized weight has no derivative",
        ),
        (
            {"config": ROW[2]},
            ValueError,
            "config can't be launched: block_k is 8, expected at least 32 for a",
        ),
    ):
        with pytest.raises(kind, match=rf"{op.__name__}: {message}"):
            call(**given)


def test_what_a_gate_needs_is_named(device):
    x, g, w, s, _ = inputs(2, 8, 6, "int8", device, torch.float32)
    with pytest.raises(ValueError, match="weight has 5 rows, expected an even number"):
        rms_norm_gated_linear(x, g, w[:5], weight_scale=s[:5])
    for activation in ("", "relu"):
        with pytest.raises(ValueError, match=f"activation is '{activation}', expected one of"):
            rms_norm_gated_linear(x, g, w, weight_scale=s, activation=activation)


def test_the_gemv_without_a_norm_refuses_what_it_can_not_do(device):
    config = GemmConfig("gemv", 1, 4, 64, num_stages=1)
    with pytest.raises(ValueError, match="GemmConfig: slices is 4, expected 1 for kernel 'gemv'"):
        dataclasses.replace(config, slices=4)
    x, _, weight, scale, _ = inputs(2, 64, 16, "int8", device)
    with pytest.raises(ValueError, match="int8_linear: config can't be launched: kernel 'gemv' takes one row of x"):
        int8_linear(x, weight, scale, config=config)

    def why(config, group, **more):
        p = Problem(1, 4096, 4096, BF16, weight="int4" if group else "int8", group=group)
        return choose.can_implement(dataclasses.replace(p, **more), config, runtime.TARGETS["sm_90"])

    short = dataclasses.replace(config, block_k=16)
    assert why(short, 64) == "block_k is 16, expected at least 32 for a weight of 4 bits"
    assert why(config, 128) is None  # as many elements as it likes
    large = dataclasses.replace(config, block_n=64, block_k=1024)
    assert re.search("more than 128 a thread", why(large, 0))
    imma = GemmConfig("gemv_imma", 1, 16, 128, num_warps=2, num_stages=1, slices=2)
    assert why(imma, 0, weight="fp8") == "kernel 'gemv_imma' takes weights of int8 and int4"


@pytest.mark.parametrize("target", [*runtime.TARGETS.values(), runtime.INTERPRETER], ids=lambda t: t.arch)
def test_every_weight_has_a_configuration_that_the_kernel_takes(target):
    sizes = ((1, 1), (33, 40), (4608, 3584), (6144, 4096), (4096, 14336), (14336, 4096), (128256, 4096))
    for n, k in sizes:
        for weight in ("int8", "fp8"):
            for p in (Problem(1, n, k, BF16, gated=g, norm=True, weight=weight) for g in (False, True)):
                assert choose.can_implement(p, choose.choose(p, target), target) is None
            for dtype in (torch.float32, BF16):
                p = Problem(1, n, k, dtype, weight=weight)
                c = choose.choose(p, target)
                assert choose.can_implement(p, c, target) is None
                assert weight != "fp8" or c.kernel == "gemv"
    for n, k, group in ((1, 32, 32), (4608, 3584, 128), (4096, 4096, 128), (4096, 14336, 128), (28672, 4096, 128)):
        for gated in (False, True):
            p = Problem(1, n, k, BF16, gated=gated, norm=True, weight="int4", group=group)
            assert choose.can_implement(p, choose.choose(p, target), target) is None
        for dtype in (torch.float32, BF16):
            p = Problem(1, n, k, dtype, weight="int4", group=group)
            c = choose.choose(p, target)
            assert choose.can_implement(p, c, target) is None
            if target.arch == "sm_90" and dtype == BF16 and k >= 1024:
                assert c.kernel == "gemv_imma"
            elif target is not runtime.INTERPRETER:
                assert c.kernel == "gemv"
                assert c.block_n * c.block_k == 2 * 64 * c.num_warps * target.warp_size  # 64 bytes a thread
                assert k % c.block_k in (0, k)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_thread_takes_as_many_bytes_whatever_the_weight(arch):
    target = runtime.TARGETS[arch]
    threads = 4 * 32
    for n, k, gated in (
        (6144, 4096, False),
        (14336, 4096, True),
        (18944, 3584, True),
        (128256, 4096, False),
        (4608, 3584, False),
    ):
        c = choose.choose(Problem(1, n, k, BF16, gated=gated, norm=True, weight="fp8"), target)
        assert c.block_n * c.block_k * (1 + gated) == 64 * threads
        assert c.num_warps * target.warp_size == threads
        assert k % c.block_k == 0
        p = Problem(1, n, k, torch.float32, gated=gated, norm=True, weight="int4", group=128)
        c = choose.choose(p, target)
        assert c.block_n * c.block_k * (1 + gated) == 2 * 64 * threads
        assert k % c.block_k == 0
        assert c.num_warps * target.warp_size == threads
    # A long row is read in as many, and there without a prefetch; a short one with one, where launches overlap at all.
    for k, early in ((14336, 0), (4096, 1)):
        c = choose.choose(Problem(1, 4096, k, BF16, weight="fp8"), target)
        assert c.prefetch == (early if arch == "sm_90" else -1)
        assert k % c.block_k == 0
    assert choose.choose(Problem(1, 4096, 14336, BF16, weight="fp8"), target).block_n == 4


def test_a_program_has_as_many_bytes_as_of_16_bits():
    for k, expected in ((4096, (16, 1024)), (3584, (32, 512))):  # of which 1024 would not divide the second
        c = choose.choose(Problem(1, 8192, k, BF16, weight="fp8"), runtime.TARGETS["sm_80"])
        assert (c.block_n, c.block_k) == expected
