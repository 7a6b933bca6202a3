"""Steps of speculative decoding on the device: T tokens of each sequence, of which T - 1 are proposals.

Nothing waits for the host: a draft model proposes, the model computes all T tokens, the tokens behind each are drawn,
and those that agree with the proposals are accepted, in one CUDA graph. Rows of logits are in the order of the slots, T
to a slot. Each is sampled with the options of its slot, as if the proposals before it were accepted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.engine.config import ModelConfig
from rooftile.engine.model import Decoder
from rooftile.engine.paged_cache import PagedKVCache
from rooftile.engine.weights import Weights
from rooftile.ops.sample import sample_

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_words", "n_cols", "parts"])
def _rows_kernel(
    ids_ptr,
    starts_ptr,
    row_ids_ptr,
    positions_ptr,
    nexts_ptr,
    seen_ptr,
    row_seen_ptr,
    counts_ptr,
    row_counts_ptr,
    bias_ptr,
    row_bias_ptr,
    stride_i,
    stride_s,
    stride_c,
    stride_b,
    n_words,
    n_cols,
    parts,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row (slot, i): its token, the positions of that and of the next one, and the slot's tables with proposals 1 to
    i."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    slot = row // T
    i = row % T
    cols = part * BLOCK + tl.arange(0, BLOCK)
    at_row = row.to(tl.int64)
    at_slot = slot.to(tl.int64)

    if part == 0:
        tl.store(row_ids_ptr + row, tl.load(ids_ptr + i * stride_i + slot))
        position = tl.load(starts_ptr + slot) + i
        tl.store(positions_ptr + row, position)
        tl.store(nexts_ptr + row, position + 1)
    if seen_ptr is not None:
        words = tl.load(seen_ptr + at_slot * stride_s + cols, mask=cols < n_words, other=0)
        for j in range(1, i + 1):
            token = tl.load(ids_ptr + j * stride_i + slot)
            words |= tl.where(cols == (token >> 5), 1 << (token & 31), 0)
        tl.store(row_seen_ptr + at_row * n_words + cols, words, mask=cols < n_words)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + at_slot * stride_c + cols, mask=cols < n_cols, other=0).to(tl.int32)
        for j in range(1, i + 1):
            counts += (cols == tl.load(ids_ptr + j * stride_i + slot)).to(tl.int32)
        tl.store(row_counts_ptr + at_row * n_cols + cols, tl.minimum(counts, 32767).to(tl.int16), mask=cols < n_cols)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + at_slot * stride_b + cols, mask=cols < n_cols, other=0.0)
        tl.store(row_bias_ptr + at_row * n_cols + cols, bias, mask=cols < n_cols)


@functools.cache
def _rows_launcher(tables: tuple[bool, ...], n_tokens: int, block: int) -> launching.KernelLauncher:
    return launching.KernelLauncher(_rows_kernel, {"T": n_tokens, "BLOCK": block}, num_warps=4)


class Verifier:
    """Memory and launches of such steps.

    Args:
        cache: of the model.
        max_batch, vocab: slots, and tokens of the vocabulary.
        proposals: of a step.
        draft: a model that makes them. It has a cache of its own in the pages of the model's.

    Attributes:
        n_tokens: T.
        tokens: `(max_batch,)`, int32: the newest token of each slot.
        drawn, logprobs: `(max_batch * T,)`, int32 and float32: of each row, the token that was drawn behind it.
        accepted: `(max_batch,)`, int32: how many proposals were.
        limits: `(max_batch,)`, int32: how many each slot has; -1 for one that takes no part.
        ids, positions, nexts: `(max_batch * T,)`, int32: of each row, its token, the position of that, and the position
            of the token to draw.
        seen: `(max_batch * T, words)`, int32: of each row, the tokens that its sequence has seen.
        follower: the draft model's decoder, for prompts.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_batch: int,
        vocab: int,
        proposals: int,
        draft: tuple[ModelConfig, Weights] | None = None,
    ) -> None:
        device = cache.k.device
        self.n_tokens, self._cache, self._vocab, self._device = proposals + 1, cache, vocab, device
        # Rows: the newest tokens, the proposals, the limits, and whether a slot takes part. 16 bytes apart.
        self._given = torch.zeros((proposals + 3, max_batch + -max_batch % 4), dtype=torch.int32, device=device)
        by_slot = self._given[:, :max_batch]
        self.tokens, self.limits, self._live = by_slot[0], by_slot[-2], by_slot[-1]
        n = max_batch * self.n_tokens
        self.ids, self.positions, self.nexts, self.drawn = (
            torch.zeros(n, dtype=torch.int32, device=device) for _ in range(4)
        )
        self.logprobs = torch.zeros(n, dtype=torch.float32, device=device)
        self.accepted = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self.seen = torch.zeros((n, -(-vocab // 32)), dtype=torch.int32, device=device)
        self.follower: Decoder | None = None
        if draft is not None:
            self._follow(*draft)

    def _follow(self, config: ModelConfig, weights: Weights) -> None:
        """A decoder over a cache with the pages of the model's, for prompts; and one that counts for itself."""
        cache = self._cache
        own = weights.embedding.dtype
        mirror = PagedKVCache(
            cache.k.shape[1], cache.page_size, config.kv_heads, config.head_dim,
            max_sequences=cache.lengths.shape[0], max_seq_len=cache.capacity, layers=config.layers,
            dtype=cache.k.dtype if cache.k.dtype.itemsize == 1 else own, device=self._device,
        )  # fmt: skip
        ahead = copy.copy(mirror)
        ahead.page_table, ahead.counts = cache.page_table, self._live
        mirror.page_table, mirror.lengths = cache.page_table, cache.lengths
        mirror.starts, mirror.counts = cache.starts, cache.counts
        self.follower = Decoder(config, weights, mirror)
        self._drafter = copy.copy(self.follower)
        self._drafter.cache = ahead

    def send(self, proposals: Mapping[int, Sequence[int]]) -> None:
        """Send the proposals for each slot that takes part; of a draft model's, only how many count."""
        host = torch.zeros(
            (self._given.shape[0] - 1, self._given.shape[1]), dtype=torch.int32, device="cpu",
            pin_memory=self._device.type == "cuda",
        )  # fmt: skip
        rows = [[0] * host.shape[1] for _ in range(host.shape[0])]
        rows[-2] = [-1] * host.shape[1]
        for slot, tokens in proposals.items():
            for i, token in enumerate(tokens):
                rows[i][slot] = token
            rows[-2][slot], rows[-1][slot] = len(tokens), 1
        host.copy_(torch.tensor(rows, dtype=torch.int32, device="cpu"))
        self._given[1:].copy_(host, non_blocking=True)

    def draft(self, b: int) -> None:
        """Let the draft model, if there is one, propose tokens for the first b slots.

        It computes the last proposal, too, for its own cache. The model's cache has not advanced yet.
        """
        if self.follower is None:
            return
        ahead = self._drafter.cache
        ahead.lengths.copy_(self._cache.lengths)
        for i in range(self.n_tokens):
            ahead.count()
            logits = self._drafter.decode(self._given[i, :b])
            if i + 1 < self.n_tokens:
                sample_(self._given[i + 1, :b], self.logprobs[:b], logits)

    def lay_out(
        self, b: int, seen: Tensor | None = None, counts: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Write `ids`, positions and, of those tables of slots, rows: `self.seen`, and counts and biases, returned.

        The cache has advanced by T tokens.
        """
        n, words = b * self.n_tokens, self.seen.shape[1]
        row_counts, row_bias = (
            None if x is None else torch.empty((n, self._vocab), dtype=x.dtype, device=self._device)
            for x in (counts, bias)
        )
        widest = max(words if seen is not None else 1, 1 if counts is bias is None else self._vocab)
        block = 1024 if runtime.target(self._device) is not runtime.INTERPRETER else 4096
        parts = library.cdiv(widest, block)
        launching.launch(
            _rows_launcher(tuple(x is not None for x in (seen, counts, bias)), self.n_tokens, block),
            n * parts,
            (
                self._given, self._cache.starts, self.ids, self.positions, self.nexts, seen,
                None if seen is None else self.seen, counts, row_counts, bias, row_bias,
            ),
            (self._given.stride(0), *(0 if x is None else x.stride(0) for x in (seen, counts, bias))),
            (words, self._vocab, parts),
        )  # fmt: skip
        return row_counts, row_bias
