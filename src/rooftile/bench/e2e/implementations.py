"""The implementations that `rooftile bench e2e` compares, by name; the engine's own is here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from rooftile import runtime, tuning
from rooftile.bench.e2e.cuda import CudaPath
from rooftile.bench.e2e.hf import HuggingFacePath, Models
from rooftile.bench.e2e.model import Model
from rooftile.bench.e2e.paths import (
    CUDA,
    CUDA_EAGER,
    CUDA_FP8,
    HF,
    OURS_DETERMINISTIC,
    OURS_EAGER,
    OURS_PORTABLE,
    OURS_UNTUNED,
    OWN,
    PATCHED,
    PATCHED_EAGER,
    Absent,
    Path,
)
from rooftile.bench.timer import Clock
from rooftile.engine.runner import Runner, Sampling


class EnginePath:
    """Rooftile's engine, through its runner.

    Args:
        ids: the prompts, `(batch, tokens)`.
        new: tokens after each prompt.
        graph: whether steps are replayed from a CUDA graph.
        tuned: whether tuned tables are read.
        deterministic: as the engine takes it.
    """

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        new: int,
        *,
        graph: bool = True,
        tuned: bool = True,
        deterministic: bool = False,
    ) -> None:
        batch, prompt = ids.shape
        self.note = ""
        self._prompts: list[list[int]] = ids.tolist()
        self._sampling = [Sampling()] * batch
        self._tables: Callable[[], Any] = contextlib.nullcontext if tuned else tuning.off
        length = prompt + new
        self._runner = Runner(
            model.config, model.own, max_batch=batch, max_seq_len=length, cuda_graphs=graph, deterministic=deterministic
        )
        self._sequences: list[Any] = []
        self._logits: dict[str, Tensor] = {}
        self._newest = "prefill"
        for name in ("prefill", "decode"):
            self._keep(name)

    def _keep(self, name: str) -> None:
        """Keep what a forward returns: a graph writes its logits to the addresses of its capture."""
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


def build(name: str, model: Model, ids: Tensor, new: int, clock: Clock, source: Models) -> Path:
    """The implementation of that name over those prompts.

    Args:
        source: makes the Hugging Face models, once for all that need them.

    Raises:
        Absent: it needs something that is not there.
    """
    if name in OWN:
        if (name == OURS_PORTABLE) != runtime.PORTABLE:
            raise Absent(f"kernels in Gluon are {'off' if runtime.PORTABLE else 'on'} in this process")
        if name == OURS_UNTUNED and model.quantize in ("int8", "int4"):
            raise Absent(
                f"{model.quantize} GEMMs remember their tuned entry: measure it in a run of its own with --tuning off"
            )
        return EnginePath(
            model, ids, new, graph=name != OURS_EAGER, tuned=name != OURS_UNTUNED,
            deterministic=name == OURS_DETERMINISTIC,
        )  # fmt: skip
    if name in (CUDA, CUDA_EAGER):
        return CudaPath(model, ids, new, clock, compiled=name == CUDA)
    if name == CUDA_FP8:
        if model.quantize != "fp8":
            raise Absent(f"weights are {'not quantized' if model.quantize is None else model.quantize}, expected fp8")
        return CudaPath(model, ids, new, clock, compiled=True, fp8=True)
    patched = name in (PATCHED, PATCHED_EAGER)
    return HuggingFacePath(source.model(patched), ids, new, compiled=name in (HF, PATCHED), measures=clock.measures)
