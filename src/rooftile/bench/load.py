"""`rooftile bench serve`: requests that come while others run, and how long each waits for its tokens.

In an open loop, requests arrive by a Poisson process of a given rate, whether earlier ones have ended or not, as users
do. In a closed loop, a number of clients send one request after another. The same requests go to an engine in this
process (`rooftile.AsyncEngine`), or to any server with OpenAI's API, ours or another.

Prompts are random token ids. Their lengths, and how many tokens each asks for, are drawn from log-normal
distributions, as those of conversations are: many are short, and a few are long. Every answer has as many tokens as
were asked for; one that has not counts as failed.

With `--http`, this project's server answers the same requests first, from processes of its own over loopback. With
`--peers vllm`, vLLM's engine does so before both (`rooftile.bench.vllm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from rooftile import runtime
from rooftile.bench import events, load_charts, report
from rooftile.bench.info import check_results, machine, may_join
from rooftile.bench.rows import gpu_slug, percentile, write_whole

SPREAD = 0.9  # the standard deviation of a length's logarithm
TAIL = 6  # times the mean, and no length is longer
WARM = 4  # requests at once before an open loop; before a closed one there are as many as clients
TIMEOUT_S = 600.0  # without a token
PEERS = ("vllm",)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens it asks for."""

    prompt: list[int]
    new: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """The requests of a run.

    Args:
        requests: how many.
        prompt, new: the mean tokens of prompts, and of answers.
        fixed: all have the mean.
        longest: the most tokens of a prompt and its answer together.
        vocab: token ids are drawn below it.
        seed: the same seed gives the same requests and arrivals.
        prefix: tokens that all prompts begin with, besides their own.
        per_client: requests of each client of a closed loop, instead of `requests` in all.
    """

    requests: int
    prompt: int
    new: int
    fixed: bool
    longest: int
    vocab: int
    seed: int
    prefix: int = 0
    per_client: int | None = None

    def __post_init__(self) -> None:
        if self.prefix > self.longest - 3:
            raise ValueError(f"a prefix of {self.prefix} tokens leaves no room in {self.longest} for a prompt and two")
        if self.fixed and self.prefix + self.prompt + self.new > self.longest:
            raise ValueError(
                f"prompts of {self.prefix + self.prompt} and answers of {self.new} tokens have no room in "
                f"{self.longest}, the most of a sequence"
            )

    def draw(self, load: str = "") -> list[Request]:
        """Of each load others: the prefix cache of one finds no prompts of another."""
        numbers = random.Random(f"{self.seed} prefix")
        prefix = [numbers.randrange(self.vocab) for _ in range(self.prefix)]
        numbers = random.Random(f"{self.seed} {load}")
        return [self._one(numbers, prefix) for _ in range(self.requests)]

    def of_clients(self, clients: int) -> Workload:
        """What so many clients are asked."""
        return self if self.per_client is None else dataclasses.replace(self, requests=self.per_client * clients)

    def _one(self, numbers: random.Random, prefix: list[int]) -> Request:
        prompt, new = (self._length(numbers, mean) for mean in (self.prompt, self.new))
        prompt = max(1, min(prompt, self.longest - 2 - self.prefix))
        ids = [*prefix, *(numbers.randrange(self.vocab) for _ in range(prompt))]
        return Request(ids, max(2, min(new, self.longest - len(ids))))

    def _length(self, numbers: random.Random, mean: int) -> int:
        if self.fixed:
            return mean
        drawn = numbers.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD)
        return max(2, min(round(drawn), TAIL * mean))

    def arrivals(self, rate: float) -> list[float]:
        """Seconds from the start at which requests arrive, `rate` a second on average."""
        numbers = random.Random(self.seed + 1)
        return list(itertools.accumulate(numbers.expovariate(rate) for _ in range(self.requests)))


class Target(Protocol):
    """Where requests go."""

    def tokens(self, request: Request) -> AsyncIterator[int]:
        """How many tokens have come, each time that some do."""
        ...

    def counts(self) -> tuple[int, float] | None:
        """The steps so far, and their seconds on the host; None where nobody says."""
        ...


class InProcess:
    """An engine in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def tokens(self, request: Request) -> AsyncIterator[int]:
        stream = self.engine.add(request.prompt, max_new_tokens=request.new, ignore_eos=True)
        async for _ in stream:
            yield 1

    def counts(self) -> tuple[int, float]:
        stats = self.engine.stats()
        return stats.steps, stats.host_seconds


class Server:
    """A server with OpenAI's API, asked for completions of token ids."""

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self.url, self.model, self.headers = url, model, headers

    async def tokens(self, request: Request) -> AsyncIterator[int]:
        body = {
            "model": self.model, "prompt": request.prompt, "max_tokens": request.new, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        seen = 0
        answer = events.post(f"{self.url}/v1/completions", body, self.headers, TIMEOUT_S)
        async with contextlib.aclosing(answer):
            async for some in answer:
                for event in some:
                    if tokens := self._tokens(event, seen):
                        seen += tokens
                        yield tokens

    @staticmethod
    def _tokens(event: bytes, seen: int) -> int:
        """How many tokens an event brings, after so many."""
        # To parse each event would take longer than all else. Inside of a text quotes are escaped, so these are keys.
        if b'"choices":[{' in event and b'"error"' not in event:
            return 1
        if event == b"[DONE]":
            return 0
        parsed = json.loads(event)
        if "error" in parsed:
            raise RuntimeError(str(parsed["error"]))
        if parsed.get("choices"):
            return 1
        usage = parsed.get("usage")
        return max(0, usage["completion_tokens"] - seen) if usage else 0  # of events that had several tokens

    def counts(self) -> None:
        return None


@dataclasses.dataclass
class Answer:
    """When the tokens of a request came, by the clock of this process."""

    request: Request
    arrived: float
    times: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.arrived

    @property
    def each(self) -> float:
        """Seconds a token, after the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]

    def end(self) -> None:
        """An answer of another length than was asked for has failed."""
        if self.tokens != self.request.new:
            self.error = f"{self.tokens} tokens, expected {self.request.new}"


async def _ask(target: Target, request: Request, arrived: float, answers: list[Answer]) -> None:
    answer = Answer(request, arrived)
    answers.append(answer)
    try:
        async for tokens in target.tokens(request):
            answer.times.append(time.perf_counter())
            answer.tokens += tokens
    except Exception as error:
        answer.error = f"{type(error).__name__}: {error}"
    else:
        answer.end()


async def open_loop(target: Target, requests: Sequence[Request], arrivals: Sequence[float]) -> list[Answer]:
    """Send each request at its time."""
    answers: list[Answer] = []
    start, tasks = time.perf_counter(), []
    for request, at in zip(requests, arrivals, strict=True):
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(target, request, start + at, answers)))
    await asyncio.gather(*tasks)
    return answers


async def closed_loop(target: Target, requests: Sequence[Request], clients: int) -> list[Answer]:
    """Send requests by so many clients, each as soon as its last one has ended."""
    answers: list[Answer] = []
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await _ask(target, request, time.perf_counter(), answers)

    await asyncio.gather(*(client() for _ in range(min(clients, len(requests)))))
    return answers


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds within which an answer is good: to its first token, and for each further one on average."""

    first: float
    each: float


def row_of(impl: str, load: Mapping[str, Any], answers: Sequence[Answer], limits: Limits) -> dict[str, Any]:
    """The figures of one load: seconds, and tokens and requests a second from the first arrival to the last token."""
    good = [a for a in answers if not a.error]
    failed = [a.error for a in answers if a.error]
    row = {
        "impl": impl,
        **load,
        "requests": len(answers),
        "failed": len(failed),
        "message": failed[0] if failed else "",
    }
    if not good:
        return row
    seconds = max(a.times[-1] for a in good) - min(a.arrived for a in answers)
    within = sum(a.first <= limits.first and a.each <= limits.each for a in good)
    gaps = [gap for a in good for gap in a.gaps]
    row |= {
        "seconds": seconds,
        "prompt_tokens": sum(len(a.request.prompt) for a in good),
        "output_tokens": sum(a.tokens for a in good),
        "tokens_per_s": sum(a.tokens for a in good) / seconds,
        "requests_per_s": len(good) / seconds,
        "good_per_s": within / seconds,
        "longest_gap": max(gaps, default=0.0),
    }
    for name, values in (("first", [a.first for a in good]), ("each", [a.each for a in good]), ("gap", gaps or [0.0])):
        row |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
    return row


COLUMNS = (
    "load", "implementation", "requests>", "failed>", "tokens/s>", "requests/s>", "good/s>", "first token, ms: p50>",
    "p99>", "a token, ms: p50>", "p99>", "longest gap, ms>",
)  # fmt: skip


def load_name(row: Mapping[str, Any]) -> str:
    if row.get("rate"):
        return f"{row['rate']:g} requests/s"
    return f"{row['clients']} client{'s' * (row['clients'] != 1)}"


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row under `COLUMNS`."""
    head = [load_name(row), row["impl"], str(row["requests"]), str(row["failed"])]
    if "seconds" not in row:
        head += [row["status"]] if "status" in row else []
        return head + ["–"] * (len(COLUMNS) - len(head))
    rates = [report.number(row[name], 4) for name in ("tokens_per_s", "requests_per_s", "good_per_s")]
    names = ("first_p50", "first_p99", "each_p50", "each_p99", "longest_gap")
    return head + rates + [report.number(1e3 * row[name]) for name in names]


def show(console: Console, rows: Sequence[Mapping[str, Any]], limits: Limits, measures: bool) -> None:
    table = Table(
        title="serving" + ("" if measures else f" ({report.NO_MEASUREMENT})"),
        title_justify="left",
        caption=f"good/s: requests a second whose first token came within {limits.first:g} s, and the others within "
        f"{limits.each:g} s each on average.",
        caption_justify="left",
    )
    for name in COLUMNS:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left")
    for row in rows:
        table.add_row(*cells(row), style="red" if row["failed"] else "")
    out = console if console.is_terminal else Console(file=console.file, width=report.WIDTH)
    out.print(report.without_dashes(table))
    for row in rows:
        if "host_us" in row:
            out.print(f"{load_name(row)}, {row['impl']}: {report.number(row['host_us'])} us a step on the host")
        if "of_offline" in row:
            out.print(f"{load_name(row)}, {row['impl']}: {report.ratio(row['of_offline'])} of the engine's tokens/s")
        if "ratio_to_best_peer" in row:
            ratio = report.ratio(row["ratio_to_best_peer"])
            out.print(f"{load_name(row)}, {row['impl']}: {ratio} of the best baseline's tokens/s")
        if row["message"]:
            text = f"{load_name(row)}, {row['impl']}: {row['message']}"
            out.print(text, markup=False, highlight=False, soft_wrap=True)


def write(path: Path, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Write the rows, and those that the file has of this machine, commit and workload; all that it has then.

    A row of a baseline that is absent replaces none.
    """

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["impl"], row.get("rate"), row.get("clients")

    every = {key(row): row for row in rows}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if may_join(meta, before["meta"], ("workload", "limits")):
            found = {key(row): row for row in before["rows"]}
            every = found | {k: row for k, row in every.items() if k not in found or "status" not in row}
    ordered = sorted(every.values(), key=lambda row: (row.get("rate") or 0, row.get("clients") or 0, row["impl"]))
    lines = ",\n".join(json.dumps(row) for row in ordered)
    write_whole(path, f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')
    return ordered


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line asks for.

    Args:
        model: a name of `workloads.MODELS`, or with a URL the name that the server has for it; "" is its first.
        weights: "random", or a checkpoint's folder.
        url: of a server; without one, an engine in this process.
        http: measure this project's server, in a process of its own, before that engine.
        peers: of `PEERS`, those to measure before both.
        impl: what the rows call it.
        rates, clients: open loops of so many requests a second, and closed loops of so many clients.
        engine: options of `AsyncEngine.from_config`.
        tensor_parallel: the numbers of GPUs of the engines, each measured in turn.
    """

    model: str
    weights: str
    url: str | None
    key: str | None
    impl: str
    rates: Sequence[float]
    clients: Sequence[int]
    workload: Workload
    limits: Limits
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensor_parallel: Sequence[int] = (1,)
    http: bool = False
    peers: Sequence[str] = ()
    json: Path | None = None
    results: Path | None = None

    @property
    def file(self) -> str:
        """The name of the results: those of other lengths have another, and those of several GPUs."""
        w, gpus = self.workload, max(self.tensor_parallel)
        lengths = f"-p{w.prompt}-n{w.new}" if w.fixed else ""
        prefix = f"-prefix{w.prefix}" if w.prefix else ""
        return f"{self.model or 'server'}{lengths}{prefix}{f'-tp{gpus}' if gpus > 1 else ''}.json"

    def on(self, gpus: int) -> Settings:
        """Of an engine of so many GPUs alone; its rows have a name of their own."""
        return dataclasses.replace(
            self, tensor_parallel=(gpus,), impl=self.impl if gpus == 1 else f"{self.impl}_tp{gpus}"
        )


Done = Callable[[dict[str, Any]], None]  # takes a row as soon as its load has ended


@dataclasses.dataclass(frozen=True)
class Load:
    """A load of a run.

    Args:
        named: its rate or its clients, as rows have them.
        warm_up: requests that come before it, all at once, and do not count.
        requests: those that count.
        arrivals: the seconds at which they arrive, of an open loop.
    """

    named: dict[str, Any]
    warm_up: list[Request]
    requests: list[Request]
    arrivals: list[float] | None


def loads(settings: Settings) -> Iterator[Load]:
    """Those that the settings ask for, one after another."""
    work = settings.workload
    unlike = dataclasses.replace(work, prefix=0, seed=work.seed + 3)
    every: list[dict[str, Any]] = [{"rate": rate} for rate in settings.rates]
    every += [{"clients": clients} for clients in settings.clients]
    for named in every:
        name = load_name(named)
        # So many at once, because kernels are compiled and graphs are captured for each size of a batch.
        warm_up = dataclasses.replace(unlike, requests=named.get("clients", WARM)).draw(name)
        if "rate" in named:
            yield Load(named, warm_up, work.draw(name), work.arrivals(named["rate"]))
        else:
            yield Load(named, warm_up, work.of_clients(named["clients"]).draw(name), None)


async def measure(target: Target, settings: Settings, console: Console, done: Done) -> None:
    """A row for each load, one after another."""
    for load in loads(settings):
        await closed_loop(target, load.warm_up, len(load.warm_up))
        before = target.counts()
        if load.arrivals is None:
            answers = await closed_loop(target, load.requests, load.named["clients"])
        else:
            answers = await open_loop(target, load.requests, load.arrivals)
        row = row_of(settings.impl, load.named, answers, settings.limits)
        after = target.counts()
        if before is not None and after is not None and after[0] > before[0]:
            steps = after[0] - before[0]
            row |= {"steps": steps, "host_us": 1e6 * (after[1] - before[1]) / steps}
        console.print(f"{load_name(row)}: {len(answers)} requests, {row['failed']} failed", highlight=False)
        done(row)


async def _of_server(settings: Settings, console: Console, done: Done) -> None:
    assert settings.url is not None
    url = settings.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {settings.key}"} if settings.key else {}
    model = settings.model
    if not model:
        try:
            asked = urllib.request.Request(f"{url}/v1/models", headers=headers)
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
                model = json.load(answer)["data"][0]["id"]
        except OSError as error:
            raise OSError(f"{url}/v1/models: {error}") from None
    await measure(Server(url, model, headers), settings, console, done)


def _age() -> float | None:
    """Seconds since this process was started, where /proc tells."""
    try:
        began = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _engine(settings: Settings) -> Iterator[Any]:
    """An `AsyncEngine`, and the ranks beside it."""
    from rooftile import AsyncEngine
    from rooftile.bench.workloads import MODELS, RANDOM
    from rooftile.engine import processes

    ours = {k: v for k, v in settings.engine.items() if k in ("step_tokens", "prefix_cache", "warm_up")}
    options = {k: v for k, v in settings.engine.items() if k not in ours}
    (n,) = settings.tensor_parallel
    model = MODELS[settings.model] if settings.weights == RANDOM else Path(settings.weights)
    with processes.started(n, model, options):
        options |= {"tensor_parallel": n, **ours}
        if isinstance(model, Path):
            made = AsyncEngine.from_pretrained(model, **options)
        else:
            made = AsyncEngine.from_config(model, **options)
        with made as engine:
            yield engine


def _of_engine(settings: Settings, console: Console, done: Done, first: bool) -> None:
    """The rows of an engine here. `first`: nothing was measured before it, so the process's age is its start."""
    from rooftile.bench.workloads import RANDOM

    since = time.perf_counter()
    with _engine(settings) as engine:
        seconds = time.perf_counter() - since
        engine.add([1], max_new_tokens=1, ignore_eos=True).result()
        start: dict[str, Any] = {"load_s": seconds}
        if first:
            start["start_to_first_token_s"] = _age()
        if settings.weights != RANDOM:
            start["load_gbs"] = engine.engine.weights.nbytes / seconds / 1e9
        asyncio.run(measure(InProcess(engine), settings, console, lambda row: done(row | start)))


def _tokenizer(vocab: int) -> Any:
    """Of a model without one: each id is a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))


def _answer(settings: Settings, pipe: Any) -> None:
    """In the process of the server's engine: says where the server listens, and ends when it is told to."""
    from rooftile.serve.app import Options
    from rooftile.serve.front import Front
    from rooftile.serve.server import listen

    with _engine(settings) as engine:
        if engine.engine.tokenizer is None:
            engine.engine.tokenizer = _tokenizer(engine.engine.config.vocab)
        options = Options(names=(settings.model,))
        with Front(listen("127.0.0.1", 0), options, engine.engine.tokenizer.to_str()) as front:
            front.begin(engine)
            pipe.send(front.url)
            with contextlib.suppress(EOFError):  # the other end has gone
                pipe.recv()


def _of_own_server(settings: Settings, console: Console, done: Done) -> None:
    context = multiprocessing.get_context("spawn")  # a process that has used a GPU can't be forked
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(dataclasses.replace(settings, json=None, results=None), theirs))
    process.start()
    theirs.close()
    try:
        url = ours.recv()
        of_url = dataclasses.replace(settings, url=url, impl=f"{settings.impl} http")
        asyncio.run(_of_server(of_url, console, done))
    except EOFError:
        raise OSError("the server's process has failed") from None
    finally:
        ours.close()
        process.join()


def compare(rows: Sequence[dict[str, Any]], impl: str, peers: Sequence[str] = ()) -> None:
    """Write into our rows their tokens/s over the fastest baseline's, and into the server's those over the engine's."""
    speed = {(load_name(row), row["impl"]): row["tokens_per_s"] for row in rows if "seconds" in row}
    for row in rows:
        if row["impl"] in peers or "seconds" not in row:
            continue
        load = load_name(row)
        if row["impl"] != impl and (load, impl) in speed:
            row["of_offline"] = row["tokens_per_s"] / speed[load, impl]
        if beside := [speed[load, peer] for peer in peers if (load, peer) in speed]:
            row["ratio_to_best_peer"] = row["tokens_per_s"] / max(beside)


def _check(settings: Settings) -> None:
    """Raise ValueError for what does not go together."""
    if settings.http and settings.url:
        raise ValueError("--http starts a server of this project; --url names another one")
    if settings.http:  # now, not after the baselines
        from rooftile.serve import check_installed

        check_installed()
    if unknown := [name for name in settings.peers if name not in PEERS]:
        raise ValueError(f"unknown baseline {', '.join(unknown)}; known baselines: {', '.join(PEERS)}")
    if (settings.http or settings.peers) and len(settings.tensor_parallel) > 1:
        raise ValueError("--http and --peers take one --tensor-parallel")
    if settings.peers and settings.url:
        raise ValueError("--peers are measured beside an engine of this process; --url names a server")
    if settings.peers and settings.engine.get("quantize") is not None:
        raise ValueError(f"--peers have no --quantize {settings.engine['quantize']}; --weights PATH may be quantized")
    for name in ("speculate", "cascade", "deterministic", "kv_dtype"):
        if settings.peers and settings.engine.get(name):
            raise ValueError(f"--peers have no --{name.replace('_', '-')}; measure it without --peers")


def run(settings: Settings, console: Console) -> int:
    """Measure, show and write. Returns 1 if a request failed that was not a baseline's, else 0.

    Raises:
        ValueError: results are requested in the interpreter, a baseline is not known, or options exclude each other.
        ImportError: the server's packages are missing.
        OSError: the server cannot be reached, or has failed.
    """
    _check(settings)
    measures = runtime.MODE is runtime.Mode.GPU or settings.url is not None
    check_results(settings.results, measures)
    meta = {
        **machine(), "model": settings.model, "weights": settings.weights,
        "workload": dataclasses.asdict(settings.workload), "limits": dataclasses.asdict(settings.limits),
    }  # fmt: skip
    path = None
    if settings.results is not None:
        path = settings.results / gpu_slug(str(meta["gpu"])) / load_charts.FOLDER / settings.file
    rows: list[dict[str, Any]] = []

    def done(row: dict[str, Any]) -> None:
        """Write it now, before a failure at a later load loses it."""
        if not settings.url and row["impl"] not in settings.peers:
            row["engine"] = {name: str(value) for name, value in settings.engine.items()}
        rows.append(row)
        compare(rows, settings.impl, settings.peers)
        if settings.json is not None:
            write_whole(settings.json, json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
        if path is not None:
            write(path, meta, rows)

    if "vllm" in settings.peers:
        from rooftile.bench import vllm

        vllm.measure(settings, console, done)
    if settings.http:
        _of_own_server(settings, console, done)
    if settings.url:
        asyncio.run(_of_server(settings, console, done))
    else:
        first = not settings.http and not settings.peers
        for gpus in settings.tensor_parallel:
            _of_engine(settings.on(gpus), console, done, first)
            first = False
    show(console, rows, settings.limits, measures)
    if path is not None and (chart := load_charts.draw(path)) is not None:
        console.print(str(chart), highlight=False, soft_wrap=True)
    return int(any(row["failed"] for row in rows if row["impl"] not in settings.peers))
