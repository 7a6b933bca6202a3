"""KV caches: `KVCache` has contiguous memory for each sequence; `PagedKVCache`, in `paged_cache.py`, shares pages.

`CacheBase` is what both have: the memory, the steps by which sequences grow, and what a layer calls in a step.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile import launching, library, runtime  # before Triton: runtime fixes the mode of the process
from rooftile.engine.modes import on, plain_mode
from rooftile.library import check_layout
from rooftile.ops.decode_attention.choose import LONGEST_HEAD
from rooftile.ops.kv_cache import QUANTIZED, Layout, append_kv, rope_and_cache
from rooftile.ops.rope import Style
from rooftile.primitives import pdl
from rooftile.primitives.pdl import pdl_launch_dependents, pdl_wait

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit(do_not_specialize=["n", "capacity"])
def _advance_kernel(lengths_ptr, starts_ptr, counts_ptr, n, capacity, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """start = length; length += count, at most the capacity."""
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
    """The number of new tokens of a sequence, checked."""
    try:
        new = operator.index(n)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{op}: {n!r} new tokens for {sequence}, expected an integer") from None
    if new < 0:
        raise ValueError(f"{op}: {new} new tokens for {sequence}, expected 0 or more")
    return new


def int32(numbers: Iterable[int]) -> Tensor:
    """A tensor on the host. `torch.tensor` of a list takes several times as long."""
    copied = array.array("i", numbers)
    if not copied:
        return torch.empty(0, dtype=torch.int32, device="cpu")
    # By name, so that an audit knows it for the host's; nothing is copied.
    return torch.frombuffer(copied, dtype=torch.int32).to("cpu")


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The arguments that both caches share. See `KVCache`."""

    kv_heads: int
    head_dim: int
    value_dim: int | None
    layers: int
    dtype: torch.dtype
    device: torch.device | str | None
    layout: Layout
    scales: str | tuple[Tensor, Tensor] | None

    def check(self, name: str) -> None:
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        check_positive(name, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=value_dim, layers=self.layers)
        if max(self.head_dim, value_dim) > LONGEST_HEAD:
            raise ValueError(
                f"{name}: head_dim and value_dim are {self.head_dim} and {value_dim}, expected at most {LONGEST_HEAD}"
            )
        check_layout(name, self.layout)
        if self.dtype not in (*library.FLOATS, *QUANTIZED):
            raise TypeError(
                f"{name}: dtype is {self.dtype}, expected float32, float16, bfloat16, float8_e4m3fn or int8"
            )


class CacheBase:
    """Memory for keys and values of `slots` sequences, and the step that they are in. See its two subclasses.

    A step gives sequences new tokens. `reserve` sets how many, on the host, where it can fail without synchronizing;
    `advance` adds them to the lengths on the device; `extend` does both. Each layer then appends its keys and values,
    once. A CUDA graph captures `advance` and the layers' work; the host calls `reserve` before each replay.

    Attributes:
        k, v: `(layers, B, max_seq_len, H, D)` or `(layers, pages, page_size, H, D)`; in layout `"bhtd"` the heads come
            before the tokens.
        lengths: `(slots,)` int32, on the device: the tokens of each sequence, including those of the step.
        starts: `(slots,)` int32, on the device: the position of the first token of the step.
        counts: `(slots,)` int32, on the device: the tokens of each sequence in the step.
        page_table: `(slots, max_pages)` int32, on the device, or None.

    None of them is ever reallocated.
    """

    page_table: Tensor | None = None

    def __init__(self, kv: KVLayout, *, blocks: int, rows: int, slots: int, capacity: int) -> None:
        kv.check(type(self).__name__)
        device = runtime.device_of(type(self).__name__, kv.device)
        middle = (rows, kv.kv_heads) if kv.layout == "bthd" else (kv.kv_heads, rows)
        value_dim = kv.head_dim if kv.value_dim is None else kv.value_dim
        self.layers, self.kv_heads, self.layout, self.capacity = kv.layers, kv.kv_heads, kv.layout, capacity
        by_token = (kv.layers, blocks, *middle)
        with plain_mode(device):
            self.k = torch.zeros((*by_token, kv.head_dim), dtype=kv.dtype, device=device)
            self.v = torch.zeros((*by_token, value_dim), dtype=kv.dtype, device=device)
            self._scales = self._make_scales(kv.scales, by_token)
            self.lengths, self.starts, self.counts = (
                torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(3)
            )
        self._counts = [0] * slots  # what `counts` holds
        self._new = 0  # the largest of them
        self._begun = False  # the first step
        self._advanced = True
        self._captured = False  # a graph advances, and the host does not see when
        self._appended = set(range(kv.layers))  # the layers that have appended in this step
        self._later: list[Callable[[], object]] | None = None  # device updates that wait for the end of `deferred`

    def _make_scales(
        self, scales: str | tuple[Tensor, Tensor] | None, by_token: tuple[int, ...]
    ) -> tuple[Tensor, Tensor] | None:
        name, dtype, device = type(self).__name__, self.k.dtype, self.k.device
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
                f"{type(self).__name__}: the lengths were not advanced for the tokens reserved before; call advance "
                "first"
            )

    def _begin(self, counts: list[int]) -> None:
        """Begin the reserved step. Nothing fails from here on."""
        if counts != self._counts:
            self._send(self.counts, counts)
        self._counts, self._new = counts, max(counts, default=0)
        self._begun, self._advanced, self._appended = True, False, set()

    def _drop(self, slots: Collection[int]) -> None:
        """Take those sequences out of the current step."""
        if any(self._counts[i] for i in slots):
            self._counts = [0 if i in slots else n for i, n in enumerate(self._counts)]
            self._send(self.counts, self._counts)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Delay device updates of lengths, pages and counts until the block ends; their order stays.

        Use it around work that does not read them and should start first. The host's own state changes at once.
        """
        if self._later is not None:
            raise RuntimeError(f"{type(self).__name__}.deferred: is active already")
        self._later = []
        try:
            yield
        finally:
            later, self._later = self._later, None
            for tell in later:
                tell()

    def _tell(self, tell: Callable[[], object]) -> None:
        """Run a device update now, or at the end of `deferred`."""
        if self._later is None:
            tell()
        else:
            self._later.append(tell)

    def _send(self, tensor: Tensor, numbers: Iterable[int]) -> None:
        sent = int32(numbers)  # a copy: the list may change
        self._tell(lambda: tensor.copy_(sent, non_blocking=True))

    def advance(self) -> None:
        """Add the reserved tokens to the lengths on the device, by one launch, which a CUDA graph can capture.

        Raises:
            RuntimeError: nothing was reserved since the last call.
        """
        if self._advanced:
            raise RuntimeError(f"{type(self).__name__}.advance: no new tokens were reserved; call reserve first")
        self._tell(self.count)
        self._advanced = True
        self._captured |= self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()

    def count(self) -> None:
        """Add `counts` to the lengths on the device, by one launch, whatever is reserved."""
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

    def _check_begun(self, name: str) -> None:
        if not self._begun:
            raise RuntimeError(f"{name}: nothing is reserved; call extend first")

    def inputs(self, layer: int) -> dict[str, Any]:
        """The arguments of `rooftile.decode_attention` other than q, `(slots, T, Hq, D)`: views of this layer, and the
        lengths."""
        layer = self._layer("inputs", layer)
        scales = [None if s is None else s[layer] if s.dim() in (2, 4) else s for s in self._scales or (None, None)]
        return {
            "k_cache": self.k[layer],
            "v_cache": self.v[layer],
            "lengths": self.lengths,
            "page_table": self.page_table,
            "k_scale": scales[0],
            "v_scale": scales[1],
            "layout": "bthd",
            "cache_layout": self.layout,
        }

    def _step(self, op: str, layer: int, what: str, new: Tensor, axes: str) -> dict[str, Any]:
        """The arguments that say where a layer's new tokens go, after checks of the step.

        `new` holds the tokens; errors call it `what`, and `axes` names its dimensions.
        """
        name = f"{type(self).__name__}.{op}"
        given = self.inputs(self._layer(op, layer))
        self._check_begun(name)
        del given["lengths"]
        given |= {"starts": self.starts, "counts": self.counts, "layout": self.layout}
        if not self._advanced:
            raise RuntimeError(f"{name}: the lengths were not advanced for the tokens reserved; call advance first")
        if layer in self._appended:
            raise RuntimeError(f"{name}: layer {layer} has the tokens of this step; call extend or reserve for others")
        if isinstance(new, Tensor) and new.dim() == len(axes):  # else the op reports it
            tokens = new.shape[axes.index("t")]
            if new.shape[0] != len(self._counts):
                raise ValueError(f"{name}: {what} has {new.shape[0]} sequences, expected {len(self._counts)}")
            if tokens != self._new:
                raise ValueError(f"{name}: {what} has {tokens} new tokens, expected the {self._new} that were reserved")
        return given

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write a layer's keys and values of this step: `(slots, T, H, D)` or, in layout `"bhtd"`, `(slots, H, T, D)`.

        A sequence with fewer than T new tokens has them first; the rest of its row is not written.

        Raises:
            RuntimeError: there is no step, or the layer has appended in it.
            IndexError: there is no such layer.
            ValueError, TypeError: as `rooftile.append_kv`. Nothing was written then.
        """
        append_kv(k, v, **self._step("append", layer, "k", k, self.layout))
        self._appended.add(layer)

    def rope_and_append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, style: Style = "half"
    ) -> Tensor:
        """Rotate q and k by their positions, append k and v, and return the rotated q: see `rooftile.rope_and_cache`.

        cos and sin are tables by position, `(positions, R)`, or have a row for each token.
        """
        given = self._step("rope_and_append", layer, "k", k, self.layout)
        rotated = rope_and_cache(q, k, v, cos, sin, **given, style=style)
        self._appended.add(layer)
        return rotated

    def norm_qkv_rope_and_append(
        self, layer: int, x: Tensor, norm_weight: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, **options: Any
    ) -> Tensor:
        """`rope_and_append` of the q, k and v of hidden states x, `(slots, T, K)`: see
        `rooftile.rms_norm_qkv_rope_cache`. `options` are its bias, weight_scale, eps, offset and style.

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
        """`rooftile.decode_attention` of q, `(slots, T, Hq, D)`, against this layer.

        q belongs to the last T tokens of the step, 1 to 16, in every sequence that takes part. Rows of other sequences
        have no meaning. `options` are passed on.

        Raises:
            RuntimeError: there was no step yet, or the layer has not appended in this one. The latter is not raised
                after a CUDA graph has captured `advance`: the host does not see what a replay does.
            IndexError: there is no such layer.
            ValueError, TypeError: a sequence has fewer than T tokens in the step; or as `rooftile.decode_attention`.
        """
        from rooftile.ops.decode_attention import decode_attention

        given = self.inputs(self._layer("attend", layer))
        self._check_begun(f"{type(self).__name__}.attend")
        if layer not in self._appended and any(self._counts) and not self._captured:
            missing = "append" if self._advanced else "advance, then append"
            raise RuntimeError(
                f"{type(self).__name__}.attend: layer {layer} lacks the keys and values of this step; "
                f"call {missing} first"
            )
        if isinstance(q, Tensor) and q.dim() == 4 and (fewer := [n for n in self._counts if 0 < n < q.shape[1]]):
            raise ValueError(
                f"{type(self).__name__}.attend: q has {q.shape[1]} tokens of each sequence, expected at most "
                f"{min(fewer)}: a sequence has no more in this step"
            )
        return decode_attention(q, **given, **options)


class KVCache(CacheBase):
    """Keys and values of a batch of sequences, each with room for `max_seq_len` tokens.

        cache = rooftile.KVCache(batch, max_seq_len, kv_heads, head_dim, layers=layers)
        cache.extend(n)                                          # a step of n tokens for every sequence
        for layer in range(layers):
            q = cache.rope_and_append(layer, q, k, v, cos, sin)  # or cache.append(layer, k, v)
            y = cache.attend(layer, q)                           # rooftile.decode_attention(q, **cache.inputs(layer))

    Args:
        batch: sequences.
        max_seq_len: tokens of each.
        kv_heads, head_dim: of the keys.
        value_dim: the head dimension of the values, where it is another.
        layers: how many the model has.
        dtype: the model's, or float8_e4m3fn or int8.
        device: by default the GPU.
        layout: the order of tokens and heads in memory.
        scales: for the 8-bit dtypes. `"token"` (the default): one per token and head, written with the token. Or two
            tensors, of k and of v, float32, `()`, `(kv_heads,)` or `(layers, kv_heads)`.

    Bytes: `2 * layers * batch * max_seq_len * kv_heads * head_dim * itemsize`, allocated at once.
    """

    def __init__(
        self,
        batch: int,
        max_seq_len: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layers: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        layout: Layout = "bthd",
        scales: str | tuple[Tensor, Tensor] | None = None,
    ) -> None:
        check_positive("KVCache", batch=batch, max_seq_len=max_seq_len)
        kv = KVLayout(kv_heads, head_dim, value_dim, layers, dtype, device, layout, scales)
        super().__init__(kv, blocks=batch, rows=max_seq_len, slots=batch, capacity=max_seq_len)
        self._tokens = [0] * batch

    @property
    def tokens(self) -> list[int]:
        """The length of each sequence, as the host knows it: those reserved among them."""
        return list(self._tokens)

    def reserve(self, new: int | Sequence[int]) -> None:
        """Begin a step: new tokens for every sequence (an integer), or for each (a list).

        The device only gets new `counts`, where they change.

        Raises:
            TypeError: a number is not an integer.
            ValueError: a number is negative, the list has another length than the batch, or a sequence has no room.
            RuntimeError: `advance` was not called for the tokens reserved before.

        Nothing has changed then.
        """
        self._check_advanced()
        batch = len(self._tokens)
        counts = [new] * batch if isinstance(new, int) else list(new)
        if len(counts) != batch:
            raise ValueError(f"KVCache.reserve: new has {len(counts)} numbers, expected {batch}, one for each sequence")
        counts = [new_tokens("KVCache.reserve", f"sequence {b}", n) for b, n in enumerate(counts)]
        for b, (length, n) in enumerate(zip(self._tokens, counts, strict=True)):
            if length + n > self.capacity:
                raise ValueError(
                    f"KVCache.reserve: the cache is full: sequence {b} has {length} tokens, and {n} more do not fit "
                    f"into {self.capacity}"
                )
        self._tokens = [length + n for length, n in zip(self._tokens, counts, strict=True)]
        self._begin(counts)

    def extend(self, new: int | Sequence[int]) -> None:
        """`reserve` and `advance`."""
        self.reserve(new)
        self.advance()

    def reset(self, sequence: int | None = None) -> None:
        """Forget the tokens of a sequence, or of all, including those reserved for this step.

        Raises:
            IndexError: there is no such sequence.
        """
        batch = len(self._tokens)
        if sequence is not None and not 0 <= sequence < batch:
            raise IndexError(f"KVCache.reset: sequence is {sequence}, expected 0 to {batch - 1}")
        first, end = (0, batch) if sequence is None else (sequence, sequence + 1)
        self._tokens[first:end] = [0] * (end - first)
        self._send(self.lengths[first:end], self._tokens[first:end])
        self._drop(range(first, end))
