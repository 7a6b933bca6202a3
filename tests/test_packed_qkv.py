"""q, k and v as views of one packed tensor, as a fused projection writes it: no op copies them."""

import collections
import math

import pytest
import torch

import rooftile
from rooftile import launching
from rooftile.ops.attention.problem import Inputs, Scoring

B, T, H, D = 2, 24, 4, 16


def three(device):
    """`(B, T, 3, H, D)`: as many heads of k and v."""
    return torch.randn(B, T, 3, H, D, device=device).unbind(2)


def grouped(device):
    """`(B, T, (H + 2 Hkv) * D)`."""
    qkv = torch.randn(B, T, (H + 2 * 2) * D, device=device)
    return qkv.unflatten(-1, (-1, D)).split((H, 2, 2), dim=2)


def calls(q, k, v):
    """Each op on those tensors, (B, T, heads, D): its results."""
    device, heads = q.device, k.shape[2]
    starts = torch.tensor([3, 0], dtype=torch.int32, device=device)
    angles = torch.linspace(0, 3, T, device=device)[:, None].expand(T, D).contiguous()
    caches = [torch.zeros(B, 40, heads, D, device=device) for _ in "kv"]

    # rope_ writes over its arguments: it has its own, of the same strides.
    own = [torch.empty_strided(t.shape, t.stride(), device=device).copy_(t) for t in (q, k)]
    original = [t.clone() for t in own]

    def append():
        rooftile.append_kv(k, v, *caches, starts, layout="bthd")
        return tuple(caches)

    def rotate():
        for t, before in zip(own, original, strict=True):
            t.copy_(before)
        return rooftile.rope_(*own, angles.cos(), angles.sin(), layout="bthd")

    first = q[:, :4]
    return {
        "attention": lambda: rooftile.attention(q, k, v, causal=True, layout="bthd", return_lse=True),
        "attention by heads": lambda: rooftile.attention(*(t.transpose(1, 2) for t in (q, k, v)), return_lse=True),
        "decode_attention": lambda: rooftile.decode_attention(first, k, v, starts + 5, layout="bthd", return_lse=True),
        "append_kv": append,
        "rope_": rotate,
    }


def copied(call):
    """The PyTorch ops that copy, by how often the call makes them. Launches are made ready before."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = ("aten::clone", "aten::contiguous", "aten::copy_", "aten::_to_copy")
    return collections.Counter(e.name for e in profile.events() if e.name in names)


@pytest.mark.each_once
@pytest.mark.parametrize("packed", [three, grouped], ids=["three", "grouped"])
@pytest.mark.parametrize("op", ["attention", "attention by heads", "decode_attention", "append_kv", "rope_"])
def test_views_give_what_contiguous_tensors_give_and_are_not_copied(packed, op, device):
    views = packed(device)
    assert not any(t.is_contiguous() for t in views)
    launching.forget()
    whole = calls(*(t.contiguous() for t in views))[op]
    of_views = calls(*views)[op]
    for found, expected in zip(of_views(), whole(), strict=True):
        assert torch.equal(found, expected)
    assert copied(of_views) == copied(whole)


@pytest.mark.parametrize("op", ["attention", "decode_attention", "append_kv"])
def test_a_copy_would_be_counted(op, device):
    q, k, v = three(device)
    wide = [torch.stack((t, t), -1)[..., 0] for t in (q, k, v)]
    assert copied(calls(*wide)[op]) > copied(calls(q, k, v)[op])


def test_the_views_suit_tma():
    """The Hopper kernels copy by TMA: bases and strides are multiples of 16 bytes."""
    for heads in (8, 2):
        qkv = torch.empty(B, T, 8 + 2 * heads, 64, dtype=torch.bfloat16, device="meta")
        q, k, v = (t.transpose(1, 2) for t in qkv.split((8, heads, heads), dim=2))
        assert Inputs(q, k, v, Scoring(1 / math.sqrt(64))).problem.aligned
