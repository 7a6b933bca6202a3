"""Kernel "gemv_persistent" of one row or two: its sums, weights of any layout, what it rejects."""

import re

import pytest
import torch
from helpers import BF16
from test_matmul import ACTIVATIONS, drawn

from rooftile.cases.check import relative_error
from rooftile.ops.gemm import gemv_persistent
from rooftile.ops.gemm.config import GemmConfig
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear, rms_norm_linear
from rooftile.reference import rms_norm_linear as reference

DTYPES = [torch.float32, torch.float16, BF16]
ROWS = pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, GemmConfig("gemv_persistent", 1, 4, 128, 1, 1, 4, 2)),
        (1, GemmConfig("gemv_persistent", 2, 2, 128, 1, 1, 4, 1)),
        (2, GemmConfig("gemv_persistent", 2, 2, 128, 1, 1, 4, 1)),
        (2, GemmConfig("gemv_persistent", 2, 4, 128, 1, 1, 4, 2)),
    ],
)
# One row in bfloat16 and two in float32.
ROWS_AND_DTYPES = pytest.mark.parametrize(
    ("rows", "config", "dtype"),
    [(*ROWS.args[1][0], BF16)]
    + [pytest.param(*rows, BF16, marks=pytest.mark.nightly) for rows in ROWS.args[1][1:]]
    + [(*ROWS.args[1][-1], torch.float32), pytest.param(*ROWS.args[1][-1], torch.float16, marks=pytest.mark.nightly)],
)
K, N = 77, 33
CEILING = {torch.float32: 2e-6, torch.float16: 1e-3, BF16: 8e-3}


def truth(function, *tensors, **options):
    double = (None if t is None else t.double() for t in tensors)
    return getattr(reference, function.__name__)(*double, **options)


def assert_close(found, expected):
    assert relative_error(found, expected) <= CEILING[found.dtype]


@pytest.mark.each_once
@ROWS
@pytest.mark.parametrize("programs", [1, 3])
def test_programs_that_have_several_tiles(programs, rows, config, device, monkeypatch):
    """Bit-identical to one tile a program, which the interpreter takes otherwise."""
    n = 7 * config.block_n - 1  # seven gated tiles, of which the last is cut
    x, weight = drawn(rows, K, dtype=BF16, device=device), drawn(2 * n, K, dtype=BF16, device=device)
    norm_weight, bias = drawn(K, device=device), drawn(2 * n, device=device)

    def run():
        plain = rms_norm_linear(x, norm_weight, weight, bias, config=config)
        return plain, rms_norm_gated_linear(x, norm_weight, weight, bias, config=config)

    asked = []
    monkeypatch.setattr(gemv_persistent, "programs_for", lambda tiles, *_: asked.append(tiles) or tiles)
    expected = run()
    monkeypatch.setattr(gemv_persistent, "programs_for", lambda *_: programs)
    assert all(torch.equal(*pair) for pair in zip(run(), expected, strict=True))
    assert min(asked) > 2 * programs


@ROWS_AND_DTYPES
def test_a_weight_that_is_not_along_k(rows, config, dtype, device):
    """Contiguous along n, and along neither."""
    x, along_k = drawn(rows, K, dtype=dtype, device=device), drawn(2 * N, K, dtype=dtype, device=device)
    norm_weight, bias = drawn(K, device=device), drawn(2 * N, dtype=dtype, device=device)
    neither = torch.stack((along_k, torch.full_like(along_k, torch.nan)), dim=-1)[..., 0]
    for weight in (along_k.T.contiguous().T, neither):
        assert weight.stride(1) != 1
        out = rms_norm_linear(x, norm_weight, weight, bias, config=config)
        assert_close(out, truth(rms_norm_linear, x, norm_weight, along_k, bias))
        gated = rms_norm_gated_linear(x, norm_weight, weight, bias, config=config)
        assert_close(gated, truth(rms_norm_gated_linear, x, norm_weight, along_k, bias))


@ROWS_AND_DTYPES
def test_a_bias_of_float32(rows, config, dtype, device):
    """Plain and gated, and added as it is: in x's dtype the last of these would be all one number."""
    x, weight = drawn(rows, K, dtype=dtype, device=device), drawn(2 * N, K, dtype=dtype, device=device)
    norm_weight, bias = drawn(K, device=device), drawn(2 * N, device=device)
    out = rms_norm_linear(x, norm_weight, weight, bias, config=config)
    assert_close(out, truth(rms_norm_linear, x, norm_weight, weight, bias))
    for activation in ACTIVATIONS[1:]:
        out = rms_norm_gated_linear(x, norm_weight, weight, bias, activation=activation, config=config)
        assert_close(out, truth(rms_norm_gated_linear, x, norm_weight, weight, bias, activation=activation))
    # A sum of which the bias' last bits are all that is left.
    x = torch.ones(rows, K, dtype=dtype, device=device)
    weight = torch.zeros(N, K, dtype=dtype, device=device)
    weight[:, 0] = -1
    bias = 1 + torch.arange(N, device=device) * 2.0**-16
    expected = (bias - 1).to(dtype).expand(rows, N)
    out = rms_norm_linear(x, torch.ones(K, device=device), weight, bias, eps=0.0, config=config)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GemmConfig("gemv_persistent", 1, 2, 32, num_stages=1), "block_m is 1, expected at least 2"),
        (GemmConfig("gemv_persistent", 2, 2, 16, num_stages=1), "block_k is 16, expected at least 32"),
        (GemmConfig("gemv_persistent", 2, 2, 32), "num_stages is 3, expected 1, or 2"),
        (GemmConfig("gemv_persistent", 2, 2, 32, split_k=2, num_stages=1), "split_k is 2"),
        (
            GemmConfig("gemv_persistent", 2, 1024, 32, num_stages=1),
            "tiles of the weight are 256 elements a thread",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "gemv_persistent",
)
def test_rows_that_do_not_fit_the_registers_are_refused(config, reason, device):
    x, weight = drawn(2, 32, device=device), drawn(16, 32, device=device)
    with pytest.raises(ValueError, match=rf"config can't be launched: .*{re.escape(reason)}"):
        rms_norm_linear(x, drawn(32, device=device), weight, config=config)
