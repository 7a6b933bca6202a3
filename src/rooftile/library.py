"""How an op is registered with PyTorch, in one place.

`define` registers a schema, the kernel's launcher, a fake implementation and an autograd formula over
`torch.library.Library.define/impl`: it costs a call 2 to 7 us of host time where the decorators of `torch.library` cost
7 to 13, and torch.compile keeps one graph through it. Three traps that `torch.library.opcheck` does not see are closed
here: an op that mutates bumps the version counters of what it writes, and refuses a leaf that requires grad; the
derivative of a backward raises, where PyTorch would return a silent zero.

An op is given either as `launch(*args)`, which does everything at every call, or as `prepare(*args)`, which does once
what a kind of call needs and returns `run(*args)`, which does the rest:

    def _prepare(x, weight, eps):
        check(x, weight, eps)                                  # shapes and dtypes: raises for wrong ones
        shape, strides, dtype, device = x.shape, library.contiguous_strides(x.shape), x.dtype, x.device
        copies = {}
        rows = library.rows_of(x, copies, 0)
        launcher = _launcher(...)                              # the chosen configuration
        start = launching.bind(launcher, rows.shape[0], strides=(rows.stride(0),), numbers=(rows.shape[0],))
        start = library.copying(start, copies)                 # itself, unless x has to be copied

        def run(x, weight, eps):
            y = torch.empty_strided(shape, strides, dtype=dtype, device=device)  # half the time of torch.empty
            start(x, weight, y)
            return y

        return run

`run` is remembered by one key: of each tensor the dtype, shape, strides, device and the last four bits of its address,
and of every other argument its value. It is called with other tensors of the same key, and must keep none of those that
`prepare` was given. `prepare` may read nothing else that changes, but for tuning tables: a change of theirs forgets
prepared calls, as `launching.forget` does. Only a call that succeeded is remembered. Arguments that take a new value at
every call, such as positions, come last, and `varying` says how many they are: the key leaves their values out.

`Prepared(prepare)` remembers in the same way what is no op by itself, such as the norm that another op launches before
its GEMM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

from rooftile import launching, native, runtime, sharding, tuning
from rooftile.sharding import Rows as Rows

_LIBRARY = torch.library.Library("rooftile", "FRAGMENT")


@dataclasses.dataclass(frozen=True)
class Autograd:
    """The derivative of an op.

    `save(ctx, inputs, outputs)` keeps what the backward needs; `backward(ctx, *grad_outputs)` returns one gradient
    (or None) for each input of the schema; in `ctx.needs_input_grad` these begin at 1, as the launcher comes first. A
    gradient that nobody asked for arrives as None. `check(inputs)` raises for inputs that can't be differentiated,
    before anything is launched.
    """

    save: Callable[[Any, tuple[Any, ...], Any], None]
    backward: Callable[..., tuple[Tensor | None, ...]]
    check: Callable[[tuple[Any, ...]], None] | None = None


Called = Callable[[tuple[Any, ...]], str]  # the public function's name, by the op's arguments


def _device(overload: Any, called: Called, tensors: tuple[int, ...], args: tuple[Any, ...]) -> torch.device:
    """The device of the op's tensors (their places in args are known), which must be one."""
    device = args[0].device
    for i in tensors:
        if args[i] is not None and args[i].device != device:
            schema = overload._schema
            raise ValueError(
                f"{called(args)}: {schema.arguments[i].name} is on {args[i].device}, expected {device} to match "
                f"{schema.arguments[0].name}"
            )
    return device


def _guarded(overload: Any, called: Called, tensors: tuple[int, ...], launch: Callable[..., Any]) -> Callable[..., Any]:
    """`launch`, on the device of its tensors, which must be one that this process can launch kernels on."""

    def kernel(*args: Any) -> Any:
        device = _device(overload, called, tensors, args)
        if runtime.MODE is not runtime.Mode.GPU:
            return launch(*args)
        if device.type == "cpu":
            raise ValueError(
                f"{called(args)}: {overload._schema.arguments[0].name} is on the CPU, expected a GPU "
                f"({runtime.TO_INTERPRET})"
            )
        # A guard costs 2 us, so it is taken only where the current device is another.
        if device.index == launching._current_device():
            return launch(*args)
        with launching._on_device(device.index):
            return launch(*args)

    return kernel


# Whether, of the dispatch keys of a call, only a plain device's comes after autograd.
_PLAIN: dict[int, bool] = {}
_PLAIN_KEYS = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA, torch._C.DispatchKey.XPU)


def _is_plain(keyset: Any) -> bool:
    """Whether below autograd the dispatcher would go straight to the kernel: no tracing, no mode, no tensor subclass.

    The kernel is then called as it is, which saves 4 us of packing and unpacking the arguments a second time.
    """
    key = keyset.raw_repr()
    plain = _PLAIN.get(key)
    if plain is None:
        below = (keyset & torch._C._after_autograd_keyset).remove(torch._C.DispatchKey.ADInplaceOrView)
        plain = _PLAIN[key] = below.highestPriorityTypeId() in _PLAIN_KEYS
    return plain


def _node(name: str, autograd: Autograd | None, mutated: tuple[int, ...]) -> type[torch.autograd.Function]:
    """The op as autograd records it: applied to what runs it, and to its arguments."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            outputs = run(*args)
            if mutated:
                outputs = tuple(args[i] for i in mutated if args[i] is not None)
                ctx.mark_dirty(*outputs)
            if autograd is not None:
                autograd.save(ctx, args, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if autograd is None:
                why = ": gradients of gradients are not supported" if name.endswith("_backward") else ""
                raise RuntimeError(f"rooftile::{name} has no derivative{why}")
            return None, *autograd.backward(ctx, *grads)

    Node.__name__ = Node.__qualname__ = "".join(part.capitalize() for part in name.split("_")) + "Backward"
    return Node


def _somebody_listens() -> bool:
    """Whether a mode, a transform or a profiler wants to see ops."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or torch.autograd._profiler_enabled()
    )


def _nobody_listens(args: tuple[Any, ...], tensors: tuple[int, ...], required: tuple[int, ...]) -> bool:
    """Whether a call may go past the dispatcher: plain tensors, and nothing that wants to see ops."""
    if _somebody_listens():
        return False
    for i in tensors:  # a generator would cost a call 1 us
        tensor = args[i]
        if tensor is None:
            if i in required:
                return False
        elif not (isinstance(tensor, Tensor) and _is_plain(torch._C._dispatch_keys(tensor))):
            return False
    return True


def _check_arguments(
    overload: Any, called: Called, tensors: tuple[int, ...], required: tuple[int, ...], args: tuple[Any, ...]
) -> None:
    """What the dispatcher would say of None, a list or an array is about its own types."""
    for i in tensors:
        if i in required or args[i] is not None:
            check_tensors(called(args), **{overload._schema.arguments[i].name: args[i]})


def _has_tangent(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


_MANY = 1024  # prepared calls that an op remembers
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class _Unkeyable(Exception):
    """Arguments that a prepared call can't be remembered by."""


class _Calls:
    """The prepared calls of an op, by their arguments: what `Calls` of native.c is, in Python."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        self._known.clear()

    def _part(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN_TYPES:
            device, address = value.get_device(), value.data_ptr()
            if device < 0 or value.is_neg():
                raise _Unkeyable
            return value.dtype, device, address & 15, not address, value.shape, value.stride()
        if kind in (list, tuple):
            return tuple(map(self._part, value))
        if value is None or kind in (bool, int, float, str, torch.dtype):
            return kind, value
        raise _Unkeyable

    def _key(self, args: tuple[Any, ...]) -> Any:
        try:
            return tuple(map(self._part, args))
        except (_Unkeyable, RuntimeError, NotImplementedError):  # a tensor without strides or memory
            return None

    def get(self, *args: Any) -> Any:
        """What was stored for such arguments; None where there is nothing, or the device is not the current one."""
        key = self._key(args)
        found = None if key is None else self._known.get(key)
        if found is None:
            return None
        device = next(arg for arg in args if type(arg) in _PLAIN_TYPES).get_device()
        return found if device == launching._current_device() else None

    def find(self, *args: Any) -> Any:
        """As `get`; in a tuple where a gradient is wanted, and None where somebody wants to see ops."""
        if _somebody_listens() or forward_ad._current_level >= 0:
            return None
        found = self.get(*args)
        if found is not None and torch.is_grad_enabled():
            for arg in args:
                if type(arg) in _PLAIN_TYPES and arg.requires_grad:
                    return (found,)
        return found

    def store(self, run: Callable[..., Any], *args: Any) -> bool:
        """Whether these arguments have a key; `find` gives `run` for such arguments from now on."""
        key = self._key(args)
        if key is not None:
            self._known[key] = run
        return key is not None


class Prepared:
    """`prepare(*args)(*args)`, of which the first part is done once for all calls of a kind.

    On a GPU what `prepare` returned is remembered by the arguments, until `launching.forget`. `find` gives it for a
    call to which nobody else listens, as `Calls` of native.c says; nothing before the first call. The last `varying`
    arguments are not among those that it is remembered by, and `find` is not given them.
    """

    def __init__(self, prepare: Callable[..., Callable[..., Any]], varying: int = 0) -> None:
        self._prepare = prepare
        self.n_keyed = -varying or None
        self._calls: Any = None
        self.find: Callable[..., Any] = _find_nothing

    def __call__(self, *args: Any) -> Any:
        if runtime.MODE is not runtime.Mode.GPU:
            return self._prepare(*args)(*args)
        if self._calls is None:  # not before the first call: native.c is compiled then
            module = native.module()
            self._calls = _Calls() if module is None else module.Calls()
            self.find = self._calls.find
            launching.when_forgotten(self._calls.clear)
            tuning.when_changed(self._calls.clear)
        keyed = args[: self.n_keyed]
        run = self._calls.get(*keyed)
        if run is not None:
            return run(*args)
        run = self._prepare(*args)
        result = run(*args)
        if len(self._calls) >= _MANY:
            self._calls.clear()
        self._calls.store(run, *keyed)
        return result


def _find_nothing(*args: Any) -> None:
    return None


def _inline(launch: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile puts into its graph for an op: the launches themselves, where they can be traced, else the op.

    A compiled graph then starts the kernel as it starts its own, without the op's Python around it.
    """

    def inline(mode: Any, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if args[0].device.type != "cpu":  # where it is, the op itself says what it needs
            with contextlib.suppress(launching.Untraceable), mode:
                return launch(*args)
        return mode.__torch_dispatch__(op, types, args, kwargs or {})

    return inline


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    launch: Callable[..., Any] | None = None,
    prepare: Callable[..., Callable[..., Any]] | None = None,
    varying: int = 0,
    autograd: Autograd | None = None,
    called: Called | None = None,
    rows: Rows | None = None,
) -> Callable[..., Any]:
    """Register `rooftile::<schema>` and return the callable op.

    Args:
        schema: name, arguments and results as PyTorch writes them; what is written in place is marked `(a!)`.
        launch: allocates outputs and launches kernels; called below autograd, on the device of its tensors.
        prepare: in the place of `launch`: returns what does so for such arguments, and is remembered.
        varying: how many of the last arguments, none of them tensors, `prepare` does not depend on.
        fake: the same for shapes, dtypes and strides alone; raises the same errors for wrong shapes and dtypes.
        autograd: the derivative. Without one the op raises ValueError for an input that requires grad, in grad mode.
        called: the public function that makes such a call, for errors; by default it has the op's name.
        rows: what may be split over ranks, of an op that takes DTensor: see sharding.py.
    """
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    called = called or (lambda args: name)
    overload = getattr(torch.ops.rooftile, name).default
    mutated = tuple(
        i for i, a in enumerate(overload._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    names = tuple(a.name for a in overload._schema.arguments)
    tensors = tuple(i for i, a in enumerate(overload._schema.arguments) if "Tensor" in str(a.type))
    required = tuple(i for i in tensors if str(overload._schema.arguments[i].type) == "Tensor")
    prepared = None if prepare is None else Prepared(prepare, varying)
    if prepare is not None:

        def launch(*args: Any) -> Any:
            return prepare(*args)(*args)

    assert launch is not None, "an op has a launch or a prepare"
    kernel = _guarded(overload, called, tensors, prepared or launch)

    def below(keyset: Any, *args: Any) -> Any:
        """The op below autograd."""
        if keyset is None or _is_plain(keyset):
            if mutated:
                torch.autograd.graph.increment_version([args[i] for i in mutated if args[i] is not None])
            return kernel(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    node = _node(name, autograd, mutated)
    # `Function.apply` itself looks for functorch's wrappers, which plain tensors are not: 3 us.
    apply_to_plain: Callable[..., Any] = super(torch.autograd.Function, node).apply  # type: ignore[misc]

    def refuse_gradients(args: tuple[Any, ...]) -> None:
        for i in tensors:
            refuse_gradient(called(args), overload._schema.arguments[i].name, args[i], name)

    check = None if autograd is None else autograd.check
    if autograd is None and not name.endswith("_backward"):
        check = refuse_gradients

    def asks_for_gradients(args: tuple[Any, ...]) -> bool:
        if forward_ad._current_level >= 0 and any(_has_tangent(args[i]) for i in tensors):
            raise RuntimeError(f"rooftile::{name} has no forward-mode derivative")  # it would be a silent zero
        if torch.is_grad_enabled():
            for i in tensors:
                if args[i] is not None and args[i].requires_grad:
                    return True
        return False

    def check_gradients(args: tuple[Any, ...]) -> None:
        if check is not None:
            check(args)
        for i in mutated:
            argument = overload._schema.arguments[i].name
            if args[i] is None:
                continue
            if args[i].requires_grad and args[i].is_leaf:
                raise ValueError(f"{name}: {argument} is a leaf that requires grad, which can't be written in place")
            if len(mutated) > 1 and args[i]._is_view():  # autograd would refuse too, after the kernel has run
                raise ValueError(
                    f"{name}: {argument} is a view, which autograd can't follow through an op that writes "
                    f"{len(mutated)} tensors; pass {argument}.clone(), or call it under torch.no_grad()"
                )

    def with_gradients(keyset: Any, args: tuple[Any, ...]) -> Any:
        if torch._C._functorch.maybe_current_level() is not None:
            raise RuntimeError(
                f"rooftile::{name} can't be differentiated by torch.func; use torch.autograd.grad or .backward()"
            )
        check_gradients(args)
        outputs = node.apply(functools.partial(below, keyset), *args)
        return None if mutated else outputs

    def differentiate(keyset: Any, *args: Any) -> Any:
        return with_gradients(keyset, args) if asks_for_gradients(args) else below(keyset, *args)

    def call(*args: Any) -> Any:
        # The dispatcher is for those who listen: compilers, modes, subclasses. Where nobody does, it is left out: 6 us.
        if torch.compiler.is_compiling():
            return overload(*args)
        run = None if prepared is None else prepared.find(*args[: prepared.n_keyed])
        if run is not None:
            if type(run) is tuple:
                if mutated:
                    return with_gradients(None, args)
                if check is not None:
                    check(args)
                return apply_to_plain(run[0], *args)
            if mutated:
                torch.autograd.graph.increment_version([args[i] for i in mutated if args[i] is not None])
            return run(*args)
        if not _nobody_listens(args, tensors, required):
            _check_arguments(overload, called, tensors, required, args)
            if sharding.is_distributed(*args):
                if rows is not None:
                    return sharding.by_rows(called(args), call, names, rows, args)
                sharding.refuse(called(args), **dict(zip(names, args, strict=True)))
            return overload(*args)
        return with_gradients(None, args) if asks_for_gradients(args) else below(None, *args)

    def bump_versions(keyset: Any, *args: Any) -> Any:
        torch.autograd.graph.increment_version([args[i] for i in mutated if args[i] is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if runtime.MODE is runtime.Mode.COMPILE:  # meta tensors take the launcher's own path, which compiles
        _LIBRARY.impl(name, kernel, "Meta")
    else:

        def on_one_device(*args: Any) -> Any:  # a meta tensor among others brings a call here
            _check_arguments(overload, called, tensors, required, args)
            _device(overload, called, tensors, args)
            return fake(*args)

        torch.library.register_fake(f"rooftile::{name}", on_one_device, lib=_LIBRARY)
    if runtime.MODE is runtime.Mode.GPU and not mutated:  # the interpreter's kernels can't be compiled into a graph
        torch.library.register_torch_dispatch(f"rooftile::{name}", FunctionalTensorMode, _inline(launch), lib=_LIBRARY)
    _LIBRARY.impl(name, differentiate, "Autograd", with_keyset=True)
    if mutated:
        _LIBRARY.impl(name, bump_versions, "ADInplaceOrView", with_keyset=True)
    return call


def power_of_two(n: int) -> int:
    """The least power of two that is n or more. Triton's own costs a call 3 us, as it serves kernels too."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("bhtd", "bthd")  # of heads and tokens: batch, head, token, head dimension


def named(value: object) -> str:
    """What came, where something else was expected: "None", "a list", "an int"."""
    kind = f"{'numpy.' if type(value).__module__ == 'numpy' else ''}{type(value).__name__}"
    return "None" if value is None else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def check_window(op: str, *sides: object) -> None:
    """Raise TypeError for a tensor: windows choose kernels and grids on the host."""
    if any(isinstance(side, Tensor) for side in sides):
        raise TypeError(
            f"{op}: window is or has a tensor, expected ints: reading it would make the host wait for the device; pass "
            "int(window) if that is meant"
        )


def shown(shape: Sequence[int | str]) -> str:
    """A shape of numbers and names: (1, heads, 8)."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def or_float32(x: Tensor) -> str:
    """The dtypes of what may have x's dtype or float32, for errors."""
    return f"{'' if x.dtype == torch.float32 else f'{x.dtype} to match x, or '}torch.float32"


def check_layout(op: str, layout: str, name: str = "layout") -> None:
    """Raise ValueError unless it is one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: {name} is {layout!r}, expected one of {', '.join(LAYOUTS)}")


def check_flags(op: str, **given: object) -> None:
    """Raise TypeError unless each is a bool."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} is {named(value)}, expected a bool")


def check_numbers(op: str, **given: object) -> None:
    """Raise TypeError unless each is an int or a float of Python, as an op's schema takes them, and no bool."""
    for name, value in given.items():
        if isinstance(value, (float, int)) and value is not True and value is not False:
            continue
        if isinstance(value, numbers.Real):
            raise TypeError(f"{op}: {name} is {named(value)}, expected a number of Python's, such as float({name})")
        raise TypeError(f"{op}: {name} is {named(value)}, expected a number")


def check_int64(op: str, **given: object) -> None:
    """Raise unless each is an int that an op's schema takes."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{op}: {name} is {named(value)}, expected an int")
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{op}: {name} is {value}, expected an int of 64 bits")


def check_tensors(op: str, **tensors: object) -> None:
    """Raise TypeError unless each is a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} is {named(tensor)}, expected a tensor")


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Raise TypeError unless each tensor is float32, float16 or bfloat16."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected float32, float16 or bfloat16")


def check_same(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless `tensor` has the shape and dtype of `other`."""
    if tensor.shape != other.shape:
        raise ValueError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(other.shape)} to match {other_name}"
        )
    if tensor.dtype != other.dtype:
        raise TypeError(f"{op}: {name} has dtype {tensor.dtype}, expected {other.dtype} to match {other_name}")


def refuse_gradient(op: str, name: str, tensor: Tensor | None, what: str | None = None) -> None:
    """Raise ValueError if the tensor requires grad. `what` has no derivative; by default the op."""
    if tensor is not None and tensor.requires_grad:
        raise ValueError(
            f"{op}: {name} requires grad, but {what or op} has no derivative; call it under torch.no_grad(), or pass "
            f"{name}.detach()"
        )


def as_rows(x: Tensor) -> Tensor:
    """x as (rows, last dimension) with a last stride of 1: a view where the strides allow it, else a copy."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


Copies = dict[int, Callable[[Tensor], Tensor]]  # how tensors are copied, by their places in a launch


def rows_of(x: Tensor, copies: Copies, place: int) -> Tensor:
    """`as_rows(x)`, which goes into `copies` unless a kernel can be given x itself, with these rows' stride."""
    rows = as_rows(x)
    if type(x) not in _PLAIN_TYPES or rows.data_ptr() != x.data_ptr():
        copies[place] = as_rows
    return rows


def unit_last_of(x: Tensor, copies: Copies, place: int) -> Tensor:
    """`unit_last(x)`, which goes into `copies` where it is a copy."""
    y = unit_last(x)
    if y is not x:
        copies[place] = unit_last
    return y


def contiguous_of(x: Tensor | None, copies: Copies, place: int) -> None:
    """Have x copied at each launch where it is not contiguous."""
    if x is not None and not x.is_contiguous():
        copies[place] = Tensor.contiguous


def copying(start: Callable[..., None], copies: Copies) -> Callable[..., None]:
    """`start`, with copies of the tensors in those places; `start` itself where there are none."""
    if not copies:
        return start

    def with_copies(*tensors: Tensor | None) -> None:
        start(*(t if t is None or i not in copies else copies[i](t) for i, t in enumerate(tensors)))

    return with_copies


def start_nothing(*tensors: Tensor | None) -> None:
    """The launch over an empty tensor."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def unit_last(x: Tensor) -> Tensor:
    """x with a last stride of 1: x itself where it has one, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def axis_strides(x: Tensor, layout: str) -> tuple[int, int, int]:
    """The strides of a tensor in one of `LAYOUTS`: batch (or page), head, token."""
    strides = x.stride()
    return strides[0], strides[layout.index("h")], strides[layout.index("t")]
