"""The pages of the documentation, and their examples, which run as they stand."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer.main

from rooftile import cli, runtime

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
# Before the fence stands the reason if an example is not run: `<!-- not run: it downloads a model -->`.
_FENCE = re.compile(r"^(?:<!-- not run: (.+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Example:
    name: str
    code: str
    not_run: str


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def examples(page):
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Example(f"{name_of(page)}:{n}", m[2], m[1] or "") for n, m in enumerate(found)]


def commands(page):
    """The lines of a page that call the command line, without `rooftile`."""
    return re.findall(r"^    rooftile (.+?)(?:\s+#.*)?$", page.read_text(encoding="utf-8"), re.MULTILINE)


def parse(line):
    """Raises unless every option and every value that the line names is one the command takes; nothing is run."""
    group = typer.main.get_command(cli.app)
    context = group.context_class(group, info_name="rooftile")
    _, command, arguments = group.resolve_command(context, shlex.split(line))
    command.make_context(command.name, arguments, parent=context)


# Each example in a process of its own, forked from one that has imported what most of them need.
FORKED = """
import json, os, sys, traceback
import torch, transformers, rooftile
if torch.cuda.is_available():
    sys.exit("CUDA does not survive a fork")
transformers.LlamaForCausalLM, rooftile.optim.AdamW, rooftile.patch, rooftile.Engine  # imported at their first use
failed = {}
for name, code in json.load(sys.stdin).items():
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        except BaseException:
            os.write(writes, traceback.format_exc().encode()[-30_000:])
        sys.stdout.flush()
        os._exit(0)
    os.close(writes)
    with open(reads) as said:
        failed[name] = said.read()
    _, status = os.wait()
    if status:
        failed[name] += f"it ended with status {status}"
print("\\n" + json.dumps(failed))
"""


def failures(examples):
    """What each example said that failed, by its name; "" if it passed. Each runs in a process of its own, as a reader
    would run it, in the mode of this one."""
    codes = {e.name: e.code for e in examples}
    if runtime.MODE is runtime.Mode.GPU:
        commands = {name: [sys.executable, "-c", code] for name, code in codes.items()}
        runs = {n: subprocess.run(c, capture_output=True, text=True, cwd=ROOT) for n, c in commands.items()}
        return {name: run.stderr if run.returncode else "" for name, run in runs.items()}
    run = subprocess.run(
        [sys.executable, "-c", FORKED], input=json.dumps(codes), capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
