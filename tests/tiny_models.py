"""Tiny Hugging Face models, and their logits, loss and gradients."""

import dataclasses

import torch
from torch import nn

from rooftile import runtime
from rooftile.huggingface.small_models import BY_TITLE, inputs

DEVICE = runtime.default_device()
_TINY = BY_TITLE["Llama"].sizes

# One rounding more or less of float32, through two layers forward and backward; of bfloat16 likewise, in which T5's own
# gradients are off by 0.035 from those in float32.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-2}


def build(title: str, dtype: torch.dtype = torch.float32, **more: object) -> nn.Module:
    """The model with random biases and norm weights, where models start from zeros and ones."""
    described = BY_TITLE[title]
    described = dataclasses.replace(described, sizes={**described.sizes, **more})
    model = described.build(dtype=dtype, device=DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens(n: int = 12, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 256, (batch, n), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def run(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits (None of a patched model in training), loss and gradients."""
    model.zero_grad()
    out = model(**inputs(model, ids)[0])
    out.loss.backward()
    return out.logits if out.logits is None else out.logits.detach(), out.loss.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.detach().float(), expected.detach().float()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Of the same parameters, each to 1e-4; one that is nothing but rounding (of a key's bias, say) as such."""
    assert actual.keys() == expected.keys()
    largest = max(grad.norm() for grad in expected.values())
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= 1e-4 * (grad.norm() + 1e-2 * largest), name
