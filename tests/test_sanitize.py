"""`rooftile sanitize`: what it asks of compute-sanitizer, and how it reads the answer."""

import io
import json
import re
import stat
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile import cli, runtime
from rooftile.bench import sanitize
from rooftile.bench.docs.sanitizer import table

pytestmark = pytest.mark.nightly


def _sanitizer(folder: Path, output: str = "", code: int = 0, seconds: float = 0.0) -> str:
    """A program in place of compute-sanitizer: it writes down its arguments, waits, prints, and exits."""
    path = folder / "compute-sanitizer"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, pathlib, sys, time\n"
        f"asked = [sys.argv[1:], os.environ.get('PYTORCH_NO_CUDA_MEMORY_CACHING')]\n"
        f"pathlib.Path({str(folder / 'asked')!r}).write_text(json.dumps(asked))\n"
        f"time.sleep({seconds})\nprint({output!r})\nsys.exit({code})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_checks_of_one_op_run_with_an_allocation_for_each_tensor(tmp_path: Path) -> None:
    found = sanitize.run_one(_sanitizer(tmp_path), "memcheck", "rms_norm", ("tiny", "edge"), 60)
    assert found.status == "ok"
    arguments, no_caching = json.loads((tmp_path / "asked").read_text())
    assert arguments[arguments.index("--tool") + 1] == "memcheck"
    assert arguments[-8:] == ["check", "rms_norm", "--dtype", "bf16", "--set", "tiny", "--set", "edge"]
    assert no_caching == "1"


@pytest.mark.parametrize(
    ("output", "code", "status", "message"),
    [
        ("========= Invalid __global__ read of size 4 bytes\n", sanitize.FOUND, "errors", "Invalid __global__ read of"),
        ("========= Error: Race reported between Write access", sanitize.FOUND, "errors", "Error: Race reported"),
        ("========= Device not supported", 1, "failed", "exit code 1: Device not supported"),
    ],
)  # fmt: skip
def test_an_error_is_told_from_a_tool_that_fails(tmp_path: Path, output, code, status, message) -> None:
    found = sanitize.run_one(_sanitizer(tmp_path, output, code), "memcheck", "rms_norm", ("tiny",), 60)
    assert found.status == status
    assert found.message.startswith(message)


def test_an_op_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    found = sanitize.run_one(_sanitizer(tmp_path, seconds=30), "racecheck", "rms_norm", ("tiny",), 0.5)
    assert (found.status, found.seconds) == ("timeout", 0.5)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (sanitize.FOUND, 1), (3, 1)])
def test_what_a_tool_finds_and_a_tool_that_never_runs_make_the_command_fail(
    tmp_path: Path, monkeypatch, code, expected
) -> None:
    _sanitizer(tmp_path, "========= Invalid read", code)
    monkeypatch.setenv("PATH", str(tmp_path))
    console = Console(file=io.StringIO(), width=120)
    results = tmp_path / "results"
    assert sanitize.run(["rope", "rms_norm"], ("synccheck",), ("tiny",), console, results=results, jobs=2) == expected
    rows = json.loads(next(results.glob("*/sanitizer/checks.json")).read_text())["rows"]
    assert [(r["op"], r["tool"]) for r in rows] == [("rms_norm", "synccheck"), ("rope", "synccheck")]
    shown = re.sub(" +", " ", table(results))
    assert f"| synccheck | 2 | {2 * (code == 0)} | {2 * (code == sanitize.FOUND)} | {2 * (code == 3)} | 0 |" in shown
    assert ("| `rope` | synccheck |" in shown) == bool(code)
    assert f"{0 if code else 2}/2 ok" in console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_not_known_is_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="unknown tool leakcheck; known tools: memcheck"):
        sanitize.run(None, ("leakcheck",), ("tiny",), Console(quiet=True))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="compute-sanitizer is not on the PATH"):
        sanitize.run(["rms_norm"], (), ("tiny",), Console(quiet=True))


@pytest.mark.skipif(runtime.MODE is runtime.Mode.GPU, reason="says what is needed where there is no GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    done = CliRunner().invoke(cli.app, ["sanitize"])
    assert done.exit_code == 2
    assert "needs a GPU" in done.output


def test_a_run_of_other_ops_adds_to_the_file(tmp_path: Path, monkeypatch) -> None:
    _sanitizer(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROOFTILE_COMMIT", "abc")
    for op in ("rope", "rms_norm"):
        sanitize.run([op], ("memcheck",), ("tiny",), Console(quiet=True), results=tmp_path / "results")
    rows = json.loads(next(tmp_path.glob("results/*/sanitizer/checks.json")).read_text())["rows"]
    assert [r["op"] for r in rows] == ["rms_norm", "rope"]
