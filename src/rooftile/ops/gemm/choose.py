"""Which kernel a product gets, and in what tiles: from a measured table where there is one, else by its sizes."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from rooftile import library, runtime, tuning
from rooftile.ops.gemm.config import MatmulConfig, Problem


@functools.cache
def module(kernel: str) -> ModuleType | None:
    """The module with that kernel; None where this Triton has not what it is written in (Gluon)."""
    try:
        return importlib.import_module(f"rooftile.ops.gemm.{kernel}")
    except ImportError:
        if kernel != "hopper":
            raise
        return None


def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why the configuration can't run that problem; None where it can."""
    found = module(c.kernel)
    if found is None:
        return f"kernel is '{c.kernel}', which this installation has not"
    if p.k == 0 and c.kernel != "tiled":
        return f"kernel is '{c.kernel}', expected 'tiled' where there is nothing to sum"
    return shared_reason(p, c, target) or found.can_implement(p, c, target)


def shared_reason(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """What no kernel takes for that problem."""
    steps = library.cdiv(p.k, c.block_k)
    if c.split_k > max(8, steps):  # a few programs with nothing to do are only a waste
        return f"split_k is {c.split_k}: there are {steps} steps of {c.block_k}"
    return common_reason(c, target)


def common_reason(c: MatmulConfig, target: runtime.Target) -> str | None:
    """What no kernel takes; of sizes that are no power of two, `"hopper"` takes some."""
    if c.num_warps * target.warp_size > target.max_threads:
        return (
            f"num_warps is {c.num_warps}, of which {target.arch} runs {target.max_threads // target.warp_size} at most"
        )
    for name in ("block_m", "num_warps"):
        value = getattr(c, name)
        if c.kernel != "hopper" and value & (value - 1):
            return f"{name} is {value}, expected a power of two"
    return None


@functools.lru_cache(maxsize=4096)
def tuning_key(p: Problem) -> str:
    """The problem as a tuned table names it: rows rounded up to a power of two, and 2 to 16 are one tile's rows."""
    rows = library.power_of_two(max(1, p.m))
    rows = 16 if 1 < rows <= 16 else min(rows, 8192)
    words = [f"m{rows} n{p.n} k{p.k}", str(p.dtype).removeprefix("torch.")]
    words += [f"x{p.x_layout or '-'} w{p.w_layout or '-'}"]
    if p.batch != 1:
        words.append(f"batch{p.batch}")
    if p.gated:
        words.append("gated")
    if p.dtype == torch.float32 and p.precision != "ieee":
        words.append(p.precision)
    return " ".join(words)


def tuned_config(entry: dict[str, Any]) -> MatmulConfig:
    """The configuration that an entry of a tuned table holds, by the names of its fields."""
    return MatmulConfig(**entry)


def tuned_entry(p: Problem, target: runtime.Target) -> dict[str, Any] | None:
    """What a tuned table has for the problem."""
    if target is runtime.INTERPRETER:
        return None
    return tuning.lookup("matmul", tuning_key(p), target)


def _tuned(p: Problem, entry: dict[str, Any], target: runtime.Target) -> MatmulConfig | None:
    try:
        c = tuned_config(entry)
    except (TypeError, ValueError):  # a table of another version, or one that somebody edited
        return None
    return None if can_implement(p, c, target) else c


def choose(p: Problem, target: runtime.Target) -> MatmulConfig:
    """How that product is computed on that target."""
    return choose_from(p, tuned_entry(p, target), target)


def choose_from(p: Problem, entry: dict[str, Any] | None, target: runtime.Target) -> MatmulConfig:
    """The same, with what the table has for it."""
    if target is runtime.INTERPRETER:
        return _interpreted(p)
    tuned = None if entry is None else _tuned(p, entry, target)
    return _first(_candidates(p, target), p, target) if tuned is None else tuned


def choose_tiled(p: Problem, target: runtime.Target) -> MatmulConfig:
    """The same among the portable kernel's configurations alone."""
    return _interpreted(p) if target is runtime.INTERPRETER else _first(_tiled(p, target), p, target)


def _first(candidates: Iterator[MatmulConfig], p: Problem, target: runtime.Target) -> MatmulConfig:
    for c in candidates:
        if can_implement(p, c, target) is None:
            return c
    return MatmulConfig("tiled", 16, 16, 16, num_warps=4, num_stages=1)


def _candidates(p: Problem, target: runtime.Target) -> Iterator[MatmulConfig]:
    """Configurations by regime, the preferred one first; the first that is not refused is taken."""
    if p.k == 0:
        yield MatmulConfig("tiled", 32, 32, 32, num_warps=4, num_stages=1)
        return
    along_k = p.batch == 1 and p.x_layout == "k" and p.w_layout == "k"
    if along_k and p.m == 1:
        yield from _rows(p, target)
    # In labs on an H200 64 rows were 3 to 20 % faster so than in the skinny kernel, which reads x too often, and 32
    # rows of 4096 -> 28672 6 % slower, perhaps because half of the tile of x is then beyond its end.
    if target.arch == "sm_90" and (p.m > 32 or not along_k):
        yield from _hopper(p, target)
    # Without the matrix unit, as IEEE float32 is, its sides don't matter; without vectors a deep pipeline has no room.
    if along_k and p.m <= 64 and _on_matrix_unit(p) and _vectors(p) and target.warp_size == 32:
        yield from _skinny(p, target)
    yield from _tiled(p, target)


def _on_matrix_unit(p: Problem) -> bool:
    return p.dtype != torch.float32 or p.precision == "tf32"


def _interpreted(p: Problem) -> MatmulConfig:
    """Few, large programs; the same kernel whatever the layout, so that results are the same to the bit."""
    block_m, block_n, block_k = (min(128, max(16, library.power_of_two(max(1, n)))) for n in (p.m, p.n, p.k))
    return MatmulConfig("tiled", block_m, block_n, block_k, num_stages=1)


def _split(tiles: int, total: int, steps: int, target: runtime.Target) -> int:
    """Programs that share a tile: as many as have `steps` of the `total` each, where multiprocessors would be idle."""
    idle = target.multiprocessors // max(1, tiles)
    return max(1, min(8, idle, total // steps))


def _rows(p: Problem, target: runtime.Target) -> Iterator[MatmulConfig]:
    """Loads of 16 bytes straight into registers, four to eight a thread, in many small programs.

    Measured on an H200 for Llama-3-8B's products, of 330 configurations: with copies through shared memory (stages over
    1) all were 2 to 6 % slower, and a sum split over programs paid nowhere.
    """
    if p.n >= 16384:
        block_n, block_k, warps = 8, 256, 2
    elif p.k >= 8192:
        block_n, block_k, warps = 4, 2048, 4
    elif p.n <= 4096 and p.k % 1024 == 0:
        block_n, block_k, warps = 16, 1024, 8
    elif p.n <= 4096:  # 3584 -> 3584: with a masked end 10.3 us, and so 9.8 with a norm besides
        block_n, block_k, warps = 8, 512, 4
    else:
        block_n, block_k, warps = 16, 512, 8
    warps = max(1, warps * 32 // target.warp_size)
    yield MatmulConfig("gemv", 1, max(1, block_n // (1 + p.gated)), block_k * 2 // p.dtype.itemsize, 1, 1, warps, 1)


def rows_of_8_bits(p: Problem, target: runtime.Target) -> MatmulConfig:
    """The same for a weight of 8 bits."""
    if p.n < 16384 and p.k >= 8192:  # 14336 -> 4096 on an H200: 12 us of a step's 2430 ahead of twice as many rows
        return MatmulConfig("gemv", 1, 4, 2048, 1, 1, 4 * 32 // target.warp_size, 1)
    return of_8_bits(next(_rows(dataclasses.replace(p, dtype=torch.bfloat16), target)), p.k)


def rows_of_4_bits(p: Problem, target: runtime.Target) -> MatmulConfig:
    """The same for a packed weight of p.k bytes a row: 64 bytes a thread, which become 128 numbers, in parts of a row
    of 512 bytes, 1024 without a gate, or 256 where those do not divide it.

    In a decoding step of Llama-3-8B on an H200, 2022 us, the gated product took 19 us more with twice as many rows of
    half such parts, 155 with half as many of twice such parts, 72 with half of either rows and threads; 14336 -> 4096
    took 38 more with half as many rows of twice such parts, 132 with half such parts and threads.
    """
    block_k = next((b for b in ((512,) if p.gated else (1024, 512)) if p.k % b == 0), 256)
    return MatmulConfig("gemv", 1, 8192 // block_k // (1 + p.gated), block_k, 1, 1, 4 * 32 // target.warp_size, 1)


def of_8_bits(c: MatmulConfig, k: int) -> MatmulConfig:
    """With as many bytes a program and a thread as c has with 16 bits: steps twice as long, or where only those as long
    as c's divide k, twice the rows."""
    if k % c.block_k == 0 and k % (2 * c.block_k):
        return dataclasses.replace(c, block_n=2 * c.block_n)
    return dataclasses.replace(c, block_k=2 * c.block_k)


def _skinny(p: Problem, target: runtime.Target) -> Iterator[MatmulConfig]:
    """64 rows of the weight, 256 bytes along each, or 512 where that leaves no more programs than multiprocessors.

    From an H200, of some 60 configurations a shape, 4 and 16 rows. Where programs are a few more than multiprocessors,
    three stages were 8 % ahead of four: they leave room for the next kernel's first programs.
    """
    block_m = max(16, library.power_of_two(p.m))
    small = target.shared_memory < 128 << 10
    if block_m <= 32 and p.dtype.itemsize == 2 and not small:
        tiles = library.cdiv(p.n, 64)
        split = _shared(tiles, library.cdiv(p.k, 128), target)
        if not p.gated and 1 < split * tiles / target.multiprocessors < 1.25:
            # A second round for a few: 0.79 of cuBLAS for 3584 -> 4608. Taller tiles, all at once.
            most = max(1, target.multiprocessors // library.cdiv(p.n, 128))
            yield MatmulConfig("skinny", block_m, 128, 128, 1, most, 8, 4)
        if p.gated:  # twice as many rows of the weight
            yield MatmulConfig("skinny", block_m, 64, 128, 1, split, 4, 3)
        elif split * tiles <= target.multiprocessors:
            yield MatmulConfig("skinny", block_m, 64, 256, 1, split, 4, 4)
        elif split * tiles <= 2 * target.multiprocessors:
            yield MatmulConfig("skinny", block_m, 64, 128, 1, split, 4, 3)
        yield MatmulConfig("skinny", block_m, 64, 128, 1, split, 4, 4)
    block_n = 32 if p.gated or (small and block_m == 32) else 64  # with 64 it spills on sm_120
    block_k = (128 if small else 256) // p.dtype.itemsize
    split = _shared(library.cdiv(p.n, block_n), library.cdiv(p.k, block_k), target)
    for stages in (6, 4, 3, 2):
        yield MatmulConfig("skinny", block_m, block_n, block_k, 1, split, 4, stages)


def _shared(tiles: int, steps: int, target: runtime.Target) -> int:
    """Programs that share a tile: a power of two, up to one and a half for each multiprocessor, of 8 steps at least."""
    split = 1
    while 4 * split * tiles <= 3 * target.multiprocessors and steps >= 16 * split and split < 8:
        split *= 2
    return split


def _hopper(p: Problem, target: runtime.Target) -> Iterator[MatmulConfig]:
    """Tiles of 128 x 256 where there are enough to go round, as cuBLAS has them; smaller ones where there are not.

    From an H200, of some 20 configurations a shape (speed over that of cuBLAS): up to 64 rows 0.96 to 1.06; 128 and
    256 rows by 4096 columns 0.86 and 0.97 in tiles of 64 x 128, ping-pong; by 6144 columns 0.90 and 0.91; thousands of
    rows 1.00 to 1.05. A gate is hidden behind the other tile's GEMM: 1.00 and 1.06 for 1024 and 4096 rows, without
    ping-pong 0.98 and 0.97. Where few tiles have long sums, on an H100, small tiles were ahead of split-K and of
    stream-K: 64 rows of 14336 -> 4096 took 44.4 us in tiles of 64 x 32, and 46.3 split in two; 128 rows 46.2 in tiles
    of 64 x 64, and 52.4 split (results/h100/schedules).
    """
    units, halved = target.multiprocessors, 1 + p.gated

    def tiles(block_m: int, block_n: int) -> int:
        return library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n // halved)

    if p.m <= 64:
        block_n, stages = (128, 4) if tiles(64, 128) >= units else (64, 6)
        if not p.gated and p.k >= 8192 and 4 * tiles(64, 64) <= 3 * units:
            block_n, stages = 32, 8
        yield MatmulConfig("hopper", 64, block_n // halved, 128, 8, 1, 4, stages)
    elif p.gated:
        yield MatmulConfig("hopper", 128, 64, 64, 4 if p.m > 1024 else 8, 1, 8, 6, pingpong=True)

    def worth(speed: float, block_m: int, block_n: int) -> float:
        """A tile's speed, times the share of the GPU that works, times the share of that work which is asked for."""
        count = tiles(block_m, block_n)
        asked = p.m * p.n * halved / max(1, count * block_m * block_n)
        return speed * _filled(count, units) * asked

    known = (tile for tile in _HOPPER_TILES if not p.gated or tile[2] % 64 == 0)  # 48 is no width
    found = sorted(known, key=lambda tile: worth(*tile[:3]), reverse=True)
    for _, block_m, block_n, block_k, warps, stages, turns in found:
        yield MatmulConfig("hopper", block_m, block_n // halved, block_k, 8, 1, warps, stages, pingpong=turns)


# Speed where all multiprocessors work, over that of the first, on an H200: block_m, block_n, block_k, num_warps,
# num_stages, pingpong. From products of 128 to 2048 rows by 3584 to 6144 columns, where cuBLAS has tiles of such widths
# too: 512 x 4096 -> 6144 in tiles of 128 x 192 is 1.01 of it and in tiles of 64 x 128 0.87, 256 x 3584 -> 4608 in tiles
# of 64 x 160 0.92 and in tiles of 128 x 128 0.75. The smallest is for 128 rows or fewer.
_HOPPER_TILES = (
    *((1.0, 128, 256, 64, 8, 4, False), (0.99, 256, 128, 64, 8, 4, False), (0.985, 128, 128, 64, 8, 6, True)),
    *((0.99, 128, 192, 64, 8, 5, False), (0.98, 192, 128, 64, 12, 5, False), (0.95, 256, 160, 64, 8, 4, False)),
    *((0.9, 128, 160, 64, 8, 6, False), (0.9, 128, 224, 64, 8, 4, False), (0.87, 64, 128, 64, 8, 7, True)),
    *((0.79, 64, 192, 64, 4, 6, False), (0.76, 64, 160, 64, 4, 7, False), (0.7, 64, 96, 64, 4, 8, False)),
    *((0.6, 64, 64, 128, 4, 6, False),),
)


def _filled(tiles: int, units: int) -> float:
    """The share of multiprocessors that work, on average over the rounds that so many tiles take."""
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


def _tiled(p: Problem, target: runtime.Target) -> Iterator[MatmulConfig]:
    if not _on_matrix_unit(p):
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
    # As large as leaves few multiprocessors without a tile; else the smallest, and its sum is shared out.
    busy = [t for t in fitting if 4 * _programs(p, t) >= 3 * target.multiprocessors]
    for block_m, block_n, block_k, warps in (*busy, *reversed(fitting)):
        programs = _programs(p, (block_m, block_n, block_k, warps))
        split = _split(programs, library.cdiv(p.k, block_k), 4, target)
        if p.dtype == torch.float32 and _on_matrix_unit(p):
            block_k //= 2
        deep = _on_matrix_unit(p) and _vectors(p) and target.warp_size == 32
        for stages in (4, 3, 2) if deep else (2,):
            yield MatmulConfig("tiled", block_m, block_n // (1 + p.gated), block_k, 8, split, warps, stages)


def _programs(p: Problem, tile: tuple[int, int, int, int]) -> int:
    block_m, block_n = tile[0], tile[1] // (1 + p.gated)
    return p.batch * library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n)
