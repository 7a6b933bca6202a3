"""Whether a row is as old as its kernel: hashes of the sources of each op's kernels.

A result file records, for each op, a hash of the modules of `ops/` and `primitives/` that its public function imports.
Comments, docstrings, messages of errors and imports are not hashed. A row is older than its kernel if the hash of the
present sources is another. A file without hashes is compared through git, by the sources at its commit.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import rooftile

PACKAGE = "rooftile"
HASHED = ("ops", "primitives")
FOLLOWED = (*HASHED, "engine", "huggingface", "nn", "optim", "losses.py")
ENGINE, PATCHED = "engine", "huggingface"
# What no public function of the same name leads to.
STARTS = {
    ENGINE: f"{PACKAGE}.engine.engine",
    PATCHED: f"{PACKAGE}.huggingface.replacing",
    "adamw": f"{PACKAGE}.ops.adamw",
    "gemv": f"{PACKAGE}.ops.gemm.gemv",
    "fp8_weight_linear": f"{PACKAGE}.ops.gemm.weight_only",
}
MODELS = {"e2e": ENGINE, "prefill": PATCHED}  # by suite
STEPS = ("train_step", "train_batch")  # ops of the training suite that run whole models
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
        return PATCHED
    starts = _starts()
    candidates = (op, f"{op}_", op.rstrip("_"), op.removesuffix("_quantized"))
    return next((name for name in candidates if name in starts), None)


def _starts() -> dict[str, str]:
    """The module of each op's public function."""
    homes = {name: home for name, home in vars(rooftile)["_HOME"].items() if home.startswith(f"{PACKAGE}.ops.")}
    return {**homes, **STARTS}


@functools.cache
def _read(text: str) -> tuple[str, tuple[str, ...]]:
    """The hash of one module's code, and the names that it imports of the package."""
    tree = ast.parse(text)
    imported = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
            imported += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names if alias.name.startswith(f"{PACKAGE}.")]
    return hashlib.sha256("\n".join(_parts(tree)).encode()).hexdigest(), tuple(dict.fromkeys(imported))


def _parts(node: ast.AST) -> Iterator[str]:
    """The nodes and constants of a module in order, alike in all versions of Python."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Raise, ast.JoinedStr)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in ("ctx", "type_comment", "kind", "returns", "annotation", "type_params"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _parts(item)
            elif item is not None:
                yield f"{name}={item!r}"
    yield "."


def _path(module: str, files: Files) -> str | None:
    base = module.removeprefix(f"{PACKAGE}.").replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in files), None)


def hash_of(module: str, files: Files) -> str | None:
    """The hash of the kernels that a module reaches by its imports; None if there is no such module."""
    first = _path(module, files)
    if first is None:
        return None
    seen, due, hashes = {first}, [first], []
    while due:
        path = due.pop()
        digest, imported = _read(files[path])
        if path.startswith(HASHED):
            hashes.append(digest)
        found = [_path(name, files) for name in imported]
        due += dict.fromkeys(p for p in found if p and p not in seen and p.startswith(FOLLOWED))
        seen.update(due)
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:12]


@functools.cache
def present() -> Files:
    """The modules of this package."""
    root = Path(__file__).resolve().parents[1]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}


@functools.cache
def hashes() -> dict[str, str]:
    """The hash of each op's kernels, and of those of the engine and of patched models."""
    found = {name: hash_of(module, present()) for name, module in sorted(_starts().items())}
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
            if path.endswith(".py") and path.startswith(FOLLOWED) and (file := tar.extractfile(member)) is not None:
                files[path] = file.read().decode()
    return files


def age(op: str, meta: Mapping[str, Any], suite: str = "") -> Age:
    """Whether the rows of an op, in a file with that metadata, are as old as its kernel."""
    key = key_of(op, suite or str(meta.get("suite", "")))
    now = hashes().get(key or "")
    if key is None or now is None:
        return Age("older", f"there is no op {op} any more")
    if recorded := meta.get("kernels", {}).get(key):
        return Age("current") if recorded == now else Age("older", "its kernel has changed since")
    commit = str(meta.get("commit", UNKNOWN))
    if commit == UNKNOWN:
        return Age("unknown", "its commit was not recorded")
    return _age_by_git(key, now, commit)


@functools.cache
def _age_by_git(key: str, now: str, commit: str) -> Age:
    try:
        then = hash_of(_starts()[key], at(commit.removesuffix(DIRTY)))
    except Untold as error:
        return Age("unknown", str(error))
    if then != now:
        return Age("older", f"its kernel has changed since commit {commit[:10]}")
    return Age("unknown", "it was measured on changed files") if commit.endswith(DIRTY) else Age("current")
