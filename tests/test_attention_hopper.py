"""The attention forward of sm_90 in its forms, against attention in float32."""

import dataclasses
import functools
import heapq
import itertools
import random

import pytest
import torch
from helpers import BF16
from test_attention_backward import formula

from rooftile import launching, runtime
from rooftile.cases import all_cases
from rooftile.inspect import compile_on, plan
from rooftile.ops.attention import attention, attention_varlen, ops, work_order
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem, Scoring, choose_forward, has_pairs

import triton  # isort: skip
import triton.language as tl  # isort: skip

hopper_forward = pytest.importorskip("rooftile.ops.attention.hopper_forward")
CONFIG = AttentionConfig("hopper", 128, 128, num_warps=8, num_stages=4)
CONFIGS = {
    64: AttentionConfig("hopper", 192, 128, num_warps=12, num_stages=6),
    128: CONFIG,
    256: AttentionConfig("hopper", 128, 64, num_warps=8, num_stages=2),
}
# One consumer, of which two programs fit on an SM
SHORT = {
    64: AttentionConfig("hopper", 64, 64, num_warps=4, num_stages=10),
    128: AttentionConfig("hopper", 64, 64, num_warps=4, num_stages=5),
}
TARGET = runtime.TARGETS["sm_90"]


def config(head_dim):
    return CONFIGS[next(dim for dim in CONFIGS if head_dim <= dim)]


def short(head_dim):
    return SHORT[64 if head_dim <= 64 else 128]


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
    (2, 4, 2, 700, 900, 80, 0.0, -1, 0, True, BF16, "bhtd"),
    (2, 4, 2, 600, 600, 160, 20.0, 100, 0, False, torch.half, "bthd"),
    (2, 4, 2, 600, 700, 192, 0.0, -1, -1, False, BF16, "bhtd"),
    (8, 16, 16, 2048, 2048, 128, 0.0, -1, 0, False, BF16, "bhtd"),
    (2, 32, 8, 1000, 1000, 64, 0.0, -1, -1, False, BF16, "bhtd"),
    (2, 32, 8, 777, 1300, 64, 20.0, 300, 0, True, BF16, "bhtd"),
    (2, 8, 2, 1100, 1300, 128, 0.0, -1, 0, False, BF16, "bthd"),
    (2, 8, 2, 1300, 1100, 128, 0.0, -1, 0, False, BF16, "bhtd"),
]
# Those that one consumer, or two in pairs, run by default on an H100
SHORT_POINTS = [
    *(
        (1, 32, 8, n_q, n_q + more, dim, 0.0, -1, right, False, BF16, "bhtd")
        for n_q, more in ((128, 0), (512, 0), (65, 0), (427, 0), (500, 300), (500, -300))
        for dim in (64, 128)
        for right in (0, -1)
    ),
    (1, 32, 8, 1024, 1024, 128, 0.0, -1, 0, False, BF16, "bthd"),
    (3, 5, 1, 333, 333, 128, 0.0, -1, 0, False, BF16, "bthd"),
    (3, 5, 5, 700, 900, 96, 20.0, -1, 0, True, torch.half, "bhtd"),
    (1, 32, 8, 385, 400, 80, 20.0, -1, 0, True, BF16, "bthd"),
    (2, 7, 7, 129, 1, 64, 0.0, -1, -1, True, BF16, "bhtd"),
    (1, 3, 1, 1000, 1000, 40, 0.0, -1, 0, True, BF16, "bhtd"),
]
# Those that only an explicit configuration with one consumer runs
ALONE_POINTS = [
    (2, 4, 4, 1000, 1000, 128, 20.0, 100, 0, True, BF16, "bhtd"),
    (2, 4, 1, 700, 1000, 96, 0.0, 100, 50, False, BF16, "bhtd"),
    (3, 16, 16, 1500, 1500, 64, 0.0, 300, 0, False, BF16, "bthd"),
    (2, 32, 8, 2048, 2048, 128, 0.0, -1, 0, False, BF16, "bhtd"),
    (1, 32, 8, 512, 512, 128, 0.0, -1, 50, False, BF16, "bhtd"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_it_is_attention(point, device):
    check(point, config(point[5]), device)


@pytest.mark.gpu
@pytest.mark.parametrize("point", SHORT_POINTS, ids=str)
def test_a_short_prompt_is_attention(point, device):
    """As it runs by default, and with two consumers."""
    check(point, None, device)
    check(point, dataclasses.replace(CONFIG, num_stages=6 if point[5] <= 64 else 4), device)


@pytest.mark.gpu
@pytest.mark.parametrize("point", ALONE_POINTS, ids=str)
def test_one_consumer_is_attention(point, device):
    check(point, short(point[5]), device)


def check(point, config, device):
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
    start = ops.prepare_forward("attention", x, out, config)
    start(q, k, v, out, lse, *x.tensors)
    expected, expected_lse = formula(q.float(), k.float(), v.float(), s, sinks=sinks)
    assert torch.isfinite(out).all()
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
    assert hopper_forward.can_implement(problem(point), config(point[5]), TARGET) is None


@pytest.mark.parametrize("point", [*SHORT_POINTS, *ALONE_POINTS], ids=str)
def test_one_consumer_takes_what_its_tests_give_it(point):
    assert hopper_forward.can_implement(problem(point), short(point[5]), TARGET) is None
    assert hopper_forward.can_implement(problem(point), CONFIG, TARGET) is None
    by_default = choose_forward(problem(point), TARGET).num_warps == 4
    assert by_default or point in ALONE_POINTS or has_pairs(problem(point), TARGET)
    assert not (by_default and point in ALONE_POINTS)


CHOICES = [
    # batch, heads, n_q, n_k, head_dim, left, right, consumers, whether they are paired
    *((1, 32, n, n, 128, -1, 0, 1, False) for n in (65, 128, 256, 768, 1024)),
    *((1, 32, n, n, 64, -1, 0, 1, False) for n in (65, 128, 256, 512, 768, 1024)),
    (1, 32, 512, 512, 128, -1, 0, 2, True),
    (1, 32, 512, 512, 80, -1, 0, 2, True),
    (2, 32, 256, 256, 128, -1, 0, 2, True),
    (1, 32, 385, 999, 96, -1, 0, 2, True),
    (1, 32, 512, 512, 128, -1, -1, 1, False),
    (1, 32, 512, 512, 64, -1, -1, 1, False),
    (1, 32, 1024, 1024, 64, -1, -1, 2, False),
    (1, 32, 512, 512, 64, -1, -1, 1, False),
    (1, 32, 512, 512, 128, -1, 50, 2, False),
    (1, 32, 512, 512, 128, 100, 0, 2, False),  # windows, longer prompts and keys, more tiles: as they were measured
    (1, 32, 1025, 1025, 128, -1, 0, 2, False),
    (1, 32, 512, 1025, 128, -1, 0, 2, False),
    (2, 32, 1024, 1024, 128, -1, 0, 2, False),
    (5, 32, 256, 256, 128, -1, 0, 2, False),
    (1, 32, 512, 512, 256, -1, 0, 2, False),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_few_short_tiles_have_a_program_each(choice):
    batch, heads, n_q, n_k, head_dim, left, right, consumers, paired = choice
    p = problem((batch, heads, 8, n_q, n_k, head_dim, 0.0, left, right, False, BF16, "bhtd"))
    c = choose_forward(p, TARGET)
    assert c.num_warps == 4 * consumers
    pairs = has_pairs(p, TARGET)
    t = hopper_forward.tiling(c, p.scoring.flags, head_dim, TARGET.shared_memory, False, pairs)
    assert (t.consumers, t.paired, t.single) == (consumers, paired, paired or consumers == 1)
    assert not (t.single and (t.pingpong or t.overlap_tiles))
    if consumers == 1:  # 228 KiB an SM, of which each CTA has one more
        assert 2 * (t.shared_memory + 1024) <= 228 * 1024


def test_packed_sequences_have_no_program_for_each_tile():
    p = dataclasses.replace(problem(SHORT_POINTS[2]), packed=True, tokens=512)
    assert choose_forward(p, TARGET).num_warps == 8
    assert not has_pairs(p, TARGET)


@pytest.mark.parametrize("other", [{"packed": True}, {"head_dim": 136, "value_dim": 136}, {"batch": 1 << 12}], ids=str)
def test_one_consumer_leaves_the_rest_to_two(other):
    p = dataclasses.replace(problem(SHORT_POINTS[2]), **other)
    assert "num_warps is 4" in hopper_forward.can_implement(p, SHORT[128], TARGET)
    assert hopper_forward.can_implement(p, config(p.head_dim), TARGET) is None


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
    assert "kernel 'hopper' takes" in hopper_forward.can_implement(p, CONFIG, TARGET)


@pytest.mark.parametrize(("rows", "warps"), [(192, 8), (128, 12), (128, 4), (64, 8), (256, 16)])
def test_rows_and_warps_go_together(rows, warps):
    c = dataclasses.replace(CONFIG, block_m=rows, num_warps=warps)
    assert "for every 4 of 4, 8 or 12 warps" in hopper_forward.can_implement(problem(POINTS[1]), c, TARGET)


@pytest.mark.parametrize(("name", "value"), [("block_m", 100), ("num_warps", 6), ("block_n", 96), ("num_stages", 0)])
def test_odd_sizes_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
        dataclasses.replace(CONFIG, **{name: value})


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_scores_are_of_the_whole_head(head_dim):
    """In steps of 16, as the tensor cores take them, of what a tile has in memory; without its other half if they can
    do without.
    """
    p = dataclasses.replace(problem(POINTS[1]), head_dim=head_dim, value_dim=head_dim)
    t = hopper_forward.tiling(choose_forward(p, TARGET), p.scoring.flags, head_dim, TARGET.shared_memory, False)
    body, tail = t.multiplied
    assert head_dim <= body + tail <= t.dim
    assert body % 16 == tail % 16 == 0
    if head_dim > 64:
        assert (body + tail < t.dim) == (head_dim - t.dim // 2 <= t.dim // 4)


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
    """A prompt of another length with every request: nothing is computed on the host, copied or compiled for it, once
    each of the kernels that lengths choose among has run."""
    if device.type != "cuda":
        pytest.skip("torch.cuda.set_sync_debug_mode, which finds where the host waits, is CUDA's alone")
    kinds = set()  # of the calls: the kernel's warps, and whether consumers are paired

    def call(n_q, n_k, packed, **options):
        q, k, v = (torch.randn(2, 16, n, 128, dtype=BF16, device=device, requires_grad=True) for n in (n_q, n_k, n_k))
        if "window" not in options:
            right = 0 if options.get("causal") else -1
            p = Problem(2, 16, 16, n_q, n_k, 128, 128, BF16, Scoring(0.1, 0.0, -1, right))
            kinds.add((right, choose_forward(p, TARGET).num_warps, has_pairs(p, TARGET)))
        attention(q, k, v, **options).backward(q.detach())
        if packed:
            leaves = (t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in (q, k, v))
            attention_varlen(*leaves, [0, n_q // 2, n_q], [0, n_k // 3, n_k], **options).sum().backward()

    forms = [{"causal": True}, {"causal": True, "window": 100}, {"window": (60, 70)}, {}]
    for options in forms:
        # Of whole blocks and not, for each of those kernels
        for even in (256, 384, 640, 1280):
            for n_q, n_k in itertools.product((even, even - 20), repeat=2):
                call(n_q, n_k, True, scale=0.1, **options)
    compiled, warm = count_compiled(), set(kinds)
    assert warm == {(0, 4, False), (0, 8, True), (0, 8, False), (-1, 4, False), (-1, 8, False)}
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
    assert kinds == warm


# One tile a program


@triton.jit
def _pairs_kernel(sizes_ptr, rows_ptr, found_ptr, N: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Of N tiles with (n_q, n_k, end): the partner's first row, the end of what the block and its partner see, and the
    slots that the partner skips."""
    i = tl.arange(0, N)
    n_q, n_k, end, row = (tl.load(p + i) for p in (sizes_ptr, sizes_ptr + N, sizes_ptr + 2 * N, rows_ptr))
    other = work_order.partner_of(row, n_q, ROWS)
    tl.store(found_ptr + i, other)
    tl.store(found_ptr + N + i, work_order.end_of(row, end, n_q, n_k, 0, ROWS, KEYS))
    others = work_order.end_of(other, end, n_q, n_k, 0, ROWS, KEYS)
    before_scores, before_values = work_order.skips_of(end, others)
    tl.store(found_ptr + 2 * N + i, others)
    tl.store(found_ptr + 3 * N + i, before_scores)
    tl.store(found_ptr + 4 * N + i, before_values)


def blocks_seen(row, n_q, n_k):
    """Blocks of 128 keys that 64 causal queries see."""
    return -(-min(min(row + 64, n_q) + n_k - n_q, n_k) // 128)


def test_pairs_of_consumers_share_the_queries_and_are_equally_long(device):
    """Each block of queries is taken once, and each consumer reads exactly the keys that it sees and empties the ring.
    Tiles of whole blocks take as long as any other."""
    draw = random.Random(1)
    tiles = []
    for n_q in (*range(1, 200, 21), *(draw.randint(1, 2000) for _ in range(20))):
        n_k = draw.choice((n_q, n_q + draw.randint(0, 900), max(1, n_q - draw.randint(0, 900))))
        blocks = -(-n_q // 64)
        rows = range(blocks // 2 * 64, blocks * 64, 64)  # as `_place_in_batch` numbers them
        assert len(rows) == -(-n_q // 128)
        tiles += [(n_q, n_k, max(blocks_seen(row, n_q, n_k), 1), row) for row in rows]
    n = 1 << (len(tiles) - 1).bit_length()
    given = torch.tensor(tiles + tiles[:1] * (n - len(tiles)), dtype=torch.int32, device=device).T.contiguous()
    found = torch.empty(5, n, dtype=torch.int32, device=device)
    _pairs_kernel[(1,)](given, given[3], found, n, 64, 128)
    for (n_q, n_k), group in itertools.groupby(zip(tiles, found.T.tolist(), strict=False), lambda x: x[0][:2]):
        group = list(group)
        taken = [row for (*_, row), (other, *_) in group for row in (row, other) if row < n_q]
        assert sorted(taken) == list(range(0, n_q, 64))
        work = []
        for (_, _, end, row), (other, own, others, *skips) in group:
            assert own == end == max(blocks_seen(row, n_q, n_k), 1)
            assert others == (max(blocks_seen(other, n_q, n_k), 1) if other < n_q else 1)
            assert ring_of(end, own, (0, 0)) == ring_of(end, others, skips) == "drained"
            work.append(own + others)
        if n_k == n_q and n_q % 128 == 0:
            assert max(work) - min(work) <= 1


def ring_of(end, own, skips):
    """Walk a ring as a tile's producer and one consumer do: "drained" if the consumer is given what it multiplies."""
    before_scores, before_values = skips
    filled = [("k", end - 1)]
    for block in reversed(range(end - 1)):
        filled += [("k", block), ("v", block + 1)]
    filled.append(("v", 0))
    items = iter(filled)
    for _ in range(before_scores):
        next(items)
    assert next(items) == ("k", own - 1)
    for _ in range(before_values):
        next(items)
    for block in reversed(range(own - 1)):
        assert next(items) == ("k", block)
        assert next(items) == ("v", block + 1)
    assert next(items) == ("v", 0)
    return "drained" if next(items, None) is None else "left"


@triton.jit
def _quotients_kernel(out_ptr, reciprocal, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, work_order.divide_by_reciprocal(i, tl.full([], 0, tl.int32) + reciprocal))


@pytest.mark.parametrize("heads", [1, 3, 7, 32, 40, 1023, 32767, 32768])
def test_reciprocals_divide_exactly(heads, device):
    n = work_order.MOST_TILES
    given = work_order.reciprocals(1, heads, 1)
    found = torch.empty(n, dtype=torch.int32, device=device)
    _quotients_kernel[(1,)](found, given.all_heads_reciprocal, n)
    assert torch.equal(found, torch.arange(n, dtype=torch.int32, device=device) // heads)
    assert given.all_heads == heads
    assert given.heads_reciprocal == given.group_reciprocal == given.all_heads_reciprocal


# Compiled for sm_90, by a worker of `rooftile inspect` that finds these cases here

DENSE = all_cases()["attention"]


def compiled(head_dim, n, sinks=False, **options):
    """A point of the case with 32 heads and one batch entry."""
    point = DENSE.sets["llm"][0]
    sizes = {"batch": 1, "heads": 32, "kv_heads": 8, "seq_len": n, "head_dim": head_dim, "value_dim": head_dim}
    return dataclasses.replace(point, dims={**point.dims, **sizes, "has_sinks": int(sinks)}, options=options)


FORMS = ({"causal": True}, {}, {"causal": True, "softcap": 20.0}, {"causal": True, "scale": 0.3})
CASES = (
    dataclasses.replace(
        DENSE,
        name="attention, short",
        function=attention,
        grads=(),
        sets={
            "llm": (
                *(compiled(dim, n, **form) for dim, n in ((64, 512), (128, 256), (128, 512)) for form in FORMS),
                *(compiled(dim, n, sinks=True, causal=True) for dim, n in ((64, 512), (128, 256), (128, 512))),
            )
        },
    ),
    dataclasses.replace(
        DENSE,
        name="attention, one consumer",
        function=functools.partial(attention, config=SHORT[128]),
        grads=(),
        sets={"llm": tuple(compiled(128, 512, window=100, **form) for form in FORMS)},
    ),
)


@pytest.mark.nightly
def test_short_prompts_compile_for_sm_90_without_spills():
    rows = compile_on("sm_90", plan(CASES, sets=["llm"], dtypes=[BF16], source=__name__), {c.name: c for c in CASES})
    assert not [row.message for row in rows if row.verdict != "PASS"]
    kernels = [row.kernel for row in rows if row.kernel]
    assert {kernel.name for kernel in kernels} == {"attend"}
    assert {kernel.registers for kernel in kernels} == {128, 168}  # one consumer, and pairs
    assert not any(kernel.spills for kernel in kernels)
    for kernel in kernels:
        assert "consumers=1" not in kernel.constants["T"] or 2 * (kernel.shared + 1024) <= 228 * 1024
