"""The command line: its groups of commands, and what --help shows."""

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rooftile.cli import app
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


def test_two_words_name_one_command():
    assert "prompts and decoding" in CliRunner().invoke(app, ["bench", "e2e", "--help"]).output
    assert "Measure ops" in CliRunner().invoke(app, ["bench", "--help"]).output
