"""What is special to decode_attention: lengths, pages, splits, quantized caches, and what is refused."""

import dataclasses
import functools
import itertools
import sys
import types
import weakref

import pytest
import torch
from helpers import draw

from rooftile.cases import attention_paged as paged_cases
from rooftile.cases import decode_attention as cases
from rooftile.cases.case import Unsupported
from rooftile.cases.check import relative_error
from rooftile.ops import decode_attention as op
from rooftile.ops.attention import attention, attention_paged
from rooftile.ops.decode_attention import DecodeConfig
from rooftile.ops.decode_attention.choose import choose, decode, encode
from rooftile.reference import attention_paged as paged_reference
from rooftile.reference import decode_attention as reference_module
from rooftile.runtime import TARGETS

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
# Splits of 16 keys, aligned or equal shares, combined by the last program or a second kernel; or whole items.
ALIGNED = DecodeConfig(block_n=16, num_stages=2, programs_per_sm=4, slack=1000, combine="last")
SHARES = DecodeConfig(block_n=16, num_stages=2, programs_per_sm=4, slack=0, combine="last")
CONFIGS = {
    "aligned": ALIGNED,
    "shares": SHARES,
    "aligned, kernel": dataclasses.replace(ALIGNED, combine="kernel"),
    "shares, kernel": dataclasses.replace(SHARES, combine="kernel"),
    "whole": DecodeConfig(block_n=16, num_stages=2, programs_per_sm=4, combine="none"),
    "whole, in turn": DecodeConfig(block_n=16, num_stages=2, programs_per_sm=1, combine="none"),
}
decode_attention = functools.partial(op.decode_attention, layout="bthd")
reference = functools.partial(reference_module.decode_attention, layout="bthd")
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def make(device, lengths, *, tokens=1, heads=(4, 2), dims=(16, 16), capacity=None, dtype=torch.float32):
    batch, capacity = len(lengths), max(lengths) if capacity is None else capacity
    q = torch.randn(batch, tokens, heads[0], dims[0], device=device).to(dtype)
    k = torch.randn(batch, capacity, heads[1], dims[0], device=device).to(dtype)
    v = torch.randn(batch, capacity, heads[1], dims[1], device=device).to(dtype)
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device=device)


def expected(q, k, v, lengths, **options):
    options = {
        n: o.double() if isinstance(o, torch.Tensor) and o.is_floating_point() else o for n, o in options.items()
    }
    v = None if v is None else v.double()
    return reference(q.double(), k.double(), v, lengths, return_lse=True, **options)


def assert_right(results, wanted, tolerance=3e-6):
    out, lse = results
    assert relative_error(out, wanted[0]) < tolerance
    torch.testing.assert_close(lse.double(), wanted[1].double(), rtol=tolerance, atol=2e-5)


def paged(cache, page, page_order, n_pages):
    """The cache of (B, S, H, D) in pages, those of the table, and the table."""
    batch, capacity = cache.shape[:2]
    per = -(-capacity // page)
    padded = torch.zeros(batch, per * page, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
    padded.view(torch.uint8)[:, :capacity] = cache.view(torch.uint8)
    pages = torch.zeros(n_pages, page, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
    pages.view(torch.uint8)[page_order] = padded.view(batch * per, page, *cache.shape[2:]).view(torch.uint8)
    return pages


@every_config
def test_ragged_lengths_and_none_in_nan(config, device):
    """Empty, one key, a block and one more, all of the cache; beyond each length the cache is NaN."""
    inputs = make(device, [0, 1, 17, 100, 64], capacity=100)
    wanted = expected(*inputs)
    for cache in inputs[1:3]:
        for b, n in enumerate(inputs[3].tolist()):
            cache[b, n:] = float("nan")
    out, lse = decode_attention(*inputs, return_lse=True, config=config)
    assert_right((out, lse), wanted)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()


@every_config
def test_tokens_are_causal_among_themselves(config, device):
    """Also where there are fewer keys than new tokens: the first see nothing."""
    assert_right(
        decode_attention(*(inputs := make(device, [70, 2, 33], tokens=5)), return_lse=True, config=config),
        expected(*inputs),
    )


@pytest.mark.parametrize("keys", [15, 16, 17, 31, 32, 33, 127, 128, 129])
def test_lengths_at_the_ends_of_splits(keys, device):
    inputs = make(device, [keys], heads=(2, 1))
    assert_right(decode_attention(*inputs, return_lse=True, config=SHARES), expected(*inputs))


@every_config
def test_one_long_sequence_among_short_ones(config, device):
    inputs = make(device, [3, 130, 1, 9, 2])
    assert_right(decode_attention(*inputs, return_lse=True, config=config), expected(*inputs))


@pytest.mark.each_once
@every_config
@pytest.mark.parametrize("window", [1, 16, 20, 1000])
def test_a_window_reads_nothing_before_it(window, config, device):
    inputs = make(device, [100, 40], tokens=2)
    wanted = expected(*inputs, window=window)
    first = 100 - 2 - (window - 1)
    if first >= 16:  # whole blocks before the window are not read
        inputs[1][0, : first // 16 * 16] = inputs[2][0, : first // 16 * 16] = float("nan")
    assert_right(decode_attention(*inputs, window=window, return_lse=True, config=config), wanted)


@every_config
def test_softcap_alibi_and_sinks(config, device):
    inputs = make(device, [100, 0, 7], tokens=2)
    options = {"softcap": 3.0, "scale": 0.5, "alibi_slopes": torch.rand(4, device=device)}
    options["sinks"] = torch.randn(4, device=device)
    results = decode_attention(*inputs, **options, return_lse=True, config=config)
    assert_right(results, expected(*inputs, **options))
    torch.testing.assert_close(results[1][1, :, 0], options["sinks"])  # no key but the sink
    options["alibi_slopes"] = torch.rand(4, 3, device=device).T  # of each sequence
    results = decode_attention(*inputs, **options, return_lse=True, config=config)
    assert_right(results, expected(*inputs, **options))


@every_config
def test_without_causality_all_tokens_see_all_keys(config, device):
    """As many keys as tokens, fewer, none, and many; what lies beyond is NaN."""
    inputs = make(device, [5, 2, 0, 100, 33], tokens=5, capacity=110)
    for name in ("k", "v"):
        cache = inputs[1 if name == "k" else 2]
        for b, n in enumerate(inputs[3].tolist()):
            cache[b, n:] = float("nan")
    options = {"alibi_slopes": torch.rand(4, device=device), "softcap": 2.0, "causal": False}
    zeroed = (inputs[0], *(t.nan_to_num() for t in inputs[1:3]), inputs[3])
    results = decode_attention(*inputs, **options, return_lse=True, config=config)
    assert_right(results, expected(*zeroed, **options))
    results = decode_attention(*inputs, causal=False, return_lse=True, config=config)
    for b, n in ((1, 2), (3, 100)):  # as attention without causality has it
        one = [inputs[0][b : b + 1], *(t[b : b + 1, :n] for t in inputs[1:3])]
        out, lse = attention(*one, layout="bthd", return_lse=True)
        torch.testing.assert_close(results[0][b], out[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[1][b], lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.each_once
@pytest.mark.parametrize("page", [16, 64])
@every_config
def test_pages_give_what_a_contiguous_cache_gives(page, config, device):
    q, k, v, lengths = make(device, [100, 0, 33, 64], tokens=2)
    per = -(-100 // page)
    order = torch.randperm(4 * per + 3, device=device)[: 4 * per]
    pages = [paged(t, page, order, 4 * per + 3) for t in (k, v)]
    table = order.to(torch.int32).view(4, per)
    for b, n in enumerate(lengths.tolist()):  # as engines leave them: nobody looks at pages beyond a length
        table[b, -(-n // page) :] = -1
    plain = decode_attention(q, k, v, lengths, return_lse=True, config=config)
    results = decode_attention(q, *pages, lengths, page_table=table, return_lse=True, config=config)
    assert_right(results, expected(q, k, v, lengths))
    assert relative_error(results[0], plain[0].double()) < 1e-6
    heads_first = [t.transpose(1, 2).contiguous() for t in pages]
    again = decode_attention(q, *heads_first, lengths, page_table=table, cache_layout="bhtd", config=config)
    assert torch.equal(again, results[0])


@pytest.mark.parametrize("cache_layout", ["bthd", "bhtd"])
def test_layout_is_that_of_q_and_out(cache_layout, device):
    """By default heads before tokens, as in `attention`; the memory of out is the same."""
    q, k, v, lengths = make(device, [40, 33], tokens=3)
    expected = decode_attention(q, k, v, lengths)
    if cache_layout == "bhtd":
        k, v = (t.transpose(1, 2).contiguous() for t in (k, v))
    out = op.decode_attention(q.transpose(1, 2), k, v, lengths, cache_layout=cache_layout)
    assert torch.equal(out.transpose(1, 2), expected)
    assert out.transpose(1, 2).is_contiguous()


def test_an_input_that_requires_grad_is_refused(device):
    q, k, v, lengths = make(device, [40, 33])
    with pytest.raises(ValueError, match="decode_attention: k_cache requires grad, but decode_attention has no deriv"):
        decode_attention(q, k.requires_grad_(), v, lengths)
    with torch.no_grad():
        decode_attention(q, k, v, lengths)


def test_layouts_give_bit_identical_results(device):
    q, k, v, lengths = make(device, [70, 33], dims=(80, 48))
    out = decode_attention(q, k, v, lengths)
    heads_first = [t.transpose(1, 2).contiguous() for t in (k, v)]
    assert torch.equal(decode_attention(q, *heads_first, lengths, cache_layout="bhtd"), out)
    last = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    assert torch.equal(decode_attention(*last, lengths), out)


@pytest.mark.each_once
@pytest.mark.parametrize("by", ["one", "head", "token"])
@pytest.mark.parametrize("cache", [FP8, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_quantised_caches(dtype, cache, by, device):
    q, k, v, lengths = make(device, [100, 33], heads=(4, 2), dims=(32, 96), dtype=dtype)
    size = 0.02 if cache == torch.int8 else 1.0
    k, v = ((t.float() / size).clamp(-127, 127).to(cache) for t in (k, v))
    shape = {"one": (), "head": (2,), "token": k.shape[:3]}[by]
    scales = {name: (torch.rand(shape, device=device) + 0.5) * size for name in ("k_scale", "v_scale")}
    results = decode_attention(q, k, v, lengths, **scales, return_lse=True, config=SHARES)
    tolerance = 3e-6 if dtype == torch.float32 else 6e-3
    wanted = expected(q, k, v, lengths, **scales)
    assert relative_error(results[0], wanted[0]) < tolerance
    assert relative_error(results[1], wanted[1]) < 1e-5


@pytest.mark.parametrize("cache", [FP8, torch.int8])
def test_eight_bits_with_queries_and_scales_beyond_float16(cache, device):
    """Products are of float16 there: rows of q, and scales by token, are brought into its range."""
    q, k, v, lengths = make(device, [100, 33], dims=(32, 32), dtype=BF16)
    k, v = ((t.float() * 30).clamp(-127, 127).to(cache) for t in (k, v))
    sizes = torch.tensor([1e-30, 1e9, 1.0, 1e5], device=device)
    q = (q.float() * sizes[:, None]).to(BF16)
    v_scale = torch.rand(2, 100, 2, device=device) * torch.tensor([1e-12, 1e12], device=device)
    v_scale[:, :20] = 0.0
    for k_scale in (1.0, 1e-9):
        scales = {"k_scale": torch.tensor(k_scale, device=device), "v_scale": v_scale}
        out = decode_attention(q, k, v, lengths, **scales, scale=1e-3, config=SHARES)
        wanted, _ = expected(q, k, v, lengths, **scales, scale=1e-3)
        for head in range(4):
            assert relative_error(out[:, :, head], wanted[:, :, head]) < 6e-3


def test_every_number_of_eight_bits_is_taken_as_it_is(device):
    """One key, so that out is its value; a NaN stays one."""
    numbers = torch.arange(256, device=device).to(torch.uint8).view(1, 1, 2, 128)
    q, lengths = torch.zeros(1, 1, 2, 32, dtype=BF16, device=device), torch.ones(1, dtype=torch.int32, device=device)
    k, one = torch.zeros(1, 1, 2, 32, device=device), torch.ones((), device=device)
    for cache in (FP8, torch.int8):
        out = decode_attention(q, k.to(cache), numbers.view(cache), lengths, k_scale=one, v_scale=one)
        assert torch.equal(out.nan_to_num(nan=1e4), numbers.view(cache).float().to(BF16)[:1].nan_to_num(nan=1e4))


def test_rows_of_eight_bits_at_odd_bytes(device):
    """They are read by two, so such a cache is copied."""
    q, k, v, lengths = make(device, [40], dims=(32, 32), dtype=BF16)
    k, v = ((t.float() * 30).clamp(-127, 127).to(torch.int8) for t in (k, v))
    scales = {"k_scale": torch.ones((), device=device), "v_scale": torch.ones((), device=device)}
    plain = decode_attention(q, k, v, lengths, scale=1e-2, **scales)
    odd = [torch.zeros(1, 40, 2, 33, dtype=torch.int8, device=device)[..., 1:].copy_(t) for t in (k, v)]
    assert torch.equal(decode_attention(q, *odd, lengths, scale=1e-2, **scales), plain)
    heads = [torch.zeros(1, 40, 2, 33, dtype=torch.int8, device=device)[..., :31].copy_(t[..., :31]) for t in (k, v)]
    out = decode_attention(q[..., :31], *heads, lengths, scale=1e-2, **scales)  # of an odd length: number by number
    assert relative_error(out, expected(q[..., :31], *heads, lengths, scale=1e-2, **scales)[0]) < 6e-3


def test_scales_by_token_of_pages(device):
    q, k, v, lengths = make(device, [70, 33])
    k, v = ((t * 40).clamp(-127, 127).to(torch.int8) for t in (k, v))
    k_scale, v_scale = (torch.rand(2, 70, 2, device=device) * 0.02 for _ in range(2))
    order = torch.randperm(10, device=device)
    pages = [paged(t, 16, order, 10) for t in (k, v)]
    page_scales = [paged(t[..., None], 16, order, 10)[..., 0] for t in (k_scale, v_scale)]
    table = order.to(torch.int32).view(2, 5)
    out = decode_attention(q, *pages, lengths, page_table=table, k_scale=page_scales[0], v_scale=page_scales[1])
    wanted, _ = expected(q, k, v, lengths, k_scale=k_scale, v_scale=v_scale)
    assert relative_error(out, wanted) < 3e-6
    moved = [t.transpose(1, 2).contiguous() for t in (*pages, *page_scales)]
    again = decode_attention(
        q, *moved[:2], lengths, page_table=table, k_scale=moved[2], v_scale=moved[3], cache_layout="bhtd"
    )
    assert torch.equal(again, out)


def test_more_query_rows_than_a_tile(device):
    """40 heads of one KV head times 3 tokens: two tiles of 64 rows."""
    inputs = make(device, [50, 33], tokens=3, heads=(40, 1))
    assert_right(decode_attention(*inputs, return_lse=True, config=SHARES), expected(*inputs))


@pytest.mark.parametrize("dims", [(8, 8), (72, 16), (96, 128), (192, 128), (256, 24)])
def test_head_dims(dims, device):
    inputs = make(device, [40], heads=(2, 1), dims=dims)
    assert_right(decode_attention(*inputs, return_lse=True), expected(*inputs))


def test_a_cache_of_no_keys(device):
    q, k, v, _ = make(device, [5, 7])
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    out, lse = decode_attention(q, k[:, :0], v[:, :0], lengths, return_lse=True)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    sinks = torch.randn(4, device=device)
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    pages = [t[:, :0].reshape(0, 16, *t.shape[2:]) for t in (k, v)]
    _, lse = decode_attention(q, *pages, lengths, page_table=table, sinks=sinks, return_lse=True)
    assert torch.equal(lse, sinks[None, :, None].expand(2, -1, 1))


def test_rows_far_apart_in_memory(device):
    """A token stride of 2^30 + 64 over four tokens: offsets past 2^31. The memory is mapped, and mostly never there."""
    if device.type != "cpu":
        pytest.skip("8 GiB of the host's memory are mapped, and mostly never there; a GPU would allocate them")
    far = 2**30 + 64
    k = torch.empty_strided((1, 4, 1, 16), (4 * far, far, 16, 1), dtype=torch.float16)
    k.copy_(torch.randn(k.shape))
    q, lengths = torch.randn(1, 1, 1, 16).half(), torch.tensor([4], dtype=torch.int32)
    assert torch.equal(decode_attention(q, k, k, lengths), decode_attention(q, *[k.contiguous()] * 2, lengths))


def test_configurations_survive_the_schema():
    for config in (*CONFIGS.values(), DecodeConfig(pdl=True), None):
        assert decode(encode(config)) == config


@pytest.mark.gpu
@every_config
def test_a_graph_replayed_with_other_lengths(config, device):
    q, k, v, lengths = make(device, [200, 7, 1, 64], capacity=300, dtype=BF16)
    lengths = lengths.clone()
    decode_attention(q, k, v, lengths, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, lengths, config=config)
    for new in ([300, 300, 300, 300], [0, 1, 16, 17], [1, 299, 0, 5], [64, 64, 64, 64]):
        lengths.copy_(torch.tensor(new))
        graph.replay()
        assert relative_error(out, expected(q, k, v, lengths)[0]) < 6e-3
        assert torch.equal(out, decode_attention(q, k, v, lengths.clone(), config=config))


@pytest.mark.gpu
def test_lengths_and_pages_on_the_gpu_are_clamped(device):
    q, k, v, lengths = make(device, [100, 100], dtype=BF16)
    beyond = torch.tensor([100_000, -5], dtype=torch.int32, device=device)
    out = decode_attention(q, k, v, beyond)
    assert torch.equal(out[0], decode_attention(q, k, v, lengths)[0])
    assert (out[1] == 0).all()
    table = torch.tensor([[-7, 1 << 30], [2, 1]], dtype=torch.int32, device=device)
    pages = [t.reshape(-1, *t.shape[2:])[:192].view(3, 64, *t.shape[2:]) for t in (k, v)]
    nearest = torch.tensor([[0, 2], [2, 1]], dtype=torch.int32, device=device)
    wild, tame = (decode_attention(q, *pages, lengths, page_table=t) for t in (table, nearest))
    assert torch.equal(wild, tame)


@pytest.mark.gpu
def test_lengths_on_the_cpu_are_checked_and_taken_along(device):
    q, k, v, lengths = make(device, [100, 30], dtype=BF16)
    assert torch.equal(decode_attention(q, k, v, lengths.cpu()), decode_attention(q, k, v, lengths))
    with pytest.raises(ValueError, match=r"lengths\[0\] is 101, expected at most 100"):
        decode_attention(q, k, v, lengths.cpu() + 1)


class TestRefused:
    def test_values_on_the_cpu(self, device):
        if device.type != "cpu":
            pytest.skip("numbers are on the CPU in the interpreter alone: with q on a GPU they have to be there too")
        q, k, v, lengths = make(device, [20, 33])
        with pytest.raises(ValueError, match=r"decode_attention: lengths\[1\] is 34, expected at most 33"):
            decode_attention(q, k, v, lengths + 1)
        pages = [torch.zeros(4, 16, 2, 16)] * 2
        table = torch.tensor([[0, 9, -1], [3, 2, 4]], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"page_table\[0, 1\] is 9, expected 0 to 3: k_cache has 4 pages"):
            decode_attention(q, *pages, lengths, page_table=table)
        table[0, 1] = 1
        with pytest.raises(ValueError, match=r"page_table\[1, 2\] is 4, expected 0 to 3"):
            decode_attention(q, *pages, lengths, page_table=table)

    def test_shapes(self, device):
        q, k, v, lengths = make(device, [20, 33])
        table = torch.zeros(2, 3, dtype=torch.int32, device=device)
        ones = torch.ones(3, device=device)
        many = q.expand(2, 17, 4, 16)
        wrong = [
            ((q[0], k, v, lengths), {}, r"q has shape \(1, 4, 16\), expected 4 dimensions"),
            ((q, k[0], v, lengths), {}, r"k_cache has shape \(33, 2, 16\), expected 4 dimensions \(B, S, Hkv, D\)"),
            ((many, k, v, lengths), {}, "q has 17 tokens .*; attention takes"),
            ((many, k, v, lengths), {"page_table": table}, "q has 17 tokens .*; attention_paged takes"),
            ((q[..., :8], k, v, lengths), {}, "q and k_cache have last dimensions of 8 and 16"),
            ((q, k, v[:, :30], lengths), {}, r"v_cache has shape \(2, 30, 2, 16\), expected \(2, 33, 2, 1 to 256\)"),
            ((q[:, :, :3], k, v, lengths), {}, "q has 3 heads, expected a multiple of k_cache's 2"),
            ((q, k, v, lengths[:1]), {}, r"lengths has shape \(1,\), expected \(2,\)"),
            ((q, k[:1], v[:1], lengths), {}, "k_cache has 1 sequences, expected 2 to match q"),
            ((q, k, v, lengths), {"page_table": table}, "k_cache has pages of 33 tokens, expected one of 16, 32"),
            ((q, k[:, :16], v[:, :16], lengths), {"page_table": table[:1]}, r"page_table has shape \(1, 3\), expected"),
            ((q, k, v, lengths), {"k_scale": ones}, r"k_scale has shape \(3,\), expected \(\), \(2,\) or \(2, 33, 2\)"),
            ((q, k, v, lengths), {"sinks": ones}, r"sinks has shape \(3,\), expected \(4,\)"),
            ((q, k, v, lengths), {"alibi_slopes": ones}, r"alibi_slopes has shape \(3,\), expected \(4,\)"),
            ((q, k, v, lengths), {"layout": "thd"}, "layout is 'thd', expected one of bhtd, bthd"),
            ((q, k, v, lengths), {"window": 0}, "window is 0, expected at least 1"),
            ((q, k, v, lengths), {"window": 3, "causal": False}, "window is 3 with causal=False, expected None"),
            ((q, k, v, lengths), {"softcap": -1.0}, "softcap is -1.0, expected 0 or more and below"),
            ((q, k, v, lengths), {"scale": float("nan")}, "scale is nan, expected a finite value"),
        ]
        for args, options, message in wrong:
            with pytest.raises(ValueError, match=f"decode_attention: {message}"):
                decode_attention(*args, **options)

    def test_dtypes(self, device):
        q, k, v, lengths = make(device, [20, 33])
        wrong = [
            (
                (q, k.half(), v.half(), lengths),
                {},
                "k_cache has dtype torch.float16, expected torch.float32 to match q",
            ),
            ((q, k, v.to(FP8), lengths), {}, "v_cache has dtype torch.float8_e4m3fn, expected torch.float32"),
            ((q, k, v, lengths.long()), {}, "lengths has dtype torch.int64, expected int32"),
            ((q, k, v, lengths), {"k_scale": torch.ones((), dtype=BF16, device=device)}, "k_scale has dtype"),
            ((q, k, v, lengths), {"window": 2.5}, "window is a float, expected an int or None"),
            ((q, k, v, lengths), {"window": lengths[0]}, "window is or has a tensor, expected ints: .* the host wait"),
            ((q, k, v, lengths), {"causal": 1}, "causal is an int, expected a bool"),
            ((q, k, v, lengths), {"return_lse": "xx"}, "return_lse is a str, expected a bool"),
            ((q, k, v, lengths), {"config": "fast"}, "config is a str, expected a DecodeConfig or None"),
        ]
        for args, options, message in wrong:
            with pytest.raises(TypeError, match=f"decode_attention: {message}"):
                decode_attention(*args, **options)

    def test_configurations(self):
        for options in ({"block_n": 48}, {"num_stages": 0}, {"combine": "never"}, {"slack": -1}, {"block_m": 4}):
            with pytest.raises(ValueError, match=r"DecodeConfig: .* expected"):
                DecodeConfig(**options)


def test_one_program_and_many_over_the_same_strides(device):
    """A launch that splits nothing has no buffers for parts: its kernel is not remembered for one that does."""
    q, k, v, lengths = make(device, [64], heads=(2, 1))
    for keys in (16, 64):
        inputs = (q, k[:, :keys], v[:, :keys], lengths.clamp(max=keys))
        for config in CONFIGS.values():
            assert_right(decode_attention(*inputs, return_lse=True, config=config), expected(*inputs))


def test_lengths_just_written_by_the_kernel_before(device):
    """An early launch may guess from the lengths of before; what it computes it computes from the new ones."""
    q, k, v, lengths = make(device, [64, 64])
    config = DecodeConfig(block_n=16, num_stages=2, programs_per_sm=4, prefetch_blocks=2, pdl=True)
    for new in ([64, 1], [0, 40], [3, 64]):
        lengths.copy_(torch.tensor(new))
        assert_right(decode_attention(q, k, v, lengths, return_lse=True, config=config), expected(q, k, v, lengths))


def test_which_items_are_split():
    """A second kernel costs more than a second block of keys, and more than a few where whole items fill the GPU."""
    target = TARGETS["sm_90"]

    def chosen(items, capacity, dtype=BF16, cache=None, page=0):
        return choose(4, 128, 128, dtype, cache or dtype, items, capacity, page, target)

    assert [chosen(32, n).combine for n in (44, 128, 129)] == ["none", "none", "kernel"]
    assert [chosen(64, n).combine for n in (512, 513, 2048)] == ["none", "kernel", "last"]
    assert chosen(16, 512).combine == "kernel"
    # 4 tokens of 4 heads are 16 rows to combine: too many for the last program, unless few items are split.
    assert [choose(16, 128, 128, BF16, BF16, n, 2048, 0, target).combine for n in (64, 256)] == ["kernel", "last"]
    assert chosen(64, 512, torch.float32).combine != "none"  # its blocks are short: it would walk through 32 of them
    # A long cache of few items has splits of at least two blocks, where those are short.
    assert [chosen(8, n).min_blocks for n in (512, 1024, 4096)] == [1, 2, 1]
    # A whole item is taken in blocks of 128 keys only where one pointer serves for all of them, and none is converted.
    assert [chosen(64, 512, page=page).block_n for page in (0, 16, 64, 128)] == [128, 64, 64, 128]
    assert chosen(64, 512, cache=torch.float8_e4m3fn).block_n == 64
    assert choose(4, 64, 64, BF16, BF16, 64, 4096, 0, TARGETS["sm_86"]).min_blocks == 1


def test_a_configuration_that_the_device_cannot_run_is_refused(device):
    inputs = make(device, [8], heads=(2, 1))
    for options, message in (
        ({"num_warps": 64}, "num_warps is 64, expected at most 32"),
        ({"registers": 200, "num_warps": 16}, "registers is 200, expected at most 128 with 16 warps"),
        ({"num_stages": 1 << 20, "block_n": 256}, "of shared memory, expected at most"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(*inputs, config=DecodeConfig(**options))


@pytest.mark.parametrize("paged", [False, True], ids=["decode_attention", "attention_paged"])
def test_the_result_goes_into_rows_of_a_larger_tensor(paged, device):
    q, cache = torch.randn(2, 2, 32, device=device), torch.randn(3, 16, 1, 32, device=device)
    table = torch.tensor([[2], [0]], dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)

    def attend(q, cache, out):
        if paged:
            return attention_paged(q, cache, cache, table, lengths, [0, 1, 2], out=out)
        into = None if out is None else out[:, None]
        found = decode_attention(q[:, None], cache, cache, lengths, page_table=table, out=into)
        return found[:, 0] if out is None else out

    memory, wanted = torch.zeros(4, 2, 32, device=device), attend(q, cache, None)
    before = memory._version
    assert attend(q, cache, memory[1:3]).data_ptr() == memory[1].data_ptr()
    assert torch.equal(memory[1:3], wanted)
    assert not memory[::3].any()
    assert memory._version > before  # autograd knows
    for name in ("q", "k_cache", "out"):
        given = {"q": q, "k_cache": cache, "out": memory[1:3]}
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"{name} requires grad"):
            attend(*given.values())
    with pytest.raises(ValueError, match=r"q is on .*, expected meta to match out"):
        attend(q, cache, memory[1:3].to("meta"))
    with pytest.raises(ValueError, match=r"out is torch.float32 of shape \(3, "):
        attend(q, cache, memory[1:])
    op = torch.ops.rooftile.attention_paged_into if paged else torch.ops.rooftile.decode_attention_into
    starts = torch.arange(3, dtype=torch.int32, device=device)
    args = (memory[1:3], q, cache, cache, table, lengths, starts, *[None] * 4, 1, None, 0.0, -1, 0, "bthd", "")
    if not paged:
        args = (
            memory[1:3, None], q[:, None], cache, cache, lengths, table, *[None] * 8, None, True, "bthd", "bthd",
            False, "",
        )  # fmt: skip
    torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


# The baseline in pages


class _Planned:
    """A stand-in for FlashInfer's wrappers with the signatures of version 0.7.4: it computes what was planned."""

    plans = 0

    def __init__(self, workspace, kv_layout, use_tensor_cores=None):
        assert workspace.dtype == torch.uint8
        self.layout, self.use_tensor_cores = kv_layout, use_tensor_cores

    def plan(self, *planned, sm_scale, q_data_type, causal=False, q_len_per_req=1):
        _Planned.plans += 1
        *starts_q, starts, pages, last, heads, kv_heads, dim, page = planned
        assert all(t.dtype == torch.int32 for t in (*starts_q, starts, pages, last))
        assert starts[-1] == len(pages)
        assert (pages >= 0).all()
        assert ((last >= 1) & (last <= page) | (last == 0) & (starts.diff() == 0)).all()
        n = len(last)
        if not starts_q:
            assert self.use_tensor_cores == (heads >= 4 * kv_heads or q_len_per_req > 1)
        self.starts_q = starts_q[0] if starts_q else torch.arange(n + 1, dtype=torch.int32) * q_len_per_req
        self.table = torch.full((n, int(starts.diff().max())), -1, dtype=torch.int32)
        for row, (start, end) in zip(self.table, itertools.pairwise(starts.tolist()), strict=True):
            row[: end - start] = pages[start:end]
        self.lengths = (starts.diff() - 1).clamp(min=0) * page + last
        self.shape, self.scale, self.causal = (heads, kv_heads, dim, page), sm_scale, causal or not starts_q

    def run(self, q, caches):
        assert q.shape[1:] == (self.shape[0], self.shape[2])
        more = {"scale": self.scale, "causal": self.causal, "cache_layout": {"NHD": "bthd", "HND": "bhtd"}[self.layout]}
        tensors = (*(t.double() for t in (q, *caches)), self.table.clamp(min=0), self.lengths, self.starts_q)
        return paged_reference.attention_paged(*tensors, **more).to(q.dtype)


@pytest.fixture
def flashinfer(monkeypatch):
    stub = types.ModuleType("flashinfer")
    stub.BatchDecodeWithPagedKVCacheWrapper = stub.BatchPrefillWithPagedKVCacheWrapper = _Planned
    monkeypatch.setitem(sys.modules, "flashinfer", stub)
    for module in (cases, paged_cases):
        monkeypatch.setattr(module, "on_gpu", lambda name: None)
    monkeypatch.setattr(_Planned, "plans", 0)


def _peer(module):
    (case,) = module.CASES
    return case, next(peer for peer in case.peers if peer.name == "flashinfer")


@pytest.mark.parametrize(
    ("module", "point"),
    [
        (cases, cases._point(5, 70, (8, 2), (64, 64), page=16, ragged=True)),
        (cases, cases._point(3, 40, (2, 2), (64, 64), page=32, ragged=True, cache_layout="bhtd", scale=0.3)),
        (cases, cases._point(3, 40, (4, 2), (64, 64), page=16, tokens=3)),
        (paged_cases, paged_cases.point(3, 9, 40, (4, 1), (64, 64), page=16, singles=2)),
        (paged_cases, paged_cases.point(2, 9, 40, (2, 2), (64, 64), page=32, cache_layout="bhtd", scale=0.3)),
    ],
)
def test_flashinfer_gets_the_pages_that_sequences_use(module, point, flashinfer):
    case, peer = _peer(module)
    run = peer.build(point)
    tables = []
    for seed in (1, 2):  # each set of inputs is planned, once
        inputs = draw(case, point, BF16, torch.device("cpu"), seed)
        tables.append(weakref.ref(inputs["page_table"]))
        columns = torch.arange(inputs["page_table"].shape[1])
        if module is cases and point["ragged"]:
            inputs["lengths"][0] = 0
        inputs["page_table"][columns * point["page"] >= inputs["lengths"][:, None]] = -1
        want = case.reference(**{n: t.double() if t.dtype == BF16 else t for n, t in inputs.items()}, **point.options)
        for _ in range(2):
            assert relative_error(run(**inputs, **point.options), want) < 1e-2
    del inputs
    assert _Planned.plans == 2
    assert all(table() is not None for table in tables), "another set's table could have its address"


def test_flashinfer_takes_what_it_can_compute(flashinfer, monkeypatch):
    _, peer = _peer(cases)
    taken = {"dims": (64, 64), "page": 16}
    peer.build(cases._point(2, 40, **taken))
    for more in (
        {"page": 0},
        {"cache": "fp8", "scales": "head"},
        {"dims": (64, 32)},
        {"latent": True},
        {"window": 9},
        {"sinks": True},
    ):
        with pytest.raises(Unsupported, match="FlashInfer"):
            peer.build(cases._point(2, 40, **(taken | more)))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for module, point in ((cases, cases._point(2, 40, **taken)), (paged_cases, paged_cases.point(2, 9, 40, page=16))):
        with pytest.raises(ImportError):
            _peer(module)[1].build(point)
