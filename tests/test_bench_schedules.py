"""`rooftile bench schedules`: each way has a row, wrong ones no time, and configurations that the target takes."""

import io
import json

import pytest
import torch
from rich.console import Console

from rooftile import runtime
from rooftile.bench import schedules
from rooftile.bench.timer import HostClock

pytestmark = pytest.mark.nightly

SM_90 = runtime.TARGETS["sm_90"]


@pytest.mark.parametrize("name", schedules.COMPARISONS)
def test_each_problem_has_several_ways_on_sm_90(name):
    comparison = schedules.COMPARISONS[name]
    for p in comparison.problems():
        ways = comparison.ways(p, SM_90)
        assert sum(len(some) for some in ways.values()) >= 2, p
    assert len({c for p in comparison.problems() for some in comparison.ways(p, SM_90).values() for c in some}) < 200


def test_every_way_has_a_row_and_a_right_one_has_a_time(monkeypatch):
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("rows and checks are the same on a GPU, where each configuration is compiled first")
    right = schedules.GemmConfig("gemv", 1, 16, 32, num_warps=4, num_stages=1)
    small = schedules.Comparison(
        schedules.QuantizedWeights("int8_linear"),
        lambda: [schedules.QuantizedProblem(1, 48, 64, 0)],
        lambda p, target: {"gemv": [right], "none": []},
    )
    monkeypatch.setitem(schedules.COMPARISONS, "int8_linear", small)
    found = schedules.compare(
        "int8_linear", small.problems()[0], HostClock(), torch.device("cpu"), runtime.INTERPRETER,
        schedules.Seconds(0.0, 0.0, 0.0),
    )  # fmt: skip
    assert [r["schedule"] for r in found] == ["gemv", "none", "cuBLAS, bfloat16"]
    assert found[0]["us"] > 0
    assert found[0]["error"] < 4e-3
    assert found[1]["message"] == "no configuration takes this problem"
    assert json.loads(schedules.to_json({"gpu": "x"}, found))["rows"] == found
    schedules.show(Console(file=io.StringIO()), "int8_linear", found)


def test_an_unknown_comparison_is_named():
    with pytest.raises(ValueError, match="unknown comparison gemm; known: linear, int8_linear"):
        schedules.run(["gemm"], Console(file=io.StringIO()))
