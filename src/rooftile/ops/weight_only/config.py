"""How a weight-only product is launched, and the choice of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType

import torch

from rooftile import library, runtime
from rooftile.ops.matmul import choose as product_choice
from rooftile.ops.matmul import row as row_product
from rooftile.ops.matmul.config import MatmulConfig, Problem
from rooftile.primitives import dependent

# Rows of x above which the weight is dequantised first. Llama-3-8B's prompts of 512 tokens on an H200 took 29.9 ms with
# int4 and 28.7 with int8 where every tile of 64 rows dequantises, and 15.8 and 17.2 so; 12.8 with a dense weight. What
# tiles take is nearly in proportion to the rows; where the two meet was not measured.
DENSE_ROWS = 128
KERNELS = ("skinny", "direct", "row", "dense")


@dataclasses.dataclass(frozen=True)
class WeightOnlyConfig:
    """How the kernel of `int8_linear`, `fp8_weight_linear` and `int4_linear` is launched.

    A program has `block_m` rows of x and `block_n` rows of the weight, and walks along K. It takes `slices` blocks of
    `block_k` elements at a time; where there are several, each warp sums blocks of its own, and the warps' sums are
    added at the end. So a program of 16 rows can have as many warps as its loads need to be in flight, and none of them
    does another's work.

    Kernel "skinny" brings its tiles through shared memory. Kernel "direct" (NVIDIA's GPUs, float16 and bfloat16, a K
    that is a multiple of `block_k`, int8 and int4) loads the weight into the registers that the matrix unit reads.
    Kernel "row" multiplies and sums without the matrix unit: one row of x. "dense" dequantises the weight to x's
    dtype, a tile of `block_n` rows and `block_k` elements to a program, and leaves the rest to `linear`'s product: many
    rows, and not in float16, which might not hold a number times its scale.

    Args:
        block_m, block_n: the tile: rows of x, rows of the weight. For "row" and "dense" block_m is 1.
        block_k: elements of a block; twice the group for int4, whose low nibbles are one group and high ones the next,
            but for "row" and "dense", which take any from 32 on.
        slices: blocks that a program takes at a time; 1, or a multiple of `num_warps`; for "direct" a divisor of it,
            for "row" and "dense" 1.
        split_k: how many programs share one tile's sum.
        num_warps, num_stages: warps of a program, and how deep its loads are pipelined; for "direct" how many steps'
            weights a thread holds.
        prefetch: -1 for an ordinary launch. From 0 on the kernel starts while the one before it still ends (for sm_90
            and later), and brings the weights of that many steps into the L2 until it may go on.
        kernel: "skinny", "direct", "row" or "dense".
    """

    block_m: int
    block_n: int
    block_k: int
    slices: int = 4
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    prefetch: int = -1
    kernel: str = "skinny"

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"WeightOnlyConfig: kernel is {self.kernel!r}, expected one of {', '.join(KERNELS)}")
        if not isinstance(self.prefetch, int) or isinstance(self.prefetch, bool) or self.prefetch < -1:
            raise ValueError(f"WeightOnlyConfig: prefetch is {self.prefetch!r}, expected -1 or a number of steps")
        for field in dataclasses.fields(self)[:-2]:
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"WeightOnlyConfig: {field.name} is {value!r}, expected a positive integer")
            if field.name not in ("split_k", "num_stages") and value & (value - 1):
                raise ValueError(f"WeightOnlyConfig: {field.name} is {value}, expected a power of two")
        for name in ("block_n", "block_k") if self.kernel in ("skinny", "direct") else ("block_k",):
            if getattr(self, name) < 16:
                raise ValueError(f"WeightOnlyConfig: {name} is {getattr(self, name)}, expected at least 16")
        if self.kernel == "direct":
            self._check_direct()
        elif self.kernel in ("row", "dense"):
            if (self.block_m, self.slices) != (1, 1):
                raise ValueError(
                    f"WeightOnlyConfig: block_m is {self.block_m} and slices {self.slices}, expected 1 and 1 for "
                    f"kernel '{self.kernel}'"
                )
        elif self.slices > 1 and self.slices % self.num_warps:
            raise ValueError(
                f"WeightOnlyConfig: slices is {self.slices}, expected 1 or a multiple of num_warps={self.num_warps}"
            )

    def _check_direct(self) -> None:
        if self.num_warps % self.slices:
            raise ValueError(
                f"WeightOnlyConfig: slices is {self.slices}, expected a divisor of num_warps={self.num_warps}"
            )
        least = 16 * self.num_warps // self.slices
        if self.block_n < least:
            raise ValueError(f"WeightOnlyConfig: block_n is {self.block_n}, expected {least}: 16 for each warp")
        if self.block_m < 8:
            raise ValueError(f"WeightOnlyConfig: block_m is {self.block_m}, expected at least 8")


@functools.cache
def module(kernel: str) -> ModuleType | None:
    """The module with that kernel; None where this Triton has not what it is written in (Gluon)."""
    try:
        return importlib.import_module(f"rooftile.ops.weight_only.{kernel}")
    except ImportError:
        if kernel != "direct":
            raise
        return None


@functools.cache
def encode(config: WeightOnlyConfig | None) -> str:
    """A configuration as the schema of an op takes it; "" for none."""
    return "" if config is None else ",".join(map(str, dataclasses.astuple(config)))


@functools.cache
def decode(text: str) -> WeightOnlyConfig | None:
    """The configuration that `encode` wrote."""
    if not text:
        return None
    names = [field.name for field in dataclasses.fields(WeightOnlyConfig)]
    *numbers, kernel = text.split(",")
    return WeightOnlyConfig(**dict(zip(names, map(int, numbers), strict=False)), kernel=kernel)


def refuses(
    c: WeightOnlyConfig, group: int, dtype: torch.dtype, target: runtime.Target, k: int = 0, aligned: bool = True,
    *, m: int = 1, fp8: bool = False,
) -> str | None:  # fmt: skip
    """Why a product of m rows of x can't be launched so, or None.

    `group` is 0 for 8 bits, of which `fp8` says that they are no int8; `aligned`: whether rows of the weight begin at
    multiples of 16 bytes.
    """
    by_elements = c.kernel in ("row", "dense")
    if group and by_elements and c.block_k < 32:
        return f"block_k is {c.block_k}, expected at least 32 for kernel '{c.kernel}' and a weight of 4 bits"
    if group and not by_elements and c.block_k != 2 * group:
        return f"block_k is {c.block_k}, expected {2 * group}, twice the group of {group}"
    if c.kernel == "direct":
        why = _refuses_direct(c, group, dtype, target, k, aligned, fp8)
        if why:
            return why
    if c.kernel == "dense":
        why = _refuses_dense(c, dtype, target)
        if why:
            return why
    if target is runtime.INTERPRETER and c.kernel != "row":
        return None
    if c.num_warps * target.warp_size > target.max_threads:
        return f"num_warps is {c.num_warps}, expected at most {target.max_threads // target.warp_size} on this GPU"
    if c.prefetch >= 0 and not dependent.supported(target):
        return f"prefetch is {c.prefetch}, expected -1: {target.arch} has no dependent launch"
    if c.kernel == "row":
        product = as_product(c, group)
        return row_product.refuses(Problem(m, 1, k or product.block_k, dtype), product, target, 2 if group else 1)
    if c.kernel in ("direct", "dense"):
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


def as_product(c: WeightOnlyConfig, group: int) -> MatmulConfig:
    """A configuration of "row" as that of the plain product's kernel, which it is; of int4 its block_k counts bytes."""
    block_k = c.block_k // 2 if group else c.block_k
    return MatmulConfig("row", 1, c.block_n, block_k, 1, c.split_k, c.num_warps, c.num_stages)


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


def _refuses_direct(
    c: WeightOnlyConfig, group: int, dtype: torch.dtype, target: runtime.Target, k: int, aligned: bool, fp8: bool
) -> str | None:
    if fp8:
        return "kernel 'direct' takes weights of int8 and int4"
    if not target.arch.startswith("sm_"):
        return f"kernel 'direct' is for NVIDIA's GPUs, not {target.arch}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"kernel 'direct' takes float16 and bfloat16, not {dtype}"
    if k % c.block_k:
        return f"kernel 'direct' takes a K that is a multiple of block_k, not {k} with block_k={c.block_k}"
    if not aligned:
        return "kernel 'direct' takes a weight whose rows begin at multiples of 16 bytes"
    if module(c.kernel) is None:
        return "kernel 'direct' is written in Gluon, which this Triton has not"
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


def takes_dense(m: int, dtype: torch.dtype) -> bool:
    """Whether that many rows of x go to kernel "dense"."""
    return m > DENSE_ROWS and dtype == torch.bfloat16


@functools.cache
def config(
    m: int, n: int, k: int, group: int, dtype: torch.dtype, target: runtime.Target, aligned: bool = True,
    fp8: bool = False,
) -> WeightOnlyConfig:  # fmt: skip
    """The configuration for x of (m, k) and a weight of (n, k); `group`, `aligned` and `fp8` as for `refuses`."""
    if takes_dense(m, dtype):
        return _dense(k, target)
    block_k = 2 * group or 128
    direct = None if fp8 or dtype == torch.float32 or target is runtime.INTERPRETER else _direct(m, n, group, target)
    if direct is not None and refuses(direct, group, dtype, target, k, aligned) is not None:
        direct = None
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
    """Whether one row of x goes to kernel "row": but where "direct" is at 0.95 of the read roof, wide weights of int8,
    and where "skinny" is at 0.72 to 0.89, wide ones of int4.

    Of 4096 x 4096 the others have 0.55 of it on an H200, as below, of int4 0.36, and this kernel in bfloat16 0.81; with
    8 and 4 bits it was measured in whole steps only.
    """
    return fp8 or (target.arch != "sm_90" and not group) or not _wide(n, target)


def _row(n: int, k: int, group: int, dtype: torch.dtype, target: runtime.Target) -> WeightOnlyConfig:
    if target is runtime.INTERPRETER:
        block_n, block_k = (min(most, max(16, library.power_of_two(max(1, s)))) for most, s in ((64, n), (128, k)))
        return WeightOnlyConfig(1, block_n, block_k, slices=1, num_warps=4, num_stages=1, kernel="row")
    if group:
        c = product_choice.rows_of_4_bits(Problem(1, n, k // 2, dtype), target)
        c = dataclasses.replace(c, block_k=2 * c.block_k)
    else:
        c = product_choice.rows_of_8_bits(Problem(1, n, k, dtype), target)
    # Of a long row as much is under way as it can be: without the prefetch 14336 -> 4096 was 14 us of 2430 ahead.
    early = (0 if k >= 8192 else 1) if dependent.supported(target) else -1
    return WeightOnlyConfig(
        1, c.block_n, c.block_k, slices=1, num_warps=c.num_warps, num_stages=1, prefetch=early, kernel="row"
    )


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
    # One block of K to a warp: for one row no more may be, see `refuses`. Measured on an H200: two warps suffice where
    # tiles are many and steps long, else four; four stages only where the weight has 8 bits and x is short, else three.
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
