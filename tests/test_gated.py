"""silu_mul, gelu_mul and their packed forms: far arguments, shapes, layouts, errors."""

import functools

import pytest
import torch
from helpers import BF16, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile import Quantize, runtime
from rooftile.ops.gated import gelu_mul, gelu_mul_packed, silu_mul, silu_mul_packed
from rooftile.reference import gated as reference

TANH = {"activation": "gelu_tanh"}
# The op of two tensors, the packed one, and the reference.
ACTIVATIONS = {
    "silu": (silu_mul, silu_mul_packed, reference.silu_mul),
    "gelu": (gelu_mul, gelu_mul_packed, reference.gelu_mul),
    "gelu tanh": tuple(functools.partial(f, **TANH) for f in (gelu_mul, gelu_mul_packed, reference.gelu_mul)),
}
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    cols=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
    activation=st.sampled_from(list(ACTIVATIONS)),
)
@settings(max_examples=20)
def test_any_leading_shape_packed_or_not(leading, cols, dtype, activation):
    device = runtime.default_device()
    mul, mul_packed, truth = ACTIVATIONS[activation]
    gate, up, dy = (torch.randn(*leading, cols, device=device).to(dtype) for _ in range(3))
    gate.requires_grad_()
    up.requires_grad_()
    packed = torch.cat((gate, up), dim=-1).detach().requires_grad_()
    y, from_packed = mul(gate, up), mul_packed(packed)
    assert (y.shape, y.dtype, y.is_contiguous()) == (gate.shape, dtype, True)
    assert_same((from_packed,), (y,))
    expected = truth(gate.detach().double(), up.detach().double())
    # The factor of the gate is a difference from 1 where the gate is negative: its error is one of 1.
    size = (gate * up).detach().double().norm()
    assert (y.detach() - expected).norm() <= 2 * torch.finfo(dtype).eps * size
    apart = torch.autograd.grad(y, (gate, up), dy)
    assert_same(torch.autograd.grad(from_packed, packed, dy), (torch.cat(apart, dim=-1),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@every_activation
def test_far_gates_neither_overflow_nor_become_nan(activation, dtype, device):
    mul = ACTIVATIONS[activation][0]
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-largest, -1e4, -200.0, -0.0, 0.0, 100.0, 1e4, largest], device=device).to(dtype)
    gate = gate[None].requires_grad_()
    up = torch.full_like(gate, 0.5).requires_grad_()
    y = mul(gate, up)
    expected = torch.where(gate > 0, gate * 0.5, torch.zeros_like(gate))
    torch.testing.assert_close(y, expected)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    slopes = torch.tensor([[0.0, 0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.5]], device=device).to(dtype)
    torch.testing.assert_close(dgate, slopes)
    torch.testing.assert_close(dup, expected * 2)


@every_activation
def test_halves_of_one_tensor_are_taken_as_they_are(activation, device):
    """Views of a fused projection: row strides of 2N, and no copy of them in fresh memory."""
    mul = ACTIVATIONS[activation][0]
    gate_up = torch.randn(7, 64, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_same((mul(gate, up),), (mul(gate.contiguous(), up.contiguous()),))


@pytest.mark.parametrize("cols", [7, 64])
def test_a_packed_backward_gives_the_result_again(cols, device):
    packed, dy = torch.randn(3, 2 * cols, device=device).bfloat16(), torch.randn(3, cols, device=device).bfloat16()
    for backward, kind, mul in (
        (torch.ops.rooftile.silu_mul_packed_backward, "silu", silu_mul_packed),
        (torch.ops.rooftile.gelu_mul_packed_backward, "gelu", gelu_mul_packed),
    ):
        grad, y = backward(dy, packed, kind, True)
        alone, nothing = backward(dy, packed, kind, False)
        assert torch.equal(grad, alone)
        assert nothing.numel() == 0
        # The activation is the same function of float32, computed beside its slope.
        torch.testing.assert_close(y, mul(packed), rtol=2**-8, atol=0.0)


def test_exact_and_approximate_differ_as_they_do_in_pytorch(device):
    gate = torch.linspace(-4, 4, 64, device=device)[None]
    ones = torch.ones_like(gate)
    for activation, approximate in reference.APPROXIMATE.items():
        expected = torch.nn.functional.gelu(gate, approximate=approximate)
        torch.testing.assert_close(gelu_mul(gate, ones, activation=activation), expected, rtol=1e-5, atol=1e-6)
    assert (gelu_mul(gate, ones) - gelu_mul(gate, ones, activation="gelu_tanh")).abs().max() > 1e-4


def test_wrong_arguments(device):
    x = torch.randn(4, 8, device=device)
    for op, mul, mul_packed in (("silu_mul", silu_mul, silu_mul_packed), ("gelu_mul", gelu_mul, gelu_mul_packed)):
        with pytest.raises(ValueError, match=rf"{op}: up has shape \(4, 7\), expected \(4, 8\) to match gate"):
            mul(x, x[:, :7])
        with pytest.raises(ValueError, match=rf"{op}: up has shape \(1, 8\), expected \(4, 8\)"):
            mul(x, x[:1])
        with pytest.raises(TypeError, match=rf"{op}: up has dtype torch.float16, expected torch.float32"):
            mul(x, x.half())
        with pytest.raises(TypeError, match=rf"{op}: gate has dtype torch.int64, expected float32, float16"):
            mul(x.long(), x.long())
        with pytest.raises(ValueError, match=rf"{op}: gate has shape \(\), expected at least one dimension"):
            mul(x[0, 0], x[0, 0])
        for bad in (x[:, :7], x[0, 0]):
            with pytest.raises(
                ValueError, match=rf"{op}_packed: gate_up has shape .*, expected an even last dimension"
            ):
                mul_packed(bad)


@pytest.mark.parametrize("device_type", ["here", "meta"])
def test_an_activation_of_another_name(device_type, device):
    x = torch.randn(4, 8, device=device if device_type == "here" else "meta")
    with pytest.raises(ValueError, match="gelu_mul: activation is 'silu', expected one of gelu, gelu_tanh"):
        gelu_mul(x, x, activation="silu")
    with pytest.raises(ValueError, match="gelu_mul_packed: activation is '', expected one of gelu, gelu_tanh"):
        gelu_mul_packed(x, activation="")
    with pytest.raises(ValueError, match="gelu_mul_packed: activation is 'tanh', expected one of gelu, gelu_tanh"):
        gelu_mul_packed(x, activation="tanh", quantize=Quantize())


def test_the_backward_ops_refuse_gradients_that_do_not_match(device):
    x = torch.randn(4, 8, device=device)
    for dy, error in ((x[:3], ValueError), (x.to(BF16), TypeError)):
        with pytest.raises(error, match="gelu_mul_backward: dy has"):
            torch.ops.rooftile.gelu_mul_backward(dy, x, x, "gelu", True, True)
        with pytest.raises(error, match="gelu_mul_packed_backward: dy has"):
            torch.ops.rooftile.gelu_mul_packed_backward(dy, torch.cat((x, x), dim=-1), "gelu_tanh", False)
