"""Calls that only move bytes: a copy and a read, the roofs of memory-bound kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.bench.timer import Call

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def _copy_kernel(source_ptr, target_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=mask), mask=mask)


def triton_copy(source: Tensor, target: Tensor) -> None:
    """Copy a contiguous tensor of 16-bit elements, a vector of 16 bytes for each thread."""
    block = 2048
    _copy_kernel[(triton.cdiv(source.numel(), block),)](source, target, source.numel(), BLOCK=block, num_warps=8)


def torch_copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


# PyTorch's copy is a memcpy node in a captured graph, which runs on a copy engine at some sizes, at 2.7 of an H200's
# 4.2 TB/s; the kernel has no such sizes. The faster of the two is the roof.
COPIES: dict[str, Callable[[Tensor, Tensor], None]] = {"torch": torch_copy, "triton": triton_copy}


def copy_calls(nbytes: int, copies: int, device: torch.device) -> dict[str, list[Call]]:
    """For each way to copy, calls that read and write `nbytes` in all, each between its own tensors."""
    # A multiple of 16, which Triton needs to know that vectors fit.
    half = max(1, -(-nbytes // 64)) * 16
    sources = [torch.randn(half, device=device, dtype=torch.float16) for _ in range(copies)]
    pairs = [(source, torch.empty_like(source)) for source in sources]
    return {name: [functools.partial(copy, *pair) for pair in pairs] for name, copy in COPIES.items()}


@triton.jit
def _read_kernel(x_ptr, sum_ptr, n_elements, BLOCK: tl.constexpr):
    """A strided walk over x, and one sum for each program."""
    acc = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(first, n_elements, step):
        offsets = start + tl.arange(0, BLOCK)
        acc += tl.load(x_ptr + offsets, mask=offsets < n_elements, other=0.0)
    tl.store(sum_ptr + tl.program_id(0), tl.sum(acc))


def read_sum(x: Tensor) -> Tensor:
    """The sum of a contiguous float32 tensor, in one part for each program."""
    target = runtime.target(x.device)
    programs = 8 * target.multiprocessors
    parts = torch.empty(programs, dtype=torch.float32, device=x.device)
    _read_kernel[(programs,)](x, parts, x.numel(), BLOCK=4096, num_warps=8)
    return parts
