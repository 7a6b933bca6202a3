"""Two GPUs over NCCL: tensor-parallel ranks write the tokens of one GPU, and training has the losses of one process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rooftile
from rooftile.engine import processes

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
EXAMPLE = str(Path(__file__).parents[1] / "examples" / "train_parallel.py")
CONFIG = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPTIONS = {"max_batch": 4, "max_seq_len": 256, "dtype": torch.float32}
PROMPTS = [[*range(3, 90)], [9, 9, 4], [70, 2, 64, 17], [*range(100, 140)]]
GREEDY = {"max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 0.8, "seed": 5}


def written(n):
    """What the streams of n ranks write: parts of prompts beside decoding, in CUDA graphs."""
    with (
        processes.started(n, CONFIG, OPTIONS),
        rooftile.AsyncEngine.from_config(CONFIG, tensor_parallel=n, step_tokens=32, **OPTIONS) as engine,
    ):
        streams = [engine.add(p, **how) for how in (GREEDY, SAMPLED) for p in PROMPTS]
        return [s.result().tokens for s in streams]


def test_two_gpus_write_the_tokens_of_one():
    assert written(2) == written(1)


def losses(*launch):
    found = subprocess.run([sys.executable, *launch, "--steps", "4"], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", found.stdout)]


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_two_gpus_train_to_the_losses_of_one(parallel):
    expected = losses(EXAMPLE, "--parallel", "none")
    assert len(set(expected)) == 4  # of other windows each
    found = losses("-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLE, "--parallel", parallel)
    # Sums over a batch are in another order; the losses are printed to four places.
    assert found == pytest.approx(expected, abs=2e-4)
