"""Launches of kernels over the rows of a matrix, which the norms, softmax, gated activations and quantization share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime
from rooftile.primitives.cta_exchange import resident


@dataclasses.dataclass(frozen=True, eq=False)  # a cache key on every call: hashed by identity
class RowConfig:
    """A launch. Each kernel uses the fields that its constants name.

    Attributes:
        kernel: "tile": a program holds whole rows, or tiles of them; "loop": it loops over the blocks of one row;
            "split": several programs share a row.
        block_n: columns of a tile or block.
        num_warps: warps of a program.
        rows: rows of a tile.
        held: of a loop: blocks of its row that a program holds in registers.
        stages: pipeline stages of the loop over rows.
        per_sm: resident programs on each SM, of a persistent grid.
        max_registers: registers of a thread at most, so that those programs fit.
    """

    kernel: str
    block_n: int
    num_warps: int
    rows: int = 1
    held: int = 0
    stages: int = 1
    per_sm: int = 1
    max_registers: int | None = None


def row_length(x: Tensor) -> int:
    """The length of a row, which decides its kernel.

    If it is symbolic, the op stays whole in the graph and chooses on each call: a traced launch would serve one length.
    """
    n_cols = x.shape[-1]
    if isinstance(n_cols, torch.SymInt):
        raise launching.Untraceable("rows of a symbolic length")
    return n_cols


def row_launcher(
    kernel: Any, c: RowConfig, splits: int = 1, *, rounds_products: bool = False, **constants: Any
) -> launching.KernelLauncher:
    """The kernel with those constants and the configuration's, of which it takes those that it has parameters for.

    A row has `splits` programs. With `rounds_products` no product is fused with the addition that follows it: then
    `x * scale - maximum(x * scale)` is 0 at the maximum, where a fused one leaves the rounding error of the product,
    whose exponential is infinite if `scale` is large.
    """
    known = {
        "ROWS": c.rows,
        "BLOCK_N": c.block_n,
        "HELD": c.held,
        "STAGES": c.stages,
        "SPLITS": splits,
        "BLOCK_S": library.power_of_two(splits),
        **constants,
    }
    options = resident(c.max_registers, cooperative=c.kernel == "split")
    if rounds_products:
        options = {**options, "enable_fp_fusion": False}
    taken = {name: known[name] for name in kernel.arg_names if name.isupper()}
    return launching.KernelLauncher(kernel, taken, num_warps=c.num_warps, **options)


def stages_that_fit(tensors: int, tile_bytes: int, per_sm: int, target: runtime.Target) -> int:
    """Three stages keep two tiles of each tensor in shared memory; fewer where they do not fit."""
    room = target.shared_memory // per_sm - 2048
    return 1 + min(2, room // (tensors * tile_bytes))
