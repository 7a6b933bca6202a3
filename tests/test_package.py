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
    suffixes = {".py", ".md", ".j2", ".jinja", ".toml", ".txt"}
    folders = [ROOT / name for name in ("src", "docs", "examples", "tools")]
    every = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    texts = [path for path in every if path.suffix in suffixes]
    advice = re.compile(r"""install\s+(?:-\S+\s+)*['"]?rooftile\b|install Rooftile's extra""")
    for what in ("rooftile", "-U rooftile", "'rooftile[hf]'", '"rooftile[hf]"'):
        assert advice.search(f"pip install {what}")
    assert not advice.search("pip install '.[hf]'")
    found = [path for path in texts if advice.search(path.read_text(encoding="utf-8"))]
    assert {path.name for path in found} <= {"release.md", "release-notes.md"}
    assert len(texts) > 200
