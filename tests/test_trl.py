"""Patched models in TRL's trainers, which compute losses of their own. TRL is no dependency of the tests."""

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

STEPS = 3
TEXTS = ("roof tile", "a b c d e", "def read(self)", "x = 1", "hello", "tiles on a roof")
PAIRS = [{"prompt": f"{text}: ", "chosen": "yes, it is", "rejected": "no"} for text in TEXTS]


def resized(tokenizer):
    model = build("Llama")
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer))
    return model


def trained(trainer, config, rows, folder, *callbacks, **options):
    """The losses, and Rooftile's ops by name."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(byte_model.folder()))
    tokenizer.pad_token = tokenizer.eos_token
    of_preferences = {"ref_model": resized(tokenizer)} if trainer is trl.DPOTrainer else {}
    arguments = config(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-3,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE.type == "cpu", seed=3, bf16=False,
        max_length=24, gradient_checkpointing=False, **options,
    )  # fmt: skip
    made = trainer(
        resized(tokenizer), args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[*callbacks], **of_preferences,
    )  # fmt: skip
    with Calls() as ops:
        made.train()
    losses = [log["loss"] for log in made.state.log_history if "loss" in log]
    return torch.tensor(losses), {op._schema.name.partition("::")[2] for op, _, _ in ops.calls}


@pytest.mark.parametrize(
    ("trainer", "config", "rows", "options"),
    [
        (trl.SFTTrainer, trl.SFTConfig, [{"text": text} for text in TEXTS], {}),
        (trl.SFTTrainer, trl.SFTConfig, [{"text": text} for text in TEXTS], {"packing": True}),
        (trl.DPOTrainer, trl.DPOConfig, PAIRS, {}),
    ],
    ids=["sft", "sft-packing", "dpo"],
)
@pytest.mark.filterwarnings("ignore")
def test_training_is_the_same(trainer, config, rows, options, tmp_path):
    plain, none = trained(trainer, config, rows, tmp_path, **options)
    ours, ops = trained(trainer, config, rows, tmp_path, rooftile.PatchCallback(), **options)
    assert not none
    assert {"rms_norm", "silu_mul"} <= ops
    assert plain.numel() == STEPS
    assert error(ours, plain) < 1e-5
