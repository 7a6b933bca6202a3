"""The rival of `rooftile bench e2e`, PyTorch alone: what of it is compiled, and what is recorded."""

import json
from pathlib import Path

import pytest
import torch
from test_bench_e2e import DEVICE, INTERPRETED, prompts, tiny

from rooftile.bench.e2e import check as e2e_check
from rooftile.bench.e2e import cuda as e2e_cuda
from rooftile.bench.e2e import model as e2e_model
from rooftile.bench.e2e.implementations import build
from rooftile.bench.e2e.paths import CUDA, CUDA_EAGER
from rooftile.bench.rows import OURS
from rooftile.bench.timer import clock
from rooftile.cases.check import relative_error
from rooftile.engine.prompts import GRAPH_TOKENS

pytestmark = pytest.mark.nightly

WINDOWS = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the whole command compiles")
@pytest.mark.parametrize(
    ("fields", "graphs"),
    [
        # A prompt's layers, and its end; of a step the first layer, the others, and the end.
        ({"model_type": "llama", "num_hidden_layers": 5}, 5),
        ({**WINDOWS, "num_hidden_layers": 4}, 7),
    ],
    ids=["llama", "windows"],
)
@torch.no_grad()
def test_a_layer_of_the_rival_is_compiled_once_for_all(tmp_path: Path, fields: dict, graphs: int) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny(tmp_path, **fields)
    ids = prompts(model, 2, 7)
    path = build(CUDA, model, ids, 4, clock(DEVICE), None)
    path.prepare()  # compiled with fullgraph=True, which raises where a graph breaks
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not e2e_check.verdict(model, path, ids, 4, own=False)[1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


class Graph:
    """A recorded function, as far as the CPU can be one."""

    replays = 0

    def __init__(self, function) -> None:
        self._function = function
        self.result = function()

    def replay(self) -> None:
        Graph.replays += 1
        self.result.copy_(self._function())


@pytest.mark.parametrize(
    ("tokens", "impl", "replays"),
    [(GRAPH_TOKENS // 64, CUDA, 2), (GRAPH_TOKENS // 64 + 1, CUDA, 1), (GRAPH_TOKENS // 64, CUDA_EAGER, 0)],
)
@torch.no_grad()
def test_prompts_are_recorded_as_the_engines_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, impl: str, replays: int
) -> None:
    cleared = []

    def record(function, warm):
        before = len(cleared)
        warm()
        assert len(cleared) == before + 1  # so that what is recorded next has workspaces of its own
        graph = Graph(function)
        return graph, graph.result

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(e2e_cuda, "record", record)
    monkeypatch.setattr(e2e_cuda, "_clear_workspaces", lambda: cleared.append(None))
    monkeypatch.setattr(e2e_cuda.CudaPath, "_fastest_way", lambda self: e2e_cuda.DEFAULT_WAY)
    monkeypatch.setattr(Graph, "replays", 0)
    model = tiny(tmp_path, model_type="llama", num_hidden_layers=1)
    ids = prompts(model, 64, tokens)
    path = build(impl, model, ids, 3, clock(DEVICE), None)
    path._measures = True
    path.prepare()
    assert not e2e_check.verdict(model, path, ids, 2, own=False)[1]
    assert Graph.replays == replays  # of the prompts and one step
    assert len(cleared) == 2 * replays  # before and after each of the graphs


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, GRAPH_TOKENS + 64], ids=["recorded", "launched"])
@torch.no_grad()
def test_the_recorded_rival_and_the_engine_agree_on_a_gpu(tmp_path: Path, tokens: int) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(
        json.dumps(sizes | {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2})
    )
    model = e2e_model.load(str(tmp_path), dtype=torch.bfloat16, device=DEVICE)
    ids = prompts(model, 1, tokens)
    made = {name: build(name, model, ids, 8, clock(DEVICE), None) for name in (OURS, CUDA)}
    for name, path in made.items():
        path.prepare()
        for _ in range(2):  # a replay leaves nothing behind that the next would see
            assert not e2e_check.verdict(model, path, ids, 8, own=name == OURS)[1], name
        path.reset()
        path.prefill()
    assert (made[CUDA]._prompt_graph is None) == (tokens > GRAPH_TOKENS)
    # Each is off from float32 by up to the bound.
    assert relative_error(made[CUDA].logits, made[OURS].logits.double()) < 2 * e2e_check.bound(model, own=False)
    torch._dynamo.reset()
