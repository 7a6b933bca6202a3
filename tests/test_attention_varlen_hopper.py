"""The attention forward of sm_90 over packed sequences, against attention of each alone in float64."""

import dataclasses
import functools
import itertools
import random
import types

import pytest
import torch
from helpers import BF16
from test_attention_backward import formula
from test_attention_tile_list import cumulated
from test_attention_tile_list import read as listed

from rooftile import native, runtime
from rooftile.cases import all_cases
from rooftile.inspect import compile_on, plan
from rooftile.launching import Descriptor
from rooftile.ops.attention import attention, attention_varlen, packed
from rooftile.ops.attention.ops import attention_varlen_op
from rooftile.ops.attention.problem import AttentionConfig, Problem, Scoring, choose_backward, choose_forward

hopper_forward = pytest.importorskip("rooftile.ops.attention.hopper_forward")
gluon = pytest.importorskip("rooftile.primitives.gluon")

HALF = torch.float16
CONFIGS = {
    64: (AttentionConfig("hopper", 128, 128, 8, 6), AttentionConfig("hopper", 192, 128, 12, 6)),
    128: (AttentionConfig("hopper", 128, 128, 8, 4),),
    256: (AttentionConfig("hopper", 128, 64, 8, 2),),
}
LIMIT = {BF16: 5e-3, HALF: 1e-3}  # rounding of weights and output alone is a third of it

LENGTHS = {
    "one": [700],
    "edges": [0, 1, 63, 64, 65, 127, 128, 129, 0, 191, 192, 193, 255, 256, 257, 0],
    "skewed": [4] * 60 + [3000] + [5] * 60,
    "tiny": [4] * 1500,
    "any": [517, 33, 1, 0, 800, 260, 2],
}
# lengths, lengths of keys (None for the same), heads, kv_heads, head_dim, softcap, left, right, sinks, dtype
POINTS = [
    ("one", None, 2, 2, 128, 0.0, -1, -1, False, BF16),
    ("edges", None, 4, 2, 128, 0.0, -1, -1, False, BF16),
    ("edges", None, 4, 2, 128, 0.0, -1, 0, True, HALF),
    ("edges", "other", 4, 4, 128, 0.0, -1, 0, False, BF16),
    ("edges", "other", 2, 1, 64, 0.0, -1, -1, False, BF16),
    ("edges", "other", 8, 2, 64, 20.0, 100, 0, True, HALF),
    ("skewed", None, 8, 2, 128, 0.0, -1, 0, False, BF16),
    ("skewed", None, 8, 8, 64, 0.0, -1, -1, False, HALF),
    ("tiny", None, 8, 2, 128, 0.0, -1, 0, False, BF16),
    ("tiny", None, 3, 3, 64, 0.0, -1, -1, False, BF16),
    ("any", None, 16, 4, 128, 0.0, -1, 0, False, BF16),
    ("any", None, 16, 4, 64, 0.0, -1, 0, False, BF16),
    ("any", "other", 4, 2, 128, 0.0, 100, 50, False, BF16),
    ("any", "other", 4, 1, 128, 20.0, 100, 0, True, HALF),
    ("any", "other", 4, 4, 96, 0.0, 100, -1, False, BF16),
    ("any", None, 4, 4, 40, 20.0, -1, -1, False, BF16),
    ("any", "other", 2, 2, 256, 0.0, -1, 0, False, BF16),
]


def lengths_of(point):
    lengths = LENGTHS[point[0]]
    draw = random.Random(0)
    return lengths, lengths if point[1] is None else [n and max(0, n + draw.randint(-70, 150)) for n in lengths]


def drawn(point, device, seed=0):
    lengths, key_lengths = lengths_of(point)
    _, _, heads, kv_heads, head_dim, *_, with_sinks, dtype = point
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    q = normal(sum(lengths), heads, head_dim)
    k, v = (normal(sum(key_lengths), kv_heads, head_dim) for _ in range(2))
    sinks = normal(heads).float() if with_sinks else None
    starts = (torch.tensor(cumulated(n), dtype=torch.int32, device=device) for n in (lengths, key_lengths))
    return q, k, v, *starts, sinks


def scoring(point):
    return Scoring(point[4] ** -0.5, *point[5:8])


def run(point, config, q, k, v, starts_q, starts_k, sinks):
    """out and lse, over memory that was NaN."""
    s = scoring(point)
    numbers = (0, 0, None, s.softcap, s.left, s.right)
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        return attention_varlen_op(q, k, v, starts_q, starts_k, None, sinks, *numbers, encoded(config), False)
    finally:
        torch.use_deterministic_algorithms(False)


def encoded(config):
    return ",".join(str(value) for value in dataclasses.astuple(config))


def one_by_one(point, q, k, v, sinks):
    """out and lse of each sequence in float64."""
    lengths, key_lengths = lengths_of(point)
    outs, lses = [], []
    for a, n, b, m in zip(cumulated(lengths), lengths, cumulated(key_lengths), key_lengths, strict=False):
        own = (q[a : a + n], k[b : b + m], v[b : b + m])
        extras = {} if sinks is None else {"sinks": sinks.double()}
        out, lse = formula(*(t.double().transpose(0, 1)[None] for t in own), scoring(point), **extras)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def skip_elsewhere(device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernel is for sm_90, and the GPU is {runtime.target(device).arch}")


def configs(head_dim):
    return CONFIGS[next(dim for dim in CONFIGS if head_dim <= dim)]


@pytest.mark.gpu
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_it_is_attention_of_each_sequence(point, device):
    skip_elsewhere(device)
    q, k, v, starts_q, starts_k, sinks = drawn(point, device)
    expected, expected_lse = one_by_one(point, q, k, v, sinks)
    for config in configs(point[4]):
        out, lse = run(point, config, q, k, v, starts_q, starts_k, sinks)
        assert (out.double() - expected).norm() < LIMIT[point[-1]] * expected.norm()
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)
        again = run(point, config, q, k, v, starts_q, starts_k, sinks)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("point", [p for p in POINTS if p[0] in ("edges", "any")], ids=str)
def test_what_a_neighbor_holds_is_not_seen(point, bad, device):
    """Every other sequence of NaN or inf leaves the bits of the others."""
    skip_elsewhere(device)
    q, k, v, starts_q, starts_k, sinks = drawn(point, device)
    spoiled = [t.clone() for t in (q, k, v)]
    kept = torch.ones(q.shape[0], dtype=torch.bool, device=device)
    for i in range(0, len(starts_q) - 1, 2):
        for t, starts in zip(spoiled, (starts_q, starts_k, starts_k), strict=True):
            t[starts[i] : starts[i + 1]] = bad
        kept[starts_q[i] : starts_q[i + 1]] = False
    for config in configs(point[4]):
        out, lse = run(point, config, q, k, v, starts_q, starts_k, sinks)
        beside, lse_beside = run(point, config, *spoiled, starts_q, starts_k, sinks)
        assert torch.equal(beside[kept], out[kept])
        assert torch.equal(lse_beside[:, kept], lse[:, kept])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_random_lengths(head_dim, device):
    skip_elsewhere(device)
    draw = random.Random(head_dim)
    for trial in range(20):
        lengths = [draw.choice((0, 1, 5, draw.randint(1, 400), draw.randint(1, 64))) for _ in range(30)]
        LENGTHS["drawn"] = [*lengths, draw.randint(1, 2000)]
        left, right = draw.choice(((-1, -1), (-1, 0), (draw.randint(0, 300), 0), (30, 100)))
        keys, heads = draw.choice((None, "other")), draw.choice((1, 3, 12))
        point = ("drawn", keys, 2 * heads, heads, head_dim, 0.0, left, right, False, BF16)
        q, k, v, starts_q, starts_k, sinks = drawn(point, device, trial)
        expected, expected_lse = one_by_one(point, q, k, v, sinks)
        for config in configs(head_dim):
            out, lse = run(point, config, q, k, v, starts_q, starts_k, sinks)
            assert (out.double() - expected).norm() < LIMIT[BF16] * expected.norm(), point
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
def test_a_token_of_a_longer_row_is_read_in_place(device):
    """q, k and v of one tensor (tokens, 3, heads, dim), and starts on the device that the host does not wait for."""
    skip_elsewhere(device)
    lengths = LENGTHS["any"]
    qkv = torch.randn(sum(lengths), 3, 4, 128, dtype=BF16, device=device)
    starts = torch.tensor(cumulated(lengths), dtype=torch.int32, device=device)
    config = configs(128)[0]
    expected = attention_varlen(*(t.contiguous() for t in qkv.unbind(1)), starts, causal=True, config=config)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attention_varlen(*qkv.unbind(1), starts, causal=True, config=config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_equal_lengths_have_the_bits_of_the_dense_kernel(device):
    skip_elsewhere(device)
    q, k, v = (torch.randn(5, 600, 4, 128, dtype=BF16, device=device) for _ in range(3))
    starts = list(range(0, 3001, 600))
    config = configs(128)[0]
    for options in ({}, {"causal": True}, {"window": (70, 30)}):
        dense = attention(q, k, v, layout="bthd", config=config, **options)
        out = attention_varlen(*(t.flatten(0, 1) for t in (q, k, v)), starts, config=config, **options)
        assert torch.equal(out, dense.flatten(0, 1))


@pytest.mark.gpu
def test_starts_on_the_device_that_are_wrong_do_no_harm(device):
    skip_elsewhere(device)
    q, k, v = (torch.randn(40, 2, 64, dtype=BF16, device=device) for _ in range(3))
    point = ("one", None, 2, 2, 64, 0.0, -1, 0, False, BF16)
    for numbers in ([3, 20, -4, 60, 15], [50, 60], [-9, -3], [5, 2, 30], [0, 40, 0, 40, 0, 40], [5, 20, 30]):
        starts = torch.tensor(numbers, dtype=torch.int32, device=device)
        for config in configs(64):
            out, lse = run(point, config, q, k, v, starts, starts, None)
            assert torch.isfinite(out).all()
            assert not torch.isnan(lse).any()
    assert (out[[*range(5), *range(30, 40)]] == 0).all()
    assert (lse[:, [*range(5), *range(30, 40)]] == -torch.inf).all()


# What can be shown without a GPU


def problem(point):
    lengths, key_lengths = lengths_of(point)
    _, _, heads, kv_heads, head_dim, *_, with_sinks, dtype = point
    sizes = (len(lengths), heads, kv_heads, max(lengths), max(key_lengths), head_dim, head_dim, dtype)
    tokens = max(sum(lengths), sum(key_lengths))
    return Problem(*sizes, scoring(point), sinks=with_sinks, packed=True, tokens=tokens)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_it_takes_what_its_tests_give_it(point):
    for config in configs(point[4]):
        assert hopper_forward.can_implement(problem(point), config, runtime.TARGETS["sm_90"]) is None


@pytest.mark.parametrize("lengths", ["edges", "any"])
def test_both_directions_choose_it(lengths):
    p = problem((lengths, *POINTS[0][1:]))
    for choose in (choose_forward, choose_backward):
        assert choose(p, runtime.TARGETS["sm_90"]).kernel == "hopper"
        assert choose(p, runtime.TARGETS["sm_80"]).kernel == "portable"


def test_sequences_too_short_for_its_tiles_have_small_portable_ones():
    p = problem(("tiny", *POINTS[0][1:]))
    p = dataclasses.replace(p, n_q=p.tokens)  # no hint of the longest
    assert choose_backward(p, runtime.TARGETS["sm_90"]).kernel == "portable"
    c = choose_forward(p, runtime.TARGETS["sm_90"])
    assert (c.kernel, c.block_m) == ("portable", 64)


@pytest.mark.parametrize("other", [{"tokens": 2**29}, {"alibi": True}, {"batch": 2**27}], ids=str)
def test_it_leaves_the_rest_to_the_portable_kernel(other):
    p = dataclasses.replace(problem(POINTS[0]), **other)
    assert "kernel 'hopper' takes" in hopper_forward.can_implement(p, CONFIGS[128][0], runtime.TARGETS["sm_90"])


def value(x):
    return getattr(x, "value", x)


def packed_at(end, n, head, row):
    """The coordinates that the kernel gives TMA."""
    return [int(value(x)) for x in gluon.packed_at.fn(end, n, head, row)]


def copied_rows(t, d: Descriptor, at):
    """The rows that TMA reads at those coordinates: places in t's storage, and None for zeros."""
    found = []
    for i in range(d.block[3]):
        coordinates = [n + (i if j == 3 else 0) for j, n in enumerate(at)]
        inside = all(0 <= n < size for n, size in zip(coordinates, d.shape, strict=True))
        address = sum(n * stride * t.element_size() for n, stride in zip(coordinates, d.strides, strict=True)) % 2**64
        found.append(address // t.element_size() if inside else None)
    return found


def test_a_sequence_ends_for_tma_as_a_tensor_does():
    qkv = torch.empty(100, 3, 5, 64, dtype=BF16)
    t = qkv[:, 1].transpose(0, 1)[None]  # (1, heads, tokens, dim)
    d = gluon.describe_packed(t, (32, 64), None)
    assert all(0 < stride * t.element_size() < 2**40 for stride in d.strides[:-1])
    assert all(stride * t.element_size() % 16 == 0 for stride in d.strides[:-1])
    assert all(0 < size < 2**31 for size in d.shape)
    for begin, n in ((0, 100), (0, 1), (17, 40), (40, 60), (99, 1), (30, 0), (0, 0), (100, 0)):
        for head, row in itertools.product((0, 4), (0, 16, 32, 64)):
            rows = copied_rows(t, d, packed_at(begin + n, n, head, row))
            for i, address in enumerate(rows):
                inside = row + i < n
                assert address == ((begin + row + i) * t.stride(2) + head * t.stride(1) if inside else None)


def test_native_code_takes_the_strides_of_packed_sequences():
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    d = gluon.describe_packed(torch.empty(1, 4, 100, 64, dtype=BF16), (32, 64), None)
    described = types.SimpleNamespace(shape=d.shape, strides=d.strides, padding="zero")
    meta = {"elem_size": 2, "elem_type": next(iter(TMA_DTYPE_DEVICE_TO_HOST)), "swizzle": 3, "block_size": d.block}
    _, _, _, dims, strides, _ = native._map(described, meta)
    assert dims == d.shape[::-1]
    assert [n // 2 for n in strides[:-1]] == list(d.strides[-2::-1])
    assert all(0 <= n < 2**64 for n in strides)  # C's unsigned long long


def modelled(point, config, q, k, v, starts_q, starts_k, programs, device):
    """out and lse as the kernel makes them of its list of tiles, and how often each row of each head is written."""
    s, heads, kv_heads = scoring(point), q.shape[1], k.shape[1]
    tile = (config.block_m, config.block_n, s.left, s.right)
    listing = packed.TileList(heads, len(starts_q) - 1, q.shape[0], k.shape[0], *tile, programs, 2)
    taken = listed(packed.prepare_tiles(listing)(starts_q.to(device), starts_k.to(device)), listing)
    out, lse = torch.zeros_like(q), torch.full((heads, q.shape[0]), -torch.inf, dtype=q.dtype)
    written = torch.zeros(heads, q.shape[0], dtype=torch.int64)
    views = [t.transpose(0, 1)[None] for t in (q, k, v)]
    q_of, k_of, v_of = (
        gluon.describe_packed(t, (rows, t.shape[3]), None)
        for t, rows in zip(views, (config.block_m, config.block_n, config.block_n), strict=True)
    )

    def read(t, d, end, n, head, row):
        """A tile by TMA."""
        places = copied_rows(t, d, packed_at(end, n, head, row))
        rows = [t.new_zeros(t.shape[3]) if p is None else t.as_strided((t.shape[3],), (1,), p) for p in places]
        return torch.stack(rows)

    for head, row, begin, end, end_q, n_q, end_k, n_k in itertools.chain(*taken):
        own_q = read(views[0], q_of, end_q, n_q, head, row)
        kv_head = head // (heads // kv_heads)
        scores, values = [], []
        for block in reversed(range(begin, end)):  # from the last, as the ring is filled
            own_k = read(views[1], k_of, end_k, n_k, kv_head, block * config.block_n)
            values.append(read(views[2], v_of, end_k, n_k, kv_head, block * config.block_n))
            p = (torch.arange(config.block_m) + row + n_k - n_q)[:, None]
            cols = (torch.arange(config.block_n) + block * config.block_n)[None]
            stop = torch.clamp(p + s.right + 1, max=n_k) if s.right >= 0 else torch.full_like(p, n_k)
            seen = cols < stop
            if s.left >= 0:
                seen &= cols >= p - s.left
            scores.append(torch.where(seen, own_q @ own_k.T * s.scale, -torch.inf))
        scores, values = torch.cat(scores, 1), torch.cat(values)
        own_lse = torch.logsumexp(scores, 1)
        weights = torch.where(torch.isfinite(own_lse)[:, None], torch.exp(scores - own_lse[:, None]), 0.0)
        own_out = weights @ values
        for i, place in enumerate(copied_rows(views[0], q_of, packed_at(end_q, n_q, head, row))):
            if place is not None:  # out lies as q does
                out.as_strided((q.shape[2],), (1,), place).copy_(own_out[i])
            if row + i < n_q:
                at = end_q - n_q + row + i
                lse[head, at] = own_lse[i]
                written[head, at] += 1
    return out, lse, written


@pytest.mark.parametrize(
    "point",
    [
        ("edges", None, 4, 2, 16, 0.0, -1, -1, False, BF16),
        ("edges", "other", 2, 1, 16, 0.0, -1, 0, False, BF16),
        ("any", "other", 2, 2, 16, 0.0, 100, 50, False, BF16),
        ("any", "other", 2, 2, 16, 0.0, 100, -1, False, BF16),
    ],
    ids=str,
)
def test_a_model_of_the_kernel_over_the_list_is_attention(point, device):
    """Each row of each head is written once, and NaN of every other sequence stays there."""
    q, k, v, starts_q, starts_k, _ = drawn(point, torch.device("cpu"))
    q, k, v = (t.double() for t in (q, k, v))
    expected, expected_lse = one_by_one(point, q, k, v, None)
    for t, starts in ((q, starts_q), (k, starts_k), (v, starts_k)):
        for i in range(0, len(starts) - 1, 2):
            t[starts[i] : starts[i + 1]] = torch.nan
    kept = torch.ones(q.shape[0], dtype=torch.bool)
    for i in range(0, len(starts_q) - 1, 2):
        kept[starts_q[i] : starts_q[i + 1]] = False
    out, lse, written = modelled(point, CONFIGS[128][0], q, k, v, starts_q, starts_k, 7, device)
    assert (written == 1).all()
    torch.testing.assert_close(out[kept], expected[kept])
    torch.testing.assert_close(lse[:, kept], expected_lse[:, kept])


# The kernel compiled for sm_90, by a worker of `rooftile inspect` that finds this case here

VARLEN = all_cases()["attention_varlen"]
CASES = tuple(
    dataclasses.replace(
        VARLEN,
        name=f"attention_varlen in {config.block_m} queries",
        function=functools.partial(attention_varlen, config=config),
        grads=(),
        sets={"llm": tuple(dataclasses.replace(p, options={**p.options, **more}) for p in points for more in forms)},
    )
    for config, points, forms in (
        (CONFIGS[128][0], VARLEN.sets["llm"][:1], ({}, {"causal": False}, {"window": 100}, {"softcap": 20.0})),
        (CONFIGS[64][1], VARLEN.sets["llm"][1:2], ({},)),
    )
)


@pytest.mark.nightly
def test_it_compiles_for_sm_90():
    rows = compile_on("sm_90", plan(CASES, sets=["llm"], dtypes=[BF16], source=__name__), {c.name: c for c in CASES})
    assert not [row.message for row in rows if row.verdict != "PASS"]
    kernels = [row.kernel for row in rows if row.kernel and row.kernel.name == "attend"]
    assert len(kernels) == 5
    for kernel in kernels:  # with 128 registers, the dense kernel too spills around its loop
        assert kernel.spills <= (128 if kernel.registers == 128 else 0)
