"""The product of one row of x and a weight of 8 bits, by the kernel of the plain product: multiply and sum."""

from __future__ import annotations

from torch import Tensor

from rooftile.ops.matmul import row as product
from rooftile.ops.weight_only.config import WeightOnlyConfig, as_product


def launch(
    x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, c: WeightOnlyConfig
) -> None:
    """Launch it: x (1, K), w int8 or float8_e4m3fn (N, K), out and residual (1, N); all but w are contiguous."""
    product.launch(x, w, out, bias, residual, "", False, "ieee", as_product(c), scale, c.prefetch)
