"""Hooks of the documentation site (mkdocs.yml): what it takes from outside of docs/.

Pages are written so that their links also work in a checkout. A link out of docs/ to a chart in results/ shows the
chart, whose file is copied into the site. Other links out of docs/ become their text, since the site has no such file.
A line `[NAME](../NAME "included")` is replaced by that file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
CHARTS = (".png", ".svg")
_INCLUDED = re.compile(r'^\[[^\]]*\]\((\S+) "included"\)$', re.MULTILINE)
_LINK = re.compile(r"\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the charts of results/."""
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in CHARTS:
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def include(match: re.Match[str]) -> str:
        path = posixpath.normpath(f"{folder}/{match[1]}")
        return _relinked((ROOT / path).read_text(encoding="utf-8"), posixpath.dirname(path), folder)

    return _INCLUDED.sub(include, _relinked(markdown, folder, folder))


def _relinked(markdown: str, source: str, folder: str) -> str:
    """The Markdown of a file in `source` with its links as a page in `folder` needs them, both relative to the root."""

    def relink(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        path = posixpath.normpath(posixpath.join(source, target))
        if path.startswith("docs/"):
            new = posixpath.relpath(path, folder)
        elif path.startswith("results/") and path.endswith(CHARTS):
            new = posixpath.relpath(f"docs/{path}", folder)
        else:
            return match[1]
        return f"[{match[1]}]({new}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(relink, markdown)
