"""Patched models under FSDP2 and DDP: two processes over gloo have the losses and gradients of one process."""

import gc
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import Calls, interpreted, on_two_ranks
from tiny_models import assert_same_gradients, build, tokens

import rooftile
from rooftile.byte_model import library_text
from rooftile.demo import byte_model

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

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


def trained(parallel, rank, ranks):
    """The losses of a Trainer with the callback, and how often the fused head computed one of the labels that count."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    more, environment = {}, {}
    if ranks > 1:
        more["ddp_backend"] = "gloo"
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    if parallel == "fsdp":
        more |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    texts = [{"input_ids": ids, "labels": ids.where(torch.arange(8) > i, -100)} for i, ids in enumerate(tokens(8, 8))]
    values = {name: str(value) for name, value in environment.items()}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, values):
        arguments = transformers.TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=4 // ranks, logging_steps=1, learning_rate=1e-2,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, **more,
        )  # fmt: skip
        if parallel == "fsdp":
            assert arguments.device.type == "cpu"
            PartialState().distributed_type = DistributedType.MULTI_GPU  # else accelerate takes DDP for CPUs
        trainer = transformers.Trainer(
            build("Llama", num_hidden_layers=1), arguments, train_dataset=texts, callbacks=[rooftile.PatchCallback()]
        )
        with Calls() as ops:
            trainer.train()
        kind = type(trainer.model_wrapped).__name__
        AcceleratorState._reset_state(reset_partial_state=True)
    assert kind.startswith({"none": "Llama", "ddp": "DistributedData", "fsdp": "FSDP"}[parallel])
    fused = sum(op._schema.name == "rooftile::linear_cross_entropy" and args[-2] >= 0 for op, args, _ in ops.calls)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], fused


GRADIENTS = {
    "fsdp": (first_gradients, "fsdp"),
    "ddp": (first_gradients, "ddp"),
    "every kernel": (every_kernel, "fsdp"),
}


def _rank(rank, path, gradients, trainers):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    results = {}
    for name in gradients:
        run, parallel = GRADIENTS[name]
        loss, grads = run(parallel, rank, 2)
        torch.distributed.all_reduce(loss)
        results[name] = loss / 2, grads
    for parallel in trainers:
        results[f"trainer {parallel}"] = trained(parallel, rank, 2)
    if rank == 0:
        torch.save(results, f"{path}/results")
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("gradients", "trainers"),
    [
        (("every kernel",), ("ddp",)),
        pytest.param(tuple(GRADIENTS), ("ddp", "fsdp"), marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_have_the_gradients_of_one_and_a_trainer_the_losses(gradients, trainers, tmp_path):
    one = {run: run("none", 0, 1) for run in {GRADIENTS[name][0] for name in gradients}}
    losses, fused = trained("none", 0, 1)
    on_two_ranks(_rank, tmp_path, gradients, trainers)  # a fork has the kernels that those have read
    results = torch.load(tmp_path / "results")
    for name in gradients:
        (loss, grads), expected = results[name], one[GRADIENTS[name][0]]
        torch.testing.assert_close(loss, expected[0], msg=name)
        assert_same_gradients(grads, expected[1])
    assert (len(losses), fused) == (2, 2)
    assert losses[1] < losses[0]
    for parallel in trainers:
        assert results[f"trainer {parallel}"] == (pytest.approx(losses, rel=1e-5), 2)


def options(*given):
    return example().arguments([*map(str, given)])


def a_model(folder, vocabulary=300):
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    config.save_pretrained(folder)
    return folder


def files(monkeypatch, tmp_path, *texts):
    paths = [tmp_path / f"{i}.py" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    monkeypatch.setattr("rooftile.byte_model.library_text.training_files", lambda: paths)
    return torch.tensor([t for text in texts for t in [*text, 256]])


def test_the_example_has_full_batches_in_every_step(monkeypatch, tmp_path, capsys):
    """The text is repeated where it is too short, and never a rank's batch is empty or short."""
    stream = files(monkeypatch, tmp_path, b"abcdefgh" * 4, b"ijkl" * 2)
    both = [example().batches(options("--steps", 7, "--batch", 4, "--length", 6), rank, 2) for rank in range(2)]
    assert [[tuple(step.shape) for step in steps] for steps in both] == [[(2, 6)] * 7] * 2
    windows = stream[: 7 * 6].view(7, 6)
    every = torch.cat([torch.cat(steps) for steps in zip(*both, strict=True)])
    assert torch.equal(every, windows.repeat(4, 1))
    assert f"token ids: tokens of {byte_model()}; 7 windows of 6, 4 times" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--length is 60, expected at most the text's 42 tokens"):
        example().batches(options("--length", 60), 0, 1)
    with pytest.raises(SystemExit, match="--batch is 3, expected a multiple of the 2 ranks"):
        example().batches(options("--batch", 3), 0, 2)


def test_the_example_trains_on_the_text_to_train_on():
    (step,) = example().batches(options("--steps", 1, "--batch", 2, "--length", 64), 0, 1)
    assert torch.equal(step.flatten(), library_text.tokens(library_text.training_files()[:20])[:128])


def test_a_model_without_a_tokenizer_is_fed_bytes_if_it_has_so_many_tokens(monkeypatch, tmp_path, capsys):
    stream = files(monkeypatch, tmp_path, b"abc" * 9)
    size = ("--steps", 1, "--batch", 1, "--length", 28)
    (step,) = example().batches(options("--model", a_model(tmp_path / "bytes"), *size), 0, 1)
    assert torch.equal(step[0], stream)
    assert "token ids: bytes" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no tokenizer and 100 tokens, expected 257 or more"):
        example().batches(options("--model", a_model(tmp_path / "few", 100), *size), 0, 1)


def test_a_model_is_fed_the_ids_of_its_tokenizer(monkeypatch, tmp_path):
    files(monkeypatch, tmp_path, b"a b a")
    folder = a_model(tmp_path / "words")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 7, "b": 9, "end": 5}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(folder)
    (step,) = example().batches(options("--model", folder, "--steps", 1, "--batch", 1, "--length", 4), 0, 1)
    assert step.tolist() == [[7, 9, 7, 5]]


@pytest.mark.nightly  # its functions run in two processes above; here three more import PyTorch
def test_the_example_under_torchrun_prints_the_losses_of_one_process():
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLE, *SIZE]
    found = subprocess.run(launch, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    module = example()
    losses = module.train(module.arguments(["--parallel", "none", *SIZE]), 0, 1, CPU)
    assert re.findall(r"step \d+: loss ([\d.]+)", found.stdout) == [f"{loss:.4f}" for loss in losses]
