"""Which kernel of fp8_linear, and how it is launched."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from rooftile import library, runtime, tuning
from rooftile.ops.gemm import skinny, tiled
from rooftile.ops.gemm.choose import common_reason
from rooftile.ops.gemm.config import MatmulConfig, Operands, Problem

_KERNELS: dict[str, ModuleType] = {"skinny": skinny, "tiled": tiled, "hopper": tiled}


@functools.cache
def _promoted() -> ModuleType | None:
    """The module with the kernel for `pingpong`; None where this Triton has not what it is written in."""
    try:
        return importlib.import_module("rooftile.ops.gemm.hopper_fp8")
    except ImportError:
        return None


def _kernel(c: MatmulConfig) -> ModuleType | None:
    return _promoted() if c.kernel == "hopper" and c.pingpong else _KERNELS.get(c.kernel)


@functools.lru_cache(4096)
def can_implement(p: Problem, c: MatmulConfig, target: runtime.Target) -> str | None:
    """Why the configuration can't do this product; None where it can."""
    kernel = _kernel(c)
    if kernel is None:
        return f"it needs Gluon, which this Triton has not, for kernel {c.kernel!r} with pingpong"
    why: str | None = common_reason(c, target) or kernel.can_implement(p, c, target)
    if why is None:
        stages = c.num_stages * c.block_k * (c.block_m + c.block_n)
        if stages > target.shared_memory and c.num_stages > 1:
            why = f"its {c.num_stages} stages take {stages} bytes of shared memory, a block has {target.shared_memory}"
    return why


def _split(tiles: int, steps: int, programs: int, most: int) -> int:
    """How many programs share a tile's sum: so many that there are `programs`, each with at least four steps."""
    split = 1
    while split < most and tiles * split * 2 <= programs and steps // (2 * split) >= 4:
        split *= 2
    return split


def _skinny(p: Problem, target: runtime.Target) -> MatmulConfig:
    """Two or three programs a multiprocessor keep its loads under way. Measured on an H200, in us:

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
    # Steps of 256 where every multiprocessor has about one tile, but where scales belong to 128 elements.
    if roomy and few and p.aligned and not p.scaled_steps and 7 <= 10 * tiles // target.multiprocessors < 30:
        return MatmulConfig("skinny", block_m, block_n, 256, 1, 1, num_warps=4, num_stages=6)
    full = tiles >= 3 * target.multiprocessors
    if not few and full and p.scaled_steps:  # the weight's scales are read half as often: 38.2, not 41.9
        block_n = 128
    split = _split(tiles, steps, (2 if few else 1) * target.multiprocessors, most=4)
    stages = 4 if not roomy or (few and full) else 6
    return MatmulConfig("skinny", block_m, block_n, block_k, 1, split, num_warps=4, num_stages=stages)


def _tiled(p: Problem, target: runtime.Target) -> MatmulConfig:
    if not p.aligned:  # loads of single bytes, each with an address
        return MatmulConfig("tiled", 64, 64, 64, 8, 1, num_warps=8, num_stages=2)
    roomy = target.shared_memory >= 200_000
    block_m, block_n = 128, 128
    tiles = library.cdiv(p.m, block_m) * library.cdiv(p.n, block_n)
    split = _split(tiles, library.cdiv(p.k, 128), target.multiprocessors, most=8)
    return MatmulConfig("tiled", block_m, block_n, 128 if roomy else 64, 8, split, num_warps=8, num_stages=3)


def _hopper(p: Problem, target: runtime.Target) -> MatmulConfig:
    """Measured on an H200, in TF/s, at M = 2048 (4096->6144, 4096->28672, 14336->4096), 4096^3 and 8192^3:

    sums left in the matrix unit: 128x256 of 8 warps          1429 1451 1536 1446 1270
    promoted: 128x256, what is added overlaps (pingpong)      1280 1137 1350 1261 1147
              192x128 of 12 warps, the same                   1270 1180 1245 1206 1253
              128x128 of 4 warps, two programs at once        1097 1084 1146 1125 1087
    scales of 128 elements: 128x256, pingpong                 1186 1071 1197 1114 1048
                            192x128 of 12 warps, pingpong     1205 1131 1130 1038 1160
                            64x128 of 4 warps, two at once     754  766  790  735  770
    """
    steps = library.cdiv(p.k, 128)
    if p.fast and not p.scaled_steps and library.cdiv(p.m, 128) * library.cdiv(p.n, 256) >= target.multiprocessors:
        return MatmulConfig("hopper", 128, 256, 128, 16, 1, num_warps=8, num_stages=4)
    large = MatmulConfig("hopper", 192, 128, 128, 8, 1, num_warps=12, num_stages=5, pingpong=True)
    if library.cdiv(p.m, 192) * library.cdiv(p.n, 128) >= 8 * target.multiprocessors and not can_implement(
        p, large, target
    ):
        return large
    wide = MatmulConfig("hopper", 128, 256, 128, 8, 1, num_warps=8, num_stages=4, pingpong=True)
    tiles = library.cdiv(p.m, 128) * library.cdiv(p.n, 256)
    if 10 * tiles >= 7 * target.multiprocessors and not can_implement(p, wide, target):
        return wide
    block_m, stages = (64, 4) if p.scaled_steps else (128, 3)
    tiles = library.cdiv(p.m, block_m) * library.cdiv(p.n, 128)
    split = _split(tiles, steps, target.multiprocessors, most=8)
    return MatmulConfig("hopper", block_m, 128, 128, 8, split, num_warps=4, num_stages=stages)


@functools.lru_cache(4096)
def tuning_key(p: Problem) -> str:
    """The problem as a tuned table names it: rows rounded up to a power of two."""
    words = [f"m{library.power_of_two(max(1, p.m))} n{p.n} k{p.k}"]
    if p.scaled_steps:
        words.append("parts")
    elif p.fast:  # makes no difference to parts
        words.append("fast")
    if not p.aligned:
        words.append("unaligned")
    return " ".join(words)


def _tuned(p: Problem, target: runtime.Target) -> MatmulConfig | None:
    """What a measured table has for the problem, where it can be used."""
    if target is runtime.INTERPRETER:
        return None
    entry = tuning.lookup("fp8_linear", tuning_key(p), target)
    if entry is None:
        return None
    try:
        c = MatmulConfig(**entry)
    except (TypeError, ValueError):  # a table of another version, or one that somebody edited
        return None
    return None if c.kernel not in _KERNELS or can_implement(p, c, target) else c


@functools.lru_cache(4096)
def _by_size(p: Problem, target: runtime.Target) -> MatmulConfig:
    if target is runtime.INTERPRETER:  # few, large programs
        return MatmulConfig("tiled", 64, 64, 128, 8, 1, num_warps=4, num_stages=1)
    if p.m <= 64:
        return _skinny(p, target)
    if target.arch == "sm_90" and p.aligned:
        return _hopper(p, target)
    return _tiled(p, target)


def choose(p: Problem, target: runtime.Target) -> MatmulConfig:
    """From a measured table where there is one, else by its sizes."""
    return _tuned(p, target) or _by_size(p, target)


@functools.lru_cache(4096)
def checked(p: Problem, c: MatmulConfig, target: runtime.Target) -> MatmulConfig:
    """A configuration that was given, if its kernel can do this product with it."""
    if c.kernel not in _KERNELS:
        raise ValueError(f"fp8_linear: config has kernel {c.kernel!r}, expected one of {', '.join(_KERNELS)}")
    why = can_implement(p, c, target)
    if why is not None:
        raise ValueError(f"fp8_linear: config can't be used here: {why}")
    return c


def launch(o: Operands, c: MatmulConfig) -> None:
    kernel = _kernel(c)
    assert kernel is not None, "it was not refused"
    kernel.launch(o, c)
