"""A Hugging Face model built from its configuration alone, for demos, checks and benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def random_model(config: Any, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """A model of that configuration in evaluation mode, its weights drawn on the device from the seed.

    The weights are normal, of the configuration's own standard deviation; attention is transformers' default, PyTorch's
    `scaled_dot_product_attention` where the model supports it. An encoder (BERT, say) becomes a masked language model.

    Raises:
        ValueError: transformers has no model with a language-modeling head for the configuration.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM]
    if not getattr(config, "is_decoder", False) and not getattr(config, "is_encoder_decoder", False):
        kinds = kinds[::-1]  # what may be an encoder or a decoder is an encoder, unless it says otherwise
    auto = next((a for a in kinds if type(config) in a._model_mapping), None)
    if auto is None:
        raise ValueError(f"a configuration of type {type(config).__name__} has no language model")
    torch.manual_seed(seed)
    with torch.device(device):
        model = auto.from_config(config, dtype=dtype).eval()
    if getattr(model, "loss_type", "") is None:  # GPT-2's class does not name its loss: transformers warns, and takes
        model.loss_type = "ForCausalLM"
    return model
