"""The attention forward of sm_90 in its forms, against attention in float32."""

import dataclasses
import heapq
import itertools
import random

import pytest
import torch
from helpers import BF16
from test_attention_backward import formula

from rooftile import launching, runtime
from rooftile.ops.attention import attention, attention_varlen, ops, work_order
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem, Scoring

import triton  # isort: skip
import triton.language as tl  # isort: skip

hopper_forward = pytest.importorskip("rooftile.ops.attention.hopper_forward")
CONFIG = AttentionConfig("hopper", 128, 128, num_warps=8, num_stages=4)
CONFIGS = {
    64: AttentionConfig("hopper", 192, 128, num_warps=12, num_stages=6),
    128: CONFIG,
    256: AttentionConfig("hopper", 128, 64, num_warps=8, num_stages=2),
}


def config(head_dim):
    return CONFIGS[next(dim for dim in CONFIGS if head_dim <= dim)]


def apart(batch, heads, rows, cols, dtype, device, layout):
    """Drawn, with NaN between the heads, the rows and the batches."""
    shape = (batch, rows, heads, cols) if layout == "bthd" else (batch, heads, rows, cols)
    buffer = torch.full((shape[0], shape[1] + 1, shape[2] + 1, cols + 8), torch.nan, dtype=dtype, device=device)
    t = buffer[:, : shape[1], : shape[2], :cols]
    t.copy_(torch.randn(shape, device=device))
    return t.transpose(1, 2) if layout == "bthd" else t


POINTS = [
    # batch, heads, kv_heads, n_q, n_k, head_dim, softcap, left, right, sinks, dtype, layout
    (2, 2, 2, 1, 1, 128, 0.0, -1, -1, False, BF16, "bhtd"),
    (2, 8, 2, 515, 777, 128, 0.0, -1, 0, False, BF16, "bthd"),
    (2, 8, 2, 777, 515, 128, 0.0, -1, 0, False, BF16, "bhtd"),  # the first queries see nothing
    (3, 16, 16, 1000, 1000, 128, 0.0, -1, -1, False, torch.half, "bhtd"),
    (3, 16, 16, 1000, 1000, 64, 0.0, -1, 0, True, BF16, "bthd"),
    (2, 4, 4, 1000, 1000, 128, 20.0, 100, 0, True, BF16, "bhtd"),
    (2, 4, 1, 700, 1000, 96, 0.0, 100, 50, False, BF16, "bhtd"),
    (2, 4, 4, 300, 300, 40, 0.0, -1, -1, False, BF16, "bthd"),
    (2, 4, 4, 600, 600, 256, 0.0, -1, 0, False, BF16, "bhtd"),
    (8, 16, 16, 2048, 2048, 128, 0.0, -1, 0, False, BF16, "bhtd"),
    (2, 32, 8, 1000, 1000, 64, 0.0, -1, -1, False, BF16, "bhtd"),
    (2, 32, 8, 777, 1300, 64, 20.0, 300, 0, True, BF16, "bhtd"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_it_is_attention(point, device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernel is for sm_90, and the GPU is {runtime.target(device).arch}")
    batch, heads, kv_heads, n_q, n_k, head_dim, softcap, left, right, with_sinks, dtype, layout = point
    torch.manual_seed(0)
    q = apart(batch, heads, n_q, head_dim, dtype, device, layout)
    k, v = (apart(batch, kv_heads, n_k, head_dim, dtype, device, layout) for _ in range(2))
    sinks = torch.randn(heads, device=device) if with_sinks else None
    s = Scoring(head_dim**-0.5, softcap, left, right)
    out = torch.full((batch, heads, n_q, head_dim), torch.nan, dtype=dtype, device=device)
    lse = torch.full((batch, heads, n_q), torch.nan, device=device)
    x = Inputs(q, k, v, s, sinks=sinks, longest_q=n_q, longest_k=n_k)
    start = ops.prepare_forward("attention", x, out, config(head_dim))
    start(q, k, v, out, lse, *x.tensors)
    expected, expected_lse = formula(q.float(), k.float(), v.float(), s, sinks=sinks)
    error = (out.float() - expected).norm() / expected.norm()
    assert error < (5e-3 if dtype == BF16 else 1e-3)  # rounding of weights and output alone is a third of it
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)
    again = torch.full_like(out, torch.nan)
    start(q, k, v, again, lse, *x.tensors)
    assert torch.equal(out, again)


def problem(point):
    batch, heads, kv_heads, n_q, n_k, head_dim, softcap, left, right, with_sinks, dtype, _layout = point
    scoring = Scoring(head_dim**-0.5, softcap, left, right)
    return Problem(batch, heads, kv_heads, n_q, n_k, head_dim, head_dim, dtype, scoring, sinks=with_sinks)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_it_takes_what_its_tests_give_it(point):
    assert hopper_forward.can_implement(problem(point), config(point[5]), runtime.TARGETS["sm_90"]) is None


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float32},
        {"mask": "bool"},
        {"alibi": True},
        {"head_dim": 100, "value_dim": 100},
        {"value_dim": 64},
        {"aligned": False},
        {"n_k": 0},
        {"scoring": Scoring(0.0)},
        {"scoring": Scoring(1e-40)},
        {"scoring": Scoring(1e9)},
        {"scoring": Scoring(0.1, 1e9)},
    ],
    ids=str,
)
def test_it_leaves_the_rest_to_the_portable_kernel(other):
    p = dataclasses.replace(problem(POINTS[1]), **other)
    assert "kernel 'hopper' takes" in hopper_forward.can_implement(p, CONFIG, runtime.TARGETS["sm_90"])


@pytest.mark.parametrize(("rows", "warps"), [(192, 8), (128, 12), (64, 4), (256, 16)])
def test_rows_and_warps_go_together(rows, warps):
    c = dataclasses.replace(CONFIG, block_m=rows, num_warps=warps)
    assert "for every 4 of 8 or 12 warps" in hopper_forward.can_implement(
        problem(POINTS[1]), c, runtime.TARGETS["sm_90"]
    )


@pytest.mark.parametrize(("name", "value"), [("block_m", 100), ("num_warps", 6), ("block_n", 96), ("num_stages", 0)])
def test_odd_sizes_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
        dataclasses.replace(CONFIG, **{name: value})


# The order of tiles


def count_compiled():
    """Kernels that Triton has compiled or loaded in this process."""
    launchers = launching._LAUNCHERS
    kernels = {launcher.kernel for launcher in launchers}
    return sum(len(entry[0]) for kernel in kernels for entry in kernel.device_caches.values())


@triton.jit
def _order_kernel(
    counts_ptr, heads_ptr, ranks_ptr, programs, tiles, blocks, width, wide, narrow, wide_rounds, narrow_rounds,
    PROGRAMS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """counts (PROGRAMS,), and (ROUNDS, PROGRAMS) of heads and ranks, of all programs at once."""
    program = tl.arange(0, PROGRAMS)
    tl.store(counts_ptr + program, work_order.count_of(program, programs, tiles))
    i = tl.arange(0, ROUNDS)[:, None]
    order = (width, wide, narrow, wide_rounds, narrow_rounds)
    head, rank = work_order.tile_of(i, program[None, :], programs, order, blocks)
    at = i * PROGRAMS + program[None, :]
    tl.store(heads_ptr + at, head)
    tl.store(ranks_ptr + at, rank)


def order_of(heads, blocks, programs, heads_in_l2, device):
    """The tiles of each program, (head, rank) in its order."""
    order = work_order.work_order(heads, blocks, programs, heads_in_l2)
    tiles = heads * blocks
    sizes = [1 << (n - 1).bit_length() for n in (programs, -(-tiles // programs) + 1)]
    counts = torch.zeros(sizes[0], dtype=torch.int32, device=device)
    found = torch.zeros(2, sizes[1], sizes[0], dtype=torch.int32, device=device)
    _order_kernel[(1,)](counts, found[0], found[1], programs, tiles, blocks, *order, *sizes)
    n, (head, rank) = counts.tolist(), found.tolist()
    return [[(head[i][p], rank[i][p]) for i in range(n[p])] for p in range(programs)]


def tile_costs(rows, keys, n_q, n_k, left, right):
    """What each tile of a head costs, in blocks of keys; 1.5 beside its blocks. The longest first, if causal."""
    costs = []
    for row in range(0, n_q, rows):
        shift = n_k - n_q
        begin = max(row + shift - left, 0) // keys if left >= 0 else 0
        end = min(min(row + rows, n_q) + shift + right, n_k) if right >= 0 else n_k
        costs.append(max(-(-end // keys), begin + 1) - begin + 1.5)
    return costs[::-1] if right >= 0 else costs


def list_schedule(costs, heads, programs, heads_in_l2):
    """When the last program ends if each tile goes to the program that is free first, the longest first in a group."""
    free = [0.0] * programs
    for first in range(0, heads, heads_in_l2):
        for cost in sorted(costs, reverse=True):
            for _ in range(first, min(first + heads_in_l2, heads)):
                heapq.heapreplace(free, free[0] + cost)
    return max(free)


MEASURED = [  # heads, tokens, head_dim of the causal points in the case
    *((16384 // t * heads, t, dim) for heads, dim in ((16, 128), (32, 64)) for t in (1024, 2048, 4096, 8192, 16384)),
    *((32, t, 128) for t in (44, 512, 1024, 2048, 4096, 8192, 16384)),
    *((4, 1 << i, 128) for i in range(10, 17)),
]


@pytest.mark.parametrize(("heads", "tokens", "head_dim"), MEASURED)
def test_programs_end_as_a_list_schedule_would_have_them(heads, tokens, head_dim, device):
    rows = 192 if head_dim == 64 and tokens >= 4096 else 128
    costs = tile_costs(rows, 128, tokens, tokens, -1, 0)
    programs, heads_in_l2 = min(132, heads * len(costs)), max(1, (32 << 20) // (4 * tokens * head_dim))
    taken = order_of(heads, len(costs), programs, heads_in_l2, device)
    longest = max(sum(costs[rank] for _, rank in tiles) for tiles in taken)
    best = list_schedule(costs, heads, programs, heads_in_l2)
    assert longest <= max(1.01 * best, best + 1)  # 1 percent, or one block of keys


def test_every_tile_is_taken_once_and_no_program_is_late(device):
    draw = random.Random(0)
    for _ in range(60):
        heads, programs = draw.randint(1, 130), draw.choice((1, 7, 108, 114, 132))
        n_q = draw.randint(1, 6000)
        n_k = draw.choice((n_q, n_q + draw.randint(0, 5000), max(1, n_q - draw.randint(0, 3000))))
        left, right = draw.choice(((-1, 0), (511, 0), (300, 200), (1000, -1)))
        costs = tile_costs(128, 128, n_q, n_k, left, right)
        programs = min(programs, heads * len(costs))
        taken = order_of(heads, len(costs), programs, draw.randint(1, 40), device)
        assert sorted(t for tiles in taken for t in tiles) == list(itertools.product(range(heads), range(len(costs))))
        assert all(taken)
        sums = [sum(costs[rank] for _, rank in tiles) for tiles in taken]
        assert max(sums) <= 1.02 * sum(sums) / programs + max(costs)


@pytest.mark.gpu
def test_new_lengths_windows_and_scales_neither_wait_nor_compile(device):
    """A prompt of another length with every request: nothing is computed on the host, copied or compiled for it."""
    if device.type != "cuda":
        pytest.skip("asks CUDA whether the host waits")

    def call(n_q, n_k, packed, **options):
        q, k, v = (torch.randn(2, 4, n, 128, dtype=BF16, device=device, requires_grad=True) for n in (n_q, n_k, n_k))
        attention(q, k, v, **options).backward(q.detach())
        if packed:
            leaves = (t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in (q, k, v))
            attention_varlen(*leaves, [0, n_q // 2, n_q], [0, n_k // 3, n_k], **options).sum().backward()

    forms = [{"causal": True}, {"causal": True, "window": 100}, {"window": (60, 70)}, {}]
    for options in forms:
        for n_q, n_k in ((300, 300), (256, 384), (300, 384), (256, 999)):  # even and uneven
            call(n_q, n_k, True, scale=0.1, **options)
    compiled = count_compiled()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(50):
            options = dict(forms[i % 4])
            if "window" in options:
                options["window"] = 90 + i if i % 4 == 1 else (50 + i, 60 + i)
            call(129 + 17 * i, 200 + 23 * i, True, scale=0.1 + i / 100, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert count_compiled() == compiled
