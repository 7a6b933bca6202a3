"""qk_norm_rope: the norm and the rotation as one, memory layouts, positions, dweight, offsets past 2^31, errors."""

import pytest
import test_offsets
import torch
from helpers import BF16, Calls, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.ops.qk_norm_rope import backward, forward, qk_norm_rope
from rooftile.reference import qk_norm_rope as reference

far_rows, no_plans_kept = test_offsets.far_rows, test_offsets.no_plans_kept

STYLES = ["half", "interleaved", "deepseek"]


def make(device, *, batch=2, tokens=5, q_heads=4, k_heads=2, head_dim=16, rotary=16, style="half", dtype=torch.float32):
    q = torch.randn(batch, q_heads, tokens, head_dim, device=device).to(dtype)
    k = torch.randn(batch, k_heads, tokens, head_dim, device=device).to(dtype)
    weights = (torch.randn(head_dim, device=device).to(dtype) for _ in range(2))
    angle = torch.randn(tokens, rotary // 2, device=device)
    angle = angle.repeat_interleave(2, -1) if style == "interleaved" else angle.repeat(1, 2)
    return q, k, *weights, angle.cos().to(dtype), angle.sin().to(dtype)


def gradients(inputs, output_grads, names=range(4), function=qk_norm_rope, **options):
    leaves = [t.detach().requires_grad_(i in names) for i, t in enumerate(inputs)]
    return torch.autograd.grad(function(*leaves, **options), [leaves[i] for i in names], output_grads)


@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 20),
    q_heads=st.integers(1, 20),
    k_heads=st.integers(0, 9),
    head_dim=st.integers(2, 40),
    rotary=st.integers(1, 20),
    style=st.sampled_from(STYLES),
    offset=st.sampled_from([0.0, 1.0, -0.25]),
    dtype=st.sampled_from([torch.float32, BF16]),
)
@settings(max_examples=20)
def test_any_shape(batch, tokens, q_heads, k_heads, head_dim, rotary, style, offset, dtype):
    sizes = {"head_dim": max(head_dim, 2 * rotary), "rotary": 2 * rotary, "q_heads": q_heads, "k_heads": k_heads}
    inputs = make(runtime.default_device(), batch=batch, tokens=tokens, style=style, dtype=dtype, **sizes)
    expected = reference.qk_norm_rope(*(t.double() for t in inputs), offset=offset, style=style)
    found = qk_norm_rope(*inputs, offset=offset, rotary_dim=2 * rotary, style=style)
    for y, x, ref in zip(found, inputs, expected, strict=False):
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert relative_error(y, ref) < torch.finfo(dtype).eps * (1 if dtype == BF16 else 4)


@pytest.mark.parametrize("style", STYLES)
def test_it_is_our_norm_and_our_rope(style, device):
    """Forward and backward, in float32: in 16 bits the two round twice."""
    inputs = make(device, head_dim=24, rotary=12, style=style)
    options = {"eps": 0.1, "offset": 0.5}

    def composed(q, k, q_weight, k_weight, cos, sin):
        q, k = rooftile.rms_norm(q, q_weight, **options), rooftile.rms_norm(k, k_weight, **options)
        return rooftile.rope(q, k, cos, sin, rotary_dim=cos.shape[-1], style=style)

    found, expected = qk_norm_rope(*inputs, rotary_dim=inputs[-1].shape[-1], style=style, **options), composed(*inputs)
    torch.testing.assert_close(found, expected)
    output_grads = [torch.randn_like(y) for y in expected]
    grads = gradients(inputs, output_grads, rotary_dim=12, style=style, **options)
    torch.testing.assert_close(grads, gradients(inputs, output_grads, function=composed))


@pytest.mark.parametrize("model", ["qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_eager_is_the_model_to_the_bit(model, dtype):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    modeling = getattr(getattr(transformers.models, model), f"modeling_{model}")
    norm_class = modeling.Qwen3RMSNorm if model == "qwen3" else modeling.Gemma3RMSNorm
    q, k, *weights, cos, sin = make("cpu", dtype=dtype)
    norms = [norm_class(16, eps=1e-5).to(dtype) for _ in weights]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.data.copy_(weight)
    expected = modeling.apply_rotary_pos_emb(norms[0](q), norms[1](k), cos[None], sin[None])
    found = reference.eager(q, k, *weights, cos, sin, eps=1e-5, offset=0.0 if model == "qwen3" else 1.0)
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_offset_is_added_in_float32(device):
    """1 + 2^-10 is 1 in bfloat16: added there, the weight would be lost."""
    q, k, *_, cos, sin = make(device, head_dim=64, rotary=16, dtype=BF16)
    weight = torch.full((64,), 2.0**-10, device=device, dtype=BF16)
    expected = qk_norm_rope(q, k, weight.float() + 1, weight.float() + 1, cos, sin, rotary_dim=16)
    assert_same(qk_norm_rope(q, k, weight, weight, cos, sin, offset=1.0, rotary_dim=16), expected)


def test_each_weight_is_its_own(device):
    """One may be missing, or of another dtype."""
    q, k, q_weight, k_weight, cos, sin = make(device, dtype=BF16)
    both = qk_norm_rope(q, k, q_weight, k_weight, cos, sin)
    ones = torch.ones_like(q_weight)
    assert_same(qk_norm_rope(q, k, None, k_weight, cos, sin), (qk_norm_rope(q, k, ones, None, cos, sin)[0], both[1]))
    assert_same(qk_norm_rope(q, k, q_weight.float(), k_weight, cos, sin), both)
    grads = gradients((q, k, q_weight.float(), k_weight, cos, sin), [torch.ones_like(y) for y in both])
    assert [g.dtype for g in grads] == [BF16, BF16, torch.float32, BF16]


class TestLayouts:
    """Heads lie in memory as a projection writes them; views of it are taken and given as they are."""

    @pytest.fixture
    def projected(self, device):
        """q and k as (B, T, H, D) views of one tensor that holds values too, and the rest of the arguments."""
        qkv = torch.randn(2, 5, 8, 16, device=device)
        return qkv[:, :, :4], qkv[:, :, 4:6], *make(device)[2:]

    @pytest.fixture
    def no_copies(self, monkeypatch):
        def refuse(self, *_):
            assert self.is_contiguous(), "copied"
            return self

        monkeypatch.setattr(torch.Tensor, "contiguous", refuse)

    @pytest.mark.usefixtures("no_copies")
    def test_both_layouts_agree_and_copy_nothing(self, projected):
        q, k, *others = projected
        found = qk_norm_rope(q, k, *others, layout="bthd")
        turned = qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), *others)
        assert_same(found, [y.transpose(1, 2) for y in turned])
        output_grads = [torch.randn_like(y) for y in found]
        grads = gradients(projected, output_grads, layout="bthd")
        transposed = (q.transpose(1, 2), k.transpose(1, 2), *others)
        dq, dk, *weights = gradients(transposed, [g.transpose(1, 2) for g in output_grads])
        assert_same(grads, (dq.transpose(1, 2), dk.transpose(1, 2), *weights))
        for y in (*found, *(y.transpose(1, 2) for y in turned), *grads[:2], dq.transpose(1, 2), dk.transpose(1, 2)):
            assert y.is_contiguous()  # as (B, T, H, D)

    @pytest.mark.usefixtures("no_copies")
    def test_heads_before_tokens_in_memory_stay_so(self, device):
        outputs = qk_norm_rope(*make(device))
        assert all(y.is_contiguous() for y in outputs)
        grads = gradients(make(device), [torch.randn_like(y) for y in outputs])
        assert all(g.is_contiguous() for g in grads)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_ids_with_strides(dtype, device):
    q, k, *weights, _, _ = make(device)
    *_, cos, sin = make(device, tokens=40)
    ids = torch.randint(40, (5, 2), device=device, dtype=dtype).T
    expected = qk_norm_rope(q, k, *weights, cos[ids.long()], sin[ids.long()])
    assert_same(qk_norm_rope(q, k, *weights, cos, sin, position_ids=ids), expected)


def test_a_position_outside_the_table_is_nan_and_reads_nothing(device):
    inputs = make(device, batch=1, head_dim=20)
    options = {"position_ids": torch.tensor([0, -1, 5, 4, 1 << 40], device=device), "rotary_dim": 16}
    outputs = qk_norm_rope(*inputs, **options)
    for y in outputs:
        assert torch.isfinite(y[:, :, [0, 3]]).all()
        assert torch.isfinite(y[..., 16:]).all()
        assert y[:, :, [1, 2, 4], :16].isnan().all()
    dq, dk, *weights = gradients(inputs, [torch.ones_like(y) for y in outputs], **options)
    for dx in (dq, dk):
        assert torch.isfinite(dx[:, :, [0, 3]]).all()
        assert dx[:, :, [1, 2, 4]].isnan().all()
    assert all(dw[:16].isnan().all() for dw in weights)


def test_without_eps_what_the_blocks_leave_out_adds_nothing(device):
    """0 / sqrt(0) is NaN: 5 tokens of 3 heads fill no block."""
    inputs = make(device, batch=1, q_heads=3, k_heads=1)
    output_grads = [torch.randn_like(y) for y in inputs[:2]]
    found = gradients(inputs, output_grads, eps=0.0)
    wide = [t.double() for t in inputs]
    expected = gradients(wide, [g.double() for g in output_grads], function=reference.qk_norm_rope, eps=0.0)
    torch.testing.assert_close([g.double() for g in found], list(expected), rtol=1e-5, atol=1e-5)


def test_large_and_small_heads_in_half_precision(device):
    """Squares of 6e4 overflow float16, squares of 1e-5 vanish in it: statistics are float32."""
    q, k, *others = make(device, head_dim=64, rotary=32)
    for scale in (1e4, 1e-4):
        inputs = [t.half() for t in (q * scale, k * scale, *others)]
        expected = reference.qk_norm_rope(*(t.double() for t in inputs), eps=1e-12)
        for y, ref in zip(qk_norm_rope(*inputs, eps=1e-12, rotary_dim=32), expected, strict=True):
            assert relative_error(y, ref) < 1e-3


def test_dweight_of_many_tokens_is_summed_in_float32(device):
    """A sum in bfloat16 would stop growing at 256 times its terms."""
    x = torch.ones(1, 16, 64, 8, device=device, dtype=BF16)
    weight = torch.ones(8, device=device, dtype=BF16)
    cos, sin = torch.ones(64, 8, device=device), torch.zeros(64, 8, device=device)
    _, _, *found = gradients((x, x, weight, weight, cos, sin), (x, x), eps=0.0)
    assert_same(found, [torch.full((8,), 1024.0, device=device, dtype=BF16)] * 2)


def test_frozen_parts_cost_nothing(device):
    inputs = make(device)
    for names in ([0], [3], [1, 2]):
        leaves = [t.clone().requires_grad_(i in names) for i, t in enumerate(inputs)]
        with Calls() as record:
            torch.autograd.backward(sum(y.sum() for y in qk_norm_rope(*leaves)))
        ((op, _, grads),) = record.calls[-1:]
        assert op._schema.name == "rooftile::qk_norm_rope_backward"
        assert [i for i, name in enumerate((0, 1, 2, 3)) if grads[i].numel()] == names


@pytest.mark.parametrize("heads", [1, 4])
def test_heads_in_blocks_of_any_size_give_the_same(heads, device, monkeypatch):
    """More heads than a program holds at once, and tiles of fewer tokens or of more."""
    inputs = make(device, tokens=3, q_heads=7, k_heads=2, head_dim=24)
    output_grads = [torch.randn_like(y) for y in inputs[:2]]
    expected = *qk_norm_rope(*inputs, rotary_dim=16), *gradients(inputs, output_grads, rotary_dim=16)
    monkeypatch.setattr(forward, "config", lambda *_: forward.QkNormRopeConfig(tokens=2, heads=heads, num_warps=4))
    forced = backward.QkNormRopeBackwardConfig(rows=heads, num_warps=4, programs_per_sm=1, stages=2)
    monkeypatch.setattr(backward, "config", lambda *_: forced)
    found = *qk_norm_rope(*inputs, rotary_dim=16), *gradients(inputs, output_grads, rotary_dim=16)
    torch.testing.assert_close(found, expected)


# Offsets past 2^31 elements: see test_offsets.py


def run(lay, device):
    q, k, dq, dk = (test_offsets.normal(device) for _ in range(4))
    weight = test_offsets.normal(device)[0, :24]
    tables = test_offsets.angles(device)
    results = []
    for place in (torch.clone, lay):
        inputs = (test_offsets.heads(place(q)), test_offsets.heads(k), weight, weight, *tables)
        output_grads = (test_offsets.heads(dq), test_offsets.heads(place(dk)))
        results.append((*qk_norm_rope(*inputs), *gradients(inputs, output_grads)))
    return results


def test_rows_past_two_to_the_31_are_right(far_rows, device):
    near, far = run(far_rows, device)
    assert_same(far, near)


@pytest.mark.usefixtures("no_plans_kept")
@pytest.mark.parametrize("file", [forward, backward], ids=["forward", "backward"])
def test_a_kernel_with_offsets_of_32_bits_is_caught(file, far_rows, device, monkeypatch, tmp_path):
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("on a GPU a wild access ends the process: the interpreter alone can show it")
    from rooftile.interpreter.memory import OutOfBoundsError

    test_offsets.use_kernels_without_int64(file, monkeypatch, tmp_path)
    near = run(torch.clone, device)[0]
    assert all(torch.isfinite(t).all() for t in near)  # sound where offsets are small
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        run(far_rows, device)


# What is refused


def test_tables_that_require_grad_are_refused(device):
    for index in (4, 5):
        inputs = list(make(device))
        inputs[index].requires_grad_()
        with pytest.raises(ValueError, match=r"qk_norm_rope: (cos|sin) requires grad, which is not supported; detach"):
            qk_norm_rope(*inputs)


def test_wrong_shapes(device):
    names = ("q", "k", "q_weight", "k_weight", "cos", "sin")
    given = dict(zip(names, make(device), strict=True))
    q, k, weight, _, cos, sin = given.values()
    ids = torch.arange(5, device=device)
    long = torch.empty(1, 1, 5, 520, device=device)
    wrong = [
        ({"q": q[0]}, r"q has shape \(4, 5, 16\), expected 4 dimensions bhtd"),
        ({"q": long, "k": long, "rotary_dim": 16}, "q has a head_dim of 520, expected at most 512"),
        ({"k": k[:1]}, r"k has shape \(1, 2, 5, 16\), expected \(2, k_heads, 5, 16\) to match q in bhtd"),
        ({"k": k[..., :8]}, r"k has shape \(2, 2, 5, 8\), expected"),
        ({"q_weight": weight[:8]}, r"q_weight has shape \(8,\), expected \(16,\) to match the head_dim"),
        ({"k_weight": weight[None]}, r"k_weight has shape \(1, 16\), expected \(16,\) to match the head_dim"),
        ({"q_weight": weight[0]}, r"q_weight has shape \(\), expected \(16,\)"),
        ({"cos": cos[:4], "sin": sin[:4]}, r"cos has shape \(4, 16\), expected \(5, R\), \(1, 5, R\) or \(2, 5, R\)"),
        ({"cos": cos[:, :7], "sin": sin[:, :7]}, "cos has a rotary dimension of 7, expected an even one from 2 to"),
        ({"cos": cos.repeat(1, 2), "sin": sin.repeat(1, 2)}, "cos has a rotary dimension of 32, expected"),
        ({"sin": sin[:4]}, r"sin has shape \(4, 16\), expected \(5, 16\) to match cos"),
        ({"position_ids": ids[:4]}, r"position_ids has shape \(4,\), expected \(5,\), \(1, 5\) or"),
        ({"layout": "bthd"}, r"k has shape \(2, 2, 5, 16\), expected \(2, 4, k_heads, 16\)"),
        ({"layout": "BTHD"}, "layout is 'BTHD', expected one of bhtd, bthd"),
        ({"style": "neox"}, "style is 'neox', expected one of half, interleaved, deepseek"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=f"qk_norm_rope: {message}"):
            qk_norm_rope(**{**given, **changed})


def test_wrong_dtypes(device):
    q, k, *others = make(device)
    with pytest.raises(TypeError, match=r"qk_norm_rope: k has dtype torch.bfloat16, expected torch.float32 to match q"):
        qk_norm_rope(q, k.to(BF16), *others)
    with pytest.raises(TypeError, match=r"qk_norm_rope: sin has dtype torch.bfloat16, expected torch.float32 to match"):
        qk_norm_rope(q, k, *others[:3], others[3].to(BF16))
    with pytest.raises(TypeError, match=r"qk_norm_rope: position_ids has dtype torch.float32, expected int32 or int64"):
        qk_norm_rope(q, k, *others, position_ids=torch.zeros(5, device=device))
    with pytest.raises(TypeError, match="qk_norm_rope: eps is None, expected a number"):
        qk_norm_rope(q, k, *others, eps=None)
    with pytest.raises(TypeError, match="qk_norm_rope: offset is a Tensor, expected a number"):
        qk_norm_rope(q, k, *others, offset=torch.tensor(1.0))
    weight, *tables = others[1:]
    for name, weights in (("q_weight", (None, weight)), ("k_weight", (weight, None))):
        with pytest.raises(
            ValueError, match=rf"qk_norm_rope: offset is 1\.0 and {name} is None, expected an offset of 0"
        ):
            qk_norm_rope(q, k, *weights, *tables, offset=1.0)


def test_the_backward_op_refuses_gradients_that_do_not_match(device):
    q, k, *others = make(device)
    mode = (None, 1e-6, 0.0, "half", "bhtd", True, True, True, True)
    for q_dy, k_dy, error, message in (
        (q[:1], k, ValueError, r"q_dy has shape \(1, 4, 5, 16\), expected \(2, 4, 5, 16\) to match q"),
        (q, k.to(BF16), TypeError, "k_dy has dtype torch.bfloat16, expected torch.float32 to match k"),
        (q, None, ValueError, "k_dy is None, expected the gradient"),
    ):
        with pytest.raises(error, match=f"qk_norm_rope_backward: {message}"):
            torch.ops.rooftile.qk_norm_rope_backward(q, k, q_dy, k_dy, *others, *mode)
