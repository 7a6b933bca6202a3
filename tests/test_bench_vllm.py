"""The benchmark of serving beside vLLM, with a stub of its package: the same requests, rows of what fails, no hang."""

import dataclasses
import io
import itertools
import json
import os
import select
import time
import types

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile import serve
from rooftile.bench import load, vllm
from rooftile.cli import app

pytestmark = pytest.mark.nightly

WORK = load.Workload(12, 5, 4, False, 64, 256, 3)
LIMITS = load.Limits(0.5, 0.05)
ENGINE = {"max_batch": 8, "dtype": torch.float32, "prefix_cache": True}
SETTINGS = load.Settings(
    "tiny", "random", None, None, "rooftile", [200.0], [3], WORK, LIMITS, ENGINE, peers=("vllm",)
)  # fmt: skip

# An engine that gives each running request a token a step, in vLLM's package as far as it is used.
STUB = """
import json, os, time, types
from pathlib import Path

__version__ = "0.0.1"


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize, output_kind):
        assert temperature == 0 and ignore_eos and not detokenize and output_kind == "delta"
        self.max_tokens = max_tokens


class Engine:
    def __init__(self, config):
        self.left, self.steps, self.vllm_config = {}, 0, config

    def add_request(self, request_id, prompt, params):
        assert isinstance(request_id, str) and request_id not in self.left and prompt["prompt_token_ids"]
        self.left[request_id] = params.max_tokens

    def step(self):
        self.steps += 1
        time.sleep(0.001)
        made = []
        for name in list(self.left):
            self.left[name] -= 1
            finished = not self.left[name]
            made.append(types.SimpleNamespace(
                request_id=name, finished=finished, outputs=[types.SimpleNamespace(token_ids=[7])]
            ))
            if finished:
                del self.left[name]
        return made


class LLM:
    def __init__(self, model, **options):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        config = json.loads(Path(model, "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForCausalLM"] and options["load_format"] == "dummy"
        assert (options["max_model_len"], options["max_num_seqs"], options["dtype"]) == (64, 8, "float32")
        scheduler = types.SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=8)
        layer = types.SimpleNamespace(attn_backend=types.SimpleNamespace(get_name=lambda: "STUB"))
        compilation = types.SimpleNamespace(static_forward_context={"layer": layer})
        self.llm_engine = Engine(types.SimpleNamespace(scheduler_config=scheduler, compilation_config=compilation))
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Writes the stub, with other lines at its end, where a new process finds it."""

    def write(more=""):
        package = tmp_path / "site" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(STUB + more)
        (package / "inputs.py").write_text("def tokens_input(ids):\n    return {'prompt_token_ids': ids}\n")
        kinds = "import types\nRequestOutputKind = types.SimpleNamespace(DELTA='delta')\n"
        (package / "sampling_params.py").write_text(kinds)
        monkeypatch.syspath_prepend(str(package.parent))

    return write


def test_vllm_and_the_engine_have_the_same_requests_and_a_ratio(stub, tmp_path):
    stub()
    options = (
        "--model tiny --requests 3 --prompt 5 --new 3 --dtype fp32 --rate 50 --clients 2 --max-batch 8 "
        f"--max-seq-len 64 --no-warm-up --step-tokens 16 --peers vllm --json {tmp_path / 'rows.json'}"
    )
    done = CliRunner().invoke(app, ["bench", "serve", *options.split()])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(r["impl"], load.load_name(r), r["failed"]) for r in rows] == [
        (impl, name, 0) for impl in ("vllm", "rooftile") for name in ("50 requests/s", "2 clients")
    ]
    for theirs, ours in zip(rows[:2], rows[2:], strict=True):
        assert [theirs[k] for k in ("prompt_tokens", "output_tokens")] == [
            ours[k] for k in ("prompt_tokens", "output_tokens")
        ]
        assert ours["ratio_to_best_peer"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
        assert "ratio_to_best_peer" not in theirs
        assert "of_offline" not in theirs
        assert theirs["engine"] == {"version": "0.0.1", "step_tokens": "512", "max_batch": "8", "attention": "STUB"}
        assert "start_to_first_token_s" not in ours, "vLLM was measured before"
    assert "vllm 0.0.1: ready" in done.output


def test_where_vllm_is_absent_the_row_says_so_and_the_run_does_not_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(load, "_of_engine", lambda settings, console, done, first: None)
    out = Console(file=io.StringIO(), width=300)
    assert load.run(dataclasses.replace(SETTINGS, json=tmp_path / "rows.json"), out) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["status"], row["failed"]) for row in rows] == [("absent", 0)] * 2
    assert "3 clients, vllm: not installed" in out.file.getvalue()
    assert load.cells(rows[0])[4:6] == ["absent", "–"]


def test_an_absent_row_replaces_no_measured_one(tmp_path):
    meta = {**load.machine(), "commit": "abc", "workload": {}, "limits": {}}
    row = load.row_of("vllm", {"clients": 2}, [load.Answer(load.Request([1], 2), 0.0, [1.0, 1.1], 2)], LIMITS)
    absent = load.row_of("vllm", {"clients": 2}, [], LIMITS) | {"status": "absent"}
    path = tmp_path / "m.json"
    assert load.write(path, meta, [absent]) == [absent]
    assert load.write(path, meta, [row]) == [row]
    assert load.write(path, meta, [absent]) == [row]


@pytest.mark.parametrize(
    ("end", "message"),
    [("raise RuntimeError('out of pages')", "RuntimeError: out of pages"), ("os._exit(9)", "exit code 9")],
)
def test_a_failure_at_a_later_load_loses_no_row(stub, end, message):
    # The second load is a closed loop of 3, after a warm-up: more steps than the first has.
    stub(f"""
step = Engine.step
def failing(self):
    if len(self.left) == 3 and self.added == 3 + 12 + 4 + 3:
        {end}
    return step(self)
add = Engine.add_request
def counting(self, *request):
    self.added = getattr(self, "added", 0) + 1
    add(self, *request)
Engine.step, Engine.add_request = failing, counting
""")
    rows = []
    vllm.measure(SETTINGS, Console(quiet=True), rows.append)
    first, second = rows
    assert (first["rate"], first["failed"], first["requests"]) == (200.0, 0, 12)
    assert (second["clients"], second["failed"], second["requests"]) == (3, 12, 12)
    assert message in second["message"]
    assert load.cells(second)[4] == "–"


def test_a_process_that_says_nothing_is_ended_and_the_run_goes_on(stub, monkeypatch):
    stub("time.sleep(600)")
    monkeypatch.setattr(vllm, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(load, "_of_engine", lambda settings, console, done, first: None)
    since = time.perf_counter()
    out = Console(file=io.StringIO(), width=300)
    assert load.run(SETTINGS, out) == 0
    assert "3 clients, vllm: nothing came within 0.2 s" in out.file.getvalue()
    assert time.perf_counter() - since < 60


@pytest.mark.parametrize("end", ["", "Engine.step = lambda self: os._exit(9)"])
def test_the_processes_that_vllm_started_end_too(stub, tmp_path, end):
    held = tmp_path / "held"
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    stub(f"import subprocess\nsubprocess.Popen(['sleep', '60'], stdout=open({str(held)!r}, 'wb'))\n{end}")
    rows = []
    vllm.measure(SETTINGS, Console(quiet=True), rows.append)
    assert [row["failed"] for row in rows] == ([12, 12] if end else [0, 0])
    assert select.select([reader], [], [], 10.0)[0], "a process still has the pipe open"
    assert os.read(reader, 1) == b""
    os.close(reader)


class Clock:
    """Time that passes in steps and sleeps alone, and an engine that takes one second a step."""

    def __init__(self):
        self.now, self.left, self.most, self.added = 0.0, {}, 0, []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert not self.left, "slept while a request ran"
        self.now += seconds

    def add_request(self, name, request, _):
        self.added.append(self.now)
        self.left[name] = request.new
        self.most = max(self.most, len(self.left))

    def step(self):
        self.now += 1.0
        self.left = {name: n - 1 for name, n in self.left.items()}
        made = [
            types.SimpleNamespace(request_id=name, finished=not n, outputs=[types.SimpleNamespace(token_ids=[7])])
            for name, n in self.left.items()
        ]
        self.left = {name: n for name, n in self.left.items() if n}
        return made


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(vllm, "time", clock)
    return clock


def ask(clock, requests, when, alive=lambda: None):
    return vllm.ask(clock, requests, when, lambda request: (request, None), alive)


def test_a_client_sends_as_soon_as_its_last_request_has_ended(clock):
    answers = ask(clock, [load.Request([1], n) for n in (2, 4, 3)], 2)
    assert clock.most == 2
    assert [(a.arrived, a.times[-1], a.error) for a in answers] == [(0.0, 2.0, ""), (0.0, 4.0, ""), (2.0, 5.0, "")]


def test_a_request_counts_from_its_arrival_also_during_a_step(clock):
    answers = ask(clock, [load.Request([1], 2)] * 3, [0.5, 0.75, 9.0])
    assert clock.added == [0.5, 1.5, 9.0]
    assert [(a.arrived, a.first, a.each) for a in answers] == [(0.5, 1.0, 1.0), (0.75, 1.75, 1.0), (9.0, 1.0, 1.0)]


def test_signs_of_life_come_before_an_arrival_and_of_steps_without_a_token(clock, monkeypatch):
    turns, step = itertools.count(), clock.step

    def slow():
        if next(turns) % 4 == 3:
            return step()
        clock.now += 1.0
        return []

    monkeypatch.setattr(clock, "step", slow)
    seen = [0.0]
    ask(clock, [load.Request([1], 2)] * 2, [5.0, 20.0], lambda: seen.append(clock.now))
    assert seen[-1] == 28.0
    assert max(b - a for a, b in itertools.pairwise(seen)) <= vllm.NEWS_S


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("--peers vllm,sglang", "unknown baseline sglang; known baselines: vllm"),
        ("--peers vllm --url http://127.0.0.1:1", "--url names a server"),
        ("--peers vllm --quantize int8", "--peers have no --quantize int8"),
        ("--peers vllm --speculate ngram", "--peers have no --speculate; measure it without --peers"),
        ("--peers vllm --cascade", "--peers have no --cascade;"),
        ("--peers vllm --deterministic", "--peers have no --deterministic;"),
    ],
)
def test_peers_that_cannot_run_are_refused(bad, message):
    done = CliRunner().invoke(app, ["bench", "serve", "--model", "tiny", *bad.split()])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())  # a box


def test_a_server_without_its_packages_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(serve._NEEDED, "nonsense_module", "nonsense-package")
    monkeypatch.setattr(vllm, "measure", lambda *_: pytest.fail("it was measured"))
    done = CliRunner().invoke(app, ["bench", "serve", "--model", "tiny", "--http", "--peers", "vllm"])
    assert done.exit_code == 2
    assert "needs nonsense-package" in " ".join(done.output.replace("│", " ").split())
