"""`rooftile bench training`: forward and backward in one call, its rows, its table and its charts."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console
from toys import CPU, SMALL, TableClock, bench, cells_of, double, measured, of, table, toy
from typer.testing import CliRunner

from rooftile.bench import rows, run, training
from rooftile.bench.info import machine
from rooftile.bench.measure import bind, draw
from rooftile.bench.rows import OURS, TOGETHER
from rooftile.bench.variants import Variant
from rooftile.cases import Point, Training, all_cases
from rooftile.cli import app

pytestmark = pytest.mark.nightly

F32 = torch.float32


def total(x):
    """A loss."""
    return (x * x).sum()


def loss_case(function=total, *peers, **fields):
    return dataclasses.replace(toy(function, *peers, name="total"), reference=total, eager=total, **fields)


def bound(function, case, mutates=()):
    given = draw(case, SMALL, F32, TOGETHER, CPU, seed=0)
    return bind(Variant("peer", function, mutates), case, SMALL, TOGETHER, given), given.tensors["x"]


# Forward and backward in one call


def test_each_call_builds_a_graph_and_frees_it():
    graphs = []

    def loss(x):
        y = total(x)
        graphs.append(y)
        return y

    call, x = bound(loss, loss_case().together())
    for _ in range(2):
        (dx,) = call()
        assert torch.equal(dx, 2 * x)
    assert len(graphs) == 2
    with pytest.raises(RuntimeError, match="second time"):
        graphs[-1].backward()


def test_outputs_other_than_losses_get_drawn_gradients():
    call, x = bound(double, toy().together())
    (dx,) = call()
    assert dx.shape == x.shape
    assert dx.unique().numel() > 1


def test_an_implementation_that_overwrites_its_input_has_one_of_its_own():
    def squash(x):
        y = total(x)
        x.data.mul_(0.5)
        return y

    call, x = bound(squash, loss_case().together(), mutates=("x",))
    before = x.clone()
    for scale in (0.5, 0.25):  # the graph saved what is then overwritten
        (dx,) = call()
        torch.testing.assert_close(dx, 2 * scale * before)
    assert torch.equal(x, before)


def test_only_the_gradients_of_training_are_asked_for():
    case = all_cases()["kl_div"].together()
    point = Point("4x16", {"rows": 4, "cols": 16}, {"reduction": "batchmean"})
    given = draw(case, point, F32, TOGETHER, CPU, seed=0)
    asked = []

    def loss(input, target, **options):
        asked.append((input.requires_grad, target.requires_grad))
        return torch.nn.functional.kl_div(input, target, **options)

    assert len(bind(Variant("peer", loss), case, point, TOGETHER, given)()) == 1
    assert asked == [(True, False)]


def test_a_loss_reads_its_inputs_once_and_other_ops_twice():
    point = Point("4x16", {"rows": 4, "cols": 16}, {"reduction": "batchmean"})
    assert all_cases()["kl_div"].together().nbytes(point, 4, "backward") == 3 * 4 * 4 * 16
    assert toy().together().nbytes(SMALL, 4, "forward") == 2 * toy().nbytes(SMALL, 4, "forward")
    own = loss_case(training=Training(("x",), lambda p, itemsize: 7, lambda p: 8)).together()
    assert (own.nbytes(SMALL, 4, "forward"), own.flops(SMALL, "backward")) == (7, 8)


def test_rows_of_both_together_are_checked_by_their_gradients(monkeypatch):
    def wrong(x):
        return total(x) + 0.1 * x.detach().sum() * x.sum()

    case = loss_case(total, ("right", total), ("wrong", wrong), training=Training(("x",), lambda p, n: 64, lambda p: 8))
    wanted = {"dtypes": [F32], "directions": (TOGETHER,), "peers": ["right", "wrong"]}
    code, found, _ = bench(monkeypatch, case, TableClock({}), **wanted)
    assert code == 0
    assert {r.direction for r in found} == {TOGETHER}
    assert (of(found, "wrong").status, of(found, "right").status) == ("FAIL", "ok")
    assert (of(found, OURS).nbytes, of(found, OURS).peak_bytes, of(found, OURS).extra_bytes) == (64, 4096, 4096)


def test_a_row_says_that_its_input_is_overwritten(monkeypatch):
    case = loss_case()
    case = dataclasses.replace(
        case, peers=(dataclasses.replace(toy(double, ("peer", total)).peers[0], mutates=("x",)),)
    )
    _, found, _ = bench(monkeypatch, case, TableClock({}), dtypes=[F32], directions=(TOGETHER,), peers=["peer"])
    assert of(found, "peer").message.startswith("overwrites x")
    assert not of(found, OURS).message


def test_the_reference_is_computed_once_for_all_implementations(monkeypatch):
    """Even if one overwrites what it is given: the next is compared with the same inputs."""
    computed = []

    def reference(x):
        computed.append(x.dtype)
        return double(x)

    def overwrites(x):
        return x.mul_(2)

    case = dataclasses.replace(toy(double, ("first", overwrites), ("second", double)), reference=reference)
    clock = TableClock({})
    _, found, _ = bench(monkeypatch, case, clock, dtypes=[F32], directions=["forward"], peers=["first", "second"])
    assert [(row.status, row.max_error) for row in found] == [("ok", 0.0)] * 3 * len(case.sets["llm"][:1])
    assert computed == [torch.float64]


def test_a_check_that_does_not_fit_is_made_of_fewer_rows(monkeypatch):
    seen = []

    def reference(x):
        seen.append(x.shape[0])
        if x.dtype == torch.float64 and x.shape[0] > 2:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        return double(x)

    case = dataclasses.replace(toy(), reference=reference)
    known = run.truths(case, SMALL, F32, "forward", CPU)
    assert run.judge(Variant(OURS, double), known).status == "ok"
    computed = list(seen)
    assert computed[-1] == 1
    assert run.judge(Variant("peer", double), known).status == "ok"
    assert seen == computed  # what did not fit is not tried again

    of_one_size = dataclasses.replace(SMALL, dims={"cols": 16})
    assert [truth.point for truth in run.truths(case, of_one_size, F32, "forward", CPU)] == [of_one_size]


# The command


def console():
    return Console(file=io.StringIO(), width=200)


def test_losses_run_in_the_interpreter():
    out = console()
    assert training.run_parts(["losses"], out, ops=["jsd"]) == 0
    shown = out.file.getvalue()
    assert "jsd forward+backward (interpreter, not a measurement)" in shown
    assert "fp32" in shown
    assert "bf16" in shown


def test_options_choose_the_parts_that_they_are_of(monkeypatch):
    ran = []
    monkeypatch.setattr(training, "losses", lambda *given: ran.append("losses") or 0)
    monkeypatch.setattr(training.steps, "run", lambda *given, **more: ran.append("steps") or 0)
    assert training.run_parts((), console(), models=["tiny"], batch=None) == 0
    assert ran == ["steps"]


def test_every_loss_of_the_suite_has_bytes_of_its_own():
    found = [case for case in all_cases().values() if training.SUITE in case.sets]
    assert {"cross_entropy", "linear_cross_entropy", "kl_div", "jsd"} <= {case.name for case in found}
    assert all(case.training is not None for case in found)


def test_the_largest_batches_need_a_gpu():
    found = CliRunner().invoke(app, ["bench", "training", "steps", "--fit"])
    assert found.exit_code == 2
    assert "--fit looks for the largest batches" in " ".join(found.output.split())


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown part loss; known parts: losses, optim"):
        training.run_parts(["loss"], console())
    with pytest.raises(ValueError, match="unknown loss rms_norm; known losses: cross_entropy"):
        training.run_parts(["losses"], console(), ops=["rms_norm"])
    with pytest.raises(ValueError, match="options of steps are given, but the parts to run are losses"):
        training.run_parts(["losses"], console(), models=["tiny"])
    with pytest.raises(ValueError, match="give --results"):
        training.run_parts(["plots"], console())
    with pytest.raises(ValueError, match="the interpreter makes none"):
        training.run_parts(["losses"], console(), tmp_path)


# What is made of the rows


def write(folder, found):
    roofs = {"roof_copy_gbs": 3000.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0}
    meta = {**machine(), **roofs, "gpu": "NVIDIA H100 80GB HBM3"}
    path = folder / "h100" / "training" / f"{found[0].op}.json"
    rows.write_json(path, meta, found)
    return path.parent


def at(cols, impl, us, **fields):
    where = {"op": "kl_div", "direction": TOGETHER, "shape": f"4096x{cols}", "dims": {"rows": 4096, "cols": cols}}
    return measured(impl, us, **{**where, "peak_bytes": 64 << 20, "extra_bytes": 32 << 20, **fields})


def test_the_table_has_memory_beside_time(tmp_path):
    group = [
        at(4096, OURS, 100.0, roof_fraction=0.9),
        at(4096, "liger", 150.0, extra_bytes=16 << 20, message="overwrites logits"),
        at(4096, "quack", None, us_p20=None, us_p80=None, status="absent"),
    ]
    rows.compare(group)
    write(tmp_path, group)
    text = table("training", tmp_path)
    assert cells_of(text, "4096x4096") == [
        ["4096x4096", "100.0 (32.0)", "–", "–", "0.900", "–", "1.500", "liger", "150.0 (16.0)", "absent"]
    ]
    assert "`liger` overwrites logits." in text


def test_charts_are_drawn_again_from_rows(tmp_path):
    pytest.importorskip("matplotlib")
    folder = write(tmp_path, [at(n, impl, n / 10) for n in (4096, 8192, 16384) for impl in (OURS, "liger")])
    training.run_parts(["plots"], console(), tmp_path)
    assert [p.name for p in folder.glob("*.png")] == ["kl_div-forward-backward-bf16.png"]
