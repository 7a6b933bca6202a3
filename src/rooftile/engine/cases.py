"""Cases of the engine's own kernels, which are no ops: what a step does between ops, as the engine calls it.

They are checked and compiled for every target like the ops in `rooftile.cases`. They are not measured by themselves:
`rooftile bench e2e` measures whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import OpCase, Point, Tolerance
from rooftile.cases.draw import integers, normal
from rooftile.engine.cache import KVCache
from rooftile.engine.cascade import MIN_SEQUENCES, MIN_TOKENS, Cascade, merge_
from rooftile.engine.column_order import order_columns
from rooftile.engine.paged_cache import PagedKVCache
from rooftile.engine.ranks import embedding_of_part, side_by_side
from rooftile.engine.softcap import softcap_
from rooftile.engine.verification import Verifier

Inputs = Callable[[Point, torch.dtype, torch.device, torch.Generator], dict[str, Tensor]]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ONE = (torch.bfloat16,)  # of kernels whose tensors have the same dtypes in any model
COPIED = dict.fromkeys(FLOATS, Tolerance(0.0, "copied unchanged"))
_ONCE = "float32 inside, rounded once: half a unit in the last place"
ROUNDED = {
    torch.float32: Tolerance(1e-6, "an exponential and a quotient in float32"),
    torch.float16: Tolerance(5e-4, _ONCE),
    torch.bfloat16: Tolerance(4e-3, _ONCE),
}


def _case(
    name: str,
    formula: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Inputs,
    outputs: tuple[str, ...],
    tolerances: Mapping[torch.dtype, Tolerance],
    sets: Mapping[str, Sequence[Point]],
    output_dtypes: Callable[[Point], Mapping[str, torch.dtype]] = lambda point: {},
    mutates: tuple[str, ...] = (),
) -> OpCase:
    return OpCase(
        name=name,
        formula=formula,
        function=function,
        reference=reference,
        eager=reference,
        inputs=inputs,
        outputs=outputs,
        grads=(),
        nbytes=lambda point, itemsize, direction: 0,
        flops=lambda point, direction: 0,
        tolerances={dtype: {"forward": t} for dtype, t in tolerances.items()},
        sets=sets,
        output_dtypes=output_dtypes,
        mutates=mutates,
    )


def _point(options: Mapping[str, Any] | None = None, **dims: int) -> Point:
    return Point(" ".join(f"{name}{n}" for name, n in dims.items()), dims, options or {})


def _int32(high: int, shape: tuple[int, ...], device: torch.device, numbers: torch.Generator) -> Tensor:
    return integers(high, shape, device, numbers).to(torch.int32)


# x[:, order]


def _columns(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    k = point["K"]
    order = torch.randperm(k, generator=numbers, device=numbers.device).to(device, torch.int32)
    return {"x": normal((point["M"], k), dtype, device, numbers), "order": order}


# cap tanh(x / cap), over x


def _logits(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    return {"x": 30 * normal((point["M"], point["V"]), dtype, device, numbers)}


# Of ranks


def _table(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    """A part of a table, and ids of the whole of it, three times as large."""
    rows = point["rows"]
    ids = _int32(3 * rows, (point["T"],), device, numbers)
    return {"ids": ids, "weight": normal((rows, point["H"]), dtype, device, numbers)}


def _embedding(ids: Tensor, weight: Tensor, first: int, scale: float) -> Tensor:
    row = ids.long() - first
    here = (row >= 0) & (row < weight.shape[0])
    return torch.where(here[:, None], scale * weight[row.clamp(0, weight.shape[0] - 1)], 0.0)


def _parts(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    return {"parts": normal((point["ranks"], point["M"], point["N"]), dtype, device, numbers)}


# Of caches


def _advance(lengths: Tensor, counts: Tensor, *, capacity: int) -> tuple[Tensor, Tensor]:
    cache = KVCache(lengths.shape[0], capacity, 1, 8, device=lengths.device)
    cache.lengths.copy_(lengths)
    cache.counts.copy_(counts)
    cache.count()
    return cache.starts, cache.lengths


def _lengths(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    given = (_int32(n, (point["B"],), device, numbers) for n in (24, 17))
    return dict(zip(("lengths", "counts"), given, strict=True))


def _pool(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    shape = point["layers"], 3, point["page"], point["H"], point["D"]
    return {name: normal(shape, dtype, device, numbers) for name in "kv"}


def _copy_shared(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A sequence has a full page and a token of the next; its fork gets a copy of that in the third."""
    layers, pages, page_size, heads, dim = k.shape
    cache = PagedKVCache(pages, page_size, heads, dim, max_sequences=2, layers=layers, dtype=k.dtype, device=k.device)
    cache.k.copy_(k)
    cache.v.copy_(v)
    first = cache.allocate()
    cache.extend({first: page_size + 1})
    cache.extend({cache.fork(first): 1})
    return cache.k, cache.v


def _third_is_second(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(x[:, [0, 1, 1]] for x in (k, v))


# Of speculation


def _tables(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    """By slot: tokens, its newest and then proposals; positions; tokens seen, counts and biases."""
    slots, t, vocab = point["slots"], point["T"], point["V"]
    return {
        "tokens": _int32(vocab, (slots, t), device, numbers),
        "starts": _int32(100, (slots,), device, numbers),
        "seen": _int32(2**31 - 1, (slots, -(-vocab // 32)), device, numbers),
        "counts": integers(9, (slots, vocab), device, numbers).to(torch.int16),
        "bias": normal((slots, vocab), torch.float32, device, numbers),
    }


def _rows(tokens: Tensor, starts: Tensor, seen: Tensor, counts: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    slots, t = tokens.shape
    cache = PagedKVCache(1, 16, 1, 8, max_sequences=slots, device=tokens.device)
    cache.starts.copy_(starts)
    verifier = Verifier(cache, slots, counts.shape[1], t - 1)
    verifier.tokens.copy_(tokens[:, 0])
    proposals = [[0] * (t - 1)] * slots if tokens.is_meta else tokens[:, 1:].tolist()
    verifier.send(dict(enumerate(proposals)))
    row_counts, row_bias = verifier.lay_out(slots, seen, counts, bias)
    assert row_counts is not None
    assert row_bias is not None
    return verifier.ids, verifier.positions, verifier.nexts, verifier.seen, row_counts, row_bias


def _rows_reference(tokens: Tensor, starts: Tensor, seen: Tensor, counts: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    slots, t = tokens.shape
    seen, counts = (x.repeat_interleave(t, 0) for x in (seen, counts))
    for row in range(slots * t):
        for token in tokens[row // t, 1 : row % t + 1].tolist():
            seen[row, token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)
            counts[row, token] += 1
    positions = (starts[:, None] + torch.arange(t, device=starts.device)).flatten()
    return tokens.flatten(), positions, positions + 1, seen, counts, bias.repeat_interleave(t, 0)


# Of sequences that begin alike

PAGE = 64
COMMON = -(-MIN_TOKENS // PAGE)  # pages


def _pages(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    b = point["B"]
    lengths, table = _int32(2 * MIN_TOKENS, (b,), device, numbers), _int32(999, (b, point["pages"]), device, numbers)
    return {"lengths": lengths, "table": table}


def _divide(lengths: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """The sequences of a group, as the host knows them, with lengths and pages as given on the device."""
    b, width = table.shape
    cache = PagedKVCache(COMMON + b, PAGE, 1, 8, max_sequences=b, max_seq_len=width * PAGE, device=lengths.device)
    first = cache.allocate()
    cache.extend({first: COMMON * PAGE})
    for _ in range(b - 1):
        cache.fork(first)
    cache.extend(1)
    cache.lengths.copy_(lengths)
    cache.page_table.copy_(table)
    cascade = Cascade(cache)
    assert cascade.groups(cache.sequences)
    cascade.lay_out(b)
    return cascade.common, cascade.first, cascade.rest, cascade.rest_table


def _divide_reference(lengths: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    common = torch.full_like(lengths, COMMON * PAGE)
    rest_table = torch.nn.functional.pad(table[:, COMMON:], (0, COMMON), value=-1)
    return common, table[:1], (lengths - common).clamp(min=0), rest_table


def _two_parts(point: Point, dtype: torch.dtype, device: torch.device, numbers: torch.Generator) -> dict[str, Tensor]:
    """The first row has no keys in the common part, the second none in the rest, and the third none at all."""
    b, heads, together = point["B"], point["Hq"], point["together"]
    common, out = (normal((b, heads, point["D"]), dtype, device, numbers) for _ in range(2))
    lses = (3 * normal((b * heads,), torch.float32, device, numbers) for _ in range(2))
    lse_by_row, common_lse_by_row = lses
    common_lse_by_row[0:3:2] = lse_by_row[1:3] = -torch.inf
    common_lse = common_lse_by_row.view(b // together, together, heads).transpose(1, 2).contiguous()
    return {"common": common, "common_lse": common_lse, "out": out, "lse": lse_by_row.view(b, heads)}


def _merge(common: Tensor, common_lse: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    lses = torch.stack((common_lse.transpose(1, 2).reshape(lse.shape), lse))
    weights = lses.softmax(0).nan_to_num(0.0)[..., None]  # neither part has a key: 0
    return weights[0].to(out.dtype) * common + weights[1].to(out.dtype) * out


CASES = (
    _case(
        "order_columns", "y = x[:, order]", order_columns, lambda x, order: x[:, order.long()], _columns, ("y",),
        COPIED,
        {
            "tiny": (_point(M=3, K=64), _point(M=2, K=1100)),
            "edge": (_point(M=1, K=1), _point(M=5, K=1025)),
            "llm": (_point(M=1, K=4096), _point(M=16, K=14336)),
        },
    ),
    _case(
        "softcap_", "x = cap · tanh(x / cap)", softcap_, lambda x, cap: cap * torch.tanh(x / cap), _logits, ("x",),
        ROUNDED,
        {
            "tiny": (_point({"cap": 30.0}, M=2, V=600),),
            "edge": (_point({"cap": 50.0}, M=1, V=1), _point({"cap": 30.0}, M=1, V=1025)),
            "llm": (_point({"cap": 30.0}, M=8, V=256000),),
        },
        mutates=("x",),
    ),
    _case(
        "embedding_of_part", "y = scale · weight[ids - first], 0 for ids of other ranks", embedding_of_part, _embedding,
        _table, ("y",), ROUNDED,
        {
            "tiny": tuple(_point({"first": 7, "scale": s}, T=9, rows=7, H=64) for s in (1.0, 8.0)),
            "edge": (
                _point({"first": 0, "scale": 1.0}, T=1, rows=1, H=1),
                _point({"first": 10, "scale": 1.0}, T=30, rows=5, H=1025),
            ),
            "llm": (_point({"first": 32000, "scale": 1.0}, T=64, rows=32000, H=4096),),
        },
    ),
    _case(
        "side_by_side", "y[m] = [parts[0, m] | parts[1, m] | ...]", side_by_side,
        lambda parts: parts.transpose(0, 1).flatten(1), _parts, ("y",), COPIED,
        {
            "tiny": (_point(ranks=2, M=3, N=64),),
            "edge": (_point(ranks=3, M=2, N=1025), _point(ranks=2, M=1, N=5)),
            "llm": (_point(ranks=8, M=8, N=16032),),
        },
    ),
    _case(
        "advance", "start = length, length = min(length + count, capacity)", _advance,
        lambda lengths, counts, capacity: (lengths, (lengths + counts).clamp(max=capacity)), _lengths,
        ("starts", "lengths"), {dtype: COPIED[dtype] for dtype in ONE},
        {
            "tiny": (_point({"capacity": 32}, B=3),),
            "edge": (_point({"capacity": 32}, B=1), _point({"capacity": 32}, B=1025)),
            "llm": (_point({"capacity": 32}, B=64),),
        },
        lambda point: dict.fromkeys(("starts", "lengths"), torch.int32),
    ),
    _case(
        "copy_shared", "page 2 = page 1, in every layer", _copy_shared, _third_is_second, _pool, ("k", "v"), COPIED,
        {
            "tiny": (_point(layers=2, page=16, H=1, D=8),),
            "edge": (_point(layers=3, page=16, H=3, D=24),),
            "llm": (_point(layers=32, page=16, H=8, D=128),),
        },
    ),
    _case(
        "rows_of_slots", "row (slot, i) = what the slot has with proposals 1 to i", _rows, _rows_reference, _tables,
        ("ids", "positions", "nexts", "seen", "counts", "bias"), {dtype: COPIED[dtype] for dtype in ONE},
        {
            "tiny": (_point(slots=3, T=4, V=70),),
            "edge": (_point(slots=1, T=2, V=1), _point(slots=2, T=3, V=4100)),
            "llm": (_point(slots=8, T=5, V=128256),),
        },
        lambda point: {
            **dict.fromkeys(("ids", "positions", "nexts", "seen"), torch.int32),
            "counts": torch.int16, "bias": torch.float32,
        },
    ),
    _case(
        "divide_pages", "tokens and pages of the common part, and of what each sequence has behind it", _divide,
        _divide_reference, _pages, ("common", "first", "rest", "rest_table"), {dtype: COPIED[dtype] for dtype in ONE},
        {
            "tiny": (_point(B=MIN_SEQUENCES, pages=COMMON + 3),),
            "edge": (_point(B=11, pages=COMMON + 1), _point(B=MIN_SEQUENCES, pages=1025)),
            "llm": (_point(B=32, pages=512),),
        },
        lambda point: dict.fromkeys(("common", "first", "rest", "rest_table"), torch.int32),
    ),
    _case(
        "merge_", "out = (e^common_lse · common + e^lse · out) / (e^common_lse + e^lse)", merge_, _merge, _two_parts,
        ("out",), ROUNDED,
        {
            "tiny": (_point(B=8, Hq=2, D=64, together=4),),
            "edge": (_point(B=3, Hq=1, D=24, together=3), _point(B=11, Hq=3, D=1, together=1)),
            "llm": (_point(B=32, Hq=32, D=128, together=16),),
        },
        mutates=("out",),
    ),
)  # fmt: skip
