"""The documentation's tables of attention: each suite is a run of its own."""

import pytest
from toys import cells_of, measured, table

from rooftile.bench import docs, rows
from rooftile.bench.info import machine
from rooftile.bench.rows import OURS, compare

pytestmark = pytest.mark.nightly

SHAPE = "B8 H16 T2048 D128"


def write(folder, suite, found, **more):
    roofs = {"roof_copy_gbs": 3018.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0}
    meta = {**machine(), **roofs, "gpu": "NVIDIA H100 80GB HBM3", "driver": "1.2", **more}
    rows.write_json(folder / "h100" / suite / f"{found[0].op}.json", meta, found)


def group(us, peers, op="attention", **fields):
    where = {"op": op, "shape": SHAPE, "roof": "product", **fields}
    found = [measured(OURS, us, **where, tflops=1e3 / us), *(measured(name, t, **where) for name, t in peers.items())]
    compare(found)
    return found


@pytest.fixture
def results(tmp_path):
    write(tmp_path, "attention", group(100.0, {"cudnn": 90.0}))
    write(tmp_path, "attention", group(3.0, {"index_put_": 12.0}, op="rope_and_cache"))
    write(tmp_path, "attention-fp16", group(50.0, {"naive": 500.0, "cudnn": 60.0}, dtype="fp16"))
    write(tmp_path, "attention-flex", group(110.0, {"cudnn": 121.0, "flex": 220.0}), roof_tflops=690.0)
    return tmp_path


def test_two_runs_of_one_shape_are_not_mixed_in_the_summary(results):
    made = table("attention-summary", results)
    figures = {(line[0], line[2]): (line[3], line[4], line[6]) for line in cells_of(made, "`")}
    assert figures == {
        ("`attention`", "bf16"): ("1", "0.900", "0 of 1"),
        ("`attention` (float16)", "fp16"): ("1", "1.200", "1 of 1"),
        ("`attention` (with FlexAttention)", "bf16"): ("1", "1.100", "1 of 1"),
        ("`rope_and_cache`", "bf16"): ("1", "4.000", "1 of 1"),
    }


@pytest.mark.parametrize("name", ["attention", "attention-summary"])
def test_each_suite_is_named_where_its_machine_is(name, results):
    made = table(name, results)
    lines = [line for line in made.splitlines() if "Roofs:" in line]
    assert len(lines) == len(set(lines))
    named = {op for line in lines for op in line.partition(": **")[0].split(", ")}
    assert named == {"`attention`", "`attention` (float16)", "`attention` (with FlexAttention)", "`rope_and_cache`"}
    (flex,) = (line for line in lines if "FlexAttention" in line)
    assert "690 TFLOP/s" in flex


def test_two_runs_of_one_shape_are_not_mixed_in_the_rows(results):
    made = table("attention", results)
    by_title = dict(part.split("**\n", 1) for part in made.split("\n**`")[1:])
    (plain,) = cells_of(by_title["attention` forward, bf16"], SHAPE)
    (flex,) = cells_of(by_title["attention` (with FlexAttention) forward, bf16"], SHAPE)
    assert (plain[1], plain[7:]) == ("100.0", ["0.900", "cudnn", "90.00"])
    assert (flex[1], flex[7:]) == ("110.0", ["1.100", "cudnn", "121.0", "220.0"])
    assert (
        "`attention` (float16) forward, speedup over the best baseline (above 1 is faster), 1 row: geometric mean 1.200"
        in made
    )


def test_two_files_of_one_suite_are_not_mixed(results):
    (results / "h100" / "attention" / "attention.json").rename(results / "h100" / "attention" / "earlier.json")
    write(results, "attention", group(80.0, {"cudnn": 100.0, "fa4": 96.0}))
    assert [line[7] for line in cells_of(table("attention", results), SHAPE)][:2] == ["1.200", "0.900"]


def test_the_sweep_shows_the_speed_up_over_the_naive_form(results):
    assert docs.NO_RESULTS in table("attention-sweep", results)
    both = group(10.0, {"naive": 40.0}) + group(20.0, {"naive": 30.0}, direction="backward")
    alone = group(5.0, {"naive": 35.0}, shape="B2 H4 T512 D64")
    write(results, "attention-sweep", both + alone)
    made = table("attention-sweep", results)
    assert cells_of(made, "B8") == [[SHAPE, "bf16", "10.00", "100", "40.00", "4.00", "20.00", "50.0", "30.00", "1.50"]]
    assert cells_of(made, "B2") == [["B2 H4 T512 D64", "bf16", "5.000", "200", "35.00", "7.00", "–", "–", "–", "–"]]


def test_an_op_that_another_suite_measured_is_not_called_unmeasured(results):
    write(results, "rowwise", group(3.0, {"eager": 4.0}, op="rope"))
    made = table("summary", results)
    unmeasured = {line[0] for line in cells_of(made, "`") if line[1] == "not measured yet"}
    assert "`rope_`" in unmeasured
    assert not unmeasured & {"`rope`", "`rope_and_cache`"}
