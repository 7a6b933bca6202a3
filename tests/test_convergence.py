"""Training on real text: a patched model goes the plain one's way. And `rooftile bench training convergence`."""

import dataclasses
import io
import json

import pytest
import torch
from helpers import nightly_but
from rich.console import Console

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from rooftile import runtime
from rooftile.bench import training
from rooftile.bench.rows import OURS
from rooftile.bench.training import convergence, trajectory
from rooftile.bench.training.convergence import FLOAT32, bounds, jobs_of, verdict
from rooftile.bench.training.trajectory import COMPILE, EAGER, Job
from rooftile.huggingface.families import TITLES

SMALLER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
GPT2 = {"n_embd": 32, "n_inner": 48, "n_head": 2}
INTERPRETED = pytest.mark.skipif(
    runtime.MODE is runtime.Mode.GPU,
    reason="checks what is said of the interpreter's short runs; a GPU's are longer",
)


@pytest.mark.parametrize("name", nightly_but(("llama",), ("llama", "gemma2", "gpt2")))
def test_twenty_steps_in_float32_give_the_plain_losses_and_weights(name, monkeypatch, device):
    title = trajectory.TITLES[name]
    described = trajectory.BY_TITLE[title]
    smaller = dataclasses.replace(described, sizes={**described.sizes, **(GPT2 if name == "gpt2" else SMALLER)})
    monkeypatch.setitem(trajectory.BY_TITLE, title, smaller)
    found = trajectory.compare(Job(name, steps=20, tokens=16, lr=5e-3, ways=(EAGER, OURS)), device)
    run = found["runs"][OURS]
    assert run["status"] == "ok", run
    assert len(run["difference"]) == 20
    assert found["losses"][-1] < found["losses"][0] - 0.25  # it moves: equal runs that learn nothing show little
    assert max(run["loss"], run["logprobs"], run["weights"]) <= FLOAT32
    assert run["same_best"] == 1.0


def test_runs_of_one_seed_draw_the_same_weights_and_text_and_no_dropout():
    job = Job("gpt2", tokens=8)
    cpu = torch.device("cpu")
    first, again, other = (trajectory.build(j, cpu) for j in (job, job, dataclasses.replace(job, seed=1)))
    weights = [list(model.parameters()) for model in (first, again, other)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])
    assert {m.p for m in first.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    ids = trajectory.batches(job, cpu)
    assert ids.shape == (3, 1, 8)
    assert torch.equal(ids, trajectory.batches(job, cpu))
    assert not torch.equal(ids[0], ids[1])
    wide = trajectory.configuration(Job("gemma3", width=4, depth=2))
    assert (wide.hidden_size, wide.head_dim, wide.num_hidden_layers, len(wide.layer_types)) == (256, 64, 4, 4)


def test_all_families_run_on_a_gpu_in_both_dtypes_and_one_at_real_size():
    jobs = jobs_of((), measures=True)
    assert {job.title for job in jobs} == {*TITLES, "llama-3.2-1b"}
    assert len(jobs) == 2 * len(TITLES) + 1
    assert jobs[0].real
    assert [(job.name, job.dtype) for job in jobs_of(["t5"], measures=False)] == [("t5", "fp32"), ("t5", "bf16")]
    with pytest.raises(ValueError, match="unknown family lama; known families: llama, qwen2"):
        jobs_of(["lama"], measures=True)


# Verdicts and files, of runs that were not made


def made(job, ours=1e-3, compiled=1e-3, **fields):
    def run(off):
        figures = dict.fromkeys(("loss", "logprobs", "weights", "update"), off)
        return {"status": "ok", **figures, "same_best": 1.0, "difference": [0.0, -off, 9 * off, off]}

    runs = {COMPILE: run(compiled), OURS: run(ours)}
    return {**dataclasses.asdict(job), "parameters": 10**6, "losses": [5.5, 3.0], "seconds": {}, "runs": runs} | fields


def verdict_of(found):
    """Of a job alone: there are no families to compare with."""
    return verdict(found, {})


def test_bfloat16_is_bounded_by_what_compile_differs_by():
    job = Job("llama", "bf16")
    assert verdict_of(made(job, 2.4e-3)) == "ok"
    assert verdict_of(made(job, 2.6e-3)) == "FAIL: loss_median differs by 2.6e-03, at most 2.5e-03 expected"
    assert verdict_of(made(job, float("nan"))).startswith("FAIL: loss_median differs by nan")
    for name, bound in (("logprobs", 7.5), ("weights", 3.3)):
        run = made(job)
        run["runs"][OURS][name] = (bound + 0.1) * 1e-3
        assert verdict_of(run) == f"FAIL: {name} differs by {bound + 0.1:.1f}e-03, at most {bound}e-03 expected"
    nothing = made(job)
    nothing["runs"][COMPILE] = {"status": "error", "message": "a graph broke"}
    assert verdict_of(nothing) == "FAIL: torch.compile gave no bound: a graph broke"


def test_where_compile_rounds_the_loss_as_eager_does_rounding_is_the_unit():
    found = made(Job("bert", "bf16"), 4e-3, 4e-3)
    found["runs"][COMPILE]["difference"] = [0.0, 0.0, 0.0, 7e-3]
    assert convergence.units(found, {})[convergence.MEDIAN] == 2.0**-9
    assert verdict_of(found) == "ok"


def test_a_lucky_run_of_compile_bounds_nothing_that_the_families_allow():
    rest = [made(Job(name, "bf16")) for name in list(trajectory.TITLES)[1:8]]
    lucky = made(Job("llama", "bf16"), 1.2e-3, 1e-6)
    usual = convergence.typical([lucky, *rest])
    assert usual["weights"] == pytest.approx(1e-3 ** (7 / 8) * 1e-6 ** (1 / 8))
    assert verdict_of(lucky).startswith("FAIL")
    assert verdict(lucky, usual).startswith("FAIL")  # 2.5 times 4.2e-4
    assert verdict(made(Job("llama", "bf16"), 1e-3, 1e-6), usual) == "ok"
    assert convergence.typical(rest) == {}  # too few
    float32 = made(Job("llama", "fp32"), 3e-3, 1e-6)
    assert verdict(float32, usual).startswith("FAIL: loss")


@INTERPRETED
@pytest.mark.parametrize(("factor", "code"), [(1.15, 0), (1.45, 1)])
def test_bfloat16_runs_of_all_families_are_bounded_in_the_mean(factor, code):
    out = Console(file=io.StringIO(), width=200)
    names = list(trajectory.TITLES)[:8]
    assert (
        convergence.run(names, out, launch=lambda job: made(job, factor * 1e-3 if job.dtype == "bf16" else 0.0)) == code
    )
    shown = " ".join(out.file.getvalue().split())
    assert f"geometric means: loss_median {factor:.2f} (at most 1.39; 0 of 8 are 1 or less)" in shown
    assert convergence.mean_ratios([made(Job(name, "bf16"), 3e-3) for name in names[:7]]) == {}


def test_float32_is_bounded_by_a_number_or_by_compile_where_that_is_more():
    job = Job("llama", "fp32")
    assert verdict_of(made(job, 0.9e-4, 0.0)) == "ok"
    assert verdict_of(made(job, 1.1e-4, 0.5e-4)).startswith("FAIL: loss")
    assert bounds(made(job, compiled=0.3), {}) == dict.fromkeys(("loss", "logprobs", "weights"), 0.6)


def test_a_run_that_raised_or_learned_nothing_fails():
    job = Job("llama")
    assert verdict_of(made(job, losses=[], message="exit code 1")) == "error: exit code 1"
    assert verdict_of(made(job, losses=[3.0, 3.0], steps=20)).startswith("FAIL: eager's loss goes")
    raised = made(job)
    raised["runs"][OURS] = {"status": "error", "message": "RuntimeError: no"}
    assert verdict_of(raised) == "error: RuntimeError: no"


@pytest.mark.nightly  # the benchmark's
def test_runs_of_a_commit_join_one_small_file_with_its_charts(tmp_path):
    pytest.importorskip("matplotlib")
    meta = {"gpu": "NVIDIA H100 80GB HBM3", "commit": "abc", "transformers": "5"}
    meta |= dict.fromkeys(("driver", "torch", "triton", "rooftile", "python", "peers"), "1")
    path = tmp_path / "h100" / convergence.FOLDER / "convergence.json"
    every = jobs_of((), measures=True)
    long = {"losses": [5.54321] * 100}
    found = [made(job, **long) for job in every]
    for each in found:
        for run in each["runs"].values():
            run["difference"] = [-1.23456789e-5] * 100
    convergence.write(path, meta, found[:3])
    assert len(convergence.write(path, meta, found[1:])) == len(every)
    assert path.stat().st_size < 200_000
    assert len(convergence.write(path, {**meta, "commit": "other"}, found[:2])) == 2
    convergence.write(path, meta, [found[0], *found[-2:]])
    out = Console(file=io.StringIO(), width=200)
    assert training.run_parts(["plots"], out, tmp_path) == 0
    names = ["convergence-bf16.png", "convergence-fp32.png", "convergence-llama-3.2-1b-bf16.png"]
    assert sorted(p.name for p in path.parent.glob("*.png")) == names


@INTERPRETED
def test_the_command_trains_in_processes_and_reports(monkeypatch, tmp_path):
    launched = []

    def launch(job):
        launched.append(job)
        return made(job, 1.0 if job.dtype == "bf16" else 1e-9)

    out = Console(file=io.StringIO(), width=200)
    assert convergence.run(["qwen2_moe"], out, launch=launch) == 1
    shown = out.file.getvalue()
    assert len(launched) == 2
    assert "Qwen2-MoE fp32: trained, after" in shown
    assert "qwen2_moe bf16: FAIL: loss_median differs by 1.0e+00" in shown
    with pytest.raises(ValueError, match="--results is for measurements"):
        convergence.run((), out, tmp_path)


@INTERPRETED
@pytest.mark.nightly  # torch.compile takes most of it
def test_a_process_trains_three_ways():
    found = convergence.in_child(Job("llama", "bf16", steps=2, tokens=16))
    assert [run["status"] for run in found["runs"].values()] == ["ok", "ok"], found
    assert json.loads(json.dumps(found)) == found


@pytest.mark.nightly  # it imports PyTorch again
def test_a_process_that_dies_is_an_error():
    assert verdict_of(convergence.in_child(Job("nothing"))).startswith("error: exit code 1: KeyError")
