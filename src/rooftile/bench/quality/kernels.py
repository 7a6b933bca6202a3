"""The attention kernels that `rooftile bench quality` sets side by side, each as transformers calls it.

Every one gets causal attention without padding: q `(B, Hq, T, D)`, k and v `(B, Hkv, T, D)`. Those of PyTorch are held
to one backend, so that none is quietly computed by another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from rooftile import runtime
from rooftile.ops.attention import AttentionConfig, attention

Attention = Callable[..., tuple[Tensor, None]]


def _no_mask(*args: Any, **options: Any) -> None:
    """Sequences are whole, and the kernels are causal by themselves."""


# In the interpreter few, large programs; on a GPU what the default of each is, for heads as short as the byte model's.
_PORTABLE = {True: AttentionConfig("portable", 64, 64, 4, 1), False: AttentionConfig("portable", 64, 64, 4, 3)}
_HOPPER = AttentionConfig("hopper", 128, 128, 8, 6)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel by the name in the table.

    Attributes:
        title: what it is, for the table.
        function: registered with transformers under a name of ours; None for what transformers has itself.
        theirs: transformers' own name for it, where it has one.
        needs: "GPU", "sm_90" or nothing.
        mask: what transformers calls once a forward, for the mask that `function` gets.
    """

    name: str
    title: str
    function: Attention | None = None
    theirs: str = ""
    needs: str = ""
    mask: Callable[..., BlockMask | None] = _no_mask

    @property
    def ours(self) -> bool:
        return self.name.startswith("rooftile")

    def absent(self) -> str:
        """Why it can't run here, or nothing."""
        gpu = runtime.MODE is runtime.Mode.GPU and runtime.accelerator() is not None
        if self.needs and not gpu:
            return "needs a GPU" if self.needs == "GPU" else f"needs a GPU of {self.needs}"
        if self.needs == "sm_90" and (arch := runtime.target(runtime.default_device()).arch) != "sm_90":
            return f"needs a GPU of sm_90, and this is {arch}"
        return ""

    def register(self) -> str:
        """The name under which a model of transformers finds it."""
        if self.function is None:
            return self.theirs
        from transformers import AttentionInterface, AttentionMaskInterface

        # transformers looks for a package of FlashAttention behind any name that has "flash" in it.
        name = f"rooftile_quality_{self.name}".replace("flash", "fa")
        AttentionInterface.register(name, self.function)
        AttentionMaskInterface.register(name, self.mask)
        return name


def _rooftile(config: AttentionConfig) -> Attention:
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attention(q, k, v, causal=True, scale=options.get("scaling"), layout="bthd", config=config)
        return out, None  # type: ignore[return-value]

    return forward


def _sdpa(backend: SDPBackend) -> Attention:
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    return forward


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _new_blocks(length: int, device: torch.device) -> BlockMask:
    return create_block_mask(_causal, None, None, length, length, device=device)


_kept_blocks = functools.cache(_new_blocks)


def _causal_blocks(*args: Any, q_length: int, device: torch.device, **options: Any) -> BlockMask:
    """FlexAttention's mask, for all layers of a forward."""
    return (_new_blocks if torch.compiler.is_compiling() else _kept_blocks)(q_length, device)


def _flex_of_blocks(
    query: Tensor, key: Tensor, value: Tensor, partial: Tensor, at: Tensor, full: Tensor | None, full_at: Tensor | None
) -> Tensor:
    """FlexAttention by the tensors of a mask.

    A whole mask brings a length and block sizes of its own, which with dynamic shapes are symbols to be compared with
    the query's. A scale would be a symbol as well, so none is given.
    """
    length = query.shape[2]
    mask = BlockMask.from_kv_blocks(
        partial, at, full, full_at, mask_mod=_causal, seq_lengths=(length, length), compute_q_blocks=False
    )
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


@functools.cache
def _compiled_flex(backend: Any = "inductor") -> Callable[..., Tensor]:
    # Without dynamic shapes, one compilation for each length. Uncompiled it keeps all scores in memory.
    return torch.compile(_flex_of_blocks, dynamic=True, fullgraph=True, backend=backend)


def _flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: BlockMask, **options: Any
) -> tuple[Tensor, None]:
    if options.get("scaling") not in (None, query.shape[-1] ** -0.5):
        raise ValueError(f"FlexAttention is called with its own scale, and the model's is {options['scaling']}")
    if torch.compiler.is_compiling():
        out = flex_attention(query, key, value, block_mask=attention_mask, enable_gqa=True)
    else:
        mask = attention_mask
        blocks = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        out = _compiled_flex()(query, key, value, *blocks)
    return out.transpose(1, 2).contiguous(), None


NAIVE = "naive"


def kernels() -> tuple[Kernel, ...]:
    """All of them, the naive one first: its loss is the limit for the others."""
    interpreted = runtime.MODE is runtime.Mode.INTERPRETER
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    return (
        Kernel(NAIVE, "naive: scores and probabilities in memory", theirs="eager"),
        Kernel("rooftile_portable", "Rooftile, portable", _rooftile(_PORTABLE[interpreted])),
        Kernel("rooftile_hopper", "Rooftile, Hopper", _rooftile(_HOPPER), needs="sm_90"),
        Kernel("sdpa_flash", "SDPA, flash", _sdpa(flash), needs="GPU"),
        Kernel("sdpa_cudnn", "SDPA, cuDNN", _sdpa(cudnn), needs="GPU"),
        Kernel("flex", "FlexAttention", _flex, needs="GPU", mask=_causal_blocks),
    )
