"""The product of one row of x and a weight of 8 or 4 bits, by the kernel of the plain product: multiply and sum."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.ops.gemm import gemv as product
from rooftile.ops.gemm.weight_only_config import WeightOnlyConfig, as_product


def launch(
    x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, c: WeightOnlyConfig
) -> None:
    """Launch it: x (1, K), w int8 or float8_e4m3fn (N, K), or uint8 (N, K/2), out and residual (1, N); all but w are
    contiguous."""
    group = x.shape[1] // scale.shape[1] if w.dtype == torch.uint8 else 0
    product.launch(x, w, out, bias, residual, "", False, "ieee", as_product(c, group), scale, c.prefetch)
