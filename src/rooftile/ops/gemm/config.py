"""What a GEMM is, how its kernel is launched, and the operands that the launch gets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rooftile import library

Activation = Literal["silu", "gelu", "gelu_tanh"]
Kernel = Literal["gemv", "gemv_persistent", "gemv_imma", "skinny", "tiled", "hopper", "dequantize"]
KERNELS: tuple[Kernel, ...] = (
    "gemv", "gemv_persistent", "gemv_imma", "skinny", "tiled", "hopper", "dequantize"
)  # fmt: skip
Precision = Literal["ieee", "tf32"]
MOST_IMMA_BLOCKS = 32  # blocks of K that a warp of kernel "gemv_imma" multiplies: all its steps are code of their own
PRECISIONS: tuple[Precision, ...] = ("ieee", "tf32")
_WIDTHS = (96, 160, 192, 224)  # that "hopper" takes besides powers of two
_UNSET = -2  # how a prefetch of None is encoded
Invariant = Literal["invariant"]
INVARIANT = (-1,)  # how "invariant" is encoded


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """How the kernel of a GEMM is launched.

    Kernels of one row of x: `"gemv"` multiplies and sums without tensor cores. `"gemv_persistent"` does so for up to
    two rows, which stay in registers while whole rows of the weight pass: block_k is at least K. `"gemv_imma"` (NVIDIA,
    weights of int8, and of int4 in groups of 128) multiplies x in three digits on the integer tensor cores.

    Kernels of more rows: `"skinny"`, for up to 64, has the weight on the side of the tensor core that is 64 wide.
    `"tiled"` takes any size, any strides and any GPU. `"hopper"` (sm_90) is persistent and copies by TMA. It
    dequantizes a quantized weight in registers, in steps of 64 elements, with 64 or 128 rows of it for each 4 warps.
    `"dequantize"` writes a quantized weight in x's dtype, and a dense GEMM follows.

    Args:
        kernel: one of those.
        block_m, block_n, block_k: the tile: rows of x, rows of the weight, elements of the sum. block_n and block_k are
            powers of two, but for `"hopper"` block_n may be 96, 160, 192 or 224, and block_m 192. For an int4 weight
            `"skinny"` and `"gemv_imma"` need a block_k of twice the group.
        group_m: how many tiles of rows are walked before the next tile of columns, so that both stay in the L2.
        split_k: how many CTAs share one tile's sum.
        num_warps, num_stages: warps of a CTA, and how deep its loads are pipelined.
        pingpong: `"hopper"` alone: a tile belongs to four of the eight warps, and while they write out one, the other
            four multiply the next.
        slices: `"gemv_imma"`, and `"skinny"` of quantized weights: how many blocks of block_k elements a CTA takes at a
            time. Each warp sums blocks of its own, and the warps' sums are added at the end.
        prefetch: `"gemv"`, `"gemv_imma"`, and `"skinny"` of quantized weights: -1 for an ordinary launch. From 0 on the
            kernel starts while the previous one still ends (sm_90 and later), and brings the weights of that many steps
            into the L2 until it may go on. None is the kernel's own choice.
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
    slices: int = 1
    prefetch: int | None = None
    encoded: ClassVar[tuple[int, ...]]  # of an instance, as the schema of an op takes it

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(f"GemmConfig: kernel is {self.kernel!r}, expected one of {', '.join(KERNELS)}")
        for name in ("block_m", "block_n", "block_k", "group_m", "split_k", "num_warps", "num_stages", "slices"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"GemmConfig: {name} is {value!r}, expected a positive integer")
        if not isinstance(self.pingpong, bool):
            raise ValueError(f"GemmConfig: pingpong is {self.pingpong!r}, expected True or False")
        prefetch = self.prefetch
        if prefetch is not None and (not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < -1):
            raise ValueError(f"GemmConfig: prefetch is {prefetch!r}, expected -1, a number of steps or None")
        for name in ("block_n", "block_k", "slices"):
            value = getattr(self, name)
            also = _WIDTHS if name == "block_n" and self.kernel == "hopper" else ()
            if value & (value - 1) and value not in also:
                or_else = f", or one of {', '.join(map(str, also))}" if also else ""
                raise ValueError(f"GemmConfig: {name} is {value}, expected a power of two{or_else}")
        self._check_slices()
        numbers = (int(getattr(self, f.name)) for f in dataclasses.fields(self)[1:-1])
        object.__setattr__(
            self, "encoded", (KERNELS.index(self.kernel), *numbers, _UNSET if prefetch is None else prefetch)
        )

    def _check_slices(self) -> None:
        if self.kernel == "gemv_imma":
            if self.num_warps % self.slices:
                raise ValueError(
                    f"GemmConfig: slices is {self.slices}, expected a divisor of num_warps={self.num_warps}"
                )
            least = 16 * self.num_warps // self.slices
            if self.block_n < least:
                raise ValueError(f"GemmConfig: block_n is {self.block_n}, expected {least}: 16 for each warp")
        elif self.slices > 1 and self.kernel != "skinny":
            raise ValueError(f"GemmConfig: slices is {self.slices}, expected 1 for kernel '{self.kernel}'")
        elif self.slices > 1 and self.slices % self.num_warps:
            raise ValueError(
                f"GemmConfig: slices is {self.slices}, expected 1 or a multiple of num_warps={self.num_warps}"
            )


@functools.cache
def _decoded(numbers: tuple[int, ...]) -> GemmConfig:
    kernel, *values, prefetch = numbers
    names = (field.name for field in dataclasses.fields(GemmConfig)[1:-1])
    given: dict[str, Any] = {name: bool(v) if name == "pingpong" else v for name, v in zip(names, values, strict=True)}
    return GemmConfig(KERNELS[kernel], **given, prefetch=None if prefetch == _UNSET else prefetch)


def decode(numbers: Sequence[int]) -> GemmConfig | None:
    """The configuration that `GemmConfig.encoded` is; None for none, and for "invariant"."""
    return _decoded(tuple(numbers)) if numbers and tuple(numbers) != INVARIANT else None


# A bound kernel: called with x, w, out, bias, residual, norm_weight, x_scale and weight_scale, of which the last five
# may be None, of the dtypes, shapes, strides and alignment that it was bound for. Where it was bound with more_x and
# more_w, these two follow.
Start = Callable[..., None]
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
        offsets: whether those also share an offset.
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
    offsets: bool = False

    @property
    def aligned(self) -> bool:
        """Whether both operands are."""
        return self.x_aligned and self.w_aligned

    @property
    def out_size(self) -> int:
        """Bytes of an element of the result."""
        return (self.out_dtype or self.dtype).itemsize


def rows_rounded(p: Problem) -> int:
    """Rows of x, rounded up to a power of two."""
    return library.power_of_two(max(1, p.m))


@dataclasses.dataclass(slots=True, eq=False)
class Operands:
    """What a kernel gets beside its configuration; all tensors are on one device.

    A kernel's module has two functions:

        can_implement(p: Problem, c: GemmConfig, target: runtime.Target) -> str | None
            why this kernel can't compute p as c says; None where it can
        prepare(o: Operands, c: GemmConfig) -> Start
            the kernel, bound for such operands, none of which is kept; c is one that `can_implement` takes. Raises
            `launching.Untraceable` where the operands are traced and the launch can't be part of the graph. Kernels
            whose launch depends on more than the operands have `launch(o, c)` in its place

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
        more_x, more_w: `(M, R)` and `(N, R)`, for a dense weight, no gate and no batch: "tiled" and "hopper" add
            `more_x @ more_w^T` to the sum, before it is rounded. Each start takes them after `weight_scale`.
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
    more_x: Tensor | None = None
    more_w: Tensor | None = None
