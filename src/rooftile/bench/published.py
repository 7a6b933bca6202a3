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

_SERVE = "bench serve --model llama-3-8b"
_PREFIXED = "--max-batch 64 --max-seq-len 2304"
OFFLINE = f"{_SERVE} --per-client 2 --fixed --prompt 512 --new 128 --max-seq-len 640"  # as throughput is published

# Whole models. The portable kernels need a process of their own, which adds its rows to the file.
_E2E = (
    "--model llama-3-8b",
    "--model llama-3-8b --batch 1 --impl rooftile_portable",
    *(f"--model {m} --batch 1,2" for m in ("granite-8b-code", "qwen2.5-7b")),
    "--model llama-3-8b --batch 1 --prompt 2048 --new 16",
    *(f"--model llama-3-8b --batch 1 --quantize {q}" for q in ("fp8", "int8", "int4")),
    *(f"--model {m} --batch 1 --prompt 32 --new 128" for m in ("llama-3.2-1b", "qwen3-0.6b", "qwen3-4b")),
    "--model llama-3-8b --batch 1 --layer",
)

# Arguments of `rooftile`, cheap suites first. One command measures an op of a suite: it writes the op's file anew.
# Composed eager is named where a call of it takes a tenth of a second or less at most of the command's points. By its
# rows on an H200 a call takes 6 ps for each element of the keys, repeated for the query heads, and up to 18 ps for each
# score that it materializes, twice that backward. So it is left out for packed sequences, whose scores are those of all
# tokens with all, 16384² a head. For the memory of attention, where the largest scores fit no GPU, `naive` takes its
# place up to a limit.
SUITES: dict[str, tuple[str, ...]] = {
    "host": ("bench --host",),
    "profile": (
        "profile rms_norm --shape 16384x4096",  # bound by memory
        "profile linear --shape '4096x4096->6144'",  # by the tensor cores
    ),
    "audit": (
        *(f"audit --model {m}" for m in ("llama-3-8b", "granite-8b-code", "qwen2.5-7b")),
        *(f"audit --model llama-3-8b --impl serve{more}" for more in ("", " --speculate ngram")),
        *(f"audit --model {m} --impl engine" for m in ("llama-3.2-1b", "qwen3-0.6b", "qwen3-4b")),
        *(f"audit --model llama-3-8b --impl engine --quantize {q}" for q in ("fp8", "int8", "int4")),
        *(f"audit --model {m} --impl patched" for m in ("llama-3-8b", "granite-8b-code", "qwen2.5-7b")),
    ),
    "quality": ("bench quality",),
    "schedules": ("bench schedules",),
    "twins": (f"bench twins {_BOTH}",),
    "attention-sweep": (f"bench attention --set sweep {_BOTH} --peers eager,naive --suite attention-sweep",),
    "attention-decode": (
        f"bench decode_attention --set sweep {_BOTH} --peers 'eager,flex,sdpa flash,sdpa cudnn' "
        "--suite attention-decode",
    ),
    "attention-prompt": (
        f"bench attention --set prompt --direction forward {_BOTH} --peers eager,cudnn,flash,flex,fa4 "
        "--suite attention-prompt",
    ),
    "attention-flex": (f"bench attention --set llm {_BOTH} --peers eager,flex,cudnn,fa4 --suite attention-flex",),
    "attention-memory": ("bench attention --set memory --dtype fp16 --peers naive,blocked --suite attention-memory",),
    "attention-fp16": (
        "bench attention --set llm --set prefill --dtype fp16 --peers eager,naive,cudnn,flash,fa4 "
        "--suite attention-fp16",
    ),
    "attention": (
        "bench attention --set llm --set prefill --peers 'eager,rooftile portable,cudnn,flash,fa4' --suite attention",
        f"bench attention_varlen --set llm {_BOTH} --peers flash,fa4,dense --suite attention",
        f"bench attention_paged --set llm --set latent {_BOTH} --peers 'eager,gather + sdpa,dense,flashinfer' "
        "--suite attention",
        f"bench decode_attention {_CACHES} {_BOTH} --peers 'eager,sdpa flash,sdpa cudnn,flashinfer' --suite attention",
        f"bench append_kv rope_and_cache rms_norm_qkv_rope_cache --set decode {_BOTH} --suite attention",
    ),
    "rowwise": (
        f"bench rms_norm add_rms_norm softmax --set llm --set softmax {_BOTH}",
        f"bench layer_norm rope silu_mul silu_mul_packed --set llm --set sweep {_BOTH}",
        f"bench gelu_mul gelu_mul_packed bias_gelu bias_silu qk_norm_rope embedding --set llm {_BOTH}",
        "bench rms_norm_quantized add_rms_norm_quantized silu_mul_quantized gelu_mul_quantized quantize_tensor "
        f"--set llm {_BOTH}",
        f"bench sample sample_ --set decode {_BOTH}",
        f"bench top_logprobs accept_drafts_ mark_seen_ --set llm {_BOTH}",
    ),
    "matmul": (
        f"bench linear gated_linear {_MODELS} {_BOTH} --suite matmul",
        f"bench rms_norm_linear rms_norm_gated_linear {_MODELS} {_BOTH} --suite matmul",
        f"bench rms_norm_linear_quantized rms_norm_gated_linear_quantized --set decode {_BOTH} --suite matmul",
        f"bench fp8_linear int8_linear fp8_weight_linear int4_linear {_MODELS} {_BOTH} --suite matmul",
        f"bench matmul --set gemm --direction forward {_BOTH} --suite matmul",
        f"bench lora_linear --set llm --direction forward {_BOTH} --suite matmul",
        f"bench gated_mlp --set training --direction forward+backward {_BOTH} --suite matmul",
    ),
    "matmul-backward": (
        "bench linear gated_linear matmul rms_norm_linear lora_linear --set llm --direction backward "
        f"{_BOTH} --suite matmul-backward",
    ),
    "prefill": tuple(
        f"bench prefill --model {m} --dtype {d}" for m in ("qwen2.5-7b", "llama-3-8b") for d in ("bf16", "fp16")
    ),
    "speculation": ("bench speculation --model llama-3-8b", "bench speculation --text"),
    "serve": (
        f"{OFFLINE} --clients 1,2,8,32,64,128,256 --http --peers vllm",
        f"{OFFLINE} --clients 64,128,256 --deterministic --name rooftile_deterministic",
        # First tokens of prompts with a common beginning, and of what follows it alone.
        *(
            f"{_SERVE} --clients 64 --per-client 1 --fixed --prompt 128 --new 16 {_PREFIXED}{prefix}"
            for prefix in ("", " --prefix 2048")
        ),
        # Steps of decoding behind one.
        *(
            f"{_SERVE} --clients 64 --per-client 2 --fixed --prompt 128 --new 128 {_PREFIXED} --prefix 2048{way}"
            for way in ("", " --cascade --name rooftile_cascade")
        ),
        f"{_SERVE} --max-seq-len 1024 --clients 1,8,32,64,128,256",
        f"{_SERVE} --max-seq-len 1024 --rate 16,32 --requests 256 --peers vllm",
    ),
    "serve-two-gpus": (f"{OFFLINE} --clients 1,32,256 --tensor-parallel 1,2",),
    "e2e": tuple(f"bench e2e {line} --dtype bf16 --seconds 1" for line in _E2E),
    "e2e-fp16": tuple(f"bench e2e {line} --dtype fp16 --seconds 1" for line in _E2E),
    "training": (
        "bench training losses optim",
        *(f"bench training steps --model {m} --timeline" for m in ("llama-3.2-1b", "qwen3-0.6b", "gemma-3-1b")),
        "bench training steps --model llama-3-8b-lora",
        "bench training steps --model llama-3.2-1b --fit",
    ),
    "convergence": ("bench training convergence",),
    # A run adds to what the one before found.
    "sanitizer": tuple(f"sanitize --tool {tool}" for tool in ("memcheck", "synccheck", "racecheck")),
}


def show(console: Console) -> None:
    found = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    found.add_column("suite", no_wrap=True)
    found.add_column("rooftile", overflow="fold")
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
            f"rooftile {line} --results {shlex.quote(str(results))}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        command = [sys.executable, "-m", "rooftile", *shlex.split(line), "--results", str(results)]
        worst = max(worst, abs(subprocess.run(command, check=False).returncode))
    return worst
