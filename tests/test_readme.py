"""The examples of the README and of docs/attention.md run as they stand, the commands exist, and so does every file
that the documentation names."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from rooftile import cli, runtime

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [README, (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")]  # the engine's needs a checkpoint
EXAMPLES = [code for page in RUN for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]
COMMANDS = re.findall(r"^    rooftile (.+?)(?:\s+#.*)?$", README, re.MULTILINE)


# Each example in a process of its own, forked from one that has imported what most of them need.
FORKED = """
import json, os, sys, traceback
import torch, transformers, rooftile
if torch.cuda.is_available():
    sys.exit("CUDA does not survive a fork")
failed = {}
for number, code in enumerate(json.load(sys.stdin)):
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            exec(compile(code, f"<example {number}>", "exec"), {"__name__": "__main__"})
        except BaseException:
            os.write(writes, traceback.format_exc().encode()[-30_000:])
        sys.stdout.flush()
        os._exit(0)
    os.close(writes)
    with open(reads) as said:
        failed[number] = said.read()
    _, status = os.wait()
    if status:
        failed[number] += f"it ended with status {status}"
print("\\n" + json.dumps(failed))
"""


@pytest.fixture(scope="module")
def failed_examples():
    """What each example said that failed, by its number."""
    if runtime.MODE is runtime.Mode.GPU:
        commands = [[sys.executable, "-c", code] for code in EXAMPLES]
        runs = [subprocess.run(c, capture_output=True, text=True, check=False, cwd=ROOT) for c in commands]
        return {n: run.stderr if run.returncode else "" for n, run in enumerate(runs)}
    run = subprocess.run(
        [sys.executable, "-c", FORKED],
        input=json.dumps(EXAMPLES),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    return {int(number): said for number, said in json.loads(run.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_as_it_stands(number, failed_examples):
    """In a process of its own, as a reader would run it, in the mode of this one."""
    assert failed_examples[number] == ""


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
