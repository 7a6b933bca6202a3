"""The set-up behind `make`: which Python is used, which build of PyTorch is taken, what a second call does."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def setup_env(monkeypatch, tmp_path):
    """The script, with a .venv elsewhere, that records what it would make and install."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp.json")
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    done = module.done = []

    def make_venv(clear):
        module.VENV.mkdir(exist_ok=True)
        done.append("clear" if clear else "make")

    monkeypatch.setattr(module, "make_venv", make_venv)
    monkeypatch.setattr(module, "pip", lambda *arguments: done.append(arguments))
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


def offer(setup_env, monkeypatch, *versions):
    """Let pip find those versions of PyTorch."""
    listing = f"torch ({versions[0]})\nAvailable versions: {', '.join(versions)}\n"

    def run(command, **_):
        assert command[1:5] == ["-m", "pip", "index", "versions"]
        return subprocess.CompletedProcess(command, 0, listing)

    monkeypatch.setattr(setup_env.subprocess, "run", run)


@pytest.mark.parametrize(
    ("offered", "taken"),
    [
        (("9.9.0", "2.13.0+cpu", "2.13.0", "2.12.1+cpu", "2.9.0+cpu"), "2.13.0+cpu"),
        (("9.9.0+cpu", "2.12.1+cpu"), "2.12.1+cpu"),
        (("9.10.0+cpu", "9.9.0+cpu", "2.10.0+cpu"), "9.9.0+cpu"),
        (("9.9.0", "2.12.1", "2.10.0+cpu"), None),
    ],
    ids=["the newest tested", "no newer than tested", "the next after it", "none that serves"],
)
def test_the_cpu_build_that_is_taken(setup_env, monkeypatch, offered, taken):
    offer(setup_env, monkeypatch, *offered)
    assert setup_env.cpu_build([]) == taken


def test_without_a_cpu_build_the_default_one_is_announced(setup_env, monkeypatch, capsys):
    offer(setup_env, monkeypatch, "2.12.1")
    setup_env.install()
    assert "large" in capsys.readouterr().out
    assert setup_env.done[0][0] == "torch"


def test_a_cpu_build_is_installed_with_the_triton_tested_beside_it(setup_env, monkeypatch):
    offer(setup_env, monkeypatch, "2.12.1+cpu")
    setup_env.install()
    torch, project = setup_env.done
    assert torch == ("torch==2.12.1+cpu",)
    assert any(str(a).endswith("constraints-cpu.txt") for a in project)


def test_a_gpu_gets_the_default_build_whatever_is_offered(setup_env, monkeypatch):
    offer(setup_env, monkeypatch, "2.13.0+cpu")
    monkeypatch.setattr(setup_env, "has_gpu", lambda: True)
    setup_env.install()
    assert setup_env.done[0][0] == "torch"
    assert not any("cpu" in str(a) for arguments in setup_env.done for a in arguments)


def test_the_users_index_serves_pytorch_alone(setup_env, monkeypatch):
    offer(setup_env, monkeypatch, "2.12.1+cpu")
    monkeypatch.setenv("TORCH_INDEX_URL", "file:///some/index")
    setup_env.install()
    torch, project = setup_env.done
    assert torch[1:] == ("--index-url", "file:///some/index")
    assert "--index-url" not in project


def test_a_second_call_installs_nothing(setup_env, monkeypatch):
    offer(setup_env, monkeypatch, "2.12.1+cpu")
    setup_env.environment()
    assert setup_env.done.pop(0) == "make"
    setup_env.done.clear()
    setup_env.environment()
    assert setup_env.done == []


@pytest.mark.parametrize(("changed", "first"), [("files", "install"), ("python", "clear"), ("gpu", "clear")])
def test_what_changed_decides_what_is_done_again(setup_env, monkeypatch, changed, first):
    """New requirements go into the .venv that is there; another Python or another build of PyTorch needs a new one."""
    offer(setup_env, monkeypatch, "2.12.1+cpu")
    setup_env.environment()
    setup_env.done.clear()
    setup_env.STAMP.write_text(json.dumps({**json.loads(setup_env.STAMP.read_text()), changed: "another"}))
    setup_env.environment()
    assert ("clear" if setup_env.done[0] == "clear" else "install") == first


def test_an_install_that_failed_is_done_again(setup_env, monkeypatch):
    offer(setup_env, monkeypatch, "2.12.1+cpu")

    def fail(*arguments):
        raise SystemExit("no network")

    with monkeypatch.context() as patch:
        patch.setattr(setup_env, "pip", fail)
        with pytest.raises(SystemExit):
            setup_env.environment()
    setup_env.done.clear()
    setup_env.environment()
    assert len([step for step in setup_env.done if step != "make"]) == 2


def test_the_running_python_serves_only_with_every_requirement(setup_env, monkeypatch):
    """This process has what the tests need, or it would not be here."""
    assert setup_env.lacks("test") == []
    real = setup_env.importlib.metadata.version
    older = {"torch": "2.10.0"}
    monkeypatch.setattr(setup_env.importlib.metadata, "version", lambda name: older.get(name) or real(name))
    assert setup_env.lacks("test") == ["torch>=2.11 (here: 2.10.0)"]


def test_a_local_version_counts_as_its_release(setup_env, monkeypatch):
    real = setup_env.importlib.metadata.version
    ours = {"torch": "2.11.0+cpu"}
    monkeypatch.setattr(setup_env.importlib.metadata, "version", lambda name: ours.get(name) or real(name))
    assert setup_env.lacks("demo") == []


def test_packages_of_an_environment_that_is_there_are_replaced_with_a_notice(setup_env, capsys, monkeypatch):
    monkeypatch.setattr(setup_env, "install", lambda: None)
    setup_env.VENV.mkdir()
    setup_env.environment()
    assert ".venv/ exists without a finished set-up: its packages are replaced" in capsys.readouterr().out
    setup_env.environment()
    assert "replaced" not in capsys.readouterr().out
