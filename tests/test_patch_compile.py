"""`rooftile.patch` together with torch.compile."""

import types
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from helpers import nightly_but
from tiny_models import TOLERANCE, assert_same_gradients, build, error, gradients, run, tokens

import rooftile
from rooftile.huggingface.replacing import is_ours
from rooftile.huggingface.small_models import inputs


@pytest.mark.parametrize("title", nightly_but(("GPT-2",), ("Qwen3", "Gemma 3", "Phi-3", "T5 v1.1", "GPT-2", "BERT")))
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
        assert_same_gradients(gradients(model), grads)


@pytest.mark.nightly  # the whole model is one graph, and ops go through Inductor in test_registration.py
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
        assert_same_gradients(gradients(model), grads)


def test_compiled_model_is_refused() -> None:
    model = build("Llama")
    with pytest.raises(ValueError, match="compiled already"):
        rooftile.patch(torch.compile(model, backend="eager"))
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled already"):
        rooftile.patch(model)


COMPILED = {
    "Llama": {"rms_norm", "add_rms_norm", "rope", "silu_mul"},
    "Gemma 3": {"rms_norm", "add_rms_norm", "qk_norm_rope", "gelu_mul"},
    "GPT-2": {"layer_norm", "bias_gelu"},
}


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("title", nightly_but(("Gemma 3",), COMPILED))
def test_compiled_for_inference_the_model_keeps_its_own_code(title: str, training: bool) -> None:
    model, ids = build(title), tokens()
    with torch.no_grad():
        plain = model(ids).logits
    ours: list[str] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        ours.extend(str(n.target) for n in graph.graph.nodes if str(n.target).startswith("rooftile."))
        return graph.forward

    with rooftile.patch(model), torch.set_grad_enabled(training):
        torch._dynamo.reset()
        logits = torch.compile(model, backend=backend, fullgraph=True)(ids).logits
    assert {name.split(".")[1] for name in ours} == (COMPILED[title] if training else set())
    assert error(logits, plain) < TOLERANCE[torch.float32]
    if not training:
        assert torch.equal(logits, plain)


def test_a_graph_knows_which_modules_are_patched() -> None:
    """What runs in the place of a model's lines asks for it, and takes the lines apart where it hears no."""
    model = build("Llama")
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x), norm)  # somebody else's, and left
    modules = (model.model.layers[0].mlp.up_proj, model.model.embed_tokens, norm)

    @torch.compile(backend="eager", fullgraph=True)
    def asked(x: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        return x + 1, [is_ours(module.__dict__.get("forward")) for module in modules]

    torch._dynamo.reset()
    with rooftile.patch(model, linear=True), torch.no_grad():
        assert asked(torch.zeros(1))[1] == [True, False, False]


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
