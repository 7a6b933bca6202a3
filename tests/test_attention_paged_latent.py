"""attention_paged over a latent cache: values that are the first columns of the keys."""

import pytest
import torch
from test_attention_paged import BF16, CONFIG, FP8, gathered, make

from rooftile.cases.check import relative_error
from rooftile.ops.attention import AttentionConfig, attention_paged
from rooftile.ops.attention.paged import attention_paged_op
from rooftile.ops.decode_attention import decode_attention
from rooftile.reference import decode_attention as reference


def latent(device, n_q, lengths, *, heads=4, kv_heads=1, dims=(48, 32), **options):
    """q, the keys, None and the indices; NaN wherever no key is, and beside the keys."""
    q, k, _, *indices = make(device, n_q, lengths, heads=(heads, kv_heads), dims=(dims[0], dims[0]), **options)
    wide = torch.full((*k.shape[:3], 2 * dims[0]), float("nan"), dtype=k.dtype, device=device)
    wide[..., : dims[0]] = k
    return q, wide[..., : dims[0]], None, *indices


def expected(q, k, _, table, lengths, starts, head_dim_v, scale=None, **options):
    """Sequence by sequence, in float64."""
    outs, lses = [], []
    for b in range(lengths.shape[0]):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        keys = gathered(k, table, lengths, b)[None].double()
        given = {"head_dim_v": head_dim_v, "scale": scale, "return_lse": True, "layout": "bthd", **options}
        out, lse = reference.decode_attention(q[None, rows].double(), keys, None, lengths[b : b + 1], **given)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def assert_right(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


N_Q, LENGTHS = [0, 1, 17, 100, 3, 20], [33, 64, 70, 100, 2, 0]


@pytest.mark.each_once
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("config", [None, CONFIG, "invariant"], ids=str)
def test_sequences_of_any_lengths_in_shuffled_pages_among_nan(page, config, device):
    """No queries, one, and many; fewer keys than queries, and none."""
    inputs = latent(device, N_Q, LENGTHS, page=page)
    results = attention_paged(*inputs, head_dim_v=32, return_lse=True, config=config)
    assert_right(results, expected(*inputs, 32))
    assert (results[0][-20:] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 9},
        {"causal": False},
        {"scale": 0.3, "softcap": 2.0},
        {"sinks": [0.5, -1.0, 0.0, 3.0]},
        {"alibi_slopes": [0.5, 0.1, 0.0, 0.3]},
    ],
    ids=str,
)
def test_options(options, device):
    inputs = latent(device, [7, 0, 20], [70, 33, 21])
    options = {name: torch.tensor(x, device=device) if isinstance(x, list) else x for name, x in options.items()}
    assert_right(
        attention_paged(*inputs, head_dim_v=32, return_lse=True, config=CONFIG, **options),
        expected(*inputs, 32, **options),
    )


@pytest.mark.parametrize(
    ("dims", "heads"), [((40, 32), 2), ((48, 40), 2), ((32, 32), 2), ((48, 7), 2), ((300, 256), 2), ((576, 512), 3)]
)
def test_head_dims(dims, heads, device):
    """Values that end within the first block of columns, with it, in the second, and with the key."""
    inputs = latent(device, [5, 1], [40, 9], heads=heads, dims=dims)
    assert_right(attention_paged(*inputs, head_dim_v=dims[1], return_lse=True), expected(*inputs, dims[1]))


@pytest.mark.parametrize("cache", [FP8, torch.int8])
@pytest.mark.parametrize("by", ["tensor", "token"])
def test_eight_bits(cache, by, device):
    """One scale holds for a token's key and its value."""
    q, k, _, *indices = latent(device, [7, 20], [70, 33])
    narrow = (k.nan_to_num() * 30).clamp(-127, 127).to(cache)
    scale = torch.rand(() if by == "tensor" else k.shape[:3], device=device) * 0.02 + 0.01
    found = attention_paged(q, narrow, None, *indices, head_dim_v=32, k_scale=scale, return_lse=True, config=CONFIG)
    wide = narrow.double() * (scale if by == "tensor" else scale[..., None])
    assert_right(found, expected(q, wide, None, *indices, 32))


def test_it_is_a_cache_of_values_that_are_the_first_columns_of_keys(device):
    q, k, _, *indices = latent(device, [7, 1, 20], [70, 33, 21], dtype=BF16)
    out = attention_paged(q, k, None, *indices, head_dim_v=32, config=CONFIG)
    assert torch.equal(out, attention_paged(q, k, k[..., :32], *indices, config=CONFIG))
    assert torch.equal(out, attention_paged(q, k, k[..., :32], *indices, head_dim_v=32, config=CONFIG))


def test_any_strides(device):
    q, k, _, *indices = latent(device, [7, 1], [70, 33], kv_heads=2)
    wanted = attention_paged(q, k, None, *indices, head_dim_v=32)
    assert_right([wanted], expected(q, k, None, *indices, 32)[:1])
    by_heads = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attention_paged(by_heads, k, None, *indices, head_dim_v=32), wanted)
    heads_first = k.transpose(1, 2).contiguous()
    last = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(attention_paged(q, heads_first, None, *indices, head_dim_v=32, cache_layout="bhtd"), wanted)
    assert torch.equal(attention_paged(q, last, None, *indices, head_dim_v=32), wanted)
    out = torch.full((2, *wanted.shape), float("nan"), device=device)
    attention_paged(q, k, None, *indices, head_dim_v=32, out=out[1])
    assert torch.equal(out[1], wanted)
    assert out[0].isnan().all()


def test_expanded_queries_and_caches(device):
    q, k, _, *indices = latent(device, [7, 1], [70, 33], kv_heads=2)
    q, k = q[:1].expand_as(q), k.nan_to_num()[:1].expand_as(k)
    found = attention_paged(q, k, None, *indices, head_dim_v=32)
    assert torch.equal(found, attention_paged(q.contiguous(), k.contiguous(), None, *indices, head_dim_v=32))


def test_one_token_of_each_sequence_is_what_decoding_computes(device):
    q, k, _, table, lengths, starts = latent(device, [1, 1, 1], [70, 33, 1])
    found = attention_paged(q, k, None, table, lengths, starts, head_dim_v=32, max_seqlen_q=1, return_lse=True)
    out, lse = decode_attention(q[:, :, None], k, None, lengths, page_table=table, head_dim_v=32, return_lse=True)
    torch.testing.assert_close(found, (out[:, :, 0], lse[..., 0].t()), rtol=1e-5, atol=1e-5)


def test_rows_that_no_sequence_covers_and_wrong_indices_on_the_device(device):
    q, k, _, table, lengths, _starts = latent(device, [9, 11], [30, 48])
    options = (None, None, None, None, 0, None, 0.0, -1, 0, "bthd", "", 32)
    for numbers in ([3, 12, -4], [50, 60, 70], [5, 9, 15]):
        wrong = torch.tensor(numbers, dtype=torch.int32, device=device)
        out, lse = attention_paged_op(q, k.nan_to_num(), None, table, lengths, wrong, *options)
        assert torch.isfinite(out).all()
        assert (out[:3] == 0).all()
    assert (out[15:] == 0).all()
    assert (lse[:, 15:] == -float("inf")).all()


def test_it_is_one_op_of_a_compiled_graph(device):
    inputs = latent(device, [9, 1], [30, 48])
    args = (*inputs, None, None, None, None, 9, None, 0.0, -1, 0, "bthd", "", 32)
    torch.library.opcheck(
        torch.ops.rooftile.attention_paged.default, args,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip

    def attend(q, k, table, lengths, starts):
        return attention_paged(q, k, None, table, lengths, starts, head_dim_v=32, max_seqlen_q=9, return_lse=True)

    q, k, _, *indices = inputs
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(q, k, *indices), attend(q, k, *indices), strict=True):
        assert torch.equal(one, other)


def test_what_is_refused(device):
    q, k, _, *indices = latent(device, [9, 11], [30, 48])
    v, scale = k[..., :32], torch.ones((), device=device)
    long_q, long_k = (torch.zeros(*t.shape[:-1], 577, device=device) for t in (q, k))
    for args, options, message in (
        ((q, k, None), {}, "head_dim_v is None without a v_cache, expected 1 to 48"),
        ((q, k, None), {"head_dim_v": 49}, "head_dim_v is 49 without a v_cache, expected 1 to 48"),
        ((q, k, None), {"head_dim_v": 0}, "head_dim_v is 0 without a v_cache"),
        ((q, k, v), {"head_dim_v": 16}, "head_dim_v is 16, expected None or v_cache's 32"),
        ((q, k, None), {"head_dim_v": 32, "v_scale": scale}, "v_scale is given without a v_cache, expected None"),
        ((long_q, long_k, None), {"head_dim_v": 512}, "last dimensions of 577 and 577, expected the same, 1 to 576"),
        ((long_q[..., :300], long_k[..., :300], v), {}, "last dimensions of 300 and 300, expected the same, 1 to 256"),
        ((q, k.to(torch.int8), None), {"head_dim_v": 32}, "k_scale is None, expected scales for an int8 cache"),
        (
            (q, k, None),
            {"head_dim_v": 32, "config": AttentionConfig("hopper", 64, 64, 8, 2)},
            "config can't be launched: kernel",
        ),
    ):
        with pytest.raises(ValueError, match=f"attention_paged: .*{message}"):
            attention_paged(*args, *indices, **options)
    with pytest.raises(TypeError, match="attention_paged: head_dim_v is a float, expected an int or None"):
        attention_paged(q, k, None, *indices, head_dim_v=32.0)


def test_16_bits_lose_what_rounding_costs(device):
    inputs = latent(device, [7, 1, 40], [70, 33, 40], dims=(576, 512), heads=2, dtype=BF16)
    out = attention_paged(*inputs, head_dim_v=512, scale=0.05)
    assert out.dtype == BF16
    assert relative_error(out, expected(*inputs, 512, scale=0.05)[0]) < 5e-3
