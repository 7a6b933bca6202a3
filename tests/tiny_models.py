"""Tiny Hugging Face models, and their logits, loss and gradients."""

import dataclasses

import torch
from torch import nn

from rooftile import runtime
from rooftile.demo.models import MODELS, Model, inputs

DEVICE = runtime.default_device()
_TINY = MODELS[0].tiny
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 4}
MORE = (
    Model("Phi-3", "Phi3Config", _TINY, {}, ""),
    Model("SmolLM3", "SmolLM3Config", _TINY, {}, ""),
    Model("OLMo2", "Olmo2Config", _TINY, {}, ""),
    Model("Gemma 2", "Gemma2Config", {**_TINY, "head_dim": 16}, {}, ""),
    Model("Mixtral", "MixtralConfig", {**_TINY, "num_local_experts": 4, "num_experts_per_tok": 4}, {}, ""),
    Model("Qwen2-MoE", "Qwen2MoeConfig", {**_TINY, **_EXPERTS, "shared_expert_intermediate_size": 32}, {}, ""),
    Model("Qwen3-MoE", "Qwen3MoeConfig", {**_TINY, **_EXPERTS, "head_dim": 16}, {}, ""),
)
BY_TITLE = {model.title: model for model in (*MODELS, *MORE)}

# One rounding more or less of float32, through two layers forward and backward; of bfloat16 likewise.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


def build(title: str, dtype: torch.dtype = torch.float32, **more: object) -> nn.Module:
    described = BY_TITLE[title]
    described = dataclasses.replace(described, tiny={**described.tiny, **more})
    return described.build(real=False, dtype=dtype, device=DEVICE)


def tokens(n: int = 12, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 256, (batch, n), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def run(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, loss and gradients."""
    model.zero_grad()
    out = model(**inputs(model, ids)[0])
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), out.loss.detach(), grads


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))
