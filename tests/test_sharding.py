"""Ops over DTensor: two processes over gloo have the results and gradients of one process."""

import gc
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from helpers import interpreted, on_two_ranks

import rooftile
from rooftile.reference import cross_entropy, linear_cross_entropy

pytestmark = interpreted
reference = SimpleNamespace(
    cross_entropy=cross_entropy.cross_entropy, linear_cross_entropy=linear_cross_entropy.linear_cross_entropy
)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def integers(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


X, HEADS = (4, 3, 16), (2, 4, 3, 8)
TABLES = tuple(torch.cat([f, f], -1) for f in (numbers(3, 4).cos(), numbers(3, 4).sin()))
LATER = torch.tensor([[[True, False, True]]])
# The function, its tensors, and what they are: "r" holds rows and gets a gradient, "R" gets none; "w" is a parameter,
# and "W" is replicated too and gets no gradient.
CASES = {
    "rms_norm": (rooftile.rms_norm, [numbers(*X), numbers(16)], "rw"),
    "add_rms_norm": (rooftile.add_rms_norm, [numbers(*X), numbers(*X, seed=1), numbers(16)], "rrw"),
    "layer_norm": (rooftile.layer_norm, [numbers(*X), numbers(16), numbers(16, seed=1)], "rww"),
    "softmax": (rooftile.softmax, [numbers(*X)], "r"),
    "softmax causal": (lambda x: rooftile.softmax(x, causal=True), [numbers(*X)], "r"),
    "softmax masked": (lambda x, mask: rooftile.softmax(x, mask=mask), [numbers(4, 3, 3), LATER], "rW"),
    "silu_mul": (rooftile.silu_mul, [numbers(*X), numbers(*X, seed=1)], "rr"),
    "gelu_mul_packed": (rooftile.gelu_mul_packed, [numbers(*X)], "r"),
    "bias_gelu": (rooftile.bias_gelu, [numbers(*X), numbers(16)], "rw"),
    "embedding": (rooftile.embedding, [integers(7, 4, 5), numbers(7, 16)], "Rw"),
    "rope": (rooftile.rope, [numbers(*HEADS), numbers(2, 2, 3, 8), *TABLES], "rrWW"),
    "qk_norm_rope": (
        rooftile.qk_norm_rope,
        [numbers(*HEADS), numbers(2, 2, 3, 8), numbers(8), numbers(8, seed=1), *TABLES],
        "rrwwWW",
    ),
}
OPTIONS = {
    "": {},
    " with z-loss and a cap": {"ignore_index": 1, "z_loss": 0.01, "softcap": 3.0},
    " of each token": {"reduction": "none", "label_smoothing": 0.2, "z_loss": 0.01},
    " smoothed": {"ignore_index": 6, "label_smoothing": 1.0, "softcap": 3.0, "reduction": "sum"},
}
TARGETS, CLASS_WEIGHT, TOKEN_WEIGHTS = integers(7, 4, 3), numbers(7).abs(), numbers(4, 3).abs()
SURE = 12 * torch.nn.functional.one_hot(TARGETS, 7) + 30 + numbers(4, 3, 7)  # small losses of large logits
HIDDEN, HEAD, BIAS = numbers(4, 3, 16), numbers(7, 16), numbers(7)


def of_logits(**options):
    return lambda x, y, w, t, ops=rooftile: ops.cross_entropy(x, y, weight=w, token_weights=t, **options)


def of_hidden(**options):
    """A chunk has four tokens."""

    def call(x, head, y, b, w, t, ops=rooftile):
        return ops.linear_cross_entropy(x, head, y, b, class_weight=w, token_weights=t, chunk_bytes=256, **options)

    return call


# Likewise; "?" is a tensor that is left out. In float64, the reference is the truth.
LOSSES = {
    **{
        f"cross_entropy{how}{weighted}": (of_logits(**options), [logits, TARGETS, *tensors], f"rR{kinds}")
        for how, options in OPTIONS.items()
        for logits in ((numbers(4, 3, 7),) if options else (numbers(4, 3, 7), SURE))
        for weighted, tensors, kinds in (
            (" sure" if logits is SURE else "", [None, None], "??"),
            (" sure weighted" if logits is SURE else " weighted", [CLASS_WEIGHT, TOKEN_WEIGHTS], "WR"),
        )
    },
    **{
        f"linear_cross_entropy{how}{weighted}": (
            of_hidden(**options),
            [HIDDEN, HEAD, TARGETS, BIAS, *tensors],
            f"{head}{kinds}",
        )
        for head, (how, options) in zip(("rrRr", "wrRr", "rwRw", "rrRr"), OPTIONS.items(), strict=True)
        for weighted, tensors, kinds in (("", [None, None], "??"), (" weighted", [CLASS_WEIGHT, TOKEN_WEIGHTS], "WR"))
    },
    "linear_cross_entropy at a temperature": (
        of_hidden(temperature=0.6, softcap=3.0, label_smoothing=0.1),
        [HIDDEN, HEAD, TARGETS, BIAS, None, None],
        "rrRr??",
    ),
    "linear_cross_entropy of valid rows": (
        of_hidden(ignore_index=1, valid_rows=int((TARGETS != 1).sum())),
        [HIDDEN, HEAD, TARGETS, BIAS, None, None],
        "rrRr??",
    ),
}
STATS = {"ignore_index": 1, "softcap": 3.0, "return_stats": True}
DPO = [(numbers(4, 3, 16, seed=rank), integers(7, 4, 3)) for rank in range(2)]
FACTORS = 1 / 3, 1.003  # of a loss; in bfloat16 each is 2e-3 or 3e-3 off
ROUNDED = numbers(64, 16), numbers(512, 16)  # hidden states and head


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def results(function, tensors, kinds, **more):
    """The outputs, and the gradients of a fixed combination of them."""
    tensors = [
        t if t is None else t.detach().requires_grad_(kind.islower()) for t, kind in zip(tensors, kinds, strict=True)
    ]
    outputs = function(*tensors, **more)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((whole(y) * numbers(*y.shape, seed=7)).sum() for y in outputs)
    loss.backward()
    return [whole(y).detach() for y in outputs], [whole(t.grad) for t in tensors if t is not None and t.requires_grad]


def bias(found, exact):
    """How much too long a gradient is in the direction of the exact one, as a part of its length."""
    return ((found.double() * exact).sum() / exact.square().sum() - 1).item()


def with_gradient(function, x):
    leaf = x.detach().requires_grad_()
    loss = function(leaf)
    loss.sum().backward()
    return whole(loss), whole(leaf.grad)


def sharded(mesh, tensors, kinds, dim):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return [
        t if t is None else distribute_tensor(t, mesh, [Shard(dim) if kind in "rR" and dim < t.dim() else Replicate()])
        for t, kind in zip(tensors, kinds, strict=True)
    ]


def gradients_of_fsdp2(rank):
    """Those of a head that is sharded, from a loss that each rank has of its own tokens."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    head = torch.nn.Linear(16, 7, bias=False)
    head.weight.data = HEAD.clone()
    head.loss = lambda hidden, labels: rooftile.losses.dpo_loss(hidden, head.weight, labels)
    fully_shard(head)
    register_fsdp_forward_method(head, "loss")
    hidden, labels = DPO[rank]
    with pytest.raises(TypeError, match="dpo_loss: weight is a DTensor and hidden a plain tensor"):
        rooftile.losses.dpo_loss(hidden, head.weight, labels)
    head.loss(hidden, labels).loss.backward()
    return whole(head.weight.grad)


# With weights each has more to do.
UNWEIGHTED = {name for name in LOSSES if f"{name} weighted" in LOSSES}


def _rank(rank, path, cases):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard

    torch.use_deterministic_algorithms(True)  # memory that nobody writes is NaN
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name in cases:
        function, tensors, kinds = {**CASES, **LOSSES}[name]
        dims = range(tensors[0].dim())
        for dim in dims if name in CASES else (0, dims[-1]):
            found[name, dim] = results(function, sharded(mesh, tensors, kinds, dim), kinds)
    for dim in range(3):  # of the head, 0 is the dimension of its classes
        x, y = sharded(mesh, [numbers(4, 3, 7), TARGETS], "rR", dim)
        found["stats", dim] = [whole(t) for t in rooftile.cross_entropy(x, y, **STATS)[1]]
        x, y = sharded(mesh, [HIDDEN, TARGETS], "rR", dim)
        (head,) = sharded(mesh, [HEAD], "r", 0)
        found["stats of the head", dim] = [whole(t) for t in rooftile.linear_cross_entropy(x, head, y, **STATS)[1]]
    x, weight = sharded(mesh, [numbers(5, 16), numbers(16)], "rw", 0)
    weight.requires_grad_()
    y = rooftile.rms_norm(x, weight)
    y.sum().backward()
    assert list(y.placements) == [Shard(0)]
    assert tuple(y.shape) == (5, 16)  # three rows on one rank, two on the other
    assert list(weight.grad.placements) == [Partial()]
    with pytest.raises(TypeError, match="rms_norm: weight is a plain tensor, expected a DTensor"):
        rooftile.rms_norm(x, numbers(16).requires_grad_())
    logits, target = sharded(mesh, [numbers(4, 7), integers(7, 4)], "rw", 1)
    assert list(rooftile.cross_entropy(logits, target).placements) == [Replicate()]
    unknown = torch.tensor([7, 1, -100, -1])
    lost = rooftile.cross_entropy(logits, unknown, reduction="none").full_tensor()
    assert lost.isnan().tolist() == [True, False, False, True]
    loss, grad = with_gradient(lambda x: rooftile.cross_entropy(x, unknown, reduction="sum"), logits)
    assert loss.isnan()
    assert grad.isnan().all(-1).tolist() == grad.isnan().any(-1).tolist() == [True, False, False, True]
    nothing = torch.full((4,), -100)
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.1}
        for t in with_gradient(lambda x, o=options: rooftile.cross_entropy(x, nothing, **o), logits):
            assert (t == 0).all()
    with pytest.raises(ValueError, match="logits has 1 classes over 2 ranks, expected some on each"):
        rooftile.cross_entropy(*sharded(mesh, [numbers(4, 1), integers(1, 4)], "rw", 1))
    head, hidden, target = numbers(6, 16), numbers(4, 16), integers(6, 4)
    (head,) = sharded(mesh, [head], "r", 0)
    with pytest.raises(
        TypeError, match=r"weight is a DTensor and hidden a plain tensor, expected both .*FSDP2 gathers a"
    ):
        rooftile.linear_cross_entropy(hidden, head, target)
    for function in (rooftile.linear_jsd, rooftile.linear_kl):
        with pytest.raises(
            TypeError, match=f"^{function.__name__}: weight is a DTensor, expected a plain .*; FSDP2 ga"
        ):
            function(hidden, head, hidden, numbers(6, 16))
    for function in (rooftile.kl_div, rooftile.jsd):
        with pytest.raises(
            TypeError, match=f"^{function.__name__}: target is a DTensor, expected a plain tensor; FSDP2"
        ):
            function(numbers(6, 16), head)
    (hidden,) = sharded(mesh, [hidden], "w", 0)
    unknown = torch.tensor([6, 1, -100, -1])
    lost, stats = rooftile.linear_cross_entropy(hidden, head, unknown, reduction="none", return_stats=True)
    for t in (lost, stats.logprobs):
        assert t.full_tensor().isnan().tolist() == [True, False, False, True]
    for reduction in ("mean", "none"):
        for t in with_gradient(
            lambda x, r=reduction: rooftile.linear_cross_entropy(x, head, nothing, reduction=r), hidden
        ):
            assert (t == 0).all()
    for reduction in ("mean", "none"):  # more targets count
        few, grad = with_gradient(
            lambda x, r=reduction: rooftile.linear_cross_entropy(x, head, target, valid_rows=3, reduction=r), hidden
        )
        assert few.isnan().sum() == 1
        assert grad.isnan().all(-1).tolist() == grad.isnan().any(-1).tolist() == [False, False, False, True]
    one, weight = sharded(mesh, [numbers(1, 16), numbers(6, 16)], "rw", 0)  # the second rank has no token
    weight.requires_grad_()
    rooftile.linear_cross_entropy(one, weight, torch.tensor([2])).backward()
    found["one token"] = whole(weight.grad)
    for factor in FACTORS:
        x, weight = sharded(mesh, [t.bfloat16() for t in ROUNDED], "wr", 0)
        weight.requires_grad_()
        (factor * rooftile.linear_cross_entropy(x, weight, integers(512, 64))).backward()
        found["bfloat16", factor] = whole(weight.grad)
    with pytest.raises(ValueError, match="linear_cross_entropy: class_weight requires grad, but gets no gradient"):
        rooftile.linear_cross_entropy(hidden, head, target, class_weight=torch.ones(6, requires_grad=True))
    with pytest.raises(ValueError, match=r"linear_cross_entropy: class_weight has shape \(7,\), expected \(6,\)"):
        rooftile.linear_cross_entropy(hidden, head, target, class_weight=torch.ones(7))
    found["dpo_loss of FSDP2"] = gradients_of_fsdp2(rank)
    if rank == 0:
        torch.save(found, f"{path}/results")
    gc.collect()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "cases",
    [
        [name for name in (*CASES, *LOSSES) if name not in UNWEIGHTED],
        pytest.param([*CASES, *LOSSES], marks=pytest.mark.nightly),
    ],
    ids=["", "all"],
)
def test_two_ranks_have_the_results_of_one(cases, tmp_path):
    expected = {name: results(*{**CASES, **LOSSES}[name]) for name in cases}
    on_two_ranks(_rank, tmp_path, cases)  # a fork has the kernels that those have read
    results_of_two = torch.load(tmp_path / "results")
    truth = {name: expected[name] for name in cases if name in CASES}
    for name in cases:
        if name in CASES:
            continue
        function, tensors, kinds = LOSSES[name]
        wide = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
        truth[name] = results(function, wide, kinds, ops=reference)
    one = numbers(6, 16).requires_grad_()
    rooftile.linear_cross_entropy(numbers(1, 16), one, torch.tensor([2])).backward()
    torch.testing.assert_close(results_of_two.pop("one token"), one.grad)
    one = HEAD.clone().requires_grad_()
    sum(rooftile.losses.dpo_loss(x, one, labels).loss for x, labels in DPO).backward()
    torch.testing.assert_close(results_of_two.pop("dpo_loss of FSDP2"), one.grad / 2)
    for factor in FACTORS:
        x, weight = (t.bfloat16() for t in ROUNDED)
        leaf, exact = weight.clone().requires_grad_(), weight.double().requires_grad_()
        (factor * rooftile.linear_cross_entropy(x, leaf, integers(512, 64))).backward()
        (factor * reference.linear_cross_entropy(x.double(), exact, integers(512, 64))).backward()
        two, one = (bias(t, exact.grad) for t in (results_of_two.pop(("bfloat16", factor)), leaf.grad))
        assert abs(two - one) < 3e-4, (factor, two, one)
    statistics = rooftile.cross_entropy(numbers(4, 3, 7), TARGETS, **STATS)[1]
    of_head = rooftile.linear_cross_entropy(HIDDEN, HEAD, TARGETS, **STATS)[1]
    for (name, dim), found in results_of_two.items():
        if "stats" in name:
            for ours, theirs in zip(found, of_head if "head" in name else statistics, strict=True):
                torch.testing.assert_close(ours, theirs, msg=f"{name} {dim}")
            continue
        for two, one, exact in zip(chain(*found), chain(*expected[name]), chain(*truth[name]), strict=True):
            assert two.shape == one.shape
            assert (two - exact).norm() <= max(3e-6 * exact.norm(), 2 * (one - exact).norm()), (name, dim)


def test_a_sharded_head_has_one_chunk_of_logits_in_memory(monkeypatch):
    """The gradient is written over it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = distributed.init_device_mesh("cpu", (1,))
    hidden = distribute_tensor(numbers(64, 16), mesh, [Replicate()]).requires_grad_()
    head = distribute_tensor(numbers(512, 16), mesh, [Shard(0)]).requires_grad_()
    chunk = 8 * 512
    made = []
    with monkeypatch.context() as patch:
        for name in ("empty", "empty_strided"):
            stock = getattr(torch, name)
            patch.setattr(torch, name, lambda *size, f=stock, **more: (made.append(f(*size, **more)), made[-1])[1])
        loss = rooftile.linear_cross_entropy(hidden, head, integers(512, 64), chunk_bytes=4 * chunk)
        loss.backward()
    gc.collect()
    distributed.destroy_process_group()
    assert [t.numel() for t in made].count(chunk) == 1
