"""How a weight-only product is launched."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType

from rooftile.ops.gemm.config import MatmulConfig

KERNELS = ("skinny", "direct", "gemv_imma", "gemv", "dense")
_MODULES = {
    "skinny": "weight_only_skinny",
    "direct": "weight_only_direct",
    "gemv_imma": "gemv_imma",
    "gemv": "gemv",
    "dense": "dequantize_weight",
}


@dataclasses.dataclass(frozen=True)
class WeightOnlyConfig:
    """How the kernel of `int8_linear`, `fp8_weight_linear` and `int4_linear` is launched.

    A program has `block_m` rows of x and `block_n` rows of the weight, and walks along K. It takes `slices` blocks of
    `block_k` elements at a time; where there are several, each warp sums blocks of its own, and the warps' sums are
    added at the end. So a program of 16 rows can have as many warps as its loads need to be in flight, and none of them
    does another's work.

    Kernel "skinny" brings its tiles through shared memory. Kernel "direct" (NVIDIA's GPUs, float16 and bfloat16, a K
    that is a multiple of `block_k`, int8 and int4) loads the weight into the registers that the matrix unit reads.
    Kernel "gemv_imma" (the same, of one row of x, and of int4 with groups of 128) multiplies x in three digits on the
    integer matrix unit. Kernel "gemv" multiplies and sums without the matrix unit: one row of x. "dense" dequantises
    the
    weight to x's dtype, a tile of `block_n` rows and `block_k` elements to a program, and leaves the rest to `linear`'s
    product: many rows, and not in float16, which might not hold a number times its scale.

    Args:
        block_m, block_n: the tile: rows of x, rows of the weight. For "gemv_imma", "gemv" and "dense" block_m is 1.
        block_k: elements of a block; twice the group for int4, whose low nibbles are one group and high ones the next,
            but for "gemv" and "dense", which take any from 32 on. For "gemv_imma" 128, and of int4 256.
        slices: blocks that a program takes at a time; 1, or a multiple of `num_warps`; for "direct" and "gemv_imma" a
            divisor of it, for "gemv" and "dense" 1.
        split_k: how many programs share one tile's
        sum.
        num_warps, num_stages: warps of a program, and how deep its loads are pipelined; for "direct" and "gemv_imma"
            how many steps' weights a thread holds.
        prefetch: -1 for an ordinary launch. From 0 on the kernel starts while the one before it still ends (for sm_90
            and later), and brings the weights of that many steps into the L2 until it may go on; "gemv_imma" loads
            those of the first `num_stages - 1` steps besides.
        kernel: "skinny", "direct", "gemv_imma", "gemv" or "dense".
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
        for name in ("block_k",) if self.kernel in ("gemv", "dense") else ("block_n", "block_k"):
            if getattr(self, name) < 16:
                raise ValueError(f"WeightOnlyConfig: {name} is {getattr(self, name)}, expected at least 16")
        if self.kernel in ("direct", "gemv_imma"):
            self._check_tiles_of_warps()
        elif self.kernel in ("gemv", "dense"):
            if (self.block_m, self.slices) != (1, 1):
                raise ValueError(
                    f"WeightOnlyConfig: block_m is {self.block_m} and slices {self.slices}, expected 1 and 1 for "
                    f"kernel '{self.kernel}'"
                )
        elif self.slices > 1 and self.slices % self.num_warps:
            raise ValueError(
                f"WeightOnlyConfig: slices is {self.slices}, expected 1 or a multiple of num_warps={self.num_warps}"
            )

    def _check_tiles_of_warps(self) -> None:
        if self.num_warps % self.slices:
            raise ValueError(
                f"WeightOnlyConfig: slices is {self.slices}, expected a divisor of num_warps={self.num_warps}"
            )
        least = 16 * self.num_warps // self.slices
        if self.block_n < least:
            raise ValueError(f"WeightOnlyConfig: block_n is {self.block_n}, expected {least}: 16 for each warp")
        if self.kernel == "gemv_imma":
            if self.block_m != 1:
                raise ValueError(f"WeightOnlyConfig: block_m is {self.block_m}, expected 1 for kernel 'gemv_imma'")
        elif self.block_m < 8:
            raise ValueError(f"WeightOnlyConfig: block_m is {self.block_m}, expected at least 8")


@functools.cache
def module(kernel: str) -> ModuleType | None:
    """The module with that kernel; None where this Triton has not what it is written in (Gluon)."""
    try:
        return importlib.import_module(f"rooftile.ops.gemm.{_MODULES[kernel]}")
    except (ImportError, AttributeError):  # the whole of Gluon, or a part of it
        if kernel not in ("direct", "gemv_imma"):
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


def as_product(c: WeightOnlyConfig, group: int) -> MatmulConfig:
    """A configuration of "gemv" as that of the plain kernel, which it is; for int4 its block_k counts bytes."""
    block_k = c.block_k // 2 if group else c.block_k
    return MatmulConfig("gemv", 1, c.block_n, block_k, 1, c.split_k, c.num_warps, c.num_stages)
