"""`rooftile bench published`: its commands are commands, of ops, peers and models that exist."""

import functools
import io
import shlex
import sys

import pytest
import typer
from rich.console import Console

from rooftile.bench import published
from rooftile.bench.profile import find_point
from rooftile.bench.run import Settings, plan
from rooftile.bench.training import PARTS
from rooftile.bench.training.steps import WORKLOADS
from rooftile.bench.variants import peer_names
from rooftile.bench.workloads import MODELS
from rooftile.cases import find_cases
from rooftile.cli import app
from rooftile.cli.common import names_of

pytestmark = pytest.mark.nightly
LINES = [line for lines in published.SUITES.values() for line in lines]


@functools.cache
def commands():
    return typer.main.get_command(app)


def parsed(line):
    """The command's name and options."""
    group = commands()
    name, command, rest = group.resolve_command(typer.Context(group), shlex.split(line))
    with command.make_context(name, rest, resilient_parsing=False) as context:
        return name, context.params


@pytest.mark.parametrize("line", LINES)
def test_each_is_a_command_with_work(line):
    name, options = parsed(f"{line} --results out")
    assert str(options["results"]) == "out"
    if name == "bench" and not options["host"]:
        assert options["ops"]
        for op in options["ops"]:
            found = plan(Settings(ops=[op], sets=[s.value for s in options["sets"]]))
            assert [*found] == [op]
            assert options["direction"].value != "backward" or found[op][0].grads
            assert set(names_of(options["peers"]) or ()) <= {*peer_names(found[op][0])}
    if name == "profile":
        assert str(find_point(*find_cases([options["op"]]), options["shape"])) == options["shape"]
    models = [*(options.get("models") or ()), *([options["model"]] if options.get("model") else [])]
    assert set(models) <= {*MODELS, *WORKLOADS}
    assert set(options.get("parts") or ()) <= {*PARTS}


def test_no_command_overwrites_what_another_one_wrote():
    written = []
    for line in LINES:
        name, options = parsed(line)
        if name == "bench":
            written += [(options["suite"], op) for op in options["ops"] or ()]
    assert len(written) == len(set(written))


def test_composed_eager_is_left_out_only_where_its_scores_take_too_long_or_do_not_fit():
    without = set()
    for line in LINES:
        name, options = parsed(line)
        if name == "bench" and options["peers"] and "eager" not in names_of(options["peers"]):
            without |= {(options["suite"], op) for op in options["ops"]}
    assert without == {("attention", "attention_varlen"), ("attention-memory", "attention")}


def test_the_commands_run_in_turn_and_a_failure_does_not_stop_them(monkeypatch, tmp_path):
    ran = []

    def fake(command, check):
        ran.append(command)
        return type("Done", (), {"returncode": 1 if len(ran) == 2 else 0})

    monkeypatch.setattr(published.subprocess, "run", fake)
    out = io.StringIO()
    assert published.run(["prefill", "e2e", "prefill"], tmp_path, Console(file=out)) == 1
    lines = [*published.SUITES["prefill"], *published.SUITES["e2e"]]
    assert [c[:3] for c in ran] == [[sys.executable, "-m", "rooftile"]] * len(lines)
    assert [shlex.join(c[3:-2]) for c in ran] == lines
    assert {c[-1] for c in ran} == {str(tmp_path)}
    assert "rooftile bench prefill --model qwen2.5-7b" in out.getvalue()
    with pytest.raises(ValueError, match="unknown suite nothing; known: host"):
        published.run(["nothing"], tmp_path, Console(file=out))
