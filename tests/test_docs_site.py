"""The built documentation: links lead somewhere, the search knows the public names, and a browser shows its results."""

import functools
import html.parser
import http.server
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest
from pages import ROOT

import rooftile
from rooftile.cases import all_cases

pytestmark = pytest.mark.nightly

pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


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
    command = ["make", "site", f"PYTHON={sys.executable}", f"ARGS=--site-dir {folder}"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
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


def test_mike_puts_versions_beside_each_other_with_the_sites_own_configuration(tmp_path):
    """A page of its own in place of docs/, which would take it as long as `make site`."""
    pytest.importorskip("mike", reason="mike is not installed")
    import yaml

    def run(*command):
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # mike starts mkdocs by its name
        names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        env = os.environ | names | {"PATH": path, "NO_MKDOCS_2_WARNING": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config = {k: v for k, v in config.items() if k not in ("nav", "hooks")} | {"plugins": ["search"]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (tmp_path / "docs" / "stylesheets").mkdir(parents=True)
    (tmp_path / "docs" / "stylesheets" / "extra.css").touch()
    (tmp_path / "docs" / "index.md").write_text("# A page\n", encoding="utf-8")
    run("git", "init", "-q")
    run("git", "commit", "-q", "--allow-empty", "-m", "x")  # mike names the commit that it builds
    for version in ("0.1", "0.2"):
        run("mike", "deploy", "--update-aliases", version, "latest")
    versions = json.loads(run("git", "show", "gh-pages:versions.json"))
    assert [(v["version"], v["aliases"]) for v in versions] == [("0.2", ["latest"]), ("0.1", [])]
    for version in ("0.1", "0.2"):  # each page asks for the list of versions
        assert '"provider": "mike"' in run("git", "show", f"gh-pages:{version}/index.html")


class _Slow(http.server.SimpleHTTPRequestHandler):
    """Serves the chart of the home page late, so that the page is complete only after the search's worker has run."""

    seconds = 0

    def do_GET(self):
        if self.path.endswith("headline.svg"):
            time.sleep(self.seconds)
        super().do_GET()


@pytest.fixture
def address(site):
    """The site on the loopback."""
    handler = functools.partial(_Slow, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
@pytest.mark.parametrize(
    ("words", "page"), [("rms_norm", "reference/rowwise/"), ("PagedKVCache", "reference/attention/")]
)
def test_a_browser_finds_it(address, words, page, tmp_path, monkeypatch):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    found = []
    for seconds in (3, 10, 30):
        monkeypatch.setattr(_Slow, "seconds", seconds)
        command = [CHROMIUM, *flags, f"{address}/?q={words}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert shown.returncode == 0, shown.stderr
        found = re.findall(r'<a href="([^"]*)" class="md-search-result__link', shown.stdout)
        if found:
            break
    first = list(dict.fromkeys(link.partition("?")[0] for link in found))[:3]
    assert f"{address}/{page}" in first


def test_every_page_is_in_the_site(built_pages):
    sources = {p.relative_to(ROOT / "docs").with_suffix("").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    made = {posixpath.dirname(name) for name in built_pages}
    assert {s.removesuffix("index").rstrip("/") for s in sources} <= made
