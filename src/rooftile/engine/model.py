"""The forward pass of a decoder: parts of prompts, and one token of each sequence.

Decoding one sequence takes five kernels a layer: norm, qkv GEMV, RoPE and cache write; attention; the output projection
with the residual; norm and gated GEMV; the down projection with the residual. With several sequences RoPE and the cache
write are a sixth. Where what a layer adds is normalized, norm and addition are kernels of their own.
`rooftile.engine.plan` counts the bytes of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.engine.cascade import Cascade
from rooftile.engine.config import ModelConfig
from rooftile.engine.paged_cache import PagedKVCache
from rooftile.engine.projections import Activations, Projection
from rooftile.engine.prompts import Inputs, MixedBatch
from rooftile.engine.ranks import Ranks
from rooftile.engine.softcap import softcap_
from rooftile.engine.weights import Weights, invariant
from rooftile.ops.add_rms_norm import add_rms_norm
from rooftile.ops.attention import attention_paged
from rooftile.ops.decode_attention import decode_attention
from rooftile.ops.embedding import embedding
from rooftile.ops.kv_cache import append_kv, rope_and_cache
from rooftile.ops.qk_norm_rope import qk_norm_rope
from rooftile.ops.rms_norm import rms_norm
from rooftile.ops.rope import rope_

# (layer, hidden states) -> the output of the layer's heads, (tokens, heads, head_dim).
Attend = Callable[[int, Tensor], Tensor]


class Decoder:
    """A model over a paged cache. It never waits for the device, and every computation is one of Rooftile's ops.

    Args:
        config, weights: the model.
        cache: for its layers and heads; the caller reserves its steps.
        ranks: of a model that is split. The model, its weights and its cache are this rank's then.
        deterministic: compute each token in one way, whatever else is in the step.

    Attributes:
        follower: another model's decoder, which computes the same prompts for a cache of its own.
    """

    follower: Decoder | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: PagedKVCache,
        ranks: Ranks | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self.config, self.weights = config, invariant(weights) if deterministic else weights
        self.cache, self.ranks, self._deterministic = cache, ranks, deterministic
        self._ends: dict[tuple[int, int], Tensor] = {}
        tables = {r: r.tables(cache.capacity, cache.k.device) for r in dict.fromkeys(config.rotaries)}
        self.tables = [tables[r] for r in config.rotaries]  # cos and sin of each layer
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale_rounds:
            self.embedding_scale = torch.tensor(
                self.embedding_scale, dtype=weights.embedding.dtype, device="cpu"
            ).item()

    def decode(self, ids: Tensor, positions: Tensor | None = None, cascade: Cascade | None = None) -> Tensor:
        """Logits `(b, V)` of the token that follows `ids`, `(b,)`, one for each of the first b slots.

        The cache is in a step of one token for each sequence that takes part. Rows of other slots have no meaning.
        In a step of T tokens for each, ids are `(b, T)`, as are their positions, and logits `(b * T, V)`. With
        `cascade`, all sequences begin with its group's pages.
        """
        b, c, cache = ids.shape[0], self.config, self.cache
        ids = ids.flatten()
        if cascade is not None:
            cascade.lay_out(b)
        starts, lengths, pages = cache.starts[:b], cache.lengths[:b], cache.page_table[:b]

        def attend(layer: int, x: Tensor) -> Tensor:
            into = cache.inputs(layer) | {"page_table": pages, "starts": starts, "counts": cache.counts[:b]}
            del into["lengths"]
            if self._deterministic:  # as in `prefill`
                flat, *new = self._rotated(layer, x, starts if positions is None else positions.flatten())
                append_kv(*(t.unflatten(0, (b, -1)) for t in new), **into)
                return self._attend_newest(layer, flat, lengths, pages)
            if c.whole_qk_norm:
                q, k, v = (t.unflatten(0, (b, -1)) for t in self._qkv(layer, x))
                q = rope_and_cache(q, k, v, *self.tables[layer], **into)
            elif c.qk_norm:
                q, k, v = (t.unflatten(0, (b, -1)) for t in self._qkv(layer, x))  # (b, T, H, D)
                at = starts[:, None] if positions is None else positions
                q, k = self._normalized_and_rotated(layer, q, k, *self.tables[layer], at)
                append_kv(k, v, **into)
            else:
                w = self.weights.layers[layer]
                q = w.qkv.into_cache(x, w.input_norm, c.norm_eps, *self.tables[layer], **into)
            if cascade is not None and c.windows[layer] is None:
                return cascade.attend(layer, q.flatten(0, 1), **self._scoring(layer))
            return self._attend_newest(layer, q.flatten(0, 1), lengths, pages)

        return self._logits(self._layers(self._embed(ids), attend))

    def prefill(self, batch: MixedBatch, inputs: Inputs) -> Tensor:
        """Logits `(rows, V)` of the tokens that follow parts of prompts and newest tokens, or of every token.

        They continue what is in the cache, which is in the step of these tokens.
        """
        if self.follower is not None:
            self.follower.prefill(batch, inputs)
        into = {"starts": inputs.starts, "page_table": inputs.pages, "counts": inputs.counts}

        def attend(layer: int, x: Tensor) -> Tensor:
            given = self.cache.inputs(layer) | into
            del given["lengths"]
            q, k, v = self._rotated(layer, x, inputs.positions)
            append_kv(k[:, None], v[:, None], **given)
            return self._attend_mixed(layer, q, batch, inputs)

        x = self._layers(self._embed(inputs.ids), attend)
        if inputs.rows is not None:
            x = embedding(inputs.rows, x)
        return self._logits(x)

    def _rotated(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rotated q, the rotated k, and v of hidden states `(tokens, hidden)` at those positions.

        They are (tokens, heads, head_dim).
        """
        q, k, v = (t[None] for t in self._qkv(layer, x))
        cos, sin = self.tables[layer]
        if self.config.qk_norm:
            q, k = self._normalized_and_rotated(layer, q, k, cos, sin, positions)
        else:
            rope_(q, k, cos, sin, position_ids=positions, rotary_dim=cos.shape[-1], layout="bthd")
        return q[0], k[0], v[0]

    def _attend_newest(
        self, layer: int, q: Tensor, lengths: Tensor, pages: Tensor, out: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Attention of the newest tokens of sequences, as many of each, q `(tokens, heads, head_dim)`."""
        b = lengths.shape[0]
        n = q.shape[0] // b
        if self._deterministic:
            if (b, n) not in self._ends:
                of_host = torch.arange(0, b * n + 1, n, dtype=torch.int32, device="cpu")
                self._ends[b, n] = of_host.to(q.device)
            return self._attend_paged(layer, q, lengths, pages, self._ends[b, n], n, out)
        given = self.cache.inputs(layer) | {"lengths": lengths, "page_table": pages, **self._scoring(layer)}
        into = None if out is None else out.unflatten(0, (b, n))
        return decode_attention(q.unflatten(0, (b, n)), **given, out=into).flatten(0, 1)  # type: ignore[union-attr]

    def _attend_paged(
        self, layer: int, q: Tensor, lengths: Tensor, pages: Tensor, ends: Tensor, longest: int, out: Tensor | None
    ) -> Tensor:
        """Attention of packed tokens to the cache."""
        given = self.cache.inputs(layer)
        scales = {name: given[name] for name in ("k_scale", "v_scale", "cache_layout")}
        return attention_paged(  # type: ignore[return-value]
            q, given["k_cache"], given["v_cache"], pages, lengths, ends, max_seqlen_q=longest, **scales,
            **self._scoring(layer), config="invariant" if self._deterministic else None, out=out,
        )  # fmt: skip

    def _attend_mixed(self, layer: int, q: Tensor, batch: MixedBatch, inputs: Inputs) -> Tensor:
        """Attention of the tokens of a `MixedBatch`.

        Newest tokens and parts of prompts have a kernel each: one divides long caches among programs, the other
        multiplies whole tiles of queries. Each writes rows of one result.
        """
        n = batch.newest
        out = torch.empty((*q.shape[:2], self.cache.v.shape[-1]), dtype=q.dtype, device=q.device)
        if n and inputs.lengths is not None:
            self._attend_newest(layer, q[:n], inputs.lengths, self.cache.page_table[:n], out[:n])
        if inputs.ends is not None and inputs.part_lengths is not None and inputs.part_pages is not None:
            more = inputs.part_lengths, inputs.part_pages, inputs.ends
            self._attend_paged(layer, q[n:], *more, batch.longest, out[n:])
        return out

    def _scoring(self, layer: int) -> dict[str, Any]:
        """What the attention ops take."""
        c = self.config
        return {"scale": c.attention_scale, "window": c.windows[layer], "softcap": c.attention_softcap}

    def _embed(self, ids: Tensor) -> Tensor:
        if self.ranks is not None:
            return self.ranks.embedding(ids, self.weights.embedding, self.embedding_scale)
        return embedding(ids, self.weights.embedding, scale=self.embedding_scale)

    def _layers(self, x: Tensor, attend: Attend) -> Tensor:
        """All layers, over hidden states `(tokens, hidden)`."""
        c = self.config
        for index, layer in enumerate(self.weights.layers):
            x = self._add(x, layer.o, attend(index, x).flatten(-2), layer.attention_norm)
            gated = layer.gate_up.gated(x, layer.post_norm, c.norm_eps, c.activation)
            x = self._add(x, layer.down, gated, layer.mlp_norm)
        return x

    def _add(self, x: Tensor, projection: Projection, y: Activations, norm: Tensor | None) -> Tensor:
        """x plus the projection of y, or plus the norm of that. Each rank has some columns of the projection."""
        if norm is None:
            if self.ranks is None:
                return projection(y, residual=x)
            return self.ranks.sum_(projection(y, residual=x if self.ranks.rank == 0 else None))
        added = projection(y) if self.ranks is None else self.ranks.sum_(projection(y))
        return add_rms_norm(rms_norm(added, norm, eps=self.config.norm_eps, rounding="none"), x)[1]

    def _qkv(self, layer: int, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of hidden states, `(tokens, heads, head_dim)` each."""
        c, w = self.config, self.weights.layers[layer]
        heads = (c.heads, c.kv_heads, c.kv_heads)
        qkv = w.qkv.normed(x, w.input_norm, c.norm_eps)
        q, k, v = qkv.unflatten(-1, (sum(heads), c.head_dim)).split(heads, dim=-2)
        if c.whole_qk_norm:
            norms = ((q, w.q_norm), (k, w.k_norm))
            q, k = (rms_norm(t.flatten(-2), n, eps=c.head_norm_eps, rounding="none").view(t.shape) for t, n in norms)
        return q, k, v

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.weights.lm_head.normed(x, self.weights.norm, self.config.norm_eps)
        if self.ranks is not None:
            logits = self.ranks.gathered(logits)
        cap = self.config.logits_softcap
        return logits if cap is None else softcap_(logits, cap)

    def _normalized_and_rotated(
        self, layer: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        w = self.weights.layers[layer]
        return qk_norm_rope(
            q, k, w.q_norm, w.k_norm, cos, sin, eps=self.config.head_norm_eps, position_ids=positions, layout="bthd"
        )
