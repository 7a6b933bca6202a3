"""How a kernel is launched: which launches go through Triton, and which through the kernel that it compiled before."""

import contextlib
import dataclasses

import pytest
import torch
from helpers import BF16

import rooftile
from rooftile import launching, native, reference, runtime

import triton  # isort: skip

HUGE = 2**31


class Compiled:
    """What Triton's launcher returns: it takes the grid and every argument by position."""

    def __init__(self, calls):
        self.calls = calls

    function, packed_metadata, metadata = object(), object(), object()

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("hooked", grid, args))

    def run(self, x, y, z, stream, function, packed_metadata, metadata, enter_hook, exit_hook, *args):
        assert (stream, function, packed_metadata) == ("stream", self.function, self.packed_metadata)
        assert metadata is enter_hook is exit_hook is None
        self.calls.append(("compiled", (x, y, z), args))


class Kernel:
    """A `@triton.jit` function that records how it is launched."""

    arg_names = ("x_ptr", "weight_ptr", "y_ptr", "stride_x", "stride_y", "n_rows", "N", "BLOCK")

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def run(*args, **kwargs):
            self.calls.append(("kernel", grid, args, kwargs))
            return Compiled(self.calls)

        return run

    def went(self):
        """Where the launches since the last question went."""
        ways = [call[0] for call in self.calls]
        self.calls.clear()
        return ways


@dataclasses.dataclass
class Elsewhere:
    """A tensor, as far as a launch looks at it, on a GPU of that index."""

    tensor: torch.Tensor
    index: int

    def get_device(self):
        return self.index

    def data_ptr(self):
        return self.tensor.data_ptr()


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(launching, "_stream", lambda device: "stream")
    monkeypatch.setattr(launching, "_current_device", lambda: 0)
    monkeypatch.setattr(launching, "_on_device", contextlib.nullcontext)
    monkeypatch.setattr(native, "module", lambda: None)


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def plan(kernel):
    return launching.KernelLauncher(kernel, {"N": 8, "BLOCK": 16}, num_warps=4)


@pytest.fixture
def buffer():
    x = torch.zeros(64)
    assert x.data_ptr() % 16 == 0
    return OnAGPU(x)


class OnAGPU(torch.Tensor):
    """A tensor that says it is on GPU 0."""

    @staticmethod
    def __new__(cls, x):
        return x.as_subclass(cls)

    def get_device(self):
        return 0


def start(plan, x, strides=(8, 8), rows=4, programs=2):
    launching.launch(plan, programs, (x, None, x), strides, (rows,))


@pytest.mark.usefixtures("on_a_gpu")
class TestRemembering:
    def test_the_second_launch_goes_through_the_compiled_kernel(self, kernel, plan, buffer):
        start(plan, buffer, rows=4, programs=2)
        start(plan, buffer, rows=5, programs=3)
        (_, grid, args, options), (way, second_grid, second_args) = kernel.calls
        assert grid[0] == 2
        assert args[0] is args[2] is buffer
        assert args[1:2] + args[3:] == (None, 8, 8, 4)
        assert options == {"N": 8, "BLOCK": 16, "num_warps": 4}
        assert way == "compiled"
        assert second_grid == (3, 1, 1)
        assert second_args[0] is second_args[2] is buffer
        assert second_args[1:2] + second_args[3:] == (None, 8, 8, 5, 8, 16)  # the constants at the end, in order

    @pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
    def test_who_has_hooked_into_launches_is_told_of_each(self, kernel, plan, buffer, name):
        hook = getattr(triton.knobs.runtime, name)
        start(plan, buffer)
        hook.add(print)
        try:
            start(plan, buffer)
        finally:
            hook.remove(print)
        start(plan, buffer)
        assert kernel.went() == ["kernel", "hooked", "compiled"]

    def test_other_strides_are_another_kernel(self, kernel, plan, buffer):
        for strides in ((8, 8), (9, 8), (8, 9)):
            start(plan, buffer, strides)
            start(plan, buffer, strides)
            assert kernel.went() == ["kernel", "compiled"]
        start(plan, buffer, (8, 8))
        assert kernel.went() == ["compiled"]

    def test_another_device_is_another_kernel(self, kernel, plan, buffer):
        for index in (0, 1):
            start(plan, Elsewhere(buffer, index))
            start(plan, Elsewhere(buffer, index))
            assert kernel.went() == ["kernel", "compiled"]
        start(plan, Elsewhere(buffer, 0))
        assert kernel.went() == ["compiled"]

    def test_another_plan_is_another_kernel(self, kernel, plan, buffer):
        start(plan, buffer)
        start(launching.KernelLauncher(kernel, {"N": 8, "BLOCK": 32}, num_warps=4), buffer)
        assert kernel.went() == ["kernel", "kernel"]

    @pytest.mark.parametrize("known", [True, False], ids=["after-an-aligned-one", "at-first"])
    def test_unaligned_pointers_go_through_triton_and_are_not_remembered(self, kernel, plan, buffer, known):
        if known:
            start(plan, buffer)
            kernel.went()
        for tensors in ((buffer[1:], None, buffer), (buffer, None, buffer[1:]), (buffer, buffer[1:], buffer)):
            for _ in range(2):
                launching.launch(plan, 2, tensors, (8, 8), (4,))
        assert kernel.went() == ["kernel"] * 6
        start(plan, buffer)
        assert kernel.went() == ["compiled" if known else "kernel"]

    @pytest.mark.parametrize("known", [True, False], ids=["after-a-small-one", "at-first"])
    def test_a_number_of_2_to_the_31_goes_through_triton_and_is_not_remembered(self, kernel, plan, buffer, known):
        if known:
            start(plan, buffer, rows=HUGE - 1)
            kernel.went()
        for rows in (HUGE, HUGE, HUGE + 1):
            start(plan, buffer, rows=rows)
        assert kernel.went() == ["kernel"] * 3
        start(plan, buffer, rows=HUGE - 1)
        assert kernel.went() == ["compiled" if known else "kernel"]

    def test_kernels_are_forgotten_where_strides_never_repeat(self, kernel, plan, buffer):
        for stride in range(launching._MANY):
            start(plan, buffer, (stride, 0))
        start(plan, buffer, (0, 0))
        assert kernel.went() == ["kernel"] * launching._MANY + ["compiled"]
        start(plan, buffer, (launching._MANY, 0))
        assert len(plan.launches) == 1
        start(plan, buffer, (launching._MANY, 0))
        start(plan, buffer, (0, 0))
        assert kernel.went() == ["kernel", "compiled", "kernel"]

    def test_forget_forgets(self, kernel, plan, buffer):
        other = launching.KernelLauncher(kernel, {"N": 4, "BLOCK": 4})
        for each in (plan, other):
            start(each, buffer)
        launching.forget()
        for each in (plan, other):
            start(each, buffer)
        assert kernel.went() == ["kernel"] * 4


@pytest.mark.parametrize("mode", [runtime.Mode.INTERPRETER, runtime.Mode.COMPILE])
def test_nothing_is_remembered_where_there_is_no_gpu(kernel, plan, buffer, mode, monkeypatch):
    monkeypatch.setattr(runtime, "MODE", mode)
    start(plan, buffer)
    start(plan, buffer)
    assert kernel.went() == ["kernel", "kernel"]
    assert not plan.launches


@pytest.mark.parametrize("constants", [{"BLOCK": 16, "N": 8}, {"N": 8}, {"n_rows": 4, "N": 8}])
def test_constants_that_are_not_the_last_parameters_are_refused(kernel, constants):
    with pytest.raises(ValueError, match="expected the last parameters"):
        launching.KernelLauncher(kernel, constants)


ROWS, COLS, HEADS = 6, 48, 2


def _normal(shape, dtype, device, shift=0, stride=None):
    """Standard normal rows, `shift` elements after an aligned address and `stride` elements apart."""
    cols = shape[-1]
    stride = cols if stride is None else stride
    rows = torch.Size(shape[:-1]).numel()
    memory = torch.full((shift + rows * stride,), torch.nan, dtype=dtype, device=device)
    x = memory[shift:].view(*shape[:-1], stride)[..., :cols]
    return x.copy_(torch.randn(shape, device=device))


def _close(actual, expected):
    """To a rounding or two of the dtype, of float64's result; in float32 to what its sums and exponentials lose."""
    bound = max(4 * torch.finfo(actual.dtype).eps, 4e-6)
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)


def _check_all(dtype, device, shift=0, stride=COLS, eps=1e-6, offset=0.0):
    """Every op forward, and the backwards of the norm and of the activation, beside float64."""
    x, residual = (_normal((ROWS, COLS), dtype, device, shift, stride).requires_grad_() for _ in range(2))
    weight = _normal((COLS,), dtype, device, shift).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    mode = {"eps": eps, "offset": offset, "rounding": "none"}
    dy = _normal((ROWS, COLS), dtype, device, shift, stride)

    y = rooftile.rms_norm(x, weight, **mode)
    expected = reference.rms_norm.rms_norm(wide[0], wide[2], **mode)
    _close(y.detach(), expected.detach())
    wanted = torch.autograd.grad(expected, (wide[0], wide[2]), dy.double())
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    _close(dx, wanted[0])
    _close(dweight, wanted[1])

    u = x.detach() + residual.detach()
    y, summed = rooftile.add_rms_norm(x.detach(), residual.detach(), weight.detach(), **mode)
    assert torch.equal(summed, u)
    _close(y, reference.rms_norm.rms_norm(u.double(), weight.detach().double(), **mode))

    y, expected = rooftile.silu_mul(x, residual), reference.gated.silu_mul(wide[0], wide[1])
    _close(y.detach(), expected.detach())
    wanted = torch.autograd.grad(expected, wide[:2], dy.double())
    for got, want in zip(torch.autograd.grad(y, (x, residual), dy), wanted, strict=True):
        _close(got, want)
    _close(rooftile.silu_mul_packed(x.detach()), reference.gated.silu_mul_packed(wide[0].detach()))

    q, k = (_normal((1, heads, ROWS, COLS), dtype, device, shift, stride) for heads in (HEADS, 1))
    angles = torch.randn(ROWS, COLS // 2, device=device).repeat(1, 2)
    tables = angles.cos(), angles.sin()
    turned = rooftile.rope(q, k, *tables)
    for got, want in zip(turned, reference.rope.rope(*(t.double() for t in (q, k, *tables))), strict=True):
        _close(got, want)


@pytest.mark.gpu
class TestRightResultsWhatever:
    """A kernel compiled for one call serves another only where it may."""

    def test_the_alignment(self, device):
        for shift in (0, 1, 0, 8, 4, 0):
            _check_all(BF16, device, shift)

    def test_the_dtype(self, device):
        for dtype in (torch.float32, BF16, torch.float16, torch.float32, BF16):
            _check_all(dtype, device)

    def test_the_strides(self, device):
        for stride in (COLS, COLS + 16, COLS + 1, COLS + 3, COLS):
            _check_all(BF16, device, stride=stride)

    def test_eps_and_offset(self, device):
        for eps, offset in ((1e-6, 0.0), (0.5, 0.0), (0.5, 1.0), (1e-6, 1.0), (1e-6, 0.0)):
            _check_all(torch.float32, device, eps=eps, offset=offset)
