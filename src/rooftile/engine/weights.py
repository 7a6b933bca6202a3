"""A model's weights on the device, as its kernels take them: q, k and v are one projection, and so are gate and up.

Memory for the whole model is allocated first. Each tensor of a checkpoint is then read straight into its rows, some
megabytes at a time, and quantized on the way if the caller asks for that. A checkpoint of quantized weights is packed
anew on the way, as the kernels read it (`published.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from rooftile import library, runtime
from rooftile.engine.checkpoint import DTYPES, Checkpoint, CheckpointError, Entry, Place, Share
from rooftile.engine.config import ModelConfig
from rooftile.engine.modes import plain_mode
from rooftile.engine.projections import Dense, Projection, kind_of
from rooftile.engine.published import Found, Orders, Published
from rooftile.engine.split import WHOLE, Split

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AT_A_TIME = 1 << 24  # elements of a tensor that are sent to the device at a time
_LARGEST_HALF = torch.finfo(torch.float16).max


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A layer's weights. qkv has the rows of q, then k, then v; gate_up those of gate, then up. Norms that the model
    does not have are None: before attention, of q and k, of what attention adds, before the MLP, of what the MLP adds.
    """

    input_norm: Tensor | None
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    attention_norm: Tensor | None
    post_norm: Tensor | None
    gate_up: Projection
    down: Projection
    mlp_norm: Tensor | None

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Tensor, ...]:
        norms = (self.input_norm, self.q_norm, self.k_norm, self.attention_norm, self.post_norm, self.mlp_norm)
        return tuple(n for n in norms if n is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A model's weights, or a rank's part of them. `embedding` is `(vocab, hidden)`; `norm` is the last norm's, times
    the logits' scale."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    lm_head: Projection

    @property
    def nbytes(self) -> int:
        """Bytes that a decoding step reads: each weight once, without the embedding, of which it reads a few rows."""
        projections = [p for layer in self.layers for p in layer.projections]
        norms = [n for layer in self.layers for n in layer.norms]
        return sum(p.nbytes for p in (*projections, self.lm_head)) + sum(
            n.numel() * n.element_size() for n in (*norms, self.norm)
        )


def invariant(weights: Weights) -> Weights:
    """The same weights, whose GEMMs compute a row in one way, whatever the other rows are."""
    layers = [
        dataclasses.replace(
            layer, **{name: getattr(layer, name).invariant() for name in ("qkv", "o", "gate_up", "down")}
        )
        for layer in weights.layers
    ]
    return dataclasses.replace(weights, layers=layers, lm_head=weights.lm_head.invariant())


def _into(tensor: Tensor) -> Place:
    return Place(tuple(tensor.shape), lambda first, rows: _set(tensor, first, rows))


def _set(tensor: Tensor, first: int, rows: Tensor) -> None:
    tensor[first : first + rows.shape[0]].copy_(rows)


def _parts(
    prefix: str, projection: Projection, parts: dict[str, Share], k: Share, bias: bool, published: Published | None,
    found: Found,
) -> Iterator[tuple[str, Place]]:  # fmt: skip
    """The checkpoint's tensors that a projection is made of. `parts` has their names and rows, `k` the columns."""
    at = 0
    for name, rows_of in parts.items():
        n = rows_of.size

        def fill(first: int, rows: Tensor, at: int = at) -> None:
            projection.fill(at + first, rows)

        def fill_bias(first: int, values: Tensor, at: int = at) -> None:
            if projection.bias is not None:  # else it is another rank's
                projection.fill_bias(at + first, values)

        scheme = None if published is None else published.scheme_of(f"{prefix}{name}")
        if published is None or scheme is None:
            yield f"{prefix}{name}.weight", Place.of((rows_of, k), fill)
        else:
            rows = slice(at, at + n)
            yield from published.places(f"{prefix}{name}", scheme, projection, rows, (rows_of, k), found)
        if bias:
            yield f"{prefix}{name}.bias", Place.of((rows_of,), fill_bias)
        at += n


def _check(config: ModelConfig, dtype: torch.dtype, quantize: str | None, split: Split) -> None:
    if dtype not in library.FLOATS:
        raise TypeError(f"dtype is {dtype}, expected float32, float16 or bfloat16")
    if quantize is not None and config.published is not None:
        raise ValueError(
            f"{config.source}: quantize is {quantize!r}, expected None: the checkpoint is quantized already "
            f"({config.published.method})"
        )
    if kind_of(quantize).kind == "int4":
        sizes = {
            "hidden_size": config.hidden,
            "num_attention_heads * head_dim": config.heads * config.head_dim,
            "intermediate_size": config.intermediate,
        }
        for name, size in sizes.items():
            if size % 32:
                raise ValueError(f"{config.source}: {name} is {size}, expected a multiple of 32 for quantize='int4'")
        for name, size in list(sizes.items())[1:]:  # columns of o and down
            if size // split.ranks % 32:
                raise ValueError(
                    f"{config.source}: {name} is {size}, of which each of {split.ranks} ranks has "
                    f"{size // split.ranks}, expected a multiple of 32 for quantize='int4'"
                )


def _empty(
    config: ModelConfig,
    dtype: torch.dtype,
    quantize: str | None,
    device: torch.device,
    tied: bool,
    split: Split,
    checkpoint: Checkpoint | None = None,
    orders: Orders | None = None,
) -> tuple[Weights, dict[str, Place]]:
    """Memory for a model, and the place in it of each tensor of a checkpoint. Norms are ones, biases zeros.

    Of the projections and the vocabulary it is this rank's part. A checkpoint of quantized weights is asked which of
    the tensors it has that a scheme allows; `orders` are of its columns.
    """
    _check(config, dtype, quantize, split)
    c, kind, published = config, kind_of(quantize), config.published
    found: Found = {} if checkpoint is None else checkpoint.entries
    places: dict[str, Place] = {}

    def norm(name: str, size: int, present: bool = True) -> Tensor | None:
        if not present:
            return None
        if c.norm_offset == 0:
            tensor = torch.ones(size, dtype=dtype, device=device)
            places[f"{name}.weight"] = _into(tensor)
            return tensor
        # In float32, so that the sum is not rounded.
        tensor = torch.ones(size, dtype=torch.float32, device=device)
        places[f"{name}.weight"] = Place((size,), lambda at, rows: _set(tensor, at, rows.float() + c.norm_offset))
        return tensor

    def projection(prefix: str, parts: dict[str, Share], k: Share, bias: bool) -> Projection:
        n = sum(rows.size for rows in parts.values())
        given: dict[str, Any] = {"dtype": dtype, "device": device}
        given["bias"] = bias and (k.is_all or split.rank == 0)  # where k is split, the results of all ranks are added
        if published is not None:
            made = published.projection(prefix, parts, n, k, **given, found=found, orders=orders or {})
        else:
            made = kind(n, k.size, **given)
        places.update(_parts(prefix, made, parts, k, bias, published, found))
        return made

    vocab, hidden = split.equal(c.vocab), Share.all(c.hidden)
    embedding = torch.empty((vocab.size, c.hidden), dtype=dtype, device=device)
    places[_EMBEDDING] = Place.of((vocab, hidden), functools.partial(_set, embedding))
    layers = []
    q, kv, inner = split.equal(c.heads * c.head_dim), split.kv(c), split.equal(c.intermediate)
    qkv, gate_up = {"q_proj": q, "k_proj": kv, "v_proj": kv}, {"gate_proj": inner, "up_proj": inner}
    if c.packed:  # in the same order
        qkv, gate_up = {"qkv_proj": q + kv + kv}, {"gate_up_proj": inner + inner}
    # Of what attention adds where there is one, else before the MLP.
    between = "post_attention_layernorm"
    before_mlp = "pre_feedforward_layernorm" if c.output_norms else between
    q_norm, k_norm = (q.size, kv.size) if c.whole_qk_norm else (c.head_dim, c.head_dim)
    has_qk_norm = c.qk_norm or c.whole_qk_norm
    for i in range(c.layers):
        at = f"model.layers.{i}."
        layers.append(
            Layer(
                input_norm=norm(f"{at}input_layernorm", c.hidden, c.input_norms),
                qkv=projection(f"{at}self_attn.", qkv, hidden, c.qkv_bias),
                q_norm=norm(f"{at}self_attn.q_norm", q_norm, has_qk_norm),
                k_norm=norm(f"{at}self_attn.k_norm", k_norm, has_qk_norm),
                o=projection(f"{at}self_attn.", {"o_proj": hidden}, q, c.o_bias),
                attention_norm=norm(f"{at}{between}", c.hidden, c.output_norms),
                post_norm=norm(f"{at}{before_mlp}", c.hidden, c.input_norms),
                gate_up=projection(f"{at}mlp.", gate_up, hidden, c.mlp_bias),
                down=projection(f"{at}mlp.", {"down_proj": hidden}, inner, c.mlp_bias),
                mlp_norm=norm(f"{at}post_feedforward_layernorm", c.hidden, c.output_norms),
            )
        )
    last = norm("model.norm", c.hidden)
    assert last is not None, "every model has it"
    lm_kind = kind_of(quantize, lm_head=True)
    if tied and lm_kind is Dense:
        return Weights(embedding, layers, last, Dense.of(embedding)), places
    if published is not None:
        return Weights(embedding, layers, last, projection("", {"lm_head": vocab}, hidden, False)), places
    lm_head = lm_kind(vocab.size, c.hidden, bias=False, dtype=dtype, device=device)
    if tied:  # a quantized lm_head is a tensor of its own

        def both(first: int, rows: Tensor) -> None:
            _set(embedding, first, rows)
            lm_head.fill(first, rows)

        places[_EMBEDDING] = Place.of((vocab, hidden), both)
    else:
        places[_LM_HEAD] = Place.of((vocab, hidden), lm_head.fill)
    return Weights(embedding, layers, last, lm_head), places


def _with_logits_scale(weights: Weights, scale: float) -> Weights:
    """The weights with the logits' scale folded into the last norm's weight.

    A power of two leaves the logits bit-identical. For any other scale the weight becomes float32, so that it is not
    rounded a second time. On the meta device nothing is computed: PyTorch would import its compiler, in seconds.
    """
    if scale == 1 or weights.norm.device.type == "meta":
        return weights
    wide = weights.norm.float() * scale
    exact = wide.to(weights.norm.dtype)
    return dataclasses.replace(weights, norm=exact if torch.equal(exact.float(), wide) else wide)


def _harmless(name: str, config: ModelConfig, tied: bool) -> bool:
    """Whether a tensor without a place may be dropped: RoPE frequencies of old checkpoints, a tied lm_head, and what a
    quantized checkpoint says of activations and of its cache."""
    if config.published is not None and config.published.ignores(name):
        return True
    return name.endswith("rotary_emb.inv_freq") or (tied and name == _LM_HEAD)


# Prefixes of a multimodal checkpoint's names, and what text models have in their place, or None for other parts.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.vision_tower.": None,
    "vision_tower.": None,
    "model.multi_modal_projector.": None,
    "multi_modal_projector.": None,
}


def _only_text(entries: dict[str, Entry]) -> None:
    """Rename the tensors of the text part of a multimodal checkpoint as those of a text model, and drop the others."""
    for name in list(entries):
        prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
        if prefix is not None:
            entry, new = entries.pop(name), _PREFIXES[prefix]
            if new is not None:
                entries[new + name.removeprefix(prefix)] = entry


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _matched(config: ModelConfig, checkpoint: Checkpoint, places: dict[str, Place], tied: bool) -> dict[Entry, Place]:
    """The tensors to read, each with its place. Raises where a place has no tensor that fits, or a tensor no place."""
    found, path = checkpoint.entries, checkpoint.path
    missing = [name for name, place in places.items() if name not in found and not place.optional]
    unexpected = [name for name in found if name not in places and not _harmless(name, config, tied)]
    if missing:
        other = f"; it has {_some(unexpected)}, which the model does not" if unexpected else ""
        raise CheckpointError(
            f"{path}: {_some(missing)} absent, expected by {config.source} for {config.family} of {config.layers} "
            f"layers{other}"
        )
    if unexpected:
        raise CheckpointError(
            f"{path}: {_some(unexpected)} has no place in the model that {config.source} describes ({config.family} of "
            f"{config.layers} layers)"
        )
    wanted = {found[name]: place for name, place in places.items() if name in found}
    for entry, place in wanted.items():
        if entry.dtype not in place.dtypes:
            raise CheckpointError(f"{entry} has dtype {entry.dtype}, expected {', '.join(place.dtypes)}")
        if entry.shape not in (place.shape, *place.others):
            shapes = " or ".join(map(str, (place.shape, *place.others)))
            raise CheckpointError(f"{entry} has shape {entry.shape}, expected {shapes} by {config.source}")
    return wanted


def _is_tied(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether lm_head is the embedding, as the configuration says; but two different tensors are both used, as in
    transformers."""
    found = checkpoint.entries
    if config.tied and _LM_HEAD in found and _EMBEDDING not in found:  # a tied tensor goes by either name
        found[_EMBEDDING] = found.pop(_LM_HEAD)
    if not config.tied or _LM_HEAD not in found:
        return config.tied
    pair = [found[_EMBEDDING], found[_LM_HEAD]]
    if any(e.dtype not in DTYPES for e in pair) or pair[0].shape != pair[1].shape:
        return False  # `_matched` reports what is wrong
    (_, a), (_, b) = (next(checkpoint.read([e])) for e in pair)
    if torch.equal(a, b):
        return True
    warnings.warn(
        f"{config.source}: tie_word_embeddings is true, but {checkpoint.path} has an {_LM_HEAD} that is not "
        f"{_EMBEDDING}: both are used",
        stacklevel=3,
    )
    return False


def _narrowed(entry: Entry, rows: Tensor, dtype: torch.dtype) -> None:
    """Raise where a value overflows float16, which would silently become infinity."""
    if dtype != torch.float16 or entry.dtype not in ("F32", "BF16"):
        return
    largest = float(rows.abs().amax()) if rows.numel() else 0.0
    if _LARGEST_HALF < largest < float("inf"):
        raise CheckpointError(
            f"{entry} has {largest:.4g} in {entry.dtype}, expected at most {_LARGEST_HALF:.0f} for float16; load it in "
            "bfloat16"
        )


def load(
    config: ModelConfig,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    quantize: str | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    split: Split = WHOLE,
) -> Weights:
    """Read a checkpoint, or a rank's part of it.

    Args:
        config: of its model.
        folder: with `model.safetensors`, or an index and its shards.
        dtype: of embedding, norms, biases and unquantized weights: float32, float16 or bfloat16.
        quantize: None, "fp8", "int8" or "int4" (lm_head is then int8); None of a checkpoint of quantized weights.
        device: by default the GPU.
        progress: show a bar, if standard error is a terminal.
        split: the rank. Nothing is read but its part.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError (a ValueError): a file is missing, truncated or corrupt; or a tensor is missing, has the wrong
            shape or a dtype that weights can't have, or has no place in the model.
        TypeError, ValueError: dtype or quantize is not one of those.

    All of that is found before a byte goes to the device, except for values that overflow float16.
    """
    device = runtime.default_device() if device is None else torch.device(device)
    _check(config, dtype, quantize, split)
    checkpoint = Checkpoint(folder)
    if config.multimodal:
        _only_text(checkpoint.entries)
    tied = _is_tied(config, checkpoint)
    orders = None if config.published is None else config.published.orders_of(checkpoint)
    made = functools.partial(
        _empty, config, dtype, quantize, tied=tied, split=split, checkpoint=checkpoint, orders=orders
    )
    # Checked on the meta device first, which takes no memory.
    _matched(config, checkpoint, made(torch.device("meta"))[1], tied)
    with contextlib.ExitStack() as stack:
        stack.enter_context(plain_mode(device))
        weights, places = made(device)
        wanted = _matched(config, checkpoint, places, tied)
        parts = {entry: place.part(entry.shape) for entry, place in wanted.items()}
        total = sum(e.nbytes * math.prod(s.size for s in p) // max(1, math.prod(e.shape)) for e, p in parts.items())
        advance = stack.enter_context(_bar(progress, total, Path(folder).name))
        for entry, tensor in checkpoint.read(list(wanted), parts):
            place, first = wanted[entry], 0
            step = max(1, _AT_A_TIME // max(1, math.prod(tensor.shape[1:])))
            for rows in (tensor,) if place.whole else tensor.split(step):
                part = rows.to(device)
                _narrowed(entry, part, dtype)
                place.fill(first, part)
                first += 0 if place.whole else rows.shape[0]
                advance(rows.numel() * rows.element_size())
        return _with_logits_scale(weights, config.logits_scale)


@contextlib.contextmanager
def _bar(shown: bool, total: int, title: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, if that is a terminal. Yields the function that adds bytes to it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task(f"loading {title}", total=total)
        yield lambda n: progress.advance(task, n)


def random(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    quantize: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    split: Split = WHOLE,
) -> Weights:
    """Random weights, drawn on the device from the seed: normal with the configuration's initializer_range; norms are
    ones and biases zeros, as in transformers. Quantized weights are the same draws, quantized; a rank's are its part of
    them.

    On the meta device nothing is drawn: it serves to compute sizes.

    Raises:
        TypeError, ValueError: as `load`, for dtype and quantize.
    """
    device = runtime.default_device() if device is None else torch.device(device)
    if config.published is not None and device.type != "meta":
        raise ValueError(
            f"{config.source}: has a quantization_config ({config.published.method}), expected none for random "
            "weights: quantize= quantizes them"
        )
    with plain_mode(device):
        weights, places = _empty(config, dtype, quantize, device, config.tied, split)
        if device.type != "meta":
            generator = torch.Generator(device=device).manual_seed(seed)
            for place in places.values():
                if len(place.shape) == 2:  # neither a norm nor a bias
                    _draw(place, config.initializer_range, dtype, device, generator)
        return _with_logits_scale(weights, config.logits_scale)


def _draw(place: Place, std: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    n, k = place.shape
    rows = max(1, _AT_A_TIME // k)
    if not all(share.is_all for share in place.shares):
        drawn = torch.empty((n, k), dtype=dtype, device=device)
        for part in drawn.split(rows):
            part.normal_(0.0, std, generator=generator)
        for dim, share in enumerate(place.shares):
            drawn = torch.cat([drawn.narrow(dim, a, b - a) for a, b in share.ranges], dim)
        place.fill(0, drawn)
        return
    for first in range(0, n, rows):
        part = torch.empty((min(rows, n - first), k), dtype=dtype, device=device)
        place.fill(first, part.normal_(0.0, std, generator=generator))
