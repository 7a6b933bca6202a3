"""The backward for sm_90 of packed sequences: against autograd in float64, and its parts without a GPU."""

import dataclasses
import itertools
import math

import pytest
import torch
from test_attention_backward import formula
from test_attention_hopper_backward import (
    BF16,
    HALF,
    LIMIT,
    config,
    dirty_memory,
    error,
    skip_elsewhere,
    three_programs,
)

from rooftile import runtime
from rooftile.cases import OpCase, Point, Tolerance
from rooftile.inspect import compile_on, plan
from rooftile.launching import bind, launcher
from rooftile.ops.attention import arguments, attention_varlen, ops, row_sums, slots
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem, Scoring

import triton  # isort: skip
import triton.language as tl  # isort: skip

hopper_backward = pytest.importorskip("rooftile.ops.attention.hopper_backward")
__all__ = ["dirty_memory", "three_programs"]  # fixtures

# Of one sequence the relative error may be more than that of all: few keys average over few roundings.
ONE = 4
EDGES = [0, 1, 63, 64, 65, 0, 0, 127, 128, 129, 2, 256, 0]
RANDOM = [5, 300, 17, 700, 0, 129, 64, 1, 333]
MORE_KEYS = [9, 310, 17, 650, 40, 200, 0, 1, 500]  # less in one place, none for queries in another
SKEWED = [4] * 40 + [1500] + [1] * 30
# left, right, softcap
SCORINGS = {"full": (-1, -1, 0.0), "causal": (-1, 0, 0.0), "window": (60, 40, 0.0), "softcap": (-1, 0, 20.0)}


def starts_of(lengths, first=0):
    return [first, *(first + n for n in itertools.accumulate(lengths))]


def ordered(starts, total):
    """What `slots.prepare_starts` makes of one side."""
    return list(itertools.accumulate((min(max(n, 0), total) for n in starts), max))


def parts_of(starts):
    return [slice(a, b) for a, b in itertools.pairwise(starts)]


class Packed:
    """The inputs of a backward of packed sequences, and the gradients that autograd finds in float64, of each alone.

    The sequences `bad` are NaN everywhere, as are rows that no sequence covers; they have no expected gradients.
    """

    def __init__(
        self, starts_q, starts_k, heads, kv_heads, dim, dtype, scoring, device, *, total_q=None, total_k=None, bad=(),
        sinks=False,
    ):  # fmt: skip
        total_q, total_k = total_q or starts_q[-1], total_k or starts_k[-1]
        self.starts = [torch.tensor(starts, dtype=torch.int32, device=device) for starts in (starts_q, starts_k)]
        of_q, of_k = (parts_of(ordered(s, n)) for s, n in ((starts_q, total_q), (starts_k, total_k)))
        self.good = [(a, b) for i, (a, b) in enumerate(zip(of_q, of_k, strict=True)) if i not in bad]
        self.s = Scoring(dim**-0.5, scoring[2], *scoring[:2])
        self.sinks = torch.randn(heads, device=device) if sinks else None
        wide_sinks = None if self.sinks is None else self.sinks.double().requires_grad_()

        def draw(n, n_heads, parts):
            drawn = torch.randn(n, n_heads, dim, device=device).to(dtype)
            seen = torch.zeros(n, dtype=torch.bool, device=device)
            for part in parts:
                seen[part] = True
            drawn[~seen] = math.nan
            return arguments.as_bhtd(drawn, "thd")

        good_q, good_k = [a for a, _ in self.good], [b for _, b in self.good]
        self.q, self.dout = draw(total_q, heads, good_q), draw(total_q, heads, good_q)
        self.k, self.v = draw(total_k, kv_heads, good_k), draw(total_k, kv_heads, good_k)
        self.dlse = torch.randn(1, heads, total_q, device=device)
        self.out = torch.full_like(self.q, math.nan)
        self.lse = torch.full((1, heads, total_q), math.nan, device=device)
        self.expected = [torch.zeros_like(t, dtype=torch.float64) for t in (self.q, self.k, self.v)]
        self.dsinks = None if wide_sinks is None else torch.zeros_like(wide_sinks)
        for a, b in self.good:
            if a.start == a.stop:
                continue
            leaves = [t[:, :, p].double().requires_grad_() for t, p in ((self.q, a), (self.k, b), (self.v, b))]
            if b.start == b.stop:
                self.out[:, :, a] = 0
                self.lse[:, :, a] = -math.inf
                continue
            out, lse = formula(*leaves, self.s, sinks=wide_sinks)
            self.out[:, :, a], self.lse[:, :, a] = out.detach().to(dtype), lse.detach().float()
            total = (out * self.dout[:, :, a].double()).sum()
            total = total + (torch.where(torch.isfinite(lse), lse, 0.0) * self.dlse[:, :, a]).sum()
            found = torch.autograd.grad(total, leaves if wide_sinks is None else [*leaves, wide_sinks])
            for sum_of, one, part in zip(self.expected, found, (a, b, b), strict=False):
                sum_of[:, :, part] = one
            if self.dsinks is not None:
                self.dsinks += found[3]

    def inputs(self):
        lengths = (self.q.shape[2], self.k.shape[2])
        return arguments.inputs(self.q, self.k, self.v, self.s, None, None, self.sinks, *self.starts, *lengths)

    def gradients(self, deterministic, wanted=("dq", "dk", "dv")):
        like = {"dq": self.q, "dk": self.k, "dv": self.v}
        found = [torch.full_like(t, math.nan) if name in wanted else None for name, t in like.items()]
        found = (*found, None if self.sinks is None else torch.full_like(self.sinks, math.nan))
        x, of_rows = self.inputs(), (self.out, self.lse, self.dout, self.dlse)
        start = ops.prepare_backward(x, *of_rows, found, config=config(self.q.shape[3]), deterministic=deterministic)
        start(self.q, self.k, self.v, *of_rows, *found, *x.tensors)
        return found

    def check(self, found, dtype):
        sides = {"dq": 0, "dk": 1, "dv": 1}
        for (name, side), one, other in zip(sides.items(), found, self.expected, strict=False):
            if one is None:
                continue
            covered = torch.zeros(one.shape[2], dtype=torch.bool, device=one.device)
            for part in (pair[side] for pair in self.good if pair[side].start < pair[side].stop):
                assert error(one[:, :, part], other[:, :, part].float()) < ONE * LIMIT[dtype], (name, part)
                covered[part] = True
            if covered.any():
                assert error(one[:, :, covered], other[:, :, covered].float()) < LIMIT[dtype], name


def both_starts(name):
    lengths_q = {"edges": EDGES, "random": RANDOM, "skewed": SKEWED}[name]
    return starts_of(lengths_q), starts_of(MORE_KEYS if name == "random" else lengths_q)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("lengths", ["edges", "random"])
def test_gradients_are_those_of_each_sequence_alone(
    lengths, scoring, head_dim, dtype, deterministic, device, dirty_memory
):
    skip_elsewhere(device)
    given = Packed(*both_starts(lengths), 4, 2, head_dim, dtype, SCORINGS[scoring], device)
    found = given.gradients(deterministic)
    given.check(found, dtype)
    if deterministic:
        again = given.gradients(deterministic)
        assert all(torch.equal(one, other) for one, other in zip(found[:3], again[:3], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("lengths", ["edges", "random", "skewed"])
def test_programs_that_take_many_tiles_do_not_mix_them(
    lengths, scoring, head_dim, deterministic, device, dirty_memory, three_programs
):
    skip_elsewhere(device)
    given = Packed(*both_starts(lengths), 4, 2, head_dim, BF16, SCORINGS[scoring], device)
    given.check(given.gradients(deterministic), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scoring", ["full", "causal"])
def test_nan_does_not_leave_its_sequence(scoring, head_dim, deterministic, device, dirty_memory):
    skip_elsewhere(device)
    lengths = [70, 33, 129, 1, 200, 64]
    for bad in ((0, 2, 4), (1, 3, 5)):
        starts = starts_of(lengths, first=7)
        total = starts[-1] + 19
        given = Packed(
            starts, starts, 4, 2, head_dim, BF16, SCORINGS[scoring], device, total_q=total, total_k=total, bad=bad
        )
        found = given.gradients(deterministic)
        given.check(found, BF16)
        for t in found[:3]:
            assert (t[:, :, :7] == 0).all()
            assert (t[:, :, starts[-1] :] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_one_long_sequence_among_many_short_ones(head_dim, deterministic, device, dirty_memory):
    skip_elsewhere(device)
    given = Packed(*both_starts("skewed"), 8, 1, head_dim, BF16, SCORINGS["causal"], device)
    given.check(given.gradients(deterministic), BF16)


@pytest.mark.gpu
def test_sequences_shorter_than_a_step_take_no_sum_of_dq(device, dirty_memory):
    skip_elsewhere(device)
    starts = starts_of([4] * 500)
    given = Packed(starts, starts, 2, 2, 128, BF16, SCORINGS["causal"], device)
    found = given.gradients(False)
    given.check(found, BF16)
    assert all(torch.equal(one, other) for one, other in zip(found[:3], given.gradients(False)[:3], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dv")], ids=str)
def test_what_nobody_asks_for_is_left_out(wanted, device, dirty_memory):
    skip_elsewhere(device)
    given = Packed(*both_starts("random"), 4, 2, 128, BF16, SCORINGS["causal"], device)
    for deterministic in (False, True):
        found = given.gradients(deterministic, wanted)
        assert [t is not None for t in found[:3]] == [name in wanted for name in ("dq", "dk", "dv")]
        given.check(found, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_sinks_have_gradients_and_take_part_in_the_others(deterministic, device, dirty_memory):
    skip_elsewhere(device)
    lengths = [70, 33, 129, 1, 200, 64]
    given = Packed(starts_of(lengths), starts_of(lengths), 4, 2, 128, BF16, SCORINGS["causal"], device, sinks=True)
    found = given.gradients(deterministic)
    given.check(found, BF16)
    assert error(found[3], given.dsinks.float()) < LIMIT[BF16]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_starts_that_decrease_do_no_harm(deterministic, device, dirty_memory):
    skip_elsewhere(device)
    for starts in ([3, 200, -4, 600, 150, 390], [500, 600], [-9, -3], [5, 2, 300]):
        given = Packed(starts, starts, 4, 2, 64, BF16, SCORINGS["causal"], device, total_q=400, total_k=400)
        given.check(given.gradients(deterministic), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_a_graph_replays_other_lengths(deterministic, device):
    """Lengths are read on the device: the graph has none of them in it."""
    skip_elsewhere(device)
    one = Packed(starts_of([300, 84]), starts_of([300, 84]), 4, 2, 128, BF16, SCORINGS["causal"], device)
    other = Packed(starts_of([100, 284]), starts_of([100, 284]), 4, 2, 128, BF16, SCORINGS["causal"], device)
    one.gradients(deterministic)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = one.gradients(deterministic)
    for name in ("q", "k", "v", "out", "lse", "dout", "dlse"):
        getattr(one, name).copy_(getattr(other, name))
    for mine, its in zip(one.starts, other.starts, strict=True):
        mine.copy_(its)
    graph.replay()
    other.check(found, BF16)


@pytest.mark.gpu
def test_a_configuration_that_names_it_is_followed_by_its_gradients(device):
    skip_elsewhere(device)
    starts = torch.tensor(starts_of([300, 84]), dtype=torch.int32, device=device)
    leaves = [torch.randn(384, 4, 128, device=device, dtype=BF16, requires_grad=True) for _ in range(3)]
    launched = []
    for given in (AttentionConfig("hopper", 128, 128, 8, 4), AttentionConfig("portable", 64, 64, 4, 2)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            out = attention_varlen(*leaves, starts, causal=True, config=given)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
            torch.cuda.synchronize()
        launched.append({event.key for event in profile.key_averages()})
    assert "keys_gradients" in launched[0]
    assert "dkdv_kernel" in launched[1]


# Without a GPU


@triton.jit
def _find_kernel(starts_ptr, found_ptr, sequences, SIDE: tl.constexpr, ROWS: tl.constexpr):
    slot = tl.program_id(0)
    index, begin, length, block = slots.find_block(slot, starts_ptr, sequences, SIDE, ROWS)
    tl.store(found_ptr + 4 * slot, index)
    tl.store(found_ptr + 4 * slot + 1, begin)
    tl.store(found_ptr + 4 * slot + 2, length)
    tl.store(found_ptr + 4 * slot + 3, block)


@pytest.mark.each_once
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    "starts", [starts_of(EDGES), starts_of(RANDOM, first=70), [0], [5, 2, 300], [3, 200, -4, 600, 150, 390]], ids=str
)
def test_every_block_has_one_slot(starts, side, device):
    total, rows, sequences = 3000 if starts[-1] > 600 else 400, 64, len(starts) - 1
    given = torch.tensor(starts, dtype=torch.int32, device=device)
    other = torch.arange(len(starts), dtype=torch.int32, device=device)
    pair, totals = ((given, other), (total, 10**6)) if side == 0 else ((other, given), (10**6, total))
    both = slots.prepare_starts(sequences, *totals)(*pair)
    own = ordered(starts, total)
    assert both[:, side].tolist() == own
    assert both[:, 1 - side].tolist() == other.tolist()
    if sequences == 0:
        return
    n = slots.block_slots(total, rows, sequences)
    found = torch.full((n, 4), -1, dtype=torch.int32, device=device)
    start = bind(launcher(_find_kernel, (), {"SIDE": side, "ROWS": rows}), n, numbers=(sequences,))
    start(both, found)
    expected = {
        (i, a, b - a, j) for i, (a, b) in enumerate(itertools.pairwise(own)) for j in range(-(-(b - a) // rows))
    }
    blocks = [tuple(block) for block in found.tolist() if block[2] > 0]
    assert len(blocks) == len(expected)
    assert set(blocks) == expected
    for slot, (i, begin, length, block) in enumerate(found.tolist()):
        assert slot == begin // rows + i + block or length == block == 0


def test_statistics_and_sums_are_of_each_sequence_alone(device):
    heads, dim, rows = 2, 64, 128
    starts = starts_of([70, 0, 129, 3, 300], first=5)
    total, sequences = starts[-1] + 9, len(starts) - 1
    out, dout = (torch.randn(total, heads, dim, device=device).to(HALF) for _ in range(2))
    out[:5] = math.nan
    lse, dlse = (torch.randn(1, heads, total, device=device) for _ in range(2))
    lse[:, 1, 7] = -math.inf
    bhtd = [arguments.as_bhtd(t, "thd") for t in (out, dout)]
    given = torch.tensor(starts, dtype=torch.int32, device=device)
    both = slots.prepare_starts(sequences, total, total)(given, given)
    blocks = row_sums.row_blocks(total, rows, sequences)
    stats = torch.full((heads, blocks, 2, rows), math.nan, device=device)
    sums = torch.full((heads, blocks, rows, dim), math.nan, device=device)
    counter = torch.full((1,), -77, dtype=torch.int32, device=device)
    make = row_sums.prepare_stats(*bhtd, dlse, True, True, rows, dim, sequences)
    make(*bhtd, lse, dlse, stats, sums, counter, both)
    assert counter.item() == 0
    delta = (out.float() * dout.float()).sum(-1).T - dlse[0]
    covered = torch.zeros(blocks, dtype=torch.bool, device=device)
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        for at in range(a, b, rows):
            slot, n = a // rows + i + (at - a) // rows, min(b - at, rows)
            assert not covered[slot]
            covered[slot] = True
            fully_masked = lse[0, :, at : at + n] == -math.inf
            expected = torch.where(fully_masked, math.inf, lse[0, :, at : at + n] * math.log2(math.e))
            torch.testing.assert_close(stats[:, slot, 0, :n], expected)
            torch.testing.assert_close(stats[:, slot, 1, :n], torch.where(fully_masked, 0.0, delta[:, at : at + n]))
            assert (stats[:, slot, 0, n:] == math.inf).all()
            assert (stats[:, slot, 1, n:] == 0).all()
    assert (sums[:, covered] == 0).all()
    assert sums[:, ~covered].isnan().all()

    # The sum as the kernel of dk and dv orders it: tiles of 64 x 64, in the order of its registers.
    dq = torch.randn(total, heads, dim, device=device)
    for i, (a, b) in enumerate(itertools.pairwise(starts)):
        for at in range(a, b, 64):
            tile = torch.full((64, heads, 64), math.nan, device=device)
            n = min(b - at, 64)
            tile[:n] = dq[at : at + n]
            slot, half = a // rows + i + (at - a) // rows, (at - a) // 64 % 2
            order = tile.permute(1, 0, 2).reshape(heads, 4, 2, 8, 8, 4, 2).permute(0, 1, 4, 3, 5, 2, 6)
            sums[:, slot, half * 64 : half * 64 + 64] = order.reshape(heads, 64, 64)
    found = torch.full((total, heads, dim), math.nan, device=device)
    view = arguments.as_bhtd(found, "thd")
    row_sums.prepare_finish(view, 0.5, rows, dim, sequences)(sums, view, both)
    torch.testing.assert_close(found[starts[0] : starts[-1]], dq[starts[0] : starts[-1]] * 0.5)
    assert found[: starts[0]].isnan().all()
    assert found[starts[-1] :].isnan().all()


def test_what_it_can_not_implement_of_packed_sequences():
    target = runtime.TARGETS["sm_90"]
    p = Problem(4096, 32, 8, 16384, 16384, 128, 128, BF16, Scoring(0.1), packed=True, tokens=16384)
    refused = hopper_backward.can_implement
    assert refused(p, config(128), target) is None
    assert "2^30" in refused(dataclasses.replace(p, tokens=2**25), config(128), target)
    assert "empty" in refused(dataclasses.replace(p, batch=0), config(128), target)
    assert "ALiBi" in refused(dataclasses.replace(p, alibi=True), config(128), target)


def _launch(x, scoring, deterministic):
    """The launches of the backward for packed tensors like x."""
    q = arguments.as_bhtd(x, "thd")
    k = q[:, : q.shape[1] // 2]
    starts = torch.empty(9, dtype=torch.int32, device=x.device)
    s = Scoring(x.shape[2] ** -0.5, scoring[2], *scoring[:2])
    lse = torch.empty(q.shape[:3], device=x.device)
    found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(k), None)
    given = Inputs(q, k, k, s, starts_q=starts, starts_k=starts, longest_q=q.shape[2], longest_k=q.shape[2])
    c = config(x.shape[2])
    start = ops.prepare_backward(given, q, lse, q, None, found, config=c, deterministic=deterministic)
    start(q, k, k, q, lse, q, None, *found, *given.tensors)
    return x


CASES = tuple(
    OpCase(
        name=name,
        formula="",
        function=_launch,
        reference=_launch,
        eager=_launch,
        inputs=lambda point, dtype, device, generator: {
            "x": torch.empty((4096, 4, point["head_dim"]), dtype=dtype, device=device)
        },
        outputs=("x",),
        grads=(),
        nbytes=lambda point, itemsize, direction: 0,
        flops=lambda point, direction: 0,
        tolerances={dtype: {"forward": Tolerance(0.0, "")} for dtype in (BF16, HALF)},
        sets={
            "llm": tuple(
                Point(f"D{dim} {deterministic}", {"head_dim": dim}, {"scoring": given, "deterministic": deterministic})
                for dim in (64, 128)
                for deterministic in (False, True)
            )
        },
        spills=512,  # as cases/attention.py
    )
    for name, given in SCORINGS.items()
)


@pytest.mark.nightly
@pytest.mark.parametrize("scoring", SCORINGS)
def test_it_compiles(scoring):
    cases = {case.name: case for case in CASES if case.name == scoring}
    rows = compile_on("sm_90", plan(list(cases.values()), source=__name__, dtypes=[BF16]), cases)
    assert not [f"{row.points}: {row.message}" for row in rows if row.verdict == "FAIL"]
    kernels = [row.kernel.name for row in rows if row.kernel]
    assert kernels.count("keys_gradients") == 4
    assert kernels.count("queries_gradient") == 2
