"""The search space of a GEMM: a grid for each kernel, and its likely part."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator

from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig, Problem
from rooftile.runtime import Target


def _powers(low: int, high: int) -> list[int]:
    return [1 << i for i in range(low.bit_length() - 1, high.bit_length())]


def _grid(kernel: str, **fields: Iterable[int | bool]) -> list[GemmConfig]:
    every = itertools.product(*fields.values())
    return [GemmConfig(kernel, **dict(zip(fields, values, strict=True))) for values in every]  # type: ignore[arg-type]


def _tiles(p: Problem, c: GemmConfig) -> int:
    rows = 1 if c.kernel == "gemv" else c.block_m
    return p.batch * math.ceil(p.m / rows) * math.ceil(p.n / c.block_n)


@functools.cache
def _row_grid() -> list[GemmConfig]:
    return _grid(
        "gemv",
        block_m=[1],
        block_n=_powers(1, 64),
        block_k=_powers(128, 4096),
        group_m=[1],
        split_k=[1],
        num_warps=[2, 4, 8],
        num_stages=[1, 2, 3, 4, 6],
    )


@functools.cache
def _skinny_grid(block_m: int) -> list[GemmConfig]:
    return _grid(
        "skinny",
        block_m=[block_m],
        block_n=[32, 64, 128, 256],
        block_k=[32, 64, 128, 256, 512],
        group_m=[1],
        split_k=[1, 2, 3, 4, 6, 8],
        num_warps=[4, 8],
        num_stages=[2, 3, 4, 5, 6, 8],
    )


@functools.cache
def _tiled_grid() -> list[GemmConfig]:
    return _grid(
        "tiled",
        block_m=_powers(16, 256),
        block_n=[32, 64, 128, 256],
        block_k=[32, 64, 128],
        group_m=[4, 8, 16],
        split_k=[1, 2, 3, 4, 6, 8],
        num_warps=[4, 8],
        num_stages=[2, 3, 4, 5, 6],
    )


@functools.cache
def _hopper_grid() -> list[GemmConfig]:
    both = functools.partial(
        _grid,
        "hopper",
        block_n=[32, 64, 96, 128, 160, 192, 224, 256],
        block_k=[32, 64, 128],
        group_m=[4, 8, 16],
        split_k=[1],
        num_stages=[2, 3, 4, 5, 6, 7, 8],
    )
    return [
        *both(block_m=[64, 128, 256], num_warps=[4, 8], pingpong=[False, True]),
        *both(block_m=[192], num_warps=[12]),
    ]


def _grids(p: Problem, target: Target) -> Iterator[list[GemmConfig]]:
    if p.m == 1:
        yield _row_grid()
    if p.m <= 64:
        yield _skinny_grid(max(16, 1 << (p.m - 1).bit_length()))
    yield _tiled_grid()
    if target.arch == "sm_90":
        yield _hopper_grid()


def _useless(p: Problem, c: GemmConfig, target: Target) -> bool:
    """Whether another configuration is always better: this one splits K although the tiles keep all SMs busy."""
    return c.kernel == "tiled" and c.split_k > 1 and _tiles(p, c) >= 2 * target.multiprocessors


# Tried by default: configurations within some 5 % of the best of a few hundred of their kernel, for any of
# Llama-3-8B's GEMMs on an H200. block_n, block_k, num_warps, num_stages, or block_m before them.
_ROW = (
    *((16, 1024, 8, 1), (16, 512, 8, 1), (8, 512, 4, 1), (8, 256, 2, 1), (16, 256, 4, 1), (4, 2048, 4, 1)),
    *((2, 2048, 2, 1), (4, 1024, 2, 1), (4, 1024, 4, 1), (8, 512, 2, 1), (16, 512, 8, 4), (8, 1024, 4, 4)),
    *((8, 512, 4, 4), (32, 256, 8, 1)),
)
_SKINNY = (
    *((64, 128, 4, 6), (64, 256, 4, 4), (64, 128, 4, 4), (64, 128, 4, 3)),
    *((128, 128, 4, 4), (128, 128, 8, 4), (64, 64, 4, 6)),
)
_HOPPER = (
    *((128, 256, 64, 8, 4), (128, 128, 64, 8, 6), (256, 128, 64, 8, 4), (128, 128, 64, 8, 4), (128, 64, 64, 8, 6)),
    *((64, 32, 128, 4, 8), (64, 64, 128, 4, 6), (64, 128, 128, 4, 4), (64, 128, 64, 4, 6), (64, 256, 64, 4, 4)),
)
# Between powers of two, where they may come closer to one tile for each SM.
_BETWEEN = (
    *((128, 160, 64, 8, 6), (128, 192, 64, 8, 5), (128, 224, 64, 8, 4), (256, 160, 64, 8, 4)),
    *((192, 128, 64, 12, 5), (64, 96, 64, 4, 8), (64, 160, 64, 4, 7), (64, 192, 64, 4, 6)),
)
_PINGPONG = ((128, 128, 64, 8, 6), (64, 256, 64, 8, 5), (64, 128, 64, 8, 7))
_TILED = (
    *((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (64, 128, 64, 4, 4)),
    *((64, 64, 64, 4, 4), (32, 64, 64, 4, 4), (16, 64, 128, 4, 4), (16, 64, 64, 4, 4)),
)


def _likely(p: Problem, target: Target) -> Iterator[list[GemmConfig]]:
    """The same, of the kernels that were the fastest for such a problem."""
    units = target.multiprocessors

    def some(
        kernel: str, m: int, n: int, k: int, warps: int, stages: int, *, pingpong: bool = False
    ) -> Iterator[GemmConfig]:
        if kernel == "hopper" and p.gated and n % 64:  # half of it is no width
            return
        n = n // (1 + p.gated) if kernel in ("hopper", "tiled") else n
        warps = max(1, warps * 32 // target.warp_size)
        tiles = p.batch * math.ceil(p.m / m) * math.ceil(p.n / n)
        for split in {"gemv": (1,), "skinny": (1, 2, 4), "hopper": (1,)}.get(kernel, (1, 2, 3, 4)):
            if split == 1 or (tiles < 2 * units and tiles * split <= 4 * units and p.k >= 4 * k * split):
                deep = kernel == "hopper" and p.m > 8 * m and m * n >= 128 * 128
                for group in (8, 4, 16) if deep and split == 1 else (1 if kernel in ("gemv", "skinny") else 8,):
                    yield GemmConfig(kernel, m, n, k, group, split, warps, stages, pingpong)  # type: ignore[arg-type]

    def every(kernel: str, rows: Iterable[tuple[int, ...]], *m: int) -> list[GemmConfig]:
        return [c for row in rows for c in some(kernel, *m, *row)]

    if p.m == 1:
        yield every("gemv", _ROW, 1)
    if p.m <= 64:
        yield every("skinny", _SKINNY, max(16, 1 << (p.m - 1).bit_length()))
    if target.arch == "sm_90" and (p.m > 16 or (p.x_layout, p.w_layout) != ("k", "k")):
        pingpong = [c for row in _PINGPONG for c in some("hopper", *row, pingpong=True) if p.m > 64]
        yield [*every("hopper", [h for h in (*_HOPPER, *_BETWEEN) if h[0] < 2 * max(p.m, 64)]), *pingpong]
    yield every("tiled", [t for t in _TILED if t[0] < 2 * max(p.m, 16)])


def matmul_space(p: Problem, target: Target, exhaustive: bool) -> list[GemmConfig]:
    """The configurations that can run the GEMM, alternating between kernels."""
    grids = _grids(p, target) if exhaustive or target.arch == "interpreter" else _likely(p, target)
    by_kernel: list[list[GemmConfig]] = []
    for grid in grids:
        found = [c for c in grid if not _useless(p, c, target) and choose.can_implement(p, c, target) is None]
        by_kernel.append(found[:2] if target.arch == "interpreter" and not exhaustive else found)
    others = [found for found in by_kernel[:-1] if found]
    if others and target.arch == "sm_90" and not exhaustive:  # where the portable kernel was never the best
        by_kernel = others
    return [c for turn in itertools.zip_longest(*by_kernel) for c in turn if c is not None]
