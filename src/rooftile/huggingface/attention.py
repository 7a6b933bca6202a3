"""`attn_implementation="rooftile"`: Rooftile's attention in any model of transformers that asks for attention by name.

Two functions are registered. `attention_mask` describes which keys a query sees. It returns

- None where the causal rule and the window say everything and the last query is aligned with the last key;
- `(B, Tk)` if there is padding too: in steps of few tokens, in graphs of torch.compile, and if the valid keys of a row
  are not one range;
- `(B, n)` with fewer columns than keys if only the first n are filled, as by a prompt in a new static cache, and
  `(0, n)`, without rows, if all of these are valid;
- `(1, 2, 2 B + 1)`, where queries and keys start as for `rooftile.attention_varlen`, if all filled keys are valid and
  only the device knows how many they are: a prompt's later part in a static cache, or a prompt in one that was reset
  or allocated before;
- `(1, 2, 5 B + 1)`, the same of a padded batch, if the valid keys of each row are one range: padding on the left, on
  the right, or on both sides;
- the starts of sequences, in one dimension, if position_ids that restart say that they are packed;
- the full `(B, 1, Tq, Tk)` for everything else: a model's own masks, steps of one token in static caches, a later part
  of few tokens or with holes in its mask, packed sequences in graphs of torch.compile.

`attention_forward` computes a step of few tokens by `rooftile.decode_attention`, except for several tokens with a full
mask, packed sequences, padded batches and later parts by `rooftile.attention_varlen`, and everything else by
`rooftile.attention`.

A graph of torch.compile can't read whether a mask that it is given says that all keys are valid, so such a mask is
padding there. Without one, prompts in static caches have no mask in graphs either.

So padded and packed batches need memory linear in T, not quadratic, and blocks outside of the window are skipped. The
`hopper` kernels take no mask, and so padding is given as starts wherever that is possible.

What the kernels lack goes to another implementation: dropout, a position bias that needs a gradient (T5 in training),
heads over 256, float64. That is PyTorch's `scaled_dot_product_attention`, or the model's own eager code if it has a
soft cap or sinks.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rooftile
from rooftile.library import FLOATS

NAME = "rooftile"
_LONGEST_HEAD = 256
_DECODED = 16  # the most new tokens that decode_attention accepts
# The window of these is only in the mask: their attention does not pass it on.
_WINDOW_IN_MASK = ("qwen2_moe", "phimoe", "doge")


def register_attention() -> None:
    """Make `attn_implementation="rooftile"` known to transformers. A second call changes nothing.

        rooftile.register_attention()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="rooftile")

    Padded batches, sliding windows, soft caps (Gemma 2), sinks (gpt-oss), grouped heads, training, and generation with
    dynamic and static caches give the same results as the model's eager attention, except that a query whose keys are
    all masked gives zeros, and so may the queries of padding. Attention's weights are not returned:
    `output_attentions=True` gives a warning and no weights.

    Raises:
        ImportError: transformers is not installed, or is older than 4.56, which has no such registry.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """The mask in the form that `attention_forward` takes. transformers calls it, with its own arguments."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    # `generate` makes the masks of static caches before the forward, which may pass them here as padding.
    if attention_mask is not None and attention_mask.dim() == 3:
        if attention_mask.dtype != torch.int32 or attention_mask.shape[:2] != (1, 2):
            raise ValueError(
                f"attention_mask is {attention_mask.dtype} of {tuple(attention_mask.shape)}, expected (batch, keys), "
                "(batch, heads, queries, keys), or starts of sequences as torch.int32 of (1, 2, n)"
            )
        return attention_mask
    if attention_mask is not None and attention_mask.shape[0] == 0:
        attention_mask = None
    if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[0] == 1:
        attention_mask = attention_mask.expand(batch_size, -1)
    mask_function = causal_mask_function if mask_function is None else mask_function
    # transformers allows the skip if nothing was added to the pattern. With a static cache the host may not know the
    # last query's position, and with a window the cache may not hold the first keys yet.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if local_size is None:
        plain = mask_function is causal_mask_function
    else:  # a window of config.sliding_window, or else chunks
        chunked = getattr(config, "attention_chunk_size", None) is not None
        told = getattr(config, "model_type", None) not in _WINDOW_IN_MASK
        plain = told and local_size == getattr(config, "sliding_window", None) and not chunked
    # In a static cache that is not full no query sees the keys from `end` on.
    end = kv_length if aligned else q_offset + q_length
    if allow_is_causal_skip and plain and (aligned or (q_length > 1 and kv_offset == 0)):
        if not isinstance(end, Tensor):
            if aligned or end < kv_length:
                all_valid, starts = _survey(attention_mask, kv_offset, q_length, kv_length, end)
                if not all_valid:
                    return _columns(attention_mask, kv_offset, end).contiguous() if starts is None else starts
                return None if aligned else torch.empty(0, end, dtype=torch.bool, device=options.get("device"))
        elif end.dim() == 0:
            all_valid, starts = _survey(attention_mask, 0, q_length, kv_length, end)
            if all_valid:
                return _starts_in_cache(batch_size, q_length, kv_length, end)
            if starts is not None:
                return starts
    if attention_mask is None and (local_size is None or plain) and q_length == kv_length and aligned:
        sequences = _sequences(mask_function, local_size)
        if sequences is not None and not torch.compiler.is_compiling() and not _is_capturing(sequences.device):
            return _starts(sequences)
    if allow_is_bidirectional_skip and local_size is None and mask_function is bidirectional_mask_function:
        all_valid, _ = _survey(attention_mask, kv_offset, 0, kv_length, kv_length)  # no starts, which are causal
        if all_valid:
            return None
        # A full mask: a padding mask does not say that the module is not causal. It is expanded with strides of 0.
        return _columns(attention_mask, kv_offset, kv_length)[:, None, None, :].expand(-1, 1, q_length, -1)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **options,
    )


def _sequences(mask_function: Any, window: int | None) -> Tensor | None:
    """Which sequence each token belongs to, `(B, T)`, if the causal rule (in a window) and that are all of the mask.

    transformers describes a mask by functions in functions; what this one is made of is in their closures.
    """
    from transformers import masking_utils

    def made_by(name: str, function: Any) -> dict[str, Any] | None:
        made = getattr(function, "__qualname__", "").startswith(f"{name}.<locals>.")
        if not made or function.__module__ != masking_utils.__name__:
            return None
        return dict(
            zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True)
        )

    def both(function: Any) -> tuple[Any, Any]:
        found = (made_by("and_masks", function) or {}).get("mask_functions", ())
        return tuple(found) if len(found) == 2 else (None, None)

    # From transformers 5.23 on the rule gets positions in the sequence, as far apart as indices. In 5.23 the packing
    # comes first.
    rule, packing = both(mask_function)
    remapping = "remap_positions_for_packed_sequence"
    if made_by(remapping, packing) is not None:
        rule, packing = packing, rule
    rule = (made_by(remapping, rule) or {"mask_function": rule}).get("mask_function")
    if window is not None:
        overlay, rule = both(rule)
        if (made_by("sliding_window_overlay", overlay) or {}).get("sliding_window") != window:
            return None
    if rule is not masking_utils.causal_mask_function:
        return None
    return (made_by("packed_sequence_mask_function", packing) or {}).get("packed_sequence_mask")


def _starts(sequences: Tensor) -> Tensor:
    """Where sequences start in all tokens of the batch, and the number of tokens: int32, in one dimension.

    Synchronizes once a forward. `longest` of the result is the length of the longest sequence.
    """
    first = torch.ones_like(sequences, dtype=torch.bool)
    first[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    at = [*first.flatten().nonzero().flatten().tolist(), sequences.numel()]
    starts = torch.tensor(at, dtype=torch.int32, device=sequences.device)
    starts.longest = max(b - a for a, b in itertools.pairwise(at))  # type: ignore[attr-defined]
    return starts


def _columns(mask: Tensor | None, first: int, n: int) -> Tensor:
    """The mask of n keys from `first` on; those that it does not have are not valid."""
    assert mask is not None
    mask = mask[:, first : first + n]
    return nn.functional.pad(mask, (0, n - mask.shape[1])) if mask.shape[1] < n else mask


def _survey(mask: Tensor | None, kv_offset: int, n_q: int, n_k: int, end: int | Tensor) -> tuple[bool, Tensor | None]:
    """Whether the keys before `end` are known to be valid; else where queries and keys start, if that is known.

    With a mask it synchronizes, once for each kind of mask in a forward, as transformers' own masks do. Starts are for
    more queries than decode_attention takes, and for a mask that has the last query's column.
    """
    if mask is None:
        return True, None
    if torch.compiler.is_compiling() or _is_capturing(mask.device):
        return False, None
    if n_q <= _DECODED and not isinstance(end, Tensor):
        return bool(_columns(mask, kv_offset, end).all()), None
    keys = torch.arange(n_k, device=mask.device)
    valid = _columns(mask, kv_offset, n_k).bool() & (keys < end)
    n_valid = valid.sum(1)
    start, stop = valid.int().argmax(1), torch.where(valid, keys + 1, 0).amax(1)
    are_ranges = (start + n_valid == stop).all() & (end <= mask.shape[1] - kv_offset)
    all_valid, are_starts = torch.stack(((n_valid == end).all(), are_ranges)).tolist()
    if all_valid or not are_starts or n_q <= _DECODED:
        return all_valid, None
    return False, _starts_of_valid(start, stop, n_q, n_k, end)


def _starts_of_valid(start: Tensor, stop: Tensor, n_q: int, n_k: int, end: int | Tensor) -> Tensor:
    """Where queries and keys start, `(1, 2, 5 batch + 1)`, if the keys `start[b]:stop[b]` of row b are valid.

    Each row is five sequences: queries and keys ahead of the valid ones, apart, so that such queries have no keys and
    give zeros; the valid ones; and queries and keys behind them, apart again. None is longer than a row.
    """
    rows = torch.arange(start.shape[0] + 1, device=start.device)
    start, stop = (nn.functional.pad(x, (0, 1)) for x in (start, stop))  # a row more, where the last one ends
    ahead = end - n_q  # keys before the first query's own
    first, last = ((x - ahead).clamp(0, n_q) for x in (start, stop))
    none = torch.zeros_like(start)
    starts_q = (rows * n_q)[:, None] + torch.stack((none, first, first, last, none + n_q), 1)
    starts_k = (rows * n_k)[:, None] + torch.stack((none, none, start, stop, stop), 1)
    return torch.stack((starts_q.flatten(), starts_k.flatten()))[None, :, :-4].int()


def _starts_in_cache(batch: int, n_q: int, n_k: int, filled: Tensor) -> Tensor:
    """Where queries and keys start, `(1, 2, 2 batch + 1)`, of sequences in a cache of n_k keys each.

    Each sequence is followed by one without queries, which has the keys of its row that are not filled.
    """
    i = torch.arange(2 * batch + 1, device=filled.device)
    return torch.stack(((i + 1) // 2 * n_q, i // 2 * n_k + i % 2 * filled))[None].int()


# 0, 1, 2, ..., each four times: a view of one element is a sequence's length, with an address that is a multiple of 16
# bytes. For another alignment Triton would compile another kernel.
_LENGTHS: dict[torch.device, Tensor] = {}


def _lengths(n: int, batch: int, device: torch.device) -> Tensor:
    """The lengths of `batch` sequences of n tokens. For one sequence, the usual case, no kernel is launched."""
    if batch == 1 and not torch.compiler.is_compiling():
        known = _LENGTHS.get(device)
        if known is not None and 4 * n < known.shape[0]:
            return known[4 * n : 4 * n + 1]
        if type(torch.empty(0, device=device)) is Tensor and not _is_capturing(device):
            known = torch.arange(1 << max(12, n.bit_length()), dtype=torch.int32, device=device).repeat_interleave(4)
            if device.type == "cuda":  # whichever stream asks next
                torch.cuda.current_stream(device).synchronize()
            _LENGTHS[device] = known
            return known[4 * n : 4 * n + 1]
    return torch.full((batch,), n, dtype=torch.int32, device=device)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclasses.dataclass
class _Call:
    """One attention, as a model asks for it: q `(B, Hq, Tq, D)`, k and v `(B, Hkv, Tk, D)`."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # None, (B, Tk), or a full mask of 4 dimensions
    causal: bool
    window: int | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    bias: Tensor | None
    dropout: float
    filled: Tensor | None = None  # (1,) int32: how many of the keys, the last of which is the last query's; or all

    @property
    def asks_for_gradients(self) -> bool:
        tensors = (self.q, self.k, self.v, self.sinks)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    @property
    def is_decoded(self) -> bool:
        return self.q.shape[2] <= _DECODED and self.bias is None and not self.asks_for_gradients

    def unsupported(self) -> str:
        """What the kernels lack for it, or an empty string."""
        if self.dropout > 0:
            return "dropout"
        if self.q.dtype not in FLOATS:
            return f"inputs of {self.q.dtype}"
        if max(self.q.shape[3], self.v.shape[3]) > _LONGEST_HEAD:
            return f"heads over {_LONGEST_HEAD}"
        if self.bias is not None and self.bias.requires_grad and torch.is_grad_enabled():
            return "position bias that needs a gradient"
        return ""

    def whole_mask(self, starts: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """One mask, `(B or 1, H or 1, Tq, Tk)`, of padding, causal rule, window and packing; bool or floating."""
        n_q, n_k = self.q.shape[2], self.k.shape[2]
        rows = torch.arange(1 if starts is None else self.q.shape[0], device=self.q.device)[:, None]
        queries = rows * n_q + torch.arange(n_q, device=self.q.device)
        keys = (rows * n_k + torch.arange(n_k, device=self.q.device))[:, None]
        places, same = queries + (n_k - n_q), None  # of queries among the keys
        if starts is not None:
            of_q, of_k = (
                torch.bucketize(at, s[1:], right=True).clamp(max=s.shape[0] - 2)
                for at, s in zip((queries, keys), starts, strict=True)
            )
            same = of_q[:, :, None] == of_k
            ends_q, ends_k = (s[1:][of_q] for s in starts)
            places = queries + ends_k - ends_q
        places = places[:, :, None]
        seen = self.mask
        if seen is None or seen.dim() != 4:
            seen = None if seen is None else seen[:, None, None, :].bool()
            if (self.causal and n_q > 1) or (self.window is not None and n_q == 1):
                pattern = keys <= places
                if self.window is not None:
                    pattern = pattern & (keys > places - self.window)
                seen = pattern[:, None] if seen is None else seen & pattern[:, None]
        if same is not None:
            same = same[:, None]
            seen = same if seen is None else seen & same if seen.dtype == torch.bool else seen.where(same, -torch.inf)
        return seen


def _warn_of_weights() -> None:
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        f'attn_implementation="{NAME}" does not support output_attentions=True: no attention weights are returned; '
        'set attn_implementation="eager" for them'
    )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of a module, `(B, Tq, Hq, Dv)`. transformers calls it, with its own arguments."""
    if options.get("output_attentions"):
        _warn_of_weights()
    if (
        query.shape[2] == 1  # a decoded token: the host's time counts
        and attention_mask is None
        and position_bias is None
        and dropout == 0
        and not torch.is_grad_enabled()
        and query.dtype in FLOATS
        and query.shape[3] <= _LONGEST_HEAD
        and value.shape[3] <= _LONGEST_HEAD
        and "cu_seq_lens_q" not in options
    ):
        out = rooftile.decode_attention(
            query.transpose(1, 2), key, value, _lengths(key.shape[2], query.shape[0], query.device), scale=scaling,
            window=sliding_window or None, softcap=softcap or None, sinks=s_aux, layout="bthd",
            cache_layout="bhtd",
        )  # fmt: skip
        return out, None  # type: ignore[return-value]
    if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] < key.shape[2]:
        n = attention_mask.shape[1]
        key, value = key[:, :, :n], value[:, :, :n]
        position_bias = None if position_bias is None else position_bias[..., :n]
        attention_mask = attention_mask if attention_mask.shape[0] else None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    call = _Call(
        module, query, key, value, attention_mask, bool(causal), sliding_window or None, scaling, softcap or None,
        s_aux, position_bias, dropout,
    )  # fmt: skip
    starts = None
    if attention_mask is not None and attention_mask.dim() == 1:
        starts, call.mask = (attention_mask, attention_mask), None
    elif attention_mask is not None and attention_mask.dim() == 3:
        starts = (attention_mask[0, 0], attention_mask[0, 1])
        call.mask, call.causal = None, True
        if attention_mask.shape[2] == 2 * query.shape[0] + 1:
            call.filled = attention_mask[0, 1, 1:2]
    if (starts_q := options.get("cu_seq_lens_q")) is not None and query.shape[0] == 1 and position_bias is None:
        starts_k = options.get("cu_seq_lens_k")
        starts, call.filled = (starts_q, starts_q if starts_k is None else starts_k), None
    elif starts is not None:
        longest = getattr(attention_mask, "longest", query.shape[2])
        longest_k = longest if attention_mask.dim() == 1 else key.shape[2]  # type: ignore[union-attr]
        options = {**options, "max_length_q": longest, "max_length_k": longest_k}
    if reason := call.unsupported():
        return _elsewhere(call, reason, starts, options), None
    if starts is not None and not (call.filled is not None and call.is_decoded):
        if position_bias is None:
            return _packed(call, starts, options), None
        call.mask = call.whole_mask(starts)
    return _attention(call), None


def _attention(call: _Call) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    n_q, n_k = call.q.shape[2], call.k.shape[2]
    common: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
    mask, causal, window = call.mask, call.causal, call.window
    if mask is not None and mask.dim() == 4:  # a full mask
        causal, window = False, None
        if mask.dtype == torch.bool and tuple(mask.shape[1:]) == (1, 1, n_k) and n_q == 1:  # padding of one query
            mask, causal = mask[:, 0, 0], True
    elif not causal and n_q > 1:  # an encoder's window reaches both ways and is in the mask
        window = None
    else:
        causal = True
    whole = mask is not None and mask.dim() == 4
    if causal and not whole and call.is_decoded:
        batch = q.shape[0]
        lengths = _lengths(n_k, batch, q.device) if call.filled is None else call.filled.expand(batch).contiguous()
        mask = None if mask is None else mask.bool().expand(batch, -1)
        return rooftile.decode_attention(  # type: ignore[return-value]
            q, call.k, call.v, lengths, window=window, mask=mask, layout="bthd", cache_layout="bhtd", **common
        )
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :].bool()
    if call.bias is not None:
        bias = call.bias.to(call.q.dtype)
        if mask is None:
            mask = bias
        else:
            mask = bias.where(mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    out = rooftile.attention(q, k, v, causal=causal, window=window, mask=mask, layout="bthd", **common)
    return out  # type: ignore[return-value]


def _packed(call: _Call, starts: tuple[Tensor, Tensor], options: dict[str, Any]) -> Tensor:
    """Packed sequences; `starts` are in the tokens of all rows of the batch."""
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.q, call.k, call.v))
    out = rooftile.attention_varlen(
        q,
        k,
        v,
        *starts,
        max_seqlen_q=options.get("max_length_q"),
        max_seqlen_k=options.get("max_length_k"),
        causal=call.causal,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks,
    )
    return out.unflatten(0, (call.q.shape[0], -1))  # type: ignore[union-attr]


def _elsewhere(call: _Call, reason: str, starts: tuple[Tensor, Tensor] | None, options: dict[str, Any]) -> Tensor:
    """By PyTorch's kernels or, if they lack what the model needs, by the model's eager code."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.utils import logging

    logging.get_logger(__name__).warning_once(
        f"attn_implementation=\"{NAME}\" has no {reason}: PyTorch's, or the model's own attention is used for it"
    )
    mask = call.whole_mask(starts)
    given: dict[str, Any] = {"dropout": call.dropout, "scaling": call.scale, **options}
    if call.bias is not None:
        given["position_bias"] = call.bias
    if call.softcap is None and call.sinks is None:
        return sdpa_attention_forward(call.module, call.q, call.k, call.v, mask, is_causal=False, **given)[0]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=call.q.dtype, device=mask.device).where(mask, torch.finfo(call.q.dtype).min)
    eager = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f"attention: {type(call.module).__name__} needs {reason}, and its file has no eager attention")
    return eager(call.module, call.q, call.k, call.v, mask, softcap=call.softcap, **given)[0]


def attends_by_name(module: nn.Module) -> bool:
    """Whether the module looks its attention up by the name in its configuration."""
    # Unwrapped: from transformers 5.24 on a decorator takes an argument's old name, too.
    forward: Any = getattr(type(module), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


class Switch:
    """Sets the attention of a model's configurations to Rooftile's, and back."""

    def __init__(self, model: nn.Module) -> None:
        self.names = tuple(name for name, module in model.named_modules() if attends_by_name(module))
        self._before: list[tuple[Any, str | None]] = []
        if not self.names:
            return
        register_attention()
        configs: dict[int, Any] = {id(c): c for c in (getattr(module, "config", None) for module in model.modules())}
        for config in configs.values():
            if hasattr(config, "_attn_implementation_internal"):
                self._before.append((config, config._attn_implementation_internal))
                config._attn_implementation_internal = NAME
                if getattr(config, "output_attentions", False):
                    _warn_of_weights()

    def undo(self) -> None:
        """Restore each configuration, except for those that were set to another implementation since."""
        for config, before in self._before:
            if config._attn_implementation_internal == NAME:
                config._attn_implementation_internal = before
        self._before = []
