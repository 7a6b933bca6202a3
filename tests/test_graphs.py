"""How a step is recorded: after a run aside, with the garbage collector off. The device is made up here."""

import contextlib
import gc

import pytest
import torch

from rooftile import graphs


class Device:
    """Notes the order of what is asked of it."""

    def __init__(self, monkeypatch):
        self.log = []
        device = self

        class Stream:
            def __init__(self, name="aside"):
                self.name = name

            def wait_stream(self, other):
                device.log.append(f"{self.name} waits for {other.name}")

        @contextlib.contextmanager
        def within(what, *args):
            device.log.append(what)
            try:
                yield
            finally:
                device.log.append(f"end of {what}")

        here = Stream("here")
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(stream.name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: within(f"{graph} in {pool}"))


@pytest.fixture
def made_up(monkeypatch):
    return Device(monkeypatch)


@pytest.mark.parametrize("warms", [False, True])
def test_a_step_is_run_aside_and_then_recorded_without_the_collector(made_up, warms):
    def step():
        made_up.log.append(f"step, collector {'on' if gc.isenabled() else 'off'}")
        return len(made_up.log)

    warm = (lambda: made_up.log.append("warm")) if warms else None
    assert graphs.record(step, warm=warm, pool="pool")[0] == "graph"
    assert made_up.log == [
        "aside waits for here",
        "aside", *(["warm"] if warms else ["step, collector on"] * 2), "end of aside",
        "here waits for aside",
        "graph in pool", "step, collector off", "end of graph in pool",
    ]  # fmt: skip
    assert gc.isenabled()


def test_what_the_recorded_step_returned_comes_back(made_up):
    results = iter("abc")
    assert graphs.record(lambda: next(results))[1] == "c"


def test_after_a_failure_the_stream_waits_and_the_collector_is_on(made_up):
    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.record(lambda: None, warm=fail)
    assert made_up.log[-1] == "here waits for aside"
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.record(fail, warm=lambda: None)
    assert made_up.log[-1] == "end of graph in None"
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with graphs.uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
