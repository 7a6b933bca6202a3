"""The engine's own kernels, by their cases: values, memory, and that each has a case."""

import ast
from pathlib import Path

import pytest
import torch
from helpers import draw

from rooftile import engine, launching
from rooftile.cases.check import check_case, run_forward
from rooftile.engine.cases import CASES
from rooftile.inspect import compile_on, plan
from rooftile.runtime import TARGETS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_within_tolerance(case):
    """In memory filled with NaN, and inputs stay as they were; the interpreter refuses accesses out of bounds."""
    rows = [row for rows in check_case(case, ["tiny", "edge"]) for row in rows]
    assert {row.output for row in rows} == set(case.outputs)
    failed = [f"{row.shape} {row.dtype} {row.output}: {row.message}" for row in rows if not row.passed]
    assert not failed, "\n".join(failed)


def test_each_kernel_has_a_case(device, monkeypatch):
    kernels = {
        statement.name
        for path in Path(engine.__file__).parent.glob("*.py")
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in statement.decorator_list)
    }
    launched = set()
    launch = launching.launch

    def recorded(launcher, *args):
        launched.add(launcher.kernel.__name__)
        launch(launcher, *args)

    monkeypatch.setattr(launching, "launch", recorded)
    for case in CASES:
        point = case.sets["tiny"][0]
        run_forward(case.function, draw(case, point, torch.bfloat16, device), point, case.mutates)
    assert kernels
    assert launched >= kernels


@pytest.mark.nightly
@pytest.mark.parametrize("arch", TARGETS)
def test_each_case_compiles(arch):
    tasks = plan(CASES, sets=["llm"], dtypes=[torch.bfloat16], source="rooftile.engine.cases")
    rows = compile_on(arch, tasks, {case.name: case for case in CASES})
    assert {row.op for row in rows} == {case.name for case in CASES}
    assert not [f"{row.op}: {row.message}" for row in rows if row.verdict != "PASS"]
