"""The documentation's tables of what Rooftile was tested with: versions of packages, and GPUs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rooftile.bench.docs.tables import NO_RESULTS, markdown

ROOT = Path(__file__).resolve().parents[4]


def versions(results: Path) -> str:
    """The oldest version of each package that users need which is accepted, and the newest that was tested."""
    project, _, _ = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\npeers = ")
    accepted = dict(re.findall(r'"([\w.-]+)>=([\w.]+)', project))
    newest: dict[str, dict[str, str]] = {}
    for build in ("", "-cpu", "-default"):
        text = (ROOT / "tools" / f"constraints{build}.txt").read_text(encoding="utf-8")
        for name, version in re.findall(r"^([\w.-]+)<=([\w.]+)", text, re.MULTILINE):
            newest.setdefault(name, {})[build] = version
    newest.setdefault("triton", {}).setdefault("-default", "the one that PyTorch brings")
    names = [
        "torch",
        "triton",
        "transformers",
        *sorted((accepted.keys() & newest) - {"torch", "triton", "transformers"}),
    ]
    cells = []
    for name in names:
        found = newest[name]
        both = (found.get("-cpu", found.get("", "–")), found.get("-default", found.get("", "–")))
        cells.append((f"`{name}`", accepted[name], *both))
    columns = (
        "package",
        "at least",
        "newest tested, with PyTorch's CPU build",
        "newest tested, with its default build",
    )
    return markdown(columns, cells)


def gpus(results: Path) -> str:
    """The GPUs of results/, with the versions of their newest runs."""
    newest: dict[str, dict[str, object]] = {}
    for path in sorted(results.glob("*/*/*.json")):
        meta = json.loads(path.read_text(encoding="utf-8")).get("meta", {})
        if "gpu" in meta and str(meta["date"]) > str(newest.get(meta["gpu"], {}).get("date", "")):
            newest[meta["gpu"]] = meta
    columns = ("GPU", "driver", "PyTorch", "Triton", "newest run")
    cells = [
        (gpu, str(m["driver"]), str(m["torch"]), str(m["triton"]), str(m["date"])[:10])
        for gpu, m in sorted(newest.items())
    ]
    return markdown(columns, cells) if cells else NO_RESULTS
