"""The documentation's tables of `rooftile bench e2e`, from result files made up."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.bench import docs
from rooftile.bench.e2e import layer
from rooftile.bench.e2e.paths import CUDA, CUDA_EAGER, HF, NOTES, OURS_EAGER, OURS_UNTUNED, PATCHED
from rooftile.bench.e2e.report import E2ERow
from rooftile.bench.e2e.results import SO_FAR, over
from rooftile.bench.rows import OURS, Row, write_json

pytestmark = pytest.mark.nightly

FIRST, SECOND = "2025-01-01T00:00:00Z", "2025-01-01T01:00:00Z"
ROOFS = {"roof_copy_gbs": 4000.0, "roof_read_gbs": 4200.0, "roof_tflops": 800.0}
MACHINE = {"gpu": "NVIDIA H100", "driver": "1.2", "torch": "2.11", "triton": "3.6", "rooftile": "0.1", "python": "3.12"}
META = {
    **MACHINE, **ROOFS, "commit": "c0ffee", "date": SECOND, "weights": "random", "quantize": None, "tuning": "on",
    "implementations": NOTES, "runs": {FIRST: ROOFS, SECOND: {**ROOFS, "roof_copy_gbs": 4100.0}},
}  # fmt: skip


def row(impl, ms, op="decode", run=FIRST, batch=1, **fields):
    dims = {"batch": batch, "prompt": 512, "new": 256}
    us = None if ms is None else 1e3 * ms
    figures = {"us": us, "us_p20": us, "us_p80": us, "us_p99": us, "dims": dims, "run": run, **fields}
    return E2ERow(op, "forward", f"m bf16 B{batch} P512 N256", "bf16", impl, **figures)


def both(impl, ms, **fields):
    return [row(impl, ms, op, **fields) for op in ("decode", "prefill")]


def write(folder, rows, model="m", batch=1, **meta):
    quantize = f"-{meta['quantize']}" if meta.get("quantize") else ""
    path = folder / "h100" / "e2e" / f"{model}-bf16{quantize}-b{batch}-p512-n256.json"
    write_json(path, {**META, "model": model, **meta}, rows)


def lines_of(text, *first):
    """The cells of the lines that begin with those."""
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if line[: len(first)] == list(first)]


def rows_of(text, impl):
    found = [dict(zip(head, line, strict=True)) for head, line in _under_heads(text)]
    return [row for row in found if row.get("implementation") == impl]


def _under_heads(text):
    head = None
    for line in text.splitlines():
        cells = [c.strip() for c in line.split("|")[1:-1]]
        if not cells:
            head = None
        elif head is None:
            head = cells
        elif cells[0] != "---":
            yield head, cells


def test_a_ratio_is_of_two_that_one_run_has_measured_to_the_end():
    assert over(row(OURS, 4.0), row(CUDA, 5.0)) == 1.25
    assert over(row(OURS, 4.0, run=SECOND), row(CUDA, 5.0)) is None
    assert over(row(OURS, 4.0, message=SO_FAR + "1 of 2 rounds"), row(CUDA, 5.0)) is None
    assert over(row(OURS, 4.0), row(CUDA, None, status="error")) is None
    assert over(row(OURS, 4.0), None) is None


def test_ratios_stand_only_within_a_run(tmp_path):
    write(tmp_path, [*both(OURS, 4.0, run=SECOND, gbs=2050.0), *both(CUDA, 5.0), *both(OURS_UNTUNED, 5.0, run=SECOND)])
    write(tmp_path, [*both(OURS, 4.0, batch=8, gbs=2000.0), *both(CUDA, 5.0, batch=8)], batch=8)
    one, eight = lines_of(docs.TABLES["e2e-summary"](tmp_path), "m")
    assert one == ["m", "bf16", "1", "512", "256", "4.000", "5.000", "–", "2050", "0.500", "4.000", "5.000", "–", "2"]
    assert eight[2:] == ["8", "512", "256", "4.000", "5.000", "1.250", "2000", "0.500", "4.000", "5.000", "1.250", "1"]
    every = docs.TABLES["e2e"](tmp_path)
    ours = [(r["ratio"], r["to"], r["run"]) for r in rows_of(every, OURS)]
    assert ours == [("–", CUDA, "2"), ("1.250", CUDA, "1")] * 2  # decode, then prefill
    assert "Roofs: copy 4000–4100 GB/s, read 4200 GB/s, bf16 GEMM 800" in every
    assert "runs: 1, 2." in every
    tuned = lines_of(every.partition("**with tuned tables and without**")[2], "m")
    assert [line[5:] for line in tuned] == [[op, "4.000", "5.000", "1.250"] for op in ("decode", "prefill")]


def test_what_is_run_in_another_way_is_held_to_its_own_like(tmp_path):
    write(tmp_path, [*both(OURS, 4.0), *both(OURS_EAGER, 20.0), *both(CUDA, 5.0), *both(CUDA_EAGER, 25.0)])
    every = docs.TABLES["e2e"](tmp_path)
    assert {(r["ratio"], r["to"]) for r in rows_of(every, OURS_EAGER)} == {("1.250", CUDA_EAGER)}
    assert {(r["ratio"], r["to"]) for r in rows_of(every, OURS)} == {("1.250", CUDA)}
    assert "with tuned tables" not in every  # no run was made without


def test_rows_that_fail_or_are_cut_short_are_shown_and_say_why(tmp_path):
    rows = [
        *both(OURS, 4.0, message="cut to 16 of 255 steps by --seconds", note="what it chose"),
        *both(CUDA, None, status="error", message="out of memory"),
    ]
    write(tmp_path, rows)
    every, summary = docs.TABLES["e2e"](tmp_path), docs.TABLES["e2e-summary"](tmp_path)
    assert {(r["ms"], r["p99"], r["note"]) for r in rows_of(every, CUDA)} == {("error", "–", "out of memory")}
    notes = {(r["ms"], r["ratio"], r["note"]) for r in rows_of(every, OURS)}
    assert notes == {("4.000", "–", "cut to 16 of 255 steps by --seconds; what it chose")}
    assert lines_of(summary, "m")[0][5:8] == ["4.000", "error", "–"]
    assert f"m bf16 B1 P512 N256 `{CUDA}` decode: error, out of memory." in summary
    assert f"m bf16 B1 P512 N256 `{OURS}` decode: ok, cut to 16 of 255 steps by --seconds." in summary


def test_hugging_face_has_columns_where_there_are_rows_of_it(tmp_path):
    write(tmp_path, [*both(OURS, 4.0), *both(CUDA, 5.0)])
    assert HF not in docs.TABLES["e2e-summary"](tmp_path)
    write(tmp_path, [*both(OURS, 4.0, batch=2), *both(HF, 8.0, batch=2), *both(PATCHED, 5.0, batch=2)], batch=2)
    summary = docs.TABLES["e2e-summary"](tmp_path)
    assert [line[8:10] for line in lines_of(summary, "m")] == [["–", "–"], ["8.000", "5.000"]]
    (patched, _) = rows_of(docs.TABLES["e2e"](tmp_path), PATCHED)
    assert (patched["ratio"], patched["to"]) == ("1.600", HF)


def test_weights_of_fewer_bits_stand_behind_dense_ones_and_charts_are_named(tmp_path):
    write(tmp_path, both(OURS, 2.0, options={"quantize": "int8"}), "llama-3-8b", quantize="int8")
    write(tmp_path, both(OURS, 4.0), "llama-3-8b")
    write(tmp_path, both(OURS, 3.0), "a-model-of-another")
    untuned = both(OURS, 5.0, batch=4, options={"tuning": "off"})
    write(tmp_path, untuned, "llama-3-8b", batch=4, tuning="off", weights="a/folder")
    summary, every = docs.TABLES["e2e-summary"](tmp_path), docs.TABLES["e2e"](tmp_path)
    first = [line[:2] for line in lines_of(summary) if line[2] in ("1", "4")]
    assert first == [["llama-3-8b", "bf16"], ["llama-3-8b", "bf16 int8"], ["a-model-of-another", "bf16"]]
    assert {r["ms"] for r in rows_of(every, "rooftile (tuning off)")} == {"5.000"}
    assert "a checkpoint's weights" in every
    assert "a/folder" not in every
    assert "Charts" not in every
    (tmp_path / "h100" / "e2e" / "m.png").touch()
    assert "`results/h100/e2e/m.png`" in docs.TABLES["e2e"](tmp_path)


def test_a_layer_has_a_line_for_each_kernel_and_a_sum(tmp_path):
    def kernel(name, us, peer_us):
        place = (f"layer.{name}", "forward", "1x4->4", "bf16")
        ours = Row(
            *place, OURS, us, dims={"rows": 1}, gbs=10.0, status="ok" if us else "FAIL", message="" if us else "no"
        )
        slow, fast = Row(*place, "eager", peer_us + 1), Row(*place, "compile", peer_us)
        return [ours, slow, fast, Row(*place, "sdpa flash", status="unsupported", message="no pages")]

    def table(rows):
        meta = {**META, "model": "m", "context": 44}
        write_json(tmp_path / "h100" / "e2e" / "layer-m-bf16-b1-c44.json", meta, rows)
        return docs.TABLES["e2e-layer"](tmp_path)

    alone = [r for name in layer.ALONE for r in kernel(name, 10.0, 11.0)]
    made = table([*alone, *kernel("down_add", 10.0, 9.0)])
    assert lines_of(made, "down_add")[0][2:6] == ["10.00", "9.000", "compile", "0.90"]
    assert lines_of(made, "sum of the first five")[0][2:6] == ["50.00", "55.00", "", "1.10"]
    assert "`m`, bf16, batch 1, 44 tokens in the cache: **NVIDIA H100**" in made
    assert docs.TABLES["e2e"](tmp_path) == docs.NO_RESULTS  # a layer is no model
    failed = table([*kernel("qkv", None, 11.0), *alone[4:]])
    assert (lines_of(failed, "qkv")[0][2], lines_of(failed, "qkv")[0][-1]) == ("–", "FAIL")
    assert lines_of(failed, "sum of the first five")[0][2:6] == ["–", "55.00", "", "–"]
    assert "layer.qkv rooftile: FAIL, no." in failed
    assert "no pages" not in failed


@pytest.mark.parametrize("name", ["e2e", "e2e-summary", "e2e-layer"])
def test_without_results_there_is_no_table(name, tmp_path):
    assert docs.TABLES[name](tmp_path) == docs.NO_RESULTS
