"""No access outside the memory of a kernel's tensors, and none to memory that it does not ask for."""

import mmap

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from rooftile import runtime  # noqa: E402, F401  # installs the interpreter


@triton.jit
def _copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, cache_modifier=".cg", eviction_policy="evict_first")
    tl.store(y_ptr + i, x, mask=i < n, cache_modifier=".cs", eviction_policy="evict_last")


@triton.jit
def _atomic(x_ptr, old_ptr, offset, BLOCK: tl.constexpr, OP: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if OP == "add":
        old = tl.atomic_add(x_ptr + i + offset, (i + 1).to(x_ptr.dtype.element_ty))
    elif OP == "same":
        old = tl.atomic_add(x_ptr + i * 0 + offset, tl.full((BLOCK,), 1, x_ptr.dtype.element_ty))
    elif OP == "max":
        old = tl.atomic_max(x_ptr + i + offset, i.to(x_ptr.dtype.element_ty))
    elif OP == "cas":
        zero = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
        old = tl.atomic_cas(x_ptr + i + offset, zero, i.to(x_ptr.dtype.element_ty))
    tl.store(old_ptr + i, old)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool]


def guarded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A storage that holds exactly `values`, in the middle of a larger one of its own bytes (a NumPy view)."""
    size = values.numel() * values.element_size()
    arena = torch.full((size + 512,), 0xAB, dtype=torch.uint8)
    inside = torch.from_numpy(arena.numpy()[256 : 256 + size])
    inside.copy_(values.view(torch.uint8))
    return arena, inside.view(values.dtype)


def fences(arena: torch.Tensor) -> torch.Tensor:
    return torch.cat([arena[:256], arena[-256:]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_bounds_load_raises(dtype):
    _, x = guarded(torch.zeros(60, dtype=dtype))
    y = torch.zeros(64, dtype=dtype)
    with pytest.raises(IndexError, match=r"'_copy', program \(0, 0, 0\): load .* 4 of 64 .*x_ptr") as error:
        _copy[(1,)](x, y, 64, BLOCK=64)
    assert f"up to {4 * dtype.itemsize} bytes past the end" in str(error.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_bounds_store_raises_and_writes_nothing(dtype):
    arena, y = guarded(torch.zeros(60, dtype=dtype))
    before = arena.clone()
    with pytest.raises(IndexError, match=r"store out of bounds in 4 of 64 active lanes"):
        _copy[(1,)](torch.ones(64).to(dtype), y, 64, BLOCK=64)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_lanes_may_point_anywhere(dtype):
    arena, y = guarded(torch.zeros(60, dtype=dtype))
    x = torch.ones(60).to(dtype)
    _copy[(1,)](x, y, 60, BLOCK=64)
    assert torch.equal(y.view(torch.uint8), x.view(torch.uint8))
    assert (fences(arena) == 0xAB).all()


@pytest.mark.parametrize("op", ["add", "same", "max", "cas"])
@pytest.mark.parametrize("offset", [-1, 61])
def test_out_of_bounds_atomic_raises_and_writes_nothing(op, offset):
    arena, x = guarded(torch.zeros(60, dtype=torch.int32))
    before = arena.clone()
    with pytest.raises(IndexError, match="atomic out of bounds"):
        _atomic[(1,)](x, torch.zeros(64, dtype=torch.int32), offset, BLOCK=4 if op != "same" else 1, OP=op)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_atomic_add_adds_and_returns_what_was_there(dtype):
    x, old = torch.arange(64).to(dtype), torch.empty(64, dtype=dtype)
    _atomic[(1,)](x, old, 0, BLOCK=64, OP="add")
    assert torch.equal(old, torch.arange(64).to(dtype))
    assert torch.equal(x, torch.arange(64).to(dtype) + torch.arange(1, 65).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_atomic_adds_to_one_address_all_count(dtype):
    x, old = torch.zeros(1, dtype=dtype), torch.empty(64, dtype=dtype)
    _atomic[(1,)](x, old, 0, BLOCK=64, OP="same")
    assert x.item() == 64
    assert torch.equal(old.sort().values, torch.arange(64).to(dtype))


@pytest.mark.parametrize("op", ["max", "cas"])
def test_other_atomics(op):
    x, old = torch.zeros(64, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    _atomic[(1,)](x, old, 0, BLOCK=64, OP=op)
    assert torch.equal(x, torch.arange(64, dtype=torch.int32))
    assert (old == 0).all()


def test_leaving_a_view_but_not_its_storage_is_legal():
    whole = torch.arange(128.0)
    y = torch.zeros(64)
    _copy[(1,)](whole[16:20], y, 64, BLOCK=64)
    assert torch.equal(y, whole[16:80])


def test_running_out_of_one_argument_into_the_next_raises():
    arena = torch.zeros(4096, dtype=torch.uint8)
    x = torch.from_numpy(arena.numpy()[:128]).view(torch.float32)
    y = torch.from_numpy(arena.numpy()[128:384]).view(torch.float32)
    with pytest.raises(IndexError, match=r"load out of bounds in 32 of 64 active lanes, up to 128 bytes past .* x_ptr"):
        _copy[(1,)](x, y, 64, BLOCK=64)


@triton.jit
def _either(x_ptr, y_ptr, out_ptr, offset, N: tl.constexpr):
    i = tl.arange(0, N)
    pointers = tl.where(i % 2 == 0, x_ptr + i, y_ptr + i) + offset
    tl.store(out_ptr + i, tl.load(pointers))


def test_pointers_of_two_arguments_in_one_access():
    x, y, out = torch.zeros(64), torch.ones(64), torch.empty(64)
    _either[(1,)](x, y, out, 0, N=64)
    assert torch.equal(out, torch.arange(64.0) % 2)
    with pytest.raises(IndexError, match=r"load out of bounds in 1 of 64 active lanes, up to 4 bytes past .* y_ptr"):
        _either[(1,)](x, y, out, 1, N=64)


@triton.jit
def _addresses(x_ptr, out_ptr):
    tl.store(out_ptr, x_ptr.to(tl.int64))
    tl.store(out_ptr + 1, tl.load(x_ptr.to(tl.int64).to(tl.pointer_type(tl.int64))))


def test_a_pointer_as_an_integer_is_the_tensors_address():
    x, out = torch.tensor([7]), torch.empty(2, dtype=torch.int64)
    _addresses[(1,)](x, out)
    assert out.tolist() == [x.data_ptr(), 7]


def test_empty_tensors_are_fine_while_masked():
    _copy[(1,)](torch.empty(0), torch.empty(0), 0, BLOCK=64)
    with pytest.raises(IndexError, match="no tensor that the kernel was given lies"):
        _copy[(1,)](torch.empty(0), torch.empty(0), 1, BLOCK=64)


@triton.jit
def _through_descriptor(x_desc, y_desc, BLOCK: tl.constexpr):
    y_desc.store([0, 0], x_desc.load([0, 0]))


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, [rows, 16], [16, 1], [8, 16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_descriptors_mask_their_own_edge_and_cannot_lie_about_it(dtype):
    x, y = torch.randn(6, 16).to(dtype), torch.zeros(6, 16, dtype=dtype)
    _through_descriptor[(1,)](descriptor(x, 6), descriptor(y, 6), BLOCK=8)
    assert torch.equal(x, y)
    with pytest.raises(IndexError, match=r"load out of bounds in 32 of 128.*x_desc"):
        _through_descriptor[(1,)](descriptor(x, 8), descriptor(y, 6), BLOCK=8)
    with pytest.raises(IndexError, match=r"store out of bounds in 32 of 128.*y_desc"):
        _through_descriptor[(1,)](descriptor(torch.randn(8, 16).to(dtype), 8), descriptor(y, 8), BLOCK=8)


@triton.jit
def _through_table(table_ptr, sizes_ptr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x_ptr = tl.load(table_ptr + pid).to(tl.pointer_type(DTYPE))
    i = tl.arange(0, BLOCK)
    mask = i < tl.load(sizes_ptr + pid)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=mask) + 1, mask=mask)


def test_a_table_of_addresses_reaches_the_live_tensors_it_names():
    tensors = [torch.zeros(n, dtype=torch.bfloat16) for n in (3, 60, 17)]
    gradient = torch.zeros(5, dtype=torch.bfloat16, requires_grad=True)
    gradient.grad = torch.zeros(5, dtype=torch.bfloat16)
    addresses = [t.data_ptr() for t in tensors] + [gradient.grad.data_ptr()]
    table, sizes = torch.tensor(addresses), torch.tensor([3, 60, 17, 5], dtype=torch.int32)
    _through_table[(4,)](table, sizes, DTYPE=tl.bfloat16, BLOCK=64)
    assert all((t == 1).all() for t in [*tensors, gradient.grad])


def test_a_table_of_addresses_does_not_excuse_an_overrun():
    x = torch.zeros(60)
    with pytest.raises(IndexError, match="load out of bounds in 4 of 64"):
        _through_table[(1,)](torch.tensor([x.data_ptr()]), torch.tensor([64]), DTYPE=tl.float32, BLOCK=64)


def test_an_address_of_nothing_raises():
    with pytest.raises(IndexError, match="load out of bounds"):
        _through_table[(1,)](torch.tensor([64]), torch.tensor([4]), DTYPE=tl.float32, BLOCK=64)


@triton.jit
def _double_rows(x_ptr, stride, N: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    i = tl.arange(0, N)
    x = tl.load(x_ptr + row * stride + i)
    tl.store(x_ptr + row * stride + i, x * 2)


STRIDE = 2**30 + 64


def lazily_mapped_rows() -> tuple[torch.Tensor, mmap.mmap]:
    """Four bfloat16 rows, 2^30 + 64 elements apart: 6 GiB of addresses, of which a few pages are ever touched."""
    size = 2 * (3 * STRIDE + 64)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size, flags=flags)
    return torch.frombuffer(memory, dtype=torch.bfloat16).as_strided((4, 64), (STRIDE, 1)), memory


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def test_a_huge_row_stride_works_in_place_and_touches_its_rows_alone():
    x, _memory = lazily_mapped_rows()
    x[:] = torch.arange(4)[:, None]
    before = resident_bytes()
    _double_rows[(4,)](x, x.stride(0), N=64, WIDE=True)
    assert resident_bytes() - before < 64 << 20
    assert torch.equal(x.float(), 2.0 * torch.arange(4)[:, None].expand(4, 64))


def test_an_int32_offset_over_a_huge_row_stride_is_caught():
    """row * stride wraps at row 2, to 2^31 elements before the tensor, as it would on a GPU."""
    x, _memory = lazily_mapped_rows()
    with pytest.raises(IndexError, match=r"program \(2, 0, 0\): load out of bounds in 64 of 64.*before the start"):
        _double_rows[(4,)](x, x.stride(0), N=64, WIDE=False)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_read_only_memory_is_read():
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    x = torch.frombuffer(memory, dtype=torch.float32, count=64)
    y = torch.ones(64)
    _copy[(1,)](x, y, 64, BLOCK=64)
    assert (y == 0).all()
