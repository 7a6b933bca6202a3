"""Rotary position embedding as a model's configuration describes it, with its context scaling.

    angle[p, i] = p * inv_freq[i],   cos = attention_factor * cos(angle),   sin = attention_factor * sin(angle)

The frequencies of scaled types come from transformers' own functions, so they are bit-identical to its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Types with fixed frequencies. Those of "dynamic" are fixed up to max_position_embeddings, those of "longrope" up to
# original_max_position_embeddings.
KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
NONE = "none"  # no rotation


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Frequencies of the pairs of elements of a head.

    Attributes:
        kind: the rope type.
        inv_freq: radians per token of each pair, rounded to float32. Elements of a head past them are not rotated.
        attention_factor: multiplies cos and sin.
        limit: from this position on, frequencies depend on the length; None if they never do.
        source: the configuration that it was read from, for errors.
    """

    kind: str
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    limit: int | None = None
    source: str = dataclasses.field(default="config", compare=False)

    def tables(self, positions: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of the first positions, `(positions, 2 * pairs)` in float32, as `rooftile.rope` takes them.

        Raises:
            ValueError: positions go beyond `limit`.
        """
        if self.limit is not None and positions > self.limit:
            raise ValueError(
                f"{self.source}: rope_type is {self.kind!r}, whose frequencies are fixed for the first {self.limit} "
                f"positions, and {positions} are asked for; expected at most {self.limit}"
            )
        # On the CPU, so that the tables are the same on every device.
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32, device="cpu"),
            torch.tensor(self.inv_freq, dtype=torch.float32, device="cpu"),
        )
        angles = torch.cat((angles, angles), dim=1)
        return (angles.cos() * self.attention_factor).to(device), (angles.sin() * self.attention_factor).to(device)


def none(head_dim: int) -> Rotary:
    """No rotation: of layers without RoPE. All angles are 0, so that cos is 1 and sin is 0."""
    return Rotary(NONE, (0.0,) * (head_dim // 2))


def of(
    config: Any, head_dim: int, source: str, *, partial: bool = False, layer_type: str | None = None
) -> Rotary:  # fmt: skip
    """The rotary embedding of a transformers configuration, or of its layers of that type.

    `partial`: it may rotate a part of each head.

    Raises:
        ValueError: the rope type is not one of KINDS, or its settings are not valid.
    """
    settings = config.rope_parameters or {}
    if layer_type is not None:
        settings = settings.get(layer_type) or {}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError(
            f"{source}: rope_parameters has settings for {', '.join(map(str, settings))}, expected one for all layers"
        )
    kind = settings.get("rope_type", "default")
    if kind not in KINDS:
        raise ValueError(f"{source}: rope_type is {kind!r}, expected one of {', '.join(KINDS)}")
    part = settings.get("partial_rotary_factor") or 1.0
    if part != 1 and not partial:
        raise ValueError(f"{source}: partial_rotary_factor is {part!r}, expected 1")
    rotated = int(head_dim * part)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise ValueError(
            f"{source}: partial_rotary_factor is {part!r}, expected an even number of the {head_dim} elements of a head"
        )
    theta = settings.get("rope_theta")
    if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise ValueError(f"{source}: rope_theta is {theta!r}, expected a positive number")
    if kind == "default":
        inv_freq, factor = (
            1.0 / (theta ** (torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated)),
            1.0,
        )
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        of_layers = {} if layer_type is None else {"layer_type": layer_type}
        config.head_dim = head_dim  # absent or None in some configurations
        try:
            inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **of_layers)
        except (ArithmeticError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{source}: rope_parameters is {settings}, not valid for {kind!r}: {e!r}") from e
    if not bool(torch.isfinite(inv_freq).all()) or not math.isfinite(factor):
        raise ValueError(f"{source}: rope_parameters is {settings}, whose frequencies are not finite")
    limit = {
        "dynamic": config.max_position_embeddings,
        "longrope": settings.get("original_max_position_embeddings"),
    }.get(kind)
    return Rotary(kind, tuple(inv_freq.float().tolist()), float(factor), limit, source)
