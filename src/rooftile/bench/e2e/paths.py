"""What `rooftile bench e2e` sets beside each other, behind one small interface: a batch of prompts, then steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from rooftile import tuning
from rooftile.bench.e2e.model import Model
from rooftile.bench.rows import OURS
from rooftile.bench.timer import Clock
from rooftile.engine.prompts import GRAPH_TOKENS
from rooftile.engine.runner import Runner, Sampling

OURS_EAGER, OURS_UNTUNED = "rooftile_eager", "rooftile_untuned"
CUDA, CUDA_EAGER = "cuda_kernels", "cuda_kernels_eager"
HF, HF_EAGER, PATCHED, PATCHED_EAGER = "hf_static_compile", "hf_eager", "hf_patched", "hf_patched_eager"
IMPLS = (OURS, CUDA, HF, PATCHED, OURS_EAGER, CUDA_EAGER, HF_EAGER, PATCHED_EAGER, OURS_UNTUNED)
OWN = (OURS, OURS_EAGER, OURS_UNTUNED)  # run the engine's weights, which may be quantised
# How each is run; shown under the table and written into the results.
NOTES = {
    OURS: f"the engine: one CUDA graph a step, and for prompts of up to {GRAPH_TOKENS} tokens",
    OURS_EAGER: "the engine, every kernel launched from the host",
    OURS_UNTUNED: "the engine, as without tuned tables",
    CUDA: "the engine's weights, PyTorch: cuBLAS products, SDPA, all else torch.compile; CUDA graphs as the engine's",
    CUDA_EAGER: "the same without compiler and graphs",
    HF: "transformers, static cache, decoding forward compiled as generate does (reduce-overhead), prefill eager",
    HF_EAGER: "transformers, dynamic cache",
    PATCHED: "hf_static_compile of the model after rooftile.patch(linear=True, attention=True)",
    PATCHED_EAGER: "hf_eager of the model after rooftile.patch(linear=True, attention=True)",
}
# What a row's ratio_to_best_peer is to: the best of what does not use Rooftile, run in the same way.
PEERS = {
    OURS: (CUDA, HF, CUDA_EAGER, HF_EAGER),
    OURS_EAGER: (CUDA_EAGER, HF_EAGER),
    OURS_UNTUNED: (CUDA, HF, CUDA_EAGER, HF_EAGER),
    PATCHED: (HF,),
    PATCHED_EAGER: (HF_EAGER,),
}


class Absent(Exception):
    """Something that an implementation needs is not there."""


class Path(Protocol):
    """One implementation, over prompts that were given to it: all sequences of the batch grow together.

    Attributes:
        logits: `(batch, V)`, those that chose the newest tokens; overwritten by the next step.
        tokens: `(batch,)`, the newest.
        note: what it chose by itself, if anything.
    """

    note: str

    @property
    def logits(self) -> Tensor: ...

    @property
    def tokens(self) -> Tensor: ...

    def prepare(self) -> None:
        """Compile and record what is compiled and recorded once."""
        ...

    def reset(self) -> None:
        """Forget the sequences, if there are any."""
        ...

    def prefill(self) -> None:
        """The prompts, and the first token of each; `reset` was called."""
        ...

    def step(self) -> None:
        """The next token of each sequence. Nothing in it waits for the device."""
        ...


class EnginePath:
    """Rooftile's engine, through its runner.

    Args:
        ids: the prompts, `(batch, tokens)`.
        new: tokens after each prompt.
        graph: whether steps are replayed from a CUDA graph.
        tuned: whether tuned tables are read.
    """

    def __init__(self, model: Model, ids: Tensor, new: int, *, graph: bool = True, tuned: bool = True) -> None:
        batch, prompt = ids.shape
        self.note = ""
        self._prompts: list[list[int]] = ids.tolist()
        self._sampling = [Sampling()] * batch
        self._tables: Callable[[], Any] = contextlib.nullcontext if tuned else tuning.off
        length = prompt + new
        self._runner = Runner(model.config, model.own, max_batch=batch, max_seq_len=length, cuda_graphs=graph)
        self._sequences: list[Any] = []
        self._logits: dict[str, Tensor] = {}
        self._newest = "prefill"
        for name in ("prefill", "decode"):
            self._keep(name)

    def _keep(self, name: str) -> None:
        """Keep what a forward returns: a graph writes its logits to where those stood that were recorded."""
        decoder = self._runner.decoder
        forward = getattr(decoder, name)

        def kept(*args: Any, **options: Any) -> Tensor:
            self._logits[name] = forward(*args, **options)
            return self._logits[name]

        setattr(decoder, name, kept)

    @property
    def logits(self) -> Tensor:
        return self._logits[self._newest]

    @property
    def tokens(self) -> Tensor:
        return self._runner.tokens[: len(self._prompts)]

    def prepare(self) -> None:
        if self._runner.tokens.device.type == "cpu":  # the interpreter compiles nothing
            return
        for _ in range(2):  # prompts are recorded the second time
            self.prefill()
            self.step()
            self.reset()

    def reset(self) -> None:
        for sequence in self._sequences:
            self._runner.free(sequence)
        self._sequences = []

    def prefill(self) -> None:
        self._newest = "prefill"
        with self._tables():
            self._sequences = self._runner.prefill(self._prompts, self._sampling)

    def step(self) -> None:
        self._newest = "decode"
        with self._tables():
            self._runner.decode()


def build(name: str, model: Model, ids: Tensor, new: int, clock: Clock, source: Any) -> Path:
    """The implementation of that name over those prompts.

    Args:
        source: makes the Hugging Face models, once for all that need them (`e2e_hf.Models`).

    Raises:
        Absent: it needs something that is not there.
    """
    from rooftile.bench.e2e.cuda import CudaPath
    from rooftile.bench.e2e.hf import HuggingFacePath

    if name in (OURS, OURS_EAGER, OURS_UNTUNED):
        if name == OURS_UNTUNED and model.quantize in ("int8", "int4"):
            raise Absent(f"{model.quantize} products remember what a table said: run with --tuning off for itself")
        return EnginePath(model, ids, new, graph=name != OURS_EAGER, tuned=name != OURS_UNTUNED)
    if name in (CUDA, CUDA_EAGER):
        return CudaPath(model, ids, new, clock, compiled=name == CUDA)
    patched = name in (PATCHED, PATCHED_EAGER)
    return HuggingFacePath(source.model(patched), ids, new, compiled=name in (HF, PATCHED), measures=clock.measures)
