"""decode_attention over a latent cache for sm_90: its threads as threads on the CPU, what is refused, and the choice.

Gluon has no interpreter. So the kernel's own functions are run here in Python, over stand-ins for shared memory,
barriers, TMA copies and tensor cores, each warpgroup as a thread. The stand-ins are as hostile as the GPU may be: a
copy spoils its destination when it starts and lands later, in any order; a product reads its operands when it is waited
for; and a wait that nothing ends is an error.
"""

import dataclasses
import functools
import itertools
import queue
import random
import re
import threading
import time
import types

import pytest
import torch
from test_attention_varlen_hopper import value
from test_decode_attention import paged

from rooftile import runtime
from rooftile.cases import all_cases
from rooftile.cases.check import relative_error
from rooftile.cases.decode_attention import TOLERANCES
from rooftile.inspect import compile_on, plan
from rooftile.ops.decode_attention import DecodeConfig, decode_attention, schedule
from rooftile.ops.decode_attention.choose import choose, decode, encode, row_tile, shape_of
from rooftile.primitives.paging import PAGES, page_step
from rooftile.reference import decode_attention as reference

import triton  # isort: skip
import triton.language as tl  # isort: skip

hopper = pytest.importorskip("rooftile.ops.decode_attention.hopper_latent")
parts, many, few = (
    pytest.importorskip(f"rooftile.ops.decode_attention.hopper_latent_{name}")
    for name in ("parts", "many_rows", "few_rows")
)
gluon = pytest.importorskip("rooftile.primitives.gluon")
softmax = pytest.importorskip("rooftile.primitives.warpgroup_softmax")
MODULES = hopper, parts, many, few, gluon, softmax

BF16 = torch.bfloat16
TARGET = runtime.TARGETS["sm_90"]
CONFIG = DecodeConfig(64, 16, 8, 2, 1, pdl=True, kernel="hopper")
DIM, VALUES = 576, 512


# The work of each program, by the schedule itself


@triton.jit
def _work_kernel(
    out_ptr, counts_ptr, lengths_ptr, n_seqs, n_new, kv_heads, capacity, programs, MIN_BLOCKS: tl.constexpr,
    SLACK: tl.constexpr, MOST: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lengths = schedule.load_lengths(lengths_ptr, n_seqs, N)
    partition, at, stop = schedule.plan_work(
        lengths, program, n_seqs, n_new, kv_heads, capacity, programs, None, N, 64, MIN_BLOCKS, SLACK
    )
    count = 0
    while at < stop:
        seq, head, n_keys, first, low, high, at, slot, begins, stride, second, n = schedule.work_at(
            at, stop, program, programs, lengths, partition, n_new, kv_heads, capacity, None, N, 64
        )
        to = out_ptr + (program * MOST + count) * 11
        tl.store(to, seq)
        tl.store(to + 1, head)
        tl.store(to + 2, n_keys)
        tl.store(to + 3, first)
        tl.store(to + 4, low)
        tl.store(to + 5, high)
        tl.store(to + 6, slot)
        tl.store(to + 7, n)
        tl.store(to + 8, begins)
        tl.store(to + 9, stride)
        tl.store(to + 10, second)
        count += 1
    tl.store(counts_ptr + program, count)


def work_of(lengths, n_new, kv_heads, capacity, programs, min_blocks, slack, device):
    """Of each program: (sequence, KV head, keys, first block, begin, end, slot, splits of the item, their first
    program, how many programs later the next one is, 1 if the first program has another item before).
    """
    most, n = len(lengths) * kv_heads + 2, 1 << (len(lengths) - 1).bit_length()
    out = torch.zeros(programs, most, 11, dtype=torch.int32, device=device)
    counts = torch.zeros(programs, dtype=torch.int32, device=device)
    of_lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    _work_kernel[(programs,)](
        out, counts, of_lengths, len(lengths), n_new, kv_heads, capacity, programs, min_blocks, slack, most, n
    )
    return [out[p, : counts[p]].tolist() for p in range(programs)]


# Stand-ins


class _Int(int):
    value = property(int)


class _Float(float):
    value = property(float)


class Tile(torch.Tensor):
    """A tensor of Gluon's; layouts are not modelled."""

    type = types.SimpleNamespace(layout=types.SimpleNamespace(dim=0))


def tile(x):
    return torch.as_tensor(x).as_subclass(Tile)


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, n):
        return Pointer(self.memory, self.at + n)

    def __getitem__(self, i):
        return Pointer(self.memory, self.at[i])


def load(at):
    return tile(at.memory[int(at.at)])


def store(at, x, mask):
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=at.memory.dtype)
    shape = torch.broadcast_shapes(at.at.shape, x.shape)
    places, x, mask = (t.expand(shape)[mask.expand(shape)] if t is not mask else t for t in (at.at, x, mask))
    at.memory[places.as_subclass(torch.Tensor).long()] = x.as_subclass(torch.Tensor)


def atomic_add(at, x, mask, sem):
    """What was there before."""
    assert mask.sum() == 1
    places = at.at.as_subclass(torch.Tensor).long() * mask
    before = at.memory[places].clone()
    at.memory[places[mask]] += x[mask].as_subclass(torch.Tensor)
    return tile(before)


class Region:
    """A buffer in shared memory: 64-column parts, one after another."""

    def __init__(self, parts, shape, dtype):
        self.parts, self.shape, self.dtype, self.transposed = parts, shape, dtype, False

    def permute(self, order):
        assert order == (1, 0)
        flipped = Region(self.parts, self.shape, self.dtype)
        flipped.transposed = True
        return flipped

    def load(self, _layout=None):
        found = self.parts.clone()
        if len(self.shape) == 2:
            found = found.view(-1, self.shape[0], min(self.shape[1], 64)).transpose(0, 1).reshape(self.shape)
        return tile(found.T if self.transposed else found.view(self.shape))

    def store(self, x):
        assert self.shape[-1] <= 64
        assert tuple(x.shape) == tuple(self.shape)
        self.parts.copy_(x.as_subclass(torch.Tensor).reshape(self.parts.shape))


class Shared:
    """Buffers in shared memory."""

    def __init__(self, flat, shape, dtype):
        self.flat, self.shape, self.dtype = flat, shape, dtype

    def index(self, i):
        i, shape = int(value(i)), [int(value(n)) for n in self.shape[1:]]
        n = torch.Size(shape).numel()
        assert 0 <= i < self.shape[0]
        return Region(self.flat[i * n : (i + 1) * n], shape, self.dtype)

    def __getattr__(self, name):  # a single buffer
        return getattr(Region(self.flat, [int(value(n)) for n in self.shape], self.dtype), name)


class Barrier:
    def __init__(self):
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0

    def add(self, arrivals, nbytes):
        with self.changed:
            self.left -= arrivals
            self.bytes += nbytes
            assert self.left >= 0, "an arrival too many"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.count, self.phase + 1
                self.changed.notify_all()


class Sm:
    """One program's SM."""

    def __init__(self, program, draw):
        self.program, self.draw, self.copies, self.failures = program, draw, queue.Queue(), []
        self.local = threading.local()
        self.ended = False

    def allocate(self, dtype, shape, _layout):
        shape = [int(value(n)) for n in shape]
        if dtype == "barrier":
            barriers = [Barrier() for _ in range(shape[0])]
            return types.SimpleNamespace(index=lambda i: barriers[int(value(i))])
        poison = -(1 << 30) if dtype == torch.int32 else float("nan")
        return Shared(torch.full((torch.Size(shape).numel(),), poison, dtype=dtype), shape, dtype)

    def init(self, bar, count):
        bar.count = bar.left = count

    def wait(self, bar, parity):
        time.sleep(self.draw.random() * 2e-4)
        with bar.changed:
            parity = int(parity)
            if not bar.changed.wait_for(lambda: bar.phase % 2 != parity or self.failures, timeout=20) or self.failures:
                raise TimeoutError("nothing ends a wait")

    def load_tile(self, desc, at, bar, memory):
        memory.parts.fill_(float("nan"))
        self.copies.put((desc, [int(value(n)) for n in at], bar, memory.parts))

    def land(self):
        """The copies, each a while after it was started, in any order."""
        waiting = []
        while not self.ended:
            while not self.copies.empty():
                waiting.append(self.copies.get())
            if waiting and self.draw.random() < 0.7:
                desc, at, bar, to = waiting.pop(self.draw.randrange(len(waiting)))
                to.copy_(desc.read(at).reshape(to.shape))
                bar.add(0, -desc.block_type.nbytes)
            else:
                time.sleep(1e-4)

    def mma(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        started = types.SimpleNamespace(value=None)

        def compute():
            left, right = (t.load() if isinstance(t, (Region, Shared)) else t for t in (a, b))
            product = (left.double() @ right.double()).float()
            before = acc.value if isinstance(acc, types.SimpleNamespace) else acc
            started.value = tile(before + product if use_acc else product)

        self.local.__dict__.setdefault("started", []).append(compute)
        return started

    def mma_wait(self, n, deps):
        time.sleep(self.draw.random() * 2e-4)
        while len(self.local.started) > n:
            self.local.started.pop(0)()
        results = tuple(d.value if isinstance(d, types.SimpleNamespace) else d for d in deps)
        assert all(r is not None for r in results), "a result that nothing waits for"
        return results[0] if len(results) == 1 else results

    def specialize(self, functions, warps, registers):
        assert [len(warps), warps[-1]] == [len(functions) - 1, 1]

        def run(function, args):
            try:
                function(*args)
            except BaseException as error:  # for the test's own thread
                self.failures.append(error)

        threads = [threading.Thread(target=run, args=f) for f in functions]
        lander = threading.Thread(target=self.land)
        for t in (*threads, lander):
            t.start()
        for t in threads:
            t.join()
        self.ended = True
        lander.join()
        if self.failures:
            raise self.failures[0]


class Described:
    """A TMA descriptor of a tensor: it reads what the GPU would."""

    def __init__(self, t, d):
        self.t, self.d, self.dtype = t, d, t.dtype
        self.block_type = types.SimpleNamespace(nbytes=torch.Size(d.block).numel() * t.element_size())
        self.storage = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)

    def read(self, at):
        found = torch.zeros(self.d.block, dtype=self.t.dtype)
        for offset in itertools.product(*(range(n) for n in self.d.block[:-1])):
            row = [a + o for a, o in zip(at, (*offset, 0), strict=True)]
            if all(0 <= n < size for n, size in zip(row[:-1], self.d.shape[:-1], strict=True)):
                cols = max(0, min(self.d.block[-1], self.d.shape[-1] - row[-1]))
                first = sum(n * stride for n, stride in zip(row, self.d.strides, strict=True)) % 2**64
                first = (first * self.t.element_size() % 2**64) // self.t.element_size() + self.t.storage_offset()
                found[offset][:cols] = self.storage[first : first + cols]
        return found


def language(sm):
    """Triton's language as far as the kernel uses it."""

    def extreme(scalar, vector):
        return lambda a, b: (
            vector(torch.as_tensor(a), torch.as_tensor(b)).as_subclass(Tile)
            if any(isinstance(x, torch.Tensor) and x.dim() for x in (a, b))
            else scalar(a, b)
        )

    def where(condition, a, b):
        if isinstance(condition, torch.Tensor) and condition.dim():
            return tile(torch.where(condition, torch.as_tensor(a), torch.as_tensor(b)))
        return a if condition else b

    def layout(*_args, **_kwargs):
        return None

    return types.SimpleNamespace(
        constexpr=lambda x: x,
        static_range=lambda n: range(int(n)),
        int32=torch.int32,
        int64="barrier",
        float32=torch.float32,
        program_id=lambda _axis: tile(sm.program),
        arange=lambda a, b, layout: tile(torch.arange(int(a), int(b))),
        full=lambda shape, x, dtype, _: tile(torch.full([int(n) for n in shape], float(x)).to(dtype)),
        where=where,
        minimum=extreme(min, torch.minimum),
        maximum=extreme(max, torch.maximum),
        max=lambda x, axis: tile(x.amax(axis)),
        sum=lambda x, axis: tile(x.sum(axis)),
        exp2=torch.exp2,
        log2=torch.log2,
        convert_layout=lambda x, _layout, assert_trivial=False: x,
        load=load,
        store=store,
        atomic_add=atomic_add,
        thread_barrier=lambda: None,
        allocate_shared_memory=sm.allocate,
        warp_specialize=sm.specialize,
        SliceLayout=layout, BlockedLayout=layout, SwizzledSharedLayout=layout, NVMMASharedLayout=layout,
        NVMMADistributedLayout=layout, DotOperandLayout=layout,
    )  # fmt: skip


@pytest.fixture
def run_program(monkeypatch):
    """Runs a program of the kernel on an `Sm`, with the work given."""
    constexpr = hopper.gl.constexpr
    for module in MODULES:
        for name, x in list(vars(module).items()):
            if isinstance(x, constexpr):
                of = {float: _Float, int: _Int}.get(type(x.value), lambda layout: layout)
                monkeypatch.setattr(module, name, of(x.value))
            elif hasattr(x, "fn") and hasattr(x, "arg_names"):
                monkeypatch.setattr(module, name, x.fn)
    monkeypatch.setattr(Tile, "to", lambda self, dtype: self if dtype == "barrier" else torch.Tensor.to(self, dtype))

    def run(sm, work, *args):
        for module in MODULES:
            monkeypatch.setattr(module, "gl", language(sm))
        for name, fake in {
            "mbarrier": types.SimpleNamespace(
                init=sm.init, wait=sm.wait, MBarrierLayout=lambda: None,
                arrive=lambda bar, count: bar.add(count, 0), expect=lambda bar, nbytes: bar.add(1, int(nbytes)),
            ),
            "load_tile": sm.load_tile,
            "next_slot": gluon.next_slot,
            "packed_at": gluon.packed_at,
            "view_as": lambda memory, shape, like: Shared(memory.flat, shape, memory.dtype),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": sm.mma,
            "warpgroup_mma_wait": sm.mma_wait,
            "load_lengths": lambda *_: None,
            "plan_tiles": lambda *_: (None, None, len(work)),
            "tile_at": lambda at, *_: work[at],
            "plan_work": lambda *_: (None, 0, len(work)),
            "work_at": lambda at, *_: (*map(tile, work[at][:6]), at + 1, tile(work[at][6]), 0, 0, 0, tile(work[at][7])),
            "pdl_wait": lambda: None,
            "pdl_launch_dependents": lambda: None,
        }.items():  # fmt: skip
            for module in MODULES[:4]:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fake)
        hopper.attend_latent(*args)

    return run


@dataclasses.dataclass
class Inputs:
    """In memory as a caller may have them: the keys beside NaN, and NaN past each length."""

    q: torch.Tensor  # (batch, tokens, heads, dim)
    k: torch.Tensor  # (batch, capacity, heads, dim), all finite
    cache: torch.Tensor  # (pages or sequences, heads, tokens, dim)
    table: torch.Tensor | None
    lengths: list[int]
    page: int


def make(lengths, heads, tokens, page, *, kv_heads=1, capacity=None, dim=DIM):
    batch, capacity = len(lengths), max(lengths) if capacity is None else capacity
    q = torch.full((batch, tokens, heads, dim + 8), torch.nan)[..., :dim]
    q.copy_(torch.randn(q.shape))
    k = torch.randn(batch, capacity, kv_heads, dim)
    poisoned = k.clone()
    for b, n in enumerate(lengths):
        poisoned[b, n:] = torch.nan
    if not page:
        wide = torch.full((*k.shape[:3], dim + 8), torch.nan)
        wide[..., :dim] = poisoned
        return Inputs(q, k, wide[..., :dim].transpose(1, 2), None, lengths, page)
    per = -(-capacity // page)
    order = torch.randperm(batch * per)
    pages = paged(poisoned, page, order, batch * per + 1)
    pages[-1] = torch.nan
    table = torch.cat([order.view(batch, per), torch.full((batch, 1), 1 << 20)], 1).int()  # past the last: no page
    for b, n in enumerate(lengths):
        for i in range(per):
            pages[table[b, i], max(0, n - i * page) :] = torch.nan
    return Inputs(q, k, pages.transpose(1, 2), table, lengths, page)


def attend(run_program, x, programs, *, slack=2, value_dim=VALUES, causal=True, scale=0.3, seed=0, device="cpu"):
    """The kernel's results, with partial results combined by their definition; and how many items were split."""
    batch, n_new, heads, _ = x.q.shape
    pages, kv_heads, page_size, _ = x.cache.shape
    rows = heads // kv_heads * n_new
    tile, tiles = row_tile(rows)
    capacity = x.table.shape[1] * page_size if x.page else page_size
    split = programs > 1
    min_blocks = 1 if split else schedule.NEVER_SPLIT.value
    work = work_of(x.lengths, n_new, kv_heads, capacity, programs, min_blocks, slack, device)
    form = hopper.Form(heads // kv_heads, tiles, x.page, value_dim, causal, 8, min_blocks, slack, True, rows=tile)
    out = torch.full((batch, n_new, heads, value_dim), torch.nan)
    lse = torch.full((batch, heads, n_new), torch.nan)
    size = tile * (512 + 2)
    partial = torch.full((programs * tiles * 2 * size,), torch.nan) if split else None
    described = (
        Described(x.q, gluon.describe(x.q, form.q_box, None)),
        Described(x.cache, gluon.describe_pages(x.cache, (form.piece_rows, 64), None)),
    )
    draw = random.Random(seed)
    for program, t in itertools.product(range(programs), range(tiles)):
        run_program(
            Sm(program * tiles + t, draw), work[program], *described, Pointer(out.view(-1)), None,
            None if x.table is None else Pointer(x.table.reshape(-1)), Pointer(lse.view(-1)),
            Pointer(partial) if split else None, None, None, 0 if x.table is None else x.table.stride(0), batch, n_new,
            kv_heads, capacity, pages, page_step(x.cache), programs, scale * 1.4426950408889634, form,
        )  # fmt: skip
    parts = {}
    for seq, head, _, _, low, high, slot, count, *_ in itertools.chain(*work):
        if low < high and count > 1:
            parts.setdefault((seq, head), []).append(slot)
    for (seq, head), slots in parts.items():
        for t in range(tiles):
            found = [partial[(s * tiles + t) * size :][:size] for s in slots]
            o = torch.stack([f[: tile * 512].view(tile, 512) for f in found])
            m, total = (torch.stack([f[tile * 512 + tile * i :][:tile] for f in found]) for i in (0, 1))
            weight = torch.exp2(m - m.amax(0))
            o, total = (o * weight[..., None]).sum(0), (total * weight).sum(0)
            for row in range(min(tile, rows - tile * t)):
                token, of_group = divmod(tile * t + row, heads // kv_heads)
                h = head * (heads // kv_heads) + of_group
                empty = total[row] == 0
                out[seq, token, h] = 0 if empty else o[row, :value_dim] / total[row]
                lse[seq, h, token] = -torch.inf if empty else (m.amax(0)[row] + total[row].log2()) * 0.6931471805599453
    return out, lse, len(parts)


def check(found, x, *, value_dim=VALUES, causal=True, scale=0.3):
    lengths = torch.tensor(x.lengths, dtype=torch.int32)
    wanted, wanted_lse = reference.decode_attention(
        x.q.double(), x.k.double(), None, lengths, head_dim_v=value_dim, causal=causal, scale=scale, return_lse=True,
        layout="bthd",
    )  # fmt: skip
    out, lse, _ = found
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)


LENGTHS = [0, 1, 63, 64, 65, 300]


@pytest.mark.parametrize(
    ("heads", "tokens", "page", "programs"),
    [
        (64, 1, 16, 3),
        (128, 2, 128, 3),
        (32, 3, 0, 5),
        (16, 1, 16, 3),
        (16, 2, 64, 5),
        (8, 3, 0, 1),
        pytest.param(64, 1, 64, 1, marks=pytest.mark.nightly),
        pytest.param(128, 1, 64, 4, marks=pytest.mark.nightly),
        pytest.param(16, 5, 32, 2, marks=pytest.mark.nightly),
    ],
)
def test_its_threads_compute_attention(heads, tokens, page, programs, run_program):
    """Whole and split items, one and several tiles of rows, rows past the last token, pages smaller and larger than a
    block, and none; NaN past each length reaches nothing."""
    x = make(LENGTHS, heads, tokens, page)
    check(attend(run_program, x, programs), x)


@pytest.mark.nightly
@pytest.mark.parametrize("slack", [0, 1000], ids=["shares", "aligned"])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_sequence_in_splits(slack, seed, run_program):
    x = make([1000, 1, 640], 64, 1, 64)
    found = attend(run_program, x, 7, slack=slack, seed=seed)
    assert found[2] > 0
    check(found, x)


@pytest.mark.parametrize("heads", [128, 16], ids=["64 rows", "32 rows"])
def test_several_kv_heads_short_dims_and_no_causality(heads, run_program):
    x = make([70, 130], heads, 3, 32, kv_heads=2, dim=520)
    check(attend(run_program, x, 2, value_dim=264, causal=False), x, value_dim=264, causal=False)


# What it takes, and when it is chosen


def call(**changes):
    """`can_implement` of a call of DeepSeek-V3's, with changes."""
    o = {
        "batch": 2, "heads": 128, "tokens": 1, "kv_heads": 1, "dim": DIM, "values": VALUES, "page": 64, "dtype": BF16,
        "cache": None, "scale": 0.1, "options": (), "offset": 0, "capacity": 4096, "target": TARGET, "expanded": "",
    } | changes  # fmt: skip
    q = torch.empty(o["batch"], o["tokens"], o["heads"], o["dim"] + o["offset"], dtype=o["dtype"], device="meta")
    shape = (9, o["page"]) if o["page"] else (o["batch"], o["capacity"])
    k = torch.empty(*shape, o["kv_heads"], o["dim"], dtype=o["cache"] or o["dtype"], device="meta")
    table = torch.empty(o["batch"], o["capacity"] // o["page"], device="meta") if o["page"] else None
    q = q[..., : o["dim"]]
    q, k = (t[:1].expand_as(t) if name == o["expanded"] else t for name, t in (("q", q), ("k", k)))
    s = shape_of(q, k, None, table, o["values"], "bthd", "bthd")
    return hopper.can_implement(q, k.transpose(1, 2), s, o["scale"], o["options"], o["target"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"page": page} for page in (0, *PAGES)),
        {"heads": 16},
        {"heads": 4, "tokens": 3},
        {"heads": 24, "kv_heads": 3, "tokens": 16},
        {"heads": 64, "tokens": 16},
        {"dtype": torch.half, "values": 264, "dim": 520},
    ],
    ids=str,
)
def test_it_takes(changes):
    assert call(**changes) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": runtime.TARGETS["sm_100"]}, "is for sm_90, and the device is sm_100"),
        ({"dtype": torch.float32}, "takes float16 and bfloat16"),
        ({"cache": torch.float8_e4m3fn}, "takes float16 and bfloat16"),
        ({"dim": 512, "values": 448}, "of 513 to 576 elements"),
        ({"values": 513}, "of which 257 to 512 are values, not 576 and 513"),
        ({"values": 256}, "of which 257 to 512 are values, not 576 and 256"),  # one warpgroup would have no column
        ({"options": ("window", "softcap")}, "takes no window and no softcap"),
        ({"heads": 8}, "over 8 query rows"),
        ({"heads": 48, "tokens": 2}, "a multiple or a divisor of 64, not 48 heads"),
        ({"offset": 4}, "multiples of 16 bytes"),
        ({"dim": 570}, "multiples of 16 bytes"),
        ({"expanded": "q"}, "no stride 0"),
        ({"expanded": "k"}, "no stride 0"),
        ({"scale": -1.0}, "takes a scale"),
        ({"page": 0, "capacity": 1}, "2 to 2\\^30 - 1 keys"),
        ({"batch": 513}, "up to 512 sequences"),
    ],
    ids=str,
)
def test_it_leaves_the_rest_to_the_portable_kernel(changes, message):
    assert re.search(message, call(**changes))


def test_its_configuration_has_one_form():
    assert decode(encode(CONFIG)) == CONFIG
    for name, other in {"block_n": 32, "num_warps": 4, "combine": "last", "prefetch_blocks": 1}.items():
        with pytest.raises(ValueError, match=f"{name} is {other!r}, expected .* for kernel 'hopper'"):
            dataclasses.replace(CONFIG, **{name: other})
    with pytest.raises(ValueError, match="kernel is 'fast', expected one of portable, hopper"):
        DecodeConfig(kernel="fast")


def test_it_is_chosen_where_it_takes_the_call():
    def chosen(takes):
        return choose(16, DIM, VALUES, BF16, BF16, 8, 4096, 64, TARGET, True, takes).kernel

    assert chosen(True) == "hopper"
    assert chosen(False) == "portable"


def test_a_configuration_that_it_cannot_run_is_refused(device):
    if runtime.target(device).gluon:
        pytest.skip("kernel 'hopper' runs on this device, see test_it_is_attention; others refuse it")
    x = make([70], 64, 1, 64)
    with pytest.raises(ValueError, match="decode_attention: config can't be launched: kernel 'hopper' is for sm_90"):
        decode_attention(
            x.q.to(device), x.cache.transpose(1, 2).to(device), None, torch.tensor([70], dtype=torch.int32).to(device),
            head_dim_v=VALUES, page_table=x.table.to(device), layout="bthd", config=CONFIG,
        )  # fmt: skip


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("group", [16, 128])
def test_it_fits_in_shared_memory(page, group):
    form = hopper.Form(group, 2, page, VALUES, True, 8, 1, 2, True)
    assert form.pieces * form.piece_rows == 64
    assert form.q_box[1] * form.q_box[2] == 64
    tiles = 2 * (64 + 2 * 64) * DIM
    assert tiles + 4096 <= TARGET.shared_memory


LATENT = all_cases()["decode_attention"]
CASES = (
    dataclasses.replace(
        LATENT, sets={"llm": tuple(p for p in LATENT.sets["latent"] if p["heads"] == 128)[:2]}, name="128 heads"
    ),
)


@pytest.mark.nightly
def test_it_compiles_for_sm_90():
    rows = compile_on("sm_90", plan(CASES, sets=["llm"], dtypes=[BF16], source=__name__), {c.name: c for c in CASES})
    assert [row.message for row in rows if row.verdict != "PASS"] == []
    assert "attend_latent" in {row.kernel.name for row in rows}


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.half])
@pytest.mark.parametrize(
    ("heads", "tokens", "page", "lengths"),
    [
        (128, 1, 64, [0, 1, 63, 64, 65, 1000, 4097]),
        (64, 1, 16, [0, 1, 63, 64, 65, 1000, 4097]),
        (128, 2, 128, [5000, 1]),
        (16, 5, 32, [700, 3, 64]),
        (16, 1, 64, [0, 1, 63, 64, 65, 1000, 4097]),
        (16, 2, 16, [5000, 1, 0, 700]),
        (8, 3, 0, [300, 3, 65]),
        (16, 1, 128, [64] * 300),
        (128, 16, 0, [300, 15, 20]),
        (64, 1, 64, [64] * 300),
    ],
)
def test_it_is_attention(heads, tokens, page, lengths, dtype, device):
    if not runtime.target(device).gluon:
        pytest.skip(f"the kernel is for sm_90, and the device is {runtime.target(device).arch}")
    x = make(lengths, heads, tokens, page)
    q, cache = x.q.to(dtype), x.cache.to(dtype)
    wanted, wanted_lse = reference.decode_attention(
        q.double(), x.k.to(dtype).double(), None, torch.tensor(lengths, dtype=torch.int32), head_dim_v=VALUES,
        scale=0.05, return_lse=True, layout="bthd",
    )  # fmt: skip
    out = torch.full((len(lengths), tokens, heads, VALUES), torch.nan, dtype=dtype, device=device)
    attend = functools.partial(
        decode_attention, q.to(device), cache.to(device), None,
        torch.tensor(lengths, dtype=torch.int32, device=device), head_dim_v=VALUES, scale=0.05, return_lse=True,
        page_table=None if x.table is None else x.table.to(device), layout="bthd", cache_layout="bhtd", out=out,
    )  # fmt: skip
    _, lse = attend()
    found = out.cpu()
    assert relative_error(found, wanted) < TOLERANCES[dtype]["forward"].ceiling
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=1e-4, atol=1e-3)
    assert torch.equal(attend()[0].cpu(), found)
