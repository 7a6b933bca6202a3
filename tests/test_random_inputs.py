"""Every op at shapes, strides, dtypes and numbers that nobody chose, under the interpreter's bounds checker.

`ROOFTILE_EXAMPLES=5000 pytest -m nightly tests/test_random_inputs.py --hypothesis-profile default` draws as many
examples for each test, new ones in each run.
"""

import dataclasses
import os
import re

import pytest
import torch
from helpers import CASES, forward, generator, offset, transposed
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import rooftile
from rooftile import runtime
from rooftile.cases.check import DTYPES, as_tuple, check_point, poisoned, upcast

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(runtime.MODE is runtime.Mode.GPU, reason="the bounds checker is the interpreter's"),
]
EXAMPLES = int(os.environ.get("ROOFTILE_EXAMPLES", "300"))
# A refusal by a public function is no fault, and has its name: `ValueError: rms_norm: ...`. NumPy's errors within a
# kernel have none, and a read or a write out of bounds is an OutOfBoundsError.
REFUSAL = re.compile(r"(?:ValueError|TypeError|NotImplementedError): (\w+?)(?:_backward)?: ")
MOST = 6_000  # elements of a size that is drawn: the interpreter's time
CHANCE = 1.5  # of the tolerance: seen was 1.02
FEW = 32  # elements of which a norm is no average
every = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def subnormal(x):
    """x with some of its numbers below the smallest normal one."""
    tiny = torch.finfo(x.dtype).smallest_normal / 4
    flat = x.clone().reshape(-1)
    flat[::3] = tiny * flat[::3].sign()
    return flat.view_as(x)


BY_NAME = {case.name: case for case in CASES}
LAYOUTS = {"contiguous": lambda x: x, "transposed": transposed, "offset": offset}
VALUES = {"normal": lambda x: x, "small": subnormal, "zero": torch.zeros_like, "large": lambda x: 8 * x}
NUMBERS = (torch.inf, -torch.inf, torch.nan)


@st.composite
def places(draw):
    """A case's name, and a point near one of its own: each size as it is, or another; each flag one of the case's."""
    case = BY_NAME[draw(st.sampled_from(sorted(BY_NAME)))]
    own = [*case.sets["tiny"], *case.sets["edge"]]
    near = draw(st.sampled_from(own))
    dims = dict(near.dims)
    for name, size in near.dims.items():
        seen = sorted({p.dims[name] for p in own if name in p.dims})
        if seen[-1] <= 1:
            dims[name] = draw(st.sampled_from(seen))
        elif size <= 4096 and draw(st.booleans()):
            dims[name] = draw(st.integers(1, max(3, 2 * size)))
    return case.name, dataclasses.replace(near, dims=dims, label=f"{near.label} at {dims}")


def is_refusal(message):
    """Whether a public function refused its arguments."""
    found = REFUSAL.match(message)
    return found is not None and callable(getattr(rooftile, found[1], None))


def drawn(case, point, dtype, seed, how=lambda x: x):
    """The inputs and what eager PyTorch gives for them; an example where there are none is not counted."""
    try:
        inputs = case.inputs(point, dtype, runtime.default_device(), generator(runtime.default_device(), seed))
        assume(sum(t.numel() for t in inputs.values()) <= MOST)
        inputs = {n: how(t) if t.is_floating_point() else t for n, t in inputs.items()}
        return inputs, as_tuple(case.eager(**{n: t.clone() for n, t in inputs.items()}, **point.options))
    except Exception:  # the case has no inputs of these sizes
        assume(False)


def test_a_refusal_names_its_function():
    assert is_refusal("ValueError: rms_norm: weight has shape (3,), expected (4,) to match x's last dimension")
    assert is_refusal("TypeError: cross_entropy_backward: dloss is None, expected a Tensor")
    assert not is_refusal("ValueError: operands could not be broadcast together with shapes (4,) (8,)")
    assert not is_refusal("ValueError: shape mismatch: objects cannot be broadcast to a single shape")
    assert not is_refusal("OutOfBoundsError: rms_norm: a read of 4 bytes is outside")


@every
@given(
    place=places(),
    dtype=st.sampled_from(sorted(DTYPES)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    values=st.sampled_from(sorted(VALUES)),
    seed=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_results_are_right_within_bounds_or_the_shape_is_refused(place, dtype, layout, values, seed, data):
    case, point = BY_NAME[place[0]], place[1]
    assume(DTYPES[dtype] in case.dtypes)
    # Of an fp8 weight the op rounds x to fp8, too, if x has more rows; the case's reference does not.
    assume(not (case.name.startswith("rms_norm") and point.dims.get("fp8") and point["rows"] > 1))
    # Of one class the gradient is 1 - 1, and what a z-loss adds has lost its digits to the ones.
    assume(point.dims.get("vocabulary") != 1)
    # Far below 0 a gate underflows in float32 and not in the reference, and a row or group has that for its scale.
    assume(not (values == "large" and case.name.endswith("mul_quantized")))
    # Logits of a fused head are rounded to 16 bits: large ones, and so the loss of a token, are off by tenths.
    assume(not (values == "large" and dtype != "fp32" and {"hidden", "vocabulary"} <= set(point.dims)))
    # A mean is a sum times the inverse of the weights' sum, which is infinite below the smallest normal number.
    assume(not (values == "small" and (point.dims.get("has_weight") or point.dims.get("has_token_weights"))))
    # A gradient of large scores is a difference of near numbers, whose digits no 16 bits hold.
    direction = data.draw(st.sampled_from(case.directions)) if values != "large" else "forward"

    def how(x):
        return LAYOUTS[layout](VALUES[values](x))

    inputs, eager = drawn(case, point, DTYPES[dtype], seed, how)
    # Where eager PyTorch overflows, there is nothing to compare.
    assume(all(y.float().isfinite().all() for y in eager if y.is_floating_point()))
    own = dataclasses.replace(
        case,
        inputs=lambda *given: {n: how(t) if t.is_floating_point() else t for n, t in case.inputs(*given).items()},
    )

    def check(direction):
        return check_point(own, point, DTYPES[dtype], direction, seed=seed)

    by_output = dict(zip(case.outputs, eager, strict=True)) if direction == "forward" else {}

    for row in check(direction):
        refused = is_refusal(row.message)
        # Below a rounding everything is noise. The ceilings are for normal inputs: where eager PyTorch is over one,
        # nothing can be said.
        noise = values in ("small", "zero") or row.eager_error > row.tolerance
        # A divergence near 0 of large logits is a difference of near numbers.
        noise |= values == "large" and row.abs_error <= torch.finfo(torch.float32).eps
        # Twice eager PyTorch's error bounds typical draws. Of some thousands, one has eager's near its least and ours
        # near its most. Of a few elements or rows one number can decide: its two roundings are a unit at most.
        few = by_output.get(row.output, inputs.get(row.output[1:])).numel() <= FEW or point.dims.get("rows", FEW) <= 4
        ceiling = case.tolerance(DTYPES[dtype], direction, row.output).ceiling
        unit = torch.finfo(DTYPES[dtype]).eps
        noise |= row.error <= (max(ceiling, unit) if few else min(ceiling, CHANCE * row.tolerance))
        inexact = (row.message.startswith("error ") and noise) or row.message.startswith("the reference is zero")
        # Of shapes that the forward refuses, the backward has no outputs to draw gradients for.
        right = row.passed or refused or inexact or is_refusal(check("forward")[0].message)
        assert right, row


@every
@given(place=places(), number=st.sampled_from(NUMBERS), seed=st.integers(0, 1 << 30), data=st.data())
def test_a_number_that_is_not_finite_stays_where_the_formula_takes_it(place, number, seed, data):
    """Results that the formula does not compute from it have the bits that they have without it."""
    case, point = BY_NAME[place[0]], place[1]
    inputs, _ = drawn(case, point, torch.float32, seed)
    # What has a gradient; of others the formula may take no more than a comparison.
    named = sorted(n for n, t in inputs.items() if n in case.grads and t.numel())
    assume(named)
    name = data.draw(st.sampled_from(named))
    place_of = tuple(data.draw(st.integers(0, n - 1)) for n in inputs[name].shape)

    def with_number(tensors, value):
        changed = {**tensors, name: tensors[name].clone()}
        changed[name][place_of] = value
        return changed

    try:
        with poisoned():
            clean = forward(case, point, inputs)
            found = forward(case, point, with_number(inputs, number))
    except (ValueError, TypeError, NotImplementedError) as error:
        if not is_refusal(f"{type(error).__name__}: {error}"):
            raise
        return
    with torch.no_grad():
        reached = as_tuple(case.reference(**upcast(with_number(inputs, torch.nan)), **point.options))
    for a, b, r in zip(clean, found, reached, strict=True):
        if a.is_floating_point() and r.is_floating_point():
            untouched = ~r.isnan()
            assert torch.equal(a[untouched], b[untouched])
