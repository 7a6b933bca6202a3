"""How a kernel is launched, and the counters that kernels share.

Triton's launcher looks at every argument of every call to find the kernel that was compiled for it, and encodes every
TMA descriptor anew. An op knows what its arguments decide, so here a launch is prepared once and then only started:

    launcher = KernelLauncher(_kernel, constants, num_warps=4)      # per dtypes, flags and configuration
    start = bind(launcher, programs, strides=(...), numbers=(...))  # per shapes and strides
    start(x, None, y)                                               # per call: the tensors, or None

`start` checks nothing but the alignment of its pointers. It launches on the device of its tensors and on that device's
current stream. In the interpreter, in compile mode, at the first call and while a profiler has hooked into launches it
goes through Triton's launcher; otherwise native.c starts the compiled kernel in 2 to 3 us.

An op whose `launch` is `prepare(*args) -> run` keeps `start` in what `run` closes over: see `library.define`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import native, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
from triton.tools.tensor_descriptor import TensorDescriptor  # isort: skip

# Triton's cache does not know the assembler: an option that changes nothing keeps what the newest made apart.
NEWEST_ASSEMBLER = "--fmad=true"
_MANY = 256  # launches that a launcher remembers by strides; more are of strides that never repeat
_LAUNCHERS: weakref.WeakSet[KernelLauncher] = weakref.WeakSet()
_LAUNCHES: weakref.WeakSet[Launch] = weakref.WeakSet()
_FORGETTERS: list[Callable[[], None]] = []  # of others who remember launches


class Untraceable(Exception):
    """The launch can't be part of a graph that a compiler takes over; the op stays whole."""


class KernelLauncher:
    """A kernel with its constants and options: all that does not change from call to call.

    A launcher is for one set of dtypes, and for one choice of which tensors are None: a cache of launchers has both in
    its key.

    Args:
        kernel: the `@triton.jit` function. Its parameters are pointers, then integers that Triton specializes on
            (strides), then numbers that it does not, then constants.
        constants: the kernel's constants, in the order of its parameters.
        newest_assembler: on sm_90 take the newest ptxas that comes with Triton, not the one that Triton would. Version
            12.8 computes descriptors of the tensor cores' operands from registers that nothing wrote, where a kernel
            has operands of several GEMMs in one place of shared memory, or several loops over one operand.
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
        self.launches: dict[Any, Callable[..., None]] = {}  # of `launch`, by device and strides
        _LAUNCHERS.add(self)


@functools.lru_cache(maxsize=4096)
def _launcher(kernel: Any, dtypes: Any, constants: Any, options: Any) -> KernelLauncher:
    return KernelLauncher(kernel, dict(constants), **dict(options))


def launcher(
    kernel: Any, tensors: Iterable[Tensor | None], constants: Mapping[str, Any], **options: Any
) -> KernelLauncher:
    """The one launcher of a kernel for tensors of such dtypes, or None, and those hashable constants and options."""
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    return _launcher(kernel, dtypes, tuple(constants.items()), tuple(options.items()))


class Descriptor(NamedTuple):
    """A tensor that a kernel reads or writes by TMA, but for its address.

    `layout` is Gluon's, for its kernels; Triton's have none. Outside of `shape`, zeros are read and nothing is written.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None

    def of(self, tensor: Tensor) -> Any:
        """Triton's or Gluon's descriptor of that tensor."""
        sizes = list(self.shape), list(self.strides), list(self.block)
        if self.layout is None:
            return TensorDescriptor(tensor, *sizes)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(tensor, *sizes, self.layout)


def bind(
    launcher: KernelLauncher,
    programs: int | None,
    *,
    strides: tuple[int | None, ...] = (),
    numbers: tuple[int | float | None, ...] = (),
    descriptors: Mapping[int, Descriptor] | None = None,
) -> Callable[..., None]:
    """A launch with all but its tensors fixed: call it with a tensor or None for each of the kernel's pointers.

    Args:
        launcher: the kernel. Its first pointer is never None.
        programs: of the grid; None where each call says how many, as its last argument.
        strides: the integers that Triton specializes on; None for those that the kernel's constants leave unused.
        numbers: those that it does not. For each that is None a call gives an int after the tensors.
        descriptors: which pointers are TMA descriptors, by their place among the pointers. Calls give tensors.
    """
    found = Launch(launcher, programs, strides, numbers, descriptors or {})
    module = native.module()
    return found if module is None else found.natively(module)


class Launch:
    """What `bind` returns, in Python; native.c comes here for all that it does not do itself."""

    def __init__(
        self,
        launcher: KernelLauncher,
        programs: int | None,
        strides: tuple[int | None, ...],
        numbers: tuple[int | float | None, ...],
        descriptors: Mapping[int, Descriptor],
    ) -> None:
        self.launcher = launcher
        self.programs = programs
        self.strides = strides
        self.numbers = numbers
        self.descriptors = descriptors
        self.n_tensors = len(launcher.kernel.arg_names) - len(strides) - len(numbers) - len(launcher.values)
        self.compiled: dict[int, Any] = {}  # by device, for pointers of 16 bytes' alignment and numbers below 2^31
        self._native: Any = None
        _LAUNCHES.add(self)

    def natively(self, module: Any) -> Callable[..., None]:
        """The same launch by native.c."""
        start = module.Launch(self._from_native)
        self._native = weakref.ref(start)
        return start

    def forget(self) -> None:
        """Go through Triton's launcher at the next call."""
        self.compiled.clear()
        start = self._native and self._native()
        if start is not None:
            start.unbind()

    def _from_native(self, start: Any, *given: Any) -> None:
        self(*given)

    def _numbers(self, given: tuple[Any, ...]) -> tuple[int | float, ...]:
        """The numbers, with those that a call gives in their places."""
        rest = iter(given)
        return tuple(next(rest) if number is None else number for number in self.numbers)

    def _given(self) -> dict[int, int]:
        """Where in a call each of the kernel's arguments is that a call gives."""
        first = self.n_tensors + len(self.strides)
        places = [*range(self.n_tensors), *(first + i for i, n in enumerate(self.numbers) if n is None)]
        return {place: i for i, place in enumerate(places)}

    def __call__(self, *given: Any) -> None:
        tensors = given[: self.n_tensors]
        first = tensors[0]
        programs: Any = given[-1] if self.programs is None else self.programs
        numbers = self._numbers(given[self.n_tensors :])
        if isinstance(first, FunctionalTensor):
            return self._trace(programs, tensors, numbers)
        if runtime.MODE is not runtime.Mode.GPU:
            self._through_triton(programs, first, self._arguments(tensors, numbers))
            return None
        device = first.get_device()
        if device != _current_device():
            with _on_device(device):
                return self._on_gpu(programs, device, tensors, numbers)
        return self._on_gpu(programs, device, tensors, numbers)

    def _arguments(self, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> tuple[Any, ...]:
        """What the kernel is given by position: all but its constants."""
        if self.descriptors:
            tensors = tuple(
                self.descriptors[i].of(t) if i in self.descriptors and t is not None else t
                for i, t in enumerate(tensors)
            )
        return (*tensors, *self.strides, *numbers)

    def _through_triton(self, programs: Any, first: Any, args: tuple[Any, ...]) -> Any:
        launcher = self.launcher
        with _assembler(launcher, first) as options:
            return launcher.kernel[(programs,)](*args, **launcher.constants, **options)

    def _on_gpu(self, programs: Any, device: int, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> None:
        pointers = 0
        for t in tensors:
            if t is not None:
                pointers |= t.data_ptr()
        # Numbers are not specialized on, but one past 2^31 is of another type.
        usual = not pointers & 15 and all(n < 2**31 for n in numbers)
        args = self._arguments(tensors, numbers)
        compiled = self._find_compiled(device, tensors, numbers) if usual else None
        if compiled is not None:
            start_compiled(compiled, programs, device, (*args, *self.launcher.values))
        else:
            compiled = self._through_triton(programs, tensors[0], args)
            if usual:
                self.compiled[device] = compiled
                if len(self.launcher.compiled) >= _MANY:
                    self.launcher.compiled.clear()
                self.launcher.compiled[self._specialization(device, tensors, numbers)] = compiled
        # Where all numbers are fixed, the caller has the alignment in a key of its own.
        if usual or (self.programs is not None and None not in self.numbers):
            self._bind(compiled, device, args)
        return None

    def _find_compiled(self, device: int, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> Any:
        """The kernel of this launch, or of another of its launcher's for which Triton would have compiled the same."""
        found = self.compiled.get(device)
        if found is None and self._shares():
            found = self.launcher.compiled.get(self._specialization(device, tensors, numbers))
            if found is not None:
                self.compiled[device] = found
        return found

    def _specialization(self, device: int, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> Any:
        """All that Triton compiles a kernel for beside its constants, with aligned pointers and numbers below 2^31."""
        blocks = tuple((i, d.block, d.layout) for i, d in self.descriptors.items())
        dtypes = tuple(getattr(t, "dtype", None) for t in tensors)
        return device, self.strides, blocks, dtypes, tuple(map(type, numbers))

    def _shares(self) -> bool:
        """Whether launches with other numbers have the same kernel: Triton specializes on none of them."""
        params = getattr(self.launcher.kernel, "params", None)
        if params is None:
            return False
        first = self.n_tensors + len(self.strides)
        return all(params[first + i].do_not_specialize for i, n in enumerate(self.numbers) if not isinstance(n, float))

    def _bind(self, compiled: Any, device: int, args: tuple[Any, ...]) -> None:
        start = self._native and self._native()
        if start is None or start.bound:
            return
        programs = -1 if self.programs is None else self.programs
        with contextlib.suppress(native.Unbindable):
            native.bind(start, compiled, device, programs, (*args, *self.launcher.values), self._given())

    def _trace(self, programs: Any, tensors: Any, numbers: Any) -> None:
        """Put the launch into the graph that is being traced: the compiler launches it without the op around it."""
        from torch.library import wrap_triton

        launcher = self.launcher
        if set(launcher.options) - {"num_warps"} or self.descriptors:
            raise Untraceable("a cooperative grid, a limit on registers, programmatic launch, or TMA descriptors")
        wrapped = wrap_triton(launcher.kernel)
        wrapped[(programs,)](*tensors, *self.strides, *numbers, **launcher.constants, **launcher.options)


def launch(
    launcher: KernelLauncher,
    programs: int,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[int | None, ...],
    numbers: tuple[int, ...] = (),
) -> None:
    """Run `programs` programs of the launcher's kernel over those arguments: `bind` and its launch in one call.

    It finds the launch by device and strides, and takes pointers of any alignment.
    """
    first = tensors[0]
    assert first is not None
    if runtime.MODE is not runtime.Mode.GPU or isinstance(first, FunctionalTensor):
        start: Callable[..., None] = Launch(launcher, programs, strides, numbers, {})
        return start(*tensors)
    key = (first.get_device(), strides)
    found = launcher.launches.get(key)
    if found is None:
        if len(launcher.launches) >= _MANY:
            launcher.launches.clear()
        found = launcher.launches[key] = bind(launcher, None, strides=strides, numbers=(None,) * len(numbers))
    return found(*tensors, *numbers, programs)


@contextlib.contextmanager
def _assembler(launcher: KernelLauncher, like: Any) -> Iterator[dict[str, Any]]:
    """The launcher's options, while the assembler that it needs for that tensor's device is in place."""
    if not launcher.newest_assembler or runtime.target(like.device).arch != "sm_90":
        yield launcher.options
        return
    tools = triton.knobs.nvidia
    with tools.scope():
        tools.ptxas = tools.ptxas_blackwell.path
        yield {**launcher.options, "ptx_options": NEWEST_ASSEMBLER}


def _stream(device: int) -> int:
    """The current stream of that device, whichever device is the current one."""
    return triton.runtime.driver.active.get_current_stream(device)


def _current_device() -> int:
    return torch.accelerator.current_device_index()


def _on_device(index: int) -> contextlib.AbstractContextManager[Any]:
    """Make that device the current one meanwhile."""
    return torch.get_device_module().device(index)


def _hooked() -> bool:
    """Whether somebody wants to be told of launches: a profiler, perhaps."""
    hooks = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook))


def start_compiled(compiled: Any, programs: int, device: int, args: tuple[Any, ...]) -> None:
    """Run a kernel that is compiled, as Triton's `compiled[grid](*args)` does."""
    if _hooked():
        compiled[(programs, 1, 1)](*args)
        return
    # Arguments that only hooks read cost 2 us to build.
    none = (None, None, None)
    compiled.run(programs, 1, 1, _stream(device), compiled.function, compiled.packed_metadata, *none, *args)


@contextlib.contextmanager
def observed() -> Iterator[None]:
    """Every launch meanwhile goes through `start_compiled` or Triton's launcher, for those who replace one of them."""
    module = native.module()
    if module is not None:
        module.observe(1)
    try:
        yield
    finally:
        if module is not None:
            module.observe(-1)


def forget() -> None:
    """Forget every remembered kernel and prepared call: the next launches go through Triton's launcher again, and ops
    choose anew how they run."""
    for launcher in _LAUNCHERS:
        launcher.compiled.clear()
        launcher.launches.clear()
    for launch in list(_LAUNCHES):
        launch.forget()
    for forget in _FORGETTERS:
        forget()


def when_forgotten(forget: Callable[[], None]) -> None:
    """Call that whenever `forget` is called."""
    _FORGETTERS.append(forget)


_ARENA = 1 << 20  # counters of a block that captures share out
_SHARED = 1 << 16  # counters for graphs that never replay concurrently: more than any launch of a model takes
_LEAST = 4096  # counters of a stream
_LOCK = threading.Lock()
_ARENAS: dict[int, _Arena] = {}
_EAGER: dict[tuple[int, int], Tensor] = {}
_KEPT: list[Tensor] = []  # blocks that were too small; kernels and graphs may still use them
_CAPTURES: dict[tuple[int, int], Tensor] = {}  # by device and stream: what `captures_share` was given


class _Arena:
    """The counters that captures on a device take, each its own: blocks that stay for good."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.block, self.used = 0, 0  # the block that is being shared out, and how much of it is taken

    def reserve(self, device: int) -> None:
        """Have a block, so that a capture finds it."""
        if not self.blocks:
            self.blocks.append(_zeros(_ARENA, device))

    def take(self, n: int, device: int) -> Tensor:
        while True:
            if self.block == len(self.blocks):
                self.blocks.append(_zeros(max(n, _ARENA), device))
            block = self.blocks[self.block]
            if self.used + n <= block.numel():
                taken = block[self.used : self.used + n]
                self.used += n + -n % 4  # 16 bytes apart: Triton compiles anew for another alignment
                return taken
            self.block, self.used = self.block + 1, 0


def counters(n: int, device: torch.device) -> Tensor:
    """n int32 zeros, for a kernel that leaves them zero, so that no launch has to clear them.

    Kernels on one stream run one after another and share theirs. Every launch that a CUDA graph captures gets its own,
    because graphs may replay concurrently; within `captures_share` they share.

    The memory is never freed: a kernel of another stream or a graph may still use it, unknown to the allocator.
    """
    if runtime.MODE is not runtime.Mode.GPU:
        return torch.zeros(n, dtype=torch.int32, device=device)
    if torch._C._len_torch_dispatch_stack() and type(torch.empty(0)) is not Tensor:
        raise Untraceable("counters")
    index = device.index or 0
    stream = _stream(index)
    if torch.cuda.is_current_stream_capturing():
        shared = _CAPTURES.get((index, stream))
        if shared is not None and n <= shared.numel():
            return shared[:n]
        with _LOCK:
            return _ARENAS.setdefault(index, _Arena()).take(n, index)
    found = _EAGER.get((index, stream))
    if found is None or found.numel() < n:
        with _LOCK:
            found = _more(n, index, stream)
    return found


def _more(n: int, device: int, stream: int) -> Tensor:
    """A block of n counters or more for a stream, in the place of one that is too small. The lock is held."""
    _ARENAS.setdefault(device, _Arena()).reserve(device)
    found = _EAGER.get((device, stream))
    if found is None or found.numel() < n:
        if found is not None:
            _KEPT.append(found)
        # At least twice as many: all blocks that are kept are no larger together than the last.
        n = max(n, _LEAST if found is None else 2 * found.numel())
        found = _EAGER[device, stream] = _zeros(n, device)
    return found


def _zeros(n: int, device: int) -> Tensor:
    return _outside(lambda: torch.zeros(n, dtype=torch.int32, device="cuda"), device)


def _outside(make: Callable[[], Tensor], device: int) -> Tensor:
    """What `make` gives, whatever the caller is within.

    A thread of its own is outside of the memory pools and modes of the caller: torch.compile's CUDA graphs would take
    the memory back. Its stream is captured by nobody, and its calls are allowed while others capture.
    """

    def allocate() -> Tensor:
        with torch.cuda.device(device):
            _allow_while_capturing()
            with torch.cuda.stream(torch.cuda.Stream(device)):
                made = make()
                torch.cuda.current_stream().synchronize()
        return made

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table of numbers on the device. The host does not wait for the copy, which is ordered on the current stream.

    While a CUDA graph is captured the copy is made at once, outside of the graph. The caller keeps the table as long as
    the graph.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if runtime.MODE is not runtime.Mode.GPU:
        return host.to(device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _outside(lambda: host.to(device), device.index or 0)
    return host.pin_memory().to(device, non_blocking=True)


def _allow_while_capturing() -> None:
    """Let this thread allocate memory and wait while another thread captures a graph in CUDA's global mode."""
    if torch.version.cuda is not None:
        relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def allocate_counters(device: torch.device) -> Tensor:
    """What `captures_share` takes, on a GPU. The caller keeps it as long as its graphs."""
    return _zeros(_SHARED, device.index or 0)


@contextlib.contextmanager
def captures_share(counters: Tensor, stream: int) -> Iterator[None]:
    """All launches that are captured on that stream meanwhile share those counters, as launches of one stream do.

    Only if no two of these graphs replay concurrently. However many are recorded, they take no more counters. The
    stream decides, not the thread: autograd launches a backward from a thread of its own.
    """
    key = (counters.device.index or 0, stream)
    before = _CAPTURES.get(key)
    _CAPTURES[key] = counters
    try:
        yield
    finally:
        del _CAPTURES[key]
        if before is not None:
            _CAPTURES[key] = before


def reuse_counters() -> None:
    """Let captures from here on take the counters of earlier captures again. Only if no two graphs replay
    concurrently."""
    with _LOCK:
        for arena in _ARENAS.values():
            arena.block, arena.used = 0, 0


def clear_counters() -> None:
    """Wait for the devices and make all counters zero again, where a kernel that failed may have left others."""
    with _LOCK:
        blocks = [*_EAGER.values(), *_KEPT, *(block for arena in _ARENAS.values() for block in arena.blocks)]
        for device in {block.device for block in blocks}:
            torch.accelerator.synchronize(device)
        for block in blocks:
            block.zero_()
        for device in {block.device for block in blocks}:
            torch.accelerator.synchronize(device)


def describe(t: Tensor, block: tuple[int, ...], layout: Any = None) -> Descriptor | None:
    """The TMA descriptor of t with tiles of `block`; None where it can't have one.

    The last stride has to be 1, the base and the other strides multiples of 16 bytes, and a tile at most 256 elements
    long.
    """
    if isinstance(t, FunctionalTensor):
        raise Untraceable("TMA descriptors")
    size, any_stride = t.element_size(), t.shape[-1] + -t.shape[-1] % 16
    strides = tuple(d if n > 1 else any_stride for n, d in zip(t.shape[:-1], t.stride()[:-1], strict=True))
    if (t.stride(-1) != 1 and t.shape[-1] > 1) or t.data_ptr() % 16 or max(block) > 256:
        return None
    if any(d < t.shape[-1] or d * size % 16 for d in strides):
        return None
    return Descriptor(tuple(t.shape), (*strides, 1), block, layout)
