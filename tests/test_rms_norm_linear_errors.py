"""What the norm before a product refuses: configurations, sizes and arguments, each by name."""

import re

import pytest
from helpers import BF16
from test_rms_norm_linear import inputs

from rooftile import launching, runtime
from rooftile.ops.gemm import choose, gemv_persistent, skinny
from rooftile.ops.gemm.config import GemmConfig, Problem
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear, rms_norm_linear

REFUSED = [
    (GemmConfig("gemv", 1, 8, 32), "takes one row of x"),
    (GemmConfig("skinny", 16, 16, 16), "block_m is 16"),
    (GemmConfig("skinny", 32, 8, 16), "takes no tile of 32 x 8 x 16"),
    (GemmConfig("skinny", 64, 16, 512, num_warps=1, num_stages=1), "block_m x block_k is 32768 elements for 1 warps"),
    (GemmConfig("skinny", 32, 64, 4096, num_warps=32, num_stages=8192), "num_stages is 8192"),
    (GemmConfig("tiled", 8, 16, 16), "block_m is 8, expected at least 16"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[r for _, r in REFUSED])
def test_impossible_configurations_are_refused_before_launch(config, reason, device, monkeypatch):
    given = inputs(20, 32, 16, device=device)
    monkeypatch.setattr(launching, "launch", lambda *_: pytest.fail("launched"))
    with pytest.raises(ValueError, match=rf"rms_norm_linear: config can't be launched: .*{re.escape(reason)}"):
        rms_norm_linear(*given, config=config)
    with pytest.raises(ValueError, match=rf"rms_norm_gated_linear: config can't be launched: .*{re.escape(reason)}"):
        rms_norm_gated_linear(*given, config=config)


def test_bad_arguments_are_named(device):
    x, g, w, b = inputs(4, 8, 6, device=device)
    wrong = [
        (lambda: rms_norm_linear(x, g[:7], w), ValueError, r"norm_weight has shape \(7,\), expected \(8,\)"),
        (lambda: rms_norm_linear(x, g, w[:, :7]), ValueError, r"weight has shape \(6, 7\), expected \(N, 8\)"),
        (lambda: rms_norm_linear(x, g, b), ValueError, r"weight has shape \(6,\), expected \(N, 8\)"),
        (lambda: rms_norm_linear(x, g, w, b[:5]), ValueError, r"bias has shape \(5,\), expected \(6,\)"),
        (lambda: rms_norm_linear(x[0, 0], g, w), ValueError, r"x has shape \(\), expected at least one"),
        (lambda: rms_norm_linear(x[:, :0], g[:0], w[:, :0]), ValueError, r"x has shape \(4, 0\), expected at least"),
        (lambda: rms_norm_linear(x, g, w.to(BF16)), TypeError, "weight has dtype torch.bfloat16, expected .*autocast"),
        (lambda: rms_norm_linear(x.half(), g, w.half(), b.to(BF16)), TypeError, "bias has dtype torch.bfloat16"),
        (lambda: rms_norm_linear(x, g.double(), w), TypeError, "norm_weight has dtype torch.float64, expected"),
        (lambda: rms_norm_linear(x, g, w, config="gemv"), TypeError, "config is a str, expected"),
        (lambda: rms_norm_linear(x, g, w, eps="0"), TypeError, "eps is a str, expected a number"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=f"rms_norm_linear: {message}"):
            call()
    gated = [
        (lambda: rms_norm_gated_linear(x, g, w[:5]), ValueError, "weight has 5 rows, expected an even number"),
        (lambda: rms_norm_gated_linear(x, g, w[:, :7]), ValueError, r"weight has shape \(6, 7\), expected \(2N, 8\)"),
        (lambda: rms_norm_gated_linear(x, g, w, b[:3]), ValueError, r"bias has shape \(3,\), expected \(6,\)"),
        (
            lambda: rms_norm_gated_linear(x, g, w, activation="relu"),
            ValueError,
            "activation is 'relu', expected one of",
        ),
        (lambda: rms_norm_gated_linear(x, g, w, activation=""), ValueError, "activation is '', expected one of"),
        (lambda: rms_norm_gated_linear(x, g, w, config="gemv"), TypeError, "config is a str, expected"),
    ]
    for call, kind, message in gated:
        with pytest.raises(kind, match=f"rms_norm_gated_linear: {message}"):
            call()


def test_more_rows_than_32_bits_count_are_refused():
    c = GemmConfig("gemv_persistent", 1, 1, 16, num_stages=1)
    for n, gated in ((2**31, False), (2**30, True)):
        assert "expected fewer than 2^31" in gemv_persistent.can_implement(
            Problem(1, n, 16, BF16, gated=gated), c, runtime.INTERPRETER
        )
        assert gemv_persistent.can_implement(Problem(1, n - 1, 16, BF16, gated=gated), c, runtime.INTERPRETER) is None


def test_what_the_compiler_fails_at_is_refused():
    target, c = runtime.TARGETS["sm_100"], GemmConfig("skinny", 16, 64, 128, num_stages=3)
    assert "the compiler fails for sm_100" in skinny.can_implement(
        Problem(8, 512, 4096, BF16, gated=True, norm=True), c, target
    )
    assert skinny.can_implement(Problem(8, 512, 4096, BF16, norm=True), c, target) is None
    assert choose.choose(Problem(8, 512, 4096, BF16, gated=True, norm=True), target).block_n == 32
