"""Commands that measure whole models."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli.common import (
    NAMED,
    CacheType,
    Cascade,
    Deterministic,
    DType,
    JsonFile,
    Panel,
    PrefixCache,
    QuantizeName,
    SpeculateName,
    WarmUp,
    choose_mode,
    command,
    console,
    message_of,
    names_of,
    require_charts,
    speculation_of,
)


@command(Panel.measure, "bench prefill")
def bench_prefill(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help=f"{NAMED}; or a config.json, or a folder that holds one. "
            "Default: that of --weights, or qwen2.5-7b, and in the interpreter tiny.",
        ),
    ] = None,
    weights: Annotated[str, typer.Option(metavar="random|PATH", help="random, or a checkpoint folder.")] = "random",
    tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            help="Prompt lengths; repeatable, or with commas. Default: 128 to 2048; 16 and 32 in the interpreter.",
        ),
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights and activations.")] = DType.bf16,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only the first layers of the model.")] = None,
    impls: Annotated[
        list[str] | None,
        typer.Option(
            "--peers",
            help="rooftile, compile, rooftile+compile beside eager; repeatable, or with commas. Default: all, and in "
            "the interpreter rooftile.",
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Forwards before the measured ones.")] = 5,
    iters: Annotated[int, typer.Option(min=1, help="Forwards measured for each implementation.")] = 40,
    per_length: Annotated[
        bool, typer.Option("--per-length", help="Compile for each length instead of once for all.")
    ] = False,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write a chart here.")] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/prefill/: JSON and a chart.")
    ] = None,
) -> None:
    """Time one forward of a whole model: plain, patched, compiled, patched and compiled. Exit code 1 if ours fails."""
    choose_mode()
    from rooftile.bench.prefill import Settings, run
    from rooftile.bench.prefill.report import IMPLS
    from rooftile.cases.check import DTYPES

    try:
        lengths = [int(n) for n in names_of(tokens) or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--tokens") from None
    if any(n < 1 for n in lengths):
        raise typer.BadParameter(f"{min(lengths)}, expected 1 or more", param_hint="--tokens")
    names = names_of(impls)
    if unknown := [n for n in names or () if n not in IMPLS]:
        raise typer.BadParameter(f"unknown {', '.join(unknown)}; known: {', '.join(IMPLS)}", param_hint="--peers")
    settings = Settings(
        model=model,
        weights=weights,
        tokens=lengths,
        dtype=DTYPES[dtype.value],
        layers=layers,
        impls=names,
        warmup=warmup,
        iters=iters,
        per_length=per_length,
        json=json_file,
        plot=plot,
        results=results,
    )
    try:
        code = run(settings, console)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


class OnOff(str, enum.Enum):
    on = "on"
    off = "off"


def _positive(values: list[str] | None, option: str) -> list[int]:
    """Positive integers of an option that may be repeated, or list several values with commas."""
    try:
        numbers = [int(n) for n in names_of(values) or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    if any(n < 1 for n in numbers):
        raise typer.BadParameter(f"{min(numbers)}, expected 1 or more", param_hint=option)
    return numbers


@command(Panel.measure, "bench e2e")
def bench_e2e(
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME|PATH",
            help=f"{NAMED}; or a config.json, or a folder that holds one; "
            "repeatable, or with commas. Default: llama-3-8b, and in the interpreter tiny.",
        ),
    ] = None,
    batches: Annotated[
        list[str] | None,
        typer.Option("--batch", metavar="N", help="Sequences; repeatable, or with commas. Default: 1, 2, 8 and 32."),
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt. Default: 512.")] = None,
    new: Annotated[int | None, typer.Option(min=2, help="Tokens after each prompt. Default: 256.")] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights, activations and cache.")] = DType.bf16,
    quantize: Annotated[QuantizeName, typer.Option(help="The engine's weights.")] = QuantizeName.none,
    impls: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="rooftile, cuda_kernels, hf_static_compile, hf_patched, each also as ..._eager (Hugging Face's is "
            "hf_eager), with --quantize fp8 cuda_kernels_fp8, rooftile_untuned, rooftile_deterministic, and "
            "rooftile_portable, in a run of its own; repeatable, or with commas. Default: all but the last three.",
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only the first layers of the model.")] = None,
    tuned: Annotated[OnOff, typer.Option("--tuning", help="Read tuned tables.")] = OnOff.on,
    weights: Annotated[str, typer.Option(metavar="random|PATH", help="random, or a checkpoint folder.")] = "random",
    seconds: Annotated[
        float, typer.Option(min=0.001, help="Device time for the steps of each implementation at each batch size.")
    ] = 4.0,
    layer: Annotated[
        bool,
        typer.Option("--layer", help="Time the kernels of one decode layer instead of models; --prompt is then 44."),
    ] = False,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write a chart.")] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/e2e/: JSON and charts.")
    ] = None,
) -> None:
    """Time prompts and decoding of models: the engine, CUDA's kernels, Hugging Face. Exit code 1 if ours fails."""
    choose_mode()
    names = names_of(impls)
    if names == ["rooftile_portable"]:
        os.environ["ROOFTILE_PORTABLE"] = "1"  # before Rooftile's kernels are imported
    require_charts(plot, None if layer else results)
    from rooftile.bench.e2e import Settings, run
    from rooftile.bench.e2e.paths import IMPLS, OURS_PORTABLE
    from rooftile.cases.check import DTYPES

    if OURS_PORTABLE in (names or ()) and len(names or ()) > 1:
        raise typer.BadParameter("rooftile_portable is measured in a run of its own", param_hint="--impl")
    if unknown := [n for n in names or () if n not in IMPLS]:
        raise typer.BadParameter(f"unknown {', '.join(unknown)}; known: {', '.join(IMPLS)}", param_hint="--impl")
    settings = Settings(
        models=names_of(models) or (),
        batches=_positive(batches, "--batch"),
        prompt=prompt,
        new=new,
        dtype=DTYPES[dtype.value],
        quantize=quantize.kind,
        impls=names or (),
        layers=layers,
        tuned=tuned is OnOff.on,
        weights=weights,
        seconds=seconds,
        layer=layer,
        json=json_file,
        plot=plot,
        results=results,
    )
    try:
        code = run(settings, console)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.measure, "bench quality")
def bench_quality(
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel",
            help="naive, rooftile_portable, rooftile_hopper, rooftile_decode, rooftile_paged, sdpa_flash, sdpa_cudnn, "
            "flex, openai_tutorial, amd_tutorial, flash_triton, aiter, xformers; repeatable, or with commas. Default: "
            "all.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID",
            help="A causal model: its folder, or its id on the Hugging Face Hub. Default: the package's own, of bytes.",
        ),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--file",
            metavar="KERNEL=FILE",
            help="Where openai_tutorial or amd_tutorial stands: Python with attention(q, k, v, causal, sm_scale); "
            "repeatable.",
        ),
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Of weights and activations.")] = DType.bf16,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write the rows to this file too.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/quality/<model>.json, or add to it."),
    ] = None,
) -> None:
    """Compare a trained model's text with each attention kernel, plain and compiled. Exit code 1 if ours fails."""
    choose_mode()
    from rooftile.bench.quality import Settings, run
    from rooftile.bench.quality.kernels import files_of
    from rooftile.cases.check import DTYPES
    from rooftile.engine import hub

    try:
        folder = None if model is None else hub.folder_of(model)
        settings = Settings(
            model=folder, name=model.split("/")[-1] if model and hub.is_id(model) else None, names=names_of(names),
            files=files_of(files or []), dtype=DTYPES[dtype.value], json=json_file, results=results,
        )  # fmt: skip
        code = run(settings, console)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


@command(Panel.measure, "bench serve")
def bench_serve(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{NAMED}; with --url, the server's name of its model. "
            "Default: llama-3-8b, in the interpreter tiny, and with --url the server's first.",
        ),
    ] = None,
    weights: Annotated[str, typer.Option(metavar="random|PATH", help="random, or a checkpoint folder.")] = "random",
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A server with OpenAI's API. Default: an engine in this process.")
    ] = None,
    key: Annotated[str | None, typer.Option("--api-key", help="The key that the server at --url asks for.")] = None,
    impl: Annotated[str, typer.Option("--name", help="What the rows call the implementation.")] = "rooftile",
    rates: Annotated[
        list[str] | None,
        typer.Option("--rate", metavar="X", help="Requests a second, in an open loop; repeatable, or with commas."),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            help="Clients of a closed loop; repeatable, or with commas. "
            "Default without --rate: 1, 8, 32, 64, 128, 256.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 512,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, on average.")] = 220,
    new: Annotated[int, typer.Option(min=2, help="Tokens of an answer, on average.")] = 190,
    fixed: Annotated[bool, typer.Option("--fixed", help="All prompts and answers have those lengths.")] = False,
    prefix: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with, besides their own.")] = 0,
    per_client: Annotated[
        int | None, typer.Option(min=1, help="Requests of each client, instead of --requests in all.")
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Measure `rooftile serve`'s server too, in a process of its own on loopback.")
    ] = False,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peers",
            help="vllm: measure vLLM's engine too, in a process of its own, where it is installed; repeatable, or with "
            "commas.",
        ),
    ] = None,
    first_limit: Annotated[
        float, typer.Option("--first", metavar="SECONDS", help="A good answer's first token comes within this.")
    ] = 0.5,
    each_limit: Annotated[
        float,
        typer.Option("--each", metavar="SECONDS", help="A good answer's other tokens come within this, on average."),
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of the requests and their arrivals.")] = 0,
    dtype: Annotated[DType, typer.Option(help="Type of activations and of other weights.")] = DType.bf16,
    quantize: Annotated[QuantizeName, typer.Option(help="The format of the weights.")] = QuantizeName.none,
    kv_dtype: CacheType = None,
    deterministic: Deterministic = False,
    cascade: Cascade = False,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Sequences at a time, of the engine and of --http's server.")
    ] = 256,
    max_seq_len: Annotated[int, typer.Option(min=4, help="Tokens of a prompt and its answer, at most.")] = 2048,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step, at most; more than --max-batch.")] = 1024,
    warm_up: WarmUp = True,
    prefix_cache: PrefixCache = True,
    speculate: SpeculateName = None,
    tensor_parallel: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor-parallel",
            metavar="N",
            help="GPUs of an engine; repeatable, or with commas: the engines are measured in turn. Default: 1.",
        ),
    ] = None,
    json_file: JsonFile = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/e2e/serve/<model>.json, or add to it."),
    ] = None,
) -> None:
    """Time requests that come while others run, to an engine here or to a server. Exit code 1 if one of ours failed."""
    choose_mode()
    require_charts(results)
    from rooftile import runtime
    from rooftile.bench import load
    from rooftile.bench.generate import CACHES
    from rooftile.bench.workloads import MODELS
    from rooftile.cases.check import DTYPES

    interpreted = runtime.MODE is runtime.Mode.INTERPRETER
    model = model or ("" if url is not None else "tiny" if interpreted else "llama-3-8b")
    if url is None and model not in MODELS:
        raise typer.BadParameter(f"unknown {model}; known: {', '.join(MODELS)}", param_hint="--model")
    default = ["1", "8", "32", "64", "128", "256"]
    try:
        settings = load.Settings(
            model=model,
            weights=weights,
            url=url,
            key=key,
            impl=impl,
            rates=_rates(names_of(rates) or []),
            clients=_positive(clients or ([] if rates else default), "--clients"),
            # Of a model that is not known here, ids that every tokenizer has.
            workload=load.Workload(
                requests, prompt, new, fixed, max_seq_len, MODELS.get(model, {"vocab_size": 256})["vocab_size"], seed,
                prefix, per_client,
            ),
            limits=load.Limits(first_limit, each_limit),
            engine={
                "max_batch": max_batch, "max_seq_len": max_seq_len, "quantize": quantize.kind,
                "dtype": DTYPES[dtype.value], "kv_dtype": None if kv_dtype is None else CACHES[kv_dtype.value],
                "deterministic": deterministic, "cascade": cascade,
                "step_tokens": step_tokens, "prefix_cache": prefix_cache, "warm_up": warm_up,
                "speculate": speculation_of(speculate),
            },
            tensor_parallel=_positive(tensor_parallel, "--tensor-parallel") or (1,),
            http=http,
            peers=names_of(peers) or (),
            json=json_file,
            results=results,
        )  # fmt: skip
        code = load.run(settings, console)
    except (OSError, ValueError, ImportError) as error:
        raise typer.BadParameter(message_of(error)) from None
    raise typer.Exit(code)


@command(Panel.measure, "bench speculation")
def bench_speculation(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help=f"{NAMED}. Default: llama-3-8b, in the interpreter tiny. With --text a checkpoint's folder or id, by "
            "default demo, the byte model.",
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Continue real texts, with proposals of n-grams, by a trained model.")
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|ID", help="With --text: a smaller checkpoint of the same vocabulary proposes, not n-grams."
        ),
    ] = None,
    acceptances: Annotated[
        list[str] | None,
        typer.Option(
            "--acceptance",
            metavar="X",
            help="How likely a proposal is right; repeatable, or with commas. Default: 0, 0.5, 0.8, 1.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=15, help="Proposals of a step; with --text, 1 to this many.")] = 4,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of the prompt. Default: 512. With --text at most so many characters, by default 320."
        ),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens after it. Default: 256; with --text 160, and in the interpreter 8."),
    ] = None,
    dtype: Annotated[
        DType | None,
        typer.Option(help="Type of activations and of other weights. Default: bf16; with --text fp32."),
    ] = None,
    quantize: Annotated[QuantizeName, typer.Option(help="The format of the weights.")] = QuantizeName.none,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only the first layers of the model.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each way; the median counts. Default: 3, in the interpreter 1."),
    ] = None,
    json_file: JsonFile = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Write DIR/<gpu>/e2e/speculation/[text-]<model>.json."),
    ] = None,
) -> None:
    """Time speculative decoding by how many of its proposals are right. Exit code 1 if it changes tokens.

    With --text, other tokens fail only in float32.
    """
    choose_mode()
    from rooftile import runtime
    from rooftile.bench import speculation
    from rooftile.bench.workloads import MODELS
    from rooftile.cases.check import DTYPES
    from rooftile.engine.hub import DEMO

    interpreted = runtime.MODE is runtime.Mode.INTERPRETER
    if text and (acceptances or layers):
        raise typer.BadParameter("--acceptance and --layers are of a replay", param_hint="--text")
    if draft is not None and not text:
        raise typer.BadParameter("a draft model needs real text: add --text", param_hint="--draft")
    model = model or (DEMO if text else "tiny" if interpreted else "llama-3-8b")
    if not text and model not in MODELS:
        raise typer.BadParameter(f"unknown {model}; known: {', '.join(MODELS)}", param_hint="--model")
    dtype = dtype or (DType.fp32 if text else DType.bf16)
    try:
        settings = speculation.Settings(
            model=model,
            text=text,
            draft=draft,
            acceptances=[float(x) for x in names_of(acceptances) or ("0", "0.5", "0.8", "1")],
            tokens=tokens,
            prompt=prompt or (320 if text else 512),
            new=new or ((8 if interpreted else 160) if text else 256),
            rounds=rounds or (1 if interpreted else 3),
            engine={"dtype": DTYPES[dtype.value], "quantize": quantize.kind},
            layers=layers,
            json=json_file,
            results=results,
        )
        code = speculation.run(settings, console)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


def _rates(given: list[str]) -> list[float]:
    found = []
    for text in given:
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not 0 < rate < float("inf"):
            raise typer.BadParameter(f"{text} is no positive number", param_hint="--rate")
        found.append(rate)
    return found
