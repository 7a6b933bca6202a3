"""Many rows of x and a quantized weight on sm_90: the kernel on a GPU; elsewhere its own code, on NumPy and threads."""

import dataclasses
import re
import threading
import types

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import BF16
from test_weight_only import int4, int8

from rooftile import runtime
from rooftile.cases.check import relative_error
from rooftile.ops.gemm import choose, dispatch
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem
from rooftile.ops.gemm.packing import pack_int4

kernel = pytest.importorskip("rooftile.ops.gemm.hopper_dequantize")
hopper = pytest.importorskip("rooftile.ops.gemm.hopper")
primitives = pytest.importorskip("rooftile.primitives.gluon")
TARGET = runtime.TARGETS["sm_90"]
CONFIGS = (
    GemmConfig("hopper", 128, 256, 64, num_warps=8, num_stages=5),
    GemmConfig("hopper", 256, 128, 64, num_warps=8, num_stages=4),
    GemmConfig("hopper", 128, 192, 64, num_warps=12, num_stages=6),
    GemmConfig("hopper", 128, 128, 64, num_warps=8, num_stages=8),
    GemmConfig("hopper", 128, 64, 64, num_warps=4, num_stages=8),
    GemmConfig("hopper", 64, 192, 64, num_warps=12, num_stages=8),
    GemmConfig("hopper", 64, 128, 64, num_warps=8, num_stages=3),
    GemmConfig("hopper", 32, 128, 64, num_warps=4, num_stages=3),
)
FORMATS = [("int8", 0, False), ("fp8", 0, False), *(("int4", g, o) for g in (64, 128) for o in (False, True))]


def problem(m=512, n=4096, k=4096, weight="int8", group=0, dtype=BF16, **more):
    return Problem(m, n, k, dtype, weight=weight, group=group, **more)


def of_group(weight, group, offsets):
    return {"weight": weight, "group": group, "offsets": offsets}


# The choice


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_it_takes_what_its_tests_give_it(config, form):
    assert choose.can_implement(problem(77, 200, 384, **of_group(*form)), config, TARGET) is None


@pytest.mark.parametrize(
    ("change", "sizes", "reason"),
    [
        ({}, {"dtype": torch.float32}, "takes bfloat16 and float16 with a weight of int8, not torch.float32"),
        (
            {},
            {"dtype": torch.half, "weight": "int4", "group": 128},
            "takes bfloat16 with a weight of int4, not ",
        ),
        ({}, {"dtype": torch.half}, None),
        ({}, {"weight": "int4", "group": 32}, "takes groups of 64 and 128 of a K that 128 divides, not of 32 and 4096"),
        ({}, {"weight": "int4", "group": 64, "k": 4160}, "not of 64 and 4160"),
        ({}, {"k": 4104}, "whose rows begin at multiples of 16 bytes"),
        ({}, {"n": 4100}, "whose rows begin at multiples of 16 bytes"),
        ({}, {"w_aligned": False}, "whose rows begin at multiples of 16 bytes"),
        ({}, {"k": 4112}, None),
        ({"split_k": 2}, {}, "split_k, pingpong, slices and prefetch are for other kernels"),
        ({"num_warps": 4}, {}, "block_n is 256: kernel 'hopper' takes 64 or 128 of a quantized weight for 4 of"),
        ({"block_k": 128}, {}, "the tile is 128 x 128: kernel 'hopper' takes 32 to 256 rows of x, and 64 a step"),
        ({"block_m": 256}, {}, "the tile has 256 sums for each thread of 8 warps, expected at most 128"),
        ({"num_stages": 2}, {}, "num_stages is 2, expected at least 3"),
        ({"num_stages": 7}, {}, "num_stages is 7: 262656 bytes of tiles, expected at most 232448"),
    ],
)
def test_what_it_can_not_do_is_refused(change, sizes, reason):
    refused = choose.can_implement(problem(**sizes), dataclasses.replace(CONFIGS[0], **change), TARGET)
    assert refused is None if reason is None else reason in refused


def test_many_rows_are_dequantized_within_the_gemm():
    """On sm_90 alone, and where TMA and the steps take the sizes."""
    for form in FORMATS:
        for m, n, k in ((129, 4096, 4096), (512, 6144, 4096), (2048, 28672, 4096), (4096, 4096, 14336)):
            for target in runtime.TARGETS.values():
                for dtype in (BF16, torch.half):
                    p = problem(m, n, k, dtype=dtype, **of_group(*form))
                    c = choose.choose(p, target)
                    within = target.gluon and (dtype == BF16 or form[0] != "int4")
                    first = not within and dtype == BF16
                    assert c.kernel == ("hopper" if within else "dequantize" if first else "skinny"), (p, target.arch)
                    assert choose.can_implement(p, c, target) is None
        assert choose.choose(problem(65, **of_group(*form)), TARGET).kernel == "hopper"
        assert choose.choose(problem(64, **of_group(*form)), TARGET).kernel == "skinny"
    assert choose.choose(problem(weight="int4", group=32), TARGET).kernel == "dequantize"
    assert choose.choose(problem(k=4100), TARGET).kernel == "dequantize"
    assert choose.choose(problem(n=49155), TARGET).kernel == "dequantize"


def test_tiles_leave_few_sms_idle():
    """512 rows of Llama-3-8B: every SM has a tile in most rounds."""
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        c = choose.choose(problem(512, n, k), TARGET)
        tiles = -(-512 // c.block_m) * -(-n // c.block_n)
        rounds = -(-tiles // TARGET.multiprocessors)
        assert tiles >= 0.8 * rounds * TARGET.multiprocessors, (n, k, c)


# The kernel's own code, on NumPy


class Tile(np.ndarray):
    """A tensor of a kernel."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)

    def permute(self, *axes):
        return self.transpose(*axes)

    def split(self):
        return self[..., 0], self[..., 1]


def tile(a):
    return np.ascontiguousarray(a).view(Tile)


def halves(word, kind):
    """Both halves of words as numbers."""
    return word.astype(np.uint32).view({"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}[kind]).reshape(-1, 2)


def rounded(y, kind):
    """Exact numbers (n, 2), rounded once, as words."""
    return y.astype({"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}[kind]).view(np.uint32).reshape(-1)


def prmt(a, b, selector):
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(both)
    for i in range(4):
        at = selector >> 4 * i & 15
        assert at < 8, "no sign is replicated"
        out |= (both >> np.uint64(8 * at) & np.uint64(0xFF)) << np.uint64(8 * i)
    return out.astype(np.uint32)


def run_ptx(text, operands, outputs):
    """The words that instructions make of words: those that the kernel's conversions have."""
    held = {f"${outputs + i}": np.asarray(word).astype(np.uint32) for i, word in enumerate(operands)}

    def value(name):
        return held[name] if name in held else np.full_like(held[f"${outputs}"], int(name, 0))

    for line in text.strip("{} ").split(";"):
        found = re.fullmatch(r"\s*([\w.]+)\s+(.*?)\s*", line)
        if found is None or line.split()[0] == ".reg":
            continue
        op, names = found[1], re.sub(r"\{(.*?), (.*?)\}", r"\1|\2", found[2]).split(", ")
        to, given = names[0], names[1:]
        kind = op.rsplit(".", 1)[-1]
        if op == "prmt.b32":
            held[to] = prmt(value(given[0]), value(given[1]), int(given[2], 0))
        elif op == "lop3.b32":
            assert int(given[3], 0) == 0xEA, "(a & b) | c"
            held[to] = value(given[0]) & value(given[1]) | value(given[2])
        elif op in ("and.b32", "xor.b32"):
            held[to] = (np.bitwise_and if op == "and.b32" else np.bitwise_xor)(value(given[0]), value(given[1]))
        elif op == "shr.u32":
            held[to] = value(given[0]) >> value(given[1])
        elif op == "mov.b32" and "|" in to:
            low, high = to.split("|")
            held[low], held[high] = value(given[0]) & np.uint32(0xFFFF), value(given[0]) >> np.uint32(16)
        elif op == "mov.b32":
            held[to] = value(given[0])
        elif op == "cvt.u16.u32":
            held[to] = value(given[0]) & np.uint32(0xFFFF)
        elif op == "cvt.rn.f16x2.e4m3x2":
            of_8_bits = value(given[0]).astype(np.uint16).view(ml_dtypes.float8_e4m3fn).reshape(-1, 2)
            held[to] = rounded(of_8_bits.astype(np.float64), "f16x2")
        elif op == "cvt.f32.f16":
            held[to] = value(given[0]).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        elif op == "cvt.rn.bf16x2.f32":
            high, low = (value(name).view(np.float32).astype(np.float64) for name in given)
            held[to] = rounded(np.stack((low, high), -1), "bf16x2")
        elif kind in ("bf16x2", "f16x2"):
            a, b, *c = (halves(value(name), kind).astype(np.float64) for name in given)
            held[to] = rounded(a + b if op.startswith("add") else a * b + sum(c), kind)
        else:
            raise AssertionError(f"{op} is not known")
    return [held[f"${i}"] for i in range(outputs)]


def asm(text, constraints, args, dtype, is_pure, pack):
    """`inline_asm_elementwise`: each element is given with those behind it, and as one of those behind another."""
    args = np.broadcast_arrays(*args)
    words = [np.ascontiguousarray(a).reshape(-1).astype(np.int64 if a.dtype.kind == "i" else a.dtype) for a in args]
    words = [w.view(np.uint32) if w.dtype == np.float32 else w.astype(np.uint32) for w in words]
    results = run_ptx(text, [np.roll(w, -i) for w in words for i in range(pack)], pack)
    assert all((np.roll(r, i) == results[0]).all() for i, r in enumerate(results))
    return tile(results[0].view(np.int32).reshape(args[0].shape))


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, more):
        return Pointer(self.memory, self.at + more)


class Memory:
    """Shared memory."""

    def __init__(self, a):
        self.a = a

    def index(self, i):
        assert 0 <= i < len(self.a)
        return Memory(self.a[i])

    def permute(self, axes):
        return Memory(self.a.transpose(axes))

    def slice(self, start, length):
        return Memory(self.a[start : start + length])

    def load(self, layout):
        return tile(self.a.copy())

    def store(self, y):
        self.a[...] = y


class Descriptor:
    def __init__(self, a, block):
        self.a, self.block, self.shape = a, block, a.shape
        self.dtype = a.dtype
        self.block_type = types.SimpleNamespace(nbytes=int(np.prod(block)) * a.itemsize)

    def tile(self, at):
        """What is there, and zeros out of bounds."""
        out = np.zeros(self.block, self.a.dtype)
        part = self.a[at[0] : at[0] + self.block[0], at[1] : at[1] + self.block[1]]
        out[: part.shape[0], : part.shape[1]] = part
        return out


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have landed."""

    def __init__(self, changed):
        self.changed, self.phase, self.bytes = changed, 0, 0

    def init(self, count):
        self.count = self.missing = count

    def update(self, arrivals, more_bytes):
        with self.changed:
            self.missing -= arrivals
            self.bytes += more_bytes
            assert self.missing >= 0
            if self.missing == 0 and self.bytes == 0:
                self.phase, self.missing = self.phase ^ 1, self.count
            self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase != parity, timeout=20), "nobody arrives"


class Sums:
    """An accumulator, which is computed as late as the kernel allows: operands that change before are found out."""

    def __init__(self, value, started=()):
        self.value, self.started = value, started

    def wait(self, pending):
        most = len(self.started) - pending
        value = self.value
        for w, x in self.started[: max(0, most)]:
            value = value + w.astype(np.float32) @ x.a.astype(np.float32)
        return Sums(value, self.started[max(0, most) :]) if pending else tile(value)


def started(w, x, acc, is_async):
    acc = acc if isinstance(acc, Sums) else Sums(np.asarray(acc))
    return Sums(acc.value, (*acc.started, (w, x)))


class Machine:
    """One SM: the kernel's functions with `gl`, TMA and wgmma replaced, so that NumPy and threads run them."""

    def __init__(self, program, programs, generator):
        changed, stores = threading.Condition(), threading.local()
        rng, lock = generator, threading.Lock()

        def load(pointer):
            return tile(pointer.memory[pointer.at])

        def async_load(descriptor, at, bar, memory):
            memory.a.view(np.uint8)[...] = 0xFF  # NaN, until the bytes land

            def land():
                memory.a.view(descriptor.a.dtype).reshape(descriptor.block)[...] = descriptor.tile(at)
                bar.update(0, -descriptor.block_type.nbytes)

            with lock:
                delay = float(rng.random()) * 2e-3
            threading.Timer(delay, land).start()

        def store_wait(pending):
            waiting = stores.__dict__.setdefault("waiting", [])
            for descriptor, at, memory in waiting[: max(0, len(waiting) - pending)]:
                part = descriptor.a[at[0] : at[0] + descriptor.block[0], at[1] : at[1] + descriptor.block[1]]
                part[...] = memory.a[: part.shape[0], : part.shape[1]]
            stores.waiting = waiting[max(0, len(waiting) - pending) :]

        def async_store(descriptor, at, memory):
            stores.__dict__.setdefault("waiting", []).append((descriptor, at, memory))

        gl = types.SimpleNamespace(
            constexpr=lambda y: y, static_range=range, cdiv=lambda a, b: -(-a // b), minimum=np.minimum,
            where=lambda c, a, b: a if c else b, program_id=lambda _: program, num_programs=lambda _: programs,
            full=lambda shape, y, dtype, layout: tile(np.full(shape, y, dtype)),
            arange=lambda a, b, layout: tile(np.arange(a, b)), load=load, SliceLayout=lambda *_: None,
            inline_asm_elementwise=asm, join=lambda a, b: np.stack((a, b), -1).view(Tile),
            convert_layout=lambda y, layout, assert_trivial=False: y,
            float32=np.float32, int64=np.int64, int32=np.int32, uint16=np.uint16, bfloat16=ml_dtypes.bfloat16,
        )  # fmt: skip
        self.changed = changed
        replaced = {
            "gl": gl, "tl": gl, "STEP": 64, "_CHUNK": 64, "fence_async_shared": lambda: None, "async_load": async_load,
            "load_tile": async_load, "async_store": async_store, "warpgroup_mma": started,
            "warpgroup_mma_wait": lambda pending, sums: sums[0].wait(pending),
            "tma": types.SimpleNamespace(store_wait=store_wait),
            "mbarrier": types.SimpleNamespace(
                wait=lambda bar, parity: bar.wait(parity), arrive=lambda bar, count: bar.update(count, 0),
                expect=lambda bar, size: bar.update(0, size) or bar.update(1, 0),
            ),
            "_conversion_of": lambda weight, dtype: kernel._conversion_of.fn(
                weight, types.SimpleNamespace(is_bf16=lambda: dtype == ml_dtypes.bfloat16)
            ),
            "split_columns": lambda a, n: tuple(tile(part) for part in np.split(a, n, 1)),
        }  # fmt: skip
        constants = {k: getattr(v, "value", v) for k, v in vars(kernel).items() if k.isupper()}
        names = (
            "grouped_tile", "corner", "count_tiles", "advance", "next_slot", "steps_of", "_stored_at", "_produce",
            "_load_scales", "_twice", "_dequantize_int4", "_dequantize", "_load_rows", "_parts", "_multiply",
            "_write_chunk", "_consume",
        )  # fmt: skip
        space = {**constants, **replaced}
        for name in names:
            function = next(getattr(module, name) for module in (kernel, hopper, primitives) if hasattr(module, name))
            space[name] = types.FunctionType(function.fn.__code__, space, name)
        self.space = space

    def run(self, t, w, x, out, residual, scale, bias, dtype):
        """The kernel, as `hopper_gemm_dequantize` starts it."""
        x_ring = Memory(np.full(t.x_ring, np.nan, dtype))
        w_ring = Memory(np.zeros(t.weight_ring, np.uint16))
        out_ring = Memory(np.full(t.out_ring, np.nan, dtype))
        ready, free = ([Barrier(self.changed) for _ in range(t.stages)] for _ in range(2))
        for a, b in zip(ready, free, strict=True):
            a.init(1)
            b.init(t.consumers)
        bars = [types.SimpleNamespace(index=lambda i, of=of: of[i]) for of in (ready, free)]
        ring, size = (w_ring, x_ring, *bars), (out.shape[1], out.shape[0], x.shape[1])
        w_desc, x_desc = Descriptor(w, t.weight_block), Descriptor(x, t.x_block)
        out_desc = Descriptor(out, t.out_block)
        residual_desc = None if residual is None else Descriptor(residual, [t.cols, 64])
        pointers = [None if a is None else Pointer(a.reshape(-1)) for a in (scale, bias)]
        failed = []

        def guarded(name, *args):
            try:
                self.space[name](*args)
            except BaseException as error:
                failed.append(error)

        rest = (ring, size)
        threads = [threading.Thread(target=guarded, args=("_produce", w_desc, x_desc, residual_desc, *rest, t))]
        for mine in range(t.consumers):
            given = (out_desc, *pointers, out_ring, *rest, mine, residual is not None, t)
            threads.append(threading.Thread(target=guarded, args=("_consume", *given)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def drawn(rng, weight, n, k, group, offsets, scale_dtype):
    """A weight as it is stored, its scales, and its elements as float64 with their scales."""
    if weight == "int4":
        q = rng.integers(-8, 8, (n, k)).astype(np.int8)
        stored = pack_int4(torch.from_numpy(q), group).numpy()
        scale = rng.uniform(0.5, 2, (n, k // group)).astype(scale_dtype)
        offset = rng.integers(-15, 16, scale.shape) if offsets else np.zeros(scale.shape)
        wide = (q + offset.repeat(group, 1)) * scale.astype(np.float64).repeat(group, 1)
        given = np.stack((scale, offset.astype(scale_dtype)), -1) if offsets else scale
        return stored, given, wide.astype(ml_dtypes.bfloat16).astype(np.float64)
    stored = rng.integers(-128, 128, (n, k)).astype(np.int8)
    if weight == "fp8":
        stored = (stored.astype(np.float32) * 1.75).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, n).astype(scale_dtype)
    return stored, scale, stored.astype(np.float64) * scale.astype(np.float64)[:, None]


BFLOAT16 = ml_dtypes.bfloat16
POINTS = [
    # config, weight, group, offsets, dtype, scale dtype, m, n, k, bias, residual
    (0, "int8", 0, False, BFLOAT16, np.float32, 40, 200, 144, True, True),
    (1, "int8", 0, False, np.float16, np.float32, 130, 136, 320, False, False),
    (2, "int8", 0, False, BFLOAT16, BFLOAT16, 200, 200, 256, True, True),
    (6, "fp8", 0, False, BFLOAT16, np.float32, 65, 264, 400, True, True),
    (5, "fp8", 0, False, np.float16, np.float32, 1, 8, 128, False, True),
    (7, "int4", 128, False, BFLOAT16, BFLOAT16, 33, 72, 640, True, True),  # five groups: the last has no second one
    (6, "int4", 128, True, BFLOAT16, np.float32, 70, 136, 384, False, True),
    (3, "int4", 64, True, BFLOAT16, np.float16, 150, 136, 256, True, False),
    (4, "int4", 64, False, BFLOAT16, np.float32, 17, 64, 128, False, False),
    (0, "int4", 128, True, BFLOAT16, BFLOAT16, 20, 264, 256, True, True),
]


@pytest.mark.each_once
@pytest.mark.parametrize("point", POINTS, ids=lambda p: " ".join(map(str, p)).replace("<class ", "").replace(">", ""))
@pytest.mark.parametrize("programs", [1, 3])
def test_its_code_multiplies(point, programs):
    """Weights, epilogue, walk over tiles and barriers: TMA is slow at random, tensor cores as late as they may be."""
    i, weight, group, offsets, dtype, scale_dtype, m, n, k, with_bias, with_residual = point
    rng = np.random.default_rng(0)
    t = kernel.tiling_of(CONFIGS[i], weight, group, offsets, TARGET.shared_memory)
    t = dataclasses.replace(t, stages=3)
    stored, scale, wide = drawn(rng, weight, n, k, group, offsets, scale_dtype)
    x, residual = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (m, n)))
    bias = rng.standard_normal(n).astype(np.float32) if with_bias else None
    out = np.full((m, n), np.nan, dtype)
    given = residual if with_residual else None
    for program in range(programs):
        Machine(program, programs, rng).run(t, stored, x, out, given, scale, bias, np.dtype(dtype))
    expected = x.astype(np.float64) @ wide.T
    expected += (0 if bias is None else bias) + (residual.astype(np.float64) if with_residual else 0)
    error = np.linalg.norm(out.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < (4e-3 if dtype == BFLOAT16 else 5e-4)


def test_elements_of_8_bits_are_exact():
    pairs = np.arange(1 << 16, dtype=np.int32)
    low, high = (pairs & 0xFF).astype(np.uint8), (pairs >> 8).astype(np.uint8)
    for stored in (np.int8, ml_dtypes.float8_e4m3fn):
        for ptx, dtype in (("BF16", BFLOAT16), ("FP16", np.float16)):
            text = getattr(kernel, ("_INT8_" if stored == np.int8 else "_E4M3_") + ptx).value
            words = asm(text, "=r,r", [pairs], np.int32, True, 1).view(np.uint32)
            for y, of_8_bits in ((words & 0xFFFF, low), (words >> 16, high)):
                found = y.astype(np.uint16).view(dtype).astype(np.float64)
                np.testing.assert_array_equal(found, of_8_bits.view(stored).astype(np.float64))


@pytest.mark.parametrize("scale_dtype", [BFLOAT16, np.float16, np.float32])
def test_nibbles_are_scaled_as_if_rounded_once(scale_dtype):
    """Of a scale with 8 bits exactly so; of others to the last bit but for what is nearly halfway."""
    rng = np.random.default_rng(0)
    scales = rng.uniform(1e-3, 3, 200).astype(scale_dtype)
    pairs = tile(np.broadcast_to(np.arange(1 << 16, dtype=np.int32)[None, ::61], (200, 1075)))
    space = Machine(0, 1, rng).space
    for offset in (-15, 0, 15):
        offsets = np.full(200, offset).astype(scale_dtype)
        t = kernel.DequantizeTiling(200, 64, 1, 3, 1, 8, "int4", 128, True)
        for shift in (0, 4):
            words = space["_dequantize_int4"](pairs, (tile(scales), tile(offsets)), shift, t).view(np.uint32)
            for half in (0, 16):
                found = ((words >> half) & 0xFFFF).astype(np.uint16).view(BFLOAT16).astype(np.float64)
                q = (pairs >> (half // 2 + shift) & 15) - 8 + offset
                product = q * scales.astype(np.float64)[:, None]
                expected = product.astype(BFLOAT16).astype(np.float64)
                if scale_dtype == BFLOAT16:
                    np.testing.assert_array_equal(found, expected)
                else:
                    assert (np.abs(found - product) <= (2.0**-8 + 2.0**-16) * np.abs(product)).all()
                    assert (found == expected).mean() > 0.98


# The kernel


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_it_is_the_same_function(config, form, device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernel is for sm_90, and the GPU is {runtime.target(device).arch}")
    weight, group, offsets = form
    for dtype in (BF16, torch.half) if weight != "int4" else (BF16,):
        for m, n, k in ((1, 8, 128), (77, 200, 384), (513, 1032, 640), (2100, 2056, 1024)):
            x, residual = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (m, n)))
            bias = torch.randn(n, device=device)
            if group:
                q, stored, scale = int4(n, k, group, device, BF16 if offsets else None)
                wide, numbers = scale.double().repeat_interleave(group, 1), q.double()
                if offsets:
                    offset = torch.randint(-15, 16, scale.shape, device=device)
                    numbers += offset.repeat_interleave(group, 1)
                    scale = torch.stack((scale, offset.to(scale.dtype)), -1)
                # Weights as the kernel multiplies them: the sum of eight times their roundings is beyond the bound.
                expected = x.double() @ (numbers * wide).to(BF16).double().T
            else:
                stored, scale = int8(n, k, device)
                stored = stored if weight == "int8" else stored.float().to(torch.float8_e4m3fn)
                expected = x.double() @ (stored.double() * scale.double()[:, None]).T
            for b, r in ((None, None), (bias, None), (None, residual), (bias.to(dtype), residual)):
                out = torch.full((m, n), torch.nan, device=device, dtype=dtype)
                o = Operands(x, stored, out, b, r, weight_scale=scale)
                p = dispatch.problem_of(o)
                assert choose.can_implement(p, config, runtime.target(device)) is None
                start = dispatch.starter(p, o, config)
                start(x, stored, out, b, r, None, None, scale)
                wanted = expected + (0 if b is None else b.double()) + (0 if r is None else r.double())
                assert relative_error(out, wanted) < (4e-3 if dtype == BF16 else 5e-4), (m, n, k, dtype)
                again = torch.full_like(out, torch.nan)
                start(x, stored, again, b, r, None, None, scale)
                assert torch.equal(out, again)
