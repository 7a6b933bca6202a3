from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.ops.sample import accept_drafts_, mark_seen_, sample, sample_, top_logprobs
from rooftile.reference import sample as reference

# A row's two best sums of logit and noise are as near as float32's rounding (1e-6) in one row of a million, and those
# of the points are fixed; a threshold that is rounded apart moves a token of little probability in or out.
_TOKENS = Tolerance(0.0, "the token itself: two that rounding could exchange are not among what is drawn")
_LOGPROBS = "a difference in float32 of a logit and a logarithm, both some units in size"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    dtype: {"forward": Tolerance(1e-6, _LOGPROBS)} for dtype in (torch.float32, torch.float16, torch.bfloat16)
}
_COUNTS = Tolerance(0.0, "whole numbers, which are counted exactly")
_BITS = Tolerance(0.0, "bits, which are set or not")


def _point(
    rows: int,
    vocabulary: int,
    *,
    given: bool = False,
    seen: bool = False,
    counts: bool = False,
    bias: bool = False,
    mask: bool = False,
    **options: object,
) -> Point:
    """`given`: each row has parameters of its own, in tensors, and one in four is greedy. The others: that table."""
    named = {"by row": given, "seen": seen, "counts": counts, "bias": bias, "mask": mask}
    label = " ".join((f"B{rows} V{vocabulary}", *(name for name, there in named.items() if there)))
    seen = seen or given or "repetition_penalty" in options
    tables = {"given": given, "seen": seen, "counts": counts, "bias": bias, "mask": mask}
    return Point(
        label, {"rows": rows, "vocabulary": vocabulary, **{n: int(there) for n, there in tables.items()}}, options
    )


def _words(point: Point, device: torch.device, generator: torch.Generator) -> Tensor:
    """Each token is seen by one row in two."""
    shape = (point["rows"], -(-point["vocabulary"] // 32))
    return (integers(2**32, shape, device, generator) - 2**31).to(torch.int32)


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    rows = point["rows"]
    drawn = {"logits": normal((rows, point["vocabulary"]), dtype, device, generator)}
    if point["given"]:

        def uniform() -> Tensor:
            return integers(1 << 20, (rows,), device, generator).float() / (1 << 20)

        drawn["temperature"] = (2 * uniform() - 0.5).clamp(min=0)
        drawn["top_k"] = integers(64, (rows,), device, generator).to(torch.int32)
        drawn["top_p"] = 0.5 + 0.625 * uniform()
        drawn["min_p"] = 0.125 * uniform()
        drawn["repetition_penalty"] = 1 + 0.5 * (uniform() - 0.5).clamp(min=0)
        if point["counts"]:
            drawn["presence_penalty"] = 2 * uniform() - 1
            drawn["frequency_penalty"] = 2 * (uniform() - 0.5).clamp(min=0)
        drawn["seeds"] = integers(2**62, (rows,), device, generator)
        drawn["positions"] = integers(8192, (rows,), device, generator).to(torch.int32)
    if point["seen"]:
        drawn["seen"] = _words(point, device, generator)
    shape = (rows, point["vocabulary"])
    if point["counts"]:
        drawn["counts"] = (integers(6, shape, device, generator) - 3).clamp(min=0).to(torch.int16)
    if point["bias"]:
        drawn["logit_bias"] = normal(shape, torch.float32, device, generator)
    if point["mask"]:
        drawn["mask"] = _words(point, device, generator)
    return drawn


def _inputs_in_place(
    point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    rows = point["rows"]
    drawn = {
        "tokens": integers(point["vocabulary"], (rows,), device, generator).to(torch.int32),
        "logprobs": normal((rows,), torch.float32, device, generator),
    }
    return drawn | _inputs(point, dtype, device, generator)


def _run_in_place(
    tokens: Tensor,
    logprobs: Tensor,
    logits: Tensor,
    *,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    sample_(tokens, logprobs, logits, seen=seen, counts=counts, **options)
    return tokens, logprobs, *_or_none(seen, counts, logits)


def _or_none(seen: Tensor | None, counts: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty((0,), dtype=torch.int32, device=like.device) if seen is None else seen,
        torch.empty((0,), dtype=torch.int16, device=like.device) if counts is None else counts,
    )


def _own(run: Callable[..., Any]) -> Callable[..., Any]:
    """A reference, its tokens in the dtype of those that the op writes."""

    def own(tokens: Tensor, logprobs: Tensor, logits: Tensor, **given: Any) -> tuple[Tensor, ...]:
        new, logprob, seen, counts = run(tokens, logprobs, logits, **given)
        return new.to(tokens.dtype), logprob, *_or_none(seen, counts, logits)

    return own


def _of_rows(point: Point) -> int:
    """Bytes of a row's parameters."""
    return (5 * 4 + 8 + 4 + 8 * point["counts"]) if point["given"] else 0


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """The logits, what rows have of their own, bits, counts and biases; a token and a log-probability written."""
    words = -(-point["vocabulary"] // 32) * (point["seen"] + point["mask"])
    of_token = itemsize + 2 * point["counts"] + 4 * point["bias"]
    return point["rows"] * (of_token * point["vocabulary"] + 4 * words + _of_rows(point) + 12)


def _nbytes_in_place(point: Point, itemsize: int, direction: Direction) -> int:
    """As `sample`, a token of 4 bytes; and a word of seen tokens, and a count, read and written where there are any."""
    return _nbytes(point, itemsize, direction) + point["rows"] * (8 * point["seen"] + 4 * point["counts"] - 4)


def _flops(point: Point, direction: Direction) -> int:
    """A maximum, a difference, an exponential and a sum for each logit."""
    return 4 * point["rows"] * point["vocabulary"]


def _argmax(point: Point) -> Callable[..., Any]:
    if point.options.get("temperature", 0.0) != 0.0 or any(point[n] for n in ("seen", "counts", "bias", "mask")):
        raise Unsupported("torch.argmax draws nothing and changes no logits")

    def run(logits: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        top, tokens = logits.max(-1)
        return tokens, top.float() - torch.logsumexp(logits.float(), dim=-1)

    return run


def _topk(point: Point) -> Callable[..., Any]:
    """As `torch.topk` alone would be used: its log-probabilities need the sum only."""

    def run(logits: Tensor, k: int = 20) -> tuple[Tensor, Tensor]:
        top, tokens = logits.topk(k, dim=-1)
        return tokens, top.float() - torch.logsumexp(logits.float(), dim=-1, keepdim=True)

    return run


def _top_inputs(
    point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    """The largest logits of a row differ: `torch.topk` orders equals as it likes."""
    rows, n_cols = point["rows"], point["vocabulary"]
    logits = normal((rows, n_cols), dtype, device, generator).clamp(max=2.0)
    n = min(20, n_cols)
    each = torch.arange(n, device=device)
    places = (integers(n_cols, (rows, 1), device, generator) + each * (n_cols // n)) % n_cols
    largest = 2.5 + 0.5 * ((7 * each + 3) % n)
    return {"logits": logits.scatter(1, places, largest.to(dtype).expand(rows, n))}


def _top_nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """The logits; k tokens and log-probabilities written."""
    return point["rows"] * (itemsize * point["vocabulary"] + 12 * point.options.get("k", 20))


def _top_point(rows: int, vocabulary: int, **options: int) -> Point:
    return Point(f"B{rows} V{vocabulary}", {"rows": rows, "vocabulary": vocabulary}, options)


def _mark_inputs(
    point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    n = point["rows"]
    return {
        "seen": _words(Point("", {"rows": point["batch"], "vocabulary": point["vocabulary"]}), device, generator),
        "ids": integers(point["vocabulary"], (n,), device, generator).to(torch.int32),
        "row_of": integers(point["batch"], (n,), device, generator).to(torch.int32),
    }


def _run_mark(seen: Tensor, ids: Tensor, row_of: Tensor) -> Tensor:
    mark_seen_(seen, ids, row_of)
    return seen


def _mark_nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Ids and rows read; a word read and written for each id, or all of them where there are fewer."""
    words = point["batch"] * -(-point["vocabulary"] // 32)
    return 8 * point["rows"] + 8 * min(words, point["rows"])


def _mark_point(ids: int, batch: int, vocabulary: int) -> Point:
    return Point(f"T{ids} B{batch} V{vocabulary}", {"rows": ids, "batch": batch, "vocabulary": vocabulary})


def _accept_inputs(
    point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> dict[str, Tensor]:
    """Two proposals in three are those that were drawn."""
    rows, n_tokens, vocabulary = point["rows"], point["tokens"], point["vocabulary"]
    drawn = integers(vocabulary, (rows, n_tokens), device, generator).to(torch.int32)
    wrong = (integers(3, (rows, n_tokens), device, generator) == 0).to(torch.int32)
    given = {
        "accepted": integers(1000, (rows,), device, generator).to(torch.int32),  # written over
        "tokens": integers(vocabulary, (rows,), device, generator).to(torch.int32),
        "lengths": integers(1000, (rows,), device, generator).to(torch.int32) + n_tokens,
        "drawn": drawn,
        "ids": (torch.cat((drawn[:, -1:], drawn[:, :-1]), 1) + wrong) % vocabulary,
        "limits": integers(n_tokens + 1, (rows,), device, generator).to(torch.int32) - 1,
    }
    if point["seen"]:
        given["seen"] = _words(point, device, generator)
    if point["counts"]:
        given["counts"] = integers(6, (rows, vocabulary), device, generator).to(torch.int16)
    return given


def _run_accept(
    accepted: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    drawn: Tensor,
    ids: Tensor,
    limits: Tensor,
    *,
    seen: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    accept_drafts_(accepted, tokens, lengths, drawn, ids, limits, seen=seen, counts=counts)
    return accepted, tokens, lengths, *_or_none(seen, counts, lengths)


def _reference_accept(*given: Tensor, **named: Any) -> tuple[Tensor, ...]:
    accepted, tokens, lengths, seen, counts = reference.accept_drafts_(*given, **named)
    return accepted, tokens, lengths, *_or_none(seen, counts, lengths)


def _accept_nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Drawn and proposed tokens and limits read; three numbers changed in place, and an entry of each table."""
    entries = 8 * point["seen"] + 4 * point["counts"]
    return point["rows"] * (8 * point["tokens"] + 4 + 3 * 8 + entries)


def _accept_point(rows: int, n_tokens: int, vocabulary: int, *, seen: bool = False, counts: bool = False) -> Point:
    named = {"seen": seen, "counts": counts}
    label = " ".join((f"B{rows} T{n_tokens} V{vocabulary}", *(name for name, there in named.items() if there)))
    sizes = {"rows": rows, "tokens": n_tokens, "vocabulary": vocabulary, "seen": int(seen), "counts": int(counts)}
    return Point(label, sizes)


# What lives through all passes of a row (its threshold's place, its parameters) is spilled where a target has too few
# registers, and read again once a pass: 20 bytes on sm_90, 208 before it, 360 on gfx942, and 480 with all options.
_SPILLS = 512

_DRAW: dict[str, Any] = {"temperature": 0.8, "seeds": 17, "positions": 512}
_USUAL: dict[str, Any] = {**_DRAW, "top_k": 50, "top_p": 0.95}
_PENALTIES: dict[str, Any] = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
_TINY = (
    _point(3, 300),
    _point(1, 301, **_USUAL),
    _point(2, 300, given=True),
    _point(2, 300, mask=True),
    _point(2, 301, given=True, mask=True, bias=True, counts=True),
)
_EDGE = (
    _point(1, 1),
    _point(2, 4099, repetition_penalty=1.25),
    _point(1, 4099, **_DRAW, top_p=0.6),
    _point(3, 1, **_USUAL),
    _point(1, 33, **_DRAW, top_k=1, min_p=0.1),
    _point(2, 127, **_DRAW, top_k=500, top_p=1e-9),
    _point(1, 129, **_DRAW, min_p=1.0),
    _point(3, 4099, **_USUAL, bias=True, mask=True),
    _point(2, 300, counts=True, **_PENALTIES),
    _point(1, 1, **_DRAW, counts=True, bias=True, mask=True, presence_penalty=-1.5),
    _point(0, 64, **_USUAL),
)
_SETS = {
    "tiny": _TINY,
    "edge": _EDGE,
    # Logits of Llama 2, Granite, Llama 3 and Qwen2.5.
    "llm": (
        *(_point(b, v) for v in (128256, 32000, 49152, 152064) for b in (1, 8, 32)),
        *(_point(b, 128256, **_USUAL) for b in (1, 2, 8, 32, 64)),
        *(_point(b, v, **_USUAL) for v in (32000, 49152, 152064) for b in (1, 32)),
        *(
            _point(b, 128256, **_DRAW, **o)
            for b in (1, 32)
            for o in ({}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.05})
        ),
        *(_point(b, 128256, given=True) for b in (1, 32)),
        *(_point(b, 128256, **o, mask=True) for b in (1, 32) for o in ({}, _USUAL)),
        *(_point(b, 128256, **_USUAL, counts=True, **_PENALTIES) for b in (1, 32)),
        *(_point(b, 128256, **_USUAL, bias=True) for b in (1, 32)),
    ),
    "decode": (*(_point(b, 128256) for b in (2, 64)), *(_point(b, 128256, given=True) for b in (2, 8, 64))),
}

CASES = (
    OpCase(
        name="sample",
        formula="argmax l, or argmax l / temperature + g over what top-k, top-p and min-p keep; log softmax(l) there",
        function=sample,
        reference=reference.sample,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("tokens", "logprobs"),
        output_dtypes=lambda point: {"tokens": torch.int64, "logprobs": torch.float32},
        grads=(),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        output_tolerances={"tokens": dict.fromkeys(TOLERANCES, _TOKENS)},
        sets=_SETS,
        spills=_SPILLS,
        peers=(Peer("argmax", _argmax),),
    ),
    OpCase(
        name="sample_",
        formula="sample, written over tokens and logprobs, the token added to what the row has seen",
        function=_run_in_place,
        reference=_own(reference.sample_),
        eager=_own(reference.eager_),
        inputs=_inputs_in_place,
        outputs=("tokens", "logprobs", "seen", "counts"),
        output_dtypes=lambda point: {
            "tokens": torch.int32,
            "logprobs": torch.float32,
            "seen": torch.int32,
            "counts": torch.int16,
        },
        grads=(),
        nbytes=_nbytes_in_place,
        flops=_flops,
        tolerances=TOLERANCES,
        output_tolerances={
            "tokens": dict.fromkeys(TOLERANCES, _TOKENS),
            "seen": dict.fromkeys(TOLERANCES, _BITS),
            "counts": dict.fromkeys(TOLERANCES, _COUNTS),
        },
        sets={
            "tiny": (_point(3, 300), _point(2, 300, seen=True), _point(1, 300, given=True), _TINY[3], _TINY[4]),
            "edge": (_EDGE[0], _EDGE[1], _point(0, 64, seen=True, **_USUAL), _point(2, 33, counts=True)),
            "llm": tuple(_point(b, 128256, **o) for b in (1, 32) for o in ({}, _USUAL)),
            "decode": (
                *(_point(b, 128256, given=True) for b in (1, 8, 64)),
                *(_point(b, 128256, given=True, mask=True, bias=True, counts=True) for b in (1, 64)),
            ),
        },
        spills=_SPILLS,
        mutates=("tokens", "logprobs", "seen", "counts"),
    ),
    OpCase(
        name="top_logprobs",
        formula="the k largest of log softmax(l), and their tokens",
        function=top_logprobs,
        reference=reference.top_logprobs,
        eager=reference.eager_top_logprobs,
        inputs=_top_inputs,
        outputs=("tokens", "logprobs"),
        output_dtypes=lambda point: {"tokens": torch.int64, "logprobs": torch.float32},
        grads=(),
        nbytes=_top_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        output_tolerances={"tokens": dict.fromkeys(TOLERANCES, _TOKENS)},
        sets={
            "tiny": (_top_point(3, 300), _top_point(2, 4101, k=5)),
            "edge": (_top_point(1, 1, k=1), _top_point(2, 3, k=3), _top_point(2, 9001, k=7), _top_point(0, 64, k=2)),
            "llm": tuple(_top_point(b, v) for v in (128256, 32000) for b in (1, 32)),
        },
        peers=(Peer("topk", _topk),),
    ),
    OpCase(
        name="accept_drafts_",
        formula="n = leading i < limit with drawn[i] = ids[i + 1]; token = drawn[n]; length -= T - 1 - n",
        function=_run_accept,
        reference=_reference_accept,
        eager=_reference_accept,
        inputs=_accept_inputs,
        outputs=("accepted", "tokens", "lengths", "seen", "counts"),
        output_dtypes=lambda point: {
            **dict.fromkeys(("accepted", "tokens", "lengths", "seen"), torch.int32),
            "counts": torch.int16,
        },
        grads=(),
        nbytes=_accept_nbytes,
        flops=lambda point, direction: point["rows"] * point["tokens"],
        tolerances={dtype: {"forward": _COUNTS} for dtype in TOLERANCES},
        sets={
            "tiny": (_accept_point(9, 5, 70), _accept_point(6, 3, 40, seen=True, counts=True)),
            "edge": (_accept_point(1, 1, 1), _accept_point(0, 4, 64), _accept_point(7, 16, 33, seen=True)),
            "llm": tuple(_accept_point(b, 5, 128256) for b in (1, 32)),
        },
        mutates=("accepted", "tokens", "lengths", "seen", "counts"),
    ),
    OpCase(
        name="mark_seen_",
        formula="seen[row_of[i], ids[i] // 32] |= 1 << ids[i] % 32",
        function=_run_mark,
        reference=reference.mark_seen_,
        eager=reference.mark_seen_,
        inputs=_mark_inputs,
        outputs=("seen",),
        output_dtypes=lambda point: {"seen": torch.int32},
        grads=(),
        nbytes=_mark_nbytes,
        flops=lambda point, direction: point["rows"],
        tolerances={dtype: {"forward": _BITS} for dtype in TOLERANCES},
        sets={
            "tiny": (_mark_point(40, 2, 100), _mark_point(9, 4, 33)),
            "edge": (_mark_point(1, 1, 1), _mark_point(0, 2, 64), _mark_point(300, 3, 31)),
            "llm": tuple(_mark_point(8192, b, 128256) for b in (1, 2)),
        },
        mutates=("seen",),
    ),
)
