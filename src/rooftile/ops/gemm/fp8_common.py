"""What is special to `fp8_linear`: its scales, and what its configurations must fulfil."""

from __future__ import annotations

from typing import Literal

from rooftile import library
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem
from rooftile.quantize import BLOCK

XScale = Literal["tensor", "row", "group"]
WScale = Literal["tensor", "row", "block"]


def scale_strides(o: Operands) -> tuple[int, int, int, int]:
    """Of x's scales along its rows and the sum, and of the weight's along its rows and the sum."""
    x = (0, 0) if o.x_scale is None or o.x_kind == "tensor" else o.x_scale.stride()
    w = (0, 0) if o.weight_scale is None or o.w_kind == "tensor" else o.weight_scale.stride()
    return (*x, *w)  # type: ignore[return-value]


def adds_apart(c: GemmConfig) -> bool:
    """Whether `parts.multiply_add` makes a sum of its own every step: where that takes 64 registers of a thread."""
    return c.block_k <= 128 and c.block_m * c.block_n <= 2048 * c.num_warps


def can_implement(p: Problem, c: GemmConfig) -> str | None:
    """Why no kernel of fp8_linear can compute p as c says."""
    if p.scaled_steps and BLOCK % c.block_k:
        return f"block_k is {c.block_k}, expected at most {BLOCK}, the elements of the sum that share a scale"
    if c.block_k < 32:
        return f"block_k is {c.block_k}, expected at least 32"
    steps = library.cdiv(p.k, c.block_k)
    if c.split_k > max(1, steps):
        return f"split_k is {c.split_k}, expected at most the {steps} steps of {c.block_k} that the sum has"
    return None
