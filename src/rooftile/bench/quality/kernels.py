"""The attention kernels that `rooftile bench quality` sets side by side, each as transformers calls it.

Every one gets causal attention without padding: q `(B, Hq, T, D)`, k and v `(B, Hkv, T, D)`. Those of PyTorch are held
to one backend, so that none is quietly computed by another. The kernels that read a cache run in Rooftile's engine.
Those of other packages are imported from what is installed; files that are published without a package are given by
`files`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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


def _nothing(length: int, device: torch.device) -> dict[str, Any]:
    return {}


def sentence(error: Exception) -> str:
    """An exception in one line; of one without a message, where it was raised."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not said.removesuffix(":").strip() or said.endswith("Error:"):
        inner = getattr(error, "inner_exception", None) or error
        frames = traceback.extract_tb(inner.__traceback__ or error.__traceback__)
        at = f"in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        code = f": {frames[-1].line}" if frames and frames[-1].line else ""
        said = f"{said} {at}{code}".strip() or "no message"
    return f"{type(error).__name__}: {said}"[:300]


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
        missing: why there is no function, where it could not be imported.
        options: what `function` gets beside q, k and v, by the length of the sequences. Made outside of the model.
        part: of a kernel that runs in Rooftile's engine, how many tokens a sequence gets at a time.
    """

    name: str
    title: str
    function: Attention | None = None
    theirs: str = ""
    needs: str = ""
    missing: str = ""
    options: Callable[[int, torch.device], dict[str, Any]] = _nothing
    part: int | None = None

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
        return self.missing

    def register(self) -> str:
        """The name under which a model of transformers finds it."""
        if self.function is None:
            return self.theirs
        from transformers import AttentionInterface, AttentionMaskInterface

        # transformers looks for a package of FlashAttention behind any name that has "flash" in it.
        name = f"rooftile_quality_{self.name}".replace("flash", "fa")
        AttentionInterface.register(name, self.function)
        AttentionMaskInterface.register(name, _no_mask)
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
        key, value = _repeated(query, key, value)
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    return forward


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


@functools.cache
def _causal_blocks(length: int, device: torch.device) -> dict[str, Any]:
    """FlexAttention's mask, for all layers of a forward, as tensors."""
    mask = create_block_mask(_causal, None, None, length, length, device=device)
    return {"blocks": (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)}


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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    if options.get("scaling") not in (None, query.shape[-1] ** -0.5):
        raise ValueError(f"FlexAttention is called with its own scale, and the model's is {options['scaling']}")
    # In a compiled model, too, the mask comes from outside. With create_block_mask in the graph, Inductor of PyTorch
    # 2.11 failed on a GPU. It sorts blocks, whose number is a symbol; PyTorch 2.13 runs that sort in eager.
    call = _flex_of_blocks if torch.compiler.is_compiling() else _compiled_flex()
    out = call(query, key, value, *options["blocks"])
    return out.transpose(1, 2).contiguous(), None


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for kernels that know no groups of heads."""
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def _of_others(name: str, title: str, load: Callable[[], Callable[..., Tensor]]) -> Kernel:
    """A kernel that is not in the package: `load` imports it and returns a function of q, k, v `(B, H, T, D)` and the
    scale, causal, of `(B, T, H, D)`. All is imported here: torch.compile traces no imports."""
    try:
        call = load()
    except Exception as error:  # a package that is made for another machine may raise anything
        return Kernel(name, title, needs="GPU", missing=sentence(error))

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        return call(query, *_repeated(query, key, value), scale).contiguous(), None

    return Kernel(name, title, forward, needs="GPU")


def _of_package(module_name: str, call: Callable[..., Tensor]) -> Callable[[], Callable[..., Tensor]]:
    """Of a function that takes `(B, T, H, D)`: `call(module, q, k, v, scale)`."""

    def load() -> Callable[..., Tensor]:
        module = importlib.import_module(module_name)

        def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return call(module, *(x.transpose(1, 2).contiguous() for x in (q, k, v)), scale)

        return run

    return load


TILE = 128  # tutorials' kernels take whole tiles alone


def _of_file(name: str, file: Path | None) -> Callable[[], Callable[..., Tensor]]:
    """`attention(q, k, v, causal, sm_scale)` of a file, the signature of Triton's tutorial. Padding comes last: no
    query of the sequence sees it."""

    def load() -> Callable[..., Tensor]:
        if file is None:
            raise FileNotFoundError(f"it has no package; --file {name}=FILE says where it is")
        spec = importlib.util.spec_from_file_location(f"rooftile_quality_{name}", file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no file of Python")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        attention = module.attention

        def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            length = q.shape[2]
            padded = (nn.functional.pad(x, (0, 0, 0, -length % TILE)).contiguous() for x in (q, k, v))
            out: Tensor = attention(*padded, True, scale)
            return out[:, :, :length].transpose(1, 2)

        return run

    return load


# What is published without a package, by name.
FILES = {"openai_tutorial": "Triton's fused-attention tutorial", "amd_tutorial": "Triton's tutorial, AMD's variant"}


def files_of(given: Sequence[str]) -> dict[str, Path]:
    """The files of `NAME=FILE`.

    Raises:
        ValueError: it is not that, or no kernel of `FILES` has the name.
        FileNotFoundError: there is no such file.
    """
    found = {}
    for text in given:
        name, _, file = text.partition("=")
        if name not in FILES or not file:
            raise ValueError(f"--file is {text!r}, expected {' or '.join(f'{name}=FILE' for name in FILES)}")
        found[name] = Path(file)
        if not found[name].is_file():
            raise FileNotFoundError(f"--file is {text!r}: there is no such file")
    return found


NAIVE = "naive"
PART = 16  # tokens of a prompt's part


def kernels(files: Mapping[str, Path] | None = None) -> tuple[Kernel, ...]:
    """All of them, the naive one first: its loss is the limit for the others.

    `files` has those of `FILES` that are there.
    """
    interpreted = runtime.MODE is runtime.Mode.INTERPRETER
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    return (
        Kernel(NAIVE, "naive: scores and probabilities in memory", theirs="eager"),
        Kernel("rooftile_portable", "Rooftile, portable", _rooftile(_PORTABLE[interpreted])),
        Kernel("rooftile_hopper", "Rooftile, Hopper", _rooftile(_HOPPER), needs="sm_90"),
        Kernel("rooftile_decode", "Rooftile's engine, decoding", part=1),
        Kernel("rooftile_paged", f"Rooftile's engine, prompts in parts of {PART}", part=PART),
        Kernel("sdpa_flash", "SDPA, flash", _sdpa(flash), needs="GPU"),
        Kernel("sdpa_cudnn", "SDPA, cuDNN", _sdpa(cudnn), needs="GPU"),
        Kernel("flex", "FlexAttention", _flex, needs="GPU", options=_causal_blocks),
        *(_of_others(name, title, _of_file(name, (files or {}).get(name))) for name, title in FILES.items()),
        _of_others(
            "flash_triton", "FlashAttention's Triton kernel",
            _of_package(
                "flash_attn.flash_attn_triton",
                lambda m, q, k, v, scale: m.flash_attn_func(q, k, v, None, True, scale),
            ),
        ),
        _of_others(
            "aiter", "AITER's Triton kernel",
            _of_package(
                "aiter.ops.triton.mha",
                lambda m, q, k, v, scale: m.flash_attn_func(q, k, v, softmax_scale=scale, causal=True),
            ),
        ),
        _of_others(
            "xformers", "xFormers",
            _of_package(
                "xformers.ops",
                lambda m, q, k, v, scale: m.memory_efficient_attention(
                    q, k, v, attn_bias=m.LowerTriangularMask(), scale=scale
                ),
            ),
        ),
    )  # fmt: skip
