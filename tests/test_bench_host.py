"""`rooftile bench --host`: its rows, limits and file. In the interpreter, where times mean nothing."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Calls
from rich.console import Console

from rooftile import runtime
from rooftile.bench import first_call, host_ops
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


def test_first_calls_are_of_new_processes_that_share_a_cache_which_was_empty(monkeypatch):
    folders = []

    def start(command, env, **options):
        assert command == [sys.executable, "-m", "rooftile.bench.first_call"]
        folders.append(env["TRITON_CACHE_DIR"])
        assert len(os.listdir(folders[0])) == len(folders) - 1
        (Path(folders[0]) / str(len(folders))).touch()
        return subprocess.CompletedProcess(command, 0, f"a warning\n{1.5 * len(folders)}\n", "")

    monkeypatch.setattr(subprocess, "run", start)
    empty, filled = first_call.measure()
    assert (empty.cache, empty.seconds, empty.limit_s) == ("empty", 1.5, 10.0)
    assert (filled.cache, filled.seconds, filled.limit_s) == ("filled", 3.0, 2.0)
    assert folders[0] == folders[1]
    console = Console(file=io.StringIO(), width=200)
    host_ops.show_first_calls(console, (empty, filled))
    assert console.file.getvalue().count("over") == 1

    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "made up"))
    with pytest.raises(RuntimeError, match="the first call with the cache empty failed: made up"):
        first_call.measure()


def test_the_first_call_is_measured_with_attention_on_a_gpu_alone(monkeypatch, tmp_path, device):
    monkeypatch.setattr(host_ops, "PROBLEMS", ())
    monkeypatch.setattr(
        host_ops, "measure_beside_launcher", lambda *args, **options: host_ops.HostRow(*["x"] * 4, 1, 1)
    )
    monkeypatch.setattr(first_call, "measure", lambda: [first_call.FirstCall("call", "empty", 1.0, 10.0)])
    found = []
    for mode in (runtime.Mode.INTERPRETER, runtime.Mode.GPU):
        monkeypatch.setattr(runtime, "MODE", mode)
        for op in ("attention", "softmax"):
            path = tmp_path / f"{op}.json"
            host_ops.run([op], Console(file=io.StringIO()), None, path, timer=HostClock(), device=device)
            found.append(len(json.loads(path.read_text())["meta"]["first_calls"]))
    assert found == [0, 0, 1, 0]


def test_the_first_call_runs_forward_and_backward(device):
    with Calls() as ops:
        assert first_call.seconds(device, (1, 16, 4, 2, 16)) > 0
    names = [op._schema.name for op, _, _ in ops.calls]
    ours = [name for name in names if name.startswith("rooftile::")]
    assert ours == ["rooftile::attention", "rooftile::attention_backward"]


def test_results_are_for_measurements(tmp_path, device):
    if device.type != "cpu":
        pytest.skip("on a GPU the command measures, for a minute")
    with pytest.raises(ValueError, match="the interpreter makes none"):
        host_ops.run(["softmax"], Console(file=io.StringIO()), tmp_path)
