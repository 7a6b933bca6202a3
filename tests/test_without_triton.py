"""Without Triton the package imports, its reference tests run, and the other tests say why they don't."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def pytest_without_triton(*arguments):
    """What pytest prints, run with those arguments in a process from which Triton is hidden."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "without_triton", "-rs", *arguments],
        env=env | {"PYTHONPATH": path},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip().splitlines()


def test_the_references_pass_and_tests_of_kernels_are_skipped_and_say_why():
    """But for those that import transformers, or more processes: neither is nearer to Triton here."""
    files = [str(TESTS / name) for name in ("test_reference.py", "test_conformance.py")]
    lines = pytest_without_triton(*files, "-k", "not TestHuggingFace and not importing")
    assert any("Triton is not installed" in line for line in lines)
    assert " passed" in lines[-1]
    assert "failed" not in lines[-1]


def test_importing_an_op_names_what_is_missing():
    code = "import without_triton, rooftile; rooftile.rms_norm"
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "No module named 'triton'" in run.stderr
