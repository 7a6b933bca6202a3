"""The product of sm_90 in the forms that the choice of a kernel, or a tuned table, may give it."""

import dataclasses
import itertools

import pytest
import torch
from helpers import BF16
from test_matmul import assert_close, drawn, truth

from rooftile import runtime
from rooftile.ops.matmul import MatmulConfig, choose, gated_linear, linear
from rooftile.ops.matmul.config import Problem

HOPPER = (
    MatmulConfig("hopper", 128, 256, 64, num_warps=8, num_stages=4),
    MatmulConfig("hopper", 256, 128, 64, num_warps=8, num_stages=4),
    MatmulConfig("hopper", 192, 128, 64, num_warps=12, num_stages=4),
    MatmulConfig("hopper", 64, 128, 64, num_warps=4, num_stages=4),
    MatmulConfig("hopper", 128, 128, 64, split_k=3, num_warps=8, num_stages=4),
    MatmulConfig("hopper", 128, 128, 64, num_warps=8, num_stages=6, pingpong=True),
    MatmulConfig("hopper", 64, 256, 64, num_warps=8, num_stages=5, pingpong=True),
    MatmulConfig("hopper", 128, 128, 64, num_warps=8, num_stages=6, stream_k=True),
)


def halved(config):
    """The configuration for a gated product, which has two sums for each column of the output."""
    return dataclasses.replace(config, block_n=config.block_n // 2)


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

    monkeypatch.setattr(torch, "empty", unwritten)  # of the output and of partial sums
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
        assert choose.refuses(p, halved(config) if gated else config, runtime.TARGETS["sm_90"]) is None
