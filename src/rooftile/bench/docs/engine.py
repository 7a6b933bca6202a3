"""The documentation's table of a decoding step, kernel by kernel: from the engine's plan, and the roofs in results/."""

from __future__ import annotations

import json
from pathlib import Path

from rooftile.bench.docs.tables import markdown
from rooftile.bench.report import number
from rooftile.bench.workloads import MODELS, read

MODEL, BATCH, CONTEXT = "llama-3-8b", 1, 512


def read_roofs(results: Path) -> dict[str, float]:
    """The read roof of each GPU in GB/s, from its latest run."""
    found: dict[str, tuple[str, float]] = {}
    for path in sorted(results.glob("*/*/*.json")):
        meta = json.loads(path.read_text(encoding="utf-8")).get("meta", {})
        if not meta.get("roof_read_gbs"):
            continue
        latest = (str(meta.get("date", "")), float(meta["roof_read_gbs"]))
        gpu = str(meta.get("gpu", path.parts[-3]))
        found[gpu] = max(found.get(gpu, latest), latest)
    return {gpu: roof for gpu, (_, roof) in sorted(found.items())}


def decode_step(results: Path) -> str:
    """A greedy step in bfloat16: the bytes that each kernel moves, and their time at the read roof."""
    from rooftile.engine.config import ModelConfig
    from rooftile.engine.plan import plan

    title, values = read(MODEL, MODELS)
    p = plan(ModelConfig.from_hf(values), BATCH, CONTEXT)
    roofs = read_roofs(results)
    columns = (
        "what", "op", "of", "reads>", "writes>", "MFLOP>", "launches>", "times>", "moved in a step>",
        *(f"at least, us ({gpu})>" for gpu in roofs),
    )  # fmt: skip

    def least(nbytes: int) -> list[str]:
        times = (nbytes / roof / 1e3 for roof in roofs.values())
        return [number(us, 4) if us >= 0.01 else "under 0.01" for us in times]

    cells = []
    for s in p.steps:
        nbytes = (s.read + s.written) * s.times
        op = f"`{s.op.removesuffix('_')}`" if s.op else "the cache's own"
        flops = number(s.flops / 1e6) if s.flops else "–"
        each = [size(s.read), size(s.written), flops, str(s.launches), str(s.times)]
        cells.append([s.name, op, s.shape, *each, size(nbytes), *least(nbytes)])
    cells.append(["**the step**", *[""] * 5, str(p.launches), "", size(p.nbytes), *least(p.nbytes)])
    said = ", ".join(f"{roof:.0f} GB/s ({gpu})" for gpu, roof in roofs.items())
    note = f"Read roofs, as measured: {said}." if roofs else "No read roof has been measured yet."
    head = f"{title}, bfloat16, batch {BATCH}, {CONTEXT} tokens in the cache; launches as chosen for an H100. {note}"
    return "\n".join([head, "", markdown(columns, cells)])


def size(nbytes: int) -> str:
    """Bytes in a decimal unit, with up to three digits before the point."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
