"""These tests are about Triton's interpreter, so they run where the process is in that mode and nowhere else."""

import os
import sys

import pytest
import torch

if "triton" not in sys.modules and not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _interpreter_only() -> None:
    runtime = pytest.importorskip("rooftile.runtime")
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("this process is not in interpreter mode (TRITON_INTERPRET=1)")
