"""add_rms_norm: the sum, both outputs' gradients, errors."""

import pytest
import torch
from helpers import BF16, Calls, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_it_is_the_sum_and_rms_norm_to_the_bit(dtype, device):
    x, residual = (torch.randn(2, 9, 96, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(96, device=device).to(dtype)
    for options in ({}, {"offset": 1.0, "rounding": "gemma"}, {"rounding": "none", "eps": 1e-3}):
        y, u = rooftile.add_rms_norm(x, residual, weight, **options)
        assert torch.equal(u, x + residual)
        assert_same((y,), (rooftile.rms_norm(u, weight, **options),))


@given(rows=st.integers(0, 40), cols=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_gradients_are_those_of_the_two_steps(rows, cols, seed):
    device = runtime.default_device()
    numbers = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=numbers, device=device)

    x, residual, dy, du = (normal(rows, cols) for _ in range(4))
    weight = normal(cols)
    results = []
    for fused in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
        if fused:
            y, u = rooftile.add_rms_norm(*leaves)
        else:
            u = leaves[0] + leaves[1]
            y = rooftile.rms_norm(u, leaves[2])
        results.append(torch.autograd.grad((y, u), leaves, (dy, du)))
    for fused, apart in zip(*results, strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-5, atol=1e-5)


def test_a_chain_of_layers_trains(device):
    """The residual stream goes through many of them: gradients through u add up."""
    weights = [torch.randn(32, device=device, requires_grad=True) for _ in range(4)]
    x = torch.randn(6, 32, device=device, requires_grad=True)

    def run(add_norm):
        u, y = torch.zeros_like(x), x
        for weight in weights:
            y, u = add_norm(y, u, weight)
        return torch.autograd.grad((y * u).sum(), (x, *weights))

    from rooftile.reference import add_rms_norm as reference

    for found, expected in zip(run(rooftile.add_rms_norm), run(reference.add_rms_norm), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_the_residual_alone_needs_no_kernel(device):
    """Where y is not used, the gradient of the sum is the sum's own."""
    x = torch.randn(4, 32, device=device, requires_grad=True)
    residual = torch.randn(4, 32, device=device, requires_grad=True)
    _, u = rooftile.add_rms_norm(x, residual)
    with Calls() as record:
        grads = torch.autograd.grad(u, (x, residual), torch.ones_like(u))
    assert not record.calls
    assert all(torch.equal(g, torch.ones_like(g)) for g in grads)


def test_wrong_arguments(device):
    x = torch.randn(4, 8, device=device)
    with pytest.raises(ValueError, match=r"add_rms_norm: residual has shape \(1, 8\), expected \(4, 8\) to match x"):
        rooftile.add_rms_norm(x, x[:1])
    with pytest.raises(TypeError, match=r"add_rms_norm: residual has dtype torch.bfloat16, expected torch.float32"):
        rooftile.add_rms_norm(x, x.to(BF16))
    with pytest.raises(ValueError, match=r"add_rms_norm: weight has shape \(7,\), expected \(8,\)"):
        rooftile.add_rms_norm(x, x, x[0, :7])
