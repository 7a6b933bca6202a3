"""vLLM's engine under the requests of `rooftile bench serve`, in a process of its own.

The process has no server: its one thread adds requests to vLLM's engine and calls `step()`, which runs the scheduler
and the model. A request that arrives during a step counts from its arrival, and is added after the step. Tokens come
when `step()` returns. Settings that are not named in `_options` are vLLM's defaults.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import operator
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rooftile.bench.load import TIMEOUT_S, Answer, Done, Load, Request, Settings, load_name, loads, row_of
from rooftile.bench.workloads import MODELS, RANDOM

IMPL = "vllm"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # step() runs the engine in the calling process
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
MEMORY = 0.85  # of the GPU's, for the engine
NEWS_S = 1.0  # between two signs of life
RECORDED = {
    "step_tokens": "scheduler_config.max_num_batched_tokens",
    "max_batch": "scheduler_config.max_num_seqs",
    "async_scheduling": "scheduler_config.async_scheduling",
    "cudagraph_mode": "compilation_config.cudagraph_mode.name",
    "prefix_cache": "cache_config.enable_prefix_caching",
    "pages": "cache_config.num_gpu_blocks",
}

_ids = (str(i) for i in itertools.count())
Given = Callable[[Request], tuple[Any, Any]]  # the prompt of a request, and its SamplingParams


def ask(
    engine: Any, requests: Sequence[Request], when: int | Sequence[float], given: Given, alive: Callable[[], None]
) -> list[Answer]:
    """Answers of vLLM's engine: to that many clients of a closed loop, or to arrivals, in seconds, of an open one."""
    ready = [given(request) for request in requests]
    answers: list[Answer] = []
    running: dict[str, Answer] = {}
    start = time.perf_counter()
    while running or len(answers) < len(requests):
        while (i := len(answers)) < len(requests):
            now = time.perf_counter()
            arrived = now if isinstance(when, int) else start + when[i]
            if arrived > now or (isinstance(when, int) and len(running) == when):
                break
            name = next(_ids)
            running[name] = Answer(requests[i], arrived)
            answers.append(running[name])
            engine.add_request(name, *ready[i])
        if not running:  # so it is an open loop, before an arrival
            time.sleep(min(arrived - now, NEWS_S))
            alive()
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            answer = running[output.request_id]
            if tokens := len(output.outputs[0].token_ids):  # those of this step
                answer.times.append(now)
                answer.tokens += tokens
            if output.finished:
                del running[output.request_id]
                answer.end()
        alive()
    return answers


def _options(settings: Settings, folder: str) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`. Random weights: writes the model's `config.json` into that folder."""
    model: dict[str, Any] = {"model": settings.weights}
    if settings.weights == RANDOM:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

        config = MODELS[settings.model]
        text = json.dumps({"architectures": [CLASSES[config["model_type"]]], **config})
        Path(folder, "config.json").write_text(text, encoding="utf-8")
        model = {"model": folder, "load_format": "dummy"}
    return {
        **model,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": str(settings.engine["dtype"]).removeprefix("torch."),
        "max_model_len": settings.workload.longest,
        "max_num_seqs": settings.engine["max_batch"],
        "enable_prefix_caching": settings.engine["prefix_cache"],
        "tensor_parallel_size": settings.tensor_parallel[0],
        "gpu_memory_utilization": MEMORY,
        "seed": 0,
    }


def _described(config: Any, version: str) -> dict[str, str]:
    """The version, and what vLLM chose, as far as this version of it says so."""
    found = {"version": version}
    for name, path in RECORDED.items():
        try:
            found[name] = str(operator.attrgetter(path)(config))
        except AttributeError:
            continue
    layers = getattr(config.compilation_config, "static_forward_context", {}).values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    return found | ({"attention": ", ".join(sorted(backends))} if backends else {})


def _rows(settings: Settings, folder: str, say: Callable[[str, Any], None]) -> Iterator[dict[str, Any]]:
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    say("note", f"vllm {__version__}: starting")
    options = _options(settings, folder)
    since = time.perf_counter()
    engine = LLM(**options).llm_engine
    seconds = time.perf_counter() - since
    described = _described(engine.vllm_config, __version__)
    say("note", f"vllm {__version__}: ready after {seconds:.0f} s, {described}")
    told = time.perf_counter()

    def given(request: Request) -> tuple[Any, Any]:
        return tokens_input(request.prompt), SamplingParams(
            temperature=0.0, max_tokens=request.new, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip

    def alive() -> None:
        nonlocal told
        if time.perf_counter() - told > NEWS_S:
            told = time.perf_counter()
            say("alive", None)

    for load in loads(settings):
        ask(engine, load.warm_up, len(load.warm_up), given, alive)
        when = load.named["clients"] if load.arrivals is None else load.arrivals
        answers = ask(engine, load.requests, when, given, alive)
        yield row_of(IMPL, load.named, answers, settings.limits) | {"load_s": seconds, "engine": described}


def _child(settings: Settings, folder: str, pipe: Any) -> None:
    """In vLLM's process: sends each row as soon as its load has ended, or what went wrong."""
    os.setpgrp()  # a group of its own, with the workers of tensor parallelism
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        for row in _rows(settings, folder, lambda *said: pipe.send(said)):
            pipe.send(("row", row))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _receive(pipe: Any, left: list[Load], console: Console, done: Done) -> str:
    """Take the rows of those loads, each off the list, until all have come or one is lost. Returns why."""
    while left:
        if not pipe.poll(TIMEOUT_S):
            return f"nothing came within {TIMEOUT_S:g} s"
        kind, said = pipe.recv()
        if kind == "row":
            del left[0]
            text = f"{said['requests']} requests, {said['failed']} failed, {said.get('tokens_per_s', 0):.0f} tokens/s"
            console.print(f"{IMPL}, {load_name(said)}: {text}", highlight=False)
            done(said)
        elif kind == "note":
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        elif kind == "error":
            return str(said)
    return ""


def _end(process: Any) -> None:
    """Kill the process and the workers that it started: the next engine needs their memory."""
    process.kill()  # it may not have made its group yet
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def measure(settings: Settings, console: Console, done: Done) -> None:
    """A row for each load. Where vLLM is not installed, fails, hangs or dies, the rows that are missing say so."""
    left = list(loads(settings))
    if importlib.util.find_spec("vllm") is None:
        absent = {"status": "absent", "message": "not installed (No module named 'vllm')"}
        for load in left:
            done(row_of(IMPL, load.named, [], settings.limits) | absent)
        return
    context = multiprocessing.get_context("spawn")  # a process that has used a GPU can't be forked
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_child, args=(settings, folder, theirs))
        process.start()
        try:
            theirs.close()
            message = _receive(ours, left, console, done)
        except EOFError:
            process.join()
            message = f"the process has ended with exit code {process.exitcode}"
        finally:
            _end(process)
            ours.close()
    for load in left:
        lost = [Answer(request, 0.0, error=message) for request in load.requests]
        done(row_of(IMPL, load.named, lost, settings.limits))
