"""rope and rope_: positions, tables, what is written in place, errors."""

import pytest
import torch
from helpers import BF16, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.reference import rope as reference

STYLES = ["half", "interleaved", "deepseek"]


def make(device, *, batch=2, tokens=5, q_heads=4, k_heads=2, head_dim=16, rotary=16, style="half", dtype=torch.float32):
    q = torch.randn(batch, q_heads, tokens, head_dim, device=device).to(dtype)
    k = torch.randn(batch, k_heads, tokens, head_dim, device=device).to(dtype)
    angle = torch.randn(tokens, rotary // 2, device=device)
    angle = angle.repeat_interleave(2, -1) if style == "interleaved" else angle.repeat(1, 2)
    return q, k, angle.cos().to(dtype), angle.sin().to(dtype)


@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 20),
    q_heads=st.integers(1, 9),
    k_heads=st.integers(0, 9),
    head_dim=st.integers(1, 20),
    rotary=st.integers(1, 20),
    style=st.sampled_from(STYLES),
    dtype=st.sampled_from([torch.float32, BF16]),
)
@settings(max_examples=20)
def test_any_shape(batch, tokens, q_heads, k_heads, head_dim, rotary, style, dtype):
    sizes = {"head_dim": 2 * max(head_dim, rotary), "rotary": 2 * rotary, "q_heads": q_heads, "k_heads": k_heads}
    inputs = make(runtime.default_device(), batch=batch, tokens=tokens, style=style, dtype=dtype, **sizes)
    expected = reference.rope(*(t.double() for t in inputs), style=style)
    for y, x, ref in zip(rooftile.rope(*inputs, rotary_dim=2 * rotary, style=style), inputs, expected, strict=False):
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert relative_error(y, ref) < torch.finfo(dtype).eps


@pytest.mark.parametrize("style", STYLES)
def test_the_backward_is_the_inverse(style, device):
    q, k, cos, sin = make(device, style=style, rotary=12)
    q.requires_grad_()
    k.requires_grad_()
    outputs = rooftile.rope(q, k, cos, sin, rotary_dim=12, style=style)
    grads = torch.autograd.grad(outputs, (q, k), [y.detach() for y in outputs])
    torch.testing.assert_close(grads, (q.detach(), k.detach()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_ids_with_strides(dtype, device):
    q, k, _, _ = make(device)
    _, _, cos, sin = make(device, tokens=40)
    ids = torch.randint(40, (5, 2), device=device, dtype=dtype).T
    expected = rooftile.rope(q, k, cos[ids.long()], sin[ids.long()])
    assert_same(rooftile.rope(q, k, cos, sin, position_ids=ids), expected)


def test_a_position_outside_the_table_is_nan_and_reads_nothing(device):
    q, k, cos, sin = make(device, batch=1)
    ids = torch.tensor([0, -1, 5, 4, 1 << 40], device=device)
    for y in rooftile.rope(q, k, cos, sin, position_ids=ids):
        assert torch.isfinite(y[:, :, [0, 3]]).all()
        assert y[:, :, [1, 2, 4]].isnan().all()


def test_a_table_with_strides(device):
    q, k, cos, sin = make(device)
    both = torch.stack((cos, sin), dim=-1)
    assert_same(rooftile.rope(q, k, both[..., 0], both[..., 1]), rooftile.rope(q, k, cos, sin))
    expanded = (cos.expand(2, -1, -1), sin.expand(2, -1, -1))
    assert_same(rooftile.rope(q, k, *expanded), rooftile.rope(q, k, cos, sin))


def test_elements_past_the_rotary_dimension_are_kept_to_the_bit(device):
    q, k, cos, sin = make(device, head_dim=24, rotary=8, dtype=BF16)
    q[..., 8:] = float("nan")
    k[..., 8:] = float("inf")
    for x, y in zip((q, k), rooftile.rope(q, k, cos, sin, rotary_dim=8), strict=True):
        assert torch.equal(y[..., 8:].view(torch.int16), x[..., 8:].view(torch.int16))
        assert torch.isfinite(y[..., :8]).all()


def test_one_of_q_and_k_may_be_frozen(device):
    q, k, cos, sin = make(device)
    q.requires_grad_()
    turned, _ = rooftile.rope(q, k, cos, sin)
    (dq,) = torch.autograd.grad(turned, q, torch.ones_like(q))
    assert_same((dq,), (rooftile.rope(torch.ones_like(q), torch.ones_like(k), cos, -sin)[0],))


class TestInPlace:
    def test_it_writes_over_q_and_k_and_returns_them(self, device):
        q, k, cos, sin = make(device)
        expected = rooftile.rope(q, k, cos, sin)
        turned = rooftile.rope_(q, k, cos, sin)
        assert turned[0] is q
        assert turned[1] is k
        assert_same(turned, expected)

    def test_the_heads_of_a_fused_projection(self, device):
        """q and k are views of one (B, T, heads, D) tensor; the values beside them stay."""
        qkv = torch.randn(2, 5, 8, 16, device=device)
        before = qkv.clone()
        _, _, cos, sin = make(device)
        q, k = qkv[:, :, :4], qkv[:, :, 4:6]
        expected = rooftile.rope(q.clone(), k.clone(), cos, sin, layout="bthd")
        rooftile.rope_(q, k, cos, sin, layout="bthd")
        assert_same((qkv[:, :, :4], qkv[:, :, 4:6]), expected)
        assert torch.equal(qkv[:, :, 6:], before[:, :, 6:])

    def test_versions_are_counted(self, device):
        q, k, cos, sin = make(device)
        versions = [t._version for t in (q, k, cos, sin)]
        rooftile.rope_(q, k, cos, sin)
        assert [t._version for t in (q, k, cos, sin)] == [versions[0] + 1, versions[1] + 1, *versions[2:]]

    def test_autograd_sees_that_a_saved_tensor_was_overwritten(self, device):
        q, k, cos, sin = make(device)
        leaf = q.clone().requires_grad_()
        x = leaf * 1
        squares = x * x  # saves x
        rooftile.rope_(x, k, cos, sin)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()

    def test_autograd_sees_it_without_gradients_of_its_own(self, device):
        q, k, cos, sin = make(device)
        weight = torch.randn_like(q).requires_grad_()
        product = weight * q  # saves q
        rooftile.rope_(q, k, cos, sin)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    @pytest.mark.parametrize("name", ["q", "k"])
    def test_a_leaf_that_requires_grad_is_refused_and_left_alone(self, name, device):
        q, k, cos, sin = make(device)
        given = {"q": q, "k": k}
        given[name].requires_grad_()
        before = given[name].detach().clone()
        with pytest.raises(ValueError, match=f"rope_: {name} is a leaf that requires grad"):
            rooftile.rope_(**given, cos=cos, sin=sin)
        assert torch.equal(given[name], before)
        with torch.no_grad():
            rooftile.rope_(**given, cos=cos, sin=sin)
        assert not torch.equal(given[name], before)

    @pytest.mark.parametrize("name", ["q", "k"])
    def test_a_view_is_refused_where_gradients_are_asked_for(self, name, device):
        """PyTorch follows views through one written tensor, not two; it would say so after q and k were turned."""
        q, k, cos, sin = make(device)
        given = {"q": (q.requires_grad_() * 1), "k": k}
        given[name] = given[name].view(given[name].shape)
        before = given[name].detach().clone()
        with pytest.raises(ValueError, match=rf"rope_: {name} is a view, .* pass {name}.clone\(\)"):
            rooftile.rope_(**given, cos=cos, sin=sin)
        assert torch.equal(given[name], before)
        with torch.no_grad():
            rooftile.rope_(**given, cos=cos, sin=sin)
        assert not torch.equal(given[name], before)

    @pytest.mark.parametrize("name", ["q", "k"])
    def test_strides_that_cannot_be_written_are_refused(self, name, device):
        q, k, cos, sin = make(device)
        given = {"q": q, "k": k}
        given[name] = given[name].transpose(2, 3).contiguous().transpose(2, 3)
        before = given[name].clone()
        stride = given[name].stride(-1)
        with pytest.raises(ValueError, match=f"rope_: {name} has a last stride of {stride}, expected 1"):
            rooftile.rope_(**given, cos=cos, sin=sin)
        assert torch.equal(given[name], before)

    def test_an_expanded_tensor_is_refused(self, device):
        """One address for several elements can't hold several results."""
        q, k, cos, sin = make(device)
        with pytest.raises(ValueError, match=r"rope_: k is expanded \(strides .*\), expected an address for each"):
            rooftile.rope_(q, k[:, :1].expand(-1, 4, -1, -1), cos, sin)

    def test_deepseek_is_refused(self, device):
        q, k, cos, sin = make(device)
        with pytest.raises(ValueError, match="rope_: style is 'deepseek', which moves elements"):
            rooftile.rope_(q, k, cos, sin, style="deepseek")


def test_tables_that_require_grad_are_refused(device):
    for index in (2, 3):
        inputs = list(make(device))
        inputs[index].requires_grad_()
        with pytest.raises(ValueError, match=r"rope: (cos|sin) requires grad, which is not supported; detach it"):
            rooftile.rope(*inputs)


def test_wrong_shapes(device):
    q, k, cos, sin = make(device)
    ids = torch.arange(5, device=device)
    wrong = [
        ((q[0], k, cos, sin), {}, r"q has shape \(4, 5, 16\), expected 4 dimensions bhtd"),
        ((q, k[0], cos, sin), {}, r"k has shape \(2, 5, 16\), expected \(2, k_heads, 5, 16\) to match q in bhtd"),
        (
            (q, k, cos.repeat(2, 1), sin.repeat(2, 1)),
            {},
            r"cos has shape \(10, 16\), expected .*; of a longer table, "
            r"pass cos\[:5\] and sin\[:5\], or position_ids=",
        ),
        ((q[:1], k[:1], cos[:4], sin[:4]), {}, r"cos has shape \(4, 16\), expected \(5, R\) or \(1, 5, R\)$"),
        ((q, k[:1], cos, sin), {}, r"k has shape \(1, 2, 5, 16\), expected"),
        ((q, k[:, :, :4], cos, sin), {}, r"k has shape \(2, 2, 4, 16\), expected"),
        ((q, k[..., :8], cos, sin), {}, r"k has shape \(2, 2, 5, 8\), expected"),
        ((q, k, cos[:4], sin[:4]), {}, r"cos has shape \(4, 16\), expected \(5, R\), \(1, 5, R\) or \(2, 5, R\)"),
        ((q, k, cos.expand(3, 5, 16), sin.expand(3, 5, 16)), {}, r"cos has shape \(3, 5, 16\), expected"),
        ((q, k, cos[0], sin[0]), {}, r"cos has shape \(16,\), expected"),
        ((q, k, cos[:, :7], sin[:, :7]), {}, "cos has a rotary dimension of 7, expected an even one from 2 to"),
        ((q, k, cos.repeat(1, 2), sin.repeat(1, 2)), {}, "cos has a rotary dimension of 32, expected"),
        ((q, k, cos, sin[:4]), {}, r"sin has shape \(4, 16\), expected \(5, 16\) to match cos"),
        ((q, k, cos, sin), {"layout": "bthd"}, r"k has shape \(2, 2, 5, 16\), expected \(2, 4, k_heads, 16\)"),
        ((q, k, cos, sin), {"layout": "BTHD"}, "layout is 'BTHD', expected one of bhtd, bthd"),
        ((q, k, cos, sin), {"style": "neox"}, "style is 'neox', expected one of half, interleaved, deepseek"),
        ((q, k, cos, sin), {"position_ids": ids[:4]}, r"position_ids has shape \(4,\), expected \(5,\), \(1, 5\) or"),
        ((q, k, cos.expand(2, 5, 16), sin.expand(2, 5, 16)), {"position_ids": ids}, "cos has shape .*, expected"),
    ]
    for function in (rooftile.rope, rooftile.rope_):
        before = q.clone(), k.clone()
        for args, options, message in wrong:
            with pytest.raises(ValueError, match=f"{function.__name__}: {message}"):
                function(*args, **options)
        assert torch.equal(q, before[0])
        assert torch.equal(k, before[1])


@pytest.mark.parametrize("function", [rooftile.rope, rooftile.rope_], ids=lambda f: f.__name__)
def test_a_part_of_each_head_is_turned_by_name_alone(function, device):
    """flash-attn's tables have one column for each pair: half as many as are expected here."""
    q, k, cos, sin = make(device)
    with pytest.raises(ValueError, match=f"{function.__name__}: cos has a last dimension of 8, expected head_dim=16; "):
        function(q, k, cos[:, :8], sin[:, :8])
    with pytest.raises(ValueError, match="cos has a last dimension of 16, expected rotary_dim=8"):
        function(q, k, cos, sin, rotary_dim=8)


def test_wrong_dtypes(device):
    q, k, cos, sin = make(device)
    with pytest.raises(TypeError, match=r"rope: k has dtype torch.bfloat16, expected torch.float32 to match q"):
        rooftile.rope(q, k.to(BF16), cos, sin)
    with pytest.raises(TypeError, match=r"rope: sin has dtype torch.bfloat16, expected torch.float32 to match cos"):
        rooftile.rope(q, k, cos, sin.to(BF16))
    with pytest.raises(TypeError, match=r"rope: position_ids has dtype torch.float32, expected int32 or int64"):
        rooftile.rope(q, k, cos, sin, position_ids=torch.zeros(5, device=device))


def test_in_place_q_and_k_are_not_one_memory(device):
    q, table = torch.randn(1, 2, 3, 8, device=device), torch.ones(3, 8, device=device)
    with pytest.raises(ValueError, match="rope_: k is the same memory as q"):
        rooftile.rope_(q, q, table, table)


def test_a_table_that_requires_grad_is_refused_before_anything_is_written(device):
    q, k = torch.randn(1, 2, 3, 8, device=device), torch.randn(1, 2, 3, 8, device=device)
    before = q.clone()
    cos, sin = torch.ones(3, 8, device=device, requires_grad=True), torch.ones(3, 8, device=device)
    with pytest.raises(ValueError, match="rope_: cos requires grad"):
        rooftile.rope_(q, k, cos, sin)
    assert torch.equal(q, before)
