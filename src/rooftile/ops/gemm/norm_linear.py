"""RMSNorm and the linear layer behind it, plain or gated.

    rms_norm_linear          y = rms_norm(x) @ weight^T + bias
    rms_norm_gated_linear    y = act(g) * u,   [g | u] = rms_norm(x) @ weight^T + bias

    rms_norm(x) = x * rstd * (norm_weight + offset),   rstd = 1 / sqrt(mean(x^2) + eps)
    (rms_norm(x) @ weight^T)[m, n] = rstd[m] * (sum over k of x[m, k] * (norm_weight[k] + offset) * weight[n, k])

rstd is one number a row, so it can wait for the end of the sums. Up to 32 rows one kernel adds up the squares beside
the products and reads x once; with more rows, where every tile would scale the same x again, the norm is a kernel of
its own and the product follows.

Elements that move, of x (M, K) and weight (N, K):

    two kernels        3MK + K + NK + MN    the norm reads x and writes the normalised x, the product reads that
    one, x read twice  2MK + K + NK + MN    first for the mean of squares, then for the product
    one, as here        MK + K + NK + MN

from memory; gated, of a weight (2N, K), 2NK in place of NK. Every program of the one kernel reads the parts of x and of
the norm's weight that it needs, out of the L2: MK + K for each tile of the weight's rows, 64 of them perhaps, beside
their 64 K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import library
from rooftile.ops.gemm import norm_quantized as quantized
from rooftile.ops.gemm.common import _AUTOCAST as AUTOCAST
from rooftile.ops.gemm.common import autocast, encoded
from rooftile.ops.gemm.config import Activation, MatmulConfig
from rooftile.ops.gemm.linear import gated_linear, linear, will_differentiate
from rooftile.ops.gemm.norm_gated import gated_op
from rooftile.ops.gemm.norm_layers import linear_op
from rooftile.ops.rms_norm import rms_norm

__all__ = ["rms_norm_gated_linear", "rms_norm_linear"]


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    config: MatmulConfig | None = None,
) -> Tensor:
    """`rms_norm(x) @ weight^T + bias`, with `rms_norm(x) = x / sqrt(mean(x^2) + eps) * (norm_weight + offset)`.

    One kernel where x has few rows, as in decoding; else the norm, then the product.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        norm_weight: `(K,)`, of any of these dtypes.
        weight: `(N, K)` of x's dtype, as `torch.nn.Linear` keeps it. Any strides.
        bias: `(N,)`, of x's dtype or float32.
        weight_scale: float32, `(N,)` or `(N, 1)`, of a weight in int8 or float8_e4m3fn, which `quantize_int8` and
            `quantize_tensor` give: each row's sum is multiplied by its own. Or `(N, K / group)`, float32 or of x's
            dtype, of a weight that `quantize_int4` packed, uint8 `(N, K / 2)`. For inference. One row of x is one
            kernel and is not rounded, or in int8 and int4 as `int8_linear` and `int4_linear` say; with more rows norm
            and product are two, and what a weight in float8 multiplies is float8, too, as in `fp8_linear`. Under
            `torch.autocast` nothing is cast.
        eps: added to the mean of squares.
        offset: added to norm_weight in float32; 1.0 for Gemma.
        config: how the kernel is launched, in place of the choice that sizes and GPU make. `"gemv"`,
        `"gemv_persistent"` and
            `"skinny"` are the one kernel, for one row, for up to two, and for up to block_m; `"tiled"` and `"hopper"`
            the product behind the norm. For weights of 8 and 4 bits `"gemv"` alone; without it
            int8 and int4 may have a kernel on the integer matrix unit, which no `MatmulConfig` names.

    Returns:
        `(..., N)` in x's dtype, contiguous. Sums are float32. x is rounded once between norm and product: by the
        one
        kernel before rstd scales it (not at all by `"gemv"` and `"gemv_persistent"`), else after. Under
        `torch.autocast` the norm is taken of x as it is, and what is multiplied is cast.

    Raises:
        ValueError: norm_weight, weight, bias or weight_scale has not the shape above, the configuration can't be
            launched (the field and the reason are named), an argument requires grad beside a weight_scale, a device is
            the CPU without the interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of those above.
    """
    if weight_scale is not None:
        words = "", encoded("rms_norm_linear", config)
        return quantized.linear_op(x, norm_weight, weight, weight_scale, bias, eps, offset, *words)
    wanted = _autocast_dtype(x)
    if wanted is not None:
        if x.dtype != wanted:  # what is cast lies between norm and product
            normed = _normed("rms_norm_linear", x, norm_weight, weight, bias, eps, offset)
            return linear(normed, weight, bias, config=config)
        weight, bias = autocast(weight, bias)  # type: ignore[assignment]
    return linear_op(x, norm_weight, weight, bias, eps, offset, encoded("rms_norm_linear", config))


def rms_norm_gated_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    weight_scale: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: Activation = "silu",
    config: MatmulConfig | None = None,
) -> Tensor:
    """`act(g) * u` of `[g | u] = rms_norm(x) @ weight^T + bias`, with `rms_norm` as in `rms_norm_linear`.

    One kernel where x has few rows, as in decoding: neither the normalised x nor the 2N columns of g and u are written.
    Else the norm, then `gated_linear`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        norm_weight: `(K,)`, of any of these dtypes.
        weight: `(2N, K)` of x's dtype: the rows of the gate first, then those of up, as
            `torch.cat((gate_proj.weight, up_proj.weight))`. Any strides.
        bias: `(2N,)`, of x's dtype or float32.
        weight_scale: `(2N,)` or `(2N, 1)` of a weight of 8 bits, `(2N, K / group)` of one of 4, as in
            `rms_norm_linear`; with more rows of x than one, norm, product and gate are a kernel each.
        eps: added to the mean of squares.
        offset: added to norm_weight in float32; 1.0 for Gemma.
        activation: the gate's, `"silu"`, `"gelu"` or `"gelu_tanh"`; where gradients will be asked for, g and u are
            rounded to x's dtype and kept.
        config: how the kernel is launched, as in `rms_norm_linear`; `block_n` counts columns of the output, for each of
            which there are two sums.


    Returns:
        `(..., N)` in x's dtype, contiguous. Sums are float32. x is rounded once between norm and product: by the one
        kernel before rstd scales it (not at all by `"gemv"` and `"gemv_persistent"`), else after. Under
        `torch.autocast` as `rms_norm_linear`.

    Raises:
        As `rms_norm_linear`; a weight of an odd number of rows, and an activation of another name, are a ValueError.
    """
    if weight_scale is not None:
        words = activation, encoded("rms_norm_gated_linear", config)
        return quantized.gated_op(x, norm_weight, weight, weight_scale, bias, eps, offset, *words)
    wanted = _autocast_dtype(x)
    if wanted is not None:
        if x.dtype != wanted:  # what is cast lies between norm and product
            normed = _normed("rms_norm_gated_linear", x, norm_weight, weight, bias, eps, offset)
            return gated_linear(normed, weight, bias, activation=activation, config=config)
        weight, bias = autocast(weight, bias)  # type: ignore[assignment]
    keep = will_differentiate(x, norm_weight, weight, bias)
    words = activation, encoded("rms_norm_gated_linear", config)
    return gated_op(x, norm_weight, weight, bias, eps, offset, *words, keep)[0]


def _normed(
    op: str, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> Tensor:
    """The norm as an op of its own. What is none of the tensors is named as the caller's, before that one runs."""
    library.check_tensors(op, norm_weight=norm_weight, weight=weight, **({} if bias is None else {"bias": bias}))
    return rms_norm(x, norm_weight, eps=eps, offset=offset, rounding="none")


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast wants of products on x's device; None where it is off."""
    kind = x.device.type if isinstance(x, Tensor) else ""  # of what is none the op says so
    return torch.get_autocast_dtype(kind) if kind in AUTOCAST and torch.is_autocast_enabled(kind) else None
