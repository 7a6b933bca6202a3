"""Softmax in one pass over a row: maxima and sums of exponentials that grow with each block.

Each lane, the few elements that a thread loads at once, has a maximum and a sum of exponentials to its base, which is
rescaled when the maximum grows (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).
"""

from __future__ import annotations

import torch

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)  # the first maximum: finite, as -inf - -inf is NaN


@triton.jit
def extend(tops, sums, z, FACTOR: tl.constexpr):
    """The running maxima and sums, updated with one more block; exponentials are powers of two of FACTOR * z."""
    new = tl.maximum(tops, tl.max(z, axis=1, keep_dims=True))
    sums = sums * tl.exp2((tops - new) * FACTOR) + tl.sum(tl.exp2((z - new) * FACTOR), axis=1, keep_dims=True)
    return new, sums
