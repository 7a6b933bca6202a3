"""The copies in 16 bits of an 8-bit cache that the Hopper forward reads: their numbers, and when they are made."""

import dataclasses
import itertools

import pytest
import torch
from helpers import in_pairs
from test_attention_varlen_hopper import skip_elsewhere

from rooftile import runtime
from rooftile.cases import all_cases
from rooftile.inspect import compile_on, plan
from rooftile.ops.attention import AttentionConfig, attention_paged, dequantize_pages, paged
from rooftile.ops.attention.problem import Scoring, can_implement_forward, choose_forward
from rooftile.primitives import paging

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
COPY = dequantize_pages.COPY
TARGET = runtime.TARGETS["sm_90"]
HOPPER = AttentionConfig("hopper", 128, 128, 8, 4)
LENGTHS = [70, 0, COPY + 44, 33, 1, COPY]
N_Q = [7, 3, 20, 1, 1, 0]


@pytest.fixture(autouse=True)
def _poisoned():
    """New memory is NaN; the largest integer, where it holds integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(
    device, lengths, n_q, *, page, dim, kind=FP8, by="token", layout="bthd", heads=(2, 2), dtype=BF16, before=None
):
    """The op's arguments, in shuffled pages.

    Unused pages, tokens past a length and their scales are NaN (in int8, 127), and so are the tokens of each sequence
    before the one in `before`. Table entries of such pages lead nowhere.
    """
    per = max(1, max(-(-n // page) for n in lengths)) + 1
    used = sum(-(-n // page) for n in lengths)
    order = torch.randperm(used + 2).tolist()
    table = torch.full((len(lengths), per), 10**6, dtype=torch.int32)
    shape = used + 2, page, heads[1]
    numbers = torch.full((2, *shape, dim), 127.0 if kind == torch.int8 else float("nan"))
    scales = torch.full((2, *shape), float("nan"))
    for b, n in enumerate(lengths):
        first = 0 if before is None else before[b]
        for i in range(-(-n // page)):
            at = order.pop()
            table[b, i] = at if (i + 1) * page > first else -(2**31)
            rows = slice(max(0, first - i * page), min(page, n - i * page))
            numbers[:, at, rows] = (torch.randn_like(numbers[:, at, rows]) * 40).round().clamp(-127, 127)
            scales[:, at, rows] = torch.rand_like(scales[:, at, rows]) + 0.5
    q = torch.randn(sum(n_q), heads[0], dim).to(device, dtype)
    k, v = numbers.to(device).to(kind)
    scales = {"none": (None, None), "token": tuple(scales)}.get(
        by, tuple(torch.rand(() if by == "tensor" else (heads[1],)) + 0.5 for _ in range(2))
    )
    k_scale, v_scale = (None if s is None else s.to(device) for s in scales)
    if layout == "bhtd":
        k, v = (t.transpose(1, 2).contiguous() for t in (k, v))
        if by == "token":
            k_scale, v_scale = (s.transpose(1, 2).contiguous() for s in (k_scale, v_scale))
    starts = torch.tensor([0, *itertools.accumulate(n_q)], dtype=torch.int32, device=device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    return q, k, v, table.to(device), lengths, starts, k_scale, v_scale, layout


def copies(q, k, v, table, lengths, starts, k_scale, v_scale, layout, left=-1):
    """k and v in 16 bits and their table, as the Hopper forward is given them."""
    scoring = Scoring(1.0, left=left)
    a = paged._Arguments(q, k, v, table, lengths, starts, k_scale, v_scale, None, None, 0, 1.0, 0.0, left, 0, layout)
    run = dequantize_pages.prepare(a.inputs(scoring), table, k_scale, v_scale, layout)
    return run(k, v, table, lengths, starts, k_scale, v_scale)


def dequantized(cache, scale, layout, dtype):
    """The whole cache, as (pages, page, heads, dim)."""
    x = (cache if layout == "bthd" else cache.transpose(1, 2)).float()
    if scale is not None and scale.dim() == 3:
        x = x * (scale if layout == "bthd" else scale.transpose(1, 2))[..., None]
    elif scale is not None:
        x = x * scale.reshape(-1, 1)
    return x.to(dtype)


def assert_copied(arguments, n_q, *, left=-1):
    """Tokens that are seen are copied, those before the first of them in its page are zeros, others are not written."""
    q, k, v, table, lengths, _, k_scale, v_scale, layout = arguments
    capacity = table.shape[1] * k.shape[layout.index("t")]
    *found, found_table = copies(*arguments, left=left)
    per = -(-capacity // COPY)
    assert torch.equal(found_table.flatten().cpu(), torch.arange(len(n_q) * per, dtype=torch.int32))
    for copy, cache, scale in zip(found, (k, v), (k_scale, v_scale), strict=True):
        assert copy.dtype == q.dtype
        whole = dequantized(cache, scale, layout, q.dtype)
        for b, n in enumerate(lengths.tolist()):
            n = min(max(n, 0), capacity) if n_q[b] else 0
            first = max(n - n_q[b] - left, 0) if left >= 0 else 0
            begin = min(first // COPY * COPY, n)
            own = copy[found_table[b].long()].transpose(1, 2).flatten(0, 1)
            wanted = whole[table[b].clamp(0, len(whole) - 1).long()].flatten(0, 1)[:n]
            assert torch.equal(own[first:n], wanted[first:])
            assert (own[begin:first] == 0).all()
            assert own[:begin].isnan().all()
            assert own[n:].isnan().all()


@pytest.mark.parametrize(
    ("page", "layout", "by"), in_pairs((16, 64, 512), ("bthd", "bhtd"), ("none", "tensor", "head", "token"))
)
def test_copies_are_the_rounded_products_of_numbers_and_scales(page, layout, by, device):
    kind = torch.int8 if by in ("head", "token") else FP8
    assert_copied(make(device, LENGTHS, N_Q, page=page, dim=64, kind=kind, by=by, layout=layout), N_Q)


@pytest.mark.parametrize(
    ("kind", "dtype", "dim"), [(FP8, BF16, 128), (FP8, torch.float16, 24), (torch.int8, BF16, 256), (BF16, BF16, 80)]
)
def test_copies_of_every_dtype_and_head(kind, dtype, dim, device):
    """Also of a cache of 16 bits with scales."""
    assert_copied(make(device, LENGTHS, N_Q, page=32, dim=dim, kind=kind, dtype=dtype), N_Q)


@pytest.mark.parametrize("page", paging.PAGES)
def test_keys_before_a_window_are_not_read(page, device):
    n_q, lengths, left = [3, 40, 5], [3 * COPY + 9, 2 * COPY, 4], 8
    before = [max(n - m - left, 0) for n, m in zip(lengths, n_q, strict=True)]
    assert_copied(make(device, lengths, n_q, page=page, dim=32, before=before), n_q, left=left)


def test_wrong_lengths_and_pages_are_clamped(device):
    q, k, v, table, lengths, *rest = make(device, [70, 33], [7, 2], page=16, dim=32)
    most = table.shape[1] * 16
    for wrong, used in ((most + 1000, most), (-5, 0)):
        given = torch.full_like(lengths, wrong)
        found = copies(q, k, v, table, given, *rest)
        for a, b in zip(found, copies(q, k, v, table, torch.full_like(lengths, used), *rest), strict=True):
            assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
    for wrong, used in ((10**6, k.shape[0] - 1), (-(2**31), 0)):
        found = copies(q, k, v, torch.full_like(table, wrong), lengths, *rest)
        for a, b in zip(found, copies(q, k, v, torch.full_like(table, used), lengths, *rest), strict=True):
            assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def test_attention_to_the_copies_is_attention_to_the_cache(device):
    """The portable kernel takes either; tokens of the copies past a length are NaN."""
    arguments = make(device, LENGTHS, N_Q, page=16, dim=32, heads=(4, 2), dtype=torch.float32)
    q, k, v, table, lengths, starts, k_scale, v_scale, _ = arguments
    k16, v16, own = copies(*arguments)
    wanted = attention_paged(q, k, v, table, lengths, starts, k_scale=k_scale, v_scale=v_scale, scale=0.01)
    found = attention_paged(q, k16, v16, own, lengths, starts, cache_layout="bhtd", scale=0.01)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pages_tokens_and_heads_of_a_large_cache_are_found_beyond_2_to_the_31(axis, device):
    """They are 2^30 + 64 elements apart: an int32 offset of the last one would be negative."""
    arguments = make(device, [40], [5], page=16, dim=16, heads=(4, 4))
    q, k, v, *rest = arguments
    strides = list(k.stride())
    strides[axis] = 2**30 + 64
    try:
        memory = torch.UntypedStorage(k.shape[axis] * strides[axis], device=device)
        far = torch.empty(0, dtype=torch.uint8, device=device).set_(memory, 0, k.shape, strides)
        far.copy_(k.view(torch.uint8))
    except RuntimeError as error:
        pytest.skip(f"this machine does not map 16 GiB of unused memory: {error}")
    found = copies(q, far.view(FP8), v, *rest)
    for a, b in zip(found, copies(*arguments), strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def problem(tokens=2048, batch=4, heads=(32, 8), pages=64, page=64, kind=FP8, dims=(128, 128)):
    def on_meta(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    k, v = (on_meta(256, page, heads[1], dim, dtype=kind) for dim in dims)
    q = on_meta(tokens, heads[0], dims[0], dtype=BF16)
    scale = on_meta(heads[1], dtype=torch.float32)
    indices = on_meta(batch, pages), on_meta(batch), on_meta(batch + 1)
    a = paged._Arguments(q, k, v, *indices, scale, scale, None, None, tokens // batch, None, 0.0, -1, 0, "bthd")
    return a.problem(Scoring(0.1, right=0))


@pytest.mark.parametrize("kind", [FP8, torch.int8, BF16])
def test_a_long_prompt_runs_the_hopper_kernel(kind):
    pytest.importorskip("rooftile.ops.attention.hopper_forward")
    p = problem(kind=kind)
    assert choose_forward(p, TARGET).kernel == "hopper"
    assert choose_forward(p, runtime.TARGETS["sm_80"]).kernel == "portable"
    assert choose_forward(problem(kind=kind, dims=(128, 64)), TARGET).kernel == "portable"
    # A head of 24 elements is 24 bytes: TMA could not read such a cache, and reads its copy.
    assert choose_forward(problem(kind=kind, dims=(24, 24)), TARGET).kernel == "hopper"


def test_few_queries_of_each_cached_key_run_the_portable_kernel():
    pytest.importorskip("rooftile.ops.attention.hopper_forward")
    few = problem(4 * 65, heads=(8, 8))
    assert choose_forward(few, TARGET).kernel == "portable"
    assert choose_forward(problem(4 * 128, heads=(8, 8)), TARGET).kernel == "hopper"
    assert choose_forward(dataclasses.replace(few, narrow=False), TARGET).kernel == "hopper"
    assert can_implement_forward(few, HOPPER, TARGET) is None


def test_copies_that_take_too_much_memory_are_refused():
    pytest.importorskip("rooftile.ops.attention.hopper_forward")
    least, more = problem(pages=1024), problem(pages=1025)  # 2^18 tokens of 4 KiB, and a page more each
    assert dequantize_pages.nbytes(least) == dequantize_pages.MOST_BYTES
    assert choose_forward(least, TARGET).kernel == "hopper"
    assert choose_forward(more, TARGET).kernel == "portable"
    assert "a copy of up to 1073741824 bytes" in can_implement_forward(more, HOPPER, TARGET)


PAGED = all_cases()["attention_paged"]
SMALL = tuple(p for p in PAGED.sets["llm"] if p["cache"])
CASES = (dataclasses.replace(PAGED, name="attention_paged, 8 bits", spills=0, sets={"llm": SMALL}),)


@pytest.mark.nightly
def test_it_compiles_for_sm_90():
    rows = compile_on("sm_90", plan(CASES, sets=["llm"], source=__name__), {c.name: c for c in CASES})
    assert not [row.message for row in rows if row.verdict != "PASS" and row.dtype != "fp32"]
    kernels = [row.kernel for row in rows if row.kernel and row.kernel.name == "dequantize_pages_kernel"]
    assert len(kernels) == 2 * len(SMALL)
    assert {(kernel.load, kernel.store) for kernel in kernels} == {("16", "16")}


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["tensor", "head", "token"])
@pytest.mark.parametrize("kind", [FP8, torch.int8, BF16])
@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (100, 0)}, {"softcap": 20.0}], ids=str)
def test_the_hopper_kernel_is_the_portable_one(device, page, kind, by, options):
    skip_elsewhere(device)
    lengths, n_q = [700, 1, 0, 64, 129, 2048, 300, 17], [300, 1, 3, 64, 0, 128, 300, 1]
    q, k, v, *indices, k_scale, v_scale, _ = make(
        device, lengths, n_q, page=page, dim=128, kind=kind, by=by, heads=(8, 2)
    )
    given = {"k_scale": k_scale, "v_scale": v_scale, "scale": 0.002, "return_lse": True, **options}
    if kind == BF16:
        wanted, wanted_lse = attention_paged(q.float(), k.float(), v.float(), *indices, **given)
    else:
        wanted, wanted_lse = attention_paged(q.float(), k, v, *indices, **given)
    out, lse = attention_paged(q, k, v, *indices, config=HOPPER, **given)
    assert (out.double() - wanted.double()).norm() < 8e-3 * wanted.double().norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-2)
    again = torch.full_like(out, float("nan"))
    attention_paged(q, k, v, *indices, config=HOPPER, out=again, **{**given, "return_lse": False})
    assert torch.equal(again, out)
