"""The README is short, and its commands exist. test_docs_pages.py runs its examples and follows its links."""

import pages
import pytest

README = pages.README.read_text(encoding="utf-8")
EXAMPLES = pages.examples(pages.README)
COMMANDS = pages.commands(pages.README)


def test_there_are_examples_and_commands():
    assert len(EXAMPLES) == 3
    assert len(COMMANDS) == 4


def test_it_is_read_in_a_minute():
    lines = README.splitlines()
    assert len(lines) <= 170
    assert any("tokens/s" in line for line in lines[:40])


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses_as_it_stands(line):
    pages.parse(line)
