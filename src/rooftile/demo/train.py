"""The training part of the demo: steps of the byte model, plain with torch.optim.AdamW and patched with Rooftile's."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import rooftile
from rooftile import runtime
from rooftile.byte_model import library_text
from rooftile.demo.generation import load

STEPS, TOKENS, RATE = 3, 64, 1e-3
# In float32, relative: kernels that sum in another order differ by some 1e-6 a step.
BOUND = 1e-4


def losses(model: Any, optimizer: torch.optim.Optimizer, batches: Tensor) -> list[float]:
    """The loss before each step."""
    found = []
    for ids in batches:
        loss = model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def show_training(console: Console) -> bool:
    """Train twice from the same weights on the same text. True if the losses agree."""
    device = runtime.default_device()
    text = library_text.windows(library_text.tokens(library_text.held_out_files()[:1]), TOKENS, STEPS).to(device)
    plain, patched = (load(torch.float32, device).train() for _ in range(2))
    rooftile.patch(patched)
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=RATE), text)
    found = losses(patched, rooftile.optim.AdamW(patched.parameters(), lr=RATE), text)
    off = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    right = off <= BOUND
    verdict = "[green]PASS[/]" if right else "[bold red]FAIL[/]"
    console.print(f"\n[bold]Training[/]: {STEPS} steps of the byte model, float32", highlight=False)
    for name, values in (("transformers, torch.optim.AdamW", expected), ("patched, rooftile.optim.AdamW", found)):
        console.print(f"  {name:32} losses {'  '.join(f'{v:.6f}' for v in values)}", highlight=False)
    console.print(f"  largest relative difference {off:.1e}, at most {BOUND:.0e}: {verdict}", highlight=False)
    return right
