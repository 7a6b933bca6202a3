"""A checkpoint's folder, by its path, its id on the Hugging Face Hub, or as `demo`, the small model in the package."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rooftile import byte_model
from rooftile.errors import to_install

DEMO = "demo"  # instead of a path: the byte model in the package
_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = ("*.json", "*.jinja", "*.safetensors")
_NOT = ("*/*", "consolidated*")  # other copies of the weights
_ACCEPTED = (
    "a checkpoint's folder, the id of a model on the Hugging Face Hub (owner/name), "
    f"or {DEMO!r}, the model shipped with Rooftile"
)


def is_id(path: str | os.PathLike[str]) -> bool:
    """Whether it is the id of a model, `organization/name`, and no file or folder."""
    return isinstance(path, str) and _ID.fullmatch(path) is not None and not Path(path).exists()


def folder_of(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint: `path`, where the Hub's cache has the files of that id, or the package's of `demo`.

    What the cache lacks is downloaded by huggingface_hub: configuration, tokenizer, chat template and safetensors. With
    HF_HUB_OFFLINE=1 nothing is.

    Args:
        path: a folder, an id, `organization/name`, or `demo` (`./demo` is a folder of that name).
        revision: of an id, a branch, tag or commit.

    Raises:
        FileNotFoundError: there is no such folder; or the Hub has no such model, or can't be asked and the cache lacks
            it.
        ImportError: huggingface_hub is not installed.
        ValueError: path is a file, or a revision is given for a folder.
        TypeError: path is neither a string nor an `os.PathLike`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"path is a {type(path).__name__}, expected {_ACCEPTED}; for a loaded model there is rooftile.patch"
        )
    if not is_id(path):
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, expected None: {path} is no id of a model on the Hugging Face Hub"
            )
        found = byte_model.folder() if path == DEMO else Path(path).expanduser()
        if found.is_dir():
            return found
        what, error = ("is a file", ValueError) if found.exists() else ("does not exist", FileNotFoundError)
        raise error(f"{path} {what}; expected {_ACCEPTED}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise ImportError(
            f"{path}: no such folder, and ids of the Hugging Face Hub need huggingface_hub, which is not installed: "
            f"{to_install('hf')}"
        ) from e
    try:
        return Path(
            snapshot_download(str(path), revision=revision, allow_patterns=list(_FILES), ignore_patterns=list(_NOT))
        )
    except (OSError, ValueError) as e:  # of huggingface_hub's errors these are the bases
        why = "and the Hugging Face Hub does not give a model of that id"
        if isinstance(e, FileNotFoundError):  # `LocalEntryNotFoundError`
            why = "its cache lacks a model of that id, and the Hugging Face Hub can't be asked"
        raise FileNotFoundError(f"{path}: no such folder, {why}: {' '.join(str(e).split())}") from e
