"""How many Python functions a call goes through to the launch of its kernel: each costs the host 50 ns and more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The op itself, library.define's call, two that ask whether torch.compile traces, and the op's run.
MOST = {
    **dict.fromkeys(
        ("rms_norm", "add_rms_norm", "layer_norm", "softmax", "silu_mul", "gelu_mul", "silu_mul_packed"), 5
    ),
    "attention": 11,  # it checks its options, and asks for autocast and deterministic algorithms
    **dict.fromkeys(("linear", "matmul", "gated_linear"), 12),
    "kl_div": 5,
    "cross_entropy": 7,  # it asks whether a gradient is wanted, and lists its results
    "rope": 6,  # it checks the tables' width
    "qk_norm_rope": 6,
    "embedding": 8,  # it may move ids, or look at them on the CPU
    "decode_attention": 7,  # it asks for the scale of the values, and allocates out and lse
    "append_kv": 8,  # it sorts its scales, and bumps the caches' versions
    "rope_and_cache": 9,
    "sample": 25,  # it checks seven parameters, and sorts them into tensors and numbers
}


@pytest.fixture(scope="module")
def entered():
    script = Path(__file__).with_name("host_calls.py")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = subprocess.run((sys.executable, str(script), *MOST), env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("op", MOST)
def test_a_call_goes_through_few_functions(entered, op):
    assert 0 < len(entered[op]) <= MOST[op], entered[op]
