"""Norms, RoPE and softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rooftile.library import check_int64, check_layout, check_numbers, check_tensors
from rooftile.ops.add_rms_norm import add_rms_norm
from rooftile.ops.layer_norm import layer_norm
from rooftile.ops.qk_norm_rope import qk_norm_rope
from rooftile.ops.rms_norm import Rounding, rms_norm
from rooftile.ops.rms_norm.forward import check_rounding
from rooftile.ops.rope import Layout, Style, check_style, rope
from rooftile.ops.softmax import softmax


class RMSNorm(nn.Module):
    """`rooftile.rms_norm` with its weight, of shape `(hidden_size,)`.

    Args:
        hidden_size: the last dimension of the input.
        eps: added to the mean of squares.
        elementwise_affine: whether there is a weight.
        offset: added to the weight; 1.0 for Gemma, whose weight starts at 0.
        rounding: see `rooftile.rms_norm`.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        offset: float = 0.0,
        rounding: Rounding = "llama",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(hidden_size, bool) or not isinstance(hidden_size, int) or hidden_size < 1:
            raise ValueError(f"RMSNorm: hidden_size is {hidden_size!r}, expected a positive integer: one dimension")
        check_numbers("RMSNorm", eps=eps, offset=offset)
        check_rounding("RMSNorm", rounding)
        if not elementwise_affine and offset != 0.0:
            raise ValueError(f"RMSNorm: offset is {offset}, expected 0 without a weight to add it to")
        self.hidden_size = hidden_size
        self.eps = eps
        self.offset = offset
        self.rounding: Rounding = rounding
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that weight + offset is 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., hidden_size)` to the same shape."""
        return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, rounding=self.rounding)

    def extra_repr(self) -> str:
        affine = self.weight is not None
        return (
            f"{self.hidden_size}, eps={self.eps}, elementwise_affine={affine}, offset={self.offset}, "
            f"rounding={self.rounding!r}"
        )


class AddRMSNorm(RMSNorm):
    """`rooftile.add_rms_norm` with its weight: `(x, residual)` to `(y, u)`. Arguments as for `RMSNorm`."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """`u = x + residual` and `y = rms_norm(u)`, returned as `(y, u)`."""
        return add_rms_norm(x, residual, self.weight, eps=self.eps, offset=self.offset, rounding=self.rounding)


class LayerNorm(nn.LayerNorm):
    """`rooftile.layer_norm` as a replacement for `torch.nn.LayerNorm`, with the same arguments, parameters and state.

    `normalized_shape` may be several dimensions: they are taken as one.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`(..., *normalized_shape)` to the same shape."""
        check_tensors("LayerNorm", input=input)
        if input.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise ValueError(
                f"LayerNorm: input has shape {tuple(input.shape)}, expected its last dimensions to be "
                f"{tuple(self.normalized_shape)}"
            )
        if len(self.normalized_shape) == 1:
            return layer_norm(input, self.weight, self.bias, eps=self.eps)
        x = input.flatten(-len(self.normalized_shape))
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        return layer_norm(x, weight, bias, eps=self.eps).view(input.shape)


class RoPE(nn.Module):
    """`rooftile.rope` with its float32 tables of cos and sin, which the state_dict does not contain.

    Args:
        rotary_dim: the even number of elements of a head that are rotated.
        max_positions: rows of the tables; a position past them gives NaN.
        base: theta; pair i turns by `position * base^(-2i / rotary_dim)`.
        style, layout: see `rooftile.rope`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        rotary_dim: int,
        max_positions: int = 4096,
        base: float = 10000.0,
        *,
        style: Style = "half",
        layout: Layout = "bhtd",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_int64("RoPE", rotary_dim=rotary_dim, max_positions=max_positions)
        check_numbers("RoPE", base=base)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"RoPE: rotary_dim is {rotary_dim}, expected an even number of 2 or more")
        if max_positions < 1:
            raise ValueError(f"RoPE: max_positions is {max_positions}, expected a positive integer")
        if not 0 < base < math.inf:
            raise ValueError(f"RoPE: base is {base}, expected a positive number")
        check_layout("RoPE", layout)
        check_style("RoPE", style)
        self.rotary_dim = rotary_dim
        self.max_positions = max_positions
        self.base = base
        self.style: Style = style
        self.layout: Layout = layout
        for name in ("cos", "sin"):
            table = torch.empty(max_positions, rotary_dim, dtype=torch.float32, device=device)
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables on their device, also after `to_empty()`."""
        exponent = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device=self.cos.device) / self.rotary_dim
        position = torch.arange(self.max_positions, dtype=torch.float64, device=self.cos.device)
        angle = position[:, None] * self.base**-exponent
        angle = angle.repeat_interleave(2, -1) if self.style == "interleaved" else torch.cat((angle, angle), -1)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q and k rotated. Without position_ids, `(T,)` or `(B, T)`, token t is at position t."""
        cos, sin = self.cos, self.sin
        if position_ids is None:
            check_tensors("RoPE", q=q)
            seq_len = q.shape[self.layout.index("t")]
            if seq_len > self.max_positions:
                raise ValueError(f"RoPE: q has {seq_len} tokens, expected at most max_positions = {self.max_positions}")
            cos, sin = cos[:seq_len], sin[:seq_len]
        return rope(
            q, k, cos, sin,
            position_ids=position_ids, rotary_dim=self.rotary_dim, style=self.style, layout=self.layout,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"{self.rotary_dim}, max_positions={self.max_positions}, base={self.base}, style={self.style!r}, "
            f"layout={self.layout!r}"
        )


class QKNormRoPE(nn.Module):
    """`rooftile.qk_norm_rope` with its two weights, named as in Qwen3's and Gemma 3's attention: q_norm and k_norm.

    Args:
        head_dim: the size of a head, over which its root mean square is taken.
        eps: added to the mean of squares.
        elementwise_affine: whether there are weights.
        offset: added to the weights; 1.0 for Gemma 3, whose weights start at 0.
        rotary_dim, style, layout: see `rooftile.qk_norm_rope`.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        offset: float = 0.0,
        rotary_dim: int | None = None,
        style: Style = "half",
        layout: Layout = "bhtd",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_layout("QKNormRoPE", layout)
        check_style("QKNormRoPE", style)
        self.q_norm = RMSNorm(head_dim, eps, elementwise_affine, offset=offset, device=device, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, eps, elementwise_affine, offset=offset, device=device, dtype=dtype)
        self.rotary_dim = rotary_dim
        self.style: Style = style
        self.layout: Layout = layout

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q and k, each head normalized and then rotated by its token's angles."""
        return qk_norm_rope(
            q,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            cos,
            sin,
            eps=self.q_norm.eps,
            offset=self.q_norm.offset,
            position_ids=position_ids,
            rotary_dim=self.rotary_dim,
            style=self.style,
            layout=self.layout,
        )

    def extra_repr(self) -> str:
        return f"style={self.style!r}, layout={self.layout!r}"


class Softmax(nn.Module):
    """`rooftile.softmax` as a replacement for `torch.nn.Softmax`. A dimension other than the last costs a copy.

    Args:
        dim: the dimension whose elements sum to 1.
        scale, causal: see `rooftile.softmax`; causal needs dim to be the last.
    """

    def __init__(self, dim: int = -1, *, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__()
        if causal and dim != -1:
            raise ValueError(f"Softmax: dim is {dim}, expected -1 where causal is set")
        self.dim = dim
        self.scale = scale
        self.causal = causal

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """The softmax of `scale * input`. It is 0 where `mask`, a boolean tensor that broadcasts to input, is False."""
        if self.dim == -1:
            return softmax(input, scale=self.scale, causal=self.causal, mask=mask)
        check_tensors("Softmax", input=input)
        if self.dim == input.dim() - 1:
            return softmax(input, scale=self.scale, causal=self.causal, mask=mask)
        if mask is not None:
            mask = mask.expand(input.shape).movedim(self.dim, -1)
        return softmax(input.movedim(self.dim, -1), scale=self.scale, mask=mask).movedim(-1, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, scale={self.scale}, causal={self.causal}"
