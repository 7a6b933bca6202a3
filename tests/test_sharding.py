"""Ops over DTensor: two processes over gloo have the results and gradients of one process."""

import gc
from itertools import chain

import pytest
import torch
from helpers import interpreted

import rooftile

pytestmark = interpreted
F32 = torch.float32


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def integers(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


X, HEADS = (4, 3, 16), (2, 4, 3, 8)
TABLES = tuple(torch.cat([f, f], -1) for f in (numbers(3, 4).cos(), numbers(3, 4).sin()))
LATER = torch.tensor([[[True, False, True]]])
MEAN = {"ignore_index": 1, "z_loss": 0.01, "softcap": 3.0}
# The function, its tensors, and what they are: "r" holds rows and gets a gradient, "R" gets none; "w" is a parameter,
# and "W" is replicated too and gets no gradient.
CASES = {
    "rms_norm": (rooftile.rms_norm, [numbers(*X), numbers(16)], "rw"),
    "add_rms_norm": (rooftile.add_rms_norm, [numbers(*X), numbers(*X, seed=1), numbers(16)], "rrw"),
    "layer_norm": (rooftile.layer_norm, [numbers(*X), numbers(16), numbers(16, seed=1)], "rww"),
    "softmax": (rooftile.softmax, [numbers(*X)], "r"),
    "softmax causal": (lambda x: rooftile.softmax(x, causal=True), [numbers(*X)], "r"),
    "softmax masked": (lambda x, mask: rooftile.softmax(x, mask=mask), [numbers(4, 3, 3), LATER], "rW"),
    "silu_mul": (rooftile.silu_mul, [numbers(*X), numbers(*X, seed=1)], "rr"),
    "gelu_mul_packed": (rooftile.gelu_mul_packed, [numbers(*X)], "r"),
    "bias_gelu": (rooftile.bias_gelu, [numbers(*X), numbers(16)], "rw"),
    "embedding": (rooftile.embedding, [integers(7, 4, 5), numbers(7, 16)], "Rw"),
    "rope": (rooftile.rope, [numbers(*HEADS), numbers(2, 2, 3, 8), *TABLES], "rrWW"),
    "qk_norm_rope": (
        rooftile.qk_norm_rope,
        [numbers(*HEADS), numbers(2, 2, 3, 8), numbers(8), numbers(8, seed=1), *TABLES],
        "rrwwWW",
    ),
    "cross_entropy": (lambda x, y: rooftile.cross_entropy(x, y, **MEAN), [numbers(4, 3, 7), integers(7, 4, 3)], "rR"),
    "cross_entropy weighted": (
        lambda x, y, w, t: rooftile.cross_entropy(x, y, weight=w, token_weights=t, label_smoothing=0.1),
        [numbers(4, 3, 7), integers(7, 4, 3), numbers(7).abs(), numbers(4, 3).abs()],
        "rRWR",
    ),
    "linear_cross_entropy": (
        lambda x, w, y, b: rooftile.linear_cross_entropy(x, w, y, b, chunk_bytes=128, **MEAN),
        [numbers(4, 3, 16), numbers(7, 16), integers(7, 4, 3), numbers(7)],
        "rrRr",
    ),
    "linear_cross_entropy over tokens": (
        lambda x, w, y: rooftile.linear_cross_entropy(x, w, y, reduction="sum"),
        [numbers(4, 3, 16), numbers(7, 16), integers(7, 4, 3)],
        "rwR",
    ),
    "linear_cross_entropy of each token": (
        lambda x, w, y: rooftile.linear_cross_entropy(x, w, y, reduction="none"),
        [numbers(4, 3, 16), numbers(7, 16), integers(7, 4, 3)],
        "wrR",
    ),
    "cross_entropy of each token": (
        lambda x, y: rooftile.cross_entropy(x, y, reduction="none"),
        [numbers(4, 3, 7), integers(7, 4, 3)],
        "rR",
    ),
}


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def results(function, tensors, kinds):
    """The outputs, and the gradients of a fixed combination of them."""
    tensors = [t.detach().requires_grad_(kind.islower()) for t, kind in zip(tensors, kinds, strict=True)]
    outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((whole(y) * numbers(*y.shape, seed=7)).sum() for y in outputs)
    loss.backward()
    return [whole(y).detach() for y in outputs], [whole(t.grad) for t in tensors if t.requires_grad]


def sharded(mesh, tensors, kinds, dim):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return [
        distribute_tensor(t, mesh, [Shard(dim) if kind in "rR" and dim < t.dim() else Replicate()])
        for t, kind in zip(tensors, kinds, strict=True)
    ]


def _rank(rank, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, (function, tensors, kinds) in CASES.items():
        for dim in range(tensors[0].dim()):
            given = sharded(mesh, tensors, kinds, dim)
            over = dim == tensors[0].dim() - 1
            if over and name == "cross_entropy weighted":
                with pytest.raises(ValueError, match="classes over ranks, expected no weight or label_smoothing"):
                    function(*given)
                continue
            found[name, dim] = results(function, given, kinds)
    x, weight = sharded(mesh, [numbers(5, 16), numbers(16)], "rw", 0)
    weight.requires_grad_()
    y = rooftile.rms_norm(x, weight)
    y.sum().backward()
    assert list(y.placements) == [Shard(0)]
    assert tuple(y.shape) == (5, 16)  # three rows on one rank, two on the other
    assert list(weight.grad.placements) == [Partial()]
    with pytest.raises(TypeError, match="rms_norm: weight is a plain tensor, expected a DTensor"):
        rooftile.rms_norm(x, numbers(16).requires_grad_())
    logits, target = sharded(mesh, [numbers(4, 7), integers(7, 4)], "rw", 1)
    assert list(rooftile.cross_entropy(logits, target).placements) == [Replicate()]
    unknown = torch.tensor([7, 1, -100, -1])
    lost = rooftile.cross_entropy(logits, unknown, reduction="none").full_tensor()
    assert lost.isnan().tolist() == [True, False, False, True]
    assert rooftile.cross_entropy(logits, torch.full((4,), -100)).full_tensor() == 0
    with pytest.raises(ValueError, match="logits has 1 classes over 2 ranks, expected some on each"):
        rooftile.cross_entropy(*sharded(mesh, [numbers(4, 1), integers(1, 4)], "rw", 1))
    head, hidden, target = numbers(6, 16), numbers(4, 16), integers(6, 4)
    (head,) = sharded(mesh, [head], "r", 0)
    with pytest.raises(TypeError, match="hidden or weight is a plain tensor, expected both to be DTensor or neither"):
        rooftile.linear_cross_entropy(hidden, head, target)
    (hidden,) = sharded(mesh, [hidden], "w", 0)
    with pytest.raises(ValueError, match="expected no return_stats, class_weight, label_smoothing or valid_rows"):
        rooftile.linear_cross_entropy(hidden, head, target, label_smoothing=0.1)
    if rank == 0:
        torch.save(found, f"{path}/results")
    gc.collect()
    torch.distributed.destroy_process_group()


def test_two_ranks_have_the_results_of_one(tmp_path):
    torch.multiprocessing.spawn(_rank, (tmp_path,), nprocs=2)
    expected = {name: results(*case) for name, case in CASES.items()}
    for (name, dim), found in torch.load(tmp_path / "results").items():
        for ours, theirs in zip(chain(*found), chain(*expected[name]), strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).norm() <= 3e-6 * theirs.norm(), (name, dim)
