"""`ROOFTILE_PORTABLE=1`: on Hopper, the kernels of all other GPUs."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile import runtime
from rooftile.ops.attention import problem as attention
from rooftile.ops.attention.problem import AttentionConfig, Scoring
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig, Problem

BF16, H100 = torch.bfloat16, runtime.TARGETS["sm_90"]
GLUON = ("hopper", "gemv_imma")
GEMMS = [
    Problem(1, 4096, 4096, BF16, weight="int8"),
    Problem(4096, 4096, 4096, BF16),
    Problem(4096, 4096, 4096, BF16, gated=True, activation="silu"),
]
ATTENTION = attention.Problem(2, 16, 16, 8192, 8192, 128, 128, BF16, Scoring(0.1))


@pytest.fixture
def portable(monkeypatch):
    monkeypatch.setattr(runtime, "PORTABLE", True)
    choose.choose.cache_clear()
    yield
    choose.choose.cache_clear()


@pytest.mark.parametrize("p", GEMMS, ids=str)
def test_gemms_are_in_gluon_without_it(p):
    assert choose.choose(p, H100).kernel in GLUON


@pytest.mark.parametrize("p", GEMMS, ids=str)
def test_no_gemm_is_in_gluon(p, portable):
    assert choose.choose(p, H100).kernel not in GLUON


def test_a_tuned_entry_in_gluon_is_passed_over(portable, monkeypatch):
    entry = {"kernel": "hopper", "block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 4}
    monkeypatch.setattr(choose.tuning, "lookup", lambda *key: entry)
    assert choose.can_implement(GEMMS[1], GemmConfig(**entry), H100) == (
        "kernel 'hopper' is for sm_90, and ROOFTILE_PORTABLE is set"
    )
    assert choose.choose(GEMMS[1], H100).kernel == "tiled"


def test_attention_is_not_in_gluon(portable):
    assert attention.choose_forward(ATTENTION, H100).kernel == "portable"
    assert attention.choose_backward(ATTENTION, H100).kernel == "portable"


def test_attention_is_in_gluon_without_it():
    found = attention.choose_forward(ATTENTION, H100)
    assert isinstance(found, AttentionConfig)
    assert found.kernel == "hopper"
