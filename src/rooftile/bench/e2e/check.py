"""Whether an implementation computes the model: its logits and tokens before anything is timed.

Each implementation decodes greedily by itself, because a random model's most likely tokens have nearly equal logits,
and rounding changes their order. A float32 forward then runs over the tokens that the implementation chose, with
weights converted a layer at a time, and the logits are compared. A token must have the highest of the implementation's
own logits. Without quantization, logits are also compared with eager PyTorch's error in that dtype, because the bound
of so many roundings is wide. A quantized engine is compared with its quantized weights: in int4, a random model of 32
layers is a different model.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from rooftile.bench.e2e.cuda import CudaPath, causal, layer, rms_norm
from rooftile.bench.e2e.model import LayerTensors, Model
from rooftile.bench.e2e.paths import Path
from rooftile.bench.timer import Clock
from rooftile.cases.check import relative_error
from rooftile.engine.projections import Dense, Fp8, Int4, Int8, Projection
from rooftile.engine.weights import Layer
from rooftile.ops.gemm.weight_only import unpack_int4

STEPS = 8  # tokens that are checked: the prompt's, and those of seven steps
SEQUENCES = 2  # of the batch, the first and the last: the float32 forward takes its time
# A chain of float32 sums loses 5e-6 (the ceiling of rooftile.linear), which is more than a rounding.
FLOOR = 5e-6
# Where several rows of x are quantized to fp8, what differs by a rounding to bfloat16 may become another number of 8
# bits, a step of 6 to 12 %. How much of that reaches the logits depends on how strong the GEMMs are, on std *
# sqrt(width): 1.28 in Llama-3-8B with random weights, of which an H200 lost 0.40 of the prompt's token. Random models
# of 32 layers and widths 64 to 4096, emulated on the CPU, lost of that token, and of the worst of seven decoded alone,
# which meet such steps in the prompt's keys and values only:
#
#                                        prompt's token   decoded alone
#     1.28, right                        0.20 to 0.53     0.14 to 0.33
#     1.28, x not quantized              0.04 to 0.09     0.06 to 0.14
#     1.28, scales in another order      1.06 and more    1.18 and more
#     1.28, the same while decoding      as right         0.83 and more
#     1.28, no RoPE                      1.28 and more    1.38 and more
#     1.28, one layer without o          0.20 to 0.56     0.24 to 0.41
#     std 0.02, right                    0.04 to 0.10     0.02 to 0.06
#     std 0.02, no RoPE                  0.04 to 0.29     0.02 to 0.29
#     the bound                          0.87             0.54
#
# So a fault in all layers of a strong model is seen; one in a layer of 32, or in a weak model, may not be.
FP8 = 8.0
FP8_ALONE = 5.0
# Times what eager PyTorch loses, at most. A bfloat16 model of 32 layers of 512 lost 0.012 on the CPU, and 0.061 without
# RoPE, which six roundings a layer, 0.108, would let pass.
OVER_EAGER = 3.0


def bound(model: Model, own: bool, lost: float | None = None, alone: bool = False) -> float:
    """The bound of the logits' relative error: some six roundings a layer, each off by one unit. `own`: for the engine,
    whose weights may be quantized. `lost`: eager PyTorch's error, if known. `alone`: for a token decoded alone."""
    layers = math.sqrt(6 * max(1, model.config.layers))
    roundings = max(torch.finfo(model.dtype).eps, FLOOR) * layers
    if own and model.quantize is not None:
        return roundings * ((FP8_ALONE if alone else FP8) if model.quantize == "fp8" else 1.0)
    return roundings if lost is None else min(roundings, max(OVER_EAGER * lost, FLOOR * layers))


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Prompts and new tokens of some sequences, `(n, prompt + new)`, and the logits of the new ones, `(n, new, V)`."""

    tokens: Tensor
    logits: Tensor
    message: str = ""  # what is wrong with a token


def decode(path: Path, ids: Tensor, steps: int) -> Decoded:
    """The first tokens after the prompts."""
    n = ids.shape[0]
    rows = sorted({*range(min(n, SEQUENCES - 1)), n - 1})
    tokens, logits, message = [ids[rows]], [], ""
    path.reset()
    path.prefill()
    for i in range(steps):
        if i:
            path.step()
        newest, scores = path.tokens.long(), path.logits
        chosen = scores.gather(1, newest.clamp(0, scores.shape[1] - 1)[:, None])[:, 0]
        wrong = (chosen != scores.amax(dim=1)).nonzero()[:, 0].tolist()
        if wrong and not message:
            message = f"token {i} of sequence {wrong[0]} is not the one with the highest of its logits"
        tokens.append(newest[rows, None].clone())
        logits.append(scores[rows].clone())
    path.reset()
    return Decoded(torch.cat(tokens, dim=1), torch.stack(logits, dim=1), message)


def _weight(projection: Projection) -> Tensor:
    """The weight that a projection multiplies by, in float32."""
    if isinstance(projection, Int4):
        scale = projection.scale.float().repeat_interleave(projection.group, dim=1)
        return unpack_int4(projection.weight, projection.group).float() * scale
    if isinstance(projection, Int8):
        return projection.weight.float() * projection.scale[:, None]
    if isinstance(projection, Fp8):
        return projection.weight.float() * projection.scale
    assert isinstance(projection, Dense)
    return projection.weight.float()


def _float32(w: Layer) -> LayerTensors:
    def of(projection: Projection) -> tuple[Tensor, Tensor | None]:
        return _weight(projection), None if projection.bias is None else projection.bias.float()

    assert w.input_norm is not None, "FAMILIES have it"
    assert w.post_norm is not None, "FAMILIES have it"
    q_norm, k_norm = (None if norm is None else norm.float() for norm in (w.q_norm, w.k_norm))
    return LayerTensors(
        w.input_norm.float(), *of(w.qkv), q_norm, k_norm, *of(w.o), w.post_norm.float(), *of(w.gate_up), *of(w.down)
    )


def _fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, alone: int = 0) -> Tensor:
    """x rounded to float8_e4m3fn with a scale per row, as in the engine, except the last `alone` tokens, decoded
    one by one."""
    many, one = x.split((x.shape[1] - alone, alone), dim=1)
    scale = (many.abs().amax(dim=-1, keepdim=True) / 448).clamp(min=2.0**-126)
    return linear(torch.cat(((many / scale).to(torch.float8_e4m3fn).float() * scale, one), dim=1), weight, bias)


@torch.no_grad()
def reference(model: Model, tokens: Tensor, new: int, own: bool = False, exact_row: bool = True) -> Tensor:
    """The last `new` logits `(n, new, V)`, in float32, after all but the last of `tokens` `(n, T)`. `own`: with the
    engine's weights. `exact_row`: in fp8, a row of x alone is not quantized."""
    c, weights = model.config, model.own if own else model.dense
    gemm = last_gemm = linear
    if own and model.quantize == "fp8":  # a prompt's last token, too, is alone where it is the logits' only one
        gemm, last_gemm = (
            functools.partial(_fp8_linear, alone=n if exact_row and tokens.shape[0] == 1 else 0) for n in (new - 1, new)
        )
    cos, sin = c.rotary.tables(tokens.shape[1] - 1, tokens.device)
    x = embedding(tokens[:, :-1], weights.embedding).float() * c.embedding_scale
    y = torch.zeros_like(x)
    for w, window in zip(weights.layers, c.windows, strict=True):
        x, y = layer(c, _float32(w), x, y, cos, sin, causal(c, window), gemm)
    last = rms_norm((x + y)[:, -new:], weights.norm.float(), c.norm_eps)
    return last_gemm(last, _weight(weights.lm_head))


class Expected:
    """`reference`, computed once per token sequence: implementations often choose the same tokens."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._found: dict[tuple[bool, bool, bytes], Tensor] = {}

    def __call__(self, tokens: Tensor, new: int, own: bool, exact_row: bool = True) -> Tensor:
        own = own and self._model.own is not self._model.dense
        key = own, exact_row, tokens.cpu().numpy().tobytes()
        if key not in self._found:
            self._found[key] = reference(self._model, tokens, new, own, exact_row)
        return self._found[key]


def _errors(
    expected: Expected, decoded: Decoded, steps: int, own: bool, exact_row: bool = True
) -> tuple[list[float], float]:
    """The relative error of each token's logits, and the largest of them."""
    logits = expected(decoded.tokens, steps, own, exact_row)
    errors = [relative_error(decoded.logits[:, i], logits[:, i]) for i in range(steps)]
    return errors, max(errors, key=lambda e: math.inf if math.isnan(e) else e)


@torch.no_grad()
def lost_in_eager(
    model: Model, ids: Tensor, steps: int, clock: Clock, expected: Expected | None = None
) -> float | None:
    """The logits' error of eager PyTorch in the model's dtype; None if it can't run or is wrong itself."""
    try:
        path = CudaPath(model, ids, steps, clock, compiled=False)
        lost = _errors(expected or Expected(model), decode(path, ids, steps), steps, own=False)[1]
    except Exception:  # its own row, if it has one, says why
        return None
    return None if math.isnan(lost) else lost


def verdict(
    model: Model,
    path: Path,
    ids: Tensor,
    steps: int,
    own: bool,
    lost: float | None = None,
    expected: Expected | None = None,
    *,
    exact_row: bool = True,
) -> tuple[float, str]:
    """The largest relative error of the logits of a token, and what is wrong, if anything; `lost` as in `bound`,
    `exact_row` as in `reference`."""
    decoded = decode(path, ids, steps)
    errors, most = _errors(expected or Expected(model), decoded, steps, own, exact_row)
    if decoded.message:
        return most, decoded.message
    limits = [bound(model, own, lost, alone=exact_row and ids.shape[0] == 1 and i > 0) for i in range(steps)]
    used = [math.inf if math.isnan(e) else e / limit for e, limit in zip(errors, limits, strict=True)]
    worst = used.index(max(used))
    if used[worst] > 1.0:
        return most, f"logits of token {worst} differ by {errors[worst]:.2e}, over {limits[worst]:.2e}"
    return most, ""
