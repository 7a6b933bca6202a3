"""The update of a list of tensors in one launch, and the sum of squares of their gradients in one launch before it.

The list update reads a table in device memory. A row holds the addresses of a parameter's tensors, its size, its kind
(dtypes and options) and its group; a kernel casts an address to a pointer of that kind. So one launch serves any mix
of shapes, dtypes and groups: the kernel has one branch for each kind that the list has. The elements of all tensors
are divided into chunks of BLOCK, one a program. A second table holds the tensor of each chunk.
A whole chunk at aligned addresses is loaded in vectors of 16 bytes without masks; any other, one element at a time.

Gradients have a vector of addresses of their own, since they move at each step where `zero_grad` sets them to None. An
address of zero is a parameter without a gradient, which is left as it is.

The step counts are float32 on the device, as in PyTorch's fused AdamW. The last CTA to finish increments them, when all
others have read them: so one launch is a whole step, and a CUDA graph may replay it.

The sum of squares for clipping is one launch before the update. Each program adds the squares of its chunks, and the
last to finish adds the programs' sums in their order, in float64: two runs are bit-identical.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.ops.adamw import parts
from rooftile.ops.adamw.parts import AMSGRAD, HYPER, MASTER, STOCHASTIC, Group, kind_of, load, read_group, update_chunk
from rooftile.primitives.splitk import arrives_last

import triton  # isort: skip
import triton.language as tl  # isort: skip


# A row of the table.
_PARAM, _EXP_AVG, _EXP_AVG_SQ, _MAX_EXP_AVG_SQ, _MASTER, _STEP = (tl.constexpr(i) for i in range(6))
_SIZE, _KIND, _GROUP, _SERIAL, _FIRST, _FIRST_OF_NORM, _CLASS, _SEED = (tl.constexpr(i) for i in range(6, 14))
_ROW = tl.constexpr(16)
_KIND_BITS = 8


@triton.jit(do_not_specialize=["n_chunks", "n_tensors"])
def _adamw_list_kernel(
    table_ptr,
    grads_ptr,
    chunks_ptr,
    hyper_ptr,
    counter_ptr,
    sums_ptr,
    scale_ptr,
    found_inf_ptr,
    n_chunks,
    n_tensors,
    KINDS: tl.constexpr,
    N_KINDS: tl.constexpr,
    CLASSES: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """KINDS holds N_KINDS kinds of 8 bits each. SKIPS: a norm that is not finite leaves everything as it is."""
    scale = 1.0
    goes = True
    if scale_ptr is not None:
        scale = 1.0 / tl.load(scale_ptr).to(tl.float32)
    if found_inf_ptr is not None:
        goes = tl.load(found_inf_ptr) == 0.0
    if sums_ptr is not None:
        norm = tl.sqrt(tl.sum(tl.load(sums_ptr + tl.arange(0, CLASSES)), axis=0)) * scale
        clip = tl.load(hyper_ptr) / (norm + 1e-6)
        scale = (scale * tl.where(clip > 1.0, 1.0, clip)).to(tl.float32)  # a NaN stays one
        if SKIPS:
            goes = goes & (norm < float("inf"))

    chunk = tl.program_id(0)
    if goes & (chunk < n_chunks):
        tensor = tl.load(chunks_ptr + chunk).to(tl.int64)
        row_ptr = table_ptr + tensor * _ROW
        g_at = tl.load(grads_ptr + tensor)
        if g_at != 0:
            start = (chunk - tl.load(row_ptr + _FIRST)) * BLOCK
            size = tl.load(row_ptr + _SIZE)
            kind = tl.load(row_ptr + _KIND)
            addresses = (
                tl.load(row_ptr + _PARAM),
                g_at,
                tl.load(row_ptr + _EXP_AVG),
                tl.load(row_ptr + _EXP_AVG_SQ),
                tl.load(row_ptr + _MAX_EXP_AVG_SQ),
                tl.load(row_ptr + _MASTER),
            )
            step = tl.load(tl.load(row_ptr + _STEP).to(tl.pointer_type(tl.float32))) + 1.0
            random = (tl.load(row_ptr + _SEED), step.to(tl.int32), tl.load(row_ptr + _SERIAL).to(tl.int32))

            group_ptr = hyper_ptr + tl.load(row_ptr + _GROUP) * HYPER
            hyper = read_group(group_ptr, scale, step)
            for i in tl.static_range(N_KINDS):
                if kind == (KINDS >> 8 * i) & 255:
                    update_chunk(addresses, start, size, hyper, random, (KINDS >> 8 * i) & 255, BLOCK)

    if arrives_last(counter_ptr, tl.num_programs(0)) & goes:
        for first in tl.range(0, n_tensors, 128):
            tensors = (first + tl.arange(0, 128)).to(tl.int64)
            some = tensors < n_tensors
            mask = some & (tl.load(grads_ptr + tensors, mask=some, other=0) != 0)
            step_ptrs = tl.load(table_ptr + tensors * _ROW + _STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
            tl.store(step_ptrs, tl.load(step_ptrs, mask=mask, other=0.0) + 1.0, mask=mask)


@triton.jit
def _squares(g_at, start, size, CODE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The sum of squares of a chunk of BLOCKS blocks."""
    squares = tl.zeros((BLOCK,), tl.float32)
    if (start + BLOCKS * BLOCK <= size) & (g_at & 15 == 0):
        for i in tl.static_range(BLOCKS):
            g = load(g_at, start + i * BLOCK + tl.arange(0, BLOCK), None, CODE, True)
            squares += g * g
    else:
        for first in tl.range(start, tl.minimum(start + BLOCKS * BLOCK, size), BLOCK, num_stages=1):
            offsets = first + tl.arange(0, BLOCK)
            g = load(g_at, offsets, offsets < size, CODE, False)
            squares += g * g
    return tl.sum(squares, axis=0)


@triton.jit(do_not_specialize=["n_chunks"])
def _squares_kernel(
    table_ptr,
    grads_ptr,
    chunks_ptr,
    partial_ptr,
    sums_ptr,
    counter_ptr,
    n_chunks,
    GRADS: tl.constexpr,
    CLASSES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The sum of squares of each class of gradients. GRADS has a bit for each of `DTYPES` that the list has."""
    classes = tl.arange(0, CLASSES)
    totals = tl.zeros((CLASSES,), tl.float32)
    for chunk in tl.range(tl.program_id(0), n_chunks, tl.num_programs(0), num_stages=1):
        tensor = tl.load(chunks_ptr + chunk).to(tl.int64)
        row_ptr = table_ptr + tensor * _ROW
        g_at = tl.load(grads_ptr + tensor)
        if g_at != 0:
            start = (chunk - tl.load(row_ptr + _FIRST_OF_NORM)) * (BLOCK * BLOCKS)
            size = tl.load(row_ptr + _SIZE)
            code = tl.load(row_ptr + _KIND) // 3 % 3
            for c in tl.static_range(3):
                if (GRADS >> c) & 1:  # noqa: SIM102  # decided while compiling
                    if code == c:
                        total = _squares(g_at, start, size, c, BLOCK, BLOCKS)
                        totals += tl.where(classes == tl.load(row_ptr + _CLASS), total, 0.0)
    tl.store(partial_ptr + tl.program_id(0) * CLASSES + classes, totals)

    count = tl.num_programs(0)
    if arrives_last(counter_ptr, count):
        programs = tl.arange(0, PROGRAMS)[:, None]
        parts = tl.load(
            partial_ptr + programs * CLASSES + classes[None, :], mask=programs < count, other=0.0, cache_modifier=".cg"
        )
        tl.store(sums_ptr + classes, tl.sum(parts.to(tl.float64), axis=0))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter in an update: tensors on one device, dense, with the same strides.

    `step` is a float32 number on the device. `group` counts from 0. `norm_class` says in which of the sums of squares
    the gradient counts.
    """

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    max_exp_avg_sq: Tensor | None = None
    master: Tensor | None = None
    group: int = 0
    serial: int = 0
    norm_class: int = 0


def hyperparameters(groups: Sequence[Group], max_norm: float | None, device: torch.device) -> Tensor:
    """What `ListUpdate.update` reads of the groups. `max_norm` is the greatest norm of all gradients together."""
    head = [0.0 if max_norm is None else max_norm, *([0.0] * (HYPER.value - 1))]
    return launching.upload([head, *(group.row() for group in groups)], torch.float64, device)


def _chunks(sizes: list[int], chunk: int) -> tuple[Tensor, list[int]]:
    """The tensor of each chunk, and the first chunk of each tensor."""
    counts = torch.tensor([library.cdiv(size, chunk) for size in sizes], dtype=torch.int64)
    firsts = (counts.cumsum(0) - counts).tolist()
    return torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts), firsts


class ListUpdate:
    """The update of a list of parameters on one device, for any gradients: the tables, and the launches over them.

    Args:
        entries: the parameters; at least one.
        grads: the dtype of each one's gradient.
        seed: of stochastic rounding, which parameters in bfloat16 without a master copy get; None to round to nearest.
        classes: sums of squares to keep apart.
        clips: `update` clips by the norm.
        skips: a norm that is not finite leaves everything as it is.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        grads: Sequence[torch.dtype],
        *,
        seed: int | None = None,
        classes: int = 1,
        clips: bool = False,
        skips: bool = False,
    ) -> None:
        self.entries, self.device = tuple(entries), entries[0].param.device
        self.clips, self.skips = clips, skips
        if self.device.type == "cpu" and runtime.MODE is runtime.Mode.GPU:
            raise ValueError(f"AdamW: a parameter is on the CPU, expected a GPU ({runtime.TO_INTERPRET})")
        widest = max(parts.widest(e.param, e.exp_avg, e.master) for e in self.entries)
        self.target = runtime.target(self.device)
        self.config = parts.config(widest, self.target)
        kinds = [self._kind(e, dtype, seed) for e, dtype in zip(self.entries, grads, strict=True)]
        self.kinds = tuple(sorted(set(kinds)))
        self.grad_bits = sum({1 << (kind // 3 % 3) for kind in kinds})
        self.classes = library.power_of_two(classes)
        sizes = [e.param.numel() for e in self.entries]
        chunks, firsts = _chunks(sizes, self.config.block)
        norm_chunks, norm_firsts = _chunks(sizes, self.config.block * self.config.blocks)
        rows = [
            [
                *map(_address, (e.param, e.exp_avg, e.exp_avg_sq, e.max_exp_avg_sq, e.master, e.step)),
                *(e.param.numel(), kind, e.group + 1, e.serial, first, norm_first, e.norm_class, seed or 0, 0, 0),
            ]
            for e, kind, first, norm_first in zip(self.entries, kinds, firsts, norm_firsts, strict=True)
        ]
        self.table = launching.upload(rows, torch.int64, self.device)
        self.n_chunks, self.n_norm_chunks = chunks.numel(), norm_chunks.numel()
        self.chunks = launching.upload(chunks, torch.int32, self.device)
        self.norm_chunks = launching.upload(norm_chunks, torch.int32, self.device) if clips else None
        self._starts: dict[tuple[bool, bool], Callable[..., None]] = {}

    @staticmethod
    def _kind(entry: Entry, grad: torch.dtype, seed: int | None) -> int:
        flags = AMSGRAD * (entry.max_exp_avg_sq is not None) + MASTER * (entry.master is not None)
        if seed is not None and entry.master is None and entry.param.dtype == torch.bfloat16:
            flags += STOCHASTIC
        return kind_of(entry.param.dtype, grad, entry.exp_avg.dtype, flags)

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """The memory that launches read: a CUDA graph needs it as long as it lives."""
        return self.table, self.chunks, self.norm_chunks

    def addresses(self, grads: list[int]) -> Tensor:
        """What the launches read of the gradients, which have the strides of their parameters: the address of each; 0
        for a parameter that is left as it is."""
        return launching.upload(grads, torch.int64, self.device)

    def norm(self, addresses: Tensor) -> Tensor:
        """The sum of squares of each class of gradients, float64; of classes that nothing is in, 0."""
        c = self.config
        programs = max(1, min(self.n_norm_chunks, self.target.multiprocessors * c.per_sm))
        partial = torch.empty(programs * self.classes, dtype=torch.float32, device=self.device)
        sums = torch.empty(self.classes, dtype=torch.float64, device=self.device)
        constants = {
            "GRADS": self.grad_bits,
            "CLASSES": self.classes,
            "PROGRAMS": library.power_of_two(programs),
            "BLOCK": c.block,
            "BLOCKS": c.blocks,
        }
        tensors = (self.table, addresses, self.norm_chunks, partial, sums, launching.counters(1, self.device))
        launcher = launching.launcher(_squares_kernel, tensors, constants, num_warps=c.num_warps)
        launching.launch(launcher, programs, tensors, (), (self.n_norm_chunks,))
        return sums

    def update(
        self,
        addresses: Tensor,
        hyper: Tensor,
        sums: Tensor | None = None,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update all parameters that have a gradient, and increment their steps.

        Args:
            addresses: of the gradients.
            hyper: what `hyperparameters` made.
            sums: of squares, as `norm` gives them, if the list clips.
            scale: gradients are divided by it.
            found_inf: nothing happens unless it is 0.
        """
        given = (scale is not None, found_inf is not None)
        start = self._starts.get(given)
        if start is None:
            start = self._starts[given] = self._bind(scale, found_inf)
        counter = launching.counters(1, self.device)
        start(self.table, addresses, self.chunks, hyper, counter, sums, scale, found_inf)

    def _bind(self, scale: Tensor | None, found_inf: Tensor | None) -> Callable[..., None]:
        c = self.config
        constants = {
            "KINDS": sum(kind << (_KIND_BITS * i) for i, kind in enumerate(self.kinds)),
            "N_KINDS": len(self.kinds),
            "CLASSES": self.classes,
            "SKIPS": self.skips,
            "BLOCK": c.block,
        }
        tensors = (*([self.table] * 5), self.table if self.clips else None, scale, found_inf)
        launcher = launching.launcher(_adamw_list_kernel, tensors, constants, num_warps=c.num_warps)
        return launching.bind(launcher, max(1, self.n_chunks), numbers=(self.n_chunks, len(self.entries)))


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
