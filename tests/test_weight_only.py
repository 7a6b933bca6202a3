"""int8_linear and int4_linear: packing and quantising, what the configurations compute, layouts, errors."""

import dataclasses
import math
import weakref

import pytest
import torch
from helpers import BF16, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile import runtime, tuning
from rooftile.cases.check import relative_error
from rooftile.ops.gemm import choose, dispatch
from rooftile.ops.gemm import dequantize as dense
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem
from rooftile.ops.gemm.dequantize import dequantized
from rooftile.ops.gemm.weight_only import (
    int4_linear,
    int8_linear,
    pack_int4,
    quantize_int4,
    quantize_int8,
    unpack_int4,
)
from rooftile.reference import weight_only as reference

GROUPS = (32, 64, 128)
every_group = pytest.mark.parametrize("group", GROUPS)


def int4(n, k, group, device, scale=torch.float32):
    """Numbers, how they are packed, and scales."""
    q = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=device)
    return q, pack_int4(q, group), (torch.rand(n, k // group, device=device) + 0.5).to(scale)


def int8(n, k, device):
    return torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device), torch.rand(n, device=device) + 0.5


def exact(x, q, scale, group):
    return x.double() @ (q.double() * scale.double().repeat_interleave(group, 1)).T


# Packing


@given(group=st.sampled_from(GROUPS), blocks=st.integers(0, 5), n=st.integers(0, 4))
@settings(max_examples=20)
def test_unpacking_gives_back_what_was_packed(group, blocks, n):
    q = torch.randint(-8, 8, (n, blocks * group), dtype=torch.int8, device=runtime.default_device())
    packed = pack_int4(q, group)
    assert (packed.dtype, packed.shape) == (torch.uint8, (n, blocks * group // 2))
    assert torch.equal(unpack_int4(packed, group), q)
    assert torch.equal(pack_int4(unpack_int4(packed, group), group), packed)
    if blocks:
        assert torch.equal(reference.unpack(packed, group), q)


@every_group
def test_the_packed_layout_is_the_one_that_is_written_down(group, device):
    """A nibble is the number + 8; low nibbles are a block's first group, high ones its second."""
    q = torch.randint(-8, 8, (2, 3 * group), dtype=torch.int8, device=device)
    packed = pack_int4(q, group).int()
    assert torch.equal(packed[:, :group] & 15, q[:, :group].int() + 8)
    assert torch.equal(packed[:, :group] >> 4, q[:, group : 2 * group].int() + 8)
    # The last block is one group: its halves.
    assert torch.equal(packed[:, group:] & 15, q[:, 2 * group : 2 * group + group // 2].int() + 8)
    assert torch.equal(packed[:, group:] >> 4, q[:, 2 * group + group // 2 :].int() + 8)


@every_group
def test_quantising_rounds_to_nearest_and_ties_to_even(group, device):
    weight = torch.zeros(2, 2 * group, device=device)
    weight[0, :6] = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -3.5])
    packed, scale = quantize_int4(weight, group)
    assert scale[0, 0] == 1
    assert unpack_int4(packed, group)[0, :6].tolist() == [7, 0, 2, 2, 0, -4]
    weight[0, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -127.0, -3.5])
    q, scale = quantize_int8(weight)
    assert scale[0] == 1
    assert q[0, :6].tolist() == [127, 0, 2, 2, -127, -4]


@every_group
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_what_is_quantised_comes_back_within_half_a_step(dtype, group, device):
    weight = torch.randn(5, 3 * group, device=device).to(dtype)
    packed, scale = quantize_int4(weight, group)
    steps = scale.repeat_interleave(group, 1)
    assert ((unpack_int4(packed, group) * steps - weight.float()).abs() <= 0.5001 * steps).all()
    q, scale = quantize_int8(weight)
    assert ((q * scale[:, None] - weight.float()).abs() <= 0.5001 * scale[:, None]).all()
    assert int(q.abs().max()) == 127


def test_zeros_stay_zeros(device):
    weight, x = torch.zeros(16, 64, device=device), torch.randn(2, 64, device=device)
    q, scale = quantize_int8(weight)
    assert (q == 0).all()
    assert (scale == 2.0**-126).all()
    assert (int8_linear(x, q, scale) == 0).all()
    packed, scale = quantize_int4(weight, 32)
    assert (unpack_int4(packed, 32) == 0).all()
    assert (int4_linear(x, packed, scale) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_makes_its_row_nan_and_no_other(bad, device):
    weight, x = torch.randn(16, 64, device=device), torch.randn(2, 64, device=device)
    weight[3, 7] = bad
    for out in (int8_linear(x, *quantize_int8(weight)), int4_linear(x, *quantize_int4(weight, 32))):
        assert out.isnan().all(0).tolist() == [n == 3 for n in range(16)]


# Products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_every_number_of_8_bits_is_exact(dtype, device):
    """x picks one element of each row."""
    weight = torch.arange(-128, 128, device=device).to(torch.int8).view(16, 16)
    x = torch.eye(16, device=device, dtype=dtype)
    out = int8_linear(x, weight, torch.ones(16, device=device))
    assert torch.equal(out, weight.T.to(dtype))


@every_group
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_every_number_of_4_bits_is_exact_and_where_it_belongs(dtype, group, device):
    q = (torch.arange(16 * 3 * group, device=device).view(16, -1) * 7 % 16 - 8).to(torch.int8)
    x = torch.eye(3 * group, device=device, dtype=dtype)
    out = int4_linear(x, pack_int4(q, group), torch.ones(16, 3, device=device))
    assert torch.equal(out, q.T.to(dtype))


@every_group
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_groups_have_scales_of_their_own_and_may_be_odd_in_number(blocks, group, device):
    q, packed, scale = int4(33, blocks * group, group, device)
    x = torch.randn(3, blocks * group, device=device)
    assert relative_error(int4_linear(x, packed, scale), exact(x, q, scale, group)) < 1e-6


CONFIGS = [
    GemmConfig("skinny", 1, 16, 128, num_warps=4),
    GemmConfig("skinny", 4, 32, 128, num_warps=4, num_stages=2, slices=4),
    GemmConfig("skinny", 16, 64, 128, split_k=2, num_warps=2, slices=2),
    GemmConfig("skinny", 64, 128, 128, split_k=3, num_warps=8),
    GemmConfig("dequantize", 1, 8, 256, num_warps=4, num_stages=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_computes_the_same(config, device):
    x = torch.randn(19, 448, device=device)
    q, packed, scale = int4(70, 448, 64, device)
    residual = torch.randn(19, 70, device=device)
    out = int4_linear(x, packed, scale, residual=residual, config=config)
    assert relative_error(out, exact(x, q, scale, 64) + residual.double()) < 1e-6
    weight, scale = int8(70, 448, device)
    expected = reference.int8_linear(x.double(), weight, scale.double())
    assert relative_error(int8_linear(x, weight, scale, config=config), expected) < 1e-6


DENSE = (
    GemmConfig("dequantize", 1, 4, 32, num_warps=1, num_stages=1),
    GemmConfig("dequantize", 1, 1, 1024, num_warps=8, num_stages=1),
)


@pytest.mark.each_once
@pytest.mark.parametrize("config", DENSE, ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_a_dequantized_weight_is_what_pytorch_makes_of_it(dtype, config, device):
    if dtype == torch.float16:  # which the kernel is not chosen for; its numbers are right where they fit
        p = Problem(200, 70, 448, dtype, weight="int8")
        assert choose.can_implement(p, config, runtime.INTERPRETER)
    for group, blocks in ((32, 5), (64, 1), (128, 4), (128, 3)):
        q, packed, scale = int4(9, group * blocks, group, device)
        for s in (scale, scale.to(dtype)):
            expected = (q.double() * s.double().repeat_interleave(group, 1)).to(dtype)
            assert_same((dequantized(packed, s, dtype, q.shape[1], config),), (expected,))
    weight, scale = int8(9, 77, device)
    wide = torch.zeros(9, 99, dtype=torch.int8, device=device)
    wide[:, 3:80] = weight
    for of_8_bits in (weight, wide[:, 3:80], weight.float().to(torch.float8_e4m3fn)):
        expected = (of_8_bits.double() * scale.double()[:, None]).to(dtype)
        assert_same((dequantized(of_8_bits, scale, dtype, 77, config),), (expected,))


def test_the_weight_is_dequantized_for_many_rows_some_of_its_rows_at_a_time(device, monkeypatch):
    parts, made = [], []

    def dequantize(w, *args):
        assert all(part() is None for part in made), "there is memory for one at a time"
        weight = dequantized(w, *args)
        parts.append(w.shape[0])
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(dense, "dequantized", dequantize)
    monkeypatch.setattr(dense, "AT_A_TIME", 1)  # 256 rows at least
    n, k = 520, 96
    x, bias = torch.randn(2, 65, k, device=device).to(BF16), torch.randn(n, device=device).to(BF16)
    residual = torch.randn(2, 65, n, device=device).to(BF16)
    q, packed, scale = int4(n, k, 32, device)
    out = int4_linear(x, packed, scale, bias, residual=residual)
    assert relative_error(out, exact(x, q, scale, 32) + bias.double() + residual.double()) < 4e-3
    weight, scale = int8(n, k, device)
    out = int8_linear(x, weight, scale, bias, residual=residual)
    expected = reference.int8_linear(x.double(), weight, scale.double(), bias.double(), residual.double())
    assert relative_error(out, expected) < 4e-3
    assert parts == [256, 256, 8] * 2
    few, of_32, of_16 = x[:1], x.float(), x.half()  # the ordinary units multiply the second, the third may overflow
    for other in (few, of_32, of_16):
        int8_linear(other, weight, scale)
    assert len(parts) == 6


def test_parts_of_a_weight_are_whole_tiles_and_no_more_than_they_may_be():
    for n, k, expected in ((28672, 4096, 14336), (4096, 14336, 4096), (128256, 4096, 16128), (70, 1 << 30, 70)):
        step = dense.rows_at_a_time(n, k, 2)
        assert step == expected
        assert step == n or (step % 256 == 0 and step * k * 2 <= dense.AT_A_TIME)
    assert dense.rows_at_a_time(1000, 1 << 30, 2) == 256  # a tile, whatever it takes


def test_no_tma_store_into_columns_whose_row_stride_it_can_not_have(monkeypatch):
    """The weight is dequantized in parts, and each part's GEMM writes columns of the result."""
    launched = []
    monkeypatch.setattr(runtime, "target", lambda device: runtime.TARGETS["sm_90"])
    monkeypatch.setattr(dense, "dequantized", lambda w, *args: torch.empty(w.shape, dtype=BF16, device="meta"))
    monkeypatch.setattr(dispatch, "starter", lambda p, o, c: launched.append((o, c)) or (lambda *_: None))
    for n, kernel in ((49155, "tiled"), (49152, "hopper")):  # Granite 3's vocabulary, and Granite code's
        x, weight = torch.empty(256, 4096, dtype=BF16, device="meta"), torch.empty(n, 4096, device="meta")
        scale, out = torch.empty(n, device="meta"), torch.empty(256, n, dtype=BF16, device="meta")
        dense.launch(Operands(x, weight, out, weight_scale=scale), DENSE[0])
        assert sum(o.out.shape[1] for o, _ in launched) == n
        assert {c.kernel for o, c in launched if o.out.shape[1] % 8 == 0} == {kernel}
        assert all(o.out.stride(0) % 8 == 0 for o, c in launched if c.kernel == "hopper")
        launched.clear()
    p = Problem(256, 16384, 4096, BF16, out_aligned=False)
    refused = choose.can_implement(p, GemmConfig("hopper", 128, 256, 64, 8, 1, 8, 4), runtime.TARGETS["sm_90"])
    assert refused == "kernel 'hopper' takes operands and an output whose rows begin at multiples of 16 bytes"


@pytest.mark.gpu
@pytest.mark.parametrize("n", [49155, 49152])
def test_a_vocabulary_that_is_no_multiple_of_16_bytes(n, device):
    x = torch.randn(256, 4096, device=device).to(BF16)
    weight = torch.randint(-127, 128, (n, 4096), dtype=torch.int8, device=device)
    scale = torch.rand(n, device=device) / 4096
    expected = x.float() @ (weight.float() * scale[:, None]).T
    assert relative_error(int8_linear(x, weight, scale), expected) < 4e-3


def test_float16_keeps_numbers_whose_scale_it_has_not(device):
    """Scales of float32 multiply sums: numbers times them would be infinite, or lose their bits."""
    weight = torch.full((16, 64), 127, dtype=torch.int8, device=device)
    for value, scale in ((1e-4, 1000.0), (6e4, 2.0**-30)):
        x, scales = torch.full((130, 64), value, device=device).half(), torch.full((16,), scale, device=device)
        expected = reference.int8_linear(x.double(), weight, scales.double())
        assert relative_error(int8_linear(x, weight, scales), expected) < 5e-4
    config = dataclasses.replace(DENSE[0], block_k=64)
    with pytest.raises(ValueError, match="kernel 'dequantize' takes float32 and bfloat16; float16"):
        int8_linear(x, weight, scales, config=config)


def test_a_split_sum_leaves_its_counters_zero(device):
    """A second launch on the same counters, of another size, is right too."""
    config = GemmConfig("skinny", 4, 16, 64, split_k=4)
    for n in (40, 16, 64):
        x, (weight, scale) = torch.randn(3, 256, device=device), int8(n, 256, device)
        expected = reference.int8_linear(x.double(), weight, scale.double())
        first, second = (int8_linear(x, weight, scale, config=config) for _ in range(2))
        assert relative_error(first, expected) < 1e-6
        assert torch.equal(first, second)


def test_rows_of_a_larger_weight_are_taken_as_they_are(device):
    x = torch.randn(3, 128, device=device)
    weight, scale = int8(64, 128, device)
    assert_same((int8_linear(x, weight[8:40:2], scale[8:40:2]),), (int8_linear(x, weight, scale)[:, 8:40:2],))
    wide = torch.zeros(64, 200, dtype=torch.int8, device=device)
    wide[:, 3:131] = weight
    assert_same((int8_linear(x, wide[:, 3:131], scale),), (int8_linear(x, weight, scale),))
    assert_same((int8_linear(x, weight.T.contiguous().T, scale),), (int8_linear(x, weight, scale),))
    _, packed, scales = int4(64, 128, 32, device, BF16)
    out = int4_linear(x.to(BF16), packed, scales)
    assert_same((int4_linear(x.to(BF16), packed[8:40:2], scales[8:40:2]),), (out[:, 8:40:2],))


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_scales_of_16_bits_that_begin_in_the_middle_of_a_word(dtype, device):
    x = torch.randn(3, 128, device=device).to(dtype)
    _, packed, scale = int4(16, 128, 32, device, dtype)
    buffer = torch.full((16 * 4 + 3,), torch.nan, device=device, dtype=dtype)
    shifted = buffer[1:65].view(16, 4)
    shifted.copy_(scale)
    assert_same((int4_linear(x, packed, shifted),), (int4_linear(x, packed, scale),))


def test_one_row_of_scales_may_have_any_stride(device):
    """PyTorch counts one row as contiguous whatever its stride, and views an odd one as no words of two."""
    _, packed, scale = int4(1, 128, 64, device, BF16)
    x = torch.randn(1, 128, dtype=BF16, device=device)
    odd = torch.empty(1, 5, dtype=BF16, device=device)[:, :2].copy_(scale)
    assert (odd.stride(), odd.is_contiguous()) == ((5, 1), True)
    assert torch.equal(int4_linear(x, packed, odd), int4_linear(x, packed, scale))


def test_sums_are_not_rounded_before_the_bias(device):
    x = torch.full((1, 64), 1.0, device=device, dtype=BF16)
    weight = torch.full((16, 64), 127, dtype=torch.int8, device=device)
    bias = torch.full((16,), -8128.0, device=device)
    assert (int8_linear(x, weight, torch.ones(16, device=device), bias) == 0).all()
    weight[:, 0] = 120  # 8121 is no bfloat16
    assert (int8_linear(x, weight, torch.ones(16, device=device), bias) == -7).all()


def test_nothing_to_sum_gives_the_bias(device):
    bias = torch.randn(5, device=device)
    x, scale = torch.empty(3, 0, device=device), torch.ones(5, device=device)
    weight = torch.empty(5, 0, dtype=torch.int8, device=device)
    assert torch.equal(int8_linear(x, weight, scale, bias), bias.expand(3, 5))
    assert (int8_linear(x, weight, scale) == 0).all()
    packed, scale = weight.view(torch.uint8), torch.empty(5, 0, device=device)
    assert torch.equal(int4_linear(x, packed, scale, bias), bias.expand(3, 5))


# Errors

here_and_on_meta = pytest.mark.parametrize("device_type", ["here", "meta"])


@here_and_on_meta
def test_int8_arguments_that_do_not_fit(device_type, device):
    device = device if device_type == "here" else torch.device("meta")
    x = torch.empty(2, 64, device=device)
    weight, scale = torch.empty(16, 64, dtype=torch.int8, device=device), torch.empty(16, device=device)
    for wrong in (weight[:, :63], weight[0], weight[None]):
        with pytest.raises(ValueError, match=r"int8_linear: weight has shape .*, expected \(N, 64\) to match x's last"):
            int8_linear(x, wrong, scale)
    for wrong in (scale[:15], scale[None], scale[0]):
        with pytest.raises(
            ValueError,
            match=r"int8_linear: weight_scale has shape .*, expected \(16,\) or \(16, 1\) to match the weight's",
        ):
            int8_linear(x, weight, wrong)
    with pytest.raises(
        ValueError, match=r"int8_linear: bias has shape \(15,\), expected \(16,\) to match the weight's"
    ):
        int8_linear(x, weight, scale, scale[:15])
    with pytest.raises(ValueError, match=r"int8_linear: x has shape \(\), expected at least one dimension"):
        int8_linear(x[0, 0], weight, scale)
    with pytest.raises(TypeError, match=r"int8_linear: weight has dtype torch.uint8, expected torch.int8"):
        int8_linear(x, weight.view(torch.uint8), scale)
    with pytest.raises(TypeError, match=r"scale has dtype torch.float16, expected torch.bfloat16 to match x, or"):
        int8_linear(x.to(BF16), weight, scale.half())
    with pytest.raises(TypeError, match=r"x has dtype torch.int8, expected float32, float16 or bfloat16"):
        int8_linear(x.to(torch.int8), weight, scale)


@here_and_on_meta
def test_int4_arguments_that_do_not_fit(device_type, device):
    device = device if device_type == "here" else torch.device("meta")
    x = torch.empty(2, 192, device=device)
    packed, scale = torch.empty(16, 96, dtype=torch.uint8, device=device), torch.empty(16, 6, device=device)
    for k in (191, 190, 48, 1):
        with pytest.raises(
            ValueError, match=f"int4_linear: x's last dimension is {k}, expected a multiple of the group"
        ):
            int4_linear(x[:, :k], packed, scale)
    for wrong in (packed[:, :95], packed[0], packed[None]):
        with pytest.raises(ValueError, match=r"weight has shape .*, expected \(N, 96\): two elements a byte"):
            int4_linear(x, wrong, scale)
    for wrong in (scale[:, :5], scale[:15], scale[0], scale[:, :2]):
        with pytest.raises(
            ValueError, match=r"scale has shape .*, expected \(16, 6\) or \(16, 3\) for groups of 32 or 64"
        ):
            int4_linear(x, packed, wrong)
    with pytest.raises(ValueError, match=r"int4_linear: bias has shape \(1,\), expected \(16,\) to match the weight's"):
        int4_linear(x, packed, scale, scale[0, :1])
    with pytest.raises(TypeError, match=r"int4_linear: weight has dtype torch.int8, expected torch.uint8"):
        int4_linear(x, packed.view(torch.int8), scale)


def test_packing_refuses_what_it_can_not_pack(device):
    q = torch.zeros(4, 96, dtype=torch.int8, device=device)
    for group in (16, 0, 256, 48, None):
        for function, argument in ((pack_int4, q), (unpack_int4, q.view(torch.uint8)), (quantize_int4, q.float())):
            with pytest.raises(ValueError, match=f"{function.__name__}: group is {group}, expected 32, 64 or 128"):
                function(argument, group)
    with pytest.raises(ValueError, match="pack_int4: the last dimension is 96, expected a multiple of the group of 64"):
        pack_int4(q, 64)
    with pytest.raises(TypeError, match=r"pack_int4: q has dtype torch.int32, expected torch.int8"):
        pack_int4(q.int(), 32)
    with pytest.raises(TypeError, match=r"unpack_int4: packed has dtype torch.int8, expected torch.uint8"):
        unpack_int4(q, 32)
    for function in (quantize_int8, quantize_int4):
        with pytest.raises(TypeError, match=f"{function.__name__}: weight has dtype torch.int8, expected float32"):
            function(q)
        with pytest.raises(ValueError, match=rf"{function.__name__}: weight has shape \(96,\), expected two dim"):
            function(q[0].float())


def test_gradients_are_refused_by_name(device):
    x = torch.randn(2, 64, device=device)
    weight, scale = int8(16, 64, device)
    with pytest.raises(TypeError, match=r"int8_linear: weight_scale has dtype torch.float16, expected torch.float32$"):
        int8_linear(x, weight, scale.half())
    with pytest.raises(ValueError, match="int8_linear: x requires grad, but int8_linear has no derivative"):
        int8_linear(x.clone().requires_grad_(), weight, scale)
    with pytest.raises(ValueError, match="int8_linear: weight_scale requires grad"):
        int8_linear(x, weight, scale.clone().requires_grad_())
    with torch.no_grad():
        int8_linear(x.clone().requires_grad_(), weight, scale)


def test_configurations_that_can_not_be(device):
    good = GemmConfig("skinny", 4, 16, 64, slices=4)
    for field, value, message in (
        ("block_n", 24, "power of two"),
        ("num_warps", 0, "positive integer"),
        ("num_stages", True, "positive integer"),
        ("slices", 2, "multiple of num_warps=4"),
        ("prefetch", -2, "number of steps"),
    ):
        with pytest.raises(ValueError, match=f"GemmConfig: {field} is {value}.*{message}"):
            dataclasses.replace(good, **{field: value})
    _, packed, scale = int4(16, 128, 64, device)
    with pytest.raises(ValueError, match="int4_linear: config can't be launched: block_k is 64, expected 128, twice"):
        int4_linear(torch.randn(2, 128, device=device), packed, scale, config=good)
    p = Problem(4, 4096, 4096, BF16, weight="int4", group=64)
    for field, value, message in (
        ("split_k", 2, "split_k is 2, expected 1 for kernel 'dequantize'"),
        ("prefetch", -1, "prefetch is -1, expected None for kernel 'dequantize'"),
        ("block_k", 16, "block_k is 16, expected at least 32 for kernel 'dequantize' and a weight of 4 bits"),
        ("block_n", 1024, "more than 128 a thread"),
        ("num_stages", 2, "num_stages is 2, expected 1"),
    ):
        config = dataclasses.replace(DENSE[0], **{field: value})
        for target in (runtime.TARGETS["sm_80"], runtime.INTERPRETER):
            assert message in (choose.can_implement(p, config, target) or "")
    for change, message in (({"block_m": 3}, "expected a power of two"), ({"block_n": 8}, "expected at least 16 each")):
        config = dataclasses.replace(good, block_k=128, **change)
        assert message in choose.can_implement(p, config, runtime.TARGETS["sm_80"])


def test_a_configuration_that_was_measured_is_used(monkeypatch):
    asked = []

    def lookup(op, key, target):
        asked.append((op, key))
        return {"kernel": "skinny", "block_m": 4, "block_n": 32, "block_k": 64, "slices": 4, "num_warps": 4}

    monkeypatch.setattr(tuning, "lookup", lookup)
    choose.choose.cache_clear()
    found = choose.choose(Problem(3, 16, 192, torch.float32, weight="int8"), runtime.TARGETS["sm_90"])
    choose.choose.cache_clear()
    assert asked == [("int8_linear", "m4 n16 k192 float32")]
    assert found == GemmConfig("skinny", 4, 32, 64, num_warps=4, slices=4)


def test_the_configuration_of_every_size_can_be_used():
    for target in runtime.TARGETS.values():
        for dtype in (torch.float32, torch.float16, BF16):
            for group in (0, *GROUPS):
                for m in (1, 2, 5, 16, 33, 64, 65, 4096):
                    for n, k in ((4096, 4096), (128256, 4096), (4096, 14336), (16, 128)):
                        p = Problem(m, n, k, dtype, weight="int4" if group else "int8", group=group)
                        c = choose.choose(p, target)
                        assert choose.can_implement(p, c, target) is None, (target, group, m)
                        within = target.gluon and group != 32 and (dtype == BF16 or (dtype == torch.half and not group))
                        tiles = -(-m // 128) * -(-n // 64)
                        within &= 4 * tiles >= target.multiprocessors  # else too few SMs would work
                        assert (c.kernel == "hopper") is (m > 64 and within)
                        assert (c.kernel == "dequantize") is (m > 128 and dtype == BF16 and not within)
