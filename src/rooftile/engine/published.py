"""Checkpoints of quantized weights as they are published: what `quantization_config` says, and the places of tensors.

    quant_method          tensors of a weight (N, K)                                      read into
    gptq                  qweight (K/8, N), qzeros (G, N/8), scales (G, N), g_idx (K,)    int4, groups of a row
    awq                   qweight (K, N/8), qzeros (G, N/8), scales (G, N)                int4, groups of a row
    compressed-tensors    weight_packed (N, K/8), weight_scale (N, G), weight_zero_point  int4, groups of a row
                          weight (N, K) in int8, weight_scale                             int8, rows
                          weight (N, K) in float8_e4m3fn, weight_scale                    fp8, rows or blocks
    fp8, fbgemm_fp8       weight (N, K) in float8_e4m3fn, weight_scale or _scale_inv      fp8, rows or blocks

Words of 32 bits hold eight numbers of 4 bits. The numbers and the scales stay those of the checkpoint: a tensor is
unpacked, packed in the kernels' order, and its scales are repeated where a kernel has more of them. What the kernels
can't hold is refused.

Sources: AutoGPTQ's and GPTQModel's `QuantLinear`, AutoAWQ's `WQLinear_GEMM`, compressed-tensors'
`PackedQuantizationCompressor`, and transformers' `FP8Linear`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rooftile import library
from rooftile.engine.checkpoint import DTYPES, Checkpoint, CheckpointError, Entry, Place, Share
from rooftile.engine.projections import Dense, Fp8, Fp8Block, Int4, Int8, Projection
from rooftile.ops.gemm.packing import GROUPS, pack_int4
from rooftile.quantize import BLOCK

Found = Mapping[str, Entry]
Orders = Mapping[str, Tensor]
Storage = Literal["gptq", "awq", "packed", "int8", "fp8"]
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8")
_WORDS, _FP8, _INT8 = ("I32",), ("F8_E4M3",), ("I8",)
_INDICES = ("I32", "I64")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that has each of its columns
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}  # a scale keeps the dtype that the checkpoint gives it


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How some modules are stored.

    Attributes:
        storage: the layout of the tensors.
        group: of 4 bits, the columns of a row that share a scale; -1 for all.
        zeros: of 4 bits, whether groups have zero points.
        less: what the stored zero points are smaller by.
        ordered: whether the columns of a group may be any (act-order).
        block: of fp8, whether scales belong to blocks of 128 x 128.
    """

    storage: Storage
    group: int = 0
    zeros: bool = False
    less: int = 0
    ordered: bool = False
    block: bool = False

    @property
    def is_int4(self) -> bool:
        return self.storage in ("gptq", "awq", "packed")


@dataclasses.dataclass(frozen=True)
class Published:
    """A `quantization_config`: the schemes with the modules that they belong to, and the modules without one.

    Attributes:
        method: the quant_method.
        schemes: each with the patterns of its modules, the first that matches decides.
        skipped: patterns of modules that are not quantized.
        source: the file, for errors.
    """

    method: str
    schemes: tuple[tuple[Scheme, tuple[str, ...]], ...]
    skipped: tuple[str, ...]
    source: str

    def scheme_of(self, module: str) -> Scheme | None:
        """How that module is stored; None where it is not quantized."""
        matches = _matches if self.method == "compressed-tensors" else _contains
        if any(matches(p, module) for p in self.skipped):
            return None
        return next((s for s, patterns in self.schemes if any(matches(p, module) for p in patterns)), None)

    def ignores(self, name: str) -> bool:
        """Whether a tensor describes activations, which the engine quantizes by itself or not at all, or the cache."""
        return name.rpartition(".")[2] in _OF_ACTIVATIONS

    def projection(
        self, prefix: str, parts: dict[str, Share], n: int, columns: Share, *, bias: bool, dtype: torch.dtype,
        device: torch.device, found: Found, orders: Orders,
    ) -> Projection:  # fmt: skip
        """Memory for a projection of n rows and some columns; `parts` are the checkpoint's modules that it is made of,
        with their rows.

        `orders` are of `orders_of`.

        Raises:
            CheckpointError: they are not stored alike, or in a way that the kernels don't take.
        """
        modules, k = [prefix + name for name in parts], columns.size
        schemes = [self.scheme_of(module) for module in modules]
        made: dict[str, Any] = {"bias": bias, "dtype": dtype, "device": device}
        for module, scheme in zip(modules, schemes, strict=True):
            if scheme != schemes[0]:
                what = "quantized otherwise" if scheme and schemes[0] else "quantized, the other is not"
                raise CheckpointError(
                    f"{self.source}: {module if scheme else modules[0]} is {what}: {modules[0]} and {module} are one "
                    "GEMM, expected them in one format"
                )
        scheme = schemes[0]
        if scheme is None:
            return Dense(n, k, **made)
        if scheme.is_int4:
            self._groups(modules[0], scheme, columns)
            self._group(modules[0], scheme, k)
            given = {found[m + _SCALE[scheme.storage]].dtype for m in modules if m + _SCALE[scheme.storage] in found}
            scales = _SCALES.get(given.pop(), torch.float32) if len(given) == 1 else None
            group = _kernel_group(scheme.group, k)
            order = orders.get(modules[0])
            if order is not None and not columns.is_all:
                raise CheckpointError(
                    f"{self.source}: {self._ordering}, and {modules[0]} has columns of a group on several ranks, "
                    "expected tensor_parallel=1"
                )
            for module in modules[1:]:
                if not _same(order, orders.get(module)):
                    raise CheckpointError(
                        f"{self.source}: {self._ordering}, and {modules[0]} and {module} have other groups of columns, "
                        "expected the same: they are one GEMM"
                    )
            return Int4(n, k, **made, group=group, scales=scales, offsets=scheme.zeros, order=order)
        if scheme.block:
            for name, share in list(parts.items())[:-1]:
                rows = share.size
                if rows % BLOCK:
                    raise CheckpointError(
                        f"{self.source}: {prefix}{name} has {rows} rows, expected a multiple of {BLOCK}: it shares a "
                        f"GEMM with others, and scales belong to blocks of {BLOCK} x {BLOCK}"
                    )
            return Fp8Block(n, k, **made)
        return (Int8 if scheme.storage == "int8" else Fp8)(n, k, **made)

    def _group(self, module: str, scheme: Scheme, k: int) -> int:
        """Columns of a row that share a stored scale."""
        group = k if scheme.group == -1 else scheme.group
        if k % group or not _kernel_group(scheme.group, k):
            expected = f"a multiple of the group of {group}" if k % group else "a multiple of 32"
            raise CheckpointError(f"{self.source}: {module} has {k} columns, expected {expected}")
        return group

    def _in_units(self, module: str, share: Share, unit: int) -> Share:
        """A rank's part of a dimension of which so many share a word or a scale."""
        found = share.in_units(unit)
        if found is None:
            raise CheckpointError(
                f"{self.source}: {module} has {share.whole} rows or columns, of which each rank has {share.size}, "
                f"expected a multiple of {unit}, which share a word or a scale"
            )
        return found

    def _groups(self, module: str, scheme: Scheme, columns: Share) -> Share:
        return Share.all(1) if scheme.group == -1 else self._in_units(module, columns, scheme.group)

    def places(
        self, module: str, scheme: Scheme, p: Projection, rows: slice, shares: tuple[Share, Share], found: Found
    ) -> Iterator[tuple[str, Place]]:
        """The tensors of a module, which has those rows of the projection, and their places.

        `shares` are what this rank has of the module's rows and columns.
        """
        places = self._int4_places if scheme.is_int4 else self._eight_bit_places
        for name, place in places(module, scheme, p, rows, shares, found):
            yield f"{module}.{name}", place

    def _eight_bit_places(
        self, module: str, scheme: Scheme, p: Projection, rows: slice, shares: tuple[Share, Share], found: Found
    ) -> Iterator[tuple[str, Place]]:
        weight, n = p.weight[rows], rows.stop - rows.start

        def fill(first: int, part: Tensor) -> None:
            weight[first : first + part.shape[0]].copy_(part)

        yield "weight", Place.of(shares, fill, _INT8 if scheme.storage == "int8" else _FP8)
        names = ("weight_scale_inv", "weight_scale") if self.method == "fp8" else ("weight_scale",)
        name = next((name for name in names if f"{module}.{name}" in found), names[0])
        if scheme.block:
            assert isinstance(p, Fp8Block), "made for it"
            first = rows.start // BLOCK
            scale = p.scale[first : first + library.cdiv(n, BLOCK)]
            blocks = (self._in_units(module, shares[0], BLOCK), self._in_units(module, shares[1], BLOCK))
            yield name, Place.of(blocks, lambda _, given: _copy(scale, given), whole=True)
            return
        assert isinstance(p, (Int8, Fp8)), "made for it"
        of_rows = p.scale[rows]

        def fill_scale(_: int, given: Tensor) -> None:
            of_rows.copy_(given.reshape(-1, *(1,) * (of_rows.dim() - 1)).expand_as(of_rows))

        all_rows = shares[0].whole
        others: tuple[tuple[int, ...], ...] = ((all_rows,), (1,), (), (1, 1))
        yield name, Place.of((shares[0], Share.all(1)), fill_scale, others=others, whole=True)
        yield self._zeros(f"{module}.weight_zero_point", _SYMMETRIC, (all_rows, 1), *others, dtypes=_INT8 + _FP8)

    def _int4_places(
        self, module: str, scheme: Scheme, p: Projection, rows: slice, shares: tuple[Share, Share], found: Found
    ) -> Iterator[tuple[str, Place]]:
        assert isinstance(p, Int4), "made for it"
        n, k, group = rows.stop - rows.start, p.k, self._group(module, scheme, p.k)
        weight, scale, repeats = p.weight[rows], p.scale[rows], group // p.group
        scale, offset = (scale[..., 0], scale[..., 1]) if p.offsets else (scale, None)
        of_words, by_columns = _UNPACK[scheme.storage], scheme.storage != "packed"
        zeros_of_words = _UNPACK_ZEROS[scheme.storage]
        of_groups = self._groups(module, scheme, shares[1])

        def fill(_: int, given: Tensor) -> None:
            numbers = of_words(given)[:, :k]
            if p.order is not None:
                numbers = numbers[:, p.order]
            weight.copy_(pack_int4(numbers.view(torch.int8) - 8, p.group))

        def fill_scale(_: int, given: Tensor) -> None:
            scale.copy_((given.T if by_columns else given).repeat_interleave(repeats, 1))

        def fill_zeros(_: int, given: Tensor) -> None:
            zeros = zeros_of_words(given)[:n].to(torch.int16) + scheme.less
            if offset is not None:
                offset.copy_((8 - zeros).repeat_interleave(repeats, 1))
            elif bool((zeros != 8).any()):
                raise CheckpointError(
                    f"{self.source}: sym is true, but {module}.qzeros has zero points from {int(zeros.min())} to "
                    f"{int(zeros.max())}, expected 8"
                )

        if scheme.storage == "packed":
            if k % 8:
                raise CheckpointError(f"{self.source}: {module} has {k} columns, expected a multiple of 8")
            yield "weight_packed", Place.of((shares[0], self._in_units(module, shares[1], 8)), fill, _WORDS, whole=True)
            others = ((shares[0].whole,),) * (of_groups.whole == 1)
            yield "weight_scale", Place.of((shares[0], of_groups), fill_scale, others=others, whole=True)
            if scheme.zeros:
                words = self._in_units(module, shares[0], 8)
                yield "weight_zero_point", Place.of((words, of_groups), fill_zeros, _WORDS, whole=True)
            else:  # old versions write zeros
                shapes = (shares[0].whole, of_groups.whole), (shares[0].whole,)
                yield self._zeros(f"{module}.weight_zero_point", _SYMMETRIC, *shapes, dtypes=_INT8)
            check_shape = functools.partial(self._check_shape, module, (shares[0].whole, shares[1].whole))
            yield "weight_shape", Place((2,), check_shape, ("I64", "I32"), whole=True, optional=True)
            g_idx = "weight_g_idx"
        else:
            if n % 8:
                raise CheckpointError(f"{self.source}: {module} has {n} rows, expected a multiple of 8")
            words, columns = self._in_units(module, shares[0], 8), shares[1]
            stored = (columns, words) if scheme.storage == "awq" else (self._in_units(module, columns, 8), shares[0])
            yield "qweight", Place.of(stored, fill, _WORDS, whole=True)
            yield "qzeros", Place.of((of_groups, words), fill_zeros, _WORDS, whole=True)
            yield "scales", Place.of((of_groups, shares[0]), fill_scale, whole=True)
            g_idx = "g_idx"
            if p.bias is None:  # old versions write zeros
                yield self._zeros(f"{module}.bias", "the model has no such bias", (shares[0].whole,))
        if scheme.storage != "awq":
            # It has been read by `orders_of`.
            yield g_idx, Place.of(shares[1:], _nothing, _INDICES, whole=True, optional=not scheme.ordered)

    def _check_shape(self, module: str, expected: tuple[int, int], _: int, shape: Tensor) -> None:
        if tuple(shape.tolist()) != expected:
            raise CheckpointError(
                f"{self.source}: {module}.weight_shape is {tuple(shape.tolist())}, expected {expected}"
            )

    def _zeros(
        self, name: str, why: str, *shapes: tuple[int, ...], dtypes: tuple[str, ...] = tuple(DTYPES)
    ) -> tuple[str, Place]:
        """The place of a tensor that may be there if it is all zeros."""

        def check(_: int, given: Tensor) -> None:
            if bool(given.float().any()):
                raise CheckpointError(f"{self.source}: {name} is not zero, expected none: {why}")

        return name.rpartition(".")[2], Place(shapes[0], check, dtypes, shapes[1:], whole=True, optional=True)

    @property
    def _ordering(self) -> str:
        return "desc_act is true" if self.method == "gptq" else "actorder is 'group'"

    def orders_of(self, checkpoint: Checkpoint) -> Orders:
        """The columns of each module group by group, where those of a group are not adjacent (act-order).

        Raises:
            CheckpointError: groups have not all the same number of columns.
        """
        wanted = {}
        for name, entry in checkpoint.entries.items():
            module, _, of = name.rpartition(".")
            scheme = self.scheme_of(module) if of in ("g_idx", "weight_g_idx") else None
            if scheme is not None and scheme.is_int4 and entry.dtype in _INDICES and len(entry.shape) == 1:
                wanted[entry] = module, scheme
        orders = {}
        for entry, g_idx in checkpoint.read(list(wanted)):
            (module, scheme), k = wanted[entry], len(g_idx)
            adjacent = torch.arange(k, device=g_idx.device) // self._group(module, scheme, k)
            if torch.equal(g_idx.long(), adjacent):
                continue
            order = g_idx.argsort(stable=True)
            if not torch.equal(g_idx[order].long(), adjacent):
                raise CheckpointError(
                    f"{entry}: {self._ordering}, and groups have other numbers of columns, expected "
                    f"{self._group(module, scheme, k)} for each"
                )
            orders[module] = order
        return orders


_SYMMETRIC = "symmetric is true"
_OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_scale_ub",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
)
_SCALE: dict[Storage, str] = {"gptq": ".scales", "awq": ".scales", "packed": ".weight_scale"}


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def _nothing(_: int, given: Tensor) -> None:
    pass


def _copy(into: Tensor, given: Tensor) -> None:
    into.copy_(given)


def _kernel_group(group: int, k: int) -> int:
    """The group of the kernel that holds such groups; 0 where none does."""
    if group == -1:
        return Int4.group_of(k) or 0
    return group if group in GROUPS else GROUPS[-1] * (group % GROUPS[-1] == 0)


# Words of eight numbers


def _nibbles(words: Tensor) -> Tensor:
    """The eight numbers of each word, from the lowest bits on: uint8 `(..., 8)`."""
    pairs = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))  # bytes, the lowest first
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def _along_rows(words: Tensor) -> Tensor:
    """(R, C/8) as (R, C)."""
    return _nibbles(words).flatten(1)


def _along_columns(words: Tensor) -> Tensor:
    """(R/8, C) as (C, R)."""
    return _nibbles(words).transpose(0, 1).flatten(1)


def _awq(words: Tensor) -> Tensor:
    """(K, N/8), interleaved, as (N, K)."""
    order = torch.tensor(_AWQ_ORDER, device=words.device)
    return _nibbles(words)[..., order].flatten(1).T


_UNPACK: dict[Storage, Callable[[Tensor], Tensor]] = {"gptq": _along_columns, "awq": _awq, "packed": _along_rows}
_UNPACK_ZEROS: dict[Storage, Callable[[Tensor], Tensor]] = {
    "gptq": lambda words: _along_rows(words).T,
    "awq": _awq,
    "packed": lambda words: _along_columns(words).T,
}


# Names of modules


def _contains(pattern: str, module: str) -> bool:
    """As transformers' `should_convert_module`: a prefix, a regular expression from the beginning, or the end."""
    return bool(re.match(pattern, module)) or module.endswith(pattern)


def _matches(pattern: str, module: str) -> bool:
    """As compressed-tensors: `re:` and a regular expression, a class, or a name."""
    if pattern.startswith("re:"):
        return bool(re.match(pattern[3:], module))
    return pattern in ("Linear", module)


# quantization_config


def read(given: Any, source: str) -> Published:
    """What config.json's `quantization_config` says.

    Raises:
        ValueError: the method, or one of its settings, is not one that the engine reads. The message names it.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{source}: quantization_config is {given!r}, expected an object")
    q = _Settings(given, f"{source}: quantization_config")
    method = q.one_of("quant_method", *METHODS)
    if method == "gptq":
        return Published(method, *_gptq(q), source)
    if method == "awq":
        return Published(method, *_awq_config(q), source)
    if method == "compressed-tensors":
        return Published(method, *_compressed(q), source)
    return Published(method, *_fp8(q), source)


class _Settings:
    """Settings, and errors that name them."""

    def __init__(self, given: Mapping[str, Any], at: str) -> None:
        self.given, self.at = given, at

    def refuse(self, name: str, expected: str) -> ValueError:
        return ValueError(f"{self.at}: {name} is {self.given.get(name)!r}, expected {expected}")

    def one_of(self, name: str, *accepted: Any, default: Any = None) -> Any:
        value = self.given.get(name)
        if value is None:
            value = default
        if value not in accepted or (isinstance(value, bool) and True not in accepted and False not in accepted):
            raise self.refuse(name, " or ".join(map(repr, accepted)))
        return value

    def flag(self, name: str, default: bool) -> bool:
        value: bool = self.one_of(name, True, False, default=default)
        return value

    def group(self, name: str = "group_size") -> int:
        value = self.given.get(name)
        value = -1 if value is None else value
        if not isinstance(value, int) or (value != -1 and (value < 1 or not _kernel_group(value, value))):
            raise self.refuse(name, "-1, 32, 64 or a multiple of 128")
        return value

    def patterns(self, name: str) -> tuple[str, ...]:
        value = self.given.get(name) or ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise self.refuse(name, "a list of names")
        for pattern in value:
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as e:
                raise ValueError(f"{self.at}: {name} has {pattern!r}, which is no regular expression: {e}") from e
        return tuple(value)

    def part(self, name: str) -> _Settings | None:
        value = self.given.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(name, "an object")
        return _Settings(value, f"{self.at}: {name}")


_Read = tuple[tuple[tuple[Scheme, tuple[str, ...]], ...], tuple[str, ...]]
_ALL = (".*",)


def _gptq(q: _Settings) -> _Read:
    q.one_of("bits", 4)
    name = "checkpoint_format" if "checkpoint_format" in q.given else "format"
    form = q.one_of(name, "gptq", "gptq_v2", default="gptq")
    if q.given.get("is_marlin_format"):
        raise q.refuse("is_marlin_format", "false")
    q.one_of("pack_dtype", "int32", default="int32")
    dynamic = q.given.get("dynamic") or {}
    for pattern in dynamic:
        if not pattern.startswith("-:"):
            raise ValueError(
                f"{q.at}: dynamic has {pattern!r}, expected -: and a regular expression: one setting for all"
            )
    scheme = Scheme(
        "gptq", q.group(), zeros=not q.flag("sym", True), less=int(form == "gptq"), ordered=q.flag("desc_act", False)
    )
    blocks = q.given.get("modules_in_block_to_quantize") or ()
    names = [n for b in blocks for n in ([b] if isinstance(b, str) else b)]
    patterns = tuple(f".*\\.{re.escape(n)}$" for n in names) or _ALL
    head = () if q.flag("lm_head", False) else ("lm_head",)
    return ((scheme, patterns),), (*q.patterns("modules_to_not_convert"), *(p[2:] for p in dynamic), *head)


def _awq_config(q: _Settings) -> _Read:
    name = "w_bit" if "w_bit" in q.given else "bits"
    q.one_of(name, 4)
    for word in ("version", "format", "checkpoint_format"):
        if str(q.given.get(word, "gemm")).lower() != "gemm":
            raise q.refuse(word, "'gemm'")
    group = q.group("q_group_size" if "q_group_size" in q.given else "group_size")
    scheme = Scheme("awq", group, zeros=True)
    return ((scheme, _ALL),), (*q.patterns("modules_to_not_convert"), "lm_head")


def _fp8(q: _Settings) -> _Read:
    q.one_of("fmt", "e4m3", default="e4m3")
    q.one_of("activation_scheme", "dynamic", "static", default="dynamic")
    size = q.given.get("weight_block_size")
    if size is not None and list(size) != [BLOCK, BLOCK]:
        raise q.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}] or null")
    skipped = (*q.patterns("modules_to_not_convert"), *q.patterns("ignored_layers"), "lm_head")
    return ((Scheme("fp8", block=size is not None), _ALL),), skipped


def _compressed(q: _Settings) -> _Read:
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    of_all = q.one_of("format", *formats, "mixed-precision")
    sparsity = q.part("sparsity_config")
    if sparsity is not None and sparsity.given.get("format", "dense") != "dense":
        raise sparsity.refuse("format", "'dense'")
    groups = q.part("config_groups")
    if groups is None or not groups.given:
        raise q.refuse("config_groups", "the groups of modules")
    schemes = []
    for name in groups.given:
        one = groups.part(name)
        weights = None if one is None else one.part("weights")
        if one is None or weights is None:
            raise groups.refuse(name, "an object with weights")
        form = one.one_of("format", *formats, default=of_all)
        schemes.append((_of_weights(weights, form), one.patterns("targets")))
    return tuple(schemes), q.patterns("ignore")


def _of_weights(w: _Settings, form: str) -> Scheme:
    kind = w.one_of("type", "int", "float", default="int")
    bits = w.one_of("num_bits", *((8,) if kind == "float" else (4, 8)))
    symmetric = w.flag("symmetric", True)
    if w.given.get("dynamic"):
        raise w.refuse("dynamic", "false")
    if bits == 4:
        if form != "pack-quantized":
            raise ValueError(f"{w.at}: num_bits is 4 and format {form!r}, expected format 'pack-quantized'")
        strategy = w.one_of("strategy", "group", "channel", default="group")
        group = w.group() if strategy == "group" else -1
        return Scheme("packed", group, zeros=not symmetric, ordered=w.given.get("actorder") == "group")
    if form == "pack-quantized":
        raise w.refuse("num_bits", "4 for format 'pack-quantized'")
    if not symmetric:
        raise w.refuse("symmetric", "true for weights of 8 bits, whose kernels have no zero points")
    strategies = ("tensor", "channel", "block") if kind == "float" else ("tensor", "channel")
    block = w.one_of("strategy", *strategies, default="tensor") == "block"
    if block and list(w.given.get("block_structure") or ()) != [BLOCK, BLOCK]:
        raise w.refuse("block_structure", f"[{BLOCK}, {BLOCK}]")
    return Scheme("fp8" if kind == "float" else "int8", block=block)
