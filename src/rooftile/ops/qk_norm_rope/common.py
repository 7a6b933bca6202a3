"""What the forward and the backward kernels share: the checks of the arguments, the weight, what a style means."""

from __future__ import annotations

from torch import Tensor

from rooftile import library
from rooftile.ops import rope
from rooftile.primitives.rotation import load_pairs, pair_columns

import triton  # isort: skip
import triton.language as tl  # isort: skip

LONGEST = 512  # elements of a head, which a program holds whole


@triton.jit
def load_weight(
    weight_ptr,
    OFFSET: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """weight + offset as the tiles that a head comes in: both of the pairs, and the rest. Without a weight, 1."""
    a = tl.full((1, 1, 1), 1.0, tl.float32)
    b = a
    rest = a
    if HAS_WEIGHT:
        columns = pair_columns(tl.full((1, 1, 1), True, tl.int1), R, BLOCK_R)
        a, b = load_pairs(weight_ptr, columns, R, NEIGHBOURS, 1, 1, BLOCK_R, ONCE=False)
        a += OFFSET
        b += OFFSET
        if R < D:
            cols = R + tl.arange(0, BLOCK_REST)[None, None, :]
            rest = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32) + OFFSET
    return a, b, rest


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    offset: float,
    style: str,
    layout: str,
) -> None:
    rope.check(op, q, k, cos, sin, position_ids, style, layout)
    library.check_floating(op, q_weight=q_weight, k_weight=k_weight)
    for name, number in (("eps", eps), ("offset", offset)):
        if not isinstance(number, (float, int)):
            raise TypeError(f"{op}: {name} is a {type(number).__name__}, expected a number")
    head_dim = q.shape[3]
    if head_dim > LONGEST:
        raise ValueError(f"{op}: q has a head_dim of {head_dim}, expected at most {LONGEST}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and tuple(weight.shape) != (head_dim,):
            raise ValueError(
                f"{op}: {name} has shape {tuple(weight.shape)}, expected ({head_dim},) to match the head_dim"
            )


def sizes(rotary: int, head_dim: int) -> dict[str, int]:
    """The blocks that a head is held in."""
    return {
        "BLOCK_R": library.power_of_two(rotary),
        "BLOCK_REST": library.power_of_two(max(1, head_dim - rotary)),
    }


def pairing(style: str) -> dict[str, int]:
    """Where a style has the angles, and whether its pairs are neighbours in x and in y."""
    return {
        "ANGLE_STEP": 2 if style == "interleaved" else 1,
        "PAIRS_X": style != "half",
        "PAIRS_Y": style == "interleaved",
    }
