"""The references against formulas written another way, and eager against the models' own code. No Triton needed."""

import subprocess
import sys

import pytest
import torch

from rooftile.reference import add_rms_norm, gated, rms_norm, rope

F64 = torch.float64


def normal(*shape):
    return torch.randn(*shape, dtype=F64)


def test_rms_norm_is_pytorchs():
    x, weight = normal(3, 5, 64), normal(64)
    expected = torch.nn.functional.rms_norm(x, (64,), weight + 1, eps=1e-5)
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, eps=1e-5, offset=1.0), expected)
    torch.testing.assert_close(rms_norm.rms_norm(x), torch.nn.functional.rms_norm(x, (64,), eps=1e-6))


def test_rms_norm_of_a_row_has_norm_one_for_each_element():
    y = rms_norm.rms_norm(100 * normal(7, 33), eps=0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(7, dtype=F64))


def test_add_rms_norm_is_the_sum_and_its_norm():
    x, residual, weight = normal(4, 32), normal(4, 32), normal(32)
    y, u = add_rms_norm.add_rms_norm(x, residual, weight, offset=0.5)
    torch.testing.assert_close(u, x + residual)
    torch.testing.assert_close(y, rms_norm.rms_norm(x + residual, weight, offset=0.5))


def table(tokens, rotary, *, interleaved):
    angle = normal(tokens, rotary // 2)
    both = angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)
    return angle, both.cos(), both.sin()


def pairs(x, style):
    """x's pairs as complex numbers."""
    if style == "half":
        return torch.complex(*x.chunk(2, dim=-1))
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())


def unpaired(z, style):
    if style == "interleaved":
        return torch.view_as_real(z).flatten(-2)
    return torch.cat((z.real, z.imag), dim=-1)


@pytest.mark.parametrize("style", ["half", "interleaved", "deepseek"])
def test_rope_multiplies_by_a_complex_number_of_modulus_one(style):
    q, k = normal(2, 3, 5, 16), normal(2, 1, 5, 16)
    angle, cos, sin = table(5, 12, interleaved=style == "interleaved")
    turn = torch.polar(torch.ones_like(angle), angle)
    for x, y in zip((q, k), rope.rope(q, k, cos, sin, style=style), strict=True):
        expected = unpaired(pairs(x[..., :12], style) * turn, style)
        torch.testing.assert_close(y, torch.cat((expected, x[..., 12:]), -1))


def test_rope_layouts_agree():
    q, k = normal(2, 3, 5, 16), normal(2, 1, 5, 16)
    _, cos, sin = table(5, 16, interleaved=False)
    expected = rope.rope(q, k, cos, sin)
    found = rope.rope(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None], layout="bthd")
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(f.transpose(1, 2), e)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5)])
def test_rope_position_ids_choose_rows(shape):
    q, k = normal(2, 3, 5, 16), normal(2, 1, 5, 16)
    _, cos, sin = table(40, 16, interleaved=False)
    ids = torch.randint(40, shape)
    expected = rope.rope(q, k, cos[ids], sin[ids])
    for tables in ((cos, sin), (cos[None], sin[None])):
        for e, f in zip(expected, rope.rope(q, k, *tables, position_ids=ids), strict=True):
            torch.testing.assert_close(f, e)


def test_rope_depends_on_the_distance_alone():
    """The property that the rotation is there for: q and k moved by the same number of tokens have the same product."""
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8)
    angle = torch.arange(20, dtype=F64)[:, None] * 10000 ** -(torch.arange(0, 8, 2, dtype=F64) / 8)
    cos, sin = angle.repeat(1, 2).cos(), angle.repeat(1, 2).sin()

    def product(q_at, k_at):
        turned_q = rope.rope(q, k, cos, sin, position_ids=torch.tensor([q_at]))[0]
        turned_k = rope.rope(q, k, cos, sin, position_ids=torch.tensor([k_at]))[1]
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(product(3, 1), product(19, 17))


def test_silu_mul_is_pytorchs():
    gate, up = normal(4, 32), normal(4, 32)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(gated.silu_mul(gate, up), expected)
    torch.testing.assert_close(gated.silu_mul_packed(torch.cat((gate, up), -1)), expected)
    torch.testing.assert_close(gated.silu_mul_packed_eager(torch.cat((gate, up), -1)), expected)


@pytest.mark.parametrize("rounding", ["llama", "gemma", "none"])
def test_eager_agrees_with_the_reference(rounding):
    x, residual, weight = (t.float() for t in (normal(4, 32), normal(4, 32), normal(32)))
    options = {"offset": 1.0, "rounding": rounding}
    torch.testing.assert_close(rms_norm.eager(x, weight, **options), rms_norm.rms_norm(x, weight, **options))
    found = add_rms_norm.eager(x, residual, weight, **options)
    torch.testing.assert_close(found, add_rms_norm.add_rms_norm(x, residual, weight, **options))


@pytest.mark.parametrize("style", ["half", "interleaved", "deepseek"])
def test_eager_rope_agrees_with_the_reference(style):
    q, k = normal(2, 3, 5, 16).float(), normal(2, 1, 5, 16).float()
    _, cos, sin = table(5, 12, interleaved=style == "interleaved")
    found = rope.eager(q, k, cos.float(), sin.float(), style=style)
    torch.testing.assert_close(found, rope.rope(q, k, cos.float(), sin.float(), style=style))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
class TestHuggingFace:
    """`eager` is bit-identical to what the models do."""

    @pytest.fixture(autouse=True)
    def _models(self):
        pytest.importorskip("transformers", reason="transformers is not installed")

    def test_llama_norm(self, dtype):
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
        torch.nn.init.normal_(norm.weight)
        x = normal(7, 64).to(dtype)
        assert torch.equal(norm(x), rms_norm.eager(x, norm.weight, eps=1e-5, rounding="llama"))

    def test_gemma_norm(self, dtype):
        from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

        norm = GemmaRMSNorm(64, eps=1e-5).to(dtype)
        torch.nn.init.normal_(norm.weight)
        x = normal(7, 64).to(dtype)
        assert torch.equal(norm(x), rms_norm.eager(x, norm.weight, eps=1e-5, offset=1.0, rounding="gemma"))

    def test_rope_half(self, dtype):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k, cos, sin = self.rope_inputs(dtype, interleaved=False)
        for a, b in zip(apply_rotary_pos_emb(q, k, cos, sin), rope.eager(q, k, cos, sin), strict=True):
            assert torch.equal(a, b)

    def test_rope_interleaved(self, dtype):
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb

        q, k, cos, sin = self.rope_inputs(dtype, interleaved=True)
        found = rope.eager(q, k, cos, sin, style="interleaved")
        for a, b in zip(apply_rotary_pos_emb(q, k, cos, sin), found, strict=True):
            assert torch.equal(a, b)

    def test_rope_deepseek(self, dtype):
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

        q, k, cos, sin = self.rope_inputs(dtype, interleaved=False)
        found = rope.eager(q, k, cos, sin, style="deepseek")
        for a, b in zip(apply_rotary_pos_emb_interleave(q, k, cos, sin), found, strict=True):
            torch.testing.assert_close(a, b)

    @staticmethod
    def rope_inputs(dtype, *, interleaved):
        _, cos, sin = table(5, 16, interleaved=interleaved)
        return tuple(t.to(dtype) for t in (normal(2, 3, 5, 16), normal(2, 1, 5, 16), cos[None], sin[None]))


def test_importing_leaves_triton_alone():
    """It fixes the mode of the process, which is to be decided where a kernel is first asked for."""
    code = "import sys, rooftile, rooftile.cli; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
