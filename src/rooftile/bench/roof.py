"""The roofs of a GPU: how fast it copies, how fast it reads, and how fast it multiplies matrices."""

from __future__ import annotations

import dataclasses
import functools
import random

import torch
from torch import Tensor

from rooftile.bench.measure import Effort, interleave
from rooftile.bench.rows import spread
from rooftile.bench.streams import copy_calls, read_sum
from rooftile.bench.timer import Call, Clock

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


def _product(a: Tensor, b: Tensor) -> Call:
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def measure_roofs(clock: Clock, device: torch.device, effort: Effort | None = None) -> Roofs:
    """The three roofs, on random data, medians, taken in turns; of several ways to copy and to read the fastest."""
    nbytes = min(NBYTES, clock.free_bytes() // 8) // 8192 * 8192
    with clock.active(), torch.no_grad():
        x = torch.randn(nbytes // 8, device=device)
        a, b = (torch.randn(PRODUCT, PRODUCT, device=device, dtype=torch.bfloat16) for _ in range(2))
        calls: dict[tuple[str, str], list[Call]] = {
            **{("copy", name): copy for name, copy in copy_calls(nbytes, 1, device).items()},
            ("read", "torch"): [functools.partial(torch.sum, x.view(1024, -1), 1)],
            ("read", "triton"): [functools.partial(read_sum, x)],
            ("product", "torch"): [_product(a, b)],
        }
        blocks = {" ".join(key): clock.block(some) for key, some in calls.items()}
        seconds: dict[str, float] = {}
        for name, samples in interleave(blocks, clock, effort or Effort(), random.Random(0)):
            if isinstance(samples, Exception):
                raise samples
            roof = name.partition(" ")[0]
            seconds[roof] = min(spread(samples)[0], seconds.get(roof, float("inf")))
    return Roofs(
        copy_gbs=nbytes / seconds["copy"] / 1e9,
        read_gbs=x.nbytes / seconds["read"] / 1e9,
        tflops=2 * PRODUCT**3 / seconds["product"] / 1e12,
    )
