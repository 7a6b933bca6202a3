"""Patched models under FSDP2 and DDP: two processes over gloo have the losses and gradients of one process."""

import gc
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import interpreted, on_two_ranks
from tiny_models import assert_same_gradients, build, tokens

import rooftile

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_parallel.py"
pytestmark = interpreted
CPU = torch.device("cpu")


def example():
    spec = importlib.util.spec_from_file_location("train_parallel", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


SIZE = ["--steps", "2", "--batch", "2", "--length", "24"]


def first_gradients(parallel, rank, ranks):
    """Of the example's first step."""
    module = example()
    options = module.arguments(["--parallel", parallel, *SIZE])
    model = module.parallelize(module.build(options, CPU), options)
    loss = module.loss_of(model, module.batches(options, rank, ranks)[0], options)
    loss.backward()
    return loss.detach(), {n.removeprefix("module."): whole(p.grad) for n, p in model.named_parameters()}


def every_kernel(parallel, rank, ranks):
    """Attention and GEMMs too, with activations recomputed."""
    model, ids = build("Qwen3").train(), tokens(12, batch=2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rooftile.patch(model, attention=True, linear=True)
    options = example().arguments(["--parallel", parallel])
    model = example().parallelize(model, options)
    ids = ids[rank * 2 // ranks : (rank + 1) * 2 // ranks]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}


def _rank(rank, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    results = {}
    for name, run, parallel in (
        ("fsdp", first_gradients, "fsdp"),
        ("ddp", first_gradients, "ddp"),
        ("every kernel", every_kernel, "fsdp"),
    ):
        loss, grads = run(parallel, rank, 2)
        torch.distributed.all_reduce(loss)
        results[name] = loss / 2, grads
    if rank == 0:
        torch.save(results, f"{path}/results")
    gc.collect()
    torch.distributed.destroy_process_group()


def test_two_ranks_have_the_gradients_of_one(tmp_path):
    on_two_ranks(_rank, tmp_path)
    results = torch.load(tmp_path / "results")
    one = first_gradients("none", 0, 1)
    for name, expected in {"fsdp": one, "ddp": one, "every kernel": every_kernel("none", 0, 1)}.items():
        loss, grads = results[name]
        torch.testing.assert_close(loss, expected[0], msg=name)
        assert_same_gradients(grads, expected[1])


@pytest.mark.nightly
def test_the_example_under_torchrun_prints_the_losses_of_one_process():
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLE, *SIZE]
    found = subprocess.run(launch, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    module = example()
    losses = module.train(module.arguments(["--parallel", "none", *SIZE]), 0, 1, CPU)
    assert re.findall(r"step \d+: loss ([\d.]+)", found.stdout) == [f"{loss:.4f}" for loss in losses]
