"""append_kv and rope_and_cache: places, what is not written, errors."""

import functools

import pytest
import torch
from helpers import BF16

from rooftile.engine import PagedKVCache
from rooftile.ops import kv_cache as ops
from rooftile.ops.attention import attention_paged
from rooftile.ops.decode_attention import decode_attention
from rooftile.ops.kv_cache.kernel import prepare_append
from rooftile.ops.rope import rope
from rooftile.primitives.paging import Cache

append_kv = functools.partial(ops.append_kv, layout="bthd")
rope_and_cache = functools.partial(ops.rope_and_cache, layout="bthd")


def fresh(shape, device, dtype=torch.float32):
    """Memory that shows what was written."""
    return torch.full(shape, -7, dtype=dtype, device=device)


def drawn(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device).to(dtype)


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_each_token_at_its_position_and_nothing_else_is_written(layout, device):
    k, v = drawn(2, 3, 2, 8, device=device), drawn(2, 3, 2, 4, device=device)
    k_cache, v_cache = fresh((2, 10, 2, 8), device), fresh((2, 10, 2, 4), device)
    laid = [x.transpose(1, 2) if layout == "bhtd" else x for x in (k, v, k_cache, v_cache)]
    append_kv(*laid, ints([7, 2], device), layout=layout, cache_layout=layout)
    for x, cache in ((k, k_cache), (v, v_cache)):
        expected = fresh(cache.shape, device)
        expected[0, 7:10], expected[1, 2:5] = x[0], x[1]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("cache_layout", ["bthd", "bhtd"])
def test_layout_is_that_of_the_new_tokens(cache_layout, device):
    """By default heads before tokens, as in `attention`, with caches of either layout."""
    q, k = drawn(2, 3, 4, 8, device=device), drawn(2, 3, 2, 8, device=device)
    table, starts = drawn(10, 8, device=device), ints([7, 2], device)
    expected = [fresh((2, 10, 2, 8), device) for _ in range(2)]
    wanted = rope_and_cache(q, k, k, table, table, *expected, starts)
    shape = (2, 10, 2, 8) if cache_layout == "bthd" else (2, 2, 10, 8)
    caches = [fresh(shape, device) for _ in range(2)]
    heads_first = [x.transpose(1, 2) for x in (q, k, k)]
    turned = ops.rope_and_cache(*heads_first, table, table, *caches, starts, cache_layout=cache_layout)
    assert torch.equal(turned.transpose(1, 2), wanted)
    appended = [fresh(shape, device) for _ in range(2)]
    ops.append_kv(*heads_first[1:], *appended, starts, cache_layout=cache_layout)
    for cache, other in ((caches[0], expected[0]), (caches[1], expected[1]), (appended[1], expected[1])):
        assert torch.equal(cache if cache_layout == "bthd" else cache.transpose(1, 2), other)


def test_pages_in_any_order(device):
    k = drawn(1, 40, 1, 8, device=device, dtype=BF16)
    k_cache, v_cache = fresh((4, 16, 1, 8), device, BF16), fresh((4, 16, 1, 8), device, BF16)
    append_kv(k, k, k_cache, v_cache, ints([5], device), page_table=ints([[2, 0, 3]], device))
    assert torch.equal(k_cache[[2, 0, 3]].flatten(0, 1)[5:45], k[0])
    assert (k_cache[1] == -7).all()
    assert (k_cache[2, :5] == -7).all()
    assert torch.equal(k_cache, v_cache)


def test_counts_and_negative_starts_leave_tokens_out(device):
    q, k = drawn(3, 4, 2, 8, device=device), drawn(3, 4, 1, 8, device=device)
    k_cache, v_cache = fresh((3, 8, 1, 8), device), fresh((3, 8, 1, 8), device)
    cos, sin = torch.ones(8, 8, device=device), torch.zeros(8, 8, device=device)
    given = {"counts": ints([4, 0, 2], device)}
    turned = rope_and_cache(q, k, k, cos, sin, k_cache, v_cache, ints([-1, 3, 1], device), **given)
    expected = fresh((3, 8, 1, 8), device)
    expected[2, 1:3] = k[2, :2]
    assert torch.equal(k_cache, expected)
    assert torch.equal(v_cache, expected)
    assert torch.equal(turned[2, :2], q[2, :2])
    assert not turned[:2].any()
    assert not turned[2, 2:].any()


def test_what_leads_out_of_the_cache_is_left_out_on_the_device(device):
    """As the kernel sees it, which can't raise: here without the look that is taken at what is on the CPU."""
    k = drawn(3, 4, 1, 8, device=device)
    memory = fresh((6, 16, 1, 8), device)
    k_cache, v_cache = memory[1:3], fresh((2, 16, 1, 8), device)
    table = ints([[1, 7], [-1, 0], [0, 1]], device)
    starts = ints([14, 14, 30], device)
    cache = Cache(k_cache, v_cache, starts, table, None, None, None, "", "bthd")
    prepare_append(k, k, "bthd", cache)(k, k, *cache.tensors(), *cache.indices())
    expected = fresh((2, 16, 1, 8), device)
    expected[1, 14:] = k[0, :2]
    expected[0, :2] = k[1, 2:]
    expected[1, 14:] = k[2, :2]  # the same places: two sequences were given one page
    for written in (k_cache, v_cache):
        assert torch.equal(written[0], expected[0])
        assert torch.equal(written[1, :14], expected[1, :14])
        assert all(any(torch.equal(row, k[b, t]) for b in (0, 2) for t in (0, 1)) for row in written[1, 14:])
    assert (memory[0] == -7).all()
    assert (memory[3:] == -7).all()


@pytest.mark.parametrize("style", ["half", "interleaved", "deepseek"])
def test_the_rotation_is_ropes(style, device):
    q, k = drawn(2, 3, 4, 16, device=device), drawn(2, 3, 2, 16, device=device)
    angle = drawn(20, 6, device=device)
    angle = angle.repeat_interleave(2, -1) if style == "interleaved" else angle.repeat(1, 2)
    cos, sin, starts = angle.cos(), angle.sin(), ints([4, 9], device)
    k_cache, v_cache = fresh((2, 12, 2, 16), device), fresh((2, 12, 2, 16), device)
    turned = rope_and_cache(q, k, k, cos, sin, k_cache, v_cache, starts, rotary_dim=12, style=style)
    ids = starts[:, None].long() + torch.arange(3, device=device)
    expected = rope(q, k, cos, sin, position_ids=ids, rotary_dim=12, style=style, layout="bthd")
    assert torch.equal(turned, expected[0])
    assert torch.equal(k_cache[0, 4:7], expected[1][0])
    assert torch.equal(k_cache[1, 9:], expected[1][1])
    caches = fresh((2, 12, 2, 16), device), fresh((2, 12, 2, 16), device)
    by_token = rope_and_cache(q, k, k, cos[ids], sin[ids], *caches, starts, rotary_dim=12, style=style)
    assert torch.equal(by_token, turned)
    assert torch.equal(caches[0], k_cache)
    assert torch.equal(caches[1], v_cache)


def test_a_position_outside_the_table_is_nan(device):
    q = drawn(1, 3, 1, 8, device=device)
    cache = fresh((1, 8, 1, 8), device)
    table = torch.ones(5, 8, device=device)
    turned = rope_and_cache(q, q, q, table, table, cache, cache.clone(), ints([3], device))
    assert torch.isfinite(turned[0, :2]).all()
    assert turned[0, 2].isnan().all()


def test_errors_before_anything_is_written(device):
    k = drawn(2, 3, 2, 8, device=device)
    cache, starts = fresh((2, 10, 2, 8), device), ints([0, 0], device)
    paged, table = fresh((4, 16, 2, 8), device), ints([[0, 1], [2, 3]], device)
    eight = fresh((2, 10, 2, 8), device, torch.int8)
    one, by_token = torch.ones((), device=device), torch.ones((2, 10, 2), device=device)
    wrong = [
        ((k[0], k, cache, cache, starts), {}, ValueError, r"k has shape \(3, 2, 8\), expected 4 dimensions, bthd"),
        ((k, k[:, :2], cache, cache, starts), {}, ValueError, r"v has shape .*, expected \(2, 3, 2, value_dim\)"),
        ((k, k.half(), cache, cache, starts), {}, TypeError, "v has dtype torch.float16, expected torch.float32"),
        ((k, k, cache[:1], cache, starts), {}, ValueError, r"k_cache has shape .*, expected \(2, max_seq_len, 2, 8\)"),
        ((k, k, cache, cache[:, :9], starts), {}, ValueError, r"v_cache has shape .*, expected \(2, 10, 2, 8\)"),
        ((k, k, cache.half(), cache, starts), {}, TypeError, "k_cache has dtype torch.float16, expected"),
        ((k, k, eight, cache, starts), {}, TypeError, "v_cache has dtype torch.float32, expected torch.int8"),
        ((k, k, cache, cache, starts[:1]), {}, ValueError, r"starts has shape \(1,\), expected \(2,\)"),
        ((k, k, cache, cache, starts.float()), {}, TypeError, "starts has dtype torch.float32, expected int32"),
        ((k, k, cache, cache, starts), {"counts": starts[:1]}, ValueError, r"counts has shape \(1,\)"),
        # One dtype for all ops of a cache.
        ((k, k, cache, cache, starts.long()), {}, TypeError, "starts has dtype torch.int64, expected int32"),
        ((k, k, cache, cache, starts), {"counts": starts.long()}, TypeError, "counts has dtype torch.int64, expected"),
        ((k, k, cache, cache, starts), {"layout": "thd"}, ValueError, "layout is 'thd', expected one of bhtd, bthd"),
        ((k, k, cache, cache, starts), {"cache_layout": "thd"}, ValueError, "cache_layout is 'thd', expected one of"),
        ((k, k, cache, cache, starts), {"k_scale": one, "v_scale": one}, ValueError, "k_scale is given for a cache"),
        ((k, k, eight, eight, starts), {}, ValueError, "the cache is int8 and has no scales"),
        ((k, k, eight, eight, starts), {"k_scale": one}, ValueError, "k_scale and v_scale are of two kinds"),
        ((k, k, eight, eight, starts), {"k_scale": one.double()}, TypeError, "k_scale has dtype torch.float64"),
        ((k, k, eight, eight, starts), {"k_scale": one.expand(3)}, ValueError, r"k_scale has shape \(3,\), expected"),
        ((k, k, paged, paged, starts), {"page_table": table[:1]}, ValueError, r"page_table has shape \(1, 2\)"),
        ((k, k, paged[:, :9], paged[:, :9], starts), {"page_table": table}, ValueError, "k_cache has pages of 9"),
        (
            (k, k, cache.expand(2, 10, 2, 8).mT.contiguous().mT, cache, starts),
            {},
            ValueError,
            "k_cache has a last stride of",
        ),
        ((k, k, cache[:1].expand(2, -1, -1, -1), cache, starts), {}, ValueError, "k_cache is expanded"),
        ((k, k, cache, cache, starts), {}, ValueError, "v_cache is the same memory as k_cache"),
        (
            (k, k, eight, eight.clone(), starts),
            {"k_scale": by_token, "v_scale": by_token},
            ValueError,
            "v_scale is the same memory as k_scale",
        ),
    ]
    for args, options, kind, message in wrong:
        with pytest.raises(kind, match=f"append_kv: {message}"):
            append_kv(*args, **options)
    with pytest.raises(ValueError, match=r"append_kv: k requires grad, but append_kv has no derivative"):
        append_kv(k.clone().requires_grad_(), k, cache, cache.clone(), starts)
    with pytest.raises(ValueError, match=r"rope_and_cache: q has shape .*, expected \(2, 3, q_heads, 8\) to match k"):
        rope_and_cache(k[:1], k, k, k[0, :, 0], k[0, :, 0], cache, cache.clone(), starts)
    with pytest.raises(ValueError, match=r"rope_and_cache: cos has shape \(3, 3, 8\), expected \(positions, R\), or"):
        rope_and_cache(k, k, k, *[k[:1, :, 0].expand(3, 3, 8)] * 2, cache, cache.clone(), starts)
    assert all((memory == -7).all() for memory in (cache, paged, eight))


@pytest.mark.parametrize(
    ("starts", "options", "message"),
    [
        ([8, 0], {}, r"starts\[0\] is 8, and 3 new tokens go beyond the cache's 10 positions"),
        ([0, 10], {"counts": [3, 1]}, r"starts\[1\] is 10, and 1 new tokens go beyond"),
        ([0, 0], {"counts": [3, 4]}, r"counts\[1\] is 4, expected at most the 3 tokens of k"),
        ([14, 0], {"page_table": [[0, 4], [2, 3]]}, r"page_table\[0, 1\] is 4, expected one of the 4 pages"),
        ([14, 0], {"page_table": [[0, 1], [-1, 3]]}, r"page_table\[1, 0\] is -1, expected one of the 4 pages"),
        (
            [31, 0],
            {"page_table": [[0, 1], [2, 3]]},
            r"starts\[0\] is 31, and 3 new .* beyond the cache's 32",
        ),
    ],
)
def test_starts_and_pages_on_the_cpu_are_looked_at(starts, options, message, device):
    k = drawn(2, 3, 2, 8, device=device)
    shape = (4, 16, 2, 8) if "page_table" in options else (2, 10, 2, 8)
    caches = fresh(shape, device), fresh(shape, device)
    options = {name: ints(value, "cpu") for name, value in options.items()}
    with pytest.raises(ValueError, match=f"append_kv: {message}"):
        append_kv(k, k, *caches, ints(starts, "cpu"), **options)
    assert all((cache == -7).all() for cache in caches)


def test_pages_of_512_in_every_op(device):
    """A write across a page's end; what both readers find is what a contiguous cache gives."""
    starts, new = ints([505, 30], device), 14
    k, v = drawn(2, 600, 2, 16, device=device), drawn(2, 600, 2, 16, device=device)
    q, table = drawn(2, new, 4, 16, device=device), ints([[3, 0], [2, 1]], device)
    pages = [torch.full((4, 512, 2, 16), torch.nan, device=device) for _ in "kv"]
    append_kv(k[:, :505], v[:, :505], *pages, ints([0, 0], device), page_table=table, counts=starts)
    caches = [x.clone() for x in (k, v)]
    at = starts[:, None].long() + torch.arange(new, device=device)
    for x, cache in zip((k, v), caches, strict=True):
        cache[torch.arange(2, device=device)[:, None], at] = x[:, -new:]
    append_kv(k[:, -new:], v[:, -new:], *pages, starts, page_table=table)
    lengths = starts + new
    expected = decode_attention(q, *caches, lengths, layout="bthd")
    found = decode_attention(q, *pages, lengths, page_table=table, layout="bthd")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found = attention_paged(q.flatten(0, 1), *pages, table, lengths, [0, new, 2 * new])
    torch.testing.assert_close(found, expected.flatten(0, 1), rtol=1e-5, atol=1e-5)
    cache = PagedKVCache(1, 512, 2, 16, max_sequences=1, dtype=torch.float32, device=device)
    assert cache.page_size == 512


class TestCacheBatchIdx:
    """A contiguous cache of more entries than the batch has sequences, in another order."""

    @pytest.mark.parametrize("cache_layout", ["bthd", "bhtd"])
    def test_writes_and_reads_are_those_of_the_entries_alone(self, cache_layout, device):
        k, v = drawn(3, 2, 2, 16, device=device), drawn(3, 2, 2, 8, device=device)
        q, table = drawn(3, 2, 4, 16, device=device), drawn(40, 16, device=device)
        starts, entries = ints([7, 30, 12], device), ints([4, 0, 3], device)
        shapes = [(6, 40, 2, d) if cache_layout == "bthd" else (6, 2, 40, d) for d in (16, 8)]
        caches = [drawn(*shape, device=device) for shape in shapes]
        alone = [cache[entries.long()] for cache in caches]
        expected = [cache.clone() for cache in caches]
        given = {"cache_layout": cache_layout}
        turned = rope_and_cache(q, k, v, table, table, *alone, starts, **given)
        again = rope_and_cache(q, k, v, table, table, *caches, starts, cache_batch_idx=entries, **given)
        assert torch.equal(again, turned)
        append_kv(k, v, *alone, starts + 4, **given)
        append_kv(k, v, *caches, starts + 4, cache_batch_idx=entries, **given)
        for cache, own, before in zip(caches, alone, expected, strict=True):
            before[entries.long()] = own
            assert torch.equal(cache, before)
        lengths, shared = starts + 6, ints([3, 3, 4], device)
        for at in (entries, shared, shared.repeat_interleave(2)[::2]):
            wanted = decode_attention(q, *(t[at.long()] for t in caches), lengths, layout="bthd", **given)
            found = decode_attention(q, *caches, lengths, cache_batch_idx=at, layout="bthd", **given)
            assert torch.equal(found, wanted)

    def test_scales_and_bytes_of_the_entries(self, device):
        k = drawn(2, 1, 2, 32, device=device)
        caches = [torch.zeros(4, 20, 2, 32, dtype=torch.int8, device=device) for _ in "kv"]
        scales = [torch.ones(4, 20, 2, device=device) for _ in "kv"]
        given = {"k_scale": scales[0], "v_scale": scales[1], "cache_batch_idx": ints([3, 1], device)}
        for at in range(3):
            append_kv(k * (at + 1), k, *caches, ints([at, at], device), **given)
        own = [t[[3, 1]] for t in (*caches, *scales)]
        assert all(not t[[0, 2]].any() for t in caches)
        lengths = ints([3, 2], device)
        wanted = decode_attention(k, *own[:2], lengths, k_scale=own[2], v_scale=own[3], layout="bthd")
        assert torch.equal(decode_attention(k, *caches, lengths, layout="bthd", **given), wanted)

    def test_entries_outside_are_refused_or_left_out(self, device):
        q, cache = drawn(2, 1, 2, 16, device=device), fresh((3, 8, 2, 16), device)
        caches, starts = (cache, cache.clone()), ints([1, 2], device)
        two = "cache_batch_idx and page_table are given"
        wrong = [
            ({"cache_batch_idx": ints([0], device)}, ValueError, r"cache_batch_idx has shape \(1,\), expected \(2,\)"),
            ({"cache_batch_idx": ints([[0, 1]], device)}, ValueError, r"cache_batch_idx has shape \(1, 2\), expected"),
            ({"cache_batch_idx": ints([0, 1], device).long()}, TypeError, "cache_batch_idx has dtype torch.int64"),
            ({"cache_batch_idx": [0, 1]}, TypeError, "cache_batch_idx is a list, expected a tensor"),
            ({"cache_batch_idx": ints([0, 1], device), "page_table": ints([[0], [1]], device)}, ValueError, two),
            (
                {"page_table": ints([0, 1], device)},
                ValueError,
                r"page_table has shape \(2,\), expected \(2, max_pages\)",
            ),
        ]
        if device.type == "cpu":
            outside = r"cache_batch_idx\[1\] is 3, expected 0 to 2, a sequence of k_cache"
            wrong.append(({"cache_batch_idx": ints([0, 3], device)}, ValueError, outside))
        for options, error, message in wrong:
            with pytest.raises(error, match=f"append_kv: {message}"):
                append_kv(q, q, *caches, starts, **options)
            with pytest.raises(error, match=f"decode_attention: {message}"):
                decode_attention(q, *caches, starts, layout="bthd", **options)

    def test_the_kernel_writes_to_no_entry_that_there_is_not(self, device):
        """Past the checks of the host, which a GPU's tensors do not have."""
        k = drawn(3, 2, 2, 8, device=device)
        memory = fresh((5, 16, 2, 8), device)
        cache = Cache(
            memory[1:4], memory[1:4].clone(), ints([0] * 3, device), ints([-1, 3, 1], device), *[None] * 3, "", "bthd"
        )
        prepare_append(k, k, "bthd", cache)(k, k, *cache.tensors(), *cache.indices())
        assert torch.equal(memory[2, :2], k[2])
        assert (memory[[0, 1, 3, 4]] == -7).all()
