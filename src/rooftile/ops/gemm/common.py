"""From tensors to a launch: what a product is for the choice of its kernel, and the checks that all its ops share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime
from rooftile.ops.gemm import adapters, choose
from rooftile.ops.gemm.config import PRECISIONS, MatmulConfig, Operands, Precision, Problem, decode, encode


def check_precision(op: str, precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")


def check_dtype(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"{op}: {name} has dtype {tensor.dtype}, expected {other.dtype} to match {other_name} "
            "(under torch.autocast both are cast)"
        )


def encoded(op: str, config: MatmulConfig | None) -> str:
    """The configuration as the schema of an op takes it."""
    if config is None:
        return ""
    if not isinstance(config, MatmulConfig):
        raise TypeError(f"{op}: config is {type(config).__name__}, expected rooftile.MatmulConfig or None")
    # Dynamo traces the function itself, and warns of a cache around it.
    return (encode.__wrapped__ if torch.compiler.is_compiling() else encode)(config)


_AUTOCAST = ("cuda", "cpu", "xpu")


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as torch.autocast wants the inputs of a product, where it is on: as torch's own linear does."""
    first = tensors[0]
    kind = first.device.type if isinstance(first, Tensor) else ""  # of what is none the op says so
    if kind not in _AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in library.FLOATS else t for t in tensors)


def refuse_symbols(*sizes: int) -> None:
    """The choice of a kernel needs numbers: with symbolic ones the op stays whole in a compiled graph."""
    for n in sizes:
        if isinstance(n, torch.SymInt):
            raise launching.Untraceable("a symbolic size")


def _layout(t: Tensor, outer: str) -> str:
    if t.stride(-1) == 1 or t.shape[-1] <= 1:
        return "k"
    return outer if t.stride(-2) == 1 else ""


def _aligned(t: Tensor) -> bool:
    """Whether base and strides, but that of the contiguous dimension, are multiples of 16 bytes, and rows apart."""
    size = t.element_size()
    base = t.storage_offset() * size if isinstance(t, FunctionalTensor) else t.data_ptr()
    if base % 16:
        return False
    contiguous = t.dim() - (1 if _layout(t, "m") == "k" else 2)
    outer = 2 * t.dim() - 3 - contiguous
    if t.shape[outer] > 1 and t.stride(outer) < t.shape[contiguous]:
        return False
    return all(i == contiguous or t.shape[i] == 1 or t.stride(i) * size % 16 == 0 for i in range(t.dim()))


@functools.lru_cache(maxsize=4096)
def _chosen(
    p: Problem, portable: bool, entry: tuple[tuple[str, Any], ...] | None, target: runtime.Target
) -> tuple[Callable[..., None], MatmulConfig]:
    """The choice, remembered for what decides it: tables may be read anew, or turned off for a while."""
    if portable:
        c = choose.choose_tiled(p, target)
    else:
        c = choose.choose_from(p, None if entry is None else dict(entry), target)
    found = choose.module(c.kernel)
    assert found is not None
    return found.launch, c


def _asked(
    op: str, p: Problem, config: MatmulConfig, target: runtime.Target
) -> tuple[Callable[..., None], MatmulConfig]:
    reason = choose.can_implement(p, config, target)
    if reason is not None:
        raise ValueError(f"{op}: config can't be launched: {reason}")
    found = choose.module(config.kernel)
    assert found is not None
    return found.launch, config


def product(
    op: str,
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str = "",
    gated: bool = False,
    precision: str = "ieee",
    config: str = "",
) -> None:
    """`out[m, n] = act(sum over k of x[m, k] * w[n, k] + bias[n]) + residual[m, n]`, all of it or parts.

    Args:
        op: whose name errors have.
        x: `(M, K)`, or `(B, M, K)` with all the others; any strides.
        w: `(N, K)`; gated `(2N, K)`, the rows of the gate first, and `act(gate) * up` in place of the activation.
        out: `(M, N)`, memory for the result, with a last stride of 1.
        bias: `(N,)` or `(2N,)`, contiguous.
        residual: of out's shape, with a last stride of 1.
        activation, precision: as the ops have them; "" for no activation.
        config: what `encode` makes of a configuration; "" for one that is chosen.
    """
    m, n = out.shape[-2:]
    k = x.shape[-1]
    batch = out.shape[0] if out.dim() == 3 else 1
    refuse_symbols(m, n, k, batch)
    if out.numel() == 0:
        return
    target = runtime.target(x.device)
    used: Precision = "tf32" if precision == "tf32" and x.dtype == torch.float32 else "ieee"
    p = Problem(
        m, n, k, x.dtype, batch, gated, activation, used, _layout(x, "m"), _layout(w, "n"),
        _aligned(x), _aligned(w), _aligned(out),
    )  # fmt: skip
    asked = decode(config)
    if asked is not None and k:
        launch, c = _asked(op, p, asked, target)
    else:
        portable = out.dtype != x.dtype
        entry = None if portable else choose.tuned_entry(p, target)
        launch, c = _chosen(p, portable, None if entry is None else tuple(entry.items()), target)
    if isinstance(x, FunctionalTensor) and (c.split_k > 1 or c.kernel == "hopper"):
        raise launching.Untraceable("counters, or descriptors of tensors")
    o = Operands(x, w, out, bias, residual, activation=activation, gated=gated, precision=used)
    adapters.start(launch, o, c)


def mergeable(t: Tensor) -> bool:
    """Whether all dimensions but the last can be taken as one without a copy."""
    try:
        t.view(math.prod(t.shape[:-1]), t.shape[-1])
    except RuntimeError:
        return False
    return True


def as_rows(t: Tensor) -> Tensor:
    """t as (rows, last dimension): a view where the leading dimensions can be taken as one, else a copy."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])
