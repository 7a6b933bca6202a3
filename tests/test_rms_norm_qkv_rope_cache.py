"""rms_norm_qkv_rope_cache: the same to the bit as the two ops that it is, where it is one kernel and where not; what is
not written; errors."""

import pytest
import torch
from helpers import BF16, assert_same

from rooftile import GemmConfig, launching, library, runtime
from rooftile.ops.gemm import gemv, gemv_persistent
from rooftile.ops.gemm.norm_linear import rms_norm_linear
from rooftile.ops.gemm.qkv_rope_cache import choose_kernel, rms_norm_qkv_rope_cache
from rooftile.ops.gemm.weight_only import quantize_int4, quantize_int8
from rooftile.ops.kv_cache import rope_and_cache
from rooftile.primitives.paging import Cache

K, D, CAPACITY, PAGE = 96, 16, 40, 16


def drawn(device, dtype=torch.float32, heads=(6, 2), head_dim=D, rows=(1, 1), bias=True, rotary=None, k=K):
    """x, the weights and the bias, cos and sin."""
    n = (heads[0] + 2 * heads[1]) * head_dim
    x, norm, b = (torch.randn(s, device=device).to(dtype) for s in ((*rows, k), (k,), (n,)))
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    angle = torch.randn(CAPACITY, (rotary or head_dim) // 2, device=device).repeat(1, 2)
    return {"x": x, "norm_weight": norm, "weight": weight, "bias": b if bias else None}, (angle.cos(), angle.sin())


def caches(device, dtype, heads, head_dim=D, batch=1, paged=False, layout="bthd"):
    """Two, of NaN, so that what should not be written shows."""
    shape = [5, PAGE, heads, head_dim] if paged else [batch, CAPACITY, heads, head_dim]
    if layout == "bhtd":
        shape[1], shape[2] = shape[2], shape[1]
    return tuple(torch.full(shape, torch.nan, device=device, dtype=dtype) for _ in range(2))


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def apart(
    given, angles, written, starts, *, heads, weight_scale=None, config=None, eps=1e-6, offset=0.0, layout="bthd",
    **options,
):  # fmt: skip
    """The two ops, one after the other."""
    qkv = rms_norm_linear(**given, weight_scale=weight_scale, eps=eps, offset=offset, config=config)
    by_head = qkv.unflatten(-1, (heads[0] + 2 * heads[1], -1))
    parts = by_head.split((heads[0], heads[1], heads[1]), dim=2)
    if layout == "bhtd":
        parts = [t.transpose(1, 2) for t in parts]
    return rope_and_cache(*parts, *angles, *written, starts, layout=layout, cache_layout=layout, **options)


def together(given, angles, written, starts, *, heads=None, config=None, layout="bthd", **options):
    x, norm, weight, bias = given.values()
    return rms_norm_qkv_rope_cache(
        x, norm, weight, *angles, *written, starts, bias=bias, layout=layout, cache_layout=layout, **options
    )


def bits(x):
    return x.contiguous().view(torch.uint8)  # NaN is what it was, too


def assert_the_same(given, angles, written, starts, *, heads, **options):
    again = [t.clone() for t in written]
    scales = {n: t.clone() for n, t in options.items() if n in ("k_scale", "v_scale")}
    q = together(given, angles, written, starts, **options)
    expected = apart(given, angles, again, starts, heads=heads, **options | scales)
    assert q.stride() == expected.stride()
    if runtime.MODE is runtime.Mode.INTERPRETER:
        assert torch.equal(bits(q), bits(expected))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(written, again, strict=True))
    else:  # a compiler may fuse a product and a sum in one of them alone
        pairs = [(q, expected), *zip(written, again, strict=True)]
        pairs = [(a.float(), b.float()) if a.dtype == torch.float8_e4m3fn else (a, b) for a, b in pairs]
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in pairs)
        assert_same([a.nan_to_num() for a, _ in pairs], [b.nan_to_num() for _, b in pairs])
    return q, written


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were launched."""
    names = []
    real = launching.Launch

    def launch(plan, *args):
        names.append(plan.kernel.__name__ + " qkv" * (plan.constants.get("EPILOGUE") == "qkv"))
        return real(plan, *args)

    launching.forget()
    monkeypatch.setattr(launching, "Launch", launch)
    return names


ONE = ("gemv_kernel qkv", "gemv_persistent_kernel qkv")  # the interpreter takes the first for all dtypes


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(("paged", "layout"), [(False, "bthd"), (True, "bthd"), (False, "bhtd"), (True, "bhtd")])
@pytest.mark.parametrize(("heads", "bias"), [((6, 2), True), ((3, 3), False), ((5, 1), True)])
def test_one_token_is_one_kernel_and_the_two_ops_to_the_bit(dtype, paged, layout, heads, bias, launched, device):
    given, angles = drawn(device, dtype, heads, bias=bias)
    table = {"page_table": ints([[3, 0, 4]], device)} if paged else {}
    written = caches(device, dtype, heads[1], paged=paged, layout=layout)
    options = {"heads": heads, "eps": 0.1, "offset": 1.0, "layout": layout, **table}
    q, _ = assert_the_same(given, angles, written, ints([17], device), **options)
    assert launched[0] in ONE
    assert sum(name in ONE for name in launched) == 1
    assert launched[1] != "rope_kernel"
    assert torch.isfinite(q).all()
    for cache in written:
        by_token = cache.transpose(1, 2) if layout == "bhtd" else cache
        block, row = (0, 1) if paged else (0, 17)
        assert torch.isfinite(by_token[block, row]).all()
        assert cache.isfinite().sum() == heads[1] * D  # and nothing else was written


@pytest.mark.parametrize("head_dim", [2, 6, 34, 64])
def test_head_dims_of_any_even_size(head_dim, launched, device):
    """Pairs of several heads in a program, and heads in several programs."""
    given, angles = drawn(device, BF16, (5, 1), head_dim)
    written = caches(device, BF16, 1, head_dim)
    assert_the_same(given, angles, written, ints([4], device), heads=(5, 1))
    assert launched[0] in ONE


PLACELESS = pytest.mark.parametrize(
    ("starts", "more"),
    [
        ([-1], {}),  # no sequence
        ([CAPACITY], {}),  # past the cache and the table of angles: q is NaN
        ([3], {"counts": [0]}),
        ([3], {"counts": [1]}),
        ([3 * PAGE], {"page_table": [[1, 2, 3]]}),
        ([2 * PAGE], {"page_table": [[1, 2, 5]]}),  # no such page
        ([2 * PAGE], {"page_table": [[1, 2, -1]]}),
        ([PAGE - 1], {"page_table": [[1, 2]], "counts": [1]}),
    ],
)


@PLACELESS
def test_tokens_that_have_no_place_are_left_out(starts, more, launched, device, monkeypatch):
    """As the kernel sees it, which can't raise: here without the look that is taken at what is on the CPU."""
    monkeypatch.setattr("rooftile.ops.kv_cache.check_values", lambda *_: None)
    given, angles = drawn(device, BF16)
    written = caches(device, BF16, 2, paged="page_table" in more)
    options = {name: ints(values, device) for name, values in more.items()}
    q, _ = assert_the_same(given, angles, written, ints(starts, device), heads=(6, 2), **options)
    assert launched[0] in ONE
    if starts[0] < 0 or more.get("counts") == [0]:
        assert not q.any()


def test_x_of_no_finite_number_leaves_no_trace_where_there_is_no_token(device):
    given, angles = drawn(device, BF16)
    given["x"][..., 3] = torch.inf
    written = caches(device, BF16, 2)
    q, _ = assert_the_same(given, angles, written, ints([-1], device), heads=(6, 2))
    assert not q.any()


def test_angles_given_by_token(launched, device):
    given, (cos, sin) = drawn(device, BF16)
    written = caches(device, BF16, 2)
    angles = cos[None, 7:8].to(BF16), sin[None, 7:8].to(BF16)
    assert_the_same(given, angles, written, ints([11], device), heads=(6, 2))
    assert launched[0] in ONE


def test_weights_of_any_layout_and_views_of_a_larger_cache(launched, device):
    given, angles = drawn(device)
    given["weight"] = given["weight"].T.contiguous().T
    given["x"] = torch.stack((given["x"], given["x"]), -1)[..., 0]
    memory = [torch.full((2, 1, CAPACITY, 4, D + 3), torch.nan, device=device) for _ in range(2)]
    written = [m[1, :, :, 1:3, 2 : 2 + D] for m in memory]
    assert_the_same(given, angles, written, ints([5], device), heads=(6, 2))
    assert launched[0] == "gemv_kernel qkv"
    assert all(m.isfinite().sum() == 2 * D for m in memory)


@pytest.fixture
def kept(monkeypatch):
    """The function that has every one token taken by kernel "gemv_persistent", in tiles of so many rows, stages ahead
    or not."""

    def keep(rows, stages, k=K):
        c = GemmConfig("gemv_persistent", 1, rows, library.power_of_two(k), 1, 1, 4, stages)
        monkeypatch.setattr("rooftile.ops.gemm.qkv_rope_cache.choose_fused", lambda *_: c)
        return c

    return keep


@pytest.mark.each_once
@pytest.mark.parametrize("style", gemv_persistent.STYLES)
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "k", "bias", "rows", "stages", "paged", "layout"),
    [
        (BF16, (6, 2), 64, 96, True, 2, 2, False, "bthd"),  # one pair a tile
        pytest.param(BF16, (6, 2), 64, 96, True, 2, 2, True, "bthd", marks=pytest.mark.nightly),
        pytest.param(BF16, (6, 2), 64, 96, True, 2, 2, True, "bhtd", marks=pytest.mark.nightly),
        (BF16, (3, 1), 80, 128, False, 4, 2, True, "bhtd"),  # a tile of pairs of two heads
        (torch.float16, (2, 2), 128, 130, True, 16, 1, False, "bthd"),
        (BF16, (5, 1), 6, 96, True, 16, 2, False, "bthd"),  # a tile of q, k and v, and one past the last
        (BF16, (5, 1), 6, 96, True, 16, 2, True, "bhtd"),
    ],
)
def test_x_that_is_held(style, dtype, heads, head_dim, k, bias, rows, stages, paged, layout, kept, launched, device):
    given, angles = drawn(device, dtype, heads, head_dim, bias=bias, k=k)
    if style == "interleaved":
        angles = tuple(t[:, : head_dim // 2].repeat_interleave(2, 1) for t in angles)
    config = kept(rows, stages, k)
    table = {"page_table": ints([[3, 0, 4]], device)} if paged else {}
    written = caches(device, dtype, heads[1], head_dim, paged=paged, layout=layout)
    options = {"heads": heads, "eps": 0.1, "offset": 1.0, "layout": layout, "style": style, "config": config, **table}
    q, _ = assert_the_same(given, angles, written, ints([17], device), **options)
    assert launched[0] == "gemv_persistent_kernel qkv"
    assert torch.isfinite(q).all()
    for cache in written:
        by_token = cache.transpose(1, 2) if layout == "bhtd" else cache
        block, row = (0, 1) if paged else (0, 17)
        assert torch.isfinite(by_token[block, row]).all()
        assert cache.isfinite().sum() == heads[1] * head_dim  # and nothing else was written


@PLACELESS
def test_x_that_is_held_of_a_token_that_has_no_place(starts, more, kept, launched, device, monkeypatch):
    monkeypatch.setattr("rooftile.ops.kv_cache.check_values", lambda *_: None)
    given, angles = drawn(device, BF16)
    config = kept(4, 2)
    written = caches(device, BF16, 2, paged="page_table" in more)
    options = {name: ints(values, device) for name, values in more.items()} | {"heads": (6, 2), "config": config}
    if starts[0] < 0:
        given["x"][..., 3] = torch.inf
    q, _ = assert_the_same(given, angles, written, ints(starts, device), **options)
    assert launched[0] == "gemv_persistent_kernel qkv"
    if starts[0] < 0 or more.get("counts") == [0]:
        assert not q.any()


@pytest.mark.each_once
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("style", gemv_persistent.STYLES)
def test_x_that_is_held_for_several_tiles(style, stages, kept, device, monkeypatch):
    """In the interpreter a program has one otherwise."""
    monkeypatch.setattr(gemv_persistent, "programs_for", lambda *_: 3)
    given, angles = drawn(device, BF16, bias=True)
    options = {"heads": (6, 2), "style": style, "config": kept(4, stages)}
    q, _ = assert_the_same(given, angles, caches(device, BF16, 2), ints([17], device), **options)
    assert torch.isfinite(q).all()


def test_x_that_is_held_with_angles_by_token_and_views_of_a_larger_cache(kept, launched, device):
    given, (cos, sin) = drawn(device, BF16)
    config = kept(2, 2)
    memory = [torch.full((2, 1, CAPACITY, 4, D + 3), torch.nan, device=device, dtype=BF16) for _ in range(2)]
    written = [m[1, :, :, 1:3, 2 : 2 + D] for m in memory]
    angles = cos[None, 7:8], sin[None, 7:8]
    assert_the_same(given, angles, written, ints([11], device), heads=(6, 2), config=config)
    assert launched[0] == "gemv_persistent_kernel qkv"
    assert all(m.isfinite().sum() == 2 * D for m in memory)


def test_which_kernel_is_chosen(monkeypatch):
    """Of Llama-3-8B's sizes and others, as a GPU sees them."""
    monkeypatch.setattr(runtime, "target", lambda _: runtime.TARGETS["sm_90"])

    def kernel(k=4096, dtype=BF16, weight=None, style="half", rotary=128, cache=None, rows=1):
        x, w = (torch.empty(s, dtype=dtype, device="meta") for s in ((1, rows, k), (6144, k)))
        scale = None if weight is None else torch.empty(6144, 1, device="meta")
        cells = torch.empty(1, 64, 8, 128, dtype=cache or dtype, device="meta")
        place = Cache(cells, cells, ints([3], "meta"), None, None, None, None, "", "bthd")
        cos = torch.empty(64, rotary, device="meta")
        c = choose_kernel(x, w if weight is None else w.to(weight), scale, cos, style, place)
        return None if c is None else c[1].kernel

    fp8 = torch.float8_e4m3fn
    for options in ({}, {"k": 3584}, {"k": 8192}, {"dtype": torch.float16}, {"style": "interleaved"}):
        assert kernel(**options) == "gemv_persistent", options
    for options in ({"k": 8200}, {"dtype": torch.float32}, {"weight": fp8}, {"k": 8192, "weight": torch.int8}):
        assert kernel(**options) == "gemv", options
        assert kernel(**options, style="interleaved") is None, options
    assert kernel(weight=torch.int8) == "gemv_imma"
    for options in ({"style": "deepseek"}, {"rotary": 64}, {"cache": fp8}, {"rows": 2}):
        assert kernel(**options) is None, options


@pytest.mark.parametrize("format", ["int8", "float8_e4m3fn", "int4"])
def test_weights_of_fewer_bits(format, launched, device):
    given, angles = drawn(device, BF16)
    if format == "int8":
        given["weight"], scale = quantize_int8(given["weight"])
    elif format == "int4":
        given["weight"], scale = quantize_int4(given["weight"], 32)
    else:
        scale = torch.rand(10 * D, 1, device=device) + 0.5
        given["weight"] = given["weight"].to(torch.float8_e4m3fn)
    for rows in ((1, 1), (2, 3)):
        given["x"] = torch.randn(*rows, K, device=device).to(BF16)
        written = caches(device, BF16, 2, batch=rows[0])
        starts = ints([7, 2][: rows[0]], device)
        assert_the_same(given, angles, written, starts, heads=(6, 2), weight_scale=scale)
    assert launched[0] == "gemv_kernel qkv"
    assert launched.count("gemv_kernel qkv") == 1


def test_what_the_one_kernel_does_not_take_goes_through_the_two_ops(launched, device):
    (given, angles), starts = drawn(device, BF16), ints([9], device)
    of_16 = {"heads": (6, 2)}
    for rows in ((2, 1), (1, 3), (3, 2)):
        several, _ = drawn(device, BF16, rows=rows)
        batch = rows[0]
        written = caches(device, BF16, 2, batch=batch)
        assert_the_same(several, angles, written, ints([9, 30, 1][:batch], device), **of_16)
    assert_the_same(given, angles, caches(device, BF16, 2), starts, style="deepseek", **of_16)
    in_32, _ = drawn(device)
    assert_the_same(in_32, angles, caches(device, torch.float32, 2), starts, style="interleaved", **of_16)
    _, partial = drawn(device, BF16, rotary=10)
    assert_the_same(given, partial, caches(device, BF16, 2), starts, rotary_dim=10, **of_16)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        written = [torch.zeros(1, CAPACITY, 2, D, device=device).to(dtype) for _ in range(2)]
        scales = {n: torch.zeros(1, CAPACITY, 2, device=device) for n in ("k_scale", "v_scale")}
        assert_the_same(given, angles, written, starts, **of_16, **scales)
        assert (scales["k_scale"][0, 9] > 0).all()
    assert not set(ONE) & set(launched)


def test_no_tokens(device):
    given, angles = drawn(device, BF16, rows=(1, 0))
    written = caches(device, BF16, 2)
    assert together(given, angles, written, ints([3], device)).shape == (1, 0, 6, D)
    assert all(cache.isnan().all() for cache in written)


def test_gradients_are_refused_by_name(device):
    given, angles = drawn(device)
    for name in ("x", "norm_weight", "weight", "bias"):
        asking = {**given, name: given[name].clone().requires_grad_()}
        written = caches(device, torch.float32, 2)
        with pytest.raises(ValueError, match=f"rms_norm_qkv_rope_cache: {name} requires grad, but .* has no"):
            together(asking, angles, written, ints([3], device))
        assert all(cache.isnan().all() for cache in written)
        with torch.no_grad():
            together(asking, angles, written, ints([3], device))


def test_errors_before_anything_is_written(device):
    given, (cos, sin) = drawn(device)
    x, norm, weight, bias = given.values()
    k, v = caches(device, torch.float32, 2)
    starts, table = ints([3], device), ints([[0, 1]], device)
    rows_of = r"weight has {} rows, expected \(q_heads \+ 2 \* 2\) \* 16"
    wrong = [
        ({"x": x[0]}, ValueError, r"x has shape \(1, 96\), expected \(batch, tokens, K\)"),
        ({"x": x[..., :7]}, ValueError, r"norm_weight has shape \(96,\), expected \(7,\)"),
        ({"weight": weight[:, :7]}, ValueError, r"weight has shape \(160, 7\), expected \(N, 96\)"),
        ({"weight": weight[:150], "bias": None}, ValueError, rows_of.format(150)),
        ({"weight": weight[:64], "bias": None}, ValueError, rows_of.format(64)),
        ({"weight": weight.half()}, TypeError, "weight has dtype torch.float16, expected torch.float32"),
        ({"bias": bias[:5]}, ValueError, r"bias has shape \(5,\), expected \(160,\)"),
        ({"k_cache": k[0]}, ValueError, r"k_cache has shape .*, expected 4 dimensions, bthd, the first 1"),
        ({"k_cache": k.expand(2, -1, -1, -1)}, ValueError, "k_cache has shape .*, expected 4 dimensions, bthd"),
        ({"k_cache": k.half()}, TypeError, "k_cache has dtype torch.float16, expected torch.float32 to match x"),
        ({"v_cache": v[..., :8]}, ValueError, r"v_cache has shape .* to match k_cache"),
        ({"v_cache": v.half()}, TypeError, "v_cache has dtype torch.float16, expected torch.float32 to match k_cache"),
        ({"v_cache": k}, ValueError, "v_cache is the same memory as k_cache"),
        ({"starts": ints([3, 4], device)}, ValueError, r"starts has shape \(2,\), expected \(1,\)"),
        ({"starts": starts.float()}, TypeError, "starts has dtype torch.float32, expected int32"),
        ({"starts": starts.long()}, TypeError, "starts has dtype torch.int64, expected int32"),
        ({"page_table": table.long()}, TypeError, "page_table has dtype torch.int64, expected int32"),
        ({"page_table": table[0]}, ValueError, r"page_table has shape \(2,\), expected \(1, max_pages\)"),
        ({"page_table": table}, ValueError, "k_cache has pages of 40 tokens, expected a power of two"),
        ({"cos": cos[:, :7]}, ValueError, r"sin has shape \(40, 16\), expected \(40, 7\)"),
        ({"cos": cos[:, :7], "sin": sin[:, :7]}, ValueError, "cos has a rotary dimension of 7, expected an even one"),
        ({"style": "llama"}, ValueError, "style is 'llama', expected one of half"),
        ({"layout": "thd"}, ValueError, "layout is 'thd', expected one of bhtd, bthd"),
        ({"eps": "0"}, TypeError, "eps is a str, expected a number"),
        (
            {"weight_scale": bias},
            TypeError,
            "weight has dtype torch.float32, expected torch.int8, torch.float8",
        ),
    ]
    right = {"x": x, "norm_weight": norm, "weight": weight, "cos": cos, "sin": sin, "bias": bias}
    right |= {"k_cache": k, "v_cache": v, "starts": starts}
    for change, error, message in wrong:
        with pytest.raises(error, match=f"rms_norm_qkv_rope_cache: .*{message}"):
            rms_norm_qkv_rope_cache(**right | change)
    assert all(cache.isnan().all() for cache in (k, v))
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"starts\[0\] is 40, and 1 new tokens go beyond"):
            rms_norm_qkv_rope_cache(**right | {"starts": ints([40], device)})


def test_it_is_launched_early_where_that_can_be(monkeypatch, device):
    plans = []
    monkeypatch.setattr(launching, "bind", lambda plan, *_, **__: plans.append(plan) or (lambda *tensors: None))
    for dtype in (torch.float32, BF16):
        given, angles = drawn(device, dtype)
        for arch in ("sm_90", "sm_89"):
            monkeypatch.setattr(runtime, "target", lambda device, arch=arch: runtime.TARGETS[arch])
            launching.forget()  # on a GPU the other target's call is remembered
            together(given, angles, caches(device, dtype, 2), ints([3], device))
    assert [plan.constants["PREFETCH"] for plan in plans[:2]] == [gemv.PREFETCH, -1]
    assert [plan.constants["EARLY"] for plan in plans[2:]] == [True, False]
    assert [plan.constants["LAUNCH_DEPENDENTS"] for plan in plans[2:]] == [True, False]
    assert [plan.options.get("launch_pdl", False) for plan in plans] == [True, False] * 2
