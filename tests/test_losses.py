"""rooftile.losses: each formula against all logits in float64, its gradients, what does not count, errors."""

import math

import pytest
import torch
from helpers import BF16, nightly_but

import rooftile
from rooftile import losses
from rooftile.cases.check import relative_error
from rooftile.cases.linear_cross_entropy import TOLERANCES
from rooftile.reference import losses as reference

BATCH, LENGTH, HIDDEN, CLASSES = 4, 7, 24, 37
INF, NAN = math.inf, math.nan


def drawn(device, *, spread=1.0, dtype=torch.float32, ignored=0.3):
    """Hidden states, weight, labels (some of them ignored) and bias."""
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, device=device).to(dtype)
    weight = (spread * torch.randn(CLASSES, HIDDEN, device=device) * HIDDEN**-0.5).to(dtype)
    labels = torch.randint(CLASSES, (BATCH, LENGTH), device=device)
    labels = torch.where(torch.rand(BATCH, LENGTH, device=device) < ignored, -100, labels)
    return hidden, weight, labels, torch.randn(CLASSES, device=device).to(dtype)


def doubled(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def with_gradients(function, tensors, given, options):
    """The loss and the gradients of hidden, weight and bias."""
    hidden, weight, labels, bias = tensors
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    found = function(leaves[0], leaves[1], labels, *given, leaves[2], **options)
    loss = found.loss if isinstance(found, losses.PolicyLoss) else found
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def assert_right(name, tensors, *given, **options):
    found = with_gradients(getattr(losses, name), tensors, given, options)
    wide = {n: doubled(v) for n, v in options.items()}
    truth = with_gradients(getattr(reference, name), tuple(map(doubled, tensors)), tuple(map(doubled, given)), wide)
    tolerances = TOLERANCES[tensors[0].dtype]
    for i, (a, e) in enumerate(zip(found, truth, strict=True)):
        assert a.shape == e.shape
        assert torch.isfinite(a).all()
        # Losses are differences of log-probabilities, which are up to ten times as large.
        assert relative_error(a, e) <= (1 if i else 10) * tolerances["backward" if i else "forward"].ceiling, (
            i,
            options,
        )
    return found


def near(tensors, *, by=0.3, **options):
    """Log-probabilities of tokens as another policy has them."""
    logps = losses.token_logps(*tensors, **options)
    return logps + by * torch.randn_like(logps)


PREFERENCES = [
    ("dpo_loss", {}),
    ("dpo_loss", {"beta": 0.5, "label_smoothing": 0.1, "ref": True, "chunk_bytes": 5 * 48 * 4}),
    ("dpo_loss", {"loss_type": "hinge", "beta": 0.1, "ref": True}),
    ("dpo_loss", {"loss_type": "ipo", "beta": 0.3, "ref": True}),
    ("orpo_loss", {"beta": 0.7}),
    ("simpo_loss", {"beta": 1.5, "gamma": 0.3, "label_smoothing": 0.2, "softcap": 4.0}),
    ("kto_loss", {}),
    ("kto_loss", {"kl": 0.4, "beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6, "ref": True}),
]


@pytest.mark.parametrize(("name", "options"), PREFERENCES, ids=lambda value: str(value).replace(" ", ""))
def test_preferences(name, options, device):
    tensors = drawn(device)
    options = dict(options)
    if options.pop("ref", False):
        options["ref_logps"] = near(tensors).sum(-1)
    given = (torch.tensor([True, False, False, True], device=device),) if name == "kto_loss" else ()
    assert_right(name, tensors, *given, **options)
    if name == "kto_loss" and "kl" in options:
        for kl in (torch.tensor(0.4, device=device), -1.0, torch.tensor(-1.0, device=device)):
            assert_right(name, tensors, *given, **{**options, "kl": kl})


@pytest.mark.each_once
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo(loss_type, level, device):
    """Off the policy, so that ratios are clipped on either side, with all terms."""
    tensors = drawn(device)
    options = {
        "mask": torch.rand(BATCH, LENGTH, device=device) < 0.8,
        "old_logps": near(tensors, temperature=0.8),
        "ref_logps": near(tensors, temperature=0.8),
        "importance_sampling_ratio": torch.rand(BATCH, LENGTH, device=device) + 0.5,
        "beta": 0.04,
        "epsilon_low": 0.1,
        "epsilon_high": 0.28,
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "temperature": 0.8,
    }
    if loss_type == "dr_grpo":
        options["max_completion_length"] = 11
    if loss_type == "dapo":
        options["num_items_in_batch"] = torch.tensor(50, device=device)
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.7], device=device)
    assert_right("grpo_loss", tensors, advantages, **options)


def test_grpo_on_the_policy(device):
    """Ratios are 1, and have gradients all the same."""
    tensors = drawn(device, ignored=0.0)
    advantages = torch.tensor([1.0, -0.7, 0.5, -0.5], device=device)
    loss, *grads = assert_right("grpo_loss", tensors, advantages)
    torch.testing.assert_close(loss, -advantages.mean())
    assert grads[0].norm() > 1e-2
    old = losses.token_logps(*tensors)
    for a, e in zip(assert_right("grpo_loss", tensors, advantages, old_logps=old), (loss, *grads), strict=True):
        torch.testing.assert_close(a, e)
    per_token = advantages[:, None] * torch.rand(BATCH, LENGTH, device=device)
    assert_right("grpo_loss", tensors, per_token, delta=0.9, importance_sampling_ratio=per_token[:, :1].abs())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_that_float32_can_not_hold_is_clipped_without_a_gradient(level, device):
    """exp(100): 0 with a positive advantage, and with `delta` with any, where the other tokens learn as before."""
    tensors = drawn(device, ignored=0.0)
    old = near(tensors)
    if level == "sequence":
        old[0] -= 100
    else:
        old[:, 2] -= 100
    advantages = torch.tensor([1.0, 0.5, 0.0, 0.7], device=device)
    options = {"old_logps": old, "importance_sampling_level": level}
    assert_right("grpo_loss", tensors, advantages, **options)
    assert_right("grpo_loss", tensors, -advantages, **options, delta=2.0)
    options |= {"ref_logps": old + 200, "beta": 1.0}
    for a in with_gradients(losses.grpo_loss, tensors, (-advantages,), options):
        assert torch.isfinite(a).all()


def test_bfloat16(device):
    tensors = drawn(device, dtype=BF16, ignored=0.0)
    assert_right("dpo_loss", tensors, beta=0.5)
    advantages = torch.tensor([1.0, 0.3, 0.5, 2.0], device=device)
    assert_right("grpo_loss", tensors, advantages, temperature=0.5, softcap=5.0)


def test_a_temperature_with_a_soft_cap_and_another_ignored_label(device):
    tensors = drawn(device)
    tensors[2].masked_fill_(tensors[2] == -100, 3)
    options = {"temperature": 0.7, "softcap": 2.0, "ignore_index": 3}
    found = losses.token_logps(*tensors, **options)
    truth = reference.token_logps(*map(doubled, tensors), **options)
    assert relative_error(found, truth) < TOLERANCES[torch.float32]["forward"].ceiling
    assert (found[tensors[2] == 3] == 0).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e3])
def test_hidden_states_that_a_temperature_would_bring_out_of_range(temperature, device):
    """Of float16: logits of order 1 to 10, log-probabilities of order 1e4, or gradients of order 1e-3."""
    hidden, weight, labels, _ = drawn(device, dtype=torch.float16, ignored=0.0)
    tensors = 256 * hidden, weight / 128, labels
    leaf = tensors[0].clone().requires_grad_()
    found = losses.token_logps(leaf, *tensors[1:], temperature=temperature)
    exact = tensors[0].double().requires_grad_()
    truth = reference.token_logps(exact, tensors[1].double(), labels, temperature=temperature)
    ceiling = TOLERANCES[torch.float16]
    assert relative_error(found.detach(), truth.detach()) <= ceiling["forward"].ceiling
    grads = [torch.autograd.grad(t.sum(), x)[0] for t, x in ((found, leaf), (truth, exact))]
    assert relative_error(*grads) <= ceiling["backward"].ceiling


def arguments(name, tensors, device):
    """What each loss is called with, all of its tensors given."""
    if name == "grpo_loss":
        more = {n: near(tensors) for n in ("old_logps", "ref_logps")}
        more["importance_sampling_ratio"] = torch.rand(BATCH, LENGTH, device=device)
        return (torch.randn(BATCH, device=device),), {"beta": 0.1, **more}
    if name == "kto_loss":
        return (torch.tensor([True, False] * 2, device=device),), {"ref_logps": near(tensors).sum(-1)}
    return (), {"ref_logps": near(tensors).sum(-1)} if name == "dpo_loss" else {}


LOSSES = ("dpo_loss", "orpo_loss", "simpo_loss", "kto_loss", "grpo_loss")
every_loss = pytest.mark.parametrize("name", LOSSES)


@every_loss
def test_nothing_that_counts_is_a_loss_of_0_with_gradients_of_0(name, device):
    tensors = drawn(device, ignored=1.0)
    given, options = arguments(name, tensors, device)
    kinds = {"grpo_loss": ("grpo", "bnpo", "dr_grpo", "dapo"), "dpo_loss": ("sigmoid", "hinge", "ipo")}
    for kind in kinds.get(name, ("",)):
        more = {"loss_type": kind} if kind else {}
        for found in with_gradients(getattr(losses, name), tensors, given, {**options, **more}):
            assert (found == 0).all()


@pytest.mark.each_once
@every_loss
@pytest.mark.parametrize("bad", [CLASSES, 2**40, -1])
def test_a_label_that_is_no_class_makes_the_loss_nan(name, bad, device):
    tensors = drawn(device, ignored=0.0)
    given, options = arguments(name, tensors, device)
    tensors[2][0, 3] = bad
    loss, *_ = with_gradients(getattr(losses, name), tensors, given, options)
    assert loss.isnan()


@every_loss
def test_a_sequence_without_labels_is_left_out(name, device):
    """Of a pair, with the other sequence; GRPO divides by the number of sequences all the same."""
    tensors = drawn(device)
    tensors[2][1] = -100
    given, options = arguments(name, tensors, device)
    if name == "grpo_loss":
        options["loss_type"] = "grpo"
    assert_right(name, tensors, *given, **options)


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_the_reference_of_a_pair_that_is_left_out_does_not_matter(loss_type, bad, device):
    tensors = drawn(device)
    tensors[2][1] = -100
    _, options = arguments("dpo_loss", tensors, device)
    options["loss_type"] = loss_type
    expected = with_gradients(losses.dpo_loss, tensors, (), options)
    spoiled = options["ref_logps"].clone()
    spoiled[1] = bad  # a mean over no labels is 0 / 0
    found = with_gradients(losses.dpo_loss, tensors, (), {**options, "ref_logps": spoiled})
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_what_stands_at_masked_tokens_does_not_matter(device):
    tensors = drawn(device, ignored=0.0)
    given, options = arguments("grpo_loss", tensors, device)
    mask = torch.rand(BATCH, LENGTH, device=device) < 0.6
    expected = with_gradients(losses.grpo_loss, tensors, given, {**options, "mask": mask})
    advantages = given[0][:, None].expand(BATCH, LENGTH)
    for bad in (NAN, INF, -INF):
        spoiled = {n: t.masked_fill(~mask, bad) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
        spoiled["mask"] = mask.long()
        found = with_gradients(losses.grpo_loss, tensors, (advantages.masked_fill(~mask, bad),), spoiled)
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e)


def test_a_sequence_that_is_certain_has_a_finite_odds_ratio(device):
    hidden, weight, labels, bias = drawn(device, ignored=0.0)
    labels[:] = 5
    bias[5] = 60.0
    for value in with_gradients(losses.orpo_loss, (hidden, weight, labels, bias), (), {}):
        assert torch.isfinite(value).all()


@every_loss
def test_the_log_probabilities_that_come_back_are_those_of_the_policy(name, device):
    tensors = drawn(device)
    given, options = arguments(name, tensors, device)
    hidden, weight, labels, bias = (t.requires_grad_() if t.is_floating_point() else t for t in tensors)
    loss, logps = getattr(losses, name)(hidden, weight, labels, *given, bias, **options)
    assert loss.requires_grad
    assert not logps.requires_grad
    with torch.no_grad():
        whole = losses.token_logps if name == "grpo_loss" else losses.sequence_logps
        torch.testing.assert_close(logps, whole(hidden, weight, labels, bias))


@pytest.mark.parametrize("name", ["simpo_loss", "grpo_loss"])
def test_a_head_with_an_adapter_is_the_merged_head(name, device):
    hidden, weight, labels, bias = tensors = drawn(device)
    given, options = arguments(name, tensors, device)
    a, b = torch.randn(2, HIDDEN, device=device) * HIDDEN**-0.5, torch.randn(CLASSES, 2, device=device)
    function = getattr(losses, name)
    found = function(hidden, weight, labels, *given, bias, adapter=(hidden @ a.mT, b), **options)
    merged = function(hidden, weight + b @ a, labels, *given, bias, **options)
    torch.testing.assert_close(found.loss, merged.loss)


def test_references_get_no_gradients(device):
    tensors = drawn(device)
    for name in ("dpo_loss", "kto_loss", "grpo_loss"):
        given, options = arguments(name, tensors, device)
        learned = {n: t.requires_grad_() if isinstance(t, torch.Tensor) else t for n, t in options.items()}
        hidden, weight, labels, bias = tensors
        getattr(losses, name)(hidden.clone().requires_grad_(), weight, labels, *given, bias, **learned).loss.backward()
        assert all(t.grad is None for t in learned.values() if isinstance(t, torch.Tensor))


def test_one_graph(device):
    tensors = drawn(device)
    given, options = arguments("grpo_loss", tensors, device)

    def step(hidden, weight, labels, advantages, bias, **options):
        return losses.grpo_loss(hidden, weight, labels, advantages, bias, **options).loss

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found = with_gradients(compiled, tensors, given, options)
    for a, e in zip(found, with_gradients(step, tensors, given, options), strict=True):
        torch.testing.assert_close(a, e)


def test_one_graph_for_sizes_that_are_known_and_sizes_that_are_not(device):
    hidden, weight, labels, _ = drawn(device)
    half = labels[: BATCH // 2].tolist()  # of known size

    def step(some, weight):
        return losses.simpo_loss(torch.stack([some, 2 * some]).flatten(0, 1), weight, torch.tensor(half + half)).loss

    some = hidden[: BATCH // 2]
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(some, weight), step(some, weight))


def test_wrong_arguments(device):
    hidden, weight, labels, bias = drawn(device)
    yes = torch.ones(BATCH, dtype=torch.bool, device=device)
    advantages = torch.ones(BATCH, device=device)
    short = labels[:, 1:]
    three = hidden, weight, labels
    grpo = *three, advantages
    wrong = [
        ("dpo_loss", (hidden[:3], weight, labels[:3]), {}, r"hidden has shape \(3, 7, 24\), expected \(2B, T, H\)"),
        ("orpo_loss", (hidden[0], weight, labels[0]), {}, r"hidden has shape \(7, 24\), expected \(2B, T, H\)"),
        ("simpo_loss", (hidden, weight, short), {}, r"labels has shape \(4, 6\), expected \(4, 7\)"),
        ("dpo_loss", three, {"ref_logps": advantages[1:]}, r"ref_logps has shape \(3,\), expected \(4,\)"),
        ("dpo_loss", three, {"beta": 0.0}, "beta is 0.0, expected a finite number above 0"),
        ("dpo_loss", three, {"label_smoothing": 0.6}, "label_smoothing is 0.6, expected a number from"),
        ("dpo_loss", three, {"loss_type": "kto"}, "loss_type is 'kto', expected one of sigmoid, ipo, hinge"),
        ("dpo_loss", three, {"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing is 0.1, expected 0"),
        ("orpo_loss", three, {"beta": -1.0}, "beta is -1.0, expected a number 0 or more"),
        ("simpo_loss", three, {"gamma": NAN}, "gamma is nan, expected a number 0 or more"),
        ("kto_loss", (hidden, weight, labels, yes[:2]), {}, r"desirable has shape \(2,\), expected \(4,\)"),
        ("kto_loss", (hidden, weight, labels, yes), {"kl": bias}, r"kl has shape \(37,\), expected \(\)"),
        ("grpo_loss", (hidden, weight, labels, yes[:1]), {}, r"advantages has shape \(1,\), expected \(4,\) or"),
        ("grpo_loss", grpo, {"mask": short}, r"mask has shape \(4, 6\), expected \(4, 7\)"),
        ("grpo_loss", grpo, {"beta": 0.1}, r"ref_logps is None, expected a tensor of shape \(4, 7\)"),
        ("grpo_loss", grpo, {"loss_type": "ppo"}, "loss_type is 'ppo', expected one of grpo"),
        ("grpo_loss", grpo, {"num_items_in_batch": 0}, "num_items_in_batch is 0, expected a finite"),
        ("grpo_loss", grpo, {"temperature": 0.0}, "temperature is 0.0, expected a finite number above 0"),
        ("token_logps", three, {"temperature": 0.0}, "temperature is 0.0, expected a finite number above 0"),
        ("sequence_logps", three, {"temperature": 0.0}, "temperature is 0.0, expected a finite number above 0"),
        ("grpo_loss", grpo, {"chunk_bytes": 0}, "chunk_bytes is 0, expected 1 or more, or None"),
        ("dpo_loss", (hidden, weight[:, 1:], labels), {}, r"weight has shape \(37, 23\), expected \(V, 24\)"),
        ("simpo_loss", three, {"precision": "exact"}, "precision is 'exact', expected one of"),
        ("token_logps", (hidden, weight, short), {}, r"labels has shape \(4, 6\), expected \(4, 7\)"),
    ]  # fmt: skip
    for name, args, options, message in wrong:
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            getattr(losses, name)(*args, **options)
    with pytest.raises(TypeError, match=r"kto_loss: desirable has dtype torch\.float32, expected torch\.bool"):
        losses.kto_loss(hidden, weight, labels, advantages)
    with pytest.raises(TypeError, match=r"^grpo_loss: labels has dtype torch\.float32, expected int64 or int32"):
        losses.grpo_loss(hidden, weight, labels.float(), advantages)
    with pytest.raises(TypeError, match="dpo_loss: beta is a Tensor, expected a number"):
        losses.dpo_loss(hidden, weight, labels, beta=torch.tensor(0.1))
    for option in ("max_completion_length", "num_items_in_batch", "epsilon_low"):
        with pytest.raises(TypeError, match=f"grpo_loss: {option} is a bool, expected a number"):
            losses.grpo_loss(*grpo, **{option: True})
    with pytest.raises(TypeError, match="grpo_loss: advantages is None, expected a tensor"):
        losses.grpo_loss(hidden, weight, labels, None)
    with pytest.raises(TypeError, match="kto_loss: desirable is None, expected a tensor"):
        losses.kto_loss(hidden, weight, labels, None)


@pytest.mark.parametrize("name", [*LOSSES, "token_logps", "sequence_logps"])
def test_an_unknown_keyword_is_an_error_of_the_loss(name, device):
    hidden, weight, labels, _ = tensors = drawn(device)
    given, _ = arguments(name, tensors, device)
    for unknown in ("reduction", "token_weights", "returns"):
        message = f"^{name}: unexpected keyword argument '{unknown}', expected one of its own or of ignore_index, softc"
        with pytest.raises(TypeError, match=message):
            getattr(losses, name)(hidden, weight, labels, *given, **{unknown: "mean"})


def every_function(device):
    """A function of one leaf that gives the loss, for each loss of the library."""
    hidden, weight, labels, bias = tensors = drawn(device)
    logits, other = (torch.randn(BATCH, LENGTH, CLASSES, device=device).log_softmax(-1) for _ in range(2))
    for reduction in ("mean", "none"):
        more = {"reduction": reduction}
        yield logits, lambda x, more=more: rooftile.cross_entropy(x, labels, **more)
        yield logits, lambda x, more=more: rooftile.cross_entropy(x, labels, return_stats=True, **more)[0]
        yield logits, lambda x, more=more: rooftile.kl_div(x, other, log_target=True, **more)
        yield logits, lambda x, more=more: rooftile.jsd(x, other, **more)
        yield other, lambda x, more=more: rooftile.jsd(logits, x, **more)
        yield hidden, lambda x, more=more: rooftile.linear_cross_entropy(x, weight, labels, bias, **more)
        yield weight, lambda x, more=more: rooftile.linear_jsd(hidden, x, hidden, weight, labels, **more)
        yield hidden, lambda x, more=more: rooftile.linear_kl(x, weight, hidden + 1, weight, labels, **more)
    yield hidden, lambda x: losses.token_logps(x, weight, labels)
    for name in LOSSES:
        given, options = arguments(name, tensors, device)
        function = getattr(losses, name)
        yield hidden, lambda x, f=function, a=given, o=options: f(x, weight, labels, *a, **o).loss


def test_gradients_lead_to_no_graph(device):
    """One that is kept does not keep what the loss was computed from."""
    for value, function in every_function(device):
        leaf = value.clone().requires_grad_()
        loss = 3.0 * function(leaf).sum()
        kept = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        again = torch.autograd.grad(loss, leaf)[0]
        for grad in (kept, again):
            assert not grad.requires_grad
            assert grad.grad_fn is None
        assert torch.equal(kept, again)


def doubled_by_operator(loss):
    loss *= 2.0
    return loss


def halved_by_operator(loss):
    loss /= 0.5
    return loss


def doubled_by_method(loss):
    return loss.mul_(2.0)


@pytest.mark.parametrize(
    "write", nightly_but((doubled_by_operator,), (doubled_by_operator, halved_by_operator, doubled_by_method))
)
def test_a_loss_may_be_written_in_place(write, device):
    """As Trainers do that divide it by the steps of gradient accumulation."""
    for value, function in every_function(device):
        leaf = value.clone().requires_grad_()
        (expected,) = torch.autograd.grad((2.0 * function(leaf)).sum(), leaf)
        loss = function(leaf)
        before = loss.detach().clone()
        written = write(loss)
        assert written is loss
        assert torch.equal(loss, 2 * before)
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)
