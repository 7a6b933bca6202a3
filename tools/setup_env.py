"""Set-up for `make`: finds or makes a Python with everything that a task needs, then runs the task with it.

    python3 tools/setup_env.py TASK [ARGUMENT...]

runs `python ARGUMENT...` with src/ on the path. TASK is `demo`, `test`, `dev` (what lint and types need besides) or
`site` (the documentation's). The Python is the running one where it already has what the task needs, and nothing is
installed then; else the one of .venv, which is made at the first call and brought up to date when the requirements
change. Standard library alone.

On a machine without a GPU a CPU build of PyTorch is taken where pip's configuration offers one, or the index that
TORCH_INDEX_URL names. That variable holds for the default build too.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "rooftile-setup.json"
PYPROJECT = ROOT / "pyproject.toml"
TOOLS = ROOT / "tools"

DOCS = ("mkdocs-material", "mkdocstrings", "mike")
# Extras of pyproject.toml that a task needs, and requirements among them that it does without.
TASKS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "demo": (("cpu", "hf", "bench"), frozenset()),
    "test": (("dev",), frozenset({"build", "ruff", "mypy", *DOCS})),
    "dev": (("dev",), frozenset(DOCS)),
    "site": (("docs",), frozenset()),
}


def say(message: str) -> None:
    print(f"[set-up] {message}", flush=True)


def has_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) or any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/kfd"))


def first_of(*modules: str) -> Any:
    """The first of those modules that can be imported, or None."""
    for name in modules:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


def lacks(task: str) -> list[str] | None:
    """The requirements of a task that the running Python does not meet; None where it can't read them."""
    toml = first_of("tomllib", "tomli", "pip._vendor.tomli")
    requirements = first_of("packaging.requirements", "pip._vendor.packaging.requirements")
    if toml is None or requirements is None:
        return None
    project: dict[str, Any] = toml.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras, without = TASKS[task]
    missing = []
    queue = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    while queue:
        text = queue.pop(0)
        requirement = requirements.Requirement(text)
        if requirement.name == project["name"]:
            queue += [r for extra in sorted(requirement.extras) for r in project["optional-dependencies"][extra]]
            continue
        if requirement.name in without or (requirement.marker and not requirement.marker.evaluate()):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(text)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{text} (here: {version})")
    return missing


def wanted() -> dict[str, str]:
    """What the .venv was made for: `files` may change under it, the rest makes a new one."""
    files = [PYPROJECT, *sorted(TOOLS.glob("constraints*.txt"))]
    return {
        "files": hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest(),
        "python": sys.version,
        "gpu": str(has_gpu()),
        "torch_index": os.environ.get("TORCH_INDEX_URL", ""),
    }


def venv_python() -> str:
    return str(VENV / "bin" / "python")


def make_venv(clear: bool) -> None:
    command = [sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(VENV)]
    say(f"making {VENV.name}/ with Python {sys.version.split()[0]}")
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if made.returncode != 0:
        sys.exit(
            f"{made.stdout}\n[set-up] {sys.executable} can't make a virtual environment. On Debian and Ubuntu the "
            "package python3-venv is missing; or name another Python: make PYTHON=python3.12 ..."
        )
    pip("pip>=25")  # the one that comes with Python 3.11 takes twice as long to find and to unpack what is needed


def pip(*arguments: str) -> None:
    quiet = [] if sys.stdout.isatty() else ["--quiet", "--quiet"]
    # Of the files that come, a third is ever imported: Python compiles those to bytecode then.
    options = ["--disable-pip-version-check", "--no-compile", *quiet]
    command = [venv_python(), "-m", "pip", "install", *options, *arguments]
    say("pip install " + " ".join(a.replace(f"{ROOT}/", "") for a in arguments))
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode != 0:
        sys.exit("[set-up] pip failed; its message stands above. A second call goes on from here.")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


def bound(file: Path, pattern: str) -> tuple[int, ...]:
    found = re.search(pattern + r"([\d.]+)", file.read_text(encoding="utf-8"))
    assert found, f"{file} has no {pattern}"
    return numbers(found[1])


def cpu_build(index: list[str]) -> str | None:
    """The CPU build of PyTorch to take, of those that pip can find: the newest tested one, or the next after it."""
    command = [venv_python(), "-m", "pip", "index", "versions", "torch", *index]
    listing = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    offered = sorted(set(re.findall(r"\b\d+\.\d+\.\d+\+cpu\b", listing)), key=numbers)
    offered = [v for v in offered if numbers(v) >= bound(PYPROJECT, r'"torch>=')]
    newest = bound(TOOLS / "constraints-cpu.txt", "torch<=")
    tested = [v for v in offered if numbers(v) <= newest]
    return tested[-1] if tested else offered[0] if offered else None


def install() -> None:
    url = os.environ.get("TORCH_INDEX_URL", "")
    index = ["--index-url", url] if url else []
    cpu = None if has_gpu() else cpu_build(index)
    if cpu:
        say(f"no GPU here: taking PyTorch's CPU build, {cpu}")
        pip(f"torch=={cpu}", *index)
    else:
        if not has_gpu():
            say(
                "no GPU here, and neither pip's configuration nor TORCH_INDEX_URL offers a CPU build of PyTorch: "
                "taking the default build, which is large (several GB)"
            )
        pip("torch", *index, "--constraint", str(TOOLS / "constraints-default.txt"))
    constraints = ["--constraint", str(TOOLS / "constraints.txt")]
    # Each build is held to the version that was just chosen, whatever the file says of versions: CPU builds newer than
    # the tested ones are taken where there is nothing else.
    if cpu and numbers(cpu) <= bound(TOOLS / "constraints-cpu.txt", "torch<="):
        constraints += ["--constraint", str(TOOLS / "constraints-cpu.txt")]
    pip("--editable", ".[dev]", *constraints)


def environment() -> str:
    """The path of a Python with everything in it."""
    want = wanted()
    have = json.loads(STAMP.read_text(encoding="utf-8")) if STAMP.exists() else None
    if have == want:
        say(f"{VENV.name}/ is up to date")
        return venv_python()
    if have is None and VENV.exists():
        say(f"{VENV.name}/ exists without a finished set-up: its packages are replaced by the tested versions")
    if have is None or {**have, "files": ""} != {**want, "files": ""}:
        make_venv(clear=have is not None)
    STAMP.unlink(missing_ok=True)
    install()
    STAMP.write_text(json.dumps(want, indent=1), encoding="utf-8")
    return venv_python()


def main() -> None:
    task, arguments = sys.argv[1], sys.argv[2:]
    missing = lacks(task)
    if missing == []:
        python = sys.executable
        say(f"{python} has all that is needed: installing nothing")
    else:
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            say(f"{sys.executable} lacks {', '.join(missing[:3])}{more}: taking {VENV.name}/")
        python = environment()
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    if arguments:
        sys.stdout.flush()
        os.chdir(ROOT)
        os.execve(python, [python, *arguments], env)


if __name__ == "__main__":
    main()
