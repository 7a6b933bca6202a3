"""The README's figures are those of results/, and a ratio is of one run."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.bench import charts
from rooftile.bench.docs import headline
from rooftile.bench.docs.tables import NO_RESULTS, TIE
from rooftile.bench.rows import Row, compare, write_json
from rooftile.bench.training.steps import STEP

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
META = {
    "gpu": "NVIDIA H100 80GB HBM3", "driver": "1", "torch": "2.11", "triton": "3.6", "rooftile": "0.1", "commit": "abc",
    "date": "2026-01-01T00:00:00Z", "roof_copy_gbs": 3000.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0,
}  # fmt: skip


def _rows(op: str, direction: str, shape: str = "4x8", **us: float) -> list[Row]:
    rows = [Row(op, direction, shape, "bf16", impl.replace("_", " "), us=value) for impl, value in us.items()]
    compare(rows)
    return rows


def test_a_model_has_the_tokens_per_second_and_the_memory_of_its_row(tmp_path: Path) -> None:
    rows = _rows(STEP, "step", eager=400.0, liger=200.0, rooftile=100.0)
    for row in rows:
        row.tokens_per_s, row.peak_bytes, row.dims = 1e6 / (row.us or 1), 3 << 30, {"batch": 1, "tokens": 1}
    rows[0].status = "error"
    write_json(tmp_path / "h100" / "training" / f"{STEP}-{headline.TRAINED}.json", META, rows)
    liger, ours = headline.figures(tmp_path)
    assert (liger.tokens_per_s, liger.speedup, ours.tokens_per_s, ours.speedup) == (5000.0, None, 10_000.0, 2.0)
    assert "| 2.00 × Liger |" in re.sub(" +", " ", headline.table(tmp_path))
    assert "3.00 GiB" in headline.table(tmp_path)


def test_a_speedup_is_over_the_fastest_baseline(tmp_path: Path) -> None:
    rows = _rows(STEP, "step", eager=200.0, liger=400.0, rooftile=125.0, rooftile_lora=100.0)
    for row in rows:
        row.tokens_per_s, row.dims = 1e6 / (row.us or 1), {"batch": 1, "tokens": 1}
    write_json(tmp_path / "h100" / "training" / f"{STEP}-gemma-3-1b.json", META, rows)
    (ours,) = headline.figures(tmp_path)  # of a model beside the first, the fastest
    assert (ours.impl, ours.speedup, ours.baseline) == ("rooftile lora", 2.0, "eager")
    assert "| **Rooftile**, `lora=True` | 10000 | 2.00 × Hugging Face |" in re.sub(" +", " ", headline.table(tmp_path))


def test_a_row_of_quantized_weights_names_a_baseline_without() -> None:
    found = headline.generation(RESULTS)
    shown = {f.weights: headline._cells(f)[3] for f in found if f.speedup is not None}
    assert re.fullmatch(r"[\d.]+ × PyTorch", shown["bf16"])
    assert re.fullmatch(r"[\d.]+ × PyTorch in bf16", shown["fp8"])
    assert headline.NOTE in headline.table(RESULTS)


def test_every_op_that_loses_is_shown(tmp_path: Path) -> None:
    rows = [
        *_rows("rope", "forward", rooftile=1.0, compile=TIE - 0.01),
        *_rows("softmax", "forward", rooftile=1.0, compile=TIE),
        *_rows("rms_norm", "forward", rooftile=1.0, compile=2.0),
        # Two of three points lose, which the mean does not show.
        *(row for n in (4, 8) for row in _rows("silu_mul", "forward", f"{n}x8", rooftile=1.0, compile=TIE - 0.01)),
        *_rows("silu_mul", "forward", "16x8", rooftile=1.0, compile=20.0),
    ]
    write_json(tmp_path / "h100" / "rowwise" / "norms.json", META, rows)
    shown = re.findall(r"^\| `(\w+)`", headline.ops(tmp_path), re.MULTILINE)
    assert shown == ["rms_norm", "rope", "silu_mul"]  # what is asked for or loses, the best first


def test_points_with_eager_alone_do_not_make_the_mean_of_others(tmp_path: Path) -> None:
    def shown(*rows: Row) -> tuple[str, str, str]:
        """The points, the mean and the baselines."""
        write_json(tmp_path / "h100" / "rowwise" / "norms.json", META, rows)
        (line,) = (x for x in headline.ops(tmp_path).splitlines() if x.startswith("| `decode_attention`"))
        cells = [cell.strip() for cell in line.split("|")]
        return cells[3], cells[5], cells[7]

    alone = [
        *_rows("decode_attention", "forward", "2x8", rooftile=1.0, eager=800.0),
        dataclasses.replace(_rows("decode_attention", "forward", "2x8", fa4=1.0)[0], status="unsupported", us=None),
    ]
    beside = _rows("decode_attention", "forward", "1x8", rooftile=1.0, eager=3.0, cudnn=1.1)
    lost = _rows("decode_attention", "forward", "4x8", rooftile=1.0, eager=0.5)
    assert shown(*alone) == ("1", "800.00", "eager")
    assert shown(*alone, *beside) == ("1", "1.10", "cudnn")
    assert shown(*alone, *beside, *lost)[:2] == ("2", "0.74")


def test_an_op_of_several_gpus_is_shown_where_it_was_measured_last(tmp_path: Path) -> None:
    for gpu, date, us in (("H100", "2026-11-24", 2.0), ("H200", "2026-11-23", 3.0)):
        meta = {**META, "gpu": f"NVIDIA {gpu}", "date": date}
        write_json(
            tmp_path / gpu.lower() / "rowwise" / "rms_norm.json",
            meta,
            _rows("rms_norm", "forward", rooftile=1.0, quack=us),
        )
    (line,) = (line for line in headline.ops(tmp_path).splitlines() if "`rms_norm`" in line and line.startswith("|"))
    assert [cell.strip() for cell in line.strip("|").split("|")][3:] == ["2.00", "2.00", "2.00: 4x8", "quack", "H100"]


def test_an_op_names_the_commits_that_were_measured_and_their_ages(tmp_path: Path) -> None:
    rows = {d: _rows("rms_norm", d, rooftile=1.0, quack=2.0) for d in ("forward", "backward")}
    for i, (direction, own) in enumerate(rows.items()):
        write_json(tmp_path / "h100" / "rowwise" / f"{direction}.json", {**META, "commit": f"{i}" * 40}, own)
    (line,) = (line for line in headline.ops(tmp_path).splitlines() if line.startswith("**NVIDIA H100"))
    for i in range(2):
        assert f"`rms_norm`: commit `{i * 1111111111:010d}`, 2026-01-01." in line


def test_every_baseline_of_the_ops_is_explained() -> None:
    text = headline.ops(RESULTS)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| `" in line]
    names = {name for cells in lines for name in cells[6].split(", ")}
    assert len(names) > 3
    (explained,) = (line.partition(" Baselines: ")[2] for line in text.splitlines() if " Baselines: " in line)
    assert {*re.findall(r"`([\w +]+)`(?=,| \()", explained)} == names


def test_without_results_the_tables_say_so(tmp_path: Path) -> None:
    assert headline.table(tmp_path) == headline.ops(tmp_path) == NO_RESULTS


def test_an_engine_has_no_ratio_to_another_run() -> None:
    for figure in headline.generation(RESULTS):
        weights = f"-{figure.weights}" if figure.weights not in ("", "bf16") else ""
        path = RESULTS / figure.gpu.lower() / "e2e" / f"llama-3-8b-bf16{weights}-b1-p512-n256.json"
        measured = {row["impl"] for row in json.loads(path.read_text())["rows"]}
        assert (figure.speedup is not None) == (figure.impl == "rooftile" and headline.CUDA in measured)


def test_a_speedup_is_the_quotient_of_the_tokens_per_second_beside_it() -> None:
    for figure in headline.figures(RESULTS):
        if figure.speedup is None:
            continue
        folder = RESULTS / figure.gpu.lower()
        weights = f"-{figure.weights}" if figure.weights not in ("", "bf16") else ""
        path = folder / "e2e" / f"llama-3-8b-bf16{weights}-b1-p512-n256.json"
        if figure.work.startswith("train"):
            path = folder / "training" / f"{STEP}-{figure.work.split()[1].rstrip(',')}.json"
        if figure.work.startswith("serve"):
            path = folder / "e2e" / "serve" / "llama-3-8b-p512-n128.json"
        clients = re.search(r"(\d+) clients", figure.work)
        rows = [r for r in json.loads(path.read_text())["rows"] if r.get("op", "decode") in ("decode", STEP)]
        rows = [r for r in rows if clients is None or r["clients"] == int(clients[1])]
        (base,) = (row for row in rows if row["impl"] == figure.baseline)
        assert figure.speedup == pytest.approx(figure.tokens_per_s / base["tokens_per_s"], rel=1e-4)


def test_of_two_gpus_the_one_of_current_rows_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of two that are alike, the one that was measured last, however many rows the other one has."""
    found = [
        SimpleNamespace(work="w", gpu=gpu, is_older=is_older, meta={"date": date})
        for gpu, is_older, date in (
            ("A", True, "2026-01-03"), ("A", True, "2026-01-01"), ("B", False, "2026-01-02"), ("C", True, "2026-01-04"),
        )
    ]  # fmt: skip
    monkeypatch.setattr(headline, "training_steps", lambda results: found)
    monkeypatch.setattr(headline, "generation", lambda results, new: [])
    assert headline.figures(tmp_path) == [found[2]]
    found[2].is_older = True
    assert headline.figures(tmp_path) == [found[3]]
    found[3].meta["date"] = "2026-01-02"
    assert headline.figures(tmp_path) == found[:2]


def test_a_stale_chart_is_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    chart = tmp_path / "chart.svg"
    headline.draw(RESULTS, chart)
    shown = headline.chart_data(RESULTS)
    assert not charts.is_stale(chart, shown)
    shown[0][-1] = "1.0"
    assert charts.is_stale(chart, shown)
    assert chart.stat().st_size < 60_000


def test_serving_is_shown_where_vllm_was_measured_beside_it(tmp_path: Path) -> None:
    workload = {"prompt": 512, "new": 128, "fixed": True, "prefix": 0}
    rows = [
        {"impl": "rooftile", "clients": 64, "tokens_per_s": 90.0, "ratio_to_best_peer": 0.9},
        {"impl": "vllm", "clients": 64, "tokens_per_s": 100.0},
        {"impl": "rooftile", "clients": 8, "tokens_per_s": 20.0, "ratio_to_best_peer": 1.1},
        {"impl": "rooftile", "clients": 128, "tokens_per_s": 95.0},
    ]
    path = tmp_path / "h100" / "e2e" / "serve" / f"{headline.MODEL}-p512-n128.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"meta": META | {"workload": workload}, "rows": rows}))
    (found,) = headline.figures(tmp_path)
    assert (found.work, found.tokens_per_s, found.speedup) == (f"serve {headline.MODEL}, 64 clients", 90.0, 0.9)
    assert "| 90 | 0.90 × vLLM |" in re.sub(" +", " ", headline.table(tmp_path)).replace("90.00", "90")
    assert found.command.endswith("--clients 64 --peers vllm")
    path.write_text(json.dumps({"meta": META | {"workload": workload | {"prompt": 100}}, "rows": rows}))
    assert not headline.figures(tmp_path)
