"""A tensor in 8 bits: a scale for a row, a group of columns, a block of 128 x 128, or for all of it."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.reference import quantize as rounding

BLOCK = 128


def quantize_tensor(
    x: Tensor, *, scale: Tensor | None = None, dtype: str = "float8_e4m3fn", per: str = "row", group_size: int = 128
) -> tuple[Tensor, Tensor]:
    """q and its scales, computed in x's dtype: of a float64 x the exact ones."""
    if scale is None and (per in ("tensor", "block") or x.numel() == 0):
        scale, each = _scales(x, rounding.LARGEST[dtype], per, group_size)
        return rounding.nearest(x / each, dtype), scale
    return rounding.quantize(x, dtype, per, scale, group_size)


def quantize_tensor_eager(
    x: Tensor, *, scale: Tensor | None = None, dtype: str = "float8_e4m3fn", per: str = "row", group_size: int = 128
) -> tuple[Tensor, Tensor]:
    """As code does that quantizes before a GEMM: in float32."""
    if scale is None and (per in ("tensor", "block") or x.numel() == 0):
        largest = rounding.LARGEST[dtype]
        scale, each = _scales(x.float(), largest, per, group_size)
        v = (x.float() / each).clamp(-largest, largest)
        return (v.round() if dtype == "int8" else v).to(getattr(torch, dtype)), scale
    return rounding.eager(x, dtype, per, scale, group_size)


def _scales(x: Tensor, largest: float, per: str, group_size: int) -> tuple[Tensor, Tensor]:
    """The scales, and that of each element. What has no elements has a scale all the same."""
    if x.numel() == 0:
        leading, columns = tuple(x.shape[:-1]), x.shape[-1]
        shape: tuple[int, ...] = (1,)
        if per == "block":
            shape = tuple(-(-size // BLOCK) for size in x.shape)
        elif per != "tensor":
            shape = (*leading, 1 if per == "row" else -(-columns // group_size))
        return x.new_full(shape, 2.0**-126), torch.ones_like(x)
    if per == "tensor":
        scale = (x.abs().amax() / largest).clamp(min=2.0**-126).reshape(1)
        return scale, scale
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax((1, 3)) / largest).clamp(min=2.0**-126)
    return scale, spread(scale, x)


def spread(scale: Tensor, x: Tensor) -> Tensor:
    """The scale of each element of a matrix that has one for each block."""
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: x.shape[0], : x.shape[1]]
