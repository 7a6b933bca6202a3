"""The head's GEMM, and cross entropy of all its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rooftile.reference import cross_entropy as losses

# What changes how the op computes, and not what.
_HOW = ("chunk_bytes", "valid_rows", "float32_weight_gradient", "precision")


def _loss_options(class_weight: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the loss of `logits / temperature`: a soft cap is divided too, as it comes before the temperature."""
    kept = {name: value for name, value in options.items() if name not in (*_HOW, "temperature")}
    if kept.get("softcap"):
        kept["softcap"] /= options.get("temperature", 1.0)
    return {"weight": class_weight, **kept}


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """The formula in the dtype of the tensors: give it float64 for the truth."""
    logits = hidden @ weight.mT
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if adapter is not None:
        logits = logits + adapter[0] @ adapter[1].mT
    logits = logits / options.get("temperature", 1.0)
    return losses.cross_entropy(logits, target, **_loss_options(class_weight, options))


def eager(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """As models' own code has it: `nn.Linear`, then PyTorch's loss over logits in float32."""
    logits = hidden @ weight.mT
    if bias is not None:
        logits = (logits + bias).to(hidden.dtype)
    if adapter is not None:
        logits = logits + adapter[0] @ adapter[1].mT
    logits = logits / options.get("temperature", 1.0)
    return losses.eager(logits, target, **_loss_options(class_weight, options))
