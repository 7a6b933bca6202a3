"""Norm and product, plain or gated, with weights of 8 bits and a scale for each of their rows, or of 4 bits and a scale
for each group of a row; for inference.

    z = (rms_norm(x) @ weight^T) * weight_scale + bias,   y = z, or act(g) * u of z = [g | u]

One row of x is one kernel, which multiplies by x as it is, or of int8 and int4 where it is faster by 22 bits of x on
the integer matrix unit (`weight_only/digits.py`). More rows are the norm and a product: of int8 and int4 the
weight-only one; of float8_e4m3fn, where the matrix unit multiplies it as it is, the norm gives x in it too, by row.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime
from rooftile.ops.gemm import adapters
from rooftile.ops.gemm import gemv as row
from rooftile.ops.gemm import weight_only_choose as choose
from rooftile.ops.gemm import weight_only_config as configs
from rooftile.ops.gemm.common import refuse_symbols
from rooftile.ops.gemm.config import Operands
from rooftile.ops.gemm.fp8_linear import _launch as fp8_product
from rooftile.ops.gemm.linear import _activated as activated
from rooftile.ops.gemm.norm_choose import chosen_quantized
from rooftile.ops.gemm.norm_layers import check
from rooftile.ops.gemm.weight_only import _aligned as is_aligned
from rooftile.ops.gemm.weight_only import _launch as weight_only_product
from rooftile.ops.gemm.weight_only_config import WeightOnlyConfig
from rooftile.ops.rms_norm import forward as norm
from rooftile.primitives.activations import check_activation

_PRODUCTS = {torch.int8: "int8_linear", torch.uint8: "int4_linear"}


def _fake(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, eps: float,
    offset: float, activation: str, config: str,
) -> Tensor:  # fmt: skip
    if "gated" in op:
        check_activation(op, activation)
    shape = check(op, x, norm_weight, weight, bias, eps, offset, gated=activation != "", scale=scale)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _launch(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, eps: float,
    offset: float, activation: str, config: str,
) -> Tensor:  # fmt: skip
    refuse_symbols(*x.shape, *weight.shape)
    out = _fake(op, x, norm_weight, weight, scale, bias, eps, offset, activation, config)
    if out.numel() == 0:
        return out
    c = chosen_quantized(op, x, weight, activation != "", config)
    if c is not None:
        if isinstance(x, FunctionalTensor):
            raise launching.Untraceable("a kernel of Gluon, an early launch, or counters")
        o = Operands(
            library.as_rows(x), weight, out.view(1, -1), None if bias is None else bias.contiguous(),
            norm_weight=norm_weight.contiguous(), weight_scale=scale.contiguous(), eps=eps, offset=offset,
            activation=activation, gated=activation != "",
        )  # fmt: skip
        by_digits = None if config else digits_config(x, weight, scale, activation != "")
        if by_digits is not None:
            kernel = configs.module("gemv_imma")
            assert kernel is not None, "it is not chosen without"
            adapters.start(kernel.launch, o, by_digits)
        else:
            if weight.dtype == torch.uint8:
                c = dataclasses.replace(c, block_k=2 * c.block_k)
            adapters.start(row.launch, o, c)
        return out
    z = _several(x, norm_weight, weight, scale, bias, eps, offset)
    return activated(z, activation, True) if activation else z


def digits_config(x: Tensor, weight: Tensor, scale: Tensor, gated: bool = False) -> WeightOnlyConfig | None:
    """How kernel "gemv_imma" takes one row of x, where it is the fastest; `scale` is that of the weight."""
    if weight.dtype not in _PRODUCTS or weight.stride(1) != 1:
        return None
    k = x.shape[-1]
    group = k // scale.shape[1] if weight.dtype == torch.uint8 else 0
    return choose.digits(weight.shape[0], k, group, x.dtype, runtime.target(x.device), is_aligned(weight), gated)


def _several(
    x: Tensor, norm_weight: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, eps: float, offset: float
) -> Tensor:
    """Of more rows: the norm, then the product."""
    if weight.dtype in _PRODUCTS:
        normed, _ = norm.launch("rms_norm", x, None, norm_weight, eps, offset, "none")
        return weight_only_product(_PRODUCTS[weight.dtype], normed, weight, scale, bias, None, "")
    mode = (eps, offset, "none", "float8_e4m3fn", "row", 128)
    y, _, x_scale = norm.launch_quantized(x, None, norm_weight, None, *mode)
    dtype = str(x.dtype).removeprefix("torch.")
    return fp8_product(y, weight, scale.reshape(-1, 1), x_scale, bias, None, dtype, False, "")


def _define(op: str, bits: int) -> Any:
    return library.define(
        f"{op}_{bits}bit(Tensor x, Tensor norm_weight, Tensor weight, Tensor weight_scale, Tensor? bias, float eps, "
        "float offset, str activation, str config) -> Tensor",
        launch=functools.partial(_launch, op),
        fake=functools.partial(_fake, op),
    )


_OPS = {(op, bits): _define(op, bits) for op in ("rms_norm_linear", "rms_norm_gated_linear") for bits in (8, 4)}


def linear_op(x: Tensor, norm_weight: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The op of that weight's bits."""
    return _OPS["rms_norm_linear", _bits(weight)](x, norm_weight, weight, *rest)


def gated_op(x: Tensor, norm_weight: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The op of that weight's bits."""
    return _OPS["rms_norm_gated_linear", _bits(weight)](x, norm_weight, weight, *rest)


def _bits(weight: Tensor) -> int:
    return 4 if isinstance(weight, Tensor) and weight.dtype == torch.uint8 else 8
