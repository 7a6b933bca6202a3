"""softmax: which elements a row keeps, what it makes of infinities and NaN, its kernels, errors."""

import itertools
import math

import pytest
import test_offsets
import torch
from helpers import BF16, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from rooftile import launching, runtime
from rooftile.cases.check import relative_error
from rooftile.cases.softmax import TOLERANCES
from rooftile.ops.softmax import backward, forward, softmax
from rooftile.primitives.rows import RowConfig, row_length
from rooftile.reference import softmax as reference

INF, NAN = math.inf, math.nan
INTERPRETED = runtime.MODE is runtime.Mode.INTERPRETER
FEW = settings(max_examples=15)
# The kernels of both directions. In the interpreter, where one program runs at a time, a split row has one part.
KERNELS = {
    "tile": RowConfig("tile", 512, 4, rows=4),
    "loop": RowConfig("loop", 128, 4),
    "loop that holds blocks": RowConfig("loop", 64, 2, held=2),
    "split": RowConfig("split", 512 if INTERPRETED else 128, 4, per_sm=1, stages=2),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture
def use(monkeypatch):
    """A function that has a kernel taken for both directions, whatever the length of a row."""

    def choose(kernel):
        for module in (forward, backward):
            monkeypatch.setattr(module, "config", lambda *_: KERNELS[kernel])

    return choose


def with_gradient(function, x, dy, **options):
    leaf = x.detach().requires_grad_()
    y = function(leaf, **options)
    return y.detach(), *torch.autograd.grad(y, leaf, dy)


def assert_right(x, **options):
    """Values and gradients against the formula in float64."""
    dy = torch.randn_like(x)
    found = with_gradient(softmax, x, dy, **options)
    expected = with_gradient(reference.softmax, x.double(), dy.double(), **options)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-6)


def some(*shape, device):
    """A mask that keeps two of three."""
    return torch.rand(shape, device=device) < 2 / 3


@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    cols=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.float16, BF16]),
    scale=st.sampled_from([1.0, 0.3, -2.0]),
    causal=st.booleans(),
    masked=st.booleans(),
)
@FEW
def test_any_leading_shape(leading, cols, dtype, scale, causal, masked):
    device = runtime.default_device()
    x = torch.randn(*leading, cols, device=device).to(dtype)
    options = {"scale": scale, "causal": causal and bool(leading)}
    options["mask"] = some(cols, device=device) if masked else None
    y = softmax(x, **options)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    if x.numel():
        assert relative_error(y, reference.softmax(x.double(), **options)) <= TOLERANCES[dtype]["forward"].ceiling


@pytest.mark.each_once
@every_kernel
@pytest.mark.parametrize("columns", [100, 256, 257])
def test_every_kernel_gives_the_formula_and_its_gradient(kernel, columns, use, device):
    """The lengths that the long-row kernels are for cost the interpreter too much: they are given short rows here."""
    use(kernel)
    x = torch.randn(3, 7, columns, device=device)
    mask = some(3, 1, columns, device=device)
    assert_right(x)
    assert_right(x, scale=-0.7, causal=True)
    assert_right(x, mask=mask)
    assert_right(x, scale=0.5, causal=True, mask=mask)


def test_a_loop_too_long_to_be_unrolled(device, monkeypatch):
    for module in (forward, backward):
        monkeypatch.setattr(module, "config", lambda *_: RowConfig("loop", 16, 1))
    for columns in (160, 145):
        assert_right(torch.randn(3, columns, device=device))


@every_kernel
def test_rows_sum_to_one(kernel, use, device):
    use(kernel)
    y = softmax(5 * torch.randn(9, 257, device=device), scale=2.0)
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(9, device=device))


@every_kernel
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.125])
def test_a_number_added_to_a_row_changes_nothing(kernel, scale, use, device):
    """Bit-identical: the difference from the maximum is taken first. These are exact: a unit at 10^4 is 2^-10."""
    use(kernel)
    x = torch.randint(-500, 500, (5, 257), device=device) / 128
    assert torch.equal(softmax(x + 1e4, scale=scale), softmax(x, scale=scale))


@every_kernel
def test_numbers_near_the_limits_of_float32(kernel, use, device):
    use(kernel)
    x = torch.tensor(
        [[3e38, -3e38, 3e38, 0.0], [-3.4e38, -INF, -3.4e38, -INF], [1e30, 1e30, 1e30, -1e30]], device=device
    )
    x = torch.cat((x, x.new_full((3, 129), -INF)), -1)
    third = 1 / 3
    expected = [[0.5, 0.0, 0.5, 0.0], [0.5, 0.0, 0.5, 0.0], [third, third, third, 0.0]]
    y = softmax(x)
    torch.testing.assert_close(y[:, :4], torch.tensor(expected, device=device))
    assert (y[:, 4:] == 0).all()


def test_scores_that_overflow_float16_once_scaled(device):
    x = torch.randn(4, 64, device=device).half() * 1e4
    assert relative_error(softmax(x, scale=100.0), reference.softmax(x.double(), scale=100.0)) < 1e-3


def test_a_scale_of_zero_makes_all_equal(device):
    x = torch.randn(4, 64, device=device)
    y, dx = with_gradient(softmax, x, torch.randn_like(x), scale=0, causal=True)
    expected = reference.softmax(torch.zeros_like(x), causal=True)
    torch.testing.assert_close(y, expected)
    assert (dx == 0).all()


@pytest.mark.each_once
@every_kernel
@pytest.mark.parametrize("scale", [1e-38, 8.2e-39, -1e-46, 1e-46, 1e-60])
def test_a_scale_that_is_hardly_a_float32(kernel, scale, use, device):
    use(kernel)
    assert_right(torch.randn(7, 257, device=device), scale=scale, causal=True)
    assert_right(torch.randn(5, 130, device=device) * 1e37, scale=scale, mask=some(5, 130, device=device))


def test_differences_that_float32_does_not_have_are_infinite_whatever_the_scale(device):
    """What the docstring says of them."""
    y = softmax(torch.tensor([3e38, -3e38, 1e38], device=device), scale=1e-38)
    e = math.exp(-2.0)
    torch.testing.assert_close(y, torch.tensor([1.0, 0.0, e], device=device) / (1 + e))


@every_kernel
def test_a_row_that_keeps_nothing_is_zero_and_so_is_its_gradient(kernel, use, device):
    use(kernel)
    x = torch.randn(5, 257, device=device)
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[1] = False
    x[3] = -INF
    y, dx = with_gradient(softmax, x, torch.randn_like(x), mask=mask)
    assert (y[[1, 3]] == 0).all()
    assert (dx[[1, 3]] == 0).all()
    torch.testing.assert_close(y[[0, 2, 4]].sum(-1), torch.ones(3, device=device))


@pytest.mark.each_once
@every_kernel
@pytest.mark.parametrize(("t", "s"), [(5, 257), (9, 200), (8, 3), (1, 130), (13, 1)])
def test_a_causal_row_keeps_the_columns_up_to_its_own_from_the_end(kernel, t, s, use, device):
    use(kernel)
    x = torch.randn(2, t, s, device=device)
    y = softmax(x, causal=True)
    for i in range(t):
        kept = max(0, i + s - t + 1)
        torch.testing.assert_close(y[:, i, :kept], torch.softmax(x[:, i, :kept], -1))
        assert (y[:, i, kept:] == 0).all()
    assert_right(x, causal=True)


@every_kernel
def test_what_is_not_kept_may_hold_anything(kernel, use, device):
    use(kernel)
    x, mask = torch.randn(5, 130, device=device), some(5, 130, device=device)
    for options in ({"mask": mask}, {"causal": True}, {"mask": mask, "causal": True}):
        expected = softmax(x, **options)
        keep = reference.kept(x, options.get("causal", False), options.get("mask"))
        for filling in (NAN, INF):
            assert_same((softmax(torch.where(keep, x, filling), **options),), (expected,))


@pytest.mark.each_once
@every_kernel
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nan_or_infinity_spoils_its_row_alone(kernel, bad, sign, use, device):
    use(kernel)
    x = torch.randn(6, 257, device=device)
    clean = softmax(x, scale=sign)
    x[1, 3], x[4, 256] = sign * bad, sign * bad
    y = softmax(x, scale=sign)
    assert torch.isnan(y[[1, 4]]).all()
    assert torch.equal(y[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    y = softmax(x, scale=sign, causal=True)  # row 4 does not keep its last column
    assert torch.isnan(y).any(-1).tolist() == [False, True, False, False, False, False]


@every_kernel
def test_minus_infinity_is_a_score_like_any_other(kernel, use, device):
    use(kernel)
    x = torch.randn(5, 257, device=device)
    x[:, ::3] = -INF
    assert_right(x)
    assert (softmax(x)[:, ::3] == 0).all()


@pytest.mark.parametrize("dims", list(itertools.product([0, 1], repeat=4)), ids=str)
def test_a_mask_is_broadcast_in_every_dimension(dims, device):
    x = torch.randn(2, 3, 5, 12, device=device)
    mask = some(*(n if own else 1 for n, own in zip(x.shape, dims, strict=True)), device=device)
    assert_right(x, mask=mask, causal=sum(dims) % 2 == 0)
    without = mask.squeeze()  # of fewer dimensions, where they were the first
    if dims == tuple(sorted(dims)):
        assert_same((softmax(x, mask=without),), (softmax(x, mask=mask),))


def test_a_mask_of_any_strides(device):
    x = torch.randn(2, 3, 5, 12, device=device)
    wide = some(2, 3, 5, 30, device=device)
    turned = some(12, 5, 3, 2, device=device)
    for mask in (wide[..., 2:26:2], turned.permute(3, 2, 1, 0), some(3, 5, 2, 12, device=device).permute(2, 0, 1, 3)):
        assert not mask.is_contiguous()
        assert_right(x, mask=mask)
        assert_same((softmax(x, mask=mask),), (softmax(x, mask=mask.contiguous()),))


@every_kernel
def test_every_kernel_walks_a_mask_by_its_strides(kernel, use, device):
    use(kernel)
    masks = (some(2, 1, 4, 130, device=device), some(2, 1, 4, 1, device=device), some(130, 3, device=device).T[:, None])
    for mask in masks:
        assert_right(torch.randn(2, 3, 4, 130, device=device), mask=mask)


def test_masks_that_are_taken_as_they_are():
    """Up to three strides for the rows; a mask is copied only past that."""
    shape = (2, 3, 5, 12)
    layouts = {  # sizes of the second and third dimension of the rows, and all strides
        (2, 3, 5, 12): ((1, 30), (0, 0, 12, 1)),
        (2, 1, 5, 12): ((3, 5), (60, 0, 12, 1)),
        (2, 1, 1, 12): ((2, 15), (0, 12, 0, 1)),
        (1, 3, 1, 12): ((3, 5), (0, 12, 0, 1)),
        (5, 12): ((6, 5), (0, 0, 12, 1)),
        (5, 1): ((6, 5), (0, 0, 1, 0)),
        (12,): ((1, 30), (0, 0, 0, 1)),
        (): ((1, 30), (0, 0, 0, 0)),
    }
    for mask_shape, layout in layouts.items():
        mask = torch.ones(mask_shape, dtype=torch.bool)
        found, *rest = forward.mask_layout(mask, shape)
        assert found is mask
        assert tuple(rest) == layout, mask_shape
    awkward = torch.ones(2, 1, 2, 1, 2, 12, dtype=torch.bool)
    found, sizes, strides = forward.mask_layout(awkward, (2, 3, 2, 3, 2, 12))
    assert found is not awkward
    assert (sizes, strides) == ((1, 72), (0, 0, 12, 1))


def test_rows_that_are_not_evenly_spaced(device):
    """Those of a mask of many dimensions, of which it has every other; and those of x."""
    assert_right(torch.randn(2, 2, 2, 2, 2, 12, device=device), mask=some(2, 1, 2, 1, 2, 12, device=device))
    x = torch.randn(3, 2, 5, 12, device=device).transpose(0, 1)
    assert_right(x, causal=True, mask=some(2, 1, 5, 12, device=device))


@pytest.mark.parametrize("shape", [(5, 0), (0, 64), (0, 0), (2, 0, 3)], ids=str)
def test_empty_tensors(shape, device):
    x = torch.randn(shape, device=device)
    y, dx = with_gradient(softmax, x, torch.randn_like(x), causal=True, mask=some(device=device))
    assert y.shape == dx.shape == x.shape


def test_only_the_output_is_kept_for_the_backward(device):
    x, mask = torch.randn(4, 64, device=device, requires_grad=True), some(4, 64, device=device)
    (saved,) = (y := softmax(x, mask=mask, causal=True)).grad_fn.saved_tensors
    assert saved.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("shape", [(3,), (5, 8), (2, 4, 8), (2, 3, 4, 8)], ids=str)
def test_a_mask_that_does_not_broadcast(shape, device):
    x = torch.randn(3, 4, 8, device=device)
    with pytest.raises(ValueError, match=r"softmax: mask has shape .*, expected one that broadcasts to \(3, 4, 8\)"):
        softmax(x, mask=torch.ones(shape, dtype=torch.bool, device=device))


def test_other_wrong_arguments(device):
    x = torch.randn(4, 8, device=device)
    for mask in (torch.ones(4, 8, device=device), torch.ones(4, 8, dtype=torch.uint8, device=device)):
        with pytest.raises(TypeError, match=r"softmax: mask has dtype torch\..*, expected torch.bool \(True keeps\)"):
            softmax(x, mask=mask)
    with pytest.raises(ValueError, match="softmax: mask is on meta, expected"):
        softmax(x, mask=torch.ones(4, 8, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match=r"softmax: x has shape \(8,\), expected at least two dimensions"):
        softmax(x[0], causal=True)
    with pytest.raises(ValueError, match=r"softmax: x has shape \(\), expected at least one dimension"):
        softmax(x[0, 0])
    for scale in (INF, -INF, NAN):
        with pytest.raises(ValueError, match=r"softmax: scale is .*, expected a finite number"):
            softmax(x, scale=scale)
    for scale in (None, torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"softmax: scale is (None|a Tensor), expected a number"):
            softmax(x, scale=scale)
    with pytest.raises(TypeError, match="softmax: causal is an int, expected a bool"):
        softmax(x, causal=1)
    with pytest.raises(TypeError, match="positional"):
        softmax(x, 0.5)


def test_the_backward_op_refuses_gradients_that_do_not_match(device):
    y = torch.randn(4, 8, device=device)
    for dy, error in ((torch.randn(3, 8, device=device), ValueError), (y.to(BF16), TypeError)):
        with pytest.raises(error, match="softmax_backward: dy has"):
            torch.ops.rooftile.softmax_backward(dy, y, 1.0, False)


def test_rows_of_a_symbolic_length_leave_the_op_whole(device):
    """A graph with a launch in it would be for one length; symbolic leading dimensions are no obstacle."""
    shapes = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC])
    x = shapes.from_tensor(torch.randn(4, 64, device=device), symbolic_context=sizes)
    assert isinstance(x.shape[1], torch.SymInt)
    with shapes:
        for launch in (lambda: forward.prepare(x, None, 1.0, True), lambda: backward.prepare(x, x, 1.0, True)):
            with pytest.raises(launching.Untraceable, match="symbolic length"):
                launch()
    assert row_length(x.T) == 4


# Offsets past 2^31: the helpers are those of the other ops

far_rows, no_plans_kept = test_offsets.far_rows, test_offsets.no_plans_kept


def run_softmax(lay, device):
    x, dy = test_offsets.normal(device), test_offsets.normal(device)
    mask = some(test_offsets.ROWS, 2 * test_offsets.COLS, device=device).view(BF16)  # two bytes are laid at once
    results = []
    for place in (torch.clone, lay):
        kept = place(mask).view(torch.bool)[:, : test_offsets.COLS]
        results.append(with_gradient(softmax, place(x), place(dy), causal=True, mask=kept))
    return results


@every_kernel
def test_rows_past_two_to_the_31_are_right(kernel, use, far_rows, device):
    use(kernel)
    near, far = run_softmax(far_rows, device)
    assert_same(far, near)


@every_kernel
def test_offsets_of_32_bits_are_caught(kernel, use, far_rows, device, monkeypatch, tmp_path, no_plans_kept):
    if not INTERPRETED:
        pytest.skip("on a GPU a wild access ends the process: the interpreter alone can show it")
    from rooftile.interpreter.memory import OutOfBoundsError

    use(kernel)
    for file in test_offsets.files_with_kernels("softmax"):
        test_offsets.use_kernels_without_int64(file, monkeypatch, tmp_path)
    near = run_softmax(torch.clone, device)[0]
    assert all(torch.isfinite(t).all() for t in near)
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        run_softmax(far_rows, device)
