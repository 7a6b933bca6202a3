"""`rooftile.optim.AdamW`: its state, its checkpoints, and parameters whose memory is shared or moved."""

import copy
import io
import re

import pytest
import torch
from helpers import BF16
from optimizers import F32, SHAPES, assert_agree, pair, parameters, params_of, steps
from torch import nn

from rooftile.optim import AdamW


@pytest.mark.each_once
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_pass_between_ours_and_pytorchs(ours_first, amsgrad, device):
    """Written by one after two steps, read by the other: the run goes on as if nothing had been."""
    first, second = pair(device, theirs=F32, amsgrad=amsgrad, lr=1e-2)
    steps(first, second, 2)
    old, new = (first, second) if ours_first else (second, first)
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    fresh = type(new)([nn.Parameter(p.detach().clone()) for p in params_of(old)])
    fresh.load_state_dict(torch.load(file))
    steps(*((old, fresh) if ours_first else (fresh, old)), 2, seed=5)
    assert_agree(*((old, fresh) if ours_first else (fresh, old)))


def test_the_state_dict_has_pytorchs_keys_and_kinds(device):
    first, second = pair(device, theirs=F32, amsgrad=True)
    steps(first, second, 1)
    ours, theirs = first.state_dict(), second.state_dict()
    assert [list(g) for g in ours["param_groups"]] == [list(g) for g in theirs["param_groups"]]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for i, state in theirs["state"].items():
        mine = ours["state"][i]
        assert list(mine) == list(state)
        assert all(
            (mine[n].shape, mine[n].dtype, mine[n].device) == (t.shape, t.dtype, t.device) for n, t in state.items()
        )


def test_checkpoints_keep_the_dtypes_of_moments_and_master_weights(device):
    options = {"lr": 1e-3, "state_dtype": F32, "master_weights": True}
    first = AdamW(parameters(device, dtype=BF16), **options)
    other = AdamW(parameters(device, dtype=BF16), **options)
    steps(first, other, 2)
    again = AdamW([nn.Parameter(p.detach().clone()) for p in params_of(first)], **options)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(first, again, 2, seed=8)
    for p, q in zip(params_of(first), params_of(again), strict=True):
        assert torch.equal(p, q)
        assert again.state[q]["master_param"].dtype == again.state[q]["exp_avg"].dtype == F32
        assert torch.equal(first.state[p]["master_param"], again.state[q]["master_param"])


def test_a_master_copy_that_pytorch_has_rounded_is_made_anew(device):
    """torch.optim.AdamW keeps `master_param` in the parameter's dtype, and does not update it."""
    first = AdamW(parameters(device, [(9,)], BF16), master_weights=True)
    plain = torch.optim.AdamW(parameters(device, [(9,)], BF16))
    steps(first, plain, 1)
    plain.load_state_dict(first.state_dict())
    again = AdamW([nn.Parameter(torch.full((9,), 3.0, dtype=BF16, device=device))], master_weights=True, lr=0.0)
    again.load_state_dict(plain.state_dict())
    [p] = params_of(again)
    p.grad = torch.ones_like(p)
    again.step()
    assert (p == 3).all()


def test_copies_and_pickles_go_on(device):
    first, second = pair(device, theirs=F32, max_grad_norm=0.5)
    steps(first, second, 2, 0.5)
    again = copy.deepcopy(first)
    assert (again.max_grad_norm, again.nonfinite) == (0.5, "propagate")
    steps(again, second, 1, 0.5, seed=4)
    assert_agree(again, second)


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize(
    ("shape", "part"),
    [((10,), lambda t: t[:4]), ((3, 5), torch.t), ((6, 5), lambda t: t[:, :2])],
    ids=["first", "transposed", "columns"],
)
def test_a_part_of_the_same_memory_is_not_taken_for_all_of_it(shape, part, stale, device):
    """`p.data = p.data[:4]` keeps the address. The moments, and a gradient of before, have the shape of before."""
    optimizer, _ = pair(device, [shape])
    steps(optimizer, _, 2)
    [p] = params_of(optimizer)
    old, p.data = p.data, part(p.data)
    before, what = old.clone(), "the gradient"
    if not stale:
        p.grad, what = torch.ones(p.shape, device=device), "exp_avg"
    with pytest.raises(ValueError, match=rf"AdamW: {what} of parameter 0 has shape {re.escape(str(shape))}, expected"):
        optimizer.step()
    assert torch.equal(old, before)


def test_a_square_that_is_transposed_in_its_memory(device):
    """Elements go with the moments and gradients of their index, as in PyTorch."""
    first, second = pair(device, [(4, 4)], F32)
    steps(first, second, 2)
    for o in (first, second):
        [p] = params_of(o)
        p.data = p.data.t()
    steps(first, second, 2, seed=3)
    assert_agree(first, second)


def test_another_parameter_over_the_same_memory_has_state_of_its_own(device):
    first, second = pair(device, [(10,)], F32)
    steps(first, second, 2)
    for o in (first, second):
        [old] = params_of(o)
        o.param_groups[0]["params"] = [nn.Parameter(old.data)]
    steps(first, second, 1, seed=3)
    assert set(first.state[params_of(first)[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert_agree(first, second)


def test_a_checkpoint_whose_steps_have_a_dimension(device):
    first, second = pair(device, SHAPES[:2], F32)
    steps(first, second, 2)
    saved = first.state_dict()
    saved["state"][0]["step"] = saved["state"][0]["step"].view(1)
    first.load_state_dict(saved)
    assert [s["step"].shape for s in first.state_dict()["state"].values()] == [(), ()]
    steps(first, second, 1, seed=3)
    assert_agree(first, second)
    saved["state"][0]["step"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"AdamW: a step has shape \(2,\), expected one number"):
        first.load_state_dict(saved)


@pytest.mark.parametrize("how", ["data", "replaced", "cleared"])
def test_state_and_parameters_that_others_move(how, device):
    """Offloading writes `t.data` or the state's entries; loading may write `p.data`."""
    first, second = pair(device, theirs=F32)
    steps(first, second, 2)
    for o in (first, second):
        if how == "cleared":
            o.state.clear()
        for p in params_of(o):
            p.data = p.data.clone()
            for name, t in o.state.get(p, {}).items():
                if how == "data":
                    t.data = t.data.clone()
                else:
                    o.state[p][name] = t.clone()
    steps(first, second, 2, seed=6)
    assert_agree(first, second)
