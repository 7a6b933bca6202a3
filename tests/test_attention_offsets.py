"""Attention over rows past 2^31 elements, and that kernels with offsets of 32 bits would not pass."""

import pytest
import torch
from helpers import BF16, assert_same
from test_offsets import far_rows, no_plans_kept, use_kernels_without_int64

from rooftile import runtime
from rooftile.ops.attention import (
    attention,
    backward,
    backward_dkdv,
    backward_dq,
    backward_parts,
    forward,
    parts,
    row_sums,
)

__all__ = ["far_rows", "no_plans_kept"]  # fixtures

ROLES = ("q", "k", "v", "mask", "dout")


def run_far(role, lay, device):
    """out and the gradients with the four rows of one tensor as drawn, and far apart."""
    torch.manual_seed(0)
    drawn = {name: torch.randn(4, 4 if name == "mask" else 48, device=device).to(BF16) for name in ROLES}
    results = []
    for place in (torch.clone, lay):
        t = drawn | {role: place(drawn[role])}
        leaves = [t[name].detach()[None, None].requires_grad_() for name in ("q", "k", "v")]
        out = attention(*leaves, mask=t["mask"], causal=True)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, t["dout"][None, None])))
    return results


@pytest.mark.parametrize("role", ROLES)
def test_rows_past_two_to_the_31_are_right(role, far_rows, device):
    near, far = run_far(role, far_rows, device)
    assert_same(far, near)


@pytest.mark.parametrize(
    ("direction", "role"), [("forward", r) for r in ROLES if r != "dout"] + [("backward", r) for r in ROLES]
)
def test_a_kernel_with_offsets_of_32_bits_is_caught(
    role, direction, far_rows, device, monkeypatch, tmp_path, no_plans_kept
):
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("on a GPU a wild access ends the process: the interpreter alone can show it")
    from rooftile.interpreter.memory import OutOfBoundsError

    of_gradients = backward_parts, backward_dkdv, backward_dq, row_sums
    for file in (parts, *((forward,) if direction == "forward" else of_gradients)):  # each imports of those before
        use_kernels_without_int64(file, monkeypatch, tmp_path)
    monkeypatch.setattr(backward, "dkdv_kernel", backward_dkdv.dkdv_kernel)  # what it has imported
    monkeypatch.setattr(backward, "dq_kernel", backward_dq.dq_kernel)
    assert_same(*run_far(role, torch.clone, device))  # sound where offsets are small
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        run_far(role, far_rows, device)
