"""Commands that talk: `serve`, the OpenAI-compatible server, and `chat`, a conversation in the terminal."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.common import (
    CacheName,
    CacheType,
    Cascade,
    Deterministic,
    DType,
    Panel,
    PrefixCache,
    QuantizeName,
    SpeculateName,
    TensorParallel,
    WarmUp,
    choose_mode,
    command,
    console,
    message_of,
    notices,
    refused,
    speculation_of,
)
from rooftile.errors import to_install

if TYPE_CHECKING:
    from rooftile import AsyncEngine


class ToolFormat(str, enum.Enum):
    """How a model writes tool calls, as in `rooftile.serve.chat.FORMATS`."""

    auto = "auto"
    hermes = "hermes"
    llama3 = "llama3"
    none = "none"


CheckpointPath = Annotated[str, typer.Argument(help="A checkpoint folder, an id on the Hugging Face Hub, or `demo`.")]
Quantize = Annotated[QuantizeName, typer.Option(help="Quantize the weights of the GEMMs.")]
ModelType = Annotated[DType, typer.Option(help="Type of activations and of other weights.")]
Length = Annotated[
    int | None, typer.Option(min=2, help="Most tokens of a prompt and its answer. Default: the model's, at most 4096.")
]
Template = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="A Jinja file, instead of the checkpoint's chat template."),
]


@contextlib.contextmanager
def _loaded(
    name: str,
    folder: Path,
    dtype: DType,
    quantize: QuantizeName,
    kv_dtype: CacheName | None,
    speculate: str | None,
    tensor_parallel: int = 1,
    *,
    requests: dict[str, Any],
    **options: Any,
) -> Iterator[AsyncEngine]:
    """An `AsyncEngine`; `requests` are the options that its `Engine` does not have."""
    import rooftile
    from rooftile.bench.generate import CACHES
    from rooftile.cases.check import DTYPES
    from rooftile.engine import processes

    options |= {
        "dtype": DTYPES[dtype.value],
        "quantize": quantize.kind,
        "kv_dtype": None if kv_dtype is None else CACHES[kv_dtype.value],
        "speculate": speculation_of(speculate),
    }
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(processes.started(tensor_parallel, folder, options))
            engine = rooftile.AsyncEngine.from_pretrained(
                folder, **options, tensor_parallel=tensor_parallel, **requests
            )
        except (ValueError, TypeError, OSError) as error:
            raise refused(name, error) from None
        yield stack.enter_context(engine)


@command(Panel.run)
def serve(
    path: CheckpointPath,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one of the machine's.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="ROOFTILE_API_KEY",
            help="A key that requests to /v1 must have; repeatable. Default: none is asked for.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model; repeatable. Default: the folder's name.")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 32,
    max_seq_len: Length = None,
    pages: Annotated[
        int | None,
        typer.Option(min=1, help="Pages of the cache. Default: enough for --max-batch sequences of --max-seq-len."),
    ] = None,
    quantize: Quantize = QuantizeName.none,
    dtype: ModelType = DType.bf16,
    kv_dtype: CacheType = None,
    prefix_cache: PrefixCache = True,
    step_tokens: Annotated[
        int,
        typer.Option(
            min=2,
            help="Most tokens of a step, more than --max-batch: one of each running sequence, and parts of prompts.",
        ),
    ] = 1024,
    warm_up: WarmUp = True,
    speculate: SpeculateName = None,
    deterministic: Deterministic = False,
    cascade: Cascade = False,
    tensor_parallel: TensorParallel = 1,
    chat_template: Template = None,
    tool_format: Annotated[
        ToolFormat,
        typer.Option(
            metavar="FORMAT", help="Of tool calls: hermes, llama3, none, or auto, which looks at the chat template."
        ),
    ] = ToolFormat.auto,
    max_queue: Annotated[int, typer.Option(min=1, help="Sequences that may wait; more get 429.")] = 1024,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Default: as many as there is room for.")] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 4 << 20,
    body_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds in which a request must come.")] = 30.0,
    send_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a client may read nothing.")] = 60.0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for running requests after SIGTERM.")] = 60.0,
) -> None:
    """Answer requests of OpenAI's API over HTTP: completions, chats, /health and /metrics.

    SIGTERM lets running requests end, and refuses new ones.
    """
    import logging

    from rooftile.serve import check_installed

    check_installed()
    choose_mode()
    from rooftile.engine.async_engine import check_step_tokens
    from rooftile.engine.hub import DEMO, folder_of, is_id
    from rooftile.serve.app import Options, folder_options
    from rooftile.serve.front import LOG_FORMAT, Front
    from rooftile.serve.server import listen

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        check_step_tokens(step_tokens, max_batch)
        if "" in (api_key or ()):
            raise ValueError("--api-key is empty, expected a key; without the option none is asked for")
        folder = folder_of(path)
        if not (tokenizer := folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json, and the server needs one")
        listening = listen(host, port)  # before the model is loaded
        options = Options(
            names=tuple(served_model_name or [path if path == DEMO or is_id(path) else folder.resolve().name]),
            api_keys=tuple(api_key or ()),
            max_body=max_body,
            max_prompt_tokens=max_prompt_tokens,
            body_timeout=body_timeout,
            send_timeout=send_timeout,
            **folder_options(folder, chat_template, tool_format.value),
        )
        front = Front(listening, options, tokenizer.read_text(encoding="utf-8"), drain_timeout=drain_timeout)
    except (ValueError, TypeError, OSError) as error:
        raise refused("serve", error) from None
    with front, _loaded(
        "serve", folder, dtype, quantize, kv_dtype, speculate, tensor_parallel, max_batch=max_batch,
        max_seq_len=max_seq_len, pages=pages, deterministic=deterministic, cascade=cascade,
        requests={
            "max_waiting": max_queue, "prefix_cache": prefix_cache, "step_tokens": step_tokens, "warm_up": warm_up,
        },
    ) as engine:  # fmt: skip
        front.begin(engine)
        log = logging.getLogger("rooftile.serve")
        log.info("%s: %r, at most %d sequences", ", ".join(options.names), engine.engine, max_batch)
        log.info("listening on %s", front.url)
        code = front.run()
    raise typer.Exit(code)


@command(Panel.run)
def chat(
    path: CheckpointPath,
    system: Annotated[str | None, typer.Option(help="A message before all others.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens that reach this probability together.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many of the most likely tokens; 0 is no limit.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of an answer. Default: as many as there is room for.")
    ] = None,
    max_seq_len: Length = None,
    quantize: Quantize = QuantizeName.none,
    dtype: ModelType = DType.bf16,
    kv_dtype: CacheType = None,
    prefix_cache: PrefixCache = True,
    speculate: SpeculateName = None,
    tensor_parallel: TensorParallel = 1,
    chat_template: Template = None,
) -> None:
    """Talk with a model. The answer is written as it comes, and then its speed.

    /reset forgets the conversation, /quit leaves, Ctrl-C ends an answer.
    """
    import importlib.util
    import io
    import sys

    if importlib.util.find_spec("jinja2") is None:
        raise ImportError(f"chat templates need jinja2: {to_install('serve')}")
    choose_mode()
    from rooftile.engine.hub import folder_of
    from rooftile.serve.terminal import HELP, is_utf8, talk, template_of

    try:
        if system is not None and not is_utf8(system):
            raise ValueError("--system is not UTF-8")
        folder = folder_of(path)
        template = template_of(folder, chat_template)
    except (ValueError, TypeError, OSError) as error:
        raise refused("chat", error) from None
    with _loaded(
        "chat", folder, dtype, quantize, kv_dtype, speculate, tensor_parallel, max_batch=1, max_seq_len=max_seq_len,
        requests={"prefix_cache": prefix_cache},
    ) as engine:  # fmt: skip
        if engine.engine.tokenizer is None:
            raise refused("chat", ValueError(f"{folder} has no tokenizer.json"))
        terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is reported, and does not raise
        if terminal:
            notices.print(HELP, style="dim", markup=False)
        talk(
            engine, template, lambda: input("> " if terminal else ""), console, notices, system=system,
            message_of=message_of, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k,
            seed=seed,
        )  # fmt: skip
