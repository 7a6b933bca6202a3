"""Benchmarks: what follows from the times, whose turn it is, what is said of an implementation that can't be timed."""

import contextlib
import dataclasses
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import (
    CPU,
    LARGE,
    ROOFS,
    SMALL,
    TableClock,
    absent,
    bench,
    double,
    double_coarsely,
    double_slowly,
    explode,
    measured,
    of,
    toy,
    triple,
    unsupported,
)
from typer.testing import CliRunner

from rooftile import runtime
from rooftile.bench import rows
from rooftile.bench.measure import (
    FLUSH,
    PASS_SECONDS,
    ROOF,
    SAMPLES,
    Effort,
    bind,
    calls_of_a_pass,
    draw,
    interleave,
    laid_out,
    rotation,
)
from rooftile.bench.rows import OURS, Row, compare, gpu_slug
from rooftile.bench.timer import DeviceClock, HostClock
from rooftile.bench.variants import Variant
from rooftile.cli import app

pytestmark = pytest.mark.nightly

# What is derived from times


def test_percentiles_interpolate_between_the_nearest_two():
    assert rows.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == (3.0, 1.8, 4.2)
    assert rows.spread([7.0]) == (7.0, 7.0, 7.0)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30))
def test_percentiles_are_ordered_and_within_the_values(values):
    median, low, high = rows.spread(values)
    assert min(values) * (1 - 1e-12) <= low <= median * (1 + 1e-12)
    assert median * (1 - 1e-12) <= high <= max(values) * (1 + 1e-12)


def test_ratios_are_to_the_fastest_right_peer():
    group = [
        measured(OURS, 10.0),
        measured("eager", 40.0),
        measured("liger", 8.0),
        measured("quack", 2.0, status="FAIL"),
        Row("op", "forward", "4x8", "bf16", "torch", status="absent"),
    ]
    compare(group)
    assert [r.ratio_to_best_peer for r in group] == [0.8, 0.2, 1.0, None, None]
    assert [r.speedup_vs_eager for r in group] == [4.0, 1.0, 5.0, None, None]
    assert rows.best_peer(group).impl == "liger"


def test_ratios_are_missing_where_there_is_nothing_to_compare_with():
    group = [measured(OURS, 10.0)]
    compare(group)
    assert group[0].ratio_to_best_peer is None
    assert group[0].speedup_vs_eager is None
    assert rows.best_peer(group) is None


def test_the_roof_is_the_longer_of_moving_and_multiplying():
    assert ROOFS.floor_seconds(nbytes=10**9, flops=1) == pytest.approx(1e-3)
    assert ROOFS.floor_seconds(nbytes=1, flops=10**12) == pytest.approx(1e-2)
    assert ROOFS.floor_seconds(nbytes=10**9, flops=1, copy_gbs=500.0) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Some Chip", "some-chip"),
    ],
)
def test_gpus_have_short_names(name, slug):
    assert gpu_slug(name) == slug


# The rotation of inputs, and whose turn it is


@given(st.integers(1, 1 << 34), st.integers(1 << 20, 1 << 27), st.integers(1, 1 << 36), st.integers(1 << 28, 1 << 38))
def test_a_rotation_keeps_to_its_share_of_memory_and_is_no_longer_than_of_use(nbytes, l2, held, free):
    copies = rotation(nbytes, l2, held, free)
    assert copies >= 1
    assert copies == 1 or copies * held <= free / 4
    if copies > 1:
        assert (copies - 1) * nbytes < max(2 << 30, FLUSH * l2)


def test_a_rotation_alone_covers_the_l2_cache_where_memory_allows():
    l2 = 50 << 20
    for nbytes in (8 << 20, 64 << 20, 512 << 20):
        assert rotation(nbytes, l2, held=2 * nbytes, free=80 << 30) * nbytes >= FLUSH * l2


class Device:
    """Stands in for torch.cuda: what is queued runs at once; `record` has what was, in order."""

    def __init__(self):
        self.record, self.recording = [], None
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                device.record.append("event")

            def elapsed_time(self, end):
                return 6.0

        class CUDAGraph:
            def capture_begin(self, pool, capture_error_mode):
                assert (pool, capture_error_mode) == ("pool", "thread_local")
                device.recording = self.calls = []

            def capture_end(self):
                device.recording = None

            def replay(self):
                device.record.append(("replay", len(self.calls)))

        self.Event, self.CUDAGraph = Event, CUDAGraph
        self.Stream = lambda device: None
        self.stream = lambda stream: contextlib.nullcontext()
        self.graph_pool_handle = lambda: "pool"
        self.synchronize = lambda device: None
        self.empty_cache = lambda: None
        self._sleep = lambda cycles: self.record.append("spin")

    def call(self, captures=True):
        def run():
            if self.recording is None:
                self.record.append("call")
            elif captures:
                self.recording.append("call")
            else:
                raise RuntimeError("operation not permitted when stream is capturing")

        return run


@pytest.fixture
def clocked(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    monkeypatch.setattr(runtime, "target", lambda device: SimpleNamespace(l2=1 << 20))
    clock = DeviceClock(CPU)
    flush = clock.flush
    monkeypatch.setattr(clock, "flush", lambda: (flush(), device.record.append("flush")))
    return clock, device


def test_a_pass_is_the_replay_of_one_call_for_each_input_set_behind_a_flush(clocked):
    clock, device = clocked
    block = clock.block([device.call(), device.call(), device.call()])
    assert device.record == ["call"] * 3  # to compile, before the capture
    device.record.clear()
    read = block.enqueue()
    assert device.record == ["flush", "event", ("replay", 3), "event"]
    assert read() == pytest.approx(2e-3)
    assert (block.method, block.calls) == ("graph", 3)


def test_the_flush_reads_four_times_the_l2_cache(clocked):
    clock, _ = clocked
    assert clock._lines.nbytes == FLUSH * clock.l2
    clock._lines.fill_(1.0)
    clock.flush()
    assert clock._sink.sum() == clock._lines.numel()


def test_what_waits_for_the_device_is_never_captured(clocked):
    clock, device = clocked
    modes, captures = [], []
    device.set_sync_debug_mode = modes.append
    begin = device.CUDAGraph.capture_begin
    device.CUDAGraph.capture_begin = lambda *given, **options: (captures.append(1), begin(*given, **options))

    def waits():
        if modes and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert clock.block([waits]).method == "events"
    assert (modes, captures) == (["error", "default"], [])
    assert clock.block([device.call()]).method == "graph"
    assert modes[-1] == "default"


def test_what_refuses_capture_is_timed_by_events_while_the_device_is_kept_busy(clocked):
    clock, device = clocked
    block = clock.block([device.call(captures=False), device.call()])
    assert (block.method, block.calls) == ("events", 2)
    device.record.clear()
    assert block.enqueue()() == pytest.approx(3e-3)
    assert device.record == ["flush", "spin", "event", "call", "call", "event"]


class Drifting:
    """A block that is slower at each pass of any block, as on a GPU that heats up."""

    calls, method = 1, "drift"

    def __init__(self, history, name):
        self.history, self.name = history, name

    def enqueue(self):
        self.history.append(self.name)
        seconds = 1e-3 * (1 + 0.01 * len(self.history))
        return lambda: seconds


def test_a_drifting_clock_hits_all_alike():
    history = []
    blocks = {name: Drifting(history, name) for name in "abcd"}
    effort = Effort(warmup=2, iters=40, seconds=10.0)
    medians = {n: rows.spread(s)[0] for n, s in interleave(blocks, TableClock({}), effort, random.Random(0))}
    assert max(medians.values()) / min(medians.values()) < 1.05
    # One after the other, the last would have come out far slower than the first.
    turns = [name for name, before in zip(history, [None, *history], strict=False) if name != before]
    assert len(turns) > 2 * len(blocks)
    assert history[-40:] != sorted(history[-40:])


def test_iterations_and_time_are_both_limits():
    def samples(effort):
        blocks = {"a": Drifting([], "a")}
        ((_, taken),) = interleave(blocks, TableClock({}), effort, random.Random(0))
        return len(taken)

    assert samples(Effort(iters=7, seconds=10.0)) == 7
    assert samples(Effort(iters=1000, seconds=0.04)) == 40
    assert samples(Effort(iters=1000, seconds=0.02, least=1)) == 20
    assert samples(Effort(iters=1000, seconds=1e-9, least=1)) == 1


def test_every_row_has_twenty_samples_however_long_a_call_takes():
    ((_, taken),) = interleave({"a": Drifting([], "a")}, TableClock({}), Effort(seconds=1e-9), random.Random(0))
    assert len(taken) == SAMPLES == 20
    assert calls_of_a_pass(64, 1.0) == 1
    assert calls_of_a_pass(64, 1e-6) == 64
    assert calls_of_a_pass(64, PASS_SECONDS / 3) == 3


@pytest.mark.parametrize(("warmup", "iters"), [(0, 1), (3, 7), (50, 4)])
def test_passes_are_exact_where_no_seconds_are_given(warmup, iters):
    history = []
    effort = Effort(warmup=warmup, iters=iters, seconds=0)
    ((_, taken),) = interleave({"a": Drifting(history, "a")}, TableClock({}), effort, random.Random(0))
    assert (len(taken), len(history)) == (iters, warmup + iters)


def test_passes_are_exact_in_the_interpreter_too(tmp_path):
    path = tmp_path / "rows.json"
    options = "silu_mul --set tiny --direction forward --peers eager --seconds 0 --warmup 1 --iters 3"
    assert CliRunner().invoke(app, ["bench", *options.split(), "--json", str(path)]).exit_code == 0
    _, found = rows.read_json(path)
    assert {row.impl: row.samples for row in found} == {OURS: 3, "eager": 3}


def test_a_block_that_raises_leaves_the_others_their_turns():
    class Broken(Drifting):
        def enqueue(self):
            raise RuntimeError("device lost")

    blocks = {"a": Drifting([], "a"), "b": Broken([], "b")}
    found = dict(interleave(blocks, TableClock({}), Effort(iters=5, seconds=10.0), random.Random(0)))
    assert isinstance(found["b"], RuntimeError)
    assert len(found["a"]) == 5


def test_a_backward_call_repeats_and_leaves_the_inputs_of_others_alone():
    def overwrite(x):
        y = x * 2
        x.mul_(0)
        return y

    given = draw(toy(), SMALL, torch.float32, "backward", CPU, seed=0)
    before = given.tensors["x"].clone()
    call = bind(Variant("peer", overwrite, ("x",)), toy(), SMALL, "backward", given)
    for _ in range(2):
        (dx,) = call()
        torch.testing.assert_close(dx, 2 * given.output_grads[0])
    assert torch.equal(given.tensors["x"], before)


def test_gradients_have_the_layout_of_each_implementations_own_outputs():
    def turned(x):
        return (x.t().contiguous() * 2).t()

    point = toy()
    given = draw(point, SMALL, torch.float32, "backward", CPU, seed=0)
    straight = bind(Variant("peer", double, ()), point, SMALL, "backward", given)
    aslant = bind(Variant("peer", turned, ()), point, SMALL, "backward", given)
    (dy,) = straight.args[2]
    assert dy is given.output_grads[0]  # no second copy where none is needed
    (dy_aslant,) = aslant.args[2]
    assert (dy.stride(), dy_aslant.stride()) == ((8, 1), (1, 4))
    assert torch.equal(dy, dy_aslant)
    torch.testing.assert_close(aslant()[0], straight()[0])


def test_drawn_gradients_have_the_layout_of_eager_outputs():
    case = dataclasses.replace(toy(), eager=lambda x: (x.t().contiguous() * 2).t())
    assert draw(case, SMALL, torch.float32, "backward", CPU, seed=0).output_grads[0].stride() == (1, 4)


def test_strides_that_index_nothing_cost_no_copy():
    values = torch.randn(1, 4, 8)
    assert laid_out(values, torch.empty_strided((1, 4, 8), (99, 8, 1))) is values


# What is reported of each implementation


def test_figures_follow_from_the_times(monkeypatch):
    clock = TableClock({double: 2e-6, double_slowly: 8e-6})
    code, found, _ = bench(monkeypatch, toy(), clock, dtypes=[torch.float32], peers=["eager"])
    assert code == 0
    ours = of(found, OURS)
    assert (ours.us, ours.us_p20, ours.us_p80) == (2.0, 2.0, 2.0)
    assert ours.gbs == pytest.approx(2 * 4 * 64 / 2e-6 / 1e9)
    assert ours.tflops == pytest.approx(64 / 2e-6 / 1e12)
    assert ours.roof_fraction == pytest.approx(0.5)  # the copy of the same bytes takes half the time
    assert (ours.speedup_vs_eager, ours.ratio_to_best_peer) == (4.0, 4.0)
    assert (ours.peak_bytes, ours.max_error, ours.max_abs_error) == (4096, 0.0, 0.0)
    assert ours.host_us > 0


def test_a_wrong_result_is_FAIL_and_untimed_and_the_exit_code_1(monkeypatch):
    code, found, _ = bench(monkeypatch, toy(triple), TableClock({}), peers=["eager"], dtypes=[torch.float32])
    ours = of(found, OURS)
    assert code == 1
    assert (ours.status, ours.us, ours.ratio_to_best_peer) == ("FAIL", None, None)
    assert "over" in ours.message
    assert ours.max_error == pytest.approx(0.5)
    x = toy().inputs(LARGE, torch.float32, CPU, torch.Generator().manual_seed(0))["x"]
    assert ours.max_abs_error == pytest.approx(float(x.abs().max()))  # 3x for 2x
    assert of(found, "eager").us is not None


def test_a_wrong_peer_is_FAIL_and_no_fault_of_ours(monkeypatch):
    code, found, _ = bench(monkeypatch, toy(double, ("liger", triple)), TableClock({}), peers=["eager", "liger"])
    assert code == 0
    assert (of(found, "liger").status, of(found, "liger").us) == ("FAIL", None)
    assert of(found, OURS).status == "ok"


def test_a_peer_is_held_to_the_ceiling_alone(monkeypatch):
    case = toy(double, ("liger", double_coarsely))
    _, found, _ = bench(monkeypatch, case, TableClock({}), peers=["eager", "liger"], dtypes=[torch.float32])
    assert of(found, "liger").status == "ok"
    code, found, _ = bench(monkeypatch, toy(double_coarsely), TableClock({}), peers=["eager"], dtypes=[torch.float32])
    assert (code, of(found, OURS).status) == (1, "FAIL")


def test_absent_and_unsupported_peers_are_rows_with_the_reason(monkeypatch):
    case = toy(double, ("quack", absent), ("liger", unsupported))
    code, found, _ = bench(monkeypatch, case, TableClock({}), peers=["quack", "liger"])
    assert code == 0
    assert of(found, "quack").status == "absent"
    assert "No module named 'quack'" in of(found, "quack").message
    assert (of(found, "liger").status, of(found, "liger").message) == ("unsupported", "has no such shape")


def test_an_exception_stays_in_its_row(monkeypatch):
    cases = (toy(double, ("liger", explode)), toy(explode, name="bad"), toy(name="good"))
    code, found, _ = bench(monkeypatch, cases, TableClock({}), peers=["eager", "liger"])
    by_op = {(r.op, r.impl): r for r in found}
    assert code == 1
    assert by_op["double", "liger"].status == "error"
    assert "tried to allocate" in by_op["double", "liger"].message
    assert by_op["bad", OURS].status == "error"
    assert all(by_op[op, "eager"].us for op in ("double", "bad", "good"))
    assert by_op["good", OURS].us


def test_an_exception_while_timing_stays_in_its_row(monkeypatch):
    class Refusing(TableClock):
        def peak_bytes(self, call):
            if call.func is double_slowly:
                raise torch.OutOfMemoryError("no room for the rotation")
            return super().peak_bytes(call)

    code, found, _ = bench(monkeypatch, toy(), Refusing({}), peers=["eager"])
    assert code == 0
    assert (of(found, "eager").status, of(found, OURS).status) == ("error", "ok")


def test_what_goes_wrong_with_a_whole_point_is_in_all_its_rows(monkeypatch):
    def broken(*args):
        raise RuntimeError("no inputs here")

    case = dataclasses.replace(toy(), inputs=broken)
    code, found, _ = bench(monkeypatch, case, TableClock({}), peers=["eager"])
    assert code == 1
    assert {(r.impl, r.status) for r in found} == {(OURS, "error"), ("eager", "error")}


def test_unknown_names_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="unknown baseline nobody; known baselines: eager, compile"):
        bench(monkeypatch, toy(), TableClock({}), peers=["nobody"])
    with pytest.raises(ValueError, match="no point of double is in the set gemm"):
        bench(monkeypatch, toy(), TableClock({}), sets=["gemm"])


def test_the_interpreter_refuses_real_sizes(monkeypatch):
    with pytest.raises(ValueError, match=r"the set llm has real sizes, .*: use tiny or edge, or a GPU"):
        bench(monkeypatch, toy(), HostClock(), sets=["tiny", "llm"])
    assert bench(monkeypatch, toy(), HostClock(), sets=["tiny"])[1]


def test_each_point_is_measured_once_and_empty_ones_not_at_all(monkeypatch):
    _, found, _ = bench(monkeypatch, toy(), TableClock({}), sets=["tiny", "llm"], peers=["eager"])
    assert [r.shape for r in found if r.impl == OURS] == ["4x8", "8x8"]


def test_the_roof_is_no_implementation(monkeypatch):
    _, found, _ = bench(monkeypatch, toy(), TableClock({}), peers=["eager"])
    assert ROOF not in {r.impl for r in found}
    assert {r.roof_gbs for r in found} == {found[0].nbytes / 1e-6 / 1e9}
