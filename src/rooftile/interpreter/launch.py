"""A launch: arguments with the compiler's types, memory used in place, errors passed through."""

import dataclasses
import functools
import threading
import types
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter, jit

from rooftile.interpreter.dtypes import numpy_dtype
from rooftile.interpreter.memory import Launch, OutOfBoundsError, launches, tensors
from rooftile.interpreter.patching import original, replace


class DeviceAssertionError(AssertionError):
    """A `tl.device_assert` (or `tl.assume`) of a kernel does not hold."""


def _scalar(value: Any, kind: tl.dtype) -> Any:
    return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=numpy_dtype(kind)), kind), kind)


@functools.cache
def _named(kind: str) -> tl.dtype:
    """The type with this name, as Triton mangles it."""
    return tl.str_to_ty(kind, None)


def _annotated(value: Any, annotation: Any) -> Any:
    """A scalar argument has the type of its parameter's annotation (`stride: tl.int64`), whatever its value."""
    if annotation is None or not isinstance(value, (bool, int, float)):
        return value
    name = jit._normalize_ty(annotation)
    if name not in ("i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64"):
        return value
    return _scalar(value, tl.int1 if name == "u1" else _named(name))


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def install() -> None:
    builder = original(interpreter, "InterpreterBuilder")
    executor = original(interpreter, "GridExecutor")
    function = original(interpreter, "InterpretedFunction")
    stock_call = original(executor, "__call__")
    stock_init_args = original(executor, "_init_args_hst")
    stock_restore = original(executor, "_restore_args_dev")
    stock_cvt = original(interpreter, "_implicit_cvt")
    stock_builder_init = original(builder, "__init__")
    stock_patch_lang = original(interpreter, "_patch_lang")
    error_type = original(interpreter, "InterpreterError")
    one_at_a_time = threading.RLock()  # the program ids and the patched language are globals

    # device_assert asks for debug. Overflow checks stay off: integers wrap on a GPU, which hashes and masked lanes rely
    # on, and a wrapped offset is found where it is used.
    def builder_init(self):
        stock_builder_init(self)
        self.options = dataclasses.replace(self.options, debug=True, sanitize_overflow=False)

    setattr(builder, "__init__", builder_init)  # noqa: B010  # mypy takes a plain assignment for an error
    shared = original(interpreter, "interpreter_builder")
    shared.options = dataclasses.replace(shared.options, debug=True, sanitize_overflow=False)

    @replace(builder, "create_assert")
    def create_assert(self, condition, message):
        if not condition:
            raise DeviceAssertionError(f"{launches[-1].kernel}, program {self.grid_idx}: {message}")

    @replace(builder, "create_assume")
    def create_assume(self, condition):
        if not condition:
            raise DeviceAssertionError(f"{launches[-1].kernel}, program {self.grid_idx}: tl.assume does not hold")

    # Stock leaves Python floats as they are, so that `x * scale` stays bfloat16 where a GPU promotes it to the float32
    # of the argument; it gives integers from 2^31 on the wrong width, and in Triton 3.6 fails on a bool.
    @replace(interpreter, "_implicit_cvt")
    def implicit_cvt(arg):
        if isinstance(arg, bool):
            return _scalar(arg, tl.int1)
        if isinstance(arg, (int, float)):
            return _scalar(arg, _named(jit.mangle_type(arg)))
        if hasattr(arg, "data_ptr"):
            kind = _named(jit.mangle_type(arg))
            return tl.tensor(interpreter.TensorHandle(launches[-1].tagged(arg), kind), kind)
        return stock_cvt(arg)

    @replace(executor, "_init_args_hst")
    def init_args(self, args, kwargs):
        annotations = self.fn.__annotations__
        named = [*zip(self.arg_names, args, strict=False), *kwargs.items()]
        if all(tensor.device.type == "cpu" for _, value in named for tensor in tensors(value)):
            host = [_annotated(value, annotations.get(name)) for name, value in named[: len(args)]]
            host_kwargs = {name: _annotated(value, annotations.get(name)) for name, value in kwargs.items()}
        else:
            host, host_kwargs = stock_init_args(self, args, kwargs)
        for name, value in [*zip(self.arg_names, host, strict=False), *host_kwargs.items()]:
            launches[-1].add(name, value)
        return host, host_kwargs

    # Memory on the CPU is worked on in place. Stock copies every storage onto itself, whole, be it mapped lazily or
    # read-only; PyTorch happens to see through that, but promises nothing.
    @replace(executor, "_restore_args_dev")
    def restore_args(self, args, host, kwargs, host_kwargs):
        on_device = [*args, *kwargs.values()]
        if any(tensor.device.type != "cpu" for value in on_device for tensor in tensors(value)):
            stock_restore(self, args, host, kwargs, host_kwargs)

    @replace(executor, "__call__")
    def call(self, *args, **kwargs):
        with one_at_a_time, np.errstate(all="ignore"):  # a GPU gives inf and NaN without a warning
            launches.append(Launch(f"kernel {self.fn.__name__!r}"))
            try:
                return stock_call(self, *args, **kwargs)
            except error_type as error:
                root = _root(error)
                if isinstance(root, (OutOfBoundsError, DeviceAssertionError)):
                    raise root from None
                raise
            finally:
                launches.pop()

    # Every helper call patches triton.language anew, some 0.5 ms for a tl.zeros. A launch patches both of its modules
    # once; helpers called meanwhile need nothing more.
    both = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    @replace(interpreter, "_patch_lang")
    def patch_lang(fn):
        return stock_patch_lang(both)

    @replace(function, "__call__")
    def call_helper(self, *args, **kwargs):
        scope = None if launches else patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise error_type(repr(error)) from error
        finally:
            if scope is not None:
                scope.restore()
