"""The table's rows for the given tokens, times a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0, padding_idx: int | None = None) -> Tensor:
    """The formula in weight's dtype; an id outside of the table gives a row of NaN."""
    known = (ids >= 0) & (ids < weight.shape[0])
    rows = weight[torch.where(known, ids, 0).long()] * scale
    if padding_idx is not None:
        rows = torch.where((ids == padding_idx)[..., None], rows.detach(), rows)
    return rows.where(known[..., None], torch.nan)


def eager(ids: Tensor, weight: Tensor, *, scale: float = 1.0, padding_idx: int | None = None) -> Tensor:
    """As models have it: Granite multiplies what `nn.Embedding` gives, Llama leaves it."""
    rows = torch.nn.functional.embedding(ids, weight, padding_idx)
    return rows if scale == 1.0 else rows * scale
