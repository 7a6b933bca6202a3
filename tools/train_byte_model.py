"""Trains the byte model, src/rooftile/byte_model/: a Llama small enough to ship, which writes Python of a kind.

    python tools/train_byte_model.py                 # some 20 minutes of one core
    python tools/train_byte_model.py --steps 20 --out /tmp/model

Plain PyTorch and transformers on the CPU; nothing of Rooftile computes here. The text is the source of the running
Python's standard library, a few files held out (rooftile/byte_model/library_text.py). What is written is a checkpoint
as Hugging Face writes them, with its tokenizer, a README.md and training.json, in which the loss stands.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tokenizers
import torch
import transformers
import typer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.convert_slow_tokenizer import bytes_to_unicode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from rooftile.byte_model import library_text
from rooftile.demo import byte_model

CONTEXT = 512
CONFIG: dict[str, Any] = {
    "vocab_size": 264,  # the bytes, the end of a text, and seven that are never seen: rows of logits of whole 16 bytes
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": library_text.END,
    "pad_token_id": None,
}
PEAK, LAST, WARM = 4e-3, 4e-5, 100  # the learning rate rises for WARM steps, then falls by a cosine


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, whose id is the byte, and one for the end of a text."""
    alphabet = bytes_to_unicode()
    tokenizer = tokenizers.Tokenizer(models.BPE({character: byte for byte, character in alphabet.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, normalized=False)])
    assert tokenizer.token_to_id("<|end|>") == library_text.END
    return tokenizer


def rate(step: int, steps: int) -> float:
    if step < WARM:
        return PEAK * (step + 1) / WARM
    done = (step - WARM) / max(1, steps - WARM)
    return LAST + (PEAK - LAST) * (1 + math.cos(math.pi * done)) / 2


def loss_of(model: transformers.LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Nats a token, of every token but the first of each row."""
    logits = model(rows, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: transformers.LlamaForCausalLM, rows: Tensor) -> float:
    model.eval()
    losses = [float(loss_of(model, some)) * len(some) for some in rows.split(16)]
    model.train()
    return sum(losses) / len(rows)


def train(steps: int, batch: int, seed: int) -> tuple[transformers.LlamaForCausalLM, dict[str, object]]:
    """The model in float32, and what there is to say of its training."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    files, held_out = library_text.training_files(), library_text.held_out_files()
    stream = library_text.tokens(files)
    rows = library_text.windows(library_text.tokens(held_out), CONTEXT)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters; {len(files)} files, {len(stream):,} tokens; {rows.numel():,} held out", flush=True)

    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98))
    numbers = torch.Generator().manual_seed(seed)
    since, mean = time.perf_counter(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        starts = torch.randint(len(stream) - CONTEXT, (batch,), generator=numbers)
        loss = loss_of(model, torch.stack([stream[at : at + CONTEXT] for at in starts.tolist()]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if step == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {mean:.4f}  {time.perf_counter() - since:6.0f} s", flush=True)
    with torch.no_grad():  # as they are kept
        for p in model.parameters():
            p.copy_(p.bfloat16())
    loss_now = held_out_loss(model, rows)
    print(f"held-out loss {loss_now:.4f} nats a byte", flush=True)
    return model, {
        "held_out_loss": round(loss_now, 4),
        "unit": "nats a byte",
        "held_out_bytes": rows.numel(),
        "window": CONTEXT,
        "training_bytes": len(stream),
        "training_files": len(files),
        "parameters": size,
        "steps": steps,
        "batch": batch,
        "learning_rate": [PEAK, LAST],
        "seed": seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


README = """\
# A byte-level model

A Llama of {parameters:,} parameters over bytes (three layers of 128, four query and two KV heads, tied embeddings),
kept in bfloat16. It writes text that looks like Python, and is here to show that Rooftile's engine writes the same text
as Hugging Face's code does: `rooftile generate demo --prompt "def "`.

`tools/train_byte_model.py` trained it, on the CPU, with plain PyTorch and transformers: {steps:,} steps of {batch}
windows of {window} bytes from {training_files} source files of the standard library of Python {python}
({training_bytes:,} bytes), seed {seed}, PyTorch {torch}. {files} files of that library were held out
(`HELD_OUT` in `src/rooftile/byte_model/library_text.py`). Its loss on them is **{held_out_loss:.4f} nats a byte**: over
{held_out_bytes:,} bytes in windows of {window} that follow each other, the weights rounded as they are kept and the
arithmetic in float32. `training.json` has these figures.

License: the weights were trained on files of the Python standard library, which are under the Python Software
Foundation License Version 2 (https://docs.python.org/3/license.html, copyright Python Software Foundation). No such
file is part of this folder.
"""


def main(
    steps: Annotated[int, typer.Option(min=1)] = 3000,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    seed: Annotated[int, typer.Option()] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="Where the checkpoint goes.")] = byte_model(),  # noqa: B008
) -> None:
    """Train the byte model and write it."""
    torch.set_num_threads(1)  # the sums of one thread have one order
    model, report = train(steps, batch, seed)
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(eos_token_id=library_text.END, do_sample=False)
    model.bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    byte_tokenizer().save(str(out / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "model_max_length": CONTEXT}
    (out / "tokenizer_config.json").write_text(json.dumps(named, indent=1) + "\n", encoding="utf-8")
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = README.format(**report, files=len(library_text.held_out_files()))
    (out / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
