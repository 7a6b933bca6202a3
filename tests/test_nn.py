"""The modules: the ops' results, the state_dicts of their counterparts, and their own errors."""

import pytest
import torch

pytest.importorskip("triton")

from rooftile import nn, runtime
from rooftile.reference import rms_norm as norm_reference
from rooftile.reference import rope as rope_reference

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
@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
def test_rope_is_the_formula_at_true_angles(style: str, layout: str) -> None:
    module = nn.RoPE(16, max_positions=12, style=style, layout=layout, device=DEVICE)  # type: ignore[arg-type]
    shape = (2, 3, 9, 24) if layout == "BHTD" else (2, 9, 3, 24)
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
