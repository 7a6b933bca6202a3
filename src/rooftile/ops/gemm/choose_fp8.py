"""GEMMs of two fp8 operands, as `fp8_linear` has them: which kernels, and in what tiles.

    up to 64 rows of x      skinny
    more rows               hopper on sm_90, elsewhere tiled

Where few tiles would leave SMs idle, programs share a tile's sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from rooftile import library, runtime
from rooftile.ops.gemm.config import GemmConfig, Problem


def of_fp8(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Configurations for such a problem, the preferred one first."""
    if target is runtime.INTERPRETER:  # few, large CTAs
        yield GemmConfig("tiled", 64, 64, 128, 8, 1, num_warps=4, num_stages=1)
        return
    if p.m <= 64:
        yield _skinny_of_fp8(p, target)
    elif target.gluon and p.aligned:
        yield from _hopper_of_fp8(p, target)
    yield _tiled_of_fp8(p, target)


def _split_of_fp8(tiles: int, steps: int, programs: int, most: int) -> int:
    """How many programs share a tile's sum: so many that there are `programs`, each with at least four steps."""
    split = 1
    while split < most and tiles * split * 2 <= programs and steps // (2 * split) >= 4:
        split *= 2
    return split


def _skinny_of_fp8(p: Problem, target: runtime.Target) -> GemmConfig:
    """Two or three programs an SM keep its loads in flight. Measured on an H200, in us:

    M  4096->6144              4096->28672            14336->4096
    1  64x256: 9.4             64x128, 4 stages: 30.9 64x128 split by 4: 17.6
       64x128: 9.9             64x256: 31.2           by 2: 19.0
       split by 2 or 4: 9.8    6 stages: 35.7         not: 24.7
    64 64x128: 11.9            64x128, 6 stages: 35.5 64x128 split by 2: 21.3
       split by 2: 12.4        4 stages: 40.7         by 4: 22.6
    """
    roomy = target.shared_memory >= 200_000
    few = p.m <= 32
    block_m = 16 if p.m <= 16 else 32 if few else 64
    block_n, block_k = 64, 128 if p.aligned else 64
    tiles, steps = library.cdiv(p.n, block_n), library.cdiv(p.k, block_k)
    # Steps of 256 where every SM has about one tile, unless scales belong to 128 elements.
    if roomy and few and p.aligned and not p.scaled_steps and 7 <= 10 * tiles // target.multiprocessors < 30:
        return GemmConfig("skinny", block_m, block_n, 256, 1, 1, num_warps=4, num_stages=6)
    full = tiles >= 3 * target.multiprocessors
    if not few and full and p.scaled_steps:  # the weight's scales are read half as often: 38.2, not 41.9
        block_n = 128
    split = _split_of_fp8(tiles, steps, (2 if few else 1) * target.multiprocessors, most=4)
    stages = 4 if not roomy or (few and full) else 6
    return GemmConfig("skinny", block_m, block_n, block_k, 1, split, num_warps=4, num_stages=stages)


def _tiled_of_fp8(p: Problem, target: runtime.Target) -> GemmConfig:
    if not p.aligned:  # loads of single bytes, each with an address
        return GemmConfig("tiled", 64, 64, 64, 8, 1, num_warps=8, num_stages=2)
    roomy = target.shared_memory >= 200_000
    block_m, block_n = 128, 128
    tiles = library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n)
    split = _split_of_fp8(tiles, library.cdiv(p.k, 128), target.multiprocessors, most=8)
    return GemmConfig("tiled", block_m, block_n, 128 if roomy else 64, 8, split, num_warps=8, num_stages=3)


def _hopper_of_fp8(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Measured on an H200, in TF/s, at M = 2048 (4096->6144, 4096->28672, 14336->4096), 4096^3 and 8192^3:

    sums left in the tensor core: 128x256 of 8 warps          1429 1451 1536 1446 1270
    promoted: 128x256, what is added overlaps (pingpong)      1280 1137 1350 1261 1147
              192x128 of 12 warps, the same                   1270 1180 1245 1206 1253
              128x128 of 4 warps, two programs at once        1097 1084 1146 1125 1087
    scales of 128 elements: 128x256, pingpong                 1186 1071 1197 1114 1048
                            192x128 of 12 warps, pingpong     1205 1131 1130 1038 1160
                            64x128 of 4 warps, two at once     754  766  790  735  770
    """
    steps = library.cdiv(p.k, 128)

    def tiles(block_m: int, block_n: int) -> int:
        return library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n)

    if p.fast and not p.scaled_steps and tiles(128, 256) >= target.multiprocessors:
        yield GemmConfig("hopper", 128, 256, 128, 16, 1, num_warps=8, num_stages=4)
    if tiles(192, 128) >= 8 * target.multiprocessors:
        yield GemmConfig("hopper", 192, 128, 128, 8, 1, num_warps=12, num_stages=5, pingpong=True)
    if 10 * tiles(128, 256) >= 7 * target.multiprocessors:
        yield GemmConfig("hopper", 128, 256, 128, 8, 1, num_warps=8, num_stages=4, pingpong=True)
    block_m, stages = (64, 4) if p.scaled_steps else (128, 3)
    split = _split_of_fp8(tiles(block_m, 128), steps, target.multiprocessors, most=8)
    yield GemmConfig("hopper", block_m, 128, 128, 8, split, num_warps=4, num_stages=stages)
