"""The ranks of tensor parallelism: processes of `torch.distributed`, one for each GPU, and what they exchange.

All of it is NCCL's all-reduce and all-gather on GPUs, and gloo's on CPUs. A CUDA graph captures NCCL's.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.engine.modes import on
from rooftile.engine.split import Split

import triton  # isort: skip
import triton.language as tl  # isort: skip

_BLOCK = 1024
_FOR_EVER = datetime.timedelta(days=3650)  # rank 0 of a server may wait for requests as long
_HEADER, _SHORT = 8, 8192  # bytes: of a message's length, and of a message that needs one broadcast


@triton.jit(do_not_specialize=["first", "n_rows"])
def _embedding_kernel(ids_ptr, weight_ptr, out_ptr, first, n_rows, n_cols, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """A row of the table for each id that it has, zeros for others."""
    blocks = tl.cdiv(n_cols, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    row = tl.load(ids_ptr + token).to(tl.int64) - first
    here = (row >= 0) & (row < n_rows)
    y = tl.load(weight_ptr + row * n_cols + cols, mask=mask & here, other=0.0)
    if SCALE != 1.0:
        y = (y.to(tl.float32) * SCALE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * n_cols + cols, y, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _side_by_side_kernel(x_ptr, out_ptr, n_rows, n_cols, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """out[row, rank * n_cols + col] = x[rank, row, col]."""
    blocks = tl.cdiv(n_cols, BLOCK)
    part = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    rank, row = part // n_rows, part % n_rows
    x = tl.load(x_ptr + part * n_cols + cols, mask=mask)
    tl.store(out_ptr + (row * RANKS + rank) * n_cols + cols, x, mask=mask)


def embedding_of_part(ids: Tensor, weight: Tensor, first: int, scale: float) -> Tensor:
    """`scale * weight[ids - first]`, and zeros for ids that the part of a table does not have.

    ids int32 `(tokens,)` and weight `(rows, N)`, both contiguous.
    """
    rows, n = weight.shape
    out = torch.empty((ids.shape[0], n), dtype=weight.dtype, device=weight.device)
    launcher = launching.launcher(
        _embedding_kernel, (ids, weight), {"SCALE": float(scale), "BLOCK": _BLOCK}, num_warps=4
    )
    with on(ids.device):
        programs = ids.shape[0] * library.cdiv(n, _BLOCK)
        launching.launch(launcher, programs, (ids, weight, out), (), (first, rows, n))
    return out


def side_by_side(parts: Tensor) -> Tensor:
    """`(ranks, rows, N)` as `(rows, ranks * N)`."""
    ranks, rows, n = parts.shape
    if rows == 1:
        return parts.view(1, ranks * n)
    out = torch.empty((rows, ranks * n), dtype=parts.dtype, device=parts.device)
    launcher = launching.launcher(_side_by_side_kernel, (parts,), {"RANKS": ranks, "BLOCK": _BLOCK}, num_warps=4)
    with on(parts.device):
        launching.launch(launcher, ranks * rows * library.cdiv(n, _BLOCK), (parts, out), (), (rows, n))
    return out


def _all_gather(parts: Tensor, x: Tensor, group: Any) -> None:
    name = "all_gather_single"  # since PyTorch 2.13
    gather = getattr(torch.distributed, name if hasattr(torch.distributed, name) else "all_gather_into_tensor")
    gather(parts, x, group=group)


class Ranks:
    """This process and the others that compute the same model.

    Args:
        group: their process group.
    """

    def __init__(self, group: Any) -> None:
        distributed = torch.distributed
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)
        # For what the hosts tell each other, in an order of its own.
        self._hosts = distributed.new_group(backend="gloo", timeout=_FOR_EVER)

    @property
    def split(self) -> Split:
        return Split(self.rank, self.size)

    # On the device, in stream order. All ranks get the same bits.

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, written over it."""
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def embedding(self, ids: Tensor, weight: Tensor, scale: float) -> Tensor:
        """Rows of a table of which each rank has a part."""
        return self.sum_(embedding_of_part(ids, weight, self.rank * weight.shape[0], scale))

    def gathered(self, x: Tensor) -> Tensor:
        """All ranks' x `(rows, N)` side by side, `(rows, ranks * N)`."""
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        _all_gather(parts.flatten(0, 1), x, group=self.group)
        return side_by_side(parts)

    # On the hosts.

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """What raises on one rank raises on all of them."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        said: list[str | None] = [None] * self.size
        told = None if error is None else f"{type(error).__name__}: {error}"
        torch.distributed.all_gather_object(said, told, group=self._hosts)
        if error is not None:
            raise error
        for rank, other in enumerate(said):
            if other is not None:
                raise RuntimeError(f"Engine: rank {rank} has failed: {other}")

    def send(self, message: bytes) -> None:
        """Send a message to the other ranks, each of which has to `receive` it."""
        short = torch.zeros(_SHORT, dtype=torch.uint8, device="cpu")
        short[:_HEADER].view(torch.int64).fill_(len(message))
        rest = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)
        inside = len(message) <= _SHORT - _HEADER
        if inside:
            short[_HEADER : _HEADER + len(message)].copy_(rest[: len(message)])
        torch.distributed.broadcast(short, self.rank, group=self._hosts)
        if not inside:
            torch.distributed.broadcast(rest, self.rank, group=self._hosts)

    def receive(self) -> bytes:
        """The next message of rank 0; waits for it."""
        short = torch.zeros(_SHORT, dtype=torch.uint8, device="cpu")
        torch.distributed.broadcast(short, 0, group=self._hosts)
        n = int(short[:_HEADER].view(torch.int64))
        if n <= _SHORT - _HEADER:
            return short[_HEADER : _HEADER + n].numpy().tobytes()
        rest = torch.empty(n, dtype=torch.uint8, device="cpu")
        torch.distributed.broadcast(rest, 0, group=self._hosts)
        return rest.numpy().tobytes()


def join(tensor_parallel: int, device: torch.device | str | None) -> tuple[Ranks | None, torch.device]:
    """The ranks of so many processes, and this one's device; no ranks of a single process.

    Takes the default process group, or makes it from what `torchrun` has set.

    Raises:
        ValueError: there is no such device; or no process group, or it has another number of ranks.
        TypeError: tensor_parallel is no integer.
    """
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int):
        raise TypeError(f"Engine: tensor_parallel is {tensor_parallel!r}, expected an integer")
    if tensor_parallel < 1:
        raise ValueError(f"Engine: tensor_parallel is {tensor_parallel}, expected a positive integer")
    given = runtime.device_of("Engine", device)
    if tensor_parallel == 1:
        return None, given
    distributed = torch.distributed
    if not distributed.is_available():
        raise ValueError(f"Engine: tensor_parallel is {tensor_parallel}, and this PyTorch has no torch.distributed")
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not distributed.is_initialized() and not started:
        raise ValueError(
            f"Engine: tensor_parallel is {tensor_parallel}, and there is no process group: start the processes with "
            f"torchrun --nproc-per-node {tensor_parallel}, or call torch.distributed.init_process_group first"
        )
    rank = distributed.get_rank() if distributed.is_initialized() else int(os.environ["RANK"])
    if given.type == "cuda" and (device is None or given.index is None):
        given = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    if given.type == "cuda":
        torch.cuda.set_device(given)
    if not distributed.is_initialized():
        begin(given)
    if (size := distributed.get_world_size()) != tensor_parallel:
        raise ValueError(
            f"Engine: tensor_parallel is {tensor_parallel}, and the process group has {size} ranks, expected as many"
        )
    return Ranks(distributed.group.WORLD), given


def begin(device: torch.device, **how: Any) -> None:
    """Make the default process group, for tensors on that device; it ends with the process.

    `how` are of `torch.distributed.init_process_group`, by default by the environment.
    """
    if device.type == "cuda":
        # NVLink multicast can take the GPUs of a shared host out of service.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        how |= {"device_id": device}
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", **how)
    atexit.register(end)


def end() -> None:
    """End the default process group, if there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
