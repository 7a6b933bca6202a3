"""The columns of x in the order of a weight's groups, as act-order checkpoints need: `out[m, k] = x[m, order[k]]`.

One read and one write of x, which is small beside the weight that it is multiplied by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.engine.modes import on

import triton  # isort: skip
import triton.language as tl  # isort: skip

_BLOCK = 1024


@triton.jit
def _order_columns_kernel(x_ptr, order_ptr, out_ptr, stride_xm, n_cols, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n_cols, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    order = tl.load(order_ptr + cols, mask=mask, other=0)
    x = tl.load(x_ptr + row * stride_xm + order, mask=mask)
    tl.store(out_ptr + row * n_cols + cols, x, mask=mask)


def order_columns(x: Tensor, order: Tensor) -> Tensor:
    """`x[..., order]`: x `(..., K)`, contiguous along K; order int32 `(K,)`, on x's device."""
    rows, out = x.flatten(0, -2), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    k = rows.shape[1]
    launcher = launching.launcher(_order_columns_kernel, (x, order), {"BLOCK": _BLOCK}, num_warps=4)
    with on(x.device):
        launching.launch(launcher, rows.shape[0] * library.cdiv(k, _BLOCK), (rows, order, out), (rows.stride(0), k))
    return out
