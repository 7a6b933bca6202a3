"""Quantised results: formats to the bit, scales, half a step of error, NaN and infinity, kernels, errors."""

import pytest
import torch
from helpers import BF16, Calls, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.ops import gated
from rooftile.ops.rms_norm import forward as norm
from rooftile.primitives import quantize
from rooftile.primitives.quantize import rounded
from rooftile.primitives.rows import RowConfig
from rooftile.quantize import DTYPES, Quantize
from rooftile.reference import rms_norm as norm_reference
from rooftile.reference.quantize import LARGEST, nearest

import triton  # isort: skip
import triton.language as tl  # isort: skip

E4M3, E5M2, INT8 = DTYPES
FP8 = (E4M3, E5M2)
INF, NAN = float("inf"), float("nan")
LEAST = 2.0**-126
every_format = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
every_per = pytest.mark.parametrize("per", ["row", "group", "tensor"])


def name(dtype):
    return str(dtype).removeprefix("torch.")


def option(dtype, per, device, *, scale=0.01, group_size=16):
    given = torch.tensor([scale], device=device) if per == "tensor" else None
    return Quantize(dtype, per, given, group_size)


def spread(scale, shape, q):
    """The scale of each element of a result of that shape."""
    if q.per == "tensor":
        return scale.reshape(()).expand(shape)
    return scale.repeat_interleave(q.group_size if q.per == "group" else shape[-1], -1)[..., : shape[-1]]


# Formats


@triton.jit(do_not_specialize=["n"])
def _convert_kernel(v_ptr, out_ptr, n, FORMAT: tl.constexpr, IN_RANGE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(v_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, rounded(v, FORMAT, IN_RANGE, out_ptr.dtype.element_ty), mask=at < n)


def convert(v, dtype, *, as_bytes=False, in_range=False):
    out = torch.empty(v.shape, dtype=dtype, device=v.device)
    raw = out.view(torch.uint8) if as_bytes else out
    _convert_kernel[(triton.cdiv(v.numel(), 4096),)](v, raw, v.numel(), name(dtype), in_range, 4096)
    return out


def hard_numbers(dtype):
    """All of a format's numbers, the middles between neighbours, what lies beside both, and floats of any kind."""
    numbers = torch.arange(0.0, 130.0) if dtype == INT8 else torch.arange(128, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(m, torch.tensor(to)) for m in (numbers, middles) for to in (-INF, INF)]
    beyond = torch.tensor([0.0, 1e-45, LEAST, LARGEST[name(dtype)] * 1.04, LARGEST[name(dtype)] * 1.07, 3e38, INF])
    some = torch.cat((numbers, middles, *beside, beyond))
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), dtype=torch.int32)
    return torch.cat((some, -some, bits.view(torch.float32), torch.randn(2000) * 50))


@pytest.mark.parametrize("as_bytes", [False, True], ids=["as the chip rounds", "in integer arithmetic"])
@pytest.mark.parametrize("dtype", FP8, ids=name)
def test_fp8_is_pytorchs_but_that_it_saturates(dtype, as_bytes, device):
    if not as_bytes and not quantize._has_instruction(runtime.target(device)):
        pytest.skip(f"{runtime.target(device).arch} has no instruction for it: integer arithmetic rounds there")
    v = hard_numbers(dtype)
    largest = LARGEST[name(dtype)]
    found = convert(v.to(device), dtype, as_bytes=as_bytes).cpu().view(torch.uint8)
    expected = v.clamp(-largest, largest).to(dtype).view(torch.uint8)
    assert torch.equal(found[~v.isnan()], expected[~v.isnan()])
    assert (found[v.isnan()] == 0x7F).all()


def test_int8_rounds_half_to_even_and_saturates_symmetrically(device):
    v = hard_numbers(INT8)
    found = convert(v.to(device), INT8).cpu()
    assert torch.equal(found.float(), v.nan_to_num(0.0, INF, -INF).clamp(-127, 127).round())
    inside = v[~(v.abs() > 127.4)]
    assert torch.equal(convert(inside.to(device), INT8, in_range=True).cpu(), convert(inside.to(device), INT8).cpu())


@every_format
def test_the_reference_rounds_as_pytorch_does(dtype):
    v = hard_numbers(dtype)
    v = v[~v.isnan()]
    largest = LARGEST[name(dtype)]
    expected = v.clamp(-largest, largest)
    expected = expected.round().to(dtype) if dtype == INT8 else expected.to(dtype)
    assert torch.equal(nearest(v.double(), name(dtype)).float(), expected.float())


# Values


def half_step(v, dtype):
    """Half the distance of a format's numbers around v."""
    if dtype == INT8:
        return torch.full_like(v, 0.5)
    info = torch.finfo(dtype)
    exponent = torch.frexp(v).exponent - 1
    least = torch.frexp(torch.tensor(info.smallest_normal)).exponent - 1
    return torch.ldexp(torch.full_like(v, info.eps / 2), exponent.clamp(min=int(least)))


def assert_within_half_a_step(y_q, scale, y, q):
    """Each element, of a result in float32; the two kernels' float32 may differ in the last digits."""
    y, scales = y.double(), spread(scale, y.shape, q).double()
    largest = LARGEST[name(q.dtype)]
    v = (y / scales).clamp(-largest, largest)
    assert (y_q.dtype, y_q.shape, y_q.is_contiguous()) == (q.dtype, y.shape, True)
    assert ((y_q.double() - v).abs() <= half_step(v, q.dtype) + 4e-6 * v.abs() + 1e-30).all()


@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    cols=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
    to=st.sampled_from(DTYPES),
    per=st.sampled_from(["row", "group", "tensor"]),
    size=st.sampled_from([1e-3, 1.0, 1e4]),
)
@settings(max_examples=40)
def test_every_element_is_within_half_a_step(leading, cols, dtype, to, per, size):
    device = runtime.default_device()
    q = option(to, per, device, scale=3.0 / LARGEST[name(to)])
    x, residual = (torch.randn(2, *leading, cols, device=device) * size).to(dtype)
    weight = torch.randn(cols, device=device).to(dtype)

    expected = rooftile.rms_norm(x.float(), weight.float(), rounding="none")
    assert_within_half_a_step(*rooftile.rms_norm(x, weight, rounding="none", quantize=q), expected, q)
    y_q, u, scale = rooftile.add_rms_norm(x, residual, weight, rounding="gemma", offset=1.0, quantize=q)
    assert_same((u,), (x + residual,))
    expected = rooftile.rms_norm(u.float(), weight.float(), rounding="gemma", offset=1.0)
    assert_within_half_a_step(y_q, scale, expected, q)
    for mul in (rooftile.silu_mul, rooftile.gelu_mul):
        y_q, scale = mul(x, residual, quantize=q)
        assert_within_half_a_step(y_q, scale, mul(x.float(), residual.float()), q)


@every_format
@pytest.mark.parametrize("per", ["row", "group"])
def test_a_scale_takes_the_largest_number_to_the_largest(dtype, per, device):
    x, q = torch.randn(7, 50, device=device), option(dtype, per, device)
    y_q, scale = rooftile.rms_norm(x, quantize=q)
    assert scale.shape == (7, 1 if per == "row" else 4)
    assert scale.dtype == torch.float32
    parts = [y_q.float()] if per == "row" else y_q.float().split(16, -1)
    assert all((part.abs().amax(-1) == LARGEST[name(dtype)]).all() for part in parts)
    y = norm_reference.rms_norm(x.double())
    parts = [y] if per == "row" else y.split(16, -1)
    most = torch.stack([part.abs().amax(-1) for part in parts], -1)
    assert relative_error(scale, most / LARGEST[name(dtype)]) < 1e-6


def test_the_float32_result_is_quantised_and_llamas_cast_before_the_weight_kept(device):
    x, weight = torch.randn(64, 128, device=device).to(BF16), torch.randn(128, device=device).to(BF16)
    q = option(INT8, "tensor", device, scale=2e-3)
    results = {}
    for rounding, xhat in (("llama", rooftile.rms_norm(x)), ("gemma", rooftile.rms_norm(x.float()))):
        y_q, _ = rooftile.rms_norm(x, weight, rounding=rounding, quantize=q)
        y = xhat.float() * weight.float()
        assert (y_q == nearest(y / q.scale, "int8")).float().mean() > 0.995  # a row's statistics may differ in a bit
        assert (y_q == nearest(y.to(BF16).float() / q.scale, "int8")).float().mean() < 0.995
        results[rounding] = y_q
    assert not torch.equal(results["llama"], results["gemma"])


@every_format
@every_per
def test_zeros_and_the_smallest_numbers(dtype, per, device):
    q = option(dtype, per, device)
    zeros = torch.zeros(3, 40, device=device)
    for y_q, scale in (rooftile.rms_norm(zeros, quantize=q), rooftile.silu_mul(zeros, zeros, quantize=q)):
        assert (y_q.float() == 0).all()
        assert per == "tensor" or (scale == LEAST).all()
    if per != "tensor":
        tiny = torch.full((3, 40), 1e-19, device=device)
        y_q, scale = rooftile.silu_mul(tiny, tiny, quantize=q)
        assert (scale == LEAST).all()
        assert torch.equal(y_q.float(), nearest(torch.full((3, 40), 0.5e-38 / LEAST), name(dtype)).float().to(device))


@every_format
@pytest.mark.parametrize("per", ["row", "group"])
def test_the_largest_numbers_do_not_overflow(dtype, per, device):
    gate, up = torch.full((2, 40), 1e19, device=device), torch.full((2, 40), 3e19, device=device)
    y_q, scale = rooftile.silu_mul(gate, up, quantize=option(dtype, per, device))
    assert (y_q.float() == LARGEST[name(dtype)]).all()
    torch.testing.assert_close(scale, torch.full_like(scale, 3e38 / LARGEST[name(dtype)]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("per", ["row", "group"])
@every_format
def test_all_that_shares_a_scale_with_nan_or_infinity_comes_back_as_nan(dtype, per, bad, device):
    q = option(dtype, per, device)
    x = torch.randn(4, 40, device=device)
    clean_q, clean = rooftile.silu_mul(x, x, quantize=q)
    up = x.clone()
    up[1, 20] = bad
    y_q, scale = rooftile.silu_mul(x, up, quantize=q)
    back = y_q.float() * spread(scale, y_q.shape, q)
    touched = torch.zeros(4, 40, dtype=torch.bool, device=device)
    touched[1, slice(None) if per == "row" else slice(16, 32)] = True
    assert torch.equal(back.isnan(), touched)
    assert torch.equal(y_q.float()[~touched], clean_q.float()[~touched])
    kept = ~spread(touched[:, ::16] if per == "group" else touched[:, :1], touched.shape, q)
    assert torch.equal(spread(scale, x.shape, q)[kept], spread(clean, x.shape, q)[kept])
    # And where the weight has it, in one column of every row.
    weight = torch.ones(40, device=device)
    weight[20] = bad
    y_q, scale = rooftile.rms_norm(x, weight, quantize=q)
    back = y_q.float() * spread(scale, y_q.shape, q)
    assert back[:, 16:32].isnan().all()
    assert back[:, :16].isnan().all() == (per == "row")


@every_format
def test_with_a_given_scale_nan_and_infinity_stay_where_they_are(dtype, device):
    q = option(dtype, "tensor", device, scale=1.0)
    gate, up = torch.ones(3, 40, device=device), torch.zeros(3, 40, device=device)
    up[1, 3:6] = torch.tensor([NAN, INF, -INF])
    y_q, scale = rooftile.silu_mul(gate, up, quantize=q)
    assert scale is q.scale
    largest = LARGEST[name(dtype)]
    expected = torch.zeros(3, 40)
    expected[1, 3:6] = torch.tensor([0.0 if dtype == INT8 else NAN, largest, -largest])
    assert torch.equal(y_q.float().cpu().nan_to_num(7.0), expected.nan_to_num(7.0))


# Kernels


def results(x, residual, weight, q):
    return (
        *rooftile.rms_norm(x, weight, quantize=q),
        *rooftile.add_rms_norm(x, residual, weight, offset=1.0, rounding="gemma", quantize=q),
        *rooftile.silu_mul(x, residual, quantize=q),
        *rooftile.gelu_mul(x, residual, activation="gelu_tanh", quantize=q),
    )


@pytest.mark.each_once
@pytest.mark.parametrize("held", [0, 1])
@every_per
@every_format
def test_every_kernel_gives_the_same(dtype, per, held, device, monkeypatch):
    """The lengths that the loops are for cost the interpreter too much: they are given short rows here."""
    q = option(dtype, per, device)
    for columns in (64, 257):
        x, residual, weight = (torch.randn(n, columns, device=device).to(BF16) for n in (5, 5, 1))
        expected = results(x, residual, weight[0], q)
        with monkeypatch.context() as patch:
            patch.setattr(norm, "quantized_config", lambda *_: RowConfig("loop", 32, num_warps=4, held=held))
            if per == "row":
                patch.setattr(gated, "quantized_config", lambda *_: RowConfig("loop", 32, num_warps=4))
            else:  # parts of rows
                patch.setattr(gated, "quantized_config", lambda *_: RowConfig("tile", 32, num_warps=4, rows=2))
            found = results(x, residual, weight[0], q)
        for a, e in zip(found, expected, strict=True):
            # Another order of summation: the last digit of a row's statistics, and then a step of some elements.
            assert (a.dtype, a.shape) == (e.dtype, e.shape)
            assert relative_error(a, e) < (2e-2 if a.dtype == dtype else 1e-6)


@pytest.mark.parametrize("dtype", FP8, ids=name)
def test_chips_without_the_instruction_write_the_same_bytes(dtype, device, monkeypatch):
    x, residual, weight = (torch.randn(n, 100, device=device).to(BF16) for n in (5, 5, 1))
    for per in ("row", "group", "tensor"):
        q = option(dtype, per, device)
        expected = results(x, residual, weight[0], q)
        with monkeypatch.context() as patch:
            patch.setattr(quantize, "_has_instruction", lambda target: False)
            found = results(x, residual, weight[0], q)
        assert_same(found, expected)


def test_packed_is_the_two_halves(device):
    gate_up = torch.randn(2, 3, 80, device=device).to(BF16)
    for q in (Quantize(), Quantize(INT8, "group", group_size=16), option(E5M2, "tensor", device)):
        expected = rooftile.silu_mul(*gate_up.chunk(2, dim=-1), quantize=q)
        with Calls() as record:
            assert_same(rooftile.silu_mul_packed(gate_up, quantize=q), expected)
        ((op, given, _),) = record.calls
        assert op._schema.name == "rooftile::silu_mul_quantized"
        assert given[0].shape == (2, 3, 40)
        expected = rooftile.gelu_mul(*gate_up.chunk(2, dim=-1), activation="gelu_tanh", quantize=q)
        assert_same(rooftile.gelu_mul_packed(gate_up, activation="gelu_tanh", quantize=q), expected)
    with pytest.raises(ValueError, match=r"silu_mul_packed: gate_up has shape \(2, 81\), expected an even last"):
        rooftile.silu_mul_packed(torch.empty(2, 81, device=device), quantize=Quantize())


def test_rows_of_no_elements(device):
    for per in ("row", "group"):
        x = torch.empty(3, 0, device=device)
        y_q, scale = rooftile.silu_mul(x, x, quantize=option(E4M3, per, device))
        assert y_q.shape == (3, 0)
        assert torch.equal(scale, torch.full((3, 1 if per == "row" else 0), LEAST, device=device))


# Gradients and errors


def test_a_quantised_result_has_no_gradient_and_says_so(device):
    x, weight = torch.randn(4, 32, device=device), torch.randn(32, device=device)
    q = Quantize()
    for given_x, given_w, asks in ((x.clone().requires_grad_(), weight, "x"), (x, weight.requires_grad_(), "weight")):
        message = rf"rms_norm: {asks} requires grad, but rms_norm_quantized has no derivative; call"
        with pytest.raises(ValueError, match=f"^{message}"):
            rooftile.rms_norm(given_x, given_w, quantize=q)
        with pytest.raises(ValueError, match=f"^add_{message}"):
            rooftile.add_rms_norm(given_x, x, given_w, quantize=q)
        with torch.no_grad():
            assert not rooftile.rms_norm(given_x, given_w, quantize=q)[0].requires_grad
        with torch.inference_mode():
            rooftile.add_rms_norm(given_x, x, given_w, quantize=q)
    x.requires_grad_()
    with pytest.raises(ValueError, match="silu_mul: up requires grad, but silu_mul_quantized has no derivative"):
        rooftile.silu_mul(x.detach(), x, quantize=q)
    with pytest.raises(ValueError, match="silu_mul_packed: gate_up requires grad"):
        rooftile.silu_mul_packed(x, quantize=q)
    with pytest.raises(Exception, match="rms_norm: x requires grad"):
        torch.compile(rooftile.rms_norm, backend="aot_eager", fullgraph=True)(x, quantize=q)


def test_wrong_options_are_named():
    scale = torch.ones(1)
    for error, message, options in (
        (
            TypeError,
            "dtype is torch.float16, expected a torch.dtype, one of torch.float8_e4m3fn, ",
            {"dtype": torch.float16},
        ),
        (TypeError, "dtype is 'int8', expected", {"dtype": "int8"}),
        (ValueError, "per is 'token', expected one of row, group, tensor", {"per": "token"}),
        (ValueError, "per='row' with a scale, expected none: it is computed", {"scale": scale}),
        (
            TypeError,
            "scale has dtype torch.bfloat16, expected torch.float32",
            {"per": "tensor", "scale": scale.to(BF16)},
        ),
        (ValueError, r"scale has shape \(2,\), expected one element", {"per": "tensor", "scale": torch.ones(2)}),
        (ValueError, "group_size is 100, expected a power of two from 16 to 4096", {"per": "group", "group_size": 100}),
    ):
        with pytest.raises(error, match=f"Quantize: {message}"):
            Quantize(**options)


def test_wrong_inputs_are_named(device):
    x, q = torch.randn(4, 32, device=device), Quantize()
    with pytest.raises(TypeError, match=r"^rms_norm: x has dtype torch\.float64, expected"):
        rooftile.rms_norm(x.double(), quantize=q)
    with pytest.raises(ValueError, match=r"^add_rms_norm: residual has shape \(4, 31\), expected \(4, 32\)"):
        rooftile.add_rms_norm(x, x[:, 1:], quantize=q)
    with pytest.raises(ValueError, match=r"^silu_mul: gate has shape \(\), expected"):
        rooftile.silu_mul(x[0, 0], x[0, 0], quantize=q)
    elsewhere = Quantize(per="tensor", scale=torch.empty(1, device="meta"))
    with pytest.raises(ValueError, match=f"^rms_norm: scale is on meta, expected {x.device} to match x"):
        rooftile.rms_norm(x, quantize=elsewhere)
    with pytest.raises(ValueError, match=f"^add_rms_norm: scale is on meta, expected {x.device} to match x"):
        rooftile.add_rms_norm(x, x, quantize=elsewhere)


# What it is for


@pytest.mark.gpu
def test_pytorchs_matrix_products_take_it_as_it_is(device):
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("PyTorch's fp8 product with a scale for each row needs compute capability 9.0")
    x, w = torch.randn(256, 512, device=device).to(BF16), torch.randn(128, 512, device=device).to(BF16)
    expected = norm_reference.rms_norm(x.double()) @ w.double().T
    y_q, scale = rooftile.rms_norm(x, quantize=Quantize())
    w_scale = w.float().abs().amax(1, keepdim=True) / 448
    w_q = (w.float() / w_scale).to(E4M3)
    found = torch._scaled_mm(y_q, w_q.T, scale_a=scale, scale_b=w_scale.T, out_dtype=BF16)
    assert relative_error(found, expected) < 0.05
    y_q, scale = rooftile.rms_norm(x, quantize=Quantize(INT8))
    w_scale = w.float().abs().amax(1, keepdim=True) / 127
    w_q = (w.float() / w_scale).round().to(INT8)
    found = torch._int_mm(y_q, w_q.T) * scale * w_scale.T
    assert relative_error(found, expected) < 0.02
