"""The roofs of a GPU: how fast it copies, how fast it reads, and how fast it multiplies matrices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftile.bench.measure import Effort, interleave
from rooftile.bench.rows import spread
from rooftile.bench.streams import copy_calls, read_sum
from rooftile.bench.timer import Block, Call, Clock

NBYTES = 4 << 30  # read and written by the copy: a tensor of 2 GiB
GEMM_SIZE = 8192  # M, N and K of the GEMM
SPARED = ("gemm-fp32", "gemm-tf32", "gemm-fp8")  # unsupported on this GPU, or out of memory


@dataclasses.dataclass(frozen=True)
class Roofs:
    """Bytes read plus written by a copy, and bytes read by a reduction, in GB/s; a bf16 GEMM in TFLOP/s.

    `gemms` has GEMMs by dtype, in TFLOP/s: "bf16", "fp16", "fp32", "tf32", and "fp8" if supported.
    """

    copy_gbs: float
    read_gbs: float
    tflops: float
    gemms: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def floor_seconds(self, nbytes: int, flops: int, copy_gbs: float | None = None) -> float:
        """The least time for those bytes and operations; `copy_gbs` is that of a copy of the same bytes, if known."""
        return max(nbytes / (1e9 * (copy_gbs or self.copy_gbs)), flops / (1e12 * self.tflops))

    def gemm_floor_seconds(self, nbytes: int, flops: int, dtype: str) -> float:
        """The least time for a GEMM in that dtype (a key of `gemms`). It counts a read of the weights, since the
        output is small beside them or beside the time to multiply."""
        return max(nbytes / (1e9 * self.read_gbs), flops / (1e12 * self.gemms.get(dtype, self.tflops)))


def gemm_dtype(roof: str, dtype: str, options: Mapping[str, Any]) -> str:
    """The key of `Roofs.gemms` for a row, by the case's `roof`, the row's dtype and its options."""
    _, _, named = roof.partition(" ")
    return named or ("tf32" if dtype == "fp32" and options.get("precision") == "tf32" else dtype)


@contextlib.contextmanager
def tf32(allowed: bool = True) -> Iterator[None]:
    """Lets PyTorch's float32 GEMMs use tf32 in this context, if supported."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if allowed:
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        if allowed:
            matmul.fp32_precision = before


def _tf32_gemm(a: Tensor, b: Tensor, out: Tensor) -> None:
    with tf32():
        torch.mm(a, b, out=out)


def _gemms(device: torch.device) -> dict[str, Call]:
    """A GEMM of two random matrices in each dtype."""
    calls: dict[str, Call] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(dtype) for _ in range(2))
        calls[name] = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
    calls["tf32"] = functools.partial(_tf32_gemm, a, b, torch.empty_like(a))
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        x, w = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        scaled = functools.partial(torch._scaled_mm, x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        calls["fp8"] = scaled
    return calls


def measure_roofs(clock: Clock, device: torch.device, effort: Effort | None = None) -> Roofs:
    """The roofs: medians on random data, taken in turns; the fastest of several ways to copy and to read."""
    nbytes = min(NBYTES, clock.free_bytes() // 8) // 8192 * 8192
    with clock.active(), torch.no_grad():
        x = torch.randn(nbytes // 8, device=device)
        calls: dict[tuple[str, str], list[Call]] = {
            **{("copy", name): copy for name, copy in copy_calls(nbytes, 1, device).items()},
            ("read", "torch"): [functools.partial(torch.sum, x.view(1024, -1), 1)],
            ("read", "triton"): [functools.partial(read_sum, x)],
            **{(f"gemm-{dtype}", "torch"): [call] for dtype, call in _gemms(device).items()},
        }
        blocks: dict[str, Block] = {}
        for (roof, way), some in calls.items():
            with contextlib.suppress(RuntimeError) if roof in SPARED else contextlib.nullcontext():
                blocks[f"{roof} {way}"] = clock.block(some)
        seconds: dict[str, float] = {}
        for name, samples in interleave(blocks, clock, effort or Effort(), random.Random(0)):
            roof = name.partition(" ")[0]
            if not isinstance(samples, Exception):
                seconds[roof] = min(spread(samples)[0], seconds.get(roof, float("inf")))
            elif roof not in SPARED:
                raise samples
    gemms = {
        roof.partition("-")[2]: 2 * GEMM_SIZE**3 / taken / 1e12
        for roof, taken in seconds.items()
        if roof.startswith("gemm-")
    }
    return Roofs(
        copy_gbs=nbytes / seconds["copy"] / 1e9,
        read_gbs=x.nbytes / seconds["read"] / 1e9,
        tflops=gemms["bf16"],
        gemms=gemms,
    )
