"""The first call of attention, forward and backward: with nothing in Triton's cache, and with all in it.

`measure` runs this module twice, each time in a new process, with a cache of its own. The time is that of the call
alone: the CUDA context is there and the tensors are.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time

import torch

import rooftile
from rooftile import runtime
from rooftile.bench.timer import clock

# A size that takes the kernels of sm_90: batch, tokens, query heads, KV heads and head_dim.
SIZE = (1, 2048, 32, 8, 128)
# By what is in Triton's cache. Who tries the library waits for the first, and every later process for the second.
LIMITS_S = {"empty": 10.0, "filled": 2.0}


@dataclasses.dataclass(frozen=True)
class FirstCall:
    call: str
    cache: str
    seconds: float
    limit_s: float


def seconds(device: torch.device, size: tuple[int, ...] = SIZE) -> float:
    """How long this process takes for causal attention and its gradients, in bfloat16."""
    batch, tokens, q_heads, kv_heads, head_dim = size
    q, k, v, dout = (
        torch.randn(batch, tokens, heads, head_dim, dtype=torch.bfloat16, device=device, requires_grad=name != "dout")
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads), ("dout", q_heads))
    )
    timer = clock(device)
    timer.synchronize()
    start = time.perf_counter()
    torch.autograd.grad(rooftile.attention(q, k, v, causal=True, layout="bthd"), (q, k, v), dout)
    timer.synchronize()
    return time.perf_counter() - start


def measure() -> list[FirstCall]:
    """Both first calls, each in a process of its own.

    Raises:
        RuntimeError: a process failed; the message has the end of what it said.
    """
    batch, tokens, q_heads, kv_heads, head_dim = SIZE
    call = f"attention forward and backward, {batch} x {tokens}, {q_heads}/{kv_heads} heads of {head_dim}, bf16, causal"
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for cache, limit in LIMITS_S.items():
            done = subprocess.run(
                [sys.executable, "-m", "rooftile.bench.first_call"],
                env={**os.environ, "TRITON_CACHE_DIR": folder}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise RuntimeError(f"the first call with the cache {cache} failed: {done.stderr.strip()[-150:]}")
            found.append(FirstCall(call, cache, float(done.stdout.split()[-1]), limit))
    return found


if __name__ == "__main__":
    print(seconds(runtime.default_device()))
