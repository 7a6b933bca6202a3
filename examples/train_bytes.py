"""Train a byte-level Llama of 20M parameters from scratch on Python's standard library, and let it write code.

    python examples/train_bytes.py                             # on a GPU, in less than two minutes
    TRITON_INTERPRET=1 python examples/train_bytes.py --tiny   # without one: a few steps of a tiny model

Nothing is downloaded: the text is the source of the running Python. Rooftile computes the training steps (norms, RoPE,
attention, GEMMs, the loss without logits, AdamW) and then, from the saved checkpoint, the text.
"""

import argparse
import json
import math
import shutil
import time
from pathlib import Path

import torch
import transformers

import rooftile
from rooftile import runtime
from rooftile.bench.info import machine
from rooftile.byte_model import library_text
from rooftile.demo import byte_model
from rooftile.engine import Engine

PROMPTS = ("def ", "class ", "import ", "    for ")
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}


def rate(step: int, steps: int, peak: float) -> float:
    """The learning rate rises over a twentieth of the steps, then falls to a tenth by a cosine."""
    warm = max(1, steps // 20)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(model, stream, *, context, batch, steps, peak):
    """Train the model on windows of the stream that begin anywhere. Returns what it printed of some steps."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = rooftile.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        max_grad_norm=1.0,
        master_weights=True,
    )
    window = torch.arange(context, device=stream.device)
    every = max(1, steps // 25)
    since, at, shown = time.perf_counter(), 0, []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        starts = torch.randint(len(stream) - context, (batch, 1), device=stream.device)
        ids = stream[starts + window]
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 or step == steps - 1:
            nats = loss.item()  # which waits for the device
            now = time.perf_counter()
            tokens_s = batch * context * (step + 1 - at) / (now - since)
            print(f"step {step:5d}  loss {nats:.4f}  {tokens_s:10,.0f} tokens/s")
            shown.append({"step": step, "loss": nats, "tokens_s": tokens_s})
            since, at = now, step + 1
    return shown


@torch.no_grad()
def mean_loss(model, rows, batch):
    """Nats a byte over all rows."""
    model.eval()
    losses = [model(some, labels=some, use_cache=False).loss.item() * len(some) for some in rows.split(batch)]
    return sum(losses) / len(rows)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and a few steps")
    parser.add_argument("--steps", type=int, help="default: 1500")
    parser.add_argument("--new", type=int, help="bytes to write after each prompt; default: 300")
    parser.add_argument("--out", type=Path, default=Path("byte-model"), help="the checkpoint's folder")
    parser.add_argument("--json", type=Path, help="write the losses and the text to a file")
    given = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    context, batch, steps, new, files = (32, 2, 4, 8, 3) if given.tiny else (512, 64, 1500, 300, None)
    steps, new = given.steps or steps, given.new or new
    device = runtime.default_device()

    stream = library_text.tokens(library_text.training_files()[:files]).to(device)
    held_out = library_text.windows(library_text.tokens(library_text.held_out_files()), context, 4 * batch).to(device)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=264,  # the bytes, the end of a file, and seven that never occur: rows of whole 16 bytes
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=library_text.END,
        **(TINY if given.tiny else SMALL),
    )
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size:,} parameters, {len(stream):,} bytes of text, {steps} steps of {batch} x {context} bytes")

    with rooftile.patch(model.train(), attention=True, linear=True) as handle:
        print(handle)
        losses = train(model, stream, context=context, batch=batch, steps=steps, peak=2e-3)
        held_out_loss = mean_loss(model, held_out, batch)
        print(f"held-out loss {held_out_loss:.4f} nats a byte")

    model.save_pretrained(given.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # a token for each byte
        shutil.copy(byte_model() / name, given.out / name)
    engine = Engine.from_pretrained(given.out, max_batch=len(PROMPTS), progress=False)
    written = engine.generate(PROMPTS, max_new_tokens=new, temperature=0.6, top_p=0.95)
    texts = []
    for prompt, completion in zip(PROMPTS, written, strict=True):
        texts.append(f"{prompt}{completion.text}")
        print(f"\n{'-' * 20}\n{texts[-1]}")
    if given.json is not None:
        meta = {**machine(), "transformers": transformers.__version__}
        run = {
            "parameters": size, "text_bytes": len(stream), "steps": steps, "batch": batch, "context": context,
            "losses": losses, "held_out_loss": held_out_loss, "texts": texts,
        }  # fmt: skip
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"meta": meta, "run": run}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
