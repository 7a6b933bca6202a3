"""decode_attention over a latent cache for sm_90, of more than 8 query rows (Gluon).

A program has a tile of 16, 32 or 64 query rows of a KV head, and three parts:

    score       the first warpgroup: scores of a block of keys, p = their softmax, columns 0 to 255 of the output
    accumulate  the second one: columns 256 to 511 of the output
    _produce    a single warp: plans the work, and copies queries and blocks by TMA, a page or a part of one at a time

Of 64 rows the tensor cores are what takes the time (`hopper_latent_many_rows`), of fewer the memory
(`hopper_latent_few_rows`).

A slot of shared memory has one block of keys: columns 0 to 255, 256 to 511, and 512 to 575, which only the scores need.

    ready[2 slot + half]    completed by the bytes that land: the left half, or the right half and the last columns
    free[2 slot + half]     completed by one arrival of the warpgroup that has these columns of the output
    p_ready[slot]           completed by `score`, when p and its rows' alpha and sums are in shared memory
    q_ready, q_free         as ready and free, for the queries of a piece of work, which `score` alone reads
    work_ready, work_free   the same for messages, in which `_produce` tells the others their next piece of work

`free` of the right half implies that p, alpha and the sums were read. Work is partitioned as for
`decode_kernel` (`schedule`), and partial results are stored as there.

Of packed queries (`attention_paged`), a tile of 64 rows is a piece of work, or a split of it. It is as a sequence of
the tile's tokens, which has the keys that the last of them sees. Programs take tiles from a queue, a counter in memory.

A fully masked row needs no special case until it is written (`primitives.warpgroup_softmax`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.launching import KernelLauncher, bind
from rooftile.ops.decode_attention import hopper_latent_few_rows as few
from rooftile.ops.decode_attention import hopper_latent_many_rows as many
from rooftile.ops.decode_attention.choose import Shape
from rooftile.ops.decode_attention.hopper_latent_parts import FIELDS, HALF, LEAST_ROWS, PART, PARTS, ROWS, SLOTS, Form
from rooftile.ops.decode_attention.schedule import load_lengths, plan_tiles, plan_work, tile_at, work_at
from rooftile.primitives import pdl
from rooftile.primitives.gluon import (
    describe,
    describe_pages,
    is_describable,
    load_tile,
    next_slot,
    packed_at,
    view_as,
)
from rooftile.primitives.paging import page_step
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip
from triton.experimental.gluon.language.nvidia.hopper import (  # isort: skip
    fence_async_shared,
    mbarrier,
)

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_SEQUENCES = 512  # which one warp plans
_REGISTERS = 168  # what a kernel of 12 warps is compiled for; the two warpgroups take what the producer leaves


# The producer


@gluon.jit
def _send(fields, messages, work_ready, work_free, box, parity):
    """Tell the two warpgroups a piece of work."""
    mbarrier.wait(work_free.index(box), parity ^ 1)
    for i in gl.static_range(len(fields)):
        number = gl.full([1], fields[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        messages.index(box * FIELDS + i).store(number)
    mbarrier.arrive(work_ready.index(box), count=1)
    return next_slot(box, parity, 2)


@gluon.jit
def _page_of(table, seq, row, n_keys, T: gl.constexpr):
    """The page of the key at that row; past the last key its last page. Of a contiguous cache, the sequence's entry."""
    pages_ptr, stride, n_pages, _step = table
    if pages_ptr is None:
        return seq
    else:
        at = pages_ptr + seq.to(gl.int64) * stride
        if T.page:
            at += gl.minimum(row, gl.maximum(n_keys - 1, 0)) // T.page
        return gl.minimum(gl.maximum(gl.load(at), 0), n_pages - 1)


@gluon.jit
def _place_of(table, page, row, n_keys, T: gl.constexpr):
    """Where TMA finds keys: the end of those of the sequence in that page, how many they are, and the row in it."""
    begin = 0
    n = n_keys
    if T.page:
        begin = row // T.page * T.page
        n = gl.minimum(gl.maximum(n_keys - begin, 0), T.page)
    return page * table[3] + n, n, row - begin


@gluon.jit
def _copy_columns(
    desc, table, seq, head, row, n_keys, page, pieces, first, ready, col, PARTS: gl.constexpr, T: gl.constexpr
):
    """Start the copies of 64 * PARTS columns of a block of keys, from `col` on, whose first page is given.

    Keys past the last one are zeros, whatever the page holds.
    """
    for j in gl.static_range(gl.constexpr(T.pieces)):
        if j > 0:
            page = _page_of(table, seq, row + j * T.piece_rows, n_keys, T)
        end, n, key = _place_of(table, page, row + j * T.piece_rows, n_keys, T)
        for part in gl.static_range(PARTS):
            at = packed_at(end, n, head, key, col + part * PART)
            load_tile(desc, at, ready, pieces.index(first + part * T.pieces + j))


@gluon.jit
def _copy_queries(desc, seq, kv_head, tile, pieces, last, ready, T: gl.constexpr):
    """Start the copies of the queries of a tile; those past the last token are zeros, if they are not packed.

    Of packed ones `seq` and `kv_head` are the tile's first token and head.
    """
    row = tile * T.rows
    mbarrier.expect(ready, (2 * PARTS + 1) * desc.block_type.nbytes)
    for part in gl.static_range(2 * PARTS + 1):
        if T.packed:
            at = (0, seq, kv_head, part * PART)
        else:
            at = (seq, row // T.group, kv_head * T.group + row % T.group, part * PART)
        load_tile(desc, at, ready, last if part == 2 * PARTS else pieces.index(part))


@gluon.jit
def _produce(q_desc, k_desc, lengths_ptr, queues, table, memory, barriers, size, T: gl.constexpr):
    """Plan this program's work, tell it to the others, and keep the slots full."""
    q_pieces, q_last, k_pieces, last_pieces, messages = memory
    ready, free, _p_ready, q_ready, q_free, work_ready, work_free = barriers
    n_seqs, n_new, kv_heads, capacity, programs = size
    PERHALF: gl.constexpr = PARTS * T.pieces
    program = gl.program_id(0) // T.row_tiles
    tile = gl.program_id(0) % T.row_tiles
    seqs = gl.arange(0, T.block_b, layout=gl.BlockedLayout([1], [32], [1], [0]))
    lengths = load_lengths(lengths_ptr, n_seqs, T.block_b, seqs)
    starts_ptr, counter_ptr = queues
    if T.packed:
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        plan = plan_tiles(
            starts_ptr, lengths, n_seqs, n_new, kv_heads, capacity, programs, T.group, T.rows, T.block_b, T.keys,
            T.split, seqs,
        )  # fmt: skip
        at = program
        stop = plan[2]
    else:
        partition, at, stop = plan_work(
            lengths, program, n_seqs, n_new, kv_heads, capacity, programs, None, T.block_b, T.keys, T.min_blocks,
            T.slack, seqs,
        )  # fmt: skip
    slot = 0
    parity = 0
    q_parity = 0
    box = 0
    box_parity = 0
    while at < stop:
        if T.packed:
            # Whoever is free takes what is left. This number is needed only at the end of this tile.
            taken = gl.atomic_add(counter_ptr + lane, (lane == 0).to(gl.int32), mask=lane == 0, sem="relaxed")
            seq, kv_head, q_seq, q_head, q_count, n_keys, low, high, place, _first, count = tile_at(
                at, plan, starts_ptr, lengths_ptr, n_seqs, n_new, kv_heads, capacity, T.group, T.rows, T.causal, T.keys
            )
            work = (q_seq, q_head, n_keys, low, high, place, count, q_count)
        else:
            seq, kv_head, n_keys, _first, low, high, at, place, _program, _stride, _second, count = work_at(
                at, stop, program, programs, lengths, partition, n_new, kv_heads, capacity, None, T.block_b, T.keys,
                seqs,
            )  # fmt: skip
            q_seq = seq
            q_head = kv_head
            work = (seq, kv_head, n_keys, low, high, place, count)  # type: ignore[assignment]
        if low < high:  # else this split of a short sequence is empty
            box, box_parity = _send(work, messages, work_ready, work_free, box, box_parity)
            for block in range(low, high):
                row = block * T.keys
                # Before the wait, which hides the latency of reading the table.
                page = _page_of(table, seq, row, n_keys, T)
                left = 2 * slot
                mbarrier.wait(free.index(left), parity ^ 1)
                mbarrier.expect(ready.index(left), PERHALF * k_desc.block_type.nbytes)
                _copy_columns(
                    k_desc, table, seq, kv_head, row, n_keys, page, k_pieces, left * PERHALF, ready.index(left), 0,
                    PARTS, T,
                )  # fmt: skip
                mbarrier.wait(free.index(left + 1), parity ^ 1)
                mbarrier.expect(ready.index(left + 1), (PERHALF + T.pieces) * k_desc.block_type.nbytes)
                _copy_columns(
                    k_desc, table, seq, kv_head, row, n_keys, page, k_pieces, (left + 1) * PERHALF,
                    ready.index(left + 1), HALF, PARTS, T,
                )  # fmt: skip
                _copy_columns(
                    k_desc, table, seq, kv_head, row, n_keys, page, last_pieces, slot * T.pieces, ready.index(left + 1),
                    2 * HALF, 1, T,
                )  # fmt: skip
                slot, parity = next_slot(slot, parity, 2)
                if block == low:  # after the first block, whose slot is free before the queries are
                    mbarrier.wait(q_free.index(0), q_parity ^ 1)
                    _copy_queries(q_desc, q_seq, q_head, tile, q_pieces, q_last, q_ready.index(0), T)
                    q_parity ^= 1
        if T.packed:
            before = gl.max(gl.where(lane == 0, taken, 0), 0)
            at = programs + before
            if before + 1 == stop:  # the last number of all that are taken
                gl.store(counter_ptr + lane, 0, mask=lane == 0)
    _send((0, 0, 0, 0, 0, 0, 0), messages, work_ready, work_free, box, box_parity)


@gluon.jit
def _score(outputs, memory, barriers, size, scale, T: gl.constexpr):
    if T.few_rows:
        few.score(outputs, memory, barriers, size, scale, T)
    else:
        many.score(outputs, memory, barriers, size, scale, T)


@gluon.jit
def _accumulate(outputs, memory, barriers, size, scale, T: gl.constexpr):
    if T.few_rows:
        few.accumulate(outputs, memory, barriers, size, scale, T)
    else:
        many.accumulate(outputs, memory, barriers, size, scale, T)


_NUMBERS = ["n_seqs", "n_new", "kv_heads", "capacity", "n_pages", "step", "programs", "scale"]


@gluon.jit(
    do_not_specialize=_NUMBERS,
    do_not_specialize_on_alignment=["lengths_ptr", "pages_ptr", "lse_ptr", "starts_ptr", "counter_ptr"],
)
def attend_latent(
    q_desc,
    k_desc,
    out_ptr,
    lengths_ptr,
    pages_ptr,
    lse_ptr,
    partial_ptr,
    starts_ptr,
    counter_ptr,
    stride_pb,
    n_seqs,
    n_new,
    kv_heads,
    capacity,
    n_pages,
    step,
    programs,
    scale,
    T: gl.constexpr,
):
    """out = softmax(scores of q and k) k[:, :value_dim], with the lse of each row of scores, or partial results.

    Packed queries begin at `starts` for each sequence, and `n_new` are all of them.
    """
    SHARED: gl.constexpr = T.shared
    q_pieces = gl.allocate_shared_memory(q_desc.dtype, [2 * PARTS, T.rows, PART], SHARED)
    q_last = gl.allocate_shared_memory(q_desc.dtype, [T.rows, PART], SHARED)
    k_pieces = gl.allocate_shared_memory(k_desc.dtype, [2 * SLOTS * PARTS * T.pieces, T.piece_rows, PART], SHARED)
    last_pieces = gl.allocate_shared_memory(k_desc.dtype, [SLOTS * T.pieces, T.piece_rows, PART], SHARED)
    Q_TILES: gl.constexpr = [2, T.rows, HALF.value]
    K_TILES: gl.constexpr = [2 * SLOTS.value, T.keys, HALF.value]
    K_LAST: gl.constexpr = [SLOTS.value, T.keys, PART.value]
    q_tiles = view_as(q_pieces, Q_TILES, q_pieces)
    k_tiles = view_as(k_pieces, K_TILES, k_pieces)
    k_last = last_pieces if T.pieces == 1 else view_as(last_pieces, K_LAST, last_pieces)
    if T.few_rows:
        p_tiles = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, T.keys, T.rows], T.p_shared)
    else:
        p_tiles = k_last  # there is no room beside
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stats = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, T.rows], FLAT)
    messages = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    work_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    work_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(work_ready.index(i), count=1)
        mbarrier.init(work_free.index(i), count=2)
    mbarrier.init(q_ready.index(0), count=1)
    mbarrier.init(q_free.index(0), count=1)
    fence_async_shared()  # makes the initialised barriers visible to TMA
    if T.pdl:
        pdl_wait()
        pdl_launch_dependents()  # perhaps combine_kernel, which reads the lengths at once

    barriers = (ready, free, p_ready, q_ready, q_free, work_ready, work_free)
    outputs = (out_ptr, lse_ptr, partial_ptr)
    memory = (q_tiles, q_last, k_tiles, k_last, p_tiles, stats, messages)
    to_fill = (q_pieces, q_last, k_pieces, last_pieces, messages)
    size = (n_seqs, n_new, kv_heads, capacity, programs)
    table = (pages_ptr, stride_pb, n_pages, step)
    gl.warp_specialize(
        [
            (_score, (outputs, memory, barriers, size, scale, T)),
            (_accumulate, (outputs, memory, barriers, size, scale, T)),
            (_produce, (q_desc, k_desc, lengths_ptr, (starts_ptr, counter_ptr), table, to_fill, barriers, size, T)),
        ],
        [4, 1],
        [224, 56],
    )


def can_implement(
    q: Tensor, k: Tensor, s: Shape, scale: float, options: tuple[str, ...], target: runtime.Target
) -> str | None:
    """None where this kernel can run such a call, or the reason why it can't.

    Args:
        q: (batch, tokens, heads, dim), with a last stride of 1.
        k: (pages or sequences, heads, tokens, dim), with a last stride of 1.
        scale: of the scores.
        options: the names of those that the kernel does not have.
    """
    aligned = is_describable(q) and is_describable(k) and page_step(k) > 0
    return can_run((q.dtype, k.dtype), aligned, s, scale, options, target)


def can_run(
    dtypes: tuple[torch.dtype, torch.dtype], aligned: bool, s: Shape, scale: float, options: tuple[str, ...],
    target: runtime.Target, least_rows: int = LEAST_ROWS,
) -> str | None:  # fmt: skip
    """As `can_implement`, for the dtypes of q and k, and whether both can be described to TMA.

    Packed queries are `s.n_new` tokens, of `s.batch` sequences. They need more than half of the least rows of a tile.
    """
    group = s.heads // s.kv_heads
    if not target.gluon:
        return f"kernel 'hopper' is for sm_90, and {target.why_no_gluon}"
    if dtypes[0] not in _DTYPES or dtypes[1] != dtypes[0]:
        return f"kernel 'hopper' takes float16 and bfloat16, not {dtypes[0]} and a cache of {dtypes[1]}"
    if not (s.values_in_keys and 512 < s.head_dim <= 576 and 256 < s.value_dim <= 512):
        return (
            "kernel 'hopper' takes a latent cache of 513 to 576 elements, of which 257 to 512 are values, not "
            f"{s.head_dim} and {s.value_dim}"
        )
    if options:
        return f"kernel 'hopper' takes no {' and no '.join(options)}"
    if group * s.n_new <= least_rows // 2 or (group % ROWS and ROWS % group):
        return (
            f"kernel 'hopper' takes over {least_rows // 2} query rows of a KV head, whose heads are a multiple or a "
            f"divisor of {ROWS}, not {group} heads and {s.n_new} tokens"
        )
    if not aligned:
        return "kernel 'hopper' takes a q and a cache whose base and strides are multiples of 16 bytes, no stride 0"
    # Scores, -inf and the lowest maximum (-1e30) are multiplied by it: the results may be neither 0 nor over float32.
    if not 2.0**-100 < scale < 2.0**27:
        return f"kernel 'hopper' takes a scale from 2^-100 to 2^27, not {scale}"
    if not 1 < s.capacity < 1 << 30 or s.batch > _MOST_SEQUENCES:
        return (
            f"kernel 'hopper' takes 2 to 2^30 - 1 keys of up to {_MOST_SEQUENCES} sequences, not {s.capacity} of "
            f"{s.batch}"
        )
    return None


def launcher(**form: Any) -> KernelLauncher:
    """The kernel of a `Form` of those arguments."""
    t = Form(**form)
    return KernelLauncher(attend_latent, {"T": t}, num_warps=4, maxnreg=_REGISTERS, **pdl.options(t.pdl))


def bind_to(
    launcher: KernelLauncher, q: Tensor, k: Tensor, s: Shape, page_table: Tensor | None, programs: int, scale: float
) -> Callable[..., None]:
    """The launch for tensors as in `can_implement`, to be called with the kernel's. `scale` is times log2(e).

    Packed queries are those of one sequence, and `s.n_new` of `s.batch` sequences.
    """
    form = launcher.constants["T"]
    of_rows, of_keys = (gl.NVMMASharedLayout(128, 16, rank=rank) for rank in (4, 5))
    return bind(
        launcher,
        programs * form.row_tiles,
        strides=(0 if page_table is None else page_table.stride(0),),
        numbers=(s.batch, s.n_new, s.kv_heads, s.capacity, s.n_pages, page_step(k), programs, scale),
        descriptors={
            0: describe(q, form.q_box, of_rows),
            1: describe_pages(k, (form.piece_rows, PART.value), of_keys),
        },
    )


def prepare(
    launcher: KernelLauncher, q: Tensor, k: Tensor, s: Shape, page_table: Tensor | None, programs: int, scale: float
) -> Callable[..., None]:
    """As `bind_to`, to be called as the launch of `decode_kernel` is."""
    start = bind_to(launcher, q, k, s, page_table, programs, scale)

    def run(q: Tensor, k: Tensor, v: None, lengths: Tensor, page_table: Tensor | None, *rest: Any) -> None:
        *_, out, lse, partial, _counters = rest
        start(q, k, out, lengths, page_table, lse, partial, None, None)

    return run
