"""GPUs side by side: only rows that all have count."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.bench.docs.gpus import table
from rooftile.bench.docs.tables import NO_RESULTS
from rooftile.bench.rows import Row, compare, write_json

pytestmark = pytest.mark.nightly

META = {
    "driver": "1", "torch": "2.11", "triton": "3.6", "rooftile": "0.1", "commit": "abc", "date": "2026-01-01T00:00:00Z",
    "roof_copy_gbs": 3000.0, "roof_read_gbs": 3100.0, "roof_tflops": 700.0,
}  # fmt: skip


def _write(folder: Path, gpu: str, times: dict[str, tuple[float, float]]) -> None:
    rows = []
    for shape, (ours, peer) in times.items():
        group = [Row("rope", "forward", shape, "bf16", "rooftile", us=ours, roof_fraction=0.9)]
        group += [Row("rope", "forward", shape, "bf16", "compile", us=peer)]
        compare(group)
        rows += group
    write_json(folder / gpu.lower() / "rowwise" / "rope.json", {**META, "gpu": f"NVIDIA {gpu}"}, rows)


def test_one_gpu_has_nothing_beside_it(tmp_path: Path) -> None:
    _write(tmp_path, "H100", {"4x8": (1.0, 2.0)})
    assert table(tmp_path) == NO_RESULTS


def test_rows_that_one_lacks_do_not_count(tmp_path: Path) -> None:
    _write(tmp_path, "H100", {"4x8": (2.0, 4.0), "4x16": (8.0, 8.0), "only here": (1.0, 9.0)})
    _write(tmp_path, "H200", {"4x8": (1.0, 3.0), "4x16": (4.0, 4.0)})
    line = re.sub(" +", " ", table(tmp_path).splitlines()[-1])
    assert line == "| `rope` | forward | 2 | 1.41 | 0.90 | 1.73 | 0.90 | 2.00 |"
