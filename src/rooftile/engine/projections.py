"""The matrix products of a decoder, with what stands around them, for each way that weights are kept.

                dense; of one row of x    fp8                                                int8, int4
                all kinds
    product     one kernel, with the residual in it
    normed      one kernel                norm and quantise, product                         norm, product
    gated       one kernel                norm and quantise, product, silu_mul and quantise  norm, product, silu_mul
    into_cache  as normed, then RoPE with the writes into the cache; one kernel in all of one row of x

A dense product behind a norm may be two kernels, where x has many rows. In fp8 several rows of x are quantised, for the
matrix unit multiplies fp8 by fp8; one row is multiplied as it is.

A weight is quantised as it is filled in, some rows at a time: beside the quantised model there is never more than those
few rows in more bits. Later there is what products of many rows dequantise at a time (`weight_only/dense.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.gated import silu_mul_packed
from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.ops.gemm.linear import linear
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear, rms_norm_linear
from rooftile.ops.gemm.packing import GROUPS
from rooftile.ops.gemm.qkv_rope_cache import rms_norm_qkv_rope_cache
from rooftile.ops.gemm.weight_only import fp8_weight_linear, int4_linear, int8_linear, quantize_int4, quantize_int8
from rooftile.ops.kv_cache import rope_and_cache
from rooftile.ops.quantize_tensor import quantize_tensor
from rooftile.ops.rms_norm import rms_norm
from rooftile.quantize import Quantize

# Elements of a weight that are quantised at a time: 64 MiB for each of the float32 tensors that come up on the way.
_AT_A_TIME = 1 << 24
_BY_ROW = Quantize()  # float8_e4m3fn


# What is multiplied; what `gated` gives: in fp8 several rows are quantised, with their scales.
Activations = Tensor | tuple[Tensor, Tensor]


class Projection:
    """`x @ weight^T + bias`, with a weight of `(n, k)`, kept in one way or another. See the subclasses.

    It begins with memory alone; `fill` brings the weight, and `fill_bias` the bias. Results have the dtype of the
    stream (of `x`, where it is called alone).

    Args:
        n, k: rows and columns of the weight.
        bias: whether there is one.
        dtype: of the stream, and of a dense weight.
        device: where the weight lies.
    """

    kind: str

    def __init__(self, n: int, k: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        self.bias = torch.zeros(n, dtype=dtype, device=device) if bias else None
        self._tensors = self._empty(device)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Projection:
        """That weight and bias: kept as they are by `Dense`, else quantised."""
        product = cls(*weight.shape, bias=bias is not None, dtype=weight.dtype, device=weight.device)
        product.fill(0, weight)
        if bias is not None:
            product.fill_bias(0, bias)
        return product

    @property
    def nbytes(self) -> int:
        """What one step of decoding reads of it."""
        tensors = (*self._tensors, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.k} -> {self.n}{', bias' if self.bias is not None else ''})"

    @property
    def weight(self) -> Tensor:
        """As it is kept."""
        return self._tensors[0]

    def fill(self, first: int, rows: Tensor) -> None:
        """Set the rows of the weight from `first` on; they may be of any float dtype, on any device."""
        if rows.dim() != 2 or rows.shape[1] != self.k or not 0 <= first <= self.n - rows.shape[0]:
            raise ValueError(f"fill: rows {tuple(rows.shape)} from {first} on, expected to fit ({self.n}, {self.k})")
        for part in rows.split(max(1, _AT_A_TIME // max(1, self.k))):
            last = first + part.shape[0]
            for tensor, value in zip(self._tensors, self._encode(part.to(self.device)), strict=True):
                tensor[first:last].copy_(value)
            first = last

    def fill_bias(self, first: int, values: Tensor) -> None:
        """Set the bias from `first` on."""
        assert self.bias is not None, "the product has a bias"
        self.bias[first : first + values.shape[0]].copy_(values)

    # What a way to keep weights says of itself.

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Memory for the weight: tensors of n rows."""
        raise NotImplementedError

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows of the weight, as those tensors have them."""
        raise NotImplementedError

    # What a decoder does with it.

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        """`x @ weight^T + bias + residual`, `(..., n)` of `(..., k)`."""
        raise NotImplementedError

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """The product of `rms_norm(x)`."""
        return self(self._norm(x, norm_weight, eps))

    def into_cache(
        self, x: Tensor, norm_weight: Tensor, eps: float, cos: Tensor, sin: Tensor, **cache: Any
    ) -> Tensor:  # fmt: skip
        """`normed` of x `(b, k)` as q, k and v of a token of each of b sequences: k turned and v are written into the
        cache, and q turned is returned, `(b, 1, q_heads, head_dim)`. `cache` is what `rope_and_cache` takes of one."""
        if is_one_kernel(self, x.shape[0], cache["k_cache"].dtype):
            scale = self.scale if isinstance(self, Quantized) else None
            return rms_norm_qkv_rope_cache(
                x[:, None], norm_weight, self.weight, cos, sin, bias=self.bias, weight_scale=scale, eps=eps, **cache
            )
        heads, head_dim = cache["k_cache"].shape[-2:]
        qkv = self.normed(x, norm_weight, eps)[:, None].unflatten(-1, (-1, head_dim))
        q, k, v = qkv.split((qkv.shape[-2] - 2 * heads, heads, heads), dim=-2)
        return rope_and_cache(q, k, v, cos, sin, **cache)

    def gated(self, x: Tensor, norm_weight: Tensor, eps: float) -> Activations:
        """`silu(g) * u` of the product `[g | u]` of `rms_norm(x)`, as another product of the same kind takes it."""
        return self._gate(self.normed(x, norm_weight, eps))

    def _gate(self, gate_up: Tensor) -> Activations:
        return silu_mul_packed(gate_up)

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Activations:
        """Rounded once, as the dense products' own norm is."""
        return rms_norm(x, weight, eps=eps, rounding="none")


class Dense(Projection):
    """In the stream's dtype."""

    kind = "dense"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Projection:
        product = cls(0, weight.shape[1], bias=False, dtype=weight.dtype, device=weight.device)
        product.n, product.bias, product._tensors = weight.shape[0], bias, (weight,)
        return product

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.empty((self.n, self.k), dtype=self.dtype, device=device),)

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows,)

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "nothing dense is quantised"
        return linear(x, self.weight, self.bias, residual=residual)

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        return rms_norm_linear(x, norm_weight, self.weight, self.bias, eps=eps)

    def gated(self, x: Tensor, norm_weight: Tensor, eps: float) -> Activations:
        return rms_norm_gated_linear(x, norm_weight, self.weight, self.bias, eps=eps)


class Quantized(Projection):
    """In fewer bits, with scales. With one row of x norm, product and gate are one kernel."""

    @property
    def scale(self) -> Tensor:
        return self._tensors[1]

    def normed(self, x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        if not is_one_row(x):
            return super().normed(x, norm_weight, eps)
        return rms_norm_linear(x, norm_weight, self.weight, self.bias, weight_scale=self.scale, eps=eps)

    def gated(self, x: Tensor, norm_weight: Tensor, eps: float) -> Activations:
        if not is_one_row(x):
            return super().gated(x, norm_weight, eps)
        return rms_norm_gated_linear(x, norm_weight, self.weight, self.bias, weight_scale=self.scale, eps=eps)


def is_one_row(x: Tensor) -> bool:
    return x.shape[:-1].numel() == 1


def is_one_kernel(p: Projection, rows: int, cache: torch.dtype) -> bool:
    """Whether `into_cache` is, for so many rows of x and a cache of that dtype."""
    return rows == 1 and cache == p.dtype


class Fp8(Quantized):
    """In float8_e4m3fn with a scale for each row; x in it too, by row, where it has several rows."""

    kind = "fp8"

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return (
            torch.empty((self.n, self.k), dtype=torch.float8_e4m3fn, device=device),
            torch.empty((self.n, 1), dtype=torch.float32, device=device),
        )

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return quantize_tensor(rows, _BY_ROW)

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        scale = None
        if isinstance(x, tuple):
            x, scale = x
        elif is_one_row(x):
            return fp8_weight_linear(x, self.weight, self.scale, self.bias, residual=residual)
        return fp8_linear(
            x, self.weight, self.scale, x_scale=scale, bias=self.bias, residual=residual, out_dtype=self.dtype
        )

    def _gate(self, gate_up: Tensor) -> Activations:
        return silu_mul_packed(gate_up, quantize=_BY_ROW)

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Activations:
        return rms_norm(x, weight, eps=eps, rounding="none", quantize=_BY_ROW)


class Int8(Quantized):
    """In int8 with a scale for each row; x is not quantised."""

    kind = "int8"

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return (
            torch.empty((self.n, self.k), dtype=torch.int8, device=device),
            torch.empty(self.n, dtype=torch.float32, device=device),
        )

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return quantize_int8(rows)

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "x is not quantised"
        return int8_linear(x, self.weight, self.scale, self.bias, residual=residual)


class Int4(Quantized):
    """In int4 with a scale for each group of a row: of 128 columns, or where they don't divide it of 64 or 32.

    Scales have the stream's dtype, if that is bfloat16, which is half the bytes; float16 would lose the small ones.
    """

    kind = "int4"

    @staticmethod
    def group_of(k: int) -> int | None:
        """The group for that many columns; None where there is none."""
        return next((g for g in reversed(GROUPS) if k % g == 0), None)

    @property
    def group(self) -> int:
        group = self.group_of(self.k)
        if group is None:
            raise ValueError(f"int4: a weight has {self.k} columns, expected a multiple of 32")
        return group

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        scales = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        return (
            torch.empty((self.n, self.k // 2), dtype=torch.uint8, device=device),
            torch.empty((self.n, self.k // self.group), dtype=scales, device=device),
        )

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return quantize_int4(rows, self.group)

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "x is not quantised"
        return int4_linear(x, self.weight, self.scale, self.bias, residual=residual)


KINDS: dict[str | None, type[Projection]] = {None: Dense, "fp8": Fp8, "int8": Int8, "int4": Int4}


def kind_of(quantize: str | None, *, lm_head: bool = False) -> type[Projection]:
    """How weights are kept; lm_head has 8 bits where the others have 4: its errors go straight into the logits."""
    if quantize not in KINDS:
        raise ValueError(f"quantize is {quantize!r}, expected None, {', '.join(repr(k) for k in KINDS if k)}")
    return Int8 if lm_head and quantize == "int4" else KINDS[quantize]
