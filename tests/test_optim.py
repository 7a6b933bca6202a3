"""`rooftile.optim.AdamW` against torch.optim.AdamW over several steps: values, dtypes, layouts, clipping, refusals."""

import math
import weakref

import pytest
import torch
from helpers import BF16, nightly_but
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import F32, LARGEST, assert_agree, largest_difference, pair, parameters, params_of, steps
from torch import nn

import rooftile
from rooftile import runtime
from rooftile.ops.adamw import parts
from rooftile.optim import AdamW


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3},
        {"amsgrad": True},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"amsgrad": True, "maximize": True, "capturable": False, "lr": 3e-2},
        {"betas": (0.0, 0.0)},
        {"foreach": True},
        {"lr": 0.0},
    ],
    ids=str,
)
def test_several_steps_are_pytorchs(options, device):
    first, second = pair(device, **options)
    steps(first, second)
    assert_agree(first, second)


@pytest.mark.parametrize("size", [1024, 4096, pytest.param(10_000_000, id="10M", marks=pytest.mark.nightly)])
def test_weights_and_moments_are_within_1e5_of_pytorchs(size, device, capsys):
    """Of torch.optim.AdamW in float64 and in float32, after five steps (two at 10M, in blocks of 2^20 where the
    interpreter runs: its cost is by operation, not by element)."""
    n = 5 if size < 10**6 or runtime.MODE is runtime.Mode.GPU else 2
    with pytest.MonkeyPatch.context() as patch:
        if runtime.MODE is runtime.Mode.INTERPRETER and size > 10**6:
            patch.setattr(parts, "config", lambda *key: parts.AdamWConfig(1 << 20, num_warps=4, per_sm=1))
        for theirs in (torch.float64, F32):
            first, second = pair(device, [(size,)], theirs, weight_decay=0.1)
            steps(first, second, n)
            worst = largest_difference(first, second)
            with capsys.disabled():
                found = ", ".join(f"{name} {worst[name]:.1e}" for name in ("param", "exp_avg", "exp_avg_sq"))
                print(f"\nAdamW, {size} elements, largest difference from torch in {theirs}: {found}")
            assert_agree(first, second)


@settings(max_examples=6)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    amsgrad=st.booleans(),
    clip=st.sampled_from([None, 0.1, 100.0]),
)
def test_any_shapes(shapes, amsgrad, clip):
    first, second = pair(runtime.default_device(), shapes, amsgrad=amsgrad, max_grad_norm=clip)
    steps(first, second, 2, clip)
    assert_agree(first, second)


def grouped(cls, params, **options):
    groups = [
        {"params": params[:2], "lr": 1e-1, "betas": (0.5, 0.7)},
        {"params": params[2:4], "weight_decay": 0.5, "amsgrad": True},
        {"params": params[4:], "maximize": True, "eps": 1e-2},
    ]
    return cls(groups, **options)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_groups_have_their_own_numbers(clip, device):
    first, second = (
        grouped(AdamW, parameters(device), max_grad_norm=clip),
        grouped(torch.optim.AdamW, parameters(device)),
    )
    steps(first, second, clip=clip)
    assert_agree(first, second)


def test_a_group_that_is_added_later(device):
    first, second = pair(device)
    steps(first, second, 2)
    first.add_param_group({"params": parameters(device, [(50,)], seed=9), "lr": 1e-1})
    more = [nn.Parameter(p.detach().double()) for p in parameters(device, [(50,)], seed=9)]
    second.add_param_group({"params": more, "lr": 1e-1})
    steps(first, second, 2, seed=3)
    assert_agree(first, second)


def test_learning_rates_that_change(device):
    """By a scheduler, which writes a number into the group at each step; and tensors, which are read on the device."""
    for lr in (1e-1, torch.tensor(1e-1, device=device)):
        first, second = pair(device, lr=1e-1)
        if isinstance(lr, torch.Tensor):
            first.param_groups[0]["lr"] = lr
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (first, second)]
        for seed in range(4):
            steps(first, second, 1, seed=seed)
            for schedule in schedules:
                schedule.step()
        assert_agree(first, second)


def test_a_capturable_step_is_the_same(device):
    """Outside a graph too: the learning rate and the step are then numbers on the device."""
    first, second = pair(device, lr=1e-2)
    first = AdamW(params_of(first), lr=torch.tensor(1e-2, device=device), capturable=True, max_grad_norm=0.5)
    steps(first, second, 3, 0.5)
    assert_agree(first, second)
    assert all(state["step"].device.type == device.type and state["step"] == 3 for state in first.state.values())


def test_parameters_without_a_gradient(device):
    """They keep their values, moments and steps; some have none from the start, some lose it."""
    first, second = pair(device)
    for step in range(4):
        for i, (p, q) in enumerate(zip(params_of(first), params_of(second), strict=True)):
            p.grad = None if (i + step) % 3 == 0 or i == 4 else torch.full_like(p, 0.1 * (step + 1))
            q.grad = None if p.grad is None else p.grad.double()
        first.step()
        second.step()
    assert not first.state[params_of(first)[4]]
    assert_agree(first, second)


def test_no_gradient_at_all_and_a_gradient_without_elements(device):
    first, _ = pair(device)
    before = [p.clone() for p in params_of(first)]
    first.step()
    assert all(map(torch.equal, params_of(first), before))
    empty = nn.Parameter(torch.zeros(0, device=device))
    optimizer = AdamW([empty])
    empty.grad = torch.zeros_like(empty)
    optimizer.step()
    assert float(optimizer.state[empty]["step"]) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_backward(set_to_none, device):
    """Gradients that move from step to step, and gradients that stay."""
    first, second = pair(device, [(40,), (6, 7)], F32)
    for step in range(3):
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none=set_to_none)
            sum(((step + 1) * p).square().sum() for p in params_of(optimizer)).backward()
            kept = torch.empty(40, device=device)  # so that a new gradient is elsewhere
            optimizer.step()
            del kept
    assert_agree(first, second)


def test_gradients_are_not_kept(device):
    """What `zero_grad` gives up is free, also after a step that has made the tables."""
    optimizer = AdamW(parameters(device, [(40,), (6, 7)]), max_grad_norm=1.0)
    for _ in range(2):
        for p in params_of(optimizer):
            p.grad = torch.ones_like(p)
        kept = [weakref.ref(p.grad.untyped_storage()) for p in params_of(optimizer)]
        optimizer.step()
        optimizer.zero_grad()
        assert [ref() for ref in kept] == [None, None]


def test_a_closure_is_called_with_gradients(device):
    optimizer = AdamW(parameters(device, [(8,)]), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = params_of(optimizer)[0].square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure).item() < first.item()


def test_autograd_learns_of_the_write(device):
    p = nn.Parameter(torch.ones(4, device=device))
    optimizer = AdamW([p])
    loss = p.square().sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Dtypes


@pytest.mark.parametrize("state_dtype", [None, F32])
@pytest.mark.parametrize("grad", [BF16, F32])
def test_bf16_parameters(grad, state_dtype, device):
    """Each step is that of float32 from the same values, rounded once."""
    [p] = parameters(device, [(500,)], BF16)
    if grad is not BF16:
        p.grad_dtype = grad
    optimizer = AdamW([p], lr=1e-2, state_dtype=state_dtype)
    exact = nn.Parameter(p.detach().float())
    reference = torch.optim.AdamW([exact], lr=1e-2)
    for seed in range(3):
        torch.manual_seed(seed)
        p.grad = torch.randn(500, device=device).to(grad)
        exact.grad = p.grad.float()
        optimizer.step()
        reference.step()
        state = optimizer.state[p]
        assert state["exp_avg"].dtype == (state_dtype or BF16)
        for mine, theirs in [(p, exact), *((state[n], reference.state[exact][n]) for n in ("exp_avg", "exp_avg_sq"))]:
            eps = torch.finfo(mine.dtype).eps
            torch.testing.assert_close(mine.detach().float(), theirs.detach(), rtol=eps, atol=1e-6)
            theirs.data.copy_(mine.detach())  # rounding is not to add up


def test_master_weights_are_those_of_a_float32_run(device):
    shapes = [(300,), (17, 3)]
    low, high = parameters(device, shapes, BF16), []
    high = [nn.Parameter(p.detach().float()) for p in low]
    first = AdamW(low, lr=1e-4, master_weights=True, state_dtype=F32)
    second = torch.optim.AdamW(high, lr=1e-4)
    steps(first, second, 0)
    numbers = torch.Generator(device).manual_seed(2)
    for _ in range(6):
        for p, q in zip(low, high, strict=True):
            p.grad = torch.randn(p.shape, generator=numbers, device=device).to(BF16)
            q.grad = p.grad.float()
        first.step()
        second.step()
    for p, q in zip(low, high, strict=True):
        master = first.state[p]["master_param"]
        torch.testing.assert_close(master, q.detach(), rtol=0, atol=LARGEST)
        assert torch.equal(p, master.to(BF16))


def test_stochastic_rounding_follows_steps_too_small_for_bf16(device):
    """A thousandth of the distance between neighbours a step: rounded to nearest, nothing would ever move."""
    p = nn.Parameter(torch.ones(1 << 14, dtype=BF16, device=device))
    optimizer = AdamW([p], lr=2.0**-12, weight_decay=0.0, stochastic_rounding=True, state_dtype=F32, seed=7)
    for _ in range(8):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(p.double().mean()) == pytest.approx(1 - 8 * 2.0**-12, abs=1e-4)
    again = nn.Parameter(torch.ones(1 << 14, dtype=BF16, device=device))
    other = AdamW([again], lr=2.0**-12, weight_decay=0.0, stochastic_rounding=True, state_dtype=F32, seed=7)
    for _ in range(8):
        again.grad = torch.ones_like(again)
        other.step()
    assert torch.equal(p, again)


# Layouts


@pytest.mark.parametrize("how", ["transposed", "channels last", "rows apart", "gradient transposed", "off alignment"])
def test_layouts(how, device):
    def build():
        p = parameters(device, [(2, 3, 4, 5)])[0].detach()
        if how == "transposed":
            p = p.transpose(0, 3).contiguous().transpose(0, 3)
        if how == "channels last":
            p = p.contiguous(memory_format=torch.channels_last)
        if how == "rows apart":
            p = torch.zeros(2, 3, 4, 9, device=device)[..., 2:7].copy_(p)
        if how == "off alignment":
            p = torch.zeros(121, device=device)[1:].copy_(p.flatten()).view(2, 3, 4, 5)
        return nn.Parameter(p)

    first, second = AdamW([build()], lr=1e-2), torch.optim.AdamW([build()], lr=1e-2)
    for seed in range(3):
        for o in (first, second):
            torch.manual_seed(seed)
            [p] = params_of(o)
            g = torch.randn(p.shape, device=device)
            p.grad = g.transpose(0, 1).contiguous().transpose(0, 1) if how == "gradient transposed" else g
            o.step()
    assert_agree(first, second)
    assert params_of(first)[0].stride() == params_of(second)[0].stride()


# Clipping


@pytest.mark.parametrize("clip", nightly_but((1e-3, 1e6), (1e-3, 1.0, 1e6, math.inf)))
def test_clipping_is_that_of_clip_grad_norm(clip, device):
    first, second = pair(device, max_grad_norm=clip, eps=1e-2)  # a large eps, so that the gradients' scale shows
    steps(first, second, 3, clip)
    assert_agree(first, second)
    norm = nn.utils.get_total_norm([p.grad for p in params_of(first)])
    torch.testing.assert_close(first.grad_norm, norm)


def test_a_clip_that_is_set_between_steps(device):
    first, second = pair(device)
    for clip in (None, 0.1, 5.0, None):
        first.max_grad_norm = clip
        steps(first, second, 1, clip)
        assert (first.grad_norm is None) == (clip is None)
    assert_agree(first, second)


def poisoned(value, device, **options):
    first, second = pair(device, theirs=F32, max_grad_norm=1.0, **options)
    steps(first, second, 1, 1.0)
    for o in (first, second):
        for p in params_of(o):
            p.grad = torch.ones_like(p)
        params_of(o)[0].grad[5] = value
    return first, second


@pytest.mark.parametrize("value", nightly_but((math.nan,), (math.inf, -math.inf, math.nan)))
def test_a_norm_that_is_not_finite_propagates_as_in_pytorch(value, device):
    first, second = poisoned(value, device)
    nn.utils.clip_grad_norm_(params_of(second), 1.0)
    first.step()
    second.step()
    for p, q in zip(params_of(first), params_of(second), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=LARGEST, equal_nan=True)
    assert torch.isnan(params_of(first)[0]).any()


@pytest.mark.parametrize("value", nightly_but((math.inf,), (math.inf, math.nan)))
@pytest.mark.parametrize("nonfinite", ["skip", "error"])
def test_a_norm_that_is_not_finite_changes_nothing(nonfinite, value, device):
    first, _ = poisoned(value, device, nonfinite=nonfinite)
    before = [t.clone() for p in params_of(first) for t in (p, *first.state[p].values())]
    if nonfinite == "error":
        with pytest.raises(RuntimeError, match="expected a finite number"):
            first.step()
    else:
        first.step()
    assert all(map(torch.equal, (t for p in params_of(first) for t in (p, *first.state[p].values())), before))
    params_of(first)[0].grad[5] = 1.0
    first.step()
    assert float(first.state[params_of(first)[0]]["step"]) == 2


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr is -1.0, expected a finite number of 0 or more"),
        ({"lr": torch.zeros(2)}, ValueError, r"lr has shape \(2,\), expected one number"),
        ({"lr": torch.tensor(0.1, dtype=torch.float64)}, TypeError, "lr has dtype torch.float64"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] is 1.0, expected at least 0 and below 1"),
        ({"betas": (torch.tensor(0.9), 0.99)}, TypeError, "expected two numbers"),
        ({"eps": -1e-8}, ValueError, "eps is -1e-08"),
        ({"weight_decay": math.nan}, ValueError, "weight_decay is nan"),
        ({"differentiable": True}, ValueError, "differentiable is True, expected False"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm is 0.0, expected more than 0"),
        ({"nonfinite": "stop", "max_grad_norm": 1.0}, ValueError, "nonfinite is 'stop', expected one of propagate"),
        ({"nonfinite": "skip"}, ValueError, "nonfinite is 'skip' without max_grad_norm"),
        ({"state_dtype": torch.float64}, TypeError, "state_dtype is torch.float64, expected torch.float32"),
        ({"seed": 2**31}, ValueError, r"expected 0 to 2\^31 - 1"),
        ({"seed": 1.5}, TypeError, "seed is a float, expected an int"),
        ({"seed": "a"}, TypeError, "seed is a str, expected an int"),
        ({"lr": torch.tensor(-1.0)}, ValueError, "lr is -1.0, expected a finite number of 0 or more"),
        ({"lr": "1"}, TypeError, "lr is a str, expected a number or a tensor of one"),
        ({"weight_decay": torch.tensor(-1.0)}, TypeError, "weight_decay is a Tensor, expected a number"),
        ({"eps": None}, TypeError, "eps is None, expected a number"),
        ({"betas": None}, TypeError, "betas is None, expected two numbers"),
        ({"max_grad_norm": "a"}, TypeError, "max_grad_norm is a str, expected a number"),
        ({"max_grad_norm": True}, TypeError, "max_grad_norm is a bool, expected a number"),
        ({"lr": True}, TypeError, "lr is a bool, expected a number or a tensor of one"),
        ({"master_weights": "yes"}, TypeError, "master_weights is a str, expected True or False"),
        ({"amsgrad": "no"}, TypeError, "amsgrad is a str, expected True or False"),
        ({"maximize": None}, TypeError, "maximize is None, expected True or False"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, error, message, device):
    with pytest.raises(error, match=f"^AdamW: .*{message}"):
        AdamW(parameters(device, [(2,)]), **options)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.float8_e4m3fn])
def test_dtypes_that_are_refused(dtype, device):
    with pytest.raises(TypeError, match=f"has dtype {dtype}, expected float32, float16 or bfloat16"):
        AdamW([nn.Parameter(torch.zeros(3, dtype=dtype, device=device), requires_grad=dtype.itemsize > 1)])


def test_sparse_gradients_are_refused(device):
    p = nn.Parameter(torch.zeros(5, 2, device=device))
    p.grad = torch.ones(5, 2, device=device).to_sparse()
    with pytest.raises(ValueError, match="parameter 0 has a sparse gradient, expected a dense one"):
        AdamW([p]).step()


def test_groups_that_are_refused(device):
    optimizer = AdamW(parameters(device, [(2,)]))
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.add_param_group({"params": parameters(device, [(3,)]), "lr": -1})
    with pytest.raises(ValueError, match="AdamW: a group has master_weights, which is an option of all groups"):
        optimizer.add_param_group({"params": parameters(device, [(3,)]), "master_weights": True})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="AdamW: max_norm is no argument; did you mean max_grad_norm"):
        AdamW(parameters(device, [(2,)]), max_norm=1.0)
    assert rooftile.optim.AdamW is AdamW
