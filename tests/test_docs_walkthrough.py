"""The page that follows two kernels: its tables from results/, and what it says of launches and of compiled kernels."""

import re

import pages
import pytest
import torch
import triton
from toys import cells_of, measured, table

from rooftile import library, tuning
from rooftile.bench import profile, rows
from rooftile.bench.docs import NO_RESULTS
from rooftile.bench.docs.walkthrough import KERNELS
from rooftile.bench.info import machine
from rooftile.bench.profile import Profile
from rooftile.bench.published import SUITES
from rooftile.bench.rows import OURS, compare
from rooftile.cases import find_cases
from rooftile.inspect import Task, compile_on
from rooftile.inspect import report as inspected
from rooftile.ops.gemm.choose import choose
from rooftile.ops.gemm.choose_dense import filled
from rooftile.ops.gemm.config import Problem
from rooftile.ops.rms_norm.forward import config
from rooftile.runtime import TARGETS

PAGE = (pages.ROOT / "docs" / "kernels" / "walkthrough.md").read_text(encoding="utf-8")
GPU = "NVIDIA H100 80GB HBM3"
M, N, K = 4096, 6144, 4096
TARGET = TARGETS["sm_90"]


def point_of(op):
    (case,) = find_cases([op])
    return profile.find_point(case, KERNELS[op][1])


def write(folder, op, **times):
    suite, shape = KERNELS[op]
    roofs = {"roof_gbs": 3000.0, "roof_tflops": 800.0}
    found = [measured(name, us, op=op, shape=shape, **roofs) for name, us in times.items()]
    found.append(measured(OURS, 1.0, op=op, shape="1x1"))
    compare(found[:-1])
    meta = {**machine(), "roof_copy_gbs": 1.0, "roof_read_gbs": 1.0, "roof_tflops": 800.0, "gpu": GPU, "driver": "1.2"}
    rows.write_json(folder / "h100" / suite / f"{op}.json", meta, found)


def test_the_least_time_is_that_of_the_slower_roof(tmp_path):
    write(tmp_path, "rms_norm", rooftile=100.0)
    norm, gemm = cells_of(table("walkthrough-least", tmp_path), "`")
    nbytes, flops = 2 * (2 * 16384 * 4096 + 4096), 4 * 16384 * 4096
    assert norm[2:5] == ["268.4", "0.2684", "1.000"]
    assert [float(cell) for cell in norm[6:9]] == [3000, 800, 266.7]
    assert [float(cell) for cell in norm[9:]] == pytest.approx([nbytes / 3e6, flops / 8e8, nbytes / 3e6], rel=1e-3)
    assert gemm[2:] == ["134.2", "206.2", "1536", "not measured yet", *["–"] * 6]
    write(tmp_path, "linear", rooftile=300.0)
    gemm = cells_of(table("walkthrough-least", tmp_path), "`linear`")[0]
    assert float(gemm[-1]) == pytest.approx(2 * M * N * K / 800e6, rel=1e-3)


def test_every_implementation_has_a_line_and_other_shapes_none(tmp_path):
    assert table("walkthrough-rms_norm", tmp_path).count(NO_RESULTS) == 1
    write(tmp_path, "rms_norm", rooftile=100.0, eager=800.0, quack=90.0)
    lines = cells_of(table("walkthrough-rms_norm", tmp_path), "H100")
    assert [(line[1], line[2], line[-1]) for line in lines] == [
        (OURS, "100.0", "8.00"),
        ("eager", "800.0", "1.00"),
        ("quack", "90.00", "8.89"),
    ]


def test_the_counters_are_those_of_the_two_profiles(tmp_path, monkeypatch):
    assert NO_RESULTS in table("walkthrough-counters", tmp_path)
    meta = {**machine(), "gpu": GPU, "driver": "1.2"}
    monkeypatch.setattr(profile, "machine", lambda: meta)
    found = Profile("_loop_kernel(long)", {"us": 91.25, "read": 134e6, "registers": 28}, {"long_scoreboard": 31.5})
    profile.write(tmp_path, profile.Task("rms_norm", point_of("rms_norm"), "bf16", "forward"), [found])
    made = table("walkthrough-counters", tmp_path)
    assert "`rms_norm`, 16384x4096: **" + GPU in made
    assert "_loop_kernel |" in made
    shown = {line[0]: line[1] for line in cells_of(made, "")}
    assert (shown["time"], shown["DRAM bytes read"], shown["registers a thread"]) == ("91.25 us", "134.0 MB", "28.00")
    assert shown["stall 1, cycles an instruction"] == "long_scoreboard 31.50"
    assert shown["tensor pipe active"] == "–"


def test_the_page_names_what_is_profiled_and_every_line_that_is_printed():
    assert [f"    rooftile {line}" for line in SUITES["profile"]] == re.findall(r"^    rooftile profile .*", PAGE, re.M)
    for name, *_ in profile.lines([]):
        head, _, rest = name.partition(", ")
        assert f"| `{head}` |" in PAGE or (head.startswith("stall") and f"`{rest}`" in PAGE)


def test_a_row_of_rms_norm_is_launched_as_the_page_says():
    c = config(4096, 2, False, TARGET)
    assert (c.kernel, c.block_n, c.num_warps, c.held, c.rows) == ("loop", 2048, 8, 0, 1)
    assert "with blocks of 2048 elements and 8 warps" in PAGE


@pytest.mark.parametrize(("gpu", "column"), [("h200", 1), ("none", 2)])
def test_a_tile_of_linear_is_launched_as_the_page_says(gpu, column, monkeypatch):
    hopper = pytest.importorskip("rooftile.ops.gemm.hopper")
    monkeypatch.setenv("ROOFTILE_TUNING_GPU", gpu)
    tuning.forget()
    try:
        c = choose(Problem(M, N, K, torch.bfloat16), TARGET)
    finally:
        monkeypatch.undo()
        tuning.forget()
    assert (c.kernel, c.group_m, c.pingpong) == ("hopper", 8, False)
    t = hopper.tiling_of(c, True, True, False, "", "", "", 2, TARGET.shared_memory)
    tiles = library.cdiv(M, t.tile_rows) * library.cdiv(N, t.cols)
    slot = (t.tile_rows + t.cols) * t.block_k * 2
    said = {line[0]: line[column] for line in cells_of(PAGE, "") if len(line) > column}
    assert said == said | {
        "tile of y": f"{t.tile_rows} x {t.cols}",
        "elements of the sum in a step": str(t.block_k),
        "slots of the ring": str(t.stages),
        "bytes of x and of the weight in a slot": str(slot),
        "FLOP for each of those bytes": f"{2 * t.tile_rows * t.cols * t.block_k / slot:.0f}",
        "registers of a thread for the accumulator": str(t.thread_sums),
        "tiles": str(tiles),
        "most tiles of a CTA, of 132": str(library.cdiv(tiles, TARGET.multiprocessors)),
        "SMs at work, on average over those rounds": f"{filled(tiles, TARGET.multiprocessors):.3f}",
    }
    assert (t.rows, t.consumers, t.chunk, t.out_buffers, hopper.REGISTERS[2]) == (64, 2, 64, 2, 168)
    assert slot * t.stages == 196608
    assert t.consumers * t.out_buffers * t.rows * t.chunk * 2 == 32768


def _quoted():
    """The lines of `rooftile inspect` on the page, as cells by column."""
    head, *lines = (re.split(r" {2,}", line) for line in re.search(r"```text\n(.*?)\n```", PAGE, re.S)[1].split("\n"))
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_the_columns_of_inspect_are_real():
    columns = [str(c.header) for c in inspected._table([], "sm_90").columns]
    for line in _quoted():
        assert list(line) == columns[: len(line)]


@pytest.mark.nightly
@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="the page shows what Triton 3.6.0 compiled")
def test_the_kernels_are_compiled_as_the_page_says(monkeypatch):
    pytest.importorskip("rooftile.ops.gemm.hopper")
    monkeypatch.setenv("ROOFTILE_TUNING_GPU", "h200")
    compiled = compile_on("sm_90", [Task(op, point_of(op), "bf16", "forward") for op in KERNELS])
    fields = {"points": "points", "kernel": "name", "warps": "num_warps", "stages": "num_stages"}
    for row, said in zip(compiled, _quoted(), strict=True):
        values = {**row.as_json(), "points": ", ".join(row.points)}
        assert {name: str(values[fields.get(name, name)]) for name in said} == said
