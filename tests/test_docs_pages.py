"""The documentation: its examples run as they stand, its links lead somewhere, and the layout names all there is."""

import importlib
import inspect
import re

import pages
import pytest
from pages import ROOT

import rooftile

EXAMPLES = [e for page in (pages.README, *pages.DOCS) for e in pages.examples(page)]
LAYOUT = (ROOT / "docs" / "contributing" / "layout.md").read_text(encoding="utf-8")
REFERENCE = [page for page in pages.DOCS if page.parent.name == "reference"]


@pytest.mark.parametrize("guides", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_examples_run_as_they_stand(guides):
    """Those of the README and the guides, and nightly those of other pages. One test for many, so that one worker of
    pytest-xdist starts the process that they share."""
    chosen = [e for e in EXAMPLES if not e.not_run and e.name.startswith(("README", "docs/guides/")) == guides]
    assert {name: said for name, said in pages.failures(chosen).items() if said} == {}


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.not_run], ids=lambda e: e.name)
def test_an_example_that_is_not_run_is_python(example):
    compile(example.code, example.name, "exec")


# Elsewhere a line such as `rooftile check [OP...]` is a synopsis.
@pytest.mark.parametrize("line", pages.commands(ROOT / "docs" / "reference" / "cli.md"))
def test_a_command_parses_as_it_stands(line):
    pages.parse(line)


@pytest.mark.parametrize("page", [pages.README, ROOT / "CONTRIBUTING.md", *pages.DOCS], ids=pages.name_of)
def test_a_link_leads_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


FIGURE = re.compile(
    r"\d ?(?:ns|us|ms|s|[KMGT]B|[KMGT]iB|GB/s|TB/s|TFLOP/s|tokens/s|times|percent)(?![\w/])"
    r"|\d ?[%×](?! ?\d)|\dx(?![\w/])"
)
# What is defined, set, or computed from shapes.
DEFINED = {
    "docs/guides/generate.md": ["which takes up to 128 MiB beside the model"],
    "docs/guides/losses.md": ["take 3.9 GiB in bfloat16"],
    "docs/guides/train.md": ["20 GiB. The fused head holds", "a quarter of them in bfloat16: 1 GiB"],
    "docs/kernels/attention.md": [
        "At T = 8192 that is 128 MiB",
        "output, and 4 to 8 times B H T² elements",
        "In a test it is within 1 percent",
    ],
    "docs/kernels/gemm.md": ["dequantizes the weight, up to 128 MiB at a time"],
    "docs/kernels/losses.md": ["By default it is 512 MiB or 1024 tokens", "0.5 GiB at 8192 tokens and 128256 classes"],
    "docs/kernels/trade-offs.md": ["N / 64 times from the L2"],
    "docs/performance/gaps.md": ["caches of 64 to 128 MiB"],
    "docs/performance/host.md": ["the larger of 1.5 times the baseline and 8 us more", "of 2 times\nand 15 us more"],
    "docs/performance/index.md": ["the rows that move 128 MiB or more"],
    "docs/performance/method.md": [
        "A pass is at most 2.5 ms or one call long",
        "steps fit into 16 and 24 GiB",
        "the larger of 1.5 times its baseline and 8 us more (2 times and 15 us with gradients)",
    ],
}


def figures(page):
    """The lines outside of tables, which are made from results/, with a time, a rate, a size or a ratio."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"<!-- rooftile:table .*?<!-- /rooftile:table -->|```.*?```|`[^`\n]+`", "", text, flags=re.DOTALL)
    for phrase in DEFINED.get(pages.name_of(page), []):
        assert phrase in prose
        prose = prose.replace(phrase, "")
    return [line for line in prose.splitlines() if FIGURE.search(line)]


@pytest.mark.parametrize("page", [pages.README, *pages.DOCS], ids=pages.name_of)
def test_a_measured_figure_is_generated(page):
    assert figures(page) == []


@pytest.mark.parametrize(
    "line",
    ["67 MB of 600", "0.4% of it", "under 0.1 % of a step", "5 ms", "1.5x", "2.5× faster", "23.1 GiB", "9 times"],
)
def test_a_figure_is_seen(line, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"A step takes {line}.\n", encoding="utf-8")
    assert figures(page) == [f"A step takes {line}."]
    page.write_text(f"<!-- rooftile:table x -->\n{line}\n<!-- /rooftile:table -->\n4 × 4096 tokens\n", encoding="utf-8")
    assert figures(page) == []


@pytest.mark.parametrize("folder", re.findall(r"^    ((?:src|tests|tools)\S*)", LAYOUT, re.MULTILINE))
def test_the_layout_names_what_is_there(folder):
    assert (ROOT / folder).exists()


def test_the_layout_names_all_there_is():
    package = ROOT / "src" / "rooftile"
    entries = {p.name + "/" if p.is_dir() else p.name for p in package.iterdir() if p.is_file() or any(p.glob("*.py"))}
    named = set(re.findall(r"^    src/rooftile/(\S+)", LAYOUT, re.MULTILINE))
    assert named == entries - {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}


def test_the_reference_has_every_public_name_once():
    named = [
        n for page in REFERENCE for n in re.findall(r"^::: rooftile\.(\S+)$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(named) == len(set(named))
    assert {n for n in named if "." not in n} == set(rooftile.__all__) - {"__version__"}
    for module, _, name in (n.rpartition(".") for n in named if "." in n):  # public in a module of its own
        assert name in importlib.import_module(f"rooftile.{module}").__all__


@pytest.mark.parametrize(
    "page", [p for p in REFERENCE if re.search(r"^(:::|<!-- site:) ", p.read_text("utf-8"), re.M)], ids=pages.name_of
)
def test_a_reference_page_says_in_a_checkout_where_the_built_one_is(page):
    assert f"`make site`, then `site/reference/{page.stem}/index.html`" in page.read_text("utf-8")


@pytest.mark.parametrize("page", [p for p in REFERENCE if "\n::: " in p.read_text("utf-8")], ids=pages.name_of)
def test_a_reference_page_says_in_a_checkout_where_its_docstrings_are(page):
    before, name = re.search(r"(.*)\n\n::: rooftile\.(\S+)\n", page.read_text("utf-8")).groups()
    assert before.startswith("Each name below stands for its docstring")
    assert f"help(rooftile.{name})" in before


def _wrong_names(value):
    section = re.search(r"^Args:\n((?:    .*\n|\n)+)", inspect.getdoc(value) + "\n", re.MULTILINE)
    if section is None:
        return set()
    items = re.findall(r"^    ([*\w]+(?:, [*\w]+)*)(?: \(.*\))?:", section[1], re.MULTILINE)
    return {n.lstrip("*") for item in items for n in item.split(", ")} - set(inspect.signature(value).parameters)


@pytest.mark.parametrize("name", sorted(set(rooftile.__all__) - {"__version__"}))
def test_a_docstring_names_only_parameters_that_there_are(name):
    """A group of parameters is one item, `cos, sin: ...`, so the site's own check is off (mkdocs.yml)."""
    value = getattr(rooftile, name)
    values = {name: value}
    if inspect.ismodule(value):
        own = {n: v for n, v in vars(value).items() if getattr(v, "__module__", "").startswith(value.__name__)}
        values = {n: v for n, v in own.items() if not n.startswith("_") and inspect.getdoc(v) and callable(v)}
        assert values
    assert {n: wrong for n, v in values.items() if (wrong := _wrong_names(v))} == {}
