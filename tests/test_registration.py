"""What PyTorch knows of every op: schema, fake tensors, torch.compile, devices, what is written in place."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import (
    BF16,
    CASES,
    DIFFERENTIABLE,
    Calls,
    assert_same,
    backward,
    draw,
    forward,
    grads_of,
    nightly_but,
    output_grads_for,
    with_length,
)
from torch._dynamo.testing import CompileCounterWithBackend

from rooftile import runtime

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def registered():
    """Names of all ops in the namespace."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.partition("::")[2] for name in names if name.startswith("rooftile::")}


_CALLS = {}


def calls(case, device, points=None):
    """The ops that the case calls, forward and backward, with their arguments: at each tiny point, so in each mode."""
    for point in case.sets["tiny"] if points is None else points:
        key = case.name, str(point)
        if key not in _CALLS:  # once in a process
            outputs = forward(case, point, draw(case, point, torch.float32, torch.device("meta")))  # nothing is run
            output_grads = output_grads_for([torch.empty_like(y, device=device) for y in outputs])
            with Calls() as record:
                backward(case, point, draw(case, point, torch.float32, device), output_grads)
            _CALLS[key] = record.calls
        yield from _CALLS[key]


# As PyTorch's own products, these cast what they are given under autocast: test_matmul.py.
PRODUCTS = (
    "matmul", "linear", "gated_linear", "gated_mlp", "lora_linear", "linear_cross_entropy", "linear_jsd", "linear_kl",
    "rms_norm_linear", "rms_norm_gated_linear", "attention", "attention_varlen",
)  # fmt: skip
OF_VALUES = ("test_schema", "test_faketensor")
OF_TENSORS = ("test_autograd_registration",)
TRACED = ("test_aot_dispatch_dynamic",)


def elements(case, point):
    return sum(t.numel() for t in draw(case, point, torch.float32, torch.device("meta")).values())


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["", "traced"])
@every_case
def test_opcheck(case, traced, device):
    """What PyTorch registers, once for each set of tensors, at the smallest point. Nightly, once for each by dtype and
    rank, and a trace of the forward op for each set. torch.compile below traces the first set, and backward ops."""
    done = set()
    for point in sorted(case.sets["tiny"], key=lambda point: elements(case, point)):
        forward_call, *rest = calls(case, device, [point])
        checked = [forward_call] if case.name.startswith("rope") else [forward_call, *rest]  # its backward is itself
        for op, args, _ in checked:
            # PyTorch's test of the schema multiplies what it is given, which float8 can't be.
            narrow = any(isinstance(a, torch.Tensor) and a.is_floating_point() and a.itemsize == 1 for a in args)
            tests = OF_VALUES[1:] if narrow else OF_VALUES
            ranks = (op, *((a.dtype, a.dim()) if isinstance(a, torch.Tensor) else a is None for a in args))
            given = (op, *(isinstance(a, torch.Tensor) for a in args))
            if (ranks if traced else given) not in done:
                torch.library.opcheck(op, args, test_utils=(*tests, *OF_TENSORS))
            if traced and given not in done and op is forward_call[0]:
                torch.library.opcheck(op, args, test_utils=TRACED)
            done |= {ranks, given}


# The others by torch.compile below, which traces them with gradients too.
@pytest.mark.parametrize(
    "case",
    nightly_but(("rms_norm", "linear", "attention", "cross_entropy"), DIFFERENTIABLE),
    ids=lambda case: case.name,
)
def test_opcheck_with_gradients(case, device):
    op, args, _ = next(calls(case, device))
    if case.mutates:
        pytest.skip("leaves that require grad can't be written in place: test_rope.py")
    names = [a.name for a in op._schema.arguments]
    asking = [
        a if a is None or n not in case.grads else a.clone().requires_grad_() for n, a in zip(names, args, strict=True)
    ]
    torch.library.opcheck(op, tuple(asking))


def test_every_registered_op_is_checked(device):
    called = [op._schema.name for case in CASES for op, _, _ in calls(case, device, case.sets["tiny"][:1])]
    # Without a reduction losses have a backward of their own.
    for case in CASES:
        point = next((p for p in case.sets["tiny"] if p.options.get("reduction") == "none"), None)
        called += [] if point is None else [op._schema.name for op, _, _ in calls(case, device, [point])]
    # With gradients, as calls are made here, a gate is an op of its own; without, it is these. Statistics are
    # asked for without a loss's point, and a part of the classes is what a rank has.
    with torch.no_grad():
        x, weight = torch.randn(2, 32, device=device), torch.randn(16, 32, device=device)
        for op, args in (
            (torch.ops.rooftile.gated_linear, (x, weight, None, "silu", "ieee", [])),
            (torch.ops.rooftile.rms_norm_gated_linear, (x, x[0], weight, None, None, 1e-6, 0.0, "silu", [])),
            (torch.ops.rooftile.activate_add, (x, x, "silu")),
            (
                torch.ops.rooftile.cross_entropy_with_stats,
                (x, torch.arange(2, device=device), None, None, -100, 0.0, 0.0, 0.0, "mean", "none"),
            ),
            (
                torch.ops.rooftile.cross_entropy_of_columns,
                (x, torch.arange(2, device=device), x[0], -100, True, 0.0, True, 1.0),
            ),
        ):
            torch.library.opcheck(op.default, args)
            called.append(op.default._schema.name)
    # Results go into memory that the caller gives.
    called += ["rooftile::attention_paged_into", "rooftile::decode_attention_into"]
    assert {name.partition("::")[2] for name in called} == registered()


def op_of(case):
    """Weights that are quantized are an argument of the op for dense ones."""
    if case.name == "add_rms_norm_quantized":
        return "rms_norm_quantized"  # with a residual
    if case.name == "linear_kl":
        return "linear_jsd"
    return re.sub("^(rms_norm(_gated)?_linear)_quantized$", r"\1", case.name)


def called(case):
    """The public function of a case, which its errors name."""
    return case.name.removesuffix("_quantized")


@every_case
def test_fake_results_match_real_ones(case, device):
    """Shape, dtype and strides, on meta tensors that hold nothing."""
    for op, args, results in calls(case, device):
        fakes = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
        if fakes is None and results is None:  # all in place
            continue
        results = results if isinstance(results, tuple) else (results,)
        fakes = fakes if isinstance(fakes, tuple) else (fakes,)
        for fake, real in zip(fakes, results, strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def compiled_step(case, backend, **options):
    """The function and its gradients, compiled as one graph; and how often it was compiled."""
    counter = CompileCounterWithBackend(backend)

    def step(inputs):
        given = {n: t.clone() if n in case.mutates else t for n, t in inputs.items()}
        outputs = case.function(**given, **options)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    torch._dynamo.reset()
    return torch.compile(step, backend=counter, fullgraph=True), counter


def assert_compiled_agrees(case, point, step, device):
    inputs = draw(case, point, torch.float32, device)
    names = grads_of(case, inputs)
    expected = forward(case, point, inputs)
    output_grads = output_grads_for(expected)
    leaves = {n: t.detach().requires_grad_(n in names) for n, t in inputs.items()}
    outputs = step(leaves)
    assert_same(outputs, expected)
    if not case.grads:
        return
    grads = torch.autograd.grad(outputs, [leaves[n] for n in names], output_grads)
    assert_same(grads, backward(case, point, inputs, output_grads))


def ways(case):
    """Of the tiny points, one for each set of tensors and of options: their values go through the same code."""
    found = {}
    for point in case.sets["tiny"]:
        inputs = draw(case, point, torch.float32, torch.device("meta"))
        found.setdefault((*((n, t.dim()) for n, t in inputs.items()), *sorted(point.options)), point)
    return list(found.values())


# A bias or a mask or none, ways to quantize, statistics or none; lengths below are those of the first way of all cases.
@pytest.mark.parametrize(
    "case", nightly_but(("layer_norm", "linear", "silu_mul_quantized", "softmax"), CASES), ids=lambda case: case.name
)
def test_torch_compile_keeps_one_graph(case, device):
    for point in ways(case)[1:]:  # the first has one below
        step, counter = compiled_step(case, "aot_eager", **point.options)
        assert_compiled_agrees(case, point, step, device)
        assert counter.frame_count == 1


# Of each kind: element-wise and row-wise ops, in place or not, products, attention, losses, caches, tokens.
COMPILED = (
    "add_rms_norm", "rope_", "silu_mul", "quantize_tensor", "linear", "int4_linear", "rms_norm_linear",
    "rms_norm_qkv_rope_cache", "attention", "attention_paged", "linear_cross_entropy", "append_kv", "embedding",
    "sample_",
)  # fmt: skip


@pytest.mark.parametrize("case", nightly_but(COMPILED, CASES), ids=lambda case: case.name)
def test_torch_compile_takes_lengths_that_change(case, device):
    """One graph for the first length, one for all others."""
    point = case.sets["tiny"][0]
    step, counter = compiled_step(case, "aot_eager")
    for length, graphs in ((5, 1), (8, 2), (13, 2)):
        assert_compiled_agrees(case, with_length(point, length), step, device)
        assert counter.frame_count == graphs


# Of an op without a backward the lengths above have no gradients either.
@pytest.mark.parametrize(
    "case", nightly_but(("rms_norm", "linear", "cross_entropy", "rope_"), CASES), ids=lambda case: case.name
)
def test_torch_compile_without_gradients(case, device):
    point = case.sets["tiny"][0]
    step, counter = compiled_step(case, "aot_eager")
    with torch.no_grad():
        for length in (5, 8, 13):
            inputs = draw(case, with_length(point, length), BF16, device)
            assert_same(step(inputs), forward(case, point, inputs))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "case",
    nightly_but(("add_rms_norm",), [c for c in CASES if c.name in ("add_rms_norm", "rope_")]),
    ids=lambda case: case.name,
)
def test_inductor(case, device):
    point = case.sets["tiny"][0]
    step, counter = compiled_step(case, "inductor")
    assert_compiled_agrees(case, point, step, device)
    assert counter.frame_count == 1


@pytest.mark.gpu
@every_case
def test_inductor_on_the_gpu(case, device):
    for point in case.sets["tiny"]:
        step, counter = compiled_step(case, "inductor", **point.options)
        assert_compiled_agrees(case, point, step, device)
        assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if c.roof == "copy"], ids=lambda case: case.name)
def test_lengths_that_change_compile_no_kernel_again(case, device):
    """But for products, whose kernel and tiles depend on how many rows there are."""
    import triton

    compiled = []

    def hook(*, fn, **_):
        compiled.append(fn.name)

    point = case.sets["llm"][0]

    def run(length):
        shaped = with_length(point, length)
        inputs = draw(case, shaped, BF16, device)
        backward(case, shaped, inputs, output_grads_for(forward(case, shaped, inputs)))

    for length in (64, 63, 2048):  # with and without divisibility by 16, as many rows as fill the chip
        run(length)
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        for length in (2, 17, 48, 100, 777, 1024):
            run(length)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled


@pytest.mark.gpu
@every_case
def test_cuda_graphs_capture(case, device):
    """No synchronisation, no allocation outside the pool, a grid from shapes alone."""
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    given = {n: t.clone() for n, t in inputs.items()}
    expected = forward(case, point, inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        outputs = case.function(**given, **point.options)
    for n, t in inputs.items():
        given[n].copy_(t)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(outputs if isinstance(outputs, tuple) else (outputs,), expected)


@pytest.mark.gpu
@every_case
def test_another_device_than_the_current(case):
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs a second GPU")
    second = torch.device(torch.accelerator.current_accelerator().type, 1)
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, second)
    outputs = forward(case, point, inputs)
    assert all(y.device == second and torch.isfinite(y).all() for y in outputs)


@every_case
def test_inputs_on_two_devices(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, BF16, device)
    for name in list(inputs)[1:]:
        mixed = {**inputs, name: inputs[name].to("meta")}
        first = next(iter(inputs))
        with pytest.raises(
            ValueError, match=f"^{called(case)}: {name} is on meta, expected {inputs[first].device} to match {first}"
        ):
            case.function(**mixed, **point.options)
    assert_same(forward(case, point, inputs), forward(case, point, draw(case, point, BF16, device)))


@every_case
def test_dtypes_that_are_not_taken(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, torch.float32, device)
    for name in (n for n, t in inputs.items() if t.is_floating_point()):
        for dtype in (torch.float64, torch.int32):
            with pytest.raises(TypeError, match=f"^{called(case)}: {name} has dtype torch.{str(dtype)[6:]}, expected"):
                case.function(**{**inputs, name: inputs[name].to(dtype)}, **point.options)


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in PRODUCTS], ids=lambda case: case.name)
def test_autocast_changes_nothing(case, device):
    point = case.sets["tiny"][0]
    inputs = draw(case, point, torch.float32, device)
    expected = forward(case, point, inputs)
    with torch.autocast(device.type, dtype=BF16):
        assert_same(forward(case, point, inputs), expected)


CPU_CALLS = """
import torch, rooftile
from rooftile.cases import find_cases
from rooftile.cases.check import generator
cpu = torch.device("cpu")
for case in find_cases():
    point = case.sets["tiny"][0]
    inputs = case.inputs(point, torch.float32, cpu, generator(cpu, 0))
    before = {n: t.clone() for n, t in inputs.items()}
    try:
        case.function(**inputs, **point.options)
    except ValueError as error:
        print(error)
    assert all(torch.equal(inputs[n], before[n]) for n in inputs)
try:
    torch.compile(rooftile.rms_norm, backend="aot_eager", fullgraph=True)(torch.randn(4, 64))
except ValueError as error:
    print(error)
"""


@pytest.mark.nightly
def test_tensors_on_the_cpu_without_the_interpreter():
    """In a compiled graph too: launches are not traced into it, and the op, which stays whole, says what it needs."""
    environment = {n: v for n, v in os.environ.items() if n not in ("TRITON_INTERPRET", "ROOFTILE_COMPILE_TARGET")}
    run = subprocess.run(
        [sys.executable, "-c", CPU_CALLS], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    first = [next(iter(draw(case, case.sets["tiny"][0], BF16, torch.device("meta")))) for case in CASES]
    expected = [
        f"{called(case)}: {name} is on the CPU, expected a GPU ({runtime.TO_INTERPRET})"
        for case, name in zip(CASES, first, strict=True)
    ]
    *eager, compiled = run.stdout.splitlines()
    assert eager == expected
    assert compiled.startswith(f"rms_norm: x is on the CPU, expected a GPU ({runtime.TO_INTERPRET})")


def test_transforms_that_differentiate_are_refused_by_name(device):
    from rooftile import rms_norm

    x = torch.randn(4, 64, device=device)
    with pytest.raises(
        RuntimeError, match=r"rms_norm can't be differentiated by torch\.func; use torch\.autograd\.grad"
    ):
        torch.func.grad(lambda x: rms_norm(x).sum())(x)
