"""The scales of int4's groups, as the kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip

_PAIRS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def in_pairs(scale: Tensor) -> tuple[Tensor, str]:
    """Scales of 16 bits as words of two, where a row has an even number of them."""
    if scale.shape[-1] % 2 or scale.dtype not in _PAIRS:
        return scale, ""
    if scale.storage_offset() % 2:
        scale = scale.clone()
    return scale.view(torch.int32), _PAIRS[scale.dtype]


@triton.jit
def of_pair(words, PAIRS: tl.constexpr):
    """The two scales of each word."""
    if PAIRS == "bf16":
        first = (words << 16).to(tl.float32, bitcast=True)
        second = (words & -65536).to(tl.float32, bitcast=True)
    else:
        first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def block_scales(scale_ptr, rows, block, GROUPS: tl.constexpr, PAIRS: tl.constexpr):
    """The scales of a block's two groups."""
    if PAIRS != "":
        return of_pair(tl.load(scale_ptr + rows * (GROUPS // 2) + block), PAIRS)
    else:
        at = scale_ptr + rows * GROUPS + 2 * block
        return tl.load(at).to(tl.float32), tl.load(at + 1).to(tl.float32)
