"""Counters that kernels share: whose they are, and that none is ever given back. The device is made up on the CPU."""

import itertools
import threading
import weakref

import pytest
import torch

import rooftile
from rooftile import launching, runtime

CPU = torch.device("cpu")


class Device:
    """What is allocated, and which stream is the current one of each thread."""

    def __init__(self):
        self.allocated = []
        self.streams = threading.local()
        self.capturing = False

    def zeros(self, n, device):
        block = torch.zeros(n, dtype=torch.int32)
        self.allocated.append(weakref.ref(block.untyped_storage()))
        return block

    def stream(self, device):
        return getattr(self.streams, "current", 1)

    def alive(self):
        return [ref() is not None for ref in self.allocated]


@pytest.fixture
def made_up(monkeypatch):
    device = Device()
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    monkeypatch.setattr(launching, "_zeros", device.zeros)
    monkeypatch.setattr(launching, "_stream", device.stream)
    monkeypatch.setattr(launching, "_ARENA", 64)
    for name in ("_ARENAS", "_EAGER", "_CAPTURES"):
        monkeypatch.setattr(launching, name, {})
    monkeypatch.setattr(launching, "_KEPT", [])
    return device


def span(counters):
    first = counters.data_ptr()
    return range(first, first + 4 * counters.numel())


def assert_apart(*some):
    taken = sorted((span(c) for c in some), key=lambda each: each.start)
    for before, after in itertools.pairwise(taken):
        assert before.stop <= after.start


def test_launches_on_one_stream_share_and_streams_do_not(made_up):
    one = launching.counters(8, CPU)
    assert launching.counters(4, CPU).data_ptr() == one.data_ptr()
    made_up.streams.current = 2
    assert_apart(one, launching.counters(8, CPU))


def test_a_block_that_is_too_small_is_never_freed(made_up):
    """A kernel of a side stream may still use it, and the allocator would hand it out: 1024 sequences x 8 heads."""
    made_up.streams.current = 2
    launching.counters(8, CPU)
    larger = launching.counters(1024 * 8, CPU)
    assert larger.numel() >= 1024 * 8
    largest = launching.counters(5 * 4096, CPU)
    assert all(made_up.alive())
    assert_apart(larger, largest)


def test_blocks_grow_by_a_factor(made_up):
    for n in range(1, 50_000, 1000):
        launching.counters(n, CPU)
    assert len(made_up.allocated) < 8


def test_captures_have_counters_of_their_own_in_as_many_arenas_as_it_takes(made_up, monkeypatch):
    made_up.capturing = True
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: pytest.fail("a memset in the graph"))
    monkeypatch.setattr(launching, "_zeros", lambda n, device: torch.ones(n, dtype=torch.int32).sub_(1))
    taken = [launching.counters(n, CPU) for n in (3, 40, 40, 64, 1, 200, 5)]
    assert [c.numel() for c in taken] == [3, 40, 40, 64, 1, 200, 5]
    assert all(c.data_ptr() % 16 == 0 for c in taken)
    assert_apart(*taken)


def test_threads_that_capture_at_once_get_counters_of_their_own(made_up):
    made_up.capturing = True
    barrier = threading.Barrier(4)
    taken = []

    def capture():
        barrier.wait()
        for _ in range(300):
            taken.append(launching.counters(5, CPU))

    threads = [threading.Thread(target=capture) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1200
    assert_apart(*taken)


def test_an_arena_takes_one_thread_at_a_time(made_up, monkeypatch):
    """What the interpreter's lock may hide: taking happens under a lock."""
    made_up.capturing = True
    held = []
    take = launching._Arena.take
    monkeypatch.setattr(launching._Arena, "take", lambda *args: (held.append(launching._LOCK.locked()), take(*args))[1])
    launching.counters(5, CPU)
    made_up.capturing = False
    monkeypatch.setattr(
        launching, "_zeros", lambda n, device: (held.append(launching._LOCK.locked()), made_up.zeros(n, device))[1]
    )
    launching.counters(5, CPU)
    assert held
    assert all(held)


def test_a_capture_finds_an_arena_after_an_eager_call(made_up, monkeypatch):
    launching.counters(5, CPU)
    made_up.capturing = True
    monkeypatch.setattr(launching, "_zeros", lambda n, device: pytest.fail("allocated in a capture"))
    launching.counters(5, CPU)


def test_captures_that_share_have_the_same_counters(made_up):
    made_up.capturing = True
    shared = torch.zeros(8, dtype=torch.int32)
    made_up.streams.current = 5
    with launching.captures_share(shared, 5):
        first, second, large = (launching.counters(n, CPU) for n in (8, 3, 9))
        made_up.streams.current = 6  # of another capture
        alone = [launching.counters(3, CPU)]
    made_up.streams.current = 5
    alone.append(launching.counters(3, CPU))
    assert [x.numel() for x in (first, second, large)] == [8, 3, 9]
    assert {x.data_ptr() for x in (first, second)} == {shared.data_ptr()}
    assert len({x.data_ptr() for x in (shared, large, *alone)}) == 4


def test_reuse_gives_captures_the_counters_of_earlier_ones(made_up):
    made_up.capturing = True
    before = [launching.counters(40, CPU).data_ptr() for _ in range(3)]
    launching.reuse_counters()
    assert [launching.counters(40, CPU).data_ptr() for _ in range(3)] == before


def test_clearing_makes_all_counters_zero_and_frees_none(made_up, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    small = launching.counters(5, CPU)
    large = launching.counters(5000, CPU)
    made_up.capturing = True
    captured = launching.counters(5, CPU)
    for counters in (small, large, captured):
        counters.fill_(7)
    launching.clear_counters()
    assert not any(counters.any() for counters in (small, large, captured))
    assert all(made_up.alive())


def _decode(batch, device, length=300):
    q = torch.randn(batch, 1, 8, 64, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, length, 8, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    config = rooftile.DecodeConfig(combine="last")  # a counter for each sequence and KV head
    return lambda: rooftile.decode_attention(q, k, v, lengths, layout="bthd", config=config)


@pytest.mark.gpu
def test_streams_with_ever_larger_blocks_do_not_disturb_each_other(device):
    """1024 sequences x 8 heads of keys take more counters than the first block of a stream has."""
    small, large = _decode(2, device, 4000), _decode(1024, device)
    expected = small(), large()
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results += [(small(), expected[0]), (large(), expected[1]), (small(), expected[0])]
    torch.cuda.synchronize()
    for result, wanted in results:
        assert torch.equal(result, wanted)


@pytest.mark.gpu
def test_threads_capture_at_once(device):
    """Each thread records graphs; all are replayed at once."""
    steps = [_decode(3, device, 4000) for _ in range(2)]
    expected = [step() for step in steps]
    torch.cuda.synchronize()
    recorded = {}

    def capture(which):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            result = steps[which]()
            graph.capture_end()
        recorded[which] = graph, result, stream

    threads = [threading.Thread(target=capture, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(20):
        for graph, _, stream in recorded.values():
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for which, (_, result, _) in recorded.items():
        assert torch.equal(result, expected[which])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_capture_may_need_a_further_arena(device, mode, monkeypatch):
    monkeypatch.setattr(launching, "_ARENA", 64)
    monkeypatch.setattr(launching, "_ARENAS", {})
    step = _decode(3, device, 4000)
    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        results = [step() for _ in range(8)]
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert len(launching._ARENAS[device.index or 0].blocks) > 1
    for result in results:
        assert torch.equal(result, expected)
