"""GEMMs of int8, fp8 and int4 weights, behind a norm too: which kernels, and in what tiles.

    one row of x            gemv; for int8 and int4 gemv_imma where it is faster
    up to 64 rows           skinny
    more rows               hopper on sm_90, elsewhere skinny
    more than 128 rows      dequantize where hopper does not, and a dense GEMM follows

Only one row has its norm within the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from rooftile import library, runtime
from rooftile.ops.gemm.choose_dense import filled, one_row
from rooftile.ops.gemm.choose_norm import interpreted_norm
from rooftile.ops.gemm.config import MOST_IMMA_BLOCKS, GemmConfig, Problem, rows_rounded
from rooftile.primitives import pdl

# Rows of x above which the weight is dequantized first. Llama-3-8B's prompts of 512 tokens on an H200 took 29.9 ms with
# int4 and 28.7 with int8 where every tile of 64 rows dequantizes, and 15.8 and 17.2 so; 12.8 with a dense weight. What
# tiles take is nearly in proportion to the rows; where the two meet was not measured.
DENSE_ROWS = 128
# And above which the Hopper kernel dequantizes it. Of 128 rows Llama-3-8B's four GEMMs of a layer took 161 us on an
# H100 with int8 and 186 with int4, and 404 and 329 with kernel "skinny". Not for so few columns that less than a
# quarter of the SMs have a tile: skinny splits the sum.
HOPPER_ROWS = 64


def of_quantized(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Configurations for such a problem without a norm, the preferred one first."""
    m, tiles = rows_rounded(p), library.cdiv(p.m, 128) * library.cdiv(p.n, 64)  # of the smallest of Hopper's
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


def of_quantized_norm(p: Problem, target: runtime.Target) -> Iterator[GemmConfig]:
    """Configurations for norm and GEMM in one kernel; none for more than one row of x."""
    if p.m > 1:
        return
    if p.w_layout == "k" and p.weight != "fp8":
        yield from _imma(p, target)
    if target is runtime.INTERPRETER:
        stored = p.k // 2 if p.group else p.k
        c = interpreted_norm(1, p.n * (1 + p.gated), stored)
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
    c = one_row(dataclasses.replace(p, dtype=torch.bfloat16), target)
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
        return speed * filled(count, target.multiprocessors) * asked

    for _, block_m, block_n, warps, stages in sorted(_HOPPER_QUANTIZED_TILES, key=worth, reverse=True):
        yield GemmConfig("hopper", block_m, block_n, 64, 8, 1, warps, stages)


# Speed where all SMs work, over that of the first: block_m, block_n, num_warps, num_stages. Measured on an H100 for
# 2048 rows of x and Llama-3-8B's weights in int8.
_HOPPER_QUANTIZED_TILES = (
    *((1.0, 256, 128, 8, 4), (0.89, 128, 256, 8, 5), (0.85, 128, 192, 12, 6)),
    *((0.83, 128, 128, 8, 8), (0.65, 128, 64, 4, 8)),
)


def _skinny_quantized(p: Problem, target: runtime.Target) -> GemmConfig:
    m, n, group = rows_rounded(p), p.n, p.group
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
