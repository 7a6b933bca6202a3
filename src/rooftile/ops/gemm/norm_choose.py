"""Whether norm and product are one kernel, and how that is launched."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.ops.gemm import choose as product_choice
from rooftile.ops.gemm import gemv as row
from rooftile.ops.gemm import gemv_persistent as held
from rooftile.ops.gemm import skinny
from rooftile.ops.gemm.common import _aligned as is_aligned
from rooftile.ops.gemm.common import _layout as layout
from rooftile.ops.gemm.config import Kernel, MatmulConfig, Problem, decode

# Rows of x up to which one kernel is taken, and columns of the result for each multiprocessor above which it is taken
# for one row alone. On an H200 it needs for 3584 -> 3584 0.76 of the time of torch.compile's two with 1 row, 0.74 with
# 16, 0.79 with 32 and 1.13 with 64: x, four times as much, is normalised again by each program. For 3584 -> 18944, of
# which every multiprocessor has more than two tiles, it needs 0.90 with 1 row and 1.15 to 1.17 with 2 to 16.
_ROWS, _WIDE = 32, 64
# The gated product in a decoding step of Llama-3-8B, 4096 -> 14336, 8 rows: 1.0 us of 140 a layer ahead of two kernels.
_GATED_ROWS, _GATED_WIDE = 16, 128


def fused_rows(n: int, k: int, target: runtime.Target, gated: bool = False) -> int:
    """The most rows of x for which norm and product are one kernel, but for the one or two that kernel
    "gemv_persistent" takes
    whatever their columns; n counts those of the result."""
    rows, wide = (_GATED_ROWS, _GATED_WIDE) if gated else (_ROWS, _WIDE)
    return 1 if n > wide * target.multiprocessors else rows


def module(c: MatmulConfig) -> ModuleType | None:
    """The fused kernel that the configuration is for; None for those of the plain product."""
    return {"gemv": row, "gemv_persistent": held, "skinny": skinny}.get(c.kernel)


@functools.lru_cache(maxsize=4096)
def choose(
    m: int, n: int, k: int, dtype: torch.dtype, along_k: bool, target: runtime.Target, gated: bool = False
) -> MatmulConfig | None:
    """How the one kernel is launched for that problem; None where norm and product are two.

    `along_k`: whether the weight is contiguous along k.
    """
    if target is not runtime.INTERPRETER and m <= held.ROWS and along_k:
        p = Problem(m, n, k, dtype, gated=gated)
        for c in held.configs(p, target):
            if held.can_implement(p, c, target) is None:
                return c
    if m > fused_rows(n, k, target, gated):
        return None
    if target is runtime.INTERPRETER:
        # Few, large programs. The same whatever the layout, and for a gate that is computed apart, to the bit.
        block_m, block_n, block_k = (min(128, max(16, library.power_of_two(size))) for size in (m, n * (1 + gated), k))
        kernel: Kernel = "gemv" if m == 1 else "skinny"
        return MatmulConfig(kernel, block_m if m > 1 else 1, min(64, block_n), block_k, num_stages=1)
    # IEEE float32 is multiplied by the ordinary units: of several rows the tiled product makes better use of them.
    if dtype == torch.float32 and m > 1:
        return None
    p = Problem(m, n, k, dtype, gated=gated, norm=True)
    candidates = _rows(p, target) if m == 1 and (along_k or dtype == torch.float32) else _skinny(p, along_k, target)
    for c in candidates:
        found = module(c)
        if found is not None and found.can_implement(p, c, target) is None:
            return c
    return None


def chosen_quantized(op: str, x: Tensor, weight: Tensor, gated: bool, config: str) -> MatmulConfig | None:
    """The configuration of the one kernel for a weight of 8 bits or of packed int4, or None, where x has several rows.

    Its block_k counts what is stored of a row, of int4 bytes; that of a configuration which is given, elements.
    """
    m, n, k = x.numel() // x.shape[-1], weight.shape[0] // (1 + gated), weight.shape[1]
    packed = weight.dtype == torch.uint8
    target, asked = runtime.target(x.device), decode(config)
    if asked is None:
        return _choose_quantized(n, k, packed, target, gated) if m == 1 else None
    reason: str | None = None
    if asked.kernel != "gemv":
        reason = f"kernel is '{asked.kernel}', expected 'gemv' for a weight of 8 or 4 bits"
    elif packed and asked.block_k < 32:
        reason = f"block_k is {asked.block_k}, expected at least 32 for a weight of 4 bits"
    else:
        asked = dataclasses.replace(asked, block_k=asked.block_k // 2) if packed else asked
        p = Problem(m, n, k, x.dtype, gated=gated)
        reason = product_choice.shared_reason(p, asked, target) or row.can_implement(p, asked, target, 1 + packed)
    if reason is not None:
        raise ValueError(f"{op}: config can't be launched: {reason}")
    return asked


@functools.lru_cache(maxsize=4096)
def _choose_quantized(n: int, k: int, packed: bool, target: runtime.Target, gated: bool) -> MatmulConfig:
    """For rows of k bytes."""
    dtype = torch.bfloat16
    if target is runtime.INTERPRETER:
        c = choose(1, n, k, dtype, True, target, gated)
        assert c is not None, "one row is one kernel"
        return c
    if packed:
        return product_choice.rows_of_4_bits(Problem(1, n, k, dtype, gated=gated), target)
    return _rows_of_8_bits(n, k, target, gated)


def _rows_of_8_bits(n: int, k: int, target: runtime.Target, gated: bool) -> MatmulConfig:
    """64 bytes of the weight a thread, of four warps: 512 bytes of a row at a time where there are many programs, or
    where 1024 do not divide it, else 1024. `matmul.choose.rows_of_8_bits` is the same for a product without a norm.

    In a decoding step of Llama-3-8B with fp8 on an H200, 2490 us before: for the gated product 57 us ahead of as many
    bytes in half as many rows, for 4096 -> 6144 15 ahead of twice as large programs, for the vocabulary 3.
    """
    if gated:
        block_n, block_k = 8, 512  # of the gate, and as many of up
    elif n >= 65536 or (k % 512 == 0 and k % 1024):
        block_n, block_k = 16, 512
    else:
        block_n, block_k = 8, 1024
    return MatmulConfig("gemv", 1, block_n, block_k, 1, 1, 4 * 32 // target.warp_size, 1)


def _rows(p: Problem, target: runtime.Target) -> list[MatmulConfig]:
    """Loads straight to registers, four of 16 bytes a thread, and many small programs.

    In a decoding step of Llama-3-8B on an H200: for 4096 -> 6144 twice as large ones took 2.5 us off a layer of
    130, and for the vocabulary half as long a step took 6 us off 4100.
    """
    block_n, k_bytes, warps = 8, 1024, 4
    if not p.gated and p.n >= 65536:
        k_bytes, warps = 512, 2
    elif not p.gated and 4096 < p.n <= 8192:
        block_n, warps = 16, 8
    warps = warps * 32 // target.warp_size
    return [MatmulConfig("gemv", 1, block_n // (1 + p.gated), k_bytes // p.dtype.itemsize, 1, 1, warps, 1)]


def _skinny(p: Problem, along_k: bool, target: runtime.Target) -> list[MatmulConfig]:
    """64 rows of the weight, 256 bytes along each, in stages that leave room for two programs a multiprocessor.

    Where tiles leave multiprocessors idle, up to four programs share one's sum. A weight that is not contiguous along k
    is read along n, 256 bytes too; one whose rows are not aligned, element by element, in tiles that fit the registers.
    A gated tile has 64 rows of the gate and as many of up, or half of each where a stage of those leaves no room.
    """
    block_m = max(16, library.power_of_two(p.m))
    preferred = []
    if along_k and block_m == 16 and p.dtype.itemsize == 2 and p.k % 8 == 0 and target.shared_memory >= 200 << 10:
        rounds = library.cdiv(p.n, 64) / target.multiprocessors
        if p.gated:  # in a decoding step of Llama-3-8B four stages, which leave less room beside them, were slower
            preferred = [MatmulConfig("skinny", 16, 64, 128, 1, 1, 4, 3)]
        elif rounds <= 0.5 and p.k % 256 == 0:  # the best of 60 on an H200 for 3584 -> 3584, 2 % ahead of the next
            preferred = [MatmulConfig("skinny", 16, 64, 256, 1, 2, 4, 4)]
        elif rounds <= 1 and p.k % 256 == 0:  # 4096 -> 6144: 2.8 us of 140 a layer ahead of the above
            preferred = [MatmulConfig("skinny", 16, 64, 128, 1, 4, 4, 3)]
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
    return preferred + [MatmulConfig("skinny", block_m, block_n, block_k, 1, split, warps, stages) for stages in depths]


def _refuses(x: Tensor, weight: Tensor, activation: str, c: MatmulConfig, target: runtime.Target) -> str | None:
    gated = activation != ""
    m, n, k = x.numel() // x.shape[-1], weight.shape[0] // (1 + gated), x.shape[-1]
    found = module(c)
    if found is not None:
        p = Problem(m, n, k, x.dtype, gated=gated, norm=True)
        return product_choice.shared_reason(p, c, target) or found.can_implement(p, c, target)
    # The normalised x is laid out anew.
    aligned = k * x.element_size() % 16 == 0
    p = Problem(
        m, n, k, x.dtype, gated=gated, activation=activation,
        w_layout=layout(weight, "n"), x_aligned=aligned, w_aligned=is_aligned(weight),
    )  # fmt: skip
    return product_choice.can_implement(p, c, target)


def chosen(op: str, x: Tensor, weight: Tensor, activation: str, config: str) -> MatmulConfig | None:
    """The configuration of the one kernel, or None. Raises for one that was asked for and can't be launched."""
    target = runtime.target(x.device)
    asked = decode(config)
    if asked is None:
        gated = activation != ""
        m, k = x.numel() // x.shape[-1], x.shape[-1]
        along_k = weight.stride(1) == 1 or k == 1
        return choose(m, weight.shape[0] // (1 + gated), k, x.dtype, along_k, target, gated)
    reason = _refuses(x, weight, activation, asked, target)
    if reason is not None:
        raise ValueError(f"{op}: config can't be launched: {reason}")
    return asked if module(asked) else None
