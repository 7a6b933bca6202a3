"""The README's examples run as they stand, its commands exist, and so does every file that the documentation names."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from rooftile import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    rooftile (.+?)(?:\s+#.*)?$", README, re.MULTILINE)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs_as_it_stands(code):
    """In a process of its own, as a reader would run it, in the mode of this one."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_there_are_examples_and_commands():
    assert len(EXAMPLES) >= 4
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses_as_it_stands(line):
    """Every option and every value that the line names is one the command takes; nothing is run."""
    group = typer.main.get_command(cli.app)
    context = group.context_class(group, info_name="rooftile")
    _, command, arguments = group.resolve_command(context, shlex.split(line))
    command.make_context(command.name, arguments, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("folder", re.findall(r"^    ((?:src|tests|tools)\S*)", README, re.MULTILINE))
def test_the_layout_names_what_is_there(folder):
    assert (ROOT / folder).exists()


def test_the_layout_names_all_there_is():
    package = ROOT / "src" / "rooftile"
    entries = {p.name + "/" if p.is_dir() else p.name for p in package.iterdir() if p.is_file() or any(p.glob("*.py"))}
    named = set(re.findall(r"^    src/rooftile/(\S+)", README, re.MULTILINE))
    assert named == entries - {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}
