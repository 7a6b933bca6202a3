"""Quantized results, `y_q = round(y / scale)`: the scale is given, or `max(|y|) / largest` of a row or of a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def quantize(
    y: Tensor, dtype: str = "float8_e4m3fn", per: str = "row", scale: Tensor | None = None, group_size: int = 128
) -> tuple[Tensor, Tensor]:
    """y_q and its scales, computed in y's dtype: of a float64 y the exact ones."""
    columns = y.shape[-1]
    if scale is not None:
        return nearest(y / scale, dtype), scale
    span = max(1, columns) if per == "row" else group_size
    groups = torch.nn.functional.pad(y, (0, -columns % span)).unflatten(-1, (-1, span))
    scale = (groups.abs().amax(-1) / LARGEST[dtype]).clamp(min=2.0**-126)
    return nearest(y / scale.repeat_interleave(span, -1)[..., :columns], dtype), scale


def nearest(v: Tensor, dtype: str) -> Tensor:
    """The value of that dtype nearest to v: ties to even, saturating."""
    v = v.clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        return v.nan_to_num(nan=0.0).round().to(torch.int8)
    info = torch.finfo(getattr(torch, dtype))
    # Neighbours are eps apart between 1 and 2, and below the smallest normal number no closer than there.
    exponent = (torch.frexp(v).exponent - 1).clamp(min=int(math.log2(info.smallest_normal)))
    step = torch.ldexp(torch.full_like(v, info.eps), exponent)
    return ((v / step).round() * step).to(getattr(torch, dtype))


def eager(
    y: Tensor, dtype: str = "float8_e4m3fn", per: str = "row", scale: Tensor | None = None, group_size: int = 128
) -> tuple[Tensor, Tensor]:
    """As code does that quantizes before a GEMM: from the result in the model's dtype, in float32."""
    y, columns, largest = y.float(), y.shape[-1], LARGEST[dtype]
    if scale is not None:
        v = y / scale
    else:
        span = max(1, columns) if per == "row" else group_size
        groups = torch.nn.functional.pad(y, (0, -columns % span)).unflatten(-1, (-1, span))
        scales = (groups.abs().amax(-1, keepdim=True) / largest).clamp(min=2.0**-126)
        v, scale = (groups / scales).flatten(-2)[..., :columns], scales.squeeze(-1)
    v = v.clamp(-largest, largest)
    return (v.round() if dtype == "int8" else v).to(getattr(torch, dtype)), scale


def after(op: Callable[..., Any], quantize: Callable[..., tuple[Tensor, Tensor]] = quantize) -> Callable[..., Any]:
    """The op with its first result quantized: `(y, ...)` becomes `(y_q, ..., scale)`."""

    def run(
        *args: Tensor,
        scale: Tensor | None = None,
        dtype: str = "float8_e4m3fn",
        per: str = "row",
        group_size: int = 128,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        results = op(*args, **options)
        y, *rest = results if isinstance(results, tuple) else (results,)
        y, scale = quantize(y, dtype, per, scale, group_size)
        return (y, *rest, scale)

    return run
