"""A decode kernel that starts early computes what it does from lengths that the kernel before may still write.

Here that kernel is played: until the wait there are other lengths and pages, and the queries are NaN.
"""

import dataclasses
import functools

import pytest
import torch
import triton
import triton.language as tl
from test_decode_attention import decode_attention, every_config, make, paged

from rooftile import launching, runtime
from rooftile.ops import decode_attention as op
from rooftile.ops.decode_attention import kernel, schedule
from rooftile.ops.decode_attention.schedule import any_differs, plan_work, work_at

CAPACITY = 150
LENGTHS = [40, 0, 150, 64]
GUESSES = {
    "right": LENGTHS,
    "shorter": [1, 0, 17, 63],
    "longer": [150, 150, 150, 150],
    "one key more": [41, 0, 150, 64],
    "one key less": [40, 0, 149, 64],
    "other sequences": [64, 150, 0, 40],
    "none": [0, 0, 0, 0],
    "what memory held": [-(2**31), 2**31 - 1, 7, -1],
}
OF_EACH_KIND = ("right", "shorter", "one key more", "what memory held")  # the others nightly
pytestmark = pytest.mark.skipif(
    runtime.default_device().type != "cpu", reason="plays the kernel before, in the interpreter: programs take turns"
)


class Before:
    """What the kernel before writes: it is there when a program has waited, and another program begins before that."""

    def __init__(self):
        self.written = []
        self.waited = False
        self.plans = 0
        self.waits = 0

    def writes(self, tensor, stale):
        self.plans = 0  # those so far are of launches that waited first
        self.written.append((tensor, tensor.clone(), stale))

    def load_lengths(self, load, *args):
        if not self.waited:
            for tensor, _, stale in self.written:
                tensor.copy_(stale)
        loaded = load(*args)
        self.waited = False
        return loaded

    def wait(self):
        for tensor, true, _ in self.written:
            tensor.copy_(true)
        self.waited = True
        self.waits += 1

    def plan_work(self, plan, *args):
        self.plans += 1
        return plan(*args)


@pytest.fixture
def before(monkeypatch):
    played = Before()
    monkeypatch.setattr(op.pdl, "supported", lambda target: True)
    bind = launching.bind

    def without_options(launcher, *args, **options):
        return bind(launching.KernelLauncher(launcher.kernel, launcher.constants), *args, **options)

    monkeypatch.setattr(launching, "bind", without_options)
    for module in (kernel, schedule):
        monkeypatch.setattr(module, "pdl_launch_dependents", lambda: None)
    monkeypatch.setattr(schedule, "pdl_wait", lambda: None)
    monkeypatch.setattr(kernel, "prefetch", lambda pointers: None)
    monkeypatch.setattr(kernel, "pdl_wait", played.wait)
    monkeypatch.setattr(kernel, "load_lengths", functools.partial(played.load_lengths, kernel.load_lengths))
    monkeypatch.setattr(kernel, "plan_work", functools.partial(played.plan_work, kernel.plan_work))
    return played


def early(config):
    return dataclasses.replace(config, pdl=True, prefetch_blocks=1)


@pytest.mark.each_once
@every_config
@pytest.mark.parametrize(
    "guess",
    [pytest.param(g, id=n, marks=() if n in OF_EACH_KIND else pytest.mark.nightly) for n, g in GUESSES.items()],
)
def test_a_wrong_guess_changes_no_bit(guess, config, before, device):
    q, k, v, lengths = make(device, LENGTHS, tokens=2, capacity=CAPACITY)
    wanted = decode_attention(q, k, v, lengths, return_lse=True, config=config)
    before.writes(lengths, torch.tensor(guess, dtype=torch.int32))
    before.writes(q, torch.full_like(q, float("nan")))
    results = decode_attention(q, k, v, lengths, return_lse=True, config=early(config))
    assert before.waits > 1
    # Where no item is cut, lengths say how much a program does, and not what.
    again = guess != LENGTHS and config.combine != "none"
    assert before.plans == before.waits * (2 if again else 1)
    for result, expected in zip(results, wanted, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.each_once
@every_config
@pytest.mark.parametrize("window", [None, 20])
def test_pages_are_read_again(window, config, before, device):
    """With the lengths right and the table wrong: in what is there already, and in pages that there are not."""
    q, k, v, lengths = make(device, LENGTHS, capacity=CAPACITY)
    order = torch.randperm(40, device=device)
    pages = [paged(t, 16, order, 40) for t in (k, v)]
    table = order.to(torch.int32).view(4, 10)
    wanted = decode_attention(q, *pages, lengths, page_table=table, window=window, config=config)
    before.writes(lengths, lengths.clone())
    before.writes(table, torch.where(table % 2 == 0, table.flip(1), -(2**31)))
    out = decode_attention(q, *pages, lengths, page_table=table, window=window, config=early(config))
    assert torch.equal(out, wanted)
    assert before.plans == before.waits


@triton.jit
def _differ_kernel(out_ptr, lengths_ptr, guess_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr, any_differs(tl.load(lengths_ptr + at), tl.load(guess_ptr + at)).to(tl.int32))


@pytest.mark.parametrize("at", [None, 0, 3, 7])
@pytest.mark.parametrize("by", [-1, 1, 2**31 - 8])
def test_one_length_of_many_that_differs_is_seen(at, by, device):
    lengths = torch.arange(8, dtype=torch.int32, device=device)
    guess, out = lengths.clone(), torch.full((1,), -1, dtype=torch.int32, device=device)
    if at is not None:
        guess[at] += by
    _differ_kernel[(1,)](out, lengths, guess, 8)
    assert bool(out) == (at is not None)


@triton.jit(do_not_specialize=["programs"])
def _plan_kernel(out_ptr, lengths_ptr, programs, MIN_BLOCKS: tl.constexpr, SLACK: tl.constexpr, N: tl.constexpr):
    program = tl.program_id(0)
    lengths = tl.load(lengths_ptr + tl.arange(0, N))
    sharing, at, stop = plan_work(lengths, program, N, 1, 2, 150, programs, None, N, 16, MIN_BLOCKS, SLACK)
    part = work_at(at, stop, program, programs, lengths, sharing, 1, 2, 150, None, N, 16)
    tl.store(out_ptr + 3 * program, at)
    tl.store(out_ptr + 3 * program + 1, stop)
    tl.store(out_ptr + 3 * program + 2, part[5] - part[4])


@pytest.mark.parametrize("surplus", [0, 1000], ids=["shares", "aligned"])
def test_a_program_without_a_part_has_no_blocks(surplus, device):
    """Its place may be beyond all sequences, and queries are read where a part has blocks."""
    out = torch.empty(16, 3, dtype=torch.int32, device=device)
    _plan_kernel[(16,)](out, torch.tensor([1, 0], dtype=torch.int32, device=device), 16, 1, surplus, 2)
    begun = out[:, 0] < out[:, 1]
    assert begun.sum() == 4  # an item of each sequence and head, of one block
    assert ((out[:, 2] > 0) == begun).all()
