"""embedding: ids out of the table, shapes and strides of ids, errors."""

import pytest
import torch
from helpers import BF16

from rooftile.ops import embedding as module
from rooftile.ops.embedding import embedding


def table(rows, cols, device, dtype=torch.float32):
    return torch.randn(rows, cols, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_shape_and_strides(dtype, device):
    weight = table(9, 20, device, BF16)
    ids = torch.randint(9, (3, 4, 2), device=device).to(dtype)
    for given in (ids, ids.permute(2, 0, 1), ids[0, :, 1], ids[1, 2, 0]):
        y = embedding(given, weight)
        assert torch.equal(y, weight[given.long()])
        assert y.is_contiguous()


def test_a_kernel_that_was_launched_for_one_token_serves_any_number(device):
    weight = table(7, 96, device)
    for n in (1, 16, 3, 1):
        ids = torch.arange(n, device=device) % 7
        assert torch.equal(embedding(ids, weight), weight[ids])


def test_the_scale_is_multiplied_in_float32_and_rounded_once(device):
    weight = table(5, 33, device, torch.float16)
    ids = torch.tensor([4, 0, 4], device=device)
    assert torch.equal(embedding(ids, weight, scale=0.3), (weight[ids].float() * 0.3).half())


def test_ids_that_the_device_alone_knows_give_nan_and_read_nothing_outside(device, monkeypatch):
    """As the kernel sees them: here without the look that is taken at what is on the CPU."""
    monkeypatch.setattr(module, "_check_values", lambda ids, n_rows: None)
    memory = torch.full((8, 16), torch.inf, device=device)
    weight = memory[2:6]
    weight.copy_(table(4, 16, device))
    ids = torch.tensor([3, -1, 4, 2**31 - 1, 0], dtype=torch.int32, device=device)
    y = embedding(ids, weight)
    assert torch.equal(y[[0, 4]], weight[[3, 0]])
    assert y[1:4].isnan().all()
    wide = torch.tensor([2**40, -(2**40), 1], device=device)
    assert embedding(wide, weight).isnan().sum() == 32


@pytest.mark.parametrize(("ids", "found"), [([0, 4], 4), ([-2, 1], -2), ([-1, 9], -1)])
def test_ids_on_the_cpu_are_looked_at(ids, found):
    with pytest.raises(ValueError, match=f"embedding: ids holds {found}, expected 0 to 3, the rows of weight"):
        module._check_values(torch.tensor(ids), 4)


def test_errors(device):
    weight, ids = table(4, 8, device), torch.tensor([1], device=device)
    wrong = [
        (([1, 2, 3], weight), {}, TypeError, "ids is a list, expected a tensor"),
        ((ids, weight.tolist()), {}, TypeError, "weight is a list, expected a tensor"),
        ((ids.float(), weight), {}, TypeError, "ids has dtype torch.float32, expected int32 or int64"),
        ((ids, weight.double()), {}, TypeError, "weight has dtype torch.float64, expected"),
        ((ids, weight[0]), {}, ValueError, r"weight has shape \(8,\), expected two dimensions \(V, H\)"),
        ((ids, weight), {"scale": float("inf")}, ValueError, "scale is inf, expected a finite number"),
        (
            (ids, weight.clone().requires_grad_()),
            {},
            ValueError,
            "weight requires grad, but embedding has no",
        ),
    ]
    for args, options, kind, message in wrong:
        with pytest.raises(kind, match=f"embedding: {message}"):
            embedding(*args, **options)
    with torch.no_grad():
        assert torch.equal(embedding(ids, weight.clone().requires_grad_()), weight[ids])
