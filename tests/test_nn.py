"""The modules: the ops' results, the state_dicts of their counterparts, and their own errors."""

import pytest
import torch

pytest.importorskip("triton")

from rooftile import nn, runtime
from rooftile.reference import rms_norm as norm_reference
from rooftile.reference import rope as rope_reference
from rooftile.reference.gated import APPROXIMATE

DEVICE = runtime.default_device()


def test_rms_norm_takes_the_state_dict_of_torch() -> None:
    theirs = torch.nn.RMSNorm(48, eps=1e-5, device=DEVICE)
    torch.nn.init.normal_(theirs.weight)
    ours = nn.RMSNorm(48, eps=1e-5, rounding="none", device=DEVICE)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 48, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_new_norm_multiplies_by_one_whatever_the_offset() -> None:
    x = torch.randn(3, 32, device=DEVICE)
    expected = norm_reference.rms_norm(x)
    for module in (
        nn.RMSNorm(32, device=DEVICE),
        nn.RMSNorm(32, offset=1.0, rounding="gemma", device=DEVICE),
        nn.RMSNorm(32, elementwise_affine=False, device=DEVICE),
    ):
        torch.testing.assert_close(module(x), expected)
    assert list(nn.RMSNorm(32, elementwise_affine=False).state_dict()) == []


def test_add_rms_norm_returns_both_and_trains_its_weight() -> None:
    module = nn.AddRMSNorm(32, device=DEVICE)
    x, residual = torch.randn(2, 4, 32, device=DEVICE), torch.randn(2, 4, 32, device=DEVICE)
    y, u = module(x, residual)
    torch.testing.assert_close(u, x + residual)
    torch.testing.assert_close(y, norm_reference.rms_norm(x + residual, module.weight))
    y.square().sum().backward()
    assert module.weight is not None
    assert module.weight.grad is not None
    assert module.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("style", ["half", "interleaved", "deepseek"])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_rope_is_the_formula_at_true_angles(style: str, layout: str) -> None:
    module = nn.RoPE(16, max_positions=12, style=style, layout=layout, device=DEVICE)  # type: ignore[arg-type]
    shape = (2, 3, 9, 24) if layout == "bhtd" else (2, 9, 3, 24)
    q, k = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE)
    positions = torch.arange(9, device=DEVICE) + 3
    for ids, rows in ((None, slice(0, 9)), (positions, slice(3, 12))):
        expected = rope_reference.rope(q, k, module.cos[rows], module.sin[rows], style=style, layout=layout)
        torch.testing.assert_close(module(q, k, ids), expected)
    angle = 5 * 10000.0 ** (-2 / 16)  # position 5, pair 1
    column = 2 if style == "interleaved" else 1
    assert module.cos[5, column].item() == pytest.approx(torch.tensor(angle).cos().item(), abs=1e-6)
    assert list(module.state_dict()) == []


def test_rope_refuses_what_its_tables_do_not_hold() -> None:
    with pytest.raises(ValueError, match="rotary_dim is 7"):
        nn.RoPE(7)
    with pytest.raises(ValueError, match="RoPE: layout is 'BTHD', expected one of bhtd, bthd"):
        nn.RoPE(8, layout="BTHD")  # type: ignore[arg-type]
    module = nn.RoPE(8, max_positions=4, device=DEVICE)
    q = torch.randn(1, 2, 5, 8, device=DEVICE)
    with pytest.raises(ValueError, match="5 tokens, expected at most max_positions = 4"):
        module(q, q)


def test_silu_mul_takes_two_tensors_or_one() -> None:
    gate_up = torch.randn(3, 40, device=DEVICE)
    gate, up = gate_up.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(nn.SiluMul()(gate, up), expected)
    torch.testing.assert_close(nn.SiluMul()(gate_up), expected)


def test_layer_norm_is_torchs_own_but_for_the_kernel() -> None:
    for shape, affine, bias in ((48, True, True), ((3, 16), True, False), (48, False, False)):
        theirs = torch.nn.LayerNorm(shape, eps=1e-4, elementwise_affine=affine, bias=bias, device=DEVICE)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter)
        ours = nn.LayerNorm(shape, eps=1e-4, elementwise_affine=affine, bias=bias, device=DEVICE)
        ours.load_state_dict(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(5, 3, 16 if isinstance(shape, tuple) else 48, device=DEVICE)
        torch.testing.assert_close(ours(x), theirs(x))
        assert str(ours) == str(theirs)
    with pytest.raises(ValueError, match=r"LayerNorm: input has shape \(5, 16, 3\), expected its last dimensions"):
        nn.LayerNorm((3, 16), device=DEVICE)(torch.randn(5, 16, 3, device=DEVICE))


def test_softmax_takes_any_dimension() -> None:
    x = torch.randn(3, 4, 5, 6, device=DEVICE)
    for dim in (-1, 3, 0, -2):
        torch.testing.assert_close(nn.Softmax(dim)(x), torch.softmax(x, dim))
    mask = torch.rand(5, 6, device=DEVICE) < 0.5
    mask[0, 0] = mask[0, 1] = True
    kept = torch.where(mask, 0.5 * x, -torch.inf)
    for dim in (-1, -2):
        expected = torch.softmax(kept, dim).nan_to_num()
        torch.testing.assert_close(nn.Softmax(dim, scale=0.5)(x, mask), expected)
    assert nn.Softmax(causal=True)(x)[0, 0, 0, -2:].tolist()[1] == 0.0
    with pytest.raises(ValueError, match="Softmax: dim is 0, expected -1 where causal is set"):
        nn.Softmax(0, causal=True)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_mul_takes_two_tensors_or_one(activation) -> None:
    gate, up = torch.randn(2, 5, 32, device=DEVICE)
    module = nn.GeluMul(activation)
    expected = torch.nn.functional.gelu(gate, approximate=APPROXIMATE[activation]) * up
    torch.testing.assert_close(module(gate, up), expected)
    torch.testing.assert_close(module(torch.cat((gate, up), dim=-1)), expected)


def test_bias_activations_take_the_bias_of_a_linear() -> None:
    linear = torch.nn.Linear(8, 24, device=DEVICE)
    x = torch.randn(5, 8, device=DEVICE)
    product = x @ linear.weight.T
    pairs = (
        (nn.BiasGELU(24, device=DEVICE), torch.nn.GELU()),
        (nn.BiasGELU(24, "gelu_tanh", device=DEVICE), torch.nn.GELU("tanh")),
        (nn.BiasSiLU(24, device=DEVICE), torch.nn.SiLU()),
    )
    for ours, activation in pairs:
        found = ours.load_state_dict(linear.state_dict(), strict=False)
        assert found.missing_keys == []
        assert found.unexpected_keys == ["weight"]
        linear.load_state_dict(ours.state_dict(), strict=False)
        torch.testing.assert_close(ours(product), activation(linear(x)))


def test_qk_norm_rope_takes_the_norms_of_qwen3() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3 import modeling_qwen3

    config = transformers.Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5
    )
    theirs = modeling_qwen3.Qwen3Attention(config, layer_idx=0).to(DEVICE)
    for norm in (theirs.q_norm, theirs.k_norm):
        torch.nn.init.normal_(norm.weight)
    ours = nn.QKNormRoPE(16, eps=1e-5, device=DEVICE)
    assert ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys == []
    theirs.load_state_dict(ours.state_dict(), strict=False)

    q, k = torch.randn(2, 4, 7, 16, device=DEVICE), torch.randn(2, 2, 7, 16, device=DEVICE)
    tables = modeling_qwen3.Qwen3RotaryEmbedding(config).to(DEVICE)(q, torch.arange(7, device=DEVICE)[None])
    expected = modeling_qwen3.apply_rotary_pos_emb(theirs.q_norm(q), theirs.k_norm(k), *tables)
    for got, want in zip(ours(q, k, *tables), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_tables_and_biases_are_made_again_after_the_meta_device() -> None:
    made, expected = nn.RoPE(16, max_positions=8, device="meta"), nn.RoPE(16, max_positions=8, device=DEVICE)
    made.to_empty(device=DEVICE).reset_parameters()
    assert torch.equal(made.cos, expected.cos)
    assert torch.equal(made.sin, expected.sin)
    bias = nn.BiasGELU(4, device="meta").to_empty(device=DEVICE)
    bias.reset_parameters()
    assert bias.bias.tolist() == [0.0] * 4


def test_arguments_that_do_not_fit_are_refused_when_a_module_is_made() -> None:
    for make, error, message in (
        (lambda: nn.RMSNorm((4, 8)), ValueError, "RMSNorm: hidden_size is"),
        (lambda: nn.RMSNorm(8, eps=None), TypeError, "RMSNorm: eps is None"),
        (lambda: nn.RMSNorm(8, 1e-6, False, offset=1.0), ValueError, "RMSNorm: offset is 1.0, expected 0 without a"),
        (
            lambda: nn.RMSNorm(8, rounding="x"),
            ValueError,
            "RMSNorm: rounding is 'x', expected one of llama, gemma, none",
        ),
        (lambda: nn.RMSNorm(True), ValueError, "RMSNorm: hidden_size is True, expected a positive integer"),
        (lambda: nn.RoPE(8.0), TypeError, "RoPE: rotary_dim is a float, expected an int"),
        (lambda: nn.RoPE(True), TypeError, "RoPE: rotary_dim is a bool, expected an int"),
        (lambda: nn.RoPE(8, 0), ValueError, "RoPE: max_positions is 0, expected a positive integer"),
        (lambda: nn.RoPE(8, base="x"), TypeError, "RoPE: base is a str, expected a number"),
        (lambda: nn.RoPE(8, base=-1.0), ValueError, "RoPE: base is -1.0, expected a positive number"),
        (lambda: nn.RoPE(64, style="gptj"), ValueError, "RoPE: style is 'gptj', expected one of half, interleaved"),
        (lambda: nn.QKNormRoPE(8, style="x"), ValueError, "QKNormRoPE: style is 'x', expected one of half"),
        (lambda: nn.QKNormRoPE(8, layout="x"), ValueError, "QKNormRoPE: layout is 'x', expected one of bhtd, bthd"),
        (lambda: nn.GeluMul("fast"), ValueError, "GeluMul: activation is 'fast'"),
        (lambda: nn.BiasGELU(8, "fast"), ValueError, "BiasGELU: activation is 'fast'"),
    ):
        with pytest.raises(error, match=message):
            make()
