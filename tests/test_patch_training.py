"""`rooftile.patch` in training: the loss by the fused head, without logits, and what keeps the model's own."""

import copy
import functools
import gc
import importlib

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from helpers import Calls, nightly_but
from tiny_models import BY_TITLE, DEVICE, TOLERANCE, assert_same_gradients, build, error, gradients, run, tokens

import rooftile
from rooftile.huggingface import families, rewrite
from rooftile.huggingface.small_models import inputs

KIND = "head + cross entropy"
FP32 = TOLERANCE[torch.float32]
# Strong enough that a loss without it would show.
CAPPED = {"final_logit_softcapping": 0.3}
MORE = {"Gemma 2": CAPPED, "Gemma 3": CAPPED}


def trained(title: str, dtype: torch.dtype = torch.float32, **more: object) -> nn.Module:
    """A model in training, without dropout: two runs are comparable. One layer where that is enough."""
    if "num_hidden_layers" in BY_TITLE[title].sizes and title not in ("Gemma 3", "DeepSeek-V3"):
        more = {"num_hidden_layers": 1, **more}
    model = build(title, dtype, **MORE.get(title, {}), **more).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_pdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def given_to(model: nn.Module) -> dict[str, torch.Tensor]:
    """Two texts; some labels of the first are ignored."""
    given = inputs(model, tokens(batch=2))[0]
    labels = given["labels"].clone()
    labels[0, 2:5] = -100
    return {**given, "labels": labels}


def step(model: nn.Module, given: dict[str, object], **options: object):  # type: ignore[no-untyped-def]
    model.zero_grad()
    out = model(**given, **options)
    out.loss.backward()
    return out, gradients(model)


def called(ops: Calls) -> list[str]:
    return [op._schema.name.partition("::")[2] for op, _, _ in ops.calls if "cross_entropy" in op._schema.name]


# Of each kind of head and loss one family; the others' heads are found below, and their steps with logits are right in
# test_patch.py.
@pytest.mark.parametrize(
    "title", nightly_but(("Llama", "Gemma 2", "Granite", "GPT-2", "BERT", "T5", "Qwen3-MoE", "DeepSeek-V3"), BY_TITLE)
)
def test_a_training_step_is_that_of_the_plain_model_without_logits(title: str) -> None:
    model = trained(title)
    given = given_to(model)
    plain, grads = step(model, given)
    handle = rooftile.patch(model)
    assert handle.replaced[KIND] == 1
    with Calls() as ops:
        ours, patched = step(model, given)
    assert called(ops) == ["linear_cross_entropy"]
    assert ours.logits is None
    assert error(ours.loss, plain.loss) < FP32
    assert_same_gradients(patched, grads)

    evaluated = model.eval()(**given)
    assert evaluated.logits.shape == plain.logits.shape
    assert error(evaluated.loss, plain.loss) < FP32
    handle.undo()
    assert torch.equal(model.train()(**given).loss, plain.loss)


@pytest.mark.parametrize("title", ["Llama", "Gemma 2", "T5", "RoBERTa"])
def test_a_training_step_in_bfloat16_is_as_near_to_float32_as_the_plain_one(title: str) -> None:
    exact_model, model = trained(title), trained(title, torch.bfloat16)
    exact_model.load_state_dict(model.state_dict())
    given = given_to(model)
    exact, exact_grads = step(exact_model, given)
    plain, grads = step(model, given)
    with rooftile.patch(model):
        ours, patched = step(model, given)
    assert ours.loss.dtype == torch.float32
    # The logits are rounded in both; the plain loss of T5 and RoBERTa is rounded besides.
    assert error(ours.loss, exact.loss) <= max(error(plain.loss, exact.loss), 2.0**-8)
    flat = [torch.cat([g[name].float().flatten() for name in exact_grads]) for g in (patched, grads, exact_grads)]
    assert error(flat[0], flat[2]) <= 1.5 * error(flat[1], flat[2])


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": torch.tensor(37)},
        {"num_items_in_batch": torch.tensor([37])},  # as a part of what DataParallel scatters
        {"num_items_in_batch": 37},
        {"num_items_in_batch": torch.tensor(36.5)},
        {"ignore_index": 7},
        {"shift_labels": True, "num_items_in_batch": torch.tensor(9)},
        {"shift_labels": True, "logits_to_keep": 5},
    ],
    ids=["tensor", "vector", "int", "float", "ignore_index", "shift_labels", "logits_to_keep"],
)
def test_what_the_loss_of_transformers_is_told_is_kept(options: dict[str, object]) -> None:
    model = trained("Granite")
    given = given_to(model)
    if "shift_labels" in options:
        options = {
            **options,
            "shift_labels": given["labels"].flip(1)[:, -options.get("logits_to_keep", 0) :].contiguous(),
        }
    if "ignore_index" in options:
        given["labels"] = given["labels"].masked_fill(given["labels"] < 100, 7)
    plain, grads = step(model, given, **options)
    with rooftile.patch(model), Calls() as ops:
        ours, patched = step(model, given, **options)
    assert called(ops) == ["linear_cross_entropy"]
    assert ours.loss.shape == plain.loss.shape
    assert error(ours.loss, plain.loss) < FP32
    assert_same_gradients(patched, grads)


def test_the_loss_may_be_added_to_and_multiplied_in_place() -> None:
    model = trained("Mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    given = given_to(model)
    results = []
    for patched in (False, True):
        handle = rooftile.patch(model) if patched else None
        model.zero_grad()
        loss = model(**given, num_items_in_batch=torch.tensor(20)).loss  # with the loss of the routers added
        loss *= 3
        loss.backward()
        results.append((loss.detach(), gradients(model), handle and handle.undo()))
    assert error(results[1][0], results[0][0]) < FP32
    assert_same_gradients(results[1][1], results[0][1])


def test_logits_come_where_they_are_asked_for() -> None:
    model = trained("Llama")
    given = given_to(model)
    plain = model(**given)
    del given["use_cache"]
    ids, labels = given["input_ids"], given["labels"]
    with rooftile.patch(model):
        assert error(model(**given, skip_logits=False).logits, plain.logits) < FP32
        assert error(model(ids).logits, plain.logits) < FP32  # no labels
        assert error(model(**given, return_dict=False)[0], plain.loss) < FP32
        model.eval()
        out = model(ids, labels=labels, skip_logits=True)
        assert out.logits is None
        assert error(out.loss, plain.loss) < FP32
        assert model(ids, skip_logits=True).logits is not None
    with rooftile.patch(model.train(), linear_cross_entropy=False) as handle:
        assert handle.replaced[KIND] == 0
        assert f"1 {KIND} (LlamaForCausalLM): switched off by the caller" in map(str, handle.left)
        assert model(**given).logits is not None


def test_the_handle_says_whether_logits_are_skipped() -> None:
    model = trained("Llama")
    given = given_to(model)
    handle = rooftile.patch(model)
    assert handle.skip_logits is None
    for skip in (True, False, None):
        handle.skip_logits = skip
        assert handle.skip_logits is skip
        assert [(model.train(mode)(**given).logits is None) for mode in (True, False)] == [
            mode if skip is None else skip for mode in (True, False)
        ]
    handle.skip_logits = True
    assert model(**given, skip_logits=False).logits is not None  # the call goes first
    with pytest.raises(TypeError, match="skip_logits is 'no', expected True, False or None"):
        handle.skip_logits = "no"
    handle.undo()
    assert "_rooftile_skip_logits" not in model.__dict__


def test_labels_that_are_all_ignored_give_zeros() -> None:
    model = trained("Llama")
    given = given_to(model)
    given["labels"] = torch.full_like(given["labels"], -100)
    with rooftile.patch(model):
        for options in ({}, {"num_items_in_batch": torch.tensor(0)}):
            out, grads = step(model, given, **options)
            assert not out.loss.detach().any()
            assert all(not grad.any() for grad in grads.values())


def test_labels_that_do_not_fit_are_named() -> None:
    model = trained("Llama")
    given = given_to(model)
    labels = given["labels"]
    batch, tokens = labels.shape
    with rooftile.patch(model):
        for other, fewer, seen in ((labels[:, :-2], {}, tokens), (labels, {"logits_to_keep": 4}, 4)):
            said = rf"labels: has shape \({batch}, {other.shape[1]}\), expected \({batch}, {seen}\)"
            with pytest.raises(ValueError, match=said):
                model(**{**given, "labels": other}, **fewer)
        with pytest.raises(TypeError, match=r"labels: has dtype torch.float32, expected int64 or int32"):
            model(**{**given, "labels": labels.float()})


def test_a_frozen_head_gets_no_gradient_and_passes_its_own_on() -> None:
    model = trained("Llama")
    given = given_to(model)
    model.lm_head.weight.requires_grad = False
    plain, grads = step(model, given)
    with rooftile.patch(model), Calls() as ops:
        ours, patched = step(model, given)
    (results,) = (results for op, _, results in ops.calls if "linear_cross_entropy" in op._schema.name)
    assert [t.numel() > 0 for t in results[1:4]] == [True, False, False]
    assert error(ours.loss, plain.loss) < FP32
    assert_same_gradients(patched, grads)


def test_tied_weights_get_the_gradients_of_both_uses() -> None:
    model = trained("Llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    given = given_to(model)
    _, grads = step(model, given)
    with rooftile.patch(model):
        assert_same_gradients(step(model, given)[1], grads)


@pytest.mark.parametrize("title", ["Llama", pytest.param("BERT", marks=pytest.mark.nightly)])
def test_the_option_linear_composes_with_the_loss(title: str) -> None:
    model = trained(title)
    given = given_to(model)
    plain, grads = step(model, given)
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    with rooftile.patch(model, linear=True, attention=True) as handle:
        assert handle.replaced[KIND] == 1
        assert handle.replaced["linear"] == layers
        with Calls() as ops:
            ours, patched = step(model, given)
        assert called(ops) == ["linear_cross_entropy"]
        assert error(ours.loss, plain.loss) < FP32
        assert_same_gradients(patched, grads)
        with Calls() as ops, torch.no_grad():
            logits = model.eval()(**given).logits
        assert any(op._schema.name == "rooftile::linear" and args[1].shape[0] == 256 for op, args, _ in ops.calls)
        assert error(logits, plain.logits) < FP32


def test_a_loss_function_of_ones_own_is_called() -> None:
    def mine(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: object) -> torch.Tensor:
        return logits.square().mean()

    for before in (True, False):
        model = trained("Llama")
        given = given_to(model)
        expected = mine(model(**given).logits, given["labels"], 256)
        if before:
            model.loss_function = mine
        with rooftile.patch(model) as handle:
            if before:
                assert handle.replaced[KIND] == 0
                assert "its loss_function is mine, expected transformers' ForCausalLMLoss" in str(handle)
            model.loss_function = mine
            assert error(model(**given).loss, expected) < FP32


@pytest.mark.each_once
@pytest.mark.parametrize("hook_first", [True, False])
@pytest.mark.parametrize(
    ("title", "path"), [("Llama", "lm_head"), ("BERT", "cls"), ("BERT", "cls.predictions.decoder")]
)
def test_hooks_of_the_head_see_logits(title: str, path: str, hook_first: bool) -> None:
    model = trained(title)
    given = given_to(model)
    plain, grads = step(model, given)
    seen: list[torch.Size] = []

    def hook() -> object:
        return model.get_submodule(path).register_forward_hook(lambda m, args, out: seen.append(out.shape))

    if hook_first:
        hook()
    with rooftile.patch(model) as handle:
        assert handle.replaced[KIND] == (0 if hook_first else 1)
        assert any("has hooks" in left.reason for left in handle.left) == hook_first
        if not hook_first:
            hook()
        ours, patched = step(model, given)
    assert seen == [plain.logits.shape]
    assert error(ours.loss, plain.loss) < FP32
    assert_same_gradients(patched, grads)


@pytest.fixture
def mesh():  # type: ignore[no-untyped-def]
    """Of one process: FSDP2 shards nothing, but gathers and casts each group of parameters as it does among several."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    gc.collect()  # FSDP2's cycles hold the process group
    distributed.destroy_process_group()


@pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the mesh is gloo's, of CPUs; test_two_gpus.py trains with FSDP on GPUs"
)
@pytest.mark.parametrize("patch_first", [True, False])
def test_fsdp_gathers_the_head_around_the_fused_loss(mesh: object, patch_first: bool) -> None:
    """The head is a group of its own: its weight is there only while its module is called."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for dtype, limit in ((None, FP32), (torch.bfloat16, TOLERANCE[torch.bfloat16])):
        model = trained("Llama")
        given = {**given_to(model), "num_items_in_batch": torch.tensor(19)}
        plain, grads = step(model, given)
        handle = rooftile.patch(model) if patch_first else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in (model.lm_head, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        handle = handle or rooftile.patch(model)
        assert handle.replaced[KIND] == 1
        with Calls() as ops:
            ours, patched = step(model, given)
        assert called(ops) == ["linear_cross_entropy"]
        assert ours.logits is None
        assert error(ours.loss, plain.loss) < limit
        gathered = torch.cat([patched[name].full_tensor().flatten() for name in grads])
        assert error(gathered, torch.cat([grad.flatten() for grad in grads.values()])) < limit


def test_hooks_of_accelerate_run_around_the_fused_loss() -> None:
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    calls: list[str] = []

    class Count(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: object, **kwargs: object) -> tuple[object, object]:
            calls.append(type(module).__name__)
            return args, kwargs

    for hook_first in (True, False):
        model = trained("Llama")
        given = given_to(model)
        plain, grads = step(model, given)
        handle = None if hook_first else rooftile.patch(model)
        hooks.add_hook_to_module(model.lm_head, Count())
        hooks.add_hook_to_module(model, Count())
        handle = handle or rooftile.patch(model)
        assert handle.replaced[KIND] == 1
        calls.clear()
        ours, patched = step(model, given)
        assert calls == ["LlamaForCausalLM", "Linear"]
        assert ours.logits is None
        assert error(ours.loss, plain.loss) < FP32
        assert_same_gradients(patched, grads)
        handle.undo()
        assert model(**given).logits is not None


@pytest.mark.each_once
@pytest.mark.parametrize("before", [True, False], ids=["adapters-first", "patch-first"])
@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["q_proj", "lm_head"]], ids=["layers", "head"])
def test_lora_trains_as_in_the_plain_model(targets: list[str], before: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))

    plain = adapt(trained("Llama"))
    given = given_to(plain)
    expected, grads = step(plain, given)
    model = trained("Llama")
    if before:
        model = adapt(model)
        handle = rooftile.patch(model)
    else:
        handle = rooftile.patch(model)
        model = adapt(model)
    fused = before or "lm_head" not in targets  # an adapter that takes the head's place later makes logits
    if before:
        assert handle.replaced[KIND] == 1
    ours, patched = step(model, given, num_items_in_batch=None)
    assert (ours.logits is None) == fused
    assert error(ours.loss, expected.loss) < FP32
    assert_same_gradients(patched, grads)
    handle.undo()
    assert torch.equal(step(model, given)[0].loss, expected.loss)


@pytest.mark.each_once
@pytest.mark.parametrize("title", ["Llama", "Gemma 2"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "logits-in-the-head"])
def test_accuracy_and_entropy_are_returned_without_logits(title: str, fused: bool) -> None:
    model = trained(title)
    given = given_to(model)
    plain, grads = step(model, given)
    given["labels"][:, 3] = plain.logits.argmax(-1)[:, 2]  # one that is right
    plain, grads = step(model, given)
    counts = given["labels"][:, 1:] != -100
    logprobs = plain.logits[:, :-1].detach().log_softmax(-1)
    right = (logprobs.argmax(-1) == given["labels"][:, 1:])[counts].float().mean()
    entropy = -(logprobs.exp() * logprobs).sum(-1)[counts].mean()
    assert right > 0
    with rooftile.patch(model):
        if not fused:
            model.double()  # which no kernel has
        ours, patched = step(model, given, return_token_accuracy=True)
        assert ours.logits is None
        assert isinstance(ours, type(plain))
        assert ours.token_accuracy == pytest.approx(right.item())
        assert error(ours.token_entropy, entropy) < FP32
        assert not ours.token_entropy.requires_grad
        assert error(ours.loss, plain.loss) < FP32
        again = torch.utils._pytree.tree_map(lambda t: t, ours)  # as wrappers rebuild results
        assert again.token_accuracy is ours.token_accuracy
        if fused:
            assert_same_gradients(patched, grads)
            assert not hasattr(step(model, given)[0], "token_accuracy")
        with pytest.warns(UserWarning, match="return_token_accuracy=True does nothing where logits are returned"):
            model.eval()(**given, return_token_accuracy=True)


@pytest.mark.parametrize("title", ["Llama", "Gemma 2"])
def test_ignored_tokens_are_not_multiplied_where_the_host_knows_how_many_count(title: str) -> None:
    """`valid_rows` of the call; the model's own code takes it too, and it has no part in graphs."""
    model = trained(title)
    given = given_to(model)
    given["labels"][:, :6] = -100
    valid = int((given["labels"] != -100).sum())
    plain, grads = step(model, given, valid_rows=valid)
    with rooftile.patch(model):
        with Calls() as ops:
            ours, patched = step(model, given, valid_rows=valid)
        (args,) = [args for op, args, _ in ops.calls if op._schema.name == "rooftile::linear_cross_entropy"]
        assert args[-2] == valid < len(args[0])
        assert model(**given, valid_rows=valid - 1).loss.isnan()
        assert error(model.eval()(**given, valid_rows=valid).loss, plain.loss) < FP32
    assert error(ours.loss, plain.loss) < FP32
    assert_same_gradients(patched, grads)


@pytest.mark.parametrize(("title", "switches"), [("Llama", {}), ("Gemma 2", {"lora": True, "linear": True})])
def test_a_head_with_an_adapter_is_asked_for_the_loss(title: str, switches: dict[str, bool]) -> None:
    """Over the head and its one adapter, with dropout and a scale; what PEFT computes otherwise is asked for logits."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, lora_dropout=0.3, target_modules=["q_proj", "lm_head"], init_lora_weights=False
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(trained(title), config)
    given = given_to(model)

    def seeded() -> tuple[object, dict[str, torch.Tensor]]:
        torch.manual_seed(5)  # of dropout
        return step(model, given, num_items_in_batch=torch.tensor(11))

    plain, grads = seeded()
    assert sum("lm_head.lora" in name for name in grads) == 2
    handle = rooftile.patch(model, **switches)
    assert handle.replaced[KIND] == 1
    with Calls() as ops:
        ours, patched = seeded()
    assert called(ops) == ["linear_cross_entropy"]
    assert ours.logits is None
    assert error(ours.loss, plain.loss) < FP32
    assert_same_gradients(patched, grads)
    handle.skip_logits = True
    with model.disable_adapter():
        found = model(**given).loss
        handle.skip_logits = False
        assert error(found, model(**given).loss) < FP32
    handle.undo()
    assert torch.equal(seeded()[0].loss, plain.loss)


def test_a_head_with_a_variant_of_lora_is_left_with_the_reason() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(trained("Llama"), peft.LoraConfig(r=4, target_modules=["lm_head"], use_dora=True))
    handle = rooftile.patch(model)
    assert handle.replaced[KIND] == 0
    assert "its lm_head: its adapter 'default' is a variant of LoRA" in str(handle)
    assert step(model, given_to(model))[0].logits is not None


@pytest.mark.parametrize("before", [True, False], ids=["adapters-first", "patch-first"])
def test_a_head_that_peft_saves_is_asked_too(before: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
        with torch.no_grad():
            found.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
        return found

    plain = adapt(trained("Llama"))
    given = given_to(plain)
    expected, grads = step(plain, given)
    assert any("lm_head" in name for name in grads)
    model = trained("Llama")
    if before:
        model = adapt(model)
        handle = rooftile.patch(model, linear=True)
        assert handle.replaced[KIND] == 2
    else:
        handle = rooftile.patch(model, linear=True)
        model = adapt(model)
    ours, patched = step(model, given)
    assert ours.logits is None
    assert error(ours.loss, expected.loss) < FP32
    assert_same_gradients(patched, grads)
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        unadapted = model(**given)
        assert unadapted.logits is None
        assert error(unadapted.loss, plain(**given).loss) < FP32
    handle.undo()
    assert torch.equal(step(model, given)[0].loss, expected.loss)


def test_autocast_trains_as_the_plain_model() -> None:
    model = trained("Llama")
    given = given_to(model)
    exact, exact_grads = step(model, given)
    results = []
    for patched in (False, True):
        handle = rooftile.patch(model) if patched else None
        with torch.autocast(DEVICE.type, torch.bfloat16):
            model.zero_grad()
            loss = model(**given).loss
        loss.backward()
        results.append((loss, torch.cat([g.flatten() for g in gradients(model).values()]), handle and handle.undo()))
    (plain, plain_grads, _), (ours, grads, _) = results
    flat = torch.cat([g.flatten() for g in exact_grads.values()])
    assert ours.dtype == torch.float32
    assert error(ours, exact.loss) <= max(error(plain, exact.loss), 2.0**-8)
    assert error(grads, flat) <= 1.5 * error(plain_grads, flat)


@pytest.mark.parametrize("title", ["Qwen3", "BERT"])
def test_gradient_checkpointing_changes_nothing(title: str) -> None:
    model = trained(title)
    given = given_to(model)
    _, grads = step(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with rooftile.patch(model):
        ours, patched = step(model, given)
    assert ours.logits is None
    assert_same_gradients(patched, grads)


@pytest.mark.parametrize("title", ["Llama", *(pytest.param(t, marks=pytest.mark.nightly) for t in ("Gemma 2", "BERT"))])
def test_a_training_step_compiles_to_one_graph(title: str) -> None:
    model = trained(title)
    given = given_to(model)
    options = {} if title == "BERT" else {"num_items_in_batch": torch.tensor(17)}
    plain, grads = step(model, given, **options)
    with rooftile.patch(model):
        torch._dynamo.reset()
        model.zero_grad()
        out = torch.compile(model, fullgraph=True, backend="aot_eager")(**given, **options)
        out.loss.backward()
        assert out.logits is None
        assert error(out.loss, plain.loss) < FP32
        assert_same_gradients(gradients(model), grads)


@pytest.mark.parametrize("title", [pytest.param("Llama", marks=pytest.mark.nightly), "Gemma 3"])
def test_packed_sequences_train_as_separate_ones(title: str) -> None:
    model = trained(title)
    first, second = tokens(7), tokens(12)[:, 3:]
    labels = [torch.nn.functional.pad(ids[:, 1:], (1, 0), value=-100) for ids in (first, second)]
    total = torch.zeros(())
    model.zero_grad()
    for ids, target in zip((first, second), labels, strict=True):
        loss = model(ids, labels=target, num_items_in_batch=torch.tensor(14)).loss
        loss.backward()
        total = total + loss.detach().cpu()
    grads = gradients(model)
    n, m = first.shape[1], second.shape[1]
    starts = torch.tensor([0, n, n + m], dtype=torch.int32, device=DEVICE)
    packed = {
        "input_ids": torch.cat((first, second), 1),
        "position_ids": torch.cat((torch.arange(n), torch.arange(m)))[None].to(DEVICE),
        "labels": torch.cat(labels, 1),
        "num_items_in_batch": torch.tensor(14),
        "use_cache": False,
    }
    flash = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": m, "max_length_k": m}
    for more in (flash, {}):  # with lengths, and by restarting positions alone
        with rooftile.patch(model, attention=True), Calls() as ops:
            ours, patched = step(model, packed, **more)
        names = {call._schema.name.partition("::")[2] for call, _, _ in ops.calls}
        assert names & {"attention", "attention_varlen"} == {"attention_varlen"}
        assert ours.logits is None
        assert error(ours.loss.cpu(), total) < FP32
        assert_same_gradients(patched, grads)


def test_a_copy_trains_alike_and_undo_restores_it() -> None:
    model = trained("Llama")
    given = given_to(model)
    with rooftile.patch(model):
        ours, grads = step(model, given)
        copied = copy.deepcopy(model)
    again, patched = step(copied, given)
    assert again.logits is None
    assert torch.equal(again.loss, ours.loss)
    assert_same_gradients(patched, grads)
    rooftile.unpatch(copied)
    assert step(copied, given)[0].logits is not None


def test_a_forward_that_somebody_wrapped_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("Llama")
    cls, stock = type(model), type(model).forward

    @functools.wraps(stock)
    def wrapped(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", wrapped)
    with rooftile.patch(model) as handle:
        assert handle.replaced[KIND] == 0
        assert any(left.kind == KIND and "wrapped by a decorator" in left.reason for left in handle.left)
        assert model(**given_to(model)).logits is not None


def test_every_class_of_the_table_asks_its_head() -> None:
    """Those that no tiny model above is of, too."""
    found = 0
    for (path, name), part in families.PARTS.items():
        if isinstance(part, families.LossHead) and not part.without:
            cls = getattr(importlib.import_module(path), name)
            new = rewrite.rebuild(cls.forward, families.loss_head(), {"causal_loss": None, "token_loss": None})
            assert len(new.places) == 1, name
            found += 1
    assert found == 25


@pytest.mark.parametrize(("title", "name"), [("BERT", "BertForPreTraining"), ("GPT-2", "GPT2DoubleHeadsModel")])
def test_models_with_two_losses_are_left(title: str, name: str) -> None:
    import transformers

    with rooftile.patch(getattr(transformers, name)(build(title).config)) as handle:
        assert f"1 {KIND} ({name}): it has two losses of its own" in map(str, handle.left)


def test_heads_of_other_dtypes_are_left() -> None:
    model, ids = trained("Llama").double(), tokens()
    _, loss, grads = run(model, ids)
    with rooftile.patch(model) as handle:
        assert any(left.kind == KIND and "dtype torch.float64" in left.reason for left in handle.left)
        _, patched_loss, patched = run(model, ids)
    assert torch.equal(patched_loss, loss)
    assert_same_gradients(patched, grads)
