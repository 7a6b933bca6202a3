"""One implementation's training steps, in a process of its own: nothing it patches or keeps in memory reaches another.

    echo '{"impl": "liger", ...}' | python -m rooftile.bench.training.worker

prints a line of JSON: what `Job` asks for, or the status of a row and the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftile import runtime
from rooftile.bench.rows import OURS

EAGER, COMPILE, LIGER = "eager", "compile", "liger"
# Words after our name are switches of `patch` to turn on.
OURS_ATTENTION, OURS_ALL, OURS_COMPILE = f"{OURS} attention", f"{OURS} attention linear", f"{OURS} compile"
OURS_LORA, OURS_ALL_LORA = f"{OURS} lora", f"{OURS_ALL} lora"
BATCHES = 4  # of random tokens, which the steps go through in turn
POINTS = 240  # of a memory timeline
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIMIZER = {"lr": 1e-4, "weight_decay": 0.1}


class Absent(Exception):
    """The implementation can't run here: not installed, or not for this model."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does.

    Attributes:
        impl: the implementation; "machine" for the metadata and the roofs of a run.
        config: of transformers, with `model_type`.
        lora: train adapters on frozen weights.
        batch, tokens: sequences of a step, and tokens of each.
        warmup, steps: steps before those that are timed, and those.
        timeline: record the memory of one more step.
        caps: instead of timing, find the largest batch whose steps fit into each of these bytes of memory, which
            increase; infinity is all memory.
    """

    impl: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    lora: bool = False
    batch: int = 1
    tokens: int = 8
    dtype: str = "bfloat16"
    warmup: int = 4
    steps: int = 20
    timeline: bool = False
    caps: Sequence[float] = ()


class Trainer:
    """A model with random weights, an optimizer, and batches of random tokens."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
        self.model, self.left = self._model()
        self.forward = torch.compile(self.model) if job.impl in (COMPILE, OURS_COMPILE) else self.model
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(job.impl, trained)
        self.ids = self._draw(job.batch)

    def _model(self) -> tuple[nn.Module, list[str]]:
        """The model as the implementation changes it, and what Rooftile left as it is."""
        from transformers import AutoConfig

        from rooftile.huggingface.random_model import random_model

        job, values = self.job, dict(self.job.config)
        config: Any = AutoConfig.for_model(values.pop("model_type"), **values, use_cache=False)
        self.vocabulary = config.vocab_size
        if job.impl == LIGER:
            _apply_liger(config.model_type)
        model: Any = random_model(config, dtype=getattr(torch, job.dtype), device=self.device).train()
        if job.lora:
            import peft

            # Adapters in the model's dtype: PEFT would keep them in float32 and convert at each call.
            lora = peft.LoraConfig(**LORA, target_modules=LORA_LAYERS, task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
        self.flops_of_a_sequence = _flops(model, config, job.tokens)
        if job.impl.partition(" ")[0] != OURS:
            return model, []
        from rooftile.huggingface import patch

        handle = patch(model, **dict.fromkeys(set(job.impl.split()[1:]) - {COMPILE}, True))
        return model, [str(left) for left in handle.left]

    def _draw(self, batch: int) -> list[Tensor]:
        numbers = torch.Generator().manual_seed(0)
        shape = (batch, self.job.tokens)
        drawn = [torch.randint(self.vocabulary, shape, generator=numbers) for _ in range(BATCHES)]
        return [ids.to(self.device) for ids in drawn]

    def step(self, i: int, mark: Callable[[str], None] = lambda phase: None) -> Tensor:
        """One step; its loss, on the device. `mark` is told each phase that has ended."""
        ids = self.ids[i % BATCHES]
        loss = self.forward(input_ids=ids, labels=ids).loss
        mark("forward")
        loss.backward()
        mark("backward")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimizer")
        return loss.detach()

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize(self.device)

    def measure(self) -> dict[str, Any]:
        """Times of the steps in microseconds, losses of all, and the most memory that was allocated."""
        since = time.perf_counter()
        losses = [self.step(0)]
        self.synchronize()
        first = time.perf_counter() - since
        losses += [self.step(i) for i in range(1, self.job.warmup)]
        self.synchronize()
        if self.module is None:
            times = []
            for i in range(self.job.steps):
                since = time.perf_counter()
                losses.append(self.step(self.job.warmup + i))
                times.append(1e6 * (time.perf_counter() - since))
            memory = {}
        else:
            self.module.reset_peak_memory_stats(self.device)
            events = [self.module.Event(enable_timing=True) for _ in range(self.job.steps + 1)]
            events[0].record()
            for i, event in enumerate(events[1:]):
                losses.append(self.step(self.job.warmup + i))
                event.record()
            self.synchronize()
            times = [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]
            memory = {
                "peak_bytes": int(self.module.max_memory_allocated(self.device)),
                "reserved_bytes": int(self.module.max_memory_reserved(self.device)),
            }
        return {
            "us": times,
            "losses": [float(loss) for loss in losses],
            "first_step_s": first,
            "flops": self.job.batch * self.flops_of_a_sequence,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "left": self.left,
            **memory,
        }

    def timeline(self) -> dict[str, Any]:
        """The memory of one step over its allocations: MiB, milliseconds on the host, and when each phase ended."""
        memory = torch.cuda.memory
        self.synchronize()
        allocated, start = self.module.memory_allocated(self.device), time.time()
        phases: dict[str, float] = {}

        def mark(phase: str) -> None:
            self.synchronize()
            phases[phase] = 1e3 * (time.time() - start)

        memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=1 << 20)
        try:
            self.step(0, mark)
            traces = memory._snapshot()["device_traces"]
        finally:
            memory._record_memory_history(enabled=None)
        events = traces[self.device.index or 0]
        return {**sampled(events, allocated, start), "phases": phases}

    def largest_batches(self) -> list[int]:
        """For each of the job's caps, the most sequences with which two steps fit; 0 if not even one does."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        found = [0]
        for cap in self.job.caps:
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))  # of the current device
            found.append(self._largest_batch(found[-1]))
        return found[1:]

    def _largest_batch(self, low: int, most: int = 512) -> int:
        """At least `low`, which fits."""
        high = max(1, 2 * low)
        while high <= most and self._fits(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _fits(self, batch: int) -> bool:
        self.ids = []
        try:
            self.ids = self._draw(batch)
            for i in range(2):  # the first step makes the optimizer's state
                self.step(i)
            self.synchronize()
            return True
        except torch.OutOfMemoryError:
            fits = False
        # Outside of the handler: the exception keeps the step's tensors alive.
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        self.module.empty_cache()
        return fits


def sampled(events: list[dict[str, Any]], allocated: int, start: float) -> dict[str, list[float]]:
    """At most `POINTS` points of the memory over allocations and frees; each the most of its share of them."""
    totals, when = [], []
    for event in events:
        change = {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"])
        if change is not None:
            allocated += change
            totals.append(allocated / 2**20)
            when.append(event.get("time_us", 1e6 * start) / 1e3 - 1e3 * start)
    stride = max(1, -(-len(totals) // POINTS))
    starts = range(0, len(totals), stride)
    most = [max(range(i, min(i + stride, len(totals))), key=totals.__getitem__) for i in starts]
    return {"mib": [totals[i] for i in most], "ms": [when[i] for i in most]}


def _apply_liger(model_type: str) -> None:
    """Liger's kernels in transformers' classes, before a model is made of them."""
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise Absent(f"not installed ({error})") from None
    if model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise Absent(f"Liger has no kernels for {model_type}")
    monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]()


def _optimizer(impl: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if impl.partition(" ")[0] == OURS:
        from rooftile.optim import AdamW

        return AdamW(params, **OPTIMIZER)  # type: ignore[arg-type]
    return torch.optim.AdamW(params, fused=True, **OPTIMIZER)  # type: ignore[arg-type]


def _flops(model: nn.Module, config: Any, tokens: int) -> int:
    """Of a sequence: GEMMs, two for each weight in the forward, its input's gradient and, where it is trained, its own;
    and causal attention, whose backward counts two and a half times its forward."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    gemms = sum((6 if w.requires_grad else 4) * tokens * w.numel() for w in weights)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    pairs = 0
    for kind in kinds:
        seen = min(tokens, config.sliding_window) if kind == "sliding_attention" else tokens
        pairs += seen * tokens - seen * (seen - 1) // 2
    return gemms + int(3.5 * 4 * pairs * config.num_attention_heads * head_dim)


def _machine(device: torch.device) -> dict[str, Any]:
    """The metadata of a run, with the roofs."""
    from rooftile.bench.info import machine, version
    from rooftile.bench.roof import measure_roofs
    from rooftile.bench.timer import clock

    timer = clock(device)
    roofs = measure_roofs(timer, device) if timer.measures else None
    found = {f"roof_{name}": getattr(roofs, name, None) for name in ("copy_gbs", "read_gbs", "tflops")}
    return {**machine(), **found, "transformers": version("transformers"), "peft": version("peft")}


def do(job: Job) -> dict[str, Any]:
    """What the job asks for; a failure is a status and a message."""
    device = runtime.default_device()
    if job.impl == "machine":
        return _machine(device)
    try:
        trainer = Trainer(job, device)
        if job.caps:
            return {"status": "ok", "batches": trainer.largest_batches()}
        found = {"status": "ok", **trainer.measure()}
        if job.timeline and trainer.module is not None:
            found["timeline"] = trainer.timeline()
        return found
    except Absent as error:
        return {"status": "absent", "message": str(error)}
    except torch.OutOfMemoryError as error:
        return {"status": "error", "message": f"out of memory: {str(error).partition('. GPU')[0]}"}
    except Exception as error:
        return {"status": "error", "message": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # libraries print too
        import transformers  # noqa: F401  # takes seconds, and may be done before the job comes

        found = do(Job(**json.loads(sys.stdin.read())))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
