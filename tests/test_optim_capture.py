"""`rooftile.optim.AdamW` on several devices and in CUDA graphs."""

import gc
import weakref

import pytest
import torch
from helpers import interpreted
from optimizers import F32, LARGEST, assert_agree, pair, parameters, params_of, steps
from torch import nn

from rooftile.optim import AdamW


def test_the_learning_rate_of_a_group_without_tensors_on_a_device_may_be_elsewhere(device):
    other = {"params": [nn.Parameter(torch.zeros(3, device="meta"))], "lr": torch.tensor(0.5, device="meta")}
    optimizer = AdamW([{"params": parameters(device, [(4,)])}, other], lr=torch.tensor(1e-2, device=device))
    reference = torch.optim.AdamW(parameters(device, [(4,)]), lr=1e-2)
    for o in (optimizer, reference):
        params_of(o)[0].grad = torch.ones(4, device=device)
        o.step()
    torch.testing.assert_close(params_of(optimizer)[0], params_of(reference)[0], rtol=0, atol=LARGEST)
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-2, device="meta")
    with pytest.raises(ValueError, match="lr is on meta, expected"):
        optimizer.step()


def test_a_group_whose_parameters_get_a_gradient_later_has_its_learning_rate(device):
    optimizers = []
    for cls in (AdamW, torch.optim.AdamW):
        params = parameters(device, [(4,), (6,)])
        rates = [torch.tensor(1e-2, device=device), torch.tensor(0.1, device=device)] if cls is AdamW else [1e-2, 0.1]
        o = cls([{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)])
        params[0].grad = torch.ones(4, device=device)
        o.step()
        params[1].grad = torch.ones(6, device=device)
        o.step()
        optimizers.append(o)
    assert_agree(*optimizers)


@interpreted
def test_what_captured_steps_use_is_kept_once(device, monkeypatch):
    monkeypatch.setattr("rooftile.optim.adamw._is_capturing", lambda: True)
    optimizer = AdamW(parameters(device, [(8,), (4, 5)]), capturable=True)
    for p in params_of(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = len(optimizer._captured)
    assert kept
    for _ in range(3):
        optimizer.step()
    assert len(optimizer._captured) == kept


@interpreted
def test_a_dense_copy_that_a_graph_writes_outlives_a_new_group(device, monkeypatch):
    monkeypatch.setattr("rooftile.optim.adamw._is_capturing", lambda: True)
    optimizer = AdamW([nn.Parameter(torch.zeros(4, 9, device=device)[:, :5])], capturable=True)
    params_of(optimizer)[0].grad = torch.ones(4, 5, device=device)
    optimizer.step()
    [copies] = optimizer._buffers.values()
    [copy_of_parameter] = map(weakref.ref, copies.values())
    del copies
    optimizer.add_param_group({"params": parameters(device, [(3,)])})
    gc.collect()
    assert copy_of_parameter() is not None


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_cuda_graph_steps_with_the_learning_rate_on_the_device(clip, device):
    first, second = pair(device, [(1000,), (64, 65)], F32, lr=1e-2)
    lr = torch.tensor(1e-2, device=device)
    first = AdamW(params_of(first), lr=lr, capturable=True, max_grad_norm=clip)

    def loss(optimizer):
        return sum((p * p).sum() for p in params_of(optimizer))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            first.zero_grad()
            loss(first).backward()
            first.step()
    torch.cuda.current_stream().wait_stream(side)
    first.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss(first).backward()
        first.step()
    for i in range(6):
        if i >= 2:
            lr.fill_(1e-2 / i)
            graph.replay()
            second.param_groups[0]["lr"] = 1e-2 / i
        second.zero_grad()
        loss(second).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params_of(second), clip)
        second.step()
    assert_agree(first, second)


@pytest.mark.gpu
def test_a_graph_of_a_group_that_is_not_capturable_is_refused(device):
    optimizer = AdamW(parameters(device, [(9,)]))
    params_of(optimizer)[0].grad = torch.ones(9, device=device)
    optimizer.step()
    with pytest.raises(RuntimeError, match="capturable=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device(device):
    optimizer = AdamW(parameters(device, [(100_000,)] * 20), max_grad_norm=1.0)
    for i in range(4):
        for p in params_of(optimizer):
            p.grad = torch.randn_like(p)
        optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)
        torch.cuda.set_sync_debug_mode("error" if i else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_on_a_side_stream(device):
    first, second = pair(device, theirs=F32)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        steps(first, second)
    torch.cuda.synchronize()
    assert_agree(first, second)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_groups_on_two_gpus_with_learning_rates_there(device):
    places = [torch.device("cuda", i) for i in range(2)]
    groups = [
        {"params": parameters(d, [(500,)]), "lr": torch.tensor(0.1 / (i + 1), device=d)} for i, d in enumerate(places)
    ]
    optimizer = AdamW(groups, max_grad_norm=0.5)
    reference = torch.optim.AdamW([{"params": parameters(device, [(500,)]), "lr": 0.1 / (i + 1)} for i in range(2)])
    for seed in range(3):
        torch.manual_seed(seed)
        for p, q in zip(params_of(optimizer), params_of(reference), strict=True):
            q.grad = torch.randn(500, device=device)
            p.grad = q.grad.to(p.device)
        nn.utils.clip_grad_norm_(params_of(reference), 0.5)
        optimizer.step()
        reference.step()
    for p, q in zip(params_of(optimizer), params_of(reference), strict=True):
        torch.testing.assert_close(p.to(device), q, rtol=0, atol=LARGEST)
