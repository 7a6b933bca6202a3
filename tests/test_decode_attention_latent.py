"""decode_attention over a latent cache: values that are the first columns of the keys."""

import pytest
import torch
from test_decode_attention import (
    BF16,
    CONFIGS,
    FP8,
    SHARES,
    assert_right,
    decode_attention,
    every_config,
    expected,
    make,
    paged,
)

from rooftile.cases.check import relative_error
from rooftile.ops.decode_attention.choose import choose, most_rows, row_tile
from rooftile.reference import decode_attention as reference
from rooftile.runtime import TARGETS


def latent(device, lengths, *, tokens=1, heads=4, dims=(48, 32), **options):
    """q, the keys, None and the lengths; the keys twice as wide in memory, with NaN beside and behind what is read."""
    q, k, _, lengths = make(device, lengths, tokens=tokens, heads=(heads, 1), dims=dims, **options)
    wide = torch.full((*k.shape[:3], 2 * dims[0]), float("nan"), dtype=k.dtype, device=device)
    wide[..., : dims[0]] = k
    for b, n in enumerate(lengths.tolist()):
        wide[b, n:] = float("nan")
    return q, wide[..., : dims[0]], None, lengths


def expected_latent(q, k, _, lengths, head_dim_v, **options):
    return expected(q, k.nan_to_num(), None, lengths, head_dim_v=head_dim_v, **options)


@every_config
def test_ragged_lengths_in_nan(config, device):
    inputs = latent(device, [0, 1, 17, 100, 64], tokens=2, capacity=100)
    results = decode_attention(*inputs, head_dim_v=32, return_lse=True, config=config)
    assert_right(results, expected_latent(*inputs, 32))
    assert (results[0][0] == 0).all()


@pytest.mark.parametrize("config", [CONFIGS["aligned"], CONFIGS["shares, kernel"]], ids=["last", "kernel"])
def test_more_rows_than_a_tile(config, device):
    """40 heads times 4 tokens: three tiles of 64 rows, each with partial results and counters of its own."""
    inputs = latent(device, [50, 33], tokens=4, heads=40)
    results = decode_attention(*inputs, head_dim_v=32, return_lse=True, config=config)
    assert_right(results, expected_latent(*inputs, 32))


@pytest.mark.parametrize(
    ("dims", "heads"), [((40, 32), 2), ((48, 40), 2), ((32, 32), 2), ((48, 7), 2), ((576, 512), 16)]
)
def test_head_dims(dims, heads, device):
    """Values that end within the first block of columns, with it, in the second, and with the key."""
    inputs = latent(device, [40], heads=heads, dims=dims)
    results = decode_attention(*inputs, head_dim_v=dims[1], return_lse=True, config=SHARES)
    assert_right(results, expected_latent(*inputs, dims[1]))


@pytest.mark.parametrize("page", [16, 64])
def test_random_pages(page, device):
    q, k, _, lengths = make(device, [100, 33], tokens=3, heads=(4, 1), dims=(48, 32))
    per = -(-100 // page)
    order = torch.randperm(2 * per, device=device)
    pages = paged(k, page, order, 2 * per + 1)
    table = order.to(torch.int32).view(2, per)
    for b, n in enumerate(lengths.tolist()):  # what no key is read from
        for i in range(per):
            pages[table[b, i], max(0, n - i * page) :] = float("nan")
    pages[-1] = float("nan")
    options = {"head_dim_v": 32, "return_lse": True, "config": SHARES}
    assert_right(
        decode_attention(q, pages, None, lengths, page_table=table, **options),
        expected(q, k, None, lengths, head_dim_v=32),
    )


@pytest.mark.parametrize("extra", ["window", "mask", "causal", "others"])
def test_options(extra, device):
    q, k, _, lengths = inputs = latent(device, [100, 7, 64], tokens=2, capacity=100)
    options = {
        "window": {"window": 40},
        "mask": {"mask": torch.rand(3, 100, device=device) < 0.6},
        "causal": {"causal": False},
        "others": {
            "softcap": 3.0,
            "sinks": torch.randn(4, device=device),
            "alibi_slopes": torch.rand(4, device=device),
        },
    }[extra]
    if extra == "mask":  # what a mask hides is read
        inputs = (q, k.nan_to_num(), None, lengths)
    results = decode_attention(*inputs, head_dim_v=32, scale=0.3, return_lse=True, config=SHARES, **options)
    assert_right(results, expected_latent(*inputs, 32, scale=0.3, **options))


@pytest.mark.parametrize("cache", [FP8, torch.int8])
@pytest.mark.parametrize("by", ["tensor", "token"])
def test_eight_bits(cache, by, device):
    """One scale holds for a token's key and its value."""
    q, k, _, lengths = make(device, [70, 33], heads=(4, 1), dims=(48, 32), dtype=BF16)
    k = (k.float() * 30).clamp(-127, 127).to(cache)
    scale = torch.rand(() if by == "tensor" else (2, 70, 1), device=device) * 0.02 + 0.01
    out = decode_attention(q, k, None, lengths, head_dim_v=32, k_scale=scale, config=SHARES)
    assert relative_error(out, expected(q, k, None, lengths, head_dim_v=32, k_scale=scale)[0]) < 6e-3


def test_a_cache_of_keys_and_values_of_the_same_numbers(device):
    q, k, _, lengths = make(device, [50, 33], heads=(6, 2), dims=(48, 32))
    both = decode_attention(q, k, k[..., :32], lengths, return_lse=True, config=SHARES)
    found = decode_attention(q, k, None, lengths, head_dim_v=32, return_lse=True, config=SHARES)
    for one, other in zip(found, both, strict=True):
        assert relative_error(one, other.double()) < 3e-6


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("rows", [16, 32, 128, 512])
def test_two_blocks_and_the_queries_fit_in_shared_memory(rows, arch):
    target = TARGETS[arch]
    for dtype in (BF16, torch.float32):
        tile, _ = row_tile(rows, most_rows(576, dtype, target))
        c = choose(rows, 576, 512, dtype, dtype, 8, 4096, 64, target, True)
        used = (2 * c.block_n + max(tile, 16)) * 576 * dtype.itemsize
        assert c.block_n == 16 or used <= target.shared_memory
        assert c.programs_per_sm == 1


def test_refused(device):
    q, k, _, lengths = make(device, [20, 33], heads=(4, 1), dims=(48, 32))
    v, scale = k[..., :32], torch.ones((), device=device)
    for args, options, message in (
        ((q, k, None, lengths), {}, "head_dim_v is None without a v_cache, expected 1 to 48"),
        ((q, k, None, lengths), {"head_dim_v": 49}, "head_dim_v is 49 without a v_cache, expected 1 to 48"),
        ((q, k, None, lengths), {"head_dim_v": 0}, "head_dim_v is 0 without a v_cache"),
        ((q, k, v, lengths), {"head_dim_v": 16}, "head_dim_v is 16, expected None or v_cache's 32"),
        (
            (q, k, None, lengths),
            {"head_dim_v": 32, "v_scale": scale},
            "v_scale is given without a v_cache, expected None",
        ),
        ((q.expand(2, 17, 4, 48), k, None, lengths), {"head_dim_v": 32}, "q has 17 tokens .*; attention_paged takes"),
    ):
        with pytest.raises(ValueError, match=f"decode_attention: {message}"):
            decode_attention(*args, **options)
    with pytest.raises(TypeError, match=r"decode_attention: head_dim_v is a float, expected an int or None"):
        decode_attention(q, k, None, lengths, head_dim_v=32.0)
    long = torch.zeros(1, 4, 1, 577, device=device)
    with pytest.raises(ValueError, match="last dimensions of 577 and 577, expected the same, 1 to 576"):
        decode_attention(long[:, :1], long, None, lengths[:1].clamp(max=4), head_dim_v=512)


@pytest.mark.parametrize(
    "options", [{}, {"alibi_slopes": torch.rand(4), "sinks": torch.rand(4)}], ids=["plain", "biased"]
)
def test_eager_repeats_the_latents_of_some_sequences_after_others(options, monkeypatch):
    """The keys of 8 sequences of 32768 tokens, repeated for 128 heads, are 36 GiB."""
    q, k, _, lengths = make("cpu", [20, 33, 7], heads=(4, 1), dims=(48, 32))
    given = {"head_dim_v": 32, "layout": "bthd", "mask": torch.rand(3, 33) > 0.2, **options}
    whole = reference.eager(q, k, None, lengths, **given)
    sizes = []
    monkeypatch.setattr(reference, "EXPANDED", 2 * 4 * 33 * 48 + 1)
    one = reference._eager
    monkeypatch.setattr(reference, "_eager", lambda q, *args, **rest: (sizes.append(len(q)), one(q, *args, **rest))[1])
    assert torch.equal(reference.eager(q, k, None, lengths, **given), whole)
    assert sizes == [2, 1]
    torch.testing.assert_close(whole, reference.decode_attention(q, k, None, lengths, **given), rtol=1e-5, atol=1e-5)
