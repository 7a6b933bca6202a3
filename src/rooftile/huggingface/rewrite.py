"""Rebuilds a method from its source with some lines replaced. The method's class is not touched.

A `Rule` is written in Python. CAPITALS match any expression:

    Rule("self.act_fn(GATE) * UP", "silu_mul(GATE, UP)")

A line `...` matches any statements, which stay where they are:

    Rule("Q = self.q_norm(X)\\n...\\nQ = turn(Q)", "Q = X\\n...\\nQ = norm_and_turn(self.q_norm, Q)")

`Together` is another kind of rule: calls on several lines become one call before the first of them.

`rebuild` parses the method, replaces each match, and compiles the result with the *same, live* globals; names that the
rules bring in are closure variables. Nothing else changes: line numbers in tracebacks, defaults and all other lines are
the model's own. `rebuild` rejects, with the reason, a method that no rule matches, one that uses elsewhere what a
replacement no longer assigns, and one without source. So another version of the model's code is left alone instead of
being changed wrongly.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

Bindings = dict[str, ast.expr]
# Decorators of transformers that a method may have. These change arguments or results alone: the new one gets them too.
_WRAPPING = ("can_return_tuple", "deprecate_kwarg")
_DOCUMENTING = ("auto_docstring",)
# The class whose subclasses' forward transformers wraps, from 5.23 on: the wrapper checkpoints.
_CHECKPOINTING = "GradientCheckpointingLayer"
_MANY = 6  # rules, which a reason does not list


class NotRewritable(Exception):
    """Why a method is left as it is."""


class UnknownCode(NotRewritable):
    """The method is transformers' own, and is written in another way than the rules know."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Statements, or one expression, and their replacement.

    A name in capitals matches any expression, and the same one wherever it occurs. Statements that match `...` may
    neither mention what the statements before them assign nor assign what those read.
    """

    before: str
    after: str

    def pattern(self) -> list[list[ast.stmt]] | ast.expr:
        """The expression, or the statements in parts that `...` separates."""
        parts = _parts(self.before)
        only = parts[0][0]
        return only.value if len(parts) == len(parts[0]) == 1 and isinstance(only, ast.Expr) else parts


@dataclasses.dataclass(frozen=True)
class Together:
    """Calls of modules with the same argument become one call before the first of them:

        Together(("k_proj", "v_proj"), "joint_linear")

        k = self.k_proj(x).view(s)      ours_k_proj, ours_v_proj = joint_linear((self.k_proj, self.v_proj), x)
        v = self.v_proj(x)              k = ours_k_proj.view(s)
                                        v = ours_v_proj

    The method calls each module once, in statements of one block that always evaluate the call. The argument is a
    name, and between the first and the last call only the calls mention it.
    """

    modules: tuple[str, ...]
    function: str

    @property
    def before(self) -> str:
        return "\n".join(f"self.{module}(X)" for module in self.modules)


def _parts(source: str) -> list[list[ast.stmt]]:
    body = ast.parse("def f():\n" + textwrap.indent(source.strip(), "  ")).body[0].body  # type: ignore[attr-defined]
    parts: list[list[ast.stmt]] = [[]]
    for statement in body:
        if isinstance(statement, ast.Expr) and ast.unparse(statement) == "...":
            parts.append([])
        else:
            parts[-1].append(statement)
    return parts


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """The new function, and what the capitals matched at each replaced place."""

    function: types.FunctionType
    places: tuple[Bindings, ...]


def _match(pattern: object, node: object, bindings: Bindings) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        if not isinstance(node, ast.expr):
            return False
        bound = bindings.setdefault(pattern.id, node)
        return ast.unparse(bound) == ast.unparse(node)
    if isinstance(pattern, ast.AST):
        # A name may be read in one place and written in another: ignore its context.
        return type(pattern) is type(node) and all(
            _match(getattr(pattern, field), getattr(node, field), bindings)
            for field in pattern._fields
            if field not in ("ctx", "type_comment", "kind")
        )
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_match(p, n, bindings) for p, n in zip(pattern, node, strict=True))
        )
    return pattern == node


class _Fill(ast.NodeTransformer):
    def __init__(self, bindings: Bindings) -> None:
        self.bindings = bindings

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.bindings:
            return node
        # Parsed again, with the place's own context: what was read may now be written.
        expression = ast.parse(ast.unparse(self.bindings[node.id]), mode="eval").body
        if hasattr(expression, "ctx"):
            expression.ctx = node.ctx
        return expression


def _names(statements: Sequence[ast.stmt], *, assigned: bool = False) -> set[str]:
    """The names that the statements mention, or those that they assign."""
    names = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if not (assigned and isinstance(name.ctx, ast.Load))}


class _Apply(ast.NodeTransformer):
    """Replaces each match. `gone` collects the names that are no longer assigned."""

    def __init__(self, rule: Rule) -> None:
        self.pattern, self.after = rule.pattern(), _parts(rule.after)
        self.places: list[Bindings] = []
        self.gone: set[str] = set()

    def _replacement(self, part: Sequence[ast.stmt], bindings: Bindings, place: ast.AST) -> list[ast.stmt]:
        new = [_Fill(bindings).visit(copy.deepcopy(statement)) for statement in part]
        for statement in new:
            for node in ast.walk(statement):
                ast.copy_location(node, place)
        return new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        if isinstance(self.pattern, list):
            for field in ("body", "orelse", "finalbody"):
                if isinstance(block := getattr(node, field, None), list):
                    setattr(node, field, self._block(block, self.pattern))
            return node
        bindings: Bindings = {}
        if isinstance(node, ast.expr) and _match(self.pattern, node, bindings):
            self.places.append(bindings)
            return self._replacement(self.after[0], bindings, node)[0].value  # type: ignore[attr-defined]
        return node

    def _block(self, block: list[ast.stmt], pattern: list[list[ast.stmt]]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        while block:
            bindings: Bindings = {}
            ends = _find(pattern, block, bindings)
            if not ends:
                done.append(block[0])
                block = block[1:]
                continue
            self.places.append(bindings)
            before: list[ast.stmt] = []
            after: list[ast.stmt] = []
            start = 0
            for part, replacement, end in zip(pattern, self.after, ends, strict=True):
                old = block[end - len(part) : end]
                new = self._replacement(replacement, bindings, old[0])
                done += [*block[start : end - len(part)], *new]
                before += old
                after += new
                start = end
            self.gone |= _names(before, assigned=True) - _names(after, assigned=True)
            block = block[start:]
        return done


def _find(pattern: list[list[ast.stmt]], block: list[ast.stmt], bindings: Bindings) -> list[int]:
    """The ends of the pattern's parts in the block, whose first statement begins the first; empty without a match."""
    ends: list[int] = []
    matched: list[ast.stmt] = []
    for part in pattern:
        start = ends[-1] if ends else 0
        for first in range(start, len(block) - len(part) + 1 if ends else 1):
            between, found, trial = block[start:first], block[first : first + len(part)], dict(bindings)
            if _names(between) & _names(matched, assigned=True) or _names(between, assigned=True) & _names(matched):
                return []
            if _match(part, found, trial):
                bindings.update(trial)
                matched += found
                ends.append(first + len(part))
                break
        else:
            return []
    return ends


def _in_any_case(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement that are evaluated exactly once, under any condition."""
    yield node
    if isinstance(node, ast.IfExp | ast.BoolOp | ast.Compare | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp):
        return
    if not isinstance(node, ast.GeneratorExp):
        for child in ast.iter_child_nodes(node):
            yield from _in_any_case(child)


def _called(node: ast.AST, modules: Sequence[str]) -> str | None:
    """The module of self that the node calls with one argument, which is a name; else None."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or not isinstance(node.args[0], ast.Name):
        return None
    return next((module for module in modules if ast.unparse(node.func) == f"self.{module}"), None)


def _join(definition: ast.FunctionDef, rule: Together) -> list[Bindings]:
    """Apply the rule; it has at most one place."""
    mentions = [ast.unparse(node) for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
    blocks = (
        block
        for node in ast.walk(definition)
        for field in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, field, None), list)
    )
    for block in blocks:
        calls: dict[str, ast.Call] = {}
        places = []
        for i, statement in enumerate(block):
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return):
                for node in _in_any_case(statement):
                    if (module := _called(node, rule.modules)) is not None:
                        calls[module] = node  # type: ignore[assignment]
                        places.append(i)
        if len(places) != len(rule.modules) or len(calls) != len(places):
            continue
        if any(mentions.count(f"self.{module}") != 1 for module in rule.modules):
            continue
        between = block[min(places) : max(places) + 1]
        argument = calls[rule.modules[0]].args[0]
        mentioned = [n.id for s in between for n in ast.walk(s) if isinstance(n, ast.Name)]
        same = {ast.unparse(call.args[0]) for call in calls.values()} == {argument.id}  # type: ignore[attr-defined]
        if not same or mentioned.count(argument.id) != len(calls):  # type: ignore[attr-defined]
            continue
        first = between[0]
        results = {calls[module]: f"ours_{module}" for module in rule.modules}
        for statement in between:
            _Results(results).visit(statement)
        modules = ", ".join(f"self.{module}" for module in rule.modules)
        together = ast.parse(f"{', '.join(results.values())} = {rule.function}(({modules}), {ast.unparse(argument)})")
        for node in ast.walk(together.body[0]):
            ast.copy_location(node, first)
        block.insert(min(places), together.body[0])
        return [{"X": argument}]
    return []


class _Results(ast.NodeTransformer):
    """Replaces each call by a name."""

    def __init__(self, results: Mapping[ast.Call, str]) -> None:
        self.results = results

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if node in self.results:
            return ast.copy_location(ast.Name(self.results[node], ast.Load()), node)
        self.generic_visit(node)
        return node


def rebuild(
    function: Callable[..., object],
    rules: Sequence[Rule | Together],
    names: Mapping[str, object],
    parameter: str = "",
) -> Rebuilt:
    """`function` with the rules applied in order, wherever they match. `names` are the objects that the rules refer to.

    A layer's forward that transformers wraps for gradient checkpointing is rebuilt inside, and wrapped again.

    Args:
        parameter: a keyword-only parameter that the new function has besides, None by default.

    Raises:
        NotRewritable: no rule matches, a name that a replacement no longer assigns is used elsewhere, there is no
            source, or the function is not a plain one (it has closure variables, or decorators other than
            transformers' `can_return_tuple`, `deprecate_kwarg` and `auto_docstring`). It is an `UnknownCode` if the
            function is transformers' own.
    """
    inner, wrapper = function, None
    while _checkpoints(inner):
        inner, wrapper = inner.__wrapped__, wrapper or inner  # type: ignore[attr-defined]
    try:
        new = _rebuild(inner, rules, names, parameter)
        return new if wrapper is None else dataclasses.replace(new, function=_checkpointed(wrapper, new.function))
    except NotRewritable as reason:
        if getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers."):
            raise UnknownCode(str(reason)) from reason.__cause__
        raise


def _rebuild(
    function: Callable[..., object],
    rules: Sequence[Rule | Together],
    names: Mapping[str, object],
    parameter: str,
) -> Rebuilt:
    inner = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or not isinstance(inner, types.FunctionType):
        raise NotRewritable("it is not a plain Python function")
    if inner.__closure__:
        raise NotRewritable("it is wrapped by a decorator or has closure variables")
    definition = _definition(inner)
    definition.decorator_list = _wrappers(function, definition)
    places: list[Bindings] = []
    for rule in rules:
        if isinstance(rule, Together):
            places += _join(definition, rule)
            continue
        apply = _Apply(rule)
        apply.visit(definition)
        if again := sorted(apply.gone & _names(definition.body)):
            raise NotRewritable(f"its code uses {', '.join(again)} after the lines `{_one_line(rule)}`")
        places += apply.places
    if not places:
        few = rules if len(rules) < _MANY else rules[:1]
        variants = "" if few is rules else ", nor a variant of it"
        raise NotRewritable("its code has no line like `" + "` or `".join(map(_one_line, few)) + "`" + variants)
    if parameter:
        definition.args.kwonlyargs.append(ast.arg(parameter))
        definition.args.kw_defaults.append(ast.Constant(None))
    return Rebuilt(_compile(inner, definition, names), tuple(places))


def _definition(function: types.FunctionType) -> ast.FunctionDef:
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise NotRewritable(f"its source can't be read ({error})") from error
    if not isinstance(definition, ast.FunctionDef):
        raise NotRewritable("it is not a plain function")
    return definition


def _checkpoints(function: Callable[..., object]) -> bool:
    """Whether that is the wrapper in which transformers checkpoints a layer."""
    if not isinstance(function, types.FunctionType) or not hasattr(function, "__wrapped__"):
        return False
    made_by = getattr(function.__globals__.get(_CHECKPOINTING), "__init_subclass__", None)
    return function.__code__ in getattr(getattr(made_by, "__code__", None), "co_consts", ())


def _checkpointed(wrapper: types.FunctionType, forward: types.FunctionType) -> types.FunctionType:
    """`forward` in a wrapper like that one.

    transformers' wrapper checkpoints only if it is the forward of the object's class. The new one is set on the object,
    hides all forwards of its class, also of a class that the object gets later (FSDP2's), and so always checkpoints.
    """
    definition, name = _definition(wrapper), wrapper.__code__.co_name
    definition.decorator_list = []
    _Apply(Rule(f"type(self).forward is {name}", "True")).visit(definition)
    wrapped = [n for n, cell in _cells(wrapper).items() if cell.cell_contents is wrapper.__wrapped__]  # type: ignore[attr-defined]
    if len(wrapped) != 1 or not _cells(wrapper).keys() <= {*wrapped, name} or name in _names(definition.body):
        raise NotRewritable(f"{_CHECKPOINTING} wraps it in an unknown way")
    new = _compile(wrapper, definition, {wrapped[0]: forward})
    functools.update_wrapper(new, forward)
    return new


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    """The closure's variables."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _wrappers(function: types.FunctionType, definition: ast.FunctionDef) -> list[ast.expr]:
    """The decorators that the new function gets too; those that only write its documentation are dropped."""
    decorators = [d for d in definition.decorator_list if ast.unparse(d).partition("(")[0] not in _DOCUMENTING]
    for decorator in decorators:
        name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        wrap = inspect.unwrap(function).__globals__.get(name)
        if name not in _WRAPPING or not _makes(getattr(wrap, "__code__", None), function.__code__):
            raise NotRewritable(f"it is wrapped by a decorator, {ast.unparse(decorator)}")
        function = function.__wrapped__  # type: ignore[attr-defined]
    if hasattr(function, "__wrapped__"):
        raise NotRewritable("it is wrapped by a decorator or has closure variables")
    return decorators


def _makes(decorator: types.CodeType | None, wrapper: types.CodeType) -> bool:
    """Whether the decorator made the wrapper: then its code, or that of a function in it, has the wrapper's inside."""
    inside = (code for code in getattr(decorator, "co_consts", ()) if isinstance(code, types.CodeType))
    return any(code is wrapper or _makes(code, wrapper) for code in inside)


def _one_line(rule: Rule | Together) -> str:
    return "; ".join(rule.before.strip().splitlines())


def _compile(
    function: types.FunctionType, definition: ast.FunctionDef, names: Mapping[str, object]
) -> types.FunctionType:
    arguments = definition.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None  # annotations may name what only type checkers import
    definition.returns = None
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    # def bind(<names>): def forward(self, ...): ...; return forward
    bind = ast.parse(f"def bind({', '.join(names)}):\n  return {definition.name}").body[0]
    bind.body.insert(0, definition)  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module(body=[bind], type_ignores=[]))
    scope: dict[str, Callable[..., types.FunctionType]] = {}
    exec(compile(module, function.__code__.co_filename, "exec", dont_inherit=True), function.__globals__, scope)
    new = scope["bind"](**names)
    inner = new
    while True:  # through the wrappers
        inner.__qualname__, inner.__doc__ = function.__qualname__, function.__doc__
        if not hasattr(inner, "__wrapped__"):
            break
        inner = inner.__wrapped__
    inner.__defaults__ = function.__defaults__
    inner.__kwdefaults__ = {**(inner.__kwdefaults__ or {}), **(function.__kwdefaults__ or {})} or None
    return new
