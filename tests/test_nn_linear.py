"""The linear layers: torch.nn.Linear's state_dict, the functions' results, conversions, their own errors."""

import copy
import io

import pytest
import torch
from helpers import BF16

from rooftile import fp8_linear, gated_linear, int4_linear, int8_linear, linear, nn, runtime

DEVICE = runtime.default_device()
FP8 = torch.float8_e4m3fn
QUANTIZED = {
    "fp8": (nn.FP8Linear, {}, lambda layer, x: fp8_linear(x, layer.weight, layer.weight_scale, bias=layer.bias)),
    "fp8 tensor": (
        nn.FP8Linear,
        {"per": "tensor"},
        lambda layer, x: fp8_linear(x, layer.weight, layer.weight_scale, bias=layer.bias),
    ),
    "fp8 block": (
        nn.FP8Linear,
        {"per": "block"},
        lambda layer, x: fp8_linear(x, layer.weight, layer.weight_scale, bias=layer.bias),
    ),
    "int8": (nn.Int8Linear, {}, lambda layer, x: int8_linear(x, layer.weight, layer.weight_scale, layer.bias)),
    "int4": (
        nn.Int4Linear,
        {"group": 32},
        lambda layer, x: int4_linear(x, layer.weight, layer.weight_scale, layer.bias),
    ),
}
WEIGHTS = {"fp8": FP8, "int8": torch.int8, "int4": torch.uint8}
every_quantized = pytest.mark.parametrize("kind", QUANTIZED)


def quantized(kind, source):
    layer, options, _ = QUANTIZED[kind]
    return layer(source, **options)


def source(bias=True, dtype=torch.float32):
    return torch.nn.Linear(64, 48, bias, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_has_the_state_dict_of_torch(bias):
    theirs, ours = source(bias), nn.Linear(64, 48, bias, device=DEVICE)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x))
    other = source(bias)
    other.load_state_dict(nn.Linear(64, 48, bias, device=DEVICE, activation="silu").state_dict())
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other.weight, theirs.weight)


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
def test_linear_applies_its_activation_and_adds_the_residual_last(activation):
    layer = nn.Linear(64, 48, device=DEVICE, activation=activation)
    x, residual = torch.randn(5, 64, device=DEVICE), torch.randn(5, 48, device=DEVICE)
    z = torch.nn.functional.linear(x, layer.weight, layer.bias)
    if activation == "silu":
        z = torch.nn.functional.silu(z)
    elif activation:
        z = torch.nn.functional.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    torch.testing.assert_close(layer(x), z)
    torch.testing.assert_close(layer(x, residual), z + residual)
    expected = linear(x, layer.weight, layer.bias, activation=activation, residual=residual)
    assert torch.equal(layer(x, residual), expected)
    assert ("activation" in repr(layer)) == (activation is not None)


def test_gradients_go_through_linear():
    layer = nn.Linear(64, 48, device=DEVICE)
    theirs = source()
    theirs.load_state_dict(layer.state_dict())
    x = torch.randn(5, 64, device=DEVICE)
    residual = torch.randn(5, 48, device=DEVICE)
    ours = [t.clone().requires_grad_() for t in (x, residual)]
    others = [t.clone().requires_grad_() for t in (x, residual)]
    layer(*ours).square().sum().backward()
    (theirs(others[0]) + others[1]).square().sum().backward()
    pairs = zip((*ours, layer.weight, layer.bias), (*others, theirs.weight, theirs.bias), strict=True)
    for mine, expected in pairs:
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_linear_has_the_gate_s_rows_first(activation):
    layer = nn.GatedLinear(64, 48, bias=True, device=DEVICE, activation=activation)
    assert (layer.weight.shape, layer.bias.shape) == ((96, 64), (96,))
    x = torch.randn(2, 3, 64, device=DEVICE)
    gate, up = torch.nn.functional.linear(x, layer.weight, layer.bias).chunk(2, -1)
    act = torch.nn.functional.silu(gate)
    if activation != "silu":
        act = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    torch.testing.assert_close(layer(x), act * up)
    assert torch.equal(layer(x), gated_linear(x, layer.weight, layer.bias, activation=activation))
    theirs = torch.nn.Linear(64, 96, device=DEVICE)
    theirs.load_state_dict(layer.state_dict())
    layer.load_state_dict(theirs.state_dict())


@every_quantized
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantized_layer_is_its_function_and_near_what_it_was(kind, bias):
    theirs = source(bias)
    layer = quantized(kind, theirs)
    assert (layer.weight.dtype, layer.weight_scale.dtype) == (WEIGHTS[kind.split()[0]], torch.float32)
    x = torch.randn(2, 3, 64, device=DEVICE)
    out = layer(x)
    assert torch.equal(out, QUANTIZED[kind][2](layer, x))
    with torch.no_grad():
        expected = theirs(x)
    assert (out - expected).norm() < 0.15 * expected.norm()
    assert not list(layer.parameters())
    assert f"in_features=64, out_features=48, bias={bias}" in repr(layer)
    if bias:  # its own: training goes on without it
        theirs.bias.data.zero_()
        assert torch.equal(layer(x), out)


@every_quantized
def test_a_quantized_layer_is_saved_and_loaded(kind):
    layer, fresh = quantized(kind, source()), quantized(kind, source())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    x = torch.randn(3, 64, device=DEVICE)
    assert torch.equal(fresh(x), layer(x))
    assert set(layer.state_dict()) == {"weight", "weight_scale", "bias"}
    with pytest.raises(RuntimeError, match="weight_scale"):  # a layer's that is not quantized
        fresh.load_state_dict(source().state_dict())


CONVERSIONS = {
    "to": lambda m: m.to(BF16),
    "bfloat16": lambda m: m.bfloat16(),
    "half and back": lambda m: m.half().bfloat16(),
    "type": lambda m: m.type(BF16),
    "of a model": lambda m: torch.nn.Sequential(m).to(BF16)[0],
}


@every_quantized
@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_conversion_leaves_the_weight_and_its_scale(kind, convert):
    layer = quantized(kind, source())
    before = copy.deepcopy(layer)
    layer = convert(layer)
    for name in ("weight", "weight_scale"):
        mine, expected = getattr(layer, name), getattr(before, name)
        assert mine.dtype == expected.dtype
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8)), name
    assert layer.bias.dtype == BF16
    out = layer(torch.randn(3, 64, device=DEVICE, dtype=BF16))
    assert (out.dtype, out.shape) == (BF16, (3, 48))


@every_quantized
def test_a_quantized_layer_moves(kind):
    layer = quantized(kind, source())
    dtypes = {name: t.dtype for name, t in layer.state_dict().items()}
    for moved in (copy.deepcopy(layer).to("meta"), copy.deepcopy(layer).to("meta", torch.float32)):
        assert {name: (t.device.type, t.dtype) for name, t in moved.state_dict().items()} == {
            name: ("meta", dtype) for name, dtype in dtypes.items()
        }
    both = copy.deepcopy(layer).to("meta", BF16)
    assert both.weight.is_meta
    assert (both.weight.dtype, both.weight_scale.dtype, both.bias.dtype) == (dtypes["weight"], torch.float32, BF16)
    empty = both.to_empty(device=DEVICE)
    assert (empty.weight.device.type, empty.weight.dtype) == (DEVICE.type, dtypes["weight"])
    empty.load_state_dict(layer.state_dict())
    x = torch.randn(3, 64, device=DEVICE, dtype=BF16)
    assert torch.equal(empty(x), layer.to(BF16)(x))


def test_linear_and_gated_linear_convert_as_torch_s():
    for layer in (nn.Linear(64, 48, device=DEVICE), nn.GatedLinear(64, 48, device=DEVICE)):
        out = layer.to(BF16)(torch.randn(3, 64, device=DEVICE, dtype=BF16))
        assert (out.dtype, out.shape) == (BF16, (3, 48))
        assert layer.to("meta").weight.is_meta
        assert layer(torch.empty(3, 64, dtype=BF16, device="meta")).shape == (3, 48)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"Linear: activation is 'relu', expected None or one of .*gelu_tanh"):
        nn.Linear(64, 48, activation="relu")
    for activation in ("relu", None):
        with pytest.raises(ValueError, match=f"GatedLinear: activation is {activation!r}, expected one of"):
            nn.GatedLinear(64, 48, activation=activation)
    for layer in (nn.FP8Linear, nn.Int8Linear, nn.Int4Linear):
        with pytest.raises(TypeError, match=f"{layer.__name__}: linear is a Identity, expected a torch.nn.Linear"):
            layer(torch.nn.Identity())
    with pytest.raises(ValueError, match="FP8Linear: per is 'column', expected row, tensor or block"):
        nn.FP8Linear(source(), per="column")
    with pytest.raises(ValueError, match="group is 48"):
        nn.Int4Linear(source(), group=48)
    with pytest.raises(ValueError, match="128"):  # a row of 64 has no group of 128
        nn.Int4Linear(source())
    for kind in ("fp8", "int8", "int4"):
        with pytest.raises(ValueError, match="requires grad"):
            quantized(kind, source())(torch.randn(3, 64, device=DEVICE, requires_grad=True))


@pytest.mark.parametrize("quantized", [nn.FP8Linear, nn.Int8Linear, nn.Int4Linear])
def test_what_a_quantized_layer_has_not_is_refused(quantized):
    for layer in (nn.Linear(128, 48, device=DEVICE, activation="gelu"), nn.GatedLinear(128, 24, device=DEVICE)):
        with pytest.raises(ValueError, match=f"linear is a {type(layer).__name__} with activation="):
            quantized(layer)


def test_gated_linear_says_what_comes_out():
    layer = nn.GatedLinear(128, 24, device=DEVICE, activation="gelu")
    assert layer.out_features == layer(torch.randn(2, 128, device=DEVICE)).shape[-1] == 24
    assert "out_features=24" in repr(layer)
    assert "activation='gelu'" in repr(layer)


@every_quantized
def test_quantized_layers_add_a_residual_last(kind):
    layer = quantized(kind, source())
    x, residual = torch.randn(3, 64, device=DEVICE), torch.randn(3, 48, device=DEVICE)
    torch.testing.assert_close(layer(x, residual), layer(x) + residual, rtol=1e-6, atol=1e-6)


def test_linear_takes_a_precision():
    layer = nn.Linear(64, 48, device=DEVICE, precision="tf32")
    x = torch.randn(3, 64, device=DEVICE)
    assert torch.equal(layer(x), linear(x, layer.weight, layer.bias, precision="tf32"))
    assert "precision='tf32'" in repr(layer)
    with pytest.raises(ValueError, match="precision is 'bf16', expected one of ieee, tf32"):
        nn.Linear(64, 48, precision="bf16")
