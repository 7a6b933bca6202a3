"""attention_paged over a latent cache for sm_90: its tiles, its threads as threads on the CPU, and what is refused.

The threads are those of tests/test_decode_attention_hopper.py; the tiles are planned, and splits combined, by the
kernels' own functions in Triton's interpreter.
"""

import dataclasses
import functools
import itertools
import random

import pytest
import torch
from test_attention_paged import make as make_paged
from test_decode_attention_hopper import (
    BF16,
    DIM,
    TARGET,
    VALUES,
    Described,
    Pointer,
    Sm,
    make,
    run_program,  # noqa: F401  # a fixture
    tile,
)

from rooftile import runtime
from rooftile.cases import all_cases
from rooftile.cases.attention_paged import point
from rooftile.cases.check import relative_error
from rooftile.inspect import compile_on, plan
from rooftile.ops.attention import AttentionConfig, attention_paged, paged
from rooftile.ops.attention.latent import HOPPER, can_implement_forward, choose_forward, choose_invariant
from rooftile.ops.attention.problem import Problem, Scoring
from rooftile.ops.decode_attention import schedule
from rooftile.primitives.paging import PAGES, page_step
from rooftile.reference import decode_attention as reference

import triton  # isort: skip
import triton.language as tl  # isort: skip

pytest.importorskip("rooftile.ops.attention.hopper_latent")
hopper = pytest.importorskip("rooftile.ops.decode_attention.hopper_latent")
parts = pytest.importorskip("rooftile.ops.decode_attention.hopper_latent_parts")
gluon = pytest.importorskip("rooftile.primitives.gluon")

LOG2E = 1.4426950408889634
simulated = pytest.mark.skipif(
    runtime.MODE is runtime.Mode.GPU,
    reason="simulates the kernel's threads with Triton kernels in the interpreter, which this process does not run; on "
    "sm_90 test_it_is_the_portable_kernel runs the kernel itself",
)


# The tiles


@triton.jit
def _tiles_kernel(
    out_ptr, plan_ptr, starts_ptr, lengths_ptr, n_seqs, tokens, kv_heads, capacity, programs, GROUP: tl.constexpr,
    CAUSAL: tl.constexpr, SPLIT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    lengths = schedule.load_lengths(lengths_ptr, n_seqs, N)
    plan = schedule.plan_tiles(
        starts_ptr, lengths, n_seqs, tokens, kv_heads, capacity, programs, GROUP, 64, N, 64, SPLIT
    )
    tl.store(plan_ptr, plan[1])
    tl.store(plan_ptr + 1, plan[2])
    for at in range(plan[2]):
        found = schedule.tile_at(
            at, plan, starts_ptr, lengths_ptr, n_seqs, tokens, kv_heads, capacity, GROUP, 64, CAUSAL, 64
        )
        for i in tl.static_range(11):
            tl.store(out_ptr + at * 11 + i, found[i])


def tiles_of(n_q, lengths, group, kv_heads, capacity, programs, causal, split, device, starts=None):
    """The splits of tiles, as `tile_at` returns them, and how many a tile has."""
    starts = [0, *itertools.accumulate(n_q)] if starts is None else starts
    tokens = sum(n_q)
    most = (tokens * group * kv_heads // 64 + 2 * len(n_q) * kv_heads + programs) * 2
    out = torch.zeros(most, 11, dtype=torch.int32, device=device)
    plan = torch.zeros(2, dtype=torch.int32, device=device)
    given = (torch.tensor(t, dtype=torch.int32, device=device) for t in (starts, lengths))
    n = 1 << (len(n_q) - 1).bit_length()
    _tiles_kernel[(1,)](
        out, plan, *given, len(n_q), tokens, kv_heads, capacity, programs, group, causal, split, n
    )  # fmt: skip
    splits, stop = plan.tolist()
    assert stop <= most
    return out[:stop].tolist(), splits


N_Q, LENGTHS = [7, 0, 1, 33, 3, 64, 2], [70, 33, 640, 40, 2, 64, 0]


@pytest.mark.each_once
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (16, 1), (64, 2), (128, 1)])
def test_tiles_cover_each_row_once_with_the_keys_that_its_last_token_sees(group, kv_heads, causal, split, device):
    for n_q, lengths in ((N_Q, LENGTHS), ([2, 0, 1], [700, 9, 129])):
        found, splits = tiles_of(n_q, lengths, group, kv_heads, 1024, 24, causal, split, device)
        starts = [0, *itertools.accumulate(n_q)]
        assert (splits > 1) == (split and 2 * len(found) // splits <= 24)
        blocks = {}
        for at, (seq, kv_head, token, head, n_new, n_keys, low, high, slot, first, count) in enumerate(found):
            assert first == at // splits * splits
            assert slot == 2 * at
            assert head // group == kv_head
            assert 1 <= n_new <= max(1, 64 // group)
            last = token + n_new - starts[seq]
            assert last <= n_q[seq]
            assert n_keys == (max(0, lengths[seq] - n_q[seq] + last) if causal else lengths[seq])
            assert count <= splits
            assert (low < high) == (at - first < count)
            blocks.setdefault((token, head, n_new, n_keys, seq), []).extend(range(low, high))
        rows = []
        for (token, head, n_new, n_keys, _), visited in blocks.items():
            assert visited == list(range(max(1, -(-n_keys // 64))))
            rows += itertools.product(range(token, token + n_new), range(head, head + min(group, 64)))
        assert sorted(rows) == list(itertools.product(range(sum(n_q)), range(group * kv_heads)))
        lengths_of = [key[3] for key in blocks if key[4] == 3]
        assert lengths_of == sorted(lengths_of, reverse=True)


def test_wrong_starts_give_no_rows_outside_of_q(device):
    for starts in ([-5, 9, 200, 12], [0, 50, 10, 20], [90, 70, 60, 3], [2**31 - 1, -(2**31), 0, 2**31 - 1]):
        found, _ = tiles_of([10, 5, 5], [40, 40, -3], 16, 1, 64, 132, True, True, device, starts)
        for _, _, token, head, n_new, n_keys, *_ in found:
            assert 0 <= token < token + n_new <= 20
            assert head == 0
            assert 0 <= n_keys <= 64


# The threads


class Once(list):
    """Each element may be taken once."""

    def __init__(self, elements):
        super().__init__(elements)
        self.taken = set()

    def __getitem__(self, i):
        assert int(i) not in self.taken, "a split that was taken before"
        self.taken.add(int(i))
        return super().__getitem__(int(i))


def attend(run_program, n_q, lengths, group, page, programs, *, split, kv_heads=1, value_dim=VALUES, causal=True):  # noqa: F811
    """out, lse, and their reference in float64; programs run one after another, and take what is left."""
    x = make(lengths, group * kv_heads, 1, page, kv_heads=kv_heads)
    tokens, heads, scale = sum(n_q), group * kv_heads, 0.3
    wide = torch.full((tokens, heads, DIM + 8), torch.nan)
    q = wide[..., :DIM].copy_(torch.randn(tokens, heads, DIM))
    capacity = x.table.shape[1] * page
    found, splits = tiles_of(n_q, lengths, group, kv_heads, capacity, programs, causal, split, "cpu")
    tiles = Once(tuple(map(tile, t)) for t in torch.tensor(found, dtype=torch.int32))
    form = hopper.Form(group, 1, page, value_dim, causal, 8, 1, 0, True, packed=True, split=split)
    out, lse = torch.full((tokens, heads, value_dim), torch.nan), torch.full((heads, tokens), torch.nan)
    size = 64 * (512 + 2)
    partial = torch.full((2 * programs * size,), torch.nan) if split else None
    counter = torch.zeros(1, dtype=torch.int32)
    described = (
        Described(q[None], gluon.describe(q[None], form.q_box, None)),
        Described(x.cache, gluon.describe_pages(x.cache, (form.piece_rows, 64), None)),
    )
    draw = random.Random(0)
    starts = torch.tensor([0, *itertools.accumulate(n_q)], dtype=torch.int32)
    for program in draw.sample(range(programs), programs):
        run_program(
            Sm(program, draw), tiles, *described, Pointer(out.view(-1)), None, Pointer(x.table.reshape(-1)),
            Pointer(lse.view(-1)), Pointer(partial) if split else None, None, Pointer(counter), x.table.stride(0),
            len(lengths), tokens, kv_heads, capacity, x.cache.shape[0], page_step(x.cache), programs, scale * LOG2E,
            form,
        )  # fmt: skip
    assert counter.item() == 0
    assert len(tiles.taken) == len(tiles)
    if split:
        given = torch.tensor(lengths, dtype=torch.int32)
        n = 1 << (len(n_q) - 1).bit_length()
        schedule.combine_tiles_kernel[(programs // 2 * 16,)](
            starts, given, partial, out, lse, len(n_q), tokens, kv_heads, capacity, programs, value_dim, group, causal,
            512, 64, n, 64, 4, 4, False,
        )  # fmt: skip
    wanted, wanted_lse = torch.zeros(out.shape).double(), torch.zeros(lse.shape).double()
    for b, n in enumerate(n_q):
        rows = slice(int(starts[b]), int(starts[b]) + n)
        wanted[rows], wanted_lse[:, rows] = (
            t[0]
            for t in reference.decode_attention(
                q[None, rows].double(), x.k[b : b + 1].double(), None, torch.tensor(lengths[b : b + 1]),
                head_dim_v=value_dim, causal=causal, scale=scale, return_lse=True, layout="bthd",
            )
        )  # fmt: skip
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    return splits


@simulated
@pytest.mark.parametrize(
    ("group", "page", "n_q", "lengths"),
    [
        (16, 16, [5, 0, 1, 9], [70, 33, 130, 6]),  # rows past the last token; tokens that see no key
        (64, 64, [2, 1], [130, 64]),
        (128, 128, [1, 2], [200, 1]),
    ],
)
def test_its_threads_compute_attention(group, page, n_q, lengths, run_program):  # noqa: F811
    attend(run_program, n_q, lengths, group, page, 3, split=False)


@simulated
def test_few_tiles_are_split(run_program):  # noqa: F811
    assert attend(run_program, [3, 1, 0], [300, 65, 9], 16, 64, 9, split=True) == 4
    assert attend(run_program, [3, 2], [70, 1], 16, 32, 3, split=True) == 1


@simulated
def test_several_kv_heads_short_values_and_no_causality(run_program):  # noqa: F811
    attend(run_program, [5, 2], [70, 130], 32, 32, 2, split=False, kv_heads=2, value_dim=264, causal=False)


# What it takes, and when it is chosen


def problem(**changes):
    p = Problem(2, 128, 1, 300, 4096, DIM, VALUES, BF16, Scoring(0.1, right=0), packed=True, tokens=400, page=64)
    return dataclasses.replace(p, **changes)


@pytest.mark.parametrize(
    "changes", [{}, *({"page": n} for n in PAGES), {"heads": 16, "tokens": 3}, {"scoring": Scoring(0.1)}], ids=str
)
def test_it_takes(changes):
    p = problem(**changes)
    assert can_implement_forward(p, HOPPER, TARGET) is None
    assert choose_forward(p, TARGET) == HOPPER
    assert choose_invariant(p, TARGET).kernel == "portable"


def test_its_tiles_are_those_of_decoding():
    assert (HOPPER.block_m, HOPPER.block_n) == (parts.ROWS, parts.KEYS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "takes float16 and bfloat16"),
        ({"narrow": True}, "takes no scales or 8 bits"),
        ({"scoring": Scoring(0.1, softcap=2.0, left=9)}, "takes no softcap and no window"),
        ({"scoring": Scoring(0.1, right=3)}, "takes no window"),
        ({"alibi": True, "sinks": True}, "takes no alibi_slopes and no sinks"),
        ({"head_dim": 320, "value_dim": 256}, "of 513 to 576 elements"),
        ({"heads": 48}, "a multiple or a divisor of 64, not 48 heads"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"head_dim": 570}, "multiples of 16 bytes"),
        ({"batch": 513}, "up to 512 sequences"),
        ({"tokens": 1 << 21}, "fewer than 2\\^28 query rows"),
        ({"heads": 16, "tokens": 2}, "over 32 query rows"),
    ],
    ids=str,
)
def test_it_leaves_the_rest_to_the_portable_kernel(changes, message):
    p = problem(**changes)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(can_implement_forward(p, HOPPER, TARGET))
    assert choose_forward(p, TARGET).kernel == "portable"


@pytest.mark.parametrize("name", ["", "q", "cache"])
def test_expanded_tensors_are_left_to_the_portable_kernel(name):
    """TMA has no stride of 0."""
    given = {"q": torch.zeros(1, 128, DIM, dtype=BF16), "cache": torch.zeros(1, 16, 1, DIM, dtype=BF16)}
    q, cache = (t.expand(2, *t.shape[1:]) if key == name else t for key, t in given.items())
    indices = (torch.zeros(n, dtype=torch.int32) for n in ((1, 2), 1, 2))
    a = paged._Arguments(q, cache, None, *indices, *(None,) * 4, 0, 0.1, 0.0, -1, 0, "bthd", "", VALUES)
    reason = can_implement_forward(a.problem(Scoring(0.1, right=0)), HOPPER, TARGET)
    assert (reason is None) == (name == "")


def test_its_configuration_has_one_form():
    other = dataclasses.replace(HOPPER, block_n=128)
    assert "over a latent cache takes AttentionConfig" in can_implement_forward(problem(), other, TARGET)
    assert "is for sm_90" in can_implement_forward(problem(), HOPPER, runtime.TARGETS["sm_100"])


@pytest.mark.parametrize("arch", runtime.TARGETS)
def test_a_portable_configuration_fits_on_every_target(arch):
    target = runtime.TARGETS[arch]
    for p, rows in ((problem(), 32), (problem(dtype=torch.float32), 16)):
        c = choose_invariant(p, target)
        assert c.block_m == rows
        assert can_implement_forward(p, c, target) is None


PAGED = all_cases()["attention_paged"]
CASES = (
    dataclasses.replace(
        PAGED, name="latent", function=functools.partial(attention_paged, config=HOPPER),
        sets={"llm": (*PAGED.sets["latent"], point(512, 4, 4096, (16, 1), (576, 512), latent=True))},
    ),
)  # fmt: skip


@pytest.mark.nightly
def test_it_compiles_for_sm_90():
    rows = compile_on("sm_90", plan(CASES, sets=["llm"], dtypes=[BF16], source=__name__), {c.name: c for c in CASES})
    assert not [row.message for row in rows if row.verdict != "PASS"]
    assert {"attend_latent", "combine_tiles_kernel"} <= {row.kernel.name for row in rows}


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.half])
@pytest.mark.parametrize(
    ("heads", "page", "n_q", "lengths"),
    [
        (128, 64, [100, 0, 1, 17, 300, 5], [100, 9, 1000, 4097, 200, 70]),
        (16, 16, [100, 0, 1, 17, 300, 5], [100, 9, 1000, 4097, 200, 70]),
        (16, 256, [9, 1], [4000, 3]),
        (64, 64, [3], [30000]),
    ],
)
def test_it_is_the_portable_kernel(device, heads, page, n_q, lengths, dtype):
    if not runtime.target(device).gluon:
        pytest.skip(f"the kernel is for sm_90, and the device is {runtime.target(device).arch}")
    q, k, _, *indices = make_paged(device, n_q, lengths, page=page, heads=(heads, 1), dims=(DIM, DIM), dtype=dtype)
    for options in ({}, {"causal": False}):
        given = {"head_dim_v": VALUES, "scale": 0.05, "return_lse": True, **options}
        wanted, wanted_lse = attention_paged(q.float(), k.float(), None, *indices, **given)
        out, lse = attention_paged(q, k, None, *indices, config=HOPPER, **given)
        assert relative_error(out, wanted.double()) < (5e-3 if dtype == BF16 else 6e-4)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-3)
        again = torch.full_like(out, torch.nan)
        attention_paged(q, k, None, *indices, out=again, config=HOPPER, **{**given, "return_lse": False})
        assert torch.equal(again, out)


@pytest.mark.gpu
def test_a_portable_configuration_is_refused_nothing(device):
    """Options that the kernel for sm_90 does not take."""
    q, k, _, *indices = make_paged(device, [9, 1], [70, 33], page=64, heads=(16, 1), dims=(DIM, DIM), dtype=BF16)
    given = {"head_dim_v": VALUES, "window": 20, "softcap": 3.0, "scale": 0.05}
    wanted = attention_paged(q.float(), k.float(), None, *indices, **given)
    assert relative_error(attention_paged(q, k, None, *indices, **given), wanted.double()) < 5e-3
    chosen = attention_paged(q, k, None, *indices, config=AttentionConfig("portable", 16, 16, 4, 1), **given)
    assert relative_error(chosen, wanted.double()) < 5e-3
