"""`rooftile bench e2e`: the implementations compute one model, what is wrong is not timed, and what rows say."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from rooftile import cli, runtime
from rooftile.bench import e2e
from rooftile.bench.e2e import batch as e2e_batch
from rooftile.bench.e2e import check as e2e_check
from rooftile.bench.e2e import cuda as e2e_cuda
from rooftile.bench.e2e import hf as e2e_hf
from rooftile.bench.e2e import layer as e2e_layer
from rooftile.bench.e2e import model as e2e_model
from rooftile.bench.e2e import paths as e2e_paths
from rooftile.bench.e2e import report as e2e_report
from rooftile.bench.e2e.implementations import build
from rooftile.bench.e2e.paths import (
    CUDA_EAGER,
    CUDA_FP8,
    HF,
    HF_EAGER,
    OURS_DETERMINISTIC,
    OURS_EAGER,
    OURS_UNTUNED,
    Absent,
)
from rooftile.bench.roof import Roofs
from rooftile.bench.rows import OURS, read_json
from rooftile.bench.timer import clock
from rooftile.bench.workloads import MODELS, read
from rooftile.engine import projections
from rooftile.engine.config import ModelConfig
from rooftile.engine.weights import Weights

pytestmark = pytest.mark.nightly

DEVICE = runtime.default_device()
INTERPRETED = runtime.MODE is not runtime.Mode.GPU
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
GRANITE = {
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "granite": GRANITE,
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 5},
}


def tiny(tmp_path: Path, dtype=torch.float32, quantize: str | None = None, **fields) -> e2e_model.Model:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | fields))
    return e2e_model.load(str(path), dtype=dtype, device=DEVICE, quantize=quantize)


def prompts(model: e2e_model.Model, batch: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randint(model.config.vocab, (batch, tokens), device=DEVICE, generator=generator)


def test_a_family_that_only_the_engine_computes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type is 'smollm3', expected one of llama, granite"):
        tiny(tmp_path, model_type="smollm3")


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_rivals_compute_the_model_with_the_engines_own_tensors(name: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, **FAMILIES[name])
    ids = prompts(model, 3, 9)
    source = e2e_hf.Models(model)
    for impl in (CUDA_EAGER, HF_EAGER, *[OURS_DETERMINISTIC] * (name == "qwen3")):
        path = build(impl, model, ids, 6, clock(DEVICE), source)
        error, message = e2e_check.verdict(model, path, ids, 6, own=False)
        assert not message, (impl, message)
        assert error < 1e-5
    q_proj = source.model(False).get_submodule("model.layers.0.self_attn.q_proj")
    assert q_proj.weight.data_ptr() == model.layers()[0].qkv.data_ptr()


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_fp8_is_held_to_what_the_engine_rounds(batch: int, tmp_path: Path) -> None:
    """Of one sequence the prompt alone. A number may go to the other neighbour by the last bit of float32."""
    model = tiny(tmp_path, quantize="fp8", model_type="llama")
    ids = prompts(model, batch, 9)
    path = build(OURS_EAGER, model, ids, 6, clock(DEVICE), None)
    error, message = e2e_check.verdict(model, path, ids, 6, own=True)
    assert error < 5e-3, message


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_pytorch_in_fp8_computes_with_the_engines_weights(batch: int, tmp_path: Path) -> None:
    """All rows of x are quantized, a single one too."""
    strong = {"num_hidden_layers": 4, "initializer_range": 1.28 / TINY["hidden_size"] ** 0.5}
    model = tiny(tmp_path, torch.bfloat16, quantize="fp8", model_type="qwen2", **strong)
    ids = prompts(model, batch, 9)
    path = build(CUDA_FP8, model, ids, 6, clock(DEVICE), None)
    error, message = e2e_check.verdict(model, path, ids, 6, own=True, exact_row=False)
    assert not message
    path.layers = [w._replace(down=w.down._replace(scale=w.down.scale.roll(1, 0))) for w in path.layers]
    wrong, _ = e2e_check.verdict(model, path, ids, 6, own=True, exact_row=False)
    assert wrong > 2 * error
    with pytest.raises(Absent, match="weights are not quantized, expected fp8"):
        build(CUDA_FP8, tiny(tmp_path, model_type="qwen2"), ids, 6, clock(DEVICE), None)


def roll_scales(weights: Weights) -> None:
    for product in (p for layer in weights.layers for p in layer.projections):
        assert isinstance(product, projections.Fp8)
        product.scale.copy_(product.scale.roll(1, 0))


@pytest.mark.parametrize("wrong", ["nothing", "all scales", "scales of one row of x"])
@torch.no_grad()
def test_in_fp8_scales_in_another_order_fail(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, whose roundings lead to other numbers of fp8, with products as strong as a large model's."""
    sizes = {"num_hidden_layers": 4, "initializer_range": 1.28 / TINY["hidden_size"] ** 0.5}
    model, run = (tiny(tmp_path, torch.bfloat16, quantize="fp8", model_type="llama", **sizes) for _ in range(2))
    if wrong == "all scales":
        roll_scales(run.own)
    elif wrong == "scales of one row of x":  # which the prompt's token has not seen
        right = projections.fp8_weight_linear
        monkeypatch.setattr(
            projections, "fp8_weight_linear", lambda x, w, scale, *a, **b: right(x, w, scale.roll(1, 0), *a, **b)
        )
    ids = prompts(model, 1, 9)
    path = build(OURS_EAGER, run, ids, 6, clock(DEVICE), None)
    error, message = e2e_check.verdict(model, path, ids, 6, own=True)
    assert ("differ by" in message) == (wrong != "nothing"), (error, message)
    if wrong == "scales of one row of x":
        assert "token 0" not in message


@torch.no_grad()
def test_a_static_cache_has_room_for_what_warms_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a write past its end would end the process."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model = tiny(tmp_path, model_type="llama", num_hidden_layers=1)
    build(HF, model, prompts(model, 1, 4), 2, clock(DEVICE), e2e_hf.Models(model)).prepare()


def test_ways_to_attend_agree() -> None:
    q, k, v = torch.randn(2, 6, 1, 16), torch.randn(2, 3, 10, 16), torch.randn(2, 3, 10, 16)
    mask = (torch.arange(10) < 7)[None, None, None]
    results = [way(q, k, v, mask, 0.3) for way, _ in e2e_cuda.WAYS.values()]
    seen = torch.softmax(0.3 * q @ k[:, :, :7].repeat_interleave(2, 1).mT, -1) @ v[:, :, :7].repeat_interleave(2, 1)
    for result in results:
        torch.testing.assert_close(result, seen)


@pytest.mark.parametrize("vocabulary", [128, 100])
def test_the_choice_of_a_token_in_parts_is_argmax(vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary)
    assert e2e_cuda.greedy(logits)[:, 0].tolist() == logits.argmax(1).tolist()


def run_of(tmp_path: Path, **settings) -> e2e.E2E:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "llama", "num_hidden_layers": 1}))
    settings = {"models": (str(tmp_path),), "batches": (2,), "prompt": 4, "new": 3} | settings
    return e2e.E2E(e2e.Settings(**settings), Console(quiet=True))


def test_wrong_logits_fail_untimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, impls=(CUDA_EAGER, HF_EAGER))
    right = e2e_hf.shared

    def doubled(model: e2e_model.Model) -> torch.nn.Module:
        whole = right(model)
        whole.get_submodule("lm_head").weight = torch.nn.Parameter(2 * model.lm_head())
        return whole

    monkeypatch.setattr(e2e_hf, "shared", doubled)
    run.run()
    rows = {(r.op, r.impl): r for r in run.rows}
    for op in ("decode", "prefill"):
        wrong = rows[op, HF_EAGER]
        assert (wrong.status, wrong.us) == ("FAIL", None)
        # That which differs most is named: all are off by one, but for roundings.
        assert re.match(r"logits of token [012] differ by 1\.00e\+00, over", wrong.message)
        assert rows[op, CUDA_EAGER].status == "ok"


@torch.no_grad()
def test_a_token_that_is_not_the_likeliest_is_seen(tmp_path: Path) -> None:
    model = tiny(tmp_path, model_type="llama", num_hidden_layers=1)
    ids = prompts(model, 2, 4)

    class Second(e2e_cuda.CudaPath):
        @property
        def tokens(self) -> torch.Tensor:
            return self.logits.topk(2).indices[:, 1]

    path = Second(model, ids, 3, clock(DEVICE), compiled=False)
    assert "token 0 of sequence 0" in e2e_check.verdict(model, path, ids, 2, own=False)[1]


@torch.no_grad()
def test_a_deep_model_without_rope_is_seen(tmp_path: Path) -> None:
    """What the roundings of so many layers could lose is more than that; what eager PyTorch does lose is not."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 24, "num_key_value_heads": 4}
    model = tiny(tmp_path, torch.bfloat16, model_type="llama", **sizes)
    ids = prompts(model, 1, 64)
    lost = e2e_check.lost_in_eager(model, ids, 2, clock(DEVICE))
    path = e2e_cuda.CudaPath(model, ids, 2, clock(DEVICE), compiled=False)
    assert not e2e_check.verdict(model, path, ids, 2, False, lost)[1]
    path.cos, path.sin = torch.ones_like(path.cos), torch.zeros_like(path.sin)
    assert not e2e_check.verdict(model, path, ids, 2, False)[1]
    assert "differ by" in e2e_check.verdict(model, path, ids, 2, False, lost)[1]


def test_what_is_not_there_is_absent_and_what_raises_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path, impls=(OURS_UNTUNED, CUDA_EAGER, HF_EAGER), quantize="int8")
    steps = iter(range(6))

    def step(self, of=e2e_hf.HuggingFacePath.step) -> None:
        if next(steps) > 3:  # two each to prepare and to check, for whichever is first
            raise RuntimeError("out of luck")
        of(self)

    monkeypatch.setattr(e2e_hf.HuggingFacePath, "step", step)
    run.run()
    rows = {(r.op, r.impl): r for r in run.rows}
    absent, raised = rows["decode", OURS_UNTUNED], rows["decode", HF_EAGER]
    assert absent.status == "absent"
    assert absent.message.startswith("int8 GEMMs remember their tuned entry")
    assert (raised.status, raised.message, raised.us) == ("error", "RuntimeError: out of luck", None)
    assert rows["decode", CUDA_EAGER].us


def test_figures_of_a_row(tmp_path: Path) -> None:
    run = run_of(tmp_path, impls=(OURS, CUDA_EAGER))
    run.roofs = Roofs(50.0, 100.0, 10.0, {"bf16": 10.0})
    run.prompt, run.new = 4, 11
    model = e2e_model.load(str(tmp_path), dtype=torch.bfloat16, device=DEVICE)
    batch = e2e_batch.Batch(run, model, 2, e2e_hf.Models(model))
    seconds = [0.001 * (i + 1) for i in range(10)]
    batch.fill_decode(OURS, seconds, 10)
    row = batch.decode[OURS]
    cache = 2 * 2 * 2 * 8 * 2 * (4 + 11 / 2)  # k and v, sequences, heads, head_dim, bytes, tokens on average
    assert row.nbytes == model.own.nbytes + cache
    assert (row.us, row.us_p99) == (pytest.approx(5500), pytest.approx(9910))
    assert row.tokens_per_s == pytest.approx(2 * 10 / 0.055)
    assert row.gbs == pytest.approx(row.nbytes / 5500e-6 / 1e9)
    assert row.roof_fraction == pytest.approx(row.gbs / 100)
    batch.fill_decode(OURS, seconds, 5)
    assert row.message == "cut to 5 of 10 steps by --seconds"
    batch.fill_prefill(CUDA_EAGER, seconds, seconds)
    prefill = batch.prefill[CUDA_EAGER]
    layer = 2 * (64 * 32 + 32 * 32 + 3 * 32 * 48) * 4 + 2 * 4**2 * 32  # products of 4 tokens, and causal attention
    assert prefill.tflops == pytest.approx(2 * (layer + 2 * 32 * 128) / 5500e-6 / 1e12)
    assert batch.row("decode", OURS).dims == {"batch": 2, "prompt": 4, "new": 11, "layers": 1}


@pytest.mark.skipif(
    not INTERPRETED, reason="checks what the command writes where it measures nothing; here it would measure"
)
def test_command_writes_rows_that_are_no_measurement(tmp_path: Path) -> None:
    config, out = tmp_path / "small" / "config.json", tmp_path / "e2e.json"
    config.parent.mkdir()
    config.write_text(json.dumps(TINY | {"model_type": "qwen2"}))
    arguments = ["bench", "e2e", "--model", str(config), "--layers", "1", "--batch", "2", "--prompt", "4", "--new", "3"]
    arguments += ["--impl", "rooftile,hf_eager", "--quantize", "int8", "--json", str(out)]
    done = CliRunner().invoke(cli.app, [*arguments, "--plot", str(tmp_path)])
    assert done.exit_code == 0, done.output
    meta, rows = read_json(out)
    assert meta["note"] == "interpreter, not a measurement"
    shape = "small-1-layers bf16 B2 P4 N3"
    assert [(r.op, r.shape, r.impl) for r in rows] == [
        (op, shape, i) for op in ("decode", "prefill") for i in (OURS, HF_EAGER)
    ]
    assert all(r.status == "ok" and r.us and r.max_error < 0.02 for r in rows)
    assert [dict(r.options) for r in rows] == [{"quantize": "int8"}, {}] * 2
    assert (tmp_path / "small-1-layers-bf16-p4-n3.png").stat().st_size > 0

    for wrong in (["--results", str(tmp_path)], ["--impl", "nobody"], ["--batch", "0"], ["--model", "nothing"]):
        assert CliRunner().invoke(cli.app, [*arguments, *wrong]).exit_code == 2, wrong


def test_the_engine_is_held_to_its_own_weights(tmp_path: Path) -> None:
    """Not to those of the others: weights that changed behind the engine's back are found."""
    model = tiny(tmp_path, torch.bfloat16, model_type="llama", num_hidden_layers=1)
    other = e2e_model.load(str(tmp_path), dtype=torch.bfloat16, device=DEVICE, seed=1)
    ids = prompts(model, 2, 4)
    both = dataclasses.replace(model, own=other.own)
    path = build(OURS_EAGER, both, ids, 3, clock(DEVICE), None)
    assert not e2e_check.verdict(both, path, ids, 2, own=True)[1]
    assert "differ by" in e2e_check.verdict(model, path, ids, 2, own=True)[1]


def test_kernels_of_a_layer_are_those_of_the_model() -> None:
    _, values = read("llama-3-8b", MODELS)
    found = {name: (case, point) for name, case, point in e2e_layer.points(ModelConfig.from_hf(values), 1, 44)}
    assert tuple(found)[:5] == e2e_layer.ALONE
    labels = {name: point.label for name, (_, point) in found.items()}
    assert labels["qkv"] == "1x4096->6144"
    assert labels["gate_up"] == "1x4096->28672"
    assert labels["attention"] == "B1 T44 H32/8 D128"
    weights = sum(found[name][0].nbytes(found[name][1], 2, "forward") for name in ("qkv", "output", "gate_up", "down"))
    assert weights == pytest.approx(2 * (6144 + 4096 + 28672 + 14336) * 4096, rel=1e-3)
    for name, (case, point) in found.items():
        drawn = case.inputs(point, torch.bfloat16, torch.device("meta"), torch.Generator())
        outputs = case.eager(**drawn, **point.options)
        assert outputs.shape[0] == 1, name


@pytest.mark.skipif(
    not INTERPRETED, reason="checks what the command writes where it measures nothing; here it would measure"
)
def test_layer_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = e2e_layer.points
    monkeypatch.setattr(e2e_layer, "points", lambda *a: [p for p in every(*a) if p[0] in ("output", "attention")])
    out = tmp_path / "layer.json"
    done = CliRunner().invoke(
        cli.app, ["bench", "e2e", "--layer", "--model", "tiny", "--prompt", "8", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    _, rows = read_json(out)
    assert {(r.op, r.status) for r in rows if r.impl == OURS} == {("layer.attention", "ok"), ("layer.output", "ok")}
    assert {r.impl for r in rows if r.op == "layer.output"} == {OURS, "eager"}


@pytest.mark.parametrize("layer", [False, True])
def test_more_tokens_than_the_model_was_made_for(layer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before weights are made, and of every model before the first is measured."""
    for name in ("random", "load"):
        monkeypatch.setattr(e2e_model.engine_weights, name, lambda *a, **b: pytest.fail("weights are made"))
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "llama", "max_position_embeddings": 64}))
    arguments = ["bench", "e2e", "--model", f"tiny,{tmp_path}", *(["--layer"] if layer else [])]
    wrong = (["--prompt", "65"], "--prompt is 65 tokens") if layer else (
        ["--prompt", "60", "--new", "5"], "--prompt 60 and --new 5 are 65 tokens")  # fmt: skip
    done = CliRunner().invoke(cli.app, [*arguments, *wrong[0]], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert f"{wrong[1]}, expected at most 64: max_position_embeddings" in done.output, done.output


def test_names_and_notes_of_the_implementations() -> None:
    assert e2e_paths.IMPLS[:2] == ("rooftile", "cuda_kernels")
    assert set(e2e_paths.NOTES) == set(e2e_paths.IMPLS)
    assert {HF, HF_EAGER} < set(e2e_paths.IMPLS)
    row = functools.partial(e2e_report.E2ERow, "decode", "forward", "m bf16 B1 P4 N3", "bf16", OURS)
    assert e2e_report.label(row()) == "rooftile"
    assert e2e_report.label(row(options={"quantize": "fp8", "tuning": "off"})) == "rooftile (fp8, tuning off)"


@pytest.mark.gpu
def test_all_implementations_on_a_gpu(tmp_path: Path) -> None:
    """Graphs, compilers and backends of SDPA: every row of a small model is right and timed, and is written."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(TINY | sizes | {"model_type": "llama"}))
    settings = e2e.Settings(models=(str(tmp_path),), batches=(1, 2), prompt=64, new=32, seconds=0.5, results=tmp_path)
    assert e2e.run(settings, Console(quiet=True)) == 0
    files = sorted(tmp_path.glob("*/e2e/*.json"))
    assert len(files) == 2
    for file in files:
        _, rows = read_json(file)
        wanted = [name for name in e2e.IMPLS if name not in e2e.UNASKED]
        assert {(r.impl, r.status) for r in rows} == {(name, "ok") for name in wanted}
        assert all(r.us and r.roof_fraction and r.us_p20 <= r.us <= r.us_p80 for r in rows)
