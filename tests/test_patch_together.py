"""`rooftile.patch` together with mixed dtypes, checkpointing, hooks and adapters."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from helpers import Calls, nightly_but
from tiny_models import DEVICE, TOLERANCE, assert_same_gradients, build, error, run, tokens

import rooftile
from rooftile.huggingface.replacing import is_ours
from rooftile.huggingface.small_models import inputs

# What gradients can be compared without.
NO_DROPOUT = {
    "GPT-2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "BERT": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5 v1.1": {"dropout_rate": 0.0},
}


def test_norm_weights_in_float32_keep_the_models_promotion() -> None:
    model = build("Llama", torch.bfloat16)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.float()
    layer_input = torch.randn(1, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    plain = model.model.norm(layer_input)
    with rooftile.patch(model):
        assert torch.equal(model.model.norm(layer_input), plain)
        assert model.model.norm(layer_input).dtype == torch.float32


@pytest.mark.skipif(DEVICE.type != "cpu", reason="PyTorch's LayerNorm takes mixed dtypes on the CPU alone")
def test_layer_norm_weights_in_float32_keep_the_models_code() -> None:
    model, ids = build("GPT-2", torch.bfloat16), tokens()
    model.transformer.ln_f.float()
    plain = model.transformer.ln_f(torch.ones(1, 64, dtype=torch.bfloat16))
    with rooftile.patch(model):
        assert torch.equal(model.transformer.ln_f(torch.ones(1, 64, dtype=torch.bfloat16)), plain)
        model(ids)


def test_float32_norms_of_q_and_k_keep_the_models_promotion() -> None:
    model, ids = build("Qwen3", torch.bfloat16), tokens()
    for layer in model.model.layers:
        layer.self_attn.q_norm.float()
        layer.self_attn.k_norm.float()
    # They make float32 of q and k, and attention wants v to be like them.
    for patched in (False, True):
        with rooftile.patch(model) if patched else nullcontext(), pytest.raises(RuntimeError, match="dtype"):
            model(ids)


@pytest.mark.parametrize("title", ["Llama", "Qwen3", "Phi-3", "GPT-2", "T5 v1.1"])
def test_float64_keeps_the_models_code(title: str) -> None:
    model, ids = build(title).double(), tokens()
    logits, _, grads = run(model, ids)
    with rooftile.patch(model):
        patched_logits, _, patched_grads = run(model, ids)
    assert patched_logits.dtype == torch.float64
    assert torch.equal(patched_logits, logits)
    assert_same_gradients(patched_grads, grads)


@pytest.mark.parametrize("title", ["Llama", "Qwen3", "GPT-2", "T5 v1.1"])
def test_autocast_gives_the_models_dtypes(title: str) -> None:
    model, ids = build(title), tokens()
    given = inputs(model, ids)[0]
    _, _, grads = run(model, ids)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        plain = model(**given).logits
        with rooftile.patch(model):
            model.zero_grad()
            patched = model(**given)
            patched.loss.backward()
    assert patched.logits.dtype == plain.dtype
    assert error(patched.logits, plain) < TOLERANCE[torch.bfloat16]
    assert {name for name, p in model.named_parameters() if p.grad is not None} == grads.keys()


@pytest.mark.parametrize(("title", "op"), [("Llama", "rope"), ("Qwen3", "qk_norm_rope"), ("DeepSeek-V3", "rope")])
def test_float32_models_under_autocast_rotate_as_attention_narrows(title: str, op: str) -> None:
    model, ids = build(title), tokens()
    only = dict.fromkeys(("rms_norm", "add_rms_norm", "mlp", "linear_cross_entropy"), False)
    results = []
    for patched in (False, True):
        handle = rooftile.patch(model, **only) if patched else None
        with Calls() as ops, torch.autocast(DEVICE.type, torch.bfloat16):
            logits, _, grads = run(model, ids)
        results.append((logits, torch.cat([g.flatten() for g in grads.values()]), handle and handle.undo()))
    assert f"rooftile::{op}" in {call._schema.name for call, _, _ in ops.calls}
    # The model rotates in float32, and attention rounds; the gradients' two terms it rounds one by one. The fused norm
    # does not round before its weight.
    limit = TOLERANCE[torch.float32] if op == "rope" else TOLERANCE[torch.bfloat16]
    assert error(results[1][0], results[0][0]) <= limit
    assert error(results[1][1], results[0][1]) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "title", nightly_but(("Gemma 3", "BERT"), ("Qwen2", "Qwen3", "Gemma 3", "GPT-2", "BERT", "T5 v1.1"))
)
def test_gradient_checkpointing_gives_the_same_gradients(title: str) -> None:
    model, ids = build(title, **NO_DROPOUT.get(title, {})).train(), tokens()
    _, _, grads = run(model, ids)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with rooftile.patch(model):
            if reentrant:
                model.enable_input_require_grads()
            _, _, patched = run(model, ids)
        assert_same_gradients(patched, grads)


class GradientCheckpointingLayer:
    """As transformers' class of this name from 5.23 on: it checkpoints in a wrapper of its subclasses' forward."""

    def __init_subclass__(cls) -> None:
        forward = cls.forward

        @functools.wraps(forward)
        def forward_with_checkpointing(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            is_outermost = type(self).forward is forward_with_checkpointing
            if self.gradient_checkpointing and self.training and is_outermost:
                return self._gradient_checkpointing_func(functools.partial(forward, self, **kwargs), *args)
            return forward(self, *args, **kwargs)

        cls.forward = forward_with_checkpointing


def wrap_for_checkpointing(cls: type) -> None:
    GradientCheckpointingLayer.__init_subclass__.__func__(cls)  # type: ignore[attr-defined]


@pytest.mark.each_once
@pytest.mark.parametrize("subclass", [False, True], ids=["plain", "subclass-later"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["installed", "wrapped"])
def test_layers_are_checkpointed_once_wherever_transformers_does_it(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool, subclass: bool
) -> None:
    """In `__call__` up to transformers 5.22, in a wrapper of `forward` later."""
    model, ids = build("Llama").train(), tokens()
    layers = list(model.model.layers)
    cls = type(layers[0])
    if wrapped:
        monkeypatch.setattr(cls, "__call__", nn.Module.__call__)
        monkeypatch.setattr(cls, "forward", cls.forward)
        wrap_for_checkpointing(cls)
    calls = []
    for layer in layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    _, loss, grads = run(model, ids)
    assert len(calls) == 2
    handle = rooftile.patch(model)
    assert handle.replaced["residual add + RMSNorm"] == 2
    if subclass:  # FSDP2 changes the class of a layer
        later = type(f"FSDP{cls.__name__}", (cls,), {})
        if wrapped:
            wrap_for_checkpointing(later)
        for layer in layers:
            layer.__class__ = later
    for checkpointing, expected in ((False, 2), (True, 4)):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        calls.clear()
        _, patched_loss, patched = run(model, ids)
        assert len(calls) == expected
        assert error(patched_loss, loss) < TOLERANCE[torch.float32]
        assert_same_gradients(patched, grads)
    handle.undo()
    calls.clear()
    _, again, undone = run(model, ids)
    assert len(calls) == 4
    assert torch.equal(again, loss)
    assert_same_gradients(undone, grads)


def test_a_checkpointing_wrapper_of_another_kind_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    cls = type(model.model.layers[0])

    class GradientCheckpointingLayer:
        def __init_subclass__(cls) -> None:
            forward, times = cls.forward, 1

            @functools.wraps(forward)
            def wrapper(self, *args, **kwargs):  # type: ignore[no-untyped-def]
                return forward(self, *args, **kwargs) if times else None

            cls.forward = wrapper

    monkeypatch.setitem(globals(), "GradientCheckpointingLayer", GradientCheckpointingLayer)
    monkeypatch.setattr(cls, "forward", cls.forward)
    wrap_for_checkpointing(cls)
    handle = rooftile.patch(model)
    assert handle.replaced["residual add + RMSNorm"] == 0
    assert any("GradientCheckpointingLayer wraps it in an unknown way" in left.reason for left in handle.left)


@pytest.mark.parametrize("title", ["GPT-2", "BERT", "T5 v1.1"])
def test_dropout_stays_where_it_is(title: str) -> None:
    model, ids = build(title).train(), tokens()
    results = []
    for patched in (False, True):
        handle = rooftile.patch(model, linear_cross_entropy=False) if patched else None
        torch.manual_seed(5)
        results.append(run(model, ids)[0])
        if handle is not None:
            handle.undo()
    assert error(results[1], results[0]) < TOLERANCE[torch.float32]
    assert error(run(model, ids)[0], results[0]) > 1e-2  # dropout did something


@pytest.mark.parametrize("title", ["Qwen3", "GPT-2", "BERT", "Gemma 3"])
def test_frozen_weights_get_no_gradients_and_the_others_theirs(title: str) -> None:
    for trained in ("bias", "norm.weight"):
        model, ids = build(title), tokens()
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith((trained, "embed_tokens.weight"))
        if not any(p.requires_grad for p in model.parameters()):
            continue
        _, _, grads = run(model, ids)
        with rooftile.patch(model):
            _, _, patched = run(model, ids)
        assert_same_gradients(patched, grads)


def test_hooks_of_a_fused_norm_still_run() -> None:
    model, ids = build("Llama"), tokens()
    seen: list[torch.Size] = []
    with rooftile.patch(model):
        norm = model.model.layers[1].post_attention_layernorm
        hook = norm.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        model(ids)
        hook.remove()
        model(ids)
        out = model(ids, output_hidden_states=True)
    assert seen == [torch.Size([1, 12, 64])]
    assert len(out.hidden_states) == 3


def test_hooked_norm_is_left_when_norms_are_switched_off() -> None:
    model = build("Llama")
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, args, out: None)
    handle = rooftile.patch(model, rms_norm=False)
    assert [left.count for left in handle.left if left.kind == "RMSNorm"] == [4]


@pytest.mark.parametrize("title", ["Llama", "Qwen3", "GPT-2", "T5 v1.1"])
def test_hooks_for_all_modules_see_the_fused_ones(title: str) -> None:
    model, given = build(title), inputs(build(title), tokens())[0]
    seen: list[str] = []

    def note(module: nn.Module, args: object, out: object) -> None:
        seen.append(type(module).__name__)

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        plain = model(**given).logits
        called = seen.copy()
        seen.clear()
        with rooftile.patch(model):
            assert error(model(**given).logits, plain) < TOLERANCE[torch.float32]
    finally:
        hook.remove()
    assert sorted(seen) == sorted(called)


@pytest.mark.parametrize(
    ("title", "path"),
    [
        ("Qwen3", "model.layers.0.self_attn.q_norm"),
        ("Qwen3-MoE", "model.layers.1.self_attn.k_norm"),
        ("Gemma 3", "model.layers.0.self_attn.k_norm"),
        ("Gemma 3", "model.layers.0.mlp.act_fn"),
        ("T5 v1.1", "encoder.block.0.layer.1.DenseReluDense.act"),
        ("GPT-2", "transformer.h.0.mlp.c_fc"),
        ("GPT-2", "transformer.h.0.mlp.act"),
        ("BERT", "cls.predictions.transform.dense"),
        ("BERT", "bert.encoder.layer.0.output.LayerNorm"),
    ],
)
def test_hooks_of_fused_modules_see_and_change_what_they_did(title: str, path: str) -> None:
    model, ids = build(title), tokens()
    plain = model(**inputs(model, ids)[0]).logits
    seen: list[torch.Tensor] = []

    def double(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        seen.append(out)
        return 2 * out

    hook = model.get_submodule(path).register_forward_hook(double)
    hooked = model(**inputs(model, ids)[0]).logits
    assert error(hooked, plain) > 1e-4
    with rooftile.patch(model):
        patched = model(**inputs(model, ids)[0]).logits
        assert error(patched, hooked) < TOLERANCE[torch.float32]
        assert [out.shape for out in seen[:1]] == [out.shape for out in seen[1:]]
        hook.remove()
        assert error(model(**inputs(model, ids)[0]).logits, plain) < TOLERANCE[torch.float32]


def test_linear_layers_that_are_not_plain_are_called() -> None:
    class Quantised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, (10 * self.weight).round() / 10, self.bias)

    model, ids = build("BERT"), tokens()
    own = model.bert.encoder.layer[0].intermediate.dense
    other = model.bert.encoder.layer[0].intermediate.dense = Quantised(64, 160, device=DEVICE)
    other.load_state_dict(own.state_dict())
    nn.utils.parametrizations.weight_norm(model.bert.encoder.layer[1].intermediate.dense)
    logits, _, grads = run(model, ids)
    with rooftile.patch(model) as handle:
        assert handle.replaced["bias + activation"] == 3
        patched_logits, _, patched = run(model, ids)
    assert error(patched_logits, logits) < TOLERANCE[torch.float32]
    assert patched.keys() == grads.keys()


def test_modules_put_in_the_place_of_fused_ones_are_called() -> None:
    model, ids = build("GPT-2"), tokens()
    with rooftile.patch(model):
        for block in model.transformer.h:
            block.mlp.act = nn.ReLU()
        block.mlp.c_fc.forward = lambda x: torch.zeros(*x.shape[:-1], 160, device=x.device)
        patched = model(ids).logits
    assert error(patched, model(ids).logits) < TOLERANCE[torch.float32]
    model = build("Qwen3")
    with rooftile.patch(model, rms_norm=False):
        model.model.layers[0].self_attn.q_norm.forward = lambda x: 2 * x
        patched = model(ids).logits
    assert error(patched, model(ids).logits) < TOLERANCE[torch.float32]


LORA = {
    "Llama": (["q_proj", "gate_proj", "up_proj", "down_proj"], ["post_attention_layernorm"]),
    "Qwen3": (["q_proj", "k_proj", "gate_proj"], ["q_norm"]),
    "Gemma 3": (["q_proj", "gate_proj"], ["k_norm", "pre_feedforward_layernorm"]),
    "GPT-2": (["c_fc", "c_attn"], ["ln_2"]),
    "BERT": (["intermediate.dense", "transform.dense", "query"], ["output.LayerNorm"]),
    "T5 v1.1": (["wi_0", "wi_1", "wo", "q"], ["layer_norm"]),
}


@pytest.mark.each_once
@pytest.mark.parametrize("before", [True, False], ids=["adapters-first", "patch-first"])
@pytest.mark.parametrize("title", LORA)
def test_lora_adapters_are_used_and_trained(title: str, before: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ids = tokens()
    targets, saved = LORA[title]

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=4,
                target_modules=targets,
                modules_to_save=saved,
                init_lora_weights=False,
                fan_in_fan_out=title == "GPT-2",
            ),
        )

    plain = adapt(build(title))
    logits, _, grads = run(plain, ids)
    assert error(run(build(title), ids)[0], logits) > 1e-2  # the adapters do something

    model = build(title)
    if before:
        model = adapt(model)
        handle = rooftile.patch(model)
    else:
        handle = rooftile.patch(model)
        model = adapt(model)
    patched_logits, _, patched = run(model, ids)
    assert error(patched_logits, logits) < TOLERANCE[torch.float32]
    assert any(f"{targets[0]}.lora_A" in name for name in patched)
    assert any("modules_to_save" in name for name in patched)
    assert_same_gradients(patched, grads)
    handle.undo()
    assert not any(is_ours(m) for module in model.modules() for m in module.__dict__.values())
    assert torch.equal(run(model, ids)[0], logits)


def test_accelerate_hooks_stay_in_front() -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    ids, calls = tokens(), []

    class Count(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            calls.append(type(module).__name__)
            return args, kwargs

    for hook_first in (True, False):
        model = build("Llama")
        plain = model(ids).logits

        def hook(model: nn.Module = model) -> None:
            hooks.add_hook_to_module(model.model.layers[0].mlp, Count())
            hooks.add_hook_to_module(model.model.layers[0].post_attention_layernorm, Count())

        if hook_first:
            hook()
        handle = rooftile.patch(model)
        assert handle.replaced["SwiGLU"] == 2
        if not hook_first:
            hook()
        calls.clear()
        assert error(model(ids).logits, plain) < TOLERANCE[torch.float32]
        assert sorted(calls) == ["LlamaMLP", "LlamaRMSNorm"]
        handle.undo()
        calls.clear()
        assert torch.equal(model(ids).logits, plain)
        assert len(calls) == 2


@pytest.mark.parametrize(
    ("title", "paths"),
    [
        ("Qwen3", ["model.layers.0.self_attn", "model.layers.0.self_attn.q_norm"]),
        ("GPT-2", ["transformer.h.0.mlp", "transformer.h.0.mlp.c_fc", "transformer.ln_f"]),
    ],
)
def test_accelerate_hooks_of_fused_modules_run(title: str, paths: list[str]) -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    ids, calls = tokens(), []

    class Count(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            calls.append(type(module).__name__)
            return args, kwargs

    for hook_first in (True, False):
        model = build(title)
        plain = model(ids).logits
        handle = None if hook_first else rooftile.patch(model)
        for path in paths:
            hooks.add_hook_to_module(model.get_submodule(path), Count())
        handle = handle or rooftile.patch(model)
        calls.clear()
        assert error(model(ids).logits, plain) < TOLERANCE[torch.float32]
        assert len(calls) == len(paths)
        handle.undo()
        assert torch.equal(model(ids).logits, plain)


def test_accelerate_hooks_on_experts_leave_their_forward_alone() -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model, ids = build("Mixtral"), tokens()
    plain = model(ids).logits
    hooks.add_hook_to_module(model.model.layers[0].mlp.experts, hooks.ModelHook())
    with rooftile.patch(model) as handle:
        assert handle.replaced["SwiGLU"] == 2
        assert error(model(ids).logits, plain) < TOLERANCE[torch.float32]
    assert torch.equal(model(ids).logits, plain)
