"""`rooftile bench training steps`: whole training steps, each implementation in a process of its own."""

import dataclasses
import io
import json
import math
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from toys import cells_of, measured, table

from rooftile.bench import rows
from rooftile.bench.info import machine
from rooftile.bench.rows import OURS, Row
from rooftile.bench.training import plots, steps, worker
from rooftile.bench.training.steps import BATCH, BATCHES, IMPLS, STEP
from rooftile.bench.workloads import TRAINED

pytestmark = pytest.mark.nightly

pytest.importorskip("transformers")
TINY = dict(TRAINED["tiny"])
ROOFS = {"roof_copy_gbs": 3000.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0}
H100 = {**machine(), **ROOFS, "gpu": "NVIDIA H100 80GB HBM3"}


def run(models, impls, launch=worker.do, **options):
    console = Console(file=io.StringIO(), width=200)
    code = steps.run(models, impls, console, launch=launch, **options)
    return code, console.file.getvalue()


# One process


def test_ours_trains_as_the_plain_model_does():
    code, shown = run(["tiny"], ["eager", OURS])
    assert code == 0, shown
    assert "tokens/s, losses within" in shown
    assert "interpreter, not a measurement" in shown


def test_adapters_in_the_gemm_train_as_the_plain_model_s_do():
    pytest.importorskip("peft")
    code, shown = run(["tiny-lora"], ["eager", f"{OURS} lora"])
    assert code == 0, shown
    assert f"{OURS} lora: " in shown


def test_adapters_train_alone():
    pytest.importorskip("peft")
    job = worker.Job("eager", TINY, lora=True, tokens=8)
    trainer = worker.Trainer(job, torch.device("cpu"))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.step(0)
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert moved
    assert all("lora_" in name for name in moved)
    assert all(p.dtype == torch.bfloat16 for p in trainer.model.parameters())


def test_operations_of_frozen_weights_are_counted_without_their_gradients():
    config = type("Config", (), {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1})()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    attention = int(3.5 * 4 * (3 * 4 // 2) * 4)
    assert worker._flops(model, config, 3) == 6 * 3 * 64 + attention
    model[0].weight.requires_grad_(False)
    assert worker._flops(model, config, 3) == (4 + 6) * 3 * 32 + attention
    config.layer_types, config.sliding_window = ["sliding_attention"], 2
    assert worker._flops(model, config, 3) == (4 + 6) * 3 * 32 + int(3.5 * 4 * 5 * 4)


def test_a_library_that_is_not_there_is_absent(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel.transformers", None)
    found = worker.do(worker.Job("liger", TINY))
    assert found["status"] == "absent"
    assert "not installed" in found["message"]


@pytest.mark.parametrize("most", [0, 1, 2, 5, 8, 31])
def test_the_largest_batch_is_found(monkeypatch, most):
    """From any batch that fits, as one does that fits into less memory."""
    trainer = object.__new__(worker.Trainer)
    monkeypatch.setattr(worker.Trainer, "_fits", lambda self, batch: asked.append(batch) or batch <= most)
    for low in range(min(most, 20) + 1):
        asked = []
        assert trainer._largest_batch(low, most=20) == min(most, 20)
        assert len(asked) == len(set(asked)) <= 10
        assert all(low < batch <= 20 for batch in asked)


def test_a_timeline_is_the_running_sum_of_allocations_and_frees():
    events = [
        {"action": "alloc", "size": 4 << 20, "time_us": 1_000_100},
        {"action": "segment_alloc", "size": 64 << 20, "time_us": 1_000_150},
        {"action": "free_requested", "size": 4 << 20, "time_us": 1_000_200},
        {"action": "free_completed", "size": 4 << 20, "time_us": 1_000_200},
    ]
    found = worker.sampled(events, 2 << 20, 1.0)
    assert found["mib"] == [6.0, 2.0]
    assert found["ms"] == pytest.approx([0.1, 0.2])
    many = worker.sampled(events[:1] * 1000, 0, 1.0)
    assert len(many["mib"]) <= worker.POINTS
    assert many["mib"][-1] == 4000.0


def test_each_job_has_a_process_of_its_own():
    """One that dies is an error, and the next goes on."""
    with steps.Workers() as workers:
        found = workers(dataclasses.replace(worker.Job("eager"), config={}))
        assert found["status"] == "error"
        assert "KeyError" in found["message"]
        waiting = workers._next
        assert workers(worker.Job("liger", TINY, tokens=16, warmup=1, steps=1))["status"] in ("ok", "absent")
        assert waiting.returncode == 0
        waiting = workers._next
    assert waiting.poll() is not None


@pytest.fixture
def sleepers(monkeypatch):
    """Workers that do nothing, and start another process, which holds their pipes."""
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '20']); time.sleep(20)"

    def start(self):
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    started = []
    monkeypatch.setattr(steps.Workers, "_start", start)
    return started


def test_a_process_that_takes_too_long_is_an_error(sleepers, monkeypatch):
    monkeypatch.setattr(steps, "LIMIT_S", 0.5)
    began = time.monotonic()
    with steps.Workers() as workers:
        assert workers(worker.Job("eager")) == {"status": "error", "message": "not done after 0.5 s"}
    assert time.monotonic() - began < 10
    assert all(process.poll() is not None for process in sleepers)


def test_an_interrupt_ends_the_processes(sleepers, monkeypatch):
    def interrupted(self, *_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    workers = steps.Workers()
    with workers, pytest.raises(KeyboardInterrupt):
        workers(worker.Job("eager"))
    assert [process.poll() is not None for process in sleepers] == [True, True]


# The rows


def step_of(us, losses, **more):
    return {"status": "ok", "us": [us] * 3, "losses": losses, "flops": 10**12, "first_step_s": 1.0, "left": [], **more}


def launched(results):
    """Gives each implementation its result, and the machine its roofs."""
    return lambda job: H100 if job.impl == "machine" else results[job.impl]


def test_rows_compare_times_and_losses(monkeypatch, tmp_path):
    monkeypatch.setattr(steps.runtime, "MODE", steps.runtime.Mode.GPU)
    losses = [12.0, 11.9, 11.8, 11.7, 11.0, 10.9, 10.8, 10.7]
    far = [12.0, 11.9, 11.8, 11.0, *losses[4:]]
    results = {
        "eager": step_of(300.0, losses, peak_bytes=50 << 30),
        "liger": step_of(200.0, [*far[:3], 11.71, *losses[4:]], peak_bytes=25 << 30),
        "compile": {"status": "error", "message": "out of memory: tried"},
        OURS: step_of(100.0, losses, peak_bytes=20 << 30),
        f"{OURS} attention": step_of(90.0, far, peak_bytes=20 << 30),
    }
    code, shown = run(["llama-3.2-1b"], list(results), launched(results), results=tmp_path)
    assert code == 1  # the last
    meta, found = rows.read_json(tmp_path / "h100" / "training" / "train_step-llama-3.2-1b.json")
    by_impl = {row.impl: row for row in found}
    assert by_impl[f"{OURS} attention"].status == "FAIL"
    assert "losses differ by" in by_impl[f"{OURS} attention"].message
    ours = by_impl[OURS]
    assert (ours.us, ours.speedup_vs_eager, ours.ratio_to_best_peer) == (100.0, 3.0, 2.0)
    assert ours.tokens_per_s == pytest.approx(4 * 4096 / 1e-4, rel=1e-4)
    assert ours.tflops == pytest.approx(10**4)
    assert meta["losses"][OURS] == "12 11.9 11.8 11.7 11 10.9 10.8 10.7"
    text = table("training-steps", tmp_path)
    (line,) = cells_of(text, "llama-3.2-1b B4 T4096 | rooftile  ")
    assert line[1:8] == [OURS, "0.1000", "163840000", "3.00", "2.00", "20.0", ratio_text(ours)]
    assert "out of memory: tried" in text
    assert table("training", tmp_path) == table("training", tmp_path / "none")
    assert "llama-3.2-1b B4 T4096 rooftile: 0.1 ms" in shown


# Of the committed run: eager, and Liger, which is the farthest off in its second pass.
EAGER = [12.173, 12.169, 12.174, 12.162, 11.048, 10.694, 10.592, 10.289]
LIGER = [12.173, 12.169, 12.174, 12.162, 11.046, 10.688, 10.594, 10.284]


def verdict(losses, expected=EAGER, **options):
    row = Row(STEP, "step", "tiny", "bf16", OURS, dims={"batch": 1, "tokens": 8})
    steps.fill(row, step_of(100.0, losses), expected, None, **options)
    return row


def test_losses_that_do_not_follow_the_updates_are_wrong():
    """Gradients of zero give the first pass again; negated ones go up as far as the right ones go down."""
    assert verdict(LIGER).status == verdict(EAGER, None).status == "ok"
    zero = verdict(EAGER[:4] * 2)
    assert zero.status == "FAIL"
    assert "124% of their fall" in zero.message
    negated = [*EAGER[:4], *(2 * a - b for a, b in zip(EAGER[:4], EAGER[4:], strict=True))]
    assert verdict(negated).status == "FAIL"
    assert (
        verdict([*EAGER[:4], *(b + 0.2 * (a - b) for a, b in zip(EAGER[:4], EAGER[4:], strict=True))]).status == "FAIL"
    )
    assert verdict([*EAGER[:7], float("nan")]).status == "FAIL"


def test_adapters_added_before_the_rounding_may_learn_more_and_not_less():
    further, less = (
        [*EAGER[:4], *(a - share * (a - b) for a, b in zip(EAGER[:4], EAGER[4:], strict=True))] for share in (2, 0.8)
    )
    assert verdict(further).status == "FAIL"
    assert verdict(further, adapted=True).status == "ok"
    assert verdict(less, adapted=True).status == verdict(EAGER[:4] * 2, adapted=True).status == "FAIL"
    assert verdict([1.02 * loss for loss in further], adapted=True).status == "FAIL"
    assert verdict([*further[:7], float("nan")], adapted=True).status == "FAIL"


def test_compiled_adapters_may_learn_more_and_a_compiled_model_may_not(monkeypatch):
    """torch.compile makes an addmm of a layer and its adapter; Liger computes them as PEFT does."""
    monkeypatch.setattr(steps.runtime, "MODE", steps.runtime.Mode.GPU)
    further = [*EAGER[:4], *(2 * b - a for a, b in zip(EAGER[:4], EAGER[4:], strict=True))]
    results = {"eager": step_of(3.0, EAGER), "compile": step_of(2.0, further), "liger": step_of(1.0, further)}
    shown = {model: run([model], list(results), launched(results))[1] for model in ("llama-3-8b-lora", "llama-3.2-1b")}
    assert [f"T4096 {impl}: FAIL" in shown["llama-3-8b-lora"] for impl in results] == [False, False, True]
    assert [f"T4096 {impl}: FAIL" in shown["llama-3.2-1b"] for impl in results] == [False, True, True]


def test_a_plain_model_that_learns_nothing_is_wrong():
    assert verdict(EAGER[:4] * 2, None).message.endswith("do not fall from one pass over the batches to the next")


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_process_with_wrong_gradients_has_no_time(factor, monkeypatch):
    plain = worker.do(dataclasses.replace(worker.Job("eager", TINY), tokens=16, warmup=BATCHES, steps=1))
    step = torch.optim.AdamW.step

    def scaled(self):
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(factor)
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", scaled)
    found = worker.do(dataclasses.replace(worker.Job("eager", TINY), tokens=16, warmup=BATCHES, steps=1))
    row = Row(STEP, "step", "tiny", "bf16", OURS, dims={"batch": 1, "tokens": 16})
    steps.fill(row, found, plain["losses"], None)
    assert (row.status, row.us) == ("FAIL", None)


def ratio_text(row: Row) -> str:
    return f"{row.roof_fraction:.2f}"


def test_the_largest_batches_have_a_row_for_each_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(steps.runtime, "MODE", steps.runtime.Mode.GPU)
    caps = []

    def launch(job):
        if job.impl == "machine":
            return H100
        caps.append(job.caps)
        return {"status": "ok", "batches": [3, 5, 9] if job.impl == OURS else [1, 2, 4]}

    code, _ = run((), ["eager", "compile", OURS], launch, results=tmp_path, fit=True)
    assert code == 0
    assert caps == 2 * [[16 << 30, 24 << 30, math.inf]]
    _, found = rows.read_json(tmp_path / "h100" / "training" / "train_batch-llama-3.2-1b.json")
    assert {row.op for row in found} == {BATCH}
    text = table("training-steps", tmp_path)
    assert cells_of(text, "llama-3.2-1b T1024 16 GiB") == [["llama-3.2-1b T1024 16 GiB", "1", "3"]]


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown model llama; known: llama-3"):
        run(["llama"], [])
    with pytest.raises(ValueError, match="unknown implementation quack"):
        run([], ["quack"])
    with pytest.raises(ValueError, match="the interpreter makes none"):
        run([], [], results=tmp_path)


def test_every_model_has_a_configuration():
    assert {w.model for w in steps.WORKLOADS.values()} == set(TRAINED)
    assert set(steps.DEFAULT) < set(steps.DEFAULT_LORA) < set(IMPLS)


# Charts


def test_steps_and_memory_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    place = {"op": STEP, "direction": "step", "shape": "tiny B1 T8", "tokens_per_s": 5.0, "peak_bytes": 1 << 30}
    line = {"ms": "0 1 2", "mib": "1 3 2", "phases": {"forward": 1.0}}
    meta = {**H100, "model": "tiny", "timeline": {OURS: line}}
    path = tmp_path / "train_step-tiny.json"
    rows.write_json(path, meta, [measured(OURS, 1.0, **place), measured("liger", 2.0, **place)])
    assert [p.name for p in plots.draw(path)] == ["train_step-tiny.png", "train_step-tiny-memory.png"]
    fits = [measured(OURS, None, op=BATCH, us_p20=None, us_p80=None, dims={"batch": 2})]
    path = tmp_path / "train_batch-tiny.json"
    rows.write_json(path, {**H100, "model": "tiny"}, fits)
    assert [p.name for p in plots.draw(path)] == ["train_batch-tiny.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("train_step-tiny.png", "train_batch-tiny.png"))
    json.loads(path.read_text())
