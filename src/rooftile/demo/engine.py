"""The engine's part of the demo: it continues text as Hugging Face's code does; on a GPU, an 8B model decodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from rooftile import runtime
from rooftile.demo import library_text

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


def byte_model(dtype: torch.dtype, device: torch.device) -> Any:
    """The trained model, by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(library_text.folder(), dtype=dtype)
    return model.eval().to(device)


def show_text(console: Console, new: int) -> bool:
    """Compare the byte model's continuations by the engine and by transformers, in float32. True if they are equal."""
    from rooftile.engine import Engine

    device = runtime.default_device()
    longest = max(len(p.encode()) for p in PROMPTS) + new
    engine = Engine.from_pretrained(
        library_text.folder(), dtype=torch.float32, max_batch=len(PROMPTS), max_seq_len=longest, progress=False
    )
    since = time.perf_counter()
    ours = engine.generate(PROMPTS, max_new_tokens=new, ignore_eos=True)
    seconds = time.perf_counter() - since
    theirs = byte_model(torch.float32, device)
    right = True
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        expected = greedy(theirs, completion.prompt, new)
        same = completion.tokens == expected
        right &= same
        console.print(f"{prompt!r}", style="dim", markup=False, highlight=False)
        console.print(f"  Rooftile      {completion.text!r}", markup=False, highlight=False)
        text = bytes(t for t in expected if t < 256).decode(errors="replace")
        console.print(f"  transformers  {text!r}", markup=False, highlight=False)
        console.print("  [green]PASS[/] the same" if same else "  [bold red]FAIL[/] not the same", highlight=False)
    note = "" if runtime.MODE is runtime.Mode.GPU else ", in Triton's interpreter, which is no measurement"
    console.print(f"{len(PROMPTS)} x {new} bytes in {seconds:.1f} s{note}", style="dim", highlight=False)
    return right


def show_engine(console: Console) -> bool:
    """The engine's part of the demo. False if a text or a row is wrong.

    Without a GPU the trained byte model generates a few bytes. With one it generates more, and then a short
    `rooftile bench e2e` of one sequence compares an 8B model with random weights with CUDA kernels and transformers.
    """
    console.print("\nThe engine, and a small model trained on Python's library:", highlight=False)
    real = runtime.MODE is runtime.Mode.GPU
    right = show_text(console, 64 if real else 24)
    if real:
        from rooftile.bench import e2e
        from rooftile.bench.e2e import paths

        console.print("\nAn 8B model with random weights, decoding:", highlight=False)
        torch.get_device_module(runtime.default_device().type).empty_cache()
        settings = e2e.Settings(
            models=("llama-3-8b",), batches=(1,), prompt=512, new=64, seconds=1.0,
            impls=(paths.OURS, paths.CUDA, paths.HF, paths.OURS_EAGER, paths.CUDA_EAGER, paths.HF_EAGER),
        )  # fmt: skip
        right &= e2e.run(settings, console) == 0
    return right
