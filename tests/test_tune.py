"""`rooftile tune`: wrong configurations never win, a run goes on where the last one ended, what the command refuses."""

import io
import json
import time
import types

import pytest
import serving
import torch
from doubler import PROBLEM, US, WRONG, ConfigClock, Doubler, Doubling
from rich.console import Console
from toys import CPU

from rooftile import launching, tuning
from rooftile.bench import tune, workloads
from rooftile.bench.timer import HostClock
from rooftile.bench.tune import worker as tune_worker
from rooftile.bench.tune.search import Seconds, Wrong, search, verify
from rooftile.bench.tune.space import TUNABLES

pytestmark = pytest.mark.nightly


def searched(doubler, seconds=None, **options):
    return search(doubler, PROBLEM, doubler.configs, "default", ConfigClock(seconds or {}), CPU, **options)


# The search


def test_the_fastest_right_configuration_wins():
    found = searched(Doubler("slow", "fast", "other"), {"slow": 20 * US, "fast": 2 * US})
    assert (found.config, found.us, found.default_us, found.peer_us) == ("fast", *map(pytest.approx, (2.0, 10.0, 5.0)))
    assert (found.tried, found.space, found.failed) == (4, 4, {})
    assert found.error <= 1e-6


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_configuration_never_wins_however_fast(wrong):
    found = searched(Doubler(wrong, "right"), {wrong: 1 * US, "right": 9 * US})
    assert found.config == "right"
    assert list(found.failed) == [wrong]


def test_what_is_wrong_is_said_in_a_line():
    failed = searched(Doubler(*WRONG)).failed
    assert failed["nan"] == "1 elements are NaN or infinite"
    assert failed["unwritten"] == "4096 elements are NaN or infinite"
    assert "1 of 4096 elements are far off" in failed["far off"]
    assert "relative error 3.0e-03, over 1.0e-03" in failed["a little off everywhere"]
    assert failed["flaky"] == "two runs differ"
    assert "shape (1, 64), expected (64, 64)" in failed["another shape"]
    assert failed["raises"] == "RuntimeError: out of resources"


def test_a_default_that_is_wrong_does_not_stay():
    class Broken(Doubler):
        def default(self, p, target):
            return "nan"

    doubler = Broken("right")
    found = search(doubler, PROBLEM, doubler.configs, "nan", ConfigClock({"nan": US}), CPU)
    assert (found.config, found.default_us) == ("right", None)


def test_nothing_is_found_where_all_are_wrong():
    doubler = Doubler("nan")
    with pytest.raises(ValueError, match="no configuration is right: 1 elements are NaN"):
        search(doubler, PROBLEM, ["nan"], "nan", ConfigClock({}), CPU)


def test_a_configuration_that_goes_wrong_only_later_is_left_out():
    """As a race between warps may: right when it was checked first, and not after all the replays."""

    class Later(Doubler):
        def call(self, p, inputs, config):
            y = super().call(p, inputs, config)
            if config == "racy" and self.ran.count("racy") > 4:
                y[0] = torch.nan
            return y

    doubler = Later("racy", "right")
    found = searched(doubler, {"racy": US, "right": 3 * US})
    assert found.config == "right"
    assert "NaN" in found.failed["racy"]


def test_what_is_hardly_faster_than_the_default_does_not_replace_it():
    assert searched(Doubler("same"), {"same": 9.99 * US}).config == "default"
    assert searched(Doubler("faster"), {"faster": 9.5 * US}).config == "faster"


def test_when_the_time_is_up_the_likely_ones_have_been_tried():
    found = searched(Doubler("first", "second", "third"), {"third": US}, until=time.monotonic() - 1)
    assert (found.tried, found.space) == (2, 4)
    assert found.config == "default"


def test_what_failed_before_is_not_tried_again():
    doubler = Doubler("bad", "good")
    found = searched(doubler, {"bad": US, "good": 2 * US}, known_bad={"kernel": "", "bad": "it hangs"})
    assert found.config == "good"
    assert found.failed == {"bad": "it hangs"}
    assert "bad" not in doubler.ran


def test_many_configurations_go_through_all_rounds():
    doubler = Doubler(*(f"c{i}" for i in range(40)))
    times = {f"c{i}": (10 + (i * 7) % 40) * US for i in range(40)}
    found = searched(doubler, {**times, "default": 50 * US})
    assert times[found.config] == min(times.values())
    assert found.tried == 41


def test_after_a_failure_the_counters_are_new(monkeypatch):
    dropped = []
    doubler = Doubler("raises", "right")
    monkeypatch.setattr(launching, "clear_counters", lambda: dropped.append(doubler.ran[-1]))
    searched(doubler)
    assert dropped == ["raises"]


def test_it_is_said_what_is_tried_before_it_runs():
    said = []
    searched(Doubler("a"), trying=said.append)
    assert said == ["default", "", "a", ""]


def test_two_runs_must_agree_and_every_element_counts():
    reference = torch.randn(64, 64)
    doubler = Doubler()
    assert verify(doubler, PROBLEM, reference.clone, reference) == 0.0
    spoiled = reference.clone()
    spoiled[3, 3] += 0.05
    with pytest.raises(Wrong, match="1 of 4096 elements are far off"):
        verify(doubler, PROBLEM, spoiled.clone, reference)


def test_the_search_needs_no_gpu():
    found = search(Doubler("a"), PROBLEM, ["a"], "default", HostClock(), CPU, seconds=Seconds(0, 0, 0))
    assert found.config in ("a", "default")


# Processes


@pytest.fixture
def process():
    made = tune_worker.Worker(patience=20.0, serve=serving.serve)
    yield made
    made.stop()


def test_a_process_answers_and_stays(process):
    first, second = process.ask("fine"), process.ask("twice")
    assert (first[0], second[0]) == ("fine", "twice")
    assert first[1] == second[1]


@pytest.mark.parametrize(
    ("task", "reason"),
    [("crash", "signal 11"), ("exit", r"ended \(3\)"), ("lose the device", "illegal memory access")],
)
def test_a_process_that_dies_says_at_what_and_is_replaced(process, task, reason):
    before = process.ask("fine")[1]
    with pytest.raises(tune_worker.Died, match=reason) as death:
        process.ask(task)
    assert death.value.trying == f"config of {task}"
    assert process.ask("fine")[1] != before


def test_a_process_that_hangs_is_ended(process):
    process.ask("fine")
    process.patience = 0.5
    with pytest.raises(tune_worker.Died, match="no answer") as death:
        process.ask("hang")
    assert death.value.trying == "config of hang"


def test_an_error_of_the_whole_task_is_no_death(process):
    with pytest.raises(RuntimeError, match="no configuration is right"):
        process.ask("raise")
    process.ask("fine")


def test_a_configuration_that_ends_the_process_is_recorded_and_the_search_goes_on(doubler, tmp_path):
    class Fragile:
        def ask(self, task):
            if "bad" in task.space and "bad" not in task.known_bad:
                raise tune_worker.Died("no answer in 120 s", "bad")
            return search(
                doubler, task.problem, task.space, task.default, ConfigClock({}), CPU, known_bad=task.known_bad
            )

    doubler.configs = ["bad", "good"]
    run = tune.Tuning(settings(out=tmp_path), Console(file=io.StringIO()), CPU, ConfigClock({}))
    (item,) = run.open(tune.plan(run.settings))
    found = run.search(item, run.task(item, 1), Fragile())
    run.finish(item, found)
    assert found.tried == 2
    assert tuning.read(tmp_path / "interpreter" / "doubler.json", "doubler", "interpreter").failed == {
        "bad, m8 n16 k4, triton 3.6.0": "no answer in 120 s"
    }


def test_a_search_that_begins_again_has_only_the_time_that_is_left(doubler, tmp_path, monkeypatch):
    now, left = [1000.0], []
    monkeypatch.setattr(tune, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    class Hanging:
        def ask(self, task):
            left.append(task.left)
            now[0] += 120
            raise tune_worker.Died("no answer in 120 s", f"c{len(left)}")

    run = tune.Tuning(settings(out=tmp_path, budget=300.0), Console(file=io.StringIO()), CPU, ConfigClock({}))
    (item,) = run.open(tune.plan(run.settings))
    with pytest.raises(RuntimeError, match="ended the process"):
        run.search(item, run.task(item, 1), Hanging())
    assert left[:4] == [300.0, 180.0, 60.0, 0.0]
    assert set(left[4:]) == {0.0}


# A run


@pytest.fixture
def doubler(monkeypatch):
    made = Doubler("fast", "slow")
    monkeypatch.setitem(TUNABLES, "doubler", made)
    monkeypatch.setattr(tune, "machine", lambda: {**dict.fromkeys(MACHINE, None), "triton": "3.6.0"})
    return made


MACHINE = ("gpu", "driver", "torch", "triton", "rooftile", "commit", "date")


def settings(**options):
    wanted = {"ops": ("doubler",), "shapes": ((8, 16, 4),), "rows": (1, 2), "dtypes": (torch.float32,), "jobs": 0}
    return tune.Settings(**{**wanted, **options})


def ran(clock=None, **options):
    """The exit code, what was shown, and the table."""
    console = Console(file=io.StringIO(), width=200)
    code = tune.run(settings(**options), console, CPU, clock or ConfigClock({"fast": 2 * US}))
    path = options["out"] / "interpreter" / "doubler.json"
    return code, console.file.getvalue(), json.loads(path.read_text())


def test_a_run_writes_what_it_found_and_says_what_it_is_worth(doubler, tmp_path):
    code, shown, data = ran(out=tmp_path)
    assert code == 0
    entry = data["entries"]["m8 n16 k4"]
    assert entry["config"] == {"kernel": "fast"}
    assert (entry["us"], entry["default_us"], entry["peer_us"]) == (2.0, 10.0, 5.0)
    assert (entry["m"], entry["n"], entry["k"], entry["tried"], entry["default"]) == (8, 16, 4, 3, "default")
    assert data["meta"]["schema"] == tuning.SCHEMA
    assert set(MACHINE) | {"command"} <= set(data["meta"]["runs"][entry["run"]])
    assert "5.000 over the default (1 GEMMs), 2.500 over the baseline" in shown


def test_a_models_layer_is_summed(doubler, tmp_path):
    _, shown, data = ran(out=tmp_path, shapes=(), models=("tiny",))
    assert len(data["entries"]) == 2 * len(workloads.load("tiny")[1])
    assert "tiny M=2 fp32, a layer's GEMMs: default 40.00 us, tuned 8.000 us (5.000 x), cuBLAS 20.00 us" in shown


def test_a_restart_skips_what_is_finished_and_again_does_not(doubler, tmp_path):
    ran(out=tmp_path)
    doubler.ran.clear()
    _, shown, data = ran(out=tmp_path, shapes=((8, 16, 4), (9, 16, 4)))
    assert "1 of 2 GEMMs are in the table already" in shown
    assert [data["entries"][f"m{m} n16 k4"]["run"] for m in (8, 9)] == [0, 1]
    assert doubler.ran
    doubler.ran.clear()
    ran(out=tmp_path, shapes=((8, 16, 4), (9, 16, 4)))
    assert doubler.ran == []
    _, _, data = ran(ConfigClock({"slow": US}), out=tmp_path, again=True)
    assert data["entries"]["m8 n16 k4"]["config"] == {"kernel": "slow"}


def test_what_was_found_is_on_disk_when_a_later_problem_ends_the_run(doubler, tmp_path):
    class Interrupted(Doubler):
        def draw(self, p, device, numbers):
            if p.m == 9:
                raise KeyboardInterrupt
            return super().draw(p, device, numbers)

    TUNABLES["doubler"] = Interrupted("fast")
    with pytest.raises(KeyboardInterrupt):
        ran(out=tmp_path, shapes=((8, 16, 4), (9, 16, 4)))
    table = tuning.read(tmp_path / "interpreter" / "doubler.json", "doubler", "interpreter")
    assert list(table.entries) == ["m8 n16 k4"]


def test_what_failed_bars_a_configuration_from_that_problem_alone_and_that_triton(doubler, tmp_path, monkeypatch):
    doubler.configs = ["nan", "fast"]
    _, _, data = ran(out=tmp_path, shapes=((8, 16, 4), (9, 16, 4)))
    under = [f"nan, m{m} n16 k4, triton 3.6.0" for m in (8, 9)]
    assert data["failed"] == dict.fromkeys(under, "1 elements are NaN or infinite")
    assert doubler.ran.count("nan") == 4  # two runs of either problem's check

    def barred():
        """At the first problem, begun anew."""
        run = tune.Tuning(settings(out=tmp_path), Console(file=io.StringIO()), CPU, ConfigClock({}))
        run.store(items[0]).table.entries.clear()
        return list(run.known_bad(run.open(items)[0]))

    items = tune.plan(settings())
    assert barred() == ["nan"]
    monkeypatch.setattr(tune, "machine", lambda: {**dict.fromkeys(MACHINE, None), "triton": "3.7.0"})
    assert barred() == []


def test_again_forgets_the_failures_of_what_is_tuned_again_and_no_others(doubler, tmp_path):
    doubler.configs = ["nan", "fast"]
    ran(out=tmp_path, shapes=((8, 16, 4), (9, 16, 4)))
    doubler.configs = ["fast"]
    _, _, data = ran(out=tmp_path, again=True)
    assert list(data["failed"]) == ["nan, m9 n16 k4, triton 3.6.0"]


def test_a_kernel_that_fails_ahead_of_the_search_is_left_out_of_every_problem(doubler, tmp_path, monkeypatch):
    def compile_ahead(tasks, jobs, until, done):
        for task in tasks:
            done(task, {"slow": "it hangs", "fast": "OutOfMemoryError: of others"}.get(task.config, ""))

    monkeypatch.setattr(tune_worker, "compile_ahead", compile_ahead)
    wanted = settings(out=tmp_path, shapes=((8, 16, 4), (9, 16, 4)), jobs=1)
    run = tune.Tuning(wanted, Console(file=io.StringIO()), CPU, ConfigClock({}))
    items = run.open(tune.plan(wanted))
    run.compile_ahead(items)
    assert [run.task(item, 1).space for item in items] == [("fast",), ("fast",)]
    assert [list(run.known_bad(item)) for item in items] == [["slow"], []]  # on disk, it is what was tried


def test_a_table_of_another_variant_of_the_gpu_is_not_added_to(doubler, tmp_path):
    ran(out=tmp_path)
    path = tmp_path / "interpreter" / "doubler.json"
    data = json.loads(path.read_text())
    data["meta"]["multiprocessors"] += 1
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"can't be added to: its GPU had \d+ SMs, this one has \d+; move"):
        ran(out=tmp_path, shapes=((9, 16, 4),))
    assert json.loads(path.read_text()) == data


def test_a_problem_without_a_right_configuration_makes_the_run_fail_and_not_end(doubler, tmp_path):
    class Broken(Doubler):
        def default(self, p, target):
            return "nan" if p.m == 8 else "default"

        def space(self, p, target, exhaustive):
            return ["nan"] if p.m == 8 else ["fast"]

    TUNABLES["doubler"] = Broken()
    code, shown, data = ran(out=tmp_path, shapes=((8, 16, 4), (9, 16, 4)))
    assert code == 1
    assert list(data["entries"]) == ["m9 n16 k4"]
    assert "no configuration is right" in shown


def test_without_time_nothing_is_begun_and_it_is_said(doubler, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    assert tune.run(settings(out=tmp_path, budget=0.0), console, CPU, ConfigClock({})) == 0
    assert "1 GEMMs are left: the budget ended" in console.file.getvalue()


def test_a_file_of_something_else_is_not_written_over(doubler, tmp_path):
    path = tmp_path / "interpreter" / "doubler.json"
    path.parent.mkdir()
    path.write_text('{"my": "notes"}')
    with pytest.raises(ValueError, match=r"can't be added to.*move it away"):
        ran(out=tmp_path)
    assert path.read_text() == '{"my": "notes"}'


def test_each_key_is_tuned_once_and_each_binary_compiled_once_at_its_smallest(doubler, tmp_path):
    wanted = settings(out=tmp_path, models=("llama-3-8b", "granite-8b-code"), shapes=((8, 16, 4), (8, 16, 4)))
    run = tune.Tuning(wanted, Console(file=io.StringIO()), CPU, ConfigClock({}))
    items = run.open(tune.plan(wanted))
    # Two of either model's five products are its own: the vocabularies.
    assert len(items) == 1 + 2 * (5 + 1)
    tasks = [task for _, task in run.compile_tasks(items).values()]
    assert [task.config for task in tasks] == ["default", "fast", "slow"]
    assert {task.problem for task in tasks} == {Doubling(8, 16, 4, torch.float32)}


def test_the_command_is_kept_without_this_machines_folders():
    words = ["tune", "--model", "/home/me/qwen/config.json", "--out", "/tmp/x", "--m", "1", "--out=/tmp"]
    assert tune.command(words) == "rooftile tune --model config.json --m 1"
