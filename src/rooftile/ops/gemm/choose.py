"""Which kernel computes a GEMM, and in what tiles: from a tuned table where it has an entry, else by regime.

    one row of x      gemv, gemv_persistent; for int8 and int4 weights gemv_imma
    up to 64 rows     skinny
    more rows         hopper on sm_90, elsewhere tiled; a quantized weight is dequantized first, or within hopper

Behind a norm `choose` gives the one kernel that does both, or None where the norm is a kernel of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from rooftile import library, runtime, tuning
from rooftile.ops.gemm import gemv_persistent
from rooftile.ops.gemm.config import MOST_IMMA_BLOCKS, GemmConfig, Kernel, Problem
from rooftile.primitives import pdl

# The module of each kernel, by what it multiplies.
_DENSE = {k: k for k in ("gemv", "skinny", "tiled", "hopper")}
_NORMED = {k: k for k in ("gemv", "gemv_persistent", "skinny")}
_QUANTIZED = {
    "gemv": "gemv", "gemv_imma": "gemv_imma", "skinny": "skinny_dequantize",
    "hopper": "hopper_dequantize", "dequantize": "dequantize",
}  # fmt: skip
_QUANTIZED_NORMED = {k: k for k in ("gemv", "gemv_imma")}
_FP8 = {"skinny": "skinny", "tiled": "tiled", "hopper": "tiled"}
_GLUON = ("hopper", "hopper_fp8", "hopper_dequantize", "gemv_imma")


def is_fp8(p: Problem) -> bool:
    """Whether both operands are fp8: `fp8_linear`."""
    return p.dtype.itemsize == 1


def is_quantized(p: Problem) -> bool:
    """Whether the weight alone is quantized."""
    return bool(p.weight) and not is_fp8(p)


def kernels(p: Problem) -> dict[str, str]:
    """The kernels that compute such a problem, with their modules' names."""
    if is_fp8(p):
        return _FP8
    if is_quantized(p):
        return _QUANTIZED_NORMED if p.norm else _QUANTIZED
    return _NORMED if p.norm else _DENSE


def _imported(name: str) -> ModuleType | None:
    name, is_gluon = f"rooftile.ops.gemm.{name}", name in _GLUON
    return runtime.gluon_module(name) if is_gluon else importlib.import_module(name)


def module(p: Problem, c: GemmConfig) -> ModuleType | None:
    """The module with that kernel; None where it has none for such a problem, or this Triton has no Gluon."""
    name = kernels(p).get(c.kernel)
    if is_fp8(p) and c.kernel == "hopper" and c.pingpong:
        name = "hopper_fp8"
    return None if name is None else _imported(name)


@functools.lru_cache(4096)
def can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """Why the problem can't be computed as c says; None where it can."""
    known = kernels(p)
    if c.kernel not in known:
        return f"kernel is '{c.kernel}', expected one of {', '.join(known)}"
    found = module(p, c)
    if found is None:
        return f"kernel '{c.kernel}' is written in Gluon, which this Triton has not"
    if p.k == 0 and c.kernel != "tiled" and not p.weight:
        return f"kernel is '{c.kernel}', expected 'tiled' where there is nothing to sum"
    why: str | None = _common_reason(p, c, target) or found.can_implement(p, c, target)
    return why


def _common_reason(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None:
    """What no kernel takes."""
    steps = library.cdiv(p.k, c.block_k)
    if not p.weight and c.split_k > max(8, steps):  # a few CTAs with nothing to do are only a waste
        return f"split_k is {c.split_k}: there are {steps} steps of {c.block_k}"
    if c.num_warps * target.warp_size > target.max_threads:
        most = target.max_threads // target.warp_size
        return f"num_warps is {c.num_warps}, of which {target.arch} runs {most} at most"
    stages = c.num_stages * c.block_k * (c.block_m + c.block_n)
    if is_fp8(p) and not c.pingpong and c.num_stages > 1 and stages > target.shared_memory:
        return f"its {c.num_stages} stages take {stages} bytes of shared memory, a CTA has {target.shared_memory}"
    for name in ("block_m", "num_warps"):
        value = getattr(c, name)
        if c.kernel != "hopper" and value & (value - 1):
            return f"{name} is {value}, expected a power of two"
    if c.kernel != "hopper" and c.pingpong:
        return "pingpong is True, which kernel 'hopper' alone has"
    if c.slices > 1 and not is_quantized(p):
        return f"slices is {c.slices}, expected 1 for a weight that is not quantized"
    if c.prefetch is not None and c.prefetch >= 0 and not pdl.supported(target):
        return f"prefetch is {c.prefetch}, expected -1: {target.arch} has no programmatic dependent launch"
    if c.prefetch is not None and c.kernel not in ("gemv", "gemv_imma") and not is_quantized(p):
        return f"prefetch is {c.prefetch}, expected None for kernel '{c.kernel}'"
    return None


def _rows_rounded(p: Problem) -> int:
    return library.power_of_two(max(1, p.m))


def tuning_key(p: Problem) -> tuple[str, str]:
    """The tuned table that has such problems, and the problem as it names it: with rows rounded to a power of two."""
    rows = _rows_rounded(p)
    if is_fp8(p):
        words = [f"m{rows} n{p.n} k{p.k}"]
        # Where scales belong to 128 elements, fast accumulation makes no difference.
        words += ["parts"] if p.scaled_steps else ["fast"] * p.fast
        return "fp8_linear", " ".join([*words, *["unaligned"] * (not p.aligned)])
    dtype = str(p.dtype).removeprefix("torch.")
    if p.weight:
        table = {"int8": "int8_linear", "int4": "int4_linear", "fp8": "fp8_weight_linear"}[p.weight]
        return table, " ".join([f"m{rows} n{p.n} k{p.k}", dtype, *[f"group{p.group}"] * bool(p.group)])
    rows = 16 if 1 < rows <= 16 else min(rows, 8192)  # 2 to 16 rows are one tile's
    words = [f"m{rows} n{p.n} k{p.k}", dtype, f"x{p.x_layout or '-'} w{p.w_layout or '-'}"]
    if p.batch != 1:
        words.append(f"batch{p.batch}")
    if p.gated:
        words.append("gated")
    if p.dtype == torch.float32 and p.precision != "ieee":
        words.append(p.precision)
    return "matmul", " ".join(words)


def _tuned(p: Problem, target: runtime.Target) -> GemmConfig | None:
    """What a tuned table has for the problem, if it can be launched."""
    if target is runtime.INTERPRETER or p.norm or _is_portable(p):
        return None
    entry: dict[str, Any] | None = tuning.lookup(*tuning_key(p), target)
    if entry is None:
        return None
    try:
        c = GemmConfig(**entry)
    except (TypeError, ValueError):  # somebody edited the table
        return None
    return None if can_implement(p, c, target) else c


@functools.lru_cache(4096)
def choose(p: Problem, target: runtime.Target) -> GemmConfig | None:
    """How the problem is computed on that target; None where it has a norm, and norm and GEMM are two kernels."""
    tuned = _tuned(p, target)
    if tuned is not None:
        return tuned
    for c in candidates(p, target):
        if can_implement(p, c, target) is None:
            return c
    return None if p.norm else GemmConfig("tiled", 16, 16, 16, num_warps=4, num_stages=1)


tuning.when_changed(choose.cache_clear)

# Rows of x that "invariant" is chosen for. Decoding has no more, and in larger tiles most of a step's weights would be
# read by few SMs.
_INVARIANT_ROWS = 64


@functools.lru_cache(4096)
def choose_invariant(p: Problem, target: runtime.Target) -> GemmConfig:
    """How the problem is computed with any number of rows of x.

    The kernel, its tile and its split of the sum are the same for all of them, so a row of the result does not depend
    on how many others there are, nor on its place among them.
    """
    assert not p.norm, "the norm is a kernel of its own"
    x_aligned = p.x_aligned and p.k * p.dtype.itemsize % 16 == 0  # a single row always is
    p = dataclasses.replace(
        p, m=_INVARIANT_ROWS, x_aligned=x_aligned, out_aligned=p.out_aligned and p.n * p.out_size % 16 == 0
    )
    sizes = [dataclasses.replace(p, m=m) for m in (1, _INVARIANT_ROWS, 1 << 20)]
    for c in candidates(p, target):
        if all(can_implement(size, c, target) is None for size in sizes):
            return c
    return GemmConfig("tiled", 16, 16, 16, num_warps=4, num_stages=1)


def candidates(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Configurations by regime, the preferred one first; the first that can be launched is taken."""
    if is_fp8(p):
        return _of_fp8(p, target)
    if is_quantized(p):
        return _of_quantized_norm(p, target) if p.norm else _of_quantized(p, target)
    if p.norm:
        return _of_norm(p, target)
    if target is runtime.INTERPRETER:
        return iter((_interpreted(p),))
    return _tiled(p, target) if _is_portable(p) else _of_dense(p, target)


def _is_portable(p: Problem) -> bool:
    """Whether the result has another dtype than x, which the portable kernel alone can write."""
    return not p.weight and p.out_dtype not in (None, p.dtype)


def _interpreted(p: Problem) -> GemmConfig:
    """Few, large CTAs; the same kernel whatever the layout, so that results are bit-identical."""
    block_m, block_n, block_k = (min(128, max(16, library.power_of_two(max(1, n)))) for n in (p.m, p.n, p.k))
    return GemmConfig("tiled", block_m, block_n, block_k, num_stages=1)


# Dense weights


def _of_dense(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    if p.k == 0:
        yield GemmConfig("tiled", 32, 32, 32, num_warps=4, num_stages=1)
        return
    along_k = p.batch == 1 and p.x_layout == "k" and p.w_layout == "k"
    if along_k and p.m == 1:
        yield _one_row(p, target)
    # On an H200 64 rows were 3 to 20 % faster so than in the skinny kernel, which reads x too often, and 32 rows of
    # 4096 -> 28672 6 % slower, perhaps because half of the tile of x is then beyond its end.
    if target.gluon and (p.m > 32 or not along_k):
        if min(p.m, p.n) <= 16 and p.dtype.itemsize == 2 and _vectors(p) and not p.gated:
            yield _thin(p, target)
        yield from _hopper(p, target)
    # Without tensor cores, as IEEE float32 is, their sides don't matter; without vectors a deep pipeline has no room.
    if along_k and p.m <= 64 and _on_tensor_cores(p) and _vectors(p) and target.warp_size == 32:
        yield from _skinny(p, target)
    yield from _tiled(p, target)


def _on_tensor_cores(p: Problem) -> bool:
    return p.dtype != torch.float32 or p.precision == "tf32"


def _split(tiles: int, total: int, steps: int, target: runtime.Target) -> int:
    """Programs that share a tile: as many as have `steps` of the `total` each, where SMs would be idle."""
    idle = target.multiprocessors // max(1, tiles)
    return max(1, min(8, idle, total // steps))


def _one_row(p: Problem, target: runtime.Target) -> GemmConfig:
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
            yield GemmConfig("skinny", block_m, 64, 128, 1, split, 4, 3)
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


def _shared(tiles: int, steps: int, target: runtime.Target) -> int:
    """Programs that share a tile: a power of two, up to one and a half for each SM, of 8 steps at least."""
    split = 1
    while 4 * split * tiles <= 3 * target.multiprocessors and steps >= 16 * split and split < 8:
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
        if not p.gated and p.k >= 8192 and 4 * tiles(64, 64) <= 3 * units:
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
        return speed * _filled(count, units) * asked

    known = (tile for tile in _HOPPER_TILES if not p.gated or tile[2] % 64 == 0)  # 48 is no width
    found = sorted(known, key=lambda tile: worth(*tile[:3]), reverse=True)
    for _, block_m, block_n, block_k, warps, stages, turns in found:
        yield GemmConfig("hopper", block_m, block_n // halved, block_k, 8, 1, warps, stages, pingpong=turns)


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


def _filled(tiles: int, units: int) -> float:
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


def _tiled(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
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


# Behind a norm

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


def _of_norm(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    along_k = p.w_layout == "k"
    if target is not runtime.INTERPRETER and p.m <= gemv_persistent.ROWS and along_k:
        yield from gemv_persistent.configs(p, target)
    if p.m > fused_rows(p.n, target, p.gated):
        return
    if target is runtime.INTERPRETER:
        yield _interpreted_norm(p.m, p.n * (1 + p.gated), p.k)
    elif p.m == 1 and (along_k or p.dtype == torch.float32):
        yield _one_row_of_norm(p, target)
    elif p.dtype != torch.float32:  # IEEE float32 has no tensor cores: of several rows the tiled kernel is faster
        yield from _skinny_of_norm(p, along_k, target)


def _interpreted_norm(m: int, n: int, k: int) -> GemmConfig:
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


# Quantized weights

# Rows of x above which the weight is dequantized first. Llama-3-8B's prompts of 512 tokens on an H200 took 29.9 ms with
# int4 and 28.7 with int8 where every tile of 64 rows dequantizes, and 15.8 and 17.2 so; 12.8 with a dense weight. What
# tiles take is nearly in proportion to the rows; where the two meet was not measured.
DENSE_ROWS = 128
# And above which the Hopper kernel dequantizes it. Of 128 rows Llama-3-8B's four GEMMs of a layer took 161 us on an
# H100 with int8 and 186 with int4, and 404 and 329 with kernel "skinny". Not for so few columns that less than a
# quarter of the SMs have a tile: skinny splits the sum.
HOPPER_ROWS = 64


def _of_quantized(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    m, tiles = _rows_rounded(p), library.cdiv(p.m, 128) * library.cdiv(p.n, 64)  # of the smallest of Hopper's
    if m > HOPPER_ROWS and target.gluon and 4 * tiles >= target.multiprocessors:
        yield from _hopper_quantized(p, target)
    if m > DENSE_ROWS and p.dtype == torch.bfloat16:
        yield _dequantize(p, target)
    if m == 1:
        if p.weight != "fp8":
            yield from _imma(p, target)
        yield _one_row_quantized(p, target)
    if target is runtime.INTERPRETER:
        block_m, block_n = (min(64, max(least, library.power_of_two(s))) for least, s in ((1, m), (16, p.n)))
        yield GemmConfig("skinny", block_m, block_n, 2 * p.group or 128, num_warps=1, num_stages=1, slices=2)
    elif p.dtype == torch.float32:  # no tensor core keeps float32: small tiles, for registers
        block_m, block_k = min(4, library.power_of_two(m)), 2 * p.group or 64
        yield GemmConfig("skinny", block_m, 16, block_k, num_warps=4, num_stages=2, slices=4)
    else:
        yield _skinny_quantized(p, target)


def _of_quantized_norm(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    if p.m > 1:
        return
    if p.w_layout == "k" and p.weight != "fp8":
        yield from _imma(p, target)
    if target is runtime.INTERPRETER:
        stored = p.k // 2 if p.group else p.k
        c = _interpreted_norm(1, p.n * (1 + p.gated), stored)
        yield dataclasses.replace(c, block_k=c.block_k * p.k // stored)
    elif p.group:
        yield _one_row_of_4_bits(p, target)
    else:
        yield _one_row_of_8_bits_and_norm(p, target)


def _wide(p: Problem, target: runtime.Target) -> bool:
    """Whether a weight has tiles of 32 rows for four CTAs on every SM."""
    return p.n >= 32 * 4 * target.multiprocessors


def _one_row_quantized(p: Problem, target: runtime.Target) -> GemmConfig:
    if target is runtime.INTERPRETER:
        block_n, block_k = (min(most, max(16, library.power_of_two(max(1, s)))) for most, s in ((64, p.n), (128, p.k)))
        return GemmConfig("gemv", 1, block_n, max(32, block_k) if p.group else block_k, 1, 1, 4, 1)
    c = _one_row_of_4_bits(p, target) if p.group else _one_row_of_8_bits(p, target)
    # Of a long row as much is under way as it can be: without the prefetch 14336 -> 4096 was 14 us of 2430 faster.
    early = (0 if p.k >= 8192 else 1) if pdl.supported(target) else -1
    return dataclasses.replace(c, prefetch=early)


def _one_row_of_8_bits(p: Problem, target: runtime.Target) -> GemmConfig:
    """As many bytes a CTA and a thread as with 16 bits: steps twice as long, or where only those of 16 bits divide k,
    twice the rows."""
    if p.n < 16384 and p.k >= 8192:  # 14336 -> 4096 on an H200: 12 us of a step's 2430 less than with twice the rows
        return GemmConfig("gemv", 1, 4, 2048, 1, 1, 4 * 32 // target.warp_size, 1)
    c = _one_row(dataclasses.replace(p, dtype=torch.bfloat16), target)
    if p.k % c.block_k == 0 and p.k % (2 * c.block_k):
        return dataclasses.replace(c, block_n=2 * c.block_n)
    return dataclasses.replace(c, block_k=2 * c.block_k)


def _one_row_of_8_bits_and_norm(p: Problem, target: runtime.Target) -> GemmConfig:
    """64 bytes of the weight a thread, of four warps: 512 bytes of a row at a time where there are many CTAs, or where
    1024 do not divide it, else 1024.

    In a decoding step of Llama-3-8B with fp8 on an H200, 2490 us before: for the gated GEMM 57 us less than as many
    bytes in half as many rows, for 4096 -> 6144 15 less than CTAs of twice the size, for the vocabulary 3.
    """
    if p.gated:
        block_n, block_k = 8, 512  # of the gate, and as many of up
    elif p.n >= 65536 or (p.k % 512 == 0 and p.k % 1024):
        block_n, block_k = 16, 512
    else:
        block_n, block_k = 8, 1024
    return GemmConfig("gemv", 1, block_n, block_k, 1, 1, 4 * 32 // target.warp_size, 1)


def _one_row_of_4_bits(p: Problem, target: runtime.Target) -> GemmConfig:
    """64 bytes a thread, which are 128 elements, in steps of 512 bytes of a row, 1024 without a gate, or 256 where
    those do not divide it.

    In a decoding step of Llama-3-8B on an H200, 2022 us, the gated GEMM took 19 us more with twice as many rows of half
    such steps, 155 with half as many of twice such steps, 72 with half of either rows and threads; 14336 -> 4096 took
    38 more with half as many rows of twice such steps, 132 with half such steps and threads.
    """
    stored = next((b for b in ((512,) if p.gated else (1024, 512)) if p.k // 2 % b == 0), 256)
    block_n = 8192 // stored // (1 + p.gated)
    return GemmConfig("gemv", 1, block_n, 2 * stored, 1, 1, 4 * 32 // target.warp_size, 1)


def _imma(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Kernel "gemv_imma", where it is the fastest for one row.

    Microseconds on an H200, each kernel after 11 to 31 of its kind with other weights, bfloat16, groups of 128;
    with a norm but for K x 4096, the first gated:

                            gemv_imma   gemv
        int4  28672 x  4096     16.7    24.2
               6144 x  4096      5.2     8.4
               4096 x  4096      3.5     5.5
               4096 x 14336      9.5    15.9
        int8 128256 x  4096    125.4   126.4
              28672 x  4096     31.5    34.1
               6144 x  4096      7.9     9.0
               4096 x  4096      4.9     6.5
               4096 x 14336     16.9    16.3
    """
    n = p.n * (1 + p.gated)
    if not target.gluon or p.k < 1024 or (p.k >= 8192 and not p.group):
        return
    block_k, stages, split = 2 * p.group or 128, 3, 1
    blocks, ctas = p.k // block_k, 2 * target.multiprocessors
    if p.k >= 8192:  # shared out, so that no CTA makes the digits of all of x
        block_n, slices = 128, 1
        split = max(library.cdiv(blocks, MOST_IMMA_BLOCKS), min(blocks // 4, ctas // library.cdiv(n, block_n)), 1)
    elif n <= 16 * target.multiprocessors or (n <= 16 * ctas and not p.group):
        block_n, slices = 16, 8
    elif n <= 16 * ctas:  # in a whole step 20 us of 1550 less than twice as many CTAs; alone it was slower than those
        block_n, slices = 32, 4
    elif n <= 32 * ctas:
        block_n, slices, stages = (32, 8, 2) if p.group else (32, 4, 3)
    elif n < 65536 and blocks <= MOST_IMMA_BLOCKS:
        block_n, slices, stages = 128, 1, 3 if p.gated else 2  # what the registers allow without a gate
    else:
        block_n, slices, stages = 64, 2, 2
    yield GemmConfig(
        "gemv_imma", 1, block_n, block_k, split_k=split, num_warps=8, num_stages=stages, slices=slices, prefetch=0
    )


def _dequantize(p: Problem, target: runtime.Target) -> GemmConfig:
    """32 elements a thread: 16 bytes of int4, and 64 that are written."""
    block_k = min(1024, max(32, library.power_of_two(p.k)))
    return GemmConfig("dequantize", 1, 32 * 128 // block_k, block_k, num_warps=128 // target.warp_size, num_stages=1)


def _hopper_quantized(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """The tile with the largest speed, times the share of SMs that work, times the share of their work asked for."""

    def worth(tile: tuple[float, int, int, int, int]) -> float:
        speed, block_m, block_n = tile[:3]
        count = library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n)
        asked = p.m * p.n / max(1, count * block_m * block_n)
        return speed * _filled(count, target.multiprocessors) * asked

    for _, block_m, block_n, warps, stages in sorted(_HOPPER_QUANTIZED_TILES, key=worth, reverse=True):
        yield GemmConfig("hopper", block_m, block_n, 64, 8, 1, warps, stages)


# Speed where all SMs work, over that of the first: block_m, block_n, num_warps, num_stages. Measured on an H100 for
# 2048 rows of x and Llama-3-8B's weights in int8.
_HOPPER_QUANTIZED_TILES = (
    *((1.0, 256, 128, 8, 4), (0.89, 128, 256, 8, 5), (0.85, 128, 192, 12, 6)),
    *((0.83, 128, 128, 8, 8), (0.65, 128, 64, 4, 8)),
)


def _skinny_quantized(p: Problem, target: runtime.Target) -> GemmConfig:
    m, n, group = _rows_rounded(p), p.n, p.group
    block_m, block_k = library.power_of_two(m), 2 * group or 128
    if target.warp_size == 64:  # AMD's matrix core has no side shorter than 16, and a block has 64 KiB of shared memory
        # A tile of 64 rows would spill a few bytes of two warps.
        warps = 2 if block_m < 64 else 4
        return GemmConfig("skinny", min(64, max(16, block_m)), 32, block_k, num_warps=warps, num_stages=2)
    # x fills the tensor core: adjacent warps share it, where each slice would load its own.
    stages = 3 if target.shared_memory > 120_000 else 2
    wgmma = target.arch == "sm_90"  # others would hold a tile of 64 rows in more registers than there are
    if m > 64 and wgmma:
        return GemmConfig("skinny", 64, 128, block_k, num_warps=8, num_stages=2)
    if m > 32 and wgmma:
        return GemmConfig("skinny", 64, 64, block_k, num_warps=4, num_stages=stages)
    if m > 16:
        return GemmConfig("skinny", 32, 32, block_k, num_warps=2, num_stages=stages)
    # One block of K to a warp: for one row no more may be, see can_implement. Measured on an H200: two warps suffice
    # where tiles are many and steps long, else four; four stages only where the weight has 8 bits and x is short, else
    # three.
    wide = _wide(p, target)
    slices = 2 if wide and block_k >= 256 else 4 * max(1, 128 // block_k)
    block_n = 32 if wide and (group or m > 4) else 16
    stages = 4 if not group and m <= 4 else 3
    if wide and p.weight == "int8" and wgmma:
        # Of 309 on an H100, 4096 -> 28672 with a cold L2: 53.2 us for 53.9 with 4 rows, 54.2 for 56.4 with 8, 56.3 for
        # 59.5 with 16.
        slices, stages = 4 if m <= 4 else 2, 2
    # And within what shared memory allows to two programs an SM, or else to one.
    room = target.shared_memory - 4096

    def step() -> int:
        return slices * (block_n * (block_k // 2 if group else block_k) + 2 * block_m * block_k)

    while stages > 2 and 2 * (stages - 1) * step() > room:
        stages -= 1
    while (stages - 1) * step() > room:
        block_m //= 2
    # Split-K where the tiles would leave SMs without work.
    tiles, steps, split = library.cdiv(n, block_n), library.cdiv(p.k, slices * block_k), 1
    while tiles * split < target.multiprocessors and 2 * split <= steps and split < 8:
        split *= 2
    return GemmConfig(
        "skinny", block_m, block_n, block_k, split_k=split, num_warps=slices, num_stages=stages, slices=slices
    )  # fmt: skip


# fp8: both operands


def _of_fp8(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
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
