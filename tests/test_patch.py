"""`rooftile.patch`: what it replaces, that the model computes the same, and that it can be taken back."""

import copy
import importlib
import io
import types
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tiny_models import BY_TITLE, DEVICE, TOLERANCE, build, error, run, tokens

import rooftile
from rooftile.demo.models import inputs
from rooftile.huggingface import families, patching, rewrite

# RMSNorm, residual add + RMSNorm, SwiGLU and RoPE in two layers.
COUNTS = {
    "Llama": (5, 2, 2, 2),
    "Qwen2": (5, 2, 2, 2),
    "Qwen3": (9, 2, 2, 2),
    "Mistral": (5, 2, 2, 2),
    "Granite": (5, 2, 2, 2),
    "Gemma": (5, 2, 0, 2),
    "DeepSeek-V3": (9, 2, 3, 2),
    "T5": (12, 0, 0, 0),
    "Phi-3": (5, 2, 2, 2),
    "SmolLM3": (5, 2, 2, 2),
    "OLMo2": (9, 0, 2, 2),
    "Gemma 2": (9, 2, 0, 2),
    "Mixtral": (5, 2, 2, 2),
    "Qwen2-MoE": (5, 2, 4, 2),
    "Qwen3-MoE": (9, 2, 2, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("title", BY_TITLE)
def test_patched_model_computes_the_same_and_undo_gives_it_back(title: str, dtype: torch.dtype) -> None:
    model, ids = build(title, dtype), tokens(batch=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    logits, loss, grads = run(model, ids)

    handle = rooftile.patch(model)
    assert tuple(handle.replaced[kind] for kind in patching.KINDS) == COUNTS[title]
    patched_logits, patched_loss, patched_grads = run(model, ids)
    assert error(patched_logits, logits) < TOLERANCE[dtype]
    assert error(patched_loss, loss) < TOLERANCE[dtype]
    assert patched_grads.keys() == grads.keys()
    # A norm over all weights at once: single gradients of a tiny bf16 model may be noise themselves.
    flat = [torch.cat([g.float().flatten() for g in gs.values()]) for gs in (patched_grads, grads)]
    assert error(*flat) < TOLERANCE[dtype]

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    handle.undo()
    handle.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    again_logits, again_loss, again_grads = run(model, ids)
    assert torch.equal(again_logits, logits)
    assert torch.equal(again_loss, loss)
    # On a GPU some of PyTorch's own backwards add atomically.
    flat = [torch.cat([g.float().flatten() for g in gs.values()]) for gs in (again_grads, grads)]
    assert torch.equal(*flat) if DEVICE.type == "cpu" else error(*flat) < TOLERANCE[dtype]


def test_ops_run_as_often_as_the_handle_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, op: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            calls[name] += 1
            return op(*args, **more)

        return call

    for name in ("rms_norm", "add_rms_norm", "rope"):
        monkeypatch.setattr(patching, name, counted(name, getattr(patching, name)))
    for title, expected in (("Qwen3", (7, 2, 2)), ("T5", (12, 0, 0))):
        model = build(title)
        calls.clear()
        with torch.no_grad(), rooftile.patch(model):
            model(**inputs(model, tokens())[0])
        assert (calls["rms_norm"], calls["add_rms_norm"], calls["rope"]) == expected


def test_qwen25_7b_counts() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    handle = rooftile.patch(model)
    assert handle.replaced == {"RMSNorm": 57, "residual add + RMSNorm": 28, "SwiGLU": 28, "RoPE": 28}
    assert handle.modules["RMSNorm"][-1] == "model.norm"
    assert [(left.count, left.kind) for left in handle.left] == [(28, "residual add")]
    assert "57 RMSNorm" in repr(handle)
    assert "left: 28 residual add" in str(handle)


def test_every_class_of_the_table_exists() -> None:
    # Dense families have no experts and Mixtral has no MLP beside its own; the counts above show those that are there.
    for (path, name), part in families.PARTS.items():
        if not isinstance(part, families.Gated):
            assert hasattr(importlib.import_module(path), name)


@pytest.mark.parametrize("title", ["Llama", "Qwen2", "Phi-3", "DeepSeek-V3"])
def test_greedy_generation_gives_the_same_tokens(title: str) -> None:
    model, ids = build(title), tokens(6)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **options)
    with rooftile.patch(model):
        assert torch.equal(model.generate(ids, **options), plain)


def test_only_the_given_instance_is_patched() -> None:
    model, other = build("Llama"), build("Llama")
    plain = other(tokens()).logits
    with rooftile.patch(model):
        assert "forward" in model.model.norm.__dict__
        assert not any("forward" in module.__dict__ for module in other.modules())
        assert torch.equal(other(tokens()).logits, plain)
        assert type(model.model.norm) is type(other.model.norm)


def test_switches_leave_what_they_switch_off() -> None:
    model = build("Llama")
    names = {"rms_norm": "RMSNorm", "add_rms_norm": "residual add + RMSNorm", "mlp": "SwiGLU", "rope": "RoPE"}
    for switch, kind in names.items():
        with rooftile.patch(model, **{switch: False}) as handle:
            assert [k for k, count in handle.replaced.items() if not count] == [kind]
            assert any(left.kind == kind and "switched off" in left.reason for left in handle.left)
            model(tokens())


def test_what_is_left_says_why() -> None:
    left = {item.what: item.reason for item in rooftile.patch(build("Gemma")).left}
    assert left["GemmaMLP"] == "its activation is GELUTanh, not SiLU"
    left = {item.what: item.reason for item in rooftile.patch(build("T5")).left}
    assert "ReLU" in left["T5DenseActDense"]
    assert "no line like `H = R + X" in left["T5LayerFF"]
    left = {item.what: item.reason for item in rooftile.patch(build("OLMo2")).left}
    assert "behind the add (mlp) is not an RMSNorm" in left["Olmo2DecoderLayer"]


def test_second_patch_is_refused_and_changes_nothing() -> None:
    model = build("Llama")
    handle = rooftile.patch(model)
    with pytest.raises(ValueError, match="patched already"):
        rooftile.patch(model)
    with pytest.raises(ValueError, match="patched already"):
        rooftile.patch(model.model.layers[0])
    handle.undo()
    rooftile.patch(model).undo()


def test_unknown_model_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ValueError, match=r"Sequential is no model that Rooftile knows.*DeepSeek-V3.*Llama.*T5"):
        rooftile.patch(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        rooftile.patch("llama")  # type: ignore[arg-type]


def test_context_manager_undoes_after_an_exception() -> None:
    model = build("Llama")
    with pytest.raises(KeyError), rooftile.patch(model) as handle:
        raise KeyError
    assert not handle.active
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_changed_model_code_is_left_alone() -> None:
    class Changed(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            residual = hidden_states * 2
            return residual

    with pytest.raises(rewrite.NotRewritable, match="no line like"):
        rewrite.rebuild(Changed.forward, families.ADD_NORM, {"add_norm": None})
    with pytest.raises(rewrite.NotRewritable, match="source can't be read"):
        rewrite.rebuild(eval("lambda self, x: x"), families.ADD_NORM, {})
    with pytest.raises(rewrite.NotRewritable, match="decorator or has closure"):
        rewrite.rebuild(torch.no_grad()(Changed.forward), families.ADD_NORM, {})


def test_rule_needs_the_same_expression_at_each_place() -> None:
    def method(self, h, r, x):  # type: ignore[no-untyped-def]
        h = r + x
        r = x
        h = self.norm(h)
        return h, r

    with pytest.raises(rewrite.NotRewritable):
        rewrite.rebuild(method, families.ADD_NORM, {"add_norm": None})


@pytest.mark.gpu
def test_tensor_on_the_cpu_is_named() -> None:
    model = build("Llama")
    with rooftile.patch(model), pytest.raises(ValueError, match="weight is on cuda:0, expected cpu to match x"):
        model.model.norm(torch.randn(1, 2, 64, device="cpu"))


def test_override_made_after_the_patch_stops_undo_before_it_changes_anything() -> None:
    model = build("Llama")
    handle = rooftile.patch(model)
    ours = model.model.norm.forward
    model.model.norm.forward = lambda x: x
    with pytest.raises(RuntimeError, match=r"model\.norm\.forward was overridden after the patch"):
        handle.undo()
    assert "forward" in model.model.layers[0].mlp.__dict__
    model.model.norm.forward = ours
    handle.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_override_made_before_the_patch_is_left() -> None:
    model = build("Llama")
    norm = model.model.norm
    norm.forward = types.MethodType(type(norm).forward, norm)
    with rooftile.patch(model) as handle:
        assert handle.replaced["RMSNorm"] == 4
        assert any("overridden on the instance" in left.reason for left in handle.left)
    assert "forward" in norm.__dict__


def test_deepcopy_is_patched_on_its_own_and_pickle_gives_a_plain_model() -> None:
    model, ids = build("Llama"), tokens()
    plain = model(ids).logits
    handle = rooftile.patch(model)
    twin = copy.deepcopy(model)
    twin.model.norm.weight.data.mul_(2.0)
    assert error(model(ids).logits, plain) < TOLERANCE[torch.float32]
    assert error(twin(ids).logits, 2 * plain) < TOLERANCE[torch.float32]

    buffer = io.BytesIO()
    torch.save(model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert torch.equal(loaded(ids).logits, plain)
    rooftile.patch(loaded)
    handle.undo()
