"""Benchmarks: what a composed formula moves, by running it on tensors without memory."""

import dataclasses
import json

import pytest
import torch
from toys import SMALL, cells_of, table, toy

from rooftile.bench.docs import passes
from rooftile.bench.traffic import Traffic, all_traffic, first_point, nbytes, traffic
from rooftile.cases import all_cases, find_cases

pytestmark = pytest.mark.nightly

BYTES = 4 * 8 * 4  # of the toy's input in float32


def of(function, direction="forward"):
    return traffic(dataclasses.replace(toy(), eager=function), SMALL, torch.float32, direction)


@pytest.mark.parametrize(
    ("function", "kernels", "moved"),
    [
        (lambda x: x * 2, 1, 2 * BYTES),
        (lambda x: (x * 2 + 1).t(), 2, 4 * BYTES),  # a view moves nothing
        (lambda x: x + x, 1, 2 * BYTES),  # read once
        (lambda x: x * x[:1].expand(4, 8), 1, 2 * BYTES + 8 * 4),  # a broadcast row is read once
        (lambda x: x.sum(), 1, BYTES + 4),
        (lambda x: x[torch.tensor([1], device="meta")], 1, 2 * 8 * 4 + 8),  # a gather reads what it returns
        (lambda x: torch.empty_like(x), 0, 0),
    ],
)
def test_each_operation_reads_its_inputs_and_writes_its_outputs(function, kernels, moved):
    found = of(function)
    assert (found.kernels, found.moved) == (kernels, moved)


def test_a_backward_counts_no_forward():
    found = of(lambda x: x.exp(), "backward")
    assert (found.kernels, found.moved) == (1, 3 * BYTES)


def test_a_pass_is_one_read_or_write_of_the_largest_tensor():
    assert of(lambda x: x * 2 + 1).passes == (4.0, 2.0)
    assert nbytes(torch.empty(1, 8).expand(4, 8)) == 32


def test_fusing_rms_norm_saves_sixteen_of_eighteen_passes():
    (case,) = find_cases(["rms_norm"])
    before, after = traffic(case, first_point(case), torch.bfloat16, "forward").passes
    # The cast reads 1 pass and writes 2; the square, the product and the cast back move 4, 4 and 3; the mean reads 2;
    # the weight's product moves 2.
    assert (round(before, 1), round(after, 1)) == (18.0, 2.0)


def test_every_case_has_its_traffic_and_no_formula_moves_less_than_the_op():
    found = list(all_traffic(tuple(all_cases().values())))
    assert {case.name for case, *_ in found} == set(all_cases())
    for case, _, _, direction, t in found:
        assert t.moved >= 0.98 * t.least > 0, (case.name, direction)


def test_the_table_has_what_a_profiler_measured(tmp_path):
    (case,) = find_cases(["rms_norm"])
    point = first_point(case)
    row = {"op": "rms_norm", "direction": "forward", "shape": point.label, "options": dict(point.options)}
    row |= {"dtype": "bf16", "dram_read_bytes": 70e6, "dram_write_bytes": 66e6}
    path = tmp_path / "h100" / "profile" / "rms_norm.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"meta": {"gpu": "NVIDIA H100 80GB HBM3"}, "rows": [row]}))
    lines = [line for line in cells_of(table("passes", tmp_path), "`rms_norm`") if line[1] == "forward"]
    assert [line[7] for line in lines] == ["136 (H100)"]
    assert {line[7] for line in cells_of(table("passes", tmp_path), "`softmax`")} == {"–"}
    assert passes.measured(tmp_path / "none") == {}
    assert isinstance(of(lambda x: x), Traffic)
