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
