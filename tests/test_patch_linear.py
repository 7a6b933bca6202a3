"""`rooftile.patch(linear=True)`: every product of a model's linear layers, and several over one input as one."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from helpers import Calls
from tiny_models import DEVICE, TOLERANCE, assert_same_gradients, build, error, gradients, run, tokens

import rooftile
from rooftile.huggingface import memory, rewrite
from rooftile.huggingface.planning import GATE_UP, LINEAR, QKV
from rooftile.huggingface.small_models import inputs

FP32 = torch.float32
# In one layer (of T5: one of each half): linear layers, products of q, k and v, products of gate and up.
COUNTS = {
    "Llama": (8, 1, 1),
    "Qwen2": (8, 1, 1),
    "Qwen3": (8, 1, 1),
    "Mistral": (8, 1, 1),
    "Granite": (8, 1, 1),
    "Gemma 2": (8, 1, 1),
    "Phi-3": (5, 0, 1),
    "GPT-NeoX": (5, 0, 0),
    "T5 v1.1": (19, 3, 2),
    "BERT": (8, 1, 0),
}


def small(title: str, dtype: torch.dtype = FP32, **more: object) -> nn.Module:
    return build(title, dtype, **{"num_layers" if title.startswith("T5") else "num_hidden_layers": 1}, **more)


def qkv_of(model: nn.Module) -> list[nn.Linear]:
    attention = model.get_submodule("model.layers.0.self_attn")
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def memory_of(model: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in model.parameters()}


def reasons(handle: rooftile.PatchHandle, kind: str) -> list[str]:
    return [left.reason for left in handle.left if left.kind == kind]


class Ran(TorchDispatchMode):
    """Counts the ops that run, PyTorch's own too."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("title", COUNTS)
def test_patched_model_computes_and_trains_the_same_and_undo_gives_it_back(title: str) -> None:
    model, ids = small(title), tokens(6)
    logits, loss, grads = run(model, ids)
    model.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, addresses = dict(model.named_parameters()), memory_of(model)

    handle = rooftile.patch(model, linear=True)
    assert tuple(handle.replaced[kind] for kind in (LINEAR, QKV, GATE_UP)) == COUNTS[title]
    assert len(memory_of(model)) == len(addresses)
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(now[name], value) for name, value in state.items())
    patched_logits, patched_loss, patched_grads = run(model, ids)
    assert error(patched_logits, logits) < TOLERANCE[FP32]
    assert error(patched_loss, loss) < TOLERANCE[FP32]
    assert_same_gradients(patched_grads, grads)

    handle.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert memory.joined([layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)][:2]) is None
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert torch.equal(run(model, ids)[0], logits)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Llama", {"linear": 4, "gated_linear": 1}),  # qkv, o, down and the head
        ("Phi-3", {"linear": 3, "gated_mlp": 1}),
        ("Granite", {"linear": 4, "gated_linear": 1}),
        ("T5 v1.1", {"linear": 3 * 3 + 2 + 1, "gated_linear": 2}),  # q, kv and o of three attentions
        ("BERT", {"linear": 6}),
    ],
)
def test_no_product_of_pytorch_is_left(title: str, expected: dict[str, int]) -> None:
    model = small(title)
    given = inputs(model, tokens(6))[0]
    with rooftile.patch(model, linear=True, attention=True), torch.no_grad(), Ran() as ran:
        model(**given)
    found = {op: ran.ops[f"rooftile::{op}"] for op in ("linear", "gated_linear", "gated_mlp")}
    assert found == {"gated_linear": 0, "gated_mlp": 0} | expected
    # What PyTorch multiplies beside is the angles of RoPE.
    assert ran.ops["aten::bmm"] <= 1
    assert not any(ran.ops[f"aten::{op}"] for op in ("mm", "addmm", "baddbmm", "linear", "matmul", "addmv"))


@pytest.mark.parametrize("change", ["undone", "moved", "frozen gate", "frozen up", "frozen down", "recomputed"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_mlp_trains_as_before_whatever_changes(bias: bool, change: str) -> None:
    """Between forward and backward the patch is undone, or weights move; or a weight is frozen; or checkpointing."""
    model, ids = small("Llama", mlp_bias=bias), tokens(6)
    if change.startswith("frozen"):
        model.model.layers[0].mlp.get_submodule(f"{change.split()[1]}_proj").requires_grad_(False)
    _, _, expected = run(model, ids)
    model.zero_grad()
    if change == "recomputed":
        model.gradient_checkpointing_enable()
        model.train()
    handle = rooftile.patch(model, linear=True)
    with Ran() as ran:
        loss = model(input_ids=ids, labels=ids).loss
        if change == "undone":
            handle.undo()
        if change == "moved":
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.data = layer.weight.data.clone()
        loss.backward()
    assert ran.ops["rooftile::gated_mlp"] == 1 + (change == "recomputed")
    assert ran.ops["rooftile::gated_mlp_backward"] == 1
    assert_same_gradients({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize("title", ["Llama", "Phi-3"])
def test_a_down_layer_that_is_another_module_is_called(title: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    model, ids = small(title), tokens(6)
    rooftile.patch(model, linear=True)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Wrapped(mlp.down_proj)
    logits, _, grads = run(model, ids)
    plain = small(title)
    mlp = plain.model.layers[0].mlp
    mlp.down_proj = Wrapped(mlp.down_proj)
    expected, _, expected_grads = run(plain, ids)
    assert error(logits, expected) < TOLERANCE[FP32]
    assert_same_gradients(grads, expected_grads)


def test_by_default_linear_layers_stay() -> None:
    model = small("Llama")
    with rooftile.patch(model) as handle:
        assert not any(handle.replaced[kind] for kind in (LINEAR, QKV, GATE_UP))
        layers = (m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head)
        assert not any("forward" in m.__dict__ for m in layers)


@pytest.mark.parametrize("title", ["Llama", "Granite"])
def test_greedy_tokens_with_a_static_cache(title: str) -> None:
    model, ids = small(title), tokens(6, batch=2)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    options |= {"cache_implementation": "static", "disable_compile": True}
    plain = model.generate(ids, **options)
    with rooftile.patch(model, linear=True, attention=True):
        assert torch.equal(model.generate(ids, **options), plain)


@pytest.mark.nightly  # as test_patch_training.py's, and the ops are test_registration.py's
def test_compiled_to_one_graph() -> None:
    model, ids = small("Qwen2"), tokens(6)
    given = inputs(model, ids)[0]
    logits, _, grads = run(model, ids)
    with rooftile.patch(model, linear=True):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        out = compiled(**given)
        out.loss.backward()
    assert error(out.logits, logits) < TOLERANCE[FP32]
    assert_same_gradients(gradients(model), grads)


def test_compiled_for_inference_the_products_stay_ours_and_follow_the_weights() -> None:
    model, ids = small("Qwen2"), tokens(6)
    found: Counter[str] = Counter()

    def backend(graph, example_inputs):
        found.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad(), rooftile.patch(model, linear=True):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for new in (False, True):
            if new:  # nothing that a compiled graph guards on: the weight lies elsewhere
                model.model.layers[0].self_attn.k_proj.weight.data = 2 * model.model.layers[0].self_attn.k_proj.weight
            patched = compiled(ids).logits
            assert error(patched, model(ids).logits) < TOLERANCE[FP32]
    # q, k, v and gate, up; o, down and the head; none of PyTorch's, and of the rest the model's own code.
    ours = {name: count for name, count in found.items() if "linear" in name or "rooftile" in name}
    assert ours == {"rooftile_models.linear": 2, "rooftile.linear.default": 3}
    plain = small("Qwen2")
    assert error(plain(ids).logits, patched) > 1e-3
    plain.model.layers[0].self_attn.k_proj.weight.data *= 2
    assert error(plain(ids).logits, patched) < TOLERANCE[FP32]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, ids = small("Qwen2").train(), tokens(6)
    _, _, grads = run(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with rooftile.patch(model, linear=True):
        if reentrant:
            model.enable_input_require_grads()
        assert_same_gradients(run(model, ids)[2], grads)


def test_frozen_weights_get_no_gradients_and_the_others_theirs() -> None:
    model, ids = small("Qwen2"), tokens(6)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith(("k_proj.weight", "v_proj.bias", "up_proj.weight"))
    _, _, grads = run(model, ids)
    with rooftile.patch(model, linear=True):
        assert_same_gradients(run(model, ids)[2], grads)


def test_an_optimizer_made_before_trains_what_the_product_reads() -> None:
    logits = []
    for patched in (False, True):
        model, ids = small("Qwen2"), tokens(6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if patched:
            rooftile.patch(model, linear=True)
        for _ in range(2):
            run(model, ids)
            optimizer.step()
        weights = [layer.weight for layer in qkv_of(model)]
        assert (memory.joined(weights) is not None) == patched
        logits.append(model(ids).logits)
    assert error(*logits) < 1e-4


@pytest.mark.parametrize("before", [True, False], ids=["adapters-first", "patch-first"])
def test_lora_adapters_are_used_and_trained(before: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ids = tokens(6)

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, config)

    plain = adapt(small("Llama"))
    logits, _, grads = run(plain, ids)
    model = small("Llama")
    if before:
        model = adapt(model)
        handle = rooftile.patch(model, linear=True)
        adapter = "has a LoRA adapter: the layers are multiplied one by one"
        assert reasons(handle, QKV) == [f"its q_proj {adapter}"]
        assert reasons(handle, GATE_UP) == [f"its up_proj {adapter}"]
        assert handle.replaced[LINEAR] == 8 + 2 * 3
    else:
        handle = rooftile.patch(model, linear=True)
        model = adapt(model)
    patched_logits, _, patched = run(model, ids)
    assert error(patched_logits, logits) < TOLERANCE[FP32]
    assert_same_gradients(patched, grads)
    handle.undo()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)


def test_autocast_gives_the_models_dtype_and_gradients() -> None:
    model, ids = small("Qwen2"), tokens(6)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        plain, _, grads = run(model, ids)
        with rooftile.patch(model, linear=True):
            patched, _, found = run(model, ids)
    assert patched.dtype == plain.dtype
    assert error(patched, plain) < TOLERANCE[torch.bfloat16]
    flat = [torch.cat([g.flatten() for g in gs.values()]) for gs in (found, grads)]
    assert error(*flat) < TOLERANCE[torch.bfloat16]


def test_tied_head_stays_tied() -> None:
    model = small("Gemma 2")
    with rooftile.patch(model, linear=True) as handle:
        assert "lm_head" in handle.modules[LINEAR]
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_switched_off_mlp_keeps_its_activation_and_one_product() -> None:
    model, ids = small("Llama"), tokens(6)
    with torch.no_grad():
        logits = model(ids).logits
        with rooftile.patch(model, linear=True, mlp=False) as handle, Calls() as record:
            assert (handle.replaced["SwiGLU"], handle.replaced[GATE_UP]) == (0, 1)
            assert error(model(ids).logits, logits) < TOLERANCE[FP32]
    assert Counter(op._schema.name for op, _, _ in record.calls)["rooftile::linear"] == 5


def test_calls_are_made_one_where_that_changes_nothing() -> None:
    rule = rewrite.Together(("a", "b"), "products")
    names = {"products": lambda modules, x: tuple(("one", module, x) for module in modules)}

    def good(self, x, flag):  # type: ignore[no-untyped-def]
        if flag:
            y = [self.a(x)]
            z = self.b(x)
        else:
            y, z = [None], None
        return y, z

    self = type("Module", (), {"a": "a", "b": "b"})
    assert rewrite.rebuild(good, [rule], names).function(self, 3, True) == ([("one", "a", 3)], ("one", "b", 3))

    def other_argument(self, x, w):  # type: ignore[no-untyped-def]
        return self.a(x), self.b(w)

    def assigned_between(self, x):  # type: ignore[no-untyped-def]
        y = self.a(x)
        x = x + 1
        return y, self.b(x)

    def conditional(self, x, flag):  # type: ignore[no-untyped-def]
        y = self.a(x)
        return y, self.b(x) if flag else None

    def in_another_block(self, x, flag):  # type: ignore[no-untyped-def]
        y = self.a(x)
        if flag:
            y = y + self.b(x)
        return y

    def twice(self, x):  # type: ignore[no-untyped-def]
        return self.a(x), self.b(x), self.b(x)

    for method in (other_argument, assigned_between, conditional, in_another_block, twice):
        with pytest.raises(rewrite.NotRewritable, match="no line like"):
            rewrite.rebuild(method, [rule], names)


@pytest.mark.parametrize("bias", [False, True])
def test_training_keeps_neither_what_is_gated_nor_q_and_k_before_their_rotation(bias):
    """Of a layer of Llama that is a fifth of what is kept for the backward."""
    model = small("Llama", mlp_bias=bias, attention_bias=bias).train()
    rooftile.patch(model, attention=True, linear=True)
    config, ids = model.config, tokens()
    kept: dict[int, int] = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(input_ids=ids, labels=ids).loss
    parameters = memory_of(model)
    sizes = Counter(size for at, size in kept.items() if at not in parameters)
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    width = config.hidden_size // config.num_attention_heads
    assert sizes[ids.numel() * config.intermediate_size] == 0
    assert sizes[ids.numel() * 2 * config.intermediate_size] == 1
    assert sizes[ids.numel() * heads * width] == 0
    plain = small("Llama", mlp_bias=bias, attention_bias=bias).train()
    plain.load_state_dict(model.state_dict())
    loss.backward()
    plain(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients(gradients(model), gradients(plain))
