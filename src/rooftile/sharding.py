"""Row-wise ops over DTensor: each rank computes the rows that it has.

An op that `library.define` was given `Rows` for takes DTensor like this, on each dimension of the mesh:

- tensors that are sharded over rows (a batch, a sequence, heads) stay so, and so do the results;
- any other placement of them is redistributed to a replicated one first, and the results are replicated;
- parameters are replicated, and their gradients are partial sums wherever the rows are sharded.

Tensors become local ones on the way in and DTensor again on the way out, so that the op and its backward see plain
tensors. `torch.distributed.tensor` is not imported before somebody else has done so: that takes a second.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor


def _leading(x: Tensor, *_: Any) -> range:
    return range(x.dim() - 1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """How an op may be split over ranks.

    Attributes:
        names: its arguments that hold a part of each row, the first argument of the op among them. The results lie
            like them: the first like the first of them, the second like the second or the last.
        dims: the dimensions along which these may be split, by the op's arguments; by default all but the last.
    """

    names: tuple[str, ...]
    dims: Callable[..., Container[int]] = _leading


def is_distributed(*args: Any) -> bool:
    """Whether one of them is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(arg, module.DTensor) for arg in args)


GATHERED = "FSDP2 gathers a weight in its module's forward, and for module.unshard()"


def refuse(op: str, **given: Any) -> None:
    """Raise TypeError if one of them is a DTensor, which the op does not take."""
    for name, arg in given.items():
        if is_distributed(arg):
            raise TypeError(f"{op}: {name} is a DTensor, expected a plain tensor; {GATHERED}")


def whole_shape(local: Tensor, dims: Sequence[int | None], like: Any) -> torch.Size:
    """The shape of all ranks' parts together, if a part lies along those dimensions as the DTensor `like` does."""
    return torch.Size(like.shape[d] if d in dims else n for d, n in enumerate(local.shape))


def strides_like(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of that shape, whose dimensions have the order of the local one's."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (local.stride(d), -d)):
        strides[d], step = step, step * max(shape[d], 1)
    return tuple(strides)


def localized(t: Any, mesh: Any, where: Sequence[Any], grads: Sequence[Any] | None = None) -> Any:
    """This rank's part of a tensor with those placements; one that is plain counts as replicated.

    `grads` are the placements of its gradient, by default the same.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if t is None:
        return None
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tuple(t.placements) != tuple(where):  # of one that lies so, it would add up a partial gradient at once
        t = t.redistribute(mesh, where)
    return t.to_local(grad_placements=where if grads is None else grads)


def assembled(
    local: Tensor, mesh: Any, where: Sequence[Any], shape: Sequence[int], strides: Sequence[int] | None = None
) -> Any:
    """The DTensor of that shape whose part is `local`; by default it is contiguous."""
    from torch.distributed.tensor import DTensor

    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride() if strides is None else tuple(strides)
    return DTensor.from_local(local, mesh, where, run_check=False, shape=size, stride=stride)


def total_over(share: Tensor, mesh: Any, where: Sequence[Any]) -> Any:
    """The sum of all elements of tensors that lie so, over the ranks too, as a replicated DTensor."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    sums = [Partial() if isinstance(p, Shard) else p for p in where]
    return DTensor.from_local(share.sum(), mesh, sums, run_check=False).redistribute(mesh, [Replicate()] * mesh.ndim)


def by_rows(op: str, call: Callable[..., Any], names: Sequence[str], rows: Rows, args: tuple[Any, ...]) -> Any:
    """`call(*args)` of DTensor arguments, with results that are DTensor.

    Args:
        op: the name of the public function, for errors.
        call: the op over plain tensors.
        names: of its arguments.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    split = [arg for name, arg in zip(names, args, strict=True) if name in rows.names and arg is not None]
    for name, arg in zip(names, args, strict=True):
        plain = isinstance(arg, Tensor) and not isinstance(arg, DTensor)
        if plain and (name in rows.names or arg.requires_grad):
            raise TypeError(f"{op}: {name} is a plain tensor, expected a DTensor as others of its tensors are")
    first = split[0]
    dims, mesh = rows.dims(*args), first.device_mesh
    placements = [p if type(p) is Shard and p.dim in dims else Replicate() for p in first.placements]
    sums = [Partial() if isinstance(p, Shard) else p for p in placements]
    whole = [Replicate()] * mesh.ndim

    def local(name: str, arg: Any) -> Any:
        if not isinstance(arg, DTensor):
            return arg
        return localized(arg, mesh, placements) if name in rows.names else localized(arg, mesh, whole, sums)

    locals_ = [local(name, arg) for name, arg in zip(names, args, strict=True)]
    parts = [t for name, t in zip(names, locals_, strict=True) if name in rows.names and t is not None]
    sharded = [p.dim for p in placements if isinstance(p, Shard)]

    def wrapped(i: int, y: Tensor) -> Tensor:
        like, part = split[min(i, len(split) - 1)], parts[min(i, len(split) - 1)]
        if any(d >= y.dim() or y.shape[d] != part.shape[d] for d in sharded):
            return y  # statistics of rows, which the public function does not return
        shape = whole_shape(y, sharded, like)
        return assembled(y, mesh, placements, shape, strides_like(y, shape))

    results = call(*locals_)
    if isinstance(results, Tensor):
        return wrapped(0, results)
    return tuple(wrapped(i, y) for i, y in enumerate(results))
