"""GEMMs behind a norm, where one kernel does both: which, and in what tiles.

    one or two rows of x        gemv_persistent
    one row                     gemv
    up to `fused_rows`          skinny

With more rows the norm is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooftile import library, runtime
from rooftile.ops.gemm import gemv_persistent
from rooftile.ops.gemm.config import GemmConfig, Kernel, Problem

# Rows of x up to which norm and GEMM are one kernel, and columns of the result for each SM above which they are for one
# row alone. On an H200 one kernel takes for 3584 -> 3584 0.76 of the time of torch.compile's two with 1 row, 0.74 with
# 16, 0.79 with 32 and 1.13 with 64: x, four times as much, is normalised again by each CTA. For 3584 -> 18944, of which
# every SM has more than two tiles, it takes 0.90 with 1 row and 1.15 to 1.17 with 2 to 16.
_ROWS, _WIDE = 32, 64
# The gated GEMM in a decoding step of Llama-3-8B, 4096 -> 14336, 8 rows: 1.0 us of 140 a layer less than two kernels.
_GATED_ROWS, _GATED_WIDE = 16, 128


def fused_rows(n: int, target: runtime.Target, gated: bool = False) -> int:
    """The most rows of x for which norm and GEMM are one kernel; n counts columns of the result.

    The one or two rows that `"gemv_persistent"` takes are so whatever the columns.
    """
    rows, wide = (_GATED_ROWS, _GATED_WIDE) if gated else (_ROWS, _WIDE)
    return 1 if n > wide * target.multiprocessors else rows


def of_norm(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Configurations for norm and GEMM in one kernel, the preferred one first; none where they are two kernels."""
    along_k = p.w_layout == "k"
    if target is not runtime.INTERPRETER and p.m <= gemv_persistent.ROWS and along_k:
        yield from gemv_persistent.configs(p, target)
    if p.m > fused_rows(p.n, target, p.gated):
        return
    if target is runtime.INTERPRETER:
        yield interpreted_norm(p.m, p.n * (1 + p.gated), p.k)
    elif p.m == 1 and (along_k or p.dtype == torch.float32):
        yield _one_row_of_norm(p, target)
    elif p.dtype != torch.float32:  # IEEE float32 has no tensor cores: of several rows the tiled kernel is faster
        yield from _skinny_of_norm(p, along_k, target)


def interpreted_norm(m: int, n: int, k: int) -> GemmConfig:
    """Few, large CTAs. The same whatever the layout, and for a gate that is computed apart, to be bit-identical."""
    block_m, block_n, block_k = (min(128, max(16, library.power_of_two(size))) for size in (m, n, k))
    kernel: Kernel = "gemv" if m == 1 else "skinny"
    return GemmConfig(kernel, block_m if m > 1 else 1, min(64, block_n), block_k, num_stages=1)


def _one_row_of_norm(p: Problem, target: runtime.Target) -> GemmConfig:
    """Loads straight to registers, four of 16 bytes a thread, and many small CTAs.

    In a decoding step of Llama-3-8B on an H200: for 4096 -> 6144 CTAs of twice the size took 2.5 us off a layer of 130,
    and for the vocabulary steps of half the length took 6 us off 4100.
    """
    block_n, k_bytes, warps = 8, 1024, 4
    if not p.gated and p.n >= 65536:
        k_bytes, warps = 512, 2
    elif not p.gated and 4096 < p.n <= 8192:
        block_n, warps = 16, 8
    warps = warps * 32 // target.warp_size
    return GemmConfig("gemv", 1, block_n // (1 + p.gated), k_bytes // p.dtype.itemsize, 1, 1, warps, 1)


def _skinny_of_norm(p: Problem, along_k: bool, target: runtime.Target) -> list[GemmConfig]:
    """64 rows of the weight, 256 bytes along each, in stages that leave room for two programs an SM.

    Where tiles leave SMs idle, up to four programs share one's sum. A weight that is not contiguous along k
    is read along n, 256 bytes too; one whose rows are not aligned, element by element, in tiles that fit the registers.
    A gated tile has 64 rows of the gate and as many of up, or half of each where a stage of those leaves no room.
    """
    block_m = max(16, library.power_of_two(p.m))
    preferred = []
    if along_k and block_m == 16 and p.dtype.itemsize == 2 and p.k % 8 == 0 and target.shared_memory >= 200 << 10:
        rounds = library.cdiv(p.n, 64) / target.multiprocessors
        if p.gated:  # in a decoding step of Llama-3-8B four stages, which leave less room beside them, were slower
            preferred = [GemmConfig("skinny", 16, 64, 128, 1, 1, 4, 3)]
        elif rounds <= 0.5 and p.k % 256 == 0:  # the best of 60 on an H200 for 3584 -> 3584, 2 % faster than the next
            preferred = [GemmConfig("skinny", 16, 64, 256, 1, 2, 4, 4)]
        elif rounds <= 1 and p.k % 256 == 0:  # 4096 -> 6144: 2.8 us of 140 a layer less than the above
            preferred = [GemmConfig("skinny", 16, 64, 128, 1, 4, 4, 3)]
    block_n, block_k = (64, 128) if along_k else (128, 64)
    if p.gated and (not along_k or target.shared_memory < 128 << 10):
        block_n //= 2
    if p.gated and target.arch == "sm_100":  # see skinny.can_implement
        block_n = 32
    if p.k * p.dtype.itemsize % 16:
        block_k = 32
    tiles, steps = library.cdiv(p.n, block_n), library.cdiv(p.k, block_k)
    split = max(1, min(4, 2 * target.multiprocessors // tiles, steps // 4))
    # AMD's, of 64 threads: two of them would spill a few bytes of a tile of 32 rows.
    warps = 4 * 32 // target.warp_size if block_m == 16 else 4
    stage = (block_n * (1 + p.gated) + block_m) * block_k * p.dtype.itemsize
    deepest = max(2, min(5, (target.shared_memory // 2 - block_m * block_k * p.dtype.itemsize) // stage))
    depths = (2, 1) if target.warp_size == 64 else range(deepest, 0, -1)
    return preferred + [GemmConfig("skinny", block_m, block_n, block_k, 1, split, warps, stages) for stages in depths]
