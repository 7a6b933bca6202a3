"""silu_mul and silu_mul_packed: far arguments, shapes, layouts, errors."""

import pytest
import torch
from helpers import BF16, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.reference import silu_mul as reference


@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    cols=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
)
@settings(deadline=None, max_examples=15)
def test_any_leading_shape_packed_or_not(leading, cols, dtype):
    device = runtime.default_device()
    gate, up, dy = (torch.randn(*leading, cols, device=device).to(dtype) for _ in range(3))
    gate.requires_grad_()
    up.requires_grad_()
    packed = torch.cat((gate, up), dim=-1).detach().requires_grad_()
    y, from_packed = rooftile.silu_mul(gate, up), rooftile.silu_mul_packed(packed)
    assert (y.shape, y.dtype, y.is_contiguous()) == (gate.shape, dtype, True)
    assert_same((from_packed,), (y,))
    assert relative_error(y.detach(), reference.silu_mul(gate.detach().double(), up.detach().double())) < (
        2 * torch.finfo(dtype).eps
    )
    apart = torch.autograd.grad(y, (gate, up), dy)
    assert_same(torch.autograd.grad(from_packed, packed, dy), (torch.cat(apart, dim=-1),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_far_gates_neither_overflow_nor_become_nan(dtype, device):
    largest = torch.finfo(dtype).max
    gate = torch.tensor([-largest, -1e4, -200.0, -0.0, 0.0, 100.0, 1e4, largest], device=device).to(dtype)
    gate = gate[None].requires_grad_()
    up = torch.full_like(gate, 0.5).requires_grad_()
    y = rooftile.silu_mul(gate, up)
    expected = torch.where(gate > 0, gate * 0.5, torch.zeros_like(gate))
    torch.testing.assert_close(y, expected)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones_like(y))
    slopes = torch.tensor([[0.0, 0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.5]], device=device).to(dtype)
    torch.testing.assert_close(dgate, slopes)
    torch.testing.assert_close(dup, expected * 2)


def test_halves_of_one_tensor_are_taken_as_they_are(device):
    """Views of a fused projection: row strides of 2N, and no copy of them in fresh memory."""
    gate_up = torch.randn(7, 64, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_same((rooftile.silu_mul(gate, up),), (rooftile.silu_mul(gate.contiguous(), up.contiguous()),))


def test_wrong_arguments(device):
    x = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match=r"silu_mul: up has shape \(4, 7\), expected \(4, 8\) to match gate"):
        rooftile.silu_mul(x, x[:, :7])
    with pytest.raises(ValueError, match=r"silu_mul: up has shape \(1, 8\), expected \(4, 8\)"):
        rooftile.silu_mul(x, x[:1])
    with pytest.raises(TypeError, match=r"silu_mul: up has dtype torch.float16, expected torch.float32"):
        rooftile.silu_mul(x, x.half())
    with pytest.raises(ValueError, match=r"silu_mul: gate has shape \(\), expected at least one dimension"):
        rooftile.silu_mul(x[0, 0], x[0, 0])
    for bad in (x[:, :7], x[0, 0]):
        with pytest.raises(ValueError, match=r"silu_mul_packed: gate_up has shape .*, expected an even last dimension"):
            rooftile.silu_mul_packed(bad)
