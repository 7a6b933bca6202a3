"""`rooftile.patch` together with mixed dtypes, checkpointing, hooks, adapters and torch.compile."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tiny_models import DEVICE, TOLERANCE, build, error, run, tokens

import rooftile
from rooftile.demo.models import inputs
from rooftile.huggingface import patching


def test_norm_weights_in_float32_keep_the_models_promotion() -> None:
    model, ids = build("Llama", torch.bfloat16), tokens()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.float()
    layer_input = torch.randn(1, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    plain = model.model.norm(layer_input)
    with rooftile.patch(model):
        assert torch.equal(model.model.norm(layer_input), plain)
        assert model.model.norm(layer_input).dtype == torch.float32
    del ids


def test_autocast_gives_the_models_dtypes() -> None:
    model, ids = build("Llama"), tokens()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        plain = model(ids).logits
        with rooftile.patch(model):
            patched = model(ids).logits
    assert patched.dtype == plain.dtype
    assert error(patched, plain) < TOLERANCE[torch.bfloat16]


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, ids = build("Qwen2").train(), tokens()
    _, _, grads = run(model, ids)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with rooftile.patch(model):
            if reentrant:
                model.enable_input_require_grads()
            _, _, patched = run(model, ids)
        assert patched.keys() == grads.keys()
        assert all(error(patched[name], grad) < 1e-4 for name, grad in grads.items())


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


@pytest.mark.parametrize("before", [True, False], ids=["adapters-first", "patch-first"])
def test_lora_adapters_are_used_and_trained(before: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ids = tokens()

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"],
            modules_to_save=["post_attention_layernorm"],
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(model, config)

    plain = adapt(build("Llama"))
    logits, _, grads = run(plain, ids)
    assert error(build("Llama")(ids).logits, logits) > 1e-2  # the adapters do something

    model = build("Llama")
    if before:
        model = adapt(model)
        handle = rooftile.patch(model)
    else:
        handle = rooftile.patch(model)
        model = adapt(model)
    patched_logits, _, patched = run(model, ids)
    assert error(patched_logits, logits) < TOLERANCE[torch.float32]
    assert patched.keys() == grads.keys()
    assert any("gate_proj.lora_A" in name for name in patched)
    assert all(error(patched[name], grad) < 1e-4 for name, grad in grads.items())
    handle.undo()
    assert not any(patching._is_ours(m) for module in model.modules() for m in module.__dict__.values())
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


def test_accelerate_hooks_on_experts_leave_their_forward_alone() -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model, ids = build("Mixtral"), tokens()
    plain = model(ids).logits
    hooks.add_hook_to_module(model.model.layers[0].mlp.experts, hooks.ModelHook())
    with rooftile.patch(model) as handle:
        assert handle.replaced["SwiGLU"] == 2
        assert error(model(ids).logits, plain) < TOLERANCE[torch.float32]
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("title", ["Llama", "Qwen2", "Gemma", "Phi-3", "T5"])
def test_whole_patched_model_compiles_to_one_graph(title: str) -> None:
    model, ids = build(title), tokens()
    logits, _, grads = run(model, ids)
    with rooftile.patch(model):
        torch._dynamo.reset()
        compiled: Callable[..., object] = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        out = compiled(**inputs(model, ids)[0])
        out.loss.backward()  # type: ignore[attr-defined]
        assert error(out.logits, logits) < TOLERANCE[torch.float32]  # type: ignore[attr-defined]
        named = dict(model.named_parameters())
        assert all(error(named[name].grad, grad) < 1e-4 for name, grad in grads.items())


def test_whole_patched_model_compiles_with_inductor() -> None:
    model, ids = build("Llama"), tokens()
    logits, _, grads = run(model, ids)
    with rooftile.patch(model):
        torch._dynamo.reset()
        compiled: Callable[..., object] = torch.compile(model, fullgraph=True)
        model.zero_grad()
        out = compiled(**inputs(model, ids)[0])
        out.loss.backward()  # type: ignore[attr-defined]
        assert error(out.logits, logits) < TOLERANCE[torch.float32]  # type: ignore[attr-defined]
        named = dict(model.named_parameters())
        assert all(error(named[name].grad, grad) < 1e-4 for name, grad in grads.items())


def test_compiled_model_is_refused() -> None:
    model = build("Llama")
    with pytest.raises(ValueError, match="compiled already"):
        rooftile.patch(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled already"):
        rooftile.patch(model)


@pytest.mark.parametrize("training", [True, False])
def test_compiled_for_inference_the_model_keeps_its_own_code(training: bool) -> None:
    model, ids = build("Llama"), tokens()
    with torch.no_grad():
        plain = model(ids).logits
    ours: list[str] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        ours.extend(str(n.target) for n in graph.graph.nodes if str(n.target).startswith("rooftile."))
        return graph.forward

    with rooftile.patch(model), torch.set_grad_enabled(training):
        torch._dynamo.reset()
        logits = torch.compile(model, backend=backend, fullgraph=True)(ids).logits
    assert {name.partition(".")[2] for name in ours} == (
        {"rms_norm.default", "add_rms_norm.default", "rope.default", "silu_mul.default"} if training else set()
    )
    assert error(logits, plain) < TOLERANCE[torch.float32]
    if not training:
        assert torch.equal(logits, plain)


def test_undo_reaches_a_compiled_model() -> None:
    model, ids = build("Llama"), tokens()
    handle = rooftile.patch(model)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(ids, use_cache=False)
    assert "rooftile" in graphs[-1].code
    handle.undo()
    compiled(ids, use_cache=False)
    assert len(graphs) == 2
    assert "rooftile" not in graphs[-1].code
