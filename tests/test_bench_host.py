"""`rooftile bench --host`: its rows, limits and file. In the interpreter, where times mean nothing."""

import io
import json

import pytest
import torch
from rich.console import Console

from rooftile.bench import host_ops
from rooftile.bench.timer import HostClock

pytestmark = pytest.mark.nightly


def test_every_direction_of_an_op_is_a_row_with_its_baseline_named(tmp_path, device):
    path = tmp_path / "host.json"
    console = Console(file=io.StringIO(), width=200)
    assert host_ops.run(["silu_mul", "embedding"], console, None, path, timer=HostClock(), device=device) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["op"], row["direction"]) for row in rows] == [
        *(("silu_mul", direction) for direction in host_ops.DIRECTIONS),
        ("embedding", "forward"),
    ]
    assert {row["baseline"] for row in rows} == {"F.silu, mul", "F.embedding"}
    assert all(row["us"] > 0 and row["baseline_us"] > 0 for row in rows)
    assert "Host microseconds" in console.file.getvalue()


def test_an_op_that_fails_is_said_and_the_others_are_measured(monkeypatch, device):
    def fail(**tensors):
        raise RuntimeError("made up")

    broken = host_ops.Problem("softmax", "1", "none", lambda device: {"x": torch.ones(1)}, fail, fail)
    last = next(p for p in host_ops.PROBLEMS if p.op == "embedding")
    monkeypatch.setattr(host_ops, "PROBLEMS", (broken, last))
    console = Console(file=io.StringIO(), width=200)
    assert host_ops.run(["softmax", "embedding"], console, timer=HostClock(), device=device) == 1
    assert "made up" in console.file.getvalue()
    assert "F.embedding" in console.file.getvalue()


@pytest.mark.parametrize(
    ("direction", "baseline_us", "limit_us"),
    [("forward", 10, 18), ("forward", 20, 30), ("forward with gradients", 10, 25), ("forward and backward", 200, 400)],
)
def test_the_limit_is_the_larger_of_a_factor_and_a_margin(direction, baseline_us, limit_us):
    assert host_ops.HostRow("op", direction, "", "", 1.0, baseline_us).limit_us == limit_us


def test_results_are_for_measurements(tmp_path, device):
    if device.type != "cpu":
        pytest.skip("on a GPU the command measures, for a minute")
    with pytest.raises(ValueError, match="the interpreter makes none"):
        host_ops.run(["softmax"], Console(file=io.StringIO()), tmp_path)
