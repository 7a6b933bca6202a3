"""Loads, stores and atomics: correct bytes for bfloat16 and fp8, and no access outside a kernel's tensors."""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from rooftile.interpreter.dtypes import NARROW, bits, convert, from_bits, numpy_dtype
from rooftile.interpreter.patching import original, replace


class OutOfBoundsError(IndexError):
    """A kernel accessed memory outside the storages of its tensors."""


@dataclasses.dataclass(frozen=True)
class Region:
    """The bytes [start, end) of one storage, and its argument."""

    start: int
    end: int
    argument: str

    def distance(self, first: int, last: int) -> int:
        """How far the bytes [first, last) reach outside."""
        return max(self.start - first, last - self.end, 0)


# A pointer carries the number of its argument's storage in its upper 16 bits, which no address in user space needs.
# Pointer arithmetic keeps the tag, so that an access that runs from one argument into another is found too.
_SHIFT = np.uint64(48)
_LOW_BITS = (1 << 48) - 1
_ADDRESS = np.uint64(_LOW_BITS)


@dataclasses.dataclass
class Launch:
    """One running kernel and its memory: region k by pointers with tag k + 1, `adopted` by pointers without a tag."""

    kernel: str
    regions: list[Region] = dataclasses.field(default_factory=list)
    adopted: list[Region] = dataclasses.field(default_factory=list)
    found: dict[int, list[Region]] = dataclasses.field(default_factory=dict)

    def add(self, argument: str, value: Any) -> None:
        """Makes the storages of an argument's tensors the kernel's own."""
        for tensor in tensors(value):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self.regions.append(Region(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), argument))

    def tagged(self, tensor: Any) -> np.ndarray:
        """The kernel's pointer for this argument."""
        storage = interpreter._unwrap_tensor(tensor).untyped_storage()
        span = (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        tag = next((tag for tag, region in enumerate(self.regions, 1) if (region.start, region.end) == span), 0)
        return np.array([tensor.data_ptr() | (tag << 48)], dtype=np.uint64)

    def homes(self, tag: int) -> list[Region]:
        """Where a pointer with this tag may point."""
        return self.regions[tag - 1 : tag] if tag else self.adopted

    def covers(self, pointers: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of `size` bytes lie inside their storage. They may leave a view, but not its storage."""
        inside = np.zeros(pointers.shape, bool)
        tags, addresses = pointers >> _SHIFT, pointers & _ADDRESS
        for tag in np.unique(tags):
            for region in self.homes(int(tag)):
                if region.end - region.start >= size:
                    inside |= (tags == tag) & (addresses >= region.start) & (addresses <= region.end - size)
        return inside

    def adopt(self, addresses: np.ndarray) -> None:
        """Makes the storages at these addresses the kernel's own: it was handed them as integers.

        Kernels over a list of tensors take a table of addresses. Only the garbage collector knows which tensors those
        are. It is asked only by kernels that turn integers into pointers, once a launch for each of its generations:
        the youngest has most of the tensors, and the oldest nearly all of the other objects.
        """
        for generation in (None, 0, 1, 2):
            strangers = addresses[~self.covers(addresses, 1)]
            if strangers.size == 0:
                return
            for region in self.regions if generation is None else self.live(generation):
                if ((strangers >= region.start) & (strangers < region.end)).any():
                    self.adopted.append(region)

    def live(self, generation: int) -> list[Region]:
        """The storages of all tensors in a generation of the garbage collector, as the launch first found them."""
        if generation not in self.found:
            spans = _live_storages(generation)
            self.found[generation] = [Region(*span, "a tensor given by its address") for span in spans]
        return self.found[generation]


# The running launches, innermost last. The interpreter keeps its own state in globals too, so launches of
# several threads take turns (`launch`).
launches: list[Launch] = []


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a kernel's argument: in tuples, descriptors and Triton's reinterpreting wrapper."""
    if isinstance(value, tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, TensorDescriptor):
        yield from tensors(value.base)
    elif hasattr(value, "data_ptr"):
        yield interpreter._unwrap_tensor(value)


def _live_storages(generation: int) -> set[tuple[int, int]]:
    found = set()
    for thing in gc.get_objects(generation):
        if not issubclass(type(thing), torch.Tensor) or thing.device.type != "cpu":
            continue
        try:
            storage = thing.untyped_storage()
            if storage.device.type == "cpu" and storage.nbytes():
                found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        except (NotImplementedError, RuntimeError):  # sparse, or a subclass that has no storage
            continue
    return found


def _check(access: str, pointers: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    """The addresses of these pointers. Raises if an active one lies outside its storage."""
    addresses = pointers & _ADDRESS
    active = pointers[mask]
    if active.size == 0:
        return addresses
    launch = launches[-1]
    first, last = int(np.minimum.reduce(active)), int(np.maximum.reduce(active))
    if first >> 48 == last >> 48:
        start, end = first & _LOW_BITS, (last & _LOW_BITS) + size
        for region in launch.homes(first >> 48):
            if region.start <= start and end <= region.end:
                return addresses
    outside = active[~launch.covers(active, size)]
    if outside.size:
        raise OutOfBoundsError(
            f"{launch.kernel}, program {interpreter.interpreter_builder.grid_idx}: {access} out of bounds in "
            f"{outside.size} of {active.size} active lanes, {_whereabouts(launch, outside, size)}"
        )
    return addresses


def _whereabouts(launch: Launch, outside: np.ndarray, size: int) -> str:
    """How far these accesses are out of bounds, by argument: the farthest below and above."""
    found = []
    for tag in np.unique(outside >> _SHIFT):
        own = outside[outside >> _SHIFT == tag] & _ADDRESS
        for start in (int(own.min()), int(own.max())):
            for region in launch.homes(int(tag)):
                side = "before the start" if start < region.start else "past the end"
                found.append((region.distance(start, start + size), side, region))
    if not found:
        return f"at address {int(outside.min() & _ADDRESS):#x}, where no tensor that the kernel was given lies"
    distance, side, region = max(found, key=lambda each: each[0])
    return f"up to {distance} bytes {side} of the {region.end - region.start} bytes of {region.argument}"


def _lanes(mask: Any, pointers: Any) -> np.ndarray:
    data = np.asarray(mask.data)
    return data if data.shape == pointers.data.shape else np.broadcast_to(data, pointers.data.shape)


def _load(addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Gather for bfloat16, which Triton's own does not support: it moves the bits."""
    if dtype not in NARROW:
        return native.load(addresses, mask, other, dtype)
    fill = bits(other)
    return from_bits(native.load(addresses, mask, fill, fill.dtype), dtype)


def _store(addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
    native.store(addresses, bits(value) if value.dtype in NARROW else value, mask)


def _narrow_rmw(rmw_op, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Atomics in types that Triton's interpreter does not support, lane by lane, since two may share an address."""
    if rmw_op not in (ir.ATOMIC_OP.FADD, ir.ATOMIC_OP.XCHG):
        raise NotImplementedError(f"no atomic {rmw_op} for {value.dtype}")
    old = np.zeros(value.shape, value.dtype)
    one = np.ones(1, bool)
    for lane in np.argwhere(mask):
        at = tuple(lane)
        address, operand = addresses[at].reshape(1), value[at].reshape(1)
        before = _load(address, one, np.zeros(1, value.dtype), value.dtype)
        _store(address, before + operand if rmw_op == ir.ATOMIC_OP.FADD else operand, one)
        old[at] = before[0]
    return old


def install() -> None:
    builder = original(interpreter, "InterpreterBuilder")
    handle = original(interpreter, "TensorHandle")
    stock_rmw = original(builder, "create_atomic_rmw")
    stock_cas = original(builder, "create_atomic_cas")

    # What follows the operands (cache policies, volatility) differs between versions of Triton, and is no concern here.
    @replace(builder, "create_masked_load")
    def create_masked_load(self, ptrs, mask, other, *policy, **named_policy):
        element = ptrs.get_element_ty()
        dtype = numpy_dtype(element)
        lanes = _lanes(mask, ptrs)
        addresses = _check("load", ptrs.data, lanes, dtype.itemsize)
        fill = np.zeros(ptrs.data.shape, dtype) if other is None else other.data
        return handle(_load(addresses, lanes, fill, dtype), element)

    @replace(builder, "create_masked_store")
    def create_masked_store(self, ptrs, value, mask, *policy, **named_policy):
        dtype = numpy_dtype(ptrs.get_element_ty())
        lanes = _lanes(mask, ptrs)
        addresses = _check("store", ptrs.data, lanes, dtype.itemsize)
        # Stock writes as many bytes as the value's array happens to have, which need not be the pointer's.
        _store(addresses, convert(value.data, dtype), lanes)

    @replace(builder, "create_atomic_rmw")
    def create_atomic_rmw(self, rmw_op, ptr, val, mask, sem, scope):
        lanes = _lanes(mask, ptr)
        addresses = _check("atomic", ptr.data, lanes, val.data.dtype.itemsize)
        if val.data.dtype not in NARROW:
            return stock_rmw(self, rmw_op, handle(addresses, ptr.dtype), val, mask, sem, scope)
        value = np.broadcast_to(val.data, addresses.shape)
        return handle(_narrow_rmw(rmw_op, addresses, value, lanes), val.dtype.scalar)

    @replace(builder, "create_atomic_cas")
    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        dtype = cmp.data.dtype
        addresses = _check("atomic", ptr.data, np.ones(ptr.data.shape, bool), dtype.itemsize)
        ptr = handle(addresses, ptr.dtype)
        if dtype not in NARROW:
            return stock_cas(self, ptr, cmp, val, sem, scope)
        old = stock_cas(self, ptr, handle(bits(cmp.data), cmp.dtype), handle(bits(val.data), val.dtype), sem, scope)
        return handle(from_bits(old.data, dtype), cmp.dtype.scalar)

    @replace(builder, "create_int_to_ptr")
    def create_int_to_ptr(self, src, dst_type):
        addresses = bits(src.data)
        launches[-1].adopt(addresses)
        return handle(addresses, dst_type.scalar)

    @replace(builder, "create_ptr_to_int")
    def create_ptr_to_int(self, src, dst_type):
        return handle(from_bits(src.data & _ADDRESS, numpy_dtype(dst_type)), dst_type.scalar)
