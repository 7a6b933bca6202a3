"""softmax's rows that several programs hold: what they publish, and what each makes of what the others did."""

import pytest
import torch
from test_softmax import INF, INTERPRETED, some, with_gradient

from rooftile import runtime
from rooftile.ops.softmax import backward, forward, softmax
from rooftile.primitives.cta_exchange import gather, publish_pair, softmax_pairs
from rooftile.primitives.rows import RowConfig
from rooftile.reference import softmax as reference

import triton  # isort: skip
import triton.language as tl  # isort: skip

LOWEST = torch.finfo(torch.float32).min


def test_a_row_that_no_grid_could_hold_is_looped_over():
    target = runtime.Target("sm_90", 2, 232_448, 50 << 20)
    for module in (forward, backward):
        assert module.config(40_000, 2, True, target).kernel == "loop"
        assert module.config(40_000, 2, True, runtime.TARGETS["sm_90"]).kernel == "split"


@triton.jit
def _pairs_kernel(z_ptr, words_ptr, out_ptr, FACTOR: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    for split in tl.static_range(SPLITS):
        z = tl.load(z_ptr + split * BLOCK + tl.arange(0, BLOCK))
        top = tl.maximum(tl.max(z, axis=0), -3.4028234663852886e38)
        publish_pair(words_ptr + split, top, tl.sum(tl.exp2((z - top) * FACTOR), axis=0), True)
    tl.debug_barrier()
    splits = tl.arange(0, 8)
    mask = splits < SPLITS
    words = gather(tl.load(words_ptr + splits, mask=mask, other=-1), words_ptr + splits, mask)
    top, total = softmax_pairs(words, mask, FACTOR)
    tl.store(out_ptr, top)
    tl.store(out_ptr + 1, total)


@pytest.mark.parametrize("row", ["normal", "large", "parts of -inf", "all -inf", "inf", "nan"])
def test_published_maxima_and_sums_give_those_of_the_row(row, device):
    z = torch.randn(5, 16, device=device)
    if row == "large":
        z = z * 1e37 - 2e38
    elif row.endswith("-inf"):
        z[:: 2 if row.startswith("parts") else 1] = -INF
    elif row != "normal":
        z[3, 7] = float(row)
    words = torch.zeros(5, dtype=torch.int64, device=device)
    out = torch.empty(2, device=device)
    _pairs_kernel[(1,)](z, words, out, FACTOR=0.5, SPLITS=5, BLOCK=16)
    top = z.double().max().clamp(min=torch.finfo(torch.float32).min)
    expected = torch.exp2((z.double() - top) * 0.5).sum()  # NaN for inf, 0 for all -inf
    torch.testing.assert_close(out[1].double(), expected, rtol=1e-6, atol=0, equal_nan=True)


def parts_of_a_row(x, block, scale=1.0, causal=False, mask=None):
    """The maximum over the columns of each program, and the sum of exponentials, row by row."""
    z = x.double() if scale > 0 else -x.double()
    keep = reference.kept(x, causal, mask)
    if keep is not None:
        z = z.masked_fill(~keep, -INF)
    parts = z.split(block, -1)
    tops = torch.stack([p.amax(-1) for p in parts], -1).clamp(min=LOWEST)
    sums = [torch.exp((p - tops[..., i : i + 1]) * abs(scale)).sum(-1) for i, p in enumerate(parts)]
    return tops.float(), torch.stack(sums, -1).float()


def bits(t):
    return t.contiguous().view(torch.int32)


@pytest.mark.each_once
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": -0.7}, {"causal": True}, {"mask": True}, {"scale": 3.0, "causal": True, "mask": True}],
    ids=str,
)
@pytest.mark.parametrize(("columns", "splits"), [(19, 3), (24, 3), (25, 4)])
def test_rows_that_several_programs_share(columns, splits, options, device, monkeypatch):
    """In the interpreter, which runs one program after the other, the words of all stand there from the beginning.

    There are more rows than columns: causal ones keep nothing of some parts, the first nothing at all.
    """
    block = 8
    x, dy = torch.randn(2, 29, columns, device=device)
    x += 10 * torch.randn(29, 1, device=device)
    if "mask" in options:
        mask = some(29, columns, device=device)
        mask[7, :block] = mask[11, block:] = mask[20] = False
        options = options | {"mask": mask}
    expected = with_gradient(reference.softmax, x.double(), dy.double(), **options)
    published = []

    def words(*size, dtype, device):
        """What the programs publish: pairs of the forward, sums of dy * y of the backward."""
        if dtype is torch.int64:
            tops, sums = parts_of_a_row(x, block, **options)
            complement = bits(sums).long() << 32 | bits(tops).long() & 0xFFFFFFFF
        else:
            sums = torch.stack([p.sum(-1) for p in (dy * expected[0]).split(block, -1)], -1)
            complement = bits(sums.float())
        assert (dtype, complement.dtype, *size) == (complement.dtype, dtype, 29 * splits)
        # The last bit of sums is off, so that a word which nobody wrote over shows; a sum of 0 stays one.
        off = (sums != 0).to(dtype) * (1 << 32 if dtype is torch.int64 else 1)
        before = ~(complement ^ off).flatten()
        published.append((before, before.clone()))
        return published[-1][0]

    for module in (forward, backward):
        monkeypatch.setattr(module, "config", lambda *_: RowConfig("split", block, 1, per_sm=4, stages=2))
    with monkeypatch.context() as patch:
        if INTERPRETED:
            patch.setattr(torch, "zeros", words)
        found = with_gradient(softmax, x, dy, **options)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-6)
    assert len(published) == (2 if INTERPRETED else 0)
    for pair in published:  # each program wrote over its own
        written = pair[0] != pair[1]
        assert written.float().mean() > 0.1  # many are 0 under masks, and a sum may by chance have just those bits
        a, e = ((~words).view(torch.float32) for words in pair)
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)
