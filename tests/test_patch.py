"""`rooftile.patch`: what it replaces, that the model computes the same, and that it can be taken back."""

import copy
import dataclasses
import functools
import importlib
import inspect
import io
import pickle
import re
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from helpers import Calls, nightly_but
from tiny_models import BY_TITLE, DEVICE, TOLERANCE, assert_same_gradients, build, error, run, tokens
from transformers.utils.deprecation import deprecate_kwarg

import rooftile
from rooftile.huggingface import families, patching, rewrite
from rooftile.huggingface.small_models import inputs

HEAD = {"head + cross entropy": 1}
# By kind, in two layers.
COUNTS = {
    "Llama": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "Qwen2": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "Qwen3": {"RMSNorm": 9, "residual add + RMSNorm": 2, "SwiGLU": 2, "QK-norm + RoPE": 2, **HEAD},
    "Mistral": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "Granite": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "Gemma": {"RMSNorm": 5, "residual add + RMSNorm": 2, "GeGLU": 2, "RoPE": 2, **HEAD},
    "DeepSeek-V3": {"RMSNorm": 9, "residual add + RMSNorm": 2, "SwiGLU": 3, "RoPE": 2, **HEAD},
    "Gemma 2": {"RMSNorm": 9, "residual add + RMSNorm": 2, "GeGLU": 2, "RoPE": 2, **HEAD},
    "Gemma 3": {"RMSNorm": 13, "residual add + RMSNorm": 2, "GeGLU": 2, "QK-norm + RoPE": 2, **HEAD},
    "T5": {"RMSNorm": 12, **HEAD},
    "T5 v1.1": {"RMSNorm": 12, "GeGLU": 4, **HEAD},
    "GPT-2": {"LayerNorm": 5, "bias + activation": 2, **HEAD},
    "BERT": {"LayerNorm": 6, "bias + activation": 3, **HEAD},
    "GPT-NeoX": {"LayerNorm": 5, "bias + activation": 2, "RoPE": 2, **HEAD},
    "StarCoder2": {"LayerNorm": 5, "bias + activation": 2, "RoPE": 2, **HEAD},
    "OPT": {"LayerNorm": 5, "bias + activation": 2, **HEAD},
    "RoBERTa": {"LayerNorm": 6, "bias + activation": 2, **HEAD},
    "Phi-3": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "SmolLM3": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "OLMo2": {"RMSNorm": 9, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "Mixtral": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 2, "RoPE": 2, **HEAD},
    "Qwen2-MoE": {"RMSNorm": 5, "residual add + RMSNorm": 2, "SwiGLU": 4, "RoPE": 2, **HEAD},
    "Qwen3-MoE": {"RMSNorm": 9, "residual add + RMSNorm": 2, "SwiGLU": 2, "QK-norm + RoPE": 2, **HEAD},
}


IN_BFLOAT16 = ("Gemma 3", "GPT-2")  # of `make test`


@pytest.mark.parametrize(
    ("title", "dtype"),
    [pytest.param(title, torch.float32, id=f"{title}-fp32") for title in BY_TITLE]
    + [
        pytest.param(
            title, torch.bfloat16, id=f"{title}-bf16", marks=() if title in IN_BFLOAT16 else pytest.mark.nightly
        )
        for title in BY_TITLE
    ],
)
def test_patched_model_computes_the_same_and_undo_gives_it_back(title: str, dtype: torch.dtype) -> None:
    model, ids = build(title, dtype), tokens(batch=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    logits, loss, grads = run(model, ids)

    handle = rooftile.patch(model)
    assert {kind: count for kind, count in handle.replaced.items() if count} == COUNTS[title]
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


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        # Of nine norms two are fused with adds, and four with the rotations.
        ("Qwen3", {"rms_norm": 3, "add_rms_norm": 2, "qk_norm_rope": 2, "silu_mul": 2}),
        ("Gemma 3", {"rms_norm": 7, "add_rms_norm": 2, "qk_norm_rope": 2, "gelu_mul": 2}),
        ("T5", {"rms_norm": 12}),
        ("T5 v1.1", {"rms_norm": 12, "gelu_mul": 4}),
        ("GPT-2", {"layer_norm": 5, "bias_gelu": 2}),
        ("BERT", {"layer_norm": 6, "bias_gelu": 3}),
    ],
)
def test_ops_run_as_often_as_the_handle_counts(title: str, expected: dict[str, int]) -> None:
    model = build(title)
    with torch.no_grad(), rooftile.patch(model), Calls() as ops:
        model(**inputs(model, tokens())[0])
    assert Counter(op._schema.name.partition("::")[2] for op, _, _ in ops.calls) == expected


@pytest.mark.parametrize(
    "switch", ["rms_norm", "add_rms_norm", "layer_norm", "mlp", "rope", "linear_cross_entropy", "attention", "linear"]
)
def test_a_switch_that_is_no_bool_is_refused(switch: str) -> None:
    model = build("Llama")
    with pytest.raises(TypeError, match=f"patch: {switch} is 'no', expected True or False"):
        rooftile.patch(model, **{switch: "no"})
    with pytest.raises(TypeError, match=rf"^patch: {switch}s is no argument; did you mean {switch}"):
        rooftile.patch(model, **{f"{switch}s": True})
    assert not any("forward" in module.__dict__ for module in model.modules())


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
    assert handle.replaced == dict.fromkeys(patching.KINDS, 0) | {
        "RMSNorm": 57,
        "residual add + RMSNorm": 28,
        "SwiGLU": 28,
        "RoPE": 28,
        "head + cross entropy": 1,
    }
    assert handle.modules["RMSNorm"][-1] == "model.norm"
    assert [(left.count, left.kind) for left in handle.left] == [(28, "residual add")]
    assert "57 RMSNorm" in repr(handle)
    assert "left: 28 residual add" in str(handle)


def test_every_class_of_the_table_exists() -> None:
    # Dense families have no experts and Mixtral has no MLP beside its own; the counts above show those that are there.
    for (path, name), part in families.PARTS.items():
        if not isinstance(part, families.Gated):
            assert hasattr(importlib.import_module(path), name)


@pytest.mark.parametrize(
    "title",
    nightly_but(
        ("Phi-3", "DeepSeek-V3", "Gemma 3", "T5 v1.1"),
        ("Llama", "Qwen2", "Qwen3", "Phi-3", "DeepSeek-V3", "Gemma 3", "GPT-2", "T5 v1.1"),
    ),
)
def test_greedy_generation_gives_the_same_tokens(title: str) -> None:
    model, ids = build(title), tokens(6)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **options)
    with rooftile.patch(model):
        assert torch.equal(model.generate(ids, **options), plain)


@pytest.mark.parametrize("title", ["Llama", "Gemma 3", "GPT-2", "BERT"])
def test_only_the_given_instance_is_patched(title: str) -> None:
    model, other = build(title), build(title)
    given = inputs(model, tokens())[0]
    plain = other(**given).logits
    classes = [type(module) for module in model.modules()]
    with rooftile.patch(model):
        assert any("forward" in module.__dict__ for module in model.modules())
        assert not any("forward" in module.__dict__ for module in other.modules())
        assert torch.equal(other(**given).logits, plain)
        assert [type(module) for module in model.modules()] == classes
        assert nn.LayerNorm.forward.__module__ == "torch.nn.modules.normalization"


@pytest.mark.parametrize(
    ("title", "switches"),
    [
        ("Llama", {"rms_norm": "RMSNorm", "add_rms_norm": "residual add + RMSNorm", "mlp": "SwiGLU", "rope": "RoPE"}),
        ("Gemma 3", {"mlp": "GeGLU", "rope": "QK-norm + RoPE"}),
        ("GPT-2", {"layer_norm": "LayerNorm", "mlp": "bias + activation"}),
    ],
)
def test_switches_leave_what_they_switch_off(title: str, switches: dict[str, str]) -> None:
    model = build(title)
    for switch, kind in switches.items():
        with rooftile.patch(model, **{switch: False}) as handle:
            assert {k for k, count in handle.replaced.items() if count} == COUNTS[title].keys() - {kind}
            assert [left.kind for left in handle.left if "switched off" in left.reason] == [kind]
            model(tokens())


@pytest.mark.parametrize(
    ("title", "more", "expected"),
    [
        ("Llama", {}, 3),
        ("Llama", {"add_rms_norm": False}, 5),
        ("Qwen3", {}, 3),
        ("Qwen3", {"rope": False}, 7),
        ("Qwen3", {"add_rms_norm": False, "rope": False}, 9),
    ],
)
def test_norms_that_are_fused_are_not_among_those_left(title: str, more: dict[str, bool], expected: int) -> None:
    model = build(title)
    with rooftile.patch(model, rms_norm=False, **more) as handle:
        assert [left.count for left in handle.left if left.kind == "RMSNorm"] == [expected]
        assert handle.replaced["RMSNorm"] == 0


def test_what_is_left_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {item.what: item.reason for item in rooftile.patch(build("Gemma", hidden_act="quick_gelu")).left}
    assert left["GemmaMLP"] == "its activation is QuickGELUActivation, expected SiLU, GELU or GELU's tanh form"
    left = {item.what: item.reason for item in rooftile.patch(build("GPT-2", activation_function="gelu_fast")).left}
    assert "FastGELUActivation" in left["GPT2MLP"]
    left = {item.what: item.reason for item in rooftile.patch(build("T5")).left}
    assert "ReLU" in left["T5DenseActDense"]
    assert left["T5LayerFF"] == "its add comes last: the norm after it belongs to the next layer"
    left = {item.what: item.reason for item in rooftile.patch(build("OLMo2")).left}
    assert left["Olmo2DecoderLayer"] == "it adds after the norm: no norm follows the add"
    key = next(key for key in families.PARTS if key[1] == "Olmo2DecoderLayer")
    monkeypatch.setitem(families.PARTS, key, families.Layer())
    left = {item.what: item.reason for item in rooftile.patch(build("OLMo2")).left}
    assert "follows the add (mlp) is not an RMSNorm" in left["Olmo2DecoderLayer"]


def test_layer_norm_is_replaced_inside_a_known_model_alone() -> None:
    holder = nn.ModuleDict({"norm": nn.LayerNorm(64), "bert": build("BERT")}).to(DEVICE)
    holder["bert"].bert.pooler = nn.Sequential(nn.LayerNorm(64), nn.LayerNorm((12, 64))).to(DEVICE)
    handle = rooftile.patch(holder)
    assert handle.replaced["LayerNorm"] == 7
    assert "bert.bert.pooler.0" in handle.modules["LayerNorm"]
    assert {item.reason for item in handle.left if item.kind == "LayerNorm"} == {
        "no family of Rooftile's table contains it",
        "it is over the last 2 dimensions, not one",
    }
    with pytest.raises(ValueError, match="Sequential is not a model that Rooftile knows"):
        rooftile.patch(nn.Sequential(nn.LayerNorm(64)))


@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}, {"eps": 0.5}], ids=str)
def test_layer_norm_keeps_its_own_eps_weight_and_bias(options: dict[str, object]) -> None:
    model = build("GPT-2")
    norm = model.transformer.ln_f = nn.LayerNorm(64, device=DEVICE, **options)
    if norm.weight is not None:
        nn.init.normal_(norm.weight)
    plain = run(model, tokens())
    with rooftile.patch(model) as handle:
        assert handle.replaced["LayerNorm"] == 5
        patched = run(model, tokens())
    assert error(patched[0], plain[0]) < TOLERANCE[torch.float32]
    assert_same_gradients(patched[2], plain[2])


@pytest.mark.parametrize(
    "activation",
    nightly_but(
        ("silu", "gelu", "gelu_new"), ("silu", "gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_accurate")
    ),
)
def test_known_activations_compute_the_same(activation: str) -> None:
    for title, option in (("GPT-2", "activation_function"), ("Llama", "hidden_act"), ("Mixtral", "hidden_act")):
        model, ids = build(title, **{option: activation}), tokens()
        with torch.no_grad():
            plain = model(ids).logits
            with rooftile.patch(model) as handle:
                assert sum(handle.replaced[kind] for kind in ("SwiGLU", "GeGLU", "bias + activation")) == 2
                assert error(model(ids).logits, plain) < TOLERANCE[torch.float32]


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
    with pytest.raises(ValueError, match=r"Sequential is not a model that Rooftile knows.*DeepSeek-V3.*Llama.*T5"):
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


class Renamed:
    """A layer, one of whose arguments has had another name."""

    @deprecate_kwarg("past_key_values", "9.0.0", new_name="cache")
    def forward(self, hidden_states, residual, cache=0):  # type: ignore[no-untyped-def]
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        return hidden_states, residual, cache


def test_a_decorator_that_renames_an_argument_is_kept() -> None:
    layer: Any = Renamed()
    layer.norm = lambda x: -x
    rebuilt = rewrite.rebuild(Renamed.forward, families.ADD_NORM, {"add_norm": lambda norm, x, r: (norm(r + x), "r")})
    assert rebuilt.function(layer, 1, 2) == (-3, "r", 0)
    with pytest.warns(FutureWarning, match=r"`past_key_values` is deprecated .* for `Renamed\.forward`"):
        assert rebuilt.function(layer, 1, 2, past_key_values=4) == (-3, "r", 4)
    assert inspect.signature(rebuilt.function) == inspect.signature(Renamed.forward)
    assert rebuilt.function.__qualname__ == inspect.unwrap(rebuilt.function).__qualname__ == "Renamed.forward"


def test_a_decorator_that_did_not_make_the_wrapper_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "deprecate_kwarg", lambda *_, **names: lambda function: function)
    with pytest.raises(rewrite.NotRewritable, match=r"wrapped by a decorator, deprecate_kwarg\('past_key_values'"):
        rewrite.rebuild(Renamed.forward, families.ADD_NORM, {"add_norm": None})


def test_rule_needs_the_same_expression_at_each_place() -> None:
    def method(self, h, r, x):  # type: ignore[no-untyped-def]
        h = r + x
        r = x
        h = self.norm(h)
        return h, r

    with pytest.raises(rewrite.NotRewritable):
        rewrite.rebuild(method, families.ADD_NORM, {"add_norm": None})


def test_statements_that_stay_may_not_touch_what_moves_past_them() -> None:
    rule = rewrite.Rule("Q = norm(X)\n...\nQ = turn(Q)", "Q = X\n...\nQ = norm_turn(Q)")
    names = {"norm_turn": lambda q: ("norm_turn", q)}

    def method(x, y):  # type: ignore[no-untyped-def]
        q = norm(x + 1)  # type: ignore[name-defined]  # noqa: F821
        v = y * 2
        if v:
            v = v + 1
        q = turn(q)  # type: ignore[name-defined]  # noqa: F821
        return q, v

    assert rewrite.rebuild(method, [rule], names).function(1, 2) == (("norm_turn", 2), 5)

    def reads(x):  # type: ignore[no-untyped-def]
        q = norm(x)  # type: ignore[name-defined]  # noqa: F821
        v = q
        q = turn(q)  # type: ignore[name-defined]  # noqa: F821
        return q, v

    def assigns(x):  # type: ignore[no-untyped-def]
        q = norm(x)  # type: ignore[name-defined]  # noqa: F821
        norm = None  # noqa: F841
        q = turn(q)  # type: ignore[name-defined]  # noqa: F821
        return q

    for other in (reads, assigns):
        with pytest.raises(rewrite.NotRewritable, match="no line like"):
            rewrite.rebuild(other, [rule], names)


def test_what_a_replacement_no_longer_assigns_may_not_be_used_again() -> None:
    def method(self, x, y):  # type: ignore[no-untyped-def]
        gate = self.act(x)
        up = y
        x = gate * up
        return x, gate

    with pytest.raises(rewrite.NotRewritable, match="its code uses gate after the lines"):
        rewrite.rebuild(method, families.gated("act"), {"act_mul": None, "act_mul_packed": None})


def test_attention_whose_code_has_changed_keeps_its_norms_and_is_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Qwen3")
    changed = tuple(
        dataclasses.replace(rule, before=rule.before.replace("k_norm", "norm_of_k"))
        for rule in families.qk_norm_rope("apply_rotary_pos_emb")
    )
    monkeypatch.setattr(families, "qk_norm_rope", lambda function: changed)
    with pytest.warns(UserWarning, match=r"leaves QK-norm \+ RoPE \(Qwen3Attention\): not understood in transformers"):
        handle = rooftile.patch(model)
    assert (handle.replaced["RMSNorm"], handle.replaced["QK-norm + RoPE"], handle.replaced["RoPE"]) == (9, 0, 2)
    (left,) = [left for left in handle.left if left.kind == "QK-norm + RoPE"]
    assert "no line like" in left.reason
    assert not left.understood


def test_code_of_another_version_gets_one_warning_that_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(families, "ADD_NORM", [rewrite.Rule("H = R + self.other(X)", "H = R")])
    with pytest.warns(UserWarning, match=r"rooftile\.patch leaves") as record:
        handle = rooftile.patch(build("Llama"))
    versions = f"transformers {transformers.__version__} (tested up to {families.NEWEST_TESTED})"
    (warning,) = [warning for warning in record if "rooftile" in str(warning.message)]
    assert f"residual add + RMSNorm (LlamaDecoderLayer): not understood in {versions}" in str(warning.message)
    assert warning.filename == __file__
    assert [left.kind for left in handle.left if not left.understood] == ["residual add + RMSNorm"]
    assert versions in str(handle)


@pytest.mark.parametrize("title", BY_TITLE)
def test_what_is_left_by_design_gets_no_warning(title: str) -> None:
    model = build(title)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = rooftile.patch(model, linear=True, mlp=False)
    assert handle.left
    assert all(left.understood for left in handle.left)


def test_the_newest_tested_version_is_the_one_of_the_constraints() -> None:
    constraints = (Path(__file__).parent.parent / "tools" / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^transformers<=(.*)$", constraints, re.MULTILINE).group(1) == families.NEWEST_TESTED


def test_the_handle_names_switches_that_are_off_or_found_nothing() -> None:
    text = str(rooftile.patch(build("Llama"), lora=True, rope=False))
    assert "on, but the model has none: layer_norm, lora; get_peft_model makes LoRA layers: patch after it" in text
    assert "off: rope, attention, linear" in text.splitlines()
    text = str(rooftile.patch(build("GPT-2"), linear=True))
    assert "on, but the model has none: rms_norm, add_rms_norm, rope" in text.splitlines()


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
    ours, model.forward = model.forward, functools.partial(model.forward)
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM\.forward was overridden .*, by .*partial; remove"):
        handle.undo()
    model.forward = ours
    handle.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_override_made_before_the_patch_is_left() -> None:
    model = build("Llama")
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x), norm)
    with rooftile.patch(model) as handle:
        assert handle.replaced["RMSNorm"] == 4
        assert any("overridden on the instance" in left.reason for left in handle.left)
    assert "forward" in norm.__dict__


def test_deepcopy_is_patched_on_its_own() -> None:
    model, ids = build("Llama"), tokens()
    plain = model(ids).logits
    handle = rooftile.patch(model)
    twin = copy.deepcopy(model)
    twin.model.norm.weight.data.mul_(2.0)
    assert error(model(ids).logits, plain) < TOLERANCE[torch.float32]
    assert error(twin(ids).logits, 2 * plain) < TOLERANCE[torch.float32]

    handle.undo()
    assert rooftile.PatchHandle.of(twin).active


@pytest.mark.parametrize("switches", [{}, {"attention": True, "linear": True}], ids=["default", "every"])
@pytest.mark.parametrize("title", ["Llama", "Qwen3", "T5 v1.1"])
def test_pickle_gives_a_plain_model_that_can_be_patched(title: str, switches: dict[str, bool]) -> None:
    model = build(title)
    given, _ = inputs(model, tokens(8))
    before, plain = model.config._attn_implementation, model(**given).logits
    handle = rooftile.patch(model, **switches)
    patched = model(**given).logits
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for loaded in (torch.load(io.BytesIO(buffer.getvalue()), weights_only=False), pickle.loads(pickle.dumps(model))):
        assert rooftile.PatchHandle.of(loaded) is None
        assert {m.config._attn_implementation for m in loaded.modules() if hasattr(m, "config")} == {before}
        assert torch.equal(loaded(**given).logits, plain)
        again = rooftile.patch(loaded, **switches)
        assert again.replaced == handle.replaced
        assert again.left == handle.left
        assert torch.equal(loaded(**given).logits, patched)
        again.undo()
        assert torch.equal(loaded(**given).logits, plain)
    assert model.config._attn_implementation == ("rooftile" if switches else before)
