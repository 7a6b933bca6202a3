"""Python's own syntax inside kernels, read as Triton's compiler reads it: range, and, or, not."""

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from rooftile.interpreter.dtypes import numpy_dtype
from rooftile.interpreter.patching import original, replace

# Names that rewritten kernels call. Triton copies its interpreter module's globals to where a kernel is compiled.
_RANGE = "_rooftile_range"
_BOOL = "_rooftile_bool"
_NOT = "_rooftile_not"


def typed_range(arg1: Any, arg2: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
    """`range` and `tl.range` with bounds known at run time; the loop variable is an integer tensor, as on a GPU.

    A Python integer instead would never wrap (`i * stride` past 2^31) and has no `.to(tl.int64)`. The hints
    (num_stages, warp_specialize, ...) concern the compiler alone.
    """
    semantic = interpreter.interpreter_semantic
    start, stop = (0, arg1) if arg2 is None else (arg1, arg2)
    bounds = [semantic.to_tensor(bound) for bound in (start, stop, 1 if step is None else step)]
    kind = functools.reduce(semantic.integer_promote_impl, (bound.dtype for bound in bounds))
    dtype = numpy_dtype(kind)
    for value in range(*(int(bound.handle.data.item()) for bound in bounds)):
        yield tl.tensor(interpreter.TensorHandle(np.array([value], dtype=dtype), kind), kind)


def bool_op(method: str, *operands: Callable[[], Any]) -> Any:
    """`and` and `or`: lane by lane on tensors, short-circuiting only on what is known at compile time."""
    pending: list[Any] = []
    value = None
    for operand in operands:
        value = operand()
        if isinstance(value, tl.tensor):
            pending.append(value)
        elif bool(value) is (method == "logical_or"):
            return value
    return functools.reduce(lambda a, b: getattr(a, method)(b), pending) if pending else value


def not_op(value: Any) -> Any:
    return value.__not__() if isinstance(value, tl.tensor) else not value


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(args), keywords=[])


def _thunk(body: ast.expr) -> ast.Lambda:
    return ast.Lambda(
        args=ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]), body=body
    )


def install() -> None:
    transformer = original(interpreter, "ASTTransformer")
    original(interpreter, "interpreter_semantic")
    stock_patch_tensor = original(interpreter, "_patch_lang_tensor")
    stock_patch_core = original(interpreter, "_patch_lang_core")
    for name, function in ((_RANGE, typed_range), (_BOOL, bool_op), (_NOT, not_op)):
        setattr(interpreter, name, function)

    def visit_for(self, node):
        self.generic_visit(node)
        loop = node.iter
        if isinstance(loop, ast.Call) and isinstance(loop.func, ast.Name) and loop.func.id == "range":
            loop.func.id = _RANGE
        return node

    def visit_bool_op(self, node):
        self.generic_visit(node)
        if any(isinstance(part, ast.NamedExpr) for part in ast.walk(node)):
            return node  # a walrus inside a lambda would bind there
        method = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
        return ast.copy_location(_call(_BOOL, ast.Constant(method), *map(_thunk, node.values)), node)

    def visit_unary_op(self, node):
        self.generic_visit(node)
        return ast.copy_location(_call(_NOT, node.operand), node) if isinstance(node.op, ast.Not) else node

    # What is assigned becomes a tensor, as in stock; Triton 3.6 forgets to visit what is inside the value.
    @replace(transformer, "visit_Assign")
    def visit_assign(self, node):
        self.generic_visit(node)
        if len(node.targets) > 1:
            raise ValueError("Triton has no chained assignment (a = b = value)")
        semantic = ast.Name(id="interpreter_semantic", ctx=ast.Load())
        to_tensor = ast.Attribute(value=semantic, attr="to_tensor", ctx=ast.Load())
        node.value = ast.Call(func=to_tensor, args=[node.value, ast.Constant(value=False)], keywords=[])
        return node

    transformer.visit_For = visit_for
    transformer.visit_BoolOp = visit_bool_op
    transformer.visit_UnaryOp = visit_unary_op

    # NumPy 2.4 makes no integer of an array with one element in one dimension, which is what every scalar is here.
    @replace(interpreter, "_patch_lang_tensor")
    def patch_tensor(tensor, scope):
        stock_patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    @replace(interpreter, "_patch_lang_core")
    def patch_core(lang, scope):
        stock_patch_core(lang, scope)
        stock_to_ir = lang.dtype.to_ir

        def to_ir(self, builder):
            if self.name in ("fp8e4b8", "fp8e5b16"):  # left out by Triton 3.6
                return getattr(builder, f"get_{self.name}_ty")()
            return stock_to_ir(self, builder)

        scope.set_attr(lang.dtype, "to_ir", to_ir)
        scope.set_attr(lang, "range", typed_range)
