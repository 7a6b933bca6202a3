"""Quantizing and packing weights, once, when a model is loaded: plain PyTorch, on any device.

The packed layout of int4, which the kernel reads: a nibble is the number + 8. A row's elements come in blocks of two
groups, each in `group` bytes: byte i of a block holds element i of its first group in the low nibble, and element i of
its second group in the high one. Where the groups of a row are odd in number, the last block is one group in
`group / 2` bytes, its first half in the low nibbles and its second in the high ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import library

GROUPS = (32, 64, 128)
_SMALLEST = 2.0**-126  # the least scale: zeros give zeros, and neither it nor its reciprocal leaves the normal numbers


def check_group(op: str, k: int, group: int) -> None:
    if group not in GROUPS or isinstance(group, bool):
        raise ValueError(f"{op}: group is {group!r}, expected 32, 64 or 128")
    if k % group:
        raise ValueError(f"{op}: the last dimension is {k}, expected a multiple of the group of {group}")


def check_packed(op: str, weight: Tensor, scale: Tensor, k: int) -> int:
    """The group of a packed int4 weight for x of k columns. Raises for one that is none."""
    if k % GROUPS[0]:
        raise ValueError(f"{op}: x's last dimension is {k}, expected a multiple of the group: of 32, 64 or 128")
    if weight.dim() != 2 or weight.shape[1] != k // 2:
        raise ValueError(
            f"{op}: weight has shape {tuple(weight.shape)}, expected (N, {k // 2}): two elements a byte, to match x's "
            f"last dimension of {k}"
        )
    n, fit = weight.shape[0], [g for g in GROUPS if k % g == 0]
    columns = scale.shape[1] if scale.dim() == 2 or (scale.dim() == 3 and scale.shape[2] == 2) else 0
    group = next((g for g in fit if columns * g == k), 0)
    if group == 0 or scale.shape[0] != n:
        wanted = " or ".join(f"({n}, {k // g})" for g in fit)
        raise ValueError(
            f"{op}: weight_scale has shape {tuple(scale.shape)}, expected {wanted} for groups of "
            f"{' or '.join(map(str, fit))}; with offsets a last dimension of 2"
        )
    return group


def _check_matrix(op: str, name: str, tensor: Tensor) -> None:
    library.check_tensors(op, **{name: tensor})
    if tensor.dim() != 2:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected two dimensions")


def _quantize(weight: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Numbers from -largest to largest, to nearest, ties to even; and the scale of the last dimension, as (..., 1)."""
    wide = weight.float()
    most = wide.abs().amax(-1, keepdim=True) if weight.shape[-1] else wide.new_zeros((*weight.shape[:-1], 1))
    scale = (most / largest).clamp(min=_SMALLEST)
    q = (wide / scale).round().clamp(-largest, largest).nan_to_num(nan=0.0)
    return q.to(torch.int8), scale


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight for `int8_linear`: `weight` is nearly `q * scale[:, None]`.

        scale[n] = max over k of |weight[n, k]| / 127,   q = round(weight / scale)

    in float32, to nearest, ties to even. It is symmetric: q is never -128. A row of zeros has zeros, and a scale of
    2^-126. A NaN or an infinity makes its row's scale NaN or infinite, and its numbers 0: the row's outputs are NaN.

    Args:
        weight: `(N, K)`, float32, float16 or bfloat16.

    Returns:
        q, int8 `(N, K)`, and scale, float32 `(N,)`.
    """
    _check_matrix("quantize_int8", "weight", weight)
    library.check_floating("quantize_int8", weight=weight)
    q, scale = _quantize(weight.detach(), 127)
    return q, scale.squeeze(-1)


def quantize_int4(weight: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """A weight for `int4_linear`, packed: `unpack_int4(packed, group)` times its groups' scales is nearly `weight`.

        scale[n, j] = max over the group's k of |weight[n, k]| / 7,   q = round(weight / scale)

    in float32, to nearest, ties to even. It is symmetric: q is never -8. A group of zeros has zeros, and a scale of
    2^-126. A NaN or an infinity makes its group's scale NaN or infinite, and its numbers 0: the row's outputs are NaN.

    Args:
        weight: `(N, K)`, float32, float16 or bfloat16; K is a multiple of the group.
        group: how many elements of a row share a scale: 32, 64 or 128.

    Returns:
        packed, uint8 `(N, K / 2)`, and scale, float32 `(N, K / group)`; `scale.to(x.dtype)` takes half of its memory.
    """
    _check_matrix("quantize_int4", "weight", weight)
    library.check_floating("quantize_int4", weight=weight)
    check_group("quantize_int4", weight.shape[1], group)
    q, scale = _quantize(weight.detach().unflatten(1, (-1, group)), 7)
    return pack_int4(q.flatten(1), group), scale.squeeze(-1)


def pack_int4(q: Tensor, group: int = 128) -> Tensor:
    """Two numbers a byte, in the order that `int4_linear` reads; `unpack_int4` gives them back.

    Args:
        q: int8 `(N, K)`, from -8 to 7 (not looked at: that would wait for the device; other numbers lose their upper
            bits). K is a multiple of the group.
        group: 32, 64 or 128: the order of the nibbles depends on it.

    Returns:
        uint8 `(N, K / 2)`.
    """
    _check_matrix("pack_int4", "q", q)
    if q.dtype != torch.int8:
        raise TypeError(f"pack_int4: q has dtype {q.dtype}, expected torch.int8")
    check_group("pack_int4", q.shape[1], group)
    nibbles = (q + 8).view(torch.uint8) & 15
    whole = q.shape[1] // (2 * group) * (2 * group)
    parts = []
    for part, half in ((nibbles[:, :whole], group), (nibbles[:, whole:], group // 2)):
        blocks = part.unflatten(1, (part.shape[1] // (2 * half), 2, half))
        parts.append((blocks[:, :, 0] | (blocks[:, :, 1] << 4)).flatten(1))
    return torch.cat(parts, 1)


def unpack_int4(packed: Tensor, group: int = 128) -> Tensor:
    """What `pack_int4` packed for that group: int8 `(N, K)`, from -8 to 7, of uint8 `(N, K / 2)`."""
    _check_matrix("unpack_int4", "packed", packed)
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack_int4: packed has dtype {packed.dtype}, expected torch.uint8")
    check_group("unpack_int4", 2 * packed.shape[1], group)
    whole = packed.shape[1] // group * group
    parts = []
    for part, half in ((packed[:, :whole], group), (packed[:, whole:], group // 2)):
        blocks = part.unflatten(1, (part.shape[1] // half, half))
        parts.append(torch.stack((blocks & 15, blocks >> 4), 2).flatten(1))
    return torch.cat(parts, 1).view(torch.int8) - 8
