"""From tensors to a started kernel: the checks that all GEMM ops share, the problem, the bound launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import (
    INVARIANT,
    PRECISIONS,
    GemmConfig,
    Invariant,
    Operands,
    Precision,
    Problem,
    Start,
    WeightFormat,
    decode,
)

FORMATS: dict[torch.dtype, WeightFormat] = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}
_AUTOCAST = ("cuda", "cpu", "xpu")
View = Callable[[Tensor], Tensor]


def check_precision(op: str, precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")


def check_dtype(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"{op}: {name} has dtype {tensor.dtype}, expected {other.dtype} to match {other_name} "
            "(under torch.autocast both are cast)"
        )


def check_bias(op: str, bias: Tensor | None, x: Tensor, n: int, *others: torch.dtype, name: str = "bias") -> None:
    """Raise unless it is `(n,)`, of x's dtype, float32 or one of the others."""
    if bias is None:
        return
    if bias.shape != (n,):
        raise ValueError(
            f"{op}: {name} has shape {tuple(bias.shape)}, expected ({n},) to match "
            f"{'the weight' if name == 'bias' else name.replace('bias', 'weight')}'s rows"
        )
    if bias.dtype not in (x.dtype, torch.float32, *others):
        raise TypeError(f"{op}: {name} has dtype {bias.dtype}, expected {library.or_float32(x)}")


def check_residual(op: str, residual: Tensor | None, shape: Sequence[int], dtype: torch.dtype, like: str) -> None:
    """Raise unless it has the result's shape and that dtype, which is `like`'s."""
    if residual is None:
        return
    if residual.shape != tuple(shape):
        raise ValueError(
            f"{op}: residual has shape {tuple(residual.shape)}, expected {tuple(shape)} to match the result"
        )
    if residual.dtype != dtype:
        raise TypeError(f"{op}: residual has dtype {residual.dtype}, expected {dtype} to match {like}")


def encoded(op: str, config: GemmConfig | Invariant | None, *, invariant: bool = False) -> tuple[int, ...]:
    """The configuration as the schema of an op takes it; () for none. `invariant`: whether the op takes "invariant"."""
    if config is None:
        return ()
    if invariant and config == "invariant":
        return INVARIANT
    if not isinstance(config, GemmConfig):
        accepted = "a rooftile.GemmConfig, 'invariant' or None" if invariant else "a rooftile.GemmConfig or None"
        raise TypeError(f"{op}: config is {library.named(config)}, expected {accepted}")
    return config.encoded


def autocast_dtype(x: object) -> torch.dtype | None:
    """The dtype that torch.autocast wants of GEMMs on x's device; None where it is off."""
    kind = x.device.type if isinstance(x, Tensor) else ""  # of what is no tensor the op says so
    return torch.get_autocast_dtype(kind) if kind in _AUTOCAST and torch.is_autocast_enabled(kind) else None


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors as torch.autocast wants the inputs of a GEMM, where it is on: as torch's own linear does."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(t.to(dtype) if isinstance(t, Tensor) and t.dtype in library.FLOATS else t for t in tensors)


def will_differentiate(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def refuse_symbols(*sizes: int) -> None:
    """The choice of a kernel needs numbers: with symbolic ones the op stays whole in a compiled graph."""
    for n in sizes:
        if isinstance(n, torch.SymInt):
            raise launching.Untraceable("a symbolic size")


def layout(t: Tensor, outer: str) -> str:
    """Which dimension of an operand is contiguous: "k", `outer`, or "" for none."""
    if t.stride(-1) == 1 or t.shape[-1] <= 1:
        return "k"
    return outer if t.stride(-2) == 1 else ""


def aligned(t: Tensor) -> bool:
    """Whether base and strides, but that of the contiguous dimension, are multiples of 16 bytes, and rows apart."""
    size = t.element_size()
    traced = isinstance(t, (FunctionalTensor, FakeTensor))  # it has no address: memory begins at a multiple of 16
    if (t.storage_offset() * size if traced else t.data_ptr()) % 16:
        return False
    contiguous = t.dim() - (1 if layout(t, "m") == "k" else 2)
    outer = 2 * t.dim() - 3 - contiguous
    if t.shape[outer] > 1 and t.stride(outer) < t.shape[contiguous]:
        return False
    return all(i == contiguous or t.shape[i] == 1 or t.stride(i) * size % 16 == 0 for i in range(t.dim()))


def continues(o: Operands, more_x: Tensor, more_w: Tensor, c: GemmConfig) -> bool:
    """Whether c's kernel can add `more_x @ more_w^T` to the sum of o: TMA has them in the same tiles as x and w."""
    if c.kernel != "hopper":
        return c.kernel == "tiled" and o.x_kind == ""
    pairs = ((o.x, more_x, "m"), (o.w, more_w, "n"))
    return all(layout(t, outer) == layout(more, outer) and aligned(more) for t, more, outer in pairs)


def problem_of(o: Operands) -> Problem:
    """What the choice of a kernel needs to know of the operands."""
    (m, n), k = o.out.shape[-2:], o.x.shape[-1]
    weight = FORMATS[o.w.dtype] if o.weight_scale is not None else ""
    group = k // o.weight_scale.shape[1] if weight == "int4" and o.weight_scale is not None else 0
    precision: Precision = "tf32" if o.precision == "tf32" and o.x.dtype == torch.float32 else "ieee"
    return Problem(
        m, n, k, o.x.dtype, o.out.shape[0] if o.out.dim() == 3 else 1, o.gated, o.activation, precision,
        layout(o.x, "m"), layout(o.w, "n"), aligned(o.x), aligned(o.w), aligned(o.out),
        norm=o.norm_weight is not None, weight=weight, group=group, out_dtype=o.out.dtype,
        offsets=weight == "int4" and o.weight_scale is not None and o.weight_scale.dim() == 3,
    )  # fmt: skip


def chosen(op: str, p: Problem, device: torch.device, config: Sequence[int] = ()) -> GemmConfig | None:
    """The configuration for a problem; None where it is a norm's and its GEMM's, and two kernels are faster.

    Args:
        op: whose name errors have.
        config: an encoded configuration in place of the choice; () for none, INVARIANT for one that does not depend on
            the rows of x.

    Raises:
        ValueError: the configuration can't be launched.
    """
    target, c = runtime.target(device), decode(config)
    if tuple(config) == INVARIANT:
        return choose.choose_invariant(p, target)
    if c is None or (p.k == 0 and not p.weight):
        return choose.choose(p, target)
    reason = choose.can_implement(p, c, target)
    if reason is not None:
        raise ValueError(f"{op}: config can't be launched: {reason}")
    return c


def bind(op: str, o: Operands, config: Sequence[int] = ()) -> Start:
    """The chosen kernel for operands of such shapes, strides, dtypes and alignment; none of them is kept.

    Raises:
        ValueError: the configuration can't be launched.
    """
    p = problem_of(o)
    c = chosen(op, p, o.w.device, config)
    assert c is not None, "there is no norm"
    return starter(p, o, c)


def bind_views(
    op: str, x: Tensor, w: Tensor, views: tuple[View, View], shape: Sequence[int], dtype: torch.dtype, precision: str,
    config: Sequence[int] = (),
) -> Start:  # fmt: skip
    """As `bind`, of `views` of x and w into a contiguous tensor of that shape and dtype.

    The start takes x and w as they are here. Where a view of one of them is a copy, each start makes one.
    """
    copies: library.Copies = {}
    o = Operands(
        viewed(x, views[0], copies, 0), viewed(w, views[1], copies, 1), like(x, shape, dtype), precision=precision
    )  # fmt: skip
    return library.copying(bind(op, o, config), copies)


def starter(p: Problem, o: Operands, c: GemmConfig) -> Start:
    """That configuration's kernel, bound."""
    found = choose.module(p, c)
    assert found is not None, "can_implement rejects it"
    if isinstance(o.x, FunctionalTensor) and (c.split_k > 1 or c.kernel in ("hopper", "gemv_imma", "dequantize")):
        raise launching.Untraceable("counters, TMA descriptors, or a kernel of Gluon")
    prepare: Callable[[Operands, GemmConfig], Start] | None = getattr(found, "prepare", None)
    if prepare is not None:
        return prepare(o, c)
    names = [f.name for f in dataclasses.fields(o)]
    rest = {name: getattr(o, name) for name in names[8:]}
    views = [None if t is None else (t.shape, t.stride()) for t in (getattr(o, name) for name in names[:8])]
    launch = found.launch

    def start(*tensors: Tensor | None) -> None:
        given = [
            t if t is None or view is None or (t.shape, t.stride()) == view else t.as_strided(*view)
            for t, view in zip(tensors, views, strict=True)
        ]
        launch(Operands(*given, **rest), c)  # type: ignore[arg-type]

    return start


def _prepare(
    x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, op: str, precision: str
) -> Callable[..., None]:
    start = bind(op, Operands(x, w, out, bias, residual, precision=precision))

    def run(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None, *_: object) -> None:
        start(x, w, out, bias, residual, None, None, None)

    return run


_gemm = library.Prepared(_prepare)


def gemm(
    op: str, x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
    precision: str = "ieee",
) -> None:  # fmt: skip
    """`out[m, n] = sum over k of x[m, k] * w[n, k] + bias[n] + residual[m, n]`, into memory that is there.

    Args:
        op: whose name errors have.
        x: `(M, K)`, or `(B, M, K)` with all the others; any strides.
        w: `(N, K)`, any strides.
        out: `(M, N)`, with a last stride of 1.
        bias: `(N,)`, contiguous.
        residual: of out's shape, with a last stride of 1.
        precision: of float32 operands.
    """
    refuse_symbols(*x.shape, *w.shape)
    if out.numel():
        _gemm(x, w, out, bias, residual, op, precision)


def like(x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """What stands for a contiguous tensor of that shape where a launch is bound: it has no memory, and no GPU."""
    device = x.device if isinstance(x, FunctionalTensor) else "meta"
    return x.new_empty(tuple(shape), dtype=dtype or x.dtype, device=device)


def mergeable(t: Tensor) -> bool:
    """Whether all dimensions but the last can be taken as one without a copy."""
    try:
        t.view(math.prod(t.shape[:-1]), t.shape[-1])
    except RuntimeError:
        return False
    return True


def as_rows(t: Tensor) -> Tensor:
    """t as (rows, last dimension): a view where the leading dimensions can be taken as one, else a copy."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def transposed(t: Tensor) -> Tensor:
    """`as_rows(t)`, transposed: an operand of the gradient of a weight."""
    return as_rows(t).mT


def rows_of(t: Tensor, copies: library.Copies, place: int) -> Tensor:
    """`as_rows(t)`, which goes into `copies` unless a kernel can be given t itself, with these rows' strides."""
    return viewed(t, as_rows, copies, place)


def contiguous(t: Tensor | None, copies: library.Copies, place: int) -> Tensor | None:
    """t, contiguous; a copy goes into `copies`."""
    library.contiguous_of(t, copies, place)
    return None if t is None else t.contiguous()


def viewed(t: Tensor, view: Callable[[Tensor], Tensor], copies: library.Copies, place: int) -> Tensor:
    """`view(t)`, which goes into `copies` unless it begins where t does, so that a kernel can be given t itself."""
    seen = view(t)
    if type(t) not in (Tensor, torch.nn.Parameter) or seen.data_ptr() != t.data_ptr():
        copies[place] = view
    return seen
