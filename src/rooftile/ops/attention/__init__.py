"""Attention, forward and backward, over whole tensors and over packed sequences; and forward, over a paged cache.

    s[i, j] = scale * q[i]·k[j]                      softcap * tanh(s / softcap) with a soft cap
              + mask[i, j] - slope |p(i) - j|        p(i) = i + n_k - n_q, the position of query i among the keys
    out[i]  = sum over the j that i sees of exp(s[i, j] - lse[i]) v[j]
    lse[i]  = log(exp(sink) + sum over those j of exp(s[i, j]))

Scores are never written: a program holds a block of queries and walks over the keys with an online softmax
(FlashAttention, Dao et al. 2022, https://arxiv.org/abs/2205.14135). Memory grows with T, not with its square: beside
the output there is lse, a float32 a row, from which the backward computes the probabilities again. Bytes: the output is
written once, and q, k and v are read once if the keys and values of heads that run at the same time fit in the L2.

Operations: 4 D for each pair of a query and a key that it sees forward, 10 D backward. Blocks that causality or the
window hides from all their queries are not visited.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rooftile import library
from rooftile.ops.attention import arguments
from rooftile.ops.attention.arguments import Layout, Window
from rooftile.ops.attention.ops import attention_op, attention_varlen_op
from rooftile.ops.attention.paged import attention_paged_into, attention_paged_op, checked_indices
from rooftile.ops.attention.problem import AttentionConfig, Invariant
from rooftile.ops.decode_attention.choose import scale_of_values
from rooftile.ops.gemm.dispatch import autocast

__all__ = ["AttentionConfig", "attention", "attention_paged", "attention_varlen"]


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

    Sums are float32. The result is bit-identical on every run; gradients are with `deterministic`. float32 inputs are
    multiplied exactly. With 16-bit inputs the probabilities are rounded to their dtype before they multiply v. A new
    window, scale or softcap compiles nothing, nor does a new length, once each of the few kernels that lengths choose
    among has run.

    Args:
        q: `(B, Hq, Tq, D)`, float32, float16 or bfloat16, with D from 1 to 256. Multiples of 8 are fastest. D that is
            no power of two is computed in two blocks. Any strides; copied only if the last is not 1.
        k: `(B, Hkv, Tk, D)` of q's dtype. Hq is a multiple of Hkv: query head h reads head `h // (Hq // Hkv)`.
        v: `(B, Hkv, Tk, Dv)` of q's dtype; Dv may differ from D.
        causal: query i stands at position `p = i + Tk - Tq`, the last query at the last key, and sees no later key.
            `scaled_dot_product_attention` calls it `is_causal`, and aligns the first query with the first key.
        scale: the factor of q·k; `1 / sqrt(D)` by default.
        window: an int w: each query sees its own position and the w - 1 keys before it, and without `causal` also the
            w - 1 after it. Or `(left, right)`: that many keys before and after, None (or -1) for no limit, as in
            FlashAttention; `causal` makes right 0. No tensor: reading it would make the host wait for the device.
        softcap: scores become `softcap * tanh(s / softcap)`, as in Gemma 2; before masks and biases.
        mask: broadcasts to `(B, Hq, Tq, Tk)` in either layout. bool: True is seen, together with `causal` and `window`;
            float32, float16 or bfloat16: added to the scores, and a key with less than -2.3e38 is not seen. It is read
            by its strides, never expanded. `scaled_dot_product_attention` calls it `attn_mask`.
        alibi_slopes: `(Hq,)` or `(B, Hq)`: slope times |p - j| is subtracted from the score (Press et al. 2022,
            https://arxiv.org/abs/2108.12409). The kernels `"hopper"` don't take it; the choice avoids them.
        sinks: `(Hq,)`: for each head a score that takes part in the softmax and has no value, as in gpt-oss.
        layout: `"bhtd"`, or `"bthd"` for q, k, v and the output as `(B, T, H, D)`: handled by strides, without a copy.
        return_lse: also return the logarithm of the softmax's denominator.
        deterministic: whether gradients are bit-identical on every run. On sm_90, for heads of up to 128, the default
            gradients are not, and deterministic ones take about 1.15 times as long. None takes
            `torch.are_deterministic_algorithms_enabled()`.
        config: how the forward is launched, in place of the choice by sizes and GPU. With its kernel "portable",
            gradients are computed by the portable kernels, too.

    Returns:
        out, `(B, Hq, Tq, Dv)` (or `(B, Tq, Hq, Dv)`) in q's dtype, dense, in memory in the order of q's dimensions.
        With `return_lse`, `(out, lse)`; lse is `(B, Hq, Tq)` float32, natural, includes the sink, and is
        differentiable. A query that sees no key has zeros, an lse of -inf (or its sink), and no gradient. Under
        `torch.autocast` q, k and v are cast to its dtype first, as by `scaled_dot_product_attention`.

        q, k, v and sinks get gradients; only those that are asked for are computed. A mask or slopes that require grad
        are refused.

    Raises:
        ValueError: heads don't divide, shapes don't fit together, the mask does not broadcast, D is over 256; the
            window, softcap, scale or layout is none of the above; mask or alibi_slopes requires grad; the device can't
            launch the configuration (the message names the field and the reason); a device is the CPU without the
            interpreter, or devices differ.
        TypeError: dtypes differ, or are not one of those named; an option is of another type.
    """
    scaled, cap, left, right = arguments.scoring_arguments("attention", causal, scale, window, softcap, return_lse)
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    text = "" if config is None else arguments.encoded("attention", config)
    exact = arguments.is_deterministic("attention", deterministic)
    out, lse = attention_op(q, k, v, mask, alibi_slopes, sinks, scaled, cap, left, right, layout, text, exact)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int] | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    """`attention` of packed sequences, each of which attends to itself alone.

    Args:
        q: `(Tq, Hq, D)`: the queries of all sequences, float32, float16 or bfloat16.
        k: `(Tk, Hkv, D)` of q's dtype.
        v: `(Tk, Hkv, Dv)` of q's dtype.
        cu_seqlens_q: `(sequences + 1,)` int32: where each sequence begins in q, and where the last one ends. A list, or
            a tensor on the CPU, is checked and copied to the device. A tensor on the GPU is not checked, because the
            host would have to wait for it: it is clamped, so that nothing outside the tensors is read or written, and
            rows of the output that no sequence covers are zeros.
        cu_seqlens_k: the same for k and v. By default that of q; k then has as many tokens.
        max_seqlen_q, max_seqlen_k: queries and keys of the longest sequence. For cu_seqlens on the CPU they are found.
            Else the default is the number of tokens, which is correct and launches programs that have nothing to do.
            Rows past max_seqlen_q may be zeros, and keys past max_seqlen_k may have no gradient.
        causal, scale, window, softcap, alibi_slopes, sinks, return_lse, deterministic: as in `attention`; positions are
            counted within each sequence. Slopes may be `(sequences, Hq)`.
        config: as in `attention`. Gradients are computed by the portable kernels, too, unless its kernel is "hopper".

    Returns:
        out, `(Tq, Hq, Dv)` in q's dtype, dense; with `return_lse`, `(out, lse)`; lse is `(Hq, Tq)` float32.

    Raises:
        ValueError: as `attention`; cu_seqlens on the CPU don't begin with 0, decrease, or don't end at the number of
            tokens; a max_seqlen is less than the longest sequence; cu_seqlens_k has another length.
        TypeError: as `attention`; cu_seqlens is not int32.
    """
    op = "attention_varlen"
    scaled, cap, left, right = arguments.scoring_arguments(op, causal, scale, window, softcap, return_lse)
    q, k, v = autocast(q, k, v)  # type: ignore[assignment]
    text = "" if config is None else arguments.encoded(op, config)
    exact = arguments.is_deterministic(op, deterministic)
    library.check_tensors(op, q=q, k=k, v=v)
    starts_q, longest_q = arguments.checked_starts(op, "q", cu_seqlens_q, q, max_seqlen_q)
    if cu_seqlens_k is None:
        arguments.check_dimensions(op, "k", k, "thd")
        arguments.check_alike(op, q, k, longest_q, max_seqlen_k)
        starts_k, longest_k = None, max_seqlen_k or longest_q
    else:
        starts_k, longest_k = arguments.checked_starts(op, "k", cu_seqlens_k, k, max_seqlen_k)
    vectors = (starts_q, starts_k, alibi_slopes, sinks)
    scoring = (longest_q, longest_k, scaled, cap, left, right)
    out, lse = attention_varlen_op(q, k, v, *vectors, *scoring, text, exact)
    return (out, lse) if return_lse else out


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    *,
    head_dim_v: int | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cache_layout: str = "bthd",
    return_lse: bool = False,
    config: AttentionConfig | Invariant | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed queries, any number of each sequence, to the keys of a cache in pages.

    For prompts that are computed in chunks, prompts whose beginning is in the cache, and batches that mix both with
    single tokens. The keys and values of the queries are in the cache already (`append_kv`, `rope_and_cache`).

    Query i of the n of sequence b stands at position `p = lengths[b] - n + i`:

        s_j = scale * q · k_j * k_scale,   softcap * tanh(s_j / softcap),   - slope * |p - j|
        out = sum_j exp(s_j) v_j * v_scale / (sum_j exp(s_j) + exp(sink)),   j < lengths[b],   j <= p if causal

    Without a v_cache, `v_j` is the first head_dim_v elements of `k_j`, and v_scale is k_scale: multi-head latent
    attention (MLA) in its absorbed form, as in `decode_attention`.

    Sums are float32, and results are bit-identical on every run. It has no derivative. A new length, window, scale or
    softcap compiles nothing, and the host does not wait for the device.

    For 1 to 16 new tokens in all sequences `decode_attention` is faster: it divides the keys of a sequence among
    programs.

    Args:
        q: `(Tq, Hq, D)`: the queries of all sequences, float32, float16 or bfloat16. Any strides; copied where the last
            is not 1.
        k_cache, v_cache: `(pages, page_size, Hkv, D)`, or `(pages, Hkv, page_size, D)` with `cache_layout="bhtd"`,
            page_size 16, 32, 64, 128, 256 or 512. Of q's dtype, float8_e4m3fn or int8. Query head h reads KV head
            `h // (Hq // Hkv)`. D, and the last dimension of v_cache, which may be another, are 1 to 256; with
            `v_cache=None`, D is 1 to 576. Any strides; copied as a whole where the last is not 1.
        page_table: `(sequences, most pages)`, int32: the pages of each sequence, which sequences may share. Entries
            beyond a sequence's length are not read.
        lengths: `(sequences,)`, int32: the keys of each sequence, including those of its queries, as in
            `decode_attention`; 0 or less for none. The cache may hold anything beyond them.
        cu_seqlens_q: `(sequences + 1,)` int32: where the queries of each sequence begin in q, and where the last ones
            end, as in `attention_varlen`.
        head_dim_v: with `v_cache=None`, the elements of a key that are its value, 1 to D. Else None, or v_cache's.
        max_seqlen_q: the most queries of a sequence, as in `attention_varlen`. It decides about the tiles and the grid.
        causal, scale, window, softcap, alibi_slopes, sinks: as in `attention_varlen`; positions are counted within each
            sequence. Keys before a window are not read.
        k_scale, v_scale: float32, the factors of cached elements: `()`, `(Hkv,)`, or one for each token and head, of
            the cache's first three dimensions. An int8 cache needs them. Without a v_cache, v_scale is None.
        cache_layout: the order of the dimensions of the caches, and of scales by token.
        return_lse: also return the logarithm of the softmax's denominator.
        config: how the kernel is launched, in place of the choice by sizes and GPU.

            The kernel "hopper" reads a cache in 8 bits, or with scales, from a copy of what page_table has room for.
            In the copy each element times its scale is rounded to q's dtype (float16: infinite above 65504). It takes
            up to 1 GiB during the call; where it would take more, "portable" is chosen, and "hopper" is refused.

            Without a v_cache, "hopper" is `AttentionConfig("hopper", 64, 64, 8, 2)`: tiles of 64 rows (tokens times
            heads). It takes more than 32 rows of a KV head; caches in 16 bits of 513 to 576 elements, of which 257 to
            512 are values; query heads of a KV head that divide 64, or are a multiple of it; and up to 512 sequences.
            It takes no window, soft cap, sinks, ALiBi or scales. It is chosen wherever it can run.

            With "invariant" the result of a query has the same bits whatever other queries and sequences there are,
            and however the tokens of its sequence are divided among calls.
        out: memory for the result, contiguous, such as rows of a larger tensor; new memory by default. No other
            argument may share it.

    Returns:
        out, `(Tq, Hq, Dv)` in q's dtype, contiguous; with `return_lse`, `(out, lse)`; lse is `(Hq, Tq)` float32,
        natural, and includes the sink. A query that sees no key has zeros and an lse of -inf (or its sink). Rows that
        no sequence covers are zeros.

    Raises:
        ValueError: shapes, devices or a configuration do not fit; an input requires grad; cu_seqlens on the CPU are
            wrong, as in `attention_varlen`; lengths or pages on the CPU lead out of the cache. On the GPU all three are
            clamped, and nothing outside the tensors is read or written.
        TypeError: an unsupported dtype; an option is of another type.
    """
    op = "attention_paged"
    scaled, cap, left, right = arguments.scoring_arguments(op, causal, scale, window, softcap, return_lse)
    text = "" if config is None else arguments.encoded(op, config, invariant=True)
    optional = {"v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale, "alibi_slopes": alibi_slopes}
    given = {name: t for name, t in (optional | {"sinks": sinks}).items() if t is not None}
    library.check_tensors(op, q=q, k_cache=k_cache, page_table=page_table, lengths=lengths, **given)
    v_scale = scale_of_values(op, v_cache, k_scale, v_scale)
    starts, longest = arguments.checked_starts(op, "q", cu_seqlens_q, q, max_seqlen_q)
    tensors = (starts, k_scale, v_scale, alibi_slopes, sinks)
    rest = (*tensors, longest, scaled, cap, left, right, cache_layout, text, head_dim_v)
    page_table, lengths = checked_indices(q, k_cache, v_cache, page_table, lengths, *rest)
    if out is None:
        out, lse = attention_paged_op(q, k_cache, v_cache, page_table, lengths, *rest)
    else:
        lse = attention_paged_into(out, q, k_cache, v_cache, page_table, lengths, *rest)
    return (out, lse) if return_lse else out
