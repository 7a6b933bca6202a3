"""Builds the source distribution and from it the wheel, installs the wheel in an empty environment, and uses it there.

The dependencies are those of the running Python: they are found through a .pth file, and `pip check` compares their
versions with what the wheel requires.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "package"
USED = """
import importlib.resources, pathlib, sys
import rooftile
from rooftile.demo import byte_model
root = pathlib.Path(rooftile.__file__).parent
assert pathlib.Path(sys.prefix) in root.parents, f"{root} is not of the environment {sys.prefix}"
model = [file.relative_to(root) for file in byte_model().iterdir() if file.is_file()]
needed = ["py.typed", "__init__.pyi", "native.c", "bench/twins/common.cuh", "bench/twins/rope.cu", *model]
missing = [str(name) for name in needed if not (root / name).is_file()]
assert not missing, f"the wheel lacks {missing}"
assert list((root / "tuning").rglob("*.json")), "the wheel lacks the tuned tables"
"""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command without this repository on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("+", *(c if "\n" not in str(c) else "..." for c in command), flush=True)
    subprocess.run([str(c) for c in command], cwd=cwd, env=environment, check=True)


def main() -> None:
    shutil.rmtree(BUILT, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", BUILT)  # the wheel is built from the source distribution
    (wheel,) = BUILT.glob("*.whl")
    for file in sorted(BUILT.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB")

    folder = BUILT / "environment"
    venv.create(folder)  # with pip and setuptools, it would have versions of its own
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python3.*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "-q", "--no-compile", "--no-deps", wheel)
    run(*pip, "check")
    outside = BUILT / "outside"
    outside.mkdir()
    run(python, "-c", USED, cwd=outside)
    rooftile = folder / "bin" / "rooftile"
    run(rooftile, "--version", cwd=outside)
    run(rooftile, "check", "rms_norm", "--set", "tiny", "--dtype", "bf16", cwd=outside)
    run(rooftile, "generate", "demo", "--prompt", "    for line in ", "--max-new-tokens", "4", cwd=outside)


if __name__ == "__main__":
    main()
