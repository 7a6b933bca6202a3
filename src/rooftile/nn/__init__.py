"""The ops as modules. Parameters have the names and shapes of their counterparts in torch.nn and transformers."""

from rooftile.nn.activations import BiasGELU, BiasSiLU, GeluMul, SiluMul
from rooftile.nn.linear import FP8Linear, GatedLinear, Int4Linear, Int8Linear, Linear
from rooftile.nn.norms import AddRMSNorm, LayerNorm, QKNormRoPE, RMSNorm, RoPE, Softmax

__all__ = [
    "AddRMSNorm",
    "BiasGELU",
    "BiasSiLU",
    "FP8Linear",
    "GatedLinear",
    "GeluMul",
    "Int4Linear",
    "Int8Linear",
    "LayerNorm",
    "Linear",
    "QKNormRoPE",
    "RMSNorm",
    "RoPE",
    "SiluMul",
    "Softmax",
]
