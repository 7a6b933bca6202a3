"""What is special to attention: its options beside the formula, rows that see nothing, wrong arguments, gradients."""

import math

import numpy
import pytest
import torch
from helpers import BF16, assert_same

from rooftile import launching
from rooftile.ops.attention import AttentionConfig, attention
from rooftile.primitives.scores import split_dim
from rooftile.reference import attention as reference

INF, NAN = float("inf"), float("nan")


def drawn(device, b=1, h=2, n_q=40, d=16, *, kv=None, n_k=None, v=None, dtype=torch.float32):
    n_k = n_q if n_k is None else n_k
    shapes = ((b, h, n_q, d), (b, kv or h, n_k, d), (b, kv or h, n_k, v or d))
    return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)


def assert_right(q, k, v, **options):
    """out, lse and every gradient against the naive form in float64."""
    names = [n for n in ("sinks",) if options.get(n) is not None]
    leaves = [t.detach().requires_grad_() for t in (q, k, v, *(options[n] for n in names))]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    given = options | dict(zip(names, leaves[3:], strict=True))
    out, lse = attention(*leaves[:3], return_lse=True, **given)
    exact = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in options.items()}
    exact |= dict(zip(names, doubles[3:], strict=True))
    expected, expected_lse = reference.naive(*doubles[:3], return_lse=True, **exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=2e-6)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    # Where two outputs are merged by their lse, the gradient of a lse of -inf is NaN.
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse.masked_fill(lse == -INF, NAN)))
    seen = expected_lse.masked_fill(expected_lse == -INF, 0)
    total = (expected * dout).sum() + (seen * dlse).sum()
    for a, e in zip(found, torch.autograd.grad(total, doubles), strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


def test_dimensions_are_split_into_powers_of_two():
    expected = {8: (16, 0), 16: (16, 0), 24: (32, 0), 40: (32, 16), 64: (64, 0), 72: (64, 16), 80: (64, 16)}
    expected |= {
        96: (64, 32),
        112: (128, 0),
        128: (128, 0),
        160: (128, 32),
        192: (128, 64),
        200: (256, 0),
        256: (256, 0),
    }
    assert {d: split_dim(d) for d in expected} == expected
    assert all(sum(split_dim(d)) >= d for d in range(1, 257))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": 7},
        {"causal": True, "window": 7},
        {"window": (3, None)},
        {"window": (None, 2)},
        {"window": (0, 0), "scale": 0.5},
        {"window": (-1, 70)},
        {"softcap": 1.5, "causal": True},
        {"scale": -0.3},
        {"scale": 0.0},
        {"scale": 1e-40},
    ],
    ids=str,
)
def test_options_give_the_formula_and_its_gradients(options, device):
    assert_right(*drawn(device, n_q=33, n_k=70, h=2, kv=1), **options)


@pytest.mark.parametrize("window", [2**30, 2**31 - 1, 2**40, (2**31, None), (3, 2**31 - 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_longer_than_any_sequence_is_none(window, causal, device):
    assert_right(*drawn(device, n_q=20, n_k=30), window=window, causal=causal)


@pytest.mark.parametrize(("n_q", "n_k"), [(70, 30), (1, 65), (65, 1), (66, 129), (5, 0)])
@pytest.mark.parametrize("window", [None, 4])
def test_the_last_query_stands_at_the_last_key(n_q, n_k, window, device):
    assert_right(*drawn(device, n_q=n_q, n_k=n_k), causal=True, window=window)


@pytest.mark.parametrize(("d", "v"), [(1, 3), (8, 40), (80, 96), (20, 72)])
def test_any_head_dim_and_value_dim(d, v, device):
    assert_right(*drawn(device, n_q=17, d=d, v=v), causal=True)


@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_query_heads_share_key_heads(heads, device):
    q, k, v = drawn(device, b=2, h=heads[0], kv=heads[1], n_q=20)
    assert_right(q, k, v, causal=True)
    shared = (t.repeat_interleave(heads[0] // heads[1], 1) for t in (k, v))
    assert_same((attention(q, k, v),), (attention(q, *shared),))


@pytest.mark.each_once
@pytest.mark.parametrize("shape", [(), (1, 9), (20, 1), (20, 9), (2, 20, 9), (3, 1, 1, 9), (3, 2, 20, 9)], ids=str)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_is_broadcast_in_every_dimension(shape, kind, device):
    q, k, v = drawn(device, b=3, n_q=20, n_k=9)
    mask = torch.randn(shape, device=device)
    mask = mask > -0.5 if kind is torch.bool else mask
    assert_right(q, k, v, mask=mask, causal=len(shape) == 2)


def test_a_mask_of_any_strides(device):
    q, k, v = drawn(device, n_q=20, n_k=9)
    wide = torch.rand(40, 30, device=device) > 0.3
    for mask in (wide[::2, 2:20:2], wide[:9, :20].T):
        assert_same((attention(q, k, v, mask=mask),), (attention(q, k, v, mask=mask.contiguous()),))


def test_biases_together(device):
    q, k, v = drawn(device, h=4, kv=2, n_q=30, n_k=41)
    slopes, sinks = torch.rand(4, device=device), torch.randn(4, device=device)
    mask = torch.randn(30, 41, device=device)
    assert_right(q, k, v, alibi_slopes=slopes, sinks=sinks, mask=mask, softcap=3.0, causal=True, window=20)
    assert_right(q, k, v, alibi_slopes=slopes, window=(5, 2))


@pytest.mark.parametrize("kv", [2, 4])
def test_slopes_of_each_sequence(kv, device):
    q, k, v = drawn(device, b=2, h=4, kv=kv, n_q=30, n_k=41)
    slopes = torch.rand(2, 4, device=device)
    assert_right(q, k, v, alibi_slopes=slopes, causal=True)
    assert_right(q, k, v, alibi_slopes=torch.rand(4, 2, device=device).T, softcap=3.0)
    assert_same(
        (attention(q, k, v, alibi_slopes=slopes[:1].expand(2, 4)),), (attention(q, k, v, alibi_slopes=slopes[0]),)
    )


def test_rows_that_see_nothing_are_zero_and_have_no_gradient(device):
    q, k, v = drawn(device, n_q=40, n_k=24)
    mask = torch.rand(40, 24, device=device) > 0.4
    mask[[3, 39]] = False
    hidden = torch.zeros(40, 24, device=device).masked_fill(~mask, -INF)
    for options in ({"mask": mask}, {"mask": mask, "causal": True}, {"mask": hidden}, {"causal": True}):
        assert_right(q, k, v, **options)
        out, lse = attention(q, k, v, return_lse=True, **options)
        empty = [3, 39] if "mask" in options else [0, 15]
        assert (out[:, :, empty] == 0).all()
        assert (lse[:, :, empty] == -INF).all()
    sinks = torch.randn(2, device=device)
    out, lse = attention(q, k, v, mask=mask, sinks=sinks, return_lse=True)
    assert (out[:, :, 3] == 0).all()
    torch.testing.assert_close(lse[0, :, 3], sinks)
    assert_right(q, k, v, mask=mask, sinks=sinks)


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_may_hide_the_first_keys_of_a_row_and_all(causal, device):
    """Keys enough for blocks that need no comparison: there the first scores of a row are all -inf."""
    q, k, v = drawn(device, h=1, n_q=20, n_k=150)
    mask = torch.rand(20, 150, device=device) > 0.4
    mask[3, :70], mask[5, :130], mask[7] = False, False, False
    assert_right(q, k, v, mask=mask, causal=causal)
    assert_right(q, k, v, mask=torch.zeros(20, 150, device=device).masked_fill(~mask, -INF), causal=causal)


def test_a_sink_of_minus_infinity_is_none(device):
    q, k, v = drawn(device)
    sinks = torch.tensor([-INF, -INF], device=device)
    torch.testing.assert_close(attention(q, k, v, causal=True, sinks=sinks), attention(q, k, v, causal=True))
    sinks.requires_grad_()  # also of rows that see nothing
    attention(q, k[:, :, :24], v[:, :, :24], causal=True, sinks=sinks).sum().backward()
    assert (sinks.grad == 0).all()


def test_with_no_keys_the_log_sum_exp_is_the_sink_and_has_its_gradient(device):
    assert_right(*drawn(device, n_q=5, n_k=0), sinks=torch.randn(2, device=device))


def test_one_key_gives_its_value(device):
    q, k, v = drawn(device, n_q=5, n_k=1)
    torch.testing.assert_close(attention(q, k, v), v.expand(-1, -1, 5, -1))


def test_scores_of_any_size(device):
    q, k, v = drawn(device, n_q=20)
    found, exact = attention(q * 1e3, k * 1e3, v), reference.naive(*(t.double() for t in (q * 1e3, k * 1e3, v)))
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)
    lowest = torch.zeros(20, 20, device=device)
    lowest[:, 5:] = torch.finfo(torch.float32).min
    out = attention(q, k, v, mask=lowest)
    torch.testing.assert_close(out, attention(q, k[:, :, :5], v[:, :, :5]))


def test_what_is_not_seen_may_hold_anything(device):
    q, k, v = drawn(device, n_q=40, n_k=40)
    expected = attention(q[:, :, :20], k[:, :, :20], v[:, :, :20], causal=True)
    for bad in (NAN, INF):
        k[:, :, 20:], v[:, :, 21:] = bad, 0
        out = attention(q, k, v, causal=True)
        torch.testing.assert_close(out[:, :, :20], expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 3)}], ids=str)
def test_layouts_are_strides(options, device):
    q, k, v = drawn(device, b=2, h=4, kv=2, n_q=20, n_k=30)
    turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out, lse = attention(q, k, v, return_lse=True, **options)
    other, other_lse = attention(*turned, layout="bthd", return_lse=True, **options)
    assert out.is_contiguous()
    assert other.is_contiguous()
    assert_same((other.transpose(1, 2), other_lse), (out, lse))
    view = attention(*(t.transpose(1, 2) for t in turned), **options)
    assert view.transpose(1, 2).is_contiguous()  # in memory as q is
    assert_same((view,), (out,))


@pytest.mark.each_once
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("block_n", [16, 32])
def test_a_configuration_that_is_asked_for(block_m, block_n, device):
    q, k, v = drawn(device, n_q=50, n_k=75)
    config = AttentionConfig("portable", block_m, block_n, 4, 1)
    for options in ({}, {"causal": True}, {"window": 9}, {"causal": True, "window": 30}):
        expected, lse = attention(q, k, v, return_lse=True, **options)
        found = attention(q, k, v, return_lse=True, config=config, **options)
        torch.testing.assert_close(found, (expected, lse))


def test_a_configuration_that_can_not_be_launched(device):
    q, k, v = drawn(device)
    with pytest.raises(ValueError, match=r"attention: config can't be launched: block_n is 8, expected at least 16"):
        attention(q, k, v, config=AttentionConfig("portable", 16, 8, 4, 1))
    with pytest.raises(TypeError, match=r"attention: config is a str, expected rooftile.AttentionConfig or None"):
        attention(q, k, v, config="portable")


def test_the_two_forms_of_the_reference_agree(device):
    q, k, v = (t.double() for t in drawn(device, h=4, kv=2, n_q=70, n_k=90))
    for options in ({}, {"causal": True}, {"causal": True, "window": 20}, {"scale": 0.2, "window": (3, 60)}):
        found = reference.blocked(q, k, v, block_m=16, block_n=32, **options)
        torch.testing.assert_close(found, reference.naive(q, k, v, **options))


def test_gradients_of_lse_alone(device):
    q, k, v = (t.requires_grad_() for t in drawn(device, n_q=20))
    _, lse = attention(q, k, v, causal=True, return_lse=True)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    doubles = [t.detach().double().requires_grad_() for t in (q, k, v)]
    _, exact = reference.naive(*doubles, causal=True, return_lse=True)
    torch.testing.assert_close(dq.double(), torch.autograd.grad(exact.sum(), doubles[0])[0], rtol=1e-4, atol=1e-5)
    assert (dv == 0).all()


def test_only_inputs_and_a_number_for_each_row_are_kept(device):
    q, k, v = (t.requires_grad_() for t in drawn(device))
    out = attention(q, k, v, causal=True)
    kept = [t for t in out.grad_fn.saved_tensors if t is not None]
    assert sum(t.numel() for t in kept) == q.numel() + k.numel() + v.numel() + out.numel() + out.shape[:-1].numel()


# Wrong arguments


def test_shapes_that_do_not_fit(device):
    q, k, v = drawn(device, b=2, h=4, kv=2, n_q=8, n_k=9)

    def refused(message, *args, **options):
        with pytest.raises(ValueError, match=f"attention: {message}"):
            attention(*args, **options)

    refused("q has 3 heads, expected a multiple of the 2 heads of k and v", q[:, :3], k, v)
    refused(r"q has shape \(4, 8, 16\), expected 4 dimensions \(batch, heads, tokens, head_dim\)", q[0], k, v)
    refused(r"k has shape \(1, 2, 9, 16\), expected \(2, kv_heads, keys, 16\) to match q", q, k[:1], v)
    refused(r"k has shape \(2, 2, 9, 8\), expected", q, k[..., :8], v)
    refused(r"v has shape \(2, 2, 8, 16\), expected \(2, 2, 9, value_dim\) to match k", q, k, v[:, :, :8])
    wide = q.new_zeros(2, 4, 8, 264)
    refused("q has a head_dim of 264, expected 1 to 256", wide, wide, wide)
    for shape in ((8,), (8, 8), (3, 1, 8, 9), (2, 2, 8, 9), (1, 2, 4, 8, 9)):
        mask = torch.ones(shape, dtype=torch.bool, device=device)
        refused(r"mask has shape .*, expected one that broadcasts to \(2, 4, 8, 9\)", q, k, v, mask=mask)
    refused(r"sinks has shape \(2,\), expected \(4,\), a number for each head of q", q, k, v, sinks=q.new_zeros(2))
    for shape in ((), (2,), (4, 2), (1, 4), (2, 4, 1)):
        message = r"alibi_slopes has shape .*, expected \(4,\), a number for each head of q, or \(2, 4\), for each seq"
        refused(message, q, k, v, alibi_slopes=q.new_zeros(shape))
    refused("layout is 'BHTD', expected one of bhtd, bthd", q, k, v, layout="BHTD")
    refused("q has 8 heads, expected a multiple of the 9 heads of k and v", q, k, v, layout="bthd")


def test_options_that_make_no_sense(device):
    q, k, v = drawn(device)

    def refused(error, message, **options):
        with pytest.raises(error, match=f"attention: {message}"):
            attention(q, k, v, **options)

    refused(ValueError, "window is 0, expected at least 1", window=0)
    refused(ValueError, r"window is \(-2, 0\), expected sides of 0 or more", window=(-2, 0))
    for window in ("3", 1.5, True, (1,), (1, 2.0)):
        refused(TypeError, "window is .*, expected an int", window=window)
    seven = torch.tensor(7, device=device)
    for window in (seven, (seven, 0), (None, seven)):
        refused(TypeError, "window is or has a tensor, expected ints: .* would make the host wait", window=window)
    for scale in (INF, NAN):
        refused(ValueError, "scale is .*, expected a finite number", scale=scale)
    for softcap in (-1.0, 1e-40, INF, NAN):
        refused(ValueError, "softcap is .*, expected a positive number", softcap=softcap)
    refused(TypeError, "scale is a str, expected a number or None", scale="1")
    refused(TypeError, r"scale is a numpy\.float32, expected a number or None", scale=numpy.float32(1))
    refused(TypeError, "causal is an int, expected a bool", causal=1)
    refused(TypeError, "return_lse is a str, expected a bool", return_lse="xx")
    refused(
        TypeError, "mask has dtype torch.uint8, expected", mask=torch.ones(40, 40, device=device, dtype=torch.uint8)
    )
    refused(
        ValueError,
        "mask requires grad, which is not supported",
        mask=torch.zeros(40, 40, device=device).requires_grad_(),
    )
    refused(ValueError, "alibi_slopes requires grad", alibi_slopes=torch.zeros(2, device=device).requires_grad_())
    with pytest.raises(TypeError, match=r"attention: k has dtype torch.bfloat16, expected torch.float32 to match q"):
        attention(q, k.to(BF16), v)


def test_autocast_casts_as_products_are(device):
    q, k, v = drawn(device)
    with torch.autocast(device.type, dtype=BF16):
        out = attention(q, k.to(BF16), v, causal=True)
    assert_same((out,), (attention(q.to(BF16), k.to(BF16), v.to(BF16), causal=True),))


def test_sinks_in_16_bits_get_gradients_in_16_bits(device):
    q, k, v = drawn(device, dtype=BF16)
    sinks = torch.randn(2, device=device).to(BF16).requires_grad_()
    attention(q, k, v, sinks=sinks).float().sum().backward()
    assert sinks.grad.dtype == BF16


def test_default_scale_is_that_of_the_head_dim(device):
    q, k, v = drawn(device)
    assert_same((attention(q, k, v),), (attention(q, k, v, scale=1 / math.sqrt(16)),))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 9}])
def test_the_reference_is_the_same_in_pieces(options):
    q, k, v = (
        torch.randn(2, h, t, 16, dtype=torch.float64, requires_grad=True) for h, t in ((4, 50), (2, 70), (2, 70))
    )
    options = {"causal": False, "scale": None, "window": None, "softcap": None, "layout": "bhtd", **options}
    whole = reference.naive(q, k, v, **options)
    pieces = reference._in_heads(reference.naive, 1000, q, k, v, None, None, None, options)
    torch.testing.assert_close(pieces, whole)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (pieces, whole)), strict=True):
        torch.testing.assert_close(a, b)


def test_whether_gradients_are_deterministic_is_asked_of_the_caller_and_else_of_torch(device, monkeypatch):
    from rooftile.ops.attention import ops

    q = torch.randn(1, 1, 8, 16, device=device, requires_grad=True)
    asked = []
    prepare = ops.prepare_backward

    def ask(*args, deterministic, **options):
        asked.append(deterministic)
        return prepare(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(ops, "prepare_backward", ask)
    for deterministic in (True, False, None):
        launching.forget()  # a call that is prepared asks no more
        attention(q, q, q, deterministic=deterministic).sum().backward()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before)
    launching.forget()
    try:
        attention(q, q, q).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [True, False, before, not before]
    with pytest.raises(TypeError, match="attention: deterministic is 1, expected True, False or None"):
        attention(q, q, q, deterministic=1)


def test_gradients_are_the_portable_kernels_where_the_forward_is_told_to_be(device, monkeypatch):
    from rooftile.ops.attention import problem

    q = torch.randn(1, 1, 8, 16, device=device, requires_grad=True)
    asked, chosen = [], problem.choose_backward
    monkeypatch.setattr(problem, "choose_backward", lambda *args: asked.append(args[-1]) or chosen(*args))
    attention(q, q, q, config=AttentionConfig("portable", 16, 16, 4, 1)).sum().backward()
    attention(q, q, q).sum().backward()
    assert asked == [True, False]


def test_a_new_scale_window_or_length_needs_no_new_kernel(device):
    def call(n, **options):
        q = torch.randn(1, 2, n, 16, device=device, requires_grad=True)
        attention(q, q, q, **options).sum().backward()

    forms = ({}, {"causal": True}, {"window": (5, 9)}, {"causal": True, "window": 7, "softcap": 2.0})
    for options in forms:
        for n in (64, 70):  # a whole block, and not
            call(n, **options)
    known = set(launching._LAUNCHERS)
    for i, options in enumerate(forms):
        changed = {"window": 11 + i} if isinstance(options.get("window"), int) else {}
        changed |= {"window": (6, 13)} if isinstance(options.get("window"), tuple) else {}
        changed |= {"softcap": 3.5} if "softcap" in options else {}
        for n in (128, 75):
            call(n, **{**options, **changed}, scale=0.3 + i)
    assert set(launching._LAUNCHERS) == known
