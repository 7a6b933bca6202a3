"""A model's sizes and options, read from its Hugging Face configuration.

All families are one decoder with options. Where output_norms is set, what a layer adds is normalized, too, and where
input_norms is not, its input is not. Each head of q and k is normalized where qk_norm is set, and all heads of q
together, and of k, where whole_qk_norm is:

    s = embedding(ids) * embedding_scale
    for each layer:
        s = s + [norm] o(attention(rope(qkv([norm] s))))
        s = s + [norm] down(act(gate([norm] s)) * up([norm] s))
    logits = lm_head(norm(s)) * logits_scale, and cap * tanh(logits / cap) where there is a logits_softcap

Granite multiplies what a layer adds by m (residual_multiplier): r' = r + m f(norm(r)). The engine keeps s = r / m
instead, so that s' = s + f(norm(s)) has nothing to multiply. rms_norm does not depend on the scale of its input except
for eps, which becomes eps / m^2; the embedding is scaled by embedding_multiplier / m.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rooftile.engine import published, rotary
from rooftile.engine.published import Published
from rooftile.engine.rotary import Rotary
from rooftile.errors import to_install
from rooftile.ops.gemm.config import Activation

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "granite": "GraniteForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}
# transformers would replace a missing one by the default of some model.
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NEEDED_TEXT = _NEEDED[:3]  # published configurations of Gemma 3 with a text_config rely on defaults for the others
_GEMMA = ("gemma2", "gemma3_text")
_OLD_QUANTIZATION = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model's sizes and options.

    Attributes:
        family: the model_type, one of FAMILIES; "gemma3_text" for the text part of "gemma3", too.
        multimodal: whether the checkpoint has the weights of other parts beside the text's, which are not read.
        hidden, layers, heads, kv_heads, head_dim, intermediate, vocab: sizes.
        max_positions: the context length of the model.
        norm_eps: of the norms of hidden states, as the kernels take it: see above.
        head_norm_eps: of the norms of q and k.
        norm_offset: added to the weight of every norm while it is loaded.
        activation: of the gate, "silu" or "gelu_tanh".
        qkv_bias, o_bias, mlp_bias: which projections have biases.
        input_norms, output_norms: whether the inputs of attention and MLP are normalized, and their results.
        qk_norm, whole_qk_norm: whether each head of q and k is normalized, and whether q and k are as wholes.
        packed: whether the checkpoint has q, k and v in one tensor, and gate and up in one.
        windows: for each layer the number of tokens that a token sees, including itself, or None for all.
        tied: whether lm_head is the embedding.
        attention_scale: multiplies the scores.
        attention_softcap, logits_softcap: the soft caps of scores and logits, or None.
        embedding_scale, logits_scale: see above; logits_scale is folded into the last norm's weight.
        embedding_scale_rounds: whether the scale is rounded to the embedding's dtype, in which models were trained.
        eos, bos: end tokens, and the first token.
        rotaries: for each layer the frequencies of its rotary embedding.
        torch_dtype: of the checkpoint, if it states one.
        initializer_range: the standard deviation of random weights.
        published: how the checkpoint's weights are quantized; None where they are not.
        source: the file or object it was read from, for errors.
    """

    family: str
    multimodal: bool
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    norm_eps: float
    head_norm_eps: float
    norm_offset: float
    activation: Activation
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    input_norms: bool
    output_norms: bool
    qk_norm: bool
    whole_qk_norm: bool
    packed: bool
    windows: tuple[int | None, ...]
    tied: bool
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_scale: float
    embedding_scale_rounds: bool
    logits_scale: float
    eos: tuple[int, ...]
    bos: int | None
    rotaries: tuple[Rotary, ...]
    torch_dtype: torch.dtype | None = None
    initializer_range: float = 0.02
    published: Published | None = None
    source: str = "config"

    @property
    def rotary(self) -> Rotary:
        """The first layer's, and in most families every layer's."""
        return self.rotaries[0]

    @classmethod
    def from_hf(cls, config: str | os.PathLike[str] | Mapping[str, Any] | Any) -> ModelConfig:
        """Read a checkpoint folder, a config.json, its contents as a dict, or a transformers configuration.

        In a folder, the end tokens of generation_config.json are added to those of config.json, and the files in which
        AutoGPTQ and AutoAWQ describe the weights stand for a quantization_config that is absent.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not JSON, a size is missing or impossible, or the model needs something that the
                engine does not compute. The message names the field, its value and what is accepted.
            ImportError: transformers is not installed.
        """
        fields, source = _fields(config)
        # Not for transformers, which would want the package that wrote the checkpoint.
        quantization = fields.pop("quantization_config", None)
        made = _checked(cls, _from_transformers(fields, source), source, fields.get("model_type") == "gemma3")
        if not quantization:
            return made
        return dataclasses.replace(made, published=published.read(quantization, source))


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path}: no JSON: {e}") from e
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: holds a {type(fields).__name__}, expected an object")
    return fields


def _fields(config: Any) -> tuple[dict[str, Any], str]:
    """The fields of config.json, and their source."""
    if isinstance(config, (str, os.PathLike)):
        path = Path(config).expanduser()
        folder = path.is_dir()
        if folder:
            path /= "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, expected a model's config.json or the folder that holds it")
        fields = _read(path)
        if folder and (path := path.with_name("generation_config.json")).is_file():
            more = _tokens(_read(path).get("eos_token_id"), str(path))
            own = _tokens(fields.get("eos_token_id"), str(path.with_name("config.json")))
            if more:
                fields["eos_token_id"] = list(dict.fromkeys((*own, *more)))
        for name, method in _OLD_QUANTIZATION.items():
            if folder and not fields.get("quantization_config") and (path := path.with_name(name)).is_file():
                fields["quantization_config"] = {"quant_method": method, **_read(path)}
        return fields, str(Path(config) / "config.json" if folder else config)
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config)), "config"
    if hasattr(config, "model_type") and hasattr(config, "to_dict"):
        fields = config.to_dict()
        return {**fields, "model_type": config.model_type}, type(config).__name__
    raise TypeError(
        f"config is a {type(config).__name__}, expected a path, a dict as config.json has it, or a transformers "
        "configuration"
    )


def _from_transformers(fields: dict[str, Any], source: str) -> Any:
    """transformers' configuration of those fields, which knows older names and the defaults of a family."""
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{source}: model_type is {family!r}, expected one of {', '.join(FAMILIES)}")
    architectures = fields.get("architectures")
    if architectures and FAMILIES[family].lower() not in (
        str(a).lower() for a in architectures
    ):  # old checkpoints say LLaMAForCausalLM
        raise ValueError(f"{source}: architectures is {architectures}, expected {FAMILIES[family]}")
    needed: tuple[str, ...] = _NEEDED
    if family == "gemma3":
        fields, family, needed = _text_part(fields, source), "gemma3_text", _NEEDED_TEXT
    for name in needed:
        if name not in fields:
            raise ValueError(f"{source}: {name} is absent, expected an integer")
    try:
        from transformers import CONFIG_MAPPING

        known = CONFIG_MAPPING[family]  # imports more
    except ImportError as e:
        raise ImportError(
            "the engine reads Hugging Face configurations with transformers, which is not installed, or not all "
            f"that it needs: {to_install('hf')} ({e})"
        ) from e
    try:
        return known.from_dict(fields)
    except Exception as e:  # its checks raise errors of many classes
        raise ValueError(f"{source}: transformers does not take it: {e}") from e


def _text_part(fields: dict[str, Any], source: str) -> dict[str, Any]:
    """text_config, with what is stated for all parts."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{source}: text_config is {text!r}, expected an object")
    for_all = ("eos_token_id", "bos_token_id", "tie_word_embeddings", "torch_dtype", "dtype")
    return {**text, **{name: fields[name] for name in for_all if fields.get(name) is not None}}


def _tokens(value: Any, source: str) -> tuple[int, ...]:
    """End tokens from None, one token or a list."""
    tokens = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(t, int) and not isinstance(t, bool) for t in tokens):
        raise ValueError(f"{source}: eos_token_id is {value!r}, expected a token's number, or a list of them")
    return tokens


# Families whose layer_types say which layers have a window.
_LISTED = ("qwen2", "qwen3", "smollm3", *_GEMMA)


def _windows(hf: Any, family: str, layers: int, source: str) -> tuple[int | None, ...]:
    """Mistral and Phi-3 have one window for all layers, _LISTED name the layers that have one, the others have none."""
    kinds: list[Any] = getattr(hf, "layer_types", None) or []
    window = getattr(hf, "sliding_window", None) if family in ("mistral", "phi3", *_LISTED) else None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"{source}: sliding_window is {window!r}, expected a positive integer, or null")
    if family in _LISTED:
        accepted = {"full_attention": None, "sliding_attention": window}
        if len(kinds) != layers:
            raise ValueError(f"{source}: layer_types has {len(kinds)} entries, expected {layers}, one for each layer")
        for kind in kinds:
            if kind not in accepted:
                raise ValueError(f"{source}: layer_types has {kind!r}, expected {' or '.join(accepted)}")
        if "sliding_attention" in kinds and window is None:
            raise ValueError(f"{source}: layer_types has sliding_attention, expected a sliding_window for it")
        return tuple(accepted[kind] for kind in kinds)
    own = "full_attention" if window is None else "sliding_attention"
    if kinds and set(kinds) != {own}:
        raise ValueError(f"{source}: layer_types has {', '.join(sorted(set(kinds)))}, expected {own} for {family}")
    return (window,) * layers


def _rotaries(hf: Any, family: str, layers: int, head_dim: int, source: str) -> tuple[Rotary, ...]:
    """One for all layers; SmolLM3 lists the layers that have it, and Gemma 3 has one for layers with a window."""
    if family == "gemma3_text":
        of_type = {kind: rotary.of(hf, head_dim, source, layer_type=kind) for kind in dict.fromkeys(hf.layer_types)}
        return tuple(of_type[kind] for kind in hf.layer_types)
    of_all = rotary.of(hf, head_dim, source, partial=family == "phi3")
    if family != "smollm3":
        return (of_all,) * layers
    has = hf.no_rope_layers  # 1 where a layer rotates
    if len(has) < layers or any(h not in (0, 1) for h in has):
        raise ValueError(f"{source}: no_rope_layers is {has!r}, expected a 0 or 1 for each of {layers} layers")
    return tuple(of_all if h else rotary.none(head_dim) for h in has[:layers])


def _number(hf: Any, name: str, source: str) -> float:
    value = getattr(hf, name)
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{source}: {name} is {value!r}, expected a positive number")
    return float(value)


def _softcap(hf: Any, name: str, source: str) -> float | None:
    """Of Gemma 2 and 3; Gemma 3 does not apply the one of the scores."""
    value = getattr(hf, name) if hf.model_type in _GEMMA else None
    if value is None:
        return None
    if name == "attn_logit_softcapping" and hf.model_type == "gemma3_text":
        raise ValueError(f"{source}: {name} is {value!r}, expected null for gemma3_text")
    return _number(hf, name, source)


def _checked(cls: type[ModelConfig], hf: Any, source: str, multimodal: bool) -> ModelConfig:
    family = hf.model_type
    gemma = family in _GEMMA
    for name in (*_NEEDED, "max_position_embeddings", "num_key_value_heads"):
        value = getattr(hf, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{source}: {name} is {value!r}, expected a positive integer")
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{source}: num_key_value_heads is {kv_heads}, expected a divisor of {heads} attention heads")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise ValueError(f"{source}: head_dim is {head_dim!r}, expected an even number")
    field, accepted = ("hidden_activation", ("gelu_pytorch_tanh",)) if gemma else ("hidden_act", ("silu", "swish"))
    if getattr(hf, field) not in accepted:
        raise ValueError(f"{source}: {field} is {getattr(hf, field)!r}, expected {accepted[0]}")
    if getattr(hf, "use_bidirectional_attention", False):
        raise ValueError(f"{source}: use_bidirectional_attention is true, expected false: the engine generates text")
    eps = _number(hf, "rms_norm_eps", source)
    granite = family == "granite"
    m = _number(hf, "residual_multiplier", source) if granite else 1.0
    # Qwen2 has biases of q, k and v without a field for them.
    attention_bias = family not in ("qwen2", "mistral", "phi3") and bool(hf.attention_bias)
    scale = head_dim**-0.5
    if granite:
        scale = _number(hf, "attention_multiplier", source)
    elif gemma:
        scale = _number(hf, "query_pre_attn_scalar", source) ** -0.5
    embedding_scale = hf.hidden_size**0.5 if gemma else 1.0
    if granite:
        embedding_scale = _number(hf, "embedding_multiplier", source) / m
    windows = _windows(hf, family, hf.num_hidden_layers, source)
    dtype = hf.dtype if isinstance(hf.dtype, torch.dtype) else getattr(torch, str(hf.dtype), None)
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    bos = hf.bos_token_id
    return cls(
        family=family,
        multimodal=multimodal,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=hf.intermediate_size,
        vocab=hf.vocab_size,
        max_positions=hf.max_position_embeddings,
        norm_eps=eps / m**2,
        head_norm_eps=eps,
        norm_offset=1.0 if gemma else 0.0,
        activation="gelu_tanh" if gemma else "silu",
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family in ("llama", "granite", "smollm3") and bool(hf.mlp_bias),
        input_norms=family != "olmo2",
        output_norms=gemma or family == "olmo2",
        qk_norm=family in ("qwen3", "gemma3_text"),
        whole_qk_norm=family == "olmo2",
        packed=family == "phi3",
        windows=windows,
        tied=bool(hf.tie_word_embeddings),
        attention_scale=scale,
        attention_softcap=_softcap(hf, "attn_logit_softcapping", source),
        logits_softcap=_softcap(hf, "final_logit_softcapping", source),
        embedding_scale=embedding_scale,
        embedding_scale_rounds=gemma,
        logits_scale=1.0 / _number(hf, "logits_scaling", source) if granite else 1.0,
        eos=_tokens(hf.eos_token_id, source),
        bos=bos[0] if isinstance(bos, (list, tuple)) and bos else bos,
        rotaries=_rotaries(hf, family, hf.num_hidden_layers, head_dim, source),
        torch_dtype=dtype,
        initializer_range=float(hf.initializer_range),
        source=source,
    )
