"""Kernels launched while the previous one still ends: which ask for it, and what they read before they wait."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import BF16
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from rooftile import KVCache, launching, runtime
from rooftile.ops.embedding import _prepare as prepare_embedding
from rooftile.ops.gemm.weight_only import int4_linear, int8_linear
from rooftile.ops.kv_cache import kernel as kv_cache
from rooftile.ops.sample import greedy
from rooftile.ops.sample.parts import Parameters, Tables
from rooftile.primitives.paging import Cache
from rooftile.primitives.pdl import pdl_launch_dependents

import triton  # isort: skip
import triton.language as tl  # isort: skip


def append():
    cache = Cache(*caches(), torch.zeros(1, dtype=torch.int32), None, None, None, None, "", "bthd")
    kv_cache.prepare_append(*caches(), "bthd", cache)()


def rope():
    cache = Cache(*caches(), torch.zeros(1, dtype=torch.int32), None, None, None, None, "", "bthd")
    q, (k, v), angles = torch.empty(1, 1, 4, 16, dtype=BF16), caches(), torch.empty(4, 16)
    kv_cache.prepare_rope(q, k, v, torch.empty_like(q), angles, angles, "half", "bthd", cache)()


def caches():
    return tuple(torch.empty(1, 1, 2, 16, dtype=BF16) for _ in range(2))


def embed():
    args = torch.zeros(1, dtype=torch.int32), torch.empty(8, 16), 1.0, None
    prepare_embedding(*args)(*args)


def sample():
    tensors = torch.empty(1, dtype=torch.int32), torch.empty(1), torch.empty(1, 64), Tables()
    how = Parameters(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0)
    greedy.prepare(*tensors, how, False)(*tensors, how)


def advance():
    cache = KVCache(1, 4, 1, 16)  # on a GPU, where there is one
    cache.reserve(1)
    cache.advance()


@pytest.fixture
def launched(monkeypatch):
    """What is launched for sm_90, and nothing is."""
    plans = []
    monkeypatch.setattr(launching, "launch", lambda plan, *_: plans.append(plan))
    monkeypatch.setattr(launching, "bind", lambda plan, *_, **__: lambda *tensors: plans.append(plan))
    monkeypatch.setattr(launching, "counters", lambda n, device: torch.empty(n, dtype=torch.int32))
    monkeypatch.setattr(runtime, "target", lambda device: runtime.TARGETS["sm_90"])
    monkeypatch.setattr("rooftile.ops.embedding._check_values", lambda ids, n_rows: None)  # a compiler's have none
    return plans


def is_early(plan):
    early = plan.constants["PDL" if "PDL" in plan.constants else "EARLY"]
    assert early == plan.options.get("launch_pdl", False)
    return early


@pytest.mark.parametrize("step", [append, rope, embed, sample, advance])
def test_the_small_kernels_of_a_step_are_launched_early_where_that_can_be(step, launched, monkeypatch):
    step()
    monkeypatch.setattr(runtime, "target", lambda device: runtime.TARGETS["sm_89"])
    step()
    assert [is_early(plan) for plan in launched] == [True, False]


@pytest.mark.parametrize("step", [append, rope, embed, sample])
def test_a_compiler_is_given_launches_that_it_can_trace(step, launched):
    with FakeTensorMode(), FunctionalTensorMode():
        step()
    (plan,) = launched
    assert not is_early(plan)
    assert set(plan.options) == {"num_warps"}


# Compiles GEMMs of few rows and append_kv for sm_90, with weights that the previous kernel may have written and with
# constant ones. Prints for each the instructions on global memory before `griddepcontrol.wait`.
COMPILED = """
import contextlib, json, re
import torch
import rooftile
from rooftile import runtime
from rooftile.inspect import driver
from rooftile.primitives.paging import Cache
from rooftile.primitives.pdl import constant_weights

kernels = []
driver.install(runtime.target(torch.device("meta")), lambda kernel, seconds: kernels.append(kernel))

def t(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

x, norm, residual = t(1, 1024), t(1024), t(1, 512)
int8, scale = t(512, 1024, dtype=torch.int8), t(512, dtype=torch.float32)
int4, scales = t(512, 512, dtype=torch.uint8), t(512, 8)
fp8 = t(512, 1024, dtype=torch.float8_e4m3fn)
angles, lengths = t(64, 64), t(1, dtype=torch.int32)
caches = {name: t(1, 64, 2, 64) for name in ("k_cache", "v_cache")}
calls = {
    "dense": lambda: rooftile.linear(x, t(512, 1024), residual=residual),
    "dense norm": lambda: rooftile.rms_norm_linear(x, norm, t(512, 1024)),
    "fp8": lambda: rooftile.fp8_weight_linear(x, fp8, scale, residual=residual),
    "int8": lambda: rooftile.int8_linear(x, int8, scale, residual=residual),
    "int4": lambda: rooftile.int4_linear(x, int4, scales, residual=residual),
    "int8 norm gated": lambda: rooftile.rms_norm_gated_linear(x, norm, int8, weight_scale=scale),
    "few rows": lambda: rooftile.linear(t(4, 1024), t(512, 1024)),
    "few rows norm": lambda: rooftile.rms_norm_linear(t(4, 1024), norm, t(512, 1024)),
    "append": lambda: rooftile.append_kv(
        t(1, 2, 1, 64), t(1, 2, 1, 64), *(t(1, 64, 2, 64, dtype=torch.int8) for _ in "kv"), lengths,
        k_scale=t(1, 64, 2, dtype=torch.float32), v_scale=t(1, 64, 2, dtype=torch.float32),
    ),
    "int8 qkv": lambda: rooftile.rms_norm_qkv_rope_cache(
        x[None], norm, int8, angles, angles, **caches, starts=lengths, weight_scale=scale
    ),
}
found = {}
for constant in (False, True):
    for name, call in calls.items():
        with constant_weights() if constant else contextlib.nullcontext():
            call()
        (kernel,), kernels[:] = list(kernels), []
        before, *after = kernel.asm["ptx"].split("griddepcontrol.wait")
        assert len(after) == kernel.metadata.launch_pdl, name
        seen = re.findall(r"ld\\.global|st\\.global|atom|prefetch\\.global", before)
        found[f"{name}{' constant' * constant}"] = kernel.src.fn.__name__, sorted(set(seen))
print(json.dumps(found))
"""


def test_nothing_is_loaded_before_the_wait_but_constant_weights():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"ROOFTILE_COMPILE_TARGET": "sm_90", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, "-c", COMPILED)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 20
    for call, (kernel, before) in found.items():
        assert (kernel == "gemv_imma_kernel") == ("int" in call), call
        expected = [] if "append" in call else ["prefetch.global"]
        if kernel == "gemv_imma_kernel":
            expected = ["ld.global"] if call.endswith("constant") else []
        assert before == expected, call
    kernels = {"gemv_kernel", "gemv_persistent_kernel", "gemv_imma_kernel", "_skinny_kernel", "append_kernel"}
    assert {kernel for kernel, _ in found.values()} == kernels


@triton.jit
def write_late_kernel(y_ptr, x_ptr, clock_ptr, n, BLOCK: tl.constexpr, DELAY: tl.constexpr):
    """Let the next kernel start, and copy x to y some time later."""
    pdl_launch_dependents()
    for _ in range(DELAY):
        tl.atomic_add(clock_ptr, 1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "columns", "scales"), [(int8_linear, 4096, ()), (int4_linear, 2048, (32,))])
def test_a_weight_that_the_previous_kernel_writes_late_is_read_as_written(op, columns, scales, device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip("kernel 'gemv_imma' is chosen for sm_90")
    dtype = torch.int8 if op is int8_linear else torch.uint8
    x, scale = torch.randn(1, 4096, device=device).to(BF16), torch.rand(4096, *scales, device=device) + 0.5
    clock = torch.zeros(1, dtype=torch.int32, device=device)
    new = torch.randint(0, 100, (2, 4096, columns), device=device).to(dtype)
    expected = [op(x, w, scale) for w in new]
    weight = new[1].clone()
    n = weight.numel()
    plan = launching.KernelLauncher(write_late_kernel, {"BLOCK": 65536, "DELAY": 200}, num_warps=8)
    for i in range(20):
        launching.launch(plan, triton.cdiv(n, 65536), (weight, new[i % 2], clock), (n,))
        assert torch.equal(op(x, weight, scale), expected[i % 2])
