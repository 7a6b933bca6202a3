"""The text of the byte model: source files of Python's standard library, in two parts that share none.

A token is a byte, and END follows each file. The files in HELD_OUT were not trained on; every Python has them, so the
model can be tested on them anywhere.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

END = 256  # the token after a file; the others are the 256 bytes
HELD_OUT = (
    "bisect.py", "calendar.py", "concurrent/futures/thread.py", "contextlib.py", "difflib.py", "email/message.py",
    "fractions.py", "ftplib.py", "glob.py", "heapq.py", "html/parser.py", "json/decoder.py", "mailbox.py", "queue.py",
    "sched.py", "selectors.py", "shlex.py", "statistics.py", "tabnanny.py", "textwrap.py", "timeit.py", "wave.py",
)  # fmt: skip
# Tests are as much text again and of another kind; the others are tables.
_NOT_TEXT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)


def library() -> Path:
    """The running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_files() -> list[Path]:
    """The files to train on, in the order of their names."""
    root = library()
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / n for n in sorted(names) if not _NOT_TEXT.intersection(n.parts) and n.as_posix() not in HELD_OUT]


def held_out_files() -> list[Path]:
    """The files of HELD_OUT that this Python has.

    Raises:
        FileNotFoundError: it has none, as where its library is kept without its sources.
    """
    found = [path for path in (library() / name for name in HELD_OUT) if path.is_file()]
    if not found:
        raise FileNotFoundError(f"{library()} has none of {', '.join(HELD_OUT)}")
    return found


def tokens(files: list[Path]) -> Tensor:
    """Their bytes as int64, with END after each file."""
    parts = []
    for path in files:
        data = path.read_bytes().replace(b"\r\n", b"\n")
        parts += [torch.tensor(list(data), dtype=torch.int64), torch.tensor([END])]
    return torch.cat(parts)


def windows(stream: Tensor, length: int, most: int | None = None) -> Tensor:
    """Consecutive windows `(n, length)` of the stream; the remainder is dropped."""
    n = len(stream) // length
    return stream[: n * length].view(n, length)[:most]
