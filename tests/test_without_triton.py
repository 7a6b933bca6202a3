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


IMPORTS = """
import without_triton, rooftile, rooftile.cli
from rooftile.quantize import Quantize
from rooftile.reference import add_rms_norm, gated, rms_norm, rope
assert rooftile.__version__ and "rms_norm" in dir(rooftile)
Quantize(per="group")
print("imported")
rooftile.rms_norm
"""


def test_importing_an_op_names_what_is_missing():
    """The package, the command line, the references and the option of quantized results need no Triton."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", IMPORTS], env=env, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "imported\n"), run.stderr
    assert "No module named 'triton'" in run.stderr
