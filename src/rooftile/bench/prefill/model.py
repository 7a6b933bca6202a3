"""The model of `rooftile bench prefill`, and the part of it that is Rooftile's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.bench.timer import Call
from rooftile.bench.workloads import MODELS, RANDOM, read
from rooftile.cases import find_cases
from rooftile.huggingface import PatchHandle
from rooftile.huggingface.families import Norm, part_of
from rooftile.huggingface.random_model import random_model


def load_config(name: str, layers: int | None = None) -> tuple[str, Any]:
    """A short name and transformers' configuration, for what `workloads.read` takes.

    Raises:
        ValueError: it takes none of that name, or transformers does not know its model_type.
    """
    from transformers import AutoConfig

    title, values = read(name, MODELS, layers)
    try:
        return title, AutoConfig.for_model(values.pop("model_type", None), **values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: transformers makes no configuration of it: {error}") from error


def make_model(config: Any, weights: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model with random weights, or with those of a checkpoint's folder.

    Raises:
        ValueError: the folder holds no such weights.
    """
    if weights == RANDOM:
        return random_model(config, dtype=dtype, device=device)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=dtype, attn_implementation="sdpa")
    except OSError as error:
        raise ValueError(f"{weights}: {error}") from error
    loaded: nn.Module = model.eval().to(device)
    return loaded


def twin(model: nn.Module) -> nn.Module:
    """The same model once more, over the same parameters and buffers."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def layer_ops(model: nn.Module, handle: PatchHandle, ids: Tensor) -> tuple[Call, Call]:
    """The norms, the residual adds before them, RoPE and gated activations of all layers, plain and by Rooftile.

    The data are random. Where the norms of q and k were fused with RoPE, they are timed with it.

    Raises:
        ValueError: the configuration does not say its sizes in Llama's way.
    """

    config: Any = model.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    if missing := [n for n in names if not isinstance(getattr(config, n, None), int)]:
        raise ValueError(f"{type(config).__name__} has no {', '.join(missing)}")
    ops = ["rms_norm", "add_rms_norm", "rope", "qk_norm_rope", "silu_mul", "gelu_mul"]
    cases = {case.name: case for case in find_cases(ops)}
    device, dtype = ids.device, next(model.parameters()).dtype
    draw = functools.partial(torch.randn, device=device, dtype=dtype)
    plain: list[Call] = []
    ours: list[Call] = []

    def add(name: str, count: int, *tensors: Tensor, **options: Any) -> None:
        plain.extend([functools.partial(cases[name].eager, *tensors, **options)] * count)
        ours.extend([functools.partial(cases[name].function, *tensors, **options)] * count)

    fused = handle.replaced["residual add + RMSNorm"]
    rotated = handle.modules["QK-norm + RoPE"]
    of_heads = {f"{attention}.{name}" for attention in rotated for name in ("q_norm", "k_norm")}
    norms = [name for name in handle.modules["RMSNorm"] if name not in of_heads]
    for name, shape in _norm_inputs(model, norms, ids).items():
        norm: Any = model.get_submodule(name)
        part = part_of(norm)
        assert isinstance(part, Norm)
        options = {"eps": getattr(norm, part.eps), "offset": part.offset, "rounding": part.rounding}
        x = draw(shape)
        if fused and shape == (*ids.shape, config.hidden_size):
            fused -= 1
            add("add_rms_norm", 1, x, draw(shape), norm.weight, **options)
        else:
            add("rms_norm", 1, x, norm.weight, **options)
    batch, tokens = ids.shape
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    q, k = (draw(batch, tokens, h, head_dim).transpose(1, 2) for h in (heads, config.num_key_value_heads))
    angles = torch.rand(1, tokens, head_dim // 2, device=device).repeat(1, 1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    add("rope", handle.replaced["RoPE"], q, k, *tables)
    for name in rotated:
        q_norm: Any = model.get_submodule(f"{name}.q_norm")
        k_norm: Any = model.get_submodule(f"{name}.k_norm")
        part = part_of(q_norm)
        assert isinstance(part, Norm)
        options = {"eps": getattr(q_norm, part.eps), "offset": part.offset}
        add("qk_norm_rope", 1, q, k, q_norm.weight, k_norm.weight, *tables, **options)
    gate, up = (draw(batch, tokens, config.intermediate_size) for _ in range(2))
    add("silu_mul", handle.replaced["SwiGLU"], gate, up)
    add("gelu_mul", handle.replaced["GeGLU"], gate, up, activation="gelu_tanh")

    def run(calls: list[Call]) -> None:
        for call in calls:
            call()

    return functools.partial(run, plain), functools.partial(run, ours)


def _norm_inputs(model: nn.Module, names: Sequence[str], ids: Tensor) -> dict[str, tuple[int, ...]]:
    """The shape of each norm's input, as one forward gives it."""
    shapes: dict[str, tuple[int, ...]] = {}

    def hook(name: str) -> Any:
        return lambda module, args: shapes.__setitem__(name, tuple(args[0].shape))

    hooks = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        model(ids, use_cache=False)
    finally:
        for h in hooks:
            h.remove()
    return shapes
