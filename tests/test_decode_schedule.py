"""How decode_attention divides the keys among programs: every block once, and the heads of a token together."""

import dataclasses
import random

import pytest
from test_decode_attention import SHARES, assert_right, decode_attention, expected, make
from test_decode_attention_hopper import work_of

from rooftile.ops.decode_attention import schedule

KEYS = 64  # of a block of `work_of`
ITEM_COST = schedule.ITEM_COST.value


def blocks_of(lengths):
    return [max(1, -(-n // KEYS)) for n in lengths]


def check(lengths, kv_heads, work):
    """Every block of every item is read once, and each split is stored where the others' results are read."""
    read, slots, splits = set(), set(), {}
    for of_program in work:
        for seq, head, n_keys, first, low, high, slot, count, *rest in of_program:
            assert n_keys == lengths[seq]
            assert first == 0
            if low >= high:  # of a short sequence, where longer ones have more splits
                continue
            for block in range(low, high):
                assert (seq, head, block) not in read
                read.add((seq, head, block))
            splits.setdefault((seq, head), []).append((low, slot, count, *rest))
            if count > 1:
                assert slot not in slots
                slots.add(slot)
    expected = {(s, h, b) for s, n in enumerate(blocks_of(lengths)) for h in range(kv_heads) for b in range(n)}
    assert read == expected
    for found in splits.values():
        (_, _, count, first, stride, second), *_ = found
        assert len(found) == count
        assert {(first, stride, second)} == {tuple(rest) for *_, rest in ((x[0], x[3:]) for x in found)}
        if count > 1:
            stored = [slot for _, slot, *_ in sorted(found)]
            assert stored == [2 * (first + i * stride) + (second if i == 0 else 0) for i in range(count)]
            assert max(stored) < 2 * len(work)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("programs", [1, 7, 16, 24, 50])
@pytest.mark.parametrize("min_blocks", [1, 3])
@pytest.mark.parametrize("slack", [0, 1000], ids=["shares", "aligned"])
def test_every_block_of_every_head_is_read_once(kv_heads, programs, min_blocks, slack, device):
    numbers = random.Random(programs * 10 + kv_heads)
    lengths = [numbers.choice([0, 1, 64, 200, 900]) for _ in range(5)]
    check(lengths, kv_heads, work_of(lengths, 1, kv_heads, 1024, programs, min_blocks, slack, device))


@pytest.mark.parametrize(
    ("kv_heads", "programs"), [(3, 7), (3, 8), (3, 10), (5, 16), (2, 13), (4, 33), (8, 46), pytest.param(40, 132)]
)
def test_heads_that_programs_read_in_turn_are_read_once(kv_heads, programs, device):
    """Without groups, a sequence has several items in a row, and boundaries of shares among them."""
    numbers = random.Random(kv_heads)
    for _ in range(5 if kv_heads < 8 else 1):
        lengths = [numbers.randrange(0, 900) for _ in range(numbers.randrange(2, 7))]
        check(lengths, kv_heads, work_of(lengths, 1, kv_heads, 1024, programs, 1, 0, device))


def test_programs_of_a_group_read_the_same_tokens_of_all_heads(device):
    lengths = [900, 70, 512, 0, 333]
    work = work_of(lengths, 1, 4, 1024, 24, 1, 0, device)
    groups = [work[i : i + 4] for i in range(0, 24, 4)]
    for group in groups:
        for lane, of_program in enumerate(group):
            assert [(s, low, high) for s, _, _, _, low, high, *_ in of_program] == [
                (s, low, high) for s, _, _, _, low, high, *_ in group[0]
            ]
            assert {head for _, head, *_ in of_program} == {lane}
    assert sum(high - low for group in groups for _, _, _, _, low, high, *_ in group[0]) == sum(blocks_of(lengths))


@pytest.mark.parametrize("programs", [24, 50])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_shares_cost_the_same(kv_heads, programs, device):
    """A share of empty sequences has as many as take the time of the others: each costs ITEM_COST beside its block."""
    lengths = [640] * 5 + [0] * 15 + [64, 128, 300] * 2
    work = work_of(lengths, 1, kv_heads, 1024, programs, 1, 0, device)
    costs = [
        sum(high - low + ITEM_COST * (low == 0) for _, _, _, _, low, high, *_ in of_program) for of_program in work
    ]
    total = kv_heads * sum(n + ITEM_COST for n in blocks_of(lengths))
    assert sum(costs) == total
    assert max(costs) <= -(-total // (programs - programs % kv_heads)) + ITEM_COST  # a boundary moves by so much


@pytest.mark.parametrize(("kv_heads", "programs", "idle"), [(8, 88, 0), (10, 132, 2), (12, 33, 0)])
def test_groups_leave_few_programs_without_work(kv_heads, programs, idle, device):
    """A group has a program for each head, unless that would leave more than a 16th without work: 33 % 12 is 9."""
    work = work_of([1024, 64] * 5, 1, kv_heads, 1024, programs, 1, 0, device)
    assert sum(not of_program for of_program in work) == idle


@pytest.mark.parametrize("combine", ["last", "kernel"])
@pytest.mark.parametrize(("programs", "window", "min_blocks"), [(5, None, 1), (8, None, 1), (9, 40, 1), (16, 40, 2)])
def test_shares_of_groups_give_the_results(combine, programs, window, min_blocks, device):
    """Of 4 KV heads: without groups, two groups, without, four. Sequences begin and end within shares."""
    inputs = make(device, [150, 3, 0, 97], heads=(8, 4))
    config = dataclasses.replace(SHARES, programs_per_sm=programs, combine=combine, min_blocks=min_blocks)
    found = decode_attention(*inputs, window=window, return_lse=True, config=config)
    assert_right(found, expected(*inputs, window=window))
