"""The CUDA graphs of steps with parts of prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.engine.model import Decoder
from rooftile.engine.prompts import MixedBatch
from rooftile.graphs import SerialGraphs

# Graphs, each of some hundred launches. Steps of at most 1024 tokens have 18 numbers of tokens, for each number of
# slots. `warm_up` makes 45 for 32 slots, 88 for 256 and 104 for 512.
KEPT = 192
Recorded = tuple[torch.cuda.CUDAGraph, Tensor, Tensor]  # a graph, its input and its logits


class PromptGraphs:
    """A decoder's prefill, by a CUDA graph for each small shape that recurs.

    The first step of a shape runs eagerly, which compiles its kernels. The second time the shape is captured, and
    replayed from then on. A shape whose graph was dropped starts over. Without memory for a graph, steps run eagerly.
    """

    def __init__(self, decoder: Decoder, turns: SerialGraphs) -> None:
        self._decoder, self._turns = decoder, turns
        self._seen: set[tuple[int, ...]] = set()
        self._graphs: dict[tuple[int, ...], Recorded | None] = {}
        self._logits: Tensor | None = None

    def __call__(self, prompts: MixedBatch, newest: Tensor) -> Tensor:
        """The decoder's logits, valid until the next replay of one of these graphs. `newest` is always one tensor."""
        shape = prompts.shape
        if shape is None or shape not in self._seen:
            if shape is not None:
                self._seen.add(shape)
            return self._eager(prompts, newest)
        if shape not in self._graphs:
            self._graphs[shape] = self._recorded(prompts, newest)
        found = self._graphs[shape] = self._graphs.pop(shape)  # now the one used last
        if len(self._graphs) > KEPT:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest]
            self._seen.discard(oldest)
        if found is None:
            return self._eager(prompts, newest)
        graph, numbers, logits = found
        numbers.copy_(prompts.numbers, non_blocking=True)
        graph.replay()
        return logits

    def _eager(self, prompts: MixedBatch, newest: Tensor) -> Tensor:
        numbers = prompts.numbers.to(newest.device, non_blocking=True)
        logits = self._decoder.prefill(prompts, prompts.filled(numbers, newest))
        if self._logits is None:
            self._logits = logits.new_empty((newest.shape[0], logits.shape[1]))
        return logits

    def _recorded(self, prompts: MixedBatch, newest: Tensor) -> Recorded | None:
        kept = self._logits
        assert kept is not None, "the shape has run eagerly"

        def compute() -> Tensor:
            # With many slots the logits are large and the shapes many: all graphs share one memory for them.
            return kept[: prompts.rows].copy_(self._decoder.prefill(prompts, prompts.filled(numbers, newest)))

        try:
            numbers = prompts.numbers.to(newest.device, non_blocking=True)
            graph, logits = self._turns.record(compute)
        except torch.OutOfMemoryError:  # a capture can't release cached memory to get more
            return None
        return graph, numbers, logits
