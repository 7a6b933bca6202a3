"""Patched models in transformers' Trainer, and those that are patched when they are loaded."""

import contextlib
import re
import types

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

import transformers
from helpers import Calls
from tiny_models import DEVICE, TOLERANCE, build, error, tokens

import rooftile
from rooftile.huggingface.trainer import CountingCollator
from rooftile.ops.fused_head import head

KIND = "head + cross entropy"
STEPS = 2


def texts(n: int = 8, length: int = 10) -> list[dict[str, torch.Tensor]]:
    """Each with another number of labels that count: a mean of means is not the mean."""
    found = []
    for i, ids in enumerate(tokens(length, batch=n).cpu()):
        labels = ids.clone()
        labels[: i % (length - 2)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer(model: nn.Module | None, folder: object, *callbacks: object, more: object = None, **options: object):  # type: ignore[no-untyped-def]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-3,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=DEVICE.type == "cpu", seed=3, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model, arguments, train_dataset=texts(), eval_dataset=texts(4), callbacks=[*callbacks], **(more or {})
    )


def losses(trained: object) -> torch.Tensor:
    return torch.tensor([log["loss"] for log in trained.state.log_history if "loss" in log])  # type: ignore[attr-defined]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters() if p.requires_grad])


def both(title: str, folder: object, **options: object):  # type: ignore[no-untyped-def]
    """Trainers of the plain and of the patched model, after training, and the ops of the latter."""
    plain = trainer(build(title), folder, **options)
    plain.train()
    ours = trainer(build(title), folder, rooftile.PatchCallback(), **options)
    with Calls() as ops:
        ours.train()
    return plain, ours, [op._schema.name.partition("::")[2] for op, _, _ in ops.calls]


def assert_alike(ours: object, plain: object, tolerance: float) -> None:
    assert losses(plain).numel() == STEPS
    assert error(losses(ours), losses(plain)) < tolerance
    # AdamW's steps have the size of the learning rate whatever the gradient's: rounding decides where that is nearly 0.
    assert error(weights(ours.model), weights(plain.model)) < 100 * tolerance  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        pytest.param({"gradient_checkpointing": True, "max_grad_norm": 0.1}, marks=pytest.mark.nightly),
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.nightly),
    ],
    ids=["accumulation", "checkpointing", "label-smoothing"],
)
def test_a_callback_patches_and_training_is_the_same(tmp_path: object, options: dict[str, object]) -> None:
    plain, ours, ops = both("Qwen3", tmp_path, **options)
    # The Trainer smooths labels by logits of its own.
    times = 0 if "label_smoothing_factor" in options else STEPS * options.get("gradient_accumulation_steps", 1)
    assert ops.count("linear_cross_entropy") == times
    assert_alike(ours, plain, 1e-5)
    (callback,) = (c for c in ours.callback_handler.callbacks if isinstance(c, rooftile.PatchCallback))
    assert callback.handle is rooftile.PatchHandle.of(ours.model)
    assert callback.handle.replaced[KIND] == 1


def test_bf16_of_the_trainer_is_autocast(tmp_path: object) -> None:
    plain, ours, ops = both("Llama", tmp_path, bf16=True)
    assert ops.count("linear_cross_entropy") == STEPS
    assert_alike(ours, plain, 1e-3)
    exact = trainer(build("Llama"), tmp_path)
    exact.train()
    assert error(losses(ours), losses(exact)) <= max(error(losses(plain), losses(exact)), 2.0**-10)


@pytest.mark.nightly  # test_patch_training.py has a step of theirs
def test_encoder_decoders_train_alike(tmp_path: object) -> None:
    plain = build("T5 v1.1", dropout_rate=0.0)
    ours = build("T5 v1.1", dropout_rate=0.0)
    rooftile.patch(ours)
    results = [trainer(model, tmp_path) for model in (plain, ours)]
    for each in results:
        each.train()
    assert_alike(results[1], results[0], 1e-5)


def test_evaluation_gives_the_metrics_their_logits(tmp_path: object) -> None:
    def metrics(prediction: object) -> dict[str, float]:
        return {"mean": float(prediction.predictions.mean())}  # type: ignore[attr-defined]

    found = []
    for callbacks in ([], [rooftile.PatchCallback()]):
        evaluated = trainer(build("Llama"), tmp_path, *callbacks, more={"compute_metrics": metrics})
        found.append(evaluated.evaluate())
    assert found[1]["eval_mean"] == pytest.approx(found[0]["eval_mean"], rel=1e-4)
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-6)


@pytest.mark.nightly  # test_patch_training.py, test_patch_lora.py
def test_lora_trains_alike(tmp_path: object) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted() -> nn.Module:
        model = build("Llama")
        torch.manual_seed(4)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))

    plain, ours = trainer(adapted(), tmp_path), trainer(adapted(), tmp_path, rooftile.PatchCallback(attention=True))
    plain.train()
    with Calls() as ops:
        ours.train()
    assert sum(op._schema.name == "rooftile::linear_cross_entropy" for op, _, _ in ops.calls) == STEPS
    assert_alike(ours, plain, 1e-5)
    assert {name for name, p in ours.model.named_parameters() if p.grad is not None} <= {
        name for name, _ in ours.model.named_parameters() if "lora_" in name
    }


def test_the_optimizer_takes_the_place_of_the_trainers(tmp_path: object) -> None:
    arguments = {"lr": 1e-3, "weight_decay": 0.1}
    results = []
    for optimizer in (torch.optim.AdamW, rooftile.optim.AdamW):
        more = {"optimizer_cls_and_kwargs": (optimizer, arguments)}
        each = trainer(build("Llama"), tmp_path, rooftile.PatchCallback(), more=more, weight_decay=0.1)
        each.train()
        results.append(each)
    plain, ours = results
    assert isinstance(ours.optimizer.optimizer, rooftile.optim.AdamW)
    assert_alike(ours, plain, 1e-6)


@pytest.mark.nightly  # the optimizer's state: test_optim_state.py
def test_training_resumes_from_a_checkpoint(tmp_path: object) -> None:
    more = {"optimizer_cls_and_kwargs": (rooftile.optim.AdamW, {"lr": 1e-3})}
    whole = trainer(build("Llama"), tmp_path, rooftile.PatchCallback(), more=more)
    whole.args.save_strategy, whole.args.save_steps = "steps", 2
    whole.train()
    rest = trainer(build("Llama", tie_word_embeddings=False), tmp_path, rooftile.PatchCallback(), more=more)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # type: ignore[operator]
    assert torch.equal(weights(rest.model), weights(whole.model))


def test_models_of_model_init_are_patched(tmp_path: object) -> None:
    callback = rooftile.PatchCallback(rope=False)
    trained = trainer(None, tmp_path, callback, more={"model_init": lambda: build("Llama")})
    first = callback.handle
    trained.train()
    assert callback.handle is rooftile.PatchHandle.of(trained.model)
    assert callback.handle is not first
    assert callback.handle.replaced[KIND] == 1
    assert callback.handle.replaced["RoPE"] == 0


def test_a_patched_model_is_left_as_it_is_by_the_callback(tmp_path: object) -> None:
    model = build("Llama")
    handle = rooftile.patch(model, mlp=False)
    callback = rooftile.PatchCallback(linear=True, rope=True)
    with pytest.warns(UserWarning, match="is patched already, with linear=False; undo"):
        trainer(model, tmp_path, callback)
    assert callback.handle is handle


def test_evaluation_of_the_loss_alone_computes_no_logits(tmp_path: object) -> None:
    callback = rooftile.PatchCallback()
    evaluated = trainer(build("Llama"), tmp_path, callback, prediction_loss_only=True)
    with Calls() as ops:
        found = evaluated.evaluate()
    assert sum(op._schema.name == "rooftile::linear_cross_entropy" for op, _, _ in ops.calls) == 1
    callback.handle.undo()
    assert found["eval_loss"] == pytest.approx(evaluated.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.each_once
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("by", ["undo", "unpatch", "with"])
def test_undo_after_a_trainer_with_bf16_keeps_its_autocast(tmp_path: object, by: str, again: bool) -> None:
    """accelerate wraps the model's forward, once for each training."""
    model, ids = build("Llama"), tokens()
    handle = rooftile.patch(model, linear=True, attention=True)
    with handle if by == "with" else contextlib.nullcontext():
        for _ in range(1 + again):
            trained = trainer(model, tmp_path, bf16=True)
            trained.train()
        if by == "undo":
            handle.undo()
        elif by == "unpatch":
            rooftile.unpatch(model)
    assert rooftile.PatchHandle.of(model) is None
    assert {n for n, module in model.named_modules() if "forward" in module.__dict__} == {""}
    plain = build("Llama")
    plain.load_state_dict(model.state_dict())
    for training in (True, False):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            expected = plain.train(training)(ids, labels=ids)
        with Calls() as ops:
            found = model.train(training)(ids, labels=ids)
        assert not any("rooftile" in op._schema.name for op, _, _ in ops.calls)
        assert torch.equal(found.logits, expected.logits.float())
        assert torch.equal(found.loss, expected.loss)
    trained.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert rooftile.patch(model).replaced[KIND] == 1


def test_a_patch_after_a_trainer_with_bf16_warns_that_the_head_is_left(tmp_path: object) -> None:
    model = build("Llama")
    trainer(model, tmp_path, bf16=True).train()
    reason = r"accelerate has wrapped its forward \(mixed precision\): patch before accelerator\.prepare"
    with pytest.warns(UserWarning, match=rf"leaves head \+ cross entropy \(LlamaForCausalLM\): {reason}"):
        handle = rooftile.patch(model)
    assert handle.replaced[KIND] == 0
    assert handle.replaced["RMSNorm"] == 5
    assert [left.understood for left in handle.left if re.match(reason, left.reason)] == [True]
    handle.undo()


def test_undo_after_accelerate_has_unwrapped_the_model(tmp_path: object) -> None:
    model = build("Llama")
    with rooftile.patch(model):
        trained = trainer(model, tmp_path, bf16=True)
        trained.train()
        trained.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    plain = build("Llama")
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)


@pytest.mark.parametrize("packed", [False, True])
def test_tokens_without_a_label_are_not_multiplied(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """The callback counts the labels of each batch where the host has them; accumulated batches have unequal counts."""
    shapes, gemm = [], head.dispatch.gemm
    monkeypatch.setattr(
        head.dispatch, "gemm", lambda op, x, *args, **given: shapes.append(x.shape) or gemm(op, x, *args, **given)
    )
    more = {"data_collator": transformers.DataCollatorWithFlattening()} if packed else None
    plain, ours, ops = both("Llama", tmp_path, more=more, gradient_accumulation_steps=2)
    rows = [shape[0] for shape in shapes[::3]]  # of the logits; the two gradients follow
    assert ops.count("linear_cross_entropy") == len(rows) == len(texts()) / 2
    # The first label of a packed sequence would be predicted by the sequence before it.
    assert sum(rows) == sum(int((text["labels"][int(packed) :] != -100).sum()) for text in texts()) < 8 * 10
    assert_alike(ours, plain, 1e-5)


def test_batches_are_counted_only_where_that_leaves_out_tokens() -> None:
    counting = CountingCollator(lambda batch: batch)
    few = torch.tensor([[-100, 5, -100, 7]])
    assert counting({"labels": few})["valid_rows"] == 2
    assert counting({"labels": few, "shift_labels": few[:, 1:]})["valid_rows"] == 2
    assert counting(transformers.BatchEncoding({"labels": few}))["valid_rows"] == 2
    assert counting({"labels": few, "valid_rows": 3})["valid_rows"] == 3
    for whole in ({"labels": few.abs()}, {"input_ids": few}, {"labels": few.to("meta")}, [few], {"labels": [1, -100]}):
        assert "valid_rows" not in counting(whole)


@pytest.mark.parametrize(
    ("title", "switches", "counts"),
    [
        ("Llama", {}, True),
        ("Llama", {"linear_cross_entropy": False}, False),
        ("BERT", {}, False),
        ("T5 v1.1", {}, False),
    ],
)
def test_labels_are_counted_only_for_a_head_that_leaves_out_tokens(
    tmp_path: object, title: str, switches: dict[str, bool], counts: bool
) -> None:
    """The head of an encoder or an encoder-decoder is fused too, but its loss shifts nothing, and takes no count."""
    callback = rooftile.PatchCallback(**switches)
    ours = trainer(build(title), tmp_path, callback)
    loader = ours.get_train_dataloader()
    callback.on_train_begin(ours.args, None, None, model=ours.model, train_dataloader=loader)
    assert callback.handle.replaced[KIND] == (not switches)
    assert ("valid_rows" in next(iter(loader))) is counts


def test_streamed_batches_that_accelerate_dispatches_are_left(tmp_path: object) -> None:
    class Stream(torch.utils.data.IterableDataset[object]):
        def __iter__(self) -> object:
            return iter(texts())

    for dispatch in (None, False):
        ours = trainer(
            build("Llama"), tmp_path, rooftile.PatchCallback(), accelerator_config={"dispatch_batches": dispatch}
        )
        ours.train_dataset = Stream()
        with Calls() as ops:
            ours.train()
        counts = [args[-2] for op, args, _ in ops.calls if op._schema.name == "rooftile::linear_cross_entropy"]
        assert len(counts) == STEPS
        assert (min(counts) >= 0) is (dispatch is False)


def test_several_gpus_in_one_process_are_refused(tmp_path: object) -> None:
    arguments = types.SimpleNamespace(n_gpu=2, prediction_loss_only=False)
    with pytest.raises(ValueError, match="has 2 GPUs in one process"):
        rooftile.PatchCallback().on_init_end(arguments, None, None, model=build("Llama"))


def test_the_callback_refuses_wrong_switches() -> None:
    with pytest.raises(TypeError, match="PatchCallback: rope is 1, expected True or False"):
        rooftile.PatchCallback(rope=1)
    with pytest.raises(TypeError, match=r"ropes is not a switch of rooftile.patch; did you mean rope\?"):
        rooftile.PatchCallback(ropes=True)
    with pytest.raises(TypeError, match=r"foo is not a switch of rooftile\.patch; expected one of rms_norm, "):
        rooftile.PatchCallback(foo=True)


def test_models_are_patched_when_they_are_loaded(tmp_path: object) -> None:
    model, ids = build("Llama").eval(), tokens()
    model.save_pretrained(tmp_path)
    loaded = rooftile.AutoModelForCausalLM.from_pretrained(tmp_path, linear=True, rope=False, dtype=torch.float32)
    assert type(loaded) is type(model)
    handle = rooftile.PatchHandle.of(loaded)
    assert handle.replaced["linear"] == 15
    assert handle.replaced["RoPE"] == 0
    loaded = loaded.to(DEVICE)
    assert error(loaded(ids).logits, model(ids).logits) < TOLERANCE[torch.float32]
    handle.undo()
    assert rooftile.PatchHandle.of(loaded) is None

    made = rooftile.AutoModelForCausalLM.from_config(model.config, attention=True)
    assert rooftile.PatchHandle.of(made).replaced["attention"] == 2
    with pytest.raises(TypeError, match="rope is 'yes'"):
        rooftile.AutoModelForCausalLM.from_config(model.config, rope="yes")
    with pytest.raises(TypeError, match=r"AutoModelForCausalLM.from_config: add_rmsnorm .* did you mean add_rms_norm"):
        rooftile.AutoModelForCausalLM.from_config(model.config, add_rmsnorm=True)
    with pytest.raises(TypeError, match=r"from_pretrained: atention .* did you mean attention"):
        rooftile.AutoModelForCausalLM.from_pretrained("no/such-model", atention=True)
    for absent in ("./no-such", tmp_path / "no-such"):
        with pytest.raises(FileNotFoundError, match="no-such does not exist; expected a checkpoint's folder,"):
            rooftile.AutoModelForCausalLM.from_pretrained(absent)
    for args, named in ((("demo",), {}), ((), {"pretrained_model_name_or_path": "demo"})):
        demo = rooftile.AutoModelForCausalLM.from_pretrained(*args, **named)
        assert any(rooftile.PatchHandle.of(demo).replaced.values())
    biased = rooftile.AutoModelForCausalLM.from_pretrained(tmp_path, attention_bias=True, rms_norm_eps=1e-4)
    assert biased.config.attention_bias
    with pytest.raises(TypeError, match="from_pretrained"):
        rooftile.AutoModelForCausalLM()
