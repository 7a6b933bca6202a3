"""`rooftile bench optim`: a row for each implementation of each list; wrong ones get no time."""

import io

import pytest
from rich.console import Console

from rooftile.bench import optim
from rooftile.bench.rows import OURS, read_json
from rooftile.bench.timer import HostClock
from rooftile.optim import AdamW

pytestmark = pytest.mark.nightly


def run(*names, **options):
    console = Console(file=io.StringIO(), width=200)
    return optim.run(names, console, timer=HostClock(), **options), console.file.getvalue()


def test_each_implementation_has_a_row_in_each_list(tmp_path):
    code, shown = run(json=tmp_path / "rows.json")
    assert code == 0
    _, rows = read_json(tmp_path / "rows.json")
    assert [(row.shape, row.impl) for row in rows] == [(p.name, impl) for p in optim.TINY for impl in optim.IMPLS]
    assert all(row.status == "ok" and row.us > 0 for row in rows), rows
    assert "torch fused" in shown


def test_a_wrong_step_is_told_and_not_timed(monkeypatch, tmp_path):
    step = AdamW.step
    monkeypatch.setattr(AdamW, "step", lambda self: [step(self), self.param_groups[0]["params"][0].data.mul_(1.1)])
    code, shown = run("tiny", json=tmp_path / "rows.json")
    assert code == 1
    assert "FAIL" in shown
    _, rows = read_json(tmp_path / "rows.json")
    assert {row.impl: row.us is None for row in rows} == {impl: impl == OURS for impl in optim.IMPLS}


def test_a_step_that_moves_no_parameter_is_wrong_in_bfloat16(monkeypatch, tmp_path):
    step = AdamW.step

    def moments_alone(self):
        params = self.param_groups[0]["params"]
        before = [p.detach().clone() for p in params]
        step(self)
        for p, old in zip(params, before, strict=True):
            p.data.copy_(old)

    monkeypatch.setattr(AdamW, "step", moments_alone)
    code, _ = run("tiny clipped", json=tmp_path / "rows.json")
    assert code == 1
    _, rows = read_json(tmp_path / "rows.json")
    assert {row.impl: row.status for row in rows} == {i: "FAIL" if i == OURS else "ok" for i in optim.IMPLS}


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown list 1M; known lists in the interpreter: tiny"):
        run("1M")
    with pytest.raises(ValueError, match="the interpreter makes none"):
        run(results=tmp_path)


def test_the_lists_are_those_of_the_models():
    problem = next(p for p in optim.PROBLEMS if p.name == "Llama-3.2-1B")
    assert (problem.elements, len(problem.shapes)) == (1_235_814_400, 146)
    assert problem.nbytes == 14 * problem.elements
    assert {p.nbytes // p.elements for p in optim.PROBLEMS if p.name in ("1M", "500M")} == {28}
