"""`adamw_`, and the update of a list of tensors: what is special to them. test_conformance.py has the rest."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import BF16, interpreted, nightly_but
from hypothesis import given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime
from rooftile.ops import adamw as ops
from rooftile.ops.adamw import listed, parts

F32 = torch.float32
NUMBERS = {"lr": 0.02, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
# Float32 arithmetic in another order: the issue asks for 1e-5 of weights and moments of size 1.
LARGEST = 1e-5


def tensors(shape, device, dtype=F32, seed=0):
    """param, grad, exp_avg, exp_avg_sq."""
    numbers = torch.Generator(device).manual_seed(seed)
    p, g, m, v = (torch.randn(shape, generator=numbers, device=device) for _ in range(4))
    return [t.to(dtype) for t in (p, g, m, v.square())]


def pytorch(p, g, m, v, step, maximize=False, **numbers):
    """What torch.optim.AdamW makes of them, in float64."""
    p = torch.nn.Parameter(p.double())
    betas = (numbers.pop("beta1"), numbers.pop("beta2"))
    optimizer = torch.optim.AdamW([p], betas=betas, maximize=maximize, **numbers)
    p.grad = g.double()
    state = {"step": torch.tensor(float(step - 1)), "exp_avg": m.double(), "exp_avg_sq": v.double()}
    optimizer.state[p] = state
    optimizer.step()
    return p.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_step_is_that_of_pytorch_in_float64(step, maximize, device):
    given = tensors((300,), device)
    expected = pytorch(*given, step, maximize, **NUMBERS)
    p, g, m, v = given
    rooftile.adamw_(p, g, m, v, step=step, maximize=maximize, **NUMBERS)
    for ours, theirs in zip((p, m, v), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=LARGEST, atol=LARGEST)


def test_bias_corrections_do_not_cancel(device):
    """1 - 0.999 in float32 is off by 5e-5 of itself, which would be 2e-5 of the step."""
    p, g, m, v = tensors((64,), device)
    p.zero_(), m.zero_(), v.zero_()
    rooftile.adamw_(p, g, m, v, lr=1.0, step=1, weight_decay=0.0, eps=0.0)
    torch.testing.assert_close(p, -g.sign(), rtol=1e-6, atol=0.0)


def test_lr_and_step_from_the_device(device):
    first, second = tensors((50,), device), tensors((50,), device)
    numbers = {n: x for n, x in NUMBERS.items() if n != "lr"}
    rooftile.adamw_(*first, lr=0.02, step=3, **numbers)
    lr, step = torch.tensor(0.02, device=device), torch.tensor(3.0, device=device)
    rooftile.adamw_(*second, lr=lr, step=step, **numbers)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("beta", ["beta1", "beta2"])
def test_a_beta_of_zero(beta, device):
    given = tensors((40,), device)
    numbers = {**NUMBERS, beta: 0.0}
    expected = pytorch(*given, 2, **numbers)
    rooftile.adamw_(*given, step=2, **numbers)
    torch.testing.assert_close(given[0].double(), expected[0], rtol=LARGEST, atol=LARGEST)


@pytest.mark.parametrize("how", ["transposed", "rows apart", "gradient contiguous", "moments contiguous"])
def test_any_layout(how, device):
    """Dense tensors with one layout are updated in place; the others through copies. Around a view nothing changes."""
    expected = tensors((20, 30), device)
    rooftile.adamw_(*expected, step=2, **NUMBERS)
    given = tensors((20, 30), device)
    around = torch.full((20, 37), 7.0, device=device)
    laid = [t.t().contiguous().t() for t in given]
    if how == "rows apart":
        around[:, 3:33] = given[0]
        laid = [around[:, 3:33], *given[1:]]
    if how == "gradient contiguous":
        laid[1] = given[1]
    if how == "moments contiguous":
        laid[2:] = given[2:]
    rooftile.adamw_(*laid, step=2, **NUMBERS)
    assert all(map(torch.equal, laid, expected))
    assert (around[:, :3] == 7).all()
    assert (around[:, 33:] == 7).all()


def stochastic(device, n=1 << 15, seed=5, step=1, value=1.0, lr=1e-3):
    p = torch.full((n,), value, dtype=BF16, device=device)
    g, m, v = torch.ones_like(p), torch.zeros_like(p), torch.zeros_like(p)
    rooftile.adamw_(p, g, m, v, lr=lr, step=step, weight_decay=0.0, seed=seed)
    return p


def test_stochastic_rounding_is_right_on_average(device):
    """A step of 1e-3 from 1 is a quarter of the distance to the bfloat16 below: rounding to nearest would stay at 1."""
    p = stochastic(device)
    assert set(p.unique().tolist()) == {1.0, 1.0 - 2.0**-8}
    share = 1e-3 * 2.0**8  # of those that go down
    deviation = (share * (1 - share) / p.numel()) ** 0.5
    assert abs(float((p < 1).double().mean()) - share) < 4 * deviation
    # Neighbours are independent: a pair goes down as often as the square says.
    pairs = (p < 1).view(-1, 2).all(dim=1).double().mean()
    assert abs(float(pairs) - share**2) < 4 * (share**2 / (p.numel() / 2)) ** 0.5


def test_stochastic_rounding_is_a_function_of_seed_step_and_element(device, monkeypatch):
    first = stochastic(device)
    assert torch.equal(first, stochastic(device))
    assert not torch.equal(first, stochastic(device, seed=6))
    assert not torch.equal(first, stochastic(device, step=2))
    chosen = parts.config
    monkeypatch.setattr(parts, "config", lambda *key: dataclasses.replace(chosen(*key), block=1024))
    assert torch.equal(first, stochastic(device))
    assert torch.equal(first[:77], stochastic(device, n=77))


def test_stochastic_rounding_keeps_what_is_not_finite(device):
    p = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0], dtype=BF16, device=device)
    g, m, v = (torch.zeros_like(p) for _ in range(3))
    rooftile.adamw_(p, g, m, v, lr=1e-3, step=1, seed=1)
    assert p.isinf().tolist() == [True, True, False, False]
    assert p.isnan().tolist() == [False, False, True, False]
    assert p[3] == 0


def test_nothing_but_what_is_named_is_written(device):
    p, g, m, v = tensors((33,), device)
    before = g.clone(), p._version, m._version
    rooftile.adamw_(p, g, m, v, lr=0.1, step=1)
    assert torch.equal(g, before[0])
    assert (p._version, m._version) > before[1:], "autograd has to know what is overwritten"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grad": (31,)}, ValueError, r"grad has shape \(31,\), expected \(30,\) to match param"),
        ({"exp_avg": BF16}, TypeError, r"exp_avg_sq has dtype torch.float32, expected torch.bfloat16 to match exp_avg"),
        ({"param": torch.float64}, TypeError, "param has dtype torch.float64, expected float32, float16 or bfloat16"),
        ({"grad": torch.complex64}, TypeError, "grad has dtype torch.complex64"),
        ({"master": BF16}, TypeError, "master has dtype torch.bfloat16, expected float32"),
        ({"lr": -1.0}, ValueError, "lr is -1.0, expected a finite number of 0 or more"),
        ({"lr": "x"}, TypeError, "lr is a str, expected a number"),
        ({"step": 0}, ValueError, r"step is 0, expected 1 to 2\^31 - 1"),
        ({"step": 1.5}, TypeError, "step is a float, expected an int"),
        ({"step": True}, TypeError, "step is a bool, expected an int"),
        ({"beta1": "x"}, TypeError, "beta1 is a str, expected a number"),
        ({"maximize": None}, TypeError, "maximize is None, expected True or False"),
        ({"grad": torch.zeros(30).to_sparse()}, ValueError, "grad has layout torch.sparse_coo, expected a dense"),
        ({"beta2": 1.0}, ValueError, "beta2 is 1.0, expected at least 0 and below 1"),
        ({"seed": -1}, ValueError, r"seed is -1, expected 0 to 2\^31 - 1"),
        ({"seed": 1.0}, TypeError, "seed is a float, expected an int"),
        ({"seed": 1}, ValueError, "seed is for a param in bfloat16"),
    ],
)
def test_errors(change, error, message, device):
    p, g, m, v = tensors((30,), device)
    given = {"param": p, "grad": g, "exp_avg": m, "exp_avg_sq": v, "lr": 0.1, "step": 1}
    for name, value in change.items():
        if isinstance(value, tuple):
            value = torch.zeros(value, device=device)
        elif isinstance(value, torch.dtype):
            value = torch.zeros(30, dtype=value, device=device)
        given[name] = value
    with pytest.raises(error, match=f"^adamw_: {message}"):
        rooftile.adamw_(**given)


def test_a_leaf_that_requires_grad_is_refused_in_grad_mode(device):
    p, g, m, v = tensors((5,), device)
    p.requires_grad_()
    with pytest.raises(ValueError, match="param requires grad"):
        rooftile.adamw_(p, g, m, v, lr=0.1, step=1)
    with torch.no_grad():
        rooftile.adamw_(p, g, m, v, lr=0.1, step=1)


# A list


def entries(sizes, dtypes, device, offset=0):
    """Entries of those sizes, and gradients; each at `offset` elements from aligned memory."""
    found, grads = [], []
    for serial, size in enumerate(sizes):
        param, moments, grad = dtypes[serial % len(dtypes)]
        made = tensors((size + offset,), device, seed=serial)
        p, g, m, v = (t[offset:].to(d) if d != F32 else t[offset:] for t, d in zip(
            made, (param, grad, moments, moments), strict=True))  # fmt: skip
        step = torch.tensor(float(serial), device=device)
        found.append(ops.Entry(p, m, v, step, group=serial % 2, serial=serial))
        grads.append(g)
    return found, grads


GROUPS = [ops.Group(0.02, 0.8, 0.95, 1e-6, 0.1, False), ops.Group(0.01, 0.9, 0.99, 1e-8, 0.0, True)]


def update(found, grads, device, **options):
    """Update the list; None among the gradients is left out."""
    dtypes = [e.param.dtype if g is None else g.dtype for e, g in zip(found, grads, strict=True)]
    the_list = ops.ListUpdate(found, dtypes, **options)
    addresses = the_list.addresses([0 if g is None else g.data_ptr() or 16 for g in grads])
    hyper = ops.hyperparameters(GROUPS, None, device)
    the_list.update(addresses, hyper)
    return the_list, addresses


def one_by_one(found, grads):
    """The same by `adamw_`, on copies: param, exp_avg, exp_avg_sq of each."""
    results = []
    for e, g in zip(found, grads, strict=True):
        p, m, v = e.param.clone(), e.exp_avg.clone(), e.exp_avg_sq.clone()
        if g is not None:
            group = dataclasses.asdict(GROUPS[e.group])
            rooftile.adamw_(p, g, m, v, step=int(e.step) + 1, **group)
        results.append((p, m, v))
    return results


KINDS = [(F32, F32, F32), (BF16, BF16, BF16), (BF16, F32, F32), (torch.float16, F32, torch.float16)]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 8, 64, 255, 256, 257, 1000]), min_size=1, max_size=6),
    n_kinds=st.integers(1, 4),
    offset=st.sampled_from([0, 3]),
    absent=st.integers(0, 6),
)
def test_a_list_is_its_tensors_one_by_one(sizes, n_kinds, offset, absent):
    """Whatever the sizes, dtypes and alignments; a tensor without a gradient stays as it is."""
    device = runtime.default_device()
    with pytest.MonkeyPatch.context() as patch:
        chosen = parts.config
        patch.setattr(parts, "config", lambda *key: dataclasses.replace(chosen(*key), block=256))
        found, grads = entries(sizes, KINDS[:n_kinds], device, offset)
        grads = [None if i == absent else g for i, g in enumerate(grads)]
        expected = one_by_one(found, grads)
        update(found, grads, device)
        for e, g, wanted in zip(found, grads, expected, strict=True):
            for ours, theirs in zip((e.param, e.exp_avg, e.exp_avg_sq), wanted, strict=True):
                eps = torch.finfo(ours.dtype).eps  # the hyperparameters of one tensor are float32, of a list float64
                torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=2 * eps)
            assert float(e.step) == e.serial + (g is not None)


@interpreted
def test_a_list_takes_one_launch_and_its_norm_another(device, monkeypatch):
    launched = []
    kernel = type(listed._adamw_list_kernel)
    run = kernel.__getitem__
    monkeypatch.setattr(kernel, "__getitem__", lambda self, grid: launched.append(self) or run(self, grid))
    found, grads = entries([5, 3000, 9000, 0, 1], KINDS, device)
    the_list = ops.ListUpdate(found, [g.dtype for g in grads], clips=True)
    addresses = the_list.addresses([g.data_ptr() or 16 for g in grads])
    the_list.update(addresses, ops.hyperparameters(GROUPS, 1.0, device), the_list.norm(addresses))
    assert launched == [listed._squares_kernel, listed._adamw_list_kernel]


@pytest.mark.parametrize("classes", [1, 3])
def test_sums_of_squares_by_class(classes, device):
    found, grads = entries([1, 70_000, 257, 0, 4096], KINDS, device)
    found = [dataclasses.replace(e, norm_class=i % classes) for i, e in enumerate(found)]
    grads[2] = None
    the_list = ops.ListUpdate(found, [F32 if g is None else g.dtype for g in grads], clips=True, classes=classes)
    addresses = the_list.addresses([0 if g is None else g.data_ptr() or 16 for g in grads])
    expected = [
        sum(float(g.double().square().sum()) for e, g in zip(found, grads, strict=True)
            if g is not None and e.norm_class == c)
        for c in range(classes)
    ]  # fmt: skip
    sums = the_list.norm(addresses)
    assert sums[:classes].tolist() == pytest.approx(expected, rel=1e-6)
    assert not sums[classes:].any()
    assert torch.equal(sums, the_list.norm(addresses)), "bit-identical on a second run"


def test_a_found_infinity_leaves_everything(device):
    found, grads = entries([300, 5], KINDS, device)
    before = [t.clone() for e in found for t in (e.param, e.exp_avg, e.exp_avg_sq, e.step)]
    the_list = ops.ListUpdate(found, [g.dtype for g in grads])
    addresses = the_list.addresses([g.data_ptr() for g in grads])
    hyper, one = ops.hyperparameters(GROUPS, None, device), torch.ones((), device=device)
    the_list.update(addresses, hyper, None, one, one)
    after = [t for e in found for t in (e.param, e.exp_avg, e.exp_avg_sq, e.step)]
    assert all(map(torch.equal, after, before))
    the_list.update(addresses, hyper, None, one, torch.zeros((), device=device))
    assert not any(map(torch.equal, after, before))


def test_kinds_have_numbers_of_their_own():
    dtypes = ops.DTYPES
    found = {
        parts.kind_of(p, g, m, flags): (p, g, m, flags)
        for p in dtypes for g in dtypes for m in dtypes for flags in range(8)
    }  # fmt: skip
    assert len(found) == 3**3 * 8
    assert max(found) < 1 << 8


# Compiles the kernels of a list for a target: of one kind, and of all options in one list.
COMPILED = """
import json
import torch
from rooftile import runtime
from rooftile.inspect import driver
from rooftile.inspect.resources import resources
from rooftile.ops import adamw

compiled = []
driver.install(runtime.target(torch.device("meta")), lambda kernel, seconds: compiled.append(kernel))
F32, BF16 = torch.float32, torch.bfloat16

def t(dtype, *shape):
    return torch.empty(shape, dtype=dtype, device="meta")

def entry(param, moments, largest=False, master=False):
    some = (t(moments, 64) if largest else None, t(F32, 64) if master else None)
    return adamw.Entry(t(param, 64), t(moments, 64), t(moments, 64), t(F32), *some)

lists = {
    "fp32": ([entry(F32, F32)], [F32]),
    "bf16": ([entry(BF16, BF16)], [BF16]),
    "mixed": ([entry(F32, F32), entry(BF16, BF16), entry(BF16, F32, largest=True, master=True)], [F32, BF16, F32]),
}
found = {}
for name, (entries, grads) in lists.items():
    update = adamw.ListUpdate(entries, grads, seed=1 if name == "mixed" else None, clips=True)
    addresses = t(torch.int64, 3)
    sums = update.norm(addresses)
    update.update(addresses, t(torch.float64, 2, 10), sums, t(F32), t(F32))
    for kernel in compiled:
        used = resources(kernel, False)
        found[f"{name} {kernel.src.fn.__name__}"] = used.load, used.store, used.spills, used.mistakes
    compiled.clear()
print(json.dumps(found))
"""


@pytest.mark.parametrize("arch", nightly_but(("sm_90",), ("sm_90", "gfx942")))
def test_lists_are_compiled_to_vectors_of_16_bytes(arch):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"ROOFTILE_COMPILE_TARGET": arch, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = (sys.executable, "-c", COMPILED)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for name, (load, store, spills, mistakes) in found.items():
        # What is the same for all chunks lives through every branch of a list of all kinds.
        assert spills <= (16 if name == "mixed _adamw_list_kernel" else 0), name
        assert (load, mistakes) == ("16", []), name
        assert store == "16" or "squares" in name, name


def test_parameters_on_the_cpu_without_the_interpreter(monkeypatch):
    """Also where PyTorch has no CUDA, which then has no streams to ask."""
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    p = torch.nn.Parameter(torch.randn(4))
    optimizer = rooftile.optim.AdamW([p])
    p.grad = torch.ones(4)
    with pytest.raises(
        ValueError, match=r"a parameter is on the CPU, expected a GPU \(to run on the CPU, .* set TRITON_INTERPRET=1"
    ):
        optimizer.step()
