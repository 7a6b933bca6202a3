"""Ops launch on the device and on the current stream of their inputs, whatever the current device is."""

import contextlib

import pytest
import torch
from helpers import BF16, CASES, DIFFERENTIABLE, backward, draw, forward, output_grads_for

from rooftile import launching, library, runtime

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SLEEP = 50_000_000  # cycles: 25 ms, longer than a launch takes anywhere


def assert_alike(results, expected):
    """Bit-identical, or as close as two orders of a sum are for ops that add atomically."""
    results, expected = (x if isinstance(x, (tuple, list)) else (x,) for x in (results, expected))
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            found, given = (t.cpu().float() if t.is_floating_point() else t.cpu() for t in (result, wanted))
            torch.testing.assert_close(found, given, rtol=1e-2, atol=1e-2, equal_nan=True)


def late(inputs):
    """Memory that becomes these inputs on the current stream, but not soon: whoever reads it at once reads zeros."""
    torch.cuda.synchronize()
    given = {name: torch.zeros_like(t) for name, t in inputs.items()}
    torch.cuda.synchronize()
    return given


@pytest.mark.gpu
@every_case
def test_an_op_runs_behind_what_its_stream_holds(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    expected = forward(case, point, {n: t.clone() for n, t in inputs.items()})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward(case, point, {n: t.clone() for n, t in inputs.items()})  # what is compiled, is compiled here
        given = late(inputs)
        torch.cuda._sleep(SLEEP)
        for name, t in inputs.items():
            given[name].copy_(t)
        results = forward(case, point, given)
    torch.cuda.synchronize()
    assert_alike(results, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_a_backward_runs_behind_what_its_stream_holds(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    output_grads = output_grads_for(forward(case, point, {n: t.clone() for n, t in inputs.items()}))
    expected = backward(case, point, {n: t.clone() for n, t in inputs.items()}, output_grads)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        backward(case, point, {n: t.clone() for n, t in inputs.items()}, output_grads)
        given = late(inputs)
        torch.cuda._sleep(SLEEP)
        for name, t in inputs.items():
            given[name].copy_(t)
        results = backward(case, point, given, output_grads)
    torch.cuda.synchronize()
    assert_alike(results, expected)


@pytest.mark.gpu
@two_gpus
@every_case
def test_an_op_runs_on_the_device_of_its_inputs(case):
    """Twice: through Triton's launcher, and through the kernel that it compiled."""
    other = torch.device("cuda", 1)
    point = case.sets["tiny"][0]
    with torch.cuda.device(0):
        inputs = draw(case, point, BF16, other)
        for _ in range(2):
            given = {n: t.clone() for n, t in inputs.items()}
            results = forward(case, point, given)
            results = results if isinstance(results, (tuple, list)) else (results,)
            assert all(t.device == other for t in results if isinstance(t, torch.Tensor))
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        expected = forward(case, point, {n: t.clone() for n, t in inputs.items()})
    torch.cuda.synchronize(other)
    assert_alike(results, expected)


class OnTheOther:
    """What the guard looks at of a tensor."""

    device = torch.device("cuda", 1)


def test_a_launch_has_its_inputs_device_as_the_current_one(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def on(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(launching, "_current_device", lambda: current[-1])
    monkeypatch.setattr(launching, "_on_device", on)
    guarded = library._guarded(
        torch.ops.rooftile.softmax.default, lambda args: "softmax", (0,), lambda *args: list(current)
    )
    assert guarded(OnTheOther()) == [0, 1]
    assert current == [0]
    current[:] = [1]
    assert guarded(OnTheOther()) == [1], "no guard where the device is the current one"
