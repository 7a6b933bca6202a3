"""Caches results that depend on types alone. Stock recomputes them at every operation, and spends most time on them.

Within a launch, nothing here changes a value, a type or an error. What is not known yet, and what stock refuses, goes
to stock.
"""

import functools
import inspect
import types
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter, jit

from rooftile.interpreter.patching import original, replace

_PLAIN = frozenset((int, float, bool, str, type(None), tl.dtype, tl.pointer_type, tl.block_type, tl.tensor))
_UNKNOWN = object()


def _install_types() -> None:
    """Block types by element and shape; a tensor's fields, without its handle, by its type."""
    stock_block = original(tl.block_type, "__init__")
    stock_block_ir = original(tl.block_type, "to_ir")
    stock_tensor = original(tl.tensor, "__init__")
    stock_unwrap = original(tl.core, "_unwrap_if_constexpr")
    blocks: dict[Any, dict[str, Any]] = {}

    @replace(tl.core, "_unwrap_if_constexpr")
    def unwrap(o):
        kind = type(o)
        return o.value if kind is tl.constexpr else o if kind in _PLAIN else stock_unwrap(o)

    @replace(tl.block_type, "__init__")
    def block_init(self, element_ty, shape):
        sizes = tuple([s.value if type(s) is tl.constexpr else s for s in shape])
        key = (element_ty.name, sizes, tuple(map(type, sizes)))  # True and 8.0 are no sizes, and are equal to 1 and 8
        known = blocks.get(key)
        if known is None:
            stock_block(self, element_ty, shape)
            known = blocks[key] = {**self.__dict__, "rooftile_sizes": sizes, "rooftile_tensor": {}}
        self.__dict__.update(known)
        self.element_ty = element_ty

    # The interpreter's types are Triton's own; of pointers stock makes others.
    @replace(tl.block_type, "to_ir")
    def block_to_ir(self, builder):
        return self if type(self.element_ty) is tl.dtype else stock_block_ir(self, builder)

    @replace(tl.tensor, "__init__")
    def tensor_init(self, handle, type):
        known = type.__dict__.get("rooftile_tensor")
        if not known:
            stock_tensor(self, handle, type)
            known = type.__dict__.setdefault("rooftile_tensor", {})
            known.update((name, value) for name, value in self.__dict__.items() if name not in ("handle", "type"))
            return
        self.__dict__.update(known)
        self.handle = handle
        self.type = type


def _number_type(value: Any) -> Any:
    """The type of a scalar in a kernel, in the plain cases."""
    if type(value) is int and -(2**31) <= value < 2**31:
        return tl.int32
    if type(value) is float and (value == 0.0 or 1e-37 < abs(value) < 1e38):
        return tl.float32
    return None


# Constants that are made once. A shift makes its operands' arrays signed where they are kept, so that unsigned ones are
# made anew.
KEPT = frozenset((tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32))
constants: dict[Any, tl.tensor] = {}


def _install_operands() -> None:
    """The common type and shape of two operands; the constants among the operands."""
    stock_check = original(TritonSemantic, "binary_op_type_checking_impl")
    stock_broadcast = original(TritonSemantic, "broadcast_impl_value")
    stock_to_tensor = original(TritonSemantic, "to_tensor")
    for name in ("check_ptr_type_impl", "computation_type_impl", "scalar_constant"):
        original(TritonSemantic, name)
    known: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}
    blocks: dict[Any, tl.block_type] = {}

    def block(element, sizes):
        """The type of a block; a pointer's is made anew, as pointers have no name of their own."""
        if type(element) is not tl.dtype:
            return tl.block_type(element, list(sizes))
        found = blocks.get((element.name, sizes))
        if found is None:
            found = blocks[element.name, sizes] = tl.block_type(element, list(sizes))
        return found

    def constant(self, value, kind):
        """A scalar of that type, or of the value's own for None."""
        if kind is not None and kind not in KEPT:
            return self.scalar_constant(value, dtype=kind)
        key = (value, type(value), None if kind is None else kind.name)
        found = constants.get(key)
        if found is None:
            found = stock_to_tensor(self, value) if kind is None else self.scalar_constant(value, dtype=kind)
            constants[key] = found
        return found

    def together(left, right):
        """The sizes of both, None for an error or another rank. A scalar has None for sizes."""
        key = left, right
        both = shapes.get(key, _UNKNOWN)
        if both is _UNKNOWN:
            if left is None or right is None:
                both = left or right
            elif len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(*key, strict=True)):
                both = None
            else:
                both = tuple(b if a == 1 else a for a, b in zip(*key, strict=True))
            shapes[key] = both
        return both

    def sizes_of(kind):
        """`_UNKNOWN` for a block whose sizes this module has not seen."""
        return kind.__dict__.get("rooftile_sizes", _UNKNOWN) if type(kind) is tl.block_type else None

    def common(self, lhs, rhs, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod):
        self.check_ptr_type_impl(left, right, allow_lhs_ptr)
        self.check_ptr_type_impl(right, left, allow_rhs_ptr)
        if not arithmetic_check or left.is_ptr() or right.is_ptr():
            return None
        is_scalar = (not isinstance(lhs, tl.tensor), not isinstance(rhs, tl.tensor))
        return self.computation_type_impl(left, is_scalar[0], right, is_scalar[1], div_or_mod)

    # All who ask for this compute each element of the result from one of each operand, by NumPy, which broadcasts by
    # itself: an operand has the common type here, but its array keeps its shape.
    @replace(TritonSemantic, "binary_op_type_checking_impl")
    def check(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        left = lhs.dtype if type(lhs) is tl.tensor else _number_type(lhs)
        right = rhs.dtype if type(rhs) is tl.tensor else _number_type(rhs)
        if left is None or right is None:
            return stock_check(self, lhs, rhs, *flags)
        key = (left.name, right.name, type(lhs), type(rhs), flags)
        both = known.get(key, _UNKNOWN)
        if both is _UNKNOWN:
            both = known[key] = common(self, lhs, rhs, left, right, *flags)
        if both is not None and both not in KEPT and both.is_int() and not type(lhs) is type(rhs) is tl.tensor:
            return stock_check(self, lhs, rhs, *flags)  # which says where a number does not fit
        if type(lhs) is not tl.tensor:
            lhs = constant(self, lhs, both)
        elif both is not None and both is not left:
            lhs = self.cast(lhs, both)
        if type(rhs) is not tl.tensor:
            rhs = constant(self, rhs, both)
        elif both is not None and both is not right:
            rhs = self.cast(rhs, both)
        left, right = sizes_of(lhs.type), sizes_of(rhs.type)
        if left == right and left is not _UNKNOWN:
            return lhs, rhs
        sizes = None if _UNKNOWN in (left, right) else together(left, right)
        if sizes is None:
            return stock_broadcast(self, lhs, rhs)  # another rank, or an error
        if left != sizes:
            lhs = tl.tensor(lhs.handle, block(lhs.dtype, sizes))
        if right != sizes:
            rhs = tl.tensor(rhs.handle, block(rhs.dtype, sizes))
        return lhs, rhs

    @replace(TritonSemantic, "broadcast_impl_value")
    def broadcast(self, lhs, rhs):
        left, right = sizes_of(lhs.type), sizes_of(rhs.type)
        if left == right and left is not _UNKNOWN:
            return lhs, rhs
        sizes = None if None in (left, right) or _UNKNOWN in (left, right) else together(left, right)
        if sizes is None:
            return stock_broadcast(self, lhs, rhs)
        found = []
        for operand, own in ((lhs, left), (rhs, right)):
            if own != sizes:
                handle = self.builder.create_broadcast(operand.handle, list(sizes))
                operand = self.tensor(handle, block(operand.dtype, sizes))
            found.append(operand)
        return tuple(found)

    @replace(TritonSemantic, "to_tensor")
    def to_tensor(self, x, check_type=True):
        if type(x) is tl.tensor:
            return x
        return stock_to_tensor(self, x, check_type) if _number_type(x) is None else constant(self, x, None)


def _install_handles() -> None:
    """The NumPy type of a Triton type, and whether an array's elements are no wider than that."""
    handle = original(interpreter, "TensorHandle")
    builder = original(interpreter, "InterpreterBuilder")
    stock_init = original(handle, "__init__")
    stock_dtype = original(interpreter, "_get_np_dtype")
    stock_fits = original(interpreter, "_validate_np_data_size")
    dtypes: dict[str, Any] = {}
    fitting: dict[tuple[str, int], bool] = {}

    @replace(interpreter, "_get_np_dtype")
    def numpy_dtype(triton_type):
        name = triton_type.name
        found = dtypes.get(name)
        if found is None:
            found = dtypes[name] = stock_dtype(triton_type)
        return found

    @replace(interpreter, "_validate_np_data_size")
    def fits(data, triton_type):
        key = (triton_type.name, data.itemsize)
        found = fitting.get(key)
        if found is None:
            found = fitting[key] = stock_fits(data, triton_type)
        return found

    @replace(handle, "__init__")
    def handle_init(self, data, dtype, attr=None):
        if not fitting.get((dtype.name, data.itemsize)):
            fits(data, dtype)
            stock_init(self, data, dtype)
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr

    stock_binary = original(builder, "binary_op")

    @replace(builder, "binary_op")
    def binary_op(self, lhs, rhs, op):
        data, kind = op(lhs.data, rhs.data), lhs.dtype.scalar
        if not fitting.get((kind.name, data.itemsize)):
            return stock_binary(self, lhs, rhs, op)
        return handle(data, kind)


class _Scope:
    """Like stock's `_LangPatchScope`: sets attributes together and restores them."""

    def __init__(self, changes: list[tuple[Any, str, Any, Any]]) -> None:
        self.changes = changes
        for owner, name, _, after in changes:
            setattr(owner, name, after)

    def restore(self) -> None:
        for owner, name, before, _ in self.changes:
            if before is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


def _install_patches() -> None:
    """The replacements of Triton's builtins during a launch, hundreds of attributes, are made at the first launch."""
    stock_patch = original(interpreter, "_patch_lang")  # by now launch.py's: the same for every kernel
    asks = original(tl.core, "builtin")(len).__code__
    absent = original(interpreter, "_MISSING")
    changes: list[tuple[Any, str, Any, Any]] = []

    # Less two calls than stock's: of one that takes `_semantic` away, and one that asks whether it is there.
    @replace(interpreter, "_patch_attr")
    def patch_attr(owner, name, member, builder, scope):
        semantic = TritonSemantic(builder)
        inner = member.__wrapped__ if getattr(member, "__code__", None) is asks else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, call)

    @replace(interpreter, "_patch_lang")
    def patch_lang(fn):
        if changes and all(getattr(owner, name, absent) is before for owner, name, before, _ in changes):
            return _Scope(changes)
        scope = stock_patch(fn)
        if not changes:
            first = {(id(owner), name): (owner, name, before) for owner, name, before in reversed(scope._changes)}
            changes.extend((*change, getattr(*change[:2])) for change in first.values())
        return scope


def _install_arguments() -> None:
    """The parameters of a kernel: stock looks them up at each launch, three times."""
    replace(jit, "_normalize_ty")(functools.cache(original(jit, "_normalize_ty")))
    spec = functools.cache(inspect.getfullargspec)
    call = types.FunctionType(inspect.getcallargs.__code__, {**vars(inspect), "getfullargspec": spec})
    original(interpreter, "inspect")
    interpreter.inspect = types.SimpleNamespace(**{**vars(inspect), "getfullargspec": spec, "getcallargs": call})


def install() -> None:
    _install_arguments()
    _install_types()
    _install_operands()
    _install_handles()
    _install_patches()
