"""The kernels of a decoding step: the bytes that each reads and writes, its FLOPs, and its launches.

Counted are the bytes that must move, as for every op: each weight once, activations in and out once, and the visible
keys and values. Activations that stay in the L2 between kernels are counted too; they are small beside the weights.
FLOPs are those of GEMMs and attention.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rooftile import library, runtime
from rooftile.engine import weights
from rooftile.engine.config import ModelConfig
from rooftile.engine.projections import Dense, Projection, Quantized, is_one_kernel
from rooftile.engine.weights import Layer
from rooftile.ops.decode_attention.choose import choose as choose_attention
from rooftile.ops.decode_attention.choose import row_tile
from rooftile.ops.gemm.choose import choose
from rooftile.ops.gemm.config import Problem
from rooftile.ops.gemm.dequantize import rows_at_a_time
from rooftile.ops.gemm.dispatch import FORMATS


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A call of an op.

    Attributes:
        name: the part of the model.
        op: Rooftile's op; "" for the kernels of the engine itself.
        shape: of its operands, as text.
        read, written: bytes.
        flops: two per multiply-add.
        launches: kernels per call.
        times: calls in a decoding step.
    """

    name: str
    op: str
    shape: str
    read: int
    written: int
    flops: int = 0
    launches: int = 1
    times: int = 1


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The calls of a decoding step in their order; a layer's calls appear once."""

    steps: tuple[OpCall, ...]

    def _sum(self, name: str) -> int:
        return sum(getattr(s, name) * s.times for s in self.steps)

    @property
    def read(self) -> int:
        return self._sum("read")

    @property
    def written(self) -> int:
        return self._sum("written")

    @property
    def nbytes(self) -> int:
        return self.read + self.written

    @property
    def flops(self) -> int:
        return self._sum("flops")

    @property
    def launches(self) -> int:
        return self._sum("launches")

    def launches_by_op(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for s in self.steps:
            found[s.op] += s.launches * s.times
        return found


_LENGTH = 4  # bytes of a length, a count or a page


@dataclasses.dataclass(frozen=True)
class _Builder:
    """The calls for one configuration, batch and context; see `plan`. The weights are on the meta device."""

    c: ModelConfig
    weights: weights.Weights
    batch: int
    context: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    capacity: int
    target: runtime.Target

    @property
    def size(self) -> int:
        """Bytes of an activation."""
        return self.dtype.itemsize

    def _rows(self, *columns: int) -> int:
        """Bytes of activations with those columns, a row for each sequence."""
        return self.batch * sum(columns) * self.size

    def _norm(self, name: str, norm: Tensor, quantized: bool, times: int) -> OpCall:
        """A norm as a kernel of its own."""
        columns = norm.shape[0]
        op = "rms_norm_quantized" if quantized else "rms_norm"
        out = self.batch * (columns + 4) if quantized else self._rows(columns)
        read = self._rows(columns) + norm.nbytes
        return OpCall(name, op, f"{self.batch} x {columns}", read, out, times=times)

    def _product(
        self,
        name: str,
        op: str,
        p: Projection,
        x_bytes: int,
        out: int,
        *,
        more: int = 0,
        launches: int = 1,
        times: int = 1,
    ) -> OpCall:
        """The GEMM of x with the weight of p, which reads `more` bytes beside them."""
        flops = 2 * self.batch * p.n * p.k
        written = self._rows(out)
        if op in ("int8_linear", "int4_linear") and self._dequantizes(p):
            dequantized = p.n * p.k * self.size
            launches += 2 * library.cdiv(p.n, rows_at_a_time(p.n, p.k, self.size)) - 1
            more, written = more + dequantized, written + dequantized
        shape = f"{self.batch} x {p.k} -> {p.n}" if out == p.n else f"{self.batch} x {p.k} -> {p.n // out} x {out}"
        return OpCall(name, op, shape, p.nbytes + x_bytes + more, written, flops, launches, times)

    def _dequantizes(self, p: Projection) -> bool:
        """Whether a kernel dequantizes the weight of p before the GEMM."""
        assert isinstance(p, Quantized)
        weight = FORMATS[p.weight.dtype]
        group = p.k // p.scale.shape[1] if weight == "int4" else 0
        chosen = choose(
            Problem(self.batch, p.n, p.k, self.dtype, weight=weight, group=group, offsets=p.scale.dim() == 3),
            self.target,
        )
        return chosen is not None and chosen.kernel == "dequantize"

    def _normed(
        self, name: str, p: Projection, norm: Tensor | None, times: int, *, gated: bool = False
    ) -> Iterator[OpCall]:
        """`Projection.normed`, or `gated`."""
        n = p.n // (1 + gated)
        if norm is None and gated and isinstance(p, Dense):
            yield self._product(name, "gated_linear", p, self._rows(p.k), n, times=times)
            return
        if norm is not None and (isinstance(p, Dense) or self._alone(p)):
            op = "rms_norm_gated_linear" if gated else "rms_norm_linear"
            launches = 1
            if (
                isinstance(p, Dense)
                and choose(Problem(self.batch, n, p.k, self.dtype, gated=gated, norm=True), self.target) is None
            ):
                launches = 2
            yield self._product(
                f"norm and {name}", op, p, self._rows(p.k), n, more=norm.nbytes, launches=launches, times=times
            )
            return
        fp8 = p.kind == "fp8" and not self._alone(p)
        if norm is None:
            yield self._plain(name, p, times)
        else:
            yield self._norm(f"norm before {name}", norm, fp8, times)
            x = self.batch * (p.k + 4) if fp8 else self._rows(p.k)
            yield self._product(name, f"{p.kind}_linear", p, x, p.n, times=times)
        if gated:
            out = self.batch * (n + 4) if fp8 else self._rows(n)
            op = "silu_mul" if self.c.activation == "silu" else "gelu_mul"
            op += "_quantized" if fp8 else "_packed"
            yield OpCall("activation", op, f"{self.batch} x {n}", self._rows(p.n), out, times=times)

    def _alone(self, p: Projection) -> bool:
        """Whether p is quantized and x has one row, which is not quantized."""
        return self.batch == 1 and isinstance(p, Quantized)

    def _added(self, name: str, p: Projection, norm: Tensor | None, times: int) -> Iterator[OpCall]:
        """A GEMM with a residual; with a norm the residual is added by a kernel of its own."""
        if norm is None:
            yield self._plain(name, p, times, residual=self._rows(p.n))
            return
        yield self._plain(name, p, times)
        yield self._norm(f"norm after {name}", norm, False, times)
        both = self._rows(p.n, p.n)
        yield OpCall(f"addition after {name}", "add_rms_norm", f"{self.batch} x {p.n}", both, both, times=times)

    def _plain(self, name: str, p: Projection, times: int, residual: int = 0) -> OpCall:
        """A GEMM of activations that are not normalized, with a residual of that many bytes."""
        op = "linear" if isinstance(p, Dense) else f"{p.kind}_linear"
        fp8 = p.kind == "fp8"
        if fp8 and self._alone(p):
            op, fp8 = "fp8_weight_linear", False
        quantized = fp8 and name == "down"
        x = self.batch * (p.k + 4) if quantized else self._rows(p.k)
        # Other activations than the gate's are not quantized: fp8_linear does that by a launch of its own.
        launches = 2 if fp8 and not quantized else 1
        return self._product(name, op, p, x, p.n, more=residual, launches=launches, times=times)

    def _into_cache(self, layer: Layer, times: int) -> Iterator[OpCall]:
        """From hidden states to the rotated q, and to keys and values in the cache."""
        c, b, p = self.c, self.batch, layer.qkv
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        scales = 4 * c.kv_heads if self.kv_dtype.itemsize == 1 else 0  # one per token and head
        cached = b * 2 * (kv * self.kv_dtype.itemsize + scales)
        tables = b * 2 * len(c.rotary.inv_freq) * 4  # cos and sin of each pair
        places = b * 3 * _LENGTH  # the token's place: a length, a count, a page
        shape = f"{b} x {c.heads}/{c.kv_heads} heads of {c.head_dim}"
        plain = layer.q_norm is None and 2 * len(c.rotary.inv_freq) == c.head_dim
        if plain and layer.input_norm is not None and is_one_kernel(p, b, self.kv_dtype):
            more = layer.input_norm.nbytes + tables + places
            name, op = "norm, qkv, RoPE and cache write", "rms_norm_qkv_rope_cache"
            yield self._product(name, op, p, self._rows(p.k), p.n, more=more, times=times)
            return
        yield from self._normed("qkv", p, layer.input_norm, times)
        if c.whole_qk_norm:
            for name, norm in (("q", layer.q_norm), ("k", layer.k_norm)):
                assert norm is not None, "both or neither"
                yield self._norm(f"norm of {name}", norm, False, times)
        if c.qk_norm:
            read = self._rows(q, kv) + tables + 2 * c.head_dim * self.size + b * _LENGTH
            yield OpCall("norms of q and k, RoPE", "qk_norm_rope", shape, read, self._rows(q, kv), times=times)
            yield OpCall("cache write", "append_kv", shape, self._rows(kv, kv) + places, cached, times=times)
            return
        read = self._rows(q, kv, kv) + tables + places
        yield OpCall("RoPE and cache write", "rope_and_cache", shape, read, self._rows(q) + cached, times=times)

    def _attention(self, window: int | None, times: int) -> OpCall:
        c, b = self.c, self.batch
        seen = min(self.context, window or self.context)
        scales = 4 if self.kv_dtype.itemsize == 1 else 0
        cache = 2 * b * seen * c.kv_heads * (c.head_dim * self.kv_dtype.itemsize + scales)
        pages = b * (library.cdiv(seen, self.page_size) + 1) * _LENGTH
        q = self._rows(c.heads * c.head_dim)
        cut = f", the last {seen}" if seen < self.context else ""
        return OpCall(
            "attention",
            "decode_attention",
            f"{b} x {c.heads}/{c.kv_heads} heads of {c.head_dim}, {self.context} tokens{cut}",
            cache + q + pages,
            q,
            4 * b * c.heads * c.head_dim * seen,
            self._attention_launches(),
            times,
        )

    def _attention_launches(self) -> int:
        """Two where a second kernel combines the parts of a sequence."""
        c = self.c
        group = c.heads // c.kv_heads
        items = self.batch * c.kv_heads * row_tile(group)[1]
        capacity = library.cdiv(self.capacity, self.page_size) * self.page_size
        chosen = choose_attention(
            group, c.head_dim, c.head_dim, self.dtype, self.kv_dtype, items, capacity, self.page_size, self.target
        )
        blocks = items * library.cdiv(capacity, chosen.block_n)
        programs = min(self.target.multiprocessors * chosen.programs_per_sm, blocks // chosen.min_blocks)
        return 2 if programs > 1 and chosen.combine == "kernel" else 1

    def steps(self) -> Iterator[OpCall]:
        c, b, w = self.c, self.batch, self.weights
        n, layer = c.layers, w.layers[0]
        numbers = 3 * b * _LENGTH
        yield OpCall("lengths", "", f"{b}", numbers, numbers)
        yield OpCall(
            "embedding",
            "embedding",
            f"{b} of {c.vocab} x {c.hidden}",
            self._rows(c.hidden) + b * _LENGTH,
            self._rows(c.hidden),
        )
        yield from self._into_cache(layer, n)
        for window, times in Counter(c.windows).items():
            yield self._attention(window, times)
        yield from self._added("o", layer.o, layer.attention_norm, n)
        yield from self._normed("gate_up", layer.gate_up, layer.post_norm, n, gated=True)
        yield from self._added("down", layer.down, layer.mlp_norm, n)
        yield from self._normed("lm_head", w.lm_head, w.norm, 1)
        if c.logits_softcap is not None:
            logits = self._rows(c.vocab)
            yield OpCall("soft cap of logits", "", f"{b} x {c.vocab}", logits, logits)
        yield self._sampling()

    def _sampling(self) -> OpCall:
        """The most likely token of each row."""
        logits = self._rows(self.c.vocab)
        return OpCall("greedy sampling", "sample_", f"{self.batch} x {self.c.vocab}", logits, self.batch * 8)


def plan(
    config: Any,
    batch: int = 1,
    context: int = 512,
    *,
    dtype: torch.dtype = torch.bfloat16,
    quantize: str | None = None,
    kv_dtype: torch.dtype | None = None,
    page_size: int = 64,
    capacity: int | None = None,
    target: runtime.Target | None = None,
) -> StepPlan:
    """What a greedy decoding step of `rooftile.Engine` launches.

    Args:
        config: a `ModelConfig`, such as an engine's, or what `ModelConfig.from_hf` takes.
        batch: sequences.
        context: tokens of each in the cache, including the new one.
        dtype, quantize, kv_dtype, page_size: as `Engine.from_pretrained` takes them.
        capacity: the engine's max_seq_len; `context` by default.
        target: the GPU, which launches depend on; an H100 by default.

    Raises:
        ValueError, TypeError: a size is not positive, or the engine does not accept dtype or quantize.
    """
    for name, size in (("batch", batch), ("context", context)):
        if size < 1:
            raise ValueError(f"plan: {name} is {size}, expected a positive integer")
    config = config if isinstance(config, ModelConfig) else ModelConfig.from_hf(config)
    builder = _Builder(
        c=config,
        weights=weights.random(config, dtype=dtype, quantize=quantize, device="meta"),
        batch=batch,
        context=context,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        page_size=page_size,
        capacity=capacity or context,
        target=target or runtime.TARGETS["sm_90"],
    )
    return StepPlan(tuple(builder.steps()))
