"""The mean of losses over the tokens that count, each with the weight of its class and its own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_rows", "n_cols", "ignore_index"])
def _mean_kernel(
    target_ptr,
    weight_ptr,
    token_weight_ptr,
    loss_ptr,
    out_ptr,
    n_rows,
    n_cols,
    ignore_index,
    HAS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the losses, or 1 without them, over the weights of all rows that count; 0 where those add up to 0.

    One program adds them, always in the same order.
    """
    acc = tl.zeros((BLOCK,), tl.float32)
    losses = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n_rows, BLOCK, num_stages=1):
        rows = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + rows, mask=rows < n_rows, other=0)
        counts = (rows < n_rows) & (target != ignore_index)
        weight = tl.where(counts, 1.0, 0.0)
        if HAS_WEIGHT:
            inside = counts & (target >= 0) & (target < n_cols)
            own = tl.load(weight_ptr + target, mask=inside, other=float("nan")).to(tl.float32)
            weight = tl.where(counts, own, 0.0)
        if HAS_TOKEN_WEIGHT:
            weight *= tl.load(token_weight_ptr + rows, mask=counts, other=0.0).to(tl.float32)
        acc += weight
        if loss_ptr is not None:
            losses += tl.load(loss_ptr + rows, mask=rows < n_rows, other=0.0)
    total = tl.sum(acc, axis=0)
    mean = 1.0 / total
    if loss_ptr is not None:
        mean *= tl.sum(losses, axis=0)
    tl.store(out_ptr, tl.where(total == 0.0, 0.0, mean))


@functools.cache
def _launcher(dtypes: tuple[torch.dtype | None, ...], of_losses: bool) -> launching.KernelLauncher:
    constants = {"HAS_WEIGHT": dtypes[1] is not None, "HAS_TOKEN_WEIGHT": dtypes[2] is not None, "BLOCK": 2048}
    return launching.KernelLauncher(_mean_kernel, constants, num_warps=16)


def bind_mean(
    target: Tensor,
    weight: Tensor | None,
    token_weights: Tensor | None,
    losses: bool,
    n_cols: int,
    ignore_index: int,
) -> Callable[..., None]:
    """The launch over those tensors, the losses of the rows or None, and a float32 number.

    The number becomes the mean of the losses, or, without them, one over what "mean" divides by.
    """
    copies: library.Copies = {}
    for place, tensor in enumerate((target, weight, token_weights)):
        library.contiguous_of(tensor, copies, place)
    dtypes = tuple(None if t is None else t.dtype for t in (target, weight, token_weights))
    launcher = _launcher(dtypes, losses)
    start = launching.bind(launcher, 1, numbers=(target.numel(), n_cols, ignore_index))
    return library.copying(start, copies)
