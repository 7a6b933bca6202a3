"""Patched models in TRL's trainers, which compute losses of their own. TRL is no dependency of the tests."""

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

import datasets
import transformers
import trl
from helpers import Calls
from tiny_models import DEVICE, build, error

import rooftile
from rooftile import byte_model
from rooftile.huggingface.trl import fuse_head

STEPS = 3
TEXTS = ("roof tile", "a b c d e", "def read(self)", "x = 1", "hello", "tiles on a roof")
PAIRS = [{"prompt": f"{text}: ", "chosen": "yes, it is", "rejected": "no"} for text in TEXTS]


def resized(tokenizer):
    model = build("Llama")
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer))
    return model


def trained(trainer, config, rows, folder, *callbacks, fuse=False, more=None, **options):
    """Losses and norms of gradients, the weights after training, and how often each of Rooftile's ops was called."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(byte_model.folder()))
    tokenizer.pad_token = tokenizer.eos_token
    more = dict(more or {})
    if trainer is trl.DPOTrainer:
        more["ref_model"] = resized(tokenizer)
    if trainer is not trl.GRPOTrainer:
        options["max_length"] = 24
    arguments = config(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-3,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE.type == "cpu", seed=3, bf16=False,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    made = trainer(
        model=resized(tokenizer), args=arguments, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[*callbacks], **more,
    )  # fmt: skip
    if fuse:
        fuse_head(made)
    with Calls() as ops:
        made.train()
    logs = [(log["loss"], log["grad_norm"]) for log in made.state.log_history if "loss" in log]
    weights = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    return (torch.tensor(logs), weights), Counter(op._schema.name.partition("::")[2] for op, _, _ in ops.calls)


def varied(completions, **kwargs):
    """A reward that no two completions share."""
    return [float(sum(map(ord, text)) % 97) for text in completions]


GRPO = {
    "num_generations": 2,
    "max_completion_length": 6,
    "temperature": 0.9,
}
CASES = [
    pytest.param(trl.SFTTrainer, trl.SFTConfig, [{"text": text} for text in TEXTS], {}, {}, id="sft"),
    pytest.param(trl.SFTTrainer, trl.SFTConfig, [{"text": text} for text in TEXTS], {"packing": True}, {}, id="packed"),
    pytest.param(
        trl.SFTTrainer, trl.SFTConfig, [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS], {}, {},
        id="sft-completions",
    ),
    pytest.param(trl.DPOTrainer, trl.DPOConfig, PAIRS, {}, {}, id="dpo"),
    pytest.param(
        trl.GRPOTrainer, trl.GRPOConfig, [{"prompt": text} for text in TEXTS], GRPO, {"reward_funcs": varied}, id="grpo"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "config", "rows", "options", "more"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_training_is_the_same(trainer, config, rows, options, more, tmp_path):
    plain, none = trained(trainer, config, rows, tmp_path, more=more, **options)
    ours, ops = trained(trainer, config, rows, tmp_path, rooftile.PatchCallback(), more=more, **options)
    fused, heads = trained(trainer, config, rows, tmp_path, rooftile.PatchCallback(), fuse=True, more=more, **options)
    assert not none
    assert {"rms_norm", "silu_mul"} <= set(ops)
    assert "linear_cross_entropy" not in ops
    assert heads["linear_cross_entropy"] >= STEPS
    assert plain[0].shape == (STEPS, 2)
    assert plain[0][:, 1].min() > 0
    for logs, weights in (ours, fused):
        torch.testing.assert_close(logs, plain[0], rtol=1e-4, atol=1e-6)  # GRPO's losses are near 0
        # AdamW's steps have the size of the learning rate whatever the gradient's: rounding decides where that is 0.
        assert error(weights, plain[1]) < 1e-3
