"""Rotary position embedding: each pair (a, b) of a head's elements becomes (a cos - b sin, b cos + a sin)."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    style: str = "half",
    layout: str = "bhtd",
) -> tuple[Tensor, Tensor]:
    """The formula in q's dtype: give it float64 for the truth. `rooftile.ops.rope` says what the styles are."""
    cos, sin = _angles(cos, position_ids, layout), _angles(sin, position_ids, layout)
    return _rotate(q, cos, sin, style), _rotate(k, cos, sin, style)


def eager(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    position_ids: Tensor | None = None,
    rotary_dim: int | None = None,
    style: str = "half",
    layout: str = "bhtd",
) -> tuple[Tensor, Tensor]:
    """As Hugging Face's models write `apply_rotary_pos_emb`: Llama's, Cohere's (interleaved) or DeepSeek-V3's."""
    cos, sin = _angles(cos, position_ids, layout), _angles(sin, position_ids, layout)
    return _eager(q, cos, sin, style), _eager(k, cos, sin, style)


def _angles(table: Tensor, position_ids: Tensor | None, layout: str) -> Tensor:
    """The table's rows of each token, with a dimension of 1 in the place of the heads."""
    if position_ids is not None:
        table = table.reshape(table.shape[-2:])[position_ids]
    if table.dim() == 2:
        table = table[None]
    return table.unsqueeze(layout.index("h"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    rotary = cos.shape[-1]
    x, rest = x[..., :rotary], x[..., rotary:]
    if style == "half":
        a, b = x[..., : rotary // 2], x[..., rotary // 2 :]
    else:
        a, b = x[..., 0::2], x[..., 1::2]
    if style == "interleaved":
        cos, sin = cos[..., 0::2], sin[..., 0::2]
    else:
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
    turned = (a * cos - b * sin, b * cos + a * sin)
    if style == "interleaved":
        return torch.cat((torch.stack(turned, dim=-1).flatten(-2), rest), dim=-1)
    return torch.cat((*turned, rest), dim=-1)


def _eager(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    dtype, rotary = x.dtype, cos.shape[-1]
    x, rest = x[..., :rotary], x[..., rotary:]
    if style == "half":
        half = torch.cat((-x[..., rotary // 2 :], x[..., : rotary // 2]), dim=-1)
        turned = (x * cos) + (half * sin)
    elif style == "interleaved":
        x = x.float()
        half = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        turned = (x * cos) + (half * sin)
    else:
        cos, sin = cos[..., : rotary // 2], sin[..., : rotary // 2]
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    turned = turned.to(dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
