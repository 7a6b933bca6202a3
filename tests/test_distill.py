"""examples/distill.py at tiny size: the student comes nearer to its teacher, which stays as it is."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import kl_div

from rooftile.byte_model import library_text

pytest.importorskip("transformers", reason="transformers is not installed")
EXAMPLE = Path(__file__).parent.parent / "examples" / "distill.py"
SMALL = ["--hidden", "32", "--batch", "2", "--length", "24"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("distill", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _little_text(monkeypatch):
    files = library_text.held_out_files()
    monkeypatch.setattr(library_text, "training_files", lambda: files[:2])


def test_the_student_comes_nearer_to_its_teacher(example, device, capsys):
    losses = example.distill(example.arguments([*SMALL, "--steps", "3", "--lr", "2e-2"]), device)
    assert losses[-1] < losses[0]
    found = [float(number) for number in re.findall(r"KL ([\d.]+) nats", capsys.readouterr().out)]
    assert len(found) == 2
    assert found[1] < 0.9 * found[0]


@pytest.mark.parametrize("text", ["0.0", "0.5"])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(example, text, device):
    options = example.arguments([*SMALL, "--text", text])
    torch.manual_seed(1)
    student, teacher = example.models(options, device)
    tokens = library_text.windows(library_text.tokens(library_text.training_files()), 24, 2).to(device)
    loss = example.loss_of(student, teacher, tokens, options)
    loss.backward()
    found = {name: p.grad for name, p in student.named_parameters()}

    student.zero_grad()
    x, t = (model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1).float() for model in (student, teacher))
    soft = [(logits / options.temperature).log_softmax(-1) for logits in (x, t)]
    expected = options.temperature**2 * kl_div(*soft, log_target=True, reduction="batchmean")
    share = float(text)
    expected = (1 - share) * expected
    expected = expected + share * torch.nn.functional.cross_entropy(x, tokens[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in teacher.parameters())
    for name, p in student.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)
