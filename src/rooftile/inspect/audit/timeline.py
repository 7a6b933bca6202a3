"""A picture of one decoding step: what ran on the GPU, by the block of the model that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rooftile.inspect.audit.kernels import BLOCKS
from rooftile.inspect.audit.trace import Phase


def draw(path: Path, steps: Mapping[str, Phase]) -> None:
    """A lane for each implementation, by its name; all have one scale.

    Raises:
        ValueError: a phase has no times of a step.
    """
    from rooftile.bench import charts

    if empty := [name for name, phase in steps.items() if not phase.last_step]:
        raise ValueError(
            f"{', '.join(empty)}: not every step has as many kernels and copies, so there is no step to draw"
        )
    blocks = [b for b in BLOCKS if any(block == b for phase in steps.values() for _, _, block in phase.last_step)]
    with charts.page() as plt:
        figure, ax = plt.subplots(figsize=(10, 0.9 + 0.8 * len(steps)), layout="constrained")
        colours = plt.get_cmap("tab10").colors
        for lane, phase in enumerate(steps.values()):
            for block in blocks:
                spans = [(begin, end - begin) for begin, end, of in phase.last_step if of == block]
                ax.broken_barh(
                    spans, (lane - 0.35, 0.7), color=colours[blocks.index(block)], label=block if lane == 0 else None
                )
        ax.set_yticks(range(len(steps)), steps)
        ax.invert_yaxis()
        ax.set_xlabel("us from the first kernel of the step")
        figure.legend(loc="outside lower center", ncols=len(blocks))
        charts.save(figure, path, {name: phase.last_step for name, phase in steps.items()})
        plt.close(figure)
