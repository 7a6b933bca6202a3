"""Kernel "gemv_persistent" of one row or two: what it adds, weights of any layout, what it refuses."""

import re

import pytest
import torch
from helpers import BF16
from test_matmul import ACTIVATIONS, assert_close, drawn, truth

from rooftile.ops.gemm import gemv_persistent as held
from rooftile.ops.gemm.config import MatmulConfig
from rooftile.ops.gemm.linear import gated_linear, linear
from rooftile.ops.gemm.norm_linear import rms_norm_gated_linear

DTYPES = [torch.float32, torch.float16, BF16]
ROWS = pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, MatmulConfig("gemv_persistent", 1, 4, 128, 1, 1, 4, 2)),
        (1, MatmulConfig("gemv_persistent", 2, 2, 128, 1, 1, 4, 1)),
        (2, MatmulConfig("gemv_persistent", 2, 2, 128, 1, 1, 4, 1)),
        (2, MatmulConfig("gemv_persistent", 2, 4, 128, 1, 1, 4, 2)),
    ],
)
K, N = 77, 33


@ROWS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_that_is_expanded(rows, config, dtype, device):
    """Along rows, which the kernel takes as it is, along columns, and along both."""
    x, weight = drawn(rows, K, dtype=dtype, device=device), drawn(N, K, dtype=dtype, device=device)
    for shape in ((1, N), (rows, 1), (1, 1)):
        residual = drawn(*shape, dtype=dtype, device=device).expand(rows, N)
        assert 0 in residual.stride() or rows == 1
        out = linear(x, weight, residual=residual, activation="silu", config=config)
        assert_close(out, truth(linear, x, weight, residual=residual, activation="silu"))


@ROWS
@pytest.mark.parametrize("programs", [1, 3])
def test_programs_that_have_several_tiles(programs, rows, config, device, monkeypatch):
    """To the bit as where each has one, of which the interpreter has as many as there are tiles."""
    x, weight = drawn(rows, K, dtype=BF16, device=device), drawn(2 * N, K, dtype=BF16, device=device)
    norm_weight, bias = drawn(K, device=device), drawn(2 * N, device=device)
    residual = drawn(rows, 2 * N, dtype=BF16, device=device)

    def run():
        plain = linear(x, weight, bias, residual=residual, config=config)
        return plain, rms_norm_gated_linear(x, norm_weight, weight, bias, config=config)

    asked = []
    monkeypatch.setattr(held, "programs_for", lambda tiles, *_: asked.append(tiles) or tiles)
    expected = run()
    monkeypatch.setattr(held, "programs_for", lambda *_: programs)
    assert all(torch.equal(*pair) for pair in zip(run(), expected, strict=True))
    assert min(asked) > 2 * programs


@ROWS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_that_is_not_along_k(rows, config, dtype, device):
    """Contiguous along n, and along neither."""
    x, along_k = drawn(rows, K, dtype=dtype, device=device), drawn(2 * N, K, dtype=dtype, device=device)
    bias = drawn(2 * N, dtype=dtype, device=device)
    neither = torch.stack((along_k, torch.full_like(along_k, torch.nan)), dim=-1)[..., 0]
    for weight in (along_k.T.contiguous().T, neither):
        assert weight.stride(1) != 1
        assert_close(linear(x, weight, bias, config=config), truth(linear, x, along_k, bias))
        gated = gated_linear(x, weight, bias, config=config)
        assert_close(gated, truth(gated_linear, x, along_k, bias, activation="silu"))


@ROWS
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_bias_of_float32(rows, config, dtype, device):
    """Plain and gated, and added as it is: in x's dtype the last of these would be all one number."""
    x, weight = drawn(rows, K, dtype=dtype, device=device), drawn(2 * N, K, dtype=dtype, device=device)
    bias = drawn(2 * N, device=device)
    for activation in ACTIVATIONS:
        out = linear(x, weight, bias, activation=activation, config=config)
        assert_close(out, truth(linear, x, weight, bias, activation=activation))
        if activation is not None:
            out = gated_linear(x, weight, bias, activation=activation, config=config)
            assert_close(out, truth(gated_linear, x, weight, bias, activation=activation))
    # A sum of which the bias' last bits are all that is left.
    x = torch.ones(rows, K, dtype=dtype, device=device)
    weight = torch.zeros(N, K, dtype=dtype, device=device)
    weight[:, 0] = -1
    bias = 1 + torch.arange(N, device=device) * 2.0**-16
    expected = (bias - 1).to(dtype).expand(rows, N)
    assert torch.equal(linear(x, weight, bias, config=config), expected)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MatmulConfig("gemv_persistent", 1, 2, 32, num_stages=1), "block_m is 1, expected at least 2"),
        (MatmulConfig("gemv_persistent", 2, 2, 16, num_stages=1), "block_k is 16, expected at least 32"),
        (MatmulConfig("gemv_persistent", 2, 2, 32), "num_stages is 3, expected 1, or 2"),
        (MatmulConfig("gemv_persistent", 2, 2, 32, split_k=2, num_stages=1), "split_k is 2"),
        (
            MatmulConfig("gemv_persistent", 2, 1024, 32, num_stages=1),
            "tiles of the weight are 256 elements a thread",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "gemv_persistent",
)
def test_rows_that_cannot_be_held_are_refused(config, reason, device):
    x, weight = drawn(2, 32, device=device), drawn(16, 32, device=device)
    with pytest.raises(ValueError, match=rf"config can't be launched: .*{re.escape(reason)}"):
        linear(x, weight, config=config)
