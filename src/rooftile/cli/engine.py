"""Commands of the engine: text, and the proof of whose its kernels are."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from rooftile.cli.common import DType, QuantizeName, app, choose_mode, console, notices


class CacheName(str, enum.Enum):
    """What keys and values are kept in: `rooftile.bench.generate.CACHES`; here so that --help needs no PyTorch."""

    fp8 = "fp8"
    int8 = "int8"


@app.command()
def generate(
    path: Annotated[str, typer.Argument(help="A checkpoint's folder, or `demo`: the small model that comes along.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Repeatable: they run together. Default: all of standard input."),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as it comes; of several prompts one after the other.")
    ] = False,
    quantize: Annotated[QuantizeName, typer.Option(help="Weights of products in 8 or 4 bits.")] = QuantizeName.none,
    dtype: Annotated[DType, typer.Option(help="Of other weights and activations.")] = DType.bf16,
    kv_dtype: Annotated[CacheName | None, typer.Option(help="The cache in 8 bits. Default: as --dtype.")] = None,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt and its text, at most. Default: what is asked for.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many; 0 is no limit.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest that reach this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out what is less likely than this part of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Over 1 makes tokens that were there less likely.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after a token that ends the text.")] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="List each token with its log-probability, on standard error.")
    ] = False,
) -> None:
    """Continue prompts, and say how fast: tokens/s, ms a step, GB/s and their share of the roof, time to the first.

    Each prompt and its text go to standard output; all else goes to standard error.
    """
    import sys

    if not prompts and sys.stdin.isatty():
        raise typer.BadParameter("none was given, and standard input is a terminal", param_hint="--prompt")
    if not prompts:
        try:
            prompts = [sys.stdin.read().removesuffix("\n")]
            prompts[0].encode()
        except UnicodeError as error:
            raise typer.BadParameter(f"standard input is no UTF-8: {error}", param_hint="--prompt") from None
        if not prompts[0]:
            raise typer.BadParameter("none was given, and standard input is empty", param_hint="--prompt")
    choose_mode()
    from rooftile.bench.generate import CACHES, Settings, run
    from rooftile.cases.check import DTYPES

    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    settings = Settings(
        path=path,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        stream=stream,
        quantize=quantize.kind,
        dtype=DTYPES[dtype.value],
        kv_dtype=None if kv_dtype is None else CACHES[kv_dtype.value],
        max_seq_len=max_seq_len,
        stop=stop or (),
        sampling=sampling,
    )
    try:
        code = run(settings, console, notices)
    except (ValueError, TypeError, OSError, ImportError) as error:
        what = str(error).removeprefix("generate: ")
        notices.print(f"rooftile generate: {what}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


class ImplName(str, enum.Enum):
    """What `audit` runs, `rooftile.inspect.audit.IMPLS`; here so that --help needs no PyTorch."""

    engine = "engine"
    cuda = "cuda"
    patched = "patched"


@app.command()
def audit(
    path: Annotated[
        Path | None, typer.Argument(exists=True, help="A checkpoint's folder; random weights where none is given.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="llama-3-8b, granite-8b-code, qwen2.5-7b, tiny; or a config.json. Weights are random. Default: "
            "llama-3-8b, and in the interpreter tiny.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt. Default: 512, and in the interpreter 12.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of decoding. Default: 8, and in the interpreter 2.")
    ] = None,
    quantize: Annotated[QuantizeName, typer.Option(help="The engine's weights in 8 or 4 bits.")] = QuantizeName.none,
    dtype: Annotated[DType, typer.Option(help="Of other weights and activations.")] = DType.bf16,
    impl: Annotated[
        ImplName | None,
        typer.Option(
            help="engine; cuda: the same model by cuBLAS, SDPA and torch.compile, which does not pass; patched: "
            "Hugging Face's model after rooftile.patch, compiled, where the Triton kernels that Inductor made of the "
            "model's own code are accepted, and listed as such. Default: engine, and on a GPU cuda beside it."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Cut the model to its first layers.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write the profiler's trace, which Perfetto opens."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write every kernel to this file.")
    ] = None,
) -> None:
    """List every GPU kernel of prefill and decode. Exit code 1 if one that computes is not Rooftile's, in Triton.

    Copies and memsets are listed. Without a GPU the launches are recorded in the interpreter, and every op of PyTorch.
    """
    choose_mode()
    if path is not None and model is not None:
        raise typer.BadParameter("a folder has a model of its own: give one of them", param_hint="--model")
    from rooftile import runtime
    from rooftile.cases.check import DTYPES
    from rooftile.inspect.audit import Settings, run

    on_gpu = runtime.MODE is runtime.Mode.GPU
    settings = Settings(
        model=str(path) if path else model or ("llama-3-8b" if on_gpu else "tiny"),
        weights=path,
        impl=impl.value if impl else None,
        batch=batch,
        prompt=prompt or (512 if on_gpu else 12),
        steps=steps or (8 if on_gpu else 2),
        quantize=quantize.kind,
        dtype=DTYPES[dtype.value],
        layers=layers,
        trace=trace,
        json=json_file,
    )
    try:
        code = run(settings, console)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)
