"""decode_attention with a mask: which keys of the cache are seen, beside lengths, position and window."""

import pytest
import torch
from test_decode_attention import (
    BF16,
    CONFIGS,
    SHARES,
    assert_right,
    decode_attention,
    every_config,
    expected,
    make,
    paged,
)

from rooftile.cases.check import relative_error
from rooftile.ops.attention import attention


def drawn(device, batch, keys, share=0.6):
    return (torch.rand(batch, keys, generator=torch.Generator().manual_seed(1)) < share).to(device)


@every_config
def test_random_masks_and_one_that_hides_all(config, device):
    """Whole parts are hidden as well, the first and the last; a sequence of which nothing is seen is zeros."""
    inputs = make(device, [100, 100, 33, 100], tokens=3)
    mask = drawn(device, 4, 100)
    mask[0, :48] = mask[1, 20:] = mask[3] = False
    out, lse = decode_attention(*inputs, mask=mask, return_lse=True, config=config)
    assert_right((out, lse), expected(*inputs, mask=mask))
    assert (out[3] == 0).all()
    assert (lse[3] == float("-inf")).all()


@every_config
def test_with_everything_else(config, device):
    inputs = make(device, [100, 7, 64], tokens=2)
    options = {"softcap": 3.0, "scale": 0.5, "window": 40, "mask": drawn(device, 3, 100)}
    options |= {name: torch.randn(4, device=device).abs() for name in ("sinks", "alibi_slopes")}
    options["mask"][2] = False
    results = decode_attention(*inputs, **options, return_lse=True, config=config)
    assert_right(results, expected(*inputs, **options))
    torch.testing.assert_close(results[1][2], options["sinks"][:, None].expand(-1, 2))  # no key but the sink


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_hides_nothing_changes_no_bit(config, device):
    inputs = make(device, [100, 40], tokens=2)
    plain = decode_attention(*inputs, config=config)
    assert torch.equal(decode_attention(*inputs, mask=drawn(device, 2, 100, 2.0), config=config), plain)


def test_padding_on_the_left_is_a_shorter_sequence(device):
    q, k, v, lengths = make(device, [90, 90])
    mask = torch.ones(2, 90, dtype=torch.bool, device=device)
    mask[1, :37] = False
    found = decode_attention(q, k, v, lengths, mask=mask)
    alone = decode_attention(q[1:], k[1:, 37:], v[1:, 37:], lengths[1:] - 37)
    assert relative_error(found[1:], alone.double()) < 3e-6


def test_as_attention_has_it(device):
    """The step of a static cache: keys behind the last that is there are hidden, in two dimensions or in four."""
    q, k, v, lengths = make(device, [70, 70], heads=(6, 2), dims=(32, 24))
    mask = torch.arange(70, device=device) < torch.tensor([[41], [70]], device=device)
    wanted = attention(q, k, v, mask=mask[:, None, None], layout="bthd")
    found = decode_attention(q, k, v, lengths, mask=mask)
    assert relative_error(found, wanted.double()) < 3e-6


@pytest.mark.parametrize("page", [16, 64])
def test_pages(page, device):
    """A key is masked by its place in the sequence, wherever its page lies."""
    q, k, v, lengths = make(device, [100, 33], tokens=2)
    per = -(-100 // page)
    order = torch.randperm(2 * per, device=device)
    pages = [paged(t, page, order, 2 * per) for t in (k, v)]
    table = order.to(torch.int32).view(2, per)
    mask = drawn(device, 2, per * page)
    results = decode_attention(q, *pages, lengths, page_table=table, mask=mask, return_lse=True, config=SHARES)
    assert_right(results, expected(q, k, v, lengths, mask=mask[:, :100]))


def test_any_strides_and_bytes_around_it_that_are_not_looked_at(device):
    """One row for all sequences, every other byte, a base at an odd byte."""
    inputs = make(device, [50, 50], capacity=50)
    wide = drawn(device, 2, 120)
    for mask in (wide[:1, :50].expand(2, -1), wide[:, 1:101:2], wide[:, 3:53], wide.flatten()[:100].view(50, 2).T):
        found = decode_attention(*inputs, mask=mask, return_lse=True, config=SHARES)
        assert_right(found, expected(*inputs, mask=mask))


def test_keys_that_are_hidden_may_be_anything_and_their_values_any_number(device):
    inputs = make(device, [60, 60])
    mask = drawn(device, 2, 60)
    wanted = expected(*inputs, mask=mask)
    inputs[1][~mask], inputs[2][~mask] = float("nan"), 1e30
    assert_right(decode_attention(*inputs, mask=mask, return_lse=True, config=SHARES), wanted)


def test_refused(device):
    q, k, v, lengths = make(device, [20, 33])
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    good = torch.ones(2, 33, dtype=torch.bool, device=device)
    for mask in (good[0], good[:1], good[:, :32], good[:, None]):
        with pytest.raises(ValueError, match=r"decode_attention: mask has shape .*, expected \(2, 33\)"):
            decode_attention(q, k, v, lengths, mask=mask)
    pages = [t[:, :16] for t in (k, v)]
    with pytest.raises(ValueError, match=r"mask has shape \(2, 33\), expected \(2, 48\)"):
        decode_attention(q, *pages, lengths.clamp(max=16), page_table=table, mask=good)
    with pytest.raises(TypeError, match=r"decode_attention: mask has dtype torch.float32, expected bool"):
        decode_attention(q, k, v, lengths, mask=good.float())


@pytest.mark.gpu
@every_config
def test_a_graph_replayed_with_other_masks(config, device):
    q, k, v, lengths = make(device, [300, 300], dtype=BF16)
    mask = drawn(device, 2, 300)
    decode_attention(q, k, v, lengths, mask=mask, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, lengths, mask=mask, config=config)
    for share in (0.1, 0.9, 0.0):
        mask.copy_(torch.rand(2, 300) < share)
        graph.replay()
        assert relative_error(out, expected(q, k, v, lengths, mask=mask)[0]) < 6e-3
