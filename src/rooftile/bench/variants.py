"""The implementations to compare: ours, eager PyTorch, torch.compile of it, the case's baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rooftile import runtime
from rooftile.bench import twins
from rooftile.bench.rows import OURS
from rooftile.cases import OpCase, Peer, Point, Unsupported

# Eager PyTorch and its fused calls run anywhere; the others are written for a GPU, and compiling for a CPU takes long.
ANYWHERE = ("eager", "torch")


@dataclasses.dataclass(frozen=True)
class Variant:
    """An implementation at one point: a function with the op's arguments, or the reason why there is none.

    `mutates` names the inputs that it overwrites. `status` is one of `rows.STATUSES`.
    """

    name: str
    function: Callable[..., Any] | None
    mutates: tuple[str, ...] = ()
    status: str = "ok"
    message: str = ""


def peer_names(case: OpCase) -> tuple[str, ...]:
    return ("eager", "compile", *(p.name for p in case.peers))


def check_names(cases: Sequence[OpCase], names: Sequence[str] | None) -> None:
    """Raise ValueError if none of the cases has a requested baseline."""
    named = [(*peer_names(case), *(p.name for p in twins.peers(case))) for case in cases]
    known = list(dict.fromkeys(name for some in named for name in some))
    unknown = [n for n in names or () if n not in known]
    if unknown:
        raise ValueError(f"unknown baseline {', '.join(unknown)}; known baselines: {', '.join(known)}")


def compiled(function: Callable[..., Any], reruns: bool = True) -> Callable[..., Any]:
    """torch.compile of a function, for a single shape. `reruns`: a backward runs several times after one forward."""
    import torch._functorch.config

    # A backward that may overwrite what forward saved can't be run again and again.
    torch._functorch.config.donated_buffer = not reruns
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def _build(peer: Peer, point: Point) -> Variant:
    try:
        return Variant(peer.name, peer.build(point), peer.mutates)
    except ImportError as error:
        return Variant(peer.name, None, status="absent", message=f"not installed ({error})")
    except Unsupported as error:
        return Variant(peer.name, None, status="unsupported", message=str(error))
    except Exception as error:  # a baseline's own error is shown in its row
        return Variant(peer.name, None, status="error", message=f"{type(error).__name__}: {error}")


def variants(case: OpCase, point: Point, names: Sequence[str] | None = None, reruns: bool = True) -> list[Variant]:
    """Ours first, then the named baselines, or all but the CUDA C++ twin. One that can't run here has the reason.

    `reruns`: as `compiled`.
    """
    own = (Peer("eager", lambda _: case.eager), Peer("compile", lambda _: compiled(case.eager, reruns)))
    found = [Variant(OURS, case.function, case.mutates)]
    for peer in (*own, *case.peers, *(() if names is None else twins.peers(case))):
        if names is not None and peer.name not in names:
            continue
        if names is None and runtime.MODE is runtime.Mode.INTERPRETER and peer.name not in ANYWHERE:
            found.append(
                Variant(peer.name, None, status="unsupported", message="needs a GPU, or to be named by --peers")
            )
        else:
            found.append(_build(peer, point))
    return found
