"""The command line: its groups of commands, and what --help shows."""

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rooftile.cli import app, common
from rooftile.cli.common import Panel

COMMANDS = sorted(get_command(app).commands)


def test_help_groups_the_commands_in_order():
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    titles = re.findall("─ (Options|Commands|Run|Measure|Develop) ─", text)
    assert titles == ["Options", *(panel.value for panel in Panel)]
    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_shows_no_type_beside_a_flag(name):
    found = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "100"})
    assert found.exit_code == 0
    assert "Show this message and exit." in found.output
    assert not re.search("bool", found.output, re.IGNORECASE)


def test_help_names_all_that_a_command_accepts():
    from rooftile.bench import sanitize, schedules, twins
    from rooftile.bench.e2e import paths
    from rooftile.bench.prefill import report as prefill
    from rooftile.bench.quality import kernels
    from rooftile.bench.training import PARTS, steps

    accepted = {
        "bench training": (*PARTS, *steps.WORKLOADS, *steps.IMPLS),
        "bench e2e": [n for n in paths.IMPLS if not n.endswith("_eager")],  # "each also as ..._eager"
        "bench prefill": prefill.IMPLS,
        "bench quality": [k.name for k in kernels.kernels()],
        "bench schedules": schedules.COMPARISONS,
        "bench twins": twins.TWINS,
        "sanitize": sanitize.TOOLS,
    }
    for command, names in accepted.items():
        text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "1000"}).output
        assert [n for n in names if not re.search(rf"(?<![\w-]){re.escape(n)}(?![\w-])", text)] == [], command


def test_two_words_name_one_command():
    assert "prompts and decoding" in CliRunner().invoke(app, ["bench", "e2e", "--help"]).output
    assert "Measure ops" in CliRunner().invoke(app, ["bench", "--help"]).output


def test_a_misspelled_second_word_is_recognized():
    for word, said in (("trainning", "did you mean `rooftile bench training`? unknown op"), ("zzz", "OPS: unknown op")):
        found = CliRunner().invoke(app, ["bench", word], env={"COLUMNS": "2000"})
        assert found.exit_code == 2
        assert said in found.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("serve demo --port 0 --max-seq-len 999", "rooftile serve: --max-seq-len is 999, expected at most the model's"),
        ("serve demo --port 0 --deterministic --cascade", "rooftile serve: --deterministic and --cascade are True"),
        ("generate demo --prompt x --stop=", "rooftile generate: --stop has an empty string"),
        (
            "bench serve --model tiny --max-batch 8 --step-tokens 8",
            "value: --step-tokens is 8, expected more than --max",
        ),
    ],
)
def test_errors_of_the_engine_name_the_options_that_were_typed(command, said):
    found = CliRunner().invoke(app, command.split(), env={"COLUMNS": "400"})
    assert found.exit_code == 2
    assert said in found.output


MISSING = """
import sys
sys.modules |= dict.fromkeys(sys.argv.pop(1).split(","))
from rooftile.cli import main
main()
"""


@pytest.mark.parametrize(
    ("command", "missing", "interpret", "said"),
    [
        ("check rms_norm", "torch", "", "import of torch halted; None in sys.modules: pip install . in a clone of"),
        ("generate demo --prompt x", "triton", "", "import of triton halted; None in sys.modules: pip install . in a"),
        ("chat demo", "ml_dtypes", "", "Triton's interpreter needs numpy and ml_dtypes: pip install '.[cpu]' in a"),
        ("serve demo --port 0", "ml_dtypes", "", "Triton's interpreter needs numpy and ml_dtypes: pip install"),
        ("generate demo --prompt x", "-", "0", "no GPU was found, and Rooftile's kernels need one (to run on the CPU,"),
    ],
)
def test_what_a_command_needs_and_does_not_find_is_said_in_a_line(command, missing, interpret, said):
    environment = os.environ | {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", MISSING, missing, *command.split()], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    *notice, line = run.stderr.splitlines()
    assert line.startswith(f"rooftile {command.split()[0]}: {said}")
    assert notice in ([], ["No GPU here: kernels run on the CPU, in Triton's interpreter, slowly."])


def test_options_stand_in_errors_for_arguments_alone(monkeypatch):
    options = {"max_waiting": "--max-queue", "stop": "--stop", "quantize": "--quantize"}
    monkeypatch.setattr(common, "_options", options)
    for text, expected in (
        ("AsyncEngine: max_waiting is 0", "--max-queue is 0"),
        ("a/stop.json: quantize is 'int8'", "a/stop.json: --quantize is 'int8'"),
        ("x: a multiple of 32 for quantize='int4'", "x: a multiple of 32 for --quantize='int4'"),
        ("/max_waiting/config.json: the stop is none", "/max_waiting/config.json: the stop is none"),
    ):
        assert common.message_of(ValueError(text)) == expected


@pytest.mark.parametrize(
    "command",
    [
        "bench rms_norm --plot",
        "bench cross_entropy --results",
        "bench training losses --results",
        "bench e2e --plot",
        "bench e2e --results",
        "bench serve --results",
        "bench published decode --results",
        "audit --timeline",
        "audit --results",
        "report --out",
    ],
)
def test_that_charts_cannot_be_drawn_is_found_before_anything_is_measured(command, monkeypatch, tmp_path):
    """Also where results are refused, as they are in the interpreter: that is checked later."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    found = CliRunner().invoke(app, [*command.split(), str(tmp_path / "out")], env={"COLUMNS": "400"})
    assert found.exit_code == 2
    assert "pip install '.[bench]' in a clone" in found.output
    assert not (tmp_path / "out").exists()


def test_results_without_charts_need_no_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = CliRunner().invoke(app, ["bench", "rms_norm", "--results", str(tmp_path)], env={"COLUMNS": "400"})
    assert "pip install" not in found.output
    assert "the interpreter makes none" in found.output
