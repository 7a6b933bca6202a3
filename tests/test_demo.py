"""The demo's text and comparison, and `rooftile bench prefill` on a tiny model."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from typer.testing import CliRunner

from rooftile import cli, runtime
from rooftile.bench import prefill, workloads
from rooftile.bench.prefill import model as prefill_model
from rooftile.bench.prefill.report import COMPILE, EAGER, OURS_COMPILE
from rooftile.bench.rows import OURS, read_json
from rooftile.cases import find_cases
from rooftile.cases.check import CheckRow
from rooftile.demo import byte_model
from rooftile.demo import compare as demo
from rooftile.demo.__main__ import WIDTH, show_families
from rooftile.huggingface.random_model import random_model
from rooftile.huggingface.small_models import MODELS

DEVICE = runtime.default_device()


def test_text_is_a_few_kilobytes_of_ascii() -> None:
    tokens = demo.text(1 << 20, DEVICE)
    assert 2000 < tokens.shape[1] < 8000
    assert int(tokens.max()) < 128


@pytest.mark.nightly  # `.ci/run` runs `make demo`
@pytest.mark.skipif(runtime.MODE is runtime.Mode.GPU, reason="on a GPU it also measures whole models, for minutes")
def test_the_page_has_at_most_60_lines_and_names_the_file_with_every_row(tmp_path: Path) -> None:
    details = tmp_path / "details.txt"
    command = [sys.executable, "-m", "rooftile.demo", "--details", str(details)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= WIDTH
    assert any(str(details) in line for line in lines)
    assert details.read_text().count("PASS") > 500


def test_a_family_shows_its_failures_and_its_largest_error() -> None:
    row = CheckRow("rms_norm", "4x8", {}, "bf16", "forward", "y", 1e-3, 2e-3, 1e-3, True)
    wrong = dataclasses.replace(row, error=4e-3, passed=False)
    page = Console(file=io.StringIO(), width=WIDTH)
    show_families(find_cases(["rms_norm"]), [row, wrong], page)
    line = next(x for x in page.file.getvalue().splitlines() if "rms_norm" in x)  # type: ignore[attr-defined]
    assert line.split() == ["rms_norm", "2", "2.00", "1", "FAIL"]


@pytest.mark.nightly  # `make demo` does the same with every model
@pytest.mark.parametrize("title", ["Llama", "T5 v1.1", "GPT-2", "BERT", "Gemma 3"])
def test_demo_compares_a_model(title: str) -> None:
    model = next(m for m in MODELS if m.title == title)
    result = demo.compare(model, demo.text(32, DEVICE), dtype=torch.bfloat16)
    assert result.passed
    assert 4.0 < result.plain_loss < 8.0  # random weights: near ln 256
    assert abs(result.plain_loss - result.patched_loss) < 1e-2
    wrong = dataclasses.replace(result, patched_error=2 * result.bound)
    assert not wrong.passed
    for show in (demo.show, demo.show_short):
        out = io.StringIO()
        show([result, wrong], 32, Console(file=out, width=200))
        assert [verdict in out.getvalue() for verdict in ("PASS", "FAIL")] == [True, True]


def test_config_is_found_by_name_file_and_folder(tmp_path: Path) -> None:
    title, config = prefill_model.load_config("qwen2.5-7b")
    assert (title, config.hidden_size, config.num_hidden_layers) == ("qwen2.5-7b", 3584, 28)
    path = tmp_path / "mine" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(workloads.MODELS["tiny"]))
    for name in (path, path.parent):
        title, config = prefill_model.load_config(str(name), layers=1)
        assert (title, config.num_hidden_layers) == ("mine-1-layers", 1)
    with pytest.raises(ValueError, match=r"expected llama-3-8b, granite-8b-code, qwen2\.5-7b, "):
        prefill_model.load_config("nothing")
    path.write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ValueError, match="transformers makes no configuration"):
        prefill_model.load_config(str(path))


def test_random_model_is_a_function_of_its_seed_and_refuses_what_speaks_no_language() -> None:
    _, config = prefill_model.load_config("tiny")
    first, again, other = (random_model(config, dtype=torch.float32, device=DEVICE, seed=s) for s in (0, 0, 1))
    weights = [m.model.layers[0].mlp.up_proj.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    from transformers import ViTConfig

    with pytest.raises(ValueError, match="ViTConfig has no language model"):
        random_model(ViTConfig(), dtype=torch.float32, device=DEVICE)


def test_twin_shares_the_weights_and_not_the_patch() -> None:
    _, config = prefill_model.load_config("tiny")
    model = random_model(config, dtype=torch.float32, device=DEVICE)
    twin = prefill_model.twin(model)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    prefill.patch(twin)
    assert "forward" in twin.model.norm.__dict__
    assert "forward" not in model.model.norm.__dict__


@pytest.mark.nightly  # the benchmark's
@pytest.mark.skipif(
    runtime.MODE is runtime.Mode.GPU,
    reason="checks what the command writes where it measures nothing; here it would measure",
)
def test_prefill_command_writes_rows_that_are_no_measurement(tmp_path: Path) -> None:
    out = tmp_path / "prefill.json"
    arguments = ["bench", "prefill", "--model", "tiny", "--tokens", "8,12", "--layers", "1", "--json", str(out)]
    done = CliRunner().invoke(cli.app, [*arguments, "--plot", str(tmp_path)])
    assert done.exit_code == 0, done.output
    meta, rows = read_json(out)
    assert meta["note"] == "interpreter, not a measurement"
    replaced = {kind: count for kind, count in meta["replaced"].items() if count}
    assert replaced == {"RMSNorm": 3, "residual add + RMSNorm": 1, "SwiGLU": 1, "RoPE": 1, "head + cross entropy": 1}
    assert [(r.op, r.shape.rpartition(" ")[2], r.impl) for r in rows] == [
        (op, length, impl) for length in ("T8", "T12") for op in ("prefill", "layer_ops") for impl in (EAGER, OURS)
    ]
    assert all(r.status == "ok" and r.us for r in rows)
    assert (tmp_path / "prefill-tiny-1-layers.png").stat().st_size > 0

    refused = CliRunner().invoke(cli.app, [*arguments, "--results", str(tmp_path)])
    assert refused.exit_code == 2
    assert CliRunner().invoke(cli.app, ["bench", "prefill", "--model", "nothing"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["bench", "prefill", "--tokens", "0"]).exit_code == 2


def test_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    from safetensors import safe_open

    settings = prefill.Settings(weights=str(byte_model()), tokens=[8], layers=1, dtype=torch.float32, iters=1)
    run = prefill.Prefill(settings, Console(quiet=True))
    with safe_open(byte_model() / "model.safetensors", "pt") as file:
        expected = file.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(run.plain.model.layers[0].mlp.up_proj.weight.cpu(), expected.float())  # type: ignore[union-attr,index]
    assert (run.title, len(run.plain.model.layers)) == ("byte_model-1-layers", 1)  # type: ignore[union-attr,arg-type]
    run.run()
    assert {row.status for row in run.rows} == {"ok"}
    (tmp_path / "config.json").write_text((byte_model() / "config.json").read_text())
    with pytest.raises(ValueError, match="no file named"):
        prefill.Prefill(dataclasses.replace(settings, weights=str(tmp_path)), Console(quiet=True))


def test_wrong_logits_fail_untimed() -> None:
    run = prefill.Prefill(
        prefill.Settings(model="tiny", tokens=[8], layers=1, dtype=torch.float32, iters=1), Console(quiet=True)
    )
    with torch.no_grad():
        run.ours.lm_head.weight = torch.nn.Parameter(2 * run.ours.lm_head.weight)
    run.run()
    row = next(r for r in run.rows if r.impl == OURS and r.op == "prefill")
    assert (row.status, row.us) == ("FAIL", None)
    assert "logits differ" in row.message


def test_layer_ops_count_what_the_patch_replaced() -> None:
    _, config = prefill_model.load_config("tiny")
    model = random_model(config, dtype=torch.float32, device=DEVICE)
    handle = prefill.patch(prefill_model.twin(model))
    ids = torch.zeros(1, 4, dtype=torch.long, device=DEVICE)
    plain, ours = prefill_model.layer_ops(model, handle, ids)
    names = [call.func.__name__ for call in ours.args[0]]  # type: ignore[attr-defined]
    assert len(plain.args[0]) == len(names)  # type: ignore[attr-defined]
    assert {n: names.count(n) for n in names} == {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, "silu_mul": 2}


def test_names_of_the_implementations_are_the_schemas() -> None:
    assert (EAGER, OURS, COMPILE, OURS_COMPILE) == ("eager", "rooftile", "compile", "rooftile+compile")
