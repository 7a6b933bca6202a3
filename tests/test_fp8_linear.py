"""Products with fp8 weights, and the tensors that are quantised for them: kernels, scales, errors."""

import dataclasses
import itertools

import pytest
import torch
from helpers import BF16, Calls, assert_same

import rooftile
from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.cases.fp8_linear import TOLERANCES
from rooftile.ops import quantize_tensor as tensor_op
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig, Problem
from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.ops.quantize_tensor import quantize_tensor
from rooftile.primitives import quantize
from rooftile.primitives.rows import RowConfig
from rooftile.quantize import Quantize
from rooftile.reference import fp8_linear as reference
from rooftile.reference.quantize import LARGEST

FP8, INT8 = torch.float8_e4m3fn, torch.int8
NAN, INF = float("nan"), float("inf")
# Two float32 sums of the same products, in another order; on Hopper in fewer bits.
SUM = 1e-6 if runtime.MODE is runtime.Mode.INTERPRETER else 1e-3
KINDS = ("tensor", "row", "block")
CONFIGS = {
    "skinny": GemmConfig("skinny", 64, 16, 32, 1),
    "skinny split": GemmConfig("skinny", 64, 32, 64, 1, 3),
    "tiled": GemmConfig("tiled", 32, 64, 128, 2),
    "tiled split": GemmConfig("tiled", 16, 32, 32, 1, 4),
    "hopper": GemmConfig("hopper", 64, 64, 128, 2),
    "hopper split": GemmConfig("hopper", 64, 32, 64, 1, 2),
    "wide weight": GemmConfig("tiled", 16, 256, 128, 1),
    "promoted": GemmConfig("hopper", 128, 256, 128, 2, num_warps=8, num_stages=3, pingpong=True),
    "promoted narrow": GemmConfig("hopper", 128, 128, 128, 1, num_warps=8, num_stages=2, pingpong=True),
}


def operands(m, k, n, x_kind, w_kind, device):
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    x, x_scale = quantize_tensor(x, Quantize(per={"block": "group"}.get(x_kind, x_kind)))
    w, w_scale = quantize_tensor(w, Quantize(per=w_kind))
    return {"x": x, "weight": w, "weight_scale": w_scale, "x_scale": x_scale}


def problem(m, n, k, scaled_steps=False, fast=False, aligned=True):
    return Problem(
        m, n, k, FP8, x_aligned=aligned, w_aligned=aligned, weight="fp8", scaled_steps=scaled_steps, fast=fast,
        out_dtype=BF16,
    )  # fmt: skip


def exact(given):
    return reference.fp8_linear(**{n: t.double() for n, t in given.items()})


def takes(config, device):
    """Whether this device runs the kernel."""
    arch = runtime.target(device).arch
    return config.kernel != "hopper" or arch == "sm_90" or (arch == "interpreter" and not config.pingpong)


# The product


# Each kernel has every kind of either, and each pair has some kernels; the others nightly.
@pytest.mark.parametrize(
    ("x_kind", "w_kind", "name"),
    [
        pytest.param(x_kind, w_kind, name, marks=() if (i + j + k) % len(KINDS) == 0 else pytest.mark.nightly)
        for (i, x_kind), (j, w_kind), (k, name) in itertools.product(*map(enumerate, (KINDS, KINDS, CONFIGS)))
    ],
)
def test_every_kernel_takes_every_pair_of_scales(x_kind, w_kind, name, device):
    config = CONFIGS[name]
    if not takes(config, device):
        pytest.skip(f"configuration {name} is for sm_90, and the device is {runtime.target(device).arch}")
    for m, k, n in ((33, 272, 144), (5, 144, 272)):
        given = operands(m, k, n, x_kind, w_kind, device)
        given["bias"] = torch.randn(n, device=device)
        if m == 5:
            given["residual"] = torch.randn(m, n, device=device)
        found = fp8_linear(**given, out_dtype=torch.float32, config=config)
        assert (found.shape, found.dtype, found.is_contiguous()) == ((m, n), torch.float32, True)
        assert relative_error(found, exact(given)) < SUM


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_that_divide_by_nothing(name, device):
    config = CONFIGS[name]
    if config.kernel == "hopper":
        pytest.skip("kernel 'hopper' refuses them: test_configurations_that_can_not_be_are_refused")
    for m, k, n in ((1, 257, 1), (37, 131, 45)):
        given = operands(m, k, n, "block", "block", device)
        if config.split_k <= -(-k // config.block_k):
            found = fp8_linear(**given, out_dtype=torch.float32, config=config)
            assert relative_error(found, exact(given)) < SUM


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.float32])
def test_results_are_rounded_once(out_dtype, fast, device):
    given = operands(5, 256, 48, "row", "row", device)
    found = fp8_linear(**given, out_dtype=out_dtype, fast_accumulation=fast)
    assert found.dtype == (out_dtype or BF16)
    exactly = fp8_linear(**given, out_dtype=torch.float32, fast_accumulation=fast)
    assert_same((found,), (exactly.to(found.dtype),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_x_is_quantised_as_the_weight_is(kind, dtype, device):
    given = operands(6, 160, 140, "row", kind, device)
    x = torch.randn(2, 3, 160, device=device).to(dtype)
    with Calls() as record:
        found = fp8_linear(x, given["weight"], given["weight_scale"])
    assert [op._schema.name for op, _, _ in record.calls] == ["rooftile::fp8_linear"]
    assert (found.dtype, found.shape) == (dtype, (2, 3, 140))
    q, scale = quantize_tensor(x, Quantize(per={"block": "group"}.get(kind, kind)))
    expected = fp8_linear(q, given["weight"], given["weight_scale"], x_scale=scale, out_dtype=dtype)
    assert_same((found,), (expected,))
    exactly = reference.fp8_linear(x.double(), given["weight"].double(), given["weight_scale"].double())
    assert relative_error(found, exactly) < TOLERANCES[dtype]["forward"].ceiling


@pytest.mark.parametrize("per", ["row", "group"])
def test_it_takes_what_the_fused_ops_give(per, device):
    x, norm = torch.randn(2, 4, 256, device=device).to(BF16), torch.randn(256, device=device).to(BF16)
    given = operands(1, 256, 48, "row", "block" if per == "group" else "row", device)
    q, scale = rooftile.rms_norm(x, norm, quantize=Quantize(per=per))
    found = fp8_linear(q, given["weight"], given["weight_scale"], x_scale=scale)
    assert found.shape == (2, 4, 48)
    expected = reference.fp8_linear(
        q.double(), given["weight"].double(), given["weight_scale"].double(), scale.double()
    )
    assert relative_error(found, expected) < 4e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_chips_without_fp8_read_the_same_from_bytes(name, device, monkeypatch):
    config = CONFIGS[name]
    if config.kernel == "hopper":
        pytest.skip("kernel 'hopper' is for sm_90, which has fp8")
    for kind in KINDS:
        given = operands(7, 256, 48, kind, kind, device)
        everything = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).reshape(1, 256)
        given["x"][:1] = torch.where(everything.float().isnan(), 0.0, everything.float()).to(FP8)
        expected = fp8_linear(**given, out_dtype=torch.float32, config=config)
        with monkeypatch.context() as patch:
            patch.setattr(quantize, "_has_instruction", lambda target: False)
            found = fp8_linear(**given, out_dtype=torch.float32, config=config)
            assert relative_error(found, expected) < SUM
            given["x"][2, 3] = torch.tensor(NAN).to(FP8)
            found = fp8_linear(**given, out_dtype=torch.float32, config=config)
        assert found[2].isnan().all()
        assert found[[0, 1, 3]].isfinite().all()


def test_scales_and_operands_of_any_strides(device):
    given = operands(5, 256, 144, "block", "block", device)
    expected = fp8_linear(**given)

    def assert_near(found):  # another kernel may take them, and add in another order: small sums are not bit-identical
        of = expected[0] if found.dim() == 1 else expected
        assert found.shape == of.shape
        assert (found - of).norm() <= torch.finfo(of.dtype).eps / 2 * of.norm()

    for name in given:
        assert_near(fp8_linear(**{**given, name: given[name].T.contiguous().T}))
    assert_near(fp8_linear(**{**given, "x": given["x"][None], "x_scale": given["x_scale"][None]})[0])
    assert_near(fp8_linear(**{**given, "x": given["x"][0], "x_scale": given["x_scale"][0]}))


def test_split_sums_leave_their_counters_zero_and_do_not_depend_on_who_is_last(device, monkeypatch):
    from rooftile import launching

    made = []
    stock = launching.counters

    def counters(n, where):
        made.append(stock(n, where))
        return made[-1]

    monkeypatch.setattr(launching, "counters", counters)
    given = operands(9, 512, 96, "row", "row", device)
    for name in ("skinny split", "tiled split"):
        results = [fp8_linear(**given, config=CONFIGS[name]) for _ in range(3)]
        assert all(torch.equal(r, results[0]) for r in results)
    assert made
    assert all((c == 0).all() for c in made)


def test_nothing_to_sum_and_nothing_to_write(device):
    bias = torch.randn(8, device=device)
    empty = {"x": torch.empty(3, 0, device=device), "weight": torch.empty(8, 0, device=device).to(FP8)}
    one = torch.ones(1, device=device)
    assert_same((fp8_linear(**empty, weight_scale=one, bias=bias),), (bias.expand(3, 8),))
    assert (fp8_linear(**empty, weight_scale=one) == 0).all()
    weight = torch.zeros(8, 16, device=device).to(FP8)
    assert fp8_linear(torch.empty(0, 2, 16, device=device), weight, one).shape == (0, 2, 8)
    assert fp8_linear(torch.empty(2, 16, device=device), weight[:0], one).shape == (2, 0)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_scale_that_is_not_finite_shows_where_it_belongs(bad, device):
    given = operands(4, 256, 140, "row", "row", device)
    clean = fp8_linear(**given)
    given["x_scale"][1] = bad
    given["weight_scale"][7] = bad
    found = fp8_linear(**given)
    touched = torch.zeros(4, 140, dtype=torch.bool, device=device)
    touched[1], touched[:, 7] = True, True
    assert (~found[touched].isfinite()).all()
    assert torch.equal(found[~touched], clean[~touched])
    given = operands(4, 256, 140, "block", "block", device)
    given["weight_scale"][1, 0] = bad
    found = fp8_linear(**given)
    assert (~found[:, 128:].isfinite()).all()
    assert found[:, :128].isfinite().all()


# The choice, and errors


def test_the_choice_can_be_launched_at_any_size():
    """Every kernel would take what is chosen for it."""
    for target in runtime.TARGETS.values():
        for m in (1, 2, 17, 64, 65, 128, 2048, 8192):
            for k, n in ((4096, 6144), (14336, 4096), (48, 16), (100, 37)):
                for parts in (False, True):
                    for fast in (False, True):
                        p = problem(m, n, k, parts, fast, k % 16 == 0)
                        assert choose.can_implement(p, choose.choose(p, target), target) is None


def test_configurations_that_can_not_be_are_refused(device):
    given = operands(5, 256, 48, "row", "row", device)
    blocks = operands(5, 256, 48, "block", "block", device)
    cases = [
        (given, GemmConfig("gemv", 1, 16, 128), "kernel is 'gemv', expected one of skinny, tiled, hopper"),
        (given, GemmConfig("skinny", 4, 16, 128), "block_m is 4, expected at least x's 5 rows"),
        (given, GemmConfig("tiled", 16, 8, 128), "block_n is 8, expected at least 16"),
        (given, GemmConfig("tiled", 16, 16, 16), "block_k is 16, expected at least 32"),
        (blocks, GemmConfig("tiled", 16, 16, 256), "block_k is 256, expected at most 128, the elements of the sum"),
        (given, GemmConfig("tiled", 16, 16, 128, split_k=3), "split_k is 3, expected at most the 2 steps of 128"),
        (given, GemmConfig("hopper", 32, 64, 128), "block_m is 32 and block_n 64, expected 64 to 256"),
        (given, GemmConfig("hopper", 64, 96, 128), "block_n is 96, expected a power of two"),
        (operands(5, 250, 48, "row", "row", device), GemmConfig("hopper", 64, 64, 128), "16 bytes"),
    ]
    for tensors, config, message in cases:
        if takes(config, device):
            with pytest.raises(ValueError, match=f"fp8_linear: config .*{message}|fp8_linear: {message}"):
                fp8_linear(**tensors, config=config)
    with pytest.raises(TypeError, match=r"fp8_linear: config is a tuple, expected a rooftile.GemmConfig"):
        fp8_linear(**given, config=(64, 64))


def test_the_promoted_kernel_says_what_it_can_not_do():
    p, target = problem(256, 512, 1024), runtime.TARGETS["sm_90"]
    c = GemmConfig("hopper", 128, 256, 128, num_warps=8, num_stages=4, pingpong=True)
    assert choose.can_implement(p, c, target) is None
    cases = [
        ({}, {"block_m": 64}, "block_m is 64 and num_warps 8, expected 8 and 64 rows for each 4"),
        ({}, {"block_n": 64}, "block_n is 64, expected 128 or 256"),
        ({}, {"num_stages": 5}, "num_stages is 5: 262656 bytes of tiles, expected at most 232448"),
        ({"n": 500}, {}, "not contiguous and at multiples of 16 bytes"),
    ]
    for other_p, other_c, message in cases:
        why = choose.can_implement(dataclasses.replace(p, **other_p), dataclasses.replace(c, **other_c), target)
        assert message in why
    assert "is for sm_90, and the device is sm_80" in choose.can_implement(p, c, runtime.TARGETS["sm_80"])


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (128, 4096, 4096, (64, 128, 2)),
        (256, 4096, 4096, (64, 128, 1)),
        (256, 4096, 14336, (64, 128, 2)),
        (512, 4096, 4096, (128, 128, 1)),
        (512, 4096, 14336, (128, 128, 1)),
        (512, 6144, 4096, (128, 256, 1)),
        (1024, 6144, 4096, (128, 128, 1)),
        (1024, 28672, 4096, (128, 256, 1)),
        (8192, 8192, 8192, (192, 128, 1)),
    ],
)
def test_the_tile_is_the_one_that_was_fastest(m, n, k, tile):
    """Of those in the table of `_hopper_of_fp8`."""
    c = choose.choose(problem(m, n, k), runtime.TARGETS["sm_90"])
    assert (c.kernel, c.block_m, c.block_n, c.split_k) == ("hopper", *tile)


def test_a_measured_configuration_comes_first(monkeypatch):
    target = runtime.TARGETS["sm_90"]
    p = problem(300, 512, 1024, True, True)
    usual, measured = choose.choose(p, target), GemmConfig("tiled", 32, 64, 64, 4, 2, 4, 2)
    choose.choose.cache_clear()
    entries = {"m512 n512 k1024 parts": dataclasses.asdict(measured)}
    monkeypatch.setattr(choose.tuning, "lookup", lambda op, key, chip: {"fp8_linear": entries}[op].get(key))
    assert choose.choose(p, target) == measured
    for bad in ({"block_k": 256}, {"kernel": "row"}, {"block_n": 48}, {"colour": 1}):  # refused, unknown, nonsense
        entries["m512 n512 k1024 parts"] = {**dataclasses.asdict(measured), **bad}
        choose.choose.cache_clear()
        assert choose.choose(p, target) == usual
    choose.choose.cache_clear()
    keys = [
        choose.tuning_key(dataclasses.replace(p, scaled_steps=False, fast=fast, w_aligned=fast))[1]
        for fast in (True, False)
    ]
    assert keys == ["m512 n512 k1024 fast", "m512 n512 k1024 unaligned"]


def test_wrong_arguments_are_named(device):
    given = operands(4, 256, 140, "row", "row", device)
    wide = {**given, "x": torch.randn(4, 256, device=device), "x_scale": None}
    ones = torch.ones
    cases = [
        (ValueError, r"x has shape \(4, 255\), expected \(..., 256\) to match a weight of", {"x": given["x"][:, :255]}),
        (ValueError, r"weight has shape \(256,\), expected two dimensions", {"weight": given["weight"][0]}),
        (TypeError, "weight has dtype torch.bfloat16, expected torch.float8_e4m3fn", {"weight": wide["x"].to(BF16)}),
        (TypeError, "x has dtype torch.float8_e5m2, expected", {"x": wide["x"].to(torch.float8_e5m2)}),
        (ValueError, r"weight_scale has shape \(141,\), expected one element, \(140,\), \(140, 1\) or \(2, 2\)",
         {"weight_scale": ones(141, device=device)}),
        (ValueError, r"weight_scale has shape \(1, 140\), expected", {"weight_scale": ones(1, 140, device=device)}),
        (TypeError, "weight_scale has dtype torch.bfloat16", {"weight_scale": ones(140, 1, device=device).to(BF16)}),
        (ValueError, r"x_scale has shape \(4,\), expected one element, \(4, 1\) or \(4, 2\)",
         {"x_scale": ones(4, device=device)}),
        (ValueError, "x_scale is None, expected the float32 scales of x", {"x_scale": None}),
        (TypeError, "x_scale has dtype torch.float16", {"x_scale": ones(4, 1, device=device).half()}),
        (ValueError, "x_scale is given, expected None for an x of torch.float32", {"x": wide["x"]}),
        (ValueError, r"bias has shape \(139,\), expected \(140,\)", {"bias": ones(139, device=device)}),
        (TypeError, "bias has dtype torch.int64", {"bias": ones(140, device=device).long()}),
        (TypeError, "out_dtype is torch.float64, expected one of torch.bfloat16", {"out_dtype": torch.float64}),
    ]  # fmt: skip
    for error, message, changed in cases:
        with pytest.raises(error, match=f"fp8_linear: {message}"):
            fp8_linear(**{**given, **changed})
    with pytest.raises(ValueError, match="fp8_linear: x requires grad, but fp8_linear has no derivative"):
        fp8_linear(**{**wide, "x": wide["x"].requires_grad_()})
    with torch.no_grad():
        fp8_linear(**wide)


# Quantised tensors


def test_a_tensors_own_scale_takes_its_largest_number_to_the_largest(device):
    for dtype, shape in ((FP8, (3, 5, 70)), (INT8, (1, 4100)), (torch.float8_e5m2, (17,))):
        x = torch.randn(shape, device=device)
        q, scale = quantize_tensor(x, Quantize(dtype, "tensor"))
        assert (q.shape, scale.shape, scale.dtype) == (x.shape, (1,), torch.float32)
        largest = LARGEST[str(dtype).removeprefix("torch.")]
        assert q.float().abs().max() == largest
        assert relative_error(scale, x.double().abs().amax().reshape(1) / largest) < 1e-6
        assert relative_error(Quantize(dtype, "tensor").dequantize(q, scale), x) < 0.06


def test_blocks_have_scales_of_their_own(device):
    x = torch.randn(200, 260, device=device)
    x[:128, 128:256] *= 100
    option = Quantize(per="block")
    q, scale = quantize_tensor(x, option)
    assert scale.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert q[part].float().abs().max() == 448
            assert relative_error(scale[i, j], x[part].abs().max() / 448) < 1e-6
    assert relative_error(option.dequantize(q, scale), x) < 0.04


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("per", ["tensor", "block"])
def test_all_that_shares_a_scale_with_nan_or_infinity_comes_back_as_nan(per, bad, device):
    x = torch.randn(130, 140, device=device)
    x[129, 3] = bad
    option = Quantize(per=per)
    back = option.dequantize(*quantize_tensor(x, option))
    touched = torch.zeros(130, 140, dtype=torch.bool, device=device)
    touched[(slice(128, None), slice(0, 128)) if per == "block" else slice(None)] = True
    assert torch.equal(back.isnan(), touched)


def test_rows_too_long_for_registers_give_the_same(device, monkeypatch):
    x = torch.randn(3, 300, device=device).to(BF16)
    for dtype in (FP8, INT8):
        expected = quantize_tensor(x, Quantize(dtype))
        with monkeypatch.context() as patch:
            patch.setattr(tensor_op, "config", lambda *_: RowConfig("loop", 64, num_warps=4))
            assert_same(quantize_tensor(x, Quantize(dtype)), expected)


def test_many_programs_find_one_maximum(device, monkeypatch):
    x = torch.randn(40, 300, device=device)
    expected = quantize_tensor(x, Quantize(per="tensor"))
    small = RowConfig("tile", 64, num_warps=4, rows=2, per_sm=3)
    monkeypatch.setattr(tensor_op, "config", lambda *_: small)
    assert_same(quantize_tensor(x, Quantize(per="tensor")), expected)


def test_zeros_of_any_kind(device):
    for per in ("row", "group", "block", "tensor"):
        q, scale = quantize_tensor(torch.zeros(4, 200, device=device), Quantize(per=per))
        assert (q.float() == 0).all()
        assert (scale == 2.0**-126).all()
    for per, shape in (("row", (3, 1)), ("group", (3, 0)), ("block", (1, 0)), ("tensor", (1,))):
        _, scale = quantize_tensor(torch.zeros(3, 0, device=device), Quantize(per=per))
        assert torch.equal(scale, torch.full(shape, 2.0**-126, device=device))


def test_ops_that_quantise_their_own_result_refuse_what_they_can_not_know(device):
    x = torch.randn(4, 32, device=device)
    calls = {
        "rms_norm": lambda q: rooftile.rms_norm(x, quantize=q),
        "add_rms_norm": lambda q: rooftile.add_rms_norm(x, x, quantize=q),
        "silu_mul": lambda q: rooftile.silu_mul(x, x, quantize=q),
        "silu_mul_packed": lambda q: rooftile.silu_mul_packed(x, quantize=q),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match=f'{op}: quantize has per="tensor" with no scale, expected one'):
            call(Quantize(per="tensor"))
        with pytest.raises(ValueError, match=f'{op}: quantize has per="block", which quantize_tensor takes'):
            call(Quantize(per="block"))


def test_wrong_tensors_to_quantise_are_named(device):
    with pytest.raises(ValueError, match=r'quantize_tensor: x has shape \(2, 3, 4\), expected two .* for per="block"'):
        quantize_tensor(torch.randn(2, 3, 4, device=device), Quantize(per="block"))
    with pytest.raises(TypeError, match=r"quantize_tensor: quantize is 'row', expected a rooftile\.Quantize"):
        quantize_tensor(torch.randn(2, 3, device=device), "row")
    with pytest.raises(TypeError, match=r"quantize_tensor: x has dtype torch\.float64"):
        quantize_tensor(torch.randn(2, 3, device=device).double())
    with pytest.raises(ValueError, match="quantize_tensor: x requires grad"):
        quantize_tensor(torch.randn(2, 3, device=device).requires_grad_())


def test_options_are_kept_apart():
    with pytest.raises(ValueError, match="per='block' with a scale, expected none"):
        Quantize(per="block", scale=torch.ones(1))
    assert dataclasses.replace(Quantize(per="tensor"), scale=torch.ones(1)).scale is not None
