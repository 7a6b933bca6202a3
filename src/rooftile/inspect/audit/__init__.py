"""`rooftile audit`: every GPU kernel of prefill and decode, with its time and where it came from."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console

from rooftile import runtime
from rooftile.inspect.audit import report as audit_report
from rooftile.inspect.audit import timeline as audit_timeline
from rooftile.inspect.audit.kernels import Kind
from rooftile.inspect.audit.profile import NSYS, Part, captured, profiled, recorded
from rooftile.inspect.audit.trace import Phase

if TYPE_CHECKING:
    from rooftile.bench.e2e.model import Model
    from rooftile.engine.engine import Engine
    from rooftile.engine.speculation import Speculate

Impl = Literal["engine", "serve", "cuda", "patched"]
IMPLS: tuple[Impl, ...] = ("engine", "serve", "cuda", "patched")
SUITE = "audit"
NEW = 2  # tokens generated with sampling: one of the prompt, one of a step

# Compute kernels that are not Rooftile's and are accepted all the same: what torch.compile made of the patched model's
# own code is in Triton, too.
ACCEPTED: dict[Impl, tuple[Kind, ...]] = {"engine": (), "serve": (), "cuda": (), "patched": ("Inductor",)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is audited.

    Attributes:
        model: a name, a config.json, or a folder; with `weights` a checkpoint folder, whose weights are loaded.
        impl: by default the engine, and on a GPU the CUDA path beside it.
        prompt, steps: tokens of each prompt, and decoding steps after it.
        speculate, tensor_parallel: of the serving engine alone.
        layers: cut the model to its first layers.
        trace: the profiler's trace is written there; by Nsight Systems, after the audit, where its suffix is .nsys-rep.
        timeline: a picture of a decoding step of each implementation, in SVG.
        results: <gpu>/audit/<model>.json and .svg are written there; of the serving engine no .svg.
    """

    model: str
    weights: Path | None = None
    impl: Impl | None = None
    batch: int = 1
    prompt: int = 512
    steps: int = 8
    quantize: str | None = None
    speculate: Speculate | None = None
    tensor_parallel: int = 1
    dtype: torch.dtype = torch.bfloat16
    layers: int | None = None
    trace: Path | None = None
    timeline: Path | None = None
    json: Path | None = None
    results: Path | None = None


@dataclasses.dataclass
class Audit:
    """What one implementation ran."""

    impl: Impl
    phases: list[Phase]
    absent: str = ""  # why there is nothing

    @property
    def accepted(self) -> tuple[Kind, ...]:
        return ACCEPTED[self.impl]

    @property
    def faults(self) -> list[str]:
        """Why it does not pass, a line each."""
        found = [self.absent] if self.absent else []
        for phase in self.phases:
            found += [f"{phase.name}: {problem}" for problem in phase.problems]
            found += [
                f"{phase.name}: {row.name} is {row.kind}, {row.count} runs" for row in phase.foreign(self.accepted)
            ]
        return found

    def as_json(self) -> dict[str, Any]:
        phases = [
            {
                **{k: v for k, v in dataclasses.asdict(phase).items() if k != "rows"},
                "blocks": {name: {"count": n, "us": us} for name, (n, us) in phase.by_block().items()},
                "kernels": [dataclasses.asdict(row) for row in phase.rows],
            }
            for phase in self.phases
        ]
        return {"impl": self.impl, "passed": not self.faults, "faults": self.faults, "phases": phases}


def engine_parts(engine: Engine, prompt: int, steps: int) -> list[Part]:
    """Prefill and decode of a full batch, greedy; and what `generate` does with everything that sampling has."""
    runner, vocab = engine.runner, engine.config.vocab
    prompts = [[(7 * i + 3 * t) % vocab for t in range(prompt)] for i in range(engine.max_batch)]
    from rooftile.engine.runner import Sampling

    def reset() -> None:
        for sequence in runner.cache.sequences:
            runner.free(sequence)

    def prefill() -> None:
        runner.prefill(prompts, [Sampling()] * len(prompts))

    def decode() -> None:
        for _ in range(steps):
            runner.decode()

    def generate() -> None:
        uneven = [p[: max(1, len(p) - i)] for i, p in enumerate([*prompts, prompts[0]])]
        engine.generate(
            uneven, max_new_tokens=NEW, temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, repetition_penalty=1.1,
            logprobs=True, ignore_eos=True,
        )  # fmt: skip

    return [
        Part("prefill", prefill, before=reset),
        Part("decode", decode, steps),
        Part("generate, sampled", generate, before=reset),
    ]


def _parts(impl: Impl, model: Model, s: Settings) -> list[Part]:
    """The parts of an implementation, ready to run."""
    from rooftile.bench.e2e import cuda as e2e_cuda
    from rooftile.bench.e2e import hf as e2e_hf
    from rooftile.bench.e2e.paths import Absent
    from rooftile.bench.timer import clock
    from rooftile.engine.engine import Engine
    from rooftile.engine.runner import Runner
    from rooftile.inspect.audit.patched import Compiled

    if impl == "engine":
        runner = Runner(model.config, model.own, max_batch=s.batch, max_seq_len=s.prompt + s.steps + NEW)
        return engine_parts(Engine(model.config, model.own, None, runner), s.prompt, s.steps)
    numbers = torch.arange(s.batch * s.prompt, device=model.device)
    ids = (7 * numbers % model.config.vocab).view(s.batch, s.prompt)
    path: Any
    if impl == "cuda":
        path = e2e_cuda.CudaPath(model, ids, 2 * s.steps + NEW, clock(model.device), compiled=True)
    else:
        try:
            patched = e2e_hf.Models(model).model(True)
        except Absent as error:
            raise ValueError(f"--impl patched: {error}") from None
        path = Compiled(patched, ids, 2 * s.steps + NEW)
    with torch.no_grad():
        path.prepare()

    @torch.no_grad()
    def decode() -> None:
        for _ in range(s.steps):
            path.step()

    return [Part("prefill", torch.no_grad()(path.prefill), before=path.reset), Part("decode", decode, s.steps)]


def _audit(impl: Impl, build: Callable[[], Sequence[Part]], trace: Path | None) -> Audit:
    if runtime.MODE is runtime.Mode.GPU:
        if trace is not None and trace.suffix == NSYS:
            captured(build)
            return Audit(impl, [])
        # The compiler launches the kernels of a patched model itself, with nobody told.
        return Audit(impl, profiled(build, trace, strict=impl != "patched"))
    return Audit(impl, recorded(build))


def _serving(s: Settings) -> tuple[str, Audit]:
    """The model's name and the audit of what serves it."""
    from rooftile.bench.workloads import MODELS, read
    from rooftile.inspect.audit import serving

    if s.weights is not None and s.layers is not None:
        raise ValueError(
            f"--layers is {s.layers} for the checkpoint {s.weights}: where --impl is serve, --layers is accepted for "
            "random weights alone, of a --model"
        )
    if s.timeline is not None:
        others = ", ".join(impl for impl in IMPLS if impl != "serve")
        raise ValueError(
            f"--timeline is {s.timeline}, but --impl is serve, whose steps differ; it is accepted for --impl {others}"
        )
    title, values = read(s.model, MODELS, s.layers)
    page_size = 64 if runtime.MODE is runtime.Mode.GPU else 16  # the interpreter is slow
    with contextlib.ExitStack() as stack:

        def build() -> list[Part]:
            return serving.started(
                stack, s.weights or values, batch=s.batch, prompt=s.prompt, steps=s.steps, page_size=page_size,
                tensor_parallel=s.tensor_parallel, dtype=s.dtype, quantize=s.quantize, speculate=s.speculate,
            )  # fmt: skip

        return title, _audit("serve", build, s.trace)


def capture(s: Settings) -> None:
    """Run the phases of the implementation that was asked for, in the process under Nsight Systems."""
    if s.impl == "serve":
        _serving(s)
    else:
        _audits(s, measured=False)


def run(s: Settings, console: Console) -> int:
    """Audit, show and write. The exit code: 1 if the implementation that was asked for does not pass.

    Raises:
        ValueError: the model is not known, or what is asked for needs a GPU.
        ProfilerError: the trace is one of Nsight Systems, which is not installed or failed.
    """
    from rooftile.bench.info import check_results

    measured = runtime.MODE is runtime.Mode.GPU
    check_results(s.results, measured)
    if not measured:
        if s.impl not in (None, "engine", "serve"):
            raise ValueError(f"--impl {s.impl} needs a GPU: without one there is only the engine to audit")
        for name, path in (("--trace", s.trace), ("--timeline", s.timeline)):
            if path is not None:
                raise ValueError(f"{name} needs a GPU: without one there is no profile")
        console.print(
            "A profile needs a GPU, and there is none: audited is what the engine would ask of it, its launches and "
            "the ops of PyTorch beside them, in Triton's interpreter.",
            style="yellow",
        )
    by_nsys = None
    if s.trace is not None and s.trace.suffix == NSYS:
        from rooftile.inspect.audit import nsys

        by_nsys = nsys.find()  # before anything is measured
    here = s if by_nsys is None else dataclasses.replace(s, trace=None)
    if s.impl == "serve":
        title, audit = _serving(here)
        audits = [audit]
    else:
        title, audits = _audits(here, measured)
    audit_report.show(audits, console, measured)
    write(s, title, audits)
    if by_nsys is not None and s.trace is not None:
        _free()  # the other process loads the model, too
        nsys.record(by_nsys, s, s.trace)
        console.print(f"{s.trace}: written", markup=False, highlight=False, soft_wrap=True)
    return 1 if audits[0].faults else 0


def _free() -> None:
    """Give back the GPU's memory that what has been audited held."""
    gc.collect()
    torch.cuda.empty_cache()


def _audits(s: Settings, measured: bool) -> tuple[str, list[Audit]]:
    """The model's name, and the audits of what was asked for and of what stands beside it."""
    from rooftile.bench.e2e import model as e2e_model
    from rooftile.bench.run import brief
    from rooftile.bench.workloads import RANDOM

    for name, given in (("--speculate", s.speculate is not None), ("--tensor-parallel", s.tensor_parallel > 1)):
        if given:
            raise ValueError(f"{name} is an option of the serving engine: give --impl serve")
    weights = RANDOM if s.weights is None else str(s.weights)
    model = e2e_model.load(
        s.model, dtype=s.dtype, device=runtime.default_device(), quantize=s.quantize, layers=s.layers, weights=weights
    )

    def audit(impl: Impl, trace: Path | None) -> Audit:
        return _audit(impl, lambda: _parts(impl, model, s), trace)

    audits = [audit(s.impl or "engine", s.trace)]
    if s.impl is None and measured:
        _free()
        beside = None if s.trace is None else s.trace.with_name(f"{s.trace.stem}.cuda{s.trace.suffix}")
        try:
            audits.append(audit("cuda", beside))
        except Exception as error:  # what stands beside it is no reason to lose what was asked for
            audits.append(Audit("cuda", [], absent=f"left out: {brief(error)}"))
    return model.title, audits


def write(s: Settings, title: str, audits: Sequence[Audit]) -> None:
    """{"meta": {...}, "audits": [...]}, with every kernel of every phase; and pictures of a decoding step."""
    from rooftile.bench.info import machine
    from rooftile.bench.rows import gpu_slug, write_whole

    meta = machine()
    files, pictures = [s.json], [s.timeline]
    steps = {audit_report.TITLES[a.impl]: phase for a in audits for phase in a.phases if phase.name == "decode"}
    if s.results is not None:
        whose = None if s.impl == "engine" else s.impl
        guess = None if s.speculate is None else type(s.speculate).__name__.lower()
        ranks = f"tp{s.tensor_parallel}" if s.tensor_parallel > 1 else None
        name = "-".join(part for part in (title, s.quantize, whose, guess, ranks) if part)
        folder = s.results / gpu_slug(str(meta["gpu"])) / SUITE
        files.append(folder / f"{name}.json")
        if steps and all(phase.last_step for phase in steps.values()):
            pictures.append(folder / f"{name}.svg")
    asked = {"model": title, "batch": s.batch, "prompt": s.prompt, "steps": s.steps, "quantize": s.quantize}
    asked |= {"speculate": None if s.speculate is None else repr(s.speculate), "tensor_parallel": s.tensor_parallel}
    found = {"meta": {**meta, **asked}, "audits": [audit.as_json() for audit in audits]}
    for path in files:
        if path is not None:
            write_whole(path, json.dumps(found, indent=1) + "\n")
    for path in pictures:
        if path is not None:
            audit_timeline.draw(path, steps)
