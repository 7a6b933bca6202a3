"""Hugging Face's own model over the engine's weights, plain and patched: each step is a call of its forward.

`generate` adds work for its options to a step. This has only what every step needs: the forward, the argmax and the
next position. Decoding is compiled as `generate` compiles it for a static cache; prompts are not compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.bench.e2e.model import Model
from rooftile.bench.e2e.paths import Absent
from rooftile.bench.prefill.model import twin
from rooftile.huggingface import patch

_WARM = 3  # steps over a static cache before any is timed: compiled, recorded, replayed


def shared(model: Model) -> nn.Module:
    """transformers' model of that configuration. Its weights are views of the engine's, so it takes no memory.

    Raises:
        Absent: transformers is not installed, or has no such model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise Absent(f"not installed ({error})") from None
    values = dict(model.hf)
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    except (KeyError, TypeError, ValueError) as error:
        raise Absent(f"transformers makes no configuration of it: {error}") from None
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=model.dtype).eval()
    whole.load_state_dict(_state(model), assign=True)
    # No state has the buffers that are computed from the configuration.
    for name, module in list(whole.named_modules()):
        if any(b.is_meta for b in module.buffers(recurse=False)):
            parent, _, last = name.rpartition(".")
            with torch.device(model.device):
                setattr(whole.get_submodule(parent), last, type(module)(config))
    return whole


def _state(model: Model) -> dict[str, Tensor]:
    c = model.config
    # Granite's scale of the logits is folded into the engine's last norm.
    norm = model.dense.norm if c.logits_scale == 1 else (model.dense.norm / c.logits_scale).to(model.dtype)
    state = {"model.embed_tokens.weight": model.dense.embedding, "model.norm.weight": norm}
    state["lm_head.weight"] = model.lm_head()
    heads = [n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)]
    for i, w in enumerate(model.layers()):
        parts: dict[str, Tensor | None] = {
            "input_layernorm.weight": w.input_norm,
            "post_attention_layernorm.weight": w.post_norm,
            "self_attn.q_norm.weight": w.q_norm,
            "self_attn.k_norm.weight": w.k_norm,
            "self_attn.o_proj.weight": w.o,
            "self_attn.o_proj.bias": w.o_bias,
            "mlp.down_proj.weight": w.down,
            "mlp.down_proj.bias": w.down_bias,
        }
        for kind, qkv, gate_up in (("weight", w.qkv, w.gate_up), ("bias", w.qkv_bias, w.gate_up_bias)):
            for name, part in zip("qkv", () if qkv is None else qkv.split(heads), strict=False):
                parts[f"self_attn.{name}_proj.{kind}"] = part
            for name, part in zip(("gate", "up"), () if gate_up is None else gate_up.chunk(2), strict=False):
                parts[f"mlp.{name}_proj.{kind}"] = part
        state |= {f"model.layers.{i}.{name}": part for name, part in parts.items() if part is not None}
    return state


class Models:
    """The plain model and its patched twin over the same weights, each made on first use."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._made: dict[bool, nn.Module | Absent] = {}
        self.patched = ""  # what was replaced, and what was left

    def model(self, patched: bool) -> nn.Module:
        """Raises:
        Absent: it can't be made.
        """
        if patched not in self._made:
            try:
                self._made[patched] = self._patch() if patched else shared(self._model)
            except Absent as error:
                self._made[patched] = error
        found = self._made[patched]
        if isinstance(found, Absent):
            raise found
        return found

    def _patch(self) -> nn.Module:
        ours = twin(self.model(False))
        self.patched = str(patch(ours, linear=True, attention=True))
        return ours


def cached_arguments(model: nn.Module) -> Callable[[Any, Tensor], dict[str, Any]]:
    """A function of a cache and `positions`, `(1, tokens)`: what the model's forward needs for them beside ids."""
    accepted = inspect.signature(type(model).forward).parameters
    # Before transformers 5.3 a static cache was told where to write.
    tells_place = "cache_position" in accepted
    name = "cache" if "cache" in accepted else "past_key_values"  # up to transformers 5.23

    def given(cache: Any, positions: Tensor) -> dict[str, Any]:
        arguments = {"position_ids": positions, name: cache, "use_cache": True, "logits_to_keep": 1}
        return arguments | ({"cache_position": positions[0]} if tells_place else {})

    return given


class HuggingFacePath:
    """Args:
    model: a causal language model.
    ids: the prompts, `(batch, tokens)`.
    new: tokens after each prompt.
    compiled: a static cache, and decoding compiled over it; else a dynamic cache.
    """

    def __init__(self, model: nn.Module, ids: Tensor, new: int, *, compiled: bool, measures: bool) -> None:
        self.note = ""
        self._model: Any = model
        self._ids, self._static = ids, compiled
        self._length = ids.shape[1] + max(new, _WARM)
        self._forward: Any = model
        if compiled:
            how: dict[str, Any] = {"mode": "reduce-overhead"} if measures else {"backend": "aot_eager"}
            self._forward = torch.compile(self._model.forward, **how)
        self._cache: Any = None
        self._position = torch.zeros((1, 1), dtype=torch.int64, device=ids.device)
        self._cached = cached_arguments(model)
        self.logits = torch.empty(0)
        self._token = ids[:, :1]

    @property
    def tokens(self) -> Tensor:
        return self._token[:, 0]

    def prepare(self) -> None:
        self.reset()
        self.prefill()
        for _ in range(_WARM if self._static else 1):
            self.step()
        self.reset()

    def reset(self) -> None:
        from transformers import DynamicCache, StaticCache

        if not self._static:
            self._cache = DynamicCache(config=self._model.config)
        elif self._cache is None:
            self._cache = StaticCache(config=self._model.config, max_cache_len=self._length)
        else:
            self._cache.reset()

    def prefill(self) -> None:
        tokens = self._ids.shape[1]
        positions = torch.arange(tokens, device=self._ids.device)[None]
        self._take(self._model, self._ids, positions)
        self._position.fill_(tokens)

    def step(self) -> None:
        if self._static and self._ids.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        self._take(self._forward, self._token, self._position)
        self._position.add_(1)

    def _take(self, forward: Any, ids: Tensor, positions: Tensor) -> None:
        out = forward(input_ids=ids, **self._cached(self._cache, positions))
        self.logits = out.logits[:, -1]
        self._token = self.logits.argmax(dim=-1, keepdim=True)
