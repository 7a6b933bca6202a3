"""The backward of attention for sm_90 against autograd in float32, in the forms that it takes."""

import dataclasses

import pytest
import torch
from test_attention_backward import formula

from rooftile import runtime
from rooftile.ops.attention import ops
from rooftile.ops.attention.problem import AttentionConfig, Inputs, Problem, Scoring

hopper_backward = pytest.importorskip("rooftile.ops.attention.hopper_backward")

HALF, BF16 = torch.float16, torch.bfloat16
# batch, query heads, KV heads, n_q, n_k, left, right, softcap
SHAPES = (
    (2, 2, 2, 512, 512, -1, -1, 0.0),
    (1, 3, 3, 1024, 1024, -1, 0, 0.0),
    (2, 4, 2, 777, 777, -1, -1, 0.0),
    (1, 8, 2, 300, 650, -1, 0, 0.0),
    (1, 2, 1, 650, 300, -1, 0, 0.0),  # rows that see no key
    (1, 2, 2, 700, 700, 100, 0, 0.0),
    (1, 2, 2, 700, 700, 60, 40, 0.0),
    (1, 2, 2, 500, 500, -1, 0, 20.0),
    (1, 2, 2, 1, 1, -1, -1, 0.0),
    (1, 2, 2, 64, 129, -1, -1, 0.0),
)
# What products of 16-bit operands lose, with p and ds rounded too: SDPA's backward loses as much.
LIMIT = {BF16: 1.2e-2, HALF: 2e-3}


def config(head_dim, stages=2):
    return AttentionConfig("hopper", 128 if head_dim <= 64 else 64, 128, 8, stages)


def error(x, y):
    """Relative; a softmax over one key has no gradient to be relative to."""
    return ((x.float() - y).norm() / max(y.norm().item(), 0.05 * y.numel() ** 0.5)).item()


def skip_elsewhere(device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip(f"the kernel is for sm_90, and the GPU is {runtime.target(device).arch}")


class Drawn:
    """The inputs of a backward, and the gradients that autograd finds of them in float32."""

    def __init__(self, shape, head_dim, dtype, device, with_sinks=False):
        batch, heads, kv_heads, n_q, n_k, left, right, softcap = shape

        def draw(n_heads, n):
            x = torch.randn(batch, n, n_heads, head_dim, device=device).to(dtype).transpose(1, 2)
            return x if n % 2 else x.contiguous()

        self.q, self.k, self.v = draw(heads, n_q), draw(kv_heads, n_k), draw(kv_heads, n_k)
        self.dout = draw(heads, n_q)
        self.dlse = torch.randn(batch, heads, n_q, device=device) if n_q % 4 == 0 else None
        self.sinks = torch.randn(heads, device=device) if with_sinks else None
        self.s = Scoring(head_dim**-0.5, softcap, left, right)
        wide = [x.float().requires_grad_() for x in (self.q, self.k, self.v)]
        sinks = self.sinks.clone().requires_grad_() if with_sinks else None
        out, lse = formula(*wide, self.s, sinks=sinks)
        total = (out * self.dout.float()).sum()
        if self.dlse is not None:
            total = total + (torch.where(torch.isfinite(lse), lse, 0.0) * self.dlse).sum()
        self.expected = torch.autograd.grad(total, [*wide, sinks] if with_sinks else wide)
        self.out, self.lse = out.detach().to(dtype), lse.detach().contiguous()

    def gradients(self, deterministic, wanted=("dq", "dk", "dv")):
        """dq, dk, dv and dsinks, None where not wanted."""
        like = {"dq": self.q, "dk": self.k, "dv": self.v}
        found = [torch.full_like(x, torch.nan) if name in wanted else None for name, x in like.items()]
        dsinks = None if self.sinks is None else torch.full_like(self.sinks, torch.nan)
        found = (*found, dsinks)
        x = Inputs(
            self.q, self.k, self.v, self.s, sinks=self.sinks, longest_q=self.q.shape[2], longest_k=self.k.shape[2]
        )
        of_rows = (self.out, self.lse, self.dout, self.dlse)
        start = ops.prepare_backward(x, *of_rows, found, config=config(self.q.shape[3]), deterministic=deterministic)
        start(self.q, self.k, self.v, *of_rows, *found, *x.tensors)
        return found


@pytest.fixture
def dirty_memory(monkeypatch):
    """torch.empty gives memory that nobody can take for zeros."""
    stock = torch.empty

    def unwritten(*size, **options):
        t = stock(*size, **options)
        return t.fill_(torch.nan) if t.is_floating_point() else t.fill_(-77)

    monkeypatch.setattr(torch, "empty", unwritten)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_those_of_float32(shape, head_dim, dtype, deterministic, device, dirty_memory):
    skip_elsewhere(device)
    given = Drawn(shape, head_dim, dtype, device)
    found = given.gradients(deterministic)
    for name, one, other in zip(("dq", "dk", "dv"), found, given.expected, strict=False):
        assert error(one, other) < LIMIT[dtype], name
    if deterministic:
        again = given.gradients(deterministic)
        assert all(torch.equal(one, other) for one, other in zip(found[:3], again[:3], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("head_dim", [8, 40, 80, 96])
def test_other_heads_are_padded_on_the_way(head_dim, deterministic, device, dirty_memory):
    skip_elsewhere(device)
    for shape in ((1, 8, 2, 300, 650, -1, 0, 0.0), (2, 2, 2, 257, 129, 70, -1, 0.0)):
        given = Drawn(shape, head_dim, BF16, device)
        for one, other in zip(given.gradients(deterministic)[:3], given.expected, strict=True):
            assert error(one, other) < LIMIT[BF16]


@pytest.fixture
def three_programs(monkeypatch):
    """Programs that take many tiles: with one on each SM, none takes more than one in the shapes here."""
    target = runtime.target
    monkeypatch.setattr(runtime, "target", lambda device: dataclasses.replace(target(device), multiprocessors=3))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_programs_that_take_many_tiles_do_not_mix_them(
    shape, head_dim, deterministic, device, dirty_memory, three_programs
):
    skip_elsewhere(device)
    given = Drawn(shape, head_dim, BF16, device)
    for name, one, other in zip(("dq", "dk", "dv"), given.gradients(deterministic), given.expected, strict=False):
        assert error(one, other) < LIMIT[BF16], name


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_sinks_have_gradients_and_take_part_in_the_others(deterministic, device, dirty_memory):
    skip_elsewhere(device)
    given = Drawn((2, 4, 2, 300, 200, -1, 0, 0.0), 128, BF16, device, with_sinks=True)
    found = given.gradients(deterministic)
    for name, one, other in zip(("dq", "dk", "dv", "dsinks"), found, given.expected, strict=True):
        assert error(one, other) < LIMIT[BF16], name
    only = given.gradients(deterministic, wanted=())
    assert torch.equal(only[3], found[3])


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dv")], ids=str)
def test_what_nobody_asks_for_is_left_out(wanted, device, dirty_memory):
    skip_elsewhere(device)
    given = Drawn((1, 4, 2, 300, 400, -1, 0, 0.0), 128, BF16, device)
    for deterministic in (False, True):
        found = given.gradients(deterministic, wanted)
        for name, one, other in zip(("dq", "dk", "dv"), found, given.expected, strict=False):
            assert (one is None) == (name not in wanted)
            assert one is None or error(one, other) < LIMIT[BF16], name


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_strides_that_the_accelerator_has_not_go_by_way_of_a_copy(deterministic, device):
    skip_elsewhere(device)
    given = Drawn((1, 2, 2, 260, 260, -1, 0, 0.0), 64, BF16, device)
    given.dout = given.dout[:, :, :1].expand_as(given.dout)
    same = given.gradients(deterministic)
    given.dout = given.dout.contiguous()
    for one, other in zip(same[:3], given.gradients(deterministic)[:3], strict=True):
        assert error(one, other.float()) < 1e-3
    given.q, given.k, given.v = (
        torch.empty(1, 2, 260, 65, dtype=BF16, device=device)[..., :64].copy_(t) for t in (given.q, given.k, given.v)
    )
    for one, other in zip(same[:3], given.gradients(deterministic)[:3], strict=True):
        assert error(one, other.float()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_a_graph_replays_it(deterministic, device):
    skip_elsewhere(device)
    given = Drawn((1, 2, 2, 384, 384, -1, 0, 0.0), 128, BF16, device)
    expected = given.gradients(deterministic)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = given.gradients(deterministic)
    for t in found[:3]:
        t.zero_()
    graph.replay()
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert error(one, other.float()) < 1e-3


def problem(**changes):
    p = Problem(2, 4, 2, 512, 512, 128, 128, BF16, Scoring(0.1))
    return dataclasses.replace(p, **changes)


def test_what_it_can_not_implement():
    target = runtime.TARGETS["sm_90"]
    refused = hopper_backward.can_implement
    assert refused(problem(), config(128), target) is None
    assert refused(problem(head_dim=64, value_dim=64), config(64), target) is None
    assert "sm_80" in refused(problem(), config(128), runtime.TARGETS["sm_80"])
    assert "float32" in refused(problem(dtype=torch.float32), config(128), target)
    assert "head_dim" in refused(problem(value_dim=64), config(128), target)
    assert "head_dim" in refused(problem(head_dim=100, value_dim=100), config(128), target)
    assert "head_dim" in refused(problem(head_dim=256, value_dim=256), config(128), target)
    for head_dim in (8, 40, 80, 96):
        assert refused(problem(head_dim=head_dim, value_dim=head_dim), config(head_dim), target) is None
    assert "mask" in refused(problem(mask="bool"), config(128), target)
    assert "16 bytes" in refused(problem(aligned=False), config(128), target)
    assert "empty" in refused(problem(n_q=0), config(128), target)
    assert "tile" in refused(problem(), config(64), target)
    assert "num_stages" in refused(problem(), config(128, 9), target)
