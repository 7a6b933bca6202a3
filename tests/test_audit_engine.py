"""What the audit says of the engine, of a patched model, and of what is not Triton's among them."""

import contextlib
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import interpreted
from typer.testing import CliRunner

import rooftile
from rooftile import cli
from rooftile.engine import Engine
from rooftile.engine.loop import Loop
from rooftile.engine.model import Decoder
from rooftile.inspect import audit
from rooftile.inspect.audit import Audit, engine_parts, serving
from rooftile.inspect.audit import trace as audit_trace
from rooftile.inspect.audit.calls import Recorder
from rooftile.inspect.audit.patched import Compiled
from rooftile.inspect.audit.profile import Part, profiled, recorded

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


@interpreted
def test_torchs_ops_on_the_devices_tensors_are_found_and_the_hosts_are_not():
    x, pairs, ids = torch.randn(4, 8), torch.randn(8, 2), torch.arange(4)
    device = torch.device("cpu")
    recorder = Recorder()
    with recorder.phase("one"):
        on_host = torch.tensor([1, 2, 3]) + 1  # lengths, perhaps
        sent = on_host.to(device)
        x.view(2, 16)[:, 4:].clone()
        torch.empty_like(x).copy_(x)
        torch.empty_like(x, device="cpu").copy_(x).add(1)  # what the host does with what it read
        rooftile.rms_norm(x, torch.ones(8, device=device))
        rooftile.rms_norm_linear(x, pairs[:, 0], pairs.t())
        sent + 1
        x.to(torch.float16)
        x.sum().item()
        ids.tolist()
    (phase,) = recorder.phases()
    assert {r.name: r.op for r in phase.foreign()} == {
        "aten::clone(float32 [2, 12] strided)": "",
        "aten::ones(float32 [8])": "",
        "aten::clone(float32 [8] strided)": "rms_norm_linear",
        "aten::add(int64 [3])": "",
        "aten::_to_copy(float32 [4, 8])": "",
        "aten::sum(float32 [4, 8])": "",
    }
    assert [(r.op, r.count) for r in phase.rows if r.kind == "Rooftile"] == [("rms_norm", 1), ("rms_norm_linear", 1)]
    assert phase.waits == 2


def engine(fields=None, **options):
    options = {"dtype": torch.float32, "max_batch": 2, "max_seq_len": 16, "page_size": 16, **options}
    return Engine.from_config({**TINY, **(fields or {})}, **options)


@interpreted
def test_the_engine_asks_for_nothing_but_tritons_kernels():
    found = Audit("engine", recorded(lambda: engine_parts(engine(), 3, 1)))
    assert not found.faults
    assert [phase.name for phase in found.phases] == ["prefill", "decode", "generate, sampled"]
    blocks = found.phases[1].by_block()
    assert {"GEMMs", "attention", "RoPE + cache write", "embedding", "sampling"} <= set(blocks)
    assert found.phases[1].waits == 0, "nothing in a step waits for the device"
    assert all(launch.place for phase in found.phases for launch in phase.rows if launch.kind == "Rooftile")


@interpreted
@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
def test_nor_does_a_quantised_engine(quantize):
    assert not Audit("engine", recorded(lambda: engine_parts(engine(quantize=quantize), 2, 1)[:2])).faults


@interpreted
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"model_type": "qwen3"}, {}),
        ({"model_type": "qwen2"}, {}),
        ({"model_type": "mistral", "sliding_window": 2}, {}),
        ({"model_type": "olmo2"}, {}),
        ({"model_type": "gemma2", "head_dim": 8}, {}),
        ({"model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22}, {}),
        ({}, {"kv_dtype": torch.float8_e4m3fn}),
    ],
    ids=[
        "norms of q and k",
        "biases",
        "a window",
        "norms of what layers add",
        "soft caps",
        "multipliers",
        "a cache of 8 bits",
    ],
)
def test_nor_do_other_families_and_caches(fields, options):
    assert not Audit("engine", recorded(lambda: engine_parts(engine(fields, **options), 3, 1)[:2])).faults


def serving_parts(stack, model, **options):
    options = {"prompt": 3, "steps": 0, "page_size": 16, **options}
    return serving.started(stack, model, batch=1, tensor_parallel=1, **options)


@interpreted
def test_nor_does_the_serving_engine_with_requests_that_overlap():
    """Parts of prompts beside decoding, a prefix found, a mask, proposals: without one of these it would not pass."""
    with contextlib.ExitStack() as stack:
        options = {"dtype": torch.float32, "speculate": rooftile.NGram(2)}
        found = Audit("serve", recorded(lambda: serving_parts(stack, TINY, **options)))
    assert not found.faults
    (phase,) = found.phases
    assert {"GEMMs", "attention", "RoPE + cache write", "embedding", "sampling"} <= set(phase.by_block())


class Silent:
    """Proposes nothing."""

    tokens = 2

    def begin(self, prompt):
        return self

    def propose(self, generated, n):
        return []


@interpreted
@pytest.mark.nightly
@pytest.mark.parametrize("problem", ["a part of a prompt", "the prefix cache", "proposed"])
def test_a_serving_engine_whose_requests_do_not_meet_proves_nothing(problem):
    made = engine(max_batch=5, max_seq_len=32, speculate=Silent() if problem == "proposed" else None)
    tokens = 60 if problem == "a part of a prompt" else 15
    with rooftile.AsyncEngine(made, step_tokens=tokens, prefix_cache=problem != "the prefix cache") as served:
        found = Audit("serve", recorded(lambda: [serving.part(served, 3, 0)]))
    assert problem in "".join(fault for fault in found.faults if "aten" not in fault)


def test_requests_that_never_end_are_named(monkeypatch):
    monkeypatch.setattr(serving, "_TIMEOUT_S", 0.01)
    runner = types.SimpleNamespace(cache=types.SimpleNamespace(page_size=16))
    config = types.SimpleNamespace(vocab=64)
    stuck = types.SimpleNamespace(
        engine=types.SimpleNamespace(config=config, runner=runner), stats=lambda: None, add_for=lambda *request: None
    )
    with pytest.raises(TimeoutError, match=r"within 0\.01 s; still live: greedy, long, masked, repeats"):
        serving.part(stuck, 3, 1).run()


@interpreted
def test_a_part_that_says_that_it_proves_nothing_does_not_pass():
    x, weight = torch.randn(2, 8), torch.ones(8)
    part = Part("one", lambda: rooftile.rms_norm(x, weight), problems=lambda: ["nothing was asked"])
    assert Audit("serve", recorded(lambda: [part])).faults == ["one: nothing was asked"]


@interpreted
def test_steps_in_another_thread_are_seen(monkeypatch):
    x = torch.randn(4)
    monkeypatch.setattr(Loop, "step", lambda loop: x + 1)
    recorder = Recorder()
    with recorder.phase("one"):
        thread = threading.Thread(target=lambda: Loop.step(None))
        thread.start()
        thread.join()
    (phase,) = recorder.phases()
    assert [row.name for row in phase.foreign()] == ["aten::add(float32 [4])"]


@interpreted
def test_collectives_are_listed_as_nccls(tmp_path):
    x, distributed = torch.randn(4), torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    recorder = Recorder()
    try:
        with recorder.phase("one"):
            distributed.all_reduce(x)
    finally:
        distributed.destroy_process_group()
    (phase,) = recorder.phases()
    assert [(row.name, row.kind, row.block) for row in phase.rows] == [
        ("c10d::allreduce_(float32 [4])", "NCCL", "communication")
    ]
    assert not phase.foreign()


@interpreted
def test_an_engine_that_computes_by_torch_does_not_pass(monkeypatch):
    stock = Decoder._logits
    monkeypatch.setattr(Decoder, "_logits", lambda self, stream: stock(self, stream) * 0.5)
    monkeypatch.setattr(audit, "engine_parts", lambda *args: engine_parts(*args)[:2])
    args = ["audit", "--model", "tiny", "--layers", "1", "--prompt", "3", "--steps", "1", "--dtype", "fp32"]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 1
    assert "decode: aten::mul(float32 [1, 256]) is foreign, 1 runs" in result.output
    assert "A profile needs a GPU" in result.output


def test_the_patched_models_loop_gives_what_the_model_gives():
    """Its prompts and steps over a static cache; compiled, which is for a GPU, it is the same function."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, initializer_range=0.5)).eval()
    ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
    loop, chosen = Compiled(model, ids, 3, compiled=False), []
    loop.prepare()
    loop.reset()
    loop.prefill()
    for _ in range(3):
        chosen.append(loop.tokens[:, None].clone())
        loop.step()
    with torch.no_grad():
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.cat(chosen, dim=1), expected[:, 3:])


def test_the_patched_models_prompt_is_compiled_once(monkeypatch):
    transformers = pytest.importorskip("transformers")
    graphs, stock = [], torch.compile
    counted = {"backend": lambda graph, _: graphs.append(graph) or graph.forward}
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, options: stock(f, dynamic=dynamic, **counted))
    loop = Compiled(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).eval(), torch.tensor([[3, 1]]), 4)
    for _ in range(2):
        loop.reset()
        loop.prefill()
        loop.step()
    assert len(graphs) == 2, "one of prompts and one of steps"


@pytest.mark.nightly
def test_the_patched_models_graphs_have_one_product_of_q_k_v_and_one_of_gate_and_up(monkeypatch, device):
    """Of the model that the audit and `rooftile bench e2e` make, compiled as the audit compiles it."""
    pytest.importorskip("transformers")
    from rooftile.bench.e2e import hf
    from rooftile.bench.e2e import model as e2e_model

    graphs, stock = [], torch.compile
    counted = {"backend": lambda graph, _: graphs.append(graph) or graph.forward}
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, options: stock(f, dynamic=dynamic, **counted))
    made = e2e_model.load("tiny", dtype=torch.float32, device=device, layers=2)
    loop = Compiled(hf.Models(made).model(True), torch.tensor([[3, 1, 4]], device=device), 2)
    loop.prefill()
    loop.step()
    assert len(graphs) == 2, "one of prompts and one of steps"
    for graph in graphs:
        ran = Counter(str(node.target) for node in graph.graph.nodes if "linear" in str(node.target))
        assert ran == {"rooftile_models.linear": 2 * 2, "rooftile.linear.default": 2 * 2 + 1}  # o, down; the head


@interpreted
@pytest.mark.nightly
def test_two_ranks_that_serve_pass():
    args = "audit --model tiny --impl serve --layers 1 --prompt 3 --steps 1 --dtype fp32 --tensor-parallel 2"
    command = [sys.executable, "-m", "rooftile", *args.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "the serving engine passes" in done.stdout
    assert "collectives, which are NCCL's on GPUs" in done.stdout


@interpreted
def test_what_is_of_the_serving_engine_says_so():
    result = CliRunner().invoke(cli.app, ["audit", "--speculate", "ngram"], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "option of the serving engine" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": Path("a"), "layers": 2}, "--layers is 2 for the checkpoint a: .* for random weights alone"),
        ({"timeline": Path("t.svg")}, "--timeline is t.svg, .* accepted for --impl engine, cuda, patched"),
    ],
)
def test_what_the_serving_engine_does_not_have_says_so(given, message):
    with pytest.raises(ValueError, match=message):
        audit._serving(audit.Settings("tiny", impl="serve", **given))


@interpreted
@pytest.mark.parametrize("option", [["--impl", "cuda"], ["--trace", "t.json"], ["--timeline", "t.svg"]])
def test_what_needs_a_gpu_says_so(option):
    result = CliRunner().invoke(cli.app, ["audit", *option])
    assert result.exit_code == 2
    assert "needs a GPU" in result.output


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", [None, "fp8", "int4"])
def test_on_a_gpu_every_kernel_of_the_engine_is_ours(quantize, tmp_path):
    def build():
        made = Engine.from_config(
            {**TINY, "hidden_size": 128, "intermediate_size": 256}, max_batch=2, quantize=quantize
        )
        return engine_parts(made, 24, 3)

    found = Audit("engine", profiled(build, tmp_path / "trace.json", strict=True))
    assert not found.faults
    decode = found.phases[1]
    ours = [row for row in decode.rows if row.kind == "Rooftile"]
    launched = {row.name: (row.in_graphs, row.count) for row in ours if row.in_graphs != row.count}
    assert not launched, "a step is a graph"  # what the host copies between steps is in none
    assert all(row.place for row in ours)
    assert audit_trace.load(tmp_path / "trace.json")


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_of_the_serving_engine_is_ours():
    def build():
        model = {**TINY, "hidden_size": 128, "intermediate_size": 256}
        return serving_parts(stack, model, dtype=torch.bfloat16, speculate=rooftile.NGram(2), prompt=24)

    with contextlib.ExitStack() as stack:
        found = Audit("serve", profiled(build, None, strict=True))
    assert not found.faults


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_of_torch_is_found(tmp_path):
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(64, device="cuda")

    def run():
        rooftile.rms_norm(x, weight)
        torch.mm(x, x)

    found = Audit("engine", profiled(lambda: [Part("decode", run)], None, strict=True))
    assert len(found.faults) == 1
    assert [row.op for row in found.phases[0].rows if row.kind == "Rooftile"] == ["rms_norm"]
