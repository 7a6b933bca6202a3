"""sample, sample_: masks, biases, presence and frequency penalties; top_logprobs: against the reference in float64."""

import pytest
import torch
from helpers import BF16

from rooftile import runtime
from rooftile.ops.sample import draw, greedy, sample, sample_, top, top_logprobs
from rooftile.reference import sample as reference

DRAWN = {"temperature": 1.2, "top_k": 60, "top_p": 0.95, "seeds": 5, "positions": 7}


def words_of(allowed):
    """The bit mask of a matrix of booleans."""
    rows = torch.arange(len(allowed), device=allowed.device)[:, None].expand(allowed.shape)[allowed]
    words = torch.zeros(len(allowed), -(-allowed.shape[1] // 32), dtype=torch.int32, device=allowed.device)
    return reference.mark_seen_(words, allowed.nonzero()[:, 1], rows)


def tables(rows, n_cols, device, seed=0):
    g = torch.Generator(device="cpu").manual_seed(seed)
    allowed = torch.rand(rows, n_cols, generator=g) < 0.4
    return {
        "seen": words_of(torch.rand(rows, n_cols, generator=g) < 0.4).to(device),
        "counts": (torch.randint(-3, 5, (rows, n_cols), generator=g).clamp(min=0)).to(torch.int16).to(device),
        "logit_bias": torch.randn(rows, n_cols, generator=g).to(device),
        "mask": words_of(allowed).to(device),
    }


def agrees(logits, **options):
    tokens, logprobs = sample(logits, **options)
    expected = reference.sample(logits.double(), **options)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs.double(), expected[1], rtol=1e-6, atol=2e-6, equal_nan=True)
    return tokens


# What each option does to the logits


def test_the_reference_is_the_formula():
    """Of OpenAI's reference, by a loop: mask, bias, repetition, frequency, presence, in this order."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0, 1.0]], dtype=torch.float64)
    given = {
        "seen": words_of(torch.tensor([[True, True, False, True, False]])),
        "counts": torch.tensor([[3, 0, 0, 1, 0]], dtype=torch.int16),
        "logit_bias": torch.tensor([[0.5, 0.5, 0.0, -5.0, 0.0]]),
        "mask": words_of(torch.tensor([[True, True, True, True, False]])),
    }
    z = reference.changed(logits, 2.0, 0.25, 0.5, **given)
    assert z.tolist() == [[2.5 / 2 - 3 * 0.5 - 0.25, -0.5 * 2, 0.5, -2.0 * 2 - 0.5 - 0.25, -torch.inf]]


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("how", [{}, DRAWN], ids=["greedy", "drawn"])
def test_options_change_the_logits_as_the_reference_does(how, dtype, device):
    """Each alone, and all together, with numbers for all rows."""
    logits = (2 * torch.randn(3, 301, device=device)).to(dtype)
    found = tables(3, 301, device)
    plain = sample(logits, **how)[0]
    several = [
        {"mask": found["mask"]},
        {"logit_bias": found["logit_bias"]},
        {"counts": found["counts"], "presence_penalty": 1.5},
        {"counts": found["counts"], "frequency_penalty": -0.7},
        {**found, "repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.9},
    ]
    chosen = [agrees(logits, **how, **options) for options in several]
    assert len({tuple(tokens.tolist()) for tokens in (plain, *chosen)}) >= 3
    allowed = reference.bits(found["mask"], 301)
    for tokens in (chosen[0], chosen[-1]):
        assert allowed[torch.arange(3), tokens].all()


def test_rows_with_and_without_options_do_not_change_one_another(device):
    """Each row is bit-identical alone, without the tables that do not concern it."""
    logits = torch.randn(5, 301, device=device).to(BF16)
    found = tables(5, 301, device, seed=2)
    found["mask"][0], found["logit_bias"][0] = -1, 0.0
    number = torch.tensor
    given = {
        "temperature": number([1.0, 0.0, 1.3, 0.7, 1.0], device=device),
        "top_k": number([50, 0, 0, 20, 7], device=device, dtype=torch.int32),
        "top_p": number([0.9, 1.0, 0.8, 1.0, 1.0], device=device),
        "repetition_penalty": number([1.0, 1.2, 1.0, 0.9, 1.0], device=device),
        "presence_penalty": number([0.0, 2.0, 0.0, -2.0, 0.5], device=device),
        "frequency_penalty": number([0.0, 0.0, 1.5, 0.25, -2.0], device=device),
        "seeds": torch.arange(5, device=device),
    }
    tokens = agrees(logits, **found, **given)
    for i in range(5):
        row = {name: x[i : i + 1] for name, x in {**found, **given}.items()}
        if i == 0:
            for name in (*found, "repetition_penalty", "presence_penalty", "frequency_penalty"):
                del row[name]
        assert torch.equal(sample(logits[i : i + 1], **row)[0], tokens[i : i + 1])


def test_tokens_under_a_mask_come_as_often_as_they_should(device):
    """By a chi-square test of the reference, whose tokens are the kernel's: the softmax of what remains."""
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, -2.5], device=device)
    n = 20000
    options = {
        "mask": words_of(torch.tensor([[True, False, True, True, True]])).to(device).expand(n, 1),
        "logit_bias": torch.tensor([0.0, 9.0, -1.0, 0.5, 2.0], device=device).expand(n, 5),
        "counts": torch.tensor([2, 1, 0, 1, 0], dtype=torch.int16, device=device).repeat(n, 1),
    }
    numbers = {"temperature": 0.9, "frequency_penalty": 0.3, "presence_penalty": -0.2, "seeds": 3}
    positions = torch.arange(n, device=device, dtype=torch.int32)
    tokens, _ = reference.sample(logits.double().expand(n, 5), **options, **numbers, positions=positions)
    z = torch.tensor([0.3 - 0.6 + 0.2, -torch.inf, 0.2, 0.5 - 0.3 + 0.2, -0.5], dtype=torch.float64)
    expected = n * torch.softmax(z / 0.9, -1)
    there = torch.tensor([0, 2, 3, 4])
    found = torch.bincount(tokens.cpu(), minlength=5)
    assert found[1] == 0
    assert ((found - expected)[there].square() / expected[there]).sum() < 16.3  # one in a thousand is above
    few = {name: x[:40] for name, x in options.items()}
    drawn, _ = sample(logits.expand(40, 5), **few, **numbers, positions=positions[:40])
    assert torch.equal(drawn, tokens[:40])


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seeds": 1}], ids=["greedy", "drawn"])
def test_a_mask_that_allows_nothing_and_numbers_that_are_not_finite(how, device):
    """Token 0 where nothing is left; no token that the mask forbids where one is left."""
    logits = torch.randn(6, 70, device=device)
    logits[2, 5] = torch.nan
    logits[3, 60] = torch.inf
    allowed = torch.zeros(6, 70, dtype=torch.bool, device=device)
    allowed[1:, 33] = True
    allowed[4, [40, 50]] = True
    bias = torch.zeros(6, 70, device=device)
    bias[4, 33], bias[4, 40] = -torch.inf, -torch.inf
    bias[5, 69], bias[5, 33] = torch.nan, torch.nan
    mask = words_of(allowed)
    mask[0, 2] = -64  # only bits past the vocabulary
    tokens, logprobs = sample(logits, mask=mask, logit_bias=bias, **how)
    assert tokens.tolist() == [0, 33, 33, 33, 50, 33]
    assert logprobs[2].isnan()
    assert not logprobs[3].isfinite()
    expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs[[0, 1, 4, 5]].double(), expected[[0, 1, 4, 5]], rtol=1e-6, atol=2e-6)


def test_the_largest_of_several_slices_with_options(device, monkeypatch):
    monkeypatch.setattr(greedy, "config", lambda target: greedy.GreedyConfig(64, 1))
    logits = torch.randn(4, 201, device=device).to(BF16)
    agrees(logits, **tables(4, 201, device), repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)


def test_options_read_16_bit_logits_whole(device):
    """Of logits that a bias has moved, all bits count: those that bfloat16 rounds off too."""
    assert draw._SHIFTS[BF16] == 16
    logits = torch.full((4, 64), 1.0, device=device, dtype=BF16)
    bias = torch.linspace(0, 1e-3, 64, device=device).expand(4, 64)
    tokens, _ = sample(logits, logit_bias=bias, temperature=1.0, top_k=3, seeds=torch.arange(4, device=device))
    assert set(tokens.tolist()) <= {61, 62, 63}


# In place


def test_tokens_are_counted(device):
    logits = torch.randn(3, 67, device=device)
    counts = torch.zeros(3, 67, dtype=torch.int16, device=device)
    seen = torch.zeros(3, 3, dtype=torch.int32, device=device)
    tokens, logprobs = torch.zeros(3, dtype=torch.int32, device=device), torch.zeros(3, device=device)
    chosen = []
    for step in range(4):
        how = {"temperature": 1.0, "seeds": 9, "positions": step} if step % 2 else {}
        sample_(tokens, logprobs, logits, seen=seen, counts=counts, frequency_penalty=3.0, **how)
        chosen.append(tokens.clone())
    expected = torch.stack([torch.bincount(row, minlength=67) for row in torch.stack(chosen, 1).cpu()])
    assert torch.equal(counts.cpu().long(), expected)
    assert torch.equal(reference.bits(seen, 67).cpu(), expected > 0)
    assert len({tuple(t.tolist()) for t in chosen}) > 1
    counts[:] = 32767
    sample_(tokens, logprobs, logits, counts=counts)
    assert (counts == 32767).all()
    assert torch.equal(tokens.long(), logits.argmax(-1))
    before = counts.clone()
    sample(logits, counts=counts, presence_penalty=1.0)
    assert torch.equal(counts, before)


# The most likely tokens


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_most_likely_tokens(dtype, device, monkeypatch):
    """By a stable sort, so of equals the first; in one slice and in several."""
    logits = torch.randn(4, 300, device=device).round(decimals=1).to(dtype)  # some tens of equals each
    logits[1] = 0.5
    logits[2, 7:] = -torch.inf
    expected = reference.top_logprobs(logits.double(), 20)
    for block in (512, 64):
        monkeypatch.setattr(top, "config", lambda n, target, block=block: top.TopConfig(block, 1))
        for k in (1, 3, 20):
            tokens, logprobs = top_logprobs(logits, k=k)
            assert torch.equal(tokens, expected[0][:, :k])
            torch.testing.assert_close(logprobs.double(), expected[1][:, :k], rtol=1e-6, atol=2e-6)
    assert torch.equal(top_logprobs(logits, k=1)[0][:, 0], sample(logits)[0])


def test_the_most_likely_tokens_beside_nan_and_infinities(device):
    logits = torch.randn(4, 40, device=device)
    logits[0, 20] = torch.nan
    logits[1, [8, 12]] = torch.inf
    logits[2] = -torch.inf
    logits[3, 2:] = -torch.inf
    tokens, logprobs = top_logprobs(logits, k=4)
    assert tokens[0, 0] == 20
    assert tokens[1, :2].tolist() == [8, 12]
    assert tokens[2].tolist() == [0, 1, 2, 3]
    assert tokens[3].sort()[0].tolist() == [0, 1, 2, 3]
    assert logprobs[:3].isnan().all()
    assert logprobs[3, :2].exp().sum().item() == pytest.approx(1)
    assert logprobs[3, 2:].tolist() == [-torch.inf] * 2


def test_a_long_vocabulary_has_longer_slices_not_more():
    for target in runtime.TARGETS.values():
        for n_cols in (1, 2049, 128256, 262144, 1 << 22):
            c = top.config(n_cols, target)
            assert -(-n_cols // c.block) <= top.MOST_SLICES
            assert c.num_warps * target.warp_size <= target.max_threads


# Errors


def test_errors(device):
    logits = torch.randn(2, 40, device=device)
    counts, bias = torch.zeros(2, 40, dtype=torch.int16, device=device), torch.zeros(2, 40, device=device)
    mask = torch.full((2, 2), -1, dtype=torch.int32, device=device)
    each = torch.ones(2, device=device)
    wrong = [
        ({"presence_penalty": 0.5}, ValueError, "counts is None, expected the counts of generated .* presence_penalty"),
        ({"frequency_penalty": each}, ValueError, "counts is None, .* that frequency_penalty applies to"),
        *(
            ({name: value, "counts": counts}, ValueError, f"{name} is {value}, expected a finite number")
            for name in ("presence_penalty", "frequency_penalty")
            for value in (float("nan"), float("inf"), -float("inf"))
        ),
        (
            {"presence_penalty": "much"},
            TypeError,
            "presence_penalty is a str, expected a number or a tensor of float32",
        ),
        ({"frequency_penalty": each.half()}, TypeError, "frequency_penalty has dtype torch.float16, expected float32"),
        ({"frequency_penalty": each[:1]}, ValueError, r"frequency_penalty has shape \(1,\), expected \(2,\)"),
        ({"counts": counts.int()}, TypeError, "counts has dtype torch.int32, expected int16, a count for each"),
        ({"counts": counts[:, :39]}, ValueError, r"counts has shape \(2, 39\), expected \(2, 40\), a count for each"),
        ({"counts": counts.t().contiguous().t()}, ValueError, "counts has a last stride of 2, expected 1"),
        ({"counts": counts[:1].expand(2, 40)}, ValueError, "counts is expanded .* expected an address for each count"),
        ({"logit_bias": bias.half()}, TypeError, "logit_bias has dtype torch.float16, expected float32, a number"),
        ({"logit_bias": bias[:1]}, ValueError, r"logit_bias has shape \(1, 40\), expected \(2, 40\), a number"),
        ({"logit_bias": {3: 1.0}}, TypeError, "logit_bias is a dict, expected a tensor"),
        ({"logit_bias": bias.clone().requires_grad_()}, ValueError, "logit_bias requires grad, but sample has no"),
        ({"mask": mask.bool()}, TypeError, "mask has dtype torch.bool, expected int32, a bit for each token"),
        ({"mask": mask[:, :1]}, ValueError, r"mask has shape \(2, 1\), expected \(2, 2\), a bit for each token"),
        ({"mask": mask.t().contiguous().t()}, ValueError, "mask has a last stride of 2, expected 1"),
    ]
    for options, kind, message in wrong:
        with pytest.raises(kind, match=f"sample: {message}"):
            sample(logits, **options)
    assert torch.equal(
        sample(logits, logit_bias=bias.t().contiguous().t(), mask=mask[:1].expand(2, 2))[0], logits.argmax(-1)
    )
    for (x, k), kind, message in (
        ((logits, 0), ValueError, "k is 0, expected 1 to 20"),
        ((logits, 21), ValueError, "k is 21, expected 1 to 20"),
        ((logits[:, :5], 6), ValueError, "k is 6, expected 1 to 5"),
        ((logits, 2.0), TypeError, "k is a float, expected an int"),
        ((logits[0], 2), ValueError, r"logits has shape \(40,\), expected \(B, V\)"),
        ((logits.double(), 2), TypeError, "logits has dtype torch.float64"),
        ((logits.clone().requires_grad_(), 2), ValueError, "logits requires grad, but top_logprobs has no derivative"),
    ):
        with pytest.raises(kind, match=f"top_logprobs: {message}"):
            top_logprobs(x, k=k)
