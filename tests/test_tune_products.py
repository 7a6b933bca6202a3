"""What `rooftile tune` knows of matrix products: their space, their numbers, the models that they are in."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from rooftile import runtime, tuning
from rooftile.bench import workloads
from rooftile.bench.timer import clock
from rooftile.bench.tune import report as tune_report
from rooftile.bench.tune.search import Search, Seconds, verify
from rooftile.bench.tune.space import LIMITS, TUNABLES, label
from rooftile.cli import app
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig

pytestmark = pytest.mark.nightly

SM_90 = runtime.TARGETS["sm_90"]


@pytest.mark.parametrize("op", list(TUNABLES))
@pytest.mark.parametrize("m", [1, 3, 64, 200])
def test_every_configuration_of_the_space_is_one_that_its_kernel_takes(op, m):
    tunable = TUNABLES[op]
    problem = tunable.problem(m, 4096, 1024, torch.bfloat16, "ieee")
    space = tunable.space(problem, SM_90, False)
    assert 8 <= len(space) == len(set(space)) <= 64
    assert all(choose.can_implement(problem, c, SM_90) is None for c in space)
    assert all(GemmConfig(**tunable.fields(c)) == c for c in space)
    wider = tunable.space(problem, SM_90, True)
    assert set(space) <= set(wider)
    assert len(wider) > 5 * len(space)


def test_the_default_is_what_is_chosen_without_a_table(monkeypatch):
    tunable = TUNABLES["linear"]
    problem = tunable.problem(16, 4096, 4096, torch.bfloat16, "ieee")
    without = tunable.default(problem, SM_90)
    other = next(c for c in tunable.space(problem, SM_90, False) if c != without)
    monkeypatch.setattr(tuning, "_lookup", lambda op, key, target: tunable.fields(other))
    assert choose.choose(problem, SM_90) == other
    assert tunable.default(problem, SM_90) == without


@pytest.mark.parametrize("op", list(TUNABLES))
def test_a_product_is_what_its_reference_says(op, device):
    tunable = TUNABLES[op]
    problem = tunable.problem(5, 48, 40, torch.float32, "ieee")
    inputs = tunable.draw(problem, device, torch.Generator(device).manual_seed(0))
    reference = tunable.reference(problem, inputs)
    assert reference.shape == (5, 48)
    config = tunable.default(problem, runtime.target(device))
    assert verify(tunable, problem, lambda: tunable.call(problem, inputs, config), reference) < 1e-5
    torch.testing.assert_close(tunable.call_peer(problem, inputs), reference, rtol=1e-4, atol=1e-4)


def test_a_layers_gradients_are_products_of_its_sizes():
    product = workloads.GemmShape("qkv", 6144, 4096)
    sizes = {}
    for op in ("linear", "matmul_nn", "matmul_tn"):
        p = TUNABLES[op].problem_in(product, 256, torch.bfloat16, "ieee")
        sizes[op] = (p.m, p.n, p.k, p.x_layout, p.w_layout)
    assert sizes == {
        "linear": (256, 6144, 4096, "k", "k"),
        "matmul_nn": (256, 4096, 6144, "k", "n"),
        "matmul_tn": (6144, 4096, 256, "m", "n"),
    }
    assert TUNABLES["gated_linear"].problem_in(product, 256, torch.bfloat16, "ieee") is None
    pair = workloads.GemmShape("gate_up", 28672, 4096, gated=True)
    assert TUNABLES["gated_linear"].problem_in(pair, 1, torch.bfloat16, "ieee").n == 14336


def test_ratios_need_every_product_of_the_layer():
    entry = {"dtype": "bf16", "layout": "nt", "gated": False, "us": 1.0, "default_us": 2.0, "peer_us": None}
    sizes = {p.name: (p.n, p.k) for p in workloads.load("tiny")[1]}
    entries = [{**entry, "m": m, "n": n, "k": k} for m in (1, 2) for n, k in sizes.values()]
    entries = [e for e in entries if (e["m"], e["n"], e["k"]) != (2, *sizes["down"])]
    (layer,) = tune_report.layers(entries, dict([workloads.load("tiny")]))
    assert (layer.m, layer.us, layer.default_us, layer.peer_us) == (1, 4.0, 8.0, None)


def test_a_label_tells_every_field():
    tunable = TUNABLES["linear"]
    config = tunable.default(tunable.problem(16, 4096, 4096, torch.bfloat16, "ieee"), SM_90)
    assert re.fullmatch(r"skinny block_m=16( \w+=(\d+|False))+", label(tunable, config))


# Models


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3-8b", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]),
        ("granite-8b-code", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (49152, 4096)]),
        ("qwen2.5-7b", [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)]),
    ],
)
def test_the_products_of_a_model_are_those_of_its_layers(name, expected):
    title, products = workloads.load(name)
    assert title == name
    assert [(p.n, p.k) for p in products] == expected
    assert [p.name for p in products] == ["qkv", "o", "gate_up", "down", "lm_head"]
    biased = {"qwen2.5-7b": ["qkv"], "granite-8b-code": ["qkv", "o", "gate_up", "down"]}.get(name, [])
    assert [p.name for p in products if p.bias] == biased


def test_a_config_json_is_read_from_its_folder(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": workloads.LAYERS["qwen3-8b"]}))
    for name in (folder, folder / "config.json"):
        assert workloads.load(str(name)) == ("mine", workloads.load("qwen3-8b")[1])
    (folder / "config.json").write_text(json.dumps({**workloads.MODELS["tiny"], "model_type": "opt"}))
    assert [(p.name, p.gated, p.bias) for p in workloads.load(str(folder))[1]][2] == ("up", False, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json: "),
        ("[1]", "holds a list"),
        ("{}", "no hidden_size, intermediate_size, num_attention_heads, vocab_size"),
        (json.dumps({**workloads.MODELS["tiny"], "num_local_experts": 8}), "num_local_experts 8: .* mixture of"),
        (json.dumps({**workloads.MODELS["tiny"], "num_experts": 128}), "num_experts 128: .* mixture of"),
        (json.dumps({**workloads.MODELS["tiny"], "n_routed_experts": 256}), "n_routed_experts 256: .* mixture of"),
        (json.dumps({**workloads.MODELS["tiny"], "kv_lora_rank": 512}), "kv_lora_rank 512: .* latent"),
        (json.dumps({"text_config": {**workloads.MODELS["tiny"], "kv_lora_rank": 512}}), "kv_lora_rank 512"),
    ],
)
def test_a_configuration_that_says_too_little_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        workloads.load(str(tmp_path))


def test_a_model_that_names_experts_and_has_none_is_read():
    none = {"num_local_experts": 1, "num_experts": 0, "n_routed_experts": None, "kv_lora_rank": None}
    assert workloads.gemm_shapes({**workloads.MODELS["tiny"], **none}) == workloads.load("tiny")[1]


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model or --shape"),
        (["--shape", "1,2"], "expected three positive numbers"),
        (["--shape", "1,0,2"], "expected three positive numbers"),
        (["--shape", "a,b,c"], "expected three positive numbers"),
        (["--model", "nobody"], "model is 'nobody', expected"),
        (["--shape", "1,2,3", "--op", "sort"], "unknown op sort; known ops"),
        (["--shape", "1,2,3", "--precision", "exact"], "precision is 'exact'"),
        (["--shape", "1,2,3", "--m", "0"], "'--m'"),
        (["--shape", "1,2,3", "--dtype", "int8"], "int8"),
    ],
)
def test_the_command_refuses_what_it_can_not_do(arguments, message, tmp_path):
    done = CliRunner().invoke(app, ["tune", *arguments, "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_the_command_refuses_at_once(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    done = CliRunner().invoke(app, ["tune", "--shape", "1,48,64", "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert done.stderr == "rooftile tune: there is no GPU here to measure on.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(runtime.MODE is not runtime.Mode.INTERPRETER, reason="shows what the interpreter says of itself")
def test_the_command_in_the_interpreter_tunes_and_calls_it_no_measurement(tmp_path):
    arguments = ["tune", "--shape", "1,48,64", "--shape", "16x24x32", "--op", "linear,gated_linear"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path), "--verbose"])
    assert done.exit_code == 0, done.output
    assert "not a measurement" in done.output
    table = tuning.read(tmp_path / "interpreter" / "matmul.json", "matmul", "interpreter")
    assert len(table.entries) == 4
    assert table.failed == {}
    for entry in table.entries.values():
        assert entry["error"] < LIMITS["bf16"]
        assert entry["tried"] == entry["space"] >= 3


# On a GPU


@pytest.mark.gpu
def test_on_a_gpu_a_product_is_tuned_and_the_table_is_used_from_then_on(tmp_path, monkeypatch, device):
    monkeypatch.setenv("ROOFTILE_TUNING_DIR", str(tmp_path))
    tunable, target = TUNABLES["linear"], runtime.target(device)
    problem = tunable.problem(1, 4096, 4096, torch.bfloat16, "ieee")
    try:
        tuning.forget()
        done = CliRunner().invoke(app, ["tune", "--shape", "1,4096,4096", "--budget", "90", "--verbose"])
        assert done.exit_code == 0, done.output
        (path,) = tmp_path.glob("*/matmul.json")
        (entry,) = tuning.read(path, "matmul", path.parent.name).entries.values()
        assert 0 < entry["error"] < LIMITS["bf16"]
        assert entry["tried"] > entry["space"] // 2
        assert tuning.lookup("matmul", tunable.key(problem), target) == entry["config"]
        tuned, default = GemmConfig(**entry["config"]), tunable.default(problem, target)
        assert choose.choose(problem, target) == tuned
        # Another process than the search's, with other inputs' memory, must come to the times that stand in the table.
        timer = clock(device)
        with timer.active(), torch.no_grad():
            times = Search(tunable, problem, timer, device, Seconds(), lambda name: None).race([tuned, default], 0.1)
        assert 1e6 * times[tuned] == pytest.approx(entry["us"], rel=0.15)
        assert times[tuned] <= 1.03 * times[default]
    finally:
        monkeypatch.undo()
        tuning.forget()
