"""What the host does for a token that a patched model decodes: in eager mode it bounds the step."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from tiny_models import DEVICE, build, tokens
from transformers import DynamicCache

import rooftile
from rooftile import huggingface

FOLDER = str(Path(huggingface.__file__).parent)
LAYERS = 3


@pytest.fixture(scope="module")
def step():
    """A step of one token of a patched model, which was run before."""
    model = build("Llama", torch.bfloat16, num_hidden_layers=LAYERS)
    rooftile.patch(model, linear=True, attention=True)
    cache, ids = DynamicCache(config=model.config), tokens(5)

    def once(ids=ids[:, :1]):
        with torch.no_grad():
            return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    once(ids)
    once()
    return once


def test_the_patch_makes_few_python_calls_a_layer(step):
    """58 a layer when each weight was asked by calls of its own, and attention's arguments were a frozen dataclass."""
    calls = Counter()

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER):
            calls[Path(code.co_filename).name] += 1

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    outside = 2  # the last norm and lm_head, some calls each
    assert calls.total() <= 36 * LAYERS + 8 * outside, calls


def test_a_decoded_token_fills_no_memory(step):
    """The length of a single sequence is a view: to fill a tensor is a kernel for each layer."""

    class Filled(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    with Filled() as seen:
        step()
    assert not {"aten::full", "aten::fill_", "aten::zeros", "aten::ones"} & {*seen.names}, seen.names


def test_lengths_of_one_sequence_are_those_asked_for():
    from rooftile.huggingface.attention import _lengths

    for n in (1, 7, 4095, 4096, 9000):
        length = _lengths(n, 1, DEVICE)
        assert length.tolist() == [n]
        assert length.data_ptr() % 16 == 0, "a kernel is compiled anew for another alignment"
    assert _lengths(5, 3, DEVICE).tolist() == [5, 5, 5]


def test_weights_that_were_joined_are_found_again_by_their_addresses():
    from rooftile.huggingface import memory

    parts = [torch.nn.Parameter(torch.randn(n, 32, device=DEVICE)) for n in (8, 4, 4)]
    whole, moved = torch.cat([p.detach() for p in parts]), memory.Memory([parts])
    for _ in range(2):  # the second time by what the first one has found
        assert torch.equal(memory.joined(parts), whole)
    assert memory.joined(parts[:2]).shape == (12, 32)
    assert torch.equal(memory.joined(parts), whole)
    parts[1].data = parts[1].detach().t().contiguous().t()
    assert memory.joined(parts) is None
    parts[1].data = parts[1].detach().contiguous()
    assert memory.joined(parts) is None
    address = parts[0].data_ptr()
    moved.undo()
    assert memory.joined(parts) is None
    del moved
    memory.Memory([])  # which forgets memory that is gone
    assert address not in memory._FOUND
