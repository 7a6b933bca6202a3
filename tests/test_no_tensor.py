"""What comes in the place of a tensor, and is none, is named: None, a list, an array, a number, a word."""

import inspect
import re

import numpy as np
import pytest
import torch
from helpers import BF16, CASES, draw
from torch._subclasses.fake_tensor import FakeTensorMode

import rooftile


def annotations(name):
    """What the public function of that name says of its arguments."""
    return {n: str(p.annotation) for n, p in inspect.signature(getattr(rooftile, name)).parameters.items()}


PUBLIC = [
    (name, argument)
    for name in rooftile.__all__
    if inspect.isfunction(getattr(rooftile, name))
    for argument, accepted in annotations(name).items()
    if "Tensor" in accepted and "None" not in accepted and "float" not in accepted and "int | Tensor" not in accepted
]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_by_case(case, autocast, device):
    op = re.sub("_quantized$", "", case.name)
    seen = {"cu_seqlens_q", "cu_seqlens_k"}  # which may be lists
    for point in case.sets["tiny"]:  # no point has all that an op takes
        inputs = draw(case, point, torch.float32, device)
        for name in inputs.keys() - seen:
            accepted = annotations(op).get(name, "Tensor | None")  # a scale that `quantize` holds
            others = {"list": [1.0], "ndarray": np.ones(2), "str": "x"}
            if "int" not in accepted and "float" not in accepted:
                others["int"] = 3
            if "None" not in accepted:
                others["None"] = None
            for kind, other in others.items():
                said = rf"{op}(_quantized)?|{op.removeprefix('add_')}_quantized|Quantize"
                message = rf"^({said}): {name} is (an? )?(numpy\.)?{kind}, expected .*tensor"
                with pytest.raises(TypeError, match=message), torch.autocast(device.type, BF16, enabled=autocast):
                    case.function(**{**inputs, name: other}, **point.options)
        seen |= inputs.keys()


@pytest.mark.parametrize(("name", "argument"), PUBLIC, ids=[f"{name} {argument}" for name, argument in PUBLIC])
def test_none_by_signature(name, argument, device):
    """Whether or not an op has a case. Nothing else about the arguments is right: this is said first."""
    given = {n: None if n == argument else torch.zeros(1, device=device) for f, n in PUBLIC if f == name}
    more = {"quantize": rooftile.Quantize(torch.int8, per="row")} if name == "quantize_tensor" else {}
    more |= {"q_weight": None, "k_weight": None} if name == "qk_norm_rope" else {}
    more |= {"lr": 1e-3, "step": 1} if name == "adamw_" else {}
    more |= {"v_cache": None, "head_dim_v": 1} if name in ("decode_attention", "attention_paged") else {}
    with pytest.raises(TypeError, match=f"^{name}: {argument} is None, expected .*tensor"):
        getattr(rooftile, name)(**given, **more)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (rooftile.nn.LayerNorm(8), "LayerNorm: input"),
        (rooftile.nn.RMSNorm(8), "rms_norm: x"),
        (rooftile.nn.Softmax(), "softmax: x"),
        (rooftile.nn.Softmax(0), "Softmax: input"),
        (rooftile.nn.Linear(8, 8), "linear: x"),
        (rooftile.nn.SiluMul(), "silu_mul_packed: gate_up"),
        (rooftile.nn.RoPE(8), "RoPE: q"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_none_in_modules(module, message):
    names = [n for n, p in inspect.signature(module.forward).parameters.items() if p.default is p.empty]
    with pytest.raises(TypeError, match=f"^{message} is None, expected a tensor"):
        module(*(None for _ in names))


def test_none_in_caches(device):
    cache = rooftile.KVCache(1, 8, 1, 16, dtype=torch.float32, device=device)
    cache.extend(1)
    x = torch.zeros(1, 1, 1, 16, device=device)
    with pytest.raises(TypeError, match=r"^append_kv: k is None, expected a tensor"):
        cache.append(0, None, x)
    cache.append(0, x, x)
    with pytest.raises(TypeError, match=r"^decode_attention: q is None, expected a tensor"):
        cache.attend(0, None)


def test_none_while_compiling(device):
    """Of fake tensors: the dispatcher lets None pass."""
    with FakeTensorMode():
        x = torch.empty(2, 32, device=device)
        with pytest.raises(TypeError, match=r"^rms_norm_linear: norm_weight is None, expected a tensor"):
            torch.ops.rooftile.rms_norm_linear(x, None, x, None, None, 1e-6, 0.0, [])
