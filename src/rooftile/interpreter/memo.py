"""Caches results that depend on types alone. Stock recomputes them at every operation, and spends most time on them.

Nothing here changes a value, a type or an error. What is not known yet, and what stock refuses, goes to stock.
"""

from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

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


def _install_operands() -> None:
    """The common type and shape of two operands."""
    stock_check = original(TritonSemantic, "binary_op_type_checking_impl")
    stock_broadcast = original(TritonSemantic, "broadcast_impl_value")
    for name in ("check_ptr_type_impl", "computation_type_impl", "scalar_constant", "cast"):
        original(TritonSemantic, name)
    known: dict[Any, Any] = {}
    shapes: dict[Any, Any] = {}

    def together(left, right):
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return None
        return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))

    def common(self, lhs, rhs, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod):
        self.check_ptr_type_impl(left, right, allow_lhs_ptr)
        self.check_ptr_type_impl(right, left, allow_rhs_ptr)
        if not arithmetic_check or left.is_ptr() or right.is_ptr():
            return None
        is_scalar = (not isinstance(lhs, tl.tensor), not isinstance(rhs, tl.tensor))
        return self.computation_type_impl(left, is_scalar[0], right, is_scalar[1], div_or_mod)

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
        operands = []
        for operand, kind in ((lhs, left), (rhs, right)):
            if type(operand) is tl.tensor:
                operands.append(operand if both is None or both is kind else self.cast(operand, both))
            elif both is None:
                operands.append(self.to_tensor(operand))
            elif both.is_int() and both is not tl.int32 and both is not tl.int64:
                return stock_check(self, lhs, rhs, *flags)  # which says where it does not fit
            else:
                operands.append(self.scalar_constant(operand, dtype=both))
        return self.broadcast_impl_value(*operands)

    @replace(TritonSemantic, "broadcast_impl_value")
    def broadcast(self, lhs, rhs):
        left, right = lhs.type.__dict__.get("rooftile_sizes"), rhs.type.__dict__.get("rooftile_sizes")
        if left == right and (left is not None or not (lhs.type.is_block() or rhs.type.is_block())):
            return lhs, rhs
        if left is None or right is None:
            return stock_broadcast(self, lhs, rhs)
        both = shapes.get((left, right), _UNKNOWN)
        if both is _UNKNOWN:
            both = shapes[left, right] = together(left, right)
        if both is None:
            return stock_broadcast(self, lhs, rhs)  # another rank, or an error
        found = []
        for operand, sizes in ((lhs, left), (rhs, right)):
            if sizes != both:
                handle = self.builder.create_broadcast(operand.handle, list(both))
                operand = self.tensor(handle, tl.block_type(operand.type.scalar, list(both)))
            found.append(operand)
        return tuple(found)


def _install_handles() -> None:
    """The NumPy type of a Triton type, and whether an array's elements are no wider than that."""
    handle = original(interpreter, "TensorHandle")
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


def install() -> None:
    _install_types()
    _install_operands()
    _install_handles()
    _install_patches()
