"""Steps of many sequences on the device: prompts, then a token of each at a time, a CUDA graph for each batch size.

Nothing here waits for the device. What a step reads (lengths, pages, the tokens before, how each is sampled) lies at
fixed addresses and is written in the order of the stream, so that a step can be launched while the host still looks at
the tokens of the one before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.engine.config import ModelConfig
from rooftile.engine.model import Decoder
from rooftile.engine.paged import PagedKVCache, PagedSequence
from rooftile.engine.steps import on
from rooftile.engine.weights import Weights
from rooftile.graphs import record
from rooftile.ops.sample import mark_seen_, sample_

# For each option its type, which values it may have, and how that is said.
_NUMBER = (int, float)
_ACCEPTED: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "temperature": (_NUMBER, lambda x: 0 <= x < math.inf, "0 (the likeliest token) or more"),
    "top_k": (int, lambda x: 0 <= x < 2**31, "0 (no limit) or more"),
    "top_p": (_NUMBER, lambda x: 0 < x <= 1, "more than 0, and at most 1"),
    "min_p": (_NUMBER, lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (_NUMBER, lambda x: 0 < x < math.inf, "a positive number"),
    "seed": (int, lambda x: -(2**63) <= x < 2**63, "an integer of 64 bits"),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a sequence are chosen: see `rooftile.sample`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (kind, accepts, said) in _ACCEPTED.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                expected = "an integer" if kind is int else "a number"
                raise TypeError(f"sampling: {name} is {value!r}, expected {expected}")
            if not accepts(value):
                raise ValueError(f"sampling: {name} is {value!r}, expected {said}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 and self.repetition_penalty == 1


_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "seeds": torch.int64,
}


class Runner:
    """The device's side of generation.

    Args:
        config, weights: the model.
        max_batch: sequences that live at a time, each in a slot.
        max_seq_len: tokens of each, prompt and new ones.
        page_size, pages: of the cache; by default as many pages as all sequences at their longest need.
        kv_dtype: of the cache, float8_e4m3fn or int8 too; the model's by default.
        cuda_graphs: replay a graph for each step of decoding, where there is a GPU.

    Attributes:
        tokens, logprobs: `(max_batch,)`, int32 and float32, on the device: the newest of each slot.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_batch: int,
        max_seq_len: int,
        page_size: int = 64,
        pages: int | None = None,
        kv_dtype: torch.dtype | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        device = weights.embedding.device
        needed = max_batch * -(-max_seq_len // page_size)
        self.cache = PagedKVCache(
            needed if pages is None else pages, page_size, config.kv_heads, config.head_dim,
            max_sequences=max_batch, max_seq_len=max_seq_len, layers=config.layers,
            dtype=weights.embedding.dtype if kv_dtype is None else kv_dtype, device=device,
        )  # fmt: skip
        self.decoder = Decoder(config, weights, self.cache)
        self.max_batch, self.max_seq_len = max_batch, max_seq_len
        self.tokens = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(max_batch, dtype=torch.float32, device=device)
        self._seen = torch.zeros((max_batch, -(-config.vocab // 32)), dtype=torch.int32, device=device)
        self._none_seen = torch.zeros_like(self._seen[0])  # a copy is no kernel, and to fill memory is one
        self._sampling = [Sampling()] * max_batch
        self._given = {name: torch.zeros(max_batch, dtype=dtype, device=device) for name, dtype in _DTYPES.items()}
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] | None = None
        if cuda_graphs and device.type == "cuda":
            self._graphs, self._pool = {}, torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[PagedSequence]:
        """New sequences of those prompts, each with its first new token.

        Raises:
            ValueError: a prompt is empty, slots or pages do not suffice, or a prompt is longer than `max_seq_len`.

        Nothing is changed then, and no slot or page is taken, whatever else is raised.
        """
        sequences = self._begin(prompts)
        try:
            with on(self.tokens.device):
                logits = self.decoder.prefill(prompts, sequences)
                for i, (sequence, prompt, how) in enumerate(zip(sequences, prompts, sampling, strict=True)):
                    self._set(sequence.slot, prompt, how)
                    self._sample(slice(sequence.slot, sequence.slot + 1), logits[i : i + 1], how.greedy)
        except BaseException:
            self._free_all(sequences)
            raise
        return sequences

    @torch.no_grad()
    def decode(self, sequences: Sequence[PagedSequence] | None = None) -> None:
        """The next token of those sequences, or of all that live. The newest tokens of other slots are lost.

        Raises:
            ValueError: a sequence is at `max_seq_len`, or there are no pages left. Nothing is changed then.
        """
        live = self.cache.sequences if sequences is None else sequences
        if not live:
            return
        slots = [s.slot for s in live]
        b, greedy = self._bucket(max(slots) + 1), all(self._sampling[slot].greedy for slot in slots)
        with on(self.tokens.device):
            graph = None if self._graphs is None else self._graph(b, greedy)
            self.cache.reserve(dict.fromkeys(live, 1))
            if graph is None:
                self._step(b, greedy)
            else:
                graph.replay()

    def free(self, sequence: PagedSequence) -> None:
        """Give a sequence's slot and pages back."""
        self.cache.free(sequence)

    @torch.no_grad()
    def logits(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Of whole prompts, `(T, V)` each, in the model's dtype. They take slots and pages meanwhile."""
        sequences = self._begin(prompts)
        try:
            with on(self.tokens.device):
                logits = self.decoder.prefill(prompts, sequences, every=True)
        finally:
            self._free_all(sequences)
        return list(logits.split([len(p) for p in prompts]))

    def _begin(self, prompts: Sequence[Sequence[int]]) -> list[PagedSequence]:
        if any(not len(p) for p in prompts):
            raise ValueError("a prompt is empty, expected one token or more")
        sequences: list[PagedSequence] = []
        try:
            for _ in prompts:
                sequences.append(self.cache.allocate())
            self.cache.extend({s: len(p) for s, p in zip(sequences, prompts, strict=True)})
        except BaseException:
            self._free_all(sequences)
            raise
        return sequences

    def _free_all(self, sequences: Sequence[PagedSequence]) -> None:
        for sequence in sequences:
            self.free(sequence)

    def _bucket(self, n: int) -> int:
        """Rows of the step that serves n slots: few sizes, so that there are few graphs."""
        return min(self.max_batch, 1 << (n - 1).bit_length() if n <= 16 else -(-n // 16) * 16)

    def _step(self, b: int, greedy: bool) -> None:
        self.cache.advance()
        self._sample(slice(0, b), self.decoder.decode(self.tokens[:b]), greedy)

    def _graph(self, b: int, greedy: bool) -> torch.cuda.CUDAGraph:
        assert self._graphs is not None
        if (b, greedy) not in self._graphs:

            def step() -> None:
                self._step(b, greedy)

            def warm() -> None:
                """A step with no sequence in it, and room for another, which is recorded."""
                self.cache.reserve({})
                step()
                self.cache.reserve({})

            # The tokens of the sequences that live are overwritten on the way.
            kept = [(x, x.clone()) for x in (self.tokens, self.logprobs, self._seen)]
            try:
                self._graphs[b, greedy], _ = record(step, warm=warm, pool=self._pool)
            finally:
                for x, old in kept:
                    x.copy_(old)
        return self._graphs[b, greedy]

    def _set(self, slot: int, prompt: Sequence[int], how: Sampling) -> None:
        """Remember how a slot is sampled."""
        self._sampling[slot] = how
        for name, tensor in self._given.items():
            value = how.seed if name == "seeds" else getattr(how, name)
            tensor[slot : slot + 1].copy_(torch.tensor([value], dtype=tensor.dtype), non_blocking=True)
        if not how.greedy:
            self._seen[slot].copy_(self._none_seen)
        if how.repetition_penalty != 1:
            ids = sorted(set(prompt))
            pairs = torch.tensor([ids, [slot] * len(ids)], dtype=torch.int32, pin_memory=self.tokens.is_cuda)
            mark_seen_(self._seen, *pairs.to(self.tokens.device, non_blocking=True))

    def _sample(self, rows: slice, logits: Tensor, greedy: bool) -> None:
        if greedy:
            sample_(self.tokens[rows], self.logprobs[rows], logits)
            return
        given = {name: tensor[rows] for name, tensor in self._given.items()}
        # The token that is sampled stands behind those of the cache.
        positions = self.cache.lengths[rows]
        sample_(self.tokens[rows], self.logprobs[rows], logits, seen=self._seen[rows], positions=positions, **given)
