"""Which proposed tokens a model accepts: the end of a step of speculative decoding.

    n = the number of leading i < limit with drawn[i] == ids[i + 1]
    token = drawn[n],   length -= T - 1 - n

A step computes T tokens of each sequence: its newest one, ids[0], and T - 1 proposals. drawn[i] is what the model
draws after ids[0], ..., ids[i]. Up to the first proposal that differs, the proposals are what the model would have
drawn one by one, and drawn[n] is its next token; the rest leaves the cache.

A proposal is a token, not a distribution, so its probability under the draft is 1. Rejection sampling (Leviathan et
al. 2023, https://arxiv.org/abs/2211.17192, Algorithm 1) then accepts proposal d with probability p(d), and else draws
from p without d. Drawing from p and comparing does the same: the draw is d with probability p(d), and otherwise
distributed as p without d. The noise of a draw depends on seed and position alone, so even the tokens are those of
plain decoding.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process
from rooftile.ops.sample.parts import MOST_COUNTED

import triton  # isort: skip
import triton.language as tl  # isort: skip

_DTYPES = (torch.int32, torch.int64)


@triton.jit(do_not_specialize=["n_cols"])
def _accept_kernel(
    accepted_ptr,
    tokens_ptr,
    lengths_ptr,
    drawn_ptr,
    ids_ptr,
    limits_ptr,
    seen_ptr,
    counts_ptr,
    stride_d,
    stride_i,
    stride_s,
    stride_c,
    n_cols,
    T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    limit = tl.minimum(tl.load(limits_ptr + row), T - 1)

    n = tl.zeros((), tl.int32)
    going = limit >= 0
    for i in tl.static_range(T - 1):
        drawn = tl.load(drawn_ptr + row * stride_d + i)
        going &= (i < limit) & (drawn == tl.load(ids_ptr + row * stride_i + i + 1))
        n += going.to(tl.int32)

    tl.store(accepted_ptr + row, n)
    if limit >= 0:
        tl.store(tokens_ptr + row, tl.load(drawn_ptr + row * stride_d + n))
        tl.store(lengths_ptr + row, tl.load(lengths_ptr + row) - (T - 1 - n))
        for j in range(n + 1):
            token = tl.load(drawn_ptr + row * stride_d + j)
            if (token >= 0) & (token < n_cols):
                if seen_ptr is not None:
                    word_ptr = seen_ptr + row * stride_s + (token >> 5)
                    tl.store(word_ptr, tl.load(word_ptr) | (1 << (token & 31)).to(tl.int32))
                if counts_ptr is not None:
                    count_ptr = counts_ptr + row * stride_c + token
                    tl.store(count_ptr, tl.minimum(tl.load(count_ptr).to(tl.int32) + 1, MOST_COUNTED).to(tl.int16))


@functools.cache
def _launcher(dtypes: tuple[torch.dtype | None, ...], n_tokens: int) -> launching.KernelLauncher:
    return launching.KernelLauncher(_accept_kernel, {"T": n_tokens}, num_warps=1)


def _check(
    accepted: Tensor, tokens: Tensor, lengths: Tensor, drawn: Tensor, ids: Tensor, limits: Tensor,
    seen: Tensor | None, counts: Tensor | None,
) -> None:  # fmt: skip
    op = "accept_drafts_"
    for name, x in (("drawn", drawn), ("ids", ids), ("tokens", tokens)):
        if x.dtype not in _DTYPES:
            raise TypeError(f"{op}: {name} has dtype {x.dtype}, expected int32 or int64")
    if drawn.dim() != 2 or not 1 <= drawn.shape[1] <= 16:
        raise ValueError(f"{op}: drawn has shape {tuple(drawn.shape)}, expected (B, T), T from 1 to 16")
    if ids.shape != drawn.shape:
        raise ValueError(f"{op}: ids has shape {tuple(ids.shape)}, expected {tuple(drawn.shape)} to match drawn")
    for name, x in (("ids", ids), ("drawn", drawn)):
        if x.shape[1] > 1 and x.stride(1) != 1:
            raise ValueError(f"{op}: {name} has a last stride of {x.stride(1)}, expected 1")
    n_rows = drawn.shape[0]
    for name, x in (("accepted", accepted), ("lengths", lengths), ("limits", limits)):
        if x.dtype != torch.int32:
            raise TypeError(f"{op}: {name} has dtype {x.dtype}, expected int32")
    for name, x in (("accepted", accepted), ("tokens", tokens), ("lengths", lengths), ("limits", limits)):
        if tuple(x.shape) != (n_rows,):
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected ({n_rows},), one for each row")
        if n_rows > 1 and x.stride(0) != 1:
            raise ValueError(f"{op}: {name} has a stride of {x.stride(0)}, expected 1")
    for name, table, dtype in (("seen", seen, torch.int32), ("counts", counts, torch.int16)):
        if table is None:
            continue
        if table.dtype != dtype:
            raise TypeError(f"{op}: {name} has dtype {table.dtype}, expected {str(dtype).removeprefix('torch.')}")
        if table.dim() != 2 or table.shape[0] != n_rows:
            raise ValueError(f"{op}: {name} has shape {tuple(table.shape)}, expected {n_rows} rows to match drawn")
        if (table.shape[1] > 1 and table.stride(1) != 1) or (n_rows > 1 and table.stride(0) == 0):
            raise ValueError(f"{op}: {name} has strides {table.stride()}, expected rows that can be written in place")
    if seen is not None and counts is not None and seen.shape[1] != (words := library.cdiv(counts.shape[1], 32)):
        raise ValueError(
            f"{op}: seen has shape {tuple(seen.shape)}, expected ({n_rows}, {words}), a bit for each of the "
            f"{counts.shape[1]} tokens of counts"
        )


def _accept(
    accepted: Tensor, tokens: Tensor, lengths: Tensor, drawn: Tensor, ids: Tensor, limits: Tensor,
    seen: Tensor | None, counts: Tensor | None,
) -> None:  # fmt: skip
    _check(accepted, tokens, lengths, drawn, ids, limits, seen, counts)
    n_rows, n_tokens = drawn.shape
    if n_rows == 0:
        return
    n_cols = 32 * seen.shape[1] if counts is None and seen is not None else 0 if counts is None else counts.shape[1]
    tensors = (accepted, tokens, lengths, drawn, ids, limits, seen, counts)
    launching.launch(
        _launcher(tuple(None if t is None else t.dtype for t in tensors), n_tokens),
        n_rows,
        tensors,
        (
            drawn.stride(0),
            ids.stride(0),
            0 if seen is None else seen.stride(0),
            0 if counts is None else counts.stride(0),
        ),
        (n_cols,),
    )


_op = library.define(
    "accept_drafts_(Tensor(a!) accepted, Tensor(b!) tokens, Tensor(c!) lengths, Tensor drawn, Tensor ids, "
    "Tensor limits, Tensor(d!)? seen, Tensor(e!)? counts) -> ()",
    launch=_accept,
    fake=_check,
)


def accept_drafts_(
    accepted: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    drawn: Tensor,
    ids: Tensor,
    limits: Tensor,
    *,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> None:
    """Accept the proposals that a model draws itself, and take the others out of the cache: speculative decoding.

    In row b, n is the number of leading `i < limits[b]` with `drawn[b, i] == ids[b, i + 1]`. Then

        accepted[b] = n,   tokens[b] = drawn[b, n],   lengths[b] -= T - 1 - n

    and drawn[b, 0] to drawn[b, n] are added to `seen` and `counts`, as `sample_` adds its token.

    `drawn[b, i]` is what `sample` draws from the logits behind `ids[b, i]`. The tokens drawn[b, 0] to drawn[b, n] then
    have exactly the distribution of tokens that are drawn one by one, whatever the proposals were.

    Args:
        accepted: `(B,)`, int32, contiguous. Written.
        tokens: `(B,)`, int32 or int64, contiguous: the newest token of each sequence. Written.
        lengths: `(B,)`, int32, contiguous: the tokens of each sequence in the cache, including the T of this step.
            Written.
        drawn: `(B, T)`, int32 or int64, T from 1 to 16, a last stride of 1.
        ids: `(B, T)`, int32 or int64, a last stride of 1: the tokens of the step, the proposals from the second on.
        limits: `(B,)`, int32, contiguous: how many proposals the row has, at most T - 1. A negative number: the row
            takes no part; its accepted is 0, and the rest keeps its values.
        seen: int32 `(B, ceil(V / 32))`, a last stride of 1, as in `sample`. Written. None, the default: none.
        counts: int16 `(B, V)` of the same V, a last stride of 1, as in `sample`. Written. None, the default: none.

    Raises:
        ValueError: a shape or stride is wrong; devices differ or are the CPU without the interpreter.
        TypeError: a dtype is not one of those named.

    Source: Leviathan et al. 2023 (https://arxiv.org/abs/2211.17192), Algorithm 1, where the draft's probability of each
    proposal is 1.
    """
    _op(accepted, tokens, lengths, drawn, ids, limits, seen, counts)
