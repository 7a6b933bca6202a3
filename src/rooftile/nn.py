"""The ops as modules. Parameters have the names and shapes of their counterparts in torch.nn and transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rooftile.ops.add_rms_norm import add_rms_norm
from rooftile.ops.rms_norm import Rounding, rms_norm
from rooftile.ops.rope import Layout, Style, rope
from rooftile.ops.silu_mul import silu_mul, silu_mul_packed

__all__ = ["AddRMSNorm", "RMSNorm", "RoPE", "SiluMul"]


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


class RoPE(nn.Module):
    """`rooftile.rope` with its tables of cos and sin, float32, not saved in the state_dict.

    Args:
        rotary_dim: how many elements of a head are turned, even.
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
        layout: Layout = "BHTD",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rotary_dim < 2 or rotary_dim % 2:
            raise ValueError(f"RoPE: rotary_dim is {rotary_dim}, expected an even number of 2 or more")
        self.rotary_dim = rotary_dim
        self.max_positions = max_positions
        self.base = base
        self.style: Style = style
        self.layout: Layout = layout
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
        position = torch.arange(max_positions, dtype=torch.float64, device=device)
        angle = position[:, None] * base**-exponent
        angle = angle.repeat_interleave(2, -1) if style == "interleaved" else torch.cat((angle, angle), -1)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q and k rotated; token t is at position t where position_ids, `(T,)` or `(B, T)`, are not given."""
        cos, sin = self.cos, self.sin
        if position_ids is None:
            seq_len = q.shape[self.layout.index("T")]
            if seq_len > self.max_positions:
                raise ValueError(f"RoPE: q has {seq_len} tokens, expected at most max_positions = {self.max_positions}")
            cos, sin = cos[:seq_len], sin[:seq_len]
        return rope(q, k, cos, sin, position_ids=position_ids, style=self.style, layout=self.layout)

    def extra_repr(self) -> str:
        return (
            f"{self.rotary_dim}, max_positions={self.max_positions}, base={self.base}, style={self.style!r}, "
            f"layout={self.layout!r}"
        )


class SiluMul(nn.Module):
    """SwiGLU's activation, `silu(gate) * up`, of two tensors or of one that holds `[gate | up]`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`rooftile.silu_mul(gate, up)`, or `rooftile.silu_mul_packed(gate)` where up is not given."""
        return silu_mul_packed(gate) if up is None else silu_mul(gate, up)
