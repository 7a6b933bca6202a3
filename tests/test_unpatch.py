"""`rooftile.unpatch`: a way back from a patch whose handle was dropped."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tiny_models import build, tokens

import rooftile
from rooftile.huggingface.replacing import is_ours


def is_patched(model):
    return any(is_ours(method) for module in model.modules() for method in module.__dict__.values())


@pytest.mark.parametrize("options", [{}, {"linear": True, "attention": True}], ids=["norms", "all"])
def test_a_patch_whose_handle_was_dropped_can_be_undone(options):
    model, ids = build("Llama"), tokens()
    before, implementation = model(ids).logits, model.config._attn_implementation
    attributes = {name: {*module.__dict__} for name, module in model.named_modules()}
    rooftile.patch(model, **options)
    assert is_patched(model)
    rooftile.unpatch(model)
    assert not is_patched(model)
    assert {name: {*module.__dict__} for name, module in model.named_modules()} == attributes
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids).logits, before)


def test_a_patch_of_attention_alone_can_be_undone():
    model = build("Llama")
    off = dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "mlp", "rope"), False)
    before = model.config._attn_implementation
    rooftile.patch(model, **off, attention=True)
    rooftile.unpatch(model)
    assert model.config._attn_implementation == before


def test_what_holds_a_patched_model_and_its_copies_can_be_unpatched():
    model, ids = build("Llama"), tokens()
    before = model(ids).logits
    handle = rooftile.patch(model)
    copied = copy.deepcopy(model)
    rooftile.unpatch(nn.ModuleList([copied]))
    assert not is_patched(copied)
    assert is_patched(model)
    assert handle.active
    assert torch.equal(copied(ids).logits, before)
    handle.undo()
    assert not is_patched(model)


def test_a_pickled_model_carries_no_patch_and_can_be_patched():
    model = build("Llama")
    rooftile.patch(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert not is_patched(loaded)
    with pytest.raises(ValueError, match="not patched"):
        rooftile.unpatch(loaded)
    rooftile.patch(loaded).undo()


def test_what_is_not_patched_is_refused():
    with pytest.raises(ValueError, match="Linear is not patched"):
        rooftile.unpatch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        rooftile.unpatch("model")
    model = build("Llama")
    rooftile.patch(model)
    with pytest.raises(ValueError, match=r"rooftile\.unpatch"):
        rooftile.patch(model)


def test_the_handle_keeps_no_model_alive():
    model = build("Llama")
    rooftile.patch(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
