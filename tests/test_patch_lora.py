"""`rooftile.patch(lora=True)`: PEFT's LoRA layers with their adapter by `lora_linear`, and what stays PEFT's own."""

from collections import Counter

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import peft
from helpers import Calls
from tiny_models import DEVICE, TOLERANCE, assert_same_gradients, build, error, run, tokens

import rooftile
from rooftile.huggingface.planning import LINEAR, LORA

FP32, BF16 = torch.float32, torch.bfloat16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
LAYERS = 2


def adapted(dtype: torch.dtype = FP32, *, adapters: int = 1, keep: bool = True, **config: object) -> nn.Module:
    """A tiny Llama with adapters whose results are of the size of the layers'. `keep`: their dtype is the model's."""
    torch.manual_seed(3)
    model = build("Llama", dtype, num_hidden_layers=LAYERS)
    config = peft.LoraConfig(**{"r": 8, "target_modules": EVERY, "init_lora_weights": False, **config})
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=not keep)
    for i in range(1, adapters):
        model.add_adapter(f"other{i}", config)
    return model.to(DEVICE)


def calls_of(model: nn.Module, ids: torch.Tensor, **options: object) -> tuple[torch.Tensor, int]:
    """The logits without gradients, and how often lora_linear computed a layer."""
    with torch.no_grad(), Calls() as record:
        logits = model(ids, **options).logits
    return logits, Counter(op._schema.name for op, _, _ in record.calls)["rooftile::lora_linear"]


def why(handle: rooftile.PatchHandle) -> set[str]:
    return {left.reason for left in handle.left if left.kind == LORA}


@pytest.mark.each_once
@pytest.mark.parametrize("linear", [False, True], ids=["alone", "linear"])
@pytest.mark.parametrize("targets", [ATTENTION, EVERY], ids=["attention", "every"])
def test_patched_model_trains_the_same_and_undo_gives_it_back(targets: list[str], linear: bool) -> None:
    model, ids = adapted(target_modules=targets), tokens(6)
    logits, _, grads = run(model, ids)
    model.zero_grad()
    with rooftile.patch(model) as handle:
        assert f"off: attention, linear, lora ({LAYERS * len(targets)} layers; lora=True)" in str(handle).splitlines()
    handle = rooftile.patch(model, lora=True, linear=linear)
    assert "lora=True" not in str(handle)
    assert handle.replaced[LORA] == LAYERS * len(targets)
    assert not why(handle)
    patched, _, found = run(model, ids)
    assert error(patched, logits) < TOLERANCE[FP32]
    assert sum("lora_" in name for name in found) == 2 * LAYERS * len(targets)
    assert_same_gradients(found, grads)
    assert calls_of(model, ids)[1] == LAYERS * len(targets)
    assert (handle.replaced[LINEAR] > 0) == linear
    handle.undo()
    model.zero_grad()
    again, _, gradients = run(model, ids)
    assert torch.equal(again, logits)
    assert all(torch.equal(gradients[name], grads[name]) for name in grads)


def test_it_is_off_by_default() -> None:
    model = adapted()
    with rooftile.patch(model) as handle:
        assert handle.replaced[LORA] == 0
        assert calls_of(model, tokens(6))[1] == 0


@pytest.mark.parametrize(
    "keep", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["bf16-adapters", "float32-adapters"]
)
def test_bfloat16_models_compute_in_bfloat16(keep: bool) -> None:
    model, ids = adapted(BF16, keep=keep), tokens(6)
    logits, _, grads = run(model, ids)
    with rooftile.patch(model, lora=True):
        patched, _, found = run(model, ids)
        assert calls_of(model, ids)[1] == LAYERS * len(EVERY)
    assert patched.dtype == logits.dtype
    assert error(patched, logits) < TOLERANCE[BF16]
    adapters = [name for name in grads if "lora_" in name]
    assert {found[name].dtype for name in adapters} == {BF16 if keep else FP32}
    flat = [torch.cat([g[name].flatten() for name in adapters]) for g in (found, grads)]
    assert error(*flat) < TOLERANCE[BF16]


@pytest.mark.parametrize("dtype", [FP32, pytest.param(BF16, marks=pytest.mark.nightly)], ids=str)
def test_autocast_gives_the_models_dtype_and_gradients(dtype: torch.dtype) -> None:
    model, ids = adapted(dtype, keep=False), tokens(6)
    with torch.autocast(DEVICE.type, BF16):
        plain, _, grads = run(model, ids)
        with rooftile.patch(model, lora=True):
            patched, _, found = run(model, ids)
            assert calls_of(model, ids)[1] == LAYERS * len(EVERY)
    assert patched.dtype == plain.dtype
    assert error(patched, plain) < TOLERANCE[BF16]
    adapters = [name for name in grads if "lora_" in name]
    assert all(found[name].dtype == FP32 for name in adapters)
    flat = [torch.cat([g[name].flatten() for name in adapters]) for g in (found, grads)]
    assert error(*flat) < TOLERANCE[BF16]


def test_gradient_checkpointing_computes_the_same() -> None:
    model, ids = adapted(), tokens(6)
    model.train()
    _, _, grads = run(model, ids)
    model.zero_grad()
    with rooftile.patch(model, lora=True):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert_same_gradients(run(model, ids)[2], grads)


def test_dropout_is_peft_s_own_of_the_adapters_input() -> None:
    model, ids = adapted(lora_dropout=0.5), tokens(6)
    model.train()
    found = []
    for patched in (False, True):
        handle = rooftile.patch(model, lora=True) if patched else None
        torch.manual_seed(7)
        found.append(run(model, ids))
        model.zero_grad()
    assert error(found[1][1], found[0][1]) < TOLERANCE[FP32]
    assert_same_gradients(found[1][2], found[0][2])
    (one, calls), (other, _) = calls_of(model, ids), calls_of(model, ids)
    assert error(one, other) > 1e-2  # another mask
    assert calls == LAYERS * len(EVERY)
    model.eval()
    evaluated, calls = calls_of(model, ids)
    handle.undo()
    assert calls == LAYERS * len(EVERY)
    assert error(evaluated, calls_of(model, ids)[0]) < TOLERANCE[FP32]


def test_each_call_decides_by_what_is_active() -> None:
    model, ids = adapted(adapters=2), tokens(6, 2)
    plain = adapted(adapters=2)
    plain.load_state_dict(model.state_dict())
    whole = LAYERS * len(EVERY)
    seen = []

    def both(calls: int, **options: object) -> None:
        logits, count = calls_of(model, ids, **options)
        expected = calls_of(plain, ids, **options)[0]
        assert count == calls
        assert error(logits, expected) < TOLERANCE[FP32]
        seen.append(expected)

    with rooftile.patch(model, lora=True):
        both(whole)
        for each in (model, plain):
            each.set_adapter("other1")
        both(whole)
        for each in (model, plain):
            each.base_model.set_adapter(["default", "other1"])
        both(0)
        for each in (model, plain):
            each.set_adapter("default")
            each.eval()
        both(0, adapter_names=["default", "other1"])
        with model.disable_adapter(), plain.disable_adapter():
            both(0)
        for each in (model, plain):
            each.merge_adapter()
        both(0)
        for each in (model, plain):
            each.unmerge_adapter()
        both(whole)
        assert error(seen[0], seen[5]) < TOLERANCE[FP32]
        assert error(seen[0], seen[6]) < TOLERANCE[FP32]
        assert all(error(seen[0], other) > 1e-3 for other in seen[1:5])
        assert error(model.merge_and_unload()(ids).logits, seen[0]) < TOLERANCE[FP32]


def test_an_adapter_of_zeros_is_the_plain_model() -> None:
    model, ids = adapted(init_lora_weights=True), tokens(6)
    with rooftile.patch(model, lora=True), model.disable_adapter():
        expected = calls_of(model, ids)[0]
    with rooftile.patch(model, lora=True):
        assert error(calls_of(model, ids)[0], expected) < TOLERANCE[FP32]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "adapter 'default' is a variant of LoRA"),
        ({"lora_bias": True}, "adapter 'default' has a bias"),
    ],
    ids=["dora", "bias"],
)
def test_other_formulas_are_left_with_the_reason(config: dict[str, object], reason: str) -> None:
    model, ids = (
        adapted(target_modules=["q_proj", "lm_head"] if "use_dora" in config else ["q_proj"], **config),
        tokens(6),
    )
    expected, _ = calls_of(model, ids)
    with rooftile.patch(model, lora=True) as handle:
        assert handle.replaced[LORA] == 0
        (found,) = why(handle)
        assert reason in found
        logits, count = calls_of(model, ids)
    assert count == 0
    assert error(logits, expected) < TOLERANCE[FP32]


def test_layers_of_other_classes_are_left_with_the_reason() -> None:
    class Quantized(nn.Linear):
        pass

    model = adapted(target_modules=["q_proj", "embed_tokens"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer.__class__ = Quantized
    with rooftile.patch(model, lora=True) as handle:
        assert handle.replaced[LORA] == LAYERS - 1
        reasons = sorted(why(handle))
    assert [reason.partition(",")[0].rpartition(".")[2] for reason in reasons] == ["Quantized", "Embedding"]


def test_a_layer_that_is_hooked_or_replaced_later_is_called() -> None:
    model, ids = adapted(), tokens(6)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    called = []
    with rooftile.patch(model, lora=True):
        hook = layer.base_layer.register_forward_hook(lambda *_: called.append("base"))
        count = calls_of(model, ids)[1]
        hook.remove()
        assert (count, called) == (LAYERS * len(EVERY) - 1, ["base"])
        hook = layer.lora_A["default"].register_forward_hook(lambda *_: called.append("A"))
        count = calls_of(model, ids)[1]
        hook.remove()
        assert (count, called) == (LAYERS * len(EVERY) - 1, ["base", "A"])


@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["training", "inference"])
def test_compiled_models_keep_the_op(grad: bool) -> None:
    model, ids = adapted(target_modules=ATTENTION), tokens(6)
    logits = calls_of(model, ids)[0]
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with rooftile.patch(model, lora=True), torch.set_grad_enabled(grad):
        compiled = torch.compile(model, backend=backend)
        assert error(compiled(ids).logits, logits) < TOLERANCE[FP32]
    assert seen.count("rooftile.lora_linear.default") == LAYERS * len(ATTENTION)


def test_the_switch_is_a_bool() -> None:
    with pytest.raises(TypeError, match="patch: lora is 1, expected True or False"):
        rooftile.patch(adapted(), lora=1)
