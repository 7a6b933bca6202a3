"""The portable backward of attention, launched by itself, against autograd through the formula in float64."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import assert_same

from rooftile import runtime
from rooftile.ops.attention import backward, ops, problem, row_sums
from rooftile.ops.attention.backward import BackwardConfig
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem, Scoring
from rooftile.reference import attention as reference

BF16 = torch.bfloat16
# Steps of 16 and 32, and blocks that no length here is a multiple of.
SMALL = BackwardConfig("portable", 16, 32, 4, 1, 32, 16, 4, 2)
# Relative errors in norm: the last rounding in float32, and those of p and ds besides in bfloat16.
TOLERANCE = {torch.float32: 3e-6, BF16: 8e-3}


def formula(q, k, v, s, **extras):
    """Attention of (B, H, T, D) and its log-sum-exp, by the whole matrix of scores."""
    options = {"scale": s.scale, "softcap": s.softcap or None, "window": (s.left, s.right)}
    return reference.naive(q, k, v, return_lse=True, **options, **extras)


def draw(q_shape, k_shape, value_dim, dtype, device, with_lse=False):
    """q, k, v, dout and dlse, of unequal sizes everywhere."""
    shapes = (q_shape, k_shape, (*k_shape[:3], value_dim), (*q_shape[:3], value_dim))
    q, k, v, dout = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return q, k, v, dout, torch.randn(q_shape[:3], device=device) if with_lse else None


def launched(q, k, v, out, lse, dout, dlse, x, s, c=SMALL, wanted=("dq", "dk", "dv")):
    """The gradients, written over NaN."""
    x = Inputs(q, k, v, s, **x)
    made = {
        name: torch.full_like(t, math.nan) if name in wanted else None
        for name, t in (("dq", q), ("dk", k), ("dv", v), ("dsinks", x.sinks))
        if t is not None
    }
    made.setdefault("dsinks", None)
    gradients = tuple(made[name] for name in ("dq", "dk", "dv", "dsinks"))
    start = ops.prepare_backward(x, out, lse, dout, dlse, gradients, config=c)
    start(q, k, v, out, lse, dout, dlse, *gradients, *x.tensors)
    return made


def whole(q, k, **tensors):
    return {**tensors, "longest_q": q.shape[2], "longest_k": k.shape[2]}


def double(t):
    return None if t is None or t.dtype == torch.bool else t.double()


def close(found, expected, dtype, times=1):
    scale = expected.norm() + 1e-9 * expected.numel()
    assert (found.double() - expected).norm() <= times * TOLERANCE[dtype] * scale


def check(q, k, v, dout, dlse, s, c=SMALL, mask=None, times=1, **extras):
    """All gradients, against autograd's in float64, to `times` the tolerance."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    more = {name: double(t) for name, t in extras.items()}
    if "sinks" in more:
        leaves.append(more["sinks"].requires_grad_())
    out, lse = formula(*leaves[:3], s, mask=mask if mask is None or mask.dtype == torch.bool else mask.double(), **more)
    target = (out * dout.double()).sum()
    if dlse is not None:
        target = target + torch.where(lse > -math.inf, lse * dlse.double(), 0.0).sum()
    expected = torch.autograd.grad(target, leaves)
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    x = whole(q, k, mask=None if mask is None else mask.expand(full), **extras)
    out, lse = out.detach().to(q.dtype), lse.detach().float().contiguous()
    wanted = ("dq", "dk", "dv", "dsinks")[: len(expected)]
    found = launched(q, k, v, out, lse, dout, dlse, x, s, c, wanted)
    for name, e in zip(wanted, expected, strict=True):
        close(found[name], e, q.dtype, times)
    return found


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    ("n_q", "n_k", "left", "right"),
    [
        (64, 64, -1, -1),
        (45, 70, -1, -1),
        (70, 70, -1, 0),
        (33, 81, -1, 0),
        (81, 33, -1, 0),
        (70, 70, 20, 0),
        (70, 70, 1, 0),  # the first query of a step alone sees the last key of a block
        (70, 70, -1, 1),
        (40, 90, 5, 7),
        (70, 41, 37, -1),
        (1, 50, -1, 0),
        (50, 1, -1, -1),
    ],
)
def test_lengths_and_windows(n_q, n_k, left, right, dtype, device):
    inputs = draw((2, 2, n_q, 16), (2, 2, n_k, 16), 16, dtype, device, with_lse=True)
    check(*inputs, Scoring(0.25, left=left, right=right))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(8, 16), (48, 16), (16, 40), (72, 80), (30, 24), (100, 64)]
)  # fmt: skip
def test_head_dims_in_two_parts(head_dim, value_dim, device):
    inputs = draw((1, 2, 40, head_dim), (1, 1, 40, head_dim), value_dim, BF16, device)
    check(*inputs, Scoring(head_dim**-0.5, right=0))


@pytest.mark.each_once
@pytest.mark.parametrize("mask", ["bool", "float", "rows", "heads"])
@pytest.mark.parametrize("right", [-1, 0])
def test_masks(mask, right, device):
    inputs = draw((2, 4, 37, 16), (2, 2, 50, 16), 16, torch.float32, device, with_lse=True)
    shape = {"rows": (2, 1, 37, 1), "heads": (4, 1, 50)}.get(mask, (2, 4, 37, 50))
    if mask == "float":
        m = torch.randn(shape, device=device)
        m[:, :, 3, 1:] = -math.inf
    else:
        m = torch.rand(shape, device=device) < 0.6
        if mask != "heads":
            m[..., 5, :] = False
    found = check(*inputs, Scoring(0.25, right=right), mask=m)
    if mask not in ("heads", "float"):
        assert (found["dq"][:, :, 5] == 0).all()


def test_a_mask_of_minus_infinities_hides_as_a_bool_mask_does(device):
    q, k, v, dout, dlse = draw((1, 2, 40, 16), (1, 2, 50, 16), 16, torch.float32, device, with_lse=True)
    mask = torch.rand(1, 1, 40, 50, device=device) < 0.6
    mask[:, :, 5] = False
    expected = check(q, k, v, dout, dlse, Scoring(0.25), mask=mask)
    out, lse = formula(q, k, v, Scoring(0.25), mask=mask)
    added = torch.zeros(1, 1, 40, 50, device=device).masked_fill(~mask, -math.inf).expand(1, 2, 40, 50)
    found = launched(q, k, v, out, lse.contiguous(), dout, dlse, whole(q, k, mask=added), Scoring(0.25))
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert (found["dq"][:, :, 5] == 0).all()


@pytest.mark.each_once
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", [False, True])
def test_soft_cap_alibi_and_sinks_together(softcap, mask, device):
    inputs = draw((2, 4, 50, 16), (2, 2, 60, 16), 32, torch.float32, device, with_lse=True)
    check(
        *inputs,
        Scoring(0.4, softcap, left=30, right=0),
        mask=torch.randn(50, 60, device=device) if mask else None,
        alibi_slopes=torch.rand((2, 4) if mask else (4,), device=device),
        sinks=torch.randn(4, device=device),
    )


def test_rows_that_see_nothing_and_keys_nobody_sees_get_zeros(device):
    q, k, v, dout, dlse = draw((1, 1, 60, 16), (1, 1, 33, 16), 16, torch.float32, device, with_lse=True)
    found = check(q, k, v, dout, dlse, Scoring(0.25, left=3, right=0))
    assert (found["dq"][:, :, :27] == 0).all()  # positions before the first key
    mask = torch.ones(60, 33, dtype=torch.bool, device=device)
    mask[:, 7] = False
    found = check(q, k, v, dout, dlse, Scoring(0.25), mask=mask)
    assert (found["dk"][:, :, 7] == 0).all()
    assert (found["dv"][:, :, 7] == 0).all()


def test_a_sink_takes_all_of_a_row_that_sees_nothing(device):
    inputs = draw((1, 2, 40, 16), (1, 2, 20, 16), 16, torch.float32, device, with_lse=True)
    check(*inputs, Scoring(0.25, right=0), sinks=torch.randn(2, device=device))


def test_low_scores_past_the_end_do_not_overflow(device):
    """With a log-sum-exp of -300, exp(0 - lse) of a key that is not there would be inf, and inf * 0 NaN.

    A score of 300 has an error of 1e-5 in float32, and so has the p that is made of it.
    """
    q, k, v, dout, _ = draw((1, 1, 20, 16), (1, 1, 20, 16), 16, torch.float32, device)
    mask = torch.full((20, 20), -300.0, device=device)
    check(q, k, v, dout, None, Scoring(0.25), mask=mask, times=20)
    q, k = q.abs() + 8, -k.abs() - 8
    check(q, k, v, dout, None, Scoring(0.25), times=200)


@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dsinks",), ()])
def test_only_what_is_asked_for_is_computed(wanted, device, monkeypatch):
    q, k, v, dout, dlse = draw((1, 2, 40, 16), (1, 1, 40, 16), 16, torch.float32, device, with_lse=True)
    s, sinks = Scoring(0.25, right=0), torch.randn(2, device=device)
    x = whole(q, k, sinks=sinks)
    out, lse = (t.float().contiguous() for t in formula(q.double(), k.double(), v.double(), s, sinks=sinks.double()))
    expected = launched(q, k, v, out, lse, dout, dlse, x, s, wanted=("dq", "dk", "dv", "dsinks"))
    launchers, bind = [], backward.bind
    monkeypatch.setattr(
        backward, "bind", lambda launcher, *a, **b: launchers.append(launcher) or bind(launcher, *a, **b)
    )
    found = launched(q, k, v, out, lse, dout, dlse, x, s, wanted=wanted)
    for name, t in found.items():
        assert (t is None) == (name not in wanted)
        assert t is None or torch.equal(t, expected[name])
    kernels = {launcher.kernel for launcher in launchers}
    assert (backward.dq_kernel in kernels) == ("dq" in wanted)
    assert (backward.dkdv_kernel in kernels) == ("dk" in wanted or "dv" in wanted)


@pytest.mark.parametrize("right", [-1, 0])
def test_packed_sequences(right, device):
    lengths_q, lengths_k = [17, 0, 40, 5, 9], [30, 12, 40, 0, 3]
    q, k, v, dout, dlse = draw((1, 4, 71, 16), (1, 2, 85, 16), 16, torch.float32, device, with_lse=True)
    starts = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (lengths_q, lengths_k)]
    s, sinks, slopes = Scoring(0.25, right=right), torch.randn(4, device=device), torch.rand(4, device=device)
    leaves = [t.double().requires_grad_() for t in (q, k, v, sinks)]
    outs, lses = [], []
    for i in range(5):
        rows, keys = (slice(int(a[i]), int(a[i + 1])) for a in starts)
        one = (leaves[0][:, :, rows], leaves[1][:, :, keys], leaves[2][:, :, keys])
        out, lse = formula(*one, s, alibi_slopes=slopes.double(), sinks=leaves[3])
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    target = (out * dout.double()).sum() + (lse * dlse.double()).sum()
    expected = torch.autograd.grad(target, leaves)
    starts_q, starts_k = (t.to(device) for t in starts)
    x = {"alibi_slopes": slopes, "sinks": sinks, "starts_q": starts_q, "starts_k": starts_k}
    x |= {"longest_q": 40, "longest_k": 40}
    wanted = ("dq", "dk", "dv", "dsinks")
    found = launched(
        q, k, v, out.detach().float(), lse.detach().float().contiguous(), dout, dlse, x, s, wanted=wanted
    )  # fmt: skip
    for name, e in zip(wanted, expected, strict=True):
        close(found[name], e, torch.float32)


@pytest.mark.parametrize("starts", [[5, 20, 33], [-7, 20, 400], [40, 10, 30], [60, 60, 60]])
def test_nothing_outside_of_a_sequence_is_written_whatever_the_starts_say(starts, device):
    q, k, v, dout, _ = draw((1, 2, 60, 16), (1, 2, 60, 16), 16, torch.float32, device)
    at = torch.tensor(starts, dtype=torch.int32, device=device)
    out, lse = torch.randn_like(v), torch.randn(1, 2, 60, device=device) + 4
    x = {"starts_q": at, "starts_k": at, "longest_q": 60, "longest_k": 60}
    found = launched(q, k, v, out, lse, dout, None, x, Scoring(0.25, right=0))
    covered = torch.zeros(60, dtype=torch.bool, device=device)
    for a, b in itertools.pairwise(starts):
        covered[max(a, 0) : max(b, 0)] = True
    for name in ("dq", "dk", "dv"):
        assert found[name].isfinite().all()
        assert (found[name][:, :, ~covered] == 0).all()


def test_strides_are_taken_as_they_are(device):
    """(B, T, H, D) seen as (B, H, T, D), views inside larger rows, and a gradient that is one number expanded."""
    s = Scoring(0.25, right=0)
    q, k, v, dout, dlse = draw((2, 2, 40, 16), (2, 1, 40, 16), 16, torch.float32, device, with_lse=True)
    out, lse = (t.float().contiguous() for t in formula(q.double(), k.double(), v.double(), s))
    x = whole(q, k)
    expected = launched(q, k, v, out, lse, dout, dlse, x, s)

    def relaid(t):
        wide = torch.full((*t.transpose(1, 2).shape[:3], t.shape[3] + 5), math.nan, device=device)
        wide[..., 2 : 2 + t.shape[3]] = t.transpose(1, 2)
        return wide[..., 2 : 2 + t.shape[3]].transpose(1, 2)

    found = launched(relaid(q), relaid(k), relaid(v), relaid(out), lse, relaid(dout), dlse.mT.contiguous().mT, x, s)
    for name in ("dq", "dk", "dv"):
        assert_same((found[name],), (expected[name],))  # on a GPU what is not aligned is added in another order
    ones = torch.ones((), device=device).expand(dout.shape)
    found = launched(q, k, v, out, lse, ones, None, x, s)
    expected = launched(q, k, v, out, lse, ones.contiguous(), None, x, s)
    for name in ("dq", "dk", "dv"):
        assert_same((found[name],), (expected[name],))  # on a GPU what is not aligned is added in another order


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 20), (20, 0), (0, 0)])
def test_empty_sides_give_zeros(n_q, n_k, device):
    q, k, v, dout, _ = draw((1, 2, n_q, 16), (1, 2, n_k, 16), 16, torch.float32, device)
    sinks = torch.randn(2, device=device)
    lse = sinks[None, :, None].expand(1, 2, n_q).contiguous()
    x = whole(q, k, sinks=sinks)
    found = launched(
        q, k, v, torch.zeros_like(dout), lse, dout, None, x, Scoring(0.25), wanted=("dq", "dk", "dv", "dsinks")
    )
    for t in found.values():
        assert (t == 0).all()


@pytest.mark.parametrize("value_dim", [5, 64, 200])
def test_delta_takes_any_strides(value_dim, device):
    out, dout = torch.randn(2, 3, value_dim, 70, device=device).mT, torch.randn(70, 3, 2, value_dim, device=device)
    dout, dlse = dout.permute(2, 1, 0, 3), torch.randn(70, 3, 2, device=device).permute(2, 1, 0)
    found = torch.full((2, 3, 70), math.nan, device=device)
    lse = torch.zeros(2, 3, 70, device=device)
    row_sums.prepare_delta(out, dout, dlse, None, None)(out, dout, dlse, found, lse, None, None)
    torch.testing.assert_close(found, (out * dout).sum(-1) - dlse, rtol=1e-5, atol=1e-5)


def test_a_second_run_gives_the_same_bits(device):
    q, k, v, dout, dlse = draw((1, 4, 70, 32), (1, 2, 70, 32), 32, BF16, device, with_lse=True)
    s, sinks = Scoring(0.2, right=0), torch.randn(4, device=device)
    out, lse = formula(q.double(), k.double(), v.double(), s, sinks=sinks.double())
    out, lse, x = out.to(BF16), lse.float().contiguous(), whole(q, k, sinks=sinks)
    first, second = (
        launched(q, k, v, out, lse, dout, dlse, x, s, wanted=("dq", "dk", "dv", "dsinks")) for _ in range(2)
    )
    for name, t in first.items():
        assert torch.equal(t, second[name])


def test_one_tile_serves_both_kernels_mirrored(device):
    c = backward.both(AttentionConfig("portable", 32, 64, 8, 3))
    assert c == BackwardConfig("portable", 32, 64, 8, 3, 64, 32, 8, 3)
    inputs = draw((1, 2, 90, 16), (1, 2, 90, 16), 16, torch.float32, device)
    check(*inputs, Scoring(0.25, right=0), AttentionConfig("portable", 16, 32, 4, 1))


PROBLEM = Problem(2, 16, 16, 8192, 8192, 128, 128, BF16, Scoring(0.1))


@pytest.mark.parametrize("target", runtime.TARGETS.values(), ids=runtime.TARGETS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_the_default_is_not_refused(dtype, head_dim, target):
    p = dataclasses.replace(PROBLEM, head_dim=head_dim, value_dim=head_dim, dtype=dtype)
    assert backward.can_implement(p, backward.default_config(p, target), target) is None


def test_what_can_not_run_is_refused():
    target = runtime.TARGETS["sm_90"]
    assert "hopper" in backward.can_implement(PROBLEM, AttentionConfig("hopper", 64, 128), target)
    assert "16 of each" in backward.can_implement(PROBLEM, AttentionConfig("portable", 8, 64), target)
    assert "num_warps" in backward.can_implement(PROBLEM, AttentionConfig("portable", 64, 64, 64), target)
    assert "shared memory" in backward.can_implement(PROBLEM, AttentionConfig("portable", 256, 256, 8, 4), target)
    with pytest.raises(ValueError, match="power of two"):
        BackwardConfig("portable", 64, 64, 4, 2, 24)


def test_which_kernel_the_gradients_get():
    target = runtime.TARGETS["sm_90"]
    assert problem.choose_backward(PROBLEM, target).kernel == "hopper"
    assert problem.choose_backward(PROBLEM, target, portable=True).kernel == "portable"
