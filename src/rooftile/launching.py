"""How a kernel is launched: through Triton the first time, then through the compiled kernel itself.

Triton's own launcher looks at every argument of every call, to see whether a kernel compiled for such arguments is
there. An op knows which of its arguments decide: its dtypes and flags (they make a `Plan`), its strides, and whether
all pointers are aligned to 16 bytes. So it remembers the kernel by those, and saves most of the launcher's host time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

# Triton's cache does not know the assembler: an option that changes nothing keeps what the newest made apart.
NEWEST_ASSEMBLER = "--fmad=true"
_MANY = 256  # remembered kernels of a plan, over which they are forgotten: strides that never repeat
_LAUNCHERS: weakref.WeakSet[KernelLauncher] = weakref.WeakSet()


class Untraceable(Exception):
    """The launch can't be part of a graph that a compiler takes over; the op stays whole."""


class KernelLauncher:
    """A kernel with its constants and options: all that does not change from call to call.

    A plan is for one set of dtypes: who keeps plans has the dtypes in the key.

    Args:
        kernel: the `@triton.jit` function; its parameters are pointers, then integers that Triton specializes on, then
            numbers that it does not, then constants.
        constants: the kernel's constants, in the order of its parameters.
        newest_assembler: on sm_90 take the newest ptxas that comes with Triton, not the one that Triton would. Version
            12.8 computes descriptors of the tensor cores' operands from registers that nothing wrote, where a kernel
            has operands of several products in one place of shared memory, or several loops over one operand.
            `rooftile inspect` finds such reads (resources.py).
        options: num_warps and the like.
    """

    def __init__(
        self, kernel: Any, constants: dict[str, Any], *, newest_assembler: bool = False, **options: Any
    ) -> None:
        parameters = list(kernel.arg_names)
        if parameters[len(parameters) - len(constants) :] != list(constants):
            raise ValueError(
                f"KernelLauncher: constants are {list(constants)}, expected the last parameters of {parameters}"
            )
        self.kernel = kernel
        self.constants = constants
        self.newest_assembler = newest_assembler
        self.options = options
        self.values = tuple(constants.values())
        self.compiled: dict[Any, Any] = {}
        _LAUNCHERS.add(self)


def launch(
    plan: KernelLauncher,
    programs: int,
    tensors: tuple[Tensor | TensorDescriptor | None, ...],
    strides: tuple[int, ...],
    numbers: tuple[int, ...] = (),
) -> None:
    """Run `programs` programs of the plan's kernel over those arguments."""
    first = tensors[0].base if isinstance(tensors[0], TensorDescriptor) else tensors[0]
    if isinstance(first, FunctionalTensor):
        return _trace(plan, programs, tensors, strides, numbers)
    key = None
    if runtime.MODE is runtime.Mode.GPU:
        pointers = 0
        for t in tensors:
            if t is not None:
                pointers |= (t.base if isinstance(t, TensorDescriptor) else t).data_ptr()
        # Numbers are not specialized on, but one past 2^31 is of another type.
        if not pointers & 15 and all(n < 2**31 for n in numbers):
            key = (first.get_device(), strides)  # type: ignore[union-attr]
            compiled = plan.compiled.get(key)
            if compiled is not None:
                return _start(compiled, programs, key[0], (*tensors, *strides, *numbers, *plan.values))
    with _assembler(plan, first) as options:
        compiled = plan.kernel[(programs,)](*tensors, *strides, *numbers, **plan.constants, **options)
    if key is not None:
        if len(plan.compiled) >= _MANY:
            plan.compiled.clear()
        plan.compiled[key] = compiled
    return None


@contextlib.contextmanager
def _assembler(plan: KernelLauncher, like: Any) -> Iterator[dict[str, Any]]:
    """The plan's options, while the assembler that it needs for that tensor's device is in place."""
    if not plan.newest_assembler or runtime.target(like.device).arch != "sm_90":
        yield plan.options
        return
    tools = triton.knobs.nvidia
    with tools.scope():
        tools.ptxas = tools.ptxas_blackwell.path
        yield {**plan.options, "ptx_options": NEWEST_ASSEMBLER}


def _stream(device: int) -> int:
    return triton.runtime.driver.active.get_current_stream(device)


def _hooked() -> bool:
    """Whether somebody wants to be told of launches: a profiler, perhaps."""
    hooks = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook))


def _start(compiled: Any, programs: int, device: int, args: tuple[Any, ...]) -> None:
    """Run a kernel that is compiled, as Triton's `compiled[grid](*args)` does."""
    if _hooked():
        compiled[(programs, 1, 1)](*args)
    else:  # what hooks would be told costs 2 us to put together
        run, packed = compiled.run, compiled.packed_metadata
        run(programs, 1, 1, _stream(device), compiled.function, packed, None, None, None, *args)


def _trace(plan: KernelLauncher, programs: Any, tensors: Any, strides: Any, numbers: Any) -> None:
    """Put the launch into the graph that is being traced, so that the compiler launches it without the op around it."""
    from torch.library import wrap_triton

    if set(plan.options) - {"num_warps"} or any(isinstance(t, TensorDescriptor) for t in tensors):
        raise Untraceable("a cooperative grid, a limit on registers, an early launch, or descriptors of tensors")
    wrap_triton(plan.kernel)[(programs,)](*tensors, *strides, *numbers, **plan.constants, **plan.options)


def forget() -> None:
    """Forget every remembered kernel: the next launches go through Triton again, for what watches its launcher."""
    for plan in _LAUNCHERS:
        plan.compiled.clear()


_ARENA = 1 << 20  # counters of a device that graphs share out
_OF_TURNS = 1 << 16  # of graphs that are replayed in turns: more than any launch of a model takes
_ARENAS: dict[int, tuple[Tensor, int]] = {}
_EAGER: dict[tuple[int, int], Tensor] = {}
_TURNS: dict[tuple[int, int], Tensor] = {}  # of the streams that capture in turns


def counters(n: int, device: torch.device) -> Tensor:
    """n int32 zeros, for a kernel that leaves them zero.

    So no launch has to clear them. Kernels on one stream run one after another and share theirs; every launch that a
    CUDA graph captures gets its own, for graphs may be replayed side by side; but for those of `captures_share`.
    """
    if runtime.MODE is not runtime.Mode.GPU:
        return torch.zeros(n, dtype=torch.int32, device=device)
    if torch._C._len_torch_dispatch_stack() and type(torch.empty(0)) is not Tensor:
        raise Untraceable("counters")
    index = device.index or 0
    if torch.cuda.is_current_stream_capturing():
        shared = _TURNS.get((index, _stream(index)))
        if shared is not None and n <= shared.numel():
            return shared[:n]
        arena, used = _ARENAS.get(index, (None, 0))
        if arena is None or used + n > _ARENA:
            return torch.zeros(n, dtype=torch.int32, device=device)
        _ARENAS[index] = (arena, used + n + -n % 4)  # 16 bytes apart: Triton compiles anew for another alignment
        return arena[used : used + n]
    if index not in _ARENAS:
        _ARENAS[index] = (_zeros(_ARENA, index), 0)
    key = (index, _stream(index))
    found = _EAGER.get(key)
    if found is None or found.numel() < n:
        found = _EAGER[key] = _zeros(max(n, 4096), index)
    return found


def _zeros(n: int, device: int) -> Tensor:
    """Zeros that stay. A thread of its own is outside of the memory pools and modes that the caller may be within:
    torch.compile's CUDA graphs would take the memory back."""

    def allocate() -> Tensor:
        with torch.cuda.device(device):
            zeros = torch.zeros(n, dtype=torch.int32, device="cuda")
            torch.cuda.current_stream().synchronize()
        return zeros

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def allocate_counters(device: torch.device) -> Tensor:
    """What `captures_share` takes, on a GPU."""
    return _zeros(_OF_TURNS, device.index or 0)


@contextlib.contextmanager
def captures_share(counters: Tensor, stream: int) -> Iterator[None]:
    """All launches that are captured on that stream meanwhile share those counters, as launches of one stream do. For
    graphs of which no two are replayed at once: however many are recorded and forgotten, they take no more.

    By the stream, whichever thread launches: a backward is launched by autograd's own.
    """
    key = (counters.device.index or 0, stream)
    before = _TURNS.get(key)
    _TURNS[key] = counters
    try:
        yield
    finally:
        del _TURNS[key]
        if before is not None:
            _TURNS[key] = before


def reuse_counters() -> None:
    """Captures from here on may use the counters of earlier ones again: for who never replays two graphs at once. As
    `captures_share`, of counters that `discard_counters` renews."""
    for index, (arena, _) in _ARENAS.items():
        _ARENAS[index] = (arena, 0)


def discard_counters() -> None:
    """Forget all counters, where a kernel that failed may have left them dirty."""
    _ARENAS.clear()
    _EAGER.clear()


def matrix_descriptor(t: Tensor, rows: int, cols: int) -> TensorDescriptor | None:
    """What the tensor memory accelerator is told of a matrix and the tiles it loads of it; None where it can't."""
    if isinstance(t, FunctionalTensor):
        raise Untraceable("descriptors of tensors")
    n_rows, n_cols = t.shape
    stride = t.stride(0) if n_rows > 1 else n_cols + -n_cols % 16  # of a single row it may be anything
    if t.stride(1) != 1 or (t.data_ptr() | stride * t.element_size()) & 15 or stride < n_cols or max(rows, cols) > 256:
        return None
    return TensorDescriptor(t, [n_rows, n_cols], [stride, 1], [rows, cols])
