"""What is worked out once is what stock works out each time, and what stock refuses is refused the second time too."""

import numpy as np
import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import interpreter


def test_a_shape_that_is_none_is_refused_after_one_that_is_equal():
    assert tl.block_type(tl.int32, [8, 1]).numel == 8
    for _ in range(2):
        with pytest.raises(TypeError, match="must have type"):
            tl.block_type(tl.int32, [8.0, 1])
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [8, 3])


def test_types_of_one_shape_keep_their_elements():
    pointer = tl.pointer_type(tl.float16)
    for element in (tl.float16, pointer, tl.pointer_type(tl.float16, const=True), pointer):
        block = tl.block_type(element, [tl.constexpr(4)])
        assert (block.element_ty, block.scalar, block.numel) == (element, element, 4)
        assert block == tl.block_type(element, [4])
        assert block != tl.block_type(element, [2, 2])


@pytest.mark.parametrize("kind", [tl.float32, tl.block_type(tl.int8, [2, 8]), tl.pointer_type(tl.int8)])
def test_tensors_of_one_type_share_all_but_the_handle(kind):
    first, second = (tl.tensor(handle, kind) for handle in ("first", "second"))
    assert (first.handle, second.handle) == ("first", "second")
    assert second.type is kind
    assert second.dtype == kind.scalar
    assert [size.value for size in second.shape] == ([2, 8] if kind.is_block() else [])
    assert second.numel.value == (16 if kind.is_block() else 1)


def test_elements_wider_than_their_type_are_refused():
    interpreter.TensorHandle(np.zeros(2, np.int16), tl.int16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"itemsize \(32 bits\) exceeds .* \(16 bits\) for triton type int16"):
            interpreter.TensorHandle(np.zeros(2, np.int32), tl.int16)
    one, other = (interpreter.TensorHandle(np.zeros(2, np.int16), tl.int16) for _ in range(2))
    one.set_attr("tt.divisibility", [8])
    assert not other.attr


@triton.jit
def _mixed(out, small, byte, n, width: tl.constexpr):
    at = tl.arange(0, width)
    rows = tl.arange(0, 4)[:, None]
    sums = rows * 2 + at[None, :] + n + 0.5
    tl.static_assert(sums.dtype == tl.float32)
    tl.static_assert((tl.load(small + at) * 2).dtype == tl.bfloat16)
    tl.static_assert((tl.load(small + at) * tl.load(byte + at).to(tl.float32)).dtype == tl.float32)
    tl.static_assert((tl.load(byte + at) + 1).dtype == tl.uint8)
    tl.static_assert((tl.load(byte + at) + at).dtype == tl.int32)
    tl.store(out + rows * width + at[None, :], sums)


@triton.jit
def _negative(byte):
    tl.store(byte, tl.load(byte) + -1)


@triton.jit
def _misshapen(byte):
    tl.store(byte, tl.sum(tl.arange(0, 4) + tl.arange(0, 8)))


def test_operands_meet_as_in_stock():
    import torch

    out, small = torch.zeros(4, 8), torch.ones(8, dtype=torch.bfloat16)
    for _ in range(2):
        byte = torch.ones(8, dtype=torch.uint8)
        _mixed[(1,)](out, small, byte, 3, 8)
        assert torch.equal(out, torch.arange(4)[:, None] * 2 + torch.arange(8) + 3.5)
        with pytest.raises(Exception, match="between an unsigned tensor and a negative scalar"):
            _negative[(1,)](byte)
        with pytest.raises(Exception, match="incompatible dimensions at index 0: 4 and 8"):
            _misshapen[(1,)](byte)


def test_a_launch_leaves_triton_as_it_was():
    import torch

    owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
    before = [dict(vars(owner)) for owner in owners]
    for _ in range(2):
        _mixed[(1,)](torch.zeros(4, 8), torch.ones(8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.uint8), 3, 8)
        for owner, attributes in zip(owners, before, strict=True):
            changed = [name for name in attributes if vars(owner)[name] is not attributes[name]]
            assert not changed, owner


def test_a_builtin_that_was_replaced_between_two_launches_is_seen(monkeypatch):
    import torch

    arguments = (torch.zeros(4, 8), torch.ones(8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.uint8), 3, 8)
    _mixed[(1,)](*arguments)
    stock, seen = tl.load, []

    @tl.core.builtin
    def load(*given, **named):
        seen.append(given)
        return stock(*given, **named)

    monkeypatch.setattr(tl, "load", load)
    _mixed[(1,)](*arguments)
    assert len(seen) == 5


@triton.jit
def _unlike(out, start, n, width: tl.constexpr):
    column, row = tl.arange(0, 4)[:, None], tl.arange(0, width)[None, :]
    last = out + 4 * width - (4 * width - 1 - column * width - row)  # a scalar pointer, less a block
    chosen = tl.where(row > 2, column, -1)  # each operand has another shape
    chosen += tl.where(n > 0, row * 0, column)  # a scalar decides
    chosen = tl.maximum(chosen, 0) - tl.fma(row * 1.0, 2.0, column * 1.0).to(tl.int32)
    tl.store(last - 1, chosen // tl.where(column > 1, 2, 1) + start)


def test_operands_of_unlike_shapes_have_results_of_the_common_one():
    import torch

    out = torch.full((4, 8), -99, dtype=torch.int32)
    _unlike[(1,)](out, 5, 3, 8)
    column, row = torch.arange(4)[:, None], torch.arange(8)[None]
    chosen = torch.where(row > 2, column, -1).clamp(0) - (2 * row + column)
    expected = torch.div(chosen, torch.where(column > 1, 2, 1), rounding_mode="trunc") + 5
    assert torch.equal(out, expected.int())


@triton.jit
def _planned(left, right, out, fill, n, width: tl.constexpr):
    at = tl.arange(0, width)
    for k in range(4):  # the third time, each operation has a plan
        a, b = tl.load(left + at), tl.load(right + at, mask=at < n, other=fill)
        squares = a * a
        products = a * b
        tl.store(out + 2 * k * width + at, squares)
        tl.store(out + (2 * k + 1) * width + at, products.to(tl.float32).to(tl.float32))


@pytest.mark.parametrize("width", [1, 4])
def test_a_plan_computes_with_its_own_operands(width):
    """Of `a * a` both are one; the fill of a load of one element decides what stock asks for."""
    import torch

    for fill in (0.0, 5.0, 0.0, -3.0):
        left, right, out = torch.randn(width), torch.randn(width), torch.zeros(8, width)
        _planned[(1,)](left, right, out, fill, width - 1, width)
        right[-1] = fill
        assert torch.equal(out, torch.stack([left * left, left * right] * 4))


@triton.jit
def _shifted(out, byte):
    for k in range(4):
        high = tl.load(byte) | 128
        tl.store(out + 3 * k, (high >> 7).to(tl.int32))
        tl.store(out + 3 * k + 1, (high.to(tl.int8, bitcast=True) >> 7).to(tl.int32))
        tl.store(out + 3 * k + 2, (high > 127).to(tl.int32))


def test_a_plans_constants_stay_unsigned_after_a_shift():
    import torch

    out = torch.zeros(4, 3, dtype=torch.int32)
    _shifted[(1,)](out, torch.zeros(1, dtype=torch.uint8))
    assert torch.equal(out, torch.tensor([1, -1, 1], dtype=torch.int32).expand(4, 3))


def test_what_has_no_plan_is_refused_each_time():
    import torch

    byte = torch.ones(8, dtype=torch.uint8)
    for _ in range(4):
        with pytest.raises(Exception, match="incompatible dimensions at index 0: 4 and 8"):
            _misshapen[(1,)](byte)
        with pytest.raises(Exception, match="between an unsigned tensor and a negative scalar"):
            _negative[(1,)](byte)


INTEGERS = [tl.int1, tl.uint8, tl.uint16, tl.uint32, tl.uint64, tl.int8, tl.int16, tl.int32, tl.int64]
KINDS = [*INTEGERS, tl.bfloat16, tl.float16, tl.float32, tl.float64]


def _drawn(draw, element, sizes):
    from rooftile.interpreter.dtypes import numpy_dtype

    data = draw.integers(1, 10, sizes or 1).astype(numpy_dtype(element))
    return tl.tensor(interpreter.TensorHandle(data, element), tl.block_type(element, sizes) if sizes else element)


def _outcome(operation, semantic, *operands):
    try:
        found = operation(semantic, *operands)
    except Exception as error:
        return type(error), str(error)
    data = found.handle.data
    return found.type, data.dtype, np.broadcast_to(data, found.type.shape if found.type.is_block() else (1,)).tobytes()


@pytest.fixture
def in_a_launch():
    """Triton's language as a launch patches it."""
    from rooftile.interpreter.memory import Launch, launches

    launches.append(Launch("kernel 'none'"))
    scope = interpreter._patch_lang(_with_unsigned)
    yield
    scope.restore()
    launches.pop()


@triton.jit
def _with_unsigned(x, byte, out):
    flag = tl.load(x) > 0
    number = tl.load(byte)
    tl.store(out, tl.maximum(flag, number))
    tl.store(out + 1, flag + number)
    tl.store(out + 2, flag | number)


def test_operations_outside_of_a_launch_leave_no_plans():
    """There Triton takes unsigned scalars for signed ones."""
    import torch

    semantic, draw = interpreter.interpreter_semantic, np.random.default_rng(0)
    for _ in range(3):
        given = [_drawn(draw, tl.int1, None), _drawn(draw, tl.uint8, None)]
        type(semantic).add(semantic, *given, True)
        type(semantic).maximum(semantic, *given, tl.PropagateNan.NONE)
        type(semantic).cast(semantic, given[0], tl.uint8)
    out = torch.zeros(3, dtype=torch.int32)
    _with_unsigned[(1,)](torch.ones(1), torch.tensor([254], dtype=torch.uint8), out)
    assert out.tolist() == [254, 255, 255]


@pytest.mark.parametrize(
    "name",
    ["add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "less_than", "equal", "maximum", "where", "cast"],
)
def test_a_plan_gives_what_stock_gives(name, in_a_launch):
    """For other operands of the same types: constants of the first ones must not stay."""
    planned = getattr(type(interpreter.interpreter_semantic), name)
    semantic, draw = interpreter.interpreter_semantic, np.random.default_rng(0)
    flags = {"add": (True,), "sub": (True,), "mul": (True,), "maximum": (tl.PropagateNan.NONE,)}.get(name, ())
    for left in KINDS:
        for right in KINDS:
            for sizes in ([4], None), (None, None), ([4, 1], [1, 4]):
                for _ in range(3):  # the third has a plan
                    given = [_drawn(draw, left, sizes[0]), _drawn(draw, right, sizes[1])]
                    if name == "where":
                        given.insert(0, _drawn(draw, tl.int1, sizes[0]))
                    if name == "cast":
                        given[1] = right
                    stock = _outcome(planned.__wrapped__, semantic, *given, *flags)
                    assert _outcome(planned, semantic, *given, *flags) == stock, (left, right, sizes)


@triton.jit
def _by_block_pointer(x, out, n, width: tl.constexpr):
    for _ in range(4):
        rows = tl.make_block_ptr(x, (n, width), (width, 1), (0, 0), (4, width), (1, 0))
        tl.store(out, tl.sum(tl.load(rows, boundary_check=(0,), padding_option="zero")))
        out += 1


def test_block_pointers_have_no_plans():
    import torch

    x, out = torch.randn(3, 8).round(), torch.zeros(4)
    _by_block_pointer[(1,)](x, out, 3, 8)
    assert torch.equal(out, x.sum().expand(4))
