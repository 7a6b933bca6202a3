"""The roofs of a GPU: how fast it copies, how fast it reads, and how fast it multiplies matrices."""

from __future__ import annotations

import dataclasses
import functools
import random

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.bench.measure import Effort, copy_calls, interleave
from rooftile.bench.rows import spread
from rooftile.bench.timer import Call, Clock

import triton  # isort: skip
import triton.language as tl  # isort: skip

NBYTES = 4 << 30  # read and written by the copy: a tensor of 2 GiB
PRODUCT = 8192  # rows, columns and depth of the matrix product


@dataclasses.dataclass(frozen=True)
class Roofs:
    """Bytes read plus written by a copy, and bytes read by a reduction, in GB/s; a bf16 matrix product in TFLOP/s."""

    copy_gbs: float
    read_gbs: float
    tflops: float

    def floor_seconds(self, nbytes: int, flops: int, copy_gbs: float | None = None) -> float:
        """The least time for those bytes and operations; `copy_gbs` is that of a copy of the same bytes, if known."""
        return max(nbytes / (1e9 * (copy_gbs or self.copy_gbs)), flops / (1e12 * self.tflops))


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


def _product(a: Tensor, b: Tensor) -> Call:
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def measure_roofs(clock: Clock, device: torch.device, effort: Effort | None = None) -> Roofs:
    """The three roofs, on random data, medians, taken in turns."""
    nbytes = min(NBYTES, clock.free_bytes() // 8)
    with clock.active(), torch.no_grad():
        x = torch.randn(nbytes // 8, device=device)
        a, b = (torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
        blocks = {
            "copy": clock.block(copy_calls(nbytes, 1, device)),
            "torch.sum": clock.block([functools.partial(torch.sum, x.view(1024, -1), 1)])
            if x.numel() % 1024 == 0
            else clock.block([functools.partial(torch.sum, x)]),
            "read": clock.block([functools.partial(read_sum, x)]),
            "product": clock.block([_product(a, b)]),
        }
        seconds: dict[str, float] = {}
        for name, samples in interleave(blocks, clock, effort or Effort(), random.Random(0)):
            if isinstance(samples, Exception):
                raise samples
            seconds[name] = spread(samples)[0]
    read = min(seconds["torch.sum"], seconds["read"])
    return Roofs(
        copy_gbs=nbytes / seconds["copy"] / 1e9,
        read_gbs=x.nbytes / read / 1e9,
        tflops=2 * PRODUCT**3 / seconds["product"] / 1e12,
    )
