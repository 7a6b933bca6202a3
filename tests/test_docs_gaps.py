"""The documentation's table of known gaps: every row of every suite in which a baseline is faster."""

import pytest
from toys import cells_of, measured, table

from rooftile.bench import docs, rows, sources
from rooftile.bench.info import machine
from rooftile.bench.rows import OURS, compare

pytestmark = pytest.mark.nightly

GPU = "NVIDIA H100 80GB HBM3"


def write(folder, suite, *groups, name="x", **more):
    found = [row for group in groups for row in group]
    meta = {**machine(), "roof_copy_gbs": 3018.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0, "gpu": GPU}
    rows.write_json(folder / "h100" / suite / f"{name}.json", {**meta, "driver": "1.2", **more}, found)


def group(us, peers, shape="8x16", **fields):
    found = [measured(name, t, shape=shape, **fields) for name, t in ({OURS: us} | peers).items()]
    compare(found)
    return found


def test_the_rows_of_all_suites_that_a_baseline_beats_are_listed(tmp_path):
    write(tmp_path, "rowwise", group(10.0, {"eager": 30.0, "quack": 9.0}), group(10.0, {"eager": 11.0}, "8x32"))
    write(tmp_path, "matmul", group(10.0, {"eager": 8.0}, "16x16", op="linear"), group(10.0, {}, "1x1", op="linear"))
    made = table("gaps", tmp_path)
    assert f"**{GPU}**: 2 of 3 rows with a baseline are below 0.98." in made
    lines = cells_of(made, "`")
    assert [line[3:] for line in lines if line[3].startswith("1 of")] == [
        ["1 of 1", "0.800", "eager"],
        ["1 of 2", "0.900", "quack"],
    ]
    every = {line[3]: (line[2], line[6], line[7]) for line in lines if len(line) == 8}
    assert every == {"16x16": ("matmul", "0.800", "eager"), "8x16": ("rowwise", "0.900", "quack")}


def test_a_variant_of_ours_and_a_wrong_result_are_no_baselines(tmp_path):
    found = [measured(name, t) for name, t in ((OURS, 10.0), (f"{OURS} other", 5.0), ("wrong", 4.0), ("quack", 9.0))]
    found[2].status = "FAIL"
    compare(found)
    write(tmp_path, "rowwise", found)
    assert [line[3:] for line in cells_of(table("gaps", tmp_path), "`") if len(line) == 6] == [
        ["1 of 1", "0.900", "quack"]
    ]


def test_an_op_is_older_if_one_of_its_files_is(tmp_path):
    kernels = sources.hashes()
    old = {**kernels, "rms_norm": "0" * 12}
    write(tmp_path, "rowwise", group(10.0, {"eager": 9.0}, op="rms_norm"), name="a", definitions=kernels)
    assert "Older" not in table("gaps", tmp_path)
    write(tmp_path, "rowwise", group(10.0, {"eager": 9.0}, op="rms_norm"), name="b", definitions=old, commit="unknown")
    assert "below 0.98. Older than their kernels: all." in table("gaps", tmp_path)


def test_a_tie_is_no_gap(tmp_path):
    write(tmp_path, "rowwise", group(10.0, {"eager": 9.8}))
    assert "0 of 1 rows with a baseline are below 0.98." in table("gaps", tmp_path)


def test_before_anything_is_measured_it_says_so(tmp_path):
    assert docs.NO_RESULTS in table("gaps", tmp_path)
