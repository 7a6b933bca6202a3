"""What holds for every op, by its case: values, memory, layouts, gradients."""

import dataclasses
import itertools

import pytest
import torch
from helpers import (
    BF16,
    CASES,
    DIFFERENTIABLE,
    TINY,
    TINY_IDS,
    Calls,
    assert_same,
    backward,
    draw,
    forward,
    grads_of,
    offset,
    output_grads_for,
    padded_allocations,
    relaid,
    transposed,
)

from rooftile import runtime
from rooftile.cases import Unsupported
from rooftile.cases.check import DTYPES, as_tuple, check_point, points, poisoned, relative_error


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What a case computes in bfloat16 at a point, with random gradients of its outputs.

    Attributes:
        inputs: what it was given.
        allocated: each buffer that it allocated, filled with NaN, and the number of elements inside its bands.
    """

    inputs: dict[str, torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    output_grads: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]
    allocated: tuple[tuple[torch.Tensor, int], ...]


_BASELINES: dict[tuple[str, str], Baseline] = {}


def baseline(case, point, device):
    """Computed once in a process, for all tests that compare with it."""
    key = case.name, str(point)
    if key not in _BASELINES:
        inputs = draw(case, point, BF16, device)
        with poisoned(), padded_allocations(pytest.MonkeyPatch(), poison=True) as first:
            outputs = forward(case, point, inputs)
        output_grads = output_grads_for(outputs)
        with poisoned(), padded_allocations(pytest.MonkeyPatch(), poison=True) as second:
            grads = backward(case, point, inputs, output_grads)
        _BASELINES[key] = Baseline(inputs, outputs, output_grads, grads, (*first, *second))
    return _BASELINES[key]


POINTS = [(case, point) for case in CASES for point in points(case, ("tiny", "edge"))]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_case_with_gradients = pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
MODES = ("layer_norm", "linear", "attention", "cross_entropy")  # which options decide about gradients
every_tiny_point = pytest.mark.parametrize(("case", "point"), TINY, ids=TINY_IDS)


def at_points():
    """Every point in every dtype. `make test` runs a point in each dtype, other options in float32, and other sizes in
    bfloat16. The tests below run options in bfloat16 too."""
    for (case, point), name in itertools.product(POINTS, DTYPES):
        tiny = case.sets["tiny"]
        often = point == tiny[0] or name == ("fp32" if point in tiny else "bf16")
        marks = () if often else pytest.mark.nightly
        yield pytest.param(case, point, DTYPES[name], marks=marks, id=f"{case.name} {point}-{name}")


@pytest.mark.parametrize(("case", "point", "dtype"), list(at_points()))
def test_results_and_gradients_are_within_tolerance(case, point, dtype):
    rows = [row for direction in case.directions for row in check_point(case, point, dtype, direction, seed=3)]
    assert {row.output for row in rows} >= set(case.outputs)
    failed = [f"{row.direction} {row.output}: {row.message}" for row in rows if not row.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@every_case
def test_real_shapes_are_within_tolerance(case, dtype):
    names = [n for n in ("llm", "sweep", "prefill", "decode", "softmax") if n in case.sets]
    for point in points(case, names):
        for direction in case.directions:
            failed = [
                f"{row.shape}: {row.message}" for row in check_point(case, point, dtype, direction) if not row.passed
            ]
            assert not failed, "\n".join(failed)


@every_tiny_point
def test_fresh_memory_is_written_whole_and_its_guard_bands_stay(case, point, device):
    """In memory filled with NaN, inside ops too. Second runs, in other memory, are those of the tests below."""
    run = baseline(case, point, device)
    assert all(torch.isfinite(t.float()).all() for t in (*run.outputs, *run.grads))
    ours = {buffer.untyped_storage().data_ptr() for buffer, _ in run.allocated}
    ours |= {t.untyped_storage().data_ptr() for t in run.inputs.values()}  # a scale comes back as it was given
    fresh = run.grads if case.mutates else (*run.outputs, *run.grads)
    assert all(t.untyped_storage().data_ptr() in ours for t in fresh), "an output was not allocated by torch.empty"
    for buffer, numel in run.allocated:
        assert (buffer[:64] == 7).all()
        assert (buffer[64 + numel :] == 7).all()


@every_tiny_point
def test_views_inside_nan_give_the_same_and_the_bands_stay(case, point, device):
    inputs = draw(case, point, BF16, device)
    views = relaid(inputs, offset)
    expected = baseline(case, point, device).outputs
    before = {n: v._base.clone() for n, v in views.items() if v._base is not None}
    with torch.no_grad():
        outputs = case.function(**views, **point.options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert_same(outputs, expected)
    for name, base in before.items():
        if name in case.mutates:  # the view has changed, what lies around it has not
            written = expected[case.mutates.index(name)]
            band = torch.as_strided(base, written.shape, views[name].stride(), views[name].storage_offset())
            band.copy_(written)
        assert torch.equal(views[name]._base.view(torch.uint8), base.view(torch.uint8)), name


def assert_agree(case, direction, actual, expected):
    """The same; on a GPU, of products, within the case's tolerance: another layout is another kernel."""
    if runtime.MODE is runtime.Mode.INTERPRETER or case.roof == "copy":
        return assert_same(actual, expected)
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        assert relative_error(a, e) <= case.tolerances[BF16][direction].ceiling


# At the first point, and transposed also with options that decide about gradients. Each option: the test above.
@pytest.mark.parametrize(
    ("case", "point", "how"),
    [
        pytest.param(
            *(case, point, how),
            id=f"{case.name} {point}-{how.__name__}",
            marks=()
            if point == case.sets["tiny"][0] or (how is transposed and case.name in MODES)
            else pytest.mark.nightly,
        )
        for (case, point), how in itertools.product(TINY, (offset, transposed))
    ],
)
def test_strides_make_no_difference(case, point, how, device):
    if case.mutates and how is transposed:
        pytest.skip("written in place, it needs a last stride of 1: test_rope.py")
    expected = baseline(case, point, device)
    laid = relaid(draw(case, point, BF16, device), how)
    if not case.mutates:
        assert_agree(case, "forward", forward(case, point, laid), expected.outputs)
    if case.grads:
        output_grads = tuple(how(g) for g in expected.output_grads)
        assert_agree(case, "backward", backward(case, point, laid, output_grads), expected.grads)


@every_case_with_gradients
def test_gradients_that_are_one_number_repeated(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    outputs = forward(case, point, inputs)
    repeated = tuple(torch.ones((), dtype=y.dtype, device=device).expand(y.shape) for y in outputs)
    dense = tuple(torch.ones_like(y) for y in outputs)
    assert_agree(case, "backward", backward(case, point, inputs, repeated), backward(case, point, inputs, dense))


@pytest.mark.parametrize(
    ("case", "point"),
    [
        pytest.param(
            case,
            point,
            id=name,
            marks=() if point == case.sets["tiny"][0] or case.name in MODES else pytest.mark.nightly,
        )
        for (case, point), name in zip(TINY, TINY_IDS, strict=True)
        if case.grads
    ],
)
def test_only_the_gradients_asked_for(case, point, device):
    inputs = draw(case, point, BF16, device)
    expected = baseline(case, point, device)
    for name, grad in zip(grads_of(case, inputs), expected.grads, strict=True):
        assert_same(backward(case, point, inputs, expected.output_grads, [name]), (grad,))


@every_case_with_gradients
def test_a_gradient_nobody_asks_for_takes_no_memory(case, device, monkeypatch):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    names = grads_of(case, inputs)
    output_grads = output_grads_for(forward(case, point, inputs))
    taken = {}
    for asked in (names, *((n,) for n in names)):
        with padded_allocations(monkeypatch) as made:
            backward(case, point, inputs, output_grads, asked)
        taken[asked] = sum(numel for _, numel in made)
    wasteful = [n for n in names if len(names) > 1 and taken[(n,)] >= taken[names]]
    assert not wasteful, "takes as much memory as all gradients; return an empty tensor for one not asked for"


@every_case_with_gradients
def test_a_single_output_that_is_used(case, device):
    """The gradient of an output that nobody used counts as zero."""
    point = case.sets["tiny"][0]
    inputs = draw(case, point, torch.float32, device)
    outputs = forward(case, point, inputs)
    names = grads_of(case, inputs)
    for i, output_grad in enumerate(output_grads_for(outputs)):
        zeros = [torch.zeros_like(y) for y in outputs]
        zeros[i] = output_grad
        expected = backward(case, point, inputs, zeros)
        leaves = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
        given = {n: t.clone() if n in case.mutates else t for n, t in leaves.items()}
        results = case.function(**given, **point.options)
        used = (results if isinstance(results, tuple) else (results,))[i]
        found = torch.autograd.grad(used, [leaves[n] for n in names], output_grad, allow_unused=True)
        assert_same([torch.zeros_like(e) if f is None else f for f, e in zip(found, expected, strict=True)], expected)


@every_case
def test_no_graph_where_no_gradient_is_asked_for(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    assert all(not y.requires_grad for y in forward(case, point, inputs))
    if not case.mutates:
        asking = {n: t.requires_grad_(n in case.grads) for n, t in inputs.items()}
        assert all(not y.requires_grad for y in forward(case, point, asking))  # under no_grad


@pytest.mark.gpu
@every_case
def test_a_second_run_is_bit_identical(case, device):
    """Where PyTorch is asked for it, as it is in poisoned memory: attention's gradients on sm_90 need to be asked."""
    assert case.deterministic, "say here why it is not"
    for point in points(case, ("tiny", "edge", "decode", "sweep")):
        inputs = draw(case, point, BF16, device)
        with poisoned():
            first, second = forward(case, point, inputs), forward(case, point, inputs)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            output_grads = output_grads_for(first)
            first, second = (backward(case, point, inputs, output_grads) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_case_with_gradients
def test_gradients_accumulate_into_leaves(case, device):
    """x and residual may get one tensor as their gradient: a second backward must not add to it twice."""
    point = case.sets["tiny"][0]
    inputs = draw(case, point, torch.float32, device)
    names = grads_of(case, inputs)
    outputs = forward(case, point, inputs)
    output_grads = output_grads_for(outputs)
    expected = backward(case, point, inputs, output_grads)
    leaves = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
    for _ in range(2):
        given = {n: t.clone() if n in case.mutates else t for n, t in leaves.items()}
        results = case.function(**given, **point.options)
        torch.autograd.backward(results, output_grads)
    assert_same([leaves[n].grad for n in names], [2 * g for g in expected])


@every_case_with_gradients
def test_a_derivative_of_a_derivative_is_right_or_an_error(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, torch.float32, device)
    name = grads_of(case, inputs)[0]
    leaf = inputs[name].requires_grad_()
    given = {n: t.clone() if n in case.mutates else t for n, t in inputs.items()}
    outputs = case.function(**given, **point.options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    output_grads = tuple(g.requires_grad_() for g in output_grads_for(outputs))
    (grad,) = torch.autograd.grad(outputs, [leaf], output_grads, create_graph=True)
    if not case.name.startswith("rope"):
        with pytest.raises(RuntimeError, match=r"gradients of gradients are not supported|not .* used in the graph"):
            torch.autograd.grad(grad.square().sum(), [leaf])
        return
    # A rotation is linear: its derivative is a rotation again, and that of |dq|^2 over dy is 2 dy.
    found = torch.autograd.grad(grad.square().sum(), [output_grads[0]])
    torch.testing.assert_close(found[0], 2 * output_grads[0].detach())


# With gradients a gate is an op of its own. Dense and quantized weights are arguments of one op.
OPS = {
    "add_rms_norm_quantized": (["rms_norm_quantized"], []),
    "gated_linear": (["linear", "silu_mul_packed"], ["silu_mul_packed_backward", "linear_backward"]),
    "linear_cross_entropy": (["linear_cross_entropy"], ["scale_gradient_backward"] * 3),  # hidden, weight, bias
    "linear_jsd": (["linear_jsd"], ["scale_gradient_backward"] * 3),
    "linear_kl": (["linear_jsd"], ["scale_gradient_backward"] * 3),
    "rms_norm_gated_linear": (
        ["rms_norm_linear", "silu_mul_packed"],
        ["silu_mul_packed_backward", "rms_norm_linear_backward"],
    ),
    "rms_norm_linear_quantized": (["rms_norm_linear"], []),
    "rms_norm_gated_linear_quantized": (["rms_norm_gated_linear"], []),
}


@every_case
def test_ops_called_are_rooftiles(case, device):
    """One op forward and one backward: what a profile of a model shows, and what torch.compile sees."""
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    output_grads = output_grads_for(forward(case, point, inputs))
    with Calls() as record:
        backward(case, point, inputs, output_grads)
    names = [func._schema.name for func, _, _ in record.calls]
    if case.name in OPS:
        assert names == [f"rooftile::{name}" for direction in OPS[case.name] for name in direction]
        return
    assert names[0] == f"rooftile::{case.name}"
    assert len(names) == len(case.directions)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager_pytorch_is_the_same_function(case, device):
    """By what a peer is held to, at every point; where dtypes are mixed, Llama's own formula promotes."""
    for point, dtype in itertools.product(case.sets["tiny"], (torch.float16, BF16)):
        for direction in case.directions:
            rows = check_point(case, point, dtype, direction, function=case.eager, mutates=(), device=device)
            failed = [row for row in rows if not (row.passed or row.message.startswith("dtype "))]
            assert not failed, failed


@pytest.mark.nightly  # the benchmark's
@pytest.mark.parametrize(
    ("case", "peer"),
    [pytest.param(case, peer, id=f"{case.name} {peer.name}") for case in CASES for peer in case.peers],
)
def test_peers_compute_the_same(case, peer, device):
    """What a benchmark compares with is the same function: at every point that the peer takes."""
    compared = 0
    for point in case.sets["tiny"]:
        try:
            function = peer.build(point)
        except ImportError as error:
            pytest.skip(f"{peer.name} is not installed: {error}")
        except Unsupported:
            continue
        for direction, dtype in itertools.product(case.directions, (torch.float32, BF16)):
            options = {"function": function, "mutates": peer.mutates, "device": device}
            rows = check_point(case, point, dtype, direction, **options)
            if any(row.message.startswith("Unsupported") for row in rows):  # of that dtype
                continue
            ceilings = [case.tolerance(dtype, direction, row.output).ceiling for row in rows]
            # In 16 bits a peer need not round as eager PyTorch does, to which a check also holds ours.
            failed = [
                r for r, c in zip(rows, ceilings, strict=True) if not (r.passed or (dtype == BF16 and r.error <= c))
            ]
            assert not failed, failed
            compared += 1
            break
    assert compared


@every_case
def test_inputs_of_another_seed_are_other_inputs(case, device):
    point = case.sets["tiny"][0]
    first, again, other = (draw(case, point, BF16, device, seed) for seed in (0, 0, 1))
    names = [n for n in first if n not in ("cos", "sin")]
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert all(not torch.equal(first[n], other[n]) for n in names)


@pytest.mark.nightly  # figures of the benchmark
@every_case
def test_bytes_and_flops_grow_with_the_shape(case):
    llm = case.sets["llm"]
    for direction in case.directions:
        for point in llm:
            inputs = draw(case, point, BF16, torch.device("meta"))
            least = sum(t.nbytes for n, t in inputs.items() if n not in ("cos", "sin"))
            assert least <= case.nbytes(point, 2, direction) < 4 * least
            fixed = sum(
                y.numel() * case.output_dtypes(point)[name].itemsize
                for name, y in zip(case.outputs, as_tuple(case.reference(**inputs, **point.options)), strict=True)
                if name in case.output_dtypes(point)
            )
            others = draw(case, point, torch.float32, torch.device("meta"))
            fixed += sum(t.nbytes for n, t in inputs.items() if others[n].dtype == t.dtype and n not in ("cos", "sin"))
            narrow, wide = (case.nbytes(point, size, direction) - fixed for size in (2, 4))
            assert wide == pytest.approx(2 * narrow, rel=1e-3)
            assert case.flops(point, direction) > 0


@every_case
def test_every_point_has_bytes_and_flops(case):
    """The tiny ones more than none; empty ones are left out of a benchmark by them."""
    for name, found in case.sets.items():
        for direction, point in itertools.product(case.directions, found):
            assert min(case.nbytes(point, 2, direction), case.flops(point, direction)) >= (name == "tiny")


def test_points_have_labels_of_their_own():
    for case in CASES:
        for name, found in case.sets.items():
            labels = [str(point) for point in found]
            assert len(set(labels)) == len(labels), (case.name, name)


@every_case
def test_a_case_is_a_whole(case):
    assert {"tiny", "edge", "llm"} <= set(case.sets)
    assert dataclasses.is_dataclass(case)
    assert all(set(by) == set(case.directions) for by in case.tolerances.values())
    assert all(t.reason for by in case.tolerances.values() for t in by.values())
