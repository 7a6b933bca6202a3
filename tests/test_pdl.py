"""Kernels that start while the one before them still ends: which launches ask for it."""

import pytest
import torch
from helpers import BF16
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from rooftile import KVCache, launching, runtime
from rooftile.ops.embedding import _launch as embedding
from rooftile.ops.kv_cache import launch as kv_cache
from rooftile.ops.sample import greedy


def append():
    cache = kv_cache.Cache(*caches(), torch.zeros(1, dtype=torch.int32), None, None, None, None, "", "bthd")
    kv_cache.append(*caches(), cache)


def rope():
    cache = kv_cache.Cache(*caches(), torch.zeros(1, dtype=torch.int32), None, None, None, None, "", "bthd")
    q, (k, v), angles = torch.empty(1, 1, 4, 16, dtype=BF16), caches(), torch.empty(4, 16)
    kv_cache.rotate_and_append(q, k, v, torch.empty_like(q), angles, angles, "half", cache)


def caches():
    return tuple(torch.empty(1, 1, 2, 16, dtype=BF16) for _ in range(2))


def embed():
    embedding(torch.zeros(1, dtype=torch.int32), torch.empty(8, 16), 1.0)


def sample():
    greedy.launch(torch.empty(1, dtype=torch.int32), torch.empty(1), torch.empty(1, 64), None, 1.0, False)


def advance():
    cache = KVCache(1, 4, 1, 16)  # on a GPU, where there is one
    cache.reserve(1)
    cache.advance()


@pytest.fixture
def launched(monkeypatch):
    """What is launched for sm_90, and nothing is."""
    plans = []
    monkeypatch.setattr(launching, "launch", lambda plan, *_: plans.append(plan))
    monkeypatch.setattr(launching, "counters", lambda n, device: torch.empty(n, dtype=torch.int32))
    monkeypatch.setattr(runtime, "target", lambda device: runtime.TARGETS["sm_90"])
    monkeypatch.setattr("rooftile.ops.embedding._check_values", lambda ids, n_rows: None)  # a compiler's have none
    return plans


def is_early(plan):
    assert plan.constants["EARLY"] == plan.options.get("launch_pdl", False)
    return plan.constants["EARLY"]


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
