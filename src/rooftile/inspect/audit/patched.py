"""A patched Hugging Face model, compiled: prompts and steps, each with the choice of its token in the graph."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.bench.e2e.hf import cached_arguments
from rooftile.graphs import record

# One product is left of the model's own code, that of RoPE's angles, positions by frequencies. Older Inductors do not
# make an elementwise kernel of it, and would leave it to cuBLAS.
_INDUCTOR = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON"}


class Compiled:
    """Greedy decoding by the model's own forward over a static cache. A step is recorded into one CUDA graph.

    `generate` and a forward called from outside leave the argmax and the next position to kernels of PyTorch's own;
    here they are compiled with the forward, as all else is.

    Args:
        model: a causal language model, patched.
        ids: the prompts, `(batch, tokens)`, on the GPU.
        new: tokens after each prompt.
        compiled: whether to compile at all; for a look at what it computes, without a GPU.
    """

    def __init__(self, model: nn.Module, ids: Tensor, new: int, *, compiled: bool = True) -> None:
        from transformers import StaticCache

        self._model: Any = model
        self._ids = ids
        config: Any = model.config
        self._cache = StaticCache(config=config, max_cache_len=ids.shape[1] + new)
        self._cached = cached_arguments(model)
        self._positions = torch.arange(ids.shape[1], device=ids.device)[None]
        self._position = torch.zeros((1, 1), dtype=torch.int64, device=ids.device)
        self._token = torch.zeros((ids.shape[0], 1), dtype=torch.int64, device=ids.device)
        self._begin()
        options = _INDUCTOR if ids.is_cuda else None
        compiler: Any = functools.partial(torch.compile, dynamic=False, options=options)
        if not compiled:
            compiler = lambda function: function  # noqa: E731
        self._take_prompt, self._take_step = compiler(self._prompt), compiler(self._step)
        self._records = compiled and ids.is_cuda
        self._graph: Any = None

    def _begin(self) -> None:
        """The cache's memory, before a prompt is traced: else it would be compiled twice, without it and with it."""
        make = getattr(self._cache, "early_initialization", None)
        if make is None:
            return
        config = self._model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        make(self._ids.shape[0], config.num_key_value_heads, dim, self._model.dtype, self._ids.device)

    @property
    def tokens(self) -> Tensor:
        return self._token[:, 0]

    def reset(self) -> None:
        if getattr(self._cache, "is_initialized", True):
            self._cache.reset()

    @torch.no_grad()
    def prefill(self) -> None:
        self._take_prompt()

    @torch.no_grad()
    def step(self) -> None:
        if self._graph is None:
            self._take_step()
        else:
            self._graph.replay()

    @torch.no_grad()
    def prepare(self) -> None:
        """Compile, and record the step."""
        self.prefill()
        if self._records:
            self._graph, _ = record(self._take_step)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = self._model(input_ids=ids, **self._cached(self._cache, positions))
        return out.logits[:, -1]

    def _prompt(self) -> None:
        self._token.copy_(self._logits(self._ids, self._positions).argmax(dim=-1, keepdim=True))
        self._position.fill_(self._ids.shape[1])

    def _step(self) -> None:
        self._token.copy_(self._logits(self._token, self._position).argmax(dim=-1, keepdim=True))
        self._position.add_(1)
