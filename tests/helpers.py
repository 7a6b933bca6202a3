"""What tests of several ops share: inputs laid out in memory in awkward ways, and a record of the ops called."""

import dataclasses
import itertools
import os
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile import runtime
from rooftile.cases import all_cases
from rooftile.cases.check import generator, normal, run_backward, run_forward

CASES = list(all_cases().values())
DIFFERENTIABLE = [case for case in CASES if case.grads]
TINY = [(case, point) for case in CASES for point in case.sets["tiny"]]
TINY_IDS = [f"{case.name} {point}" for case, point in TINY]
BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(
    runtime.MODE is not runtime.Mode.INTERPRETER,
    reason="records launches as Triton's interpreter gets them; on a GPU the same code makes them",
)


def nightly_but(kept, values):
    """Parameters of which `make test` runs those kept, and `make test-all` all. A case is named by its name."""
    return [
        pytest.param(value, marks=() if getattr(value, "name", value) in kept else pytest.mark.nightly)
        for value in values
    ]


def in_pairs(*axes):
    """The product of three axes. `make test` runs a part with each pair of values of two axes, `make test-all` all."""
    least = min(map(len, axes))
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, indices, strict=True)),
            marks=() if sum(indices) % least == 0 else pytest.mark.nightly,
        )
        for indices in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def on_two_ranks(function, *arguments):
    """`function(rank, *arguments)` in two processes."""
    # Forks have imported what they need, but can't use a GPU, nor OpenMP's threads.
    forks = os.environ.get("OMP_NUM_THREADS") == "1" and not torch.accelerator.is_available()
    torch.multiprocessing.start_processes(function, arguments, 2, start_method="fork" if forks else "spawn")


def draw(case, point, dtype, device, seed=0):
    return case.inputs(point, dtype, device, generator(device, seed))


def grads_of(case, inputs):
    return tuple(n for n in case.grads if n in inputs)


def forward(case, point, inputs):
    return run_forward(case.function, inputs, point, case.mutates)


def backward(case, point, inputs, output_grads, grads=None):
    """The gradients; of an op that has none the forward is run all the same."""
    if not case.grads:
        forward(case, point, inputs)
        return ()
    grads = grads_of(case, inputs) if grads is None else grads
    return run_backward(case.function, inputs, point, grads, output_grads, case.mutates)


def output_grads_for(outputs, seed=1):
    """Standard normal gradients of those outputs; for an integer one, which has none, in float32."""
    numbers = generator(outputs[0].device, seed)
    dtypes = (y.dtype if y.is_floating_point() else torch.float32 for y in outputs)
    return tuple(normal(tuple(y.shape), d, y.device, numbers) for y, d in zip(outputs, dtypes, strict=True))


def with_length(point, length):
    """The point with another number of rows, or tokens."""
    name = next(n for n in ("rows", "seq_len") if n in point.dims)
    return dataclasses.replace(point, dims={**point.dims, name: length})


def offset(x):
    """x as a view inside a larger buffer of NaN, away from its start, so that rows are not next to each other."""
    buffer = torch.full([n + 3 for n in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    view = buffer[tuple(slice(2, 2 + n) for n in x.shape)]
    view.copy_(x)
    return view


def transposed(x):
    """x with a last stride other than 1; a scalar as it is."""
    if x.dim() == 0:
        return x
    if x.dim() == 1:
        return torch.stack((x, torch.full_like(x, torch.nan)), dim=1)[:, 0]
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def relaid(inputs, how):
    return {n: how(t) if t.is_floating_point() else t for n, t in inputs.items()}


def assert_same(actual, expected):
    """Bit-identical; on a GPU to a unit in the last place, where another layout may reduce in another order."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        if runtime.MODE is runtime.Mode.INTERPRETER or (e.dtype.itemsize > 1 and not e.dtype.is_floating_point):
            assert torch.equal(a, e)
        elif e.dtype.itemsize == 1:  # quantised: the neighbouring number
            step = torch.finfo(e.dtype).eps if e.dtype.is_floating_point else 0.0
            torch.testing.assert_close(a.float(), e.float(), rtol=step, atol=0.0 if step else 1.0)
        else:
            # Of a sum that cancels, an eighth of a unit of what is added: parts of it are rounded before.
            size = e.float().square().mean().sqrt().item() if e.numel() else 0.0
            eps = torch.finfo(e.dtype).eps
            torch.testing.assert_close(a, e, rtol=2 * eps, atol=max(1e-6, eps / 8 * size))


class Calls(TorchDispatchMode):
    """Records the calls of Rooftile's ops: (op, arguments, results)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tuple(a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args)
        results = func(*args, **(kwargs or {}))
        if func.namespace == "rooftile":
            self.calls.append((func, given, results))
        return results


@contextmanager
def padded_allocations(monkeypatch, pad=64, poison=False):
    """Every `torch.empty` and `torch.empty_strided` meanwhile is a view inside a larger buffer of sentinels.

    Yields a list of (buffer, numel). poison: what lies between the sentinels is NaN, or the greatest integer.
    """
    made = []
    stock = torch.empty

    def empty(*size, dtype=None, device=None, **options):
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        numel = int(torch.Size(shape).numel())
        buffer = torch.full((numel + 2 * pad,), 7.0, dtype=dtype, device=device)
        made.append((buffer, numel))
        if poison:
            value = torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max
            buffer[pad : pad + numel].fill_(value)
        return buffer[pad : pad + numel].view(shape)

    def empty_strided(shape, strides, **options):
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
        return empty(span, **options).as_strided(shape, strides, pad)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_strided", empty_strided)
        yield made
    assert torch.empty is stock
