"""Distill a language model into a smaller one: the student learns the teacher's distribution of every next token.

    python examples/distill.py                                             # on a GPU
    TRITON_INTERPRET=1 python examples/distill.py --steps 2 --length 32    # on a CPU

The loss of a token is `temperature² · KL(teacher ‖ student)`; `--text` makes a part of it cross entropy with the text.
`rooftile.linear_kl` computes it from the last hidden states of both and their heads, so the logits of neither are in
memory whole. The teacher is the byte-level model that Rooftile ships, of three layers; the student has one layer, of
half the width. The text is the source of Python's standard library.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rooftile
from rooftile import runtime
from rooftile.byte_model import library_text
from rooftile.demo import byte_model


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default=str(byte_model()), help="a Hugging Face Llama, by name or path")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size of the student")
    parser.add_argument("--layers", type=int, default=1, help="layers of the student")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--text", type=float, default=0.0, help="part of the loss that is cross entropy with the text")
    parser.add_argument("--batch", type=int, default=16, help="windows of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def models(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    """The student and the teacher, both patched; the teacher's parameters get no gradients."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, options.dtype)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=dtype).to(device).eval().requires_grad_(False)
    config = copy.deepcopy(teacher.config)
    config.hidden_size, config.num_hidden_layers = options.hidden, options.layers
    config.intermediate_size = 2 * options.hidden
    config.head_dim = options.hidden // config.num_attention_heads
    student = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).train()
    for model in (student, teacher):
        rooftile.patch(model)
    return student, teacher


class Head(NamedTuple):
    """The last hidden state of each token that has a next one, and the weight of the head."""

    hidden: Tensor
    weight: Tensor


def head(model: Any, tokens: Tensor) -> Head:
    return Head(model.model(tokens, use_cache=False).last_hidden_state[:, :-1], model.lm_head.weight)


def loss_of(student: nn.Module, teacher: nn.Module, tokens: Tensor, options: argparse.Namespace) -> Tensor:
    with torch.no_grad():
        taught = head(teacher, tokens)
    learned = head(student, tokens)
    # Softened distributions have gradients smaller by temperature², which the factor makes up for.
    kl = options.temperature**2 * rooftile.linear_kl(*learned, *taught, temperature=options.temperature)
    if not options.text:
        return kl
    return (1 - options.text) * kl + options.text * rooftile.linear_cross_entropy(*learned, tokens[:, 1:])


@torch.no_grad()
def measure(student: nn.Module, teacher: nn.Module, tokens: Tensor) -> tuple[float, float]:
    """KL(teacher ‖ student) in nats a token, and the share of tokens for which both think the same byte most likely."""
    learned, taught = head(student, tokens), head(teacher, tokens)
    target = tokens[:, 1:]
    best = [rooftile.linear_cross_entropy(*h, target, return_stats=True)[1].argmax for h in (learned, taught)]
    return float(rooftile.linear_kl(*learned, *taught)), float((best[0] == best[1]).float().mean())


def distill(options: argparse.Namespace, device: torch.device) -> list[float]:
    """Train the student; returns the losses of the steps."""
    torch.manual_seed(options.seed)
    student, teacher = models(options, device)
    optimizer = rooftile.optim.AdamW(
        student.parameters(), lr=options.lr, weight_decay=0.01, max_grad_norm=1.0,
        master_weights=options.dtype != "float32",
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps + 1)
    windows = library_text.windows(library_text.tokens(library_text.training_files()[:100]), options.length)
    order = torch.randperm(len(windows))
    unseen = library_text.windows(library_text.tokens(library_text.held_out_files()), options.length, options.batch)

    def report(step: int) -> None:
        divergence, agree = measure(student, teacher, unseen.to(device))
        print(f"step {step:4d}: KL {divergence:.4f} nats a token on unseen files, same byte {agree:.1%}")

    losses = []
    report(0)
    for step in range(1, options.steps + 1):
        chosen = order.roll(-step * options.batch)[: options.batch]
        loss = loss_of(student, teacher, windows[chosen].to(device), options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % 100 == 0 or step == options.steps:
            report(step)
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    distill(arguments(), runtime.default_device())
