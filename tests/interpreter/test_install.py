"""What `install` promises, each in a process of its own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def run(code: str) -> str:
    """The last line of the standard error of a fresh interpreter that runs `code`."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def test_a_second_install_changes_nothing():
    assert not run(
        """
from rooftile import interpreter
interpreter.install()
from triton.runtime.interpreter import GridExecutor
first = GridExecutor.__call__
interpreter.install()
assert GridExecutor.__call__ is first
"""
    )


def test_a_missing_dependency_is_named_with_the_extra_that_brings_it():
    error = run("import sys; sys.modules['ml_dtypes'] = None\nfrom rooftile import interpreter; interpreter.install()")
    assert (
        error
        == "ImportError: Triton's interpreter needs numpy and ml_dtypes: pip install '.[cpu]' in a clone of Rooftile"
    )


def test_a_triton_that_was_imported_to_compile_is_refused():
    """As where transformers is imported first, and a program then sets the variable itself."""
    error = run(
        """
import os
del os.environ["TRITON_INTERPRET"]
import triton
os.environ["TRITON_INTERPRET"] = "1"
import rooftile
rooftile.rms_norm
"""
    )
    assert error.startswith("RuntimeError: TRITON_INTERPRET=1 was set after Triton had been imported")
    assert error.endswith("set it in the environment before Python starts")


def test_an_unknown_triton_is_refused_by_its_version():
    assert not run(
        """
import triton.runtime.interpreter as stock
from rooftile import interpreter
for name in ("InterpreterBuilder", "GridExecutor", "_implicit_cvt"):
    kept = getattr(stock, name)
    delattr(stock, name)
    try:
        interpreter.install()
    except RuntimeError as error:
        said = str(error)
    assert said.startswith("Rooftile cannot mend the interpreter of Triton 3."), said
    assert said.endswith(f"has no attribute {name!r}"), said
    setattr(stock, name, kept)
"""
    )


def test_importing_the_package_imports_neither_numpy_nor_triton():
    assert not run(
        """
import sys
import rooftile.interpreter
assert "triton" not in sys.modules and "ml_dtypes" not in sys.modules
"""
    )
