"""`rooftile.optim.AdamW` with a gradient scaler."""

import math

import pytest
import torch
from optimizers import F32, assert_agree, pair, parameters, params_of
from torch import nn

from rooftile.optim import AdamW


def test_the_gradscaler_hands_its_scale_over(device):
    """An infinity skips the step and is not counted; else gradients are divided by the scale, before the clipping."""
    first, second = pair(device, theirs=F32, max_grad_norm=0.5)
    for step, factor in enumerate((1.0, math.inf, 2.0)):
        for p, q in zip(params_of(first), params_of(second), strict=True):
            q.grad = torch.full_like(q, 0.1 * (step + 1))
            p.grad = q.grad * 1024.0 * factor
        first.grad_scale = torch.tensor(1024.0 * factor, device=device)
        first.found_inf = torch.tensor(float(factor == math.inf), device=device)
        first.step()
        del first.grad_scale, first.found_inf
        if factor != math.inf:
            nn.utils.clip_grad_norm_(params_of(second), 0.5)
            second.step()
    assert_agree(first, second)
    assert first._step_supports_amp_scaling


@pytest.mark.parametrize("clip", [1.0, math.inf])
def test_the_scaler_decides_where_an_infinity_is_an_error(clip, device):
    """It skips the step and halves its scale. An infinity that it has not found is an error, and leaves nothing."""
    [p] = parameters(device, [(4,)])
    optimizer = AdamW([p], max_grad_norm=clip, nonfinite="error")
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16)
    before = p.detach().clone()
    scaler.scale((p * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert torch.equal(p, before)
    optimizer.zero_grad()
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(p, before)
    before = p.detach().clone()
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), torch.zeros((), device=device)
    p.grad = torch.full_like(p, math.inf)
    with pytest.raises(RuntimeError, match="expected a finite number"):
        optimizer.step()
    assert torch.equal(p, before)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.gpu
def test_gradscaler(device):
    [p] = parameters(device, [(5000,)])
    optimizer, scaler = AdamW([p]), torch.amp.GradScaler(init_scale=1024.0)
    before = p.detach().clone()
    scaler.scale((p * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, before)
    optimizer.zero_grad()
    scaler.scale((p * 2).sum()).backward()
    scaler.step(optimizer)
    plain = nn.Parameter(before)
    plain.grad = torch.full_like(plain, 2.0)
    torch.optim.AdamW([plain]).step()
    torch.testing.assert_close(p, plain, rtol=0, atol=1e-6)
