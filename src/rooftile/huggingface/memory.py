"""Parameters that are adjacent in memory, so that several can be one operand of a GEMM.

Each parameter keeps a storage of its own size over its part of the memory: code that saves, copies or ties tensors by
storage sees nothing shared. The memory lives as long as a parameter uses it; this module finds it by its address. Parts
of one tensor that are adjacent already are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class _Found(NamedTuple):
    """The joined tensor, without the reference that would keep its memory alive."""

    memory: StorageWeakRef
    parts: tuple[tuple[int, torch.Size], ...]  # addresses and shapes
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


# The memory by device and address of its first part; weak, because the parameters own it.
_TOGETHER: dict[tuple[torch.device, int], StorageWeakRef] = {}
# What `joined` found, by the address of the first part, as long as the memory is alive.
_FOUND: dict[int, _Found] = {}
ALIGNMENT = 16  # bytes: what kernels assume of the start of a storage


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one tensor, concatenated along the first dimension; None if they are not adjacent."""
    first = parts[0]
    end = base = first.data_ptr()
    found = _FOUND.get(base)
    if found is not None and len(parts) == len(found.parts):
        for part, (address, shape) in zip(parts, found.parts, strict=True):
            if (
                part.data_ptr() != address
                or part.shape != shape
                or part.dtype != found.dtype
                or not part.is_contiguous()
            ):
                break
        else:
            storage = torch.UntypedStorage._new_with_weak_ptr(found.memory.cdata)
            if storage is not None:  # so these addresses are in it
                return first.new_empty(0).set_(storage, found.offset, found.shape, found.strides)
            _FOUND.pop(base, None)
    rows, columns, dtype, device = 0, first.shape[1:], first.dtype, first.device
    for part in parts:
        if (
            part.data_ptr() != end
            or part.shape[1:] != columns
            or part.dtype != dtype
            or part.device != device
            or not part.is_contiguous()
        ):
            return None
        end += part.nbytes
        rows += part.shape[0]
    # The parts' memory is a live storage that spans these addresses.
    memory = _TOGETHER.get((device, base))
    ours = None if memory is None else torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    storage = first.untyped_storage() if ours is None else ours
    begin = storage.data_ptr()
    if base == 0 or not begin <= base <= end <= begin + storage.nbytes():
        return None
    offset, whole, strides = (base - begin) // dtype.itemsize, (rows, *columns), (*columns, 1)
    if memory is not None and ours is not None:
        _FOUND[base] = _Found(memory, tuple((p.data_ptr(), p.shape) for p in parts), dtype, offset, whole, strides)
    return first.new_empty(0).set_(storage, offset, whole, strides)


class Memory:
    """Moves groups of parameters to adjacent memory.

    The parameters stay the same objects with the same values; only their addresses change. The old memory of a group is
    free before the next group is copied.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        for key in [key for key, memory in _TOGETHER.items() if memory.expired()]:
            del _TOGETHER[key]
        for address in [address for address, found in _FOUND.items() if found.memory.expired()]:
            del _FOUND[address]
        self._moved: list[tuple[nn.Parameter, int]] = []
        try:
            for group in groups:
                self._join(group)
        except BaseException:  # out of memory, say: restore what was moved
            self.undo()
            raise
        self._release()

    @torch.no_grad()
    def _join(self, group: Sequence[nn.Parameter]) -> None:
        together = torch.cat([p.detach() for p in group])
        storage, start = together.untyped_storage(), 0
        for parameter in group:
            end = start + parameter.nbytes
            part = together.new_empty(0).set_(storage[start:end], 0, parameter.shape, parameter.stride())
            parameter.data = part
            self._moved.append((parameter, part.data_ptr()))
            start = end
        _TOGETHER[together.device, together.data_ptr()] = StorageWeakRef(storage)

    @torch.no_grad()
    def undo(self) -> None:
        """Give each parameter that is still where it was moved to memory of its own."""
        for parameter, address in self._moved:
            if parameter.data_ptr() == address:
                parameter.data = parameter.detach().clone()
        self._release()
        self._moved = []

    def _release(self) -> None:
        """Return freed blocks: PyTorch keeps them for requests of their size, which may not come again."""
        if any(parameter.is_cuda for parameter, _ in self._moved):
            torch.cuda.empty_cache()
