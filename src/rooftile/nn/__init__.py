"""The ops as modules. Parameters have the names and shapes of their counterparts in torch.nn and transformers."""

from rooftile.nn.activations import BiasGELU, BiasSiLU, GeluMul, SiluMul
from rooftile.nn.norms import AddRMSNorm, LayerNorm, QKNormRoPE, RMSNorm, RoPE, Softmax

__all__ = [
    "AddRMSNorm",
    "BiasGELU",
    "BiasSiLU",
    "GeluMul",
    "LayerNorm",
    "QKNormRoPE",
    "RMSNorm",
    "RoPE",
    "SiluMul",
    "Softmax",
]
