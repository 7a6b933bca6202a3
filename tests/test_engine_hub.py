"""Models named by their id on the Hugging Face Hub; nothing is downloaded here."""

import shutil

import pytest
import torch

import rooftile
from rooftile.demo import byte_model
from rooftile.engine import hub
from rooftile.engine.hub import folder_of

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_model_in_the_cache(cache, device):
    at = cache / "models--org--tiny"
    (at / "refs").mkdir(parents=True)
    for branch, commit in (("main", "a" * 40), ("other", "b" * 40)):
        (at / "refs" / branch).write_text(commit)
        shutil.copytree(byte_model(), at / "snapshots" / commit)
    engine = rooftile.Engine.from_pretrained(
        "org/tiny", revision="other", dtype=torch.float32, max_batch=1, max_seq_len=16, device=device, progress=False
    )
    assert engine.config.source.startswith(str(at / "snapshots" / ("b" * 40)))
    assert folder_of("org/tiny") == at / "snapshots" / ("a" * 40)


def test_a_model_that_cannot_be_had(cache):
    with pytest.raises(
        FileNotFoundError,
        match=r"org/none: no such folder, its cache lacks .* the Hugging Face Hub can't be asked: .*HF_HUB_OFF",
    ):
        rooftile.Engine.from_pretrained("org/none")
    with pytest.raises(ValueError, match=r"revision is 'main', expected None: .* is no id of a model"):
        hub.folder_of(str(cache), "main")
    for path in ("a/b/c", "absent"):
        with pytest.raises(FileNotFoundError, match=rf"^{path} does not exist; expected a checkpoint's .*'demo'"):
            rooftile.Engine.from_pretrained(path)
    for path, named in ((torch.nn.Linear(2, 2), "Linear"), (None, "NoneType"), (b"demo", "bytes")):
        with pytest.raises(
            TypeError, match=rf"^path is a {named}, expected a checkpoint's .*'demo', .*; for a .* rooftile\.patch$"
        ):
            rooftile.Engine.from_pretrained(path)


def test_the_model_in_the_package(device):
    engine = rooftile.Engine.from_pretrained("demo", max_batch=1, max_seq_len=16, device=device, progress=False)
    assert engine.config.source == str(byte_model() / "config.json")


def test_what_is_asked_of_the_hub(monkeypatch):
    """Not the other copies of weights that repositories have."""
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or "folder")
    assert str(hub.folder_of("org/name", "v1")) == "folder"
    ((name,), options) = asked[0]
    assert (name, options.pop("revision")) == ("org/name", "v1")
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "original/params.json",
        "consolidated.safetensors",
        "a.bin",
    ]
    left = huggingface_hub.utils.filter_repo_objects(files, **options)
    assert list(left) == files[:2]


def test_folders_are_no_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not hub.is_id("org/name")
    assert hub.is_id("org/other")
    assert not any(map(hub.is_id, ("./other", "/a/b", "other", "~/b", "../b", tmp_path)))


def test_a_model_that_the_hub_does_not_have(monkeypatch):
    def refuse(*args, **options):
        raise ValueError("404: no such repository")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=r"and the Hugging Face Hub does not give a model of that id: 404"):
        hub.folder_of("org/none")
