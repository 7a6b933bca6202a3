"""Caches of keys and values, in memory that is taken once: one stretch for each sequence, or pages that they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rooftile.engine.paged import PagedKVCache, PagedSequence
from rooftile.engine.steps import Steps, check_positive, new_tokens
from rooftile.ops.kv_cache import Layout

__all__ = ["KVCache", "PagedKVCache", "PagedSequence"]


class KVCache(Steps):
    """Keys and values of a batch of sequences, each with room for `max_seq_len` tokens.

        cache = rooftile.KVCache(batch, max_seq_len, kv_heads, head_dim, layers=layers)
        cache.extend(n)                                          # a step of n tokens for every sequence
        for layer in range(layers):
            q = cache.rope_and_append(layer, q, k, v, cos, sin)  # or cache.append(layer, k, v)
            y = cache.attend(layer, q)                           # rooftile.decode_attention(q, **cache.inputs(layer))

    Args:
        batch: sequences.
        max_seq_len: tokens of each.
        kv_heads, head_dim: of the keys.
        value_dim: the head dimension of the values, where it is another.
        layers: how many the model has.
        dtype: the model's, or float8_e4m3fn or int8.
        device: by default that of kernels.
        layout: the order of tokens and heads in memory.
        scales: for the 8-bit dtypes: `"token"` (the default), one for each token and head, written with it; or two
            tensors, of k and of v, float32, `()`, `(kv_heads,)` or `(layers, kv_heads)`.

    Bytes: `2 * layers * batch * max_seq_len * kv_heads * head_dim * itemsize`, all of it taken at once.
    """

    def __init__(
        self,
        batch: int,
        max_seq_len: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        layout: Layout = "bthd",
        scales: str | tuple[Tensor, Tensor] | None = None,
    ) -> None:
        check_positive("KVCache", batch=batch, max_seq_len=max_seq_len)
        super().__init__(
            batch, max_seq_len, batch, max_seq_len, kv_heads, head_dim, value_dim, layers, dtype, device, layout, scales
        )
        self._tokens = [0] * batch

    @property
    def tokens(self) -> list[int]:
        """The length of each sequence, as the host knows it: those reserved among them."""
        return list(self._tokens)

    def reserve(self, new: int | Sequence[int]) -> None:
        """Begin a step of so many new tokens for every sequence, or for each. Nothing happens on the device but that
        `counts` is written where it changes.

        Raises:
            TypeError: a number is no integer.
            ValueError: a number is negative, there are not as many as sequences, or a sequence has no room for them.
            RuntimeError: `advance` was not called for the tokens reserved before.

        Nothing is changed then.
        """
        self._check_advanced()
        batch = len(self._tokens)
        counts = [new] * batch if isinstance(new, int) else list(new)
        if len(counts) != batch:
            raise ValueError(f"KVCache.reserve: new has {len(counts)} numbers, expected {batch}, one for each sequence")
        counts = [new_tokens("KVCache.reserve", f"sequence {b}", n) for b, n in enumerate(counts)]
        for b, (length, n) in enumerate(zip(self._tokens, counts, strict=True)):
            if length + n > self.capacity:
                raise ValueError(
                    f"KVCache.reserve: the cache is full: sequence {b} has {length} tokens, and {n} more do not fit "
                    f"into {self.capacity}"
                )
        self._tokens = [length + n for length, n in zip(self._tokens, counts, strict=True)]
        self._begin(counts)

    def extend(self, new: int | Sequence[int]) -> None:
        """`reserve` and `advance`."""
        self.reserve(new)
        self.advance()

    def reset(self, sequence: int | None = None) -> None:
        """Forget the tokens of a sequence, or of all, and what they were to get in this step.

        Raises:
            IndexError: there is no such sequence.
        """
        batch = len(self._tokens)
        if sequence is not None and not 0 <= sequence < batch:
            raise IndexError(f"KVCache.reset: sequence is {sequence}, expected 0 to {batch - 1}")
        rows = slice(0, batch) if sequence is None else slice(sequence, sequence + 1)
        self._tokens[rows] = [0] * len(self._tokens[rows])
        self._send(self.lengths[rows], self._tokens[rows])
        self._drop(rows)
