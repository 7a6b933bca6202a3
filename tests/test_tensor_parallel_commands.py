"""`--tensor-parallel`: the processes that commands start, and how they end."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers import interpreted

pytest.importorskip("transformers")

COMMAND = [sys.executable, "-m", "rooftile"]
TWO = ["--dtype", "fp32", "--tensor-parallel", "2"]


def environment():
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def test_a_number_that_does_not_divide_is_refused_before_anything_starts():
    from typer.testing import CliRunner

    from rooftile import cli

    done = CliRunner().invoke(cli.app, ["generate", "demo", "--prompt", "x", "--tensor-parallel", "3"])
    assert done.exit_code == 2
    assert "num_attention_heads 4, expected a multiple of 3" in " ".join(done.output.split())


@interpreted
@pytest.mark.nightly
def test_generate_on_two_ranks_prints_what_one_prints():
    given = [*COMMAND, "generate", "demo", "--prompt", "def read(", "--max-new-tokens", "4", "--dtype", "fp32"]
    one, two = (
        subprocess.run([*given, *more], capture_output=True, text=True, env=environment(), timeout=120)
        for more in ([], ["--tensor-parallel", "2"])
    )
    assert one.returncode == two.returncode == 0, two.stderr
    assert two.stdout == one.stdout


PROGRAM = """
import rooftile, torch
from rooftile.demo import byte_model
options = {"dtype": torch.float32, "max_batch": 1, "max_seq_len": 32}
engine = rooftile.Engine.from_pretrained(byte_model(), **options, tensor_parallel=2)
(done,) = engine.generate(["def read("], max_new_tokens=4)
print(f"<{engine.rank} {done.tokens}>")
"""


@interpreted
@pytest.mark.nightly
def test_torchrun_starts_the_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(launch, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    (zero, tokens), (one, same) = sorted(re.findall(r"<(\d) (.*?)>", done.stdout))
    assert (zero, one) == ("0", "1")
    assert tokens == same


def ask(url, **more):
    body = json.dumps({"prompt": "def read(", "max_tokens": 3, "temperature": 0, **more}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def children_of(pid):
    """Processes that it has started by multiprocessing."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@interpreted
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="there is no /proc to find processes in")
@pytest.mark.parametrize("end", ["SIGTERM", "a rank is killed", "rank 0 is killed"])
def test_a_server_on_two_ranks_answers_and_ends_with_all_processes(end, tmp_path):
    pytest.importorskip("fastapi")
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [*COMMAND, "serve", "demo", "--port", "0", "--max-seq-len", "64", "--max-batch", "2", *TWO],
            stderr=file, stdout=file, env=environment(),
        )  # fmt: skip
    try:
        last = time.monotonic() + 120
        while not (listens := re.search(r"listening on (http://\S+)", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < last, log.read_text()
            time.sleep(0.2)
        assert ask(listens[1]) == ask(listens[1], seed=3)
        if importlib.util.find_spec("llguidance"):
            assert ask(listens[1], structured_outputs={"choice": ["xyz"]}) == "xyz"
        children = children_of(server.pid)
        (other,) = [child for child in children if "libtorch" in Path(f"/proc/{child}/maps").read_text()]
        assert len(children) == 2, "a rank, and the process that answers HTTP, which has no PyTorch"
        if end == "SIGTERM":
            os.kill(other, signal.SIGTERM)  # as a service manager does; rank 0 decides
            server.terminate()
            assert server.wait(60) == 0, log.read_text()
        elif end == "a rank is killed":
            os.kill(other, signal.SIGKILL)
            assert server.wait(60) == 1, log.read_text()
            assert "a rank of tensor parallelism has failed" in log.read_text()
        else:
            server.kill()
            server.wait(60)
        last = time.monotonic() + 20
        while any(map(is_running, children)):
            assert time.monotonic() < last, "a process runs on"
            time.sleep(0.2)
    finally:
        server.kill()
