"""`rooftile report`: the structure of the page, its filters and sorting in a browser, and the list of old rows."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from toys import measured

from rooftile.bench import page, rows, sources
from rooftile.bench.rows import OURS
from rooftile.cli import app

pytestmark = pytest.mark.nightly
META = {
    "gpu": "NVIDIA H100 80GB HBM3", "driver": "1.2", "torch": "2.13", "triton": "3.6", "rooftile": "1",
    "commit": "a" * 40, "date": "2026-01-02T03:04:05Z", "roof_copy_gbs": 3000.0, "roof_read_gbs": 3100.0,
    "roof_tflops": 700.0,
}  # fmt: skip
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def group(op, shape, us, peer_us, **fields):
    figures = {"nbytes": int(1e6 * us), "gbs": 1e3, "tflops": 1.0, "roof_fraction": 1 / us}
    found = [
        measured(OURS, us, shape=shape, **figures, **fields),
        measured("eager", 4 * us, shape=shape),
        measured("<liger>", peer_us, shape=shape),
    ]
    for row in found:
        row.op = op
    rows.compare(found)
    return found


@pytest.fixture
def results(tmp_path):
    kernels = sources.hashes()
    folder = tmp_path / "h100"
    wins, loses = group("rms_norm", "9x8", 2.0, 3.0), group("rms_norm", "10x8", 10.0, 9.0, max_abs_error=0.5)
    rows.write_json(folder / "rowwise" / "rms_norm.json", {**META, "definitions": kernels}, [*wins, *loses])
    old = {**META, "definitions": {**kernels, "rope": "0" * 12}}
    rows.write_json(folder / "rowwise" / "rope.json", old, group("rope", "7x8", 5.0, 6.0))
    rows.write_json(folder / "e2e" / "x.json", {**META, "definitions": kernels}, group("decode", "tiny B1", 7.0, 8.0))
    (folder / "host").mkdir()
    host = {"op": "rope", "shape": "7x8", "direction": "forward", "us": 9.0, "baseline": "eager", "baseline_us": 5.0}
    (folder / "host" / "host.json").write_text(json.dumps({"meta": META, "rows": [{**host, "limit_us": 8.0}]}))
    return tmp_path


class Page(HTMLParser):
    """The tables of a page by id, each a list of (classes, hidden, cells); and all tags."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.links = {}, [], []
        self._rows = self._cell = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.links += [given[name] for name in ("src", "href") if name in given]
        if tag == "table":
            self._rows = self.tables.setdefault(given["id"], [])
        elif tag == "tr":
            self._rows.append((given.get("class", ""), "hidden" in given, []))
        elif tag in ("td", "th"):
            self._rows[-1][2].append("")
            self._cell = self._rows[-1][2]

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell[-1] += data


def test_the_page_has_every_row_and_needs_no_other_file(results):
    found = Page(page.html(results))
    head, *ops = found.tables["ops"]
    at = {name: i for i, name in enumerate(head[2])}
    assert [(line[2][at["op"]], line[2][at["shape"]]) for line in ops] == [
        ("rms_norm", "9x8"), ("rms_norm", "10x8"), ("rope", "7x8"),
    ]  # fmt: skip
    assert all(len(line[2]) == len(head[2]) for line in ops)
    assert [classes for classes, _, _ in ops] == ["", "loses", "older"]
    losing = ops[1][2]
    assert (losing[at["ratio"]], losing[at["over eager"]], losing[at["max abs"]]) == ("0.900", "4.00", "5.0e-01")
    assert losing[at["best baseline"]] == "<liger>"  # escaped, or it would be a tag
    assert [line[2][at["age"]] for line in ops] == ["current", "current", "older"]
    assert [line[2][5] for line in found.tables["models"][1:]] == [OURS, "eager", "<liger>"]
    assert [classes for classes, _, _ in found.tables["host"][1:]] == ["loses"]
    ((_, _, run),) = found.tables["runs"][1:]
    assert run == ["NVIDIA H100 80GB HBM3", "1.2", "2.13", "3.6", "a" * 10, "2026-01-02", "3000", "3100", "700.0",
                   "e2e, rowwise"]  # fmt: skip
    assert found.tags.count("svg") == 2  # the roofline, and the row-wise sweep
    assert all(link.startswith("#") for link in found.links)


def test_the_page_counts_files(results):
    """Two files of a suite may have rows of the same op."""
    text = (results / "h100" / "rowwise" / "rms_norm.json").read_text()
    assert "3 files" in page.html(results)
    (results / "h100" / "rowwise" / "rms_norm-2.json").write_text(text)
    assert "4 files" in page.html(results)


def test_there_is_no_page_without_results(tmp_path):
    with pytest.raises(ValueError, match=r"has no results, expected <gpu>/<suite>/<name>\.json"):
        page.html(tmp_path)
    assert CliRunner().invoke(app, ["report", "--results", str(tmp_path)]).exit_code == 2
    assert not (tmp_path / "report.html").exists()


def test_rows_older_than_their_kernels_are_listed(results):
    done = CliRunner().invoke(app, ["report", "--check", "--results", str(results)])
    assert done.exit_code == 1
    assert "H100 rowwise rope: 3 rows: its kernel has changed since" in done.output
    assert "9 of 12 rows are as old as their kernels" in done.output
    (results / "h100" / "rowwise" / "rope.json").unlink()
    assert CliRunner().invoke(app, ["report", "--check", "--results", str(results)]).exit_code == 0


@pytest.fixture
def browse(results, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(out)])
    assert done.exit_code == 0, done.output

    def shown(asked):
        """The shapes of the ops that the page shows, in its order."""
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chromium'}"]
        url = f"{out.as_uri()}#{asked}"
        done = subprocess.run([CHROMIUM, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [cells[4] for _, hidden, cells in Page(done.stdout).tables["ops"][1:] if not hidden]

    return shown


@pytest.mark.parametrize(
    ("asked", "shapes"),
    [
        ("", ["9x8", "10x8", "7x8"]),
        ("words=RMS_norm+h100", ["9x8", "10x8"]),
        ("words=nothing", []),
        ("losing", ["10x8"]),
        ("older", ["7x8"]),
        ("sort=ops.6", ["9x8", "7x8", "10x8"]),  # by microseconds, as numbers
        ("sort=ops.6&descending", ["10x8", "7x8", "9x8"]),
        ("words=rms&sort=ops.11", ["10x8", "9x8"]),  # by the ratio
    ],
)
def test_a_browser_filters_and_sorts_the_rows(browse, asked, shapes):
    assert browse(asked) == shapes


def test_the_template_is_in_the_package():
    assert (Path(page.__file__).parent / "page.html.j2").is_file()
