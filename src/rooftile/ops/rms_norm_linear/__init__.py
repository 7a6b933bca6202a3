"""RMSNorm and the linear layer behind it.

    y = rms_norm(x) @ weight^T + bias,   rms_norm(x) = x * rstd * (norm_weight + offset),
    rstd = 1 / sqrt(mean(x^2) + eps)

    y[m, n] = rstd[m] * (sum over k of x[m, k] * (norm_weight[k] + offset) * weight[n, k]) + bias[n]

rstd is one number a row, so it can wait for the end of the sums. Up to 32 rows one kernel adds up the squares beside
the products and reads x once; with more rows, where every tile would scale the same x again, the norm is a kernel of
its own and the product follows.

Elements that move, of x (M, K) and weight (N, K):

    two kernels        3MK + K + NK + MN    the norm reads x and writes the normalised x, the product reads that
    one, x read twice  2MK + K + NK + MN    first for the mean of squares, then for the product
    one, as here        MK + K + NK + MN

from memory. Every program of the one kernel reads the parts of x and of the norm's weight that it needs, out of the L2:
MK + K for each tile of the weight's rows, 64 of them perhaps, beside their 64 K.

The backward normalises x again where the weight's gradient needs it; beside the inputs nothing is kept:

    dbias = sum over rows of dy,  dweight = dy^T @ rms_norm(x),  dx, dnorm_weight from dy @ weight as of rms_norm alone
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime
from rooftile.ops.matmul import choose as product_choice
from rooftile.ops.matmul import linear
from rooftile.ops.matmul.common import _aligned as is_aligned
from rooftile.ops.matmul.common import _layout as layout
from rooftile.ops.matmul.common import (
    as_rows,
    autocast,
    check_dtype,
    encoded,
    product,
    refuse_symbols,
)
from rooftile.ops.matmul.config import MatmulConfig, Problem, decode
from rooftile.ops.matmul.sums import column_sum
from rooftile.ops.rms_norm import backward as norm_backward
from rooftile.ops.rms_norm import forward as norm
from rooftile.ops.rms_norm import rms_norm
from rooftile.ops.rms_norm_linear import row, skinny

__all__ = ["fused_rows", "rms_norm_linear"]

_OP = "rms_norm_linear"


def fused_rows(n: int, k: int, target: runtime.Target) -> int:
    """The most rows of x for which norm and product are one kernel.

    On an H200 one kernel for 3584 -> 3584 takes 0.76 of the time of torch.compile's two with 1 row, 0.74 with 16, 0.79
    with 32 and 1.13 with 64: x, four times as much, is normalised again by each program. For 3584 -> 18944, of which
    every multiprocessor has more than two tiles, it takes 0.90 with 1 row and 1.15 to 1.17 with 2 to 16.
    """
    if n > 64 * target.multiprocessors:
        return 1
    return 32


def _check(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> tuple[int, ...]:
    """The shape of the result."""
    library.check_floating(_OP, x=x, norm_weight=norm_weight, weight=weight, bias=bias)
    for name, number in (("eps", eps), ("offset", offset)):
        if not isinstance(number, (float, int)):
            raise TypeError(f"{_OP}: {name} is a {type(number).__name__}, expected a number")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{_OP}: x has shape {tuple(x.shape)}, expected at least one dimension, the last of 1 or more")
    k = x.shape[-1]
    if norm_weight.shape != (k,):
        raise ValueError(
            f"{_OP}: norm_weight has shape {tuple(norm_weight.shape)}, expected ({k},) to match x's last dimension"
        )
    check_dtype(_OP, "weight", weight, "x", x)
    if weight.dim() != 2 or weight.shape[1] != k:
        raise ValueError(
            f"{_OP}: weight has shape {tuple(weight.shape)}, expected (N, {k}) to match x's last dimension"
        )
    n = weight.shape[0]
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"{_OP}: bias has shape {tuple(bias.shape)}, expected ({n},) to match the weight's rows")
        if bias.dtype not in (x.dtype, torch.float32):
            raise TypeError(f"{_OP}: bias has dtype {bias.dtype}, expected {x.dtype} to match x, or torch.float32")
    return (*x.shape[:-1], n)


def _module(c: MatmulConfig) -> ModuleType | None:
    """The fused kernel that the configuration is for; None for those of the plain product."""
    return {"row": row, "skinny": skinny}.get(c.kernel)


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, dtype: torch.dtype, along_k: bool, target: runtime.Target) -> MatmulConfig | None:
    """How the one kernel is launched for that problem; None where norm and product are two.

    `along_k`: whether the weight is contiguous along k.
    """
    if m > fused_rows(n, k, target):
        return None
    if target is runtime.INTERPRETER:  # few, large programs; the same whatever the layout
        block_m, block_n, block_k = (min(128, max(16, library.power_of_two(size))) for size in (m, n, k))
        return MatmulConfig("row" if m == 1 else "skinny", block_m if m > 1 else 1, block_n, block_k, num_stages=1)
    # IEEE float32 is multiplied by the ordinary units: of several rows the tiled product makes better use of them.
    if dtype == torch.float32 and m > 1:
        return None
    p = Problem(m, n, k, dtype)
    candidates = _rows(p, target) if m == 1 and (along_k or dtype == torch.float32) else _skinny(p, along_k, target)
    for c in candidates:
        found = _module(c)
        if found is not None and found.refuses(p, c, target) is None:
            return c
    return None


def _rows(p: Problem, target: runtime.Target) -> list[MatmulConfig]:
    """Loads straight to registers, four of 16 bytes a thread, and many small programs."""
    warps = 4 * 32 // target.warp_size
    return [MatmulConfig("row", 1, 8, 1024 // p.dtype.itemsize, 1, 1, warps, 1)]


def _skinny(p: Problem, along_k: bool, target: runtime.Target) -> list[MatmulConfig]:
    """64 rows of the weight, 256 bytes along each, in stages that leave room for two programs a multiprocessor.

    Where tiles leave multiprocessors idle, up to four programs share one's sum. A weight that is not contiguous along k
    is read along n, 256 bytes too; one whose rows are not aligned, element by element, in tiles that fit the registers.
    """
    block_m = max(16, library.power_of_two(p.m))
    few = p.n <= 64 * target.multiprocessors and target.shared_memory >= 200 << 10
    if along_k and few and block_m == 16 and p.dtype.itemsize == 2 and p.k % 256 == 0:
        # The best of 60 on an H200 for 3584 -> 3584, 2 % ahead of the next.
        return [MatmulConfig("skinny", 16, 64, 256, 1, 2, 4, 4)]
    block_n, block_k = (64, 128) if along_k else (128, 64)
    if p.k * p.dtype.itemsize % 16:
        block_k = 32
    tiles, steps = library.cdiv(p.n, block_n), library.cdiv(p.k, block_k)
    split = max(1, min(4, 2 * target.multiprocessors // tiles, steps // 4))
    warps = 4 * 32 // target.warp_size
    stage = (block_n + block_m) * block_k * p.dtype.itemsize
    deepest = max(2, min(5, (target.shared_memory // 2 - block_m * block_k * p.dtype.itemsize) // stage))
    depths = (2, 1) if target.warp_size == 64 else range(deepest, 0, -1)
    return [MatmulConfig("skinny", block_m, block_n, block_k, 1, split, warps, stages) for stages in depths]


def _refuses(x: Tensor, weight: Tensor, c: MatmulConfig, target: runtime.Target) -> str | None:
    (n, k), m = weight.shape, x.numel() // x.shape[-1]
    found = _module(c)
    if found is not None:
        return found.refuses(Problem(m, n, k, x.dtype), c, target)
    # The normalised x is laid out anew.
    aligned = k * x.element_size() % 16 == 0
    p = Problem(m, n, k, x.dtype, w_layout=layout(weight, "n"), x_aligned=aligned, w_aligned=is_aligned(weight))
    return product_choice.refuses(p, c, target)


def _chosen(x: Tensor, weight: Tensor, config: str) -> MatmulConfig | None:
    """The configuration of the one kernel, or None. Raises for one that was asked for and can't be launched."""
    target = runtime.target(x.device)
    asked = decode(config)
    if asked is None:
        (n, k), m = weight.shape, x.numel() // x.shape[-1]
        return choose(m, n, k, x.dtype, weight.stride(1) == 1 or k == 1, target)
    reason = _refuses(x, weight, asked, target)
    if reason is not None:
        raise ValueError(f"{_OP}: config can't be launched: {reason}")
    return asked if _module(asked) else None


def _launch(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, config: str
) -> Tensor:
    shape = _check(x, norm_weight, weight, bias, eps, offset)
    refuse_symbols(*x.shape, *weight.shape)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    bias = None if bias is None else bias.contiguous()
    flat = out.view(-1, shape[-1])
    c = _chosen(x, weight, config)
    found = None if c is None else _module(c)
    if c is None or found is None:
        normed, _ = norm.launch("rms_norm", x, None, norm_weight, eps, offset, "none")
        product(_OP, as_rows(normed), weight, flat, bias, config=config)
        return out
    if isinstance(x, FunctionalTensor):
        raise launching.Untraceable("an early launch, descriptors, or counters")
    found.launch(library.as_rows(x), norm_weight.contiguous(), weight, flat, bias, eps, offset, c)
    return out


def _fake(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, config: str
) -> Tensor:
    return torch.empty(_check(x, norm_weight, weight, bias, eps, offset), dtype=x.dtype, device=x.device)


def _gradients(
    dy: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    needs_dx: bool, needs_dnorm: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Memory for them; one that is not asked for is empty."""
    shape = _check(x, norm_weight, weight, bias, eps, offset)
    if dy.shape != shape or dy.dtype != x.dtype:
        raise ValueError(
            f"{_OP}_backward: dy is {dy.dtype} of shape {tuple(dy.shape)}, expected {x.dtype} of {tuple(shape)}"
        )

    def memory(like: Tensor | None, needed: bool) -> Tensor:
        dtype = dy.dtype if like is None else like.dtype
        return torch.empty(like.shape if needed and like is not None else (0,), dtype=dtype, device=dy.device)

    return (
        memory(x, needs_dx), memory(norm_weight, needs_dnorm), memory(weight, needs_dw), memory(bias, bias is not None)
    )  # fmt: skip


def _differentiate(
    dy: Tensor, x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float,
    needs_dx: bool, needs_dnorm: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    refuse_symbols(*dy.shape, *weight.shape)
    dx, dnorm, dw, db = _gradients(dy, x, norm_weight, weight, bias, eps, offset, needs_dx, needs_dnorm, needs_dw)
    dz = as_rows(dy)
    if bias is not None:
        column_sum(dz, db)
    if dw.numel():
        normed, _ = norm.launch("rms_norm", x, None, norm_weight, eps, offset, "none")
        product(f"{_OP}_backward", dz.mT, as_rows(normed).mT, dw)
    if needs_dx or needs_dnorm:
        dnormed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if dnormed.numel():
            product(f"{_OP}_backward", dz, weight.mT, as_rows(dnormed))
        dx, dnorm = norm_backward.launch(
            dnormed, None, x, norm_weight, eps, offset, "none", needs_dx, needs_dnorm
        )  # fmt: skip
    return dx, dnorm, dw, db


_backward_op = library.define(
    "rms_norm_linear_backward(Tensor dy, Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, "
    "float offset, bool needs_dx, bool needs_dnorm, bool needs_dw) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_differentiate,
    fake=_gradients,
)


def _save(ctx, inputs, output) -> None:
    x, norm_weight, weight, bias, *ctx.mode = inputs[:6]
    ctx.save_for_backward(x, norm_weight, weight, bias if ctx.needs_input_grad[4] else None)


def _backward(ctx, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[1:5]
    if dy is None:
        return (None,) * 7
    grads = _backward_op(dy, *ctx.saved_tensors, *ctx.mode, *needs[:3])
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None


_op = library.define(
    "rms_norm_linear(Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, float offset, str config) "
    "-> Tensor",
    launch=_launch,
    fake=_fake,
    autograd=library.Autograd(_save, _backward),
)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    config: MatmulConfig | None = None,
) -> Tensor:
    """`rms_norm(x) @ weight^T + bias`, with `rms_norm(x) = x / sqrt(mean(x^2) + eps) * (norm_weight + offset)`.

    One kernel where x has few rows, as in decoding; else the norm, then the product.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16. Any strides; copied only where the leading dimensions can't be
            taken as one, or the last stride is not 1.
        norm_weight: `(K,)`, of any of these dtypes.
        weight: `(N, K)` of x's dtype, as `torch.nn.Linear` keeps it. Any strides.
        bias: `(N,)`, of x's dtype or float32.
        eps: added to the mean of squares.
        offset: added to norm_weight in float32; 1.0 for Gemma.
        config: how the kernel is launched, in place of the choice that sizes and GPU make. `"row"` and `"skinny"` are
            the one kernel, for one row and for up to block_m; `"tiled"` and `"hopper"` the product behind the norm.

    Returns:
        `(..., N)` in x's dtype, contiguous. Sums are float32. x is rounded once between norm and product: by the one
        kernel before rstd scales it (not at all for one row), else after. Under `torch.autocast` the norm is taken of x
        as it is, and what is multiplied is cast.

    Raises:
        ValueError: norm_weight, weight or bias has not the shape above, the configuration can't be launched (the field
            and the reason are named), a device is the CPU without the interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of the three.
    """
    kind = x.device.type
    if kind in ("cuda", "cpu", "xpu") and torch.is_autocast_enabled(kind):
        if x.dtype != torch.get_autocast_dtype(kind):  # what is cast lies between norm and product
            normed = rms_norm(x, norm_weight, eps=eps, offset=offset, rounding="none")
            return linear(normed, weight, bias, config=config)
        weight, bias = autocast(weight, bias)  # type: ignore[assignment]
    return _op(x, norm_weight, weight, bias, eps, offset, encoded(_OP, config))
