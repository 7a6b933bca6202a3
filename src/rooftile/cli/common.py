"""Shared by all commands: the application, the mode of the process, and option values that several commands take."""

from __future__ import annotations

import contextlib
import difflib
import enum
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from rooftile.bench.workloads import MODELS
from rooftile.errors import NoGPU, to_install

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rooftile.cases import OpCase
    from rooftile.engine.engine import Quantization
    from rooftile.engine.speculation import Speculate

NAMED = ", ".join(MODELS)  # models that a command knows by name


class Panel(str, enum.Enum):
    """The groups of commands in --help, in its order."""

    run = "Run"
    measure = "Measure"
    develop = "Develop"


def _without_types(params):
    """The parameters; --help shows no type beside a flag, which takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Commands(TyperGroup):
    """Makes `bench prefill` and the like separate commands: `bench` itself takes names of ops."""

    def resolve_command(self, ctx, args):
        name = " ".join(args[:2])
        return super().resolve_command(ctx, [name, *args[2:]] if name in self.commands else args)

    def list_commands(self, ctx):
        panels = [panel.value for panel in Panel]
        order = {name: panels.index(getattr(c, "rich_help_panel", "")) for name, c in self.commands.items()}
        return sorted(order, key=lambda name: (order[name], name))

    def get_params(self, ctx):
        return _without_types(super().get_params(ctx))


_options: dict[str, str] = {}  # of the command that runs, by the argument that each sets
_ARGUMENTS = {"max_queue": "max_waiting"}  # where it has another name than the command's parameter


class _Command(TyperCommand):
    def get_params(self, ctx):
        return _without_types(super().get_params(ctx))

    def invoke(self, ctx):
        _options.clear()
        for param in self.params:
            if param.opts[0].startswith("--"):
                _options[_ARGUMENTS.get(param.name, param.name)] = param.opts[0]
        try:
            return super().invoke(ctx)
        except (ImportError, NoGPU) as error:
            missing = (getattr(error, "name", None) or "").partition(".")[0]
            if missing == "rooftile":  # a fault, and not of who called
                raise
            needed = f": {to_install()}" if missing in ("torch", "triton") else ""
            raise refused(self.name, error, needed) from None


def message_of(error: Exception) -> str:
    """What an error of the engine says, with the options of the command that runs in place of Python's arguments.

    A name that is also a word, such as `stop`, is replaced where a sentence is about it or a value follows.
    """
    text = re.sub(r"^(Engine|AsyncEngine|PagedKVCache|add|generate|sampling)(\.\w+)?: ", "", str(error))
    for name, option in _options.items():
        word = name if "_" in name else rf"(^|(?<=: )|(?<= and )){name}(?= (is|are|and|has) )|{name}(?==)"
        text = re.sub(rf"(?<![\w/])({word})(?![\w/])", option, text)
    return text


def refused(name: str | None, error: Exception, more: str = "", code: int = 2) -> typer.Exit:
    """The end of that command, with an exit code, after a line that says what the error says."""
    text = f"rooftile {name}: {message_of(error)}{more}"
    notices.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)


app = typer.Typer(
    name="rooftile",
    cls=_Commands,
    help="LLM kernels in Triton at the roofline of the GPU: check them, measure them, compile them without one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console()
notices = Console(stderr=True)  # messages other than a command's result


def command(panel: Panel, name: str | None = None):
    """Registers a function as a command of that group, by default under its own name."""
    return app.command(name, cls=_Command, rich_help_panel=panel.value)


Ops = Annotated[list[str] | None, typer.Argument(help="Names of ops. Default: all.", show_default=False)]


def has_gpu() -> bool:
    import torch

    return torch.accelerator.current_accelerator(check_available=True) is not None


def choose_mode() -> None:
    """Use the GPU if there is one, else Triton's interpreter, and say so. Call it before Triton is imported."""
    if os.environ.get("TRITON_INTERPRET"):
        return
    if not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"
        notices.print("No GPU here: kernels run on the CPU, in Triton's interpreter, slowly.", style="yellow")


def _show_version(asked: bool) -> None:
    if asked:
        import rooftile

        console.print(rooftile.__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM kernels in Triton at the roofline of the GPU: check them, measure them, compile them without one."""


class DType(str, enum.Enum):
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class QuantizeName(str, enum.Enum):
    """The format of the engine's weights."""

    none = "none"
    fp8 = "fp8"
    int8 = "int8"
    int4 = "int4"

    @property
    def kind(self) -> Quantization | None:
        return None if self is QuantizeName.none else self.value


class CacheName(str, enum.Enum):
    """Dtypes of the KV cache, as in `rooftile.bench.generate.CACHES`; here so that --help needs no PyTorch."""

    fp8 = "fp8"
    int8 = "int8"


CacheType = Annotated[CacheName | None, typer.Option(help="Quantize the KV cache. Default: as --dtype.")]


SpeculateName = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="KIND",
        help="Propose tokens, several of which a step may accept: ngram[:TOKENS] looks them up in the text so far, "
        "draft:PATH[:TOKENS] asks a smaller model. The text is the same.",
    ),
]


Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="The same tokens and log-probabilities whatever runs beside; slower."),
]

Cascade = Annotated[
    bool,
    typer.Option(
        "--cascade", help="Where all sequences begin alike, read those pages once for several of them; not yet timed."
    ),
]

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", dir_okay=False, help="Write the machine and the rows to this file."),
]

PrefixCache = Annotated[
    bool,
    typer.Option("--prefix-cache/--no-prefix-cache", help="Keep prompts' pages for later prompts that begin alike."),
]

WarmUp = Annotated[
    bool,
    typer.Option(
        "--warm-up/--no-warm-up",
        help="Compile kernels and capture CUDA graphs before requests are taken: seconds, or a minute the first time.",
    ),
]

TensorParallel = Annotated[
    int, typer.Option(min=1, help="GPUs, on each of which a process of its own has a part of the model.")
]


def speculation_of(text: str | None) -> Speculate | None:
    """What --speculate names; a usage error if that is nothing."""
    if text is None:
        return None
    from rooftile.engine.speculation import parse

    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--speculate") from None


class SetName(str, enum.Enum):
    """The named sets of points, as in `rooftile.cases.SETS`; repeated here so that --help needs no PyTorch."""

    tiny = "tiny"
    edge = "edge"
    llm = "llm"
    sweep = "sweep"
    prefill = "prefill"
    prompt = "prompt"
    decode = "decode"
    latent = "latent"
    tokens = "tokens"
    gemm = "gemm"
    softmax = "softmax"
    memory = "memory"
    training = "training"


def cases_of(ops: list[str] | None, group: str = ""):
    """The cases of those ops. An unknown name is a usage error that lists the known ones.

    `group` is the first word of commands of two words, whose second word may have been meant.
    """
    from rooftile.cases import find_cases

    try:
        return find_cases(ops)
    except ValueError as error:
        names = [info.name for info in app.registered_commands if info.name and info.name.startswith(f"{group} ")]
        near = difflib.get_close_matches((ops or [""])[0], [name.split()[1] for name in names])
        meant = f"did you mean `rooftile {group} {near[0]}`? " if near else ""
        raise typer.BadParameter(f"{meant}{error}", param_hint="OPS") from None


def refuse_absent(cases: Sequence[OpCase], sets: Sequence[str]) -> None:
    """A usage error unless one of the cases has one of those sets."""
    if not any(case.sets.get(name) for case in cases for name in sets):
        names = ", ".join(case.name for case in cases)
        raise typer.BadParameter(f"none of {names} has {' or '.join(sets)}", param_hint="--set")


@contextlib.contextmanager
def needing_bench() -> Iterator[None]:
    """What can't be imported here is a usage error that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise typer.BadParameter(f"{error}, which charts and pages need: {to_install('bench')}") from None


def require_charts(*paths: Path | None) -> None:
    """A usage error, before anything is measured, if there is a path to write charts to and no matplotlib."""
    if any(path is not None for path in paths):
        with needing_bench():
            from rooftile.bench.charts import pyplot

            pyplot()


def names_of(values: list[str] | None) -> list[str] | None:
    """The values of an option that may be repeated, or list several values with commas."""
    return [name for value in values for name in value.split(",") if name] if values else None
