"""How `rooftile bench e2e` measures in turns, and that what it has measured is written by then."""

import dataclasses
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_bench_e2e import DEVICE, prompts, run_of, tiny

from rooftile.bench import e2e
from rooftile.bench.e2e import batch as e2e_batch
from rooftile.bench.e2e import check as e2e_check
from rooftile.bench.e2e.paths import CUDA, CUDA_EAGER, HF
from rooftile.bench.e2e.results import NOT_REACHED
from rooftile.bench.e2e.turns import Samples, TurnPlan, plan_turns
from rooftile.bench.rows import OURS, read_json, write_json
from rooftile.bench.timer import HostClock, clock

pytestmark = pytest.mark.nightly


class Device:
    """A GPU that knows how long everything takes, and is never late."""

    def __init__(self) -> None:
        self.now = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: "Event") -> float:
                return 1e3 * (end.at - self.at)

        self.Event = Event

    def synchronize(self, device: torch.device) -> None: ...


class MeasuringClock(HostClock):
    measures = True


class Timed:
    """An implementation whose steps and prompts take that long; the one that is given ends the run, or its own."""

    note = ""

    def __init__(self, device: Device, step: float, prompt: float, raises: "tuple[int, BaseException] | None") -> None:
        self._device, self._step, self._prompt, self._raises = device, step, prompt, raises
        self.steps = self.prompts = 0

    def prepare(self) -> None: ...

    def reset(self) -> None: ...

    def prefill(self) -> None:
        self.prompts += 1
        self._device.now += self._prompt

    def step(self) -> None:
        self.steps += 1
        if self._raises is not None and self.steps >= self._raises[0]:
            raise self._raises[1]
        self._device.now += self._step


# Milliseconds of a step and of the prompts; after the first look (16 steps) three rounds of 63 fit into a second.
TIMES = {OURS: (5, 20), CUDA: (10, 30), HF: (4, 50)}


@dataclasses.dataclass
class Run:
    e2e: e2e.E2E
    file: Path
    said: io.StringIO
    paths: dict[str, Timed]

    def rows(self) -> dict:
        return {(r.op, r.impl): r for r in read_json(self.file)[1]}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run on that device, and what an implementation raises at which of its steps."""

    def make(raises: "dict[str, tuple[int, BaseException]] | None" = None) -> Run:
        device, said = Device(), io.StringIO()
        file = tmp_path / "rows.json"
        run = run_of(tmp_path, batches=(1,), new=64, seconds=1.0, impls=tuple(TIMES), json=file)
        run.console = Console(file=said)
        run.clock = MeasuringClock()
        run.latency.module, run.latency.measures = device, True
        paths = {
            name: Timed(device, step / 1e3, prompt / 1e3, (raises or {}).get(name))
            for name, (step, prompt) in TIMES.items()
        }
        monkeypatch.setattr(e2e_batch, "build", lambda name, *args: paths[name])
        monkeypatch.setattr(e2e_batch, "verdict", lambda *_, **__: (0.0, ""))
        monkeypatch.setattr(e2e_batch, "lost_in_eager", lambda *args: None)
        return Run(run, file, said, paths)

    return make


def test_every_row_is_of_whole_rounds_and_said_twice(start) -> None:
    run = start()
    run.e2e.run()
    rows = run.rows()
    assert all((r.status, r.message) == ("ok", "") for r in rows.values())
    assert {name: rows["decode", name].us for name in TIMES} == {OURS: 5e3, CUDA: 1e4, HF: 4e3}
    assert {name: rows["prefill", name].us for name in TIMES} == {OURS: 2e4, CUDA: 3e4, HF: 5e4}
    # 63 steps are 0.3, 0.6 and 0.25 s; 20 prompts are due, as many each round. The first look counts for neither.
    assert {name: rows["decode", name].samples for name in TIMES} == {OURS: 3 * 63, CUDA: 63, HF: 3 * 63}
    assert {name: rows["prefill", name].samples for name in TIMES} == {OURS: 21, CUDA: 20, HF: 21}
    assert rows["decode", OURS].ratio_to_best_peer == pytest.approx(0.8)
    assert rows["prefill", OURS].ratio_to_best_peer == pytest.approx(1.5)
    said = [line for line in run.said.getvalue().splitlines() if " ms" in line]
    assert len(said) == 2 * len(rows)
    assert said[0].endswith("rooftile decode: 5.000 ms (so far: a first look, 16 steps)")
    assert any(line.endswith("cuda_kernels prefill: 30.000 ms") for line in said)


@pytest.mark.parametrize(
    ("at", "known"),
    [
        (1, {OURS: "so far: a first look, 16 steps", CUDA: "so far: a first look, 16 steps", HF: None}),
        (17 + 63, {HF: "so far: 1 of 3 rounds"}),
    ],
    ids=["in the first look", "in the second round"],
)
def test_a_run_that_is_cut_off_has_written_what_it_had(start, at: int, known: dict) -> None:
    run = start({HF: (at, KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        run.e2e.run()
    rows = run.rows()
    for name, message in known.items():
        for op in ("decode", "prefill"):
            assert (rows[op, name].us is None) == (message is None)
            assert rows[op, name].message == (message or ""), (op, name)
    # A ratio is of what was measured to the end.
    ended = {name: row.us for (op, name), row in rows.items() if op == "decode" and row.us and not row.message}
    peers = [us for name, us in ended.items() if name != OURS]
    expected = min(peers) / 5e3 if peers and OURS in ended else None
    assert rows["decode", OURS].ratio_to_best_peer == (expected and pytest.approx(expected))


def test_who_raises_later_has_no_times_and_is_no_peer(start) -> None:
    run = start({HF: (17 + 63, RuntimeError("out of luck"))})
    run.e2e.run()
    rows = run.rows()
    for op, ratio in (("decode", 2.0), ("prefill", 1.5)):
        row = rows[op, HF]
        assert (row.status, row.us, row.samples) == ("error", None, 0)
        assert row.message == "RuntimeError: out of luck"
        assert row.max_error == 0
        assert rows[op, OURS].ratio_to_best_peer == pytest.approx(ratio)


def test_what_is_not_reached_says_so(start) -> None:
    run = start({OURS: (1, KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        run.e2e.run()
    assert run.rows()["decode", CUDA].message == NOT_REACHED


@pytest.mark.parametrize(
    ("step", "prompt", "expected"),
    [
        (0.004, 0.011, TurnPlan(3, 255, 6)),  # three whole generations in 4 s, with 21 prompts
        (0.0001, 0.001, TurnPlan(5, 255, 3)),
        (0.025, 0.030, TurnPlan(1, 160, 19)),  # cut
        (1.0, 1.0, TurnPlan(1, 20, 19)),  # no less
    ],
)
def test_a_plan_is_what_fits_into_the_seconds(step: float, prompt: float, expected: TurnPlan) -> None:
    assert plan_turns(Samples([step], [prompt], [0.0]), 255, 4.0) == expected


def test_a_short_generation_is_repeated_until_there_are_twenty_steps() -> None:
    assert plan_turns(Samples([1.0], [1.0], [0.0]), 15, 4.0) == TurnPlan(2, 15, 9)


@torch.no_grad()
def test_logits_of_the_same_tokens_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, reference = [], e2e_check.reference
    monkeypatch.setattr(e2e_check, "reference", lambda *args: calls.append(args) or reference(*args))
    model = tiny(tmp_path, model_type="llama", num_hidden_layers=1)
    ids, expected = prompts(model, 2, 4), e2e_check.Expected(model)
    lost = e2e_check.lost_in_eager(model, ids, 3, clock(DEVICE), expected)
    path = e2e_batch.build(CUDA_EAGER, model, ids, 3, clock(DEVICE), None)
    for own in (False, True):  # the same weights, where none are quantised
        assert e2e_check.verdict(model, path, ids, 3, own, lost, expected) == (lost, "")
    assert len(calls) == 1
    other = dataclasses.replace(model, own=dataclasses.replace(model.own))
    expected = e2e_check.Expected(other)
    for own in (False, True):
        e2e_check.verdict(other, path, ids, 3, own, lost, expected)
    assert len(calls) == 3


def test_a_results_file_is_whole_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.json"
    write_json(file, {"run": 1}, [])
    before = file.read_text()

    def cut(path: Path, text: str, **options) -> None:
        with path.open("w") as f:
            f.write(text[:10])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", cut)
        with pytest.raises(KeyboardInterrupt):
            write_json(file, {"run": 2}, [])
    assert file.read_text() == before
    write_json(file, {"run": 2}, [])
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
