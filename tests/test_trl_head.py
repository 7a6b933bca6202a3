"""TRL's fused head over ours: a forward with the seam of TRL's, which needs no TRL. test_trl.py has TRL's own."""

import inspect
import sys
import types

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from helpers import Calls
from tiny_models import DEVICE, build, error, tokens

from rooftile.huggingface.trl import fuse_head

EVERY = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class _ChunkedLogProbFunction:
    """The plain formula, by the name and signature of TRL 1.16's."""

    calls = 0

    @classmethod
    def apply(cls, *args):
        cls.calls += 1
        return cls.forward(None, *args)

    @staticmethod
    def forward(
        ctx, hidden: torch.Tensor, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None,
        logit_scale=1.0, outputs=EVERY,
    ) -> tuple:  # fmt: skip
        softcap = final_logit_softcapping
        z = torch.nn.functional.linear(hidden, weight, bias).float() * logit_scale
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
        logps = z.log_softmax(-1)
        found = (
            -(logps.exp() * logps).sum(-1), (2 * logps).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets,
        )  # fmt: skip
        named = zip(EVERY, found, strict=True)
        return logps.gather(-1, targets[:, None])[:, 0], *(t if name in outputs else None for name, t in named)


def add_fused_lm_head(model, temperature, outputs, softcap=None, scale=1.0):
    original = model.forward

    def forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
        if not fused_lm_head:
            return original(*args, labels=labels, **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state[:, :-1]
        labels, head = labels[:, 1:], self.get_output_embeddings()
        found = _ChunkedLogProbFunction.apply(
            hidden.flatten(0, 1), head.weight, head.bias, labels.clamp(min=0).flatten(), temperature, 32768, softcap,
            scale, outputs,
        )  # fmt: skip
        per_token = [None if t is None else t.view(labels.shape).masked_fill(labels == -100, 0) for t in found]
        return types.SimpleNamespace(log_probs=per_token[0], **dict(zip(EVERY, per_token[1:], strict=True)))

    model.forward = types.MethodType(forward, model)


class Trainer:
    """With the method of TRL's GRPO trainer that makes log-probabilities, and its loss."""

    def __init__(self, model, temperature=1.0, outputs=("entropy",), softcap=None, scale=1.0, **config):
        self.model, self.args = model, types.SimpleNamespace(**config)
        add_fused_lm_head(model, temperature, outputs, softcap, scale)

    def _get_per_token_logps_and_entropies(self, model, input_ids, logits_to_keep, compute_entropy=False):
        labels = input_ids.clone()
        labels[:, :-logits_to_keep] = -100
        outputs = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        return outputs.log_probs[:, -logits_to_keep:], outputs.entropy[:, -logits_to_keep:] if compute_entropy else None

    def loss(self, ids, advantages, old):
        logps, entropies = self._get_per_token_logps_and_entropies(self.model, ids, 5, compute_entropy=True)
        ratio = torch.exp(logps - old)
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean(), logps, entropies


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "scale": 0.25}, {"softcap": 2.0, "temperature": 1.3}], ids=str
)
def test_policy_losses_and_gradients_are_those_of_the_plain_formula(options, monkeypatch):
    monkeypatch.setattr(_ChunkedLogProbFunction, "calls", 0)
    ids = tokens(9, batch=3)
    advantages = torch.tensor([[1.0], [-0.5], [0.3]], device=DEVICE)
    old = torch.linspace(-5.8, -5.2, 15, device=DEVICE).view(3, 5)
    results = []
    for fused in (False, True):
        trainer = Trainer(build("Llama").train(), **options)
        if fused:
            fuse_head(trainer)
        with Calls() as ops:
            loss, logps, entropies = trainer.loss(ids, advantages, old)
            loss.backward()
        heads = [args for op, args, _ in ops.calls if op._schema.name == "rooftile::linear_cross_entropy"]
        assert len(heads) == int(fused)
        grads = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        results.append((loss.detach(), logps.detach(), entropies.detach(), grads))
    assert _ChunkedLogProbFunction.calls == 1
    for ours, plain in zip(results[1], results[0], strict=True):
        assert error(ours, plain) < 1e-5


def test_each_output_is_that_of_the_plain_formula():
    ids = tokens(8, batch=2)
    ours, plain = (Trainer(build("Llama"), 0.8, ("entropy", "mean_logits", "is_top1")) for _ in range(2))
    fuse_head(ours)
    labels = plain.model(input_ids=ids, labels=None).logits.argmax(-1).roll(1, 1).where(ids % 3 > 0, ids)
    found, expected = (t.model(input_ids=ids, labels=labels, fused_lm_head=True) for t in (ours, plain))
    assert 0 < expected.is_top1.sum() < expected.is_top1.numel()
    assert torch.equal(found.is_top1, expected.is_top1)
    for name in ("log_probs", "entropy", "mean_logits"):
        assert error(getattr(found, name), getattr(expected, name)) < 1e-5, name
    assert found.log_sum_sq_probs is None
    without_labels = ours.model(input_ids=ids, labels=None).logits
    assert torch.equal(without_labels, plain.model(input_ids=ids, labels=None).logits)


@pytest.mark.parametrize(
    ("options", "dtype", "partitioned"),
    [
        ({"outputs": ("log_sum_sq_probs",)}, torch.float32, False),
        ({"outputs": ("mean_logits",), "softcap": 3.0}, torch.float32, False),
        ({"softcap": 3.0, "scale": 0.5}, torch.float32, False),
        ({}, torch.float64, False),
        ({}, torch.float32, True),
    ],
)
def test_what_no_kernel_has_is_left_to_trls_head(options, dtype, partitioned, monkeypatch):
    monkeypatch.setattr(_ChunkedLogProbFunction, "calls", 0)
    trainer = Trainer(build("Llama").to(dtype), **options)
    if partitioned:
        trainer.model.lm_head.weight.ds_id = 0  # as DeepSpeed's ZeRO-3 marks a parameter
    fuse_head(trainer)
    ids = tokens(6)
    assert trainer.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.shape == (1, 5)
    assert _ChunkedLogProbFunction.calls == 1


def test_only_this_model_changes_and_a_second_call_changes_nothing():
    one, other = Trainer(build("Llama")), Trainer(build("Llama"))
    before = one.model.forward.__func__
    fuse_head(one)
    after = one.model.forward.__func__
    fuse_head(one)
    assert one.model.forward.__func__ is after is not before
    assert inspect.signature(after) == inspect.signature(before)
    assert other.model.forward.__func__.__globals__ is globals()
    assert globals()["_ChunkedLogProbFunction"] is _ChunkedLogProbFunction


def _of_another_release(ctx, hidden, weight, bias, targets, temperature, softcap=None, outputs=EVERY):
    raise AssertionError("it is not called")


@pytest.mark.parametrize("name", ["forward", "outputs", "apply alone"])
def test_a_head_with_another_signature_is_refused_before_training(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", types.SimpleNamespace(__version__="9.8.7"))
    if name == "forward":
        monkeypatch.setattr(_ChunkedLogProbFunction, "forward", staticmethod(_of_another_release))
        found = r"\(ctx, hidden, weight, bias, targets, temperature, softcap=None, outputs="
    elif name == "outputs":
        defaults = _ChunkedLogProbFunction.forward.__defaults__
        monkeypatch.setattr(_ChunkedLogProbFunction.forward, "__defaults__", (*defaults[:-1], (*EVERY, "rank")))
        found = r".*'is_top1', 'rank'\)"
    else:
        monkeypatch.delattr(_ChunkedLogProbFunction, "forward")
        found = "no signature"
    trainer = Trainer(build("Llama"))
    before = trainer.model.forward
    with pytest.raises(
        ValueError, match=rf"_ChunkedLogProbFunction.forward \(TRL 9.8.7\) has {found}.*, expected \(ctx, "
    ):
        fuse_head(trainer)
    assert trainer.model.forward == before


def test_what_cannot_be_fused_is_refused():
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.01, expected 0 or False"):
        fuse_head(Trainer(build("Llama"), entropy_coef=0.01))
    with pytest.raises(ValueError, match="has no forward of add_fused_lm_head"):
        fuse_head(types.SimpleNamespace(model=build("Llama"), args=types.SimpleNamespace()))
