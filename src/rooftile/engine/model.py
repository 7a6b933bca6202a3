"""The forward pass of a decoder: of whole prompts, packed one behind the other, and of one token of each sequence.

Of a layer's kernels in decoding there are six: the norm with the product of q, k and v; RoPE with the writes into the
cache; attention; the product that follows it, with the residual; the norm with the gated pair of products; and the last
product, with the residual. `rooftile.engine.plan` counts their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftile.engine import rotary
from rooftile.engine.config import ModelConfig
from rooftile.engine.paged import PagedKVCache, PagedSequence
from rooftile.engine.weights import Weights
from rooftile.ops.attention import attention, attention_varlen
from rooftile.ops.decode_attention import decode_attention
from rooftile.ops.embedding import embedding
from rooftile.ops.kv_cache import append_kv, rope_and_cache
from rooftile.ops.qk_norm_rope import qk_norm_rope
from rooftile.ops.rope import rope_

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A model over a paged cache. Nothing in it waits for the device, and every computation is an op of Rooftile.

    Args:
        config, weights: the model.
        cache: of its layers, heads and dtype; its steps are the caller's.
    """

    def __init__(self, config: ModelConfig, weights: Weights, cache: PagedKVCache) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        self.cos, self.sin = rotary.tables(config, cache.capacity, cache.k.device)

    def decode(self, ids: Tensor) -> Tensor:
        """Logits `(b, V)` of the token that follows `ids`, `(b,)`: one of each of the first b slots.

        The cache is in a step of one token for each sequence that takes part; other slots get rows that mean nothing.
        """
        b, c, cache = ids.shape[0], self.config, self.cache
        starts, lengths, pages = cache.starts[:b], cache.lengths[:b], cache.page_table[:b]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x[:, None] for x in (q, k, v))  # (b, 1, H, D)
            given = cache.inputs(layer) | {"lengths": starts, "page_table": pages, "counts": cache.counts[:b]}
            if c.qk_norm:
                q, k = self._normed_and_turned(layer, q, k, starts[:, None])
                append_kv(k, v, **given)
            else:
                q = rope_and_cache(q, k, v, self.cos, self.sin, **given)
            del given["counts"]
            given["lengths"] = lengths
            return decode_attention(q, **given, scale=c.attention_scale, window=c.windows[layer])[:, 0]  # type: ignore[call-overload]

        return self._logits(self._layers(self._embed(ids), attend))

    def prefill(
        self, prompts: Sequence[Sequence[int]], sequences: Sequence[PagedSequence], every: bool = False
    ) -> Tensor:
        """Logits of the token that follows each prompt, `(n, V)`; with `every`, of each token, `(tokens, V)`.

        The cache is in the step that gives each sequence the tokens of its prompt; it has none before.
        """
        c, cache = self.config, self.cache
        longest = max(len(p) for p in prompts)
        even = all(len(p) == longest for p in prompts)  # then they are a batch, and need not be packed
        starts = [0]
        for prompt in prompts:
            starts.append(starts[-1] + len(prompt))
        ids, positions, ends, last = self._send(
            [t for p in prompts for t in p],
            [t for p in prompts for t in range(len(p))],
            starts,
            [end - 1 for end in starts[1:]],
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if c.qk_norm:
                q, k = (x[0] for x in self._normed_and_turned(layer, q[None], k[None], positions[None]))
            else:
                rope_(q[None], k[None], self.cos, self.sin, position_ids=positions[None], layout="BTHD")
            given = cache.inputs(layer)
            table = given["page_table"]
            for start, end, sequence in zip(starts, starts[1:], sequences, strict=False):
                slot = slice(sequence.slot, sequence.slot + 1)
                rows = {"lengths": cache.starts[slot], "page_table": table[slot]}
                append_kv(k[None, start:end], v[None, start:end], **given | rows)
            options = {"causal": True, "scale": c.attention_scale, "window": c.windows[layer]}
            if even:
                batch = (x.unflatten(0, (len(prompts), longest)) for x in (q, k, v))
                return attention(*batch, layout="bthd", **options).flatten(0, 1)  # type: ignore[arg-type,union-attr]
            return attention_varlen(q, k, v, ends, None, longest, longest, **options)  # type: ignore[arg-type,return-value]

        x = self._layers(self._embed(ids), attend)
        if not every:
            x = embedding(last, x)
        return self._logits(x)

    def _send(self, *numbers: list[int]) -> list[Tensor]:
        """int32 tensors on the device, in one copy, 16 bytes apart: kernels are compiled anew for another alignment."""
        device = self.cache.k.device
        padded = [ns + [0] * (-len(ns) % 4) for ns in numbers]
        on_host = torch.tensor([n for ns in padded for n in ns], dtype=torch.int32, pin_memory=device.type == "cuda")
        parts = on_host.to(device, non_blocking=True).split([len(ns) for ns in padded])
        return [part[: len(ns)] for part, ns in zip(parts, numbers, strict=True)]

    def _embed(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weights.embedding, scale=self.config.embedding_scale)

    def _layers(self, x: Tensor, attend: Attend) -> Tensor:
        """Hidden states `(tokens, hidden)` through all layers."""
        c = self.config
        heads = (c.heads, c.kv_heads, c.kv_heads)
        for index, layer in enumerate(self.weights.layers):
            qkv = layer.qkv.normed(x, layer.input_norm, c.norm_eps)
            q, k, v = qkv.unflatten(-1, (sum(heads), c.head_dim)).split(heads, dim=-2)
            x = layer.o(attend(index, q, k, v).flatten(-2), residual=x)
            x = layer.down(layer.gate_up.gated(x, layer.post_norm, c.norm_eps), residual=x)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        return self.weights.lm_head.normed(x, self.weights.norm, self.config.norm_eps)

    def _normed_and_turned(self, layer: int, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weights.layers[layer]
        return qk_norm_rope(
            q, k, w.q_norm, w.k_norm, self.cos, self.sin, eps=self.config.head_norm_eps, position_ids=positions,
            layout="BTHD",
        )  # fmt: skip
