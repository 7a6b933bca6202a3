"""Attention, forward and backward, over whole tensors and over packed sequences.

    s[i, j] = scale * q[i]·k[j]                      softcap * tanh(s / softcap), where there is a cap
              + mask[i, j] - slope |p(i) - j|        p(i) = i + n_k - n_q, the place of query i among the keys
    out[i]  = sum over the j that i sees of exp(s[i, j] - lse[i]) v[j]
    lse[i]  = log(exp(sink) + sum over those j of exp(s[i, j]))

Scores are never written: a program holds a block of queries and walks over the keys with the softmax as it goes
(FlashAttention, Dao et al. 2022, https://arxiv.org/abs/2205.14135). Memory grows with T, not with its square: beside
the output there is lse, a float32 a row, from which the backward computes the probabilities again. Bytes: q, k and v
read once where the keys and values of the heads that are computed together fit the L2, and the output written.

Operations: 4 D for each pair of a query and a key that it sees forward, 10 D backward. Blocks that nobody sees, by the
causal rule or the window, are not visited.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rooftile import library
from rooftile.ops.attention import arguments
from rooftile.ops.attention.arguments import Layout, Window
from rooftile.ops.attention.ops import attention_op, attention_varlen_op
from rooftile.ops.attention.problem import AttentionConfig
from rooftile.ops.gemm.common import autocast

__all__ = ["AttentionConfig", "attention", "attention_varlen"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    layout: Layout = "bhtd",
    return_lse: bool = False,
    deterministic: bool | None = None,
    config: AttentionConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`softmax(scale * q k^T + ...) v` for each head, without the T x T scores in memory.

    Sums are float32; the result is the same on every run, and with `deterministic` gradients are too. float32 inputs
    have exact products; of 16-bit ones the probabilities are rounded to their dtype before they meet v.

    Args:
        q: `(B, Hq, Tq, D)`, float32, float16 or bfloat16, with D from 1 to 256: multiples of 8 are fastest, and those
            that are no power of two are computed in two parts. Any strides; copied only where the last is not 1.
        k: `(B, Hkv, Tk, D)` of q's dtype. Hq is a multiple of Hkv: query head h reads head `h // (Hq // Hkv)`.
        v: `(B, Hkv, Tk, Dv)` of q's dtype; Dv may differ from D.
        causal: query i stands at position `p = i + Tk - Tq`, the last query at the last key, and sees no key behind it.
        scale: what q·k is multiplied by; `1 / sqrt(D)` by default. It is compiled into the kernels.
        window: an int w: each query sees its own position and the w - 1 keys before it, and without `causal` also the
            w - 1 behind it. Or `(left, right)`: that many keys before and behind, None (or -1) for no limit, as
            FlashAttention has it; `causal` makes right 0.
        softcap: scores become `softcap * tanh(s / softcap)`, as in Gemma 2; before masks and biases.
        mask: broadcasts to `(B, Hq, Tq, Tk)` in either layout. bool: True is seen, together with `causal` and `window`;
            float32, float16 or bfloat16: added to the scores, and a key with less than -2.3e38 is not seen. Read by its
            strides, never expanded.
        alibi_slopes: `(Hq,)`: slope times |p - j| is taken off the score (Press et al. 2022,
            https://arxiv.org/abs/2108.12409).
        sinks: `(Hq,)`: a score for each head that takes part in the softmax and has no value, as in gpt-oss.
        layout: `"bhtd"`, or `"bthd"` for q, k, v and the output as `(B, T, H, D)`: the same by strides, with no copy.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: whether gradients are the same bits on every run. Those of sm_90 for heads of up to 128 are not
            by default, and take about 1.15 times as long so. None: `torch.are_deterministic_algorithms_enabled()`.
        config: how the forward is launched, in place of the choice that sizes and GPU make. Where its kernel is
            "portable", gradients are the portable kernels', too.

    Returns:
        out, `(B, Hq, Tq, Dv)` (or `(B, Tq, Hq, Dv)`) in q's dtype, dense, and in memory in the order of q's dimensions;
        with `return_lse` `(out, lse)`, lse `(B, Hq, Tq)` float32, natural, with the sink in it, and differentiable.
        A query that sees no key has zeros, lse -inf (or its sink), and no gradient. Under `torch.autocast` q, k and v
        are cast to its dtype first, as those of `scaled_dot_product_attention` are.

        q, k, v and sinks get gradients, of which those that are asked for are computed; a mask and slopes do not, and
        are refused where they require one.

    Raises:
        ValueError: heads don't divide, shapes don't fit together or the mask does not broadcast, D is over 256, the
            window, softcap, scale or layout is none of the above, mask or alibi_slopes requires grad, the configuration
            can't be launched (the field and the reason are named), a device is the CPU without the interpreter, or
            devices differ.
        TypeError: dtypes differ, or are not one of those named; an option is of another type.
    """
    scaled, cap, left, right = arguments.scoring_arguments("attention", causal, scale, window, softcap)
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    text, exact = arguments.encoded("attention", config), arguments.is_deterministic("attention", deterministic)
    out, lse = attention_op(q, k, v, mask, alibi_slopes, sinks, scaled, cap, left, right, layout, text, exact)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    config: AttentionConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of sequences that are packed one behind the other, each with itself alone.

    Args:
        q: `(Tq, Hq, D)`: the queries of all sequences, float32, float16 or bfloat16.
        k: `(Tk, Hkv, D)` of q's dtype.
        v: `(Tk, Hkv, Dv)` of q's dtype.
        cu_seqlens_q: `(sequences + 1,)` int32: where each sequence begins in q, and where the last ends. A list, or a
            tensor on the CPU, is checked and copied to the device. Of a tensor on the GPU nothing can be known without
            waiting for it: it is clamped so that nothing outside of the tensors is read or written, and rows of the
            output that no sequence covers are zeros.
        cu_seqlens_k: the same for k and v; by default that of q, and k has as many tokens.
        max_seqlen_q, max_seqlen_k: queries and keys of the longest sequence. Where the numbers are on the CPU they are
            found; else the default is as many as there are in all, which is right and launches programs that have
            nothing to do. Rows past max_seqlen_q may be zeros, and keys past max_seqlen_k may have no gradient.
        causal, scale, window, softcap, alibi_slopes, sinks, return_lse, deterministic, config: as in `attention`;
            positions are counted within each sequence.

    Returns:
        out, `(Tq, Hq, Dv)` in q's dtype, dense; with `return_lse` `(out, lse)`, lse `(Hq, Tq)` float32.

    Raises:
        ValueError: as `attention`; on the CPU cu_seqlens that don't begin with 0, that decrease, or that don't end at
            the number of tokens; a max_seqlen below the longest; a cu_seqlens_k of another length.
        TypeError: as `attention`; cu_seqlens is not int32.
    """
    op = "attention_varlen"
    scaled, cap, left, right = arguments.scoring_arguments(op, causal, scale, window, softcap)
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    text, exact = arguments.encoded(op, config), arguments.is_deterministic(op, deterministic)
    library.check_tensors(op, q=q, k=k)
    starts_q, longest_q = arguments.checked_starts(op, "q", cu_seqlens_q, q, max_seqlen_q)
    if cu_seqlens_k is None:
        arguments.check_alike(op, q, k, longest_q, max_seqlen_k)
        starts_k, longest_k = None, max_seqlen_k or longest_q
    else:
        starts_k, longest_k = arguments.checked_starts(op, "k", cu_seqlens_k, k, max_seqlen_k)
    out, lse = attention_varlen_op(
        q, k, v, starts_q, starts_k, alibi_slopes, sinks, longest_q, longest_k, scaled, cap, left, right, text, exact
    )
    return (out, lse) if return_lse else out
