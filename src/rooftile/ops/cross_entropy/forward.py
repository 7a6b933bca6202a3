"""Cross entropy forward: the loss of each row, and where it is known in time, the gradient of the logits.

It is bound by memory. A program has one row. Its first pass is an online softmax (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867): each thread keeps a maximum and a sum of exponentials for the few elements of a load,
and rescales the sum when the maximum grows, so that the threads need no reduction before the end. It also keeps what
label smoothing, entropy and argmax need. The second pass, where the forward computes the gradient, writes it. The first
blocks of a row stay in registers for it. The rest is read again from the last block to the first, so that what was read
last, and is most likely still in the L2, comes first.

An ignored row is not read; its gradient is written as zeros. A target that is out of range is not looked up: it makes
the row's loss and gradient NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.primitives.loss_gradient import GRADIENTS
from rooftile.primitives.mean_of_tokens import bind_mean
from rooftile.primitives.partials import prepare_total
from rooftile.primitives.rows import RowConfig, row_launcher, row_length

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.language.extra import libdevice  # isort: skip

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG2E = tl.constexpr(1.4426950408889634)
NO_COLUMN = tl.constexpr(2**31 - 1)

REDUCTIONS = ("mean", "sum", "none")
TARGETS = (torch.int64, torch.int32)
FACTORS = 4  # what the backward needs of a row: maximum, and the factors of exponentials, target and smoothing
STRIDE = tl.constexpr(FACTORS)


@triton.jit
def row_offset(row, n_inner, stride_xo, stride_xi):
    """Where a row of the logits begins: rows are indexed as (outer, inner), see `rows_layout`."""
    return (row // n_inner).to(tl.int64) * stride_xo + (row % n_inner).to(tl.int64) * stride_xi


@triton.jit
def capped(x, SOFTCAP: tl.constexpr, SCALE: tl.constexpr):
    """x, or `SOFTCAP * tanh(x / SOFTCAP)`; times SCALE."""
    if SOFTCAP > 0:
        x = SOFTCAP * libdevice.tanh(x * (1.0 / SOFTCAP))
    if SCALE != 1.0:
        x *= SCALE
    return x


@triton.jit
def logits_gradient(
    x, cols, target, top, factor, at_target, smoothing, weight, SOFTCAP: tl.constexpr, SCALE: tl.constexpr
):
    """The gradient of a row's logits, from those columns of them, capped and scaled; -inf where there is none.

    `factor` times the exponentials, less `at_target` at the target, less `smoothing * weight` everywhere; `smoothing`
    is None without label smoothing.
    """
    dx = tl.exp2((x - top) * LOG2E) * factor
    dx -= tl.where(cols == target, at_target, 0.0)
    if smoothing is not None:
        dx -= smoothing * weight
    if SOFTCAP > 0:
        tanh = x * (1.0 / (SOFTCAP * SCALE))
        dx *= 1.0 - tanh * tanh
    if SCALE != 1.0:
        dx *= SCALE
    return dx


@triton.jit
def class_weights(weight_ptr, cols, mask, HAS_WEIGHT: tl.constexpr):
    """The weights of those classes; 1 for each without weights, and 0 outside the mask."""
    if HAS_WEIGHT:
        return tl.load(weight_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        return tl.where(mask, 1.0, 0.0)


@triton.jit
def _load(x_ptr, cols, n_cols, counts, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """A block of a row as it is in memory; -inf past its end, and everywhere in a row that does not count."""
    if EVEN:
        mask = tl.full(cols.shape, True, tl.int1) & counts
    else:
        mask = (cols < n_cols) & counts
    return tl.load(x_ptr + cols, mask=mask, other=float("-inf"), eviction_policy=POLICY)


@triton.jit
def _extend(
    state,
    raw,
    weight_ptr,
    cols,
    n_cols,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    SMOOTHS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    STATS: tl.constexpr,
):
    """What is kept of the row, with one more block: see `_row_kernel`."""
    tops, sums, weighted, weights, slopes, bests = state
    inside = cols < n_cols
    x = capped(raw.to(tl.float32), SOFTCAP, SCALE)
    if SOFTCAP > 0:
        x = tl.where(inside, x, float("-inf"))
    here = tl.max(x, axis=1, keep_dims=True)
    new = tl.maximum(tops, here)
    decay = tl.exp2((tops - new) * LOG2E)
    exp = tl.exp2((x - new) * LOG2E)
    if STATS:
        fall = tl.maximum(tops - new, -1e30)  # finite for the first block too: sums is 0 there, and 0 * inf is NaN
        slope = tl.where(exp == 0.0, 0.0, exp * (x - new))
        slopes = decay * (slopes + fall * sums) + tl.sum(slope, axis=1, keep_dims=True)
        best = tl.min(tl.where(x == here, cols, NO_COLUMN), axis=1, keep_dims=True)
        bests = tl.where(here > tops, best, tl.where(here == tops, tl.minimum(bests, best), bests))
    sums = sums * decay + tl.sum(exp, axis=1, keep_dims=True)
    if SMOOTHS:
        weight = class_weights(weight_ptr, cols, inside, HAS_WEIGHT)
        weighted += tl.sum(tl.where(inside, x * weight, 0.0), axis=1, keep_dims=True)
        if HAS_WEIGHT:
            weights += tl.sum(weight, axis=1, keep_dims=True)
    return new, sums, weighted, weights, slopes, bests


@triton.jit
def _store_gradient(
    dlogits_ptr,
    raw,
    weight_ptr,
    cols,
    n_cols,
    target,
    top,
    factor,
    at_target,
    smoothing,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    inside = cols < n_cols
    weight = None
    if smoothing is not None:
        weight = class_weights(weight_ptr, cols, inside, HAS_WEIGHT)
    x = capped(raw.to(tl.float32), SOFTCAP, SCALE)
    dx = logits_gradient(x, cols, target, top, factor, at_target, smoothing, weight, SOFTCAP, SCALE)
    tl.store(dlogits_ptr + cols, dx.to(dlogits_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit(do_not_specialize=["n_inner", "ignore_index"])
def _row_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    token_weight_ptr,
    inverse_ptr,
    loss_ptr,
    dlogits_ptr,
    factors_ptr,
    logprob_ptr,
    entropy_ptr,
    argmax_ptr,
    stride_xo,
    stride_xi,
    n_cols,
    n_inner,
    ignore_index,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    MEAN: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_TOKEN_WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FACTORED: tl.constexpr,
    STATS: tl.constexpr,
    PART: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
    HELD: tl.constexpr,
):
    """A row of all classes, or with `PART` of some, of which it writes what distributed.py combines with the others."""
    LANES: tl.constexpr = BLOCK_N // PACK
    SMOOTHS: tl.constexpr = SMOOTHING > 0
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row_offset(tl.program_id(0), n_inner, stride_xo, stride_xi)
    # The PACK elements that a thread loads at once share a maximum and sums.
    block = tl.arange(0, LANES)[:, None] * PACK + tl.arange(0, PACK)[None, :]
    blocks = tl.cdiv(n_cols, BLOCK_N)

    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    known = counts & (target >= 0) & (target < n_cols)
    at = capped(tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32), SOFTCAP, SCALE)
    own = tl.where(counts, 1.0, 0.0)
    if HAS_WEIGHT:
        own = tl.load(weight_ptr + target, mask=known, other=0.0).to(tl.float32)
    share = tl.where(counts, 1.0, 0.0)
    if HAS_TOKEN_WEIGHT:
        share = tl.load(token_weight_ptr + row, mask=counts, other=0.0).to(tl.float32)
    scale = share
    if MEAN:
        scale = tl.where(counts, share * tl.load(inverse_ptr), 0.0)

    held = ()
    for i in tl.static_range(HELD):
        raw = _load(logits_ptr, i * BLOCK_N + block, n_cols, counts, EVEN, "evict_first")
        held += (raw,)  # type: ignore[assignment]
    # Of each lane: the maximum, the sum of exponentials to its base, the weighted sum of logits, the sum of weights,
    # the sum of exponentials times their exponents, and the first column of the maximum.
    zeros = tl.zeros((LANES, 1), tl.float32)
    tops = tl.full((LANES, 1), LOWEST, tl.float32)
    state = (tops, zeros, zeros, zeros, zeros, tl.full((LANES, 1), NO_COLUMN, tl.int32))
    for i in tl.range(HELD, blocks, num_stages=1):
        cols = i * BLOCK_N + block
        raw = _load(logits_ptr, cols, n_cols, counts, EVEN, "evict_last" if GRADIENT else "evict_first")
        state = _extend(state, raw, weight_ptr, cols, n_cols, SOFTCAP, SCALE, SMOOTHS, HAS_WEIGHT, STATS)
    for i in tl.static_range(HELD):
        cols = i * BLOCK_N + block
        state = _extend(state, held[i], weight_ptr, cols, n_cols, SOFTCAP, SCALE, SMOOTHS, HAS_WEIGHT, STATS)
    tops, sums, weighted, weights, slopes, bests = state
    top = tl.max(tops)
    decay = tl.exp2((tops - top) * LOG2E)
    total = tl.sum(sums * decay)
    log_total = tl.log(total)
    lse = top + log_total

    at_target = tl.where(known | (target == ignore_index), (1.0 - SMOOTHING) * own, float("nan"))
    surprise = (top - at) + log_total  # lse - at would have the rounding error of lse, more than a small loss
    loss = at_target * surprise
    along = at_target
    smoothing = None
    if SMOOTHS:
        each = SMOOTHING / n_cols
        mass = tl.sum(weights) if HAS_WEIGHT else n_cols * 1.0
        loss += each * (mass * lse - tl.sum(weighted))
        along += each * mass
        smoothing = scale * each
    if Z_LOSS > 0:
        loss += Z_LOSS * lse * lse
        along += 2.0 * Z_LOSS * lse
    if not PART:
        tl.store(loss_ptr + row, tl.where(counts, share * loss, 0.0))
    factor = tl.where(counts, scale * along / total, 0.0)
    at_target *= scale
    if FACTORED or PART:
        factors_ptr += row * STRIDE
        tl.store(factors_ptr, top)
        tl.store(factors_ptr + 1, total if PART else factor)
        tl.store(factors_ptr + 2, tl.where(known, at, 0.0) if PART else at_target)
        tl.store(factors_ptr + 3, (tl.sum(weighted) if PART else smoothing) if SMOOTHS else 0.0)
    if STATS:
        fall = tl.maximum(tops - top, -1e30)
        slope = tl.sum(decay * (slopes + fall * sums))
        best = tl.min(tl.where(tops == top, bests, NO_COLUMN))
        if not PART:
            tl.store(logprob_ptr + row, tl.where(counts, -surprise, 0.0))
        tl.store(entropy_ptr + row, tl.where(counts, log_total - slope / total, 0.0))
        tl.store(argmax_ptr + row, tl.where(counts, tl.minimum(best, n_cols - 1), -1).to(tl.int64))

    if GRADIENT:
        # In place, each block is read before it is written, and no other program has the row.
        dlogits_ptr = logits_ptr if IN_PLACE else dlogits_ptr + row * n_cols
        for i in tl.range(0, blocks - HELD, num_stages=1):
            cols = (blocks - 1 - i) * BLOCK_N + block
            raw = _load(logits_ptr, cols, n_cols, counts, EVEN, "evict_first")
            _store_gradient(
                dlogits_ptr,
                raw,
                weight_ptr,
                cols,
                n_cols,
                target,
                top,
                factor,
                at_target,
                smoothing,
                SOFTCAP,
                SCALE,
                HAS_WEIGHT,
            )
        for i in tl.static_range(HELD):
            cols = i * BLOCK_N + block
            _store_gradient(
                dlogits_ptr,
                held[i],
                weight_ptr,
                cols,
                n_cols,
                target,
                top,
                factor,
                at_target,
                smoothing,
                SOFTCAP,
                SCALE,
                HAS_WEIGHT,
            )


@dataclasses.dataclass(frozen=True)
class Rows:
    """How the rows of logits lie in memory: `inner` of them `stride_inner` apart, such groups `stride_outer` apart."""

    n: int
    inner: int
    stride_outer: int
    stride_inner: int

    @property
    def aligned(self) -> bool:
        """Whether all rows can be read in whole vectors if the first can."""
        return self.stride_outer % 16 == 0 and self.stride_inner % 16 == 0


def rows_layout(logits: Tensor, copies: library.Copies, place: int) -> Rows:
    """The rows of such logits, which go into `copies` if two strides do not describe them.

    Two are enough for the logits of all but the last token, `logits[:, :-1]`, which need no copy.
    """
    dims: list[tuple[int, int]] = []
    for n, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * stride:
            dims[-1] = (dims[-1][0] * n, stride)
        else:
            dims.append((n, stride))
    if len(dims) > 2 or (logits.stride(-1) != 1 and logits.shape[-1] > 1):
        copies[place] = Tensor.contiguous
        dims = [(logits.numel() // logits.shape[-1], logits.shape[-1])]
    (outer, stride_outer), (inner, stride_inner) = [(1, 0)] * (2 - len(dims)) + dims
    return Rows(outer * inner, inner, stride_outer, stride_inner)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call asks for, as the op's arguments after its tensors.

    Attributes:
        softcap: 0 is none.
        gradient: of logits: one of `loss_gradient.GRADIENTS`. For "later" the forward writes what the backward needs of
            each row.
        stats: whether log-probability, entropy and argmax of each row are wanted.
        temperature: divides the capped logits.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    gradient: str
    stats: bool
    temperature: float = 1.0


def check(
    logits: Tensor, target: Tensor, weight: Tensor | None, token_weights: Tensor | None, options: Options
) -> None:
    op = "cross_entropy"
    library.check_floating(op, logits=logits, weight=weight, token_weights=token_weights)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        shape = tuple(logits.shape)
        raise ValueError(f"{op}: logits has shape {shape}, expected at least one dimension, the last of 1 or more")
    if target.dtype not in TARGETS:
        raise TypeError(f"{op}: target has dtype {target.dtype}, expected int64 or int32, the indices of classes")
    leading, classes = tuple(logits.shape[:-1]), logits.shape[-1]
    for name, tensor in (("target", target), ("token_weights", token_weights)):
        if tensor is not None and tuple(tensor.shape) != leading:
            raise ValueError(
                f"{op}: {name} has shape {tuple(tensor.shape)}, expected {leading} to match logits' leading dimensions"
            )
    if weight is not None and weight.shape != (classes,):
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected ({classes},) to match logits' last dimension"
        )
    check_options(op, options)


def check_options(op: str, options: Options) -> None:
    for name in ("label_smoothing", "z_loss", "softcap"):
        number = getattr(options, name)
        if isinstance(number, bool) or not isinstance(number, (float, int)):
            raise TypeError(f"{op}: {name} is {library.named(number)}, expected a number")
    if not 0 <= options.label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing is {options.label_smoothing}, expected a number from 0 to 1")
    for name in ("z_loss", "softcap"):
        number = getattr(options, name)
        if not 0 <= number < math.inf:
            raise ValueError(f"{op}: {name} is {number}, expected a finite number of 0 or more")
    for name, accepted in (("reduction", REDUCTIONS), ("gradient", GRADIENTS)):
        if getattr(options, name) not in accepted:
            raise ValueError(f"{op}: {name} is {getattr(options, name)!r}, expected one of {', '.join(accepted)}")
    if options.gradient == "now" and options.reduction == "none":
        raise ValueError(f"{op}: gradient is 'now', expected 'later', as reduction is 'none'")
    if not isinstance(options.stats, bool):
        raise TypeError(f"{op}: return_stats is {library.named(options.stats)}, expected a bool")


@functools.cache
def config(n_cols: int, itemsize: int, options: Options, target: runtime.Target) -> RowConfig:
    """Blocks of 32 bytes a thread. Two blocks of a row stay in registers for its gradient: as many as fit those of two
    programs of 512 threads on an SM, or of one of 1024 threads where the rows of two would be too much for the L2.
    """
    whole = library.power_of_two(n_cols)
    if target is runtime.INTERPRETER:
        return RowConfig("loop", min(whole, 8192), num_warps=4)
    gradient = options.gradient == "now"
    long = gradient and n_cols * itemsize > 65536
    block_n = max(min(whole, (32768 if long else 16384) // itemsize), 128)
    warps = max(1, block_n * itemsize // 1024 * 32 // target.warp_size)
    held = min(2, library.cdiv(n_cols, block_n)) if gradient else 0
    # Smoothing, a soft cap and loads of single elements need more registers; AMD's compiler has no such limit.
    plain = not options.label_smoothing and not options.softcap and n_cols % 16 == 0 and target.warp_size == 32
    limit = 64 if held and plain and not long else None
    return RowConfig("loop", block_n, num_warps=warps, held=held, max_registers=limit)


def elements_at_once(rows: Rows, n_cols: int, itemsize: int) -> int:
    """The elements of a load: rows that are not aligned to 16 bytes are loaded one by one."""
    vectors = n_cols % 16 == 0 and rows.aligned and runtime.MODE is not runtime.Mode.INTERPRETER
    return 16 // itemsize if vectors else 1


@functools.cache
def _launcher(
    dtypes: tuple[torch.dtype | None, ...], options: Options, in_place: bool, part: bool, even: bool, pack: int,
    c: RowConfig,
) -> launching.KernelLauncher:  # fmt: skip
    _, _, weight, token_weight = dtypes
    return row_launcher(
        _row_kernel,
        c,
        rounds_products=options.temperature != 1.0,
        SMOOTHING=float(options.label_smoothing),
        Z_LOSS=float(options.z_loss),
        SOFTCAP=float(options.softcap),
        SCALE=1 / options.temperature,
        MEAN=options.reduction == "mean" and options.gradient != "none",
        HAS_WEIGHT=weight is not None,
        HAS_TOKEN_WEIGHT=token_weight is not None,
        GRADIENT=options.gradient == "now",
        IN_PLACE=in_place,
        FACTORED=options.gradient == "later",
        STATS=options.stats,
        PART=part,
        EVEN=even,
        PACK=pack,
    )


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if t is None else t.dtype for t in tensors)


def bind_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    token_weights: Tensor | None,
    options: Options,
    *,
    in_place: bool = False,
    part: bool = False,
) -> Callable[..., None]:
    """The launch over all rows, of which there is at least one.

    It is called with those tensors, one over the divisor (for a gradient of "mean"), the losses of the rows in float32,
    by which "mean" has not divided yet, the gradient of logits, the factors, and the three statistics; None for what
    the options do not ask for.

    Args:
        in_place: the gradient takes the place of the logits; the launch is given None for it.
        part: the logits are those of some of the classes. In place of losses and factors the launch writes of each row
            its maximum, the sum of exponentials to that base, the logit of the target (0 if it is not among them), and
            with label smoothing the weighted sum of logits. It writes no log-probability.
    """
    copies: library.Copies = {}
    rows = rows_layout(logits, copies, 0)
    assert not (in_place and copies), "the rows of logits that are written in place lie two strides apart"
    for place, tensor in ((1, target), (2, weight), (3, token_weights)):
        library.contiguous_of(tensor, copies, place)
    n_cols = row_length(logits)
    c = config(n_cols, logits.element_size(), options, runtime.target(logits.device))
    pack = elements_at_once(rows, n_cols, logits.element_size())
    dtypes = _dtypes(logits, target, weight, token_weights)
    launcher = _launcher(dtypes, options, in_place, part, n_cols % c.block_n == 0, pack, c)
    strides = (rows.stride_outer, rows.stride_inner, n_cols)
    start = launching.bind(launcher, rows.n, strides=strides, numbers=(rows.inner, options.ignore_index))
    return library.copying(start, copies)


Outputs = tuple[Tensor, ...]


def prepare(
    stats: bool, logits: Tensor, target: Tensor, weight: Tensor | None, token_weights: Tensor | None, *args: Any
) -> Callable[..., Outputs]:
    """What gives the loss, what the backward needs (the gradient of logits, the factors of the rows, or nothing), and
    the statistics, if they are asked for."""
    options = Options(*(*args, stats))
    check(logits, target, weight, token_weights, options)
    outputs = [(shape, library.contiguous_strides(shape), dtype) for shape, dtype in _outputs(logits, target, options)]
    device, n_rows = logits.device, target.numel()
    if not n_rows:
        return lambda *_: tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, _, dtype in outputs)
    now, later = options.gradient == "now", options.gradient == "later"
    mean, reduces = options.reduction == "mean", options.reduction != "none"
    divides = mean and (now or later)
    start = bind_rows(logits, target, weight, token_weights, options)
    invert = add_up = library.start_nothing
    of = target, weight, token_weights
    if divides:
        invert = bind_mean(*of, False, row_length(logits), options.ignore_index)
    if mean:
        average = bind_mean(*of, True, row_length(logits), options.ignore_index)
    elif reduces:
        add_up = prepare_total(n_rows, 1.0, torch.float32)

    def run(logits: Tensor, target: Tensor, weight: Tensor | None, token_weights: Tensor | None, *_: object) -> Outputs:
        results = [torch.empty_strided(shape, st, dtype=dtype, device=device) for shape, st, dtype in outputs]
        loss, saved, *stats = results
        losses = torch.empty_strided((n_rows,), (1,), dtype=torch.float32, device=device) if reduces else loss
        inverse = torch.empty_strided((), (), dtype=torch.float32, device=device) if divides else None
        if divides:
            invert(target, weight, token_weights, None, inverse)
        start(
            logits, target, weight, token_weights, inverse, losses, saved if now else None, saved if later else None,
            *(stats or (None,) * 3),
        )  # fmt: skip
        if mean:
            average(target, weight, token_weights, losses, loss)
        elif reduces:
            add_up(losses, loss)
        return tuple(results)

    return run


def _outputs(logits: Tensor, target: Tensor, options: Options) -> tuple[tuple[Sequence[int], torch.dtype], ...]:
    """Shapes and dtypes of the op's results; a loss without rows is 0, and so is all else."""
    leading = target.shape
    saved = {
        "none": ((0,), torch.float32),
        "now": (logits.shape, logits.dtype),
        "later": ((target.numel(), FACTORS), torch.float32),
    }
    stats = ((leading, torch.float32), (leading, torch.float32), (leading, torch.int64)) if options.stats else ()
    return ((leading if options.reduction == "none" else (), torch.float32), saved[options.gradient], *stats)


def fake(
    stats: bool, logits: Tensor, target: Tensor, weight: Tensor | None, token_weights: Tensor | None, *args: Any
) -> Outputs:
    options = Options(*(*args, stats))
    check(logits, target, weight, token_weights, options)
    device = logits.device
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in _outputs(logits, target, options))
