"""`rooftile generate`: the text as it is generated, then the time it took and its distance from the memory roof."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from rooftile import runtime
from rooftile.bench.workloads import step_bytes
from rooftile.engine.generation import NEW_TOKENS
from rooftile.errors import counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rooftile.engine.engine import Engine, Quantization
    from rooftile.engine.generation import StreamChunk

CACHES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to generate; the options of sampling are `Engine.generate`'s.

    Without `max_new_tokens`, `NEW_TOKENS` are the most, or as many as there is room for after the longest prompt.
    """

    path: str
    prompts: Sequence[str]
    max_new_tokens: int | None = None
    stream: bool = False
    quantize: Quantization | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    max_seq_len: int | None = None
    stop: Sequence[str] = ()
    speculate: Any = None
    deterministic: bool = False
    tensor_parallel: int = 1
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Timing:
    """When tokens came. Seconds are since the call; a step is one token of each prompt that has not ended.

    A prompt of another step than the first may get its first token beside further ones of others. Steps, and what is
    decoded, count from when every prompt had its first.
    """

    begun: float = dataclasses.field(default_factory=time.perf_counter)
    first: float | None = None
    settled: float = 0.0  # when every prompt had its first token
    last: float = 0.0
    tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    before: dict[int, int] = dataclasses.field(default_factory=dict)  # those until then

    def add(self, index: int) -> None:
        now = time.perf_counter() - self.begun
        self.first = now if self.first is None else self.first
        self.last = now
        self.tokens[index] = self.tokens.get(index, 0) + 1
        if self.tokens[index] == 1:
            self.settled, self.before = now, dict(self.tokens)

    @property
    def count(self) -> int:
        return sum(self.tokens.values())

    @property
    def steps(self) -> int:
        """Of decoding."""
        return max((n - self.before[index] for index, n in self.tokens.items()), default=0)

    @property
    def step_seconds(self) -> float | None:
        return (self.last - self.settled) / self.steps if self.steps else None

    @property
    def decoded_per_second(self) -> float | None:
        """Tokens a second of all prompts."""
        return (self.count - sum(self.before.values())) / (self.last - self.settled) if self.steps else None


class Printer:
    """Writes the texts of several prompts in sequence, although the prompts run as one batch.

    With `stream`, the first prompt that has not ended is written token by token; the text of the others is kept until
    their turn.
    """

    def __init__(self, prompts: Sequence[str], stream: bool, console: Console) -> None:
        self.prompts, self.stream, self.console = prompts, stream, console
        self.waiting = [""] * len(prompts)
        self.chunks: list[list[StreamChunk]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)
        self.at = 0

    def begin(self) -> None:
        """The prompt to write next."""
        if self.at < len(self.prompts):
            prompt = self.prompts[self.at]
            self.console.print(prompt, style="dim", end="", markup=False, highlight=False, soft_wrap=True)

    def _write(self) -> None:
        self.console.file.write(self.waiting[self.at])
        self.console.file.flush()
        self.waiting[self.at] = ""

    def add(self, chunk: StreamChunk) -> None:
        self.chunks[chunk.index].append(chunk)
        self.waiting[chunk.index] += chunk.text or ""
        self.ended[chunk.index] = chunk.finish_reason is not None
        if self.stream and chunk.index == self.at:
            self._write()
        while self.at < len(self.prompts) and self.ended[self.at]:
            self._write()
            self.console.file.write("\n" if self.at + 1 == len(self.prompts) else "\n\n")
            self.at += 1
            self.begin()
            if self.stream and self.at < len(self.prompts):
                self._write()


def figures(engine: Engine, timing: Timing, prompt_tokens: Sequence[int], read_gbs: float | None) -> list[str]:
    """The lines printed below the text."""
    prompts = len(timing.tokens)
    head = f"{counted(timing.count, 'token')} of {counted(prompts, 'prompt')}"
    if runtime.MODE is not runtime.Mode.GPU:
        return [f"{head} in {timing.last:.1f} s, in Triton's interpreter, on the CPU: no measurement"]
    if timing.first is not None:
        head += f"; {1e3 * timing.first:.1f} ms to the first, of a prompt of {max(prompt_tokens)}"
    lines = [head]
    seconds, rate = timing.step_seconds, timing.decoded_per_second
    if seconds is None or rate is None:
        return [*lines, "one token of each: nothing was decoded after the prompt"]
    if engine.speculate is not None:  # a step gives one token or several
        return [*lines, f"{rate:.1f} tokens/s"]
    # Each sequence at half of its final length, until it ends.
    counts = [timing.tokens[i] for i in range(prompts)]
    alive = [int((n + new / 2) * new / max(counts)) for n, new in zip(prompt_tokens, counts, strict=True)]
    nbytes = step_bytes(engine.runner.decoder.config, engine.weights, alive, engine.runner.cache.k.dtype)
    gbs = nbytes / seconds / 1e9
    lines.append(f"{rate:.1f} tokens/s, {1e3 * seconds:.3f} ms a step")
    share = f"{gbs:.3g} GB/s: a step reads {nbytes / 1e9:.3g} GB"
    if read_gbs is not None:
        share += f"; {gbs / read_gbs:.1%} of the {read_gbs:.0f} GB/s that this GPU reads"
    return [*lines, share]


def logprobs(tokenizer: Tokenizer, chunks: Sequence[Sequence[StreamChunk]]) -> list[str]:
    """Each token of each prompt: its log-probability, its id, its own text."""
    lines = []
    for i, of_one in enumerate(chunks):
        lines.append(f"log-probabilities after prompt {i + 1} of {len(chunks)}")
        lines += [f"{p.logprob:10.4f} {p.token:7d} {tokenizer.decode([p.token])!r}" for p in of_one]
    return lines


def _room(engine: Engine, prompt_tokens: Sequence[int], notices: Console) -> int:
    """`NEW_TOKENS`, or as many as fit after the longest prompt, with a notice."""
    longest, most = max(prompt_tokens), engine.max_seq_len
    room = most - longest
    if 0 < room < NEW_TOKENS:
        notices.print(
            f"At most {counted(room, 'new token')} instead of {NEW_TOKENS}: a prompt has "
            f"{counted(longest, 'token')}, and a sequence has {most} at most (--max-seq-len).",
            style="yellow", highlight=False, soft_wrap=True,
        )  # fmt: skip
    return max(1, min(room, NEW_TOKENS))  # where there is no room, the engine says so


def generated(engine: Engine, settings: Settings, new_tokens: int, printer: Printer) -> Timing:
    """Generate, and print the text as it comes."""
    timing = Timing()
    chunks: Iterable[StreamChunk] = engine.generate(
        list(settings.prompts),
        max_new_tokens=new_tokens,
        stop=list(settings.stop),
        stream=True,
        **settings.sampling,
    )
    printer.begin()  # the options are valid, or an error had been raised
    for chunk in chunks:
        timing.add(chunk.index)
        printer.add(chunk)
    return timing


def run(settings: Settings, console: Console, notices: Console) -> int:
    """Load a model, print its text to one console and the times to the other. Returns 0.

    Raises:
        FileNotFoundError, ValueError, TypeError: as `Engine.from_pretrained` and `Engine.generate`.
    """
    from rooftile.engine import processes
    from rooftile.engine.config import ModelConfig
    from rooftile.engine.engine import Engine
    from rooftile.engine.hub import folder_of
    from rooftile.engine.leading import leading

    folder = folder_of(settings.path)
    positions = ModelConfig.from_hf(folder).max_positions
    if not (folder / "tokenizer.json").is_file():  # before the weights are read
        raise ValueError(f"generate: {folder} has no tokenizer.json, and the prompts are text")
    # A token is of a byte or more, but for those that a tokenizer puts around a text.
    longest = max(len(p.encode()) for p in settings.prompts) + 8 + (settings.max_new_tokens or NEW_TOKENS)
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "quantize": settings.quantize,
        "max_batch": len(settings.prompts),
        "max_seq_len": settings.max_seq_len or min(longest, positions),
        "kv_dtype": settings.kv_dtype,
        "speculate": settings.speculate,
        "deterministic": settings.deterministic,
    }
    n = settings.tensor_parallel
    with processes.started(n, folder, options):
        engine = Engine.from_pretrained(folder, **options, tensor_parallel=n, progress=console.is_terminal)
        with leading(engine):
            return _run(engine, settings, console, notices)


def _run(engine: Engine, settings: Settings, console: Console, notices: Console) -> int:
    assert engine.tokenizer is not None, "the folder has one"
    prompt_tokens = [len(engine.tokenizer.encode(p).ids) for p in settings.prompts]
    new_tokens = settings.max_new_tokens or _room(engine, prompt_tokens, notices)
    if runtime.MODE is runtime.Mode.GPU:
        for _ in range(2):  # kernels are compiled and the step is recorded; prompts are, the second time
            generated(engine, settings, min(3, new_tokens), Printer(settings.prompts, False, Console(quiet=True)))
    printer = Printer(settings.prompts, settings.stream, console)
    timing = generated(engine, settings, new_tokens, printer)
    read_gbs = None
    if runtime.MODE is runtime.Mode.GPU and timing.steps:
        from rooftile.bench.roof import measure_roofs
        from rooftile.bench.timer import clock

        device = runtime.default_device()
        read_gbs = measure_roofs(clock(device), device).read_gbs
    notices.print()
    lines = figures(engine, timing, prompt_tokens, read_gbs)
    if settings.sampling.get("logprobs"):
        lines = [*logprobs(engine.tokenizer, printer.chunks), *lines]
    for line in lines:
        notices.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    return 0
