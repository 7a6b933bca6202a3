"""The models of `rooftile bench e2e`: a configuration, and weights that all implementations share."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.bench.workloads import MODELS, RANDOM, read
from rooftile.engine import weights as engine_weights
from rooftile.engine.config import ModelConfig
from rooftile.engine.projections import Dense, Fp8, Projection
from rooftile.engine.weights import Layer, Weights

FAMILIES = ("llama", "granite", "qwen2", "qwen3", "mistral")


class Fp8Weight(NamedTuple):
    """A weight in float8_e4m3fn, `(N, K)`, and the scales of its rows, `(N, 1)`."""

    numbers: Tensor
    scale: Tensor


Weight = Any  # a tensor, or of fp8 an `Fp8Weight`


class LayerTensors(NamedTuple):
    """A layer's weights as plain tensors: qkv has the rows of q, k and v, gate_up those of gate and up."""

    input_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


def _tensors(projection: Projection) -> tuple[Weight, Tensor | None]:
    if isinstance(projection, Fp8):
        return Fp8Weight(projection.weight, projection.scale), projection.bias
    if not isinstance(projection, Dense):
        raise TypeError(
            f"a projection is a {type(projection).__name__}, expected Dense or Fp8: PyTorch multiplies by no other"
        )
    return projection.weight, projection.bias


def layer_tensors(layer: Layer) -> LayerTensors:
    """The tensors that the engine itself multiplies by, not copies."""
    qkv, o, gate_up, down = (_tensors(p) for p in (layer.qkv, layer.o, layer.gate_up, layer.down))
    assert layer.input_norm is not None, "FAMILIES have it"
    assert layer.post_norm is not None, "FAMILIES have it"
    return LayerTensors(layer.input_norm, *qkv, layer.q_norm, layer.k_norm, *o, layer.post_norm, *gate_up, *down)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its weights.

    Attributes:
        title: its short name.
        hf: its configuration as `config.json` has it.
        config: the same for the engine.
        dense: its weights in `dtype`, which all implementations but a quantized engine share.
        own: the engine's weights: `dense`, or the same quantized.
        quantize: "fp8", "int8", "int4" or None.
    """

    title: str
    hf: dict[str, Any]
    config: ModelConfig
    dtype: torch.dtype
    dense: Weights
    own: Weights
    quantize: str | None = None

    @property
    def device(self) -> torch.device:
        return self.dense.embedding.device

    def lm_head(self, own: bool = False) -> Weight:
        """`own`: of the engine's weights."""
        weight, bias = _tensors((self.own if own else self.dense).lm_head)
        assert bias is None, "no family has one"
        return weight

    def layers(self, own: bool = False) -> list[LayerTensors]:
        return [layer_tensors(layer) for layer in (self.own if own else self.dense).layers]

    def prefill_flops(self, batch: int, tokens: int) -> int:
        """FLOPs of the GEMMs (of lm_head only for each prompt's last token) and of causal attention."""
        c = self.config
        rows = (c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.intermediate
        layer = 2 * tokens * c.hidden * (rows + c.heads * c.head_dim) + 2 * tokens**2 * c.heads * c.head_dim
        return batch * (c.layers * layer + 2 * c.hidden * c.vocab)


def check_context(name: str, prompt: int, new: int = 0) -> None:
    """Check, before weights are made, that the model's context is long enough.

    Raises:
        ValueError: it was not, or the name or the configuration is not known.
    """
    title, values = read(name, MODELS)
    positions = ModelConfig.from_hf(values).max_positions
    if prompt + new > positions:
        asked = f"--prompt {prompt} and --new {new} are {prompt + new}" if new else f"--prompt is {prompt}"
        raise ValueError(f"{asked} tokens, expected at most {positions}: max_position_embeddings of {title}")


def load(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantize: str | None = None,
    layers: int | None = None,
    weights: str = RANDOM,
    seed: int = 0,
) -> Model:
    """The model with random weights, or those of a checkpoint folder.

    Raises:
        ValueError: the name or the configuration is not known, or the checkpoint can't be read.
        OSError: a file can't be read.
    """
    title, values = read(name, MODELS, layers)
    config = ModelConfig.from_hf(values)
    if config.family not in FAMILIES:  # the others' options are unknown to the paths beside the engine's
        raise ValueError(f"{title}: model_type is {config.family!r}, expected one of {', '.join(FAMILIES)}")

    def make(quantize: str | None) -> Weights:
        if weights == RANDOM:
            return engine_weights.random(config, dtype=dtype, quantize=quantize, device=device, seed=seed)
        return engine_weights.load(config, weights, dtype=dtype, quantize=quantize, device=device, progress=False)

    dense = make(None)
    return Model(title, values, config, dtype, dense, dense if quantize is None else make(quantize), quantize)
