"""The projections of a decoder (its GEMMs), with what is fused around them, for each format of the weights.

                dense, and every          fp8, several rows                               int8 and int4, several rows
                format with one row
    call        one kernel, with the residual, in every format
    normed      one kernel                norm + quantize, GEMM                           norm, GEMM
    gated       one kernel                norm + quantize, GEMM, silu_mul + quantize      norm, GEMM, silu_mul
    into_cache  `normed`, then RoPE and the cache write in one kernel; with one row, one kernel in all

`normed` and `gated` of dense weights may be two kernels where x has many rows. In fp8, several rows of x are quantized,
because the tensor cores multiply fp8 by fp8; a single row is multiplied as it is.

A weight is quantized while it is loaded, some rows at a time, so the unquantized weights never exist as a whole. In a
prompt of many rows, int8 and int4 weights are dequantized a part at a time, or on sm_90 within the GEMM (`ops/gemm`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.engine.column_order import order_columns
from rooftile.ops.gated import gelu_mul_packed, silu_mul_packed
from rooftile.ops.gemm.config import Activation, Invariant
from rooftile.ops.gemm.fp8_linear import fp8_linear
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear, rms_norm_linear
from rooftile.ops.gemm.packing import GROUPS
from rooftile.ops.gemm.qkv_rope_cache import rms_norm_qkv_rope_cache
from rooftile.ops.gemm.weight_only import fp8_weight_linear, int4_linear, int8_linear, quantize_int4, quantize_int8
from rooftile.ops.kv_cache import rope_and_cache
from rooftile.ops.quantize_tensor import quantize_tensor
from rooftile.ops.rms_norm import rms_norm
from rooftile.quantize import BLOCK, Quantize

# Elements of a weight that are quantized at a time: each float32 temporary takes 64 MiB.
_AT_A_TIME = 1 << 24
_BY_ROW = Quantize()  # float8_e4m3fn
_BY_GROUP = Quantize(per="group", group_size=BLOCK)


# What a projection multiplies, and what `gated` returns: in fp8, several rows are quantized and come with their scales.
Activations = Tensor | tuple[Tensor, Tensor]


class Projection:
    """`x @ weight^T + bias` with a weight of `(n, k)`; each subclass is a format of the weight.

    The constructor allocates memory; `fill` writes the weight into it and `fill_bias` the bias. Results have the dtype
    of the hidden states.

    Args:
        n, k: rows and columns of the weight.
        bias: whether there is one.
        dtype: of the hidden states, and of a dense weight.
        device: of the weight.

    Attributes:
        config: "invariant" for GEMMs that compute a row of x in one way, whatever the other rows are; else None.
    """

    kind: str
    config: Invariant | None = None

    def __init__(self, n: int, k: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        self.bias = torch.zeros(n, dtype=dtype, device=device) if bias else None
        self._tensors = self._empty(device)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Projection:
        """A projection with that weight and bias: `Dense` keeps them as they are, the others quantize the weight."""
        made = cls(*weight.shape, bias=bias is not None, dtype=weight.dtype, device=weight.device)
        made.fill(0, weight)
        if bias is not None:
            made.fill_bias(0, bias)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that a decoding step reads of it."""
        tensors = (*self._tensors, self.bias)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def invariant(self) -> Projection:
        """The same weight, with that `config`."""
        made = copy.copy(self)
        made.config = "invariant"
        return made

    @property
    def fuses(self) -> bool:
        """Whether few rows of x have kernels that hold a norm, and what follows, besides the GEMM."""
        return self.config is None

    @property
    def device(self) -> torch.device:
        return self._tensors[0].device

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.k} -> {self.n}{', bias' if self.bias is not None else ''})"

    @property
    def weight(self) -> Tensor:
        """In its own format."""
        return self._tensors[0]

    def fill(self, first: int, rows: Tensor) -> None:
        """Write rows of the weight, starting at row `first`. They may have any float dtype, on any device."""
        if rows.dim() != 2 or rows.shape[1] != self.k or not 0 <= first <= self.n - rows.shape[0]:
            raise ValueError(f"fill: rows {tuple(rows.shape)} from {first} on, expected to fit ({self.n}, {self.k})")
        for part in rows.split(max(1, _AT_A_TIME // max(1, self.k))):
            last = first + part.shape[0]
            for tensor, value in zip(self._tensors, self._encode(part.to(self.device)), strict=True):
                tensor[first:last].copy_(value)
            first = last

    def fill_bias(self, first: int, values: Tensor) -> None:
        """Write a part of the bias, starting at element `first`."""
        assert self.bias is not None, "the projection has a bias"
        self.bias[first : first + values.shape[0]].copy_(values)

    # What each format defines.

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        """Uninitialized tensors of n rows for the weight."""
        raise NotImplementedError

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows of the weight in the format of those tensors."""
        raise NotImplementedError

    # What a decoder calls.

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        """`x @ weight^T + bias + residual`, `(..., n)` of `(..., k)`."""
        raise NotImplementedError

    def normed(self, x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
        """The projection of `rms_norm(x)`, or of x where there is no weight."""
        return self(x if norm_weight is None else self._norm(x, norm_weight, eps))

    def into_cache(
        self, x: Tensor, norm_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, **cache: Any
    ) -> Tensor:  # fmt: skip
        """`normed` of x `(b * T, k)`, T tokens of each of b sequences, as their q, k and v.

        Writes the rotated k and v into the cache and returns the rotated q, `(b, T, q_heads, head_dim)`. `cache` holds
        `rope_and_cache`'s arguments that describe a cache.
        """
        heads, head_dim = cache["k_cache"].shape[-2:]
        whole = cos.shape[-1] == head_dim  # heads are rotated
        if norm_weight is not None and whole and is_one_kernel(self, x.shape[0], cache["k_cache"].dtype):
            scale = self.scale if isinstance(self, Quantized) else None
            return rms_norm_qkv_rope_cache(
                x[:, None], norm_weight, self.weight, cos, sin, bias=self.bias, weight_scale=scale, eps=eps, **cache
            )
        qkv = self.normed(x, norm_weight, eps).view(cache["starts"].shape[0], -1, self.n // head_dim, head_dim)
        q, k, v = qkv.split((qkv.shape[-2] - 2 * heads, heads, heads), dim=-2)
        return rope_and_cache(q, k, v, cos, sin, rotary_dim=cos.shape[-1], **cache)

    def gated(
        self, x: Tensor, norm_weight: Tensor | None, eps: float, activation: Activation = "silu"
    ) -> Activations:  # fmt: skip
        """`act(g) * u` of `normed`, `[g | u]`, as a projection of the same format takes it."""
        return self._gate(self.normed(x, norm_weight, eps), activation)

    def _gate(self, gate_up: Tensor, activation: Activation) -> Activations:
        return silu_mul_packed(gate_up) if activation == "silu" else gelu_mul_packed(gate_up, activation=activation)

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Activations:
        """Rounded once, as the norm inside the dense kernels is."""
        return rms_norm(x, weight, eps=eps, rounding="none")


class Dense(Projection):
    """In the dtype of the hidden states."""

    kind = "dense"

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None) -> Projection:
        made = cls(0, weight.shape[1], bias=False, dtype=weight.dtype, device=weight.device)
        made.n, made.bias, made._tensors = weight.shape[0], bias, (weight,)
        return made

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.empty((self.n, self.k), dtype=self.dtype, device=device),)

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return (rows,)

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "a dense projection takes unquantized activations"
        return linear(x, self.weight, self.bias, residual=residual, config=self.config)

    def normed(self, x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
        if norm_weight is None or not self.fuses:
            return super().normed(x, norm_weight, eps)
        return rms_norm_linear(x, norm_weight, self.weight, self.bias, eps=eps)

    def gated(
        self, x: Tensor, norm_weight: Tensor | None, eps: float, activation: Activation = "silu"
    ) -> Activations:  # fmt: skip
        if norm_weight is None or not self.fuses:
            normed = x if norm_weight is None else self._norm(x, norm_weight, eps)
            assert isinstance(normed, Tensor), "it is not quantized"
            return gated_linear(normed, self.weight, self.bias, activation=activation, config=self.config)
        return rms_norm_gated_linear(x, norm_weight, self.weight, self.bias, eps=eps, activation=activation)


class Quantized(Projection):
    """Quantized, with scales. For one row of x the norm, the GEMM and the gate are one kernel."""

    @property
    def scale(self) -> Tensor:
        return self._tensors[1]

    def normed(self, x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
        if norm_weight is None or not is_one_row(x) or not self.fuses:
            return super().normed(x, norm_weight, eps)
        return rms_norm_linear(x, norm_weight, self.weight, self.bias, weight_scale=self.scale, eps=eps)

    def gated(
        self, x: Tensor, norm_weight: Tensor | None, eps: float, activation: Activation = "silu"
    ) -> Activations:  # fmt: skip
        if norm_weight is None or not is_one_row(x) or not self.fuses:
            return super().gated(x, norm_weight, eps, activation)
        return rms_norm_gated_linear(
            x, norm_weight, self.weight, self.bias, weight_scale=self.scale, eps=eps, activation=activation
        )


def is_one_row(x: Tensor) -> bool:
    return x.shape[:-1].numel() == 1


def is_one_kernel(p: Projection, rows: int, cache: torch.dtype) -> bool:
    """Whether `into_cache` of heads that are rotated whole is one kernel, for rows and a cache of that dtype."""
    return rows == 1 and cache == p.dtype and p.fuses


class Fp8(Quantized):
    """In float8_e4m3fn with a scale per row. Several rows of x are quantized likewise."""

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
        elif is_one_row(x) and self.fuses:
            return fp8_weight_linear(x, self.weight, self.scale, self.bias, residual=residual)
        return fp8_linear(
            x, self.weight, self.scale, x_scale=scale, bias=self.bias, residual=residual, out_dtype=self.dtype,
            config=self.config,
        )  # fmt: skip

    def _gate(self, gate_up: Tensor, activation: Activation) -> Activations:
        if is_one_row(gate_up) and self.fuses:
            return super()._gate(gate_up, activation)
        if activation == "silu":
            return silu_mul_packed(gate_up, quantize=_BY_ROW)
        return gelu_mul_packed(gate_up, activation=activation, quantize=_BY_ROW)

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Activations:
        return rms_norm(x, weight, eps=eps, rounding="none", quantize=_BY_ROW)


class Fp8Block(Projection):
    """In float8_e4m3fn with a scale per block of 128 x 128. x is quantized in groups of 128, a single row, too.

    It is made of weights that are quantized already.
    """

    kind = "fp8"

    @property
    def fuses(self) -> bool:
        return False

    @property
    def scale(self) -> Tensor:
        return self._tensors[1]

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        blocks = (-(-self.n // BLOCK), -(-self.k // BLOCK))
        return (
            torch.empty((self.n, self.k), dtype=torch.float8_e4m3fn, device=device),
            torch.empty(blocks, dtype=torch.float32, device=device),
        )

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        x, scale = x if isinstance(x, tuple) else (x, None)
        return fp8_linear(
            x, self.weight, self.scale, x_scale=scale, bias=self.bias, residual=residual, out_dtype=self.dtype,
            config=self.config,
        )  # fmt: skip

    def _gate(self, gate_up: Tensor, activation: Activation) -> Activations:
        if activation == "silu":
            return silu_mul_packed(gate_up, quantize=_BY_GROUP)
        return gelu_mul_packed(gate_up, activation=activation, quantize=_BY_GROUP)

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Activations:
        return rms_norm(x, weight, eps=eps, rounding="none", quantize=_BY_GROUP)


class Int8(Quantized):
    """In int8 with a scale per row; x is not quantized."""

    kind = "int8"

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        return (
            torch.empty((self.n, self.k), dtype=torch.int8, device=device),
            torch.empty(self.n, dtype=torch.float32, device=device),
        )

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return quantize_int8(rows)

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "x is not quantized"
        return int8_linear(x, self.weight, self.scale, self.bias, residual=residual, config=self.config)


class Int4(Quantized):
    """In int4 with a scale per group of a row: 128 columns, or 64 or 32 where 128 does not divide the row.

    Scales are bfloat16 where the hidden states are, which halves their bytes; else float32, because float16 would
    flush small scales to zero.

    Args:
        group: in place of that group.
        scales: in place of that dtype.
        offsets: whether each group has a number that is added to its elements: `(n, k / group, 2)` scales and offsets.
        order: int `(k,)`, the columns of the weight group by group (act-order). They are stored in that order, and the
            columns of x are put into it by a kernel of its own, behind the norm.
    """

    kind = "int4"

    def __init__(
        self, n: int, k: int, *, bias: bool, dtype: torch.dtype, device: torch.device, group: int | None = None,
        scales: torch.dtype | None = None, offsets: bool = False, order: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._group, self.offsets = group, offsets
        self.order = None if order is None else order.to(device, torch.int32)
        self._scales = scales or (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        super().__init__(n, k, bias=bias, dtype=dtype, device=device)

    @staticmethod
    def group_of(k: int) -> int | None:
        """The largest group that divides k; None where none does."""
        return next((g for g in reversed(GROUPS) if k % g == 0), None)

    @property
    def group(self) -> int:
        group = self._group or self.group_of(self.k)
        if group is None:
            raise ValueError(f"int4: a weight has {self.k} columns, expected a multiple of 32")
        return group

    def _empty(self, device: torch.device) -> tuple[Tensor, ...]:
        pair = (2,) * self.offsets
        return (
            torch.empty((self.n, self.k // 2), dtype=torch.uint8, device=device),
            torch.empty((self.n, self.k // self.group, *pair), dtype=self._scales, device=device),
        )

    def _encode(self, rows: Tensor) -> tuple[Tensor, ...]:
        return quantize_int4(rows, self.group)

    @property
    def fuses(self) -> bool:
        return self.order is None and super().fuses

    def __call__(self, x: Activations, residual: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "x is not quantized"
        if self.order is not None:
            x = order_columns(x, self.order)
        return int4_linear(x, self.weight, self.scale, self.bias, residual=residual, config=self.config)


KINDS: dict[str | None, type[Projection]] = {None: Dense, "fp8": Fp8, "int8": Int8, "int4": Int4}


def kind_of(quantize: str | None, *, lm_head: bool = False) -> type[Projection]:
    """The format of the weights. With int4, lm_head is int8: its errors go straight into the logits."""
    if quantize not in KINDS:
        raise ValueError(f"Engine: quantize is {quantize!r}, expected None, {', '.join(repr(k) for k in KINDS if k)}")
    return Int8 if lm_head and quantize == "int4" else KINDS[quantize]
