"""GEMMs of dense weights: which kernels, and in what tiles.

    one row of x                      gemv
    up to 64 rows                     skinny; on sm_90 hopper where it is faster from 33 rows on
    more rows                         hopper on sm_90, elsewhere tiled

The configurations are in order of preference, as are those of the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooftile import library, runtime
from rooftile.ops.gemm.config import GemmConfig, Problem


def interpreted(p: Problem) -> GemmConfig:
    """Few, large CTAs; the same kernel whatever the layout, so that results are bit-identical."""
    block_m, block_n, block_k = (min(128, max(16, library.power_of_two(max(1, n)))) for n in (p.m, p.n, p.k))
    return GemmConfig("tiled", block_m, block_n, block_k, num_stages=1)


def of_dense(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Configurations for such a problem, the preferred one first."""
    if p.k == 0:
        yield GemmConfig("tiled", 32, 32, 32, num_warps=4, num_stages=1)
        return
    along_k = p.batch == 1 and p.x_layout == "k" and p.w_layout == "k"
    if along_k and p.m == 1:
        yield one_row(p, target)
    if along_k and target.gluon and 32 < p.m <= 64 and _vectors(p) and p.dtype.itemsize == 2:
        yield from _skinny64(p, target)
    if target.gluon and (p.m > 32 or not along_k):
        if min(p.m, p.n) <= 16 and p.dtype.itemsize == 2 and _vectors(p) and not p.gated:
            yield _thin(p, target)
        yield from _hopper(p, target)
    # Without tensor cores, as IEEE float32 is, their sides don't matter; without vectors a deep pipeline has no room.
    if along_k and p.m <= 64 and _on_tensor_cores(p) and _vectors(p) and target.warp_size == 32:
        yield from _skinny(p, target)
    yield from tiled(p, target)


def _on_tensor_cores(p: Problem) -> bool:
    return p.dtype != torch.float32 or p.precision == "tf32"


def _split(tiles: int, total: int, steps: int, target: runtime.Target) -> int:
    """Programs that share a tile: as many as have `steps` of the `total` each, where SMs would be idle."""
    idle = target.multiprocessors // max(1, tiles)
    return max(1, min(8, idle, total // steps))


def one_row(p: Problem, target: runtime.Target) -> GemmConfig:
    """Loads of 16 bytes straight into registers, four to eight a thread, in many small programs.

    Measured on an H200 for Llama-3-8B's GEMMs, of 330 configurations: with copies through shared memory (stages over
    1) all were 2 to 6 % slower, and a sum split over programs paid nowhere.
    """
    if p.n >= 16384:
        block_n, block_k, warps = 8, 256, 2
    elif p.n <= 2048 and p.k >= 2048 and not p.gated and not p.weight:
        # Of steps on an H100: from 3072 on Llama-3.2-1B 1037 to 1025 us and Qwen3-0.6B 905 to 862, below 997 to 991.
        block_n, block_k, warps = (4, 4096, 8) if p.k >= 3072 else (4, 2048, 4)
    elif p.k >= 8192:
        block_n, block_k, warps = 4, 2048, 4
    elif p.n <= 4096 and p.k % 1024 == 0:
        block_n, block_k, warps = 16, 1024, 8
    elif p.n <= 4096:  # 3584 -> 3584: with a masked end 10.3 us, and so 9.8 with a norm besides
        block_n, block_k, warps = 8, 512, 4
    else:
        block_n, block_k, warps = 16, 512, 8
    warps = max(1, warps * 32 // target.warp_size)
    return GemmConfig("gemv", 1, max(1, block_n // (1 + p.gated)), block_k * 2 // p.dtype.itemsize, 1, 1, warps, 1)


def _thin(p: Problem, target: runtime.Target) -> GemmConfig:
    """Tiles as narrow as the result, of 64 along its other side, as the products of a LoRA adapter have.

    On an H100, rank 16, of 34 configurations in 12 shapes: within 3 % of the fastest, and 0.87 to 0.93 of the time of
    TMA's tiles, whose 64 columns are mostly beyond the end.
    """
    block_m, block_n = (64, 16) if p.m >= p.n else (16, 64)
    split = _split(_programs(p, (block_m, block_n, 128, 4)), library.cdiv(p.k, 128), 4, target)
    return GemmConfig("tiled", block_m, block_n, 128, 8, split, 4, 4)


def _skinny(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """64 rows of the weight, 256 bytes along each, or 512 where that leaves no more programs than SMs.

    From an H200, of some 60 configurations a shape, 4 and 16 rows. Where there are a few more programs than SMs,
    three stages were 8 % faster than four: they leave room for the next kernel's first programs.
    """
    block_m = max(16, library.power_of_two(p.m))
    small = target.shared_memory < 128 << 10
    if block_m <= 32 and p.dtype.itemsize == 2 and not small:
        tiles = library.cdiv(p.n, 64)
        split = _shared(tiles, library.cdiv(p.k, 128), target)
        if not p.gated and 1 < split * tiles / target.multiprocessors < 1.25:
            # A second round for a few: 0.79 of cuBLAS for 3584 -> 4608. Taller tiles, all at once.
            most = max(1, target.multiprocessors // library.cdiv(p.n, 128))
            yield GemmConfig("skinny", block_m, 128, 128, 1, most, 8, 4)
        if p.gated:  # twice as many rows of the weight
            yield GemmConfig("skinny", block_m, 64, 128, 1, split, 4, 4)
        elif split * tiles <= target.multiprocessors:
            yield GemmConfig("skinny", block_m, 64, 256, 1, split, 4, 4)
        elif split * tiles <= 2 * target.multiprocessors:
            yield GemmConfig("skinny", block_m, 64, 128, 1, split, 4, 3)
        yield GemmConfig("skinny", block_m, 64, 128, 1, split, 4, 4)
    block_n = 32 if p.gated or (small and block_m == 32) else 64  # with 64 it spills on sm_120
    block_k = (128 if small else 256) // p.dtype.itemsize
    split = _shared(library.cdiv(p.n, block_n), library.cdiv(p.k, block_k), target)
    for stages in (6, 4, 3, 2):
        yield GemmConfig("skinny", block_m, block_n, block_k, 1, split, 4, stages)


def _skinny64(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """33 to 64 rows on sm_90. A sum is split as long as each SM has at most one program, of 2048 elements or more.

    On an H200, the time over that of the hopper kernel's best tile: 2048 to 6144 columns 0.81 to 1.00, a gate 0.92 to
    1.01. `_hopper` has what was slower: 2560 columns of long sums 1.04 and 1.06, as splits leave SMs idle, and
    vocabularies 0.99 and 1.02. Not tuned: 1024 columns, which are not split, with 1.01 for sums of 2048, and over 1.08
    for 3072, where four parts had 0.90. Gates were not tried split.
    """
    tiles, steps, split = library.cdiv(p.n, 64), library.cdiv(p.k, 128), 1
    while not p.gated and 2 * split * tiles <= target.multiprocessors and steps >= 32 * split and split < 8:
        split *= 2
    if p.n < 65536 and (p.k < 4096 or 4 * split * tiles >= 3 * target.multiprocessors):
        yield GemmConfig("skinny", 64, 64, 128, 1, split, 4, 4)


def _shared(tiles: int, steps: int, target: runtime.Target) -> int:
    """Programs that share a tile: a power of two, up to one and a half for each SM, of 8 steps at least.

    A sum of 2048 is not split: on an H200 16 rows of 2048 -> 3072 took 5.6 us, and 6.5 split in two.
    """
    split = 1
    while steps > 16 and 4 * split * tiles <= 3 * target.multiprocessors and steps >= 16 * split and split < 8:
        split *= 2
    return split


def _hopper(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Tiles of 128 x 256 where there are enough to go round, as cuBLAS has them; smaller ones where there are not.

    From an H200, of some 20 configurations a shape (speed over that of cuBLAS): up to 64 rows 0.96 to 1.06; 128 and
    256 rows by 4096 columns 0.86 and 0.97 in tiles of 64 x 128, ping-pong; by 6144 columns 0.90 and 0.91; thousands of
    rows 1.00 to 1.05. The other tile's GEMM hides a gate: 1.00 and 1.06 for 1024 and 4096 rows, without
    ping-pong 0.98 and 0.97. Where few tiles have long sums, on an H100, small tiles were faster than split-K and of
    stream-K: 64 rows of 14336 -> 4096 took 44.4 us in tiles of 64 x 32, and 46.3 split in two; 128 rows 46.2 in tiles
    of 64 x 64, and 52.4 split (results/h100/schedules).

    From eight rounds of tiles on, an H100 is held up by what small tiles read again from the L2: of cuBLAS's speed,
    4096 x 4096 -> 32000 has 1.08 in tiles of 128 x 256, 0.87 of 192 x 128 and 0.86 of 128 x 128.
    """
    units, halved = target.multiprocessors, 1 + p.gated

    def tiles(block_m: int, block_n: int) -> int:
        return library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n // halved)

    if p.m <= 64:
        block_n, stages = (128, 4) if tiles(64, 128) >= units else (64, 6)
        if not p.gated and p.k >= 4096 and 4 * tiles(64, 64) <= 3 * units:
            block_n, stages = 32, 8
        yield GemmConfig("hopper", 64, block_n // halved, 128, 8, 1, 4, stages)
    elif p.gated:
        yield GemmConfig("hopper", 128, 64, 64, 4 if p.m > 1024 else 8, 1, 8, 6, pingpong=True)

    def worth(speed: float, block_m: int, block_n: int) -> float:
        """A tile's speed, times the share of the GPU that works, times the share of that work which is asked for."""
        count = tiles(block_m, block_n)
        if tiles(128, 128) >= 8 * units and (block_m == 192 or max(block_m, block_n) < 192):
            speed *= 0.9
        asked = p.m * p.n * halved / max(1, count * block_m * block_n)
        return speed * filled(count, units) * asked

    known = (tile for tile in _HOPPER_TILES if not p.gated or tile[2] % 64 == 0)  # 48 is no width
    found = sorted(known, key=lambda tile: worth(*tile[:3]), reverse=True)
    for _, block_m, block_n, block_k, warps, stages, pingpong in found:
        yield GemmConfig("hopper", block_m, block_n // halved, block_k, 8, 1, warps, stages, pingpong=pingpong)


# Speed where all SMs work, over that of the first, on an H200: block_m, block_n, block_k, num_warps,
# num_stages, pingpong. From GEMMs of 128 to 2048 rows by 3584 to 6144 columns, where cuBLAS has tiles of such widths
# too: 512 x 4096 -> 6144 in tiles of 128 x 192 is 1.01 of it and in tiles of 64 x 128 0.87, 256 x 3584 -> 4608 in tiles
# of 64 x 160 0.92 and in tiles of 128 x 128 0.75. The smallest is for 128 rows or fewer.
_HOPPER_TILES = (
    *((1.0, 128, 256, 64, 8, 4, False), (0.99, 256, 128, 64, 8, 4, False), (0.985, 128, 128, 64, 8, 6, True)),
    *((0.99, 128, 192, 64, 8, 5, False), (0.98, 192, 128, 64, 12, 5, False), (0.95, 256, 160, 64, 8, 4, False)),
    *((0.9, 128, 160, 64, 8, 6, False), (0.9, 128, 224, 64, 8, 4, False), (0.87, 64, 128, 64, 8, 7, True)),
    *((0.79, 64, 192, 64, 4, 6, False), (0.76, 64, 160, 64, 4, 7, False), (0.7, 64, 96, 64, 4, 8, False)),
    *((0.6, 64, 64, 128, 4, 6, False),),
)


def filled(tiles: int, units: int) -> float:
    """The share of SMs that work, on average over the rounds that so many tiles take."""
    return tiles / (library.cdiv(tiles, units) * units) if tiles else 1.0


# Tiles of 16-bit elements, largest first: (block_m, block_n, block_k, warps). 32-bit ones take half of block_k.
_TILES = ((128, 256, 64, 8), (128, 128, 64, 8), (64, 128, 64, 4), (64, 64, 64, 4), (32, 128, 64, 4), (16, 64, 128, 4))
# 99 KB, and 64: no room for the largest.
_SMALL_TILES = (
    *((128, 128, 64, 8), (128, 128, 32, 8), (64, 128, 32, 4), (64, 64, 64, 4)),
    *((32, 128, 64, 4), (16, 64, 64, 4)),
)
# What is not loaded 16 bytes at a time comes through registers: smaller tiles, so that they hold it.
_UNALIGNED_TILES = ((64, 64, 32, 4), (32, 64, 32, 4), (16, 64, 32, 4))
# IEEE float32 is multiplied by the ordinary units, which hold both operands in registers.
_FLOAT32_TILES = ((64, 64, 16, 4), (32, 64, 16, 4), (16, 64, 32, 4))


def _vectors(p: Problem) -> bool:
    """Whether both operands are loaded 16 bytes at a time, to their last: 16 divides what they are contiguous along."""
    x_length = p.k if p.x_layout == "k" else p.m
    w_length = p.k if p.w_layout == "k" else p.n
    return p.x_aligned and p.w_aligned and x_length % 16 == 0 and w_length % 16 == 0


def tiled(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """The largest tiles that leave few SMs without one; else the smallest, with split-K."""
    if not _on_tensor_cores(p):
        tiles: tuple[tuple[int, int, int, int], ...] = _FLOAT32_TILES
    elif not _vectors(p):
        tiles = _UNALIGNED_TILES
    else:
        tiles = _TILES if target.shared_memory > 128 << 10 else _SMALL_TILES
    if p.activation or p.gated or p.dtype == torch.float32 or target.arch not in ("sm_80", "sm_90"):
        tiles = tuple(t for t in tiles if t[0] * t[1] < 128 * 256)  # the largest would spill its registers
    rows = max(16, library.power_of_two(max(1, p.m)))
    # No taller than the problem, and below 64 rows no shorter: the weight would be read again for each tile of rows.
    fitting = [t for t in tiles if min(rows, 64) <= t[0] <= rows] or [tiles[-1]]
    # As large as leaves few SMs without a tile; else the smallest, with split-K.
    busy = [t for t in fitting if 4 * _programs(p, t) >= 3 * target.multiprocessors]
    for block_m, block_n, block_k, warps in (*busy, *reversed(fitting)):
        programs = _programs(p, (block_m, block_n, block_k, warps))
        split = _split(programs, library.cdiv(p.k, block_k), 4, target)
        if p.dtype == torch.float32 and _on_tensor_cores(p):
            block_k //= 2
        deep = _on_tensor_cores(p) and _vectors(p) and target.warp_size == 32
        for stages in (4, 3, 2) if deep else (2,):
            yield GemmConfig("tiled", block_m, block_n // (1 + p.gated), block_k, 8, split, warps, stages)


def _programs(p: Problem, tile: tuple[int, int, int, int]) -> int:
    block_m, block_n = tile[0], tile[1] // (1 + p.gated)
    return p.batch * library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n)
