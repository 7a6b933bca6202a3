"""What is special to attention over packed sequences: each is alone, and what cu_seqlens may say."""

import pytest
import torch
from helpers import draw
from test_attention import drawn

from rooftile.cases.attention_varlen import CASES, LENGTHS
from rooftile.cases.case import Unsupported
from rooftile.ops.attention import attention, attention_varlen
from rooftile.ops.attention.ops import attention_varlen_op

INF = float("inf")
(VARLEN,) = CASES


def test_packed_sequences_are_alone(device):
    starts_q, starts_k = [0, 13, 13, 50, 51], [0, 20, 25, 62, 63]
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in drawn(device, h=4, kv=2, n_q=51, n_k=63, v=24))
    slopes = torch.rand(4, 4, device=device)
    for options in (
        {},
        {"causal": True},
        {"causal": True, "window": 9},
        {"sinks": torch.randn(4, device=device)},
        {"alibi_slopes": slopes},
    ):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = attention_varlen(*leaves, starts_q, starts_k, return_lse=True, **options)
        dout = torch.randn_like(out)
        grads = torch.autograd.grad(out, leaves, dout)
        for i in range(4):
            a, b = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
            own = [t.detach().requires_grad_() for t in (q[None, a], k[None, b], v[None, b])]
            numbers = options | ({"alibi_slopes": slopes[i]} if "alibi_slopes" in options else {})
            expected, own_lse = attention(*own, layout="bthd", return_lse=True, **numbers)
            torch.testing.assert_close(out[a], expected[0])
            torch.testing.assert_close(lse[:, a], own_lse[0])
            own_grads = torch.autograd.grad(expected, own, dout[None, a])
            for found, e, part in zip(grads, own_grads, (a, b, b), strict=True):
                torch.testing.assert_close(found[part], e[0], rtol=1e-4, atol=1e-5)


def test_starts_on_the_device_that_are_wrong_do_no_harm(device):
    """Nothing outside is read or written, and what no sequence covers is zeros."""
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in drawn(device, n_q=40))
    for numbers in ([3, 20, -4, 60, 15], [50, 60], [-9, -3], [5, 2, 30], [0]):
        starts = torch.tensor(numbers, dtype=torch.int32, device=device)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, _ = attention_varlen_op(*leaves, starts, None, None, None, 0, 0, None, 0.0, -1, 0, "", False)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert all(torch.isfinite(t).all() for t in (out, *grads))
    starts = torch.tensor([5, 20, 30], dtype=torch.int32, device=device)
    out, lse = attention_varlen_op(q, k, v, starts, None, None, None, 0, 0, None, 0.0, -1, 0, "", False)
    uncovered = [*range(5), *range(30, 40)]
    assert (out[uncovered] == 0).all()
    assert (lse[:, uncovered] == -INF).all()
    assert (out[5:30] != 0).any(-1).all()


def test_rows_past_a_longest_sequence_that_is_too_short_are_zeros(device):
    q, k, v = (t[0].transpose(0, 1).contiguous().requires_grad_() for t in drawn(device, n_q=300))
    starts = torch.tensor([0, 300], dtype=torch.int32, device=device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        out, lse = attention_varlen_op(q, k, v, starts, None, None, None, 20, 20, None, 0.0, -1, -1, "", False)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(before)
    assert (lse[:, 256:] == -INF).all()  # beyond any block that begins before 20
    for t in (out, *grads):
        assert torch.isfinite(t).all()
        assert (t[256:] == 0).all()


def test_a_list_of_starts_is_compiled_into_one_graph(device):
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in drawn(device, n_q=40))
    compiled = torch.compile(lambda *t: attention_varlen(*t, [0, 10, 40]), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), attention_varlen(q, k, v, [0, 10, 40]))


@pytest.mark.parametrize("where", ["list", "tensor"])
def test_starts_on_the_cpu_that_are_wrong(where, device):
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in drawn(device, n_q=40))
    wrong = {
        "cu_seqlens_q decreases from 20 to 10 at 2": [0, 20, 10, 40],
        "cu_seqlens_q ends with 41, expected 40": [0, 41],
        "cu_seqlens_q ends with 30, expected 40": [0, 30],
        r"cu_seqlens_q begins with \[1\], expected 0": [1, 40],
    }
    for message, numbers in wrong.items():
        starts = numbers if where == "list" else torch.tensor(numbers, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"attention_varlen: {message}"):
            attention_varlen(q, k, v, starts)
    with pytest.raises(ValueError, match="max_seqlen_q is 10, expected 30 at least"):
        attention_varlen(q, k, v, [0, 10, 40], max_seqlen_q=10)
    with pytest.raises(ValueError, match=r"cu_seqlens_k has shape \(3,\), expected \(2,\) to match cu_seqlens_q"):
        attention_varlen(q, k, v, [0, 40], [0, 10, 40])
    with pytest.raises(TypeError, match=r"cu_seqlens_q has dtype torch.int64, expected torch.int32"):
        attention_varlen(q, k, v, torch.tensor([0, 40], device=device))
    with pytest.raises(TypeError, match="cu_seqlens_q is an int, expected an int32 tensor or a list of ints"):
        attention_varlen(q, k, v, 40)
    with pytest.raises(TypeError, match="attention_varlen: return_lse is an int, expected a bool"):
        attention_varlen(q, k, v, [0, 40], return_lse=1)


def test_tensors_that_are_not_packed_are_named_before_their_tokens_are_counted(device):
    q, k, v = drawn(device, n_q=40)
    with pytest.raises(
        ValueError, match=r"attention_varlen: q has shape .*, expected 3 dimensions \(tokens, heads, head"
    ):
        attention_varlen(q, k, v, [0, 10, 40])
    with pytest.raises(ValueError, match=r"attention_varlen: k has shape .*, expected 3 dimensions"):
        attention_varlen(q[0].transpose(0, 1), k, v, [0, 10, 40])


def test_keys_that_are_not_packed_as_the_queries_need_starts_of_their_own(device):
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in drawn(device, n_q=40))
    with pytest.raises(ValueError, match="cu_seqlens_k is None and k has 30 tokens, expected 40, as many as q"):
        attention_varlen(q, k[:30], v[:30], [0, 10, 40])
    with pytest.raises(ValueError, match="max_seqlen_k is 10, expected 30 at least, the longest sequence of q"):
        attention_varlen(q, k, v, [0, 10, 40], max_seqlen_k=10)
    with pytest.raises(TypeError, match="max_seqlen_k is a str, expected an int or None"):
        attention_varlen(q, k, v, [0, 10, 40], max_seqlen_k="40")


def test_starts_of_any_stride_say_what_is_covered(device):
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in drawn(device, n_q=40))
    starts = torch.tensor([5, 20, 30], dtype=torch.int32, device=device)
    strided = torch.full((3, 7), 40, dtype=torch.int32, device=device)[:, 2].copy_(starts)
    assert not strided.is_contiguous()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        results = []
        for given in (starts, strided):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out, lse = attention_varlen_op(*leaves, given, None, None, None, 0, 0, None, 0.0, -1, 0, "", False)
            results.append((out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    finally:
        torch.use_deterministic_algorithms(before)
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_the_dense_baseline_is_attention_of_the_sequences_as_a_batch(device):
    dense = next(peer for peer in VARLEN.peers if peer.name == "dense")
    point = next(p for p in VARLEN.sets["edge"] if p["lengths"] == LENGTHS.index("equal"))
    inputs = draw(VARLEN, point, torch.float32, device)
    expected = VARLEN.reference(**inputs, **point.options)
    torch.testing.assert_close(dense.build(point)(**inputs, **point.options), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(Unsupported, match="one length"):
        dense.build(VARLEN.sets["llm"][0])
