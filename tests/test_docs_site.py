"""The built documentation: every link inside of it leads somewhere, and its search knows the public names."""

import html.parser
import json
import os
import posixpath
import subprocess
import sys
import urllib.parse

import pytest
from pages import ROOT

import rooftile
from rooftile.cases import all_cases

pytestmark = pytest.mark.nightly

pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")


class _Page(html.parser.HTMLParser):
    """The ids of a page, and what it refers to."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.targets = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        self.targets |= {found[name] for name in ("href", "src") if found.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def built_pages(site):
    return {p.relative_to(site).as_posix(): _Page(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}


@pytest.fixture(scope="module")
def index(site):
    return json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]


def test_every_internal_link_leads_somewhere(site, built_pages):
    broken = []
    for name, page in built_pages.items():
        if name == "404.html":  # its links are absolute, since it stands for any address
            continue
        for target in page.targets:
            address, _, anchor = urllib.parse.unquote(target).partition("#")
            if urllib.parse.urlsplit(address).scheme:
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), address)) if address else name
            path = posixpath.join(path, "index.html") if (site / path).is_dir() else path
            there = built_pages.get(path)
            if not (site / path).exists() or (anchor and there and anchor not in there.ids):
                broken.append(f"{name}: {target}")
    assert broken == []


def test_nothing_is_loaded_from_another_server(built_pages):
    links = {t for page in built_pages.values() for t in page.targets if t.startswith("http")}
    assert not [t for t in links if t.endswith((".js", ".css", ".woff2")) or "fonts." in t]


def test_the_search_knows_every_public_name(index):
    anchors = {entry["location"].partition("#")[2] for entry in index}
    assert [n for n in rooftile.__all__ if f"rooftile.{n}" not in anchors and n != "__version__"] == []


def test_the_reference_has_every_case_and_command(index):
    titles = {entry["location"].partition("#")[0]: set() for entry in index}
    for entry in index:
        titles[entry["location"].partition("#")[0]].add(entry["title"])
    assert set(all_cases()) <= titles["reference/cases/"]
    assert {"rooftile check", "rooftile bench", "rooftile bench e2e", "rooftile inspect"} <= titles["reference/cli/"]


def test_every_page_is_in_the_site(built_pages):
    sources = {p.relative_to(ROOT / "docs").with_suffix("").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    made = {posixpath.dirname(name) for name in built_pages}
    assert {s.removesuffix("index").rstrip("/") for s in sources} <= made
