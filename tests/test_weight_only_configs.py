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
from rooftile.ops.gemm import choose, dispatch, weight_only
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem, decode
from rooftile.reference import weight_only as reference

__all__ = ["far_rows"]  # a fixture
GPUS = [target for target in runtime.TARGETS.values() if target is not runtime.INTERPRETER]


def problem(m, n, k=4096, group=128, dtype=BF16, aligned=True, fp8=False):
    weight = "fp8" if fp8 else "int4" if group else "int8"
    return Problem(m, n, k, dtype, w_aligned=aligned, weight=weight, group=group)


def refused(config, group, dtype, target, k=4096, aligned=True, *, m=1, fp8=False):
    return choose.can_implement(problem(m, 4096, k, group, dtype, aligned, fp8), config, target)


@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.arch)
def test_several_blocks_to_a_warp_are_refused_where_they_were_wrong(target):
    for slices in (8, 16):
        config = GemmConfig("skinny", 1, 16, 64, num_warps=4, slices=slices)
        why = refused(config, 0, BF16, target)
        assert why.startswith(f"slices is {slices} with num_warps=4 and block_m=1: the compiler sums several blocks")
        for right in (dataclasses.replace(config, num_warps=slices), dataclasses.replace(config, block_m=2)):
            if right.num_warps * target.warp_size <= target.max_threads:
                assert refused(right, 0, BF16, target) is None


def choice(m, n, k=4096, group=128, dtype=BF16, target=runtime.TARGETS["sm_90"], aligned=True):
    return choose.choose(problem(m, n, k, group, dtype, aligned), target)


def test_the_kernel_that_is_chosen():
    """On sm_90: of one row of x in digits, but for groups of 64; of M of 8, 16 and 32 in tiles."""
    letters = {"skinny": "s", "gemv_imma": "x", "gemv": "r"}
    for n in (28672, 4096, 1024):
        for group, expected in ((0, "xsss"), (64, "rsss"), (128, "xsss")):
            kernels = "".join(letters[choice(m, n, group=group).kernel] for m in (1, 8, 16, 32))
            assert kernels == expected, (n, group)


def digits(block_n, slices, split_k=1, warps=8, stages=2, prefetch=-1, block_k=256):
    return GemmConfig(
        "gemv_imma", 1, block_n, block_k, split_k=split_k, num_warps=warps, num_stages=stages, slices=slices,
        prefetch=prefetch,
    )  # fmt: skip


DIGITS = [
    digits(16, 8),
    digits(32, 8, prefetch=0),
    digits(128, 1, stages=3, prefetch=0),
    digits(64, 2, split_k=3),
    digits(128, 1, split_k=4, stages=3, prefetch=0),
    digits(32, 2, warps=2, stages=1),
    digits(64, 4, warps=16, split_k=2, prefetch=0),
]


def test_the_digits_kernel_refuses_what_it_can_not_do():
    good, sm_90 = DIGITS[0], runtime.TARGETS["sm_90"]

    def why(config=good, group=128, dtype=BF16, target=sm_90, k=4096, **more):
        return refused(config, group, dtype, target, k, **more)

    assert all(why(config) is None for config in DIGITS)
    assert why(m=2) == "kernel 'gemv_imma' takes one row of x, not 2"
    assert why(digits(16, 8, prefetch=1)) == "prefetch is 1, expected -1 or 0 for kernel 'gemv_imma'"
    assert why(group=64) == "kernel 'gemv_imma' takes groups of 128, not of 64"
    assert why(group=0) == "block_k is 256, expected 128 for kernel 'gemv_imma'"
    assert why(dtype=torch.float32) == "kernel 'gemv_imma' takes float16 and bfloat16, not torch.float32"
    assert why(k=4224) == "kernel 'gemv_imma' takes a K that is a multiple of block_k, not 4224 with block_k=256"
    assert why(aligned=False) == (
        "kernel 'gemv_imma' takes a weight whose rows are contiguous and begin at multiples of 16 bytes"
    )
    assert why(digits(128, 1), k=256 * 33) == "slices x split_k is 1: a warp has 33 blocks, at most 32"
    assert why(k=1 << 16).startswith("x's digits take ")
    assert "expected at most 128" in why(digits(256, 8))
    for target in runtime.TARGETS.values():
        if not target.arch.startswith("sm_"):
            assert why(target=target) == f"kernel 'gemv_imma' is for NVIDIA's GPUs, not {target.arch}"
    for field, value, message in (
        ("slices", 16, "a divisor of num_warps=8"),
        ("block_n", 8, "16: 16 for each warp"),
    ):
        with pytest.raises(ValueError, match=f"GemmConfig: {field} is {value}, expected {message}"):
            dataclasses.replace(good, **{field: value})


@pytest.mark.parametrize("k", [1024, 3584, 4096, 8192, 14336, 18944, 28672, 53248])
@pytest.mark.parametrize("group", [0, 128])
def test_one_row_goes_to_digits_where_they_were_the_fastest(group, k):
    """What is chosen can be launched; of long rows of 8 bits other kernels were faster, and of 4 bits a program has a
    part of them."""
    for n in (16, 1000, 4096, 6144, 28672, 151936):
        c = choice(1, n, k=k, group=group)
        assert (c.kernel == "gemv_imma") == (bool(group) or k < 8192), (n, k, c)
        assert refused(c, group, BF16, runtime.TARGETS["sm_90"], k) is None
        if c.kernel == "gemv_imma" and k >= 8192 and n >= 4096:
            assert c.split_k > 1 or n > 28671
    for change in ({"aligned": False}, {"k": k + 64}, {"dtype": torch.float32}, {"target": runtime.TARGETS["sm_80"]}):
        assert choice(1, 4096, **{"k": k, "group": group, **change}).kernel != "gemv_imma"


def test_without_gluon_the_other_kernel_is_chosen(monkeypatch):
    imported = choose._imported
    monkeypatch.setattr(choose, "_imported", lambda name: None if name == "gemv_imma" else imported(name))
    choose.choose.cache_clear()
    choose.can_implement.cache_clear()
    assert choice(1, 4096).kernel == "gemv"
    why = refused(DIGITS[0], 128, BF16, runtime.TARGETS["sm_90"])
    assert why == "kernel 'gemv_imma' is written in Gluon, which this Triton has not"
    choose.choose.cache_clear()
    choose.can_implement.cache_clear()


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig("gemv_imma", 1, 16, 128, num_warps=2, slices=2),
        GemmConfig("skinny", 1, 16, 128, split_k=2, slices=4),
        GemmConfig("skinny", 1, 16, 128, slices=4, prefetch=1),
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
            weight_only._prepare("int8_linear", *inputs, None, None, config.encoded)(*inputs, None, None)


@pytest.mark.parametrize(("m", "columns"), [(1, 96), (1, 1024), (3, 96), (130, 96)])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_rows_of_the_weight_far_apart(group, m, columns, far_rows, device):
    """By one row's kernels, on sm_90 in digits too, by tiles, and dequantized first."""
    n, columns = 4, columns if columns > 96 or group < 128 else 128
    x = torch.randn(m, columns * (2 if group else 1), device=device).to(BF16)
    op = weight_only.int4_linear if group else weight_only.int8_linear
    near = torch.randint(-128, 128, (n, columns), dtype=torch.int8, device=device)
    far = far_rows(near.view(BF16), stride=STRIDE // 2).view(torch.int8)  # as many bytes as STRIDE counts
    scale = torch.rand((n, x.shape[1] // group) if group else (n,), device=device)
    dtype = torch.uint8 if group else torch.int8
    assert far.stride(0) == STRIDE
    assert_same((op(x, far.view(dtype), scale),), (op(x, near.view(dtype), scale),))


def test_a_configuration_survives_the_schema_of_an_op():
    for config in (*CONFIGS, *DIGITS, GemmConfig("hopper", 128, 96, 64, 4, 1, 8, 7, True)):
        assert decode(config.encoded) == config
    assert decode(()) is None


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
    o = Operands(x, weight, out, bias, residual, weight_scale=scale)
    p = dispatch.problem_of(o)
    assert choose.can_implement(p, config, runtime.target(device)) is None
    dispatch.starter(p, o, config)(x, weight, out, bias, residual, None, None, scale)
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
        for n, k in ((40, 1024), (few, 1536), (many, 512), (48, 7 * (group or 96)), (1000, 9216), (6000, 1280)):
            config = choose.choose(problem(m, n, k, group, dtype), target)
            if (config, k) not in seen:
                seen.add((config, k))
                check_launch(m, n, k, group, dtype, config, device)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_the_digits_kernel_is_right(dtype, group, device):
    target = runtime.target(device)
    if not target.arch.startswith("sm_"):
        pytest.skip(f"kernel 'gemv_imma' does not run on {target.arch}")
    for config in DIGITS:
        config = dataclasses.replace(config, block_k=2 * group or 128)
        for n, blocks in ((72, 8), (50, 11), (1000, 24), (33, 4)):
            check_launch(1, n, blocks * config.block_k, group, dtype, config, device)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, 128])
def test_digits_keep_what_is_small_beside_what_is_large(group, device):
    """x has 22 bits of the largest number of its 128: beside one of 2^12 those of some 1 keep ten, more than bfloat16
    has. The large one is multiplied by zero."""
    n, k = 64, 1024
    x = torch.randn(1, k, device=device).to(BF16)
    x[0, 5] = 2.0**12
    if group:
        q, weight, scale = int4(n, k, group, device, BF16)
        q[:, 5] = 0
        weight = weight_only.pack_int4(q, group)
        expected = exact(x, q, scale, group)
        op = weight_only.int4_linear
    else:
        weight, scale = int8(n, k, device)
        weight[:, 5] = 0
        expected = reference.int8_linear(x.double(), weight, scale.double())
        op = weight_only.int8_linear
    out = op(x, weight, scale, config=digits(16, 2, warps=2, block_k=2 * group or 128))
    # 127 numbers beside it are rounded to 2^-9 at most, by half of that; all else of it is the result's own rounding.
    assert relative_error(out, expected) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_digits_of_what_is_not_finite_are_not_finite(value, device):
    weight, scale = int8(64, 1024, device)
    x = torch.ones(1, 1024, device=device, dtype=BF16)
    x[0, 700] = value
    out = weight_only.int8_linear(x, weight, scale, config=digits(16, 2, warps=2, block_k=128))
    assert not out.isfinite().any()
    small = torch.full((1, 1024), 1e-38, device=device, dtype=BF16)  # whose digits are zeros
    out = weight_only.int8_linear(small, weight, scale, config=digits(16, 2, warps=2, block_k=128))
    assert out.isfinite().all()
    assert out.abs().max() < 1e-30
