"""What is special to attention over a paged cache: pages and lengths of any kind, chunks, and what is refused."""

import itertools

import pytest
import torch

from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.ops.attention import AttentionConfig, attention, attention_paged, paged
from rooftile.ops.attention.paged import attention_paged_op
from rooftile.ops.attention.problem import Scoring, choose_forward
from rooftile.ops.decode_attention import decode_attention

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
INF = float("inf")
# Blocks of 32 keys: smaller than a page, as large, or of several pages.
CONFIG = AttentionConfig("portable", 16, 32, 4, 1)
every_page = pytest.mark.parametrize("page", [16, 32, 64])


def make(device, n_q, lengths, *, page=16, heads=(4, 2), dims=(32, 32), dtype=torch.float32, spare=3):
    """q, the caches and the indices. Pages are shuffled; unused pages, and what lies beyond each length, is NaN."""
    per = max(1, max(-(-n // page) for n in lengths) + 1)
    used = sum(-(-n // page) for n in lengths)
    order = torch.randperm(used + spare).tolist()
    table = torch.full((len(lengths), per), 10**6, dtype=torch.int32)  # beyond a length: no page
    k = torch.full((used + spare, page, heads[1], dims[0]), float("nan"))
    v = torch.full((used + spare, page, heads[1], dims[1]), float("nan"))
    for b, n in enumerate(lengths):
        for i in range(-(-n // page)):
            table[b, i] = order.pop()
            rows = min(page, n - i * page)
            k[table[b, i], :rows] = torch.randn(rows, heads[1], dims[0])
            v[table[b, i], :rows] = torch.randn(rows, heads[1], dims[1])
    starts = torch.tensor([0, *itertools.accumulate(n_q)], dtype=torch.int32)
    q = torch.randn(sum(n_q), heads[0], dims[0])
    indices = (table, torch.tensor(lengths, dtype=torch.int32), starts)
    return *(t.to(device, dtype) for t in (q, k, v)), *(t.to(device) for t in indices)


def gathered(cache, table, lengths, b):
    """The keys (or values, or scales) of sequence b."""
    n, page = int(lengths[b]), cache.shape[1]
    pages = table[b, : -(-n // page)].long()
    return cache[pages].flatten(0, 1)[:n]


def expected(q, k, v, table, lengths, starts, **options):
    """Sequence by sequence, dense attention in the same dtype."""
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[3])], [torch.zeros(q.shape[1], 0, device=q.device)]
    for b in range(lengths.shape[0]):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        keys, values = (gathered(t, table, lengths, b)[None] for t in (k, v))
        given = {"causal": True, **options}
        if (slopes := options.get("alibi_slopes")) is not None and slopes.dim() == 2:
            given["alibi_slopes"] = slopes[b]
        out, lse = attention(q[None, rows], keys, values, layout="bthd", return_lse=True, **given)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


OPTIONS = {
    "none": {},
    "window": {"window": 9},
    "not causal": {"causal": False},
    "two-sided window": {"causal": False, "window": (9, 3)},
    "softcap and sinks": {"softcap": 2.0, "scale": 0.3, "sinks": (4,)},
    "alibi by head": {"alibi_slopes": (4,)},
    "alibi by sequence": {"alibi_slopes": (8, 4)},
}


# No option and a window with pages of each size, the others with one.
@pytest.mark.parametrize(
    ("page", "name"),
    [
        pytest.param(page, name, marks=() if i < 2 or i % 3 == j else pytest.mark.nightly)
        for (j, page), (i, name) in itertools.product(enumerate((16, 32, 64)), enumerate(OPTIONS))
    ],
)
def test_sequences_of_any_lengths_in_shuffled_pages_among_nan(page, name, device):
    """No queries, one, and chunks; no keys, one, a whole page, one more; fewer keys than queries; a whole prompt."""
    n_q, lengths = [7, 1, 0, 1, 20, 3, 16, 9], [70, 1, 33, 64, 65, 0, 16, 4]
    inputs = make(device, n_q, lengths, page=page)
    drawn = {"sinks": torch.randn, "alibi_slopes": torch.rand}
    options = {k: drawn[k](shape, device=device) if k in drawn else shape for k, shape in OPTIONS[name].items()}
    found = attention_paged(*inputs, **options, return_lse=True, config=CONFIG)
    assert_close(found, expected(*inputs, **options))


def test_a_chunk_is_the_same_rows_of_the_whole_prompt(device):
    q, k, v, table, lengths, _ = make(device, [50], [50])
    whole = attention_paged(q, k, v, table, lengths, [0, 50], config=CONFIG)
    for first, end in itertools.pairwise((0, 16, 17, 40, 50)):
        now = torch.tensor([end], dtype=torch.int32, device=device)
        chunk = attention_paged(q[first:end], k, v, table, now, [0, end - first], config=CONFIG)
        torch.testing.assert_close(chunk, whole[first:end], rtol=1e-5, atol=1e-5)


def test_sequences_share_the_pages_of_a_common_beginning(device):
    q, k, v, table, *_ = make(device, [30], [40])
    n = torch.tensor([40, 35, 16], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 8, 20, 30], dtype=torch.int32, device=device)
    shared = table.expand(3, -1)
    assert shared.stride(0) == 0
    assert_close(
        attention_paged(q, k, v, shared, n, starts, return_lse=True, config=CONFIG),
        expected(q, k, v, shared, n, starts),
    )


def test_one_token_of_each_sequence_is_what_decoding_computes(device):
    q, k, v, table, lengths, starts = make(device, [1, 1, 1], [70, 33, 1])
    out, lse = attention_paged(q, k, v, table, lengths, starts, max_seqlen_q=1, return_lse=True)
    decoded, decoded_lse = decode_attention(q[:, :, None], k, v, lengths, page_table=table, return_lse=True)
    torch.testing.assert_close(out, decoded[:, :, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.t(), decoded_lse[..., 0], rtol=1e-5, atol=1e-5)


@every_page
def test_keys_before_a_window_are_not_read(page, device):
    """A sliding window's cache may free the pages before it: whole pages of NaN, or indices of none."""
    inputs = make(device, [3, 20], [90, 85], page=page)
    wanted = expected(*inputs, window=9)
    _, k, v, table, *_ = inputs
    for b, first in ((0, 87 - 8), (1, 65 - 8)):
        pages = table[b].tolist()
        for i in range(first):
            k[pages[i // page], i % page] = v[pages[i // page], i % page] = float("nan")
    assert_close(attention_paged(*inputs, window=9, return_lse=True, config=CONFIG), wanted)


@pytest.mark.each_once
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("dtype", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("by", ["tensor", "head", "token"])
def test_a_cache_of_8_bits_gives_what_its_dequantized_one_gives(page, dtype, by, device):
    q, k, v, *indices = make(device, [7, 1, 20], [70, 33, 21], page=page, dims=(32, 64))
    shape = {"tensor": (), "head": (2,), "token": k.shape[:3]}[by]
    k_scale, v_scale = (torch.rand(shape, device=device) * 0.05 + 0.01 for _ in range(2))
    small, wide = [], []
    for cache, scale in ((k, k_scale), (v, v_scale)):
        per = scale[..., None] if by == "token" else scale.reshape(-1, 1)
        narrow = (cache.nan_to_num(0.0) / per).clamp(-127, 127)
        narrow = narrow.round().to(dtype) if dtype == torch.int8 else narrow.to(dtype)
        small.append(narrow)
        wide.append(narrow.float() * per)
    for options in ({}, {"window": 9, "softcap": 3.0}):
        wanted = expected(q, *wide, *indices, **options)
        found = attention_paged(
            q, *small, *indices, k_scale=k_scale, v_scale=v_scale, return_lse=True, config=CONFIG, **options
        )
        assert_close(found, wanted)
    heads_first = [t.transpose(1, 2).contiguous() for t in small]
    scales = [s.transpose(1, 2).contiguous() if by == "token" else s for s in (k_scale, v_scale)]
    again = attention_paged(
        q, *heads_first, *indices, k_scale=scales[0], v_scale=scales[1], cache_layout="bhtd", config=CONFIG
    )
    plain = attention_paged(q, *small, *indices, k_scale=k_scale, v_scale=v_scale, config=CONFIG)
    assert torch.equal(again, plain)


def test_scales_beyond_a_length_may_be_nan(device):
    q, k, v, *indices = make(device, [7], [21], page=32)
    small = [t.nan_to_num(0.0).to(FP8) for t in (k, v)]
    scales = [torch.full(k.shape[:3], float("nan"), device=device) for _ in range(2)]
    page = int(indices[0][0, 0])
    for s in scales:
        s[page, :21] = 1.0
    out = attention_paged(q, *small, *indices, k_scale=scales[0], v_scale=scales[1], config=CONFIG)
    # Without scales a GPU fuses other products and sums.
    assert relative_error(out, attention_paged(q, *small, *indices, config=CONFIG)) < 1e-6


def test_in_16_bits(device):
    inputs = make(device, [7, 1, 40], [70, 33, 40], dtype=BF16)
    out = attention_paged(*inputs, config=CONFIG)
    wanted, _ = expected(*(t.double().float() if t.is_floating_point() else t for t in inputs))
    assert out.dtype == BF16
    assert relative_error(out, wanted) < 5e-3


def test_any_strides(device):
    q, k, v, table, lengths, starts = make(device, [7, 1, 20], [70, 33, 21])
    wanted = attention_paged(q, k, v, table, lengths, starts)
    both = torch.stack((k, v), 1)  # (pages, 2, page_size, H, D), as vLLM has it
    assert torch.equal(attention_paged(q, both[:, 0], both[:, 1], table, lengths, starts), wanted)
    qkv = torch.cat((q, q, q), 1)
    assert torch.equal(attention_paged(qkv[:, 4:8], k, v, table, lengths, starts), wanted)
    wide = torch.zeros(3, table.shape[1] * 2, dtype=torch.int32, device=device)
    wide[:, ::2] = table
    columns = [torch.stack((t, t), 1)[:, 0] for t in (lengths, starts)]
    assert not columns[0].is_contiguous()
    assert torch.equal(attention_paged(q, k, v, wide[:, ::2], *columns), wanted)
    last = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (k, v)]
    assert torch.equal(
        attention_paged(q.transpose(1, 2).contiguous().transpose(1, 2), *last, *(table, lengths, starts)), wanted
    )


def test_indices_on_the_device_that_are_wrong_do_no_harm(device):
    """Nothing outside the tensors is read or written, and what no sequence covers is zeros."""
    q, k, v, table, lengths, starts = make(device, [9, 11], [30, 48])
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    options = (None, None, None, None, 0, None, 0.0, -1, 0, "bthd", "")

    def run(table, lengths, starts):
        return attention_paged_op(q, k, v, table, lengths, starts, *options)

    out, _ = run(table, lengths, starts)
    wild = torch.where(table == 10**6, table, table * 0 - 5)
    assert torch.equal(run(wild, lengths, starts)[0], run(torch.zeros_like(table), lengths, starts)[0])
    last = torch.full_like(table, k.shape[0] - 1)
    assert torch.equal(run(last + 7, lengths, starts)[0], run(last, lengths, starts)[0])
    capacity = table.shape[1] * k.shape[1]
    most = torch.tensor([capacity, 48], dtype=torch.int32, device=device)
    assert torch.equal(run(last, most + 9, starts)[0][:9], run(last, most, starts)[0][:9])
    found, lse = run(table, lengths - 99, starts)
    assert (found == 0).all()
    assert (lse == -INF).all()
    for numbers in ([3, 12, -4], [50, 60, 70], [5, 9, 15]):
        found, lse = run(table, lengths, torch.tensor(numbers, dtype=torch.int32, device=device))
        assert torch.isfinite(found).all()
        assert (found[:3] == 0).all()
    assert (found[15:] == 0).all()
    assert (lse[:, 15:] == -INF).all()
    assert torch.isfinite(out).all()


def test_no_keys_no_pages_no_queries(device):
    q, k, v, table, lengths, starts = make(device, [3, 2], [16, 16])
    sinks = torch.randn(4, device=device)
    for pages, rows in ((k[:0], table), (k, table[:, :0])):
        out, lse = attention_paged_op(
            q, pages, pages, rows, lengths, starts, None, None, None, sinks, 0, None, 0.0, -1, 0, "bthd", ""
        )
        assert (out == 0).all()
        torch.testing.assert_close(lse, sinks[:, None].expand(4, 5))
    assert attention_paged(q[:0], k, v, table, lengths, [0, 0, 0]).shape == (0, 4, 32)
    assert attention_paged(q[:0], k, v, table[:0], lengths[:0], [0]).shape == (0, 4, 32)


def test_indices_on_the_cpu_that_are_wrong(device):
    q, k, v, table, lengths, starts = make(device, [9, 11], [30, 48])
    table, lengths = table.cpu(), lengths.cpu()
    with pytest.raises(ValueError, match=r"attention_paged: lengths\[1\] is 148, expected at most 64"):
        attention_paged(q, k, v, table, lengths + 100, starts)
    with pytest.raises(ValueError, match=r"attention_paged: page_table\[0, 0\] is -1, expected 0 to 7"):
        attention_paged(q, k, v, table * 0 - 1, lengths, starts)
    with pytest.raises(ValueError, match="cu_seqlens_q ends with 19, expected 20"):
        attention_paged(q, k, v, table, lengths, [0, 9, 19])
    with pytest.raises(ValueError, match="max_seqlen_q is 10, expected 11 at least"):
        attention_paged(q, k, v, table, lengths, [0, 9, 20], max_seqlen_q=10)


def test_what_is_refused(device):
    q, k, v, table, lengths, starts = make(device, [9, 11], [30, 48])
    good = {"q": q, "k_cache": k, "v_cache": v, "page_table": table, "lengths": lengths, "cu_seqlens_q": starts}
    ints = {"k_cache": k.to(torch.int8), "v_cache": v.to(torch.int8)}
    values = {
        r"q has shape \(1, 20, 4, 32\), expected 3 dimensions": {"q": q[None]},
        r"k_cache has shape .*, expected 4 dimensions \(pages, page_size, Hkv, D\)": {"k_cache": k[0]},
        "q and k_cache have last dimensions of 16 and 32, expected the same": {"q": q[..., :16]},
        r"v_cache has shape .*, expected \(8, 16, 2, 1 to 256\)": {"v_cache": v[:-1]},
        "q has 3 heads, expected a multiple of k_cache's 2": {"q": q[:, :3]},
        r"lengths has shape \(1,\), expected \(2,\)": {"lengths": lengths[:1]},
        r"page_table has shape \(1, .*\), expected \(2, pages of a sequence\)": {"page_table": table[:1]},
        "k_cache has pages of 8 tokens": {"k_cache": k[:, :8], "v_cache": v[:, :8]},
        "k_scale is None, expected scales for an int8 cache": ints,
        r"sinks has shape \(2,\), expected \(4,\)": {"sinks": torch.zeros(2, device=device)},
        "cache_layout is 'thd'": {"cache_layout": "thd"},
        "config can't be launched: kernel": {"config": AttentionConfig("hopper", 128, 128, 8, 4)},
        "q requires grad, but attention_paged has no derivative": {"q": q.clone().requires_grad_()},
    }  # fmt: skip
    for message, changed in values.items():
        with pytest.raises(ValueError, match=f"attention_paged: {message}"):
            attention_paged(**{**good, **changed})
    types = {
        "k_cache has dtype torch.bfloat16, expected torch.float32 to match q": {"k_cache": k.to(BF16)},
        "v_cache has dtype torch.float8_e4m3fn, expected torch.float32 to match k_cache": {"v_cache": v.to(FP8)},
        "lengths has dtype torch.int64, expected torch.int32": {"lengths": lengths.long()},
        "page_table has dtype torch.int64, expected int32": {"page_table": table.long()},
        "cu_seqlens_q has dtype torch.int64, expected torch.int32": {"cu_seqlens_q": starts.long()},
        "k_scale has dtype torch.float64, expected float32": {"k_scale": torch.ones((), device=device).double()},
        "page_table is None, expected a tensor": {"page_table": None},
        "config is a str, expected rooftile.AttentionConfig, 'invariant' or None": {"config": "hopper"},
    }
    for message, changed in types.items():
        with pytest.raises(TypeError, match=f"attention_paged: {message}"):
            attention_paged(**{**good, **changed})


def test_a_page_of_a_large_cache_is_found_beyond_2_to_the_31(device):
    """The pages are 2^30 + 64 elements apart: an int32 offset of the last one would be negative."""
    q, k, v, table, lengths, starts = make(device, [5], [40], heads=(2, 1), dims=(16, 16), spare=1)
    wanted = attention_paged(q, k, v, table, lengths, starts)
    step = 2**30 + 64
    try:
        memory = torch.UntypedStorage(4 * (4 * step), device=device)
        far = torch.empty(0, dtype=torch.float32, device=device).set_(memory, 0, k.shape, (step, *k.stride()[1:]))
        far.copy_(k)
    except RuntimeError as error:
        pytest.skip(f"this machine does not map 16 GiB of unused memory: {error}")
    assert torch.equal(attention_paged(q, far, v, table, lengths, starts), wanted)


@pytest.mark.parametrize(("arch", "kernel"), [("sm_90", "hopper"), ("sm_80", "portable")])
def test_a_long_prompt_has_large_tiles(arch, kernel):
    def on_meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, cache = on_meta(4096, 32, 128), on_meta(64, 64, 8, 128)
    table, lengths, starts = (on_meta(*shape, dtype=torch.int32) for shape in ((1, 64), (1,), (2,)))
    a = paged._Arguments(q, cache, cache, table, lengths, starts, *(None,) * 4, 0, None, 0.0, -1, 0, "bthd")
    c = choose_forward(a.problem(Scoring(128**-0.5, right=0)), runtime.TARGETS[arch])
    assert (c.kernel, c.block_m) == (kernel, 128)
