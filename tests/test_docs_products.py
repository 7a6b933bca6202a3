"""The documentation's tables of matrix products and of what tuning is worth."""

import pytest
from toys import cells_of, measured, table

from rooftile import tuning
from rooftile.bench import docs, rows, workloads
from rooftile.bench.info import machine
from rooftile.bench.rows import OURS, compare

pytestmark = pytest.mark.nightly

H100 = "NVIDIA H100 80GB HBM3"


def write(folder, op, found):
    roofs = {"roof_copy_gbs": 3018.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0}
    meta = {**machine(), **roofs, "gpu": H100, "driver": "1.2"}
    rows.write_json(folder / "h100" / "matmul" / f"{op}.json", meta, found)


def group(op, m, k, n, us, peers, **fields):
    """Ours and its peers for one product, compared."""
    where = {"op": op, "shape": f"{m}x{k}->{n}", "roof": "product", "dims": {"rows": m, "k": k, "n": n}}
    nbytes = 2 * (m * k + n * k + m * n)
    figures = {"gbs": nbytes / us / 1e3, "tflops": 2 * m * n * k / us / 1e6, "roof_gbs": 3100.0, "roof_tflops": 700.0}
    found = [measured(OURS, us, **where, **figures, nbytes=nbytes, **fields)]
    found += [measured(name, peer_us, **where) for name, peer_us in peers.items()]
    compare(found)
    return found


@pytest.fixture
def results(tmp_path):
    found = group("linear", 1, 4096, 4096, 10.0, {"eager": 12.0, "compile": 11.0}, roof_fraction=0.9)
    found += group("linear", 4096, 4096, 4096, 200.0, {"eager": 190.0}, roof_fraction=0.8)
    write(tmp_path, "linear", found)
    found = [row for m in (64, 1, 2048) for row in group("rms_norm_linear", m, 3584, 3584, 10.0 + m, {"eager": 26.0})]
    write(tmp_path, "rms_norm_linear", found)
    return tmp_path


def test_a_product_is_shown_with_both_rates_and_the_roof_that_binds_it(results):
    made = table("matmul", results)
    decode = ["1x4096->4096", "10.00", "3357", "3.36", "0.900", "memory", "1.20", "1.100", "compile", "12.00", "11.00"]
    assert cells_of(made, "1x4096") == [decode]
    (prefill,) = cells_of(made, "4096x4096")
    assert (prefill[3], *prefill[5:8]) == ("687", "GEMM", "0.95", "0.950")
    assert "`linear` forward, speedup over the best baseline (above 1 is faster), 2 rows: geometric mean 1.022" in made
    assert "rms_norm_linear" not in made


def test_the_summary_has_a_line_for_each_regime(results):
    made = table("matmul-summary", results)
    assert [line[2:5] for line in cells_of(made, "`linear`")] == [
        ["M <= 16", "bf16", "1"],
        ["M > 64", "bf16", "1"],
    ]
    assert [line[2] for line in cells_of(made, "`rms_norm_linear`")] == ["16 < M <= 64", "M <= 16", "M > 64"]


def test_both_regimes_of_the_fused_norm_stand_beside_its_traffic(results):
    made = table("rms_norm_linear", results)
    lines = [cells for m in (1, 64, 2048) for cells in cells_of(made, f"{m:>4} ")]
    assert [line[0] for line in lines] == ["1", "64", "2048"]
    weights = 3584 * 3584 + 3584
    for line, m in zip(lines, (1, 64, 2048), strict=True):
        assert line[-3:] == [f"{2 * (f * m * 3584 + weights + m * 3584) / 1e6:.2f}" for f in (3, 2, 1)]
    assert "3584 -> 3584, bf16" in made


def test_a_products_summary_is_not_asked_of_the_rowwise_suite(results):
    (results / "h100" / "rowwise").mkdir()
    (results / "h100" / "matmul" / "linear.json").rename(results / "h100" / "rowwise" / "x.json")
    made = table("summary", results)
    assert "not measured yet" in made
    assert "`gated_linear`" not in made


def test_what_tuning_is_worth_is_summed_over_a_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "PACKAGE", tmp_path)
    assert table("tuning", tmp_path).count(docs.NO_RESULTS) == 1
    run = {"gpu": H100, "driver": "1.2", "torch": "2", "triton": "3", "commit": "a" * 40, "date": "2026-01-02T"}
    made = tuning.Table({"schema": tuning.SCHEMA, "op": "matmul", "gpu": "h100", "multiprocessors": 132, "runs": [run]})
    for p in workloads.load("llama-3-8b")[1]:
        entry = {"m": 1, "n": p.n, "k": p.k, "dtype": "bf16", "layout": "nt", "gated": False, "run": 0}
        times = {"us": 10.0, "default_us": 12.0, "peer_us": 11.0, "config": {"kernel": "gemv", "block_n": 8}}
        made.entries[f"m1 n{p.n} k{p.k}"] = {**entry, **times}
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "matmul.json").write_text(tuning.to_json(made))
    text = table("tuning", tmp_path)
    layer = ["llama-3-8b", "1", "bf16", "48.00", "40.00", "44.00", "1.200", "1.100"]
    assert cells_of(text, "llama-3-8b") == [layer]
    assert "geometric mean: 1.200 over the default, 1.100 over cuBLAS" in text
    assert cells_of(text, "m1 n6144 k4096")[0][-1] == "`gemv 8`"
    assert f"**{H100}**" in text
