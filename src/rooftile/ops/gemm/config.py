"""What a GEMM is, how its kernel is launched, and the operands that the launch gets."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

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


WeightFormat = Literal["", "int8", "fp8", "int4"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One GEMM, `out[m, n] = sum over k of x[m, k] * w[n, k]`, as far as the choice of its kernel goes.

    Args:
        m, n, k: the sizes, in elements, of int4 too. `n` counts columns of the output: a gated GEMM has 2n weight rows.
        dtype: of x, and of the weight where it is dense. float8_e4m3fn for `fp8_linear`.
        batch: how many GEMMs of that size.
        gated, activation: the epilogue; `activation` is "" for none.
        precision: how float32 operands are multiplied.
        x_layout, w_layout: which dimension of an operand is contiguous: "k", "m" (x) or "n" (w), or "" for none.
        x_aligned, w_aligned, out_aligned: whether the base and the other strides are multiples of 16 bytes, as the
            tensor memory accelerator (TMA) needs.
        norm: whether x is normalised first.
        weight: how the elements of a quantized weight are stored; "" for a dense one.
        group: how many elements of a row of an int4 weight share a scale.
        scaled_steps: of `fp8_linear`, whether a scale belongs to 128 elements of the sum.
        fast: of `fp8_linear`, whether the sum stays in the tensor core.
        out_dtype: of the result; None for x's.
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
    out_aligned: bool = True
    norm: bool = False
    weight: WeightFormat = ""
    group: int = 0
    scaled_steps: bool = False
    fast: bool = False
    out_dtype: torch.dtype | None = None

    @property
    def aligned(self) -> bool:
        """Whether both operands are."""
        return self.x_aligned and self.w_aligned

    @property
    def out_size(self) -> int:
        """Bytes of an element of the result."""
        return (self.out_dtype or self.dtype).itemsize


@dataclasses.dataclass(slots=True, eq=False)
class Operands:
    """What a kernel's `launch` gets beside its configuration; all tensors on one device.

    A kernel's module has two functions:

        can_implement(p: Problem, c: Config, target: runtime.Target) -> str | None
            why this kernel can't compute p as c says; None where it can
        launch(o: Operands, c: Config) -> None
            write `o.out`; c is one that `can_implement` takes. Raises `launching.Untraceable`, before it allocates
            anything, where the operands are traced and the launch can't be part of the graph

    `p.k` and `c.block_k` count elements, of int4 too.

    Args:
        x: `(M, K)` with a last stride of 1 for every kernel but "tiled" and "hopper", or `(B, M, K)` for "tiled".
        w: `(N, K)`, `(2N, K)` gated, `(N, K / 2)` uint8 for int4; batched as x.
        out: `(M, N)` with a last stride of 1.
        bias: `(N,)` or `(2N,)`, contiguous.
        residual: of out's shape, with a last stride of 1.
        norm_weight: `(K,)`, contiguous; None without a norm.
        x_scale: float32 scales of an fp8 x: `(1,)` for the tensor, `(M, 1)` for rows, `(M, K / 128)` for groups.
        weight_scale: `(N,)` or `(2N,)` for int8 and fp8 weights, `(N, K / group)` for int4; `fp8_linear` has `(1,)`,
            `(N, 1)`, or `(N / 128, K / 128)` for blocks.
        eps, offset: of the norm.
        activation: "" for none; the gate's where `gated`.
        precision: "ieee" or "tf32", of float32 operands.
        x_kind, w_kind: what shares a scale in `fp8_linear`: "tensor", "row", "group" (x) or "block" (weight).
        fast: of `fp8_linear`, whether the sum stays in the tensor core.
    """

    x: Tensor
    w: Tensor
    out: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    activation: str = ""
    gated: bool = False
    precision: str = "ieee"
    x_kind: str = ""
    w_kind: str = ""
    fast: bool = False
