"""Benchmarks: what the GPU could do, as fast copies, reads and products show, and what the host takes for a call."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from toys import CPU, LARGE, ROOFS, SMALL, TableClock, bench, copy, copy_otherwise, double, of, toy

from rooftile.bench import streams
from rooftile.bench.host import first_call_ms, measure_host, recorded, smallest
from rooftile.bench.measure import BURST, FLUSH, Timing, fastest, host_us, rotation
from rooftile.bench.roof import Roofs, gemm_dtype, measure_roofs
from rooftile.bench.rows import OURS
from rooftile.cases import find_cases

import triton  # isort: skip

pytestmark = pytest.mark.nightly

# The roof


def timing(us):
    return Timing((1e-6 * us,), 0.0, 0, "table", 1)


def test_the_roof_is_the_faster_copy():
    assert fastest([timing(3.0), timing(2.0)]).us[0] == pytest.approx(2.0)
    assert fastest([RuntimeError("no memcpy node"), timing(2.0)]).us[0] == pytest.approx(2.0)
    assert isinstance(fastest([RuntimeError("one"), RuntimeError("two")]), RuntimeError)


@pytest.mark.parametrize("quicker", [copy, copy_otherwise])
def test_the_fraction_is_of_the_faster_copy(monkeypatch, quicker):
    clock = TableClock({double: 4e-6, copy: 9e-6, copy_otherwise: 9e-6} | {quicker: 2e-6})
    _, found, _ = bench(monkeypatch, toy(), clock, dtypes=[torch.float32], peers=["eager"])
    assert of(found, OURS).roof_fraction == pytest.approx(0.5)
    assert of(found, OURS).roof_gbs == pytest.approx(found[0].nbytes / 2e-6 / 1e9)


@pytest.mark.parametrize("quicker", [copy, copy_otherwise])
def test_the_roofs_of_the_gpu_are_the_faster_of_two_ways(monkeypatch, quicker):
    monkeypatch.setattr(streams, "COPIES", {"torch": copy, "triton": copy_otherwise})
    monkeypatch.setattr("rooftile.bench.roof.read_sum", double)
    monkeypatch.setattr("rooftile.bench.roof.GEMM_SIZE", 8)
    seconds = {copy: 9e-6, copy_otherwise: 9e-6, double: 3e-6, torch.sum: 5e-6} | {quicker: 2e-6}
    roofs = measure_roofs(TableClock(seconds), CPU)
    nbytes = TableClock({}).free_bytes() // 8
    assert roofs.copy_gbs == pytest.approx(nbytes / 2e-6 / 1e9)
    assert roofs.read_gbs == pytest.approx(nbytes / 2 / 3e-6 / 1e9)


def test_a_product_is_held_to_the_slower_of_a_read_and_a_multiplication(monkeypatch):
    roofs = Roofs(copy_gbs=1000.0, read_gbs=2000.0, tflops=100.0, gemms={"fp32": 5.0, "fp8": 400.0})
    assert roofs.gemm_floor_seconds(nbytes=2 * 10**9, flops=1, dtype="fp32") == pytest.approx(1e-3)
    assert roofs.gemm_floor_seconds(nbytes=1, flops=10**10, dtype="fp32") == pytest.approx(2e-3)
    assert roofs.gemm_floor_seconds(nbytes=1, flops=10**12, dtype="fp8") == pytest.approx(2.5e-3)
    assert roofs.gemm_floor_seconds(nbytes=1, flops=10**12, dtype="fp16") == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("roof", "dtype", "options", "expected"),
    [
        ("gemm", "bf16", {}, "bf16"),
        ("gemm", "fp32", {}, "fp32"),
        ("gemm", "fp32", {"precision": "tf32"}, "tf32"),
        ("gemm", "bf16", {"precision": "tf32"}, "bf16"),
        ("gemm fp8", "bf16", {}, "fp8"),
    ],
)
def test_the_roof_of_a_gemm_is_one_in_its_own_dtype(roof, dtype, options, expected):
    assert gemm_dtype(roof, dtype, options) == expected


def test_no_copy_is_timed_for_a_product(monkeypatch):
    monkeypatch.setattr(streams, "COPIES", {})
    clock = TableClock({double: 4e-6})
    _, found, _ = bench(
        monkeypatch, dataclasses.replace(toy(), roof="gemm"), clock, dtypes=[torch.float32], peers=["eager"]
    )
    ours = of(found, OURS)
    assert ours.roof_gbs == ROOFS.read_gbs
    assert ours.roof_fraction == pytest.approx(ours.nbytes / (1e9 * ROOFS.read_gbs) / 4e-6)
    assert ours.dims == {"rows": 8, "cols": 8}


def test_weights_of_one_token_rotate_past_the_cache():
    """33.6 MB of weights in a cache of 60 MB: a pass reads some other 2 GiB before it comes to them again."""
    nbytes, l2 = 2 * (4096 * 4096 + 2 * 4096), 60 << 20
    copies = rotation(nbytes, l2, held=3 * nbytes, free=100 << 30)
    assert copies * nbytes >= 30 * l2
    assert rotation(nbytes, l2, held=3 * nbytes, free=40 << 30) * nbytes >= FLUSH * l2


def test_roofs_that_a_gpu_lacks_are_left_out(monkeypatch):
    monkeypatch.setattr("rooftile.bench.roof.GEMM_SIZE", 8)
    monkeypatch.setattr("rooftile.bench.roof.read_sum", double)
    monkeypatch.setattr(streams, "COPIES", {"torch": copy})

    def missing(a, b, out):
        raise RuntimeError("no tf32 here")

    monkeypatch.setattr("rooftile.bench.roof._tf32_gemm", missing)
    assert set(measure_roofs(TableClock({}), CPU).gemms) == {"bf16", "fp16", "fp32"}


@pytest.mark.parametrize("nbytes", [1, 64, 100, 4098, 100_000])
def test_copies_move_the_bytes_asked_for(nbytes, device):
    for calls in streams.copy_calls(nbytes, 2, device).values():
        assert len(calls) == 2
        for call in calls:
            source, target = call.args
            target.zero_()
            call()
            assert torch.equal(source, target)
            assert nbytes <= source.nbytes + target.nbytes < nbytes + 64


# The host


def test_the_host_is_timed_in_bursts_that_no_queue_is_filled_by():
    class Queue(TableClock):
        waiting, longest, synchronized = 0, 0, 0

        def synchronize(self):
            self.synchronized += 1
            self.waiting = 0

    clock = Queue({})

    def call():
        clock.waiting += 1
        clock.longest = max(clock.longest, clock.waiting)

    assert host_us(call, clock) > 0
    assert clock.longest == BURST <= 20
    assert clock.synchronized > 2 * 3


def test_launches_are_recorded_as_calls_that_repeat_them(monkeypatch):
    ran = []

    def launch(self, *args, grid, warmup, **kwargs):
        ran.append((args, grid, warmup, kwargs))

    monkeypatch.setattr(triton.JITFunction, "run", launch)
    kernel = object.__new__(triton.JITFunction)
    with recorded() as launches:
        kernel[(3,)](1, 2, BLOCK=4)
    assert triton.JITFunction.run is launch
    assert launches[0].kernel is kernel
    launches[0].again()
    assert ran == [((1, 2), (3,), False, {"BLOCK": 4})] * 2


def test_the_host_is_measured_where_the_device_has_least_to_do():
    assert str(smallest(toy(), torch.float32)) == "8x8"  # neither the smaller one of "tiny" nor the empty one
    assert str(smallest(dataclasses.replace(toy(), sets={"tiny": (LARGE, SMALL)}), torch.float32)) == "4x8"
    for case in find_cases():
        # All of a GEMM's weights, and of a distillation those of both models; a burst does not fill the queue.
        most = 1 << 20 if case.roof == "copy" else 1 << 29
        assert 0 < case.nbytes(smallest(case, torch.bfloat16), 2, "forward") < most


@pytest.fixture
def launching(monkeypatch):
    """A case whose op launches a kernel that does nothing; the kernel, and what the launches so far were given.

    The host's clock stands but for these: a launch takes 1 us, the op about it 4 us, and 2 us more with gradients.
    """
    ran = []
    now = 0.0

    def passes(us):
        nonlocal now
        now += us * 1e-6

    def run(self, *args, grid, warmup, **kwargs):
        passes(1)
        ran.append(args)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr("rooftile.bench.timer.time", SimpleNamespace(perf_counter=lambda: now))
    kernel = object.__new__(triton.JITFunction)
    kernel.device_caches = {}

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            passes(6 if ctx.needs_input_grad[0] else 4)
            kernel[(1,)](x)
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            kernel[(1,)](dy)
            return dy * 2

    return toy(Double.apply), kernel, ran


def test_the_host_is_timed_with_and_without_gradients_beside_the_launcher(launching):
    case, _, ran = launching
    found = measure_host(case, SMALL, torch.float32, TableClock({}), CPU)
    assert (found.shape, found.dtype) == ("4x8", "fp32")
    assert (found.launcher_us, found.op_us, found.op_grad_us) == pytest.approx((1, 5, 7))
    assert {args[0].requires_grad for args in ran} == {False, True}


def test_the_first_call_is_made_with_empty_caches(launching, monkeypatch, tmp_path):
    case, kernel, _ = launching
    seen = []

    @contextlib.contextmanager
    def cold_cache():
        kernel.device_caches[0] = "compiled before"
        seen.append("cold")
        yield
        seen.append(dict(kernel.device_caches))

    monkeypatch.setattr("rooftile.bench.host.cold_cache", cold_cache)
    found = first_call_ms(case, SMALL, torch.float32, TableClock({}), CPU)
    assert set(found) == {"forward", "backward"}
    assert seen == ["cold", {}] * 2


def test_an_op_that_launches_nothing_has_no_host_time():
    with pytest.raises(RuntimeError, match="double at 4x8 launched no kernel"):
        measure_host(toy(), SMALL, torch.float32, TableClock({}), CPU)


# On a GPU


@pytest.mark.gpu
def test_on_a_gpu_the_roofs_reading_kernel_reads_all(device):
    x = torch.randn(1_000_003, device=device)
    torch.testing.assert_close(streams.read_sum(x).double().sum(), x.double().sum(), rtol=1e-5, atol=1e-2)
