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


# Time of a wave of tiles, one for each SM, with float32 sums: on an H200, in us, at K = 4096.
_WAVE_TIMES = {(128, 256): 25.5, (192, 128): 18.4, (128, 128): 13.6}


def _hopper_of_fp8(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Large tiles take less time for each element, small ones leave fewer SMs idle in the last wave. If tiles of
    64 x 128 fill at most one wave, they are taken. Idle SMs share their sums, and for long sums every SM has two CTAs.

    Measured on an H200, in us, with scales by row:

    M     K->N          64x128         128x128  192x128  128x256  torch._scaled_mm
    128   4096->4096    14.5, by 2 12.1  14.9     19.1     25.1    13.6
    128   14336->4096   44.0, by 2 30.0  40.7     53.9     73.9    37.4
    256   4096->4096    14.7, by 2 15.2  15.1     19.4     25.2    14.2
    256   14336->4096   44.7, by 2 35.1  41.0     54.2     74.0    37.5
    512   4096->4096    20.2             16.0     20.1     25.8    15.2
    512   4096->6144    35.8             27.4     36.2     26.2    26.0
    512   4096->28672   128              97.9     112      102     97.7
    512   14336->4096   61.6             46.3     57.2     74.5    44.8
    1024  4096->6144    54.6             41.5     54.1     49.9    42.0
    1024  4096->28672   254              188      201      180     186

    In TFLOP/s, at M = 2048 (4096->6144, 4096->28672, 14336->4096), 4096^3 and 8192^3:

    sums left in the tensor core: 128x256               1429 1451 1536 1446 1270
    float32 sums: 128x256                               1280 1137 1350 1261 1147
                  192x128                               1270 1180 1245 1206 1253
    scales of 128 elements: 128x256                     1186 1071 1197 1114 1048
                            192x128                     1205 1131 1130 1038 1160
    """
    steps, sms = library.cdiv(p.k, 128), target.multiprocessors

    def tiles(tile: tuple[int, int]) -> int:
        return library.cdiv(p.m, tile[0]) * library.cdiv(p.n, tile[1])

    if p.fast and not p.scaled_steps and tiles((128, 256)) >= sms:
        yield GemmConfig("hopper", 128, 256, 128, 16, 1, num_warps=8, num_stages=4)
    few = tiles((64, 128)) <= sms
    split = _split_of_fp8(tiles((64, 128)), steps, sms * (2 if steps >= 64 else 1), most=8)
    small = GemmConfig("hopper", 64, 128, 128, 8, split, num_warps=4, num_stages=4)
    if few:
        yield small
    for block_m, block_n in sorted(_WAVE_TIMES, key=lambda tile: library.cdiv(tiles(tile), sms) * _WAVE_TIMES[tile]):
        stages = 4 if block_n == 256 else 5
        yield GemmConfig(
            "hopper", block_m, block_n, 128, 8, 1, num_warps=block_m // 16, num_stages=stages, pingpong=True
        )
    # For rows of the result that are no multiples of 16 bytes, which TMA does not write.
    yield small if few or p.scaled_steps else GemmConfig("hopper", 128, 128, 128, 8, 1, num_warps=4, num_stages=3)
