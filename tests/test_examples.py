"""The scripts in examples/ run, at sizes for the interpreter."""

import json
import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.nightly  # training, saving and writing have tests of their own
def test_a_byte_model_is_trained_saved_and_writes(tmp_path, capsys):
    out = tmp_path / "model"
    main = runpy.run_path(str(EXAMPLES / "train_bytes.py"))["main"]
    main(["--tiny", "--new", "4", "--out", str(out), "--json", str(tmp_path / "made" / "run.json")])
    shown = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+) +[\d,]+ tokens/s", shown)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert re.search(r"held-out loss \d\.\d+ nats a byte", shown)
    assert "replaced: 15 linear" in shown
    assert "replaced: 2 attention" in shown
    assert re.findall(r"^-+\n(def |class |import |    for )", shown, re.MULTILINE) == [
        "def ",
        "class ",
        "import ",
        "    for ",
    ]
    assert (out / "model.safetensors").is_file()
    run = json.loads((tmp_path / "made" / "run.json").read_text(encoding="utf-8"))["run"]
    assert [round(each["loss"], 4) for each in run["losses"]] == losses
    assert [text[:4] for text in run["texts"]] == ["def ", "clas", "impo", "    "]
