"""The residual of products with quantised weights: added in float32, of any strides and leading dimensions."""

import functools

import pytest
import torch
from helpers import BF16, assert_same

from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.ops.gemm.weight_only import int4_linear, int8_linear, quantize_int4, quantize_int8
from rooftile.ops.quantize_tensor import quantize_tensor
from rooftile.quantize import Quantize


def fp8(k, n, device):
    weight, scale = quantize_tensor(torch.randn(n, k, device=device), Quantize(per="row"))
    return functools.partial(fp8_linear, weight=weight, weight_scale=scale)


def int8(k, n, device):
    weight, scale = quantize_int8(torch.randn(n, k, device=device))
    return functools.partial(int8_linear, weight=weight, weight_scale=scale)


def int4(k, n, device):
    packed, scale = quantize_int4(torch.randn(n, k, device=device), 32)
    return functools.partial(int4_linear, weight=packed, weight_scale=scale)


every_product = pytest.mark.parametrize("product", [fp8, int8, int4], ids=lambda product: product.__name__)


@every_product
def test_it_is_added_before_the_sum_is_rounded(product, device):
    op = product(64, 16, device)
    x = torch.randn(6, 64, device=device).to(BF16)
    sums = op(x.float())
    # What a rounding before would take from the sum is all that is left of it.
    residual = -sums.to(BF16)
    left = op(x, residual=residual).float()
    assert left.any()
    torch.testing.assert_close(left, sums + residual.float(), rtol=1e-2, atol=1e-4)


@every_product
def test_its_strides_and_leading_dimensions_do_not_matter(product, device):
    op = product(64, 16, device)
    x, residual = torch.randn(2, 3, 64, device=device), torch.randn(2, 3, 16, device=device)
    bias = torch.randn(16, device=device)
    out = op(x, bias=bias, residual=residual)
    assert_same((out,), (op(x, bias=bias) + residual,))
    assert_same((op(x, bias=bias, residual=residual.mT.contiguous().mT),), (out,))
    torch.testing.assert_close(op(x[0, 1], bias=bias, residual=residual[0, 1]), out[0, 1])


@every_product
def test_where_there_is_nothing_to_sum_it_is_the_result(product, device):
    op = product(64, 16, device)
    per_column = ("weight", "weight_scale") if product is int4 else ("weight",)
    empty = {name: t[:, :0] for name, t in op.keywords.items() if name in per_column}
    x, residual, bias = (torch.randn(*shape, device=device) for shape in ((3, 0), (3, 16), (16,)))
    assert torch.equal(op(x, **empty, residual=residual), residual)
    assert torch.equal(op(x, **empty, bias=bias, residual=residual), bias + residual)


@every_product
def test_what_does_not_fit_is_named(product, device):
    op = product(64, 16, device)
    x, residual = torch.randn(2, 64, device=device), torch.randn(2, 16, device=device)
    name = op.func.__name__
    for wrong in (residual[:, :15], residual[0], residual[:1], residual[None]):
        with pytest.raises(ValueError, match=rf"{name}: residual has shape .*, expected \(2, 16\) to match the result"):
            op(x, residual=wrong)
    with pytest.raises(TypeError, match=f"{name}: residual has dtype torch.bfloat16, expected torch.float32 to match"):
        op(x, residual=residual.to(BF16))
    with pytest.raises(ValueError, match=f"{name}: residual requires grad"):
        op(x, residual=residual.requires_grad_())
