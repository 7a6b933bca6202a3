"""The attention forward of sm_90 in its forms, against attention in float32."""

import dataclasses

import pytest
import torch
from helpers import BF16
from test_attention_backward import formula

from rooftile import runtime
from rooftile.ops.attention.problem import AttentionConfig, Extras, Problem, Scoring

hopper_forward = pytest.importorskip("rooftile.ops.attention.hopper_forward")
CONFIG = AttentionConfig("hopper", 128, 128, num_warps=8, num_stages=4)
CONFIGS = {
    64: AttentionConfig("hopper", 192, 128, num_warps=12, num_stages=6),
    128: CONFIG,
    256: AttentionConfig("hopper", 128, 64, num_warps=8, num_stages=2),
}


def config(head_dim):
    return CONFIGS[next(dim for dim in CONFIGS if head_dim <= dim)]


def apart(batch, heads, rows, cols, dtype, device, layout):
    """Drawn, with NaN between the heads, the rows and the batches."""
    shape = (batch, rows, heads, cols) if layout == "bthd" else (batch, heads, rows, cols)
    buffer = torch.full((shape[0], shape[1] + 1, shape[2] + 1, cols + 8), torch.nan, dtype=dtype, device=device)
    t = buffer[:, : shape[1], : shape[2], :cols]
    t.copy_(torch.randn(shape, device=device))
    return t.transpose(1, 2) if layout == "bthd" else t


POINTS = [
    # batch, heads, kv_heads, n_q, n_k, head_dim, softcap, left, right, sinks, dtype, layout
    (2, 2, 2, 1, 1, 128, 0.0, -1, -1, False, BF16, "bhtd"),
    (2, 8, 2, 515, 777, 128, 0.0, -1, 0, False, BF16, "bthd"),
    (2, 8, 2, 777, 515, 128, 0.0, -1, 0, False, BF16, "bhtd"),  # the first queries see nothing
    (3, 16, 16, 1000, 1000, 128, 0.0, -1, -1, False, torch.half, "bhtd"),
    (3, 16, 16, 1000, 1000, 64, 0.0, -1, 0, True, BF16, "bthd"),
    (2, 4, 4, 1000, 1000, 128, 20.0, 100, 0, True, BF16, "bhtd"),
    (2, 4, 1, 700, 1000, 96, 0.0, 100, 50, False, BF16, "bhtd"),
    (2, 4, 4, 300, 300, 40, 0.0, -1, -1, False, BF16, "bthd"),
    (2, 4, 4, 600, 600, 256, 0.0, -1, 0, False, BF16, "bhtd"),
    (8, 16, 16, 2048, 2048, 128, 0.0, -1, 0, False, BF16, "bhtd"),
    (2, 32, 8, 1000, 1000, 64, 0.0, -1, -1, False, BF16, "bhtd"),
    (2, 32, 8, 777, 1300, 64, 20.0, 300, 0, True, BF16, "bhtd"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_it_is_attention(point, device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernel is for sm_90, and the GPU is {runtime.target(device).arch}")
    batch, heads, kv_heads, n_q, n_k, head_dim, softcap, left, right, with_sinks, dtype, layout = point
    torch.manual_seed(0)
    q = apart(batch, heads, n_q, head_dim, dtype, device, layout)
    k, v = (apart(batch, kv_heads, n_k, head_dim, dtype, device, layout) for _ in range(2))
    sinks = torch.randn(heads, device=device) if with_sinks else None
    s = Scoring(head_dim**-0.5, softcap, left, right)
    out = torch.full((batch, heads, n_q, head_dim), torch.nan, dtype=dtype, device=device)
    lse = torch.full((batch, heads, n_q), torch.nan, device=device)
    hopper_forward.launch(q, k, v, out, lse, Extras(sinks=sinks), s, config(head_dim))
    expected, expected_lse = formula(q.float(), k.float(), v.float(), s, sinks=sinks)
    error = (out.float() - expected).norm() / expected.norm()
    assert error < (5e-3 if dtype == BF16 else 1e-3)  # rounding of weights and output alone is a third of it
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)
    again = torch.full_like(out, torch.nan)
    hopper_forward.launch(q, k, v, again, None, Extras(sinks=sinks), s, config(head_dim))
    assert torch.equal(out, again)


def problem(point):
    batch, heads, kv_heads, n_q, n_k, head_dim, softcap, left, right, with_sinks, dtype, _layout = point
    scoring = Scoring(head_dim**-0.5, softcap, left, right)
    return Problem(batch, heads, kv_heads, n_q, n_k, head_dim, head_dim, dtype, scoring, sinks=with_sinks)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_it_takes_what_its_tests_give_it(point):
    assert hopper_forward.refuses(problem(point), config(point[5]), runtime.TARGETS["sm_90"]) is None


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float32},
        {"mask": "bool"},
        {"alibi": True},
        {"packed": True},
        {"head_dim": 100, "value_dim": 100},
        {"value_dim": 64},
        {"aligned": False},
        {"n_k": 0},
        {"scoring": Scoring(0.0)},
        {"scoring": Scoring(1e-40)},
        {"scoring": Scoring(1e9)},
        {"scoring": Scoring(0.1, 1e9)},
    ],
    ids=str,
)
def test_it_leaves_the_rest_to_the_portable_kernel(other):
    p = dataclasses.replace(problem(POINTS[1]), **other)
    assert "kernel 'hopper' takes" in hopper_forward.refuses(p, CONFIG, runtime.TARGETS["sm_90"])


@pytest.mark.parametrize(("rows", "warps"), [(192, 8), (128, 12), (64, 4), (256, 16)])
def test_rows_and_warps_go_together(rows, warps):
    c = dataclasses.replace(CONFIG, block_m=rows, num_warps=warps)
    assert "for every 4 of 8 or 12 warps" in hopper_forward.refuses(problem(POINTS[1]), c, runtime.TARGETS["sm_90"])


@pytest.mark.parametrize(("name", "value"), [("block_m", 100), ("num_warps", 6), ("block_n", 96), ("num_stages", 0)])
def test_odd_sizes_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
        dataclasses.replace(CONFIG, **{name: value})


@pytest.mark.parametrize(("n_q", "n_k"), [(8192, 8192), (1000, 3000), (3000, 1000)])
def test_every_tile_has_its_place_and_programs_end_together(n_q, n_k):
    t = hopper_forward._tiling(CONFIG, Scoring(0.1, right=0), 128, runtime.TARGETS["sm_90"].shared_memory)
    programs, batch, heads = 132, 2, 16
    table = hopper_forward.schedule(t, batch, heads, n_q, n_k, 2, programs)
    counts, rest = table[:programs], table[programs:]
    taken = [[rest[i * programs + p] for i in range(counts[p])] for p in range(programs)]
    costs = hopper_forward._costs(t, n_q, n_k)
    assert sorted(tile for tiles in taken for tile in tiles) == list(range(batch * heads * len(costs)))
    sums = [sum(costs[tile % len(costs)] for tile in tiles) for tiles in taken]
    assert max(sums) - min(sums) <= max(costs)
