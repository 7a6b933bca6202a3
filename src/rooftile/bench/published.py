"""The published suites, each with the commands that measure it: `rooftile bench published SUITE` runs them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

_BOTH = "--dtype bf16 --dtype fp16"
_CACHES = "--set decode --set latent --set tokens"
_MODELS = "--set decode --set prefill --direction forward"  # GEMMs of a step, and of a prompt

# Arguments of `rooftile bench`. An op of a suite is measured by one command: it writes the op's file anew.
SUITES: dict[str, tuple[str, ...]] = {
    "rowwise": (
        f"rms_norm add_rms_norm softmax --set llm --set softmax {_BOTH}",
        f"layer_norm rope silu_mul silu_mul_packed --set llm --set sweep {_BOTH}",
        f"gelu_mul gelu_mul_packed bias_gelu bias_silu qk_norm_rope embedding --set llm {_BOTH}",
        "rms_norm_quantized add_rms_norm_quantized silu_mul_quantized gelu_mul_quantized quantize_tensor --set llm",
        "sample sample_ --set decode",
    ),
    "matmul": (
        f"linear gated_linear {_MODELS} {_BOTH} --suite matmul",
        f"rms_norm_linear rms_norm_gated_linear {_MODELS} {_BOTH} --suite matmul",
        f"fp8_linear int8_linear fp8_weight_linear int4_linear {_MODELS} --suite matmul",
        f"matmul --set gemm --direction forward {_BOTH} --suite matmul",
    ),
    "matmul-backward": (
        "linear gated_linear matmul rms_norm_linear lora_linear --set llm --direction backward --suite matmul-backward",
    ),
    "attention": (
        "attention --set llm --set prefill --peers 'rooftile portable,cudnn,flash,fa4' --suite attention",
        f"attention_varlen --set llm {_BOTH} --peers flash,fa4 --suite attention",
        f"attention_paged --set llm --set latent {_BOTH} --peers 'gather + sdpa,dense' --suite attention",
        f"decode_attention {_CACHES} {_BOTH} --peers 'sdpa flash,sdpa cudnn' --suite attention",
        f"append_kv rope_and_cache rms_norm_qkv_rope_cache --set decode {_BOTH} --suite attention",
    ),
    "attention-fp16": ("attention --set llm --dtype fp16 --peers naive,cudnn,flash,fa4 --suite attention-fp16",),
    "attention-flex": ("attention --set llm --peers flex,cudnn,fa4 --suite attention-flex",),
    "attention-prompt": (
        "attention --set prompt --direction forward --peers cudnn,flash,flex,fa4 --suite attention-prompt",
    ),
    "attention-decode": (
        "decode_attention --set sweep --peers 'eager,flex,sdpa flash,sdpa cudnn' --suite attention-decode",
    ),
    "attention-memory": ("attention --set memory --dtype fp16 --peers naive,blocked --suite attention-memory",),
    "attention-sweep": (f"attention --set sweep {_BOTH} --peers naive --suite attention-sweep",),
    "host": ("--host",),
    "twins": (f"twins {_BOTH}",),
    "schedules": ("schedules",),
    "training": (
        "training losses optim",
        *(f"training steps --model {m} --timeline" for m in ("llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b")),
        "training steps --model llama-3-8b-lora",
        "training steps --model llama-3.2-1b --fit",
    ),
    "convergence": ("training convergence",),
    "prefill": tuple(
        f"prefill --model {m} --dtype {d}" for m in ("qwen2.5-7b", "llama-3-8b") for d in ("bf16", "fp16")
    ),
    "e2e": (
        "e2e --model llama-3-8b",
        "e2e --model granite-8b-code --batch 1,2",
        "e2e --model qwen2.5-7b --batch 1,2",
        "e2e --model llama-3-8b --batch 1 --dtype fp16",
        "e2e --model llama-3-8b --batch 1 --prompt 2048 --new 16",
        *(f"e2e --model llama-3-8b --batch 1 --quantize {q}" for q in ("fp8", "int8", "int4")),
        *(f"e2e --model {m} --batch 1 --prompt 32 --new 128" for m in ("llama-3.2-1b", "qwen3-0.6b", "qwen3-4b")),
        "e2e --model llama-3-8b --batch 1 --layer",
        "e2e --model llama-3-8b --batch 1 --layer --dtype fp16",
    ),
    "serve": ("serve --model llama-3-8b --clients 1,8,32,128,256", "serve --model llama-3-8b --rate 4,8,16"),
    "speculation": ("speculation --model llama-3-8b",),
    "quality": ("quality --model byte-model",),
}


def show(console: Console) -> None:
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    found.add_column("suite", no_wrap=True)
    found.add_column("rooftile bench", overflow="fold")
    for name, lines in SUITES.items():
        found.add_row(name, "\n".join(lines))
    console.print(found)


def run(names: Sequence[str], results: Path, console: Console) -> int:
    """Run the commands of those suites, each in a process of its own, and write their results.

    A command that fails does not stop the others.

    Returns the largest exit code.

    Raises:
        ValueError: there is no suite of that name.
    """
    if unknown := [name for name in names if name not in SUITES]:
        raise ValueError(f"unknown suite {', '.join(unknown)}; known: {', '.join(SUITES)}")
    worst = 0
    for line in dict.fromkeys(line for name in names for line in SUITES[name]):
        console.print(
            f"rooftile bench {line} --results {shlex.quote(str(results))}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        command = [sys.executable, "-m", "rooftile", "bench", *shlex.split(line), "--results", str(results)]
        worst = max(worst, abs(subprocess.run(command, check=False).returncode))
    return worst
