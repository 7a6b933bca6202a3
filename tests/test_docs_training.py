"""The documentation's example of training runs, with a small model of its own."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

import tokenizers
import transformers
from tiny_models import build

import rooftile

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "train.md"


def test_the_example_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build("Qwen3", torch.bfloat16, num_hidden_layers=1).save_pretrained("model")
    letters = {chr(97 + i): i for i in range(26)}
    splits = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="a"))
    words.pre_tokenizer = splits
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("model")
    Path("text.txt").write_text("thequickbrownfoxjumpsoverthelazydog" * 4, encoding="utf-8")

    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    for old, new in (
        ("Qwen/Qwen3-0.6B", "model"),
        ("torch.nn.functional.__file__", "'text.txt'"),
        ("length = 1024", "length = 16"),
        ("max_steps=100, logging_steps=10", "max_steps=2, logging_steps=1, report_to=[], save_strategy='no'"),
    ):
        assert old in example
        example = example.replace(old, new)
    names: dict[str, object] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    engine = rooftile.Engine.from_pretrained("trained", max_batch=1, max_seq_len=16)
    (made,) = engine.generate(["the"], max_new_tokens=2, ignore_eos=True)
    assert len(made.tokens) == 2
    assert "replaced: 1 head + cross entropy" in capsys.readouterr().out
    trainer = names["trainer"]
    assert [log["loss"] > 0 for log in trainer.state.log_history if "loss" in log] == [True, True]  # type: ignore[attr-defined]
    assert all("master_param" in state for state in trainer.optimizer.state.values())  # type: ignore[attr-defined]


def test_every_link_of_the_page_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).is_file(), target
