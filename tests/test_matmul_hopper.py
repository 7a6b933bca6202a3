"""The product of sm_90 in the forms that the choice of a kernel, or a tuned table, may give it."""

import dataclasses
import itertools

import pytest
import torch
from helpers import BF16
from test_matmul import assert_close, drawn, truth

from rooftile import runtime
from rooftile.bench.tune.matmul import matmul_space
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig, Problem, decode
from rooftile.ops.gemm.linear import gated_linear, linear

HOPPER = (
    GemmConfig("hopper", 128, 256, 64, num_warps=8, num_stages=4),
    GemmConfig("hopper", 256, 128, 64, num_warps=8, num_stages=4),
    GemmConfig("hopper", 192, 128, 64, num_warps=12, num_stages=4),
    GemmConfig("hopper", 64, 128, 64, num_warps=4, num_stages=4),
    GemmConfig("hopper", 64, 32, 128, num_warps=4, num_stages=6),
    GemmConfig("hopper", 128, 128, 64, num_warps=8, num_stages=6, pingpong=True),
    GemmConfig("hopper", 64, 256, 64, num_warps=8, num_stages=5, pingpong=True),
    # Between powers of two: two sums, or three.
    GemmConfig("hopper", 128, 96, 64, num_warps=8, num_stages=7),
    GemmConfig("hopper", 128, 96, 32, num_warps=8, num_stages=8, pingpong=True),
    GemmConfig("hopper", 128, 192, 64, num_warps=8, num_stages=4),
    GemmConfig("hopper", 64, 192, 64, num_warps=8, num_stages=6, pingpong=True),
    GemmConfig("hopper", 192, 192, 64, num_warps=12, num_stages=4),
    GemmConfig("hopper", 256, 160, 64, num_warps=8, num_stages=4),
    GemmConfig("hopper", 64, 224, 64, num_warps=4, num_stages=5),
)


def halved(config):
    """The configuration for a gated product, which has two sums for each column of the output."""
    widths = (32, 64, 128) if config.num_warps == 12 else (32, 64, 96, 128)
    return dataclasses.replace(config, block_n=max((n for n in widths if n <= config.block_n // 2), default=32))


def apart(t, layout):
    """t with rows (layout "k") or columns at multiples of 16 bytes, and NaN between them."""
    t = t if layout == "k" else t.mT
    buffer = torch.full((t.shape[0], t.shape[1] // 8 * 8 + 16), torch.nan, dtype=t.dtype, device=t.device)
    buffer[:, : t.shape[1]] = t
    return buffer[:, : t.shape[1]] if layout == "k" else buffer[:, : t.shape[1]].mT


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "layouts"), [*((BF16, xw) for xw in ("kk", "kn", "mk", "mn")), (torch.half, "kk")])
@pytest.mark.parametrize("config", HOPPER, ids=str)
def test_hopper_is_the_same_function(config, dtype, layouts, device, monkeypatch):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernel is for sm_90, and the GPU is {runtime.target(device).arch}")
    stock = torch.empty

    def unwritten(*size, **options):
        t = stock(*size, **options)
        return t.fill_(torch.nan) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", unwritten)  # of the output
    for m, n, k in ((1, 8, 136), (77, 200, 333), (129, 264, 1000), (2100, 2056, 333)):
        x = apart(drawn(m, k, dtype=dtype, device=device), layouts[0])
        weight = apart(drawn(2 * n, k, dtype=dtype, device=device), "k" if layouts[1] == "k" else "m")
        bias, residual = drawn(2 * n, device=device), drawn(m, n, dtype=dtype, device=device)
        calls = [(gated_linear, (x, weight, b), {"activation": "silu"}, halved(config)) for b in (None, bias.to(dtype))]
        for activation, with_bias, with_residual in ((None, 0, 0), ("silu", 1, 0), ("gelu", 0, 1), ("gelu_tanh", 1, 1)):
            options = {"activation": activation, "residual": residual if with_residual else None}
            calls.append((linear, (x, weight[:n], bias[:n] if with_bias else None), options, config))
        for function, given, options, used in calls:
            out = function(*given, **options, config=used)
            assert_close(out, truth(function, *given, **options))
            assert torch.equal(out, function(*given, **options, config=used))


@pytest.mark.parametrize("config", HOPPER, ids=str)
def test_hopper_takes_what_its_tests_give_it(config):
    for gated, (x, w), dtype in itertools.product((False, True), ("kk", "kn", "mk", "mn"), (BF16, torch.half)):
        p = Problem(77, 200, 136, dtype, gated=gated, x_layout=x, w_layout=w)
        assert choose.can_implement(p, halved(config) if gated else config, runtime.TARGETS["sm_90"]) is None


WIDE = GemmConfig("hopper", 128, 192, 64, num_warps=8, num_stages=4)


@pytest.mark.parametrize(
    ("change", "sizes", "reason"),
    [
        ({"block_k": 128, "num_stages": 2}, {}, "block_k is 128, expected 32 or 64 with 192 columns and a weight that"),
        ({"block_k": 128, "num_stages": 2}, {"w_layout": "n"}, None),
        ({"split_k": 2}, {}, "split_k is 2, expected 1 for kernel 'hopper'"),
        ({"block_m": 192, "num_warps": 12, "block_n": 96}, {"gated": True}, "num_warps is 12, expected 4 or 8 with 96"),
        ({"block_n": 96}, {"gated": True}, None),
        ({}, {"gated": True}, "the tile has 192 sums for each thread of 8 warps, expected at most 128"),
        ({"pingpong": True}, {}, "the tile has 192 sums for each thread of 4 warps, expected at most 160"),
        ({"block_m": 64, "block_n": 224, "pingpong": True}, {}, "num_stages is 4: expected more than 7 with pingpong"),
        ({"num_stages": 6}, {}, "num_stages is 6: "),
        ({}, {"dtype": torch.float32}, "takes float16 and bfloat16, not torch.float32"),
    ],
)
def test_what_widths_between_powers_of_two_can_not_do_is_refused(change, sizes, reason):
    p = Problem(**{"m": 77, "n": 200, "k": 4096, "dtype": BF16, **sizes})
    refused = choose.can_implement(p, dataclasses.replace(WIDE, **change), runtime.TARGETS["sm_90"])
    assert refused is None if reason is None else reason in refused


def test_other_kernels_take_powers_of_two_alone():
    for kernel in ("gemv", "skinny", "tiled"):
        with pytest.raises(ValueError, match=r"block_n is 192, expected a power of two$"):
            dataclasses.replace(WIDE, kernel=kernel)
    with pytest.raises(ValueError, match="block_n is 48, expected a power of two, or one of 96, 160, 192, 224"):
        dataclasses.replace(WIDE, block_n=48)
    assert decode(WIDE.encoded) == WIDE


@pytest.mark.parametrize("gated", [False, True])
def test_the_tuner_tries_widths_between_powers_of_two(gated):
    p = Problem(256, 6144, 4096, BF16, gated=gated, activation="silu" if gated else "")
    space = matmul_space(p, runtime.TARGETS["sm_90"], False)
    assert {c.block_n for c in space if c.block_n % 64} >= ({96} if gated else {96, 160, 224})
