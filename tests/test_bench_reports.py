"""Benchmarks: the table, the files, the tables of the documentation, and what only a GPU shows."""

import csv
import dataclasses
import io
import json
import math

import pytest
import torch
import typer
from rich.console import Console
from toys import CPU, SMALL, TableClock, bench, cells_of, double, explode, measured, toy
from typer.testing import CliRunner

from rooftile import runtime
from rooftile.bench import docs, report, rows, run, warm
from rooftile.bench.e2e import report as e2e_report
from rooftile.bench.e2e.report import E2ERow
from rooftile.bench.info import lines, machine
from rooftile.bench.rows import OURS, Row, compare
from rooftile.bench.timer import HostClock
from rooftile.bench.training import steps
from rooftile.cases import find_cases
from rooftile.cli import app

pytestmark = pytest.mark.nightly

# What is written


def test_results_are_one_file_per_op_over_all_sets_and_dtypes(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "machine", lambda: {**machine(), "gpu": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setenv("ROOFTILE_COMMIT", "abc123")
    wanted = {"results": tmp_path, "sets": ["tiny", "llm"], "dtypes": [torch.float32, torch.bfloat16]}
    bench(monkeypatch, (toy(), toy(name="again")), TableClock({}), **wanted, peers=["eager"], suite="some")
    folder = tmp_path / "h100" / "some"
    assert sorted(p.name for p in folder.iterdir()) == ["again.json", "double.json"]
    meta, found = rows.read_json(folder / "double.json")
    assert {r.op for r in found} == {"double"}
    assert {(r.shape, r.dtype) for r in found} == {(s, d) for s in ("4x8", "8x8") for d in ("fp32", "bf16")}
    assert (meta["commit"], meta["roof_copy_gbs"], meta["suite"]) == ("abc123", 1000.0, "some")


@pytest.fixture
def cut(monkeypatch, tmp_path):
    """A run of two points in two dtypes, cut at the third row of ours; and a function that goes on from there."""
    monkeypatch.setattr(run, "machine", lambda: {**machine(), "gpu": "NVIDIA H100 80GB HBM3"})
    monkeypatch.setenv("ROOFTILE_COMMIT", "abc123")
    wanted = {"results": tmp_path, "sets": ["tiny", "llm"], "dtypes": [torch.float32, torch.bfloat16]}
    case, measure, seen = toy(double, ("other", double)), run.Bench.measure_point, []

    def measure_point(self, case, point, dtype, direction):
        if cut and len(seen) == 2:
            raise KeyboardInterrupt
        seen.append((point.label, dtype))
        return measure(self, case, point, dtype, direction)

    monkeypatch.setattr(run.Bench, "measure_point", measure_point)
    cut = True
    with pytest.raises(KeyboardInterrupt):
        bench(monkeypatch, case, TableClock({}), **wanted, peers=["eager"])
    cut = False

    def resume(peers=("eager",)):
        seen.clear()
        code, found, _ = bench(monkeypatch, case, TableClock({}), **wanted, peers=peers, resume=True)
        return code, found, list(seen)

    resume.file = tmp_path / "h100" / "rowwise" / "double.json"
    return resume


def test_a_run_that_was_cut_goes_on_where_it_stood(cut):
    code, found, seen = cut()
    assert code == 0
    assert seen == [("8x8", torch.float32), ("8x8", torch.bfloat16)]
    expected = [(shape, dtype) for shape in ("4x8", "8x8") for dtype in ("fp32", "bf16")]
    assert [(r.shape, r.dtype) for r in found if r.impl == OURS] == expected
    assert [(r.shape, r.dtype) for r in rows.read_json(cut.file)[1] if r.impl == OURS] == expected
    assert cut()[2] == [], "all of them are there"


def test_rows_of_another_commit_are_not_kept(cut, monkeypatch):
    monkeypatch.setenv("ROOFTILE_COMMIT", "abc124")
    assert len(cut()[2]) == 4


def test_points_without_a_baseline_that_is_asked_for_are_measured_again(cut):
    assert len(cut(peers=["eager", "other"])[2]) == 4
    assert cut()[2] == []


def test_points_at_which_ours_failed_are_measured_again(cut, monkeypatch):
    with monkeypatch.context() as wrong:
        wrong.setattr(run, "judge", lambda variant, known: run.Verdict("FAIL" if variant.name == OURS else "ok"))
        assert cut()[0] == 1
    code, _, seen = cut()
    assert (code, len(seen)) == (0, 2)


def test_resuming_needs_results(monkeypatch):
    with pytest.raises(ValueError, match="no --results is given"):
        bench(monkeypatch, toy(), TableClock({}), resume=True)


def test_the_json_holds_every_key_and_no_nan(tmp_path):
    meta = {**machine(), "roof_copy_gbs": 3018.123456, "roof_read_gbs": math.nan, "roof_tflops": None}
    path = tmp_path / "deep" / "x.json"
    rows.write_json(path, meta, [measured(OURS, 1.23456789, max_error=math.nan)])
    data = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert set(rows.META) <= set(data["meta"])
    assert set(rows.REQUIRED) <= set(data["rows"][0])
    assert (data["rows"][0]["us"], data["rows"][0]["max_error"]) == (1.2346, None)
    assert (data["meta"]["roof_copy_gbs"], data["meta"]["roof_read_gbs"]) == (3018.1, None)
    path.write_text(json.dumps({"meta": {}, "rows": []}))
    with pytest.raises(ValueError, match="no gpu, driver"):
        rows.read_json(path)


def test_options_are_read_by_their_present_names(tmp_path):
    rows.write_json(
        tmp_path / "old.json", dict.fromkeys(rows.META, ""), [measured(OURS, 1.0, options={"approximate": "tanh"})]
    )
    _, (row,) = rows.read_json(tmp_path / "old.json")
    assert row.options == {"activation": "gelu_tanh"}
    decoded = dataclasses.replace(measured(OURS, 1.0, options={"layout": "bhtd"}), op="decode_attention")
    rows.write_json(tmp_path / "old.json", dict.fromkeys(rows.META, ""), [decoded])
    _, (row,) = rows.read_json(tmp_path / "old.json")
    assert row.options == {"cache_layout": "bhtd"}


@pytest.mark.parametrize(("old", "present"), [("product", "gemm"), ("product fp8", "gemm fp8"), ("copy", "copy")])
def test_roofs_are_read_by_their_present_names(old, present, tmp_path):
    row = dataclasses.replace(measured(OURS, 1.0), roof=old)
    rows.write_json(tmp_path / "old.json", dict.fromkeys(rows.META, ""), [row])
    _, (row,) = rows.read_json(tmp_path / "old.json")
    assert row.roof == present


def test_results_are_not_taken_from_the_interpreter(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--results is for measurements"):
        bench(monkeypatch, toy(), HostClock(), results=tmp_path)


def test_the_table_shows_every_implementation_and_why_one_was_not_timed():
    found = [
        measured(OURS, 10.0, gbs=100.0, ratio_to_best_peer=0.9),
        Row("op", "forward", "4x8", "bf16", "quack", status="absent", message="not installed [here]"),
    ]
    console = Console(file=io.StringIO(), width=200)
    report.show(console, found, measured=True)
    shown = console.file.getvalue()
    assert "absent: quack: not installed [here]" in shown
    assert "geometric mean 0.900, least 0.900" in shown
    assert report.NO_MEASUREMENT not in shown


@pytest.mark.parametrize("show", [report.show, steps.show, e2e_report.show])
def test_a_column_of_dashes_is_left_out(show):
    names = {"of roof", "of the GEMM roof", "over Liger", "GB/s", "vs best", "ratio"}
    figures = {"gbs": 100.0, "roof_fraction": 0.5, "ratio_to_best_peer": 0.9}
    for found, some in (({}, False), (figures, True)):
        rows = [E2ERow(steps.STEP, "step", "4x8", "bf16", OURS, us=1.0, us_p20=1.0, us_p80=1.0, max_error=0.0, **found)]
        console = Console(file=io.StringIO(), width=200)
        show(console, rows, True)
        heads = {head.strip() for head in console.file.getvalue().splitlines()[2].split("┃")}
        assert bool(heads & names) == some
        assert heads & {"impl", "implementation"}
        assert heads & {"max error", "losses within"}


@pytest.mark.skipif(runtime.MODE is not runtime.Mode.INTERPRETER, reason="shows what the interpreter says of itself")
def test_the_command_in_the_interpreter_writes_all_and_calls_it_no_measurement(tmp_path):
    files = [tmp_path / name for name in ("x.csv", "x.json", "plots")]
    options = [o for pair in zip(("--csv", "--json", "--plot"), map(str, files), strict=True) for o in pair]
    done = CliRunner().invoke(app, ["bench", "silu_mul", "--dtype", "fp32", *options])
    assert done.exit_code == 0, done.output
    assert report.NO_MEASUREMENT in done.output
    written = list(csv.DictReader(files[0].open()))
    data = json.loads(files[1].read_text())
    assert len(written) == len(data["rows"]) > 0
    assert data["meta"]["note"] == report.NO_MEASUREMENT
    assert {r["direction"] for r in data["rows"]} == {"forward", "backward"}
    timed = [r for r in data["rows"] if r["status"] == "ok"]
    assert {r["impl"] for r in timed} == {OURS, "eager"}
    assert all(r["us"] > 0 and r["samples"] <= 2 and r["gbs"] is None for r in timed)
    assert sorted(p.name for p in files[2].iterdir()) == ["silu_mul-backward.png", "silu_mul-forward.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in files[2].iterdir())


def test_the_command_refuses_unknown_names():
    for arguments in (["nothing"], ["silu_mul", "--peers", "nobody"], ["silu_mul", "--set", "none"]):
        assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2


def test_plots_are_made_of_rows_with_gaps(tmp_path):
    gap = Row("op", "forward", "8x8", "bf16", OURS, status="FAIL")
    other = dataclasses.replace(measured("eager", 2.0, gbs=5.0, roof_gbs=9.0), shape="8x8")
    made = report.plot(tmp_path, [measured(OURS, 1.0, gbs=10.0, roof_gbs=12.0), gap, other], "a GPU", True)
    assert [p.name for p in made] == ["op-forward.png"]


def test_time_and_memory_are_charted_over_a_dimension(tmp_path):
    def at(n, impl, us, **more):
        row = measured(impl, us, peak_bytes=n << 20)
        return dataclasses.replace(row, shape=f"T{n}", dims={"batch": 1, "seq_len": n}, **more)

    rows = [at(n, impl, n * us) for n in (8, 16, 32) for impl, us in ((OURS, 1.0), ("naive", 4.0))]
    two = [at(n, OURS, 1.0, direction="backward") for n in (8, 16)]  # no chart of two sizes
    failed = [dataclasses.replace(at(64, "naive", 1.0), us=None, status="unsupported")]
    made = report.plot_over(tmp_path / "new", rows + two + failed, "seq_len", "a GPU")
    assert [p.name for p in made] == [f"{rows[0].op}-forward-{rows[0].dtype}-batch1.png"]
    assert made[0].stat().st_size > 0
    causal = [dataclasses.replace(row, options={"causal": True}) for row in rows]
    assert len(set(report.plot_over(tmp_path / "both", rows + causal, "seq_len", "a GPU"))) == 2


# Around it


def test_compiling_ahead_survives_an_implementation_that_raises(monkeypatch):
    ran = []
    case = toy(lambda x: ran.append("ours") or x * 2, ("liger", explode))
    monkeypatch.setattr("rooftile.cases.find_cases", lambda names: [case])
    monkeypatch.setattr(runtime, "default_device", lambda: CPU)
    warm.compile_task(warm.Task("double", SMALL, torch.float32, "backward", ("liger",)))
    assert ran == ["ours"]


def test_info_says_what_there_is():
    shown = dict(lines(roofs=False))
    assert {"gpu", "mode", "rooftile", "torch", "triton", "peer liger", "peer quack", "roofs"} <= set(shown)
    assert "not measured" in shown["roofs"]
    done = CliRunner().invoke(app, ["info", "--no-roofs"])
    assert done.exit_code == 0
    assert torch.__version__ in done.output
    if not torch.accelerator.is_available():
        assert shown["gpu"] == "none"


# On a GPU


@pytest.mark.gpu
def test_on_a_gpu_every_row_is_timed_by_graph_replay_and_below_the_roof(tmp_path):
    path = tmp_path / "x.json"
    options = ["--set", "prefill", "--peers", "eager", "--peers", "torch", "--json", str(path), "--seconds", "0.01"]
    done = CliRunner().invoke(app, ["bench", "rms_norm", "silu_mul", *options])
    assert done.exit_code == 0, done.output
    meta, found = rows.read_json(path)
    timed = [r for r in found if r.status == "ok"]
    assert {r.method for r in timed} == {"graph"}
    # A copy is no bound to the digit: three tensors stream a little faster than two. A tenth over it would mean that
    # the cache served a row, or that the copy was a slow one.
    assert all(0 < r.roof_fraction < 1.1 for r in timed if r.nbytes > 64 << 20)
    assert all(r.us_p20 <= r.us <= r.us_p80 and r.host_us > 0 and r.peak_bytes > 0 for r in timed)
    assert meta["roof_read_gbs"] > 0.9 * meta["roof_copy_gbs"] > 0
    assert meta["roof_tflops"] > 0
    assert all(h["op_grad_us"] >= h["launcher_us"] > 0 for h in meta["host"].values())
    assert all(ms > 0 for by_direction in meta["first_call_ms"].values() for ms in by_direction.values())


# The tables of the documentation


def write_results(folder, found, **meta):
    roofs = {"roof_copy_gbs": 3018.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0}
    made = {**machine(), **roofs, "gpu": "NVIDIA H100 80GB HBM3", "driver": "1.2", **meta}
    rows.write_json(folder / "h100" / "rowwise" / "op.json", made, found)


def group(us, peers, **fields):
    """Ours and its peers at one point, compared."""
    place = {k: v for k, v in fields.items() if k in ("shape", "dtype", "direction")}
    made = [measured(OURS, us, **fields), *(measured(n, peer_us, **place) for n, peer_us in peers.items())]
    compare(made)
    return made


def regenerated(names, folder):
    return docs.regenerate("".join(f"<!-- rooftile:table {n} -->\n<!-- /rooftile:table -->\n" for n in names), folder)


def test_tables_are_made_from_results_and_keep_the_rows_that_lose(tmp_path):
    found = group(10.0, {"eager": 16.0, "liger": 8.0}, gbs=100.0, roof_fraction=0.5)
    found += [
        Row("op", "forward", "9x9", "bf16", OURS, status="FAIL"),
        Row("op", "forward", "9x9", "bf16", "liger", status="error"),
    ]
    write_results(tmp_path, found)
    text = "before\n<!-- rooftile:table rowwise-forward -->\nold\n<!-- /rooftile:table -->\nafter\n"
    made = docs.regenerate(text, tmp_path)
    assert made.startswith("before\n")
    assert made.endswith("after\n")
    assert "old" not in made
    assert cells_of(made, "4x8") == [["4x8", "10.00", "100.0", "0.500", "1.60", "0.800", "liger", "16.00", "8.000"]]
    assert cells_of(made, "9x9") == [["9x9", "FAIL", "–", "–", "–", "–", "–", "–", "error"]]
    assert (
        "`op` forward, speedup over the best baseline (above 1 is faster), 1 row: geometric mean 0.800, least 0.800"
        in made
    )
    assert "**NVIDIA H100 80GB HBM3**" in made
    assert docs.regenerate(made, tmp_path) == made
    assert docs.NO_RESULTS in regenerated(["rowwise-backward"], tmp_path)


def test_dtypes_other_than_bf16_are_folded_and_counted(tmp_path):
    found = group(10.0, {"liger": 9.0}, dtype="fp16") + group(10.0, {"liger": 16.0})
    write_results(tmp_path, found)
    made = regenerated(["rowwise-forward"], tmp_path)
    unfolded, folded = made.split("<details")
    assert cells_of(unfolded, "4x8")[0][5] == "1.600"
    assert cells_of(folded, "4x8")[0][5] == "0.900"
    assert "<summary>fp16: 1 row: geometric mean 0.900, least 0.900 (4x8, fp16)</summary>\n\n|" in folded
    assert "2 rows: geometric mean 1.200, least 0.900 (4x8, fp16)" in folded


def test_the_summary_has_a_line_for_each_op_and_direction(tmp_path):
    large = {"nbytes": 128 << 20}
    found = [
        *group(10.0, {"liger": 16.0}, roof_fraction=0.95, **large),
        *group(10.0, {"liger": 9.0}, shape="6x8", roof_fraction=0.9, **large),
        *group(10.0, {"liger": 9.8}, shape="8x8", dtype="fp16", roof_fraction=0.1, nbytes=127 << 20),
        *group(10.0, {}, direction="backward"),
    ]
    write_results(tmp_path, found)
    forward, backward = cells_of(regenerated(["summary"], tmp_path), "`op`")
    mean = f"{(1.6 * 0.9 * 0.98) ** (1 / 3):.3f}"
    assert forward == ["`op`", "forward", "bf16, fp16", "3", mean, "0.900 (6x8, bf16)", "2 of 3", "0.925 (2)"]
    assert backward == ["`op`", "backward", "bf16", "1", "–", "–", "–", "–"]


def test_each_run_that_a_table_comes_from_is_named(tmp_path):
    for commit in ("a" * 40, "b" * 40):
        write_results(tmp_path, group(1.0, {"liger": 1.0}), commit=commit)
        (tmp_path / "h100" / "rowwise" / "op.json").rename(tmp_path / "h100" / "rowwise" / f"{commit[0]}.json")
    made = regenerated(["rowwise-forward"], tmp_path)
    assert (made.count("aaaaaaaaaa"), made.count("bbbbbbbbbb")) == (1, 1)


def test_the_hosts_time_and_the_first_call_are_shown():
    host = {"op": {"shape": "4x8", "dtype": "bf16", "launcher_us": 5.0, "op_us": 9.0, "op_grad_us": 16.0}}
    console = Console(file=io.StringIO())
    report.show_host(console, host, {"op": {"forward": 321.0, "backward": 654.0}})
    shown = console.file.getvalue()
    assert all(figure in shown for figure in ("4x8", "bf16", "5.0", "9.0", "4.0", "16.0", "11.0", "321", "654"))


def test_the_hosts_time_beside_the_baselines_has_a_table(tmp_path):
    write_results(tmp_path, [])
    (path,) = tmp_path.glob("*/*/*.json")
    meta = json.loads(path.read_text())["meta"]
    rows = [
        {"op": "op", "shape": "4x8", "direction": "forward", "baseline": "F.op", "us": us, "baseline_us": 10.0}
        for us in (15.0, 30.0)
    ]
    (tmp_path / "h100" / "host").mkdir(parents=True)
    text = json.dumps({"meta": meta, "rows": [{**row, "limit_us": 18.0} for row in rows]})
    (tmp_path / "h100" / "host" / "host.json").write_text(text)
    within, over = cells_of(regenerated(["host"], tmp_path), "`op`")
    assert within == ["`op`", "4x8", "forward", "15.0", "F.op", "10.0", "1.50", "18.0", ""]
    assert over[3:] == ["30.0", "F.op", "10.0", "3.00", "18.0", "over"]
    meta["first_calls"] = [
        {"call": "op forward", "cache": cache, "seconds": 2.5, "limit_s": limit}
        for cache, limit in (("empty", 10.0), ("filled", 2.0))
    ]
    (tmp_path / "h100" / "host" / "host.json").write_text(json.dumps({"meta": meta, "rows": []}))
    empty, filled = cells_of(regenerated(["host"], tmp_path), "op forward")
    assert empty == ["op forward", "empty", "2.50", "10.0", ""]
    assert filled == ["op forward", "filled", "2.50", "2.00", "over"]


@pytest.mark.parametrize("name", list(docs.TABLES))
def test_every_table_can_be_made_before_anything_is_measured(name, tmp_path):
    text = f"<!-- rooftile:table {name} -->\n<!-- /rooftile:table -->\n"
    made = docs.regenerate(text, tmp_path)
    assert docs.NO_RESULTS in made or "| --- |" in made


def test_the_tables_of_ops_and_tolerances_name_every_case(tmp_path):
    for case in find_cases():
        assert f"`{case.name}`" in docs.ops(tmp_path)
        assert f"`{case.name}`" in docs.tolerances(tmp_path)


@pytest.mark.parametrize(
    "text", ["<!-- rooftile:table none -->\n<!-- /rooftile:table -->", "<!-- rooftile:table ops -->\n"]
)
def test_a_wrong_marker_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=r"unknown table|expected each between"):
        docs.regenerate(text, tmp_path)


def test_a_stale_file_is_told_and_left_alone_by_check(tmp_path):
    path = tmp_path / "x.md"
    stale = "<!-- rooftile:table ops -->\n<!-- /rooftile:table -->\n"
    path.write_text(stale)
    with pytest.raises(typer.Exit) as stopped:
        docs.main([path], results=tmp_path, check=True)
    assert stopped.value.exit_code == 1
    assert path.read_text() == stale
    docs.main([path], results=tmp_path)
    assert path.read_text() != stale
    docs.main([path], results=tmp_path, check=True)


def test_the_documentation_is_fresh(pytestconfig):
    root = pytestconfig.rootpath
    files = [p for p in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if p.exists()]
    texts = {str(p.relative_to(root)): p.read_text("utf-8") for p in files}
    stale = [name for name, text in texts.items() if docs.differ(text, docs.regenerate(text, root / "results"))]
    assert not stale, "run make docs"
