"""The table's rows for the given tokens, times a scale."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """The formula in weight's dtype; an id outside of the table gives a row of NaN."""
    known = (ids >= 0) & (ids < weight.shape[0])
    rows = weight[torch.where(known, ids, 0).long()] * scale
    return rows.where(known[..., None], torch.nan)


def eager(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """As models have it: Granite multiplies what `nn.Embedding` gives, Llama leaves it."""
    rows = torch.nn.functional.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale
