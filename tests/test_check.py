"""`rooftile check`: what it catches, what it says, and how it ends."""

import csv
import dataclasses
import io
import json
import math

import pytest
import torch
from helpers import BF16
from rich.console import Console
from toys import toy
from typer.testing import CliRunner

from rooftile import cases, cli, runtime
from rooftile.cases import SETS, check_report, find_cases
from rooftile.cases import check as checking
from rooftile.cases.case import Tolerance
from rooftile.cases.check import check_point, poisoned, relative_error, rounding_floor, tolerance_rows


@pytest.fixture
def case():
    return find_cases(["add_rms_norm"])[0]


def checked(case, change, *, direction="forward", dtype=torch.float32, **options):
    """The rows of the case with its outputs changed by `change`."""

    def function(*args, **kwargs):
        return change(*case.function(*args, **kwargs))

    broken = dataclasses.replace(case, function=function)
    return check_point(broken, case.sets["tiny"][0], dtype, direction, **options)


def verdicts(rows):
    return {row.output: row.passed for row in rows}


def test_a_sound_kernel_passes(case):
    assert verdicts(checked(case, lambda y, u: (y, u))) == {"y": True, "u": True}


@pytest.mark.parametrize("factor", [1.001, 0.0, -1.0, math.nan, math.inf])
def test_a_factor_is_caught(case, factor):
    rows = checked(case, lambda y, u: (y * factor, u))
    assert verdicts(rows) == {"y": False, "u": True}
    assert rows[0].message


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_the_loss_of_two_bits_is_caught(case, dtype):
    """Under the ceiling a kernel may still not be twice as bad as eager PyTorch."""

    def coarse(y, u):
        return (y.view(torch.int16) & -4).view(dtype), u

    row = checked(case, coarse, dtype=dtype)[0]
    assert not row.passed
    assert row.error > 2 * row.eager_error


def test_one_wrong_element_is_caught(case):
    def spoil(y, u):
        y[-1, -1] += 0.01
        return y, u

    rows = checked(case, spoil)
    assert verdicts(rows) == {"y": False, "u": True}
    assert rows[0].abs_error == pytest.approx(0.01, rel=1e-3)
    assert rows[1].abs_error < 1e-5


def test_one_nan_is_caught(case):
    def spoil(y, u):
        u[0, 0] = math.nan
        return y, u

    rows = checked(case, spoil)
    assert verdicts(rows) == {"y": True, "u": False}
    assert rows[1].message == "1 of 512 elements are NaN or infinite"


def test_an_element_left_unwritten_is_caught(case):
    def spoil(y, u):
        fresh = torch.empty_like(y)
        fresh[1:] = y[1:]
        return fresh, u

    assert verdicts(checked(case, spoil)) == {"y": False, "u": True}


def test_what_runs_unless_determinism_is_asked_for_is_checked_too(case):
    """Poisoned memory asks for it, and a benchmark does not."""

    def change(y, u):
        return (y if torch.are_deterministic_algorithms_enabled() else y * 2), u

    assert verdicts(checked(case, change)) == {"y": True, "u": True}
    asked = dataclasses.replace(case, deterministic="asked")
    assert verdicts(checked(asked, change)) == {"y": False, "u": True}


def test_a_peer_may_lose_twice_the_ceiling(case):
    """Of float16 held to almost nothing: ours fails, and so does a peer that loses more than twice that."""
    point, lost = case.sets["tiny"][0], torch.finfo(torch.float16).eps / 64
    ceiling = Tolerance(lost, "less than is possible")
    tight = dataclasses.replace(
        case, tolerances={torch.float16: {"forward": ceiling, "backward": ceiling}}, output_tolerances={}
    )
    for function, most in ((None, lost), (case.function, 2 * lost)):
        rows = check_point(tight, point, torch.float16, "forward", function=function)
        assert {(row.tolerance, row.passed) for row in rows} == {(most, False)}


def test_a_peer_may_have_a_ceiling_of_its_own(case):
    point, lost = case.sets["tiny"][0], torch.finfo(torch.float16).eps / 64
    for peers, most in ((0.0, 2 * lost), (8 * lost, 8 * lost)):
        ceiling = Tolerance(lost, "less than is possible", peers)
        tight = dataclasses.replace(case, tolerances={torch.float16: {"forward": ceiling}}, output_tolerances={})
        for function, tolerance in ((None, lost), (case.function, most)):
            rows = check_point(tight, point, torch.float16, "forward", function=function)
            assert {row.tolerance for row in rows} == {tolerance}


def test_a_wrong_shape_is_caught(case):
    assert checked(case, lambda y, u: (y[:1], u))[0].message == "shape (1, 128), expected (4, 128)"


def test_a_wrong_dtype_is_caught(case):
    rows = checked(case, lambda y, u: (y.float(), u), dtype=BF16)
    assert rows[0].message == "dtype torch.float32, expected torch.bfloat16"


def test_a_missing_output_is_caught(case):
    rows = checked(case, lambda y, u: (y,))
    assert verdicts(rows) == {"y": False, "u": False}
    assert "1 results, expected 2: y, u" in rows[0].message


def test_an_overwritten_input_is_caught(case):
    def function(x, residual, weight, **options):
        outputs = case.function(x, residual, weight, **options)
        with torch.no_grad():
            residual.zero_()
        return outputs

    rows = check_point(dataclasses.replace(case, function=function), case.sets["tiny"][0], BF16, "forward")
    assert verdicts(rows) == {"y": False, "u": False}
    assert rows[0].message == "overwrote residual"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_exception_makes_rows_that_fail(case, direction):
    def fail(y, u):
        raise RuntimeError("out of luck")

    rows = checked(case, fail, direction=direction)
    names = ["y", "u"] if direction == "forward" else ["dx", "dresidual", "dweight"]
    assert [row.output for row in rows] == names
    assert all(not row.passed and row.message == "RuntimeError: out of luck" for row in rows)
    assert all(row.as_json()["error"] is None for row in rows)


def test_a_wrong_gradient_is_caught(case):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    rows = checked(case, lambda y, u: (Double.apply(y), u), direction="backward")
    assert verdicts(rows) == {"dx": False, "dresidual": False, "dweight": False}
    assert all(checked(case, lambda y, u: (Double.apply(y), u))[i].passed for i in (0, 1))


def test_another_implementation_is_held_to_the_same(case):
    point = case.sets["tiny"][0]
    assert all(r.passed for r in check_point(case, point, BF16, "backward", function=case.eager))
    halved = lambda *args, **options: tuple(y / 2 for y in case.eager(*args, **options))  # noqa: E731
    assert not any(r.passed for r in check_point(case, point, BF16, "forward", function=halved))


def test_another_implementation_may_write_over_its_inputs(case):
    def function(x, residual, weight, **options):
        y, u = case.eager(x, residual, weight, **options)
        with torch.no_grad():
            x.zero_()
        return y, u

    assert all(r.passed for r in check_point(case, case.sets["tiny"][0], BF16, "forward", function=function))


def test_seeds_change_the_inputs(case):
    point = case.sets["tiny"][0]
    first, again, other = (check_point(case, point, BF16, "forward", seed=s)[0].error for s in (0, 0, 1))
    assert first == again != other


def test_relative_error():
    ones = torch.ones(4)
    assert relative_error(ones, ones) == 0
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(torch.empty(0), torch.empty(0)) == 0
    assert relative_error(torch.zeros(4), torch.zeros(4)) == 0
    assert relative_error(ones, torch.zeros(4)) == math.inf
    assert math.isnan(relative_error(ones * math.nan, ones))
    assert not math.isfinite(relative_error(ones * math.inf, ones * math.inf))


def test_one_correct_rounding_is_never_too_much():
    x = torch.randn(1000, dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, BF16):
        assert relative_error(x.to(dtype), x) < rounding_floor(dtype)


def test_poison_fills_fresh_memory_and_ends():
    for mode in (0, 1):
        torch.set_deterministic_debug_mode(mode)
        try:
            with poisoned():
                assert torch.empty(8).isnan().all()
                assert torch.empty(8, dtype=BF16).isnan().all()
            assert torch.get_deterministic_debug_mode() == mode
        finally:
            torch.set_deterministic_debug_mode(0)


def test_tolerances_have_reasons():
    rows = tolerance_rows()
    assert {row[0] for row in rows} == {c.name for c in find_cases()}
    assert all(ceiling >= 0 and len(reason) > 10 for *_, ceiling, reason in rows)  # 0: the very bits
    assert all(c <= 5e-3 for op, what, dtype, c, _ in rows if (op, what, dtype) == ("rms_norm", "forward", "fp16"))
    sums = [c for op, what, dtype, c, _ in rows if (op, what, dtype) == ("add_rms_norm", "u (forward)", "fp16")]
    assert sums
    assert sums[0] <= 1e-3


class TestCommand:
    @pytest.fixture(autouse=True)
    def _wide(self, monkeypatch):
        monkeypatch.setattr(cli.console, "_width", 200)

    @staticmethod
    def run(*args):
        return CliRunner().invoke(cli.app, ["check", *args])

    def test_it_passes(self, tmp_path):
        file, table = tmp_path / "deep" / "check.json", tmp_path / "deep" / "check.csv"
        files = ("--json", str(file), "--csv", str(table))
        result = self.run("silu_mul", "rms_norm", "--set", "tiny", "--dtype", "bf16", *files)
        assert result.exit_code == 0, result.output
        found = json.loads(file.read_text())
        assert result.output.rstrip().endswith(f"{found['passed']}/{found['total']} passed")
        assert found["passed"] == found["total"] == len(found["rows"]) > 0
        assert {row["op"] for row in found["rows"]} == {"silu_mul", "rms_norm"}
        assert {row["dtype"] for row in found["rows"]} == {"bf16"}
        assert {row["direction"] for row in found["rows"]} == {"forward", "backward"}
        wanted = {"op", "shape", "options", "dtype", "direction", "output", "error", "tolerance", "passed", "message"}
        assert all(wanted | {"abs_error"} <= row.keys() for row in found["rows"])
        lines = list(csv.DictReader(table.open()))
        assert [(r["op"], float(r["abs_error"])) for r in lines] == [(r["op"], r["abs_error"]) for r in found["rows"]]
        assert result.output.count("PASS") == found["passed"]

    def test_it_fails_and_goes_on(self, monkeypatch, tmp_path):
        broken = find_cases(["silu_mul"])[0]
        broken = dataclasses.replace(broken, function=lambda gate, up: gate * up)
        sound = find_cases(["rms_norm"])[0]
        monkeypatch.setattr(cases, "find_cases", lambda names: [broken, sound])
        file = tmp_path / "check.json"
        result = self.run("--set", "tiny", "--dtype", "fp32", "--json", str(file))
        assert result.exit_code == 1
        found = json.loads(file.read_text())
        assert {row["op"] for row in found["rows"] if not row["passed"]} == {"silu_mul"}
        assert {row["op"] for row in found["rows"] if row["passed"]} == {"rms_norm"}
        assert f"{found['passed']}/{found['total']} passed" in result.output
        assert "FAIL silu_mul 4x128 fp32 forward y: error" in result.output

    def test_an_unknown_op_is_a_usage_error(self):
        result = self.run("rms_nrom")
        assert result.exit_code == 2
        assert "unknown op rms_nrom" in result.output
        assert all(c.name in result.output for c in find_cases())

    def test_an_unknown_set_is_a_usage_error(self):
        result = self.run("--set", "huge")
        assert result.exit_code == 2
        assert all(name in result.output for name in SETS)

    def test_an_unknown_dtype_is_a_usage_error(self):
        assert self.run("--dtype", "fp8").exit_code == 2

    def test_real_sizes_are_said_to_take_the_interpreter_long(self):
        console = Console(file=io.StringIO(), width=200)
        check_report.check_all([toy()], ["tiny"], [torch.float32], console)
        assert not console.file.getvalue()
        check_report.check_all([toy()], ["tiny", "llm"], [torch.float32], console)
        assert ("llm: real sizes" in console.file.getvalue()) == (runtime.MODE is runtime.Mode.INTERPRETER)

    def test_a_set_that_a_case_lacks_is_named(self):
        result = self.run("rope", "rms_norm", "--set", "tiny", "--set", "softmax", "--dtype", "fp8")
        assert result.exit_code == 2
        result = self.run("silu_mul", "--set", "tiny", "--set", "gemm", "--dtype", "fp32")
        assert result.exit_code == 0
        assert "silu_mul has no set gemm; it has tiny, edge" in result.output

    def test_nothing_to_check_is_a_usage_error(self):
        result = self.run("silu_mul", "--set", "gemm")
        assert result.exit_code == 2
        assert "silu_mul has gemm" in result.output.replace("\n", " ")

    def test_set_names_are_those_of_the_registry(self):
        assert tuple(s.value for s in cli.SetName) == SETS
        assert {d.value for d in cli.DType} == set(checking.DTYPES)
