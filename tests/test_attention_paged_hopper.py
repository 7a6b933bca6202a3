"""The attention forward of sm_90 over keys in pages: what TMA reads, what is refused, and on a GPU the numbers."""

import dataclasses
import functools
import itertools
import types

import pytest
import torch
from test_attention_paged import make
from test_attention_varlen_hopper import copied_rows, skip_elsewhere, value

from rooftile import runtime
from rooftile.cases import all_cases
from rooftile.inspect import compile_on, plan
from rooftile.ops.attention import attention_paged
from rooftile.ops.attention.problem import AttentionConfig, Problem, Scoring
from rooftile.primitives.paging import PAGES, page_step

hopper_forward = pytest.importorskip("rooftile.ops.attention.hopper_forward")
gluon = pytest.importorskip("rooftile.primitives.gluon")

BF16 = torch.bfloat16
TARGET = runtime.TARGETS["sm_90"]
PAGE_OF = hopper_forward._page_of.fn
CONFIGS = {
    64: AttentionConfig("hopper", 128, 128, 8, 6),
    96: AttentionConfig("hopper", 128, 128, 8, 4),
    128: AttentionConfig("hopper", 128, 128, 8, 4),
    256: AttentionConfig("hopper", 128, 64, 8, 2),
}


def tiling(config, dim, t):
    base = hopper_forward.tiling(config, (False, False, False), dim, TARGET.shared_memory, True)
    return dataclasses.replace(base, page=t.shape[2], step=page_step(t))


# What can be shown without a GPU


class _Number(int):
    """A number of the device."""

    def to(self, _dtype):
        return self


def copies(monkeypatch, desc, table, sequence, head, block, slot, t):
    """What `_page_of` and `_load_pages` start: the bytes expected, and where each load reads and writes."""
    expected, started = [], []
    language = types.SimpleNamespace(
        maximum=max, minimum=min, static_range=range, int64=None, load=lambda at: table[at], constexpr=lambda x: x
    )
    monkeypatch.setattr(hopper_forward, "gl", language)
    barriers = types.SimpleNamespace(expect=lambda bar, nbytes: expected.append(nbytes))
    monkeypatch.setattr(hopper_forward, "mbarrier", barriers)
    monkeypatch.setattr(hopper_forward, "packed_at", gluon.packed_at.fn)
    monkeypatch.setattr(hopper_forward, "load_tile", lambda desc, at, bar, piece: started.append((at, piece)))
    places = types.SimpleNamespace(index=lambda i: i)
    given = (0, 0, max(table) + 1, places)  # the table's begin, its stride, the pages, the ring
    monkeypatch.setattr(hopper_forward, "_page_of", PAGE_OF)
    page = PAGE_OF(given, sequence, block * t.keys, t)
    hopper_forward._load_pages.fn(desc, given, page, sequence, head, block, places, slot, t)
    (nbytes,) = expected
    return nbytes, [([int(value(x)) for x in at], piece) for at, piece in started]


@pytest.mark.each_once
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("page", [16, 64, 128, 256])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_the_copies_of_a_block_are_its_keys_and_zeros_past_the_last(dim, page, layout, monkeypatch):
    """Each element of the slot in shared memory is written once, with a key of the sequence or zero."""
    cache = torch.arange(5 * page * 3 * dim, dtype=torch.int64).view(5, page, 3, dim)
    if layout == "bhtd":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    keys = cache.transpose(1, 2)  # (pages, heads, page, dim)
    t = tiling(CONFIGS[max(64, dim)], dim, keys)
    d = gluon.describe_pages(keys, (t.piece_rows, t.piece_cols), None)
    desc = types.SimpleNamespace(block_type=types.SimpleNamespace(nbytes=2 * t.piece_rows * t.piece_cols))
    parts, per_slot, slot = t.dim // t.piece_cols, t.pieces[0] // t.stages, 1
    table = [4, 0, 2]
    for n_k, head in itertools.product((0, 1, page, page + 9, 3 * page - 1, 3 * page), (0, 2)):
        whole = torch.cat([cache[p, :, head] for p in table])[:n_k]
        for block in range(max(1, -(-n_k // t.keys))):
            expected = torch.zeros(t.keys, dim, dtype=torch.int64)
            own = whole[block * t.keys : (block + 1) * t.keys]
            expected[: len(own)] = own
            sequence = (0, 1, _Number(0), n_k)
            nbytes, started = copies(monkeypatch, desc, table, sequence, head, block, slot, t)
            assert nbytes == 2 * t.keys * t.dim == len(started) * desc.block_type.nbytes
            assert sorted(piece for _, piece in started) == list(range(slot * per_slot, (slot + 1) * per_slot))
            found = torch.empty(per_slot, t.piece_rows, t.piece_cols, dtype=torch.int64)
            for at, piece in started:
                zeros = torch.zeros(t.piece_cols, dtype=torch.int64)
                rows = copied_rows(keys, d, at)
                read = [zeros if p is None else keys.as_strided((t.piece_cols,), (1,), p) for p in rows]
                found[piece - slot * per_slot] = torch.stack(read)
            # A block of columns wider than a swizzle lies in shared memory as parts of that width, one after another.
            block_of = found.view(parts, t.keys, t.piece_cols).transpose(0, 1).reshape(t.keys, t.dim)
            torch.testing.assert_close(block_of[:, :dim], expected)


def problem(**changes):
    p = Problem(2, 8, 2, 300, 4096, 128, 128, BF16, Scoring(0.1, right=0), packed=True, tokens=400, page=64)
    return dataclasses.replace(p, **changes)


def test_it_takes_every_page():
    for page, (dim, config) in itertools.product(PAGES, CONFIGS.items()):
        p = problem(page=page, head_dim=dim, value_dim=dim)
        assert hopper_forward.can_implement(p, config, TARGET) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"narrow": True, "n_k": 2**20}, "a copy of up to"),
        ({"n_k": 0}, "takes from 1"),
        ({"batch": 0}, "takes from 1"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"alibi": True}, "no ALiBi"),
    ],
)
def test_what_it_does_not_take_is_refused(changes, message):
    assert message in hopper_forward.can_implement(problem(**changes), CONFIGS[128], TARGET)


def test_a_page_step_that_is_no_whole_number_has_no_descriptor():
    cache = torch.empty(4, 64 * 3 * 32 + 8)[:, : 64 * 3 * 32].unflatten(1, (64, 3, 32)).transpose(1, 2)
    assert page_step(cache) == 0
    assert page_step(torch.empty(4, 64, 3, 32).transpose(1, 2)) == 64
    assert page_step(torch.empty(4, 3, 64, 32)) == 3 * 64


PAGED = all_cases()["attention_paged"]
CASES = tuple(
    dataclasses.replace(
        PAGED,
        name=f"attention_paged, page {page}",
        function=functools.partial(attention_paged, config=CONFIGS[128]),
        grads=(),
        sets={"llm": tuple(p for p in PAGED.sets["llm"] if p["page"] == page and p["cache"] == 0)[:1]},
    )
    for page in (16, 64, 256)
)


@pytest.mark.nightly
def test_it_compiles_for_sm_90():
    rows = compile_on("sm_90", plan(CASES, sets=["llm"], dtypes=[BF16], source=__name__), {c.name: c for c in CASES})
    assert not [row.message for row in rows if row.verdict != "PASS"]
    kernels = [row.kernel for row in rows if row.kernel and row.kernel.name == "attend"]
    assert len(kernels) == 3


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dim", CONFIGS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (100, 0)}, {"softcap": 20.0}], ids=str)
def test_it_is_the_portable_kernel(device, page, dim, options):
    """NaN beyond each length, page numbers that do not exist where no key is, and sequences without queries or keys."""
    skip_elsewhere(device)
    lengths = [700, 1, 0, 64, 129, 2048, 300, 17]
    n_q = [300, 1, 3, 64, 0, 128, 300, 1]
    tensors = make(device, n_q, lengths, page=page, heads=(8, 2), dims=(dim, dim), dtype=BF16)
    for sinks in (None, torch.randn(8, device=device)):
        more = {"return_lse": True, "sinks": sinks, **options}
        expected, expected_lse = attention_paged(*(t.float() if t.is_floating_point() else t for t in tensors), **more)
        out, lse = attention_paged(*tensors, config=CONFIGS[dim], **more)
        assert (out.double() - expected.double()).norm() < 5e-3 * expected.double().norm()
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)
        again = attention_paged(*tensors, config=CONFIGS[dim], **more)
        assert torch.equal(again[0], out)


@pytest.mark.gpu
def test_wrong_indices_on_the_device_do_no_harm(device):
    skip_elsewhere(device)
    q, k, v, table, lengths, starts = make(
        device, [100, 200], [500, 400], page=64, heads=(4, 2), dims=(128, 128), dtype=BF16
    )
    k, v = (torch.nan_to_num(t) for t in (k, v))
    for wrong in (table - 5, table + 10**6, torch.full_like(table, -(2**31))):
        out = attention_paged(q, k, v, wrong, lengths, starts, config=CONFIGS[128])
        assert torch.isfinite(out).all()
    for wrong in (lengths * 1000, -lengths):
        assert torch.isfinite(attention_paged(q, k, v, table, wrong, starts, config=CONFIGS[128])).all()
