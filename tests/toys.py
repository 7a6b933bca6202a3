"""A toy op and a clock that reads its times from a table, for tests of the benchmarks without a GPU."""

import contextlib
import dataclasses
import io

import torch
from rich.console import Console

from rooftile.bench import docs, run, streams
from rooftile.bench.roof import Roofs
from rooftile.bench.rows import Row
from rooftile.cases import OpCase, Peer, Point, Tolerance, Unsupported
from rooftile.cases.draw import normal

CPU = torch.device("cpu")
ROOFS = Roofs(copy_gbs=1000.0, read_gbs=1100.0, tflops=100.0)


def copy(source, target):
    target.copy_(source)


def copy_otherwise(source, target):
    target.copy_(source)


def double(x):
    return x * 2


def double_slowly(x):
    return x + x


def triple(x):
    return x * 3


def double_coarsely(x):
    """Over twice eager's error, which is none, and under the ceiling."""
    return x * 2 * (1 + 2**-7)


def explode(x):
    raise torch.OutOfMemoryError("tried to allocate more than there is")


def absent(point):
    raise ImportError("No module named 'quack'")


def unsupported(point):
    raise Unsupported("has no such shape")


SMALL, LARGE = Point("4x8", {"rows": 4, "cols": 8}), Point("8x8", {"rows": 8, "cols": 8})


def toy(function=double, *peers, name="double"):
    tolerance = Tolerance(1e-2, "exact but for what a peer may lose")
    return OpCase(
        name=name,
        formula="y = 2x",
        function=function,
        reference=double,
        eager=double_slowly,
        inputs=lambda p, dtype, device, numbers: {"x": normal((p["rows"], p["cols"]), dtype, device, numbers)},
        outputs=("y",),
        grads=("x",),
        nbytes=lambda p, itemsize, direction: 2 * itemsize * p["rows"] * p["cols"],
        flops=lambda p, direction: p["rows"] * p["cols"],
        tolerances={d: {"forward": tolerance, "backward": tolerance} for d in (torch.float32, torch.bfloat16)},
        sets={"tiny": (SMALL, LARGE), "llm": (LARGE, Point("0x8", {"rows": 0, "cols": 8}))},
        peers=tuple(Peer(n, f if f in (absent, unsupported) else lambda _, f=f: f) for n, f in peers),
    )


class TableClock:
    """Gives each implementation the time that stands in a table, and any other call, such as a copy, a microsecond."""

    measures = True
    l2 = 1 << 20

    def __init__(self, seconds):
        self.seconds = seconds

    @contextlib.contextmanager
    def active(self):
        yield

    def block(self, calls):
        assert all(c is not calls[0] for c in calls[1:]), "each call has inputs of its own"
        calls[0]()

        @dataclasses.dataclass
        class Block:
            calls: int
            seconds: float
            method: str = "table"

            def enqueue(self):
                return lambda: self.seconds

        return Block(len(calls), self.seconds.get(calls[0].func, 1e-6))

    def synchronize(self): ...

    def peak_bytes(self, call):
        call()
        return 4096

    def allocated_bytes(self):
        return 0

    def free_bytes(self):
        return 1 << 20

    def release(self): ...


def bench(monkeypatch, cases, clock, **settings):
    """The exit code, the rows and what was shown."""
    cases = {c.name: c for c in (cases if isinstance(cases, tuple) else (cases,))}
    monkeypatch.setattr(run, "find_cases", lambda names: [cases[n] for n in names or cases])
    monkeypatch.setattr(streams, "COPIES", {"torch": copy, "triton": copy_otherwise})  # no kernel needed
    monkeypatch.setattr(run, "measure_roofs", lambda clock, device: ROOFS)
    seen = []
    monkeypatch.setattr(run.report, "show", lambda console, rows, measured: seen.extend(rows))
    console = Console(file=io.StringIO(), width=200)
    code = run.run(run.Settings(**{"directions": ("forward",), "jobs": 0, **settings}), console, CPU, clock)
    return code, seen, console.file.getvalue()


def of(found, impl):
    (row,) = [r for r in found if r.impl == impl]
    return row


def measured(impl, us, **fields):
    place = {"op": "op", "direction": "forward", "shape": "4x8", "dtype": "bf16"}
    return Row(**{**place, "impl": impl, "us": us, "us_p20": us, "us_p80": us, **fields})


def table(name, folder):
    """A table of the documentation, as it is made from the results in that folder."""
    return docs.regenerate(f"<!-- rooftile:table {name} -->\n<!-- /rooftile:table -->\n", folder)


def cells_of(text, first):
    """The cells of a table's lines that begin so."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {first}")]
    return [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
