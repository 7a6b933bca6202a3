"""`rooftile audit --trace FILE.nsys-rep`: what it asks of nsys, and what it says where that fails or is missing."""

import contextlib
import json
import pickle
import stat
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile import NGram, cli, runtime
from rooftile.bench.profile import ProfilerError
from rooftile.inspect import audit
from rooftile.inspect.audit import Audit, Settings, nsys
from rooftile.inspect.audit.profile import Part, captured

pytestmark = pytest.mark.nightly

SETTINGS = Settings("tiny", impl="serve", speculate=NGram(2), dtype=torch.float16)


def _nsys(folder: Path, code: int = 0, report: str | None = "a report") -> str:
    """A program in place of nsys: it keeps its arguments and the settings, writes that report, prints, and exits."""
    path = folder / "nsys"
    path.write_text(
        f"#!{sys.executable}\nimport json, pathlib, shutil, sys\n"
        f"pathlib.Path({str(folder / 'arguments')!r}).write_text(json.dumps(sys.argv[1:]))\n"
        f"shutil.copy(sys.argv[-1], {str(folder / 'settings')!r})\n"
        "stem = sys.argv[sys.argv.index('--output') + 1]\n"
        f"if {report!r}: pathlib.Path(stem + '.nsys-rep').write_text({report!r})\n"
        f"print('the last line')\nsys.exit({code})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _command(monkeypatch, path: Path, trace: Path, faults: str = ""):
    """The command as on a GPU, with that PATH and an audit that finds those faults."""
    audits = [Audit("engine", [], absent=faults)]
    monkeypatch.setattr(audit, "_audits", lambda s, measured: said.append(s.trace) or ("tiny", audits))
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PATH", str(path))
    said: list[Path | None] = []
    done = CliRunner().invoke(cli.app, ["audit", "--model", "tiny", "--trace", str(trace)], env={"COLUMNS": "400"})
    return done, said


def test_nsys_records_the_audited_phases_alone_of_what_was_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "new" / "a%q.nsys-rep"  # nsys would expand the %q
    nsys.record(_nsys(tmp_path), SETTINGS, trace)
    assert trace.read_text() == "a report"
    arguments = json.loads((tmp_path / "arguments").read_text())
    options = dict(zip(arguments[1:13:2], arguments[2:13:2], strict=True))
    assert arguments[0] == "profile"
    assert options.pop("--output").endswith("/trace")
    assert options == {
        "--trace": "cuda,nvtx", "--sample": "none", "--cuda-graph-trace": "node", "--capture-range": "cudaProfilerApi",
        "--capture-range-end": "stop",
    }  # fmt: skip
    assert arguments[13:-1] == [sys.executable, "-m", "rooftile.inspect.audit.nsys"]
    assert pickle.loads((tmp_path / "settings").read_bytes()) == SETTINGS


@pytest.mark.parametrize(("code", "report", "exits"), [(7, "a report", 7), (0, None, 2)])
def test_an_nsys_that_fails_or_writes_nothing_is_reported_and_an_older_report_is_kept(
    tmp_path: Path, code: int, report: str | None, exits: int
) -> None:
    trace = tmp_path / "t.nsys-rep"
    trace.write_text("older")
    with pytest.raises(ProfilerError, match=rf"nsys wrote no .*t.nsys-rep \(exit code {code}\):\nthe last line") as e:
        nsys.record(_nsys(tmp_path, code, report), SETTINGS, trace)
    assert e.value.code == exits
    assert trace.read_text() == "older"


@pytest.mark.parametrize(("faults", "exits"), [("", 0), ("a fault", 1)])
def test_the_audit_is_shown_and_decides_beside_a_report_of_nsys(monkeypatch, tmp_path: Path, faults, exits) -> None:
    _nsys(tmp_path)
    done, traces = _command(monkeypatch, tmp_path, tmp_path / "t.nsys-rep", faults)
    assert done.exit_code == exits, done.output
    assert traces == [None], "PyTorch's profiler writes no trace besides"
    assert "t.nsys-rep: written" in done.output
    assert pickle.loads((tmp_path / "settings").read_bytes()).model == "tiny"


def test_the_command_exits_with_the_code_of_nsys(monkeypatch, tmp_path: Path) -> None:
    _nsys(tmp_path, 7)
    done, _ = _command(monkeypatch, tmp_path, tmp_path / "t.nsys-rep")
    assert done.exit_code == 7
    assert "rooftile audit: nsys wrote no" in done.output


def test_without_nsys_nothing_is_audited_and_a_line_names_the_other_profiler(monkeypatch, tmp_path: Path) -> None:
    done, audited = _command(monkeypatch, tmp_path, tmp_path / "t.nsys-rep")
    assert (done.exit_code, audited) == (2, [])
    (line,) = done.output.strip().splitlines()
    assert line.startswith("rooftile audit: nsys is not on the PATH.")
    assert "FILE.json takes PyTorch's profiler" in line


def test_a_trace_with_another_suffix_needs_no_nsys(monkeypatch, tmp_path: Path) -> None:
    done, traces = _command(monkeypatch, tmp_path, tmp_path / "t.json")
    assert (done.exit_code, traces) == (0, [tmp_path / "t.json"])


def test_the_phases_are_captured_in_their_ranges_once_all_is_compiled(monkeypatch) -> None:
    said: list[str] = []

    @contextlib.contextmanager
    def marked(name: str):
        said.append(name)
        yield
        said.append("end")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", marked)
    captured(lambda: [Part(name, lambda name=name: said.append(name)) for name in ("a", "b")])  # type: ignore[misc]
    marks = ["rooftile.audit a", "a", "end", "rooftile.audit b", "b", "end"]
    assert said == ["a", "b", "a", "b", "start", *marks, "stop"]


@pytest.mark.parametrize(("asked", "ran"), [(None, "engine"), ("cuda", "cuda")])
def test_the_process_under_nsys_captures_one_implementation_and_audits_none(monkeypatch, asked, ran) -> None:
    built: list[str] = []
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(runtime, "default_device", lambda: torch.device("meta"))
    monkeypatch.setattr("rooftile.bench.e2e.model.load", lambda *_, **__: types.SimpleNamespace(title="tiny"))
    monkeypatch.setattr(audit, "_parts", lambda impl, model, s: impl)
    monkeypatch.setattr(audit, "captured", lambda build: built.append(build()))
    monkeypatch.setattr(audit, "profiled", None)
    audit.capture(Settings("tiny", impl=asked, trace=Path("t.nsys-rep")))
    assert built == [ran]
