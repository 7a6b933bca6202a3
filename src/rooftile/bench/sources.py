"""Whether a row is as old as its kernel: hashes of the sources of each op's kernels.

A result file records, for each op, a hash of the definitions that its public function reaches: the functions, classes
and constants that it names, those that these name, and so on. Those of `ops/` and `primitives/` are hashed, and kernels
wherever they stand. A module that is imported by its name in a string (`"hopper_forward"` in a module beside it, or a
name with dots) is reached whole. So are the modules of kernels that an op could choose for other arguments. Comments,
docstrings, errors and imports are not hashed, nor is where a definition stands, nor whether a name is private. Of whole
models the same is hashed, and not the engine's own code; of serving that, too. Of training steps that code of patched
models and of the optimizer is hashed too which runs in a step, with the rules that put it there. What decides when a
model is patched is not, nor is the table of families.

Of rows of a forward, what computes gradients is not hashed.

A row is older than its kernel if the hash of the present sources is neither the file's nor that of the sources at its
commit, by git: the file's may be of other rules. A file without hashes is compared through git alone.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import io
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import rooftile

PACKAGE = "rooftile"
HASHED = ("ops", "primitives")
FOLLOWED = (*HASHED, "engine", "serve", "huggingface", "nn", "optim", "losses.py")
ENGINE, SERVED, PATCHED, TRAINED = "engine", "serve", "huggingface", "train_step"
# Of a decoder's lines: those of the models of which steps are measured.
RULES = ("ADD_NORM", "gated", "gated_gemms", "joint_linears", "rope", "qk_norm_rope", "loss_head")
# What no public function of the same name leads to: modules, which are reached whole, and definitions.
STARTS = {
    ENGINE: (f"{PACKAGE}.engine.engine",),
    SERVED: (f"{PACKAGE}.engine.async_engine", f"{PACKAGE}.serve.app"),
    PATCHED: (f"{PACKAGE}.huggingface.replacing",),
    TRAINED: (
        *(f"{PACKAGE}.huggingface.{name}" for name in ("replacing", "attention", "lora", "loss_head", "memory")),
        *(f"{PACKAGE}.huggingface.families.{name}" for name in RULES),
        f"{PACKAGE}.optim",
    ),
    "adamw": (f"{PACKAGE}.ops.adamw",),
    "gemv": (f"{PACKAGE}.ops.gemm.gemv",),
    "fp8_weight_linear": (f"{PACKAGE}.ops.gemm.weight_only",),
}
# Paths that are hashed beside `HASHED`.
GLUE = {TRAINED: ("huggingface/", "optim/"), SERVED: ("engine/", "serve/")}
# The kernels of gradients that have modules of their own.
BACKWARD = (
    *("ops/attention/backward", "ops/attention/hopper_backward", "ops/attention/row_sums.py"),
    *(f"ops/{family}/backward.py" for family in ("cross_entropy", "qk_norm_rope", "rms_norm", "softmax")),
)
# Paths that no call of a key gets to, although its code names them. Engines and paged attention compute no gradients,
# nor do patched models in the prefill suite. Whole models are measured without cascade. A training step has no cache
# and no quantized weights, and the models of which steps are measured have no LayerNorm and no activation of a layer's
# result.
UNUSED = {
    ENGINE: ("engine/cascade.py", *BACKWARD),
    SERVED: BACKWARD,
    PATCHED: BACKWARD,
    "attention_paged": BACKWARD,
    TRAINED: (
        *("ops/decode_attention/", "ops/attention/dequantize_pages.py", "ops/attention/hopper_latent.py"),
        *("ops/attention/latent.py", "ops/attention/paged.py", "ops/layer_norm.py", "ops/bias_activation.py"),
        *("ops/gemm/dequantize.py", "ops/gemm/skinny_dequantize.py", "ops/gemm/hopper_dequantize.py"),
        *("ops/gemm/fp8_", "ops/gemm/hopper_fp8.py", "ops/gemm/gemv_imma.py", "ops/quantize_tensor.py"),
    ),
}
FORWARD = " forward"  # after a key: without `BACKWARD`
MODELS = {"e2e": ENGINE, "serve": SERVED, "prefill": PATCHED}  # by suite
STEPS = ("train_step", "train_batch")  # ops of the training suite that run whole models
STUB = "__init__.pyi"  # has the module of each public name
_DEPTH = 3  # a definition is known by its text, that of those it names, of those that these name, and so on
UNKNOWN = "unknown"  # a commit that was not recorded
DIRTY = "-dirty"  # suffix of a commit that does not identify the measured code

Files = Mapping[str, str]  # the text of each module, by its path within the package


@dataclasses.dataclass(frozen=True)
class Age:
    """Whether a row is as old as its kernel, and why not, or why this can't be told."""

    state: Literal["current", "older", "unknown"]
    reason: str = ""


def key_of(op: str, suite: str = "") -> str | None:
    """The name under which a file records the hash for an op; None for an op that there no longer is."""
    if op.startswith("layer.") or suite in MODELS:
        return MODELS.get(suite, ENGINE)
    if op.startswith(STEPS):
        return TRAINED
    starts = _starts()
    candidates = (op, f"{op}_", op.rstrip("_"), op.removesuffix("_quantized"))
    return next((name for name in candidates if name in starts), None)


def _starts() -> dict[str, tuple[str, ...]]:
    """Where the code of each key begins: modules, or `module.name` of a public function."""
    homes = {n: (f"{home}.{n}",) for n, home in vars(rooftile)["_HOME"].items() if home.startswith(f"{PACKAGE}.ops.")}
    return {**homes, **STARTS}


@dataclasses.dataclass(frozen=True)
class _Definition:
    """A statement of a module that defines names, or, without a name, all those that define none."""

    digest: str
    is_kernel: bool
    names: tuple[str, ...]  # that it reads, with their attributes: "tl.load", "problem.choose_forward"
    strings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Module:
    definitions: Mapping[str, tuple[_Definition, ...]]
    imports: Mapping[str, str]  # what a name stands for: "rooftile.ops.attention.problem", or a name in such a module


def _dotted(node: ast.AST) -> str | None:
    """Such an expression as text, with its dots; None for another one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def _names(node: ast.AST) -> Iterator[str]:
    """The names in a statement, each with its attributes."""
    if (name := _dotted(node)) is not None:
        yield name
        return
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that a statement of a module defines, also below an `if` or `try`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        for child in ast.iter_child_nodes(node):
            yield from _defined(child)


@functools.cache
def _read(text: str) -> _Module:
    tree = ast.parse(text)
    imports: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == PACKAGE):
            if node.level or any(alias.name == "*" for alias in node.names):
                raise ValueError(f"line {node.lineno}: an import is relative or of *, which can't be followed")
            imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    imports[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE
    found: dict[str, list[_Definition]] = {}
    for statement in tree.body:
        parts = list(_parts(statement))
        if not parts:
            continue
        constants = (node.value for node in ast.walk(statement) if isinstance(node, ast.Constant))
        made = _Definition(
            hashlib.sha256("\n".join(parts).encode()).hexdigest(),
            any(_is_jit(decorator) for decorator in getattr(statement, "decorator_list", ())),
            tuple(dict.fromkeys(_names(statement))),
            tuple(dict.fromkeys(value for value in constants if isinstance(value, str))),
        )
        for name in dict.fromkeys(_defined(statement)) or ("",):
            found.setdefault(name, []).append(made)
    return _Module({name: tuple(some) for name, some in found.items()}, imports)


def _is_jit(decorator: ast.AST) -> bool:
    """Whether it is `triton.jit` or `gluon.jit`, with or without options."""
    return _dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) in ("triton.jit", "gluon.jit")


def _parts(node: ast.AST) -> Iterator[str]:
    """The nodes and constants of a module in order, alike in all versions of Python."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "type_comment", "kind", "returns", "type_params"):
            continue
        if name == "annotation" and (_dotted(value) or "").rpartition(".")[2] != "constexpr":  # compiles an argument in
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _parts(item)
            elif item is not None:
                yield f"{name}={item.lstrip('_') if name in ('id', 'name', 'attr', 'arg') else item!r}"
    yield "."


def _path(module: str, files: Files) -> str | None:
    base = module.removeprefix(PACKAGE).lstrip(".").replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in files), None)


class _Reached:
    """The definitions that some modules or functions reach, in the order in which they are reached.

    Args:
        files: of the package.
        unused: paths that are not followed.
        glue: paths that are hashed beside `HASHED`.
    """

    def __init__(self, files: Files, unused: tuple[str, ...] = (), glue: tuple[str, ...] = ()) -> None:
        self._files, self._unused, self._hashed = files, unused, (*HASHED, *glue)
        self._order: dict[tuple[str, str], None] = {}  # paths and names
        self._targets: list[tuple[str, str]] = []

    def _follows(self, path: str) -> bool:
        return path.startswith(FOLLOWED) and not path.startswith(self._unused)

    def _add(self, path: str, name: str) -> None:
        self._order[path, name] = None
        self._targets.append((path, name))

    def _add_module(self, path: str) -> None:
        """All that a module defines, and what it imports to export.

        None of them is a target of what names the module: what moves to a module beside it keeps the hash.
        """
        module, named = _read(self._files[path]), len(self._targets)
        for name in module.definitions:
            self._add(path, name)
        for exported in module.definitions.get("__all__", ()):
            for name in exported.strings:
                if name in module.imports:
                    self.add(module.imports[name])
        del self._targets[named:]

    def add(self, dotted: str) -> bool:
        """A module, or a name in one, by its name in the package. Whether there is such a thing."""
        whole = _path(dotted, self._files)
        if whole is not None:
            if self._follows(whole):
                self._add_module(whole)
            return True
        home, _, name = dotted.rpartition(".")
        if home == PACKAGE:  # a public name, which is imported at its first use
            origin = _read(self._files.get(STUB, "")).imports.get(name)
            return origin is not None and self.add(origin)
        path = _path(home, self._files) if home else None
        if path is None:  # a member of a class
            return "." in home and self.add(home)
        if not self._follows(path):
            return True
        module = _read(self._files[path])
        if name in module.definitions:
            self._add(path, name)
            return True
        return name in module.imports and self.add(module.imports[name])

    def _follow(self, path: str, module: _Module, definition: _Definition) -> None:
        for dotted in definition.names:
            first, _, rest = dotted.partition(".")
            if first in module.definitions:
                self._add(path, first)
            elif first in module.imports:
                self.add(f"{module.imports[first]}.{rest}" if rest else module.imports[first])
        folder = path.rpartition("/")[0]
        for text in definition.strings:
            beside = f"{folder}/{text}.py"
            if text.isidentifier() and beside in self._files:
                if self._follows(beside):
                    self._add_module(beside)
            elif text.startswith(f"{PACKAGE}."):
                self.add(text)

    def hash(self) -> str:
        """Of each definition that is hashed, and of which others it names, wherever these stand."""
        digests, named = {}, {}
        for place in _growing(self._order):
            path, name = place
            module = _read(self._files[path])
            self._targets = []
            if "" in module.definitions:
                self._order[path, ""] = None
            definitions = module.definitions.get(name, ())
            for definition in definitions:
                self._follow(path, module, definition)
            named[place] = self._targets
            whole = path.startswith(self._hashed)
            digests[place] = "".join(d.digest for d in definitions if whole or d.is_kernel)
        labels = digests
        for _ in range(_DEPTH):
            labels = {p: digest and _hash(digest, *(labels[t] for t in named[p])) for p, digest in digests.items()}
        return _hash(*sorted({*labels.values()} - {""}))


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _growing(order: Mapping[tuple[str, str], None]) -> Iterator[tuple[str, str]]:
    """The keys, also those that are added meanwhile."""
    at = 0
    while at < len(order):
        yield from list(order)[at : (at := len(order))]


def hash_of(starts: Sequence[str], files: Files, *paths: tuple[str, ...]) -> str | None:
    """The hash of the kernels that modules or functions reach; None if one of them is not there.

    `paths` are those that are unused, and those that are hashed beside `HASHED`.
    """
    reached = _Reached(files, *paths)
    return reached.hash() if all(map(reached.add, starts)) else None


def hash_of_key(key: str, files: Files) -> str | None:
    name = key.removesuffix(FORWARD)
    unused = (*UNUSED.get(name, ()), *(() if name == key else BACKWARD))
    return hash_of(_starts()[name], files, unused, GLUE.get(name, ()))


@functools.cache
def present() -> Files:
    """The modules of this package."""
    root = Path(__file__).resolve().parents[1]
    paths = (*root.rglob("*.py"), root / STUB)
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths if path.exists()}


@functools.cache
def _present_hash(key: str) -> str | None:
    return hash_of_key(key, present())


@functools.cache
def hashes() -> dict[str, str]:
    """The hash of each op's kernels, and of those of the engine and of patched models."""
    found = {name: _present_hash(name) for name in sorted(_starts())}
    return {name: value for name, value in found.items() if value is not None}


class Untold(Exception):
    """The sources at a commit can't be read, with the reason."""


def _git(*arguments: str) -> bytes:
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        raise Untold("this is no git checkout, and the file records no hash of its kernel")
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise Untold("git could not read it") from None


@functools.cache
def at(commit: str) -> Files:
    """The modules of the package at a commit.

    Raises:
        Untold: there is no git, no checkout, or no such commit in it.
    """
    if not re.fullmatch("[0-9a-f]{4,40}", commit):
        raise Untold(f"{commit} names no commit")
    try:
        packed = _git("archive", "--format=tar", commit, f"src/{PACKAGE}")
    except Untold as error:
        if "could not" not in str(error):
            raise
        shallow = _git("rev-parse", "--is-shallow-repository").strip() == b"true"
        more = "; this clone is shallow: run git fetch --unshallow" if shallow else ""
        raise Untold(f"commit {commit[:10]} is not in this clone{more}") from None
    files = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar:
            path = member.name.removeprefix(f"src/{PACKAGE}/")
            followed = path.endswith(".py") and path.startswith(FOLLOWED)
            if (followed or path == STUB) and (file := tar.extractfile(member)) is not None:
                files[path] = file.read().decode()
    return files


def age(op: str, meta: Mapping[str, Any], suite: str = "", direction: str = "") -> Age:
    """Whether the rows of an op, in a file with that metadata, are as old as its kernel.

    A file records no hash of the forward alone: if more than that may have changed, git tells.
    """
    key = key_of(op, suite or str(meta.get("suite", "")))
    now = hashes().get(key or "")
    if key is None or now is None:
        return Age("older", f"there is no op {op} any more")
    recorded = meta.get("definitions", {}).get(key)
    if recorded == now:
        return Age("current")
    commit = str(meta.get("commit", UNKNOWN))
    if direction == "forward":
        key += FORWARD
        now = _present_hash(key) or now
    by_git = Age("unknown", "its commit was not recorded") if commit == UNKNOWN else _age_by_git(key, now, commit)
    return Age("older", "its kernel has changed since") if recorded and by_git.state == "unknown" else by_git


@functools.cache
def _age_by_git(key: str, now: str, commit: str) -> Age:
    try:
        then = hash_of_key(key, at(commit.removesuffix(DIRTY)))
    except Untold as error:
        return Age("unknown", str(error))
    if then != now:
        return Age("older", f"its kernel has changed since commit {commit[:10]}")
    return Age("unknown", "it was measured on changed files") if commit.endswith(DIRTY) else Age("current")
