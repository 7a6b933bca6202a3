"""Matrix products, alone and with what stands around them in a model.

    matmul          out = a @ b                             any batch dimensions
    linear          out = act(x @ weight^T + bias) + residual
    gated_linear    out = act(g) * u,   [g | u] = x @ weight^T + bias

Sums are float32 and in a fixed order: the result is the same on every run. Bias, activation, gate and residual are
taken of the float32 sums in registers, and what follows is rounded once. Bytes: each operand read once and the output
written, where the tiles that are walked one after another fit the L2; up to a few hundred rows the weight is nearly all
of it, and beyond, 2 M N K operations decide.

Both gradients are products of the same kernels: dx = dy @ weight, dweight = dy^T @ x.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rooftile.ops.matmul.common import autocast, encoded
from rooftile.ops.matmul.config import MatmulConfig, Precision
from rooftile.ops.matmul.layers import gated_linear_op, linear_op
from rooftile.ops.matmul.products import matmul_op

__all__ = ["Activation", "MatmulConfig", "gated_linear", "linear", "matmul"]

Activation = Literal["silu", "gelu", "gelu_tanh"]


def matmul(a: Tensor, b: Tensor, *, precision: Precision = "ieee", config: MatmulConfig | None = None) -> Tensor:
    """`a @ b` with float32 sums, rounded once.

    Args:
        a: `(..., M, K)`, float32, float16 or bfloat16, or a vector `(K,)`. Any strides; copied only where its batch
            dimensions, as they are broadcast, can't be taken as one.
        b: `(..., K, N)` of a's dtype, or a vector `(K,)`; batch dimensions broadcast, and vectors are taken, as in
            `torch.matmul`. One b for all batches multiplies all their rows at once.
        precision: of float32 products. `"ieee"`: exact, on the ordinary units; `"tf32"`: operands with 10 bits of
            fraction, on the matrix unit. 16-bit types have exact products always.
        config: how the kernel is launched, in place of the choice that sizes and GPU make; gradients choose their own.

    Returns:
        the product in a's dtype, contiguous. Under `torch.autocast` a and b are cast to its dtype first, as
        `torch.matmul`'s are.

    Raises:
        ValueError: shapes don't multiply or broadcast, the configuration can't be launched (the field and the reason
            are named), a device is the CPU without the interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of the three.
    """
    a, b = autocast(a, b)  # type: ignore[assignment]
    return matmul_op(a, b, precision, encoded("matmul", config))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    precision: Precision = "ieee",
    config: MatmulConfig | None = None,
) -> Tensor:
    """`act(x @ weight^T + bias) + residual` in one kernel, with float32 sums, rounded once.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one.
        weight: `(N, K)` of x's dtype, as `torch.nn.Linear` keeps it. Any strides.
        bias: `(N,)`, of x's dtype or float32.
        activation: `"silu"`, `"gelu"` or `"gelu_tanh"`. Where gradients will be asked for, its argument is rounded to
            x's dtype, kept for the backward, and the activation computed by a second kernel.
        residual: `(..., N)` of x's dtype, added last.
        precision, config: as in `matmul`.

    Returns:
        `(..., N)` in x's dtype, contiguous. Under `torch.autocast` all tensors are cast to its dtype first, as those of
        `torch.nn.functional.linear` are.

    Raises:
        ValueError: the weight, bias or residual has not the shape above, activation or precision is another word, the
            configuration can't be launched (the field and the reason are named), a device is the CPU without the
            interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of the three.
    """
    x, weight, bias, residual = autocast(x, weight, bias, residual)  # type: ignore[assignment]
    keep = activation is not None and _will_differentiate(x, weight, bias)
    return linear_op(x, weight, bias, residual, activation or "", precision, encoded("linear", config), keep)[0]


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "silu",
    config: MatmulConfig | None = None,
) -> Tensor:
    """`act(g) * u` of `[g | u] = x @ weight^T + bias`, in one kernel: the 2N columns of g and u are never written.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16.
        weight: `(2N, K)` of x's dtype: the rows of the gate first, then those of up, as
            `torch.cat((gate_proj.weight, up_proj.weight))`.
        bias: `(2N,)`, of x's dtype or float32.
        activation: the gate's; where gradients will be asked for, g and u are rounded to x's dtype and kept.
        config: as in `matmul`; `block_n` counts columns of the output, for each of which there are two sums.

    Returns:
        `(..., N)` in x's dtype, contiguous. Under `torch.autocast` as `linear`.

    Raises:
        As `linear`; a weight of an odd number of rows is a ValueError.
    """
    x, weight, bias = autocast(x, weight, bias)  # type: ignore[assignment]
    keep = _will_differentiate(x, weight, bias)
    return gated_linear_op(x, weight, bias, activation, encoded("gated_linear", config), keep)[0]


def _will_differentiate(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
