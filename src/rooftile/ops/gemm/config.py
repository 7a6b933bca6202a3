"""What a product is, and how its kernel is launched: the two things that the choice of a kernel is about."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch

Activation = Literal["silu", "gelu", "gelu_tanh"]
Kernel = Literal["gemv", "gemv_persistent", "skinny", "tiled", "hopper"]
KERNELS: tuple[Kernel, ...] = ("gemv", "gemv_persistent", "skinny", "tiled", "hopper")
Precision = Literal["ieee", "tf32"]
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")
_WIDTHS = (96, 160, 192, 224)  # that "hopper" takes besides powers of two


@dataclasses.dataclass(frozen=True)
class MatmulConfig:
    """How the kernel of a product is launched.

    Args:
        kernel: `"gemv"`, multiply and sum, for one row of x; `"gemv_persistent"`, the same for up to two, that stay
            in registers while whole rows of the weight pass: block_m at least the rows of x, block_k at least K,
            split_k 1,
            num_stages 1, or 2 for the next tile's loads ahead of this one's sums; `"skinny"`, weights on the side of
            the matrix unit that is 64 wide, for up to 64 rows; `"tiled"`, any size, any strides, any GPU; `"hopper"`,
            persistent, copies by the tensor memory accelerator, for sm_90.
        block_m, block_n, block_k: the tile: rows of x, rows of the weight, elements of the sum. Powers of two, but
            for `"hopper"` block_m may be 192, and block_n 96, 160, 192 or 224.
        group_m: how many tiles of rows are walked before the next tile of columns, so that both stay in the L2.
        split_k: how many programs share one tile's sum.
        num_warps, num_stages: warps of a program, and how deep its loads are pipelined.
        pingpong: `"hopper"` alone: a tile belongs to four of the eight warps, and while they write out one, the other
            four multiply the next.
        stream_k: `"hopper"` alone: the tiles of a wave that is not full are cut into equal shares of steps, one for
            each multiprocessor.
    """

    kernel: Kernel
    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    pingpong: bool = False
    stream_k: bool = False

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"MatmulConfig: kernel is {self.kernel!r}, expected one of {', '.join(KERNELS)}")
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"MatmulConfig: {field.name} is {value!r}, expected True or False")
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"MatmulConfig: {field.name} is {value!r}, expected a positive integer")
        for name in ("block_n", "block_k"):
            value = getattr(self, name)
            also = _WIDTHS if name == "block_n" and self.kernel == "hopper" else ()
            if value & (value - 1) and value not in also:
                or_else = f", or one of {', '.join(map(str, also))}" if also else ""
                raise ValueError(f"MatmulConfig: {name} is {value}, expected a power of two{or_else}")


@functools.cache
def encode(config: MatmulConfig | None) -> str:
    """A configuration as the schema of an op takes it; "" for none."""
    if config is None:
        return ""
    kernel, *sizes = dataclasses.astuple(config)
    return ",".join([kernel, *(str(int(size)) for size in sizes)])


@functools.cache
def decode(text: str) -> MatmulConfig | None:
    """The configuration that `encode` wrote."""
    if not text:
        return None
    kernel, *sizes = text.split(",")
    fields = dataclasses.fields(MatmulConfig)[1:]
    given = {
        field.name: bool(int(size)) if isinstance(field.default, bool) else int(size)
        for field, size in zip(fields, sizes, strict=True)
    }
    return MatmulConfig(kernel, **given)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One product, `out[m, n] = sum over k of x[m, k] * w[n, k]`, as far as the choice of its kernel goes.

    `n` counts columns of the output: a gated product has 2n rows of weights. `x_layout` and `w_layout` say which of an
    operand's dimensions is contiguous: "k", "m" (x) or "n" (w), or "" where none is. `x_aligned` and `w_aligned` say
    whether its base and its other strides are multiples of 16 bytes, as the tensor memory accelerator needs.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    batch: int = 1
    gated: bool = False
    activation: str = ""
    precision: Precision = "ieee"
    x_layout: str = "k"
    w_layout: str = "k"
    x_aligned: bool = True
    w_aligned: bool = True
