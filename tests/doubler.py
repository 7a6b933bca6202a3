"""A toy op with configurations to tune: right, wrong in every way, fast and slow by a clock's table."""

import dataclasses
from typing import NamedTuple

import torch
from toys import TableClock

US = 1e-6


class Doubling(NamedTuple):
    m: int
    n: int
    k: int
    dtype: torch.dtype


class Doubler:
    """y = 2x, in configurations that are named for what they do."""

    name, table, peer = "doubler", "doubler", "cuBLAS"

    def __init__(self, *configs):
        self.configs, self.ran = list(configs), []

    def problem(self, m, n, k, dtype, precision):
        return Doubling(m, n, k, dtype)

    def problem_in(self, product, m, dtype, precision):
        return Doubling(m, product.n, product.k, dtype)

    def key(self, p):
        return f"m{p.m} n{p.n} k{p.k}"

    def describe(self, p):
        return {"m": p.m, "n": p.n, "k": p.k, "dtype": "fp32", "layout": "nt", "gated": False}

    def nbytes(self, p):
        return 8 * p.m * p.n

    def default(self, p, target):
        return "default"

    def space(self, p, target, exhaustive):
        return list(self.configs)

    def binary(self, p, config):
        return config

    def fields(self, config):
        return {"kernel": config}

    def draw(self, p, device, numbers):
        return {"x": torch.randn(p.m, p.n, generator=numbers)}

    def call(self, p, inputs, config):
        self.ran.append(config)
        y = inputs["x"] * 2
        if config == "nan":
            y[0, 0] = torch.nan
        elif config == "far off":
            y[0, 0] += 0.1
        elif config == "a little off everywhere":
            y *= 1.003
        elif config == "flaky":
            y[0, 0] *= 1 + 1e-6 * len(self.ran)
        elif config == "unwritten":
            y = torch.empty_like(y)
        elif config == "another shape":
            y = y[:1]
        elif config == "raises":
            raise RuntimeError("out of resources\nand more")
        return y

    def reference(self, p, inputs):
        return inputs["x"].float() * 2

    def call_peer(self, p, inputs):
        return inputs["x"] * 2

    def limit(self, p):
        return 1e-3


WRONG = ("nan", "far off", "a little off everywhere", "flaky", "unwritten", "another shape", "raises")


class ConfigClock(TableClock):
    """Gives each configuration the time in a table, and any other 10 us; the peer 5."""

    def block(self, calls):
        call = calls[0]
        seconds = self.seconds.get(call.args[2], 10 * US) if len(call.args) == 3 else 5 * US
        call()
        return Block(len(calls), seconds)


@dataclasses.dataclass
class Block:
    calls: int
    seconds: float
    method: str = "table"

    def enqueue(self):
        return lambda: self.seconds


PROBLEM = Doubling(64, 64, 4, torch.float32)
