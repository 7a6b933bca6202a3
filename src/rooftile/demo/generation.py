"""The engine's part of the demo: it continues text as Hugging Face's code does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from rooftile import runtime
from rooftile.demo import byte_model

PROMPTS = ("    try:\n        import ", "    for line in ")


def greedy(model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """The greedy continuation of a prompt by transformers, without end tokens."""
    from transformers import GenerationConfig

    ids = torch.tensor([list(prompt)], device=model.device)
    how = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    # Of the model's own configuration, its end of text would be taken over.
    before, model.generation_config = model.generation_config, how
    try:
        out = model.generate(ids, generation_config=how, attention_mask=torch.ones_like(ids))
    finally:
        model.generation_config = before
    return out[0, len(prompt) :].tolist()


def load(dtype: torch.dtype, device: torch.device) -> Any:
    """The byte model, by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(byte_model(), dtype=dtype)
    return model.eval().to(device)


def show_text(console: Console, new: int) -> bool:
    """Compare the byte model's continuations by the engine and by transformers, in float32. True if they are equal."""
    from rooftile.engine import Engine

    longest = max(len(p.encode()) for p in PROMPTS) + new
    engine = Engine.from_pretrained(
        byte_model(), dtype=torch.float32, max_batch=len(PROMPTS), max_seq_len=longest, progress=False
    )
    ours = engine.generate(PROMPTS, max_new_tokens=new, ignore_eos=True)
    theirs = load(torch.float32, runtime.default_device())
    console.print("\n[bold]Generation[/]: the engine, and the same tokens as transformers", highlight=False)
    right = True
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        same = completion.tokens == greedy(theirs, completion.prompt, new)
        right &= same
        console.print(f"  {prompt!r} continues {completion.text!r} ", markup=False, highlight=False, end="")
        console.print("[green]PASS[/]" if same else "[bold red]FAIL[/]", highlight=False)
    return right
