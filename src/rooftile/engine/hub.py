"""Checkpoints named by their id on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rooftile.errors import to_install

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = ("*.json", "*.jinja", "*.safetensors")
_NOT = ("*/*", "consolidated*")  # other copies of the weights


def is_id(path: str | os.PathLike[str]) -> bool:
    """Whether it is the id of a model, `organization/name`, and no file or folder."""
    return isinstance(path, str) and _ID.fullmatch(path) is not None and not Path(path).exists()


def folder_of(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint: `path`, or where the Hub's cache has the files of that id.

    What the cache lacks is downloaded by huggingface_hub: configuration, tokenizer, chat template and safetensors. With
    HF_HUB_OFFLINE=1 nothing is.

    Args:
        path: a folder, which is returned as it is, or an id, `organization/name`.
        revision: of an id, a branch, tag or commit.

    Raises:
        FileNotFoundError: the Hub has no such model, or can't be asked and the cache lacks it.
        ImportError: huggingface_hub is not installed.
        ValueError: a revision of a folder.
    """
    if not is_id(path):
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, expected None: {path} is no id of a model on the Hugging Face Hub"
            )
        return Path(path).expanduser()
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
