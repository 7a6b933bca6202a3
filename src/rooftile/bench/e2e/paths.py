"""What `rooftile bench e2e` compares, behind one small interface: a batch of prompts, then steps."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rooftile.bench.rows import OURS
from rooftile.engine.prompts import GRAPH_TOKENS

OURS_EAGER, OURS_UNTUNED = "rooftile_eager", "rooftile_untuned"
OURS_DETERMINISTIC = "rooftile_deterministic"
OURS_PORTABLE = "rooftile_portable"  # in a process of its own, with ROOFTILE_PORTABLE=1
CUDA, CUDA_EAGER, CUDA_FP8 = "cuda_kernels", "cuda_kernels_eager", "cuda_kernels_fp8"
HF, HF_EAGER, PATCHED, PATCHED_EAGER = "hf_static_compile", "hf_eager", "hf_patched", "hf_patched_eager"
UNASKED = (OURS_UNTUNED, OURS_DETERMINISTIC, OURS_PORTABLE)  # measured only where they are named
IMPLS = (OURS, CUDA, HF, PATCHED, OURS_EAGER, CUDA_EAGER, HF_EAGER, PATCHED_EAGER, CUDA_FP8, *UNASKED)
OWN = (OURS, OURS_EAGER, *UNASKED)
OF_OWN_WEIGHTS = (*OWN, CUDA_FP8)  # these run the engine's weights, which may be quantized
# How each is run; shown under the table and written into the results.
NOTES = {
    OURS: f"the engine: one CUDA graph a step, and for prompts of up to {GRAPH_TOKENS} tokens",
    OURS_EAGER: "the engine, every kernel launched from the host",
    OURS_UNTUNED: "the engine, as without tuned tables",
    OURS_DETERMINISTIC: "the engine with deterministic=True",
    OURS_PORTABLE: "the engine without kernels in Gluon, as on GPUs other than Hopper",
    CUDA: "the engine's weights, PyTorch: cuBLAS GEMMs, SDPA, all else torch.compile; CUDA graphs as the engine's",
    CUDA_EAGER: "the same without compiler and graphs",
    CUDA_FP8: "cuda_kernels with the engine's weights in fp8: x quantized by row, torch._scaled_mm (cuBLAS, CUTLASS)",
    HF: "transformers, static cache, decoding forward compiled as generate does (reduce-overhead), prefill eager",
    HF_EAGER: "transformers, dynamic cache",
    PATCHED: "hf_static_compile of the model after rooftile.patch(linear=True, attention=True)",
    PATCHED_EAGER: "hf_eager of the model after rooftile.patch(linear=True, attention=True)",
}
# The baselines of a row's ratio_to_best_peer: implementations without Rooftile that run in the same way.
PEERS = {
    OURS: (CUDA_FP8, CUDA, HF, CUDA_EAGER, HF_EAGER),
    OURS_EAGER: (CUDA_EAGER, HF_EAGER),
    OURS_UNTUNED: (CUDA_FP8, CUDA, HF, CUDA_EAGER, HF_EAGER),
    OURS_DETERMINISTIC: (CUDA_FP8, CUDA, HF, CUDA_EAGER, HF_EAGER),
    OURS_PORTABLE: (CUDA_FP8, CUDA, HF, CUDA_EAGER, HF_EAGER),
    PATCHED: (HF,),
    PATCHED_EAGER: (HF_EAGER,),
}


class Absent(Exception):
    """Something that an implementation needs is not there."""


class Path(Protocol):
    """One implementation with its prompts; all sequences of the batch grow together.

    Attributes:
        logits: `(batch, V)`, which chose the newest tokens; the next step overwrites them.
        tokens: `(batch,)`, the newest tokens.
        note: what the implementation chose by itself, if anything.
    """

    note: str

    @property
    def logits(self) -> Tensor: ...

    @property
    def tokens(self) -> Tensor: ...

    def prepare(self) -> None:
        """Compile, and capture graphs."""
        ...

    def reset(self) -> None:
        """Drop the sequences, if there are any."""
        ...

    def prefill(self) -> None:
        """The prompts, and the first token of each; `reset` was called."""
        ...

    def step(self) -> None:
        """The next token of each sequence. It does not wait for the device."""
        ...
