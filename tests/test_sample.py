"""sample, sample_, mark_seen_: what is kept, what is drawn, rows that several programs share, errors."""

import functools
import inspect
import itertools
import threading

import numpy as np
import pytest
import torch
from helpers import BF16
from triton.runtime import interpreter

from rooftile import runtime
from rooftile.ops.sample import draw, greedy, mark_seen_, sample, sample_
from rooftile.ops.sample.parts import noise
from rooftile.reference import sample as reference

import triton  # isort: skip
import triton.language as tl  # isort: skip

INTERPRETED = runtime.MODE is runtime.Mode.INTERPRETER
USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seeds": 5, "positions": 7}


def column(values, device, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device)


def agrees(logits, **options):
    """The kernel's results, which are the reference's in float64."""
    tokens, logprobs = sample(logits, **options)
    expected = reference.sample(logits.double(), **options)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs.double(), expected[1], rtol=1e-6, atol=2e-6, equal_nan=True)
    return tokens, logprobs


# The noise


@triton.jit
def _noise_kernel(out_ptr, seed, position, QUADS: tl.constexpr):
    first = tl.program_id(0) * QUADS * 4
    cols = first + tl.arange(0, QUADS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + cols, noise(tl.zeros((), tl.int64) + seed, position, first, QUADS))


def test_the_reference_is_philox():
    """The vectors that came with Random123."""
    ones = torch.tensor([0xFFFFFFFF])
    assert [int(w) for w in reference.philox(ones * 0, ones * 0, ones * 0)] == [
        0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, -7, 2**62 + 12345])
def test_noise_is_the_references_however_columns_are_tiled(seed, device):
    found = []
    for quads in (4, 16):
        out = torch.empty(64, device=device)
        _noise_kernel[(16 // quads,)](out, seed, 1234, QUADS=quads)
        found.append(out)
    assert torch.equal(*found)
    seeds, positions = torch.tensor([seed], device=device), torch.tensor([1234], device=device)
    expected = reference.gumbel(reference.uniform(64, seeds, positions).double())[0] / np.log(2)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_tokens_come_as_often_as_they_should(device):
    """By a chi-square test of 20000 positions, of four degrees of freedom; the kernel's tokens are those."""
    logits = column([0.3, -1.0, 1.2, 0.0, -2.5], device)
    positions = torch.arange(20000, device=device, dtype=torch.int32)
    tokens, _ = reference.sample(logits.double().expand(20000, 5), temperature=0.7, seeds=11, positions=positions)
    expected = 20000 * torch.softmax(logits.double() / 0.7, -1)
    found = torch.bincount(tokens, minlength=5)
    assert ((found - expected).square() / expected).sum() < 18.5  # one in a thousand is above
    few, _ = sample(logits.expand(40, 5), temperature=0.7, seeds=11, positions=positions[:40])
    assert torch.equal(few, tokens[:40])
    assert few.unique().numel() >= 3


# What is kept


def test_what_the_reference_keeps_is_what_hugging_face_keeps():
    transformers = pytest.importorskip("transformers")
    z = torch.randn(6, 97, dtype=torch.float64) * 2
    for k, p, m in itertools.product((0, 1, 13, 97), (0.2, 0.9, 1.0), (0.0, 0.05, 1.0)):
        warped = z
        if k:
            warped = transformers.TopKLogitsWarper(k)(None, warped)
        if p < 1:
            warped = transformers.TopPLogitsWarper(p)(None, warped)
        if m:
            warped = transformers.MinPLogitsWarper(m)(None, warped)
        assert torch.equal(reference.kept(z, k, p, m), warped > -torch.inf), (k, p, m)
    ids = torch.randint(97, (6, 20))
    seen = torch.zeros(6, 4, dtype=torch.int32)
    seen = reference.mark_seen_(seen, ids.flatten(), torch.arange(6).repeat_interleave(20))
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, z)
    assert torch.equal(reference.penalised(z, 1.3, seen), expected)


def test_rows_with_options_of_their_own(device):
    """All at once, as a batch of requests has them; most of them at their limits."""
    rows = [  # temperature, top_k, top_p, min_p, penalty
        (0.0, 5, 0.5, 0.5, 1.0),
        (1.0, 0, 1.0, 0.0, 1.0),
        (1.3, 1000, 0.7, 0.0, 1.25),
        (5.0, 9, 1.0, 0.0, 1.0),
        (2.0, 1, 0.0, 1.0, 2.0),
        (4.0, 20, 0.5, 0.0, 1.0),
        (4.0, -3, 0.0, 0.0, 1.0),
        (3.0, 0, 1.0, 0.3, 0.8),
        (1e-30, 0, 0.9, 0.0, 1.0),
        (-1.0, 0, 1.0, 0.0, 1.5),
        (4.0, 0, 1.0, 1.5, 1.0),
    ]
    n = len(rows)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {
        name: column(values, device, torch.int32 if name == "top_k" else torch.float32)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }
    given["seeds"] = torch.arange(n, device=device) * 2**50
    given["positions"] = torch.arange(n, device=device, dtype=torch.int32)
    logits = (torch.randn(n, 131, device=device) * 3).to(BF16)
    seen = torch.randint(-(2**31), 2**31 - 1, (n, 5), device=device).to(torch.int32)
    tokens, logprobs = agrees(logits, seen=seen, **given)
    # Alone, and beside other rows, each row is bit-identical.
    for i in ([2], [5, 4]):
        some = {name: value[i] for name, value in given.items()}
        alone = sample(logits[i], seen=seen[i], **some)
        assert torch.equal(alone[0], tokens[i])
        assert torch.equal(alone[1], logprobs[i])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_of_equal_logits_the_first_are_kept(dtype, device):
    """Of twelve equals at the threshold, k takes two, and p of what k left one."""
    logits = torch.full((3, 40), -3.0, device=device)
    logits[:, 4:28:2] = 1.0
    logits[:, 30] = 1.5
    options = {"temperature": 8.0, "seeds": torch.arange(3, device=device)}
    for more, allowed in (({"top_k": 3}, {4, 6, 30}), ({"top_k": 3, "top_p": 0.6}, {4, 30})):
        tokens, _ = agrees(logits.to(dtype), **options, **more)
        assert set(tokens.tolist()) <= allowed


def test_nan_and_infinities(device):
    logits = torch.randn(5, 70, device=device)
    logits[0, [20, 33]] = torch.nan
    logits[1, [8, 12]] = torch.inf
    logits[2] = -torch.inf
    logits[3, 1:] = -torch.inf
    logits[4, ::2] = -torch.inf
    expected = [20, 8, 0, 0]
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 60, "top_p": 0.9, "seeds": 1}):
        tokens, logprobs = sample(logits, **options)
        assert tokens[:4].tolist() == expected
        assert tokens[4] % 2 == 1
        assert logprobs[:3].isnan().all()
        assert logprobs[3] == 0
        assert logprobs[4].isfinite()


# Rows that several programs share


def test_programs_that_wait_for_one_another_all_fit_the_gpu():
    for target in runtime.TARGETS.values():
        for rows, cols in itertools.product((1, 2, 15, 16, 64, 200, 5000), (1, 1025, 32000, 262144)):
            c = draw.config(rows < draw.FEW, target)
            splits, groups = c.programs(rows, cols)
            assert 1 <= splits <= c.most_splits
            assert 1 <= groups <= rows
            assert splits * groups <= target.multiprocessors * c.per_sm
            assert c.num_warps * target.warp_size <= target.max_threads


@pytest.mark.parametrize("penalty", [1.0, 1.25])
def test_the_largest_of_several_slices(penalty, device, monkeypatch):
    monkeypatch.setattr(greedy, "config", lambda target: greedy.GreedyConfig(64, 1))
    logits = torch.randn(4, 201, device=device).to(BF16)
    logits[1, [70, 140]] = 9.0
    logits[2, 64:] = torch.nan
    seen = torch.randint(-(2**31), 2**31 - 1, (4, 7), device=device).to(torch.int32)
    tokens, _ = agrees(logits, repetition_penalty=penalty, seen=seen)
    assert tokens[2] == 64
    if penalty == 1:
        assert tokens[1] == 70


class Turns:
    """Programs of one launch that take turns: one that waits for the others lets the next go on."""

    def __init__(self, n):
        self.turn, self.live, self.changed = 0, list(range(n)), threading.Condition()

    def take(self, i):
        with self.changed:
            assert self.changed.wait_for(lambda: self.turn == i, timeout=60)
        interpreter.interpreter_builder.set_grid_idx(i, 0, 0)

    def leave(self, i, ended=False):
        with self.changed:
            others = [j for j in self.live if j > i] + [j for j in self.live if j <= i]
            self.turn = others[0]
            if ended:
                self.live.remove(i)
                self.turn = others[0] if others[0] != i else -1
            self.changed.notify_all()


def side_by_side(monkeypatch, programs):
    """In the interpreter, which runs one program after the other: those of sample_kernel each in a thread."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    stock_init, stock_rmw = executor.__init__, builder.create_atomic_rmw
    here = threading.local()
    waits = []

    def init(self, fn, *args):
        stock_init(self, fn, *args)
        if fn.__name__ != "sample_kernel":
            return
        calls = []

        @functools.wraps(fn)
        def run(**given):
            calls.append(given)
            if len(calls) < programs:
                return
            turns = Turns(programs)
            failed = []

            def program(i):
                here.turns, here.number = turns, i
                turns.take(i)
                try:
                    with np.errstate(all="ignore"):
                        fn(**given)
                except BaseException as error:
                    failed.append(error)
                turns.leave(i, ended=True)

            threads = [threading.Thread(target=program, args=(i,), daemon=True) for i in range(programs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=120)
            assert not failed, failed

        run.__signature__ = inspect.signature(fn)
        self.fn = run

    def rmw(self, op, ptr, value, *rest):
        if hasattr(here, "turns") and not value.data.any():  # nothing is added: the program waits
            waits.append(here.number)
            here.turns.leave(here.number)
            here.turns.take(here.number)
        return stock_rmw(self, op, ptr, value, *rest)

    monkeypatch.setattr(executor, "__init__", init)
    monkeypatch.setattr(builder, "create_atomic_rmw", rmw)
    return waits


@pytest.mark.skipif(
    not INTERPRETED, reason="lets interpreted programs take turns; on a GPU they run at once, for few and long rows"
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_rows_that_several_programs_share(dtype, device, monkeypatch):
    """Each row by two programs: bit-identical to one program's."""
    logits = (torch.randn(5, 150, device=device) * 2).round(decimals=1).to(dtype)
    logits[1:, 100:] = 9.0  # equals on both sides of column 128, where the second program's begin
    given = {
        "temperature": column([1.1, 2.0, 2.0, 2.0, 0.0], device),
        "top_k": column([30, 12, 12, 40, 0], device, torch.int32),
        "top_p": column([0.8, 1.0, 1.0, 0.5, 1.0], device),
        "seeds": torch.arange(5, device=device),
    }
    expected = agrees(logits, **given)
    shared = draw.DrawConfig(3, 16, 4, 1, 2, None, multiprocessors=5, most_splits=4)
    monkeypatch.setattr(draw, "config", lambda few, target: shared)
    assert shared.programs(5, 150) == (2, 5)
    waits = side_by_side(monkeypatch, programs=10)
    found = sample(logits, **given)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert len(set(waits)) > 2


# In place


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seeds": 2}])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_in_place_is_sample_and_the_token_is_seen(options, dtype, device):
    logits = torch.randn(3, 67, device=device)
    seen = torch.zeros(3, 3, dtype=torch.int32, device=device)
    expected = sample(logits, **options)
    tokens = torch.full((5,), -1, dtype=dtype, device=device)
    logprobs = torch.full((5,), 7.0, device=device)
    sample_(tokens[1:4], logprobs[1:4], logits, seen=seen, **options)
    assert tokens.tolist() == [-1, *expected[0].tolist(), -1]
    assert torch.equal(logprobs[1:4], expected[1])
    assert torch.equal(reference.bits(seen, 67).nonzero()[:, 1], expected[0])
    before = seen.clone()
    sample_(tokens[1:4], logprobs[1:4], logits, seen=seen, repetition_penalty=1e6, **options)
    assert torch.equal(tokens[1:4].long(), sample(logits, seen=before, repetition_penalty=1e6, **options)[0])
    assert reference.bits(seen, 67).sum() >= reference.bits(before, 67).sum()


def test_marked_are_the_tokens_of_each_row_and_no_others(device):
    memory = torch.zeros(5, 6, dtype=torch.int32, device=device)
    seen = memory[1:4, 1:4]
    ids, rows = column([0, 31, 32, 95, 31], device, torch.int64), column([0, 0, 2, 1, 0], device, torch.int32)
    mark_seen_(seen, ids, rows)
    assert reference.bits(seen, 96).nonzero().tolist() == [[0, 0], [0, 31], [1, 95], [2, 32]]
    assert memory.count_nonzero() == 3
    mark_seen_(seen, ids[:1] + 1, rows[:1])
    assert seen[0, 0] == -(2**31) + 3


def test_integers_of_either_width_mean_the_same(device):
    logits = torch.randn(4, 50, device=device)
    counts = [3, 0, 50, 7]
    for wide in (counts, [3, -(2**33) + 5, 2**33 + 2, 7]):  # which cut to 32 bits would be 5 and 2
        drawn = [
            sample(
                logits, temperature=2.0, top_k=column(k, device, k_dtype), positions=i,
                seeds=column([8, 9, 10, -1], device, dtype),
            )[0]
            for i in range(3)
            for k, k_dtype, dtype in ((counts, torch.int32, torch.int64), (wide, torch.int64, torch.int32))
        ]  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(drawn[::2], drawn[1::2], strict=True))
        assert len(set(torch.stack(drawn).flatten().tolist())) > 3


def test_errors(device):
    logits, seen = torch.randn(2, 40, device=device), torch.zeros(2, 2, dtype=torch.int32, device=device)
    two = torch.ones(2, device=device)
    wrong = [
        ({"logits": logits[0]}, ValueError, r"logits has shape \(40,\), expected \(B, V\)"),
        ({"logits": logits[:, :0]}, ValueError, r"logits has shape \(2, 0\), expected \(B, V\)"),
        ({"logits": logits.double()}, TypeError, "logits has dtype torch.float64, expected"),
        ({"logits": logits.clone().requires_grad_()}, ValueError, "logits requires grad, but sample has no derivative"),
        ({"temperature": -0.5}, ValueError, "temperature is -0.5, expected 0 or more"),
        ({"temperature": float("nan")}, ValueError, "temperature is nan, expected 0 or more"),
        ({"temperature": "hot"}, TypeError, "temperature is a str, expected a number or a tensor of float32"),
        ({"temperature": two.double()}, TypeError, "temperature has dtype torch.float64, expected float32"),
        ({"temperature": two[:1]}, ValueError, r"temperature has shape \(1,\), expected \(2,\), one for each row"),
        ({"top_k": -1}, ValueError, "top_k is -1, expected 0"),
        ({"top_k": 5.0}, TypeError, "top_k is a float, expected an int or a tensor of int32"),
        ({"top_k": two.short()}, TypeError, "top_k has dtype torch.int16, expected int32 or int64"),
        ({"logits": logits.tolist()}, TypeError, "logits is a list, expected a tensor"),
        *(({"top_p": p}, ValueError, f"top_p is {p}, expected more than 0, and at most 1") for p in (1.5, 0, -0.1)),
        ({"min_p": -0.1}, ValueError, "min_p is -0.1, expected 0 to 1"),
        ({"seeds": 2**63}, ValueError, "seeds is 9223372036854775808, expected an int64"),
        ({"positions": 2**31}, ValueError, "positions is 2147483648, expected 0 or more, of int32"),
        ({"repetition_penalty": 0.0, "seen": seen}, ValueError, "repetition_penalty is 0.0, expected a finite"),
        ({"repetition_penalty": 1.1}, ValueError, "seen is None, expected the tokens that repetition_penalty"),
        ({"seen": seen[:, :1]}, ValueError, r"seen has shape \(2, 1\), expected \(2, 2\), a bit for each token"),
        ({"seen": seen.long()}, TypeError, "seen has dtype torch.int64, expected int32"),
        ({"seen": seen.t().contiguous().t()}, ValueError, "seen has a last stride of 2, expected 1"),
    ]
    for options, kind, message in wrong:
        with pytest.raises(kind, match=f"sample: {message}"):
            sample(**{"logits": logits, **options})
    tokens, logprobs = torch.zeros(2, dtype=torch.int32, device=device), torch.zeros(2, device=device)
    for args, kind, message in (
        ((logprobs, logprobs), TypeError, "tokens has dtype torch.float32, expected int32 or int64"),
        ((tokens, logprobs.half()), TypeError, "logprobs has dtype torch.float16, expected float32"),
        ((tokens[:1], logprobs), ValueError, r"tokens has shape \(1,\), expected \(2,\), as logits' rows"),
        ((tokens.repeat(2)[::2], logprobs), ValueError, "tokens has a stride of 2, expected 1"),
    ):
        with pytest.raises(kind, match=f"sample_: {message}"):
            sample_(*args, logits)
    ids = torch.tensor([3, 64], device="cpu")
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"mark_seen_: ids holds 64, expected 0 to 63"):
            mark_seen_(seen, ids, ids * 0)
    with pytest.raises(ValueError, match=r"mark_seen_: row_of has shape \(1,\), expected \(2,\) to match ids"):
        mark_seen_(seen, ids.to(device), ids[:1].to(device))
    assert not seen.any()
