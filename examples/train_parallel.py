"""Train a patched Hugging Face model on several GPUs, by FSDP2 (`fully_shard`) or DDP.

    torchrun --nproc-per-node 2 examples/train_parallel.py --model meta-llama/Llama-3.2-1B --dtype bfloat16
    TRITON_INTERPRET=1 torchrun --nproc-per-node 2 examples/train_parallel.py --steps 2 --length 32   # on CPUs

The text is the source of Python's standard library, in windows of tokens: the model's tokenizer makes them, or for a
model without one they are bytes. Without `--model` the model is the byte-level Llama that Rooftile ships. Patch first,
then shard: `fully_shard` and DDP wrap what the patch has put in place.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import rooftile
from rooftile import runtime
from rooftile.byte_model import library_text
from rooftile.demo import byte_model


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("fsdp", "ddp", "none"), default="fsdp")
    parser.add_argument("--model", default=str(byte_model()), help="a Hugging Face model, by name or path")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--batch", type=int, default=4, help="windows of a step, all ranks together")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    return parser.parse_args(given)


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The patched model. Its weights are float32; `--dtype` is that of the computation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).train()
    model.config.use_cache = False
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rooftile.patch(model)
    return model


def parallelize(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """The model over the ranks: of FSDP2 one group of parameters for each layer, and one for the rest."""
    if options.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if options.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, options.dtype), reduce_dtype=torch.float32)
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def loss_of(model: nn.Module, tokens: Tensor, options: argparse.Namespace) -> Tensor:
    """The mean loss of this rank's windows. FSDP2 casts by its policy, all else by autocast."""
    casts = options.dtype != "float32" and options.parallel != "fsdp"
    context = torch.autocast(tokens.device.type, getattr(torch, options.dtype)) if casts else contextlib.nullcontext()
    with context:
        return model(input_ids=tokens, labels=tokens).loss


def tokenize(options: argparse.Namespace) -> tuple[Iterator[Tensor], str]:
    """The token ids of each file of the text, and what they are."""
    from transformers import AutoConfig, AutoTokenizer

    files = library_text.training_files()
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError):  # it has none
        vocabulary = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
        if vocabulary <= library_text.END:
            found = f"{options.model} has no tokenizer and {vocabulary} tokens"
            raise SystemExit(f"{found}, expected {library_text.END + 1} or more, one for each byte") from None
        return (library_text.tokens([path]) for path in files), "bytes"
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def ids(path: Path) -> Tensor:
        text = path.read_text(encoding="utf-8", errors="replace")
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False) + end)

    return map(ids, files), f"tokens of {options.model}"


def batches(options: argparse.Namespace, rank: int, ranks: int) -> list[Tensor]:
    """This rank's windows of each step: ranks share a batch, and every window has as many tokens. Where the text has
    too few windows for all steps, it is repeated."""
    share = options.batch // ranks
    if share * ranks != options.batch:
        raise SystemExit(f"--batch is {options.batch}, expected a multiple of the {ranks} ranks")
    wanted = options.steps * options.batch
    parts, what = tokenize(options)
    read: list[Tensor] = []
    for part in parts:
        read.append(part)
        if sum(map(len, read)) >= wanted * options.length:
            break
    stream = torch.cat(read)
    windows = library_text.windows(stream, options.length, wanted)
    if not len(windows):
        raise SystemExit(f"--length is {options.length}, expected at most the text's {len(stream)} tokens")
    if rank == 0:
        epochs = wanted / len(windows)
        print(f"token ids: {what}; {len(windows)} windows of {options.length}, {epochs:.3g} times", flush=True)
    places = torch.arange(wanted).view(options.steps, options.batch) % len(windows)
    return [windows[step[rank * share : (rank + 1) * share]] for step in places]


def train(options: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> list[float]:
    """The mean loss of each step over all ranks."""
    torch.manual_seed(0)
    model = parallelize(build(options, device), options)
    optimizer = rooftile.optim.AdamW(model.parameters(), lr=options.lr, max_grad_norm=1.0)
    losses = []
    for tokens in batches(options, rank, ranks):
        loss = loss_of(model, tokens.to(device), options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if ranks > 1:
            torch.distributed.all_reduce(mean)
        losses.append(float(mean) / ranks)
        if rank == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    options = arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = runtime.default_device()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    else:
        options.parallel = "none"
    train(options, rank, ranks, device)
    if ranks > 1:
        gc.collect()  # FSDP2's cycles hold the process group; gloo's may abort if it lives until the interpreter exits
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
