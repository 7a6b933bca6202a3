"""What is published names one version."""

import re
from pathlib import Path

import rooftile

ROOT = Path(__file__).parent.parent


def test_every_file_that_names_the_version_names_the_same():
    named = {
        "pyproject.toml": r'^version = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\S+)",
        "docs/contributing/release-notes.md": r"^## (\S+)",
    }
    found = {
        name: re.search(line, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[1]
        for name, line in named.items()
    }
    assert found == dict.fromkeys(named, rooftile.__version__)


def test_no_text_advises_to_install_from_an_index():
    """Rooftile is on none; `rooftile.errors.to_install` says what works. Releases are another matter."""
    texts = [path for name in ("src", "docs", "examples") for path in (ROOT / name).rglob("*.[pm][yd]")]
    advice = re.compile(r"install '?rooftile\b|install Rooftile's extra")
    found = [path for path in (*texts, ROOT / "README.md") if advice.search(path.read_text(encoding="utf-8"))]
    assert {path.name for path in found} <= {"release.md", "release-notes.md"}
    assert len(texts) > 200
