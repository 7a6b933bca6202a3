"""Arguments, loops and Python's operators mean in a kernel what they mean to Triton's compiler."""

import sys
import threading
import warnings

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from rooftile import runtime  # noqa: E402, F401  # installs the interpreter


@triton.jit
def _loops(x_ptr, out_ptr, start, stop, step, KIND: tl.constexpr):
    total = tl.load(x_ptr) * 0
    if KIND == "range":
        for i in range(start, stop, step):
            total += tl.load(x_ptr + i)
    elif KIND == "tl.range":
        for i in tl.range(start, stop, step):
            total += tl.load(x_ptr + i)
    elif KIND == "pipelined":
        for i in tl.range(start, stop, step, num_stages=3):
            total += tl.load(x_ptr + i)
    elif KIND == "specialized":
        for i in tl.range(start, stop, step, warp_specialize=True, disallow_acc_multi_buffer=True):
            total += tl.load(x_ptr + i)
    elif KIND == "nested":
        for j in range(0, 1):
            for i in tl.range(start + j, stop, step, flatten=True, loop_unroll_factor=2):
                total += tl.load(x_ptr + i)
    elif KIND == "while":
        i = start
        while i < stop:
            total += tl.load(x_ptr + i)
            i += step
    tl.store(out_ptr, total)


@pytest.mark.parametrize("kind", ["range", "tl.range", "pipelined", "specialized", "nested", "while"])
@pytest.mark.parametrize("bounds", [(0, 7, 1), (3, 64, 5), (5, 5, 1), (9, 2, 1)])
def test_loops_with_runtime_bounds(kind, bounds):
    x, out = torch.randn(64), torch.empty(1)
    _loops[(1,)](x, out, *bounds, KIND=kind)
    expected = torch.zeros(())
    for i in range(*bounds):
        expected += x[i]
    assert out.item() == expected.item()


@triton.jit
def _loop_offsets(out_ptr, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    for i in range(0, n):
        if WIDE:
            tl.store(out_ptr + i, i.to(tl.int64) * STRIDE)
        else:
            tl.store(out_ptr + i, i * STRIDE)


def test_the_loop_variable_is_an_int32_that_wraps():
    out = torch.empty(4, dtype=torch.int64)
    _loop_offsets[(1,)](out, 4, STRIDE=2**30, WIDE=True)
    assert out.tolist() == [i * 2**30 for i in range(4)]
    _loop_offsets[(1,)](out, 4, STRIDE=2**30, WIDE=False)
    assert out.tolist() == [0, 2**30, -(2**31), -(2**30)]


@triton.jit
def _product(out_ptr, a, b):
    tl.store(out_ptr, (a * b).to(tl.int64))


@triton.jit
def _product_of_annotated(out_ptr, a: tl.int64, b):
    tl.store(out_ptr, (a * b).to(tl.int64))


@pytest.mark.parametrize(("a", "b"), [(2**16, 2**16), (2**30 + 64, 2), (2**31 - 1, -(2**31)), (46341, 46341)])
def test_int32_arguments_wrap_and_annotated_ones_do_not(a, b):
    out = torch.empty(1, dtype=torch.int64)
    _product[(1,)](out, a, b)
    assert out.item() == (a * b + 2**31) % 2**32 - 2**31
    _product_of_annotated[(1,)](out, a, b)
    assert out.item() == a * b


@pytest.mark.parametrize("a", [2**31, 2**32 - 1, 2**40])
def test_arguments_from_2_to_the_31_are_int64(a):
    out = torch.empty(1, dtype=torch.int64)
    _product[(1,)](out, a, a // 2**20)
    assert out.item() == a * (a // 2**20)


@triton.jit
def _scale(x_ptr, out_ptr, scale, flag, N: tl.constexpr):
    i = tl.arange(0, N)
    y = tl.load(x_ptr + i) * scale
    if flag:
        tl.store(out_ptr + i, y)


def test_a_float_argument_is_float32_and_promotes_bfloat16():
    x = torch.randn(64).bfloat16()
    out = torch.zeros(64)
    _scale[(1,)](x, out, 0.1, True, N=64)
    assert torch.equal(out, x.float() * torch.tensor(0.1))


def test_a_bool_argument_is_accepted():
    x, out = torch.ones(64), torch.zeros(64)
    _scale[(1,)](x, out, 2.0, False, N=64)
    assert (out == 0).all()
    _scale[(1,)](x, out, 2.0, True, N=64)
    assert (out == 2).all()


@triton.jit
def _logic(out_ptr, low, high, N: tl.constexpr, FLAG: tl.constexpr):
    i = tl.arange(0, N)
    inside = i >= low and i < high
    outside = not inside
    tl.store(out_ptr + i, 1, mask=inside and FLAG)
    tl.store(out_ptr + i, 2, mask=outside or i == low)
    if FLAG and low > 0:
        tl.store(out_ptr, 3)


def test_and_or_not_go_lane_by_lane():
    out = torch.zeros(16, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _logic[(1,)](out, 3, 8, N=16, FLAG=True)
    assert out.tolist() == [3, 2, 2, 2, 1, 1, 1, 1] + [2] * 8


@triton.jit
def _asserting(x_ptr, limit, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.device_assert(x < limit, "x is too large")


def test_device_assert_fires_with_its_message():
    x = torch.arange(64)
    _asserting[(1,)](x, 64, N=64)
    with pytest.raises(AssertionError, match=r"_asserting.*x is too large"):
        _asserting[(1,)](x, 63, N=64)


@triton.jit
def _helper(x_ptr, offset):
    return tl.load(x_ptr + offset)


@triton.jit
def _calls_helper(x_ptr, out_ptr, offset):
    tl.store(out_ptr, _helper(x_ptr, offset) + tl.sum(tl.zeros([8], tl.float32), 0))


def test_an_error_in_a_helper_names_the_kernel_and_the_next_launch_works():
    x, out = torch.ones(4), torch.zeros(1)
    with pytest.raises(IndexError, match="kernel '_calls_helper'"):
        _calls_helper[(1,)](x, out, 4)
    _calls_helper[(1,)](x, out, 3)
    assert out.item() == 1


def test_a_launch_leaves_triton_language_as_it_was():
    before = {name: getattr(tl, name) for name in dir(tl)}
    _calls_helper[(1,)](torch.ones(4), torch.zeros(1), 0)
    assert all(getattr(tl, name) is value for name, value in before.items())


@triton.jit
def _sum_of(tensors, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for k in tl.static_range(len(tensors)):
        total += tl.load(tensors[k] + i)
    tl.store(out_ptr + i, total)


def test_tensors_in_a_tuple_are_the_kernels_own():
    tensors = tuple(torch.full((16,), float(k)) for k in range(3))
    out = torch.empty(16)
    _sum_of[(1,)](tensors, out, N=16)
    assert (out == 3).all()


@triton.jit
def _constants(out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.full((N,), 1.5, tl.bfloat16)
    tl.store(out_ptr + i, x + 0.001)


def test_bfloat16_constants():
    out = torch.empty(16, dtype=torch.bfloat16)
    _constants[(1,)](out, N=16)
    assert (out == torch.tensor(1.5).bfloat16() + torch.tensor(0.001).bfloat16()).all()


def test_threads_launch_one_at_a_time():
    """The interpreter keeps its program ids, and which memory it may touch, in globals."""
    x = torch.randn(64)
    expected, found, errors = x.sum().expand(3), [], []

    def launch():
        try:
            for _ in range(30):
                out = torch.empty(3)
                for i in range(3):
                    _loops[(1,)](x, out[i:], 0, 64, 1, KIND="range")
                found.append(out)
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=launch) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert not errors
    assert len(found) == 60
    for out in found:
        torch.testing.assert_close(out, expected)
