"""int8_linear and int4_linear: configurations that are refused, and on a GPU all that can be chosen."""

import dataclasses
import math

import pytest
import torch
from helpers import BF16, assert_same
from test_offsets import STRIDE, far_rows
from test_weight_only import CONFIGS, GROUPS, exact, int4, int8
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from rooftile import launching, runtime
from rooftile.cases.check import relative_error
from rooftile.ops import weight_only
from rooftile.ops.weight_only import WeightOnlyConfig
from rooftile.reference import weight_only as reference

__all__ = ["far_rows"]  # a fixture
GPUS = [target for target in runtime.TARGETS.values() if target is not runtime.INTERPRETER]


@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.arch)
def test_several_blocks_to_a_warp_are_refused_where_they_were_wrong(target):
    for slices in (8, 16):
        config = WeightOnlyConfig(1, 16, 64, slices=slices, num_warps=4)
        why = weight_only.configs.refuses(config, 0, BF16, target)
        assert why.startswith(f"slices is {slices} with num_warps=4 and block_m=1: the compiler sums several blocks")
        for right in (dataclasses.replace(config, num_warps=slices), dataclasses.replace(config, block_m=2)):
            if right.num_warps * target.warp_size <= target.max_threads:
                assert weight_only.configs.refuses(right, 0, BF16, target) is None


DIRECT = [
    WeightOnlyConfig(8, 16, 128, slices=4, num_warps=4, num_stages=1, kernel="direct"),
    WeightOnlyConfig(8, 32, 128, slices=8, num_warps=8, num_stages=2, kernel="direct"),
    WeightOnlyConfig(16, 64, 128, slices=2, num_warps=4, num_stages=3, kernel="direct"),
    WeightOnlyConfig(16, 64, 128, slices=1, num_warps=4, num_stages=2, split_k=3, kernel="direct"),
    WeightOnlyConfig(32, 16, 128, slices=4, num_warps=4, num_stages=2, split_k=2, prefetch=1, kernel="direct"),
]


def test_the_direct_kernel_refuses_what_it_can_not_do(device):
    good, sm_90 = DIRECT[0], runtime.TARGETS["sm_90"]

    def why(config=good, group=64, dtype=BF16, target=sm_90, k=256, aligned=True):
        return weight_only.configs.refuses(config, group, dtype, target, k, aligned)

    assert why() is None
    assert why(k=192) == "kernel 'direct' takes a K that is a multiple of block_k, not 192 with block_k=128"
    assert why(aligned=False) == "kernel 'direct' takes a weight whose rows begin at multiples of 16 bytes"
    assert why(dtype=torch.float32) == "kernel 'direct' takes float16 and bfloat16, not torch.float32"
    assert "expected at most 256" in why(dataclasses.replace(good, block_n=256))
    for target in runtime.TARGETS.values():
        if not target.arch.startswith("sm_"):
            assert why(target=target) == f"kernel 'direct' is for NVIDIA's GPUs, not {target.arch}"
    for field, value, message in (
        ("slices", 8, "a divisor of num_warps=4"),
        ("block_n", 16, "32: 16 for each warp"),
        ("block_m", 4, "at least 8"),
        ("kernel", "other", "one of skinny, direct, row"),
    ):
        changed = dataclasses.replace(good, block_n=32, slices=2)
        with pytest.raises(ValueError, match=f"WeightOnlyConfig: {field} is .*{message}"):
            dataclasses.replace(changed, **{field: value})


def choice(m, n, k=4096, group=128, dtype=BF16, target=runtime.TARGETS["sm_90"], aligned=True):
    return weight_only.configs.config(m, n, k, group, dtype, target, aligned)


def test_the_kernel_that_is_chosen():
    """By sm_90's numbers, but for one row of x and 4 bits, which are by those of 8; M of 1, 8, 16 and 32, of a wide
    weight, a square one and one of few rows."""
    chosen = {
        (group, n): "".join(choice(m, n, group=group).kernel[0] for m in (1, 8, 16, 32))
        for group in (0, 64, 128)
        for n in (28672, 4096, 1024)
    }
    assert chosen == {
        (0, 28672): "ddds",
        (0, 4096): "rsss",
        (0, 1024): "rsss",
        (64, 28672): "ssss",
        (64, 4096): "rsss",
        (64, 1024): "rsss",
        (128, 28672): "ssds",
        (128, 4096): "rsds",
        (128, 1024): "rsss",
    }
    assert choice(16, 4096).prefetch == 1


@pytest.mark.parametrize("group", [0, 128])
def test_what_the_direct_kernel_does_not_take_goes_to_the_other(group):
    assert choice(16, 28672, group=group, dtype=torch.float16).kernel == "direct"
    for change in ({"aligned": False}, {"k": 4096 + 128}, {"dtype": torch.float32}):
        assert choice(16, 28672, group=group, **change).kernel == "skinny", change
    for target in runtime.TARGETS.values():
        if target.arch != "sm_90":
            assert choice(16, 1 << 17, group=group, target=target).kernel == "skinny", target


def test_without_gluon_the_other_kernel_is_chosen(monkeypatch):
    configs = weight_only.configs
    monkeypatch.setattr(configs, "module", lambda kernel: None)
    configs.config.cache_clear()
    assert choice(16, 28672).kernel == "skinny"
    configs.config.cache_clear()
    why = configs.refuses(DIRECT[0], 64, BF16, runtime.TARGETS["sm_90"], 256)
    assert why == "kernel 'direct' is written in Gluon, which this Triton has not"


@pytest.mark.parametrize(
    "config",
    [
        WeightOnlyConfig(8, 16, 128, slices=2, num_warps=2, kernel="direct"),
        WeightOnlyConfig(1, 16, 128, split_k=2),
        WeightOnlyConfig(1, 16, 128, prefetch=1),
    ],
    ids=["gluon", "counters", "early"],
)
def test_a_launch_that_can_not_be_traced_takes_no_counters(config, monkeypatch):
    """A compiler's tensors have no addresses, and counters would become constants of its graph."""

    def taken(*_):
        raise AssertionError("counters were taken")

    monkeypatch.setattr(runtime, "target", lambda device: runtime.TARGETS["sm_90"])
    monkeypatch.setattr(launching, "counters", taken)
    with FakeTensorMode(), FunctionalTensorMode():
        inputs = (torch.empty(1, 256, dtype=BF16), torch.empty(64, 256, dtype=torch.int8), torch.empty(64))
        assert all(isinstance(t, FunctionalTensor) for t in inputs)
        with pytest.raises(launching.Untraceable):
            weight_only._launch("int8_linear", *inputs, None, None, weight_only.configs.encode(config))


@pytest.mark.parametrize("m", [1, 3, 130])
@pytest.mark.parametrize("group", [0, 32])
def test_rows_of_the_weight_far_apart(group, m, far_rows, device):
    """By one row's kernel, by tiles, and dequantized first."""
    n, columns = 4, 96
    x = torch.randn(m, columns * (2 if group else 1), device=device).to(BF16)
    op = weight_only.int4_linear if group else weight_only.int8_linear
    near = torch.randint(-128, 128, (n, columns), dtype=torch.int8, device=device)
    far = far_rows(near.view(BF16), stride=STRIDE // 2).view(torch.int8)  # as many bytes as STRIDE counts
    scale = torch.rand((n, x.shape[1] // group) if group else (n,), device=device)
    dtype = torch.uint8 if group else torch.int8
    assert far.stride(0) == STRIDE
    assert_same((op(x, far.view(dtype), scale),), (op(x, near.view(dtype), scale),))


def test_a_configuration_survives_the_schema_of_an_op():
    for config in (*CONFIGS, *DIRECT):
        assert weight_only.configs.decode(weight_only.configs.encode(config)) == config
    assert weight_only.configs.decode("") is None


def check_launch(m, n, k, group, dtype, config, device):
    """The launch alone, into an output that is NaN."""
    x, bias, residual = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n,), (m, n)))
    if group:
        q, weight, scale = int4(n, k, group, device, dtype)
        expected = exact(x, q, scale, group)
    else:
        weight, scale = int8(n, k, device)
        expected = reference.int8_linear(x.double(), weight, scale.double())
    out = torch.full((m, n), math.nan, device=device, dtype=dtype)
    weight_only.configs.module(config.kernel).launch(x, weight, scale, bias, residual, out, config)
    error = relative_error(out, expected + bias.double() + residual.double())
    assert error < {torch.float32: 3e-6, torch.float16: 5e-4, BF16: 4e-3}[dtype], (m, n, k, group, dtype, config, error)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, *GROUPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_every_configuration_that_can_be_chosen_is_right(dtype, group, device):
    """A combination of slices, warps and block_m that the compiler gets wrong is wrong by as much as the result."""
    target, seen = runtime.target(device), set()
    for m in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        few, many = 16 * target.multiprocessors + 8, 32 * 4 * target.multiprocessors + 8
        for n, k in ((40, 1024), (few, 1536), (many, 512), (48, 7 * (group or 96))):
            config = weight_only.configs.config(m, n, k, group, dtype, target)
            if (config, k) not in seen:
                seen.add((config, k))
                check_launch(m, n, k, group, dtype, config, device)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, *GROUPS])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_the_direct_kernel_is_right(dtype, group, device):
    target, ran = runtime.target(device), 0
    for config in DIRECT:
        config = dataclasses.replace(config, block_k=2 * group or 128)
        for m, n, blocks in ((1, 72, 8), (3, 50, 11), (16, 128, 6), (20, 33, 5)):
            k = blocks * config.block_k
            if weight_only.configs.refuses(config, group, dtype, target, k) is None:
                check_launch(m, n, k, group, dtype, config, device)
                ran += 1
    if not ran:
        pytest.skip(f"kernel 'direct' does not run on {target.arch}")
