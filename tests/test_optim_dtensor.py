"""`rooftile.optim.AdamW` over sharded parameters."""

import pytest
import torch
from helpers import on_two_ranks
from optimizers import LARGEST, parameters, params_of
from torch import nn

from rooftile import runtime
from rooftile.optim import AdamW


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    runtime.MODE is not runtime.Mode.INTERPRETER,
    reason="the mesh is gloo's, of CPUs; test_two_gpus.py trains with FSDP on GPUs",
)
def test_dtensor_parameters(mesh):
    """Sharded, replicated and plain ones in one list; checkpoints hold DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    cpu = torch.device("cpu")
    layouts = [(Shard(0), Replicate()), (Shard(0), Shard(1)), None, (Replicate(), Replicate())]
    shapes = [(8, 6), (4, 10), (7,), (5,)]
    own = [
        nn.Parameter(p.detach() if how is None else distribute_tensor(p.detach(), mesh, how))
        for p, how in zip(parameters(cpu, shapes), layouts, strict=True)
    ]
    first, second = AdamW(own, max_grad_norm=0.5), torch.optim.AdamW(parameters(cpu, shapes))
    for seed in range(3):
        torch.manual_seed(seed)
        for p, q, how in zip(own, params_of(second), layouts, strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = q.grad.clone() if how is None else distribute_tensor(q.grad.clone(), mesh, how)
        norm = nn.utils.clip_grad_norm_(params_of(second), 0.5)
        first.step()
        second.step()
        torch.testing.assert_close(first.grad_norm, norm)
    for p, q in zip(own, params_of(second), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(whole.detach(), q.detach(), rtol=0, atol=LARGEST)
        assert isinstance(first.state[p]["exp_avg"], DTensor) == isinstance(p, DTensor)
    again = AdamW(own, max_grad_norm=0.5)
    again.load_state_dict(first.state_dict())
    again.step()
    assert float(again.state[own[0]]["step"]) == 4


@pytest.mark.skipif(
    runtime.MODE is not runtime.Mode.INTERPRETER,
    reason="the mesh is gloo's, of CPUs; test_two_gpus.py trains with FSDP on GPUs",
)
def test_a_gradient_of_other_placements_is_redistributed(mesh):
    """Tensor parallelism leaves the gradient of a replicated weight as a partial sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    [q] = parameters(torch.device("cpu"), [(6,)])
    p = nn.Parameter(distribute_tensor(q.detach().clone(), mesh, (Replicate(), Replicate())))
    first, second = AdamW([p], max_grad_norm=0.5), torch.optim.AdamW([q])
    for _ in range(2):
        q.grad = torch.randn(6)
        p.grad = DTensor.from_local(q.grad.clone(), mesh, (Replicate(), Partial()))
        nn.utils.clip_grad_norm_(q, 0.5)
        first.step()
        second.step()
    torch.testing.assert_close(p.full_tensor().detach(), q.detach(), rtol=0, atol=LARGEST)


def _two_ranks(rank, path, results):
    """One of two processes: half of each parameter, the whole norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    layouts = [[Shard(0)], [Replicate()], [Shard(0)]]
    shapes = [(5, 6), (4,), (1, 3)]  # the last has nothing on rank 1
    own = [
        nn.Parameter(distribute_tensor(p.detach(), mesh, how))
        for p, how in zip(parameters(torch.device("cpu"), shapes), layouts, strict=True)
    ]
    optimizer = AdamW(own, lr=1e-2, max_grad_norm=0.5)
    for seed in range(2):
        torch.manual_seed(seed)
        for p, how in zip(own, layouts, strict=True):
            p.grad = distribute_tensor(torch.randn(p.shape), mesh, how)
        optimizer.step()
    whole = [p.full_tensor().detach() for p in own]
    if rank == 0:
        torch.save((whole, optimizer.grad_norm), results)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    runtime.MODE is not runtime.Mode.INTERPRETER,
    reason="the mesh is gloo's, of CPUs; test_two_gpus.py trains with FSDP on GPUs",
)
def test_two_ranks_are_one(tmp_path):
    on_two_ranks(_two_ranks, tmp_path, tmp_path / "results")
    whole, norm = torch.load(tmp_path / "results")
    plain = parameters(torch.device("cpu"), [(5, 6), (4,), (1, 3)])
    second = torch.optim.AdamW(plain, lr=1e-2)
    for seed in range(2):
        torch.manual_seed(seed)
        for p in plain:
            p.grad = torch.randn(p.shape)
        expected = nn.utils.clip_grad_norm_(plain, 0.5)
        second.step()
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(whole, plain, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=LARGEST)
