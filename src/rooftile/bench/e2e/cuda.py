"""The engine's baseline: the same weights run by PyTorch alone, as fast as PyTorch can.

GEMMs are cuBLAS's, with the same packed qkv and gate_up weights. Attention is SDPA's: cuDNN or FlashAttention for
prompts; for a step the fastest here of those that take a mask, or FlexAttention, over a static cache of exactly the
final length, with a mask for tokens beyond the current length. torch.compile makes norms, RoPE, activation, residual
adds and the choice of the token. The device never waits for the host. A step is one CUDA graph, and so are prompts of
as many tokens as the engine captures.

Compiled are a layer, and what follows the last one: the final norm, lm_head and the choice of the token. A graph of all
layers would have the same kernels and take as many times longer to compile as there are layers, because no kernel spans
two layers: a layer ends in a cuBLAS GEMM, which nothing is fused with, and its residual add is left to the next layer,
which fuses it with its norm; the last one is fused with the final norm. The first layer of a step is compiled
separately, because it starts with the embedding instead of that add, and so are layers with other windows. In a CUDA
graph, calls between compiled parts cost nothing. In prompts, the embedding is a separate kernel, and so are the zeros
that the first layer adds to it.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from rooftile.bench.e2e.model import Fp8Weight, LayerTensors, Model
from rooftile.bench.timer import Clock
from rooftile.engine.config import ModelConfig
from rooftile.engine.prompts import GRAPH_TOKENS
from rooftile.graphs import record

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Recorded = tuple[torch.cuda.CUDAGraph, Tensor]  # and the logits that a replay writes
Way = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]

PREFILL = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PASSES = 7  # over the layers, of each way to attend
_PARTS = 64  # in which a row's argmax is looked for: one block for a whole vocabulary takes longer than all norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype)).to(x.dtype)


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Like `linear`; each row of x is rounded to float8_e4m3fn with a scale of its own."""
    rows = x.flatten(0, -2)
    scale = (rows.abs().amax(dim=-1, keepdim=True).float() / 448).clamp(min=2.0**-126)
    numbers = (rows.float() / scale).to(torch.float8_e4m3fn)
    y = torch._scaled_mm(numbers, weight.numbers.T, scale, weight.scale.T, bias=bias, out_dtype=x.dtype)
    return y.unflatten(0, x.shape[:-1])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `(B, H, T, D)` rotated by tables `(T, D)`, whose halves are equal."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def layer(
    c: ModelConfig,
    w: LayerTensors,
    x: Tensor,
    y: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
    gemm: Callable[..., Tensor] = linear,
) -> tuple[Tensor, Tensor]:
    """One layer over hidden states x + y, `(B, T, hidden)`, returned as such a pair; None for y is zero."""
    x = x if y is None else x + y
    qkv = gemm(rms_norm(x, w.input_norm, c.norm_eps), w.qkv, w.qkv_bias)
    heads = [c.heads, c.kv_heads, c.kv_heads]
    q, k, v = qkv.unflatten(-1, (sum(heads), c.head_dim)).transpose(1, 2).split(heads, dim=1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = rms_norm(q, w.q_norm, c.head_norm_eps), rms_norm(k, w.k_norm, c.head_norm_eps)
    attended = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
    x = x + gemm(attended.transpose(1, 2).flatten(2), w.o, w.o_bias)
    gate, up = gemm(rms_norm(x, w.post_norm, c.norm_eps), w.gate_up, w.gate_up_bias).chunk(2, dim=-1)
    return x, gemm(silu(gate) * up, w.down, w.down_bias)


def causal(c: ModelConfig, window: int | None) -> Attend:
    """Attention of whole prompts."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask, tokens = None, q.shape[2]
        if window is not None and window < tokens:
            mask = torch.ones((tokens, tokens), dtype=torch.bool, device=q.device).tril().triu(1 - window)
        return scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=c.attention_scale, enable_gqa=c.heads != c.kv_heads
        )

    return attend


def greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row, `(B, 1)`, found in parts first."""
    n = logits.shape[1]
    parts = _PARTS if n % _PARTS == 0 else 1
    values, places = logits.unflatten(1, (parts, n // parts)).max(dim=2)
    part = values.argmax(dim=1, keepdim=True)
    return part * (n // parts) + places.gather(1, part)


# Ways for one query to attend over the cache as far as a mask `(1, 1, 1, S)` says. The query heads of a KV head stand
# beside each other, as if they were tokens, where no kernel knows of groups.


def _packed(q: Tensor, k: Tensor) -> Tensor:
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def _two_gemms(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    scores = (_packed(q, k) @ k.mT).float() * scale
    weights = torch.where(mask, scores, float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).reshape(q.shape)


def _sdpa_packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    packed = _packed(q, k)
    mask = mask.expand(*packed.shape[:3], -1)
    return scaled_dot_product_attention(packed, k, v, mask, scale=scale).reshape(q.shape)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    seen = mask.flatten()

    def visible(score: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, j: Tensor) -> Tensor:
        return torch.where(seen[j], score, float("-inf"))

    y: Any = flex_attention(q, k, v, score_mod=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return y


WAYS: dict[str, tuple[Way, SDPBackend | None]] = {
    "two GEMMs and softmax": (_two_gemms, None),
    "SDPA (efficient)": (_sdpa_packed, SDPBackend.EFFICIENT_ATTENTION),
    "SDPA (cuDNN)": (_sdpa, SDPBackend.CUDNN_ATTENTION),
    "SDPA (cuDNN), heads packed": (_sdpa_packed, SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": (_flex, None),
}
COMPILED_WAYS = ("FlexAttention",)  # the others are also called as they are
DEFAULT_WAY = "two GEMMs and softmax"


def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention by the implementation of that name. Each is compiled on its own, even if only the backend differs."""
    return WAYS[name][0](q, k, v, mask, scale)


def _clear_workspaces() -> None:
    """Release all cuBLAS workspaces: the next GEMM allocates new ones."""
    torch._C._cuda_clearCublasWorkspaces()


def _recorded(step: Callable[[], Tensor]) -> Recorded:
    """The step's graph, with cuBLAS workspaces of its own.

    PyTorch keeps them for all calls of a stream, and its own CUDA graphs, those of a compiled model, free them while
    this graph would still write there. Cleared before the recording, they are allocated anew in the graph's memory;
    cleared after it, nobody else gets those.
    """

    def warm() -> None:
        step()
        step()
        _clear_workspaces()

    try:
        return record(step, warm=warm)
    finally:
        _clear_workspaces()


def _replayed(recorded: Recorded) -> Tensor:
    graph, logits = recorded
    graph.replay()
    return logits


def _backend(backend: SDPBackend | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)


class CudaPath:
    """See above.

    Args:
        ids: the prompts, `(batch, tokens)`.
        new: tokens after each prompt.
        compiled: else neither compiler nor graphs.
        fp8: with the engine's weights, which are in fp8.
    """

    def __init__(self, model: Model, ids: Tensor, new: int, clock: Clock, *, compiled: bool, fp8: bool = False) -> None:
        self.model, self.config, self.clock, self.compiled = model, model.config, clock, compiled
        self._measures = clock.measures and ids.is_cuda
        c, (batch, prompt) = self.config, ids.shape
        self.ids, self.prompt = ids, prompt
        size = prompt + new
        self.layers, self.lm_head = model.layers(fp8), model.lm_head(fp8)
        self.embedding, self.norm = model.dense.embedding, model.dense.norm
        self._gemm: Callable[..., Tensor] = fp8_linear if fp8 else linear
        self.cos, self.sin = c.rotary.tables(size, ids.device)
        shape = (batch, c.kv_heads, size, c.head_dim)
        self.k, self.v = ([torch.zeros(shape, dtype=model.dtype, device=ids.device) for _ in self.layers] for _ in "kv")
        self.places = torch.arange(size, device=ids.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=ids.device)
        self.token = torch.zeros((batch, 1), dtype=torch.int64, device=ids.device)
        self.way = DEFAULT_WAY
        self.note = ""
        self.logits = torch.empty(0)
        self._step_graph: Recorded | None = None
        self._prompt_graph: Recorded | None = None
        # Without a GPU nothing is to be made faster, and what is compiled is only to be traced.
        backend = "inductor" if clock.measures else "aot_eager"
        compiler: Any = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
        functions: list[Any] = [self._prompt_layer, self._step_layer, self._end]
        functions = [compiler(function) if compiled else function for function in functions]
        self._prompt_layer_function, self._step_layer_function, self._end_function = functions

    @property
    def tokens(self) -> Tensor:
        return self.token[:, 0]

    def prepare(self) -> None:
        if self._measures:
            self.way = self._fastest_way()
        self.note = f"attention of a step: {self.way}"
        self.prefill()
        if not self.compiled or not self._measures:
            self.step()
            return
        with self._way_backend():
            self._step_graph = _recorded(self._step)
        if self.ids.numel() <= GRAPH_TOKENS:
            with self._prefill_backend():
                self._prompt_graph = _recorded(self._prompt)

    def reset(self) -> None: ...

    def prefill(self) -> None:
        if self._prompt_graph is not None:
            self.logits = _replayed(self._prompt_graph)
            return
        with self._prefill_backend():
            self.logits = self._prompt()

    def step(self) -> None:
        if self._step_graph is not None:
            self.logits = _replayed(self._step_graph)
            return
        with self._way_backend():
            self.logits = self._step()

    @contextlib.contextmanager
    def _prefill_backend(self) -> Iterator[None]:
        with sdpa_kernel(PREFILL, set_priority=True) if self._measures else contextlib.nullcontext():
            yield

    def _way_backend(self) -> contextlib.AbstractContextManager[Any]:
        """The SDPA backend that the implementation needs, on a GPU; it is read when the call is traced or made."""
        return _backend(WAYS[self.way][1] if self._measures else None)

    # What is recorded.

    def _each(self) -> Iterator[tuple[LayerTensors, Tensor, Tensor, int | None]]:
        """The weights, caches and window of each layer."""
        return zip(self.layers, self.k, self.v, self.config.windows, strict=True)

    def _prompt(self) -> Tensor:
        """All prompts, and the tokens chosen after them."""
        x = self._embed(self.ids)
        y = torch.zeros_like(x)
        for w, k, v, window in self._each():
            x, y = self._prompt_layer_function(w, x, y, k, v, window)
        return self._end_function(x[:, -1:], y[:, -1:], True)

    def _step(self) -> Tensor:
        """The token at `position`, and the next one chosen."""
        x = y = None
        for w, k, v, window in self._each():
            x, y = self._step_layer_function(w, x, y, k, v, window)
        return self._end_function(x, y, False)

    def _embed(self, ids: Tensor) -> Tensor:
        x, scale = embedding(ids, self.embedding), self.config.embedding_scale
        return x if scale == 1 else x * scale

    # What is compiled. Each takes a layer's tensors as arguments, so that it serves all layers.

    def _prompt_layer(
        self, w: LayerTensors, x: Tensor, y: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            places = self.places[: self.prompt]
            k_cache[:, :, places] = k
            v_cache[:, :, places] = v
            return causal(self.config, window)(q, k, v)

        return layer(self.config, w, x, y, self.cos[: self.prompt], self.sin[: self.prompt], attend, self._gemm)

    def _step_layer(
        self, w: LayerTensors, x: Tensor | None, y: Tensor | None, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        if x is None:  # the first
            x = self._embed(self.token)
        attend = functools.partial(self._attend, WAYS[self.way][0], k_cache, v_cache, window)
        return layer(self.config, w, x, y, self.cos[self.position], self.sin[self.position], attend, self._gemm)

    def _end(self, x: Tensor, y: Tensor, of_prompt: bool) -> Tensor:
        """The logits of the last token, the next token, and its position."""
        logits = self._gemm(rms_norm(x + y, self.norm, self.config.norm_eps), self.lm_head)[:, 0]
        self.token.copy_(greedy(logits))
        if of_prompt:
            self.position.fill_(self.prompt)
        else:
            self.position.add_(1)
        return logits

    def _attend(
        self, way: Way, k_cache: Tensor, v_cache: Tensor, window: int | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        k_cache[:, :, self.position] = k
        v_cache[:, :, self.position] = v
        seen = self.places <= self.position
        if window is not None:
            seen = seen & (self.places > self.position - window)
        return way(q, k_cache, v_cache, seen[None, None, None], self.config.attention_scale)

    # What is chosen by measuring.

    def _fastest_way(self) -> str:
        """The fastest attention over the caches of all layers, midway through the steps."""
        c = self.config
        q = torch.randn(self.ids.shape[0], c.heads, 1, c.head_dim, device=self.ids.device, dtype=self.model.dtype)
        half = (self.prompt + self.places.numel()) // 2
        mask = (self.places < half)[None, None, None]
        seconds: dict[str, float] = {}
        caches = list(zip(self.k, self.v, strict=True))
        torch.cuda.synchronize()
        with self.clock.active():
            run = torch.compile(_attend, dynamic=False, fullgraph=True) if self.compiled else _attend
            for name, (_, backend) in WAYS.items():
                if name in COMPILED_WAYS and not self.compiled:
                    continue
                calls = [functools.partial(run, name, q, k, v, mask, c.attention_scale) for k, v in caches]
                # Not all of them take every size, and not every release of PyTorch has them for masks.
                with contextlib.suppress(Exception), _backend(backend):
                    block = self.clock.block(calls)
                    readings = [block.enqueue() for _ in range(_PASSES)]
                    self.clock.synchronize()
                    seconds[name] = statistics.median(read() for read in readings)
        return min(seconds, key=seconds.__getitem__, default=DEFAULT_WAY)
