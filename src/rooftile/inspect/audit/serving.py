"""The serving engine, audited: requests that overlap, as a server has them."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.engine import processes
from rooftile.engine.async_engine import AsyncEngine
from rooftile.engine.engine import Engine
from rooftile.errors import RequestError
from rooftile.inspect.audit.profile import Part

NAME = "requests that overlap"
_NEW = 4  # tokens of each request beside --steps
_SLOTS = 5  # at least: all requests at once
_TIMEOUT_S = 600.0  # without a token
_CLOSE_S = 60.0  # for a step that still runs then
_SAMPLED: dict[str, Any] = {
    "temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "logprobs": True, "top_logprobs": 2,
}  # fmt: skip


class _EvenTokens:
    """A mask, as a grammar gives one."""

    def __init__(self, vocab: int) -> None:
        self._words = torch.full((-(-vocab // 32),), 0x55555555, dtype=torch.int32, device="cpu")

    def mask(self) -> Tensor:
        return self._words

    def advance(self, token: int) -> None:
        """Every token may follow."""


def started(
    stack: contextlib.ExitStack, model: Path | dict[str, Any], *, batch: int, prompt: int, steps: int,
    page_size: int, tensor_parallel: int, **options: Any,
) -> list[Part]:  # fmt: skip
    """An `AsyncEngine` of a checkpoint, or of a configuration with random weights, and its part; `stack` ends it.

    Of several ranks, this one's kernels are seen; the others run the same.

    Args:
        options: of `Engine`, speculation among them.

    Raises:
        ValueError: as `Engine.from_pretrained` and `processes.started`.
    """
    slots = max(batch, _SLOTS)
    longest = page_size + prompt + 2 * (steps + _NEW) + 1
    options |= {"max_batch": slots, "max_seq_len": longest, "page_size": page_size}
    stack.enter_context(processes.started(tensor_parallel, model, options))
    make: Any = Engine.from_config if isinstance(model, dict) else Engine.from_pretrained
    engine = make(model, **options, tensor_parallel=tensor_parallel)
    # The long prompt has three parts or more.
    served = AsyncEngine(engine, step_tokens=2 * slots + (page_size + prompt) // 3)
    stack.callback(served.close, timeout=_CLOSE_S)
    # The first requests with an option make, and fill, what it needs.
    first: dict[str, Any] = {"prompt": [0] * 4, "max_new_tokens": 4, "ignore_eos": True}
    hows: list[dict[str, Any]] = [
        {"mask": _EvenTokens(engine.config.vocab)},
        {"logit_bias": {0: 1e4}, "presence_penalty": 0.1},
    ]
    for stream in served.add_all(first | how for how in hows):
        stream.result()
    return [part(served, prompt, steps)]


def part(served: AsyncEngine, prompt: int, steps: int) -> Part:
    """Of requests: greedy, sampled and masked ones, parts of a prompt beside them, and the same prompt once more."""
    problems, runs = list[str](), itertools.count()

    def run() -> None:
        problems[:] = _run(served, prompt, steps + _NEW, next(runs))

    return Part(NAME, run, problems=lambda: problems)


def _run(served: AsyncEngine, prompt: int, new: int, run: int) -> list[str]:
    """Run them to their ends. What the steps lacked, so that they prove nothing of it.

    Raises:
        TimeoutError: no token came within `_TIMEOUT_S`.
    """
    vocab, page_size = served.engine.config.vocab, served.engine.runner.cache.page_size

    def asked(name: str, i: int, tokens: int, **how: Any) -> dict[str, Any]:
        text = [(7 * i + 3 * t + run) % vocab for t in range(tokens)]  # of each run another: the cache keeps them
        return {"prompt": text, "request_id": name, "max_new_tokens": new, "ignore_eos": True, **how}

    long = asked("long", 3, page_size + prompt, **_SAMPLED)
    requests = [
        asked("greedy", 0, 4),
        asked("masked", 1, 5, mask=_EvenTokens(vocab)),
        # It repeats itself, so that its tokens can be proposed; alone at last, as one of many gets no proposals.
        asked("repeats", 2, 4, prompt=[run] * 4, logit_bias={run: 1e4}, max_new_tokens=2 * new),
        long,
    ]
    again = asked("again", 3, page_size + prompt)
    before, events, chunks = served.stats(), queue.SimpleQueue[Any](), Counter[str]()
    live, problems = {str(request["request_id"]) for request in requests}, list[str]()
    served.add_for(events.put, requests)
    while live:
        try:
            some = events.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            names = ", ".join(sorted(live))
            raise TimeoutError(f"{NAME}: no token came within {_TIMEOUT_S:g} s; still live: {names}") from None
        for request, item in some:
            if isinstance(item, RequestError):
                raise item
            chunks[request.id] += 1
            if item.finish_reason is not None:
                live.remove(request.id)
            if request.id == "long" and chunks["long"] == 1:  # its prompt is in the cache
                if chunks["greedy"] < 2:
                    problems.append("no step had a part of a prompt beside decoding")
                live.add("again")
                served.add_for(events.put, [again])
    after = served.stats()
    if after.prefix_hit_tokens == before.prefix_hit_tokens:
        problems.append("no page was found in the prefix cache")
    if served.engine.speculate is not None and after.proposed_tokens == before.proposed_tokens:
        problems.append("no token was proposed")
    return problems
