"""What both caches of keys and values have: memory, the steps by which sequences grow, and how layers use it."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.library import check_layout
from rooftile.ops.decode_attention.common import LONGEST_HEAD
from rooftile.ops.kv_cache import Layout, append_kv, rope_and_cache
from rooftile.ops.kv_cache.checks import QUANTIZED
from rooftile.ops.rope import Style
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n", "capacity"])
def _advance_kernel(lengths_ptr, starts_ptr, counts_ptr, n, capacity, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """start = length, length += count, and never past the capacity."""
    if EARLY:
        pdl_launch_dependents()
        pdl_wait()
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + rows, mask=rows < n, other=0)
    count = tl.load(counts_ptr + rows, mask=rows < n, other=0)
    tl.store(starts_ptr + rows, length, mask=rows < n)
    tl.store(lengths_ptr + rows, tl.minimum(length + count, capacity), mask=rows < n)


@functools.cache
def _advance_plan(early: bool) -> launching.KernelLauncher:
    constants = {"BLOCK": 1024, "EARLY": early}
    return launching.KernelLauncher(_advance_kernel, constants, num_warps=4, **pdl.options(early))


def check_positive(name: str, **sizes: int) -> None:
    for what, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}: {what} is {size!r}, expected a positive integer")


def new_tokens(op: str, sequence: object, n: object) -> int:
    """How many new tokens a sequence is to get."""
    try:
        new = operator.index(n)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{op}: {n!r} new tokens for {sequence}, expected an integer") from None
    if new < 0:
        raise ValueError(f"{op}: {new} new tokens for {sequence}, expected 0 or more")
    return new


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.get_device_module(device.type).device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """Compute outside of every mode of the caller: no gradients, no autocast, no inference mode.

    A tensor made in inference mode can be written there alone, and the caller may go on outside of it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # this switches gradients on
        stack.enter_context(torch.no_grad())
        if device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


class Steps:
    """Memory for keys and values of `slots` sequences, and the step that they are in. See its two subclasses.

    A step gives sequences new tokens. `reserve` says how many, on the host, where it can fail and costs no
    synchronisation; `advance` moves the lengths on the device by as many; `extend` is both. Each layer then appends its
    keys and values, once. In a CUDA graph stands `advance` with what the layers do, and before each replay `reserve`.

    Attributes:
        k, v: `(layers, B, max_seq_len, H, D)` or `(layers, pages, page_size, H, D)`; in layout `"bhtd"` the heads come
            before the tokens.
        lengths: `(slots,)` int32, on the device: the tokens of each sequence, those of the step among them.
        starts: `(slots,)` int32, on the device: where the tokens of the step begin.
        counts: `(slots,)` int32, on the device: how many each sequence has in the step.
        page_table: `(slots, max_pages)` int32, on the device, or None.

    All of them stay at their addresses.
    """

    page_table: Tensor | None = None

    def __init__(
        self,
        blocks: int,
        rows: int,
        slots: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        layers: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
        layout: Layout,
        scales: str | tuple[Tensor, Tensor] | None,
    ) -> None:
        name = type(self).__name__
        value_dim = head_dim if value_dim is None else value_dim
        check_positive(name, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, layers=layers)
        if max(head_dim, value_dim) > LONGEST_HEAD:
            raise ValueError(
                f"{name}: head_dim and value_dim are {head_dim} and {value_dim}, expected at most {LONGEST_HEAD}"
            )
        check_layout(name, layout)
        if dtype not in (*library.FLOATS, *QUANTIZED):
            raise TypeError(f"{name}: dtype is {dtype}, expected float32, float16, bfloat16, float8_e4m3fn or int8")
        device = runtime.default_device() if device is None else torch.device(device)
        if device.type == "cpu" and runtime.MODE is runtime.Mode.GPU:
            raise ValueError(f"{name}: device is {device}, expected a GPU (or TRITON_INTERPRET=1, to run on the CPU)")
        middle = (rows, kv_heads) if layout == "bthd" else (kv_heads, rows)
        self.layers, self.kv_heads, self.layout, self.capacity = layers, kv_heads, layout, capacity
        with plain_mode(device):
            self.k = torch.zeros((layers, blocks, *middle, head_dim), dtype=dtype, device=device)
            self.v = torch.zeros((layers, blocks, *middle, value_dim), dtype=dtype, device=device)
            self._scales = self._make_scales(name, scales, (layers, blocks, *middle))
            self.lengths, self.starts, self.counts = (
                torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(3)
            )
        self._counts = [0] * slots  # what `counts` holds
        self._new = 0  # the most tokens that a sequence has in the step
        self._advanced = True
        self._captured = False  # a graph advances, and the host is not told when
        self._appended = set(range(layers))  # the layers that have the tokens of the step
        self._later: list[Callable[[], object]] | None = None  # what the device is told at the end of `deferred`

    def _make_scales(
        self, name: str, scales: str | tuple[Tensor, Tensor] | None, by_token: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        dtype, device = self.k.dtype, self.k.device
        if dtype not in QUANTIZED:
            if scales is not None:
                raise ValueError(f"{name}: scales are given for {dtype}, expected float8_e4m3fn or int8, or no scales")
            return None
        if scales is None or isinstance(scales, str):
            if scales not in (None, "token"):
                raise ValueError(f'{name}: scales is {scales!r}, expected "token" or two tensors')
            k, v = (torch.zeros(by_token, dtype=torch.float32, device=device) for _ in range(2))
            return k, v
        accepted = ((), (self.kv_heads,), (self.layers, self.kv_heads))
        for which, scale in zip("kv", scales, strict=True):
            if scale.dtype != torch.float32 or tuple(scale.shape) not in accepted:
                raise ValueError(
                    f"{name}: the scale of {which} is {scale.dtype} of shape {tuple(scale.shape)}, expected float32 of "
                    f"{', '.join(map(str, accepted[:2]))} or {accepted[2]}"
                )
        return scales[0].to(device), scales[1].to(device)

    # Steps.

    def _check_advanced(self) -> None:
        if not self._advanced and not self._captured and any(self._counts):
            raise RuntimeError(
                f"{type(self).__name__}.reserve: the lengths were not advanced for the tokens reserved before; call "
                f"advance first"
            )

    def _begin(self, counts: list[int]) -> None:
        """The step that was reserved: from here on nothing fails."""
        if counts != self._counts:
            self._send(self.counts, counts)
        self._counts, self._new = counts, max(counts, default=0)
        self._advanced, self._appended = False, set()

    def _drop(self, rows: slice) -> None:
        """Those sequences take no part any more in the step that was begun."""
        if any(self._counts[rows]):
            self._counts = [0 if i in range(rows.start, rows.stop) else n for i, n in enumerate(self._counts)]
            self._send(self.counts, self._counts)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """What the device is told of lengths, pages and counts meanwhile, it is told at the end, in the same order.

        For work that needs none of it and that should not wait for the host to tell it. What the host knows of
        sequences is as ever.
        """
        if self._later is not None:
            raise RuntimeError(f"{type(self).__name__}.deferred: is under way already")
        self._later = []
        try:
            yield
        finally:
            later, self._later = self._later, None
            for tell in later:
                tell()

    def _tell(self, tell: Callable[[], object]) -> None:
        """Do that on the device, now or at the end of what is deferred."""
        if self._later is None:
            tell()
        else:
            self._later.append(tell)

    def _send(self, tensor: Tensor, values: Sequence[Any]) -> None:
        sent = torch.tensor(values, dtype=tensor.dtype, device="cpu")  # as they are now
        self._tell(lambda: tensor.copy_(sent, non_blocking=True))

    def advance(self) -> None:
        """Move the lengths on the device by what was reserved. One launch, which a CUDA graph can hold.

        Raises:
            RuntimeError: nothing was reserved since the last call.
        """
        if self._advanced:
            raise RuntimeError(f"{type(self).__name__}.advance: no new tokens were reserved; call reserve first")
        self._tell(self._advance)
        self._advanced = True
        self._captured |= self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()

    def _advance(self) -> None:
        n = self.lengths.shape[0]
        tensors = (self.lengths, self.starts, self.counts)
        with on(self.lengths.device):
            plan = _advance_plan(pdl.early(self.lengths))
            launching.launch(plan, library.cdiv(n, 1024), tensors, (), (n, self.capacity))

    # Layers.

    def _layer(self, op: str, layer: int) -> int:
        if not isinstance(layer, int) or not 0 <= layer < self.layers:
            raise IndexError(f"{type(self).__name__}.{op}: layer is {layer!r}, expected 0 to {self.layers - 1}")
        return layer

    def inputs(self, layer: int) -> dict[str, Any]:
        """What `rooftile.decode_attention` takes beside q: views of this layer, and the lengths."""
        layer = self._layer("inputs", layer)
        scales = [None if s is None else s[layer] if s.dim() in (2, 4) else s for s in self._scales or (None, None)]
        return {
            "k_cache": self.k[layer],
            "v_cache": self.v[layer],
            "lengths": self.lengths,
            "page_table": self.page_table,
            "k_scale": scales[0],
            "v_scale": scales[1],
            "layout": self.layout,
        }

    def _step(self, op: str, layer: int, what: str, new: Tensor, axes: str) -> dict[str, Any]:
        """Where the new tokens of a layer go, when nothing speaks against it. `new` holds them, under the name that
        errors have, and `axes` names its dimensions."""
        name = f"{type(self).__name__}.{op}"
        given = self.inputs(self._layer(op, layer)) | {"lengths": self.starts, "counts": self.counts}
        if not self._advanced:
            raise RuntimeError(f"{name}: the lengths were not advanced for the tokens reserved; call advance first")
        if layer in self._appended:
            raise RuntimeError(f"{name}: layer {layer} has the tokens of this step; call extend or reserve for others")
        if isinstance(new, Tensor) and new.dim() == len(axes):  # if not, the op says so
            tokens = new.shape[axes.index("t")]
            if new.shape[0] != len(self._counts):
                raise ValueError(f"{name}: {what} has {new.shape[0]} sequences, expected {len(self._counts)}")
            if tokens != self._new:
                raise ValueError(f"{name}: {what} has {tokens} new tokens, expected the {self._new} that were reserved")
        return given

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write a layer's keys and values of this step: `(slots, T, H, D)` or, in layout `"bhtd"`, `(slots, H, T, D)`.

        Sequences with fewer new tokens than T have them first; what stands behind them is not written.

        Raises:
            RuntimeError: there is no step, or the layer has its tokens.
            IndexError: there is no such layer.
            ValueError, TypeError: as `rooftile.append_kv`. Nothing was written then.
        """
        append_kv(k, v, **self._step("append", layer, "k", k, self.layout))
        self._appended.add(layer)

    def rope_and_append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, style: Style = "half"
    ) -> Tensor:
        """`append` of k turned by its positions, and q turned: see `rooftile.rope_and_cache`. cos and sin are tables by
        position, `(positions, R)`, or given for each token."""
        given = self._step("rope_and_append", layer, "k", k, self.layout)
        turned = rope_and_cache(q, k, v, cos, sin, **given, style=style)
        self._appended.add(layer)
        return turned

    def norm_qkv_rope_and_append(
        self, layer: int, x: Tensor, norm_weight: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, **options: Any
    ) -> Tensor:
        """`rope_and_append` of the q, k and v of hidden states x, `(slots, T, K)`: see
        `rooftile.rms_norm_qkv_rope_cache`, whose bias, weight_scale, eps, offset and style `options` are.

        Raises:
            RuntimeError, IndexError: as `append`.
            ValueError, TypeError: as `rooftile.rms_norm_qkv_rope_cache`. Nothing was written then.
        """
        from rooftile.ops.gemm.qkv_rope_cache import rms_norm_qkv_rope_cache

        given = self._step("norm_qkv_rope_and_append", layer, "x", x, "btk")
        q = rms_norm_qkv_rope_cache(x, norm_weight, weight, cos, sin, **given, **options)
        self._appended.add(layer)
        return q

    def attend(self, layer: int, q: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """`rooftile.decode_attention` of q, `(slots, T, Hq, D)`, against this layer: of the last T tokens of the step,
        1 to 16, in every sequence that takes part. The rows of those that take none mean nothing. `options` are that
        function's.

        Raises:
            RuntimeError: the layer has not the tokens of the step, as far as the host knows: what a CUDA graph that
                advances does, it is not told.
            IndexError: there is no such layer.
            ValueError, TypeError: a sequence has fewer than T tokens in the step; or as `rooftile.decode_attention`.
        """
        from rooftile.ops.decode_attention import decode_attention

        given = self.inputs(self._layer("attend", layer))
        if layer not in self._appended and any(self._counts) and not self._captured:
            missing = "append" if self._advanced else "advance, then append"
            raise RuntimeError(
                f"{type(self).__name__}.attend: layer {layer} has not the keys and values of this step; "
                f"call {missing} first"
            )
        if isinstance(q, Tensor) and q.dim() == 4 and (fewer := [n for n in self._counts if 0 < n < q.shape[1]]):
            raise ValueError(
                f"{type(self).__name__}.attend: q has {q.shape[1]} tokens of each sequence, expected at most "
                f"{min(fewer)}: a sequence has no more in this step"
            )
        return decode_attention(q, **given, **options)
