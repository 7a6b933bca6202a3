"""Benchmarks: the charts of the sweeps and the rooflines, and that the committed ones show the results."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from toys import measured
from typer.testing import CliRunner

from rooftile.bench import charts, roofline, rows
from rooftile.bench.docs import sweeps as docs_sweeps
from rooftile.bench.rows import OURS
from rooftile.cli import app

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parent.parent
META = {
    **dict.fromkeys(rows.META, "x"), "gpu": "NVIDIA H100 80GB HBM3", "roof_read_gbs": 3000.0, "roof_tflops": 700.0,
    "roof_products": {"bf16": 700.0, "fp16": 690.0, "fp32": 50.0},
}  # fmt: skip


def row(impl, us, op="rms_norm", **fields):
    nbytes, flops = fields.pop("nbytes", 3_000_000), 3_000_000
    figures = {"gbs": nbytes / us / 1e3, "tflops": flops / us / 1e6, "roof_fraction": nbytes / 3e12 / us * 1e6}
    made = measured(impl, us, nbytes=nbytes, **figures, **fields)
    made.op = op
    return made


@pytest.fixture
def results(tmp_path):
    found = [row(impl, us * n, nbytes=3_000_000 * n, shape=f"{n}x8", dims={"rows": n, "cols": 8})
             for n in (1, 2, 4) for impl, us in ((OURS, 1.0), ("eager", 4.0))]  # fmt: skip
    found += [row(OURS, 2.0, direction="backward", shape=f"{n}x8", dims={"rows": n, "cols": 8}) for n in (1, 2, 4)]
    rows.write_json(tmp_path / "results" / "h100" / "rowwise" / "rms_norm.json", META, found)
    decode = [row(OURS, 9.0, op="decode", dims={"batch": 1})]
    rows.write_json(tmp_path / "results" / "h100" / "e2e" / "x.json", META, decode)
    (tmp_path / "docs").mkdir()
    return tmp_path / "results"


def luminance(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", charts.PAGES)
def test_every_colour_can_be_seen_on_light_and_dark_pages(page):
    for colour in {*charts.COLOURS.values(), charts.OTHER_OURS, charts.TEXT, *roofline.FAMILIES.values()}:
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 3, (colour, page)


def test_a_panel_is_the_median_fraction_of_the_roof_by_size(results):
    forward, backward = (charts.panels(results, "h100", sweep) for sweep in charts.SWEEPS[:2])
    assert [(p.title, p.size) for p in (*forward, *backward)] == [
        ("rms_norm, bf16", "rows"), ("rms_norm backward, bf16", "rows"),
    ]  # fmt: skip
    assert forward[0].lines == {OURS: [(n, 1.0) for n in (1, 2, 4)], "eager": [(n, 0.25) for n in (1, 2, 4)]}


def test_one_size_is_no_panel(results):
    (panel,) = charts.panels(results, "h100", charts.SWEEPS[0])
    assert charts.panel_of([row(OURS, 1.0, shape="4x8")]) is None
    assert charts._ticks([1.0, 2.0, 64.0, 4096.0]) == [1.0, 64.0, 4096.0]
    assert charts._ticks([1.0, 2.0]) == [1.0, 2.0]
    assert panel.lines


def test_stale_charts_are_found_and_drawn(results):
    pytest.importorskip("matplotlib")
    paths = [path for path, draw in docs_sweeps.stale(results) if path.parent.name == "charts"]
    assert [p.name for p in paths] == [
        "h100-rowwise-forward.svg", "h100-rowwise-backward.svg", "h100-roofline.svg",
    ]  # fmt: skip
    for path, draw in docs_sweeps.stale(results):
        if path in paths:
            draw()
    assert not [path for path, _ in docs_sweeps.stale(results) if path in paths]
    text = paths[0].read_text()
    ElementTree.fromstring(text)
    assert not re.search(r"<text[^>]*DejaVu|fill: #ffffff", text)
    path = results / "h100" / "rowwise" / "rms_norm.json"
    meta, found = rows.read_json(path)
    rows.write_json(path, meta, [*found[:-1], row(OURS, 1.0, direction="backward", shape="9x8", dims={"rows": 9})])
    assert paths[1] in [path for path, _ in docs_sweeps.stale(results)]


def test_no_charts_are_drawn_where_there_is_no_documentation(results):
    (results.parent / "docs").rmdir()
    assert docs_sweeps.stale(results) == []


def test_a_roofline_has_the_kernels_and_roofs_of_its_gpu(results, tmp_path):
    (line,) = roofline.lines(results)
    assert (line.name, line.read_gbs, line.gemms["bf16"]) == (META["gpu"], 3000.0, 700.0)
    assert len(line.kernels) == 6  # ours, and no whole model
    assert line.kernels[0] == roofline.Kernel(roofline.ROW_WISE, 1.0, 3.0, 1.0)
    assert roofline._levels(line.gemms) == [(["bf16", "fp16"], 700.0), (["fp32"], 50.0)]


@pytest.mark.parametrize(
    ("op", "roof", "family"),
    [
        ("rms_norm", "copy", roofline.ROW_WISE),
        ("linear", "gemm", roofline.GEMM),
        ("int8_linear", "gemm", roofline.QUANTIZED),
        ("attention_varlen", "gemm", roofline.ATTENTION),
        ("decode_attention", "gemm", roofline.DECODING),
        ("layer.attention", "gemm", roofline.DECODING),
        ("layer.qkv", "gemm", roofline.GEMM),
        ("linear_jsd", "gemm", roofline.LOSSES),
        ("train_step", "gemm", None),
    ],
)
def test_every_op_has_a_family(op, roof, family):
    assert roofline.family(row(OURS, 1.0, op=op, roof=roof)) == family


def test_the_command_writes_an_svg_and_a_png(results, tmp_path):
    pytest.importorskip("matplotlib")
    ran = CliRunner().invoke(app, ["roofline", "--results", str(results), "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert "row-wise" in ran.output
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["roofline-h100.png", "roofline-h100.svg"]
    assert CliRunner().invoke(app, ["roofline", "--results", str(tmp_path / "out")]).exit_code == 2


def test_the_committed_charts_are_fresh_small_and_shown():
    assert [path.name for path, _ in docs_sweeps.stale(ROOT / "results")] == [], "run make docs"
    for path in (ROOT / charts.FOLDER).glob("*.svg"):
        assert path.stat().st_size < charts.LARGEST, path
    texts = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert docs_sweeps.unused(ROOT / "results", texts) == []
