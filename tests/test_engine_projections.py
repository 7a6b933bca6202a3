"""The products of the engine's layers, dense and quantized."""

import itertools

import pytest
import torch
from helpers import BF16, assert_same

from rooftile import launching, runtime
from rooftile.engine import projections
from rooftile.engine.projections import Dense, Fp8, Fp8Block, Int4, Int8, Projection, kind_of
from rooftile.ops.gemm.qkv_rope_cache import choose_kernel
from rooftile.ops.gemm.weight_only import unpack_int4
from rooftile.primitives.paging import Cache
from rooftile.quantize import Quantize


def dense_of(product):
    """The weight that a product multiplies by, in float32."""
    if isinstance(product, Int4):
        numbers = unpack_int4(product.weight, product.group).float()
        scale = product.scale.float().repeat_interleave(product.group, dim=1)
        return (numbers + scale[..., 1]) * scale[..., 0] if product.offsets else numbers * scale
    if isinstance(product, Dense):
        return product.weight.float()
    if isinstance(product, Fp8Block):
        return Quantize(per="block").dequantize(product.weight, product.scale)
    return product.weight.float() * product.scale.reshape(-1, 1)


def tolerance(kind, rows):
    """What a chain of them may lose: float32 sums in another order; and in fp8 three bits of several rows of x, as in
    fp8_linear's case."""
    return 5e-2 if kind is Fp8 and rows > 1 else 1e-6


@pytest.mark.parametrize("kind", [Dense, Fp8, Int8, Int4])
class TestProducts:
    def error(self, actual, expected):
        return float((actual - expected).norm() / expected.norm())

    @pytest.mark.parametrize("rows", [1, 5])
    def test_as_a_layer_uses_them(self, kind, rows, device):
        """With a residual, gated, with a residual, and behind a norm."""
        k, inner = 96, 64
        o = kind.of(torch.randn(k, inner, device=device) / 8, torch.randn(k, device=device))
        gate_up = kind.of(torch.randn(2 * inner, k, device=device) / 8)
        down = kind.of(torch.randn(k, inner, device=device) / 8)
        last = kind.of(torch.randn(40, k, device=device) / 8, torch.randn(40, device=device))
        x, a = torch.randn(rows, k, device=device), torch.randn(rows, inner, device=device)
        weight, eps = torch.rand(k, device=device) + 0.5, 1e-2

        def norm(s):
            return s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) * weight

        s = x + a @ dense_of(o).T + o.bias
        gate, up = (norm(s) @ dense_of(gate_up).T).chunk(2, -1)
        t = s + (torch.nn.functional.silu(gate) * up) @ dense_of(down).T

        summed = o(a, residual=x)
        assert self.error(summed, s) < tolerance(kind, rows)
        summed = down(gate_up.gated(summed, weight, eps), residual=summed)
        assert self.error(summed, t) < tolerance(kind, rows)
        out = last.normed(summed, weight, eps)
        assert self.error(out, norm(t) @ dense_of(last).T + last.bias) < tolerance(kind, rows)
        assert out.dtype == x.dtype

    @pytest.mark.each_once
    @pytest.mark.parametrize("rows", [1, 5])
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    def test_gates_of_inputs_with_a_norm_and_without(self, kind, rows, activation, device):
        k, inner = 96, 64
        gate_up = kind.of(torch.randn(2 * inner, k, device=device) / 8)
        down = kind.of(torch.randn(k, inner, device=device) / 8)
        x, weight = torch.randn(rows, k, device=device), torch.rand(k, device=device) + 0.5
        for norm in (None, weight):
            y = x if norm is None else torch.nn.functional.rms_norm(x, (k,), norm, 1e-2)
            gate, up = (y @ dense_of(gate_up).T).chunk(2, -1)
            gelu = torch.nn.functional.gelu(gate, approximate="tanh")
            act = torch.nn.functional.silu(gate) if activation == "silu" else gelu
            out = down(gate_up.gated(x, norm, 1e-2, activation))
            assert self.error(out, (act * up) @ dense_of(down).T) < tolerance(kind, rows)

    @pytest.mark.parametrize("rows", [1, 2])
    def test_into_a_cache_at_once_or_in_two_steps(self, kind, rows, device, monkeypatch):
        product = kind.of(torch.randn(4 * 16, 96, device=device) / 8, torch.randn(4 * 16, device=device))
        x, weight = torch.randn(rows, 96, device=device), torch.rand(96, device=device)
        cos, sin = (torch.randn(8, 16, device=device) for _ in range(2))
        found, launched = [], []
        launch = launching.Launch
        monkeypatch.setattr(
            launching, "Launch", lambda plan, *args: launched.append(plan.kernel.__name__) or launch(plan, *args)
        )
        for at_once in (True, False):
            launching.forget()
            launched.clear()
            if not at_once:
                monkeypatch.setattr(projections, "is_one_kernel", lambda *_: False)
            cache = {n: torch.zeros(rows, 8, 1, 16, device=device) for n in ("k_cache", "v_cache")}
            cache["layout"] = "bthd"
            cache["starts"] = torch.tensor([5, 2][:rows], dtype=torch.int32, device=device)
            q = product.into_cache(x, weight, 1e-2, cos, sin, **cache)
            found.append((q, cache["k_cache"], cache["v_cache"]))
            one_kernel = at_once and rows == 1
            assert (launched == ["gemv_kernel"]) is one_kernel
            assert ("rope_kernel" in launched) is not one_kernel
        assert found[0][0].shape == (rows, 1, 2, 16)
        assert found[0][2][0, 5].any()
        assert_same(*found)

    def test_bytes_and_rows(self, kind, device):
        weight = torch.randn(8, 64, device=device)
        product = kind.of(weight.clone(), torch.randn(8, device=device))
        of_weight = {Dense: 4 * 512, Fp8: 512 + 32, Int8: 512 + 32, Int4: 256 + 32}[kind]
        assert product.nbytes == of_weight + 32
        product.fill(4, -weight[4:])
        torch.testing.assert_close(dense_of(product)[4:], -dense_of(kind.of(weight))[4:])
        for rows, first in ((weight[:, :32], 0), (weight, 1)):
            with pytest.raises(ValueError, match=r"fill: rows .* expected to fit \(8, 64\)"):
                product.fill(first, rows)


SIZES = [(6144, 4096, 128), (4608, 3584, 128), (1152, 896, 64), (10240, 8192, 128), (12288, 8200, 128), (64, 96, 16)]


@pytest.mark.parametrize("target", [*runtime.TARGETS.values(), runtime.INTERPRETER], ids=lambda t: t.arch)
@pytest.mark.parametrize("kind", [Dense, Fp8, Int8, Int4])
def test_what_is_said_to_be_one_kernel_is_what_the_op_chooses(kind, target, monkeypatch):
    """Of the products of q, k and v of Llama-3-8B, Qwen2.5-7B and 0.5B and others, as each GPU sees them."""
    monkeypatch.setattr(runtime, "target", lambda _: target)
    dtypes = [BF16, torch.float16, torch.float32]
    caches = [None, torch.int8, torch.float8_e4m3fn]  # None: of the stream's dtype
    for (n, k, head_dim), dtype in itertools.product(SIZES, dtypes):
        if kind is Int4 and Int4.group_of(k) is None:
            continue
        product = kind(n, k, bias=False, dtype=dtype, device=torch.device("meta"))
        for rows, cache in itertools.product((1, 2), (c or dtype for c in caches)):
            said = projections.is_one_kernel(product, rows, cache)
            x, cos = torch.empty(rows, 1, k, dtype=dtype, device="meta"), torch.empty(64, head_dim, device="meta")
            cells = torch.empty(rows, 64, 1, head_dim, dtype=cache, device="meta")
            lengths = torch.empty(rows, dtype=torch.int32, device="meta")
            place = Cache(cells, cells, lengths, None, None, None, None, "", "bthd")
            scale = None if kind is Dense else product.scale
            chosen = choose_kernel(x, product.weight, scale, cos, "half", place)
            assert said is (chosen is not None), (n, k, dtype, rows, cache, chosen)
            assert said is (rows == 1 and cache == dtype)


def test_int4_takes_the_largest_group_and_keeps_lm_head_in_8_bits():
    assert [Int4.group_of(k) for k in (4096, 192, 96, 80)] == [128, 64, 32, None]
    with pytest.raises(ValueError, match=r"int4: a weight has 80 columns, expected a multiple of 32"):
        Int4.of(torch.zeros(4, 80))
    assert kind_of("int4", lm_head=True) is Int8
    assert kind_of("fp8", lm_head=True) is Fp8
    assert issubclass(kind_of(None), Projection)
