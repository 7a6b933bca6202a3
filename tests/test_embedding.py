"""embedding: ids out of the table, shapes and strides of ids, the gradient of repeated ids, errors."""

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
        ((ids, weight), {"padding_idx": 4}, ValueError, "padding_idx is 4, expected None or 0 to 3, a row of weight"),
        ((ids, weight), {"padding_idx": -1}, ValueError, "padding_idx is -1, expected None or 0 to 3"),
        ((ids, weight), {"padding_idx": 1.0}, TypeError, "padding_idx is a float, expected an int or None"),
        ((ids, weight), {"padding_idx": True}, TypeError, "padding_idx is a bool, expected an int or None"),
    ]
    for args, options, kind, message in wrong:
        with pytest.raises(kind, match=f"embedding: {message}"):
            embedding(*args, **options)


def gradient(ids, weight, dy, **options):
    weight = weight.detach().requires_grad_()
    embedding(ids, weight, **options).backward(dy)
    return weight.grad


def expected_gradient(ids, weight, dy, scale=1.0, padding_idx=None):
    dweight = torch.zeros(weight.shape, dtype=torch.float64, device=weight.device)
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1]).double()
    kept = (ids >= 0) & (ids < weight.shape[0]) & (ids != (-1 if padding_idx is None else padding_idx))
    return dweight.index_add_(0, ids[kept].long(), dy[kept] * scale)


def runs(*lengths):
    """Token r, as often as the length says, for each r, in a shuffled order."""
    ids = torch.cat([torch.full((n,), r) for r, n in enumerate(lengths)])
    return ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(0))]


# A run is split where it crosses a multiple of the piece, 8 places under the interpreter and 64 on a GPU.
@pytest.mark.parametrize(
    "lengths",
    [(8, 8), (7, 1, 9), (0, 3, 40, 0, 5), (1, 64, 64, 1), (9, 0, 8, 15), (200,), (5, 300, 2)],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_the_gradient_of_runs_of_any_length(lengths, device):
    ids = runs(*lengths).to(device)
    weight = table(len(lengths) + 20, 12, device)
    dy = torch.randn(ids.numel(), 12, device=device)
    found = gradient(ids, weight, dy)
    torch.testing.assert_close(found.double(), expected_gradient(ids, weight, dy), rtol=1e-5, atol=1e-5)
    assert not found[len(lengths) :].any()


def test_a_gradient_is_summed_in_float32_and_rounded_once(device):
    """In bfloat16 a sum of ones would stay at 256."""
    ids = torch.full((300,), 1, device=device)
    found = gradient(ids, table(3, 8, device, BF16), torch.ones(300, 8, device=device, dtype=BF16), scale=0.5)
    assert torch.equal(found[1], torch.full((8,), 150.0, device=device, dtype=BF16))


def test_a_gradient_of_a_second_run_is_bit_identical(device):
    ids = runs(30, 1, 70, 2).to(device)
    weight, dy = table(6, 40, device), torch.randn(ids.numel(), 40, device=device)
    assert torch.equal(gradient(ids, weight, dy), gradient(ids, weight, dy))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_and_unknown_ids_have_no_gradient(dtype, device, monkeypatch):
    """Neither does what their dy holds reach other rows. A whole run of padding crosses several pieces."""
    monkeypatch.setattr(module, "_check_values", lambda ids, n_rows: None)
    ids = torch.cat([runs(3, 2, 80), torch.tensor([-1, 5, 2**31 - 1] * 30)]).to(device, dtype)
    weight, dy = table(5, 8, device), torch.randn(ids.numel(), 8, device=device)
    dy[(ids == 2) | (ids < 0) | (ids >= 5)] = torch.nan
    found = gradient(ids, weight, dy, padding_idx=2)
    torch.testing.assert_close(found.double(), expected_gradient(ids, weight, dy, padding_idx=2), rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_not_finite_stays_in_its_row(device):
    ids, dy = torch.tensor([0, 1, 1, 2], device=device), torch.ones(4, 4, device=device)
    dy[1] = torch.inf
    found = gradient(ids, table(4, 4, device), dy)
    assert found[1].isinf().all()
    assert torch.equal(found[[0, 2, 3]], torch.tensor([[1.0], [1.0], [0.0]], device=device).expand(3, 4))


def test_ids_of_several_dimensions_and_a_tied_head(device):
    """The gradients of both uses of a tied weight are added."""
    ids = torch.randint(9, (2, 6), device=device).t()
    weight = table(9, 16, device)
    ours, theirs = (weight.clone().requires_grad_() for _ in range(2))
    for w, look_up in ((ours, embedding), (theirs, torch.nn.functional.embedding)):
        (look_up(ids, w) @ w.t()).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
