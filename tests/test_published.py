"""`rooftile bench published`: the tables' commands are commands, and each file of results has one."""

import io
import shlex
import sys

import pytest
import typer
from rich.console import Console

from rooftile.bench import published
from rooftile.bench.run import Settings, plan
from rooftile.cli import app

LINES = [line for lines in published.TABLES.values() for line in lines]


def parsed(line):
    """The command's name and options."""
    group = typer.main.get_command(app)
    args = ["bench", *shlex.split(line)]
    name, command, rest = group.resolve_command(typer.Context(group), args)
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


def test_no_command_overwrites_what_another_one_wrote():
    written = []
    for line in LINES:
        name, options = parsed(line)
        if name == "bench":
            written += [(options["suite"], op) for op in options["ops"] or ()]
    assert len(written) == len(set(written))


def test_the_commands_run_in_turn_and_a_failure_does_not_stop_them(monkeypatch, tmp_path):
    ran = []

    def fake(command, check):
        ran.append(command)
        return type("Done", (), {"returncode": 1 if len(ran) == 2 else 0})

    monkeypatch.setattr(published.subprocess, "run", fake)
    out = io.StringIO()
    assert published.run(["prefill", "e2e", "prefill"], tmp_path, Console(file=out)) == 1
    lines = [*published.TABLES["prefill"], *published.TABLES["e2e"]]
    assert [c[:4] for c in ran] == [[sys.executable, "-m", "rooftile", "bench"]] * len(lines)
    assert [shlex.join(c[4:-2]) for c in ran] == lines
    assert {c[-1] for c in ran} == {str(tmp_path)}
    assert "rooftile bench prefill --model qwen2.5-7b" in out.getvalue()
    with pytest.raises(ValueError, match="unknown table nothing; known: rowwise"):
        published.run(["nothing"], tmp_path, Console(file=out))
