from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.cases.case import Direction, OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import integers, normal
from rooftile.library import cdiv
from rooftile.ops.attention import attention
from rooftile.reference import attention as reference

_FP32 = "products, exponentials and sums in float32; a score's error is as many times larger as the score"
_FP32_BACKWARD = "the same, with the probabilities computed again and three more products"
_ROUNDED = "float32 sums; the probabilities are rounded for the GEMM with v, and the output"
_BACKWARD = "float32 sums; probabilities and their gradients are rounded for the products, the output, each gradient"
TOLERANCES: dict[torch.dtype, dict[Direction, Tolerance]] = {
    torch.float32: {"forward": Tolerance(2e-6, _FP32), "backward": Tolerance(5e-6, _FP32_BACKWARD)},
    torch.float16: {"forward": Tolerance(6e-4, _ROUNDED), "backward": Tolerance(1.5e-3, _BACKWARD)},
    torch.bfloat16: {"forward": Tolerance(5e-3, _ROUNDED), "backward": Tolerance(1e-2, _BACKWARD)},
}

Mask = tuple[str, str]  # "bool" or "float", and the letters of its dimensions; the others are broadcast


def point(
    batch: int,
    heads: int,
    seq_len: int,
    dim: int,
    *,
    kv_heads: int | None = None,
    more_keys: int = 0,
    value_dim: int | None = None,
    mask: Mask | None = None,
    alibi: bool = False,
    sinks: bool = False,
    **options: object,
) -> Point:
    """`more_keys` is the number of keys less that of queries; it may be negative."""
    dims = {
        "batch": batch,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "seq_len": seq_len,
        "more_keys": more_keys,
        "head_dim": dim,
        "value_dim": dim if value_dim is None else value_dim,
        "has_mask": 0 if mask is None else 1 if mask[0] == "bool" else 2,
        "has_alibi": int(alibi),
        "has_sinks": int(sinks),
    }
    dims |= {f"mask_{letter}": int(mask is not None and letter in mask[1]) for letter in "BHTS"}
    label = f"B{batch} H{heads}" + (f"/{kv_heads}" if kv_heads else "") + f" T{seq_len} D{dim}"
    if more_keys:
        label = label.replace(f"T{seq_len}", f"T{seq_len}x{seq_len + more_keys}")
    if value_dim:
        label += f"/{value_dim}"
    if mask is not None:
        label += f" {mask[0]} mask {mask[1]}"
    return Point(label + " alibi" * alibi + " sinks" * sinks, dims, options)


def _keys(point: Point) -> int:
    return max(0, point["seq_len"] + point["more_keys"])


def _inputs(point: Point, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Tensor]:
    batch, heads, kv_heads, n_q, n_k = point["batch"], point["heads"], point["kv_heads"], point["seq_len"], _keys(point)

    def drawn(heads: int, tokens: int, dim: int) -> Tensor:
        bthd = point.options.get("layout") == "bthd"
        return normal((batch, tokens, heads, dim) if bthd else (batch, heads, tokens, dim), dtype, device, generator)

    found = {
        "q": drawn(heads, n_q, point["head_dim"]),
        "k": drawn(kv_heads, n_k, point["head_dim"]),
        "v": drawn(kv_heads, n_k, point["value_dim"]),
    }
    if point["has_mask"]:
        sizes = (batch, heads, n_q, n_k)
        shape = tuple(n if point[f"mask_{d}"] else 1 for n, d in zip(sizes, "BHTS", strict=True))
        if point["has_mask"] == 1:
            mask = integers(4, shape, device, generator) > 0  # three of four keys are seen
            mask[..., :1] = True
        else:
            mask = normal(shape, dtype, device, generator)
        found["mask"] = mask
    if point["has_alibi"]:
        found["alibi_slopes"] = normal((heads,), torch.float32, device, generator).abs().to(dtype) / 8
    if point["has_sinks"]:
        found["sinks"] = normal((heads,), dtype, device, generator)
    return found


def _nbytes(point: Point, itemsize: int, direction: Direction) -> int:
    """Forward: q, k, v, the mask and the output. Backward: those, dout and the gradients. Not counted are scalars of
    rows, as the log-sum-exp."""
    batch, heads, n_q, n_k = point["batch"], point["heads"], point["seq_len"], _keys(point)
    inputs = heads * n_q * point["head_dim"] + point["kv_heads"] * n_k * (point["head_dim"] + point["value_dim"])
    out = heads * n_q * point["value_dim"]
    moved = itemsize * batch * (inputs + out if direction == "forward" else 2 * inputs + 2 * out)
    if point["has_mask"]:
        sizes = zip((batch, heads, n_q, n_k), "BHTS", strict=True)
        elements = int(torch.Size([n for n, d in sizes if point[f"mask_{d}"]]).numel())
        moved += elements * (1 if point["has_mask"] == 1 else itemsize)
    return moved


def pairs(n_q: int, n_k: int, options: Any) -> float:
    """Pairs of a query and a key that it sees. Causal without a window counts n_q^2 / 2 fewer, as is usual."""
    causal, window = bool(options.get("causal")), options.get("window")
    if window is None:
        if not causal:
            return n_q * n_k
        return n_q * n_k - n_q * n_q / 2 if n_k >= n_q else n_k * n_k / 2
    left, right = (window - 1, window - 1) if isinstance(window, int) else window
    right = 0 if causal else right
    shift, total = n_k - n_q, 0
    for i in range(n_q):
        lo = 0 if left is None else max(0, i + shift - left)
        hi = n_k if right is None else min(n_k, i + shift + right + 1)
        total += max(0, hi - lo)
    return total


def _flops(point: Point, direction: Direction) -> int:
    """Two for each multiply and add, of the pairs that are seen. The forward has two dots, the backward five."""
    seen = pairs(point["seq_len"], _keys(point), point.options)
    forward = 2 * point["batch"] * point["heads"] * seen * (point["head_dim"] + point["value_dim"])
    return int(forward if direction == "forward" else 2.5 * forward)


# Peers

_SCORES = 1 << 31  # most that are written to memory: 8 GiB in float32, several times
_BLOCKS = 64  # most of the blocked form: each is about ten launches, forty with the backward


def without(point: Point, name: str, *options: str) -> None:
    for option in options:
        if point.options.get(option) or (f"has_{option}" in point.dims and point[f"has_{option}"]):
            raise Unsupported(f"{name} has no {option}")


def _scores_fit(point: Point, name: str) -> None:
    scores = point["batch"] * point["heads"] * point["seq_len"] * _keys(point)
    if scores > _SCORES:
        raise Unsupported(f"{name} would write {scores} scores")


def _naive(point: Point) -> Callable[..., Any]:
    _scores_fit(point, "the naive form")
    return reference.naive


def _blocked(point: Point) -> Callable[..., Any]:
    without(point, "the blocked form", "softcap", "mask", "alibi", "sinks")
    if point.options.get("layout") == "bthd":
        raise Unsupported("the blocked form takes (B, H, T, D)")
    blocks = cdiv(point["seq_len"], 256) * cdiv(_keys(point), 256)
    if blocks > _BLOCKS:
        raise Unsupported(f"the blocked form would take {blocks} blocks one by one")
    return reference.blocked


def on_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        raise ImportError(f"{name} needs a GPU")


def _bhtd(function: Callable[..., Tensor], point: Point) -> Callable[..., Any]:
    """`function(q, k, v, mask, scale)` of (B, H, T, D), as the case calls it."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        if options.get("layout") == "bthd":
            out = function(*(t.transpose(1, 2) for t in (q, k, v)), mask, options.get("scale"))
            return out.transpose(1, 2)
        return function(q, k, v, mask, options.get("scale"))

    return run


def _sdpa(backend: str, name: str) -> Callable[[Point], Callable[..., Any]]:
    def build(point: Point) -> Callable[..., Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        on_gpu(name)
        without(point, name, "softcap", "window", "alibi", "sinks")
        causal = bool(point.options.get("causal"))
        if causal and point["more_keys"]:
            raise Unsupported(f"{name} aligns causal with the first key")
        if causal and point["has_mask"]:
            raise Unsupported(f"{name} has causal or a mask")
        if backend == "FLASH_ATTENTION" and point["has_mask"]:
            raise Unsupported(f"{name} has no mask")
        chosen = getattr(SDPBackend, backend)
        grouped = point["heads"] != point["kv_heads"]

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
            if q.dtype == torch.float32:
                raise Unsupported(f"{name} takes float16 and bfloat16")
            try:
                with sdpa_kernel(chosen):
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
                    )
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    raise Unsupported(f"{name} has no kernel for this") from error
                raise

        return _bhtd(run, point)

    return build


def _flex(point: Point) -> Callable[..., Any]:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    name = "FlexAttention"
    on_gpu(name)
    without(point, name, "mask", "alibi", "sinks")  # FlexAttention can express them; no point here needs it
    n_q, n_k, options = point["seq_len"], _keys(point), point.options
    causal, window, softcap = bool(options.get("causal")), options.get("window"), options.get("softcap")
    if min(n_q, n_k) == 0:
        raise Unsupported(f"{name} takes no empty tensors")
    left, right = (window - 1, window - 1) if isinstance(window, int) else window or (None, None)
    right = 0 if causal else right

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        p = i + (n_k - n_q)
        found = j >= 0
        if left is not None:
            found = found & (j >= p - left)
        if right is not None:
            found = found & (j <= p + right)
        return found

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # a measurement differentiates one graph many times
    compiled = torch.compile(flex_attention, dynamic=False)
    made: list[Any] = []

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        if not made and (causal or window is not None):
            made.append(create_block_mask(seen, None, None, n_q, n_k, device=q.device))
        return compiled(
            q, k, v,
            score_mod=capped if softcap else None, block_mask=made[0] if made else None, scale=scale,
            enable_gqa=point["heads"] != point["kv_heads"],
        )  # fmt: skip

    return _bhtd(run, point)


def _flash4(point: Point) -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func

    name = "FlashAttention-4"
    without(point, name, "mask", "alibi", "sinks", "softcap", "window")

    def run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if q.dtype == torch.float32:
            raise Unsupported(f"{name} takes float16 and bfloat16")
        turned = options.get("layout") != "bthd"
        if turned:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = flash_attn_func(q, k, v, softmax_scale=options.get("scale"), causal=bool(options.get("causal")))
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2) if turned else out

    return run


def _portable(point: Point) -> Callable[..., Any]:
    """The portable kernels, on a GPU that has others: shown beside them, and not counted as a peer."""
    from rooftile import runtime
    from rooftile.ops.attention import AttentionConfig

    target = runtime.target(runtime.default_device())
    if target is runtime.INTERPRETER:
        return functools.partial(attention, config=AttentionConfig("portable", 64, 64, 4, 1))
    if target.arch != "sm_90":
        raise ImportError("this GPU has no other kernel beside it")
    without(point, "the portable kernel's measured tiles", "mask", "alibi")
    if max(point["head_dim"], point["value_dim"]) > 128:
        raise Unsupported("the portable kernel's measured tiles are of heads of up to 128")
    # The choice for sm_90 where the Hopper kernel can't run.
    config = AttentionConfig("portable", 128, 128, 8, 3 if point["head_dim"] <= 64 else 2)
    return functools.partial(attention, config=config)


PEERS = (
    Peer("rooftile portable", _portable),
    Peer("naive", _naive),
    Peer("blocked", _blocked),
    Peer("cudnn", _sdpa("CUDNN_ATTENTION", "SDPA with cuDNN")),
    Peer("flash", _sdpa("FLASH_ATTENTION", "SDPA with FlashAttention")),
    Peer("flex", _flex),
    Peer("fa4", _flash4),
)

_MASKINGS: tuple[dict[str, Any], ...] = ({}, {"causal": True})


def _prompts(*lengths: int) -> tuple[Point, ...]:
    """Points of 16384 tokens each."""
    return tuple(
        point(16384 // t, heads, t, dim, **options)
        for heads, dim in ((16, 128), (32, 64))
        for options in _MASKINGS
        for t in lengths
    )


_NAIVE_SWEEP = (*(point(1, 1, t, 64) for t in (512, 1024, 2048)), point(2, 4, 512, 64))
# Of one sequence, before decoding; of more tokens, `llm` and `prefill` have as many programs.
_PROMPT = (
    *(point(1, 32, t, 128, causal=True) for t in (44, 512, 1024, 8192)),
    *(point(1, 32, t, 128, kv_heads=8, causal=True) for t in (128, 256, 512, 1024)),
)
# Heads that are no power of two. The least operations are those of the unpadded head.
_ODD_HEADS = tuple(point(2, 16, 4096, dim, causal=True) for dim in (80, 96))
_MEMORY = tuple(point(1, 4, 1 << i, 128, causal=True) for i in range(10, 18))
_MODES = (
    point(2, 4, 33, 32, kv_heads=2, more_keys=40, causal=True, layout="bthd"),
    point(1, 2, 70, 80, value_dim=48, causal=True, window=17),
    point(1, 2, 40, 16, window=(5, 9), scale=0.3),
    point(1, 2, 40, 16, causal=True, softcap=2.0),
    point(2, 2, 24, 16, more_keys=9, mask=("bool", "TS")),
    point(2, 2, 24, 16, mask=("float", "BHTS"), alibi=True),
    point(1, 4, 40, 16, sinks=True, causal=True, window=8),
)
_EDGE = (
    point(1, 2, 7, 64, more_keys=60),
    point(1, 3, 67, 8, kv_heads=1),
    point(1, 1, 129, 24, causal=True),
    point(1, 2, 65, 40, value_dim=72, more_keys=-34),
    point(1, 1, 31, 20, value_dim=9, more_keys=33),
    point(0, 2, 8, 16),
    point(1, 2, 0, 16, more_keys=8),
    point(1, 2, 8, 16, more_keys=-8),
)

CASES = (
    OpCase(
        name="attention",
        formula="out = softmax(scale · q · kᵀ + …) · v, over the keys that are seen",
        function=attention,
        reference=reference.attention,
        eager=reference.eager,
        inputs=_inputs,
        outputs=("out",),
        grads=("q", "k", "v", "sinks"),
        nbytes=_nbytes,
        flops=_flops,
        tolerances=TOLERANCES,
        deterministic="asked",  # gradients on sm_90
        roof="gemm",
        # The online softmax adds in the order of the keys, and eager's GEMMs add in a tree. The lse from which the
        # backward computes the probabilities is rounded.
        float32_floor=1e-6,
        over="seq_len",
        # Scalar registers of gfx942, which spill to lanes of vector registers, and masked blocks in the backward of
        # heads of 64 on sm_90.
        spills=512,
        sets={
            "tiny": (
                point(1, 4, 40, 32, kv_heads=2, sinks=True),
                point(1, 2, 130, 64, kv_heads=1, causal=True),
                *_MODES,
            ),
            "edge": _EDGE,
            "llm": _prompts(2048, 8192),
            "prefill": (*_prompts(1024, 4096, 16384), *_ODD_HEADS),
            "prompt": _PROMPT,
            "sweep": _NAIVE_SWEEP,
            "memory": _MEMORY,
        },
        peers=PEERS,
    ),
)
