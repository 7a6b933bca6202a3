"""Launches of GEMM kernels, prepared once for each kind of operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching
from rooftile.ops.gemm.config import Operands

Run = Callable[..., None]
_MANY = 1024  # kinds of operands that a kernel remembers


def _kind(t: Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (t.dtype, t.shape, t.stride(), t.get_device(), t.data_ptr() % 16)


def launcher(prepare: Callable[[Operands, Any], Run]) -> Callable[[Operands, Any], None]:
    """A kernel's `launch(o, c)` from its `prepare(o, c)`.

    `prepare` returns `run(x, w, out, bias, residual, norm_weight, x_scale, weight_scale)`, which launches the kernel on
    other tensors of the same dtypes, shapes, strides and alignment. It is remembered by those and by c.
    """
    known: dict[Any, Run] = {}
    launching.when_forgotten(known.clear)

    def launch(o: Operands, c: Any) -> None:
        tensors = (o.x, o.w, o.out, o.bias, o.residual, o.norm_weight, o.x_scale, o.weight_scale)
        if isinstance(o.x, FunctionalTensor):  # traced: it has no address
            return prepare(o, c)(*tensors)
        flags = (o.eps, o.offset, o.activation, o.gated, o.precision, o.x_kind, o.w_kind, o.fast)
        key = (c, flags, *map(_kind, tensors))
        run = known.get(key)
        if run is None:
            if len(known) >= _MANY:
                known.clear()
            run = known[key] = prepare(o, c)
        return run(*tensors)

    return launch
