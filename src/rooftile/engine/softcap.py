"""The soft cap of the logits, as in Gemma 2: `cap * tanh(x / cap)`, in place.

One read and one write of the logits, which are small beside the weights of lm_head.
"""

from __future__ import annotations

import functools

from torch import Tensor

from rooftile import launching, library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.engine.modes import on

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.language.extra import libdevice  # isort: skip


@triton.jit(do_not_specialize=["n"])
def _softcap_kernel(x_ptr, n, CAP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
    tl.store(x_ptr + at, CAP * libdevice.tanh(x / CAP), mask=at < n)


@functools.cache
def _plan(cap: float) -> launching.KernelLauncher:
    return launching.KernelLauncher(_softcap_kernel, {"CAP": cap, "BLOCK": 1024}, num_warps=4)


def softcap_(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, in float32, written over x, which is contiguous and is returned."""
    n = x.numel()
    with on(x.device):
        launching.launch(_plan(cap), library.cdiv(n, 1024), (x,), (), (n,))
    return x
