"""`rooftile.patch(linear=True)`: where weights lie, how they are saved, and which layers are left or called."""

import copy
import gc
from collections import Counter

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from helpers import Calls
from test_patch_linear import FP32, qkv_of, reasons, small
from tiny_models import DEVICE, TOLERANCE, build, error, tokens

import rooftile
from rooftile.huggingface import memory as memories
from rooftile.huggingface.planning import LINEAR, QKV
from rooftile.huggingface.replacing import joint_linear


def test_saved_and_loaded(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = small("Qwen2"), tokens(6)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        logits = model(ids).logits
        handle = rooftile.patch(model, linear=True)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa", device_map=DEVICE)
        assert torch.equal(loaded(ids).logits, logits)
        assert rooftile.patch(loaded, linear=True).replaced[QKV] == 1

        # In place, and by other tensors: the product reads what was loaded.
        for assign in (False, True):
            model.load_state_dict({name: 0.5 * value for name, value in state.items()}, assign=assign)
            halved = model(ids).logits
            model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
            assert error(halved, logits) > 1e-2
            assert error(model(ids).logits, logits) < TOLERANCE[FP32]
        handle.undo()
        assert torch.equal(model(ids).logits, logits)


def test_savers_that_look_for_shared_memory_find_none(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = small("Llama")
    rooftile.patch(model, linear=True)
    safetensors.save_model(model, tmp_path / "model.safetensors")
    assert safetensors.load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    other = pytest.importorskip("accelerate.utils.other", reason="accelerate is not installed")
    assert other.clean_state_dict_for_safetensors(dict(model.state_dict())).keys() == model.state_dict().keys()


def test_copied_and_converted_models_are_multiplied_one_by_one() -> None:
    model, ids = small("Qwen2"), tokens(6)
    with torch.no_grad():
        logits = model(ids).logits
        rooftile.patch(model, linear=True)
        twin = copy.deepcopy(model)
        for patched, dtype in ((twin, FP32), (model.bfloat16(), torch.bfloat16)):
            with Calls() as record:
                assert error(patched(ids).logits, logits) < TOLERANCE[dtype]
            count = Counter(op._schema.name for op, _, _ in record.calls)
            assert (count["rooftile::linear"], count["rooftile::gated_linear"]) == (8, 0)


def test_memory_is_that_of_the_weights_and_goes_with_them() -> None:
    model = small("Llama")
    rooftile.patch(model, linear=True)
    weights = [layer.weight for layer in qkv_of(model)]
    assert all(w.untyped_storage().nbytes() == w.nbytes for w in weights)
    together = memories.joined(weights)
    assert together is not None
    assert torch.equal(together, torch.cat(weights))
    key = (DEVICE if together.device.index is None else together.device, together.data_ptr())
    memory = memories._TOGETHER[key]
    del together, weights
    model.double()
    gc.collect()
    assert memory.expired()


def test_parts_of_one_tensor_are_taken_as_they_lie() -> None:
    model, ids = small("Llama"), tokens(6)
    layers = qkv_of(model)
    whole = torch.cat([layer.weight.detach() for layer in layers])
    for layer, part in zip(layers, whole.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part
    with torch.no_grad():
        logits = model(ids).logits
        with rooftile.patch(model, linear=True) as handle:
            assert handle.replaced[QKV] == 1
            assert layers[1].weight.untyped_storage().data_ptr() == whole.data_ptr()
            assert error(model(ids).logits, logits) < TOLERANCE[FP32]
        assert layers[1].weight.untyped_storage().data_ptr() == whole.data_ptr()


class Rounded(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (10 * self.weight).round() / 10, self.bias)


def _subclass(layer: nn.Linear) -> None:
    layer.__class__ = Rounded


def _no_bias(layer: nn.Linear) -> None:
    layer.bias = None


def _hook(layer: nn.Linear) -> None:
    layer.register_forward_hook(lambda module, args, out: 2 * out)


def _override(layer: nn.Linear) -> None:
    layer.forward = lambda x: nn.functional.linear(x, 2 * layer.weight, layer.bias)


def _parametrize(layer: nn.Linear) -> None:
    nn.utils.parametrizations.weight_norm(layer)


def _flat(layer: nn.Linear) -> None:
    flat = torch.zeros(layer.weight.numel() + 8, device=DEVICE)
    flat[: layer.weight.numel()] = layer.weight.detach().flatten()
    layer.weight.data = flat[: layer.weight.numel()].view_as(layer.weight)


@pytest.mark.parametrize(
    ("change", "reason", "stay"),
    [
        (_subclass, "its class derives from torch.nn.Linear, and may compute something else", 1),
        (_parametrize, "its weight is parametrized", 1),
        (_override, "its forward is overridden on the instance already", 1),
        (_hook, "has hooks", 0),
        (_no_bias, "some of its layers have a bias and some have none", 0),
        (_flat, "its weights are views of a larger storage, which something else may use", 0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_can_not_be_fused_is_left_with_a_reason_and_computes_the_same(change, reason: str, stay: int) -> None:
    model, ids = small("Qwen2"), tokens(6)
    change(model.model.layers[0].self_attn.k_proj)
    with torch.no_grad():
        logits = model(ids).logits
        with rooftile.patch(model, linear=True) as handle:
            (said,) = reasons(handle, QKV)
            assert reason in said
            assert (handle.replaced[LINEAR], handle.replaced[QKV]) == (8 - stay, 0)
            assert len(reasons(handle, LINEAR)) == stay
            assert error(model(ids).logits, logits) < TOLERANCE[FP32]


def test_layers_that_are_no_plain_products_are_left_with_a_reason() -> None:
    model = small("Llama").double()
    with rooftile.patch(model, linear=True) as handle:
        assert set(reasons(handle, LINEAR)) == {
            "its weight has dtype torch.float64, expected float32, float16 or bfloat16"
        }
        assert "its q_proj: its weight has dtype torch.float64" in reasons(handle, QKV)[0]
    model = small("Llama")
    q, k, _ = qkv_of(model)
    k.weight = nn.Parameter(q.weight[:32].detach())
    with rooftile.patch(model, linear=True) as handle:
        assert reasons(handle, QKV) == ["its weights are tied to others, or share a storage with others"]
    model = small("Llama", num_key_value_heads=4)
    q, k, _ = qkv_of(model)
    k.weight = q.weight
    with rooftile.patch(model, linear=True) as handle:
        assert reasons(handle, QKV) == ["its weights are tied to others, or share a storage with others"]
    with rooftile.patch(small("Llama").to("meta"), linear=True) as handle:
        assert reasons(handle, QKV) == ["its weights are on the meta device: patch after loading them"]
        assert handle.replaced[LINEAR] == 8
    with rooftile.patch(build("GPT-2"), linear=True) as handle:
        assert [(left.what, left.count) for left in handle.left if left.kind == LINEAR] == [("Conv1D", 8)]


def test_distributed_weights_are_left() -> None:
    class Sharded(torch.Tensor):
        pass

    model = small("Llama")
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Sharded))
    with rooftile.patch(model, linear=True) as handle:
        assert reasons(handle, LINEAR) == ["its weight is a Sharded, not a plain parameter"]
        assert handle.replaced[LINEAR] == 7


def test_hooks_and_layers_that_come_later_are_called() -> None:
    model, ids = small("Qwen2"), tokens(6)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    with rooftile.patch(model, linear=True), torch.no_grad():
        hooks = [layer.register_forward_hook(lambda m, a, out: 2 * out) for layer in (attention.v_proj, mlp.up_proj)]
        hooks.append(model.lm_head.register_forward_hook(lambda m, a, out: 3 * out))
        rounded = Rounded(64, 32, device=DEVICE)
        rounded.load_state_dict(attention.k_proj.state_dict())
        attention.k_proj = rounded
        patched = model(ids).logits
    assert error(patched, model(ids).logits) < TOLERANCE[FP32]
    for hook in hooks:
        hook.remove()
    assert error(patched, model(ids).logits) > 1e-2


def test_failure_while_memory_is_moved_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("Llama")
    before = {name: p.data_ptr() for name, p in model.named_parameters() if not name.endswith("proj.weight")}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    join, calls = memories.Memory._join, []

    def fails(self, group):
        calls.append(group)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        join(self, group)

    monkeypatch.setattr(memories.Memory, "_join", fails)
    with pytest.raises(torch.OutOfMemoryError):
        rooftile.patch(model, linear=True)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert memories.joined([layer.weight for layer in qkv_of(model)]) is None
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(model.get_parameter(name).data_ptr() == address for name, address in before.items())


@pytest.mark.each_once
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_op_of_compiled_graphs(apart: bool, biased: bool) -> None:
    layers = [nn.Linear(32, n, bias=biased, device=DEVICE) for n in (16, 8)]
    x = torch.randn(3, 32, device=DEVICE, requires_grad=True)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers if biased]
    if not apart:
        memories.Memory([weights, biases] if biased else [weights])
    assert (memories.joined(weights) is None) == apart
    torch.library.opcheck(torch.ops.rooftile_models.linear.default, (x, weights, biases, ""))
    y = torch.ops.rooftile_models.linear(x, weights, biases, "")
    asked = [x, *weights, *biases]
    found = torch.autograd.grad(y.square().sum(), asked)
    plain = torch.cat([layer(x) for layer in layers], dim=-1)
    expected = torch.autograd.grad(plain.square().sum(), asked)
    for a, e in zip((y, *found), (plain, *expected), strict=True):
        assert error(a, e) < TOLERANCE[FP32]
    with torch.no_grad():
        weights[1].data = weights[1][:0].new_empty(16, 32).normal_()
        z = torch.ops.rooftile_models.linear(x, weights, [], "silu")
        gate, up = (x @ w.mT for w in weights)
        assert error(z, nn.functional.silu(gate) * up) < TOLERANCE[FP32]


def test_layers_that_were_not_patched_are_called() -> None:
    layers = tuple(nn.Linear(16, 8) for _ in range(2))
    memories.Memory([[layer.weight for layer in layers]])
    x = torch.randn(2, 16)
    for y, layer in zip(joint_linear(layers, x), layers, strict=True):
        assert torch.equal(y, layer(x))
