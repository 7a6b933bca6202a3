"""Parameters one behind the other in memory, so that several can be multiplied as one.

Each keeps a storage of its own, of its own size, over a part of the memory: what saves, copies or ties tensors by their
storages finds nothing shared. The memory lives as long as one of them lies in it, and is known here by where it begins.
Parts of one tensor that lie so already are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# The memory by its device and the address of its first part; weakly, for it belongs to the parameters.
_TOGETHER: dict[tuple[torch.device, int], StorageWeakRef] = {}
ALIGNMENT = 16  # bytes: what kernels take for granted where a storage begins


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as the one tensor that they are in memory, along the first dimension; None if they are not."""
    first = parts[0]
    end = base = first.data_ptr()
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
    # A storage that spans these addresses, and is alive, is what the parts lie in.
    memory = _TOGETHER.get((device, base))
    storage = None if memory is None else torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    if storage is None:
        storage = first.untyped_storage()
    begin = storage.data_ptr()
    if base == 0 or not begin <= base <= end <= begin + storage.nbytes():
        return None
    return first.new_empty(0).set_(storage, (base - begin) // dtype.itemsize, (rows, *columns), (*columns, 1))


class Memory:
    """The memory of several groups of parameters.

    The parameters stay the objects that they are, with the values that they have: what changes is where those lie. The
    old memory of a group is free before the next one is copied.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        for key in [key for key, memory in _TOGETHER.items() if memory.expired()]:
            del _TOGETHER[key]
        self._moved: list[tuple[nn.Parameter, int]] = []
        try:
            for group in groups:
                self._join(group)
        except BaseException:  # out of memory, say: then nothing has changed
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
        """Memory of its own for each parameter that still lies where it was moved to."""
        for parameter, address in self._moved:
            if parameter.data_ptr() == address:
                parameter.data = parameter.detach().clone()
        self._release()
        self._moved = []

    def _release(self) -> None:
        """PyTorch keeps freed blocks for requests of their size, and of these sizes there may be no more."""
        if any(parameter.is_cuda for parameter, _ in self._moved):
            torch.cuda.empty_cache()
