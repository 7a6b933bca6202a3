"""Bits of tokens that sequences have seen, 32 to a word: set for those of a prompt, for repetition penalties."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n_ids", "n_rows", "n_words"])
def _mark_kernel(
    seen_ptr, ids_ptr, row_of_ptr, stride_s, stride_i, stride_r, n_ids, n_rows, n_words, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at * stride_i, mask=at < n_ids, other=-1).to(tl.int64)
    rows = tl.load(row_of_ptr + at * stride_r, mask=at < n_ids, other=-1).to(tl.int64)

    inside = (ids >= 0) & (ids < tl.zeros((), tl.int64) + n_words * 32) & (rows >= 0) & (rows < n_rows)
    bits = (tl.full((BLOCK,), 1, tl.int64) << (ids & 31)).to(tl.int32)

    tl.atomic_or(seen_ptr + rows * stride_s + (ids >> 5), bits, mask=inside, sem="relaxed")


@functools.cache
def _plan(dtypes: tuple[torch.dtype, torch.dtype], block: int) -> launching.KernelLauncher:
    return launching.KernelLauncher(_mark_kernel, {"BLOCK": block}, num_warps=4)


def check(seen: Tensor, ids: Tensor, row_of: Tensor) -> None:
    check_words("mark_seen_", seen)
    for name, x in (("ids", ids), ("row_of", row_of)):
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"mark_seen_: {name} has dtype {x.dtype}, expected int32 or int64")
    if ids.dim() != 1:
        raise ValueError(f"mark_seen_: ids has shape {tuple(ids.shape)}, expected one dimension")
    if row_of.shape != ids.shape:
        raise ValueError(
            f"mark_seen_: row_of has shape {tuple(row_of.shape)}, expected {tuple(ids.shape)} to match ids"
        )


def check_words(op: str, seen: Tensor) -> None:
    """That `seen` is a matrix of words that can be written in place."""
    if seen.dtype != torch.int32:
        raise TypeError(f"{op}: seen has dtype {seen.dtype}, expected int32, 32 tokens to a word")
    if seen.dim() != 2:
        raise ValueError(f"{op}: seen has shape {tuple(seen.shape)}, expected two dimensions (B, ceil(V / 32))")
    if seen.shape[1] > 1 and seen.stride(1) != 1:
        raise ValueError(f"{op}: seen has a last stride of {seen.stride(1)}, expected 1")
    if seen.shape[0] > 1 and seen.stride(0) == 0:
        raise ValueError(f"{op}: seen is expanded (strides {seen.stride()}), expected an address for each word")


def launch(seen: Tensor, ids: Tensor, row_of: Tensor) -> None:
    check(seen, ids, row_of)
    if ids.device.type == "cpu" and ids.numel():
        for name, x, n in (("ids", ids, 32 * seen.shape[1]), ("row_of", row_of, seen.shape[0])):
            if int(x.min()) < 0 or int(x.max()) >= n:
                worst = int(x.min()) if int(x.min()) < 0 else int(x.max())
                raise ValueError(f"mark_seen_: {name} holds {worst}, expected 0 to {n - 1}")
    if not (ids.numel() and seen.numel()):
        return
    block = 4096 if runtime.target(seen.device) is runtime.INTERPRETER else 256
    launching.launch(
        _plan((ids.dtype, row_of.dtype), block),
        library.cdiv(ids.shape[0], block),
        (seen, ids, row_of),
        (seen.stride(0), ids.stride(0), row_of.stride(0)),
        (ids.shape[0], seen.shape[0], seen.shape[1]),
    )
