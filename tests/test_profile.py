"""`rooftile profile`: the shape it takes, what it asks of ncu, and what it reads from ncu's table."""

import io
import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile import cli, runtime
from rooftile.bench import profile
from rooftile.bench.docs import passes
from rooftile.bench.profile import METRICS, Profile, ProfilerError, Task
from rooftile.cases import all_cases, find_cases

pytestmark = pytest.mark.nightly

(CASE,) = find_cases(["rms_norm"])
POINT = CASE.sets["tiny"][0]
STALLS = ("long_scoreboard", "barrier", "wait", "membar", "selected")
# As ncu writes a raw page: its own lines, the program's, names, units (which it chooses by size), a line a kernel.
NAMES = ["ID", "Kernel Name", *METRICS.values(), *(f"{profile._STALL}{s}{profile._PER_ISSUE}" for s in STALLS)]
UNITS = ["", "", "usecond", "%", "%", "Mbyte", "Kbyte", "%", "%", "register/thread", "", "", *["inst"] * 5]
FIGURES = ["1,250.5", "91.5", "88", "1.5", "2,000", "33.1", "n/a", "40", "128", "256", "12.5", "3", "n/a", "0", "1"]
ROW = ["0", "_rms_norm(x)", *FIGURES]
TABLE = "\n".join(",".join(f'"{cell}"' for cell in line) for line in (NAMES, UNITS, ROW))
OUTPUT = f"==PROF== Connected to process 7\nsomething the program printed\n{TABLE}\n"


def test_counters_are_read_in_microseconds_and_bytes() -> None:
    (found,) = profile.parse(OUTPUT)
    assert found.kernel == "_rms_norm(x)"
    assert (found.counters["us"], found.counters["read"], found.counters["written"]) == (1250.5, 1.5e6, 2e6)
    assert "tensor" not in found.counters  # this GPU has no such counter
    assert found.stalls == {"long_scoreboard": 12.5, "barrier": 3.0}  # a warp that is selected issues


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table of counters"):
        profile.parse("==ERROR== something\n")


def test_a_shape_is_a_points_name_or_a_part_and_another_is_refused_with_the_known() -> None:
    point = profile.find_point(CASE, "16384x4096")
    assert str(point) == "16384x4096"
    assert profile.find_point(CASE, None) == CASE.sets["llm"][0]
    with pytest.raises(ValueError, match=r"no shape '3x3'; known shapes: .*16384x4096"):
        profile.find_point(CASE, "3x3")


@pytest.mark.parametrize("case", all_cases().values(), ids=lambda case: case.name)
def test_each_point_of_each_set_has_a_name_that_finds_it(case) -> None:
    for point in {str(p): p for points in case.sets.values() for p in points}.values():
        assert str(profile.find_point(case, str(point))) == str(point)


def test_a_part_that_several_shapes_have_is_refused_with_them() -> None:
    (linear,) = find_cases(["linear"])
    with pytest.raises(ValueError, match=r"several shapes '2048x4096'.*2048x4096->4096, 2048x4096->14336.*one of them"):
        profile.find_point(linear, "2048x4096")


def _ncu(folder: Path, output: str, code: int = 0) -> str:
    """A program in place of ncu: it writes down its arguments, prints, and exits."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\n"
        f"pathlib.Path({str(folder / 'arguments')!r}).write_text(json.dumps(sys.argv[1:]))\n"
        f"print({output!r})\nsys.exit({code})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_ncu_is_asked_for_the_kernels_of_one_call_of_that_op(tmp_path: Path) -> None:
    task = Task("rms_norm", POINT, "bf16", "backward")
    assert profile.profile(task, _ncu(tmp_path, OUTPUT)) == profile.parse(OUTPUT)
    arguments = json.loads((tmp_path / "arguments").read_text())
    assert arguments[arguments.index("--nvtx-include") + 1] == profile.RANGE
    assert arguments[arguments.index("--clock-control") + 1] == "none"
    assert Task.from_json(arguments[-1]) == task


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - the user lacks permission", 1, "may not read the GPU's counters"),
        ("==ERROR== the program exited", 9, "exit code 9"),
        ("==PROF== no kernels were profiled", 0, "gave no counters"),
    ],
)
def test_a_profiler_that_fails_is_reported(tmp_path: Path, output: str, code: int, message: str) -> None:
    with pytest.raises(ProfilerError, match=message):
        profile.profile(Task("rms_norm", POINT, "bf16", "forward"), _ncu(tmp_path, output, code))


def test_without_ncu_the_message_says_what_else_there_is(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ProfilerError, match=r"ncu is not on the PATH.*rooftile bench"):
        profile.profile(Task("rms_norm", POINT, "bf16", "forward"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_call_runs_twice_and_the_second_is_marked(direction) -> None:
    said = []

    class Around:
        def __enter__(self):
            said.append("in")

        def __exit__(self, *error):
            said.append("out")

    profile.run_call(Task("rms_norm", POINT, "fp32", direction), Around, runtime.default_device())
    assert said == ["in", "out"]


def test_the_table_sets_the_bytes_beside_the_least() -> None:
    least = CASE.nbytes(POINT, 2, "forward")
    found = Profile("_rms_norm", {"us": 10.0, "read": 1.0 * least, "written": 0.5 * least}, {"wait": 2.0})
    console = Console(file=io.StringIO(), width=120)
    profile.show(CASE, Task("rms_norm", POINT, "bf16", "forward"), [found], console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1.50 times as much" in shown
    assert "wait 2.00" in shown


def test_the_bytes_are_written_for_the_table_of_memory_passes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(profile, "machine", lambda: {"gpu": "NVIDIA H100 80GB HBM3"})
    found = [Profile("_rms_norm", {"us": 5.0, "read": 2e6, "written": 1e6}, {})] * 2
    path = profile.write(tmp_path, Task("rms_norm", POINT, "bf16", "forward"), found)
    assert path == tmp_path / "h100" / "profile" / "rms_norm-forward-bf16.json"
    assert passes.measured(tmp_path) == {("rms_norm", "forward", str(POINT), "bf16"): "6.00 (H100)"}


@pytest.mark.skipif(runtime.MODE is runtime.Mode.GPU, reason="says what is needed where there is no GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    done = CliRunner().invoke(cli.app, ["profile", "rms_norm"])
    assert done.exit_code == 2
    assert "needs a GPU" in done.output


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments", [["rms_norm"], ["rms_norm", "--backward"], ["linear", "--shape", "2048x4096->4096"]]
)
def test_on_a_gpu_the_counters_are_plausible(arguments) -> None:
    """DRAM traffic of a memory-bound op is at least a half of what it must move."""
    op, backward = arguments[0], "--backward" in arguments
    (case,) = find_cases([op])
    shape = arguments[arguments.index("--shape") + 1] if "--shape" in arguments else None
    task = Task(op, profile.find_point(case, shape), "bf16", "backward" if backward else "forward")
    try:
        found = profile.profile(task)
    except ProfilerError as error:
        pytest.skip(str(error))
    moved = sum(p.counters["read"] + p.counters["written"] for p in found)
    least = case.nbytes(task.point, torch.bfloat16.itemsize, task.direction)
    assert all(p.counters["us"] > 0 and p.stalls for p in found)
    assert 0.5 * least < moved < 20 * least
