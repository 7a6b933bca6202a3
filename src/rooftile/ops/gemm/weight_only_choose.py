"""The choice of a weight-only product's kernel and configuration, and which can't be launched."""

from __future__ import annotations

import dataclasses
import functools

import torch

from rooftile import library, runtime
from rooftile.ops.gemm import choose as product_choice
from rooftile.ops.gemm import gemv as row_product
from rooftile.ops.gemm import weight_only_config as configs
from rooftile.ops.gemm.config import Problem
from rooftile.ops.gemm.weight_only_config import WeightOnlyConfig, as_product
from rooftile.primitives import pdl

# Rows of x above which the weight is dequantised first. Llama-3-8B's prompts of 512 tokens on an H200 took 29.9 ms with
# int4 and 28.7 with int8 where every tile of 64 rows dequantises, and 15.8 and 17.2 so; 12.8 with a dense weight. What
# tiles take is nearly in proportion to the rows; where the two meet was not measured.
DENSE_ROWS = 128
_LONGEST = 32  # blocks that a warp of kernel "gemv_imma" multiplies


def can_implement(
    c: WeightOnlyConfig, group: int, dtype: torch.dtype, target: runtime.Target, k: int = 0, aligned: bool = True,
    *, m: int = 1, fp8: bool = False,
) -> str | None:  # fmt: skip
    """Why a product of m rows of x can't be launched so, or None.

    `group` is 0 for 8 bits, of which `fp8` says that they are no int8; `aligned`: whether rows of the weight begin at
    multiples of 16 bytes.
    """
    by_elements = c.kernel in ("gemv", "dense")
    if c.kernel == "gemv_imma" and group not in (0, 128):
        return f"kernel 'gemv_imma' takes groups of 128, not of {group}"
    if c.kernel == "gemv_imma" and c.block_k != (256 if group else 128):
        return f"block_k is {c.block_k}, expected {256 if group else 128} for kernel 'gemv_imma'"
    if group and by_elements and c.block_k < 32:
        return f"block_k is {c.block_k}, expected at least 32 for kernel '{c.kernel}' and a weight of 4 bits"
    if group and not by_elements and c.block_k != 2 * group:
        return f"block_k is {c.block_k}, expected {2 * group}, twice the group of {group}"
    if c.kernel in ("direct", "gemv_imma"):
        why = _refuses_gluon(c, dtype, target, k, aligned, fp8)
        why = why or (_refuses_direct(c, group) if c.kernel == "direct" else _refuses_digits(c, group, m, k, target))
        if why:
            return why
    if c.kernel == "dense":
        why = _refuses_dense(c, dtype, target)
        if why:
            return why
    if target is runtime.INTERPRETER and c.kernel != "gemv":
        return None
    if c.num_warps * target.warp_size > target.max_threads:
        return f"num_warps is {c.num_warps}, expected at most {target.max_threads // target.warp_size} on this GPU"
    if c.prefetch >= 0 and not pdl.supported(target):
        return f"prefetch is {c.prefetch}, expected -1: {target.arch} has no dependent launch"
    if c.kernel == "gemv":
        product = as_product(c, group)
        return row_product.can_implement(Problem(m, 1, k or product.block_k, dtype), product, target, 2 if group else 1)
    if c.kernel in ("direct", "gemv_imma", "dense"):
        return None
    if c.slices > c.num_warps and c.block_m == 1:
        # Triton 3.6 for sm_90: every such configuration gives other numbers, and none of two rows or more.
        return (
            f"slices is {c.slices} with num_warps={c.num_warps} and block_m=1: the compiler sums several blocks to a "
            "warp wrongly for one row"
        )
    buffers = max(1, c.num_stages - 1)
    packed = c.block_n * (c.block_k // 2 if group else c.block_k)
    most = buffers * c.slices * (packed + c.block_m * c.block_k * dtype.itemsize)
    if most > target.shared_memory:
        return f"its tiles take {most} bytes of shared memory, a block has {target.shared_memory} on this GPU"
    return None


def _refuses_dense(c: WeightOnlyConfig, dtype: torch.dtype, target: runtime.Target) -> str | None:
    if dtype == torch.float16:
        return "kernel 'dense' takes float32 and bfloat16, not float16: it might not hold a number times its scale"
    for name, only in (("split_k", 1), ("num_stages", 1), ("prefetch", -1)):
        if getattr(c, name) != only:
            return f"{name} is {getattr(c, name)}, expected {only} for kernel 'dense'"
    elements = c.block_n * c.block_k
    if elements > 128 * c.num_warps * target.warp_size:
        return f"block_n x block_k is {elements} elements for {c.num_warps} warps, more than 128 a thread"
    return None


def _refuses_gluon(
    c: WeightOnlyConfig, dtype: torch.dtype, target: runtime.Target, k: int, aligned: bool, fp8: bool
) -> str | None:
    """What "direct" and "gemv_imma" have in common."""
    if fp8:
        return f"kernel '{c.kernel}' takes weights of int8 and int4"
    if not target.arch.startswith("sm_"):
        return f"kernel '{c.kernel}' is for NVIDIA's GPUs, not {target.arch}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"kernel '{c.kernel}' takes float16 and bfloat16, not {dtype}"
    if k % c.block_k:
        return f"kernel '{c.kernel}' takes a K that is a multiple of block_k, not {k} with block_k={c.block_k}"
    if not aligned:
        return f"kernel '{c.kernel}' takes a weight whose rows begin at multiples of 16 bytes"
    if configs.module(c.kernel) is None:
        return f"kernel '{c.kernel}' is written in Gluon, which this Triton has not"
    return None


def _refuses_direct(c: WeightOnlyConfig, group: int) -> str | None:
    each = c.block_k // 2 if group else c.block_k
    if each < 32:
        return f"block_k is {c.block_k}, expected at least 32 for kernel 'direct'"
    # Words of the weight that a thread holds, and what becomes of those that it works on: a word of int4 is four of
    # 16-bit numbers, one of int8 two.
    words = c.block_n * c.slices * each // (4 * 32 * c.num_warps)
    held = words * (c.num_stages + (3 if group else 2)) + c.block_m * each // 64 * (2 if group else 1)
    if held > 256:
        return f"its tiles take some {held} registers a thread for kernel 'direct', expected at most 256"
    return None


def _refuses_digits(c: WeightOnlyConfig, group: int, m: int, k: int, target: runtime.Target) -> str | None:
    if m != 1:
        return f"kernel 'gemv_imma' takes one row of x, not {m}"
    if c.prefetch > 0:
        return f"prefetch is {c.prefetch}, expected -1 or 0 for kernel 'gemv_imma'"
    # All steps are code of their own.
    steps = library.cdiv(k // c.block_k, c.slices * c.split_k)
    if steps > _LONGEST:
        return f"slices x split_k is {c.slices * c.split_k}: a warp has {steps} blocks, at most {_LONGEST}"
    # Eight columns of a byte, and units in float32, for each number of x that a program multiplies, by rounds.
    blocks = 4 * c.num_warps
    rounds = library.cdiv(steps * c.slices * (2 if group else 1), blocks)
    most = rounds * blocks * (8 * 128 + 4) + 1024
    if most > target.shared_memory:
        return f"x's digits take {most} bytes of shared memory, a block has {target.shared_memory} on this GPU"
    # A block of the weight: 128 bytes of each row, of 4 numbers to a register.
    held = c.block_n * c.slices // c.num_warps * (c.num_stages + 2)
    if held > 128:
        return f"its tiles take some {held} registers a thread for kernel 'gemv_imma', expected at most 128"
    return None


def takes_dense(m: int, dtype: torch.dtype) -> bool:
    """Whether that many rows of x go to kernel "dense"."""
    return m > DENSE_ROWS and dtype == torch.bfloat16


@functools.cache
def config(
    m: int, n: int, k: int, group: int, dtype: torch.dtype, target: runtime.Target, aligned: bool = True,
    fp8: bool = False,
) -> WeightOnlyConfig:  # fmt: skip
    """The configuration for x of (m, k) and a weight of (n, k); `group`, `aligned` and `fp8` as for `can_implement`."""
    if takes_dense(m, dtype):
        return _dense(k, target)
    block_k = 2 * group or 128
    direct = None if fp8 or dtype == torch.float32 or target is runtime.INTERPRETER else _direct(m, n, group, target)
    if direct is not None and can_implement(direct, group, dtype, target, k, aligned) is not None:
        direct = None
    one_row = digits(n, k, group, dtype, target, aligned) if m == 1 and not fp8 else None
    if one_row is not None:
        return one_row
    if m == 1 and (_takes_row(n, group, fp8, target) or not (group or direct)):
        return _row(n, k, group, dtype, target)
    if target is runtime.INTERPRETER:
        block_m, block_n = (min(64, max(least, library.power_of_two(s))) for least, s in ((1, m), (16, n)))
        return WeightOnlyConfig(block_m, block_n, block_k, slices=2, num_warps=1, num_stages=1)
    if dtype == torch.float32:  # no matrix unit keeps float32: small tiles, for registers
        block_m = min(4, library.power_of_two(m))
        return WeightOnlyConfig(block_m, 16, 2 * group or 64, slices=4, num_warps=4, num_stages=2)
    if direct is not None:
        return direct
    return _skinny(m, n, k, group, target)


def _wide(n: int, target: runtime.Target) -> bool:
    """Whether a weight has tiles of 32 rows for four programs on every multiprocessor."""
    return n >= 32 * 4 * target.multiprocessors


def _takes_row(n: int, group: int, fp8: bool, target: runtime.Target) -> bool:
    """Whether one row of x that `digits` does not take goes to kernel "gemv": but where "direct" is at 0.95 of the read
    roof, wide weights of int8, and where "skinny" is at 0.72 to 0.89, wide ones of int4.

    Of 4096 x 4096 the others have 0.55 of it on an H200, as below, of int4 0.36, and this kernel in bfloat16 0.81; with
    8 and 4 bits it was measured in whole steps only.
    """
    return fp8 or (target.arch != "sm_90" and not group) or not _wide(n, target)


def _row(n: int, k: int, group: int, dtype: torch.dtype, target: runtime.Target) -> WeightOnlyConfig:
    if target is runtime.INTERPRETER:
        block_n, block_k = (min(most, max(16, library.power_of_two(max(1, s)))) for most, s in ((64, n), (128, k)))
        return WeightOnlyConfig(1, block_n, block_k, slices=1, num_warps=4, num_stages=1, kernel="gemv")
    if group:
        c = product_choice.rows_of_4_bits(Problem(1, n, k // 2, dtype), target)
        c = dataclasses.replace(c, block_k=2 * c.block_k)
    else:
        c = product_choice.rows_of_8_bits(Problem(1, n, k, dtype), target)
    # Of a long row as much is under way as it can be: without the prefetch 14336 -> 4096 was 14 us of 2430 ahead.
    early = (0 if k >= 8192 else 1) if pdl.supported(target) else -1
    return WeightOnlyConfig(
        1, c.block_n, c.block_k, slices=1, num_warps=c.num_warps, num_stages=1, prefetch=early, kernel="gemv"
    )


@functools.lru_cache(maxsize=4096)
def digits(
    n: int, k: int, group: int, dtype: torch.dtype, target: runtime.Target, aligned: bool = True, gated: bool = False
) -> WeightOnlyConfig | None:
    """How kernel "gemv_imma" is launched for a weight of (n, k), where it is the fastest for one row; with a gate n
    counts the rows of both. As for `config` else.

    Microseconds on an H200, each kernel behind 11 to 31 of its kind with weights of their own, bfloat16, groups of 128;
    with a norm but for K x 4096, the first gated:

                               digits    row
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
    if target.arch != "sm_90" or k < 1024 or (k >= 8192 and not group):
        return None
    blocks, programs, split = k // (2 * group or 128), 2 * target.multiprocessors, 1
    stages = 3
    if k >= 8192:  # shared out, so that no program makes the digits of all of x
        block_n, slices = 128, 1
        split = max(library.cdiv(blocks, _LONGEST), min(blocks // 4, programs // library.cdiv(n, block_n)), 1)
    elif n <= 16 * target.multiprocessors or (n <= 16 * programs and not group):
        block_n, slices = 16, 8
    elif n <= 16 * programs:  # in a whole step 20 us of 1550 ahead of twice as many programs, alone behind them
        block_n, slices = 32, 4
    elif n <= 32 * programs:
        block_n, slices, stages = (32, 8, 2) if group else (32, 4, 3)
    elif n < 65536 and blocks <= _LONGEST:
        block_n, slices, stages = 128, 1, 3 if gated else 2  # what the registers allow without a gate
    else:
        block_n, slices, stages = 64, 2, 2
    c = WeightOnlyConfig(
        1, block_n, 2 * group or 128, slices, split, num_warps=8, num_stages=stages, prefetch=0, kernel="gemv_imma"
    )
    return c if can_implement(c, group, dtype, target, k, aligned) is None else None


def _dense(k: int, target: runtime.Target) -> WeightOnlyConfig:
    """32 numbers a thread: 16 bytes of int4, and 64 that are written."""
    block_k = min(1024, max(32, library.power_of_two(k)))
    warps = 128 // target.warp_size
    return WeightOnlyConfig(1, 32 * 128 // block_k, block_k, 1, num_warps=warps, num_stages=1, kernel="dense")


def _direct(m: int, n: int, group: int, target: runtime.Target) -> WeightOnlyConfig | None:
    """The configuration of kernel "direct" where it was the faster of the two.

    Microseconds on an H200, bfloat16, groups of 128, K of 4096:

                             direct   skinny
        int8  N 28672  M 1    30.37    31.42
                       M 16   36.95    40.58
              N 4096   M 1     7.46     6.91
                       M 16    9.24     8.66
        int4  N 28672  M 1    19.78    19.17
                       M 16   27.39    29.65
              N 4096   M 1     5.69     5.28
                       M 16    7.43     8.08
    """
    if target.arch != "sm_90" or m > 16:
        return None
    if not group:
        if not _wide(n, target):
            return None
        if m <= 8:  # the matrix unit's tile has 8 columns, however few there are of x
            return WeightOnlyConfig(8, 16, 128, slices=2, num_warps=2, num_stages=1, kernel="direct")
        return WeightOnlyConfig(16, 128, 256, slices=1, num_warps=4, num_stages=1, kernel="direct")
    if m <= 8 or group != 128:
        return None
    if _wide(n, target):
        return WeightOnlyConfig(16, 32, 256, slices=1, num_warps=1, num_stages=1, kernel="direct")
    if n < 16 * target.multiprocessors:  # too few tiles: "skinny" shares them out
        return None
    return WeightOnlyConfig(16, 16, 256, slices=4, num_warps=4, num_stages=3, prefetch=1, kernel="direct")


def _skinny(m: int, n: int, k: int, group: int, target: runtime.Target) -> WeightOnlyConfig:
    block_m, block_k = library.power_of_two(m), 2 * group or 128
    if target.warp_size == 64:  # AMD's matrix unit has no side shorter than 16, and a block 64 KiB of shared memory
        # A tile of 64 rows would spill a few bytes of two warps.
        warps = 2 if block_m < 64 else 4
        return WeightOnlyConfig(min(64, max(16, block_m)), 32, block_k, slices=1, num_warps=warps, num_stages=2)
    # x fills the matrix unit: warps beside one another share it, where slices would each take their own.
    stages = 3 if target.shared_memory > 120_000 else 2
    wgmma = target.arch == "sm_90"  # others would hold a tile of 64 rows in more registers than there are
    if m > 64 and wgmma:
        return WeightOnlyConfig(64, 128, block_k, slices=1, num_warps=8, num_stages=2)
    if m > 32 and wgmma:
        return WeightOnlyConfig(64, 64, block_k, slices=1, num_warps=4, num_stages=stages)
    if m > 16:
        return WeightOnlyConfig(32, 32, block_k, slices=1, num_warps=2, num_stages=stages)
    # One block of K to a warp: for one row no more may be, see can_implement. Measured on an H200: two warps suffice
    # where tiles are many and steps long, else four; four stages only where the weight has 8 bits and x is short, else
    # three.
    wide = _wide(n, target)
    slices = 2 if wide and block_k >= 256 else 4 * max(1, 128 // block_k)
    block_n = 32 if wide and (group or m > 4) else 16
    stages = 4 if not group and m <= 4 else 3
    # And within what shared memory allows to two programs a multiprocessor, or else to one.
    room = target.shared_memory - 4096

    def step() -> int:
        return slices * (block_n * (block_k // 2 if group else block_k) + 2 * block_m * block_k)

    while stages > 2 and 2 * (stages - 1) * step() > room:
        stages -= 1
    while (stages - 1) * step() > room:
        block_m //= 2
    # Tiles that would leave multiprocessors without work are shared out.
    tiles, steps, split = library.cdiv(n, block_n), library.cdiv(k, slices * block_k), 1
    while tiles * split < target.multiprocessors and 2 * split <= steps and split < 8:
        split *= 2
    return WeightOnlyConfig(block_m, block_n, block_k, slices, split_k=split, num_warps=slices, num_stages=stages)
