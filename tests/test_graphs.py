"""How a step is recorded: after a run aside, with the garbage collector off. The device is made up here."""

import contextlib
import gc

import pytest
import torch

from rooftile import graphs, launching


class Device:
    """Notes the order of what is asked of it."""

    def __init__(self, monkeypatch):
        self.log = []
        device = self

        class Stream:
            cuda_stream = 7

            def __init__(self, device=None, name="aside"):
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

        here = Stream(name="here")
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(stream.name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")

        def graph(graph, pool, stream, capture_error_mode):
            assert capture_error_mode == "thread_local"
            device.streams.append(stream)
            return within(f"{graph} in {pool}")

        self.streams = []
        monkeypatch.setattr(torch.cuda, "graph", graph)


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
        "here", "graph in pool", "step, collector off", "end of graph in pool", "end of here",
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
    assert made_up.log[-2:] == ["end of graph in None", "end of here"]
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with graphs.uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_graphs_that_are_replayed_in_turns_share_memory_and_counters(made_up, monkeypatch):
    seen = []
    counters = torch.zeros(4)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(launching, "allocate_counters", lambda device: counters)
    turns, others = graphs.SerialGraphs("device"), graphs.SerialGraphs("other device")
    for _ in range(2):
        turns.record(lambda: seen.append(launching._CAPTURES[0, 7]))
    others.record(lambda: None)
    assert [x is counters for x in seen] == [True, True]
    assert made_up.log.count("graph in pool") == 3
    assert not launching._CAPTURES
    assert made_up.streams[0] is made_up.streams[1], "one stream for all graphs of a pool"
    assert made_up.streams[2] is not made_up.streams[0]


def test_graphs_of_a_process_group_are_freed_before_it_ends(made_up, monkeypatch):
    freed = []

    class Graph:
        def reset(self):
            freed.append(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs, "_reset_at_exit", lambda: made_up.log.append("freed at exit"))
    alone, _ = graphs.record(lambda: None)
    assert "freed at exit" not in made_up.log
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    kept, _ = graphs.record(lambda: None)
    graphs.record(lambda: None)  # and dropped
    assert made_up.log.count("freed at exit") == 2
    graphs.reset_collective_graphs()
    assert freed == [kept]
    graphs.reset_collective_graphs()
    assert freed == [kept]
    assert alone is not kept
