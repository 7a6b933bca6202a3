"""The documentation's example of adding an op: its files, in a copy of the package, pass the commands that it names."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from pages import ROOT

PAGE = ROOT / "docs" / "contributing" / "adding-an-op.md"
OP = "relu_squared"
_FILE = re.compile(r'^```python title="(\S+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the package with the page's files."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src" / "rooftile", folder / "src" / "rooftile")
    for name, text in _FILE.findall(PAGE.read_text(encoding="utf-8")):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(before + text, encoding="utf-8")
    return folder


def run(checkout, *command):
    env = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run([sys.executable, *command], cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_passes_its_checks(checkout):
    run(checkout, "-m", "rooftile", "check", OP, "--json", "rows.json")
    rows = json.loads((checkout / "rows.json").read_text(encoding="utf-8"))
    rows = rows["rows"] if isinstance(rows, dict) else rows
    assert {(r["direction"], r["dtype"]) for r in rows} == {
        (direction, dtype) for direction in ("forward", "backward") for dtype in ("fp32", "fp16", "bf16")
    }
    assert all(r["passed"] for r in rows)


@pytest.mark.nightly
def test_its_test_passes(checkout):
    assert "1 passed" in run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")


@pytest.mark.nightly
def test_it_compiles_for_another_target(checkout):
    run(checkout, "-m", "rooftile", "inspect", OP, "--arch", "sm_80", "--first", "--set", "llm", "--dtype", "bf16")


@pytest.mark.nightly
def test_it_conforms(checkout):
    shutil.copytree(ROOT / "tests", checkout / "tests", dirs_exist_ok=True)
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly")
    assert " passed" in run(checkout, *command, "tests/test_conformance.py", "-k", OP)
