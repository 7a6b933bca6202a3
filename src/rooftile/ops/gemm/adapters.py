"""Calls of kernels whose `launch` does not take `Operands` yet. Goes when the last one does."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from rooftile.ops.gemm.config import Operands


@functools.cache
def _names(launch: Callable[..., None]) -> tuple[str, ...]:
    return tuple(inspect.signature(launch).parameters)


def start(launch: Callable[..., None], o: Operands, c: Any) -> None:
    """`launch(o, c)`, or what the old signature makes of it."""
    names = _names(launch)
    if names[0] == "o":
        return launch(o, c)
    if "residual" in names and "scale" in names and names.index("scale") == 2:  # of quantized weights
        norm = (o.norm_weight, o.eps, o.offset, o.activation) if "norm_weight" in names else ()
        return launch(o.x, o.w, o.weight_scale, o.bias, o.residual, o.out, c, *norm)
    if names[1] == "norm_weight":
        if o.w.dtype == torch.uint8:  # which counts bytes
            c = dataclasses.replace(c, block_k=c.block_k // 2)
        scale = (o.weight_scale,) if "scale" in names else ()
        return launch(o.x, o.norm_weight, o.w, o.out, o.bias, o.eps, o.offset, c, o.activation, *scale)
    return launch(o.x, o.w, o.out, o.bias, o.residual, o.activation, o.gated, o.precision, c)
